"""Servers behind a guard of connections, and plain sockets to them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headgate.hub.connections.guard import ConnectionGuard
from tests.support.asgi_server import AppServer, ThreadedServer, app_server
from tests.support.attacks import HANDSHAKE


async def plain_app(_scope: Any, _receive: Any, send: Any) -> None:
    """An application that answers every request at once."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@contextmanager
def guarded_server(app: Any = plain_app, **bounds: Any) -> Iterator[tuple[AppServer, ConnectionGuard]]:
    """A server with a guard, whose probe is /live."""
    guard = ConnectionGuard(app, probes=["/live"], **bounds)
    # uvloop may go on waiting for a TLS peer that has closed; like a hub, the server doesn't wait for that to its end.
    with app_server(guard, http=guard.protocol, timeout_graceful_shutdown=5) as server:
        yield server, guard


def open_websocket(server: ThreadedServer, path: str = "/ws") -> socket.socket:
    """A WebSocket, after its handshake."""
    connection = server.connect()
    connection.sendall(f"GET {path} {HANDSHAKE}".encode())
    assert connection.recv(4096).startswith(b"HTTP/1.1 101")
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while data := connection.recv(65_536):
            found += data
    except ConnectionError:
        pass
    return found
