"""The metrics of a hub: one table, for Prometheus, for OpenTelemetry, and for the docs.

Nothing is counted here: each metric is read from its source when it is collected. No label has values that an agent
can choose, so the number of series depends on the policy alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Final, Literal, NamedTuple, TypeAlias

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

from headgate._version import VERSION
from headgate.gate import Gate
from headgate.gate.policy import PURPOSES
from headgate.hub.agents.presence import Presence
from headgate.hub.dashboard.feed import DashboardFeed
from headgate.hub.messages.messages import MessageBroker
from headgate.hub.messages.sessions import SessionLog
from headgate.hub.monitoring.account_alerts import AccountAlerts
from headgate.hub.monitoring.alerts import Alerts
from headgate.hub.monitoring.health import Health
from headgate.hub.monitoring.stats import BOUNDS, NO_LIMIT, Stats
from headgate.hub.monitoring.webhooks import Webhooks
from headgate.hub.sockets.relay import Relay
from headgate.hub.tasks.scheduler import Scheduler
from headgate.limits.decision import Outcome
from headgate.stores.base import ServerStore, Store
from headgate.stores.memory import in_process
from headgate.stores.memory_tables import compiled
from headgate.stores.traffic import BATCH_SIZES, Traffic

MEDIA: Final = "text/plain; version=0.0.4; charset=utf-8"

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = tuple[str, ...]
"""The values of a metric's labels, in their order."""

_PROCESS: Final = ProcessCollector(registry=None)
_NO_TRAFFIC: Final = Traffic()  # of a store in memory


@dataclass(frozen=True)
class MetricSources:
    """The parts of a hub that metrics are read from."""

    gate: Gate
    store: Store
    health: Health
    stats: Stats
    alerts: Alerts
    account_alerts: AccountAlerts
    webhooks: Webhooks
    presence: Presence
    relay: Relay
    dashboard: DashboardFeed
    scheduler: Scheduler
    messages: MessageBroker
    sessions: SessionLog


class Distribution(NamedTuple):
    """The state of a histogram."""

    bounds: Sequence[float]
    counts: Sequence[int]
    """The number of values up to each bound and above the one before; last, the number above all bounds."""
    total: float
    """The sum of all values."""


@dataclass(frozen=True)
class Metric:
    """One metric. A counter's name ends in `_total`; the name of a time ends in its unit, seconds."""

    name: str
    """The name in Prometheus."""
    kind: Kind
    about: str
    read: Callable[[MetricSources], Mapping[Labels, float] | Distribution]
    """Reads it: a number for each combination of labels, or the distribution of a histogram. Runs in the hub's loop."""
    labels: tuple[str, ...] = ()


def _number(name: str, kind: Kind, about: str, read: Callable[[MetricSources], float]) -> Metric:
    return Metric(name, kind, about, lambda of: {(): read(of)})


# How they are read ---------------------------------------------------------------------------------------------------


def _checks(sources: MetricSources) -> dict[Labels, float]:
    policy = sources.gate.policy
    known = product(policy.channels, policy.tiers, [outcome.value for outcome in Outcome])
    counts: dict[Labels, float] = dict.fromkeys(known, 0)
    # Channels and tiers that only an earlier policy had stay: a counter never disappears.
    return counts | {(channel, tier, outcome.value): n for (channel, tier, outcome), n in sources.stats.checks.items()}


def _address_checks(sources: MetricSources) -> dict[Labels, float]:
    counts: dict[Labels, float] = dict.fromkeys(product(PURPOSES, ("allow", "warn", "deny")), 0)
    return counts | sources.stats.addresses


def _holds(sources: MetricSources) -> dict[Labels, float]:
    resources = (*sources.gate.effective.accounts.units, NO_LIMIT)
    counts: dict[Labels, float] = dict.fromkeys(product(resources, [outcome.value for outcome in Outcome]), 0)
    return counts | sources.stats.holds


def _hold_denials(sources: MetricSources) -> dict[Labels, float]:
    accounts = sources.gate.effective.accounts
    counts: dict[Labels, float] = dict.fromkeys(product(accounts.levels, accounts.units), 0)
    return counts | {(NO_LIMIT, NO_LIMIT): 0} | sources.stats.hold_denials


def _account_alerts(sources: MetricSources) -> dict[Labels, float]:
    return {(f"{share:g}",): many for share, many in sources.account_alerts.raised.items()}


def _decision_times(sources: MetricSources) -> Distribution:
    stats = sources.stats
    return Distribution([bound / 1e9 for bound in BOUNDS], list(stats.times), stats.time / 1e9)


def _traffic(sources: MetricSources) -> Traffic:
    return sources.store.traffic if isinstance(sources.store, ServerStore) else _NO_TRAFFIC


def _batches(sources: MetricSources) -> Distribution:
    traffic = _traffic(sources)
    return Distribution(BATCH_SIZES, list(traffic.batches), traffic.requests)


def _live_buckets(sources: MetricSources) -> dict[Labels, float]:
    memory = in_process(sources.store)
    return {} if memory is None else {(): len(memory)}


def _connections(sources: MetricSources) -> dict[Labels, float]:
    relay = sources.relay.connections
    agents = len(sources.presence.sockets) - relay
    return {("ws",): agents, ("relay",): relay, ("dashboard",): len(sources.dashboard.sockets)}


def _blocked(sources: MetricSources) -> int:
    return sum([sources.gate.is_blocked(agent) for agent in sources.gate.effective.blocks])


def _webhooks(sources: MetricSources) -> dict[Labels, float]:
    sent = sources.webhooks
    return {("delivered",): sent.delivered, ("failed",): sent.failed, ("dropped",): sent.dropped}


METRICS: Final = (
    Metric("headgate_checks_total", "counter", "Checks of agents", _checks, ("channel", "tier", "outcome")),
    Metric(
        "headgate_decision_seconds", "histogram", "Time of a check of an agent, including the round trip to the store",
        _decision_times,
    ),
    Metric(
        "headgate_address_checks_total", "counter", "Checks of addresses, for unidentified callers",
        _address_checks, ("purpose", "outcome"),
    ),
    Metric(
        "headgate_holds_total", "counter", "Holds of agents, by the resource that decided",
        _holds, ("resource", "outcome"),
    ),
    Metric(
        "headgate_hold_denials_total", "counter",
        "Denied holds, by the level of the account and the resource that decided", _hold_denials, ("level", "resource"),
    ),
    Metric(
        "headgate_relay_envelopes_total", "counter", "Envelopes on the relay, by the limiter's decision",
        lambda of: {("passed",): of.relay.passed, ("denied",): of.relay.denied}, ("outcome",),
    ),
    _number("headgate_violations_total", "counter", "Denials that count as violations", lambda of: of.stats.violations),
    _number("headgate_alerts_total", "counter", "Alerts raised", lambda of: of.alerts.raised),
    _number("headgate_alerts_open", "gauge", "Open alerts", lambda of: of.alerts.open),
    Metric("headgate_account_alerts_total", "counter", "Alerts of accounts raised", _account_alerts, ("share",)),
    _number("headgate_account_alerts_open", "gauge", "Open alerts of accounts", lambda of: of.account_alerts.open),
    _number("headgate_agents_blocked", "gauge", "Blocked agents", _blocked),
    Metric("headgate_webhooks_total", "counter", "Finished notifications to webhooks", _webhooks, ("outcome",)),
    _number(
        "headgate_webhooks_waiting", "gauge", "Notifications to webhooks queued or being retried",
        lambda of: of.webhooks.waiting,
    ),
    Metric("headgate_live_buckets", "gauge", "Buckets and violation records in this process's memory", _live_buckets),
    _number(
        "headgate_store_round_trips_total", "counter", "Calls to the store's server",
        lambda of: _traffic(of).round_trips,
    ),
    Metric("headgate_store_batch_size", "histogram", "Requests sent to the store's server in one call", _batches),
    _number(
        "headgate_store_errors_total", "counter", "Failed calls to the store's server", lambda of: _traffic(of).errors
    ),
    _number(
        "headgate_store_degraded", "gauge", "1 while the store is away, else 0", lambda of: int(of.health.degraded)
    ),
    _number(
        "headgate_store_lost", "gauge", "1 while the store is without its data, else 0",
        lambda of: int(of.health.store == "lost"),
    ),
    _number(
        "headgate_disk_failing", "gauge", "1 while the hub's files can't be written, else 0",
        lambda of: int(of.health.disk == "failing"),
    ),
    _number("headgate_store_outages_total", "counter", "Outages of the store", lambda of: of.stats.outages),
    _number(
        "headgate_store_outage_seconds_total", "counter", "Total time of the store's outages",
        lambda of: of.stats.outage_us / 1e6,
    ),
    Metric("headgate_connections", "gauge", "Open WebSockets", _connections, ("kind",)),
    _number(
        "headgate_agents_connected", "gauge", "Agents with a connection to /ws", lambda of: len(of.presence.agents())
    ),
    Metric(
        "headgate_tasks", "gauge", "Tasks, including the finished ones that are kept",
        lambda of: {(state,): count for state, count in of.scheduler.counts().items()}, ("state",),
    ),
    _number(
        "headgate_messages_total", "counter", "Messages accepted, to agents and to chat channels",
        lambda of: of.messages.accepted,
    ),
    _number("headgate_sessions_open", "gauge", "Open sessions", lambda of: of.sessions.open_sessions),
    _number("headgate_session_buckets", "gauge", "Sessions used and not closed yet", lambda of: of.gate.active_buckets),
    Metric(
        "headgate_build_info", "gauge", "Always 1: the version of headgate, and whether it is compiled",
        lambda _: {(VERSION, str(compiled()).lower()): 1}, ("version", "compiled"),
    ),
)  # fmt: skip


# Prometheus -----------------------------------------------------------------------------------------------------------


class _Collector:
    """Collects the table and the process's own metrics for Prometheus' library."""

    def __init__(self, sources: MetricSources) -> None:
        self._sources: Final = sources

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield _family(metric, metric.read(self._sources))
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


def exposition(sources: MetricSources) -> bytes:
    """All metrics, in Prometheus' text format."""
    return generate_latest(_Collector(sources))
