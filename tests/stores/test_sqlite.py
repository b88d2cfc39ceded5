"""The SQLite files: made in one transaction, by many processes at once, and usable after a kill at any moment."""

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

from headgate import Gate
from headgate.gate.changes import exemption
from headgate.hub.storage.database import _SCHEMA as HUB_SCHEMA
from headgate.hub.storage.database import Database
from headgate.stores.base import Change
from headgate.stores.sqlite import _SCHEMA as LOG_SCHEMA
from headgate.stores.sqlite import ChangeLogError, SqliteChangeLog
from tests.support.interruptions import Interrupted, interrupt
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once


class OpenedFile(Protocol):
    def close(self) -> None: ...


def test_two_logs_can_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "headgate.db"
    with closing(SqliteChangeLog(path)) as one, closing(SqliteChangeLog(path)) as two:
        for i in range(20):
            (one if i % 2 else two).write(Change((exemption(f"agent-{i}"),)))
        assert [edit.agent for edit in one.read().edits()] == [f"agent-{i}" for i in range(20)]


OPENER = """
import sys
from headgate.gate.changes import exemption
from headgate.hub.storage.database import Database
from headgate.stores.base import Change
from headgate.stores.sqlite import SqliteChangeLog

print("ready", flush=True)
for line in sys.stdin:
    path = line.strip()
    try:
        log = SqliteChangeLog(path)
        log.write(Change((exemption("a"),)))
        log.close()
        Database(path + ".hub").close()
    except Exception as error:
        print(repr(error), flush=True)
    else:
        print("opened", flush=True)
"""


@pytest.mark.long
def test_a_new_file_can_be_opened_by_many_processes_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OPENER]
    with ExitStack() as stack:
        openers = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            )
            for _ in range(6)
        ]
        pipes = [(opener.stdin, opener.stdout) for opener in openers if opener.stdin and opener.stdout]
        assert [out.readline() for _, out in pipes] == ["ready\n"] * 6
        for number in range(6):
            for into, _ in pipes:
                into.write(f"{tmp_path / str(number)}.db\n")
            for into, _ in pipes:
                into.flush()
            assert [out.readline() for _, out in pipes] == ["opened\n"] * 6
            with closing(SqliteChangeLog(tmp_path / f"{number}.db")) as log:
                assert len(log.read().changes) == 6


def trace(monkeypatch: pytest.MonkeyPatch, path: Path, look: Callable[[str], object]) -> None:
    """Call a function before each statement on a file. What it raises is ignored."""
    connect = sqlite3.connect

    def traced(where: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
        file: sqlite3.Connection = connect(where, *arguments, **options)
        if where == path:
            file.set_trace_callback(look)
        return file

    monkeypatch.setattr(sqlite3, "connect", traced)


@pytest.mark.parametrize("opened", [SqliteChangeLog, Database])
def test_nobody_sees_a_file_that_is_half_made(
    tmp_path: Path, opened: Callable[[Path], OpenedFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, connect, seen = tmp_path / "new.db", sqlite3.connect, list[tuple[int, int]]()

    def look(_statement: str) -> None:
        with closing(connect(path, 0)) as other:
            (version,) = other.execute("PRAGMA user_version").fetchone()
            (tables,) = other.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            seen.append((version, tables))

    trace(monkeypatch, path, look)
    opened(path).close()
    nothing, whole = dict.fromkeys(seen)
    assert nothing == (0, 0)
    assert whole[0] == 1
    assert whole[1] > 0


def test_a_process_that_writes_does_not_keep_another_from_opening_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the journal is switched, SQLite doesn't wait for it by itself."""
    path, attempts = tmp_path / "new.db", list[str]()
    writer = sqlite3.connect(path, isolation_level=None)

    def look(statement: str) -> None:
        if "journal_mode" in statement:
            attempts.append(statement)
            if len(attempts) == 1:
                writer.execute("BEGIN IMMEDIATE")
            if len(attempts) == 3:
                writer.close()

    trace(monkeypatch, path, look)
    with closing(SqliteChangeLog(path)) as log:
        log.write(Change((exemption("a"),)))
    assert len(attempts) == 3


FIRST_START = """
import os, signal, sqlite3, sys
from headgate.hub.storage.database import Database
from headgate.stores.sqlite import SqliteChangeLog

connect, opened, path, number = sqlite3.connect, {"log": SqliteChangeLog, "hub": Database}[sys.argv[1]], sys.argv[2], 0
code = None
while code != 0:
    number += 1
    child = os.fork()
    if child == 0:
        left = number

        def kill_at_a_statement(statement):
            global left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def traced(*arguments, **options):
            file = connect(*arguments, **options)
            file.set_trace_callback(kill_at_a_statement)
            return file

        sqlite3.connect = traced
        opened(f"{path}{number}")
        os._exit(0)
    code = os.waitpid(child, 0)[1]
    opened(f"{path}{number}").close()
print(number)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["log", "hub"])
def test_a_file_is_usable_after_a_kill_at_any_statement_of_the_first_start(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FIRST_START, kind, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, check=False)
    assert done.stderr == ""
    assert int(done.stdout) > 5


@pytest.mark.parametrize(("schema", "opened"), [(LOG_SCHEMA, SqliteChangeLog), (HUB_SCHEMA, Database)])
def test_a_file_that_an_earlier_version_left_half_made_is_finished(
    tmp_path: Path, schema: str, opened: Callable[[Path], OpenedFile]
) -> None:
    """It was made statement by statement, and its format was written last."""
    statements = schema.strip().rstrip(";").split(";")
    for done in range(1, len(statements) + 1):
        path = tmp_path / f"{done}.db"
        with closing(sqlite3.connect(path)) as file:
            for statement in statements[:done]:
                file.execute(statement)
        opened(path).close()
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("PRAGMA user_version").fetchone() == (1,)
            made = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite%'")}
        assert made == set(re.findall(r"IF NOT EXISTS (\w+)", schema))


@pytest.mark.parametrize(
    "foreign",
    [
        "CREATE TABLE other (number)",
        "CREATE TABLE changes (number, colour)",
        f"{LOG_SCHEMA}; INSERT INTO changes VALUES (1, 1.0, '', 'exemption', 'a', '', '', 'exempt', 0, 0)",
        f"{LOG_SCHEMA}; CREATE VIEW seen AS SELECT 1",
    ],
)
def test_a_file_of_another_program_is_left_alone(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as file:
        file.executescript(foreign)
    before = path.read_bytes()
    with pytest.raises(ChangeLogError, match="expected a change log, got a file of another program"):
        SqliteChangeLog(path)
    assert path.read_bytes() == before


def test_a_change_between_a_fork_and_the_next_use_is_seen(tmp_path: Path) -> None:
    """A connection that is opened again counts the commits of others anew."""
    log, other = SqliteChangeLog(tmp_path / "changes.db"), SqliteChangeLog(tmp_path / "changes.db")
    before = log._data_version()
    assert log._data_version() == before
    log._before_fork()
    other.write(Change((exemption("a", True),)))
    assert log._data_version() != before
    log.close()
    other.close()


def test_an_interrupted_change_leaves_no_transaction_open(tmp_path: Path) -> None:
    """It would keep this process and all others from the file until a restart."""
    path = tmp_path / "headgate.db"
    with closing(SqliteChangeLog(path)) as one, closing(SqliteChangeLog(path)) as two:
        for step in count(1):
            if not interrupt(step, lambda: one.write(Change((exemption("a"),))), Interrupted):
                break
            for log in (one, two):
                log.write(Change((exemption(f"after step {step}"),)))
        assert step > 20
        assert one.read() == two.read()


def test_an_interrupted_change_is_in_force_if_it_was_recorded(tmp_path: Path) -> None:
    """Else it would take effect at the next restart, to everybody's surprise."""
    with Gate(remember=tmp_path / "headgate.db") as gate:
        for step in count(1):
            work = partial(gate.set_override, "a", "heavy", f"{step}/day")
            if not interrupt(step, work, Interrupted):
                break
            recorded = [edit.value for change in gate.history() for edit in change.edits]
            assert recorded[-1:] in ([], [str(gate.limits_for("a", "ws", "heavy"))]), f"at step {step}"
        assert step > 50
