"""Calls that may take long, with callers that wait for them no longer than their time.

A socket has a timeout, but a call may use many of them: connecting to a cluster asks one node after the other, and a
name may have several addresses. So such calls are made in threads of their own.
"""

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

import redis

from headgate.lifecycle import new_lock

_MAX_THREADS: Final = 16
_IDLE_FOR: Final = 1.0  # seconds without a call after which a thread ends

T = TypeVar("T")
Outcome: TypeAlias = tuple[Any, BaseException | None]
Call: TypeAlias = tuple[Callable[[], Any], SimpleQueue[Outcome]]

_log = logging.getLogger("headgate")


class BoundedCalls:
    """Makes calls in threads, a few of which are kept for the next ones.

    A call whose caller is gone goes on until it ends by itself. While too many of these hang, no other is begun.
    """

    def __init__(self) -> None:
        self._lock: Final = new_lock()
        self._idle: Final[list[SimpleQueue[Call | None]]] = []
        self._running: Final[set[SimpleQueue[Call | None]]] = set()

    def after_fork(self) -> None:
        """In a forked process: the parent's threads are not here."""
        self._idle.clear()
        self._running.clear()

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """Make a call; raises `redis.TimeoutError` if it takes longer."""
        outcome: SimpleQueue[Outcome] = SimpleQueue()
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            try:
                inbox = self._start_thread()
            except RuntimeError as error:  # the process has no room for another: rather late than not at all
                _log.warning("a call is made without a bound on its time: %s", error)
                return work()
        inbox.put((work, outcome))
        try:
            result, failure = outcome.get(timeout=seconds)
        except Empty:
            raise redis.TimeoutError("no answer in time") from None
        if failure is not None:
            raise failure
        done: T = result
        return done

    def _start_thread(self) -> SimpleQueue[Call | None]:
        inbox: SimpleQueue[Call | None] = SimpleQueue()
        try:
            with self._lock:
                if len(self._running) >= _MAX_THREADS:
                    raise redis.TimeoutError("calls that were made before still hang")
                self._running.add(inbox)
            threading.Thread(target=self._work, args=(inbox,), name="headgate-redis", daemon=True).start()
        except BaseException:  # also of a signal handler: a thread that doesn't run must not count
            self._running.discard(inbox)
            raise
        return inbox

    def _work(self, inbox: SimpleQueue[Call | None]) -> None:
        try:
            while (call := self._next(inbox)) is not None:
                work, outcome = call
                done: Outcome
                try:
                    done = work(), None
                except BaseException as error:  # noqa: BLE001 - it is the caller's
                    done = None, error
                with self._lock:
                    self._idle.append(inbox)  # first, so that the caller's next call finds it
                outcome.put(done)
                del call, work, outcome, done
        finally:
            self._running.discard(inbox)

    def _next(self, inbox: SimpleQueue[Call | None]) -> Call | None:
        """The next call; None if there is none for a while."""
        try:
            return inbox.get(timeout=_IDLE_FOR)
        except Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    return None
        try:
            return inbox.get(timeout=_IDLE_FOR)  # it was taken: a call is coming
        except Empty:  # its caller was interrupted
            return None

    def close(self) -> None:
        """Let idle threads end."""
        with self._lock:
            while self._idle:
                self._idle.pop().put(None)
