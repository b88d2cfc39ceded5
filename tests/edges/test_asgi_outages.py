"""Settlement behind the ASGI middleware, of requests that were let in while the store's server was away."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from headgate import Limiter, ManualClock, MemoryStore, RedisStore
from headgate.edges.asgi import Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.websocket import WebSocketLimits
from tests.support.event_loop import wait_until
from tests.support.redis_store import ask_until_answered
from tests.support.valkey import PATIENCE, ValkeyServer

pytestmark = pytest.mark.once

TIMEOUT = 0.1
HTTP: Scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("10.0.0.1", 1234)}
WEBSOCKET: Scope = {**HTTP, "type": "websocket"}


class Outage:
    """A limit on a server, of which nothing is left. The server hangs until `end`."""

    def __init__(self, server: ValkeyServer, on_failure: str) -> None:
        prefix = f"{uuid4().hex}:"
        self._server = server
        self._observer = RedisStore(server.url, prefix=prefix, timeout=PATIENCE)
        self.store = RedisStore(server.url, prefix=prefix, timeout=TIMEOUT, on_failure=on_failure)
        assert self.on(self._observer).check("10.0.0.1", cost=5)

    @staticmethod
    def on(store: RedisStore) -> Limiter:
        return Limiter("5/day", store=store)

    async def end(self) -> None:
        self._server.signal(signal.SIGCONT)
        await ask_until_answered(partial(self.on(self.store).apeek, "10.0.0.1"))

    async def remaining(self) -> int:
        """What is left on the server."""
        return (await self.on(self._observer).apeek("10.0.0.1")).remaining

    async def debt(self) -> bool:
        """Whether a token is further away than a fifth of a day."""
        retry = (await self.on(self._observer).apeek("10.0.0.1")).retry_after
        return retry is not None and retry > 86_400 / 5

    async def aclose(self) -> None:
        self._server.signal(signal.SIGCONT)
        await self.store.aclose()
        await self._observer.aclose()


@asynccontextmanager
async def outage(server: ValkeyServer, on_failure: str) -> AsyncIterator[Outage]:
    found = Outage(server, on_failure)
    try:
        server.signal(signal.SIGSTOP)
        yield found
    finally:
        await found.aclose()


@pytest.mark.parametrize(
    ("on_failure", "options", "debt"),
    [
        ("open", {"counts": "failures"}, False),
        ("local", {"cost": 2, "settle": lambda request, response: 0}, False),
        ("local", {"settle": lambda request, response: 3}, True),  # what is more than the reserved cost is charged
    ],
)
async def test_what_an_outage_let_in_is_not_given_back_to_the_server(
    server: ValkeyServer, on_failure: str, options: Any, debt: bool
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None: ...

    async with outage(server, on_failure) as away:
        limited = RateLimitMiddleware(app, away.on(away.store), **options)
        task = asyncio.ensure_future(limited(HTTP, receive, send))
        await entered.wait()
        await away.end()
        go_on.set()
        await task
        assert await away.remaining() == 0
        assert await away.debt() == debt


async def test_what_an_outage_let_a_websocket_send_is_not_given_back_to_the_server(server: ValkeyServer) -> None:
    """The message waits for its bytes until the outage is over, and is cancelled then."""
    sending: list[asyncio.Task[None]] = []
    leave = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        sending.append(asyncio.ensure_future(send({"type": "websocket.send", "text": "message"})))
        await leave.wait()

    async def receive() -> Message:
        if sending:
            await leave.wait()
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None: ...

    none_left = Limiter("10/day", store=MemoryStore(clock=ManualClock()))
    assert none_left.check("10.0.0.1", cost=10)
    async with outage(server, "local") as away:
        limits = WebSocketLimits(sent=away.on(away.store), sent_bytes=none_left)
        task = asyncio.ensure_future(RateLimitMiddleware(app, "unlimited", websocket=limits)(WEBSOCKET, receive, send))
        await wait_until(lambda: none_left.waiting("10.0.0.1"), "the message to wait for its bytes")
        await away.end()
        sending[0].cancel()
        await asyncio.wait(sending)
        leave.set()
        await task
        assert await away.remaining() == 0
