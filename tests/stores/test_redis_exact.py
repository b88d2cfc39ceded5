"""Requirement A7 on a real server: exactly the limit passes, whoever asks, from wherever, whatever their clocks say."""

import asyncio
import hashlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from redis.crc import key_slot
from servers import Server, cluster, wait_for

from headgate import AllOf, Decision, Limit, Limiter, ManualClock, Outcome, SlidingWindow, parse, per_day, per_minute
from headgate.limits import per_hour, per_second
from headgate.stores import Ask, Offence, Verb
from headgate.stores.redis import RedisStore, gathering
from headgate.stores.redis.requests import Apply, Keys
from headgate.stores.redis.script import SOURCE
from headgate.violations import Backoff

ODD_AGENTS = [
    "agent-7",
    "",
    "}",
    "{",
    "{x}",
    "a}b",
    "{}",
    "}{",
    "%",
    "%7D",
    "%25",
    "ä",
    "\ud800",
    "x" * 512,
    "y" * 9999,
]
HOUR = 3_600_000_000
PATIENT = 10.0  # the store's timeout where the machine's slowness isn't the question


# Nodes: this file run as a program, told by a pipe what to do ---------------------------------------------------------


class Node:
    """A process of its own that hammers a store."""

    def __init__(self, url: str, *, ahead: int = 0, newer: bool = False) -> None:
        paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "node", url, str(ahead), "newer" if newer else ""],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
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


def be_a_node(url: str, ahead: int, newer: str) -> None:
    """What the other process does."""
    if ahead:
        for name, factor in (("time", 1), ("monotonic", 1), ("time_ns", 10**9), ("monotonic_ns", 10**9)):
            real: Callable[[], int] = getattr(time, name)
            setattr(time, name, lambda real=real, factor=factor: real() + ahead * factor)
    if newer:
        text = SOURCE + b"\n-- another version of the same"
        gathering._EVAL = ("EVAL", text)  # type: ignore[misc]
        gathering._EVALSHA = ("EVALSHA", hashlib.sha1(text).hexdigest().encode())  # type: ignore[misc]
    asyncio.run(_obey(url))


async def _obey(url: str) -> None:
    async with RedisStore(url, timeout=PATIENT) as store:
        await Limiter(per_day(1), store=store).apeek("known")
        print("{}", flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            limiter = Limiter(order["limit"], store=store)
            passed, degraded = await hammer(limiter, order["key"], order["tasks"], order["checks"])
            after = await limiter.apeek(order["key"])
            print(json.dumps({"passed": passed, "degraded": degraded, "wait": after.retry_us}), flush=True)


async def hammer(limiter: Limiter, key: str, tasks: int, checks: int) -> tuple[int, int]:
    """How many pass, and how many are degraded, when so many tasks make so many checks each."""

    async def one() -> list[Decision]:
        return [await limiter.acheck(key) for _ in range(checks)]

    decisions = [decision for made in await asyncio.gather(*[one() for _ in range(tasks)]) for decision in made]
    return sum(map(bool, decisions)), sum([decision.degraded for decision in decisions])


def passed_by_nodes(nodes: list[Node], limit: Limit, key: str, tasks: int, checks: int) -> int:
    """How many pass when all nodes hammer one key at the same time."""
    for node in nodes:
        node.ask(limit, key, tasks, checks)
    answers = [node.answer() for node in nodes]
    assert [answer["degraded"] for answer in answers] == [0] * len(nodes)
    return sum([answer["passed"] for answer in answers])


def fork_and_check(url: str) -> None:
    """What the process does that forks: it has used the store, and goes on with it on both sides."""
    store = RedisStore(url, timeout=PATIENT)
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


def fork_while_others_check(url: str) -> None:
    """The process forks while its other threads are in the middle of a check."""
    store = RedisStore(url, timeout=1)
    limiter = Limiter(per_day(10**6), store=store)
    limiter.check("busy")
    over = threading.Event()

    def keep_busy() -> None:
        while not over.is_set():
            limiter.check("busy")

    threads = [threading.Thread(target=keep_busy) for _ in range(16)]
    for thread in threads:
        thread.start()
    degraded = []
    for number in range(3):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # rather than hang for ever
            os.write(writer, str(limiter.check(f"child-{number}").degraded).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            degraded.append(pipe.read())  # nothing, if it was killed
        os.waitpid(child, 0)
    over.set()
    for thread in threads:
        thread.join()
    store.close()
    print(json.dumps(degraded))


def checked_by_threads(limiter: Limiter, key: str, threads: int, checks: int) -> list[int]:
    """How many pass, and how many are degraded, when threads that start together make so many checks each."""
    start, decisions = threading.Barrier(threads), []

    def check() -> None:
        start.wait()
        decisions.extend([limiter.check(key) for _ in range(checks)])

    running = [threading.Thread(target=check) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert len(decisions) == threads * checks
    return [sum(map(bool, decisions)), sum([decision.degraded for decision in decisions])]


def run_as_program(*arguments: str) -> Any:
    """What this file prints when it is run as a program."""
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# The servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def masters() -> Iterator[list[Server]]:
    with cluster() as nodes:
        yield nodes


@pytest.fixture
def raw(running: Server) -> Iterator[Any]:
    """A plain client of the empty server."""
    with running.client() as client:
        client.flushall()
        client.config_resetstat()
        yield client


@pytest.fixture
def server(running: Server, raw: Any) -> Server:
    return running


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    """On the server's clock."""
    with RedisStore(server.url, timeout=PATIENT) as store:
        yield store


@pytest.fixture(params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "server":
        server: Server = request.getfixturevalue("server")
        return server.url
    nodes: list[Server] = request.getfixturevalue("masters")
    return f"redis+cluster://127.0.0.1:{nodes[0].port}"


def time_of(raw: Any) -> int:
    """The server's time in microseconds."""
    seconds, rest = raw.time()
    return int(seconds) * 1_000_000 + int(rest)


def calls_of(raw: Any) -> int:
    """How often the script was called since the statistics were reset."""
    stats = raw.info("commandstats")
    return sum([stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval")])


def run(work: Any) -> Any:
    return asyncio.run(work)


# Processes ------------------------------------------------------------------------------------------------------------

LIMITS = [per_day(500), SlidingWindow(500, 86_400)]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a7_exactly_the_limit_passes_from_two_processes(url: str, limit: Limit) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(url)) for _ in range(2)]
        passed = [passed_by_nodes(nodes, limit, f"small {limit} {run}", tasks=20, checks=20) for run in range(2)]
    assert passed == [500] * 2


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a7_exactly_the_limit_passes_from_eight_processes_of_fifty_tasks(url: str, limit: Limit) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(url)) for _ in range(8)]
        passed = [passed_by_nodes(nodes, limit, f"large {limit} {run}", tasks=50, checks=5) for run in range(10)]
    assert passed == [500] * 10


def test_a7_nodes_whose_clocks_are_an_hour_apart_decide_the_same(server: Server) -> None:
    """Time is the server's: a node that is ahead doesn't refill for the others, and one that is behind not twice."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(server.url, ahead=ahead)) for ahead in (0, 3600, -3600)]
        for limit in (per_hour(200), SlidingWindow(200, 1800)):
            begin = time.monotonic()
            assert passed_by_nodes(nodes, limit, "key", tasks=20, checks=10) == 200
            waits = []
            for node in (*nodes, nodes[0]):
                node.ask(limit, "key", tasks=1, checks=1)
                waits.append(node.answer()["wait"])
            elapsed = (time.monotonic() - begin) * 1_000_000
            assert waits == sorted(waits, reverse=True)
            assert waits[0] - waits[-1] <= elapsed


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a7_nodes_with_different_scripts_agree(server: Server, raw: Any, limit: Limit) -> None:
    """While a new version is rolled out, both count on the same keys."""
    raw.script_flush()
    with Node(server.url) as one, Node(server.url, newer=True) as other:
        passed = [passed_by_nodes([one, other], limit, f"key-{run}", tasks=20, checks=20) for run in range(3)]
    assert passed == [500] * 3
    assert raw.info("memory")["number_of_cached_scripts"] == 2


def test_a7_exact_on_both_sides_of_a_fork(server: Server) -> None:
    """The child must not speak on its parent's connections."""
    before, parent, child = run_as_program("fork", server.url)
    assert before == [20, 0]
    assert (parent[0] + child[0], parent[1], child[1]) == (380, 0, 0)


def test_a7_a_fork_in_the_middle_of_checks_leaves_the_child_a_store_that_works(server: Server) -> None:
    assert run_as_program("fork-busy", server.url) == ["False"] * 3


# Threads and tasks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a7_two_thousand_threads_at_once_are_exact_on_few_connections(server: Server, raw: Any, limit: Limit) -> None:
    """On a store that nobody has used yet."""
    before = raw.info("stats")["total_connections_received"]
    with RedisStore(server.url, timeout=PATIENT) as store:
        passed, degraded = checked_by_threads(Limiter(limit, store=store), "key", threads=2000, checks=1)
    assert (passed, degraded) == (500, 0)
    assert raw.info("stats")["total_connections_received"] - before < 20


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a7_two_thousand_tasks_at_once_are_exact_on_few_connections(server: Server, raw: Any, limit: Limit) -> None:
    """On a store that nobody has used yet."""
    before = raw.info("stats")["total_connections_received"]

    async def work() -> tuple[int, int]:
        async with RedisStore(server.url, timeout=PATIENT) as store:
            return await hammer(Limiter(limit, store=store), "key", tasks=2000, checks=1)

    assert run(work()) == (500, 0)
    assert raw.info("stats")["total_connections_received"] - before < 20


def test_a7_two_thousand_tasks_on_a_store_in_use(server: Server, raw: Any) -> None:
    before = raw.info("stats")["total_connections_received"]

    async def work() -> tuple[int, int]:
        async with RedisStore(server.url, timeout=PATIENT) as store:
            limiter = Limiter(per_day(500), store=store)
            await limiter.apeek("key")
            return await hammer(limiter, "key", tasks=2000, checks=2)

    assert run(work()) == (500, 0)
    assert raw.info("stats")["total_connections_received"] - before < 20


def test_a7_threads_and_event_loops_share_one_store(store: RedisStore) -> None:
    limiter = Limiter(per_day(100), store=store)
    passed: list[int] = []

    async def tasks() -> None:
        passed.append((await hammer(limiter, "key", tasks=50, checks=2))[0])

    workers = [threading.Thread(target=run, args=(tasks(),)) for _ in range(3)]
    for worker in workers:
        worker.start()
    passed.append(checked_by_threads(limiter, "key", threads=8, checks=10)[0])
    for worker in workers:
        worker.join()
    assert sum(passed) == 100


def test_c4_twenty_at_once_at_a_limit_of_ten(server: Server) -> None:
    """Exactly ten pass, for each of five keys at the same time."""

    async def work() -> list[tuple[int, int]]:
        async with RedisStore(server.url, timeout=PATIENT) as store:
            limiter = Limiter(SlidingWindow(10, 60), store=store)
            await limiter.apeek("a")
            return await asyncio.gather(*[hammer(limiter, key, tasks=20, checks=1) for key in "abcde"])

    assert run(work()) == [(10, 0)] * 5


def test_c4_twenty_threads_at_a_limit_of_ten(store: RedisStore) -> None:
    limiter = Limiter(SlidingWindow(10, 60), store=store)
    assert checked_by_threads(limiter, "one", threads=20, checks=1) == [10, 0]
    assert limiter.peek("other").remaining == 10


# Cancelling -----------------------------------------------------------------------------------------------------------


def test_one_that_is_cancelled_before_it_is_sent_charges_nothing(server: Server) -> None:
    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENT) as store:
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

    run(work())


def test_one_that_is_cancelled_before_it_starts_charges_nothing(server: Server, raw: Any) -> None:
    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENT) as store:
            limiter = Limiter(per_day(100), store=store)
            await limiter.apeek("key")
            raw.config_resetstat()
            tasks = [asyncio.create_task(limiter.acheck("key")) for _ in range(10)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (await limiter.apeek("key")).remaining == 100

    run(work())
    assert calls_of(raw) == 1, "that was the peek"


@pytest.mark.parametrize("cancelled", [[3], [0], range(10)], ids=["one", "the first", "all"])
def test_cancelling_one_that_was_sent_harms_nobody_else(server: Server, cancelled: list[int]) -> None:
    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENT) as store:
            limiter = Limiter(per_day(100), store=store)
            await limiter.apeek("key")
            server.signal(signal.SIGSTOP)  # so that there is no answer yet
            try:
                tasks = [asyncio.create_task(limiter.acheck("key")) for _ in range(10)]
                for _ in range(20):
                    await asyncio.sleep(0)
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
            after = await asyncio.gather(*[limiter.apeek("key") for _ in range(60)])
            assert {(answer.remaining, answer.degraded) for answer in after} == {(90, False)}, "it had been sent"

    run(work())


# Together in one call -------------------------------------------------------------------------------------------------


def test_c1_one_check_is_one_call_of_the_script(store: RedisStore, raw: Any) -> None:
    for limit in (per_minute(60), SlidingWindow(60, 60), parse("100/minute; 5/second; 50/hour sliding")):
        limiter = Limiter(limit, store=store, name=str(limit))
        limiter.check("key")
        raw.config_resetstat()
        for number in range(5):
            limiter.check("key", request_id=f"r-{number}")
        assert calls_of(raw) == 5
        assert raw.info("commandstats").get("cmdstat_eval") is None, "it is called by its digest"


def test_fifty_tasks_in_one_turn_take_a_few_calls(server: Server, raw: Any) -> None:
    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENT) as store:
            limiter = Limiter(per_day(1000), store=store)
            await limiter.acheck("key")
            raw.config_resetstat()
            await limiter.acheck("key")
            assert calls_of(raw) == 1
            raw.config_resetstat()
            await asyncio.gather(*[limiter.acheck(f"key-{number % 7}") for number in range(50)])
            assert calls_of(raw) <= 4

    run(work())


def test_two_hundred_threads_take_a_few_calls(store: RedisStore, server: Server, raw: Any) -> None:
    """Those that come while eight are sending are sent together."""
    limiter = Limiter(per_day(1000), store=store)
    limiter.check("key")
    raw.config_resetstat()
    server.signal(signal.SIGSTOP)

    def go_on() -> None:
        try:
            wait_for(lambda: len(store._threads._waiting) == 192, "all have asked")
        finally:
            server.signal(signal.SIGCONT)

    helper = threading.Thread(target=go_on)
    helper.start()
    assert checked_by_threads(limiter, "key", threads=200, checks=1) == [200, 0]
    helper.join()
    assert calls_of(raw) == 8 + 1


# Defects of others ----------------------------------------------------------------------------------------------------


def test_defect_1_a_fast_refill_is_no_free_pass(store: RedisStore, raw: Any) -> None:
    limiter = Limiter(per_second(100, burst=10), store=store)
    limiter.peek("key")
    begin = time_of(raw)
    passed = sum([bool(limiter.check("key")) for _ in range(200)])
    elapsed = (time_of(raw) - begin) / 1_000_000
    assert 10 <= passed <= 10 + 100 * elapsed


def test_defect_2_polling_loses_no_refill(server: Server) -> None:
    clock = ManualClock(start=1000)
    with RedisStore(server.url, timeout=PATIENT, clock=clock) as store:
        limiter = Limiter(per_minute(90, burst=2), store=store)
        passed = sum([bool(limiter.check("key")) for _ in range(3)])
        for _ in range(6000):
            clock.advance(0.1)
            passed += bool(limiter.check("key"))
    assert passed == 902


def test_defect_3_other_keys_never_unblock_a_key(server: Server) -> None:
    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENT) as store:
            for limit in (per_day(1), SlidingWindow(1, 86_400)):
                limiter = Limiter(limit, store=store)
                await limiter.acheck("blocked")
                others = await asyncio.gather(*[limiter.acheck(f"other-{number}") for number in range(1100)])
                assert all(others)
                assert not await limiter.acheck("blocked")

    run(work())


def test_defect_4_all_keys_of_one_decision_are_in_one_slot() -> None:
    limit = parse("100/minute; 5/second; 50/hour sliding")
    slots = []
    for agent in ODD_AGENTS:
        asks, offence = [Ask("ws:heavy:default", agent, limit, 1)], Offence("agents", agent, Backoff())
        keys = Apply(Keys("headgate:"), Verb.CHECK, asks, 200, offence, "id}{1").keys
        assert len(set(keys)) == 5
        assert len({key_slot(key) for key in keys}) == 1, agent[:20]
        slots.append(key_slot(keys[0]))
    assert len(set(slots)) == len(ODD_AGENTS), "different agents are spread"


def test_c5_all_keys_of_one_decision_are_in_one_slot_of_a_cluster(masters: list[Server]) -> None:
    """The servers agree: with a key elsewhere they would refuse the whole decision."""
    limit = parse("100/minute; 2/hour; 50/hour sliding")
    with RedisStore(f"redis+cluster://127.0.0.1:{masters[1].port}", timeout=PATIENT) as store:
        for agent in ODD_AGENTS:
            asks, offence = [Ask("odd", agent, limit, 1)], Offence("agents", agent, Backoff())
            told = [store.apply(Verb.CHECK, asks, 200, offence, f"id-{number}") for number in range(3)]
            assert [(bool(one), one.degraded) for one in told] == [(True, False), (True, False), (False, False)]
            assert store.standing(offence).violations == 1
            again = store.apply(Verb.CHECK, asks, 200, offence, "id-0")
            assert (bool(again), again.degraded) == (True, False)


@pytest.mark.parametrize("limit", [per_minute(10), SlidingWindow(10, 60)], ids=str)
def test_defect_6_a_cost_that_is_too_high_spends_nothing(store: RedisStore, limit: Limit) -> None:
    limiter = Limiter(limit, store=store)
    assert limiter.check("key", 11).retry_after is None
    assert limiter.peek("key").remaining == 10
    assert limiter.check("key", 9)
    assert not limiter.check("key", 2)
    assert limiter.peek("key").remaining == 1


@pytest.mark.parametrize("sliding", ["", " sliding"], ids=["bucket", "window"])
def test_defect_6_while_one_limit_denies_the_other_is_not_charged(server: Server, raw: Any, sliding: str) -> None:
    limit = parse(f"100/minute{sliding}; 2/hour{sliding}")
    with RedisStore(server.url, timeout=PATIENT, clock=ManualClock(start=1000)) as store:
        decisions = [Limiter(limit, store=store).check("key") for _ in range(50)]
        assert [bool(decision) for decision in decisions] == [True] * 2 + [False] * 48
        assert {decision.limit for decision in decisions} == {limit.parts[1]}
        key = f"headgate:{{key}}{'w' if sliding else 'b'}1:{limit}#1:"
        if sliding:
            assert raw.lrange(key, -1, -1) == [b"2"]
        else:
            assert struct.unpack("<2d", raw.get(key)) == (98 * 600_000, 1_000_000_000)


@pytest.mark.parametrize("limit", [SlidingWindow(300, 1), AllOf([SlidingWindow(300, 1), per_second(300)])], ids=str)
def test_defect_7_what_has_left_the_window_is_gone(store: RedisStore, raw: Any, limit: Limit) -> None:
    limiter = Limiter(limit, store=store)
    for _ in range(300):
        limiter.check("key")
    sizes = [raw.memory_usage(key, samples=0) for key in raw.scan_iter()]
    assert all([0 < size < 300 * 32 for size in sizes])
    wait_for(lambda: raw.dbsize() == 0, "the window's keys go away")


def test_defect_9_a_flushed_script_is_loaded_again(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter(per_day(100), store=store)
    for left in (99, 98, 97):
        decision = limiter.check("key")
        assert (decision.remaining, decision.degraded) == (left, False)
        raw.script_flush()

    async def work() -> None:
        for left in (96, 95):
            assert (await limiter.acheck("key")).remaining == left
            raw.script_flush()
        decisions = await asyncio.gather(*[limiter.acheck("key") for _ in range(95)])
        assert sorted([decision.remaining for decision in decisions]) == [*range(95)]
        assert not any([decision.degraded for decision in decisions])

    run(work())
    assert all([raw.pttl(key) > 0 for key in raw.scan_iter()])
    assert caplog.records == []


def test_defect_9_a_server_that_was_restarted_is_told_the_script_again() -> None:
    with Server() as server, RedisStore(server.url, timeout=PATIENT) as store:
        limiter = Limiter(per_day(100), store=store)
        limiter.check("key")
        server.restart()
        wait_for(lambda: not limiter.check("key").degraded, "the store is back")
        assert limiter.check("key").remaining == 98


@pytest.mark.parametrize(("on_failure", "passes"), [("open", True), ("closed", False), ("local", True)])
def test_defect_11_no_memory_is_not_a_denial(
    server: Server, raw: Any, on_failure: str, passes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisStore(server.url, timeout=PATIENT, on_failure=on_failure) as store:
        limiters = [Limiter(limit, store=store) for limit in (per_minute(60), SlidingWindow(60, 60))]
        assert not any([limiter.check("key").degraded for limiter in limiters])
        raw.config_set("maxmemory", 1)
        try:
            for limiter in limiters:
                decision = limiter.check("key")
                assert (bool(decision), decision.degraded) == (passes, True)
        finally:
            raw.config_set("maxmemory", 0)
        assert any(["memory" in record.message for record in caplog.records])
        wait_for(lambda: not limiters[0].check("key").degraded, "the store is back")
        assert [limiter.peek("key").remaining for limiter in limiters] == [58, 59]


# The server's clock was set back (defect 8) ---------------------------------------------------------------------------


def stepped_back(caplog: pytest.LogCaptureFixture) -> int:
    """How often a step back was reported."""
    return sum(["clock has stepped back" in record.message for record in caplog.records])


def test_a5_a_clock_set_back_an_hour_blocks_no_bucket(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A stamp that is an hour ahead starts again from now: nothing is credited for the gap, nothing waits for it."""
    limiter = Limiter(per_second(5), store=store)
    key = "headgate:{key}b1:5/second:"
    raw.set(key, struct.pack("<2d", 0, time_of(raw) + HOUR), px=3_700_000)
    denied = limiter.check("key")
    assert not denied
    assert denied.remaining == 0
    assert denied.retry_us == 200_000
    assert denied.reset_after == 1.0
    stamp = struct.unpack("<2d", raw.get(key))[1]
    assert abs(time_of(raw) - stamp) < 1_000_000
    assert raw.pttl(key) <= 1010
    wait_for(lambda: limiter.check("key"), "one comes in")
    assert time_of(raw) >= stamp + 200_000
    wait_for(lambda: raw.dbsize() == 0, "the bucket is full and gone")
    assert stepped_back(caplog) == 1


def test_a5_a_peek_also_starts_a_bucket_again(store: RedisStore, raw: Any) -> None:
    limiter = Limiter(per_second(5), store=store)
    raw.set("headgate:{key}b1:5/second:", struct.pack("<2d", 0, time_of(raw) + HOUR), px=3_700_000)
    wait_for(lambda: limiter.peek("key"), "one comes in")


def test_a5_a_clock_set_back_an_hour_blocks_no_window(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The hits keep their distance; the newest was made now."""
    limiter = Limiter(SlidingWindow(3, 1), store=store)
    key, later = "headgate:{key}w1:3/second sliding:", time_of(raw) + HOUR
    raw.rpush(key, 1_000_000, 7, later - 400_000, 9, later, 10)
    raw.pexpire(key, 3_700_000)
    denied = limiter.check("key")
    assert not denied
    assert denied.retry_us == 600_000
    assert denied.reset_after == 1.0
    numbers = [int(number) for number in raw.lrange(key, 0, -1)]
    assert [numbers[0], numbers[1], numbers[3], numbers[5]] == [1_000_000, 0, 2, 3]
    assert numbers[4] - numbers[2] == 400_000
    assert abs(time_of(raw) - numbers[4]) < 500_000
    assert raw.pttl(key) <= 1010
    wait_for(lambda: limiter.check("key", 2), "two have left")
    assert time_of(raw) >= numbers[2] + 1_000_000
    wait_for(lambda: raw.dbsize() == 0, "all have left")
    assert stepped_back(caplog) == 1


def test_a5_a_clock_set_back_an_hour_keeps_nobody_rate_limited(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nothing but the standing is looked up: a scheduler does no more (B5)."""
    offence = Offence("agents", "a", Backoff(quiet=0.3, alert_window=0.3))
    later = time_of(raw) + HOUR
    raw.set("headgate:{a}v1:agents", struct.pack("<4d", 2, 0, later - 100_000, later), px=3_700_000)
    standing = store.standing(offence)
    assert (standing.violations, standing.quiet_left) == (2, 0.3)
    assert stepped_back(caplog) == 1
    wait_for(lambda: not store.standing(offence), "the quiet period passes", 5)


def test_a5_a_clock_set_back_an_hour_holds_up_nobody_for_it(store: RedisStore, raw: Any) -> None:
    """An enforced wait is as long as it is, from the new time on."""
    offence = Offence("agents", "a", Backoff(steps=[0.3], quiet=60, enforce=True))
    ask = Ask("", "a", per_minute(60), 1)
    raw.set("headgate:{a}v1:agents", struct.pack("<3d", 1, 0, time_of(raw) + HOUR), px=3_700_000)
    early = store.apply(Verb.CHECK, [ask], 200, offence)
    assert (bool(early), early.retry_after) == (False, 0.3)
    assert early.violation is not None
    assert early.violation.count == 2
    wait_for(lambda: store.standing(offence).wait_left == 0, "the wait is over", 5)
    assert store.apply(Verb.CHECK, [ask], 200, offence)


def test_a5_violations_go_on_after_a_clock_was_set_back(store: RedisStore, raw: Any) -> None:
    """The count goes on, and an alert that was raised isn't raised again."""
    offence = Offence("agents", "a", Backoff(alert_after=3))
    later = time_of(raw) + HOUR
    raw.set(
        "headgate:{a}v1:agents", struct.pack("<5d", 3, later - 10, later - 30, later - 20, later - 10), px=3_900_000
    )
    told = [store.offend(offence) for _ in range(2)]
    assert [(one.count, one.alert) for one in told] == [(4, False), (5, False)]
    count, alerted, *newest = struct.unpack("<5d", raw.get("headgate:{a}v1:agents"))
    assert count == 5
    assert all([abs(time_of(raw) - moment) < 1_000_000 for moment in (alerted, *newest)])
    assert raw.pttl("headgate:{a}v1:agents") <= 300_010


def test_a5_a_step_back_below_a_second_keeps_the_old_stamp(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock stands still until it has caught up."""
    ahead = 700_000
    stamp = time_of(raw) + ahead
    raw.set("headgate:{key}b1:5/second:", struct.pack("<2d", 0, stamp), px=60_000)
    raw.rpush("headgate:{key}w1:1/second sliding:", 1_000_000, 0, stamp, 1)
    raw.pexpire("headgate:{key}w1:1/second sliding:", 60_000)
    raw.set("headgate:{key}v1:agents", struct.pack("<3d", 1, 0, stamp), px=60_000)
    before = [raw.dump(key) for key in sorted(raw.keys())]
    bucket, window = Limiter(per_second(5), store=store), Limiter(SlidingWindow(1, 1), store=store)
    waits = [one.check("key").retry_us or 0 for one in (bucket, window)]
    assert store.standing(Offence("agents", "key", Backoff())).violations == 1
    caught_up = time_of(raw) >= stamp
    assert not caught_up, "this machine was too slow for the test"
    assert 200_000 < waits[0] <= 200_000 + ahead
    assert 1_000_000 < waits[1] <= 1_000_000 + ahead
    assert [raw.dump(key) for key in sorted(raw.keys())] == before
    wait_for(lambda: bucket.check("key"), "one comes in")
    assert time_of(raw) >= stamp + 200_000
    wait_for(lambda: window.check("key").outcome is not Outcome.DENY, "it leaves the window")
    assert time_of(raw) >= stamp + 1_000_000
    assert stepped_back(caplog) == 0


def test_a5_the_log_is_not_flooded_with_steps_back(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "headgate")
    limiter = Limiter(per_second(5), store=store)
    for number in range(20):
        raw.set(f"headgate:{{{number}}}b1:5/second:", struct.pack("<2d", 0, time_of(raw) + HOUR), px=3_700_000)
        assert not limiter.check(str(number))
    assert stepped_back(caplog) == 1


if __name__ == "__main__":
    if sys.argv[1] == "node":
        be_a_node(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1] == "fork":
        fork_and_check(sys.argv[2])
    else:
        fork_while_others_check(sys.argv[2])
