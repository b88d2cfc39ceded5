"""Requirement A7 on a real server: exactly the limit passes, from any number of processes, threads and tasks."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from headgate import Decision, Limit, Limiter, SlidingWindow, parse, per_day, per_minute
from headgate.stores.redis import RedisStore, batching
from headgate.stores.redis.script import SOURCE
from tests.support.event_loop import take_turns
from tests.support.threads import run_together
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.once  # the server's script decides; its callers are compiled or not in test_redis.py

FEW = batching._MAX_SENDERS + 1
"""Connections: one for each sender, and one that examines the server first."""

# Nodes: this file run as a program that takes orders through a pipe ---------------------------------------------------

PROGRAM = (sys.executable, __file__)
PATHS = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, PATHS))}


class Node:
    """A process of its own that hammers a store."""

    def __init__(self, url: str, *, ahead: int = 0, newer: bool = False) -> None:
        self._process = subprocess.Popen(
            [*PROGRAM, "node", url, str(ahead), "newer" if newer else ""],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()  # it is ready

    def ask(self, limit: Limit, key: str, tasks: int, checks: int) -> None:
        assert self._process.stdin is not None
        order = {"limit": str(limit), "key": key, "tasks": tasks, "checks": checks}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


def run_node(url: str, ahead: int, newer: str) -> None:
    """Run as a node, with clocks that are `ahead` seconds fast."""
    if ahead:
        for name, factor in (("time", 1), ("monotonic", 1), ("time_ns", 10**9), ("monotonic_ns", 10**9)):
            real: Callable[[], int] = getattr(time, name)
            setattr(time, name, lambda real=real, factor=factor: real() + ahead * factor)
    if newer:
        text = SOURCE + b"\n-- another version of the same"
        batching._EVAL = ("EVAL", text)  # type: ignore[misc]
        batching._EVALSHA = ("EVALSHA", hashlib.sha1(text).hexdigest().encode())  # type: ignore[misc]
    asyncio.run(obey_commands(url))


async def obey_commands(url: str) -> None:
    async with RedisStore(url, timeout=PATIENCE) as store:
        await Limiter(per_day(1), store=store).apeek("known")
        print("{}", flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            limiter = Limiter(order["limit"], store=store)
            passed, degraded = await check_concurrently(limiter, order["key"], order["tasks"], order["checks"])
            after = await limiter.apeek(order["key"])
            print(json.dumps({"passed": passed, "degraded": degraded, "wait": after.retry_us}), flush=True)


async def check_concurrently(limiter: Limiter, key: str, tasks: int, checks: int) -> tuple[int, int]:
    """The numbers that pass, and that are degraded, when each task makes that many checks."""

    async def one() -> list[Decision]:
        return [await limiter.acheck(key) for _ in range(checks)]

    decisions = [decision for made in await asyncio.gather(*[one() for _ in range(tasks)]) for decision in made]
    return sum(map(bool, decisions)), sum([decision.degraded for decision in decisions])


def passed_by_nodes(nodes: list[Node], limit: Limit, key: str, tasks: int, checks: int) -> int:
    """The number that passes when all nodes hammer one key at the same time."""
    for node in nodes:
        node.ask(limit, key, tasks, checks)
    answers = [node.answer() for node in nodes]
    assert [answer["degraded"] for answer in answers] == [0] * len(nodes)
    return sum([answer["passed"] for answer in answers])


def fork_and_check(url: str) -> None:
    """Use a store, fork, and go on using it in both processes."""
    store = RedisStore(url, timeout=PATIENCE)
    limiter = Limiter(per_day(400), store=store)
    passed = checked_by_threads(limiter, "forked", threads=4, checks=5)
    reader, writer = os.pipe()
    child = os.fork()
    counts = checked_by_threads(limiter, "forked", threads=4, checks=100)
    if child == 0:
        os.write(writer, json.dumps(counts).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        others = json.loads(pipe.read())
    os.waitpid(child, 0)
    store.close()
    print(json.dumps([passed, counts, others]))


def checked_by_threads(limiter: Limiter, key: str, threads: int, checks: int) -> list[int]:
    """The numbers that pass, and that are degraded, when each thread makes that many checks."""
    made = run_together(threads, lambda _: [limiter.check(key) for _ in range(checks)])
    decisions = [decision for by_one in made for decision in by_one]
    return [sum(map(bool, decisions)), sum([decision.degraded for decision in decisions])]


def connections(client: Any) -> int:
    """The number that the server has accepted since its statistics were reset."""
    return int(client.info("stats")["total_connections_received"])


def run_as_program(*arguments: str) -> Any:
    """Run this file as a program, and return what it prints."""
    command = [*PROGRAM, *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=5 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# The servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "server":
        server: ValkeyServer = request.getfixturevalue("server")
        return server.url
    nodes: list[ValkeyServer] = request.getfixturevalue("masters")
    return f"redis+cluster://127.0.0.1:{nodes[0].port}"


def calls_of(raw: Any) -> int:
    """The number of calls of the script since the statistics were reset."""
    stats = raw.info("commandstats")
    return sum([stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval")])


# Processes ------------------------------------------------------------------------------------------------------------

LIMITS = [per_day(500), SlidingWindow(500, 86_400)]


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a7_exactly_the_limit_passes_from_many_processes(url: str, limit: Limit) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(url)) for _ in range(8)]
        passed = [passed_by_nodes(nodes, limit, f"{limit} {run}", tasks=50, checks=5) for run in range(10)]
    assert passed == [500] * 10


@pytest.mark.long
def test_a7_nodes_whose_clocks_are_an_hour_apart_decide_the_same(server: ValkeyServer) -> None:
    """Only the server's clock counts."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(server.url, ahead=ahead)) for ahead in (0, 3600, -3600)]
        for limit in (per_day(200), SlidingWindow(200, 1800)):  # an hour would refill some
            begin = time.monotonic()
            assert passed_by_nodes(nodes, limit, "key", tasks=20, checks=10) == 200
            waits = []
            for node in (*nodes, nodes[0]):
                node.ask(limit, "key", tasks=1, checks=1)
                waits.append(node.answer()["wait"])
            elapsed = (time.monotonic() - begin) * 1_000_000
            assert waits == sorted(waits, reverse=True)
            assert waits[0] - waits[-1] <= elapsed


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a7_nodes_with_different_scripts_agree(server: ValkeyServer, raw: Any, limit: Limit) -> None:
    """As during the rollout of a new version."""
    raw.script_flush()
    with Node(server.url) as one, Node(server.url, newer=True) as other:
        passed = [passed_by_nodes([one, other], limit, f"key-{run}", tasks=20, checks=20) for run in range(3)]
    assert passed == [500] * 3
    assert raw.info("memory")["number_of_cached_scripts"] == 2


def test_a7_exact_on_both_sides_of_a_fork(server: ValkeyServer) -> None:
    """The child must not use its parent's connections."""
    before, parent, child = run_as_program("fork", server.url)
    assert before == [20, 0]
    assert (parent[0] + child[0], parent[1], child[1]) == (380, 0, 0)


# Threads and tasks ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a7_two_thousand_threads_at_once_are_exact_on_few_connections(
    server: ValkeyServer, raw: Any, limit: Limit
) -> None:
    """The store is new."""
    with RedisStore(server.url, timeout=PATIENCE) as store:
        passed, degraded = checked_by_threads(Limiter(limit, store=store), "key", threads=2000, checks=1)
    assert (passed, degraded) == (500, 0)
    assert connections(raw) <= FEW


@pytest.mark.long
@pytest.mark.usefixtures("_frequent_switches")
def test_a7_threads_that_find_a_new_store_share_its_first_connections(server: ValkeyServer, raw: Any) -> None:
    for trial in range(20):
        before = connections(raw)
        with RedisStore(server.url, timeout=PATIENCE) as store:
            passed = checked_by_threads(Limiter(per_day(100), store=store), str(trial), threads=120, checks=1)
        assert (passed, connections(raw) - before <= FEW) == ([100, 0], True)


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("limit", LIMITS, ids=str)
async def test_a7_two_thousand_tasks_at_once_are_exact_on_few_connections(
    server: ValkeyServer, raw: Any, limit: Limit, used: bool
) -> None:
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        limiter = Limiter(limit, store=store)
        if used:
            await limiter.apeek("key")
        assert await check_concurrently(limiter, "key", tasks=2000, checks=1 + used) == (500, 0)
    assert connections(raw) <= FEW


def test_a7_threads_and_event_loops_share_one_store(store: RedisStore) -> None:
    limiter = Limiter(per_day(100), store=store)

    def work(number: int) -> int:
        if number < 3:
            return asyncio.run(check_concurrently(limiter, "key", tasks=50, checks=2))[0]
        return sum(bool(limiter.check("key")) for _ in range(10))

    assert sum(run_together(11, work)) == 100


# Cancelling -----------------------------------------------------------------------------------------------------------


async def test_a_check_cancelled_before_it_is_sent_charges_nothing(server: ValkeyServer) -> None:
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        limiter = Limiter(per_day(100), store=store)
        await limiter.apeek("key")
        tasks = [asyncio.create_task(limiter.acheck("key")) for _ in range(10)]
        await asyncio.sleep(0)  # each has asked; nothing is sent before the loop's next turn
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(answer) for answer in answers] == [asyncio.CancelledError, Decision] * 5
        assert sorted([answer.remaining for answer in answers if isinstance(answer, Decision)]) == [*range(95, 100)]
        assert (await limiter.apeek("key")).remaining == 95


async def test_a_check_cancelled_before_it_starts_is_never_sent(server: ValkeyServer, raw: Any) -> None:
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        limiter = Limiter(per_day(100), store=store)
        await limiter.apeek("key")
        raw.config_resetstat()
        tasks = [asyncio.create_task(limiter.acheck("key")) for _ in range(10)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await limiter.apeek("key")).remaining == 100
    assert calls_of(raw) == 1, "that was the peek"


@pytest.mark.parametrize("cancelled", [[3], [0], range(10)], ids=["one", "the first", "all"])
async def test_cancelling_a_check_that_was_sent_affects_no_other(server: ValkeyServer, cancelled: list[int]) -> None:
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        limiter = Limiter(per_day(100), store=store)
        await limiter.apeek("key")
        server.signal(signal.SIGSTOP)  # so that there is no answer yet
        try:
            tasks = [asyncio.create_task(limiter.acheck("key")) for _ in range(10)]
            await take_turns(20)
            for number in cancelled:
                tasks[number].cancel()
            await asyncio.sleep(0)
            others = [task for number, task in enumerate(tasks) if number not in cancelled]
            assert not any([task.done() for task in others])
        finally:
            server.signal(signal.SIGCONT)
        answers = await asyncio.gather(*others)
        left = {99 - number for number in range(10) if number not in cancelled}
        assert {answer.remaining for answer in answers} == left
        await asyncio.gather(*tasks, return_exceptions=True)
        after = await asyncio.gather(*[limiter.apeek("key") for _ in range(60)])
        remaining = 90 + len(cancelled)
        assert {(one.remaining, one.degraded) for one in after} == {(remaining, False)}, "it was given back"


# Batches --------------------------------------------------------------------------------------------------------------


def test_c1_one_check_is_one_call_of_the_script(store: RedisStore, raw: Any) -> None:
    for limit in (per_minute(60), SlidingWindow(60, 60), parse("100/minute; 5/second; 50/hour sliding")):
        limiter = Limiter(limit, store=store, name=str(limit))
        limiter.check("key")
        raw.config_resetstat()
        for number in range(5):
            limiter.check("key", request_id=f"r-{number}")
        assert calls_of(raw) == 5
        assert raw.info("commandstats").get("cmdstat_eval") is None, "it is called by its digest"


async def test_fifty_tasks_in_one_turn_take_a_few_calls(server: ValkeyServer, raw: Any) -> None:
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        limiter = Limiter(per_day(1000), store=store)
        await limiter.acheck("key")
        raw.config_resetstat()
        await limiter.acheck("key")
        assert calls_of(raw) == 1
        raw.config_resetstat()
        await asyncio.gather(*[limiter.acheck(f"key-{number % 7}") for number in range(50)])
        assert calls_of(raw) <= 4


def test_two_hundred_threads_take_a_few_calls(store: RedisStore, server: ValkeyServer, raw: Any) -> None:
    """While eight are sending, the others are collected into one call."""
    limiter = Limiter(per_day(1000), store=store)
    limiter.check("key")
    raw.config_resetstat()
    server.signal(signal.SIGSTOP)

    def go_on() -> None:
        try:
            wait_for(lambda: len(store._executor.thread_batcher._waiting) == 192, "all checks to be queued")
        finally:
            server.signal(signal.SIGCONT)

    helper = threading.Thread(target=go_on)
    helper.start()
    assert checked_by_threads(limiter, "key", threads=200, checks=1) == [200, 0]
    helper.join()
    assert calls_of(raw) <= 8 + 8  # on a busy machine some of the eight are back before all others are collected


if __name__ == "__main__":
    if sys.argv[1] == "node":
        run_node(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        fork_and_check(sys.argv[2])
