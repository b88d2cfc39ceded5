"""Threads that run the same work, and threads that wait in line."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from headgate import Limiter
from tests.support.valkey import PATIENCE, wait_for

T = TypeVar("T")


def run_together(threads: int, work: Callable[[int], T]) -> list[T]:
    """Call `work(number)` in that many threads, all released at once, and return the results in order."""
    start = threading.Barrier(threads)

    def run(number: int) -> T:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


class Waiter(threading.Thread):
    """A thread that waits for the key "a" of a limiter. Once made, it is in the queue."""

    def __init__(self, limiter: Limiter, *args: Any, verb: str = "acquire", **options: Any) -> None:
        super().__init__(daemon=True)
        self._wait = partial(getattr(limiter, verb), "a", *args, **options)
        self.found: Any = None
        before = limiter.waiting("a")
        self.start()
        wait_for(lambda: limiter.waiting("a") > before or not self.is_alive(), "the queue")

    def run(self) -> None:
        self.found = self._wait()

    def result(self) -> Any:
        self.join(PATIENCE)
        assert self.found is not None
        return self.found
