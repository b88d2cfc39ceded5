"""The hub's database: an SQLite file, written by one thread, with many writes in one commit.

    count = await database.run(lambda db: db.execute("UPDATE …").rowcount)

Each job is atomic, and jobs run in the order in which they were submitted. When `run` returns, its changes survive a
kill and a loss of power. Jobs submitted while the disk is busy are committed together, so that a thousand of them take
little longer than one.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from headgate.errors import HeadgateError
from headgate.hub.storage.rows import RowReader
from headgate.stores.sqlite_file import FileKind, is_disk_error, open_file

T = TypeVar("T")
Work: TypeAlias = Callable[[sqlite3.Connection], T]
_FORMAT: Final = 1
_MAX_BATCH: Final = 1000  # jobs in one commit
_MAX_COUNTED: Final = 10_000  # values whose added rows are counted

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS agents (agent TEXT PRIMARY KEY, digest BLOB UNIQUE, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS invitations (digest BLOB PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS invitation_notes (digest BLOB PRIMARY KEY, note TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS mail (
    number INTEGER PRIMARY KEY AUTOINCREMENT, recipient TEXT NOT NULL, sender TEXT NOT NULL, body BLOB NOT NULL,
    at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS mail_of ON mail (recipient, number);
CREATE TABLE IF NOT EXISTS channels (
    name TEXT PRIMARY KEY, creator TEXT NOT NULL, about TEXT NOT NULL, at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS posts (
    number INTEGER PRIMARY KEY AUTOINCREMENT, channel TEXT NOT NULL, sender TEXT NOT NULL, body BLOB NOT NULL,
    at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS posts_of ON posts (channel, number);
CREATE TABLE IF NOT EXISTS tasks (
    number INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL UNIQUE, creator TEXT NOT NULL, state TEXT NOT NULL,
    agent TEXT, attempt INTEGER NOT NULL, progress REAL NOT NULL, note TEXT NOT NULL, at REAL NOT NULL,
    changed REAL NOT NULL, payload BLOB NOT NULL, outcome BLOB
);
CREATE INDEX IF NOT EXISTS tasks_by_creator ON tasks (creator, number);
CREATE INDEX IF NOT EXISTS tasks_by_agent ON tasks (agent, number);
CREATE INDEX IF NOT EXISTS tasks_by_state ON tasks (state, number);
CREATE TABLE IF NOT EXISTS sessions (
    agent TEXT NOT NULL, session TEXT NOT NULL, limited TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (agent, session)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS signals (
    number INTEGER PRIMARY KEY AUTOINCREMENT, agent TEXT NOT NULL, session TEXT NOT NULL, signal BLOB NOT NULL,
    at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS signals_of ON signals (agent, session, number);
CREATE INDEX IF NOT EXISTS signals_by ON signals (agent, number);
"""


class Retention:
    """Keeps the newest rows of a table for each value of a column: `most`, and at times a tenth more.

    Only rows that meet the condition `counted` are counted, and only those that meet `deleted` are deleted.
    """

    def __init__(self, table: str, column: str, most: int, *, counted: str = "TRUE", deleted: str = "TRUE") -> None:
        self._most: Final = most
        self._added: Final[dict[str, int]] = {}  # since the last deletion; of other values nothing is known
        self._delete: Final = (
            f"DELETE FROM {table} WHERE {column} = ?1 AND {deleted} AND number <= "  # noqa: S608 - constants
            f"(SELECT number FROM {table} WHERE {column} = ?1 AND {counted} ORDER BY number DESC LIMIT 1 OFFSET ?2)"
        )

    def added(self, db: sqlite3.Connection, value: str) -> None:
        """Delete surplus rows after a row was added. To be called within a job."""
        added = self._added.get(value, self._most) + 1  # a hub before this one may have left too many
        if added >= max(self._most // 10, 1):
            db.execute(self._delete, (value, self._most))
            added = 0
        if len(self._added) >= _MAX_COUNTED:
            self._added.clear()
        self._added[value] = added


class TotalRetention:
    """Keeps at most `most` rows of a table in total, and at times a hundredth more.

    Surplus rows are deleted from the values of the column that have most, so that these take no room from others.
    """

    def __init__(self, table: str, column: str, most: int) -> None:
        self._most: Final = most
        self._added = most  # since the last deletion; a hub before this one may have left too many
        self._counts: Final = f"SELECT {column}, COUNT(*) FROM {table} GROUP BY {column}"  # noqa: S608 - constants
        self._delete: Final = (
            f"DELETE FROM {table} WHERE number IN "  # noqa: S608
            f"(SELECT number FROM {table} WHERE {column} = ? ORDER BY number LIMIT ?)"
        )

    def added(self, db: sqlite3.Connection) -> None:
        """Delete surplus rows after a row was added. To be called within a job."""
        self._added += 1
        if self._added < max(self._most // 100, 1):
            return
        self._added = 0
        counts = dict(db.execute(self._counts).fetchall())
        fair = _fair_share(sorted(counts.values()), self._most)
        db.executemany(self._delete, [(value, count - fair) for value, count in counts.items() if count > fair])


def _fair_share(counts: list[int], most: int) -> int:
    """The largest count that everybody may have, so that all together have at most `most`. The counts are sorted."""
    room = most
    for place, count in enumerate(counts):
        share = room // (len(counts) - place)
        if count > share:
            return share
        room -= count
    return most


class DatabaseError(HeadgateError):
    """The hub's database can't be read or written."""


_KIND: Final = FileKind("hub's database", _FORMAT, _SCHEMA, DatabaseError)


class DataFile(Protocol):
    """A file of the hub, which the disk may refuse to write."""

    @property
    def failure(self) -> str:
        """Why the last write failed, in words; "" if it didn't."""


class Database:
    """The file at `path`; without a path, in memory only."""

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self._path: Final = ":memory:" if path is None else path
        self._file: Final = open_file(self._path, _KIND)
        self.rows: Final = RowReader()
        self._closed = False
        self.failure = ""
        """See `DataFile`."""
        self._jobs: Final[SimpleQueue[_Job | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="headgate-database", daemon=True)
        self._thread.start()

    async def run(self, work: Work[T]) -> T:
        """Run a job. If it raises, the error is raised here, and all its changes are undone."""
        if self._closed:
            raise DatabaseError(f"{self._path}: nothing was written: the database is closed")
        job = _Job(work)
        self._jobs.put(job)
        result: T = await job.done
        return result

    async def probe(self) -> None:
        """After a failure: write something, to see whether that is possible again."""
        row = ("probed", str(time.time()))
        with suppress(DatabaseError):
            await self.run(lambda db: db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", row).close())

    def close(self) -> None:
        """Finish all submitted jobs, and close the file."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()
        self._file.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch = [job]
            more: _Job | None = job
            while more is not None and len(batch) < _MAX_BATCH and not self._jobs.empty():
                more = self._jobs.get()
                if more is not None:
                    batch.append(more)
            self._commit(batch)
            if more is None:
                return

    def _commit(self, jobs: list["_Job"]) -> None:
        written = self._file.total_changes
        try:
            self._file.execute("BEGIN IMMEDIATE")
            for job in jobs:
                self._run(job)
            self._file.execute("COMMIT")
            if self._file.total_changes > written:
                self.failure = ""
        except Exception as error:  # noqa: BLE001 - the thread goes on, and every caller gets an answer
            failure = self._failed(error)
            if self._file.in_transaction:
                with suppress(sqlite3.Error):
                    self._file.execute("ROLLBACK")
            for job in jobs:
                job.result, job.error = None, failure
        _notify(jobs)

    def _run(self, job: "_Job") -> None:
        self._file.execute("SAVEPOINT job")
        try:
            job.result = job.work(self._file)
        except Exception as error:
            if not self._file.in_transaction:  # as when the disk is full: all jobs were rolled back
                raise
            job.error = self._failed(error) if isinstance(error, sqlite3.Error) else error
            self._file.execute("ROLLBACK TO job")
        self._file.execute("RELEASE job")

    def _failed(self, error: Exception) -> DatabaseError:
        """The error to answer. One of the disk is also remembered."""
        if is_disk_error(error):
            self.failure = str(error)
        return DatabaseError(f"{self._path}: nothing was written: {error}")


class _Job:
    """A job and its result."""

    def __init__(self, work: Work[Any]) -> None:
        self.work: Final = work
        self.loop: Final = asyncio.get_running_loop()
        self.done: Final[asyncio.Future[Any]] = self.loop.create_future()
        self.result: Any = None
        self.error: Exception | None = None

    def resolve(self) -> None:
        if self.done.done():  # the caller was cancelled; the job ran all the same
            return
        if self.error is None:
            self.done.set_result(self.result)
        else:
            self.done.set_exception(self.error)


def _notify(jobs: list[_Job]) -> None:
    """Deliver the results, to each event loop at once."""
    for loop in {job.loop for job in jobs}:
        own = [job for job in jobs if job.loop is loop]
        try:
            loop.call_soon_threadsafe(_resolve_all, own)
        except RuntimeError:  # the loop is closed: nobody awaits the results
            continue


def _resolve_all(jobs: list[_Job]) -> None:
    for job in jobs:
        job.resolve()
