"""Waiting for a limit, first come first served.

Callers who acquire a key join its queue. Only the first in the queue asks the store, and sleeps until the store lets it
pass; the others sleep until they are first. So a large cost is not overtaken by small ones behind it. A caller that
leaves the queue, because it passed, ran out of time, was cancelled or failed, wakes up the new first.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from headgate.flow import Flow, adrive, drive
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.limits.numbers import microseconds
from headgate.stores.base import Verb

Step: TypeAlias = Verb | int | None
"""A verb to be carried out, or the moment until which to sleep (None: until woken)."""


class Waiter(Protocol):
    """A place in a queue."""

    def wake(self) -> None:
        """Wake up the caller that holds it, from any thread."""


class WaitQueues:
    """The queues of one limiter, one for each key that somebody waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, deque[Waiter]] = {}

    def length(self, key: str) -> int:
        with self._lock:
            return len(self._queues.get(key, ()))

    def wake(self, key: str) -> None:
        """Wake up the first in the queue, who may pass earlier than the store has said."""
        with self._lock:
            queue = self._queues.get(key)
            if queue:
                queue[0].wake()

    def join(self, key: str, waiter: Waiter) -> None:
        with self._lock:
            self._queues.setdefault(key, deque()).append(waiter)

    def is_first(self, key: str, waiter: Waiter) -> bool:
        with self._lock:
            return self._queues[key][0] is waiter

    def leave(self, key: str, waiter: Waiter) -> None:
        with self._lock:
            queue = self._queues[key]
            queue.remove(waiter)
            if queue:
                queue[0].wake()
            else:
                del self._queues[key]


def acquire(
    queues: WaitQueues, key: str, clock: Clock, timeout: object, perform: Callable[[Verb], Decision]
) -> Decision:
    """Wait in this thread until a check passes; the denial if the time is up or no wait would help."""
    waiter = _ThreadWaiter()

    def carry_out(step: Step) -> Decision | None:
        if isinstance(step, Verb):
            return perform(step)
        waiter.sleep(None if step is None else clock.alarm(step, waiter.wake))
        return None

    return drive(_flow(queues, key, clock, timeout, waiter), carry_out)


async def aacquire(
    queues: WaitQueues, key: str, clock: Clock, timeout: object, perform: Callable[[Verb], Awaitable[Decision]]
) -> Decision:
    """`acquire` for a task."""
    waiter = _TaskWaiter()

    async def carry_out(step: Step) -> Decision | None:
        if isinstance(step, Verb):
            return await perform(step)
        await waiter.sleep(None if step is None else clock.alarm(step, waiter.wake))
        return None

    return await adrive(_flow(queues, key, clock, timeout, waiter), carry_out)


def _flow(queues: WaitQueues, key: str, clock: Clock, timeout: object, waiter: Waiter) -> Flow[Step, Decision]:
    deadline = None if timeout is None else clock.now() + microseconds("timeout", timeout)
    queues.join(key, waiter)
    try:
        while True:
            now = clock.now()
            late = deadline is not None and now >= deadline
            wake_at = deadline
            if queues.is_first(key, waiter):
                decision: Decision = yield Verb.CHECK
                if late or decision or (wait := decision.retry_us) is None:
                    return decision
                wake_at = now + wait if deadline is None else min(now + wait, deadline)
            elif late:
                decision = yield Verb.PEEK
                return decision.as_denied()
            yield wake_at
    finally:
        queues.leave(key, waiter)


class _ThreadWaiter:
    def __init__(self) -> None:
        self._woken = threading.Event()
        self.wake = self._woken.set

    def sleep(self, seconds: float | None) -> None:
        self._woken.wait(seconds)
        self._woken.clear()


class _TaskWaiter:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)

    async def sleep(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()
