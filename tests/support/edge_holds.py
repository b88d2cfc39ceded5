"""Requests in flight behind the middleware, whose applications do one step at a time."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from headgate import Limiter
from headgate.edges.asgi import Message, RateLimitMiddleware, Receive, Scope, Send
from tests.support.http_edges import HandlerError

SLOTS = 2
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PART: Message = {"type": "http.response.body", "body": b"part", "more_body": True}
LAST: Message = {"type": "http.response.body", "body": b"last"}
ADDRESS = "10.0.0.1"


def used_slots(limiter: Limiter, key: str = ADDRESS) -> int:
    """The slots in use."""
    return SLOTS - limiter.peek(key).remaining


class RequestInProgress:
    """A request in progress. Its application does one step at a time: what `steps` says next."""

    def __init__(self, path: str = "/", kind: str = "http", **scope: Any) -> None:
        self.scope: Scope = {
            "type": kind,
            "method": "GET",
            "path": path,
            "headers": [],
            "client": (ADDRESS, 1),
            **scope,
        }
        self.sent: list[Message] = []
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.begun = asyncio.Event()
        self._steps: asyncio.Queue[Callable[[Scope, Receive, Send], Any]] = asyncio.Queue()
        self._stepped: asyncio.Queue[None] = asyncio.Queue()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.set()
        while True:
            step = await self._steps.get()
            if step is leave_application:
                return
            await step(scope, receive, send)
            self._stepped.put_nowait(None)

    async def _send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    async def begin(self, make: Callable[[Any], Any]) -> "RequestInProgress":
        """Let it come as far as the application, or to its denial."""
        self.task = asyncio.ensure_future(make(self.app)(self.scope, self.incoming.get, self._send))
        waiting = asyncio.ensure_future(self.begun.wait())
        await asyncio.wait([self.task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return self

    async def step(self, *messages: Message) -> None:
        """Let the application send these."""
        for message in messages:
            self._steps.put_nowait(partial(_send_one, message))
            await self._stepped.get()

    async def receive(self, message: Message) -> None:
        """Let the application receive this."""
        self.incoming.put_nowait(message)
        self._steps.put_nowait(lambda scope, receive, send: receive())
        await self._stepped.get()

    async def end(self, how: str = "returns") -> None:
        """Let the application end: it returns, or raises, or is cancelled."""
        if how == "cancelled":
            self.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await self.task
        elif how == "raises":
            self._steps.put_nowait(crash_application)
            with pytest.raises(HandlerError):
                await self.task
        else:
            self._steps.put_nowait(leave_application)
            await self.task

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}


async def _send_one(message: Message, scope: Scope, receive: Receive, send: Send) -> None:
    await send(message)


async def leave_application(scope: Scope, receive: Receive, send: Send) -> None: ...


async def crash_application(scope: Scope, receive: Receive, send: Send) -> None:
    raise HandlerError


def middleware_with(limiter: Any, **options: Any) -> Callable[[Any], Any]:
    """The middleware with these options before an application."""
    return lambda app: RateLimitMiddleware(app, limiter, **options)


def call_wsgi(app: Any, statuses: list[str] | None = None, **environ: Any) -> Any:
    """The body of a response, whose status is added to a list."""
    full: dict[str, Any] = {"REMOTE_ADDR": ADDRESS, **environ}
    setup_testing_defaults(full)
    heard = [] if statuses is None else statuses
    return app(full, lambda status, headers, exc_info=None: heard.append(status))
