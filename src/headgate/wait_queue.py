"""Waiting for a limit, first come first served.

Callers who acquire a key join its queue. Only the first in the queue asks the store, and sleeps until the store lets it
pass; the others sleep until they are first. So a large cost is not overtaken by small ones behind it. A caller that
leaves the queue, because it passed, ran out of time, was cancelled or failed, wakes up the new first.

A task whose event loop was closed can't leave, and nobody is told of it. So the first of each loop in a queue, and its
first thread, look once a second whether those before them are gone like that. One per loop is enough: it wakes others.
"""

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from math import inf
from typing import Final, Protocol, TypeAlias

from headgate.flow import Flow, adrive, drive, no_event_loop
from headgate.lifecycle import after_fork, new_lock
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.limits.numbers import microseconds
from headgate.stores.base import Verb

_RECHECK_AFTER: Final = 1.0  # seconds until a caller looks whether those before it are gone
_LONGEST_SLEEP: Final = 86_400.0  # seconds: neither locks nor loops take any number of them

Step: TypeAlias = Verb | int | None
"""A verb to be carried out, or the moment until which to sleep (None: until woken)."""


class Waiter(Protocol):
    """A place in a queue."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop of the task that holds it; None for a thread."""

    def wake(self) -> None:
        """Wake up the caller that holds it, from any thread."""


class WaitQueues:
    """The queues of one limiter, one for each key that somebody waits for. A forked process begins with none."""

    def __init__(self) -> None:
        self._lock: Final = new_lock()
        self._queues: Final[OrderedDict[str, deque[Waiter]]] = OrderedDict()
        after_fork(self)

    def _after_fork(self) -> None:
        self._queues.clear()

    @property
    def queues(self) -> Mapping[str, object]:
        """The queues by key. It is empty while nobody waits."""
        return self._queues

    def length(self, key: str) -> int:
        with self._lock:
            return sum(not _is_abandoned(waiter) for waiter in self._queues.get(key, ()))

    def wake(self, key: str) -> None:
        """Wake up the first in the queue, who may pass earlier than the store has said."""
        if not self._queues:  # one who joins from now on asks the store first
            return
        with self._lock:
            queue = self._queues.get(key)
            while queue and _is_abandoned(queue[0]):
                queue.popleft()
            if not queue:
                self._queues.pop(key, None)
                return
            queue[0].wake()

    def wake_all(self, prefix: str) -> None:
        """Wake up the first in each queue whose key begins like this."""
        if not self._queues:
            return
        with self._lock:
            for key in [one for one in self._queues if one.startswith(prefix)]:
                self.wake(key)

    def join(self, key: str, waiter: Waiter) -> None:
        with self._lock:
            self._drop_abandoned_queue()
            self._queues.setdefault(key, deque()).append(waiter)

    def _drop_abandoned_queue(self) -> None:
        """Drop the next queue if all of its waiters are gone: perhaps nobody ever comes for its key again."""
        key = next(iter(self._queues), "")
        if all(map(_is_abandoned, list(self._queues.get(key, ())))):
            self._queues.pop(key, None)
        elif key in self._queues:
            self._queues.move_to_end(key)  # in one step: an interrupted thread must not lose those that wait

    def is_first(self, key: str, waiter: Waiter) -> bool:
        """Whether it is a caller's turn."""
        with self._lock:
            queue = self._queues.setdefault(key, deque())
            if waiter not in queue:  # it joined in the process that this one was forked from
                queue.append(waiter)
            if _is_abandoned(queue[0]):
                self.wake(key)
            return queue[0] is waiter

    def longest_sleep(self, key: str, waiter: Waiter) -> float:
        """Seconds after which a caller has to look again, even if nobody wakes it up."""
        with self._lock:
            tasks = False
            for other in self._queues.get(key, ()):
                if other is waiter:
                    return _RECHECK_AFTER if tasks else _LONGEST_SLEEP
                if other.loop is waiter.loop:  # which looks for both
                    break
                tasks = tasks or other.loop is not None
            return _LONGEST_SLEEP

    def leave(self, key: str, waiter: Waiter) -> None:
        """Give up a place, if there is any. It may be done twice."""
        with self._lock:
            queue = self._queues.get(key)
            if queue is None:
                return
            with suppress(ValueError):  # it never joined, was found to be gone before, or has left
                queue.remove(waiter)
            self.wake(key)
            for other in queue:
                if other.loop is waiter.loop:  # which may have to look from now on
                    other.wake()
                    break


def _is_abandoned(waiter: Waiter) -> bool:
    """Whether a waiter is that of a task which will never run again."""
    return waiter.loop is not None and waiter.loop.is_closed()


def is_zero(timeout: object) -> bool:
    """Whether a timeout is 0, as any kind of number: nothing waits then."""
    try:
        return bool(timeout == 0)
    except ArithmeticError:  # a signalling NaN can't be compared
        return False


def acquire(
    queues: WaitQueues,
    key: str,
    clock: Clock,
    timeout: object,
    perform: Callable[[Verb], Decision],
    *,
    recheck: int | None = None,
) -> Decision:
    """Wait in this thread until a check passes; the denial if the time is up or no wait would help.

    The first in the queue checks again after `recheck` microseconds at the latest, if these are given.
    """
    waiter = _ThreadWaiter()

    def carry_out(step: Step) -> Decision | None:
        if isinstance(step, Verb):
            return perform(step)
        waiter.sleep(_seconds(queues, key, clock, waiter, step))
        return None

    try:
        return drive(_flow(queues, key, clock, timeout, waiter, recheck), carry_out)
    finally:
        try:  # written out in both drivers: an interruption at a call before the `try` would keep the place taken
            queues.leave(key, waiter)
        except BaseException:
            queues.leave(key, waiter)
            raise


async def aacquire(
    queues: WaitQueues,
    key: str,
    clock: Clock,
    timeout: object,
    perform: Callable[[Verb], Awaitable[Decision]],
    *,
    recheck: int | None = None,
) -> Decision:
    """`acquire` for a task."""
    waiter = _TaskWaiter()

    async def carry_out(step: Step) -> Decision | None:
        if isinstance(step, Verb):
            return await perform(step)
        await waiter.sleep(_seconds(queues, key, clock, waiter, step))
        return None

    try:
        return await adrive(_flow(queues, key, clock, timeout, waiter, recheck), carry_out)
    finally:
        try:  # written out in both drivers: an interruption at a call before the `try` would keep the place taken
            queues.leave(key, waiter)
        except BaseException:
            queues.leave(key, waiter)
            raise


def _flow(
    queues: WaitQueues, key: str, clock: Clock, timeout: object, waiter: Waiter, recheck: int | None
) -> Flow[Step, Decision]:
    deadline = None if timeout is None else clock.now() + microseconds("timeout", timeout)
    queues.join(key, waiter)
    while True:
        now = clock.now()
        late = deadline is not None and now >= deadline
        wake_at = deadline
        if queues.is_first(key, waiter):
            decision: Decision = yield Verb.CHECK
            if late or decision or (wait := decision.retry_us) is None:
                return decision
            wait = wait if recheck is None else min(wait, recheck)
            wake_at = now + wait if deadline is None else min(now + wait, deadline)
        elif late:
            decision = yield Verb.PEEK
            return decision.as_denied()
        yield wake_at


def _seconds(queues: WaitQueues, key: str, clock: Clock, waiter: Waiter, until: int | None) -> float:
    """How long to sleep."""
    alarm = None if until is None else clock.alarm(until, waiter.wake)
    return min(queues.longest_sleep(key, waiter), inf if alarm is None else alarm)


class _ThreadWaiter:
    """Sleeps by waiting for a lock. A finalizer in its own thread may release it, while an `Event` would deadlock."""

    loop: Final = None

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._asleep.release()

    def sleep(self, seconds: float) -> None:
        self._asleep.acquire(timeout=seconds)


class _TaskWaiter:
    def __init__(self) -> None:
        try:
            self.loop: Final = asyncio.get_running_loop()
        except RuntimeError:
            raise no_event_loop("aacquire", "limiter.acquire") from None
        self._woken = asyncio.Event()

    def wake(self) -> None:
        with suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self._woken.set)

    async def sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()
