"""Limits written as text: "60/minute burst 10". `str(limit)` writes what `parse` reads."""

import re
from collections.abc import Iterable
from fractions import Fraction
from math import inf
from typing import Final, TypeAlias

from headgate.errors import InvalidInput, refuse
from headgate.limits.all_of import AllOf
from headgate.limits.decision import Limit
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.numbers import DIGITS
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.token_bucket import TokenBucket, per_period

LimitLike: TypeAlias = Limit | str | Iterable[Limit | str]
"""A limit as an argument: itself, its text, or several of either."""

_SECONDS: Final = {
    name: Fraction(seconds)
    for seconds, names in (
        ("0.001", "ms millisecond"),
        ("1", "s sec second"),
        ("60", "m min minute"),
        ("3600", "h hr hour"),
        ("86400", "d day"),
        ("604800", "w wk week"),
        ("2592000", "month"),
        ("31536000", "year"),
    )
    for name in names.split()
}

_NUMBER: Final = rf"(?:\d{{1,{DIGITS}}}(?:\.\d{{1,{DIGITS}}})?)"
_LIMIT: Final = re.compile(
    rf"(?P<count>{_NUMBER})\s*(?:/|per)\s*(?P<times>{_NUMBER})?\s*(?P<unit>[a-z]+)"
    r"(?:\s+burst\s+(?P<burst>\d{1,18})|\s+(?P<sliding>sliding))?",
    re.ASCII | re.IGNORECASE,
)


def parse(text: str) -> Limit:
    """Read a limit, or several separated by ";", "," or "|", which then hold all at once.

    Without "burst" a bucket holds as much as comes in within its period. "sliding" makes a `SlidingWindow`. A period is
    a number of units, or one: ms, second, minute, hour, day, week, month of 30 days, year of 365, or their usual short
    forms. So the notation of `limits` and `throttled-py` is understood, too (docs/coming-from.md).

    >>> from headgate import AllOf, TokenBucket
    >>> parse("60/minute burst 10")
    TokenBucket(capacity=10, refill=60, per=60)
    >>> parse("10 per 5 minutes") == TokenBucket(10, 10, 300)
    True
    >>> parse("100/hour;5/second") == AllOf([TokenBucket(100, 100, 3600), TokenBucket(5, 5, 1)])
    True
    >>> parse("100/minute sliding"), parse("unlimited"), parse("blocked")
    (SlidingWindow(limit=100, window=60), UNLIMITED, BLOCKED)
    """
    if not isinstance(text, str):
        refuse("limit", "a string such as '60/minute'", text)
    return _join([_parse_one(part.strip(), text) for part in re.split(r"[;,|]", text)])


def _parse_one(part: str, text: str) -> Limit:
    if part.lower() == "unlimited":
        return UNLIMITED
    if part.lower() == "blocked":
        return BLOCKED
    match = _LIMIT.fullmatch(part)
    unit = match["unit"].lower() if match else ""
    seconds = _SECONDS.get(unit) or _SECONDS.get(unit.removesuffix("s"))
    if match is None or seconds is None:
        refuse(
            f"limit {text!r}",
            "'COUNT/UNIT' or 'COUNT per N UNITS', then perhaps 'burst N' or 'sliding' (such as '60/minute burst 10')",
            part,
        )
    count, burst = Fraction(match["count"]), None if match["burst"] is None else int(match["burst"])
    try:
        period = Fraction(match["times"] or 1) * seconds
        if match["sliding"]:
            if count.denominator != 1:
                refuse("SlidingWindow limit", "a whole number", match["count"])
            return SlidingWindow(count.numerator, period)
        return per_period(count, period, burst)
    except InvalidInput as error:
        hint = "; to let nothing pass, write 'blocked'" if 0 in (count, burst) else ""
        raise InvalidInput(f"limit {text!r}: {error}{hint}") from None


def limit_of(where: str, given: object) -> Limit:
    """A limit, its text, or several of either, as one limit."""
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, Limit):
        return given
    if not isinstance(given, Iterable):
        refuse(where, "a limit, its text, or several of either", given)
    return _join([limit_of(where, one) for one in given])


def _join(limits: list[Limit]) -> Limit:
    """Several limits as one; equal ones count once."""
    different = list(dict.fromkeys(limits))
    return different[0] if len(different) == 1 else AllOf(different)


def rate_of(limit: Limit) -> float:
    """A limit as so many per second on average."""
    if isinstance(limit, TokenBucket):
        return limit.refill / limit.per
    if isinstance(limit, SlidingWindow):
        return limit.capacity / limit.window
    if isinstance(limit, AllOf):
        return min(map(rate_of, limit.parts))
    return inf if limit is UNLIMITED else 0.0
