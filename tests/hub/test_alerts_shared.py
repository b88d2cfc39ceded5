"""Alerts of hubs that share a server: one for the fleet, whoever has gone meanwhile."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from alerting import RAISED, RESOLVED, offend, settled, shown
from hubs import ADMIN, Running, running
from programs import program
from receivers import Receiver
from servers import PATIENCE, Server, cluster, wait_for
from structlog.testing import capture_logs

from headgate import ManualClock, RedisStore, StoreAway
from headgate.events import Alerted
from headgate.hub import alerts as module
from headgate.stores.redis import alerts as stored
from headgate.stores.redis.connecting import Clients

SECRET = "a-secret-of-more-than-16-characters"
pytestmark = pytest.mark.usefixtures("no_proxies")


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
            RedisStore(self.server.url, prefix=self.prefix, clock=self.clock, timeout=PATIENCE) as store,
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
