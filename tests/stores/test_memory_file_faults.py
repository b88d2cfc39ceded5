"""The file of a memory store: disks that take no more, other formats, damage, forks and kills."""

import gc
import json
import logging
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter

import pytest

from headgate import InvalidInput, Limiter, MemoryStore, StoreError
from headgate.gate.changes import exemption
from headgate.limits.notation import parse
from headgate.stores.base import Change
from headgate.stores.sqlite import ChangeLogError, SqliteChangeLog
from tests.support.limiters import left
from tests.support.restarts import DAY, Restarts
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once


# A disk that can't be written -----------------------------------------------------------------------------------------


@contextmanager
def full_disk(store: MemoryStore) -> Iterator[None]:
    """Let every write fail."""
    file = store._remembered.file._file  # type: ignore[union-attr]
    file.execute("PRAGMA query_only=1")
    try:
        yield
    finally:
        file.execute("PRAGMA query_only=0")


def test_what_cannot_be_written_is_not_counted(restarts: Restarts) -> None:
    limit = "100 in all; 3 in flight; 50/hour; 60/hour sliding"
    limiter = restarts.limiter(limit)
    parts = [restarts.limiter(part) for part in limit.split("; ")]
    first = limiter.hold("a", 10, hold_id="first")
    extended = limiter.hold("a", 10, hold_id="extended")
    extended.extend(5)
    before = [left(part) for part in parts], limiter.list_holds("a")
    assert before[0] == [75, 1, 25, 35]

    def attempts() -> Iterator[Callable[[], object]]:
        yield lambda: limiter.check("a", 5)
        yield lambda: limiter.charge("a", 50)
        yield lambda: limiter.refund("a", 50)
        yield lambda: limiter.hold("a", 5)
        yield lambda: limiter.hold("new", 5)
        yield lambda: first.settle(3)
        yield lambda: first.settle(30)
        yield first.cancel
        yield lambda: extended.extend(5, lease=600)
        yield lambda: extended.extend(lease=600)
        yield lambda: limiter.reset("a")
        yield restarts.store.reset

    with full_disk(restarts.store):
        for attempt in attempts():
            with pytest.raises(
                StoreError, match=r"limits\.db: nothing was counted, since it can't be written: attempt"
            ):
                attempt()
            assert ([left(part) for part in parts], limiter.list_holds("a")) == before
            assert [left(part, "new") for part in parts] == [100, 3, 50, 60]
        assert not limiter.check("a", 51)  # a denial writes nothing
    first.settle(5)
    assert [left(part) for part in parts] == [80, 2, 30, 40]
    extended.extend(5)
    extended.settle(1)
    assert [left(part) for part in parts] == [94, 3, 44, 54]


def test_charges_beyond_the_bound_are_undone(restarts: Restarts) -> None:
    limiter = restarts.limiter("100 in all")
    hold = limiter.hold("a", 10)
    for _ in range(9):
        hold.extend(1)
    with full_disk(restarts.store), pytest.raises(StoreError):
        hold.extend(1)
    assert left(limiter) == 81
    restarts.restart()
    limiter = restarts.limiter("100 in all")
    assert limiter.find_hold("a", hold.id).settle(2).remaining == 98


def test_a_charge_that_was_undone_gives_nothing_back(restarts: Restarts) -> None:
    limiter = restarts.limiter("100/calendar hour")
    hold = limiter.hold("a", 10, lease=2 * DAY)
    restarts.clock.advance(3600)
    limiter.charge("a", 50)
    with full_disk(restarts.store), pytest.raises(StoreError):
        hold.extend(5)
    hold.settle(4)
    assert left(limiter) == 50


def test_what_came_back_meanwhile_is_written_when_the_disk_can_be(restarts: Restarts) -> None:
    limiter = restarts.limiter("100 in all")
    limiter.hold("a", 60, lease=60, on_expiry="release")
    restarts.clock.advance(60)
    with full_disk(restarts.store), pytest.raises(StoreError):
        limiter.check("a")
    assert left(limiter) == 100
    limiter.check("a")
    restarts.restart()
    assert left(restarts.limiter("100 in all")) == 99


# The file -------------------------------------------------------------------------------------------------------------


def test_a_limiter_opens_and_closes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    with Limiter("5 in all", remember=path) as limiter:
        assert limiter.private
        limiter.check("a")
    with pytest.raises(StoreError, match=r"nothing was counted.*: Cannot operate on a closed database"):
        limiter.check("a")
    with Limiter("5 in all", store="memory://", remember=str(path)) as limiter:
        assert limiter.check("a").remaining == 3


@pytest.mark.parametrize("store", ["redis://127.0.0.1:1", MemoryStore()])
def test_remember_is_refused_beside_a_store(store: object) -> None:
    with pytest.raises(InvalidInput, match=r"^Limiter remember: expected no store beside it \(.*\), got "):
        Limiter("5 in all", store=store, remember="limits.db")  # type: ignore[arg-type]


@pytest.mark.parametrize("remember", [3, "", "redis://localhost", b"limits.db"])
def test_remember_is_a_path(remember: object) -> None:
    with pytest.raises(InvalidInput, match=r"^MemoryStore remember: expected the path of a file, got "):
        MemoryStore(remember=remember)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^Limiter remember: expected the path of a file, got "):
        Limiter("5 in all", remember=remember)  # type: ignore[arg-type]


def test_one_store_has_the_file_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.stores.sqlite_file._EXCLUSIVE_TIMEOUT", 0.01)
    path = tmp_path / "limits.db"
    refused = "import sys, headgate; headgate.MemoryStore(remember=sys.argv[1])"
    with closing(MemoryStore(remember=path)):
        with pytest.raises(StoreError, match="expected a file that nobody else uses, got one that is in use"):
            MemoryStore(remember=path)
        done = subprocess.run([sys.executable, "-c", refused, path], capture_output=True, text=True, check=False)
        assert "StoreError" in done.stderr
        assert "in use" in done.stderr
    subprocess.run([sys.executable, "-c", refused, path], check=True)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign, log, ours = tmp_path / "foreign.db", tmp_path / "changes.db", tmp_path / "limits.db"
    with closing(sqlite3.connect(foreign)) as file:
        file.execute("CREATE TABLE budgets (number INTEGER)")
        file.execute("INSERT INTO budgets VALUES (1)")
        file.commit()
    with closing(SqliteChangeLog(log)) as changes:
        changes.write(Change((exemption("a"),)))
    text = tmp_path / "text.db"
    text.write_text("no database\n" * 100)
    for path, problem in ((foreign, "another program"), (log, "another program"), (text, "file is not a database")):
        before = path.read_bytes()
        with pytest.raises(StoreError, match=f"{path.name}: expected a.* file .*, got.* {problem}$"):
            MemoryStore(remember=path)
        assert path.read_bytes() == before
    MemoryStore(remember=ours).close()
    with pytest.raises(ChangeLogError, match="expected a change log, got a file of another program"):
        SqliteChangeLog(ours)
    with closing(sqlite3.connect(ours)) as file:
        file.execute("PRAGMA user_version=3")
    with pytest.raises(StoreError, match="expected a file of budgets and holds of format 2, got format 3; use a newer"):
        MemoryStore(remember=ours)


def test_a_file_of_format_1_is_upgraded(restarts: Restarts) -> None:
    """It has neither notes nor meters, and its asks have no roots."""
    limiter = restarts.limiter("100 in all; 3 in flight")
    limiter.hold("a", 30, hold_id="open")
    limiter.hold("a", 20, hold_id="done").settle(10)
    restarts.restart()
    with closing(sqlite3.connect(restarts.path)) as file:
        for column in ("note", "shape", "forced"):
            file.execute(f"ALTER TABLE holds DROP COLUMN {column}")
        (found,) = {asks for (asks,) in file.execute("SELECT asks FROM holds")}
        file.execute("UPDATE holds SET asks = ?", (json.dumps([ask[:3] for ask in json.loads(found)]),))
        file.execute("DROP TABLE meters")
        file.execute("PRAGMA user_version=1")
        file.commit()
    for _ in range(2):
        limiter = restarts.limiter("100 in all; 3 in flight")
        assert limiter.find_hold("a", "open").state == "open"
        assert limiter.peek("a", 60)
        assert not limiter.peek("a", 61)
        restarts.restart()
    limiter = restarts.limiter("100 in all; 3 in flight")
    limiter.find_hold("a", "open").settle(5)
    assert limiter.peek("a", 85)
    assert not limiter.peek("a", 86)


def test_a_damaged_file_is_left_alone(restarts: Restarts) -> None:
    limiter = restarts.limiter("100 in all")
    for number in range(2000):
        limiter.check(f"{number}")
    restarts.close()
    damaged = bytearray(restarts.path.read_bytes())
    damaged[-40_000:] = bytes(40_000)
    restarts.path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"limits\.db: expected an SQLite file that can be written, got: .*malformed"):
        MemoryStore(remember=restarts.path)
    assert restarts.path.read_bytes() == damaged


def test_a_file_whose_damage_no_message_can_quote_is_left_alone(restarts: Restarts) -> None:
    restarts.limiter("100 in all").check("a")
    restarts.close()
    damaged = bytearray(restarts.path.read_bytes())
    damaged[damaged.rfind(b"CREATE TABLE holds") + 3] = 0xCB  # no UTF-8 any more
    restarts.path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"limits\.db: expected an SQLite file that can be written, got: "):
        MemoryStore(remember=restarts.path)


DAMAGED_BUDGETS = [
    "name = 1",
    "budget = '5/minute'",
    "budget = 'x'",
    "key = 'text'",
    "key = x'ff'",
    "start = -1",
    "used = 'x'",
    "used = 0.5",
    "used = 0",
    f"used = {2**53}",
]
DAMAGED_HOLDS = [
    "id = 'text'",
    "asks = 'x'",
    "asks = x'ff'",
    "asks = '[]'",
    """asks = '[["llm", "a", 5]]'""",
    """asks = '[["llm", "b", "9 in all; 5 in flight"]]'""",
    """asks = '[["llm", "a", "9 in all"]]'""",
    "release = 2",
    "keep = -1",
    "keep = 'x'",
    "state = 'denied'",
    "costs = '[]'",
    "costs = '[1, 2]'",
    "costs = '[1.5]'",
    "costs = '5'",
    f"costs = '[{'9' * 5000}]'",
    "charges = '[]'",
    "charges = '[[], []]'",
    "charges = '[[[1]], [[1]]]'",
    f"charges = '{'[' * 100_000}'",
    "ends = 'x'",
    f"ends = {2**62}",
    "released = 7",
]


@pytest.mark.parametrize(
    "damage",
    [f"UPDATE budgets SET {change} WHERE key = x'61'" for change in DAMAGED_BUDGETS]
    + [f"UPDATE holds SET {change} WHERE id = x'61'" for change in DAMAGED_HOLDS],
    ids=lambda damage: damage[:50],
)
def test_unreadable_rows_are_skipped(restarts: Restarts, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    limit = "9 in all; 5 in flight"
    for key in "ab":
        restarts.limiter(limit).hold(key, 3, hold_id=key)
    restarts.close()
    with closing(sqlite3.connect(restarts.path)) as file:
        assert file.execute(damage).rowcount == 1
        file.commit()
    with caplog.at_level(logging.WARNING, "headgate"):
        limiter = restarts.limiter(limit)
    (record,) = caplog.records
    assert "limits.db: 1 unreadable rows are skipped; the last one: " in record.getMessage()
    assert limiter.find_hold("b", "b").settle(1).remaining == 5
    assert left(restarts.limiter("9 in all"), "b") == 8


def test_many_rows_are_read_at_once(restarts: Restarts) -> None:
    restarts.limiter("100 in all; 100000 in flight").hold("a", 2, hold_id="h", lease=6 * DAY)
    restarts.close()
    with closing(sqlite3.connect(restarts.path)) as file:
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) "
        file.execute(
            numbers + "INSERT INTO holds SELECT name, key, CAST('h' || i AS BLOB), asks, release, keep, state, costs, "
            "charges, ends + i, released, note, shape, forced FROM holds, n"
        )
        file.execute(
            numbers
            + "INSERT INTO budgets SELECT name, budget, CAST('k' || i AS BLOB), start, ends, used FROM budgets, n"
        )
        file.commit()
    began = perf_counter()
    limiter = restarts.limiter("100 in all; 100000 in flight")
    assert perf_counter() - began < PATIENCE
    assert gc.isenabled()
    assert restarts.limiter("100000 in flight").peek("a").remaining == 79_999
    assert left(restarts.limiter("100 in all"), "k20000") == 98
    assert limiter.find_hold("a", "h20000").settle(1)


def test_a_verb_of_a_finalizer_in_the_middle_of_another_is_refused(restarts: Restarts) -> None:
    """It could not be undone without the other one."""
    limiter = restarts.limiter("100 in all")
    limiter.check("a")
    outcomes: list[object] = []

    def check() -> None:
        try:
            outcomes.append(limiter.check("a"))
        except StoreError as error:
            outcomes.append(str(error))

    file = restarts.store._remembered.file  # type: ignore[union-attr]
    with file._transaction("x"):
        check()
    assert str(outcomes[0]).endswith("it came from a finalizer, in the middle of another transaction")
    assert left(limiter) == 99


# Processes ------------------------------------------------------------------------------------------------------------

FORK = """
import os, sys
from headgate import Limiter, StoreError

limiter = Limiter("100 in all", remember=sys.argv[1])
limiter.charge("a", 10)

def child(work):
    sys.stdout.flush()
    number = os.fork()
    if number == 0:
        try:
            work()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(number, 0)

def charge():
    try:
        print(limiter.charge("a", 20).remaining)
    except StoreError as error:
        print(str(error).partition(": ")[2])

child(lambda: print(limiter.peek("a").remaining))
charge()
child(charge)
child(lambda: (charge(), charge()))
charge()
"""


def test_after_a_fork_the_first_process_to_use_the_file_has_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, str(tmp_path / "limits.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, check=True)
    refused = "expected a file that no other process has used since a fork, got one that was used; restart this process"
    assert done.stdout.splitlines() == ["90", "70", "50", refused, refused, refused]


VICTIM = """
import random, sys
from headgate import Limiter

limiter = Limiter("1000000000 in all; 100000 in flight", remember=sys.argv[1])
say = sys.stdout.write
draw = random.Random(int(sys.argv[2]))
open_holds = []
for number in range(10**9):
    name = f"{sys.argv[2]}-{number}"
    kind = draw.randrange(4)
    if kind == 0:
        limiter.charge("a", 3)
        say("charge 3\\n")
    elif kind == 1 or not open_holds:
        hold = limiter.hold("a", 10, hold_id=name, lease=3600)
        open_holds.append(hold)
        say(f"hold {name}\\n")
    elif kind == 2:
        hold = open_holds[draw.randrange(len(open_holds))]
        hold.extend(1)
        say(f"extend {hold.id}\\n")
    else:
        hold = open_holds.pop(draw.randrange(len(open_holds)))
        hold.settle(7)
        say(f"settle {hold.id}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("limit", "warns"), [("5/minute", True), ("5/minute sliding", True), ("5 in all", False), ("2 in flight", False)]
)
def test_a_limiter_that_has_nothing_to_remember_says_so(
    tmp_path: Path, limit: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with Limiter(limit, remember=tmp_path / "limits.db"):
        pass
    text = f"Limiter remember: {parse(limit)} starts full after a restart: only budgets and holds are remembered"
    assert [record.message for record in caplog.records] == [text] * warns


@pytest.mark.long
def test_what_was_answered_survives_a_kill_exactly_once(tmp_path: Path) -> None:
    path, draw = tmp_path / "limits.db", random.Random(7)
    costs: dict[str, int] = {}
    used, settled = 0, set[str]()
    for trial in range(15):
        command = [sys.executable, "-c", VICTIM, str(path), str(trial)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            lines = [victim.stdout.readline() for _ in range(draw.randrange(1, 400))]
            victim.send_signal(signal.SIGKILL)
            lines += victim.stdout.readlines()
        for line in [line for line in lines if line.endswith("\n")]:
            verb, what = line.split()
            if verb == "charge":
                used += int(what)
            elif verb == "settle":
                costs[what] = 7
                settled.add(what)
            else:
                costs[what] = costs.get(what, 9) + 1
        with Limiter("1000000000 in all; 100000 in flight", remember=path) as limiter:
            listed = {hold.id: hold for hold in limiter.list_holds("a", 10**6)}
            found = 10**9 - Limiter("1000000000 in all", store=limiter.store).peek("a").remaining
            slots = 100_000 - Limiter("100000 in flight", store=limiter.store).peek("a").remaining
        assert slots == len([hold for hold in listed.values() if hold.state == "open"])
        # The verb that was under way may have been written, and not answered.
        changed = [
            name
            for name, hold in listed.items()
            if (int(hold.cost), hold.state != "open") != (costs.get(name), name in settled)
        ]
        missing = set(costs) - set(listed)
        assert not missing
        assert len(changed) <= 1
        before = used + sum(costs.values())
        for name in changed:
            costs[name] = int(listed[name].cost)
            settled |= {name} if listed[name].state == "settled" else set()
        after = used + sum(costs.values())
        assert found in ((after,) if changed else (before, before + 3))
        used += found - after
