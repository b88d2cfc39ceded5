"""Measurements that need a process of their own, since they depend on what the process's memory went through before."""

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
"""How often the same single checks are made."""

_BEFORE: Final = 1000  # keys that are there before the memory is counted, so that what is made once is not counted
_OTHERS: Final = 1000
_BLOCK: Final = 1000  # single checks, between which the clock stands still
_SECONDS: Final = 0.01  # that pass from one block to the next


def bytes_per_key(label: str, count: int) -> float:
    """How much the resident memory grows with each key, the key's string included.

    The strings are made on the fly, and kept by nobody but the contender. The garbage collector runs before each
    reading only: running all the time, it gives the same figures, later.
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
    """Single checks of a few keys, while very many others are full again and get dropped."""
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
        times.append(_one_by_one(limiter.check, order, partial(clock.advance, _SECONDS)))
        kept = len(store)
    return _single(f"{checks:,} of {_OTHERS:,} keys, while {count:,} other keys expire", times, kept)


def growing(count: int) -> Single:
    """Single checks of keys that are all new."""
    keys = [name(number) for number in range(count)]
    times = []
    kept = 0
    for _ in range(REPETITIONS):
        clock = ManualClock()
        store = MemoryStore(clock=clock)
        limiter = Limiter(per_day(100), store=store)
        times.append(_one_by_one(limiter.check, keys, partial(clock.advance, _SECONDS)))
        kept = len(store)
    return _single(f"{count:,} new keys", times, kept)


def growing_set(count: int) -> Single:
    """The same for one hash table, which has to move all that it holds whenever it grows."""
    keys = [name(number) for number in range(count)]
    times = []
    for _ in range(REPETITIONS):
        known: set[str] = set()
        times.append(_one_by_one(known.add, keys, lambda: None))
    return _single(f"for comparison: {count:,} new keys into one `set`", times, count)


def _one_by_one(check: Callable[[str], object], keys: Sequence[str], pass_time: Callable[[], None]) -> "array[int]":
    """Nanoseconds of every single check."""
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
    """What single checks took.

    Under a clock set by hand the n-th check does the same work in every repetition. The least that it took is its own
    time; what it took more in another repetition was the machine.
    """
    own = sorted(map(min, zip(*repetitions, strict=True)))
    worst_seen = max([max(times) for times in repetitions])
    return Single(what, own[len(own) // 2], own[ceil(len(own) * 0.9999) - 1], own[-1], worst_seen, kept)
