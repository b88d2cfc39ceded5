"""Reloads a policy file while a gate runs: when it changes, and on SIGHUP.

With a mistake in the file the old policy stays in effect, and the log says why.
"""

import logging
import os
import signal
import threading
from os import PathLike
from types import FrameType, TracebackType
from typing import Self

from headgate.errors import StoreError
from headgate.gate.gate import Gate
from headgate.gate.policy import Policy, PolicyError

_log = logging.getLogger("headgate")


def reload_file(gate: Gate, path: str | PathLike[str], by: str = "") -> bool:
    """Apply a policy file to a gate, and say whether that was possible."""
    try:
        policy = Policy.load(path)
        gate.reload(policy, by=by)
    except (PolicyError, StoreError) as error:
        _log.error("policy not reloaded, the old one stays in effect: %s", error)
        return False
    _log.info("policy reloaded from %s", os.fspath(path))
    return True


class PolicyWatcher:
    """Reloads a gate's policy file whenever it changes, and on SIGHUP, until it is stopped.

    with PolicyWatcher(gate, "headgate.toml"):
        ...

    A thread of its own looks at the file every `interval` seconds. SIGHUP is handled only with `sighup`, which works
    in the main thread alone.
    """

    def __init__(self, gate: Gate, path: str | PathLike[str], *, interval: float = 1.0, sighup: bool = False) -> None:
        self._gate, self._path, self._interval = gate, path, interval
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._signalled = False
        self._last_state = self._state()
        self._old_handler = signal.signal(signal.SIGHUP, self._on_signal) if sighup else None
        self._thread = threading.Thread(target=self._run, name="headgate-policy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._wake.set()
        self._thread.join()
        if self._old_handler is not None:
            signal.signal(signal.SIGHUP, self._old_handler)
            self._old_handler = None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._interval)
            self._wake.clear()
            signalled, self._signalled = self._signalled, False
            state = self._state()
            if signalled or (state is not None and state != self._last_state):
                self._last_state = state
                reload_file(self._gate, self._path, by="SIGHUP" if signalled else "file")

    def _state(self) -> tuple[int, int, int] | None:
        """Changes whenever the file does; None while there is no file, as in the middle of a replacement."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
