"""headgate: exact rate limiting for platforms where many agents talk to one hub."""

from typing import TYPE_CHECKING

from headgate.errors import (
    HeadgateError,
    HoldError,
    InvalidInput,
    RateLimited,
    SessionClosed,
    StoreAway,
    StoreError,
    UnknownHold,
)
from headgate.gate import Gate
from headgate.gate.policy import Policy, PolicyError
from headgate.holds import Hold
from headgate.limiter import Limiter
from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.clock import ManualClock
from headgate.limits.decision import Decision, Limit, Outcome
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.notation import parse
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import TokenBucket, limited, per_day, per_hour, per_minute, per_second
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.stores.redis import RedisStore

__all__ = [
    "BLOCKED",
    "UNLIMITED",
    "AllOf",
    "Budget",
    "Decision",
    "Gate",
    "HeadgateError",
    "Hold",
    "HoldError",
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
    "Slots",
    "StoreAway",
    "StoreError",
    "TokenBucket",
    "UnknownHold",
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
