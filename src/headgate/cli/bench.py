"""`headgate bench`: measure checks on this machine."""

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
from headgate.cli.parser import Commands, add_command, duration
from headgate.cli.terminal import Column, ProgressLine, print_json, print_table, version_text, waiting_for
from headgate.errors import HeadgateError
from headgate.gate import Gate
from headgate.gate.policy import Policy
from headgate.limiter import Limiter
from headgate.limits.decision import Decision
from headgate.stores.base import Store
from headgate.stores.memory import MemoryStore
from headgate.stores.memory_tables import compiled
from headgate.stores.urls import server_store

MUCH: Final = "1000000000/second"
LITTLE: Final = "1 per 10 minutes"
KEYS: Final = 1000
SERVER_KEYS: Final = 100
THREADS: Final = 8
TASKS: Final = 100
_PASSES: Final = 10  # over all keys, in one round in memory
_ROUNDS: Final = 3  # at least


@dataclass(frozen=True)
class Case:
    """A kind of check: `run` makes `checks` of them and returns the last decision."""

    what: str
    passes: bool
    checks: int
    run: Callable[[], Decision]


@dataclass(frozen=True)
class Figure:
    """The measured times of one kind of check."""

    what: str
    ns: float
    """Nanoseconds per check, in the median round."""
    best_ns: float
    per_second: int
    """In the median round."""


def add(commands: Commands) -> None:
    bench = add_command(
        commands,
        "bench",
        _run,
        "measure checks on this machine",
        "Measure how long checks take with this installation on this machine: in memory, or with --store on a Redis or "
        "Valkey server. Keys written there have a prefix of their own, and expire.",
        "headgate bench",
        "headgate bench --store redis://localhost --json",
        json=True,
    )
    bench.add_argument("--seconds", type=duration, default=5.0, metavar="S", help="approximate duration (default: 5)")
    bench.add_argument("--store", metavar="URL", help="measure on this Redis or Valkey server")


def _run(options: argparse.Namespace) -> int:
    with _cases(options.store) as cases:
        figures = _measured(cases, options.seconds)
    about = {
        "version": VERSION,
        "compiled": compiled(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cores": os.cpu_count(),
        "store": "memory" if options.store is None else "server",
        "keys": KEYS if options.store is None else SERVER_KEYS,
    }
    if options.json:
        print_json(about | {"figures": [asdict(one) for one in figures]})
        return 0
    print(f"{version_text()}, {about['python']}, {about['cores']} cores")
    titles = [Column(f"{about['keys']} keys in turn, {about['store']}")]
    titles += [Column(title, right=True) for title in ("ns a check", "best", "checks a second")]
    print_table(titles, [[one.what, f"{one.ns:,.0f}", f"{one.best_ns:,.0f}", f"{one.per_second:,}"] for one in figures])
    return 0


def _measured(cases: Sequence[Case], seconds: float) -> list[Figure]:
    """Measure each case for its share of the time, in rounds."""
    figures: list[Figure] = []
    with ProgressLine() as progress:
        for case in cases:
            decision = case.run()  # warms up, and uses up the tokens where checks are to be denied
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
    """The cases to measure, and the life of their store."""
    if url is None:
        store = MemoryStore()
        yield [*_in_sequence(store, Gate(_policy(), store=store), KEYS, _PASSES), _in_threads(store)]
        return
    with ExitStack() as stack:
        prefix = f"headgate-bench-{uuid4().hex[:8]}:"
        server = stack.enter_context(closing(server_store("--store", url, prefix=prefix, timeout=5)))
        with waiting_for("the server"):
            server.verify()
        loop = stack.enter_context(asyncio.Runner())
        stack.callback(lambda: loop.run(server.aclose()))
        gate = stack.enter_context(Gate(_policy(), store=server))  # closed before its store
        yield [*_in_sequence(server, gate, SERVER_KEYS, 1), _in_tasks(server, loop)]


def _policy() -> Policy:
    return Policy(limits={"light": MUCH, "heavy": LITTLE})


def _in_sequence(store: Store, gate: Gate, keys: int, passes: int) -> list[Case]:
    """Checks one after the other, by limiters and by a gate."""
    names = _names(keys) * passes

    def limiter_check(limit: str) -> Callable[[], Decision]:
        check = Limiter(limit, store=store).check

        def run() -> Decision:
            for name in names:
                check(name)
            return check(names[0])

        return run

    def gate_check(tier: str) -> Callable[[], Decision]:
        check = gate.check

        def run() -> Decision:
            for name in names:
                check(name, "ws", tier)
            return check(names[0], "ws", tier)

        return run

    return [
        Case("Limiter.check, allow", True, len(names), limiter_check(MUCH)),
        Case("Limiter.check, deny", False, len(names), limiter_check(LITTLE)),
        Case("Gate.check, allow", True, len(names), gate_check("light")),
        Case("Gate.check, deny", False, len(names), gate_check("heavy")),
    ]


def _in_threads(store: Store) -> Case:
    """Checks in several threads at once."""
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


def _in_tasks(store: Store, loop: asyncio.Runner) -> Case:
    """Checks in many tasks at once, which are sent in batches."""
    acheck, names = Limiter(MUCH, store=store, name="tasks").acheck, _names(TASKS)

    async def check_all() -> Decision:
        return (await asyncio.gather(*(acheck(name) for name in names * 10)))[-1]

    return Case(f"Limiter.acheck, allow, {TASKS * 10} at once", True, TASKS * 10, lambda: loop.run(check_all()))


def _names(count: int) -> list[str]:
    return [f"agent-{number}" for number in range(count)]
