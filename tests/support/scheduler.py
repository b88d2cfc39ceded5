"""A scheduler with its database, gate and clock, a record of its assignments, and a check of its transitions."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.hub.storage.database import Database, DatabaseError
from headgate.hub.tasks.scheduler import Scheduler
from headgate.hub.tasks.task import Task
from tests.support.wrapped_store import WrappedStore

MICROSECOND = 0.000001
TURNS = [*range(16), 30]
"""After how many turns of the loop something happens, so that it meets what is under way at any moment."""


class SchedulerHarness:
    """A scheduler with its database, gate and clock, and a record of its assignments."""

    def __init__(self, database: Database, gate: Gate, clock: ManualClock, **options: Any) -> None:
        self.database, self.gate, self.clock = database, gate, clock
        self.told: list[tuple[str, str]] = []
        self.on_assign: Callable[[str, Task], bool] = lambda agent, task: True
        self.scheduler = Scheduler(database, gate, clock, self._assign, **options)

    def _assign(self, agent: str, task: Task) -> bool:
        assert (task.state, task.agent) == ("assigned", agent)
        taken = self.on_assign(agent, task)
        if taken:
            self.told.append((agent, task.task_id))
        return taken

    async def settle(self) -> None:
        """Let everything happen that is due now; jobs run in order, so that these are the last."""
        for _ in range(6):
            for _ in range(12):
                await asyncio.sleep(0)
            with suppress(DatabaseError):  # in the tests in which it fails
                await self.database.run(lambda db: None)

    async def cut(self) -> None:
        """Begin to stop; the end of the loop then cuts off what is under way."""
        self.stopping = asyncio.ensure_future(self.scheduler.close())
        await asyncio.sleep(0)

    async def arrive(self, *agents: str) -> None:
        for agent in agents:
            self.scheduler.agent_connected(agent)
        await self.settle()

    async def leave(self, agent: str) -> None:
        self.scheduler.agent_disconnected(agent)
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
        await self.scheduler.accept(agent, task_id)
        await self.scheduler.complete(agent, task_id, None)
        await self.settle()

    def counts(self) -> dict[str, int]:
        """How many tasks are in each state, without the states that none is in."""
        return {state: many for state, many in self.scheduler.counts().items() if many}

    async def holders(self) -> dict[str, str | None]:
        return {task.task_id: task.agent for task in await self.scheduler.tasks()}


@asynccontextmanager
async def open_harness(
    path: Path | None = None, *, clock: ManualClock | None = None, elsewhere: bool = False, **options: Any
) -> AsyncIterator[SchedulerHarness]:
    clock = clock or ManualClock(start=1000)
    gate = Gate(Policy(), store=WrappedStore(clock=clock) if elsewhere else MemoryStore(clock=clock))
    with closing(Database(path)) as database, closing(gate):
        harness = SchedulerHarness(database, gate, clock, **options)
        await harness.scheduler.start()
        yield harness
        await harness.scheduler.close()


async def let_run(harness: SchedulerHarness, turns: int) -> None:
    """Let so many turns of the loop pass."""
    for turn in range(turns):
        if turn % 5 == 4:
            await harness.database.run(lambda db: None)  # as far as the thread is concerned, too
        else:
            await asyncio.sleep(0)


def record_changes(db: sqlite3.Connection) -> None:
    """Have the database itself write down every change of a task, and how many others its holder had then."""
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


def count_changes(db: sqlite3.Connection) -> int:
    """How many changes were written down."""
    return len(db.execute("SELECT 1 FROM changes").fetchall())


def invalid_changes(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    """The changes that were written down and are not in the scheduler's table."""
    return [change for change in db.execute("SELECT * FROM changes").fetchall() if not is_valid_change(*change)]


def is_valid_change(
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
