"""The scheduler: who gets which task, and when; how many there may be, and how they are listed."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec

from headgate.hub.errors import RequestError
from headgate.hub.tasks.task import Task
from tests.support.scheduler import MICROSECOND, Floor, changes, open_floor, refused, run, watch
from tests.support.valkey import PATIENCE

# The course of a task ------------------------------------------------------------------------------------------------


def test_a_task_from_its_creation_to_its_result() -> None:
    async def test(floor: Floor) -> None:
        task = await floor.scheduler.add("boss", b'{"do": "this"}')
        assert (task.creator, task.state, task.agent, task.attempt) == ("boss", "queued", None, 0)
        assert (task.progress, task.note, task.outcome, task.created_at) == (0, "", None, task.changed_at)
        assert len(task.task_id) == 32
        await floor.arrive("a")
        assert floor.told == [("a", task.task_id)]
        assert (floor.scheduler.task_of("a"), floor.scheduler.is_idle("a")) == (task.task_id, False)
        assert (await floor.scheduler.accept("a", task.task_id)).state == "accepted"
        task = await floor.scheduler.report_progress("a", task.task_id, 0.5, "half")
        assert (task.state, task.progress, task.note) == ("accepted", 0.5, "half")
        task = await floor.scheduler.complete("a", task.task_id, b"[1, 2]")
        assert (task.state, task.agent, task.attempt) == ("completed", "a", 1)
        assert task.changed_at >= task.created_at
        assert await floor.scheduler.find(task.task_id) == task
        assert msgspec.json.decode(msgspec.json.encode(task)) == {
            "task_id": task.task_id,
            "creator": "boss",
            "payload": {"do": "this"},
            "state": "completed",
            "agent": "a",
            "attempt": 1,
            "progress": 0.5,
            "note": "half",
            "outcome": [1, 2],
            "created_at": task.created_at,
            "changed_at": task.changed_at,
        }
        assert (floor.scheduler.task_of("a"), floor.scheduler.is_idle("a")) == (None, True)

    run(test)


def test_first_come_first_served_on_both_sides() -> None:
    async def test(floor: Floor) -> None:
        tasks = [await floor.add() for _ in range(4)]
        await floor.arrive("a", "b")
        assert floor.told == [("a", tasks[0]), ("b", tasks[1])]
        await floor.work("b", tasks[1])
        await floor.work("a", tasks[0])
        assert floor.told[2:] == [("b", tasks[2]), ("a", tasks[3])]
        await floor.work("a", tasks[3])
        await floor.work("b", tasks[2])
        await floor.arrive("c")
        tasks += [await floor.add() for _ in range(3)]
        assert floor.told[4:] == [("a", tasks[4]), ("b", tasks[5]), ("c", tasks[6])]

    run(test)


def test_a_hundred_tasks_at_once_go_to_a_hundred_agents() -> None:
    async def test(floor: Floor) -> None:
        for number in range(100):
            floor.scheduler.agent_connected(f"a{number}")
        tasks = await asyncio.gather(*[floor.scheduler.add("boss", b"1") for _ in range(100)])
        async with asyncio.timeout(PATIENCE):
            while len(floor.told) < 100:
                await floor.settle()
        assert floor.told == [(f"a{number}", task.task_id) for number, task in enumerate(tasks)]
        assert floor.scheduler.counts() == {"queued": 0, "assigned": 100, "accepted": 0, "completed": 0, "failed": 0}

    run(test)


def test_who_is_busy_gets_nothing_until_it_is_idle() -> None:
    async def test(floor: Floor) -> None:
        await floor.database.run(watch)
        await floor.arrive("a", "b")
        floor.scheduler.set_available("a", False)
        assert not floor.scheduler.is_idle("a")
        one, two = await floor.add(), await floor.add()
        assert floor.told == [("b", one)]
        assert await floor.database.run(changes) == 1
        floor.scheduler.set_available("a", False)
        floor.scheduler.set_available("a", True)
        await floor.settle()
        assert floor.told == [("b", one), ("a", two)]
        floor.scheduler.set_available("nobody", True)
        assert not floor.scheduler.is_idle("nobody")
        assert floor.scheduler.task_of("nobody") is None

    run(test)


def test_saying_twice_that_one_is_idle_costs_no_place_in_line() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        floor.scheduler.set_available("a", True)
        floor.scheduler.agent_connected("a")
        task = await floor.add()
        assert floor.told == [("a", task)]

    run(test)


def test_only_the_holder_is_heard() -> None:
    async def test(floor: Floor) -> None:
        scheduler = floor.scheduler
        await floor.arrive("a", "b")
        task = await floor.add()

        def frames(agent: str, task_id: str) -> list[Awaitable[Task]]:
            return [
                scheduler.accept(agent, task_id),
                scheduler.report_progress(agent, task_id, 0.1, ""),
                scheduler.complete(agent, task_id, b"1"),
                scheduler.fail(agent, task_id, "no", False),
                scheduler.fail(agent, task_id, "no", True),
                scheduler.recover(agent, task_id),
            ]

        for agent in ("b", "boss", ""):
            assert [await refused(frame) for frame in frames(agent, task)] == [(409, "not_yours")] * 6
        for unknown in ("", "x" * 32, "é", "\ud800", "'; --"):
            assert [await refused(frame) for frame in frames("a", unknown)] == [(404, "unknown_task")] * 6
            assert await scheduler.find(unknown) is None
        await scheduler.accept("a", task)
        assert await refused(scheduler.accept("a", task)) == (409, "not_possible")
        await scheduler.complete("a", task, b"1")
        assert [await refused(frame) for frame in frames("a", task)] == [(409, "not_possible")] * 6
        assert [await refused(frame) for frame in frames("b", task)] == [(409, "not_yours")] * 6
        assert (await floor.task(task)).outcome == msgspec.Raw(b"1")

    run(test)


def test_who_does_the_work_has_accepted_it() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        task = await floor.add()
        assert (await floor.scheduler.report_progress("a", task, 0.2, "on it")).state == "accepted"
        await floor.advance(31)
        assert (await floor.scheduler.complete("a", task, None)).state == "completed"
        task = await floor.add()
        assert (await floor.scheduler.complete("a", task, b"2")).state == "completed"

    run(test)


def test_a_task_is_completed_once_even_if_said_twice_at_once() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        task = await floor.add()
        answers = await asyncio.gather(
            *[floor.scheduler.complete("a", task, str(number).encode()) for number in range(5)],
            return_exceptions=True,
        )
        assert isinstance(answers[0], Task)
        assert [type(answer) for answer in answers[1:]] == [RequestError] * 4
        assert await floor.task(task) == answers[0]
        assert floor.scheduler.counts()["completed"] == 1

    run(test)


def test_what_failed_is_tried_again_behind_the_others_five_times_in_all() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one, two = await floor.add(), await floor.add()
        again = await floor.scheduler.fail("a", one, "no network", True)
        assert (again.state, again.agent, again.attempt, again.note) == ("queued", None, 1, "no network")
        await floor.settle()
        await floor.work("a", two)
        for attempt in range(2, 5):
            task = await floor.scheduler.fail("a", one, "no network", True)
            assert (task.state, task.attempt, task.outcome) == ("queued", attempt, None)
            await floor.settle()
        assert [task for _, task in floor.told] == [one, two, one, one, one, one]
        last = await floor.scheduler.fail("a", one, "no network", True)
        assert (last.state, last.agent, last.attempt) == ("failed", "a", 5)
        assert last.outcome == msgspec.Raw(b'"no network"')
        await floor.settle()
        assert floor.scheduler.is_idle("a")

    run(test)


def test_what_failed_for_good_has_ended() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        task = await floor.add()
        assert (await floor.scheduler.fail("a", task, "nonsense", False)).state == "failed"
        await floor.settle()
        assert floor.told == [("a", task)]

    run(test)


# Who is rate limited -------------------------------------------------------------------------------------------------


def test_b5_who_is_limited_gets_no_task_and_others_do() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        floor.gate.record_violation("a")
        one, two = await floor.add(), await floor.add()
        assert floor.told == [("b", one)]
        await floor.work("b", one)
        assert floor.told == [("b", one), ("b", two)]

    run(test)


def test_b5_work_that_a_limited_agent_has_goes_on() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one, two = await floor.add(), await floor.add()
        floor.gate.record_violation("a")
        await floor.scheduler.accept("a", one)
        await floor.advance(20)
        await floor.scheduler.report_progress("a", one, 0.5, "")
        assert (await floor.scheduler.complete("a", one, b"1")).state == "completed"
        await floor.settle()
        assert floor.told == [("a", one)]
        await floor.advance(40)
        assert floor.told == [("a", one), ("a", two)]

    run(test)


def test_b5_it_gets_tasks_again_by_itself_after_exactly_sixty_seconds() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        floor.gate.record_violation("a")
        await floor.advance(20)
        task = await floor.add()
        await floor.advance(40 - MICROSECOND)
        assert floor.told == []
        await floor.advance(MICROSECOND)
        assert floor.told == [("a", task)]

    run(test)


def test_b5_a_violation_meanwhile_begins_another_sixty_seconds() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        floor.gate.record_violation("a")
        task = await floor.add()
        await floor.advance(59)
        floor.gate.record_violation("a")
        await floor.advance(60 - MICROSECOND)
        assert floor.told == []
        await floor.advance(MICROSECOND)
        assert floor.told == [("a", task)]

    run(test)


def test_b5_who_was_limited_has_kept_its_place() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b", "c")
        floor.gate.record_violation("a")
        one = await floor.add()
        await floor.scheduler.accept("b", one)
        await floor.advance(60)
        two = await floor.add()
        assert floor.told == [("b", one), ("a", two)]

    run(test)


def test_b5_a_limited_agent_that_left_or_is_busy_is_not_brought_back_by_the_clock() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        floor.gate.record_violation("a")
        floor.gate.record_violation("b")
        task = await floor.add()
        await floor.leave("a")
        floor.scheduler.set_available("b", False)
        await floor.advance(100)
        assert floor.told == []
        await floor.arrive("a")
        assert floor.told == [("a", task)]

    run(test)


def test_b5_coming_back_does_not_lift_the_limit() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        floor.gate.record_violation("a")
        task = await floor.add()
        await floor.leave("a")
        await floor.arrive("a")
        floor.scheduler.set_available("a", False)
        floor.scheduler.set_available("a", True)
        await floor.settle()
        assert floor.told == []
        await floor.advance(60)
        assert floor.told == [("a", task)]

    run(test)


def test_b10_what_ends_a_limit_early_is_seen_at_once() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        for agent in ("a", "b"):
            floor.gate.record_violation(agent)
        one, two = await floor.add(), await floor.add()
        floor.gate.reset_violations("a")
        floor.scheduler.recheck()
        await floor.settle()
        assert floor.told == [("a", one)]
        floor.gate.add_exemption("b")
        floor.scheduler.recheck()
        await floor.settle()
        assert floor.told == [("a", one), ("b", two)]
        await floor.work("b", two)
        three = await floor.add()
        assert floor.told[2:] == [("b", three)]

    run(test)


def test_b10_it_is_looked_up_at_the_agents_turn() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        floor.gate.record_violation("a")
        floor.gate.reset_violations("a")
        one = await floor.add()
        assert floor.told == [("a", one)]
        await floor.scheduler.accept("a", one)
        floor.gate.record_violation("a")
        await floor.advance(60)
        await floor.scheduler.complete("a", one, None)
        two = await floor.add()
        assert floor.told[1:] == [("a", two)]

    run(test)


# Bounds --------------------------------------------------------------------------------------------------------------


def test_a_full_queue_takes_no_more_however_many_come_at_once() -> None:
    async def test(floor: Floor) -> None:
        answers = await asyncio.gather(*[floor.scheduler.add("boss", b"1") for _ in range(10)], return_exceptions=True)
        assert [isinstance(answer, Task) for answer in answers] == [True] * 3 + [False] * 7
        assert await refused(floor.scheduler.add("boss", b"1")) == (503, "queue_full")
        await floor.arrive("a")
        await floor.add()
        assert floor.scheduler.counts() == {"queued": 3, "assigned": 1, "accepted": 0, "completed": 0, "failed": 0}
        await floor.leave("a")  # what has been taken once is never refused
        assert floor.scheduler.counts()["queued"] == 4
        assert await refused(floor.scheduler.add("boss", b"1")) == (503, "queue_full")

    run(test, most_queued=3)


def test_finished_tasks_are_forgotten_those_first_that_ended_first(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "hub.db"
        async with open_floor(path, most_finished=3) as floor:
            await floor.arrive("a", "slow")
            tasks = [await floor.add() for _ in range(5)]
            await floor.work("a", tasks[0])
            for task in tasks[2:]:
                await floor.work("a", task)
            await floor.scheduler.fail("slow", tasks[1], "late", False)
            await floor.settle()
            assert [task.task_id for task in await floor.scheduler.tasks()] == [tasks[4], tasks[3], tasks[1]]
            assert floor.scheduler.counts() == {"queued": 0, "assigned": 0, "accepted": 0, "completed": 2, "failed": 1}
            assert await floor.scheduler.find(tasks[0]) is None
            assert await refused(floor.scheduler.complete("a", tasks[0], None)) == (404, "unknown_task")
        async with open_floor(path, most_finished=2) as floor:
            await floor.settle()
            assert [task.task_id for task in await floor.scheduler.tasks()] == [tasks[4], tasks[1]]
            assert floor.scheduler.counts() == {"queued": 0, "assigned": 0, "accepted": 0, "completed": 1, "failed": 1}

    asyncio.run(main())


def test_lists_newest_first() -> None:
    async def test(floor: Floor) -> None:
        async def ids(**query: Any) -> list[str]:
            return [task.task_id for task in await floor.scheduler.tasks(**query)]

        zero = await floor.add(creator="x")
        one = await floor.add(creator="y")
        await floor.arrive("y")
        assert await ids() == [one, zero]
        assert await ids(of="x") == [zero]
        assert await ids(of="y") == [one, zero]
        assert await ids(of="z") == []
        await floor.leave("y")
        assert await ids(of="y") == [one]  # what it doesn't hold any more isn't its own
        await floor.arrive("z")
        await floor.work("z", zero)
        assert await ids(of="z") == [one, zero]
        assert await ids(of="z", state="completed") == [zero]
        assert await ids(state="queued") == []
        more = [await floor.add(creator="x") for _ in range(5)]
        assert await ids(limit=2) == [more[4], more[3]]
        assert await ids(limit=2, before=more[3]) == [more[2], more[1]]
        assert await ids(before=one) == [zero]
        assert await ids(of="x", before=more[0]) == [zero]
        assert await refused(floor.scheduler.tasks(before="\ud800")) == (404, "unknown_task")
        assert await refused(floor.scheduler.tasks(before="nothing")) == (404, "unknown_task")
        assert await refused(floor.scheduler.tasks(state="lost")) == (400, "invalid")

    run(test)
