"""One WebSocket, as the hub sees it: frames in, frames out, and a bounded queue for a slow reader."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, Final, Protocol, TypeAlias

from headgate.hub.timer import Timer
from headgate.limits.clock import Clock

AsgiMessage: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[AsgiMessage]]
Send: TypeAlias = Callable[[AsgiMessage], Awaitable[None]]

POLICY_VIOLATION: Final = 1008
"""The close code of a connection that breaks a rule."""
RESTARTING: Final = 1012
"""The close code of a server that comes back."""
TRY_LATER: Final = 1013
"""The close code of a server that has no room."""
MAX_REASON: Final = 123
"""Bytes of the reason in a close frame."""
MAX_BYTES: Final = 1024 * 1024
"""Bytes queued for one slow reader, however few frames they are."""
_READS: Final = 2  # frames that are read before other tasks have their turn
_PUSHES: Final = 50  # frames that are pushed to many sockets before other tasks have their turn


class ByteCounts(Protocol):
    """Counts the bytes that a connection has sent."""

    @property
    def written(self) -> int:
        """The bytes handed to it."""

    @property
    def sent(self) -> int:
        """The bytes that have left the hub."""


class Socket:
    """A WebSocket that an ASGI server has handed over.

    `send` answers a frame of the other side, and waits while that reads slowly, so that the hub reads no more from it
    than it takes. `push` sends frames from others, and never waits: at most `max_queued` are queued, of `max_bytes`.
    They stay in the queue until they have left the hub, if `connection` counts that.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        address: str,
        max_queued: int,
        connection: ByteCounts | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.address: Final = address
        self.since: Final = time.time()
        """When it was opened, in seconds since 1970."""
        self.closed = False
        """Whether either side has closed it, so that nothing can be sent any more."""
        self.busy: Final = asyncio.Lock()
        """Locked while a frame is handled, so that a shutdown can wait for it."""
        self._reads = 0
        self._receive, self._send = receive, send
        self._max_queued, self._max_bytes = max_queued, max_bytes
        self._connection = connection
        self._queue: deque[tuple[bytes | str, object]] = deque()
        self._leaving: deque[tuple[int, int, object]] = deque()
        """Frames that were written and may not have left the hub: `written` after each, its size and its content."""
        self._queued_bytes = 0  # of both
        self._popped = 0  # frames taken from the queue
        self._progress: Final = asyncio.Event()
        self._deferred: dict[str, Callable[[], list[str]]] = {}
        self._held = False
        self._writer: asyncio.Task[None] | None = None
        self._closer: asyncio.Task[None] | None = None

    async def accept(self) -> bool:
        """Accept the handshake; whether the other side is still there."""
        await self._receive()
        await self._put({"type": "websocket.accept"})
        return not self.closed

    async def refuse(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Answer the handshake with an HTTP response instead."""
        await self._receive()
        await self._put({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await self._put({"type": "websocket.http.response.body", "body": body})
        self.closed = True

    async def read(self) -> str | bytes | None:
        """The next frame; None when the socket is closed."""
        if self.closed:
            return None
        self._reads += 1
        if self._reads % _READS == 0:  # frames that are parsed already come without a pause
            await asyncio.sleep(0)
        message = await self._receive()
        if message["type"] != "websocket.receive" or self.closed:
            self.closed = True
            return None
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, frame: bytes | str) -> None:
        """Send an answer, text or binary, as soon as the other side takes it."""
        await self._put({"type": "websocket.send", "text" if isinstance(frame, str) else "bytes": frame})

    def push(self, frame: bytes | str, content: object = None) -> bool:
        """Queue a frame; False if the queue is full. `content` is what `take_unsent` returns if it can't be sent."""
        if self.closed or self.queued >= self._max_queued or self._queued_bytes + len(frame) > self._max_bytes:
            return False
        self._queue.append((frame, content))
        self._queued_bytes += len(frame)
        self._start_writer()
        return True

    def push_last(self, name: str, make: Callable[[], list[str]]) -> None:
        """Send the frames that `make` returns once the queue is empty. One call for each name: the last."""
        self._deferred[name] = make
        self._start_writer()

    async def flush(self) -> None:
        """Wait until the frames that are queued now are written, or the socket is closed."""
        last = self._popped + len(self._queue)
        while self._popped < last and not self.closed:
            self._progress.clear()
            await self._progress.wait()

    def hold(self) -> None:
        """Queue what is pushed without sending it, until `release`: an answer that takes time has to come first."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self._start_writer()

    def _start_writer(self) -> None:
        if self._writer is None and not self._held:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    @property
    def queued(self) -> int:
        """The number of frames pushed and not sent yet."""
        self._forget_sent()
        return len(self._leaving) + len(self._queue)

    def take_unsent(self) -> list[object]:
        """The contents of frames that were pushed and will not be sent any more, since the socket is closed."""
        self._forget_sent()
        contents = [content for *_, content in (*self._leaving, *self._queue) if content is not None]
        self._leaving.clear()
        self._queue.clear()
        self._queued_bytes = 0
        return contents

    async def close(self, code: int, reason: str = "") -> None:
        """Close it. Of the reason, `MAX_REASON` bytes are sent."""
        if not self.closed:
            self.closed = True
            reason = reason.encode()[:MAX_REASON].decode(errors="ignore")
            await self._put({"type": "websocket.close", "code": code, "reason": reason}, last=True)

    def close_soon(self, code: int, reason: str = "") -> None:
        """Close it in a task of its own, for callers that can't wait."""
        if self._closer is None:
            self._closer = asyncio.get_running_loop().create_task(self.close(code, reason))

    async def close_for_restart(self, retry_after_ms: int) -> None:
        """Close it because the hub stops, with the wait until the client reconnects."""
        await self.close(RESTARTING, f"restarting; retry in {retry_after_ms} ms")

    def close_revoked(self) -> None:
        """Close it soon because the agent's token is no longer valid."""
        self.close_soon(POLICY_VIOLATION, "the token of this agent was revoked or replaced")

    def expect_identification(self, clock: Clock, within: float, reason: str = "") -> Timer:
        """Close it in `within` seconds of the clock, unless the timer is cancelled before."""
        reason = reason or f"identify within {within:g} seconds"
        when = clock.now() + round(within * 1_000_000)
        return Timer(clock, when, lambda: self.close_soon(POLICY_VIOLATION, reason))

    async def _write(self) -> None:
        try:
            while (self._queue or self._deferred) and not self.closed:
                if self._queue:
                    await self._write_first()
                else:
                    for frame in self._deferred.pop(next(iter(self._deferred)))():
                        await self.send(frame)
        finally:
            self._writer = None
            self._progress.set()

    async def _write_first(self) -> None:
        frame, content = self._queue[0]
        await self.send(frame)
        if self.closed:  # it stays unsent
            return
        written = 0 if self._connection is None else self._connection.written
        await asyncio.sleep(0)  # a send to a reader that keeps up doesn't pause; uvloop writes at the end of a turn
        if self._queue:  # otherwise it was taken as unsent
            self._queue.popleft()
            self._popped += 1
            self._progress.set()
            self._leaving.append((written, len(frame), content))
            self._forget_sent()

    def _forget_sent(self) -> None:
        while self._leaving and (self._connection is None or self._leaving[0][0] <= self._connection.sent):
            _, size, _ = self._leaving.popleft()
            self._queued_bytes -= size

    async def _put(self, message: AsgiMessage, *, last: bool = False) -> None:
        if self.closed and not last:
            return
        try:
            await self._send(message)
        except OSError:  # the other side is gone
            self.closed = True


def disconnect(sockets: Collection[Socket]) -> int:
    """Close sockets soon, because an operator wants so; the number of those that were open."""
    still_open = [socket for socket in sockets if not socket.closed]
    for socket in still_open:
        socket.close_soon(POLICY_VIOLATION, "disconnected by an operator")
    return len(still_open)


class FanOut:
    """Pushes frames to many sockets, a few in each turn of the event loop, whoever sends them."""

    def __init__(self) -> None:
        self._turn: Final = asyncio.Lock()
        self._pushed = 0  # since other tasks had their turn

    async def push(self, sockets: Collection[Socket], push: Callable[[Socket], bool]) -> bool:
        """Call `push` for each socket; whether it has returned True for any. Deliveries take turns."""
        waiting, pushed = list(sockets), False
        for start in range(0, len(waiting), _PUSHES):
            async with self._turn:
                some = waiting[start : start + _PUSHES]
                pushed = any([push(socket) for socket in some]) or pushed
                self._pushed += len(some)
                if self._pushed >= _PUSHES:
                    self._pushed = 0
                    await asyncio.sleep(0)
        return pushed
