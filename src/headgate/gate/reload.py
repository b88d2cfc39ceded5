"""Reloads a policy file while a gate runs: when it changes, and on SIGHUP.

| the watcher finds                            | it                                                                 |
|----------------------------------------------|--------------------------------------------------------------------|
| other content than at the last look          | waits for the next look: somebody may be writing                   |
| the same twice                               | applies it                                                         |
| that it sets nothing, as if cut off          | logs it: only an explicit reload goes back to the defaults         |
| a mistake, or a file that can't be read      | logs it, and keeps the old policy until the file changes           |
| any other failure, as of a store that's away | logs it once for each reason, and tries again at every look        |

Content is compared by its digest, since a file can be rewritten without another size or time. SIGHUP and `reload_file`
are explicit: they apply what is there.
"""

import hashlib
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from os import PathLike, fspath
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Final, Self

from headgate.errors import HeadgateError, refuse
from headgate.gate.gate import Gate
from headgate.gate.policy import Policy, PolicyError, parse_toml, read_file
from headgate.lifecycle import after_fork
from headgate.limits.numbers import duration

_log = logging.getLogger("headgate")


def reload_file(gate: Gate, path: str | PathLike[str], by: str = "") -> bool:
    """Apply a policy file to a gate, and say whether that was possible. If it wasn't, the log says why."""
    try:
        _reload(gate, fspath(path), Policy.load(path), by)
    except Exception as error:  # noqa: BLE001 - whatever it was, the old policy stays in effect
        _log_failure(error)
        return False
    return True


class PolicyWatcher:
    """Reloads a gate's policy file whenever it changes, and on SIGHUP, until it is stopped.

    with PolicyWatcher(gate, "headgate.toml"):
        ...

    A thread of its own looks at the file every `interval` seconds, and applies a change that it finds twice. A forked
    process watches with its own thread. SIGHUP is handled only with `sighup`, which works in the main thread alone, and
    not on Windows. `read` returns the policy, in that thread, from the path and the content of the file. It may check
    what else is in the file, and raises a `PolicyError` with all mistakes.
    """

    def __init__(
        self,
        gate: Gate,
        path: str | PathLike[str],
        *,
        interval: float = 1.0,
        sighup: bool = False,
        read: Callable[[str, dict[str, Any]], Policy] = Policy.from_settings,
    ) -> None:
        self._gate: Final = gate
        self._path: Final = fspath(path)
        self._interval: Final = duration("PolicyWatcher interval", interval)
        self._signal: Final = getattr(signal, "SIGHUP", None) if sighup else None
        if sighup and self._signal is None:
            refuse("PolicyWatcher sighup", "False, since this system has no SIGHUP (call reload_file instead)", sighup)
        self._read_policy: Final = read
        self._signalled = False
        self._stopped = False
        self._seen: bytes | str = b""  # the content at the last look, as a digest, or why there was none
        self._handled: bytes | str = b""  # what was applied, or logged as unusable
        self._asked_for: bytes | str | None = None  # what an explicit reload couldn't apply yet; b"": whatever is there
        self._reported: tuple[bytes | str, str] | None = None  # the failure of other things that was logged
        self._old_handler: Any = None if self._signal is None else signal.signal(self._signal, self._on_signal)
        try:
            self._start()
        except BaseException:
            self._restore_handler()
            raise
        after_fork(self)

    def _start(self) -> None:
        self._wake: SimpleQueue[None] = SimpleQueue()  # unlike an event, a signal handler may use it at any moment
        self._thread = threading.Thread(target=self._run, name="headgate-policy", daemon=True)
        self._thread.start()

    def _after_fork(self) -> None:
        if not self._stopped:
            self._start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped = True
        self._wake.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._restore_handler()

    def _restore_handler(self) -> None:
        if self._signal is not None and self._old_handler is not None:
            signal.signal(self._signal, self._old_handler)
            self._old_handler = None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True
        self._wake.put(None)

    def _run(self) -> None:
        while not self._stopped:
            if self._signalled:
                self._signalled, self._reported, self._asked_for = False, None, b""
            self._look()
            with suppress(Empty):
                while not self._signalled and not self._stopped:
                    self._wake.get(timeout=self._interval)

    def _look(self) -> None:
        """Look at the file once."""
        state: bytes | str = b""
        try:
            content, state = self._read()
            stood_still, self._seen = state == self._seen, state
            explicit = self._asked_for in (b"", state)
            self._asked_for = state if explicit else None  # an edit after the request is not what was asked for
            if not explicit and (not stood_still or state == self._handled):
                return
            if isinstance(state, str):
                _log.error("policy not reloaded, the old one stays in effect: %s", state)
            else:
                self._apply(content, explicit)
        except PolicyError as error:
            _log_failure(error)
        except Exception as error:  # noqa: BLE001 - no error ends the thread
            failure = state, f"{type(error).__name__} {error}"
            if failure != self._reported:
                self._reported = failure
                _log_failure(error)
            return
        self._handled, self._reported, self._asked_for = state, None, None

    def _read(self) -> tuple[bytes, bytes | str]:
        """The content of the file and its digest; instead of the digest, why it can't be read."""
        try:
            content = read_file(self._path)
        except PolicyError as error:
            return b"", str(error)
        return content, hashlib.sha256(content).digest()

    def _apply(self, content: bytes, explicit: bool) -> None:
        settings = parse_toml(self._path, content)
        empty = _sets_nothing(settings)
        read = Policy.from_settings if empty and not explicit else self._read_policy
        policy = read(self._path, settings)
        if explicit:
            _reload(self._gate, self._path, policy, "SIGHUP")
        elif (policy, policy.given) == (self._gate.policy, self._gate.policy.given):
            _log.debug("%s was read, and is the policy in effect", self._path)
        elif empty:
            _log.error(
                "policy not reloaded, the old one stays in effect: %s: expected settings, got an empty file; if it is "
                "meant to be empty, reload it explicitly, as by SIGHUP",
                self._path,
            )
        else:
            _reload(self._gate, self._path, policy, "file")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _reload(gate: Gate, path: str, policy: Policy, by: str) -> None:
    gate.reload(policy, by=by)
    _log.info("policy reloaded from %s", path)


def _log_failure(error: Exception) -> None:
    unforeseen = not isinstance(error, HeadgateError)
    _log.error("policy not reloaded, the old one stays in effect: %s", error, exc_info=unforeseen and error)


def _sets_nothing(table: dict[str, Any]) -> bool:
    values = list(table.values())
    while values:  # tables may be nested more deeply than calls
        value = values.pop()
        if not isinstance(value, dict):
            return False
        values.extend(value.values())
    return True
