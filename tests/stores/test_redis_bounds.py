"""What a store bears: frozen clusters, small pools, refused commands, threads that can't start, other event loops."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio

from headgate import Gate, HeadgateError, Limiter, RedisStore, per_day, per_minute
from headgate.stores.redis import fallback, startup
from tests.support.cluster import steady_cluster
from tests.support.event_loop import wait_until
from tests.support.redis_store import SLACK, TIMEOUT, ProcessTime, ask_until_answered
from tests.support.threads import run_together
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = [pytest.mark.long, pytest.mark.once]

LIMIT = per_day(10**6)  # no refill while a test runs


# Time -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[ValkeyServer]]:
    with steady_cluster() as found:
        yield found


@pytest.mark.parametrize("used", [True, False], ids=["used", "new"])
async def test_a_frozen_cluster_holds_nobody_up(nodes: list[ValkeyServer], kind: str, used: bool) -> None:
    """Neither one caller nor many at once, whether or not they are connected."""
    async with RedisStore(f"redis+cluster://127.0.0.1:{nodes[0].port}", timeout=TIMEOUT) as store:
        limiter = Limiter(LIMIT, store=store)

        async def check_all() -> list[bool]:
            if kind == "tasks":
                return [one.degraded for one in await asyncio.gather(*[limiter.acheck(str(key)) for key in range(32)])]
            return run_together(32, lambda key: limiter.check(str(key)).degraded)

        deadline = time.monotonic() + PATIENCE
        while used and any(await check_all()):
            assert time.monotonic() < deadline
        try:
            for node in nodes:
                node.signal(signal.SIGSTOP)
            with ProcessTime() as took:
                degraded = await check_all()
        finally:
            for node in nodes:
                node.signal(signal.SIGCONT)
        assert all(degraded)
        assert took.seconds < 2 * TIMEOUT + SLACK

        async def recovered() -> bool:
            return not any(await check_all())

        await wait_until(recovered, "the nodes")


async def test_a_cluster_of_many_frozen_nodes_holds_nobody_up(kind: str) -> None:
    """A client that knows nothing of the cluster asks one node after the other."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(8)]
        url = f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in nodes)}"
        async with RedisStore(url, timeout=2 * TIMEOUT) as store:
            limiter = Limiter(LIMIT, store=store)
            with ProcessTime() as took:
                if kind == "tasks":
                    found = await asyncio.gather(*[limiter.acheck(str(key)) for key in range(8)])
                else:
                    found = run_together(8, lambda key: limiter.check(str(key)))
            assert all(one.degraded for one in found)
            assert took.seconds < 4 * TIMEOUT + SLACK


@contextmanager
def dripping_server(pause: float) -> Iterator[str]:
    """The URL of a server that has an answer ready now and then, whatever it was asked."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=reply, args=(listening.accept()[0],), daemon=True).start()

        def reply(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                while connection.recv(65536):
                    for _ in range(100):
                        time.sleep(pause)
                        connection.sendall(b"+OK\r\n")

        threading.Thread(target=drip, daemon=True).start()
        yield f"redis://user:password@127.0.0.1:{listening.getsockname()[1]}/3"
        listening.shutdown(socket.SHUT_RDWR)


def test_a_server_that_answers_slowly_step_by_step_holds_nobody_up() -> None:
    """Connecting takes several replies, each of which comes in time."""
    with dripping_server(0.9 * TIMEOUT) as url, RedisStore(url, timeout=TIMEOUT) as store:
        with ProcessTime() as took:
            assert all(run_together(20, lambda _: Limiter(LIMIT, store=store).check("a").degraded))
        assert took.seconds < 2 * TIMEOUT + SLACK


def test_threads_that_connect_again_to_a_slow_server_are_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones make the client, and the next ones take connections of it."""
    monkeypatch.setattr(fallback, "_PAUSE", 0.0)
    with dripping_server(3.6 * TIMEOUT) as url, RedisStore(url, timeout=4 * TIMEOUT) as store:
        limiter = Limiter(LIMIT, store=store)
        assert limiter.check("a").degraded
        assert store._clients._connections is not None
        with ProcessTime() as took:
            assert all(run_together(4, lambda _: limiter.check("a").degraded))
        assert took.seconds < 6 * TIMEOUT + SLACK


# Small pools ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [redis.ConnectionPool, redis.BlockingConnectionPool, None])
def test_a_small_pool_is_waited_for_by_threads(server: ValkeyServer, pool: type[redis.ConnectionPool] | None) -> None:
    client: Any = f"{server.url}?max_connections=2"
    if pool is not None:
        client = redis.Redis(connection_pool=pool(port=server.port, max_connections=2, socket_timeout=PATIENCE))
    events: list[object] = []
    with RedisStore(client, timeout=PATIENCE) as store:
        store.subscribe(events.append)
        limiter = Limiter(per_day(2000), store=store)
        found = run_together(16, lambda _: [limiter.check("a").degraded for _ in range(20)])
        assert not any(degraded for by_one in found for degraded in by_one)
        assert limiter.peek("a").remaining == 2000 - 320
        assert store.change_log().read().position == 0  # others find a free one, too
    assert events == []
    if pool is not None:
        client.close()


@pytest.mark.parametrize("pool", [redis.asyncio.ConnectionPool, redis.asyncio.BlockingConnectionPool])
async def test_a_small_pool_is_waited_for_by_tasks(server: ValkeyServer, pool: Any) -> None:
    client = redis.asyncio.Redis(connection_pool=pool(port=server.port, max_connections=2))
    store, events = RedisStore(client, timeout=PATIENCE), list[object]()
    store.subscribe(events.append)
    limiter = Limiter(LIMIT, store=store)
    for _ in range(5):
        found = await asyncio.gather(*[limiter.acheck("a") for _ in range(1500)])
        assert not any(decision.degraded for decision in found)
    assert events == []
    await client.aclose()
    await client.connection_pool.disconnect()


async def test_a_small_pool_of_a_url_is_waited_for_by_tasks(server: ValkeyServer) -> None:
    """Whatever the tasks do: one that never let others run would wait for ever for the connection that they have."""
    store, events = RedisStore(f"{server.url}?max_connections=1", timeout=PATIENCE), list[object]()
    store.subscribe(events.append)
    limiter, agents = Limiter(LIMIT, store=store), store.agents()
    found = await asyncio.gather(*[limiter.acheck("a") for _ in range(1500)], *[agents.knows("b") for _ in range(50)])
    assert not any(getattr(one, "degraded", False) for one in found)
    assert events == []
    await store.aclose()


def test_a_pool_that_stays_used_up_is_no_outage(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    client = redis.Redis(port=server.port, max_connections=1)
    store = RedisStore(client, timeout=0.1)
    limiter = Limiter(LIMIT, store=store)
    taken = client.connection_pool.get_connection()
    assert limiter.check("a").degraded
    assert not store.degraded
    assert "had no free connection in time" in caplog.text
    client.connection_pool.release(taken)
    wait_for(lambda: not limiter.check("a").degraded, "a free connection")
    client.close()


async def test_a_pool_of_tasks_that_stays_used_up_is_no_outage(server: ValkeyServer) -> None:
    for pool in (redis.asyncio.ConnectionPool, redis.asyncio.BlockingConnectionPool):
        client = redis.asyncio.Redis(connection_pool=pool(port=server.port, max_connections=1))
        store = RedisStore(client, timeout=0.1)
        limiter = Limiter(LIMIT, store=store)
        taken = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        assert (await limiter.acheck("a")).degraded
        assert not store.degraded
        await client.connection_pool.release(taken)
        await ask_until_answered(partial(limiter.acheck, "a"))
        await client.aclose()
        await client.connection_pool.disconnect()


# Refused INFO ---------------------------------------------------------------------------------------------------------


async def test_a_refused_info_is_a_hint(server: ValkeyServer, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "quiet", "on", "nopass", "~*", "&*", "+@all", "-info")
    async with RedisStore(f"redis://quiet:any@127.0.0.1:{server.port}", timeout=PATIENCE) as store:
        limiter = Limiter(LIMIT, store=store)
        decision = await limiter.acheck("a") if kind == "tasks" else limiter.check("a")
        assert not decision.degraded
        assert "the server's version and settings are unknown, INFO is refused" in caplog.text
        if kind == "tasks":
            await store.averify()
        else:
            store.verify()


# Listeners ------------------------------------------------------------------------------------------------------------


class ListenerError(Exception):
    """Raised by listeners."""


def fail(*_: object) -> None:
    raise ListenerError


def test_a_listener_that_raises_harms_no_check(caplog: pytest.LogCaptureFixture) -> None:
    with ValkeyServer() as server, RedisStore(server.url, timeout=PATIENCE) as store:
        store.subscribe(fail)
        limiter = Limiter(LIMIT, store=store)
        assert not limiter.check("a").degraded
        server.kill()
        assert limiter.check("a").degraded
        server.start()
        wait_for(lambda: not limiter.check("a").degraded, "the server")
    assert caplog.text.count("a listener failed on Degraded") == 2


async def test_a_listener_that_raises_does_not_undo_a_change_of_an_agent(server: ValkeyServer) -> None:
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        agents = store.agents()
        await agents.start(fail)
        try:
            await agents.add("a", b"1", 0.0, None)
            assert await agents.replace("a", b"2") == "done"
            assert await agents.verify("a", b"2")
        finally:
            await agents.close()


# Threads that can't be started ----------------------------------------------------------------------------------------


@contextmanager
def without_new_threads() -> Iterator[None]:
    """Let no thread be started in the block; afterwards it is tried again at once."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(startup, "_START_AFTER", 0.0)
        yield


def test_a_check_needs_no_thread(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    with without_new_threads():
        store = RedisStore(server.url, timeout=PATIENCE, remember_denials=True)
        limiter = Limiter(per_minute(1), store=store)
        assert [bool(limiter.check("a")) for _ in range(3)] == [True, False, False]
        assert "can't be sent to the store yet: can't start new thread" in caplog.text
    limiter.check("b")
    wait_for(lambda: not store._caches.need_flush(), "the flusher")  # type: ignore[union-attr]
    store.close()


def test_changes_are_followed_as_soon_as_a_thread_can_be_started(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with without_new_threads():
        gate = Gate(store=RedisStore(server.url, timeout=PATIENCE))
        assert "changes made elsewhere can't be followed yet: can't start new thread" in caplog.text
        assert gate.check("a", "ws", "heavy").remaining == 9
    with gate, Gate(store=RedisStore(server.url, timeout=PATIENCE)) as other:
        gate.check("a", "ws", "heavy")
        other.set_override("a", "heavy", "5/minute")
        wait_for(lambda: gate.capacity("a", "ws", "heavy") == 5, "the change")


def test_a_forked_process_starts_the_thread_that_its_parent_could_not_start_once(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisStore(server.url, timeout=PATIENCE)
    changes = store.change_log()
    with without_new_threads():
        changes.follow(lambda _: None)
    caplog.clear()
    for part in (store, changes):  # as in the child
        part._after_fork()
    Limiter(per_minute(1), store=store).check("forked")
    changes._start()
    assert not caplog.records
    assert not store._executor.startup._unstarted
    changes.close()
    store.close()


def test_a_gate_whose_thread_never_started_can_be_closed(server: ValkeyServer) -> None:
    with without_new_threads():
        Gate(store=RedisStore(server.url, timeout=PATIENCE)).close()


# Event loops ----------------------------------------------------------------------------------------------------------


def test_closed_event_loops_leak_no_sockets(server: ValkeyServer) -> None:
    """Those that were closed without any ceremony."""
    with RedisStore(server.url, timeout=PATIENCE) as store, server.client() as client:
        limiter = Limiter(LIMIT, store=store)
        before = client.info("clients")["connected_clients"]

        def use_a_loop() -> None:
            loop = asyncio.new_event_loop()
            assert not loop.run_until_complete(limiter.acheck("a")).degraded
            loop.close()

        for _ in range(20):
            use_a_loop()
        wait_for(lambda: client.info("clients")["connected_clients"] <= before + 1, "the connections to close")
        assert len(store._executor._loop_batchers) <= 1
    gc.collect()


def test_tasks_of_a_closed_event_loop_hold_nobody_up(server: ValkeyServer) -> None:
    """It was closed while their calls were under way."""
    with RedisStore(server.url, timeout=PATIENCE, draw_ahead=0.1) as store:
        limiter = Limiter(per_day(1000), store=store)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(limiter.acheck("a"))
        tasks = [loop.create_task(limiter.acheck("a")) for _ in range(10)]
        loop.run_until_complete(asyncio.sleep(0))
        loop.call_soon(loop.stop)
        loop.run_forever()
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        del loop, task, tasks
        found = asyncio.run(_checks(limiter, 20))
        assert not any(found)


async def _checks(limiter: Limiter, number: int) -> list[bool]:
    return [(await limiter.acheck("a")).degraded for _ in range(number)]


@pytest.mark.parametrize(
    "call",
    [
        lambda store: Limiter(LIMIT, store=store).acheck("a"),
        lambda store: Limiter(LIMIT, store=store).apeek("a"),
        RedisStore.areset,
        RedisStore.aclose,
    ],
    ids=["acheck", "apeek", "areset", "aclose"],
)
def test_without_an_event_loop_of_asyncio_there_is_a_clear_error_at_once(
    server: ValkeyServer, call: Callable[[RedisStore], Any]
) -> None:
    """As under trio, which runs coroutines in its own way."""
    with RedisStore(server.url, timeout=PATIENCE) as store:
        coroutine = call(store)
        with pytest.raises(
            HeadgateError, match=r"expected a running event loop of asyncio.*`check`, not `acheck`.*trio\.to_thread"
        ):
            coroutine.send(None)


# Forks ----------------------------------------------------------------------------------------------------------------


def output(program: str, *arguments: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FORKS = """
import asyncio, json, os, signal, sys, threading
from headgate import Gate, Limiter, RedisStore, per_day
from headgate.stores.redis import RedisStore

url, patience = sys.argv[1], float(sys.argv[2])
store = RedisStore(url, timeout=patience, draw_ahead=0.01, remember_denials=True)
limiter = Limiter(per_day(10**6), store=store)
loop = asyncio.new_event_loop()
loop.run_until_complete(limiter.acheck("a"))
over = threading.Event()

def keep_busy(number):
    while not over.is_set():
        limiter.check(f"busy-{number % 4}")

def keep_loop_busy():
    while not over.is_set():
        asyncio.run(limiter.acheck("loop"))

threads = [threading.Thread(target=keep_busy, args=(number,)) for number in range(12)]
threads.append(threading.Thread(target=keep_loop_busy))
for thread in threads:
    thread.start()
answers = []
for number in range(5):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(patience))
        found = [limiter.check("child").degraded for _ in range(5)]
        found.append(loop.run_until_complete(limiter.acheck("child")).degraded)
        found.append(asyncio.run(limiter.acheck("child")).degraded)
        store.close()
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answers.append(answer or json.dumps(f"ended with {ended}"))
over.set()
for thread in threads:
    thread.join()
answers.append(loop.run_until_complete(limiter.acheck("a")).degraded)
loop.run_until_complete(store.aclose())
print(json.dumps(answers))
"""


def test_a_forked_process_has_a_store_of_its_own(server: ValkeyServer) -> None:
    """With its own threads and connections, whatever the parent's did at that moment."""
    *children, parent = json.loads(output(FORKS, server.url, str(PATIENCE)))
    assert [json.loads(answer) for answer in children] == [[False] * 7] * 5
    assert parent is False


HANGING = """
import json, os, signal, sys, threading, time
from headgate import Limiter, per_day
from headgate.stores.redis import RedisStore

url, server, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
store = RedisStore(url, timeout=patience)
limiter = Limiter(per_day(10**6), store=store)
limiter.check("a")
os.kill(server, signal.SIGSTOP)
threads = [threading.Thread(target=limiter.check, args=[str(number)]) for number in range(20)]
for thread in threads:
    thread.start()
while len(store._executor.thread_batcher._senders) + len(store._executor.thread_batcher._waiting) < 20:
    time.sleep(0.001)
child = os.fork()
os.kill(server, signal.SIGCONT)
if child == 0:
    os._exit(any(limiter.check("child").degraded for _ in range(10)))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for thread in threads:
    thread.join()
"""


def test_a_process_that_is_forked_while_all_senders_wait_can_send(server: ValkeyServer) -> None:
    """The parent's threads, which have sent their requests, are not there to give their turns back."""
    assert output(HANGING, server.url, str(server.pid), str(PATIENCE)) == "0\n"


DRAWN = """
import os, sys
from headgate import Limiter, ManualClock, per_day
from headgate.stores.redis import RedisStore

store = RedisStore(sys.argv[1], timeout=60, draw_ahead=0.5, clock=ManualClock(start=1000))
limiter = Limiter(per_day(100), store=store)

def passed():
    return sum([bool(limiter.check("a")) for _ in range(200)])

before = sum([bool(limiter.check("a")) for _ in range(5)])
drawn = sum([one.tokens for one in store._caches.of("", limiter.limit)._drawn.values()])
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, str(passed()).encode())
    os._exit(0)
os.wait()
print(drawn > 20, before + int(os.read(reader, 10)) + passed())
store.close()
"""


def test_a_forked_process_has_none_of_the_tokens_that_its_parent_has_drawn(server: ValkeyServer) -> None:
    """Each of them would use them."""
    assert output(DRAWN, server.url) == "True 100\n"


GIVEN_BACK = """
import os, sys, threading
from headgate import Limiter, ManualClock, per_day
from headgate.stores.redis import RedisStore

store = RedisStore(sys.argv[1], timeout=60, draw_ahead=0.5, clock=ManualClock(start=1000))
limiter = Limiter(per_day(100), store=store)

def is_started():
    for _ in range(5):
        limiter.check("a")
    return "headgate-cache" in [thread.name for thread in threading.enumerate()]

print(is_started(), flush=True)
if os.fork() == 0:
    print(is_started(), flush=True)
    os._exit(0)
os.wait()
store.close()
"""


def test_a_forked_process_starts_its_own_thread_that_gives_tokens_back(server: ValkeyServer) -> None:
    assert output(GIVEN_BACK, server.url) == "True\nTrue\n"


ONE_LOOP = """
import asyncio, os, sys
from headgate import Limiter, per_day
from headgate.stores.redis import RedisStore

store = RedisStore(sys.argv[1], timeout=60)
limiter, loop = Limiter(per_day(100), store=store), asyncio.new_event_loop()
loop.run_until_complete(limiter.acheck("a"))
child = os.fork()
if child == 0:
    loop.run_until_complete(limiter.acheck("a"))
    os._exit(0)
os.waitpid(child, 0)
loop.run_until_complete(limiter.acheck("a"))
loop.run_until_complete(store.aclose())
"""


def test_the_event_loop_of_a_forked_process_has_its_own_connection(server: ValkeyServer, raw: Any) -> None:
    before = raw.info("stats")["total_connections_received"]
    output(ONE_LOOP, server.url)
    assert raw.info("stats")["total_connections_received"] - before == 2
