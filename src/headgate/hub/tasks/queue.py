"""What the scheduler keeps in memory: open tasks, agents that are here, and the lines in which both wait their turn."""

import asyncio
from bisect import bisect_left, insort
from typing import Final, Generic, TypeAlias, TypeVar

from headgate.hub.tasks.task import State
from headgate.hub.timer import Timer

T = TypeVar("T")
Place: TypeAlias = tuple[int, ...]
"""Where something stands in a line: before all that have a greater one."""


class Line(Generic[T]):
    """Things in the order of their places, each of which is taken once."""

    def __init__(self) -> None:
        self._order: list[tuple[Place, T]] = []
        self._places: dict[T, Place] = {}

    def put(self, place: Place, item: T) -> None:
        self._places[item] = place
        insort(self._order, (place, item), key=_place)

    def remove(self, item: T) -> None:
        del self._order[bisect_left(self._order, self._places.pop(item), key=_place)]

    def first(self) -> T:
        return self._order[0][1]

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def __len__(self) -> int:
        return len(self._order)


def _place(item: tuple[Place, object]) -> Place:
    return item[0]


class _Waiting:
    """Something that a timer may be set for."""

    timer: Timer | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Entry(_Waiting):
    """What memory knows of a task that isn't finished; its payload stays in the ledger."""

    def __init__(self, number: int, task_id: str, place: Place) -> None:
        self.number: Final = number
        self.task_id: Final = task_id
        self.place = place
        self.state: State = "queued"
        self.last: str | None = None  # who holds it, or held it last
        self.attempt = 0
        self.worker: Worker | None = None  # who holds it, or is about to
        self.lock: Final = asyncio.Lock()


class Worker(_Waiting):
    """An agent while it is connected; when it comes back it is another one."""

    def __init__(self, name: str, place: Place) -> None:
        self.name: Final = name
        self.place = place
        self.here = True
        self.available = True  # says the agent
        self.silent = False  # has not answered an assignment, and said nothing since
        self.entry: Entry | None = None

    @property
    def willing(self) -> bool:
        return self.available and not self.silent
