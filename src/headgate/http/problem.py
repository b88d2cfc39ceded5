"""The body of a denial in HTTP: problem details (RFC 9457), written by servers and read by clients."""

import json
from typing import Final, NamedTuple, TypeAlias

from headgate.errors import Bound, RateLimited, StoreAway
from headgate.http.header_writer import SLOT_WAIT, advised_wait, whole_seconds
from headgate.http.headers import is_count
from headgate.http.structured_fields import as_printable
from headgate.limits.decision import Decision

Headers: TypeAlias = list[tuple[str, str]]

PROBLEM_JSON: Final = "application/problem+json"
_TYPES: Final = "https://iana.org/assignments/http-problem-types#"
_REDUCED: Final = "temporary-reduced-capacity"
_AWAY: Final = 1000  # milliseconds until a server that was away is asked again
_SLOTS: Final = " in flight"  # how the text of slots ends
SHOULD_RETRY: Final = "x-should-retry"
"""The header that tells SDKs, such as those of language models, whether to repeat a request: "true" or "false"."""
NO_WAIT_HELPS: Final = 60
"""Seconds of the advised wait where none would help under the current limit: an operator may change it."""


class ProblemDetails(NamedTuple):
    """The body of the response to a denied request: the members of RFC 9457, and those that headgate adds."""

    status: int
    kind: str
    """"quota-exceeded", "temporary-reduced-capacity" or "abnormal-usage-detected", of IANA's problem types."""
    detail: str
    retry_after_ms: int
    tier: str
    policies: tuple[str, ...] = ()
    """The names of the violated policies."""
    bound: Bound | None = None
    """The account, resource and tool that decided on a hold of accounts."""
    no_wait_helps: bool = False
    """Whether the limits, as they are, will never let this request pass. `retry_after_ms` is when to ask again then."""

    def encode(self) -> bytes:
        members = {
            "type": f"{_TYPES}{self.kind}",
            "title": "Too many requests" if self.status == 429 else "Temporarily unavailable",
            "status": self.status,
            "detail": self.detail,
            "violated-policies": self.policies,
            "error": "rate_limited",
            "retry_after_ms": self.retry_after_ms,
            "tier": self.tier,
        }
        if self.bound is not None:
            members |= self.bound._asdict()
        if self.no_wait_helps:
            members["no_wait_helps"] = True
        return json.dumps(members, separators=(",", ":")).encode()

    @property
    def headers(self) -> Headers:
        """The headers that go with the body in every dialect. A denial is never cached: it holds for now only."""
        return [("content-type", PROBLEM_JSON), *self.retry_headers, ("cache-control", "no-store")]

    @property
    def retry_headers(self) -> Headers:
        """The headers by which a client knows when to retry, or that it should not."""
        retry_after = ("retry-after", str(self.retry_after_ms // 1000))
        return [retry_after, (SHOULD_RETRY, "false")] if self.no_wait_helps else [retry_after]


def describe_denial(decision: Decision, tier: str) -> ProblemDetails:
    """The problem details of a denial under a tier (without a policy: under the name of a limit).

    The status is 429; or 503 where the store was away or full, which isn't the caller's fault.
    """
    policy = as_printable(tier if decision.bound is None else str(decision.limit))
    slots = decision.limit.counts_slots
    return _describe(wait_ms(decision), advised_wait(decision) is None, decision.degraded, tier, policy, slots)


def describe_error(error: RateLimited | StoreAway) -> ProblemDetails:
    """The problem details of a `RateLimited` that was raised while a request was handled, or of a `StoreAway`."""
    if isinstance(error, StoreAway):
        away = f"limits can't be read or changed at the moment; try again in {_AWAY // 1000} s"
        return ProblemDetails(503, _REDUCED, away, _AWAY, "")
    wait = None if error.retry_after_ms is None else error.retry_after_ms * 1000
    slots = error.pace.endswith(_SLOTS) if error.bound is None else error.bound.resource == "slots"
    if wait is not None and slots:
        wait = min(wait, SLOT_WAIT)
    problem = _describe(round_wait(wait), wait is None, error.degraded, error.pace, error.pace, slots)
    return problem if error.bound is None else describe_bound(problem, error)


def describe_bound(problem: ProblemDetails, error: RateLimited) -> ProblemDetails:
    """The problem details of a denied hold of accounts: they say which account has too little left of what."""
    bound = error.bound
    if bound is None or error.degraded:
        return problem._replace(bound=bound)
    by = f" for the tool {bound.tool}" if bound.tool else ""
    wait = f"; try again in {_wait_text(problem.retry_after_ms // 1000)}"
    if error.retry_after_ms is None:
        wait = ": no wait would help, only a lower cost or a higher limit"
    return problem._replace(
        detail=f"not enough {bound.resource} left in {bound.account}{by}{wait}",
        tier=bound.resource,
        policies=(as_printable(error.pace),),
        bound=bound,
    )


def _wait_text(seconds: int) -> str:
    """A wait for people: in seconds, or rounded up to minutes or hours where that is long enough to be read."""
    for size, unit, step, part in ((86_400, "day", 3600, "hour"), (3600, "hour", 60, "minute"), (60, "minute", 60, "")):
        if seconds > 2 * size:
            whole, rest = divmod(-(-seconds // step) * step, size)
            return f"{whole} {unit}s" + (f" {_counted(rest // step, part)}" if rest else "")
    return f"{seconds} s"


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _describe(wait: int, no_wait_helps: bool, degraded: bool, tier: str, policy: str, slots: bool) -> ProblemDetails:
    """The problem details of a 429; or of a 503, after which a retry always can help. `wait` is of whole seconds."""
    again = f"try again in {wait // 1000} s"
    if degraded:
        detail = f"requests can't be counted at the moment; {again}"
        return ProblemDetails(503, _REDUCED, detail, wait, tier, (policy,))
    too_many = "too many requests at the same time" if slots else "too many requests"
    never = "the limit never allows this request, however long it waits"
    detail = never if no_wait_helps else f"{too_many}; {again}"
    return ProblemDetails(429, "quota-exceeded", detail, wait, tier, (policy,), no_wait_helps=no_wait_helps)


def wait_ms(decision: Decision) -> int:
    """The advised wait of a denied caller in milliseconds: whole seconds, rounded up, at least one.

    Where no wait helps under the current limit, it is the backoff's advice, or a minute. For a slot it is a second,
    however long the leases are: the slot is free as soon as another request ends.
    """
    wait = advised_wait(decision)
    if wait is None and decision.violation is not None:
        wait = round(decision.violation.advised * 1_000_000)
    return round_wait(wait)


def round_wait(microseconds: int | None) -> int:
    """A wait as milliseconds of whole seconds, rounded up, at least one; None: no wait helps."""
    return 1000 * (NO_WAIT_HELPS if microseconds is None else max(whole_seconds(microseconds), 1))


def read_denial(body: bytes) -> ProblemDetails | None:
    """Read the body of a denial; None if it is something else."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or given.get("error") != "rate_limited":
        return None
    names = given.get("violated-policies", ())
    found = ProblemDetails(
        given.get("status", 429),
        str(given.get("type", "")).removeprefix(_TYPES),
        given.get("detail", ""),
        given.get("retry_after_ms", 1000),
        given.get("tier", ""),
        tuple(names) if isinstance(names, list) else (),
        Bound(*[given.get(name, "") for name in Bound._fields]) if "account" in given else None,
        given.get("no_wait_helps") is True,
    )
    texts = (found.detail, found.tier, *found.policies, *(found.bound or ()))
    valid = is_count(found.status) and is_count(found.retry_after_ms) and all(isinstance(text, str) for text in texts)
    return found if valid else None
