"""Reading from sockets: bounded in size and time."""

import logging

import pytest

from headgate.hub.connections.connection import MAX_HEAD, GuardedConnection
from headgate.hub.connections.guard import ConnectionGuard
from tests.support.agent_connections import receive_until
from tests.support.flooders import frame
from tests.support.guarded_server import guarded_server, open_websocket, read_to_end
from tests.support.hub import hub_server

pytestmark = pytest.mark.long

PING = frame('{"type":"ping"}')


def test_a_connection_that_never_finishes_a_head_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded_server() as (server, _):
        with server.connect() as second:
            second.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert second.recv(1000).startswith(b"HTTP/1.1 204")
            monkeypatch.setattr(GuardedConnection, "head_within", 0.2)
            second.sendall(b"GET / HTTP/1.1\r\nHo")
            assert read_to_end(second) == b""
        with server.connect() as silent:
            assert read_to_end(silent) == b""
        with server.connect() as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
            assert read_to_end(slow) == b""


def test_an_error_in_one_check_ends_neither_the_others_nor_the_sweeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = GuardedConnection.check
    failures: list[GuardedConnection] = []

    def check_badly(connection: GuardedConnection, now: float) -> None:
        if not failures:
            failures.append(connection)
            raise RuntimeError("a broken check")
        check(connection, now)

    monkeypatch.setattr(GuardedConnection, "check", check_badly)
    with guarded_server() as (server, _):
        with server.connect() as broken:
            assert read_to_end(broken) == b""
        assert len(failures) == 1
        monkeypatch.setattr(GuardedConnection, "head_within", 0.2)
        with server.connect() as silent:
            assert read_to_end(silent) == b""
    logged = capsys.readouterr().out
    assert logged.count("connection aborted after an error") == logged.count("RuntimeError: a broken check") == 1


def test_a_connection_with_an_endless_head_is_closed() -> None:
    with guarded_server() as (server, _):
        with server.connect() as endless, pytest.raises(OSError, match=r"reset|pipe"):  # it won't take all of that
            endless.sendall(b"GET / HTTP/1.1\r\n" + (b"X-More: " + b"x" * 4000 + b"\r\n") * 10_000)
        with server.connect() as large:
            large.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-More: " + b"x" * (MAX_HEAD // 2) + b"\r\n\r\n")
            assert large.recv(1000).startswith(b"HTTP/1.1 204")


@pytest.mark.parametrize(
    "bad", [b"\x81\x82\0\0\0\0\xff\xfe", b"\x83\x80\0\0\0\0", b"\xf1\x80\0\0\0\0", b"\x81\x7f" + b"\xff" * 8]
)
@pytest.mark.parametrize("before", [b"", PING * 5])
def test_a_frame_that_breaks_the_protocol_ends_the_connection_without_a_word_in_the_log(
    bad: bytes, before: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), hub_server() as hub:
        with open_websocket(hub) as connection:
            connection.sendall(before + bad)
            read_to_end(connection)
        with hub.agent("good") as wire:
            assert wire.ask("ping") == {"type": "pong"}
    assert [record.getMessage() for record in caplog.records if "uvicorn" in record.name] == []
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_flood_after_a_close_is_cut_off() -> None:
    with hub_server() as hub, open_websocket(hub) as connection:
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(PING * 500_000)  # ten of which close the connection
        with hub.agent("good") as wire:
            assert wire.ask("ping") == {"type": "pong"}


def test_a_frame_in_many_pieces_is_read_as_one() -> None:
    with hub_server() as hub, open_websocket(hub) as connection:
        for byte in frame('{"type":"identify","agent_id":"' + "x" * 100 + '","token":"nobody","id":7}'):
            connection.sendall(bytes([byte]))
        assert b'"unauthorized"' in receive_until(connection, b'"id":7')


def test_b9_a_connection_whose_pong_waits_behind_its_frames_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood is read slowly, and the answer to the hub's ping with it. One that sends nothing is given up."""
    monkeypatch.setattr(ConnectionGuard, "_sweep", lambda *_: None)  # the test says what time it is
    with hub_server() as hub, open_websocket(hub) as connection:
        assert hub.server is not None
        (it,) = [one.transport for one in hub.server.server_state.connections]
        assert isinstance(it, GuardedConnection)
        now = hub.loop.time()
        for number in range(3):
            connection.sendall(frame(f'{{"type":"ping","id":{number}}}'))
            receive_until(connection, b'"id":%d' % number)
            now += 3 * it.ping_after
            hub.call(it.check, now)
        hub.call(it.check, now + it.ping_after)
        assert connection.recv(100) == b"\x89\x00"
        hub.call(it.check, now + 2 * it.ping_after)
        assert b"keepalive ping timeout" in read_to_end(connection)
