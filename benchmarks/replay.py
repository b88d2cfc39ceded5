"""The speed of a replay, beside a loop that only parses the same lines with the same parser.

Each build of headgate (as installed, and plain Python from the source) is measured in a process of its own, in which
the two take turns.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, Final, NamedTuple

from benchmarks import report
from benchmarks.measure import freeze
from benchmarks.report import NONE, Bar, bar_list, machine_line, number, table
from benchmarks.suite import say
from headgate import Policy
from headgate.replay.engine import Classifier, PolicyReplay
from headgate.replay.formats import UnusedLines
from headgate.replay.options import LogOptions
from headgate.replay.player import LogSet, Player
from headgate.stores.memory_tables import compiled

ROOT: Final = Path(__file__).resolve().parent.parent
CLIENTS: Final = 10_000
LEAST: Final = 0.3
"""The share of the parser's speed that a replay must reach."""

_PER_SECOND: Final = 200  # requests
_SLOPE: Final = 0.7  # how much busier the busiest clients are than the others
_BROWSER: Final = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0 Safari/537.36"


class Scale(NamedTuple):
    """The extent of a run."""

    rounds: int
    lines: int


FULL: Final = Scale(rounds=7, lines=300_000)
QUICK: Final = Scale(rounds=3, lines=30_000)


@dataclass(frozen=True)
class Timings:
    """Times of one build of headgate for a log: microseconds of processor time per line, by rounds."""

    how: str
    parsed: list[float]
    replayed: list[float]
    warned: float
    denied: float

    @property
    def share(self) -> float:
        """The speed of the replay as a share of the parser's."""
        return min(self.parsed) / min(self.replayed)


@dataclass
class Results:
    """The figures of a run."""

    machine: dict[str, str]
    lines: int
    logs: dict[str, list[Timings]] = field(default_factory=dict)


def measure(scale: Scale) -> Results:
    results = Results(report.machine(()), scale.lines)
    with TemporaryDirectory() as folder:
        for name, slope in (("ordinary traffic", _SLOPE), ("a flood by a few", 2 * _SLOPE)):
            path = Path(folder, "access.log")
            _write(path, scale.lines, slope)
            results.logs[name] = []
            for source in (None, ROOT / "src"):
                say(f"{name}, {'plain Python' if source else 'as installed'}")
                results.logs[name].append(_measure_isolated(path, scale.rounds, source))
    return results


def _write(path: Path, lines: int, slope: float) -> None:
    """Write a combined log of many clients, some much busier than the others."""
    rng = random.Random(lines)
    clients = [f"10.{place >> 16}.{place >> 8 & 255}.{place & 255}" for place in range(CLIENTS)]
    weights = list(accumulate([(place + 1) ** -slope for place in range(CLIENTS)]))
    with path.open("w") as log:
        for place, client in enumerate(rng.choices(clients, cum_weights=weights, k=lines)):
            at = place // _PER_SECOND
            time = f"10/Oct/2025:{at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d} +0000"
            request = f"GET /api/items/{rng.randrange(5000)}?page={rng.randrange(9)} HTTP/1.1"
            log.write(
                f'{client} - - [{time}] "{request}" 200 {rng.randrange(20_000)} "https://example.com/" "{_BROWSER}"\n'
            )


def _measure_isolated(path: Path, rounds: int, source: Path | None) -> Timings:
    """Measure in a new process: headgate as installed, or from the source."""
    where = [str(ROOT)] if source is None else [str(source), str(ROOT)]
    command = [sys.executable, "-m", "benchmarks.replay", str(path), str(rounds)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(where)}, stdout=subprocess.PIPE, check=True, text=True
    )
    return Timings(**json.loads(done.stdout))


def _measure(path: str, rounds: int) -> dict[str, Any]:
    times: dict[Callable[[str], Any], list[float]] = {_parse: [], _replay: []}
    lines = Path(path).read_bytes().count(b"\n")
    counts = [0]
    for _ in range(rounds):
        for work, taken in times.items():
            freeze()
            begin = process_time()
            counts = work(path) or counts
            taken.append((process_time() - begin) / lines * 1e6)
    return {
        "how": "compiled" if compiled() else "plain Python",
        "parsed": times[_parse],
        "replayed": times[_replay],
        "warned": counts[1] / lines,
        "denied": counts[2] / lines,
    }


def _parse(path: str) -> None:
    with LogSet([path], LogOptions()) as logs:
        for log in logs.open(Classifier([PolicyReplay("", Policy())]), UnusedLines()):
            for block in log.blocks:
                for _ in log.parser.requests(block):
                    pass


def _replay(path: str) -> list[int]:
    policy = PolicyReplay("", Policy())
    with LogSet([path], LogOptions()) as logs:
        Player(logs, [policy])
    return policy.tiers["http", "normal"].total


def markdown(results: Results) -> str:
    head = [f"{results.lines:,} lines, µs each", "parsed only", "replayed", "share of the speed", "lines a second"]
    rows = []
    for name, kinds in results.logs.items():
        for one in kinds:
            parsed, replayed = min(one.parsed), min(one.replayed)
            speed = number(1e6 / replayed)
            rows.append([f"{name}, {one.how}", f"{parsed:.2f}", f"{replayed:.2f}", f"{one.share:.2f}", speed])
    return (
        "\n\n".join([machine_line(results.machine), table(head, rows), _note(results), bar_list(bars(results))]) + "\n"
    )


def _note(results: Results) -> str:
    shares = "; ".join([
        f"{name}: {kinds[0].warned:.1%} warned, {kinds[0].denied:.1%} denied" for name, kinds in results.logs.items()
    ])  # fmt: skip
    every = [one for kinds in results.logs.values() for one in kinds]
    noise = max([median(one.replayed) / min(one.replayed) - 1 for one in every], default=0.0)
    return (
        f"A combined log of {CLIENTS:,} clients, {_PER_SECOND} requests a second, the default policy. {shares}. Times "
        "are processor time in the best round; parsing and replaying take turns. Noise: the median round was up to "
        f"{noise:.0%} slower than the best."
    )


def bars(results: Results) -> list[Bar]:
    ordinary = next(iter(results.logs.values()), [])
    what = f"a replay has at least {LEAST} of the speed of a loop that only parses"
    return [
        Bar(f"{what} ({one.how})", f"{one.share:.2f}" if ordinary else NONE, one.share >= LEAST) for one in ordinary
    ]


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
