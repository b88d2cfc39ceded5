"""WebSockets behind the ASGI middleware, with real servers and clients."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import litestar
import pytest
from asgi import Serving, serving
from edges.talkers import Echo, Sender, denied, warned
from fastapi import FastAPI, WebSocket
from servers import PATIENCE, Server, wait_for
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headgate import Gate, InvalidInput, Limiter, ManualClock, MemoryStore, Policy, RedisStore, wire
from headgate.edges.asgi import App, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.flooding import FLOOD
from headgate.edges.websocket import WebSocketLimits

pytestmark = pytest.mark.once

SERVERS = ["websockets-sansio", "websockets", "headgate.hub.reading:PatientProtocol"]
SERVERS += ["wsproto"] if find_spec("wsproto") else []


def named(request: Any) -> str | None:
    """Who connects, by a header."""
    name: str | None = request.headers.get("x-name")
    return name


@contextmanager
def opened(server: Serving, name: str = "", path: str = "/") -> Iterator[ClientConnection]:
    with connect(
        f"ws://{server}{path}", additional_headers={"X-Name": name} if name else None, compression=None
    ) as client:
        yield client


def asked(client: ClientConnection, message: str | bytes) -> Any:
    """What comes back for a message: itself, or a frame of the middleware."""
    client.send(message)
    return heard(client)


def heard(client: ClientConnection) -> Any:
    got = client.recv(timeout=PATIENCE)
    return json.loads(got) if isinstance(got, str) and got.startswith("{") else got


def closed(client: ClientConnection) -> tuple[int, str]:
    """How the server has closed the connection."""
    with pytest.raises(ConnectionClosed) as error:
        client.recv(timeout=PATIENCE)
    assert error.value.rcvd is not None
    return error.value.rcvd.code, error.value.rcvd.reason


def refused(server: Serving, name: str = "", path: str = "/") -> Any:
    """The response to a connect that is refused."""
    with pytest.raises(InvalidStatus) as error, opened(server, name, path):
        pass
    return error.value.response


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1000)


@pytest.fixture
def free(clock: ManualClock) -> Limiter:
    """A limiter that lets everybody connect."""
    return Limiter("unlimited", store=MemoryStore(clock=clock))


# Messages that are received ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The `websockets` implementation", "ignore:websockets", "ignore:remove second")
@pytest.mark.parametrize("ws", SERVERS)
def test_b1_a_denied_message_is_answered_and_the_connection_stays_open(
    ws: str, clock: ManualClock, free: Limiter
) -> None:
    echo = Echo()
    app = RateLimitMiddleware(echo, free, websocket=WebSocketLimits(received="2/minute", warn=False))
    with serving(app, ws=ws) as server, opened(server) as client:
        assert [asked(client, text) for text in "ab"] == ["a", "b"]
        assert asked(client, "c") == denied("received", 30_000)
        clock.advance(29.5)
        assert asked(client, "d") == denied("received", 1_000)
        clock.advance(0.5)
        assert asked(client, "e") == "e"
    assert echo.heard == ["a", "b", "e"]


def test_b1_who_has_little_left_is_told_before_its_message_is_handled_once_until_it_has_more(
    clock: ManualClock, free: Limiter
) -> None:
    app = RateLimitMiddleware(Echo(), free, websocket=WebSocketLimits(received="4/minute burst 10"))
    with serving(app) as server, opened(server) as client:
        assert [asked(client, "x") for _ in range(8)] == ["x"] * 8
        assert (asked(client, "y"), heard(client)) == (warned("received", 1, 10), "y")
        assert asked(client, "z") == "z"
        assert asked(client, "z") == denied("received", 15_000)
        clock.advance(15)
        assert asked(client, "z") == "z"
        clock.advance(60)
        assert [asked(client, "x") for _ in range(2)] == ["x"] * 2
        assert (asked(client, "y"), heard(client)) == (warned("received", 1, 10), "y")


def test_nobody_is_warned_who_does_not_ask_for_it(free: Limiter) -> None:
    app = RateLimitMiddleware(Echo(), free, websocket=WebSocketLimits(received="2/minute", warn=False))
    with serving(app) as server, opened(server) as client:
        assert [asked(client, text) for text in "ab"] == ["a", "b"]


def test_a_denied_message_can_close_the_connection_with_a_hint(free: Limiter) -> None:
    echo = Echo()
    limits = WebSocketLimits(received="1/minute", on_denied="close", warn=False)
    with serving(RateLimitMiddleware(echo, free, websocket=limits)) as server, opened(server) as client:
        assert asked(client, "a") == "a"
        client.send("b")
        assert closed(client) == (1013, "rate limited; retry in 60000 ms")
        wait_for(lambda: echo.ended, "the application's end")
    assert echo.heard == ["a"]
    assert echo.ended == [{"type": "websocket.disconnect", "code": 1013, "reason": "rate limited; retry in 60000 ms"}]


def test_bytes_are_counted_as_they_are_in_utf_8(free: Limiter) -> None:
    limits = WebSocketLimits(received_bytes="10/minute", warn=False)
    with serving(RateLimitMiddleware(Echo(), free, websocket=limits)) as server, opened(server) as client:
        assert asked(client, "äöü") == "äöü"
        assert asked(client, b"") == b""
        assert asked(client, b"\x00\xff\x00") == b"\x00\xff\x00"
        assert asked(client, "ab") == denied("received_bytes", 6_000)
        assert asked(client, "a") == "a"


def test_a_message_is_counted_by_all_limits_or_by_none(clock: ManualClock, free: Limiter) -> None:
    echo = Echo()
    app = RateLimitMiddleware(
        echo, free, websocket=WebSocketLimits(received="3/minute", received_bytes="10/minute", warn=False)
    )
    with serving(app) as server, opened(server) as client:
        assert asked(client, "eight ch") == "eight ch"
        assert [asked(client, "four") for _ in range(4)] == [denied("received_bytes", 12_000)] * 4
        assert [asked(client, "a") for _ in range(2)] == ["a", "a"]
        assert asked(client, "b") == denied("received", 20_000)
        clock.advance(20)  # 3 1/3 bytes more: the denied message was not counted by them
        assert asked(client, "abc") == "abc"


@pytest.mark.parametrize("on_denied", ["frame", "close"])
def test_a_message_that_can_never_pass_closes_the_connection_and_costs_nothing(on_denied: Any, free: Limiter) -> None:
    echo = Echo()
    app = RateLimitMiddleware(
        echo, free, websocket=WebSocketLimits(received="1/minute", received_bytes="10/minute", on_denied=on_denied)
    )
    with serving(app) as server:
        with opened(server) as client:
            client.send("eleven char")
            assert closed(client) == (1009, "message too big: at most 10 bytes can pass")
        with opened(server) as client:
            frames = [asked(client, "ten chars."), heard(client), heard(client)]
            assert frames == [warned("received", 0, 1), warned("received_bytes", 0, 10), "ten chars."]


def test_what_is_blocked_is_denied_like_any_other(free: Limiter) -> None:
    app = RateLimitMiddleware(Echo(), free, websocket=WebSocketLimits(received_bytes="blocked"))
    with serving(app) as server, opened(server) as client:
        assert asked(client, "a") == denied("received_bytes", 60_000)


def test_several_limits_hold_at_once(clock: ManualClock, free: Limiter) -> None:
    limits = WebSocketLimits(received=["1/second", "3/minute"], warn=False)
    with serving(RateLimitMiddleware(Echo(), free, websocket=limits)) as server, opened(server) as client:
        assert asked(client, "a") == "a"
        assert asked(client, "b") == denied("received", 1_000)
        for _ in range(2):
            clock.advance(1)
            assert asked(client, "b") == "b"
        clock.advance(1)
        assert asked(client, "c") == denied("received", 17_000)


def test_a_flood_is_answered_and_others_are_served_meanwhile(clock: ManualClock, free: Limiter) -> None:
    echo = Echo()
    app = RateLimitMiddleware(echo, free, key=named, websocket=WebSocketLimits(received="5/minute", warn=False))
    with serving(app) as server, opened(server, "flooder") as flooder, opened(server, "other") as other:
        for number in range(400):
            flooder.send(f"flood {number}")
        assert [asked(other, text) for text in "abcde"] == list("abcde")
        assert [heard(flooder) for _ in range(5)] == [f"flood {number}" for number in range(5)]
        assert [heard(flooder) for _ in range(395)] == [denied("received", 12_000)] * 395
        assert server.call(len, app._websockets.flooding) == 1
        clock.advance(12)
        assert asked(flooder, "at last") == "at last"
        assert server.call(len, app._websockets.flooding) == 0
        assert [asked(flooder, "x") for _ in range(FLOOD - 1)] == [denied("received", 12_000)] * (FLOOD - 1)
        assert server.call(len, app._websockets.flooding) == 0
        assert asked(flooder, "x") == denied("received", 12_000)
    wait_for(lambda: len(echo.ended) == 2, "both ends")
    assert len(app._websockets.flooding) == 0


# Who it is -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_key_is_asked_for_once_and_shared_by_all_connections_of_it(asynchronous: bool, free: Limiter) -> None:
    times = 0

    def key(request: Any) -> str | None:
        nonlocal times
        times += 1
        assert (request.method, request.path) == ("WEBSOCKET", "/chat")
        return named(request)

    async def akey(request: Any) -> str | None:
        return key(request)

    app = RateLimitMiddleware(
        Echo(),
        free,
        key=akey if asynchronous else key,
        websocket=WebSocketLimits(received="2/minute", warn=False),
    )
    with (
        serving(app) as server,
        opened(server, "a", "/chat") as one,
        opened(server, "a", "/chat") as two,
        opened(server, "b", "/chat") as other,
    ):
        assert [asked(one, "x"), asked(two, "x")] == ["x", "x"]
        assert [asked(one, "x"), asked(two, "x")] == [denied("received", 30_000)] * 2
        assert [asked(other, "x"), asked(other, "x")] == ["x", "x"]
        assert times == 3


def test_who_is_not_known_counts_by_address_and_meets_no_name(free: Limiter) -> None:
    app = RateLimitMiddleware(Echo(), free, key=named, websocket=WebSocketLimits(received="1/minute", warn=False))
    with serving(app) as server, opened(server) as one, opened(server) as two, opened(server, "127.0.0.1") as other:
        assert asked(one, "x") == "x"
        assert asked(two, "x") == denied("received", 60_000)
        assert asked(other, "x") == "x"


def test_who_is_exempt_or_skipped_is_not_counted(free: Limiter) -> None:
    app = RateLimitMiddleware(
        Echo(),
        Limiter("blocked"),
        exempt=lambda request: named(request) == "admin",
        skip=["WEBSOCKET /open", "GET /closed"],
        websocket=WebSocketLimits(received="blocked", sent="1/minute"),
    )
    with serving(app) as server:
        for name, path in (("admin", "/closed"), ("", "/open")):
            with opened(server, name, path) as client:
                assert [asked(client, "x") for _ in range(3)] == ["x"] * 3
        assert refused(server, "", "/closed").status_code == 429


# Connects ------------------------------------------------------------------------------------------------------------


def test_a_connect_is_counted_like_a_request_and_told_where_it_stands(clock: ManualClock) -> None:
    echo = Echo()
    with serving(RateLimitMiddleware(echo, Limiter("2/minute", store=MemoryStore(clock=clock)))) as server:
        with opened(server) as client:
            assert client.response is not None
            assert client.response.headers["RateLimit"] == '"default";r=1;t=30'
            assert client.response.headers["RateLimit-Policy"] == '"default";q=2;w=60'
            assert asked(client, "x") == "x"
        with opened(server):
            pass
        response = refused(server)
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "30"
        assert response.headers["Content-Type"] == wire.PROBLEM
        assert response.headers["RateLimit"] == '"default";r=0;t=30'
        denial = wire.read_denial(response.body)
        assert denial is not None
        assert (denial.retry_after_ms, denial.tier) == (30_000, "default")
        assert echo.began == 2
        clock.advance(30)
        with opened(server) as client:
            assert asked(client, "x") == "x"


def test_where_the_server_can_not_answer_a_connect_it_is_closed() -> None:
    echo = Echo()
    app = RateLimitMiddleware(echo, "blocked")

    async def without_extensions(scope: Scope, receive: Receive, send: Send) -> None:
        await app({key: value for key, value in scope.items() if key != "extensions"}, receive, send)

    with serving(without_extensions) as server:
        assert refused(server).status_code == 403
    assert echo.began == 0


def test_routes_tell_connects_from_requests() -> None:
    app = RateLimitMiddleware(Echo(), "unlimited", routes={"WEBSOCKET /chat": "1/minute", "GET /feed": "blocked"})
    with serving(app) as server:
        with opened(server, path="/chat"), opened(server, path="/feed"):
            pass
        assert wire.read_denial(refused(server, path="/chat").body).tier == "WEBSOCKET /chat"  # type: ignore[union-attr]


def failing(before: bool) -> App:
    """An application that raises, before or after it has accepted."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if not before:
            await send({"type": "websocket.accept"})
            await receive()
        raise ZeroDivisionError

    return app


@pytest.mark.parametrize(("before", "left"), [(True, 3), (False, 2)])
def test_a_connect_is_given_back_if_the_application_fails_before_it_has_answered(
    before: bool, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter("3/minute", store=MemoryStore(clock=ManualClock()))
    with serving(RateLimitMiddleware(failing(before), limiter)) as server:
        if before:
            assert refused(server).status_code == 500
        else:
            with opened(server) as client:
                client.send("x")
                with pytest.raises(ConnectionClosed):
                    client.recv(timeout=PATIENCE)
        wait_for(lambda: "ZeroDivisionError" in caplog.text, "the server's log")
    assert limiter.peek("127.0.0.1").remaining == left


async def choosy(scope: Scope, receive: Receive, send: Send) -> None:
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
def test_connects_can_be_counted_by_what_came_of_them(counts: Any, left: int) -> None:
    limiter = Limiter("10/minute", store=MemoryStore(clock=ManualClock()))
    with serving(RateLimitMiddleware(choosy, limiter, counts=counts)) as server:
        with opened(server, path="/accepted"):
            pass
        assert refused(server, path="/refused").status_code == 403
        response = refused(server, path="/answered")
        assert (response.status_code, bytes(response.body)) == (401, b"who are you?")
        assert response.headers["RateLimit"]
    assert limiter.peek("127.0.0.1").remaining == left


def test_what_a_connect_has_cost_can_be_told_once_it_is_answered() -> None:
    limiter = Limiter("10/minute", store=MemoryStore(clock=ManualClock()))
    seen = []

    def settle(request: Any, response: Any) -> int:
        seen.append((request.method, response.status, response.headers.get("x-cost")))
        return int(response.headers.get("x-cost", 0))

    with serving(RateLimitMiddleware(choosy, limiter, settle=settle)) as server:
        with opened(server, path="/accepted"):
            wait_for(lambda: limiter.peek("127.0.0.1").remaining == 7, "the connect to be settled")
        refused(server, path="/refused")
        refused(server, path="/answered")
    assert seen == [("WEBSOCKET", 101, "3"), ("WEBSOCKET", 403, None), ("WEBSOCKET", 401, "2")]
    assert limiter.peek("127.0.0.1").remaining == 5


# A gate --------------------------------------------------------------------------------------------------------------


def test_b1_b4_a_gate_counts_messages_on_its_channel_ws_and_changes_hold_at_once(clock: ManualClock) -> None:
    gate = Gate(Policy(limits={"heavy": "2/minute"}), store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(
        Echo(), gate=gate, key=named, tier="heavy", websocket=WebSocketLimits(received="gate", warn=False)
    )
    with serving(app) as server, opened(server, "a") as client:
        assert [asked(client, "x") for _ in range(3)] == ["x", "x", denied("heavy", 30_000)]
        assert gate.peek("a", "http", "heavy").remaining == 1
        assert gate.peek("a", "ws", "heavy").remaining == 0
        assert gate.is_rate_limited("a")
        gate.set_override("a", "heavy", "3/minute", "ws")
        assert [asked(client, "x") for _ in range(4)] == ["x", "x", "x", denied("heavy", 20_000)]
        gate.add_exemption("a")
        assert [asked(client, "x") for _ in range(5)] == ["x"] * 5
        with opened(server, "b") as other:
            assert asked(other, "x") == "x"


def test_b2_who_is_not_known_to_a_gate_counts_by_address() -> None:
    gate = Gate(Policy(addresses={"limit": "3/minute"}), store=MemoryStore(clock=ManualClock()))
    limits = WebSocketLimits(received="gate", warn=False)
    app = RateLimitMiddleware(Echo(), gate=gate, key=named, websocket=limits)
    with serving(app) as server, opened(server) as client, opened(server, "a") as other:
        assert [asked(client, "x") for _ in range(3)] == ["x", "x", denied("address", 20_000)]
        assert refused(server).status_code == 429
        assert asked(other, "x") == "x"


def test_limits_beside_a_gate_are_not_for_agents_that_are_exempt() -> None:
    gate = Gate(Policy(exempt=["boss"]), store=MemoryStore(clock=ManualClock()))
    limits = WebSocketLimits(received="9/minute", received_bytes="1/minute", sent="2/minute", warn=False)
    app = RateLimitMiddleware(Echo(), gate=gate, key=named, websocket=limits)
    with serving(app) as server, opened(server, "boss") as boss, opened(server, "a") as other:
        assert [asked(boss, "long") for _ in range(10)] == ["long"] * 10
        assert [asked(other, "x"), asked(other, "x")] == ["x", denied("received_bytes", 60_000)]


def test_b1_what_a_gate_has_passed_and_another_limit_denies_is_given_back() -> None:
    gate = Gate(Policy(exempt=["boss"]), store=MemoryStore(clock=ManualClock()))
    limits = WebSocketLimits(received="gate", received_bytes="1/minute", warn=False)
    app = RateLimitMiddleware(Echo(), gate=gate, key=named, tier="heavy", websocket=limits)
    with serving(app) as server, opened(server, "boss") as boss, opened(server, "a") as other:
        assert [asked(other, "x"), asked(other, "x")] == ["x", denied("received_bytes", 60_000)]
        assert gate.peek("a", "ws", "heavy").remaining == 9
        assert [asked(boss, "x") for _ in range(11)] == ["x"] * 11
        gate.remove_exemption("boss")
        assert [asked(boss, "x") for _ in range(11)] == ["x"] * 10 + [denied("heavy", 6_000)]


# What the application sends ------------------------------------------------------------------------------------------


def test_what_the_application_sends_waits_for_its_turn_and_a_close_does_not(clock: ManualClock, free: Limiter) -> None:
    sender = Sender("a", "b", "c")
    sent = Limiter("2/minute", store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(sender, free, websocket=WebSocketLimits(sent=sent))
    with serving(app) as server, opened(server) as client:
        assert [heard(client), heard(client)] == ["a", "b"]
        wait_for(lambda: sent.waiting("127.0.0.1"), "the third to wait")
        assert sender.sent == ["a", "b"]
        assert sent.peek("127.0.0.1").retry_after == 30
        clock.advance(30)
        assert heard(client) == "c"
        assert closed(client) == (4000, "")
    wait_for(lambda: sender.ended, "the application's end")


def test_a_message_larger_than_can_pass_leaves_a_debt(clock: ManualClock, free: Limiter) -> None:
    sender = Sender("1234", b"x" * 25, "", "y")
    sent = Limiter("10/minute", store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(sender, free, websocket=WebSocketLimits(sent_bytes=sent))
    with serving(app) as server, opened(server) as client:
        assert heard(client) == "1234"
        wait_for(lambda: sent.waiting("127.0.0.1"), "the large one to wait")
        assert sent.peek("127.0.0.1", 10).retry_after == 24
        clock.advance(24)
        assert heard(client) == b"x" * 25
        assert heard(client) == ""
        wait_for(lambda: sent.waiting("127.0.0.1"), "the last one to wait")
        assert sent.peek("127.0.0.1").retry_after == 96
        clock.advance(96)
        assert heard(client) == "y"


def test_who_waits_to_send_to_a_client_that_leaves_waits_no_longer_and_has_spent_nothing(
    clock: ManualClock, free: Limiter
) -> None:
    sender = Sender("a", "b")
    sent = Limiter("5/minute", store=MemoryStore(clock=clock))
    sent_bytes = Limiter("1/minute", store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(sender, free, websocket=WebSocketLimits(sent=sent, sent_bytes=sent_bytes))
    with serving(app) as server:
        with opened(server) as client:
            assert heard(client) == "a"
            wait_for(lambda: sent_bytes.waiting("127.0.0.1"), "the second to wait")
            assert sent.peek("127.0.0.1").remaining == 3
        wait_for(lambda: sender.ended, "the application's end")
    assert len(sender.failures) == 1  # as the server says it
    assert sent_bytes.waiting("127.0.0.1") == 0
    assert sent.peek("127.0.0.1").remaining == 4


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

    return litestar.Litestar([echo], middleware=[limited])


@pytest.mark.parametrize("framework", [starlette_app, fastapi_app, litestar_app])
def test_it_stands_before_the_frameworks_websockets(framework: Callable[[Limiter], Any], clock: ManualClock) -> None:
    app = framework(Limiter("2/minute", store=MemoryStore(clock=clock)))
    with serving(app) as server:
        with opened(server) as client:
            assert [asked(client, text) for text in "ab"] == ["a", "b"]
            assert asked(client, "c") == denied("received", 30_000)
        with opened(server) as client:
            assert asked(client, "c") == denied("received", 30_000)
            clock.advance(29)
            assert refused(server).status_code == 429
            clock.advance(1)
            assert asked(client, "c") == "c"


def test_nodes_that_share_a_server_share_what_is_counted(redis_server: Server, clock: ManualClock) -> None:
    limits = WebSocketLimits(received="4/minute", received_bytes="6/minute", sent="100/second", warn=False)
    with RedisStore(redis_server.url, prefix="websockets:", clock=clock, timeout=PATIENCE) as store:
        limiter = Limiter("3/minute", store=store)
        with (
            serving(RateLimitMiddleware(Echo(), limiter, websocket=limits)) as one,
            serving(RateLimitMiddleware(Echo(), limiter, websocket=limits)) as two,
            opened(one) as here,
            opened(two) as there,
        ):
            assert [asked(here, "ab"), asked(there, "cd")] == ["ab", "cd"]
            assert [asked(here, "abc"), asked(there, "abc")] == [denied("received_bytes", 10_000)] * 2
            assert [asked(here, "a"), asked(there, "b")] == ["a", "b"]
            assert [asked(here, ""), asked(there, "")] == [denied("received", 15_000)] * 2
            with opened(one):
                assert refused(two).status_code == 429
            one.run(store.aclose())
            two.run(store.aclose())


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"on_denied": "drop"}, "WebSocketLimits on_denied: expected 'frame' or 'close', got 'drop'"),
        ({"warn": 1}, "WebSocketLimits warn: expected True or False, got 1"),
        ({"received": 5}, "WebSocketLimits received: expected a limit, its text, or several of either, got 5"),
        (
            {"received": "gate"},
            "RateLimitMiddleware received: expected a limit or a limiter, since there is no gate, got 'gate'",
        ),
        (
            {"sent": "gate"},
            "WebSocketLimits sent: expected a limit or a limiter (a gate counts what is received), got 'gate'",
        ),
        (
            {"sent_bytes": "blocked"},
            "WebSocketLimits sent_bytes: expected a limit that lets something pass (what is sent isn't dropped), got",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        RateLimitMiddleware(Echo(), "1/minute", websocket=WebSocketLimits(**given))
    assert str(error.value).startswith(text)


def test_what_is_not_limits_of_websockets_is_refused() -> None:
    expected = "RateLimitMiddleware websocket: expected WebSocketLimits"
    with pytest.raises(InvalidInput, match=expected):
        RateLimitMiddleware(Echo(), "1/minute", websocket="10/second")  # type: ignore[arg-type]
