"""The scheduler: who gets which task, and when; and that none is lost or held by two, whatever happens meanwhile."""

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elsewhere import Elsewhere

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.errors import StoreError
from headgate.hub.ledger import Ledger, LedgerError
from headgate.hub.refusing import Refused
from headgate.hub.scheduler import Scheduler
from headgate.hub.tasks import STATES, Task
from headgate.stores import Offence
from headgate.violations import Standing

MICROSECOND = 0.000001


class Floor:
    """A scheduler with its ledger, gate and clock, and what it has told to whom."""

    def __init__(self, ledger: Ledger, gate: Gate, clock: ManualClock, **options: Any) -> None:
        self.ledger, self.gate, self.clock = ledger, gate, clock
        self.told: list[tuple[str, str]] = []
        self.on_assign: Callable[[str, Task], bool] = lambda agent, task: True
        self.scheduler = Scheduler(ledger, gate, clock, self._assign, **options)

    def _assign(self, agent: str, task: Task) -> bool:
        assert (task.state, task.agent) == ("assigned", agent)
        taken = self.on_assign(agent, task)
        if taken:
            self.told.append((agent, task.task_id))
        return taken

    async def settle(self) -> None:
        """Let everything happen that is due now; pieces of work are done in their order, so that these are the last."""
        for _ in range(6):
            for _ in range(12):
                await asyncio.sleep(0)
            with suppress(LedgerError):  # in the tests in which it fails
                await self.ledger.run(lambda db: None)

    async def cut(self) -> None:
        """Begin to stop; the end of the loop then cuts off what is under way."""
        self.stopping = asyncio.ensure_future(self.scheduler.close())
        await asyncio.sleep(0)

    async def arrive(self, *agents: str) -> None:
        for agent in agents:
            self.scheduler.arrived(agent)
        await self.settle()

    async def leave(self, agent: str) -> None:
        self.scheduler.left(agent)
        await self.settle()

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self.settle()

    async def add(self, payload: bytes = b"{}", creator: str = "boss") -> str:
        task = await self.scheduler.add(creator, payload)
        await self.settle()
        return task.task_id

    async def task(self, task_id: str) -> Task:
        task = await self.scheduler.find(task_id)
        assert task is not None
        return task

    async def work(self, agent: str, task_id: str) -> None:
        """Do a task that was assigned, from its acceptance to its end."""
        await self.scheduler.accepted(agent, task_id)
        await self.scheduler.completed(agent, task_id, None)
        await self.settle()

    async def holders(self) -> dict[str, str | None]:
        return {task.task_id: task.agent for task in await self.scheduler.tasks()}


@asynccontextmanager
async def open_floor(
    path: Path | None = None, *, clock: ManualClock | None = None, elsewhere: bool = False, **options: Any
) -> AsyncIterator[Floor]:
    clock = clock or ManualClock(start=1000)
    gate = Gate(Policy(), store=Elsewhere(clock=clock) if elsewhere else MemoryStore(clock=clock))
    with closing(Ledger(path)) as ledger, closing(gate):
        floor = Floor(ledger, gate, clock, **options)
        await floor.scheduler.start()
        yield floor
        await floor.scheduler.close()


def run(test: Callable[[Floor], Awaitable[None]], **options: Any) -> None:
    """Run a test on a floor of its own, once with a gate that answers at once and once with one that doesn't."""

    async def main(elsewhere: bool) -> None:
        async with open_floor(elsewhere=elsewhere, **options) as floor:
            await test(floor)

    for elsewhere in (False, True):
        asyncio.run(main(elsewhere))


def watch(db: sqlite3.Connection) -> None:
    """Have the ledger itself write down every change of a task, and how many others its holder had then."""
    db.execute(
        "CREATE TABLE IF NOT EXISTS changes "
        "(task, before, after, agent_before, agent_after, attempt_before, attempt_after, others)"
    )
    db.execute(
        "CREATE TRIGGER IF NOT EXISTS watch AFTER UPDATE ON tasks BEGIN INSERT INTO changes VALUES "
        "(new.task, old.state, new.state, old.agent, new.agent, old.attempt, new.attempt, "
        "(SELECT count(*) FROM tasks WHERE agent = new.agent AND number <> new.number "
        "AND state IN ('assigned', 'accepted') AND new.state IN ('assigned', 'accepted'))); END"
    )


def changes(db: sqlite3.Connection) -> int:
    """How many changes were written down."""
    return len(db.execute("SELECT 1 FROM changes").fetchall())


def wrong(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    """The changes that were written down and are not in the scheduler's table."""
    return [change for change in db.execute("SELECT * FROM changes").fetchall() if not is_right(*change)]


def is_right(
    task: str, before: str, after: str, agent_before: str | None, agent_after: str | None, *numbers: int
) -> bool:
    attempt_before, attempt_after, others = numbers
    attempts, same = attempt_after - attempt_before, agent_before == agent_after
    if others:
        return False
    match before, after:
        case "queued", "assigned":
            return agent_after is not None and attempts == 1
        case "queued", "accepted":
            return same and agent_after is not None and attempts == 1
        case "assigned", "queued":
            return (same and attempts == 0) or attempts == -1
        case ("accepted", "queued") | ("assigned" | "accepted", "accepted" | "completed" | "failed"):
            return same and attempts == 0
        case _:
            return False


async def refused(request: Awaitable[object]) -> tuple[int, str]:
    with pytest.raises(Refused) as caught:
        await request
    assert "expected" in caught.value.detail
    return caught.value.status, caught.value.error


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
        assert (await floor.scheduler.accepted("a", task.task_id)).state == "accepted"
        task = await floor.scheduler.progressed("a", task.task_id, 0.5, "half")
        assert (task.state, task.progress, task.note) == ("accepted", 0.5, "half")
        task = await floor.scheduler.completed("a", task.task_id, b"[1, 2]")
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
            floor.scheduler.arrived(f"a{number}")
        tasks = await asyncio.gather(*[floor.scheduler.add("boss", b"1") for _ in range(100)])
        async with asyncio.timeout(20):
            while len(floor.told) < 100:
                await floor.settle()
        assert floor.told == [(f"a{number}", task.task_id) for number, task in enumerate(tasks)]
        assert floor.scheduler.counts() == {"queued": 0, "assigned": 100, "accepted": 0, "completed": 0, "failed": 0}

    run(test)


def test_who_is_busy_gets_nothing_until_it_is_idle() -> None:
    async def test(floor: Floor) -> None:
        await floor.ledger.run(watch)
        await floor.arrive("a", "b")
        floor.scheduler.available("a", False)
        assert not floor.scheduler.is_idle("a")
        one, two = await floor.add(), await floor.add()
        assert floor.told == [("b", one)]
        assert await floor.ledger.run(changes) == 1
        floor.scheduler.available("a", False)
        floor.scheduler.available("a", True)
        await floor.settle()
        assert floor.told == [("b", one), ("a", two)]
        floor.scheduler.available("nobody", True)
        assert not floor.scheduler.is_idle("nobody")
        assert floor.scheduler.task_of("nobody") is None

    run(test)


def test_saying_twice_that_one_is_idle_costs_no_place_in_line() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        floor.scheduler.available("a", True)
        floor.scheduler.arrived("a")
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
                scheduler.accepted(agent, task_id),
                scheduler.progressed(agent, task_id, 0.1, ""),
                scheduler.completed(agent, task_id, b"1"),
                scheduler.failed(agent, task_id, "no", False),
                scheduler.failed(agent, task_id, "no", True),
                scheduler.recovering(agent, task_id),
            ]

        for agent in ("b", "boss", ""):
            assert [await refused(frame) for frame in frames(agent, task)] == [(409, "not_yours")] * 6
        for unknown in ("", "x" * 32, "é", "\ud800", "'; --"):
            assert [await refused(frame) for frame in frames("a", unknown)] == [(404, "unknown_task")] * 6
            assert await scheduler.find(unknown) is None
        await scheduler.accepted("a", task)
        assert await refused(scheduler.accepted("a", task)) == (409, "not_possible")
        await scheduler.completed("a", task, b"1")
        assert [await refused(frame) for frame in frames("a", task)] == [(409, "not_possible")] * 6
        assert [await refused(frame) for frame in frames("b", task)] == [(409, "not_yours")] * 6
        assert (await floor.task(task)).outcome == msgspec.Raw(b"1")

    run(test)


def test_who_does_the_work_has_accepted_it() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        task = await floor.add()
        assert (await floor.scheduler.progressed("a", task, 0.2, "on it")).state == "accepted"
        await floor.advance(31)
        assert (await floor.scheduler.completed("a", task, None)).state == "completed"
        task = await floor.add()
        assert (await floor.scheduler.completed("a", task, b"2")).state == "completed"

    run(test)


def test_a_task_is_completed_once_even_if_said_twice_at_once() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        task = await floor.add()
        answers = await asyncio.gather(
            *[floor.scheduler.completed("a", task, str(number).encode()) for number in range(5)],
            return_exceptions=True,
        )
        assert isinstance(answers[0], Task)
        assert [type(answer) for answer in answers[1:]] == [Refused] * 4
        assert await floor.task(task) == answers[0]
        assert floor.scheduler.counts()["completed"] == 1

    run(test)


def test_what_failed_is_tried_again_behind_the_others_five_times_in_all() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one, two = await floor.add(), await floor.add()
        again = await floor.scheduler.failed("a", one, "no network", True)
        assert (again.state, again.agent, again.attempt, again.note) == ("queued", None, 1, "no network")
        await floor.settle()
        await floor.work("a", two)
        for attempt in range(2, 5):
            task = await floor.scheduler.failed("a", one, "no network", True)
            assert (task.state, task.attempt, task.outcome) == ("queued", attempt, None)
            await floor.settle()
        assert [task for _, task in floor.told] == [one, two, one, one, one, one]
        last = await floor.scheduler.failed("a", one, "no network", True)
        assert (last.state, last.agent, last.attempt) == ("failed", "a", 5)
        assert last.outcome == msgspec.Raw(b'"no network"')
        await floor.settle()
        assert floor.scheduler.is_idle("a")

    run(test)


def test_what_failed_for_good_has_ended() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        task = await floor.add()
        assert (await floor.scheduler.failed("a", task, "nonsense", False)).state == "failed"
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
        await floor.scheduler.accepted("a", one)
        await floor.advance(20)
        await floor.scheduler.progressed("a", one, 0.5, "")
        assert (await floor.scheduler.completed("a", one, b"1")).state == "completed"
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
        await floor.scheduler.accepted("b", one)
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
        floor.scheduler.available("b", False)
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
        floor.scheduler.available("a", False)
        floor.scheduler.available("a", True)
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
        floor.scheduler.look_again()
        await floor.settle()
        assert floor.told == [("a", one)]
        floor.gate.add_exemption("b")
        floor.scheduler.look_again()
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
        await floor.scheduler.accepted("a", one)
        floor.gate.record_violation("a")
        await floor.advance(60)
        await floor.scheduler.completed("a", one, None)
        two = await floor.add()
        assert floor.told[1:] == [("a", two)]

    run(test)


# Agents that go, or don't answer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [False, True])
def test_b5_the_task_of_an_agent_that_left_goes_to_the_next_before_all_others(accepted: bool) -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one, two = await floor.add(), await floor.add()
        if accepted:
            await floor.scheduler.accepted("a", one)
            await floor.scheduler.progressed("a", one, 0.7, "nearly")
        await floor.leave("a")
        task = await floor.task(one)
        assert (task.state, task.agent, task.attempt, task.progress) == ("queued", None, 1, 0)
        assert task.note == "its agent left"
        await floor.arrive("b", "a")
        assert floor.told == [("a", one), ("b", one), ("a", two)]
        assert (await floor.task(one)).attempt == 2
        assert await refused(floor.scheduler.completed("a", one, b"1")) == (409, "not_yours")
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
        assert await refused(floor.scheduler.accepted("a", one)) == (409, "not_yours")
        await floor.settle()
        assert floor.told[2:] == [("a", two)]  # it has been heard of

    run(test)


def test_who_did_not_answer_is_back_when_it_says_that_it_is_idle() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        task = await floor.add()
        await floor.advance(30)
        floor.scheduler.look_again()
        floor.scheduler.available("a", False)
        await floor.advance(30)
        assert floor.told == [("a", task)]
        floor.scheduler.available("a", True)
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
        await floor.scheduler.accepted("a", task)
        await floor.advance(1000)
        assert floor.told == [("a", task)]

    run(test, accept_within=2)


def test_the_time_to_accept_is_that_of_the_attempt() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        task = await floor.add()
        await floor.advance(20)
        await floor.scheduler.failed("a", task, "", True)
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
        task = await floor.scheduler.recovering("a", one)
        assert (task.state, task.note, task.attempt) == ("accepted", "recovering", 1)
        await floor.scheduler.progressed("a", one, 0.5, "half")
        task = await floor.scheduler.recovering("a", one)
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
        task = await floor.scheduler.recovering("a", one)
        assert (task.state, task.agent, task.attempt, task.note) == ("accepted", "a", 2, "recovering")
        assert floor.scheduler.task_of("a") == one
        await floor.arrive("b")
        await floor.advance(100)
        assert floor.told == [("a", one)]
        await floor.scheduler.completed("a", one, None)

    run(test)


def test_recovering_is_refused_to_all_others() -> None:
    async def test(floor: Floor) -> None:
        scheduler = floor.scheduler
        await floor.arrive("a")
        one = await floor.add()
        await floor.leave("a")
        assert await refused(scheduler.recovering("a", one)) == (409, "not_yours")  # it isn't here
        for agent in ("a", "c"):
            floor.gate.record_violation(agent)
        await floor.arrive("a", "c")
        assert await refused(scheduler.recovering("c", one)) == (409, "not_yours")  # it never had it
        scheduler.available("a", False)
        assert await refused(scheduler.recovering("a", one)) == (409, "not_possible")
        scheduler.available("a", True)
        await floor.arrive("b")
        assert await refused(scheduler.recovering("a", one)) == (409, "not_yours")  # somebody has it
        await floor.leave("b")
        assert await refused(scheduler.recovering("a", one)) == (409, "not_yours")  # somebody had it since

    run(test)


def test_who_did_not_accept_in_time_can_recover() -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one = await floor.add()
        await floor.advance(30)
        assert (await floor.scheduler.recovering("a", one)).state == "accepted"
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
        assert await refused(floor.scheduler.recovering("a", one if other else "none")) in (
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
        await floor.scheduler.failed("a", one, "", True)
        await floor.settle()
        two = await floor.add()
        await floor.scheduler.failed("a", one, "", True)
        await floor.settle()
        assert floor.scheduler.task_of("a") == two
        assert await refused(floor.scheduler.recovering("a", one)) == (409, "not_possible")

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
        assert await refused(floor.scheduler.recovering("a", two)) == (409, "not_yours")  # it never knew of it
        await floor.settle()
        assert tried == ["a", "b", "a", "a"]  # it was heard of
        floor.on_assign = lambda agent, task: True
        floor.scheduler.available("a", True)
        await floor.settle()
        assert floor.told == [("b", one), ("a", two)]

    run(test)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_an_agent_that_leaves_while_it_is_told(taken: bool, back: bool) -> None:
    async def test(floor: Floor) -> None:
        def assign(agent: str, task: Task) -> bool:
            floor.scheduler.left(agent)
            if back:
                floor.on_assign = lambda agent, task: True
                floor.scheduler.arrived(agent)
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


# Interleavings: something happens after any number of turns of the loop ----------------------------------------------

TURNS = [*range(16), 30]


async def some(floor: Floor, turns: int) -> None:
    for turn in range(turns):
        if turn % 5 == 4:
            await floor.ledger.run(lambda db: None)  # as far as the thread is concerned, too
        else:
            await asyncio.sleep(0)


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("back", [False, True])
def test_leaving_at_any_moment_of_an_assignment_loses_nothing(turns: int, back: bool) -> None:
    async def test(floor: Floor) -> None:
        floor.scheduler.arrived("a")
        adding = asyncio.ensure_future(floor.scheduler.add("boss", b"1"))
        await some(floor, turns)
        floor.scheduler.left("a")
        assert floor.scheduler.task_of("a") is None
        if back:
            floor.scheduler.arrived("a")
        one = (await adding).task_id
        await floor.settle()
        assert (await floor.task(one)).agent == ("a" if back else None)
        await floor.arrive("b")
        holder = "a" if back else "b"
        assert (await floor.task(one)).agent == holder
        assert floor.told[-1] == (holder, one)
        await floor.work(holder, one)

    run(test)


@pytest.mark.parametrize("turns", TURNS)
def test_getting_busy_at_any_moment_of_an_assignment(turns: int) -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        adding = asyncio.ensure_future(floor.scheduler.add("boss", b"1"))
        await some(floor, turns)
        floor.scheduler.available("a", False)
        told = list(floor.told)
        one = (await adding).task_id
        await floor.settle()
        assert floor.told == (told or [("b", one)])  # who is busy is told nothing any more

    run(test)


@pytest.mark.parametrize("turns", TURNS)
def test_leaving_at_any_moment_of_the_last_word(turns: int) -> None:
    """Either the task is completed, and said so, or it goes to somebody else: never both."""

    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        one = await floor.add()
        saying = asyncio.ensure_future(floor.scheduler.completed("a", one, b"1"))
        await some(floor, turns)
        floor.scheduler.left("a")
        (answer,) = await asyncio.gather(saying, return_exceptions=True)
        await floor.settle()
        task = await floor.task(one)
        if isinstance(answer, Task):
            assert (task.state, task.agent) == ("completed", "a")
            assert floor.told == [("a", one)]
        else:
            assert (task.state, task.agent) == ("assigned", "b")
            assert floor.told == [("a", one), ("b", one)]

    run(test)


@pytest.mark.parametrize("turns", TURNS)
def test_accepting_at_any_moment_around_the_deadline(turns: int) -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a", "b")
        one = await floor.add()
        floor.clock.advance(30)
        await some(floor, turns)
        (answer,) = await asyncio.gather(floor.scheduler.accepted("a", one), return_exceptions=True)
        await floor.settle()
        expected = [("a", one)] if isinstance(answer, Task) else [("a", one), ("b", one)]
        assert floor.told == expected
        assert (await floor.task(one)).agent == expected[-1][0]

    run(test)


@pytest.mark.parametrize("turns", TURNS)
def test_recovering_at_any_moment_while_it_is_assigned_anew(turns: int) -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one = await floor.add()
        await floor.leave("a")
        floor.gate.record_violation("a")
        await floor.arrive("a")
        floor.scheduler.arrived("b")
        await some(floor, turns)
        (answer,) = await asyncio.gather(floor.scheduler.recovering("a", one), return_exceptions=True)
        await floor.settle()
        task = await floor.task(one)
        assert task.attempt == 2
        if isinstance(answer, Task):
            assert (task.agent, floor.told) == ("a", [("a", one)])
        else:
            assert (task.agent, floor.told) == ("b", [("a", one), ("b", one)])

    run(test)


@pytest.mark.parametrize("turns", TURNS)
def test_who_recovers_and_is_assigned_something_at_the_same_time_holds_one(turns: int) -> None:
    async def test(floor: Floor) -> None:
        await floor.arrive("a")
        one, two = await floor.add(), await floor.add()
        await floor.leave("a")
        floor.scheduler.arrived("a")
        await some(floor, turns)
        await asyncio.gather(floor.scheduler.recovering("a", one), return_exceptions=True)
        await floor.settle()
        assert await floor.holders() == {one: "a", two: None}

    run(test)


@pytest.mark.parametrize("turns", TURNS)
def test_who_comes_back_at_once_holds_one_task_even_in_the_ledger(turns: int) -> None:
    async def test(floor: Floor) -> None:
        await floor.ledger.run(watch)
        await floor.arrive("a")
        one, two = await floor.add(), await floor.add()
        await floor.scheduler.accepted("a", one)
        saying = [asyncio.ensure_future(floor.scheduler.progressed("a", one, 0.1, str(number))) for number in range(5)]
        await some(floor, turns)
        floor.scheduler.left("a")
        floor.scheduler.arrived("a")
        await asyncio.gather(*saying, return_exceptions=True)
        await floor.settle()
        assert await floor.holders() == {one: "a", two: None}
        assert await floor.ledger.run(wrong) == []

    run(test)


@pytest.mark.parametrize("turns", TURNS)
def test_a_change_is_carried_through_when_whoever_asked_is_cancelled(turns: int) -> None:
    async def test(floor: Floor) -> None:
        adding = asyncio.ensure_future(floor.scheduler.add("boss", b"1"))
        await some(floor, turns)
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        await floor.arrive("a")
        if turns == 0:  # it had not begun
            assert floor.told == []
            return
        ((agent, one),) = floor.told
        saying = asyncio.ensure_future(floor.scheduler.completed(agent, one, b"1"))
        await some(floor, turns)
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)
        await floor.settle()
        assert (await floor.task(one)).state == "completed"
        assert floor.scheduler.is_idle("a")

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
            await floor.scheduler.failed("slow", tasks[1], "late", False)
            await floor.settle()
            assert [task.task_id for task in await floor.scheduler.tasks()] == [tasks[4], tasks[3], tasks[1]]
            assert floor.scheduler.counts() == {"queued": 0, "assigned": 0, "accepted": 0, "completed": 2, "failed": 1}
            assert await floor.scheduler.find(tasks[0]) is None
            assert await refused(floor.scheduler.completed("a", tasks[0], None)) == (404, "unknown_task")
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


# Restarts, and a ledger that fails -----------------------------------------------------------------------------------


def test_b5_nothing_is_lost_by_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "hub.db"
        async with open_floor(path) as floor:
            tasks = [await floor.add(str(number).encode()) for number in range(6)]
            await floor.arrive("a", "b", "c")
            await floor.scheduler.accepted("b", tasks[1])
            await floor.scheduler.progressed("b", tasks[1], 0.5, "half")
            await floor.work("c", tasks[2])
            await floor.scheduler.failed("c", tasks[3], "", True)
            await floor.settle()
            assert await floor.holders() == dict(zip(tasks, ["a", "b", "c", None, "c", None], strict=True))
        async with open_floor(path) as floor:
            assert floor.scheduler.counts() == {"queued": 5, "assigned": 0, "accepted": 0, "completed": 1, "failed": 0}
            lost = await floor.task(tasks[1])
            assert (lost.state, lost.agent, lost.progress, lost.payload) == ("queued", None, 0, msgspec.Raw(b"1"))
            assert lost.note == "the hub was restarted"
            floor.gate.record_violation("b")
            await floor.arrive("b")
            assert (await floor.scheduler.recovering("b", tasks[1])).attempt == 2
            await floor.arrive("x", "y", "z", "w")
            assert floor.told == [("x", tasks[0]), ("y", tasks[4]), ("z", tasks[3]), ("w", tasks[5])]
            assert [(await floor.task(task)).attempt for task in tasks] == [2, 2, 1, 2, 2, 1]

    asyncio.run(main())


def test_b5_nothing_is_lost_when_the_hub_dies_at_any_moment(tmp_path: Path) -> None:
    """The loop is torn down in the middle: memory is gone, and the ledger has what it has."""

    async def die(path: Path, turns: int) -> None:
        with closing(Ledger(path)) as ledger, closing(Gate(Policy())) as gate:
            floor = Floor(ledger, gate, ManualClock())
            await floor.scheduler.start()
            for agent in ("a", "b"):
                floor.scheduler.arrived(agent)
            tasks = [asyncio.ensure_future(floor.scheduler.add("boss", b"1")) for _ in range(3)]
            await asyncio.gather(*tasks)
            await some(floor, turns)
            floor.scheduler.left("a")
            await some(floor, turns % 4)
            await floor.cut()

    async def live(path: Path) -> None:
        async with open_floor(path) as floor:
            assert floor.scheduler.counts()["queued"] == 3
            await floor.arrive("a", "b", "c")
            assert set((await floor.holders()).values()) == {"a", "b", "c"}
            for agent, task in list(floor.told):
                await floor.work(agent, task)

    for turns in TURNS:
        path = tmp_path / f"{turns}.db"
        asyncio.run(die(path, turns))
        asyncio.run(live(path))


@contextmanager
def broken(path: Path) -> Iterator[None]:
    """A ledger that can write nothing, since somebody else has locked it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def run_on_file(path: Path, test: Callable[[Floor], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with open_floor(path, **options) as floor:
            await floor.ledger.run(lambda db: db.execute("PRAGMA busy_timeout=0").close())
            await test(floor)

    asyncio.run(main())


def test_what_the_ledger_did_not_take_has_not_happened(tmp_path: Path) -> None:
    path = tmp_path / "hub.db"

    async def test(floor: Floor) -> None:
        scheduler = floor.scheduler
        with broken(path), pytest.raises(LedgerError):
            await scheduler.add("boss", b"1")
        assert scheduler.counts()["queued"] == 0
        await floor.arrive("a")
        one = await floor.add()
        frames: tuple[Callable[[], Awaitable[Task]], ...] = (
            lambda: scheduler.accepted("a", one),
            lambda: scheduler.progressed("a", one, 0.5, ""),
            lambda: scheduler.failed("a", one, "", True),
            lambda: scheduler.failed("a", one, "", False),
            lambda: scheduler.completed("a", one, None),
        )
        for frame in frames:
            with broken(path), pytest.raises(LedgerError):
                await frame()
            assert (scheduler.task_of("a"), scheduler.counts()["assigned"]) == (one, 1)
        await floor.work("a", one)
        two = await floor.add()
        await floor.advance(30)
        with broken(path), pytest.raises(LedgerError):
            await scheduler.recovering("a", two)
        assert scheduler.counts()["queued"] == 1
        await floor.settle()
        await floor.advance(1)  # if it was tried at once, the ledger had failed again
        assert floor.told[1:] == [("a", two), ("a", two)]  # it was heard of, and is idle

    run_on_file(path, test, most_queued=1)


def test_what_could_not_be_written_is_done_later_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "hub.db"

    async def test(floor: Floor) -> None:
        one = await floor.add()
        with broken(path):
            await floor.arrive("a")
            await floor.advance(1)
        assert floor.told == []
        await floor.advance(1)
        assert floor.told == [("a", one)]
        with broken(path):
            await floor.advance(30)  # it has not accepted
            await floor.advance(1)
        assert (await floor.task(one)).agent == "a"
        await floor.advance(1)
        assert (await floor.task(one)).agent is None
        await floor.arrive("b")
        assert floor.told == [("a", one), ("b", one)]
        with broken(path):
            await floor.leave("b")
            await floor.arrive("b")
            assert not floor.scheduler.is_idle("b")  # its former task is still its own, as far as the ledger knows
        assert await refused(floor.scheduler.completed("b", one, None)) == (409, "not_yours")
        await floor.advance(1)
        assert floor.told == [("a", one), ("b", one), ("b", one)]
        await floor.work("b", one)

    run_on_file(path, test)


def test_a_frame_that_is_not_taken_while_the_ledger_fails(tmp_path: Path) -> None:
    path = tmp_path / "hub.db"

    async def test(floor: Floor) -> None:
        locking = broken(path)

        def assign(agent: str, task: Task) -> bool:
            locking.__enter__()
            return False

        floor.on_assign = assign
        await floor.arrive("a", "b")
        one = await floor.add()
        locking.__exit__(None, None, None)
        floor.on_assign = lambda agent, task: True
        await floor.advance(29)
        assert floor.told == []
        await floor.advance(1)
        assert floor.told == [("b", one)]

    run_on_file(path, test)


def test_what_could_not_be_forgotten_is_forgotten_with_the_next() -> None:
    async def test(floor: Floor) -> None:
        keep = "CREATE TRIGGER keep BEFORE DELETE ON tasks BEGIN SELECT RAISE(ABORT, 'not now'); END"
        await floor.ledger.run(lambda db: db.execute(keep).close())
        await floor.arrive("a")
        tasks = [await floor.add() for _ in range(3)]
        await floor.work("a", tasks[0])
        await floor.work("a", tasks[1])
        assert floor.scheduler.counts()["completed"] == len(await floor.scheduler.tasks(state="completed")) == 2
        await floor.ledger.run(lambda db: db.execute("DROP TRIGGER keep").close())
        await floor.work("a", tasks[2])
        assert [task.task_id for task in await floor.scheduler.tasks()] == [tasks[2]]
        assert floor.scheduler.counts()["completed"] == 1

    run(test, most_finished=1)


def test_a_store_that_fails_holds_up_assignments_until_it_answers() -> None:
    class Failing(Elsewhere):
        failing = True

        async def astanding(self, offence: Offence) -> Standing:
            if self.failing:
                raise StoreError("the server wants a password")
            return await super().astanding(offence)

    async def main() -> None:
        clock = ManualClock()
        store = Failing(clock=clock)
        with closing(Ledger()) as ledger, closing(Gate(Policy(), store=store)) as gate:
            floor = Floor(ledger, gate, clock)
            await floor.scheduler.start()
            await floor.arrive("a")
            task = await floor.add()
            await floor.advance(1)
            assert floor.told == []
            store.failing = False
            await floor.advance(1)
            assert floor.told == [("a", task)]
            await floor.scheduler.close()

    asyncio.run(main())


@pytest.mark.parametrize("turns", TURNS)
def test_closing_ends_what_has_begun_and_begins_nothing(turns: int) -> None:
    async def main() -> None:
        async with open_floor() as floor:
            scheduler = floor.scheduler
            await floor.ledger.run(watch)
            await floor.arrive("a")
            one = await floor.add()
            scheduler.arrived("b")
            adding = asyncio.ensure_future(scheduler.add("boss", b"1"))
            await some(floor, turns)
            closing_it = asyncio.ensure_future(scheduler.close())
            await asyncio.sleep(0)
            told = list(floor.told)
            (two,) = await asyncio.gather(adding, return_exceptions=True)
            await closing_it
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert floor.told == told
            written = await floor.ledger.run(changes)
            for request in (
                scheduler.add("boss", b"1"),
                scheduler.find(one),
                scheduler.tasks(),
                scheduler.completed("a", one, None),
                scheduler.recovering("a", one),
            ):
                assert await refused(request) == (503, "stopping")
            scheduler.left("a")
            scheduler.arrived("c")
            scheduler.available("c", True)
            scheduler.look_again()
            floor.clock.advance(1000)
            await floor.settle()
            assert floor.told == told
            assert await floor.ledger.run(changes) == written
            again = Floor(floor.ledger, floor.gate, floor.clock)
            await again.scheduler.start()
            assert again.scheduler.counts()["queued"] == 1 + isinstance(two, Task)
            await again.scheduler.close()

    asyncio.run(main())


# Anything, in any order ----------------------------------------------------------------------------------------------


class Walk:
    """Agents that do anything at any time, over several lives of a hub."""

    agents = tuple("abcdef")

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.random = path, random.Random(seed)
        self.clock = ManualClock(start=1000)
        self.added: list[str] = []
        self.ended: Counter[str] = Counter()  # how often somebody was told that a task has ended
        self.known: list[str] = []  # what was ever assigned to anybody

    @asynccontextmanager
    async def life(self) -> AsyncIterator[Floor]:
        self.here: set[str] = set()
        with closing(sqlite3.connect(self.path)) as reader:
            gate = Gate(Policy(), store=Elsewhere(clock=self.clock))
            with closing(Ledger(self.path)) as ledger, closing(gate):
                await ledger.run(watch)
                self.floor = Floor(ledger, gate, self.clock)
                self.floor.on_assign = lambda agent, task: self.assign(reader, agent, task)
                await self.floor.scheduler.start()
                yield self.floor

    def assign(self, reader: sqlite3.Connection, agent: str, task: Task) -> bool:
        assert agent in self.here
        row = reader.execute("SELECT state, agent, attempt FROM tasks WHERE task = ?", (task.task_id,)).fetchone()
        assert row == ("assigned", agent, task.attempt)  # it is in the ledger before it is told
        assert [other for other in self.here if self.floor.scheduler.task_of(other) == task.task_id] == [agent]
        self.known.append(task.task_id)
        if self.random.random() < 0.05:
            self.toggle(agent)
        return self.random.random() < 0.9

    def toggle(self, agent: str) -> None:
        if agent in self.here:
            self.here.remove(agent)
            self.floor.scheduler.left(agent)
        else:
            self.here.add(agent)
            self.floor.scheduler.arrived(agent)

    async def add(self) -> None:
        self.added.append((await self.floor.scheduler.add("boss", b"1")).task_id)

    async def say(self, agent: str) -> None:
        """Say something of a task, mostly of one's own."""
        scheduler = self.floor.scheduler
        task_id = scheduler.task_of(agent)
        if task_id is None or self.random.random() < 0.2:
            task_id = self.random.choice(self.known[-8:] or ["none"])
        frames: list[Callable[[], Awaitable[Task]]] = [
            lambda: scheduler.accepted(agent, task_id),
            lambda: scheduler.progressed(agent, task_id, 0.5, "half"),
            lambda: scheduler.completed(agent, task_id, b"1"),
            lambda: scheduler.failed(agent, task_id, "no", self.random.random() < 0.8),
            lambda: scheduler.recovering(agent, task_id),
        ]
        with suppress(Refused):
            task = await self.random.choice(frames)()
            assert task.task_id == task_id
            self.ended[task_id] += task.state in ("completed", "failed")

    def step(self) -> asyncio.Task[None] | None:
        agent, chance = self.random.choice(self.agents), self.random.random()
        if chance < 0.2:
            return asyncio.ensure_future(self.add())
        if chance < 0.65:
            return asyncio.ensure_future(self.say(agent))
        if chance < 0.8:
            self.toggle(agent)
        elif chance < 0.85:
            self.floor.scheduler.available(agent, self.random.random() < 0.6)
        elif chance < 0.9:
            self.floor.gate.record_violation(agent)
        elif chance < 0.93:
            self.floor.gate.reset_violations(agent)
            self.floor.scheduler.look_again()
        else:
            self.clock.advance(self.random.choice([1, 5, 29, 31, 60]))
        return None

    async def live(self, *, dies: bool) -> None:
        async with self.life() as floor:
            under_way = []
            for _ in range(150):
                if (asked := self.step()) is not None:
                    under_way.append(asked)
                    if self.random.random() < 0.1:
                        asked.cancel()
                await some(floor, self.random.choice([0, 0, 1, 2, 3, 5, 8, 20]))
            if dies:
                await floor.cut()
                return
            results = await asyncio.gather(*under_way, return_exceptions=True)
            assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
            await floor.settle()
            await self.agrees(floor)
            await floor.scheduler.close()

    async def agrees(self, floor: Floor) -> None:
        """Memory and ledger say the same."""
        tasks = await floor.scheduler.tasks(limit=10_000)
        states = Counter(task.state for task in tasks)
        assert floor.scheduler.counts() == {state: states[state] for state in STATES}
        held = {task.agent: task.task_id for task in tasks if task.state in ("assigned", "accepted")}
        assert held == {agent: task for agent in self.here if (task := floor.scheduler.task_of(agent)) is not None}

    async def finish(self) -> None:
        """With agents that do their work, everything ends."""
        async with self.life() as floor:
            self.random.random = lambda: 0.5  # type: ignore[method-assign]
            for agent in self.agents:
                self.toggle(agent)
            for _ in range(200):
                await floor.settle()
                self.clock.advance(10)
                for agent in self.agents:
                    if (task := floor.scheduler.task_of(agent)) is not None:
                        await floor.scheduler.completed(agent, task, b"1")
                        self.ended[task] += 1
            await floor.settle()
            await self.agrees(floor)
            ended = {task.task_id for task in await floor.scheduler.tasks(limit=10_000) if task.state in STATES[3:]}
            assert set(self.added) <= ended
            assert set(self.ended) <= {*ended, "none"}
            assert sum(floor.scheduler.counts().values()) == len(ended)
            assert max(self.ended.values()) == 1
            assert await floor.ledger.run(wrong) == []
            await floor.scheduler.close()


@pytest.mark.parametrize("seed", range(8))
def test_b5_no_task_is_lost_or_held_by_two_whatever_happens(tmp_path: Path, seed: int) -> None:
    walk = Walk(tmp_path / "hub.db", seed)
    for dies in (False, True, False, True):
        asyncio.run(walk.live(dies=dies))
    asyncio.run(walk.finish())
