"""The scheduler: tasks that wait, agents that are idle, and who holds what.

A task is held by one agent at a time, and an agent holds one task at a time:

| state              | what happens                                   | then                                 | attempt |
|--------------------|------------------------------------------------|--------------------------------------|---------|
|                    | `add`                                          | queued, last in line                 | 0       |
| queued             | the turn of an agent that may have it          | assigned to that agent               | + 1     |
| queued             | `recovering`, from its last holder, if idle    | accepted by that agent               | + 1     |
| assigned           | the frame that says so can't be sent           | queued, where it was                 | - 1     |
| assigned           | no word within `accept_within`                 | queued, first in line                |         |
| assigned           | `accepted`, `progressed`, `recovering`         | accepted                             |         |
| accepted           | `progressed`, `recovering`                     | accepted                             |         |
| assigned, accepted | `completed`                                    | completed                            |         |
| assigned, accepted | `failed`, to be retried, attempt < 5           | queued, last in line                 |         |
| assigned, accepted | `failed` otherwise                             | failed                               |         |
| assigned, accepted | its agent leaves, or the hub stops             | queued, first in line                |         |

Anything else is refused. An agent is *idle* while it is connected, has not said that it is busy, has not left an
assignment without an answer, and holds no task. Idle agents get tasks in the order in which they became idle, unless
they are rate limited: that is looked up whenever it is an agent's turn, and again at the moment when its quiet period
can be over. It touches no task that the agent holds.

What keeps this true while others run, at every await: a task is changed only by who has its lock, and memory follows
the ledger, never the other way round. To make a pair, the task leaves the queue and the agent the line at once, before
the first await; the pair parts only when the ledger says that the task is no longer the agent's. Who comes back before
that is not idle yet. A change that has begun is carried through, whatever becomes of the one who asked for it.
"""

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from typing import Any, Final, TypeVar

import msgspec

from headgate.errors import StoreError
from headgate.gate import Gate
from headgate.hub.errors import Refused
from headgate.hub.storage.database import Ledger, LedgerError
from headgate.hub.tasks import task as task_rows
from headgate.hub.tasks.queue import Entry, Line, Place, Worker
from headgate.hub.tasks.task import STATES, State, Task, TaskSummary
from headgate.hub.timer import Timer
from headgate.limits.clock import Clock
from headgate.limits.numbers import microseconds

T = TypeVar("T")
MOST_ATTEMPTS: Final = 5

_HELD: Final = ("assigned", "accepted")
_PAUSE: Final = 1_000_000  # microseconds until what failed is tried again
_UNWRITTEN: Final = (LedgerError, sqlite3.Error)

_log = logging.getLogger("headgate.hub")


class Scheduler:
    """Gives tasks to agents, and remembers them in a ledger.

    `assign` is called with an agent and a task that it now holds; it has the frame sent that says so, and returns
    whether that was possible. `clock` is the gate's. Everything is called in one event loop.
    """

    def __init__(
        self,
        ledger: Ledger,
        gate: Gate,
        clock: Clock,
        assign: Callable[[str, Task], bool],
        *,
        accept_within: float = 30.0,
        most_queued: int = 10_000,
        most_finished: int = 10_000,
    ) -> None:
        self._ledger, self._gate, self._clock, self._assign = ledger, gate, clock, assign
        self._accept_within: Final = microseconds("accept_within", accept_within)
        self._most_queued, self._most_finished = most_queued, most_finished
        self._open: Final[dict[str, Entry]] = {}
        self._finished: Final[deque[tuple[int, State]]] = deque()  # oldest first
        self._counts: Final[dict[State, int]] = dict.fromkeys(STATES, 0)
        self._adding = 0
        self._workers: Final[dict[str, Worker]] = {}
        self._leaving: Final[set[str]] = set()  # agents that have left, with a task that isn't back in the queue yet
        self._queue: Final[Line[Entry]] = Line()
        self._line: Final[Line[Worker]] = Line()
        self._turns: Final = count()
        self._matching = False
        self._rest: Timer | None = None
        self._under_way: Final[set[asyncio.Task[Any]]] = set()
        self._closed = False

    async def start(self) -> None:
        """Read the ledger. What was held when the hub stopped is queued again, first in line."""
        now = time.time()
        held, waiting, finished = await self._ledger.run(lambda db: task_rows.resume(db, now))
        for number, task_id, agent, attempt in (*held, *waiting):
            entry = Entry(number, task_id, (1, next(self._turns)))
            entry.last, entry.attempt = agent, attempt
            self._enter(entry)
        self._finished.extend(finished)
        for _, state in finished:
            self._counts[state] += 1
        self._prune()
        self._wake()

    async def close(self) -> None:
        """Finish what has begun. What is held stays so in the ledger, and the next start queues it again."""
        self._closed = True
        for waiting in (*self._workers.values(), *self._open.values()):
            waiting.stop_timer()
        if self._rest is not None:
            self._rest.cancel()
        while self._under_way:
            await asyncio.wait(self._under_way)

    # Tasks -----------------------------------------------------------------------------------------------------------

    async def add(self, creator: str, payload: bytes) -> Task:
        """Queue a task; `payload` is JSON."""
        self._expect_open()
        if self._counts["queued"] + self._adding >= self._most_queued:
            detail = f"expected fewer than {self._most_queued} tasks in the queue, got that many; try again later"
            raise Refused(503, "queue_full", detail)
        self._adding += 1
        return await self._carry_through(self._add(creator, payload))

    async def find(self, task_id: str) -> Task | None:
        """A task by its id."""
        self._expect_open()
        return await self._ledger.run(lambda db: task_rows.find(db, task_id))

    async def tasks(
        self, *, of: str | None = None, state: str | None = None, limit: int = 100, before: str | None = None
    ) -> list[TaskSummary]:
        """Tasks, newest first: those that an agent has created or holds, or all; those older than the task `before`."""
        self._expect_open()
        if state is not None and state not in STATES:
            raise Refused(400, "invalid", f"state: expected one of {', '.join(STATES)}, got {state[:40]!r}")
        return await self._ledger.run(lambda db: task_rows.page(db, of, state, limit, before))

    def counts(self) -> dict[str, int]:
        """How many tasks there are in each state."""
        return {state: self._counts[state] for state in STATES}

    # Agents ----------------------------------------------------------------------------------------------------------

    def arrived(self, agent: str) -> None:
        """An agent's first connection has come: it is idle until it says otherwise."""
        if agent not in self._workers:
            worker = self._workers[agent] = Worker(agent, (next(self._turns),))
            self._line_up(worker)

    def left(self, agent: str) -> None:
        """An agent's last connection is gone: it loses its task."""
        worker = self._workers.pop(agent, None)
        if worker is None:
            return
        worker.here = False
        self._out_of_line(worker)
        if worker.entry is not None:
            self._leaving.add(agent)
            if not self._closed:
                self._spawn(self._give_back(worker.entry, worker, "its agent left"))

    def available(self, agent: str, yes: bool) -> None:
        """An agent says that it is ready for tasks, or busy with something else."""
        worker = self._workers.get(agent)
        if worker is None:
            return
        news = yes and not worker.willing
        worker.available = yes
        if yes:
            worker.silent = False
            self._line_up(worker, anew=news)
        else:
            self._out_of_line(worker)

    def is_idle(self, agent: str) -> bool:
        """Whether an agent would get the next task, if it isn't rate limited and its turn comes."""
        worker = self._workers.get(agent)
        return worker is not None and self._is_idle(worker)

    def task_of(self, agent: str) -> str | None:
        """The task that an agent holds."""
        worker = self._workers.get(agent)
        if worker is None or worker.entry is None or worker.entry.state not in _HELD:
            return None
        return worker.entry.task_id

    def look_again(self) -> None:
        """Something has changed that may end an agent's being limited before its time: look it up now."""
        for worker in self._workers.values():
            self._line_up(worker)

    # What agents say of their tasks ----------------------------------------------------------------------------------

    async def accepted(self, agent: str, task_id: str) -> Task:
        """Let an agent keep the task that was assigned to it."""
        return await self._told(agent, task_id, self._accept)

    async def progressed(self, agent: str, task_id: str, progress: float, note: str) -> Task:
        """Note how far a task is; one that was only assigned counts as accepted."""
        return await self._told(
            agent,
            task_id,
            lambda entry: self._write(entry, "accepted", entry.last, entry.attempt, progress=progress, note=note),
        )

    async def completed(self, agent: str, task_id: str, result: bytes | None) -> Task:
        """End a task with its result, which is JSON."""
        return await self._told(agent, task_id, lambda entry: self._finish(entry, "completed", result))

    async def failed(self, agent: str, task_id: str, error: str, retry: bool) -> Task:
        """End a task with an error, or queue it again if it has an attempt left."""
        return await self._told(agent, task_id, lambda entry: self._fail(entry, error, retry))

    async def recovering(self, agent: str, task_id: str) -> Task:
        """Go on with a task that the agent holds, or held last and nobody has taken over."""
        self._expect_open()
        return await self._carry_through(self._recover(agent, task_id))

    async def _told(self, agent: str, task_id: str, change: Callable[[Entry], Awaitable[Task]]) -> Task:
        self._expect_open()
        self._heard(agent)
        return await self._carry_through(self._by_holder(agent, task_id, change))

    async def _by_holder(self, agent: str, task_id: str, change: Callable[[Entry], Awaitable[Task]]) -> Task:
        entry = self._open.get(task_id)
        if entry is None:
            raise await self._refusal(agent, task_id)
        async with entry.lock:
            if not self._holds(agent, entry):
                raise await self._refusal(agent, task_id)
            return await change(entry)

    async def _accept(self, entry: Entry) -> Task:
        if entry.state != "assigned":
            raise Refused(409, "not_possible", f"task {entry.task_id}: expected it to be assigned, got {entry.state}")
        return await self._write(entry, "accepted", entry.last, entry.attempt)

    async def _finish(self, entry: Entry, state: State, outcome: bytes | None) -> Task:
        task = await self._write(entry, state, entry.last, entry.attempt, outcome=outcome)
        del self._open[entry.task_id]
        self._part(entry)
        self._finished.append((entry.number, state))
        self._prune()
        return task

    async def _fail(self, entry: Entry, error: str, retry: bool) -> Task:
        if not retry or entry.attempt >= MOST_ATTEMPTS:
            return await self._finish(entry, "failed", msgspec.json.encode(error))
        task = await self._write(entry, "queued", entry.last, entry.attempt, progress=0.0, note=error)
        self._queue_again(entry, (1, next(self._turns)))
        return task

    async def _recover(self, agent: str, task_id: str) -> Task:
        try:
            entry = self._open.get(task_id)
            if entry is None:
                raise await self._refusal(agent, task_id)
            async with entry.lock:
                if self._holds(agent, entry):
                    return await self._write(entry, "accepted", agent, entry.attempt, note="recovering")
                worker = self._workers.get(agent)
                if worker is None or entry not in self._queue or entry.last != agent:
                    raise await self._refusal(agent, task_id)
                return await self._take_up(entry, worker)
        except (Refused, *_UNWRITTEN):
            self._heard(agent)  # not before, so that it gets this task rather than any
            raise

    async def _take_up(self, entry: Entry, worker: Worker) -> Task:
        """Give a task back to its last holder."""
        worker.silent = False
        if not self._is_idle(worker):
            detail = f"task {entry.task_id}: expected an idle agent, got one that is busy or has left"
            raise Refused(409, "not_possible", detail)
        self._pair(entry, worker)
        try:
            return await self._write(entry, "accepted", worker.name, entry.attempt + 1, note="recovering")
        except _UNWRITTEN:
            self._queue_again(entry, entry.place)
            raise

    def _holds(self, agent: str, entry: Entry) -> bool:
        """Whether an agent holds a task, in this stay."""
        return entry.state in _HELD and entry.worker is not None and entry.worker is self._workers.get(agent)

    async def _refusal(self, agent: str, task_id: str) -> Refused:
        """Why an agent can say nothing of a task."""
        task = await self._ledger.run(lambda db: task_rows.find(db, task_id))
        if task is None:
            return Refused(404, "unknown_task", f"expected the id of a task, got {task_id[:40]!r}")
        if task.agent == agent and task.state not in _HELD:
            return Refused(409, "not_possible", f"task {task_id}: expected one that isn't finished, got {task.state}")
        return Refused(409, "not_yours", f"task {task_id}: expected its holder; wait until a task is assigned to you")

    def _heard(self, agent: str) -> None:
        """An agent has said something of a task, so that it is there again if it was silent."""
        worker = self._workers.get(agent)
        if worker is not None:
            news, worker.silent = worker.silent, False
            self._line_up(worker, anew=news)

    # Who gets what ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Bring together tasks and agents, if there are both."""
        if self._queue and self._line and not (self._matching or self._rest or self._closed):
            self._matching = True
            self._spawn(self._match())

    async def _match(self) -> None:
        try:
            while self._queue and self._line and not (self._rest or self._closed):
                worker = self._line.first()
                limited = await self._limited_for(worker.name)
                if limited and worker in self._line:
                    self._set_aside(worker, limited)
                elif worker in self._line and self._queue:  # nobody was quicker meanwhile
                    entry = self._queue.first()
                    self._pair(entry, worker)
                    self._spawn(self._hand_over(entry, worker))
                await asyncio.sleep(0)  # a long line must not hold up the loop
        except StoreError as error:
            self._try_later("looking up who is rate limited", error)
        finally:
            self._matching = False

    async def _limited_for(self, agent: str) -> int:
        """Microseconds until an agent can be free of its violations; 0 if it is."""
        if self._gate.is_exempt(agent):
            return 0
        standing = await self._gate.astanding(agent)
        return max(microseconds("quiet_left", standing.quiet_left), 1) if standing else 0

    async def _hand_over(self, entry: Entry, worker: Worker) -> None:
        """Assign a task to an agent: in the ledger, then in its own eyes."""
        async with entry.lock:
            last, attempt = entry.last, entry.attempt
            try:
                task = await self._write(entry, "assigned", worker.name, attempt + 1)
            except _UNWRITTEN as error:
                self._try_later(f"assigning task {entry.task_id}", error)
                self._queue_again(entry, entry.place)
                return
            self._await_answer(entry, worker)
            if worker.here and worker.willing and not self._closed and self._assign(worker.name, task):
                return
            try:
                await self._write(entry, "queued", last, attempt)
            except _UNWRITTEN as error:  # it goes back as one without an answer, or as one whose agent left
                _log.error("queueing task %s again: %s", entry.task_id, error)
                return
            self._queue_again(entry, entry.place)
            if worker.here:
                self._set_aside(worker, _PAUSE)

    def _await_answer(self, entry: Entry, worker: Worker) -> None:
        attempt = entry.attempt
        self._later(entry, self._accept_within, lambda: self._give_back(entry, worker, "not accepted in time", attempt))

    async def _give_back(self, entry: Entry, worker: Worker, note: str, unanswered: int | None = None) -> None:
        """Queue a task again, first in line, if that agent still holds it, or still owes an answer to that attempt."""
        async with entry.lock:
            if entry.worker is not worker or entry.state not in _HELD:
                return
            if unanswered is not None and (entry.state, entry.attempt) != ("assigned", unanswered):
                return
            worker.silent = unanswered is not None
            try:
                await self._write(entry, "queued", entry.last, entry.attempt, progress=0.0, note=note)
            except _UNWRITTEN as error:
                _log.error("queueing task %s again: %s", entry.task_id, error)
                self._later(entry, _PAUSE, lambda: self._give_back(entry, worker, note, unanswered))
                return
            self._queue_again(entry, (0, entry.number))

    def _later(self, entry: Entry, span: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something with a task in a while, unless it changes before."""
        entry.stop_timer()
        if not self._closed:
            entry.timer = Timer(self._clock, self._clock.now() + span, lambda: self._spawn(work()))

    def _pair(self, entry: Entry, worker: Worker) -> None:
        self._queue.remove(entry)
        self._out_of_line(worker)
        entry.worker, worker.entry = worker, entry

    def _part(self, entry: Entry) -> None:
        worker = entry.worker
        assert worker is not None
        entry.worker = worker.entry = None
        self._leaving.discard(worker.name)  # the agent may be back by now
        now_here = self._workers.get(worker.name)
        if now_here is not None:
            self._line_up(now_here, anew=True)

    def _queue_again(self, entry: Entry, place: Place) -> None:
        self._part(entry)
        entry.place = place
        self._queue.put(place, entry)
        self._wake()

    def _is_idle(self, worker: Worker) -> bool:
        return worker.here and worker.willing and worker.entry is None and worker.name not in self._leaving

    def _line_up(self, worker: Worker, *, anew: bool = False) -> None:
        """Let an agent have its turn: as the last if it is idle `anew`, otherwise in its old place."""
        if not self._is_idle(worker) or worker in self._line:
            return
        self._out_of_line(worker)
        if anew:
            worker.place = (next(self._turns),)
        self._line.put(worker.place, worker)
        self._wake()

    def _out_of_line(self, worker: Worker) -> None:
        if worker in self._line:
            self._line.remove(worker)
        worker.stop_timer()

    def _set_aside(self, worker: Worker, span: int) -> None:
        """Look at an agent again when `span` has passed, or something is heard of it."""
        self._out_of_line(worker)
        if not self._closed:
            worker.timer = Timer(self._clock, self._clock.now() + span, lambda: self._line_up(worker))

    def _try_later(self, what: str, error: Exception) -> None:
        """Assign nothing for a while."""
        _log.error("%s: %s", what, error)
        if self._rest is None and not self._closed:
            self._rest = Timer(self._clock, self._clock.now() + _PAUSE, self._rested)

    def _rested(self) -> None:
        self._rest = None
        self._wake()

    # The ledger ------------------------------------------------------------------------------------------------------

    async def _add(self, creator: str, payload: bytes) -> Task:
        try:
            number, task = await self._ledger.run(lambda db: task_rows.insert(db, creator, payload, time.time()))
        finally:
            self._adding -= 1
        self._enter(Entry(number, task.task_id, (1, next(self._turns))))
        self._wake()
        return task

    def _enter(self, entry: Entry) -> None:
        self._open[entry.task_id] = entry
        self._counts[entry.state] += 1
        self._queue.put(entry.place, entry)

    async def _write(
        self,
        entry: Entry,
        state: State,
        agent: str | None,
        attempt: int,
        *,
        progress: float | None = None,
        note: str | None = None,
        outcome: bytes | None = None,
    ) -> Task:
        """Write how a task stands, and let memory follow: the one way in which a task changes."""
        values = (state, agent, attempt, progress, note, outcome, time.time(), entry.number)
        task = await self._ledger.run(lambda db: task_rows.update(db, values))
        entry.stop_timer()
        self._counts[entry.state] -= 1
        self._counts[state] += 1
        entry.state, entry.last, entry.attempt = state, agent, attempt
        return task

    def _prune(self) -> None:
        surplus = [self._finished.popleft() for _ in range(len(self._finished) - self._most_finished)]
        if surplus:
            self._spawn(self._forget(surplus))

    async def _forget(self, surplus: list[tuple[int, State]]) -> None:
        numbers = [(number,) for number, _ in surplus]
        try:
            await self._ledger.run(lambda db: db.executemany("DELETE FROM tasks WHERE number = ?", numbers))
        except _UNWRITTEN as error:
            _log.error("forgetting finished tasks: %s", error)
            self._finished.extendleft(reversed(surplus))  # the next that is finished tries again
        else:
            for _, state in surplus:
                self._counts[state] -= 1

    async def _carry_through(self, change: Coroutine[Any, Any, T]) -> T:
        """Make a change as a whole, even if whoever asked for it is cancelled meanwhile."""
        return await asyncio.shield(self._spawn(change))

    def _expect_open(self) -> None:
        if self._closed:
            raise Refused(503, "stopping", "expected a hub that runs, got one that is stopping; try again in a moment")

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task
