"""HTTP behind the ASGI middleware: what came of a request that passed, and of its body and connection."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from headgate import Limiter, ManualClock
from headgate.edges.asgi import App, RateLimitMiddleware, Receive, Scope, Send
from tests.support.asgi_server import app_server
from tests.support.event_loop import wait_until
from tests.support.greeting_app import greeting_app, greeting_server, maybe_async, memory_limiter, remaining
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once


# What came of it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_cost_of_a_request_can_be_settled_by_its_response(asynchronous: bool) -> None:
    clock = ManualClock()
    limiter = memory_limiter("100/minute", clock)
    seen = []

    def settle(request: Any, response: Any) -> int:
        seen.append((request.path, response.status))
        return int(response.headers.get("x-cost", 0))

    app = RateLimitMiddleware(greeting_app, limiter, cost=10, settle=maybe_async(asynchronous, settle))
    with greeting_server(app) as client:

        def spend(cost: int, leaves: int, path: str = "/") -> int:
            status = client.get(path, headers={"X-Cost": str(cost)}).status_code
            wait_for(lambda: remaining(limiter) == leaves, "the request to be settled")  # after its response was sent
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
    limiter = memory_limiter("10/minute")
    statuses = [200, 399, 400, 404, 500]
    with greeting_server(RateLimitMiddleware(greeting_app, limiter, counts=counts)) as client:
        assert [client.get(f"/{status}").status_code for status in statuses] == statuses
        wait_for(lambda: remaining(limiter) == expected, "the remaining quota")


def test_where_only_failures_count_requests_in_flight_are_bounded() -> None:
    """However many come at once: each may turn out to fail."""
    limiter = memory_limiter("5/minute")
    entered, go_on = [], threading.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        entered.append(scope["path"])
        await wait_until(go_on.is_set, "the end of the other requests")
        await greeting_app(scope, receive, send)

    async def many(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=40)) as client:
            tasks = [asyncio.ensure_future(client.get("/200" if n % 2 else "/401")) for n in range(40)]
            await wait_until(lambda: sum(task.done() for task in tasks) == 35, "the denials")
            go_on.set()
            return [(await task).status_code for task in tasks]

    with app_server(RateLimitMiddleware(slow, limiter, counts="failures")) as server:
        statuses = asyncio.run(many(f"http://{server}"))
    assert statuses.count(429) == 35
    assert len(entered) == 5
    assert remaining(limiter) == 5 - statuses.count(401)


def make_crashing_app(when: str) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if when != "before":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
            await send({"type": "http.response.body", "body": b"hello", "more_body": True})
        raise ZeroDivisionError

    return app


@pytest.mark.parametrize("more", [{}, {"key": lambda request: None}, {"counts": "failures"}, {"refund_crashes": True}])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_whose_handler_fails_stays_counted_unless_crashes_are_refunded(
    when: str, more: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = memory_limiter("9/minute", name="" if "key" not in more else "names")
    of_address = Limiter(limiter.limit, store=limiter.store, name="names by address") if "key" in more else limiter
    with greeting_server(RateLimitMiddleware(make_crashing_app(when), limiter, cost=2, **more)) as client:
        for _ in range(3):
            if when == "before":
                assert client.get("/").status_code == 500
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    client.get("/")
        wait_for(lambda: caplog.text.count("\nZeroDivisionError") == 3, "the server's log")
    refunded = (when == "before" and "refund_crashes" in more) or (when == "after" and "counts" in more)
    assert remaining(of_address) == (9 if refunded else 3)


def test_a_failure_after_the_response_was_settled_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    limiter = memory_limiter("5/minute")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await greeting_app(scope, receive, send)
        raise ZeroDivisionError

    with greeting_server(RateLimitMiddleware(app, limiter, settle=lambda request, response: 2)) as client:
        assert client.get("/").status_code == 200
        wait_for(lambda: "ZeroDivisionError" in caplog.text, "the server's log")
    assert remaining(limiter) == 3


def test_an_error_page_that_comes_too_late_changes_nothing() -> None:
    """The client has a part of the response when the application, which can't know, answers with another."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a part", "more_body": True})
        await Response("sorry", 500)(scope, receive, send)

    limiter, ended = memory_limiter("5/minute"), threading.Semaphore(0)
    limited = RateLimitMiddleware(app, limiter, counts=lambda status: status < 500)

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await limited(scope, receive, send)
        finally:
            if scope["type"] == "http":
                ended.release()

    with greeting_server(watched) as client:
        for _ in range(5):
            with pytest.raises(httpx.RemoteProtocolError):
                client.get("/")
            assert ended.acquire(timeout=PATIENCE)
        assert client.get("/").status_code == 429


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"key": lambda request: "a"},
        {"settle": lambda request, response: 0},
        {"counts": "successes"},
        {"refund_crashes": True},
    ],
)
@pytest.mark.parametrize("outside", [False, True])  # of the framework's own middleware, which sends a 500
@pytest.mark.parametrize("what", ["body", "wait"])
def test_a_request_whose_client_disconnects_is_not_refunded(
    what: str, outside: bool, more: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who goes away in time would never be denied."""
    limiter = memory_limiter("3/minute")
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
    if not outside:
        app.add_middleware(RateLimitMiddleware, limiter=limiter, **more)
    with app_server(RateLimitMiddleware(app, limiter, **more) if outside else app) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            length = 10 if what == "body" else 0
            client.sendall(
                f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode() + b"12345"[:length]
            )
            assert entered.wait(PATIENCE)
        assert ended.wait(PATIENCE)
        wait_for(lambda: "ClientDisconnect" in caplog.text, "the server's log")
    assert remaining(limiter, "a" if "key" in more else "127.0.0.1") == 2


# Bodies and connections ----------------------------------------------------------------------------------------------


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

    with greeting_server(RateLimitMiddleware(app, "10/minute")) as client:
        assert client.post("/", content=chunks()).text == "3000"


def test_requests_sent_in_one_go_are_answered_in_order() -> None:
    with (
        app_server(RateLimitMiddleware(greeting_app, memory_limiter("2/minute"))) as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        client.sendall(
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3 + b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"429", b"429"]
