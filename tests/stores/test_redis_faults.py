"""The store while its server fails, under load: what callers get, how long they wait, and what is counted."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import AllOf, Limit, Limiter, ManualClock, SlidingWindow, per_day
from headgate.stores.redis import RedisStore
from tests.support.fault_trial import CAPACITY, HOT, IMPATIENT, LIMIT, SPENT, WORKERS, trial
from tests.support.redis_store import BACK, POLICIES
from tests.support.valkey import PATIENCE, Server, wait_for

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("_leave_nothing_open")]


@pytest.fixture
def server() -> Iterator[Server]:
    """One for each test, which may end it."""
    with Server() as one:
        yield one


# Nothing is lost ------------------------------------------------------------------------------------------------------


def test_a_script_flush_is_not_noticed(server: Server, kind: str) -> None:
    with trial(server.url, kind) as it, server.client() as client:
        with it.load as load:
            load.ration()
            load.spends(CAPACITY // 10)
            flushes = 0
            while not load.used_up():
                client.script_flush()
                flushes += 1
                load.spends(CAPACITY // 20)
            load.uses_up()
        it.nobody_was_harmed()
        it.denials_were_free()
        assert load.degraded() == []
        assert load.passed() == CAPACITY
        assert it.events == []
        assert flushes > 3


def test_closed_connections_are_opened_again(server: Server, kind: str) -> None:
    with trial(server.url, kind) as it, server.client() as client:
        with it.load as load:
            for _ in range(3):
                load.spends(CAPACITY // 5)
                assert client.execute_command("CLIENT", "KILL", "TYPE", "normal")
                killed = load.moment()
                load.works_again(killed)
                degraded = [call.ended.own for call in load.degraded() if call.began.real >= killed.real]
                assert max(degraded, default=killed.own) - killed.own < BACK
            load.uses_up()
        it.nobody_was_harmed()
        it.denials_were_free()
        it.nothing_was_lost()
        assert not it.store.degraded
        it.a_fresh_key_is_exact()


# The server is away ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_that_is_killed_and_started_again(server: Server, kind: str, policy: str) -> None:
    """What it counted is gone, but from then on every limit holds again."""
    with trial(server.url, kind, policy) as it:
        with it.load as load:
            load.spends(CAPACITY // 4)
            server.kill()
            wait_for(lambda: it.store.degraded, "a store that is degraded")
            load.goes_without(1.0)
            assert it.store.degraded
            server.start()
            back = load.moment()
            load.works_again(back)
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        assert len(it.events) <= 2 * WORKERS, (
            "it was away once; answers that were on their way may have come after that"
        )
        assert load.passed() <= 2 * CAPACITY
        it.a_fresh_key_is_exact()


def test_a_server_that_is_restarted(server: Server, kind: str) -> None:
    with trial(server.url, kind) as it:
        with it.load as load:
            load.spends(CAPACITY // 4)
            server.signal(signal.SIGTERM)
            wait_for(lambda: it.store.degraded, "a store that is degraded")
            server.restart()
            back = load.moment()
            load.works_again(back)
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        assert load.passed() <= 2 * CAPACITY
        it.a_fresh_key_is_exact()


def test_a_server_that_keeps_a_journal_forgets_nothing_when_it_is_killed(kind: str) -> None:
    with (
        Server("--appendonly", "yes", "--appendfsync", "always") as server,
        trial(server.url, kind, "closed") as it,
    ):
        with it.load as load:
            load.spends(CAPACITY // 4)
            server.kill()
            wait_for(lambda: it.store.degraded, "a store that is degraded")
            server.start()
            back = load.moment()
            load.works_again(back)
            load.uses_up()
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        it.denials_were_free()
        it.nothing_was_lost()
        it.a_fresh_key_is_exact()


@pytest.mark.long
@pytest.mark.parametrize("policy", ["open", "local"])
def test_a_server_that_is_held_up(server: Server, kind: str, policy: str) -> None:
    """It carries out later what nobody waits for any more: that may be charged, but lets nobody pass."""
    with trial(server.url, kind, policy, IMPATIENT) as it:
        with it.load as load:
            load.spends(CAPACITY // 4)
            server.signal(signal.SIGSTOP)
            load.goes_without(3.0)
            assert it.store.degraded
            server.signal(signal.SIGCONT)
            back = load.moment()
            load.works_again(back)
            load.uses_up()
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        it.denials_were_free()
        it.nothing_was_lost()
        it.a_fresh_key_is_exact()


# The server takes no writes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["closed", "local"])
def test_a_server_whose_memory_is_full(server: Server, kind: str, policy: str) -> None:
    with trial(server.url, kind, policy) as it, server.client() as client:
        with it.load as load:
            load.spends(CAPACITY // 4)
            client.config_set("maxmemory", 1)
            load.goes_without(0.5)
            client.config_set("maxmemory", 0)
            back = load.moment()
            load.works_again(back)
            load.uses_up()
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        it.denials_were_free()
        it.nothing_was_lost()
        it.a_fresh_key_is_exact()
        print(f"{len(it.events)} events")


def test_a_master_that_becomes_a_replica_and_a_master_again(server: Server, kind: str) -> None:
    """What it counted is replaced by what its master for a time had, which is nothing."""
    with Server("--repl-diskless-sync-delay", "0") as other, trial(server.url, kind) as it, server.client() as client:
        with it.load as load:
            load.spends(CAPACITY // 4)
            client.replicaof("127.0.0.1", other.port)
            wait_for(lambda: client.info("replication")["master_link_status"] == "up", "the replica")
            load.goes_without(0.5)
            client.replicaof("NO", "ONE")
            back = load.moment()
            load.works_again(back)
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        assert load.passed() <= 2 * CAPACITY
        it.a_fresh_key_is_exact()
        print(f"{len(it.events)} events")


@pytest.mark.parametrize(
    "limit", [per_day(200), SlidingWindow(5, 60), AllOf([per_day(200), SlidingWindow(5, 60)])], ids=str
)
def test_a_full_memory_is_the_servers_trouble_whatever_is_counted(server: Server, limit: Limit) -> None:
    """It isn't read as a denial, nor as data of somebody else."""
    with RedisStore(server.url, timeout=PATIENCE) as store, server.client() as client:
        limiter = Limiter(limit, store=store)
        limiter.check("before")
        client.config_set("maxmemory", 1)
        decision = limiter.check("after")
        assert (bool(decision), decision.degraded, store.degraded) == (True, True, True)


def test_a_server_that_takes_no_writes_is_not_called_back_for_every_denial(
    server: Server, breaker_clock: ManualClock
) -> None:
    """A denial writes nothing, so it is still answered; but what has to be written isn't, so the store is away."""
    events: list[object] = []
    with RedisStore(server.url, on_failure="closed", timeout=PATIENCE) as store, server.client() as client:
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


@pytest.mark.long
@pytest.mark.usefixtures("_switching")
def test_no_thread_is_harmed_by_another_that_makes_a_new_client(server: Server) -> None:
    """Each call that meets a read-only server makes one; here one is made all the time."""
    errors: list[BaseException] = []
    end = time.monotonic() + 2.0

    def hammer(limiter: Limiter) -> None:
        while time.monotonic() < end:
            try:
                limiter.check(HOT)
            except BaseException as error:  # noqa: BLE001 - that there are none is what is tested
                errors.append(error)

    with RedisStore(server.url) as store:
        limiter = Limiter(LIMIT, store=store)
        threads = [threading.Thread(target=hammer, args=(limiter,)) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            store._clients.renew(store._clients.client())
            time.sleep(0.0001)
        for thread in threads:
            thread.join()
    assert errors == []


def test_a_loop_whose_client_was_renewed_keeps_the_new_one(server: Server) -> None:
    """Calls after the fault share a few connections, as they did before it."""

    async def run(store: RedisStore, client: Any, other: Server) -> None:
        limiter = Limiter(LIMIT, store=store)
        await limiter.acheck(HOT)
        client.replicaof("127.0.0.1", other.port)
        assert (await limiter.acheck(HOT)).degraded
        client.replicaof("NO", "ONE")
        while (await limiter.acheck(HOT)).degraded:  # noqa: ASYNC110 - there is nothing else to wait for
            await asyncio.sleep(0.01)
        before = client.info("stats")["total_connections_received"]
        for _ in range(20):
            assert not (await limiter.acheck(HOT)).degraded
        assert client.info("stats")["total_connections_received"] - before <= 1
        await store.aclose()

    with Server() as other, RedisStore(server.url, timeout=PATIENCE) as store, server.client() as client:
        asyncio.run(asyncio.wait_for(run(store, client, other), PATIENCE))
