"""The HTTP edges before one application, so that one test can hold for all of them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import httpx
import pytest
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.background import BackgroundTask
from werkzeug.serving import make_server

from headgate.edges import asgi, wsgi
from headgate.edges.fastapi import RateLimit
from tests.support.asgi_server import app_server
from tests.support.valkey import PATIENCE

MORE = b"more" * 10_000


class HandlerError(Exception):
    """What a handler raises."""


class Edge:
    """An application behind an edge.

    It says hello, with the status that the path names, /404, or 200. At /stream a second part follows once `heard` is
    set; at /endless parts follow until the client leaves. `finished` is set at the end of either.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.heard, self.finished = threading.Event(), threading.Event()
        self.served: list[int] = []
        """The clients' ports of the requests that have reached the application."""

    def serve(self) -> AbstractContextManager[int]:
        """The port on which it is served until the block ends."""
        raise NotImplementedError


class AsgiEdge(Edge):
    def serve(self) -> AbstractContextManager[int]:
        return _port_of_app(asgi.RateLimitMiddleware(self.app(), **self.options))

    def app(self, *dependencies: Any) -> FastAPI:
        app = FastAPI(dependencies=dependencies, default_response_class=PlainTextResponse)
        app.api_route("/{path:path}", methods=["GET", "HEAD", "POST"])(self._answer)
        return app

    async def _answer(self, path: str, request: Request, response: Response) -> Any:
        assert request.client is not None
        self.served.append(request.client.port)
        if path in ("stream", "endless"):
            parts = self._stream() if path == "stream" else self._endless()
            return StreamingResponse(parts, headers=response.headers, background=BackgroundTask(self.finished.set))
        await request.body()
        response.status_code = int(path) if path.isdigit() else 200
        return "hello"

    async def _stream(self) -> AsyncIterator[bytes]:
        yield b"first"
        assert await asyncio.to_thread(self.heard.wait, PATIENCE)
        yield b"last"

    async def _endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield MORE
                await asyncio.sleep(0)
        finally:
            self.finished.set()


class FastapiEdge(AsgiEdge):
    def serve(self) -> AbstractContextManager[int]:
        return _port_of_app(self.app(Depends(RateLimit(**self.options))))


@contextmanager
def _port_of_app(app: Any) -> Iterator[int]:
    with app_server(app, proxy_headers=False, backlog=300) as server:
        yield server.port


class WsgiEdge(Edge):
    def serve(self) -> AbstractContextManager[int]:
        return wsgi_server(wsgi.RateLimitMiddleware(self._answer, **self.options))

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"].removeprefix("/")
        self.served.append(int(environ["REMOTE_PORT"]))
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{path if path.isdigit() else 200} As asked", [("Content-Type", "text/plain")])
        return {"stream": self._stream, "endless": self._endless}.get(path, lambda: [b"hello"])()

    def _stream(self) -> Iterator[bytes]:
        yield b"first"
        assert self.heard.wait(PATIENCE)
        yield b"last"
        self.finished.set()

    def _endless(self) -> Iterator[bytes]:
        try:
            while True:
                yield MORE
        finally:
            self.finished.set()


@contextmanager
def wsgi_server(app: Any) -> Iterator[int]:
    """Serve a WSGI application by werkzeug until the block ends; its port."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def client_at(port: int, **options: Any) -> Iterator[httpx.Client]:
    where = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=where, trust_env=False, verify=False, timeout=PATIENCE, **options) as client:
        yield client


@contextmanager
def client_of(edge: Edge) -> Iterator[httpx.Client]:
    """A client of an edge that is served until the block ends; its connections are kept."""
    with edge.serve() as port, client_at(port, limits=httpx.Limits(keepalive_expiry=None)) as client:
        yield client


def edges(*kinds: type[Edge]) -> pytest.MarkDecorator:
    """Run a test with each kind of edge."""
    return pytest.mark.parametrize("edge", kinds, ids=[kind.__name__.removesuffix("Edge").lower() for kind in kinds])


every_edge = edges(AsgiEdge, FastapiEdge, WsgiEdge)

sync_or_async = pytest.mark.parametrize(
    ("edge", "asynchronous"),
    [(AsgiEdge, False), (AsgiEdge, True), (FastapiEdge, False), (FastapiEdge, True), (WsgiEdge, False)],
)
"""Run a test with every edge, and with plain functions and, where there is an event loop, async ones."""
