"""Routes of the decision service: the sliding windows of `headgate.sliding`, for programs in any language."""

from dataclasses import replace
from typing import Annotated, Final

from msgspec import Meta, Struct

from headgate.hub.api.routing import Body, Call, Route, Who
from headgate.hub.errors import RequestError
from headgate.limits.clock import Clock
from headgate.sliding import RateLimiter, RateLimitResult, RateLimitSettings
from headgate.stores.base import Store

_SWEEP: Final = 100_000  # new keys until expired ones are dropped
Key = Annotated[str, Meta(min_length=1, max_length=512)]
Limit = Annotated[int, Meta(ge=0, le=1_000_000)]
Window = Annotated[int, Meta(ge=1, le=31_536_000_000, description="milliseconds, up to a year")]


class Check(Body):
    """A request to count; without a limit or window, the defaults apply."""

    key: Key
    limit: Limit | None = None
    window_ms: Window | None = None


class CounterQuery(Body):
    window_ms: Window | None = None


class CounterValue(Struct):
    key: str
    current_count: int


class CounterReset(Struct):
    key: str
    reset: bool
    """Whether there was anything to reset."""


class CounterShares:
    """The keys that each agent counts at present, bounded, so that none takes all the store's room.

    The admin's are not bounded.
    """

    def __init__(self, clock: Clock, most: int, default_window_ms: int) -> None:
        self._clock, self._most, self._default_window_ms = clock, most, default_window_ms
        self._ends: Final[dict[str, dict[str, int]]] = {}  # by agent: each key, and when it is no longer counted
        self._added = 0  # since expired keys were dropped

    def take(self, agent: str, key: str, window_ms: int | None) -> None:
        """Count a key of an agent, or refuse a new one where the agent has too many."""
        if not agent:
            return
        own, now = self._ends.setdefault(agent, {}), self._clock.now()
        if key not in own:
            if len(own) >= self._most:
                own = self._ends[agent] = _unexpired(own, now)
            if len(own) >= self._most:
                detail = f"expected at most {self._most} keys in use at a time, got another; wait, or reset one"
                raise RequestError(409, "too_many_counters", detail)
            self._added += 1
            if self._added >= _SWEEP:
                self._sweep(now)
                own = self._ends.setdefault(agent, {})
        window = self._default_window_ms if window_ms is None else window_ms
        own[key] = max(own.get(key, 0), now + window * 1000)

    def drop(self, agent: str, key: str) -> None:
        """A key was reset."""
        self._ends.get(agent, {}).pop(key, None)

    def _sweep(self, now: int) -> None:
        self._added = 0
        for agent, own in list(self._ends.items()):
            self._ends[agent] = _unexpired(own, now)
            if not self._ends[agent]:
                del self._ends[agent]


def _unexpired(ends: dict[str, int], now: int) -> dict[str, int]:
    return {key: end for key, end in ends.items() if end > now}


def counters(store: Store) -> RateLimiter:
    """The counters of all callers, under the store's prefix: apart from those of a `RateLimiter` on the same server."""
    return RateLimiter(store, replace(RateLimitSettings.from_environment(), prefix=None))


def _own(call: Call, key: str) -> str:
    """A key of the caller's own: callers share no counters. The length keeps names and keys apart."""
    return f"{len(call.agent)}:{call.agent}{key}"


async def _check(call: Call, windows: RateLimiter, shares: CounterShares) -> RateLimitResult:
    body: Check = call.body
    shares.take(call.agent, body.key, body.window_ms)
    return await windows.check(_own(call, body.key), body.limit, body.window_ms)


async def _counter(call: Call, windows: RateLimiter) -> CounterValue:
    key = call.parts["key"]
    return CounterValue(key, await windows.get_counter(_own(call, key), call.query.window_ms))


async def _reset(call: Call, windows: RateLimiter, shares: CounterShares) -> CounterReset:
    key = call.parts["key"]
    was_counted = await windows.reset_counter(_own(call, key))
    shares.drop(call.agent, key)
    return CounterReset(key, was_counted)


_PATH: Final = "/v1/counters/{key}"
ROUTES: Final = (
    Route(
        "POST", "/v1/check", "post_check", Who.PROGRAM, _check, RateLimitResult,
        "check a request, and count it if it passes", body=Check,
    ),
    Route("GET", _PATH, "get_counter", Who.PROGRAM, _counter, CounterValue, "the present count", query=CounterQuery),
    Route("DELETE", _PATH, "delete_counter", Who.PROGRAM, _reset, CounterReset, "reset the count"),
)  # fmt: skip
