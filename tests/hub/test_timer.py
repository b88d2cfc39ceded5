"""Timers on the gate's clock."""

import asyncio
import threading

import pytest

from headgate import ManualClock
from headgate.hub.timer import Timer
from headgate.limits.clock import MonotonicClock
from tests.support.event_loop import take_turns
from tests.support.valkey import PATIENCE


@pytest.mark.parametrize("wait", [0.000001, 1, 60])
async def test_a_timer_fires_once_and_exactly_on_time(wait: float) -> None:
    clock, fired = ManualClock(start=1000), []
    Timer(clock, clock.now() + round(wait * 1_000_000), lambda: fired.append(clock.now()))
    if wait > 0.000001:
        clock.advance(wait - 0.000001)
        await take_turns(5)
    assert fired == []
    clock.advance(0.000001)
    await take_turns(5)
    assert fired == [1_000_000_000 + wait * 1_000_000]
    clock.advance(100)
    await take_turns(5)
    assert len(fired) == 1


async def test_a_timer_in_the_past_fires_at_the_next_turn_of_the_loop() -> None:
    clock, fired = ManualClock(start=1000), []
    Timer(clock, 5, lambda: fired.append(True))
    assert fired == []
    await take_turns(5)
    assert fired == [True]


@pytest.mark.parametrize("due", [False, True])
async def test_a_cancelled_timer_does_nothing(due: bool) -> None:
    clock, fired = ManualClock(start=1000), []
    timer = Timer(clock, clock.now() + 1_000_000, lambda: fired.append(True))
    if due:
        clock.advance(1)
        await asyncio.sleep(0)  # it has been told, and is about to fire
    timer.cancel()
    clock.advance(1)
    await take_turns(5)
    assert fired == []
    timer.cancel()


def test_a_timer_fires_in_its_own_loop_when_another_thread_advances_the_clock() -> None:
    async def main() -> None:
        clock, fired = ManualClock(), asyncio.Event()
        where: list[threading.Thread] = []

        def action() -> None:
            where.append(threading.current_thread())
            fired.set()

        Timer(clock, 1_000_000, action)
        await asyncio.to_thread(clock.advance, 1)
        await asyncio.wait_for(fired.wait(), PATIENCE)
        assert where == [threading.current_thread()]

    asyncio.run(main(), debug=True)  # a loop that minds who calls it


async def test_a_timer_of_a_closed_loop_does_nothing() -> None:
    clock = ManualClock()
    Timer(clock, 1_000_000, lambda: pytest.fail("its loop is closed"))
    clock.advance(1)


async def test_a_timer_on_the_real_clock_fires() -> None:
    clock, fired = MonotonicClock(), asyncio.Event()
    when = clock.now() + 20_000
    Timer(clock, when, fired.set)
    await asyncio.wait_for(fired.wait(), PATIENCE)
    assert clock.now() >= when
    Timer(clock, clock.now() + 20_000, lambda: pytest.fail("cancelled")).cancel()


async def test_a_timer_waits_when_the_clock_steps_back() -> None:
    clock, fired = ManualClock(start=1000), []
    Timer(clock, clock.now() + 1_000_000, lambda: fired.append(True))
    clock.advance(1)
    clock.step_back(1)  # before the loop has looked
    await take_turns(5)
    assert fired == []
    clock.advance(1)
    await take_turns(5)
    assert fired == [True]
