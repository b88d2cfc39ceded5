"""Limits written as text: "60/minute burst 10". `str(limit)` writes what `parse` reads."""

import re
from collections.abc import Iterable
from fractions import Fraction
from math import inf
from typing import Final, TypeAlias

from headgate.errors import InvalidInput, RateLimited, refuse
from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.calendar import PERIODS
from headgate.limits.decision import Decision, Limit
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.numbers import DIGITS
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
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
_BUDGET: Final = re.compile(
    rf"(?P<amount>{_NUMBER})(?:\s*(?P<unit>[a-z][a-z_]*(?::\d+)?))?"
    rf"(?:\s+in\s+all|(?:\s*/\s*|\s+per\s+)calendar\s+(?P<period>{'|'.join(PERIODS)})(?:\s+in\s+(?P<zone>[\w+/-]+))?)",
    re.ASCII | re.IGNORECASE,
)
_SLOTS: Final = re.compile(r"(?P<count>\d{1,18})\s+in\s+flight", re.ASCII | re.IGNORECASE)
_LIKE_BUDGET: Final = re.compile(r"\bcalendar\b|\s+in\b|\d\s+(?!per\b)[a-z_]+(?::\d*)?\s*(?:/|per\b)", re.IGNORECASE)
_LIKE_SLOTS: Final = re.compile(r"(\d{1,18})\s*(?:in-?flight|concurrent|parallel|slots?)", re.ASCII | re.IGNORECASE)
_RATE_WITH_UNIT: Final = re.compile(
    rf"({_NUMBER})\s*([a-z][a-z_]{{0,30}})\s*(?:/\s*|\bper\s+)([a-z]+)\b.*", re.ASCII | re.IGNORECASE
)
_THOUSANDS: Final = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)", re.ASCII)

_RATES: Final = (
    "'COUNT/UNIT' or 'COUNT per N UNITS', then perhaps 'burst N' or 'sliding' (such as '60/minute burst 10'; UNIT is "
    "ms, second, minute, hour, day, week, month or year)"
)
_BUDGETS: Final = (
    "'AMOUNT UNIT/calendar PERIOD in ZONE' (such as '500 usd/calendar month in Europe/Berlin', or '500/calendar day'; "
    f"PERIOD is {', '.join(PERIODS[:-1])} or {PERIODS[-1]}), 'AMOUNT UNIT in all' or 'COUNT in flight'"
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

    A `Budget` counts by the calendar, or in all: with a unit, and in a time zone (UTC if it isn't named).

    >>> parse("500 usd/calendar month in Europe/Berlin")
    Budget(500, 'month', unit='usd', zone='Europe/Berlin')
    >>> parse("100000 tokens/calendar hour"), parse("2.50 credits:2 in all"), parse("5 in flight")
    (Budget(100000, 'hour', unit='tokens'), Budget('2.5', unit='credits:2'), Slots(count=5))
    """
    return _join(parse_each(text))


def parse_each(text: str, unit: str = "", expected: str = "", zone: str = "UTC") -> list[Limit]:
    """The limits in a text, one by one. A budget that names no unit is one of `unit`; one without a zone is in `zone`.

    `expected` says what the text should have been, if it is none of all kinds.
    """
    if not isinstance(text, str):
        refuse("limit", "a string such as '60/minute'", text)
    return [_parse_one(part, text, unit, expected, zone) for part in _parts(text)]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"[;,|]", text)]


def _parse_one(part: str, text: str, unit: str, expected: str, zone: str) -> Limit:
    try:
        limit = _read(part, unit, zone)
    except InvalidInput as error:
        raise InvalidInput(f"limit {text!r:.100}: {error}") from None
    if limit is None:
        _refuse_commas(text, unit, zone)
        where = "limit" if part == text.strip() else f"limit {text!r:.100}"  # the refusal shows the part itself
        refuse(where, expected or _nearly(part) or _expected(part), part)
    return limit


def _read(part: str, unit: str, zone: str) -> Limit | None:
    """One limit, or None for what is written as none."""
    if part.lower() == "unlimited":
        return UNLIMITED
    if part.lower() == "blocked":
        return BLOCKED
    return _rate(part) or _budget(part, unit, zone)


def _is_readable(part: str, unit: str = "", zone: str = "UTC") -> bool:
    try:
        return _read(part, unit, zone) is not None
    except InvalidInput:
        return False


def _refuse_commas(text: str, unit: str, zone: str) -> None:
    """Refuse the commas of thousands in a text that is limits, or nearly, without them."""
    thousands = _THOUSANDS.search(text)
    if thousands is None:
        return
    joined = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    unreadable = [part for part in _parts(joined) if not _is_readable(part, unit, zone)]
    nearly = [_nearly(part) for part in unreadable]
    if all(nearly):
        right = f": {nearly[0]}" if nearly else f" (write {joined!r:.100})"
        without = f"numbers without commas, because a comma separates limits{right}"
        refuse(f"limit {text!r:.100}", without, thousands[0])


def _nearly(part: str) -> str:
    """How a limit is written, for what is written nearly like it; "" for anything else. Each example can be read."""
    slots, rate = _LIKE_SLOTS.fullmatch(part), _RATE_WITH_UNIT.fullmatch(part)
    if slots is not None:
        return _examples("'COUNT in flight'", f"{slots[1]} in flight", "5 in flight")
    seconds = None if rate is None else _seconds(rate[3])
    if rate is None or seconds is None:
        return ""
    count, unit = rate[1], rate[2]
    period = next((period for period in PERIODS if _SECONDS[period] == seconds), "day")
    kinds = [
        _examples("a rate without a unit", f"{count}/{rate[3].lower()}"),
        _examples("a budget", f"{count} {unit}/calendar {period}", f"{count}/calendar {period}"),
    ]
    return ", or ".join(filter(None, kinds))


def _examples(kind: str, *texts: str) -> str:
    """A kind of limit with the first of the texts that can be read; "" if none can be."""
    return next((f"{kind}, such as '{text}'" for text in texts if _is_readable(text)), "")


def _expected(part: str) -> str:
    """How limits are written: rates, or what looks more like the part."""
    return _BUDGETS if _LIKE_BUDGET.search(part) else _RATES


def _seconds(unit: str) -> Fraction | None:
    """The seconds of a unit, in the singular or the plural."""
    return _SECONDS.get(unit.lower()) or _SECONDS.get(unit.lower().removesuffix("s"))


def _rate(part: str) -> Limit | None:
    """A bucket or a window, or None for what is written as neither."""
    match = _LIMIT.fullmatch(part)
    seconds = None if match is None else _seconds(match["unit"])
    if match is None or seconds is None:
        return None
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
        raise InvalidInput(f"{error}{hint}") from None


def _budget(part: str, default: str, default_zone: str) -> Limit | None:
    """A budget or slots, or None for what is written as neither."""
    slots, budget = _SLOTS.fullmatch(part), _BUDGET.fullmatch(part)
    if slots is not None:
        return Slots(int(slots["count"]))
    if budget is None:
        return None
    amount, unit, period, zone = budget.group("amount", "unit", "period", "zone")
    zone = zone or (default_zone if period else "UTC")
    return Budget(amount, period and period.lower(), unit=(unit or default).lower(), zone=zone)


def limit_of(where: str, given: object) -> Limit:
    """A limit, its text, or several of either, as one limit."""
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, Limit):
        return given
    if not isinstance(given, Iterable):
        if type(given) is int and given > 0:  # a limit is meant, and lacks its unit
            refuse(where, f"a limit such as '{given}/minute', or several", given)
        refuse(where, "a limit, its text, or several of either", given)
    return _join([limit_of(where, one) for one in given])


def rate_limit_of(where: str, given: object) -> Limit:
    """`limit_of` where a policy counts: its limits are rates, "unlimited" or "blocked", or several of them."""
    limit = limit_of(where, given)
    if limit.shares_counts:
        elsewhere = "budgets and slots belong to a Limiter, or to [accounts] of a policy"
        refuse(where, f"a rate such as '60/minute' ({elsewhere})", str(limit))
    return limit


def _join(limits: list[Limit]) -> Limit:
    """Several limits as one; equal ones count once."""
    different = list(dict.fromkeys(limits))
    return different[0] if len(different) == 1 else AllOf(different)


def denial_error(key: str, decision: Decision) -> RateLimited:
    """The error for a denial, where one is raised."""
    limit = decision.limit
    return RateLimited(key, rate_of(limit), str(limit), decision.retry_ms, degraded=decision.degraded)


def rate_of(limit: Limit) -> float:
    """A limit as so many per second on average. Slots have no rate, and a budget in all comes to none: 0."""
    if isinstance(limit, TokenBucket):
        return limit.refill / limit.per
    if isinstance(limit, SlidingWindow):
        return limit.capacity / limit.window
    if isinstance(limit, Budget):
        return 0.0 if limit.period is None else float(limit.amount) / float(_SECONDS[limit.period])
    if isinstance(limit, AllOf):
        return min([rate_of(part) for part in limit.parts if part.counts_costs], default=0.0)
    return inf if limit is UNLIMITED else 0.0
