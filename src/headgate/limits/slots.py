"""Slots: how many requests may be in flight at once."""

from typing import Final, SupportsIndex

from headgate._native import i64, mypyc_attr
from headgate.limits.decision import NEVER, Decision, Limit, State, decide_one
from headgate.limits.numbers import LARGEST, whole


@mypyc_attr(acyclic=True)
class SlotsState:
    """How many slots are taken."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken: i64 = 0


class Slots(Limit):
    """So many requests in flight at once.

    >>> print(Slots(5))
    5 in flight
    """

    __slots__ = ("_count",)

    def __init__(self, count: SupportsIndex) -> None:
        self._count: Final[i64] = whole("Slots count", count)

    @property
    def capacity(self) -> int:
        return self._count

    @property
    def counts_costs(self) -> bool:
        return False

    @property
    def counts_slots(self) -> bool:
        return True

    def fresh(self, now: i64) -> State:
        return SlotsState()

    def wait(self, state: State, now: i64, cost: i64) -> i64:
        assert isinstance(state, SlotsState)
        return 0 if state.taken < self._count else NEVER

    def spend(self, state: State, now: i64, cost: i64) -> None:
        assert isinstance(state, SlotsState)
        state.taken = min(state.taken + 1, LARGEST)

    def refund(self, state: State, cost: i64) -> None:
        assert isinstance(state, SlotsState)
        state.taken = max(state.taken - 1, 0)

    def idle(self, state: State, now: i64) -> bool:
        assert isinstance(state, SlotsState)
        return state.taken == 0

    def decide(self, state: State, now: i64, cost: i64, wait: i64, low: i64) -> Decision:
        assert isinstance(state, SlotsState)
        left = self._count - state.taken
        return decide_one(self, wait, left, (left - 1) * 1000 < self._count * low, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and self._count == other._count

    def __hash__(self) -> int:
        return hash((Slots, self._count))

    def __reduce__(self) -> tuple[object, ...]:
        return Slots, (self._count,)

    def __repr__(self) -> str:
        return f"Slots({self._count})"

    def __str__(self) -> str:
        return f"{self._count} in flight"
