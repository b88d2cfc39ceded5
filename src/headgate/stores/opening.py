"""Stores by what users name them with: nothing for this process's memory, or a URL."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from headgate.errors import HeadgateError, StoreAway
from headgate.inputs import refuse
from headgate.stores import Store
from headgate.stores.memory import MemoryStore

_log = logging.getLogger("headgate")


def close_store(store: Store) -> None:
    """Close a store that has something to close."""
    close: Callable[[], None] | None = getattr(store, "close", None)
    if close is not None:
        close()


async def aclose_store(store: Store) -> None:
    """`close_store` for an event loop."""
    aclose: Callable[[], Awaitable[None]] | None = getattr(store, "aclose", None)
    if aclose is not None:
        await aclose()


def open_store(where: str, given: object, **settings: Any) -> Store:
    """The store that somebody means. A server that can't be used is refused; one that is away may come back."""
    if given is None:
        return MemoryStore()
    if isinstance(given, str) and "://" in given:
        try:
            from headgate.stores.redis import RedisStore
        except ImportError as error:
            raise HeadgateError(
                f"{where}: expected redis-py for a store at a URL, got: {error}; pip install 'headgate[redis]'"
            ) from error
        store = RedisStore(given, **settings)
        try:
            store.verify()
        except StoreAway as away:
            _log.error("%s: starting without the server: %s", where, away)
        return store
    if not callable(getattr(given, "apply", None)):
        refuse(where, "a store such as MemoryStore(), or a URL such as redis://localhost", given)
    return given  # type: ignore[return-value]
