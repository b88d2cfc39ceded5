"""A change log in an SQLite file, for one node.

The rows are those of `headgate.stores.change_rows`. The number of a row is its position; the rows of a snapshot have
numbers up to 0.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Any, Final

from headgate.errors import HeadgateError
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
    path: str | PathLike[str], what: str, version: int, schema: str, failure: type[HeadgateError]
) -> sqlite3.Connection:
    """Open an SQLite file whose every commit is on the disk before it returns; create it if there is none.

    A file that isn't `what` is expected, or is of another version, is left alone, and `failure` is raised.
    """
    try:
        file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            file.text_factory = _text
            file.execute("PRAGMA busy_timeout=5000")
            (found,) = file.execute("PRAGMA user_version").fetchone()
            (parts,) = file.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if parts and not found:
                raise failure(f"{path}: expected {what}, got a file of another program")
            if found not in (0, version):
                raise failure(f"{path}: expected {what} of format {version}, got format {found}; use a newer headgate")
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("PRAGMA synchronous=FULL")
            file.executescript(schema)
            file.execute(f"PRAGMA user_version={version}")
        except BaseException:
            file.close()
            raise
    except sqlite3.Error as error:
        raise failure(f"{path}: expected an SQLite file that can be written, got: {error}") from error
    return file


def _text(data: bytes) -> str | bytes:
    """A text in a file; one that isn't UTF-8 is left as it is, since an error would make all other rows unreadable."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class SqliteChangeLog:
    """Records changes in a file. A change that `write` has recorded survives a kill and a loss of power."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.failure = ""
        """Why the last write failed, in words; "" if it didn't."""
        self._file = open_file(path, "a change log", _FORMAT, _SCHEMA, ChangeLogError)
        with self._transaction("the change log can't be used"):
            present = {name for _, name, *_ in self._file.execute("PRAGMA table_info(changes)")}
            for name in _ADDED:
                if name not in present:
                    self._file.execute(f"ALTER TABLE changes ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")

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

    def close(self) -> None:
        with self._lock:
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
        with self._lock:
            try:
                self._file.execute(begin)
                try:
                    yield
                    self._file.execute("COMMIT")
                except BaseException:
                    if self._file.in_transaction:  # a full disk has ended it
                        self._file.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                if is_disk_error(error):
                    self.failure = str(error)
                raise ChangeLogError(f"{self._path}: {failure}: {error}") from error
