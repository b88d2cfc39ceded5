"""Metrics for Prometheus, and their docs. Grafana: test_grafana.py."""

import asyncio
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from prometheus_client.parser import text_string_to_metric_families

from headgate import ManualClock, MemoryStore, Outcome, Policy, RedisStore, per_minute
from headgate.gate.policy import PURPOSES
from headgate.hub.app import Hub
from headgate.hub.monitoring.metrics import MEDIA, METRICS, exposition
from headgate.stores import traffic
from headgate.stores.base import Ask, Verb
from headgate.stores.redis import batching
from tests.support.hub import ADMIN, VIEWER, hub_server, hub_settings
from tests.support.prometheus import DOCS, Series, histogram_counts, samples, scrape, value
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for
from tests.support.webhook_receiver import WebhookReceiver

PAGE = (DOCS / "metrics.md").read_text(encoding="utf-8")


# The table -----------------------------------------------------------------------------------------------------------


def test_names_follow_the_prometheus_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"headgate_[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(ms|us|ns|millis|minutes|count|sum|bucket)(_|$)", metric.name), metric.name
        assert metric.about, metric.name
        assert "\n" not in metric.about, metric.name


def test_every_metric_is_exposed_from_the_start() -> None:
    with hub_server() as hub, hub.http() as anyone:
        answer = anyone.get("/metrics")
        assert (answer.status_code, answer.headers["content-type"]) == (200, MEDIA)
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for metric in METRICS:
        family = families.pop(metric.name.removesuffix("_total"))  # which the parser leaves out
        assert (family.type, family.documentation) == (metric.kind, metric.about)
        assert family.samples, metric.name
        for sample in family.samples:
            assert {*sample.labels} - {"le"} == {*metric.labels}, metric.name
    assert {name.partition("_")[0] for name in families} == {"process"}
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= set(families)


def test_the_docs_list_every_metric_and_no_other() -> None:
    lines = PAGE.split("\n| metric | kind | labels | what it is |\n", 1)[1].splitlines()[1:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    told = {row[0].strip("`"): (row[1], re.findall(r"`(\w+)`", row[2]), row[3]) for row in rows}
    assert len(told) == len(rows)
    assert list(told) == [metric.name for metric in METRICS]
    for metric in METRICS:
        kind, labels, about = told[metric.name]
        assert (kind, tuple(labels)) == (metric.kind, metric.labels), metric.name
        assert re.fullmatch(rf"{re.escape(metric.about)}(?:[.,:;] .+)?", about), metric.name


def test_the_docs_list_all_label_values() -> None:
    with hub_server() as hub:
        found = scrape(hub)
    values = {dict(labels)[name] for _, labels in found for name in dict(labels) if name not in ("le", "version")}
    plain = {"light", "normal", "heavy", "true", "false"}
    assert [one for one in values - plain if f"`{one}`" not in PAGE] == []
    assert 135 <= len(found) <= 165, "the page says about 150"


# What is counted -----------------------------------------------------------------------------------------------------


def test_checks_are_counted_by_channel_tier_and_outcome() -> None:
    policy = Policy(limits={"heavy": "3/minute"}, exempt=["boss"])
    with hub_server(policy) as hub, hub.agent("planner") as planner, hub.agent("boss") as boss:
        for number in range(5):
            planner.say("session_open", session=number)
        planner.say("ping", id="last")
        while planner.hear().get("id") != "last":
            pass
        boss.ask("ping")
        with hub.http(hub.register("writer")) as writer:
            writer.get("/api/mailbox")
            writer.get("/api/tasks/none")
        with hub.http() as anyone:
            numbers = anyone.get("/api/metrics").json()
        found = scrape(hub)
    counted = {
        tuple(dict(labels)[name] for name in ("channel", "tier", "outcome")): count
        for (name, labels), count in found.items()
        if name == "headgate_checks_total" and count
    }
    assert counted == {
        ("ws", "heavy", "allow"): 2,
        ("ws", "heavy", "warn"): 1,
        ("ws", "heavy", "deny"): 2,
        ("ws", "light", "allow"): 1,
        ("ws", "light", "exempt"): 1,
        ("http", "light", "allow"): 1,
        ("http", "normal", "allow"): 1,
    }
    assert numbers["checks"] == {"allow": 5, "warn": 1, "deny": 2, "exempt": 1}
    assert value(found, "headgate_violations_total") == numbers["violations"] == 2
    assert value(found, "headgate_decision_seconds_count") == sum(counted.values())
    assert 0 < value(found, "headgate_decision_seconds_sum") < PATIENCE
    times = histogram_counts(found, "headgate_decision_seconds")
    assert list(times.values()) == sorted(times.values())
    assert times["+Inf"] == sum(counted.values())
    assert list(times)[:3] == ["1e-06", "2.5e-06", "5e-06"]
    assert list(times)[-2:] == ["0.5", "+Inf"]


async def test_decision_times_are_counted_in_seconds() -> None:
    async with Hub(hub_settings()) as hub:
        for took in (1_000, 1_001, 2_000_000, 900_000_000):  # nanoseconds
            hub.stats.record("planner", "ws", "light", Outcome.ALLOW, took)
        found = samples(exposition(hub.metric_sources).decode())
    times = histogram_counts(found, "headgate_decision_seconds")
    assert [times[end] for end in ("1e-06", "2.5e-06", "0.001", "0.0025", "0.5", "+Inf")] == [1, 2, 2, 3, 3, 4]
    assert value(found, "headgate_decision_seconds_sum") == pytest.approx(0.902002001)


def test_gauges_and_counters_match_the_hub() -> None:
    with hub_server() as hub, ExitStack() as stack:
        first, second = (stack.enter_context(hub.agent(name)) for name in ("first", "second"))
        stack.enter_context(hub.socket("/relay"))
        board = stack.enter_context(hub.socket("/ws/dashboard"))
        assert board.ask("watch", token=VIEWER)["type"] == "snapshot"
        first.ask("message", to="second", body=1)
        assert second.hear()["type"] == "message"
        first.ask("channel_publish", channel="general", body=2)
        first.ask("session_open", session=1)
        second.ask("session_open", session=2, rate=1, burst=1)
        signal = {"type": "step", "entity": "x", "weight": 1.0, "timestamp": 1.0}
        second.ask("session_signal", session=2, signal=signal)
        with hub.http(hub.register("third")) as third:
            for _ in range(3):
                third.post("/api/tasks", json={"payload": 1})
        with hub.http() as anyone:
            anyone.post("/api/onboard/register", json={"agent_id": "fourth"})
            numbers = anyone.get("/api/metrics").json()
        wait_for(lambda: hub.hub.relay.connections, "the relay")
        found = scrape(hub)
    assert [value(found, "headgate_connections", kind=kind) for kind in ("ws", "relay", "dashboard")] == [2, 1, 1]
    assert value(found, "headgate_agents_connected") == numbers["agents_connected"] == 2
    assert value(found, "headgate_messages_total") == numbers["messages"] == 2
    assert numbers["address_checks"] == {"allow": 5}
    assert value(found, "headgate_sessions_open") == numbers["open_sessions"] == 2
    assert value(found, "headgate_session_buckets") == numbers["session_buckets"] == 1
    tasks = {state: value(found, "headgate_tasks", state=state) for state in numbers["tasks"]}
    assert tasks == numbers["tasks"] == {"queued": 1, "assigned": 2, "accepted": 0, "completed": 0, "failed": 0}
    checked = {
        (purpose, outcome): value(found, "headgate_address_checks_total", purpose=purpose, outcome=outcome)
        for purpose in PURPOSES
        for outcome in ("allow", "warn", "deny")
    }
    assert {at: count for at, count in checked.items() if count} == {
        ("request", "allow"): 1,  # the metrics as JSON
        ("connection", "allow"): 3,  # two agents and the relay
        ("registration", "allow"): 1,
    }
    assert isinstance(hub.store, MemoryStore)
    assert value(found, "headgate_live_buckets") == len(hub.store) >= 5
    for name in ("round_trips_total", "batch_size_count", "errors_total", "degraded", "outage_seconds_total"):
        assert value(found, f"headgate_store_{name}") == 0


def test_blocked_agents_are_counted_until_the_block_ends() -> None:
    with hub_server() as hub:
        hub.call(hub.hub.gate.block, "planner")
        hub.call(partial(hub.hub.gate.block, "writer", until=hub.clock.wall() + 60))
        assert value(scrape(hub), "headgate_agents_blocked") == 2
        hub.clock.advance(60)
        assert value(scrape(hub), "headgate_agents_blocked") == 1


def test_b8_alerts_and_webhooks_are_counted(receiver: WebhookReceiver) -> None:
    with hub_server(webhooks=(receiver.url,)) as hub:
        for _ in range(10):
            hub.run(hub.hub.gate.arecord_violation("planner"))
        wait_for(lambda: hub.hub.webhooks.delivered, "the notification")
        found = scrape(hub)
        assert value(found, "headgate_alerts_total") == value(found, "headgate_alerts_open") == 1
        assert value(found, "headgate_webhooks_total", outcome="delivered") == 1
        assert value(found, "headgate_webhooks_waiting") == 0
        receiver.answers.append(400)
        hub.clock.advance(60)
        wait_for(lambda: hub.hub.webhooks.failed, "the second notification")
        found = scrape(hub)
    assert (value(found, "headgate_alerts_total"), value(found, "headgate_alerts_open")) == (1, 0)
    assert value(found, "headgate_webhooks_total", outcome="failed") == 1
    assert value(found, "headgate_webhooks_total", outcome="dropped") == 0


def test_b3_viewers_scrape_without_a_limit_and_others_are_limited_by_address() -> None:
    with hub_server() as hub, hub.http() as anyone, hub.http(VIEWER) as viewer, hub.http(ADMIN) as admin:
        assert {anyone.get("/metrics").status_code for _ in range(60)} == {200}
        assert anyone.get("/metrics").status_code == 429
        assert {viewer.get("/metrics").status_code for _ in range(70)} == {200}
        assert admin.get("/metrics").status_code == 200
        assert viewer.head("/metrics").headers["content-type"] == MEDIA
        assert anyone.get("/metrics", headers={"Authorization": "Bearer nobody's"}).status_code == 401


HOSTILE = ['a{outcome="x"} 1', "a\nb 1", "é\\", "headgate_evil_total"]


def test_no_agent_can_create_a_series() -> None:
    with hub_server(Policy(limits={"light": "10/minute", "normal": "9/minute", "heavy": "8/minute"})) as hub:
        before = scrape(hub)
        for number, name in enumerate(HOSTILE):
            agent = name if name.isprintable() else f"agent {number}"
            token = hub.register(agent)
            with hub.agent(agent, token) as wire, hub.http(token) as client:
                wire.socket.send(json.dumps({"type": name}))
                wire.socket.send(name)
                wire.say("message", to=name, body=name)
                wire.say("channel_publish", channel=name, body=name)
                wire.say("session_open", session=name)
                wire.say("task_complete", task_id=name)
                for _ in range(15):
                    wire.say("ping", id=name)
                client.post("/v1/check", json={"key": name})
                client.post("/api/channels", json={"name": name})
                client.post("/api/tasks", json={"payload": {name: name}})
                client.post(f"/{number}/{name.encode().hex()}")
                client.request(f"M{number}", "/metrics")
                client.get("/metrics", params={name: name})
                wire.say("ping", id="last")
                while wire.hear().get("id") != "last":
                    pass
            with hub.http(name.encode().hex()) as nobody:
                nobody.get("/api/mailbox", headers={"X-Forwarded-For": name.encode().hex()})
                nobody.post("/api/onboard/register", json={"agent_id": f"{name}{number}"})
        after = scrape(hub)
    assert set(after) == set(before)
    assert value(after, "headgate_checks_total", channel="ws", tier="light", outcome="deny") > 0


# Counters never go down ----------------------------------------------------------------------------------------------

POLICIES = [
    Policy(),
    Policy(limits={"light": "2/minute"}, warn_at=0.1),
    Policy(channels=["ws", "http", "mail"]),
    Policy(tiers=["bulk"], limits={"bulk": "2/minute"}),
    Policy(exempt=["a"], addresses={"limit": "1/minute"}),
    Policy(shadow=True),
]
STEP = st.one_of(
    st.tuples(st.just("check"), st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("address"), st.just("10.0.0.1"), st.sampled_from(["request", "registration"])),
    st.tuples(st.just("reload"), st.sampled_from(POLICIES)),
    st.tuples(st.just("override"), st.sampled_from("abc")),
    st.tuples(st.just("advance"), st.integers(1, 100)),
    st.tuples(st.just("publish")),
    st.tuples(st.just("task")),
    st.tuples(st.just("reset"), st.sampled_from("abc")),
)  # fmt: skip


async def make_traffic(hub: Hub, clock: ManualClock, kind: str, *given: Any) -> None:
    """One step of some traffic."""
    if kind == "check":
        agent, channel, tier = given
        channels, tiers = hub.gate.policy.channels, hub.gate.policy.tiers
        await hub.stats.check(agent, channels[channel % len(channels)], tiers[tier % len(tiers)])
    elif kind == "address":
        await hub.gate.acheck_address(*given)
    elif kind == "reload":
        await hub.gate.areload(*given)
    elif kind == "override":
        await hub.gate.aset_override(given[0], "light", per_minute(1))
    elif kind == "advance":
        clock.advance(*given)
    elif kind == "publish":
        await hub.messages.publish("general", "a", Raw(b"1"))
    elif kind == "task":
        await hub.scheduler.add("a", b"1")
    else:
        await hub.gate.areset_violations(*given)
        hub.stats.forget(*given)


def counted(text: bytes) -> dict[Series, float]:
    """The series that may only grow."""
    grows = re.compile(r".*_total|headgate_\w+_(bucket|count|sum)")
    return {series: count for series, count in samples(text.decode()).items() if grows.fullmatch(series[0])}


@given(st.lists(STEP, max_size=15))
@settings(max_examples=15)
def test_counters_never_go_down(steps: list[tuple[Any, ...]]) -> None:
    async def work() -> None:
        clock = ManualClock(start=1000)
        async with Hub(hub_settings(), store=MemoryStore(clock=clock)) as hub:
            before = counted(exposition(hub.metric_sources))
            for step in steps:
                await make_traffic(hub, clock, *step)
                after = counted(exposition(hub.metric_sources))
                fallen = {one: (count, after.get(one, 0)) for one, count in before.items() if after.get(one, 0) < count}
                assert fallen == {}
                before = after

    asyncio.run(work())


async def test_a_removed_channel_keeps_its_counters() -> None:
    async with Hub(hub_settings(), Policy(channels=["ws", "http", "mail"])) as hub:
        await hub.stats.check("a", "mail", "light")
        for policy in (Policy(), Policy(channels=["ws", "http", "mail"])):
            await hub.gate.areload(policy)
            found = samples(exposition(hub.metric_sources).decode())
            assert value(found, "headgate_checks_total", channel="mail", tier="light", outcome="allow") == 1


# The server that counts ----------------------------------------------------------------------------------------------


def store_at(server: ValkeyServer) -> RedisStore:
    return RedisStore(server.url, prefix=f"test-{uuid4().hex}:", clock=ManualClock(start=1000), timeout=PATIENCE)


def ask(number: int) -> list[Ask]:
    return [Ask("x", f"key {number}", per_minute(10), 1)]


async def test_calls_and_the_requests_in_them_are_counted(redis_server: ValkeyServer) -> None:
    async with store_at(redis_server) as store:

        async def many(count: int) -> tuple[int, int, list[int]]:
            """What so many requests at once add to the calls, the requests, and the calls by size."""
            traffic = store.traffic
            trips, requests, batches = traffic.round_trips, traffic.requests, list(traffic.batches)
            await asyncio.gather(*[store.aapply(Verb.CHECK, ask(number), 0) for number in range(count)])
            by_size = [after - before for after, before in zip(traffic.batches, batches, strict=True)]
            return traffic.round_trips - trips, traffic.requests - requests, by_size

        await many(1)  # connects, and has the script loaded
        assert await many(1) == (1, 1, [1, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        assert await many(40) == (1, 40, [0, 0, 0, 0, 0, 0, 1, 0, 0, 0])  # more than 32, at most 64
        with redis_server.client() as client:
            client.script_flush()
        assert await many(2) == (2, 2, [0, 1, 0, 0, 0, 0, 0, 0, 0, 0])  # a second call, with the script
        assert store.traffic.errors == 0


def test_threads_are_counted_exactly(redis_server: ValkeyServer) -> None:
    with store_at(redis_server) as store, ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: store.apply(Verb.CHECK, ask(number), 0), range(800)))
        traffic = store.traffic
        assert traffic.requests == 800
        assert sum(traffic.batches) <= traffic.round_trips <= sum(traffic.batches) + 16  # some had to bring the script
        assert traffic.errors == 0


FORK = """
import os, signal, sys
from headgate import Limiter, RedisStore, per_minute

limiter = Limiter(per_minute(10), store=RedisStore(sys.argv[1], prefix=sys.argv[2], timeout=60))
store = limiter.store
limiter.check("a")
store.traffic._lock.acquire()  # as another thread would hold it
child = os.fork()
if child == 0:
    signal.alarm(60)
    limiter.check("a")
    print("counted", flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_process_counts_too(redis_server: ValkeyServer) -> None:
    command = [sys.executable, "-c", FORK, redis_server.url, f"test-{uuid4().hex}:"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=True)
    assert (done.stdout, done.stderr) == ("counted\n", "")


def test_an_outage_is_measured() -> None:
    clock = ManualClock(start=1000)
    with (
        ValkeyServer() as server,
        RedisStore(server.url, clock=clock, timeout=PATIENCE) as store,
        hub_server(store=store) as hub,
    ):

        def check() -> bool:
            return hub.run(hub.hub.stats.check("planner", "ws", "light"))[1].degraded

        def measured() -> tuple[float, ...]:
            found = scrape(hub)
            assert ("headgate_live_buckets", frozenset()) not in found
            names = ("degraded", "outages_total", "outage_seconds_total")
            return tuple(value(found, f"headgate_store_{name}") for name in names)

        async def many() -> None:
            await asyncio.gather(*[hub.hub.stats.check(f"agent {number}", "ws", "light") for number in range(40)])

        wait_for(lambda: not check(), "the server")
        hub.run(many())
        before = scrape(hub)
        sent = value(before, "headgate_store_batch_size_count")
        assert value(before, "headgate_store_round_trips_total") > sent  # once more with the script
        assert value(before, "headgate_store_batch_size_sum") >= sent + 39
        assert (
            value(before, "headgate_store_batch_size_count")
            == histogram_counts(before, "headgate_store_batch_size")["+Inf"]
        )
        assert (measured(), value(before, "headgate_store_errors_total")) == ((0, 0, 0), 0)
        server.kill()
        assert check()
        assert measured() == (1, 1, 0)
        clock.advance(30)
        assert measured() == (1, 1, 30)
        assert value(scrape(hub), "headgate_store_errors_total") >= 1
        server.start()
        wait_for(lambda: not check(), "the server")
        clock.advance(100)
        assert measured() == (0, 1, 30)
        server.kill()
        assert check()
        clock.advance(5.5)
        assert measured() == (1, 2, 35.5)


def test_a_mistake_that_degrades_decisions_is_seen_in_the_health(
    redis_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: Any) -> None:
        raise TypeError("planner's secret")

    with store_at(redis_server) as store, hub_server(store=store) as hub, hub.http(ADMIN) as admin:

        def health() -> tuple[str, str, list[str]]:
            found = admin.get("/api/health").json()
            assert found["problems"] == admin.get("/api/dashboard/state").json()["summary"]["problems"]
            return found["status"], found["store"], found["problems"]

        assert health() == ("ok", "ok", [])
        with monkeypatch.context() as patch:
            patch.setattr(batching, "read_all", mistaken)
            assert hub.run(hub.hub.stats.check("planner", "ws", "light"))[1].degraded
        told = "decisions are degraded by a mistake in the program (TypeError); the log has it"
        assert health() == ("degraded", "ok", [told])
        monkeypatch.setattr(traffic, "_RECENT", 0.0)
        assert health() == ("ok", "ok", [])
