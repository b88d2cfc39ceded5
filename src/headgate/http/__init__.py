"""Decisions in HTTP: header fields and problem bodies, written by servers and read by clients."""

from headgate.http.header_writer import HeaderWriter, LimitHeaders
from headgate.http.headers import (
    DatedLimit,
    Dialect,
    QuotaPolicy,
    RateLimitHeaders,
    ServiceLimit,
    is_temporary,
    parse_retry_after,
    read_headers,
)
from headgate.http.problem import PROBLEM_JSON, ProblemDetails, describe_denial, describe_error, read_denial, wait_ms
from headgate.http.verdict import describe_decision

__all__ = [
    "PROBLEM_JSON",
    "DatedLimit",
    "Dialect",
    "HeaderWriter",
    "LimitHeaders",
    "ProblemDetails",
    "QuotaPolicy",
    "RateLimitHeaders",
    "ServiceLimit",
    "describe_decision",
    "describe_denial",
    "describe_error",
    "is_temporary",
    "parse_retry_after",
    "read_denial",
    "read_headers",
    "wait_ms",
]
