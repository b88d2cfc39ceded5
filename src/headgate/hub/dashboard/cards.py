"""The state of agents and of the fleet, as operators see it: in the API, on the dashboard and in the terminal."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from typing import Final

from msgspec import Struct

from headgate.errors import InvalidInput
from headgate.gate import Gate
from headgate.hub.agents.presence import Presence
from headgate.hub.monitoring.alerts import Alert, Alerts
from headgate.hub.monitoring.health import Health, StoreState
from headgate.hub.monitoring.stats import AGENT_SLOTS, FLEET_SLOTS, SLOT, Offender, Stats

_BATCH: Final = 25  # cards that are made before other tasks have their turn
_MINUTE: Final = 60 // SLOT


class Usage(Struct):
    """The use of one bucket."""

    channel: str
    tier: str
    used: float
    """The used share of the capacity, 0 to 1."""
    remaining: int
    capacity: int


class AgentCard(Struct):
    """The state of one agent."""

    agent_id: str
    connected: bool
    usage: Usage | None
    """Of the bucket nearest to its limit."""
    violations: int
    """Consecutive violations, while they count."""
    violations_last_hour: int
    wait_left_ms: int
    rate_limited: bool
    exempt: bool
    override: bool


class Summary(Struct):
    """The state of the fleet."""

    violations_last_hour: int
    worst_offenders: list[Offender]
    exempt: int
    checks: int
    denied: int
    checks_per_second: float
    """Over the last five to ten seconds."""
    denied_share: float
    """Of the checks of the last minute."""
    store: StoreState
    degraded: bool
    problems: list[str]
    """What is wrong with the store or the disk, in sentences."""


class DashboardState(Struct):
    """The state that a dashboard shows."""

    summary: Summary
    agents: list[AgentCard]
    alerts: list[Alert]


class Cards:
    """Makes cards and summaries, from what the gate, the stats and the sockets say now."""

    def __init__(self, gate: Gate, stats: Stats, presence: Presence, alerts: Alerts, health: Health) -> None:
        self._gate, self._stats, self._presence, self._alerts, self._health = gate, stats, presence, alerts, health
        self._making_state: Final = asyncio.Lock()

    def shown(self) -> list[str]:
        """The agents to show, the most interesting first.

        They are connected, had violations within the hour, made a request within the last minutes, or have an override
        or an exemption.
        """
        stats, effective = self._stats, self._gate.effective
        offenders = {one.agent_id: one.violations for one in stats.offenders()}
        active = set(stats.active(stats.slot - AGENT_SLOTS + 1))
        agents = {*self._presence.agents(), *offenders, *active, *effective.overrides, *effective.exempt}
        return sorted(agents, key=lambda agent: (-offenders.get(agent, 0), agent not in active, agent))

    async def of(self, agents: Sequence[str]) -> list[AgentCard]:
        """The cards of some agents."""
        last_hour = {one.agent_id: one.violations for one in self._stats.offenders()}
        found: list[AgentCard] = []
        for start in range(0, len(agents), _BATCH):
            some = agents[start : start + _BATCH]
            found += await asyncio.gather(*(self._card(agent, last_hour.get(agent, 0)) for agent in some))
            await asyncio.sleep(0)  # in memory nothing waits, and many cards take long
        return found

    async def _card(self, agent: str, last_hour: int) -> AgentCard:
        gate = self._gate
        standing = await gate.astanding(agent)
        exempt = gate.is_exempt(agent)
        return AgentCard(
            agent_id=agent,
            connected=self._presence.is_connected(agent),
            usage=None if exempt else await self._usage(agent),
            violations=standing.violations,
            violations_last_hour=last_hour,
            wait_left_ms=ceil(standing.wait_left * 1000),
            rate_limited=bool(standing) and not exempt,
            exempt=exempt,
            override=agent in gate.effective.overrides,
        )

    async def _usage(self, agent: str) -> Usage | None:
        """The use of the bucket nearest to its limit."""
        nearest: Usage | None = None
        for channel, tier in self._gate.policy.limits:
            with suppress(InvalidInput):  # a reload has removed it since
                decision = await self._gate.apeek(agent, channel, tier)
                capacity = decision.limit.capacity
                used = 1 - decision.remaining / capacity if capacity else 1.0
                if nearest is None or used > nearest.used:
                    nearest = Usage(channel, tier, round(used, 4), decision.remaining, capacity)
        return nearest

    def summary(self) -> Summary:
        """The state of the fleet."""
        stats, health = self._stats, self._health
        offenders, outcomes = stats.offenders(), stats.outcomes()
        rate, share = _traffic(stats)
        return Summary(
            violations_last_hour=sum(one.violations for one in offenders),
            worst_offenders=offenders[:3],
            exempt=len(self._gate.effective.exempt),
            checks=sum(outcomes.values()),
            denied=outcomes["deny"],
            checks_per_second=round(rate, 1),
            denied_share=round(share, 4),
            store=health.store,
            degraded=health.degraded,
            problems=health.problems,
        )

    async def state(self, limit: int) -> DashboardState:
        """The state that a dashboard shows, with at most `limit` cards."""
        async with self._making_state:  # one at a time, since anyone may ask for a public one
            return DashboardState(self.summary(), await self.of(self.shown()[:limit]), self._alerts.recent())


def _traffic(stats: Stats) -> tuple[float, float]:
    """Checks per second, and the share that is denied."""
    slot, fleet = stats.slot, stats.fleet
    newest = sum(fleet.at(slot)) + sum(fleet.at(slot - 1))
    minute = [fleet.at(old) for old in range(slot - _MINUTE, slot + 1)]
    checks = sum(map(sum, minute))
    return newest / (SLOT + stats.into_slot), sum(denied for _, _, denied in minute) / max(checks, 1)


def timeline(stats: Stats, since: int) -> list[list[int]]:
    """The fleet's traffic from a slot on: each slot, with its numbers of allowed, warned and denied requests."""
    slot = stats.slot
    return [[old, *stats.fleet.at(old)] for old in range(max(since, slot - FLEET_SLOTS + 1), slot + 1)]


def spark(stats: Stats, agent: str, since: int) -> list[list[int]]:
    """An agent's traffic from a slot on: each slot that had any, with its numbers of passed and denied requests."""
    traffic, slot = stats.traffic(agent), stats.slot
    if traffic is None:
        return []
    points = [(old, traffic.at(old)) for old in range(max(since, slot - AGENT_SLOTS + 1), traffic.slot + 1)]
    return [[old, allowed + warned, denied] for old, (allowed, warned, denied) in points if allowed or warned or denied]
