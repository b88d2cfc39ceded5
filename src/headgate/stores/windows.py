"""Sliding windows in this process's memory whose limit and length come with each call."""

from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Final

from headgate.lifecycle import new_lock
from headgate.limits.sliding_window import WindowLog
from headgate.stores.base import WindowCount

_MOST_KEYS: Final = 1_000_000
_MOST_ENTRIES: Final = 10_000_000  # of all keys: 160 MB
_LONGEST_KEY: Final = 512  # characters; of longer ones the digest is stored
_SWEPT: Final = 3  # keys that a request looks at besides its own, to drop those that no window reaches
_NO_ROOM: Final = 1_000_000  # microseconds: the wait of a request for which there is no room


class MemoryWindows:
    """Counts as the script of `RedisStore` does (`window.lua`). Nothing is ever dropped to make room."""

    def __init__(self, now: Callable[[], int], max_keys: int) -> None:
        self._now: Final = now
        self._max_keys: Final = min(max_keys, _MOST_KEYS)
        self._lock: Final = new_lock()
        self._logs: Final[OrderedDict[str | bytes, _KeyLog]] = OrderedDict()
        self._entries = 0  # of all logs

    async def hit(self, key: str, most: int, span: int) -> WindowCount:
        stored = _stored(key)
        with self._lock:
            now = self._now()
            self._sweep(now)
            fresh = _KeyLog()  # before anything is read: making it may run a finalizer that counts, too
            found = self._find(stored, now)
            used = 0 if found is None else found.log.used_after(now - span)
            if used >= most:
                oldest = now if found is None or not used else found.log.times[found.log.first_after(now - span)]
                return WindowCount(False, used, 0, oldest + span - now)
            if self._entries >= _MOST_ENTRIES or (found is None and len(self._logs) >= self._max_keys):
                return WindowCount(False, used, 0, _NO_ROOM)
            if found is None:
                found = self._logs[stored] = fresh
            self._entries += found.add(now, span)
            return WindowCount(True, used + 1, most - used - 1, 0)

    async def count(self, key: str, most: int, span: int) -> int:
        with self._lock:
            now = self._now()
            found = self._find(_stored(key), now)
            return 0 if found is None else found.log.used_after(now - span)

    async def forget(self, key: str) -> bool:
        stored = _stored(key)
        with self._lock:
            known = self._find(stored, self._now()) is not None
            if known:
                self._drop(stored)
            return known

    def _find(self, stored: str | bytes, now: int) -> "_KeyLog | None":
        """The log of a key. One that no window reaches any more is dropped, as its key in a server expires."""
        found = self._logs.get(stored)
        if found is None or not found.expired(now):
            return found
        self._drop(stored)
        return None

    def _drop(self, stored: str | bytes) -> None:
        self._entries -= len(self._logs.pop(stored).log.times)

    def _sweep(self, now: int) -> None:
        """Look at the next few keys, and drop those that no window reaches."""
        for _ in range(min(_SWEPT, len(self._logs))):
            stored = next(iter(self._logs))
            self._logs.move_to_end(stored)
            self._find(stored, now)


class _KeyLog:
    """The requests of a key, and the longest window that one of them was checked against."""

    __slots__ = ("_horizon", "log")

    def __init__(self) -> None:
        self.log: Final = WindowLog()
        self._horizon = 0

    def expired(self, now: int) -> bool:
        """Whether all requests have left the longest window."""
        return self.log.times[-1] + self._horizon <= now

    def add(self, now: int, span: int) -> int:
        """Count a request, drop those that have left the longest window, and say by how much the log has grown."""
        before = len(self.log.times)
        if span > self._horizon:
            self._horizon = span
        self.log.drop_until(now - self._horizon)
        self.log.add(now, 1)
        return len(self.log.times) - before


def _stored(key: str) -> str | bytes:
    """The form in which a key is stored: itself, or the digest of a long one."""
    return key if len(key) <= _LONGEST_KEY else sha256(key.encode("utf-8", "surrogatepass")).digest()
