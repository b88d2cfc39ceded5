"""The middleware for WSGI, called as servers call it, and behind real ones."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import httpx
import pytest

from headgate import HeadgateError, InvalidInput, Limiter
from headgate.edges.wsgi import RateLimitMiddleware
from tests.support.greeting_app import remaining
from tests.support.gunicorn_app import hello
from tests.support.http_callers import listens, statuses
from tests.support.http_edges import client_at
from tests.support.ports import nobody
from tests.support.valkey import PATIENCE, Server, wait_for

pytestmark = pytest.mark.once

SUPPORT = Path(__file__).parents[1] / "support"


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


@contextmanager
def gunicorn(*options: str, **environment: str) -> Iterator[int]:
    """Serve `gunicorn_app.limited` in processes of their own; the port."""
    command = [sys.executable, "-m", "gunicorn", "--pythonpath", str(SUPPORT), "--log-level", "warning"]
    command += ["--timeout", "0", "--no-control-socket", *options, "gunicorn_app:limited()"]
    with nobody() as port:
        process = subprocess.Popen([*command, "--bind", f"127.0.0.1:{port}"], env={**os.environ, **environment})
        try:
            wait_for(partial(listens, port), "gunicorn")
            yield port
        finally:
            process.terminate()
            process.wait(PATIENCE)


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


def test_async_functions_are_refused() -> None:
    async def key(request: object) -> str:
        return "ann"

    with pytest.raises(InvalidInput, match="RateLimitMiddleware key: expected a plain function, since WSGI has no"):
        RateLimitMiddleware(hello, "5/minute", key=key)

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


def saying(parts: Any, status: str = "200 OK", **headers: str) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response(status, [(name.replace("_", "-"), value) for name, value in headers.items()])
        if isinstance(parts, Exception):
            raise parts
        return parts  # type: ignore[no-any-return]

    return app


def test_a_body_comes_part_by_part_and_is_closed_once(limiter: Limiter) -> None:
    parts = Parts([b"one", b"two"])
    app = validator(RateLimitMiddleware(validator(saying(parts, Content_Type="text/plain")), limiter))
    assert fetch(app).written == [b"one", b"two"]
    assert (parts.closed, left(limiter)) == (1, 4)


def test_complete_bodies_and_files_are_returned_unchanged(limiter: Limiter) -> None:
    complete = [b"all"]
    assert call(RateLimitMiddleware(saying(complete), limiter)).result is complete
    with closing(FileWrapper(BytesIO(b"all"))) as file:
        by_server = call(RateLimitMiddleware(saying(file), limiter), "GET", "/", **{"wsgi.file_wrapper": FileWrapper})
        assert by_server.result is file
        assert call(RateLimitMiddleware(saying(file), limiter)).result is not file


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


@pytest.mark.parametrize(
    "parts",
    [None, [ValueError("crashed")], [b"one", ValueError("crashed")]],
    ids=["in the handler", "before the first part", "between parts"],
)
@pytest.mark.parametrize("options", [{}, {"counts": "failures"}], ids=["counts all", "counts failures"])
def test_a_request_whose_handler_raises_is_refunded_once(limiter: Limiter, parts: Any, options: Any) -> None:
    fetch(RateLimitMiddleware(hello, limiter))
    with pytest.raises(ValueError, match="crashed"):
        fetch(RateLimitMiddleware(saying(Parts(parts) if parts else ValueError("crashed")), limiter, cost=2, **options))
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
    fetch(RateLimitMiddleware(saying(kind([b"body"]), status), limiter, counts=counts))
    assert left(limiter) == 5 - counted


def test_the_cost_of_a_request_is_settled_at_its_end(limiter: Limiter) -> None:
    seen = []

    def settle(request: Any, response: Any) -> int:
        seen.append((request.path, response.status))
        return int(response.headers["x-tokens"])

    app = RateLimitMiddleware(saying(Parts([b"one", b"two"]), X_Tokens="4"), limiter, settle=settle)
    answer = call(app, path="/ask")
    assert left(limiter) == 4
    assert list(answer.result) == [b"one", b"two"]
    assert left(limiter) == 1
    answer.result.close()  # type: ignore[attr-defined]
    assert (left(limiter), seen) == (1, [("/ask", 200)])
    limiter.reset("10.0.0.1")
    interrupted = call(RateLimitMiddleware(saying(Parts([b"one"]), X_Tokens="3"), limiter, settle=settle))
    interrupted.result.close()  # type: ignore[attr-defined]
    assert left(limiter) == 2


def test_a_body_that_is_closed_before_it_began_stays_counted(limiter: Limiter) -> None:
    def late(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"body"

    with closing(call(RateLimitMiddleware(late, limiter, counts="failures")).result):  # type: ignore[type-var]
        pass
    assert left(limiter) == 4


# Behind gunicorn ------------------------------------------------------------------------------------------------------


def test_connections_are_kept_and_clients_counted_exactly_behind_gunicorn() -> None:
    with gunicorn("--threads", "2", "--keep-alive", "600") as port:
        assert statuses(200, port) == [200] * 60 + [429] * 140
        with client_at(port, limits=httpx.Limits(max_connections=1, keepalive_expiry=None)) as http:
            denied = [http.post("/", content=b"x" * 10_000) for _ in range(3)]
            assert [response.status_code for response in denied] == [429] * 3
            passed = http.post("/free", content=b"you")
            assert passed.text == "hello you"
            streams = [response.extensions["network_stream"] for response in (*denied, passed)]
            assert len({stream.get_extra_info("client_addr") for stream in streams} - {None}) == 1


def test_workers_that_share_a_server_count_exactly(redis_server: Server) -> None:
    with redis_server.client() as raw:
        raw.flushall()
    with gunicorn("--threads", "2", "--workers", "2", "--preload", STORE=redis_server.url) as port:
        processes: list[str] = []

        def both() -> bool:
            processes.append(http.get("/process").text)
            return len(set(processes)) == 2

        with client_at(port, headers={"Connection": "close"}) as http:
            wait_for(both, "both workers")
        assert statuses(200, port) == [200] * 60 + [429] * 140
