"""HTTP behind the ASGI middleware, with real servers and clients."""

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import uuid4

import django.http
import django.urls
import httpx
import litestar
import pytest
from asgi import Serving, serving
from django.conf import settings
from django.core.asgi import get_asgi_application
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from servers import PATIENCE, Server, wait_for
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headgate import Decision, Gate, InvalidInput, Limiter, ManualClock, MemoryStore, Outcome, Policy, RedisStore, wire
from headgate.edges.asgi import App, Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.guard import Guard

pytestmark = pytest.mark.once


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the status that the path names, /404, or 200."""
    assert scope["type"] == "http"
    number = scope["path"].removeprefix("/")
    headers = [(b"content-length", b"5"), *((name, value) for name, value in scope["headers"] if name == b"x-cost")]
    await send({"type": "http.response.start", "status": int(number) if number.isdigit() else 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


def counted(limit: Any, clock: ManualClock | None = None, **options: Any) -> Limiter:
    return Limiter(limit, store=MemoryStore(clock=clock or ManualClock()), **options)


@contextmanager
def client_of(server: Serving, **options: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server}", timeout=PATIENCE, **options) as client:
        yield client


@contextmanager
def served(app: App) -> Iterator[httpx.Client]:
    with serving(app) as server, client_of(server) as client:
        yield client


def left(limiter: Limiter, key: str = "127.0.0.1") -> int:
    return limiter.peek(key).remaining


def either(asynchronous: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as it is, or as an async one."""
    if not asynchronous:
        return function

    async def later(*arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    return later


def header(name: str) -> Callable[[Any], Any]:
    return lambda request: request.headers.get(name)


# Who, how much, which ------------------------------------------------------------------------------------------------


def test_b3_without_more_each_address_is_counted_and_denials_say_how_long_to_wait() -> None:
    clock = ManualClock()
    with served(RateLimitMiddleware(hello, counted("2/minute", clock))) as client:
        answers = [client.get("/") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers.get("Retry-After") for answer in answers] == [None, None, "30"]
        denied = answers[2]
        assert denied.headers["Content-Type"] == "application/problem+json"
        assert denied.headers["Cache-Control"] == "no-store"
        assert denied.json() == {
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Too many requests",
            "status": 429,
            "detail": "too many requests; try again in 30 s",
            "violated-policies": ["default"],
            "error": "rate_limited",
            "retry_after_ms": 30_000,
            "tier": "default",
        }
        clock.advance(29.9)
        denied = client.get("/")
        assert (denied.headers["Retry-After"], denied.json()["retry_after_ms"]) == ("1", 1000)
        clock.advance(0.1)
        assert client.get("/").status_code == 200


def test_b3_an_address_of_ipv6_is_counted_by_its_64() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here; test_proxies.py does it without a server")
    limiter = counted("1/minute")
    with serving(RateLimitMiddleware(hello, limiter), host="::1") as server:
        url = f"http://[::1]:{server.port}/"
        assert [httpx.get(url).status_code, httpx.get(url).status_code] == [200, 429]
    assert left(limiter, "::/64") == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_key_cost_and_exemption_are_asked_for_by_functions(asynchronous: bool) -> None:
    limiter = counted("10/minute")
    app = RateLimitMiddleware(
        hello,
        limiter,
        key=either(asynchronous, header("x-key")),
        cost=either(asynchronous, lambda request: int(request.headers.get("x-cost", 1))),
        exempt=either(asynchronous, lambda request: request.headers.get("x-key") == "admin"),
    )
    with served(app) as client:

        def status(key: str, cost: int = 1) -> int:
            return client.get("/", headers={"X-Key": key, "X-Cost": str(cost)}).status_code

        assert [status("a", 7), status("a", 4), status("a", 3)] == [200, 429, 200]
        assert [status("a", 0), status("b", 10)] == [200, 200]
        assert [status("admin", 100), status("c", 11)] == [200, 429]
    assert [left(limiter, key) for key in ("a", "b", "admin", "c", "127.0.0.1")] == [0, 0, 10, 10, 10]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_b3_a_gate_counts_agents_by_tier_and_who_is_not_known_by_address(asynchronous: bool) -> None:
    clock = ManualClock()
    policy = Policy(limits={"heavy": "2/minute"}, addresses={"limit": "1/minute"}, exempt=["boss"])
    gate = Gate(policy, store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(
        hello,
        gate=gate,
        key=either(asynchronous, header("x-agent")),
        tier=either(asynchronous, lambda request: request.headers.get("x-tier", "normal")),
    )
    with served(app) as client:

        def ask(agent: str = "", tier: str = "heavy") -> httpx.Response:
            return client.get("/", headers={"X-Agent": agent, "X-Tier": tier})

        assert [ask("a").status_code for _ in range(2)] == [200, 200]  # the second is a warning: it simply passes
        denied = ask("a")
        assert (denied.status_code, denied.headers["Retry-After"]) == (429, "30")
        body = denied.json()
        assert (body["error"], body["retry_after_ms"], body["tier"]) == ("rate_limited", 30_000, "heavy")
        assert (ask("a", "normal").status_code, ask("b").status_code) == (200, 200)
        assert [ask("boss").status_code for _ in range(5)] == [200] * 5
        assert "RateLimit" not in ask("boss").headers
        # Addresses are counted apart from agents of the same name, and so is a name that can't be an agent's.
        assert [ask("127.0.0.1").status_code, ask().status_code, ask().status_code] == [200, 200, 429]
        assert ask("x" * 200).status_code == 429
        assert ask().json()["tier"] == "address"
        assert gate.is_rate_limited("a")
        assert not gate.is_rate_limited("127.0.0.1")
        assert gate.peek("a", "ws", "heavy").remaining == 2
        clock.advance(60)
        assert [ask("a").status_code, ask().status_code] == [200, 200]


def test_b3_an_address_never_meets_a_key_of_the_same_name() -> None:
    with served(RateLimitMiddleware(hello, counted("1/minute"), key=header("x-key"))) as client:
        asked = [{"X-Key": "127.0.0.1"}, {}, {"X-Key": "127.0.0.1"}, {"X-Key": ""}]
        assert [client.get("/", headers=headers).status_code for headers in asked] == [200, 200, 429, 429]


def test_keys_may_be_of_any_length_and_script() -> None:
    keys = ["ä" * 50, "x" * 5000, "x" * 5001]
    app = RateLimitMiddleware(hello, counted("1/minute"), key=lambda request: keys[int(request.headers["x-key"])])
    with served(app) as client:
        statuses = [client.get("/", headers={"X-Key": number}).status_code for number in "012012"]
    assert statuses == [200] * 3 + [429] * 3


def test_routes_have_limits_of_their_own_and_some_requests_are_skipped() -> None:
    shared = counted("1/minute", name="shared")
    app = RateLimitMiddleware(
        hello,
        counted("3/minute"),
        routes={"POST /login": "1/minute", "/a/{id}": shared, "/b/*": shared, "/open/gate": "unlimited"},
        skip=["/health", "GET /open/*"],
    )
    with served(app) as client:

        def statuses(method: str, *paths: str) -> list[int]:
            return [client.request(method, path).status_code for path in paths]

        assert statuses("POST", "/login", "/login") == [200, 429]
        assert client.post("/login").json()["tier"] == "POST /login"
        assert statuses("GET", "/a/1", "/b/2", "/a/3") == [200, 429, 429]
        assert client.get("/a/4").json()["tier"] == "shared"
        assert statuses("GET", "/health", "/open/1", "/health", "/open/2") == [200] * 4
        assert statuses("GET", "/login", "/", "/x?y=1", "/") == [200, 200, 200, 429]
        assert statuses("POST", "/health", "/open/1") == [200, 429]
        assert statuses("POST", "/open/gate", "/open/gate") == [200, 200]


def test_routes_of_a_gate_are_tiers() -> None:
    gate = Gate(Policy(), store=MemoryStore(clock=ManualClock()))
    routes = {"POST *": "heavy", "/status": "light"}
    app = RateLimitMiddleware(hello, gate=gate, key=lambda request: "a", routes=routes)
    with served(app) as client:
        client.post("/"), client.post("/status"), client.get("/status"), client.get("/")
    assert [gate.peek("a", "http", tier).remaining for tier in ("heavy", "light", "normal")] == [8, 119, 59]


# What came of it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_request_costs_can_be_known_after_its_response(asynchronous: bool) -> None:
    clock = ManualClock()
    limiter = counted("100/minute", clock)
    seen = []

    def settle(request: Any, response: Any) -> int:
        seen.append((request.path, response.status))
        return int(response.headers.get("x-cost", 0))

    app = RateLimitMiddleware(hello, limiter, cost=10, settle=either(asynchronous, settle))
    with served(app) as client:

        def spend(cost: int, leaves: int, path: str = "/") -> int:
            status = client.get(path, headers={"X-Cost": str(cost)}).status_code
            wait_for(lambda: left(limiter) == leaves, "the request to be settled")  # after its response was sent
            return status

        assert spend(30, 70) == 200
        assert spend(4, 66, "/404") == 404
        assert spend(0, 66) == 200
        assert spend(126, 0) == 200
        clock.advance(36)  # the debt of 60 is paid
        assert spend(1, 0) == 429
        clock.advance(6)
        assert spend(10, 0) == 200
        wait_for(lambda: len(seen) == 5, "the last one to be settled")
    assert seen == [("/", 200), ("/404", 404), ("/", 200), ("/", 200), ("/", 200)]


@pytest.mark.parametrize(
    ("counts", "expected"), [("all", 5), ("failures", 7), ("successes", 8), (lambda status: status == 404, 9)]
)
def test_only_some_responses_may_count(counts: Any, expected: int) -> None:
    limiter = counted("10/minute")
    statuses = [200, 399, 400, 404, 500]
    with served(RateLimitMiddleware(hello, limiter, counts=counts)) as client:
        assert [client.get(f"/{status}").status_code for status in statuses] == statuses
        wait_for(lambda: left(limiter) == expected, "what is left")


def test_where_only_failures_count_no_more_are_under_way_than_would_pass() -> None:
    """However many come at once: each may turn out to fail."""
    limiter = counted("5/minute")
    entered, go_on = [], threading.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        entered.append(scope["path"])
        while not go_on.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.001)
        await hello(scope, receive, send)

    async def many(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=40)) as client:
            tasks = [asyncio.ensure_future(client.get("/200" if n % 2 else "/401")) for n in range(40)]
            async with asyncio.timeout(20):
                while sum(task.done() for task in tasks) < 35:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            go_on.set()
            return [(await task).status_code for task in tasks]

    with serving(RateLimitMiddleware(slow, limiter, counts="failures")) as server:
        statuses = asyncio.run(many(f"http://{server}"))
    assert statuses.count(429) == 35
    assert len(entered) == 5
    assert left(limiter) == 5 - statuses.count(401)


def crashing(when: str) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if when != "before":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
            await send({"type": "http.response.body", "body": b"hello", "more_body": True})
        raise ZeroDivisionError

    return app


@pytest.mark.parametrize("more", [{}, {"key": lambda request: None}, {"counts": "successes"}])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_whose_handler_fails_is_given_back_and_the_failure_goes_on(
    when: str, more: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = counted("3/minute", name="" if "key" not in more else "names")
    of_address = Limiter(limiter.limit, store=limiter.store, name="names by address") if "key" in more else limiter
    with served(RateLimitMiddleware(crashing(when), limiter, cost=2, **more)) as client:
        for _ in range(3):
            if when == "before":
                assert client.get("/").status_code == 500
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    client.get("/")
        wait_for(lambda: caplog.text.count("\nZeroDivisionError") == 3, "the server's log")
    assert left(of_address) == 3


def test_a_failure_after_the_response_was_settled_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    limiter = counted("5/minute")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await hello(scope, receive, send)
        raise ZeroDivisionError

    with served(RateLimitMiddleware(app, limiter, settle=lambda request, response: 2)) as client:
        assert client.get("/").status_code == 200
        wait_for(lambda: "ZeroDivisionError" in caplog.text, "the server's log")
    assert left(limiter) == 3


@pytest.mark.parametrize("more", [{}, {"key": lambda request: "a"}, {"settle": lambda request, response: 0}])
@pytest.mark.parametrize("what", ["body", "wait"])
def test_a_request_whose_client_goes_away_is_not_given_back(
    what: str, more: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who goes away in time would never be denied."""
    limiter = counted("3/minute")
    entered, ended = threading.Event(), threading.Event()

    async def endpoint(request: Request) -> Response:
        entered.set()
        try:
            if what == "body":
                await request.body()
            elif (await request.receive())["type"] != "http.disconnect":
                assert (await request.receive())["type"] == "http.disconnect"
            raise ClientDisconnect
        finally:
            ended.set()

    app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    app.add_middleware(RateLimitMiddleware, limiter=limiter, **more)
    with serving(app) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            length = 10 if what == "body" else 0
            client.sendall(
                f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode() + b"12345"[:length]
            )
            assert entered.wait(20)
        assert ended.wait(20)
        wait_for(lambda: "ClientDisconnect" in caplog.text, "the server's log")
    assert left(limiter, "a" if "key" in more else "127.0.0.1") == 2


# Bodies and connections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"key": lambda request: "a"}, {"settle": lambda request, response: 3}])
def test_responses_are_streamed_and_background_tasks_run(more: Any) -> None:
    limiter = counted("10/minute")
    heard, done = threading.Event(), threading.Event()

    async def endpoint(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            while not heard.is_set():  # noqa: ASYNC110 - set by the client's thread, when it has the first
                await asyncio.sleep(0.001)
            yield b"last"

        return StreamingResponse(chunks(), background=BackgroundTask(done.set))

    app = Starlette(routes=[Route("/", endpoint)])
    app.add_middleware(RateLimitMiddleware, limiter=limiter, **more)
    with served(app) as client:
        with client.stream("GET", "/") as response:
            assert response.headers["RateLimit"].startswith('"default";r=9')
            parts = response.iter_raw()
            assert next(parts) == b"first"
            heard.set()
            assert b"".join(parts) == b"last"
        assert done.wait(20)
    assert left(limiter, "a" if "key" in more else "127.0.0.1") == (7 if "settle" in more else 9)


def test_request_bodies_are_streamed() -> None:
    heard = threading.Semaphore(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
            heard.release()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(size).encode()})

    def chunks() -> Iterator[bytes]:
        for number in range(3):
            yield b"x" * 1000
            assert heard.acquire(timeout=PATIENCE), f"part {number} wasn't heard before the next was sent"

    with served(RateLimitMiddleware(app, "10/minute")) as client:
        assert client.post("/", content=chunks()).text == "3000"


def test_denials_leave_a_connection_as_it_was() -> None:
    ports = set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        ports.add(scope["client"][1])
        await hello(scope, receive, send)

    clock = ManualClock()
    with served(RateLimitMiddleware(app, counted("2/minute", clock))) as client:
        for _ in range(3):
            assert [client.get("/").status_code for _ in range(4)] == [200, 200, 429, 429]
            assert client.post("/", content=b"unread" * 20_000).status_code == 429
            assert client.post("/", content=iter([b"unread"] * 1000)).status_code == 429
            assert client.head("/").status_code == 429
            clock.advance(60)
    assert len(ports) == 1


def test_requests_sent_in_one_go_are_answered_in_order() -> None:
    with (
        serving(RateLimitMiddleware(hello, counted("2/minute"))) as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        client.sendall(
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3 + b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"429", b"429"]


def test_200_clients_at_once_are_counted_exactly() -> None:
    limiter = counted("100/minute")
    with serving(RateLimitMiddleware(hello, limiter), backlog=300) as server:
        statuses = asyncio.run(all_at_once(f"http://{server}", 200))
    assert (statuses.count(200), statuses.count(429)) == (100, 100)


@pytest.mark.parametrize("by", ["limiter", "gate"])
def test_200_clients_of_two_nodes_at_once_are_counted_exactly(by: str, redis_server: Server) -> None:
    with RedisStore(redis_server.url, prefix=f"{uuid4().hex}:", clock=ManualClock(), timeout=PATIENCE) as store:
        gate = Gate(Policy(addresses={"limit": "100/minute"}), store=store)
        chosen: dict[str, Any] = {"gate": gate} if by == "gate" else {"limiter": Limiter("100/minute", store=store)}
        with (
            serving(RateLimitMiddleware(hello, **chosen), backlog=300) as one,
            serving(RateLimitMiddleware(hello, **chosen), backlog=300) as two,
        ):
            statuses = asyncio.run(all_at_once(f"http://{one}", 100, f"http://{two}"))
            one.run(store.aclose())
            two.run(store.aclose())
        gate.close()
    assert (statuses.count(200), statuses.count(429)) == (100, 100)


async def all_at_once(url: str, count: int, *more: str) -> list[int]:
    """What as many clients are answered by each server, each over a connection of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        answers = await asyncio.gather(*(client.get(to) for to in (url, *more) for _ in range(count)))
    return [answer.status_code for answer in answers]


# What is told --------------------------------------------------------------------------------------------------------

DRAFT = {"ratelimit-policy": '"default";q=2;w=60', "ratelimit": '"default";r=1;t=30'}
TRIPLE = {"x-ratelimit-limit": "2", "x-ratelimit-remaining": "1", "x-ratelimit-reset": "30"}


def limit_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if "ratelimit" in name or name == "retry-after"}


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [("ratelimit", DRAFT), ("x-ratelimit", TRIPLE), ("both", DRAFT | TRIPLE), ("none", {})],
)
@pytest.mark.parametrize("more", [{}, {"key": lambda request: "a"}])
def test_responses_tell_where_the_caller_stands(dialect: Any, expected: dict[str, str], more: Any) -> None:
    with served(RateLimitMiddleware(hello, counted("2/minute"), headers=dialect, **more)) as client:
        assert limit_headers(client.get("/")) == expected
        assert "retry-after" not in client.get("/404").headers
        denied = limit_headers(client.get("/"))
        assert denied.pop("retry-after") == "30"
        zero = {name: value.replace("r=1", "r=0") for name, value in expected.items()}
        assert denied == zero | ({"x-ratelimit-remaining": "0"} if "x-ratelimit-limit" in expected else {})


def test_of_several_limits_all_are_told_and_the_one_that_counts_at_the_moment() -> None:
    clock = ManualClock()
    app = RateLimitMiddleware(hello, counted(["2/second", "3/minute"], clock), headers="both")
    with served(app) as client:
        first = client.get("/")
        assert first.headers["RateLimit-Policy"] == '"2/second";q=2;w=1, "3/minute";q=3;w=60'
        assert first.headers["RateLimit"] == '"2/second";r=1;t=1'
        assert (first.headers["X-RateLimit-Limit"], first.headers["X-RateLimit-Remaining"]) == ("2", "1")
        client.get("/")
        assert client.get("/").headers["RateLimit"] == '"2/second";r=0;t=1'
        clock.advance(1)
        assert client.get("/").headers["RateLimit"] == '"3/minute";r=0;t=19'
        denied = client.get("/")
        assert denied.headers["RateLimit"] == '"3/minute";r=0;t=19'
        assert (denied.headers["X-RateLimit-Limit"], denied.headers["Retry-After"]) == ("3", "19")
        assert denied.json()["violated-policies"] == ["3/minute"]


def test_a_denial_can_have_another_body() -> None:
    def body(request: Any, denial: wire.Denial) -> tuple[str, str]:
        return f"{request.path}: wait {denial.retry_after_ms} ms, ä", "text/plain; charset=utf-8"

    with served(RateLimitMiddleware(hello, "blocked", body=body)) as client:
        denied = client.get("/x")
        assert (denied.status_code, denied.text) == (429, "/x: wait 60000 ms, ä")
        assert denied.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert denied.headers["Retry-After"] == "60"


def test_where_nothing_can_be_counted_it_is_not_the_callers_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
    with (
        RedisStore(url, on_failure="closed", timeout=1) as store,
        serving(RateLimitMiddleware(hello, Limiter("5/minute", store=store))) as server,
        client_of(server) as client,
    ):
        denied = client.get("/")
        assert (denied.status_code, denied.headers["Retry-After"]) == (503, "1")
        assert denied.json()["type"].endswith("#temporary-reduced-capacity")
        server.run(store.aclose())


# Frameworks ----------------------------------------------------------------------------------------------------------


def starlette_app(**options: Any) -> Any:
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("hello"))])
    app.add_middleware(RateLimitMiddleware, **options)
    return app


def fastapi_app(**options: Any) -> Any:
    app = FastAPI()
    app.add_middleware(RateLimitMiddleware, **options)

    @app.get("/")
    async def endpoint() -> JSONResponse:
        return JSONResponse("hello")

    return app


def litestar_app(**options: Any) -> Any:
    @litestar.get("/", sync_to_thread=False)
    def endpoint() -> str:
        return "hello"

    def limited(app: Any) -> Any:
        return RateLimitMiddleware(app, **options)

    return litestar.Litestar([endpoint], middleware=[limited])


class Urls:
    urlpatterns = (django.urls.path("", lambda request: django.http.HttpResponse("hello")),)


def django_app(**options: Any) -> Any:
    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"], SECRET_KEY="-")
    settings.ROOT_URLCONF = Urls
    return RateLimitMiddleware(get_asgi_application(), **options)


@pytest.mark.parametrize("framework", [starlette_app, fastapi_app, litestar_app, django_app])
def test_it_stands_before_the_frameworks_applications(framework: Callable[..., Any]) -> None:
    with served(framework(limiter=counted("2/minute"))) as client:
        answers = [client.get("/") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert ["hello" in answer.text for answer in answers] == [True, True, False]
        assert [answer.headers["RateLimit"][:13] for answer in answers] == [
            '"default";r=1',
            '"default";r=0',
            '"default";r=0',
        ]


def test_the_life_of_an_application_is_not_its_business() -> None:
    life = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, str]]:
        life.append("began")
        yield {"greeting": "hello"}
        life.append("ended")

    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse(request.state.greeting))], lifespan=lifespan)
    app.add_middleware(RateLimitMiddleware, limiter="blocked", exempt=lambda request: True)
    with serving(app, lifespan="on") as server, client_of(server) as client:
        assert client.get("/").text == "hello"
        assert life == ["began"]
    assert life == ["began", "ended"]


def test_what_it_does_not_know_it_passes_on() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    scope: Scope = {"type": "something.new"}
    asyncio.run(RateLimitMiddleware(app, "blocked")(scope, receive, send))
    assert seen == [(scope, receive, send)]


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "RateLimitMiddleware: expected a limiter or a gate, got None"),
        ({"limiter": "often"}, "limit 'often': expected 'COUNT/UNIT'"),
        ({"limiter": 5}, "RateLimitMiddleware limiter: expected a limit, its text, or several of either, got 5"),
        ({"gate": "1/minute"}, "RateLimitMiddleware gate: expected a Gate, got '1/minute'"),
        ({"limiter": "1/minute", "gate": Gate()}, "RateLimitMiddleware: expected a limiter or a gate, not both, got"),
        ({"limiter": "1/minute", "key": "x"}, "RateLimitMiddleware key: expected a function, got 'x'"),
        ({"limiter": "1/minute", "exempt": ["x"]}, "RateLimitMiddleware exempt: expected a function, got ['x']"),
        ({"limiter": "1/minute", "settle": 1}, "RateLimitMiddleware settle: expected a function, got 1"),
        ({"limiter": "1/minute", "body": "no"}, "RateLimitMiddleware body: expected a function, got 'no'"),
        ({"limiter": "1/minute", "cost": -1}, "RateLimitMiddleware cost: expected a whole number, 0 or more, or"),
        ({"limiter": "1/minute", "cost": 1.5}, "RateLimitMiddleware cost: expected a whole number, 0 or more, or"),
        ({"limiter": "1/minute", "tier": "heavy"}, "RateLimitMiddleware tier: expected a gate, which knows tiers"),
        (
            {"gate": Gate(), "tier": "huge"},
            "RateLimitMiddleware tier: expected one of light, normal, heavy, got 'huge'",
        ),
        (
            {"gate": Gate(), "routes": {"/": "1/minute"}},
            "RateLimitMiddleware tier: expected one of light, normal, heavy",
        ),
        ({"limiter": "1/minute", "routes": {"x": "1/minute"}}, "RateLimitMiddleware routes: expected a path such as"),
        ({"limiter": "1/minute", "routes": {"/": 5}}, "RateLimitMiddleware routes '/': expected a limit, its text, or"),
        ({"limiter": "1/minute", "skip": ["health"]}, "RateLimitMiddleware skip: expected a path such as"),
        (
            {"limiter": "1/minute", "counts": "some"},
            "RateLimitMiddleware counts: expected 'all', 'failures', 'successes'",
        ),
        (
            {"limiter": "1/minute", "headers": "loud"},
            "headers: expected one of ratelimit, x-ratelimit, both, none, got",
        ),
        ({"limiter": "1/minute", "proxies": ["?"]}, "proxies: expected addresses or networks such as '10.0.0.0/8'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        RateLimitMiddleware(hello, **options)
    assert str(error.value).startswith(text)


def failing(_: Any) -> Any:
    raise ZeroDivisionError("asked in vain")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"key": failing}, "asked in vain"),
        ({"exempt": failing}, "asked in vain"),
        ({"cost": failing}, "asked in vain"),
        ({"key": lambda _: 7}, "RateLimitMiddleware key: expected a function that returns a string or None, got 7"),
        ({"cost": lambda _: "much"}, "RateLimitMiddleware cost: expected a whole number, 0 or more, or"),
        ({"cost": lambda _: -1}, "RateLimitMiddleware cost: expected a whole number, 0 or more, or"),
        ({"cost": lambda _: True}, "RateLimitMiddleware cost: expected a whole number, 0 or more, or"),
    ],
)
def test_a_function_that_fails_is_the_applications_failure_and_nothing_is_counted(
    options: dict[str, Any], text: str, asynchronous: bool
) -> None:
    limiter = counted("5/minute")
    more: dict[str, Any] = {name: either(asynchronous, function) for name, function in options.items()}
    app = RateLimitMiddleware(hello, limiter, **more)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headgate") as client:
            await client.get("/")

    with pytest.raises((ZeroDivisionError, InvalidInput)) as error:
        asyncio.run(main())
    assert str(error.value).startswith(text)
    assert left(limiter) == 5


def test_a_tier_that_there_is_not_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(Policy(), store=MemoryStore(clock=ManualClock()))
    with served(RateLimitMiddleware(hello, gate=gate, key=lambda _: "a", tier=lambda _: "huge")) as client:
        assert client.get("/").status_code == 500
        expected = "RateLimitMiddleware tier: expected a function that returns one of light, normal, heavy, got 'huge'"
        wait_for(lambda: expected in caplog.text, "the server's log")
    assert [gate.peek("a", "http", tier).remaining for tier in ("light", "normal", "heavy")] == [120, 60, 10]


def test_those_who_are_not_known_are_warned_from_where_the_others_are() -> None:
    guard = Guard("test", limiter="60/minute", key=lambda request: None, wait=True)
    known, unknown = guard.counters("received", Limiter("10/minute", warn_at=0.3))
    decisions = [counter.check("a", "normal", 4) for counter in (known, unknown)]
    assert [decision.outcome for decision in decisions if isinstance(decision, Decision)] == [Outcome.WARN] * 2
