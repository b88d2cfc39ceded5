"""Denials of agents: actions, counts, addresses, and the last denials of each."""

import time
from collections import OrderedDict, deque
from typing import Final, NamedTuple

from msgspec import Struct

from headgate.http import wait_ms
from headgate.hub.monitoring.recent_counts import RecentCounts, renew
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision

MAX_AGENTS: Final = 2000
"""Agents that are remembered: those that were denied last."""
MAX_ACTIONS: Final = 16
"""Actions of an agent that are counted by name; further ones are counted as `OTHER`."""
MAX_DENIALS: Final = 10
"""Denials of an agent that are kept."""
OTHER: Final = "other"

_LONGEST: Final = 64  # characters of an action that are kept: those of agents are shorter


class DeniedAction(Struct, frozen=True):
    """How often an agent was denied an action."""

    channel: str
    action: str
    tier: str
    last_minute: int
    last_hour: int


class DenialRecord(Struct, frozen=True):
    """One denial."""

    at: float
    """In seconds since 1970."""
    channel: str
    action: str
    tier: str
    address: str
    """Where it came from; "" if that is unknown."""
    retry_after_ms: int
    """The wait that was advised, in whole seconds as in the frames."""


class _Action(NamedTuple):
    channel: str
    action: str
    tier: str


_OTHER: Final = _Action("", OTHER, "")


class _AgentDenials:
    """The denials of one agent."""

    __slots__ = ("actions", "denied_by_account", "last", "total")

    def __init__(self, now: int) -> None:
        self.denied_by_account: int | None = None
        """When an account above it denied its last hold."""
        self.total = RecentCounts(now)
        self.actions: dict[_Action, RecentCounts] = {}
        self.last: deque[tuple[float, _Action, str, int]] = deque(maxlen=MAX_DENIALS)

    def add(self, now: int, action: _Action, address: str, retry_after_ms: int) -> None:
        counts = self.actions.get(action)
        if counts is None:
            counts = self._new(now, action)
        counts.add(now)
        self.total.add(now)
        self.last.append((time.time(), action, address, retry_after_ms))

    def _new(self, now: int, action: _Action) -> RecentCounts:
        if len(self.actions) >= MAX_ACTIONS:
            for old in [one for one, counts in self.actions.items() if not counts.last_hour(now)]:
                del self.actions[old]
        if len(self.actions) >= MAX_ACTIONS:
            action = _OTHER
        return self.actions.setdefault(action, RecentCounts(now))


class DenialLog:
    """The denials of agents in the last hour, in bounded memory.

    The 2,000 agents that were denied last are remembered, each with 16 actions, the sum of all others, and its last ten
    denials. That is at most 24,000 bytes for an agent and 48 MB for all of them; with the short names of the hub's own
    actions, a little more than half of that. A denial takes the same short time, however many there were; a request
    that passes costs nothing.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._agents: Final[OrderedDict[str, _AgentDenials]] = OrderedDict()

    def add(self, agent: str, channel: str, action: str, tier: str, address: str, decision: Decision) -> None:
        """Count a denial. `action` is "" where only a tier was asked for."""
        now = self._clock.now()
        found = renew(self._agents, agent, MAX_AGENTS, _AgentDenials, now)
        found.add(now, _Action(channel, action[:_LONGEST], tier), address, wait_ms(decision))

    def hold_decided(self, agent: str, *, denied_by_account: bool) -> None:
        """Remember whether an account above an agent has denied its last hold. Its denial was added before."""
        found = self._agents.get(agent)
        if found is not None:
            found.denied_by_account = self._clock.now() if denied_by_account else None

    def is_denied_by_account(self, agent: str, within: int) -> bool:
        """Whether an account above an agent has denied its last hold, and that within so many microseconds."""
        found = self._agents.get(agent)
        denied = None if found is None else found.denied_by_account
        return denied is not None and self._clock.now() - denied < within

    def per_minute(self, agent: str) -> int:
        """The number of an agent's denials in the last minute."""
        found = self._agents.get(agent)
        return 0 if found is None else found.total.last_minute(self._clock.now())

    def last_minute(self) -> dict[str, int]:
        """The agents with denials in the last minute, and how many."""
        now = self._clock.now()
        found = {agent: denials.total.last_minute(now) for agent, denials in self._agents.items()}
        return {agent: count for agent, count in found.items() if count}

    def actions(self, agent: str) -> list[DeniedAction]:
        """The actions that an agent was denied in the last hour, most frequent first."""
        now, found = self._clock.now(), self._agents.get(agent)
        if found is None:
            return []
        counted = [
            DeniedAction(*one, counts.last_minute(now), counts.last_hour(now)) for one, counts in found.actions.items()
        ]
        recent = [one for one in counted if one.last_hour]
        return sorted(recent, key=lambda one: (-one.last_hour, -one.last_minute, one.channel, one.action))

    def last(self, agent: str) -> list[DenialRecord]:
        """An agent's last denials, newest first, however long ago."""
        found = self._agents.get(agent)
        if found is None:
            return []
        return [DenialRecord(at, *action, address, wait) for at, action, address, wait in reversed(found.last)]

    def address(self, agent: str) -> str:
        """Where the last denied request of an agent came from, of which that is known; "" if of none."""
        found = self._agents.get(agent)
        known = [address for _, _, address, _ in found.last if address] if found is not None else []
        return known[-1] if known else ""
