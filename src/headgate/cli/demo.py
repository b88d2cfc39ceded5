"""`headgate demo`: simulated agents at a real limiter.

Only the traffic is simulated. Every number shown comes from a decision or a measurement.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, TextIO

from headgate.cli.parser import Commands, add_command, duration, whole_number
from headgate.cli.terminal import coloured, is_interactive, usage_colour, version_text
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Outcome
from headgate.limits.token_bucket import limited, per_second

RATE: Final = 5
BURST: Final = 20
MEASURED_CHECKS: Final = 200_000
MEASURED_KEYS: Final = 1_000

_WIDTH: Final = 60  # columns of a row without its bar


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "demo",
        _run,
        "watch simulated agents use a real limiter",
        "Watch simulated agents, well-behaved and not, draw from the buckets of a real limiter.",
        "headgate demo --seconds 30 --agents 12",
    )
    parser.add_argument("--seconds", type=duration, default=10.0, metavar="S", help="duration (default: 10)")
    agents = whole_number(1, 100)
    parser.add_argument("--agents", type=agents, default=6, metavar="N", help="number of agents (default: 6)")
    parser.add_argument("--seed", type=whole_number(), metavar="N", help="make the traffic repeatable")


@dataclass(frozen=True)
class Behaviour:
    """How an agent behaves: the cost of its requests, and the pause after the n-th request and its decision."""

    name: str
    cost: int
    pause: Callable[[random.Random, int, Decision], float]


BEHAVIOURS: Final = (
    Behaviour("calm", 1, lambda rng, _count, _last: rng.uniform(0.6, 1.2)),
    Behaviour("steady", 1, lambda rng, _count, _last: rng.uniform(0.15, 0.25)),
    Behaviour("bursty", 1, lambda rng, count, _last: 0.02 if count % 18 else rng.uniform(2.5, 3.5)),
    Behaviour("runaway", 1, lambda _rng, _count, _last: 0.01),
    Behaviour("costly", 6, lambda rng, _count, _last: rng.uniform(0.9, 1.3)),
    Behaviour("obedient", 1, lambda rng, _count, last: (last.retry_after or 0.0) + rng.uniform(0.02, 0.06)),
)


@dataclass
class SimulatedAgent:
    """An agent, and the outcomes of its checks."""

    name: str
    behaviour: Behaviour
    counts: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    first: float | None = None
    last: float = 0.0

    @property
    def checks(self) -> int:
        return sum(self.counts.values())


def _run(options: argparse.Namespace) -> int:
    out, seconds, number = sys.stdout, options.seconds, options.agents
    limiter = Limiter(limited(RATE, BURST))
    behaviours = [BEHAVIOURS[i % len(BEHAVIOURS)] for i in range(number)]
    agents = [SimulatedAgent(f"{behaviour.name}-{i}", behaviour) for i, behaviour in enumerate(behaviours, 1)]
    who = "One agent has a bucket" if number == 1 else f"Each of {number} agents has its own bucket"
    out.write(f"{version_text()}\n{who}: {limiter.limit}. Press Ctrl-C to stop.\n")
    out.flush()
    begin = time.monotonic()
    display = _display(out, limiter, agents, begin, seconds)
    try:
        with suppress(KeyboardInterrupt):
            _simulate(limiter, agents, begin + seconds, random.Random(options.seed), display)  # noqa: S311
        display.draw()
    finally:
        display.close()
    _print_totals(agents, time.monotonic() - begin, out)
    _measure(out)
    return 0


def _simulate(
    limiter: Limiter, agents: list[SimulatedAgent], end: float, rng: random.Random, display: "_LineDisplay"
) -> None:
    """Run each agent's checks when they are due, and redraw now and then, until the end."""
    now = time.monotonic()
    redraw = now + display.interval
    due = [(now + rng.uniform(0.0, 0.3), i) for i in range(len(agents))]
    heapify(due)
    while now < end:
        while due[0][0] <= now:
            when, i = heappop(due)
            agent = agents[i]
            agent.first = agent.first or time.monotonic()
            decision = limiter.check(agent.name, agent.behaviour.cost)
            agent.last = time.monotonic()
            agent.counts[decision.outcome] += 1
            when = max(when, now - 0.1)  # nothing to catch up on after a suspension
            heappush(due, (when + agent.behaviour.pause(rng, agent.checks, decision), i))
        if now >= redraw:
            display.draw()
            redraw = now + display.interval
        time.sleep(max(min(due[0][0], redraw, end) - time.monotonic(), 0.0))
        now = time.monotonic()


@dataclass
class _LineDisplay:
    """A line per second: for a file, a pipe, or a terminal that is too small."""

    interval = 1.0

    out: TextIO
    limiter: Limiter
    agents: list[SimulatedAgent]
    begin: float
    seconds: float

    @property
    def elapsed(self) -> float:
        return min(time.monotonic() - self.begin, self.seconds)

    def draw(self) -> None:
        self.out.write(f"{self.elapsed:5.1f} of {self.seconds:g} s: {_totals(self.agents)}\n")
        self.out.flush()

    def close(self) -> None:
        """Restore the terminal."""


class _BarDisplay(_LineDisplay):
    """A picture that is redrawn in place: a row for each agent, and one for the time."""

    interval = 0.1
    drawn = False

    def draw(self) -> None:
        width = min(max(shutil.get_terminal_size().columns - _WIDTH, 10), 40)
        rows = [f"{'agent':<13}{'bucket used':<{width + 7}}{'allowed':>9}{'warned':>9}{'denied':>9}{'retry in':>12}"]
        for agent in self.agents:
            now = self.limiter.peek(agent.name, agent.behaviour.cost)
            used = 1 - now.remaining / now.limit.capacity
            counts = "".join([f"{agent.counts[outcome]:>9}" for outcome in (Outcome.ALLOW, Outcome.WARN, Outcome.DENY)])
            retry = f"{now.retry_after:.2f} s" if now.retry_after else "-"
            rows.append(f"{agent.name:<13}{self._bar(used, width, usage_colour(used))}{used:>6.0%} {counts}{retry:>12}")
        share = self.elapsed / self.seconds
        rows += ["", f"{'time':<13}{self._bar(share, width)}{share:>6.0%}  {self.elapsed:.1f} of {self.seconds:g} s"]
        up = f"\x1b[{len(rows)}F" if self.drawn else "\x1b[?25l"  # over the last picture; at first, hide the cursor
        self.out.write(up + "".join([f"{row}\x1b[K\n" for row in rows]))
        self.out.flush()
        self.drawn = True

    def _bar(self, share: float, width: int, colour: str = "") -> str:
        filled = round(share * width)
        on, off = "█" * filled, "░" * (width - filled)
        return coloured(on, colour, self.out) + off

    def close(self) -> None:
        self.out.write("\x1b[?25h\x1b[K\n")  # over the ^C on the terminal
        self.out.flush()


def _display(out: TextIO, limiter: Limiter, agents: list[SimulatedAgent], begin: float, seconds: float) -> _LineDisplay:
    kind = _LineDisplay
    if is_interactive(out) and (out.encoding or "").lower().startswith("utf"):
        size = shutil.get_terminal_size()
        if size.columns >= _WIDTH + 10 and size.lines >= len(agents) + 5:
            kind = _BarDisplay
    return kind(out, limiter, agents, begin, seconds)


def _totals(agents: list[SimulatedAgent]) -> str:
    sums = {outcome: sum([agent.counts[outcome] for agent in agents]) for outcome in Outcome}
    return f"{sums[Outcome.ALLOW]} allowed, {sums[Outcome.WARN]} warned, {sums[Outcome.DENY]} denied"


def _print_totals(agents: list[SimulatedAgent], elapsed: float, out: TextIO) -> None:
    checks = sum([agent.checks for agent in agents])
    out.write(f"{checks} checks in {elapsed:.1f} s: {_totals(agents)}. Warned requests pass, but little is left.\n")
    worst = max(agents, key=lambda agent: agent.counts[Outcome.DENY])
    denied = worst.counts[Outcome.DENY]
    if denied and worst.first is not None:
        granted = (worst.checks - denied) * worst.behaviour.cost
        span = worst.last - worst.first
        asked = worst.checks * worst.behaviour.cost
        out.write(f"{worst.name} asked for {asked} tokens within {span:.3f} s and got {granted}; ")
        out.write(f"its limit grants at most {int(BURST + RATE * span)} in that time.\n")


def _measure(out: TextIO) -> None:
    """Measure checks without pauses."""
    check = Limiter(per_second(MEASURED_CHECKS)).check
    keys = [f"agent-{i}" for i in range(MEASURED_KEYS)] * (MEASURED_CHECKS // MEASURED_KEYS)
    start = time.perf_counter()
    for key in keys:
        check(key)
    spent = time.perf_counter() - start
    out.write(f"{MEASURED_CHECKS:,} checks without pauses, {MEASURED_KEYS:,} keys in turn: ")
    out.write(f"{MEASURED_CHECKS / spent:,.0f}/s, {spent / MEASURED_CHECKS * 1e9:.0f} ns each.\n")
    out.flush()
