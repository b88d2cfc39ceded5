"""A thread that sends something to the server while there is anything to send."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from headgate.lifecycle import new_lock

_log = logging.getLogger("headgate")


class BackgroundThread:
    """Calls `send` again and again while `waits` says that something waits, in a thread that is started for it.

    `send` returns the seconds until its next call, which comes earlier if the thread is woken. The first one comes
    `delay` seconds after the start. No error ends the thread: the next call comes `pause` seconds later.
    """

    def __init__(
        self,
        name: str,
        what: str,
        send: Callable[[], float],
        waits: Callable[[], bool],
        log: Callable[[int, str], None] = _log.log,
        *,
        delay: float,
        pause: float,
    ) -> None:
        """`what` is sent, in the plural, for the log."""
        self._name: Final = name
        self._what: Final = what
        self._send: Final = send
        self._waits: Final = waits
        self._log: Final = log
        self._delay: Final = delay
        self._pause: Final = pause
        self._lock: Final = new_lock()
        self._woken = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if something waits. One that can't be started is tried again at the next call."""
        if not self._runs() and self._waits():
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with self._lock:  # which a finalizer in this thread passes: what is made above may run one
                if not self._runs() and not self._closed:
                    self._thread = thread
                    try:
                        thread.start()
                    except RuntimeError as error:
                        self._log(logging.ERROR, f"{self._what} can't be sent to the store yet: {error}")
                    finally:
                        if not thread.is_alive():
                            self._thread = None

    def _runs(self) -> bool:
        return self._thread is not None

    def wake(self) -> None:
        """Let the thread send now, if it runs."""
        self._woken.set()

    def _run(self) -> None:
        try:
            self._send_until_done()
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # it was ended by more than an error, such as gevent's
                    self._thread = None

    def _send_until_done(self) -> None:
        seconds, reported = self._delay, ""
        while True:
            self._woken.wait(seconds)
            self._woken.clear()
            if self._closed:  # `close` sets it before it wakes the thread
                return
            try:
                seconds, reported = self._send(), ""
            except Exception as error:  # noqa: BLE001 - what waits still needs this thread
                seconds = self._pause
                if repr(error) != reported:
                    reported = repr(error)
                    _log.exception("%s could not be sent to the store, and are tried again", self._what)
            with self._lock:
                thread, self._thread = self._thread, None  # first: whoever adds something now waits for the lock
                if not self._waits() or self._runs():  # a finalizer may have started another
                    return
                self._thread = thread

    def after_fork(self) -> None:
        """In a forked process: the parent's thread is not here."""
        self._woken, self._thread = threading.Event(), None

    def close(self) -> None:
        """Let the thread send nothing more, and wait until it has ended."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._woken.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
