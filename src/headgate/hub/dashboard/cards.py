"""The state of agents and of the fleet, as operators see it: in the API, on the dashboard and in the terminal."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import nsmallest
from math import ceil
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from headgate.errors import InvalidInput
from headgate.gate import Gate
from headgate.hub.agents.names import ADMIN
from headgate.hub.agents.presence import Presence
from headgate.hub.background import BackgroundTasks
from headgate.hub.monitoring.account_alerts import AccountAlert, AccountAlerts
from headgate.hub.monitoring.address_log import AddressLog, DeniedAddress
from headgate.hub.monitoring.alerts import Alert, Alerts
from headgate.hub.monitoring.health import Health, StoreState
from headgate.hub.monitoring.stats import AGENT_SLOTS, FLEET_SLOTS, SLOT, Offender, Stats
from headgate.hub.tasks.scheduler import Scheduler
from headgate.limits.decision import Decision
from headgate.limits.violations import Standing

_BATCH: Final = 25  # cards that are made before other tasks have their turn
_MINUTE: Final = 60 // SLOT
_MAX_OVERRULED: Final = 100  # paths in a summary, which is sent often


class BucketUsage(Struct):
    """The use of one bucket."""

    channel: str
    tier: str
    used: float
    """The used share of the capacity, 0 to 1."""
    remaining: int
    capacity: int


def used_share(decision: Decision) -> float:
    """The used share of a bucket's capacity."""
    capacity = decision.limit.capacity
    return 1 - decision.remaining / capacity if capacity else 1.0


class AgentCard(Struct):
    """The state of one agent."""

    agent_id: str
    connected: bool
    usage: BucketUsage | None
    """Of the bucket nearest to its limit."""
    violations: int
    """Consecutive violations, while they count."""
    violations_last_hour: int
    wait_left_ms: int
    rate_limited: bool
    denied_by_account: bool
    """Whether an account above the agent has denied its last hold at this hub, within the quiet period."""
    exempt: bool
    override: bool
    blocked: bool
    denied_per_minute: int
    """Denials in the last minute, on every channel."""
    role: str
    """The agent's role: admin, viewer, or none. A dashboard without a token gets none."""


Card = TypeVar("Card", bound=AgentCard)


class TaskCounts(Struct):
    """The numbers of tasks; of the finished ones, those that are kept."""

    waiting: int
    held: int
    """Assigned or accepted."""
    done: int
    failed: int


class Summary(Struct):
    """The state of the fleet."""

    violations_last_hour: int
    worst_offenders: list[Offender]
    exempt: int
    checks: int
    """And holds, here and below."""
    denied: int
    checks_per_second: float
    """Over the last five to ten seconds."""
    denied_share: float
    """Of the checks of the last minute."""
    store: StoreState
    degraded: bool
    problems: list[str]
    """Problems of the store or the disk, as sentences."""
    open_alerts: int
    """Of agents and of accounts."""
    open_account_alerts: int
    """The alerts of accounts. Only admins see accounts."""
    blocked: int
    """Agents that are blocked now."""
    agents: int
    """All agents that could be shown."""
    limited: int
    """Agents that are rate limited now, by what this hub has denied."""
    denied_per_second: float
    """Over the last five to ten seconds."""
    tasks: TaskCounts
    denied_addresses: list[DeniedAddress]
    """The three that were denied most often in the last hour. A dashboard without a token gets none."""
    address_denials: int
    """Denials by address in the last hour."""
    overruled: list[str]
    """Limits of the policy file that a stored change overrules, by their paths in the file: the first hundred."""


class DashboardState(Struct):
    """The state that a dashboard shows."""

    summary: Summary
    agents: list[AgentCard]
    alerts: list[Alert]
    account_alerts: list[AccountAlert]
    """Only admins see accounts."""


View: TypeAlias = Literal["accounts", "role", "public"]
"""The view of somebody: everything with "accounts", all but those with another "role", or the "public" part."""


def sees_accounts(role: str) -> bool:
    """Whether an operator of a role sees accounts: what they have spent, hold and have left, and their alerts."""
    return role == ADMIN


def view_of(role: str) -> View:
    """The view of an operator with a role, or of somebody without a token ("")."""
    return "accounts" if sees_accounts(role) else "role" if role else "public"


class Fleet(NamedTuple):
    """Counts that the summary and the choice of cards share."""

    agents: list[str]
    """All that could be shown, the most interesting first."""
    violations: dict[str, int]
    """Of the last hour, by agent."""
    limited: int
    """Agents that are rate limited now."""
    blocked: int
    """Agents that are blocked now."""


class _SharedState:
    """A state for many: one is made at a time, and whoever asks meanwhile gets the one that is being made.

    So a flood of requests costs no more than one after the other, and nobody waits for more than two.
    """

    def __init__(self, make: Callable[[int], Coroutine[Any, Any, DashboardState]], background: BackgroundTasks) -> None:
        self._make, self._background = make, background
        self._making: asyncio.Task[DashboardState] | None = None
        self._limit = 0  # its cards
        self._wanted = 0  # cards that somebody waits for who wants more

    async def get(self, limit: int) -> DashboardState:
        """The state, with at most `limit` cards."""
        while True:
            making = self._making
            if making is None or making.done():
                self._limit, self._wanted = max(limit, self._wanted), 0
                making = self._making = self._background.spawn(self._make(self._limit))
            if limit <= self._limit:
                break
            self._wanted = max(limit, self._wanted)
            await asyncio.wait([making])
        state = await asyncio.shield(making)  # others wait for it, too
        return replace(state, agents=state.agents[:limit])


class Cards:
    """Makes cards and summaries, from what the gate, the stats and the sockets say now."""

    def __init__(
        self,
        gate: Gate,
        stats: Stats,
        presence: Presence,
        alerts: Alerts,
        account_alerts: AccountAlerts,
        health: Health,
        address_log: AddressLog,
        scheduler: Scheduler,
        background: BackgroundTasks,
    ) -> None:
        self._gate, self._stats, self._presence, self._alerts, self._health = gate, stats, presence, alerts, health
        self._account_alerts, self._address_log, self._scheduler = account_alerts, address_log, scheduler
        self._for_viewers: Final = _SharedState(partial(self._make_state, view="role"), background)
        self._for_everybody: Final = _SharedState(partial(self._make_state, view="public"), background)

    def fleet(self) -> Fleet:
        """The agents to show, the most interesting first: rate limited, then by denials a minute and by violations.

        They are connected, had violations within the hour, made a request within the last minutes, are blocked, or have
        an override or an exemption.
        """
        stats, effective = self._stats, self._gate.effective
        blocked = [agent for agent in effective.blocks if self._gate.is_blocked(agent)]
        violations, active = stats.violations_last_hour(), set(stats.active(stats.slot - AGENT_SLOTS + 1))
        ruled = {*effective.overrides, *effective.exempt, *blocked}
        agents = {*self._presence.agents(), *violations, *active, *ruled}
        limited, denied = stats.limited(), stats.denials.last_minute()

        def order(agent: str) -> tuple[bool, int, int, bool, str]:
            return agent not in limited, -denied.get(agent, 0), -violations.get(agent, 0), agent not in active, agent

        return Fleet(sorted(agents, key=order), violations, len(limited), len(blocked))

    async def of(self, agents: Sequence[str], violations: Mapping[str, int] | None = None) -> list[AgentCard]:
        """The cards of some agents, given the violations of the last hour if they are known."""
        last_hour = self._stats.violations_last_hour() if violations is None else violations
        found: list[AgentCard] = []
        for start in range(0, len(agents), _BATCH):
            some = agents[start : start + _BATCH]
            found += await asyncio.gather(*(self._card(agent, last_hour.get(agent, 0)) for agent in some))
            await asyncio.sleep(0)  # in memory nothing waits, and many cards take long
        return found

    async def of_standing(self, agent: str, standing: Standing) -> AgentCard:
        """The card of an agent whose standing is known."""
        return await self._card(agent, self._stats.violations_last_hour().get(agent, 0), standing)

    async def _card(self, agent: str, last_hour: int, standing: Standing | None = None) -> AgentCard:
        gate = self._gate
        if standing is None:
            standing = await gate.astanding(agent)
        rules, blocked = gate.effective.rules_of(agent), gate.is_blocked(agent)
        free = rules.exempt and not blocked
        return AgentCard(
            agent_id=agent,
            connected=self._presence.is_connected(agent),
            usage=None if free else await self._usage(agent),
            violations=standing.violations,
            violations_last_hour=last_hour,
            wait_left_ms=ceil(standing.wait_left * 1000),
            rate_limited=bool(standing) and not free,
            denied_by_account=self._stats.is_denied_by_account(agent) and not free,
            exempt=rules.exempt,
            override=bool(rules.overrides),
            blocked=blocked,
            denied_per_minute=self._stats.denials.per_minute(agent),
            role=rules.role,
        )

    async def _usage(self, agent: str) -> BucketUsage | None:
        """The use of the bucket nearest to its limit."""
        nearest: BucketUsage | None = None
        for channel, tier in self._gate.policy.limits:
            with suppress(InvalidInput):  # a reload has removed it since
                decision = await self._gate.apeek(agent, channel, tier)
                used = used_share(decision)
                if nearest is None or used > nearest.used:
                    capacity = decision.limit.capacity
                    nearest = BucketUsage(channel, tier, round(used, 4), decision.remaining, capacity)
        return nearest

    def summary(self, fleet: Fleet) -> Summary:
        """The state of the fleet."""
        stats, health = self._stats, self._health
        checks, denied = stats.totals()
        worst = nsmallest(3, fleet.violations.items(), key=lambda one: (-one[1], one[0]))
        rate, denied_rate, share = _traffic(stats)
        return Summary(
            violations_last_hour=sum(fleet.violations.values()),
            worst_offenders=[Offender(*one) for one in worst],
            exempt=len(self._gate.effective.exempt),
            checks=checks,
            denied=denied,
            checks_per_second=round(rate, 1),
            denied_share=round(share, 4),
            store=health.store,
            degraded=health.degraded,
            problems=health.problems,
            open_alerts=self._alerts.open + self._account_alerts.open,
            open_account_alerts=self._account_alerts.open,
            blocked=fleet.blocked,
            agents=len(fleet.agents),
            limited=fleet.limited,
            denied_per_second=round(denied_rate, 1),
            tasks=self._tasks(),
            denied_addresses=self._address_log.denied()[:3],
            address_denials=self._address_log.denials,
            overruled=self._gate.overruled[:_MAX_OVERRULED],
        )

    def _tasks(self) -> TaskCounts:
        counts = self._scheduler.counts()
        held = counts["assigned"] + counts["accepted"]
        return TaskCounts(counts["queued"], held, counts["completed"], counts["failed"])

    async def state(self, limit: int, *, role: str) -> DashboardState:
        """The state that a dashboard shows, with at most `limit` cards, to an operator of a role or to anybody ("").

        An admin waits for nobody. The others share what is made, since anyone may ask for a public one.
        """
        view = view_of(role)
        if view == "accounts":
            return await self._make_state(limit, view=view)
        return await (self._for_viewers if view == "role" else self._for_everybody).get(limit)

    async def _make_state(self, limit: int, *, view: View) -> DashboardState:
        fleet = self.fleet()
        summary, alerts = self.summary(fleet), self._alerts.recent()
        of_accounts = self._account_alerts.recent() if view == "accounts" else []
        cards = await self.of(fleet.agents[:limit], fleet.violations)
        return DashboardState(summary_in(view, summary), cards_in(view, cards), alerts_in(view, alerts), of_accounts)


def summary_in(view: View, summary: Summary) -> Summary:
    """The part of a summary for a view: only admins see accounts, and nobody without a token network addresses."""
    if view == "accounts":
        return summary
    open_alerts = summary.open_alerts - summary.open_account_alerts
    addresses = [] if view == "public" else summary.denied_addresses
    return replace(summary, open_alerts=open_alerts, open_account_alerts=0, denied_addresses=addresses)


def alerts_in(view: View, alerts: list[Alert]) -> list[Alert]:
    """The part of alerts for a view: network addresses are not public."""
    return [replace(alert, address="") for alert in alerts] if view == "public" else alerts


def cards_in(view: View, cards: list[Card]) -> list[Card]:
    """The part of cards for a view: roles are not public."""
    if view != "public":
        return cards
    return [replace(card, role="") if card.role else card for card in cards]


def _traffic(stats: Stats) -> tuple[float, float, float]:
    """Checks and denials per second, and the share of the last minute's checks that was denied."""
    slot, fleet = stats.slot, stats.fleet
    newest, span = [fleet.at(slot), fleet.at(slot - 1)], SLOT + stats.into_slot
    minute = [fleet.at(old) for old in range(slot - _MINUTE, slot + 1)]
    checks = sum(map(sum, minute))
    share = sum(denied for _, _, denied in minute) / max(checks, 1)
    return sum(map(sum, newest)) / span, sum(denied for _, _, denied in newest) / span, share


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
