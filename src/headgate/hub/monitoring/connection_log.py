"""A log of the agents that connect, with a bound on its lines."""

from collections import Counter
from typing import Final

import structlog

from headgate.limits.clock import Clock

INTERVAL: Final = 60_000_000
"""Microseconds after which an agent's connections are logged again."""
MAX_LOGGED: Final = 20
"""Connections of one agent that are logged within an interval."""

_log = structlog.get_logger("headgate.hub")


class ConnectionLog:
    """Logs who connects: an agent may do so as often as it likes, so only a number of its connections is logged."""

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._began = clock.now()
        self._connects: Final[Counter[str]] = Counter()

    def connected(self, agent: str, address: str) -> bool:
        """Whether it was logged: then its end is to be logged, too."""
        if self._clock.now() - self._began >= INTERVAL:
            self._began = self._clock.now()
            self._connects.clear()
        self._connects[agent] += 1
        if self._connects[agent] <= MAX_LOGGED:
            _log.info("agent connected", agent=agent, address=address)
            return True
        if self._connects[agent] == MAX_LOGGED + 1:
            _log.warning("agent connects again and again; further connections are not logged", agent=agent)
        return False

    def disconnected(self, agent: str) -> None:
        _log.info("agent disconnected", agent=agent)
