"""Responses of the API: those of errors and denials, with the bodies that they have in OpenAPI."""

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import msgspec

from headgate.errors import reduce_error
from headgate.http import PROBLEM_JSON, describe_denial
from headgate.hub.errors import BLOCKED_BY_OPERATOR, as_request_error
from headgate.hub.sockets.socket import Send
from headgate.limits.decision import Decision

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

USED_UP: Final = "the allowance of your network address is used up, perhaps by somebody else who shares it"
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)
_encoder: Final = msgspec.json.Encoder()


class ErrorBody(msgspec.Struct):
    """An error: a word for programs, and a sentence for people."""

    error: str
    detail: str


class DeniedBody(msgspec.Struct):
    """The body of a denial: problem details (RFC 9457), as `headgate.http` writes them."""

    type: str
    title: str
    status: int
    detail: str
    violated_policies: list[str] = msgspec.field(name="violated-policies")
    error: str
    retry_after_ms: int
    tier: str
    no_wait_helps: bool = False
    """Given if the limits, as they are, will never let this request pass."""


class ApiResponse(msgspec.Struct):
    """A response to be sent."""

    status: int
    body: bytes
    headers: Headers = ()
    media: str = "application/json"

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.all_headers()})
        await send({"type": "http.response.body", "body": self.body})

    def all_headers(self) -> list[tuple[bytes, bytes]]:
        about = ((b"content-type", self.media.encode()), (b"content-length", str(len(self.body)).encode()))
        return [*about, *_HEADERS, *self.headers]


class RequestDenied(Exception):
    """The gate has denied a request, to an agent or by its address. `limit_headers` describe the agent's limit.

    `blocked`: an operator has blocked the agent.
    """

    def __init__(
        self,
        decision: Decision,
        tier: str,
        limit_headers: Headers = (),
        *,
        by_address: bool = False,
        blocked: bool = False,
    ) -> None:
        self.decision: Final = decision
        self.tier: Final = tier
        self.limit_headers: Final = limit_headers
        self.by_address: Final = by_address
        self.blocked: Final = blocked
        super().__init__("rate limited")

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_error(self)


def error_response(error: Exception, **more: str) -> ApiResponse:
    """The response to a request that failed, with more headers."""
    if isinstance(error, RequestDenied):
        denial = describe_denial(error.decision, error.tier)
        wait = f"try again in {denial.retry_after_ms // 1000} s"
        if error.by_address and not error.decision.degraded:
            denial = denial._replace(detail=f"{USED_UP}; {wait}", policies=("address",))
        elif not error.decision.degraded and not denial.no_wait_helps:
            denial = denial._replace(detail=f"too many requests of the tier {error.tier}; {wait}")
        if error.blocked:
            denial = denial._replace(detail=BLOCKED_BY_OPERATOR)
        headers = [*encode_headers(denial.retry_headers), *error.limit_headers]
        return ApiResponse(denial.status, denial.encode(), headers, PROBLEM_JSON)
    known = as_request_error(error)
    headers = [(b"www-authenticate", b"Bearer")] if known.status == 401 else []
    if known.status in (429, 503):
        headers = [(b"retry-after", b"5")]
    headers += encode_headers(more.items())
    return ApiResponse(known.status, _encoder.encode(ErrorBody(known.error, known.detail)), headers)


def encode_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]
