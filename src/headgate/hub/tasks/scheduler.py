"""The scheduler: queued tasks, idle agents, and who holds which task.

A task is held by one agent at a time, and an agent holds one task at a time:

| state              | event                                              | then                        | attempt |
|--------------------|----------------------------------------------------|-----------------------------|---------|
|                    | `add`                                              | queued, last                | 0       |
| queued             | the turn of an agent that may have it              | assigned to that agent      | + 1     |
| queued             | `recover`, by its last holder, if that is idle     | accepted by that agent      | + 1     |
| assigned           | the assignment can't be sent                       | queued, where it was        | - 1     |
| assigned           | no answer within `accept_within`, attempt < 5      | queued, first               |         |
| assigned           | `accept`, `report_progress`, `recover`             | accepted                    |         |
| accepted           | `report_progress`, `recover`                       | accepted                    |         |
| assigned, accepted | `complete`                                         | completed                   |         |
| assigned, accepted | `fail`, to be retried, attempt < 5                 | queued, last                |         |
| assigned, accepted | its agent disconnects, attempt < 5                 | queued, first               |         |
| assigned, accepted | `fail`, no answer or a disconnect otherwise        | failed                      |         |
| assigned, accepted | the hub stops                                      | queued, first               |         |

Anything else is refused. An agent is *idle* while it is connected, has not said that it is busy, has left no assignment
unanswered, and holds no task. Idle agents get tasks in the order in which they became idle, unless they are rate
limited or blocked: that is checked whenever it is an agent's turn, and again when its quiet period or its block can be
over. It does not affect a task that the agent holds.

What keeps this true at every await: a task is changed only under its lock, and memory follows the database, never the
other way round. To pair a task and an agent, both leave their queues at once, before the first await; the pair is
parted only when the database says that the task is no longer the agent's. An agent that reconnects before that is not
idle yet. A change that has begun is finished, even if its caller is cancelled.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from typing import Any, Final

import msgspec

from headgate.errors import StoreError
from headgate.gate import Gate
from headgate.hub.background import BackgroundTasks
from headgate.hub.errors import RequestError
from headgate.hub.json_bounds import check_numbers
from headgate.hub.storage.database import Database, DatabaseError
from headgate.hub.tasks.queue import OpenTask, Priority, PriorityQueue, Worker
from headgate.hub.tasks.task import HELD, STATES, State, Task, TaskSummary, TaskTable
from headgate.hub.timer import Timer
from headgate.limits.clock import Clock
from headgate.limits.numbers import microseconds

MAX_ATTEMPTS: Final = 5
ADMIN: Final = ""
"""The creator of the admin's tasks."""

_RETRY: Final = 1_000_000  # microseconds until a failed step is tried again
_LOOK_AGAIN: Final = 60.0  # seconds at most until a blocked agent is looked at again: the time of day can be set

_log = logging.getLogger("headgate.hub")


class Scheduler:
    """Assigns tasks to agents, and keeps them in a database.

    `send_assignment` is called with an agent and a task that it now holds; it queues the frame for the agent, and
    returns whether that was possible. `clock` is the gate's. An agent may have `most_per_agent` tasks that are not
    finished; the admin has room for a tenth more than `most_queued`, whatever agents have queued. Everything is called
    in one event loop.
    """

    def __init__(
        self,
        database: Database,
        gate: Gate,
        clock: Clock,
        send_assignment: Callable[[str, Task], bool],
        *,
        accept_within: float = 30.0,
        most_queued: int = 10_000,
        most_per_agent: int = 1_000,
        most_finished: int = 10_000,
    ) -> None:
        self._table: Final = TaskTable(database)
        self._gate, self._clock, self._send_assignment = gate, clock, send_assignment
        self._accept_within: Final = microseconds("accept_within", accept_within)
        self._most_queued, self._most_finished, self._most_per_agent = most_queued, most_finished, most_per_agent
        self._open: Final[dict[str, OpenTask]] = {}
        self._finished: Final[deque[tuple[int, State]]] = deque()  # oldest first
        self._counts: Final[dict[State, int]] = dict.fromkeys(STATES, 0)
        self._adding = 0
        self._unfinished: Final[Counter[str]] = Counter()  # by creator, including those that are being added
        self._workers: Final[dict[str, Worker]] = {}
        self._leaving: Final[set[str]] = set()  # agents that have left, with a task that is not queued again yet
        self._queue: Final[PriorityQueue[OpenTask]] = PriorityQueue()
        self._idle: Final[PriorityQueue[Worker]] = PriorityQueue()
        self._turns: Final = count()
        self._matching = False
        self._pause: Timer | None = None  # while nothing is assigned
        self._failure = ""  # the last error, until a task can be written again
        self._background: Final = BackgroundTasks()
        self._closed = False

    async def start(self) -> None:
        """Read the database. Tasks that were held when the hub stopped are queued again, first."""
        unfinished, finished = await self._table.resume(time.time())
        for row in unfinished:
            task = OpenTask(row.number, row.task_id, row.creator, (1, next(self._turns)))
            task.holder, task.attempt = row.agent, row.attempt
            self._unfinished[row.creator] += 1
            self._enqueue_new(task)
        self._finished.extend(finished)
        for _, state in finished:
            self._counts[state] += 1
        self._prune()
        self._wake()

    async def close(self) -> None:
        """Finish every change that has begun. Held tasks stay so in the database; the next start queues them again."""
        self._closed = True
        for timed in (*self._workers.values(), *self._open.values()):
            timed.stop_timer()
        if self._pause is not None:
            self._pause.cancel()
        await self._background.wait()

    # Tasks -----------------------------------------------------------------------------------------------------------

    async def add(self, creator: str, payload: bytes) -> Task:
        """Queue a task; `payload` is JSON."""
        self._expect_open()
        check_numbers(payload)
        own = self._unfinished[creator]
        if creator != ADMIN and own >= self._most_per_agent:
            detail = f"expected fewer than {own} unfinished tasks of yours, got that many; wait for one of them"
            raise RequestError(409, "too_many_tasks", detail)
        most = self._most_queued + (max(self._most_queued // 10, 1) if creator == ADMIN else 0)
        if self._counts["queued"] + self._adding >= most:
            detail = f"expected fewer than {most} tasks in the queue, got that many; try again later"
            raise RequestError(503, "queue_full", detail)
        self._adding += 1
        self._unfinished[creator] += 1
        return await self._background.finish(self._add(creator, payload))

    async def find(self, task_id: str) -> Task | None:
        """A task by its id."""
        self._expect_open()
        return await self._table.find(task_id)

    async def tasks(
        self, *, of: str | None = None, state: str | None = None, limit: int = 100, before: str | None = None
    ) -> list[TaskSummary]:
        """Tasks, newest first: all, or those that an agent has created or holds; those older than the task `before`."""
        self._expect_open()
        if state is not None and state not in STATES:
            raise RequestError(400, "invalid", f"state: expected one of {', '.join(STATES)}, got {state[:40]!r}")
        return await self._table.page(of, state, limit, before)

    async def drop_agent_data(self) -> None:
        """Take all tasks away from their agents: the admin has created them, and nobody has held them.

        No agent may be connected.
        """
        self._expect_open()
        for task in list(self._open.values()):
            async with task.lock:  # what is written later, as when a task is queued again, has no holder
                task.holder = None
        await self._table.drop_agents()
        for task in self._open.values():  # those that the database had: its jobs end in order
            self._forget_one(task.creator)
            self._unfinished[ADMIN] += 1
            task.creator = ADMIN

    def counts(self) -> dict[str, int]:
        """The number of tasks in each state."""
        return {state: self._counts[state] for state in STATES}

    def created_by(self, agent: str) -> int:
        """The number of unfinished tasks that an agent created."""
        return self._unfinished.get(agent, 0)

    # Agents ----------------------------------------------------------------------------------------------------------

    def agent_connected(self, agent: str) -> None:
        """An agent's first connection is open: it is idle until it says otherwise."""
        if agent not in self._workers:
            worker = self._workers[agent] = Worker(agent, (next(self._turns),))
            self._enqueue(worker)

    def agent_disconnected(self, agent: str) -> None:
        """An agent's last connection is closed: it loses its task."""
        worker = self._workers.pop(agent, None)
        if worker is None:
            return
        worker.connected = False
        self._dequeue(worker)
        if worker.task is not None:
            self._leaving.add(agent)
            if not self._closed:
                self._background.spawn(self._requeue_held(worker.task, worker, "its agent left"))

    def set_available(self, agent: str, available: bool) -> None:
        """An agent says that it is ready for tasks, or busy with something else."""
        worker = self._workers.get(agent)
        if worker is None:
            return
        renewed = available and not worker.willing
        worker.available = available
        if available:
            worker.unresponsive = False
            self._enqueue(worker, last=renewed)
        else:
            self._dequeue(worker)

    def is_idle(self, agent: str) -> bool:
        """Whether an agent would get the next task, if it is not rate limited and its turn comes."""
        worker = self._workers.get(agent)
        return worker is not None and self._is_idle(worker)

    def task_of(self, agent: str) -> str | None:
        """The task that an agent holds."""
        worker = self._workers.get(agent)
        return worker.task.task_id if worker is not None and worker.task is not None and worker.task.held else None

    def recheck(self) -> None:
        """Check now who is rate limited: a change may have ended that before its time."""
        for worker in self._workers.values():
            self._enqueue(worker)

    # Reports of agents on their tasks --------------------------------------------------------------------------------

    async def accept(self, agent: str, task_id: str) -> Task:
        """Accept the task that was assigned to the agent."""
        return await self._report(agent, task_id, self._accept)

    async def report_progress(self, agent: str, task_id: str, progress: float, note: str) -> Task:
        """Record the progress of a task; one that was only assigned counts as accepted."""
        return await self._report(
            agent,
            task_id,
            lambda task: self._write(task, "accepted", task.holder, task.attempt, progress=progress, note=note),
        )

    async def complete(self, agent: str, task_id: str, result: bytes | None) -> Task:
        """End a task with its result, which is JSON."""
        check_numbers(result or b"")
        return await self._report(agent, task_id, lambda task: self._finish(task, "completed", result))

    async def fail(self, agent: str, task_id: str, error: str, retry: bool) -> Task:
        """End a task with an error, or queue it again if it has an attempt left."""
        return await self._report(agent, task_id, lambda task: self._fail(task, error, retry))

    async def recover(self, agent: str, task_id: str) -> Task:
        """Go on with a task that the agent holds, or held last and nobody has taken over."""
        self._expect_open()
        return await self._background.finish(self._recover(agent, task_id))

    async def _report(self, agent: str, task_id: str, change: Callable[[OpenTask], Awaitable[Task]]) -> Task:
        self._expect_open()
        self._responded(agent)
        return await self._background.finish(self._change_held(agent, task_id, change))

    async def _change_held(self, agent: str, task_id: str, change: Callable[[OpenTask], Awaitable[Task]]) -> Task:
        task = self._open.get(task_id)
        if task is None:
            raise await self._refusal(agent, task_id)
        async with task.lock:
            if not self._holds(agent, task):
                raise await self._refusal(agent, task_id)
            return await change(task)

    async def _accept(self, task: OpenTask) -> Task:
        if task.state != "assigned":
            raise RequestError(
                409, "not_possible", f"task {task.task_id}: expected it to be assigned, got {task.state}"
            )
        return await self._write(task, "accepted", task.holder, task.attempt)

    async def _finish(self, task: OpenTask, state: State, outcome: bytes | None) -> Task:
        written = await self._write(task, state, task.holder, task.attempt, outcome=outcome)
        del self._open[task.task_id]
        self._forget_one(task.creator)
        self._part(task)
        self._finished.append((task.number, state))
        self._prune()
        return written

    async def _fail(self, task: OpenTask, error: str, retry: bool) -> Task:
        if not retry or task.attempt >= MAX_ATTEMPTS:
            return await self._finish(task, "failed", msgspec.json.encode(error))
        written = await self._write(task, "queued", task.holder, task.attempt, progress=0.0, note=error)
        self._requeue(task, (1, next(self._turns)))
        return written

    async def _recover(self, agent: str, task_id: str) -> Task:
        try:
            task = self._open.get(task_id)
            if task is None:
                raise await self._refusal(agent, task_id)
            async with task.lock:
                if self._holds(agent, task):
                    return await self._write(task, "accepted", agent, task.attempt, note="recovering")
                worker = self._workers.get(agent)
                if worker is None or task not in self._queue or task.holder != agent:
                    raise await self._refusal(agent, task_id)
                return await self._resume(task, worker)
        except (RequestError, DatabaseError):
            self._responded(agent)  # not before, so that it gets this task rather than any other
            raise

    async def _resume(self, task: OpenTask, worker: Worker) -> Task:
        """Give a queued task back to its last holder."""
        worker.unresponsive = False
        if not self._is_idle(worker):
            detail = f"task {task.task_id}: expected an idle agent, got one that is busy or has left"
            raise RequestError(409, "not_possible", detail)
        self._pair(task, worker)
        try:
            return await self._write(task, "accepted", worker.name, task.attempt + 1, note="recovering")
        except DatabaseError:
            self._requeue(task, task.priority)
            raise

    def _holds(self, agent: str, task: OpenTask) -> bool:
        """Whether an agent holds a task, since its last connect."""
        return task.held and task.worker is not None and task.worker is self._workers.get(agent)

    async def _refusal(self, agent: str, task_id: str) -> RequestError:
        """Why an agent can't change a task."""
        task = await self._table.find(task_id)
        if task is None:
            return RequestError(404, "unknown_task", f"expected the id of a task, got {task_id[:40]!r}")
        if task.agent == agent and task.state not in HELD:
            detail = f"task {task_id}: expected one that isn't finished, got {task.state}"
            return RequestError(409, "not_possible", detail)
        detail = f"task {task_id}: expected its holder; wait until a task is assigned to you"
        return RequestError(409, "not_yours", detail)

    def _responded(self, agent: str) -> None:
        """An agent has reported on a task: it is no longer unresponsive."""
        worker = self._workers.get(agent)
        if worker is not None:
            renewed, worker.unresponsive = worker.unresponsive, False
            self._enqueue(worker, last=renewed)

    # Assignment ------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Start to pair tasks and agents, if there are both."""
        if self._queue and self._idle and not (self._matching or self._pause or self._closed):
            self._matching = True
            self._background.spawn(self._match())

    async def _match(self) -> None:
        try:
            while self._queue and self._idle and not (self._pause or self._closed):
                worker = self._idle.first()
                limited = await self._limited_for(worker.name)
                if limited and worker in self._idle:
                    self._enqueue_later(worker, limited)
                elif worker in self._idle and self._queue:  # nothing has changed meanwhile
                    task = self._queue.first()
                    self._pair(task, worker)
                    self._background.spawn(self._assign(task, worker))
                await asyncio.sleep(0)  # a long queue must not hold up the loop
        except StoreError as error:
            self._pause_assignment("looking up who is rate limited", error)
        finally:
            self._matching = False

    async def _limited_for(self, agent: str) -> int:
        """Microseconds until an agent's block or quiet period can be over; 0 if it is not rate limited."""
        block = self._gate.block_of(agent)
        if block is not None:
            left = _LOOK_AGAIN if block.until is None else block.until - self._clock.wall()
            return microseconds("block", min(max(left, 0.0), _LOOK_AGAIN)) + 1  # floats of such times are rounded
        if self._gate.is_exempt(agent):
            return 0
        standing = await self._gate.astanding(agent)
        return max(microseconds("quiet_left", standing.quiet_left), 1) if standing else 0

    async def _assign(self, task: OpenTask, worker: Worker) -> None:
        """Assign a task to an agent: first in the database, then by a frame."""
        async with task.lock:
            holder, attempt = task.holder, task.attempt
            try:
                assigned = await self._write(task, "assigned", worker.name, attempt + 1)
            except DatabaseError as error:
                self._pause_assignment(f"assigning task {task.task_id}", error)
                self._requeue(task, task.priority)
                return
            self._expect_answer(task, worker)
            ready = worker.connected and worker.willing and not self._gate.is_blocked(worker.name)
            if ready and not self._closed and self._send_assignment(worker.name, assigned):
                return
            try:
                await self._write(task, "queued", holder, attempt)
            except DatabaseError as error:  # it is queued again as unanswered, or when its agent disconnects
                self._log_failure(f"queueing task {task.task_id} again", error)
                return
            self._requeue(task, task.priority)
            if worker.connected:
                self._enqueue_later(worker, _RETRY)

    def _expect_answer(self, task: OpenTask, worker: Worker) -> None:
        attempt = task.attempt
        self._later(
            task, self._accept_within, lambda: self._requeue_held(task, worker, "not accepted in time", attempt)
        )

    async def _requeue_held(self, task: OpenTask, worker: Worker, note: str, unanswered: int | None = None) -> None:
        """Queue a task again, first, if that agent still holds it, and has not answered the attempt `unanswered`."""
        async with task.lock:
            if task.worker is not worker or not task.held:
                return
            if unanswered is not None and (task.state, task.attempt) != ("assigned", unanswered):
                return
            worker.unresponsive = unanswered is not None
            try:
                if task.attempt >= MAX_ATTEMPTS:  # otherwise a task that no agent survives would stop them all
                    await self._finish(task, "failed", msgspec.json.encode(f"{note}, at attempt {task.attempt}"))
                    return
                await self._write(task, "queued", task.holder, task.attempt, progress=0.0, note=note)
            except DatabaseError as error:
                self._log_failure(f"queueing task {task.task_id} again", error)
                self._later(task, _RETRY, lambda: self._requeue_held(task, worker, note, unanswered))
                return
            self._requeue(task, (0, task.number))

    def _later(self, task: OpenTask, span: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something in a while, unless the task changes before."""
        task.stop_timer()
        if not self._closed:
            task.timer = Timer(self._clock, self._clock.now() + span, lambda: self._background.spawn(work()))

    def _pair(self, task: OpenTask, worker: Worker) -> None:
        self._queue.remove(task)
        self._dequeue(worker)
        task.worker, worker.task = worker, task

    def _part(self, task: OpenTask) -> None:
        worker = task.worker
        assert worker is not None
        task.worker = worker.task = None
        self._leaving.discard(worker.name)  # the agent may have reconnected by now
        present = self._workers.get(worker.name)
        if present is not None:
            self._enqueue(present, last=True)

    def _requeue(self, task: OpenTask, priority: Priority) -> None:
        self._part(task)
        task.priority = priority
        self._queue.put(priority, task)
        self._wake()

    def _is_idle(self, worker: Worker) -> bool:
        return worker.connected and worker.willing and worker.task is None and worker.name not in self._leaving

    def _enqueue(self, worker: Worker, *, last: bool = False) -> None:
        """Let an idle agent have its turn: as the last, or with its old priority."""
        if not self._is_idle(worker) or worker in self._idle:
            return
        self._dequeue(worker)
        if last:
            worker.priority = (next(self._turns),)
        self._idle.put(worker.priority, worker)
        self._wake()

    def _dequeue(self, worker: Worker) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
        worker.stop_timer()

    def _enqueue_later(self, worker: Worker, span: int) -> None:
        """Let an agent have its turn when `span` has passed, or when it reports something."""
        self._dequeue(worker)
        if not self._closed:
            worker.timer = Timer(self._clock, self._clock.now() + span, lambda: self._enqueue(worker))

    def _pause_assignment(self, step: str, error: Exception) -> None:
        """Assign nothing for a while."""
        self._log_failure(step, error)
        if self._pause is None and not self._closed:
            self._pause = Timer(self._clock, self._clock.now() + _RETRY, self._end_pause)

    def _log_failure(self, step: str, error: Exception) -> None:
        """Log an error, unless it is the same as before: steps are tried again every second."""
        if str(error) != self._failure:
            self._failure = str(error)
            _log.error("%s: %s", step, error)

    def _end_pause(self) -> None:
        self._pause = None
        self._wake()

    # The database ----------------------------------------------------------------------------------------------------

    async def _add(self, creator: str, payload: bytes) -> Task:
        try:
            number, task = await self._table.insert(creator, payload, time.time())
        except BaseException:
            self._forget_one(creator)
            raise
        finally:
            self._adding -= 1
        self._enqueue_new(OpenTask(number, task.task_id, creator, (1, next(self._turns))))
        self._wake()
        return task

    def _forget_one(self, creator: str) -> None:
        """One task of a creator is finished, or was not added."""
        self._unfinished[creator] -= 1
        if not self._unfinished[creator]:
            del self._unfinished[creator]

    def _enqueue_new(self, task: OpenTask) -> None:
        self._open[task.task_id] = task
        self._counts[task.state] += 1
        self._queue.put(task.priority, task)

    async def _write(
        self,
        task: OpenTask,
        state: State,
        agent: str | None,
        attempt: int,
        *,
        progress: float | None = None,
        note: str | None = None,
        outcome: bytes | None = None,
    ) -> Task:
        """Write a task's new state, then update memory: the only way in which a task changes."""
        values = (state, agent, attempt, progress, note, outcome, time.time(), task.number)
        written = await self._table.update(values)
        self._failure = ""
        task.stop_timer()
        self._counts[task.state] -= 1
        self._counts[state] += 1
        task.state, task.holder, task.attempt = state, agent, attempt
        return written

    def _prune(self) -> None:
        surplus = [self._finished.popleft() for _ in range(len(self._finished) - self._most_finished)]
        if surplus:
            self._background.spawn(self._delete(surplus))

    async def _delete(self, surplus: list[tuple[int, State]]) -> None:
        try:
            await self._table.delete([number for number, _ in surplus])
        except DatabaseError as error:
            _log.error("deleting finished tasks: %s", error)
            self._finished.extendleft(reversed(surplus))  # tried again with the next finished task
        else:
            for _, state in surplus:
                self._counts[state] -= 1

    def _expect_open(self) -> None:
        if self._closed:
            detail = "expected a hub that runs, got one that is stopping; try again in a moment"
            raise RequestError(503, "stopping", detail)
