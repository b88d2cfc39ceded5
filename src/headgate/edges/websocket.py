"""WebSockets behind the ASGI middleware: limits on connects, and on messages either way."""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Never, TypeAlias, get_args

from headgate.edges.application import join_limits
from headgate.edges.counters import Counters, CountersFunction, Decided, address_key, was_counted
from headgate.edges.flood import FLOOD, pause
from headgate.edges.guard import Guard, LimitGiven
from headgate.edges.limit_function import LimitFunction
from headgate.edges.requests import (
    App,
    AsgiRequest,
    HttpRequest,
    HttpResponse,
    Message,
    Receive,
    Scope,
    Send,
    decode_headers,
)
from headgate.edges.reservation import CheckedRequest
from headgate.edges.settlement import acomplete
from headgate.errors import refuse, refuse_option
from headgate.flow import Flow, adrive, drive
from headgate.http import wait_ms
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Outcome

OnDenied: TypeAlias = Literal["frame", "close"]

_LIMITS: Final = ("received", "received_bytes", "sent", "sent_bytes")
"""Of `WebSocketLimits`."""
TRY_LATER: Final = 1013
TOO_BIG: Final = 1009
_ANSWERS: Final = ("websocket.accept", "websocket.close", "websocket.http.response.start")
_MOST_AHEAD: Final = 16  # messages that are read before the application asks for them,
_MOST_AHEAD_BYTES: Final = 65_536  # and about how many bytes


@dataclass(frozen=True, init=False)
class WebSocketLimits:
    """The limits of each caller on its WebSockets, all of them together: messages and bytes, either way.

    A limit is a limiter, or a limit that is counted where the middleware's own is, or a function of the connect request
    that returns such a limit, called once for each connection. None: no limit. The bytes of a text are those of UTF-8.

    >>> WebSocketLimits(received="10/second", received_bytes="1000000/minute").on_denied
    'frame'

    Received messages are counted before the application sees them; it never sees a denied one. What the application
    sends is never denied: `send` waits for its turn.
    """

    received: LimitGiven | None
    """Messages from the client; "gate": as the middleware's gate allows on its channel "ws"."""
    received_bytes: LimitGiven | None
    """Their bytes. A message larger than the limit's capacity closes the connection with 1009."""
    sent: LimitGiven | None
    """Messages from the application."""
    sent_bytes: LimitGiven | None
    """Their bytes. A message larger than the capacity waits until it is full; the next one waits for the rest."""
    on_denied: OnDenied
    """On a denied message: "frame" tells the client, and the connection stays open; "close" closes it with 1013."""
    warn: bool
    """Whether a client with little quota left is warned, once until it has more again."""

    def __init__(
        self,
        *,
        received: LimitGiven | None = None,
        received_bytes: LimitGiven | None = None,
        sent: LimitGiven | None = None,
        sent_bytes: LimitGiven | None = None,
        on_denied: OnDenied = "frame",
        warn: bool = True,
        **unknown: Never,
    ) -> None:
        for option in unknown:
            names = *_LIMITS, "on_denied", "warn"
            refuse_option("WebSocketLimits", names, option, see="docs/websockets.md")
        if on_denied not in get_args(OnDenied):
            refuse("WebSocketLimits on_denied", "'frame' or 'close'", on_denied)
        if not isinstance(warn, bool):
            refuse("WebSocketLimits warn", "True or False", warn)
        vars(self).update(
            received=received,
            received_bytes=received_bytes,
            sent=sent,
            sent_bytes=sent_bytes,
            on_denied=on_denied,
            warn=warn,
        )


Reaction: TypeAlias = Callable[[], Coroutine[Any, Any, Message | None]]
"""Answers the client, and returns the message for the application; None if it was denied."""


class WebSocketMiddleware:
    """The part of the middleware for WebSockets."""

    def __init__(self, app: App, guard: Guard, limits: WebSocketLimits | None) -> None:
        if limits is None:
            limits = WebSocketLimits()
        elif not isinstance(limits, WebSocketLimits):
            refuse("RateLimitMiddleware websocket", "WebSocketLimits(...) or None", limits)
        self._app: Final = app
        self.guard: Final = guard
        self.limits: Final = limits
        self._given: Final = [self._counters(name, getattr(limits, name)) for name in _LIMITS]
        self.flooding: Final[set[_LimitedConnection]] = set()

    def _counters(self, name: str, given: LimitGiven | None) -> Counters | CountersFunction | None:
        if given is None:
            return None
        where = f"WebSocketLimits {name}"
        if given == "gate" and name != "received":
            refuse(where, "a limit or a limiter (a gate counts only received messages)", given)
        found = self.guard.counters(where, name, given)
        return found if isinstance(found, LimitFunction) else _check_counters(name, found)

    def _message_limits(self, request: HttpRequest) -> Flow[object, list[Counters | None]]:
        """The limits of a connection's messages, as `_LIMITS` names them."""
        found: list[Counters | None] = []
        for name, given in zip(_LIMITS, self._given, strict=True):
            if isinstance(given, LimitFunction):
                found.append(_check_counters(name, (yield from self.guard.counters_for(given, request))))
            else:
                found.append(given)
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard = self.guard
        request = AsgiRequest(scope, guard.proxies)
        limits, outermost = join_limits(scope, guard.settings)
        if outermost:
            send = limits.sender(send)
        checked = await adrive(guard.check(request))
        if checked is None:
            await self._app(scope, receive, send)
            return
        limits.add(checked.decision, checked.cost, guard.headers(checked))
        if not checked.decision:
            await self._deny(checked, scope, receive, send)
        else:
            try:
                message_limits = await adrive(self._message_limits(request))
            except BaseException:  # of a function: then nothing is counted
                await acomplete(checked.cancel())
                raise
            connection = _LimitedConnection(self, checked, message_limits, receive, send)
            try:
                await self._app(scope, connection.receive, connection.send)
            except Exception:
                connection.crash()
                raise
            finally:
                await connection.end()

    async def _deny(self, checked: CheckedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a denied connect: with a response, if the server supports that; otherwise the server answers 403."""
        await receive()
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": TRY_LATER, "reason": _reason(checked.decision)})
            return
        status, headers, body = await adrive(self.guard.denial(checked))
        await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": body})


def _check_counters(name: str, found: Counters) -> Counters:
    """Refuse slots, and a limit under which no sent message could ever pass."""
    where, by = f"WebSocketLimits {name}", found[0].limiter
    if by is not None and by.limit.counts_slots:
        refuse(where, "a limit of messages or bytes (the middleware's own limits those in flight)", str(by.limit))
    if by is not None and name.startswith("sent") and not by.limit.capacity:
        refuse(where, "a limit that lets something pass (sent messages aren't dropped)", str(by.limit))
    return found


class _ConnectionLimit:
    """One limit of one connection."""

    __slots__ = ("_counter", "_key", "_tier", "warned")

    def __init__(self, counters: Counters, checked: CheckedRequest) -> None:
        self._counter: Final = counters[0] if checked.identified else counters[1]
        of_address = self._counter.limiter is not None and not checked.identified
        self._key: Final = address_key(checked.key) if of_address else checked.key
        self._tier: Final = checked.tier
        self.warned = False
        """Whether the client was warned already that little is left."""

    @property
    def awaits(self) -> bool:
        """Whether its decisions have to be awaited."""
        return self._counter.awaits

    @property
    def label(self) -> str:
        return self._counter.label(self._tier)

    @property
    def most(self) -> int:
        """The largest cost that can ever pass."""
        return self._counter.limit(self._key, self._tier).capacity

    def check(self, cost: int) -> Decided:
        return self._counter.check(self._key, self._tier, cost)

    def refund(self, cost: int) -> Decided:
        return self._counter.refund(self._key, self._tier, cost)

    async def take_at_once(self, cost: int) -> Decision | None:
        """Take the cost if it is there and nobody waits for it."""
        limiter = self._limiter
        return None if limiter.waiting(self._key) else await limiter.acheck(self._key, cost)

    async def take(self, cost: int) -> Decision:
        """Wait for the cost; the part above the capacity becomes a debt."""
        limiter, most = self._limiter, self.most
        decision = await limiter.aacquire(self._key, min(cost, most))
        if cost > most:
            try:
                await limiter.acharge(self._key, cost - most)
            except BaseException:
                await acomplete(_refund([(self, most, decision)]))
                raise
        return decision

    @property
    def _limiter(self) -> Limiter:
        assert self._counter.limiter is not None  # a gate counts only received messages
        return self._counter.limiter


Spent: TypeAlias = tuple[_ConnectionLimit, int, Decision]
"""A cost, the limit that it was taken from, and the decision that let it pass."""


class _LimitedConnection:
    """A connection that was let in: its application's `receive` and `send`."""

    def __init__(
        self,
        edge: WebSocketMiddleware,
        checked: CheckedRequest,
        limits: Iterable[Counters | None],
        receive: Receive,
        send: Send,
    ) -> None:
        self._edge: Final = edge
        self._checked: Final = checked
        self._receive: Final = receive
        self._send: Final = send
        self._received, self._received_bytes, self._sent, self._sent_bytes = map(self._limit, limits)
        self._awaits: Final = any(limit and limit.awaits for limit in (self._received, self._received_bytes))
        self._answered = False
        self._closed = False  # by the middleware
        self._closed_by_app = False  # then the server takes no message any more, also none of the middleware's
        self._ended = False  # by either side: nothing is waited for any more
        self._disconnect: Message | None = None  # for the application, once it has received it
        self._receiving = False
        self._ahead: Final[deque[Message]] = deque()
        self._reading: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[Message | None] | None = None
        self._waiting_sends: Final[set[asyncio.Timeout]] = set()
        self._denials = 0  # in a row
        self._settlement = checked.release()  # a flow is carried out once

    def _limit(self, counters: Counters | None) -> _ConnectionLimit | None:
        if counters is None:
            return None
        # A gate is asked all the same: the exemption may end.
        exempt = self._checked.decision.outcome is Outcome.EXEMPT and counters[0].limiter is not None
        return None if exempt else _ConnectionLimit(counters, self._checked)

    # From the client -------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        while self._disconnect is None:
            if self._checking is None:
                message = await self._next()
                if message["type"] == "websocket.disconnect":
                    self._leave(message)
                if message["type"] != "websocket.receive":
                    return message
                if not self._awaits:
                    reaction = drive(self._count(message))
                    if reaction is None:
                        return message
                    self._checking = asyncio.create_task(reaction())
                else:
                    self._checking = asyncio.create_task(self._check(message))
            # A task goes on if `receive` is cancelled, so that the next `receive` finds the message.
            try:
                passed = await asyncio.shield(self._checking)
            except Exception:
                self._checking = None
                raise
            self._checking = None
            if passed is not None:
                return passed
        return self._disconnect

    async def _next(self) -> Message:
        """The next message from the server, or the first that was read ahead."""
        while not self._ahead and self._reading is not None:
            await asyncio.wait([self._reading])
        if self._ahead:
            message = self._ahead.popleft()
            self._read_ahead()
            return message
        self._receiving = True
        try:
            return await self._receive()
        finally:
            self._receiving = False
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Read on while a `send` waits and the application doesn't receive: nothing else tells of a disconnect.

        What is read is kept for the application, as far as there is room.
        """
        if not self._waiting_sends or self._receiving or self._ended or self._reading is not None:
            return
        if len(self._ahead) < _MOST_AHEAD and sum(map(_size, self._ahead)) < _MOST_AHEAD_BYTES:
            self._reading = asyncio.create_task(self._read_one())

    async def _read_one(self) -> None:
        try:
            message = await self._receive()
            self._ahead.append(message)
            gone = message["type"] == "websocket.disconnect"
        except Exception:  # noqa: BLE001 - the application meets it in its own `receive`
            gone = True
        self._reading = None
        if gone:
            self._end_waits()
        self._read_ahead()

    async def _check(self, message: Message) -> Message | None:
        reaction = await adrive(self._count(message))
        return message if reaction is None else await reaction()

    def _count(self, message: Message) -> Flow[object, Reaction | None]:
        """Count a message: its full cost, or nothing. Returns the reaction; None if the message just passes."""
        size = _size(message)
        if self._received_bytes is not None and size > (most := self._received_bytes.most) > 0:
            return partial(self._close, TOO_BIG, f"message too big: at most {most} bytes can pass")
        passed: list[Spent] = []
        for limit, cost in ((self._received, 1), (self._received_bytes, size)):
            if limit is None or cost == 0:
                continue
            decision = yield limit.check(cost)
            if not decision:
                yield from _refund(passed)
                return partial(self._deny, limit, decision)
            passed.append((limit, cost, decision))
        self._denials = 0
        self._edge.flooding.discard(self)
        warnings = []
        for limit, _, decision in passed:
            if decision.outcome is not Outcome.WARN:
                limit.warned = False
            elif self._edge.limits.warn and not limit.warned:
                limit.warned = True
                left = {"remaining": decision.remaining, "capacity": decision.limit.capacity}
                warnings.append({"type": "rate_limit_warning", "tier": limit.label, **left})
        return partial(self._warn, message, warnings) if warnings else None

    async def _warn(self, message: Message, warnings: list[dict[str, object]]) -> Message:
        for warning in warnings:
            await self._send_frame(warning)
        return message

    async def _deny(self, limit: _ConnectionLimit, decision: Decision) -> Message | None:
        if self._closed_by_app:
            return None
        if self._edge.limits.on_denied == "close":
            return await self._close(TRY_LATER, _reason(decision))
        await self._send_frame({"type": "rate_limited", "tier": limit.label, "retry_after_ms": wait_ms(decision)})
        self._denials += 1
        if self._denials >= FLOOD:
            flooding = self._edge.flooding
            flooding.add(self)
            await asyncio.sleep(pause(len(flooding), decision))
        return None

    async def _send_frame(self, frame: dict[str, object]) -> None:
        if self._closed_by_app:
            return
        with suppress(OSError):  # if the client is gone, the next `receive` says so
            await self._send({"type": "websocket.send", "text": json.dumps(frame, separators=(",", ":"))})

    async def _close(self, code: int, reason: str) -> Message | None:
        """Close the connection. To the application it looks as if the client had closed it."""
        if self._closed_by_app:
            return None
        message = {"type": "websocket.disconnect", "code": code, "reason": reason}
        self._closed = True
        self._leave(message)
        with suppress(OSError):
            await self._send({"type": "websocket.close", "code": code, "reason": reason})
        return message

    # From the application --------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        kind = message["type"]
        self._closed_by_app = self._closed_by_app or kind == "websocket.close"
        if not self._answered and kind in _ANSWERS:
            await self._answer(kind, message)
            return
        if kind == "websocket.send" and self._answered and self._disconnect is None:
            await self._take(_size(message))
        if not self._closed:  # by the middleware; if the client is gone, that is for the server to say
            await self._send(message)
        elif kind == "websocket.send":
            raise ConnectionError("the connection was closed by the rate limit")

    async def _take(self, size: int) -> None:
        """Wait for the cost of a message, or until the connection ends. A cancelled wait costs nothing."""
        spent: list[Spent] = []
        try:
            for limit, cost in ((self._sent, 1), (self._sent_bytes, size)):
                if limit is not None and cost:
                    decision = await limit.take_at_once(cost) or await self._wait(limit, cost)
                    spent.append((limit, cost, decision))
        except BaseException as error:
            await acomplete(_refund(spent))
            if self._disconnect is None or not isinstance(error, TimeoutError):
                raise

    async def _wait(self, limit: _ConnectionLimit, cost: int) -> Decision:
        """Wait for a message's turn. If the connection ends first: TimeoutError, or ConnectionError if that is news."""
        try:
            async with asyncio.timeout(None) as timeout:
                if self._ended:
                    raise TimeoutError
                self._waiting_sends.add(timeout)
                self._read_ahead()
                try:
                    return await limit.take(cost)
                finally:
                    self._waiting_sends.discard(timeout)
        except TimeoutError:
            if self._ended and self._disconnect is None:
                raise ConnectionError("the client has disconnected") from None
            raise

    async def _answer(self, kind: str, message: Message) -> None:
        """Answer the connect, and settle it."""
        guard = self._edge.guard
        self._answered = True
        try:
            await self._send(message)
        finally:
            if guard.settlement.changes_costs:
                status = {"websocket.accept": 101, "websocket.close": 403}.get(kind) or message.get("status", 500)
                self._settle_by(HttpResponse(status, decode_headers(message.get("headers", ()))))
                if not self._checked.has_slot:
                    await acomplete(self._settlement)

    def _settle_by(self, response: HttpResponse | None) -> None:
        """Let the connect be settled by a response: at the end of the connection, unless that is done before."""
        gone, settlement = self._disconnect is not None, self._edge.guard.settlement
        self._settlement = settlement.settle(self._checked, response, disconnected=gone)

    # The end ---------------------------------------------------------------------------------------------------------

    def _leave(self, disconnect: Message) -> None:
        """The connection has ended, and the application knows."""
        self._disconnect = disconnect
        self._end_waits()

    def _end_waits(self) -> None:
        """The connection has ended: end the waits of `send`."""
        self._ended = True
        now = asyncio.get_running_loop().time()
        while self._waiting_sends:
            self._waiting_sends.pop().reschedule(now)

    def crash(self) -> None:
        """The application has raised: if it hasn't answered, the connect is settled as one that crashed."""
        if not self._answered:
            self._settle_by(None)

    async def end(self) -> None:
        """The application has returned."""
        self._edge.flooding.discard(self)
        self._leave({"type": "websocket.disconnect", "code": 1006})
        tasks = [task for task in (self._checking, self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await acomplete(self._settlement)  # if it was carried out before, that is all


def _refund(spent: list[Spent]) -> Flow[object, None]:
    for limit, cost, decision in spent:
        if was_counted(decision):
            yield limit.refund(cost)


def _size(message: Message) -> int:
    """The bytes of a message."""
    text: str | None = message.get("text")
    if text is None:
        return len(message.get("bytes") or b"")
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _reason(decision: Decision) -> str:
    return f"rate limited; retry in {wait_ms(decision)} ms"
