"""ASGI: middleware for Starlette, FastAPI, Litestar, Django and every other application of that kind."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, Unpack

from headgate.edges.counters import by_address
from headgate.edges.guard import Guard, Options, Passage, arun
from headgate.edges.requests import UNKNOWN, AsgiRequest, Response, texts
from headgate.edges.websocket import WebSocketLimits, WebSockets
from headgate.gate import Gate
from headgate.limiter import Limiter
from headgate.limits.notation import LimitLike

Scope: TypeAlias = Any  # mappings; frameworks have types of their own for them
Message: TypeAlias = Any
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class RateLimitMiddleware:
    """Lets requests pass to an application as a limiter or a gate allows it, and answers the others with 429.

    `limiter` is a limiter, or the limit of one that counts in memory. Without more, each client address is counted, an
    IPv6 address by its /64. The options are those of `headgate.edges.guard.Options`.

    >>> async def app(scope, receive, send): ...
    >>> limited = RateLimitMiddleware(app, limiter="60/minute burst 10")

    A WebSocket counts when it connects, as a request with the method "WEBSOCKET"; `websocket` limits what goes over it.
    Bodies are passed on as they come, either way. A request whose handler raises is given back; one whose client goes
    away is not.
    """

    def __init__(
        self,
        app: App,
        limiter: Limiter | LimitLike | None = None,
        gate: Gate | None = None,
        websocket: WebSocketLimits | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._app: Final = app
        self._guard: Final = Guard("RateLimitMiddleware", limiter=limiter, gate=gate, wait=True, **options)
        self._quick: Final = self._guard.quick
        self._websockets: Final = WebSockets(app, self._guard, websocket)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await (self._websockets if scope["type"] == "websocket" else self._app)(scope, receive, send)
            return
        if self._quick is not None:
            check, refund, cost, told = self._quick
            client = scope.get("client")
            key = by_address(client[0]) if client and client[0] else UNKNOWN
            decision = check(key, cost)
            if decision:
                hearing = _Hearing(receive)
                try:
                    await self._app(scope, hearing, _telling(send, told(decision)))
                except Exception:
                    if not hearing.gone:
                        refund(key, cost)
                    raise
                return
            # A denial counts nothing: it is asked for again below, and answered.
        guard = self._guard
        passage = await arun(guard.admit(AsgiRequest(scope, guard.proxies)))
        if passage is None:
            await self._app(scope, receive, send)
        elif not passage.decision:
            status, headers, body = guard.refusal(passage)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        elif guard.settles:
            await self._settled(passage, scope, receive, send)
        else:
            headers, hearing = guard.headers(passage), _Hearing(receive)
            try:
                await self._app(scope, hearing, _telling(send, headers) if headers else send)
            except Exception:
                if not hearing.gone:
                    await arun(guard.crashed(passage))
                raise

    async def _settled(self, passage: Passage, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass whose cost depends on its response: it is known when its last part has been sent."""
        guard, response, done = self._guard, None, False

        async def sending(message: Message) -> None:
            nonlocal response, done
            if message["type"] == "http.response.start":
                response = Response(message["status"], texts(message.get("headers", ())))
            await telling(message)
            if message["type"] == "http.response.body" and not message.get("more_body") and response and not done:
                done = True
                await arun(guard.settle(passage, response))

        telling, hearing = _telling(send, guard.headers(passage)), _Hearing(receive)
        try:
            await self._app(scope, hearing, sending)
        except Exception:
            if not done and not hearing.gone:
                await arun(guard.crashed(passage))
            raise


class _Hearing:
    """Passes on what comes from a client, and knows if it went away: frameworks raise for that, but nothing failed."""

    __slots__ = ("_receive", "gone")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
        return message


def _telling(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    """Add headers to a response."""

    def sending(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        return send(message)

    return sending
