"""The life of an object that holds resources: closing it, and starting over in a forked process."""

import logging
import os
from types import TracebackType
from typing import Final, Protocol, Self
from weakref import WeakKeyDictionary

_log = logging.getLogger("headgate")


class Closable:
    """Something to be closed. `aclose` is for event loops."""

    def close(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError

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


_forkables: Final[WeakKeyDictionary[Forkable, None]] = WeakKeyDictionary()


def after_fork(one: Forkable) -> None:
    """Call `one._after_fork` in every process that is forked from now on, as long as `one` is alive.

    The calls are made in the order of registration, so that an object finds its parts ready.
    """
    _forkables.setdefault(one)


def _call_all() -> None:
    for one in list(_forkables):
        try:
            one._after_fork()
        except Exception:  # noqa: BLE001 - one that fails must not leave the others with the parent's locks
            _log.exception("could not reset a %s in a forked process", type(one).__name__)


os.register_at_fork(after_in_child=_call_all)
