"""Timestamps in logs, as microseconds since 1970, UTC."""

import re
from datetime import UTC, date, datetime, timedelta
from typing import Final

from headgate.limits.numbers import LARGEST

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ACCESS: Final = re.compile(r"(\d\d)/([A-Z][a-z]{2})/(\d{4}):(\d\d):(\d\d):(\d\d) ([+-])(\d\d)(\d\d)", re.ASCII)
_NUMBER: Final = re.compile(r"(\d{1,19})(?:\.(\d{1,12})\d*)?", re.ASCII)
_LONGEST: Final = 64  # characters
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = _EPOCH.toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)


def parse_timestamp(text: str) -> int | None:
    """Parse an access log's time, ISO 8601 (UTC without a zone) or a number; None for anything else.

    A number is in seconds since 1970, or in milliseconds, microseconds or nanoseconds if it is too large for that.

    >>> parse_timestamp("10/Oct/2000:13:55:36 -0700")
    971211336000000
    >>> parse_timestamp("2000-10-10T20:55:36Z") == parse_timestamp("971211336000") == 971211336000000
    True
    """
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    found = _ACCESS.fullmatch(text)
    number = None if found else _NUMBER.fullmatch(text)
    if found:
        at = _access(found)
    elif number:
        at = _scaled(int(number[1]), number[2] or "")
    else:
        at = _iso(text)
    return at if at is not None and 0 <= at <= LARGEST else None


def parse_number(number: float) -> int | None:
    """Parse a time that is a number, as `parse_timestamp` does."""
    if isinstance(number, int):
        at = _scaled(number, "") if 0 <= number < 10**19 else None
    else:
        # The shortest text of a float keeps its microseconds.
        at = parse_timestamp(repr(number)) if 0 <= number < 1e16 else None
    return at if at is not None and at <= LARGEST else None


def format_timestamp(at: int) -> str:
    """Format a time in ISO 8601, without a fraction if it is a whole second."""
    return (_EPOCH + timedelta(microseconds=at)).isoformat().replace("+00:00", "Z")


def _access(found: re.Match[str]) -> int | None:
    day, month, year, hour, minute, second, sign, zone_hours, zone_minutes = found.groups()
    if month not in _MONTHS or int(hour) > 23 or int(minute) > 59 or int(second) > 60:
        return None
    try:
        days = date(int(year), _MONTHS.index(month) + 1, int(day)).toordinal() - _EPOCH_DAY
    except ValueError:
        return None
    zone = int(zone_hours) * 3600 + int(zone_minutes) * 60
    seconds = days * 86_400 + int(hour) * 3600 + int(minute) * 60 + int(second)
    return (seconds - (zone if sign == "+" else -zone)) * 1_000_000


def _scaled(number: int, decimals: str) -> int:
    """Microseconds of a number. Its size determines its unit: 10**11 seconds are 3,000 years."""
    digits = 6
    for most in (10**11, 10**14, 10**17):
        if number < most:
            break
        digits -= 3
    if digits < 0:
        return number // 1000
    return int(f"{number}{decimals[:digits]:0<{digits}}")


def _iso(text: str) -> int | None:
    try:
        at = datetime.fromisoformat(text)
        return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
    except (ValueError, OverflowError):
        return None
