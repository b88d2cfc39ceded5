"""Meters: what was used on each day, without a limit."""

from typing import Final

from headgate._native import i64, mypyc_attr
from headgate.limits.decision import Decision, State, decide_one
from headgate.limits.numbers import LARGEST
from headgate.limits.periods import PeriodLimit, PeriodState

KEPT: Final = 400 * 86_400_000_000
"""Microseconds for which a day is kept after its start: 13 months."""

_decisions: Final[dict[str, Decision]] = {}  # for each zone the only one that there is


@mypyc_attr(acyclic=True)
class MeterState(PeriodState):
    """The usage of each day, by the day's start in microseconds since 1970."""

    __slots__ = ("amount", "end", "newest", "other_days", "root")

    def __init__(self) -> None:
        super().__init__(0)
        self.newest: i64 = -1  # the day of the last look
        self.end: i64 = -1  # of that day
        self.amount: i64 = 0  # what was used on it
        self.other_days: Final[dict[int, int]] = {}
        self.root = ""  # of the ask: for the store, which lists what was used

    @property
    def days(self) -> dict[int, int]:
        """The usage of each day."""
        days = self.other_days.copy()
        if self.amount:
            days[self.newest] = self.amount
        return days

    def used_on(self, day: i64) -> i64:
        if day == self.newest:  # not in one expression, which would make an object
            return self.amount
        return self.other_days.get(day, 0)

    def count(self, day: i64, cost: i64) -> None:
        """Count so much more, or less, on a day."""
        amount = self.used_on(day) + cost
        if amount < 0:
            amount = 0
        elif amount > LARGEST:
            amount = LARGEST
        if day == self.newest:
            self.amount = amount
        elif amount:
            self.other_days[day] = amount
        else:
            self.other_days.pop(day, None)

    def turn_to(self, day: i64, end: i64) -> None:
        """Begin to count on another day, and forget those that are too old."""
        self.end = end
        if day == self.newest:
            return
        for old in [old for old in self.other_days if old <= day - KEPT]:
            self.other_days.pop(old, None)
        if self.amount and self.newest > day - KEPT:
            self.other_days[self.newest] = self.amount
        self.amount = self.other_days.pop(day, 0)
        self.newest = day

    def copy(self) -> "MeterState":
        copied = MeterState()
        copied.ahead = self.ahead
        copied.newest = self.newest
        copied.end = self.end
        copied.amount = self.amount
        copied.root = self.root
        copied.other_days.update(self.other_days)
        return copied


class Meter(PeriodLimit):
    """Counts by day, in a time zone, and lets everything pass. What a hold has cost counts on the day of the hold.

    `unit` and its decimals say what is counted, for messages alone: meters that differ in them are the same.

    >>> print(Meter("Europe/Berlin"))
    metered in Europe/Berlin
    """

    __slots__ = ("_decision", "unit", "unit_decimals")

    def __init__(self, zone: str = "UTC", unit: str = "", unit_decimals: int = 0) -> None:
        super().__init__("meter", "day", zone)
        self.unit: Final = unit
        self.unit_decimals: Final = unit_decimals
        if zone not in _decisions:
            _decisions[zone] = decide_one(self, 0, LARGEST, False, 0)
        self._decision: Final = _decisions[zone]

    @property
    def capacity(self) -> int:
        return LARGEST

    def fresh(self, now: i64) -> State:
        return MeterState()

    def wait(self, state: State, now: i64, cost: i64) -> i64:
        assert isinstance(state, MeterState)
        moment = now + state.ahead
        if not state.newest <= moment < state.end:
            day = self._period_at(moment)
            state.turn_to(day[0], day[1])
        return 0

    def spend(self, state: State, now: i64, cost: i64) -> None:
        assert isinstance(state, MeterState)
        state.count(state.newest, cost)

    def refund(self, state: State, cost: i64) -> None:
        assert isinstance(state, MeterState)
        state.count(state.newest, -cost)

    def countable(self, state: State, cost: i64) -> bool:
        assert isinstance(state, MeterState)
        return cost <= LARGEST - state.amount

    def mark(self, state: State) -> tuple[i64, i64]:
        """The mark by which a hold is corrected later: the day that it was counted on."""
        assert isinstance(state, MeterState)
        return state.newest, 0

    def correct(self, state: State, now: i64, held: i64, actual: i64, mark: i64, serial: i64) -> None:
        assert isinstance(state, MeterState)
        if mark > now + state.ahead - KEPT:
            state.count(mark, actual - held)

    def idle(self, state: State, now: i64) -> bool:
        assert isinstance(state, MeterState)
        if state.amount and state.newest > now + state.ahead - KEPT:
            return False
        return not state.other_days or max(state.other_days) <= now + state.ahead - KEPT

    def decide(self, state: State, now: i64, cost: i64, wait: i64, low: i64) -> Decision:
        return self._decision

    def _fields(self) -> tuple[str]:
        return (self._zone,)

    def __reduce__(self) -> tuple[object, ...]:
        return Meter, (self._zone, self.unit, self.unit_decimals)

    def __repr__(self) -> str:
        return f"Meter({self._zone!r})"

    def __str__(self) -> str:
        return f"metered in {self._zone}"
