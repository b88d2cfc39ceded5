"""What the alerts of agents and of accounts have in common: their task, the shared store, and the newest of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Generic, Literal, Protocol, TypeAlias, TypeVar

import structlog

from headgate.errors import StoreAway
from headgate.stores.base import AlertOutcome, SharedAlerts

_INTERVAL: Final = 1.0  # seconds between two comparisons with the store
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


class AlertWorker:
    """A task that calls `work` each time it is woken, and once a second if it is `timed`."""

    def __init__(self, work: Callable[[], Awaitable[None]], *, timed: bool, failure: str) -> None:
        """`failure` is logged if `work` fails."""
        self._work, self._timed, self._failure = work, timed, failure
        self._woken: Final = asyncio.Event()
        self._loop: Final = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._run())

    def wake(self) -> None:
        self._woken.set()

    def wake_from_thread(self) -> None:
        """`wake`, in any thread."""
        self._loop.call_soon_threadsafe(self._woken.set)

    async def close(self) -> None:
        while self._task is not None and not self._task.done():
            self._task.cancel()  # again, since Python 3.11 can lose a cancellation in redis-py
            await asyncio.wait([self._task], timeout=0.05)

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
            except Exception:  # noqa: BLE001 - the next ones may succeed
                _log.exception(self._failure)
            try:
                async with asyncio.timeout(_INTERVAL if self._timed else None):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()


StoreOutcome: TypeAlias = AlertOutcome | Literal["away"]
"""What came of a change in the store; "away" if there is none, or it doesn't answer."""


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

    async def put(self, name: str, alert_id: str, known: str, text: str) -> tuple[StoreOutcome, str]:
        """Put an alert into the store: see `SharedAlerts.put`."""
        if self._shared is None or self.is_away():
            return "away", ""
        try:
            return await self._shared.put(name, alert_id, known, text)
        except StoreAway:
            return "away", ""

    async def end(self, name: str, alert_id: str, known: str, text: str) -> StoreOutcome:
        """End an alert in the store: see `SharedAlerts.end`."""
        if self._shared is None:
            return "away"
        try:
            return (await self._shared.end(name, alert_id, known, text))[0]
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


class RecentAlerts(Generic[A]):
    """The newest alerts, open or resolved."""

    def __init__(self) -> None:
        self._alerts: Final[dict[str, A]] = {}  # by id, the newest last

    def add(self, alert: A) -> None:
        """Add an alert, or replace it by what is known of it now. A resolved one that isn't shown is left out."""
        before = self._alerts.get(alert.alert_id)
        if before is not None and before.times != alert.times:
            del self._alerts[alert.alert_id]  # raised again, it moves to the front
        if alert.resolved_at is None or alert.alert_id in self._alerts:
            self._alerts[alert.alert_id] = alert
        if len(self._alerts) > _MAX_RECENT:
            del self._alerts[next(iter(self._alerts))]

    def newest_first(self) -> list[A]:
        return list(reversed(self._alerts.values()))

    def with_open(self, alerts: Iterable[A]) -> list[A]:
        """These and all open ones, newest first."""
        found = self._alerts | {alert.alert_id: alert for alert in alerts}
        return sorted(found.values(), key=lambda alert: -alert.raised_at)
