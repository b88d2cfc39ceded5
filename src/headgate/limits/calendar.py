"""Periods of the calendar in a named time zone, to the microsecond.

A period is the set of moments with the same local label: the same hour, day, ISO week, month or year on a clock on the
wall of that zone. So a day has 23, 24 or 25 hours, an hour that occurs twice in autumn is one period of two hours, and
an hour or a day that the zone skips is no period at all. Every moment is in exactly one period, and the end of each is
the start of the next.

Where a clock goes back across a boundary (from 00:01 to 23:01, as in St. John's until 2011), the old label comes again.
The period that has begun goes on then: a period begins when its label or a later one is first seen, and isn't reopened.
"""

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final, NoReturn
from zoneinfo import ZoneInfo, available_timezones

from headgate._native import Text
from headgate.errors import refuse

PERIODS: Final = ("hour", "day", "week", "month", "year")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_BEYOND: Final = (datetime(9997, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND  # datetime knows the periods after it
_ZONE: Final = re.compile(r"[A-Z][A-Za-z0-9_+/-]{0,63}", re.ASCII)  # no "localtime" or "right/...": they aren't IANA's


class Calendar:
    """The periods of one kind in one zone. Moments are microseconds since 1970.

    >>> days = Calendar("day", "Europe/Berlin")
    >>> start, end = days.at(1_774_742_400_000_000)  # on 29 March 2026, when summer time began
    >>> (end - start) / 3_600_000_000
    23.0
    >>> days.next(start)[0] == end
    True
    """

    __slots__ = ("_period", "_zone")

    def __init__(self, period: Text, zone: Text) -> None:
        if not isinstance(period, str) or period not in PERIODS:
            refuse("calendar period", f"one of {', '.join(PERIODS)}", period)
        self._period: Final[str] = period
        self._zone: Final = zone_of(zone)

    def at(self, moment: int) -> tuple[int, int]:
        """The start and the end of the period that a moment is in. The end belongs to the next one."""
        if not 0 <= moment < _BEYOND:
            refuse("calendar", "a moment from 1970 to the end of 9996, in microseconds since 1970", moment)
        return self._at(moment)

    def previous(self, moment: int) -> tuple[int, int]:
        """The start and the end of the period before that of a moment."""
        return self._at(self.at(moment)[0] - 1)

    def next(self, moment: int) -> tuple[int, int]:
        """The start and the end of the period after that of a moment."""
        return self._at(self.at(moment)[1])

    def _at(self, moment: int) -> tuple[int, int]:
        label = _label(self._period, self._local(moment))
        following = _following(self._period, label)
        end = self._first(following)
        while end <= moment:  # the clock has gone back across a boundary
            label, following = following, _following(self._period, following)
            end = self._first(following)
        return self._first(label), end

    def _local(self, moment: int) -> datetime:
        """The local time that a clock shows."""
        return (_EPOCH + timedelta(microseconds=moment)).astimezone(self._zone).replace(tzinfo=None, fold=0)

    def _first(self, shown: datetime) -> int:
        """The first moment at which a clock on the wall shows this time or a later one."""
        high, low = self._moment(shown, 0), self._moment(shown, 1)
        if low >= high:  # shown once, or twice
            return high
        while high - low > 1:  # skipped: the clock went forward between the two
            middle = (low + high) // 2
            if self._local(middle) >= shown:
                high = middle
            else:
                low = middle
        return high

    def _moment(self, shown: datetime, fold: int) -> int:
        return (shown.replace(tzinfo=self._zone, fold=fold) - _EPOCH) // _MICROSECOND


def zone_of(name: object) -> tzinfo:
    """A zone by its IANA name. UTC needs no time zone data."""
    if name == "UTC":
        return UTC
    if not isinstance(name, str) or not _ZONE.fullmatch(name):
        _refuse_zone(name)
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown; no zone's file; a folder, such as Europe
        _refuse_zone(name)


def _refuse_zone(name: object) -> NoReturn:
    expected = "the IANA name of a time zone, such as 'Europe/Berlin'"
    if not available_timezones():
        expected += " (there is no time zone data on this machine: pip install tzdata)"
    refuse("calendar zone", expected, name)


def _label(period: str, shown: datetime) -> datetime:
    """The time at which the period of a shown time begins on the wall."""
    if period == "hour":
        return shown.replace(minute=0, second=0, microsecond=0)
    midnight = shown.replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "week":
        return midnight - timedelta(days=midnight.weekday())
    if period == "month":
        return midnight.replace(day=1)
    return midnight.replace(month=1, day=1) if period == "year" else midnight


def _following(period: str, label: datetime) -> datetime:
    """The time at which the next period begins on the wall."""
    if period == "hour":
        return label + timedelta(hours=1)
    if period == "day":
        return label + timedelta(days=1)
    if period == "week":
        return label + timedelta(days=7)
    if period == "month":
        return label.replace(year=label.year + label.month // 12, month=label.month % 12 + 1)
    return label.replace(year=label.year + 1)
