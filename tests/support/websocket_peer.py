"""The server's side of one WebSocket, down to its bytes: a test can do with it what no good server does."""

import asyncio
import http
import json
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, ClassVar, Protocol

from websockets.datastructures import Headers
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from headgate.proto import envelope_pb2 as wire

GONE = (OSError, EOFError, WebSocketException)


class Peer:
    """A connection of a client. By itself it only answers pings, and hangs up when the client closes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = ServerProtocol(max_size=None)
        self._events: deque[Any] = deque()
        self._ended = self._closed = False

    async def request(self) -> Request | None:
        """What the client asked for; None if it hung up."""
        while not self._events:
            if not await self._read():
                return None
        found: Request = self._events.popleft()
        return found

    async def accept(self, request: Request) -> bool:
        """Answer the handshake; False if it isn't one."""
        response = self._protocol.accept(request)
        self._protocol.send_response(response)
        await self._flush()
        return response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS

    async def refuse(self, status: int, headers: Sequence[tuple[str, str]], body: bytes = b"") -> None:
        """Answer the handshake, or any other request, with a status, and hang up."""
        lines = Headers([*headers, ("Content-Length", str(len(body))), ("Connection", "close")])
        self._writer.write(Response(status, "Scripted", lines, body).serialize())
        await self.hang_up()

    async def answer(self, what: object) -> None:
        """Answer a request with JSON."""
        await self.refuse(200, [("Content-Type", "application/json")], json.dumps(what).encode())

    async def receive(self) -> bytes | str | None:
        """The next frame of the client; None if it hung up."""
        while True:
            while self._events:
                frame = self._events.popleft()
                if frame.opcode is Opcode.BINARY:
                    return bytes(frame.data)
                if frame.opcode is Opcode.TEXT:
                    return bytes(frame.data).decode()
                if frame.opcode is Opcode.CLOSE and not self._closed:
                    await self.hang_up()
                    return None
            if not await self._read():
                return None

    async def send(self, frame: bytes | str, share: float = 1.0) -> None:
        """Send a frame, or only a share of its bytes."""
        text = isinstance(frame, str)
        data = frame.encode() if isinstance(frame, str) else frame
        await self.write(Opcode.TEXT if text else Opcode.BINARY, data, share)

    async def write(self, opcode: Opcode, data: bytes, share: float = 1.0) -> None:
        whole = Frame(opcode, data).serialize(mask=False)
        self._writer.write(whole[: max(1, int(len(whole) * share))])
        await self._writer.drain()

    async def close(self, code: int, reason: str) -> None:
        """Send a close frame with any code, and hang up as soon as the client has answered it."""
        await self.send_close(code, reason)
        while not any(event.opcode is Opcode.CLOSE for event in self._events) and await self._read():
            pass
        await self.hang_up()

    async def send_close(self, code: int, reason: str) -> None:
        """Send a close frame with any code, and leave it to the client to hang up."""
        self._closed = True
        await self.write(Opcode.CLOSE, struct.pack("!H", code) + reason.encode())

    async def wait_closed(self) -> None:
        """Read until the client hangs up, and answer nothing."""
        while await self.receive() is not None:
            pass

    async def half_close(self) -> None:
        """Say that nothing more will be sent, and go on reading."""
        self._writer.write_eof()

    async def hang_up(self) -> None:
        with suppress(*GONE):
            await self._writer.drain()
            self._writer.close()
            await self._writer.wait_closed()

    def cut(self) -> None:
        """End the connection with a reset."""
        with suppress(OSError):
            raw: socket.socket = self._writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _read(self) -> bool:
        data = b"" if self._ended else await self._reader.read(65_536)
        if not data:
            self._ended = True
            return False
        self._protocol.receive_data(data)
        self._events += self._protocol.events_received()
        await self._flush()
        return True

    async def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._writer.write(data)
        await self._writer.drain()


@asynccontextmanager
async def websocket_server(serve: Callable[[Peer, Request], Awaitable[None]]) -> AsyncIterator[int]:
    """The port of a server that hands over each connection with its request, until the block ends."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        with suppress(*GONE):
            request = await peer.request()
            if request is not None:
                await serve(peer, request)
        peer.cut()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1000)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def serve_until_stdin_ends(server: AbstractAsyncContextManager[int]) -> None:
    """Run a server as a program of its own, which prints its port."""
    async with server as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


class Frames(Protocol):
    """What a server of one kind says."""

    path: ClassVar[str]
    unreadable: ClassVar[tuple[bytes | str, ...]]

    @staticmethod
    def read(frame: bytes | str) -> tuple[str, str]:
        """The id and the body of what a client sent; the body of a handshake is empty."""

    @staticmethod
    def welcome() -> bytes | str: ...

    @staticmethod
    def acknowledgement(frame_id: str) -> bytes | str: ...

    @staticmethod
    def error(frame_id: str, code: str) -> bytes | str: ...

    @staticmethod
    def denial(frame_id: str, wait_ms: int | None) -> bytes | str: ...

    @staticmethod
    def message(body: str) -> bytes | str: ...


class RelayFrames(Frames):
    """Envelopes."""

    path = "/relay"
    unreadable: ClassVar[tuple[bytes | str, ...]] = (b"\xff\xff\xff", "text", b"\x0a\xff", b"\x08")

    @staticmethod
    def read(frame: bytes | str) -> tuple[str, str]:
        assert isinstance(frame, bytes)
        envelope = wire.Envelope.FromString(frame)
        return envelope.id, envelope.data.body.decode()

    @staticmethod
    def welcome() -> bytes:
        return wire.Envelope(type=wire.MESSAGE_TYPE_WELCOME, welcome=wire.Welcome()).SerializeToString()

    @staticmethod
    def acknowledgement(frame_id: str) -> bytes:
        return wire.Envelope(type=wire.MESSAGE_TYPE_ACK, in_reply_to=frame_id, ack=wire.Ack()).SerializeToString()

    @staticmethod
    def error(frame_id: str, code: str) -> bytes:
        error = wire.Error(code=code, detail="as the script says")
        return wire.Envelope(type=wire.MESSAGE_TYPE_ERROR, in_reply_to=frame_id, error=error).SerializeToString()

    @staticmethod
    def denial(frame_id: str, wait_ms: int | None) -> bytes:
        denied = wire.RateLimited(retry_after_ms=wait_ms or 0, reason="as the script says")
        kind = wire.MESSAGE_TYPE_RATE_LIMITED
        return wire.Envelope(type=kind, in_reply_to=frame_id, rate_limited=denied).SerializeToString()

    @staticmethod
    def message(body: str) -> bytes:
        data = wire.Data(body=body.encode(), content_type="text/plain")
        return wire.Envelope(
            id=body,
            type=wire.MESSAGE_TYPE_DATA,
            data=data,
            **{"from": "bob"},  # type: ignore[arg-type]
        ).SerializeToString()


class HubFrames(Frames):
    """JSON."""

    path = "/ws"
    unreadable: ClassVar[tuple[bytes | str, ...]] = ("{", b"\xff\xff", "[]", '{"type": 1}', "1e999", "[" * 100_000)

    @staticmethod
    def read(frame: bytes | str) -> tuple[str, str]:
        found = json.loads(frame)
        return str(found.get("id", "")), str(found.get("body", ""))

    @staticmethod
    def welcome() -> str:
        return '{"type": "identified", "agent_id": "alice", "mail": 0}'

    @staticmethod
    def acknowledgement(frame_id: str) -> str:
        return _json("message_sent", frame_id, to="bob", delivered=True)

    @staticmethod
    def error(frame_id: str, code: str) -> str:
        return _json("error", frame_id, error=code, detail="as the script says")

    @staticmethod
    def denial(frame_id: str, wait_ms: int | None) -> str:
        return _json(
            "rate_limited", frame_id, tier="normal", **({} if wait_ms is None else {"retry_after_ms": wait_ms})
        )

    @staticmethod
    def message(body: str) -> str:
        return json.dumps({"type": "message", "from": "bob", "body": body})


KINDS: Mapping[str, type[Frames]] = {frames.path: frames for frames in (RelayFrames, HubFrames)}


def _json(kind: str, frame_id: str, **fields: Any) -> str:
    return json.dumps({"type": kind, **({"id": frame_id} if frame_id else {}), **fields})
