"""HTTP requests: authentication, the gate, the body, the handler and the response, in this order for every route.

An agent whose token is rotated or revoked before the handler runs is refused.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import cache, partial
from itertools import islice
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from headgate.gate import Gate
from headgate.gate.policy import check_agent
from headgate.http import HeaderWriter
from headgate.hub.agents.authentication import Authentication
from headgate.hub.agents.operators import Holder, Operators
from headgate.hub.agents.registry import Registry
from headgate.hub.api.allowed_hosts import AllowedHosts
from headgate.hub.api.responses import ApiResponse, Headers, RequestDenied, error_response
from headgate.hub.api.routing import Access, Call, Route, Router
from headgate.hub.errors import RequestError
from headgate.hub.json_bounds import check_depth, expose_underflow
from headgate.hub.monitoring.stats import Stats
from headgate.hub.settings import HubSettings
from headgate.hub.sockets.frames import MALFORMED, explain
from headgate.hub.sockets.socket import Receive
from headgate.limits.decision import Outcome

REGISTER: Final = "post_onboard_register"
UNKNOWN: Final = "unknown_route"
DASHBOARD_STATE: Final = "get_dashboard_state"
HEALTH: Final = "get_health"
_NO_HEADERS: Final[Headers] = ()
_BODY_TIMEOUT: Final = 30.0  # seconds
_KEYS_TRIED: Final = 64  # of a table in a body, to find the one that is wrong
_ACCOUNT_ROUTES: Final = ("/v1/accounts/", "/api/admin/accounts/")
_DIGITS: Final = re.compile("-?[0-9]+")

_UNKNOWN_CALLER: Final = "the token in the Authorization header is unknown or was revoked"

_encoder: Final = msgspec.json.Encoder()


ANONYMOUS: Final = Holder()


def _may(caller: Holder, access: Access) -> bool:
    """Whether a caller may use a route for `access`."""
    if access in (Access.PROBE, Access.ANYONE):
        return True
    if access is Access.ADMIN:
        return caller.admin
    if access is Access.VIEWER:
        return bool(caller.role)
    return bool(caller.agent) or (caller.admin and access is Access.PROGRAM)


def _is_limited(caller: Holder, access: Access, action: str) -> bool:
    """Whether a caller is limited: an admin never, and a viewer only by what an agent does."""
    if caller.admin:
        return False
    return not caller.role or action == REGISTER or access in (Access.AGENT, Access.PROGRAM)


class Api:
    """Answers HTTP requests by the routes of a router."""

    def __init__(
        self,
        router: Router,
        gate: Gate,
        stats: Stats,
        operators: Operators,
        registry: Registry,
        authentication: Authentication,
        allowed_hosts: AllowedHosts,
        settings: HubSettings,
    ) -> None:
        self._router, self._gate, self._stats = router, gate, stats
        self._authentication, self._allowed_hosts = authentication, allowed_hosts
        self._operators, self._registry = operators, registry
        self._public_dashboard: Final = settings.public_dashboard
        self._max_body: Final = settings.max_frame
        self._writer: Final = HeaderWriter()

    async def respond(self, scope: Mapping[str, Any], receive: Receive, address: str) -> ApiResponse:
        """The response to a request from an address. Never raises."""
        try:
            return await self._handle(scope, receive, address)
        except Exception as error:  # noqa: BLE001 - every request is answered; the log has the details
            return error_response(error)

    async def _handle(self, scope: Mapping[str, Any], receive: Receive, address: str) -> ApiResponse:
        routes, parts = self._router.find(scope.get("raw_path") or scope["path"].encode())
        route = routes.get("GET" if scope["method"] == "HEAD" else scope["method"])  # the server leaves out the body
        caller, limit_headers = ANONYMOUS, _NO_HEADERS
        revocations = self._registry.revocations
        if route is None or route.action != HEALTH:  # a probe may name the host as it likes
            self._allowed_hosts.check_host(scope["headers"])
        if scope["method"] not in ("GET", "HEAD"):
            self._allowed_hosts.check_origin(scope["headers"])
        if route is None or route.access is not Access.PROBE:
            caller, limit_headers = await self._admit(scope["headers"], route, address)
        if route is None:
            if routes:
                allowed = sorted(routes)
                error = RequestError(405, "wrong_method", f"expected {' or '.join(allowed)}, got {scope['method']}")
                return error_response(error, allow=", ".join(allowed))
            raise RequestError(404, "unknown_route", f"there is no such route; {_hint(scope['path'])}")
        if "agent" in parts:
            check_agent(parts["agent"])
        given = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        query = _converted(given, route.query)
        body = None
        if route.body is not None:
            given_body = await self._body(scope["headers"], receive)
            body = _decoded(given_body if given_body or route.body_required else b"{}", route.body)
        if caller is not ANONYMOUS:  # the body may have taken half a minute
            caller = await self._authenticate_again(caller, route, revocations, address)
        by = f"{caller.name or caller.role} at {address}" if caller.role else caller.agent
        admit_again = self._admit_again(caller, route, revocations, address)
        hung_up = partial(_hung_up, receive)
        call = Call(
            caller=caller,
            by=by,
            address=address,
            parts=parts,
            query=query,
            body=body,
            hung_up=hung_up,
            admit_again=admit_again,
        )
        answer = await route.handler(call)
        if isinstance(answer, ApiResponse):
            return answer
        return ApiResponse(route.status, _encoder.encode(answer), limit_headers)

    # Who calls, and may it? ------------------------------------------------------------------------------------------

    async def _admit(self, headers: Headers, route: Route | None, address: str) -> tuple[Holder, Headers]:
        """The caller, authenticated and admitted by the gate, and the headers about its limit."""
        access = Access.ANYONE if route is None else route.access
        action = UNKNOWN if route is None else route.action
        token = _token(headers)
        caller = ANONYMOUS if token is None else await self._caller(token, action, address)
        limit_headers = _NO_HEADERS
        if self._is_blocked(caller) or (_is_limited(caller, access, action) and not self._is_public(action)):
            limit_headers = await self._check(caller.agent, action, address)
        if not self._is_public(action):
            _expect(caller, access)
        return caller, limit_headers

    async def _caller(self, token: str, action: str, address: str) -> Holder:
        """The holder of a token. Wrong ones are limited by address."""
        found = await self._authentication.attempt(address, token, lambda: self._operators.holder(token))
        if isinstance(found, Holder):
            return found
        if not found:
            raise RequestDenied(found, self._gate.tier_of("http", action), by_address=True)
        raise RequestError(401, "unauthorized", _UNKNOWN_CALLER)

    async def _authenticate_again(self, caller: Holder, route: Route, revocations: int, address: str) -> Holder:
        """A caller with its present role, unless that or its token has become invalid since it was admitted.

        `revocations` is the registry's number of then. An agent that was blocked is denied.
        """
        revoked_meanwhile = revocations != self._registry.revocations
        revoked = revoked_meanwhile and caller.agent and await self._registry.owner(caller.token) != caller.agent
        present = self._operators.present(caller)  # after the wait
        if revoked or present is None:
            raise RequestError(401, "unauthorized", _UNKNOWN_CALLER)
        if self._is_blocked(caller):
            await self._check(caller.agent, route.action, address)
        if not self._is_public(route.action):
            _expect(present, route.access)
        return present

    def _admit_again(
        self, caller: Holder, route: Route, revocations: int, address: str
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Authenticates a caller again, as often as it is called. The store is asked once after each revocation."""
        known = revocations

        async def admit() -> None:
            nonlocal known
            now = self._registry.revocations  # before the store is asked: there may be others meanwhile
            await self._authenticate_again(caller, route, known, address)
            known = now

        return admit

    def _is_public(self, action: str) -> bool:
        return self._public_dashboard and action == DASHBOARD_STATE

    def _is_blocked(self, caller: Holder) -> bool:
        return bool(caller.agent) and self._gate.is_blocked(caller.agent)

    async def _check(self, agent: str, action: str, address: str) -> Headers:
        """Check a request of an agent, or of an unknown caller by its address; the headers about an agent's limit."""
        blocked = bool(agent) and self._gate.is_blocked(agent)
        limit_headers, by_address = _NO_HEADERS, not blocked and (action == REGISTER or not agent)
        if action == REGISTER and not blocked:
            # Agents too: otherwise each could register ten more a minute, and each of those ten more.
            tier, decision = (
                self._gate.tier_of("http", action),
                await self._gate.acheck_address(address, "registration"),
            )
        elif agent:
            active, decision = await self._stats.check(agent, "http", action=action, address=address)
            tier = active.tier
            if decision.outcome is not Outcome.EXEMPT:
                limit_headers = self._writer.for_limit(active.limit, tier).write(decision)
        else:  # unknown callers may share an address, so they get no headers
            tier, decision = self._gate.tier_of("http", action), await self._gate.acheck_address(address)
        if not decision:
            raise RequestDenied(decision, tier, limit_headers, by_address=by_address, blocked=blocked)
        return limit_headers

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """The body, unless it is too large or too slow."""
        most = self._max_body
        too_large = RequestError(413, "too_large", f"expected a body of at most {most} bytes")
        announced = dict(headers).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError(400, "invalid", "the body ended early")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RequestError(408, "too_slow", f"expected the whole body within {_BODY_TIMEOUT:g} s") from None


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _hint(path: str) -> str:
    """A hint for an unknown route."""
    if path.startswith(_ACCOUNT_ROUTES):
        return "the slashes in the path of an account are written as %2F"
    return "/openapi.json lists them"


def _expect(caller: Holder, access: Access) -> None:
    """Refuse a caller that may not use a route for `access`."""
    if _may(caller, access):
        return
    if caller is ANONYMOUS:
        detail = f"this needs the token of {access.value}, as Authorization: Bearer <token>"
        raise RequestError(401, "unauthorized", detail)
    raise RequestError(403, "forbidden", f"this needs the token of {access.value}")


def _token(headers: Headers) -> str | None:
    """The token of a request: "" for an Authorization header without one, None without a header."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
    return None


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        text = body.decode()  # a body that is passed on must be UTF-8
    except UnicodeDecodeError as error:
        raise RequestError(400, "invalid", f"body: {explain(error)}") from error
    try:
        found = msgspec.json.decode(text, type=kind)
        if _has_doubles(kind) and (exposed := expose_underflow(text)) != text:
            msgspec.json.decode(exposed, type=kind)  # what isn't read here, such as the payload of a task, may stay
    except MALFORMED as error:
        raise RequestError(400, "invalid", f"body: {_explain_place(error, text, kind)}") from error
    check_depth(text)
    return found


@cache
def _has_doubles(kind: Any) -> bool:
    """Whether a number in a body is read as a double."""
    return b'"number"' in msgspec.json.encode(msgspec.json.schema(kind))


def _explain_place(error: Exception, text: str, kind: Any) -> str:
    """Why a body is invalid, with what the JSON library leaves out: the key in a table, or the fields there are."""
    told = explain(error)
    if told.startswith("Number out of range"):
        return f"{told}; expected 0, or a number whose size is from 5e-324 to 1.7e308"
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    if is_struct and told.startswith("Object contains unknown field") and " at " not in told:
        return f"{told}; the fields are {', '.join([field.encode_name for field in msgspec.structs.fields(kind)])}"
    place = re.search(r"`\$\.(\w+)\[\.\.\.\]`$", told)
    if place is None:
        return told
    check_depth(text)
    try:
        table = msgspec.json.decode(text)[place[1]]
    except MALFORMED:  # further behind
        return told
    for key, value in islice(table.items(), _KEYS_TRIED) if isinstance(table, dict) else ():
        try:
            msgspec.convert({place[1]: {key: value}}, kind)
        except msgspec.ValidationError as reason:
            if str(reason) == str(error):
                return f"{told[: place.start()]}`$.{place[1]}`, {json.dumps(key[:64])}"
    return told


def _converted(given: dict[str, str], kind: type[msgspec.Struct]) -> Any:
    try:
        found = msgspec.convert(given, kind, strict=False)
    except MALFORMED as error:
        raise RequestError(400, "invalid", f"query: {explain(error)}") from error
    for name, field in _field_names(kind) if given else ():
        if type(getattr(found, field)) is int and not _DIGITS.fullmatch(
            given.get(name, "0")
        ):  # msgspec reads 1e1 as 10
            raise RequestError(400, "invalid", f"query: Expected `int`, got `str` - at `$.{name}`")
    return found


@cache
def _field_names(kind: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """The fields of a structure: as they are called in a query, and in the structure."""
    return [(field.encode_name, field.name) for field in msgspec.structs.fields(kind)]
