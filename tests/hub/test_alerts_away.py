"""Alerts of hubs that share a server, during outages and timeouts."""

from collections.abc import Iterator
from typing import Any

import pytest

from headgate import StoreAway
from headgate.stores.redis import alerts as stored
from tests.support.alerts import (
    RAISED,
    RESOLVED,
    dashboard_alerts,
    record_violations,
    wait_for_comparison,
    wait_until_idle,
)
from tests.support.hub import HubServer
from tests.support.hub_fleet import HubFleet, wait_until_resolved
from tests.support.valkey import ValkeyServer, wait_for
from tests.support.webhook_receiver import WebhookReceiver

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_proxies", "patient")]


@pytest.fixture
def impatient_fleet(receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubFleet]:
    monkeypatch.setattr("headgate.hub.monitoring.alert_base._INTERVAL", 0.02)
    monkeypatch.setattr("headgate.hub.app._PROBE_INTERVAL", 0.02)
    with ValkeyServer() as server:
        yield HubFleet(server, receiver)


def wait_until_away(*hubs: HubServer) -> None:
    wait_for(lambda: all(hub.hub.health.degraded for hub in hubs), "the hubs to miss the server")


def wait_until_back(*hubs: HubServer) -> None:
    wait_for(lambda: not any(hub.hub.health.degraded for hub in hubs), "the hubs to find the server")


def lose_answer_once(monkeypatch: pytest.MonkeyPatch, command: str, *, done: bool = True) -> list[bool]:
    """A command to the server times out once, whether or not it was done; a list that is empty once it has."""
    real = getattr(stored.RedisAlerts, command)
    failures = [True]

    async def unheard(self: stored.RedisAlerts, *words: str) -> Any:
        fails = bool(failures) and failures.pop()
        answer = await real(self, *words) if done or not fails else ("done", "")
        if fails:
            raise StoreAway("no answer in time")
        return answer

    monkeypatch.setattr(stored.RedisAlerts, command, unheard)
    return failures


def test_b8_without_the_server_a_hub_raises_and_resolves_by_itself(impatient_fleet: HubFleet) -> None:
    with impatient_fleet.hub() as one, impatient_fleet.hub() as other:
        impatient_fleet.server.kill()
        wait_until_away(one, other)
        record_violations(one)
        wait_until_idle(one)
        assert [alert["agent_id"] for alert in dashboard_alerts(one)] == ["planner"]
        assert other.hub.alerts.open == 0
        impatient_fleet.clock.advance(60)
        wait_until_idle(one)
        assert impatient_fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


def test_b8_alerts_open_during_an_outage_are_resolved_once_afterwards(impatient_fleet: HubFleet) -> None:
    """It has lost everything meanwhile, as a server without a disk does."""
    with impatient_fleet.hub() as one, impatient_fleet.hub() as other:
        record_violations(one)
        record_violations(one, "other")
        wait_for(lambda: other.hub.alerts.open == 2, "the alerts on the other")
        wait_for_comparison(one, other)
        impatient_fleet.server.kill()
        wait_until_away(one, other)
        impatient_fleet.clock.advance(70)
        wait_until_idle(one)
        wait_until_idle(other)
        assert (one.hub.alerts.open, other.hub.alerts.open) == (2, 2), "nobody knows whether the other resolves it"
        impatient_fleet.server.start()
        wait_until_back(one, other)
        for _ in range(3):
            wait_for_comparison(one, other)
            impatient_fleet.clock.advance(2)
        wait_until_resolved(one, other)
        wait_for_comparison(one, other)
        raised = [(RAISED, "planner"), (RAISED, "other")]
        assert impatient_fleet.receiver.events[:2] == raised
        assert sorted(impatient_fleet.receiver.events[2:]) == [(RESOLVED, "other"), (RESOLVED, "planner")]


def test_local_counts_resolve_no_alert_stored_in_the_server(fleet: HubFleet) -> None:
    with fleet.hub() as one:
        record_violations(one)
        wait_until_idle(one)
        one.hub.alerts._store.is_away = lambda: True
        one.hub.gate.reset_violations("planner")
        one.call(one.hub.alerts.recheck)
        wait_until_idle(one)
        assert (one.hub.alerts.open, list(fleet.open)) == (1, ["planner"])
        one.hub.alerts._store.is_away = lambda: False
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")


def test_an_alert_raised_during_an_outage_is_renewed_in_the_server(impatient_fleet: HubFleet) -> None:
    with impatient_fleet.hub() as one, impatient_fleet.hub() as other:
        impatient_fleet.server.kill()
        wait_until_away(one, other)
        record_violations(one)
        record_violations(other)
        wait_until_idle(one)
        wait_until_idle(other)
        mine, theirs = dashboard_alerts(one)[0]["alert_id"], dashboard_alerts(other)[0]["alert_id"]
        impatient_fleet.server.start()
        wait_until_back(one, other)
        record_violations(one)
        wait_for(lambda: "planner" in impatient_fleet.open, "it in the server")
        wait_for_comparison(one, other)
        assert [(alert["alert_id"], alert["times"]) for alert in dashboard_alerts(one)] == [(mine, 2)]
        assert [alert["alert_id"] for alert in dashboard_alerts(other) if alert["resolved_at"] is None] == [mine]
        assert [alert["alert_id"] for alert in dashboard_alerts(other) if alert["resolved_at"]] == [theirs]
        said = [(one.json()["event"], one.json()["alert"]["alert_id"]) for one in impatient_fleet.receiver.heard]
        assert sorted(said) == sorted([(RAISED, mine), (RAISED, theirs), (RAISED, mine), (RESOLVED, theirs)])


@pytest.mark.parametrize("done", [True, False])
def test_b8_a_resolution_whose_removal_timed_out_is_sent_once(
    fleet: HubFleet, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    failures = lose_answer_once(monkeypatch, "end", done=done)
    with fleet.two_with_an_alert() as (one, other):
        fleet.clock.advance(60)
        wait_until_resolved(one, other)
        fleet.clock.advance(10)
        wait_for_comparison(one, other)
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
        assert failures == []


def test_b8_a_resolution_whose_removal_timed_out_twice_is_sent_once(
    fleet: HubFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = stored.RedisAlerts.end
    tries: list[str] = []

    async def unheard(self: stored.RedisAlerts, *words: str) -> Any:
        outcome, _ = await end(self, *words)
        tries.append(outcome)
        raise StoreAway("no answer in time")

    monkeypatch.setattr(stored.RedisAlerts, "end", unheard)
    monkeypatch.setattr("headgate.hub.monitoring.alert_base._INTERVAL", 3600.0)
    with fleet.hub() as one:
        record_violations(one)
        wait_until_idle(one)
        fleet.clock.advance(60)
        wait_for(lambda: tries == ["done"], "the first try")
        one.call(one.hub.alerts.recheck)
        wait_for(lambda: tries == ["done", "other"], "the second")
        one.hub.alerts._store._next_comparison = 0.0
        one.call(one.hub.alerts.recheck)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


def test_an_alert_that_another_hub_has_just_put_back_stays_open(
    fleet: HubFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = stored.RedisAlerts.read
    with fleet.hub() as one:
        record_violations(one)
        wait_until_idle(one)
        times = [0]

        async def too_early(self: stored.RedisAlerts) -> dict[str, str]:
            found = await read(self)
            times[0] += 1
            return {} if times[0] == 1 else found

        monkeypatch.setattr(stored.RedisAlerts, "read", too_early)
        wait_for(lambda: times[0] > 1, "two looks")
        wait_until_idle(one)
        assert (one.hub.alerts.open, fleet.receiver.events) == (1, [(RAISED, "planner")])
        fleet.clock.advance(60)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")


def test_an_alert_raised_again_during_an_outage_keeps_its_count(impatient_fleet: HubFleet) -> None:
    with impatient_fleet.hub() as one:
        record_violations(one)
        wait_until_idle(one)
        impatient_fleet.server.kill()
        wait_until_away(one)
        record_violations(one)
        wait_until_idle(one)
        assert [alert["times"] for alert in dashboard_alerts(one)] == [2]
        impatient_fleet.server.start()
        wait_until_back(one)
        wait_for(
            lambda: len(impatient_fleet.receiver.heard) == 3, "the end of it, since the server has lost the violations"
        )
        assert [heard.json()["alert"]["times"] for heard in impatient_fleet.receiver.heard] == [1, 2, 2]
        assert impatient_fleet.open == {}


def test_an_alert_raised_again_after_another_hub_resolved_it_is_resolved_again(fleet: HubFleet) -> None:
    with fleet.two_with_an_alert() as (one, other):
        one.hub.alerts._store.is_away = lambda: True
        one.hub.gate.reset_violations("planner")
        other.call(other.hub.alerts.recheck)
        wait_for_comparison(other)
        fleet.clock.advance(2)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it on the other")
        record_violations(one)
        wait_for(lambda: len(fleet.receiver.heard) == 3, "the second")
        one.hub.alerts._store.is_away = lambda: False
        wait_for(lambda: len(fleet.receiver.heard) == 4, "the end of it on the first")
        assert [what for what, _ in fleet.receiver.events] == [RAISED, RESOLVED, RAISED, RESOLVED]
        assert [heard.json()["alert"]["times"] for heard in fleet.receiver.heard] == [1, 1, 2, 2]
        assert len({heard.json()["alert"]["alert_id"] for heard in fleet.receiver.heard}) == 1


def test_an_alert_whose_storing_timed_out_is_stored_once(fleet: HubFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_answer_once(monkeypatch, "put")
    with fleet.two_with_an_alert() as (one, other):
        assert dashboard_alerts(one) == dashboard_alerts(other) == list(fleet.open.values())
        fleet.clock.advance(60)
        wait_until_resolved(one, other)
        wait_for_comparison(one, other)
        assert (one.hub.alerts.resolved, other.hub.alerts.resolved) == (1, 0)
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
