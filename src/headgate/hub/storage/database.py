"""What one hub has to remember: an SQLite file, written by one thread, many writes to a commit.

    count = await database.run(lambda db: db.execute("UPDATE …").rowcount)

A piece of work is done as a whole or not at all, pieces one after the other in the order in which they were handed in.
When `run` returns, what it did survives a kill and a loss of power. Pieces that are handed in while the disk is busy
are committed together, so that a thousand of them take little longer than one.
"""

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from os import PathLike
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

from headgate.errors import HeadgateError
from headgate.stores.sqlite import open_file

T = TypeVar("T")
Work: TypeAlias = Callable[[sqlite3.Connection], T]
_FORMAT: Final = 1
_TOGETHER: Final = 1000  # pieces of work in one commit

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS agents (agent TEXT PRIMARY KEY, digest BLOB UNIQUE, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS invitations (digest BLOB PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
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
    """Of the rows of a table, keeps so many of each value of a column, the newest, and a tenth more at times."""

    def __init__(self, table: str, column: str, most: int) -> None:
        self._most: Final = most
        self._added: Final[Counter[str]] = Counter()  # since it was looked
        self._delete: Final = (
            f"DELETE FROM {table} WHERE {column} = ?1 AND number <= "  # noqa: S608 - the names are the hub's own
            f"(SELECT number FROM {table} WHERE {column} = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2)"
        )

    def added(self, db: sqlite3.Connection, value: str) -> None:
        """A row was added: drop those that are too many. To be called by a piece of work."""
        self._added[value] += 1
        if self._added[value] >= max(self._most // 10, 1):
            del self._added[value]
            db.execute(self._delete, (value, self._most))


class DatabaseError(HeadgateError):
    """What a hub remembers can't be read or written."""


class Database:
    """The file at `path`; without one, memory, gone with the process."""

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self._path: Final = ":memory:" if path is None else path
        self._file: Final = open_file(self._path, "a hub's database", _FORMAT, _SCHEMA, DatabaseError)
        self._closed = False
        self._pieces: Final[SimpleQueue[_Piece | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="headgate-database", daemon=True)
        self._thread.start()

    async def run(self, work: Work[T]) -> T:
        """Do a piece of work; what it raises is raised here, and nothing of it is kept then."""
        if self._closed:
            raise DatabaseError(f"{self._path}: nothing was written: the database is closed")
        piece = _Piece(work)
        self._pieces.put(piece)
        result: T = await piece.done
        return result

    def close(self) -> None:
        """Finish what was handed in, and let go of the file."""
        self._closed = True
        self._pieces.put(None)
        self._thread.join()
        self._file.close()

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            together = [piece]
            more: _Piece | None = piece
            while more is not None and len(together) < _TOGETHER and not self._pieces.empty():
                more = self._pieces.get()
                if more is not None:
                    together.append(more)
            self._commit(together)
            if more is None:
                return

    def _commit(self, pieces: list["_Piece"]) -> None:
        try:
            self._file.execute("BEGIN IMMEDIATE")
            for piece in pieces:
                self._one(piece)
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            failure = _told(self._path, error)
            for piece in pieces:
                piece.result, piece.error = None, failure
        _tell(pieces)

    def _one(self, piece: "_Piece") -> None:
        self._file.execute("SAVEPOINT piece")
        try:
            piece.result = piece.work(self._file)
        except Exception as error:
            if not self._file.in_transaction:  # as when the disk is full: nothing of any piece is left
                raise
            piece.error = _told(self._path, error) if isinstance(error, sqlite3.Error) else error
            self._file.execute("ROLLBACK TO piece")
        self._file.execute("RELEASE piece")


def _told(path: object, error: sqlite3.Error) -> DatabaseError:
    return DatabaseError(f"{path}: nothing was written: {error}")


class _Piece:
    """A piece of work, and what came of it."""

    def __init__(self, work: Work[Any]) -> None:
        self.work: Final = work
        self.loop: Final = asyncio.get_running_loop()
        self.done: Final[asyncio.Future[Any]] = self.loop.create_future()
        self.result: Any = None
        self.error: Exception | None = None

    def tell(self) -> None:
        if self.done.done():  # whoever waited was cancelled; the work is done all the same
            return
        if self.error is None:
            self.done.set_result(self.result)
        else:
            self.done.set_exception(self.error)


def _tell(pieces: list[_Piece]) -> None:
    """Wake up those who wait: each loop once."""
    for loop in {piece.loop for piece in pieces}:
        own = [piece for piece in pieces if piece.loop is loop]
        try:
            loop.call_soon_threadsafe(_tell_all, own)
        except RuntimeError:  # the loop was closed, and nobody waits any more
            continue


def _tell_all(pieces: list[_Piece]) -> None:
    for piece in pieces:
        piece.tell()
