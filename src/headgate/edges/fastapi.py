"""FastAPI: a dependency that limits the routes, routers or applications that depend on it."""

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, NoReturn, Unpack
from weakref import WeakKeyDictionary

from headgate.edges.application import SCOPE_KEY, ApplicationSettings, HeaderList, RequestLimits
from headgate.edges.costs import ExactCost
from headgate.edges.counters import FastPath, RequestCounter, address_key
from headgate.edges.guard import DenialResponse, Guard, LimitGiven, Options
from headgate.edges.requests import AsgiRequest, HttpRequest, Proxies, decode_headers
from headgate.edges.settlement import acomplete
from headgate.errors import HeadgateError, RateLimited, refuse
from headgate.flow import Flow, adrive
from headgate.gate import Gate
from headgate.gate._hot import EXEMPT
from headgate.limiter import Limiter
from headgate.limits.decision import Decision
from headgate.limits.notation import LimitLike, limit_of
from headgate.stores.base import Store
from headgate.stores.memory import MemoryStore

try:
    from fastapi import HTTPException, Response, WebSocket, routing
    from fastapi.params import Depends
    from fastapi.requests import HTTPConnection, Request
    from starlette.requests import ClientDisconnect
    from starlette.websockets import WebSocketState
except ImportError as error:
    raise HeadgateError(f"headgate.edges.fastapi: expected FastAPI, got: {error}; pip install fastapi") from error

iter_route_contexts: Final[Any] = getattr(routing, "iter_route_contexts", iter)  # before 0.137, routes are flat
_HANDLERS: Final = "starlette.exception_handlers"  # the key of the exception handlers in the scope
_ENDPOINT_EXITS: Final = "fastapi_function_astack"  # that of what is to be done between endpoint and response
_RESPONSE_EXITS: Final = "fastapi_inner_astack"  # and after the response and its background tasks
_ENDPOINTS_AND_RESPONSES_ARE_ONE: Final = "scope" not in inspect.signature(Depends).parameters
_LATER_FASTAPI: Final = "FastAPI 0.121 or later, which tells endpoint and response apart"
_MOST_GUARDS: Final = 10_000  # endpoints of one dependency; then all are found anew
_MOST_MOUNTS: Final = 10  # applications within each other: one may be mounted in itself
_UNSUPPORTED: Final = {
    "store": "no store: pass it to RateLimitMiddleware, for all dependencies, or pass a Limiter",
    "routes": "no routes: a dependency belongs to its route",
    "skip": "nothing to skip: a dependency belongs to its route",
    "counts": "no counts: a dependency doesn't see every response; headgate.edges.asgi.RateLimitMiddleware does",
    "settle": "no settle: a dependency doesn't see every response; headgate.edges.asgi.RateLimitMiddleware does",
}


class Denied(HTTPException):
    """A request was denied. The response is `body`, unless the application handles this exception or its status."""

    def __init__(self, decision: Decision, denial: DenialResponse) -> None:
        self.decision: Final = decision
        status, headers, self.body = denial
        shown = dict(decode_headers(headers))
        self.content_type: Final = shown.pop("content-type")
        del shown["content-length"]  # a handler's body may have another length
        super().__init__(status, "too many requests" if status == 429 else "temporarily unavailable", shown)


_IN_DEPENDS: Final = "it in Depends: `dependencies=[Depends(RateLimit(...))]`"
_MISTAKEN: Final = {
    "dependency": _IN_DEPENDS,
    **dict.fromkeys(("limit", "shared_limit", "exempt"), f"{_IN_DEPENDS}; there are no decorators for routes"),
}
"""Hints for attributes that it doesn't have: those of Depends, and of slowapi's Limiter."""


class RateLimit:
    """Passes requests on to its dependents as a limiter or a gate allows, and answers the others with 429.

    `limiter` is a limit, or a function of the request that returns one, plain or async, or such a function as a
    dependency: `RateLimit(Depends(limit_of_plan))`. Each endpoint counts by itself; endpoints whose limits have the
    same `name` count together. They are counted in the store of the application's `RateLimitMiddleware`, or without
    that in memory. A `Limiter` counts in its own store, under its name if it has one.

    By default each client address is counted, an IPv6 address by its /64. The options are those of
    `headgate.edges.guard.Options`, except for `routes`, `skip`, `counts` and `settle`. The `key`, `exempt`, `headers`,
    `proxies` and `body` of the middleware apply unless others are given. `key` may also be a dependency:
    `key=Depends(current_user_id)`.

    >>> from typing import Annotated
    >>> from fastapi import Depends, FastAPI
    >>> app = FastAPI()
    >>> @app.get("/search", dependencies=[Depends(RateLimit("5/minute"))])
    ... async def search(words: str) -> list[str]: ...
    >>> @app.get("/ask")
    ... async def ask(decision: Annotated[Decision, Depends(RateLimit("5/minute"))]) -> int:
    ...     return decision.remaining

    A request is refunded if another `RateLimit` denies it, and with `refund_crashes` if its endpoint raises and
    nothing handles that. A WebSocket connect counts like a request, and is never refunded. With "5 in flight" in the
    limit, a request has a slot until FastAPI leaves the dependency: after the response and its background tasks, or at
    the end of the WebSocket.
    """

    def __init__(
        self,
        limiter: LimitGiven | None = None,
        gate: Gate | None = None,
        *,
        name: str = "",
        **options: Unpack[Options],
    ) -> None:
        if limiter is None and gate is None:
            refuse("RateLimit", "a limiter or a gate", None)
        if not isinstance(name, str):
            refuse("RateLimit name", "a string", name)
        if name and (gate is not None or (isinstance(limiter, Limiter) and limiter.name)):
            refuse("RateLimit name", "none: this limiter has its own, and a gate has tiers", name)
        # FastAPI passes these only where they are dependencies; otherwise it would read them from the query.
        parameters = dict(inspect.signature(self.__call__).parameters)
        for parameter, given in (("who", options.get("key")), ("limit", limiter)):
            declared = parameters.pop(parameter)
            if isinstance(given, Depends):
                parameters[parameter] = declared.replace(default=given)
        if "who" in parameters:
            options["key"] = _dependency_key
        if "limit" in parameters:
            limiter = _dependency_limit
        self.__signature__: Final = inspect.Signature(list(parameters.values()))
        self._limiter: Final = limiter
        self._gate: Final = gate
        self._name: Final = name
        self._options: Final = options
        self._tiers: Final = gate.policy.tiers if isinstance(gate, Gate) else ()
        self._guards: Final[dict[tuple[ApplicationSettings, Store, str], Guard]] = {}
        guard = self._make_guard(_NO_SETTINGS, MemoryStore(), "")
        self._refund_crashes: Final = guard.settlement.refund_crashes
        if self._refund_crashes and _ENDPOINTS_AND_RESPONSES_ARE_ONE:
            refuse("RateLimit refund_crashes", _LATER_FASTAPI, True)
        if guard.counts_slots and _ENDPOINTS_AND_RESPONSES_ARE_ONE:
            refuse("RateLimit limiter", _LATER_FASTAPI, limiter)

    def __getattr__(self, name: str) -> NoReturn:
        if name in _MISTAKEN:
            refuse("RateLimit", _MISTAKEN[name], f"`.{name}`")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _guard(self, settings: ApplicationSettings, scope: Any) -> Guard:
        """The guard of the endpoint that serves a request."""
        app = scope["app"]
        application = _applications.get(app)
        if application is None:
            application = _applications.setdefault(app, _Application())
        store = application.memory if settings.store is None else settings.store
        name = self._name or application.endpoint_name(scope)
        found = self._guards.get((settings, store, name))
        if found is None:
            if len(self._guards) >= _MOST_GUARDS:
                self._guards.clear()
            found = self._guards[settings, store, name] = self._make_guard(settings, store, name)
        return found

    def _make_guard(self, settings: ApplicationSettings, store: Store, name: str) -> Guard:
        options: Any = {**settings.options, **self._options}
        given: Any = self._limiter
        full_name = f"{settings.name} RateLimit {name}"  # no route of the middleware is called that
        label, private = "default", settings.private
        if isinstance(given, Limiter):
            if type(given) is Limiter and not given.name:
                given = Limiter(given.limit, store=given.store, name=full_name, warn_at=given.warn_at)
            label = self._name or (label if given.name == full_name else given.name)
            store, full_name, private = None, "", self._limiter.private  # type: ignore[assignment, union-attr]
        elif self._gate is not None:
            store, full_name = None, ""  # type: ignore[assignment]
        else:
            label = self._name or (label if callable(given) else str(limit_of("RateLimit limiter", given)))
        return Guard(
            "RateLimit",
            options,
            limiter=given,
            gate=self._gate,
            store=store,
            name=full_name,
            label=label,
            private=private and self._gate is None,
            tiers=self._tiers,
            awaits=True,
            unsupported=_UNSUPPORTED,
        )

    async def __call__(
        self, connection: HTTPConnection, response: Response, who: Any = None, limit: Any = None
    ) -> Decision:
        scope = connection.scope
        limits: RequestLimits | None = scope.get(SCOPE_KEY)
        if limits is None:
            limits = scope[SCOPE_KEY] = RequestLimits(_NO_SETTINGS, middleware_adds_headers=False)
        guard = self._guard(limits.settings, scope)
        request = _FastapiRequest(scope, guard.proxies, who, limit)
        if isinstance(guard.fast_path, FastPath):
            decision = _check_at_once(guard.fast_path, request, limits)
            if decision is not None:
                if not limits.middleware_adds_headers:
                    _set_headers(response, limits.headers)
                return decision
        checked = await adrive(guard.check(request, limits.counted))
        if checked is None:
            return EXEMPT
        limits.add(checked.decision, checked.cost, guard.headers(checked))
        if not checked.decision:
            scope.get(_HANDLERS, ({},))[0].setdefault(Denied, _handle_denied)
            for earlier in limits.refunds:
                await acomplete(earlier)
            denial = await adrive(guard.denial(checked))
            more = [] if limits.middleware_adds_headers else limits.headers
            raise Denied(checked.decision, denial._replace(headers=denial.headers + more))
        if not limits.middleware_adds_headers:
            _set_headers(response, limits.headers)
        if checked.held:
            scope[_RESPONSE_EXITS].push_async_callback(acomplete, checked.release())
        if isinstance(connection, Request):
            refund = checked.cancel()  # a flow is carried out once, whoever begins
            limits.refunds.append(refund)
            if self._refund_crashes:
                scope[_ENDPOINT_EXITS].push_async_exit(partial(_refund_crash, refund, connection))
        return checked.decision


def _check_at_once(path: FastPath, request: HttpRequest, limits: RequestLimits) -> Decision | None:
    """Check a request that counts for its address, in memory; None if it is denied or has been counted before."""
    counter, check, cost, write_headers = path
    key = address_key(request.address)
    bucket = counter.bucket("normal"), key
    decision = None if bucket in limits.counted else check(key, cost)
    if not decision:
        return None
    limits.counted[bucket] = cost, decision, None
    limits.add(decision, cost, write_headers(decision))
    if request.raw["type"] == "http":
        limits.refunds.append(_refund(counter, key, cost))
    return decision


def _refund(counter: RequestCounter, key: str, cost: ExactCost) -> Flow[object, None]:
    yield counter.refund(key, "normal", cost)


def _set_headers(response: Response, headers: HeaderList) -> None:
    if not response.raw_headers:
        response.raw_headers.extend(headers)
        return
    for name, value in headers:
        response.headers[name.decode()] = value.decode()


class _Application:
    """The memory that the limits of an application without a store share, and the names of its endpoints."""

    def __init__(self) -> None:
        self.memory: Final = MemoryStore()
        self._names: Final[WeakKeyDictionary[object, str]] = WeakKeyDictionary()

    def endpoint_name(self, scope: Any) -> str:
        """The name of the endpoint that serves a request: the same in all processes, and no other endpoint's."""
        endpoint = scope["endpoint"]
        try:
            found = self._names.get(endpoint)
        except TypeError:  # an object without a hash
            return _find_name(endpoint, scope)
        if found is None:
            found = self._names[endpoint] = _find_name(endpoint, scope)
        return found


def _find_name(endpoint: object, scope: Any) -> str:
    """The name of the function, which those that a factory makes share, and the first path that the endpoint has."""
    function = getattr(endpoint, "__qualname__", type(endpoint).__qualname__)
    route = scope.get("route")
    routes = scope["router"].routes  # of the outermost application
    known = (place for found, place in _places(routes) if found == endpoint)
    place = next(known, f"{_methods(route)}{getattr(route, 'path', '')}")
    return f"{getattr(endpoint, '__module__', '')}.{function} {place}"


def _places(routes: Iterable[Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[object, str]]:
    """The endpoints of some routes and of what is mounted there, with their methods and paths."""
    for route in iter_route_contexts(routes):
        path = f"{prefix}{getattr(route, 'path', None) or getattr(route, 'host', '')}"
        yield getattr(route, "endpoint", None), f"{_methods(route)}{path}"
        if depth < _MOST_MOUNTS:
            yield from _places(getattr(route, "routes", ()), path, depth + 1)


def _methods(route: object) -> str:
    return "".join(f"{method} " for method in sorted(getattr(route, "methods", None) or ()))


_NO_SETTINGS: Final = ApplicationSettings()
_applications: Final[WeakKeyDictionary[object, _Application]] = WeakKeyDictionary()


class _FastapiRequest(AsgiRequest):
    """A request, and its key and limit where these are dependencies."""

    __slots__ = ("limit", "who")

    def __init__(self, scope: Any, proxies: Proxies, who: Any, limit: Any) -> None:
        super().__init__(scope, proxies)
        self.who: Final = who
        self.limit: Final = limit

    @property
    def is_preflight(self) -> bool:
        """Never: whatever its headers say, the endpoint itself is about to serve it."""
        return False


def _dependency_key(request: HttpRequest) -> str | None:
    assert isinstance(request, _FastapiRequest)
    found: str | None = request.who
    return found


def _dependency_limit(request: HttpRequest) -> LimitLike:
    assert isinstance(request, _FastapiRequest)
    found: LimitLike = request.limit
    return found


async def _refund_crash(
    refund: Flow[object, None], request: Request, _: object, error: BaseException | None, trace: object
) -> None:
    """Refund a request if its endpoint has raised an error that nothing handles, and its client is still there."""
    if not isinstance(error, Exception) or _stems_from(error, (ClientDisconnect, Denied, RateLimited)):
        return
    handlers = request.scope.get(_HANDLERS)
    if handlers is None or any(kind in handlers[0] for kind in type(error).__mro__):
        return
    if not await request.is_disconnected():  # the error doesn't always tell: it may be a group, or a later one
        await acomplete(refund)


def _stems_from(error: BaseException | None, kinds: type[Exception] | tuple[type[Exception], ...]) -> bool:
    """Whether an error is of one of these kinds, or was raised while one of them was handled."""
    while error is not None and not isinstance(error, kinds):
        error = error.__context__
    return error is not None


async def _handle_denied(connection: HTTPConnection, error: Denied) -> Response | None:
    """Problem details as the whole body: FastAPI would put them below "detail"."""
    headers = {**(error.headers or {}), "content-type": error.content_type}
    response = Response(error.body, error.status_code, headers)
    if not isinstance(connection, WebSocket):
        return response
    accepted = connection.application_state is not WebSocketState.CONNECTING  # by another dependency
    if not accepted and "websocket.http.response" in (connection.scope.get("extensions") or {}):
        await connection.send_denial_response(response)
    else:
        await connection.close(1013, error.detail)
    return None
