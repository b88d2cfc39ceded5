"""Slots of decorated calls, coroutines and generators."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import Limiter, ManualClock, MemoryStore, RateLimited
from headgate.edges.decorator import rate_limited
from tests.support.edge_holds import SLOTS, used_slots
from tests.support.event_loop import wait_until
from tests.support.http_edges import HandlerError

pytestmark = pytest.mark.once


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_has_its_slot_as_long_as_it_runs(memory_slots: Limiter, fails: bool) -> None:
    @rate_limited(memory_slots, key="who")
    def work(who: str) -> int:
        if fails and used_slots(memory_slots, who) == SLOTS:
            raise HandlerError
        try:
            return work(who)
        except RateLimited as denied:
            return used_slots(memory_slots, who) if denied.pace == f"{SLOTS} in flight" else -1

    if fails:
        with pytest.raises(HandlerError):
            work("ann")
    else:
        assert work("ann") == SLOTS
    assert used_slots(memory_slots, "ann") == 0


@pytest.mark.parametrize("how", ["returns", "raises", "is cancelled"])
async def test_a_coroutine_has_its_slot_as_long_as_it_runs(slots: Limiter, how: str) -> None:
    go = asyncio.Event()

    @rate_limited(slots, key="who")
    async def work(who: str) -> int:
        await go.wait()
        if how == "raises":
            raise HandlerError
        return 5

    tasks = [asyncio.ensure_future(work("ann")) for _ in range(SLOTS)]
    await wait_until(lambda: used_slots(slots, "ann") == SLOTS, "the calls")
    with pytest.raises(RateLimited):
        await work("ann")
    if how == "is cancelled":
        for task in tasks:
            task.cancel()
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [
        {"returns": int, "raises": HandlerError, "is cancelled": asyncio.CancelledError}[how]
    ] * SLOTS
    assert used_slots(slots, "ann") == 0


@pytest.mark.parametrize("how", ["is read", "is closed early", "raises"])
def test_a_generator_has_its_slot_from_its_first_step_to_its_end(memory_slots: Limiter, how: str) -> None:
    @rate_limited(memory_slots, key="who")
    def parts(who: str) -> Any:
        received = yield 1
        if how == "raises":
            raise HandlerError
        yield received

    stream: Any = parts("ann")
    assert used_slots(memory_slots, "ann") == 0
    assert (next(stream), used_slots(memory_slots, "ann")) == (1, 1)
    others = [parts("ann"), parts("ann")]
    assert next(others[0]) == 1
    with pytest.raises(RateLimited):
        next(others[1])
    others[0].close()
    assert used_slots(memory_slots, "ann") == 1
    if how == "raises":
        with pytest.raises(HandlerError):
            next(stream)
    elif how == "is read":
        assert stream.send(7) == 7
        assert [*stream] == []
    else:
        stream.close()
    assert used_slots(memory_slots, "ann") == 0


@pytest.mark.parametrize("how", ["is read", "is closed early", "raises", "is thrown into"])
async def test_an_async_generator_has_its_slot_from_its_first_step_to_its_end(slots: Limiter, how: str) -> None:
    ended: list[str] = []

    @rate_limited(slots, key="who")
    async def parts(who: str) -> Any:
        try:
            received = yield 1
        except HandlerError:
            received = 9
        finally:
            ended.append(who)
        if how == "raises":
            raise HandlerError
        yield received

    stream: Any = parts("ann")
    assert used_slots(slots, "ann") == 0
    assert (await anext(stream), used_slots(slots, "ann")) == (1, 1)
    if how == "raises":
        with pytest.raises(HandlerError):
            await anext(stream)
    elif how == "is read":
        assert await stream.asend(7) == 7
        assert [one async for one in stream] == []
    elif how == "is thrown into":
        assert await stream.athrow(HandlerError()) == 9
        assert used_slots(slots, "ann") == 1
        await stream.aclose()
    else:
        await stream.aclose()
    assert (used_slots(slots, "ann"), ended) == (0, ["ann"])


def test_a_generator_under_a_rate_is_counted_when_its_iteration_begins() -> None:
    @rate_limited("1/minute", key="who")
    def parts(who: str) -> Iterator[int]:
        yield 1

    first, second = parts("ann"), parts("ann")
    assert [*first] == [1]
    with pytest.raises(RateLimited):
        next(second)


async def test_a_call_can_wait_for_a_slot(slots: Limiter) -> None:
    go, order = asyncio.Event(), []

    @rate_limited(slots, key="who", wait=60)
    async def work(who: str, number: int) -> None:
        order.append(number)
        await go.wait()

    tasks = [asyncio.ensure_future(work("ann", number)) for number in range(4)]
    await wait_until(lambda: slots.waiting("ann") == 2, "those that wait")
    assert order == [0, 1]
    go.set()
    await asyncio.gather(*tasks)
    assert sorted(order) == [0, 1, 2, 3]
    assert used_slots(slots, "ann") == 0


def test_a_limit_of_the_arguments_may_have_slots(clock: ManualClock) -> None:
    store = MemoryStore(clock=clock)

    @rate_limited(limit=lambda who: "1 in flight" if who == "ann" else "2/minute", key="who", store=store, name="work")
    def work(who: str) -> None:
        if who == "ann":
            with pytest.raises(RateLimited):
                work(who)

    for _ in range(3):
        work("ann")
    work("bob")
    work("bob")
    with pytest.raises(RateLimited):
        work("bob")
