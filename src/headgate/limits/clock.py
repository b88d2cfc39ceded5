"""Clocks: microseconds that only go forward, and a way to wait on them."""

import time
from collections.abc import Callable
from datetime import datetime
from typing import Final, Protocol

from headgate.errors import refuse
from headgate.lifecycle import new_lock
from headgate.limits.numbers import LARGEST, Number, microseconds

_BEYOND: Final = 10**308  # where floats end
_WALL_START: Final = 1_800_000_000.0  # the time of day at the zero of a `ManualClock`


class Clock(Protocol):
    """A source of time. Every store has one."""

    def now(self) -> int:
        """Microseconds since some fixed moment."""

    def alarm(self, when: int, wake: Callable[[], None]) -> float | None:
        """Help a caller wait until `when`.

        Return the seconds for which it should sleep, or None if `wake` will be called instead.
        """

    def wall(self) -> float:
        """The time of day, in seconds since 1970: for budgets, and for moments that an operator names."""


class MonotonicClock:
    """The machine's monotonic clock, which setting the time of day doesn't affect."""

    def now(self) -> int:
        return time.monotonic_ns() // 1000

    def alarm(self, when: int, wake: Callable[[], None]) -> float | None:
        return max(when - self.now(), 0) / 1_000_000

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock for tests: it stands still until it is advanced.

    >>> from headgate import Limiter, MemoryStore, per_second
    >>> clock = ManualClock()
    >>> limiter = Limiter(per_second(1), store=MemoryStore(clock=clock))
    >>> bool(limiter.check("a")), bool(limiter.check("a"))
    (True, False)
    >>> clock.advance(1.0)
    >>> bool(limiter.check("a"))
    True

    A caller that waits in `Limiter.acquire` wakes up when the clock passes the moment that it waits for.

    `at` is the time of day when it is made, for budgets by the calendar: a `datetime` with a time zone. Without it,
    that is some time in January 2027.

    >>> from datetime import UTC, datetime
    >>> clock = ManualClock(at=datetime(2028, 2, 28, 23, 59, 59, tzinfo=UTC))
    >>> limiter = Limiter("1/calendar day", store=MemoryStore(clock=clock))
    >>> bool(limiter.check("a")), bool(limiter.check("a"))
    (True, False)
    >>> clock.advance(1)
    >>> bool(limiter.check("a"))                    # on 29 February
    True
    """

    def __init__(self, start: Number = 0, *, at: datetime | None = None) -> None:
        given: object = at  # unchecked
        if given is not None and (not isinstance(given, datetime) or given.tzinfo is None):
            refuse("ManualClock at", "a datetime with a time zone", given)
        self._lock = new_lock()
        self._alarms: list[tuple[int, Callable[[], None]]] = []
        self._set(microseconds("ManualClock start", start))
        self._wall_start = _WALL_START if at is None else at.timestamp() - self._now / 1_000_000

    def now(self) -> int:
        """Microseconds since the clock's zero."""
        return self._now

    def advance(self, seconds: Number) -> None:
        """Go forward, to the nearest microsecond."""
        self._set(self._now + microseconds("ManualClock.advance seconds", seconds))

    def step_back(self, seconds: Number) -> None:
        """Go back, as no clock should, to test that nothing is given or taken by it."""
        self._set(self._now - microseconds("ManualClock.step_back seconds", seconds))

    def alarm(self, when: int, wake: Callable[[], None]) -> float | None:
        with self._lock:
            if when <= self._now:
                return 0.0
            if (when, wake) not in self._alarms:
                self._alarms.append((when, wake))
        return None

    def wall(self) -> float:
        """The time of day: that of its start, and as much later as it has gone on."""
        return self._wall_start + self._now / 1_000_000

    def _set(self, now: int) -> None:
        if not 0 <= now <= LARGEST:
            seconds = now / 1_000_000 if abs(now) < _BEYOND else now // 1_000_000
            refuse("ManualClock", f"a time from 0 to {LARGEST // 1_000_000} seconds", seconds)
        with self._lock:
            self._now = now
            due = [wake for when, wake in self._alarms if when <= now]
            self._alarms = [alarm for alarm in self._alarms if alarm[0] > now]
        for wake in due:
            wake()
