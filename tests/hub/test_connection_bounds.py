"""How many connections there may be, from where, and for how long."""

import asyncio
import json
import logging
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import trustme

from headgate.hub.connections.connection import GuardedConnection
from headgate.hub.connections.guard import HTTP_PER_ADDRESS, RESERVE, ConnectionGuard
from headgate.hub.dashboard.feed import MAX_STRANGERS
from tests.support.agent_connections import BEHIND_A_PROXY, receive_until, rejected_handshake
from tests.support.asgi_server import AppServer
from tests.support.attacks import HANDSHAKE
from tests.support.guarded_server import guarded_server, plain_app, read_to_end
from tests.support.hub import VIEWER, hub_server
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.long

UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


class SlowApp:
    """An application that answers probes at once, and other requests when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.waiting = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/live":
            self.waiting += 1
            await self.go_on.wait()
        await plain_app(scope, receive, send)


def send_request(connection: socket.socket, path: str, more: str = "") -> bytes:
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
    return connection.recv(65_536)


@contextmanager
def full_server(**bounds: int) -> Iterator[AppServer]:
    """A server all of whose connections are busy."""
    app = SlowApp()
    with guarded_server(app, **bounds) as (server, _), ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(server.connect()).sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        wait_for(lambda: app.waiting == 2, "both to be busy")
        yield server
        server.call(app.go_on.set)


def test_an_idle_connection_gives_way_to_a_new_one() -> None:
    with guarded_server(SlowApp(), most=3) as (server, guard), ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(3)]
        for one in reversed(connections):
            assert send_request(one, "/live").startswith(b"HTTP/1.1 204")
        for _ in range(3):
            new = stack.enter_context(server.connect())
            assert send_request(new, "/live").startswith(b"HTTP/1.1 204")
            read_to_end(connections.pop())  # the one that has been idle for the longest
        assert len(guard) == 3


@pytest.mark.parametrize(
    ("bounds", "status", "detail"),
    [
        ({"most": 2}, 503, b"expected at most 2 connections to the hub; try again later, or raise max_connections"),
        (
            {"most_per_address": 2},
            429,
            b"expected at most 2 connections from 127.0.0.1; close one, or raise max_connections_per_address",
        ),
    ],
)
def test_a_full_hub_answers_probes_and_refuses_the_rest(bounds: dict[str, int], status: int, detail: bytes) -> None:
    with full_server(**bounds) as server:
        for path, more in (("/slow", ""), ("/ws", UPGRADE)):
            with server.connect() as refused:
                answer = send_request(refused, path, more) + b"".join(iter(lambda: refused.recv(65_536), b""))
                assert answer.startswith(b"HTTP/1.1 %d " % status)
                assert answer.endswith(b"}"), "and nothing follows"
                assert detail in answer
        with ExitStack() as stack:
            for _ in range(2 * RESERVE):
                stack.enter_context(server.connect())
            with server.connect() as probe:
                answer = send_request(probe, "/live")
                assert answer.startswith(b"HTTP/1.1 204")
                assert b"connection: close" in answer.lower()


def test_a_proxy_is_no_address_of_a_client() -> None:
    with full_server(most_per_address=2, trusted=["127.0.0.0/8"]) as server, server.connect() as third:  # type: ignore[arg-type]
        assert b"connection: close" not in send_request(third, "/live").lower()


@pytest.mark.parametrize("bound", ["most", "most_per_address"])
def test_a_free_place_is_used_while_spare_connections_are_open(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedConnection, "spare_within", PATIENCE)
    app = SlowApp()
    with guarded_server(app, **{bound: 2}) as (server, guard), ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(2)]
        for one in busy:
            one.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        wait_for(lambda: app.waiting == 2, "both to be busy")
        for _ in range(3):
            stack.enter_context(server.connect())
        wait_for(lambda: len(guard) == 5, "the spare connections")
        busy[0].close()
        wait_for(lambda: len(guard) == 4, "a free place")
        new = stack.enter_context(server.connect())
        assert b"connection: close" not in send_request(new, "/live").lower(), "an ordinary connection"
        new.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        wait_for(lambda: app.waiting == 3, "it to be busy")
        another = stack.enter_context(server.connect())
        another.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        receive_until(another, b"too_many_connections")  # and the hub is full again
        server.call(app.go_on.set)


def test_an_address_may_have_its_websockets_and_http_connections_beside_them() -> None:
    websockets = 20
    with hub_server(max_connections_per_address=websockets) as hub, ExitStack() as stack:
        agents = [stack.enter_context(hub.socket()) for _ in range(websockets)]
        answer = rejected_handshake(hub)
        assert (answer.status_code, answer.json()["error"]) == (429, "too_many_connections")
        assert f"at most {websockets} connections from 127.0.0.1" in answer.json()["detail"]
        idle = [stack.enter_context(hub.connect()) for _ in range(HTTP_PER_ADDRESS)]
        for one in idle:
            assert send_request(one, "/live").startswith(b"HTTP/1.1 200")
        with hub.connect() as another:
            assert b"connection: close" not in send_request(another, "/live").lower(), "an idle one gives way"
        read_to_end(idle[0])
        for agent in agents:
            assert agent.ask("ping")["error"] == "not_identified"


def test_a_websocket_refused_on_a_spare_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedConnection, "close_within", 0.2)
    handshake = f"GET /ws HTTP/1.1\r\nHost: localhost\r\n{UPGRADE}\r\n".encode()
    with full_server(most=2) as server:
        assert server.server is not None
        connections = server.server.server_state.connections
        with server.connect() as sends_on:
            sends_on.sendall(handshake + bytes(8192))  # more than a slice: the hub waits for the peer to close
            assert sends_on.recv(65_536).startswith(b"HTTP/1.1 503")
            wait_for(lambda: len(connections) == 2, "the end of the connection, which the peer doesn't close")
        monkeypatch.setattr(GuardedConnection, "spare_within", 0.2)
        with server.connect() as stuck:
            stuck.sendall(handshake[:-2])
            read_to_end(stuck)


def test_many_idle_connections_do_not_fail_a_health_check() -> None:
    with hub_server(max_connections=5, max_http_connections=10) as hub, ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(hub.connect())
        for path in ("/live", "/ready", "/health", "/api/health"):
            with hub.connect() as probe:
                assert send_request(probe, path).startswith(b"HTTP/1.1 200")


def test_a_peer_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedConnection, "write_within", 0.2)
    with hub_server() as hub, hub.connect() as connection:
        assert hub.server is not None
        connections = hub.server.server_state.connections
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\n\r\n" * 1000)
        wait_for(lambda: connections, "the connection")
        wait_for(lambda: not connections, "the end of the connection")


def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A context for a server, and one for clients that trust it."""
    context, trust, authority = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(), trustme.CA()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(trust)
    return context, trust


def test_a_tls_handshake_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    context, trust = tls_contexts()
    with guarded_server(SlowApp(), tls=context) as (server, guard), ExitStack() as stack:
        good = stack.enter_context(trust.wrap_socket(server.connect(), server_hostname="127.0.0.1"))
        assert send_request(good, "/live").startswith(b"HTTP/1.1 204")
        monkeypatch.setattr(GuardedConnection, "head_within", 0.2)
        with server.connect() as silent, server.connect() as wrong:
            wait_for(lambda: len(guard) == 3, "both to be counted")
            wrong.sendall(b"GET / HTTP/1.1\r\n\r\n")
            read_to_end(silent)
            read_to_end(wrong)
        wait_for(lambda: len(guard) == 1, "both to be gone")


@pytest.mark.parametrize(
    ("request_", "status"),
    [("GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"204"), (f"GET /ws {HANDSHAKE}", b"101")],
)
def test_a_request_may_come_together_with_the_end_of_the_tls_handshake(request_: str, status: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await plain_app(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.accept"})
            await receive()

    context, trust = tls_contexts()
    with guarded_server(app, tls=context) as (server, _), server.connect() as plain:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(65_536))
        client.write(request_.encode())
        plain.sendall(outgoing.read())  # both in one segment
        answered = b""
        while not answered:
            data = plain.recv(65_536)
            assert data, "the server has closed"
            incoming.write(data)
            with suppress(ssl.SSLWantReadError):
                answered = client.read(65_536)
        assert answered.startswith(b"HTTP/1.1 " + status)


def test_the_head_of_a_request_has_its_own_time_after_the_tls_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConnectionGuard, "_sweep", lambda *_: None)  # the test says what time it is
    context, trust = tls_contexts()
    with guarded_server(SlowApp(), tls=context) as (server, guard), server.connect() as plain:
        wait_for(lambda: len(guard) == 1, "the connection")
        shaken = guard.now + GuardedConnection.head_within - 1
        server.call(setattr, guard, "now", shaken)
        with trust.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            assert server.server is not None
            connections = server.server.server_state.connections
            wait_for(lambda: connections, "the end of the handshake")
            (it,) = [one.transport for one in connections]
            assert isinstance(it, GuardedConnection)
            server.call(it.check, shaken + GuardedConnection.head_within - 1)
            assert send_request(secure, "/live").startswith(b"HTTP/1.1 204")
        wait_for(lambda: not len(guard), "the end")


FILE_LIMIT = """
import resource, sys
from headgate.hub import logs
from headgate.hub.server import _within_file_limit
from headgate.hub.settings import HubSettings
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), int(sys.argv[1])))
settings = HubSettings(max_connections=900, max_http_connections=100)
logs.configure(settings)
def refuse(*_):
    raise {"ValueError": ValueError, "OSError": OSError}[sys.argv[2]]("not permitted")
if sys.argv[2]:
    resource.setrlimit = refuse
settings = _within_file_limit(settings)
print(settings.max_connections, settings.max_http_connections, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("soft", "hard", "error", "result", "words"),
    [
        (256, 5000, "", "900 100 1300 5000", []),
        (
            256,
            700,
            "",
            "360 40 700 700",
            ["limit on open files", "needed=1300", "max_connections=360", "max_http_connections=40"],
        ),
        (800, 5000, "ValueError", "450 50 800 5000", ["open_files=800", "max_connections=450"]),
        (800, 5000, "OSError", "450 50 800 5000", ["open_files=800", "max_connections=450"]),
    ],
)
def test_connections_are_held_against_the_limit_on_open_files(
    soft: int, hard: int, error: str, result: str, words: list[str]
) -> None:
    command = [sys.executable, "-c", FILE_LIMIT, str(hard), error, str(soft)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert told.stdout.strip().splitlines()[-1] == result
    assert bool(words) == bool(told.stderr)
    assert all(word in told.stderr for word in words), told.stderr


def test_strangers_at_the_dashboard_are_counted_by_address() -> None:
    with hub_server(max_dashboards=100) as hub, ExitStack() as stack:
        viewer = stack.enter_context(hub.socket("/ws/dashboard"))
        assert viewer.ask("watch", token=VIEWER)["type"] == "snapshot"
        strangers = [stack.enter_context(hub.socket("/ws/dashboard")) for _ in range(MAX_STRANGERS)]
        answer = rejected_handshake(hub, "/ws/dashboard")
        assert (answer.status_code, answer.json()["error"]) == (429, "too_many_connections")
        strangers[0].socket.close()
        wait_for(lambda: len(hub.hub.dashboard.sockets) == MAX_STRANGERS, "one to be gone")
        with hub.socket("/ws/dashboard") as another:
            assert another.ask("watch", token=VIEWER)["type"] == "snapshot"


def test_garbage_from_a_proxy_is_logged_once(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING), hub_server(**BEHIND_A_PROXY) as hub, hub.http() as http:
        for _ in range(3):
            for path in ("/ws", "/relay", "/ws/dashboard"):
                assert rejected_handshake(hub, path, address="unknown").status_code == 400
            assert http.get("/api/agents", headers={"X-Forwarded-For": "unknown"}).status_code == 400
            assert http.get("/live", headers={"X-Forwarded-For": "unknown"}).status_code == 200
    assert [record for record in caplog.records if record.exc_info or "ASGI" in record.getMessage()] == []
    assert capsys.readouterr().out.count("X-Forwarded-For") == 1


def test_a_head_of_many_short_lines_is_refused() -> None:
    """Each line becomes objects that take far more memory than its bytes."""
    with hub_server() as hub, hub.connect() as raw:
        raw.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200)
        assert raw.recv(1000).startswith(b"HTTP/1.1 431")
        assert raw.recv(1000) == b""


def test_a_body_may_have_many_lines() -> None:
    with hub_server() as hub, hub.http(hub.register("planner")) as http:
        body = json.dumps({"payload": list(range(300))}, indent=0)
        assert http.post("/api/tasks", content=body).status_code == 201


def test_an_endless_body_is_not_read_after_its_answer() -> None:
    head = b"POST /api/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    with hub_server() as hub, hub.connect() as raw:
        raw.sendall(head)
        assert raw.recv(1000).startswith(b"HTTP/1.1 4")
        sent = 0
        with suppress(ConnectionError):
            while sent < 100_000_000:
                sent += raw.send(b"x" * 65_536)
        assert sent < 60_000_000, "16 MiB, and the kernel's buffers"
