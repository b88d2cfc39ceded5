"""The scheduler over its database: restarts, kills, shutdown, and failures of database or store."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from headgate import Gate, ManualClock, Policy
from headgate.errors import StoreError
from headgate.hub.storage.database import Database, DatabaseError
from headgate.hub.tasks.task import STATES, Task, TaskTable
from headgate.limits.violations import Standing
from headgate.stores.base import Offence
from tests.support.refusals import request_error
from tests.support.scheduler import TURNS, SchedulerHarness, count_changes, let_run, open_harness, record_changes
from tests.support.valkey import PATIENCE
from tests.support.wrapped_store import WrappedStore


async def test_b5_nothing_is_lost_by_a_restart(path: Path) -> None:
    async with open_harness(path) as harness:
        tasks = [await harness.add(str(number).encode()) for number in range(6)]
        await harness.arrive("a", "b", "c")
        await harness.scheduler.accept("b", tasks[1])
        await harness.scheduler.report_progress("b", tasks[1], 0.5, "half")
        await harness.work("c", tasks[2])
        await harness.scheduler.fail("c", tasks[3], "", True)
        await harness.settle()
        assert await harness.holders() == dict(zip(tasks, ["a", "b", "c", None, "c", None], strict=True))
    async with open_harness(path) as harness:
        assert harness.counts() == {"queued": 5, "completed": 1}
        lost = await harness.task(tasks[1])
        assert (lost.state, lost.agent, lost.progress, lost.payload) == ("queued", None, 0, msgspec.Raw(b"1"))
        assert lost.note == "the hub was restarted"
        harness.gate.record_violation("b")
        await harness.arrive("b")
        assert (await harness.scheduler.recover("b", tasks[1])).attempt == 2
        await harness.arrive("x", "y", "z", "w")
        assert harness.told == [("x", tasks[0]), ("y", tasks[4]), ("z", tasks[3]), ("w", tasks[5])]
        assert [(await harness.task(task)).attempt for task in tasks] == [2, 2, 1, 2, 2, 1]


def test_b5_nothing_is_lost_when_the_hub_dies_at_any_moment(tmp_path: Path) -> None:
    """The loop is torn down in the middle: memory is gone, and the database has what it has."""

    async def die(path: Path, turns: int) -> None:
        with closing(Database(path)) as database, closing(Gate(Policy())) as gate:
            harness = SchedulerHarness(database, gate, ManualClock())
            await harness.scheduler.start()
            for agent in ("a", "b"):
                harness.scheduler.agent_connected(agent)
            tasks = [asyncio.ensure_future(harness.scheduler.add("boss", b"1")) for _ in range(3)]
            await asyncio.gather(*tasks)
            await let_run(harness, turns)
            harness.scheduler.agent_disconnected("a")
            await let_run(harness, turns % 4)
            await harness.cut()

    async def live(path: Path) -> None:
        async with open_harness(path) as harness:
            assert harness.scheduler.counts()["queued"] == 3
            await harness.arrive("a", "b", "c")
            assert set((await harness.holders()).values()) == {"a", "b", "c"}
            for agent, task in list(harness.told):
                await harness.work(agent, task)

    for turns in TURNS:
        path = tmp_path / f"{turns}.db"
        asyncio.run(die(path, turns))
        asyncio.run(live(path))


@contextmanager
def broken(path: Path) -> Iterator[None]:
    """A database that can write nothing, since somebody else has locked it."""
    with closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@pytest.fixture
def on_file(path: Path, runner: asyncio.Runner) -> Iterator[SchedulerHarness]:
    """A scheduler that may queue one task, over a file that it doesn't wait for while it is locked."""
    opened = open_harness(path, most_queued=1)
    harness = runner.run(opened.__aenter__())
    runner.run(harness.database.run(lambda db: db.execute("PRAGMA busy_timeout=0").close()))
    yield harness
    runner.run(opened.__aexit__(None, None, None))


async def test_a_change_that_fails_in_the_database_has_no_effect(on_file: SchedulerHarness, path: Path) -> None:
    scheduler = on_file.scheduler
    with broken(path), pytest.raises(DatabaseError):
        await scheduler.add("boss", b"1")
    assert scheduler.counts()["queued"] == 0
    await on_file.arrive("a")
    one = await on_file.add()
    frames: tuple[Callable[[], Awaitable[Task]], ...] = (
        lambda: scheduler.accept("a", one),
        lambda: scheduler.report_progress("a", one, 0.5, ""),
        lambda: scheduler.fail("a", one, "", True),
        lambda: scheduler.fail("a", one, "", False),
        lambda: scheduler.complete("a", one, None),
    )
    for frame in frames:
        with broken(path), pytest.raises(DatabaseError):
            await frame()
        assert (scheduler.task_of("a"), scheduler.counts()["assigned"]) == (one, 1)
    await on_file.work("a", one)
    two = await on_file.add()
    await on_file.advance(30)
    with broken(path), pytest.raises(DatabaseError):
        await scheduler.recover("a", two)
    assert scheduler.counts()["queued"] == 1
    await on_file.settle()
    await on_file.advance(1)  # if it was tried at once, the database had failed again
    assert on_file.told[1:] == [("a", two), ("a", two)]  # it was heard of, and is idle


async def test_a_failed_assignment_or_release_is_retried(on_file: SchedulerHarness, path: Path) -> None:
    one = await on_file.add()
    with broken(path):
        await on_file.arrive("a")
        await on_file.advance(1)
    assert on_file.told == []
    await on_file.advance(1)
    assert on_file.told == [("a", one)]
    with broken(path):
        await on_file.advance(30)  # it has not accepted
        await on_file.advance(1)
    assert (await on_file.task(one)).agent == "a"
    await on_file.advance(1)
    assert (await on_file.task(one)).agent is None
    await on_file.arrive("b")
    assert on_file.told == [("a", one), ("b", one)]
    with broken(path):
        await on_file.leave("b")
        await on_file.arrive("b")
        assert not on_file.scheduler.is_idle("b")  # its former task is still its own, as far as the database knows
    assert await request_error(on_file.scheduler.complete("b", one, None), "expected") == (409, "not_yours")
    await on_file.advance(1)
    assert on_file.told == [("a", one), ("b", one), ("b", one)]
    await on_file.work("b", one)


async def test_a_failure_is_logged_once_however_often_a_step_is_tried_again(
    on_file: SchedulerHarness, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failures() -> list[str]:
        return [record.getMessage() for record in caplog.records if "nothing was written" in record.getMessage()]

    one = await on_file.add()
    with broken(path):
        await on_file.arrive("a")
        for _ in range(3):
            await on_file.advance(1)
    assert [text.partition(":")[0] for text in failures()] == [f"assigning task {one}"]
    await on_file.advance(1)
    assert on_file.told == [("a", one)]
    with broken(path):
        await on_file.leave("a")
        for _ in range(3):
            await on_file.advance(1)
    assert [text.partition(":")[0] for text in failures()[1:]] == [f"queueing task {one} again"], "a new failure"


async def test_an_undeliverable_assignment_is_undone_once_the_database_works(
    on_file: SchedulerHarness, path: Path
) -> None:
    locking = broken(path)

    def assign(agent: str, task: Task) -> bool:
        locking.__enter__()
        return False

    on_file.on_assign = assign
    await on_file.arrive("a", "b")
    one = await on_file.add()
    locking.__exit__(None, None, None)
    on_file.on_assign = lambda agent, task: True
    await on_file.advance(29)
    assert on_file.told == []
    await on_file.advance(1)
    assert on_file.told == [("b", one)]


async def test_a_failed_cleanup_is_made_up_for_by_the_next(elsewhere: bool) -> None:
    async with open_harness(elsewhere=elsewhere, most_finished=1) as harness:
        keep = "CREATE TRIGGER keep BEFORE DELETE ON tasks BEGIN SELECT RAISE(ABORT, 'not now'); END"
        await harness.database.run(lambda db: db.execute(keep).close())
        await harness.arrive("a")
        tasks = [await harness.add() for _ in range(3)]
        await harness.work("a", tasks[0])
        await harness.work("a", tasks[1])
        assert harness.scheduler.counts()["completed"] == len(await harness.scheduler.tasks(state="completed")) == 2
        await harness.database.run(lambda db: db.execute("DROP TRIGGER keep").close())
        await harness.work("a", tasks[2])
        assert [task.task_id for task in await harness.scheduler.tasks()] == [tasks[2]]
        assert harness.scheduler.counts()["completed"] == 1


async def test_a_failing_store_delays_assignments() -> None:
    class FailingStore(WrappedStore):
        failing = True

        async def astanding(self, offence: Offence) -> Standing:
            if self.failing:
                raise StoreError("the server wants a password")
            found: Standing = await super().astanding(offence)
            return found

    clock = ManualClock()
    store = FailingStore(clock=clock)
    with closing(Database()) as database, closing(Gate(Policy(), store=store)) as gate:
        harness = SchedulerHarness(database, gate, clock)
        await harness.scheduler.start()
        await harness.arrive("a")
        task = await harness.add()
        await harness.advance(1)
        assert harness.told == []
        store.failing = False
        await harness.advance(1)
        assert harness.told == [("a", task)]
        await harness.scheduler.close()


@pytest.mark.parametrize("turns", TURNS)
async def test_closing_finishes_changes_in_progress_and_starts_none(turns: int) -> None:
    async with open_harness() as harness:
        scheduler = harness.scheduler
        await harness.database.run(record_changes)
        await harness.arrive("a")
        one = await harness.add()
        scheduler.agent_connected("b")
        adding = asyncio.ensure_future(scheduler.add("boss", b"1"))
        await let_run(harness, turns)
        closing_it = asyncio.ensure_future(scheduler.close())
        await asyncio.sleep(0)
        told = list(harness.told)
        (two,) = await asyncio.gather(adding, return_exceptions=True)
        await closing_it
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert harness.told == told
        written = await harness.database.run(count_changes)
        for request in (
            scheduler.add("boss", b"1"),
            scheduler.find(one),
            scheduler.tasks(),
            scheduler.complete("a", one, None),
            scheduler.recover("a", one),
        ):
            assert await request_error(request, "expected") == (503, "stopping")
        scheduler.agent_disconnected("a")
        scheduler.agent_connected("c")
        scheduler.set_available("c", True)
        scheduler.recheck()
        harness.clock.advance(1000)
        await harness.settle()
        assert harness.told == told
        assert await harness.database.run(count_changes) == written
        again = SchedulerHarness(harness.database, harness.gate, harness.clock)
        await again.scheduler.start()
        assert again.scheduler.counts()["queued"] == 1 + isinstance(two, Task)
        await again.scheduler.close()


@pytest.mark.parametrize("state", [None, *STATES])
async def test_a_page_of_an_agents_tasks_reads_no_tasks_of_others(state: str | None) -> None:
    """The database has one thread: whoever makes it read thousands of rows holds up everybody's requests."""
    with closing(Database()) as database:
        steps = 0

        def count() -> None:
            nonlocal steps
            steps += 1

        def fill(db: sqlite3.Connection) -> None:
            columns = "task, creator, agent, state, payload, attempt, progress, note, at, changed"
            insert = f"INSERT INTO tasks ({columns}) VALUES (?, ?, ?, ?, '1', 1, 0, '', 1, 1)"
            for number in range(2000):
                agent = None if STATES[number % 5] == "queued" else "worker"
                db.execute(insert, (f"t{number}", "boss", agent, STATES[number % 5]))
            db.execute(insert, ("mine", "planner", "planner", state or "failed"))
            db.set_progress_handler(count, 1)

        await database.run(fill)
        (found,) = await TaskTable(database).page("planner", state, 50, None)
        assert (found.task_id, steps < 1000) == ("mine", True)
