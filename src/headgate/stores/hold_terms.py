"""The terms of a hold, and what a store answers. They are compiled, since every hold has some."""

from typing import Final, Literal, TypeAlias

from headgate._native import i64, mypyc_attr
from headgate.limits.decision import Decision, Value

HoldState: TypeAlias = Literal["denied", "open", "settled", "cancelled", "expired"]

DENIED: Final = "denied"
OPEN: Final = "open"
SETTLED: Final = "settled"
CANCELLED: Final = "cancelled"
EXPIRED: Final = "expired"

MAX_OPEN_HOLDS: Final = 131_072
"""Open holds of one key under one name."""
LONGEST_LEASE: Final = 7 * 86_400_000_000
"""Microseconds: a week. A block that takes longer renews its lease."""


@mypyc_attr(acyclic=True)
class HoldTerms(Value):
    """The terms of a new hold."""

    __slots__ = ("forced", "hold_id", "keep", "lease", "most", "note", "release", "shape")

    def __init__(
        self,
        hold_id: str,
        lease: i64,
        release: bool,
        keep: i64,
        note: str = "",
        shape: str = "",
        most: i64 = MAX_OPEN_HOLDS,
        forced: bool = False,
    ) -> None:
        self.hold_id: Final = hold_id
        self.lease: Final = lease
        """Microseconds."""
        self.release: Final = release
        """Whether its costs come back if its lease ends."""
        self.keep: Final = keep
        """Microseconds for which it is remembered after its end."""
        self.note: Final = note
        """Kept with the hold, and found with it again."""
        self.shape: Final = shape
        """The same, for a text that many holds have in common: a store may keep it once."""
        self.most: Final = most
        """Open holds of its key, with this one."""
        self.forced: Final = forced
        """Whether it is granted whatever is left: the decision is then a denial, or what it would have been."""

    def with_lease(self, lease: i64) -> "HoldTerms":
        return HoldTerms(self.hold_id, lease, self.release, self.keep, self.note, self.shape, self.most, self.forced)

    def _fields(self) -> tuple[object, ...]:
        kept = (self.hold_id, self.lease, self.release, self.keep)
        return *kept, self.note, self.shape, self.most, self.forced

    def __repr__(self) -> str:
        return f"HoldTerms{self._fields()!r}"


@mypyc_attr(acyclic=True)
class HoldAnswer(Value):
    """The state of a hold."""

    __slots__ = ("costs", "decision", "left", "parts", "release", "repeated", "state")

    def __init__(
        self,
        decision: Decision,
        state: HoldState,
        costs: tuple[int, ...],
        left: i64,
        parts: tuple[Decision, ...] = (),
        repeated: bool = False,
        release: bool = False,
    ) -> None:
        self.decision: Final = decision
        """On the hold, or on more for it; of `settle` and `find_hold`, as a peek for cost 1 right now would say."""
        self.state: Final = state
        self.costs: Final = costs
        """The counted cost of each ask: the reserved or the settled one."""
        self.left: Final = left
        """Microseconds until its lease ends; 0 if it isn't open, or if its store is away and doesn't know."""
        self.parts: Final = parts
        """The decision on each piece of each ask, of which `decision` is the one that bound; none while a store is
        away."""
        self.repeated: Final = repeated
        """Whether `hold` has found one with the same id, perhaps made under other limits. Not compared."""
        self.release: Final = release
        """Whether its costs come back at the end of its lease: of one that was found or repeated. Not compared."""

    @property
    def summary(self) -> tuple[HoldState, tuple[int, ...], int]:
        """The state, the costs and what is left of the lease, without the decisions."""
        return self.state, self.costs, self.left

    def with_decision(self, decision: Decision, parts: tuple[Decision, ...]) -> "HoldAnswer":
        return HoldAnswer(decision, self.state, self.costs, self.left, parts)

    def as_repeated(self) -> "HoldAnswer":
        return HoldAnswer(self.decision, self.state, self.costs, self.left, self.parts, True, self.release)

    def without_parts(self) -> "HoldAnswer":
        return HoldAnswer(self.decision, self.state, self.costs, self.left)

    def as_open(self, left: i64) -> "HoldAnswer":
        return HoldAnswer(self.decision, OPEN, self.costs, left, self.parts)

    def _fields(self) -> tuple[object, ...]:
        return self.decision, self.state, self.costs, self.left, self.parts

    def __reduce__(self) -> tuple[object, ...]:
        return HoldAnswer, (*self._fields(), self.repeated)

    def __repr__(self) -> str:
        return f"HoldAnswer{self._fields()!r}"
