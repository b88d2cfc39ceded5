"""ASGI: middleware for Starlette, FastAPI, Litestar, Django and any other ASGI application."""

from collections.abc import Awaitable
from typing import Final, Unpack

from headgate.edges.counters import address_key
from headgate.edges.guard import CheckedRequest, Guard, Options
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


class RateLimitMiddleware:
    """Passes requests on to an application as a limiter or a gate allows, and answers the others with 429.

    `limiter` is a limiter, or the limit of one that counts in memory. By default each client address is counted, an
    IPv6 address by its /64. The options are those of `headgate.edges.guard.Options`.

    >>> async def app(scope, receive, send): ...
    >>> limited = RateLimitMiddleware(app, limiter="60/minute burst 10")

    A WebSocket counts when it connects, as a request with the method "WEBSOCKET"; `websocket` limits its messages.
    Bodies are streamed both ways. A request whose handler raises is refunded; one whose client disconnects is not.
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
            check, refund, cost, write_headers = self._fast_path
            client = scope.get("client")
            key = address_key(client[0]) if client and client[0] else UNKNOWN
            decision = check(key, cost)
            if decision:
                watched = _WatchedReceive(receive)
                try:
                    await self._app(scope, watched, _add_headers(send, write_headers(decision)))
                except Exception:
                    if not watched.disconnected:
                        refund(key, cost)
                    raise
                return
            # A denial counts nothing: the check is repeated below, and answered.
        guard = self._guard
        checked = await adrive(guard.check(AsgiRequest(scope, guard.proxies)))
        if checked is None:
            await self._app(scope, receive, send)
        elif not checked.decision:
            status, headers, body = guard.denial(checked)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        elif guard.settles:
            await self._settle(checked, scope, receive, send)
        else:
            headers, watched = guard.headers(checked), _WatchedReceive(receive)
            try:
                await self._app(scope, watched, _add_headers(send, headers) if headers else send)
            except Exception:
                if not watched.disconnected:
                    await adrive(guard.refund(checked))
                raise

    async def _settle(self, checked: CheckedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on whose cost depends on the response: it is settled when the last part has been sent."""
        guard, response, done = self._guard, None, False

        async def send_and_settle(message: Message) -> None:
            nonlocal response, done
            if message["type"] == "http.response.start":
                response = HttpResponse(message["status"], decode_headers(message.get("headers", ())))
            await send_with_headers(message)
            if message["type"] == "http.response.body" and not message.get("more_body") and response and not done:
                done = True
                await adrive(guard.settle(checked, response))

        send_with_headers, watched = _add_headers(send, guard.headers(checked)), _WatchedReceive(receive)
        try:
            await self._app(scope, watched, send_and_settle)
        except Exception:
            if not done and not watched.disconnected:
                await adrive(guard.refund(checked))
            raise


class _WatchedReceive:
    """A `receive` that notes a disconnect: frameworks raise for that, but no handler has failed."""

    __slots__ = ("_receive", "disconnected")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.disconnected = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.disconnected = True
        return message


def _add_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    """A `send` that adds headers to the response."""

    def send_with_headers(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        return send(message)

    return send_with_headers
