"""The middleware for WSGI, called as servers call it, and behind real ones."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import httpx
import pytest
from werkzeug.serving import make_server

from headgate import Gate, HeadgateError, InvalidInput, Limiter, ManualClock, MemoryStore, Policy
from headgate.edges.wsgi import RateLimitMiddleware
from tests.support.gunicorn_app import hello
from tests.support.http_callers import listens, statuses
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


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1000)


@pytest.fixture
def limiter(clock: ManualClock) -> Limiter:
    return Limiter("5/minute", store=MemoryStore(clock=clock))


def left(limiter: Limiter, key: str = "10.0.0.1") -> int:
    return limiter.peek(key).remaining


@contextmanager
def werkzeug(app: Any) -> Iterator[str]:
    """Serve an application until the block ends; its address."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def gunicorn(*options: str, **environment: str) -> Iterator[str]:
    """Serve `gunicorn_app.limited` in processes of their own."""
    command = [
        sys.executable,
        "-m",
        "gunicorn",
        "--pythonpath",
        str(SUPPORT),
        "--log-level",
        "warning",
        "--timeout",
        "0",
    ]
    command += ["--no-control-socket", *options, "gunicorn_app:limited()"]
    with nobody() as port:
        process = subprocess.Popen([*command, "--bind", f"127.0.0.1:{port}"], env={**os.environ, **environment})
        try:
            wait_for(partial(listens, port), "gunicorn")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(PATIENCE)


def client(url: str, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE, **options)


# What is answered -----------------------------------------------------------------------------------------------------


def test_b3_a_denied_request_is_told_when_to_come_back(limiter: Limiter, clock: ManualClock) -> None:
    with werkzeug(RateLimitMiddleware(hello, limiter)) as url, client(url) as http:
        assert [http.get("/").status_code for _ in range(6)] == [200] * 5 + [429]
        denied = http.get("/")
        assert denied.headers["retry-after"] == "12"
        assert denied.headers["content-type"] == "application/problem+json"
        assert denied.headers["ratelimit"] == '"default";r=0;t=12'
        body = denied.json()
        assert (body["error"], body["retry_after_ms"], body["tier"]) == ("rate_limited", 12_000, "default")
        assert (body["status"], body["violated-policies"]) == (429, ["default"])
        clock.advance(11.999)
        assert http.get("/").headers["retry-after"] == "1"
        clock.advance(0.001)
        assert http.get("/").text == "hello "


def test_who_passes_is_told_where_it_stands(limiter: Limiter) -> None:
    answer = fetch(RateLimitMiddleware(hello, limiter))
    assert answer.status == "200 OK"
    assert answer.headers == [
        ("Content-Type", "text/plain"),
        ("Content-Length", "6"),
        ("ratelimit-policy", '"default";q=5;w=60'),
        ("ratelimit", '"default";r=4;t=12'),
    ]
    assert "x-ratelimit-remaining" in dict(fetch(RateLimitMiddleware(hello, limiter, headers="x-ratelimit")).headers)
    assert len(fetch(RateLimitMiddleware(hello, limiter, headers="none")).headers) == 2


def test_a_denial_is_made_of_what_wsgi_asks_for(limiter: Limiter) -> None:
    app = validator(RateLimitMiddleware(validator(hello), limiter))
    assert [fetch(app).status for _ in range(6)] == ["200 OK"] * 5 + ["429 Too Many Requests"]
    denied = fetch(app)
    (body,) = denied.written
    assert denied["content-length"] == str(len(body))
    assert json.loads(body)["error"] == "rate_limited"
    head = fetch(app, "HEAD")
    assert (head.status, head.written, head["content-length"]) == ("429 Too Many Requests", [], str(len(body)))


def test_a_denied_request_reaches_nobody_and_its_body_is_not_read() -> None:
    def unreachable(environ: WSGIEnvironment, start_response: StartResponse) -> NoReturn:
        raise AssertionError("it was called")

    class Unread(BytesIO):
        def read(self, *_: object) -> NoReturn:
            raise AssertionError("it was read")

    app = RateLimitMiddleware(unreachable, "blocked")
    answer = fetch(app, "POST", "/", **{"wsgi.input": Unread(b"abc"), "CONTENT_LENGTH": "3"})
    assert (answer.status, answer["retry-after"]) == ("429 Too Many Requests", "60")


def test_a_slow_client_is_denied_before_its_body_has_come() -> None:
    with werkzeug(RateLimitMiddleware(hello, "blocked")) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as slow:
            slow.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome of it")
            assert slow.recv(65536).split()[1] == b"429"


def test_a_store_that_has_no_room_is_not_the_callers_fault() -> None:
    limiter = Limiter("5/minute", store=MemoryStore(clock=ManualClock(), max_keys=1))
    app = RateLimitMiddleware(hello, limiter)
    fetch(app)
    assert fetch(app, REMOTE_ADDR="10.0.0.2").status == "503 Service Unavailable"


def test_another_body_can_be_given(limiter: Limiter) -> None:
    app = RateLimitMiddleware(hello, "blocked", body=lambda request, denial: (f"{request.path}: no", "text/plain"))
    answer = fetch(app, path="/caf\xc3\xa9")
    assert (answer.written, answer["content-type"]) == (["/café: no".encode()], "text/plain")


# Who is counted -------------------------------------------------------------------------------------------------------


def test_a_forged_address_changes_nothing_unless_a_named_proxy_sends_it(limiter: Limiter, clock: ManualClock) -> None:
    with werkzeug(RateLimitMiddleware(hello, limiter)) as url, client(url) as http:
        forged = [http.get("/", headers={"X-Forwarded-For": f"1.2.3.{n}"}).status_code for n in range(6)]
    assert forged == [200] * 5 + [429]
    clock.advance(60)
    with werkzeug(RateLimitMiddleware(hello, limiter, proxies=["127.0.0.1"])) as url, client(url) as http:
        for n in range(6):
            assert http.get("/", headers={"X-Forwarded-For": f"9.9.9.{n}, 1.2.3.4"}).status_code == (
                429 if n > 4 else 200
            )
        assert http.get("/", headers={"X-Forwarded-For": "1.2.3.5"}).status_code == 200


def test_a_proxy_at_a_unix_socket_can_be_named(limiter: Limiter) -> None:
    forwarded = {"REMOTE_ADDR": "", "HTTP_X_FORWARDED_FOR": "1.2.3.4"}
    fetch(RateLimitMiddleware(hello, limiter, proxies=["unix"]), "GET", "/", **forwarded)
    fetch(RateLimitMiddleware(hello, limiter), "GET", "/", **forwarded)
    assert (left(limiter, "1.2.3.4"), left(limiter, "unknown")) == (4, 4)


def test_functions_say_who_asks_for_how_much_and_who_is_exempt(limiter: Limiter) -> None:
    app = RateLimitMiddleware(
        hello,
        limiter,
        key=lambda request: request.headers.get("x-api-key"),
        cost=lambda request: 3 if request.method == "POST" else 1,
        exempt=lambda request: request.headers.get("x-admin") == "yes",
        routes={"/search": "1/hour"},
        skip=["/health"],
    )
    assert fetch(app, "POST", HTTP_X_API_KEY="ann").status == "200 OK"
    assert left(limiter, "ann") == 2
    assert fetch(app, "POST", HTTP_X_API_KEY="ann").status == "429 Too Many Requests"
    assert fetch(app, "POST", HTTP_X_API_KEY="ann", HTTP_X_ADMIN="yes").headers == fetch(hello, "POST").headers
    assert [fetch(app, path="/search", HTTP_X_API_KEY="bob").status[:3] for _ in range(2)] == ["200", "429"]
    assert [fetch(app, path="/health").status[:3] for _ in range(9)] == ["200"] * 9
    assert [fetch(app).status[:3] for _ in range(6)] == ["200"] * 5 + ["429"]


def test_b3_a_gate_counts_agents_by_tier_and_others_by_address(clock: ManualClock) -> None:
    policy = Policy(limits={"heavy": "1/minute"}, addresses={"limit": "2/minute"})
    gate = Gate(policy, store=MemoryStore(clock=clock))
    app = RateLimitMiddleware(
        hello, gate=gate, key=lambda request: request.headers.get("x-agent"), routes={"POST /tasks": "heavy"}
    )
    assert [fetch(app, "POST", "/tasks", HTTP_X_AGENT="bob").status[:3] for _ in range(2)] == ["200", "429"]
    denied = fetch(app, "POST", "/tasks", HTTP_X_AGENT="bob")
    assert json.loads(denied.written[0])["tier"] == "heavy"
    assert gate.standing("bob").violations == 2
    assert fetch(app, HTTP_X_AGENT="bob").status == "200 OK"
    assert [fetch(app).status[:3] for _ in range(3)] == ["200", "200", "429"]


def test_what_would_have_to_be_awaited_is_refused() -> None:
    async def key(request: object) -> str:
        return "ann"

    with pytest.raises(
        InvalidInput, match=r"RateLimitMiddleware: expected options .*'key_func'; slowapi's key_func is"
    ):
        RateLimitMiddleware(hello, "5/minute", key_func=key)  # type: ignore[call-arg]
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


def test_a_streamed_body_is_sent_as_it_is_made(limiter: Limiter) -> None:
    heard = threading.Event()

    def stream() -> Iterator[bytes]:
        yield b"first"
        assert heard.wait(PATIENCE)
        yield b"last"

    app = RateLimitMiddleware(saying(stream(), Content_Type="text/plain"), limiter)
    with werkzeug(app) as url, client(url) as http, http.stream("GET", "/") as response:
        parts = response.iter_raw()
        assert next(parts) == b"first"
        heard.set()
        assert list(parts) == [b"last"]


def test_what_is_complete_or_a_file_stays_what_it_is(limiter: Limiter) -> None:
    complete = [b"all"]
    assert call(RateLimitMiddleware(saying(complete), limiter)).result is complete
    with closing(FileWrapper(BytesIO(b"all"))) as file:
        by_server = call(RateLimitMiddleware(saying(file), limiter), "GET", "/", **{"wsgi.file_wrapper": FileWrapper})
        assert by_server.result is file
        assert call(RateLimitMiddleware(saying(file), limiter)).result is not file


def test_the_older_ways_of_answering_still_work(limiter: Limiter) -> None:
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
def test_a_request_whose_handler_raises_is_given_back_once(limiter: Limiter, parts: Any, options: Any) -> None:
    fetch(RateLimitMiddleware(hello, limiter))
    with pytest.raises(ValueError, match="crashed"):
        fetch(RateLimitMiddleware(saying(Parts(parts) if parts else ValueError("crashed")), limiter, cost=2, **options))
    assert left(limiter) == 4


def test_a_request_whose_client_goes_away_stays_counted(limiter: Limiter) -> None:
    ended = threading.Event()

    def endless() -> Iterator[bytes]:
        try:
            while True:
                yield b"more" * 10_000
        finally:
            ended.set()

    app = RateLimitMiddleware(saying(endless(), Content_Type="text/plain"), limiter)
    with werkzeug(app) as url, client(url) as http, http.stream("GET", "/") as response:
        next(response.iter_raw())
    assert ended.wait(PATIENCE)
    assert left(limiter, "127.0.0.1") == 4


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


def test_what_a_request_has_cost_is_settled_when_it_is_over(limiter: Limiter) -> None:
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
    with gunicorn("--threads", "2", "--keep-alive", "600") as url:
        assert statuses(int(url.rpartition(":")[2]), 200) == [200] * 60 + [429] * 140
        with client(url, limits=httpx.Limits(max_connections=1, keepalive_expiry=None)) as http:
            denied = [http.post("/", content=b"x" * 10_000) for _ in range(3)]
            assert [response.status_code for response in denied] == [429] * 3
            passed = http.post("/free", content=b"you")
            assert passed.text == "hello you"
            streams = [response.extensions["network_stream"] for response in (*denied, passed)]
            assert len({stream.get_extra_info("client_addr") for stream in streams} - {None}) == 1


def test_workers_that_share_a_server_count_exactly(redis_server: Server) -> None:
    with redis_server.client() as raw:
        raw.flushall()
    with gunicorn("--threads", "2", "--workers", "2", "--preload", STORE=redis_server.url) as url:
        processes: list[str] = []

        def both() -> bool:
            processes.append(http.get("/process").text)
            return len(set(processes)) == 2

        with client(url, headers={"Connection": "close"}) as http:
            wait_for(both, "both workers")
        assert statuses(int(url.rpartition(":")[2]), 200) == [200] * 60 + [429] * 140
