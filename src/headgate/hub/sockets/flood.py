"""Flood control for one connection: invalid frames, and runs of denials."""

from collections import deque
from typing import Final

from headgate.edges.flood import FLOOD, pause
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision

MAX_INVALID: Final = 10
"""Invalid frames within `INVALID_WINDOW`; then the connection is closed."""
INVALID_WINDOW: Final = 60_000_000  # microseconds


class FloodCounter:
    """The number of flooding connections. They share the time that the hub spends on denying them."""

    def __init__(self) -> None:
        self.connections = 0


class FloodControl:
    """Watches one connection."""

    def __init__(self, clock: Clock, counter: FloodCounter) -> None:
        self._clock, self._counter = clock, counter
        self._invalid: Final[deque[int]] = deque(maxlen=MAX_INVALID)  # when they came
        self._denials = 0  # minus the frames that passed

    def invalid(self) -> bool:
        """Count an invalid frame; whether there were too many."""
        now = self._clock.now()
        self._invalid.append(now)
        return len(self._invalid) == MAX_INVALID and now - self._invalid[0] < INVALID_WINDOW

    def denied(self, decision: Decision) -> float:
        """Count a denial; the seconds to wait before reading on."""
        self._count(1)
        return pause(self._counter.connections, decision) if self._denials >= FLOOD else 0.0

    def passed(self) -> None:
        """Count a frame that passed."""
        if self._denials:
            self._count(-1)

    def disconnected(self) -> None:
        """The connection has ended."""
        self._count(-self._denials)

    def _count(self, denials: int) -> None:
        before = self._denials
        self._denials = min(max(before + denials, 0), 2 * FLOOD)
        self._counter.connections += (self._denials >= FLOOD) - (before >= FLOOD)
