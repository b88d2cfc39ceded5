"""HTTP behind the ASGI middleware, with real servers and clients: who is counted for how much, and what is told."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import django.http
import django.urls
import httpx
import litestar
import pytest
from django.conf import settings
from django.core.asgi import get_asgi_application
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headgate import Decision, Gate, InvalidInput, Limiter, ManualClock, MemoryStore, Outcome, Policy, RedisStore
from headgate.edges.asgi import Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.guard import Guard
from headgate.http import ProblemDetails
from tests.support.asgi_server import serving
from tests.support.greeting_app import client_of, header, hello, maybe_async, memory_limiter, remaining, served
from tests.support.ports import nobody
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once


# Who, how much, which ------------------------------------------------------------------------------------------------


def test_b3_without_more_each_address_is_counted_and_denials_say_how_long_to_wait() -> None:
    clock = ManualClock()
    with served(RateLimitMiddleware(hello, memory_limiter("2/minute", clock))) as client:
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
    limiter = memory_limiter("1/minute")
    with (
        serving(RateLimitMiddleware(hello, limiter), host="::1") as server,
        httpx.Client(base_url=f"http://[::1]:{server.port}", timeout=PATIENCE) as client,
    ):
        assert [client.get("/").status_code, client.get("/").status_code] == [200, 429]
    assert remaining(limiter, "::/64") == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_key_cost_and_exemption_are_asked_for_by_functions(asynchronous: bool) -> None:
    limiter = memory_limiter("10/minute")
    app = RateLimitMiddleware(
        hello,
        limiter,
        key=maybe_async(asynchronous, header("x-key")),
        cost=maybe_async(asynchronous, lambda request: int(request.headers.get("x-cost", 1))),
        exempt=maybe_async(asynchronous, lambda request: request.headers.get("x-key") == "admin"),
    )
    with served(app) as client:

        def status(key: str, cost: int = 1) -> int:
            return client.get("/", headers={"X-Key": key, "X-Cost": str(cost)}).status_code

        assert [status("a", 7), status("a", 4), status("a", 3)] == [200, 429, 200]
        assert [status("a", 0), status("b", 10)] == [200, 200]
        assert [status("admin", 100), status("c", 11)] == [200, 429]
    assert [remaining(limiter, key) for key in ("a", "b", "admin", "c", "127.0.0.1")] == [0, 0, 10, 10, 10]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_b3_a_gate_counts_agents_by_tier_and_who_is_not_known_by_address(asynchronous: bool) -> None:
    clock = ManualClock()
    policy = Policy(limits={"heavy": "2/minute"}, addresses={"limit": "1/minute"}, exempt=["boss"])
    gate = Gate(policy, store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(
        hello,
        gate=gate,
        key=maybe_async(asynchronous, header("x-agent")),
        tier=maybe_async(asynchronous, lambda request: request.headers.get("x-tier", "normal")),
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
    with served(RateLimitMiddleware(hello, memory_limiter("1/minute"), key=header("x-key"))) as client:
        asked = [{"X-Key": "127.0.0.1"}, {}, {"X-Key": "127.0.0.1"}, {"X-Key": ""}]
        assert [client.get("/", headers=headers).status_code for headers in asked] == [200, 200, 429, 429]


def test_keys_may_be_of_any_length_and_script() -> None:
    keys = ["ä" * 50, "x" * 5000, "x" * 5001]
    app = RateLimitMiddleware(
        hello, memory_limiter("1/minute"), key=lambda request: keys[int(request.headers["x-key"])]
    )
    with served(app) as client:
        statuses = [client.get("/", headers={"X-Key": number}).status_code for number in "012012"]
    assert statuses == [200] * 3 + [429] * 3


def test_routes_have_limits_of_their_own_and_some_requests_are_skipped() -> None:
    shared = memory_limiter("1/minute", name="shared")
    app = RateLimitMiddleware(
        hello,
        memory_limiter("3/minute"),
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
    with served(RateLimitMiddleware(hello, memory_limiter("2/minute"), headers=dialect, **more)) as client:
        assert limit_headers(client.get("/")) == expected
        assert "retry-after" not in client.get("/404").headers
        denied = limit_headers(client.get("/"))
        assert denied.pop("retry-after") == "30"
        zero = {name: value.replace("r=1", "r=0") for name, value in expected.items()}
        assert denied == zero | ({"x-ratelimit-remaining": "0"} if "x-ratelimit-limit" in expected else {})


def test_of_several_limits_all_are_told_and_the_one_that_counts_at_the_moment() -> None:
    clock = ManualClock()
    app = RateLimitMiddleware(hello, memory_limiter(["2/second", "3/minute"], clock), headers="both")
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
    def body(request: Any, problem: ProblemDetails) -> tuple[str, str]:
        return f"{request.path}: wait {problem.retry_after_ms} ms, ä", "text/plain; charset=utf-8"

    with served(RateLimitMiddleware(hello, "blocked", body=body)) as client:
        denied = client.get("/x")
        assert (denied.status_code, denied.text) == (429, "/x: wait 60000 ms, ä")
        assert denied.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert denied.headers["Retry-After"] == "60"


def test_where_nothing_can_be_counted_it_is_not_the_callers_fault() -> None:
    with (
        nobody() as port,
        RedisStore(f"redis://127.0.0.1:{port}", on_failure="closed", timeout=1) as store,
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

    return litestar.Litestar([endpoint], middleware=[limited], logging_config=None)


class Urls:
    urlpatterns = (django.urls.path("", lambda request: django.http.HttpResponse("hello")),)


def django_app(**options: Any) -> Any:
    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"], SECRET_KEY="-")
    settings.ROOT_URLCONF = Urls
    return RateLimitMiddleware(get_asgi_application(), **options)


@pytest.mark.parametrize("framework", [starlette_app, fastapi_app, litestar_app, django_app])
def test_it_stands_before_the_frameworks_applications(framework: Callable[..., Any]) -> None:
    with served(framework(limiter=memory_limiter("2/minute"))) as client:
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


UNKNOWN_OPTION = (
    "RateLimitMiddleware: expected options among key, cost, tier, exempt, routes, skip, counts, settle, headers, "
    "proxies, body, got"
)


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
        ({"limiter": "1/minute", "routes": 5}, "RateLimitMiddleware routes: expected limits by pattern such as {'POST"),
        ({"limiter": "1/minute", "skip": ["health"]}, "RateLimitMiddleware skip: expected a path such as"),
        ({"limiter": "1/minute", "skip": 5}, "RateLimitMiddleware skip: expected patterns such as ['/health', '/stat"),
        (
            {"limiter": "1/minute", "counts": "some"},
            "RateLimitMiddleware counts: expected 'all', 'failures', 'successes'",
        ),
        (
            {"limiter": "1/minute", "headers": "loud"},
            "headers: expected one of ratelimit, x-ratelimit, both, none, got",
        ),
        ({"limiter": "1/minute", "proxies": ["?"]}, "proxies: expected addresses or networks such as '10.0.0.0/8'"),
        ({"limiter": "1/minute", "proxies": 5.5}, "proxies: expected addresses or networks such as '10.0.0.0/8'"),
        (
            {"limiter": "1/minute", "key_func": len},
            f"{UNKNOWN_OPTION} 'key_func'; slowapi's key_func is key here, a function of the request",
        ),
        ({"limiter": "1/minute", "wait": True}, f"{UNKNOWN_OPTION} 'wait'; see headgate.edges.guard.Options"),
        ({"limiter": "1/minute", "proxy": ["::1"]}, f"{UNKNOWN_OPTION} 'proxy'; did you mean proxies?"),
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
    limiter = memory_limiter("5/minute")
    more: dict[str, Any] = {name: maybe_async(asynchronous, function) for name, function in options.items()}
    app = RateLimitMiddleware(hello, limiter, **more)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headgate") as client:
            await client.get("/")

    with pytest.raises((ZeroDivisionError, InvalidInput)) as error:
        asyncio.run(main())
    assert str(error.value).startswith(text)
    assert remaining(limiter) == 5


def test_a_tier_that_there_is_not_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(Policy(), store=MemoryStore(clock=ManualClock()))
    with served(RateLimitMiddleware(hello, gate=gate, key=lambda _: "a", tier=lambda _: "huge")) as client:
        assert client.get("/").status_code == 500
        expected = "RateLimitMiddleware tier: expected a function that returns one of light, normal, heavy, got 'huge'"
        wait_for(lambda: expected in caplog.text, "the server's log")
    assert [gate.peek("a", "http", tier).remaining for tier in ("light", "normal", "heavy")] == [120, 60, 10]


def test_those_who_are_not_known_are_warned_from_where_the_others_are() -> None:
    guard = Guard("test", {"key": lambda request: None}, limiter="60/minute", awaits=True)
    known, unknown = guard.counters("received", Limiter("10/minute", warn_at=0.3))
    decisions = [counter.check("a", "normal", 4) for counter in (known, unknown)]
    assert [decision.outcome for decision in decisions if isinstance(decision, Decision)] == [Outcome.WARN] * 2
