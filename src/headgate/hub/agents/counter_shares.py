"""The keys of the decision service that each agent counts, bounded."""

from typing import Final

from headgate.hub.errors import RequestError
from headgate.limits.clock import Clock

MAX_COUNTERS: Final = 1_000_000
"""Keys of all agents; then no agent may have more than an equal share."""
_PRUNE_EVERY: Final = 100  # new keys until all expired ones are dropped
_NEVER: Final = 2**63


class _Share:
    """The keys of one agent."""

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}  # when each key expires
        self.earliest = _NEVER  # no key expires before

    def prune(self, now: int) -> int:
        """Drop the expired keys; how many there were."""
        if now < self.earliest:
            return 0
        before = len(self.ends)
        self.ends = {key: end for key, end in self.ends.items() if end > now}
        self.earliest = min(self.ends.values(), default=_NEVER)
        return before - len(self.ends)


class CounterShares:
    """The keys that each agent counts at present: at most `most`, so that none takes all the store's room.

    The admin's are not bounded.
    """

    def __init__(self, clock: Clock, most: int, default_window_ms: int) -> None:
        self._clock, self._most, self._default_window_ms = clock, most, default_window_ms
        self._shares: Final[dict[str, _Share]] = {}
        self._total = 0
        self._until_prune = _PRUNE_EVERY

    def reserve(self, agent: str, key: str, window_ms: int | None) -> None:
        """Count a key of an agent, or refuse a new one where the agent has too many."""
        if not agent:
            return
        now, share = self._clock.now(), self._shares.get(agent)
        if share is None or key not in share.ends:
            self._make_room(agent, now)
            share = self._shares.setdefault(agent, _Share())
            self._total += 1
        end = now + (self._default_window_ms if window_ms is None else window_ms) * 1000
        share.ends[key] = max(share.ends.get(key, 0), end)
        share.earliest = min(share.earliest, end)

    def release(self, agent: str, key: str) -> None:
        """A key was reset."""
        share = self._shares.get(agent)
        if share is not None and share.ends.pop(key, None) is not None:
            self._total -= 1

    def _make_room(self, agent: str, now: int) -> None:
        self._until_prune -= 1
        if self._until_prune <= 0 or self._total >= MAX_COUNTERS:
            self._until_prune = _PRUNE_EVERY
            self._prune(now)
        share = self._shares.get(agent)
        if share is None:
            return
        most = self._most
        if self._total >= MAX_COUNTERS:
            most = min(most, MAX_COUNTERS // len(self._shares))
        if len(share.ends) >= most:
            self._total -= share.prune(now)
        if len(share.ends) >= most:
            detail = f"expected at most {most} keys in use at a time, got another; wait, or reset one"
            raise RequestError(409, "too_many_counters", detail)

    def _prune(self, now: int) -> None:
        """Drop the expired keys of all agents. A share without any costs one comparison."""
        for agent in [agent for agent, share in self._shares.items() if share.earliest <= now]:
            self._total -= self._shares[agent].prune(now)
            if not self._shares[agent].ends:
                del self._shares[agent]
