"""One connection: slices, bounds and timeouts."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from math import inf
from types import coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headgate.hub.connections.frame_meter import FrameMeter

if TYPE_CHECKING:
    from headgate.hub.connections.guard import AddressConnections, ConnectionGuard

T = TypeVar("T")

SLICE: Final = 4096
"""Bytes of HTTP that are parsed at once: at most one request."""
RECEIVE_BUFFER: Final = 32 * 1024
"""Bytes that the kernel may buffer for a connection."""
MAX_HEAD: Final = 64 * 1024
"""Bytes of the head of a request."""
MAX_LINES: Final = 128
"""Lines of the head of a request."""
MAX_SKIPPED: Final = 16 * 1024 * 1024
"""Bytes of a body that are read, though it was refused, so that its sender can go on."""
MAX_IGNORED: Final = 64 * 1024
"""Bytes that a peer may send after the hub has closed."""
CONTROL_BURST: Final = 100
"""Control frames and empty fragments at once; more close the WebSocket."""
CONTROL_RATE: Final = 20.0
"""Control frames and empty fragments a second."""
FRAGMENT_BURST: Final = 1000
"""Fragments at once; more are read later."""
FRAGMENT_RATE: Final = 500.0
"""Fragments a second."""

_HEAD_END: Final = b"\r\n\r\n"
_POLICY_VIOLATION: Final = 1008
_UNANSWERED_PING: Final = 1011
_LONGEST_LINE: Final = 8192  # of a WebSocket's handshake, for the library that parses it
_TOO_MANY_FIELDS: Final = b"431 Request Header Fields Too Large"


class GuardedConnection(asyncio.Protocol, asyncio.Transport):
    """One connection: a protocol for the socket's transport, a transport for uvicorn's protocol.

    Its life, and the time it has in each state:

    ==========  =======  ========  =============  ==========  ====================================================
    state       `_open`  `_meter`  `_close_sent`  `_closing`
    ==========  =======  ========  =============  ==========  ====================================================
    handshake   no       None      no             no          of TLS, which reads the bytes; `head_within`
    http        yes      None      no             no          `head_within` for a head, none while `requests` > 0
    websocket   yes      set       no             no          no deadline, but pings
    close sent  yes      set       yes            no          only the answer is passed on; `close_within`
    closing     any      any       yes            yes         nothing is written or passed on; `close_within`
    lost        no       any       any            yes         the end
    ==========  =======  ========  =============  ==========  ====================================================

    - handshake to http: `_begin`; without TLS at once
    - http to websocket: `set_protocol`
    - websocket to close sent: `expect_close`, when the application closes
    - all of these to closing: `close`, by uvicorn or after a bound or deadline; `_fail`; `abort`; `eof_received`
    - all to lost: `connection_lost`

    A connection with a `refusal` has `spare_within` for the first two states together, and never becomes idle.

    What was read, until it is closing:

    =========  =======  ============  ================  =============================================================
    state      `_data`  `_scheduled`  `_socket_paused`
    =========  =======  ============  ================  =============================================================
    reading    empty    no            no                `data_received` passes on at once what fits into this turn
    scheduled  some     yes           yes               the guard calls `take_slice` in a later turn
    held       some     no            yes               by uvicorn, or before a WebSocket is accepted (`_paused`), by
                                                        a peer that doesn't read (`_blocked`), or a bound (`_slowed`)
    drained    empty    no            yes               held by the peer or a bound, with nothing left
    =========  =======  ============  ================  =============================================================

    - reading to scheduled or held: `data_received`
    - scheduled to itself, held, drained or reading: `take_slice`
    - held or drained to scheduled or reading: `_schedule_next`, after `resume_reading`, `resume_writing` or
      `_end_slowdown`
    """

    head_within = 10.0
    """Seconds for a TLS handshake, and for the head of a request."""
    spare_within = 2.0
    """Seconds for a whole request on a connection beyond the bounds."""
    close_within = 2.0
    """Seconds for the peer to read the last bytes, and to close too."""
    write_within = 20.0
    """Seconds in which the peer must read something of what waits for it."""
    ping_after = 20.0
    """Seconds of silence until a WebSocket is pinged, and then until it is closed."""

    def __init__(self, guard: "ConnectionGuard", protocol: Callable[["GuardedConnection"], asyncio.Protocol]) -> None:
        super().__init__()
        self._guard: Final = guard
        self._loop: Final = asyncio.get_running_loop()
        self._inner = protocol(self)
        self._transport: asyncio.Transport
        self._below_tls: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None
        self.lost: Final = asyncio.Event()
        """Set at the end."""
        self._open = False  # whether uvicorn's protocol knows of it
        self.address: AddressConnections | None = None
        """The connections of its address; None where that isn't counted."""
        self.sweep = 0
        self.refusal: tuple[int, str] | None = None
        """The status and the reason with which a connection beyond the bounds is refused."""
        self.requests = 0
        """The requests that are being answered; 1 for a WebSocket."""
        self.refused = False
        """Whether the handshake of a WebSocket was answered by a response."""
        self._deadline = guard.now + self.head_within
        # What was received and not passed on:
        self._data, self._at = b"", 0
        self._scheduled = self._socket_paused = False
        self._paused = self._blocked = self._slowed = False  # by uvicorn, by the peer, by a bound
        self._meter: FrameMeter | None = None  # of a WebSocket
        self._lane = guard.http_lane
        self._controls, self._fragments, self._charged = float(CONTROL_BURST), float(FRAGMENT_BURST), guard.now
        self._head = b""
        self._received = 0  # bytes since the last request began or ended
        self._headers: Sequence[tuple[bytes, bytes]] = ()
        # The end, and the signs of life:
        self._closing = self._close_sent = False
        self._ignored = 0
        self.written = 0
        """The bytes written by uvicorn and by this class."""
        self._sent = self._sent_at_check = 0
        self._sent_at = self._received_at = guard.now
        self._received_since_check = self._pinged = False

    @property
    def idle(self) -> bool:
        """Whether it is between two requests, or before the first."""
        return not self.requests and self._meter is None

    # The socket's transport ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        opened = transport.get_extra_info("socket")
        if opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        self._guard.admit(self, transport.get_extra_info("peername"))
        now = self._sent_at = self._received_at = self._charged = self._guard.now
        self._deadline = now + (self.head_within if self.refusal is None else self.spare_within)
        if self._guard.tls is None:
            self._begin()
        else:
            secure = self._loop.start_tls(
                transport, self, self._guard.tls, server_side=True, ssl_handshake_timeout=self.head_within
            )
            # Its first step at once: what is read before that would be lost.
            self._handshake = self._loop.create_task(self._secure(_run_first_step(secure)))

    async def _secure(self, handshake: Awaitable[asyncio.Transport | None]) -> None:
        """Begin after the handshake. A request may come with the end of it: uvloop passes that on after this step."""
        try:
            secured = await handshake
        except OSError:  # also of TLS
            secured = None
        if secured is None:
            self._transport.abort()
            self._guard.release(self)
        else:
            self._below_tls, self._transport = self._transport, secured
            if self.refusal is None:  # a spare connection has one time for everything
                self._deadline = self._guard.now + self.head_within
            self._begin()

    def _begin(self) -> None:
        self._open = True
        self._inner.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.release(self)
        self._closing = True
        self._data = b""
        self.lost.set()
        if self._open:
            self._open = False
            self._inner.connection_lost(exc)

    def eof_received(self) -> bool:
        """Let the transport close, once it has written the last bytes."""
        if self._open:
            self._inner.eof_received()
        self._update_sent()
        self._closing = self._close_sent = True
        self._deadline = self._guard.now + self.close_within
        return False

    def pause_writing(self) -> None:
        self._blocked = True
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._blocked = False
        if not self._closing:  # otherwise the end of the connection ends the wait
            self._inner.resume_writing()
            self._schedule_next()

    def data_received(self, data: bytes) -> None:
        self._received_since_check = True
        if self._close_sent:
            self._ignored += len(data)
            if self._ignored > MAX_IGNORED:
                self.abort()
            if self._closing:
                return
        if self._data:  # reading is stopped
            self._data, self._at = self._data[self._at :] + data, 0
        elif self._paused or self._blocked or self._slowed:
            self._data = data
            self._pause_socket()
        elif not self._guard.take_turn(self._lane):
            self._data = data
            self._pause_socket()
            self._schedule_next()
        else:
            try:
                end = self._next_slice(data, 0)
                if end == len(data):
                    self._pass_on(data)
                    return
                self._data, self._at = data, end
                self._pause_socket()
                self._pass_on(data[:end])
                self._schedule_next()
            except Exception:  # noqa: BLE001 - as in a later turn
                self._guard.abort_failed(self)

    # Slices ----------------------------------------------------------------------------------------------------------

    def _next_slice(self, data: bytes, start: int) -> int:
        if self._meter is not None:
            return self._meter.next_slice(data, start)
        size, at = len(data), data.find(_HEAD_END, start, start + SLICE + len(_HEAD_END))
        end = at + len(_HEAD_END)
        if at >= 0 and end < size:  # there is a body, or another request
            return end if size - start > SLICE or data.find(_HEAD_END, end) >= 0 else size
        return min(start + SLICE, size)

    def _pass_on(self, data: bytes) -> None:
        """Pass a slice on, unless it breaks a bound."""
        meter = self._meter
        if meter is not None:
            if (meter.controls or meter.fragments) and not self._within_bounds(meter):
                return
        else:
            self._received += len(data)
            if self._received > MAX_HEAD and self._received > self._most_received():
                self.close()
                return
            if not self.requests:
                if len(self._head) <= MAX_HEAD:  # there may be more of a body after its answer
                    self._head = data if self._received == len(data) else self._head + data
                if self._head.partition(_HEAD_END)[0].count(b"\n") > MAX_LINES:
                    self._refuse_head()
                    return
                if self._deadline == inf:
                    self._deadline = self._guard.now + self.head_within
        self._inner.data_received(data)

    def _most_received(self) -> int:
        """The bytes since the last request began or ended: its body, which may go on after its answer, and a head.

        While it is answered, uvicorn may read the body of the next one too.
        """
        headers = dict(self._headers)
        more = 4 * self._guard.max_body if self.requests or b"transfer-encoding" in headers else 0
        return MAX_HEAD + min(int(headers.get(b"content-length", 0)), MAX_SKIPPED) + more

    def _within_bounds(self, meter: FrameMeter) -> bool:
        passed = max(self._guard.now - self._charged, 0.0)
        self._charged = self._guard.now
        self._controls = min(self._controls + passed * CONTROL_RATE, CONTROL_BURST) - meter.controls
        self._fragments = min(self._fragments + passed * FRAGMENT_RATE, FRAGMENT_BURST) - meter.fragments
        meter.controls = meter.fragments = 0
        if self._controls < 0:
            self._fail(_POLICY_VIOLATION, f"more than {CONTROL_RATE:g} control frames a second")
        elif meter.too_fragmented:
            self._fail(_POLICY_VIOLATION, "too many fragments in a message")
        elif self._fragments < 0 and not self._slowed:
            self._slowed = True
            self._loop.call_later(-self._fragments / FRAGMENT_RATE, self._end_slowdown)
        return not self._closing

    def _end_slowdown(self) -> None:
        self._slowed = False
        self._schedule_next()

    def _schedule_next(self) -> None:
        """Pass on in a later turn what was read, unless there is a reason to wait; if there is nothing, read on.

        While uvicorn does not read, one read goes ahead: otherwise the end of the connection would go unnoticed.
        """
        if self._closing or self._scheduled or self._blocked or self._slowed:
            return
        if not self._data:
            if self._socket_paused:
                self._socket_paused = False
                self._transport.resume_reading()
        elif not self._paused:
            self._scheduled = True
            self._guard.wait_turn(self, self._lane)

    def take_slice(self) -> None:
        """Pass on a slice of what was received."""
        self._scheduled = False
        if not self._data or self._paused or self._blocked or self._slowed or self._closing:
            return
        data, start = self._data, self._at
        if self._close_sent and self._meter is not None:
            start = self._meter.skip_messages(data, start)  # uvicorn would parse and drop them, a few in each turn
        end = self._next_slice(data, start)
        if end == len(data):
            self._data, self._at = b"", 0
        else:
            self._at = end
        self._pass_on(data[start:end])
        self._schedule_next()

    def _pause_socket(self) -> None:
        if not self._socket_paused and not self._transport.is_closing():
            self._socket_paused = True
            self._transport.pause_reading()

    # The transport of uvicorn's protocol -----------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self.written += len(data)
            self._transport.write(data)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        if self._data or self._socket_paused:
            self._schedule_next()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Become a WebSocket, whose handshake the new protocol has been given.

        Frames wait until the application has accepted it and `resume_reading` is called: uvicorn fails at earlier ones.
        """
        assert isinstance(protocol, asyncio.Protocol)
        self._inner, self._meter, self._paused = protocol, FrameMeter(), True
        self._lane = self._guard.websocket_lane
        self._loop.call_soon(self._check_handshake)

    def _check_handshake(self) -> None:
        """Refuse a handshake that uvicorn neither passes to the application nor answers: it can't parse it."""
        if self.requests or self._closing:
            return
        lines = self._head.split(b"\r\n")
        if len(lines[0]) > _LONGEST_LINE:
            status = b"414 URI Too Long"
        elif max(map(len, lines)) > _LONGEST_LINE:
            status = _TOO_MANY_FIELDS
        else:
            status = b"400 Bad Request"
        self._answer_last(status)

    def _refuse_head(self) -> None:
        """Refuse a head with too many lines: each takes far more memory than its bytes."""
        if not self._headers:  # otherwise it may be the rest of a body that was answered before
            self._answer_last(_TOO_MANY_FIELDS)
        else:
            self.close()

    def _answer_last(self, status: bytes) -> None:
        self.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        self.close()

    def close(self) -> None:
        """Close after the last bytes, at the latest in a short time."""
        self._close(wait=self._socket_paused)

    def _close(self, *, wait: bool) -> None:
        if self._closing:
            return
        self._update_sent()
        self._closing = self._close_sent = True
        self._deadline = self._guard.now + self.close_within
        self._data = b""
        if not wait or self._guard.stopping or self._guard.tls is not None:
            self._transport.close()
            return
        # A peer that still sends would lose what it has not read yet: ignore that until it closes too.
        self._transport.write_eof()
        if self._socket_paused:
            self._socket_paused = False
            self._transport.resume_reading()

    def _fail(self, code: int, reason: str) -> None:
        """Close a WebSocket by a frame between those of uvicorn."""
        payload = code.to_bytes(2, "big") + reason.encode()
        self.write(bytes((0x88, len(payload))) + payload)
        self._close(wait=True)

    def abort(self) -> None:
        self._update_sent()
        self._closing = self._close_sent = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        below = 0 if self._below_tls is None else self._below_tls.get_write_buffer_size()
        return self._transport.get_write_buffer_size() + below

    # The application -------------------------------------------------------------------------------------------------

    def begin_request(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """The head of a request is complete, or the handshake of a WebSocket."""
        self.requests += 1
        self._received, self._head, self._headers = 0, b"", headers
        if self.refusal is None:
            self._deadline = inf

    def end_request(self) -> None:
        """The response is complete, or the WebSocket at its end."""
        self.requests -= 1
        self._received, self._head = 0, b""

    @property
    def sent(self) -> int:
        """The bytes of `written` that the operating system has taken; after the end, those known to be taken before."""
        self._update_sent()
        return self._sent

    def _update_sent(self) -> None:
        if not self._transport.is_closing():  # from then on its buffer may be empty because it was dropped
            self._sent = self.written - self.get_write_buffer_size()

    def expect_close(self) -> None:
        """The application closes a WebSocket: the peer has a short time to read that and to answer."""
        if not self._close_sent:
            self._close_sent = True
            self._deadline = self._guard.now + self.close_within

    # The time --------------------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Close or abort it if a time is over. Called about once a second."""
        if now >= self._deadline:
            if self._close_sent or not self._open:
                self.abort()
            else:
                self.close()
            return
        sent = self.sent
        if sent != self._sent_at_check or sent == self.written:
            self._sent_at_check, self._sent_at = sent, now
        elif now - self._sent_at >= self.write_within:
            self.abort()
            return
        if self._meter is not None and not self._close_sent:
            self._keep_alive(now)

    def _keep_alive(self, now: float) -> None:
        """Ping a WebSocket that is silent. Any data is a sign of life: a pong may wait behind it."""
        if self._received_since_check or self._socket_paused:
            self._received_since_check = self._pinged = False
            self._received_at = now
        elif now - self._received_at >= 2 * self.ping_after:
            self._fail(_UNANSWERED_PING, "keepalive ping timeout")
        elif not self._pinged and now - self._received_at >= self.ping_after:
            self._pinged = True
            self.write(b"\x89\x00")


def _run_first_step(work: Coroutine[Any, Any, T]) -> Awaitable[T]:
    """Do the first step of a coroutine now, and the rest when it is awaited: as an eager task of Python 3.12 does."""
    waits_for = work.send(None)

    @coroutine
    def rest() -> Generator[Any, Any, T]:
        yield waits_for
        return (yield from work.__await__())

    return rest()
