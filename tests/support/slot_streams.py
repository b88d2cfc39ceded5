"""An application for real servers, in ASGI and in WSGI, that counts how many of its streams are open.

`/stream/PARTS` streams so many parts, with 0 until the client leaves; `?crash` makes it raise instead of ending. `/ws`
talks until the client leaves. `/used` returns three numbers: the slots that are taken, the streams that are open, and
the most that were open at once.
"""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from headgate import Limiter, MemoryStore
from headgate.edges import asgi, wsgi
from headgate.edges.asgi import App

SLOTS = 6
PART = b"#" * 100
KEY = "all"

_PAUSE = 0.002  # between two parts
_limiter = Limiter(f"{SLOTS} in flight", store=MemoryStore())


class _Streams:
    """The streams that are open, and the most that were open at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.open = self.most = 0

    def __enter__(self) -> None:
        with self._lock:
            self.open += 1
            self.most = max(self.open, self.most)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.open -= 1


_streams = _Streams()


def _used() -> list[int]:
    return [SLOTS - _limiter.peek(KEY).remaining, _streams.open, _streams.most]


def _numbers(path: str) -> Iterable[int]:
    parts = int(path.split("/")[2])
    return range(parts) if parts else itertools.count()


# ASGI ----------------------------------------------------------------------------------------------------------------


def asgi_app() -> App:
    routes = [Route("/stream/{parts}", _stream), Route("/used", _tell), WebSocketRoute("/ws", _talk)]
    return asgi.RateLimitMiddleware(Starlette(routes=routes), _limiter, key=lambda request: KEY, skip=["/used"])


async def _stream(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        with _streams:
            for _ in _numbers(request.url.path):
                yield PART
                await asyncio.sleep(_PAUSE)
            if "crash" in request.query_params:
                raise ZeroDivisionError

    return StreamingResponse(parts())


async def _talk(socket: WebSocket) -> None:
    with _streams:
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text)


async def _tell(request: Request) -> Response:
    return JSONResponse(_used())


# WSGI ----------------------------------------------------------------------------------------------------------------


def wsgi_app() -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [json.dumps(_used()).encode()] if environ["PATH_INFO"] == "/used" else _parts(environ)

    return wsgi.RateLimitMiddleware(app, _limiter, key=lambda request: KEY, skip=["/used"])


def _parts(environ: WSGIEnvironment) -> Iterator[bytes]:
    with _streams:
        for _ in _numbers(environ["PATH_INFO"]):
            yield PART
            time.sleep(_PAUSE)
        if environ["QUERY_STRING"] == "crash":
            raise ZeroDivisionError
