"""The keys of the decision service that each agent counts, bounded."""

from collections import OrderedDict
from typing import Final

from headgate.hub.errors import RequestError
from headgate.limits.clock import Clock

MAX_COUNTERS: Final = 1_000_000
"""Keys of all agents; then no agent may have more than an equal share."""
_PRUNE_EVERY: Final = 100  # new keys until the expired ones of another agent are dropped


class CounterShares:
    """The keys that each agent counts at present: at most `most`, so that none takes all the store's room.

    The admin's are not bounded.
    """

    def __init__(self, clock: Clock, most: int, default_window_ms: int) -> None:
        self._clock, self._most, self._default_window_ms = clock, most, default_window_ms
        self._ends: Final[OrderedDict[str, dict[str, int]]] = OrderedDict()  # when each key expires
        self._total = 0
        self._until_prune = _PRUNE_EVERY

    def reserve(self, agent: str, key: str, window_ms: int | None) -> None:
        """Count a key of an agent, or refuse a new one where the agent has too many."""
        if not agent:
            return
        now = self._clock.now()
        if key not in self._ends.get(agent, ()):
            self._make_room(agent, now)
            self._total += 1
        window = self._default_window_ms if window_ms is None else window_ms
        own = self._ends.setdefault(agent, {})
        own[key] = max(own.get(key, 0), now + window * 1000)

    def release(self, agent: str, key: str) -> None:
        """A key was reset."""
        if self._ends.get(agent, {}).pop(key, None) is not None:
            self._total -= 1

    def _make_room(self, agent: str, now: int) -> None:
        self._until_prune -= 1
        if self._until_prune <= 0 or self._total >= MAX_COUNTERS:
            self._until_prune = _PRUNE_EVERY
            self._prune(next(iter(self._ends)), now)
        most = self._most
        if self._total >= MAX_COUNTERS:
            most = min(most, MAX_COUNTERS // len(self._ends))
        if len(self._ends.get(agent, ())) >= most:
            self._prune(agent, now)
        if len(self._ends.get(agent, ())) >= most:
            detail = f"expected at most {most} keys in use at a time, got another; wait, or reset one"
            raise RequestError(409, "too_many_counters", detail)

    def _prune(self, agent: str, now: int) -> None:
        """Drop an agent's expired keys, and let it be the last to be pruned again."""
        own = self._ends.pop(agent)
        left = {key: end for key, end in own.items() if end > now}
        self._total -= len(own) - len(left)
        if left:
            self._ends[agent] = left
