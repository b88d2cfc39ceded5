"""WSGI: middleware for Flask, Django and any other WSGI application."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, TypeAlias, Unpack, cast
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from headgate.edges.application import RequestLimits, join_limits
from headgate.edges.guard import DenialResponse, Guard, LimitGiven, Options
from headgate.edges.requests import HttpResponse, WsgiRequest, decode_headers
from headgate.edges.reservation import CheckedRequest
from headgate.edges.settlement import complete, reject_awaitable
from headgate.errors import RateLimited, StoreAway
from headgate.flow import drive
from headgate.gate import Gate
from headgate.stores.base import Store
from headgate.stores.urls import is_memory, open_store

Failure: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


class RateLimitMiddleware:
    """Passes requests on to an application as a limiter or a gate allows, and answers the others with 429.

    `limiter` is a limit, or a function of the request that returns one; it is counted in `store` under `name`. The
    store is a store, or the URL of a Redis or Valkey server; without it, each process counts in its memory. `limiter`
    may also be a `Limiter`, which has a store of its own. By default each client address is counted, an IPv6 address by
    its /64. The options are those of `headgate.edges.guard.Options`; functions among them are plain ones.

    >>> from flask import Flask
    >>> app = Flask("shop")
    >>> app.wsgi_app = RateLimitMiddleware(app.wsgi_app, "2/minute")
    >>> [app.test_client().get("/").status_code for _ in range(3)]
    [404, 404, 429]

    A denied request never reaches the application, and its body isn't read. Other bodies are streamed both ways. A
    request stays counted if its handler raises (see `refund_crashes`) or its upload breaks off. (Flask and Django
    answer for a handler that raises, with a 500: to refund these too, pass `counts=lambda status: status < 500`.)

    With "5 in flight" in the limit, a request has a slot until the server has closed its response.
    """

    def __init__(
        self,
        app: WSGIApplication,
        limiter: LimitGiven | None = None,
        gate: Gate | None = None,
        *,
        store: Store | str | None = None,
        name: str = "",
        **options: Unpack[Options],
    ) -> None:
        self._app: Final = app
        where = "RateLimitMiddleware"
        opened = None if store is None else open_store(f"{where} store", store)
        private = is_memory(store)
        self._guard: Final = Guard(
            where, options, limiter=limiter, gate=gate, store=opened, name=name, private=private, awaits=False
        )

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        guard = self._guard
        request = WsgiRequest(environ, guard.proxies)
        limits, outermost = join_limits(environ, guard.settings)
        if outermost:
            start_response = _add_headers(start_response, limits)
        checked = drive(guard.check(request), reject_awaitable)
        response = None
        if checked is not None:
            limits.add(checked.decision, checked.cost, guard.headers(checked))
            if not checked.decision:
                return _deny(drive(guard.denial(checked), reject_awaitable), environ, start_response)
            if guard.settlement.changes_costs or checked.held:
                response = _WatchedResponse(guard, checked, start_response)
                start_response = response.start
                if "wsgi.input" in environ:
                    environ["wsgi.input"] = _WatchedInput(environ["wsgi.input"], response.note_broken_upload)
        try:
            try:
                parts = self._app(environ, start_response)
            except (RateLimited, StoreAway) as error:
                if limits.response_started:
                    raise
                if response is not None and isinstance(error, StoreAway):
                    response.end(crashed=True)
                limits.headers = []  # they tell of limits that have let it pass
                parts = _deny(drive(guard.denial_of(request, error), reject_awaitable), environ, start_response)
        except BaseException as error:
            if response is not None:
                response.end(crashed=isinstance(error, Exception))
            raise
        return parts if response is None else response.watch(parts, environ.get("wsgi.file_wrapper"))


def _deny(denial: DenialResponse, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
    start_response(f"{denial.status} {HTTPStatus(denial.status).phrase}", decode_headers(denial.headers))
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [denial.body]


def _add_headers(start_response: StartResponse, limits: RequestLimits) -> StartResponse:
    """A `start_response` that adds the headers of the limit that binds."""

    def start(
        status: str, headers: list[tuple[str, str]], exc_info: Failure | None = None
    ) -> Callable[[bytes], object]:
        limits.response_started = True
        more = [*headers, *decode_headers(limits.headers)]
        return start_response(status, more) if exc_info is None else start_response(status, more, exc_info)

    return start


class _WatchedResponse:
    """The response to a request that passed: it is settled once, however it ends."""

    __slots__ = (
        "_begun",
        "_broken_upload",
        "_checked",
        "_close",
        "_ended",
        "_guard",
        "_iterator",
        "_parts",
        "_response",
        "_start_response",
    )

    def __init__(self, guard: Guard, checked: CheckedRequest, start_response: StartResponse) -> None:
        self._guard: Final = guard
        self._checked: Final = checked
        self._start_response: Final = start_response
        self._response: HttpResponse | None = None
        self._begun = False  # whether any of the body was passed to the server, which then sends status and headers
        self._broken_upload = False  # before that
        self._ended = False
        self._parts: Iterable[bytes] = ()
        self._close: Callable[[], object] | None = None
        self._iterator: Iterator[bytes] | None = None

    def note_broken_upload(self) -> None:
        """The request's body can't be read: frameworks raise for that, or send an error, but no handler has failed."""
        if not self._begun:
            self._broken_upload = True

    def start(
        self, status: str, headers: list[tuple[str, str]], exc_info: Failure | None = None
    ) -> Callable[[bytes], object]:
        """The application's `start_response`."""
        if exc_info is None:
            write = self._start_response(status, headers)
        else:
            write = self._start_response(status, headers, exc_info)
        self._response = HttpResponse(_status_code(status), headers)

        def begin_and_write(part: bytes) -> object:
            self._begun = True
            return write(part)

        return begin_and_write

    def watch(self, parts: Iterable[bytes], file_wrapper: object) -> Iterable[bytes]:
        """The body, watched to its end. A complete body, or a file that the server sends itself, stays as it is.

        It keeps its slot until the server closes it. Otherwise there is nothing to wait for.
        """
        complete_body = isinstance(parts, (list, tuple))
        if complete_body or (isinstance(file_wrapper, type) and isinstance(parts, file_wrapper)):
            if not self._checked.has_slot:
                self.end()
                return parts
            if complete_body:
                return _WatchedParts(parts, self)
            with suppress(AttributeError):  # of a wrapper without attributes, which is iterated over instead
                self._close, cast(Any, parts).close = getattr(parts, "close", None), self.close
                return parts
        self._parts, self._close = parts, getattr(parts, "close", None)
        return self

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            if self._iterator is None:
                self._iterator = iter(self._parts)
            part = next(self._iterator)
        except StopIteration:
            self.end()
            raise
        except BaseException as error:
            self.end(crashed=isinstance(error, Exception))
            raise
        if part:
            self._begun = True
        return part

    def close(self) -> None:
        """Called by the server when the response was sent, or the client has disconnected."""
        try:
            if self._close is not None:
                self._close()
        finally:
            self.end()

    def end(self, *, crashed: bool = False) -> None:
        """Settle it with what is known. Only the first end counts."""
        if not self._ended:
            self._ended, end = True, self._guard.settlement.end
            response = None if crashed and not self._begun else self._response
            complete(end(self._checked, response, crashed=crashed, disconnected=self._broken_upload))


class _WatchedParts(list[bytes]):
    """A complete body: still a list, from whose length a server may tell its own."""

    def __init__(self, parts: Iterable[bytes], response: _WatchedResponse) -> None:
        super().__init__(parts)
        self.close: Final = response.close


class _WatchedInput:
    """The body of a request. It reports if reading fails: the client has left, or has sent something malformed."""

    __slots__ = ("_body", "_report")

    def __init__(self, body: Any, report: Callable[[], None]) -> None:
        self._body: Final = body
        self._report: Final = report

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._body
        except Exception:
            self._report()
            raise

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._body, name)
        if not name.startswith("read"):
            return found

        def read(*args: Any, **kwargs: Any) -> Any:
            try:
                return found(*args, **kwargs)
            except Exception:
                self._report()
                raise

        return read


def _status_code(status: str) -> int:
    """The number of a status; 500 if it doesn't begin with one."""
    code = re.match("[0-9]{3}", str(status))
    return int(code[0]) if code else 500
