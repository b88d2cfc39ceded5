"""Alerts: one for ten violations, one for the fleet, resolved when the agent has been quiet."""

import asyncio
import hmac
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hubs import ADMIN, Running, running
from programs import program
from receivers import Receiver
from servers import PATIENCE, Server, cluster, free_port, wait_for
from structlog.testing import capture_logs

from headgate import Gate, ManualClock, MemoryStore, Policy, RedisStore, StoreAway
from headgate.events import Alerted
from headgate.hub import alerts as module
from headgate.hub.alerts import Alert, Alerts
from headgate.stores.redis import alerts as stored
from headgate.stores.redis.connecting import Clients

SECRET = "a-secret-of-more-than-16-characters"
RAISED, RESOLVED = "alert.raised", "alert.resolved"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def hub(receiver: Receiver) -> Iterator[Running]:
    with running(webhooks=(receiver.url,)) as hub:
        yield hub


def offend(hub: Running, agent: str = "planner", times: int = 10) -> None:
    for _ in range(times):
        hub.hub.gate.record_violation(agent)


def settled(hub: Running) -> None:
    """Wait until the hub has done what is to be done with alerts."""

    def idle() -> bool:
        alerts = hub.hub.alerts
        rests = bool(alerts._wake._waiters) and not alerts._wake.is_set()
        return rests and not alerts._news and not alerts._due and not hub.hub.webhooks.waiting

    for _ in range(3):  # one thing may bring another
        wait_for(lambda: hub.call(idle), "the hub to have nothing to do")


def shown(hub: Running) -> list[dict[str, Any]]:
    """The alerts on the dashboard."""
    with hub.http(ADMIN) as http:
        found: list[dict[str, Any]] = http.get("/api/dashboard/state").json()["alerts"]
        return found


# One ------------------------------------------------------------------------------------------------------------------


def test_b8_ten_denials_on_a_real_socket_are_one_alert_and_nine_are_none(receiver: Receiver) -> None:
    policy = Policy(limits={"light": "1/hour"})
    settings: dict[str, Any] = {"webhooks": (receiver.url,), "webhook_secret": SECRET}
    with capture_logs() as logged, running(policy, **settings) as hub, hub.agent("planner") as wire:
        assert (wire.ask("ping")["type"], wire.hear()["type"]) == ("rate_limit_warning", "pong")
        assert {wire.ask("ping")["type"] for _ in range(9)} == {"rate_limited"}
        settled(hub)
        assert (receiver.heard, shown(hub)) == ([], [])
        assert wire.ask("ping")["type"] == "rate_limited"
        wait_for(lambda: receiver.heard, "the alert")
        assert {wire.ask("ping")["type"] for _ in range(5)} == {"rate_limited"}
        settled(hub)
        assert receiver.events == [(RAISED, "planner")]
        (heard,) = receiver.heard
        signed = f"{heard.headers['X-Headgate-Timestamp']}.".encode() + heard.body
        signature = hmac.digest(SECRET.encode(), signed, "sha256").hex()
        assert heard.headers["X-Headgate-Signature"] == f"sha256={signature}"
        (alert,) = shown(hub)
        assert alert == receiver.heard[0].json()["alert"]
        assert (alert["agent_id"], alert["violations"], alert["within"], alert["times"]) == ("planner", 10, 300.0, 1)
        assert alert["resolved_at"] is None
        with hub.http() as http:
            assert http.get("/api/metrics").json()["alerts"] == 1
    (line,) = [line for line in logged if line["event"] == "many violations"]
    assert (line["log_level"], line["agent"], line["violations"], line["within"]) == ("warning", "planner", 10, 300.0)


def test_b8_a_storm_from_many_threads_is_one_alert(hub: Running, receiver: Receiver) -> None:
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(offend, hub, "planner", 200) for _ in range(8)]:
            done.result()
    settled(hub)
    assert receiver.events == [(RAISED, "planner")]
    assert (hub.hub.alerts.raised, hub.hub.alerts.open, hub.hub.alerts.resolved) == (1, 1, 0)


def test_b8_a_second_one_only_after_the_window_and_it_is_the_same_alert(hub: Running, receiver: Receiver) -> None:
    offend(hub)
    for _ in range(29):  # every ten seconds, up to 290
        hub.clock.advance(10)
        offend(hub, times=1)
        settled(hub)
    hub.clock.advance(9.999999)
    offend(hub, times=20)
    settled(hub)
    assert receiver.events == [(RAISED, "planner")]
    hub.clock.advance(0.000001)
    offend(hub, times=1)
    settled(hub)
    assert receiver.events == [(RAISED, "planner")] * 2
    first, second = [one.json()["alert"] for one in receiver.heard]
    assert second == {**first, "times": 2}
    assert shown(hub) == [second]
    assert len({one.headers["X-Headgate-Delivery"] for one in receiver.heard}) == 2
    hub.clock.advance(60)
    settled(hub)
    assert receiver.events[2:] == [(RESOLVED, "planner")]
    assert (hub.hub.alerts.raised, hub.hub.alerts.open, hub.hub.alerts.resolved) == (2, 0, 1)


def test_b8_after_it_was_resolved_the_next_is_another_alert(hub: Running, receiver: Receiver) -> None:
    offend(hub)
    hub.clock.advance(60)
    settled(hub)
    offend(hub)
    settled(hub)
    assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")], "there was one within five minutes"
    hub.clock.advance(240)
    offend(hub)
    settled(hub)
    assert receiver.events[2:] == [(RAISED, "planner")]
    assert receiver.heard[0].json()["alert"]["alert_id"] != receiver.heard[2].json()["alert"]["alert_id"]
    assert [alert["resolved_at"] is None for alert in shown(hub)] == [True, False], "the newest first"


def test_b8_denials_by_address_raise_none(receiver: Receiver) -> None:
    policy = Policy(addresses={"limit": "1/hour", "registration": "1/hour"})
    with running(policy, webhooks=(receiver.url,)) as hub, hub.http() as http:
        answers = [http.get("/api/agents").status_code for _ in range(30)]
        answers += [http.post("/api/onboard/register", json={"agent_id": f"a{n}"}).status_code for n in range(30)]
        assert answers.count(429) == 58
        settled(hub)
        assert (receiver.heard, hub.hub.alerts.raised, shown(hub)) == ([], 0, [])


def test_agents_have_alerts_of_their_own(hub: Running, receiver: Receiver) -> None:
    strange = '<img src=x onerror=alert(1)>"\\ {alerts}'
    offend(hub, strange)
    offend(hub, "other")
    settled(hub)
    hub.clock.advance(30)
    offend(hub, "other", 1)
    hub.clock.advance(30)
    settled(hub)
    assert receiver.events == [(RAISED, strange), (RAISED, "other"), (RESOLVED, strange)]


# Resolved -------------------------------------------------------------------------------------------------------------


def test_b8_it_is_resolved_at_the_end_of_the_quiet_period_and_not_before(hub: Running, receiver: Receiver) -> None:
    with capture_logs() as logged:
        offend(hub)
        hub.clock.advance(59.999999)
        settled(hub)
        assert hub.hub.alerts.open == 1
        hub.clock.advance(0.000001)
        settled(hub)
    raised, resolved = [one.json() for one in receiver.heard]
    assert (raised["event"], resolved["event"]) == (RAISED, RESOLVED)
    at = resolved["alert"].pop("resolved_at")
    assert raised["alert"] == {**resolved["alert"], "resolved_at": None}
    assert 0 <= at - raised["alert"]["raised_at"] < 20, "by the time of day"
    assert shown(hub) == [{**raised["alert"], "resolved_at": at}]
    events = [(line["event"], line["log_level"]) for line in logged if line.get("agent") == "planner"]
    assert events == [("many violations", "warning"), ("quiet again", "info")]


def test_b8_with_new_violations_it_is_resolved_later(hub: Running, receiver: Receiver) -> None:
    offend(hub)
    settled(hub)
    for _ in range(3):
        hub.clock.advance(59.999999)
        offend(hub, times=1)
        settled(hub)
    hub.clock.advance(59.999999)
    settled(hub)
    assert receiver.events == [(RAISED, "planner")]
    hub.clock.advance(0.000001)
    settled(hub)
    assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


@pytest.mark.parametrize("way", ["reset", "exempt", "policy"])
def test_b8_it_is_resolved_when_the_admin_forgives(hub: Running, receiver: Receiver, way: str) -> None:
    offend(hub, "other")
    offend(hub)
    settled(hub)
    with hub.http(ADMIN) as http:
        if way == "reset":
            assert http.delete("/api/admin/violations/planner").json()["reset"] is True
        elif way == "exempt":
            http.post("/api/admin/rate-limits/whitelist", json={"agent_id": "planner"}).raise_for_status()
        else:
            hub.hub.gate.reload(Policy(exempt=["planner"]))
    wait_for(lambda: len(receiver.heard) == 3, "the end of it")
    settled(hub)
    assert receiver.events[2:] == [(RESOLVED, "planner")]
    assert hub.hub.alerts.open == 1


def test_what_is_set_for_others_resolves_nothing(hub: Running, receiver: Receiver) -> None:
    offend(hub)
    hub.hub.gate.add_exemption("other")
    hub.hub.gate.set_override("planner", "light", "5/minute")
    settled(hub)
    hub.clock.advance(60)
    settled(hub)
    assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


# Bounds ---------------------------------------------------------------------------------------------------------------


def test_so_many_are_open_and_the_others_are_only_logged(
    hub: Running, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    with capture_logs() as logged:
        for number in range(6):
            offend(hub, f"agent-{number}")
        settled(hub)
        assert (hub.hub.alerts.open, hub.hub.alerts.raised, len(receiver.heard)) == (3, 6, 3)
        events = [line["event"] for line in logged]
        assert events.count("many violations") == 6
        assert sum(event.startswith("too many open alerts") for event in events) == 1
        hub.clock.advance(60)
        settled(hub)
        assert len(receiver.heard) == 6
        hub.clock.advance(240)
        for number in range(4):
            offend(hub, f"agent-{number}")
        settled(hub)
    assert (hub.hub.alerts.open, len(receiver.heard)) == (3, 9)
    assert sum(line["event"].startswith("too many open alerts") for line in logged) == 2


def test_fifty_are_shown_the_newest_first(hub: Running) -> None:
    for number in range(60):
        offend(hub, f"agent-{number}")
    settled(hub)
    assert [alert["agent_id"] for alert in shown(hub)] == [f"agent-{number}" for number in reversed(range(10, 60))]
    hub.clock.advance(60)
    settled(hub)
    assert hub.hub.alerts.resolved == 60
    assert [alert["agent_id"] for alert in shown(hub)] == [f"agent-{number}" for number in reversed(range(10, 60))]
    assert all(alert["resolved_at"] for alert in shown(hub))


def test_one_that_is_raised_again_is_the_newest(hub: Running) -> None:
    offend(hub, "one")
    offend(hub, "other")
    for _ in range(6):
        hub.clock.advance(50)
        offend(hub, "one", 2)
        offend(hub, "other", 1)
    settled(hub)
    assert [(alert["agent_id"], alert["times"]) for alert in shown(hub)] == [("one", 2), ("other", 1)]


def test_followers_hear_of_each_and_one_that_fails_harms_nobody(hub: Running, receiver: Receiver) -> None:
    heard: list[tuple[threading.Thread, Alert]] = []

    def fails(_alert: Alert) -> None:
        raise KeyError("something")

    with capture_logs() as logged:
        hub.call(hub.hub.alerts.follow, fails)
        hub.call(hub.hub.alerts.follow, lambda alert: heard.append((threading.current_thread(), alert)))
        offend(hub)
        settled(hub)
        hub.clock.advance(60)
        settled(hub)
    assert [(alert.agent_id, alert.resolved_at is None) for _, alert in heard] == [
        ("planner", True),
        ("planner", False),
    ]
    assert {thread.name for thread, _ in heard} == {"uvicorn"}, "in the hub's loop"
    assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
    assert [line["event"] for line in logged].count("an alert could not be shown") == 2


# A receiver that is away ----------------------------------------------------------------------------------------------


def test_b8_a_receiver_that_is_down_for_a_minute_gets_it_once_it_is_back_and_checks_go_on() -> None:
    port = free_port()
    policy = Policy(limits={"light": "100/minute"})
    with running(policy, webhooks=(f"http://127.0.0.1:{port}/alerts",)) as hub, hub.agent("other") as wire:
        offend(hub)
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

        with Receiver(port) as receiver:
            wait_for(delivered, "both")
            assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


def test_b8_an_alert_waits_for_no_receiver_and_a_check_for_no_alert(receiver: Receiver) -> None:
    receiver.answers.append(receiver.hang)
    policy = Policy(limits={"light": "1/hour"})
    with running(policy, webhooks=(receiver.url,), shutdown_within=0.1) as hub, hub.agent("planner") as wire:
        for _ in range(12):
            wire.say("ping")
        heard = [wire.hear()["type"] for _ in range(13)]
        assert heard.count("rate_limited") == 11
        wait_for(lambda: receiver.heard, "the request that hangs")
        offend(hub, "other")
        wait_for(lambda: len(shown(hub)) == 2, "the other alert")
        assert wire.ask("ping")["type"] == "rate_limited"


def test_when_the_hub_stops_what_waits_is_tried_once_more(receiver: Receiver) -> None:
    receiver.answers.append(503)
    with running(webhooks=(receiver.url,)) as hub:
        offend(hub)
        wait_for(lambda: receiver.heard, "the first try")
    assert receiver.events == [(RAISED, "planner")] * 2


def test_that_begins_when_the_hub_says_goodbye(receiver: Receiver) -> None:
    receiver.answers.append(503)
    with running(webhooks=(receiver.url,)) as hub:
        offend(hub)
        wait_for(lambda: receiver.heard, "the first try")
        hub.run(hub.hub.drain())
        wait_for(lambda: hub.hub.webhooks.delivered == 1, "the second, without a wait")


def test_alerts_come_from_any_thread_and_are_worked_out_in_the_loop() -> None:
    async def walk() -> None:
        clock, sent, done = ManualClock(start=1000), [], asyncio.Event()
        gate = Gate(store=MemoryStore(clock=clock))
        here = threading.current_thread()

        def send(what: str, alert: Alert) -> None:
            assert threading.current_thread() is here
            sent.append((what, alert.agent_id))
            done.set()

        alerts = Alerts(gate, clock, send)
        gate.subscribe(lambda event: alerts.hear(event) if isinstance(event, Alerted) else None)
        await alerts.start()
        await asyncio.sleep(0)  # it rests now
        await asyncio.to_thread(lambda: [gate.record_violation("planner") for _ in range(10)])
        await asyncio.wait_for(done.wait(), PATIENCE)
        assert sent == [(RAISED, "planner")]
        await alerts.close()
        clock.advance(60)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (sent, alerts._due) == ([(RAISED, "planner")], {})
        await alerts.close()

    with capture_logs():
        asyncio.run(walk(), debug=True)  # a loop that minds who calls it


# The fleet ------------------------------------------------------------------------------------------------------------


class Fleet:
    """Hubs that share a server, a clock and a receiver."""

    def __init__(self, server: Server, receiver: Receiver) -> None:
        self.server, self.receiver = server, receiver
        self.clock = ManualClock(start=1000)
        self.prefix = f"fleet-{uuid4().hex}:"

    @contextmanager
    def hub(self, **settings: Any) -> Iterator[Running]:
        with (
            RedisStore(self.server.url, prefix=self.prefix, clock=self.clock, timeout=5) as store,
            running(store=store, webhooks=(self.receiver.url,), **settings) as hub,
        ):
            yield hub

    @property
    def open(self) -> dict[str, Any]:
        """What stands in the server."""
        with self.server.client(decode_responses=True) as client:
            found: Any = client.hgetall(f"{self.prefix}{{alerts}}a1:open")
            return {agent: json.loads(text) for agent, text in found.items()}


@pytest.fixture
def fleet(redis_server: Server, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(module, "_EVERY", 0.02)
    return Fleet(redis_server, receiver)


def compared(*hubs: Running) -> None:
    """Wait until hubs have looked at the server after now, and done what came of it."""
    for hub in hubs:
        for _ in range(2):
            before = hub.hub.alerts._next_look
            wait_for(lambda: hub.hub.alerts._next_look > before, "a look at the server")  # noqa: B023
        settled(hub)


def test_b8_one_for_the_fleet_shown_by_all_and_resolved_once(fleet: Fleet) -> None:
    with fleet.hub() as one, fleet.hub() as other:
        for _ in range(10):
            offend(one, times=1)
            offend(other, times=1)
        wait_for(lambda: len(shown(one)) == len(shown(other)) == 1, "the alert on both")
        compared(one, other)
        assert shown(one) == shown(other) == [fleet.receiver.heard[0].json()["alert"]]
        assert fleet.open == {"planner": shown(one)[0]}
        assert one.hub.alerts.raised + other.hub.alerts.raised == 1
        fleet.clock.advance(59.999999)
        compared(one, other)
        assert one.hub.alerts.open == other.hub.alerts.open == 1
        fleet.clock.advance(0.000001)
        wait_for(lambda: not one.hub.alerts.open and not other.hub.alerts.open, "the end of it")
        fleet.clock.advance(10)
        compared(one, other)
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
        assert one.hub.alerts.resolved + other.hub.alerts.resolved == 1
        assert shown(one) == shown(other) == [fleet.receiver.heard[1].json()["alert"]]
        assert fleet.open == {}


@pytest.mark.parametrize("patience", [2_000_000, 0])
def test_b8_of_many_alerts_on_many_hubs_each_is_raised_and_resolved_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", patience)
    agents = [f"agent-{number}" for number in range(20)]
    with fleet.hub() as one, fleet.hub() as two, fleet.hub() as three:
        hubs = [one, two, three]
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(offend, hub, agent) for agent in agents for hub in hubs]:
                done.result()
        wait_for(lambda: all(hub.hub.alerts.open == 20 for hub in hubs), "all of them on all hubs")
        fleet.clock.advance(60)
        wait_for(lambda: len(fleet.receiver.heard) == 40, "all")
        compared(*hubs)
        fleet.clock.advance(10)
        compared(*hubs)
        assert sorted(fleet.receiver.events) == sorted((what, agent) for agent in agents for what in (RAISED, RESOLVED))
        for agent in agents:
            assert [what for what, who in fleet.receiver.events if who == agent] == [RAISED, RESOLVED]
        assert sum(hub.hub.alerts.resolved for hub in hubs) == 20


def test_b8_when_the_hub_that_raised_it_has_gone_another_resolves_it(fleet: Fleet) -> None:
    with fleet.hub() as other:
        with fleet.hub() as one:
            offend(one)
            wait_for(lambda: other.hub.alerts.open, "the alert on the other")
        fleet.clock.advance(60)
        compared(other)
        fleet.clock.advance(1.999999)
        compared(other)
        assert fleet.receiver.events == [(RAISED, "planner")]
        offend(other, times=1)
        fleet.clock.advance(0.000001)
        compared(other)
        fleet.clock.advance(59.999999)
        compared(other)
        fleet.clock.advance(1.999999)
        compared(other)
        assert fleet.receiver.events == [(RAISED, "planner")], "it was not quiet after all"
        fleet.clock.advance(0.000001)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
        assert (other.hub.alerts.raised, other.hub.alerts.resolved) == (0, 1)


def test_b8_a_hub_that_starts_finds_what_is_open(fleet: Fleet) -> None:
    with fleet.hub() as one:
        offend(one)
        settled(one)
    with fleet.hub() as later:
        wait_for(lambda: later.hub.alerts.open, "the alert")
        assert shown(later) == [fleet.receiver.heard[0].json()["alert"]]
        fleet.clock.advance(61)
        compared(later)
        fleet.clock.advance(1)  # patience counts from when it was found to be quiet
        compared(later)
        assert fleet.receiver.events == [(RAISED, "planner")]
        fleet.clock.advance(1)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")


def test_a_second_one_by_another_hub_is_the_same_alert(fleet: Fleet) -> None:
    with fleet.hub() as one, fleet.hub() as other:
        offend(one)
        wait_for(lambda: other.hub.alerts.open, "the alert on the other")
        for _ in range(30):
            fleet.clock.advance(10)
            offend(other, times=1)
        wait_for(lambda: [alert["times"] for alert in shown(one)] == [2], "the second on the first hub")
        compared(one, other)
        first, second = [heard.json()["alert"] for heard in fleet.receiver.heard]
        assert second == {**first, "times": 2}
        assert (one.hub.alerts.raised, other.hub.alerts.raised) == (1, 1)
        fleet.clock.advance(60)
        wait_for(lambda: not one.hub.alerts.open and not other.hub.alerts.open, "the end of it")
        assert (one.hub.alerts.resolved, other.hub.alerts.resolved) == (0, 1), "by the one that has raised it last"
        assert fleet.receiver.events == [(RAISED, "planner")] * 2 + [(RESOLVED, "planner")]


def test_a_second_one_by_a_hub_that_has_not_heard_of_the_first_is_the_same_alert(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EVERY", 3600.0)
    with fleet.hub() as one, fleet.hub() as other:
        settled(other)
        offend(one)
        settled(one)
        assert (one.hub.alerts.open, other.hub.alerts.open) == (1, 0)
        other.hub.alerts.hear(Alerted("planner", 10, 300.0))
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the second")
        first, second = [heard.json()["alert"] for heard in fleet.receiver.heard]
        assert second == {**first, "times": 2}
        assert list(fleet.open.values()) == shown(other) == [second]


@pytest.mark.parametrize("way", ["reset", "exempt"])
def test_b8_when_the_admin_forgives_on_another_hub_it_is_resolved_once(fleet: Fleet, way: str) -> None:
    with fleet.hub() as one, fleet.hub() as other:
        offend(one)
        wait_for(lambda: other.hub.alerts.open, "the alert on the other")
        with other.http(ADMIN) as http:
            if way == "reset":
                http.delete("/api/admin/violations/planner").raise_for_status()
            else:
                http.post("/api/admin/rate-limits/whitelist", json={"agent_id": "planner"}).raise_for_status()
                wait_for(lambda: one.hub.gate.is_exempt("planner"), "the exemption on the first")
        compared(one, other)
        fleet.clock.advance(2)
        wait_for(lambda: not one.hub.alerts.open and not other.hub.alerts.open, "the end of it")
        fleet.clock.advance(60)
        compared(one, other)
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


def test_so_many_are_open_in_the_fleet(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST", 3)
    with capture_logs() as logged, fleet.hub() as one, fleet.hub() as other:
        for number in range(6):
            offend(one if number % 2 else other, f"agent-{number}")
        compared(one, other)
        assert (one.hub.alerts.open, other.hub.alerts.open, len(fleet.open)) == (3, 3, 3)
        assert (one.hub.alerts.raised, other.hub.alerts.raised, len(fleet.receiver.heard)) == (3, 3, 3)
        assert any(line["event"].startswith("too many open alerts") for line in logged)


def test_nothing_of_it_stays_for_ever(fleet: Fleet) -> None:
    with fleet.hub() as one, fleet.server.client() as client:
        offend(one)
        offend(one, "other")
        settled(one)
        one.hub.gate.reset_violations("planner")
        one.call(one.hub.alerts.look_again)
        wait_for(lambda: one.hub.alerts.resolved == 1, "the end of it")
        keys = list(client.scan_iter(match=f"{fleet.prefix}{{alerts}}*", count=1000))
        (ended,) = [key for key in keys if b"ended" in key]
        assert sorted(keys) == sorted([f"{fleet.prefix}{{alerts}}a1:open".encode(), ended])
        assert all(86_000 < client.ttl(key) <= 86_400 for key in keys)
        assert ended.decode().endswith(f":ended:{fleet.receiver.heard[0].json()['alert']['alert_id']}")


def test_what_is_not_ours_in_the_server_harms_nothing(fleet: Fleet) -> None:
    key = f"{fleet.prefix}{{alerts}}a1:open"
    with fleet.server.client() as client:
        alert = {"alert_id": "x", "agent_id": "somebody else", "violations": 1, "within": 1, "raised_at": 1}
        strange = {"planner": "nonsense", "b": "{}", "c": "[1]", "d": json.dumps(alert)}
        client.hset(key, mapping=strange)
        with fleet.hub() as one:
            compared(one)
            assert one.hub.alerts.open == 0
            offend(one)
            settled(one)
            fleet.clock.advance(60)
            settled(one)
            assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
        assert client.hget(key, "planner") == b"nonsense"
        client.delete(key)
        client.set(key, "no hash")
        with fleet.hub() as one:
            fleet.clock.advance(300)
            offend(one)
            settled(one)
            assert fleet.receiver.events[2:] == [(RAISED, "planner")]


def test_what_a_later_version_has_added_is_passed_over(fleet: Fleet) -> None:
    with fleet.hub() as one, fleet.server.client() as client:
        offend(one)
        settled(one)
        (alert,) = fleet.open.values()
        key = f"{fleet.prefix}{{alerts}}a1:open"
        client.hset(key, "planner", json.dumps({**alert, "mood": "bad"}))
        compared(one)
        fleet.clock.advance(62)
        compared(one)
        fleet.clock.advance(2)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")
        assert fleet.open == {}


# A server that is away ------------------------------------------------------------------------------------------------


@pytest.fixture
def shaky(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(module, "_EVERY", 0.02)
    monkeypatch.setattr("headgate.hub.hub._LOOK_EVERY", 0.02)
    with Server() as server:
        yield Fleet(server, receiver)


def away(*hubs: Running) -> None:
    wait_for(lambda: all(hub.hub.degraded for hub in hubs), "the hubs to miss the server")


def back(*hubs: Running) -> None:
    wait_for(lambda: not any(hub.hub.degraded for hub in hubs), "the hubs to find the server")


def test_b8_without_the_server_a_hub_goes_by_what_it_knows(shaky: Fleet) -> None:
    with shaky.hub() as one, shaky.hub() as other:
        shaky.server.kill()
        away(one, other)
        offend(one)
        settled(one)
        assert [alert["agent_id"] for alert in shown(one)] == ["planner"]
        assert other.hub.alerts.open == 0
        shaky.clock.advance(60)
        settled(one)
        assert shaky.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


def test_b8_what_is_open_when_the_server_goes_is_resolved_once_when_it_is_back(shaky: Fleet) -> None:
    """It has lost everything meanwhile, as a server without a disk does."""
    with shaky.hub() as one, shaky.hub() as other:
        offend(one)
        offend(one, "other")
        wait_for(lambda: other.hub.alerts.open == 2, "the alerts on the other")
        shaky.server.kill()
        away(one, other)
        shaky.clock.advance(70)
        settled(one)
        settled(other)
        assert (one.hub.alerts.open, other.hub.alerts.open) == (2, 2), "nobody knows whether the other resolves it"
        shaky.server.start()
        back(one, other)
        for _ in range(3):
            compared(one, other)
            shaky.clock.advance(2)
        wait_for(lambda: not one.hub.alerts.open and not other.hub.alerts.open, "the end of it")
        compared(one, other)
        raised = [(RAISED, "planner"), (RAISED, "other")]
        assert shaky.receiver.events[:2] == raised
        assert sorted(shaky.receiver.events[2:]) == [(RESOLVED, "other"), (RESOLVED, "planner")]


def test_what_a_hub_counts_itself_resolves_nothing_that_is_in_the_server(fleet: Fleet) -> None:
    with fleet.hub() as one:
        offend(one)
        settled(one)
        one.hub.alerts._away = lambda: True
        one.hub.gate.reset_violations("planner")
        one.call(one.hub.alerts.look_again)
        settled(one)
        assert (one.hub.alerts.open, list(fleet.open)) == (1, ["planner"])
        one.hub.alerts._away = lambda: False
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")


def test_one_that_was_raised_without_the_server_is_renewed_in_it(shaky: Fleet) -> None:
    with shaky.hub() as one, shaky.hub() as other:
        shaky.server.kill()
        away(one, other)
        offend(one)
        offend(other)
        settled(one)
        settled(other)
        mine, theirs = shown(one)[0]["alert_id"], shown(other)[0]["alert_id"]
        shaky.server.start()
        back(one, other)
        offend(one)
        wait_for(lambda: "planner" in shaky.open, "it in the server")
        compared(one, other)
        assert [(alert["alert_id"], alert["times"]) for alert in shown(one)] == [(mine, 2)]
        assert [alert["alert_id"] for alert in shown(other) if alert["resolved_at"] is None] == [mine]
        assert [alert["alert_id"] for alert in shown(other) if alert["resolved_at"]] == [theirs]
        said = [(one.json()["event"], one.json()["alert"]["alert_id"]) for one in shaky.receiver.heard]
        assert sorted(said) == sorted([(RAISED, mine), (RAISED, theirs), (RAISED, mine), (RESOLVED, theirs)])


@pytest.mark.parametrize("done", [True, False])
def test_b8_a_removal_that_timed_out_is_told_once_whether_or_not_it_was_done(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    end = stored.RedisAlerts.end
    failures = [True]

    async def unheard(self: stored.RedisAlerts, *words: str) -> Any:
        fails = bool(failures) and failures.pop()
        answer = await end(self, *words) if done or not fails else ("done", "")
        if fails:
            raise StoreAway("no answer in time")
        return answer

    monkeypatch.setattr(stored.RedisAlerts, "end", unheard)
    with fleet.hub() as one, fleet.hub() as other:
        offend(one)
        wait_for(lambda: other.hub.alerts.open, "the alert on the other")
        fleet.clock.advance(60)
        wait_for(lambda: not one.hub.alerts.open and not other.hub.alerts.open, "the end of it")
        fleet.clock.advance(10)
        compared(one, other)
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
        assert failures == []


def test_b8_a_removal_that_was_tried_twice_unheard_is_told_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    end = stored.RedisAlerts.end
    tries: list[str] = []

    async def unheard(self: stored.RedisAlerts, *words: str) -> Any:
        outcome, _ = await end(self, *words)
        tries.append(outcome)
        raise StoreAway("no answer in time")

    monkeypatch.setattr(stored.RedisAlerts, "end", unheard)
    monkeypatch.setattr(module, "_EVERY", 3600.0)
    with fleet.hub() as one:
        offend(one)
        settled(one)
        fleet.clock.advance(60)
        wait_for(lambda: tries == ["done"], "the first try")
        one.call(one.hub.alerts.look_again)
        wait_for(lambda: tries == ["done", "other"], "the second")
        one.hub.alerts._next_look = 0.0
        one.call(one.hub.alerts.look_again)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


def test_one_that_another_hub_has_just_put_back_goes_on(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    read = stored.RedisAlerts.read
    with fleet.hub() as one:
        offend(one)
        settled(one)
        times = [0]

        async def too_early(self: stored.RedisAlerts) -> dict[str, str]:
            found = await read(self)
            times[0] += 1
            return {} if times[0] == 1 else found

        monkeypatch.setattr(stored.RedisAlerts, "read", too_early)
        wait_for(lambda: times[0] > 1, "two looks")
        settled(one)
        assert (one.hub.alerts.open, fleet.receiver.events) == (1, [(RAISED, "planner")])
        fleet.clock.advance(60)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")


def test_one_that_was_raised_again_without_the_server_is_put_back_as_it_is(shaky: Fleet) -> None:
    with shaky.hub() as one:
        offend(one)
        settled(one)
        shaky.server.kill()
        away(one)
        offend(one)
        settled(one)
        assert [alert["times"] for alert in shown(one)] == [2]
        shaky.server.start()
        back(one)
        wait_for(lambda: len(shaky.receiver.heard) == 3, "the end of it, since the server has lost the violations")
        assert [heard.json()["alert"]["times"] for heard in shaky.receiver.heard] == [1, 2, 2]
        assert shaky.open == {}


def test_one_that_was_raised_again_after_others_have_resolved_it_is_resolved_again(fleet: Fleet) -> None:
    with fleet.hub() as one, fleet.hub() as other:
        offend(one)
        wait_for(lambda: other.hub.alerts.open, "the alert on the other")
        one.hub.alerts._away = lambda: True
        one.hub.gate.reset_violations("planner")
        other.call(other.hub.alerts.look_again)
        compared(other)
        fleet.clock.advance(2)
        wait_for(lambda: other.hub.alerts.resolved, "the end of it on the other")
        offend(one)
        wait_for(lambda: len(fleet.receiver.heard) == 3, "the second")
        one.hub.alerts._away = lambda: False
        wait_for(lambda: len(fleet.receiver.heard) == 4, "the end of it on the first")
        assert [what for what, _ in fleet.receiver.events] == [RAISED, RESOLVED, RAISED, RESOLVED]
        assert [heard.json()["alert"]["times"] for heard in fleet.receiver.heard] == [1, 1, 2, 2]
        assert len({heard.json()["alert"]["alert_id"] for heard in fleet.receiver.heard}) == 1


def test_one_that_was_raised_unheard_stands_in_the_server_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    put = stored.RedisAlerts.put
    failures = [True]

    async def unheard(self: stored.RedisAlerts, *words: str) -> Any:
        answer = await put(self, *words)
        if failures and failures.pop():
            raise StoreAway("no answer in time")
        return answer

    monkeypatch.setattr(stored.RedisAlerts, "put", unheard)
    with fleet.hub() as one, fleet.hub() as other:
        offend(one)
        wait_for(lambda: other.hub.alerts.open, "the alert on the other")
        compared(one, other)
        assert shown(one) == shown(other) == list(fleet.open.values())
        fleet.clock.advance(60)
        wait_for(lambda: not one.hub.alerts.open and not other.hub.alerts.open, "the end of it")
        assert (one.hub.alerts.resolved, other.hub.alerts.resolved) == (1, 0)
        assert fleet.receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]


@pytest.mark.long
def test_alerts_in_a_cluster() -> None:
    with cluster() as nodes:

        async def walk() -> None:
            clients = Clients("redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes), 5.0)
            alerts = stored.RedisAlerts(clients, "headgate:")
            assert await alerts.put("a", "1", "", "first") == ("done", "")
            assert await alerts.put("a", "2", "", "second") == ("other", "first")
            assert await alerts.read() == {"a": "first"}
            assert await alerts.end("a", "1", "first", "the end") == ("done", "")
            assert await alerts.put("a", "1", "", "again") == ("ended", "the end")
            assert await alerts.end("a", "1", "first", "another end") == ("other", "")
            assert await alerts.read() == {}
            await clients.aclose()

        asyncio.run(walk())


# The program ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_b8_when_the_hub_that_raised_it_is_killed_another_resolves_it(
    redis_server: Server, receiver: Receiver, tmp_path: Path
) -> None:
    config = tmp_path / "headgate.toml"
    config.write_text('[limits]\nlight = "1/hour"\n[backoff]\nquiet = 2\n[alerts]\nviolations = 3\nwindow = 10\n')
    surroundings = {
        "HEADGATE_STORE": f"{redis_server.url}/5",
        "HEADGATE_CONFIG": str(config),
        "HEADGATE_WEBHOOKS": receiver.url,
        "HEADGATE_WEBHOOK_SECRET": SECRET,
    }
    with (
        program(tmp_path / "one", environment=surroundings) as one,
        program(tmp_path / "two", environment=surroundings) as two,
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
            wait_for(lambda: len(receiver.heard) == 2, "the end of it")
            assert receiver.events == [(RAISED, "planner"), (RESOLVED, "planner")]
            wait_for(lambda: http.get("/api/dashboard/state").json()["alerts"][0]["resolved_at"], "it on the other")
        assert all("X-Headgate-Signature" in heard.headers for heard in receiver.heard)
