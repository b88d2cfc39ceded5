"""How bytes become requests and frames: a little at a time, and not for ever.

uvicorn reads up to 256 KiB at once from a WebSocket and parses all of it before anything else happens. Of small frames
that is thousands, and hundreds of connections that flood would keep the loop busy for seconds and fill the memory. Here
a connection is parsed a slice at a time, the next one when what came of the last is handled, and the kernel is asked to
keep little in store for it, so that a flood waits at the flooder's.

Nor does uvicorn mind a connection that never finishes the head of a request. Here it is closed.
"""

import asyncio
import socket
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

SLICE: Final = 256
KERNEL: Final = 32 * 1024
HEAD: Final = 64 * 1024
IGNORED: Final = 64 * 1024  # what may come before a close is answered


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which waits for the head of a request only so long, and reads only so much of it."""

    head_within = 10.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._head = 0  # bytes of it so far
        self._in_body = False  # which goes on when the answer doesn't depend on it
        self._cycles: list[RequestResponseCycle] = []  # requests without an answer: several, if they came at once

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if self._deadline is None and (cycle is None or cycle.response_complete):
            self._expect_head()
        if self._deadline is not None and not self._in_body:
            self._head += len(data)
            if self._head > HEAD + len(data):
                self.transport.close()
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        upgrading = self.parser.should_upgrade() and self._should_upgrade()
        if not upgrading:
            self._have_head()
        elif self._deadline is None:
            self._expect_head()  # since a body may have to come before
        self._in_body = True
        super().on_headers_complete()
        if not upgrading:
            self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def handle_websocket_upgrade(self) -> None:
        self._have_head()
        super().handle_websocket_upgrade()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        for cycle in self._cycles:  # uvicorn tells the last, and logs a traceback when the others are answered
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head = 0
        self._deadline = self.loop.call_later(self.head_within, self.transport.close)

    def _have_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, which parses a slice at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = 2.0  # seconds for the other side to answer a close
        self._ahead = b""  # what was read and not yet parsed
        self._ignored = 0  # bytes that came after the close
        self._heard = False  # whether anything has come since the ping

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        opened = transport.get_extra_info("socket")
        if opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self.close_sent:
            self._ignored += len(data)
            if self._ignored > IGNORED:
                self.transport.close()
                return
        self._ahead += data
        self._parse()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.queue.empty():
            self._parse()
            if self.read_paused and self.queue.empty():
                self.read_paused = False
                self.transport.resume_reading()
        return message

    async def send(self, message: Any) -> None:
        closing = message["type"] == "websocket.close"
        if closing:
            self.writable.set()  # nothing follows it, and one that doesn't read is closed too
        await self.writable.wait()
        if self.close_sent:  # by the protocol itself, as after a frame that breaks its rules: uvicorn blames the caller
            raise ClientDisconnected
        await super().send(message)
        if closing and self.close_timer is not None:
            self.close_timer.cancel()
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # uvicorn would log that it is not

    def handle_close(self, event: Any) -> None:
        super().handle_close(event)
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.loop.call_later(self.close_timeout, self.transport.abort)  # it may never read what waits for it

    def send_keepalive_ping(self) -> None:
        self._heard = False
        super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        if self._heard and self.ping_timeout is not None:  # the pong may be behind what comes: a flood is read slowly
            self._heard = False
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
            return
        super().keepalive_timeout()
        self.transport.abort()  # likewise

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.handshake_complete = self.close_sent = True  # uvicorn would neither send the answer nor close
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # which uvicorn would log with a traceback, whoever sends it
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def _parse(self) -> None:
        """Parse until there is something to handle, or nothing left."""
        size = SLICE
        while self._ahead and (self.queue.empty() or self.close_sent):
            part, self._ahead = self._ahead[:size], self._ahead[size:]
            super().data_received(part)
            size *= 2  # nothing came of it yet: it belongs to a large frame
