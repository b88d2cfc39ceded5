"""The store under load while another server takes over, in a cluster or by Sentinel."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from redis.crc import key_slot

from headgate import Limiter
from headgate.stores.redis import RedisStore
from tests.support.fault_trial import CAPACITY, HOT, IMPATIENT, LIMIT, WORKERS, fault_trial
from tests.support.threads import run_together
from tests.support.valkey import PATIENCE, ValkeyServer, cluster, is_whole, replicated_server, wait_for

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("_leave_nothing_open")]

# Cluster --------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_slot_that_moves_to_another_node_is_followed(kind: str) -> None:
    with cluster() as nodes, fault_trial(f"redis+cluster://127.0.0.1:{nodes[0].port}", kind) as it:
        with it.load as load:
            load.ration()
            load.wait_for_passes(1)  # so that there is a key to move
            for _ in range(2):
                move_slot(nodes, key_slot(HOT.encode()), lambda: load.wait_for_passes(1))
            assert load.passed() < CAPACITY, "it moved while it was being used"
            load.use_up()
        it.check_callers()
        it.check_denials_spent_nothing()
        print(f"\n{len(load.degraded())} degraded, longest {load.longest():.3f} s")
        assert load.degraded() == []
        assert load.passed() == CAPACITY


def move_slot(nodes: list[ValkeyServer], slot: int, meanwhile: Callable[[], None]) -> None:
    """Move a slot to the next node as an operator does, calling `meanwhile` between the steps."""
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
        clients[owner].execute_command(
            "MIGRATE", "127.0.0.1", nodes[target].port, "", 0, int(PATIENCE * 1000), "KEYS", *keys
        )
        meanwhile()
        for i in (target, owner, *[i for i in range(len(nodes)) if i not in (target, owner)]):
            clients[i].execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
            meanwhile()


@pytest.mark.long
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_node_of_a_cluster_that_is_away_for_a_second(kind: str, fault: int) -> None:
    timeout = IMPATIENT if fault == signal.SIGSTOP else PATIENCE
    with cluster() as nodes, fault_trial(f"redis+cluster://127.0.0.1:{nodes[0].port}", kind, timeout=timeout) as it:
        node = nodes[owner_of(nodes, key_slot(HOT.encode()))]
        with it.load as load:
            load.wait_for_passes(CAPACITY // 4)
            if fault == signal.SIGKILL:
                node.kill()
            else:
                node.signal(fault)
            load.stay_degraded(1.0)
            if fault == signal.SIGKILL:
                node.start()
            else:
                node.signal(signal.SIGCONT)
            wait_for(lambda: all(is_whole(node, len(nodes)) for node in nodes), "the cluster")
            back = load.wait_for_recovery()
            load.use_up()
        it.check_recovery(back)
        if fault == signal.SIGSTOP:
            assert load.passed() <= CAPACITY


def owner_of(nodes: list[ValkeyServer], slot: int) -> int:
    with ExitStack() as stack:
        clients = [stack.enter_context(node.client(decode_responses=True)) for node in nodes]
        ids = [str(client.execute_command("CLUSTER", "MYID")) for client in clients]
        return next(i for i, client in enumerate(clients) if owns(client, ids[i], slot))


def owns(client: Any, name: str, slot: int) -> bool:
    for first, last, master, *_ in client.execute_command("CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return bool(master[2] == name)
    return False


# Sentinels -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_failover_by_sentinel(kind: str) -> None:
    """Writes that had not reached the replica are lost: more than the capacity may pass, but never twice as much."""
    with (
        replicated_server() as (master, replica, sentinel),
        fault_trial(f"redis+sentinel://127.0.0.1:{sentinel.port}/main", kind) as it,
        sentinel.client(decode_responses=True) as client,
    ):
        with it.load as load:
            load.wait_for_passes(CAPACITY // 4)
            master.kill()
            wait_for(lambda: it.store.degraded, "a degraded store")
            wait_for(lambda: is_master(client, replica), "the failover")
            back = load.wait_for_recovery()
            load.use_up()
        it.check_recovery(back)
        print(f"{load.passed()} of {CAPACITY} passed over a failover")
        assert CAPACITY - len(load.of(HOT, degraded=True)) <= load.passed()


def is_master(sentinel: Any, server: ValkeyServer) -> bool:
    """Whether a Sentinel is sure of its master: for a second after a failover it isn't."""
    words = sentinel.execute_command("SENTINEL", "MASTER", "main")
    state = words if isinstance(words, dict) else dict(zip(words[::2], words[1::2], strict=True))
    return str(state["port"]) == str(server.port) and state["flags"] == "master"


@pytest.mark.long
def test_after_a_failover_no_connection_goes_to_the_old_master() -> None:
    """Not even one that was idle during it."""
    with (
        replicated_server() as (master, replica, sentinel),
        RedisStore(f"redis+sentinel://127.0.0.1:{sentinel.port}/main", timeout=PATIENCE) as store,
        sentinel.client(decode_responses=True) as client,
    ):
        limiter = Limiter(LIMIT, store=store)
        assert not any(decision.degraded for decision in run_together(WORKERS, lambda _: limiter.check("burst")))
        master.kill()
        wait_for(lambda: is_master(client, replica), "the failover")
        assert not any(decision.degraded for decision in run_together(WORKERS, lambda _: limiter.check("burst")))


@pytest.mark.long
def test_callers_dont_wait_for_sentinels_that_are_away_too(kind: str) -> None:
    with (
        replicated_server() as (master, _, sentinel),
        fault_trial(f"redis+sentinel://127.0.0.1:{sentinel.port}/main", kind) as it,
    ):
        with it.load as load:
            load.wait_for_passes(CAPACITY // 4)
            sentinel.kill()
            master.kill()
            load.stay_degraded(1.5)
        it.check_callers()
