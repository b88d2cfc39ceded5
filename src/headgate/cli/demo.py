"""`headgate demo`: agents of different tempers draw from the buckets of a real limiter, on the real clock.

Only the traffic is made up. Every number that is shown comes from a decision or was measured.
"""

import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, TextIO

from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Outcome
from headgate.limits.token_bucket import limited, per_second

RATE: Final = 5
BURST: Final = 20
MEASURED_CHECKS: Final = 200_000
MEASURED_KEYS: Final = 1_000

_WIDTH: Final = 60  # the columns that a row takes besides its bar
_GREEN: Final = "\x1b[32m"
_YELLOW: Final = "\x1b[33m"
_RED: Final = "\x1b[31m"


@dataclass(frozen=True)
class Temper:
    """How an agent behaves: what a request costs, and the pause after so many requests and the last answer."""

    name: str
    cost: int
    pause: Callable[[random.Random, int, Decision], float]


TEMPERS: Final = (
    Temper("calm", 1, lambda rng, _count, _last: rng.uniform(0.6, 1.2)),
    Temper("steady", 1, lambda rng, _count, _last: rng.uniform(0.15, 0.25)),
    Temper("bursty", 1, lambda rng, count, _last: 0.02 if count % 18 else rng.uniform(2.5, 3.5)),
    Temper("runaway", 1, lambda _rng, _count, _last: 0.01),
    Temper("costly", 6, lambda rng, _count, _last: rng.uniform(0.9, 1.3)),
    Temper("obedient", 1, lambda rng, _count, last: (last.retry_after or 0.0) + rng.uniform(0.02, 0.06)),
)


@dataclass
class Agent:
    """One agent, and what came of its checks."""

    name: str
    temper: Temper
    counts: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    first: float | None = None
    last: float = 0.0

    @property
    def checks(self) -> int:
        return sum(self.counts.values())


def run(seconds: float, agents: int, seed: int | None, out: TextIO) -> None:
    """Show `agents` agents for so many seconds, or until Ctrl-C, and sum up."""
    limiter = Limiter(limited(RATE, BURST))
    tempers = [TEMPERS[i % len(TEMPERS)] for i in range(agents)]
    crowd = [Agent(f"{temper.name}-{i}", temper) for i, temper in enumerate(tempers, 1)]
    who = "One agent has a bucket" if agents == 1 else f"Each of {agents} agents has a bucket of its own"
    out.write(f"{who}: {limiter.limit}. Ctrl-C ends the demonstration.\n")
    out.flush()
    begin = time.monotonic()
    picture = _picture(out, limiter, crowd, begin, seconds)
    try:
        with suppress(KeyboardInterrupt):
            _play(limiter, crowd, begin + seconds, random.Random(seed), picture)  # noqa: S311
        picture.draw()
    finally:
        picture.close()
    _sum_up(crowd, time.monotonic() - begin, out)
    _measure(out)


def _play(limiter: Limiter, crowd: list[Agent], end: float, rng: random.Random, picture: "_Lines") -> None:
    """Let each agent check when it is due, and draw every so often, until the end."""
    now = time.monotonic()
    redraw = now + picture.every
    due = [(now + rng.uniform(0.0, 0.3), i) for i in range(len(crowd))]
    heapify(due)
    while now < end:
        while due[0][0] <= now:
            when, i = heappop(due)
            agent = crowd[i]
            agent.first = agent.first or time.monotonic()
            decision = limiter.check(agent.name, agent.temper.cost)
            agent.last = time.monotonic()
            agent.counts[decision.outcome] += 1
            when = max(when, now - 0.1)  # a program that was stopped for a while has not all of that to catch up on
            heappush(due, (when + agent.temper.pause(rng, agent.checks, decision), i))
        if now >= redraw:
            picture.draw()
            redraw = now + picture.every
        time.sleep(max(min(due[0][0], redraw, end) - time.monotonic(), 0.0))
        now = time.monotonic()


class _Lines:
    """The demonstration as a line a second: for a file, a pipe, or a terminal that is too small."""

    every = 1.0

    def __init__(self, out: TextIO, limiter: Limiter, crowd: list[Agent], begin: float, seconds: float) -> None:
        self.out, self.limiter, self.crowd, self.begin, self.seconds = out, limiter, crowd, begin, seconds

    @property
    def elapsed(self) -> float:
        return min(time.monotonic() - self.begin, self.seconds)

    def draw(self) -> None:
        self.out.write(f"{self.elapsed:5.1f} of {self.seconds:g} s: {_totals(self.crowd)}\n")
        self.out.flush()

    def close(self) -> None:
        """Leave the terminal as it was found."""


class _Bars(_Lines):
    """The demonstration as a picture that is drawn over and over: a row for each agent, and one for the time."""

    every = 0.1
    colours = not os.environ.get("NO_COLOR")
    drawn = False

    def draw(self) -> None:
        width = min(max(shutil.get_terminal_size().columns - _WIDTH, 10), 40)
        rows = [f"{'agent':<13}{'bucket used':<{width + 7}}{'allowed':>9}{'warned':>9}{'denied':>9}{'retry in':>12}"]
        for agent in self.crowd:
            now = self.limiter.peek(agent.name, agent.temper.cost)
            used = 1 - now.remaining / now.limit.capacity
            counts = "".join([f"{agent.counts[outcome]:>9}" for outcome in (Outcome.ALLOW, Outcome.WARN, Outcome.DENY)])
            retry = f"{now.retry_after:.2f} s" if now.retry_after else "-"
            colour = _GREEN if used < 0.5 else _YELLOW if used <= 0.8 else _RED
            rows.append(f"{agent.name:<13}{self._bar(used, width, colour)}{used:>6.0%} {counts}{retry:>12}")
        share = self.elapsed / self.seconds
        rows += ["", f"{'time':<13}{self._bar(share, width)}{share:>6.0%}  {self.elapsed:.1f} of {self.seconds:g} s"]
        up = f"\x1b[{len(rows)}F" if self.drawn else "\x1b[?25l"  # over the last picture; before the first: no cursor
        self.out.write(up + "".join([f"{row}\x1b[K\n" for row in rows]))
        self.out.flush()
        self.drawn = True

    def _bar(self, share: float, width: int, colour: str = "") -> str:
        filled = round(share * width)
        on, off = "█" * filled, "░" * (width - filled)
        return f"{colour}{on}\x1b[0m{off}" if colour and self.colours else on + off

    def close(self) -> None:
        self.out.write("\x1b[?25h\x1b[K\n")  # over the ^C that a terminal shows
        self.out.flush()


def _picture(out: TextIO, limiter: Limiter, crowd: list[Agent], begin: float, seconds: float) -> _Lines:
    kind = _Lines
    if out.isatty() and os.environ.get("TERM", "dumb") != "dumb" and (out.encoding or "").lower().startswith("utf"):
        size = shutil.get_terminal_size()
        if size.columns >= _WIDTH + 10 and size.lines >= len(crowd) + 5:
            kind = _Bars
    return kind(out, limiter, crowd, begin, seconds)


def _totals(crowd: list[Agent]) -> str:
    sums = {outcome: sum([agent.counts[outcome] for agent in crowd]) for outcome in Outcome}
    return f"{sums[Outcome.ALLOW]} allowed, {sums[Outcome.WARN]} warned, {sums[Outcome.DENY]} denied"


def _sum_up(crowd: list[Agent], elapsed: float, out: TextIO) -> None:
    checks = sum([agent.checks for agent in crowd])
    out.write(f"{checks} checks in {elapsed:.1f} s: {_totals(crowd)}. A warning passes: little is left after it.\n")
    worst = max(crowd, key=lambda agent: agent.counts[Outcome.DENY])
    denied = worst.counts[Outcome.DENY]
    if denied and worst.first is not None:
        given = (worst.checks - denied) * worst.temper.cost
        span = worst.last - worst.first
        asked = worst.checks * worst.temper.cost
        out.write(f"{worst.name} asked for {asked} tokens within {span:.3f} s and got {given}; ")
        out.write(f"its limit gives at most {int(BURST + RATE * span)} in that time.\n")


def _measure(out: TextIO) -> None:
    """Time checks that follow each other without a pause."""
    check = Limiter(per_second(MEASURED_CHECKS)).check
    keys = [f"agent-{i}" for i in range(MEASURED_KEYS)] * (MEASURED_CHECKS // MEASURED_KEYS)
    start = time.perf_counter()
    for key in keys:
        check(key)
    spent = time.perf_counter() - start
    out.write(f"{MEASURED_CHECKS:,} checks without a pause, of {MEASURED_KEYS:,} keys in turn: ")
    out.write(f"{MEASURED_CHECKS / spent:,.0f} a second, {spent / MEASURED_CHECKS * 1e9:.0f} ns each.\n")
    out.flush()
