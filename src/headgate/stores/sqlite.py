"""A change log in an SQLite file, for the processes of one machine.

The rows are those of `headgate.stores.change_rows`. The number of a row is its position; the rows of a snapshot have
numbers up to 0.
"""

import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any, Final

from headgate.errors import HeadgateError
from headgate.lifecycle import after_fork
from headgate.stores.base import Change, Edit, LogPage
from headgate.stores.change_rows import to_changes, to_edit, to_rows
from headgate.stores.sqlite_file import FileKind, SqliteFile

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
_POLL: Final = 1.0  # seconds until a change of another process is seen

_log = logging.getLogger("headgate")


class ChangeLogError(HeadgateError):
    """The change log can't be read or written."""


_KIND: Final = FileKind("change log", _FORMAT, _SCHEMA, ChangeLogError)


class SqliteChangeLog(SqliteFile):
    """Records changes in a file. A change that `write` has recorded survives a kill and a loss of power.

    Several processes can use the file: each sees the changes of the others within a second.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path, _KIND)
        self._follower: _Follower | None = None

    def _prepare(self, file: sqlite3.Connection) -> None:
        present = {name for _, name, *_ in file.execute("PRAGMA table_info(changes)")}
        for name in _ADDED:
            if name not in present:
                file.execute(f"ALTER TABLE changes ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")

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
        super().close()

    def _rows(self, after: int) -> list[dict[str, Any]]:
        return [dict(zip(_COLUMNS, row, strict=True)) for row in self._file.execute(_READ, (after,))]

    def _insert(self, after: int, change: Change) -> int:
        """Write the rows of a change after a position, and return the position after them."""
        missing = dict.fromkeys(_ADDED, 0)
        rows = [missing | row | {"number": number} for number, row in enumerate(to_rows(change), after + 1)]
        self._file.executemany(_INSERT, rows)
        return after + len(rows)


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
