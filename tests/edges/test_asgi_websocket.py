"""Messages over WebSockets behind the ASGI middleware, with real servers and clients."""

import socket
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import litestar
import pytest
from fastapi import FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

from headgate import InvalidInput, Limiter, ManualClock, MemoryStore, RedisStore
from headgate.edges.asgi import RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.flood import FLOOD
from headgate.edges.websocket import WebSocketLimits
from tests.support.asgi_server import app_server
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for
from tests.support.websocket_apps import (
    Echo,
    ScriptedSender,
    client_name,
    close_frame,
    denial_frame,
    denied_response,
    exchange,
    limited_echo,
    receive,
    warning_frame,
    websocket_client,
)

pytestmark = pytest.mark.once

SERVERS = ["websockets-sansio", "websockets"]
SERVERS += ["wsproto"] if find_spec("wsproto") else []


# Messages that are received ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The `websockets` implementation", "ignore:websockets", "ignore:remove second")
@pytest.mark.parametrize("ws", SERVERS)
def test_b1_a_denied_message_is_answered_and_the_connection_stays_open(
    ws: str, clock: ManualClock, free: Limiter
) -> None:
    echo = Echo()
    app = RateLimitMiddleware(echo, free, websocket=WebSocketLimits(received="2/minute", warn=False))
    with app_server(app, ws=ws) as server, websocket_client(server) as client:
        assert [exchange(client, text) for text in "ab"] == ["a", "b"]
        assert exchange(client, "c") == denial_frame("received", 30_000)
        clock.advance(29.5)
        assert exchange(client, "d") == denial_frame("received", 1_000)
        clock.advance(0.5)
        assert exchange(client, "e") == "e"
    assert echo.received == ["a", "b", "e"]


def test_b1_a_client_with_little_left_is_warned_once_until_it_has_more(clock: ManualClock, free: Limiter) -> None:
    with limited_echo(free, WebSocketLimits(received="4/minute burst 10")) as client:
        assert [exchange(client, "x") for _ in range(8)] == ["x"] * 8
        assert (exchange(client, "y"), receive(client)) == (warning_frame("received", 1, 10), "y")
        assert exchange(client, "z") == "z"
        assert exchange(client, "z") == denial_frame("received", 15_000)
        clock.advance(15)
        assert exchange(client, "z") == "z"
        clock.advance(60)
        assert [exchange(client, "x") for _ in range(2)] == ["x"] * 2
        assert (exchange(client, "y"), receive(client)) == (warning_frame("received", 1, 10), "y")


def test_a_denied_message_can_close_the_connection_with_a_hint(free: Limiter) -> None:
    echo = Echo()
    limits = WebSocketLimits(received="1/minute", on_denied="close", warn=False)
    with app_server(RateLimitMiddleware(echo, free, websocket=limits)) as server, websocket_client(server) as client:
        assert exchange(client, "a") == "a"
        client.send("b")
        assert close_frame(client) == (1013, "rate limited; retry in 60000 ms")
        wait_for(lambda: echo.ended, "the application's end")
    assert echo.received == ["a"]
    assert echo.ended == [{"type": "websocket.disconnect", "code": 1013, "reason": "rate limited; retry in 60000 ms"}]


def test_bytes_are_counted_as_they_are_in_utf_8(free: Limiter) -> None:
    limits = WebSocketLimits(received_bytes="10/minute", warn=False)
    with limited_echo(free, limits) as client:
        assert exchange(client, "äöü") == "äöü"
        assert exchange(client, b"") == b""
        assert exchange(client, b"\x00\xff\x00") == b"\x00\xff\x00"
        assert exchange(client, "ab") == denial_frame("received_bytes", 6_000)
        assert exchange(client, "a") == "a"


def test_a_message_is_counted_by_all_limits_or_by_none(clock: ManualClock, free: Limiter) -> None:
    echo = Echo()
    app = RateLimitMiddleware(
        echo, free, websocket=WebSocketLimits(received="3/minute", received_bytes="10/minute", warn=False)
    )
    with app_server(app) as server, websocket_client(server) as client:
        assert exchange(client, "eight ch") == "eight ch"
        assert [exchange(client, "four") for _ in range(4)] == [denial_frame("received_bytes", 12_000)] * 4
        assert [exchange(client, "a") for _ in range(2)] == ["a", "a"]
        assert exchange(client, "b") == denial_frame("received", 20_000)
        clock.advance(20)  # 3 1/3 bytes more: the denied message was not counted by them
        assert exchange(client, "abc") == "abc"


@pytest.mark.parametrize("on_denied", ["frame", "close"])
def test_a_message_that_can_never_pass_closes_the_connection_and_costs_nothing(on_denied: Any, free: Limiter) -> None:
    echo = Echo()
    app = RateLimitMiddleware(
        echo, free, websocket=WebSocketLimits(received="1/minute", received_bytes="10/minute", on_denied=on_denied)
    )
    with app_server(app) as server:
        with websocket_client(server) as client:
            client.send("eleven char")
            assert close_frame(client) == (1009, "message too big: at most 10 bytes can pass")
        with websocket_client(server) as client:
            frames = [exchange(client, "ten chars."), receive(client), receive(client)]
            assert frames == [warning_frame("received", 0, 1), warning_frame("received_bytes", 0, 10), "ten chars."]


def test_a_blocked_message_is_denied_with_a_frame(free: Limiter) -> None:
    with limited_echo(free, WebSocketLimits(received_bytes="blocked")) as client:
        assert exchange(client, "a") == denial_frame("received_bytes", 60_000)


def test_several_limits_hold_at_once(clock: ManualClock, free: Limiter) -> None:
    limits = WebSocketLimits(received=["1/second", "3/minute"], warn=False)
    with limited_echo(free, limits) as client:
        assert exchange(client, "a") == "a"
        assert exchange(client, "b") == denial_frame("received", 1_000)
        for _ in range(2):
            clock.advance(1)
            assert exchange(client, "b") == "b"
        clock.advance(1)
        assert exchange(client, "c") == denial_frame("received", 17_000)


def test_a_flood_is_answered_and_others_are_served_meanwhile(clock: ManualClock, free: Limiter) -> None:
    echo = Echo()
    app = RateLimitMiddleware(echo, free, key=client_name, websocket=WebSocketLimits(received="5/minute", warn=False))
    with (
        app_server(app) as server,
        websocket_client(server, "flooder") as flooder,
        websocket_client(server, "other") as other,
    ):
        for number in range(400):
            flooder.send(f"flood {number}")
        assert [exchange(other, text) for text in "abcde"] == list("abcde")
        assert [receive(flooder) for _ in range(5)] == [f"flood {number}" for number in range(5)]
        assert [receive(flooder) for _ in range(395)] == [denial_frame("received", 12_000)] * 395
        assert server.call(len, app._websockets.flooding) == 1
        clock.advance(12)
        assert exchange(flooder, "at last") == "at last"
        assert server.call(len, app._websockets.flooding) == 0
        assert [exchange(flooder, "x") for _ in range(FLOOD - 1)] == [denial_frame("received", 12_000)] * (FLOOD - 1)
        assert server.call(len, app._websockets.flooding) == 0
        assert exchange(flooder, "x") == denial_frame("received", 12_000)
    wait_for(lambda: len(echo.ended) == 2, "both ends")
    assert len(app._websockets.flooding) == 0


# What the application sends ------------------------------------------------------------------------------------------


def test_sent_messages_wait_for_their_turn_and_a_close_does_not(clock: ManualClock, free: Limiter) -> None:
    sender = ScriptedSender("a", "b", "c")
    sent = Limiter("2/minute", store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(sender, free, websocket=WebSocketLimits(sent=sent))
    with app_server(app) as server, websocket_client(server) as client:
        assert [receive(client), receive(client)] == ["a", "b"]
        wait_for(lambda: sent.waiting("127.0.0.1"), "the third to wait")
        assert sender.sent == ["a", "b"]
        assert sent.peek("127.0.0.1").retry_after == 30
        clock.advance(30)
        assert receive(client) == "c"
        assert close_frame(client) == (4000, "")
    wait_for(lambda: sender.ended, "the application's end")


def test_a_message_larger_than_can_pass_leaves_a_debt(clock: ManualClock, free: Limiter) -> None:
    sender = ScriptedSender("1234", b"x" * 25, "", "y")
    sent = Limiter("10/minute", store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(sender, free, websocket=WebSocketLimits(sent_bytes=sent))
    with app_server(app) as server, websocket_client(server) as client:
        assert receive(client) == "1234"
        wait_for(lambda: sent.waiting("127.0.0.1"), "the large one to wait")
        assert sent.peek("127.0.0.1", 10).retry_after == 24
        clock.advance(24)
        assert receive(client) == b"x" * 25
        assert receive(client) == ""
        wait_for(lambda: sent.waiting("127.0.0.1"), "the last one to wait")
        assert sent.peek("127.0.0.1").retry_after == 96
        clock.advance(96)
        assert receive(client) == "y"


def test_a_send_to_a_client_that_leaves_stops_waiting_and_spends_nothing(clock: ManualClock, free: Limiter) -> None:
    sender = ScriptedSender("a", "b")
    sent = Limiter("5/minute", store=MemoryStore(clock=clock))
    sent_bytes = Limiter("1/minute", store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(sender, free, websocket=WebSocketLimits(sent=sent, sent_bytes=sent_bytes))
    with app_server(app) as server:
        with websocket_client(server) as client:
            assert receive(client) == "a"
            wait_for(lambda: sent_bytes.waiting("127.0.0.1"), "the second to wait")
            assert sent.peek("127.0.0.1").remaining == 3
        wait_for(lambda: sender.ended, "the application's end")
    assert len(sender.failures) == 1  # as the server says it
    assert sent_bytes.waiting("127.0.0.1") == 0
    assert sent.peek("127.0.0.1").remaining == 4


@pytest.mark.filterwarnings("ignore:The `websockets` implementation", "ignore:websockets", "ignore:remove second")
@pytest.mark.parametrize("ws", SERVERS)
def test_a_client_that_is_gone_leaves_the_line_though_its_application_never_receives(
    ws: str, clock: ManualClock, free: Limiter
) -> None:
    failures: list[str] = []

    async def only_send(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        try:
            while True:
                await send({"type": "websocket.send", "text": scope["path"]})
        except OSError:
            failures.append(scope["path"])

    sent = Limiter("1/minute", store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(only_send, free, websocket=WebSocketLimits(sent=sent))
    with app_server(app, ws=ws) as server, websocket_client(server, path="/stays") as stays:
        assert receive(stays) == "/stays"
        wait_for(lambda: sent.waiting("127.0.0.1") == 1, "the first in line")
        with websocket_client(server, path="/gone") as gone:
            wait_for(lambda: sent.waiting("127.0.0.1") == 2, "the second in line")
            gone.socket.shutdown(socket.SHUT_RDWR)  # without a goodbye
            wait_for(lambda: sent.waiting("127.0.0.1") == 1, "the end of the second")
        wait_for(lambda: failures == ["/gone"], "the end of its application")
        clock.advance(60)
        assert receive(stays) == "/stays"
    wait_for(lambda: sorted(failures) == ["/gone", "/stays"], "both ends")


# Frameworks, stores ---------------------------------------------------------------------------------------------------


LIMITS = WebSocketLimits(received="2/minute", received_bytes="100/minute", sent="100/second", warn=False)


def starlette_app(limiter: Limiter) -> Any:
    async def echo(websocket: Any) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(text)

    app = Starlette(routes=[WebSocketRoute("/", echo)])
    app.add_middleware(RateLimitMiddleware, limiter=limiter, websocket=LIMITS)
    return app


def fastapi_app(limiter: Limiter) -> Any:
    app = FastAPI()
    app.add_middleware(RateLimitMiddleware, limiter=limiter, websocket=LIMITS)

    @app.websocket("/")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(text)

    return app


def litestar_app(limiter: Limiter) -> Any:
    @litestar.websocket_listener("/")
    async def echo(data: str) -> str:
        return data

    def limited(app: Any) -> Any:
        return RateLimitMiddleware(app, limiter=limiter, websocket=LIMITS)

    return litestar.Litestar([echo], middleware=[limited], logging_config=None)


@pytest.mark.parametrize("framework", [starlette_app, fastapi_app, litestar_app])
def test_websockets_of_frameworks_are_limited(framework: Callable[[Limiter], Any], clock: ManualClock) -> None:
    app = framework(Limiter("2/minute", store=MemoryStore(clock=clock)))
    with app_server(app) as server:
        with websocket_client(server) as client:
            assert [exchange(client, text) for text in "ab"] == ["a", "b"]
            assert exchange(client, "c") == denial_frame("received", 30_000)
        with websocket_client(server) as client:
            assert exchange(client, "c") == denial_frame("received", 30_000)
            clock.advance(29)
            assert denied_response(server).status_code == 429
            clock.advance(1)
            assert exchange(client, "c") == "c"


def test_nodes_on_one_server_share_their_counts(redis_server: ValkeyServer, clock: ManualClock) -> None:
    limits = WebSocketLimits(received="4/minute", received_bytes="6/minute", sent="100/second", warn=False)
    with RedisStore(redis_server.url, prefix="websockets:", clock=clock, timeout=PATIENCE) as store:
        limiter = Limiter("3/minute", store=store)
        with (
            app_server(RateLimitMiddleware(Echo(), limiter, websocket=limits)) as one,
            app_server(RateLimitMiddleware(Echo(), limiter, websocket=limits)) as two,
            websocket_client(one) as here,
            websocket_client(two) as there,
        ):
            assert [exchange(here, "ab"), exchange(there, "cd")] == ["ab", "cd"]
            assert [exchange(here, "abc"), exchange(there, "abc")] == [denial_frame("received_bytes", 10_000)] * 2
            assert [exchange(here, "a"), exchange(there, "b")] == ["a", "b"]
            assert [exchange(here, ""), exchange(there, "")] == [denial_frame("received", 15_000)] * 2
            with websocket_client(one):
                assert denied_response(two).status_code == 429
            one.run(store.aclose())
            two.run(store.aclose())


# Options --------------------------------------------------------------------------------------------------------------


OPTIONS = "received, received_bytes, sent, sent_bytes, on_denied, warn"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"on_denied": "drop"}, "WebSocketLimits on_denied: expected 'frame' or 'close', got 'drop'"),
        ({"warn": 1}, "WebSocketLimits warn: expected True or False, got 1"),
        (
            {"recieved": "5/minute"},
            f"WebSocketLimits: expected options among {OPTIONS}, got 'recieved'; did you mean received=?",
        ),
        (
            {"idle": 5},
            f"WebSocketLimits: expected options among {OPTIONS}, got 'idle'; see docs/websockets.md",
        ),
        (
            {"received": 5},
            "WebSocketLimits received: expected a limit such as '5/minute', or several, got 5",
        ),
        (
            {"received": "gate"},
            "WebSocketLimits received: expected a limit or a limiter, since there is no gate, got 'gate'",
        ),
        (
            {"sent": "gate"},
            "WebSocketLimits sent: expected a limit or a limiter (a gate counts only received messages), got 'gate'",
        ),
        (
            {"sent_bytes": "blocked"},
            "WebSocketLimits sent_bytes: expected a limit that lets something pass (sent messages aren't dropped), got",
        ),
    ],
)
def test_invalid_options_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        RateLimitMiddleware(Echo(), "1/minute", websocket=WebSocketLimits(**given))
    assert str(error.value).startswith(text)


def test_the_websocket_option_must_be_websocket_limits() -> None:
    expected = "RateLimitMiddleware websocket: expected WebSocketLimits"
    with pytest.raises(InvalidInput, match=expected):
        RateLimitMiddleware(Echo(), "1/minute", websocket="10/second")  # type: ignore[arg-type]
