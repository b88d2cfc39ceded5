"""What begins anew in a process that was forked: locks that a thread of the parent held, connections, threads."""

import logging
import os
from typing import Final, Protocol
from weakref import WeakKeyDictionary

_log = logging.getLogger("headgate")


class Forking(Protocol):
    """Something that can't be used in a process that was forked as it is."""

    def _forked(self) -> None:
        """In the process that was forked: begin anew with what can't be shared with the parent."""


_told: Final[WeakKeyDictionary[Forking, None]] = WeakKeyDictionary()


def tell_of_forks(one: Forking) -> None:
    """Call `_forked` in every process that is forked from now on, once, as long as somebody else has a use for `one`.

    Those that came first are told first, so that whoever builds on something finds it ready.
    """
    _told.setdefault(one)


def _after_fork() -> None:
    for one in list(_told):
        try:
            one._forked()
        except Exception:  # noqa: BLE001 - one that fails must not leave the others with the parent's locks
            _log.exception("a %s could not begin anew in a process that was forked", type(one).__name__)


os.register_at_fork(after_in_child=_after_fork)
