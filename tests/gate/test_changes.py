"""Changes made while running hold, are remembered, and survive a kill at any moment once they are acknowledged."""

import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from headgate import Gate, Policy, parse
from headgate.errors import HeadgateError
from headgate.gate.changes import effective, exemption
from headgate.stores.base import Change
from headgate.stores.sqlite import ChangeLogError, SqliteChangeLog


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


def test_without_a_file_changes_end_with_the_process() -> None:
    gate = Gate()
    make_changes(gate)
    assert len(gate.history()) == 9
    assert Gate().history() == []


def test_who_changed_what_and_when_is_kept(tmp_path: Path) -> None:
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


def test_a_change_that_cannot_be_remembered_is_not_made(tmp_path: Path) -> None:
    gate = Gate(remember=tmp_path / "headgate.db")
    gate.set_override("a", "heavy", "20/minute")
    gate.close()
    with pytest.raises(ChangeLogError, match="since it can't be recorded: Cannot operate on a closed"):
        gate.add_exemption("a")
    assert not gate.is_exempt("a")
    assert gate.capacity("a", "ws", "heavy") == 20
    assert issubclass(ChangeLogError, HeadgateError)


def test_a_file_that_is_no_change_log(tmp_path: Path) -> None:
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


def test_two_gates_can_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "headgate.db"
    with closing(SqliteChangeLog(path)) as one, closing(SqliteChangeLog(path)) as two:
        for i in range(20):
            (one if i % 2 else two).write(Change((exemption(f"agent-{i}"),)))
        assert [edit.agent for edit in one.read().edits()] == [f"agent-{i}" for i in range(20)]


def test_a_change_of_a_channel_that_is_no_more_is_passed_over(tmp_path: Path) -> None:
    policy = Policy(channels=["ws", "smtp"])
    gate = Gate(policy, remember=tmp_path / "headgate.db")
    gate.set_override("a", "heavy", "20/minute", "smtp")
    gate.close()
    with Gate(Policy(), remember=tmp_path / "headgate.db") as again:
        assert again.effective.overrides == {}
        assert again.check("a", "ws", "heavy").remaining == 9


WRITER = """
import sys
from headgate import Gate
gate = Gate(remember=sys.argv[1])
print("ready", flush=True)
for number in range(200):
    agent = f"agent-{number % 7}"
    if number % 3 == 0:
        gate.set_override(agent, "heavy", f"{number + 1}/minute")
    elif number % 3 == 1:
        gate.add_exemption(agent)
    else:
        gate.remove_exemption(agent)
    print(number, flush=True)
"""


def test_killed_at_any_moment_a_prefix_with_every_acknowledged_change_is_left(tmp_path: Path) -> None:
    """Kill -9 after so many acknowledgements, while the next change is on its way."""
    expected = Gate()
    prefixes = [expected.effective]
    for number in range(200):
        agent = f"agent-{number % 7}"
        if number % 3 == 0:
            expected.set_override(agent, "heavy", f"{number + 1}/minute")
        elif number % 3 == 1:
            expected.add_exemption(agent)
        else:
            expected.remove_exemption(agent)
        prefixes.append(expected.effective)
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
        written = log.read().edits()
        assert effective(Policy(), written) == prefixes[len(written)]
        assert len(written) >= acknowledged
        log.close()
