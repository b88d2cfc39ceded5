"""Alerts: one notification when an agent has had too many violations, and one when it has been quiet again.

The gate says when there are too many, once for all hubs that share a server. From then on the alert is open, one for
each agent, until the agent's quiet period has passed, its violations were reset, or it was exempted. If the gate says
so again meanwhile, which it does after its window at the earliest, the same alert is raised once more.

Hubs that share a server keep the open alerts there, and look at them once a second. The hub that has raised one also
resolves it; if it doesn't, another does, a little later: whichever takes it out of the server. While that is away,
each hub goes by what it knows, and what stands in the server is resolved when it is back.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, TypeAlias
from uuid import uuid4

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from headgate.errors import StoreAway
from headgate.events import Alerted
from headgate.gate import Gate
from headgate.hub.timer import Timer
from headgate.limits.clock import Clock
from headgate.limits.numbers import microseconds
from headgate.stores.redis.alerts import MOST, Outcome, RedisAlerts

Happening: TypeAlias = Literal["alert.raised", "alert.resolved"]

_KEPT: Final = 50  # alerts that are shown
_EVERY: Final = 1.0  # seconds between two looks at the server
_PATIENCE: Final = 2_000_000  # microseconds for which an alert is left to the hub that has raised it
_TRIES: Final = 3

_log = structlog.get_logger("headgate.hub")


class Alert(Struct, frozen=True):
    """An agent has had so many violations within so many seconds."""

    alert_id: str
    agent_id: str
    violations: int
    within: float
    raised_at: float
    """When it was raised first, in seconds since 1970."""
    resolved_at: float | None = None
    """When the agent had been quiet; None while it has not."""
    times: int = 1
    """How often it was raised: again after each window in which the agent has not been quiet."""


class _Open:
    """An alert that is open, and what this hub knows of it."""

    __slots__ = ("alert", "attempt", "mine", "patient", "text", "timer")

    def __init__(self, alert: Alert) -> None:
        self.alert = alert
        self.text = ""  # as it stands in the server; "" if it doesn't
        self.mine = False  # whether it was raised here, the last time
        self.patient = False  # whether the hub that has raised it was waited for
        self.attempt: Alert | None = None  # as it was taken out of the server, if that didn't fail
        self.timer: Timer | None = None


class Alerts:
    """The alerts of the fleet. `send` is called with those that this hub has to tell others of."""

    def __init__(
        self,
        gate: Gate,
        clock: Clock,
        send: Callable[[Happening, Alert], None],
        shared: RedisAlerts | None = None,
        away: Callable[[], bool] = lambda: False,
    ) -> None:
        self._gate, self._clock, self._send, self._shared, self._away = gate, clock, send, shared, away
        self.raised = 0
        """How often an alert was raised by this hub."""
        self.resolved = 0
        """How many were resolved by it."""
        self._open: Final[dict[str, _Open]] = {}
        self._recent: Final[dict[str, Alert]] = {}
        self._news: Final[deque[Alerted]] = deque()
        self._due: Final[dict[str, None]] = {}
        self._wake: Final = asyncio.Event()
        self._next_look = 0.0
        self._too_many = False
        self._loop: Final = asyncio.get_running_loop()
        self._worker: asyncio.Task[None] | None = None

    @property
    def open(self) -> int:
        """How many are open."""
        return len(self._open)

    def recent(self) -> list[Alert]:
        """The newest alerts, open ones and resolved ones, newest first."""
        return list(reversed(self._recent.values()))

    def on_alert(self, event: Alerted) -> None:
        """Raise an alert. It may be called in any thread, and only makes a note."""
        self._news.append(event)
        self._loop.call_soon_threadsafe(self._wake.set)

    def recheck(self) -> None:
        """Somebody may have been exempted, or their violations reset: see whether alerts are to be resolved."""
        self._due.update(dict.fromkeys(self._open))
        self._wake.set()

    async def start(self) -> None:
        """Begin, with those that other hubs have left open."""
        self._worker = self._loop.create_task(self._work())

    async def close(self) -> None:
        """Leave the open ones to other hubs."""
        while self._worker is not None and not self._worker.done():
            self._worker.cancel()  # again, since Python 3.11 can lose a cancellation in redis-py
            await asyncio.wait([self._worker], timeout=0.05)
        for entry in self._open.values():
            _stop(entry)

    # One thing after the other ---------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception:  # noqa: BLE001 - whatever it is, it goes on
                _log.exception("an alert could not be worked out")
            try:
                async with asyncio.timeout(None if self._shared is None else _EVERY):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _turn(self) -> None:
        if self._loop.time() >= self._next_look:
            self._next_look = self._loop.time() + _EVERY
            await self._compare()
        while self._news or self._due:
            if self._news:
                await self._raise(self._news.popleft())
            else:
                await self._look(self._due.popitem()[0])
            await asyncio.sleep(0)  # agents have their turn too, however many alerts there are

    async def _raise(self, event: Alerted) -> None:
        """Open an alert, or raise the open one again, and tell of it."""
        agent = event.agent
        self.raised += 1
        _log.warning("many violations", agent=agent, violations=event.violations, within=event.window)
        entry = await self._place(event)
        if entry is None:
            self._say_too_many()
            return
        self._too_many = False
        self._open[agent] = entry
        self._show(entry.alert)
        self._send("alert.raised", entry.alert)
        await self._look(agent)

    async def _place(self, event: Alerted) -> _Open | None:
        """What is open from now on, here and, if it is there, in the server; None if too many are."""
        tries = 0
        while True:
            before = self._open.get(event.agent)
            if before is None and len(self._open) >= MOST:
                return None
            alert = _raised(event, None if before is None else before.alert)
            entry, text = before or _Open(alert), _encoded(alert)
            outcome, _ = await self._put(alert, entry.text, text)
            tries += 1
            if outcome != "other" or tries == _TRIES:
                break
            await self._compare()  # another hub has changed something
        if outcome == "full":
            return None
        entry.alert, entry.mine, entry.attempt = alert, True, None
        if outcome != "away":
            entry.text = text if outcome == "done" else ""
        return entry

    async def _look(self, agent: str) -> None:
        """Resolve an agent's alert if it has been quiet, or look again when it will have been."""
        entry = self._open.get(agent)
        if entry is None:
            return
        _stop(entry)
        now = self._clock.now()  # before the answer, which may take a while: rather look too early than too late
        standing = await self._gate.astanding(agent)
        if entry.text and self._away():
            return  # that was said by this hub's memory, which knows little; it is looked again when the server is back
        if standing and not self._gate.is_exempt(agent):
            entry.patient, entry.attempt = False, None
            self._look_at(entry, now + microseconds("quiet_left", standing.quiet_left))
        elif entry.text and not entry.mine and not entry.patient:
            entry.patient = True
            self._look_at(entry, now + _PATIENCE)
        else:
            await self._resolve(entry)

    def _look_at(self, entry: _Open, when: int) -> None:
        agent = entry.alert.agent_id

        def due() -> None:
            self._due[agent] = None
            self._wake.set()

        entry.timer = Timer(self._clock, when, due)

    async def _resolve(self, entry: _Open) -> None:
        alert = entry.attempt or replace(entry.alert, resolved_at=time.time())
        if entry.text and self._shared is not None:
            entry.attempt = alert
            try:
                outcome, _ = await self._shared.end(alert.agent_id, alert.alert_id, entry.text, _encoded(alert))
            except StoreAway:
                return  # it is looked again when the server is back
            if outcome != "done":
                return  # another hub was first; the next look at the server says what it has done
        self._end(entry, alert, ours=True)

    def _end(self, entry: _Open, alert: Alert, *, ours: bool) -> None:
        """An open alert has been resolved, and if it was by this hub, others are told."""
        _stop(entry)
        del self._open[alert.agent_id]
        self._show(alert)
        if ours:
            self.resolved += 1
            _log.info("quiet again", agent=alert.agent_id)
            self._send("alert.resolved", alert)

    # The server ------------------------------------------------------------------------------------------------------

    async def _put(self, alert: Alert, known: str, text: str) -> tuple[Outcome | Literal["away"], str]:
        """Have an alert stand in the server, if there is one."""
        if self._shared is None or self._away():
            return "away", ""
        try:
            return await self._shared.put(alert.agent_id, alert.alert_id, known, text)
        except StoreAway:
            return "away", ""

    async def _compare(self) -> None:
        """Take over what other hubs have done with the open alerts."""
        if self._shared is None or self._away():
            return
        try:
            found = await self._shared.read()
        except StoreAway:
            return
        for agent, text in found.items():
            entry = self._open.get(agent)
            alert = None if entry is not None and entry.text == text else _decoded(text)
            if alert is not None and alert.agent_id == agent:
                await self._take_over(entry, alert, text)
        for agent, entry in list(self._open.items()):
            if entry.text and agent not in found:
                await self._miss(entry)
            if entry.timer is None:
                self._due[agent] = None

    async def _take_over(self, entry: _Open | None, alert: Alert, text: str) -> None:
        """Another hub has opened or renewed an alert."""
        if entry is not None and entry.alert.alert_id != alert.alert_id:
            await self._miss(entry)
            entry = self._open.get(alert.agent_id)
            if entry is not None:
                return  # the server has gone away
        if entry is None:
            entry = self._open[alert.agent_id] = _Open(alert)
            self._show(alert)
        elif entry.alert != alert:
            entry.alert, entry.mine, entry.patient = alert, False, False
            self._show(alert)
        entry.text = text

    async def _miss(self, entry: _Open) -> None:
        """An alert no longer stands in the server: another hub has resolved it, or the server has lost it."""
        alert = entry.alert
        outcome, found = await self._put(alert, "", _encoded(alert))
        there = _decoded(found)
        if outcome == "ended" and there is not None:
            # It was us, if we only weren't told that it was done; or we have raised it again, and nobody knows of that.
            ours = there == entry.attempt or alert.times > there.times
            self._end(entry, replace(alert, resolved_at=there.resolved_at), ours=ours)
        elif outcome == "other" and (there is None or there.alert_id != alert.alert_id):
            self._end(entry, replace(alert, resolved_at=time.time()), ours=entry.mine)

    # Who is told -----------------------------------------------------------------------------------------------------

    def _show(self, alert: Alert) -> None:
        before = self._recent.get(alert.alert_id)
        if before is not None and before.times != alert.times:
            del self._recent[alert.alert_id]  # raised again, it is the newest
        if alert.resolved_at is None or alert.alert_id in self._recent:
            self._recent[alert.alert_id] = alert
        if len(self._recent) > _KEPT:
            del self._recent[next(iter(self._recent))]

    def _say_too_many(self) -> None:
        if not self._too_many:
            self._too_many = True
            _log.error("too many open alerts: others are only logged until some are resolved", open=len(self._open))


def _raised(event: Alerted, before: Alert | None) -> Alert:
    if before is None:
        return Alert(uuid4().hex, event.agent, event.violations, event.window, time.time())
    return replace(before, violations=event.violations, within=event.window, times=before.times + 1)


def _stop(entry: _Open) -> None:
    if entry.timer is not None:
        entry.timer.cancel()
        entry.timer = None


def _encoded(alert: Alert) -> str:
    return msgspec.json.encode(alert).decode()


def _decoded(text: str) -> Alert | None:
    """An alert as a hub has written it; None if it is none. What a later version has added to it is left out."""
    try:
        return msgspec.json.decode(text, type=Alert)
    except msgspec.DecodeError:
        return None
