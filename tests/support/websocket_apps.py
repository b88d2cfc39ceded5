"""Applications that talk over WebSockets, for tests, their clients, and what the middleware says in between."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headgate.edges.asgi import Message, Receive, Scope, Send
from tests.support.asgi_server import Serving
from tests.support.valkey import PATIENCE


class Echo:
    """Sends back what it receives, and remembers it."""

    def __init__(self) -> None:
        self.heard: list[str | bytes] = []
        self.ended: list[Message] = []
        self.began = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began += 1
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            self.heard.append(message["text"] if message.get("text") is not None else message["bytes"])
            await send({**message, "type": "websocket.send"})
        self.ended.append(message)


class Sender:
    """Sends what it is told to, and watches for the client to leave."""

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


def denied(tier: str, wait: int) -> dict[str, object]:
    return {"type": "rate_limited", "tier": tier, "retry_after_ms": wait}


def warned(tier: str, remaining: int, capacity: int) -> dict[str, object]:
    return {"type": "rate_limit_warning", "tier": tier, "remaining": remaining, "capacity": capacity}


def named(request: Any) -> str | None:
    """Who connects, by a header."""
    name: str | None = request.headers.get("x-name")
    return name


@contextmanager
def opened(server: Serving, name: str = "", path: str = "/") -> Iterator[ClientConnection]:
    headers = {"X-Name": name} if name else None
    with connect(
        f"ws://{server}{path}", additional_headers=headers, compression=None, open_timeout=PATIENCE, ping_interval=None
    ) as client:
        yield client


def asked(client: ClientConnection, message: str | bytes) -> Any:
    """What comes back for a message: itself, or a frame of the middleware."""
    client.send(message)
    return heard(client)


def heard(client: ClientConnection) -> Any:
    got = client.recv(timeout=PATIENCE)
    return json.loads(got) if isinstance(got, str) and got.startswith("{") else got


def closed(client: ClientConnection) -> tuple[int, str]:
    """How the server has closed the connection."""
    with pytest.raises(ConnectionClosed) as error:
        client.recv(timeout=PATIENCE)
    assert error.value.rcvd is not None
    return error.value.rcvd.code, error.value.rcvd.reason


def refused(server: Serving, name: str = "", path: str = "/") -> Any:
    """The response to a connect that is refused."""
    with pytest.raises(InvalidStatus) as error, opened(server, name, path):
        pass
    return error.value.response
