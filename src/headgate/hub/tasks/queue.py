"""The scheduler's state in memory: open tasks, connected agents, and the priority queues in which both wait."""

import asyncio
from bisect import bisect_left, insort
from typing import Final, Generic, TypeAlias, TypeVar

from headgate.hub.tasks.task import HELD, State
from headgate.hub.timer import Timed

T = TypeVar("T")
Priority: TypeAlias = tuple[int, ...]
"""The smallest comes first."""


class PriorityQueue(Generic[T]):
    """Items in the order of their priorities, each at most once. Any of them can be removed."""

    def __init__(self) -> None:
        self._order: list[tuple[Priority, T]] = []
        self._priorities: dict[T, Priority] = {}

    def put(self, priority: Priority, item: T) -> None:
        self._priorities[item] = priority
        insort(self._order, (priority, item), key=_priority)

    def remove(self, item: T) -> None:
        del self._order[bisect_left(self._order, self._priorities.pop(item), key=_priority)]

    def first(self) -> T:
        return self._order[0][1]

    def __contains__(self, item: T) -> bool:
        return item in self._priorities

    def __len__(self) -> int:
        return len(self._order)


def _priority(item: tuple[Priority, object]) -> Priority:
    return item[0]


class OpenTask(Timed):
    """An unfinished task, as memory knows it; its payload stays in the database."""

    def __init__(self, number: int, task_id: str, creator: str, priority: Priority) -> None:
        self.number: Final = number
        self.task_id: Final = task_id
        self.creator = creator
        self.priority = priority
        self.state: State = "queued"
        self.holder: str | None = None  # the agent that holds it, or held it last
        self.attempt = 0
        self.worker: Worker | None = None  # that holds it, or is about to
        self.lock: Final = asyncio.Lock()

    @property
    def held(self) -> bool:
        return self.state in HELD


class Worker(Timed):
    """A connected agent; after a reconnect it is another one."""

    def __init__(self, name: str, priority: Priority) -> None:
        self.name: Final = name
        self.priority = priority
        self.connected = True
        self.available = True  # as the agent says
        self.unresponsive = False  # has not answered an assignment, and sent nothing about a task since
        self.task: OpenTask | None = None

    @property
    def willing(self) -> bool:
        return self.available and not self.unresponsive
