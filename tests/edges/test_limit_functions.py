"""Limits that depend on the request: a user's function returns them."""

import asyncio
from typing import Annotated, Any
from uuid import uuid4

import pytest
from fastapi import Depends, FastAPI, Header

from headgate import Limiter, ManualClock, MemoryStore, RedisStore, SlidingWindow, per_minute
from headgate.edges import limit_function
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.counters import limiter_counter
from headgate.edges.fastapi import RateLimit
from headgate.edges.guard import Guard
from headgate.edges.limit_function import LimitFunction
from headgate.edges.websocket import WebSocketLimits
from tests.support.asgi_server import app_server
from tests.support.greeting_app import greeting_app, greeting_server, header, maybe_async
from tests.support.http_edges import AsgiEdge, Edge, FastapiEdge, WsgiEdge, client_of, sync_or_async
from tests.support.valkey import ValkeyServer, wait_for
from tests.support.websocket_apps import Echo, denial_frame, exchange, websocket_client

pytestmark = pytest.mark.once

PLANS = {"free": "2/minute", "pro": "5/minute", "exact": SlidingWindow(3, 60), "both": ["4/minute", "9/hour"]}


def limit_of_plan(request: Any) -> Any:
    return PLANS[request.headers["x-plan"]]


def passed(client: Any, plan: str, key: str = "", path: str = "/") -> int:
    """How many of ten requests under a plan pass."""
    headers = {"x-plan": plan, "x-key": key}
    return sum(client.get(path, headers=headers).status_code == 200 for _ in range(10))


@sync_or_async
def test_each_caller_has_the_limit_that_the_function_returns(edge: type[Edge], asynchronous: bool) -> None:
    app = edge(limiter=maybe_async(asynchronous, limit_of_plan))
    with client_of(app) as client:
        first = client.get("/", headers={"x-plan": "pro"})
        assert (first.headers["ratelimit-policy"], first.headers["ratelimit"]) == (
            '"default";q=5;w=60',
            '"default";r=4;t=12',
        )
        assert passed(client, "pro") == 4
        assert [passed(client, plan) for plan in ("free", "exact", "both")] == [2, 3, 4]  # each counts apart
        denied = client.get("/", headers={"x-plan": "free"})
        assert (denied.status_code, denied.headers["ratelimit-policy"]) == (429, '"default";q=2;w=60')


@pytest.mark.parametrize("edge", [AsgiEdge, WsgiEdge])
def test_a_route_can_have_a_function_and_anonymous_callers_count_by_address(edge: type[Edge]) -> None:
    app = edge(limiter="8/minute", routes={"/201": limit_of_plan}, key=header("x-key"))
    with client_of(app) as client:
        assert [client.get("/201", headers={"x-plan": "free", "x-key": "a"}).status_code for _ in range(3)] == [
            201,
            201,
            429,
        ]
        assert client.get("/201", headers={"x-plan": "free", "x-key": "b"}).status_code == 201
        assert client.get("/201", headers={"x-plan": "free"}).status_code == 201
        assert passed(client, "free", "a") == 8  # the default limit is another


def test_several_processes_count_the_limits_of_a_function_in_one_store(redis_server: ValkeyServer) -> None:
    name = uuid4().hex
    with RedisStore(redis_server.url) as one, RedisStore(redis_server.url) as two:
        apps = [AsgiEdge(limiter=limit_of_plan, store=store, name=name) for store in (one, two)]
        with client_of(apps[0]) as first, client_of(apps[1]) as second:
            assert (passed(first, "pro"), passed(second, "pro"), passed(second, "free")) == (5, 0, 2)


def test_a_dependency_can_return_the_limit() -> None:
    def limit(x_plan: Annotated[str, Header()]) -> Any:
        return PLANS[x_plan]

    app = FastAPI()

    @app.get("/", dependencies=[Depends(RateLimit(Depends(limit)))])
    def home() -> None: ...

    with greeting_server(app) as client:
        assert (passed(client, "free"), passed(client, "pro")) == (2, 5)
        assert client.get("/?limit=9/second", headers={"x-plan": "free"}).status_code == 429  # it is no parameter


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "expected a function that returns a limit or its text; limit: expected a limit, its text"),
        (60, "expected a function that returns a limit or its text; limit: expected a limit such as '60/minute'"),
        ("sixty a minute", "expected a function that returns a limit or its text; limit: expected"),
        ("0/minute", "expected a function that returns a limit or its text; limit '0/minute'"),
        ("5/minute" + 1000 * " ", "returns a limit or its text, of at most 1000 characters, got 1008: '5/minute  "),
        (["5/minute", 1000 * "x"], "of at most 1000 characters, got 1008: ['5/minute', 'xxx"),
        ([per_minute(n + 1) for n in range(1001)], "of at most 1000 characters, got 1001: ["),
    ],
)
@pytest.mark.parametrize("edge", [AsgiEdge, FastapiEdge])
def test_nonsense_is_a_clear_error_and_nothing_is_counted(
    edge: type[Edge], returned: object, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [returned, "1/minute"]
    app = edge(limiter=lambda request: answers.pop(0))
    with client_of(app) as client:
        answered = [client.get("/", headers={"Connection": "close"}).status_code for _ in range(2)]
        assert answered == [500, 200]
        wait_for(lambda: text in caplog.text, "the server's log")


def test_a_function_that_raises_fails_the_request_and_counts_nothing() -> None:
    store = MemoryStore(clock=ManualClock())
    app = RateLimitMiddleware(greeting_app, limiter=limit_of_plan, store=store)
    with greeting_server(app) as client:
        assert client.get("/").status_code == 500  # KeyError: 'x-plan'
        assert len(store) == 0


def test_a_function_that_never_returns_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limit_function, "_FUNCTION_SECONDS", 0.05)
    store = MemoryStore()

    async def hang(request: object) -> str:
        await asyncio.Event().wait()
        return "1/minute"

    with greeting_server(RateLimitMiddleware(greeting_app, limiter=hang, store=store)) as client:
        assert client.get("/").status_code == 500
        wait_for(lambda: "limiter: expected a function that returns within 0.05 s" in caplog.text, "the server's log")
    assert len(store) == 0


def test_the_body_of_a_denial_that_never_comes_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limit_function, "_FUNCTION_SECONDS", 0.05)

    async def hang(request: object, problem: object) -> tuple[str, str]:
        await asyncio.Event().wait()
        return "", "text/plain"

    with greeting_server(RateLimitMiddleware(greeting_app, limiter="blocked", body=hang)) as client:
        assert client.get("/", timeout=5).status_code == 500
        wait_for(lambda: "body: expected a function that returns within 0.05 s" in caplog.text, "the server's log")


@pytest.mark.parametrize("returned", [None, "no", (b"no", "text/plain"), ("a", "b", "c")])
def test_the_body_of_a_denial_must_be_two_strings(returned: Any, caplog: pytest.LogCaptureFixture) -> None:
    with greeting_server(
        RateLimitMiddleware(greeting_app, limiter="blocked", body=lambda request, problem: returned)
    ) as client:
        assert client.get("/").status_code == 500
        text = (
            "RateLimitMiddleware body: expected a function that returns two strings, a body and its content type, got"
        )
        wait_for(lambda: text in caplog.text, "the server's log")


def test_an_async_function_is_refused_where_there_is_no_event_loop() -> None:
    from headgate.edges.wsgi import RateLimitMiddleware as WsgiMiddleware

    async def later(request: object) -> str:
        return "1/minute"

    class Later:
        async def __call__(self, request: object) -> str:
            return "1/minute"

    for given in (later, Later()):
        with pytest.raises(ValueError, match="RateLimitMiddleware limiter: expected a plain function"):
            WsgiMiddleware(lambda environ, start: [], given)
        with pytest.raises(ValueError, match="RateLimitMiddleware routes '/x': expected a plain function"):
            WsgiMiddleware(lambda environ, start: [], "1/minute", routes={"/x": given})
        with pytest.raises(ValueError, match="RateLimitMiddleware key: expected a plain function, since WSGI has no"):
            WsgiMiddleware(lambda environ, start: [], "1/minute", key=given)


# Bounds ---------------------------------------------------------------------------------------------------------------


def test_a_text_is_parsed_once_and_equal_limits_count_together() -> None:
    made = []

    def counters(limit: Any) -> Any:
        made.append(limit)
        counter = limiter_counter("test", Limiter(limit), "x", awaits=False, settles=False)
        return counter, counter

    function = LimitFunction("test", len, counters)
    found = [function.find(given) for given in ("5/minute", "5/minute", "5 per minute", per_minute(5), ["5/minute"])]
    assert len({id(one) for one in found}) == 1
    assert made == [per_minute(5)]


def test_a_function_may_return_many_limits_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    function = LimitFunction("test", len, str)
    for _ in range(3):
        for number in range(1, 1001):
            assert function.find(f"{number}/minute") == f"{number}/minute"
    assert caplog.text == ""


def test_a_function_is_asked_once_for_each_request() -> None:
    asked = []

    def limit(request: object) -> str:
        asked.append(request)
        return "2/minute"

    with greeting_server(RateLimitMiddleware(greeting_app, limiter=limit)) as client:
        assert [client.get("/").status_code for _ in range(4)] == [200, 200, 429, 429]
    assert len(asked) == 4


def test_a_new_limit_for_every_request_is_bounded_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    guard = Guard("middleware", {}, limiter=lambda request: "1/minute", store=store, awaits=False)
    function = guard._default
    assert isinstance(function, LimitFunction)

    def check(limit: str, key: str) -> bool:
        return bool(function.find(limit).counters[0].check(key, "normal", 1))

    for number in range(1, 5000):
        assert check(f"{number}/minute", "a")
    assert max(len(function._made), len(function._by_text)) <= 1000
    assert caplog.text.count("middleware limiter: the function has returned 1000 different limits") == 1
    assert not check("1/minute", "a"), "what was forgotten here is counted in the store"
    clock.advance(60)
    for _ in range(10_000):
        check("9/minute", "b")
        clock.advance(1)
    assert len(store._tables) < 200, "limits that nobody uses any more leave little"


# WebSockets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_messages_of_each_connection_have_the_limit_that_the_function_returns(
    clock: ManualClock, free: Limiter, asynchronous: bool
) -> None:
    limits = WebSocketLimits(received=maybe_async(asynchronous, limit_of_plan), warn=False)
    app = RateLimitMiddleware(Echo(), free, websocket=limits)
    with app_server(app) as server:
        with websocket_client(server, plan="free") as client:
            assert [exchange(client, text) for text in "ab"] == ["a", "b"]
            assert exchange(client, "c") == denial_frame("received", 30_000)
        with websocket_client(server, plan="pro") as client:
            assert [exchange(client, text) for text in "abcde"] == list("abcde")
            assert exchange(client, "f") == denial_frame("received", 12_000)


def test_a_connect_whose_function_raises_is_not_counted() -> None:
    limiter = Limiter("5/minute", store=MemoryStore(clock=ManualClock()))
    echo = Echo()
    app = RateLimitMiddleware(echo, limiter, websocket=WebSocketLimits(received=limit_of_plan))
    with app_server(app) as server:
        with pytest.raises(Exception, match="500"), websocket_client(server):
            pass
        wait_for(lambda: limiter.peek("127.0.0.1").remaining == 5, "the refund")
    assert echo.began == 0
