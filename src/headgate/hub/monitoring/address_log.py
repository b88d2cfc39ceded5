"""Denials by address: in the log, with a bound on its lines, and counted for operators."""

import time
from collections import OrderedDict
from typing import Final

import structlog
from msgspec import Struct

from headgate.events import AddressChecked, Event
from headgate.gate import Gate
from headgate.hub.monitoring.recent_counts import RecentCounts, renew
from headgate.limits.clock import Clock

INTERVAL: Final = 60_000_000
"""Microseconds between two lines about the same address and purpose."""
MAX_LINES: Final = 100
"""Lines within an interval; further addresses are only counted."""
MAX_ADDRESSES: Final = 1000
"""Addresses whose denials are counted, each for one purpose: those that were denied last. About 800 bytes each."""

_log = structlog.get_logger("headgate.hub")


class DeniedAddress(Struct, frozen=True):
    """An address that was denied within the last hour. IPv6 addresses count by /64."""

    address: str
    purpose: str
    """The purpose of its allowance: connection, request, registration or authentication."""
    denials: int
    """In the last hour."""
    last_at: float
    """When it was denied last, in seconds since 1970."""


class _Denials:
    """The denials of one address for one purpose."""

    __slots__ = ("counts", "last_at")

    def __init__(self, now: int) -> None:
        self.counts = RecentCounts(now)
        self.last_at = 0.0


class AddressLog:
    """Logs which addresses are denied, each once a minute and a hundred of them, and counts all denials by address."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._clock: Final = clock
        self._total: Final = RecentCounts(clock.now())
        self._denied: Final[OrderedDict[tuple[str, str], _Denials]] = OrderedDict()
        self._began = 0
        self._repeated: Final[dict[tuple[str, str], int]] = {}  # denials since the line about an address
        self._unlogged = 0  # denials of further addresses
        self._unsubscribe: Final = gate.subscribe(self._on_event, AddressChecked)

    def stop(self) -> None:
        """Log no more denials; sum up those that were not logged."""
        self._unsubscribe()
        self._start_interval()

    @property
    def denials(self) -> int:
        """The number of denials by address in the last hour."""
        return self._total.last_hour(self._clock.now())

    def denied(self) -> list[DeniedAddress]:
        """The addresses that were denied in the last hour, worst first."""
        now = self._clock.now()
        found = []
        for (address, purpose), one in list(self._denied.items()):
            if denials := one.counts.last_hour(now):
                found.append(DeniedAddress(address, purpose, denials, one.last_at))
            else:
                del self._denied[address, purpose]
        return sorted(found, key=lambda one: (-one.denials, one.address, one.purpose))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, AddressChecked) and not event.decision:
            denied = (event.address, event.purpose)
            self._count(denied)
            self._write(denied)

    def _count(self, denied: tuple[str, str]) -> None:
        now = self._clock.now()
        self._total.add(now)
        found = renew(self._denied, denied, MAX_ADDRESSES, _Denials, now)
        found.counts.add(now)
        found.last_at = time.time()

    def _write(self, denied: tuple[str, str]) -> None:
        if self._clock.now() - self._began >= INTERVAL:
            self._start_interval()
        if denied in self._repeated:
            self._repeated[denied] += 1
        elif len(self._repeated) < MAX_LINES:
            self._repeated[denied] = 0
            address, purpose = denied
            _log.warning("address denied", address=address, purpose=purpose)
        else:
            self._unlogged += 1

    def _start_interval(self) -> None:
        """Sum up the last interval, in one line."""
        more = sum(self._repeated.values()) + self._unlogged
        if more:
            _log.warning("addresses denied again", denials=more, of_further_addresses=self._unlogged)
        self._began = self._clock.now()
        self._repeated.clear()
        self._unlogged = 0
