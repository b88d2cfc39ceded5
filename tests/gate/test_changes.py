"""Changes made while running take effect, are recorded, and once acknowledged survive a kill at any moment.

How a log is compacted: test_change_log.py. How its file is made: stores/test_sqlite.py.
"""

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headgate import Gate, InvalidInput, Policy, parse
from headgate.errors import HeadgateError
from headgate.events import Event, PolicyChanged
from headgate.gate.changes import default, exemption, no_override, override
from headgate.gate.effective import AgentRules, Effective, apply_edits, effective
from headgate.gate.immutable_map import ImmutableMap
from headgate.stores.memory_tables import compiled
from headgate.stores.sqlite import ChangeLogError, SqliteChangeLog
from tests.support.lookups import count_lookups
from tests.support.valkey import PATIENCE, wait_for


def make_changes(gate: Gate) -> None:
    gate.set_override("a", "heavy", "20/minute", by="ada")
    gate.set_override("a", "heavy", "5/second; 50/minute", "ws", by="ada")
    gate.set_override("gone", "light", "1/minute")
    gate.remove_override("gone")
    gate.add_exemption("vip", by="bob")
    gate.add_exemption("was")
    gate.remove_exemption("was")
    gate.remove_exemption("filed")
    gate.set_default("light", "240/minute", by="ada")


def test_changes_survive_a_restart(tmp_path: Path) -> None:
    policy = Policy(exempt=["filed"])
    gate = Gate(policy, remember=tmp_path / "headgate.db")
    make_changes(gate)
    before = gate.effective
    history = gate.history()
    gate.close()
    with Gate(policy, remember=str(tmp_path / "headgate.db")) as again:
        assert again.effective == before
        assert again.history() == history
        assert again.check("a", "ws", "heavy").limit == parse("5/second")
        assert again.is_exempt("vip")
        assert not again.is_exempt("filed")
        assert again.capacity("anybody", "http", "light") == 240


def test_changes_without_a_file_end_with_the_process() -> None:
    gate = Gate()
    make_changes(gate)
    assert len(gate.history()) == 9
    assert Gate().history() == []


def test_the_history_records_who_changed_what_and_when(tmp_path: Path) -> None:
    with Gate(remember=tmp_path / "headgate.db") as gate:
        begin = time.time()
        make_changes(gate)
        history = gate.history()
    times = [begin, *(change.at for change in history), time.time()]
    assert times == sorted(times)
    assert [(change.by, str(change)) for change in history] == [
        ("ada", "override of 'a' for heavy set to 20/minute"),
        ("ada", "override of 'a' for ws heavy set to 5/second; 50/minute"),
        ("", "override of 'gone' for light set to 1/minute"),
        ("", "override of 'gone' removed"),
        ("bob", "exemption of 'vip' set to exempt"),
        ("", "exemption of 'was' set to exempt"),
        ("", "exemption of 'was' removed"),
        ("", "exemption of 'filed' removed"),
        ("ada", "default for light set to 240/minute"),
    ]


def test_a_change_that_cannot_be_recorded_is_not_made(tmp_path: Path) -> None:
    gate = Gate(remember=tmp_path / "headgate.db")
    gate.set_override("a", "heavy", "20/minute")
    gate.close()
    with pytest.raises(ChangeLogError, match="since it can't be recorded: Cannot operate on a closed"):
        gate.add_exemption("a")
    assert not gate.is_exempt("a")
    assert gate.capacity("a", "ws", "heavy") == 20
    assert issubclass(ChangeLogError, HeadgateError)


def test_a_file_that_is_not_a_change_log_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.db"
    bad.write_bytes(b"this is not a database, but it is long enough to be looked at" * 20)
    with pytest.raises(ChangeLogError) as caught:
        Gate(remember=bad)
    assert str(caught.value) == f"{bad}: expected an SQLite file that can be written, got: file is not a database"
    with pytest.raises(ChangeLogError, match="got: unable to open database file"):
        Gate(remember=tmp_path / "none" / "headgate.db")
    newer = tmp_path / "newer.db"
    with closing(sqlite3.connect(newer)) as file:
        file.execute("PRAGMA user_version=7")
    with pytest.raises(ChangeLogError, match="expected a change log of format 1, got format 7; use a newer headgate"):
        Gate(remember=newer)


# Several processes on one file ----------------------------------------------------------------------------------------


def test_gates_on_one_file_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.stores.sqlite._POLL", 0.01)
    path, heard = tmp_path / "headgate.db", list[str]()
    with Gate(remember=path) as one, Gate(remember=path) as two:
        two.subscribe(lambda event: heard.append(str(event)), PolicyChanged)
        two.check("a", "ws", "heavy", cost=10)
        one.set_override("a", "heavy", "20/minute", by="ada")
        wait_for(lambda: two.capacity("a", "ws", "heavy") == 20, "the change of the other gate")
        one.remove_override("a")
        wait_for(lambda: two.capacity("a", "ws", "heavy") == 10, "the removal")
        assert two.peek("a", "ws", "heavy").remaining == 10, "the affected bucket begins full, as in the other gate"
        two.add_exemption("b")
        one.add_exemption("c")
        wait_for(lambda: one.effective == two.effective and two.is_exempt("c"), "both gates to agree")
        assert one.history() == two.history()
        made = ["override of 'a' for heavy set to 20/minute", "override of 'a' removed"]
        made += ["exemption of 'b' set to exempt", "exemption of 'c' set to exempt"]
        assert heard == [str(PolicyChanged(what, "ada" if number == 0 else "")) for number, what in enumerate(made)]


def test_a_file_that_cannot_be_read_for_a_while_is_followed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headgate.stores.sqlite._POLL", 0.01)
    path = tmp_path / "headgate.db"
    with Gate(remember=path) as one, Gate(remember=path) as two:
        failures = iter([ValueError("odd"), ValueError("odd"), OSError("other")])
        read = two._log.read

        def fail(after: int = 0) -> Any:
            for error in failures:
                raise error
            return read(after)

        monkeypatch.setattr(two._log, "read", fail)
        one.add_exemption("a")
        wait_for(lambda: two.is_exempt("a"), "the change")
        told = "changes of other processes can't be read, and are tried again: "
        assert [record.getMessage() for record in caplog.records] == [f"{told}odd", f"{told}other"]


FORK = """
import os, signal, sqlite3, sys, time
from headgate import Gate

gate = Gate(remember=sys.argv[1])
gate.add_exemption("before")
connection = gate._log._file
child = os.fork()
if child == 0:
    signal.alarm(60)  # rather than hang for ever
    try:
        connection.execute("SELECT 1")
    except sqlite3.ProgrammingError:  # it is closed: SQLite forbids to use it here, even to close it
        pass
    else:
        os._exit(1)
    gate.add_exemption("child")
    while not gate.is_exempt("parent"):
        time.sleep(0.01)
    gate.close()
    os._exit(0)
gate.add_exemption("parent")
signal.alarm(60)
while not gate.is_exempt("child"):
    time.sleep(0.01)
print(os.waitpid(child, 0)[1], [edit.agent for change in gate.history() for edit in change.edits][0])
gate.close()
"""


def test_a_forked_process_has_a_connection_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "headgate.db"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, check=True)
    assert done.stdout == "0 before\n"
    with Gate(remember=path) as gate:
        assert gate.effective.exempt == {"before", "child", "parent"}


def test_a_change_to_a_removed_channel_is_ignored(tmp_path: Path) -> None:
    policy = Policy(channels=["ws", "smtp"])
    gate = Gate(policy, remember=tmp_path / "headgate.db")
    gate.set_override("a", "heavy", "20/minute", "smtp")
    gate.close()
    with Gate(Policy(), remember=tmp_path / "headgate.db") as again:
        assert again.effective.overrides == {}
        assert again.check("a", "ws", "heavy").remaining == 9


# Several edits as one change ------------------------------------------------------------------------------------------


def test_several_edits_are_one_change(tmp_path: Path) -> None:
    gate = Gate(remember=tmp_path / "headgate.db")
    events: list[Event] = []
    gate.subscribe(events.append)
    gate.check("a", "ws", "heavy", cost=3)
    gate.change([override("a", "heavy", "4/minute"), exemption("vip"), default("light", "9/minute", "ws")], by="ada")
    texts = [
        "override of 'a' for heavy set to 4/minute",
        "exemption of 'vip' set to exempt",
        "default for ws light set to 9/minute",
    ]
    assert events[1:] == [PolicyChanged(", ".join(texts), "ada")]
    assert gate.check("a", "ws", "heavy").remaining == 3
    assert gate.is_exempt("vip")
    assert gate.capacity("b", "ws", "light") == 9
    gate.change([no_override("a"), exemption("vip", exempt=False)])
    gate.change([])
    before, history = gate.effective, gate.history()
    assert [len(change.edits) for change in history] == [3, 2]
    gate.close()
    with Gate(remember=tmp_path / "headgate.db") as again:
        assert (again.effective, again.history()) == (before, history)


def test_a_change_with_a_bad_edit_changes_nothing() -> None:
    gate = Gate()
    attempts: list[tuple[Any, str]] = [
        (
            lambda: [exemption("a"), override("a", "heavy", "1/s", "smtp")],
            "channel: expected one of ws, http, got 'smtp'",
        ),
        (
            lambda: [exemption("a"), override("a", "huge", "1/s")],
            "tier: expected one of light, normal, heavy, got 'huge'",
        ),
        (lambda: [default("heavy", "1/s", "")], "channel: expected the name of a channel, got ''"),
        (lambda: [no_override("a", "")], "tier: expected the name of a tier, got ''"),
    ]
    for edits, text in attempts:
        with pytest.raises(InvalidInput) as caught:
            gate.change(edits())
        assert str(caught.value) == text
    assert gate.history() == []


def test_a_change_is_atomic_for_readers() -> None:
    gate = Gate()
    done = threading.Event()
    torn: list[object] = []

    def look() -> None:
        while not done.is_set():
            seen = gate.effective
            if (
                len({seen.limits["ws", "light"].capacity, seen.limits["http", "heavy"].capacity, 9 + len(seen.exempt)})
                > 1
            ):
                torn.append(seen)

    gate.change([default("light", "9/minute"), default("heavy", "9/minute")])
    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(300):
        gate.change([default("light", "10/minute"), exemption("a"), default("heavy", "10/minute")])
        gate.change([default("heavy", "9/minute"), exemption("a", exempt=False), default("light", "9/minute")])
    done.set()
    thread.join()
    assert torn == []


def test_a_change_builds_one_lookup_and_shares_the_unchanged_part(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(Policy(agents={f"agent-{i}": {"heavy": "5/minute"} for i in range(3000)}))
    built = count_lookups(monkeypatch)
    before = gate._lookup.own
    gate.change([override("agent-1", "heavy", "7/minute"), override("new", "light", "8/minute"), exemption("agent-2")])
    assert built == [gate._lookup], "the one that was built is the one in effect"
    after = gate._lookup.own
    different = {agent for agent, own in after.items() if before.get(agent) is not own}
    assert (different, len(after)) == ({"agent-1", "agent-2", "new"}, 3001)
    gate.set_default("heavy", "30/minute")
    assert gate._lookup.own is after
    assert [gate.capacity(agent, "ws", "heavy") for agent in ("agent-1", "new", "agent-3")] == [7, 30, 5]


@pytest.mark.skipif(compiled(), reason="the methods of a compiled class can't be watched")
def test_a_start_and_a_reload_build_each_map_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent by agent, each of them would copy a part of the map."""
    path, updates, update = tmp_path / "headgate.db", list[int](), ImmutableMap.update

    def counted(self: ImmutableMap[Any], changes: Mapping[str, Any]) -> ImmutableMap[Any]:
        updates.append(len(changes))
        return update(self, changes)

    with Gate(remember=path) as gate:
        gate.change([override(f"agent-{number}", "heavy", "5/minute") for number in range(500)])
    monkeypatch.setattr(ImmutableMap, "update", counted)
    with Gate(remember=path) as gate:
        assert updates.count(500) == 2, "the rules in effect, and the limits that a check looks up"
        gate.reload(Policy(limits={"light": "7/minute"}))
    assert updates.count(500) == 4
    assert len(updates) < 20


def test_many_edits_update_the_rules_once() -> None:
    """So that a start and a reload take time in proportion to the number of edits."""

    class Counted:
        """A map that counts its updates; a compiled class can't be extended."""

        updates = 0
        empty: ImmutableMap[AgentRules] = ImmutableMap()

        def get(self, agent: str) -> AgentRules | None:
            return self.empty.get(agent)

        def update(self, changes: Mapping[str, AgentRules | None]) -> ImmutableMap[AgentRules]:
            self.updates += 1
            return self.empty.update(changes)

    edits = [override(f"agent-{number % 700}", "heavy", f"{number + 1}/hour") for number in range(1000)]
    edits += [no_override(f"agent-{number}") for number in range(300)]
    policy = Policy()
    counted: Any = Counted()
    found = apply_edits(Effective(policy.limits, counted, policy.session_limit, {}, policy.accounts), policy, edits)
    assert counted.updates == 1
    assert found == effective(policy, edits)
    assert sorted(found.overrides) == sorted(f"agent-{number}" for number in range(300, 700))


def test_listeners_are_called_without_the_lock() -> None:
    gate = Gate()
    changed = threading.Event()

    def listen(event: Event) -> None:
        if event == PolicyChanged("exemption of 'a' set to exempt", ""):
            other = threading.Thread(target=gate.add_exemption, args=("b",))
            other.start()
            other.join(60)
            changed.set()

    gate.subscribe(listen, PolicyChanged)
    gate.add_exemption("a")
    assert changed.is_set()
    assert gate.is_exempt("b")


# A kill ---------------------------------------------------------------------------------------------------------------

COURSE = """
from headgate.gate.changes import default, exemption, override

def make_change(gate, number):
    agent = f"agent-{number % 7}"
    if number % 4 == 0:
        gate.set_override(agent, "heavy", f"{number + 1}/minute")
    elif number % 4 == 1:
        gate.add_exemption(agent)
    elif number % 4 == 2:
        gate.remove_exemption(agent)
    else:
        limit = f"{number}/hour"
        gate.change([override(agent, "light", limit), exemption(agent), default("heavy", limit)])
"""
WRITER = (
    COURSE
    + """
import sys
import headgate.gate.gate_changes as changes
from headgate import Gate
changes.KEPT, changes._COMPACT_EVERY = 10, 3  # so that it is often killed while it compacts
gate = Gate(remember=sys.argv[1])
print("ready", flush=True)
for number in range(200):
    make_change(gate, number)
    print(number, flush=True)
"""
)


@pytest.mark.long
def test_a_kill_leaves_a_prefix_with_every_acknowledged_change(tmp_path: Path) -> None:
    """Kill -9 after so many acknowledgements, while the next change or a compaction is on its way."""
    course: dict[str, Any] = {}
    exec(COURSE, course)
    expected = Gate()
    prefixes = {0: expected.effective}
    changes = {0: 0}
    for number in range(200):
        course["make_change"](expected, number)
        position = expected._log.read().position
        prefixes[position], changes[position] = expected.effective, number + 1
    chance = random.Random(3)
    for trial in range(8):
        path = tmp_path / f"{trial}.db"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=environment
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            acknowledged = chance.randrange(190)
            for _ in range(acknowledged):
                writer.stdout.readline()
            writer.kill()
            acknowledged += len(writer.stdout.readlines())
        log = SqliteChangeLog(path)
        page = log.read()
        assert effective(Policy(), page.edits()) == prefixes[page.position]
        assert changes[page.position] >= acknowledged
        assert len(page.changes) in range(min(10, acknowledged), 14)
        log.close()
