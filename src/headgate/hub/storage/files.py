"""Files that only their owner may read: they hold mail and digests of tokens."""

import fcntl
import os
import stat
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Final

import structlog

from headgate.errors import HeadgateError

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")

_log = structlog.get_logger("headgate.hub")


def private_file(path: Path) -> Path:
    """Create a file that only its owner may read and write, if there is none.

    SQLite gives the files that it creates beside a database the permissions of the database. A file that can't be
    created is left to whoever opens it next, with an error of its own.
    """
    with suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    return path


def make_private(path: Path) -> None:
    """Remove other users' access to a database and to SQLite's files beside it.

    The directory is left as it is, since it may have another purpose too; if others can write to it, that is logged.
    """
    _check_directory(path.parent)
    for file in [path.with_name(path.name + suffix) for suffix in _SUFFIXES]:
        with suppress(FileNotFoundError):
            _make_private(file)


@lru_cache(maxsize=16)  # several files are in one directory
def _check_directory(directory: Path) -> None:
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        _log.warning(
            "other users can write to the data directory and replace its files: chmod go-w",
            directory=str(directory),
            mode=oct(mode),
        )


def _make_private(file: Path) -> None:
    mode = stat.S_IMODE(file.stat().st_mode)
    if not mode & _OTHERS:
        return
    try:
        file.chmod(mode & ~_OTHERS)
    except PermissionError:
        _log.warning("other users have access to a file, which can't be changed", file=str(file), mode=oct(mode))
    else:
        _log.warning("other users had access to a file; now only its owner has", file=str(file), mode=oct(mode))


def lock_directory(data: Path) -> IO[str]:
    """Create the data directory if needed, and lock it: it belongs to one hub at a time."""
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = private_file(data / "lock").open("w")
    except OSError as error:
        raise HeadgateError(f"{data}: expected a directory that can be written, got: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise HeadgateError(f"{data}: another hub uses this directory; give this one another by --data") from None
    make_private(data / "lock")
    return lock
