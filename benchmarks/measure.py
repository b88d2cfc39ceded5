"""Timing, the same for all contenders.

The contenders take turns within each round, so that a slow phase of the machine hits all of them, and the best round
counts: noise only ever adds. Every figure includes the loop around the calls. The time is processor time of this
process, with all its threads: by wall time, on a busy machine, other programs would interrupt the slow contenders in
every round and the quick ones in none.

Before each turn, all existing objects are frozen out of the garbage collector. The collector stays on, so that each
contender pays for its own garbage, but not for scanning what the others keep.
"""

import asyncio
import gc
import random
import threading
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter_ns, process_time_ns
from typing import Final, NamedTuple, TypeVar

from benchmarks.contenders import Contender

THREADS: Final = 8
_WARM_UP: Final = 1000

Label = TypeVar("Label", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Nanoseconds per check."""

    best: float
    median: float
    """Its distance from the best round shows how noisy the machine was."""


class Turn(NamedTuple):
    """One contender, and the keys that it checks in each round."""

    contender: Contender
    keys: Sequence[str]
    new_strings: bool = False
    """Whether each key is a new string without a hash, as in a request."""


async def _nothing() -> None:
    pass


class AsyncTurn(NamedTuple):
    """One contender in many tasks."""

    call: Callable[[str], Awaitable[object]]
    finish: Callable[[], Awaitable[None]] = _nothing
    """Settle what is open; this isn't timed."""


@dataclass(frozen=True)
class Threads:
    """Nanoseconds per check of one thread, and of several that share the work."""

    one: float
    several: float


def name(number: int) -> str:
    return f"agent-{number:07d}"


def names(count: int) -> list[str]:
    return [name(number) for number in range(count)]


def shuffled(keys: Sequence[str], checks: int) -> list[str]:
    """A number of keys in random order, the same in every run."""
    return random.Random(checks).choices(keys, k=checks)


def best_of(
    rounds: int, turns: Mapping[Label, Turn], timer: Callable[[], int] = process_time_ns
) -> dict[Label, Timing]:
    times: dict[Label, list[float]] = {label: [] for label in turns}
    for _ in range(rounds):
        for label, (contender, keys, new_strings) in turns.items():
            contender.run(keys[:_WARM_UP])  # the caches hold data of the contender before
            contender.settle()
            checked = [key.encode().decode() for key in keys] if new_strings else keys
            freeze()
            start = timer()
            contender.run(checked)
            times[label].append((timer() - start) / len(checked))
            contender.settle()
    gc.unfreeze()
    return {label: Timing(min(taken), median(taken)) for label, taken in times.items()}


def verified_turns(contenders: Mapping[Label, Contender], order: Sequence[str]) -> dict[Label, Turn]:
    """A turn for each contender, after a check that passes."""
    for label, contender in contenders.items():
        if not contender.passes(order[0]):
            raise RuntimeError(f"{label}: expected that it passes")
    return {label: Turn(contender, order) for label, contender in contenders.items()}


async def in_tasks(
    rounds: int, turns: Mapping[Label, AsyncTurn], shares: Sequence[Sequence[str]]
) -> dict[Label, Timing]:
    """Wall time per call, by tasks that have a share of the keys each. The contenders take turns within each round."""
    times: dict[Label, list[float]] = {label: [] for label in turns}
    for number in range(rounds + 1):
        for label, (call, finish) in turns.items():
            freeze()
            start = perf_counter_ns()
            await asyncio.gather(*[one_by_one(call, share) for share in shares])
            taken = perf_counter_ns() - start
            await finish()
            if number > 0:  # the first round opens the connections
                times[label].append(taken / sum(map(len, shares)))
    gc.unfreeze()
    return {label: Timing(min(taken), median(taken)) for label, taken in times.items()}


async def one_by_one(call: Callable[[str], Awaitable[object]], keys: Sequence[str]) -> None:
    for key in keys:
        await call(key)


def in_threads(
    rounds: int, seconds: float, contenders: Mapping[str, Contender], keys: Sequence[str]
) -> dict[str, Threads]:
    """Wall time of the same work in one thread and in several.

    `seconds` is the time for one thread: long enough for the threads to interrupt each other many times.
    """
    work: dict[str, list[str]] = {}
    for label, contender in contenders.items():
        start = perf_counter_ns()
        contender.run(keys)
        checks = ceil(seconds * 1e9 / (perf_counter_ns() - start) * len(keys))
        work[label] = shuffled(keys, checks)
        contender.settle()
    one: dict[str, list[float]] = {label: [] for label in contenders}
    several: dict[str, list[float]] = {label: [] for label in contenders}
    for _ in range(rounds):
        for label, contender in contenders.items():
            for threads, times in ((1, one[label]), (THREADS, several[label])):
                freeze()
                times.append(_together(contender, work[label], threads) / len(work[label]))
                contender.settle()
    gc.unfreeze()
    return {label: Threads(min(one[label]), min(several[label])) for label in contenders}


def _together(contender: Contender, keys: Sequence[str], threads: int) -> int:
    """Nanoseconds from the first thread's start to the last one's end."""
    ready = threading.Barrier(threads)
    starts: list[int] = []
    ends: list[int] = []

    def work(share: Sequence[str]) -> None:
        ready.wait()
        starts.append(perf_counter_ns())
        contender.run(share)
        ends.append(perf_counter_ns())

    workers = [threading.Thread(target=work, args=(keys[i::threads],)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if len(ends) < threads:
        raise RuntimeError("a thread failed")
    return max(ends) - min(starts)


def freeze() -> None:
    """Hide all existing objects from the garbage collector, until `gc.unfreeze`."""
    gc.collect()
    gc.freeze()
