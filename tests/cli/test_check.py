"""`headgate check`: one decision for scripts, by a hub or by a server, and the exit code that says it."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from headgate import Gate, Limiter, ManualClock, MemoryStore, Policy, RedisStore
from headgate.cli import check as module
from headgate.http import describe_decision
from tests.support.cli import Command, StartHub
from tests.support.hub import ADMIN, VIEWER, HubServer
from tests.support.hub_answers import verdict
from tests.support.ports import unused_port
from tests.support.scripted_server import scripted_server
from tests.support.valkey import PATIENCE, ValkeyServer

pytestmark = pytest.mark.once

FEW = Policy(limits={"light": "2/minute"}, exempt=["monitor"], shadow=["heavy"])
SYNTAX = (
    "'COUNT/UNIT' or 'COUNT per N UNITS', then perhaps 'burst N' or 'sliding' (such as '60/minute burst 10'; UNIT is "
    "ms, second, minute, hour, day, week, month or year)"
)


@pytest.fixture
def check(headgate: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `headgate check`."""
    monkeypatch.setattr(module, "_TIMEOUT", PATIENCE)
    monkeypatch.setattr(module, "_WITHIN", 2 * PATIENCE)
    return partial(headgate, "check")


DENIED = verdict(outcome="deny", remaining=0, retry_after_ms=30_000, violations=1)


# By a hub -------------------------------------------------------------------------------------------------------------


def test_the_exit_code_and_a_line_say_what_the_hub_decides(running_hub: StartHub, check: Command) -> None:
    with running_hub(FEW) as hub:
        for agent in ("planner", "writer", "monitor"):
            hub.register(agent)
        light = ("planner", "--tier", "light")
        assert check(*light) == (0, "allow: ws light, 2/minute: 1 of 2 left\n", "")
        assert check(*light, "--peek") == (0, "warn: ws light, 2/minute: 1 of 2 left\n", "")  # a check would
        assert check(*light) == (0, "warn: ws light, 2/minute: 0 of 2 left\n", "")
        assert check(*light) == (1, "deny: retry in 30 s (ws light, 2/minute: 0 of 2 left)\n", "")
        assert hub.hub.gate.standing("planner").violations == 1
        assert check(*light, "--peek")[0] == 1
        assert hub.hub.gate.standing("planner").violations == 1
        hub.clock.advance(29.75)
        assert check(*light, "--peek")[:2] == (1, "deny: retry in 0.25 s (ws light, 2/minute: 0 of 2 left)\n")
        assert check(*light, "--channel", "http")[:2] == (0, "allow: http light, 2/minute: 1 of 2 left\n")
        assert check("planner", "--action", "ping", "--channel", "http")[1].startswith(
            "allow: http normal, 60/minute: 59"
        )
        assert check("writer", "--action", "ping", "--cost", "2")[1].startswith("warn: ws light, 2/minute: 0 of 2")
        never = "deny: no wait would help (ws light, 2/minute: 0 of 2 left)\n"
        assert check("writer", "--tier", "light", "--cost", "3") == (1, never, "")
        exempt = "exempt: all requests pass, none is counted\n"
        assert check("monitor", "--tier", "light") == (0, exempt, "")
        hub.hub.gate.set_override("planner", "normal", "unlimited")
        assert check("planner", "--tier", "normal") == (0, "allow: ws normal, unlimited\n", "")


def test_a_name_that_nobody_has_is_noted_beside_the_decision(running_hub: StartHub, check: Command) -> None:
    with running_hub(FEW) as hub:
        hub.register("planner")
        note = "note: no agent named plannr is registered\n"
        assert check("plannr", "--tier", "light") == (0, "allow: ws light, 2/minute: 1 of 2 left\n", note)
        assert check("plannr", "--tier", "light", "--cost", "2")[::2] == (1, note)
        assert check("plannr", "--tier", "light", "--peek", "--json")[2] == ""
        assert check("planner", "--tier", "light")[2] == ""
        assert check("defaults", "--tier", "light")[::2] == (0, "note: no agent named defaults is registered\n")


def test_as_json_it_is_one_object(running_hub: StartHub, check: Command) -> None:
    with running_hub(FEW):

        def told(*arguments: str) -> tuple[int, Any]:
            code, out, err = check(*arguments, "--json")
            assert (err, out.count("\n")) == ("", 1)
            return code, json.loads(out)

        assert told("planner", "--tier", "light") == (0, verdict())
        assert told("planner", "--tier", "light") == (0, verdict(outcome="warn", remaining=0))
        assert told("planner", "--tier", "light") == (1, DENIED)
        assert told("planner", "--tier", "light", "--cost", "3") == (
            1,
            DENIED | {"retry_after_ms": None, "violations": 2},
        )
        code, exempt = told("monitor", "--tier", "light")
        assert (code, exempt["outcome"], exempt["exempt"], exempt["limit"]) == (0, "exempt", True, "unlimited")


def test_a_limit_in_shadow_mode_shows_the_outcome_it_would_have_had(running_hub: StartHub, check: Command) -> None:
    with running_hub(FEW) as hub:
        hub.register("planner")
        watched = "allow: ws heavy, 10/minute: 10 of 10 left; in shadow mode, otherwise: deny\n"
        assert check("planner", "--tier", "heavy", "--cost", "11") == (0, watched, "")


def test_a_hub_whose_store_is_away_decides_nothing(check: Command) -> None:
    away = "the hub's store is away, so the hub doesn't know what was used elsewhere"
    for outcome in ("allow", "warn", "deny"):
        with scripted_server(verdict(outcome=outcome, degraded=True)) as one:
            text = f"headgate check: undecided: http://{one}: {away}\n"
            for more in ([], ["--json"], ["--peek"]):
                assert check("planner", "--tier", "light", "--hub", f"http://{one}", *more) == (3, "", text)


@pytest.mark.parametrize("broken", [{"outcome": "perhaps"}, {"outcome": None}, {"remaining": "some"}, {"limit": 5}])
def test_an_answer_that_is_none_is_no_decision(check: Command, broken: dict[str, Any]) -> None:
    answer = verdict(**broken)
    if broken == {"limit": 5}:
        del answer["limit"]
    with scripted_server(answer) as one:
        err = check("planner", "--tier", "light", "--hub", f"http://{one}", "--json").expect_error(3)
        assert err.startswith(
            f"headgate check: undecided: http://{one}: expected the answer of a headgate hub, got something else"
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a"], "expected --tier or --action"),
        (["a", "--store", "redis://localhost"], "expected --tier or --action, or --limit"),
        (["a", "--limit", "1/s"], "--limit: expected --store too"),
        (["a", "--limit", "1/s", "--store", "redis://x", "--channel", "ws"],
         "--limit: expected neither --channel nor --policy, which it replaces"),
        (["a", "--limit", "1/s", "--store", "redis://x", "--policy", "x"],
         "--limit: expected neither --channel nor --policy, which it replaces"),
        (["a", "--tier", "light", "--policy", "x"], "--policy: expected --store too; a hub has its own policy"),
        (["a", "--tier", "light", "--store", "redis://x", "--hub", "http://a"],
         "--store: expected neither --hub nor --token-file: it uses no hub"),
        (["a", "--limit", "1/s", "--store", "redis://x", "--token-file", "a"],
         "--store: expected neither --hub nor --token-file: it uses no hub"),
        (["a", "--tier", "light", "--peek", "--cost", "2"],
         "--cost: expected no --peek, which shows how much is left for any cost"),
        (["a", "--tier", "light", "--store", "nowhere"],
         ("store: expected a URL such as redis://host:6379/0, rediss://…, unix:///path, "
          "redis+sentinel://host:26379/name, redis+cluster://host:7000 or memory://, got 'nowhere'")),
        (["a", "--tier", "light", "--store", "redis://x", "--policy", "/nowhere/x.toml"],
         "/nowhere/x.toml: 1 mistake\n  expected a readable file, got: No such file or directory"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(check: Command, arguments: list[str], text: str) -> None:
    assert check(*arguments) == (2, "", f"headgate check: {text}\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: AGENT"),
        (["a", "--tier", "light", "--action", "b"], "argument --action: not allowed with argument --tier"),
        *[(["a", "--tier", "light", "--cost", cost],
           f"argument --cost: expected a whole number of at least 1, got {cost!r}")
          for cost in ("0", "-1", "1.5", "some", "9" * 20, "٣", "")],
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_read_are_refused(check: Command, arguments: list[str], text: str) -> None:
    err = check(*arguments).expect_error(2)
    assert err.splitlines()[-1] == f"headgate check: error: {text}"


def test_a_request_the_hub_rejects_is_a_usage_error_and_a_refused_token_is_not(
    running_hub: StartHub, monkeypatch: pytest.MonkeyPatch, check: Command
) -> None:
    with running_hub(FEW) as hub:
        for agent in ("planner", "writer", "monitor"):
            hub.register(agent)
        light = ("planner", "--tier", "light")
        for arguments, text in (
            ((*light, "--channel", "fax"), "channel: expected one of ws, http, got 'fax'"),
            (("a\nb", "--tier", "light"), "agent: expected 1 to 128 printable characters, got 'a\\nb'"),
            (("", "--tier", "light"), "body: Expected `str` of length >= 1 - at `$.agent_id`"),
        ):
            assert check(*arguments) == (2, "", f"headgate check: http://{hub}: {text}\n")
        monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", VIEWER)
        refused = "this needs the token of the admin; got the token from HEADGATE_ADMIN_TOKEN"
        assert check(*light) == (3, "", f"headgate check: undecided: http://{hub}: {refused}\n")
        monkeypatch.delenv("HEADGATE_ADMIN_TOKEN")
        err = check(*light).expect_error(3)
        assert err.startswith("headgate check: undecided: the hub requires a token: set HEADGATE_ADMIN_TOKEN, ")
        assert hub.hub.stats.outcomes() == {"allow": 0, "warn": 0, "deny": 0, "exempt": 0}


# By a server ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def agent() -> str:
    """One that nobody has asked for: the server is shared with other tests."""
    return f"agent-{uuid4().hex}"


def test_an_invalid_request_that_no_hub_has_read_is_undecided(check: Command) -> None:
    page = b"<html>400 The plain HTTP request was sent to HTTPS port</html>"
    with scripted_server(page, status=400) as one:
        err = check("a", "--tier", "light", "--hub", f"http://{one}").expect_error(3)
        text = "expected the answer of a headgate hub, got HTTP status 400; is the address right?"
        assert err == f"headgate check: undecided: http://{one}: {text}\n"


def test_a_server_decides_as_the_gates_on_it_do(
    check: Command, redis_server: ValkeyServer, tmp_path: Path, agent: str
) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nlight = "2/day"\n')  # nothing comes back while the test runs
    light = (agent, "--tier", "light", "--store", redis_server.url, "--policy", str(file))
    with RedisStore(redis_server.url, timeout=PATIENCE) as store, Gate(Policy.load(file), store=store) as gate:
        assert check(*light) == (0, "allow: ws light, 2/day: 1 of 2 left\n", "")
        assert gate.check(agent, "ws", "light").remaining == 0
        assert check(*light, "--peek")[0] == 1
        assert not gate.is_rate_limited(agent)
        code, out, err = check(*light, "--json")
        denied = json.loads(out)
        assert (code, err) == (1, "")
        assert 0 < denied["retry_after_ms"] <= 12 * 3600 * 1000
        assert denied == DENIED | {
            "agent_id": agent, "limit": "2/day", "retry_after_ms": denied["retry_after_ms"]
        }  # fmt: skip
        assert gate.standing(agent).violations == 1
        gate.set_override(agent, "light", "9/day")  # whatever was changed while running holds here too
        action = (agent, "--action", "ping", "--store", redis_server.url, "--policy", str(file), "--cost", "4")
        assert check(*action) == (0, "allow: ws light, 9/day: 5 of 9 left\n", "")
        gate.add_exemption(agent)
        assert check(*light) == (0, "exempt: all requests pass, none is counted\n", "")
        gate.remove_exemption(agent)
        gate.remove_override(agent)


def test_without_a_policy_the_defaults_hold(check: Command, redis_server: ValkeyServer, agent: str) -> None:
    told = check(agent, "--tier", "heavy", "--store", redis_server.url)
    assert told == (0, "allow: ws heavy, 10/minute: 9 of 10 left\n", "")


def test_with_a_limit_any_key_can_be_checked(check: Command, redis_server: ValkeyServer, agent: str) -> None:
    key = f"{agent}\n\x1b[2J"
    with RedisStore(redis_server.url, timeout=PATIENCE) as store, Limiter("3/hour", store=store) as limiter:
        by_key = (key, "--limit", "3/hour", "--store", redis_server.url)
        assert check(*by_key, "--cost", "3", "--peek") == (0, "warn: 3/hour: 3 of 3 left\n", "")
        assert check(*by_key, "--cost", "2") == (0, "allow: 3/hour: 1 of 3 left\n", "")
        assert limiter.check(key).remaining == 0
        assert check(*by_key, "--cost", "2", "--peek")[0] == 1
        code, out, err = check(*by_key)
        assert (code, err) == (1, "")
        assert out.startswith("deny: retry in ")
        assert out.endswith(" s (3/hour: 0 of 3 left)\n")
        limiter.reset(key)
        code, out, _ = check(*by_key, "--json")
        told = json.loads(out)
        assert told.pop("key") == key
        assert set(told) == set(verdict()) - {"agent_id", "channel", "tier"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tier", "light", "--channel", "fax"], "channel: expected one of ws, http, got 'fax'"),
        (["--limit", "often"], f"limit: expected {SYNTAX}, got 'often'"),
    ],
)
def test_invalid_arguments_for_a_server_are_usage_errors(
    check: Command, redis_server: ValkeyServer, arguments: list[str], text: str
) -> None:
    assert check("a", *arguments, "--store", redis_server.url) == (2, "", f"headgate check: {text}\n")


def test_a_server_that_is_away_decides_nothing(check: Command, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), unused_port() as port:
        for what in (["--tier", "light"], ["--limit", "1/s"]):
            err = check("a", *what, "--store", f"redis://127.0.0.1:{port}").expect_error(3)
            assert err.startswith(
                "headgate check: undecided: store: expected a Redis or Valkey server that answers, got Connection"
            )
            assert err.count("\n") == 1


@contextmanager
def cutting_proxy(server: ValkeyServer, at: bytes) -> Iterator[str]:
    """The URL of a server whose connections end for good as soon as somebody says something to it."""
    ended = threading.Event()

    def carry(source: socket.socket, target: socket.socket) -> None:
        data = b""
        with suppress(OSError):
            while (data := source.recv(65536)) and not (at in data or ended.is_set()):
                target.sendall(data)
        if data:
            ended.set()
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    with ExitStack() as things:
        listener = things.enter_context(socket.create_server(("127.0.0.1", 0)))
        sockets: list[socket.socket] = []
        threads: list[threading.Thread] = []

        def listen() -> None:
            with suppress(OSError):
                while not ended.is_set():
                    near, _ = listener.accept()
                    far = socket.create_connection(("127.0.0.1", server.port))
                    sockets.extend([things.enter_context(near), things.enter_context(far)])
                    for ends in ((near, far), (far, near)):
                        threads.append(threading.Thread(target=carry, args=ends, daemon=True))
                        threads[-1].start()

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listening.join()
        for one in sockets:  # which wakes up who reads from it; to close it would not
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def test_a_server_that_goes_away_in_the_middle_decides_nothing(check: Command, redis_server: ValkeyServer) -> None:
    with cutting_proxy(redis_server, b"a-key-to-stop-at") as url:
        told = check("a-key-to-stop-at", "--limit", "1/s", "--store", url)
        assert told == (3, "", "headgate check: undecided: the server went away before the decision\n")


def test_the_wait_is_rounded_up_to_a_millisecond() -> None:
    limiter = Limiter("3/second", store=MemoryStore(clock=ManualClock()))
    waits = [describe_decision(limiter.check("a"))["retry_after_ms"] for _ in range(4)]
    assert waits == [0, 0, 0, 334]
    assert describe_decision(limiter.check("a", cost=4))["retry_after_ms"] is None


def test_a_hub_and_a_server_answer_alike(
    running_hub: StartHub, check: Command, redis_server: ValkeyServer, tmp_path: Path, agent: str
) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nheavy = "10/day"\n')  # time stands still at the hub only
    with running_hub(Policy.load(file)):
        for more in ([], ["--peek"], ["--cost", "11"]):
            arguments = [agent, "--tier", "heavy", "--json", *more]
            assert check(*arguments) == check(*arguments, "--store", redis_server.url, "--policy", str(file))


def test_it_counts_for_a_running_hub_as_the_agents_own_requests_do(running_hub: StartHub, check: Command) -> None:
    with running_hub(FEW) as hub, hub.agent("planner") as wire:
        assert wire.ask("ping")["type"] == "pong"
        assert check("planner", "--action", "ping")[0] == 0
        assert wire.ask("ping")["type"] == "rate_limited"
        assert check("planner", "--action", "ping", "--json")[0] == 1
        assert outcomes(hub) == {"allow": 1, "warn": 1, "deny": 2, "exempt": 0}
        assert wire.ask("status")["type"] == "rate_limited"  # its tier is light too


def outcomes(hub: HubServer) -> dict[str, int]:
    with hub.http(ADMIN) as admin:
        found: dict[str, int] = admin.get("/api/metrics").json()["checks"]
        return found


def test_a_password_is_not_shown_even_if_the_url_is_mistyped(check: Command) -> None:
    for mistyped in ("redis//:secret@localhost", "redis:secret@localhost"):
        code, _, err = check("a", "--tier", "light", "--store", mistyped)
        assert (code, err.endswith("got '***@localhost'\n"), "secret" in err) == (2, True, False)
