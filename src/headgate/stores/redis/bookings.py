"""Bookings for a server that was away: holds that were granted or settled without it."""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Any, Final

from headgate.errors import HeadgateError, HoldError, StoreAway, UnknownHold
from headgate.lifecycle import new_lock
from headgate.stores.holds import CANCELLED, SETTLED, HoldAnswer
from headgate.stores.redis.ask_again import AskAgain
from headgate.stores.redis.background_thread import BackgroundThread
from headgate.stores.redis.batching import MAX_BATCH
from headgate.stores.redis.executor import RequestExecutor
from headgate.stores.redis.protocol import Request

MAX_BOOKINGS: Final = 10_000
"""Bookings that wait for a server. Beyond that nothing is granted without it."""

_RETRY_EVERY: Final = 1.0  # seconds: nobody else may ask the server meanwhile

_log = logging.getLogger("headgate")


class Booking:
    """A request that has to be carried out once: `make` makes it, at the time at which it is sent."""

    def __init__(
        self,
        about: Hashable,
        make: Callable[[], Request[Any]],
        answer: HoldAnswer | None = None,
        *,
        until: int = 0,
        renews: bool = False,
        may_be_unknown: bool = False,
    ) -> None:
        self.about: Final = about
        """The hold, or None."""
        self.make = make
        self.answer: Final = answer
        """The answer about the hold."""
        self.until = until
        """When the lease of the hold is to end; 0 if that doesn't change."""
        self.renews: Final = renews
        """Whether it does nothing but renew the lease."""
        self.may_be_unknown: Final = may_be_unknown
        """Whether it cancels a hold that perhaps was never made."""
        self.sent = False
        """Whether it was sent before, and not answered: it may be done, and what follows it too."""

    @property
    def grants(self) -> bool:
        """Whether it makes the hold."""
        return self.until > 0 and not self.renews


class Bookings:
    """Bookings in their order, and a thread that sends them as soon as the server is back.

    Each can be sent twice, and counts once: the server knows a hold by its id, and another request by its own.
    """

    def __init__(self, executor: RequestExecutor, is_away: Callable[[], bool], *, closed: bool) -> None:
        """One that is `closed` takes none: no client sends them."""
        self._executor: Final = executor
        self._is_away: Final = is_away
        self._lock: Final = new_lock()
        self._waiting: Final[deque[Booking]] = deque()
        self._about: Final[dict[Hashable, list[Booking]]] = {}
        self._thread: Final = BackgroundThread(
            "headgate-bookings",
            "holds of an outage",
            self._send,
            lambda: bool(self._waiting),
            delay=0.0,
            pause=_RETRY_EVERY,
        )
        self._closed = closed

    def __len__(self) -> int:
        return len(self._waiting)

    def about(self, hold: Hashable) -> Sequence[Booking]:
        """The waiting bookings of a hold: later ones have to wait behind them."""
        return tuple(self._about.get(hold, ()))

    def add(self, booking: Booking) -> bool:
        """Add a booking; False if there are too many."""
        with self._lock:
            if self._closed:
                return False
            if not self._join(booking):
                if len(self._waiting) >= MAX_BOOKINGS:
                    return False
                self._waiting.append(booking)
                self._about.setdefault(booking.about, []).append(booking)
        self.start()
        return True

    def _join(self, booking: Booking) -> bool:
        """Let a renewal take the place of one that waits last: of many only the one that ends last matters."""
        last = self._about.get(booking.about, [booking])[-1]
        if last is booking or not (booking.renews and last.renews):
            return False
        if booking.until > last.until:
            last.make, last.until = booking.make, booking.until
        return True

    def start(self) -> None:
        """Send what waits, now that the server may be back: in a thread, which tries again until it is."""
        self._thread.wake()
        self._thread.start()

    def _send(self) -> float:
        return 0.0 if self.send() else _RETRY_EVERY

    def send(self) -> bool:
        """Send the next bookings, and say whether that worked."""
        some = list(islice(self._waiting, MAX_BATCH))
        makers = [booking.make for booking in some]
        requests = [make() for make in makers]
        self._executor.thread_batcher.execute_all(requests)
        late: set[Hashable] = set()  # one about these was put off: what follows it is sent again, in its order
        done = 0
        for booking, request in zip(some, requests, strict=True):
            answer: object = request.answer
            if isinstance(answer, AskAgain) or booking.about in late:
                late.add(booking.about)
                answer = self._send_one(booking)
            if isinstance(answer, StoreAway):
                break
            if booking.renews and isinstance(answer, HoldError):
                _log.warning("a lease ended, or was ended, before it could be renewed in the store: %s", answer)
            elif isinstance(answer, BaseException) and not self._is_expected(booking, answer):
                _log.error("a decision made while the store was away can't be booked: %s", answer)
            done += 1
        for booking in some[done:]:
            booking.sent = True
        with self._lock:
            for booking, make in zip(some[:done], makers, strict=False):
                renewed = booking.make is not make  # meanwhile
                if renewed and self._about[booking.about][-1] is not booking:
                    break  # it is sent again, before what came after it
                self._waiting.popleft()
                if renewed:
                    self._waiting.append(booking)
                else:
                    self._drop(booking)
        return done == len(some)

    def _is_expected(self, booking: Booking, error: BaseException) -> bool:
        """Whether an error says no more than that there never was a hold to cancel, or that all was done before."""
        if booking.may_be_unknown and isinstance(error, UnknownHold):
            return True
        followed = booking.sent and self._about[booking.about][-1] is not booking
        return followed and isinstance(error, HoldError) and (booking.grants or error.state in {SETTLED, CANCELLED})

    def _drop(self, booking: Booking) -> None:
        others = self._about[booking.about]
        others.remove(booking)
        if not others:
            del self._about[booking.about]

    def _send_one(self, booking: Booking) -> object:
        """Send a booking by itself; an error is its answer."""
        try:
            return self._executor.execute(booking.make())
        except HeadgateError as error:
            return error

    def after_fork(self) -> None:
        """In a forked process: the parent sends what it has."""
        self._waiting.clear()
        self._about.clear()
        self._thread.after_fork()

    def close(self) -> None:
        """Send what is left, if the server is there."""
        with self._lock:
            self._closed = True
        self._thread.close()
        while self._waiting and not self._is_away() and self.send():
            pass
        if self._waiting:
            _log.error("%d holds that were decided while the store was away are not booked", len(self._waiting))
