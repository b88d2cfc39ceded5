"""Calls of a store that the flows of a gate yield, for threads and for event loops."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


class StoreCall(NamedTuple):
    """A step of a flow: call a method of the store, or its async twin."""

    method: Callable[..., Any]
    twin: Callable[..., Any]
    arguments: tuple[Any, ...]


def call_store(call: StoreCall) -> Any:
    return call.method(*call.arguments)


def acall_store(call: StoreCall) -> Awaitable[Any]:
    found: Awaitable[Any] = call.twin(*call.arguments)
    return found
