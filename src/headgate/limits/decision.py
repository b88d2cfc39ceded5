"""Limits, states and decisions, and how they work together.

A `Limit` knows how much is allowed, but no key and no clock. A `State` holds the count of one key under one limit. A
store finds the state, hands it to the limit together with the time, and gets a `Decision`:

    wait = limit.wait(state, now, cost)       # 0: passes; more: microseconds until it does; NEVER
    if wait == 0:
        limit.spend(state, now, cost)
        cost = 0
    decision = limit.decide(state, now, cost, wait, low)

Everything is whole numbers: times are microseconds of the store's clock, costs are smallest units of what the limit
counts (tokens, or millionths of a dollar). The result of each call depends on its arguments alone, and only the state
that is handed in is written.
"""

from abc import abstractmethod
from collections.abc import Sequence
from decimal import Decimal
from enum import Enum
from typing import Final, TypeAlias

from headgate._native import i64, mypyc_attr

NEVER: Final[i64] = -1


class Outcome(Enum):
    """The outcome of a check."""

    ALLOW = "allow"
    WARN = "warn"
    DENY = "deny"
    EXEMPT = "exempt"


setattr(Outcome, "__doc__", "The outcome of a check.")  # noqa: B010 - mypyc gives an enum a text of its own, and refuses =

# Looking a member up in an enum costs more than a whole bucket's arithmetic.
ALLOW: Final = Outcome.ALLOW
WARN: Final = Outcome.WARN
DENY: Final = Outcome.DENY


State: TypeAlias = object
"""The count of one key. Each kind of rule has its own kind of state, and only the rule looks inside."""


@mypyc_attr(acyclic=True)
class Value:
    """A value that is compared, hashed and pickled by its fields: the arguments with which it is made again."""

    __slots__ = ()

    @abstractmethod
    def _fields(self) -> tuple[object, ...]:
        """Its fields."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Value) and type(other) is type(self) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __reduce__(self) -> str | tuple[object, ...]:
        return type(self), self._fields()


class Rule(Value):
    """A limit or a backoff: a value for which a store keeps states."""

    __slots__ = ()

    @property
    def uninterrupted(self) -> bool:
        """Whether a compiled step allocates nothing that the garbage collector tracks, and calls no Python code.

        Under the GIL no other thread can then come between its reading and its writing.
        """
        return True

    @abstractmethod
    def fresh(self, now: i64) -> State:
        """The state of a key without a count."""

    @abstractmethod
    def idle(self, state: State, now: i64) -> bool:
        """Whether the state is that of a key without a count, so that dropping it changes no decision."""


class Limit(Rule):
    """How much is allowed.

    An application builds limits and reads them; the methods are for stores. Times are microseconds, costs are smallest
    units.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The largest cost that can ever pass at once, in whole tokens or units."""

    @property
    def parts(self) -> tuple["Limit", ...]:
        """The limits that this one is made of: itself, unless it joins several."""
        return (self,)

    @property
    def pieces(self) -> tuple["Limit", ...]:
        """The limits that stores count one by one: itself, or its parts if one of them shares its count with others."""
        return (self,)

    @property
    def identity(self) -> object:
        """The identity of its counts among those under the same name: the limit, or all but its amount."""
        return self

    @property
    def shares_counts(self) -> bool:
        """Whether limits of another amount share the count of any of its parts: those of budgets and slots."""
        return False

    @property
    def calendar(self) -> bool:
        """Whether it counts by the time of day, which a store has to tell it by `align`."""
        return False

    @property
    def decimals(self) -> int:
        """Decimals of a cost: stores count its smallest units. Tokens have none."""
        return 0

    @property
    def counts_costs(self) -> bool:
        """Whether any of its parts takes the cost of a request."""
        return True

    @property
    def counts_slots(self) -> bool:
        """Whether any of its parts takes a slot, which only a hold can have."""
        return False

    @abstractmethod
    def wait(self, state: State, now: i64, cost: i64) -> i64:
        """Bring the state up to now, and return the wait until `cost` passes: 0, or microseconds, or NEVER."""

    @abstractmethod
    def spend(self, state: State, now: i64, cost: i64) -> None:
        """Take `cost` from a state that is up to now, even below zero."""

    @abstractmethod
    def refund(self, state: State, cost: i64) -> None:
        """Give `cost` back, up to the capacity, to a state that is up to now."""

    def align(self, state: State, ahead: i64) -> None:
        """Take note of what to add to the store's time to get the time of day."""

    def prepare(self, state: State) -> bool:
        """Make ready for a hold, before its wait is asked for, and say whether something had to be made."""
        return False

    def countable(self, state: State, cost: i64) -> bool:
        """Whether `cost` can be counted on top of a state that is up to now: only then can all of it be given back."""
        return True

    def mark(self, state: State) -> tuple[i64, i64]:
        """Where a hold was counted, right after its cost was spent: two numbers that `correct` understands."""
        return 0, 0

    def correct(self, state: State, now: i64, held: i64, actual: i64, mark: i64, serial: i64) -> None:
        """Count `actual` instead of `held`, the cost of a hold, in a state that is up to now.

        Less gives back what would be left if `actual` had been spent when the hold was made, or a smaller amount where
        that isn't known any more. More is spent now.
        """

    def close(self, state: State, mark: i64, serial: i64) -> None:
        """Forget the mark of a hold that is over. It is corrected before, and closed once."""

    def settle(self, state: State, now: i64, held: i64, actual: i64, mark: i64, serial: i64) -> None:
        """`correct` and `close` in one step."""
        self.correct(state, now, held, actual, mark, serial)
        self.close(state, mark, serial)

    def take_slot(self, state: State, end: i64) -> None:
        """Take a slot for a hold, until the end of its lease, if these are counted."""

    def free_slot(self, state: State, end: i64) -> None:
        """Give a slot back before the end of its lease."""

    @abstractmethod
    def decide(self, state: State, now: i64, cost: i64, wait: i64, low: i64) -> "Decision":
        """The decision on a request for which `wait` returned this wait, from a state that is up to now.

        `cost` is still to be taken from the state: 0 if it has been. With less than `low` thousandths of the capacity
        left after it, the outcome is a warning.
        """


@mypyc_attr(acyclic=True)
class Violation(Value):
    """A denial that was recorded against an agent."""

    __slots__ = ("_advised", "_alert", "_count")

    def __init__(self, count: i64, advised: i64, alert: bool) -> None:
        self._count: Final = count
        self._advised: Final = advised
        self._alert: Final = alert

    @property
    def count(self) -> int:
        """Violations in a row, this one included."""
        return self._count

    @property
    def advised(self) -> float:
        """The seconds that the agent is advised to wait."""
        return self._advised / 1_000_000

    @property
    def alert(self) -> bool:
        """Whether it raises an alert."""
        return self._alert

    def _fields(self) -> tuple[int, int, bool]:
        return self._count, self._advised, self._alert

    def __repr__(self) -> str:
        return f"Violation(count={self.count}, advised={self.advised}, alert={self.alert})"


@mypyc_attr(acyclic=True, free_list_len=1)
class Decision(Value):
    """The result of one check: a value, true when the request passes.

    >>> from headgate import Limiter, per_minute
    >>> decision = Limiter(per_minute(60, burst=10)).check("agent-7")
    >>> bool(decision), decision.outcome.value, decision.remaining, decision.reset_after
    (True, 'allow', 9, 1.0)
    """

    __slots__ = ("_bound", "_details", "_limit", "_outcome", "_remaining", "_reset", "_retry")

    def __init__(
        self,
        outcome: Outcome,
        limit: Limit,
        remaining: i64,
        retry: i64,
        reset: i64,
        bound: i64,
        details: "Details | None" = None,
    ) -> None:
        """Stores make decisions: `retry` (or NEVER) and `reset` are microseconds, `bound` is -1 for a lone limit."""
        self._details: Final = details
        self._outcome: Final = outcome
        self._limit: Final = limit
        self._remaining: Final = remaining
        self._retry: Final = retry
        self._reset: Final = reset
        self._bound: Final = bound

    @property
    def outcome(self) -> Outcome:
        """ALLOW, WARN (it passes, but little is left), DENY, or EXEMPT (it passes and nothing is counted)."""
        return self._outcome

    @property
    def limit(self) -> Limit:
        """The limit that the other fields describe: of several, the one that bound."""
        return self._limit

    @property
    def bound(self) -> int | None:
        """The index of the limit that decided, of several; None where there is only one.

        Among denials it is the one with the longest wait; among warnings, or else all, the one with the least left.
        """
        return None if self._bound < 0 else self._bound

    @property
    def remaining(self) -> int:
        """The whole tokens that are left: 59 after the first request on 60."""
        return self._remaining

    @property
    def left(self) -> Decimal:
        """The remainder with all decimals: 99.9688 of 100 usd, of which `remaining` is 99."""
        left = self._exact_left()
        return Decimal(self.remaining) if left < 0 else Decimal(int(left)).scaleb(-self._limit.decimals)

    @property
    def smallest_left(self) -> int:
        """The remainder in smallest units."""
        left = self._exact_left()
        return self._remaining if left < 0 else left

    @property
    def retry_after(self) -> float | None:
        """Seconds until the same request passes if no other comes: 0.0 if it passed, None if it never will."""
        return None if self._retry == NEVER else self._retry / 1_000_000

    @property
    def reset_after(self) -> float:
        """Seconds until everything that was spent has come back."""
        return self._reset / 1_000_000

    @property
    def bucket_retry_after(self) -> float | None:
        """The limit's own wait, where a gate advises a longer one in `retry_after`."""
        own = self.own_wait()
        return None if own == NEVER else own / 1_000_000

    @property
    def violation(self) -> Violation | None:
        """The violation that a gate recorded for this denial."""
        return None if self._details is None else self._details.violation

    @property
    def would_be(self) -> Outcome | None:
        """In shadow mode, the outcome that an enforced limit would have had."""
        return None if self._details is None else self._details.would_be

    @property
    def degraded(self) -> bool:
        """Whether something other than the limit decided: the store was away, or had no room for a new key."""
        return False if self._details is None else self._details.degraded

    @property
    def retry_us(self) -> int | None:
        """`retry_after` in whole microseconds, as the stores count."""
        return None if self._retry == NEVER else self._retry

    @property
    def retry_ms(self) -> int | None:
        """`retry_after` in whole milliseconds, rounded up."""
        return None if self._retry == NEVER else (self._retry + 999) // 1000

    @property
    def bucket_retry_ms(self) -> int | None:
        """`bucket_retry_after` in whole milliseconds, rounded up."""
        own = self.own_wait()
        return None if own == NEVER else (own + 999) // 1000

    def __bool__(self) -> bool:
        return self._outcome is not DENY

    def at(self, place: i64) -> "Decision":
        """The same, as that of one of several limits: the one at this place."""
        return Decision(self._outcome, self._limit, self._remaining, self._retry, self._reset, place, self._details)

    def as_denied(self) -> "Decision":
        """The same, denied: for a request that something other than the limit holds up."""
        wait = self._retry if self._outcome is DENY else 1
        left = self._exact_left()
        details = Details(wait, None, None, self.degraded, left) if self.degraded or left >= 0 else None
        return Decision(DENY, self._limit, self._remaining, wait, self._reset, self._bound, details)

    def with_violation(self, violation: Violation) -> "Decision":
        """The denial, recorded: the wait is the longer of the limit's own and the advised one."""
        own = self._retry
        retry = own if own == NEVER else max(own, violation._advised)
        details = Details(own, violation, None, False, self._exact_left())
        return Decision(DENY, self._limit, self._remaining, retry, self._reset, self._bound, details)

    def as_shadow(self) -> "Decision":
        """The same in shadow mode: it passes, and says what it would have been."""
        return Decision(
            ALLOW,
            self._limit,
            self._remaining,
            0,
            self._reset,
            self._bound,
            Details(self._retry, None, self._outcome, self.degraded, self._exact_left()),
        )

    def after(self, elapsed: i64) -> "Decision":
        """The same denial `elapsed` microseconds later, by the limit alone."""
        own = self.own_wait()
        retry = own if own == NEVER else max(own - elapsed, 1)
        left = self._exact_left()
        details = Details(retry, None, None, False, left) if left >= 0 else None
        return Decision(DENY, self._limit, self._remaining, retry, max(self._reset - elapsed, 0), self._bound, details)

    def own_wait(self) -> i64:
        """The limit's own wait in microseconds, or NEVER."""
        return self._retry if self._details is None else self._details.own

    def as_degraded(self, limit: Limit) -> "Decision":
        """The same, of this limit, made while the store was away."""
        details = Details(self.own_wait(), self.violation, self.would_be, True, self._exact_left())
        return Decision(self._outcome, limit, self._remaining, self._retry, self._reset, self._bound, details)

    def _exact_left(self) -> i64:
        """The remainder in smallest units, where there are decimals; otherwise -1."""
        return -1 if self._details is None else self._details.left

    def _fields(self) -> tuple[object, ...]:
        return self._outcome, self._limit, self._remaining, self._retry, self._reset, self._bound, self._details

    def __repr__(self) -> str:
        shown = f"{self._outcome.name}, limit={str(self._limit)!r}, remaining={self.remaining}, "
        shown += f"retry_after={self.retry_after}, reset_after={self.reset_after}"
        if self._bound >= 0:
            shown += f", bound={self.bound}"
        if self.bucket_retry_after != self.retry_after:
            shown += f", bucket_retry_after={self.bucket_retry_after}"
        if self.violation is not None:
            shown += f", violation={self.violation}"
        if self.would_be is not None:
            shown += f", would_be={self.would_be.name}"
        if self.degraded:
            shown += ", degraded"
        return f"Decision({shown})"


@mypyc_attr(acyclic=True)
class Details(Value):
    """Fields that few decisions have, kept apart so that the others don't pay for them."""

    __slots__ = ("degraded", "left", "own", "violation", "would_be")

    def __init__(
        self, own: i64, violation: Violation | None, would_be: Outcome | None, degraded: bool, left: i64 = -1
    ) -> None:
        self.own: Final = own
        self.violation: Final = violation
        self.would_be: Final = would_be
        self.degraded: Final = degraded
        self.left: Final = left  # in smallest units, where there are decimals; otherwise -1

    def _fields(self) -> tuple[object, ...]:
        return self.own, self.violation, self.would_be, self.degraded, self.left


def decide_one(
    limit: Limit, wait: i64, left: i64, scarce: bool, reset: i64, details: Details | None = None
) -> Decision:
    """The decision on a request under a single limit."""
    if wait != 0:
        outcome = DENY
    elif scarce:
        outcome = WARN
    else:
        outcome = ALLOW
    return Decision(outcome, limit, max(left, 0), wait, reset, -1, details)


def binding_of(decisions: Sequence[Decision]) -> Decision:
    """Of several decisions the one that bound: the denial with the longest wait, or a warning, or the least left."""
    bound, place = decisions[0], 0
    for i, one in enumerate(decisions):
        if i and _outranks(one, bound):
            bound, place = one, i
    return bound.at(place)


def more_binding(bound: Decision, one: Decision, place: i64) -> Decision:
    """Of two decisions the one that binds: `bound`, or the one on the limit at a place."""
    return one.at(place) if _outranks(one, bound) else bound


def _outranks(one: Decision, other: Decision) -> bool:
    if one._outcome is DENY or other._outcome is DENY:
        return other._retry != NEVER and (one._retry == NEVER or one._retry > other._retry)
    if one._outcome is not other._outcome:
        return one._outcome is WARN
    return one._remaining < other._remaining
