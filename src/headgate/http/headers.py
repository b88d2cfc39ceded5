"""Rate limit headers: their dialects, and how a response is read.

Two dialects are written and read. "ratelimit" is draft-ietf-httpapi-ratelimit-headers-11, in structured fields (RFC
9651):

    RateLimit-Policy: "default";q=10;w=10
    RateLimit: "default";r=9;t=1

"x-ratelimit" is the older triple `X-RateLimit-Limit`, `-Remaining` and `-Reset`, all in whole numbers.

A policy states the quota (`q`) and the seconds in which all of it comes back (`w`). `r` is the remaining quota. `t` is
the seconds, rounded up, until the full quota is back; or, where nothing is left or the request was denied, until the
next request can pass. So a client that waits `t` when `r` is 0 is never early and less than a second late.
`Retry-After` is sent with denials only, and is never shorter than `t`.

A quota of requests in flight has the unit (`qu`) "concurrent-requests", and a budget its own; what is in flight, and a
budget in all, has no window. Where nobody knows when the quota is back, there is no `t`. The older triple has no units:
it tells of requests in flight only where they are the reason for a denial.

Two more, of servers of language models, are only read. OpenAI, and the many servers that are compatible with it, state
the reset as a duration, to a millisecond:

    x-ratelimit-limit-requests: 5000        x-ratelimit-limit-tokens: 160000
    x-ratelimit-remaining-requests: 4999    x-ratelimit-remaining-tokens: 159976
    x-ratelimit-reset-requests: 12ms        x-ratelimit-reset-tokens: 6m0s

Some of these servers give it in seconds, or as seconds since 1970. Anthropic states a moment (RFC 3339), for requests,
tokens, input tokens and output tokens:

    anthropic-ratelimit-requests-limit: 1000
    anthropic-ratelimit-requests-remaining: 999
    anthropic-ratelimit-requests-reset: 2027-01-15T08:00:30Z

Both mean the time at which the *full* quota is back, even where nothing is left. Neither states the window.
"""

import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from fractions import Fraction
from math import ceil
from typing import Final, Literal, NamedTuple, TypeAlias, TypeGuard, get_args

from headgate.http.structured_fields import parse_items

Dialect: TypeAlias = Literal["ratelimit", "x-ratelimit", "both", "none"]
DIALECTS: Final[tuple[Dialect, ...]] = get_args(Dialect)

LARGEST: Final = 999_999_999_999_999
"""The largest Integer that a structured field can hold."""
EPOCH: Final = 1_000_000_000
"""A Reset from here on is a moment, not a span."""
CONCURRENT: Final = "concurrent-requests"
"""The unit of a quota of requests in flight: the draft's name."""
_LONGEST_VALUE: Final = 64  # characters, of the dialects of language models: no valid value is longer
_OPENAI: Final = ("requests", "tokens")
_ANTHROPIC: Final = ("requests", "tokens", "input-tokens", "output-tokens")
_COUNT: Final = re.compile(r"\d{1,15}", re.ASCII)
_SECONDS: Final = re.compile(r"\d{1,15}(?:\.\d{1,20})?", re.ASCII)
_DURATION_PART: Final = re.compile(r"(\d{1,15}(?:\.\d{1,20})?)(h|ms|m|s|us|µs|ns)", re.ASCII)
_UNITS: Final[dict[str, Fraction]] = {
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}
_MOMENT: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?P<fraction>\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)", re.ASCII | re.IGNORECASE
)


class QuotaPolicy(NamedTuple):
    """An item of RateLimit-Policy: `quota` within `window` seconds (None if unknown)."""

    name: str
    quota: int
    window: int | None = None
    unit: str = "requests"
    partition: bytes | None = None


class ServiceLimit(NamedTuple):
    """An item of RateLimit: the quota that remains under a policy, and the seconds until there is more (None if
    unknown; with a fraction if the server states one)."""

    name: str
    remaining: int
    reset: float | None = None
    partition: bytes | None = None


class DatedLimit(ServiceLimit):
    """One whose reset was stated as a moment: `reset` counts from when the response was sent, however long that took;
    otherwise from when the request was judged."""

    __slots__ = ()


class RateLimitHeaders(NamedTuple):
    """The rate limit headers of a response. `retry_after` is in seconds, with a fraction if the server states one."""

    policies: tuple[QuotaPolicy, ...] = ()
    limits: tuple[ServiceLimit, ...] = ()
    retry_after: float | None = None


def read_headers(headers: Mapping[str, str], now: float | None = None) -> RateLimitHeaders:
    """Read the headers of a response, in any dialect. Malformed ones are ignored.

    `headers` are looked up by lower-case names. Dates are compared with `now`, the time of day in seconds since 1970;
    those of Anthropic with the Date of the response, if it has one.

    >>> read_headers({"ratelimit": '"default";r=9;t=1'}).limits
    (ServiceLimit(name='default', remaining=9, reset=1, partition=None),)
    >>> openai = read_headers({"x-ratelimit-remaining-tokens": "159976", "x-ratelimit-reset-tokens": "9ms"})
    >>> openai.limits[0].name, openai.limits[0].reset
    ('tokens', 0.009)
    """
    moment = time.time() if now is None else now
    policies = parse_policies(headers.get("ratelimit-policy", ""))
    limits = parse_limits(headers.get("ratelimit", ""))
    if not limits:
        policies, limits = _read_triple(headers, moment) or (policies, limits)
    for quota, limit in _read_llm_headers(headers, moment):
        if all(limit.name != other.name for other in limits):
            policies, limits = policies + quota, (*limits, limit)
    return RateLimitHeaders(policies, limits, _read_retry_after(headers, moment))


def parse_policies(value: str) -> tuple[QuotaPolicy, ...]:
    """The valid items of RateLimit-Policy."""
    found = []
    for name, given in parse_items(value):
        quota, window, unit, key = given.get("q"), given.get("w"), given.get("qu", "requests"), given.get("pk")
        if is_count(quota) and (window is None or is_count(window)) and isinstance(unit, str) and _is_key(key):
            found.append(QuotaPolicy(name, quota, window, unit, key))
    return tuple(found)


def parse_limits(value: str) -> tuple[ServiceLimit, ...]:
    """The valid items of RateLimit."""
    found = []
    for name, given in parse_items(value):
        remaining, reset, key = given.get("r"), given.get("t"), given.get("pk")
        if is_count(remaining) and (reset is None or is_count(reset)) and _is_key(key):
            found.append(ServiceLimit(name, remaining, reset, key))
    return tuple(found)


def parse_retry_after(value: str, now: float | None = None) -> int | None:
    """The seconds that Retry-After asks for, rounded up, given as a number or a date; None if malformed or empty."""
    number = _number(value)
    if number is not None:
        return ceil(number)
    moment = _parse_date(value)
    return None if moment is None else max(ceil(moment - (time.time() if now is None else now)), 0)


def _read_retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Read Retry-After, and Retry-After-Ms, which is more precise. If they contradict each other, the longer counts."""
    seconds = parse_retry_after(headers.get("retry-after", ""), now)
    precise = parse_milliseconds(headers.get("retry-after-ms", ""))
    if precise is None or (seconds is not None and precise <= seconds - 1):
        return seconds
    return precise


def parse_duration(value: str) -> float | None:
    """Seconds, rounded up to a microsecond, of a duration such as "1h2m3.5s" or "17ms"; a bare number is in seconds.

    None if malformed.

    >>> [parse_duration(value) for value in ("6m0s", "17ms", "1h2m3.5s", "30", "soon")]
    [360.0, 0.017, 3723.5, 30.0, None]
    """
    text = _bounded(value)
    if _SECONDS.fullmatch(text):
        return _whole_microseconds(Fraction(text))
    total, at = Fraction(0), 0
    while (part := _DURATION_PART.match(text, at)) is not None:
        total += Fraction(part[1]) * _UNITS[part[2]]
        at = part.end()
    return _whole_microseconds(total) if text and at == len(text) else None


def parse_moment(value: str) -> Fraction | None:
    """Seconds since 1970 of a moment in RFC 3339; None if malformed.

    >>> [float(parse_moment(f"1970-01-01T00:01:00{rest}")) for rest in ("Z", ".250Z", "+00:01")]
    [60.0, 60.25, 0.0]
    """
    text = _bounded(value)
    match = _MOMENT.fullmatch(text)
    if match is None:
        return None
    fraction = match["fraction"] or ""
    try:
        whole = datetime.fromisoformat(text.replace(fraction, "", 1).upper())
        return Fraction(whole.timestamp()) + Fraction(fraction or 0)
    except (ValueError, OverflowError):
        return None


def parse_milliseconds(value: str) -> float | None:
    """Seconds, rounded up to a microsecond, of a number of milliseconds; None if malformed."""
    text = _bounded(value)
    return _whole_microseconds(Fraction(text) / 1000) if _SECONDS.fullmatch(text) else None


def is_temporary(status: int) -> bool:
    """Whether a request that was answered with this status may pass if it is repeated later."""
    return status in (408, 425, 429) or status >= 500


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, 0 or more."""
    return type(value) is int and value >= 0


def _read_triple(
    headers: Mapping[str, str], now: float
) -> tuple[tuple[QuotaPolicy, ...], tuple[ServiceLimit, ...]] | None:
    """Read X-RateLimit-Limit, -Remaining and -Reset, which many servers give as a moment instead of a span."""
    for prefix in ("x-ratelimit-", "ratelimit-", "x-rate-limit-"):
        remaining = _number(headers.get(f"{prefix}remaining", ""))
        if remaining is None:
            continue
        limit, reset = _number(headers.get(f"{prefix}limit", "")), _number(headers.get(f"{prefix}reset", ""))
        if reset is not None and reset >= EPOCH:
            reset = max(ceil(reset - now), 0)
        policies = () if limit is None else (QuotaPolicy("", ceil(limit)),)
        return policies, (ServiceLimit("", int(remaining), None if reset is None else ceil(reset)),)
    return None


def _read_llm_headers(headers: Mapping[str, str], now: float) -> Iterator[tuple[tuple[QuotaPolicy, ...], ServiceLimit]]:
    """Read the dialects of OpenAI and Anthropic."""

    def until(moment: Fraction) -> float:
        date = _parse_date(_bounded(headers.get("date", "")))
        return _whole_microseconds(moment - Fraction(now if date is None else date))

    def policy(name: str, limit: str) -> tuple[QuotaPolicy, ...]:
        quota = _parse_count(headers.get(limit, ""))
        unit = "requests" if name == "requests" else "tokens"
        return () if quota is None else (QuotaPolicy(name, quota, unit=unit),)

    for name in _OPENAI:
        remaining = _parse_count(headers.get(f"x-ratelimit-remaining-{name}", ""))
        if remaining is not None:
            reset = parse_duration(headers.get(f"x-ratelimit-reset-{name}", ""))
            if reset is not None and reset >= EPOCH:
                yield policy(name, f"x-ratelimit-limit-{name}"), DatedLimit(name, remaining, until(Fraction(reset)))
            else:
                yield policy(name, f"x-ratelimit-limit-{name}"), ServiceLimit(name, remaining, reset)
    for name in _ANTHROPIC:
        prefix = f"anthropic-ratelimit-{name}-"
        remaining = _parse_count(headers.get(f"{prefix}remaining", ""))
        if remaining is not None:
            moment = parse_moment(headers.get(f"{prefix}reset", ""))
            yield policy(name, f"{prefix}limit"), DatedLimit(name, remaining, None if moment is None else until(moment))


def _number(text: str) -> float | None:
    """The number that a value begins with: some servers write "60, 60;w=60", or fractions of a second."""
    match = re.match(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(?:[,;]|$)", text, re.ASCII)
    return None if match is None else float(match[1])


def _is_key(value: object) -> TypeGuard[bytes | None]:
    return value is None or isinstance(value, bytes)


def _parse_count(value: str) -> int | None:
    text = _bounded(value)
    return int(text) if _COUNT.fullmatch(text) else None


def _parse_date(value: str) -> float | None:
    try:
        return parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _bounded(value: str) -> str:
    """A value without the space around it; "" if it is too long to be valid."""
    return value.strip(" \t") if len(value) <= _LONGEST_VALUE else ""


def _whole_microseconds(seconds: Fraction) -> float:
    return max(ceil(seconds * 1_000_000), 0) / 1_000_000
