"""An ASGI application that says hello, served for tests, and its clients."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from headgate import Limiter, ManualClock, MemoryStore
from headgate.edges.asgi import App, Receive, Scope, Send
from tests.support.asgi_server import AppServer, app_server
from tests.support.valkey import PATIENCE


async def greeting_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the status that the path names, /404, or 200."""
    assert scope["type"] == "http"
    number = scope["path"].removeprefix("/")
    headers = [(b"content-length", b"5"), *((name, value) for name, value in scope["headers"] if name == b"x-cost")]
    await send({"type": "http.response.start", "status": int(number) if number.isdigit() else 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


def memory_limiter(limit: Any, clock: ManualClock | None = None, **options: Any) -> Limiter:
    return Limiter(limit, store=MemoryStore(clock=clock or ManualClock()), **{"name": "default", **options})


@contextmanager
def http_client(server: AppServer, **options: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server}", timeout=PATIENCE, **options) as client:
        yield client


@contextmanager
def greeting_server(app: App) -> Iterator[httpx.Client]:
    with app_server(app) as server, http_client(server) as client:
        yield client


def remaining(limiter: Limiter, key: str = "127.0.0.1") -> int:
    return limiter.peek(key).remaining


def maybe_async(asynchronous: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, or its async version."""
    if not asynchronous:
        return function

    async def later(*arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    return later


def header(name: str) -> Callable[[Any], Any]:
    return lambda request: request.headers.get(name)
