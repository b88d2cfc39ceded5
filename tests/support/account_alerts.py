"""Helpers for tests of alerts of accounts: an agent that spends, and waits for a hub that has nothing left to do."""

from typing import Any

from headgate import Policy
from tests.support.hub import ADMIN, Running
from tests.support.valkey import wait_for

RAISED, RESOLVED = "account_alert.raised", "account_alert.resolved"
PAYS = Policy(
    accounts={"at": {"acme": {"usd": "100/calendar month"}, "acme/search": {"usd": "10/calendar day"}}},
    agents={"planner": {"account": "acme/search"}, "writer": {"account": "acme/search"}},
)


def spend(hub: Running, usd: str, agent: str = "planner") -> bool:
    """Hold and settle an amount; whether it passed."""
    gate = hub.hub.gate
    hold = gate.hold(agent, {"usd": usd})
    if hold:
        hold.settle()
    return bool(hold)


def settled(*hubs: Running) -> None:
    """Wait until hubs have no alert of an account left to handle."""
    for hub in hubs:

        def idle(hub: Running = hub) -> bool:
            alerts = hub.hub.account_alerts
            rests = bool(alerts._woken._waiters) and not alerts._woken.is_set()
            return rests and not alerts._events and not alerts._due and not hub.hub.webhooks.waiting

        for _ in range(3):  # one thing may bring another
            wait_for(lambda idle=idle, hub=hub: hub.call(idle), "the hub to have nothing to do")  # type: ignore[misc]


def compared(*hubs: Running) -> None:
    """Wait until hubs have compared with the server, and are idle again."""
    settled(*hubs)
    for hub in hubs:
        alerts = hub.hub.account_alerts
        for _ in range(2):
            before = alerts._store._next_comparison
            wait_for(lambda: alerts._store._next_comparison > before, "a look at the server")  # noqa: B023
    settled(*hubs)


def shown(hub: Running) -> list[dict[str, Any]]:
    """The alerts of accounts on the dashboard."""
    with hub.http(ADMIN) as http:
        found: list[dict[str, Any]] = http.get("/api/dashboard/state").json()["account_alerts"]
        return found
