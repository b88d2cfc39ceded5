"""Budgets: so much in each period of the calendar, or in all.

A budget counts in whole numbers of the smallest unit: of 500 usd, millionths of a dollar. What is used in a period is
counted from 0 when the next one begins. What was used in excess of the amount isn't carried over.

A clock that steps back reopens no period. By less than a period, it stands still: the period that has begun goes on. By
more, the clock had been wrong: the period of the right time takes over what is used. What was used in a period is kept
for a day after its end, should the clock step back over it.
"""

from decimal import Decimal
from fractions import Fraction
from typing import Final

from headgate._native import Text, i64, mypyc_attr
from headgate.errors import refuse
from headgate.limits.decision import NEVER, Decision, Details, State, decide_one
from headgate.limits.numbers import LARGEST, Number, decimal_text, smallest_units
from headgate.limits.periods import PeriodLimit, PeriodState
from headgate.limits.units import unit_of

_LARGEST: Final[i64] = 2**53 - 1

KEPT: Final = 86_400_000_000
"""Microseconds for which stores keep what was used in a period after its end."""
_KEPT: Final[i64] = 86_400_000_000


@mypyc_attr(acyclic=True)
class BudgetState(PeriodState):
    """The usage in the period that began at `start`, in smallest units.

    `start` is in microseconds since 1970, or 0 without a period.
    """

    __slots__ = ("start", "used")

    def __init__(self, start: i64, used: i64, ahead: i64) -> None:
        super().__init__(ahead)
        self.start = start
        self.used = used


class Budget(PeriodLimit):
    """So much in each hour, day, week, month or year of the calendar in a time zone; without a period, in all.

    >>> print(Budget(500, "month", unit="usd", zone="Europe/Berlin"))
    500 usd/calendar month in Europe/Berlin
    >>> Budget("2.50", unit="credits:2")
    Budget('2.5', unit='credits:2')

    A unit is `usd` or `eur` with 6 decimals, `tokens` or `requests` without any, or another name with its decimals.
    Weeks begin on Monday.
    """

    __slots__ = ("_amount", "_day_ago", "_decimals", "_hash", "_scale", "_unit")

    def __init__(
        self, amount: Number | str, period: Text | None = None, *, unit: Text = "", zone: Text = "UTC"
    ) -> None:
        name, decimals = unit_of(unit)
        self._unit: Final = name
        self._decimals: Final[i64] = decimals
        self._scale: Final[i64] = 10**decimals
        self._amount: Final[i64] = smallest_units(
            "Budget amount", amount, decimals, hint=" ('blocked' lets nothing pass)"
        )
        if period is None and zone != "UTC":
            refuse("Budget zone", "none where there is no period", zone)
        super().__init__(f"budget {name}", period, zone)
        self._day_ago: tuple[int, ...] = (0, 0)  # the period a day before the last look for idle states
        self._hash: Final = hash(self._fields())

    @property
    def capacity(self) -> int:
        """The amount in whole units, rounded down."""
        return self._amount // self._scale

    @property
    def amount(self) -> Decimal:
        """How much can be used."""
        return Decimal(self._text())

    @property
    def unit(self) -> str:
        """The unit, as it is written: "usd", "credits:2", or "" for none."""
        return self._unit

    @property
    def period(self) -> str | None:
        """ "hour", "day", "week", "month" or "year"; None for an amount in all."""
        return self._period

    @property
    def decimals(self) -> int:
        return self._decimals

    def integers(self) -> tuple[int]:
        """The amount in smallest units."""
        return (self._amount,)

    def fresh(self, now: i64) -> State:
        return BudgetState(0, 0, 0)

    def wait(self, state: State, now: i64, cost: i64) -> i64:
        assert isinstance(state, BudgetState)
        moment = now + state.ahead
        if self._calendar is not None:
            current = self._period_at(moment)
            start: i64 = current[0]
            end: i64 = current[1]
            if state.start < start:
                state.used = 0
                state.start = start
            elif state.start > end:
                state.start = start
        if cost > self._amount:
            return NEVER
        if state.used + cost <= self._amount:
            return 0
        return NEVER if self._calendar is None else self._end(state) - moment

    def _end(self, state: BudgetState) -> i64:
        """The end of the period that is counted: perhaps not that of the last look, if the clock has stepped back."""
        current = self._current
        if current[0] <= state.start < current[1]:
            return current[1]
        assert self._calendar is not None
        return self._calendar.at(state.start)[1]

    def spend(self, state: State, now: i64, cost: i64) -> None:
        assert isinstance(state, BudgetState)
        state.used = _bounded(state.used + cost)

    def refund(self, state: State, cost: i64) -> None:
        assert isinstance(state, BudgetState)
        state.used = _bounded(state.used - cost)

    def countable(self, state: State, cost: i64) -> bool:
        assert isinstance(state, BudgetState)
        return cost <= _LARGEST - state.used

    def mark(self, state: State) -> tuple[i64, i64]:
        """The mark by which a hold is corrected later: the period that it was counted in."""
        assert isinstance(state, BudgetState)
        return state.start, 0

    def correct(self, state: State, now: i64, held: i64, actual: i64, mark: i64, serial: i64) -> None:
        """Count `actual` instead of the `held` of a hold with this mark, unless its period is over."""
        assert isinstance(state, BudgetState)
        if state.start == mark:
            state.used = _bounded(state.used + actual - held)

    def idle(self, state: State, now: i64) -> bool:
        assert isinstance(state, BudgetState)
        if state.used == 0:
            return True
        if self._calendar is None:
            return False
        moment = max(now + state.ahead - _KEPT, 0)
        period = self._day_ago
        if not period[0] <= moment < period[1]:
            period = self._calendar.at(moment)
            self._day_ago = period
        return state.start < period[0]

    def decide(self, state: State, now: i64, cost: i64, wait: i64, low: i64) -> Decision:
        assert isinstance(state, BudgetState)
        left = self._amount - state.used
        scarce = wait == 0 and (left - cost) * 1000 < self._amount * low
        reset: i64 = 0
        if self._calendar is not None:
            reset = self._end(state) - (now + state.ahead)
        elif state.used:
            reset = _LARGEST
        exact = None if self._decimals == 0 else Details(wait, None, None, False, max(left, 0))
        return decide_one(self, wait, left // self._scale, scarce, reset, exact)

    def widest(self) -> "Budget":
        """The same budget with the largest amount: a peek at it tells what is used, however far into debt."""
        return _restore(decimal_text(Fraction(LARGEST, self._scale)), self._period, self._unit, self._zone)

    def _text(self) -> str:
        return decimal_text(Fraction(self._amount, self._scale))

    def _fields(self) -> tuple[int, str | None, str, str]:
        return self._amount, self._period, self._unit, self._zone

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self._text(), self._period, self._unit, self._zone)

    def __repr__(self) -> str:
        text = self._text()
        shown = f"'{text}'" if "." in text else text
        if self._period is not None:
            shown += f", '{self._period}'"
        if self._unit:
            shown += f", unit='{self._unit}'"
        if self._zone != "UTC":
            shown += f", zone='{self._zone}'"
        return f"Budget({shown})"

    def __str__(self) -> str:
        text = f"{self._text()} {self._unit}".rstrip()
        if self._period is None:
            return f"{text} in all"
        text += f"/calendar {self._period}"
        return text if self._zone == "UTC" else f"{text} in {self._zone}"


def _bounded(used: i64) -> i64:
    if used < 0:
        return 0
    if used > _LARGEST:  # not in one expression, which would make an object
        return _LARGEST
    return used


def _restore(amount: str, period: str | None, unit: str, zone: str) -> Budget:
    """A budget from its fields."""
    return Budget(amount, period, unit=unit, zone=zone)
