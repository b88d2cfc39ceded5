"""Helpers for tests of the store in Redis: timeouts, waits for a server, and its contents."""

import asyncio
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

from headgate import Decision, Limit, Limiter, ManualClock, MemoryStore
from headgate.stores.redis import RedisStore
from tests.support.valkey import PATIENCE

TIMEOUT = 0.25
"""The store's own timeout, for tests in which a server gives no answer."""
SLACK = 1.5
"""Seconds by `ProcessTime` that one check may take beyond what it waits for."""
BACK = 1.5
"""Seconds by `ProcessTime` from the end of a fault until nothing is degraded any more."""
POLICIES = ["open", "closed", "local"]


class ProcessTime:
    """Seconds in which this process was running: none pass while the machine stands still or runs others.

    A thread counts them in small steps. A step counts for twice its length at the most, however long it took.
    """

    STEP = 0.01

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def _count(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self.STEP):
            now = time.monotonic()
            self.seconds += min(now - last, 2 * self.STEP)
            last = now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


class StoreWithoutChangeLog(RedisStore):
    """A Redis store without a change log, so that each gate keeps its changes to itself."""

    change_log = None  # type: ignore[assignment]


def pack_doubles(*numbers: float) -> bytes:
    """Numbers as they are stored."""
    return struct.pack(f"<{len(numbers)}d", *numbers)


def server_time(raw: Any) -> int:
    """The server's time in microseconds."""
    seconds, rest = raw.time()
    return int(seconds) * 1_000_000 + int(rest)


def keys_of(raw: Any) -> list[bytes]:
    return sorted(raw.scan_iter(count=1000))


def limiter_pair(still: RedisStore, limit: Limit) -> list[Limiter]:
    """A limiter in the server, and one in memory on the same clock."""
    return [Limiter(limit, store=store) for store in (still, MemoryStore(clock=still.clock))]


async def ask_until_answered(ask: Callable[[], Awaitable[Decision]], clock: ManualClock | None = None) -> Decision:
    """Ask until the server answers: it may not be back yet, or the machine be too slow for a short timeout."""
    deadline = time.monotonic() + PATIENCE
    while (decision := await ask()).degraded:
        assert time.monotonic() < deadline
        if clock is not None:
            clock.advance(1)
        await asyncio.sleep(0.01)
    return decision
