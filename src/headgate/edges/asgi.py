"""ASGI: middleware for Starlette, FastAPI, Litestar, Django and any other ASGI application."""

from typing import Final, Unpack

from headgate.edges.application import SCOPE_KEY, RequestLimits, join_limits
from headgate.edges.counters import FastPath, address_key
from headgate.edges.guard import DenialResponse, Guard, LimitGiven, Options
from headgate.edges.lifespan import run_lifespan
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
from headgate.edges.reservation import CheckedRequest
from headgate.edges.settlement import acomplete
from headgate.edges.websocket import WebSocketLimits, WebSocketMiddleware
from headgate.errors import RateLimited, StoreAway
from headgate.flow import adrive
from headgate.gate import Gate
from headgate.stores.base import Store
from headgate.stores.urls import is_memory, make_store

__all__ = ["App", "Message", "RateLimitMiddleware", "Receive", "Scope", "Send"]

_BODIES: Final = ("http.response.body", "http.response.pathsend", "http.response.zerocopysend")
"""The messages of which a response's body consists; the last two are extensions of servers."""


class RateLimitMiddleware:
    """Passes requests on to an application as a limiter or a gate allows, and answers the others with 429.

    `limiter` is a limit, or a function of the request that returns one, plain or async; it is counted in `store` under
    `name`. The store is a store, or the URL of a Redis or Valkey server, which is opened and closed with the
    application; without it, each process counts in its memory. `limiter` may also be a `Limiter`, which has a store of
    its own. By default each client address is counted, an IPv6 address by its /64. The options are those of
    `headgate.edges.guard.Options`.

    >>> async def app(scope, receive, send): ...
    >>> limited = RateLimitMiddleware(app, limiter="60/minute burst 10")

    The dependencies of an application (`headgate.edges.fastapi.RateLimit`) count in this store, too, and have the
    options `key`, `exempt`, `headers`, `proxies` and `body`, unless they are given others. A response has one set of
    headers, of the limit that binds. If `RateLimited` or `StoreAway` is raised before the response, that is answered
    like a denial.

    A WebSocket counts when it connects, as a request with the method "WEBSOCKET"; `websocket` limits its messages.
    Bodies are streamed both ways. A request stays counted if its handler raises (see `refund_crashes`) or its client
    disconnects.

    With "5 in flight" in the limit, a request has a slot until its response has ended, and a WebSocket until it is
    closed. Background tasks have none.
    """

    def __init__(
        self,
        app: App,
        limiter: LimitGiven | None = None,
        gate: Gate | None = None,
        websocket: WebSocketLimits | None = None,
        *,
        store: Store | str | None = None,
        name: str = "",
        **options: Unpack[Options],
    ) -> None:
        self._app: Final = app
        where = "RateLimitMiddleware"
        self._opened: Final = make_store(f"{where} store", store) if isinstance(store, str) else None
        counts_in = self._opened if isinstance(store, str) else store
        private = is_memory(store)
        self._guard: Final = Guard(
            where, options, limiter=limiter, gate=gate, store=counts_in, name=name, private=private, awaits=True,
            arguments=("limiter", "gate", "store", "name", "websocket"),
        )  # fmt: skip
        self._websockets: Final = WebSocketMiddleware(app, self._guard, websocket)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard, kind = self._guard, scope["type"]
        if kind != "http":
            if kind == "websocket":
                await self._websockets(scope, receive, send)
            elif kind == "lifespan" and guard.settings.store is not None:
                await run_lifespan(self._app, guard.settings, self._opened, scope, receive, send)
            else:
                await self._app(scope, receive, send)
            return
        checked, fast_path = None, guard.fast_path
        if fast_path is not None and SCOPE_KEY not in scope and scope["method"].upper() != "OPTIONS":
            request, identified = None, False
            if isinstance(fast_path, FastPath):
                client = scope.get("client")
                key = address_key(client[0]) if client and client[0] else UNKNOWN
            else:
                request = AsgiRequest(scope, guard.proxies)
                fast_path, key, identified = await fast_path(request)
                if fast_path.counter.hold is not None:  # a limit of the user's function has slots
                    held = guard.check_held(request, fast_path.counter, key, fast_path.cost, identified)
                    await self._handle(scope, receive, send, await adrive(held))
                    return
            counter, check, cost, write_headers = fast_path
            decision = check(key, cost)
            if decision:
                limits = RequestLimits(guard.settings, headers=write_headers(decision), bound=(decision, cost))
                scope[SCOPE_KEY], send = limits, limits.sender(send)
                try:
                    await self._app(scope, receive, send)
                except (RateLimited, StoreAway) as error:
                    await self._answer(error, limits, scope, send)
                return
            request = request or AsgiRequest(scope, guard.proxies)
            checked = CheckedRequest(request, counter, key, "normal", cost, decision, identified)
        await self._handle(scope, receive, send, checked)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, checked: CheckedRequest | None) -> None:
        guard = self._guard
        limits, outermost = join_limits(scope, guard.settings)
        if outermost:
            send = limits.sender(send)
        if checked is None:
            checked = await adrive(guard.check(AsgiRequest(scope, guard.proxies)))
        response = None
        if checked is not None:
            limits.add(checked.decision, checked.cost, guard.headers(checked))
            if not checked.decision:
                await _send_denial(await adrive(guard.denial(checked)), scope, send)
                return
            if guard.settlement.changes_costs or checked.held:
                response = _WatchedResponse(guard, checked, receive, send)
                receive, send = response.receive, response.send
        try:
            try:
                await self._app(scope, receive, send)
            except (RateLimited, StoreAway) as error:
                if response is not None and isinstance(error, StoreAway):
                    await response.end(crashed=True)
                await self._answer(error, limits, scope, send)
        except BaseException as error:
            if response is not None:
                await response.end(crashed=isinstance(error, Exception))
            raise
        if response is not None:
            await response.end()

    async def _answer(self, error: RateLimited | StoreAway, limits: RequestLimits, scope: Scope, send: Send) -> None:
        """Answer a request in which `RateLimited` or `StoreAway` was raised, if that is still possible."""
        if limits.response_started:
            raise error
        guard, limits.headers = self._guard, []  # they tell of limits that have let it pass
        await _send_denial(await adrive(guard.denial_of(AsgiRequest(scope, guard.proxies), error)), scope, send)


async def _send_denial(denial: DenialResponse, scope: Scope, send: Send) -> None:
    await send({"type": "http.response.start", "status": denial.status, "headers": denial.headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else denial.body})


class _WatchedResponse:
    """The response to a request that passed: it is settled once, however it ends."""

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
        if kind == "http.response.start" and self._response is None:  # a second one doesn't reach the client
            headers = list(message.get("headers", ()))
            self._response, message = (
                HttpResponse(message["status"], decode_headers(headers)),
                {**message, "headers": headers},
            )
        await self._send(message)
        if kind in _BODIES and not message.get("more_body"):
            await self.end()

    async def end(self, *, crashed: bool = False) -> None:
        """Settle it with what is known. Only the first end counts."""
        if not self._ended:
            self._ended, end = True, self._guard.settlement.end
            await acomplete(end(self._checked, self._response, crashed=crashed, disconnected=self._disconnected))
