"""The live dashboard's socket: everything once, and from then on, each second, what has changed.

It is worked out once for all who watch, and only while somebody does. Of the agents only those are looked at whose card
may have changed: who asked for something, whose buckets fill up again, who has violations, or whom a change concerns.
"""

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
from msgspec import UNSET, Struct, UnsetType

from headgate.http import wait_ms
from headgate.hub.dashboard import cards
from headgate.hub.dashboard.cards import AgentCard, Summary
from headgate.hub.monitoring.alerts import Alert
from headgate.hub.monitoring.stats import AGENT_SLOTS, FLEET_SLOTS, SLOT
from headgate.hub.sockets.frames import MALFORMED, Problem, Token, encode, explained
from headgate.hub.sockets.socket import Socket
from headgate.hub.timer import Timer

if TYPE_CHECKING:
    from headgate.hub.app import Hub

MOST_CARDS: Final = 500
ROOM: Final = 8
"""Frames that wait for a dashboard that reads slowly; then it is closed, and starts anew."""
_EVERY: Final = 1.0  # seconds
_SOONEST: Final = 0.05  # seconds between two looks, however much changes
_OTHERS: Final = 50  # cards that are looked at again in each turn, whether or not we know of a reason
_LARGEST: Final = 4096  # bytes of the one frame that a dashboard says

_log = structlog.get_logger("headgate.hub")


class Watch(Struct, tag_field="type", tag="watch", forbid_unknown_fields=True):
    """What a dashboard says first, and all that it says. A public one needs no token to look."""

    token: Token = ""


class LiveCard(AgentCard):
    """A card with the agent's traffic: a slot, what passed and what was denied in it, for each that had any."""

    spark: list[list[int]]


class Snapshot(Struct, tag_field="type", tag="snapshot"):
    """All that a dashboard shows."""

    admin: bool
    """Whether the token is one that may change something."""
    slot: int
    """The number of the slot that it is now."""
    slot_seconds: int
    agent_slots: int
    """How many slots a spark spans."""
    fleet_slots: int
    summary: Summary
    agents: list[LiveCard]
    more: int
    """How many other agents there are: only the first 500 are shown, those with violations before those without."""
    timeline: list[list[int]]
    """For each slot its number, and how much was allowed, warned and denied in it."""
    alerts: list[Alert]


class Update(Struct, tag_field="type", tag="update", omit_defaults=True):
    """What has changed: of a summary, a list of alerts or a timeline's slot the whole, of a card the fields."""

    slot: int
    summary: Summary | UnsetType = UNSET
    agents: list[dict[str, Any]] = []
    gone: list[str] = []
    more: int | UnsetType = UNSET
    timeline: list[list[int]] = []
    alerts: list[Alert] | UnsetType = UNSET


class Board:
    """Serves the dashboards of one hub."""

    def __init__(self, hub: "Hub") -> None:
        self._hub: Final = hub
        self._strangers: Final[OrderedDict[Socket, None]] = OrderedDict()
        self._watching: Final[set[Socket]] = set()
        self._looking: Final = asyncio.Lock()
        self._wake: Final = asyncio.Event()
        self._runs = False
        self._cards: dict[str, AgentCard] = {}
        self._sparks: dict[str, list[list[int]]] = {}
        self._summary: Summary | None = None
        self._alerts: list[Alert] = []
        self._timeline: list[list[int]] = []
        self._holds: object = None
        self._more = 0
        self._slot = 0
        self._next = 0

    @property
    def sockets(self) -> list[Socket]:
        """Those of the dashboards that are open."""
        return [*self._watching, *self._strangers]

    def look_again(self) -> None:
        """Something has changed: don't wait for the next turn."""
        self._wake.set()

    # One dashboard ---------------------------------------------------------------------------------------------------

    async def serve(self, socket: Socket, *, at_home: bool) -> None:
        """Serve one until it is closed. `at_home`: the page that opened it is the hub's own."""
        if not await socket.accept():
            return
        most = self._hub.settings.max_dashboards
        self._strangers[socket] = None
        if len(self._strangers) > most:  # whoever has said nothing for longest makes room
            oldest, _ = self._strangers.popitem(last=False)
            self._hub.spawn(oldest.close(1013, "too many dashboards are being opened"))
        try:
            admin = await self._admitted(socket, at_home=at_home)
        finally:
            self._strangers.pop(socket, None)
        if admin is None:
            return
        if len(self._watching) >= most:
            await _refuse(socket, "too_many_connections", f"too many dashboards are open: the hub takes {most}", 1013)
            return
        try:
            await self._join(socket, admin=admin)
            if await socket.read() is not None:
                await _refuse(socket, "invalid", "expected a dashboard to say nothing more")
        finally:
            self._watching.discard(socket)

    async def _admitted(self, socket: Socket, *, at_home: bool) -> bool | None:
        """Whether it is an admin's, from what the dashboard says first; None if it may not look."""
        hub, within = self._hub, self._hub.settings.identify_within

        def too_late() -> None:
            hub.spawn(socket.close(1008, f"say who you are within {within:g} seconds"))

        deadline = Timer(hub.clock, hub.clock.now() + round(within * 1_000_000), too_late)
        try:
            text = await socket.read()
        finally:
            deadline.cancel()
        if text is None:
            return None
        try:
            if len(text) > _LARGEST:
                raise msgspec.ValidationError(f"expected at most {_LARGEST} bytes")
            token = msgspec.json.decode(text, type=Watch).token
        except MALFORMED as error:
            await _refuse(socket, "invalid", explained(error))
            return None
        if token and hub.tokens.is_admin(token):
            return True
        if (token and hub.tokens.is_viewer(token)) or (not token and hub.settings.public_dashboard and at_home):
            return False
        decision = await hub.gate.acheck_address(socket.address)  # or tokens could be guessed as fast as one likes
        if decision:
            await _refuse(socket, "unauthorized", "this needs the token of a viewer or the admin")
        else:
            problem = Problem(error="rate_limited", detail="too many wrong tokens", retry_after_ms=wait_ms(decision))
            await socket.send(encode(problem))
            await socket.close(1008, "too many wrong tokens")
        return None

    async def _join(self, socket: Socket, *, admin: bool) -> None:
        async with self._looking:
            if not self._runs:
                await self._look()
                self._runs = True
                self._hub.spawn(self._run())
            self._watching.add(socket)
            if not socket.push(encode(self._snapshot(admin=admin))):
                self._hub.spawn(socket.close(1013, "there is too much to show"))

    def _snapshot(self, *, admin: bool) -> Snapshot:
        tally = self._hub.tally
        live = [
            LiveCard(**msgspec.structs.asdict(card), spark=cards.spark(tally, agent, self._slot - AGENT_SLOTS + 1))
            for agent, card in self._cards.items()
        ]
        assert self._summary is not None
        return Snapshot(
            admin=admin,
            slot=self._slot,
            slot_seconds=SLOT,
            agent_slots=AGENT_SLOTS,
            fleet_slots=FLEET_SLOTS,
            summary=self._summary,
            agents=live,
            more=self._more,
            timeline=cards.timeline(tally, self._slot - FLEET_SLOTS + 1),
            alerts=self._alerts,
        )

    # All of them -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._watching:
                await asyncio.sleep(_SOONEST)
                try:
                    async with asyncio.timeout(_EVERY - _SOONEST):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                await self._tell()
        finally:
            self._runs = False

    async def _tell(self) -> None:
        async with self._looking:
            try:
                frame = encode(await self._look())
            except Exception:  # noqa: BLE001 - the next turn may go well
                _log.exception("the dashboard could not be worked out")
                return
            for socket in list(self._watching):
                if not socket.push(frame):
                    self._watching.discard(socket)
                    self._hub.spawn(socket.close(1013, "it reads too slowly"))

    async def _look(self) -> Update:
        """See what has changed since the last look."""
        hub, tally, since = self._hub, self._hub.tally, self._slot
        self._slot = tally.slot
        update = Update(slot=self._slot)
        agents = cards.shown(hub)
        more, agents = max(len(agents) - MOST_CARDS, 0), agents[:MOST_CARDS]
        active = set(tally.active(since))
        new = {card.agent_id: card for card in await cards.cards(hub, self._stale(agents, active))}
        update.gone = list(self._cards.keys() - set(agents))
        for agent in update.gone:
            del self._cards[agent]
            self._sparks.pop(agent, None)
        for agent in new.keys() | active & set(agents):
            changed = self._changed(agent, new.get(agent), since)
            if len(changed) > 1:
                update.agents.append(changed)
        self._cards.update(new)
        if (summary := cards.summary(hub)) != self._summary:
            self._summary = update.summary = summary
        if more != self._more:
            self._more = update.more = more
        if (alerts := hub.alerts.recent()) != self._alerts:
            self._alerts = update.alerts = alerts
        timeline = cards.timeline(tally, since)
        update.timeline = [point for point in timeline if point not in self._timeline]
        self._timeline = timeline
        return update

    def _stale(self, agents: list[str], active: set[str]) -> list[str]:
        """The agents whose cards have to be made anew."""
        holds, presence = self._hub.gate.effective, self._hub.presence
        if holds is not self._holds:
            self._holds = holds
            return agents
        self._next = self._next + _OTHERS if self._next + _OTHERS < len(agents) else 0
        others = set(agents[self._next : self._next + _OTHERS])  # another hub may have counted something

        def stale(agent: str) -> bool:
            card = self._cards.get(agent)
            known = agent in active or agent in others
            return known or card is None or _restless(card) or card.connected != presence.is_here(agent)

        return [agent for agent in agents if stale(agent)]

    def _changed(self, agent: str, card: AgentCard | None, since: int) -> dict[str, Any]:
        """The agent, and what of its card has changed."""
        found: dict[str, Any] = {"agent_id": agent}
        old = self._cards.get(agent)
        if card is not None:
            for name in card.__struct_fields__:
                value = getattr(card, name)
                if old is None or value != getattr(old, name):
                    found[name] = value
            if old is not None and old.violations == card.violations:
                found.pop("wait_left_ms", None)  # a dashboard can count down by itself
        start = self._slot - AGENT_SLOTS + 1 if old is None else since
        spark = cards.spark(self._hub.tally, agent, start)
        if spark != self._sparks.get(agent, []):
            self._sparks[agent] = found["spark"] = spark
        return found


def _restless(card: AgentCard) -> bool:
    """Whether a card changes by itself: a bucket fills up, a violation is forgotten."""
    return bool(card.violations or card.violations_last_hour or (card.usage and card.usage.used))


async def _refuse(socket: Socket, error: str, detail: str, code: int = 1008) -> None:
    await socket.send(encode(Problem(error=error, detail=detail)))
    await socket.close(code, detail[:120])
