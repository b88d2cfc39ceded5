"""What a decision is in HTTP: headers and bodies, written by servers and read by clients.

Two dialects of headers are known. "ratelimit" is draft-ietf-httpapi-ratelimit-headers-11, in structured fields
(RFC 9651):

    RateLimit-Policy: "default";q=10;w=10
    RateLimit: "default";r=9;t=1

"x-ratelimit" is the older triple `X-RateLimit-Limit`, `-Remaining` and `-Reset`, all in whole numbers.

A policy says how much there is at most (`q`) and in how many seconds all of it comes back (`w`). What is left is told
as `r`, and with it `t`, seconds rounded up: until everything is back; or, where nothing is left or the request was
denied, until the next request can pass. So a client that waits `t` when `r` is 0 is never early and hardly late.
`Retry-After` is sent with denials only, and is never shorter than `t`.
"""

import json
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from math import ceil
from typing import Final, Literal, NamedTuple, TypeAlias, TypeGuard, get_args

from headgate.errors import refuse
from headgate.http.header_writer import Lines, reset_of
from headgate.http.structured_fields import byte_sequence, items, string
from headgate.limits.decision import NEVER, Decision, Limit
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.token_bucket import TokenBucket

Dialect: TypeAlias = Literal["ratelimit", "x-ratelimit", "both", "none"]
Headers: TypeAlias = list[tuple[str, str]]

PROBLEM: Final = "application/problem+json"
_PROBLEMS: Final = "https://iana.org/assignments/http-problem-types#"
NO_WAIT_HELPS: Final = 60
"""Seconds that a caller is told to wait where no wait would help as things are: an operator may change them."""
_EPOCH: Final = 1_000_000_000  # a Reset from here on is a moment, not a span
_LARGEST: Final = 999_999_999_999_999  # of an Integer in a structured field


class Quota(NamedTuple):
    """One policy: `quota` within `window` seconds (None if that isn't told)."""

    name: str
    quota: int
    window: int | None = None
    unit: str = "requests"
    partition: bytes | None = None


class Left(NamedTuple):
    """What is left under a policy, and after how many seconds there will be more (None if that isn't told)."""

    name: str
    remaining: int
    reset: int | None = None
    partition: bytes | None = None


class Told(NamedTuple):
    """What the headers of a response say: policies, what is left, and the seconds that a denied one shall wait."""

    policies: tuple[Quota, ...] = ()
    left: tuple[Left, ...] = ()
    retry_after: int | None = None


class Denial(NamedTuple):
    """The body of an answer to a request that was denied: problem details (RFC 9457), with what headgate adds."""

    status: int
    kind: str
    """"quota-exceeded", "temporary-reduced-capacity" or "abnormal-usage-detected", of IANA's problem types."""
    detail: str
    retry_after_ms: int
    tier: str
    policies: tuple[str, ...] = ()
    """The names of the policies that were violated."""

    def encode(self) -> bytes:
        return json.dumps(
            {
                "type": f"{_PROBLEMS}{self.kind}",
                "title": "Too many requests" if self.status == 429 else "Not at the moment",
                "status": self.status,
                "detail": self.detail,
                "violated-policies": self.policies,
                "error": "rate_limited",
                "retry_after_ms": self.retry_after_ms,
                "tier": self.tier,
            },
            separators=(",", ":"),
        ).encode()

    @property
    def headers(self) -> Headers:
        """What goes with the body in any dialect. The answer holds for this moment only: no cache shall keep it."""
        return [
            ("content-type", PROBLEM),
            ("retry-after", str(self.retry_after_ms // 1000)),
            ("cache-control", "no-store"),
        ]


# A decision, told -----------------------------------------------------------------------------------------------------


def wait_ms(decision: Decision) -> int:
    """The wait that a denied caller is told, in milliseconds, rounded up to whole seconds, never below one.

    Where no wait helps as things are, an operator may change them: then it is the backoff's advice, or a minute.
    """
    seconds = decision.retry_after
    if seconds is None:
        seconds = NO_WAIT_HELPS if decision.violation is None else decision.violation.advised
    return max(ceil(seconds), 1) * 1000


def denial(decision: Decision, tier: str) -> Denial:
    """What a request is answered that was denied under a tier (without a policy: under the name of a limit).

    It is 429, or 503 where it was denied because the store was away or full, which isn't the caller's fault.
    """
    wait = wait_ms(decision)
    names = (_name(decision, tier),)
    if decision.degraded:
        detail = f"requests can't be counted at the moment; try again in {wait // 1000} s"
        return Denial(503, "temporary-reduced-capacity", detail, wait, tier, names)
    return Denial(429, "quota-exceeded", f"too many requests; try again in {wait // 1000} s", wait, tier, names)


def told(decision: Decision, limit: Limit, name: str = "default") -> Told:
    """What the headers of a response say after a decision under a limit, which may be made of several.

    One limit is a policy of this name; each of several has its own text as its name. Without a limit that counts,
    there is nothing to tell.
    """
    policies = quotas(limit, name)
    if not policies:
        return Told()
    reset = reset_of(decision)
    left = Left(_name(decision, name), decision.remaining, None if reset == NEVER else reset)
    return Told(policies, (left,), None if decision else wait_ms(decision) // 1000)


def quotas(limit: Limit, name: str = "default") -> tuple[Quota, ...]:
    """The policies that a limit is made of; none, if it lets everything pass, or more than headers can tell."""
    if any(part.capacity > _LARGEST for part in limit.parts):
        return ()
    names = [name] if limit.parts[0] is limit else [str(part) for part in limit.parts]
    return tuple(Quota(_safe(of), part.capacity, _window(part)) for of, part in zip(names, limit.parts, strict=True))


def _name(decision: Decision, name: str) -> str:
    return _safe(name if decision.bound is None else str(decision.limit))


def _window(limit: Limit) -> int | None:
    """Whole seconds in which all that a limit allows comes back."""
    if isinstance(limit, TokenBucket):
        capacity, refill, per = limit.fields()
        return max(ceil(capacity * per / refill), 1)
    if isinstance(limit, SlidingWindow):
        return max(ceil(limit.window), 1)
    return None


def _safe(name: str) -> str:
    """A name as a structured field's String can hold it: others than printable ASCII are replaced."""
    return name if name.isascii() and name.isprintable() else "".join(c if " " <= c <= "~" else "?" for c in name)


# Writing --------------------------------------------------------------------------------------------------------------


def write(what: Told, dialect: Dialect = "ratelimit") -> Headers:
    """The headers that say it. The triple has room for one policy: the first that `left` speaks of."""
    headers: Headers = []
    if dialect in ("ratelimit", "both"):
        if what.policies:
            headers.append(("ratelimit-policy", format_policies(what.policies)))
        if what.left:
            headers.append(("ratelimit", format_left(what.left)))
    if dialect in ("x-ratelimit", "both") and what.left:
        (left, *_) = what.left
        most = [quota.quota for quota in what.policies if quota.name == left.name]
        headers += [("x-ratelimit-limit", str(most[0]))] if most else []
        headers.append(("x-ratelimit-remaining", str(left.remaining)))
        headers += [] if left.reset is None else [("x-ratelimit-reset", str(left.reset))]
    if what.retry_after is not None:
        headers.append(("retry-after", str(what.retry_after)))
    return headers


def format_policies(policies: tuple[Quota, ...]) -> str:
    """The value of RateLimit-Policy."""
    return ", ".join(
        f"{string(of.name)};q={of.quota}"
        + ("" if of.unit == "requests" else f";qu={string(of.unit)}")
        + ("" if of.window is None else f";w={of.window}")
        + _partition(of.partition)
        for of in policies
    )


def format_left(left: tuple[Left, ...]) -> str:
    """The value of RateLimit."""
    return ", ".join(
        f"{string(of.name)};r={of.remaining}"
        + ("" if of.reset is None else f";t={of.reset}")
        + _partition(of.partition)
        for of in left
    )


def _partition(key: bytes | None) -> str:
    return "" if key is None else f";pk={byte_sequence(key)}"


class Writer:
    """Writes headers for many decisions, faster than `write(told(...))` and to the same letter, as bytes."""

    def __init__(self, dialect: Dialect = "ratelimit") -> None:
        if dialect not in get_args(Dialect):
            refuse("headers", f"one of {', '.join(get_args(Dialect))}", dialect)
        self._dialect: Final[Dialect] = dialect
        self._known: Final[dict[tuple[Limit, str], Lines]] = {}

    def lines(self, limit: Limit, name: str = "default") -> Lines:
        """What writes of a limit. What it says of the limit itself is worked out once."""
        found = self._known.get((limit, name))
        if found is None:
            if len(self._known) >= 1024:  # limits may be made for each of many agents
                self._known.clear()
            found = self._known[limit, name] = self._written(quotas(limit, name))
        return found

    def _written(self, policies: tuple[Quota, ...]) -> Lines:
        draft, triple = self._dialect in ("ratelimit", "both"), self._dialect in ("x-ratelimit", "both")
        names = [string(quota.name).encode() for quota in policies]
        return Lines(
            format_policies(policies).encode(), names, [str(quota.quota).encode() for quota in policies], draft, triple
        )


# Reading --------------------------------------------------------------------------------------------------------------


def read(headers: Mapping[str, str], now: float | None = None) -> Told:
    """What a response says in its headers, in whichever dialect; what can't be read is as if it weren't there.

    `headers` are looked up by lower-case names. `now` is the time of day, in seconds since 1970, to which dates are
    compared.
    """
    moment = time.time() if now is None else now
    policies = parse_policies(headers.get("ratelimit-policy", ""))
    left = parse_left(headers.get("ratelimit", ""))
    if not left:
        policies, left = _triple(headers, moment) or (policies, left)
    return Told(policies, left, _retry_after(headers.get("retry-after", ""), moment))


def parse_policies(value: str) -> tuple[Quota, ...]:
    """What RateLimit-Policy says; items that make no sense are left out."""
    found = []
    for name, given in items(value):
        quota, window, unit, key = given.get("q"), given.get("w"), given.get("qu", "requests"), given.get("pk")
        if _count(quota) and (window is None or _count(window)) and isinstance(unit, str) and _key(key):
            found.append(Quota(name, quota, window, unit, key))
    return tuple(found)


def parse_left(value: str) -> tuple[Left, ...]:
    """What RateLimit says; items that make no sense are left out."""
    found = []
    for name, given in items(value):
        remaining, reset, key = given.get("r"), given.get("t"), given.get("pk")
        if _count(remaining) and (reset is None or _count(reset)) and _key(key):
            found.append(Left(name, remaining, reset, key))
    return tuple(found)


def read_denial(body: bytes) -> Denial | None:
    """The denial that a body tells of; None if it is something else."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or given.get("error") != "rate_limited":
        return None
    names = given.get("violated-policies", ())
    denied = Denial(
        given.get("status", 429),
        str(given.get("type", "")).removeprefix(_PROBLEMS),
        given.get("detail", ""),
        given.get("retry_after_ms", 1000),
        given.get("tier", ""),
        tuple(names) if isinstance(names, list) else (),
    )
    texts = (denied.detail, denied.tier, *denied.policies)
    right = _count(denied.status) and _count(denied.retry_after_ms) and all(isinstance(text, str) for text in texts)
    return denied if right else None


def _triple(headers: Mapping[str, str], now: float) -> tuple[tuple[Quota, ...], tuple[Left, ...]] | None:
    """What X-RateLimit-Limit, -Remaining and -Reset say: many servers' Reset is a moment instead of a span."""
    for prefix in ("x-ratelimit-", "ratelimit-", "x-rate-limit-"):
        remaining = _number(headers.get(f"{prefix}remaining", ""))
        if remaining is None:
            continue
        limit, reset = _number(headers.get(f"{prefix}limit", "")), _number(headers.get(f"{prefix}reset", ""))
        if reset is not None and reset >= _EPOCH:
            reset = max(ceil(reset - now), 0)
        policies = () if limit is None else (Quota("", ceil(limit)),)
        return policies, (Left("", int(remaining), None if reset is None else ceil(reset)),)
    return None


def _number(text: str) -> float | None:
    """The number that a value begins with: some servers write "60, 60;w=60", or fractions of a second."""
    match = re.match(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(?:[,;]|$)", text, re.ASCII)
    return None if match is None else float(match[1])


def _retry_after(value: str, now: float) -> int | None:
    number = _number(value)
    if number is not None:
        return ceil(number)
    try:
        return max(ceil(parsedate_to_datetime(value).timestamp() - now), 0)
    except (TypeError, ValueError, OverflowError):
        return None


def _count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _key(value: object) -> TypeGuard[bytes | None]:
    return value is None or isinstance(value, bytes)
