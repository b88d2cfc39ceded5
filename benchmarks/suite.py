"""The measurements in memory, one function each."""

import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import Final, NamedTuple

from benchmarks import isolated, report
from benchmarks.contenders import (
    FLOOR,
    HEADGATE,
    LIBRARIES,
    LIMITS_FIXED,
    ROOMY,
    ROOMY_HOUR,
    SEVERAL_LIMITS,
    TIGHT,
    Contender,
    Quota,
)
from benchmarks.measure import Turn, best_of, in_threads, names, shuffled
from benchmarks.report import Results

MakeFloor = Callable[[Iterable[str]], Contender]

_KEYS: Final = 1000


class Scale(NamedTuple):
    """The extent of a run."""

    rounds: int
    checks: int
    """Per round."""
    thread_seconds: float
    sizes: tuple[int, ...]
    size_checks: int
    peer_size: int
    """Maximum number of keys for limits."""
    peer_checks: int
    memory_keys: int
    single_keys: int
    """Keys that expire, or are new, while single checks are timed."""
    single_checks: int
    """Checks of other keys, while those expire."""


FULL: Final = Scale(
    rounds=7,
    checks=30_000,
    thread_seconds=0.15,
    sizes=(1_000, 10_000, 100_000, 1_000_000, 5_000_000),
    size_checks=300_000,
    peer_size=1_000_000,
    peer_checks=20_000,
    memory_keys=1_000_000,
    single_keys=1_000_000,
    single_checks=600_000,
)
QUICK: Final = Scale(
    rounds=5,
    checks=3_000,
    thread_seconds=0.01,
    sizes=(1_000, 10_000),
    size_checks=20_000,
    peer_size=10_000,
    peer_checks=3_000,
    memory_keys=20_000,
    single_keys=20_000,
    single_checks=150_000,
)


def measure(scale: Scale, make_floor: MakeFloor | None) -> Results:
    results = Results(report.machine(), repetitions=isolated.REPETITIONS)
    _checks(results, scale, make_floor, report.ALLOW, LIBRARIES, [ROOMY])
    _checks(results, scale, make_floor, report.ALLOW_NEW, LIBRARIES, [ROOMY], new_strings=True)
    _checks(results, scale, make_floor, report.DENY, LIBRARIES, [TIGHT], passes=False)
    _checks(results, scale, make_floor, report.TWO, SEVERAL_LIMITS, [ROOMY_HOUR, ROOMY])
    _threads(results, scale, make_floor)
    _sizes(results, scale, make_floor)
    _memory(results, scale)
    _single_checks(results, scale)
    return results


def _checks(
    results: Results,
    scale: Scale,
    make_floor: MakeFloor | None,
    what: str,
    labels: Iterable[str],
    quotas: list[Quota],
    *,
    passes: bool = True,
    new_strings: bool = False,
) -> None:
    say(f"checks: {what}")
    keys = names(_KEYS)
    contenders = _contenders(labels, quotas, keys, make_floor)
    if not passes:
        for contender in contenders.values():
            for _ in range(quotas[0].size):
                contender.run(keys)
    order = shuffled(keys, scale.checks)
    turns = {label: Turn(one, order, new_strings) for label, one in contenders.items()}
    results.checks[what] = best_of(scale.rounds, turns)
    _expect(contenders, keys, passes=passes)


def _threads(results: Results, scale: Scale, make_floor: MakeFloor | None) -> None:
    say("threads")
    keys = names(_KEYS)
    contenders = _contenders(LIBRARIES, [ROOMY], keys, make_floor)
    results.threads = in_threads(scale.rounds, scale.thread_seconds, contenders, shuffled(keys, scale.checks))
    _expect(contenders, keys, passes=True)


def _sizes(results: Results, scale: Scale, make_floor: MakeFloor | None) -> None:
    keys = names(scale.sizes[-1])
    turns: dict[tuple[str, int], Turn] = {}
    for size in scale.sizes:
        say(f"filling {size:,} keys")
        known = keys[:size]
        own = LIBRARIES[HEADGATE]([ROOMY])
        own.run(known)
        order = shuffled(known, scale.size_checks)
        turns[HEADGATE, size] = Turn(own, order)
        turns[f"{HEADGATE}, new strings", size] = Turn(own, order, new_strings=True)
        if make_floor is not None:
            turns[FLOOR, size] = Turn(make_floor(known), order)
        if size <= scale.peer_size:
            peer = LIBRARIES[LIMITS_FIXED]([ROOMY])
            peer.run(known)
            peer.settle()
            turns[LIMITS_FIXED, size] = Turn(peer, order[: scale.peer_checks])
    say("checks by number of keys")
    for (label, size), timing in best_of(scale.rounds, turns).items():
        results.sizes.setdefault(label, {})[size] = timing


def _memory(results: Results, scale: Scale) -> None:
    say(f"bytes per key, at {scale.memory_keys:,} keys")
    results.memory_keys = scale.memory_keys
    with _new_processes(os.cpu_count()) as pool:  # nothing is timed here, so they may disturb each other
        taken = pool.map(isolated.bytes_per_key, LIBRARIES, repeat(scale.memory_keys))
        results.bytes_per_key = dict(zip(LIBRARIES, taken, strict=True))


def _single_checks(results: Results, scale: Scale) -> None:
    say("single checks while keys expire, and while they are new")
    with _new_processes(1) as pool:
        expiring = pool.submit(isolated.expiring, scale.single_keys, scale.single_checks)
        growing = pool.submit(isolated.growing, scale.single_keys)
        growing_set = pool.submit(isolated.growing_set, scale.single_keys)
        results.singles = [expiring.result(), growing.result(), growing_set.result()]


def _new_processes(at_once: int | None) -> ProcessPoolExecutor:
    """A new process for each measurement."""
    return ProcessPoolExecutor(at_once, get_context("spawn"), max_tasks_per_child=1)


def _contenders(
    labels: Iterable[str], quotas: list[Quota], keys: list[str], make_floor: MakeFloor | None
) -> dict[str, Contender]:
    """The contenders with these labels, and the floor, each with all keys known."""
    contenders = {} if make_floor is None else {FLOOR: make_floor(keys)}
    contenders |= {label: LIBRARIES[label](quotas) for label in labels}
    for contender in contenders.values():
        contender.run(keys)
        contender.settle()
    return contenders


def _expect(contenders: dict[str, Contender], keys: list[str], *, passes: bool) -> None:
    """Verify that the intended case was timed."""
    for label, contender in contenders.items():
        if label != FLOOR and any([contender.passes(key) is not passes for key in keys[:10]]):
            raise RuntimeError(f"{label}: expected that all timed checks {'pass' if passes else 'are denied'}")
    kept = contenders[HEADGATE].kept
    if kept is None or kept() != len(keys):
        raise RuntimeError("headgate: expected that it keeps all keys while it is timed")


def say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)
