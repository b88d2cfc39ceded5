"""Every value of the policy in effect tells where it comes from; what overrules the file is seen and logged."""

import logging
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate import Gate, Policy, RedisStore
from headgate.gate.change_log import KEPT, condense
from headgate.gate.changes import block, default, exemption, no_default, no_override, override, role, session_limit
from headgate.gate.reload import PolicyWatcher
from headgate.gate.sources import PolicyValue, policy_values
from headgate.stores.base import Change, LogPage
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for
from tests.support.verbs import Verbs

pytestmark = pytest.mark.once

POLICY = Policy(
    limits={"heavy": "5/minute", "http": {"light": "120/minute"}},
    exempt=["monitor"],
    agents={"planner": {"ws": {"heavy": "7/minute"}, "session": "2/second"}, "a.b": {"light": ["9/minute", "90/hour"]}},
)


def value_at(gate: Gate, path: str) -> PolicyValue | None:
    found = [one for one in gate.values() if one.path == path]
    assert len(found) < 2
    return found[0] if found else None


def test_values_are_those_of_the_policy_in_effect() -> None:
    gate = Gate(POLICY)
    assert {one.path: one.value for one in gate.values()} == POLICY.values()
    sources = {one.path: one.source for one in gate.values()}
    given = ["limits.ws.heavy", "limits.http.heavy", "limits.http.light", "exempt"]
    given += ["agents.planner.ws.heavy", "agents.planner.session", 'agents."a.b".ws.light', 'agents."a.b".http.light']
    assert sorted(path for path, source in sources.items() if source == "file") == sorted(given)
    assert sources["limits.ws.light"] == sources["warn_at"] == sources["backoff.quiet"] == "default"
    assert {one.source for one in gate.values()} == {"file", "default"}
    assert {(one.file_value, one.by, one.at) for one in gate.values()} == {(None, "", None)}


def test_a_changed_value_tells_who_changed_it_and_what_the_file_says(tmp_path: Path, verb: Verbs) -> None:
    with Gate(POLICY, remember=tmp_path / "headgate.db") as gate:
        begin = time.time()
        gate.set_default("heavy", "1/minute", by="eve")
        gate.set_default("heavy", "20/minute", "ws", by="ada")
        gate.change([session_limit("3/second"), override("new", "light", "8/minute"), exemption("vip")], by="bob")
        gate.change([override("planner", "heavy", "9/minute"), session_limit("5/second", "planner")], by="bob")
        found = {one.path: one for one in verb(gate, "values")() if one.source == "change"}
    assert all(one.at is not None and begin <= one.at <= time.time() for one in found.values())
    assert {path: (one.value, one.file_value, one.by) for path, one in found.items()} == {
        "limits.ws.heavy": ('"20/minute"', '"5/minute"', "ada"),
        "limits.http.heavy": ('"1/minute"', '"5/minute"', "eve"),
        "sessions.limit": ('"3/second"', None, "bob"),
        "agents.new.ws.light": ('"8/minute"', None, "bob"),
        "agents.new.http.light": ('"8/minute"', None, "bob"),
        "agents.planner.ws.heavy": ('"9/minute"', '"7/minute"', "bob"),
        "agents.planner.http.heavy": ('"9/minute"', None, "bob"),
        "agents.planner.session": ('"5/second"', '"2/second"', "bob"),
        "exempt": ('["monitor", "vip"]', '["monitor"]', "bob"),
    }


def test_the_values_in_effect_are_a_policy_with_the_same_effect() -> None:
    gate = Gate(POLICY)
    gate.change([default("heavy", "20/minute", "ws"), override("new", "light", "3/s; 8/minute"), exemption("vip")])
    gate.change([session_limit("3/second"), session_limit("1/second", "new"), no_override("a.b", "light")])
    text = "\n".join(f"{one.path} = {one.value}" for one in gate.values())
    same = Gate(Policy(**tomllib.loads(text)))
    for agent in ("planner", "a.b", "new", "vip", "monitor", "anybody"):
        assert same.effective.limits_of(agent) == gate.effective.limits_of(agent)
        assert same.effective.session_limit_of(agent) == gate.effective.session_limit_of(agent)


def test_a_removed_override_of_the_file_shows_what_holds_instead() -> None:
    gate = Gate(POLICY)
    gate.remove_override("planner", by="ada")
    gate.remove_override("nobody", by="ada")
    found = value_at(gate, "agents.planner.ws.heavy")
    assert found is not None
    assert (found.value, found.source, found.file_value, found.by) == ('"5/minute"', "change", '"7/minute"', "ada")
    session = value_at(gate, "agents.planner.session")
    assert session is not None
    assert (session.value, session.source, session.file_value) == ('"unlimited"', "change", '"2/second"')
    assert value_at(gate, "agents.planner.http.heavy") is None
    assert value_at(gate, "agents.nobody.ws.heavy") is None
    assert gate.overruled == ["agents.planner.ws.heavy", "agents.planner.session"]


def test_a_value_that_was_taken_back_is_the_files_again() -> None:
    gate = Gate(POLICY)
    before = gate.values()
    gate.change([default("heavy", "1/minute"), session_limit("1/second"), override("new", "light", "1/minute")])
    gate.change([exemption("vip"), exemption("monitor", exempt=False), session_limit("1/second", "new")])
    gate.change([no_default(), no_default("session"), no_override("new"), session_limit(None, "new")])
    gate.change([exemption("vip", exempt=False), exemption("monitor"), block("planner"), role("planner", "admin")])
    assert gate.values() == before, "blocks and roles are no values of a policy"
    assert gate.overruled == []


def test_a_change_to_what_the_file_says_is_a_change_that_overrules_nothing() -> None:
    gate = Gate(POLICY)
    gate.set_default("heavy", "5/minute", "ws", by="ada")
    found = value_at(gate, "limits.ws.heavy")
    assert found is not None
    assert (found.source, found.file_value, found.by) == ("change", None, "ada")
    assert gate.overruled == []


def test_a_compacted_log_no_longer_tells_who_it_was() -> None:
    course = [default("heavy", "20/minute"), override("planner", "heavy", "9/minute"), exemption("vip")]
    later = Change((override("planner", "heavy", "8/minute", "ws"),), "ada", 5.0)
    page = LogPage(tuple(condense(POLICY, course)), [later], KEPT)
    found = {one.path: one for one in policy_values(POLICY, page)}
    expected = PolicyValue("limits.ws.heavy", '"20/minute"', "change", '"5/minute"', "", None)
    assert found["limits.ws.heavy"] == expected
    assert (found["exempt"].source, found["exempt"].at) == ("change", None)
    assert (found["agents.planner.ws.heavy"].by, found["agents.planner.ws.heavy"].at) == ("ada", 5.0)


def test_changes_of_another_policy_are_left_out() -> None:
    gate = Gate(Policy(tiers=["bulk"], limits={"bulk": "2/minute"}))
    gate.change([default("bulk", "3/minute"), override("a", "bulk", "4/minute")])
    gate.reload(Policy())
    assert [one for one in gate.values() if one.source != "default"] == []


# What overrules the file ----------------------------------------------------------------------------------------------


def test_only_what_the_file_says_is_overruled() -> None:
    gate = Gate(POLICY)
    gate.change([default("normal", "1/minute"), session_limit("1/second"), override("new", "light", "1/minute")])
    assert gate.overruled == [], "the file says nothing of these"
    gate.set_default("light", "1/minute")
    assert gate.overruled == ["limits.http.light"], "even if it says the same as the default"
    gate.change([default("heavy", "1/minute"), override("planner", "heavy", "1/minute"), no_override("a.b")])
    gate.change([session_limit("1/second", "planner")])
    assert gate.overruled == [
        "limits.ws.heavy",
        "limits.http.light",
        "limits.http.heavy",
        "agents.planner.ws.heavy",
        'agents."a.b".ws.light',
        'agents."a.b".http.light',
        "agents.planner.session",
    ]
    gate.overruled.clear()
    assert len(gate.overruled) == 7
    gate.remove_default("heavy")
    assert "limits.ws.heavy" not in gate.overruled
    gate.reload(Policy(sessions={"limit": "9/second"}))
    assert gate.overruled == ["sessions.limit"]


def test_what_is_overruled_is_found_once_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, calls, gives = Gate(POLICY), list[str](), Policy.gives

    def counted(policy: Policy, path: str) -> bool:
        calls.append(path)
        return gives(policy, path)

    monkeypatch.setattr(Policy, "gives", counted)
    for _ in range(5):
        assert gate.overruled == []
    once = len(calls)
    assert once == len(set(calls)) > 0
    gate.add_exemption("vip")
    for _ in range(5):
        assert gate.overruled == []
    assert len(calls) == 2 * once


def test_a_reload_that_is_overruled_is_logged(caplog: pytest.LogCaptureFixture, verb: Verbs) -> None:
    gate = Gate(Policy())
    gate.change(
        [default("heavy", "20/minute", "ws"), override("planner", "light", "1/minute"), default("light", "2/s")]
    )
    with caplog.at_level(logging.WARNING):
        verb(gate, "reload")(Policy(limits={"heavy": "5/minute"}, agents={"planner": {"ws": {"light": "6/minute"}}}))
    assert [record.getMessage() for record in caplog.records] == [
        (
            'changes made while running overrule the reloaded policy: limits.ws.heavy = "5/minute" (in effect: '
            '"20/minute"), agents.planner.ws.light = "6/minute" (in effect: "1/minute"); take changed defaults back by '
            "`headgate defaults reset` or Gate.remove_default, and override agents with the limits of the policy"
        )
    ]
    caplog.clear()
    gate.reload(Policy(limits={"heavy": "5/minute"}, agents={"planner": {"ws": {"light": "6/minute"}}}, warn_at=0.5))
    assert caplog.records == [], "that reload has changed other values"
    gate.reload(Policy(limits={"heavy": "6/minute"}))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "limits.ws.heavy = " in caplog.text
    assert "planner" not in caplog.text


def test_a_long_list_of_what_is_overruled_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    gate.change([override(f"agent-{number}", "heavy", "1/minute") for number in range(50)])
    gate.reload(Policy(agents={f"agent-{number}": {"heavy": "2/minute"} for number in range(50)}))
    assert len(gate.overruled) == 100
    assert caplog.text.count("agents.agent-") == 5
    assert ", and 95 more;" in caplog.text


def test_a_value_that_a_file_begins_to_give_is_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text("warn_at = 0.5\n", encoding="utf-8")
    gate = Gate(Policy.load(path))
    gate.set_default("heavy", "20/minute")
    with PolicyWatcher(gate, path, interval=0.01):
        path.write_text('warn_at = 0.5\n[limits.ws]\nheavy = "10/minute"\n', encoding="utf-8")  # the default
        wait_for(lambda: gate.overruled == ["limits.ws.heavy"], "the reload")
    assert 'limits.ws.heavy = "10/minute" (in effect: "20/minute")' in caplog.text


def test_what_was_given_is_no_part_of_what_a_policy_is() -> None:
    assert Policy(limits={"heavy": "10/minute"}) == Policy()
    assert Policy(**POLICY.settings()) == POLICY
    assert Policy(limits={"heavy": "10/minute"}).given == {"limits.heavy"}
    assert Policy(agents={"a": {"heavy": "1/s"}}, hub={"port": 1}, backoff={"quiet": 3}).given == {"backoff.quiet"}


@pytest.fixture(params=["memory", "sqlite", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Gate]:
    if request.param != "redis":
        remember: Any = tmp_path / "headgate.db" if request.param == "sqlite" else None
        return lambda: Gate(POLICY, remember=remember)
    server: ValkeyServer = request.getfixturevalue("redis_server")
    return lambda: Gate(POLICY, store=RedisStore(server.url, prefix=f"sources-{tmp_path.name}:", timeout=PATIENCE))


def test_every_log_tells_the_sources(opened: Callable[[], Gate]) -> None:
    gate = opened()
    gate.change([default("heavy", "20/minute", "ws"), override("new", "light", "8/minute")], by="ada")
    found = value_at(gate, "limits.ws.heavy")
    assert found is not None
    assert (found.value, found.source, found.file_value, found.by) == ('"20/minute"', "change", '"5/minute"', "ada")
    assert found.at == gate.history()[0].at
    assert gate.overruled == ["limits.ws.heavy"]
    gate.close()
    store: Any = gate.store
    if isinstance(store, RedisStore):
        store.close()
