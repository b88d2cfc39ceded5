"""WSGI: middleware for Flask, Django and any other WSGI application."""

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Final, TypeAlias, Unpack
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from headgate.edges.guard import CheckedRequest, Guard, Options, reject_awaitable
from headgate.edges.requests import HttpResponse, WsgiRequest, decode_headers
from headgate.errors import refuse
from headgate.flow import drive
from headgate.gate import Gate
from headgate.limiter import Limiter
from headgate.limits.notation import LimitLike

Failure: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


class RateLimitMiddleware:
    """Passes requests on to an application as a limiter or a gate allows, and answers the others with 429.

    `limiter` is a limiter, or the limit of one that counts in memory, separately in each process of a server: to share
    counts, use a limiter with a store in Redis. By default each client address is counted, an IPv6 address by its /64.
    The options are those of `headgate.edges.guard.Options`; functions among them are plain ones.

    >>> from flask import Flask
    >>> app = Flask("shop")
    >>> app.wsgi_app = RateLimitMiddleware(app.wsgi_app, "2/minute")
    >>> [app.test_client().get("/").status_code for _ in range(3)]
    [404, 404, 429]

    A denied request never reaches the application, and its body isn't read. Other bodies are streamed both ways. A
    request whose handler raises is refunded; one whose client disconnects is not. (Flask and Django answer for a
    handler that raises, with a 500: to refund these too, pass `counts=lambda status: status < 500`.)
    """

    def __init__(
        self,
        app: WSGIApplication,
        limiter: Limiter | LimitLike | None = None,
        gate: Gate | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._app: Final = app
        self._guard: Final = Guard("RateLimitMiddleware", options, limiter=limiter, gate=gate, awaits=False)
        for name, given in options.items():
            if iscoroutinefunction(given):
                refuse(f"RateLimitMiddleware {name}", "a plain function, since WSGI has no event loop", given)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        guard = self._guard
        checked = drive(guard.check(WsgiRequest(environ, guard.proxies)), reject_awaitable)
        if checked is None:
            return self._app(environ, start_response)
        if not checked.decision:
            status, headers, body = guard.denial(checked)
            start_response(f"{status} {HTTPStatus(status).phrase}", decode_headers(headers))
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
        response = _WatchedResponse(guard, checked, start_response)
        try:
            parts = self._app(environ, response.start)
        except Exception:
            response.refund()
            raise
        return response.watch(parts, environ.get("wsgi.file_wrapper"))


class _WatchedResponse:
    """The response to a request that passed: it gets headers, and is settled once, at its end."""

    __slots__ = ("_checked", "_guard", "_iterator", "_parts", "_response", "_settled", "_start_response")

    def __init__(self, guard: Guard, checked: CheckedRequest, start_response: StartResponse) -> None:
        self._guard: Final = guard
        self._checked: Final = checked
        self._start_response: Final = start_response
        self._response: HttpResponse | None = None
        self._settled = False
        self._parts: Iterable[bytes] = ()
        self._iterator: Iterator[bytes] | None = None

    def start(
        self, status: str, headers: list[tuple[str, str]], exc_info: Failure | None = None
    ) -> Callable[[bytes], object]:
        """The application's `start_response`."""
        if self._guard.settles:
            self._response = HttpResponse(int(status[:3]), headers)
        headers = [*headers, *decode_headers(self._guard.headers(self._checked))]
        if exc_info is None:
            return self._start_response(status, headers)
        return self._start_response(status, headers, exc_info)

    def watch(self, parts: Iterable[bytes], file_wrapper: object) -> Iterable[bytes]:
        """The body, watched to its end. A complete body, or a file that the server sends itself, stays as it is."""
        if isinstance(parts, (list, tuple)) or (isinstance(file_wrapper, type) and isinstance(parts, file_wrapper)):
            self._settle()
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
            self._settle()
            raise
        except Exception:
            self.refund()
            raise

    def close(self) -> None:
        """Called by the server when the response was sent, or the client has disconnected."""
        try:
            close: Callable[[], None] | None = getattr(self._parts, "close", None)
            if close is not None:
                close()
        finally:
            self._settle()

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            if self._response is not None:
                drive(self._guard.settle(self._checked, self._response), reject_awaitable)

    def refund(self) -> None:
        if not self._settled:
            self._settled = True
            drive(self._guard.refund(self._checked), reject_awaitable)
