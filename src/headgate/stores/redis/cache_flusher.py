"""Sends what the local caches of a store owe to its server, in the background."""

from collections.abc import Callable
from typing import Final

from headgate.limits.decision import Violation
from headgate.stores.base import RecordedViolation
from headgate.stores.redis.background_thread import BackgroundThread
from headgate.stores.redis.batching import ThreadBatcher
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.local_cache import LocalCaches

_FLUSH_EVERY: Final = 0.5  # seconds


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
        self._thread: Final = BackgroundThread(
            "headgate-cache",
            "violations and idle tokens",
            self._send,
            caches.need_flush,
            log,
            delay=_FLUSH_EVERY,
            pause=_FLUSH_EVERY,
        )

    def after_fork(self) -> None:
        """In a forked process: the parent's thread is not here."""
        self._thread.after_fork()

    def start(self) -> None:
        """Start the thread, if there is anything to send. One that can't be started is tried again at the next call."""
        self._thread.start()

    def _send(self) -> float:
        self.flush()
        return _FLUSH_EVERY

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
        self._thread.close()
        self.flush(everything=True)
