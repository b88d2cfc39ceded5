"""A sliding-window service on Redis: so many requests per key in any span of a window.

    limiter = RateLimiter("redis://localhost")        # or RateLimiter(), with settings from the environment
    result = await limiter.check("user-7")            # 100 in a minute, unless settings or the call say otherwise
    result.allowed, result.current_count, result.remaining, result.retry_after_seconds

What is counted belongs to the key alone; limit and window are judged anew by each call. The server's clock counts, and
each decision is one call of one script.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from struct import pack
from typing import Final, SupportsIndex

from headgate.closing import Closing
from headgate.core import Decision
from headgate.errors import InvalidInput, StoreAway
from headgate.inputs import LARGEST, refuse, whole
from headgate.stores import Ask, Verb
from headgate.stores.redis import RedisStore
from headgate.stores.redis.requests import FORMAT, ForeignData, Forget, Form, Keys, Request
from headgate.windows import MAX_WINDOW_LIMIT, SlidingWindow

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


class RateLimiter(Closing):
    """Counts requests by key in a sliding window.

    `where` is a URL or a `RedisStore`; without one the settings say, and without settings the environment does.
    """

    def __init__(self, where: str | RedisStore | None = None, settings: RateLimitSettings | None = None) -> None:
        self.settings: Final = RateLimitSettings.from_environment() if settings is None else settings
        self._windows: Final[dict[tuple[object, object], SlidingWindow]] = {}
        self._window(None, None)
        self._owned: Final = not isinstance(where, RedisStore)
        self._store: Final = (
            where
            if isinstance(where, RedisStore)
            else RedisStore(
                self.settings.url if where is None else where,
                prefix=self.settings.prefix,
                on_failure=self.settings.on_failure,
                timeout=self.settings.timeout,
            )
        )

    async def check(
        self, key: str, limit: SupportsIndex | None = None, window_ms: SupportsIndex | None = None
    ) -> RateLimitResult:
        """Let a request pass and count it, or deny it and count nothing."""
        window = self._window(limit, window_ms)
        ask = Ask("", _key(key), window, 1)
        try:
            return await self._store.aask(_Hit(self._store.keys, ask))
        except (StoreAway, ForeignData) as error:
            return _without(self._store.decide_without(error, Verb.CHECK, [ask]))

    async def get_counter(self, key: str, window_ms: SupportsIndex | None = None) -> int:
        """How many requests are in the window. Nothing is counted."""
        ask = Ask("", _key(key), self._window(None, window_ms), 1)
        try:
            return await self._store.aask(_Count(self._store.keys, ask))
        except (StoreAway, ForeignData) as error:
            return _without(self._store.decide_without(error, Verb.PEEK, [ask])).current_count

    async def reset_counter(self, key: str) -> bool:
        """Forget a key, and say whether there was anything to forget. Raises `StoreAway` while the server is."""
        window = self._window(None, None)
        form = Form("", window, "")
        form.spec = _spec(window, LARGEST)
        return await self._store.aask(Forget(self._store.keys, "", _key(key), window, form))

    def _window(self, limit: object, window_ms: object) -> SlidingWindow:
        found = self._windows.get((limit, window_ms))
        if found is None:
            most = whole("limit", self.settings.limit if limit is None else limit, MAX_WINDOW_LIMIT)
            span = whole("window_ms", self.settings.window_ms if window_ms is None else window_ms, LARGEST // 1000)
            if len(self._windows) > 1000:
                self._windows.clear()
            found = self._windows[limit, window_ms] = SlidingWindow(most, Fraction(span, 1000))
        return found

    def close(self) -> None:
        """Close the connections of threads, unless the store is the caller's own; in an event loop use `aclose`."""
        if self._owned:
            self._store.close()

    async def aclose(self) -> None:
        if self._owned:
            await self._store.aclose()


class _Hit(Request[RateLimitResult]):
    """One request to be counted."""

    def __init__(self, keys: Keys, ask: Ask) -> None:
        assert isinstance(ask.limit, SlidingWindow)
        self._limit = ask.limit.capacity
        super().__init__(keys.spec(b"c", _spec(ask.limit)), [keys.root(ask.key) + _ENDING], b"1")

    def read(self, row: list[int], at: int, now: int) -> int:
        allowed, used, frees = row[at] == 1, row[at + 1], row[at + 2]
        wait = 0 if allowed else -(-frees // 1_000_000)
        self.answer = RateLimitResult(allowed, used, max(self._limit - used, 0), wait)
        return at + 4


class _Count(Request[int]):
    """A look at what is counted."""

    def __init__(self, keys: Keys, ask: Ask) -> None:
        assert isinstance(ask.limit, SlidingWindow)
        super().__init__(keys.spec(b"p", _spec(ask.limit)), [keys.root(ask.key) + _ENDING], b"1")

    def read(self, row: list[int], at: int, now: int) -> int:
        self.answer = row[at + 1]
        return at + 4


def _spec(window: SlidingWindow, span: int | None = None) -> bytes:
    most, own = window.counted()
    return b"w" + pack("<3d", most, own if span is None else span, 1)


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
