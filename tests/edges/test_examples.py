"""The examples, each started by the command that it names, and driven past its limits."""

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from edges.callers import listens
from servers import PATIENCE, free_port, wait_for
from websockets.sync.client import connect

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


def command(name: str) -> list[str]:
    """The command that an example's docstring names, by this Python."""
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8")), clean=False) or ""
    (line,) = re.findall(r"^    (.+)$", text, re.MULTILINE)
    program, *rest = shlex.split(line)
    return [sys.executable, *([] if program == "python" else ["-m", program]), *rest]


@contextmanager
def started(name: str, option: str = "--port={}") -> Iterator[str]:
    """An example that serves; its host and port."""
    port = free_port()
    process = subprocess.Popen([*command(name), option.format(port)], cwd=ROOT)
    try:
        wait_for(lambda: listens(port) or process.poll() is not None, name)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


def client(where: str) -> httpx.Client:
    return httpx.Client(base_url=f"http://{where}", trust_env=False, timeout=PATIENCE)


def past(http: httpx.Client, path: str, status: int) -> httpx.Response:
    """The first request that is denied; the others before it aren't. What comes back meanwhile passes, too."""
    for _ in range(1000):
        response = http.get(path)
        if response.status_code != status:
            return response
    raise AssertionError(f"{path}: nothing is denied")


def denied(response: httpx.Response) -> str:
    """The name of the limit that a request was denied under."""
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"] == "rate_limited"
    tier: str = response.json()["tier"]
    return tier


def test_fastapi() -> None:
    with started("fastapi_app.py") as where, client(where) as http:
        login = partial(http.post, "/login", params={"name": "bob", "password": "guess"})
        assert [login().status_code for _ in range(3)] == [401] * 3
        assert denied(login()) == "login"
        search = partial(http.get, "/search", params={"words": "b a"})
        assert [search().json() for _ in range(10)] == [["a", "b"]] * 4 + [["a"]] * 6
        assert denied(search()) == "10/minute"
        known = search(headers={"X-API-Key": "ann"})
        assert known.status_code == 200
        assert known.headers["ratelimit-policy"] == '"10/minute";q=10;w=60, "default";q=100;w=60'
        assert [http.get("/health").status_code for _ in range(101)] == [200] * 101


def test_flask() -> None:
    with started("flask_app.py") as where, client(where) as http:
        assert [http.post("/messages/bob").json() for _ in range(3)] == [{"sent by": "bob"}] * 3
        assert denied(http.post("/messages/bob")) == "3/minute"
        passed = http.post("/messages/ann")
        assert (passed.status_code, passed.headers["ratelimit-policy"]) == (200, '"default";q=100;w=60')
        assert denied(past(http, "/", 404)) == "default"
        assert http.get("/health").text == "well"


def test_django() -> None:
    with started("django_app.py", "--bind=127.0.0.1:{}") as where, client(where) as http:
        login = partial(http.post, "/login")
        assert [login(headers={"X-Password": "secret"}).text for _ in range(4)] == ["welcome"] * 4
        assert [login().status_code for _ in range(3)] == [401] * 3
        assert denied(login()) == "POST /login"
        assert denied(login(headers={"X-Password": "secret"})) == "POST /login"
        assert http.get("/").text == "hello"
        assert denied(past(http, "/", 200)) == "default"


def test_litestar() -> None:
    with started("litestar_app.py") as where, client(where) as http:
        assert [http.get("/report").json() for _ in range(2)] == [{"visitors": 7}] * 2
        assert denied(http.get("/report")) == "/report"
        left = [
            http.get("/", headers={"x-api-key": key}).headers["ratelimit"] for key in ("another", "mine", "another")
        ]
        assert [line.split(";")[1] for line in left] == ["r=99", "r=97", "r=96"], "who has a key pays less"
        assert http.get("/").text == "hello"
        assert http.get("/").headers["ratelimit-policy"] == '"default";q=100;w=60'
        assert denied(past(http, "/", 200)) == "default"


def test_starlette_websocket() -> None:
    with started("starlette_websocket.py") as where, connect(f"ws://{where}/echo", proxy=None) as ws:
        for number in range(10):
            ws.send(f"message {number}")
        heard = [str(ws.recv(PATIENCE))]
        while "rate_limited" not in heard[-1]:
            heard.append(str(ws.recv(PATIENCE)))
        assert [text for text in heard if text.startswith("message")][:3] == ["message 0", "message 1", "message 2"]
        assert json.loads(heard[-1]) == {"type": "rate_limited", "tier": "received", "retry_after_ms": 2000}


def test_decorator() -> None:
    done = subprocess.run(command("decorator.py"), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["bob sends 'one'", "bob sends 'two'", "bob sends 'three'"]
    assert re.fullmatch(r"rate limited: agent 'bob' at 3/minute, retry after \d+ms", lines[3])
    assert lines[4:] == ["bob has 0 left, ann has 3", *["small has read 500 characters"] * 3]


def test_every_example_is_tested() -> None:
    tested = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    assert [path.name for path in EXAMPLES.glob("*.py") if path.stem.removesuffix("_app") not in tested] == []
