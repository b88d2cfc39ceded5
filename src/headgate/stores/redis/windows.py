"""Sliding windows in Redis whose limit and length come with each call.

A key is stored under a prefix and its own name, so that an operator finds it: "user:123" as `ratelimit:user:123`. It is
the only key of its counter, so it can't meet an auxiliary one, and a cluster has nothing to keep together.
"""

import hashlib
import re
from collections.abc import Awaitable, Callable
from struct import pack
from typing import Any, Final

from headgate.errors import StoreAway, refuse
from headgate.limits.numbers import LARGEST
from headgate.stores.base import WindowCount
from headgate.stores.redis.fallback import FallbackWindows
from headgate.stores.redis.keys import admin_prefix, encode
from headgate.stores.redis.protocol import Answer, ForeignData, Request

_LONGEST_KEY: Final = 512  # bytes; of longer ones the beginning and the digest are stored


class RedisWindows:
    """Counts in the server, or while it is away as the store's `on_failure` says."""

    def __init__(
        self,
        prefix: str,
        execute: Callable[[Request[Any]], Awaitable[Any]],
        log_error: Callable[[StoreAway | ForeignData], None],
        fallback: FallbackWindows,
    ) -> None:
        self._start: Final = encode(prefix)
        self._execute: Final = execute
        self._log_error: Final = log_error
        self._fallback: Final = fallback

    async def hit(self, key: str, most: int, span: int) -> WindowCount:
        return await self._ask(_Hit(self._stored(key), most, span), lambda: self._fallback.hit(key, most, span))

    async def count(self, key: str, most: int, span: int) -> int:
        return await self._ask(_Count(self._stored(key), most, span), lambda: self._fallback.count(key, most, span))

    async def _ask(self, request: Request[Answer], without: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer to a request, or the one without the server."""
        try:
            answer: Answer = await self._execute(request)
        except (StoreAway, ForeignData) as error:
            self._log_error(error)
            return await without()
        return answer

    async def forget(self, key: str) -> bool:
        dropped: bool = await self._execute(_Forget(self._stored(key)))
        await self._fallback.forget(key)  # not before: a call that fails must not refill the local share
        return dropped

    def _stored(self, key: str) -> bytes:
        """The stored form of a key. That of a long one is longer than all short ones, so it can't be the key of one."""
        stored = encode(key)
        if len(stored) > _LONGEST_KEY:
            beginning = encode(stored[:_LONGEST_KEY].decode("utf-8", "ignore"))  # no half of a character
            stored = beginning.ljust(_LONGEST_KEY, b"#") + hashlib.sha256(stored).hexdigest().encode()
        return self._start + stored


def check_prefix(name: str, prefix: object) -> None:
    """Refuse a prefix that can't be told from the key behind it."""
    if not isinstance(prefix, str) or not re.fullmatch(r"[^{}]+", prefix):
        refuse(name, "some text without braces", prefix)


def checked_prefix(prefix: str, own: str) -> str:
    """A prefix whose keys can't be keys that a store keeps under its own prefix."""
    check_prefix("prefix", prefix)
    for taken in (own, admin_prefix(own)):
        if taken.startswith(prefix) or prefix.startswith(taken):
            refuse("prefix", f"one that doesn't overlap with the store's own {taken!r}", prefix)
    return prefix


class _Hit(Request[WindowCount]):
    """One request to be counted."""

    def __init__(self, key: bytes, most: int, span: int) -> None:
        super().__init__(b"c" + _spec(most, span), [key], b"1")
        self._most: Final = most

    def read(self, row: list[int], at: int, now: int) -> int:
        used = row[at + 1]
        if row[at] == 1:
            self.answer = WindowCount(True, used, self._most - used, 0)
        else:
            self.answer = WindowCount(False, used, 0, row[at + 2])
        return at + 4


class _Count(Request[int]):
    """A look at a key's count."""

    def __init__(self, key: bytes, most: int, span: int) -> None:
        super().__init__(b"p" + _spec(most, span), [key], b"1")

    def read(self, row: list[int], at: int, now: int) -> int:
        self.answer = row[at + 1]
        return at + 4


class _Forget(Request[bool]):
    """A key to be dropped, with all that is in the longest window."""

    def __init__(self, key: bytes) -> None:
        super().__init__(b"f" + _spec(1, LARGEST), [key], b"")

    def read(self, row: list[int], at: int, now: int) -> int:
        self.answer = row[at] == 1
        return at + 1


def _spec(most: int, span: int) -> bytes:
    """The form for the script of a window whose wait is that for its oldest request."""
    return b"w" + pack("<3d", most, span, 1)
