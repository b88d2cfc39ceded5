"""The connections of one server: bounds on their number, turns, and the time."""

import asyncio
import json
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from ipaddress import ip_network
from typing import Any, Final, TypeAlias

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headgate.errors import InvalidInput
from headgate.gate.lookup import counted_as, parse_address
from headgate.hub.connections.connection import GuardedConnection

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
Asgi: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

PER_TURN: Final = 32
"""Slices of HTTP, and of WebSockets, that are parsed in a turn of the event loop."""
RESERVE: Final = 100
"""Connections beyond the bounds, on which only probes are answered."""
HTTP_PER_ADDRESS: Final = 100
"""Connections from one address beside its WebSockets."""

_SWEEPS: Final = 10  # parts into which the connections are divided: each is looked at once a second
_PEERS_MISTAKES: Final = (  # which uvicorn logs, with a traceback or as warnings
    "Invalid UTF-8 sequence received from client.",
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
)

_log = structlog.get_logger("headgate.hub")


class ConnectionGuard:
    """The connections of one server, with bounds on them: `most` in all, `most_per_address` from one address.

    Addresses of `trusted` networks are proxies, and not counted. A new connection beyond the bounds replaces the oldest
    idle one, of its address or at all. If none is idle it is one of `RESERVE` on which probes are answered as ever,
    and everything else is refused. These spare connections don't count against the bounds. `tls` is the context of a
    server with TLS.
    """

    def __init__(
        self,
        app: Asgi,
        *,
        most: int = 11_000,
        most_per_address: int = 1_100,
        max_body: int = 65_536,
        trusted: Sequence[str] = (),
        probes: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app, self._most, self._most_per_address = app, most, most_per_address
        self._trusted: Final = [ip_network(one) for one in trusted]
        self._probes: Final = frozenset(probes)
        self.max_body: Final = max_body
        self.tls: Final = tls
        self.stopping = False
        """Whether the server stops: connections are closed at once."""
        self.now = 0.0
        """The time of the loop, as of the last sweep."""
        self.http_lane: Final = _Lane()
        self.websocket_lane: Final = _Lane()
        self._turning = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeps: Final[list[set[GuardedConnection]]] = [set() for _ in range(_SWEEPS)]
        self._next_sweep = 0
        self._made = 0
        self._sweeping = False
        self._addresses: Final[dict[str, AddressConnections]] = {}
        self._idle: Final[dict[GuardedConnection, None]] = {}  # oldest first
        self._spare: Final[dict[GuardedConnection, None]] = {}  # oldest first
        logging.getLogger("uvicorn.error").addFilter(_is_own_error)

    def __len__(self) -> int:
        return sum(map(len, self._sweeps))

    # Connections -----------------------------------------------------------------------------------------------------

    def protocol(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> GuardedConnection:
        """A protocol for a new connection."""

        def inner(connection: GuardedConnection) -> HttpToolsProtocol:
            return HttpToolsProtocol(config, server_state, {**app_state, "connection": connection}, _loop)

        return GuardedConnection(self, inner)

    def admit(self, connection: GuardedConnection, peer: object) -> None:
        """Count a new connection. One beyond the bounds gets the place of an idle one, or a `refusal`."""
        loop = self._loop = asyncio.get_running_loop()
        self.now = loop.time()
        if not self._sweeping:
            self._sweeping = True
            loop.call_later(1 / _SWEEPS, self._sweep, loop)
        connection.sweep = self._made = (self._made + 1) % _SWEEPS
        key = self._key(peer)
        address = None if key is None else self._addresses.get(key)
        if address is not None and address.count >= self._most_per_address and not self._drop_oldest(address.idle):
            detail = (
                f"expected at most {self._most_per_address} connections from {key}; close one, or raise "
                "max_connections_per_address"
            )
            self._admit_spare(connection, (429, detail))
        elif len(self) - len(self._spare) >= self._most and not self._drop_oldest(self._idle):
            detail = (
                f"expected at most {self._most} connections to the hub; try again later, or raise max_connections "
                "or max_http_connections"
            )
            self._admit_spare(connection, (503, detail))
        else:
            if key is not None:
                connection.address = self._addresses.setdefault(key, AddressConnections(key))
                connection.address.count += 1
            self._mark_idle(connection)
        self._sweeps[connection.sweep].add(connection)

    def _key(self, peer: object) -> str | None:
        """The key that an address is counted under; None for a proxy or a Unix socket."""
        if not isinstance(peer, (tuple, list)) or not peer:
            return None
        try:
            found = parse_address(peer[0])
        except InvalidInput:
            return None
        if any(found in network for network in self._trusted):
            return None
        return counted_as(str(found))

    def _admit_spare(self, connection: GuardedConnection, refusal: tuple[int, str]) -> None:
        if len(self._spare) >= RESERVE:
            self._drop_oldest(self._spare)
        connection.refusal = refusal
        self._spare[connection] = None

    def _drop_oldest(self, of: dict[GuardedConnection, None]) -> bool:
        """Abort the oldest of some connections; whether there is one."""
        oldest = next(iter(of), None)
        if oldest is None:
            return False
        self.release(oldest)
        oldest.abort()
        return True

    def release(self, connection: GuardedConnection) -> None:
        """A connection is at its end."""
        if connection not in self._sweeps[connection.sweep]:
            return
        self._sweeps[connection.sweep].discard(connection)
        self._unmark_idle(connection)
        self._spare.pop(connection, None)
        address = connection.address
        if address is not None:
            address.count -= 1
            if not address.count:
                del self._addresses[address.key]

    def abort_failed(self, connection: GuardedConnection) -> None:
        """Abort a connection after an error in the hub, which is being handled, and log the error."""
        _log.exception("connection aborted after an error")
        connection.abort()

    def abort_all(self) -> None:
        """Abort all connections."""
        for connections in self._sweeps:
            for connection in list(connections):
                connection.abort()

    # Turns -----------------------------------------------------------------------------------------------------------

    def take_turn(self, lane: "_Lane") -> bool:
        """Whether a connection may pass on a slice at once: nobody waits, and there is room in this turn."""
        if lane.waiting or lane.passed >= PER_TURN:
            return False
        lane.passed += 1
        self._expect_turn()
        return True

    def wait_turn(self, connection: GuardedConnection, lane: "_Lane") -> None:
        """Let a connection pass on a slice in a later turn, after those that wait already."""
        lane.waiting.append(connection)
        self._expect_turn()

    def _expect_turn(self) -> None:
        if not self._turning:
            self._turning = True
            assert self._loop is not None
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Begin a turn of the loop with those that wait."""
        self._turning = False
        for lane in (self.websocket_lane, self.http_lane):
            lane.passed = min(len(lane.waiting), PER_TURN)
            if lane.passed:
                self._expect_turn()
            for _ in range(lane.passed):
                connection = lane.waiting.popleft()
                try:
                    connection.take_slice()
                except Exception:  # noqa: BLE001 - it ends this connection, and holds up no other
                    self.abort_failed(connection)

    # Idle connections, and the time ----------------------------------------------------------------------------------

    def _mark_idle(self, connection: GuardedConnection) -> None:
        self._idle[connection] = None
        if connection.address is not None:
            connection.address.idle[connection] = None

    def _unmark_idle(self, connection: GuardedConnection) -> None:
        self._idle.pop(connection, None)
        if connection.address is not None:
            connection.address.idle.pop(connection, None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look at a part of the connections, in turns."""
        self.now = loop.time()
        self._next_sweep = (self._next_sweep + 1) % _SWEEPS
        self._sweeping = len(self) > 0
        if self._sweeping:
            loop.call_later(1 / _SWEEPS, self._sweep, loop)
        for connection in list(self._sweeps[self._next_sweep]):
            try:
                connection.check(self.now)
            except Exception:  # noqa: BLE001 - it ends this connection, and the timeouts of no other
                self.abort_failed(connection)

    # ASGI ------------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: GuardedConnection = scope["state"]["connection"]
        connection.begin_request(scope["headers"])
        self._unmark_idle(connection)
        try:
            if connection.refusal is not None:
                await self._answer_spare(connection.refusal, scope, receive, send)
            elif scope["type"] == "websocket":
                await self._app(scope, receive, _guard_send(connection, send))
            else:
                await self._app(scope, receive, send)
            if connection.refused or (scope["type"] == "websocket" and connection.is_closing()):
                await connection.lost.wait()  # otherwise uvicorn misses the end of the handshake, and logs an error
        finally:
            connection.end_request()
            if connection.idle and not connection.is_closing() and connection.refusal is None:
                self._mark_idle(connection)

    async def _answer_spare(self, refusal: tuple[int, str], scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a probe as ever, and refuse everything else. No more requests follow."""

        async def send_last(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        if scope["type"] == "http" and scope["path"] in self._probes:
            await self._app(scope, receive, send_last)
            return
        status, detail = refusal
        prefix = "http" if scope["type"] == "http" else "websocket.http"
        if scope["type"] == "websocket":
            await receive()
            send = _guard_send(scope["state"]["connection"], send)
        body = json.dumps({"error": "too_many_connections", "detail": detail}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"retry-after", b"5"),
        ]
        await send({"type": f"{prefix}.response.start", "status": status, "headers": headers})
        await send({"type": f"{prefix}.response.body", "body": body})


class _Lane:
    """The connections of one kind that have something to pass on: neither kind waits for the other."""

    __slots__ = ("passed", "waiting")

    def __init__(self) -> None:
        self.passed = 0  # slices in this turn
        self.waiting: deque[GuardedConnection] = deque()  # each once


class AddressConnections:
    """The connections of one address."""

    __slots__ = ("count", "idle", "key")

    def __init__(self, key: str) -> None:
        self.key: Final = key
        self.count = 0
        self.idle: dict[GuardedConnection, None] = {}  # oldest first


def _guard_send(connection: GuardedConnection, send: Send) -> Send:
    """`send` of a WebSocket, which fails once it is closed, and tells the connection what the application does."""

    def send_open(message: Mapping[str, Any]) -> Awaitable[None]:
        if connection.is_closing():  # by uvicorn, as after an invalid frame: it would blame the application
            raise ConnectionError("the connection is closed")
        kind = message["type"]
        if kind == "websocket.accept":
            return accept(message)
        if kind == "websocket.close":
            connection.expect_close()
        elif kind == "websocket.http.response.body":
            connection.refused = True
        return send(message)

    async def accept(message: Mapping[str, Any]) -> None:
        await send(message)
        connection.resume_reading()

    return send_open


def _is_own_error(record: logging.LogRecord) -> bool:
    """Whether a log record of uvicorn is about an error of the hub. Mistakes of peers are answered, not logged."""
    return record.msg not in _PEERS_MISTAKES
