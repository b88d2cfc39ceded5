"""Alerts of one hub: raised at ten violations, resolved after the quiet period."""

import asyncio
import hmac
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from structlog.testing import capture_logs

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.events import Alerted
from headgate.hub.monitoring import alerts as module
from headgate.hub.monitoring.alerts import Alert, Alerts
from headgate.hub.monitoring.denials import DenialLog
from tests.support.alerts import RAISED, RESOLVED, advance, dashboard_alerts, record_violations, wait_until_idle
from tests.support.event_loop import take_turns
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE, wait_for
from tests.support.webhook_receiver import WebhookReceiver

SECRET = "a-secret-of-more-than-16-characters"
pytestmark = pytest.mark.usefixtures("no_proxies", "patient")


@pytest.fixture
def hub(receiver: WebhookReceiver) -> Iterator[HubServer]:
    with hub_server(webhooks=(receiver.url,)) as hub:
        yield hub


# One ------------------------------------------------------------------------------------------------------------------


def test_b8_ten_denials_on_a_real_socket_are_one_alert_and_nine_are_none(receiver: WebhookReceiver) -> None:
    policy = Policy(limits={"light": "1/hour"})
    settings: dict[str, Any] = {"webhooks": (receiver.url,), "webhook_secret": SECRET}
    with capture_logs() as logged, hub_server(policy, **settings) as hub, hub.agent("planner") as wire:
        assert (wire.ask("ping")["type"], wire.hear()["type"]) == ("rate_limit_warning", "pong")
        assert {wire.ask("ping")["type"] for _ in range(9)} == {"rate_limited"}
        wait_until_idle(hub)
        assert (receiver.heard, dashboard_alerts(hub)) == ([], [])
        assert wire.ask("ping")["type"] == "rate_limited"
        wait_for(lambda: receiver.heard, "the alert")
        assert {wire.ask("ping")["type"] for _ in range(5)} == {"rate_limited"}
        wait_until_idle(hub)
        assert receiver.events == [(RAISED, "planner")]
        (heard,) = receiver.heard
        signed = f"{heard.headers['X-Headgate-Timestamp']}.".encode() + heard.body
        signature = hmac.digest(SECRET.encode(), signed, "sha256").hex()
        assert heard.headers["X-Headgate-Signature"] == f"sha256={signature}"
        (alert,) = dashboard_alerts(hub)
        assert alert == {**receiver.heard[0].json()["alert"], "total": 15}
        assert (alert["agent_id"], alert["violations"], alert["within"], alert["times"]) == ("planner", 10, 300.0, 1)
        assert alert["resolved_at"] is None
        with hub.http() as http:
            assert http.get("/api/metrics").json()["alerts"] == 1
    (line,) = [line for line in logged if line["event"] == "many violations"]
    assert (line["log_level"], line["agent"], line["violations"], line["within"]) == ("warning", "planner", 10, 300.0)
    (action,) = alert["actions"]
    assert line["actions"] == [f"ws ping: {action['last_hour']}"]
    assert line["address"] == alert["address"] == "127.0.0.1"


def test_b8_the_log_names_three_denied_actions_and_no_more(hub: HubServer) -> None:
    with capture_logs() as logged:
        for number in (4, 3, 2, 1):
            for _ in range(number):
                hub.run(hub.hub.stats.check("planner", "ws", cost=9999, action=f"{number}" + "x" * 999))
        wait_until_idle(hub)
    (line,) = [line for line in logged if line["event"] == "many violations"]
    assert [text[:5] for text in line["actions"]] == ["ws 4x", "ws 3x", "ws 2x"]
    assert max(map(len, line["actions"])) < 80


def test_a_blocked_agent_raises_no_alert(hub: HubServer, receiver: WebhookReceiver) -> None:
    hub.hub.gate.block("planner")
    record_violations(hub, "planner", 10)
    record_violations(hub, "other", 10)
    wait_until_idle(hub)
    assert receiver.events == [(RAISED, "other")]


def test_b8_violations_from_many_threads_raise_one_alert(hub: HubServer, receiver: WebhookReceiver) -> None:
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(record_violations, hub, "planner", 200) for _ in range(8)]:
            done.result()
    wait_until_idle(hub)
    assert receiver.events == [(RAISED, "planner")]
    assert (hub.hub.alerts.raised, hub.hub.alerts.open, hub.hub.alerts.resolved) == (1, 1, 0)


def test_b8_a_resolved_alert_has_counted_all_violations(hub: HubServer, receiver: WebhookReceiver) -> None:
    record_violations(hub)
    wait_until_idle(hub)
    record_violations(hub, times=5)
    advance(hub, 60)
    raised, resolved = [one.json()["alert"] for one in receiver.heard]
    assert (raised["total"], resolved["total"]) == (10, 15)
    assert dashboard_alerts(hub) == [resolved]


def test_b8_an_open_alert_is_raised_again_only_after_the_window(hub: HubServer, receiver: WebhookReceiver) -> None:
    record_violations(hub)
    for _ in range(29):  # every ten seconds, up to 290
        hub.clock.advance(10)
        record_violations(hub, times=1)
        wait_until_idle(hub)
    hub.clock.advance(9.999999)
    record_violations(hub, times=20)
    wait_until_idle(hub)
    assert receiver.events == [(RAISED, "planner")]
    hub.clock.advance(0.000001)
    record_violations(hub, times=1)
    wait_until_idle(hub)
    assert receiver.events == [(RAISED, "planner")] * 2
    first, second = [one.json()["alert"] for one in receiver.heard]
    assert second == {**first, "times": 2, "total": 60}
    assert dashboard_alerts(hub) == [second]
    assert len({one.headers["X-Headgate-Delivery"] for one in receiver.heard}) == 2
    advance(hub, 60)
    assert receiver.events[2:] == [(RESOLVED, "planner")]
    assert (hub.hub.alerts.raised, hub.hub.alerts.open, hub.hub.alerts.resolved) == (2, 0, 1)


def test_b8_after_a_resolution_the_next_alert_is_a_new_one(hub: HubServer, receiver: WebhookReceiver) -> None:
    record_violations(hub)
    advance(hub, 60)
    record_violations(hub)
    wait_until_idle(hub)
    assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")], "there was one within five minutes"
    hub.clock.advance(240)
    record_violations(hub)
    wait_until_idle(hub)
    assert receiver.events[2:] == [(RAISED, "planner")]
    assert receiver.heard[0].json()["alert"]["alert_id"] != receiver.heard[2].json()["alert"]["alert_id"]
    assert [alert["resolved_at"] is None for alert in dashboard_alerts(hub)] == [True, False], "the newest first"


def test_b8_denials_by_address_raise_no_alert(receiver: WebhookReceiver) -> None:
    policy = Policy(addresses={"limit": "1/hour", "registration": "1/hour"})
    with hub_server(policy, webhooks=(receiver.url,)) as hub, hub.http() as http:
        answers = [http.get("/api/agents").status_code for _ in range(30)]
        answers += [http.post("/api/onboard/register", json={"agent_id": f"a{n}"}).status_code for n in range(30)]
        assert answers.count(429) == 58
        wait_until_idle(hub)
        assert (receiver.heard, hub.hub.alerts.raised, dashboard_alerts(hub)) == ([], 0, [])


def test_agents_have_alerts_of_their_own(hub: HubServer, receiver: WebhookReceiver) -> None:
    strange = '<img src=x onerror=alert(1)>"\\ {alerts}'
    record_violations(hub, strange)
    record_violations(hub, "other")
    wait_until_idle(hub)
    hub.clock.advance(30)
    record_violations(hub, "other", 1)
    advance(hub, 30)
    assert receiver.events == [(RAISED, strange), (RAISED, "other"), (RESOLVED, strange)]


# Resolved -------------------------------------------------------------------------------------------------------------


def test_b8_an_alert_is_resolved_exactly_at_the_end_of_the_quiet_period(
    hub: HubServer, receiver: WebhookReceiver
) -> None:
    began = time.time()
    with capture_logs() as logged:
        record_violations(hub)
        advance(hub, 59.999999)
        assert hub.hub.alerts.open == 1
        advance(hub, 0.000001)
    raised, resolved = [one.json() for one in receiver.heard]
    assert (raised["event"], resolved["event"]) == (RAISED, RESOLVED)
    at = resolved["alert"].pop("resolved_at")
    assert raised["alert"] == {**resolved["alert"], "resolved_at": None}
    assert began <= raised["alert"]["raised_at"] <= at <= time.time(), "by the time of day"
    assert dashboard_alerts(hub) == [{**raised["alert"], "resolved_at": at}]
    events = [(line["event"], line["log_level"]) for line in logged if line.get("agent") == "planner"]
    assert events == [("many violations", "warning"), ("quiet again", "info")]


def test_b8_new_violations_postpone_the_resolution(hub: HubServer, receiver: WebhookReceiver) -> None:
    record_violations(hub)
    wait_until_idle(hub)
    for _ in range(3):
        hub.clock.advance(59.999999)
        record_violations(hub, times=1)
        wait_until_idle(hub)
    advance(hub, 59.999999)
    assert receiver.events == [(RAISED, "planner")]
    advance(hub, 0.000001)
    assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


@pytest.mark.parametrize("way", ["reset", "exempt", "policy"])
def test_b8_an_alert_is_resolved_when_the_admin_resets_or_exempts(
    hub: HubServer, receiver: WebhookReceiver, way: str
) -> None:
    record_violations(hub, "other")
    record_violations(hub)
    wait_until_idle(hub)
    with hub.http(ADMIN) as http:
        if way == "reset":
            assert http.delete("/api/admin/violations/planner").json()["reset"] is True
        elif way == "exempt":
            http.post("/api/admin/rate-limits/whitelist", json={"agent_id": "planner"}).raise_for_status()
        else:
            hub.hub.gate.reload(Policy(exempt=["planner"]))
    wait_for(lambda: len(receiver.heard) == 3, "the end of it")
    wait_until_idle(hub)
    assert receiver.events[2:] == [(RESOLVED, "planner")]
    assert hub.hub.alerts.open == 1


def test_changes_that_forgive_nothing_resolve_no_alert(hub: HubServer, receiver: WebhookReceiver) -> None:
    record_violations(hub)
    hub.hub.gate.add_exemption("other")
    hub.hub.gate.set_override("planner", "light", "5/minute")
    wait_until_idle(hub)
    advance(hub, 60)
    assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


# Bounds ---------------------------------------------------------------------------------------------------------------


def test_open_alerts_are_bounded_and_the_rest_only_logged(
    hub: HubServer, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ALERTS", 3)
    with capture_logs() as logged:
        for number in range(6):
            record_violations(hub, f"agent-{number}")
        wait_until_idle(hub)
        assert (hub.hub.alerts.open, hub.hub.alerts.raised, len(receiver.heard)) == (3, 6, 3)
        events = [line["event"] for line in logged]
        assert events.count("many violations") == 6
        assert sum(event.startswith("too many open alerts") for event in events) == 1
        advance(hub, 60)
        assert len(receiver.heard) == 6
        hub.clock.advance(240)
        for number in range(4):
            record_violations(hub, f"agent-{number}")
        wait_until_idle(hub)
    assert (hub.hub.alerts.open, len(receiver.heard)) == (3, 9)
    assert sum(line["event"].startswith("too many open alerts") for line in logged) == 2


def test_fifty_alerts_are_shown_newest_first(hub: HubServer) -> None:
    for number in range(60):
        record_violations(hub, f"agent-{number}")
    wait_until_idle(hub)
    assert [alert["agent_id"] for alert in dashboard_alerts(hub)] == [
        f"agent-{number}" for number in reversed(range(10, 60))
    ]
    advance(hub, 60)
    assert hub.hub.alerts.resolved == 60
    assert [alert["agent_id"] for alert in dashboard_alerts(hub)] == [
        f"agent-{number}" for number in reversed(range(10, 60))
    ]
    assert all(alert["resolved_at"] for alert in dashboard_alerts(hub))


def test_an_alert_that_is_raised_again_is_the_newest(hub: HubServer) -> None:
    record_violations(hub, "one")
    record_violations(hub, "other")
    for _ in range(6):
        hub.clock.advance(50)
        record_violations(hub, "one", 2)
        record_violations(hub, "other", 1)
    wait_until_idle(hub)
    assert [(alert["agent_id"], alert["times"]) for alert in dashboard_alerts(hub)] == [("one", 2), ("other", 1)]


# A receiver that is away ----------------------------------------------------------------------------------------------


def test_b8_a_receiver_down_for_a_minute_gets_the_alert_later_while_checks_go_on() -> None:
    policy = Policy(limits={"light": "100/minute"})
    with (
        unused_port() as port,
        hub_server(policy, webhooks=(f"http://127.0.0.1:{port}/alerts",)) as hub,
        hub.agent("other") as wire,
    ):
        record_violations(hub)
        wait_for(lambda: hub.hub.alerts.open, "the alert")
        answers = []
        for _ in range(60):
            hub.clock.advance(1)
            answers.append(wire.ask("ping")["type"])
        assert answers == ["pong"] * 60
        webhooks = hub.hub.webhooks
        wait_for(lambda: webhooks.waiting == 2, "the end of it")
        assert (webhooks.delivered, webhooks.failed, webhooks.dropped) == (0, 0, 0)

        def delivered() -> bool:
            hub.clock.advance(1)
            return webhooks.delivered == 2

        with WebhookReceiver(port) as receiver:
            wait_for(delivered, "both")
            assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


def test_b8_an_alert_waits_for_no_receiver_and_a_check_for_no_alert(receiver: WebhookReceiver) -> None:
    receiver.answers.append(receiver.hang)
    policy = Policy(limits={"light": "1/hour"})
    with hub_server(policy, webhooks=(receiver.url,), shutdown_within=0.1) as hub, hub.agent("planner") as wire:
        for _ in range(12):
            wire.say("ping")
        heard = [wire.hear()["type"] for _ in range(13)]
        assert heard.count("rate_limited") == 11
        wait_for(lambda: receiver.heard, "the request that hangs")
        record_violations(hub, "other")
        wait_for(lambda: len(dashboard_alerts(hub)) == 2, "the other alert")
        assert wire.ask("ping")["type"] == "rate_limited"


def test_queued_notifications_are_tried_once_more_when_the_hub_stops(receiver: WebhookReceiver) -> None:
    receiver.answers.append(503)
    with hub_server(webhooks=(receiver.url,), shutdown_within=PATIENCE) as hub:
        record_violations(hub)
        wait_for(lambda: receiver.heard, "the first try")
    assert receiver.events == [(RAISED, "planner")] * 2


def test_queued_notifications_are_sent_at_once_when_the_hub_drains(receiver: WebhookReceiver) -> None:
    receiver.answers.append(503)
    with hub_server(webhooks=(receiver.url,)) as hub:
        record_violations(hub)
        wait_for(lambda: receiver.heard, "the first try")
        hub.run(hub.hub.drain())
        wait_for(lambda: hub.hub.webhooks.delivered == 1, "the second, without a wait")


def test_alerts_come_from_any_thread_and_are_processed_in_the_loop() -> None:
    async def walk() -> None:
        clock, sent, done = ManualClock(start=1000), [], asyncio.Event()
        gate = Gate(store=MemoryStore(clock=clock))
        here = threading.current_thread()

        def send(what: str, alert: Alert) -> None:
            assert threading.current_thread() is here
            sent.append((what, alert.agent_id))
            done.set()

        alerts = Alerts(gate, clock, DenialLog(clock), send)
        gate.subscribe(lambda event: alerts.on_alert(event) if isinstance(event, Alerted) else None)
        await alerts.start()
        await asyncio.sleep(0)  # it rests now
        await asyncio.to_thread(lambda: [gate.record_violation("planner") for _ in range(10)])
        await asyncio.wait_for(done.wait(), PATIENCE)
        assert sent == [(RAISED, "planner")]
        await alerts.close()
        clock.advance(60)
        await take_turns(5)
        assert (sent, alerts._due) == ([(RAISED, "planner")], {})
        await alerts.close()

    with capture_logs():
        asyncio.run(walk(), debug=True)  # a loop that minds who calls it
