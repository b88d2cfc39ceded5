"""headgate: exact rate limiting for platforms where many agents talk to one hub."""

from typing import TYPE_CHECKING

from headgate.clock import ManualClock
from headgate.core import Decision, Limit, Outcome
from headgate.errors import HeadgateError, InvalidInput, RateLimited, SessionClosed, StoreAway, StoreError
from headgate.gate import Gate
from headgate.limiter import Limiter
from headgate.limits import (
    BLOCKED,
    UNLIMITED,
    AllOf,
    TokenBucket,
    limited,
    per_day,
    per_hour,
    per_minute,
    per_second,
)
from headgate.notation import parse
from headgate.policy import Policy, PolicyError
from headgate.stores.memory import MemoryStore
from headgate.windows import SlidingWindow

if TYPE_CHECKING:
    from headgate.stores.redis import RedisStore

__all__ = [
    "BLOCKED",
    "UNLIMITED",
    "AllOf",
    "Decision",
    "Gate",
    "HeadgateError",
    "InvalidInput",
    "Limit",
    "Limiter",
    "ManualClock",
    "MemoryStore",
    "Outcome",
    "Policy",
    "PolicyError",
    "RateLimited",
    "RedisStore",
    "SessionClosed",
    "SlidingWindow",
    "StoreAway",
    "StoreError",
    "TokenBucket",
    "limited",
    "parse",
    "per_day",
    "per_hour",
    "per_minute",
    "per_second",
]


def __getattr__(name: str) -> object:
    if name == "RedisStore":  # when it is asked for: it needs redis-py
        from headgate.stores.redis import RedisStore

        return RedisStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
