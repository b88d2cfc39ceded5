"""What was measured, as Markdown, and which of the bars hold."""

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final

import headgate.limits.decision
from benchmarks.contenders import FLOOR, GATE, HEADGATE, LIMITS_FIXED, THROTTLED
from benchmarks.measure import THREADS, Threads, Timing

ALLOW: Final = "allow"
ALLOW_NEW: Final = "allow, new strings"
DENY: Final = "deny"
TWO: Final = "two limits"

PACKAGES: Final = ("limits", "throttled-py", "pyrate-limiter", "token-bucket", "mypy", "setuptools")
NONE: Final = "-"
"""What stands in a table where nothing was measured."""

_A_MILLION: Final = 1_000_000
_MOST_KEYS: Final = 5_000_000


@dataclass(frozen=True)
class Single:
    """Nanoseconds of single checks, while something happens that could hold one up."""

    what: str
    median: int
    high: int
    """What one in ten thousand exceeds."""
    worst: int
    worst_seen: int
    """With the pauses that the machine brought in."""
    kept: int
    """Keys that are kept in the end."""


@dataclass
class Results:
    """Everything that a run measures. What it left out stays empty."""

    machine: dict[str, str]
    checks: dict[str, dict[str, Timing]] = field(default_factory=dict)
    threads: dict[str, Threads] = field(default_factory=dict)
    sizes: dict[str, dict[int, Timing]] = field(default_factory=dict)
    memory_keys: int = 0
    bytes_per_key: dict[str, float] = field(default_factory=dict)
    repetitions: int = 0
    """Of the single checks."""
    singles: list[Single] = field(default_factory=list)


@dataclass(frozen=True)
class Bar:
    """A figure that headgate should reach."""

    what: str
    figure: str
    holds: bool | None
    """None where a run didn't measure it."""

    def __str__(self) -> str:
        verdict = "not measured" if self.holds is None else "holds" if self.holds else "missed"
        return f"{verdict}: {self.what}" + (f": {self.figure}" if self.figure else "")


def machine(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Where and with what the figures were taken."""
    origin = headgate.limits.decision.__file__
    return {
        "CPU": f"{_cpu()}, {os.cpu_count()} cores",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
        "headgate": f"{version('headgate')}, {'plain Python' if origin.endswith('.py') else 'compiled'}",
        **{package: version(package) for package in packages},
    }


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_line(machine: Mapping[str, str]) -> str:
    return "; ".join([f"{what} {value}" for what, value in machine.items()]) + "."


def bar_list(found: Iterable[Bar]) -> str:
    return "\n".join([f"- {bar}" for bar in found])


def markdown(results: Results) -> str:
    parts = [
        machine_line(results.machine),
        _side_by_side(results),
        _by_size(results),
        _single_checks(results),
        bar_list(bars(results)),
        _noise(results),
    ]
    return "\n\n".join([part for part in parts if part]) + "\n"


def _side_by_side(results: Results) -> str:
    head = ["1,000 keys, ns per check", *results.checks, f"{THREADS} threads to one", "bytes per key"]
    rows = []
    for label in results.checks[ALLOW]:
        row = [label, *[_against(times, label) for times in results.checks.values()]]
        threads = results.threads.get(label)
        row.append(NONE if threads is None else f"{threads.one / threads.several:.2f} x")
        row.append(number(results.bytes_per_key.get(label)))
        rows.append(row)
    note = (
        "In parentheses: the ratio to headgate's time; for headgate, the ratio to the floor's. New strings: each key "
        "is a new string without a cached hash, as a request brings it; the other columns reuse the same 1,000 "
        f"strings. Two limits: a dash marks libraries that check one limit at a time. {THREADS} threads: their "
        "combined throughput as a share of one thread's (pyrate-limiter denies requests while another thread holds its "
        f"lock). Bytes per key: growth of a new process's resident memory up to {results.memory_keys:,} keys, "
        "including the key strings."
    )
    return f"{table(head, rows)}\n\n{note}"


def _against(times: Mapping[str, Timing], label: str) -> str:
    if label not in times:
        return NONE
    base = FLOOR if label == HEADGATE else HEADGATE
    if base not in times:
        return number(times[label].best)
    ratio = times[label].best / times[base].best
    return f"{number(times[label].best)} ({ratio:.1f} x{' floor' if label == HEADGATE else ''})"


def _by_size(results: Results) -> str:
    counts = sorted({count for times in results.sizes.values() for count in times})
    rows = []
    for count in counts:
        cells = [number(times[count].best) if count in times else NONE for times in results.sizes.values()]
        rows.append([f"{count:,}", *cells])
    return table(["keys, ns per check in random order", *results.sizes], rows)


def _single_checks(results: Results) -> str:
    head = ["single checks, µs", "median", "99.99 %", "worst", "worst with pauses", "keys kept in the end"]
    rows = []
    for single in results.singles:
        cells = [_microseconds(one) for one in (single.median, single.high, single.worst, single.worst_seen)]
        rows.append([single.what, *cells, f"{single.kept:,}"])
    note = (
        "The store has a manual clock that advances 10 µs per check; each figure includes one timer read. The checks "
        f"run {results.repetitions} times, and the best time of each counts. The worst with pauses is the worst time "
        "of any run, including interruptions by the machine. The garbage collector is on; older objects are frozen."
    )
    return f"{table(head, rows)}\n\n{note}"


def _noise(results: Results) -> str:
    timings = [times[HEADGATE] for times in results.checks.values()]
    share = max([timing.median / timing.best - 1 for timing in timings])
    return (
        "Times per check are processor time in the best round. Contenders take turns within a round, and every figure "
        "includes the loop around the calls. Threads and single checks are wall-clock times. Noise: headgate's median "
        f"round was up to {share:.0%} slower than its best."
    )


def bars(results: Results) -> list[Bar]:
    allow = results.checks[ALLOW]
    own = allow[HEADGATE].best
    found = [
        at_least(f"Limiter.check at least 20 times as fast as {peer}", allow[peer].best / own, 20, aim=25)
        for peer in (LIMITS_FIXED, THROTTLED)
    ]
    floors = own / allow[FLOOR].best if FLOOR in allow else None
    found.append(at_most("Limiter.check at most 3 times the floor", floors, 3))
    found.append(at_most("Gate.check at most 2.5 times Limiter.check", allow[GATE].best / own, 2.5))
    ratio = allow[LIMITS_FIXED].best / allow[GATE].best
    found.append(at_least(f"Gate.check at least 8 times as fast as {LIMITS_FIXED}", ratio, 8))
    threads = results.threads[HEADGATE]
    found.append(
        at_most(f"{THREADS} threads together at most 1.5 times as slow as one", threads.several / threads.one, 1.5)
    )
    taken = results.bytes_per_key[HEADGATE] if results.memory_keys == _A_MILLION else None
    found.append(at_most("at most 180 bytes per key at a million keys", taken, 180))
    what = "a check at 5 million keys at most 5 times one at a thousand"
    for label, times in results.sizes.items():
        if label.startswith(HEADGATE):
            growth = times[_MOST_KEYS].best / times[1000].best if _MOST_KEYS in times else None
            found.append(at_most(f"{what} ({label})", growth, 5))
    return found


def at_least(what: str, figure: float | None, least: float, aim: float | None = None) -> Bar:
    if figure is None:
        return Bar(what, "", None)
    return Bar(what, f"{figure:.1f}" + (f" (aim: {aim})" if aim else ""), figure >= least)


def at_most(what: str, figure: float | None, most: float) -> Bar:
    if figure is None:
        return Bar(what, "", None)
    return Bar(what, f"{figure:.0f}" if figure >= 100 else f"{figure:.2f}", figure <= most)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines])


def number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def time_of(timing: Timing | None) -> str:
    """The best round, in microseconds."""
    return NONE if timing is None else f"{timing.best / 1000:.2f}"


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1000:,.2f}" if nanoseconds < 10_000 else f"{nanoseconds / 1000:,.0f}"
