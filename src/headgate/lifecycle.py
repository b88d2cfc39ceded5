"""The life of an object that holds resources: closing it, and starting over in a forked process."""

import logging
import os
import threading
import time
from abc import abstractmethod
from types import TracebackType
from typing import Any, Final, Protocol, Self
from weakref import WeakKeyDictionary, ref

_FORK_SECONDS: Final = 1.0  # seconds that a fork waits for all locks together

_log = logging.getLogger("headgate")


class Closable:
    """Something to be closed. `aclose` is for event loops.

    No ABC: classes derive from this one and from compiled ones, which have another metaclass.
    """

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it, in an event loop."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


class Forkable(Protocol):
    """An object that a forked process can't use as it is: it has locks, threads or connections."""

    def _after_fork(self) -> None:
        """In the forked process: replace what can't be shared with the parent."""


class Suspendable(Protocol):
    """An object with something open that must not cross a fork. It is opened again when it is used."""

    def _before_fork(self) -> None:
        """In the forking process: close it."""


_forkables: Final[WeakKeyDictionary[Forkable, None]] = WeakKeyDictionary()
_suspendables: Final[WeakKeyDictionary[Suspendable, None]] = WeakKeyDictionary()
_locks: Final[dict[int, ref[Any]]] = {}  # by id, as a dict that threads may add to while it is read
_held: Final = threading.local()  # `locks`: those that this thread holds while it forks


def after_fork(one: Forkable) -> None:
    """Call `one._after_fork` in every process that is forked from now on, as long as `one` is alive.

    The calls are made in the order of registration, so that an object finds its parts ready.
    """
    _forkables.setdefault(one)


def before_fork(one: Suspendable) -> None:
    """Call `one._before_fork` before every fork from now on, as long as `one` is alive, while no thread uses it."""
    _suspendables.setdefault(one)


def new_lock() -> threading.RLock:
    """A reentrant lock that is safe with finalizers and forks.

    The garbage collector may run a finalizer in the thread that holds it. A fork waits up to one second for its holder;
    in the child it is free.
    """
    lock = threading.RLock()
    number = id(lock)
    _locks[number] = ref(lock, lambda _: _locks.pop(number, None))
    return lock


def _hold_locks() -> None:
    held: list[Any] = []
    _held.locks = held  # at once: Python goes on to fork if a signal handler's exception ends this function
    deadline = time.monotonic() + _FORK_SECONDS
    # The newest first: the lock of a whole is made after those of its parts, and held while these are taken.
    found = [lock for known in reversed(list(_locks.values())) if (lock := known()) is not None]
    try:
        for lock in found:
            if lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
                held.append(lock)  # noqa: PERF401 - what is held has to be known at every moment
    finally:
        for one in list(_suspendables):
            try:
                one._before_fork()
            except Exception:  # noqa: BLE001 - it must not keep the process from forking
                _log.exception("could not suspend a %s before a fork", type(one).__name__)


def _release_locks() -> None:
    for lock in _held.locks:
        lock.release()
    _held.locks = []


def _reset_child() -> None:
    held = {id(lock) for lock in _held.locks}
    for number, known in list(_locks.items()):
        lock = known()
        if lock is not None and number not in held:
            lock._at_fork_reinit()  # its holder doesn't exist here
    _release_locks()
    for one in list(_forkables):
        try:
            one._after_fork()
        except Exception:  # noqa: BLE001 - one that fails must not leave the others with the parent's locks
            _log.exception("could not reset a %s in a forked process", type(one).__name__)


if hasattr(os, "register_at_fork"):  # where processes can fork
    os.register_at_fork(before=_hold_locks, after_in_parent=_release_locks, after_in_child=_reset_child)
