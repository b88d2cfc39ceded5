"""Transports that obey, before servers whose denials have bodies that end badly, or never."""

import asyncio
import gzip
import socket
import socketserver
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import pytest

from headgate.client import http
from headgate.client.http import AsyncObeyingTransport, ObeyingTransport
from tests.support.event_loop import run
from tests.support.obeying_transports import (
    AsyncCountingTransport,
    SimulatedClock,
    obeying_client,
    patient_async_client,
)
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once

HEAD = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\n"
Body = Callable[[socket.socket], None]


def cut(client: socket.socket) -> None:
    client.sendall(HEAD + b"content-length: 100\r\n\r\nhalf of it")


def cut_in_a_chunk(client: socket.socket) -> None:
    client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\na\r\nhalf of it\r\n40\r\n")


def cut_while_encoded(client: socket.socket) -> None:
    body = gzip.compress(b"half of it" * 100)
    client.sendall(HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:20])


def stall(client: socket.socket) -> None:
    cut(client)
    client.recv(1)  # until the other side closes


def trickle(client: socket.socket) -> None:
    client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\na\r\nhalf of it\r\n")
    client.settimeout(0.02)
    while True:
        client.sendall(b"1\r\n.\r\n")
        with suppress(TimeoutError):
            if not client.recv(1):
                return


def send_endlessly(client: socket.socket) -> None:
    client.sendall(HEAD + b"\r\nhalf of it")
    while True:
        client.sendall(b"." * 65_536)


BODIES: list[tuple[Body, str | None]] = [
    (cut, "half of it"),
    (cut_in_a_chunk, "half of it"),
    (cut_while_encoded, ""),
    (stall, "half of it"),
    (trickle, None),
    (send_endlessly, None),
]
every_body = pytest.mark.parametrize(("body", "text"), BODIES, ids=[body.__name__ for body, _ in BODIES])


@contextmanager
def denying_server(body: Body, times: int) -> Iterator[str]:
    """A server that denies so many requests, each on a connection of its own, and then says hello. Its URL."""
    left = [times]

    class DenyingHandler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(PATIENCE)
            got = b""
            while b"\r\n\r\n" not in got or (got.startswith(b"P") and not got.endswith(b"text")):
                got += self.request.recv(4096)
            left[0] -= 1
            if left[0] < 0:
                self.request.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
            else:
                with suppress(OSError):  # the client has closed
                    body(self.request)

    class AbortingServer(socketserver.ThreadingTCPServer):
        daemon_threads = False

        def shutdown_request(self, request: Any) -> None:
            self.close_request(request)  # without a FIN before a reset

    with AbortingServer(("127.0.0.1", 0), DenyingHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@asynccontextmanager
async def async_denying_server(body: Body, times: int) -> AsyncIterator[str]:
    """The same for an event loop, which goes on while the server ends: it has connections to close."""
    server = denying_server(body, times)
    url = server.__enter__()
    try:
        yield url
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


@pytest.fixture(autouse=True)
def short_body_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BODY_SECONDS", 0.1)


def check(response: httpx.Response, text: str | None) -> None:
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    if text is None:
        assert response.text[:10] in ("", "half of it")
        assert len(response.content) <= 65_536
    else:
        assert response.text == text


@every_body
def test_a_denial_is_one_however_its_body_ends(body: Body, text: str | None) -> None:
    clock = SimulatedClock()
    with denying_server(body, 1) as url, obeying_client(clock) as client:
        assert client.get(url).text == "hello"
    with (
        denying_server(body, 2) as url,
        obeying_client(clock) as client,
        client.stream("POST", url, content=b"text") as response,
    ):
        assert response.read() == b"hello"
    with denying_server(body, 2) as url, obeying_client(clock, retries=1) as client:
        check(client.get(url), text)
    with (
        denying_server(body, 1) as url,
        obeying_client(clock, retries=0) as client,
        client.stream("POST", url, content=b"text") as response,
    ):
        response.read()
        check(response, text)


@every_body
def test_a_denial_is_one_however_its_body_ends_in_a_loop(body: Body, text: str | None) -> None:
    clock = SimulatedClock()

    def client(**options: Any) -> httpx.AsyncClient:
        return patient_async_client(AsyncObeyingTransport(AsyncCountingTransport(clock), clock=clock, **options))

    async def main() -> None:
        async with async_denying_server(body, 1) as url, client() as one:
            assert (await one.get(url)).text == "hello"
        async with (
            async_denying_server(body, 2) as url,
            client() as one,
            one.stream("POST", url, content=b"text") as response,
        ):
            assert await response.aread() == b"hello"
        async with async_denying_server(body, 2) as url, client(retries=1) as one:
            check(await one.get(url), text)
        async with async_denying_server(body, 1) as url, client(retries=0) as one, one.stream("GET", url) as response:
            await response.aread()
            check(response, text)

    run(main())


@pytest.mark.parametrize(("read", "of_the_denial"), [(None, 0.1), (60, 0.1), (0.05, 0.05)])
def test_the_body_of_a_denial_has_a_timeout_of_its_own(read: float | None, of_the_denial: float) -> None:
    seen: list[Any] = []

    class RecordingTransport(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            timeouts = request.extensions["timeout"]
            seen.append(dict(timeouts))

            class Body(httpx.SyncByteStream):
                def __iter__(self) -> Iterator[bytes]:
                    seen.append(dict(timeouts))
                    yield b"hello"

            return httpx.Response(429 if len(seen) == 1 else 200, stream=Body())

    given = {"connect": 7, "read": read, "write": 7, "pool": 7}
    with httpx.Client(transport=http.ObeyingTransport(RecordingTransport(), clock=SimulatedClock())) as client:
        assert client.get("http://example.org", extensions={"timeout": given}).text == "hello"
    assert seen == [given, given | {"read": of_the_denial}, given, given]
    assert given["read"] == read, "a request has changed the timeouts of others"


class LongBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in parts of 1 KiB, which counts how many were asked for."""

    def __init__(self) -> None:
        self.parts = 0

    def __iter__(self) -> Iterator[bytes]:
        while self.parts < 1000:
            self.parts += 1
            yield b"." * 1024

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part


def test_no_more_of_a_denial_is_asked_for_than_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quickly it comes."""
    monkeypatch.setattr(http, "_BODY_SECONDS", PATIENCE)
    clock, bodies = SimulatedClock(), [LongBody(), LongBody()]

    def transport(body: LongBody) -> httpx.MockTransport:
        return httpx.MockTransport(lambda _: httpx.Response(429, stream=body))

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=AsyncObeyingTransport(transport(bodies[1]), clock=clock, retries=0)
        ) as client:
            return await client.get("http://example.org")

    with httpx.Client(transport=ObeyingTransport(transport(bodies[0]), clock=clock, retries=0)) as client:
        responses = [client.get("http://example.org"), run(main())]
    assert [(response.status_code, len(response.content)) for response in responses] == [(429, 65_536)] * 2
    assert [body.parts for body in bodies] == [64, 64]


def test_a_denial_whose_body_hangs_in_a_transport_without_timeouts_is_one() -> None:
    class HangingStream(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"half of it"
            await asyncio.Event().wait()

    async def main() -> httpx.Response:
        transport = httpx.MockTransport(lambda _: httpx.Response(429, stream=HangingStream()))
        obeying = AsyncObeyingTransport(transport, clock=SimulatedClock(), retries=0)
        async with asyncio.timeout(PATIENCE), httpx.AsyncClient(transport=obeying) as client:
            return await client.get("http://example.org")

    response = run(main())
    assert (response.status_code, response.text) == (429, "half of it")


def test_a_cancelled_request_is_not_taken_for_a_cut_denial() -> None:
    async def main() -> None:
        clock = SimulatedClock()
        transport = AsyncObeyingTransport(AsyncCountingTransport(clock), clock=clock)
        async with patient_async_client(transport) as client:
            request = asyncio.create_task(client.get(url))
            await asyncio.to_thread(reached.wait)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request

    reached = threading.Event()

    def note(client: socket.socket) -> None:
        cut(client)
        reached.set()
        client.recv(1)

    with denying_server(note, 1) as url:
        run(main())
