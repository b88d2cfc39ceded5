"""Alerts of hubs that share a server: one per agent for the whole fleet."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headgate.events import Alerted
from headgate.hub.monitoring import alerts as module
from headgate.stores.redis import alerts as stored
from headgate.stores.redis.clients import Clients
from tests.support.alerts import (
    RAISED,
    RESOLVED,
    dashboard_alerts,
    record_violations,
    wait_for_comparison,
    wait_until_idle,
)
from tests.support.cluster import steady_cluster
from tests.support.hub import ADMIN
from tests.support.hub_fleet import HubFleet, wait_until_resolved
from tests.support.hub_process import hub_process
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for
from tests.support.webhook_receiver import WebhookReceiver

SECRET = "a-secret-of-more-than-16-characters"
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_proxies", "patient")]


def test_b8_a_fleet_raises_shows_and_resolves_one_alert(fleet: HubFleet) -> None:
    with fleet.hub() as one, fleet.hub() as other:
        for _ in range(10):
            record_violations(one, times=1)
            record_violations(other, times=1)
        wait_for(lambda: len(dashboard_alerts(one)) == len(dashboard_alerts(other)) == 1, "the alert on both")
        wait_for_comparison(one, other)
        raised = fleet.receiver.heard[0].json()["alert"]
        assert fleet.open == {"planner": raised}
        assert [{**alert, "total": raised["total"]} for hub in (one, other) for alert in dashboard_alerts(hub)] == [
            raised
        ] * 2
        assert all(10 <= alert["total"] <= 20 for hub in (one, other) for alert in dashboard_alerts(hub)), (
            "each counts its own"
        )
        assert one.hub.alerts.raised + other.hub.alerts.raised == 1
        fleet.clock.advance(59.999999)
        wait_for_comparison(one, other)
        assert one.hub.alerts.open == other.hub.alerts.open == 1
        fleet.clock.advance(0.000001)
        wait_until_resolved(one, other)
        fleet.clock.advance(10)
        wait_for_comparison(one, other)
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
        assert one.hub.alerts.resolved + other.hub.alerts.resolved == 1
        ended = fleet.receiver.heard[1].json()["alert"]
        assert [{**alert, "total": ended["total"]} for hub in (one, other) for alert in dashboard_alerts(hub)] == [
            ended
        ] * 2
        assert fleet.open == {}


@pytest.mark.long
@pytest.mark.parametrize("patience", [2_000_000, 0])
def test_b8_many_hubs_raise_and_resolve_each_of_many_alerts_once(
    fleet: HubFleet, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    monkeypatch.setattr(module, "_GRACE", patience)
    agents = [f"agent-{number}" for number in range(20)]
    with fleet.hub() as one, fleet.hub() as two, fleet.hub() as three:
        hubs = [one, two, three]
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(record_violations, hub, agent) for agent in agents for hub in hubs]:
                done.result()
        wait_for(lambda: all(hub.hub.alerts.open == 20 for hub in hubs), "all of them on all hubs")
        wait_for(lambda: len(fleet.receiver.heard) == 20, "all of them at the receiver, before any hub resolves one")
        fleet.clock.advance(60)
        wait_for(lambda: len(fleet.receiver.heard) == 40, "all")
        wait_for_comparison(*hubs)
        fleet.clock.advance(10)
        wait_for_comparison(*hubs)
        assert sorted(fleet.receiver.events) == sorted((what, agent) for agent in agents for what in (RAISED, RESOLVED))
        for agent in agents:
            assert [what for what, who in fleet.receiver.events if who == agent] == [RAISED, RESOLVED]
        assert sum(hub.hub.alerts.resolved for hub in hubs) == 20


def test_b8_an_alert_of_a_hub_that_stopped_is_resolved_by_another(fleet: HubFleet) -> None:
    with fleet.hub() as other:
        with fleet.hub() as one:
            record_violations(one)
            wait_for(lambda: other.hub.alerts.open, "the alert on the other")
        wait_for_comparison(other)
        fleet.clock.advance(60)
        wait_for_comparison(other)
        fleet.clock.advance(1.999999)
        wait_for_comparison(other)
        assert fleet.receiver.events == [(RAISED, "planner")]
        record_violations(other, times=1)
        fleet.clock.advance(0.000001)
        wait_for_comparison(other)
        fleet.clock.advance(59.999999)
        wait_for_comparison(other)
        fleet.clock.advance(1.999999)
        wait_for_comparison(other)
        assert fleet.receiver.events == [(RAISED, "planner")], "it was not quiet after all"
        fleet.clock.advance(0.000001)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
        assert (other.hub.alerts.raised, other.hub.alerts.resolved) == (0, 1)


def test_b8_a_starting_hub_finds_open_alerts(fleet: HubFleet) -> None:
    with fleet.hub() as one:
        record_violations(one)
        wait_until_idle(one)
    with fleet.hub() as later:
        wait_for(lambda: later.hub.alerts.open, "the alert")
        wait_for_comparison(later)
        assert dashboard_alerts(later) == [fleet.receiver.heard[0].json()["alert"]]
        fleet.clock.advance(61)
        wait_for_comparison(later)
        fleet.clock.advance(1)  # patience counts from when it was found to be quiet
        wait_for_comparison(later)
        assert fleet.receiver.events == [(RAISED, "planner")]
        fleet.clock.advance(1)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")


def test_raised_again_by_another_hub_it_is_the_same_alert(fleet: HubFleet) -> None:
    with fleet.two_with_an_alert() as (one, other):
        for _ in range(30):
            fleet.clock.advance(10)
            record_violations(other, times=1)
        wait_for(lambda: [alert["times"] for alert in dashboard_alerts(one)] == [2], "the second on the first hub")
        wait_for_comparison(one, other)
        first, second = [heard.json()["alert"] for heard in fleet.receiver.heard]
        assert second == {**first, "times": 2, "total": 40}
        assert [alert["total"] for hub in (one, other) for alert in dashboard_alerts(hub)] == [40, 40]
        assert (one.hub.alerts.raised, other.hub.alerts.raised) == (1, 1)
        fleet.clock.advance(60)
        wait_until_resolved(one, other)
        wait_for_comparison(one, other)
        assert (one.hub.alerts.resolved, other.hub.alerts.resolved) == (0, 1), "by the one that has raised it last"
        assert fleet.receiver.events == [(RAISED, "planner")] * 2 + [(RESOLVED, "planner")]


def test_raised_again_by_a_hub_unaware_of_the_first_it_is_the_same_alert(
    fleet: HubFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.hub.monitoring.alert_base._INTERVAL", 3600.0)
    with fleet.hub() as one, fleet.hub() as other:
        wait_until_idle(other)
        record_violations(one)
        wait_until_idle(one)
        assert (one.hub.alerts.open, other.hub.alerts.open) == (1, 0)
        other.hub.alerts.on_alert(Alerted("planner", 10, 300.0))
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the second")
        first, second = [heard.json()["alert"] for heard in fleet.receiver.heard]
        assert second == {**first, "times": 2}
        assert list(fleet.open.values()) == dashboard_alerts(other) == [second]


@pytest.mark.parametrize("way", ["reset", "exempt"])
def test_b8_a_reset_or_exemption_on_another_hub_resolves_it_once(fleet: HubFleet, way: str) -> None:
    with fleet.two_with_an_alert() as (one, other):
        with other.http(ADMIN) as http:
            if way == "reset":
                http.delete("/api/admin/violations/planner").raise_for_status()
            else:
                http.post("/api/admin/rate-limits/whitelist", json={"agent_id": "planner"}).raise_for_status()
                wait_for(lambda: one.hub.gate.is_exempt("planner"), "the exemption on the first")
        wait_for_comparison(one, other)
        fleet.clock.advance(2)
        wait_until_resolved(one, other)
        fleet.clock.advance(60)
        wait_for_comparison(one, other)
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


def test_open_alerts_of_a_fleet_are_bounded(fleet: HubFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_ALERTS", 3)
    with capture_logs() as logged, fleet.hub() as one, fleet.hub() as other:
        for number in range(6):
            record_violations(one if number % 2 else other, f"agent-{number}")
        wait_for_comparison(one, other)
        assert (one.hub.alerts.open, other.hub.alerts.open, len(fleet.open)) == (3, 3, 3)
        assert (one.hub.alerts.raised, other.hub.alerts.raised, len(fleet.receiver.heard)) == (3, 3, 3)
        assert any(line["event"].startswith("too many open alerts") for line in logged)


def test_alert_keys_expire(fleet: HubFleet) -> None:
    with fleet.hub() as one, fleet.server.client() as client:
        record_violations(one)
        record_violations(one, "other")
        wait_until_idle(one)
        one.hub.gate.reset_violations("planner")
        one.call(one.hub.alerts.recheck)
        wait_for(lambda: one.hub.alerts.resolved == 1, "the end of it")
        keys = list(client.scan_iter(match=f"{fleet.prefix}{{alerts}}*", count=1000))
        (ended,) = [key for key in keys if b"ended" in key]
        assert sorted(keys) == sorted([f"{fleet.prefix}{{alerts}}a1:open".encode(), ended])
        assert all(86_000 < client.ttl(key) <= 86_400 for key in keys)
        assert ended.decode().endswith(f":ended:{fleet.receiver.heard[0].json()['alert']['alert_id']}")


def test_foreign_data_in_the_server_does_no_harm(fleet: HubFleet) -> None:
    key = f"{fleet.prefix}{{alerts}}a1:open"
    with fleet.server.client() as client:
        alert = {"alert_id": "x", "agent_id": "somebody else", "violations": 1, "within": 1, "raised_at": 1}
        strange = {"planner": "nonsense", "b": "{}", "c": "[1]", "d": json.dumps(alert)}
        strange["e"] = json.dumps({**alert, "agent_id": "e", "violations": 10**400})  # which can't be sent to anybody
        client.hset(key, mapping=strange)
        with fleet.hub() as one:
            wait_for_comparison(one)
            assert one.hub.alerts.open == 0
            record_violations(one)
            wait_until_idle(one)
            fleet.clock.advance(60)
            wait_until_idle(one)
            assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
        assert client.hget(key, "planner") == b"nonsense"
        client.delete(key)
        client.set(key, "no hash")
        with fleet.hub() as one:
            fleet.clock.advance(300)
            record_violations(one)
            wait_until_idle(one)
            assert fleet.receiver.events[2:] == [(RAISED, "planner")]


def test_fields_of_a_later_version_are_ignored_and_those_of_an_older_one_suffice(fleet: HubFleet) -> None:
    with fleet.hub() as one, fleet.server.client() as client:
        record_violations(one)
        wait_until_idle(one)
        (alert,) = fleet.open.values()
        key = f"{fleet.prefix}{{alerts}}a1:open"
        assert (alert.pop("total"), alert.pop("actions"), alert.pop("address")) == (
            10,
            [],
            "",
        )  # as older ones write it
        client.hset(key, "planner", json.dumps({**alert, "mood": "bad"}))
        wait_for_comparison(one)
        record_violations(one, times=3)
        with fleet.hub() as newer:
            wait_for(lambda: newer.hub.alerts.open, "the alert")
            assert [alert["total"] for hub in (one, newer) for alert in dashboard_alerts(hub)] == [13, 10]
        fleet.clock.advance(62)
        wait_for_comparison(one)
        fleet.clock.advance(2)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")
        assert fleet.open == {}


@pytest.mark.long
async def test_alerts_in_a_cluster() -> None:
    with steady_cluster() as nodes:
        clients = Clients("redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes), PATIENCE)
        alerts = stored.RedisAlerts(clients, "headgate:")
        assert await alerts.put("a", "1", "", "first") == ("done", "")
        assert await alerts.put("a", "2", "", "second") == ("other", "first")
        assert await alerts.read() == {"a": "first"}
        assert await alerts.end("a", "1", "first", "the end") == ("done", "")
        assert await alerts.put("a", "1", "", "again") == ("ended", "the end")
        assert await alerts.end("a", "1", "first", "another end") == ("other", "")
        assert await alerts.read() == {}
        await clients.aclose()


# The program ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_b8_an_alert_of_a_killed_hub_is_resolved_by_another(
    redis_server: ValkeyServer, receiver: WebhookReceiver, tmp_path: Path
) -> None:
    config = tmp_path / "headgate.toml"
    config.write_text(
        f'[limits]\nlight = "1/hour"\n[backoff]\nquiet = 3600\n[alerts]\nviolations = 3\nwindow = 3600\n'
        f"[store]\ntimeout = {PATIENCE}\n"
    )
    surroundings = {
        "HEADGATE_STORE": f"{redis_server.url}/5",
        "HEADGATE_CONFIG": str(config),
        "HEADGATE_WEBHOOKS": receiver.url,
        "HEADGATE_WEBHOOK_SECRET": SECRET,
    }
    with (
        hub_process(tmp_path / "one", environment=surroundings) as one,
        hub_process(tmp_path / "two", environment=surroundings) as two,
    ):
        with one.http("") as http:
            token = http.post("/api/onboard/register", json={"agent_id": "planner"}).json()["token"]
        with one.http(token) as http:
            answers = [http.get("/api/mailbox").status_code for _ in range(5)]
            assert answers == [200, 429, 429, 429, 429]
        with two.http() as http:
            wait_for(lambda: http.get("/api/dashboard/state").json()["alerts"], "the alert on the other")
            wait_for(lambda: receiver.heard, "the alert")
            one.kill()
            assert http.delete("/api/admin/violations/planner").json()["reset"] is True  # sooner than it is quiet
            wait_for(lambda: len(receiver.heard) == 2, "the end of it")
            assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
            wait_for(lambda: http.get("/api/dashboard/state").json()["alerts"][0]["resolved_at"], "it on the other")
        assert all("X-Headgate-Signature" in heard.headers for heard in receiver.heard)
