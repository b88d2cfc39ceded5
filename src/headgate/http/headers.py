"""Rate limit headers: their dialects, and how a response is read.

Two dialects are known. "ratelimit" is draft-ietf-httpapi-ratelimit-headers-11, in structured fields (RFC 9651):

    RateLimit-Policy: "default";q=10;w=10
    RateLimit: "default";r=9;t=1

"x-ratelimit" is the older triple `X-RateLimit-Limit`, `-Remaining` and `-Reset`, all in whole numbers.

A policy states the quota (`q`) and the seconds in which all of it comes back (`w`). `r` is the remaining quota. `t` is
the seconds, rounded up, until the full quota is back; or, where nothing is left or the request was denied, until the
next request can pass. So a client that waits `t` when `r` is 0 is never early and less than a second late.
`Retry-After` is sent with denials only, and is never shorter than `t`.
"""

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from math import ceil
from typing import Final, Literal, NamedTuple, TypeAlias, TypeGuard

from headgate.http.structured_fields import parse_items

Dialect: TypeAlias = Literal["ratelimit", "x-ratelimit", "both", "none"]

LARGEST: Final = 999_999_999_999_999
"""The largest Integer that a structured field can hold."""
EPOCH: Final = 1_000_000_000
"""A Reset from here on is a moment, not a span."""


class QuotaPolicy(NamedTuple):
    """An item of RateLimit-Policy: `quota` within `window` seconds (None if unknown)."""

    name: str
    quota: int
    window: int | None = None
    unit: str = "requests"
    partition: bytes | None = None


class ServiceLimit(NamedTuple):
    """An item of RateLimit: the quota that remains under a policy, and the seconds until there is more (None if
    unknown)."""

    name: str
    remaining: int
    reset: int | None = None
    partition: bytes | None = None


class RateLimitHeaders(NamedTuple):
    """The rate limit headers of a response. `retry_after` is in seconds."""

    policies: tuple[QuotaPolicy, ...] = ()
    limits: tuple[ServiceLimit, ...] = ()
    retry_after: int | None = None


def read_headers(headers: Mapping[str, str], now: float | None = None) -> RateLimitHeaders:
    """Read the headers of a response, in either dialect. Malformed ones are ignored.

    `headers` are looked up by lower-case names. Dates are compared with `now`, the time of day in seconds since 1970.

    >>> read_headers({"ratelimit": '"default";r=9;t=1'}).limits
    (ServiceLimit(name='default', remaining=9, reset=1, partition=None),)
    """
    moment = time.time() if now is None else now
    policies = parse_policies(headers.get("ratelimit-policy", ""))
    limits = parse_limits(headers.get("ratelimit", ""))
    if not limits:
        policies, limits = _read_triple(headers, moment) or (policies, limits)
    return RateLimitHeaders(policies, limits, parse_retry_after(headers.get("retry-after", ""), moment))


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
    try:
        moment = parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
    return max(ceil(moment - (time.time() if now is None else now)), 0)


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


def _number(text: str) -> float | None:
    """The number that a value begins with: some servers write "60, 60;w=60", or fractions of a second."""
    match = re.match(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(?:[,;]|$)", text, re.ASCII)
    return None if match is None else float(match[1])


def _is_key(value: object) -> TypeGuard[bytes | None]:
    return value is None or isinstance(value, bytes)
