"""What was measured of the rate limiters that count in a server, as Markdown, and which of the bars hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from benchmarks.contenders import HEADGATE
from benchmarks.measure import Timing
from benchmarks.redis_contenders import DRAW_AHEAD, GET
from benchmarks.report import NONE, Bar, at_least, at_most, bar_list, machine_line, number, table

PACKAGES: Final = ("limits", "throttled-py", "redis", "hiredis")

ONE_CORE: Final = "on the server's core"
TWO_CORES: Final = "on another core"


@dataclass(frozen=True)
class Shared:
    """What several processes did together."""

    checks: int
    seconds: float
    """From the start of the first to the end of the last."""
    passed: int
    most_of_a_key: int
    """What passed of the key of which the most did."""
    allowed_of_a_key: float
    """Capacity + rate x time."""
    script_calls: int

    @property
    def rate(self) -> float:
        return self.checks / self.seconds


@dataclass(frozen=True)
class Kept:
    """Bytes that a server needs for a key."""

    growth: float
    """Of all its memory, for each of many keys."""
    usage: int
    """What MEMORY USAGE says of one; for keys alike it differs a little, by what the allocator had at hand."""
    name: int
    """How long the key's name is."""


@dataclass
class Results:
    """Everything that a run measures."""

    machine: dict[str, str]
    tasks: dict[int, dict[str, Timing | str]] = field(default_factory=dict)
    """For each number of tasks and each contender its time, or its error."""
    own_pools: dict[int, dict[str, str]] = field(default_factory=dict)
    """The errors of those that fail with the connections that they allow themselves."""
    one_limit: dict[str, dict[str, Timing]] = field(default_factory=dict)
    """By one thread, for each place where it runs."""
    two_limits: dict[str, dict[str, Timing]] = field(default_factory=dict)
    processes: dict[str, list[Shared]] = field(default_factory=dict)
    """Of each contender, all rounds."""
    crowded: Shared | None = None
    """headgate, where more is asked for than passes."""
    keys: int = 0
    memory: dict[str, Kept] = field(default_factory=dict)
    hits: int = 0
    bytes_per_hit: dict[str, float] = field(default_factory=dict)


def markdown(results: Results) -> str:
    parts = [
        machine_line(results.machine),
        _tasks(results),
        _thread(results),
        _processes(results),
        _memory(results),
        bar_list(bars(results)),
        _noise(results),
    ]
    return "\n\n".join(parts) + "\n"


def _tasks(results: Results) -> str:
    labels = list(next(iter(results.tasks.values())))
    rows = []
    for tasks, found in results.tasks.items():
        ratio = _against_best_peer(found)
        cells = [_rate(found[label]) for label in labels]
        rows.append([f"{tasks:,}", *cells, NONE if ratio is None else f"{ratio:.1f} x"])
    fail: dict[str, str] = {}
    for errors in results.own_pools.values():
        fail = errors | fail  # the first of each
    note = (
        "One process, one event loop. The peers get a pool with one connection per task; headgate needs a handful of "
        "connections."
    )
    if fail:
        note += f" With their default pools, these fail: {_listed(fail)}."
    return f"{table(['tasks, checks per second', *labels, 'headgate to the best peer'], rows)}\n\n{note}"


def _listed(errors: Mapping[str, str]) -> str:
    return " and ".join([f"{label} ({error.rstrip('.')})" for label, error in errors.items()])


def _rate(found: Timing | str) -> str:
    return f"fails: {found}" if isinstance(found, str) else number(1e9 / found.best)


def _against_best_peer(found: Mapping[str, Timing | str]) -> float | None:
    """How many times as fast as the best peer headgate is, if any works."""
    times = {label: timing.best for label, timing in found.items() if isinstance(timing, Timing)}
    own = times.pop(HEADGATE, None)
    return min(times.values()) / own if own and times else None


def _thread(results: Results) -> str:
    tables = []
    for place, times in results.one_limit.items():
        rows = []
        for label, one in times.items():
            two = results.two_limits[place].get(label)
            row = [label, f"{one.best / 1000:.1f}", f"{one.best / times[GET].best:.2f} x"]
            row += [NONE, NONE] if two is None else [f"{two.best / 1000:.1f}", f"{two.best / one.best:.2f} x"]
            rows.append(row)
        tables.append(
            table([f"one thread {place}, µs per check", "one limit", "to a GET", "two limits", "two to one"], rows)
        )
    note = (
        "Two limits: headgate checks both in one call; the documentation of limits says to hit one after the other. On "
        "another core, client and server wake each other up. That takes the same time for all, and brings the ratios "
        "closer to 1."
    )
    return "\n\n".join([*tables, note])


def _processes(results: Results) -> str:
    rates = _best_rates(results)
    own = f"{HEADGATE}, draw_ahead={DRAW_AHEAD}"
    rows = []
    for label, rounds in results.processes.items():
        best = max(rounds, key=lambda shared: shared.rate)
        what = own if label == HEADGATE else label
        rows.append(_shared(what, best, f"{rates[HEADGATE] / rates[label]:.1f} x"))
    if results.crowded is not None:
        rows.append(_shared(f"{own}, crowded", results.crowded, NONE))
    head = ["4 processes", "checks per second", "headgate to it", "checks", "passed", "script calls", "most of a key"]
    note = (
        "Each process loops over the same 100 keys with a limit of 10,000 per second each. Crowded: 5 keys of 1,000 "
        "per second each, so that demand exceeds the limit. Most of a key: the requests that passed on the busiest "
        "key, of the capacity + rate x time that its limit allows."
    )
    return f"{table(head, rows)}\n\n{note}"


def _shared(what: str, shared: Shared, ratio: str) -> list[str]:
    counts = [f"{count:,}" for count in (shared.checks, shared.passed, shared.script_calls)]
    most = f"{shared.most_of_a_key:,} of {shared.allowed_of_a_key:,.0f}"
    return [what, number(shared.rate), ratio, *counts, most]


def _best_rates(results: Results) -> dict[str, float]:
    return {label: max([shared.rate for shared in rounds]) for label, rounds in results.processes.items()}


def _filled(shared: Shared) -> float:
    return shared.most_of_a_key / shared.allowed_of_a_key


def _memory(results: Results) -> str:
    rows = [
        [label, number(kept.growth), number(kept.usage), f"{kept.name}", number(results.bytes_per_hit.get(label))]
        for label, kept in results.memory.items()
    ]
    head = [
        "bytes in the server",
        f"per key, at {results.keys:,} keys with one hit",
        "MEMORY USAGE of one",
        "of which its name",
        f"per hit, at {results.hits:,} hits of one key",
    ]
    return table(head, rows)


def bars(results: Results) -> list[Bar]:
    found = []
    for tasks, least, aim in ((50, 3, 4), (500, 5, None)):
        what = f"{tasks} tasks: at least {least} times as many checks as the best peer"
        found.append(at_least(what, _against_best_peer(results.tasks[tasks]), least, aim))
    most = results.tasks[2_000][HEADGATE]
    found.append(Bar("2,000 tasks work", f"{_rate(most)} checks per second", isinstance(most, Timing)))
    for place, times in results.one_limit.items():
        one, two = times[HEADGATE].best, results.two_limits[place][HEADGATE].best
        found.append(at_most(f"one thread, {place}: a check at most 1.6 times a GET", one / times[GET].best, 1.6))
        found.append(at_most(f"one thread, {place}: two limits at most 1.3 times one", two / one, 1.3))
    rates = _best_rates(results)
    own = rates.pop(HEADGATE)
    what = "4 processes with tokens drawn ahead: at least 20 times as many checks as the best peer"
    found.append(at_least(what, own / max(rates.values()), 20))
    crowded = [results.crowded] if results.crowded else []
    filled = max(map(_filled, [*results.processes[HEADGATE], *crowded]))
    found.append(
        Bar(
            "4 processes with tokens drawn ahead: no key passes more than capacity + rate x time",
            f"{filled:.1%} of that",
            filled <= 1,
        )
    )
    return found


def _noise(results: Results) -> str:
    timings = [found[HEADGATE] for found in results.tasks.values()]
    timings += [found[HEADGATE] for found in results.one_limit.values()]
    share = max([timing.median / timing.best - 1 for timing in timings if isinstance(timing, Timing)])
    return (
        "All contenders use one server, which shares the machine's cores with them, and 100 keys. Nothing is denied, "
        "except in the table of processes, which shows the requests that passed. Times are wall-clock times of the "
        "best round; contenders take turns within a round. Noise: headgate's median round was up to "
        f"{share:.0%} slower than its best."
    )
