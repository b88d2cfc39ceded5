"""HTTP behind the ASGI middleware, with real servers and clients: who is counted for how much, and what is told."""

import asyncio
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

from headgate import Decision, Gate, InvalidInput, Limiter, ManualClock, MemoryStore, Outcome, Policy
from headgate.edges.asgi import Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.guard import Guard
from tests.support.asgi_server import app_server
from tests.support.greeting_app import (
    greeting_app,
    greeting_server,
    header,
    http_client,
    maybe_async,
    memory_limiter,
    remaining,
)
from tests.support.valkey import wait_for

pytestmark = pytest.mark.once


# Who, how much, which ------------------------------------------------------------------------------------------------


def test_b3_an_address_never_meets_a_key_of_the_same_name() -> None:
    with greeting_server(RateLimitMiddleware(greeting_app, memory_limiter("1/minute"), key=header("x-key"))) as client:
        asked = [{"X-Key": "127.0.0.1"}, {}, {"X-Key": "127.0.0.1"}, {"X-Key": ""}]
        assert [client.get("/", headers=headers).status_code for headers in asked] == [200, 200, 429, 429]


def test_keys_may_be_of_any_length_and_script() -> None:
    keys = ["ä" * 50, "x" * 5000, "x" * 5001]
    app = RateLimitMiddleware(
        greeting_app, memory_limiter("1/minute"), key=lambda request: keys[int(request.headers["x-key"])]
    )
    with greeting_server(app) as client:
        statuses = [client.get("/", headers={"X-Key": number}).status_code for number in "012012"]
    assert statuses == [200] * 3 + [429] * 3


@pytest.mark.parametrize("options", [{}, {"key": lambda request: "a"}, {"proxies": ["10.0.0.2"]}])
async def test_a_preflight_is_not_counted_whichever_case_the_server_gives_its_method(options: Any) -> None:
    app, seen = RateLimitMiddleware(greeting_app, memory_limiter("1/minute"), **options), []
    headers = [(b"origin", b"https://shop.example"), (b"access-control-request-method", b"POST")]

    async def send(message: Any) -> None:
        seen.extend([message["status"]] if "status" in message else [])

    async def receive() -> Any:
        return {"type": "http.request"}

    for method in ("GET", "OPTIONS", "options", "Options", "get"):
        scope = {"type": "http", "method": method, "path": "/", "headers": headers, "client": ("10.0.0.1", 1234)}
        await app(scope, receive, send)
    assert seen == [200, 200, 200, 200, 429]


# What is told --------------------------------------------------------------------------------------------------------


def test_headers_list_all_limits_and_the_one_nearest_to_denial() -> None:
    clock = ManualClock()
    app = RateLimitMiddleware(greeting_app, memory_limiter(["2/second", "3/minute"], clock), headers="both")
    with greeting_server(app) as client:
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
def test_applications_of_frameworks_are_limited(framework: Callable[..., Any]) -> None:
    with greeting_server(framework(limiter=memory_limiter("2/minute"))) as client:
        answers = [client.get("/") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert ["hello" in answer.text for answer in answers] == [True, True, False]
        assert [answer.headers["RateLimit"][:13] for answer in answers] == [
            '"default";r=1',
            '"default";r=0',
            '"default";r=0',
        ]


def test_lifespan_events_pass_through() -> None:
    life = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, str]]:
        life.append("began")
        yield {"greeting": "hello"}
        life.append("ended")

    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse(request.state.greeting))], lifespan=lifespan)
    app.add_middleware(RateLimitMiddleware, limiter="blocked", exempt=lambda request: True)
    with app_server(app, lifespan="on") as server, http_client(server) as client:
        assert client.get("/").text == "hello"
        assert life == ["began"]
    assert life == ["began", "ended"]


def test_unknown_scopes_pass_through() -> None:
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


def numbers(request: Any) -> Any:
    yield True


UNKNOWN_OPTION = (
    "RateLimitMiddleware: expected options among limiter, gate, store, name, websocket, key, cost, tier, exempt, "
    "routes, skip, counts, settle, refund_crashes, headers, proxies, body, got"
)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {},
            (
                "RateLimitMiddleware: expected a limiter or a gate (or 'unlimited', where only routes and holds have "
                "limits), got None"
            ),
        ),
        ({"limiter": "often"}, "limit: expected 'COUNT/UNIT'"),
        (
            {"limiter": 5},
            "RateLimitMiddleware limiter: expected a limit such as '5/minute', or several, got 5",
        ),
        ({"gate": "1/minute"}, "RateLimitMiddleware gate: expected a Gate, got '1/minute'"),
        ({"limiter": "1/minute", "gate": Gate()}, "RateLimitMiddleware: expected a limiter or a gate, not both, got"),
        ({"limiter": "1/minute", "key": "x"}, "RateLimitMiddleware key: expected a function, got 'x'"),
        ({"limiter": "1/minute", "exempt": ["x"]}, "RateLimitMiddleware exempt: expected a function, got ['x']"),
        ({"limiter": "1/minute", "settle": 1}, "RateLimitMiddleware settle: expected a function, got 1"),
        ({"limiter": "1/minute", "refund_crashes": 1}, "RateLimitMiddleware refund_crashes: expected True or False"),
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
        ({"limiter": "1/minute", "routes": {"/": 5}}, "RateLimitMiddleware routes '/': expected a limit such as '5"),
        ({"limiter": "1/minute", "routes": 5}, "RateLimitMiddleware routes: expected limits by pattern such as {'POST"),
        ({"limiter": "1/minute", "routes": {5: "1/hour"}}, "RateLimitMiddleware routes: expected limits by pattern"),
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
        (
            {"limiter": "1/minute", "headers": True},
            "headers: expected one of ratelimit, x-ratelimit, both, none, got True",
        ),
        ({"limiter": "1/minute", "proxies": ["?"]}, "proxies: expected addresses or networks such as '10.0.0.0/8'"),
        ({"limiter": "1/minute", "proxies": 5.5}, "proxies: expected addresses or networks such as '10.0.0.0/8'"),
        (
            {"limiter": "1/minute", "key_func": len},
            f"{UNKNOWN_OPTION} 'key_func'; did you mean key=? (docs/coming-from.md lists the names of other libraries)",
        ),
        ({"limiter": "1/minute", "times": 2, "seconds": 5}, f"{UNKNOWN_OPTION} 'times'; the limit is one text: '2 per"),
        ({"storage_uri": "redis://localhost"}, f"{UNKNOWN_OPTION} 'storage_uri'; did you mean store=?"),
        (
            {"limiter": "1/minute", "enabled": False},
            f"{UNKNOWN_OPTION} 'enabled'; did you mean exempt=? (docs/coming-from",
        ),
        ({"override_defaults": True}, f"{UNKNOWN_OPTION} 'override_defaults'; a pattern in routes= replaces limiter=,"),
        ({"key_style": "url"}, f"{UNKNOWN_OPTION} 'key_style'; RateLimit counts each endpoint, routes= each pattern"),
        (
            {"in_memory_fallback_enabled": True},
            f"{UNKNOWN_OPTION} 'in_memory_fallback_enabled'; a store counts in memory",
        ),
        ({"default_limits": ["1/minute"]}, f"{UNKNOWN_OPTION} 'default_limits'; put Depends(RateLimit(...)) on"),
        ({"limiter": "1/minute", "strategy": "moving-window"}, f"{UNKNOWN_OPTION} 'strategy'; say it in the limit:"),
        (
            {"limiter": Limiter("1/minute"), "store": MemoryStore()},
            "RateLimitMiddleware limiter: expected a limit, to be",
        ),
        (
            {"gate": Gate(Policy()), "store": MemoryStore()},
            "RateLimitMiddleware: expected a gate, which has a store, or",
        ),
        ({"limiter": "1/minute", "store": "postgres://x"}, "store: expected a URL such as redis://"),
        (
            {"limiter": "1/minute", "store": 5},
            "RateLimitMiddleware store: expected a store such as Memo",
        ),
        ({"limiter": "1/minute", "name": 5}, "RateLimitMiddleware name: expected a string, got 5"),
        (
            {"limiter": "1/minute", "exempt": numbers},
            "RateLimitMiddleware exempt: expected a function that returns",
        ),
        ({"limiter": "1/minute", "wait": True}, f"{UNKNOWN_OPTION} 'wait'; see docs/middleware.md"),
        ({"limiter": "1/minute", "proxy": ["::1"]}, f"{UNKNOWN_OPTION} 'proxy'; did you mean proxies=?"),
    ],
)
def test_invalid_options_are_refused(options: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        RateLimitMiddleware(greeting_app, **options)
    assert str(error.value).startswith(text)


def failing_view(_: Any) -> Any:
    raise ZeroDivisionError("asked in vain")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"key": failing_view}, "asked in vain"),
        ({"exempt": failing_view}, "asked in vain"),
        ({"cost": failing_view}, "asked in vain"),
        (
            {"key": lambda _: 7},
            "RateLimitMiddleware key: expected a function that returns a string, such as str(user.id), or None, got 7",
        ),
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
    app = RateLimitMiddleware(greeting_app, limiter, **more)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headgate") as client:
            await client.get("/")

    with pytest.raises((ZeroDivisionError, InvalidInput)) as error:
        asyncio.run(main())
    assert str(error.value).startswith(text)
    assert remaining(limiter) == 5


def test_an_unknown_tier_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(Policy(), store=MemoryStore(clock=ManualClock()))
    with greeting_server(
        RateLimitMiddleware(greeting_app, gate=gate, key=lambda _: "a", tier=lambda _: "huge")
    ) as client:
        assert client.get("/").status_code == 500
        expected = "RateLimitMiddleware tier: expected a function that returns one of light, normal, heavy, got 'huge'"
        wait_for(lambda: expected in caplog.text, "the server's log")
    assert [gate.peek("a", "http", tier).remaining for tier in ("light", "normal", "heavy")] == [120, 60, 10]


def test_anonymous_callers_are_warned_at_the_same_threshold() -> None:
    guard = Guard("test", {"key": lambda request: None}, limiter="60/minute", awaits=True)
    counters = guard.counters("test received", "received", Limiter("10/minute", warn_at=0.3))
    assert isinstance(counters, tuple)
    decisions = [counter.check("a", "normal", 4) for counter in counters]
    assert [decision.outcome for decision in decisions if isinstance(decision, Decision)] == [Outcome.WARN] * 2
