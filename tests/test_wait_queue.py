"""The wait queue: first come, first served; a waiter that gives up delays nobody and spends nothing."""

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from headgate import (
    HeadgateError,
    Limiter,
    ManualClock,
    MemoryStore,
    Outcome,
    per_day,
    per_minute,
    per_second,
    wait_queue,
)
from headgate.wait_queue import WaitQueues
from tests.support.event_loop import wait_until
from tests.support.finalizers import ALLOCATIONS, collect_during
from tests.support.interruptions import Interrupted, interrupt
from tests.support.refusals import refusal
from tests.support.threads import Waiter
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once


def limiter_and_clock(burst: int = 1) -> tuple[Limiter, ManualClock]:
    clock = ManualClock()
    return Limiter(per_second(1, burst=burst), store=MemoryStore(clock=clock)), clock


def test_acquire_passes_at_once_if_it_can() -> None:
    limiter, _ = limiter_and_clock()
    assert limiter.acquire("a").remaining == 0
    assert limiter.waiting("a") == 0


def test_acquire_waits_exactly_as_long_as_needed() -> None:
    limiter, clock = limiter_and_clock()
    limiter.check("a")
    waiter = Waiter(limiter)
    clock.advance(0.999999)
    assert waiter.is_alive()
    clock.advance(0.000001)
    assert waiter.result()
    assert not limiter.peek("a")


def test_acquire_is_first_come_first_served() -> None:
    limiter, clock = limiter_and_clock()
    limiter.check("a")
    waiters = [Waiter(limiter) for _ in range(5)]
    for served in range(1, 6):
        clock.advance(1)
        wait_for(lambda served=served: limiter.waiting("a") == 5 - served, "the queue")  # type: ignore[misc]
        assert [waiter.found is not None or not waiter.is_alive() for waiter in waiters[:served]] == [True] * served
        assert all(waiter.is_alive() for waiter in waiters[served:])
    assert all(waiter.result() for waiter in waiters)


def test_a_large_cost_is_not_overtaken_by_small_ones_behind_it() -> None:
    limiter, clock = limiter_and_clock(burst=3)
    limiter.check("a", 3)
    large = Waiter(limiter, 3)
    small = [Waiter(limiter) for _ in range(3)]
    clock.advance(2)
    assert [waiter.is_alive() for waiter in (large, *small)] == [True] * 4
    clock.advance(1)
    assert large.result()
    assert limiter.waiting("a") == 3
    clock.advance(3)
    assert all(waiter.result() for waiter in small)


def test_a_waiter_that_times_out_is_denied_and_spends_nothing() -> None:
    limiter, clock = limiter_and_clock(burst=2)
    limiter.check("a", 2)
    first, second, third = Waiter(limiter, 2, timeout=1.5), Waiter(limiter, timeout=1.2), Waiter(limiter)
    clock.advance(1.2)
    denial = second.result()
    assert (denial.outcome, denial.bound) == (Outcome.DENY, None)
    assert (denial.retry_after or 0) > 0
    assert first.is_alive()
    clock.advance(0.3)
    assert first.result().retry_after == 0.5
    assert third.result(), "a waiter that gave up delays nobody"
    assert limiter.peek("a").retry_after == 0.5, "only the third has spent"


def test_timeout_zero_is_a_check() -> None:
    limiter, _ = limiter_and_clock()
    assert limiter.acquire("a", timeout=0)
    assert limiter.acquire("a", timeout=0).retry_after == 1.0
    waiter = Waiter(limiter)
    limiter.refund("b")
    assert not limiter.acquire("a", timeout=0), "not even first in line"
    limiter.reset("a")
    assert waiter.result()


@pytest.mark.parametrize("wake", [lambda limiter: limiter.refund("a"), lambda limiter: limiter.reset("a")])
def test_a_refund_or_a_reset_wakes_the_first_in_line(wake: Callable[[Limiter], object]) -> None:
    limiter, _ = limiter_and_clock()
    limiter.check("a")
    waiter = Waiter(limiter)
    wake(limiter)
    assert waiter.result()


def test_different_keys_have_different_queues() -> None:
    limiter, _ = limiter_and_clock()
    limiter.check("a")
    waiter = Waiter(limiter)
    assert limiter.acquire("b", timeout=0)
    limiter.reset("a")
    waiter.result()


def test_acquire_on_the_real_clock() -> None:
    limiter = Limiter(per_second(200, burst=1))
    begin = time.monotonic()
    assert all(limiter.acquire("a") for _ in range(21))
    assert time.monotonic() - begin >= 0.1


@pytest.mark.parametrize("bad", [-1, float("nan"), True, "soon"])
def test_a_bad_timeout_is_refused(bad: Any) -> None:
    limiter, _ = limiter_and_clock()
    expected = "a number of seconds, 0 or more"
    assert refusal(limiter.acquire, "a", timeout=bad) == f"timeout: expected {expected}, got {bad!r}"
    assert limiter.peek("a").remaining == 1
    assert limiter.waiting("a") == 0


async def test_aacquire_is_first_come_first_served_and_a_cancelled_task_delays_nobody() -> None:
    limiter, clock = limiter_and_clock()
    await limiter.aacquire("a")
    served: list[str] = []

    async def wait(name: str) -> None:
        if await limiter.aacquire("a"):
            served.append(name)

    tasks = []
    for name in "abcde":
        tasks.append(asyncio.create_task(wait(name)))
        await wait_until(lambda: limiter.waiting("a") == len(tasks), "the queue")
    tasks[0].cancel()
    tasks[2].cancel()
    await wait_until(lambda: limiter.waiting("a") == 3, "the queue")
    for left in (2, 1, 0):
        clock.advance(1)
        await wait_until(lambda left=left: limiter.waiting("a") == left, "the queue")  # type: ignore[misc]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert limiter.peek("a").retry_after == 1.0, "cancelled tasks spend nothing"
    assert served == ["b", "d", "e"]


async def test_aacquire_times_out_without_blocking_the_loop() -> None:
    limiter, clock = limiter_and_clock()
    limiter.check("a")
    waiting = asyncio.create_task(limiter.aacquire("a", timeout=0.5))
    await wait_until(lambda: limiter.waiting("a") == 1, "the queue")
    clock.advance(0.5)
    assert (await waiting).retry_after == 0.5


async def test_aacquire_on_the_real_clock() -> None:
    limiter = Limiter(per_second(200, burst=1))
    begin = time.monotonic()
    await asyncio.gather(*(limiter.aacquire("a") for _ in range(21)))
    assert time.monotonic() - begin >= 0.1


async def test_threads_and_tasks_share_one_queue() -> None:
    limiter, clock = limiter_and_clock()
    limiter.check("a")
    first = Waiter(limiter)
    second = asyncio.create_task(limiter.aacquire("a"))
    await wait_until(lambda: limiter.waiting("a") == 2, "the queue")
    clock.advance(1)
    await asyncio.to_thread(first.join, PATIENCE)
    assert limiter.waiting("a") == 1
    clock.advance(1)
    assert await second
    assert first.result()


def test_a_closed_loop_delays_nobody() -> None:
    """A task that ended with its loop has left the queue."""
    limiter, clock = limiter_and_clock()
    limiter.check("a")

    async def abandoned() -> None:
        asyncio.get_running_loop().create_task(limiter.aacquire("a"))
        await wait_until(lambda: limiter.waiting("a") == 1, "the queue")

    asyncio.run(abandoned())
    assert limiter.waiting("a") == 0
    clock.advance(1)
    assert limiter.acquire("a", timeout=0)


class AbandonedTask:
    """A task that waits for "a" when its loop is closed, as by a program that doesn't cancel it first."""

    def __init__(self, limiter: Limiter) -> None:
        self.loop = asyncio.new_event_loop()
        before = limiter.waiting("a")
        self.task = self.loop.create_task(limiter.aacquire("a"))
        self.loop.run_until_complete(wait_until(lambda: limiter.waiting("a") == before + 1, "the queue"))

    def close_loop(self) -> None:
        self.loop.close()
        self.task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_task_whose_loop_was_closed_is_not_in_line() -> None:
    limiter, clock = limiter_and_clock()
    limiter.check("a")
    abandoned = AbandonedTask(limiter)
    abandoned.close_loop()
    assert limiter.waiting("a") == 0
    clock.advance(1)
    assert limiter.acquire("a", timeout=0)
    clock.advance(1)
    assert asyncio.run(limiter.aacquire("a", timeout=0))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_loop_that_is_closed_delays_nobody_behind_its_task(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither threads nor tasks, wherever it is in line, though nobody is told."""
    monkeypatch.setattr(wait_queue, "_RECHECK_AFTER", 0.01)
    limiter, clock = limiter_and_clock(burst=4)
    limiter.check("a", 4)
    abandoned, waiters = [], []
    for number in range(3):
        if number == place:
            abandoned = [AbandonedTask(limiter), AbandonedTask(limiter)]
        waiters.append(Waiter(limiter))
    task = threading.Thread(target=lambda: asyncio.run(limiter.aacquire("a")), daemon=True)
    task.start()
    wait_for(lambda: limiter.waiting("a") == 6, "the queue")
    for one in abandoned:
        one.close_loop()
    assert limiter.waiting("a") == 4
    clock.advance(4)
    assert all(waiter.result() for waiter in waiters)
    task.join(PATIENCE)
    assert not task.is_alive()
    assert limiter.peek("a").remaining == 0, "each was served once"


def test_queues_of_tasks_whose_loops_were_closed_do_not_pile_up() -> None:
    limiter, _ = limiter_and_clock()
    limiter.check("a")
    AbandonedTask(limiter).close_loop()
    assert limiter.acquire("b")
    assert list(limiter._queues._queues) == []


@pytest.mark.parametrize("timeout", [1e10, 10**12, 2**53, 1e300])
async def test_a_timeout_may_be_longer_than_anything_lasts(timeout: float) -> None:
    """No lock and no loop takes such a number of seconds."""
    limiter = Limiter(per_second(200, burst=1))
    limiter.check("a")
    assert await asyncio.to_thread(limiter.acquire, "a", timeout=timeout)
    assert await limiter.aacquire("a", timeout=timeout)


async def test_a_timeout_may_be_longer_than_anything_lasts_for_those_behind_others_too() -> None:
    """They sleep until they are first, or until their time is up."""
    limiter = Limiter(per_day(1))
    limiter.check("a")
    waiters = [Waiter(limiter, timeout=1e10) for _ in range(2)]
    task = asyncio.create_task(limiter.aacquire("a", timeout=1e10))
    await wait_until(lambda: limiter.waiting("a") == 3, "the queue")
    limiter.refund("a")
    for waiter in waiters:
        assert await asyncio.to_thread(waiter.result)
        limiter.refund("a")
    assert await task


async def test_a_wait_may_be_longer_than_anything_lasts() -> None:
    """The store says 285 years, the longest that it counts."""
    limiter = Limiter("1 per 1000000 years burst 5")
    limiter.check("a", 5)
    waiter, task = Waiter(limiter), asyncio.create_task(limiter.aacquire("a"))
    await wait_until(lambda: limiter.waiting("a") == 2, "the queue")
    limiter.refund("a", 2)
    assert await task
    assert waiter.result()


def test_without_an_event_loop_of_asyncio_there_is_a_clear_error() -> None:
    """As under trio, which runs coroutines in its own way."""
    limiter, _ = limiter_and_clock()
    with pytest.raises(
        HeadgateError, match=r"expected a running event loop of asyncio, got none; under trio.*`acquire`, not"
    ):
        limiter.aacquire("a").send(None)
    assert limiter.waiting("a") == 0


def test_each_of_many_waiting_threads_is_served_once() -> None:
    clock = ManualClock()
    limiter = Limiter(per_minute(60, burst=4), store=MemoryStore(clock=clock))
    limiter.check("a", 4)
    waiters = [Waiter(limiter) for _ in range(30)]
    for _ in range(30):
        clock.advance(1)
        wait_for(lambda: not limiter.peek("a"), "the first in line")
    assert all(waiter.result() for waiter in waiters)
    assert limiter.peek("a").reset_after == 4.0


def test_an_interrupted_acquire_leaves_the_queue() -> None:
    """Wherever it is interrupted: else nobody would ever pass behind it."""
    limiter = Limiter(per_second(1_000_000))
    for step in count(1):
        if not interrupt(step, lambda: limiter.acquire("a"), Interrupted):
            break
        assert limiter.waiting("a") == 0, f"after an interruption at step {step}"
    assert step > 20


def test_an_interrupted_acquire_leaves_the_others_in_their_queues() -> None:
    limiter, clock = limiter_and_clock()
    limiter.check("a")
    waiter = Waiter(limiter)
    for step in count(1):
        limiter.reset("b")
        if not interrupt(step, lambda: limiter.acquire("b"), Interrupted):
            break
        assert limiter.waiting("a") == 1, f"after an interruption at step {step}"
    clock.advance(1)
    assert waiter.result()


class WakeCountingPlace:
    """A place in a queue that counts how often it is woken."""

    loop = None

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def test_a_finalizer_may_leave_a_queue_in_the_middle_of_anything() -> None:
    """As that of a task does which nobody keeps, wherever the garbage collector finds it."""
    here, gone = WakeCountingPlace(), WakeCountingPlace()
    verbs: dict[str, Callable[[WaitQueues], object]] = {
        "join": lambda queues: queues.join("new", WakeCountingPlace(), ("group",)),
        "join the same": lambda queues: queues.join("gone", WakeCountingPlace(), ("group",)),
        "leave": lambda queues: queues.leave("here", here),
        "leave the same": lambda queues: queues.leave("gone", gone),
        "wake": lambda queues: queues.wake("gone"),
        "wake the group": lambda queues: queues.wake_group("group"),
        "look": lambda queues: queues.is_first("here", here, ("group",)),
    }
    for name, verb in verbs.items():
        for allocation in ALLOCATIONS:
            queues = WaitQueues()
            queues.join("gone", gone, ("group",))
            queues.join("here", here, ("group",))

            def finalize(queues: WaitQueues = queues) -> None:
                queues.leave("gone", gone)

            try:
                collect_during(lambda: verb(queues), finalize, allocation)  # noqa: B023
            except Exception as error:
                raise AssertionError(f"{name}, at allocation {allocation}") from error
            assert [key for key in queues._groups.get("group", ()) if key not in queues.queues] == []


def test_the_queues_of_a_group_are_woken_in_turns() -> None:
    queues, places = WaitQueues(), [WakeCountingPlace() for _ in range(9)]
    for number, place in enumerate(places):
        queues.join(str(number), place, ("group",))
    queues.wake_group("group")
    assert [place.woken for place in places] == [1] * 8 + [0]
    queues.wake_group("group")
    assert [place.woken for place in places] == [2] * 7 + [1, 1]


def test_a_queue_that_was_served_is_the_last_of_its_group_to_be_woken() -> None:
    queues, places = WaitQueues(), [WakeCountingPlace() for _ in range(9)]
    served = WakeCountingPlace()
    queues.join("0", served, ("group",))
    for number, place in enumerate(places):
        queues.join(str(number), place, ("group",))
    queues.leave("0", served)
    assert [place.woken for place in places] == [2] + [0] * 8  # it is the first in its line, and of its loop
    queues.wake_group("group")
    assert [place.woken for place in places] == [2] + [1] * 8
