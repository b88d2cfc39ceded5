"""Sends what the local caches of a store owe to its server, in the background."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from headgate.lifecycle import new_lock
from headgate.limits.decision import Violation
from headgate.stores.base import RecordedViolation
from headgate.stores.redis.batching import ThreadBatcher
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.local_cache import LocalCaches

_FLUSH_EVERY: Final = 0.5  # seconds

_log = logging.getLogger("headgate")


class CacheFlusher:
    """Sends owed violations and gives back idle tokens, by a thread that runs while there are any."""

    def __init__(
        self,
        caches: LocalCaches,
        keys: Keys,
        batcher: ThreadBatcher,
        report: Callable[[RecordedViolation], None],
        log: Callable[[int, str], None],
    ) -> None:
        self._caches: Final = caches
        self._keys: Final = keys
        self._batcher: Final = batcher
        self._report: Final = report
        self._log: Final = log
        self._closed = False
        self._lock: Final = new_lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def after_fork(self) -> None:
        """In a forked process: the parent's thread is not here."""
        self._ended, self._thread = threading.Event(), None

    def start(self) -> None:
        """Start the thread, if there is anything to send. One that can't be started is tried again at the next call."""
        if not self._running() and self._caches.need_flush():
            with self._lock:
                if not self._running() and not self._closed:
                    thread = threading.Thread(target=self._run, name="headgate-cache", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError as error:
                        self._log(logging.ERROR, f"violations and idle tokens can't be sent to the store yet: {error}")
                    else:
                        self._thread = thread

    def _running(self) -> bool:
        return self._thread is not None

    def _run(self) -> None:
        while not self._ended.wait(_FLUSH_EVERY):
            try:
                self.flush()
            except Exception:  # noqa: BLE001 - no error ends the thread
                _log.exception("violations and idle tokens could not be sent to the store")
            with self._lock:
                if not self._caches.need_flush():
                    self._thread = None
                    return

    def flush(self, *, everything: bool = False) -> None:
        """Send owed violations to the server, and give back drawn tokens that are idle, or all of them."""
        owed = self._caches.take_owed(self._keys)
        try:
            self._batcher.execute_all([*owed, *self._caches.drop_idle(self._keys, everything)])
        finally:
            for request in owed:
                if isinstance(request.answer, Violation):
                    self._report(RecordedViolation(request.offence, request.answer))
                else:
                    self._caches.owe_again(request.offence, request.times)

    def close(self) -> None:
        """End the thread, and send everything."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._ended.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.flush(everything=True)
