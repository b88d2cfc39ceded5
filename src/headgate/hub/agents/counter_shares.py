"""The keys of the decision service that each agent counts, bounded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headgate.hub.errors import RequestError
from headgate.limits.clock import Clock

MAX_COUNTERS: Final = 1_000_000
"""Keys of all agents; then no agent may have more than an equal share."""
_PRUNE_EVERY: Final = 100  # new keys until all expired ones are dropped
_MARGIN: Final = 1_000_000  # microseconds by which a key in the store may outlive its window by this hub's clock
_NEVER: Final = 2**63


class _Key:
    """A key, reserved for as long as the store keeps it: each request renews it for its longest window."""

    __slots__ = ("began", "end", "ended", "longest")

    def __init__(self) -> None:
        self.longest = 0  # window, in microseconds
        self.end = 0
        self.began = self.ended = 0  # checks

    def expired(self, now: int) -> bool:
        return self.end <= now and self.began == self.ended

    def renew(self, now: int) -> int:
        """Reserve it from now on; until when."""
        self.end = max(self.end, now + self.longest + _MARGIN)
        return self.end


class _Share:
    """The keys of one agent."""

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}
        self.earliest = _NEVER  # no key expires before

    def prune(self, now: int) -> int:
        """Drop the expired keys; how many there were."""
        if now < self.earliest:
            return 0
        before = len(self.keys)
        self.keys = {name: key for name, key in self.keys.items() if not key.expired(now)}
        self.earliest = min((key.end for key in self.keys.values()), default=_NEVER)
        return before - len(self.keys)


class CounterShares:
    """The keys that each agent counts at present: at most `most`, so that none takes all the store's room.

    Each hub counts the checks that it has made since its start. The admin's keys are not bounded.
    """

    def __init__(self, clock: Clock, most: int, default_window_ms: int) -> None:
        self._clock, self._most, self._default_window_ms = clock, most, default_window_ms
        self._shares: Final[dict[str, _Share]] = {}
        self._total = 0
        self._until_prune = _PRUNE_EVERY

    @contextmanager
    def reserve(self, agent: str, name: str, window_ms: int | None) -> Iterator[None]:
        """Reserve a key of an agent before it is checked, or refuse a new one where the agent has too many."""
        if not agent:
            yield
            return
        now, share = self._clock.now(), self._shares.get(agent)
        if share is None or name not in share.keys:
            self._make_room(agent, now)
            share = self._shares.setdefault(agent, _Share())
            share.keys[name] = _Key()
            self._total += 1
        key = share.keys[name]
        window = (self._default_window_ms if window_ms is None else window_ms) * 1000
        key.longest = window if key.expired(now) else max(key.longest, window)
        key.began += 1
        share.earliest = min(share.earliest, key.renew(now))
        try:
            yield
        finally:
            key.ended += 1
            key.renew(self._clock.now())  # the store may have counted it just now

    @contextmanager
    def release(self, agent: str, name: str) -> Iterator[None]:
        """Release a key after it was reset, unless it was checked at the same time: it may be counted after that."""
        key = self._find(agent, name)
        ended = 0 if key is None else key.ended
        yield
        if key is not None and key is self._find(agent, name) and key.began == ended:
            del self._shares[agent].keys[name]
            self._total -= 1

    def clear(self) -> None:
        """Release all keys: the store has lost them."""
        self._shares.clear()
        self._total = 0

    def _find(self, agent: str, name: str) -> _Key | None:
        share = self._shares.get(agent)
        return None if share is None else share.keys.get(name)

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
        if len(share.keys) >= most:
            self._total -= share.prune(now)
        if len(share.keys) >= most:
            detail = f"expected at most {most} keys in use at a time, got another; wait, or reset one"
            raise RequestError(409, "too_many_counters", detail)

    def _prune(self, now: int) -> None:
        """Drop the expired keys of all agents. A share without any costs one comparison."""
        for agent in [agent for agent, share in self._shares.items() if share.earliest <= now]:
            self._total -= self._shares[agent].prune(now)
            if not self._shares[agent].keys:
                del self._shares[agent]
