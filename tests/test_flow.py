"""Flows: written once, driven by threads and by event loops."""

import asyncio
import re
from collections.abc import Callable, Generator
from typing import Any

import pytest

from headgate import Gate, HeadgateError
from headgate.flow import Flow, adrive, begin, drive

pytestmark = pytest.mark.once

Driver = Callable[[Flow[Any, Any], Callable[[Any], Any]], Any]


def drive_in_loop(flow: Flow[Any, Any], perform: Callable[[Any], Any]) -> Any:
    return asyncio.run(adrive(flow, perform))


def adrive_in_loop(flow: Flow[Any, Any], perform: Callable[[Any], Any]) -> Any:
    async def performed(step: Any) -> Any:
        await asyncio.sleep(0)
        return perform(step)

    return asyncio.run(adrive(flow, performed))


@pytest.fixture(params=[drive, drive_in_loop, adrive_in_loop])
def driver(request: pytest.FixtureRequest) -> Driver:
    chosen: Driver = request.param
    return chosen


def doubled_sum(numbers: list[int]) -> Generator[int, int, int]:
    total = 0
    for number in numbers:
        total += yield number
    return total


@pytest.mark.parametrize(("numbers", "total"), [([], 0), ([1], 2), ([1, 2, 3], 12)])
def test_each_step_is_sent_its_result(driver: Driver, numbers: list[int], total: int) -> None:
    assert driver(doubled_sum(numbers), lambda number: 2 * number) == total


def test_an_error_is_raised_at_its_step_and_may_be_handled_there(driver: Driver) -> None:
    def flow() -> Generator[int, Any, list[str]]:
        seen = []
        for step in (1, 0, 2):
            try:
                seen.append(str((yield step)))
            except ZeroDivisionError:
                seen.append("error")
        return seen

    assert driver(flow(), lambda step: 2 // step) == ["2", "error", "1"]


def test_an_error_that_no_flow_handles_reaches_the_caller_and_ends_the_flow(driver: Driver) -> None:
    ended = []

    def flow() -> Generator[int, Any, None]:
        try:
            yield 0
        finally:
            ended.append(True)

    with pytest.raises(ZeroDivisionError):
        driver(flow(), lambda step: 1 // step)
    assert ended == [True]


def test_a_task_that_is_cancelled_ends_its_flow() -> None:
    ended = []

    def flow() -> Generator[int, Any, None]:
        try:
            yield 0
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def scenario() -> None:
        begun = asyncio.Event()

        async def never(_: int) -> None:
            begun.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(adrive(flow(), never))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert ended == ["cancelled"]


def test_a_flow_is_begun_up_to_the_step_that_has_to_be_awaited() -> None:
    seen = []

    async def later(result: str) -> str:
        await asyncio.sleep(0)
        return result

    def flow() -> Generator[Any, Any, str]:
        seen.append((yield "now"))
        seen.append((yield later("later")))
        seen.append((yield "at the end"))
        return "done"

    async def scenario() -> str:
        begun = flow()
        step = begin(begun)
        assert seen == ["now"]
        return await adrive(begun, step=step)

    assert asyncio.run(scenario()) == "done"
    assert seen == ["now", "later", "at the end"]


def test_a_flow_that_awaits_nothing_is_begun_to_its_end() -> None:
    seen = []

    def flow() -> Generator[int, Any, None]:
        seen.append((yield 1))
        seen.append((yield 2))

    assert begin(flow()) is None
    assert seen == [1, 2]


def test_an_error_of_a_flow_that_is_begun_reaches_the_caller() -> None:
    def flow() -> Generator[int, Any, None]:
        raise ZeroDivisionError((yield 1))

    with pytest.raises(ZeroDivisionError):
        begin(flow())


def test_a_twin_in_a_thread_needs_an_event_loop_of_asyncio() -> None:
    """Under trio there is none."""
    coroutine = Gate().aset_override("a", "heavy", "5/minute")
    expected = (
        "Gate.aset_override: expected a running event loop of asyncio, got none; under trio, call the synchronous "
        "methods (`set_override`, not `aset_override`) in a thread: "
        "await trio.to_thread.run_sync(gate.set_override, ...)"
    )
    with pytest.raises(HeadgateError, match=re.escape(expected)):
        coroutine.send(None)
    with pytest.raises(HeadgateError, match=r"Gate\.aclose: expected a running event loop of asyncio"):
        Gate().aclose().send(None)
