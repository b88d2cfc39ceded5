"""An application for real servers, in ASGI and in WSGI: its streams of tokens are settled when they end.

`/stream/NAME/PARTS` streams so many parts, with 0 until the client leaves; `?crash` makes it raise instead of ending.
`/file/NAME` sends the file that FILE names, which has as many tokens as a part. `/totals` returns two numbers for each
name: the tokens that were passed to the server, and those that were charged.
"""

import asyncio
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headgate import Limiter, ManualClock, MemoryStore, RedisStore
from headgate.edges import asgi, wsgi
from headgate.edges.asgi import App, Message, Receive, Scope, Send
from headgate.stores.base import Store

TOKEN = b"#"
SIZE = 100
PART = TOKEN * SIZE
RESERVED = 7
"""The cost of a request until it is settled: no stream costs that."""

_PAUSE = 0.001  # between two parts, as a model has: so the buffers aren't full before the client has left
_LIMIT = 10**9
_sent: defaultdict[str, int] = defaultdict(int)


def _limiter() -> Limiter:
    url, clock = os.environ.get("STORE"), ManualClock()
    store: Store = RedisStore(url, clock=clock, timeout=60) if url else MemoryStore(clock=clock)
    return Limiter(f"{_LIMIT}/hour", store=store)


def _name(path: str) -> str:
    return path.split("/")[2]


def _numbers(path: str) -> Iterable[int]:
    """One for each part of a stream."""
    parts = int(path.split("/")[3])
    return range(parts) if parts else itertools.count()


def _options(limiter: Limiter) -> dict[str, Any]:
    return {
        "limiter": limiter,
        "key": lambda request: _name(request.path),
        "cost": RESERVED,
        "settle": lambda request, response: request.raw["tokens"],
        "skip": ["/totals"],
    }


# ASGI ----------------------------------------------------------------------------------------------------------------


def asgi_app() -> App:
    limiter = _limiter()

    async def totals(request: Request) -> Response:
        names = [*_sent]
        return JSONResponse({name: [_sent[name], _LIMIT - (await limiter.apeek(name)).remaining] for name in names})

    routes = [Route("/stream/{name}/{parts}", _stream), Route("/file/{name}", _file), Route("/totals", totals)]
    return _counted(asgi.RateLimitMiddleware(Starlette(routes=routes), **_options(limiter)))


async def _stream(request: Request) -> Response:
    scope = request.scope
    scope["tokens"] = 0

    async def parts() -> AsyncIterator[bytes]:
        for _ in _numbers(request.url.path):
            scope["tokens"] += SIZE
            yield PART
            await asyncio.sleep(_PAUSE)
        if "crash" in request.query_params:
            raise ZeroDivisionError

    return StreamingResponse(parts())


async def _file(request: Request) -> Response:
    request.scope["tokens"] = SIZE
    return FileResponse(os.environ["FILE"])


def _counted(app: App) -> App:
    """Counts the tokens that an application passes to the server."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_count(message: Message) -> None:
            await send(message)
            tokens = SIZE if "path" in message else message.get("body", b"").count(TOKEN)
            if tokens:
                _sent[_name(scope["path"])] += tokens

        await app(scope, receive, send_and_count if scope["type"] == "http" else send)

    return counted


# WSGI ----------------------------------------------------------------------------------------------------------------


def wsgi_app() -> WSGIApplication:
    limiter = _limiter()

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        start_response("200 OK", [("Content-Type", "text/plain")])
        if path == "/totals":
            totals = {name: [_sent[name], _LIMIT - limiter.peek(name).remaining] for name in [*_sent]}
            return [json.dumps(totals).encode()]
        if path.startswith("/file/"):
            environ["tokens"] = _sent[_name(path)] = SIZE
            return environ["wsgi.file_wrapper"](Path(os.environ["FILE"]).open("rb"))  # type: ignore[no-any-return]
        return _parts(environ)

    limited = wsgi.RateLimitMiddleware(app, **_options(limiter))

    def counted(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        found, path = limited(environ, start_response), environ["PATH_INFO"]
        return _CountedParts(found, _name(path)) if path.startswith("/stream/") else found

    return counted


def _parts(environ: WSGIEnvironment) -> Iterator[bytes]:
    environ["tokens"] = 0
    for _ in _numbers(environ["PATH_INFO"]):
        environ["tokens"] += SIZE
        yield PART
        time.sleep(_PAUSE)
    if environ["QUERY_STRING"] == "crash":
        raise ZeroDivisionError


class _CountedParts:
    """Counts the tokens that an application passes to the server."""

    def __init__(self, parts: Iterable[bytes], name: str) -> None:
        self._parts = parts
        self._iterator = iter(parts)
        self._name = name

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        part = next(self._iterator)
        _sent[self._name] += part.count(TOKEN)
        return part

    def close(self) -> None:
        self._parts.close()  # type: ignore[attr-defined]
