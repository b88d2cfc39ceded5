"""Rate limit headers: of our decisions as a client reads them, and of any server, formatted as in the draft."""

from base64 import b64encode

from headgate import Decision
from headgate.http import (
    Dialect,
    HeaderWriter,
    QuotaPolicy,
    RateLimitHeaders,
    ServiceLimit,
    describe_denial,
    read_headers,
)
from headgate.limits.decision import Limit


def write_headers(
    decision: Decision, limit: Limit, name: str = "default", dialect: Dialect = "ratelimit"
) -> list[tuple[str, str]]:
    """The headers that headgate's writer makes of a decision."""
    written = HeaderWriter(dialect).for_limit(limit, name).write(decision)
    return [(header.decode(), value.decode()) for header, value in written]


def headers_of(decision: Decision, limit: Limit, name: str = "default") -> RateLimitHeaders:
    """What a client reads in the headers of a response to a decision; with a denial comes Retry-After."""
    denial = [] if decision else describe_denial(decision, name).headers
    return read_headers(dict([*write_headers(decision, limit, name), *denial]))


def format_headers(headers: RateLimitHeaders, dialect: Dialect = "ratelimit") -> list[tuple[str, str]]:
    """Any headers, as the draft has them. The triple has room for one policy: that of the first limit."""
    found = []
    if dialect in ("ratelimit", "both"):
        if headers.policies:
            found.append(("ratelimit-policy", format_policies(headers.policies)))
        if headers.limits:
            found.append(("ratelimit", format_limits(headers.limits)))
    if dialect in ("x-ratelimit", "both") and headers.limits:
        first = headers.limits[0]
        quotas = [policy.quota for policy in headers.policies if policy.name == first.name]
        found += [("x-ratelimit-limit", str(quotas[0]))] if quotas else []
        found.append(("x-ratelimit-remaining", str(first.remaining)))
        found += [] if first.reset is None else [("x-ratelimit-reset", str(first.reset))]
    if headers.retry_after is not None:
        found.append(("retry-after", str(headers.retry_after)))
    return found


def format_policies(policies: tuple[QuotaPolicy, ...]) -> str:
    """The value of RateLimit-Policy."""
    return ", ".join(
        f"{_string(policy.name)};q={policy.quota}"
        + ("" if policy.unit == "requests" else f";qu={_string(policy.unit)}")
        + ("" if policy.window is None else f";w={policy.window}")
        + _partition(policy.partition)
        for policy in policies
    )


def format_limits(limits: tuple[ServiceLimit, ...]) -> str:
    """The value of RateLimit."""
    return ", ".join(
        f"{_string(limit.name)};r={limit.remaining}"
        + ("" if limit.reset is None else f";t={limit.reset}")
        + _partition(limit.partition)
        for limit in limits
    )


def _string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _partition(key: bytes | None) -> str:
    return "" if key is None else f";pk=:{b64encode(key).decode()}:"
