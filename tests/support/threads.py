"""Threads that run the same work."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_together(threads: int, work: Callable[[int], T]) -> list[T]:
    """Call `work(number)` in that many threads, all released at once, and return the results in order."""
    start = threading.Barrier(threads)

    def run(number: int) -> T:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))
