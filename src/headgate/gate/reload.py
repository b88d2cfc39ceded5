"""Reloading a policy file while a gate runs: when it changes, and on SIGHUP.

A file is taken as a whole or not at all: with a mistake in it the old policy stays, and the log says why.
"""

import logging
import os
import signal
import threading
from os import PathLike
from types import FrameType, TracebackType
from typing import Self

from headgate.gate.gate import Gate
from headgate.gate.policy import Policy, PolicyError

_log = logging.getLogger("headgate")


def reload_file(gate: Gate, path: str | PathLike[str], by: str = "") -> bool:
    """Let a gate hold to what a file says now, and say whether it could."""
    try:
        policy = Policy.load(path)
    except PolicyError as error:
        _log.error("policy not reloaded, the old one holds: %s", error)
        return False
    gate.reload(policy, by=by)
    _log.info("policy reloaded from %s", os.fspath(path))
    return True


class PolicyWatcher:
    """Reloads a gate's policy file whenever it changes, and on SIGHUP, until it is stopped.

    with PolicyWatcher(gate, "headgate.toml"):
        ...

    The file is looked at every `interval` seconds by a thread of its own. SIGHUP is taken only with `sighup`, which
    works in the main thread alone.
    """

    def __init__(self, gate: Gate, path: str | PathLike[str], *, interval: float = 1.0, sighup: bool = False) -> None:
        self._gate, self._path, self._interval = gate, path, interval
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._asked = False
        self._seen = self._state()
        self._before = signal.signal(signal.SIGHUP, self._on_signal) if sighup else None
        self._thread = threading.Thread(target=self._run, name="headgate-policy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """PolicyWatcher no more."""
        self._stopped.set()
        self._wake.set()
        self._thread.join()
        if self._before is not None:
            signal.signal(signal.SIGHUP, self._before)
            self._before = None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._interval)
            self._wake.clear()
            asked, self._asked = self._asked, False
            now = self._state()
            if asked or (now != self._seen and now is not None):
                self._seen = now
                reload_file(self._gate, self._path, by="SIGHUP" if asked else "file")

    def _state(self) -> tuple[int, int, int] | None:
        """What changes when the file does; None while there is none, as between the two steps of a replacement."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
