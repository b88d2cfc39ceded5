"""Webhooks by themselves, for tests: their sending, on a clock that notes who waits."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from headgate import ManualClock
from headgate.hub.monitoring.alerts import Alert
from headgate.hub.monitoring.webhooks import Webhooks
from tests.support.event_loop import wait_until
from tests.support.valkey import PATIENCE

SECRET = "a-secret-of-more-than-16-characters"


class RecordingClock(ManualClock):
    """Notes for how many seconds somebody wanted to wait."""

    def __init__(self) -> None:
        super().__init__(start=1000)
        self.waits: list[float] = []

    def alarm(self, when: int, ring: Callable[[], None]) -> float | None:
        if when > self.now():
            self.waits.append((when - self.now()) / 1_000_000)
        return super().alarm(when, ring)

    async def wait_for_waits(self, times: int) -> None:
        """Wait until this many waits have begun."""
        await wait_until(lambda: len(self.waits) == times, f"wait {times}")


@asynccontextmanager
async def started_webhooks(
    *urls: str, clock: ManualClock | None = None, within: float = PATIENCE
) -> AsyncIterator[Webhooks]:
    webhooks = Webhooks(urls, SECRET, clock or ManualClock(start=1000), within)
    await webhooks.start()
    try:
        yield webhooks
    finally:
        await webhooks.close()


def alert(agent: str = "planner", **fields: Any) -> Alert:
    return Alert("0123abcd", agent, 10, 300.0, 1_700_000_000.5, **fields)
