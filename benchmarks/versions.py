"""Compare another version of headgate with the present one: `./dev compare REVISION`.

For each subject, two processes, one per version, take turns within each of many short rounds, so that a slow phase of
the machine hits both. The best round of each counts: noise only ever adds. A subject uses nothing but public names,
which both versions have.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any, Final, NamedTuple, TypeAlias

if __name__ == "__main__":  # Python puts this folder on the path; the modules are named from the folder above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import hub_report
from benchmarks.measure import freeze, names, one_by_one, shuffled
from benchmarks.report import number, table
from headgate import Gate, Limiter, RedisStore
from headgate.limits.notation import LimitLike

MOST: Final = 1.05
"""How much longer the present version may take, as a ratio."""

_MUCH: Final = "1000000000/minute"  # so that nothing is denied
_KEYS: Final = 1000
_TASKS: Final = 50

Round: TypeAlias = Callable[[], int]
"""Does some work, and returns how many operations that were."""


class Subject(NamedTuple):
    """Something that is measured: `prepare` makes a round. `timer` counts nanoseconds."""

    prepare: Callable[[str], Round]
    timer: Callable[[], int] = process_time_ns


# Subjects ------------------------------------------------------------------------------------------------------------


def _checks(check: Callable[[str], object], count: int = 30_000) -> Round:
    keys = shuffled(names(_KEYS), count)

    def run() -> int:
        for key in keys:
            check(key)
        return len(keys)

    return run


def _limiter(limit: LimitLike) -> Round:
    return _checks(Limiter(limit).check)


def _gate(limit: str) -> Round:
    gate = Gate()
    gate.set_default("normal", limit)
    return _checks(lambda key: gate.check(key, "ws", "normal"))


def _thread(url: str) -> Round:
    return _checks(Limiter(_MUCH, store=RedisStore(url, timeout=10)).check, 500)


def _tasks(url: str) -> Round:
    limiter, keys = Limiter(_MUCH, store=RedisStore(url, timeout=10)), shuffled(names(_KEYS), _TASKS * 40)
    runner = asyncio.Runner()

    async def together() -> None:
        await asyncio.gather(*[one_by_one(limiter.acheck, keys[first::_TASKS]) for first in range(_TASKS)])

    def run() -> int:
        runner.run(together())
        return len(keys)

    return run


def _requests(**options: Any) -> Round:
    from benchmarks import edges  # imports what only this subject needs

    app, runner = edges.limited_app(**options), asyncio.Runner()

    def run() -> int:
        runner.run(edges.send_requests(app, 1000))
        return 1000

    return run


SUBJECTS: Final = {
    "Limiter.check": Subject(lambda _: _limiter(_MUCH)),
    "Limiter.check, denied": Subject(lambda _: _limiter("1/day")),
    "Limiter.check, two limits": Subject(lambda _: _limiter([_MUCH, "1000000000/day"])),
    "Limiter.check, sliding window, denied": Subject(lambda _: _limiter("1/day sliding")),
    "Gate.check": Subject(lambda _: _gate(_MUCH)),
    "Gate.check, denied": Subject(lambda _: _gate("1/day")),
    "Valkey, one thread": Subject(_thread, perf_counter_ns),
    f"Valkey, {_TASKS} tasks": Subject(_tasks, perf_counter_ns),
    "FastAPI request with middleware": Subject(lambda _: _requests()),
    "FastAPI request with middleware and a key function": Subject(
        lambda _: _requests(key=lambda request: request.headers.get("user-agent"))
    ),
}


def measure_rounds(subject: Subject, url: str) -> None:
    """In a process of one version: for each line of the input, do a round and print its nanoseconds per operation."""
    run = subject.prepare(url)
    run()
    for _ in sys.stdin:
        freeze()
        start = subject.timer()
        done = run()
        print((subject.timer() - start) / done, flush=True)


# The comparison ------------------------------------------------------------------------------------------------------


class Version:
    """A process of one version that measures one subject."""

    def __init__(self, package: Path | None, subject: str, url: str) -> None:
        environment = dict(os.environ) if package is None else os.environ | {"PYTHONPATH": str(package)}
        command = [sys.executable, __file__, "--measure", subject, "--url", url]
        self.process: Final = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.times: Final[list[float]] = []

    def measure(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a version failed; its output is above")
        self.times.append(float(line))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def compare(package: Path, subject: str, rounds: int, url: str) -> tuple[float, float]:
    """The best nanoseconds per operation of the version in `package`, and of the installed one."""
    with ExitStack() as stack:
        versions = [Version(package, subject, url), Version(None, subject, url)]
        old, new = versions
        for one in versions:
            stack.callback(one.close)
        for _ in range(rounds):
            for one in versions:
                one.measure()
            versions.reverse()  # so that neither always comes second
        return min(old.times), min(new.times)


def hub_rows(package: Path, rounds: int, only: str) -> Iterator[tuple[str, float, float]]:
    """The same for a hub, for each workload whose name contains `only`: processor time per message."""
    from benchmarks import hub_load, hub_suite

    subjects = {f"hub, {what}": what for what in hub_load.WORKLOADS}
    chosen = [subject for subject in subjects if only in subject]
    if not chosen:
        return
    with ExitStack() as stack:
        with _python_path(package):
            old, _ = stack.enter_context(hub_suite.hub(Gate, hub_load.CONNECTIONS))
        new, _ = stack.enter_context(hub_suite.hub(Gate, hub_load.CONNECTIONS))
        for subject in chosen:
            print(f"{subject} …", file=sys.stderr, flush=True)
            pair = hub_load.load(subjects[subject], old, new, rounds, 0.1)
            yield subject, _cost(pair.gated), _cost(pair.ungated)


def _cost(rounds: list[hub_report.Round]) -> float:
    return min([one.cost for one in rounds]) * 1e9


@contextmanager
def _python_path(package: Path) -> Iterator[None]:
    """Processes that are started meanwhile import headgate from `package`."""
    os.environ["PYTHONPATH"] = str(package)
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev compare", description="Compare two versions of headgate.")
    parser.add_argument("--package", type=Path, help="the folder of the other version")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each version; the best one counts")
    parser.add_argument("--only", default="", metavar="TEXT", help="only subjects whose name contains TEXT")
    parser.add_argument("--measure", metavar="SUBJECT", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure_rounds(SUBJECTS[options.measure], options.url)
        return 0
    if options.package is None:
        parser.error("the following arguments are required: --package")
    from benchmarks.redis_suite import server

    rows = []
    with server() as url:
        for subject in SUBJECTS:
            if options.only in subject:
                print(f"{subject} …", file=sys.stderr, flush=True)
                rows.append((subject, *compare(options.package, subject, options.rounds, url)))
    rows.extend(hub_rows(options.package, options.rounds, options.only))
    cells = [[what, number(old), number(new), f"{new / old - 1:+.1%}"] for what, old, new in rows]
    print(table(["ns per operation, best round", "other version", "present version", "change"], cells))
    slower = [what for what, old, new in rows if new > old * MOST]
    print(f"\nmore than {MOST - 1:.0%} slower: {', '.join(slower) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
