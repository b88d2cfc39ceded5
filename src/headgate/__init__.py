"""headgate: exact rate limiting for platforms where many agents talk to one hub."""

from headgate.clock import ManualClock
from headgate.core import Decision, Limit, Outcome
from headgate.errors import HeadgateError, InvalidInput, RateLimited, SessionClosed
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
    "SessionClosed",
    "SlidingWindow",
    "TokenBucket",
    "limited",
    "parse",
    "per_day",
    "per_hour",
    "per_minute",
    "per_second",
]
