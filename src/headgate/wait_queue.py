"""Waiting for a limit, first come first served.

Whoever acquires a key joins its line. Only the first in line asks the store, and sleeps until the store lets it pass;
the others sleep until they are first. So a large cost is not overtaken by small ones behind it. Who leaves the line,
because it passed, ran out of time, was cancelled or failed, wakes up the one who is first then.

The flow is written once, as a generator that says what to do next; a thread and a task differ only in how they do it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Protocol, TypeAlias

from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.limits.numbers import microseconds
from headgate.stores.base import Verb

Flow: TypeAlias = Generator[Verb | int | None, Decision, Decision]
"""Yields a verb to be carried out, or the moment until which to sleep (None: until woken)."""


class Waiter(Protocol):
    """A place in a line."""

    def ring(self) -> None:
        """Wake up whoever holds it, from any thread."""


class WaitQueues:
    """The lines of one limiter, one for each key that somebody waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, deque[Waiter]] = {}

    def length(self, key: str) -> int:
        with self._lock:
            return len(self._lines.get(key, ()))

    def ring(self, key: str) -> None:
        """Wake up the first in line, who may be able to pass earlier than it was told."""
        with self._lock:
            line = self._lines.get(key)
            if line:
                line[0].ring()

    def join(self, key: str, ticket: Waiter) -> None:
        with self._lock:
            self._lines.setdefault(key, deque()).append(ticket)

    def is_first(self, key: str, ticket: Waiter) -> bool:
        with self._lock:
            return self._lines[key][0] is ticket

    def leave(self, key: str, ticket: Waiter) -> None:
        with self._lock:
            line = self._lines[key]
            line.remove(ticket)
            if line:
                line[0].ring()
            else:
                del self._lines[key]


def acquire(
    lines: WaitQueues, key: str, clock: Clock, timeout: object, perform: Callable[[Verb], Decision]
) -> Decision:
    """Wait in this thread until a check passes; the denial if the time is up or no wait would help."""
    ticket = _ThreadWaiter()
    flow = _flow(lines, key, clock, timeout, ticket)
    try:
        step = next(flow)
        while True:
            if isinstance(step, Verb):
                step = flow.send(perform(step))
            else:
                ticket.sleep(None if step is None else clock.alarm(step, ticket.ring))
                step = next(flow)
    except StopIteration as end:
        decision: Decision = end.value
        return decision
    finally:
        flow.close()


async def aacquire(
    lines: WaitQueues, key: str, clock: Clock, timeout: object, perform: Callable[[Verb], Awaitable[Decision]]
) -> Decision:
    """`acquire` for a task."""
    ticket = _TaskWaiter()
    flow = _flow(lines, key, clock, timeout, ticket)
    try:
        step = next(flow)
        while True:
            if isinstance(step, Verb):
                step = flow.send(await perform(step))
            else:
                await ticket.sleep(None if step is None else clock.alarm(step, ticket.ring))
                step = next(flow)
    except StopIteration as end:
        decision: Decision = end.value
        return decision
    finally:
        flow.close()


def _flow(lines: WaitQueues, key: str, clock: Clock, timeout: object, ticket: Waiter) -> Flow:
    deadline = None if timeout is None else clock.now() + microseconds("timeout", timeout)
    lines.join(key, ticket)
    try:
        while True:
            now = clock.now()
            late = deadline is not None and now >= deadline
            wake_at = deadline
            if lines.is_first(key, ticket):
                decision = yield Verb.CHECK
                if late or decision or (wait := decision.retry_us) is None:
                    return decision
                wake_at = now + wait if deadline is None else min(now + wait, deadline)
            elif late:
                decision = yield Verb.PEEK
                return decision.as_denied()
            yield wake_at
    finally:
        lines.leave(key, ticket)


class _ThreadWaiter:
    def __init__(self) -> None:
        self._rung = threading.Event()
        self.ring = self._rung.set

    def sleep(self, seconds: float | None) -> None:
        self._rung.wait(seconds)
        self._rung.clear()


class _TaskWaiter:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._rung.set)

    async def sleep(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            pass
        self._rung.clear()
