"""Alerts of accounts: a budget is used to 80 percent, or used up.

The gate of each hub emits an event when it sees that. The first hub to put the alert into the shared store sends the
notification; the others find it there. An alert at 80 percent becomes the one at 100 percent. It is resolved when the
period of the budget ends, or less than 80 percent is used: the budget was raised, or holds were settled for less.

Open alerts are stored beside those of agents, under names that no agent can have. While the store is away, each hub
goes by its own memory. A hub without a shared store looks at the budgets in its file when it starts, and raises the
alerts again.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import ceil
from typing import Final, Literal, TypeAlias
from uuid import uuid4

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from headgate.errors import HeadgateError, InvalidInput, StoreAway
from headgate.events import AccountAlerted
from headgate.gate import Gate
from headgate.gate.account_status import ALERT_SHARES, AccountStatus, LimitStatus, alert_share, has_recovered
from headgate.hub.agents.registry import AgentRecord
from headgate.hub.monitoring.alert_base import BaseAlerts, OpenAlert, StoreOutcome, encoded
from headgate.hub.timer import Timed, Timer
from headgate.limits.budget import Budget
from headgate.limits.clock import Clock
from headgate.limits.notation import parse
from headgate.limits.units import amount_text
from headgate.stores.base import LAST_MOMENT, SharedAlerts
from headgate.stores.memory import in_process

AccountAlertEvent: TypeAlias = Literal["account_alert.raised", "account_alert.resolved"]

MAX_ACCOUNT_ALERTS: Final = 500
"""Alerts of accounts that are open at the same time, so that there is room in the store for those of agents."""
MARK: Final = "\t"
"""Starts the name under which an alert is stored. No agent has such a name."""

_RECHECK: Final = 30_000_000  # microseconds between two looks at the budgets of open alerts
_ROUNDED: Final = 0.001  # seconds by which a moment may be off
_TRIES: Final = 3
_BATCH: Final = 50  # accounts that are read together, before other tasks have their turn

_log = structlog.get_logger("headgate.hub")


class AccountAlert(Struct, frozen=True):
    """A budget of an account is used to a share."""

    alert_id: str
    account: str
    """Its path."""
    resource: str
    tool: str
    """"" unless it is the budget of one tool."""
    share: float
    """0.8, or 1 if it is used up, or a hold was denied after that."""
    limit: str
    resets_at: float | None
    """When the next period begins, in seconds since 1970; None without one."""
    raised_at: float
    """When it was first raised, in seconds since 1970."""
    resolved_at: float | None = None
    """When it was resolved; None while it is open."""
    times: int = 1
    """The number of times that it was raised: again when an 80 percent alert becomes a 100 percent one."""
    left: str = "0"
    """The rest of the budget when the alert was raised last."""


_OpenAlert: TypeAlias = OpenAlert[AccountAlert]


class AccountAlerts(BaseAlerts[AccountAlert, _OpenAlert], Timed):
    """The alerts of accounts. `send` is called with each that this hub raises or resolves.

    `agents` returns the next registered agents after an id.
    """

    _FAILURE = "an alert of an account failed"
    _TOO_MANY = "too many open alerts of accounts: others are dropped until some are resolved"

    def __init__(
        self,
        gate: Gate,
        clock: Clock,
        send: Callable[[AccountAlertEvent, AccountAlert], None],
        agents: Callable[[str], Awaitable[list[AgentRecord]]],
        shared: SharedAlerts | None = None,
        away: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(shared, away)
        self._gate, self._clock, self._send, self._agents = gate, clock, send, agents
        self.raised: Final[Counter[float]] = Counter(dict.fromkeys(ALERT_SHARES, 0))
        """The number of times that this hub raised an alert, by share."""
        self._events: Final[deque[AccountAlerted]] = deque()
        self._due = False  # whether to look at the budgets of open alerts
        memory = in_process(gate.store)
        self._starts_from_file = memory is not None and memory.file is not None  # until its budgets were looked at
        self._failure_logged = False

    def on_alert(self, event: AccountAlerted) -> None:
        """Raise an alert soon. May be called in any thread."""
        if len(self._events) < 2 * MAX_ACCOUNT_ALERTS:  # otherwise it is not opened
            self._events.append(event)
            self._wake_from_thread()

    def recheck(self) -> None:
        """Check now which alerts can be resolved: budgets may have changed."""
        if self._open:
            self._due = True
            self._woken.set()

    async def close(self) -> None:
        await super().close()
        self.stop_timer()

    # One alert after the other ---------------------------------------------------------------------------------------

    async def _work(self) -> None:
        before, worked = len(self._open), False
        try:
            if self._store.is_comparison_due():
                await self._compare()
            worked = self._due or bool(self._events)
            while self._events:
                await self._raise(self._events.popleft())
                await asyncio.sleep(0)  # let other tasks run, however many alerts there are
            if self._due:
                self._due = False
                await self._check_all()
            if self._starts_from_file:
                await self._start_from_file()
        finally:
            if worked or len(self._open) != before:
                self._set_timer()

    def _is_polling(self) -> bool:
        return self._starts_from_file or super()._is_polling()

    async def _start_from_file(self) -> None:
        """Raise the alerts of all budgets as they are in the file. If the agents can't be read, it is tried again."""
        self._starts_from_file = False
        try:
            paths = await self._all_paths()
        except HeadgateError as error:
            self._starts_from_file = True
            if not self._failure_logged:
                self._failure_logged = True
                _log.error("alerts of accounts wait until the agents can be read; said once", error=str(error))
            return
        await self._raise_again(paths)

    async def _all_paths(self) -> list[str]:
        """The paths of all accounts and agents that are registered or named by a rule, if any has a budget."""
        gate = self._gate
        if not gate.effective.accounts.has_budgets:
            return []
        agents = self._paths_of([agent for agent, _ in gate.effective.agents.items()])
        page = await self._agents("")
        while page:
            agents |= self._paths_of([one.agent for one in page])
            page = await self._agents(page[-1].agent)
        return gate.list_accounts() + sorted(agents)  # agents of an account are read together

    def _paths_of(self, agents: list[str]) -> set[str]:
        paths = set()
        for agent in agents:
            with suppress(InvalidInput):  # a damaged name
                paths.add(self._gate.path_of(agent))
        return paths

    async def _raise_again(self, paths: list[str]) -> None:
        """Raise the alerts of some accounts."""
        for start in range(0, len(paths), _BATCH):
            for account in await self._read(paths[start : start + _BATCH]):
                for limit in account.limits:
                    if (event := self._event_of(limit)) is not None:
                        await self._raise(event)
            await asyncio.sleep(0)

    async def _read(self, paths: list[str]) -> list[AccountStatus]:
        """Some accounts, without those that a reload has removed."""
        try:
            return await self._gate.aaccounts(paths)
        except InvalidInput:
            return [found for path in paths for found in await self._read([path])] if len(paths) > 1 else []

    def _event_of(self, limit: LimitStatus) -> AccountAlerted | None:
        """The event that the gate would emit at a hold now; None if there is none."""
        share = alert_share(limit.left, limit.amount)
        if not share or not _is_budget(limit.limit):
            return None
        after = limit.resets_after
        resets_at = None if after is None else float(round(self._clock.wall() + after))
        return AccountAlerted(limit.account, limit.resource, limit.tool, share, limit.limit, resets_at, limit.left)

    async def _raise(self, event: AccountAlerted) -> None:
        """Open an alert, or raise the open one again, and send a notification: unless another hub has."""
        key = _key(event.account, event.resource, event.tool, event.limit)
        for _ in range(_TRIES):
            before = self._open.get(key)
            if before is not None and self._is_over(before.alert):
                await self._resolve(before)
                before = self._open.get(key)
            if before is not None and before.alert.share >= event.share and before.alert.limit == event.limit:
                return
            if before is None and len(self._open) >= MAX_ACCOUNT_ALERTS:
                self._log_too_many()
                return
            alert = _raised(event, None if before is None else before.alert)
            outcome, _ = await self._store.put(key, alert, "" if before is None else before.text)
            if outcome == "full":
                self._log_too_many()
                return
            if outcome in ("done", "away"):
                self._opened(key, alert, encoded(alert) if outcome == "done" else "")
                return
            await self._compare()  # another hub has changed it

    def _opened(self, key: str, alert: AccountAlert, text: str) -> None:
        self._too_many = False
        self._open[key] = _OpenAlert(key, alert, text)
        self.raised[alert.share] += 1
        _log.warning(
            "a budget is used up, or too little is left" if alert.share == 1 else "a budget is nearly used up",
            account=alert.account,
            resource=alert.resource,
            tool=alert.tool,
            limit=alert.limit,
            left=alert.left,
            resets_at=alert.resets_at,
        )
        self._remember(alert)
        self._send("account_alert.raised", alert)

    # Resolved ---------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        """Look again when the first period ends, and from time to time: holds may be settled for less."""
        self.stop_timer()
        if not self._open:
            return
        now, wall = self._clock.now(), self._clock.wall()
        ends = [entry.alert.resets_at for entry in self._open.values() if entry.alert.resets_at is not None]
        # One that should be over, and isn't resolved yet, is tried again after a second.
        waits = [min(ceil((end - wall) * 1_000_000), _RECHECK) if end > wall else 1_000_000 for end in ends]
        self.timer = Timer(self._clock, now + min(waits, default=_RECHECK), self.recheck)

    async def _check_all(self) -> None:
        by_account: dict[str, list[str]] = {}
        for key, entry in list(self._open.items()):
            if self._open.get(key) is not entry:
                continue  # another hub was first, as a comparison has shown since
            if self._is_over(entry.alert):
                await self._resolve(entry)
            else:
                by_account.setdefault(entry.alert.account, []).append(key)
        if self._store.is_away():
            return  # this hub's own memory knows too little; checked again after a while
        accounts = sorted(by_account)  # those of one top account are read together
        for start in range(0, len(accounts), _BATCH):
            batch = accounts[start : start + _BATCH]
            try:
                limits = {one.path: one.limits for one in await self._read(batch)}
            except StoreAway:
                return
            for account in batch:
                for key in by_account[account]:
                    if (left := self._open.get(key)) is not None:
                        await self._check(left, limits.get(account, ()))  # the policy may have no such account any more
            await asyncio.sleep(0)

    def _is_over(self, alert: AccountAlert) -> bool:
        """Whether the period has ended."""
        return alert.resets_at is not None and alert.resets_at <= self._clock.wall() + _ROUNDED

    async def _check(self, entry: _OpenAlert, limits: tuple[LimitStatus, ...]) -> None:
        """Resolve an alert if less is used now, or take a changed budget over."""
        alert = entry.alert
        same = [one for one in limits if _key(one.account, one.resource, one.tool, one.limit) == entry.name]
        used = alert_share(same[0].left, same[0].amount) if same else 0.0
        if not used:
            if not same or same[0].limit != alert.limit or has_recovered(same[0].left, same[0].amount):
                await self._resolve(entry)
        elif same[0].limit != alert.limit:
            if used > alert.share:
                told = (used, same[0].limit, alert.resets_at, same[0].left)
                await self._raise(AccountAlerted(alert.account, alert.resource, alert.tool, *told))
                return
            changed = replace(alert, share=used, limit=same[0].limit, left=amount_text(same[0].left))
            outcome, _ = await self._store.put(entry.name, changed, entry.text)
            if outcome in ("done", "away"):
                entry.alert, entry.attempt = changed, None
                entry.text = encoded(changed) if outcome == "done" else entry.text
                self._remember(changed)

    async def _resolve(self, entry: _OpenAlert) -> StoreOutcome:
        outcome = await super()._resolve(entry)  # while the store is away, it is checked again after a while
        if outcome == "other":
            await self._compare()  # another hub was first
        return outcome

    def _notify_resolved(self, alert: AccountAlert) -> None:
        _log.info("a budget is available again", account=alert.account, resource=alert.resource, tool=alert.tool)
        self._send("account_alert.resolved", alert)

    # The shared store ------------------------------------------------------------------------------------------------

    async def _compare(self) -> None:
        """Take over the changes that other hubs have made to the open alerts."""
        every = await self._store.read()
        if every is None:
            return
        found = {key: text for key, text in every.items() if key.startswith(MARK)}
        for key, entry in list(self._open.items()):
            if found.get(key, "") != entry.text or not entry.text:
                await self._missing(entry)
        for key, text in found.items():
            entry_here = self._open.get(key)
            alert = None if entry_here is not None and entry_here.text == text else _decoded(key, text)
            if alert is not None:
                self._open[key] = _OpenAlert(key, alert, text)
                self._remember(alert)

    async def _missing(self, entry: _OpenAlert) -> None:
        """An alert isn't in the store as it was: another hub has changed or resolved it, or the store has lost it."""
        alert = entry.alert
        outcome, found = await self._store.put(entry.name, alert, "")
        there = _decoded(entry.name, found)
        if outcome == "done":
            entry.text, entry.attempt = encoded(alert), None
        elif outcome == "ended" and there is not None:
            # Ours, if our resolution succeeded without an answer.
            self._end(entry, self._ended(entry, there.resolved_at), ours=there == entry.attempt)
        elif outcome == "other" and there is not None and there.alert_id != alert.alert_id:
            # Another hub has raised it, too, while the store was away; or resolved this one, and raised the next.
            self._end(entry, self._ended(entry, time.time()), ours=not entry.text)


def _raised(event: AccountAlerted, before: AccountAlert | None) -> AccountAlert:
    told = (event.account, event.resource, event.tool, event.share, event.limit, event.resets_at)
    left = amount_text(event.left)
    if before is None:
        return AccountAlert(uuid4().hex, *told, raised_at=time.time(), left=left)
    return AccountAlert(before.alert_id, *told, raised_at=before.raised_at, times=before.times + 1, left=left)


def _key(account: str, resource: str, tool: str, limit: str) -> str:
    """The name under which the alert of a budget is stored: the same whatever its amount, and for no agent."""
    try:
        identity = str(parse(limit).identity)
    except HeadgateError:  # a limit that isn't a budget
        identity = limit
    return f"{MARK}{account}\t{resource}\t{tool}\t{identity}"


def _is_budget(limit: str) -> bool:
    try:
        return isinstance(parse(limit), Budget)
    except HeadgateError:
        return False


def _decoded(key: str, text: str) -> AccountAlert | None:
    """An alert as a hub has written it; None if it is invalid. Fields of later versions are ignored."""
    try:
        alert = msgspec.json.decode(text, type=AccountAlert)
    except msgspec.DecodeError:
        return None
    numbers = (alert.raised_at, alert.resolved_at or 0, alert.resets_at or 0, alert.times)
    valid = alert.share in ALERT_SHARES and all([0 <= number <= LAST_MOMENT for number in numbers])
    return alert if valid and _key(alert.account, alert.resource, alert.tool, alert.limit) == key else None
