"""What was measured of a hub, as Markdown, and which of the bars hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from benchmarks.report import Bar, bar_list, machine_line, number, table

PACKAGES: Final = ("uvicorn", "uvloop", "httptools", "websockets", "msgspec", "protobuf")

PING: Final = "/ws: ping"
MESSAGE: Final = "/ws: message to another agent"
CHANNEL: Final = "HTTP: GET /api/channels/general"
MAILBOX: Final = "HTTP: GET /api/mailbox"
RELAY: Final = "/relay: DATA to another agent"

LEAST: Final = 0.85
"""What share of the messages per second must be left with the gate."""
WATCHED: Final = 0.9
"""What share must be left while dashboards are open."""


@dataclass(frozen=True)
class Round:
    """What one hub did in one round."""

    messages: int
    seconds: float
    processor: float
    """Seconds that the hub had of the processor."""
    p50: float
    """Seconds until an answer."""
    p99: float

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def cost(self) -> float:
        """Seconds of the processor for each message."""
        return self.processor / self.messages


@dataclass
class Pair:
    """The rounds of two hubs which took turns: of the one with its gate, or with dashboards, and of the one without."""

    gated: list[Round] = field(default_factory=list)
    ungated: list[Round] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The messages per second with the gate, as a share of those without."""
        return median([one.rate / other.rate for one, other in self._turns()])

    @property
    def cost(self) -> float:
        """The same by the processor's time."""
        return median([other.cost / one.cost for one, other in self._turns()])

    def _turns(self) -> Iterable[tuple[Round, Round]]:
        return zip(self.gated, self.ungated, strict=True)


@dataclass
class Results:
    """Everything that a run measures."""

    machine: dict[str, str]
    connections: int
    window: int
    """Frames that each WebSocket had under way."""
    pairs: dict[str, Pair] = field(default_factory=dict)
    dashboards: int = 0
    watched: Pair = field(default_factory=Pair)
    idle: int = 0
    bytes_per_connection: float = 0.0


def markdown(results: Results) -> str:
    parts = [
        machine_line(results.machine),
        _side_by_side(results),
        _watched(results),
        _idle(results),
        bar_list(bars(results)),
        _noise(results),
    ]
    return "\n\n".join(parts) + "\n"


def _side_by_side(results: Results) -> str:
    head = [
        f"{results.connections} connections",
        "per second",
        "without the gate",
        "share",
        "processor, µs each",
        "without the gate",
        "share",
        "p50 / p99, ms",
        "without the gate",
    ]
    rows = []
    for what, pair in results.pairs.items():
        both = (pair.gated, pair.ungated)
        rates = [number(median([one.rate for one in rounds])) for rounds in both]
        costs = [f"{median([one.cost for one in rounds]) * 1e6:.1f}" for rounds in both]
        rows.append([what, *rates, f"{pair.rate:.2f}", *costs, f"{pair.cost:.2f}", *map(_waits, both)])
    note = (
        "One hub runs normally, with limits that are never reached. The other skips its gate, as if every check had "
        f"passed, and its relay has no limiter. Each WebSocket has {results.window} frames in flight, each HTTP "
        "connection one request. Processor: CPU time of the hub's process per message. Share: the hub with its gate "
        "relative to the hub without, in messages per second and per second of CPU time."
    )
    return f"{table(head, rows)}\n\n{note}"


def _waits(rounds: Sequence[Round]) -> str:
    waits = (median([one.p50 for one in rounds]), median([one.p99 for one in rounds]))
    return " / ".join([f"{wait * 1000:.1f}" for wait in waits])


def _watched(results: Results) -> str:
    rates = [
        number(median([one.rate for one in rounds])) for rounds in (results.watched.gated, results.watched.ungated)
    ]
    return (
        f"With {results.dashboards} dashboards open, each showing all agents: {rates[0]} pings per second, compared "
        f"with {rates[1]} without dashboards. Another process reads the dashboards."
    )


def _idle(results: Results) -> str:
    taken = number(results.bytes_per_connection)
    return f"{results.idle:,} idle, identified connections to /ws: {taken} bytes of the hub's resident memory each."


def bars(results: Results) -> list[Bar]:
    found = []
    for what, pair in results.pairs.items():
        figure = f"{pair.rate:.3f} ({pair.cost:.3f} by processor time)"
        found.append(Bar(f"{what}: at least {LEAST} of the rate without the gate", figure, pair.rate >= LEAST))
    share = f"{results.watched.rate:.3f} ({results.watched.cost:.3f} by processor time)"
    about = f"{results.dashboards} dashboards: at least {WATCHED} of the rate without any"
    return [*found, Bar(about, share, results.watched.rate >= WATCHED)]


def _noise(results: Results) -> str:
    rates = [[one.rate for one in pair.gated] for pair in results.pairs.values()]
    noise = max([max(some) / median(some) for some in rates]) - 1
    busy = min([median([one.processor / one.seconds for one in pair.gated]) for pair in results.pairs.values()])
    return (
        "The hubs and the load generator are separate processes. The hubs take turns within many short rounds; every "
        f"figure is a median over the rounds. Noise: the median round of the hub with the gate was up to {noise:.0%} "
        f"slower than its best, and under load the hub had a processor for at least {busy:.0%} of the time."
    )
