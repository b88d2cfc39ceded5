"""What operators see of one agent, of alerts and of addresses: the routes of viewers."""

import time
from functools import partial
from typing import Any

import httpx
import pytest

from headgate import Policy
from headgate.hub.monitoring.address_log import MAX_ADDRESSES
from headgate.limits.violations import Standing
from headgate.stores.base import MAX_ALERTS
from tests.support.agent_connections import BEHIND_A_PROXY, send_hello
from tests.support.alerts import advance, dashboard_alerts, record_violations, wait_until_idle
from tests.support.hub import ADMIN, VIEWER, HubServer, hub_server
from tests.support.valkey import wait_for

FEW = Policy(limits={"light": "2/minute", "heavy": "2/minute"}, sessions={"limit": "1/hour"})


def detail(hub: HubServer, agent: str = "planner", token: str = VIEWER) -> dict[str, Any]:
    with hub.http(token) as http:
        answer = http.get(f"/api/admin/agents/{agent}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def actions(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(one.values()) for one in found["denied_actions"]]


def summary(http: httpx.Client) -> dict[str, Any]:
    """The summary on the dashboard."""
    found: dict[str, Any] = http.get("/api/dashboard/state").json()["summary"]
    return found


# One agent ------------------------------------------------------------------------------------------------------------


def test_b7_the_denied_actions_of_an_agent_most_frequent_first() -> None:
    before = time.time()
    with hub_server(FEW) as hub, hub.agent_and_http("planner") as (planner, http):
        for kind, times in {"ping": 6, "status": 3}.items():
            for _ in range(times):
                planner.say(kind)
        planner.ask("message", to="nobody", body=1)
        assert [http.get("/api/tasks").status_code for _ in range(4)] == [200, 200, 429, 429]
        wait_for(lambda: detail(hub)["denied_per_minute"] == 9, "all denials")
        found = detail(hub)
        assert actions(found) == [
            ("ws", "ping", "light", 4, 4), ("ws", "status", "light", 3, 3), ("http", "get_tasks", "light", 2, 2)
        ]  # fmt: skip
        assert [one["action"] for one in found["denials"]] == ["get_tasks"] * 2 + ["status"] * 3 + ["ping"] * 4
        last = found["denials"][0]
        assert (last["channel"], last["tier"], last["address"]) == ("http", "light", "127.0.0.1")
        assert (last["retry_after_ms"], before <= last["at"] <= time.time()) == (30_000, True)
        assert (found["violations"], found["violations_last_hour"], found["rate_limited"]) == (9, 9, True)
        assert found["quiet_left_ms"] == 60_000
        hub.clock.advance(60)
        found = detail(hub)
        assert (found["rate_limited"], found["quiet_left_ms"]) == (False, 0)
        assert (found["denied_per_minute"], actions(found)[0]) == (0, ("ws", "ping", "light", 0, 4))
        hub.clock.advance(3600)
        found = detail(hub)
        assert (found["denied_actions"], len(found["denials"])) == ([], 9)


def test_the_store_is_asked_for_the_standing_of_an_agent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub, hub.http(VIEWER) as http:
        record_violations(hub)
        wait_until_idle(hub)  # alerts ask, too
        asked: list[str] = []
        astanding = hub.hub.gate.astanding

        async def noted(agent: str) -> Standing:
            asked.append(agent)
            return await astanding(agent)

        monkeypatch.setattr(hub.hub.gate, "astanding", noted)
        found = http.get("/api/admin/agents/planner").json()
        assert (found["violations"], found["quiet_left_ms"], asked) == (10, 60_000, ["planner"])


def test_denied_signals_and_envelopes_are_among_the_denials() -> None:
    with hub_server(FEW, relay_rate_burst="1") as hub, hub.agent("planner") as planner, hub.socket("/relay") as relay:
        assert planner.ask("session_open", session="1")["type"] == "session_opened"
        signal = {"type": "tick", "entity": "me", "weight": 1, "at": 1.0}
        answers = [planner.ask("session_signal", session="1", signal=signal) for _ in range(3)]
        assert [answer.get("error") for answer in answers[1:]] == ["rate_limited"] * 2, answers
        send_hello(relay, "planner", hub.run(hub.hub.registry.rotate("planner")))
        for _ in range(4):
            relay.socket.send(b"anything")
            relay.socket.recv()
        found = detail(hub)
        assert actions(found) == [("relay", "envelope", "", 3, 3), ("ws", "session_signal", "session", 2, 2)]
        assert [(one["kind"], one["address"]) for one in found["connections"]] == [("relay", "127.0.0.1")]
        assert {one["address"] for one in found["denials"]} == {"127.0.0.1"}
        assert found["violations"] == 2, "the relay's denials are none"


def test_the_limits_connections_sessions_and_tasks_of_an_agent() -> None:
    before = time.time()
    with hub_server(FEW) as hub, hub.agent_and_http("planner") as (planner, http), hub.http(ADMIN) as admin:
        limits = {"ws": {"heavy": "7/minute"}, "session": "5/second"}
        assert admin.put("/api/admin/rate-limits/planner", json=limits).status_code == 200
        planner.ask("session_open", session="1")
        for _ in range(2):
            assert http.post("/api/tasks", json={"payload": 1}).status_code == 201
        assigned = planner.hear()
        found = detail(hub)
        assert found["override"] == {"ws": {"heavy": "7/minute"}}
        assert (found["session_limit"], found["session_override"]) == ("5/second", "5/second")
        buckets = {(one["channel"], one["tier"]): one for one in found["buckets"]}
        assert set(buckets) == {(channel, tier) for channel in ("ws", "http") for tier in ("light", "normal", "heavy")}
        assert buckets["ws", "heavy"] == {
            "channel": "ws", "tier": "heavy", "used": 0.1429, "remaining": 6, "capacity": 7, "limit": "7/minute",
            "own": True,
        }  # fmt: skip
        assert (buckets["http", "heavy"]["used"], buckets["http", "heavy"]["own"]) == (1.0, False)
        assert found["usage"] == {key: buckets["http", "heavy"][key] for key in found["usage"]}
        (connection,) = found["connections"]
        assert (connection["kind"], connection["address"]) == ("ws", "127.0.0.1")
        assert before <= found["registered_at"] <= connection["since"] <= time.time()
        assert (found["registered"], found["revoked"], found["connected"]) == (True, False, True)
        assert (found["sessions"], found["tasks"]) == (1, {"held": assigned["task_id"], "created": 2})
        admin.post("/api/admin/rate-limits/whitelist", json={"agent_id": "planner"})
        found = detail(hub)
        assert (found["exempt"], found["usage"], found["session_limit"]) == (True, None, "unlimited")
        assert {(one["limit"], one["used"]) for one in found["buckets"]} == {("unlimited", 0.0)}
        assert found["override"] == {"ws": {"heavy": "7/minute"}}


def test_an_agent_that_is_not_registered_is_shown_if_there_is_anything_to_show() -> None:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin:

        def status(agent: str) -> int:
            return admin.get(f"/api/admin/agents/{agent}").status_code

        names = ("limited", "exempt", "checked", "offender", "nobody")
        assert [status(name) for name in names] == [404] * 5
        assert admin.get("/api/admin/agents/nobody").json()["error"] == "unknown_agent"
        admin.put("/api/admin/rate-limits/limited", json={"session": "5/second"})
        admin.post("/api/admin/rate-limits/whitelist", json={"agent_id": "exempt"})
        admin.post("/api/admin/check", json={"agent_id": "checked", "channel": "ws", "action": "ping"})
        record_violations(hub, "offender", 1)
        assert [status(name) for name in names] == [200] * 4 + [404]
        found = detail(hub, "checked")
        assert (found["registered"], found["registered_at"], found["revoked"]) == (False, None, False)
        assert (found["connections"], found["sessions"], found["tasks"]) == ([], 0, {"held": None, "created": 0})


def test_a_block_is_shown_until_it_ends() -> None:
    with hub_server(FEW) as hub, hub.agent("planner") as planner, hub.http(VIEWER) as viewer:
        assert planner.ask("status")["type"] == "status"
        until = hub.clock.wall() + 3600
        hub.call(partial(hub.hub.gate.block, "planner", until=until, reason="it loops"))
        hub.call(hub.hub.gate.block, "unknown")
        hub.call(hub.hub.gate.set_role, "planner", "viewer")
        found = detail(hub)
        assert (found["blocked"], found["blocked_until"], found["blocked_reason"]) == (True, until, "it loops")
        assert (found["rate_limited"], found["role"]) == (False, "viewer")
        assert planner.ask("status")["type"] == "rate_limited"
        found = detail(hub)
        assert (found["rate_limited"], actions(found)) == (True, [("ws", "status", "light", 1, 1)])
        assert {(one["limit"], one["used"], one["capacity"]) for one in found["buckets"]} == {("blocked", 1.0, 0)}
        cards = {card["agent_id"]: card for card in viewer.get("/api/dashboard/state").json()["agents"]}
        assert [(name, card["blocked"]) for name, card in cards.items()] == [("planner", True), ("unknown", True)]
        assert (summary(viewer)["blocked"], summary(viewer)["limited"]) == (2, 1)
        found = detail(hub, "unknown")
        assert (found["blocked"], found["blocked_until"], found["registered"]) == (True, None, False)
        hub.clock.advance(3600)
        found = detail(hub)
        assert (found["blocked"], found["blocked_until"], found["blocked_reason"]) == (False, None, "")
        assert summary(viewer)["blocked"] == 1
        hub.call(hub.hub.gate.unblock, "unknown")
        assert (summary(viewer)["blocked"], summary(viewer)["agents"]) == (0, 1)


def test_the_summary_names_what_a_stored_change_overrules() -> None:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin:
        assert summary(admin)["overruled"] == []
        admin.put("/api/admin/rate-limits/defaults", json={"ws": {"heavy": "3/minute"}})
        assert summary(admin)["overruled"] == ["limits.ws.heavy"]
        hub.call(hub.hub.gate.remove_default)
        assert summary(admin)["overruled"] == []


def test_b8_an_alert_of_a_blocked_agent_stays_open_while_it_is_denied() -> None:
    with hub_server() as hub:
        for _ in range(10):
            hub.hub.gate.record_violation("planner")
        wait_until_idle(hub)
        hub.clock.advance(59)
        hub.call(hub.hub.gate.block, "planner")
        assert not hub.hub.gate.check("planner", "ws", "light")
        hub.call(hub.hub.gate.add_exemption, "planner")  # otherwise that would resolve it
        advance(hub, 59)
        assert hub.hub.alerts.open == 1
        advance(hub, 1)
        assert hub.hub.alerts.open == 0


def test_b7_the_most_pressing_agents_come_first() -> None:
    with hub_server(FEW) as hub, hub.http(VIEWER) as viewer:

        def order() -> list[str]:
            return [card["agent_id"] for card in viewer.get("/api/dashboard/state").json()["agents"]]

        def check(agent: str, times: int) -> None:
            for _ in range(times):
                hub.run(hub.hub.stats.check(agent, "ws", action="ping"))

        check("quiet", 1)
        check("first", 2 + 50)
        hub.clock.advance(65)
        assert order() == ["first", "quiet"], "by the violations of the hour"
        check("second", 2 + 3)
        check("third", 2 + 4)
        assert order() == ["third", "second", "first", "quiet"]
        found = summary(viewer)
        assert (found["limited"], found["agents"], found["denied_per_second"]) == (2, 4, 1.4)
        hub.run(hub.hub.gate.areset_violations("third"))
        assert order() == ["second", "third", "first", "quiet"], "not rate limited any more, but still denied most"
        with hub.http(ADMIN) as admin:
            admin.post("/api/admin/rate-limits/whitelist", json={"agent_id": "second"})
        assert summary(viewer)["limited"] == 0


def test_b7_the_summary_counts_the_tasks() -> None:
    with hub_server() as hub, hub.agent_and_http("planner") as (planner, http), hub.http(VIEWER) as viewer:
        assert summary(viewer)["tasks"] == {"waiting": 0, "held": 0, "done": 0, "failed": 0}
        for _ in range(4):
            http.post("/api/tasks", json={"payload": 1})
        first = planner.hear()["task_id"]
        assert summary(viewer)["tasks"] == {"waiting": 3, "held": 1, "done": 0, "failed": 0}
        planner.ask("task_accepted", task_id=first)
        assert summary(viewer)["tasks"] == {"waiting": 3, "held": 1, "done": 0, "failed": 0}
        planner.say("task_complete", task_id=first)
        second = next(
            frame["task_id"] for frame in (planner.hear(), planner.hear()) if frame["type"] == "task_assigned"
        )
        planner.say("task_failed", task_id=second, error="too hard")
        wait_for(lambda: summary(viewer)["tasks"] == {"waiting": 1, "held": 1, "done": 1, "failed": 1}, "the failure")


# Alerts ---------------------------------------------------------------------------------------------------------------


def test_b8_an_alert_says_what_was_denied_and_goes_on_counting() -> None:
    with hub_server(FEW) as hub, hub.agent("planner") as planner:
        for kind, times in {"ping": 7, "status": 3, "list_agents": 1, "list_channels": 1}.items():
            for _ in range(times):
                assert planner.ask(kind)["type"] != "error"
        planner.ask("ping")
        wait_until_idle(hub)
        (alert,) = dashboard_alerts(hub)
        assert [(one["action"], one["last_hour"]) for one in alert["actions"]] == [
            ("ping", 5), ("status", 3), ("list_agents", 1)
        ]  # fmt: skip
        assert (alert["address"], alert["violations"], alert["total"]) == ("127.0.0.1", 10, 11)
        for _ in range(7):
            planner.ask("ping")
        assert [alert["total"] for alert in dashboard_alerts(hub)] == [18]
        advance(hub, 60)
        assert [(alert["total"], alert["resolved_at"] is None) for alert in dashboard_alerts(hub)] == [(18, False)]
        planner.ask("ping")
        assert [alert["total"] for alert in dashboard_alerts(hub)] == [18]


def test_b8_all_open_alerts_can_be_reached() -> None:
    with hub_server() as hub, hub.http(VIEWER) as viewer:

        def told(query: str = "") -> tuple[list[str], int]:
            answer = viewer.get(f"/api/admin/alerts{query}")
            assert answer.status_code == 200, answer.text
            return [alert["agent_id"] for alert in answer.json()["alerts"]], answer.json()["open"]

        assert told() == ([], 0)
        record_violations(hub, "resolved")
        wait_until_idle(hub)
        advance(hub, 60)
        names = [f"agent-{number}" for number in range(MAX_ALERTS + 5)]
        for name in names:
            record_violations(hub, name)
        wait_until_idle(hub)
        newest = names[MAX_ALERTS - 1 :: -1]
        assert told("?limit=1000") == (newest, MAX_ALERTS)
        assert told() == (newest[:100], MAX_ALERTS)
        assert told("?limit=3&open=true") == (newest[:3], MAX_ALERTS)
        assert summary(viewer)["open_alerts"] == MAX_ALERTS
        assert len(hub.hub.alerts._totals) == MAX_ALERTS, "nothing is kept of those that were not opened"
        advance(hub, 60)
        assert told("?open=true") == ([], 0)
        assert len(told()[0]) == 50
        assert hub.hub.alerts._totals == {}
        for query in ("?limit=0", "?limit=1001", "?open=perhaps", "?closed=true"):
            assert viewer.get(f"/api/admin/alerts{query}").status_code == 400


# Addresses ------------------------------------------------------------------------------------------------------------


def addresses(http: httpx.Client) -> list[tuple[str, str, int]]:
    found = http.get("/api/admin/addresses").json()["addresses"]
    return [(one["address"], one["purpose"], one["denials"]) for one in found]


def test_b2_b3_denials_by_address_are_shown_worst_first_and_forgotten_after_an_hour() -> None:
    policy = Policy(addresses={"limit": "1/hour", "registration": "1/hour"})
    before = time.time()
    with hub_server(policy, **BEHIND_A_PROXY) as hub, hub.http(VIEWER) as viewer, hub.http() as http:

        def ask(address: str, times: int) -> None:
            for _ in range(times):
                http.get("/api/agents", headers={"X-Forwarded-For": address})

        assert addresses(viewer) == []
        ask("192.0.2.1", 3)
        ask("192.0.2.2", 5)
        ask("2001:db8::1", 2)
        ask("2001:db8::2", 2)
        ask("192.0.2.9", 1)
        for _ in range(8):
            http.post("/api/onboard/register", json={"agent_id": "x"}, headers={"X-Forwarded-For": "192.0.2.1"})
        worst = [
            ("192.0.2.1", "registration", 7), ("192.0.2.2", "request", 4), ("2001:db8::/64", "request", 3),
            ("192.0.2.1", "request", 2),
        ]  # fmt: skip
        assert addresses(viewer) == worst
        found = viewer.get("/api/admin/addresses").json()["addresses"][0]
        assert before <= found["last_at"] <= time.time()
        told = summary(viewer)
        assert [(one["address"], one["purpose"], one["denials"]) for one in told["denied_addresses"]] == worst[:3]
        assert (told["address_denials"], told["violations_last_hour"]) == (16, 0)
        hub.clock.advance(3600)
        assert addresses(viewer) == []
        assert summary(viewer)["address_denials"] == 0


def test_b2_the_addresses_that_are_remembered_are_bounded() -> None:
    with hub_server(Policy(addresses={"limit": "1/hour"})) as hub, hub.http(VIEWER) as viewer:

        def ask(address: str, times: int = 2) -> None:
            for _ in range(times):
                hub.hub.gate.check_address(address)

        ask("192.0.2.1", 51)
        for number in range(MAX_ADDRESSES - 1):
            ask(f"10.0.{number // 250}.{number % 250}")
        ask("192.0.2.1")
        ask("192.0.2.2", 11)
        found = addresses(viewer)
        assert len(found) == MAX_ADDRESSES
        assert found[:2] == [("192.0.2.1", "request", 52), ("192.0.2.2", "request", 10)]
        assert ("10.0.0.0", "request", 1) not in found, "the one that was denied longest ago"
        assert hub.hub.address_log.denials == 52 + 10 + MAX_ADDRESSES - 1


# Who sees it ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["agents/planner", "alerts", "addresses"])
def test_a_public_dashboard_shows_no_addresses(path: str) -> None:
    policy = Policy(limits={"light": "1/hour"}, addresses={"limit": "1/hour"})
    with hub_server(policy, public_dashboard=True) as hub, hub.http() as anybody, hub.agent("planner") as planner:
        for _ in range(12):
            planner.ask("ping")
        wait_until_idle(hub)
        assert [anybody.get("/api/agents").status_code for _ in range(2)] == [200, 429]
        with hub.http(VIEWER) as viewer:
            assert "127.0.0.1" in viewer.get(f"/api/admin/{path}").text
            assert viewer.get("/api/dashboard/state").text.count("127.0.0.1") == 2
        state = anybody.get("/api/dashboard/state")
        assert (state.status_code, "127.0.0.1" in state.text) == (200, False)
        assert state.json()["summary"]["address_denials"] == 1
        assert state.json()["alerts"][0]["total"] == 11
        assert anybody.get(f"/api/admin/{path}").status_code in (401, 429)
