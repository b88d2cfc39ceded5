"""The middleware for WSGI, called as servers call it, and behind real ones."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from io import BytesIO
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import httpx
import pytest
from flask import Flask, request

from headgate import HeadgateError, Limiter
from headgate.edges.wsgi import RateLimitMiddleware
from tests.support.greeting_app import remaining
from tests.support.gunicorn_app import hello
from tests.support.http_callers import get_statuses
from tests.support.http_edges import client_at
from tests.support.server_process import server_process
from tests.support.valkey import ValkeyServer, wait_for

pytestmark = pytest.mark.once


class Answer:
    """What came of a call."""

    def __init__(self) -> None:
        self.status = ""
        self.headers: list[tuple[str, str]] = []
        self.failure: object = None
        self.written: list[bytes] = []
        self.result: Iterable[bytes] = ()

    def start(
        self, status: str, headers: list[tuple[str, str]], failure: object = None, /
    ) -> Callable[[bytes], object]:
        self.status, self.headers, self.failure = status, headers, failure
        return self.written.append

    def __getitem__(self, name: str) -> str:
        return dict(self.headers)[name]


def call(app: WSGIApplication, method: str = "GET", path: str = "/", **environ: Any) -> Answer:
    """Call an application as a server does, up to its result."""
    request = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "SCRIPT_NAME": "",
        "QUERY_STRING": "",
        "REMOTE_ADDR": "10.0.0.1",
    }
    surroundings: WSGIEnvironment = {**request, **environ}
    setup_testing_defaults(surroundings)
    answer = Answer()
    answer.result = app(surroundings, answer.start)
    return answer


def fetch(app: WSGIApplication, method: str = "GET", path: str = "/", **environ: Any) -> Answer:
    """Call an application as a server does, and send what it says to nobody."""
    answer = call(app, method, path, **environ)
    try:
        answer.written.extend(answer.result)
    finally:
        close = getattr(answer.result, "close", None)
        if close is not None:
            close()
    return answer


def left(limiter: Limiter) -> int:
    return remaining(limiter, "10.0.0.1")


def gunicorn(*options: str, **environment: str) -> AbstractContextManager[int]:
    return server_process("gunicorn", "tests.support.gunicorn_app:limited", *options, **environment)


# What is answered -----------------------------------------------------------------------------------------------------


def test_a_denial_conforms_to_wsgi(limiter: Limiter) -> None:
    app = validator(RateLimitMiddleware(validator(hello), limiter))
    assert [fetch(app).status for _ in range(6)] == ["200 OK"] * 5 + ["429 Too Many Requests"]
    denied = fetch(app)
    (body,) = denied.written
    assert denied["content-length"] == str(len(body))
    assert json.loads(body)["error"] == "rate_limited"
    head = fetch(app, "HEAD")
    assert (head.status, head.written, head["content-length"]) == ("429 Too Many Requests", [], str(len(body)))


# Who is counted -------------------------------------------------------------------------------------------------------


def test_an_async_function_that_is_hidden_is_refused_when_it_is_called() -> None:
    async def key(request: object) -> str:
        return "ann"

    def later(function: Callable[[Any], Any], request: object) -> Any:
        return function(request)

    hidden = RateLimitMiddleware(hello, "5/minute", key=partial(later, key))
    with pytest.raises(HeadgateError, match="expected a plain function, got an async one"):
        fetch(hidden)


# Bodies ---------------------------------------------------------------------------------------------------------------


class Parts:
    """A body that is made while it is sent."""

    def __init__(self, parts: Iterable[bytes | Exception]) -> None:
        self._parts = iter(parts)
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        part = next(self._parts)
        if isinstance(part, Exception):
            raise part
        return part

    def close(self) -> None:
        self.closed += 1


def make_app(parts: Any, status: str = "200 OK", **headers: str) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response(status, [(name.replace("_", "-"), value) for name, value in headers.items()])
        if isinstance(parts, Exception):
            raise parts
        return parts  # type: ignore[no-any-return]

    return app


def test_a_body_comes_part_by_part_and_is_closed_once(limiter: Limiter) -> None:
    parts = Parts([b"one", b"two"])
    app = validator(RateLimitMiddleware(validator(make_app(parts, Content_Type="text/plain")), limiter))
    assert fetch(app).written == [b"one", b"two"]
    assert (parts.closed, left(limiter)) == (1, 4)


def test_complete_bodies_and_files_are_returned_unchanged(limiter: Limiter) -> None:
    complete = [b"all"]
    assert call(RateLimitMiddleware(make_app(complete), limiter)).result is complete
    with closing(FileWrapper(BytesIO(b"all"))) as file:
        by_server = call(RateLimitMiddleware(make_app(file), limiter), "GET", "/", **{"wsgi.file_wrapper": FileWrapper})
        assert by_server.result is file


def test_a_stream_is_returned_unchanged_unless_there_is_something_to_settle(limiter: Limiter) -> None:
    parts = Parts([b"all"])
    assert call(RateLimitMiddleware(make_app(parts), limiter)).result is parts
    for options in ({"counts": "failures"}, {"settle": lambda request, response: 1}, {"refund_crashes": True}):
        assert call(RateLimitMiddleware(make_app(parts), limiter, **options)).result is not parts


def test_write_and_exc_info_still_work(limiter: Limiter) -> None:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        try:
            raise LookupError("no such thing")
        except LookupError:
            write = start_response("404 Not Found", [("X-Own", "1")], sys.exc_info())
        write(b"written")
        return [b"returned"]

    answer = fetch(RateLimitMiddleware(app, limiter))
    assert answer.status == "404 Not Found"
    assert [name for name, _ in answer.headers] == ["X-Own", "ratelimit-policy", "ratelimit"]
    assert isinstance(answer.failure, tuple)
    assert answer.written == [b"written", b"returned"]


# What is given back ---------------------------------------------------------------------------------------------------


CRASH = ValueError("crashed")


@pytest.mark.parametrize(
    ("parts", "begun"),
    [(None, False), ([CRASH], False), ([b"", CRASH], False), ([b"one", CRASH], True), ([b"one", b"", CRASH], True)],
    ids=["in the handler", "before the first part", "after an empty part", "between parts", "after the last part"],
)
@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, 2, 2),
        ({"refund_crashes": True}, 0, 2),
        ({"counts": "failures"}, 2, 0),  # before, it is a 500; after, it was a 200
        ({"counts": "successes"}, 0, 2),
        ({"settle": lambda request, response: 3}, 2, 3),
        ({"settle": lambda request, response: 3, "refund_crashes": True}, 0, 3),
    ],
)
def test_a_request_whose_handler_raises_stays_counted_unless_crashes_are_refunded(
    limiter: Limiter, parts: Any, begun: bool, options: Any, before: int, after: int
) -> None:
    fetch(RateLimitMiddleware(hello, limiter))
    with pytest.raises(ValueError, match="crashed"):
        fetch(RateLimitMiddleware(make_app(Parts(parts) if parts else CRASH), limiter, cost=2, **options))
    assert left(limiter) == 4 - (after if begun else before)


def test_nothing_is_given_back_once_something_was_written(limiter: Limiter) -> None:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])(b"written")
        raise CRASH

    with pytest.raises(ValueError, match="crashed"):
        fetch(RateLimitMiddleware(app, limiter, refund_crashes=True))
    assert left(limiter) == 4


@pytest.mark.parametrize(
    ("counts", "status", "counted"),
    [
        ("failures", "200 OK", 0),
        ("failures", "401 Unauthorized", 1),
        ("successes", "500 Oh", 0),
        ("successes", "302 Go", 1),
    ],
)
@pytest.mark.parametrize("kind", [list, Parts])
def test_only_some_responses_count(limiter: Limiter, counts: Any, status: str, counted: int, kind: Any) -> None:
    fetch(RateLimitMiddleware(make_app(kind([b"body"]), status), limiter, counts=counts))
    assert left(limiter) == 5 - counted


def test_the_cost_of_a_request_is_settled_at_its_end(limiter: Limiter) -> None:
    seen = []

    def settle(request: Any, response: Any) -> int:
        seen.append((request.path, response.status))
        return int(response.headers["x-tokens"])

    app = RateLimitMiddleware(make_app(Parts([b"one", b"two"]), X_Tokens="4"), limiter, settle=settle)
    answer = call(app, path="/ask")
    assert left(limiter) == 4
    assert list(answer.result) == [b"one", b"two"]
    assert left(limiter) == 1
    answer.result.close()  # type: ignore[attr-defined]
    assert (left(limiter), seen) == (1, [("/ask", 200)])
    limiter.reset("10.0.0.1")
    interrupted = call(RateLimitMiddleware(make_app(Parts([b"one"]), X_Tokens="3"), limiter, settle=settle))
    interrupted.result.close()  # type: ignore[attr-defined]
    assert left(limiter) == 2


@pytest.mark.parametrize("ending", [GeneratorExit, SystemExit, CRASH])
def test_a_stream_that_is_cut_is_settled_with_what_is_known(limiter: Limiter, ending: Any) -> None:
    """By its client, by a signal, or by an error of its own."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        environ["tokens"] = 0
        start_response("200 OK", [])
        for _ in range(2):
            environ["tokens"] += 2
            yield b"part"
        raise ending

    def settle(request: Any, response: Any) -> int:
        cost: int = request.raw["tokens"]
        return cost

    parts: Any = call(RateLimitMiddleware(app, limiter, settle=settle)).result
    with closing(parts) as reading:
        assert [next(reading), next(reading)] == [b"part", b"part"]
        if ending is not GeneratorExit:
            with pytest.raises((SystemExit, ValueError)):
                next(reading)
    assert left(limiter) == 1


def raise_cancelled(request: Any, response: Any) -> int:
    raise asyncio.CancelledError


@pytest.mark.parametrize("kind", [list, Parts])
@pytest.mark.parametrize("settle", [lambda request, response: 1 // 0, lambda request, response: None, raise_cancelled])
def test_if_the_cost_cannot_be_told_the_reserved_one_stands(
    limiter: Limiter, kind: Any, settle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    answer = fetch(RateLimitMiddleware(make_app(kind([b"body"])), limiter, cost=2, settle=settle))
    assert (answer.status, answer.written, left(limiter)) == ("200 OK", [b"body"], 3)
    assert "could not be settled" in caplog.text


@pytest.mark.parametrize("status", ["OK", "OK 200", "", "20", "\uff12\uff10\uff10 OK"])
@pytest.mark.parametrize(("counts", "counted"), [("all", 1), ("failures", 1), ("successes", 0)])
def test_a_status_that_is_no_number_is_a_failure(limiter: Limiter, status: str, counts: Any, counted: int) -> None:
    seen: list[int] = []

    def settle(request: Any, response: Any) -> int:
        seen.append(response.status)
        return 1

    answer = fetch(RateLimitMiddleware(make_app([b"body"], status), limiter, counts=counts, settle=settle))
    assert (answer.status, answer.written) == (status, [b"body"])
    assert (left(limiter), seen) == (5 - counted, [500] * counted)


def test_a_body_that_is_closed_before_it_began_stays_counted(limiter: Limiter) -> None:
    def late(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"body"

    with closing(call(RateLimitMiddleware(late, limiter, counts="failures")).result):  # type: ignore[type-var]
        pass
    assert left(limiter) == 4


class BrokenUpload(BytesIO):
    """A request's body as servers give it to the application if the client has left, or has sent a malformed chunk."""

    def _fail(self, *_: object) -> Any:
        raise OSError("no more data")

    read = readline = readlines = readinto = __next__ = _fail


@pytest.mark.parametrize(
    "options",
    [
        {"refund_crashes": True},
        {"counts": "successes"},
        {"settle": lambda *_: 0},
    ],
)
@pytest.mark.parametrize("reading", ["read", "readline", "readlines", "next", "flask"])
def test_an_upload_that_breaks_off_stays_counted(limiter: Limiter, options: Any, reading: str) -> None:
    """Whether its handler raises, or the framework handles the error."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"]
        start_response("200 OK", [])
        return [next(iter(body)) if reading == "next" else getattr(body, reading)()]

    flask = Flask("shop")

    @flask.post("/")
    def upload() -> bytes:
        return request.get_data()

    limited = RateLimitMiddleware(flask.wsgi_app if reading == "flask" else app, limiter, cost=2, **options)
    try:
        fetch(limited, "POST", "/", **{"wsgi.input": BrokenUpload(), "CONTENT_LENGTH": "10"})
    except OSError:
        assert reading != "flask"
    assert left(limiter) == 3


def test_an_upload_is_passed_on_as_it_is(limiter: Limiter) -> None:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"]
        start_response("200 OK", [])
        return [body.read(2), body.readline(), *body.readlines(4), *body, b"%d" % body.tell()]

    uploaded = BytesIO(b"one\ntwo\nthree\nfour\n")
    answer = fetch(RateLimitMiddleware(app, limiter, counts="failures"), "POST", "/", **{"wsgi.input": uploaded})
    assert answer.written == [b"on", b"e\n", b"two\n", b"three\n", b"four\n", b"19"]
    assert left(limiter) == 5
    inputs: list[object] = []

    def untouched(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        inputs.append(environ["wsgi.input"])
        start_response("200 OK", [])
        return []

    fetch(RateLimitMiddleware(untouched, limiter), "POST", "/", **{"wsgi.input": uploaded})
    assert inputs == [uploaded]


def test_an_upload_that_breaks_off_during_the_response_changes_nothing(limiter: Limiter) -> None:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"begun"
        environ["wsgi.input"].read()

    with pytest.raises(OSError, match="no more data"):
        fetch(RateLimitMiddleware(app, limiter, counts="failures"), "POST", "/", **{"wsgi.input": BrokenUpload()})
    assert left(limiter) == 5


# Behind gunicorn ------------------------------------------------------------------------------------------------------


def test_connections_are_kept_and_clients_counted_exactly_behind_gunicorn() -> None:
    with gunicorn("--threads", "2", "--keep-alive", "600") as port:
        assert get_statuses(200, port) == [200] * 60 + [429] * 140
        with client_at(port, limits=httpx.Limits(max_connections=1, keepalive_expiry=None)) as http:
            denied = [http.post("/", content=b"x" * 10_000) for _ in range(3)]
            assert [response.status_code for response in denied] == [429] * 3
            passed = http.post("/free", content=b"you")
            assert passed.text == "hello you"
            streams = [response.extensions["network_stream"] for response in (*denied, passed)]
            assert len({stream.get_extra_info("client_addr") for stream in streams} - {None}) == 1


@pytest.mark.long
def test_workers_that_share_a_server_count_exactly(redis_server: ValkeyServer) -> None:
    with redis_server.client() as raw:
        raw.flushall()
    with gunicorn("--threads", "2", "--workers", "2", "--preload", STORE=redis_server.url) as port:
        processes: list[str] = []

        def both() -> bool:
            processes.append(http.get("/process").text)
            return len(set(processes)) == 2

        with client_at(port, headers={"Connection": "close"}) as http:
            wait_for(both, "both workers")
        assert get_statuses(200, port) == [200] * 60 + [429] * 140
