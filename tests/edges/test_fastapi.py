"""The dependency for FastAPI, behind uvicorn."""

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from headgate import Decision, Gate, HeadgateError, InvalidInput, Limiter, ManualClock, MemoryStore, Policy
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.fastapi import Denied, RateLimit
from tests.support.asgi_server import app_server
from tests.support.greeting_app import greeting_server, memory_limiter, remaining
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once


# What is answered -----------------------------------------------------------------------------------------------------


def test_an_endpoint_can_ask_for_the_decision(limiter: Limiter) -> None:
    app = FastAPI()
    by_name = RateLimit(limiter, key=lambda request: request.headers.get("x-name"), exempt=lambda r: r.path == "/free")

    @app.get("/ask")
    @app.get("/free")
    def ask(standing: Annotated[Decision, Depends(by_name)]) -> str:
        return f"{standing.outcome.value} {standing.remaining if standing.outcome.value != 'exempt' else ''}"

    with greeting_server(app) as http:
        assert http.get("/ask").json() == "allow 4"
        assert http.get("/ask", headers={"X-Name": "bob"}).json() == "allow 4"
        free = http.get("/free")
        assert (free.json(), "ratelimit" in free.headers) == ("exempt ", False)
    assert "standing" not in str(app.openapi())


def test_a_dependency_can_be_the_key(limiter: Limiter) -> None:
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

    with greeting_server(app) as http:
        assert [http.get("/", params={"token": "t1"}).status_code for _ in range(6)] == [200] * 5 + [429]
        assert http.get("/", params={"token": "t2"}).json() == "bob"
        assert http.get("/", params={"token": "stolen"}).status_code == 401
        assert [http.get("/").status_code for _ in range(6)] == [200] * 5 + [429]
        assert http.get("/other", params={"who": "bob"}).headers["ratelimit"].startswith('"default";r=4')
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

        with greeting_server(app) as http:
            response = http.get("/")
            assert (response.status_code, response.headers["retry-after"]) == (429, "60")
            return response.text

    assert of(429) == "429 deny"
    assert of(Denied) == f"{Denied} deny"
    assert '"rate_limited"' in of(HTTPException)


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
    with greeting_server(app) as http:
        assert http.get("/mounted/").json()["tier"] == "mounted"
        assert http.get("/").headers["ratelimit-policy"] == '"all";q=9;w=3600'
        response = http.get("/admin")
        assert response.headers.get_list("ratelimit-policy") == ['"admin";q=5;w=3600']  # the one that binds
        assert response.headers.get_list("ratelimit") == ['"admin";r=4;t=720']
        assert response.headers.get_list("x-ratelimit-remaining") == ["4"]
        assert http.get("/search").status_code == http.get("/other").status_code == 200
        denied = http.get("/search")
        assert (denied.status_code, denied.json()["tier"]) == (429, "1/hour")
    # A request that one of them denies costs nothing with the others.
    assert (remaining(everything), remaining(admin)) == (5, 3)


def test_one_dependency_at_several_routes_counts_them_together_and_a_request_once() -> None:
    app = FastAPI()
    limit = RateLimit("3/day", name="both")

    @app.get("/one", dependencies=[Depends(limit)])
    def one(decision: Annotated[Decision, Depends(limit)]) -> int:
        return decision.remaining

    @app.get("/two", dependencies=[Depends(limit)])
    def two() -> None: ...

    with greeting_server(app) as http:
        assert http.get("/one").json() == 2
        assert http.get("/two").headers["ratelimit"].startswith('"both";r=1;')
        assert [http.get(path).status_code for path in ("/one", "/two", "/one")] == [200, 429, 429]


def test_an_endpoint_that_serves_preflights_counts_them() -> None:
    app = FastAPI()
    preflight = {"Origin": "http://example.com", "Access-Control-Request-Method": "GET"}

    @app.api_route("/", methods=["GET", "OPTIONS"], dependencies=[Depends(RateLimit("2/day"))])
    def home() -> None: ...

    with greeting_server(app) as http:
        assert [http.options("/", headers=preflight).status_code for _ in range(3)] == [200, 200, 429]
        assert http.get("/").status_code == 429


def test_connecting_to_a_websocket_counts(limiter: Limiter) -> None:
    app = FastAPI()

    @app.websocket("/ws")
    async def talk(ws: WebSocket, decision: Annotated[Decision, Depends(RateLimit(limiter))]) -> None:
        await ws.accept()
        await ws.send_text(str(decision.remaining))
        await ws.receive_text()  # raises when the client goes away

    with app_server(app) as server:
        for remaining in range(4, -1, -1):
            with connect(f"ws://{server}/ws", proxy=None, open_timeout=PATIENCE) as ws:
                assert ws.recv(PATIENCE) == str(remaining)
        with pytest.raises(InvalidStatus) as denied:
            connect(f"ws://{server}/ws", proxy=None, open_timeout=PATIENCE)
        assert (denied.value.response.status_code, denied.value.response.headers["retry-after"]) == (429, "12")
        assert b'"error":"rate_limited"' in (denied.value.response.body or b"")


def test_a_websocket_that_another_dependency_has_accepted_is_closed() -> None:
    app = FastAPI()

    async def read_token(ws: WebSocket) -> str:
        await ws.accept()
        return await ws.receive_text()

    @app.websocket("/ws", dependencies=[Depends(RateLimit("blocked", key=Depends(read_token)))])
    async def talk(ws: WebSocket) -> None: ...

    with app_server(app) as server, connect(f"ws://{server}/ws", proxy=None, open_timeout=PATIENCE) as ws:
        ws.send("token")
        with pytest.raises(ConnectionClosed) as closed:
            ws.recv(PATIENCE)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "too many requests")


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
    ("path", "status", "crashed"),
    [
        ("/crash", 500, True),
        ("/missing", 404, False),
        ("/sorry", 418, False),
        ("/invalid?number=x", 422, False),
        ("/returned", 401, False),
        ("/late", 200, False),
    ],
)
@pytest.mark.parametrize("refund_crashes", [False, True])
def test_a_request_stays_counted_unless_nothing_handles_its_error_and_crashes_are_refunded(
    limiter: Limiter, path: str, status: int, crashed: bool, refund_crashes: bool
) -> None:
    app = FastAPI(dependencies=[Depends(RateLimit(limiter, refund_crashes=refund_crashes))])

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

    with greeting_server(app) as http:
        assert http.get(path).status_code == status
    assert remaining(limiter) == (5 if crashed and refund_crashes else 4)


async def conversion_error() -> AsyncIterator[None]:
    try:
        yield
    except Denied:
        raise HTTPException(400) from None


async def hidden() -> AsyncIterator[None]:
    try:
        yield
    except Denied as error:
        raise Sorry from error


@pytest.mark.parametrize("refund_crashes", [False, True])
@pytest.mark.parametrize("dependency", [conversion_error, hidden])
def test_a_denial_that_another_dependency_turns_into_an_error_of_its_own_is_refunded_once(
    limiter: Limiter, dependency: Any, refund_crashes: bool
) -> None:
    app, denying = FastAPI(), Depends(RateLimit("blocked"))
    limiter.check("127.0.0.1", cost=2)
    passing = Depends(RateLimit(limiter, refund_crashes=refund_crashes))

    @app.get("/", dependencies=[passing, Depends(dependency), denying])
    def never() -> None: ...

    with greeting_server(app) as http:
        assert http.get("/").status_code == (400 if dependency is conversion_error else 500)
    assert remaining(limiter) == 3


@pytest.mark.parametrize("options", [{}, {"key": lambda request: request.address}, {"refund_crashes": True}])
def test_what_one_dependency_denies_is_refunded_by_all_before_it(options: Any) -> None:
    first, second, third = limiters = [memory_limiter(f"{n}/minute") for n in (9, 8, 2)]
    app = FastAPI(dependencies=[Depends(RateLimit(first, **options)), Depends(RateLimit(second, cost=2, **options))])

    @app.get("/", dependencies=[Depends(RateLimit(third))])
    def never() -> None: ...

    with greeting_server(app) as http:
        assert [http.get("/").status_code for _ in range(5)] == [200, 200, 429, 429, 429]
    assert [remaining(limiter) for limiter in limiters] == [7, 4, 0]


def test_an_error_that_a_disconnect_has_caused_is_not_refunded(limiter: Limiter) -> None:
    app = FastAPI(dependencies=[Depends(RateLimit(limiter, refund_crashes=True))])

    @app.get("/")
    def read() -> None:
        try:
            raise ClientDisconnect
        except ClientDisconnect as error:
            raise Sorry from error

    with greeting_server(app) as http:
        assert http.get("/").status_code == 500
    assert remaining(limiter) == 4


async def read_in_a_group(request: Request) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(request.body())


async def read_and_go_on(request: Request) -> None:
    with suppress(ClientDisconnect):
        await request.body()
    raise Sorry


@pytest.mark.parametrize("read", [Request.body, read_in_a_group, read_and_go_on])
def test_a_client_that_left_during_its_upload_gets_nothing_back_whatever_error_that_ends_in(
    limiter: Limiter, read: Any
) -> None:
    app, ended = FastAPI(), threading.Event()

    @app.post("/", dependencies=[Depends(RateLimit(limiter, refund_crashes=True))])
    async def endpoint(request: Request) -> None:
        await read(request)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        finally:
            if scope["type"] == "http":
                ended.set()

    with app_server(watched) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as upload:
            upload.sendall(b"POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 1000\r\n\r\nbegin")
            wait_for(lambda: remaining(limiter) == 4, "the request is counted")
        assert ended.wait(PATIENCE)
    assert remaining(limiter) == 4


def crash(*_: object) -> None:
    raise ValueError("crashed")


def crash_after_response() -> Iterator[None]:
    yield
    crash()


async def crash_in_stream() -> AsyncIterator[bytes]:
    yield b"all"
    crash()


@pytest.mark.parametrize("edge", ["dependency", "middleware"])
@pytest.mark.parametrize("options", [{}, {"refund_crashes": True}, {"key": lambda request: "127.0.0.1"}])
@pytest.mark.parametrize("path", ["/task", "/stream", "/exit"])
def test_nothing_is_given_back_once_the_response_has_begun(
    limiter: Limiter, edge: str, options: dict[str, Any], path: str
) -> None:
    app = FastAPI(dependencies=[Depends(RateLimit(limiter, **options))] if edge == "dependency" else [])
    if edge == "middleware":
        app.add_middleware(RateLimitMiddleware, limiter=limiter, **options)

    @app.get("/task")
    def task(tasks: BackgroundTasks) -> None:
        tasks.add_task(crash)

    @app.get("/stream")
    def stream() -> Response:
        return StreamingResponse(crash_in_stream(), headers={"Content-Length": "3"})

    @app.get("/exit", dependencies=[Depends(crash_after_response)])
    def leave() -> None: ...

    with greeting_server(app) as http:
        statuses = [http.get(path, headers={"Connection": "close"}).status_code for _ in range(30)]
    assert statuses == [200] * 5 + [429] * 25


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "RateLimit: expected a limiter or a gate, got None"),
        ({"limiter": 5}, "RateLimit limiter: expected a limit such as '5/minute', or several, got 5"),
        ({"limiter": "5/minute", "routes": {}}, "RateLimit: expected no routes: a dependency belongs to its route"),
        ({"limiter": "5/minute", "skip": ["/"]}, "RateLimit: expected nothing to skip"),
        ({"limiter": "5/minute", "counts": "failures"}, "RateLimit: expected no counts: a dependency doesn't"),
        ({"limiter": "5/minute", "settle": len}, "RateLimit: expected no settle: .*asgi.RateLimitMiddleware does"),
        ({"gate": Gate(Policy()), "name": "x"}, "RateLimit name: expected none: this limiter has its own, and a gate"),
        ({"limiter": Limiter("1/day", name="a"), "name": "x"}, "RateLimit name: expected none: this limiter"),
        ({"limiter": "5/minute", "name": 5}, "RateLimit name: expected a string, got 5"),
        ({"limiter": "5/minute", "store": "redis://:secret@h"}, "RateLimit: expected no store: .* got 'store'$"),
        ({"limiter": "5/minute", "key": 7}, "RateLimit key: expected a function, got 7"),
        ({"limiter": "5/minute", "refund_crashes": "no"}, "RateLimit refund_crashes: expected True or False, got 'no'"),
        ({"limiter": "5/minute", "key_func": len}, "RateLimit: expected options .*'key_func'; did you mean key="),
        ({"limiter": "5/minute", "kye": len}, "RateLimit: expected options among limiter, gate, name, key, cost"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        RateLimit(**options)


def test_without_depends_it_says_how_to_use_it() -> None:
    limit = RateLimit("1/minute")
    with pytest.raises(InvalidInput, match=r"RateLimit: expected it in Depends: .*, got '`\.dependency`'"):
        FastAPI().get("/", dependencies=[limit])(lambda: "hello")  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="there are no decorators for routes"):
        _ = limit.limit
    assert not hasattr(limit, "unknown")


def test_without_fastapi_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headgate.edges.fastapi")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(HeadgateError, match=r"headgate.edges.fastapi: expected FastAPI, got: .*; pip install fastapi"):
        import_module("headgate.edges.fastapi")
