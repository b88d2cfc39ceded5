"""The live dashboard's socket: a full snapshot first, then the changes, once a second.

They are computed once for all viewers, and only while there is one. Only cards that may have changed are made again:
those of agents that made requests, whose buckets refill, that have violations, or that a change of limits concerns.
"""

import asyncio
from collections import Counter, OrderedDict
from time import perf_counter
from typing import Any, Final

import msgspec
import structlog
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict, replace

from headgate.errors import StoreAway
from headgate.gate import Gate
from headgate.gate.lookup import counted_as
from headgate.http import wait_ms
from headgate.hub.agents.authentication import Authentication
from headgate.hub.agents.operators import Holder, Operators
from headgate.hub.agents.presence import Presence
from headgate.hub.background import BackgroundTasks
from headgate.hub.dashboard.accounts import AccountCard, AccountReader
from headgate.hub.dashboard.cards import (
    AgentCard,
    Cards,
    Summary,
    public_alerts,
    public_cards,
    public_summary,
    sees_accounts,
    spark,
    timeline,
    without_accounts,
)
from headgate.hub.errors import RequestError, as_request_error
from headgate.hub.monitoring.account_alerts import AccountAlert, AccountAlerts
from headgate.hub.monitoring.alerts import Alert, Alerts
from headgate.hub.monitoring.stats import AGENT_SLOTS, FLEET_SLOTS, SLOT, Stats
from headgate.hub.settings import HubSettings
from headgate.hub.sockets.frames import MALFORMED, Problem, Token, encode, explain
from headgate.hub.sockets.socket import POLICY_VIOLATION, TRY_LATER, Socket
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision

MAX_CARDS: Final = 2000
"""Agents that a dashboard shows: those that are rate limited first."""
MAX_QUEUED: Final = 32
"""Frames queued for a dashboard that reads slowly; then it is closed, and connects again."""
MAX_QUEUED_BYTES: Final = 4 * 1024 * 1024
"""Characters of these frames. All dashboards share them: each is made once."""
MAX_STRANGERS: Final = 10
"""Dashboards that one address may be opening at a time: those that have not shown a token yet."""
MAX_PUBLIC: Final = 10
"""Dashboards without a token that one address may have open."""
_INTERVAL: Final = 1.0  # seconds between two updates
_MIN_INTERVAL: Final = 0.05  # seconds, however much changes
_MAX_PAUSE: Final = 3.0  # seconds: a dashboard takes a longer silence for a lost connection
_FRAME_CARDS: Final = 500  # in one frame; further ones follow in frames of their own
_BATCH: Final = 50  # cards that are compared or encoded before other tasks have their turn
_ROTATED: Final = 50  # cards made again in each update without a known reason: another hub may have counted something
_MAX_FRAME: Final = 4096  # bytes of the one frame that a dashboard sends

_log = structlog.get_logger("headgate.hub")

_PUBLIC: Final = Holder()  # a dashboard without a token


class WatchRequest(Struct, tag_field="type", tag="watch", forbid_unknown_fields=True):
    """The first and only frame that a dashboard sends. A public dashboard needs no token."""

    token: Token = ""


class LiveCard(AgentCard):
    """A card with the agent's traffic: each slot that had any, with its numbers of passed and denied requests."""

    spark: list[list[int]]


class Snapshot(Struct, tag_field="type", tag="snapshot"):
    """The whole state."""

    admin: bool
    """Whether the token allows changes."""
    name: str
    """Who is signed in; "" for a dashboard link, and without a token."""
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
    """Those that were read so far."""
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


class DashboardFeed:
    """Serves the dashboards of one hub."""

    def __init__(
        self,
        cards: Cards,
        gate: Gate,
        stats: Stats,
        presence: Presence,
        alerts: Alerts,
        account_alerts: AccountAlerts,
        operators: Operators,
        authentication: Authentication,
        clock: Clock,
        settings: HubSettings,
    ) -> None:
        self._cards, self._gate, self._stats, self._presence, self._alerts = cards, gate, stats, presence, alerts
        self._account_alerts: Final = account_alerts
        self._operators, self._authentication, self._clock, self._settings = operators, authentication, clock, settings
        self._accounts: Final = AccountReader(gate, clock)
        self._unidentified: Final[OrderedDict[Socket, None]] = OrderedDict()
        self._strangers: Final[Counter[str]] = Counter()  # unidentified sockets, by address
        self._identified: Final[dict[Socket, Holder]] = {}  # oldest first
        self._drops = 0
        self._viewers: Final[set[Socket]] = set()  # those that get updates
        self._updating: Final = asyncio.Lock()
        self._wake: Final = asyncio.Event()
        self._background: Final = BackgroundTasks()
        self._running = False
        # The state that all viewers have been sent:
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

    @property
    def sockets(self) -> list[Socket]:
        """The sockets of all open dashboards."""
        return [*self._identified, *self._unidentified]

    def refresh(self) -> None:
        """Send the next update at once: something has changed."""
        self._wake.set()

    def recheck(self) -> None:
        """Close the dashboards of operators that have another role now or are blocked, and send the next update."""
        self._drops += 1
        for socket, holder in list(self._identified.items()):
            if holder.role and not self._operators.may_watch(holder):
                self._forget(socket)
                socket.close_soon(POLICY_VIOLATION, "the role of this operator has changed")
        self.refresh()

    def drop(self, agent: str) -> None:
        """Close the dashboards of an agent whose token is no longer valid."""
        self._drops += 1
        for socket, holder in list(self._identified.items()):
            if holder.agent == agent:
                self._forget(socket)
                socket.close_revoked()

    async def close(self) -> None:
        """Send no more updates."""
        await self._background.cancel()

    # One dashboard ---------------------------------------------------------------------------------------------------

    def admit(self, socket: Socket) -> None:
        """Count a dashboard that has shown no token yet, or refuse it where its address is opening too many."""
        address = counted_as(socket.address)
        if self._strangers[address] >= MAX_STRANGERS:
            detail = f"expected at most {MAX_STRANGERS} dashboards that {address} is opening; wait for one of them"
            raise RequestError(429, "too_many_connections", detail)
        self._strangers[address] += 1

    async def serve(self, socket: Socket) -> None:
        """Serve a dashboard that was admitted, until it is closed."""
        address, most = counted_as(socket.address), self._settings.max_dashboards
        self._unidentified[socket] = None
        if len(self._unidentified) > most:
            oldest, _ = self._unidentified.popitem(last=False)
            oldest.close_soon(TRY_LATER, "too many dashboards are being opened")
        try:
            holder = await self._authenticate(socket) if await socket.accept() else None
        finally:
            self._unidentified.pop(socket, None)
            self._strangers[address] -= 1
            if not self._strangers[address]:
                del self._strangers[address]
        if holder is None:
            return
        if full := self._full(address, holder):
            await _refuse(socket, "too_many_connections", full, TRY_LATER)
            return
        self._identified[socket] = holder
        try:
            await self._join(socket, holder)
            if await socket.read() is not None:
                await _refuse(socket, "invalid", "expected no more frames from a dashboard")
        finally:
            self._forget(socket)

    def _full(self, address: str, holder: Holder) -> str:
        """Why there is no room for one more dashboard; "" if there is, or if a public one has made room."""
        most = self._settings.max_dashboards
        public = [socket for socket, other in self._identified.items() if other is _PUBLIC]
        if holder is _PUBLIC and sum(counted_as(socket.address) == address for socket in public) >= MAX_PUBLIC:
            return f"{address} has {MAX_PUBLIC} dashboards without a token, and may have no more"
        if len(self._identified) < most:
            return ""
        if holder is _PUBLIC or not public:
            return f"too many dashboards are open: the hub takes {most}"
        self._drop(public[0], "too many dashboards are open")
        return ""

    def _drop(self, socket: Socket, reason: str) -> None:
        self._forget(socket)
        socket.close_soon(TRY_LATER, reason)

    def _forget(self, socket: Socket) -> None:
        self._viewers.discard(socket)
        self._identified.pop(socket, None)

    async def _authenticate(self, socket: Socket) -> Holder | None:
        """Whose token the first frame has; None if the dashboard may not watch."""
        deadline = socket.expect_identification(self._clock, self._settings.identify_within)
        try:
            text = await socket.read()
        finally:
            deadline.cancel()
        if text is None:
            await self._authentication.charge(socket.address)  # otherwise sockets that show no token cost nothing
            return None
        try:
            if len(text) > _MAX_FRAME:
                raise msgspec.ValidationError(f"expected at most {_MAX_FRAME} bytes")
            token = msgspec.json.decode(text, type=WatchRequest).token
        except MALFORMED as error:
            await _refuse(socket, "invalid", explain(error))
            return None
        if not token and self._settings.public_dashboard:
            return _PUBLIC
        try:
            found = await self._attempt(socket.address, token)
        except StoreAway as away:
            await socket.close(TRY_LATER, as_request_error(away).detail)
            return None
        if isinstance(found, Holder):
            return found
        if found:
            await _refuse(socket, "unauthorized", "this needs the token of a viewer or the admin")
        else:
            problem = Problem(error="rate_limited", detail="too many wrong tokens", retry_after_ms=wait_ms(found))
            await socket.send(encode(problem))
            await socket.close(POLICY_VIOLATION, "too many wrong tokens")
        return None

    async def _attempt(self, address: str, token: str) -> Holder | Decision:
        """The operator that a token belongs to now; otherwise the address's decision."""

        async def look_up() -> Holder | None:
            found = await self._operators.holder(token)
            return found if found is not None and found.role and self._operators.may_watch(found) else None

        while True:
            drops = self._drops
            found = await self._authentication.attempt(address, token, look_up)
            if isinstance(found, Decision) or drops == self._drops:  # otherwise it may have been revoked meanwhile
                return found

    async def _join(self, socket: Socket, holder: Holder) -> None:
        async with self._updating:
            if not self._running:
                await self._update()
            frames = await self._snapshot(holder)
            if socket not in self._identified:  # another has taken its place meanwhile
                return
            socket.hold()  # updates are queued until the snapshot is sent
            self._viewers.add(socket)
            if not self._running:  # only now: it ends when nobody watches
                self._running = True
                self._background.spawn(self._run())
            self._background.spawn(self._accounts.run(self._accounts_wanted, self.refresh))
        for frame in frames:
            await socket.send(frame)
        socket.release()

    async def _snapshot(self, holder: Holder) -> list[str]:
        """The frames of a snapshot: it, and updates with the cards that don't fit into it."""
        summary = self._sent_summary
        assert summary is not None
        accounts = sees_accounts(holder.role)
        if not accounts:
            summary = without_accounts(summary)
        public, live = holder is _PUBLIC, await self._live_cards()
        if public:
            live = public_cards(live)
        snapshot = Snapshot(
            admin=holder.admin,
            name=holder.name,
            slot=self._slot,
            slot_seconds=SLOT,
            agent_slots=AGENT_SLOTS,
            fleet_slots=FLEET_SLOTS,
            summary=public_summary(summary) if public else summary,
            agents=live[:_FRAME_CARDS],
            more=self._sent_more,
            timeline=timeline(self._stats, self._slot - FLEET_SLOTS + 1),
            alerts=public_alerts(self._sent_alerts) if public else self._sent_alerts,
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

    def _encode_update(self, update: Update) -> list[str]:
        """An update in as many frames as its cards need."""
        first = replace(update, agents=update.agents[:_FRAME_CARDS])
        return [encode(first), *self._encode_cards(update.agents[_FRAME_CARDS:])]

    def _encode_cards(self, cards: list[dict[str, Any]] | list[LiveCard]) -> list[str]:
        """Cards in as many frames as they need."""
        starts = range(0, len(cards), _FRAME_CARDS)
        return [encode(Update(slot=self._slot, agents=cards[start : start + _FRAME_CARDS])) for start in starts]

    # All of them -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = _MIN_INTERVAL
        try:
            while self._viewers:
                await asyncio.sleep(pause)
                try:
                    async with asyncio.timeout(max(_INTERVAL - pause, 0)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                began = perf_counter()
                await self._send_update()
                # However much there is to show, the hub has twice as much time for everything else.
                pause = min(max(2 * (perf_counter() - began), _MIN_INTERVAL), _MAX_PAUSE)
        finally:
            self._running = False

    async def _send_update(self) -> None:
        async with self._updating:
            try:
                update = await self._update()
                frames = self._encode_for_all(update)
            except Exception:  # noqa: BLE001 - the next one may succeed
                _log.exception("the dashboard's update failed")
                return
            for socket in list(self._viewers):
                sent = frames[_kind(self._identified[socket])]
                if not all([socket.push(frame) for frame in sent]):
                    self._drop(socket, "it reads too slowly")

    def _accounts_wanted(self) -> bool:
        return any(sees_accounts(self._identified[socket].role) for socket in self._viewers)

    def _encode_for_all(self, update: Update) -> dict[str, list[str]]:
        """The frames of an update, for each kind of dashboard that is open."""
        reduced = {"accounts": lambda one: one, "role": _without_accounts, "public": _public_update}
        kinds = {_kind(holder) for holder in self._identified.values()}
        return {kind: self._encode_update(reduced[kind](update)) for kind in kinds}

    async def _update(self) -> Update:
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


def _unsettled(card: AgentCard) -> bool:
    """Whether a card changes by itself: a bucket refills, a violation expires, a block ends."""
    counts = card.violations or card.violations_last_hour or card.denied_per_minute
    return bool(counts or card.blocked or (card.usage and card.usage.used))


def _kind(holder: Holder) -> str:
    """What a dashboard gets: everything with "accounts", all but those for a "role", or what is "public"."""
    return "public" if holder is _PUBLIC else "accounts" if sees_accounts(holder.role) else "role"


def _without_accounts(update: Update) -> Update:
    """An update for everybody who is no admin."""
    return replace(
        update,
        summary=UNSET if update.summary is UNSET else without_accounts(update.summary),
        account_alerts=UNSET,
        accounts=[],
        accounts_gone=[],
        more_accounts=UNSET,
        accounts_age=UNSET,
    )


def _public_update(given: Update) -> Update:
    """An update without what a dashboard without a token may not see."""
    update = _without_accounts(given)
    return replace(
        update,
        summary=UNSET if update.summary is UNSET else public_summary(update.summary),
        alerts=UNSET if update.alerts is UNSET else public_alerts(update.alerts),
        agents=[
            {**card, "role": ""} if card.get("role") else card
            for card in update.agents
            if isinstance(card, dict) and card.keys() != {"agent_id", "role"}
        ],
    )


async def _refuse(socket: Socket, error: str, detail: str, code: int = POLICY_VIOLATION) -> None:
    await socket.send(encode(Problem(error=error, detail=detail)))
    await socket.close(code, detail)
