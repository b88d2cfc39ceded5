"""How a connection behaves: what it sends that can't be used, and whether it floods."""

from collections import deque
from typing import Final

from headgate.edges.flood import FLOOD, pause
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision

MISTAKES: Final = 10
MISTAKES_WITHIN: Final = 60_000_000  # microseconds in which so many are too many


class Flood:
    """The connections that flood. They share what the hub spends on denying them."""

    def __init__(self) -> None:
        self.connections = 0


class Manners:
    """Keeps account of one connection."""

    def __init__(self, clock: Clock, flood: Flood) -> None:
        self._clock, self._flood = clock, flood
        self._mistakes: Final[deque[int]] = deque(maxlen=MISTAKES)
        self._denials = 0  # more than what passed

    def mistaken(self) -> bool:
        """It has sent something that can't be used; whether that was once too often."""
        now = self._clock.now()
        self._mistakes.append(now)
        return len(self._mistakes) == MISTAKES and now - self._mistakes[0] < MISTAKES_WITHIN

    def denied(self, decision: Decision) -> float:
        """It was denied; how many seconds to wait before more is read from it."""
        self._count(1)
        return pause(self._flood.connections, decision) if self._denials >= FLOOD else 0.0

    def passed(self) -> None:
        """Something of it has passed."""
        if self._denials:
            self._count(-1)

    def gone(self) -> None:
        """The connection has ended."""
        self._count(-self._denials)

    def _count(self, denials: int) -> None:
        before = self._denials
        self._denials = min(max(before + denials, 0), 2 * FLOOD)
        self._flood.connections += (self._denials >= FLOOD) - (before >= FLOOD)
