"""WebSocket applications for tests, their clients, and the frames of the middleware."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headgate import Limiter
from headgate.edges.asgi import Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.websocket import WebSocketLimits
from tests.support.asgi_server import AppServer, app_server
from tests.support.valkey import PATIENCE


class Echo:
    """Sends back what it receives, and remembers it."""

    def __init__(self) -> None:
        self.received: list[str | bytes] = []
        self.ended: list[Message] = []
        self.began = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began += 1
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            self.received.append(message["text"] if message.get("text") is not None else message["bytes"])
            await send({**message, "type": "websocket.send"})
        self.ended.append(message)


class ScriptedSender:
    """Sends the given messages, and watches for a disconnect."""

    def __init__(self, *messages: Any) -> None:
        self.messages = messages
        self.sent: list[Any] = []
        self.failures: list[BaseException] = []
        self.ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        sending = asyncio.ensure_future(self._send(send))
        while (await receive())["type"] != "websocket.disconnect":
            pass
        await sending
        self.ended = True

    async def _send(self, send: Send) -> None:
        try:
            for message in self.messages:
                kind = "text" if isinstance(message, str) else "bytes"
                await send({"type": "websocket.send", kind: message})
                self.sent.append(message)
            await send({"type": "websocket.close", "code": 4000})
        except OSError as failure:
            self.failures.append(failure)


def denial_frame(tier: str, wait: int) -> dict[str, object]:
    return {"type": "rate_limited", "tier": tier, "retry_after_ms": wait}


def warning_frame(tier: str, remaining: int, capacity: int) -> dict[str, object]:
    return {"type": "rate_limit_warning", "tier": tier, "remaining": remaining, "capacity": capacity}


def client_name(request: Any) -> str | None:
    """The name of the client, from a header."""
    name: str | None = request.headers.get("x-name")
    return name


@contextmanager
def websocket_client(
    server: AppServer, name: str = "", path: str = "/", *, plan: str = ""
) -> Iterator[ClientConnection]:
    headers = {header: value for header, value in (("X-Name", name), ("X-Plan", plan)) if value}
    with connect(
        f"ws://{server}{path}", additional_headers=headers, compression=None, open_timeout=PATIENCE, ping_interval=None
    ) as client:
        yield client


@contextmanager
def limited_echo(limiter: Limiter, limits: WebSocketLimits) -> Iterator[ClientConnection]:
    """A client of an echo behind the middleware."""
    with (
        app_server(RateLimitMiddleware(Echo(), limiter, websocket=limits)) as server,
        websocket_client(server) as client,
    ):
        yield client


def exchange(client: ClientConnection, message: str | bytes) -> Any:
    """Send a message and receive the answer: the echo, or a frame of the middleware."""
    client.send(message)
    return receive(client)


def receive(client: ClientConnection) -> Any:
    got = client.recv(timeout=PATIENCE)
    return json.loads(got) if isinstance(got, str) and got.startswith("{") else got


def close_frame(client: ClientConnection) -> tuple[int, str]:
    """Code and reason of the server's close."""
    with pytest.raises(ConnectionClosed) as error:
        client.recv(timeout=PATIENCE)
    assert error.value.rcvd is not None
    return error.value.rcvd.code, error.value.rcvd.reason


def denied_response(server: AppServer, name: str = "", path: str = "/") -> Any:
    """The response to a connect that is refused."""
    with pytest.raises(InvalidStatus) as error, websocket_client(server, name, path):
        pass
    return error.value.response
