"""The base of limits that count by the periods of a calendar: budgets and meters."""

from typing import Final

from headgate._native import Text, i64, mypyc_attr
from headgate.limits.calendar import Calendar
from headgate.limits.decision import Limit, State
from headgate.limits.numbers import LARGEST


@mypyc_attr(acyclic=True)
class PeriodState:
    """`ahead` is what the store adds to its own time to get the time of day."""

    __slots__ = ("ahead",)

    def __init__(self, ahead: i64) -> None:
        self.ahead = ahead


class PeriodLimit(Limit):
    """A limit that counts by the periods of a time zone; without a period, in all."""

    __slots__ = ("_calendar", "_current", "_identity", "_period", "_zone")

    def __init__(self, kind: str, period: Text | None, zone: Text) -> None:
        """Limits of one `kind`, period and zone share their counts."""
        self._calendar: Final = None if period is None else Calendar(period, zone)
        self._period: Final = None if period is None else str(period)
        self._zone: Final = str(zone)
        self._identity: Final = f"{kind} {self._period} {self._zone}"
        # The start and end of the period of the last look. One object (mypyc would keep a tuple[int, int] as two
        # fields), so that no thread sees half of another's.
        self._current: tuple[int, ...] = (0, LARGEST) if self._calendar is None else (0, 0)

    @property
    def zone(self) -> str:
        """The IANA name of the time zone of its periods."""
        return self._zone

    @property
    def identity(self) -> object:
        return self._identity

    @property
    def calendar(self) -> bool:
        return self._calendar is not None

    @property
    def shares_counts(self) -> bool:
        return True

    @property
    def uninterrupted(self) -> bool:
        return False

    def nearby(self, moment: int) -> list[int]:
        """The starts of the previous, current, next and next but one period of a moment; [0] without a period."""
        if self._calendar is None:
            return [0]
        start, end = self._calendar.at(moment)
        return [self._calendar.previous(moment)[0], start, end, self._calendar.next(moment)[1]]

    def align(self, state: State, ahead: i64) -> None:
        assert isinstance(state, PeriodState)
        state.ahead = ahead

    def _period_at(self, moment: i64) -> tuple[int, ...]:
        """The start and end of the period of a moment: of one before 1970, where a sweep may look, the first."""
        current = self._current
        if not current[0] <= moment < current[1]:
            assert self._calendar is not None
            current = self._calendar.at(max(moment, 0))
            self._current = current
        return current
