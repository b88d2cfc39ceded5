"""Routes for probes and monitoring: health, readiness and metrics."""

from typing import Final, Literal

from msgspec import Struct

from headgate._version import VERSION
from headgate.hub.agents.presence import Presence
from headgate.hub.api.responses import ApiResponse
from headgate.hub.api.routing import Access, Call, Route
from headgate.hub.errors import stopping_error
from headgate.hub.monitoring import metrics
from headgate.hub.monitoring.health import Health, ServerState
from headgate.hub.monitoring.metrics import MetricSources


class HealthStatus(Struct):
    status: Literal["ok", "degraded", "stopping"]
    store: ServerState
    """While the store is away, the policy says how requests are decided; a lost one no longer has its data."""
    disk: Literal["ok", "failing"]
    """Whether the hub's files can be written."""
    problems: list[str]
    """Problems, as sentences; none where all is well."""
    version: str
    connections: int


class Metrics(Struct):
    connections: int
    agents_connected: int
    relay_connections: int
    checks: dict[str, int]
    """Checks of agents, by outcome."""
    address_checks: dict[str, int]
    violations: int
    alerts: int
    store_outages: int
    messages: int
    tasks: dict[str, int]
    open_sessions: int
    session_buckets: int
    """Sessions that were used and are not closed yet."""


async def _health(_call: Call, health: Health, presence: Presence) -> HealthStatus:
    problems = health.problems
    store = "ok" if health.store == "memory" else health.store
    status: Literal["ok", "degraded", "stopping"] = "stopping" if health.stopping else "degraded" if problems else "ok"
    return HealthStatus(status, store, health.disk, problems, VERSION, len(presence.sockets))


async def _live(_call: Call) -> dict[str, str]:
    return {"status": "live"}


async def _ready(_call: Call, health: Health) -> dict[str, str]:
    if health.stopping:
        raise stopping_error()
    return {"status": "ready"}


async def _metrics(_call: Call, sources: MetricSources) -> Metrics:
    stats = sources.stats
    addresses: dict[str, int] = {}
    for (_, outcome), times in stats.addresses.items():
        addresses[outcome] = addresses.get(outcome, 0) + times
    return Metrics(
        connections=len(sources.presence.sockets),
        agents_connected=len(sources.presence.agents()),
        relay_connections=sources.relay.connections,
        checks=stats.outcomes(),
        address_checks=addresses,
        violations=stats.violations,
        alerts=sources.alerts.raised,
        store_outages=stats.outages,
        messages=sources.messages.accepted,
        tasks=sources.scheduler.counts(),
        open_sessions=sources.sessions.open_sessions,
        session_buckets=sources.gate.active_buckets,
    )


async def _prometheus(_call: Call, sources: MetricSources) -> ApiResponse:
    return ApiResponse(200, metrics.exposition(sources), media=metrics.MEDIA)


ROUTES: Final = (
    Route("GET", "/health", "get_health", Access.PROBE, _health, "the hub's health"),
    Route("GET", "/api/health", "get_health", Access.PROBE, _health, "the hub's health"),
    Route("GET", "/live", "get_health", Access.PROBE, _live, "whether the process is alive"),
    Route("GET", "/ready", "get_health", Access.PROBE, _ready, "whether the hub takes work"),
    Route("GET", "/api/metrics", "get_metrics", Access.ANYONE, _metrics, "the hub's counters"),
    Route(
        "GET", "/metrics", "get_metrics", Access.ANYONE, _prometheus,
        "all metrics, for Prometheus", media=metrics.MEDIA,
    ),
)  # fmt: skip
