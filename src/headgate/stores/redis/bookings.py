"""What is still to be booked in a server that was away: holds that were granted without it, and settled ones."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Any, Final

from headgate.errors import HeadgateError, StoreAway, UnknownHold
from headgate.lifecycle import new_lock
from headgate.stores.redis.batching import MAX_BATCH, ThreadBatcher
from headgate.stores.redis.protocol import AskAgain, Request

MAX_BOOKINGS: Final = 10_000
"""Bookings that wait for a server. Beyond that nothing is granted without it."""

_RETRY_EVERY: Final = 1.0  # seconds: nobody else may ask the server meanwhile

_log = logging.getLogger("headgate")


class Booking:
    """A request that has to be carried out once: `make` makes it, at the time at which it is sent."""

    def __init__(self, about: Hashable, make: Callable[[], Request[Any]], *, may_be_unknown: bool = False) -> None:
        self.about: Final = about
        self.make: Final = make
        self.may_be_unknown: Final = may_be_unknown
        """Whether it cancels a hold that perhaps was never made."""


class Bookings:
    """Bookings in their order, and a thread that sends them as soon as the server is back.

    Each can be sent twice, and counts once: the server knows a hold by its id, and another request by its own.
    """

    def __init__(
        self, batcher: ThreadBatcher, execute: Callable[[Request[Any]], Any], is_away: Callable[[], bool]
    ) -> None:
        self._batcher: Final = batcher
        self._execute: Final = execute
        self._is_away: Final = is_away
        self._lock: Final = new_lock()
        self._waiting: Final[deque[Booking]] = deque()
        self._about: Final[Counter[Hashable]] = Counter()
        self._thread: threading.Thread | None = None
        self._back = threading.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def has(self, about: Hashable) -> bool:
        """Whether something about this hold waits: what comes later has to wait behind it."""
        return bool(self._waiting) and self._about[about] > 0

    def add(self, booking: Booking) -> bool:
        """Add a booking; False if there are too many."""
        with self._lock:
            if len(self._waiting) >= MAX_BOOKINGS or self._closed:
                return False
            self._waiting.append(booking)
            self._about[booking.about] += 1
        self.start()
        return True

    def start(self) -> None:
        """Send what waits, now that the server may be back: in a thread, which tries again until it is."""
        self._back.set()
        with self._lock:
            if self._thread is None and self._waiting and not self._closed:
                thread = threading.Thread(target=self._run, name="headgate-bookings", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    _log.error("holds can't be booked in the store yet: %s", error)
                else:
                    self._thread = thread

    def _run(self) -> None:
        while True:
            self._back.clear()
            sent = self.send()
            with self._lock:
                if not self._waiting or self._closed:
                    self._thread = None
                    return
            if not sent:
                self._back.wait(_RETRY_EVERY)

    def send(self) -> bool:
        """Send the next bookings, and say whether that worked."""
        some = list(islice(self._waiting, MAX_BATCH))
        requests = [booking.make() for booking in some]
        self._batcher.execute_all(requests)
        late: set[Hashable] = set()  # one about these was put off: what follows it is sent again, in its order
        done = 0
        for booking, request in zip(some, requests, strict=True):
            answer: object = request.answer
            if isinstance(answer, AskAgain) or booking.about in late:
                late.add(booking.about)
                answer = self._send_one(booking)
            if isinstance(answer, StoreAway):
                break
            if isinstance(answer, BaseException) and not (booking.may_be_unknown and isinstance(answer, UnknownHold)):
                _log.error("what was decided while the store was away can't be booked: %s", answer)
            done += 1
        with self._lock:
            for booking in some[:done]:
                self._waiting.popleft()
                self._about[booking.about] -= 1
                if self._about[booking.about] <= 0:
                    del self._about[booking.about]
        return done == len(some)

    def _send_one(self, booking: Booking) -> object:
        """Send a booking by itself; an error is its answer."""
        try:
            return self._execute(booking.make())
        except HeadgateError as error:
            return error

    def after_fork(self) -> None:
        """In a forked process: the parent sends what it has."""
        self._waiting.clear()
        self._about.clear()
        self._thread = None
        self._back = threading.Event()

    def close(self) -> None:
        """Send what is left, if the server is there."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._back.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        while self._waiting and not self._is_away() and self.send():
            pass
        if self._waiting:
            _log.error("%d holds that were decided while the store was away are not booked", len(self._waiting))
