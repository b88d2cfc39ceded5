"""WebSocket connects behind the ASGI middleware: keys, limits, and gates."""

from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from headgate import Gate, Limiter, ManualClock, MemoryStore, Policy
from headgate.edges.asgi import App, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.websocket import WebSocketLimits
from headgate.http import PROBLEM_JSON, read_denial
from tests.support.asgi_server import app_server
from tests.support.valkey import PATIENCE, wait_for
from tests.support.websocket_apps import Echo, client_name, denial_frame, denied_response, exchange, websocket_client

pytestmark = pytest.mark.once


# Who it is -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_key_is_asked_for_once_and_shared_by_all_connections_of_it(asynchronous: bool, free: Limiter) -> None:
    times = 0

    def key(request: Any) -> str | None:
        nonlocal times
        times += 1
        assert (request.method, request.path) == ("WEBSOCKET", "/chat")
        return client_name(request)

    async def akey(request: Any) -> str | None:
        return key(request)

    app = RateLimitMiddleware(
        Echo(),
        free,
        key=akey if asynchronous else key,
        websocket=WebSocketLimits(received="2/minute", warn=False),
    )
    with (
        app_server(app) as server,
        websocket_client(server, "a", "/chat") as one,
        websocket_client(server, "a", "/chat") as two,
        websocket_client(server, "b", "/chat") as other,
    ):
        assert [exchange(one, "x"), exchange(two, "x")] == ["x", "x"]
        assert [exchange(one, "x"), exchange(two, "x")] == [denial_frame("received", 30_000)] * 2
        assert [exchange(other, "x"), exchange(other, "x")] == ["x", "x"]
        assert times == 3


def test_an_anonymous_client_counts_by_address_apart_from_names(free: Limiter) -> None:
    app = RateLimitMiddleware(Echo(), free, key=client_name, websocket=WebSocketLimits(received="1/minute", warn=False))
    with (
        app_server(app) as server,
        websocket_client(server) as one,
        websocket_client(server) as two,
        websocket_client(server, "127.0.0.1") as other,
    ):
        assert exchange(one, "x") == "x"
        assert exchange(two, "x") == denial_frame("received", 60_000)
        assert exchange(other, "x") == "x"


def test_exempt_and_skipped_clients_are_not_counted(free: Limiter) -> None:
    app = RateLimitMiddleware(
        Echo(),
        Limiter("blocked"),
        exempt=lambda request: client_name(request) == "admin",
        skip=["WEBSOCKET /open", "GET /closed"],
        websocket=WebSocketLimits(received="blocked", sent="1/minute"),
    )
    with app_server(app) as server:
        for name, path in (("admin", "/closed"), ("", "/open")):
            with websocket_client(server, name, path) as client:
                assert [exchange(client, "x") for _ in range(3)] == ["x"] * 3
        assert denied_response(server, "", "/closed").status_code == 429


# Connects ------------------------------------------------------------------------------------------------------------


def test_a_connect_counts_like_a_request_and_gets_rate_limit_headers(clock: ManualClock) -> None:
    echo = Echo()
    with app_server(RateLimitMiddleware(echo, Limiter("2/minute", store=MemoryStore(clock=clock)))) as server:
        with websocket_client(server) as client:
            assert client.response is not None
            assert client.response.headers["RateLimit"] == '"default";r=1;t=30'
            assert client.response.headers["RateLimit-Policy"] == '"default";q=2;w=60'
            assert exchange(client, "x") == "x"
        with websocket_client(server):
            pass
        response = denied_response(server)
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "30"
        assert response.headers["Content-Type"] == PROBLEM_JSON
        assert response.headers["RateLimit"] == '"default";r=0;t=30'
        denial = read_denial(response.body)
        assert denial is not None
        assert (denial.retry_after_ms, denial.tier) == (30_000, "default")
        assert echo.began == 2
        clock.advance(30)
        with websocket_client(server) as client:
            assert exchange(client, "x") == "x"


def test_a_connect_is_closed_where_the_server_cannot_answer_it() -> None:
    echo = Echo()
    app = RateLimitMiddleware(echo, "blocked")

    async def without_extensions(scope: Scope, receive: Receive, send: Send) -> None:
        await app({key: value for key, value in scope.items() if key != "extensions"}, receive, send)

    with app_server(without_extensions) as server:
        assert denied_response(server).status_code == 403
    assert echo.began == 0


def test_routes_tell_connects_from_requests(free: Limiter) -> None:
    app = RateLimitMiddleware(Echo(), free, routes={"WEBSOCKET /chat": "1/minute", "GET /feed": "blocked"})
    with app_server(app) as server:
        with websocket_client(server, path="/chat"), websocket_client(server, path="/feed"):
            pass
        assert read_denial(denied_response(server, path="/chat").body).tier == "WEBSOCKET /chat"  # type: ignore[union-attr]


def make_failing_app(before: bool) -> App:
    """An application that raises, before or after it has accepted."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if not before:
            await send({"type": "websocket.accept"})
            await receive()
        raise ZeroDivisionError

    return app


@pytest.mark.parametrize(
    ("before", "options", "left"),
    [
        (True, {}, 2),
        (True, {"refund_crashes": True}, 3),
        (True, {"counts": "failures"}, 2),
        (False, {}, 2),
        (False, {"refund_crashes": True}, 2),
        (False, {"settle": lambda request, response: 3}, 0),
    ],
)
def test_a_connect_stays_counted_if_the_application_fails_unless_crashes_are_refunded(
    before: bool, options: Any, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter("3/minute", store=MemoryStore(clock=ManualClock()))
    with app_server(RateLimitMiddleware(make_failing_app(before), limiter, **options)) as server:
        if before:
            assert denied_response(server).status_code == 500
        else:
            with websocket_client(server) as client:
                client.send("x")
                with pytest.raises(ConnectionClosed):
                    client.recv(timeout=PATIENCE)
        wait_for(lambda: "ZeroDivisionError" in caplog.text, "the server's log")
    assert limiter.peek("127.0.0.1").remaining == left


async def app_by_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Accepts, refuses, or answers with a response, by path."""
    await receive()
    if scope["path"] == "/accepted":
        await send({"type": "websocket.accept", "headers": [(b"x-cost", b"3")]})
        await receive()
    elif scope["path"] == "/refused":
        await send({"type": "websocket.close"})
    else:
        await send({"type": "websocket.http.response.start", "status": 401, "headers": [(b"x-cost", b"2")]})
        await send({"type": "websocket.http.response.body", "body": b"who are you?"})


@pytest.mark.parametrize(
    ("counts", "left"),
    [("all", 7), ("failures", 8), ("successes", 9), (lambda status: status == 401, 9)],
)
def test_connects_can_be_counted_by_their_response(counts: Any, left: int) -> None:
    limiter = Limiter("10/minute", store=MemoryStore(clock=ManualClock()))
    with app_server(RateLimitMiddleware(app_by_path, limiter, counts=counts)) as server:
        with websocket_client(server, path="/accepted"):
            pass
        assert denied_response(server, path="/refused").status_code == 403
        response = denied_response(server, path="/answered")
        assert (response.status_code, bytes(response.body)) == (401, b"who are you?")
        assert response.headers["RateLimit"]
    assert limiter.peek("127.0.0.1").remaining == left


def test_the_cost_of_a_connect_can_be_settled_by_its_response() -> None:
    limiter = Limiter("10/minute", store=MemoryStore(clock=ManualClock()))
    seen = []

    def settle(request: Any, response: Any) -> int:
        seen.append((request.method, response.status, response.headers.get("x-cost")))
        return int(response.headers.get("x-cost", 0))

    with app_server(RateLimitMiddleware(app_by_path, limiter, settle=settle)) as server:
        with websocket_client(server, path="/accepted"):
            wait_for(lambda: limiter.peek("127.0.0.1").remaining == 7, "the connect to be settled")
        denied_response(server, path="/refused")
        denied_response(server, path="/answered")
    assert seen == [("WEBSOCKET", 101, "3"), ("WEBSOCKET", 403, None), ("WEBSOCKET", 401, "2")]
    assert limiter.peek("127.0.0.1").remaining == 5


# A gate --------------------------------------------------------------------------------------------------------------


def test_b1_b4_a_gate_counts_messages_on_its_channel_ws_and_changes_hold_at_once(clock: ManualClock) -> None:
    gate = Gate(Policy(limits={"heavy": "2/minute"}), store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(
        Echo(), gate=gate, key=client_name, tier="heavy", websocket=WebSocketLimits(received="gate", warn=False)
    )
    with app_server(app) as server, websocket_client(server, "a") as client:
        assert [exchange(client, "x") for _ in range(3)] == ["x", "x", denial_frame("heavy", 30_000)]
        assert gate.peek("a", "http", "heavy").remaining == 1
        assert gate.peek("a", "ws", "heavy").remaining == 0
        assert gate.is_rate_limited("a")
        gate.set_override("a", "heavy", "3/minute", "ws")
        assert [exchange(client, "x") for _ in range(4)] == ["x", "x", "x", denial_frame("heavy", 20_000)]
        gate.add_exemption("a")
        assert [exchange(client, "x") for _ in range(5)] == ["x"] * 5
        with websocket_client(server, "b") as other:
            assert exchange(other, "x") == "x"


def test_b2_an_anonymous_client_of_a_gate_counts_by_address() -> None:
    gate = Gate(Policy(addresses={"limit": "3/minute"}), store=MemoryStore(clock=ManualClock()))
    limits = WebSocketLimits(received="gate", warn=False)
    app = RateLimitMiddleware(Echo(), gate=gate, key=client_name, websocket=limits)
    with app_server(app) as server, websocket_client(server) as client, websocket_client(server, "a") as other:
        assert [exchange(client, "x") for _ in range(3)] == ["x", "x", denial_frame("address", 20_000)]
        assert denied_response(server).status_code == 429
        assert exchange(other, "x") == "x"


def test_limits_beside_a_gate_are_not_for_agents_that_are_exempt() -> None:
    gate = Gate(Policy(exempt=["boss"]), store=MemoryStore(clock=ManualClock()))
    limits = WebSocketLimits(received="9/minute", received_bytes="1/minute", sent="2/minute", warn=False)
    app = RateLimitMiddleware(Echo(), gate=gate, key=client_name, websocket=limits)
    with app_server(app) as server, websocket_client(server, "boss") as boss, websocket_client(server, "a") as other:
        assert [exchange(boss, "long") for _ in range(10)] == ["long"] * 10
        assert [exchange(other, "x"), exchange(other, "x")] == ["x", denial_frame("received_bytes", 60_000)]


def test_b1_a_message_that_another_limit_denies_is_refunded_at_the_gate() -> None:
    gate = Gate(Policy(exempt=["boss"]), store=MemoryStore(clock=ManualClock()))
    limits = WebSocketLimits(received="gate", received_bytes="1/minute", warn=False)
    app = RateLimitMiddleware(Echo(), gate=gate, key=client_name, tier="heavy", websocket=limits)
    with app_server(app) as server, websocket_client(server, "boss") as boss, websocket_client(server, "a") as other:
        assert [exchange(other, "x"), exchange(other, "x")] == ["x", denial_frame("received_bytes", 60_000)]
        assert gate.peek("a", "ws", "heavy").remaining == 9
        assert [exchange(boss, "x") for _ in range(11)] == ["x"] * 11
        gate.remove_exemption("boss")
        assert [exchange(boss, "x") for _ in range(11)] == ["x"] * 10 + [denial_frame("heavy", 6_000)]
