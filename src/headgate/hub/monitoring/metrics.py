"""What can be measured of a hub: one table, for Prometheus, for OpenTelemetry, and for the docs.

Nothing is counted here: each metric is read from what it is about, when somebody asks. No label has values that an
agent can choose, so the number of series depends on the policy alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

from headgate._version import VERSION
from headgate.gate.policy import TIERS
from headgate.hub.api.http import Answer
from headgate.hub.api.routing import Call, Route, Who
from headgate.hub.monitoring.stats import BOUNDS
from headgate.limits.decision import Outcome
from headgate.stores.base import ServerStore
from headgate.stores.memory import compiled, in_process
from headgate.stores.traffic import BATCH_SIZES, Traffic

if TYPE_CHECKING:
    from headgate.hub.app import Hub

MEDIA: Final = "text/plain; version=0.0.4; charset=utf-8"

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = tuple[str, ...]
"""The values of a metric's labels, in their order."""

_PROCESS: Final = ProcessCollector(registry=None)
_NO_TRAFFIC: Final = Traffic()  # of a store that is this process's memory


class Distribution(NamedTuple):
    """How values are distributed."""

    bounds: Sequence[float]
    counts: Sequence[int]
    """How many were at most as large as each of the bounds, and larger than the one before; last, how many others."""
    total: float
    """All values, added up."""


@dataclass(frozen=True)
class Metric:
    """Something that can be measured. A counter's name ends in `_total`; what is a time is in seconds, and says so."""

    name: str
    """As Prometheus has it."""
    kind: Kind
    about: str
    read: Callable[["Hub"], Mapping[Labels, float] | Distribution]
    """How it stands: a number for each of some labels, or, of a histogram, how it is distributed.

    To be called in the hub's loop.
    """
    labels: tuple[str, ...] = ()


def _number(name: str, kind: Kind, about: str, read: Callable[["Hub"], float]) -> Metric:
    return Metric(name, kind, about, lambda hub: {(): read(hub)})


# How each is read -----------------------------------------------------------------------------------------------------


def _checks(hub: "Hub") -> dict[Labels, float]:
    known = product(hub.gate.policy.channels, TIERS, [outcome.value for outcome in Outcome])
    counts: dict[Labels, float] = dict.fromkeys(known, 0)
    # Those of a channel that only an earlier policy had stay: a counter doesn't go away.
    return counts | {(channel, tier, outcome.value): n for (channel, tier, outcome), n in hub.tally.checks.items()}


def _address_checks(hub: "Hub") -> dict[Labels, float]:
    counts: dict[Labels, float] = dict.fromkeys(product(("request", "registration"), ("allow", "warn", "deny")), 0)
    return counts | hub.tally.addresses


def _decision_times(hub: "Hub") -> Distribution:
    tally = hub.tally
    return Distribution([bound / 1e9 for bound in BOUNDS], list(tally.times), tally.time / 1e9)


def _traffic(hub: "Hub") -> Traffic:
    return hub.store.traffic if isinstance(hub.store, ServerStore) else _NO_TRAFFIC


def _batches(hub: "Hub") -> Distribution:
    traffic = _traffic(hub)
    return Distribution(BATCH_SIZES, list(traffic.batches), traffic.requests)


def _live_buckets(hub: "Hub") -> dict[Labels, float]:
    memory = in_process(hub.store)
    return {} if memory is None else {(): len(memory)}


def _connections(hub: "Hub") -> dict[Labels, float]:
    relay = hub.relay.connections
    agents = len(hub.presence.sockets) - relay
    return {("ws",): agents, ("relay",): relay, ("dashboard",): len(hub.board.sockets)}


def _webhooks(hub: "Hub") -> dict[Labels, float]:
    sent = hub.webhooks
    return {("delivered",): sent.delivered, ("failed",): sent.failed, ("dropped",): sent.dropped}


METRICS: Final = (
    Metric(
        "headgate_checks_total", "counter", "Checks of agents", _checks, ("channel", "tier", "outcome")
    ),
    Metric(
        "headgate_decision_seconds", "histogram", "How long a check of an agent took, the way to the store included",
        _decision_times,
    ),
    Metric(
        "headgate_address_checks_total", "counter", "Checks of addresses, for callers that aren't known yet",
        _address_checks, ("purpose", "outcome"),
    ),
    Metric(
        "headgate_relay_envelopes_total", "counter", "Envelopes of agents on the relay, as its limiter saw them",
        lambda hub: {("passed",): hub.relay.passed, ("denied",): hub.relay.denied}, ("outcome",),
    ),
    _number(
        "headgate_violations_total", "counter", "Denials that count as violations", lambda hub: hub.tally.violations
    ),
    _number("headgate_alerts_total", "counter", "Alerts that were raised", lambda hub: hub.alerts.raised),
    _number("headgate_alerts_open", "gauge", "Alerts that are not resolved yet", lambda hub: hub.alerts.open),
    Metric(
        "headgate_webhooks_total", "counter", "Notifications to webhooks that are done with", _webhooks, ("outcome",)
    ),
    _number(
        "headgate_webhooks_waiting", "gauge", "Notifications that wait to be sent, or to be sent again",
        lambda hub: hub.webhooks.waiting,
    ),
    Metric(
        "headgate_live_buckets", "gauge", "Buckets and records of violations in this process's memory", _live_buckets
    ),
    _number(
        "headgate_store_round_trips_total", "counter", "Calls to the server that counts",
        lambda hub: _traffic(hub).round_trips,
    ),
    Metric(
        "headgate_store_batch_size", "histogram", "Decisions and other questions that went to the server together",
        _batches,
    ),
    _number(
        "headgate_store_errors_total", "counter", "Calls to the server that failed", lambda hub: _traffic(hub).errors
    ),
    _number("headgate_store_degraded", "gauge", "1 while the store is away, else 0", lambda hub: int(hub.degraded)),
    _number(
        "headgate_store_outages_total", "counter", "Times that the store went away",
        lambda hub: hub.tally.degraded_times,
    ),
    _number(
        "headgate_store_outage_seconds_total", "counter", "Time that the store was away, up to now",
        lambda hub: hub.tally.degraded_for / 1e6,
    ),
    Metric("headgate_connections", "gauge", "WebSockets that are open", _connections, ("kind",)),
    _number(
        "headgate_agents_connected", "gauge", "Agents with a connection to /ws", lambda hub: len(hub.presence.agents())
    ),
    Metric(
        "headgate_tasks", "gauge", "Tasks, finished ones as far as they are kept",
        lambda hub: {(state,): count for state, count in hub.scheduler.counts().items()}, ("state",),
    ),
    _number(
        "headgate_messages_total", "counter", "Messages that were taken, to agents and to channels",
        lambda hub: hub.post.carried,
    ),
    _number("headgate_sessions_open", "gauge", "Sessions that are open", lambda hub: hub.logbook.open_sessions),
    _number(
        "headgate_session_buckets", "gauge", "Sessions that were used and not closed yet",
        lambda hub: hub.gate.active_buckets,
    ),
    Metric(
        "headgate_build_info", "gauge", "Always 1: which headgate runs, and whether it is compiled",
        lambda _: {(VERSION, str(compiled()).lower()): 1}, ("version", "compiled"),
    ),
)  # fmt: skip


# Prometheus -----------------------------------------------------------------------------------------------------------


class _Reading:
    """The table, and what is known of the process, as Prometheus' library collects it."""

    def __init__(self, hub: "Hub") -> None:
        self._hub: Final = hub

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield _family(metric, metric.read(self._hub))
        yield from _PROCESS.collect()


def _family(metric: Metric, found: Mapping[Labels, float] | Distribution) -> Family:
    if isinstance(found, Distribution):
        ends = [*map(floatToGoString, found.bounds), "+Inf"]
        upto = list(zip(ends, accumulate(found.counts), strict=True))
        return HistogramMetricFamily(metric.name, metric.about, upto, found.total)
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.about, labels=metric.labels)
    for labels, value in found.items():
        family.add_metric(labels, value)
    return family


def exposition(hub: "Hub") -> bytes:
    """Everything that can be measured, as Prometheus reads it."""
    return generate_latest(_Reading(hub))


async def _metrics(call: Call) -> Answer:
    return Answer(200, exposition(call.hub), media=MEDIA)


ROUTES: Final = (
    Route(
        "GET", "/metrics", "get_metrics", Who.ANYONE, _metrics, str, "what can be measured, for Prometheus",
        media=MEDIA,
    ),
)  # fmt: skip
