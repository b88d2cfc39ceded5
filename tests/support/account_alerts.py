"""Helpers for tests of alerts of accounts: an agent that spends, and waits for a hub that has nothing left to do."""

from functools import partial

from headgate import Policy
from tests.support import alerts
from tests.support.hub import HubServer

KIND = "account_alerts"
RAISED, RESOLVED = "account_alert.raised", "account_alert.resolved"
PAYS = Policy(
    accounts={"at": {"acme": {"usd": "100/calendar month"}, "acme/search": {"usd": "10/calendar day"}}},
    agents={"planner": {"account": "acme/search"}, "writer": {"account": "acme/search"}},
)


def spend(hub: HubServer, usd: str, agent: str = "planner") -> bool:
    """Hold and settle an amount; whether it passed."""
    gate = hub.hub.gate
    hold = gate.hold(agent, {"usd": usd})
    if hold:
        hold.settle()
    return bool(hold)


wait_until_idle = partial(alerts.wait_until_idle, kind=KIND)
wait_for_comparison = partial(alerts.wait_for_comparison, kind=KIND)
dashboard_alerts = partial(alerts.dashboard_alerts, kind=KIND)
