"""Slots of FastAPI's dependency, on a real server: taken as long as a request or a WebSocket lives."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, WebSocket
from fastapi.responses import StreamingResponse
from websockets.exceptions import ConnectionClosed

from headgate import Decision, Limiter, ManualClock, MemoryStore
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.fastapi import RateLimit
from tests.support.asgi_server import app_server
from tests.support.greeting_app import http_client
from tests.support.valkey import PATIENCE, wait_for
from tests.support.websocket_apps import websocket_client
from tests.support.wrapped_store import WrappedHoldStore

pytestmark = pytest.mark.once

SLOTS = 2
KEY = "127.0.0.1"


@pytest.fixture(params=[MemoryStore, pytest.param(WrappedHoldStore, marks=pytest.mark.long)])
def slots(request: pytest.FixtureRequest) -> Limiter:
    """In memory, and behind a store that is awaited."""
    return Limiter(f"{SLOTS} in flight", store=request.param(clock=ManualClock()), name="slots")


def used(limiter: Limiter) -> int:
    return SLOTS - limiter.peek(KEY).remaining


def open_holds(limiter: Limiter) -> int:
    return len([one for one in limiter.list_holds(KEY) if one.state == "open"])


class WaitingEndpoints:
    """An application whose endpoints wait for `go`; `finished` is set by background tasks."""

    def __init__(self, limiter: Any, **options: Any) -> None:
        self.go, self.begun, self.finish, self.finished = [threading.Event() for _ in range(4)]
        self.app = app = FastAPI()
        limit = Depends(RateLimit(limiter, **options))

        @app.get("/wait", dependencies=[limit])
        async def wait() -> str:
            await self.wait()
            return "hello"

        @app.get("/crash", dependencies=[limit])
        async def crash() -> str:
            await self.wait()
            raise ZeroDivisionError

        @app.get("/stream", dependencies=[limit])
        async def stream() -> StreamingResponse:
            return StreamingResponse(self.parts())

        @app.get("/background", dependencies=[limit])
        async def background(tasks: BackgroundTasks) -> str:
            tasks.add_task(self.work)
            return "hello"

        @app.websocket("/ws", dependencies=[limit])
        async def talk(socket: WebSocket) -> None:
            await socket.accept()
            async for text in socket.iter_text():
                if text == "crash":
                    raise ZeroDivisionError
                await socket.send_text(text)

    async def wait(self) -> None:
        self.begun.set()
        assert await asyncio.to_thread(self.go.wait, PATIENCE)

    async def parts(self) -> AsyncIterator[bytes]:
        yield b"first"
        await self.wait()
        while True:
            yield b"more" * 10_000
            await asyncio.sleep(0)

    async def work(self) -> None:
        assert await asyncio.to_thread(self.finish.wait, PATIENCE)
        self.finished.set()


@contextmanager
def background_get(client: httpx.Client, path: str) -> Iterator[list[httpx.Response]]:
    """Get something in a thread, until the end of the block."""
    responses: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: responses.append(client.get(path)))
    thread.start()
    yield responses
    thread.join(PATIENCE)


@pytest.mark.parametrize("path", ["/wait", "/crash"])
def test_a_request_has_its_slot_until_its_response_has_ended(slots: Limiter, path: str) -> None:
    shop = WaitingEndpoints(slots)
    with app_server(shop.app) as server, http_client(server) as client, ExitStack() as stack:
        responses = [stack.enter_context(background_get(client, path)) for _ in range(SLOTS)]
        try:
            wait_for(lambda: used(slots) == SLOTS, "the slots")
            denied = client.get(path)
        finally:
            shop.go.set()
        assert (denied.status_code, denied.headers["retry-after"]) == (429, "1")
        assert denied.headers["ratelimit"] == '"slots";r=0;t=1'
        stack.close()
        assert [one.status_code for [one] in responses] == [200 if path == "/wait" else 500] * SLOTS
        wait_for(lambda: used(slots) == 0, "free slots")


def test_a_stream_has_its_slot_until_the_client_leaves(slots: Limiter) -> None:
    shop = WaitingEndpoints(slots)
    with app_server(shop.app) as server, http_client(server) as client:
        with client.stream("GET", "/stream") as response:
            parts = response.iter_raw()  # if that is collected, the client leaves
            assert next(parts) == b"first"
            assert used(slots) == 1
            shop.go.set()
        wait_for(lambda: used(slots) == 0, "a free slot")


def test_background_tasks_come_before_the_end_of_a_dependency(slots: Limiter) -> None:
    shop = WaitingEndpoints(slots)
    with app_server(shop.app) as server, http_client(server) as client:
        assert client.get("/background").status_code == 200
        assert used(slots) == 1
        shop.finish.set()
        wait_for(lambda: used(slots) == 0, "a free slot")
        assert shop.finished.is_set()


@pytest.mark.parametrize("last", ["goodbye", "crash"])
def test_a_websocket_has_its_slot_until_its_end(slots: Limiter, last: str) -> None:
    with app_server(WaitingEndpoints(slots).app) as server:
        for _ in range(2):
            with websocket_client(server, path="/ws") as first, websocket_client(server, path="/ws"):
                first.send("hello")
                assert (first.recv(PATIENCE), used(slots)) == ("hello", SLOTS)
                with pytest.raises(Exception, match="429"), websocket_client(server, path="/ws"):
                    pass
                first.send(last)
                if last == "crash":
                    with pytest.raises(ConnectionClosed):
                        first.recv(PATIENCE)
                    wait_for(lambda: used(slots) == SLOTS - 1, "a free slot")
            wait_for(lambda: used(slots) == 0, "free slots")


def test_dependencies_that_count_in_one_bucket_take_one_slot(slots: Limiter) -> None:
    limiter = Limiter("60/minute; 2 in flight", store=slots.store, name="shared")
    app, seen = FastAPI(), []

    @app.get("/", dependencies=[Depends(RateLimit(limiter)), Depends(RateLimit(limiter, cost=5))])
    async def root(decision: Annotated[Decision, Depends(RateLimit(limiter, cost=3))]) -> bool:
        held = await limiter.alist_holds(KEY)
        seen.append([one.cost for one in held if one.state == "open"])
        return bool(decision)

    with app_server(app) as server, http_client(server) as client:
        for _ in range(3):
            assert client.get("/").json() is True
        wait_for(lambda: not open_holds(limiter), "the settlements")
    assert seen == [[5]] * 3
    assert limiter.hold(KEY, 45)
    assert not limiter.hold(KEY)


def test_a_denial_by_another_limit_gives_slots_and_costs_back(slots: Limiter) -> None:
    limiter = Limiter("60/minute; 100 in flight", store=slots.store, name="both")
    app = FastAPI()

    @app.get("/", dependencies=[Depends(RateLimit(limiter, cost=5)), Depends(RateLimit("1/minute"))])
    async def root() -> None: ...

    with app_server(app) as server, http_client(server) as client:
        assert [client.get("/").status_code for _ in range(3)] == [200, 429, 429]
        wait_for(lambda: not open_holds(limiter), "the settlements")
        assert limiter.peek(KEY).remaining == 55


@pytest.mark.parametrize("refund", [False, True])
def test_a_crash_is_refunded_through_the_hold_if_it_is_to_be(slots: Limiter, refund: bool) -> None:
    limiter = Limiter("60/minute; 100 in flight", store=slots.store, name="both")
    shop = WaitingEndpoints(limiter, cost=5, refund_crashes=refund)
    shop.go.set()
    with app_server(shop.app) as server:
        for path, status in (("/crash", 500), ("/wait", 200)):
            with http_client(server) as client:  # the server closes a connection after a crash
                assert client.get(path).status_code == status
        wait_for(lambda: not open_holds(limiter), "the settlements")
        assert limiter.peek(KEY).remaining == (55 if refund else 50)


def test_a_handled_error_keeps_the_cost_and_frees_the_slot(slots: Limiter) -> None:
    limiter = Limiter("60/minute; 100 in flight", store=slots.store, name="both")
    app = FastAPI()

    @app.get("/", dependencies=[Depends(RateLimit(limiter, cost=5, refund_crashes=True))])
    async def root() -> None:
        raise HTTPException(418)

    with app_server(app) as server, http_client(server) as client:
        assert client.get("/").status_code == 418
        wait_for(lambda: not open_holds(limiter), "the settlement")
        assert limiter.peek(KEY).remaining == 55


def test_the_slots_of_dependencies_are_counted_in_the_middlewares_store(slots: Limiter) -> None:
    shop = WaitingEndpoints("1 in flight", name="shared")
    app = RateLimitMiddleware(shop.app, store=slots.store, name="shop")
    own = Limiter("1 in flight", store=slots.store, name="shop RateLimit shared")
    with app_server(app) as server, http_client(server) as client:
        with background_get(client, "/wait") as [*responses]:
            try:
                assert shop.begun.wait(PATIENCE)
                assert own.peek(KEY).remaining == 0
                assert client.get("/stream").status_code == 429
            finally:
                shop.go.set()
        wait_for(lambda: own.peek(KEY).remaining == 1, "a free slot")
        assert responses == []
