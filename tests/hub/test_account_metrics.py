"""Metrics of holds and of alerts of accounts: no name of an agent or an account is a label."""

from headgate import Policy
from tests.support.account_alerts import PAYS, spend, wait_until_idle
from tests.support.hub import ADMIN, hub_server
from tests.support.prometheus import Series, scrape

POLICY = Policy(
    accounts={
        "units": {"credits": {"decimals": 2}},
        "tools": ["web"],
        "default": {"session": {"tokens": "10 in all"}},
        "at": {
            "acme": {"usd": "10 in all"},
            "acme/search": {"usd": "100 in all"},
            "acme/search/planner": {"credits": "1 in all"},
        },
    },
    agents={"planner": {"account": "acme/search"}, "writer": {"account": "acme/search"}},
    exempt=["boss"],
)


def counted(found: dict[Series, float], name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The series of a metric that have counted something, by the values of their labels."""
    return {
        tuple([dict(values)[label] for label in labels]): count
        for (series, values), count in found.items()
        if series == name and count
    }


def test_f1_holds_are_counted_by_resource_and_outcome_and_denials_by_level() -> None:
    with hub_server(POLICY) as hub:
        gate = hub.hub.gate
        assert gate.hold("planner", {"usd": "5"})  # the organisation has the smallest share left
        assert gate.hold("writer", {"usd": "4"})
        assert not gate.hold("writer", {"usd": "2"})  # denied by the organisation
        assert not gate.hold("planner", {"credits": "1.01"})  # by the agent
        assert not gate.hold("writer", {"tokens": 11}, session="run")  # by the session
        assert gate.hold("boss", {"usd": "1"})  # which is exempt
        assert gate.hold("stranger", {})  # for which nothing is limited
        gate.block("stranger")
        assert not gate.hold("stranger", {})
        found = scrape(hub)
    assert counted(found, "headgate_holds_total", "resource", "outcome") == {
        ("usd", "allow"): 1,
        ("usd", "warn"): 1,
        ("usd", "deny"): 1,
        ("credits", "deny"): 1,
        ("tokens", "deny"): 1,
        ("none", "exempt"): 1,
        ("none", "allow"): 1,
        ("none", "deny"): 1,
    }
    assert counted(found, "headgate_hold_denials_total", "level", "resource") == {
        ("org", "usd"): 1,
        ("agent", "credits"): 1,
        ("session", "tokens"): 1,
        ("none", "none"): 1,
    }
    assert counted(found, "headgate_violations_total") == {(): 3}, "not the one by the organisation"


def test_f1_denied_holds_are_seen_like_denied_checks() -> None:
    with hub_server(POLICY) as hub, hub.http(ADMIN) as admin:
        gate = hub.hub.gate
        assert gate.hold("writer", {"usd": "4"}, tool="web")
        for _ in range(3):
            assert not gate.hold("writer", {"usd": "20"}, tool="web")  # by the organisation: no violation
        state = admin.get("/api/dashboard/state").json()
        writer = admin.get("/api/admin/agents/writer").json()
        assert gate.hold("writer", {"usd": "1"})
        assert not admin.get("/api/admin/agents/writer").json()["denied_by_account"]
    summary, (card,) = state["summary"], [one for one in state["agents"] if one["agent_id"] == "writer"]
    assert (summary["checks"], summary["denied"], summary["violations_last_hour"]) == (4, 3, 0)
    assert summary["denied_share"] == 0.75
    assert (card["denied_per_minute"], card["violations"], card["rate_limited"]) == (3, 0, False)
    assert (card["denied_by_account"], writer["denied_by_account"]) == (True, True)
    assert [(one["channel"], one["action"], one["tier"], one["last_hour"]) for one in writer["denied_actions"]] == [
        ("hold", "web", "usd", 3)
    ]
    assert [one["tier"] for one in writer["denials"]] == ["usd"] * 3


def test_a_denied_hold_hides_no_address() -> None:
    with hub_server(POLICY) as hub:
        denials = hub.hub.stats.denials
        denied = hub.hub.gate.hold("writer", {"usd": "20"}).decision
        denials.add("writer", "ws", "ping", "light", "192.0.2.7", denied)
        hub.hub.gate.hold("writer", {"usd": "20"})
        assert denials.address("writer") == "192.0.2.7"


def test_f1_alerts_of_accounts_are_counted_by_share() -> None:
    with hub_server(PAYS) as hub:
        spend(hub, "8")
        spend(hub, "2")
        wait_until_idle(hub)
        found = scrape(hub)
    assert counted(found, "headgate_account_alerts_total", "share") == {("0.8",): 1, ("1",): 1}
    assert counted(found, "headgate_account_alerts_open") == {(): 1}
    assert counted(found, "headgate_alerts_total") == {}


def test_f1_there_are_as_many_series_whatever_accounts_agents_and_tools_there_are() -> None:
    with hub_server(POLICY) as hub:
        before = set(scrape(hub))
        for number in range(50):
            hub.hub.gate.set_agent_account(f"agent-{number}", f"org-{number}/team-{number}")
            hub.hub.gate.set_account_limit(f"org-{number}", "usd", "1 in all")
            hub.hub.gate.hold(f"agent-{number}", {"usd": "1"}, session=f"run-{number}")
            hub.hub.gate.hold(f"agent-{number}", {"usd": "1"})
        after = set(scrape(hub))
        assert after == before
