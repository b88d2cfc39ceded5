"""How agents and the fleet stand, as operators see it: in the API, on the dashboard and in the terminal."""

import asyncio
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from headgate.gate import Gate
from headgate.gate.policy import TIERS
from headgate.hub.monitoring.alerts import Alert
from headgate.hub.monitoring.stats import AGENT_SLOTS, FLEET_SLOTS, SLOT, Offender, Tally
from headgate.stores.base import ServerStore

if TYPE_CHECKING:
    from headgate.hub.app import Hub

_AT_ONCE: Final = 50  # cards that are made before others have their turn
_MINUTE: Final = 60 // SLOT


class Usage(Struct):
    """How full the bucket is that is nearest to its limit."""

    channel: str
    tier: str
    used: float
    """The share that is used, 0 to 1."""
    remaining: int
    capacity: int


class AgentCard(Struct):
    """How an agent stands."""

    agent_id: str
    connected: bool
    usage: Usage | None
    violations: int
    """In a row, while they count."""
    violations_last_hour: int
    wait_left_ms: int
    rate_limited: bool
    exempt: bool
    override: bool


class Summary(Struct):
    """How the fleet stands."""

    violations_last_hour: int
    worst_offenders: list[Offender]
    exempt: int
    checks: int
    denied: int
    checks_per_second: float
    """Over the last five to ten seconds."""
    denied_share: float
    """Of the checks of the last minute."""
    store: Literal["memory", "ok", "away"]
    degraded: bool


class DashboardState(Struct):
    """What a dashboard shows."""

    summary: Summary
    agents: list[AgentCard]
    alerts: list[Alert]


def shown(hub: "Hub") -> list[str]:
    """The agents that there is something to tell of, the most interesting first.

    They are connected, had violations within the hour, asked for something within the last minutes, or have a limit or
    an exemption of their own.
    """
    tally, holds = hub.tally, hub.gate.effective
    offenders = {one.agent_id: one.violations for one in tally.offenders()}
    active = set(tally.active(tally.slot - AGENT_SLOTS + 1))
    agents = {*hub.presence.agents(), *offenders, *active, *holds.overrides, *holds.exempt}
    return sorted(agents, key=lambda agent: (-offenders.get(agent, 0), agent not in active, agent))


async def cards(hub: "Hub", agents: Sequence[str]) -> list[AgentCard]:
    """How agents stand now."""
    hour = {one.agent_id: one.violations for one in hub.tally.offenders()}
    found: list[AgentCard] = []
    for start in range(0, len(agents), _AT_ONCE):
        some = agents[start : start + _AT_ONCE]
        found += await asyncio.gather(*(_card(hub, agent, hour.get(agent, 0)) for agent in some))
    return found


async def _card(hub: "Hub", agent: str, hour: int) -> AgentCard:
    gate = hub.gate
    standing = await gate.astanding(agent)
    exempt = gate.is_exempt(agent)
    return AgentCard(
        agent_id=agent,
        connected=hub.presence.is_here(agent),
        usage=None if exempt else await _usage(gate, agent),
        violations=standing.violations,
        violations_last_hour=hour,
        wait_left_ms=ceil(standing.wait_left * 1000),
        rate_limited=bool(standing) and not exempt,
        exempt=exempt,
        override=agent in gate.effective.overrides,
    )


async def _usage(gate: Gate, agent: str) -> Usage | None:
    """Of the bucket that is nearest to its limit."""
    nearest: Usage | None = None
    for channel in gate.policy.channels:
        for tier in TIERS:
            decision = await gate.apeek(agent, channel, tier)
            capacity = decision.limit.capacity
            used = 1 - decision.remaining / capacity if capacity else 1.0
            if nearest is None or used > nearest.used:
                nearest = Usage(channel, tier, round(used, 4), decision.remaining, capacity)
    return nearest


def summary(hub: "Hub") -> Summary:
    """How the fleet stands now."""
    tally = hub.tally
    offenders, outcomes = tally.offenders(), tally.outcomes()
    rate, share = _traffic(tally)
    here: Literal["memory", "ok"] = "ok" if isinstance(hub.store, ServerStore) else "memory"
    return Summary(
        violations_last_hour=sum(one.violations for one in offenders),
        worst_offenders=offenders[:3],
        exempt=len(hub.gate.effective.exempt),
        checks=sum(outcomes.values()),
        denied=outcomes["deny"],
        checks_per_second=round(rate, 1),
        denied_share=round(share, 4),
        store="away" if hub.degraded else here,
        degraded=hub.degraded,
    )


def _traffic(tally: Tally) -> tuple[float, float]:
    """Checks per second, and the share that is denied."""
    slot, fleet = tally.slot, tally.fleet
    newest = sum(fleet.at(slot)) + sum(fleet.at(slot - 1))
    minute = [fleet.at(old) for old in range(slot - _MINUTE, slot + 1)]
    checks = sum(map(sum, minute))
    return newest / (SLOT + tally.into_slot), sum(denied for _, _, denied in minute) / max(checks, 1)


def timeline(tally: Tally, since: int) -> list[list[int]]:
    """The fleet's traffic from a slot on: the slot, and what was allowed, warned and denied in it."""
    slot = tally.slot
    return [[old, *tally.fleet.at(old)] for old in range(max(since, slot - FLEET_SLOTS + 1), slot + 1)]


def spark(tally: Tally, agent: str, since: int) -> list[list[int]]:
    """An agent's traffic from a slot on: the slot, what passed and what was denied in it, where there was any."""
    trace, slot = tally.trace(agent), tally.slot
    if trace is None:
        return []
    points = [(old, trace.at(old)) for old in range(max(since, slot - AGENT_SLOTS + 1), trace.slot + 1)]
    return [[old, allowed + warned, denied] for old, (allowed, warned, denied) in points if allowed or warned or denied]


async def dashboard(hub: "Hub", limit: int) -> DashboardState:
    """What a dashboard shows."""
    return DashboardState(summary(hub), await cards(hub, shown(hub)[:limit]), hub.alerts.recent())
