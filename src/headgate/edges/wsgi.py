"""WSGI: middleware for Flask, Django and every other application of that kind."""

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Final, TypeAlias, Unpack
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from headgate.edges.guard import Guard, Options, Passage, run
from headgate.edges.requests import Response, WsgiRequest, texts
from headgate.errors import refuse
from headgate.gate import Gate
from headgate.limiter import Limiter
from headgate.limits.notation import LimitLike

Failure: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


class RateLimitMiddleware:
    """Lets requests pass to an application as a limiter or a gate allows it, and answers the others with 429.

    `limiter` is a limiter, or the limit of one that counts in memory, which each process of a server has for itself:
    several of them share what a store in Redis counts. Without more, each client address is counted, an IPv6 address
    by its /64. The options are those of `headgate.edges.guard.Options`; functions among them are plain ones.

    >>> from flask import Flask
    >>> app = Flask("shop")
    >>> app.wsgi_app = RateLimitMiddleware(app.wsgi_app, "2/minute")
    >>> [app.test_client().get("/").status_code for _ in range(3)]
    [404, 404, 429]

    A denied request never reaches the application, and its body isn't read. Of the others, bodies are passed on as they
    come, either way. A request whose handler raises is given back; one whose client goes away is not. (Flask and Django
    answer for their handlers, with a 500: to give those back, too, say `counts=lambda status: status < 500`.)
    """

    def __init__(
        self,
        app: WSGIApplication,
        limiter: Limiter | LimitLike | None = None,
        gate: Gate | None = None,
        **options: Unpack[Options],
    ) -> None:
        for name, given in options.items():
            if iscoroutinefunction(given):
                refuse(f"RateLimitMiddleware {name}", "a plain function, since WSGI has no event loop", given)
        self._app: Final = app
        self._guard: Final = Guard("RateLimitMiddleware", limiter=limiter, gate=gate, wait=False, **options)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        guard = self._guard
        passage = run(guard.admit(WsgiRequest(environ, guard.proxies)))
        if passage is None:
            return self._app(environ, start_response)
        if not passage.decision:
            status, headers, body = guard.refusal(passage)
            start_response(f"{status} {HTTPStatus(status).phrase}", texts(headers))
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
        answer = _Answer(guard, passage, start_response)
        try:
            parts = self._app(environ, answer.start)
        except Exception:
            answer.failed()
            raise
        return answer.over(parts, environ.get("wsgi.file_wrapper"))


class _Answer:
    """The response to a request that passed: told where the caller stands, and settled once, when it is over."""

    __slots__ = ("_begin", "_guard", "_iterator", "_parts", "_passage", "_response", "_settled")

    def __init__(self, guard: Guard, passage: Passage, begin: StartResponse) -> None:
        self._guard: Final = guard
        self._passage: Final = passage
        self._begin: Final = begin
        self._response: Response | None = None
        self._settled = False
        self._parts: Iterable[bytes] = ()
        self._iterator: Iterator[bytes] | None = None

    def start(
        self, status: str, headers: list[tuple[str, str]], exc_info: Failure | None = None
    ) -> Callable[[bytes], object]:
        """The application's `start_response`."""
        if self._guard.settles:
            self._response = Response(int(status[:3]), headers)
        headers = [*headers, *texts(self._guard.headers(self._passage))]
        return self._begin(status, headers) if exc_info is None else self._begin(status, headers, exc_info)

    def over(self, parts: Iterable[bytes], files: object) -> Iterable[bytes]:
        """The body, watched to its end. What is complete, or a file that the server sends by itself, stays as it is."""
        if isinstance(parts, (list, tuple)) or (isinstance(files, type) and isinstance(parts, files)):
            self.ended()
            return parts
        self._parts = parts
        return self

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            if self._iterator is None:
                self._iterator = iter(self._parts)
            return next(self._iterator)
        except StopIteration:
            self.ended()
            raise
        except Exception:
            self.failed()
            raise

    def close(self) -> None:
        """Servers call it when the response was sent, or when nobody is left to send it to."""
        try:
            close: Callable[[], None] | None = getattr(self._parts, "close", None)
            if close is not None:
                close()
        finally:
            self.ended()

    def ended(self) -> None:
        if not self._settled:
            self._settled = True
            if self._response is not None:
                run(self._guard.settle(self._passage, self._response))

    def failed(self) -> None:
        if not self._settled:
            self._settled = True
            run(self._guard.crashed(self._passage))
