"""The rate limiters on a Redis or Valkey server, each set up and called as in its own documentation.

The library's own function is called, at most with a limit bound to it: no wrapper adds cost.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import limits
import limits.aio.storage
import limits.aio.strategies
import limits.storage
import limits.strategies
import redis
import throttled
import throttled.asyncio

from benchmarks.contenders import HEADGATE, LIMITS_FIXED, LIMITS_MOVING, THROTTLED, Contender, Quota, contender
from headgate import Limiter, SlidingWindow, TokenBucket
from headgate.events import Degraded
from headgate.stores.base import RecordedViolation
from headgate.stores.redis import RedisStore

GET: Final = "a bare GET"
HEADGATE_SLIDING: Final = "headgate, sliding window"
LIMITS_AIO: Final = "limits.aio, fixed window"
THROTTLED_AIO: Final = "throttled.asyncio, token bucket"

DRAW_AHEAD: Final = 0.05
"""The share of a bucket that a process of headgate draws ahead, where it does."""


@dataclass(frozen=True)
class AsyncContender:
    """A rate limiter, ready to be called from tasks."""

    check: Callable[[str], Awaitable[object]]
    passes: Callable[[str], Awaitable[bool]]
    """Check one key and return the outcome."""


Build = Callable[[str, list[Quota]], Contender]
AsyncBuild = Callable[[str, Quota, int | None], AsyncContender]


def bare_get(url: str, quotas: list[Quota]) -> Contender:
    """The cost of one round trip, for a value of the size of headgate's bucket."""
    client = redis.Redis.from_url(url, protocol=2)
    set_key, get = client.set, client.get

    def passes(key: str) -> bool:
        set_key(key, bytes(16))
        return get(key) is not None

    return contender(get, passes)


def headgate(url: str, quotas: list[Quota], **options: Any) -> Contender:
    limits = [TokenBucket(quota.size, quota.refill, quota.seconds) for quota in quotas]
    check = Limiter(limits, store=_store(url, **options)).check
    return contender(check, lambda key: bool(check(key)))


def headgate_leased(url: str, quotas: list[Quota]) -> Contender:
    return headgate(url, quotas, draw_ahead=DRAW_AHEAD)


def headgate_sliding(url: str, quotas: list[Quota]) -> Contender:
    check = Limiter([SlidingWindow(quota.size, quota.seconds) for quota in quotas], store=_store(url)).check
    return contender(check, lambda key: bool(check(key)))


def limits_fixed_window(url: str, quotas: list[Quota]) -> Contender:
    return _limits(limits.strategies.FixedWindowRateLimiter(limits.storage.RedisStorage(url)), quotas)


def limits_moving_window(url: str, quotas: list[Quota]) -> Contender:
    return _limits(limits.strategies.MovingWindowRateLimiter(limits.storage.RedisStorage(url)), quotas)


def _limits(strategy: limits.strategies.RateLimiter, quotas: list[Quota]) -> Contender:
    items = [_item(quota) for quota in quotas]
    first, last = items[0], items[-1]
    hit = strategy.hit
    if len(items) == 1:
        return contender(partial(hit, first), partial(hit, first))

    def both(key: str) -> bool:
        return hit(first, key) and hit(last, key)

    return contender(both, both)


def throttled_py(url: str, quotas: list[Quota]) -> Contender:
    (quota,) = quotas
    limit = throttled.Throttled(
        using=throttled.RateLimiterType.TOKEN_BUCKET.value, quota=_quota(quota), store=throttled.RedisStore(server=url)
    ).limit
    return contender(limit, lambda key: not limit(key).limited)


def headgate_async(url: str, quota: Quota, connections: int | None) -> AsyncContender:
    """It ignores `connections`: it needs only a few."""
    check = Limiter(TokenBucket(quota.size, quota.refill, quota.seconds), store=_store(url)).acheck

    async def passes(key: str) -> bool:
        return bool(await check(key))

    return AsyncContender(check, passes)


def limits_aio(url: str, quota: Quota, connections: int | None) -> AsyncContender:
    options: dict[str, Any] = {} if connections is None else {"max_connections": connections}
    storage = limits.aio.storage.RedisStorage(f"async+{url}", implementation="redispy", **options)
    hit = partial(limits.aio.strategies.FixedWindowRateLimiter(storage).hit, _item(quota))
    return AsyncContender(hit, hit)


def throttled_asyncio(url: str, quota: Quota, connections: int | None) -> AsyncContender:
    options = {} if connections is None else {"CONNECTION_POOL_KWARGS": {"max_connections": connections}}
    limit = throttled.asyncio.Throttled(
        using=throttled.RateLimiterType.TOKEN_BUCKET.value,
        quota=_quota(quota),
        store=throttled.asyncio.RedisStore(server=url, options=options),
    ).limit

    async def passes(key: str) -> bool:
        return not (await limit(key)).limited

    return AsyncContender(limit, passes)


def _item(quota: Quota) -> limits.RateLimitItem:
    return limits.RateLimitItemPerSecond(quota.size, quota.seconds)


def _quota(quota: Quota) -> throttled.Quota:
    return throttled.per_duration(timedelta(seconds=quota.seconds), limit=quota.refill, burst=quota.size)


def _store(url: str, **options: Any) -> RedisStore:
    store = RedisStore(url, **options)
    store.subscribe(_note_outage)
    return store


def _note_outage(event: Degraded | RecordedViolation) -> None:
    """Note each outage: only decisions of the server may be measured."""
    if isinstance(event, Degraded) and event.degraded:
        OUTAGES.append(event.reason)


OUTAGES: Final[list[str]] = []
"""Why headgate lost the server, each time: its figures are void then."""

TASKS: Final[dict[str, AsyncBuild]] = {
    HEADGATE: headgate_async,
    LIMITS_AIO: limits_aio,
    THROTTLED_AIO: throttled_asyncio,
}
THREAD: Final[dict[str, Build]] = {
    GET: bare_get,
    HEADGATE: headgate,
    LIMITS_FIXED: limits_fixed_window,
    THROTTLED: throttled_py,
}
SEVERAL_LIMITS: Final = (HEADGATE, LIMITS_FIXED)
PROCESSES: Final[dict[str, Build]] = {
    HEADGATE: headgate_leased,
    LIMITS_FIXED: limits_fixed_window,
    THROTTLED: throttled_py,
}
MEMORY: Final[dict[str, Build]] = {
    HEADGATE: headgate,
    HEADGATE_SLIDING: headgate_sliding,
    LIMITS_FIXED: limits_fixed_window,
    LIMITS_MOVING: limits_moving_window,
    THROTTLED: throttled_py,
}
HIT_LOGS: Final = (HEADGATE_SLIDING, LIMITS_MOVING)
"""Contenders that keep every hit."""
