"""The scheduler: who keeps a task, who loses it, and who recovers it."""

import pytest
from msgspec import Raw

from headgate.hub.tasks.task import Task
from tests.support.refusals import request_error
from tests.support.scheduler import MICROSECOND, SchedulerHarness, open_harness

# Agents that go, or don't answer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [False, True])
async def test_b5_the_task_of_an_agent_that_left_is_assigned_next(accepted: bool, harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one, two = await harness.add(), await harness.add()
    if accepted:
        await harness.scheduler.accept("a", one)
        await harness.scheduler.report_progress("a", one, 0.7, "nearly")
    await harness.leave("a")
    task = await harness.task(one)
    assert (task.state, task.agent, task.attempt, task.progress) == ("queued", None, 1, 0)
    assert task.note == "its agent left"
    await harness.arrive("b", "a")
    assert harness.told == [("a", one), ("b", one), ("a", two)]
    assert (await harness.task(one)).attempt == 2
    assert await request_error(harness.scheduler.complete("a", one, b"1"), "expected") == (409, "not_yours")
    await harness.work("b", one)


async def test_several_lost_tasks_are_requeued_in_order(harness: SchedulerHarness) -> None:
    await harness.arrive("a", "b", "c")
    tasks = [await harness.add() for _ in range(4)]
    for agent in ("b", "c", "a"):
        await harness.leave(agent)
    await harness.arrive("d", "e", "f", "g")
    assert harness.told[3:] == list(zip("defg", tasks, strict=True))


async def test_an_agent_that_does_not_accept_in_time_loses_the_task_and_gets_no_other(
    harness: SchedulerHarness,
) -> None:
    await harness.arrive("a")
    one = await harness.add()
    await harness.advance(30 - MICROSECOND)
    assert (await harness.task(one)).agent == "a"
    await harness.advance(MICROSECOND)
    task = await harness.task(one)
    assert (task.state, task.note) == ("queued", "not accepted in time")
    assert not harness.scheduler.is_idle("a")
    await harness.arrive("b")
    assert harness.told == [("a", one), ("b", one)]
    two = await harness.add()
    await harness.advance(29)
    assert len(harness.told) == 2
    assert await request_error(harness.scheduler.accept("a", one), "expected") == (409, "not_yours")
    await harness.settle()
    assert harness.told[2:] == [("a", two)]  # it has been heard of


async def test_an_unresponsive_agent_gets_tasks_again_when_it_reports_idle(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    task = await harness.add()
    await harness.advance(30)
    harness.scheduler.recheck()
    harness.scheduler.set_available("a", False)
    await harness.advance(30)
    assert harness.told == [("a", task)]
    harness.scheduler.set_available("a", True)
    await harness.settle()
    assert harness.told == [("a", task)] * 2
    assert (await harness.task(task)).attempt == 2
    await harness.advance(30)
    await harness.leave("a")
    await harness.arrive("a")
    assert harness.told == [("a", task)] * 3


async def test_a_task_accepted_in_time_stays_with_its_agent(elsewhere: bool) -> None:
    async with open_harness(elsewhere=elsewhere, accept_within=2) as harness:
        await harness.arrive("a", "b")
        task = await harness.add()
        await harness.advance(2 - MICROSECOND)
        await harness.scheduler.accept("a", task)
        await harness.advance(1000)
        assert harness.told == [("a", task)]


async def test_the_time_to_accept_starts_with_each_attempt(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    task = await harness.add()
    await harness.advance(20)
    await harness.scheduler.fail("a", task, "", True)
    await harness.settle()
    await harness.advance(20)  # 40 since the first attempt began
    assert (await harness.task(task)).agent == "a"
    await harness.advance(10)
    assert (await harness.task(task)).agent is None


# Recovering ----------------------------------------------------------------------------------------------------------


async def test_the_holder_recovers_its_task(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one = await harness.add()
    task = await harness.scheduler.recover("a", one)
    assert (task.state, task.note, task.attempt) == ("accepted", "recovering", 1)
    await harness.scheduler.report_progress("a", one, 0.5, "half")
    task = await harness.scheduler.recover("a", one)
    assert (task.state, task.note, task.progress) == ("accepted", "recovering", 0.5)
    await harness.advance(100)
    assert harness.told == [("a", one)]


async def test_the_last_holder_recovers_a_queued_task(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one = await harness.add()
    await harness.leave("a")
    harness.gate.record_violation("a")  # so that it isn't simply assigned
    await harness.arrive("a")
    assert (await harness.task(one)).state == "queued"
    task = await harness.scheduler.recover("a", one)
    assert (task.state, task.agent, task.attempt, task.note) == ("accepted", "a", 2, "recovering")
    assert harness.scheduler.task_of("a") == one
    await harness.arrive("b")
    await harness.advance(100)
    assert harness.told == [("a", one)]
    await harness.scheduler.complete("a", one, None)


async def test_nobody_else_can_recover_a_task(harness: SchedulerHarness) -> None:
    scheduler = harness.scheduler
    await harness.arrive("a")
    one = await harness.add()
    await harness.leave("a")
    assert await request_error(scheduler.recover("a", one), "expected") == (409, "not_yours")  # it isn't here
    for agent in ("a", "c"):
        harness.gate.record_violation(agent)
    await harness.arrive("a", "c")
    assert await request_error(scheduler.recover("c", one), "expected") == (409, "not_yours")  # it never had it
    scheduler.set_available("a", False)
    assert await request_error(scheduler.recover("a", one), "expected") == (409, "not_possible")
    scheduler.set_available("a", True)
    await harness.arrive("b")
    assert await request_error(scheduler.recover("a", one), "expected") == (409, "not_yours")  # somebody has it
    await harness.leave("b")
    assert await request_error(scheduler.recover("a", one), "expected") == (409, "not_yours")  # somebody had it since


async def test_an_agent_that_did_not_accept_in_time_can_recover(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one = await harness.add()
    await harness.advance(30)
    assert (await harness.scheduler.recover("a", one)).state == "accepted"
    assert harness.told == [("a", one)]


@pytest.mark.parametrize("other", [False, True])
async def test_a_refused_recovery_makes_an_unresponsive_agent_available(other: bool, harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one = await harness.add()
    await harness.advance(30)
    await harness.arrive("b")
    two = await harness.add()
    assert await request_error(harness.scheduler.recover("a", one if other else "none"), "expected") in (
        (409, "not_yours"),
        (404, "unknown_task"),
    )
    await harness.settle()
    assert harness.told == [("a", one), ("b", one), ("a", two)]


async def test_an_agent_with_another_task_cannot_recover(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one = await harness.add()
    await harness.scheduler.fail("a", one, "", True)
    await harness.settle()
    two = await harness.add()
    await harness.scheduler.fail("a", one, "", True)
    await harness.settle()
    assert harness.scheduler.task_of("a") == two
    assert await request_error(harness.scheduler.recover("a", one), "expected") == (409, "not_possible")


# Frames that can't be sent -------------------------------------------------------------------------------------------


async def test_an_undeliverable_assignment_goes_to_the_next_agent(harness: SchedulerHarness) -> None:
    tried: list[str] = []

    def assign(agent: str, task: Task) -> bool:
        tried.append(agent)
        return agent != "a"

    harness.on_assign = assign
    await harness.arrive("a", "b")
    one, two = await harness.add(), await harness.add()
    assert harness.told == [("b", one)]
    assert (await harness.task(one)).attempt == 1
    await harness.advance(1 - MICROSECOND)
    assert tried == ["a", "b"]
    await harness.advance(MICROSECOND)
    assert tried == ["a", "b", "a"]
    task = await harness.task(two)
    assert (task.state, task.agent, task.attempt) == ("queued", None, 0)
    assert await request_error(harness.scheduler.recover("a", two), "expected") == (
        409,
        "not_yours",
    )  # it never knew of it
    await harness.settle()
    assert tried == ["a", "b", "a", "a"]  # it was heard of
    harness.on_assign = lambda agent, task: True
    harness.scheduler.set_available("a", True)
    await harness.settle()
    assert harness.told == [("b", one), ("a", two)]


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("back", [False, True])
async def test_an_agent_may_leave_while_it_is_assigned_a_task(
    taken: bool, back: bool, harness: SchedulerHarness
) -> None:
    def assign(agent: str, task: Task) -> bool:
        harness.scheduler.agent_disconnected(agent)
        if back:
            harness.on_assign = lambda agent, task: True
            harness.scheduler.agent_connected(agent)
        return taken

    harness.on_assign = assign
    await harness.arrive("a")
    one, two = await harness.add(), await harness.add()
    harness.on_assign = lambda agent, task: True
    task = await harness.task(one)
    assert (task.agent, task.attempt) == ("a" if back else None, taken + back)
    await harness.arrive("b", "c")
    assert set((await harness.holders()).values()) == ({"a", "b"} if back else {"b", "c"})
    assert await harness.holders() == {one: "a", two: "b"} if back else {one: "b", two: "c"}


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_task_that_no_agent_survives_ends_as_failed(leaves: bool, harness: SchedulerHarness) -> None:
    poison, next_one = await harness.add(), await harness.add()
    for attempt in range(1, 6):
        await harness.arrive(f"agent-{attempt}")
        assert harness.told[-1] == (f"agent-{attempt}", poison)
        if leaves:
            await harness.leave(f"agent-{attempt}")
        else:
            await harness.advance(30)
    task = await harness.task(poison)
    note = "its agent left" if leaves else "not accepted in time"
    assert (task.state, task.attempt) == ("failed", 5)
    assert task.outcome == Raw(f'"{note}, at attempt 5"'.encode())
    await harness.arrive("another")
    assert harness.told[-1] == ("another", next_one), "the others go on"
