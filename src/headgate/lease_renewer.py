"""Renews the leases of holds whose blocks are running: one thread for each store, while there are any.

What is due at the same time is renewed in one call, where a store can do that: thousands of blocks with short leases
would otherwise lose some while one after the other waits for a server.
"""

import heapq
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Final, Generic, Protocol, TypeVar
from weakref import ref

from headgate.errors import HeadgateError
from headgate.lifecycle import after_fork, new_lock
from headgate.stores.base import Store
from headgate.stores.holds import HoldAnswer, Renewal, RenewingStore

_IDLE: Final = 5.0  # seconds for which the thread waits for more to do
_AT_ONCE: Final = 32  # leases that are renewed in one call: a server does nothing else meanwhile

_log = logging.getLogger("headgate")


class Renewable(Protocol):
    """A hold, to its renewer."""

    @property
    def renewal_interval(self) -> int: ...

    def renew(self) -> bool: ...

    def renewal(self, called: int) -> Renewal | None: ...

    def renewed(self, called: int, answer: HoldAnswer | HeadgateError) -> bool: ...


class Renewed(Protocol):
    """The owner of a hold whose lease is renewed."""

    @property
    def hold(self) -> Renewable: ...


H = TypeVar("H", bound=Renewable)


class BlockLease(Generic[H]):
    """The lease of a hold whose block runs. Only the hold refers to it: `hold` is another handle of the same one."""

    __slots__ = ("__weakref__", "hold", "renewal")

    def __init__(self, hold: H) -> None:
        self.hold: Final = hold
        self.renewal: Final = WeakRenewal(self)


class WeakRenewal:
    """Renews the lease of a hold as long as anybody refers to what has it.

    So a block that never ends, since a signal's handler has raised as it was about to, keeps its slot only until the
    lease ends. Compiled classes have no weak references, so the hold is reached through one that isn't.
    """

    __slots__ = ("_renewed", "renewal_interval")

    def __init__(self, renewed: Renewed) -> None:
        self._renewed: Final = ref(renewed)
        self.renewal_interval: Final = renewed.hold.renewal_interval

    def renew(self) -> bool:
        found = self._renewed()
        return found is not None and found.hold.renew()

    def renewal(self, called: int) -> Renewal | None:
        found = self._renewed()
        return None if found is None else found.hold.renewal(called)

    def renewed(self, called: int, answer: HoldAnswer | HeadgateError) -> bool:
        found = self._renewed()
        return found is not None and found.hold.renewed(called, answer)


class LeaseRenewers:
    """The renewers of all stores in this process that have blocks running."""

    def __init__(self) -> None:
        self._lock: Final = new_lock()
        self._running: Final[dict[int, LeaseRenewer]] = {}
        after_fork(self)

    def _after_fork(self) -> None:
        """The threads and the blocks are the parent's."""
        self._running.clear()

    def add(self, store: Store, hold: Renewable) -> None:
        """Renew the lease of a hold each time that a third of it is over."""
        with self._lock:
            renewer = self._running.get(id(store))
            if renewer is None:
                renewer = LeaseRenewer(store, self.end)
                threading.Thread(target=renewer.run, name="headgate lease renewer", daemon=True).start()
                self._running[id(store)] = renewer  # once it runs: a process may have too many threads
            renewer.add(hold)

    def remove(self, store: Store, hold: Renewable) -> None:
        with self._lock:
            renewer = self._running.get(id(store))
            if renewer is not None:
                renewer.remove(hold)

    def end(self, renewer: "LeaseRenewer") -> bool:
        """Let a renewer end, if it has nothing to do."""
        with self._lock:
            if renewer.renews():
                return False
            self._running.pop(id(renewer.store), None)
            return True


class LeaseRenewer:
    """Renews the holds of one store, each until it is removed or says that this is enough."""

    def __init__(self, store: Store, end: Callable[["LeaseRenewer"], bool]) -> None:
        self.store: Final = store
        self._end: Final = end
        self._lock: Final = new_lock()
        self._holds: Final[set[Renewable]] = set()
        self._due: Final[list[tuple[int, int, Renewable]]] = []  # some were removed meanwhile
        self._numbers: Final = count()
        self._at_once: Final = _AT_ONCE if isinstance(store, RenewingStore) else 1
        self._asleep: Final = threading.Lock()
        self._asleep.acquire()

    def renews(self) -> bool:
        return bool(self._holds)

    def add(self, hold: Renewable) -> None:
        with self._lock:
            self._holds.add(hold)
            first = self._expect(hold)
        if first:
            self._wake()

    def remove(self, hold: Renewable) -> None:
        with self._lock:
            self._holds.discard(hold)
            if len(self._due) > 2 * len(self._holds) + 64:
                self._due[:] = [one for one in self._due if one[2] in self._holds]
                heapq.heapify(self._due)

    def _expect(self, hold: Renewable) -> bool:
        """Note when to renew a hold next, and return whether that is before all others."""
        mine = (self.store.clock.now() + hold.renewal_interval, next(self._numbers), hold)
        heapq.heappush(self._due, mine)
        return self._due[0] is mine

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._asleep.release()

    def run(self) -> None:
        while True:
            due, when = self._take_due()
            if due:
                for hold in self._renew(due):
                    self.remove(hold)
                with self._lock:
                    for hold in due:
                        if hold in self._holds:
                            self._expect(hold)
                continue
            seconds = _IDLE if when is None else self.store.clock.alarm(when, self._wake)
            woken = self._asleep.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX))
            if when is None and not woken and self._end(self):
                return

    def _take_due(self) -> tuple[list[Renewable], int | None]:
        """Some holds whose leases are to be renewed now, and the moment when the next one will be, if there is any."""
        due: list[Renewable] = []
        with self._lock:
            now = self.store.clock.now()
            while self._due:
                when, _, hold = self._due[0]
                if hold in self._holds and (when > now or len(due) == self._at_once):
                    return due, when
                heapq.heappop(self._due)
                if hold in self._holds:
                    due.append(hold)
            return due, None

    def _renew(self, due: list[Renewable]) -> list[Renewable]:
        """Renew some holds, and return those to renew no more."""
        try:
            if len(due) > 1 and isinstance(self.store, RenewingStore):
                return _renew_together(self.store, due)
            return [hold for hold in due if not hold.renew()]
        except Exception:  # noqa: BLE001 - of any store: the other holds still need this thread
            _log.exception("the lease of a hold can't be renewed; the next attempt is in a third of it")
            return []


def _renew_together(store: RenewingStore, due: list[Renewable]) -> list[Renewable]:
    called = store.clock.now()
    renewals = [(hold, renewal) for hold in due if (renewal := hold.renewal(called)) is not None]
    answers = store.renew([renewal for _, renewal in renewals])
    going_on = {hold for (hold, _), answer in zip(renewals, answers, strict=True) if hold.renewed(called, answer)}
    return [hold for hold in due if hold not in going_on]


RENEWERS: Final = LeaseRenewers()
