"""Helpers for tests of alerts: agents that misbehave, and waits for hubs that have nothing left to do."""

from typing import Any

from tests.support.hub import ADMIN, HubServer
from tests.support.valkey import wait_for

RAISED, RESOLVED = "alert.raised", "alert.resolved"


def record_violations(hub: HubServer, agent: str = "planner", times: int = 10) -> None:
    for _ in range(times):
        hub.hub.gate.record_violation(agent)


def wait_until_idle(*hubs: HubServer, kind: str = "alerts") -> None:
    """Wait until hubs have no alert of a kind left to handle."""
    for hub in hubs:
        alerts = getattr(hub.hub, kind)

        def idle(hub: HubServer = hub, alerts: Any = alerts) -> bool:
            rests = bool(alerts._woken._waiters) and not alerts._woken.is_set()
            return rests and not alerts._events and not alerts._due and not hub.hub.webhooks.waiting

        for _ in range(3):  # one thing may bring another
            wait_for(lambda idle=idle, hub=hub: hub.call(idle), "the hub to have nothing to do")  # type: ignore[misc]


def advance(hub: HubServer, seconds: float, kind: str = "alerts") -> None:
    """Let time pass, and wait until the hub has no alert left to handle."""
    hub.clock.advance(seconds)
    wait_until_idle(hub, kind=kind)


def wait_for_comparison(*hubs: HubServer, kind: str = "alerts") -> None:
    """Wait until hubs are idle, have compared with the server after that, and are idle again."""
    wait_until_idle(*hubs, kind=kind)
    for store in [getattr(hub.hub, kind)._store for hub in hubs]:
        for _ in range(2):
            before = store._next_comparison
            wait_for(lambda: store._next_comparison > before, "a look at the server")  # noqa: B023
    wait_until_idle(*hubs, kind=kind)


def dashboard_alerts(hub: HubServer, kind: str = "alerts") -> list[dict[str, Any]]:
    """The alerts of a kind on the dashboard."""
    with hub.http(ADMIN) as http:
        found: list[dict[str, Any]] = http.get("/api/dashboard/state").json()[kind]
        return found
