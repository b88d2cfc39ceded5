"""A book of changes in an SQLite file, for one node."""

import sqlite3
import threading
from os import PathLike

from headgate.errors import HeadgateError
from headgate.stores.base import Change

_SCHEMA = """
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    by TEXT NOT NULL,
    kind TEXT NOT NULL,
    agent TEXT NOT NULL,
    channel TEXT NOT NULL,
    tier TEXT NOT NULL,
    value TEXT
)
"""
_FORMAT = 1


class ChangeLogError(HeadgateError):
    """What is remembered can't be read or written."""


def open_file(
    path: str | PathLike[str], what: str, version: int, schema: str, failure: type[HeadgateError]
) -> sqlite3.Connection:
    """An SQLite file, made if there is none, whose every commit is on the disk before it returns.

    It has to be `what` it says, of this version, or nothing yet: otherwise it is left alone, and `failure` is raised.
    """
    try:
        file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            file.execute("PRAGMA busy_timeout=5000")
            (found,) = file.execute("PRAGMA user_version").fetchone()
            (parts,) = file.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if parts and not found:
                raise failure(f"{path}: expected {what}, got a file of another program's")
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


class SqliteChangeLog:
    """Remembers changes in a file. A change that `write` has taken survives a kill and a loss of power."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file = open_file(path, "a book", _FORMAT, _SCHEMA, ChangeLogError)

    def read(self) -> list[Change]:
        with self._lock:
            try:
                rows = self._file.execute(
                    "SELECT kind, agent, channel, tier, value, by, at FROM changes ORDER BY number"
                ).fetchall()
            except sqlite3.Error as error:
                raise ChangeLogError(f"{self._path}: the changes can't be read: {error}") from error
        return [Change(*row) for row in rows]

    def write(self, change: Change) -> None:
        row = (change.kind, change.agent, change.channel, change.tier, change.value, change.by, change.at)
        with self._lock:
            try:
                self._file.execute(
                    "INSERT INTO changes (kind, agent, channel, tier, value, by, at) VALUES (?, ?, ?, ?, ?, ?, ?)", row
                )
            except sqlite3.Error as error:
                raise ChangeLogError(
                    f"{self._path}: the change is not made, it can't be remembered: {error}"
                ) from error

    def close(self) -> None:
        with self._lock:
            self._file.close()
