"""The scheduler: who keeps a task, who loses it and who gets it back."""

import pytest

from headgate.hub.tasks.task import Task
from tests.support.scheduler import MICROSECOND, Floor, refused, run

# Agents that go, or don't answer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [False, True])
def test_b5_the_task_of_an_agent_that_left_goes_to_the_next_before_all_others(accepted: bool) -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one, two = await floor.add(), await floor.add()
        if accepted:
            await floor.scheduler.accept("a", one)
            await floor.scheduler.report_progress("a", one, 0.7, "nearly")
        await floor.leave("a")
        task = await floor.task(one)
        assert (task.state, task.agent, task.attempt, task.progress) == ("queued", None, 1, 0)
        assert task.note == "its agent left"
        await floor.arrive("b", "a")
        assert floor.told == [("a", one), ("b", one), ("a", two)]
        assert (await floor.task(one)).attempt == 2
        assert await refused(floor.scheduler.complete("a", one, b"1")) == (409, "not_yours")
        await floor.work("b", one)

    run(test)


def test_several_that_were_lost_come_back_in_their_order() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b", "c")
        tasks = [await floor.add() for _ in range(4)]
        for agent in ("b", "c", "a"):
            await floor.leave(agent)
        await floor.arrive("d", "e", "f", "g")
        assert floor.told[3:] == list(zip("defg", tasks, strict=True))

    run(test)


def test_who_does_not_accept_in_time_loses_the_task_and_gets_no_other() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one = await floor.add()
        await floor.advance(30 - MICROSECOND)
        assert (await floor.task(one)).agent == "a"
        await floor.advance(MICROSECOND)
        task = await floor.task(one)
        assert (task.state, task.note) == ("queued", "not accepted in time")
        assert not floor.scheduler.is_idle("a")
        await floor.arrive("b")
        assert floor.told == [("a", one), ("b", one)]
        two = await floor.add()
        await floor.advance(29)
        assert len(floor.told) == 2
        assert await refused(floor.scheduler.accept("a", one)) == (409, "not_yours")
        await floor.settle()
        assert floor.told[2:] == [("a", two)]  # it has been heard of

    run(test)


def test_who_did_not_answer_is_back_when_it_says_that_it_is_idle() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        task = await floor.add()
        await floor.advance(30)
        floor.scheduler.recheck()
        floor.scheduler.set_available("a", False)
        await floor.advance(30)
        assert floor.told == [("a", task)]
        floor.scheduler.set_available("a", True)
        await floor.settle()
        assert floor.told == [("a", task)] * 2
        assert (await floor.task(task)).attempt == 2
        await floor.advance(30)
        await floor.leave("a")
        await floor.arrive("a")
        assert floor.told == [("a", task)] * 3

    run(test, accept_within=30)


def test_what_was_accepted_in_time_stays() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        task = await floor.add()
        await floor.advance(2 - MICROSECOND)
        await floor.scheduler.accept("a", task)
        await floor.advance(1000)
        assert floor.told == [("a", task)]

    run(test, accept_within=2)


def test_the_time_to_accept_is_that_of_the_attempt() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        task = await floor.add()
        await floor.advance(20)
        await floor.scheduler.fail("a", task, "", True)
        await floor.settle()
        await floor.advance(20)  # 40 since the first attempt began
        assert (await floor.task(task)).agent == "a"
        await floor.advance(10)
        assert (await floor.task(task)).agent is None

    run(test)


# Recovering ----------------------------------------------------------------------------------------------------------


def test_the_holder_recovers() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one = await floor.add()
        task = await floor.scheduler.recover("a", one)
        assert (task.state, task.note, task.attempt) == ("accepted", "recovering", 1)
        await floor.scheduler.report_progress("a", one, 0.5, "half")
        task = await floor.scheduler.recover("a", one)
        assert (task.state, task.note, task.progress) == ("accepted", "recovering", 0.5)
        await floor.advance(100)
        assert floor.told == [("a", one)]

    run(test)


def test_the_last_holder_gets_it_back_if_nobody_else_has_it() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one = await floor.add()
        await floor.leave("a")
        floor.gate.record_violation("a")  # so that it isn't simply assigned
        await floor.arrive("a")
        assert (await floor.task(one)).state == "queued"
        task = await floor.scheduler.recover("a", one)
        assert (task.state, task.agent, task.attempt, task.note) == ("accepted", "a", 2, "recovering")
        assert floor.scheduler.task_of("a") == one
        await floor.arrive("b")
        await floor.advance(100)
        assert floor.told == [("a", one)]
        await floor.scheduler.complete("a", one, None)

    run(test)


def test_recovering_is_refused_to_all_others() -> None:
    async def test(floor: Floor) -> None:
        scheduler = floor.scheduler
        await floor.arrive("a")
        one = await floor.add()
        await floor.leave("a")
        assert await refused(scheduler.recover("a", one)) == (409, "not_yours")  # it isn't here
        for agent in ("a", "c"):
            floor.gate.record_violation(agent)
        await floor.arrive("a", "c")
        assert await refused(scheduler.recover("c", one)) == (409, "not_yours")  # it never had it
        scheduler.set_available("a", False)
        assert await refused(scheduler.recover("a", one)) == (409, "not_possible")
        scheduler.set_available("a", True)
        await floor.arrive("b")
        assert await refused(scheduler.recover("a", one)) == (409, "not_yours")  # somebody has it
        await floor.leave("b")
        assert await refused(scheduler.recover("a", one)) == (409, "not_yours")  # somebody had it since

    run(test)


def test_who_did_not_accept_in_time_can_recover() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one = await floor.add()
        await floor.advance(30)
        assert (await floor.scheduler.recover("a", one)).state == "accepted"
        assert floor.told == [("a", one)]

    run(test)


@pytest.mark.parametrize("other", [False, True])
def test_who_did_not_answer_and_cannot_recover_has_been_heard_of(other: bool) -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one = await floor.add()
        await floor.advance(30)
        await floor.arrive("b")
        two = await floor.add()
        assert await refused(floor.scheduler.recover("a", one if other else "none")) in (
            (409, "not_yours"),
            (404, "unknown_task"),
        )
        await floor.settle()
        assert floor.told == [("a", one), ("b", one), ("a", two)]

    run(test)


def test_who_has_other_work_does_not_recover() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one = await floor.add()
        await floor.scheduler.fail("a", one, "", True)
        await floor.settle()
        two = await floor.add()
        await floor.scheduler.fail("a", one, "", True)
        await floor.settle()
        assert floor.scheduler.task_of("a") == two
        assert await refused(floor.scheduler.recover("a", one)) == (409, "not_possible")

    run(test)


# Frames that can't be sent -------------------------------------------------------------------------------------------


def test_a_frame_that_is_not_taken_goes_to_the_next() -> None:
    async def test(floor: Floor) -> None:
        tried: list[str] = []

        def assign(agent: str, task: Task) -> bool:
            tried.append(agent)
            return agent != "a"

        floor.on_assign = assign
        await floor.arrive("a", "b")
        one, two = await floor.add(), await floor.add()
        assert floor.told == [("b", one)]
        assert (await floor.task(one)).attempt == 1
        await floor.advance(1 - MICROSECOND)
        assert tried == ["a", "b"]
        await floor.advance(MICROSECOND)
        assert tried == ["a", "b", "a"]
        task = await floor.task(two)
        assert (task.state, task.agent, task.attempt) == ("queued", None, 0)
        assert await refused(floor.scheduler.recover("a", two)) == (409, "not_yours")  # it never knew of it
        await floor.settle()
        assert tried == ["a", "b", "a", "a"]  # it was heard of
        floor.on_assign = lambda agent, task: True
        floor.scheduler.set_available("a", True)
        await floor.settle()
        assert floor.told == [("b", one), ("a", two)]

    run(test)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_an_agent_that_leaves_while_it_is_told(taken: bool, back: bool) -> None:
    async def test(floor: Floor) -> None:
        def assign(agent: str, task: Task) -> bool:
            floor.scheduler.agent_disconnected(agent)
            if back:
                floor.on_assign = lambda agent, task: True
                floor.scheduler.agent_connected(agent)
            return taken

        floor.on_assign = assign
        await floor.arrive("a")
        one, two = await floor.add(), await floor.add()
        floor.on_assign = lambda agent, task: True
        task = await floor.task(one)
        assert (task.agent, task.attempt) == ("a" if back else None, taken + back)
        await floor.arrive("b", "c")
        assert set((await floor.holders()).values()) == ({"a", "b"} if back else {"b", "c"})
        assert await floor.holders() == {one: "a", two: "b"} if back else {one: "b", two: "c"}

    run(test)
