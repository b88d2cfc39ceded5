"""Waiting for a limit, first come first served.

Callers who acquire a key join its queue. Only the first in the queue asks the store, and sleeps until the store lets it
pass; the others sleep until they are first. So a large cost is not overtaken by small ones behind it. A caller that
leaves the queue, because it passed, ran out of time, was cancelled or failed, wakes up the new first.

Queues may wait for the same thing, such as the slots of an account: they are in one group. What comes back wakes up the
first in a few queues of the group, beginning with those that were served or woken longest ago. So no queue starves, and
it costs the same however many there are.

A task whose event loop was closed can't leave, and nobody is told of it. So the first of each loop in a queue, and its
first thread, look once a second whether those before them are gone like that. One per loop is enough: it wakes others.
"""

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Final, Protocol, TypeAlias

from headgate.flow import Flow, adrive, drive, no_event_loop
from headgate.lifecycle import after_fork, new_lock
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.limits.numbers import microseconds
from headgate.stores.base import Verb

_RECHECK_AFTER: Final = 1.0  # seconds until a caller looks whether those before it are gone
_BETWEEN_CHECKS: Final = 250_000  # microseconds, if something may come back
_WOKEN: Final = 8  # queues of a group that are woken up together
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


class _Queue:
    """The waiters for one key."""

    def __init__(self, groups: tuple[str, ...]) -> None:
        self.waiters: Final[deque[Waiter]] = deque()
        self.groups: Final = groups


class WaitQueues:
    """The queues of one limiter, one for each key that somebody waits for. A forked process begins with none."""

    def __init__(self) -> None:
        self._lock: Final = new_lock()
        self._queues: Final[OrderedDict[str, _Queue]] = OrderedDict()
        self._groups: Final[dict[str, OrderedDict[str, None]]] = {}  # the keys of each, the next to be woken first
        after_fork(self)

    def _after_fork(self) -> None:
        self._queues.clear()
        self._groups.clear()

    @property
    def queues(self) -> Mapping[str, object]:
        """The queues by key. It is empty while nobody waits."""
        return self._queues

    def length(self, key: str) -> int:
        with self._lock:
            queue = self._queues.get(key)
            return 0 if queue is None else sum(not _is_abandoned(waiter) for waiter in queue.waiters)

    def wake(self, key: str) -> None:
        """Wake up the first in the queue, who may pass earlier than the store has said."""
        if not self._queues:  # one who joins from now on asks the store first
            return
        with self._lock:
            queue = self._queues.get(key)
            if queue is None:
                return
            waiters = queue.waiters
            while waiters and _is_abandoned(first := waiters[0]):
                with suppress(ValueError):  # a finalizer in this thread may have removed it
                    waiters.remove(first)
            if waiters:
                waiters[0].wake()
            else:
                self._drop(key)

    def wake_group(self, group: str) -> None:
        """Wake up the first in a few queues of a group, and next time those of others."""
        if not self._queues:
            return
        with self._lock:
            keys = self._groups.get(group, OrderedDict())
            for _ in range(min(_WOKEN, len(keys))):
                key = _first(keys)
                if key is None:
                    break
                with suppress(KeyError):  # a finalizer in this thread may have dropped it
                    keys.move_to_end(key)
                self.wake(key)

    def _drop(self, key: str) -> None:
        queue = self._queues.get(key)
        for group in () if queue is None else queue.groups:
            keys = self._groups.get(group, OrderedDict())
            keys.pop(key, None)  # a thread that was interrupted may not have added it
            if not keys:
                self._groups.pop(group, None)
        self._queues.pop(key, None)

    def join(self, key: str, waiter: Waiter, groups: tuple[str, ...] = ()) -> None:
        with self._lock:
            self._drop_abandoned_queue()
            self._queue(key, groups).waiters.append(waiter)

    def _queue(self, key: str, groups: tuple[str, ...]) -> _Queue:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(groups)
            for group in groups:
                self._groups.setdefault(group, OrderedDict())[key] = None
        return queue

    def _drop_abandoned_queue(self) -> None:
        """Drop the next queue if all of its waiters are gone: perhaps nobody ever comes for its key again."""
        key = _first(self._queues)
        queue = None if key is None else self._queues.get(key)  # a finalizer in this thread may have dropped it
        if key is None or queue is None:
            return
        if all(map(_is_abandoned, list(queue.waiters))):
            self._drop(key)
        elif key in self._queues:  # still
            self._queues.move_to_end(key)  # in one step: an interrupted thread must not lose those that wait

    def is_first(self, key: str, waiter: Waiter, groups: tuple[str, ...] = ()) -> bool:
        """Whether it is a caller's turn."""
        with self._lock:
            waiters = self._queue(key, groups).waiters
            if waiter not in waiters:  # it joined in the process that this one was forked from
                waiters.append(waiter)
            if _is_abandoned(waiters[0]):
                self.wake(key)
            return waiters[0] is waiter

    def longest_sleep(self, key: str, waiter: Waiter) -> float:
        """Seconds after which a caller has to look again, even if nobody wakes it up."""
        with self._lock:
            tasks, queue = False, self._queues.get(key)
            for other in () if queue is None else queue.waiters:
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
                queue.waiters.remove(waiter)
            for group in queue.groups:
                with suppress(KeyError):  # as before
                    self._groups[group].move_to_end(key)  # others come first now
            self.wake(key)
            for other in queue.waiters:
                if other.loop is waiter.loop:  # which may have to look from now on
                    other.wake()
                    break


def _first(keys: OrderedDict[str, Any]) -> str | None:
    """The first key. Between `iter` and `next` a finalizer in this thread could change them."""
    for key in keys:
        return key
    return None


def _is_abandoned(waiter: Waiter) -> bool:
    """Whether a waiter is that of a task which will never run again."""
    return waiter.loop is not None and waiter.loop.is_closed()


def is_zero(timeout: object) -> bool:
    """Whether a timeout is 0, as any kind of number: nothing waits then."""
    try:
        return bool(timeout == 0) and not isinstance(timeout, bool)
    except ArithmeticError:  # a signalling NaN can't be compared
        return False


def acquire(
    queues: WaitQueues,
    key: str,
    clock: Clock,
    timeout: object,
    perform: Callable[[Verb], Decision],
    *,
    recheck: bool = False,
    groups: tuple[str, ...] = (),
) -> Decision:
    """Wait in this thread until a check passes; the denial if the time is up or no wait would help.

    With `recheck`, the first in the queue checks four times a second: what others hold may come back at any time, here
    or on another machine. `groups` are those of the queue.
    """
    waiter = _ThreadWaiter()

    def carry_out(step: Step) -> Decision | None:
        if isinstance(step, Verb):
            return perform(step)
        waiter.sleep(_seconds(queues, key, clock, waiter, step))
        return None

    try:
        return drive(_flow(queues, key, clock, timeout, waiter, recheck, groups), carry_out)
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
    recheck: bool = False,
    groups: tuple[str, ...] = (),
) -> Decision:
    """`acquire` for a task."""
    waiter = _TaskWaiter()

    async def carry_out(step: Step) -> Decision | None:
        if isinstance(step, Verb):
            return await perform(step)
        await waiter.sleep(_seconds(queues, key, clock, waiter, step))
        return None

    try:
        return await adrive(_flow(queues, key, clock, timeout, waiter, recheck, groups), carry_out)
    finally:
        try:  # written out in both drivers: an interruption at a call before the `try` would keep the place taken
            queues.leave(key, waiter)
        except BaseException:
            queues.leave(key, waiter)
            raise


def _flow(
    queues: WaitQueues,
    key: str,
    clock: Clock,
    timeout: object,
    waiter: Waiter,
    recheck: bool,
    groups: tuple[str, ...],
) -> Flow[Step, Decision]:
    deadline = None if timeout is None else clock.now() + microseconds("timeout", timeout)
    queues.join(key, waiter, groups)
    while True:
        now = clock.now()
        late = deadline is not None and now >= deadline
        wake_at = deadline
        if queues.is_first(key, waiter, groups):
            decision: Decision = yield Verb.CHECK
            if late or decision or (wait := decision.retry_us) is None:
                return decision
            wait = min(wait, _BETWEEN_CHECKS) if recheck else wait
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
