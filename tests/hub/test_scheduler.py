"""The scheduler: assignment, limited agents, bounds, and lists of tasks."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headgate.hub.errors import RequestError
from headgate.hub.storage.database import DatabaseError
from headgate.hub.tasks.task import Task
from tests.support.event_loop import take_turns
from tests.support.refusals import request_error
from tests.support.scheduler import MICROSECOND, SchedulerHarness, count_changes, open_harness, record_changes
from tests.support.valkey import PATIENCE

# The course of a task ------------------------------------------------------------------------------------------------


async def test_a_task_from_its_creation_to_its_result(harness: SchedulerHarness) -> None:
    task = await harness.scheduler.add("boss", b'{"do": "this"}')
    assert (task.creator, task.state, task.agent, task.attempt) == ("boss", "queued", None, 0)
    assert (task.progress, task.note, task.outcome, task.created_at) == (0, "", None, task.changed_at)
    assert len(task.task_id) == 32
    await harness.arrive("a")
    assert harness.told == [("a", task.task_id)]
    assert (harness.scheduler.task_of("a"), harness.scheduler.is_idle("a")) == (task.task_id, False)
    assert (await harness.scheduler.accept("a", task.task_id)).state == "accepted"
    task = await harness.scheduler.report_progress("a", task.task_id, 0.5, "half")
    assert (task.state, task.progress, task.note) == ("accepted", 0.5, "half")
    task = await harness.scheduler.complete("a", task.task_id, b"[1, 2]")
    assert (task.state, task.agent, task.attempt) == ("completed", "a", 1)
    assert task.changed_at >= task.created_at
    assert await harness.scheduler.find(task.task_id) == task
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
    assert (harness.scheduler.task_of("a"), harness.scheduler.is_idle("a")) == (None, True)


async def test_first_come_first_served_on_both_sides(harness: SchedulerHarness) -> None:
    tasks = [await harness.add() for _ in range(4)]
    await harness.arrive("a", "b")
    assert harness.told == [("a", tasks[0]), ("b", tasks[1])]
    await harness.work("b", tasks[1])
    await harness.work("a", tasks[0])
    assert harness.told[2:] == [("b", tasks[2]), ("a", tasks[3])]
    await harness.work("a", tasks[3])
    await harness.work("b", tasks[2])
    await harness.arrive("c")
    tasks += [await harness.add() for _ in range(3)]
    assert harness.told[4:] == [("a", tasks[4]), ("b", tasks[5]), ("c", tasks[6])]


async def test_a_hundred_tasks_at_once_go_to_a_hundred_agents(harness: SchedulerHarness) -> None:
    for number in range(100):
        harness.scheduler.agent_connected(f"a{number}")
    tasks = await asyncio.gather(*[harness.scheduler.add("boss", b"1") for _ in range(100)])
    async with asyncio.timeout(PATIENCE):
        while len(harness.told) < 100:
            await harness.settle()
    assert harness.told == [(f"a{number}", task.task_id) for number, task in enumerate(tasks)]
    assert harness.scheduler.counts() == {"queued": 0, "assigned": 100, "accepted": 0, "completed": 0, "failed": 0}


async def test_a_busy_agent_gets_no_task_until_it_is_idle(harness: SchedulerHarness) -> None:
    await harness.database.run(record_changes)
    await harness.arrive("a", "b")
    harness.scheduler.set_available("a", False)
    assert not harness.scheduler.is_idle("a")
    one, two = await harness.add(), await harness.add()
    assert harness.told == [("b", one)]
    assert await harness.database.run(count_changes) == 1
    harness.scheduler.set_available("a", False)
    harness.scheduler.set_available("a", True)
    await harness.settle()
    assert harness.told == [("b", one), ("a", two)]
    harness.scheduler.set_available("nobody", True)
    assert not harness.scheduler.is_idle("nobody")
    assert harness.scheduler.task_of("nobody") is None


async def test_repeating_idle_does_not_cost_the_place_in_the_queue(harness: SchedulerHarness) -> None:
    await harness.arrive("a", "b")
    harness.scheduler.set_available("a", True)
    harness.scheduler.agent_connected("a")
    task = await harness.add()
    assert harness.told == [("a", task)]


async def test_only_the_holder_changes_a_task(harness: SchedulerHarness) -> None:
    scheduler = harness.scheduler
    await harness.arrive("a", "b")
    task = await harness.add()

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
        assert [await request_error(frame, "expected") for frame in frames(agent, task)] == [(409, "not_yours")] * 6
    for unknown in ("", "x" * 32, "é", "\ud800", "'; --"):
        assert [await request_error(frame, "expected") for frame in frames("a", unknown)] == [(404, "unknown_task")] * 6
        assert await scheduler.find(unknown) is None
    await scheduler.accept("a", task)
    assert await request_error(scheduler.accept("a", task), "expected") == (409, "not_possible")
    await scheduler.complete("a", task, b"1")
    assert [await request_error(frame, "expected") for frame in frames("a", task)] == [(409, "not_possible")] * 6
    assert [await request_error(frame, "expected") for frame in frames("b", task)] == [(409, "not_yours")] * 6
    assert (await harness.task(task)).outcome == msgspec.Raw(b"1")


async def test_progress_and_completion_imply_acceptance(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    task = await harness.add()
    assert (await harness.scheduler.report_progress("a", task, 0.2, "on it")).state == "accepted"
    await harness.advance(31)
    assert (await harness.scheduler.complete("a", task, None)).state == "completed"
    task = await harness.add()
    assert (await harness.scheduler.complete("a", task, b"2")).state == "completed"


async def test_concurrent_completions_complete_a_task_once(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    task = await harness.add()
    answers = await asyncio.gather(
        *[harness.scheduler.complete("a", task, str(number).encode()) for number in range(5)],
        return_exceptions=True,
    )
    assert isinstance(answers[0], Task)
    assert [type(answer) for answer in answers[1:]] == [RequestError] * 4
    assert await harness.task(task) == answers[0]
    assert harness.scheduler.counts()["completed"] == 1


async def test_a_failed_task_is_retried_behind_the_others_up_to_five_attempts(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one, two = await harness.add(), await harness.add()
    again = await harness.scheduler.fail("a", one, "no network", True)
    assert (again.state, again.agent, again.attempt, again.note) == ("queued", None, 1, "no network")
    await harness.settle()
    await harness.work("a", two)
    for attempt in range(2, 5):
        task = await harness.scheduler.fail("a", one, "no network", True)
        assert (task.state, task.attempt, task.outcome) == ("queued", attempt, None)
        await harness.settle()
    assert [task for _, task in harness.told] == [one, two, one, one, one, one]
    last = await harness.scheduler.fail("a", one, "no network", True)
    assert (last.state, last.agent, last.attempt) == ("failed", "a", 5)
    assert last.outcome == msgspec.Raw(b'"no network"')
    await harness.settle()
    assert harness.scheduler.is_idle("a")


async def test_a_permanent_failure_ends_a_task(harness: SchedulerHarness) -> None:
    await harness.arrive("a", "b")
    task = await harness.add()
    assert (await harness.scheduler.fail("a", task, "nonsense", False)).state == "failed"
    await harness.settle()
    assert harness.told == [("a", task)]


# Who is rate limited -------------------------------------------------------------------------------------------------


async def test_b5_a_limited_agent_gets_no_task_and_others_do(harness: SchedulerHarness) -> None:
    await harness.arrive("a", "b")
    harness.gate.record_violation("a")
    one, two = await harness.add(), await harness.add()
    assert harness.told == [("b", one)]
    await harness.work("b", one)
    assert harness.told == [("b", one), ("b", two)]


async def test_b5_a_limited_agent_keeps_its_task(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one, two = await harness.add(), await harness.add()
    harness.gate.record_violation("a")
    await harness.scheduler.accept("a", one)
    await harness.advance(20)
    await harness.scheduler.report_progress("a", one, 0.5, "")
    assert (await harness.scheduler.complete("a", one, b"1")).state == "completed"
    await harness.settle()
    assert harness.told == [("a", one)]
    await harness.advance(40)
    assert harness.told == [("a", one), ("a", two)]


async def test_b5_a_limited_agent_gets_tasks_again_after_exactly_sixty_seconds(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    harness.gate.record_violation("a")
    await harness.advance(20)
    task = await harness.add()
    await harness.advance(40 - MICROSECOND)
    assert harness.told == []
    await harness.advance(MICROSECOND)
    assert harness.told == [("a", task)]


async def test_b5_another_violation_restarts_the_sixty_seconds(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    harness.gate.record_violation("a")
    task = await harness.add()
    await harness.advance(59)
    harness.gate.record_violation("a")
    await harness.advance(60 - MICROSECOND)
    assert harness.told == []
    await harness.advance(MICROSECOND)
    assert harness.told == [("a", task)]


async def test_b5_a_limited_agent_keeps_its_place_in_the_queue(harness: SchedulerHarness) -> None:
    await harness.arrive("a", "b", "c")
    harness.gate.record_violation("a")
    one = await harness.add()
    await harness.scheduler.accept("b", one)
    await harness.advance(60)
    two = await harness.add()
    assert harness.told == [("b", one), ("a", two)]


async def test_b5_the_end_of_a_limit_assigns_nothing_to_absent_or_busy_agents(
    harness: SchedulerHarness,
) -> None:
    await harness.arrive("a", "b")
    harness.gate.record_violation("a")
    harness.gate.record_violation("b")
    task = await harness.add()
    await harness.leave("a")
    harness.scheduler.set_available("b", False)
    await harness.advance(100)
    assert harness.told == []
    await harness.arrive("a")
    assert harness.told == [("a", task)]


async def test_b5_reconnecting_does_not_lift_the_limit(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    harness.gate.record_violation("a")
    task = await harness.add()
    await harness.leave("a")
    await harness.arrive("a")
    harness.scheduler.set_available("a", False)
    harness.scheduler.set_available("a", True)
    await harness.settle()
    assert harness.told == []
    await harness.advance(60)
    assert harness.told == [("a", task)]


async def test_b10_a_limit_that_ends_early_is_noticed_at_once(harness: SchedulerHarness) -> None:
    await harness.arrive("a", "b")
    for agent in ("a", "b"):
        harness.gate.record_violation(agent)
    one, two = await harness.add(), await harness.add()
    harness.gate.reset_violations("a")
    harness.scheduler.recheck()
    await harness.settle()
    assert harness.told == [("a", one)]
    harness.gate.add_exemption("b")
    harness.scheduler.recheck()
    await harness.settle()
    assert harness.told == [("a", one), ("b", two)]
    await harness.work("b", two)
    three = await harness.add()
    assert harness.told[2:] == [("b", three)]


async def test_b10_the_limit_is_looked_up_when_a_task_is_assigned(harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    harness.gate.record_violation("a")
    harness.gate.reset_violations("a")
    one = await harness.add()
    assert harness.told == [("a", one)]
    await harness.scheduler.accept("a", one)
    harness.gate.record_violation("a")
    await harness.advance(60)
    await harness.scheduler.complete("a", one, None)
    two = await harness.add()
    assert harness.told[1:] == [("a", two)]


# Bounds --------------------------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_tasks_even_when_many_come_at_once(elsewhere: bool) -> None:
    async with open_harness(elsewhere=elsewhere, most_queued=3) as harness:
        answers = await asyncio.gather(
            *[harness.scheduler.add("boss", b"1") for _ in range(10)], return_exceptions=True
        )
        assert [isinstance(answer, Task) for answer in answers] == [True] * 3 + [False] * 7
        assert await request_error(harness.scheduler.add("boss", b"1"), "expected") == (503, "queue_full")
        await harness.arrive("a")
        await harness.add()
        assert harness.counts() == {"queued": 3, "assigned": 1}
        await harness.leave("a")  # what has been taken once is never refused
        assert harness.scheduler.counts()["queued"] == 4
        assert await request_error(harness.scheduler.add("boss", b"1"), "expected") == (503, "queue_full")


async def test_one_agent_does_not_fill_the_queue(path: Path) -> None:
    async with open_harness(path, most_per_agent=2) as harness:
        add = harness.scheduler.add
        answers = await asyncio.gather(*[add("greedy", b"1") for _ in range(5)], return_exceptions=True)
        assert [isinstance(answer, Task) for answer in answers] == [True] * 2 + [False] * 3
        assert await request_error(add("greedy", b"1"), "expected") == (409, "too_many_tasks")
        for _ in range(3):
            await add("", b"1")  # the admin
        await add("other", b"1")
    async with open_harness(path, most_per_agent=2) as harness:
        assert await request_error(harness.scheduler.add("greedy", b"1"), "expected") == (409, "too_many_tasks"), (
            "after a restart"
        )
        await harness.arrive("a")
        ((_, first),) = harness.told
        await harness.scheduler.accept("a", first)
        assert await request_error(harness.scheduler.add("greedy", b"1"), "expected") == (409, "too_many_tasks"), (
            "it isn't finished"
        )
        await harness.scheduler.complete("a", first, None)
        await harness.scheduler.add("greedy", b"1")
        assert await request_error(harness.scheduler.add("greedy", b"1"), "expected") == (409, "too_many_tasks")


async def test_tasks_count_for_the_admin_after_their_agents_were_dropped(path: Path) -> None:
    async with open_harness(path, most_per_agent=2) as harness:
        add = harness.scheduler.add
        await add("a", b"1")
        under_way = asyncio.create_task(add("a", b"2"))
        await take_turns(3)  # it is in the queue of the database
        await harness.scheduler.drop_agent_data()
        await under_way
        assert harness.scheduler._unfinished == {"": 2}
        await add("a", b"3")
        await harness.arrive("worker")
        ((_, first),) = harness.told
        await harness.scheduler.complete("worker", first, None)
        assert harness.scheduler._unfinished == {"": 1, "a": 1}
    async with open_harness(path) as harness:
        assert harness.scheduler._unfinished == {"": 1, "a": 1}, "as the database has it"


async def test_tasks_that_could_not_be_added_count_for_nobody() -> None:
    async with open_harness(most_per_agent=1) as harness:
        await harness.database.run(lambda db: db.execute("ALTER TABLE tasks RENAME TO moved").close())
        for _ in range(2):
            with pytest.raises(DatabaseError):
                await harness.scheduler.add("a", b"1")
        await harness.database.run(lambda db: db.execute("ALTER TABLE moved RENAME TO tasks").close())
        await harness.scheduler.add("a", b"1")
        assert harness.scheduler._unfinished == {"a": 1}


@pytest.mark.parametrize(("most", "reserve"), [(3, 1), (20, 2)])
async def test_the_admin_has_room_in_a_queue_that_agents_have_filled(most: int, reserve: int) -> None:
    async with open_harness(most_queued=most) as harness:
        add = harness.scheduler.add
        for _ in range(most):
            await add("greedy", b"1")
        assert await request_error(add("other", b"1"), "expected") == (503, "queue_full")
        for _ in range(reserve):
            await add("", b"1")
        assert await request_error(add("", b"1"), "expected") == (503, "queue_full")
        assert await request_error(add("other", b"1"), "expected") == (503, "queue_full")


async def test_finished_tasks_are_forgotten_oldest_first(path: Path) -> None:
    async with open_harness(path, most_finished=3) as harness:
        await harness.arrive("a", "slow")
        tasks = [await harness.add() for _ in range(5)]
        await harness.work("a", tasks[0])
        for task in tasks[2:]:
            await harness.work("a", task)
        await harness.scheduler.fail("slow", tasks[1], "late", False)
        await harness.settle()
        assert [task.task_id for task in await harness.scheduler.tasks()] == [tasks[4], tasks[3], tasks[1]]
        assert harness.counts() == {"completed": 2, "failed": 1}
        assert await harness.scheduler.find(tasks[0]) is None
        assert await request_error(harness.scheduler.complete("a", tasks[0], None), "expected") == (404, "unknown_task")
    async with open_harness(path, most_finished=2) as harness:
        await harness.settle()
        assert [task.task_id for task in await harness.scheduler.tasks()] == [tasks[4], tasks[1]]
        assert harness.counts() == {"completed": 1, "failed": 1}


async def test_tasks_are_listed_newest_first(harness: SchedulerHarness) -> None:
    async def ids(**query: Any) -> list[str]:
        return [task.task_id for task in await harness.scheduler.tasks(**query)]

    zero = await harness.add(creator="x")
    one = await harness.add(creator="y")
    await harness.arrive("y")
    assert await ids() == [one, zero]
    assert await ids(of="x") == [zero]
    assert await ids(of="y") == [one, zero]
    assert await ids(of="z") == []
    await harness.leave("y")
    assert await ids(of="y") == [one]  # what it doesn't hold any more isn't its own
    await harness.arrive("z")
    await harness.work("z", zero)
    assert await ids(of="z") == [one, zero]
    assert await ids(of="z", state="completed") == [zero]
    assert await ids(state="queued") == []
    more = [await harness.add(creator="x") for _ in range(5)]
    assert await ids(limit=2) == [more[4], more[3]]
    assert await ids(limit=2, before=more[3]) == [more[2], more[1]]
    assert await ids(before=one) == [zero]
    assert await ids(of="x", before=more[0]) == [zero]
    assert await request_error(harness.scheduler.tasks(before="\ud800"), "expected") == (404, "unknown_task")
    assert await request_error(harness.scheduler.tasks(before="nothing"), "expected") == (404, "unknown_task")
    assert await request_error(harness.scheduler.tasks(state="lost"), "expected") == (400, "invalid")
