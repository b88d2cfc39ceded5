"""A sliding-window service: so many requests per key in any span of a window.

    limiter = RateLimiter("redis://localhost")        # or RateLimiter(), with settings from the environment
    result = await limiter.check("user-7")            # 100 in a minute, unless settings or the call say otherwise
    result.allowed, result.current_count, result.remaining, result.retry_after_seconds

What is counted belongs to the key alone; limit and window are judged anew by each call. The server's clock counts, and
each decision is one call of one script. With "memory://" this process's memory counts instead, with the same results.
"""

import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from struct import pack
from typing import Final, Protocol, SupportsIndex

from headgate.errors import InvalidInput, StoreAway, refuse
from headgate.lifecycle import Closable
from headgate.limits.decision import Decision
from headgate.limits.numbers import LARGEST, whole
from headgate.limits.sliding_window import MAX_WINDOW_LIMIT, SlidingWindow
from headgate.stores.base import Ask, Store, Verb
from headgate.stores.memory import MemoryStore
from headgate.stores.redis import RedisStore
from headgate.stores.redis.protocol import FORMAT, ForeignData, Keys, Request

MEMORY: Final = "memory://"
"""The URL that stands for this process's memory."""

_MOST_KEYS: Final = 1_000_000  # in memory, or fewer if its store takes fewer
_MOST_REQUESTS: Final = 10_000_000  # in memory, of all keys: 80 MB
_LOOKED_AT: Final = 3  # keys that a check in memory looks at besides its own, whether they can be dropped
_ENDING: Final = f"}}w{FORMAT}:".encode()


@dataclass(frozen=True, slots=True)
class RateLimitResult:
    """What came of a check."""

    allowed: bool
    current_count: int
    """Requests in the window, with this one if it was allowed."""
    remaining: int
    """How many more would be allowed now; 0 when denied."""
    retry_after_seconds: int
    """0 when allowed; when denied, the seconds until the oldest request that counts leaves the window, rounded up."""


@dataclass(frozen=True)
class RateLimitSettings:
    """What holds where a call says nothing else."""

    url: str = "redis://localhost:6379/0"
    limit: int = 100
    window_ms: int = 60_000
    prefix: str = "ratelimit:"
    on_failure: str = "local"
    timeout: float = 0.25

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "RateLimitSettings":
        """The settings that HEADGATE_REDIS_URL, HEADGATE_WINDOW_LIMIT, HEADGATE_WINDOW_MS, HEADGATE_WINDOW_PREFIX,
        HEADGATE_ON_FAILURE and HEADGATE_STORE_TIMEOUT give, and the defaults for the others."""
        given = os.environ if environment is None else environment
        ordinary = cls()
        return cls(
            url=given.get("HEADGATE_REDIS_URL", ordinary.url),
            limit=_number(given, "HEADGATE_WINDOW_LIMIT", ordinary.limit),
            window_ms=_number(given, "HEADGATE_WINDOW_MS", ordinary.window_ms),
            prefix=given.get("HEADGATE_WINDOW_PREFIX", ordinary.prefix),
            on_failure=given.get("HEADGATE_ON_FAILURE", ordinary.on_failure),
            timeout=_seconds(given, "HEADGATE_STORE_TIMEOUT", ordinary.timeout),
        )


class RateLimiter(Closable):
    """Counts requests by key in a sliding window.

    `where` is a URL, a `RedisStore`, or a `MemoryStore`, whose clock and `max_keys` hold; without one the settings say,
    and without settings the environment does. In memory each limiter counts for itself. When it has no room for another
    request it denies it, to be tried again in a second: what is counted is never dropped for it.
    """

    def __init__(self, where: str | Store | None = None, settings: RateLimitSettings | None = None) -> None:
        self.settings: Final = RateLimitSettings.from_environment() if settings is None else settings
        self._windows: Final[dict[tuple[int, int], SlidingWindow]] = {}
        self._window(None, None)
        self._owned: Final = where is None or isinstance(where, str)
        self._counts: Final = self._open(self.settings.url if where is None else where)

    def _open(self, where: str | Store) -> "_Counts":
        if where == MEMORY:
            return _InMemory(MemoryStore())
        if isinstance(where, MemoryStore):
            return _InMemory(where)
        if isinstance(where, RedisStore):
            return _InRedis(where)
        if not isinstance(where, str):
            refuse("RateLimiter where", "a URL, a RedisStore or a MemoryStore", where)
        own = self.settings
        return _InRedis(RedisStore(where, prefix=own.prefix, on_failure=own.on_failure, timeout=own.timeout))

    async def check(
        self, key: str, limit: SupportsIndex | None = None, window_ms: SupportsIndex | None = None
    ) -> RateLimitResult:
        """Let a request pass and count it, or deny it and count nothing."""
        window = self._window(limit, window_ms)
        return await self._counts.hit(_key(key), window)

    async def get_counter(self, key: str, window_ms: SupportsIndex | None = None) -> int:
        """How many requests are in the window. Nothing is counted."""
        return await self._counts.count(_key(key), self._window(None, window_ms))

    async def reset_counter(self, key: str) -> bool:
        """Forget a key, and say whether there was anything to forget. Raises `StoreAway` while the server is."""
        return await self._counts.forget(_key(key))

    def _window(self, limit: object, window_ms: object) -> SlidingWindow:
        most = whole("limit", self.settings.limit if limit is None else limit, MAX_WINDOW_LIMIT)
        span = whole("window_ms", self.settings.window_ms if window_ms is None else window_ms, LARGEST // 1000)
        found = self._windows.get((most, span))
        if found is None:
            if len(self._windows) > 1000:
                self._windows.clear()
            found = self._windows[most, span] = SlidingWindow(most, Fraction(span, 1000))
        return found

    def close(self) -> None:
        """Close the connections of threads, unless the store is the caller's own; in an event loop use `aclose`."""
        if self._owned:
            self._counts.close()

    async def aclose(self) -> None:
        if self._owned:
            await self._counts.aclose()


class _Counts(Protocol):
    """What is counted, somewhere."""

    async def hit(self, key: str, window: SlidingWindow) -> RateLimitResult: ...

    async def count(self, key: str, window: SlidingWindow) -> int: ...

    async def forget(self, key: str) -> bool: ...

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


class _InMemory:
    """Counts in this process, as the script does in the server (`window.lua`)."""

    def __init__(self, store: MemoryStore) -> None:
        self._store: Final = store
        self._most_keys: Final = min(store.max_keys, _MOST_KEYS)
        self._keys: Final = Keys(MEMORY)  # so that a long key is kept by its digest
        self._lock: Final = threading.Lock()
        self._logs: Final[OrderedDict[bytes, _Log]] = OrderedDict()
        self._requests = 0  # how many all logs have room for

    async def hit(self, key: str, window: SlidingWindow) -> RateLimitResult:
        root, (most, span) = self._keys.root(key), window.counted()
        with self._lock:
            now = self._store.now()
            self._look_around(now)
            log = self._find(root, now)
            used = 0 if log is None else log.used(now, span)
            if used >= most:
                assert log is not None
                return RateLimitResult(False, used, 0, -(-log.frees(now, span) // 1_000_000))
            if self._requests >= _MOST_REQUESTS or (log is None and len(self._logs) >= self._most_keys):
                return RateLimitResult(False, used, 0, 1)
            if log is None:
                log = self._logs[root] = _Log()
            self._requests += log.add(now, span)
            return RateLimitResult(True, used + 1, most - used - 1, 0)

    async def count(self, key: str, window: SlidingWindow) -> int:
        with self._lock:
            now = self._store.now()
            log = self._find(self._keys.root(key), now)
            return 0 if log is None else log.used(now, window.counted()[1])

    async def forget(self, key: str) -> bool:
        root = self._keys.root(key)
        with self._lock:
            found = self._find(root, self._store.now()) is not None
            if found:
                self._requests -= len(self._logs.pop(root).times)
            return found

    def _find(self, root: bytes, now: int) -> "_Log | None":
        """The log of a key. One that no window reaches any more is dropped, as its key in a server expires."""
        log = self._logs.get(root)
        if log is None or not log.gone(now):
            return log
        self._requests -= len(self._logs.pop(root).times)
        return None

    def _look_around(self, now: int) -> None:
        """Look at a few keys, one after the other by and by, and drop those that nothing is counted for."""
        for _ in range(min(_LOOKED_AT, len(self._logs))):
            root = next(iter(self._logs))
            self._logs.move_to_end(root)
            self._find(root, now)

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


class _Log:
    """When each request of a key was made, and the longest window that one of them was judged by."""

    __slots__ = ("_first", "_horizon", "times")

    def __init__(self) -> None:
        self.times: Final = array("q")
        self._first = 0  # those before it have left the longest window
        self._horizon = 0

    def used(self, now: int, span: int) -> int:
        return len(self.times) - self._start(now, span)

    def frees(self, now: int, span: int) -> int:
        """How long until the oldest that is in the window has left it."""
        return self.times[self._start(now, span)] + span - now

    def gone(self, now: int) -> bool:
        """Whether all have left the longest window."""
        return self.times[-1] + self._horizon <= now

    def add(self, now: int, span: int) -> int:
        """Count a request, let go of those that have left, and say by how much the log has grown."""
        before, self._horizon = len(self.times), max(self._horizon, span)
        self._first = self._start(now, self._horizon)
        if self._first * 2 > before:  # so each is moved once at most on average
            del self.times[: self._first]
            self._first = 0
        self.times.append(max(now, self.times[-1]) if self.times else now)  # a clock that stepped back stands still
        return len(self.times) - before

    def _start(self, now: int, span: int) -> int:
        """The first that is in the window."""
        return bisect_right(self.times, now - span, self._first)


class _InRedis:
    """Counts in a server, or while it is away as the store's `on_failure` says."""

    def __init__(self, store: RedisStore) -> None:
        self._store: Final = store

    async def hit(self, key: str, window: SlidingWindow) -> RateLimitResult:
        try:
            return await self._store.aask(_Hit(self._store.keys, key, window))
        except (StoreAway, ForeignData) as error:
            return _without(self._store.decide_without(error, Verb.CHECK, [Ask("", key, window, 1)]))

    async def count(self, key: str, window: SlidingWindow) -> int:
        try:
            return await self._store.aask(_Count(self._store.keys, key, window))
        except (StoreAway, ForeignData) as error:
            decision = self._store.decide_without(error, Verb.PEEK, [Ask("", key, window, 1)])
            return _without(decision).current_count

    async def forget(self, key: str) -> bool:
        return await self._store.aask(_Forget(self._store.keys, key))

    def close(self) -> None:
        self._store.close()

    async def aclose(self) -> None:
        await self._store.aclose()


class _Hit(Request[RateLimitResult]):
    """One request to be counted."""

    def __init__(self, keys: Keys, key: str, window: SlidingWindow) -> None:
        self._limit = window.capacity
        super().__init__(keys.spec(b"c", _spec(*window.counted())), [keys.root(key) + _ENDING], b"1")

    def read(self, row: list[int], at: int, now: int) -> int:
        allowed, used, frees = row[at] == 1, row[at + 1], row[at + 2]
        wait = 0 if allowed else -(-frees // 1_000_000)
        self.answer = RateLimitResult(allowed, used, max(self._limit - used, 0), wait)
        return at + 4


class _Count(Request[int]):
    """A look at what is counted."""

    def __init__(self, keys: Keys, key: str, window: SlidingWindow) -> None:
        super().__init__(keys.spec(b"p", _spec(*window.counted())), [keys.root(key) + _ENDING], b"1")

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
    """How the script is told of a window, whose wait is that for the oldest in it."""
    return b"w" + pack("<3d", most, span, 1)


def _without(decision: Decision) -> RateLimitResult:
    """What is said when the server is away."""
    wait = -(-(decision.retry_us or 0) // 1_000_000)
    left = decision.remaining if decision else 0
    return RateLimitResult(bool(decision), decision.limit.capacity - decision.remaining, left, wait)


def _key(key: object) -> str:
    if not isinstance(key, str):
        refuse("key", "a string", key)
    return key


def _number(given: Mapping[str, str], name: str, ordinary: int) -> int:
    text = given.get(name)
    if text is not None and not text.strip().isdecimal():
        raise InvalidInput(f"{name}: expected a whole number, got {text!r}")
    return ordinary if text is None else int(text)


def _seconds(given: Mapping[str, str], name: str, ordinary: float) -> float:
    text = given.get(name)
    try:
        return ordinary if text is None else float(text)
    except ValueError:
        raise InvalidInput(f"{name}: expected a number of seconds, got {text!r}") from None
