"""WebSockets behind the ASGI middleware: who may connect, and what comes and goes over a connection."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from headgate.edges.counters import Counter, Decided, LimiterCounter, by_address
from headgate.edges.flood import FLOOD, pause
from headgate.edges.guard import Flow, Guard, Passage, arun
from headgate.edges.requests import AsgiRequest, Response, texts
from headgate.errors import refuse
from headgate.http import wait_ms
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Outcome
from headgate.limits.notation import LimitLike, limit_of

if TYPE_CHECKING:
    from headgate.edges.asgi import App, Message, Receive, Scope, Send

OnDenied: TypeAlias = Literal["frame", "close"]

TRY_LATER: Final = 1013
TOO_BIG: Final = 1009


@dataclass(frozen=True, kw_only=True)
class WebSocketLimits:
    """What each caller may do over its WebSockets, all of them together: messages and bytes, either way.

    A limit is a limiter, or a limit that is counted where the middleware's own is. None: no limit. A text is as many
    bytes as it has in UTF-8.

    >>> WebSocketLimits(received="10/second", received_bytes="1000000/minute").on_denied
    'frame'

    What is received is counted before the application sees it, and what is denied the application never sees. What
    the application sends is never denied: `send` waits until its turn has come.
    """

    received: Limiter | LimitLike | None = None
    """Messages from the client; "gate" for what the middleware's gate allows on its channel "ws"."""
    received_bytes: Limiter | LimitLike | None = None
    """Their bytes. A message of more than can ever pass at once closes the connection with 1009."""
    sent: Limiter | LimitLike | None = None
    """Messages from the application."""
    sent_bytes: Limiter | LimitLike | None = None
    """Their bytes. What is more than can ever pass at once waits for all there is; the next one waits for the rest."""
    on_denied: OnDenied = "frame"
    """What a denied message does: "frame" tells the client, and the connection stays open; "close" closes with 1013."""
    warn: bool = True
    """Whether a client whose messages pass, but who has little left, is told so, once until it has more again."""

    def __post_init__(self) -> None:
        if self.on_denied not in get_args(OnDenied):
            refuse("WebSocketLimits on_denied", "'frame' or 'close'", self.on_denied)
        if not isinstance(self.warn, bool):
            refuse("WebSocketLimits warn", "True or False", self.warn)


Counters: TypeAlias = tuple[Counter, Counter]
"""Who counts those who are known, and who the others."""


class WebSockets:
    """The middleware's half that stands before an application's WebSockets."""

    def __init__(self, app: "App", guard: Guard, limits: WebSocketLimits | None) -> None:
        if limits is None:
            limits = WebSocketLimits()
        elif not isinstance(limits, WebSocketLimits):
            refuse("RateLimitMiddleware websocket", "WebSocketLimits(...) or None", limits)
        self._app: Final = app
        self.guard: Final = guard
        self.limits: Final = limits
        self.received: Final = self._counters("received", limits.received)
        self.received_bytes: Final = self._counters("received_bytes", limits.received_bytes)
        self.sent: Final = self._counters("sent", limits.sent)
        self.sent_bytes: Final = self._counters("sent_bytes", limits.sent_bytes)
        self.flooding: Final[set[_Connection]] = set()

    def _counters(self, name: str, given: Limiter | LimitLike | None) -> Counters | None:
        if given is None:
            return None
        where = f"WebSocketLimits {name}"
        if given == "gate":
            if name != "received":
                refuse(where, "a limit or a limiter (a gate counts what is received)", given)
        elif not isinstance(given, Limiter):
            given = limit_of(where, given)
        found = self.guard.counters(name, given)
        if name.startswith("sent") and isinstance(found[0], LimiterCounter) and not found[0].limiter.limit.capacity:
            refuse(where, "a limit that lets something pass (what is sent isn't dropped)", given)
        return found

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        passage = await arun(self.guard.admit(AsgiRequest(scope, self.guard.proxies)))
        if passage is None:
            await self._app(scope, receive, send)
        elif not passage.decision:
            await self._refuse(passage, scope, receive, send)
        else:
            connection = _Connection(self, passage, receive, send)
            try:
                await self._app(scope, connection.receive, connection.send)
            except Exception:
                await connection.crashed()
                raise
            finally:
                await connection.end()

    async def _refuse(self, passage: Passage, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer a denied connect: with a response, where the server can do that; else the server answers 403."""
        await receive()
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": TRY_LATER, "reason": _reason(passage.decision)})
            return
        status, headers, body = self.guard.refusal(passage)
        await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": body})


class _Meter:
    """One limit of one connection."""

    __slots__ = ("_counter", "_key", "_tier", "warned")

    def __init__(self, counters: Counters, passage: Passage) -> None:
        self._counter: Final = counters[0] if passage.known else counters[1]
        of_address = isinstance(self._counter, LimiterCounter) and not passage.known
        self._key: Final = by_address(passage.key) if of_address else passage.key
        self._tier: Final = passage.tier
        self.warned = False
        """Whether its client knows already that little is left."""

    @property
    def label(self) -> str:
        return self._counter.label(self._tier)

    @property
    def most(self) -> int:
        """The largest cost that can ever pass."""
        return self._counter.limit(self._key, self._tier).capacity

    def check(self, cost: int) -> Decided:
        return self._counter.check(self._key, self._tier, cost)

    async def refund(self, cost: int) -> None:
        decided = self._counter.refund(self._key, self._tier, cost)
        if not isinstance(decided, Decision):
            await decided

    async def take_at_once(self, cost: int) -> bool:
        """Take as much if it is there and nobody waits for it."""
        limiter = self._limiter
        return not limiter.waiting(self._key) and bool(await limiter.acheck(self._key, cost))

    async def take(self, cost: int) -> None:
        """Wait for as much; what is more than can ever pass leaves a debt."""
        limiter, most = self._limiter, self.most
        await limiter.aacquire(self._key, min(cost, most))
        if cost > most:
            await limiter.acharge(self._key, cost - most)

    @property
    def _limiter(self) -> Limiter:
        assert isinstance(self._counter, LimiterCounter)  # a gate counts only what is received
        return self._counter.limiter


class _Connection:
    """One connection that was let in: what its application receives and sends."""

    def __init__(self, edge: WebSockets, passage: Passage, receive: "Receive", send: "Send") -> None:
        self._edge: Final = edge
        self._passage: Final = passage
        self._receive: Final = receive
        self._send: Final = send
        self._received = self._meter(edge.received)
        self._received_bytes = self._meter(edge.received_bytes)
        self._sent = self._meter(edge.sent)
        self._sent_bytes = self._meter(edge.sent_bytes)
        self._answered = False
        self._closed = False  # by the middleware
        self._disconnect: Message | None = None  # what the application is told, once the connection has ended
        self._judging: asyncio.Task[Message | None] | None = None
        self._held: Final[set[asyncio.Timeout]] = set()  # what the application sends and that has to wait
        self._denials = 0  # in a row

    def _meter(self, counters: Counters | None) -> _Meter | None:
        if counters is None:
            return None
        # A gate is asked all the same: it may be that somebody isn't exempt any more.
        exempt = self._passage.decision.outcome is Outcome.EXEMPT and isinstance(counters[0], LimiterCounter)
        return None if exempt else _Meter(counters, self._passage)

    # From the client -------------------------------------------------------------------------------------------------

    async def receive(self) -> "Message":
        while self._disconnect is None:
            if self._judging is None:
                message = await self._receive()
                if message["type"] == "websocket.disconnect":
                    self._leave(message)
                if message["type"] != "websocket.receive":
                    return message
                judged = self._begin(message)
                if judged is None:
                    continue
                if not isinstance(judged, asyncio.Task):
                    return judged
                self._judging = judged
            try:
                passed = await asyncio.shield(self._judging)
            except Exception:
                self._judging = None
                raise
            self._judging = None
            if passed is not None:
                return passed
        return self._disconnect

    def _begin(self, message: "Message") -> "Message | asyncio.Task[Message | None] | None":
        """Judge a message: at once, or, if something has to be awaited, in a task.

        So whoever gives up on `receive` meanwhile finds the message at the next one.
        """
        flow = self._judge(message)
        try:
            asked = next(flow)
            while not isinstance(asked, Coroutine):
                asked = flow.send(asked)
        except StopIteration as done:
            judged: Message | None = done.value
            return judged
        return _carry_on(flow, asked)

    def _judge(self, message: "Message") -> "Flow[Message | None]":
        """Count a message: all that it costs, or nothing. What the application receives; None if it was denied."""
        size = _size(message)
        answer: Message | None
        if self._received_bytes is not None and size > (most := self._received_bytes.most) > 0:
            answer = yield self._close(TOO_BIG, f"message too big: at most {most} bytes can pass")
            return answer
        passed: list[tuple[_Meter, int, Decision]] = []
        for meter, cost in ((self._received, 1), (self._received_bytes, size)):
            if meter is None or cost == 0:
                continue
            decision = yield meter.check(cost)
            if not decision:
                for other, spent, _ in passed:
                    yield other.refund(spent)
                answer = yield self._deny(meter, decision)
                return answer
            passed.append((meter, cost, decision))
        self._denials = 0
        self._edge.flooding.discard(self)
        for meter, _, decision in passed:
            if decision.outcome is not Outcome.WARN:
                meter.warned = False
            elif self._edge.limits.warn and not meter.warned:
                meter.warned = True
                left = {"remaining": decision.remaining, "capacity": decision.limit.capacity}
                yield self._tell({"type": "rate_limit_warning", "tier": meter.label, **left})
        return message

    async def _deny(self, meter: _Meter, decision: Decision) -> "Message | None":
        if self._edge.limits.on_denied == "close":
            return await self._close(TRY_LATER, _reason(decision))
        await self._tell({"type": "rate_limited", "tier": meter.label, "retry_after_ms": wait_ms(decision)})
        self._denials += 1
        if self._denials >= FLOOD:
            flooding = self._edge.flooding
            flooding.add(self)
            await asyncio.sleep(pause(len(flooding), decision))
        return None

    async def _tell(self, frame: dict[str, object]) -> None:
        with suppress(OSError):  # if the client is gone, the next receive tells
            await self._send({"type": "websocket.send", "text": json.dumps(frame, separators=(",", ":"))})

    async def _close(self, code: int, reason: str) -> "Message":
        """Close the connection. The application is told as if the client had done it."""
        message = {"type": "websocket.disconnect", "code": code, "reason": reason}
        self._closed = True
        self._leave(message)
        with suppress(OSError):
            await self._send({"type": "websocket.close", "code": code, "reason": reason})
        return message

    # From the application --------------------------------------------------------------------------------------------

    async def send(self, message: "Message") -> None:
        kind = message["type"]
        if not self._answered:
            await self._answer(kind, message)
            return
        if kind == "websocket.send" and self._disconnect is None:
            await self._take(_size(message))
        if not self._closed:  # by the middleware; if the client is gone, that is for the server to say
            await self._send(message)
        elif kind == "websocket.send":
            raise ConnectionError("the connection was closed by the rate limit")

    async def _take(self, size: int) -> None:
        """Wait for all that a message costs, or until the connection ends; who gives up has spent nothing."""
        spent: list[tuple[_Meter, int]] = []
        try:
            for meter, cost in ((self._sent, 1), (self._sent_bytes, size)):
                if meter is not None and cost:
                    if not await meter.take_at_once(cost):
                        await self._hold(meter, cost)
                    spent.append((meter, cost))
        except BaseException as error:
            for meter, cost in spent:
                await meter.refund(cost)
            if self._disconnect is None or not isinstance(error, TimeoutError):
                raise

    async def _hold(self, meter: _Meter, cost: int) -> None:
        """Wait until a message's turn has come, or the connection has ended, which is a TimeoutError."""
        async with asyncio.timeout(None) as patience:
            if self._disconnect is not None:
                raise TimeoutError
            self._held.add(patience)
            try:
                await meter.take(cost)
            finally:
                self._held.discard(patience)

    async def _answer(self, kind: str, message: "Message") -> None:
        """Say yes or no to the connect, and count it as what it was."""
        guard, headers = self._edge.guard, list(message.get("headers", ()))
        if kind != "websocket.close":
            message = {**message, "headers": [*headers, *guard.headers(self._passage)]}
        self._answered = True
        await self._send(message)
        if guard.settles:
            status = {"websocket.accept": 101, "websocket.close": 403}.get(kind) or message["status"]
            await arun(guard.settle(self._passage, Response(status, texts(headers))))

    # The end ---------------------------------------------------------------------------------------------------------

    def _leave(self, disconnect: "Message") -> None:
        """The connection has ended: nobody waits any longer to send something."""
        self._disconnect = disconnect
        now = asyncio.get_running_loop().time()
        while self._held:
            self._held.pop().reschedule(now)

    async def crashed(self) -> None:
        """The application has failed. If it hasn't answered the connect, that is given back, save to who went away."""
        if not self._answered and self._disconnect is None:
            await arun(self._edge.guard.crashed(self._passage))

    async def end(self) -> None:
        """The application has left."""
        self._edge.flooding.discard(self)
        self._leave({"type": "websocket.disconnect", "code": 1006})
        if self._judging is not None:
            self._judging.cancel()
            await asyncio.gather(self._judging, return_exceptions=True)


def _carry_on(flow: "Flow[Message | None]", first: Coroutine[Any, Any, Any]) -> "asyncio.Task[Message | None]":
    """Carry out the rest of a flow in a task, from the first thing on that has to be awaited."""

    async def rest() -> "Message | None":
        try:
            asked = flow.send(await first)
            while True:
                asked = flow.send(await asked if isinstance(asked, Coroutine) else asked)
        except StopIteration as done:
            judged: Message | None = done.value
            return judged

    task = asyncio.ensure_future(rest())
    task.add_done_callback(lambda _: first.close())  # which it never came to, if it was cancelled at once
    return task


def _size(message: "Message") -> int:
    """The bytes of a message."""
    text: str | None = message.get("text")
    if text is None:
        return len(message.get("bytes") or b"")
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _reason(decision: Decision) -> str:
    return f"rate limited; retry in {wait_ms(decision)} ms"
