"""The recipes of docs/llm.md behind real servers: a stream that holds, whose client leaves halfway."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from fastapi.responses import StreamingResponse
from flask import Flask, Response

from headgate import Hold, Limiter, ManualClock, MemoryStore, RateLimited, RedisStore
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.decorator import too_many_requests
from tests.support.asgi_server import app_server
from tests.support.http_edges import client_at, wsgi_server
from tests.support.ports import unused_port
from tests.support.valkey import wait_for

pytestmark = pytest.mark.once

KEY = "planner"
RESERVED = 10_000_000
USED = 10
PART = b"more" * 10_000


def in_fastapi(limiter: Limiter) -> Any:
    app = FastAPI()
    app.add_middleware(RateLimitMiddleware, limiter="unlimited")

    async def reserved() -> AsyncIterator[Hold]:
        async with limiter.ahold(KEY, RESERVED) as hold:
            try:
                yield hold
            finally:
                await hold.asettle()

    @app.get("/{ending}")
    async def chat(ending: str, hold: Annotated[Hold, Depends(reserved)]) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            hold.use(USED)
            yield PART
            while ending == "endless":
                yield PART
                await asyncio.sleep(0)

        return StreamingResponse(parts())

    return app


def in_flask(limiter: Limiter) -> Any:
    app = Flask(__name__)
    app.register_error_handler(RateLimited, too_many_requests)

    @app.get("/<ending>")
    def chat(ending: str) -> Response:
        with ExitStack() as stack:
            hold = stack.enter_context(limiter.hold(KEY, RESERVED))

            def parts() -> Iterator[bytes]:
                hold.use(USED)
                yield PART
                while ending == "endless":
                    yield PART

            response = Response(parts())
            response.call_on_close(stack.pop_all().close)
            return response

    return app


@contextmanager
def served_port(make: Any, limiter: Limiter) -> Iterator[int]:
    """The port on which an application is served."""
    if make is in_flask:
        with wsgi_server(make(limiter)) as port:
            yield port
    else:
        with app_server(make(limiter)) as server:
            yield server.port


@pytest.mark.parametrize("make", [in_fastapi, in_flask])
def test_a_hold_that_is_denied_while_the_store_is_away_is_no_fault_of_the_caller(make: Any) -> None:
    with (
        unused_port() as away,
        RedisStore(f"redis://127.0.0.1:{away}") as store,
        served_port(make, Limiter("1 in flight", store=store)) as port,
        client_at(port) as client,
    ):
        answer = client.get("/short")
    assert (answer.status_code, answer.json()["title"]) == (503, "Temporarily unavailable")
    assert answer.json()["type"].endswith("#temporary-reduced-capacity")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("make", [in_fastapi, in_flask])
def test_a_stream_that_holds_is_settled_with_what_it_used_however_it_ends(make: Any) -> None:
    limiter = Limiter(f"{3 * RESERVED} in all; 1 in flight", store=MemoryStore(clock=ManualClock()))

    def free() -> bool:
        return bool(limiter.list_holds(KEY)) and all(one.state == "settled" for one in limiter.list_holds(KEY))

    with served_port(make, limiter) as port, client_at(port) as client:
        assert client.get("/short").content == PART
        wait_for(free, "the end of the first hold")
        with client.stream("GET", "/endless") as response:
            parts = response.iter_raw()  # if that is collected, the client leaves
            assert next(parts)
            denied = client.get("/short")
            assert (denied.status_code, denied.headers["retry-after"]) == (429, "1")
        wait_for(free, "the end of the second hold")
        assert limiter.peek(KEY, 3 * RESERVED - 2 * USED)
        assert not limiter.peek(KEY, 3 * RESERVED - 2 * USED + 1)
