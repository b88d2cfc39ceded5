"""FastAPI: a dependency that limits the routes, routers or applications that depend on it."""

import inspect
from collections.abc import AsyncIterator
from typing import Any, Final, Unpack

from headgate.edges.guard import Guard, Options, arun
from headgate.edges.requests import AsgiRequest, Proxies, Request, texts
from headgate.errors import HeadgateError, refuse
from headgate.gate import Gate
from headgate.gate._hot import EXEMPT
from headgate.limiter import Limiter
from headgate.limits.decision import Decision
from headgate.limits.notation import LimitLike, limit_of

try:
    from fastapi import HTTPException, Response, WebSocket
    from fastapi.params import Depends
    from fastapi.requests import HTTPConnection
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise HeadgateError(f"headgate.edges.fastapi: expected FastAPI, got: {error}; pip install fastapi") from error

_HANDLERS: Final = "starlette.exception_handlers"  # where Starlette and FastAPI look for what answers to an exception
_NOT_HERE: Final = {
    "routes": "no routes: a dependency belongs to its route",
    "skip": "nothing to skip: a dependency belongs to its route",
    "counts": "no counts: a dependency doesn't see every response; headgate.edges.asgi.RateLimitMiddleware does",
    "settle": "no settle: a dependency doesn't see every response; headgate.edges.asgi.RateLimitMiddleware does",
}


class Denied(HTTPException):
    """A request was denied. It is answered with `body`, unless the application handles this, or its status, itself."""

    def __init__(self, decision: Decision, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.decision: Final = decision
        shown = dict(texts(headers))
        self.body: Final = body
        self.content_type: Final = shown.pop("content-type")
        del shown["content-length"]  # whoever answers with another body has another length
        super().__init__(status, "too many requests" if status == 429 else "not at the moment", shown)


class RateLimit:
    """Lets requests pass to what depends on it as a limiter or a gate allows it, and answers the others with 429.

    `limiter` is a limiter, or the limit of one that counts in memory, for this dependency alone: it is what one object
    counts, wherever it is used. `name` is what it is called in headers, instead of the limit's text. Without more, each
    client address is counted, an IPv6 address by its /64. The options are those of `headgate.edges.guard.Options`, save
    for `routes`, `skip`, `counts` and `settle`; `key` may be a dependency, too: `key=Depends(current_user_id)`.

    >>> from typing import Annotated
    >>> from fastapi import Depends, FastAPI
    >>> app = FastAPI()
    >>> @app.get("/search", dependencies=[Depends(RateLimit("5/minute"))])
    ... async def search(words: str) -> list[str]: ...
    >>> @app.get("/ask")
    ... async def ask(decision: Annotated[Decision, Depends(RateLimit("5/minute"))]) -> int:
    ...     return decision.remaining

    A request is given back if nothing handles what its endpoint raises, or if another `RateLimit` denies it. Connecting
    to a WebSocket counts like a request, and is never given back.
    """

    def __init__(
        self,
        limiter: Limiter | LimitLike | None = None,
        gate: Gate | None = None,
        *,
        name: str = "",
        **options: Unpack[Options],
    ) -> None:
        for option, expected in _NOT_HERE.items():
            if option in options:
                refuse("RateLimit", expected, options[option])  # type: ignore[literal-required]
        if name and (gate is not None or isinstance(limiter, Limiter)):
            refuse("RateLimit name", "none: a limiter has its own, and a gate has tiers", name)
        if limiter is not None and not isinstance(limiter, Limiter):
            limit = limit_of("RateLimit limiter", limiter)
            limiter = Limiter(limit, name=name or str(limit))
        # What FastAPI hands over: `who` only where it is a dependency, or it would be read from the query.
        parameters = dict(inspect.signature(self.__call__).parameters)
        who = parameters.pop("who")
        if isinstance(key := options.get("key"), Depends):
            parameters["who"] = who.replace(default=key)
            options["key"] = _who
        self.__signature__: Final = inspect.Signature(list(parameters.values()))
        self._guard: Final = Guard("RateLimit", limiter=limiter, gate=gate, wait=True, **options)

    async def __call__(
        self, connection: HTTPConnection, response: Response, who: Any = None
    ) -> AsyncIterator[Decision]:
        guard, scope = self._guard, connection.scope
        passage = await arun(guard.admit(_Request(scope, guard.proxies, who)))
        if passage is None:
            yield EXEMPT
            return
        if not passage.decision:
            scope.get(_HANDLERS, ({},))[0].setdefault(Denied, _answer)
            raise Denied(passage.decision, *guard.refusal(passage))
        for name, value in guard.headers(passage):
            _tell(response, name.decode(), value.decode())
        try:
            yield passage.decision
        except Exception as error:
            if scope["type"] == "http" and _gives_back(scope, error):
                await arun(guard.crashed(passage))
            raise


class _Request(AsgiRequest):
    """A request, and who FastAPI has found out it comes from."""

    __slots__ = ("who",)

    def __init__(self, scope: Any, proxies: Proxies, who: Any) -> None:
        super().__init__(scope, proxies)
        self.who: Final = who


def _who(request: Request) -> str | None:
    assert isinstance(request, _Request)
    found: str | None = request.who
    return found


def _tell(response: Response, name: str, value: str) -> None:
    """Add a header. Several dependencies share lists of policies; of the triple, the last one's stands."""
    if name.startswith("x-"):
        response.headers[name] = value
    else:
        response.headers.append(name, value)


def _gives_back(scope: Any, error: Exception) -> bool:
    """Whether a request is given back that ended so: nobody handles it, or it was denied after this."""
    if isinstance(error, (Denied, ClientDisconnect)):
        return isinstance(error, Denied)
    handlers = scope.get(_HANDLERS)
    return handlers is not None and not any(kind in handlers[0] for kind in type(error).__mro__)


async def _answer(connection: HTTPConnection, error: Denied) -> Response | None:
    """Problem details, at the top of the body: FastAPI would put them below "detail"."""
    headers = {**(error.headers or {}), "content-type": error.content_type}
    response = Response(error.body, error.status_code, headers)
    if not isinstance(connection, WebSocket):
        return response
    if "websocket.http.response" in connection.scope.get("extensions", {}):
        await connection.send_denial_response(response)
    else:
        await connection.close(1013, error.detail)
    return None
