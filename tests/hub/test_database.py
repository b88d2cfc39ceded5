"""The database: atomic jobs in order, grouped into commits, durable after a kill."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headgate.hub.storage.database import Database, DatabaseError
from tests.support.valkey import PATIENCE


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with closing(Database(path)) as opened:
        yield opened


def put(name: str) -> Callable[[sqlite3.Connection], str]:
    def work(db: sqlite3.Connection) -> str:
        db.execute("INSERT INTO settings VALUES (?, '')", (name,))
        return name

    return work


def names(db: sqlite3.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT name FROM settings ORDER BY name")]


def in_file(path: Path) -> list[str]:
    """What somebody else finds in the file: what is committed."""
    with closing(sqlite3.connect(path)) as db:
        return names(db)


class BusyDatabase:
    """Keeps the database's thread busy, so that what is handed in meanwhile comes together."""

    def __init__(self, database: Database) -> None:
        self._begun, self._free = threading.Event(), threading.Event()
        self._job = asyncio.ensure_future(database.run(self._wait))

    def _wait(self, db: sqlite3.Connection) -> None:
        self._begun.set()
        assert self._free.wait(PATIENCE)

    async def __aenter__(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, PATIENCE)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)  # what was handed in as a task is handed in now
        self._free.set()
        await self._job


async def test_work_is_committed_when_run_returns(database: Database, path: Path) -> None:
    assert await database.run(put("a")) == "a"
    assert in_file(path) == ["a"]
    assert await database.run(names) == ["a"]


def test_without_a_path_it_is_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(Database()) as database:
        asyncio.run(database.run(put("a")))
        assert asyncio.run(database.run(names)) == ["a"]  # from another loop, too
    assert list(tmp_path.iterdir()) == []


async def test_waiting_jobs_are_committed_together_in_order(database: Database) -> None:
    statements: list[str] = []
    order: list[int] = []
    await database.run(lambda db: db.set_trace_callback(statements.append))
    async with BusyDatabase(database):
        jobs = [
            asyncio.ensure_future(database.run(lambda db, number=number: order.append(number)))  # type: ignore[misc]
            for number in range(2500)
        ]
    await asyncio.gather(*jobs)
    await database.run(lambda db: db.set_trace_callback(None))
    assert order == list(range(2500))
    # The one that was held and its own; three of at most a thousand; the last switches the list off before its end.
    assert [statement for statement in statements if statement in ("BEGIN IMMEDIATE", "COMMIT")] == [
        "COMMIT",
        *["BEGIN IMMEDIATE", "COMMIT"] * 4,
        "BEGIN IMMEDIATE",
    ]


async def test_answers_come_in_the_order_of_the_jobs(database: Database) -> None:
    answered: list[int] = []

    async def ask(number: int) -> None:
        answered.append(await database.run(lambda db: number))

    await asyncio.gather(*[ask(number) for number in range(3000)])
    assert answered == list(range(3000))


async def test_a_failed_job_rolls_back_alone(database: Database, path: Path) -> None:
    def fail(db: sqlite3.Connection) -> None:
        put("half")(db)
        raise ValueError("not like this")

    async with BusyDatabase(database):
        works = (put("a"), fail, put("b"), put("a"), put("c"))
        jobs = [asyncio.ensure_future(database.run(work)) for work in works]
    one, two, three, four, five = await asyncio.gather(*jobs, return_exceptions=True)
    assert (one, three, five) == ("a", "b", "c")
    assert isinstance(two, ValueError)
    assert str(two) == "not like this"
    assert isinstance(four, DatabaseError)
    assert str(four).endswith("hub.db: nothing was written: UNIQUE constraint failed: settings.name")
    assert in_file(path) == ["a", "b", "c"]


async def test_a_failed_commit_fails_every_job_in_it_and_none_after(database: Database, path: Path) -> None:
    await database.run(lambda db: db.execute("PRAGMA busy_timeout=0").close())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        results = await asyncio.gather(database.run(put("a")), database.run(put("b")), return_exceptions=True)
        other.execute("ROLLBACK")
    assert [type(result) for result in results] == [DatabaseError, DatabaseError]
    assert str(results[0]).endswith("hub.db: nothing was written: database is locked")
    assert await database.run(put("a")) == "a"
    assert in_file(path) == ["a"]


async def test_a_job_that_breaks_the_transaction_fails_all_in_it_and_none_after(
    database: Database,
) -> None:
    async with BusyDatabase(database):
        works = (put("a"), lambda db: db.execute("RELEASE job").close(), put("b"))
        jobs = [asyncio.ensure_future(database.run(work)) for work in works]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [type(result) for result in results] == [DatabaseError] * 3
    assert await database.run(put("c")) == "c"
    assert await database.run(names) == ["c"]


async def test_a_full_disk_fails_only_the_job_that_does_not_fit(database: Database, path: Path) -> None:
    def fill(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO settings VALUES ('big', ?)", ("x" * 1_000_000,))

    pages = await database.run(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    await database.run(lambda db: db.execute(f"PRAGMA max_page_count={pages + 2}").close())
    with pytest.raises(DatabaseError, match="nothing was written"):
        await database.run(fill)
    assert await database.run(put("small")) == "small"
    assert in_file(path) == ["small"]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_job_whose_caller_is_cancelled_is_done(database: Database, begun: bool) -> None:
    async with BusyDatabase(database):
        jobs = [asyncio.ensure_future(database.run(put(name))) for name in "abc"]
        await asyncio.sleep(0)
        if not begun:
            jobs[1].cancel()
    if begun:  # the answer is on its way or there already
        jobs[1].cancel()
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert (results[0], results[2]) == ("a", "c")
    assert isinstance(results[1], asyncio.CancelledError) or (begun and results[1] == "b")
    assert await database.run(names) == ["a", "b", "c"]


def test_a_loop_that_ended_does_not_stop_the_database(database: Database) -> None:
    free = threading.Event()

    async def leave() -> None:
        job = asyncio.ensure_future(database.run(lambda db: free.wait(PATIENCE)))
        await asyncio.sleep(0)
        job.cancel()

    asyncio.run(leave())
    free.set()
    assert asyncio.run(database.run(put("a"))) == "a"


async def test_close_finishes_submitted_jobs(path: Path) -> None:
    database = Database(path)
    jobs = [asyncio.ensure_future(database.run(put(f"{number:04}"))) for number in range(1500)]
    await asyncio.sleep(0)
    database.close()
    assert in_file(path) == [f"{number:04}" for number in range(1500)]
    assert await asyncio.gather(*jobs) == [f"{number:04}" for number in range(1500)]


WRITER = """
import asyncio, sys
from headgate.hub.storage.database import Database

async def write(database, writer):
    for number in range(1_000_000):
        name = f"{writer}-{number}"
        await database.run(lambda db: db.execute("INSERT INTO settings VALUES (?, '')", (name,)).rowcount)
        print(name, flush=True)

async def main():
    database = Database(sys.argv[1])
    await asyncio.gather(*[write(database, writer) for writer in range(20)])

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("acknowledged", [1, 100, 1000])
def test_every_acknowledged_row_survives_a_kill(path: Path, acknowledged: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(acknowledged)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.readlines()
    promised = {line.strip() for line in told if line.endswith("\n")}
    assert len(promised) >= acknowledged
    with closing(Database(path)) as database:
        assert promised <= set(asyncio.run(database.run(names)))


async def test_a_closed_database_refuses_work(database: Database) -> None:
    database.close()
    with pytest.raises(DatabaseError, match="nothing was written: the database is closed"):
        await database.run(put("late"))


def test_a_file_of_another_program_is_refused_and_left_unchanged(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE agents (theirs)")
    with pytest.raises(DatabaseError, match="expected a hub's database, got a file of another program"):
        Database(path)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("agents",)]


def test_another_format_is_refused_and_left_unchanged(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version=7")
    with pytest.raises(DatabaseError, match=r"a hub.s database of format 1, got format 7; use a newer headgate"):
        Database(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n" * 100)
    with pytest.raises(
        DatabaseError, match=r"notes\.txt: expected an SQLite file that can be written, got: file is not"
    ):
        Database(path)
    assert path.read_text() == "buy milk\n" * 100
    with pytest.raises(DatabaseError, match="expected an SQLite file that can be written, got: unable to open"):
        Database(tmp_path)
