"""The base of the alerts of agents and of accounts: life cycle, task, and the store that hubs share."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from headgate.errors import StoreAway
from headgate.hub.background import BackgroundTasks
from headgate.stores.base import AlertOutcome, SharedAlerts

_INTERVAL: Final = 1.0  # seconds between two comparisons with the store, and two tries to read the agents
_MAX_RECENT: Final = 50  # alerts that are shown

_log = structlog.get_logger("headgate.hub")


class AnyAlert(Protocol):
    """An alert of an agent or an account."""

    @property
    def alert_id(self) -> str: ...
    @property
    def raised_at(self) -> float: ...
    @property
    def resolved_at(self) -> float | None: ...
    @property
    def times(self) -> int: ...


A = TypeVar("A", bound=AnyAlert)
Entry = TypeVar("Entry", bound="OpenAlert[Any]")
StoreOutcome: TypeAlias = AlertOutcome | Literal["away"]
"""The outcome of a change in the store; "away" if there is none, or it doesn't answer."""


class AlertStore:
    """The open alerts in the store that hubs share, if they share one."""

    def __init__(self, shared: SharedAlerts | None, away: Callable[[], bool]) -> None:
        self._shared: Final = shared
        self.is_away = away
        self._next_comparison = 0.0

    @property
    def is_shared(self) -> bool:
        return self._shared is not None

    def is_comparison_due(self) -> bool:
        """Whether to compare with the store now: once a second."""
        now = asyncio.get_running_loop().time()
        if now < self._next_comparison:
            return False
        self._next_comparison = now + _INTERVAL
        return True

    async def put(self, name: str, alert: AnyAlert, known: str) -> tuple[StoreOutcome, str]:
        """Put an alert into the store, in place of the `known` text: see `SharedAlerts.put`."""
        if self._shared is None or self.is_away():
            return "away", ""
        try:
            return await self._shared.put(name, alert.alert_id, known, encoded(alert))
        except StoreAway:
            return "away", ""

    async def end(self, name: str, alert: AnyAlert, known: str) -> StoreOutcome:
        """End an alert in the store: see `SharedAlerts.end`."""
        if self._shared is None:
            return "away"
        try:
            return (await self._shared.end(name, alert.alert_id, known, encoded(alert)))[0]
        except StoreAway:
            return "away"

    async def read(self) -> dict[str, str] | None:
        """The texts of all open alerts, by name; None while the store is away."""
        if self._shared is None or self.is_away():
            return None
        try:
            return await self._shared.read()
        except StoreAway:
            return None


class OpenAlert(Generic[A]):
    """An open alert, and what this hub knows about it."""

    def __init__(self, name: str, alert: A, text: str = "") -> None:
        self.name = name  # under which it is stored
        self.alert = alert
        self.text = text  # as it is in the store; "" if it is not
        self.attempt: A | None = None  # as this hub tried to resolve it in the store


class BaseAlerts(ABC, Generic[A, Entry]):
    """The open and the newest alerts of one kind. They are raised and resolved one after the other, in a task."""

    _FAILURE: ClassVar[str]
    """Logged if `_work` fails."""
    _TOO_MANY: ClassVar[str]
    """Logged once when no more can be opened."""

    def __init__(self, shared: SharedAlerts | None, away: Callable[[], bool]) -> None:
        self._store: Final = AlertStore(shared, away)
        self.resolved = 0
        """The number of alerts that this hub resolved."""
        self._open: Final[dict[str, Entry]] = {}  # by the name under which they are stored
        self._recent: Final[dict[str, A]] = {}  # by id, the newest last
        self._too_many = False
        self._woken: Final = asyncio.Event()
        self._loop: Final = asyncio.get_running_loop()
        self._background: Final = BackgroundTasks()

    @property
    def open(self) -> int:
        """The number of open alerts."""
        return len(self._open)

    def recent(self) -> list[A]:
        """The newest alerts, open or resolved, newest first."""
        return [self._counted(alert) for alert in reversed(self._recent.values())]

    def known(self) -> list[A]:
        """All open alerts and the newest resolved ones, newest first."""
        found = self._recent | {entry.alert.alert_id: entry.alert for entry in self._open.values()}
        return [self._counted(alert) for alert in sorted(found.values(), key=lambda alert: -alert.raised_at)]

    async def start(self) -> None:
        """Start, with the alerts that other hubs have left open."""
        self._background.spawn(self._run())

    async def close(self) -> None:
        """Stop, and leave the open alerts to other hubs."""
        await self._background.cancel()

    async def _run(self) -> None:
        """Work each time that it is woken, and once a second while it polls."""
        while True:
            try:
                await self._work()
            except Exception:  # noqa: BLE001 - the next ones may succeed
                _log.exception(self._FAILURE)
            try:
                async with asyncio.timeout(_INTERVAL if self._is_polling() else None):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()

    def _is_polling(self) -> bool:
        """Whether there is something to do of which no event tells: to look for the alerts of other hubs."""
        return self._store.is_shared

    @abstractmethod
    async def _work(self) -> None:
        """Raise and resolve what is due."""

    def _wake_from_thread(self) -> None:
        """Work soon. May be called in any thread."""
        self._loop.call_soon_threadsafe(self._woken.set)

    def _counted(self, alert: A) -> A:
        """An alert as it is now."""
        return alert

    def _remember(self, alert: A) -> None:
        """Add an alert to the newest, or replace it by what is known of it now; not a resolved one that isn't shown."""
        before = self._recent.get(alert.alert_id)
        if before is not None and before.times != alert.times:
            del self._recent[alert.alert_id]  # raised again, it moves to the front
        if alert.resolved_at is None or alert.alert_id in self._recent:
            self._recent[alert.alert_id] = alert
        if len(self._recent) > _MAX_RECENT:
            del self._recent[next(iter(self._recent))]

    async def _resolve(self, entry: Entry) -> StoreOutcome:
        """Resolve an alert, and say what came of it in the store: with "away" or "other" it may be open still."""
        alert = entry.attempt or self._ended(entry, time.time())
        if entry.text:
            entry.attempt = alert
            outcome = await self._store.end(entry.name, alert, entry.text)
            if outcome != "done":
                return outcome
        self._end(entry, alert, ours=True)
        return "done"

    def _ended(self, entry: Entry, at: float | None) -> A:
        """An open alert as it is once it is resolved."""
        ended: A = replace(self._counted(entry.alert), resolved_at=at)  # type: ignore[type-var]  # it is a Struct
        return ended

    def _end(self, entry: Entry, alert: A, *, ours: bool) -> None:
        """Close an open alert; if this hub has resolved it, send a notification."""
        del self._open[entry.name]
        self._remember(alert)
        if ours:
            self.resolved += 1
            self._notify_resolved(alert)

    @abstractmethod
    def _notify_resolved(self, alert: A) -> None:
        """Log and send an alert that this hub has resolved."""

    def _log_too_many(self) -> None:
        if not self._too_many:
            self._too_many = True
            _log.error(self._TOO_MANY, open=self.open)


def encoded(alert: AnyAlert) -> str:
    """An alert as it is stored."""
    return msgspec.json.encode(alert).decode()
