"""Alerts: one notification when an agent has too many violations, and one when it has been quiet again.

The gate emits an event at too many violations, once for all hubs that share a store. From then on the agent has an open
alert, until its quiet period has passed, its violations were reset, or it was exempted. If the gate emits another event
meanwhile, which it does after its window at the earliest, the same alert is raised once more. Each hub goes on counting
the violations that it records itself while an alert is open.

Hubs that share a store keep the open alerts there, and compare them once a second. The hub that has raised an alert
also resolves it; if it fails to, another hub does so a little later: the one that removes it from the store. While the
store is away, each hub goes by its own memory, and alerts in the store are resolved when it is back.
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

from headgate.events import Alerted, Violated
from headgate.gate import Gate
from headgate.hub.monitoring.alert_base import BaseAlerts, OpenAlert, encoded
from headgate.hub.monitoring.denials import DenialLog, DeniedAction
from headgate.hub.timer import Timed, Timer
from headgate.limits.clock import Clock
from headgate.limits.numbers import microseconds
from headgate.stores.base import LAST_MOMENT, MAX_ALERTS, SharedAlerts

AlertEvent: TypeAlias = Literal["alert.raised", "alert.resolved"]

_MAX_ACTIONS: Final = 3  # that an alert names
_GRACE: Final = 2_000_000  # microseconds for which an alert is left to the hub that has raised it
_TRIES: Final = 3

_log = structlog.get_logger("headgate.hub")


class Alert(Struct, frozen=True):
    """An agent has had `violations` violations within `within` seconds."""

    alert_id: str
    agent_id: str
    violations: int
    within: float
    raised_at: float
    """When it was first raised, in seconds since 1970."""
    resolved_at: float | None = None
    """When it was resolved; None while it is open."""
    times: int = 1
    """The number of times that it was raised: again after each window in which the agent was not quiet."""
    total: int = 0
    """All violations: those that raised it, and those that this hub has recorded since."""
    actions: tuple[DeniedAction, ...] = ()
    """The actions that were denied most often when it was raised, at most three."""
    address: str = ""
    """Where the last request came from that was denied before it was raised; "" if unknown."""


class _OpenAlert(OpenAlert[Alert], Timed):
    """An open alert; it is stored under the name of its agent."""

    def __init__(self, alert: Alert) -> None:
        super().__init__(alert.agent_id, alert)
        self.own = False  # whether this hub raised it last
        self.grace_over = False  # whether the hub that raised it had its time to resolve it


class Alerts(BaseAlerts[Alert, _OpenAlert]):
    """The alerts of the fleet. `send` is called with each that this hub raises or resolves."""

    _FAILURE = "an alert failed"
    _TOO_MANY = "too many open alerts: others are only logged until some are resolved"

    def __init__(
        self,
        gate: Gate,
        clock: Clock,
        denials: DenialLog,
        send: Callable[[AlertEvent, Alert], None],
        shared: SharedAlerts | None = None,
        away: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(shared, away)
        self._gate, self._clock, self._denials = gate, clock, denials
        self._send: Final = send
        self.raised = 0
        """The number of times that this hub raised an alert."""
        self._totals: Final[dict[str, int]] = {}  # violations of the agents with an open alert
        self._events: Final[deque[Alerted]] = deque()
        self._due: Final[dict[str, None]] = {}

    def _counted(self, alert: Alert) -> Alert:
        """An alert with all violations up to now, if it is open."""
        entry = self._open.get(alert.agent_id)
        if entry is None or entry.alert.alert_id != alert.alert_id:
            return alert
        return replace(alert, total=self._totals.get(alert.agent_id, alert.total))

    def on_violation(self, event: Violated) -> None:
        """Count it, if the agent has an alert. May be called in any thread."""
        if event.agent in self._totals:
            self._totals[event.agent] += 1

    def on_alert(self, event: Alerted) -> None:
        """Raise an alert soon. May be called in any thread."""
        if len(self._totals) < 2 * MAX_ALERTS:  # otherwise it is not opened
            self._totals.setdefault(event.agent, event.violations)
        self._events.append(event)
        self._wake_from_thread()

    def recheck(self) -> None:
        """Check now which alerts can be resolved: agents may have been exempted, or their violations reset."""
        self._due.update(dict.fromkeys(self._open))
        self._woken.set()

    async def close(self) -> None:
        await super().close()
        for entry in self._open.values():
            entry.stop_timer()

    # One alert after the other ---------------------------------------------------------------------------------------

    async def _work(self) -> None:
        if self._store.is_comparison_due():
            await self._compare()
        while self._events or self._due:
            if self._events:
                await self._raise(self._events.popleft())
            else:
                await self._check(self._due.popitem()[0])
            await asyncio.sleep(0)  # let other tasks run, however many alerts there are

    async def _raise(self, event: Alerted) -> None:
        """Open an alert, or raise the open one again, and send a notification."""
        agent = event.agent
        if self._gate.is_blocked(agent):  # an operator has acted: it may go on trying for hours
            return
        self.raised += 1
        _log.warning(
            "many violations",
            agent=agent,
            violations=event.violations,
            within=event.window,
            actions=[f"{one.channel} {one.action or one.tier}: {one.last_hour}" for one in self._actions(agent)],
            address=self._denials.address(agent),
        )
        try:
            entry = await self._open_or_renew(event)
            if entry is None:
                self._log_too_many()
                return
            self._open[agent] = entry
        finally:
            if agent not in self._open:
                self._totals.pop(agent, None)
        self._too_many = False
        self._remember(entry.alert)
        self._send("alert.raised", entry.alert)
        await self._check(agent)

    async def _open_or_renew(self, event: Alerted) -> _OpenAlert | None:
        """The alert, open here and in the store, if that is not away; None if too many are open."""
        tries = 0
        while True:
            before = self._open.get(event.agent)
            if before is None and len(self._open) >= MAX_ALERTS:
                return None
            alert = self._raised(event, None if before is None else before.alert)
            entry = before or _OpenAlert(alert)
            outcome, _ = await self._store.put(entry.name, alert, entry.text)
            tries += 1
            if outcome != "other" or tries == _TRIES:
                break
            await self._compare()  # another hub has changed it
        if outcome == "full":
            return None
        entry.alert, entry.own, entry.attempt = alert, True, None
        if outcome != "away":
            entry.text = encoded(alert) if outcome == "done" else ""
        return entry

    def _raised(self, event: Alerted, before: Alert | None) -> Alert:
        if before is None:
            before = Alert(uuid4().hex, event.agent, event.violations, event.window, time.time(), times=0)
        return replace(
            before,
            violations=event.violations,
            within=event.window,
            times=before.times + 1,
            total=self._totals.setdefault(event.agent, event.violations),
            actions=self._actions(event.agent),
            address=self._denials.address(event.agent),
        )

    def _actions(self, agent: str) -> tuple[DeniedAction, ...]:
        """The actions that an agent was denied most often."""
        return tuple(self._denials.actions(agent)[:_MAX_ACTIONS])

    async def _check(self, agent: str) -> None:
        """Resolve an agent's alert if its quiet period has passed, or check again when it will have."""
        entry = self._open.get(agent)
        if entry is None:
            return
        entry.stop_timer()
        now = self._clock.now()  # before the answer, which may take a while: rather check too early than too late
        standing = await self._gate.astanding(agent)
        if entry.text and self._store.is_away():
            return  # this hub's own memory knows too little; checked again when the store is back
        if standing and not self._gate.always_passes(agent):
            entry.grace_over, entry.attempt = False, None
            self._check_at(entry, now + microseconds("quiet_left", standing.quiet_left))
        elif entry.text and not entry.own and not entry.grace_over:
            entry.grace_over = True
            self._check_at(entry, now + _GRACE)
        else:
            # If another hub was first, the next comparison shows the result.
            await self._resolve(entry)

    def _check_at(self, entry: _OpenAlert, when: int) -> None:
        agent = entry.alert.agent_id

        def due() -> None:
            self._due[agent] = None
            self._woken.set()

        entry.timer = Timer(self._clock, when, due)

    def _end(self, entry: _OpenAlert, alert: Alert, *, ours: bool) -> None:
        entry.stop_timer()
        self._totals.pop(alert.agent_id, None)
        super()._end(entry, alert, ours=ours)

    def _notify_resolved(self, alert: Alert) -> None:
        _log.info("quiet again", agent=alert.agent_id)
        self._send("alert.resolved", alert)

    # The shared store ------------------------------------------------------------------------------------------------

    async def _compare(self) -> None:
        """Take over the changes that other hubs have made to the open alerts."""
        found = await self._store.read()
        if found is None:
            return
        for agent, text in found.items():
            entry = self._open.get(agent)
            alert = None if entry is not None and entry.text == text else _decoded(text)
            if alert is not None and alert.agent_id == agent:
                await self._take_over(entry, alert, text)
        for agent, entry in list(self._open.items()):
            if entry.text and agent not in found:
                await self._missing(entry)
            if entry.timer is None:
                self._due[agent] = None

    async def _take_over(self, entry: _OpenAlert | None, alert: Alert, text: str) -> None:
        """Another hub has opened or renewed an alert."""
        if entry is not None and entry.alert.alert_id != alert.alert_id:
            await self._missing(entry)
            entry = self._open.get(alert.agent_id)
            if entry is not None:
                return  # the store is away now
        if entry is None:
            entry = self._open[alert.agent_id] = _OpenAlert(alert)
            self._remember(alert)
        elif entry.alert != alert:
            entry.alert, entry.own, entry.grace_over = alert, False, False
            self._remember(alert)
        known = alert.total or alert.violations  # an older hub writes no total
        self._totals[alert.agent_id] = max(known, self._totals.get(alert.agent_id, 0))
        entry.text = text

    async def _missing(self, entry: _OpenAlert) -> None:
        """An alert is no longer in the store: another hub has resolved it, or the store has lost it."""
        alert = entry.alert
        outcome, found = await self._store.put(entry.name, alert, "")
        there = _decoded(found)
        if outcome == "ended" and there is not None:
            # Ours, if our resolution succeeded without an answer, or if we have raised it again and nobody else knows.
            ours = there == entry.attempt or alert.times > there.times
            self._end(entry, self._ended(entry, there.resolved_at), ours=ours)
        elif outcome == "other" and (there is None or there.alert_id != alert.alert_id):
            self._end(entry, self._ended(entry, time.time()), ours=entry.own)


def _decoded(text: str) -> Alert | None:
    """An alert as a hub has written it; None if it is invalid. Fields of later versions are ignored."""
    try:
        alert = msgspec.json.decode(text, type=Alert)
    except msgspec.DecodeError:
        return None
    numbers = [alert.violations, alert.within, alert.raised_at, alert.resolved_at or 0, alert.times, alert.total]
    numbers += [number for action in alert.actions for number in (action.last_minute, action.last_hour)]
    return alert if all([0 <= number <= LAST_MOMENT for number in numbers]) else None  # no clients read larger ones
