"""Messages to dashboards: a full snapshot first, then the changes.

They are computed once for all dashboards. Only cards that may have changed are made again: those of agents that made
requests, whose buckets refill, that have violations, or that a change of limits concerns.
"""

import asyncio
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict, replace

from headgate.gate import Gate
from headgate.hub.agents.presence import Presence
from headgate.hub.dashboard.accounts import AccountCard, AccountReader
from headgate.hub.dashboard.cards import (
    AgentCard,
    Cards,
    Summary,
    View,
    alerts_in,
    cards_in,
    spark,
    summary_in,
    timeline,
)
from headgate.hub.monitoring.account_alerts import AccountAlert, AccountAlerts
from headgate.hub.monitoring.alerts import Alert, Alerts
from headgate.hub.monitoring.stats import AGENT_SLOTS, FLEET_SLOTS, SLOT, Stats
from headgate.hub.sockets.frames import encode

MAX_CARDS: Final = 2000
"""Agents that a dashboard shows: those that are rate limited first."""
_FRAME_CARDS: Final = 500  # in one frame; further ones follow in frames of their own
_BATCH: Final = 50  # cards that are compared or encoded before other tasks have their turn
_ROTATED: Final = 50  # cards made again in each update without a known reason: another hub may have counted something


class LiveCard(AgentCard):
    """A card with the agent's traffic: each slot that had any, with its numbers of passed and denied requests."""

    spark: list[list[int]]


class Snapshot(Struct, tag_field="type", tag="snapshot"):
    """The whole state."""

    admin: bool
    """Whether the token allows changes."""
    name: str
    """The operator's name; "" for a dashboard link, and without a token."""
    slot: int
    """The number of the present slot."""
    slot_seconds: int
    agent_slots: int
    """The number of slots that a spark spans."""
    fleet_slots: int
    summary: Summary
    agents: list[LiveCard]
    """The first 500; the others follow in updates."""
    more: int
    """The number of agents not shown: only 2,000 are, those that are rate limited first."""
    timeline: list[list[int]]
    """Each slot, with its numbers of allowed, warned and denied requests."""
    alerts: list[Alert]
    account_alerts: list[AccountAlert]
    """Only admins see accounts, and get their alerts."""
    accounts: list[AccountCard]
    """The accounts that were read so far."""
    more_accounts: int
    """The number of accounts not shown: only 500 are, those of which the largest share is used."""
    accounts_age: int
    """How old the oldest figures of these accounts are, in seconds."""


class Update(Struct, tag_field="type", tag="update", omit_defaults=True):
    """The changes: of cards the changed fields; the summary, the alerts and a slot of the timeline as a whole."""

    slot: int
    summary: Summary | UnsetType = UNSET
    agents: list[dict[str, Any]] | list[LiveCard] = []
    gone: list[str] = []
    more: int | UnsetType = UNSET
    timeline: list[list[int]] = []
    alerts: list[Alert] | UnsetType = UNSET
    account_alerts: list[AccountAlert] | UnsetType = UNSET
    accounts: list[AccountCard] = []
    accounts_gone: list[str] = []
    more_accounts: int | UnsetType = UNSET
    accounts_age: int | UnsetType = UNSET


class SentState:
    """The state that all dashboards have been sent, and the changes since."""

    def __init__(
        self,
        cards: Cards,
        gate: Gate,
        stats: Stats,
        presence: Presence,
        alerts: Alerts,
        account_alerts: AccountAlerts,
        accounts: AccountReader,
    ) -> None:
        self._cards, self._gate, self._stats, self._presence = cards, gate, stats, presence
        self._alerts, self._account_alerts, self._accounts = alerts, account_alerts, accounts
        self._sent_cards: dict[str, AgentCard] = {}
        self._sent_sparks: dict[str, list[list[int]]] = {}
        self._sent_summary: Summary | None = None
        self._sent_alerts: list[Alert] = []
        self._sent_account_alerts: list[AccountAlert] = []
        self._sent_accounts: dict[str, AccountCard] = {}
        self._sent_more_accounts = self._sent_accounts_age = 0
        self._sent_timeline: list[list[int]] = []
        self._sent_more = 0
        self._live: list[LiveCard] = []  # the cards for a snapshot, once somebody asks for one
        self._effective: object = None
        self._slot = 0
        self._next_rotated = 0

    async def next_update(self) -> Update:
        """The changes since the last update."""
        stats, since = self._stats, self._slot
        self._slot, self._live = stats.slot, []
        update = Update(slot=self._slot)
        fleet = self._cards.fleet()
        agents = fleet.agents[:MAX_CARDS]
        active = set(stats.active(since))
        made = await self._cards.of(self._stale(agents, active), fleet.violations)
        new = {card.agent_id: card for card in made}
        update.gone = list(self._sent_cards.keys() - set(agents))
        for agent in update.gone:
            del self._sent_cards[agent]
            self._sent_sparks.pop(agent, None)
        update.agents = await self._changes(new, active & set(agents), since)
        self._sent_cards.update(new)
        if (summary := self._cards.summary(fleet)) != self._sent_summary:
            self._sent_summary = update.summary = summary
        if (more := len(fleet.agents) - len(agents)) != self._sent_more:
            self._sent_more = update.more = more
        if (alerts := self._alerts.recent()) != self._sent_alerts:
            self._sent_alerts = update.alerts = alerts
        if (of_accounts := self._account_alerts.recent()) != self._sent_account_alerts:
            self._sent_account_alerts = update.account_alerts = of_accounts
        self._update_accounts(update)
        points = timeline(stats, since)
        update.timeline = [point for point in points if point not in self._sent_timeline]
        self._sent_timeline = points
        return update

    def _update_accounts(self, update: Update) -> None:
        """Add the accounts that have changed since the last update. They were read in the background."""
        sent, shown = self._sent_accounts, self._accounts.shown()
        update.accounts = [card for path, card in shown.items() if sent.get(path) is not card]
        update.accounts_gone = [path for path in sent if path not in shown]
        self._sent_accounts = shown
        if (more := self._accounts.total - len(shown)) != self._sent_more_accounts:
            self._sent_more_accounts = update.more_accounts = more
        if (age := self._accounts.age(list(shown))) != self._sent_accounts_age:
            self._sent_accounts_age = update.accounts_age = age

    async def _changes(self, new: dict[str, AgentCard], active: set[str], since: int) -> list[dict[str, Any]]:
        """The changed fields of the cards that were made again, and the traffic of active agents."""
        found = []
        for number, agent in enumerate(new.keys() | active):
            changed = self._changed(agent, new.get(agent), since)
            if len(changed) > 1:
                found.append(changed)
            if number % _BATCH == _BATCH - 1:
                await asyncio.sleep(0)
        return found

    def _stale(self, agents: list[str], active: set[str]) -> list[str]:
        """The agents whose cards have to be made again."""
        effective = self._gate.effective
        if effective is not self._effective:
            self._effective = effective
            return agents
        self._next_rotated = self._next_rotated + _ROTATED if self._next_rotated + _ROTATED < len(agents) else 0
        rotated = set(agents[self._next_rotated : self._next_rotated + _ROTATED])

        def stale(agent: str) -> bool:
            card = self._sent_cards.get(agent)
            known = agent in active or agent in rotated
            return known or card is None or _unsettled(card) or card.connected != self._presence.is_connected(agent)

        return [agent for agent in agents if stale(agent)]

    def _changed(self, agent: str, card: AgentCard | None, since: int) -> dict[str, Any]:
        """The agent's id, and the fields of its card that have changed."""
        found: dict[str, Any] = {"agent_id": agent}
        old = self._sent_cards.get(agent)
        if card is not None:
            for name in card.__struct_fields__:
                value = getattr(card, name)
                if old is None or value != getattr(old, name):
                    found[name] = value
            if old is not None and old.violations == card.violations:
                found.pop("wait_left_ms", None)  # dashboards count down by themselves
        start = self._slot - AGENT_SLOTS + 1 if old is None else since
        points = spark(self._stats, agent, start)
        if points != self._sent_sparks.get(agent, []):
            self._sent_sparks[agent] = found["spark"] = points
        return found

    async def snapshot(self, view: View, *, admin: bool, name: str) -> list[str]:
        """The frames of a snapshot: it, and updates with the cards that don't fit into it."""
        summary = self._sent_summary
        assert summary is not None
        accounts = view == "accounts"
        live = cards_in(view, await self._live_cards())
        snapshot = Snapshot(
            admin=admin,
            name=name,
            slot=self._slot,
            slot_seconds=SLOT,
            agent_slots=AGENT_SLOTS,
            fleet_slots=FLEET_SLOTS,
            summary=summary_in(view, summary),
            agents=live[:_FRAME_CARDS],
            more=self._sent_more,
            timeline=timeline(self._stats, self._slot - FLEET_SLOTS + 1),
            alerts=alerts_in(view, self._sent_alerts),
            account_alerts=self._sent_account_alerts if accounts else [],
            accounts=list(self._sent_accounts.values()) if accounts else [],
            more_accounts=self._sent_more_accounts if accounts else 0,
            accounts_age=self._sent_accounts_age if accounts else 0,
        )
        return [encode(snapshot), *self._encode_cards(live[_FRAME_CARDS:])]

    async def _live_cards(self) -> list[LiveCard]:
        """The cards that were sent last, with all traffic; made once for all who join between two updates."""
        if len(self._live) != len(self._sent_cards):
            since, live = self._slot - AGENT_SLOTS + 1, []
            for number, (agent, card) in enumerate(self._sent_cards.items()):
                live.append(LiveCard(**asdict(card), spark=spark(self._stats, agent, since)))
                if number % _BATCH == _BATCH - 1:
                    await asyncio.sleep(0)
            self._live = live
        return self._live

    def frames(self, update: Update, view: View) -> list[str]:
        """The frames of an update for one dashboard, as many as its cards need."""
        if view != "accounts":
            update = _without_accounts(update, view)
        first = replace(update, agents=update.agents[:_FRAME_CARDS])
        return [encode(first), *self._encode_cards(update.agents[_FRAME_CARDS:])]

    def _encode_cards(self, cards: list[dict[str, Any]] | list[LiveCard]) -> list[str]:
        """Cards in as many frames as they need."""
        starts = range(0, len(cards), _FRAME_CARDS)
        return [encode(Update(slot=self._slot, agents=cards[start : start + _FRAME_CARDS])) for start in starts]


def _unsettled(card: AgentCard) -> bool:
    """Whether a card changes by itself: a bucket refills, a violation expires, a block ends."""
    counts = card.violations or card.violations_last_hour or card.denied_per_minute or card.denied_by_account
    return bool(counts or card.blocked or (card.usage and card.usage.used))


def _without_accounts(update: Update, view: View) -> Update:
    """The part of an update for a view without accounts."""
    return replace(
        update,
        summary=UNSET if update.summary is UNSET else summary_in(view, update.summary),
        alerts=UNSET if update.alerts is UNSET else alerts_in(view, update.alerts),
        agents=_public_changes(update.agents) if view == "public" else update.agents,
        account_alerts=UNSET,
        accounts=[],
        accounts_gone=[],
        more_accounts=UNSET,
        accounts_age=UNSET,
    )


def _public_changes(cards: list[dict[str, Any]] | list[LiveCard]) -> list[dict[str, Any]]:
    """Changes of cards, without the roles."""
    return [
        {**card, "role": ""} if card.get("role") else card
        for card in cards
        if isinstance(card, dict) and card.keys() != {"agent_id", "role"}
    ]
