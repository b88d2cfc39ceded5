"""`headgate bench`: how fast the headgate that is installed here decides on this machine."""

import argparse
import asyncio
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from threading import Barrier, Thread
from typing import Final
from uuid import uuid4

from headgate._version import VERSION
from headgate.cli.parser import Commands, command, seconds
from headgate.cli.terminal import Column, Progress, patience, print_json, print_table
from headgate.errors import HeadgateError
from headgate.gate import Gate
from headgate.gate.policy import Policy
from headgate.limiter import Limiter
from headgate.limits.decision import Decision
from headgate.stores.base import Store
from headgate.stores.memory import MemoryStore, compiled
from headgate.stores.urls import server_store

MUCH: Final = "1000000000/second"
LITTLE: Final = "1 per 10 minutes"
KEYS: Final = 1000
KEYS_AT_A_SERVER: Final = 100
THREADS: Final = 8
TASKS: Final = 100
_PASSES: Final = 10  # over all keys, in one round in memory
_ROUNDS: Final = 3  # at the least


@dataclass(frozen=True)
class Case:
    """One kind of check: `run` makes so many, and returns the last decision."""

    what: str
    passes: bool
    checks: int
    run: Callable[[], Decision]


@dataclass(frozen=True)
class Figure:
    """What was measured of one kind of check."""

    what: str
    ns: float
    """Nanoseconds for each, in the median round."""
    best_ns: float
    per_second: int
    """In the median round."""


def add(commands: Commands) -> None:
    """Add the command."""
    bench = command(
        commands,
        "bench",
        _bench,
        "measure headgate on this machine",
        "Measure how long checks take with the headgate that is installed, on this machine: in this process's memory, "
        "or with --store in a Redis or Valkey server. What is written there has a prefix of its own, and expires.",
        "headgate bench",
        "headgate bench --store redis://localhost --json",
        data=True,
    )
    bench.add_argument("--seconds", type=seconds, default=5.0, metavar="S", help="how long, about (5)")
    bench.add_argument("--store", metavar="URL", help="measure this Redis or Valkey server")


def _bench(options: argparse.Namespace) -> int:
    with _cases(options.store) as cases:
        figures = _measured(cases, options.seconds)
    about = {
        "version": VERSION,
        "compiled": compiled(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cores": os.cpu_count(),
        "store": "memory" if options.store is None else "server",
        "keys": KEYS if options.store is None else KEYS_AT_A_SERVER,
    }
    if options.json:
        print_json(about | {"figures": [asdict(one) for one in figures]})
        return 0
    how = "compiled" if about["compiled"] else "plain Python: not compiled"
    print(f"headgate {VERSION} ({how}), {about['python']}, {about['cores']} cores")
    titles = [Column(f"{about['keys']} keys in turn, {about['store']}")]
    titles += [Column(title, right=True) for title in ("ns a check", "best", "checks a second")]
    print_table(titles, [[one.what, f"{one.ns:,.0f}", f"{one.best_ns:,.0f}", f"{one.per_second:,}"] for one in figures])
    return 0


def _measured(cases: Sequence[Case], seconds: float) -> list[Figure]:
    """Measure each case for its share of the time, in rounds."""
    figures: list[Figure] = []
    with Progress() as progress:
        for case in cases:
            decision = case.run()  # once before, so that everything is there, and what is to be denied is
            times: list[float] = []
            end = time.perf_counter() + seconds / len(cases)
            while len(times) < _ROUNDS or time.perf_counter() < end:
                begin = time.perf_counter()
                decision = case.run()
                times.append((time.perf_counter() - begin) / case.checks * 1e9)
                progress.show(lambda: f"measuring: {len(figures) + 1} of {len(cases)}")
            if decision.degraded or bool(decision) is not case.passes:
                raise HeadgateError(f"{case.what}: expected the server to decide, got {decision}; is it still there?")
            typical = median(times)
            figures.append(Figure(case.what, round(typical, 1), round(min(times), 1), round(1e9 / typical)))
    return figures


@contextmanager
def _cases(url: str | None) -> Iterator[list[Case]]:
    """What is measured; a store that was opened for it is closed in the end."""
    if url is None:
        store = MemoryStore()
        yield [*_in_turn(store, Gate(_policy(), store=store), KEYS, _PASSES), _by_threads(store)]
        return
    with ExitStack() as things:
        server = things.enter_context(
            closing(server_store("--store", url, prefix=f"headgate-bench-{uuid4().hex[:8]}:", timeout=5))
        )
        with patience("waiting for the server"):
            server.verify()
        loop = things.enter_context(asyncio.Runner())
        things.callback(lambda: loop.run(server.aclose()))
        gate = things.enter_context(Gate(_policy(), store=server))  # which is closed before its store
        yield [*_in_turn(server, gate, KEYS_AT_A_SERVER, 1), _by_tasks(server, loop)]


def _policy() -> Policy:
    return Policy(limits={"light": MUCH, "heavy": LITTLE})


def _in_turn(store: Store, gate: Gate, keys: int, passes: int) -> list[Case]:
    """Checks one after the other, of limiters and of a gate."""
    names = _names(keys) * passes

    def limiter(limit: str) -> Callable[[], Decision]:
        check = Limiter(limit, store=store).check

        def run() -> Decision:
            for name in names:
                check(name)
            return check(names[0])

        return run

    def of_gate(tier: str) -> Callable[[], Decision]:
        check = gate.check

        def run() -> Decision:
            for name in names:
                check(name, "ws", tier)
            return check(names[0], "ws", tier)

        return run

    return [
        Case("Limiter.check, allow", True, len(names), limiter(MUCH)),
        Case("Limiter.check, deny", False, len(names), limiter(LITTLE)),
        Case("Gate.check, allow", True, len(names), of_gate("light")),
        Case("Gate.check, deny", False, len(names), of_gate("heavy")),
    ]


def _by_threads(store: Store) -> Case:
    """Checks of many threads at once, all together."""
    check, names = Limiter(MUCH, store=store, name="threads").check, _names(KEYS)

    def work(ready: Barrier, last: list[Decision]) -> None:
        ready.wait()
        for name in names:
            check(name)
        last.append(check(names[0]))

    def run() -> Decision:
        ready, last = Barrier(THREADS), list[Decision]()
        threads = [Thread(target=work, args=(ready, last)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return last[0]

    return Case(f"Limiter.check, allow, {THREADS} threads together", True, len(names) * THREADS, run)


def _by_tasks(store: Store, loop: asyncio.Runner) -> Case:
    """Checks of many tasks at once, which are sent together."""
    acheck, names = Limiter(MUCH, store=store, name="tasks").acheck, _names(TASKS)

    async def all_of_them() -> Decision:
        return (await asyncio.gather(*(acheck(name) for name in names * 10)))[-1]

    return Case(f"Limiter.acheck, allow, {TASKS * 10} at once", True, TASKS * 10, lambda: loop.run(all_of_them()))


def _names(count: int) -> list[str]:
    return [f"agent-{number}" for number in range(count)]
