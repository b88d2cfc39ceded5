"""What all HTTP edges do alike: the ASGI middleware, the WSGI middleware and FastAPI's dependency, behind servers."""

import socket
import subprocess
import sys
from typing import Any
from uuid import uuid4

import httpx
import pytest

from headgate import Gate, Limiter, ManualClock, MemoryStore, Policy, RedisStore, StoreAway
from headgate.edges.asgi import RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.wsgi import RateLimitMiddleware as WsgiMiddleware
from headgate.http import ProblemDetails
from tests.support.greeting_app import greeting_app, greeting_server, header, maybe_async, memory_limiter, remaining
from tests.support.http_callers import get_statuses
from tests.support.http_edges import (
    AsgiEdge,
    Edge,
    FastapiEdge,
    WsgiEdge,
    client_at,
    client_of,
    edges,
    every_edge,
    sync_or_async,
    wsgi_server,
)
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.once


YEAR = 365 * 24 * 3600

# What is answered -----------------------------------------------------------------------------------------------------


@every_edge
def test_b3_by_default_each_address_is_limited_and_a_denial_says_when_to_retry(edge: type[Edge]) -> None:
    clock = ManualClock()
    app = edge(limiter=memory_limiter("2/minute", clock))
    with client_of(app) as client:
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
        clock.advance(29.999)
        denied = client.get("/")
        assert (denied.headers["Retry-After"], denied.json()["retry_after_ms"]) == ("1", 1000)
        clock.advance(0.001)
        assert client.get("/").text == "hello"
    assert len(app.served) == 3


def test_a_handler_that_fails_in_an_outage_has_crashed() -> None:
    limiter = Limiter("5/hour")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise StoreAway("nobody there")

    def wsgi_app(environ: Any, start_response: Any) -> list[bytes]:
        raise StoreAway("nobody there")

    with greeting_server(RateLimitMiddleware(app, limiter, refund_crashes=True, key=lambda request: "a")) as client:
        assert client.get("/").status_code == 503
    crashing = WsgiMiddleware(wsgi_app, limiter, refund_crashes=True, key=lambda request: "b")
    with wsgi_server(crashing) as at, client_at(at) as client:
        assert client.get("/").status_code == 503
    assert [limiter.peek(key).remaining for key in "ab"] == [5, 5]


@pytest.mark.parametrize("options", [{}, {"settle": lambda request, response: 2}])
def test_f1_a_status_that_cant_be_read_in_an_outage_is_a_503(options: dict[str, Any]) -> None:
    policy = Policy(accounts={"default": {"agent": {"usd": "5/calendar day"}}})
    with unused_port() as port, Gate(policy, store=f"redis://127.0.0.1:{port}") as gate:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await gate.aexplain("planner")

        def wsgi_app(environ: Any, start_response: Any) -> list[bytes]:
            gate.explain("planner")
            return []

        with greeting_server(RateLimitMiddleware(app, "100/minute", **options)) as client:
            answers = [client.get("/") for _ in range(2)]  # what is the same for all is known from the second on
        with wsgi_server(WsgiMiddleware(wsgi_app, "100/minute", **options)) as at, client_at(at) as client:
            answers.append(client.get("/"))
    for answer in answers:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["detail"] == "limits can't be read or changed at the moment; try again in 1 s"
        assert (answer.json()["type"].partition("#")[2], answer.json()["error"]) == (
            "temporary-reduced-capacity",
            "rate_limited",
        )
        assert "ratelimit" not in answer.headers


@pytest.mark.parametrize("edge", [AsgiEdge, WsgiEdge])
def test_a_cors_preflight_counts_only_where_a_pattern_matches(edge: type[Edge]) -> None:
    preflight = {"Origin": "https://shop.example", "Access-Control-Request-Method": "POST"}
    with client_of(edge(limiter="2/minute")) as client:
        answers = [client.options("/", headers=preflight) for _ in range(5)]
        assert all(answer.status_code != 429 and "ratelimit" not in answer.headers for answer in answers)
        assert client.get("/").headers["ratelimit"].startswith('"default";r=1')
        plain = [client.options("/", headers={name: preflight[name]}) for name in preflight]
        assert [answer.status_code == 429 for answer in plain] == [False, True], "other OPTIONS requests count"
        assert client.get("/", headers=preflight).status_code == 429
    for pattern in ("OPTIONS *", "/login"):
        with client_of(edge(limiter="1/minute", routes={pattern: "1/minute", "OPTIONS /upload": "5/minute"})) as client:
            assert [client.options("/login", headers=preflight).status_code == 429 for _ in range(2)] == [False, True]
            if pattern == "/login":
                assert all(client.options("/other", headers=preflight).status_code != 429 for _ in range(3))


@pytest.mark.parametrize("edge", [AsgiEdge, WsgiEdge])
def test_head_counts_like_get_and_its_denial_has_no_body(edge: type[Edge]) -> None:
    with client_of(edge(limiter="9/minute", routes={"GET /": "2/minute"})) as client:
        assert [client.get("/").status_code, client.head("/").status_code] == [200, 200]
        denied = client.head("/")
        assert (denied.status_code, denied.content, denied.headers["retry-after"]) == (429, b"", "30")


DRAFT = {"ratelimit-policy": '"default";q=2;w=60', "ratelimit": '"default";r=1;t=30'}
TRIPLE = {"x-ratelimit-limit": "2", "x-ratelimit-remaining": "1", "x-ratelimit-reset": "30"}


def limit_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if "ratelimit" in name or name == "retry-after"}


@every_edge
@pytest.mark.parametrize(
    ("dialect", "expected"),
    [("ratelimit", DRAFT), ("x-ratelimit", TRIPLE), ("both", DRAFT | TRIPLE), ("none", {})],
)
@pytest.mark.parametrize("more", [{}, {"key": lambda request: "a"}], ids=["address", "key"])
def test_responses_say_how_much_is_left(edge: type[Edge], dialect: Any, expected: dict[str, str], more: Any) -> None:
    with client_of(edge(limiter=memory_limiter("2/minute"), headers=dialect, **more)) as client:
        assert limit_headers(client.get("/")) == expected
        assert "retry-after" not in client.get("/404").headers
        denied = limit_headers(client.get("/"))
        assert denied.pop("retry-after") == "30"
        zero = {name: value.replace("r=1", "r=0") for name, value in expected.items()}
        assert denied == zero | ({"x-ratelimit-remaining": "0"} if "x-ratelimit-limit" in expected else {})


@every_edge
def test_a_large_burst_that_refills_over_a_million_years_is_enforced_and_told(edge: type[Edge]) -> None:
    limiter = memory_limiter("1/year burst 1000000")
    with client_of(edge(limiter=limiter, headers="both")) as client:
        first = client.get("/")
        assert (first.status_code, first.headers["X-RateLimit-Remaining"]) == (200, "999999")
        assert first.headers["RateLimit-Policy"] == f'"default";q=1000000;w={1_000_000 * YEAR}'
        assert first.headers["RateLimit"] == f'"default";r=999999;t={YEAR}'
        limiter.charge("127.0.0.1", 499_999)
        half = client.get("/")
        assert (half.status_code, half.headers["X-RateLimit-Remaining"]) == (200, "499999")
        assert half.headers["X-RateLimit-Reset"] == "999999999"  # a larger number would be read as a date
        limiter.charge("127.0.0.1", 499_999)
        denied = client.get("/")
        assert (denied.status_code, denied.headers["Retry-After"]) == (429, str(YEAR))
        assert denied.json()["retry_after_ms"] == YEAR * 1000
        limiter.charge("127.0.0.1", 1_000_000)
        assert int(client.get("/").headers["Retry-After"]) > 285 * YEAR


@sync_or_async
def test_a_denial_can_have_another_body(edge: type[Edge], asynchronous: bool) -> None:
    def body(request: Any, problem: ProblemDetails) -> tuple[str, str]:
        return f"{request.path}: wait {problem.retry_after_ms} ms, ä", "text/plain; charset=utf-8"

    with client_of(edge(limiter="blocked", body=maybe_async(asynchronous, body))) as client:
        denied = client.get("/café")
        assert (denied.status_code, denied.text) == (429, "/café: wait 60000 ms, ä")
        assert denied.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert denied.headers["Retry-After"] == "60"


@every_edge
def test_a_full_store_is_not_the_callers_fault(edge: type[Edge]) -> None:
    limiter = Limiter("5/minute", store=MemoryStore(clock=ManualClock(), max_keys=1))
    limiter.check("somebody")
    app = edge(limiter=limiter)
    with client_of(app) as client:
        denied = client.get("/")
        assert (denied.status_code, denied.headers["Retry-After"]) == (503, "1")
        assert denied.json()["type"].endswith("#temporary-reduced-capacity")
    assert app.served == []


@every_edge
def test_a_503_says_nothing_of_a_rate_that_nobody_has_counted(edge: type[Edge]) -> None:
    with (
        unused_port() as away,
        RedisStore(f"redis://127.0.0.1:{away}") as store,
        client_of(edge(limiter=Limiter("60/minute; 2 in flight", store=store), headers="both")) as client,
    ):
        denied = client.get("/")
    assert (denied.status_code, denied.headers["Retry-After"]) == (503, "1")
    assert not [name for name in denied.headers if "ratelimit" in name]


# Who is counted -------------------------------------------------------------------------------------------------------


@sync_or_async
def test_functions_choose_key_cost_and_exemption(edge: type[Edge], asynchronous: bool) -> None:
    limiter = memory_limiter("10/minute")
    app = edge(
        limiter=limiter,
        key=maybe_async(asynchronous, header("x-key")),
        cost=maybe_async(asynchronous, lambda request: int(request.headers.get("x-cost", 1))),
        exempt=maybe_async(asynchronous, lambda request: request.headers.get("x-key") == "admin"),
    )
    with client_of(app) as client:

        def ask(key: str, cost: int = 1) -> httpx.Response:
            return client.get("/", headers={"X-Key": key, "X-Cost": str(cost)})

        assert [ask("a", cost).status_code for cost in (7, 4, 3, 0)] == [200, 429, 200, 200]
        assert [ask("b", 10).status_code, ask("c", 11).status_code] == [200, 429]
        assert (ask("admin", 100).status_code, limit_headers(ask("admin", 100))) == (200, {})
    assert [remaining(limiter, key) for key in ("a", "b", "admin", "c", "127.0.0.1")] == [0, 0, 10, 10, 10]


@sync_or_async
def test_a_key_function_is_asked_once_for_each_request_whatever_comes_of_it(
    edge: type[Edge], asynchronous: bool
) -> None:
    asked: list[Any] = []

    def key(request: Any) -> Any:
        asked.append(request.headers.get("x-key"))
        return asked[-1]

    app = edge(limiter=memory_limiter("2/minute"), key=maybe_async(asynchronous, key), proxies=["127.0.0.1"])
    callers = [{"X-Key": "a"}, {"X-Key": "192.0.2.1"}, {"X-Forwarded-For": "192.0.2.1"}, {}]
    with client_of(app) as client:
        for status, left in [(200, 1), (200, 0), (429, 0)]:
            answers = [client.get("/", headers=headers) for headers in callers]
            assert [answer.status_code for answer in answers] == [status] * 4
            assert [answer.headers["RateLimit"].split(";")[:2] for answer in answers] == [
                ['"default"', f"r={left}"]
            ] * 4
    assert asked == ["a", "192.0.2.1", None, None] * 3


@every_edge
@pytest.mark.parametrize("sent", ["X-Api-Key", "x-api-key", "X-API-KEY"])
def test_the_headers_of_a_request_are_found_by_names_in_any_case(edge: type[Edge], sent: str) -> None:
    seen: list[Any] = []

    def key(request: Any) -> str:
        headers = request.headers
        seen.append({name: value for name, value in headers.items() if name in ("x-api-key", "content-type")})
        seen.append("X-API-Key" in headers and "Content-Type" in headers and "X-Api" not in headers)
        seen.append(headers.get("X-Api", "none"))
        found: str = headers["X-Api-Key"]
        assert found == headers["x-api-key"] == headers.get("X-API-KEY")
        return found

    limiter = memory_limiter("10/minute")
    with client_of(edge(limiter=limiter, key=key)) as client:
        assert client.post("/", headers={sent: "ann", "content-type": "text/plain"}).status_code == 200
    assert seen == [{"x-api-key": "ann", "content-type": "text/plain"}, True, "none"]
    assert remaining(limiter, "ann") == 9


def test_listing_the_headers_of_a_request_takes_a_time_that_grows_with_their_number_alone() -> None:
    """uvicorn doesn't bound it; its square would block the event loop for minutes, before any limit."""
    script = """if True:
        from headgate.edges.requests import AsgiRequest, Proxies
        for names in ([b"x-%d" % number for number in range(100_000)], [b"x"] * 100_000):
            headers = [(name, b"value") for name in names]
            found = dict(AsgiRequest({"headers": headers}, Proxies()).headers)
            assert sum(value.count("value") for value in found.values()) == 100_000
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)


@sync_or_async
def test_b3_a_gate_limits_agents_by_tier_and_others_by_address(edge: type[Edge], asynchronous: bool) -> None:
    clock = ManualClock()
    policy = Policy(limits={"heavy": "2/minute"}, addresses={"limit": "1/minute"}, exempt=["boss"])
    gate = Gate(policy, store=MemoryStore(clock=clock))
    app = edge(
        gate=gate,
        key=maybe_async(asynchronous, header("x-agent")),
        tier=maybe_async(asynchronous, lambda request: request.headers.get("x-tier", "normal")),
    )
    with client_of(app) as client:

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
        assert gate.standing("a").violations == 1
        assert not gate.is_rate_limited("127.0.0.1")
        assert gate.peek("a", "ws", "heavy").remaining == 2
        clock.advance(60)
        assert [ask("a").status_code, ask().status_code] == [200, 200]


@every_edge
@pytest.mark.parametrize(
    ("proxies", "passes"),
    [((), 1), (["192.0.2.0/24"], 1), (["unix"], 1), (["127.0.0.1"], 5), (["10.0.0.0/8", "127.0.0.0/8"], 5)],
)
def test_a_forged_address_changes_nothing_unless_a_trusted_proxy_sends_it(
    edge: type[Edge], proxies: Any, passes: int
) -> None:
    with client_of(edge(limiter=memory_limiter("1/minute"), proxies=proxies)) as client:
        forged = [{"X-Forwarded-For": f"192.0.2.{number}"} for number in range(5)]
        answered = [client.get("/", headers=headers).status_code for headers in forged]
        assert answered == [200] * passes + [429] * (5 - passes)
        # A client behind the proxy can't speak for others, whatever it puts in front.
        spoofed = {"X-Forwarded-For": "6.6.6.6, 192.0.2.1", "X-Real-IP": "6.6.6.6", "Forwarded": "for=6.6.6.6"}
        assert client.get("/", headers=spoofed).status_code == 429


@edges(AsgiEdge, WsgiEdge)
def test_routes_have_limits_of_their_own_and_some_requests_are_skipped(edge: type[Edge]) -> None:
    shared = memory_limiter("1/minute", name="shared")
    app = edge(
        limiter=memory_limiter("3/minute"),
        routes={"POST /login": "1/minute", "/a/{id}": shared, "/b/*": shared, "/open/gate": "unlimited"},
        skip=["/health", "GET /open/*"],
    )
    with client_of(app) as client:

        def ask(method: str, *paths: str) -> list[int]:
            return [client.request(method, path).status_code for path in paths]

        assert ask("POST", "/login", "/login") == [200, 429]
        assert client.post("/login").json()["tier"] == "POST /login"
        assert ask("GET", "/a/1", "/b/2", "/a/3") == [200, 429, 429]
        assert client.get("/a/4").json()["tier"] == "shared"
        assert ask("GET", "/health", "/open/1", "/health", "/open/2") == [200] * 4
        assert ask("GET", "/login", "/", "/x?y=1", "/") == [200, 200, 200, 429]
        assert ask("POST", "/health", "/open/1") == [200, 429]
        assert ask("POST", "/open/gate", "/open/gate") == [200, 200]


@edges(AsgiEdge, WsgiEdge)
def test_routes_of_a_gate_are_tiers(edge: type[Edge]) -> None:
    gate = Gate(Policy(), store=MemoryStore(clock=ManualClock()))
    with client_of(edge(gate=gate, key=lambda request: "a", routes={"POST *": "heavy", "/status": "light"})) as client:
        client.post("/"), client.post("/status"), client.get("/status"), client.get("/")
    assert [gate.peek("a", "http", tier).remaining for tier in ("heavy", "light", "normal")] == [8, 119, 59]


@pytest.mark.parametrize(("counts", "left"), [("all", 3), (lambda status: status != 429, 4)])
def test_middlewares_with_keys_of_their_own_for_some_routes_can_be_combined(counts: Any, left: int) -> None:
    outer, inner = memory_limiter("5/minute"), memory_limiter("1/minute")
    by_name = RateLimitMiddleware(greeting_app, "unlimited", key=header("x-name"), routes={"/200": inner})
    with greeting_server(RateLimitMiddleware(by_name, outer, counts=counts, skip=["/204"])) as client:
        assert [client.get("/200", headers={"X-Name": "ann"}).status_code for _ in range(2)] == [200, 429]
        wait_for(lambda: remaining(outer) == left, "the remaining quota")
        assert client.get("/204", headers={"X-Name": "ann"}).status_code == 204


# Bodies and connections -----------------------------------------------------------------------------------------------


@every_edge
def test_a_slow_client_is_denied_before_its_body_has_come(edge: type[Edge]) -> None:
    with edge(limiter="blocked").serve() as port, socket.create_connection(("127.0.0.1", port), PATIENCE) as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome of it")
        assert slow.recv(65536).split()[1] == b"429"


@pytest.mark.parametrize(
    ("edge", "more"),
    [
        *[(edge, {}) for edge in (AsgiEdge, FastapiEdge, WsgiEdge)],
        *[(edge, {"key": lambda request: "127.0.0.1"}) for edge in (AsgiEdge, FastapiEdge, WsgiEdge)],
        *[(edge, {"settle": lambda request, response: 3}) for edge in (AsgiEdge, WsgiEdge)],
    ],
)
def test_responses_are_streamed_and_what_follows_them_runs(edge: type[Edge], more: dict[str, Any]) -> None:
    limiter = memory_limiter("10/minute")
    app = edge(limiter=limiter, **more)
    with client_of(app) as client:
        with client.stream("GET", "/stream") as response:
            assert response.headers["RateLimit"].startswith('"default";r=9')
            parts = response.iter_raw()
            assert next(parts) == b"first"
            app.heard.set()
            assert b"".join(parts) == b"last"
        assert app.finished.wait(PATIENCE)
    assert remaining(limiter) == (7 if "settle" in more else 9)


@every_edge
def test_a_request_whose_client_leaves_stays_counted(edge: type[Edge], limiter: Limiter) -> None:
    app = edge(limiter=limiter)
    with client_of(app) as client:
        with client.stream("GET", "/endless") as response:
            next(response.iter_raw())
        assert app.finished.wait(PATIENCE)
    assert remaining(limiter) == 4


@edges(AsgiEdge, FastapiEdge)
def test_denials_leave_a_connection_as_it_was(edge: type[Edge]) -> None:
    clock = ManualClock()
    app = edge(limiter=memory_limiter("2/minute", clock))
    with client_of(app) as client:
        for _ in range(3):
            assert [client.get("/").status_code for _ in range(4)] == [200, 200, 429, 429]
            assert client.post("/", content=b"unread" * 20_000).status_code == 429
            assert client.post("/", content=iter([b"unread"] * 1000)).status_code == 429
            assert client.head("/").status_code == 429
            clock.advance(60)
    assert len(set(app.served)) == 1


# Many at once ---------------------------------------------------------------------------------------------------------


@edges(AsgiEdge, FastapiEdge)
def test_200_clients_at_once_are_counted_exactly(edge: type[Edge]) -> None:
    with edge(limiter=memory_limiter("60/minute")).serve() as port:
        assert get_statuses(200, port) == [200] * 60 + [429] * 140


@pytest.mark.long
@edges(AsgiEdge, FastapiEdge)
@pytest.mark.parametrize("by", ["limiter", "gate"])
def test_200_clients_of_two_nodes_at_once_are_counted_exactly(
    edge: type[Edge], by: str, redis_server: ValkeyServer
) -> None:
    with RedisStore(redis_server.url, prefix=f"{uuid4().hex}:", clock=ManualClock(), timeout=PATIENCE) as store:
        gate = Gate(Policy(addresses={"limit": "60/minute"}), store=store)
        app = edge(gate=gate) if by == "gate" else edge(limiter=Limiter("60/minute", store=store))
        with app.serve() as one, app.serve() as two:
            assert get_statuses(100, one, two) == [200] * 60 + [429] * 140
        gate.close()
