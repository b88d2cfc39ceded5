"""The examples, each started by the command that it names, and driven past its limits."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest
from websockets.sync.client import connect

from tests.support.ports import unused_port
from tests.support.server_process import listening_process
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

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
def started_example(name: str, option: str = "--port={}", cwd: Path = ROOT, **environment: str) -> Iterator[str]:
    """An example that serves; its host and port."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    with unused_port() as port, listening_process(port, [*command(name), option.format(port)], cwd=cwd, env=variables):
        yield f"127.0.0.1:{port}"


def client(where: str) -> httpx.Client:
    """Keeps no connection: a server closes it when it finds that nothing has come for a while."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=f"http://{where}", trust_env=False, timeout=PATIENCE, limits=limits)


Ask: TypeAlias = Callable[[], httpx.Response]


def pass_limit(ask: Ask, status: int, limit: int, used: int = 0) -> tuple[list[httpx.Response], httpx.Response]:
    """What passes of a limit per minute of which so much is used, and the denial after it.

    That is all there is and, if the machine is slow, what has come back meanwhile, and not one more.
    """
    passed: list[httpx.Response] = []
    begin = time.monotonic()
    while (response := ask()).status_code == status:
        passed.append(response)
        assert len(passed) <= limit + (time.monotonic() - begin) * limit / 60
    assert len(passed) >= limit - used
    return passed, response


def denied_limit(response: httpx.Response) -> str:
    """The name of the limit that a request was denied under."""
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"] == "rate_limited"
    tier: str = response.json()["tier"]
    return tier


def left(response: httpx.Response, name: str) -> int:
    """How many are left of a limit, as a response says."""
    (found,) = re.findall(f'"{name}";r=([0-9]+)', response.headers["ratelimit"])
    return int(found)


@pytest.mark.long
def test_fastapi() -> None:
    with started_example("fastapi_app.py") as where, client(where) as http:
        login = partial(http.post, "/login", params={"name": "bob", "password": "guess"})
        _, no = pass_limit(login, 401, 3)
        assert denied_limit(no) == "login"
        search = partial(http.get, "/search", params={"words": "b a"})
        found, no = pass_limit(search, 200, 10)
        assert denied_limit(no) == "10/minute"
        answers = [(left(one, "10/minute"), one.json()) for one in found]
        assert answers[0] == (9, ["a", "b"])
        assert answers[-1] == (0, ["a"])
        assert [words for _, words in answers] == [["a", "b"] if more > 5 else ["a"] for more, _ in answers]
        assert search(headers={"X-API-Key": "invented"}).status_code == 429
        known = search(headers={"X-API-Key": "a key of ours"})
        assert known.status_code == 200
        assert known.headers.get_list("ratelimit-policy") == ['"10/minute";q=10;w=60']  # the one that binds
        assert [http.get("/health").status_code for _ in range(101)] == [200] * 101


def test_flask() -> None:
    with started_example("flask_app.py") as where, client(where) as http:
        sent, no = pass_limit(partial(http.post, "/messages/bob"), 200, 3)
        assert [one.json() for one in sent[:3]] == [{"sent by": "bob"}] * 3
        assert denied_limit(no) == "3/minute"
        passed = http.post("/messages/ann")
        assert (passed.status_code, passed.headers["ratelimit-policy"]) == (200, '"default";q=100;w=60')
        _, no = pass_limit(partial(http.get, "/"), 404, 100, used=len(sent) + 2)
        assert denied_limit(no) == "default"
        assert http.get("/health").text == "well"


@pytest.mark.long
def test_django() -> None:
    with started_example("django_app.py", "--bind=127.0.0.1:{}") as where, client(where) as http:
        login = partial(http.post, "/login")
        right = partial(login, headers={"X-Password": "secret"})
        assert [right().text for _ in range(4)] == ["welcome"] * 4
        tries, no = pass_limit(login, 401, 3)
        assert denied_limit(no) == "POST /login"
        late: list[httpx.Response] = []

        def shut_out() -> bool:
            late.append(right())
            if late[-1].status_code == 200:
                login()  # one has come back meanwhile, which fails too
            return late[-1].status_code == 429

        wait_for(shut_out, "a denial of the right password")
        assert denied_limit(late[-1]) == "POST /login"
        assert http.get("/").text == "hello"
        used = 4 + len(tries) + 2 * len(late) + 1
        assert denied_limit(pass_limit(partial(http.get, "/"), 200, 100, used)[1]) == "default"


@pytest.mark.long
def test_litestar() -> None:
    with started_example("litestar_app.py") as where, client(where) as http:
        reports, no = pass_limit(partial(http.get, "/report"), 200, 2)
        assert [one.json() for one in reports[:2]] == [{"visitors": 7}] * 2
        assert denied_limit(no) == "/report"
        before = left(http.get("/", headers={"x-api-key": "another"}), "default")
        costs = {"another": 0, "mine": 0}
        for _ in range(20):  # it seems to cost less if something comes back meanwhile
            for key, cost in costs.items():
                after = left(http.get("/", headers={"x-api-key": key}), "default")
                before, costs[key] = after, max(cost, before - after)
            if costs == {"another": 1, "mine": 2}:
                break
        assert costs == {"another": 1, "mine": 2}, "who has a key pays less"
        home = http.get("/")
        assert (home.text, home.headers["ratelimit-policy"]) == ("hello", '"default";q=100;w=60')
        assert denied_limit(pass_limit(partial(http.get, "/"), 200, 50, used=50)[1]) == "default"


def test_starlette_websocket() -> None:
    with (
        started_example("starlette_websocket.py") as where,
        connect(f"ws://{where}/echo", proxy=None, open_timeout=PATIENCE, ping_interval=None) as ws,
    ):
        begin = time.monotonic()
        answers: list[str] = []

        def full_wait() -> bool:
            """Send one more. Two seconds are told when it is denied at once after one that has passed."""
            ws.send(f"message {len(answers)}")
            while "rate_limit_warning" in (answer := str(ws.recv(PATIENCE))):
                pass
            answers.append(answer)
            return "2000" in answer

        wait_for(full_wait, "a denial")
        passed = [answer for answer in answers if answer.startswith("message")]
        assert passed[:3] == answers[:3] == ["message 0", "message 1", "message 2"]
        assert len(passed) <= 3 + (time.monotonic() - begin) / 2
        denials = [json.loads(answer) for answer in answers if answer not in passed]
        waits = {denial.pop("retry_after_ms") for denial in denials}
        assert waits <= {1000, 2000}
        assert denials == [{"type": "rate_limited", "tier": "received"}] * len(denials)


def test_decorator() -> None:
    done = subprocess.run(
        command("decorator.py"), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[:3] == ["bob sends 'one'", "bob sends 'two'", "bob sends 'three'"]
    assert re.fullmatch(r"rate limited: agent 'bob' at 3/minute, retry after \d+ms", lines[3])
    assert lines[4:] == ["bob has 0 left, ann has 3", *["small has read 500 characters"] * 3]


@pytest.mark.parametrize("shared", [False, True], ids=["one process", "a server"])
def test_llm_proxy(shared: bool, tmp_path: Path, server: ValkeyServer) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    with (
        unused_port() as port,
        listening_process(port, [sys.executable, "-m", "tests.support.language_model", str(port)], cwd=ROOT),
    ):
        surroundings = {"LLM": f"http://127.0.0.1:{port}", "NO_PROXY": "*", **({"STORE": server.url} if shared else {})}
        with started_example("llm_proxy.py", cwd=tmp_path, **surroundings) as where, client(where) as http:
            assert ask_model(http, "hello", 100, key="invented")[0] == 401
            assert ask_model(http, "hello", 100_000)[0] == 422
            status, text = ask_model(http, "hello", 100)
            assert (status, text.count("water"), text.count("[DONE]")) == (200, 100, 1)
            assert budget(http) == Decimal("99.996500")  # as the model reports
            assert ask_model(http, "fail", 100)[0] == 502
            assert budget(http) == Decimal("99.996500")
            with pytest.raises(httpx.RemoteProtocolError):
                ask_model(http, "hang up", 100)
            assert budget(http) == Decimal("99.996455")  # the prompt of 10 tokens, and two words
            status, text = ask_model(http, "w" * 1_600_000, 100, key="hooli's key")  # more than its dollar
            assert (status, json.loads(text)["account"]) == (429, "hooli")
        with started_example("llm_proxy.py", cwd=tmp_path, **surroundings) as where, client(where) as http:
            assert budget(http) == Decimal("99.996455")  # a restart forgets nothing


def ask_model(http: httpx.Client, prompt: str, most: int, key: str = "initech's key") -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": most}
    answer = http.post("/chat", json=body, headers={"x-api-key": key})
    return answer.status_code, answer.text


def budget(http: httpx.Client, customer: str = "initech") -> Decimal:
    """The dollars left of what a customer may spend."""
    found = http.get("/budget", headers={"x-api-key": f"{customer}'s key"}).json()
    return Decimal(found[customer].split()[0])


def test_every_example_is_tested() -> None:
    tested = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    assert [path.name for path in EXAMPLES.glob("*.py") if path.stem.removesuffix("_app") not in tested] == []
