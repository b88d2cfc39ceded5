"""One WebSocket, as the hub sees it: frames in, frames out, and never more than so many waiting for a slow reader."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

MOST_BYTES: Final = 1024 * 1024
"""What waits for one slow reader, however few frames it is."""
_AT_ONCE: Final = 2  # frames that are read before others have their turn


class Socket:
    """A WebSocket that an ASGI server has handed over.

    What answers a frame of the other side is sent by `send`, which waits while it reads slowly: so it can't make the
    hub read more from it than it takes. What others have for it is sent by `push`, which never waits.
    """

    def __init__(self, receive: Receive, send: Send, address: str, room: int) -> None:
        self.address: Final = address
        self.closed = False
        """Whether either side has closed it, so that nothing can be sent any more."""
        self.turn: Final = asyncio.Lock()
        """Held while a frame is handled, so that the end of the hub can wait for it."""
        self._reads = 0
        self._receive, self._send = receive, send
        self._room = room
        self._waiting: deque[bytes | str] = deque()
        self._bytes = 0
        self._owed: dict[str, Callable[[], str | None]] = {}
        self._writer: asyncio.Task[None] | None = None

    async def accept(self) -> bool:
        """Answer the handshake, and say whether the other side is still there."""
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
        if self._reads % _AT_ONCE == 0:  # frames that were parsed already come without a pause
            await asyncio.sleep(0)
        message = await self._receive()
        if message["type"] != "websocket.receive" or self.closed:
            self.closed = True
            return None
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, frame: bytes | str) -> None:
        """Send an answer, text as it is and bytes as a binary frame, as soon as the other side takes it."""
        await self._put({"type": "websocket.send", "text" if isinstance(frame, str) else "bytes": frame})

    def push(self, frame: bytes | str) -> bool:
        """Have a frame sent, unless too many wait already: then False."""
        if self.closed or len(self._waiting) >= self._room or self._bytes + len(frame) > MOST_BYTES:
            return False
        self._waiting.append(frame)
        self._bytes += len(frame)
        self._begin_to_write()
        return True

    def owe(self, what: str, make: Callable[[], str | None]) -> None:
        """Have a frame made and sent when nothing waits any more, unless it turns out not to be needed then."""
        self._owed[what] = make
        self._begin_to_write()

    def _begin_to_write(self) -> None:
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    @property
    def waiting(self) -> int:
        """How many frames were pushed and not yet taken."""
        return len(self._waiting)

    def untaken(self) -> list[bytes | str]:
        """What was pushed and will not be sent any more, since the socket is closed."""
        frames = list(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        return frames

    async def close(self, code: int, reason: str = "") -> None:
        """Close it. `reason` is at most 123 bytes of UTF-8."""
        if not self.closed:
            self.closed = True
            await self._deliver({"type": "websocket.close", "code": code, "reason": reason})

    async def _write(self) -> None:
        try:
            while (self._waiting or self._owed) and not self.closed:
                if self._waiting:
                    await self._write_first()
                elif (frame := self._owed.pop(next(iter(self._owed)))()) is not None:
                    await self.send(frame)
        finally:
            self._writer = None

    async def _write_first(self) -> None:
        frame = self._waiting[0]
        await self.send(frame)
        if self._waiting and not self.closed:  # else it is not taken
            self._waiting.popleft()
            self._bytes -= len(frame)

    async def _put(self, message: Message) -> None:
        if not self.closed:
            await self._deliver(message)

    async def _deliver(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # the other side is gone
            self.closed = True
