"""The store while its server fails, under load: the decisions, the waits and the counts."""

import asyncio
import signal
import time
from functools import partial
from typing import Any

import pytest

from headgate import AllOf, Limit, Limiter, ManualClock, SlidingWindow, per_day
from headgate.stores.redis import RedisStore
from tests.support.fault_trial import CAPACITY, HOT, IMPATIENT, LIMIT, SPENT, WORKERS, fault_trial
from tests.support.redis_store import BACK, POLICIES, ask_until_answered
from tests.support.threads import run_together
from tests.support.valkey import DURABLE, PATIENCE, ValkeyServer, wait_for

pytestmark = [pytest.mark.once, pytest.mark.long, pytest.mark.usefixtures("_leave_nothing_open")]


# Brief faults ---------------------------------------------------------------------------------------------------------


def test_a_script_flush_goes_unnoticed(own_server: ValkeyServer, kind: str) -> None:
    with fault_trial(own_server.url, kind) as it, own_server.client() as client:
        with it.load as load:
            load.ration()
            load.wait_for_passes(CAPACITY // 10)
            flushes = 0
            while not load.used_up():
                client.script_flush()
                flushes += 1
                load.wait_for_passes(CAPACITY // 20)
            load.use_up()
        it.check_callers()
        it.check_denials_spent_nothing()
        assert load.degraded() == []
        assert load.passed() == CAPACITY
        assert it.events == []
        assert flushes > 3


def test_closed_connections_are_opened_again(own_server: ValkeyServer, kind: str) -> None:
    with fault_trial(own_server.url, kind) as it, own_server.client() as client:
        with it.load as load:
            for _ in range(3):
                load.wait_for_passes(CAPACITY // 5)
                assert client.execute_command("CLIENT", "KILL", "TYPE", "normal")
                killed = load.wait_for_recovery()
                degraded = [call.ended.own for call in load.degraded() if call.began.real >= killed.real]
                assert max(degraded, default=killed.own) - killed.own < BACK
            load.use_up()
        it.check_callers()
        it.check_nothing_lost()
        assert not it.store.degraded
        it.check_fresh_key()


# The server is away ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "policy"),
    [
        *[(signal.SIGKILL, policy) for policy in POLICIES],
        (signal.SIGTERM, "local"),
    ],
)
def test_limits_hold_again_after_a_restart_that_loses_the_counts(
    own_server: ValkeyServer, kind: str, end: signal.Signals, policy: str
) -> None:
    with fault_trial(own_server.url, kind, policy) as it:
        with it.load as load:
            load.wait_for_passes(CAPACITY // 4)
            own_server.signal(end)
            wait_for(lambda: it.store.degraded, "a degraded store")
            if end == signal.SIGKILL:
                load.stay_degraded(1.0)
                assert it.store.degraded
            own_server.restart()
            back = load.wait_for_recovery()
        it.check_recovery(back)
        assert len(it.events) <= 2 * WORKERS, "one outage; answers that were under way may have come after it"


def test_a_server_with_a_journal_loses_nothing_when_it_is_killed(kind: str) -> None:
    with (
        ValkeyServer(*DURABLE) as server,
        fault_trial(server.url, kind, "closed") as it,
    ):
        with it.load as load:
            load.wait_for_passes(CAPACITY // 4)
            server.kill()
            wait_for(lambda: it.store.degraded, "a degraded store")
            server.start()
            back = load.wait_for_recovery()
            load.use_up()
        it.check_recovery(back)
        it.check_nothing_lost()


@pytest.mark.parametrize("policy", ["open", "local"])
def test_a_server_that_hangs(own_server: ValkeyServer, kind: str, policy: str) -> None:
    """Later it executes calls that have timed out: they may be charged, but let nobody pass."""
    with fault_trial(own_server.url, kind, policy, IMPATIENT) as it:
        with it.load as load:
            load.wait_for_passes(CAPACITY // 4)
            own_server.signal(signal.SIGSTOP)
            load.stay_degraded(3.0)
            assert it.store.degraded
            own_server.signal(signal.SIGCONT)
            back = load.wait_for_recovery()
            load.use_up()
        it.check_recovery(back)
        it.check_nothing_lost()


# The server refuses writes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["closed", "local"])
def test_a_server_whose_memory_is_full(own_server: ValkeyServer, kind: str, policy: str) -> None:
    with fault_trial(own_server.url, kind, policy) as it, own_server.client() as client:
        with it.load as load:
            load.wait_for_passes(CAPACITY // 4)
            client.config_set("maxmemory", 1)
            load.stay_degraded(0.5)
            client.config_set("maxmemory", 0)
            back = load.wait_for_recovery()
            load.use_up()
        it.check_recovery(back)
        it.check_nothing_lost()
        print(f"{len(it.events)} events")


def test_a_master_that_becomes_a_replica_and_a_master_again(own_server: ValkeyServer, kind: str) -> None:
    """Its counts are replaced by those of its temporary master, which has none."""
    with (
        ValkeyServer("--repl-diskless-sync-delay", "0") as other,
        fault_trial(own_server.url, kind) as it,
        own_server.client() as client,
    ):
        with it.load as load:
            load.wait_for_passes(CAPACITY // 4)
            client.replicaof("127.0.0.1", other.port)
            wait_for(lambda: client.info("replication")["master_link_status"] == "up", "the replica")
            load.stay_degraded(0.5)
            client.replicaof("NO", "ONE")
            back = load.wait_for_recovery()
        it.check_recovery(back)
        print(f"{len(it.events)} events")


@pytest.mark.parametrize(("policy", "passes"), [("open", True), ("closed", False), ("local", True)])
@pytest.mark.parametrize(
    "limit", [per_day(200), SlidingWindow(5, 60), AllOf([per_day(200), SlidingWindow(5, 60)])], ids=str
)
def test_full_memory_is_a_failure_of_the_server_and_not_a_denial(
    own_server: ValkeyServer, limit: Limit, policy: str, passes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisStore(own_server.url, on_failure=policy, timeout=PATIENCE) as store, own_server.client() as client:
        limiter = Limiter(limit, store=store)
        before = limiter.check("a")
        client.config_set("maxmemory", 1)
        decision = limiter.check("a")
        assert (bool(decision), decision.degraded, store.degraded) == (passes, True, True)
        assert "memory" in caplog.text
        client.config_set("maxmemory", 0)
        wait_for(lambda: not limiter.peek("a").degraded, "the server")
        assert limiter.peek("a").remaining == before.remaining


def test_denials_dont_end_an_outage_of_writes(own_server: ValkeyServer, breaker_clock: ManualClock) -> None:
    """The server still answers a denial, which writes nothing; that must not count as recovery."""
    events: list[object] = []
    with RedisStore(own_server.url, on_failure="closed", timeout=PATIENCE) as store, own_server.client() as client:
        store.subscribe(events.append)
        limiter = Limiter(per_day(1), store=store)
        limiter.check(SPENT)
        client.config_set("maxmemory", 1)
        for _ in range(4):
            for _ in range(25):
                assert not limiter.check(HOT)
                assert not limiter.check(SPENT)
            breaker_clock.advance(0.5)
    assert 0 < len(events) < 10


@pytest.mark.usefixtures("_frequent_switches")
def test_threads_survive_that_another_renews_the_client(own_server: ValkeyServer) -> None:
    """Each call that meets a read-only server renews it; here it is renewed all the time."""
    end = time.monotonic() + 2.0

    def check(limiter: Limiter) -> None:
        while time.monotonic() < end:
            limiter.check(HOT)

    def renew(store: RedisStore) -> None:
        while time.monotonic() < end:
            store._clients.renew(store._clients.client())
            time.sleep(0.0001)

    with RedisStore(own_server.url) as store:
        limiter = Limiter(LIMIT, store=store)
        run_together(WORKERS + 1, lambda number: check(limiter) if number else renew(store))


async def test_an_event_loop_keeps_its_renewed_client(own_server: ValkeyServer) -> None:
    """Calls after the fault share a few connections, as they did before it."""

    async def run(store: RedisStore, client: Any, other: ValkeyServer) -> None:
        limiter = Limiter(LIMIT, store=store)
        await limiter.acheck(HOT)
        client.replicaof("127.0.0.1", other.port)
        assert (await limiter.acheck(HOT)).degraded
        client.replicaof("NO", "ONE")
        await ask_until_answered(partial(limiter.acheck, HOT))
        before = client.info("stats")["total_connections_received"]
        for _ in range(20):
            assert not (await limiter.acheck(HOT)).degraded
        assert client.info("stats")["total_connections_received"] - before <= 1
        await store.aclose()

    with ValkeyServer() as other, RedisStore(own_server.url, timeout=PATIENCE) as store, own_server.client() as client:
        await asyncio.wait_for(run(store, client, other), PATIENCE)
