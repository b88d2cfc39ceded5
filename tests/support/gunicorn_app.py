"""An application for gunicorn: 60 requests in all, except for /free and /process."""

import os
from collections.abc import Iterable
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from headgate import Limiter, ManualClock, MemoryStore
from headgate.edges.wsgi import RateLimitMiddleware
from headgate.stores.base import Store


def hello(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    """An application that says hello, and what it was sent, or which process it is."""
    body = b"hello " + environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    if environ["PATH_INFO"] == "/process":
        body = str(os.getpid()).encode()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


def limited() -> WSGIApplication:
    store: Store = MemoryStore(clock=ManualClock())
    if "STORE" in os.environ:
        from headgate import RedisStore

        store = RedisStore(os.environ["STORE"], clock=ManualClock(), timeout=60)
    return RateLimitMiddleware(hello, Limiter("60/minute", store=store), skip=["/free", "/process"])
