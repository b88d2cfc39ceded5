"""The dependency for FastAPI, behind uvicorn."""

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headgate import Decision, Gate, HeadgateError, InvalidInput, Limiter, ManualClock, MemoryStore, Policy, RedisStore
from headgate.edges.fastapi import Denied, RateLimit
from tests.support.asgi_server import serving
from tests.support.http_callers import statuses
from tests.support.valkey import PATIENCE, Server, wait_for

pytestmark = pytest.mark.once


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1000)


@pytest.fixture
def limiter(clock: ManualClock) -> Limiter:
    return Limiter("5/minute", store=MemoryStore(clock=clock), name="login")


@contextmanager
def browsing(app: FastAPI, **options: Any) -> Iterator[httpx.Client]:
    """A client of an application that is served, over connections that both keep however long nothing comes."""
    kept = httpx.Limits(keepalive_expiry=None)
    with (
        serving(app, timeout_keep_alive=PATIENCE, **options) as server,
        httpx.Client(base_url=f"http://{server}", trust_env=False, timeout=PATIENCE, verify=False, limits=kept) as http,
    ):
        yield http


def left(limiter: Limiter) -> int:
    return limiter.peek("127.0.0.1").remaining


# What is answered -----------------------------------------------------------------------------------------------------


def test_b3_a_denied_request_gets_problem_details(limiter: Limiter, clock: ManualClock) -> None:
    app, asked = FastAPI(), []

    @app.post("/login", dependencies=[Depends(RateLimit(limiter))])
    async def login(name: str) -> str:
        asked.append(name)
        return name

    with browsing(app) as http:
        passed = [http.post("/login", params={"name": "bob"}) for _ in range(5)]
        assert [response.headers["ratelimit"] for response in passed[:2]] == ['"login";r=4;t=12', '"login";r=3;t=24']
        assert passed[0].headers["ratelimit-policy"] == '"login";q=5;w=60'
        assert "retry-after" not in passed[4].headers
        denied = http.post("/login", params={"name": "bob"})
        assert (denied.status_code, denied.headers["retry-after"]) == (429, "12")
        assert denied.headers["content-type"] == "application/problem+json"
        assert denied.headers["ratelimit"] == '"login";r=0;t=12'
        body = denied.json()
        assert (body["error"], body["retry_after_ms"], body["tier"]) == ("rate_limited", 12_000, "login")
        assert (body["status"], body["title"]) == (429, "Too many requests")
        clock.advance(11.999)
        assert http.post("/login", params={"name": "bob"}).headers["retry-after"] == "1"
        clock.advance(0.001)
        assert http.post("/login", params={"name": "bob"}).json() == "bob"
    assert len(asked) == 6


def test_an_endpoint_can_ask_for_the_decision(limiter: Limiter) -> None:
    app = FastAPI()
    by_name = RateLimit(limiter, key=lambda request: request.headers.get("x-name"), exempt=lambda r: r.path == "/free")

    @app.get("/ask")
    @app.get("/free")
    def ask(standing: Annotated[Decision, Depends(by_name)]) -> str:
        return f"{standing.outcome.value} {standing.remaining if standing.outcome.value != 'exempt' else ''}"

    with browsing(app) as http:
        assert http.get("/ask").json() == "allow 4"
        assert http.get("/ask", headers={"X-Name": "bob"}).json() == "allow 4"
        free = http.get("/free")
        assert (free.json(), "ratelimit" in free.headers) == ("exempt ", False)
    assert "standing" not in str(app.openapi())


def test_a_dependency_can_say_who_asks(limiter: Limiter) -> None:
    def user(token: str = "") -> str | None:
        if token == "stolen":
            raise HTTPException(401)
        return {"t1": "ann", "t2": "bob"}.get(token)

    app = FastAPI()

    @app.get("/", dependencies=[Depends(RateLimit(limiter, key=Depends(user)))])
    def home(name: Annotated[str | None, Depends(user)]) -> str | None:
        return name

    @app.get("/other", dependencies=[Depends(RateLimit(limiter))])
    def other() -> None: ...

    with browsing(app) as http:
        assert [http.get("/", params={"token": "t1"}).status_code for _ in range(6)] == [200] * 5 + [429]
        assert http.get("/", params={"token": "t2"}).json() == "bob"
        assert http.get("/", params={"token": "stolen"}).status_code == 401
        assert [http.get("/").status_code for _ in range(6)] == [200] * 5 + [429]
        assert http.get("/other", params={"who": "bob"}).headers["ratelimit"].startswith('"login";r=4')
        assert "who" not in http.get("/openapi.json").text
    assert [limiter.peek(key).remaining for key in ("ann", "bob")] == [0, 4]


def test_an_application_may_answer_by_itself(limiter: Limiter) -> None:
    def of(kind: Any) -> str:
        app = FastAPI(dependencies=[Depends(RateLimit("blocked"))])

        @app.exception_handler(kind)
        async def handle(request: Request, error: Denied) -> Response:
            return PlainTextResponse(f"{kind} {error.decision.outcome.value}", error.status_code, error.headers)

        @app.get("/")
        def home() -> None: ...

        with browsing(app) as http:
            response = http.get("/")
            assert (response.status_code, response.headers["retry-after"]) == (429, "60")
            return response.text

    assert of(429) == "429 deny"
    assert of(Denied) == f"{Denied} deny"
    assert '"rate_limited"' in of(HTTPException)


def test_another_body_and_other_headers(limiter: Limiter) -> None:
    app = FastAPI()
    limit = RateLimit(
        "1/day", headers="x-ratelimit", body=lambda request, denial: (f"{request.path}: no", "text/plain")
    )

    @app.get("/", dependencies=[Depends(limit)])
    def home() -> None: ...

    with browsing(app) as http:
        assert http.get("/").headers["x-ratelimit-remaining"] == "0"
        denied = http.get("/")
        assert (denied.text, denied.headers["content-type"]) == ("/: no", "text/plain")


# Where it stands ------------------------------------------------------------------------------------------------------


def test_each_dependency_counts_for_itself_for_routes_routers_and_applications() -> None:
    store = MemoryStore(clock=ManualClock())
    everything, admin = Limiter("9/hour", store=store, name="all"), Limiter("5/hour", store=store, name="admin")
    app = FastAPI(dependencies=[Depends(RateLimit(everything, headers="both"))])
    router = APIRouter(dependencies=[Depends(RateLimit(admin, headers="both"))])

    @app.get("/")
    def home() -> None: ...

    @router.get("/admin")
    def admins() -> None: ...

    @router.get("/search", dependencies=[Depends(RateLimit("1/hour"))])
    def search() -> None: ...

    @app.get("/other", dependencies=[Depends(RateLimit("1/hour"))])
    def other() -> None: ...

    app.include_router(router)
    mounted = FastAPI(dependencies=[Depends(RateLimit("blocked", name="mounted"))])
    mounted.get("/")(home)
    app.mount("/mounted", mounted)
    with browsing(app) as http:
        assert http.get("/mounted/").json()["tier"] == "mounted"
        assert http.get("/").headers["ratelimit-policy"] == '"all";q=9;w=3600'
        response = http.get("/admin")
        assert response.headers["ratelimit-policy"] == '"all";q=9;w=3600, "admin";q=5;w=3600'
        assert response.headers["ratelimit"] == '"all";r=7;t=800, "admin";r=4;t=720'
        assert response.headers["x-ratelimit-remaining"] == "4"
        assert http.get("/search").status_code == http.get("/other").status_code == 200
        denied = http.get("/search")
        assert (denied.status_code, denied.json()["tier"]) == (429, "1/hour")
    # A request that one of them denies costs nothing with the others.
    assert (left(everything), left(admin)) == (5, 3)


def test_one_dependency_at_several_routes_counts_them_together_and_a_request_once() -> None:
    app = FastAPI()
    limit = RateLimit("3/day", name="both")

    @app.get("/one", dependencies=[Depends(limit)])
    def one(decision: Annotated[Decision, Depends(limit)]) -> int:
        return decision.remaining

    @app.get("/two", dependencies=[Depends(limit)])
    def two() -> None: ...

    with browsing(app) as http:
        assert http.get("/one").json() == 2
        assert http.get("/two").headers["ratelimit"].startswith('"both";r=1;')
        assert [http.get(path).status_code for path in ("/one", "/two", "/one")] == [200, 429, 429]


def test_b3_a_gate_counts_agents_by_tier_and_others_by_address(clock: ManualClock) -> None:
    gate = Gate(
        Policy(limits={"heavy": "1/minute"}, addresses={"limit": "2/minute"}), store=MemoryStore(clock=clock)
    )  # fmt: skip
    app = FastAPI()

    async def agent(request: Any) -> str | None:
        await asyncio.sleep(0)
        name: str | None = request.headers.get("x-agent")
        return name

    @app.post("/tasks", dependencies=[Depends(RateLimit(gate=gate, key=agent, tier="heavy"))])
    def tasks() -> None: ...

    with browsing(app) as http:
        known = [http.post("/tasks", headers={"X-Agent": "bob"}) for _ in range(2)]
        assert [response.status_code for response in known] == [200, 429]
        assert (known[1].json()["tier"], known[1].headers["retry-after"]) == ("heavy", "60")
        assert gate.standing("bob").violations == 1
        unknown = [http.post("/tasks") for _ in range(3)]
        assert [response.status_code for response in unknown] == [200, 200, 429]
        assert unknown[2].json()["tier"] == "address"


def test_a_forged_address_changes_nothing_unless_a_named_proxy_sends_it(limiter: Limiter, clock: ManualClock) -> None:
    app = FastAPI()

    @app.get("/direct", dependencies=[Depends(RateLimit(limiter))])
    @app.get("/behind", dependencies=[Depends(RateLimit(limiter, proxies=["127.0.0.1"]))])
    def home() -> None: ...

    def answers(path: str) -> list[int]:
        headers = [{"X-Forwarded-For": f"1.2.3.{number}"} for number in range(6)]
        return [http.get(path, headers=header).status_code for header in headers]

    with browsing(app, proxy_headers=False) as http:
        assert answers("/direct") == [200] * 5 + [429]
        assert answers("/behind") == [200] * 6


def test_connecting_to_a_websocket_counts(limiter: Limiter) -> None:
    app = FastAPI()

    @app.websocket("/ws")
    async def talk(ws: WebSocket, decision: Annotated[Decision, Depends(RateLimit(limiter))]) -> None:
        await ws.accept()
        await ws.send_text(str(decision.remaining))
        await ws.receive_text()  # raises when the client goes away

    with serving(app) as server:
        for remaining in range(4, -1, -1):
            with connect(f"ws://{server}/ws", proxy=None, open_timeout=PATIENCE) as ws:
                assert ws.recv(PATIENCE) == str(remaining)
        with pytest.raises(InvalidStatus) as denied:
            connect(f"ws://{server}/ws", proxy=None, open_timeout=PATIENCE)
        assert (denied.value.response.status_code, denied.value.response.headers["retry-after"]) == (429, "12")
        assert b'"error":"rate_limited"' in (denied.value.response.body or b"")


def test_a_websocket_is_closed_where_the_server_cannot_answer_it(limiter: Limiter) -> None:
    app, said = FastAPI(), []

    @app.websocket("/ws", dependencies=[Depends(RateLimit("blocked"))])
    async def talk(ws: WebSocket) -> None: ...

    async def call() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            said.append(message)

        scope = {"type": "websocket", "path": "/ws", "headers": [], "query_string": b"", "client": ("10.0.0.1", 1)}
        await app(scope, receive, send)

    asyncio.run(call())
    assert said == [{"type": "websocket.close", "code": 1013, "reason": "too many requests"}]


# What is given back ---------------------------------------------------------------------------------------------------


class Sorry(Exception):
    """Something that the application answers to by itself."""


@pytest.mark.parametrize(
    ("path", "status", "given_back"),
    [
        ("/crash", 500, True),
        ("/missing", 404, False),
        ("/sorry", 418, False),
        ("/invalid?number=x", 422, False),
        ("/returned", 401, False),
        ("/late", 200, False),
    ],
)
def test_a_request_is_given_back_if_nothing_handles_what_it_raises(
    limiter: Limiter, path: str, status: int, given_back: bool
) -> None:
    app = FastAPI(dependencies=[Depends(RateLimit(limiter))])

    @app.exception_handler(Sorry)
    async def sorry(request: Request, error: Sorry) -> Response:
        return PlainTextResponse("sorry", 418)

    @app.get("/crash")
    def crash() -> None:
        raise ValueError("crashed")

    @app.get("/missing")
    def missing() -> None:
        raise HTTPException(404)

    @app.get("/sorry")
    async def excuse() -> None:
        raise Sorry

    @app.get("/invalid")
    def invalid(number: int) -> None: ...

    @app.get("/returned")
    def returned() -> Response:
        return JSONResponse({}, 401)

    @app.get("/late")
    def late(tasks: BackgroundTasks) -> None:
        tasks.add_task(lambda: None)

    with browsing(app) as http:
        assert http.get(path).status_code == status
    assert left(limiter) == (5 if given_back else 4)


def test_a_streamed_response_passes_untouched_and_a_client_that_leaves_stays_counted(limiter: Limiter) -> None:
    heard, ended = threading.Event(), threading.Event()
    app = FastAPI(dependencies=[Depends(RateLimit(limiter))])

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            assert await asyncio.to_thread(heard.wait, PATIENCE)
            yield b"last"

        return StreamingResponse(parts())

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"more" * 10_000
                    await asyncio.sleep(0)
            finally:
                ended.set()

        return StreamingResponse(parts())

    with browsing(app) as http:
        with http.stream("GET", "/stream") as response:
            arriving = response.iter_raw()
            assert next(arriving) == b"first"
            heard.set()
            assert list(arriving) == [b"last"]
        with http.stream("GET", "/endless") as response:
            next(response.iter_raw())
        assert ended.wait(PATIENCE)
    assert left(limiter) == 3


def test_a_body_that_breaks_off_stays_counted(limiter: Limiter) -> None:
    app, ended = FastAPI(), threading.Event()

    @app.post("/", dependencies=[Depends(RateLimit(limiter))])
    async def read(request: Request) -> None:
        try:
            await request.body()
        finally:
            ended.set()

    async def leave(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf of it")
        await writer.drain()
        wait_for(lambda: left(limiter) == 4, "the request")
        writer.close()
        await writer.wait_closed()

    with serving(app) as server:
        asyncio.run(leave(server.port))
        assert ended.wait(PATIENCE)
    assert left(limiter) == 4


def test_a_slow_client_is_denied_before_its_body_has_come() -> None:
    app = FastAPI()

    @app.post("/", dependencies=[Depends(RateLimit("blocked"))])
    async def read(request: Request) -> None: ...

    with serving(app) as server, socket.create_connection(("127.0.0.1", server.port), PATIENCE) as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome of it")
        assert slow.recv(65536).split()[1] == b"429"


# Many at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "redis"])
def test_200_clients_at_once_are_counted_exactly(where: str, redis_server: Server) -> None:
    clock = ManualClock(start=1000)
    with RedisStore(redis_server.url, prefix="test-fastapi:", clock=clock, timeout=PATIENCE) as shared:
        limiter = Limiter("60/minute", store=MemoryStore(clock=clock) if where == "memory" else shared)
        app = FastAPI()

        @app.get("/", dependencies=[Depends(RateLimit(limiter))])
        async def home() -> None:
            await asyncio.sleep(0)

        with serving(app) as server:
            assert statuses(server.port, 200) == [200] * 60 + [429] * 140


def test_connections_are_kept_when_requests_with_bodies_are_denied(limiter: Limiter) -> None:
    app = FastAPI()

    @app.post("/", dependencies=[Depends(RateLimit("blocked"))])
    async def unread(request: Request) -> None: ...

    @app.post("/free")
    async def free(request: Request) -> int:
        return len(await request.body())

    with browsing(app) as http:
        answers = [http.post(path, content=b"x" * 10_000) for path in ("/", "/free", "/", "/free")]
        assert [response.status_code for response in answers] == [429, 200, 429, 200]
        streams = [response.extensions["network_stream"] for response in answers]
        assert len({stream.get_extra_info("client_addr") for stream in streams} - {None}) == 1


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "RateLimit: expected a limiter or a gate, got None"),
        ({"limiter": 5}, "RateLimit limiter: expected a limit, its text, or several of either, got 5"),
        ({"limiter": "5/minute", "routes": {}}, "RateLimit: expected no routes: a dependency belongs to its route"),
        ({"limiter": "5/minute", "skip": ["/"]}, "RateLimit: expected nothing to skip"),
        ({"limiter": "5/minute", "counts": "failures"}, "RateLimit: expected no counts: a dependency doesn't"),
        ({"limiter": "5/minute", "settle": len}, "RateLimit: expected no settle: .*asgi.RateLimitMiddleware does"),
        ({"limiter": Limiter("5/minute"), "name": "x"}, "RateLimit name: expected none: a limiter has its own"),
        ({"limiter": "5/minute", "key": 7}, "RateLimit key: expected a function, got 7"),
        ({"limiter": "5/minute", "key_func": len}, "RateLimit: expected options .*'key_func'; slowapi's key_func is"),
        ({"limiter": "5/minute", "kye": len}, "RateLimit: expected options among key, cost, tier, exempt, headers, "),
    ],
)  # fmt: skip
def test_mistakes_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        RateLimit(**options)


def test_without_fastapi_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headgate.edges.fastapi")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(HeadgateError, match=r"headgate.edges.fastapi: expected FastAPI, got: .*; pip install fastapi"):
        import_module("headgate.edges.fastapi")
