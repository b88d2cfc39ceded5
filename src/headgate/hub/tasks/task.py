"""Tasks, and their table in the database."""

import sqlite3
from itertools import islice
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, get_args
from uuid import uuid4

import msgspec

from headgate.hub.errors import RequestError
from headgate.hub.storage.database import Database
from headgate.hub.storage.rows import RowReader, Time, json_of, row_of

State: TypeAlias = Literal["queued", "assigned", "accepted", "completed", "failed"]
STATES: Final[tuple[State, ...]] = get_args(State)
HELD: Final[tuple[State, ...]] = ("assigned", "accepted")


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A task in a list of them. Times are seconds since 1970."""

    task_id: str
    creator: str
    state: State
    agent: str | None
    """The agent that holds or has finished it."""
    attempt: int
    """The number of times that it was assigned."""
    progress: float
    note: str
    """The last report of its holder, or the reason why it is queued again."""
    created_at: float
    changed_at: float


class Task(TaskSummary, frozen=True, kw_only=True):
    """A task, as agents and admins see it."""

    payload: msgspec.Raw
    outcome: msgspec.Raw | None
    """The result of a completed task, the error of a failed one."""


_SUMMARY: Final = "task, number, creator, state, agent, attempt, progress, note, at, changed"
_SELECT: Final = f"SELECT {_SUMMARY}, payload, outcome FROM tasks "  # noqa: S608 - made of its own words


class _TaskRow(NamedTuple):
    task: str
    number: int
    creator: str
    state: State
    agent: str | None
    attempt: int
    progress: Annotated[float, msgspec.Meta(ge=0, le=1)]
    note: str
    at: Time
    changed: Time
    payload: bytes = b"null"  # in a summary it is left out, and so is the outcome
    outcome: bytes | None = None

    def summary(self) -> dict[str, Any]:
        return {
            "task_id": self.task,
            "creator": self.creator,
            "state": self.state,
            "agent": None if self.state == "queued" else self.agent,  # the row of a queued task has its last holder
            "attempt": self.attempt,
            "progress": self.progress,
            "note": self.note,
            "created_at": self.at,
            "changed_at": self.changed,
        }


_task_row: Final = row_of(_TaskRow)


def _read_summary(row: tuple[Any, ...]) -> TaskSummary:
    return TaskSummary(**_task_row(row).summary())


def _read_task(row: tuple[Any, ...]) -> Task:
    found = _task_row(row)
    outcome = None if found.outcome is None else json_of(found.outcome)
    return Task(**found.summary(), payload=json_of(found.payload), outcome=outcome)


class OpenRow(NamedTuple):
    """A task that isn't finished."""

    number: int
    task_id: str
    creator: str
    agent: str | None
    """The agent that holds it, or has held it last."""
    attempt: int
    held: bool


def _read_open(row: tuple[Any, ...]) -> OpenRow:
    found = _task_row(row)
    json_of(found.payload)
    return OpenRow(found.number, found.task, found.creator, found.agent, found.attempt, found.state in HELD)


_LOST: Final = "the task is neither shown nor assigned"


class TaskTable:
    """The table of tasks. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database: Final = database

    async def insert(self, creator: str, payload: bytes, now: float) -> tuple[int, Task]:
        """Add a queued task; its number, and the task."""

        def work(db: sqlite3.Connection) -> tuple[int, Task]:
            number = db.execute(
                "INSERT INTO tasks (task, creator, payload, state, attempt, progress, note, at, changed) "
                "VALUES (?, ?, ?, 'queued', 0, 0, '', ?, ?)",
                (uuid4().hex, creator, payload, now, now),
            ).lastrowid
            assert number is not None
            return number, _read_task(db.execute(_SELECT + "WHERE number = ?", (number,)).fetchone())

        return await self._database.run(work)

    async def update(self, values: tuple[object, ...]) -> Task:
        """Write the state, agent, attempt, progress, note, outcome and time of the task with the last value's number.

        A progress or note of None is left as it is.
        """

        def work(db: sqlite3.Connection) -> Task:
            db.execute(
                "UPDATE tasks SET state = ?, agent = ?, attempt = ?, progress = coalesce(?, progress), "
                "note = coalesce(?, note), outcome = ?, changed = ? WHERE number = ?",
                values,
            )
            return _read_task(db.execute(_SELECT + "WHERE number = ?", values[-1:]).fetchone())

        return await self._database.run(work)

    async def delete(self, numbers: list[int]) -> None:
        rows = [(number,) for number in numbers]
        await self._database.run(lambda db: db.executemany("DELETE FROM tasks WHERE number = ?", rows))

    async def drop_agents(self) -> None:
        """Forget who has created, held and finished the tasks."""
        await self._database.run(lambda db: db.execute("UPDATE tasks SET creator = '', agent = NULL"))

    async def find(self, task_id: str) -> Task | None:
        """A task by its id."""
        if not task_id.isascii():  # SQLite takes no lone surrogates
            return None
        select = _SELECT + "WHERE task = ?"
        rows = await self._database.run(lambda db: db.execute(select, (task_id,)).fetchall())
        return next(self._database.rows.read("tasks", rows, _read_task, _LOST), None)

    async def page(self, of: str | None, state: str | None, limit: int, before: str | None) -> list[TaskSummary]:
        """Summaries, newest first: of the tasks of an agent, in a state, created before another task."""
        rows = self._database.rows
        return await self._database.run(
            lambda db: list(islice(rows.read("tasks", _found(db, of, state, before), _read_summary, _LOST), limit))
        )

    async def resume(self, now: float) -> tuple[list[OpenRow], list[tuple[int, State]]]:
        """Queue the held tasks again; all open tasks, held ones first, and the finished ones with their states."""
        return await self._database.run(lambda db: _resume(db, self._database.rows, now))


def _found(db: sqlite3.Connection, of: str | None, state: str | None, before: str | None) -> sqlite3.Cursor:
    conditions: list[str] = []
    values: list[object] = []
    if before is not None:
        row = db.execute("SELECT number FROM tasks WHERE task = ?", (before,)).fetchone() if before.isascii() else None
        if row is None:
            raise RequestError(404, "unknown_task", f"before: expected the id of a task, got {before[:40]!r}")
        conditions.append("number < ?")
        values += row
    if state is not None:
        conditions.append("state = ?" if of is None else "+state = ?")  # +: not by the index of all agents' states
        values.append(state)
    if of is None:
        return db.execute(f"{_selected(conditions)}ORDER BY number DESC", values)
    # By two indexes, merged: only this agent's rows are read, and no more than the page needs.
    created = _selected(["creator = ?", *conditions])
    held = _selected(["agent = ?", "creator <> ?", "+state <> 'queued'", *conditions])
    return db.execute(f"{created}UNION ALL {held}ORDER BY number DESC", [of, *values, of, of, *values])


def _selected(conditions: list[str]) -> str:
    where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
    return f"SELECT {_SUMMARY} FROM tasks {where}"  # noqa: S608 - made of its own words


def _resume(db: sqlite3.Connection, rows: RowReader, now: float) -> tuple[list[OpenRow], list[tuple[int, State]]]:
    select = _SELECT + "WHERE state NOT IN ('completed', 'failed') ORDER BY number"
    tasks = sorted(rows.read("tasks", db.execute(select), _read_open, _LOST), key=lambda task: not task.held)
    db.executemany(
        "UPDATE tasks SET state = 'queued', progress = 0, note = 'the hub was restarted', changed = ? WHERE number = ?",
        [(now, task.number) for task in tasks if task.held],
    )
    finished = db.execute(
        "SELECT number, state FROM tasks WHERE state IN ('completed', 'failed') ORDER BY changed, number"
    ).fetchall()
    return tasks, finished
