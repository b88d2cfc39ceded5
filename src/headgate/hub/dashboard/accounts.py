"""The accounts on the dashboard: what each has spent, holds and has left, the worst first.

Nobody waits for these figures. They are read in the background while a dashboard is open, a bounded number at a time:
first those of the agents that made holds at this hub, then those that were read longest ago. So whatever the number of
accounts, the store is asked at the same pace, and the figures of the others are somewhat older.
"""

import asyncio
from collections.abc import Callable
from heapq import nsmallest
from time import perf_counter
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from headgate.errors import HeadgateError, InvalidInput
from headgate.events import Event, HoldChecked
from headgate.gate import Gate
from headgate.gate.account_status import AccountStatus, LimitStatus
from headgate.gate.accounts import path_prefixes
from headgate.limits.clock import Clock
from headgate.limits.units import amount_text
from headgate.stores.holds import AccountStore

MAX_ACCOUNTS: Final = 500
"""Accounts that a dashboard shows: those of which the largest share is used, and the accounts above them."""
MAX_READ: Final = 100
"""Accounts that are read in one pass."""
MAX_LIMITS: Final = 20
"""Limits of one account that are shown."""

_INTERVAL: Final = 1.0  # seconds between two passes, at least
_BATCH: Final = 20  # accounts that are read before other tasks have their turn
_MAX_TIME: Final = 0.5  # seconds of one pass
_LIST_INTERVAL: Final = 5.0  # seconds between two lists of all accounts, while they change
_MAX_TOUCHED: Final = 1000  # agents whose holds are noted between two passes
_SAME_MOMENT: Final = 1.5  # seconds by which one moment may be off

_log = structlog.get_logger("headgate.hub")


class LimitCard(Struct, frozen=True):
    """One limit of an account. Amounts are texts, so that no decimal is lost."""

    account: str
    level: str
    resource: str
    tool: str
    """"" unless it is the limit of one tool."""
    limit: str
    amount: str
    spent: str
    held: str
    """By holds that are open."""
    left: str
    used: float
    """The share that is spent or held, from 0 to 1."""
    resets_at: float | None
    """When all that was spent has come back, in seconds since 1970; None if it never does, or nothing is spent."""


class AccountCard(Struct, frozen=True):
    """The state of one account."""

    path: str
    level: str
    plan: str
    used: float
    """Of the limit of which the largest share is used."""
    limits: list[LimitCard]
    """The one of which the largest share is used comes first; at most 20."""
    more_limits: int
    """The number of its limits that aren't listed."""


def limit_card(status: LimitStatus, wall: float) -> LimitCard:
    """A limit as it is shown."""
    after = status.resets_after
    return LimitCard(
        account=status.account,
        level=status.level,
        resource=status.resource,
        tool=status.tool,
        limit=status.limit,
        amount=amount_text(status.amount),
        spent=amount_text(status.spent),
        held=amount_text(status.held),
        left=amount_text(status.left),
        used=round(min(max(status.used, 0.0), 1.0), 4),
        resets_at=round(wall + after) if after else None,
    )


def _card(status: AccountStatus, wall: float, before: AccountCard | None) -> AccountCard:
    limits = sorted([limit_card(one, wall) for one in status.limits], key=lambda one: -one.used)
    used, more = max([one.used for one in limits], default=0.0), max(len(limits) - MAX_LIMITS, 0)
    card = AccountCard(status.path, status.level, status.plan, used, limits[:MAX_LIMITS], more)
    return before if before is not None and _same(card, before) else card


def _same(one: AccountCard, other: AccountCard) -> bool:
    """Whether two cards show the same: moments are computed anew each time, and off by fractions of a second."""
    return _without_moments(one) == _without_moments(other) and all(
        [
            (mine.resets_at is None) == (theirs.resets_at is None)
            and abs((mine.resets_at or 0) - (theirs.resets_at or 0)) < _SAME_MOMENT
            for mine, theirs in zip(one.limits, other.limits, strict=True)
        ]
    )


def _without_moments(card: AccountCard) -> AccountCard:
    return replace(card, limits=[replace(one, resets_at=None) for one in card.limits])


class AccountReader:
    """Reads the accounts of a gate, again and again."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate, self._clock = gate, clock
        self._cards: Final[dict[str, AccountCard]] = {}
        self._read_at: Final[dict[str, float]] = {}  # by path, on the loop's clock; the oldest first, 0 if unread
        self._touched: Final[dict[str, None]] = {}  # agents that made holds
        self._effective: object = None
        self._listed_at = 0.0
        self._failure = ""
        self._running = False

    @property
    def total(self) -> int:
        """The number of all accounts."""
        return len(self._read_at)

    def shown(self) -> dict[str, AccountCard]:
        """The accounts to show, by path."""
        if len(self._cards) <= MAX_ACCOUNTS:
            return dict(self._cards)
        worst = nsmallest(MAX_ACCOUNTS, self._cards.values(), key=lambda card: (-card.used, card.path))
        found: dict[str, AccountCard] = {}
        for card in worst:
            line = [self._cards.get(path) for path in path_prefixes(card.path)]
            missing = {one.path: one for one in line if one is not None and one.path not in found}
            if len(found) + len(missing) > MAX_ACCOUNTS:
                break
            found |= missing
        return found

    def age(self, paths: list[str]) -> int:
        """How old the oldest figures of some accounts are, in whole seconds."""
        now = asyncio.get_running_loop().time()
        return int(max([now - self._read_at[path] for path in paths if path in self._read_at], default=0.0))

    async def run(self, wanted: Callable[[], bool], on_change: Callable[[], None]) -> None:
        """Read while it is wanted. `on_change` is called after each pass that has changed anything."""
        if self._running or not isinstance(self._gate.store, AccountStore):
            return
        self._running = True
        stop = self._gate.subscribe(self._on_event, HoldChecked)
        try:
            while wanted():
                began = perf_counter()
                before = dict(self._cards)
                await self._pass()
                if before != self._cards:
                    on_change()
                # The hub and its store have twice as much time for everything else.
                await asyncio.sleep(max(2 * (perf_counter() - began), _INTERVAL))
        finally:
            stop()
            self._running = False

    def _on_event(self, event: Event) -> None:
        if isinstance(event, HoldChecked) and len(self._touched) < _MAX_TOUCHED:
            self._touched[event.agent] = None

    async def _pass(self) -> None:
        """Read some accounts."""
        began, now = perf_counter(), asyncio.get_running_loop().time()
        self._list(now)
        due = self._due()
        try:
            for start in range(0, len(due), _BATCH):
                for status in await self._gate.aaccounts(due[start : start + _BATCH]):
                    self._take(status, now)
                await asyncio.sleep(0)  # in memory nothing waits, and many accounts take long
                if perf_counter() - began > _MAX_TIME:
                    break
        except InvalidInput:  # a reload has removed one of them
            self._effective = None
        except HeadgateError as error:  # the store is away: the figures get older, and the page says so
            self._log_failure(str(error))
            return
        self._failure = ""

    def _take(self, status: AccountStatus, now: float) -> None:
        path = status.path
        if self._read_at.pop(path, None) is not None:
            self._read_at[path] = now  # the newest comes last
            self._cards[path] = _card(status, self._clock.wall(), self._cards.get(path))

    def _list(self, now: float) -> None:
        """List the accounts again, if anything has changed; not too often, since agents may register all the time."""
        effective = self._gate.effective
        if effective is self._effective or (self._effective is not None and now - self._listed_at < _LIST_INTERVAL):
            return
        self._effective, self._listed_at = effective, now
        paths = self._gate.list_accounts()
        gone = self._read_at.keys() - set(paths)
        new = [path for path in paths if path not in self._read_at]
        known = [(path, at) for path, at in self._read_at.items() if path not in gone]
        self._read_at.clear()
        self._read_at.update(dict.fromkeys(new, 0.0))
        self._read_at.update(known)
        for path in gone:
            self._cards.pop(path, None)

    def _due(self) -> list[str]:
        """The accounts to read: those above agents with new holds, then those that were read longest ago."""
        touched: dict[str, None] = {}
        for agent in list(self._touched):
            touched |= dict.fromkeys(path_prefixes(self._gate.path_of(agent))[:-1])
        self._touched.clear()
        due = dict.fromkeys([path for path in touched if path in self._read_at][: MAX_READ // 2])
        for path in self._read_at:
            if len(due) >= MAX_READ:
                break
            due[path] = None
        return sorted(due)  # accounts of one root are read together

    def _log_failure(self, failure: str) -> None:
        if failure != self._failure:
            self._failure = failure
            _log.warning("the accounts can't be read", reason=failure)
