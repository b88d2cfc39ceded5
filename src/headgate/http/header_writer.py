"""Writes a decision as response headers. Every response needs them, so this module is compiled."""

from functools import lru_cache
from math import ceil
from typing import Final

from headgate._native import i64
from headgate.errors import refuse
from headgate.http.headers import CONCURRENT, DIALECTS, EPOCH, LARGEST, Dialect
from headgate.http.structured_fields import format_string
from headgate.limits.budget import Budget
from headgate.limits.decision import DENY, NEVER, Decision, Limit
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import LONGEST, TokenBucket

_SECOND: Final[i64] = 1_000_000
SLOT_WAIT: Final = 1_000_000
"""Microseconds to wait for a slot, at the most: nobody knows when a request ends, so that HTTP clients have to poll."""
_LARGEST_RESET: Final[i64] = EPOCH - 1  # seconds in X-RateLimit-Reset: more would be taken for a moment
_MOST_LIMITS: Final = 1024  # limits may be made for each of many agents


class HeaderWriter:
    """Writes rate limit headers in one dialect, as bytes.

    >>> from headgate import Limiter
    >>> limiter = Limiter("60/minute burst 10")
    >>> HeaderWriter("ratelimit").for_limit(limiter.limit).write(limiter.check("agent-7"))
    [(b'ratelimit-policy', b'"default";q=10;w=10'), (b'ratelimit', b'"default";r=9;t=1')]
    """

    def __init__(self, dialect: Dialect = "ratelimit") -> None:
        if dialect not in DIALECTS:
            refuse("headers", f"one of {', '.join(DIALECTS)}", dialect)
        self._draft: Final[bool] = dialect in ("ratelimit", "both")
        self._triple: Final[bool] = dialect in ("x-ratelimit", "both")
        self._limits: Final[dict[tuple[Limit, str], LimitHeaders]] = {}

    def for_limit(self, limit: Limit, name: str = "default") -> "LimitHeaders":
        """The writer for decisions under one limit.

        A lone limit is a policy of this name; of several combined, each is a policy named by its own text.
        """
        found = self._limits.get((limit, name))
        if found is None:
            if len(self._limits) >= _MOST_LIMITS:
                self._limits.clear()
            found = self._limits[limit, name] = LimitHeaders(limit, name, self._draft, self._triple)
        return found


class LimitHeaders:
    """Writes headers for decisions under one limit. The parts that never change are formatted once."""

    def __init__(self, limit: Limit, name: str, draft: bool, triple: bool) -> None:
        parts = () if any(part.capacity > LARGEST for part in limit.parts) else limit.parts  # more than headers can say
        names = [format_string(name if part is limit else str(part)) for part in parts]
        policies = [
            f"{name};q={part.capacity}{_unit(part)}{_window(part)}" for name, part in zip(names, parts, strict=True)
        ]
        self._policy: Final = (b"ratelimit-policy", ", ".join(policies).encode())
        self._starts: Final = [f"{name};r=".encode() for name in names]
        self._capacities: Final = [(b"x-ratelimit-limit", str(part.capacity).encode()) for part in parts]
        self._refills: Final = [_refills(part) for part in parts]
        self._slots: Final = [isinstance(part, Slots) for part in parts]
        self._draft: Final = draft
        self._triple: Final = triple

    def write(self, decision: Decision) -> list[tuple[bytes, bytes]]:
        """The headers, save for Retry-After: that belongs to the response to a denial.

        None for a denial without the store: what is left isn't known then.
        """
        bound: i64 = max(decision._bound, 0)
        if bound >= len(self._starts) or (decision._outcome is DENY and decision.degraded):
            return []
        remaining = str(decision._remaining).encode()
        reset = reset_seconds(decision)
        triple = self._triple
        if not self._refills[bound] and decision._outcome is not DENY:
            reset = NEVER
            triple = triple and not self._slots[bound]  # it has no unit: 0 would mean that a client must wait
        if self._draft and not triple and reset >= 0:
            return [self._policy, (b"ratelimit", self._starts[bound] + remaining + b";t=" + str(reset).encode())]
        headers: list[tuple[bytes, bytes]] = []
        if self._draft:
            end = b"" if reset < 0 else b";t=" + str(reset).encode()
            headers += [self._policy, (b"ratelimit", self._starts[bound] + remaining + end)]
        if triple:
            headers += [self._capacities[bound], (b"x-ratelimit-remaining", remaining)]
            if reset >= 0:
                headers.append((b"x-ratelimit-reset", str(min(reset, _LARGEST_RESET)).encode()))
        return headers


def reset_seconds(decision: Decision) -> i64:
    """Whole seconds, rounded up, until the full quota is back; or, where nothing is left or the request was denied,
    until the next one passes. `NEVER` if no wait helps."""
    if decision._outcome is DENY:
        wait = decision.own_wait()
        if isinstance(decision._limit, Slots):
            wait = min(wait, i64(SLOT_WAIT))
        return NEVER if wait == NEVER else whole_seconds(wait)
    if decision._remaining:
        return whole_seconds(decision._reset)
    if decision._reset == LONGEST:  # at least: when the next one passes isn't known, but it is within one token's time
        return _seconds_of_one(decision._limit)
    return whole_seconds(decision._reset - i64(_refill_after_first(decision._limit)))


def advised_wait(decision: Decision) -> int | None:
    """The wait of a denied caller in microseconds, None if no wait helps. For a slot, `retry_us` is an upper bound."""
    wait = decision.retry_us
    return min(wait, SLOT_WAIT) if wait is not None and isinstance(decision.limit, Slots) else wait


def whole_seconds(microseconds: i64) -> i64:
    """Seconds, rounded up."""
    return (microseconds + _SECOND - 1) // _SECOND


@lru_cache(maxsize=1024)
def _refill_after_first(limit: Limit) -> int:
    """Microseconds from the moment at which an empty limit lets one pass until its full quota is back."""
    if not isinstance(limit, TokenBucket):
        return 0  # a log doesn't say when its oldest entry leaves: the wait is for the newest
    capacity, refill, per = limit.fields()
    return int((capacity - 1) * per * 1_000_000 / refill)


@lru_cache(maxsize=1024)
def _seconds_of_one(limit: Limit) -> int:
    """Whole seconds, rounded up, in which one token comes back."""
    if not isinstance(limit, TokenBucket):
        return int(whole_seconds(LONGEST))
    _, refill, per = limit.fields()
    return min(ceil(per / refill), int(whole_seconds(LONGEST)))


def _refills(limit: Limit) -> bool:
    """Whether it is known when the full quota is back: of slots it isn't, and a budget in all never is."""
    return not (isinstance(limit, Slots) or (isinstance(limit, Budget) and limit.period is None))


def _unit(limit: Limit) -> str:
    """The parameter for what is counted, if that isn't requests."""
    if isinstance(limit, Slots):
        return f";qu={format_string(CONCURRENT)}"
    if isinstance(limit, Budget) and limit.unit:
        return f";qu={format_string(limit.unit.partition(':')[0])}"
    return ""


def _window(limit: Limit) -> str:
    """The parameter for the whole seconds in which the full quota comes back.

    "" for a limit that never refills, or takes longer than headers can say, or whose periods differ in length.
    """
    seconds = 0
    if isinstance(limit, TokenBucket):
        capacity, refill, per = limit.fields()
        seconds = max(ceil(capacity * per / refill), 1)
    elif isinstance(limit, SlidingWindow):
        seconds = max(ceil(limit.window), 1)
    return f";w={seconds}" if 0 < seconds <= LARGEST else ""
