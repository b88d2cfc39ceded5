"""Measurements that each need a new process: they depend on the history of its memory."""

import gc
import os
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from benchmarks.contenders import LIBRARIES, SLOW
from benchmarks.measure import name, shuffled
from benchmarks.report import Single
from headgate import Limiter, ManualClock, MemoryStore, per_day, per_minute

REPETITIONS: Final = 3
"""Repetitions of the same single checks."""

_BEFORE: Final = 1000  # keys to begin with, so that one-time allocations are not counted
_OTHERS: Final = 1000
_BLOCK: Final = 1000  # single checks at one time of the clock
_SECONDS: Final = 0.01  # from one block to the next


def bytes_per_key(label: str, count: int) -> float:
    """Growth of the resident memory per key, including the key's string.

    The strings are made on the fly, and only the contender keeps them. The garbage collector runs before each reading
    only; running all the time, it gives the same figures, but more slowly.
    """
    gc.disable()
    contender = LIBRARIES[label]([SLOW])
    contender.run(name(number) for number in range(_BEFORE))
    contender.settle()
    before = _resident()
    contender.run(name(number) for number in range(_BEFORE, count))
    contender.settle()
    after = _resident()
    if contender.kept is not None and contender.kept() != count:
        raise RuntimeError(f"{label} keeps {contender.kept()} keys of {count}")
    return (after - before) / (count - _BEFORE)


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def expiring(count: int, checks: int) -> Single:
    """Single checks of a few keys, while very many other keys expire."""
    order = shuffled([f"other-{number}" for number in range(_OTHERS)], checks)
    times = []
    kept = 0
    for _ in range(REPETITIONS):
        clock = ManualClock()
        store = MemoryStore(clock=clock)
        limiter = Limiter(per_minute(1_000_000), store=store)
        for number in range(count):
            limiter.check(name(number))
        clock.advance(60)
        times.append(_time_each(limiter.check, order, partial(clock.advance, _SECONDS)))
        kept = len(store)
    return _single(f"{checks:,} of {_OTHERS:,} keys, while {count:,} other keys expire", times, kept)


def growing(count: int) -> Single:
    """Single checks of new keys only."""
    keys = [name(number) for number in range(count)]
    times = []
    kept = 0
    for _ in range(REPETITIONS):
        clock = ManualClock()
        store = MemoryStore(clock=clock)
        limiter = Limiter(per_day(100), store=store)
        times.append(_time_each(limiter.check, keys, partial(clock.advance, _SECONDS)))
        kept = len(store)
    return _single(f"{count:,} new keys", times, kept)


def growing_set(count: int) -> Single:
    """The same for one hash table, which moves all its entries whenever it grows."""
    keys = [name(number) for number in range(count)]
    times = []
    for _ in range(REPETITIONS):
        known: set[str] = set()
        times.append(_time_each(known.add, keys, lambda: None))
    return _single(f"for comparison: {count:,} new keys into one `set`", times, count)


def _time_each(check: Callable[[str], object], keys: Sequence[str], pass_time: Callable[[], None]) -> "array[int]":
    """Nanoseconds of each check."""
    times = array("q", bytes(8 * len(keys)))
    gc.collect()
    gc.freeze()
    for start in range(0, len(keys), _BLOCK):
        pass_time()
        for number in range(start, min(start + _BLOCK, len(keys))):
            key = keys[number]
            begin = perf_counter_ns()
            check(key)
            times[number] = perf_counter_ns() - begin
    gc.unfreeze()
    return times


def _single(what: str, repetitions: Sequence["array[int]"], kept: int) -> Single:
    """Times of single checks.

    Under a manual clock the n-th check does the same work in every repetition. Its shortest time is its own; the rest
    of a longer one is the machine's.
    """
    own = sorted(map(min, zip(*repetitions, strict=True)))
    worst_seen = max([max(times) for times in repetitions])
    return Single(what, own[len(own) // 2], own[ceil(len(own) * 0.9999) - 1], own[-1], worst_seen, kept)
