"""A sliding-window service: so many requests per key in any span of a window.

    limiter = RateLimiter("redis://localhost")        # or a client of redis.asyncio; without any, the environment's URL
    result = await limiter.check("user-7")            # 100 in a minute, unless settings or the call say otherwise
    result.allowed, result.current_count, result.remaining, result.retry_after_seconds

Counts belong to the key alone; limit and window come with each call. A limit of 0 blocks. The server's clock counts,
and each decision is one call of one script. With "memory://" this process's memory counts instead, with the same
results.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Never, Self, SupportsIndex

from headgate._limiter_hot import key_of
from headgate.errors import InvalidInput, refuse, refuse_option
from headgate.lifecycle import Closable
from headgate.limits.numbers import LARGEST, whole
from headgate.limits.sliding_window import MAX_WINDOW_LIMIT
from headgate.stores.base import Store, WindowStore
from headgate.stores.urls import aclose_store, client_store, close_store, make_store

if TYPE_CHECKING:
    from headgate.stores.redis.client_urls import AsyncClient


@dataclass(frozen=True, slots=True)
class RateLimitResult:
    """The result of a check."""

    allowed: bool
    current_count: int
    """Requests in the window, with this one if it was allowed."""
    remaining: int
    """How many more would be allowed now; 0 when denied."""
    retry_after_seconds: int
    """0 when allowed; when denied, the seconds until the oldest request that counts leaves the window, rounded up.

    Where none counts, since the limit is 0, it is the length of the window: an earlier retry makes no sense.
    """
    degraded: bool = False
    """Whether the server was away, so that it was decided without it."""

    @classmethod
    def from_lua_result(cls, numbers: Sequence[int]) -> Self:
        """The result of the four numbers of a script: allowed (1 or 0), current count, remaining, retry after.

        >>> RateLimitResult.from_lua_result([0, 100, 0, 12]).retry_after_seconds
        12
        """
        if isinstance(numbers, (str, bytes)) or len(numbers) != 4:
            refuse("from_lua_result", "four whole numbers: allowed, count, remaining, retry after", numbers)
        allowed, count, remaining, retry_after = [whole("from_lua_result", number, least=0) for number in numbers]
        return cls(allowed == 1, count, remaining, retry_after)


@dataclass(frozen=True)
class RateLimitSettings:
    """The defaults of calls, and the store."""

    url: str = "redis://localhost:6379/0"
    default_limit: int = 100
    default_window_ms: int = 60_000
    prefix: str | None = "ratelimit:"
    """The prefix of stored keys; None for the store's own prefix followed by `windows:`."""
    on_failure: str = "local"
    timeout: float = 0.25

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "RateLimitSettings":
        """The settings that HEADGATE_REDIS_URL, HEADGATE_WINDOW_LIMIT, HEADGATE_WINDOW_MS, HEADGATE_WINDOW_PREFIX,
        HEADGATE_ON_FAILURE and HEADGATE_STORE_TIMEOUT give, and the defaults for the others."""
        given = os.environ if environment is None else environment
        default = cls()
        return cls(
            url=given.get("HEADGATE_REDIS_URL", default.url),
            default_limit=_number(given, "HEADGATE_WINDOW_LIMIT", default.default_limit),
            default_window_ms=_number(given, "HEADGATE_WINDOW_MS", default.default_window_ms),
            prefix=given.get("HEADGATE_WINDOW_PREFIX", default.prefix),
            on_failure=given.get("HEADGATE_ON_FAILURE", default.on_failure),
            timeout=_seconds(given, "HEADGATE_STORE_TIMEOUT", default.timeout),
        )


class RateLimiter(Closable):
    """Counts requests by key in a sliding window.

    `where` is a URL, a client of `redis.asyncio` (which the caller closes), or a store; without one the settings name
    the URL, and without settings the environment does. The key "user:123" is stored as `ratelimit:user:123`. A store
    keeps its own `timeout` and `on_failure`. A `MemoryStore` lends its clock and its `max_keys`: in memory each limiter
    counts for itself. A request for which there is no room is denied with a wait of a second; counts are never dropped
    to make room.
    """

    def __init__(
        self,
        where: "str | AsyncClient | Store | None" = None,
        settings: RateLimitSettings | None = None,
        **unknown: Never,
    ) -> None:
        for option in unknown:
            refuse_option("RateLimiter", ("where", "settings"), option, see="help(headgate.sliding.RateLimiter)")
        self.settings: Final = RateLimitSettings.from_environment() if settings is None else settings
        self._window(None, None)
        self._owns_store: Final = not isinstance(where, Store)
        self._store: Final = self._open(self.settings.url if where is None else where)
        self._counters: Final = self._store.windows(self.settings.prefix)

    def _open(self, where: object) -> WindowStore:
        failure = {"on_failure": self.settings.on_failure, "timeout": self.settings.timeout}
        store: object = where
        if isinstance(where, str):
            store = make_store("RateLimiter", where, **failure)
        elif self._owns_store:
            store = client_store("RateLimiter", where, **failure)
        if not isinstance(store, WindowStore):
            expected = "a URL, a client of redis.asyncio, or a store that counts windows, such as MemoryStore()"
            refuse("RateLimiter", expected, where)
        return store

    async def check(
        self, key: str, limit: SupportsIndex | None = None, window_ms: SupportsIndex | None = None
    ) -> RateLimitResult:
        """Let a request pass and count it, or deny it and count nothing."""
        most, span = self._window(limit, window_ms)
        allowed, used, remaining, wait, degraded = await self._counters.hit(key_of(key), most, span)
        return RateLimitResult(allowed, used, remaining, -(-wait // 1_000_000), degraded)

    async def get_counter(self, key: str, window_ms: SupportsIndex | None = None) -> int:
        """How many requests are in the window. Nothing is counted."""
        return await self._counters.count(key_of(key), *self._window(None, window_ms))

    async def reset_counter(self, key: str) -> bool:
        """Forget a key, and say whether there was anything to forget. Raises `StoreAway` while the server is."""
        return await self._counters.forget(key_of(key))

    def _window(self, limit: object, window_ms: object) -> tuple[int, int]:
        """The limit and the microseconds of a call."""
        own = self.settings
        where, given = ("default_limit", own.default_limit) if limit is None else ("limit", limit)
        most = whole(where, given, MAX_WINDOW_LIMIT, least=0)
        where, given = ("default_window_ms", own.default_window_ms) if window_ms is None else ("window_ms", window_ms)
        span = whole(where, given, LARGEST // 1000)
        return most, span * 1000

    def close(self) -> None:
        """Close the connections of threads, unless the store is the caller's own; in an event loop use `aclose`."""
        if self._owns_store:
            close_store(self._store)

    async def aclose(self) -> None:
        if self._owns_store:
            await aclose_store(self._store)


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name)
    if text is not None and not text.strip().isdecimal():
        raise InvalidInput(f"{name}: expected a whole number, got {text!r}")
    return default if text is None else int(text)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise InvalidInput(f"{name}: expected a number of seconds, got {text!r}") from None
