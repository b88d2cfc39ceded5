"""ASGI: middleware for Starlette, FastAPI, Litestar, Django and any other ASGI application."""

from collections.abc import Awaitable
from typing import Final, Unpack

from headgate.edges.counters import address_key
from headgate.edges.guard import CheckedRequest, Guard, Options, acomplete
from headgate.edges.requests import (
    UNKNOWN,
    App,
    AsgiRequest,
    HttpResponse,
    Message,
    Receive,
    Scope,
    Send,
    decode_headers,
)
from headgate.edges.websocket import WebSocketLimits, WebSocketMiddleware
from headgate.flow import adrive
from headgate.gate import Gate
from headgate.limiter import Limiter
from headgate.limits.notation import LimitLike

__all__ = ["App", "Message", "RateLimitMiddleware", "Receive", "Scope", "Send"]

_BODIES: Final = ("http.response.body", "http.response.pathsend", "http.response.zerocopysend")
"""The messages of which a response's body consists; the last two are extensions of servers."""


class RateLimitMiddleware:
    """Passes requests on to an application as a limiter or a gate allows, and answers the others with 429.

    `limiter` is a limiter, or the limit of one that counts in memory. By default each client address is counted, an
    IPv6 address by its /64. The options are those of `headgate.edges.guard.Options`.

    >>> async def app(scope, receive, send): ...
    >>> limited = RateLimitMiddleware(app, limiter="60/minute burst 10")

    A WebSocket counts when it connects, as a request with the method "WEBSOCKET"; `websocket` limits its messages.
    Bodies are streamed both ways. A request stays counted if its handler raises (see `refund_crashes`) or its client
    disconnects.
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
        self._guard: Final = Guard("RateLimitMiddleware", options, limiter=limiter, gate=gate, awaits=True)
        self._fast_path: Final = self._guard.fast_path
        self._websockets: Final = WebSocketMiddleware(app, self._guard, websocket)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await (self._websockets if scope["type"] == "websocket" else self._app)(scope, receive, send)
            return
        if self._fast_path is not None:
            check, cost, write_headers = self._fast_path
            client = scope.get("client")
            key = address_key(client[0]) if client and client[0] else UNKNOWN
            decision = check(key, cost)
            if decision:
                await self._app(scope, receive, _add_headers(send, write_headers(decision)))
                return
            # A denial counts nothing: the check is repeated below, and answered.
        guard = self._guard
        checked = await adrive(guard.check(AsgiRequest(scope, guard.proxies)))
        if checked is None:
            await self._app(scope, receive, send)
        elif not checked.decision:
            status, headers, body = await adrive(guard.denial(checked))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        elif guard.settles:
            response = _WatchedResponse(guard, checked, receive, send)
            try:
                await self._app(scope, response.receive, response.send)
            except BaseException as error:
                await response.end(crashed=isinstance(error, Exception))
                raise
            await response.end()
        else:
            headers = guard.headers(checked)
            await self._app(scope, receive, _add_headers(send, headers) if headers else send)


class _WatchedResponse:
    """The response to a request that passed: it gets headers, and is settled once, however it ends."""

    __slots__ = ("_checked", "_disconnected", "_ended", "_guard", "_receive", "_response", "_send")

    def __init__(self, guard: Guard, checked: CheckedRequest, receive: Receive, send: Send) -> None:
        self._guard: Final = guard
        self._checked: Final = checked
        self._receive: Final = receive
        self._send: Final = send
        self._response: HttpResponse | None = None  # once it has begun
        self._disconnected = False
        self._ended = False

    async def receive(self) -> Message:
        """The application's `receive`. It notes a disconnect before the response: frameworks raise for that, or send a
        500 to nobody, but no handler has failed."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and self._response is None:
            self._disconnected = True
        return message

    async def send(self, message: Message) -> None:
        """The application's `send`. The response has ended with its last part; what the application does then is its
        own affair."""
        kind = message["type"]
        if kind == "http.response.start":
            headers = list(message.get("headers", ()))
            if self._response is None:  # the server refuses a second one, and the client has the first
                self._response = HttpResponse(message["status"], decode_headers(headers))
            message = {**message, "headers": headers + self._guard.headers(self._checked)}
        await self._send(message)
        if kind in _BODIES and not message.get("more_body"):
            await self.end()

    async def end(self, *, crashed: bool = False) -> None:
        """Settle the response with what is known: it was sent, or cut off, or the handler has crashed.

        Without a response the request stays counted, unless the handler has crashed.
        """
        if not self._ended and (crashed or self._response is not None):
            self._ended = True
            settlement = self._guard.settle(self._checked, self._response, disconnected=self._disconnected)
            await acomplete(settlement)


def _add_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    """A `send` that adds headers to the response."""

    def send_with_headers(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        return send(message)

    return send_with_headers
