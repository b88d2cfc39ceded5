"""FastAPI: a dependency that limits the routes, routers or applications that depend on it."""

import inspect
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final, Unpack

from headgate.edges.guard import CheckedRequest, Guard, Options, acomplete
from headgate.edges.requests import AsgiRequest, HttpRequest, Proxies, decode_headers
from headgate.errors import HeadgateError, refuse
from headgate.flow import adrive
from headgate.gate import Gate
from headgate.gate._hot import EXEMPT
from headgate.limiter import Limiter
from headgate.limits.decision import Decision
from headgate.limits.notation import LimitLike, limit_of

try:
    from fastapi import HTTPException, Response, WebSocket
    from fastapi.params import Depends
    from fastapi.requests import HTTPConnection, Request
    from starlette.requests import ClientDisconnect
    from starlette.websockets import WebSocketState
except ImportError as error:
    raise HeadgateError(f"headgate.edges.fastapi: expected FastAPI, got: {error}; pip install fastapi") from error

_HANDLERS: Final = "starlette.exception_handlers"  # the key of the exception handlers in the scope
_ENDPOINT_EXITS: Final = "fastapi_function_astack"  # that of what is to be done between endpoint and response
_UNSUPPORTED: Final = {
    "routes": "no routes: a dependency belongs to its route",
    "skip": "nothing to skip: a dependency belongs to its route",
    "counts": "no counts: a dependency doesn't see every response; headgate.edges.asgi.RateLimitMiddleware does",
    "settle": "no settle: a dependency doesn't see every response; headgate.edges.asgi.RateLimitMiddleware does",
}


class Denied(HTTPException):
    """A request was denied. The response is `body`, unless the application handles this exception or its status."""

    def __init__(self, decision: Decision, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.decision: Final = decision
        shown = dict(decode_headers(headers))
        self.body: Final = body
        self.content_type: Final = shown.pop("content-type")
        del shown["content-length"]  # a handler's body may have another length
        super().__init__(status, "too many requests" if status == 429 else "not at the moment", shown)


class RateLimit:
    """Passes requests on to its dependents as a limiter or a gate allows, and answers the others with 429.

    `limiter` is a limiter, or the limit of one that counts in memory, for this dependency alone: one object counts
    together wherever it is used. `name` is the limit's name in headers, instead of its text. By default each client
    address is counted, an IPv6 address by its /64. The options are those of `headgate.edges.guard.Options`, except for
    `routes`, `skip`, `counts` and `settle`; `key` may also be a dependency: `key=Depends(current_user_id)`.

    >>> from typing import Annotated
    >>> from fastapi import Depends, FastAPI
    >>> app = FastAPI()
    >>> @app.get("/search", dependencies=[Depends(RateLimit("5/minute"))])
    ... async def search(words: str) -> list[str]: ...
    >>> @app.get("/ask")
    ... async def ask(decision: Annotated[Decision, Depends(RateLimit("5/minute"))]) -> int:
    ...     return decision.remaining

    A request is refunded if another `RateLimit` denies it, and with `refund_crashes` if its endpoint raises and
    nothing handles that. A WebSocket connect counts like a request, and is never refunded.
    """

    def __init__(
        self,
        limiter: Limiter | LimitLike | None = None,
        gate: Gate | None = None,
        *,
        name: str = "",
        **options: Unpack[Options],
    ) -> None:
        if name and (gate is not None or isinstance(limiter, Limiter)):
            refuse("RateLimit name", "none: a limiter has its own, and a gate has tiers", name)
        if limiter is not None and not isinstance(limiter, Limiter):
            limit = limit_of("RateLimit limiter", limiter)
            limiter = Limiter(limit, name=name or str(limit))
        # FastAPI passes `who` only where it is a dependency; otherwise it would read it from the query.
        parameters = dict(inspect.signature(self.__call__).parameters)
        who = parameters.pop("who")
        if isinstance(key := options.get("key"), Depends):
            parameters["who"] = who.replace(default=key)
            options["key"] = _dependency_key
        self.__signature__: Final = inspect.Signature(list(parameters.values()))
        self._guard: Final = Guard(
            "RateLimit", options, limiter=limiter, gate=gate, awaits=True, unsupported=_UNSUPPORTED
        )
        if self._guard.refund_crashes and "scope" not in inspect.signature(Depends).parameters:
            refuse("RateLimit refund_crashes", "FastAPI 0.121 or later, which tells endpoint and response apart", True)

    async def __call__(
        self, connection: HTTPConnection, response: Response, who: Any = None
    ) -> AsyncIterator[Decision]:
        guard, scope = self._guard, connection.scope
        checked = await adrive(guard.check(_FastapiRequest(scope, guard.proxies, who)))
        if checked is None:
            yield EXEMPT
            return
        if not checked.decision:
            scope.get(_HANDLERS, ({},))[0].setdefault(Denied, _handle_denied)
            raise Denied(checked.decision, *(await adrive(guard.denial(checked))))
        for name, value in guard.headers(checked):
            _add_header(response, name.decode(), value.decode())
        if guard.refund_crashes and isinstance(connection, Request):
            scope[_ENDPOINT_EXITS].push_async_exit(partial(_refund_crash, guard, checked, connection))
        try:
            yield checked.decision
        except Exception as error:
            if scope["type"] == "http" and _stems_from(error, Denied):
                await acomplete(guard.refund(checked))
            raise


class _FastapiRequest(AsgiRequest):
    """A request, and its key where that is a dependency."""

    __slots__ = ("who",)

    def __init__(self, scope: Any, proxies: Proxies, who: Any) -> None:
        super().__init__(scope, proxies)
        self.who: Final = who


def _dependency_key(request: HttpRequest) -> str | None:
    assert isinstance(request, _FastapiRequest)
    found: str | None = request.who
    return found


def _add_header(response: Response, name: str, value: str) -> None:
    """Add a header. Several dependencies share the list of policies; of the triple, the last one's is sent."""
    if name.startswith("x-"):
        response.headers[name] = value
    else:
        response.headers.append(name, value)


async def _refund_crash(
    guard: Guard, checked: CheckedRequest, request: Request, _: object, error: BaseException | None, trace: object
) -> None:
    """Refund a request if its endpoint has raised an error that nothing handles, and its client is still there."""
    if not isinstance(error, Exception) or _stems_from(error, (ClientDisconnect, Denied)):
        return
    handlers = checked.request.raw.get(_HANDLERS)
    if handlers is None or any(kind in handlers[0] for kind in type(error).__mro__):
        return
    if not await request.is_disconnected():  # the error doesn't always tell: it may be a group, or a later one
        await acomplete(guard.refund(checked))


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
