"""Fuzzed input: the hub answers as documented or closes the connection, and logs no error."""

import asyncio
import logging
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidHandshake

from headgate.hub.api.routes import ROUTES
from headgate.hub.connections.connection import GuardedConnection
from tests.support.agent_connections import receive_until
from tests.support.fuzz_campaign import HANDSHAKE, FuzzCampaign
from tests.support.fuzzer import FRAMES, Fuzzer, websocket_frame
from tests.support.guarded_server import open_websocket
from tests.support.hub import VIEWER, AgentConnection, HubServer, hub_server
from tests.support.hub_checks import UNLIMITED, fuzzed_hub
from tests.support.hub_process import ADMIN, PLENTY, RAISED_ADDRESSES
from tests.support.response_checker import ResponseChecker
from tests.support.valkey import PATIENCE, wait_for

HUGE = [PLENTY, "60000000/minute burst 1000000", [PLENTY, "unlimited"]]
ORDINARY = f"""{RAISED_ADDRESSES}
[hub]
registration = "invitation"
shutdown_within = 30
"""


def campaign(folder: Path, config: str, seed: int, enough: int, limits: list[Any] = HUGE) -> ResponseChecker:
    with fuzzed_hub(folder, config) as (hub, tokens, problems):
        checker, begin = ResponseChecker(problems), time.monotonic()
        asyncio.run(FuzzCampaign(hub.port, Fuzzer(seed, tokens, ADMIN, VIEWER, limits), checker, enough).run())
        took = time.monotonic() - begin
        print(f"\n{checker.total:,} inputs in {took:.0f} s: {checker.total / took:,.0f}/s")
        print(
            ", ".join(f"{entrance} {quality} {times:,}" for (entrance, quality), times in sorted(checker.sent.items()))
        )
        print(", ".join(f"{what} {times:,}" for what, times in sorted(checker.seen.items())))
    return checker


@pytest.mark.long
def test_b11_a_few_thousand_inputs_of_any_kind(tmp_path: Path) -> None:
    checker = campaign(tmp_path, UNLIMITED, 1, 2000)
    assert {entrance for entrance, _ in checker.sent} == {"ws", "relay", "http", "handshake"}


@pytest.mark.long
def test_b11_a_hundred_thousand_inputs_of_any_kind(tmp_path: Path) -> None:
    routes = {f"{route.method} {route.path}" for route in ROUTES}
    routes -= {route for route in routes if "/plans/" in route}  # the policy has none
    routes -= {
        f"PUT /api/admin/{path}" for path in ("accounts/{account}", "account-defaults/levels/{level}")
    }  # of resources
    limited = {"rate_limited", "rate_limit_warning"}
    frames = {f"ws {kind}" for kind in FRAMES["from_the_hub"] if kind not in {"lagged", "going_away"} | limited}
    missing = routes | frames
    for seed, enough in ((4, 100_000), (6, 50_000), (7, 50_000)):
        if missing:  # few requests of some routes are right in all that they need, such as an open hold
            folder = tmp_path / str(seed)
            folder.mkdir()
            missing -= set(campaign(folder, UNLIMITED, seed, enough).seen)
    assert not missing  # it came through to all of them


@pytest.mark.long
def test_b11_inputs_of_any_kind_under_limits(tmp_path: Path) -> None:
    """Those of agents; and registration is by invitation."""
    checker = campaign(tmp_path, ORDINARY, 5, 20_000, ["120/minute", "60/minute burst 10", ["1/second", "20/minute"]])
    limited = {"http 429", "ws rate_limited", "ws rate_limit_warning", "relay MESSAGE_TYPE_RATE_LIMITED"}
    assert limited | {"http error invitation_required"} <= set(checker.seen)


@pytest.mark.long
def test_b11_inputs_of_any_kind_from_an_address_with_its_limit(tmp_path: Path) -> None:
    few = '[hub]\nshutdown_within = 30\n[addresses]\nconnection = "20/minute"'
    checker = campaign(tmp_path, few, 6, 10_000)
    assert checker.seen["handshake 429"]


# The OpenAPI document -------------------------------------------------------------------------------------------------

CHECKS = """
[headers]
Authorization = "Bearer {agent}"
[[operations]]
include-path-regex = "^/api/(admin|dashboard)/"
headers = {{ Authorization = "Bearer {admin}" }}
[[operations]]
include-path = "/api/onboard/rotate"
headers = {{ Authorization = "Bearer {second}" }}
[[operations]]
include-path = "/api/onboard/revoke"
headers = {{ Authorization = "Bearer {third}" }}
# Too large is rejected, too: it is not among the statuses that are expected by default.
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
"""
UNSAID = "positive_data_acceptance"
"""What a JSON Schema can't say: which characters are printable, what the text of a limit is, that 1.0 is no integer."""


def run_schemathesis(folder: Path, *options: str) -> str:
    """Run schemathesis, which knows only the document; what it prints."""
    with fuzzed_hub(folder, UNLIMITED) as (hub, tokens, _problems):
        config = folder / "schemathesis.toml"
        agent, second, third, *_ = tokens.values()
        config.write_text(CHECKS.format(agent=agent, second=second, third=third, admin=ADMIN))
        command = [str(Path(sys.executable).with_name("st")), "--config-file", str(config), "run"]
        always = ["--seed", "1", "--exclude-checks", UNSAID, "--no-color", f"http://{hub}/openapi.json"]
        patience = ["--request-timeout", str(PATIENCE), "--request-retries", "1", "--suppress-health-check", "too_slow"]
        done = subprocess.run(
            [*command, *always, *patience, *options], check=False, capture_output=True, text=True, cwd=folder
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated, \1 passed", done.stdout)
    assert found, done.stdout
    print(f"\nschemathesis: {found[0]}")
    return done.stdout


@pytest.mark.long
def test_b11_the_hub_answers_as_its_document_says(tmp_path: Path) -> None:
    told = run_schemathesis(tmp_path, "--max-examples", "40", "--phases", "examples,coverage,fuzzing,stateful")
    assert re.search(rf"Tested: {len(ROUTES) - 1}\n", told), told  # all but the document itself


# What was found -------------------------------------------------------------------------------------------------------


def has_no_mistakes(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether nothing was logged that is a mistake of the hub."""
    return not [record for record in caplog.records if record.levelno >= logging.ERROR]


def hang_up(connection: socket.socket) -> None:
    """Close a connection as a crash would."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_b11_anything_sent_after_the_hub_has_closed_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    with hub_server() as hub, open_websocket(hub) as raw:
        raw.sendall(websocket_frame(1, b"{") * 10)  # as many as close it
        receive_until(raw, b"10 invalid frames within a minute")
        raw.sendall(websocket_frame(1, b"\xff") + websocket_frame(8, (1008).to_bytes(2, "big")))
        assert raw.recv(65_536) == b""
    assert has_no_mistakes(caplog)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [("/ws", "X: y\r\n" * 200, 431), ("/ws", f"X: {'y' * 9000}\r\n", 431), (f"/ws?{'x' * 9000}", "", 414)],
)
def test_b11_an_oversized_handshake_is_answered_and_closed(path: str, headers: str, status: int) -> None:
    """uvicorn would leave the connection open, without a word."""
    with hub_server() as hub, hub.connect() as raw:
        raw.sendall(f"GET {path} {HANDSHAKE}{headers}\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65_536), b""))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@contextmanager
def identified_in_time(hub: HubServer, agent: str) -> Iterator[AgentConnection]:
    """An agent whose handshake came within the time for it; on a busy machine it may take several."""
    token, deadline = hub.register(agent), time.monotonic() + PATIENCE
    wire: AgentConnection | None = None
    with ExitStack() as stack:
        while wire is None:
            try:
                wire = stack.enter_context(hub.agent(agent, token))
            except (InvalidHandshake, OSError):
                if time.monotonic() > deadline:
                    raise
        yield wire


def test_b11_a_handshake_with_a_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedConnection, "head_within", 0.2)
    with hub_server() as hub, identified_in_time(hub, "a") as still_there:
        with hub.connect() as raw:
            raw.sendall(f"GET /ws {HANDSHAKE}Content-Length: 5\r\n\r\n".encode())
            assert raw.recv(65_536).startswith(b"HTTP/1.1 400 ")
            assert raw.recv(65_536) == b""
        with hub.connect() as silent:
            assert silent.recv(65_536) == b"", "which has just as long, from now on"
        assert still_there.ask("ping")["type"] == "pong"  # a handshake that was finished has no deadline any more


def test_b11_hanging_up_on_pipelined_requests_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """The first is answered, the second under way, the third waits. uvicorn would tell only the third."""
    with hub_server() as hub:
        begun, go_on = threading.Event(), threading.Event()
        request = f"GET /api/mailbox HTTP/1.1\r\nAuthorization: Bearer {hub.register('a')}\r\n\r\n"

        def hold(_db: object) -> None:
            begun.set()
            go_on.wait(PATIENCE)

        held = asyncio.run_coroutine_threadsafe(hub.hub.database.run(hold), hub.loop)
        assert begun.wait(PATIENCE)
        assert hub.server is not None
        connections = hub.server.server_state.connections
        raw = hub.connect()
        raw.sendall(f"GET /live HTTP/1.1\r\n\r\n{request * 2}".encode())
        assert raw.recv(12) == b"HTTP/1.1 200"
        hang_up(raw)
        wait_for(lambda: not connections, "the end of the connection")
        go_on.set()
        held.result(PATIENCE)
        hub.call(lambda: None)
    assert has_no_mistakes(caplog)


def close_code_after(hub: HubServer, path: str, sent: bytes, *, wait: bool = True) -> int:
    """Send bytes after a handshake, or together with it; the code of the close."""
    with hub.connect() as raw:
        handshake, heard = f"GET {path} {HANDSHAKE}\r\n".encode(), b""
        if wait:
            raw.sendall(handshake)
            heard, handshake = raw.recv(65_536), b""
        raw.sendall(handshake + sent)
        heard += b"".join(iter(lambda: raw.recv(65_536), b""))
    head, _, frames = heard.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    return int.from_bytes(frames[frames.index(b"\x88") + 2 :][:2], "big")


def test_b11_invalid_frames_before_the_handshake_is_answered_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with hub_server() as hub:
        assert close_code_after(hub, "/ws", websocket_frame(3, b"reserved") * 500, wait=False) == 1002
    assert has_no_mistakes(caplog)


def test_b11_a_close_right_after_invalid_text_does_not_hide_it(caplog: pytest.LogCaptureFixture) -> None:
    with hub_server() as hub:
        assert close_code_after(hub, "/ws", websocket_frame(1, b"\xff") + websocket_frame(8, b"")) == 1007
    assert has_no_mistakes(caplog)


def test_b11_a_long_reason_beyond_ascii_closes_a_dashboard(caplog: pytest.LogCaptureFixture) -> None:
    with hub_server() as hub:
        unknown = b'{"' + "💥".encode() * 100 + b'":1}'
        assert close_code_after(hub, "/ws/dashboard", websocket_frame(1, unknown)) == 1008
    assert has_no_mistakes(caplog)
