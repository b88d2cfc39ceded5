"""A clock that knows the date, for limits of the calendar."""

from datetime import UTC, datetime

from headgate import ManualClock


def calendar_clock() -> ManualClock:
    """It is 8 o'clock in UTC on the 17th of November 2026, a Tuesday."""
    return ManualClock(1000, at=datetime(2026, 11, 17, 8, tzinfo=UTC))
