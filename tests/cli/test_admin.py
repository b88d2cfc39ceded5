"""The commands that call a hub, against a real one and against impostors."""

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from headgate.cli.hub_api import HubApi, HubError
from headgate.hub.monitoring.health import Health
from tests.support.admin import FEW
from tests.support.agent_connections import ping_until_denied
from tests.support.cli import Command, StartHub
from tests.support.hub import ADMIN, VIEWER, HubServer, hub_server, hub_settings
from tests.support.ports import unused_port
from tests.support.scripted_server import scripted_server
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once

NOBODY_THERE = "expected a hub that answers, got: Connection refused; is it running? (--hub, HEADGATE_HUB)"
NOT_A_HUB = "expected the answer of a headgate hub, got something else; is the address right?"
A_TOKEN = "expected at least 16 printable ASCII characters without spaces"


# What an operator asks ------------------------------------------------------------------------------------------------


def test_agents_are_listed_with_how_they_stand(running_hub: StartHub, headgate: Command) -> None:
    with running_hub(FEW) as hub, hub.agent("planner") as planner, hub.agent("漢字") as _:
        hub.register("away")
        hub.hub.gate.set_override("planner", "heavy", "100/minute")
        ping_until_denied(planner, 2)
        hub.hub.gate.add_exemption("monitor")
        assert headgate("agents") == (
            0,
            (
                "agent    here  used  left  bucket    in a row  hour  wait  marks\n"
                "planner  yes   100%   0/2  ws light         2     2   2 s  override\n"
                "monitor  no       -     -  -                0     0     -  exempt\n"
                "漢字     yes     0%   2/2  ws light         0     0     -\n"
            ),
            "",
        )


def test_agents_as_json_are_what_the_hub_says(running_hub: StartHub, printed_json: Callable[..., Any]) -> None:
    with running_hub(FEW) as hub, hub.agent("planner") as planner, hub.agent("漢字") as _:
        ping_until_denied(planner)
        with hub.http(VIEWER) as viewer:
            assert printed_json("agents") == {"agents": viewer.get("/api/dashboard/state").json()["agents"]}


def test_empty_lists_say_so(running_hub: StartHub, headgate: Command) -> None:
    with running_hub(FEW):
        assert headgate("agents") == (
            0,
            "no agent is connected or was recently active; --all lists all registered ones\n",
            "",
        )
        assert headgate("agents", "--all") == (0, "no agent is registered\n", "")
        assert headgate("override", "list") == headgate("override") == (0, "no agent has overrides\n", "")
        assert headgate("exempt", "list") == headgate("exempt") == (0, "no agent is exempt\n", "")
        assert headgate("violations") == (0, "no agent was denied within the last hour\n", "")
        assert headgate("violations", "list") == headgate("violations")


def test_all_agents_are_those_that_are_registered(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub, hub.agent("here") as here:
        ping_until_denied(here)
        names = [f"agent {number:03}" for number in range(120)]  # more than one page
        for name in names:
            hub.register(name)
        hub.run(hub.hub.registry.revoke("agent 007"))
        hub.hub.gate.check("agent 005", "http", "light")
        found = {one["agent_id"]: one for one in printed_json("agents", "--all")["agents"]}
        assert list(found) == [*names, "here"]
        assert [name for name, one in found.items() if one["revoked"]] == ["agent 007"]
        assert found["agent 005"]["usage"]["remaining"] == 1
        assert found["here"]["violations"] == 1
        out = headgate("agents", "--all").expect_output()
        lines = out.splitlines()
        assert lines[6] == "agent 005  no     50%   1/2  http light         0     0     -"
        assert lines[8] == "agent 007  no      0%   2/2  ws light           0     0     -  revoked"


def test_all_agents_are_listed_or_none(headgate: Command) -> None:
    registered = (200, {"agents": [{"agent_id": "b"}]})
    answers = {"/api/admin/agents?limit=100&after=": registered, "/api/admin/agents/b": (500, None)}
    with scripted_server({"agents": []}, answers=answers) as one:
        err = headgate("agents", "--all", "--hub", f"http://{one}").expect_error()
        assert err.startswith(f"http://{one}: expected the answer of a headgate hub, got HTTP status 500")


def test_a_truncated_list_of_agents_says_so(headgate: Command) -> None:
    card = {"connected": True, "usage": None, "violations": 0, "violations_last_hour": 0, "wait_left_ms": 0}
    card |= {"exempt": False, "override": False}
    with scripted_server({"agents": [{"agent_id": f"a{number}", **card} for number in range(1000)]}) as one:
        code, out, err = headgate("agents", "--hub", f"http://{one}")
        assert (code, out.count("\n")) == (0, 1001)
        assert err == "only the first 1,000 are listed; --all lists all\n"


def test_overrides_are_set_listed_and_removed(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub:
        hub.register("planner")
        assert headgate("override", "set", "planner", "heavy=100/minute", "light=5/second burst 20") == (
            0,
            (
                "overrides of planner:\n"
                "agent    channel  tier   limit\n"
                "planner  ws       heavy  100/minute\n"
                "planner  ws       light  5/second burst 20\n"
                "planner  http     heavy  100/minute\n"
                "planner  http     light  5/second burst 20\n"
            ),
            "",
        )
        assert headgate("override", "set", "writer", "normal=unlimited", "--channel", "ws") == (
            0,
            "overrides of writer:\nagent   channel  tier    limit\nwriter  ws       normal  unlimited\n",
            "note: no agent named writer is registered\n",
        )
        own = {"heavy": "100/minute", "light": "5/second burst 20"}
        overrides = {"planner": {"ws": own, "http": own}, "writer": {"ws": {"normal": "unlimited"}}}
        assert printed_json("override", "list") == {"overrides": overrides, "session_overrides": {}}
        out = headgate("override", "list").expect_output()
        assert out.splitlines()[-1] == "writer   ws       normal  unlimited"
        assert headgate("override", "remove", "planner") == (
            0,
            "planner has no overrides now: the defaults apply\n",
            "",
        )
        assert printed_json("override", "remove", "writer")["override"] == {}
        assert hub.hub.gate.effective.overrides == {}
        assert printed_json("override", "set", "planner", "light=1/s")["override"]["http"] == {"light": "1/second"}


def test_the_limit_of_sessions_has_no_channel(running_hub: StartHub, headgate: Command) -> None:
    with running_hub() as hub:
        hub.register("planner")
        headgate("override", "set", "planner", "heavy=1/minute", "--channel", "ws")
        table = (
            "agent    channel  tier     limit\n"
            "planner  ws       heavy    1/minute\n"
            "planner  -        session  5/second burst 7\n"
        )
        assert headgate("override", "set", "planner", "session=5/second burst 7") == (
            0,
            f"overrides of planner:\n{table}",
            "",
        )
        assert headgate("override", "list") == (0, table, "")
        err = headgate("override", "set", "planner", "light=1/s", "session=1/s", "--channel", "ws").expect_error(2)
        assert err == "headgate override set: --channel: sessions have no channel: set session=… without --channel\n"
        assert headgate("override", "list") == (0, table, ""), "nothing was changed"


def test_letters_outside_ascii_can_be_told_apart_in_the_note(running_hub: StartHub, headgate: Command) -> None:
    with running_hub() as hub:
        hub.register("planner")
        err = headgate("override", "set", "pl\u0430nner", "heavy=1/minute").err
        assert err == "note: no agent named pl\u0430nner (pl\\u0430nner) is registered\n"


def test_exemptions_are_added_listed_and_removed(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub:
        hub.register("a/b")
        said = "is exempt now: all its requests pass; only what its holds spend is counted\n"
        assert headgate("exempt", "add", "a/b") == (0, f"a/b {said}", "")
        note = "note: no agent named monitor is registered\n"
        assert headgate("exempt", "add", "monitor") == (0, f"monitor {said}", note)
        assert headgate("exempt", "list") == headgate("exempt") == (0, "a/b\nmonitor\n", "")
        assert printed_json("exempt", "list") == {"agents": ["a/b", "monitor"]}
        assert hub.hub.gate.effective.exempt == {"a/b", "monitor"}
        assert headgate("exempt", "remove", "a/b") == (0, "a/b is no longer exempt: its limits apply\n", "")
        code, out, _ = headgate("exempt", "add", "--json", "--", "-x")  # a name that begins like an option
        assert (code, json.loads(out)) == (0, {"agents": ["-x", "monitor"], "unregistered": ["-x"]})
        assert printed_json("exempt", "remove", "monitor") == {"agents": ["-x"]}


def test_violations_are_listed_and_forgotten(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub, hub.agent("planner") as planner, hub.agent("writer") as writer:
        ping_until_denied(writer)
        ping_until_denied(planner, 3)
        assert headgate("violations") == (
            0,
            "agent    hour  in a row  wait  marks\nplanner     3         3   5 s\nwriter      1         1   1 s\n",
            "",
        )
        assert [one["agent_id"] for one in printed_json("violations")["agents"]] == ["planner", "writer"]
        assert headgate("violations", "reset", "planner") == (0, "violations of planner reset\n", "")
        assert not hub.hub.gate.is_rate_limited("planner")
        assert printed_json("violations", "reset", "writer") == {"agent_id": "writer", "reset": True}
        assert headgate("violations", "reset", "writer") == (0, "writer had no violations to reset\n", "")
        note = "note: no agent named nobody is registered\n"
        assert headgate("violations", "reset", "nobody")[2] == note
        code, out, _ = headgate("violations", "--json", "reset", "writer")  # before the subcommand it counts too
        assert (code, json.loads(out)) == (0, {"agent_id": "writer", "reset": False})


# Which hub, and which token -------------------------------------------------------------------------------------------


def test_the_option_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch, headgate: Command) -> None:
    with hub_server() as hub:
        monkeypatch.setenv("HEADGATE_HUB", "http://127.0.0.1:1")
        assert headgate("agents", "--hub", f"http://{hub}/")[0] == 0
        assert headgate("violations", "--hub", f"http://{hub}", "reset", "a")[0] == 0
        assert headgate("violations", "reset", "a", "--hub", f"http://{hub}")[0] == 0
        assert headgate("violations", "reset", "a") == (1, "", f"http://127.0.0.1:1: {NOBODY_THERE}\n")


def test_the_default_hub_is_on_port_8080(headgate: Command) -> None:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 8080))  # and doesn't listen
        except OSError:
            pytest.skip("something listens on port 8080 here")
        assert headgate("exempt", "list") == (1, "", f"http://127.0.0.1:8080: {NOBODY_THERE}\n")


def test_the_token_is_found_in_a_file_or_a_variable(
    running_hub: StartHub, monkeypatch: pytest.MonkeyPatch, headgate: Command, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(f"{ADMIN}\n")
    bad.write_text("another-token-of-nobody")
    with running_hub(FEW):

        def unknown(origin: str) -> tuple[int, str, str]:
            return 1, "", f"{os.environ['HEADGATE_HUB']}: unknown token, from {origin}\n"

        assert headgate("violations", "--token-file", str(bad)) == unknown(f"the file {bad}")
        monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", "wrong" * 5)
        monkeypatch.setenv("HEADGATE_ADMIN_TOKEN_FILE", str(good))
        assert headgate("violations") == unknown("HEADGATE_ADMIN_TOKEN")
        assert headgate("violations", "--token-file", str(good))[0] == 0
        monkeypatch.delenv("HEADGATE_ADMIN_TOKEN")
        assert headgate("violations")[0] == 0
        monkeypatch.delenv("HEADGATE_ADMIN_TOKEN_FILE")
        monkeypatch.setenv("HEADGATE_VIEWER_TOKEN", VIEWER)
        assert headgate("agents")[0] == 0
        wanted = "the hub requires a token: set HEADGATE_ADMIN_TOKEN, or name a file with --token-file\n"
        assert headgate("violations") == (1, "", wanted)
        where = f"{os.environ['HEADGATE_HUB']}: this needs the token of the admin; got the token from"
        assert headgate("agents", "--all") == (1, "", f"{where} HEADGATE_VIEWER_TOKEN\n")
        monkeypatch.delenv("HEADGATE_VIEWER_TOKEN")
        either = "set HEADGATE_ADMIN_TOKEN or HEADGATE_VIEWER_TOKEN, or name a file with --token-file"
        assert headgate("agents") == (1, "", f"the hub requires a token: {either}\n")


def test_a_token_that_cannot_be_one_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, headgate: Command, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    assert headgate("agents", "--token-file", str(file)) == (
        1, "", f"{file}: expected a file with a token, got: No such file or directory\n",
    )  # fmt: skip
    file.write_bytes(b"\xff\xfe")
    assert headgate("agents", "--token-file", str(file)) == (
        1, "", f"{file}: expected a file with a token, got: binary data\n",
    )  # fmt: skip
    for absent in ("~nobody-has-this-name/token", str(tmp_path), "x" * 5000):
        err = headgate("agents", "--token-file", absent).expect_error()
        assert err.startswith(f"{absent}: expected a file with a token, got: ")
    assert headgate("agents", "--token-file", "/dev/zero") == (1, "", f"the file /dev/zero: {A_TOKEN}\n")
    file.write_text("secret\r\nX-Evil: 1, and long enough")
    assert headgate("agents", "--token-file", str(file)) == (1, "", f"the file {file}: {A_TOKEN}\n")
    monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", "too-short")
    assert headgate("agents") == (1, "", f"HEADGATE_ADMIN_TOKEN: {A_TOKEN}\n")


@pytest.mark.parametrize(
    "verb", [["agents"], ["violations", "reset", "a"], ["check", "a"], ["top"], ["exempt", "list"]]
)
@pytest.mark.parametrize(
    ("option", "name"), [("--token", "ADMIN"), ("--admin-token", "ADMIN"), ("--viewer-token", "VIEWER")]
)
def test_a_token_is_no_option(headgate: Command, verb: list[str], option: str, name: str) -> None:
    err = headgate(*verb, option, "a-secret").expect_error(2)
    where = f"HEADGATE_{name}_TOKEN or in the file of --token-file"
    assert err.endswith(f"error: {option}: expected in {where}, not on the command line, where others see it\n")
    assert "a-secret" not in err


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8080", "ftp://localhost", "http://", "http://a:b@localhost", "http://localhost?a=b",
     "http://localhost#a", "http://localhost:0", "http://localhost:99999", "http://[::1", "http://local host",
     "http://localhost\n", "http://löcal"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, headgate: Command, url: str) -> None:
    expected = f"expected a URL such as http://127.0.0.1:8080, got {url!r}\n"
    assert (
        headgate("agents", "--hub", url).expect_error(2).endswith(f"headgate agents: error: argument --hub: {expected}")
    )
    if url:
        monkeypatch.setenv("HEADGATE_HUB", url)
        assert headgate("agents") == (1, "", f"HEADGATE_HUB: {expected}")


def test_a_proxy_is_used_for_remote_hubs_only(
    running_hub: StartHub, monkeypatch: pytest.MonkeyPatch, headgate: Command
) -> None:
    with running_hub(FEW) as hub, scripted_server({"agents": []}) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        for host in ("127.0.0.1", "localhost"):
            assert headgate("exempt", "list", "--hub", f"http://{host}:{str(hub).rpartition(':')[2]}")[0] == 0
        assert proxy.asked == []
        assert headgate("exempt", "list", "--hub", "http://hub.invalid/below/")[0] == 0
        assert proxy.asked == ["http://hub.invalid/below/api/admin/rate-limits/whitelist"]


def test_tls_needs_a_trusted_certificate(monkeypatch: pytest.MonkeyPatch, headgate: Command, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, trusted = tmp_path / "certificate.pem", tmp_path / "authority.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(trusted))
    with hub_server(tls_certificate=certificate) as hub:
        err = headgate("exempt", "list", "--hub", f"https://{hub}").expect_error()
        assert err.startswith(f"https://{hub}: expected a trusted certificate, got: ")
        assert err.endswith("; SSL_CERT_FILE names a file with trusted authorities\n")
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        assert headgate("exempt", "list", "--hub", f"https://{hub}") == (0, "no agent is exempt\n", "")


# Hubs that are away, or are none --------------------------------------------------------------------------------------


EVERY = [
    ["agents"],
    ["agents", "--all"],
    ["agents", "a"],
    ["alerts"],
    ["block", "a"],
    ["block", "a", "--disconnect"],
    ["unblock", "a"],
    ["disconnect", "a"],
    ["register", "a"],
    ["revoke", "a"],
    ["invite"],
    ["override", "set", "a", "light=1/s"],
    ["override", "remove", "a"],
    ["override", "list"],
    ["defaults"],
    ["defaults", "set", "light=1/s"],
    ["defaults", "reset", "light"],
    ["exempt", "add", "a"],
    ["exempt", "remove", "a"],
    ["exempt", "set", "a"],
    ["exempt", "list"],
    ["violations"],
    ["violations", "reset", "a"],
    ["changes"],
    ["reload"],
    ["tasks"],
    ["tasks", "push", "{}"],
    ["channels"],
    ["channels", "delete", "a"],
    ["admins"],
    ["admins", "add", "a", "--role", "admin"],
    ["role", "set", "a", "viewer"],
    ["log-level", "debug"],
    ["policy", "show", "--effective"],
    ["check", "a", "--tier", "light"],
]


def test_the_store_of_a_hub_of_another_version_is_no_traceback(headgate: Command) -> None:
    with scripted_server({"store": "ok"}) as one:
        assert headgate("store", "--hub", f"http://{one}") == (1, "", f"http://{one}: {NOT_A_HUB}\n")


@pytest.mark.parametrize("away", [True, False])
def test_an_outage_of_the_store_tells_its_address_without_the_password(
    away: bool, headgate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "redis+cluster://10.0.0.5:6379,10.0.0.6"
    hub = HubServer(hub_settings(store=f"{address.replace('://', '://me:secret@')}/0?password=more"))
    try:
        monkeypatch.setattr(Health, "store", "away" if away else "ok")
        code, out, _ = headgate("store", "--hub", f"http://{hub}")
        assert code == away
        assert out.splitlines()[1:] == [f"start {address}, or correct --store of the hub"] * away
    finally:
        hub.stop()


@pytest.mark.parametrize("verb", EVERY, ids=" ".join)
def test_every_command_says_what_is_wrong_with_its_hub(headgate: Command, verb: list[str]) -> None:
    undecided = 3 if verb[0] == "check" else 1
    prefix = "headgate check: undecided: " if verb[0] == "check" else ""

    def refused(hub: object, text: str) -> None:
        assert headgate(*verb, "--hub", f"http://{hub}") == (undecided, "", f"{prefix}http://{hub}: {text}\n")

    with unused_port() as port:
        refused(f"127.0.0.1:{port}", NOBODY_THERE)
    bodies: list[Any] = [b"<html>", b"[]", b"\xff", {}, {"agents": 5, "overrides": [5], "override": 5}]
    for body in bodies:
        with scripted_server(body) as one:
            refused(one, NOT_A_HUB)
    with scripted_server({"error": "internal", "detail": "the hub\x1b[2Jmade\na mistake"}, status=500) as one:
        refused(one, "the hub\\x1b[2Jmade; a mistake")
    others: list[tuple[Any, int]] = [(b"Bad gateway", 502), ({"detail": "Not Found"}, 404)]  # the latter is FastAPI's
    for body, status in others:
        with scripted_server(body, status=status) as one:
            refused(one, f"expected the answer of a headgate hub, got HTTP status {status}; is the address right?")


def test_a_token_does_not_follow_a_redirect(headgate: Command) -> None:
    with (
        scripted_server({"agents": []}) as thief,
        scripted_server(status=307, headers={"Location": f"http://{thief}/"}) as one,
    ):
        text = f"http://{one}: expected an answer, got a redirect to http://{thief}/; set that as --hub\n"
        assert headgate("exempt", "list", "--hub", f"http://{one}") == (1, "", text)
        assert thief.asked == []


def test_a_hub_that_does_not_answer_is_away() -> None:
    released = threading.Event()
    with scripted_server({}, before=lambda _: released.wait(PATIENCE)) as one:
        with pytest.raises(HubError, match=r"got: no answer within 0\.2 s; is it running\?") as caught:
            HubApi(f"http://{one}", "a token", "", timeout=0.2).request("GET", "/")
        released.set()
    assert caught.value.status == 0


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_a_server_that_hangs_up_is_no_hub(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=hang_up)
        thread.start()
        where = "http://{}:{}".format(*server.getsockname())
        with pytest.raises(
            HubError, match=r"expected (a hub that answers|the answer of a headgate hub), got"
        ) as caught:
            HubApi(where, "a token", "", timeout=PATIENCE).request("GET", "/")
        thread.join()
    assert caught.value.status == 0
    assert str(caught.value).isprintable()


def test_a_name_cannot_move_the_cursor_or_forge_a_line(headgate: Command) -> None:
    evil = "planner\x1b[2J\x1b[1;1H\r\nroot  yes\u202e\u2028\x9b\x07"
    shown = "planner\\x1b[2J\\x1b[1;1H\\r\\nroot  yes\\u202e\\u2028\\x9b\\x07"
    usage = {"channel": "w\ns", "tier": "\x1b", "used": 0.5, "remaining": 1, "capacity": 2}
    card = {"agent_id": evil, "connected": True, "usage": usage, "violations": 0, "violations_last_hour": 0}
    card |= {"wait_left_ms": 0, "exempt": False, "override": False}
    with scripted_server({"agents": [card], "overrides": {evil: {"w\ns": {"li\nght": "1\n/s"}}}}) as one:
        for verb in (
            ["agents"],
            ["violations"],
            ["override", "list"],
            ["override", "list", "--json"],
            ["agents", "--json"],
        ):
            out = headgate(*verb, "--hub", f"http://{one}").expect_output()
            assert all(line.isprintable() for line in out.split("\n"))
            assert len(out.splitlines()) == (1 if "--json" in verb else 2)
            assert "--json" in verb or out.splitlines()[1].startswith(shown)
    with scripted_server({"agents": [evil]}) as one:
        assert headgate("exempt", "list", "--hub", f"http://{one}") == (0, f"{shown}\n", "")
