"""For tests of obeying transports: a clock that advances by itself, servers with limits, and their clients."""

import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, TypeVar

import httpx

from headgate import Limiter, ManualClock, MemoryStore
from headgate.client.http import ObeyingTransport
from headgate.edges.asgi import RateLimitMiddleware
from tests.support.asgi_server import app_server
from tests.support.valkey import PATIENCE

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Headers = dict[str, str]
T = TypeVar("T")
OPTIONS: dict[str, Any] = {
    "verify": False,  # certificates take a while to load, and none is looked at here
    "limits": httpx.Limits(keepalive_expiry=None),
}


class SimulatedClock(ManualClock):
    """A clock that advances at once to the moment that is waited for, while no request is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = 0
        self.lock = threading.Lock()

    def alarm(self, when: int, ring: Callable[[], None]) -> float | None:
        with self.lock:
            if self.in_flight:
                return 0.001
            self.advance(Fraction(max(when - self.now(), 0), 1_000_000))
        return 0.0

    def count(self, change: int) -> None:
        with self.lock:
            self.in_flight += change


class CountingTransport(httpx.BaseTransport):
    """Tells the clock how many requests are in flight. `sender` sends them: a transport of httpx or of httpx2."""

    def __init__(self, clock: SimulatedClock, sender: Any = None) -> None:
        self._clock = clock
        self._sender = httpx.HTTPTransport(**OPTIONS) if sender is None else sender

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._clock.count(1)
        try:
            response: httpx.Response = self._sender.handle_request(request)
            return response
        finally:
            self._clock.count(-1)

    def close(self) -> None:
        self._sender.close()


class AsyncCountingTransport(httpx.AsyncBaseTransport):
    def __init__(self, clock: SimulatedClock, sender: Any = None) -> None:
        self._clock = clock
        self._sender = httpx.AsyncHTTPTransport(**OPTIONS) if sender is None else sender

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._clock.count(1)
        try:
            response: httpx.Response = await self._sender.handle_async_request(request)
            return response
        finally:
            self._clock.count(-1)

    async def aclose(self) -> None:
        await self._sender.aclose()


class RecordingServer:
    """Records what an application answers, and when. As text it is its URL."""

    def __init__(self, app: Callable[..., Awaitable[None]], clock: ManualClock) -> None:
        self._app, self._clock = app, clock
        self.answered: list[int] = []
        self.moments: list[float] = []
        self.paths: list[str] = []
        self.peers: set[int] = set()
        self.url = ""
        self.call: Callable[..., Any]

    def __str__(self) -> str:
        return self.url

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        async def record_and_send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.answered.append(message["status"])
            await send(message)

        self.moments.append(self._clock.now() / 1_000_000)
        self.paths.append(scope["path"])
        self.peers.add(scope["client"][1])
        await self._app(scope, receive, record_and_send)


async def hello_app(_scope: dict[str, Any], _receive: Receive, send: Send) -> None:
    await send_answer(send, 200)


async def send_answer(send: Send, status: int, headers: Headers | None = None, body: bytes = b"hello") -> None:
    encoded = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    encoded.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def headgate_app(limit: str, clock: ManualClock) -> Callable[..., Awaitable[None]]:
    limiter = Limiter(limit, store=MemoryStore(clock=clock))
    return RateLimitMiddleware(hello_app, limiter=limiter)


def fixed_window_app(quota: int, seconds: int, clock: ManualClock) -> Callable[..., Awaitable[None]]:
    """Another server, with the older headers: a quota in each window, all of which comes back at once."""
    counted: dict[int, int] = {}

    async def app(_scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        window, into = divmod(clock.now(), seconds * 1_000_000)
        reset = str(-(-(seconds * 1_000_000 - into) // 1_000_000))
        counted[window] = used = counted.get(window, 0) + 1
        headers = {"x-ratelimit-limit": str(quota), "x-ratelimit-remaining": str(max(quota - used, 0))}
        headers["x-ratelimit-reset"] = reset
        await (
            send_answer(send, 429, {**headers, "retry-after": reset})
            if used > quota
            else send_answer(send, 200, headers)
        )

    return app


class ScriptedApp:
    """Gives prepared answers one after the other, then 200; keeps the bodies of requests."""

    def __init__(self, *answers: tuple[int, Headers]) -> None:
        self._answers = iter(answers)
        self.bodies: list[bytes] = []

    async def __call__(self, _scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        status, headers = next(self._answers, (200, {}))
        await send_answer(send, status, headers, body=f"answer {len(self.bodies)}".encode())


@contextmanager
def recording_server(
    app: Callable[..., Awaitable[None]], clock: ManualClock, **options: Any
) -> Iterator[RecordingServer]:
    server = RecordingServer(app, clock)
    with app_server(server, timeout_keep_alive=PATIENCE, **options) as address:
        server.url, server.call = f"http://{address}", address.call
        yield server


@contextmanager
def obeying_client(clock: SimulatedClock, **options: Any) -> Iterator[httpx.Client]:
    chosen = {"random": random.Random(7).random, **options}
    with patient_client(ObeyingTransport(CountingTransport(clock), clock=clock, **chosen)) as client:
        yield client


def patient_client(transport: httpx.BaseTransport) -> httpx.Client:
    return httpx.Client(transport=transport, timeout=PATIENCE)


def patient_async_client(transport: httpx.AsyncBaseTransport) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=transport, timeout=PATIENCE)


def retry_after(seconds: int) -> Headers:
    return {"retry-after": str(seconds)}
