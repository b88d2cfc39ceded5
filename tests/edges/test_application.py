"""One store, one name, one 429 and one set of headers for all limits of an application."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from fastapi import APIRouter, Depends, FastAPI
from flask import Flask
from starlette.applications import Starlette

from headgate import Gate, Limiter, ManualClock, MemoryStore, Policy, RedisStore, workers
from headgate.edges.application import ApplicationSettings
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.decorator import rate_limited
from headgate.edges.fastapi import RateLimit
from headgate.edges.wsgi import RateLimitMiddleware as WsgiMiddleware
from tests.support.asgi_server import app_server
from tests.support.greeting_app import greeting_app, greeting_server, header
from tests.support.http_edges import client_at, wsgi_server
from tests.support.server_process import server_process
from tests.support.valkey import ValkeyServer, wait_for

pytestmark = pytest.mark.once

SHARED = Limiter("4/minute", name="shared")


def shop(*middleware: dict[str, Any], limit: Any = "3/minute", **options: Any) -> FastAPI:
    """Two routes with the same limit, and one with that of a name."""
    app = FastAPI()

    @app.get("/login", dependencies=[Depends(RateLimit(limit, **options))])
    def login() -> None: ...

    @app.get("/export", dependencies=[Depends(RateLimit(limit, **options))])
    def export() -> None: ...

    for one in middleware:
        app.add_middleware(RateLimitMiddleware, **one)
    return app


def passed(client: Any, path: str, **headers: str) -> int:
    """How many of ten requests pass."""
    return sum(client.get(path, headers=headers).status_code == 200 for _ in range(10))


# The store ------------------------------------------------------------------------------------------------------------


def test_dependencies_count_in_the_store_of_the_middleware(redis_server: ValkeyServer) -> None:
    name = uuid4().hex
    settings = {"store": redis_server.url, "name": name, "limiter": "30/minute"}
    with greeting_server(shop(settings)) as one, greeting_server(shop(settings)) as other:
        assert [passed(one, "/login"), passed(other, "/login"), passed(other, "/export")] == [3, 0, 3]
        assert other.get("/nothing").headers["ratelimit"].startswith(f'"{name}";r=')
    with greeting_server(shop(settings | {"name": uuid4().hex})) as third:
        assert passed(third, "/login") == 3, "another name counts apart"


@pytest.mark.parametrize("where", ["memory", "redis"])
def test_two_routes_with_equal_limits_count_apart_unless_they_have_the_same_name(
    where: str, redis_server: ValkeyServer
) -> None:
    with RedisStore(redis_server.url, prefix=uuid4().hex) as redis:
        store = redis if where == "redis" else MemoryStore()
        with greeting_server(shop({"store": store})) as client:
            assert [passed(client, "/login"), passed(client, "/export")] == [3, 3]
        assert not isinstance(store, MemoryStore) or len(store) == 2, "they are counted there"
        with greeting_server(shop({"store": store}, name="both")) as client:
            assert [passed(client, "/login"), passed(client, "/export")] == [3, 0]
    app = FastAPI()
    with RedisStore(redis_server.url, prefix=uuid4().hex) as redis:
        store = redis if where == "redis" else MemoryStore()
        for path in ("/login", "/export"):
            app.get(path, dependencies=[Depends(RateLimit(Limiter("3/minute", store=store)))])(lambda: None)
        shared = Limiter("4/minute", store=store, name="shared")
        for path in ("/a", "/b"):
            app.get(path, dependencies=[Depends(RateLimit(shared))])(lambda: None)
        for path in ("/c", "/d"):
            app.get(path, dependencies=[Depends(RateLimit(Limiter("5/minute", store=store), name="cd"))])(lambda: None)
        with greeting_server(app) as client:
            assert [passed(client, path) for path in ("/login", "/export")] == [3, 3]
            assert [passed(client, path) for path in ("/a", "/b")] == [4, 0], "a limiter with a name counts together"
            assert [passed(client, path) for path in ("/c", "/d")] == [5, 0], "one name counts together"
        assert shared.peek("127.0.0.1").remaining == 0, "a limiter counts where it can be looked at"


def test_without_a_store_each_application_counts_for_itself() -> None:
    router = APIRouter()

    @router.get("/", dependencies=[Depends(RateLimit("1/minute", name="home"))])
    def home() -> None: ...

    for _ in range(2):
        app = FastAPI()
        app.include_router(router)
        with greeting_server(app) as client:
            assert passed(client, "/") == 1


async def start(app: Any) -> list[Any]:
    """The messages that an application answers its startup with."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup" if not sent else "lifespan.shutdown"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "lifespan", "state": {}}, receive, send)
    return sent


async def test_an_application_doesnt_start_with_a_store_that_cant_be_used(redis_server: ValkeyServer) -> None:
    url = redis_server.url.replace("://", "://nobody:secret@")
    more: list[Any] = [None]
    failed: Any = None
    for _ in range(5):
        if more:  # the first time, or the server didn't answer in time: the application starts without it then
            failed, *more = await start(RateLimitMiddleware(shop(), "1/minute", store=url))
    assert (failed["type"], more) == ("lifespan.startup.failed", [])
    assert failed["message"].startswith("RateLimitMiddleware store: ")
    assert "secret" not in failed["message"]


async def test_an_application_doesnt_start_with_two_stores() -> None:
    settings = [{"store": MemoryStore(), "limiter": "5/minute"} for _ in range(2)]
    failed, *more = await start(shop(*settings))
    assert (failed["type"], more) == ("lifespan.startup.failed", [])
    assert failed["message"] == (
        "RateLimitMiddleware store: expected one store for an application, got two; "
        "pass the same object to all middleware"
    )
    settings[1]["store"] = settings[0]["store"]
    assert [message["type"] for message in await start(shop(*settings))] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


def test_a_mounted_application_may_have_a_store_of_its_own() -> None:
    inner, outer = MemoryStore(), MemoryStore()
    app = shop({"store": outer, "limiter": "90/minute"})
    app.mount("/inner", shop({"store": inner, "limiter": "90/minute"}))
    with greeting_server(app) as client:
        assert [passed(client, path) for path in ("/inner/login", "/login")] == [3, 3]
    assert (len(inner), len(outer)) == (2, 2)


def test_a_request_counts_once_under_a_name() -> None:
    app = FastAPI(dependencies=[Depends(RateLimit("4/minute", name="api"))])

    @app.get("/login", dependencies=[Depends(RateLimit("4/minute", name="api"))])
    @app.get("/login/")
    def login() -> None: ...

    with greeting_server(app) as client:
        assert passed(client, "/login") == 4
    app = shop({"limiter": "9/minute", "routes": {"/login": "4/minute"}}, limit="4/minute", name="/login")
    with greeting_server(app) as client:
        assert passed(client, "/login") == 4, "a route of the middleware is something else"


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ([RateLimit("4/minute"), RateLimit("4/minute")], 4),
        ([RateLimit(SHARED), RateLimit(SHARED)], 4),
        ([RateLimit(lambda _: "4/minute", name="api"), RateLimit("4/minute", name="api")], 4),
        ([RateLimit("9/minute", name="api"), RateLimit("4/minute", name="api")], 4),
        ([RateLimit(Depends(lambda: "9/minute"), name="api"), RateLimit(Depends(lambda: "4/minute"), name="api")], 4),
        ([RateLimit("4/minute", name="api", key=lambda _: uuid4().hex), RateLimit("4/minute", name="api")], 4),
        ([RateLimit("8/minute", name="api"), RateLimit("8/minute", name="api", cost=2)], 4),
        ([RateLimit("8/minute", name="api", cost=2), RateLimit("8/minute", name="api")], 4),
        ([RateLimit("8/minute", name="api", exempt=lambda _: True), RateLimit("8/minute", name="api", cost=2)], 4),
    ],
    ids=[
        "no name", "one limiter", "function", "limits", "dependencies", "keys", "dear", "cheap", "exempt"
    ],
)  # fmt: skip
def test_a_request_counts_once_where_name_limit_and_key_are_the_same(limits: list[RateLimit], count: int) -> None:
    app = FastAPI(dependencies=[Depends(limits[0])])

    @app.get("/login", dependencies=[Depends(limits[1])])
    def login() -> None: ...

    with greeting_server(app) as client:
        assert passed(client, "/login") == count


@pytest.mark.parametrize(
    ("first", "second", "agent", "address"),
    [
        ({}, {}, 4, 3),
        ({"tier": "heavy"}, {"tier": lambda _: "heavy"}, 2, 3),
        ({}, {"tier": "heavy"}, 2, 3),
        ({"cost": 2}, {}, 2, 1),
        ({}, {"cost": 2}, 2, 1),
        ({}, {"tier": "gone"}, 4, 3),
    ],
    ids=["same tier", "function", "tiers", "dear", "cheap", "removed tier"],
)
def test_a_request_counts_once_in_a_tier_of_a_gate(first: Any, second: Any, agent: int, address: int) -> None:
    limits = {"light": "9/minute", "normal": "4/minute", "heavy": "2/minute"}
    addresses = {"limit": "3/minute"}
    gate = Gate(Policy(tiers=["gone"], limits={**limits, "gone": "9/minute"}, addresses=addresses))
    app = FastAPI(dependencies=[Depends(RateLimit(gate=gate, key=header("x-key"), **first))])

    @app.get("/login", dependencies=[Depends(RateLimit(gate=gate, key=header("x-key"), **second))])
    def login() -> None: ...

    gate.reload(Policy(limits=limits, addresses=addresses))
    with greeting_server(app) as client:
        assert [passed(client, "/login", **{"x-key": "bob"}), passed(client, "/login")] == [agent, address]
        assert gate.peek("bob", "http", "light").remaining == 9, "nothing else is counted"


def test_two_gates_count_each_for_itself() -> None:
    one, other = (Gate(Policy(limits={"normal": limit})) for limit in ("5/minute", "2/minute"))
    app = FastAPI(dependencies=[Depends(RateLimit(gate=one, key=lambda _: "bob"))])

    @app.get("/login", dependencies=[Depends(RateLimit(gate=other, key=lambda _: "bob"))])
    def login() -> None: ...

    with greeting_server(app) as client:
        assert passed(client, "/login") == 2
    assert one.peek("bob", "http", "normal").remaining == 3, "what the other denies is refunded"


def test_two_paths_of_one_endpoint_count_together() -> None:
    app = FastAPI()

    @app.get("/login", dependencies=[Depends(RateLimit("2/minute"))])
    @app.get("/login/", dependencies=[Depends(RateLimit("2/minute"))])
    def login() -> None: ...

    with greeting_server(app) as client:
        assert passed(client, "/login") + passed(client, "/login/") == 2


def test_the_store_is_closed_with_the_application(redis_server: ValkeyServer) -> None:
    ended = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        yield {"answer": 42}
        ended.append(len(clients()))

    def clients() -> list[Any]:
        found: list[Any] = redis_server.client().client_list()
        return found

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(RateLimitMiddleware, limiter="1/minute", store=redis_server.url, name=uuid4().hex)
    before = len(clients())
    with app_server(app, lifespan="on") as server, client_at(server.port) as client:
        client.get("/")
        during = len(clients())
    assert during > before
    wait_for(lambda: len(clients()) <= before, "closed connections")
    assert ended, "the application's own lifespan was run"


def test_an_application_starts_without_a_server_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    app = shop({"store": "redis://127.0.0.1:1", "limiter": "2/minute"})
    with app_server(app, lifespan="on") as server, client_at(server.port) as client:
        assert passed(client, "/login") == 2
    assert "RateLimitMiddleware store: starting without the server" in caplog.text


# Options --------------------------------------------------------------------------------------------------------------


def test_dependencies_have_the_middlewares_options_unless_they_are_given_others() -> None:
    def body(request: Any, problem: Any) -> tuple[str, str]:
        return f"not so fast: {problem.tier}", "text/plain"

    settings = {"limiter": "unlimited", "key": header("x-key"), "body": body, "headers": "x-ratelimit"}
    with greeting_server(shop(settings, limit="2/minute", name="two")) as client:
        assert [passed(client, "/login", **{"x-key": key}) for key in ("a", "b")] == [2, 2]
        denied = client.get("/login", headers={"x-key": "a"})
        assert (denied.status_code, denied.text) == (429, "not so fast: two")
        assert denied.headers.get_list("x-ratelimit-limit") == ["2"]
        assert "ratelimit" not in denied.headers
    with greeting_server(shop(settings, limit="2/minute", key=lambda request: "all")) as client:
        assert [passed(client, "/login", **{"x-key": key}) for key in ("a", "b")] == [2, 0]


def test_the_error_of_a_decorator_gets_the_same_answer() -> None:
    app = FastAPI()

    @app.get("/report")
    @rate_limited("1/minute")
    def report() -> str:
        return "long"

    def body(request: Any, problem: Any) -> tuple[str, str]:
        return f"wait {problem.retry_after_ms} at {request.path}", "text/plain"

    app.add_middleware(RateLimitMiddleware, limiter="9/minute", body=body, counts=lambda status: status != 429)
    with greeting_server(app) as client:
        assert client.get("/report").json() == "long"
        denied = client.get("/report")
        assert (denied.status_code, denied.text, denied.headers["retry-after"]) == (429, "wait 60000 at /report", "60")
        assert "ratelimit" not in denied.headers, "that of a limit which has let it pass"
        assert client.get("/nothing").headers["ratelimit"].startswith('"default";r=7'), "a 429 was not to count"


def test_the_error_of_a_decorator_gets_the_same_answer_in_wsgi() -> None:
    @rate_limited("1/minute")
    def report() -> list[bytes]:
        return [b"long"]

    def app(environ: Any, start_response: Any) -> Any:
        found = report()
        start_response("200 OK", [])
        return found

    with wsgi_server(WsgiMiddleware(app, "9/minute")) as port, client_at(port) as client:
        answers = [client.get("/") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert answers[1].json()["violated-policies"] == ["1/minute"]
        assert "ratelimit" not in answers[1].headers, "that of a limit which has let it pass"


# Headers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", ["ratelimit", "x-ratelimit", "both"])
def test_a_response_has_one_set_of_headers_of_the_limit_that_binds(headers: str) -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    app = shop({"limiter": "5/minute", "store": store, "headers": headers}, limit="3/hour")
    triple = headers == "x-ratelimit"
    limit, left = ("x-ratelimit-limit", "x-ratelimit-remaining") if triple else ("ratelimit-policy", "ratelimit")
    with greeting_server(app) as client:
        seen = [client.get("/login").headers for _ in range(4)]
        assert all(len(one.get_list(name)) == 1 for one in seen for name in (limit, left))
        if triple:
            assert [(one[limit], one[left]) for one in seen] == [("3", "2"), ("3", "1"), ("3", "0"), ("3", "0")]
        other = client.get("/nothing").headers
        assert other.get_list(limit) == (["5"] if triple else ['"default";q=5;w=60'])


def test_the_limit_that_binds_is_the_one_that_lets_the_fewest_more_pass() -> None:
    app = FastAPI()

    @app.get("/", dependencies=[Depends(RateLimit("1000/minute", name="tokens", cost=500))])
    def home() -> None: ...

    app.add_middleware(RateLimitMiddleware, limiter="10/minute", name="requests")
    with greeting_server(app) as client:
        assert client.get("/").headers["ratelimit"].startswith('"tokens";r=500')


def test_a_silent_denial_has_no_headers_of_other_limits() -> None:
    with greeting_server(shop({"limiter": "9/minute"}, limit="1/minute", headers="none")) as client:
        assert "ratelimit" in client.get("/login").headers
        denied = client.get("/login")
        assert (denied.status_code, "ratelimit" in denied.headers) == (429, False)


def test_nested_middleware_tells_of_the_tightest_limit_once() -> None:
    clock = ManualClock()
    inner = RateLimitMiddleware(greeting_app, Limiter("3/minute", store=MemoryStore(clock=clock), name="inner"))
    with greeting_server(
        RateLimitMiddleware(inner, Limiter("5/minute", store=MemoryStore(clock=clock), name="outer"))
    ) as client:
        seen = [client.get("/") for _ in range(6)]
    assert [one.status_code for one in seen] == [200] * 3 + [429] * 3
    told = [one.headers.get_list("ratelimit") for one in seen]
    assert told[0] == ['"inner";r=2;t=20']
    assert told[3] == ['"inner";r=0;t=20'], "the one that has denied it"
    assert told[5] == ['"outer";r=0;t=12']


# Workers --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def new_process() -> Iterator[None]:
    workers.warn_of_workers.cache_clear()
    yield
    workers.warn_of_workers.cache_clear()


def test_settings_in_others_count_in_private_if_the_store_they_take_is_private() -> None:
    store, none = MemoryStore(), ApplicationSettings()
    private, shared = [ApplicationSettings(store, private=one) for one in (True, False)]
    assert [none.nested_in(outer).private for outer in (private, shared)] == [True, False]
    assert [private.nested_in(shared).private, shared.nested_in(private).private] == [True, False]


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("siblings", [False, True])
def test_one_of_several_workers_says_once_that_each_counts_for_itself(
    siblings: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "has_siblings", lambda: siblings)
    with (
        greeting_server(shop({"limiter": "5/minute"})) as client,
        greeting_server(shop({"limiter": "5/minute"})) as other,
    ):
        assert passed(client, "/login") == passed(other, "/login") == 3
    assert caplog.text.count("one of several workers, and each counts for itself") == siblings


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize(
    "app",
    [
        lambda: RateLimitMiddleware(greeting_app, "5/minute", store="memory://"),
        lambda: RateLimitMiddleware(greeting_app, Limiter("5/minute", store="memory://")),
        lambda: shop({"limiter": "unlimited", "store": "memory://"}),  # its dependencies count
        lambda: RateLimitMiddleware(greeting_app, gate=Gate()),
    ],
)
def test_the_url_of_memory_is_warned_of_like_no_store(
    app: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "has_siblings", lambda: True)
    with greeting_server(app()) as client:
        client.get("/login")
    assert "each counts for itself" in caplog.text


@pytest.mark.usefixtures("new_process")
def test_the_url_of_memory_is_warned_of_in_wsgi(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "has_siblings", lambda: True)
    flask = Flask("shop")
    flask.wsgi_app = WsgiMiddleware(flask.wsgi_app, "5/minute", store="memory://")  # type: ignore[method-assign]
    assert flask.test_client().get("/").status_code == 404
    assert "each counts for itself" in caplog.text


@pytest.mark.usefixtures("new_process")
def test_a_store_that_was_chosen_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "has_siblings", lambda: True)
    limiter = Limiter("5/minute", store=MemoryStore())
    with greeting_server(shop({"limiter": "5/minute", "store": MemoryStore()})) as client:
        client.get("/login")
    with greeting_server(RateLimitMiddleware(greeting_app, limiter)) as client:
        client.get("/")
    with greeting_server(RateLimitMiddleware(greeting_app, gate=Gate(store=MemoryStore()))) as client:
        client.get("/")
    with greeting_server(RateLimitMiddleware(greeting_app, "unlimited", routes={"/free": "unlimited"})) as client:
        client.get("/")  # nothing is counted
    assert "workers" not in caplog.text
    with greeting_server(RateLimitMiddleware(greeting_app, "unlimited", routes={"/dear": "5/minute"})) as client:
        client.get("/")
    assert "each counts for itself" in caplog.text


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize(("store", "warned"), [(None, 1), ("memory://", 1), (MemoryStore(), 0)])
def test_f1_a_gate_in_memory_is_warned_of_workers_at_its_first_hold(
    store: MemoryStore | str | None, warned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "has_siblings", lambda: True)
    gate = Gate(Policy(accounts={"default": {"agent": {"usd": "5 in all"}}}), store=store)
    assert caplog.text == "", "a server starts its workers later"
    for _ in range(2):
        assert gate.hold("planner", {"usd": 1})
    assert caplog.text.count("each counts for itself") == warned
    assert caplog.text.count("to RateLimitMiddleware or Gate") == warned


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="the system doesn't tell of other processes")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_workers_of_a_server_say_that_each_counts_for_itself(
    workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = ""

    def said() -> bool:
        nonlocal seen
        with client_at(port) as client:
            assert client.get("/").status_code == 200
        seen += capfd.readouterr().err
        return "each counts for itself" in seen

    with server_process("uvicorn", "tests.support.worker_app:make", "--workers", str(workers)) as port:
        if workers > 1:
            wait_for(said, "the warning")
        else:
            assert not said()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="the system doesn't tell of other processes")
def test_processes_that_run_the_same_command_are_siblings() -> None:
    code = "from headgate.workers import has_siblings; print(input() and has_siblings(), flush=True)"
    command = [sys.executable, "-c", code]
    alone = subprocess.run([*command, "alone"], input="go\n", capture_output=True, text=True, check=True)
    assert alone.stdout == "False\n"
    two = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(2)]
    found = []
    for one in two:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
        assert one.stdout is not None
        found.append(one.stdout.readline())
        break
    for one in two:
        one.communicate("go\n")
    assert found == ["True\n"]
    assert isinstance(workers.has_siblings(), bool)
