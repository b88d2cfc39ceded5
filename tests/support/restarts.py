"""Restarts of a program whose store remembers its limits in a file."""

import sqlite3
from contextlib import closing
from pathlib import Path

from headgate import Limiter, ManualClock, MemoryStore

DAY = 86_400
START = 1_800_000  # seconds on the clock, so that a wrong conversion of moments shows


class Restarts:
    """One file, used by one store after another. Each begins with a clock that shows another time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.clock = ManualClock(START)
        self._store: MemoryStore | None = None

    @property
    def store(self) -> MemoryStore:
        """The store of the process that has the file."""
        if self._store is None:
            self._store = MemoryStore(clock=self.clock, remember=self.path)
        return self._store

    def limiter(self, limit: str, name: str = "llm") -> Limiter:
        return Limiter(limit, store=self.store, name=name)

    def restart(self, down: float = 0) -> None:
        """End the process that has the file, and begin another one after so many seconds."""
        self.close()
        self.clock.advance(down)
        self.clock = RebootedClock(self.clock)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None


class RebootedClock(ManualClock):
    """A clock that begins anew, at the same time of day."""

    def __init__(self, before: ManualClock) -> None:
        super().__init__(17)
        self._ahead = before.wall() - super().wall()

    def wall(self) -> float:
        return super().wall() + self._ahead


def table_rows(path: Path, table: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as file:
        return file.execute(f"SELECT * FROM {table}").fetchall()
