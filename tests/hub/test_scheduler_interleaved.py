"""The scheduler: no task is lost or held by two agents, in any interleaving of events."""

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest

from headgate import Gate, ManualClock, Policy
from headgate.hub.errors import RequestError
from headgate.hub.storage.database import Database
from headgate.hub.tasks.task import STATES, Task
from tests.support.scheduler import TURNS, SchedulerHarness, invalid_changes, let_run, record_changes
from tests.support.valkey import PATIENCE
from tests.support.wrapped_store import WrappedStore

pytestmark = pytest.mark.long

# Interleavings: something happens after any number of turns of the loop ----------------------------------------------


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("back", [False, True])
async def test_leaving_at_any_moment_of_an_assignment_loses_nothing(
    turns: int, back: bool, harness: SchedulerHarness
) -> None:
    harness.scheduler.agent_connected("a")
    adding = asyncio.ensure_future(harness.scheduler.add("boss", b"1"))
    await let_run(harness, turns)
    harness.scheduler.agent_disconnected("a")
    assert harness.scheduler.task_of("a") is None
    if back:
        harness.scheduler.agent_connected("a")
    one = (await adding).task_id
    await harness.settle()
    assert (await harness.task(one)).agent == ("a" if back else None)
    await harness.arrive("b")
    holder = "a" if back else "b"
    assert (await harness.task(one)).agent == holder
    assert harness.told[-1] == (holder, one)
    await harness.work(holder, one)


@pytest.mark.parametrize("turns", TURNS)
async def test_getting_busy_at_any_moment_of_an_assignment_passes_it_on(turns: int, harness: SchedulerHarness) -> None:
    await harness.arrive("a", "b")
    adding = asyncio.ensure_future(harness.scheduler.add("boss", b"1"))
    await let_run(harness, turns)
    harness.scheduler.set_available("a", False)
    told = list(harness.told)
    one = (await adding).task_id
    await harness.settle()
    assert harness.told == (told or [("b", one)])  # who is busy is told nothing any more


@pytest.mark.parametrize("turns", TURNS)
async def test_leaving_at_any_moment_of_a_completion_completes_or_reassigns(
    turns: int, harness: SchedulerHarness
) -> None:
    """Either the task is completed, and said so, or it goes to somebody else: never both."""
    await harness.arrive("a", "b")
    one = await harness.add()
    saying = asyncio.ensure_future(harness.scheduler.complete("a", one, b"1"))
    await let_run(harness, turns)
    harness.scheduler.agent_disconnected("a")
    (answer,) = await asyncio.gather(saying, return_exceptions=True)
    await harness.settle()
    task = await harness.task(one)
    if isinstance(answer, Task):
        assert (task.state, task.agent) == ("completed", "a")
        assert harness.told == [("a", one)]
    else:
        assert (task.state, task.agent) == ("assigned", "b")
        assert harness.told == [("a", one), ("b", one)]


@pytest.mark.parametrize("turns", TURNS)
async def test_accepting_around_the_deadline_keeps_or_loses_the_task(turns: int, harness: SchedulerHarness) -> None:
    await harness.arrive("a", "b")
    one = await harness.add()
    harness.clock.advance(30)
    await let_run(harness, turns)
    (answer,) = await asyncio.gather(harness.scheduler.accept("a", one), return_exceptions=True)
    await harness.settle()
    expected = [("a", one)] if isinstance(answer, Task) else [("a", one), ("b", one)]
    assert harness.told == expected
    assert (await harness.task(one)).agent == expected[-1][0]


@pytest.mark.parametrize("turns", TURNS)
async def test_recovering_during_a_reassignment_leaves_one_holder(turns: int, harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one = await harness.add()
    await harness.leave("a")
    harness.gate.record_violation("a")
    await harness.arrive("a")
    harness.scheduler.agent_connected("b")
    await let_run(harness, turns)
    (answer,) = await asyncio.gather(harness.scheduler.recover("a", one), return_exceptions=True)
    await harness.settle()
    task = await harness.task(one)
    assert task.attempt == 2
    if isinstance(answer, Task):
        assert (task.agent, harness.told) == ("a", [("a", one)])
    else:
        assert (task.agent, harness.told) == ("b", [("a", one), ("b", one)])


@pytest.mark.parametrize("turns", TURNS)
async def test_recovering_during_an_assignment_leaves_one_task(turns: int, harness: SchedulerHarness) -> None:
    await harness.arrive("a")
    one, two = await harness.add(), await harness.add()
    await harness.leave("a")
    harness.scheduler.agent_connected("a")
    await let_run(harness, turns)
    await asyncio.gather(harness.scheduler.recover("a", one), return_exceptions=True)
    await harness.settle()
    assert await harness.holders() == {one: "a", two: None}


@pytest.mark.parametrize("turns", TURNS)
async def test_an_agent_that_reconnects_at_once_holds_one_task(turns: int, harness: SchedulerHarness) -> None:
    await harness.database.run(record_changes)
    await harness.arrive("a")
    one, two = await harness.add(), await harness.add()
    await harness.scheduler.accept("a", one)
    saying = [
        asyncio.ensure_future(harness.scheduler.report_progress("a", one, 0.1, str(number))) for number in range(5)
    ]
    await let_run(harness, turns)
    harness.scheduler.agent_disconnected("a")
    harness.scheduler.agent_connected("a")
    await asyncio.gather(*saying, return_exceptions=True)
    await harness.settle()
    assert await harness.holders() == {one: "a", two: None}
    assert await harness.database.run(invalid_changes) == []


@pytest.mark.parametrize("turns", TURNS)
async def test_a_change_is_completed_when_its_caller_is_cancelled(turns: int, harness: SchedulerHarness) -> None:
    adding = asyncio.ensure_future(harness.scheduler.add("boss", b"1"))
    await let_run(harness, turns)
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    await harness.arrive("a")
    if turns == 0:  # it had not begun
        assert harness.told == []
        return
    ((agent, one),) = harness.told
    saying = asyncio.ensure_future(harness.scheduler.complete(agent, one, b"1"))
    await let_run(harness, turns)
    saying.cancel()
    await asyncio.gather(saying, return_exceptions=True)
    await harness.settle()
    assert (await harness.task(one)).state == "completed"
    assert harness.scheduler.is_idle("a")


# Anything, in any order ----------------------------------------------------------------------------------------------


class SchedulerWalk:
    """Agents that do anything at any time, over several lives of a hub."""

    agents = tuple("abcdef")

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.random = path, random.Random(seed)
        self.clock = ManualClock(start=1000)
        self.added: list[str] = []
        self.ended: Counter[str] = Counter()  # how often somebody was told that a task has ended
        self.known: list[str] = []  # what was ever assigned to anybody

    @asynccontextmanager
    async def life(self) -> AsyncIterator[SchedulerHarness]:
        self.here: set[str] = set()
        with closing(sqlite3.connect(self.path, timeout=PATIENCE)) as reader:
            gate = Gate(Policy(), store=WrappedStore(clock=self.clock))
            with closing(Database(self.path)) as database, closing(gate):
                await database.run(record_changes)
                self.harness = SchedulerHarness(database, gate, self.clock)
                self.harness.on_assign = lambda agent, task: self.assign(reader, agent, task)
                await self.harness.scheduler.start()
                yield self.harness

    def assign(self, reader: sqlite3.Connection, agent: str, task: Task) -> bool:
        assert agent in self.here
        row = reader.execute("SELECT state, agent, attempt FROM tasks WHERE task = ?", (task.task_id,)).fetchone()
        assert row == ("assigned", agent, task.attempt)  # it is in the database before it is told
        assert [other for other in self.here if self.harness.scheduler.task_of(other) == task.task_id] == [agent]
        self.known.append(task.task_id)
        if self.random.random() < 0.05:
            self.toggle(agent)
        return self.random.random() < 0.9

    def toggle(self, agent: str) -> None:
        if agent in self.here:
            self.here.remove(agent)
            self.harness.scheduler.agent_disconnected(agent)
        else:
            self.here.add(agent)
            self.harness.scheduler.agent_connected(agent)

    async def add(self) -> None:
        self.added.append((await self.harness.scheduler.add("boss", b"1")).task_id)

    async def say(self, agent: str) -> None:
        """Say something of a task, mostly of one's own."""
        scheduler = self.harness.scheduler
        task_id = scheduler.task_of(agent)
        if task_id is None or self.random.random() < 0.2:
            task_id = self.random.choice(self.known[-8:] or ["none"])
        frames: list[Callable[[], Awaitable[Task]]] = [
            lambda: scheduler.accept(agent, task_id),
            lambda: scheduler.report_progress(agent, task_id, 0.5, "half"),
            lambda: scheduler.complete(agent, task_id, b"1"),
            lambda: scheduler.fail(agent, task_id, "no", self.random.random() < 0.8),
            lambda: scheduler.recover(agent, task_id),
        ]
        with suppress(RequestError):
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
            self.harness.scheduler.set_available(agent, self.random.random() < 0.6)
        elif chance < 0.9:
            self.harness.gate.record_violation(agent)
        elif chance < 0.93:
            self.harness.gate.reset_violations(agent)
            self.harness.scheduler.recheck()
        else:
            self.clock.advance(self.random.choice([1, 5, 29, 31, 60]))
        return None

    async def live(self, *, dies: bool) -> None:
        async with self.life() as harness:
            under_way = []
            for _ in range(150):
                if (asked := self.step()) is not None:
                    under_way.append(asked)
                    if self.random.random() < 0.1:
                        asked.cancel()
                await let_run(harness, self.random.choice([0, 0, 1, 2, 3, 5, 8, 20]))
            if dies:
                await harness.cut()
                return
            results = await asyncio.gather(*under_way, return_exceptions=True)
            assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
            await harness.settle()
            await self.agrees(harness)
            await harness.scheduler.close()

    async def agrees(self, harness: SchedulerHarness) -> None:
        """Memory and database say the same."""
        tasks = await harness.scheduler.tasks(limit=10_000)
        states = Counter(task.state for task in tasks)
        assert harness.scheduler.counts() == {state: states[state] for state in STATES}
        held = {task.agent: task.task_id for task in tasks if task.state in ("assigned", "accepted")}
        assert held == {agent: task for agent in self.here if (task := harness.scheduler.task_of(agent)) is not None}

    async def finish(self) -> None:
        """With agents that do their work, everything ends."""
        async with self.life() as harness:
            self.random.random = lambda: 0.5  # type: ignore[method-assign]
            for agent in self.agents:
                self.toggle(agent)
            for _ in range(200):
                await harness.settle()
                self.clock.advance(10)
                for agent in self.agents:
                    if (task := harness.scheduler.task_of(agent)) is not None:
                        await harness.scheduler.complete(agent, task, b"1")
                        self.ended[task] += 1
            await harness.settle()
            await self.agrees(harness)
            ended = {task.task_id for task in await harness.scheduler.tasks(limit=10_000) if task.state in STATES[3:]}
            assert set(self.added) <= ended
            assert set(self.ended) <= {*ended, "none"}
            assert sum(harness.scheduler.counts().values()) == len(ended)
            assert max(self.ended.values()) == 1
            assert await harness.database.run(invalid_changes) == []
            await harness.scheduler.close()


@pytest.mark.parametrize("seed", range(8))
def test_b5_no_task_is_lost_or_held_by_two_whatever_happens(tmp_path: Path, seed: int) -> None:
    walk = SchedulerWalk(tmp_path / "hub.db", seed)
    for dies in (False, True, False, True):
        asyncio.run(walk.live(dies=dies))
    asyncio.run(walk.finish())
