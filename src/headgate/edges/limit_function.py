"""Limits that depend on who asks: a user's function returns them."""

import asyncio
import logging
import reprlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

from headgate.errors import HeadgateError, InvalidInput
from headgate.limits.decision import Limit
from headgate.limits.notation import limit_of

_log = logging.getLogger("headgate")

T = TypeVar("T")

_MOST_LIMITS: Final = 1000  # that are remembered of a function; then all are found anew
_LONGEST_TEXT: Final = 1000  # characters of a limit: it may come from a caller, and is kept and quoted in errors
_FUNCTION_SECONDS: Final = 10.0  # for an async function, so that no request hangs


class LimitFunction(Generic[T]):
    """A user's function that returns a limit or its text, and what counts each limit, as `make` makes it.

    Each text is parsed once, as long as there aren't too many.
    """

    def __init__(self, where: str, function: Callable[..., object], make: Callable[[Limit], T]) -> None:
        self.where: Final = where
        self.function: Final = function
        self._make: Final = make
        self._made: Final[dict[Limit, T]] = {}
        self._by_text: Final[dict[str, T]] = {}  # the same; one limit may have several texts
        self._warned = False

    def find(self, given: object) -> T:
        """The counter of the limit that the function has returned."""
        found = self._by_text.get(given) if type(given) is str else None
        if found is not None:
            return found
        limit = given if isinstance(given, Limit) else self._parse(given)
        found = self._made.get(limit)
        if found is None:
            if len(self._made) >= _MOST_LIMITS:
                self._made.clear()  # no count is lost: the store has them, by their limit
                self._by_text.clear()
                self._warn()
            found = self._made[limit] = self._make(limit)
        if type(given) is str:
            if len(self._by_text) >= _MOST_LIMITS:
                self._by_text.clear()
            self._by_text[given] = found
        return found

    def _parse(self, given: object) -> Limit:
        if (size := _size(given)) > _LONGEST_TEXT:
            raise InvalidInput(
                f"{self.where}: expected a function that returns a limit or its text, of at most {_LONGEST_TEXT}"
                f" characters, got {size}: {reprlib.repr(given)}"
            )
        try:
            return limit_of("limit", given)
        except InvalidInput as error:
            raise InvalidInput(f"{self.where}: expected a function that returns a limit or its text; {error}") from None

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: the function has returned %d different limits; requests with different limits count apart, so one"
                " that returns a new limit for each request limits nothing",
                self.where,
                _MOST_LIMITS,
            )


def _size(given: object) -> int:
    """The characters of a limit, or of several in a list, where a limit itself is one."""
    if isinstance(given, str):
        return len(given)
    return sum(map(_size, given)) if isinstance(given, (list, tuple)) else 1


async def in_time(where: str, found: Awaitable[Any]) -> Any:
    """Await the result of a user's function, for a bounded time."""
    timeout = asyncio.timeout(_FUNCTION_SECONDS)
    try:
        async with timeout:
            return await found
    except TimeoutError:
        if not timeout.expired():
            raise
        raise HeadgateError(
            f"{where}: expected a function that returns within {_FUNCTION_SECONDS:g} s; it was cancelled, and nothing"
            " is counted"
        ) from None
