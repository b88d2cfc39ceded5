"""What is said to bad input."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headgate import InvalidInput
from headgate.hub.errors import RequestError


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The text with which a call is refused."""
    with pytest.raises(InvalidInput) as caught:
        call(*arguments, **options)
    return str(caught.value)


async def request_error(work: Awaitable[object], text: str = "") -> tuple[int, str]:
    """The status and error with which the hub refuses something. The detail contains the text."""
    with pytest.raises(RequestError) as caught:
        await work
    assert text in caught.value.detail
    return caught.value.status, caught.value.error
