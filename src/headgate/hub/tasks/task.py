"""Tasks in the ledger: what is kept of each, and what the ledger's thread does with them."""

import sqlite3
from typing import Any, Final, Literal, TypeAlias, get_args
from uuid import uuid4

import msgspec

from headgate.hub.errors import Refused

State: TypeAlias = Literal["queued", "assigned", "accepted", "completed", "failed"]
STATES: Final[tuple[State, ...]] = get_args(State)


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A task in a list of them. Times are seconds since 1970."""

    task_id: str
    creator: str
    state: State
    agent: str | None
    """Who holds it, or has finished it."""
    attempt: int
    """How many times it was given to an agent."""
    progress: float
    note: str
    """What was said of it last: by its holder, or why it is queued again."""
    created_at: float
    changed_at: float


class Task(TaskSummary, frozen=True, kw_only=True):
    """A task, as agents and admins see it."""

    payload: msgspec.Raw
    outcome: msgspec.Raw | None
    """The result of a completed task, the error of a failed one."""


_SUMMARY: Final = "task, creator, state, agent, attempt, progress, note, at, changed"
_SELECT: Final = f"SELECT {_SUMMARY}, payload, outcome FROM tasks "  # noqa: S608 - made of its own words


def _summary(row: tuple[Any, ...]) -> dict[str, Any]:
    task_id, creator, state, agent, attempt, progress, note, at, changed = row
    return {
        "task_id": task_id,
        "creator": creator,
        "state": state,
        "agent": None if state == "queued" else agent,  # of a queued one the ledger knows who held it last
        "attempt": attempt,
        "progress": progress,
        "note": note,
        "created_at": at,
        "changed_at": changed,
    }


def _task(row: tuple[Any, ...]) -> Task:
    *summary, payload, outcome = row
    result = None if outcome is None else msgspec.Raw(outcome)
    return Task(**_summary(tuple(summary)), payload=msgspec.Raw(payload), outcome=result)


def insert(db: sqlite3.Connection, creator: str, payload: bytes, now: float) -> tuple[int, Task]:
    """Queue a task; its number, and the task."""
    number = db.execute(
        "INSERT INTO tasks (task, creator, payload, state, attempt, progress, note, at, changed) "
        "VALUES (?, ?, ?, 'queued', 0, 0, '', ?, ?)",
        (uuid4().hex, creator, payload, now, now),
    ).lastrowid
    assert number is not None
    return number, _task(db.execute(_SELECT + "WHERE number = ?", (number,)).fetchone())


def update(db: sqlite3.Connection, values: tuple[object, ...]) -> Task:
    """Write how a task stands: state, agent, attempt, progress, note, outcome, time, and the number it has."""
    db.execute(
        "UPDATE tasks SET state = ?, agent = ?, attempt = ?, progress = coalesce(?, progress), "
        "note = coalesce(?, note), outcome = ?, changed = ? WHERE number = ?",
        values,
    )
    return _task(db.execute(_SELECT + "WHERE number = ?", values[-1:]).fetchone())


def find(db: sqlite3.Connection, task_id: str) -> Task | None:
    """A task by its id."""
    if not task_id.isascii():  # SQLite takes no lone surrogates
        return None
    row = db.execute(_SELECT + "WHERE task = ?", (task_id,)).fetchone()
    return None if row is None else _task(row)


def page(
    db: sqlite3.Connection, of: str | None, state: str | None, limit: int, before: str | None
) -> list[TaskSummary]:
    """Tasks, newest first, without what they carry: those of an agent, in a state, before another."""
    conditions: list[str] = []
    values: list[object] = []
    if before is not None:
        row = db.execute("SELECT number FROM tasks WHERE task = ?", (before,)).fetchone() if before.isascii() else None
        if row is None:
            raise Refused(404, "unknown_task", f"before: expected the id of a task, got {before[:40]!r}")
        conditions.append("number < ?")
        values += row
    if of is not None:
        conditions.append("(creator = ? OR (agent = ? AND state <> 'queued'))")
        values += (of, of)
    if state is not None:
        conditions.append("state = ?")
        values.append(state)
    where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
    select = f"SELECT {_SUMMARY} FROM tasks {where}ORDER BY number DESC LIMIT ?"  # noqa: S608 - made of its own words
    return [TaskSummary(**_summary(row)) for row in db.execute(select, (*values, limit)).fetchall()]


Rows: TypeAlias = list[tuple[int, str, str | None, int]]


def resume(db: sqlite3.Connection, now: float) -> tuple[Rows, Rows, list[tuple[int, State]]]:
    """Queue what was held; what was held, what waited, and what is finished, each oldest first."""
    select = "SELECT number, task, agent, attempt FROM tasks "
    held = db.execute(select + "WHERE state IN ('assigned', 'accepted') ORDER BY number").fetchall()
    waiting = db.execute(select + "WHERE state = 'queued' ORDER BY number").fetchall()
    db.execute(
        "UPDATE tasks SET state = 'queued', progress = 0, note = 'the hub was restarted', changed = ? "
        "WHERE state IN ('assigned', 'accepted')",
        (now,),
    )
    finished = db.execute(
        "SELECT number, state FROM tasks WHERE state IN ('completed', 'failed') ORDER BY changed, number"
    ).fetchall()
    return held, waiting, finished
