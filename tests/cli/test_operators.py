"""The commands of operators, against a real hub: agents, blocks, tokens, admins, defaults, changes and the rest."""

import json
import os
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from headgate import ManualClock, Policy
from headgate.cli import block
from headgate.cli.agent_page import page_text
from headgate.gate.changes import session_limit
from headgate.hub.config_file import ConfigFile
from tests.support.admin import FEW
from tests.support.agent_connections import ping_until_denied
from tests.support.cli import Command, StartHub
from tests.support.hub import ADMIN, VIEWER
from tests.support.hub_answers import DETAIL
from tests.support.valkey import wait_for

pytestmark = pytest.mark.once

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time of the commands: that of the hub, whose clock stands still."""
    wall = ManualClock(start=1000).wall()
    monkeypatch.setattr(block, "time", lambda: wall)
    return wall


# What is it doing? ----------------------------------------------------------------------------------------------------


def test_from_an_alert_to_a_block_it_takes_two_commands(running_hub: StartHub, headgate: Command) -> None:
    with running_hub(FEW) as hub, hub.agent("planner") as planner, hub.http(VIEWER) as viewer:
        ping_until_denied(planner, 12)
        wait_for(lambda: viewer.get("/api/admin/alerts").json()["open"], "the alert")
        out = headgate("alerts", "--open").expect_output()
        assert re.search(rf"^{TIME}  planner  open +\d+  ws ping +127\.0\.0\.1$", out, re.MULTILINE)
        out = headgate("agents", "planner").expect_output()
        assert re.search(r"^denied action +tier +last minute +last hour\nws ping +light +12 +12$", out, re.MULTILINE)
        rows = re.findall(rf"^{TIME}  ws ping  light  127\.0\.0\.1  +\d+ s +(\d+)$", out, re.MULTILINE)
        assert sum(map(int, rows)) == 10
        assert headgate("block", "planner") == (0, "planner is blocked until it is unblocked\n", "")
        assert planner.ask("status")["type"] == "rate_limited"
        out = headgate("agents", "planner").expect_output()
        assert "\nblocked       until it is unblocked\n" in out


def test_f1_alerts_of_accounts_are_listed_with_those_of_agents(running_hub: StartHub, headgate: Command) -> None:
    accounts = {"at": {"acme": {"usd": "10 in all", "tools": {"web": {"usd": "10 in all"}}}}}
    policy = Policy(accounts=accounts, agents={"planner": {"account": "acme"}})
    with running_hub(policy) as hub, hub.http(ADMIN) as admin:
        hub.hub.gate.hold("planner", {"usd": "8.5"}, tool="web")
        wait_for(lambda: admin.get("/api/admin/alerts").json()["open"] == 2, "the alerts")
        out = headgate("alerts").expect_output()
        assert sorted(
            re.findall(rf"^{TIME}  acme  open +-  80 % of 10 usd in all( by web)? +-$", out, re.MULTILINE)
        ) == [
            "",
            " by web",
        ]
        assert not hub.hub.gate.hold("planner", {"usd": "2"})
        wait_for(
            lambda: "too little left of 10 usd in all " in headgate("alerts")[1], "the alert that too little is left"
        )


def test_resolved_alerts_are_listed_unless_only_open_ones_are_asked_for(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub, hub.agent("planner") as planner:
        assert headgate("alerts") == (0, "no alerts\n", "")
        ping_until_denied(planner, 12)
        wait_for(lambda: printed_json("alerts")["open"] == 1, "the alert")
        headgate("violations", "reset", "planner")
        wait_for(lambda: printed_json("alerts")["open"] == 0, "its end")
        assert headgate("alerts", "--open") == (0, "no alerts\n", "")
        assert re.search(rf"^{TIME}  planner  resolved {TIME} +12  ws ping", headgate("alerts")[1], re.MULTILINE)


def test_the_page_of_an_agent_has_everything_about_it(running_hub: StartHub, headgate: Command) -> None:
    with running_hub(FEW) as hub, hub.agent("planner") as planner:
        gate = hub.hub.gate
        gate.set_override("planner", "heavy", "100/minute", "ws")
        gate.change([session_limit("5/second burst 7", "planner")])
        gate.set_role("planner", "viewer")
        planner.ask("session_open", session=1)
        hub.run(hub.hub.scheduler.add("planner", b"{}"))
        wait_for(lambda: hub.hub.scheduler.task_of("planner"), "the task")
        ping_until_denied(planner)
        out = headgate("agents", "planner").expect_output()
        task = hub.hub.scheduler.task_of("planner")
        for line in (
            r"agent         planner",
            r"state         connected; gets no new tasks for 60 s \(1 violation\); advised wait 1 s",
            rf"registered    {TIME}",
            r"role          viewer",
            r"denied        1 in the last minute, 1 in the last hour",
            r"violations    1 in the last hour, 1 in a row",
            r"override      ws heavy=100/minute, session=5/second burst 7",
            r"sessions      1 open, signals of each: 5/second burst 7",
            rf"tasks         holds {task}, created 1 unfinished",
            rf"connection    ws from 127\.0\.0\.1 since {TIME}",
            r"bucket +used +left  limit +own",
            r"ws light +100% +0/2  2/minute",
            r"ws heavy +1% +99/100  100/minute  override",
        ):
            assert re.search(f"^{line}$", out, re.MULTILINE), (line, out)


def test_the_page_of_an_agent_counts_denials_and_violations_each_from_one_source(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub, hub.agent("planner") as planner:
        ping_until_denied(planner, 5)
        headgate("violations", "reset", "planner")
        data, out = printed_json("agents", "planner"), headgate("agents", "planner").expect_output()
        assert sum(one["last_hour"] for one in data["denied_actions"]) == len(data["denials"]) == 5
        assert "\ndenied        5 in the last minute, 5 in the last hour\n" in out
        assert "\nviolations    0 in the last hour, 0 in a row\n" in out
        last = [line for line in out.partition("last denials")[2].splitlines() if "ws ping" in line]
        assert sum(int(line.split()[-1]) for line in last) == 5
        assert len(last) == len({line.rpartition(" ")[0] for line in last}) < 5


def test_the_page_of_an_agent_says_how_long_it_gets_no_tasks(running_hub: StartHub, headgate: Command) -> None:
    policy = Policy(limits={"light": "2/minute"}, backoff={"steps": [1, 1000], "quiet": 3600})
    with running_hub(policy) as hub, hub.agent("planner") as planner:
        ping_until_denied(planner)
        planner.ask("ping")
        hub.clock.advance(1)
        out = headgate("agents", "planner")[1]
        assert "; gets no new tasks for 59 min 59 s (2 violations); advised wait 16 min 39 s\n" in out
        assert re.search(r"127\.0\.0\.1 +16 min 40 s +1$", out, re.MULTILINE)
        hub.clock.advance(60)  # its buckets are full again
        assert (
            "connected; gets no new tasks for 58 min 59 s (2 violations); advised wait 15 min 39 s\n"
            in headgate("agents", "planner")[1]
        )
        hub.clock.advance(3540)
        assert "state         connected\n" in headgate("agents", "planner")[1]


def test_the_page_of_an_agent_of_an_older_hub_does_not_say_how_long() -> None:
    older = {name: value for name, value in DETAIL.items() if name != "quiet_left_ms"}
    assert "state         connected; gets no new tasks (1 violation); advised wait 1 s\n" in page_text(older)


def test_the_page_of_an_agent_as_json_is_what_the_hub_says(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub, hub.http(ADMIN) as admin:
        hub.register("a/b")
        assert printed_json("agents", "a/b") == admin.get("/api/admin/agents/a%2Fb").json()
        where = os.environ["HEADGATE_HUB"]
        assert headgate("agents", "nobody") == (1, "", f"{where}: there is no agent 'nobody'\n")


def test_a_viewer_sees_agents_alerts_and_addresses(
    running_hub: StartHub, headgate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub(FEW) as hub:
        hub.register("planner")
        for variable in ("HEADGATE_ADMIN_TOKEN", "HEADGATE_VIEWER_TOKEN"):
            monkeypatch.delenv("HEADGATE_ADMIN_TOKEN", raising=False)
            monkeypatch.setenv(variable, VIEWER)
            for command in (["agents", "planner"], ["alerts"], ["addresses"]):
                assert headgate(*command)[::2] == (0, "")
        monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", VIEWER)
        assert "got the token from HEADGATE_ADMIN_TOKEN" in headgate("block", "planner").expect_error()


def test_denied_addresses_are_listed(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub, hub.http("") as stranger:
        assert headgate("addresses") == (0, "no address was denied within the last hour\n", "")
        for number in range(7):
            stranger.post("/api/onboard/register", json={"agent_id": f"a{number}"})
        out = headgate("addresses").expect_output()
        assert re.search(rf"^127\.0\.0\.1 +registration +2  {TIME}$", out, re.MULTILINE)
        assert printed_json("addresses")["addresses"][0]["denials"] == 2


# The brake ------------------------------------------------------------------------------------------------------------


def test_a_block_has_an_end_and_a_reason(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any], now: float
) -> None:
    with running_hub(FEW) as hub:
        hub.register("planner")
        gate = hub.hub.gate
        end = datetime.fromtimestamp(now + 5400).strftime("%Y-%m-%d %H:%M:%S")
        assert headgate("block", "planner", "--for", "1h30m", "--reason", "it loops") == (
            0, f"planner is blocked until {end} (it loops)\n", "",
        )  # fmt: skip
        found = gate.block_of("planner")
        assert found
        assert (found.until, found.reason) == (now + 5400, "it loops")
        zone = printed_json("block", "planner", "--until", "2030-01-01T12:00+02:00")
        assert zone["until"] == 1893492000.0
        local = printed_json("block", "planner", "--until", "2030-01-01T12:00")
        assert local["until"] == datetime(2030, 1, 1, 12).timestamp()
        assert local == {
            "agent_id": "planner", "blocked": True, "until": local["until"], "reason": "", "registered": True,
        }  # fmt: skip
        assert headgate("unblock", "planner") == (0, "planner is no longer blocked: its limits apply\n", "")
        assert gate.block_of("planner") is None
        assert headgate("unblock", "planner") == (0, "planner was not blocked\n", "")
        assert printed_json("unblock", "planner")["was_blocked"] is False


def test_a_block_of_somebody_unknown_holds_and_says_so(running_hub: StartHub, headgate: Command) -> None:
    with running_hub(FEW) as hub:
        note = "note: no agent named plannr is registered\n"
        assert headgate("block", "plannr") == (0, "plannr is blocked until it is unblocked\n", note)
        assert hub.hub.gate.is_blocked("plannr")
        assert headgate("unblock", "plannr") == (0, "plannr is no longer blocked: its limits apply\n", "")
        assert headgate("unblock", "plannr") == (0, "plannr was not blocked\n", note)
        assert "reason" in headgate("block", "plannr", "--reason", "x" * 201).expect_error()
        assert not hub.hub.gate.is_blocked("plannr")


def test_a_disconnected_agent_is_gone(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub:
        token = hub.register("planner")
        with hub.agent("planner", token) as one, hub.agent("planner", token) as other:
            assert headgate("disconnect", "planner") == (0, "connections of planner closed: 2\n", "")
            for wire in (one, other):
                with pytest.raises(ConnectionClosed) as caught:
                    wire.hear()
                assert caught.value.rcvd
                assert caught.value.rcvd.reason == "disconnected by an operator"
        wait_for(lambda: printed_json("disconnect", "planner")["connections"] == 0, "the end of the connections")
        assert headgate("disconnect", "planner") == (0, "planner has no connections to this hub\n", "")
        note = "note: no agent named nobody is registered\n"
        assert headgate("disconnect", "nobody") == (0, "nobody has no connections to this hub\n", note)
        with hub.agent("planner", token) as wire:
            out = headgate("block", "planner", "--disconnect").expect_output()
            assert out == "planner is blocked until it is unblocked\nconnections of planner closed: 1\n"
            with pytest.raises(ConnectionClosed):
                wire.hear()


# Tokens and admins ----------------------------------------------------------------------------------------------------


def test_a_token_is_alone_on_standard_output(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW, registration="invitation") as hub, hub.http("") as stranger:
        code, token, err = headgate("register", "planner")
        assert (code, err) == (0, "note: planner is registered; the hub shows this token only once\n")
        with hub.agent("planner", token.removesuffix("\n")):
            pass
        where = os.environ["HEADGATE_HUB"]
        err = headgate("register", "planner").expect_error()
        assert err.startswith(f"{where}: ")
        assert err.endswith("got 'planner', which is taken; headgate rotate planner gives it a new token\n")
        code, rotated, err = headgate("rotate", "planner")
        assert (code, err) == (
            0, "note: the old token of planner no longer works; the hub shows this one only once\n",
        )  # fmt: skip
        assert rotated != token
        assert not hub.run(hub.hub.registry.verify("planner", token.strip()))
        assert hub.run(hub.hub.registry.verify("planner", rotated.strip()))
        assert headgate("revoke", "planner")[::2] == (0, "")
        assert not hub.run(hub.hub.registry.verify("planner", rotated.strip()))
        assert printed_json("revoke", "planner") == {"agent_id": "planner", "revoked": False}
        assert set(printed_json("rotate", "planner")) == {"agent_id", "token"}
        assert set(printed_json("register", "writer")) == {"agent_id", "token", "known", "limited"}
        code, invitation, err = headgate("invite")
        assert (code, err) == (0, "note: valid for one registration\n")
        body = {"agent_id": "guest", "invitation": invitation.strip()}
        assert stranger.post("/api/onboard/register", json=body).status_code == 201
        assert list(printed_json("invite")) == ["invitation", "usable"]


def test_an_invitation_to_a_closed_hub_says_that_nobody_can_use_it(running_hub: StartHub, headgate: Command) -> None:
    with running_hub(FEW, registration="closed"):
        code, _, err = headgate("invite")
        assert (code, err) == (
            0,
            (
                "note: registration is closed at this hub: nobody can use the invitation; "
                "headgate register registers an agent\n"
            ),
        )


def test_an_agent_is_registered_or_invited_for_an_account(running_hub: StartHub, headgate: Command) -> None:
    policy = Policy(accounts={"plans": {"pro": {"tokens": "10/minute"}}})
    with running_hub(policy, registration="invitation") as hub, hub.http("") as stranger:
        code, _, err = headgate("register", "planner", "--account", "acme/search", "--plan", "pro")
        assert (code, err.splitlines()[1:]) == (
            0,
            ["note: the account acme/search is new: nothing named it before", "note: nothing limits acme/search"],
        )
        err = headgate("register", "other", "--account", "acme/search")[2]
        assert err.splitlines()[1:] == ["note: nothing limits acme/search"]
        assert headgate("accounts", "move", "other", "acme")[2] == "note: nothing limits acme\n"
        hub.hub.gate.set_account_limit("acme", "usd", "5 in all")
        assert headgate("accounts", "move", "other", "acme/search")[2] == ""
        assert headgate("register", "third", "--account", "acme/search")[2].count("note") == err.count("note") - 1
        assert headgate("register", "without")[2].count("note") == err.count("note") - 1
        code, invitation, _ = headgate("invite", "--account", "acme/ops")
        assert code == 0
        body = {"agent_id": "guest", "invitation": invitation.strip()}
        assert stranger.post("/api/onboard/register", json=body).status_code == 201
        gate = hub.hub.gate
        assert [gate.path_of(name) for name in ("planner", "guest")] == ["acme/search/planner", "acme/ops/guest"]
        err = headgate("register", "writer", "--plan", "gold").expect_error()
        assert "plan: expected a plan of the policy (pro), got 'gold'" in err


def test_b6_named_admins_are_added_listed_and_removed(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub(FEW) as hub:
        hub.register("planner")
        code, token, err = headgate("admins", "add", "ann", "--role", "admin")
        assert (code, err) == (0, "note: ann is an admin; the hub shows this token only once\n")
        monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", token.strip())
        assert headgate("override", "set", "planner", "heavy=9/minute")[0] == 0
        out = headgate("changes", "--limit", "1").expect_output()
        assert re.search(rf"^{TIME}  ann at 127\.0\.0\.1  .*planner", out, re.MULTILINE)
        err = headgate("admins", "remove", "ann").expect_error()
        assert "you can't revoke yourself: another admin has to do it" in err
        err = headgate("admins", "add", "planner", "--role", "viewer").expect_error()
        assert "; headgate role set planner viewer gives it the role" in err
        headgate("block", "ann").expect_error()
        monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", ADMIN)
        listed = {one["name"]: (one["role"], one["kind"]) for one in printed_json("admins")["admins"]}
        assert listed["ann"] == ("admin", "agent")
        assert printed_json("admins", "list") == printed_json("admins")
        assert headgate("admins", "remove", "ann") == (0, "ann has no role now, and its token is revoked\n", "")
        monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", token.strip())
        assert headgate("admins") == (
            1, "", f"{os.environ['HEADGATE_HUB']}: unknown token, from HEADGATE_ADMIN_TOKEN\n",
        )  # fmt: skip


def test_b6_an_agent_is_given_a_role(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub(FEW) as hub:
        token = hub.register("planner")
        assert headgate("role", "set", "planner", "viewer") == (0, "planner is a viewer now\n", "")
        monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", token)
        assert headgate("agents", "planner")[0] == 0
        assert headgate("violations")[0] == 1
        monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", ADMIN)
        assert headgate("role", "remove", "planner") == (0, "planner has no role now; its token still works\n", "")
        assert printed_json("role", "set", "planner", "admin") == {"agent_id": "planner", "role": "admin"}
        assert printed_json("role", "remove", "planner") == {"agent_id": "planner", "role": ""}
        assert "nobody" in headgate("role", "set", "nobody", "viewer").expect_error()


# Limits ---------------------------------------------------------------------------------------------------------------


def test_defaults_are_set_and_taken_back(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub:
        before = printed_json("defaults")
        lines = """
channel  tier     limit
ws       light    2/minute
ws       normal   60/minute
ws       heavy    10/minute
http     light    2/minute
http     normal   60/minute
http     heavy    10/minute
-        session  unlimited
""".lstrip()
        assert headgate("defaults") == headgate("defaults", "list") == (0, lines, "")
        out = headgate("defaults", "set", "light=7/minute", "session=5/second burst 7").expect_output()
        assert re.findall("7/minute|session .*", out) == ["7/minute", "7/minute", "session  5/second burst 7"]
        _, out, err = headgate("defaults", "set", "heavy=9/minute", "--channel", "ws")
        assert out.count("9/minute") == 1
        assert str(hub.hub.gate.effective.limits["ws", "light"]) == "7/minute"
        after = printed_json("defaults")
        err = headgate("defaults", "reset", "light", "bulk").expect_error()
        assert err == "expected tiers of the hub's policy (light, normal, heavy, session), got 'bulk'\n"
        assert printed_json("defaults") == after, "nothing was changed"
        assert "2/minute" in headgate("defaults", "reset", "light")[1]
        assert printed_json("defaults", "reset", "session", "heavy") == before
        assert headgate("defaults", "set", "light=7/minute")[0] == 0
        assert printed_json("defaults", "reset") == before


def test_the_effective_policy_shows_where_each_value_comes_from(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nlight = "2/minute"\n', encoding="utf-8")
    with running_hub(Policy.load(file), config=ConfigFile(file, {})):
        headgate("defaults", "set", "light=7/minute", "--channel", "ws")
        headgate("defaults", "set", "heavy=9/minute", "--channel", "http")
        out = headgate("policy", "show", "--effective").expect_output()
        by = rf"change by admin at 127\.0\.0\.1, {TIME}"
        for line in (
            rf"limits\.ws\.light +\S*7/minute\S* +{by}; overrules the file, which says \S*2/minute\S*",
            r"limits\.http\.light +\S*2/minute\S* +file",
            rf"limits\.http\.heavy +\S*9/minute\S* +{by}",
            r"limits\.ws\.heavy +\S*10/minute\S* +default",
            r"warn_at +0\.8 +default",
        ):
            assert re.search(f"^{line}$", out, re.MULTILINE), (line, out)
        assert "limits.ws.light" in printed_json("policy", "show", "--effective")["overruled"]


def test_a_reload_says_what_waits_and_what_is_overruled(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text("[hub]\nport = 8080\n", encoding="utf-8")
    with running_hub(Policy.load(file), config=ConfigFile(file, {})) as hub:
        assert headgate("reload") == (0, "the policy file is reloaded\n", "")
        headgate("defaults", "set", "light=7/minute", "--channel", "ws")
        file.write_text('[limits]\nlight = "3/minute"\n[hub]\nport = 9000\n', encoding="utf-8")
        out = headgate("reload").expect_output()
        _, waits, overruled = out.splitlines()
        assert waits == "waits for a restart of the hub: hub.port"
        assert overruled.startswith("overruled by stored changes: limits.ws.light (headgate policy show --effective ")
        assert printed_json("reload")["waits_for_restart"] == ["hub.port"]
        file.write_text('[limits]\nlight = "often"\n[hub]\nport = "x"\n', encoding="utf-8")
        assert "limits.light: " in headgate("reload").expect_error()
        assert str(hub.hub.gate.effective.limits["http", "light"]) == "3/minute"
    with running_hub():
        err = headgate("reload").expect_error()
        assert err.endswith("the hub was started without --config, so there is no file to reload\n")


def test_exempt_agents_are_replaced(running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]) -> None:
    with running_hub(FEW) as hub:
        hub.register("planner")
        headgate("exempt", "add", "old")
        note = "note: no agent named monitor is registered\n"
        assert headgate("exempt", "set", "planner", "monitor") == (0, "monitor\nplanner\n", note)
        assert hub.hub.gate.effective.exempt == {"planner", "monitor"}
        assert printed_json("exempt", "set", "planner")["agents"] == ["planner"]


# The rest -------------------------------------------------------------------------------------------------------------


def test_tasks_are_pushed_as_they_are_and_listed(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW) as hub:
        assert headgate("tasks") == (0, "no tasks\n", "")
        pushed = printed_json("tasks", "push", '{"n": 1.00000000000000000001, "a": ["ß"]}')
        assert (pushed["state"], pushed["creator"]) == ("queued", "")
        found = hub.run(hub.hub.scheduler.find(pushed["task_id"]))
        assert found
        assert bytes(found.payload) == '{"n": 1.00000000000000000001, "a": ["ß"]}'.encode()
        out = headgate("tasks", "push", "5").expect_output()
        assert re.fullmatch(r"task \S+ is queued\n", out)
        assert len(printed_json("tasks")["tasks"]) == 2
        assert len(printed_json("tasks", "--limit", "1")["tasks"]) == 1
        assert len(printed_json("tasks", "--limit", "1", "list")["tasks"]) == 1, (
            "an option before the subcommand counts"
        )
        older = printed_json("tasks", "list", "--before", out.split()[1], "--state", "queued")["tasks"]
        assert [one["task_id"] for one in older] == [pushed["task_id"]]
        assert headgate("tasks", "--state", "failed") == (0, "no tasks\n", "")


def test_all_chat_channels_are_listed_and_one_is_deleted(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(FEW, max_channels_per_agent=1000) as hub:
        assert [one["name"] for one in printed_json("channels")["channels"]] == ["general"]
        for number in range(120):  # more than one page
            hub.run(hub.hub.messages.create_chat_channel(f"c{number:03}", "planner", "about"))
        names = [one["name"] for one in printed_json("channels")["channels"]]
        assert names == [*[f"c{number:03}" for number in range(120)], "general"]
        out = headgate("channels", "list").expect_output()
        assert re.search(rf"^c007 +planner +0  {TIME}  about$", out, re.MULTILINE)
        assert headgate("channels", "delete", "c007") == (
            0, "chat channel c007 is deleted, with its messages\n", "",
        )  # fmt: skip
        assert printed_json("channels", "delete", "c008") == {"name": "c008"}
        assert len(printed_json("channels")["channels"]) == 119
        assert "c007" in headgate("channels", "delete", "c007").expect_error()


def test_signals_are_written(running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]) -> None:
    with running_hub(FEW) as hub:
        token = hub.register("planner")
        signal = {"type": "seen", "entity": "page", "weight": 0.5, "timestamp": 1.0, "annotation": None}
        assert headgate("signals", "write", "planner", json.dumps(signal)) == (
            0, "signal 1 of planner is written\n", "",
        )  # fmt: skip
        assert printed_json("signals", "write", "planner", json.dumps(signal))["number"] == 2
        with hub.http(token) as planner:
            assert [one["signal"] for one in planner.get("/api/signals").json()["signals"]] == [signal] * 2
        for bad in ("5", "{}", '{"type": ""}'):
            assert "signal" in headgate("signals", "write", "planner", bad).expect_error()
        assert printed_json("signals", "write", "planner", json.dumps(signal), "--session", "9") == {"number": 3}
        err = headgate("signals", "write", "plannr", json.dumps(signal))[2]
        assert err == "note: no agent named plannr is registered\n"


def test_the_log_level_is_set(running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]) -> None:
    with running_hub(FEW):
        assert headgate("log-level", "warning") == (0, "the hub logs from level warning on, until it stops\n", "")
        assert printed_json("log-level", "info") == {"level": "info"}


def test_times_are_local(running_hub: StartHub, headgate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        with running_hub(FEW) as hub:
            hub.register("planner")
            out = headgate("block", "planner", "--until", "2030-01-01T12:00Z")[1]
            assert out == "planner is blocked until 2030-01-01 17:30:00\n"
    finally:
        monkeypatch.undo()
        time.tzset()
