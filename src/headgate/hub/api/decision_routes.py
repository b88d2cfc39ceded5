"""Routes of the decision service: the sliding windows of `headgate.sliding`, for programs in any language."""

from dataclasses import replace
from typing import Annotated, Final

from msgspec import Meta, Struct

from headgate.errors import refuse
from headgate.hub.agents.counter_shares import CounterShares
from headgate.hub.api.routing import Access, Body, Call, Route
from headgate.sliding import RateLimiter, RateLimitResult, RateLimitSettings
from headgate.stores.base import Store

_MAX_KEY: Final = 512  # characters
Key = Annotated[str, Meta(min_length=1, max_length=_MAX_KEY)]
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


def counters(store: Store) -> RateLimiter:
    """The counters of all callers, under the store's prefix: apart from those of a `RateLimiter` on the same server."""
    return RateLimiter(store, replace(RateLimitSettings.from_environment(), prefix=None))


def _own(call: Call, key: str) -> str:
    """A key of the caller's own: callers share no counters. The length keeps names and keys apart."""
    return f"{len(call.agent)}:{call.agent}{key}"


async def _check(call: Call, windows: RateLimiter, shares: CounterShares) -> RateLimitResult:
    body: Check = call.body
    with shares.reserve(call.agent, body.key, body.window_ms):
        return await windows.check(_own(call, body.key), body.limit, body.window_ms)


def _key(call: Call) -> str:
    """The key in the path, if it is one that can be checked."""
    key = call.parts["key"]
    if not 0 < len(key) <= _MAX_KEY:
        refuse("key", f"1 to {_MAX_KEY} characters", key)
    return key


async def _counter(call: Call, windows: RateLimiter) -> CounterValue:
    key = _key(call)
    return CounterValue(key, await windows.get_counter(_own(call, key), call.query.window_ms))


async def _reset(call: Call, windows: RateLimiter, shares: CounterShares) -> CounterReset:
    key = _key(call)
    with shares.release(call.agent, key):
        return CounterReset(key, await windows.reset_counter(_own(call, key)))


_PATH: Final = "/v1/counters/{key}"
ROUTES: Final = (
    Route(
        "POST", "/v1/check", "post_check", Access.PROGRAM, _check,
        "check a request, and count it if it passes", body=Check,
    ),
    Route("GET", _PATH, "get_counter", Access.PROGRAM, _counter, "the present count", query=CounterQuery),
    Route("DELETE", _PATH, "delete_counter", Access.PROGRAM, _reset, "reset the count"),
)  # fmt: skip
