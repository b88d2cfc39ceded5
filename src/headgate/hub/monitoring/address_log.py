"""A log of the denials by address, with a bound on its lines."""

from typing import Final

import structlog

from headgate.events import AddressChecked, Event
from headgate.gate import Gate
from headgate.limits.clock import Clock

INTERVAL: Final = 60_000_000
"""Microseconds between two lines about the same address and purpose."""
MAX_LINES: Final = 100
"""Lines within an interval; further addresses are only counted."""

_log = structlog.get_logger("headgate.hub")


class AddressLog:
    """Logs which addresses are denied: each once a minute, and a hundred of them."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._clock: Final = clock
        self._began = 0
        self._denials: Final[dict[tuple[str, str], int]] = {}
        self._unlogged = 0  # denials of further addresses
        self._unsubscribe: Final = gate.subscribe(self._on_event, AddressChecked)

    def stop(self) -> None:
        """Log no more denials; sum up those that were not logged."""
        self._unsubscribe()
        self._start_interval()

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, AddressChecked) or event.decision:
            return
        if self._clock.now() - self._began >= INTERVAL:
            self._start_interval()
        denied = (event.address, event.purpose)
        if denied in self._denials:
            self._denials[denied] += 1
        elif len(self._denials) < MAX_LINES:
            self._denials[denied] = 0
            _log.warning("address denied", address=event.address, purpose=event.purpose)
        else:
            self._unlogged += 1

    def _start_interval(self) -> None:
        """Sum up the last interval, in one line."""
        more = sum(self._denials.values()) + self._unlogged
        if more:
            _log.warning("addresses denied again", denials=more, of_further_addresses=self._unlogged)
        self._began = self._clock.now()
        self._denials.clear()
        self._unlogged = 0
