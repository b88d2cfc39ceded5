"""A change log in an SQLite file, for the processes of one machine.

The rows are those of `headgate.stores.change_rows`. The number of a row is its position; the rows of a snapshot have
numbers up to 0.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from os import PathLike
from typing import Any, Final

from headgate.errors import HeadgateError
from headgate.lifecycle import after_fork, before_fork, new_lock
from headgate.stores.base import Change, Edit, LogPage
from headgate.stores.change_rows import to_changes, to_edit, to_rows

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    by TEXT NOT NULL,
    kind TEXT NOT NULL,
    agent TEXT NOT NULL,
    channel TEXT NOT NULL,
    tier TEXT NOT NULL,
    value TEXT,
    more INTEGER NOT NULL DEFAULT 0,
    generation INTEGER NOT NULL DEFAULT 0
)
"""
_FORMAT: Final = 1
_COLUMNS: Final = ("number", "at", "by", "kind", "agent", "channel", "tier", "value", "more", "generation")
_ADDED: Final = _COLUMNS[8:]
"""Columns that files of the first version don't have. That version ignores them."""
_READ: Final = f"SELECT {', '.join(_COLUMNS)} FROM changes WHERE number > ? ORDER BY number"  # noqa: S608
_INSERT: Final = f"INSERT INTO changes ({', '.join(_COLUMNS)}) VALUES (:{', :'.join(_COLUMNS)})"  # noqa: S608
_START: Final = -(2**62)
_BUSY_TIMEOUT: Final = 5.0  # seconds to wait for other processes
_POLL: Final = 1.0  # seconds until a change of another process is seen

_FORKED_IN_USE: Final = "expected a fork while no thread used the change log; restart this process"

_log = logging.getLogger("headgate")

_DISK: Final = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
)


class ChangeLogError(HeadgateError):
    """The change log can't be read or written."""


def is_disk_error(error: Exception) -> bool:
    """Whether the disk is at fault: it is full, broken, or can't be written."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK


def open_file(
    path: str | PathLike[str],
    what: str,
    version: int,
    schema: str,
    failure: type[HeadgateError],
    upgrade: Callable[[sqlite3.Connection], None] | None = None,
) -> sqlite3.Connection:
    """Open an SQLite file whose every commit is on the disk before it returns; create it if there is none.

    It is created, and upgraded from an earlier version, in one transaction: other processes may open it at the same
    time, and a kill leaves it as it was. A file that isn't `what` is expected, or is of another version, is left alone,
    and `failure` is raised.
    """
    try:
        file = sqlite3.connect(path, _BUSY_TIMEOUT, check_same_thread=False, isolation_level=None)
        try:
            file.text_factory = _text
            file.execute("PRAGMA synchronous=FULL")
            with _transaction(file):
                (found,) = file.execute("PRAGMA user_version").fetchone()
                if found not in (0, version):
                    newer = f"of format {version}, got format {found}; use a newer headgate"
                    raise failure(f"{path}: expected {what} {newer}")
                if not found:
                    if not _is_unfinished(file, schema):
                        raise failure(f"{path}: expected {what}, got a file of another program")
                    for name in _tables(file):
                        file.execute(f"DROP TABLE {name}")
                    file.execute(f"PRAGMA user_version={version}")
                for statement in schema.split(";"):  # not by executescript, which would commit first
                    file.execute(statement)
                if upgrade is not None:
                    upgrade(file)
            _use_write_ahead_log(file)
        except BaseException:
            file.close()
            raise
    except sqlite3.Error as error:
        raise failure(f"{path}: expected an SQLite file that can be written, got: {error}") from error
    return file


def _is_unfinished(file: sqlite3.Connection, schema: str) -> bool:
    """Whether a file has nothing but empty tables of a schema, as when an earlier version was killed at its start."""
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript(schema)
        ours = _tables(model)
    (others,) = file.execute("SELECT COUNT(*) FROM sqlite_master WHERE type NOT IN ('table', 'index')").fetchone()
    return not others and all(
        name in ours and columns <= ours[name] and file.execute(f"SELECT COUNT(*) FROM {name}").fetchone() == (0,)  # noqa: S608 - one of our own names
        for name, columns in _tables(file).items()
    )


def _tables(file: sqlite3.Connection) -> dict[str, set[str]]:
    """The tables of a file, each with the names of its columns."""
    names = file.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'").fetchall()
    columns = "SELECT name FROM pragma_table_info(?)"
    return {name: {column for (column,) in file.execute(columns, (name,))} for (name,) in names}


def _use_write_ahead_log(file: sqlite3.Connection) -> None:
    """Switch the journal. SQLite doesn't wait here for processes that do the same, as everywhere else; so we do."""
    deadline = time.monotonic() + _BUSY_TIMEOUT
    while True:
        try:
            file.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


@contextmanager
def _transaction(file: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    try:
        file.execute(begin)  # it may be interrupted once it has begun
        yield
        file.execute("COMMIT")
    except BaseException:
        if file.in_transaction:  # a full disk has ended it
            file.execute("ROLLBACK")
        raise


def _add_columns(file: sqlite3.Connection) -> None:
    present = {name for _, name, *_ in file.execute("PRAGMA table_info(changes)")}
    for name in _ADDED:
        if name not in present:
            file.execute(f"ALTER TABLE changes ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")


def _text(data: bytes) -> str | bytes:
    """A text in a file; one that isn't UTF-8 is left as it is, since an error would make all other rows unreadable."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class SqliteChangeLog:
    """Records changes in a file. A change that `write` has recorded survives a kill and a loss of power.

    Several processes can use the file: each sees the changes of the others within a second.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path
        self._lock: Final = new_lock()
        self._follower: _Follower | None = None
        self.failure = ""
        """Why the last write failed, in words; "" if it didn't."""
        self._file = self._open()
        self._suspended = False  # by a fork, until it is used again
        self._opened = 1  # how often
        self._closed = False
        self._forked_in_use = False  # the last fork found a thread that used the connection
        self._unusable = False  # in a process that was forked like that
        before_fork(self)
        after_fork(self)

    def _open(self) -> sqlite3.Connection:
        return open_file(self._path, "a change log", _FORMAT, _SCHEMA, ChangeLogError, _add_columns)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Use the connection."""
        nested = self._lock._is_owned()  # type: ignore[attr-defined]  # by a finalizer
        with self._lock:
            if self._unusable:
                raise ChangeLogError(f"{self._path}: {_FORKED_IN_USE}")
            if self._suspended:
                self._file, self._suspended = self._open(), False
                self._opened += 1
            elif not self._closed and not nested and self._file.in_transaction:  # its thread was interrupted
                self._file.execute("ROLLBACK")
            yield

    def _before_fork(self) -> None:
        """SQLite's connections must not cross a fork: beside one of the parent, the child's own would take no locks.

        A connection that another thread uses for longer than a fork waits is left to it, and the child has none.
        """
        self._forked_in_use = not self._lock.acquire(blocking=False)
        if self._forked_in_use:
            _log.error("%s: a forked process can't use the change log: a thread used it during the fork", self._path)
            return
        try:
            if not self._closed and not self._unusable:
                self._file.close()
                self._suspended = True
        finally:
            self._lock.release()

    def _after_fork(self) -> None:
        self._unusable = self._unusable or self._forked_in_use

    def read(self, after: int = 0) -> LogPage:
        with self._transaction("the changes can't be read", "BEGIN"):
            (first, last) = self._file.execute(
                "SELECT MIN(number), MAX(number) FROM changes WHERE number > 0"
            ).fetchone()
            known = first is not None and first - 1 <= after > 0
            rows = self._rows(after if known else _START)
        snapshot = None if known else tuple([to_edit(row) for row in rows if row["number"] <= 0])
        return LogPage(snapshot, to_changes(row for row in rows if row["number"] > 0), last or 0)

    def write(self, change: Change) -> int:
        with self._transaction("the change was not made, since it can't be recorded"):
            (last,) = self._file.execute("SELECT MAX(number) FROM changes WHERE number > 0").fetchone()
            position = self._insert(last or 0, change)
        self.failure = ""
        return position

    def probe(self) -> None:
        """After a failure: write something, to see whether that is possible again."""
        with suppress(ChangeLogError), self._transaction("the change log can't be written"):
            self._file.execute(f"PRAGMA user_version={_FORMAT + 1}")
            self._file.execute(f"PRAGMA user_version={_FORMAT}")
            self.failure = ""

    def compact(self, keep: int, condense: Callable[[Sequence[Edit]], Sequence[Edit]]) -> int:
        with self._transaction("the change log can't be compacted"):
            rows = self._rows(_START)
            snapshot = [row for row in rows if row["number"] <= 0]
            changes = to_changes(rows[len(snapshot) :])
            if len(changes) > keep:
                dropped = len(snapshot) + sum(len(change.edits) for change in changes[:-keep])
                edits = condense([to_edit(row) for row in rows[:dropped]])
                self._file.execute("DELETE FROM changes WHERE number < ?", (rows[dropped]["number"],))
                self._insert(-len(edits), Change(tuple(edits), at=0.0))
        return min(len(changes), keep)

    def follow(self, on_change: Callable[[bool], None]) -> None:
        """See `SharedChangeLog.follow`. No change is ever lost."""
        self._follower = _Follower(self._data_version, on_change)

    def _data_version(self) -> tuple[int, int]:
        """Changes with every commit of others. SQLite's own version counts for one connection."""
        with self._locked():
            (version,) = self._file.execute("PRAGMA data_version").fetchone()
            return self._opened, int(version)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.stop()
        with self._lock:
            self._closed, self._suspended = True, False
            if not self._unusable:  # else a thread of the parent may have held its locks
                self._file.close()

    def _rows(self, after: int) -> list[dict[str, Any]]:
        return [dict(zip(_COLUMNS, row, strict=True)) for row in self._file.execute(_READ, (after,))]

    def _insert(self, after: int, change: Change) -> int:
        """Write the rows of a change after a position, and return the position after them."""
        missing = dict.fromkeys(_ADDED, 0)
        rows = [missing | row | {"number": number} for number, row in enumerate(to_rows(change), after + 1)]
        self._file.executemany(_INSERT, rows)
        return after + len(rows)

    @contextmanager
    def _transaction(self, failure: str, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        with self._locked():
            try:
                with _transaction(self._file, begin):
                    yield
            except sqlite3.Error as error:
                if is_disk_error(error):
                    self.failure = str(error)
                raise ChangeLogError(f"{self._path}: {failure}: {error}") from error


class _Follower:
    """Calls `on_change` whenever a version has changed, from a thread of its own; in a forked process from another."""

    def __init__(self, version: Callable[[], object], on_change: Callable[[bool], None]) -> None:
        self._version, self._on_change = version, on_change
        self._start()
        after_fork(self)  # after the listener: in a forked process the thread calls it at once

    def _start(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headgate-changes", daemon=True)
        self._thread.start()

    def _after_fork(self) -> None:
        if not self._stopped.is_set():
            self._start()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        known: object = None
        reported = ""
        while not self._stopped.is_set():
            try:
                version = self._version()
                if version != known:
                    self._on_change(False)
                known, reported = version, ""
            except Exception as error:  # noqa: BLE001 - no error ends the thread
                if str(error) != reported:
                    reported = str(error)
                    _log.error("changes of other processes can't be read, and are tried again: %s", error)
            self._stopped.wait(_POLL)
