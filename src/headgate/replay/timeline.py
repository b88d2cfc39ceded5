"""The timeline: counts per interval. All intervals have one width, which grows with the log to bound their number."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from headgate.replay.engine import OUTCOMES, Counts, add_counts

MAX_INTERVALS: Final = 240
"""Maximum number of intervals."""

# Each width is a multiple of the one before, so that intervals can be merged; beyond a day the width doubles.
_SECONDS: Final = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 86_400)


class Interval(NamedTuple):
    """The outcomes under each policy of the requests from `start` on, in microseconds."""

    start: int
    counts: list[Counts]


class Timeline:
    """Counts over time, for each policy. Intervals begin at whole multiples of their width, in UTC."""

    def __init__(self, policies: int) -> None:
        self._policies: Final = policies
        self._step = 0
        self.width = _SECONDS[0] * 1_000_000
        """Width of an interval, in microseconds."""
        self._rows: dict[int, list[Counts]] = {}
        self._first: int | None = None

    def interval(self, at: int) -> tuple[list[Counts], int]:
        """The counts of the interval that contains a time, to be added to, and the end of that interval."""
        if self._first is None:
            self._first = at // self.width
        while at // self.width - self._first >= MAX_INTERVALS:
            self._widen()
        place = at // self.width
        row = self._rows.get(place)
        if row is None:
            row = self._rows[place] = self._empty()
        return row, (place + 1) * self.width

    def intervals(self) -> Iterator[Interval]:
        """All intervals in order, including empty ones."""
        if self._first is not None:
            for place in range(self._first, max(self._rows) + 1):
                yield Interval(place * self.width, self._rows.get(place) or self._empty())

    def _empty(self) -> list[Counts]:
        return [[0] * len(OUTCOMES) for _ in range(self._policies)]

    def _widen(self) -> None:
        self._step += 1
        before = self.width
        self.width = _SECONDS[self._step] * 1_000_000 if self._step < len(_SECONDS) else 2 * before
        times = self.width // before
        rows, self._rows = self._rows, {}
        for place, counts in rows.items():
            joined = self._rows.setdefault(place // times, self._empty())
            for mine, more in zip(joined, counts, strict=True):
                add_counts(mine, more)
        self._first = (self._first or 0) // times
