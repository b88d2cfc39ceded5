"""The store while its server fails, under load: what callers get, how long they wait, and what is counted.

In every test threads, or tasks of an event loop, check two keys over and over while something is done to a real server.
One key is being used up; the other has been before, and is only denied.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

import pytest
from redis.crc import key_slot
from redis_stores import BACK, LONGEST, POLICIES
from servers import Server, cluster, is_whole, replicated, wait_for

from headgate import AllOf, Decision, Limit, Limiter, SlidingWindow, per_day
from headgate.events import Degraded
from headgate.stores.redis import RedisStore

CAPACITY = 200
LIMIT = per_day(CAPACITY)  # a token in seven minutes: none while a test runs

WORKERS = 12  # more than the store has senders
MOST = 2000  # rounds of one worker
PACE = 0.02

HOT, SPENT = "hot", "spent"

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("_leave_nothing_open")]


class Call(NamedTuple):
    key: str
    began: float
    ended: float
    decision: Decision


class Load:
    """Workers that check both keys over and over until the block is left, and what they were told."""

    def __init__(self, limiter: Limiter, kind: str) -> None:
        self.calls: list[Call] = []
        self.errors: list[BaseException] = []
        self._limiter = limiter
        self._stopped = threading.Event()
        run = {"threads": [self._thread] * WORKERS, "tasks": [self._loop]}[kind]
        self._threads = [threading.Thread(target=target) for target in run]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _thread(self) -> None:
        try:
            for _ in range(MOST):
                for key in (HOT, SPENT):
                    began = time.monotonic()
                    self._note(key, began, self._limiter.check(key))
                if self._stopped.wait(PACE):
                    return
        except BaseException as error:  # noqa: BLE001 - that there are none is what is tested
            self.errors.append(error)

    def _loop(self) -> None:
        try:
            asyncio.run(self._tasks())
        except BaseException as error:  # noqa: BLE001
            self.errors.append(error)

    async def _tasks(self) -> None:
        async def work() -> None:
            for _ in range(MOST):
                for key in (HOT, SPENT):
                    began = time.monotonic()
                    self._note(key, began, await self._limiter.acheck(key))
                if self._stopped.is_set():
                    return
                await asyncio.sleep(PACE)

        results = await asyncio.gather(*[work() for _ in range(WORKERS)], return_exceptions=True)
        self.errors += [result for result in results if result is not None]

    def _note(self, key: str, began: float, decision: Decision) -> None:
        self.calls.append(Call(key, began, time.monotonic(), decision))

    # What was seen ---------------------------------------------------------------------------------------------------

    def of(self, key: str, *, degraded: bool) -> list[Call]:
        return [call for call in list(self.calls) if call.key == key and call.decision.degraded is degraded]

    def passed(self, key: str = HOT) -> int:
        """How many the server let pass."""
        return sum(bool(call.decision) for call in self.of(key, degraded=False))

    def degraded(self) -> list[Call]:
        return [call for call in list(self.calls) if call.decision.degraded]

    def used_up(self) -> bool:
        return not all(call.decision for call in self.of(HOT, degraded=False))

    def longest(self) -> float:
        return max(call.ended - call.began for call in self.calls)

    # What is waited for ----------------------------------------------------------------------------------------------

    def spends(self, tokens: int) -> None:
        """Wait until the server has let some more pass, or all that there were: some may be lost with an answer."""
        goal = self.passed() + tokens
        self._wait(lambda: self.passed() >= goal or self.used_up(), f"{goal} that pass")

    def goes_without(self, seconds: float) -> None:
        """Wait until both keys have been decided without the server over some time."""
        began = time.monotonic()
        self._wait(lambda: self._without(began, began + seconds), f"degraded decisions for {seconds} s")

    def _without(self, since: float, until: float) -> bool:
        keys = {call.key for call in self.degraded() if call.began >= since}
        return keys == {HOT, SPENT} and time.monotonic() >= until

    def works_again(self, since: float) -> None:
        """Wait until nobody has been degraded for as many calls as all workers make in two rounds."""
        calls = 4 * WORKERS
        self._wait(lambda: self._clean(since, calls), "full service", BACK + 1.0)

    def _clean(self, since: float, count: int) -> bool:
        last = self.calls[-count:]
        return all(call.began >= since and not call.decision.degraded for call in last)

    def uses_up(self) -> None:
        """Wait until the server denies the key that is being used up."""
        self._wait(self.used_up, "the end of the tokens")

    def _wait(self, condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
        wait_for(lambda: self.errors or condition(), what, seconds)
        assert self.errors == []


class Trial:
    """A store under load, and whether it did what it should."""

    def __init__(self, url: str, policy: str, kind: str) -> None:
        self.store = RedisStore(url, on_failure=policy)
        self.limiter = Limiter(LIMIT, store=self.store)
        self.load = Load(self.limiter, kind)
        self.events: list[Degraded] = []
        self._policy = policy
        self._full_at = 0.0
        self.store.subscribe(self._hear)

    def _hear(self, event: object) -> None:
        assert isinstance(event, Degraded)
        self.events.append(event)

    def exhaust(self) -> None:
        passed = sum(bool(self.limiter.check(SPENT)) for _ in range(CAPACITY + 1))
        assert passed == CAPACITY
        self._full_at = self._full()

    def _full(self) -> float:
        """The moment at which all tokens will be back."""
        decision = self.limiter.peek(SPENT)
        assert (decision.degraded, decision.remaining) == (False, 0)
        return time.monotonic() + decision.reset_after

    # What holds after every fault ------------------------------------------------------------------------------------

    def nobody_was_harmed(self) -> None:
        """No exception, no long wait, and without the server the policy that was chosen."""
        assert self.load.errors == []
        assert self.load.longest() < LONGEST
        for key in (HOT, SPENT):
            alone = self.load.of(key, degraded=True)
            expected = {"open": len(alone), "closed": 0, "local": min(len(alone), CAPACITY)}[self._policy]
            assert sum(bool(call.decision) for call in alone) == expected

    def it_was_degraded_until(self, back: float) -> None:
        """The server was seen to be away, was not missed for long after it was back, and listeners heard of both."""
        alone = self.load.degraded()
        assert alone
        late = max(call.ended for call in alone) - back
        print(f"\n{len(alone)} degraded, the last {late:.2f} s after the end; longest {self.load.longest():.3f} s")
        assert late < BACK
        assert not self.store.degraded
        assert [event.degraded for event in self.events] == [True, False] * (len(self.events) // 2)
        assert self.events
        assert self.events[0].reason

    def denials_were_free(self) -> None:
        """Each that had been charged would have put the refill off by seven minutes."""
        denied = [call for call in self.load.of(SPENT, degraded=False) if not call.decision]
        assert len(denied) > 2 * WORKERS
        assert self.load.passed(SPENT) == 0
        assert abs(self._full() - self._full_at) < 5

    def nothing_was_lost(self) -> None:
        """The capacity passed in all; less only what may have been charged in a call that brought no answer."""
        passed, alone = self.load.passed(), len(self.load.of(HOT, degraded=True))
        assert CAPACITY - alone <= passed <= CAPACITY

    def a_fresh_key_is_exact(self) -> None:
        decisions = [self.limiter.check("fresh") for _ in range(CAPACITY + 50)]
        assert not any(decision.degraded for decision in decisions)
        assert sum(map(bool, decisions)) == CAPACITY


@contextmanager
def trial(url: str, kind: str, policy: str = "local") -> Iterator[Trial]:
    """A store with one key that has been used up; what it did can be asked until the block is left."""
    one = Trial(url, policy, kind)
    try:
        one.exhaust()
        yield one
    finally:
        one.store.close()


@pytest.fixture
def server() -> Iterator[Server]:
    """One for each test, which may end it."""
    with Server() as one:
        yield one


# Nothing is lost ------------------------------------------------------------------------------------------------------


def test_a_script_flush_is_not_noticed(server: Server, kind: str) -> None:
    with trial(server.url, kind) as it, server.client() as client:
        with it.load as load:
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
                killed = time.monotonic()
                load.works_again(killed)
                degraded = [call.ended for call in load.degraded() if call.began >= killed]
                assert max(degraded, default=killed) - killed < BACK
            load.uses_up()
        it.nobody_was_harmed()
        it.denials_were_free()
        it.nothing_was_lost()
        assert not it.store.degraded
        it.a_fresh_key_is_exact()


@pytest.mark.long
def test_a_slot_that_moves_to_another_node_is_followed(kind: str) -> None:
    with cluster() as nodes, trial(f"redis+cluster://127.0.0.1:{nodes[0].port}", kind) as it:
        with it.load as load:
            load.spends(1)  # so that there is a key to be moved
            for _ in range(2):
                move_slot(nodes, key_slot(HOT.encode()), lambda: load.spends(1))
            assert load.passed() < CAPACITY, "it moved while it was being used"
            load.uses_up()
        it.nobody_was_harmed()
        it.denials_were_free()
        print(f"\n{len(load.degraded())} degraded, longest {load.longest():.3f} s")
        assert load.degraded() == []
        assert load.passed() == CAPACITY


def move_slot(nodes: list[Server], slot: int, meanwhile: Callable[[], None]) -> None:
    """Move a slot to the next node as an operator does, with time to be used between the steps."""
    with ExitStack() as stack:
        clients = [stack.enter_context(node.client(decode_responses=True)) for node in nodes]
        ids = [str(client.execute_command("CLUSTER", "MYID")) for client in clients]
        owner = owner_of(nodes, slot)
        target = (owner + 1) % len(nodes)
        clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner])
        clients[owner].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        meanwhile()
        keys = clients[owner].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        assert keys
        clients[owner].execute_command("MIGRATE", "127.0.0.1", nodes[target].port, "", 0, 5000, "KEYS", *keys)
        meanwhile()
        for i in (target, owner, *[i for i in range(len(nodes)) if i not in (target, owner)]):
            clients[i].execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
            meanwhile()


@pytest.mark.long
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "held up"])
def test_a_node_of_a_cluster_that_is_away_for_a_second(kind: str, fault: int) -> None:
    with cluster() as nodes, trial(f"redis+cluster://127.0.0.1:{nodes[0].port}", kind) as it:
        node = nodes[owner_of(nodes, key_slot(HOT.encode()))]
        with it.load as load:
            load.spends(CAPACITY // 4)
            if fault == signal.SIGKILL:
                node.kill()
            else:
                node.signal(fault)
            load.goes_without(1.0)
            if fault == signal.SIGKILL:
                node.start()
            else:
                node.signal(signal.SIGCONT)
            wait_for(lambda: all(is_whole(node, len(nodes)) for node in nodes), "the cluster")
            back = time.monotonic()
            load.works_again(back)
            load.uses_up()
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        assert load.passed() <= (CAPACITY if fault == signal.SIGSTOP else 2 * CAPACITY)
        it.a_fresh_key_is_exact()


def owner_of(nodes: list[Server], slot: int) -> int:
    with ExitStack() as stack:
        clients = [stack.enter_context(node.client(decode_responses=True)) for node in nodes]
        ids = [str(client.execute_command("CLUSTER", "MYID")) for client in clients]
        return next(i for i, client in enumerate(clients) if owns(client, ids[i], slot))


def owns(client: Any, name: str, slot: int) -> bool:
    for first, last, master, *_ in client.execute_command("CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return bool(master[2] == name)
    return False


# The server is away ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_that_is_killed_and_started_again(server: Server, kind: str, policy: str) -> None:
    """What it counted is gone, but from then on every limit holds again."""
    with trial(server.url, kind, policy) as it:
        with it.load as load:
            load.spends(CAPACITY // 4)
            server.kill()
            wait_for(lambda: it.store.degraded, "a store that is degraded", 1.0)
            load.goes_without(1.0)
            assert it.store.degraded
            server.start()
            back = time.monotonic()
            load.works_again(back)
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        assert len(it.events) <= 6, "it was away once; answers that were on their way may have come after that"
        assert load.passed() <= 2 * CAPACITY
        it.a_fresh_key_is_exact()


def test_a_server_that_is_restarted(server: Server, kind: str) -> None:
    with trial(server.url, kind) as it:
        with it.load as load:
            load.spends(CAPACITY // 4)
            server.signal(signal.SIGTERM)
            wait_for(lambda: it.store.degraded, "a store that is degraded", 1.0)
            server.restart()
            back = time.monotonic()
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
            server.restart()
            back = time.monotonic()
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
    with trial(server.url, kind, policy) as it:
        with it.load as load:
            load.spends(CAPACITY // 4)
            server.signal(signal.SIGSTOP)
            load.goes_without(3.0)
            assert it.store.degraded
            server.signal(signal.SIGCONT)
            back = time.monotonic()
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
            back = time.monotonic()
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
            back = time.monotonic()
            load.works_again(back)
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        assert load.passed() <= 2 * CAPACITY
        it.a_fresh_key_is_exact()
        print(f"{len(it.events)} events")


@pytest.mark.parametrize("limit", [LIMIT, SlidingWindow(5, 60), AllOf([LIMIT, SlidingWindow(5, 60)])], ids=str)
def test_a_full_memory_is_the_servers_trouble_whatever_is_counted(server: Server, limit: Limit) -> None:
    """It isn't read as a denial, nor as data of somebody else."""
    with RedisStore(server.url) as store, server.client() as client:
        limiter = Limiter(limit, store=store)
        limiter.check("before")
        client.config_set("maxmemory", 1)
        decision = limiter.check("after")
        assert (bool(decision), decision.degraded, store.degraded) == (True, True, True)


def test_a_server_that_takes_no_writes_is_not_called_back_for_every_denial(server: Server) -> None:
    """A denial writes nothing, so it is still answered; but what has to be written isn't, so the store is away."""
    events: list[object] = []
    with RedisStore(server.url, on_failure="closed") as store, server.client() as client:
        store.subscribe(events.append)
        limiter = Limiter(per_day(1), store=store)
        limiter.check(SPENT)
        client.config_set("maxmemory", 1)
        for _ in range(100):
            assert not limiter.check(HOT)
            assert not limiter.check(SPENT)
    assert len(events) < 10


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
            store._clients.renew()
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

    with Server() as other, RedisStore(server.url) as store, server.client() as client:
        asyncio.run(asyncio.wait_for(run(store, client, other), 10))


# Another server takes over --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_failover_by_sentinel(kind: str) -> None:
    """Writes that had not reached the replica are lost, so a little more than the capacity may pass, never twice it."""
    with (
        replicated() as (master, replica, sentinel),
        trial(f"redis+sentinel://127.0.0.1:{sentinel.port}/main", kind) as it,
        sentinel.client(decode_responses=True) as client,
    ):
        with it.load as load:
            load.spends(CAPACITY // 4)
            master.kill()
            wait_for(lambda: it.store.degraded, "a store that is degraded", 1.0)
            wait_for(lambda: is_master(client, replica), "the failover")
            back = time.monotonic()
            load.works_again(back)
            load.uses_up()
        it.nobody_was_harmed()
        it.it_was_degraded_until(back)
        print(f"{load.passed()} of {CAPACITY} passed over a failover")
        assert CAPACITY - len(load.of(HOT, degraded=True)) <= load.passed() <= 2 * CAPACITY
        it.a_fresh_key_is_exact()


def is_master(sentinel: Any, server: Server) -> bool:
    """Whether a Sentinel says so without reservation: for a second after a failover it has some."""
    words = sentinel.execute_command("SENTINEL", "MASTER", "main")
    state = words if isinstance(words, dict) else dict(zip(words[::2], words[1::2], strict=True))
    return str(state["port"]) == str(server.port) and state["flags"] == "master"


@pytest.mark.long
def test_after_a_failover_no_connection_goes_to_the_old_master() -> None:
    """Not even one that was idle meanwhile."""
    with (
        replicated() as (master, replica, sentinel),
        RedisStore(f"redis+sentinel://127.0.0.1:{sentinel.port}/main") as store,
        sentinel.client(decode_responses=True) as client,
    ):
        limiter = Limiter(LIMIT, store=store)
        assert not any(decision.degraded for decision in burst(limiter, WORKERS))
        master.kill()
        wait_for(lambda: is_master(client, replica), "the failover")
        assert not any(decision.degraded for decision in burst(limiter, WORKERS))


def burst(limiter: Limiter, threads: int) -> list[Decision]:
    """What so many threads are told that are started together."""
    start = threading.Barrier(threads)
    decisions: list[Decision] = []

    def check() -> None:
        start.wait()
        decisions.append(limiter.check("burst"))

    workers = [threading.Thread(target=check) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(decisions) == threads
    return decisions


@pytest.mark.long
def test_nobody_waits_for_sentinels_that_are_away_too(kind: str) -> None:
    with (
        replicated() as (master, _, sentinel),
        trial(f"redis+sentinel://127.0.0.1:{sentinel.port}/main", kind) as it,
    ):
        with it.load as load:
            load.spends(CAPACITY // 4)
            sentinel.kill()
            master.kill()
            load.goes_without(1.5)
        it.nobody_was_harmed()
