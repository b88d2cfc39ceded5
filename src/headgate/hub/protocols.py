"""uvicorn's protocols, with bounds on time and memory that its settings don't offer.

uvicorn has no documented interface for these bounds, so its protocol classes are subclassed, and methods and attributes
are used that may change with any release: pyproject.toml bounds the version. Before raising that bound, compare this
list with the new release, and run tests/hub/test_protocols.py, test_flood.py and test_fuzz.py.

`HttpProtocol` overrides, of `httptools_impl.HttpToolsProtocol`:

- `connection_made`, `data_received`, `on_headers_complete`, `handle_websocket_upgrade`, `on_message_complete`: to close
  a connection that does not finish the head of a request in time, or sends too large a head. uvicorn only bounds the
  time between requests.
- `connection_lost`: to tell every pipelined request of the disconnect. uvicorn tells the last only, and logs a
  traceback when the others are answered.

It reads `cycle`, `loop`, `parser`, `transport` and `_should_upgrade`, and of a cycle `response_complete`,
`disconnected` and `message_event`.

`WebSocketProtocol` overrides, of `websockets_sansio_impl.WebSocketsSansIOProtocol`:

- `connection_made`, `data_received`, `receive`: to parse a slice at a time, the next when the frames of the last are
  handled, with a small receive buffer in the kernel, so that a flood waits at its sender. uvicorn reads up to 256 KiB
  and parses all of it at once: thousands of small frames, so that hundreds of flooding connections would keep the loop
  busy for seconds and fill the memory.
- `send`, `handle_close`, `keepalive_timeout`: to close a connection whose peer does not read. uvicorn closes the
  transport, which waits for ever for the peer to read the queued data.
- `send_keepalive_ping`, `keepalive_timeout`: to count any data as a sign of life. The pong of a peer that is read
  slowly may be far behind.
- `handle_events`: to answer a malformed handshake. uvicorn neither answers nor closes it.
- `send_receive_event_to_app`: to close after invalid UTF-8 without a traceback in the log.

It uses `close_sent`, `close_timeout`, `close_timer`, `conn`, `curr_msg_data_type`, `frames`, `handle_parser_exception`,
`handshake_complete`, `handshake_initiated`, `loop`, `ping_timeout`, `pong_timer`, `queue`, `read_paused`, `transport`
and `writable`.
"""

import asyncio
import socket
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

SLICE: Final = 256
"""Bytes of a WebSocket that are parsed at once."""
RECEIVE_BUFFER: Final = 32 * 1024
"""Bytes that the kernel may buffer for a WebSocket."""
MAX_HEAD: Final = 64 * 1024
"""Bytes of the head of a request."""
MAX_IGNORED: Final = 64 * 1024
"""Bytes that a peer may send before it answers a close."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with bounds on the time and size of a request's head."""

    head_within = 10.0
    """Seconds for the head of a request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._head = 0  # bytes received of it
        self._in_body = False  # it may go on after the answer
        self._cycles: list[RequestResponseCycle] = []  # unanswered requests: several, if they are pipelined

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if self._deadline is None and (cycle is None or cycle.response_complete):
            self._expect_head()
        if self._deadline is not None and not self._in_body:
            self._head += len(data)
            if self._head > MAX_HEAD + len(data):
                self.transport.close()
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        upgrading = self.parser.should_upgrade() and self._should_upgrade()
        if not upgrading:
            self._have_head()
        elif self._deadline is None:
            self._expect_head()  # a body may have to come first
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
        for cycle in self._cycles:
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
    """uvicorn's WebSocket protocol, which parses a slice at a time and closes peers that don't read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = 2.0  # seconds for the other side to answer a close
        self._unparsed = b""
        self._ignored = 0  # bytes received after the close
        self._alive = False  # whether any data was received since the ping

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        opened = transport.get_extra_info("socket")
        if opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)

    def data_received(self, data: bytes) -> None:
        self._alive = True
        if self.close_sent:
            self._ignored += len(data)
            if self._ignored > MAX_IGNORED:
                self.transport.close()
                return
        self._unparsed += data
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
            self.writable.set()  # nothing follows, and a peer that doesn't read is closed too
        await self.writable.wait()
        if self.close_sent:  # by the protocol itself, as after an invalid frame: uvicorn would blame the application
            raise ClientDisconnected
        await super().send(message)
        if closing and self.close_timer is not None:
            self.close_timer.cancel()
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # otherwise uvicorn logs an error

    def handle_close(self, event: Any) -> None:
        super().handle_close(event)
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.loop.call_later(self.close_timeout, self.transport.abort)  # the peer may never read it

    def send_keepalive_ping(self) -> None:
        self._alive = False
        super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        if self._alive and self.ping_timeout is not None:  # the pong may be behind other data
            self._alive = False
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
            return
        super().keepalive_timeout()
        self.transport.abort()  # as in `handle_close`

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.handshake_complete = self.close_sent = True
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def _parse(self) -> None:
        """Parse until there is a frame to handle, or nothing left."""
        size = SLICE
        while self._unparsed and (self.queue.empty() or self.close_sent):
            part, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            super().data_received(part)
            size *= 2  # no frame yet: it is a large one
