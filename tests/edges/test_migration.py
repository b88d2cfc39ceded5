"""An application on slowapi and the same on headgate: one script of requests gets the same responses from both."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.support.ports import unused_port
from tests.support.server_process import listening_process
from tests.support.valkey import PATIENCE, ValkeyServer
from tools.migration_diff import AFTER, APPS, BEFORE, GUIDE, diff, shown

pytestmark = pytest.mark.once

CALLERS = {
    "ann": {"x-api-key": "key of ann"},
    "bob": {"x-api-key": "key of bob"},
    "a stranger": {"x-forwarded-for": "203.0.113.9"},  # uvicorn trusts it from 127.0.0.1
    "another stranger": {"x-forwarded-for": "203.0.113.10", "x-api-key": "invented"},
    "the monitor": {"x-forwarded-for": "203.0.113.9", "x-monitor": "monitor"},
}
# The limits are per hour and per day, and a run takes seconds: nothing is refilled. The windows of slowapi begin with
# their first request, so none ends meanwhile.
SCRIPT = [
    ("GET /", "a stranger", 9),
    ("GET /offers", "a stranger", 9),  # which has the default limit, too, and counts by itself
    ("GET /", "another stranger", 1),
    ("GET /", "ann", 9),
    ("POST /login?name=ann", "a stranger", 3),
    ("POST /login?name=ann", "bob", 3),
    ("GET /search?words=red+apples", "ann", 7),
    ("GET /search?words=red+apples", "bob", 4),
    ("GET /search?words=red+apples", "a stranger", 4),
    ("GET /stock", "a stranger", 4),
    ("GET /stock", "the monitor", 4),
    ("GET /stock", "bob", 1),
    ("POST /orders", "ann", 3),
    ("DELETE /orders/7", "ann", 1),
    ("DELETE /orders/8", "ann", 1),
    ("POST /orders", "ann", 1),
    ("DELETE /orders/8", "bob", 1),
    ("GET /health", "a stranger", 12),
    ("GET /nothing", "a stranger", 12),
]
DENIED = [
    ("GET /", "a stranger"),
    ("GET /offers", "a stranger"),
    ("GET /", "ann"),
    ("POST /login?name=ann", "a stranger"),
    ("POST /login?name=ann", "bob"),
    ("GET /search?words=red+apples", "ann"),
    ("GET /search?words=red+apples", "bob"),
    ("GET /search?words=red+apples", "a stranger"),
    ("GET /stock", "a stranger"),
    ("DELETE /orders/8", "ann"),
    ("POST /orders", "ann"),
]

Status: TypeAlias = tuple[str, str, int]


class Run(NamedTuple):
    statuses: list[Status]
    passed: httpx.Response
    denied: httpx.Response


@contextmanager
def served_app(name: str, store: str, log: Path, folder: Path = APPS) -> Iterator[str]:
    """An application on uvicorn; its host and port."""
    with unused_port() as port, log.open("wb") as errors:
        app = [f"--app-dir={folder}", f"{name.removesuffix('.py')}:app", f"--port={port}", "--log-level=warning"]
        command = [sys.executable, "-m", "uvicorn", *app]
        with listening_process(port, command, env={**os.environ, "STORE_URL": store}, stderr=errors):
            yield f"127.0.0.1:{port}"


def ask(http: httpx.Client, what: str, caller: str) -> httpx.Response:
    method, path = what.split(" ")
    return http.request(method, path, headers=CALLERS[caller])


def chat(where: str, caller: str) -> ClientConnection:
    url, headers = f"ws://{where}/chat", CALLERS[caller]
    return connect(url, additional_headers=headers, proxy=None, open_timeout=PATIENCE, ping_interval=None)


def statuses(where: str, http: httpx.Client) -> Iterator[Status]:
    for what, caller, times in SCRIPT:
        for _ in range(times):
            yield what, caller, ask(http, what, caller).status_code
    for caller in ("a stranger", "ann"):
        with chat(where, caller) as socket:
            assert socket.response is not None
            yield "WEBSOCKET /chat", caller, socket.response.status_code
            for text in ("one", "two"):
                socket.send(text)
                assert socket.recv(PATIENCE) == text


def run(name: str, log: Path) -> Run:
    """The script, on an application with a server that has counted nothing yet."""
    with (
        ValkeyServer() as server,
        served_app(name, server.url, log) as where,
        httpx.Client(base_url=f"http://{where}", trust_env=False, timeout=PATIENCE) as http,
    ):
        found = Run(list(statuses(where, http)), ask(http, "DELETE /orders/9", "bob"), ask(http, "POST /orders", "ann"))
        assert server.client().dbsize() > 10, "the counts are there"
    if "the store is away" in log.read_text():  # to its usual timeout, as the machine was too slow
        return run(name, log)
    return found


@pytest.mark.long
def test_the_statuses_are_the_same_before_and_after(tmp_path: Path) -> None:
    before, after = (run(name, tmp_path / name) for name in (BEFORE, AFTER))
    assert after.statuses == before.statuses
    assert [(what, caller) for what, caller, status in after.statuses if status == 429] == DENIED
    assert {status for _, _, status in after.statuses} == {101, 200, 404, 429}
    for one in (before, after):
        assert (one.passed.status_code, one.passed.json()) == (200, "cancelled")
        assert (one.denied.status_code, one.denied.json()) == (429, {"message": "too many requests to /orders"})
        assert [one.passed.headers[f"x-ratelimit-{name}"] for name in ("limit", "remaining")] == ["4", "2"]
        assert [one.denied.headers[f"x-ratelimit-{name}"] for name in ("limit", "remaining")] == ["4", "0"]
        assert int(one.denied.headers["retry-after"]) > 3600


def test_one_more_option_limits_the_messages_of_the_websocket(tmp_path: Path) -> None:
    option = "websocket=WebSocketLimits(received=limit_of_plan)"
    assert f"app.add_middleware(RateLimitMiddleware, ..., {option})" in GUIDE.read_text(encoding="utf-8")
    source = (APPS / AFTER).read_text(encoding="utf-8")
    for before, after in (
        ("from headgate.http", "from headgate.edges.websocket import WebSocketLimits\nfrom headgate.http"),
        ("    body=too_many_requests,\n", f"    body=too_many_requests,\n    {option},\n"),
    ):
        assert source.count(before) == 1
        source = source.replace(before, after)
    (tmp_path / AFTER).write_text(source, encoding="utf-8")
    with served_app(AFTER, "memory://", tmp_path / "log", tmp_path) as where:
        for caller, limit in (("ann", 6), ("bob", 3), ("a stranger", 3)):
            with chat(where, caller) as socket:
                for number in range(limit + 1):
                    socket.send(str(number))
                while (answer := str(socket.recv(PATIENCE))) != str(limit - 1):
                    assert answer.isdigit() or json.loads(answer)["type"] == "rate_limit_warning"
                assert json.loads(socket.recv(PATIENCE))["type"] == "rate_limited"


def test_the_guide_shows_the_difference() -> None:
    assert shown() == diff(), "run tools/migration_diff.py"
