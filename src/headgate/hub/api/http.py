"""HTTP: authentication, the gate, the body, the handler, the answer, in this order, for every route alike."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl

import msgspec

from headgate.gate.policy import check_agent
from headgate.http import PROBLEM_JSON, HeaderWriter, describe_denial
from headgate.hub.api.routing import Call, Route, Router, Who
from headgate.hub.errors import Refused, refusal
from headgate.hub.sockets.frames import MALFORMED, explained
from headgate.hub.sockets.socket import Receive, Send
from headgate.limits.decision import Decision, Outcome

if TYPE_CHECKING:
    from headgate.hub.app import Hub

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]
REGISTER: Final = "post_onboard_register"
UNKNOWN: Final = "unknown_route"
_NOTHING: Final[Headers] = ()
_BODY_WITHIN: Final = 30.0  # seconds for a body to arrive
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)

_encoder: Final = msgspec.json.Encoder()


class ErrorBody(msgspec.Struct):
    """What went wrong: a word for programs, and a sentence for people."""

    error: str
    detail: str


class DeniedBody(msgspec.Struct):
    """What a denied request is told: problem details (RFC 9457), as `headgate.http` writes them."""

    type: str
    title: str
    status: int
    detail: str
    violated_policies: list[str] = msgspec.field(name="violated-policies")
    error: str
    retry_after_ms: int
    tier: str


class Answer(msgspec.Struct):
    """An HTTP response."""

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


class Caller:
    """Who has sent a request, by its token."""

    def __init__(self, agent: str = "", *, admin: bool = False, viewer: bool = False) -> None:
        self.agent, self.admin, self.viewer = agent, admin, viewer
        self.known: Final = bool(agent) or admin or viewer

    def may(self, who: Who) -> bool:
        if who in (Who.PROBE, Who.ANYONE):
            return True
        if who is Who.ADMIN:
            return self.admin
        if who is Who.VIEWER:
            return self.admin or self.viewer
        return bool(self.agent) or (self.admin and who is Who.PROGRAM)


NOBODY: Final = Caller()


class Denied(Exception):
    """The gate has said no."""

    def __init__(self, decision: Decision, tier: str, stands: Headers = ()) -> None:
        self.decision: Final = decision
        self.tier: Final = tier
        self.stands: Final = stands
        super().__init__("rate limited")


class Api:
    """Answers HTTP requests by the table of routes."""

    def __init__(self, hub: "Hub", router: Router) -> None:
        self._hub, self._router = hub, router
        self._writer: Final = HeaderWriter()

    async def answer(self, scope: Mapping[str, Any], receive: Receive, address: str) -> Answer:
        try:
            return await self._answered(scope, receive, address)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an answer, and the log the rest
            return failed(error)

    async def _answered(self, scope: Mapping[str, Any], receive: Receive, address: str) -> Answer:
        routes, parts = self._router.find(scope.get("raw_path") or scope["path"].encode())
        route = routes.get("GET" if scope["method"] == "HEAD" else scope["method"])  # the server leaves out the body
        caller, stands = NOBODY, _NOTHING
        if route is None or route.who is not Who.PROBE:
            caller, stands = await self._admitted(scope["headers"], route, address)
        if route is None:
            if routes:
                refused = Refused(405, "wrong_method", f"expected {' or '.join(sorted(routes))}, got {scope['method']}")
                return failed(refused, allow=", ".join(sorted(routes)))
            raise Refused(404, "unknown_route", "there is no such route; /openapi.json lists them")
        if "agent" in parts:
            check_agent(parts["agent"])
        given = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        query = _converted(given, route.query)
        body = None if route.body is None else _decoded(await self._body(scope["headers"], receive), route.body)
        by = caller.agent or (f"admin at {address}" if caller.admin else "")
        call = Call(self._hub, caller.agent, by, caller.admin, parts, query, body)
        answer = await route.handler(call)
        return answer if isinstance(answer, Answer) else Answer(route.status, _encoder.encode(answer), stands)

    # Who is it, and may it? ------------------------------------------------------------------------------------------

    async def _admitted(self, headers: Headers, route: Route | None, address: str) -> tuple[Caller, Headers]:
        """Who calls, authenticated and let through by the gate, and the headers that say how it stands."""
        who = Who.ANYONE if route is None else route.who
        action = UNKNOWN if route is None else route.action
        token = _token(headers)
        caller = NOBODY if token is None else await self._owner(token)
        decision, stands = await self._decision(caller, action, address), _NOTHING
        if decision is not None:
            tier = self._hub.gate.tier_of("http", action)
            if caller.agent and action != REGISTER:
                stands = self._standing(decision, caller.agent, tier)
            if not decision:
                raise Denied(decision, tier, stands)
        if not caller.known and token is not None:
            raise Refused(401, "unauthorized", "the token in the Authorization header is nobody's")
        if who is Who.VIEWER and self._hub.settings.public_dashboard:
            return caller, stands
        if not caller.known and not caller.may(who):
            raise Refused(401, "unauthorized", f"this needs the token of {who.value}, as Authorization: Bearer <token>")
        if not caller.may(who):
            raise Refused(403, "forbidden", f"this needs the token of {who.value}")
        return caller, stands

    def _standing(self, decision: Decision, agent: str, tier: str) -> Headers:
        """How an agent stands, in headers; those who aren't known aren't told, as they may share an address."""
        if decision.outcome is Outcome.EXEMPT:
            return _NOTHING
        return self._writer.for_limit(self._hub.gate.limits_for(agent, "http", tier), tier).write(decision)

    async def _decision(self, caller: Caller, action: str, address: str) -> Decision | None:
        """What the gate says; None for those it doesn't hold for."""
        if caller.admin or caller.viewer:
            return None
        if action == REGISTER:
            # For agents too: else each could register ten more a minute, and each of those ten more.
            return await self._hub.gate.acheck_address(address, "registration")
        if caller.agent:
            return await self._hub.check(caller.agent, "http", action=action)
        return await self._hub.gate.acheck_address(address)

    async def _owner(self, token: str) -> Caller:
        """Who has a token; `NOBODY` if nobody has."""
        hub = self._hub
        if hub.tokens.is_admin(token):
            return Caller(admin=True)
        if hub.tokens.is_viewer(token):
            return Caller(viewer=True)
        agent = await hub.registry.owner(token)
        return NOBODY if agent is None else Caller(agent)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """The body, if it isn't too large and comes in time."""
        most = self._hub.settings.max_frame
        too_large = Refused(413, "too_large", f"expected a body of at most {most} bytes")
        said = dict(headers).get(b"content-length", b"0")
        if not said.isdigit() or int(said) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_WITHIN):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "invalid", "the body ended early")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise Refused(408, "too_slow", f"expected the whole body within {_BODY_WITHIN:g} s") from None


def failed(error: Exception, **more: str) -> Answer:
    """The answer to a request that can't be carried out, with more headers."""
    if isinstance(error, Denied):
        denied = describe_denial(error.decision, error.tier)
        headers = [(b"retry-after", str(denied.retry_after_ms // 1000).encode()), *error.stands]
        return Answer(denied.status, denied.encode(), headers, PROBLEM_JSON)
    refused = refusal(error)
    headers = [(b"www-authenticate", b"Bearer")] if refused.status == 401 else []
    if refused.status in (429, 503):
        headers = [(b"retry-after", b"5")]
    headers += [(name.encode(), value.encode()) for name, value in more.items()]
    return Answer(refused.status, _encoder.encode(ErrorBody(refused.error, refused.detail)), headers)


def _token(headers: Headers) -> str | None:
    """The token of a request: "" for an Authorization header without one, None without a header."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
    return None


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body.decode(), type=kind)  # as text: what is passed on must be UTF-8
    except MALFORMED as error:
        raise Refused(400, "invalid", f"body: {explained(error)}") from error


def _converted(given: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(given, kind, strict=False)
    except MALFORMED as error:
        raise Refused(400, "invalid", f"query: {explained(error)}") from error
