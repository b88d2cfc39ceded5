"""Sliding windows in Redis whose limit and length come with each call."""

from collections.abc import Awaitable, Callable
from struct import pack
from typing import Any, Final

from headgate.errors import StoreAway
from headgate.limits.numbers import LARGEST
from headgate.limits.sliding_window import SlidingWindow
from headgate.stores.base import Ask, Verb, WindowCount
from headgate.stores.redis.fallback import Fallback
from headgate.stores.redis.protocol import FORMAT, ForeignData, Keys, Request

_ENDING: Final = f"}}w{FORMAT}:".encode()


class RedisWindows:
    """Counts in the server, or while it is away as the store's `on_failure` says."""

    def __init__(
        self,
        keys: Keys,
        execute: Callable[[Request[Any]], Awaitable[Any]],
        fallback_on: Callable[[StoreAway | ForeignData], Fallback],
    ) -> None:
        self._keys: Final = keys
        self._execute: Final = execute
        self._fallback_on: Final = fallback_on

    async def hit(self, key: str, window: SlidingWindow) -> WindowCount:
        try:
            hit: WindowCount = await self._execute(_Hit(self._keys, key, window))
        except (StoreAway, ForeignData) as error:
            return self._without(error, Verb.CHECK, key, window)
        return hit

    async def count(self, key: str, window: SlidingWindow) -> int:
        try:
            count: int = await self._execute(_Count(self._keys, key, window))
        except (StoreAway, ForeignData) as error:
            return self._without(error, Verb.PEEK, key, window).used
        return count

    async def forget(self, key: str) -> bool:
        dropped: bool = await self._execute(_Forget(self._keys, key))
        return dropped

    def _without(self, error: StoreAway | ForeignData, verb: Verb, key: str, window: SlidingWindow) -> WindowCount:
        decision = self._fallback_on(error).apply(verb, [Ask("", key, window, 1)], 0, None, "")
        return WindowCount(bool(decision), window.capacity - decision.remaining, decision.retry_us or 0)


class _Hit(Request[WindowCount]):
    """One request to be counted."""

    def __init__(self, keys: Keys, key: str, window: SlidingWindow) -> None:
        super().__init__(keys.spec(b"c", _spec(*window.integers())), [keys.root(key) + _ENDING], b"1")

    def read(self, row: list[int], at: int, now: int) -> int:
        allowed = row[at] == 1
        self.answer = WindowCount(allowed, row[at + 1], 0 if allowed else row[at + 2])
        return at + 4


class _Count(Request[int]):
    """A look at a key's count."""

    def __init__(self, keys: Keys, key: str, window: SlidingWindow) -> None:
        super().__init__(keys.spec(b"p", _spec(*window.integers())), [keys.root(key) + _ENDING], b"1")

    def read(self, row: list[int], at: int, now: int) -> int:
        self.answer = row[at + 1]
        return at + 4


class _Forget(Request[bool]):
    """A key to be dropped, with all that is in the longest window."""

    def __init__(self, keys: Keys, key: str) -> None:
        super().__init__(keys.spec(b"f", _spec(1, LARGEST)), [keys.root(key) + _ENDING], b"")

    def read(self, row: list[int], at: int, now: int) -> int:
        self.answer = row[at] == 1
        return at + 1


def _spec(most: int, span: int) -> bytes:
    """The form for the script of a window whose wait is that for its oldest request."""
    return b"w" + pack("<3d", most, span, 1)
