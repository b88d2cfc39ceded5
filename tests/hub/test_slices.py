"""Control frames, fragments and pipelined requests: passed on a little at a time, and not without end."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from headgate.hub.connections.connection import CONTROL_BURST, GuardedConnection
from headgate.hub.connections.frame_meter import FRAMES, MAX_FRAGMENTS, FrameMeter
from headgate.hub.connections.guard import ConnectionGuard
from tests.support.agent_connections import receive_until
from tests.support.attacks import EMPTY_CONTINUATION, FIRST_FRAGMENT, HANDSHAKE, LARGE_PING, MASK, PING
from tests.support.event_loop import take_turns
from tests.support.flooders import frame
from tests.support.guarded_server import guarded_server, open_websocket, plain_app
from tests.support.hub import hub_server
from tests.support.valkey import PATIENCE, wait_for

AGENT_PING = frame('{"type":"ping","id":1}')


# Frames --------------------------------------------------------------------------------------------------------------

ANY_FRAME = st.tuples(
    st.sampled_from([0x00, 0x01, 0x02, 0x80, 0x81, 0x82, 0x88, 0x89, 0x8A]),
    st.sampled_from([0, 1, 125, 126, 127, 65_535, 65_536, 70_000]),
    st.booleans(),
)


def websocket_frame_bytes(first: int, length: int, masked: bool) -> bytes:
    bit = 0x80 * masked
    if length < 126:
        size = bytes([bit | length])
    elif length < 65_536:
        size = bytes([bit | 126]) + length.to_bytes(2, "big")
    else:
        size = bytes([bit | 127]) + length.to_bytes(8, "big")
    return bytes([first]) + size + MASK * masked + bytes(length)


@given(st.lists(ANY_FRAME, min_size=1, max_size=12), st.lists(st.integers(1, 100_000), max_size=12))
def test_every_frame_is_counted_once_however_the_bytes_come(
    frames: list[tuple[int, int, bool]], cuts: list[int]
) -> None:
    data = b"".join(websocket_frame_bytes(*one) for one in frames)
    meter, begin, slices = FrameMeter(), 0, 0
    for end in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        part, at = data[begin:end], 0
        while at < len(part):
            after = meter.next_slice(part, at)
            assert at < after <= len(part)
            at, slices = after, slices + 1
        begin = end
    fragments = [(first, length) for first, length, _ in frames if first < 0x88 and (first < 0x80 or first & 0x0F == 0)]
    controls = sum(first >= 0x88 for first, *_ in frames)
    assert meter.fragments == len(fragments)
    assert meter.controls == controls + sum(length == 0 for _, length in fragments)
    assert slices >= len(frames) / FRAMES


@given(st.lists(ANY_FRAME, min_size=1, max_size=12), st.lists(st.integers(1, 100_000), max_size=12), st.integers(0, 12))
def test_only_whole_messages_are_skipped_however_the_bytes_come(
    frames: list[tuple[int, int, bool]], cuts: list[int], parsed: int
) -> None:
    """After so many slices that are parsed; a frame of which the parser has a part is parsed to its end."""
    data = b"".join(websocket_frame_bytes(*one) for one in frames)
    meter, begin, slices, passed = FrameMeter(), 0, 0, b""
    for end in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        part, at = data[begin:end], 0
        while at < len(part):
            if slices >= parsed:
                at = meter.skip_messages(part, at)
            after = meter.next_slice(part, at)
            passed += part[at:after]
            at, slices = after, slices + 1
        begin = end
    for first, length, masked in frames:
        one = websocket_frame_bytes(first, length, masked)
        if passed.startswith(one):
            passed = passed[len(one) :]
        else:
            assert first < 0x88, "a control frame was skipped"
    assert not passed


def test_messages_after_a_close_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed a few in each turn, they would stay in memory for seconds, and the answer to the close behind them."""
    passed: list[bytes] = []
    receive_data = WebSocketsSansIOProtocol.data_received

    def count(protocol: WebSocketsSansIOProtocol, data: bytes) -> None:
        passed.append(data)
        receive_data(protocol, data)

    async def close(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        await send({"type": "websocket.close", "code": 1008})

    monkeypatch.setattr(WebSocketsSansIOProtocol, "data_received", count)
    monkeypatch.setattr(GuardedConnection, "close_within", 10 * PATIENCE)
    with guarded_server(close) as (server, _), server.connect() as connection:
        connection.sendall(f"GET / {HANDSHAKE}".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 101")
        connection.sendall(frame("first") + AGENT_PING * 1000 + b"\x88\x82" + MASK + (1008).to_bytes(2, "big"))
        assert connection.recv(4096).startswith(b"\x88\x02")
        assert connection.recv(4096) == b"", "the hub waits for the answer to its close"
    assert b"".join(passed).count(AGENT_PING) < 100


def test_pings_within_the_bound_are_answered() -> None:
    with hub_server() as hub, open_websocket(hub) as connection:
        connection.sendall(PING * (CONTROL_BURST - 1) + AGENT_PING)
        assert receive_until(connection, b'"id":1').count(b"\x8a\x04ping") == CONTROL_BURST - 1


@pytest.mark.parametrize("path", ["/ws", "/relay", "/ws/dashboard"])
@pytest.mark.parametrize(
    ("flood", "reason"),
    [
        (PING * 2 * CONTROL_BURST, b"more than 20 control frames a second"),
        (FIRST_FRAGMENT + EMPTY_CONTINUATION * 2 * CONTROL_BURST, b"more than 20 control frames a second"),
        (FIRST_FRAGMENT + (b"\x00\x81" + MASK + b"x") * 2 * MAX_FRAGMENTS, b"too many fragments in a message"),
    ],
)
def test_frames_that_carry_no_message_close_the_connection(path: str, flood: bytes, reason: bytes) -> None:
    with hub_server() as hub, open_websocket(hub, path) as connection:
        connection.sendall(flood)
        last = receive_until(connection, reason).partition(reason)[0]
        assert last.endswith(b"\x88" + bytes([2 + len(reason)]) + (1008).to_bytes(2, "big"))
        with hub.agent("good") as wire:
            assert wire.ask("ping") == {"type": "pong"}


def test_fragments_beyond_the_rate_are_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.hub.connections.connection.FRAGMENT_BURST", 2)
    text = b'{"type":"ping","id":1}'
    fragments = [b"\x00\x81" + MASK + text[at : at + 1] for at in range(1, len(text) - 1)]
    message = b"".join([b"\x01\x81" + MASK + text[:1], *fragments, b"\x80\x81" + MASK + text[-1:]])
    with hub_server() as hub, open_websocket(hub) as connection:
        connection.sendall(message)
        assert b"not_identified" in receive_until(connection, b'"id":1')


def test_nothing_is_read_from_a_peer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pongs would fill the memory."""
    monkeypatch.setattr("headgate.hub.connections.connection.CONTROL_BURST", 10**9)
    with hub_server() as hub, open_websocket(hub) as connection:
        assert hub.server is not None
        (it,) = [one.transport for one in hub.server.server_state.connections]
        assert isinstance(it, GuardedConnection)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):  # the kernel takes no more
            connection.sendall(LARGE_PING * 1_000_000)
        assert hub.call(it.get_write_buffer_size) < 2 * it._transport.get_write_buffer_limits()[1]
        with hub.agent("good") as wire:
            assert wire.ask("ping") == {"type": "pong"}


@pytest.mark.parametrize(
    ("early", "answer"), [(frame("hello"), b"\x81\x05hello"), (bytes(100), b"\x88")], ids=["valid", "invalid"]
)
def test_frames_before_the_answer_to_a_handshake_wait_for_it(
    early: bytes, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn can't parse frames of a WebSocket that is not accepted."""
    asked, accept = asyncio.Event(), asyncio.Event()
    found: list[Any] = []

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        found.append(scope["state"]["connection"])
        asked.set()
        await accept.wait()
        await send({"type": "websocket.accept"})
        message = await receive()
        if message["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
            await receive()

    with guarded_server(echo) as (server, _), server.connect() as connection:
        connection.sendall(f"GET / {HANDSHAKE}".encode())
        server.run(asked.wait())
        server.call(found[0].data_received, early)
        server.run(asyncio.sleep(0))  # a turn, in which it would be passed on
        server.call(accept.set)
        assert receive_until(connection, answer).startswith(b"HTTP/1.1 101")
    assert [record for record in caplog.records if record.exc_info] == []


# Requests ------------------------------------------------------------------------------------------------------------


def test_thousands_of_pipelined_requests_hold_up_nobody() -> None:
    requests = 8000
    with hub_server() as hub, hub.connect() as connection:
        assert hub.server is not None
        state = hub.server.server_state

        async def longest_pause() -> float:
            longest = 0.0
            while state.total_requests < requests:
                begin = time.monotonic()
                await asyncio.sleep(0)
                longest = max(longest, time.monotonic() - begin)
            return longest

        pause = asyncio.run_coroutine_threadsafe(longest_pause(), hub.loop)
        connection.sendall(b"GET /live HTTP/1.1\r\n\r\n" * requests)
        answers = 0
        while answers < requests:
            answers += connection.recv(1_000_000).count(b"HTTP/1.1 200")
        assert pause.result(PATIENCE) < 1


def test_at_most_one_pipelined_request_waits() -> None:
    depths = []

    async def answer_later(scope: Any, receive: Any, send: Any) -> None:
        depths.append(len(scope["state"]["connection"]._inner.pipeline))
        await asyncio.sleep(0)
        await plain_app(scope, receive, send)

    with guarded_server(answer_later) as (server, _), server.connect() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc" * 200)
        wait_for(lambda: len(depths) == 200, "all of them")
    assert max(depths) <= 1


def test_a_large_body_may_follow_a_request_whose_body_is_being_read() -> None:
    """uvicorn reads on for the first, and gets the body of the second with it."""

    async def read_and_answer(scope: Any, receive: Any, send: Any) -> None:
        await take_turns(100)  # turns, in which the rest comes
        await receive()
        await take_turns(100)
        await plain_app(scope, receive, send)

    with guarded_server(read_and_answer) as (server, _), server.connect() as connection:
        head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % 2 + b"{}" + head % 100_000 + bytes(100_000))
        found = b""
        while found.count(b"HTTP/1.1 204") < 2:
            data = connection.recv(65_536)
            assert data, found
            found += data


@pytest.mark.parametrize("at_once", [True, False])
def test_an_error_in_a_slice_ends_its_connection_and_no_other(
    at_once: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the slice is passed on as it comes, or in a later turn with others behind it."""
    receive = HttpToolsProtocol.data_received

    def receive_badly(protocol: HttpToolsProtocol, data: bytes) -> None:
        if b"/broken" in data:
            raise RuntimeError("a broken parser")
        receive(protocol, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", receive_badly)
    if not at_once:
        monkeypatch.setattr(ConnectionGuard, "take_turn", lambda *_: False)
    with guarded_server() as (server, guard), server.connect() as broken, server.connect() as good:
        wait_for(lambda: len(guard) == 2, "both")

        def receive_both() -> None:
            assert server.server is not None
            found: list[Any] = [one.transport for one in server.server.server_state.connections]
            its = {one.get_extra_info("peername"): one for one in found}
            its[broken.getsockname()].data_received(b"GET /broken HTTP/1.1\r\n\r\n")
            its[good.getsockname()].data_received(b"GET / HTTP/1.1\r\n\r\n")

        server.call(receive_both)
        assert good.recv(1000).startswith(b"HTTP/1.1 204")
        with suppress(ConnectionResetError):
            assert broken.recv(1000) == b""
        wait_for(lambda: len(guard) == 1, "the broken one to be gone")
    logged = capsys.readouterr().out
    assert logged.count("connection aborted after an error") == logged.count("RuntimeError: a broken parser") == 1
