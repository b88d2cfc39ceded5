"""What happened at the gate, added up for operators: counts, violations by agent, and how full each bucket is."""

from collections import Counter, OrderedDict
from math import ceil
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from headgate.clock import Clock
from headgate.core import Outcome
from headgate.events import AddressChecked, Alerted, Degraded, Event, Violated
from headgate.gate import Gate
from headgate.policy import TIERS

if TYPE_CHECKING:
    from headgate.hub.hub import Hub

_MINUTES: Final = 60  # that are remembered
_OFFENDERS: Final = 10_000  # agents whose violations are remembered, those with the latest


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


class Offender(Struct):
    agent_id: str
    violations: int


class Summary(Struct):
    """How the fleet stands."""

    violations_last_hour: int
    worst_offenders: list[Offender]
    exempt: int
    checks: int
    denied: int
    degraded: bool


class DashboardState(Struct):
    """What a dashboard shows."""

    summary: Summary
    agents: list[AgentCard]


class Tally:
    """Listens to a gate."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._clock: Final = clock
        self.checks: Final[Counter[tuple[str, str, Outcome]]] = Counter()
        """Of agents, by channel, action and outcome. Whoever asks the gate counts here: quicker than events."""
        self.addresses: Final[Counter[tuple[str, str]]] = Counter()
        """Checks by address, by purpose and outcome."""
        self.violations = 0
        self.alerts = 0
        self.degraded_times = 0
        self._offenders: Final[OrderedDict[str, dict[int, int]]] = OrderedDict()
        self.stop: Final = gate.subscribe(self._hear, Violated, AddressChecked, Alerted, Degraded)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Violated):
            self._violated(event.agent)
        elif isinstance(event, AddressChecked):
            self.addresses[event.purpose, event.decision.outcome.value] += 1
        elif isinstance(event, Alerted):
            self.alerts += 1
        elif isinstance(event, Degraded) and event.degraded:
            self.degraded_times += 1

    def _violated(self, agent: str) -> None:
        self.violations += 1
        minute = self._minute()
        minutes = self._offenders.setdefault(agent, {})
        minutes[minute] = minutes.get(minute, 0) + 1
        if len(minutes) > _MINUTES:
            del minutes[min(minutes)]
        self._offenders.move_to_end(agent)
        if len(self._offenders) > _OFFENDERS:
            self._offenders.popitem(last=False)

    def offenders(self) -> list[Offender]:
        """The agents with violations in the last hour, the worst first."""
        oldest = self._minute() - _MINUTES
        found = []
        for agent, minutes in list(self._offenders.items()):
            count = sum(times for minute, times in minutes.items() if minute > oldest)
            if count:
                found.append(Offender(agent, count))
            else:
                del self._offenders[agent]
        return sorted(found, key=lambda one: (-one.violations, one.agent_id))

    def _minute(self) -> int:
        return self._clock.now() // 60_000_000

    def forget(self, agent: str) -> None:
        """An agent's violations were reset."""
        self._offenders.pop(agent, None)

    def outcomes(self) -> dict[str, int]:
        """Checks of agents by outcome."""
        counts = dict.fromkeys((outcome.value for outcome in Outcome), 0)
        for (_, _, outcome), times in self.checks.items():
            counts[outcome.value] += times
        return counts


async def card(hub: "Hub", agent: str, violations: int) -> AgentCard:
    """How an agent stands now."""
    gate = hub.gate
    standing = await gate.astanding(agent)
    exempt = gate.is_exempt(agent)
    return AgentCard(
        agent_id=agent,
        connected=bool(hub.presence.of(agent)),
        usage=None if exempt else await _usage(gate, agent),
        violations=standing.violations,
        violations_last_hour=violations,
        wait_left_ms=ceil(standing.wait_left * 1000),
        rate_limited=bool(standing) and not exempt,
        exempt=exempt,
        override=agent in gate.holds.overrides,
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


async def dashboard(hub: "Hub", limit: int) -> DashboardState:
    """What a dashboard shows: those who are connected, and those with violations."""
    worst = hub.tally.offenders()
    offenders = {one.agent_id: one.violations for one in worst}
    agents = sorted({*hub.presence.agents(), *offenders}, key=lambda agent: (-offenders.get(agent, 0), agent))
    cards = [await card(hub, agent, offenders.get(agent, 0)) for agent in agents[:limit]]
    outcomes = hub.tally.outcomes()
    summary = Summary(
        violations_last_hour=sum(offenders.values()),
        worst_offenders=worst[:3],
        exempt=len(hub.gate.holds.exempt),
        checks=sum(outcomes.values()),
        denied=outcomes["deny"],
        degraded=hub.degraded,
    )
    return DashboardState(summary, cards)
