"""Helpers for tests of alerts: agents that misbehave, and waits for a hub that has nothing left to do."""

from typing import Any

from tests.support.hub import ADMIN, Running
from tests.support.valkey import wait_for

RAISED, RESOLVED = "alert.raised", "alert.resolved"


def offend(hub: Running, agent: str = "planner", times: int = 10) -> None:
    for _ in range(times):
        hub.hub.gate.record_violation(agent)


def settled(hub: Running) -> None:
    """Wait until the hub has no alert left to handle."""

    def idle() -> bool:
        alerts = hub.hub.alerts
        rests = bool(alerts._woken._waiters) and not alerts._woken.is_set()
        return rests and not alerts._events and not alerts._due and not hub.hub.webhooks.waiting

    for _ in range(3):  # one thing may bring another
        wait_for(lambda: hub.call(idle), "the hub to have nothing to do")


def shown(hub: Running) -> list[dict[str, Any]]:
    """The alerts on the dashboard."""
    with hub.http(ADMIN) as http:
        found: list[dict[str, Any]] = http.get("/api/dashboard/state").json()["alerts"]
        return found
