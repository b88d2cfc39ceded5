"""SQLite files of headgate: opened, made and upgraded in one transaction, and closed for a fork."""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from os import PathLike
from typing import Final, NamedTuple

from headgate.errors import HeadgateError
from headgate.lifecycle import after_fork, before_fork, new_lock

_BUSY_TIMEOUT: Final = 5.0  # seconds to wait for other processes
_EXCLUSIVE_TIMEOUT: Final = 1.0  # seconds to wait for a process that has a file for itself, and is about to end

_log = logging.getLogger("headgate")

_DISK: Final = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
)


def is_disk_error(error: Exception) -> bool:
    """Whether the disk is at fault: it is full, broken, or can't be written."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK


class FileKind(NamedTuple):
    """A kind of file."""

    what: str
    """The kind of file, without an article: "change log"."""
    version: int
    schema: str
    failure: type[HeadgateError]
    """The error that says that it can't be read or written."""
    application: int = 0
    """SQLite's `application_id`, which tells it from other files with the same version."""
    exclusive: bool = False
    """Whether one process has it for itself. Then the last commits may not survive a loss of power."""
    readable: bool = False
    """Whether others may read an exclusive file meanwhile, as for a backup: then its owner keeps other writers away."""
    upgrade: str = ""
    """Statements that make it out of a file of the version before; none if there is no such version."""


def open_file(
    path: str | PathLike[str], kind: FileKind, prepare: Callable[[sqlite3.Connection], None] | None = None
) -> sqlite3.Connection:
    """Open an SQLite file, or create it. Every commit survives a kill, and unless it is exclusive a loss of power.

    It is created, and prepared (as when it is upgraded from an earlier version), in one transaction: other processes
    may open it at the same time, and a kill leaves it as it was. A file that isn't of this kind, or is of another
    version, is left alone, and `kind.failure` is raised.
    """
    timeout = _EXCLUSIVE_TIMEOUT if kind.exclusive else _BUSY_TIMEOUT
    try:
        file = sqlite3.connect(path, timeout, check_same_thread=False, isolation_level=None)
        try:
            file.text_factory = _text
            file.execute(f"PRAGMA synchronous={'NORMAL' if kind.exclusive else 'FULL'}")
            if kind.exclusive and not kind.readable:
                file.execute("PRAGMA locking_mode=EXCLUSIVE")
            with _transaction(file):
                _make(file, path, kind)
                if prepare is not None:
                    prepare(file)
            _use_write_ahead_log(file)
        except BaseException:
            file.close()
            raise
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: of a message that quotes a damaged file
        if kind.exclusive and _is_busy(error):
            raise kind.failure(
                f"{path}: expected a file that nobody else uses, got one that is in use: by another process, or by a"
                " store of this one that isn't closed; several processes share a server instead, such as"
                " store='redis://127.0.0.1'"
            ) from error
        hint = "; a MemoryStore and a gate need a file each" if _is_busy(error) else ""
        raise kind.failure(f"{path}: expected an SQLite file that can be written, got: {error}{hint}") from error
    return file


def _make(file: sqlite3.Connection, path: str | PathLike[str], kind: FileKind) -> None:
    """Make the tables of a file, if it is new or unfinished. One that isn't of this kind is refused."""
    (found,) = file.execute("PRAGMA user_version").fetchone()
    (application,) = file.execute("PRAGMA application_id").fetchone()
    if application != (kind.application if found else 0):
        raise kind.failure(f"{path}: expected a {kind.what}, got a file of another program")
    if found and found == kind.version - 1 and kind.upgrade:
        for statement in (*kind.upgrade.split(";"), f"PRAGMA user_version={kind.version}"):
            file.execute(statement)
    elif found not in (0, kind.version):
        newer = f"of format {kind.version}, got format {found}; use a newer headgate"
        raise kind.failure(f"{path}: expected a {kind.what} {newer}")
    if not found:
        if not _is_unfinished(file, kind.schema):
            raise kind.failure(f"{path}: expected a {kind.what}, got a file of another program")
        for name in _tables(file):
            file.execute(f"DROP TABLE {name}")
        file.execute(f"PRAGMA user_version={kind.version}")
        file.execute(f"PRAGMA application_id={kind.application}")
    for statement in kind.schema.split(";"):  # not by executescript, which would commit first
        file.execute(statement)


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
            if not _is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


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


def _text(data: bytes) -> str | bytes:
    """A text in a file; one that isn't UTF-8 is left as it is, since an error would make all other rows unreadable."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class SqliteFile:
    """A file with the connection of this process, which threads share and a fork doesn't."""

    def __init__(self, path: str | PathLike[str], kind: FileKind) -> None:
        self._path: Final = path
        self._kind: Final = kind
        self._lock: Final = new_lock()
        self.failure = ""
        """Why the last write failed, in words; "" if it didn't."""
        self._file = open_file(path, kind, self._prepare)
        self._suspended = False  # by a fork, until it is used again
        self._opened = 1  # how often
        self._closed = False
        self._forked_in_use = False  # the last fork found a thread that used the connection
        self._unusable = False  # in a process that was forked like that
        before_fork(self)
        after_fork(self)

    def _prepare(self, file: sqlite3.Connection) -> None:
        """Called in the transaction that opens the file, also when it is opened again after a fork."""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Use the connection."""
        nested = self._lock._is_owned()  # type: ignore[attr-defined]  # by a finalizer
        with self._lock:
            if self._unusable:
                expected = f"a fork while no thread used the {self._kind.what}"
                raise self._kind.failure(f"{self._path}: expected {expected}; restart this process")
            if self._suspended:
                self._file, self._suspended = open_file(self._path, self._kind, self._prepare), False
                self._opened += 1
            elif not self._closed and not nested and self._file.in_transaction:  # its thread was interrupted
                self._file.execute("ROLLBACK")
            yield

    @contextmanager
    def _transaction(self, failure: str, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        with self._locked():
            try:
                if self._file.in_transaction:
                    raise sqlite3.OperationalError("it came from a finalizer, in the middle of another transaction")
                with _transaction(self._file, begin):
                    yield
            except sqlite3.Error as error:
                if is_disk_error(error):
                    self.failure = str(error)
                raise self._kind.failure(f"{self._path}: {failure}: {error}") from error

    def _before_fork(self) -> None:
        """SQLite's connections must not cross a fork: beside one of the parent, the child's own would take no locks.

        A connection that another thread uses for longer than a fork waits is left to it, and the child has none.
        """
        self._forked_in_use = not self._lock.acquire(blocking=False)
        if self._forked_in_use:
            problem = f"a forked process can't use the {self._kind.what}: a thread used it during the fork"
            _log.error("%s: %s", self._path, problem)
            return
        try:
            if not self._closed and not self._unusable:
                self._file.close()
                self._suspended = True
        finally:
            self._lock.release()

    def _after_fork(self) -> None:
        self._unusable = self._unusable or self._forked_in_use

    def close(self) -> None:
        with self._lock:
            self._closed, self._suspended = True, False
            if not self._unusable:  # else a thread of the parent may have held its locks
                self._file.close()
