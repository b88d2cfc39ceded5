"""The sliding-window service, on a real server and in memory."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from headgate import InvalidInput, ManualClock, MemoryStore, RedisStore, StoreAway
from headgate.sliding import RateLimiter, RateLimitResult, RateLimitSettings
from headgate.stores import windows
from tests.support.valkey import PATIENCE, Server, wait_for
from tests.support.wrapped_store import WrappedStore

_numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(params=["redis", "memory"])
def where(request: pytest.FixtureRequest) -> Server | None:
    """A server, or None for memory."""
    found: Server | None = request.getfixturevalue("server") if request.param == "redis" else None
    return found


@asynccontextmanager
async def service(where: Server | None, **settings: Any) -> AsyncIterator[tuple[RateLimiter, ManualClock]]:
    clock = ManualClock(start=1000)
    own = RateLimitSettings(**settings)
    if where is None:
        yield RateLimiter(MemoryStore(clock=clock), own), clock
    else:
        async with RedisStore(where.url, prefix=f"ratelimit{next(_numbers)}:", clock=clock, timeout=PATIENCE) as store:
            yield RateLimiter(store, own), clock


def test_c1_a_request_stops_counting_exactly_one_window_after_it_was_made(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where, limit=2, window_ms=1000) as (limiter, clock):
            assert (await limiter.check("a")).allowed
            clock.advance(0.4)
            assert (await limiter.check("a")).allowed
            clock.advance(0.599_999)
            assert not (await limiter.check("a")).allowed
            clock.advance(0.000_001)
            assert (await limiter.check("a")).allowed
            assert not (await limiter.check("a")).allowed
            clock.advance(0.4)
            assert (await limiter.check("a")).allowed

    asyncio.run(walk())


def test_c1_one_call_of_one_script_by_its_digest_per_decision(server: Server) -> None:
    async def walk() -> None:
        async with service(server) as (limiter, _clock):
            await limiter.check("a")
            with server.client() as client:
                before = client.info("commandstats")
                await limiter.check("a")
                after = client.info("commandstats")
            assert after["cmdstat_evalsha"]["calls"] == before["cmdstat_evalsha"]["calls"] + 1
            assert after.get("cmdstat_eval") == before.get("cmdstat_eval")

    asyncio.run(walk())


def test_c2_the_result_has_four_fields(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where, limit=3, window_ms=60_000) as (limiter, clock):
            results = []
            for _ in range(3):
                results.append(await limiter.check("a"))
                clock.advance(10)
            assert results == [RateLimitResult(True, number, 3 - number, 0) for number in (1, 2, 3)]
            assert await limiter.check("a") == RateLimitResult(False, 3, 0, 30)
            clock.advance(0.5)
            assert await limiter.check("a") == RateLimitResult(False, 3, 0, 30)  # 29.5, rounded up
            clock.advance(0.5)
            assert await limiter.check("a") == RateLimitResult(False, 3, 0, 29)

    asyncio.run(walk())


def test_c2_the_wait_is_until_the_oldest_leaves_even_if_that_is_not_enough(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where, limit=3, window_ms=60_000) as (limiter, clock):
            for _ in range(3):
                await limiter.check("a")
                clock.advance(10)
            assert await limiter.check("a", limit=1) == RateLimitResult(False, 3, 0, 30)

    asyncio.run(walk())


def test_c3_defaults_are_100_in_60_000_ms(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where) as (limiter, clock):
            results = [await limiter.check("a") for _ in range(101)]
            assert [result.allowed for result in results] == [True] * 100 + [False]
            clock.advance(59.999)
            assert await limiter.get_counter("a") == 100
            clock.advance(0.001)
            assert await limiter.get_counter("a") == 0

    asyncio.run(walk())


def test_c3_limit_and_window_are_judged_per_call_and_the_state_belongs_to_the_key(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where, limit=5, window_ms=1000) as (limiter, clock):
            for _ in range(4):
                await limiter.check("a", window_ms=60_000)
                clock.advance(0.5)
            assert await limiter.get_counter("a") == 1
            assert await limiter.get_counter("a", window_ms=60_000) == 4
            assert await limiter.check("a", limit=1) == RateLimitResult(False, 1, 0, 1)
            assert await limiter.check("a", limit=2) == RateLimitResult(True, 2, 0, 0)
            assert await limiter.check("a", limit=5, window_ms=60_000) == RateLimitResult(False, 5, 0, 58)
            clock.advance(30)
            assert await limiter.get_counter("a") == 0
            assert await limiter.get_counter("a", window_ms=60_000) == 5
            clock.advance(60)
            assert await limiter.get_counter("a", window_ms=60_000) == 0

    asyncio.run(walk())


def test_c3_the_longest_window_that_was_asked_for_is_kept(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where, limit=5, window_ms=1000) as (limiter, clock):
            await limiter.check("a")
            await limiter.check("a", window_ms=60_000)
            clock.advance(2)
            await limiter.check("a")
            assert await limiter.get_counter("a") == 1
            assert await limiter.get_counter("a", window_ms=60_000) == 3

    asyncio.run(walk())


def test_c3_get_counter_counts_nothing_and_reset_counter_says_whether_there_was_anything(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where, limit=2) as (limiter, _clock):
            assert await limiter.get_counter("a") == 0
            assert not await limiter.reset_counter("a")
            await limiter.check("a")
            assert [await limiter.get_counter("a") for _ in range(3)] == [1, 1, 1]
            assert await limiter.reset_counter("a")
            assert not await limiter.reset_counter("a")
            assert (await limiter.check("a")).current_count == 1

    asyncio.run(walk())


def test_c4_twenty_at_once_at_a_limit_of_ten(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where, limit=10) as (limiter, _clock):
            results = await asyncio.gather(*[limiter.check("a") for _ in range(20)])
            assert sum(result.allowed for result in results) == 10
            assert sorted(result.current_count for result in results if result.allowed) == list(range(1, 11))
            assert (await limiter.check("b")).current_count == 1

    asyncio.run(walk())


def test_c5_two_in_the_same_microsecond_both_count(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where) as (limiter, _clock):
            assert [(await limiter.check("a")).current_count for _ in range(3)] == [1, 2, 3]  # the clock stands still

    asyncio.run(walk())


def test_c5_keys_are_namespaced_and_expire(server: Server) -> None:
    async def walk() -> None:
        async with RateLimiter(server.url, RateLimitSettings(timeout=PATIENCE)) as limiter:
            await limiter.check("a")
            await limiter.check("a")
            with server.client() as client:
                assert client.keys("ratelimit:*") == [b"ratelimit:{a}w1:"]
                assert 0 < client.pttl("ratelimit:{a}w1:") <= 60_002
                await limiter.check("b", window_ms=300)
                assert client.pttl("ratelimit:{b}w1:") <= 302
                wait_for(lambda: client.keys("ratelimit:*") == [b"ratelimit:{a}w1:"], "the end of the window")

    asyncio.run(walk())


def test_the_server_being_away_is_decided_by_the_settings() -> None:
    async def walk(on_failure: str) -> list[RateLimitResult]:
        settings = RateLimitSettings(url="redis://127.0.0.1:1", limit=2, on_failure=on_failure)
        async with RateLimiter(settings=settings) as limiter:
            results = [await limiter.check("a") for _ in range(3)]
            assert await limiter.get_counter("a") == {"local": 2, "open": 0, "closed": 2}[on_failure]
            with pytest.raises(StoreAway):
                await limiter.reset_counter("a")
            return results

    begin = time.monotonic()
    local = asyncio.run(walk("local"))
    elapsed = time.monotonic() - begin
    assert local[:2] == [RateLimitResult(True, 1, 1, 0), RateLimitResult(True, 2, 0, 0)]
    assert (local[2].allowed, local[2].current_count, local[2].remaining) == (False, 2, 0)
    assert 60 - elapsed <= local[2].retry_after_seconds <= 60
    assert asyncio.run(walk("open")) == [RateLimitResult(True, 0, 2, 0)] * 3
    assert asyncio.run(walk("closed")) == [RateLimitResult(False, 2, 0, 1)] * 3


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HEADGATE_"):
            monkeypatch.delenv(name)
    assert RateLimitSettings.from_environment() == RateLimitSettings("redis://localhost:6379/0", 100, 60_000)
    monkeypatch.setenv("HEADGATE_WINDOW_LIMIT", "7")
    monkeypatch.setenv("HEADGATE_WINDOW_MS", "500")
    monkeypatch.setenv("HEADGATE_REDIS_URL", "redis://example:1")
    monkeypatch.setenv("HEADGATE_WINDOW_PREFIX", "mine:")
    monkeypatch.setenv("HEADGATE_ON_FAILURE", "closed")
    monkeypatch.setenv("HEADGATE_STORE_TIMEOUT", "0.5")
    expected = RateLimitSettings("redis://example:1", 7, 500, "mine:", "closed", 0.5)
    assert RateLimiter().settings == expected


def test_bad_input_says_what_was_expected(where: Server | None) -> None:
    for environment, text in [
        ({"HEADGATE_WINDOW_LIMIT": "many"}, "HEADGATE_WINDOW_LIMIT: expected a whole number, got 'many'"),
        ({"HEADGATE_STORE_TIMEOUT": "x"}, "HEADGATE_STORE_TIMEOUT: expected a number of seconds, got 'x'"),
    ]:
        with pytest.raises(InvalidInput) as caught:
            RateLimitSettings.from_environment(environment)
        assert str(caught.value) == text

    async def walk() -> None:
        async with service(where) as (limiter, _clock):
            attempts: list[tuple[Any, str]] = [
                ((5,), "key: expected a string, got 5"),
                (("a", True), "limit: expected a whole number from 1 to 1000000, got True"),
                (("a", []), "limit: expected a whole number from 1 to 1000000, got []"),
                (("a", 0), "limit: expected a whole number from 1 to 1000000, got 0"),
                (("a", 1, 0.5), "window_ms: expected a whole number from 1 to 9007199254740, got 0.5"),
            ]
            assert (await limiter.check("b", 1)).allowed
            for arguments, text in attempts:
                with pytest.raises(InvalidInput) as caught:
                    await limiter.check(*arguments)
                assert str(caught.value) == text
            assert await limiter.get_counter("a") == 0

    asyncio.run(walk())


# In memory -----------------------------------------------------------------------------------------------------------


def test_c3_a_clock_that_steps_back_stands_still(where: Server | None) -> None:
    async def walk() -> None:
        async with service(where, limit=2, window_ms=1000) as (limiter, clock):
            await limiter.check("a")
            clock.step_back(0.5)
            assert (await limiter.check("a")).current_count == 2
            assert await limiter.check("a") == RateLimitResult(False, 2, 0, 2)  # 1.5, rounded up
            clock.advance(1.499_999)
            assert await limiter.get_counter("a") == 2
            clock.advance(0.000_001)
            assert await limiter.get_counter("a") == 0

    asyncio.run(walk())


@pytest.mark.parametrize("seed", range(8))
def test_c3_memory_says_what_the_server_says(server: Server, seed: int) -> None:
    """A random walk of two keys, through limits and windows that change with each call."""
    chance = random.Random(seed)
    clock, prefix = ManualClock(start=1000), f"walk{seed}:"

    def step() -> tuple[str, tuple[Any, ...]]:
        clock.advance(chance.choice([0, 0, 0.001, 0.004_999, 0.005, 0.03, 0.2, 1]))
        key, span = chance.choice("ab"), chance.choice([5, 50, 200, 1000])
        chosen = chance.random()
        if chosen < 0.02:
            return "reset_counter", (key,)
        return ("get_counter", (key, span)) if chosen < 0.3 else ("check", (key, chance.randint(1, 6), span))

    async def walk() -> None:
        async with RedisStore(server.url, prefix=prefix, clock=clock, timeout=PATIENCE) as store:
            limiters = [RateLimiter(MemoryStore(clock=clock)), RateLimiter(store)]
            with server.client() as client:
                for _ in range(400):
                    verb, arguments = step()
                    _expire(client, prefix, clock.now())
                    results = [await getattr(limiter, verb)(*arguments) for limiter in limiters]
                    assert results[0] == results[1], (verb, arguments)

    asyncio.run(walk())


def _expire(client: Any, prefix: str, now: int) -> None:
    """Drop what the server would have dropped by itself if its clock were the test's."""
    for key in client.keys(f"{prefix}*"):
        if int(client.lindex(key, 0)) + int(client.lindex(key, -2)) <= now:
            client.delete(key)


def test_c3_memory_by_its_url() -> None:
    async def walk(limiter: RateLimiter) -> list[bool]:
        async with limiter:
            return [(await limiter.check("a")).allowed for _ in range(3)]

    settings = RateLimitSettings(url="memory://", limit=2)
    assert asyncio.run(walk(RateLimiter(settings=settings))) == [True, True, False]
    assert asyncio.run(walk(RateLimiter("memory://", RateLimitSettings(limit=1)))) == [True, False, False]
    with RateLimiter(settings=settings) as limiter:
        assert isinstance(limiter, RateLimiter)


@pytest.mark.usefixtures("_switching")
def test_c4_memory_is_exact_under_threads() -> None:
    assert [_passed_of_a_burst() for _ in range(20)] == [150] * 20


def _passed_of_a_burst() -> int:
    """How many pass at a limit of 150 when 8 threads, started together, make 50 checks each."""
    limiter = RateLimiter(MemoryStore(), RateLimitSettings(limit=150))
    start, passed = threading.Barrier(8), list[bool]()

    def hammer() -> None:
        start.wait()
        for _ in range(50):
            try:
                limiter.check("a").send(None)  # it waits for nothing, so no loop is needed
            except StopIteration as end:
                passed.append(end.value.allowed)

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(passed)


def test_keys_in_memory_go_when_no_window_reaches_them() -> None:
    async def walk() -> None:
        async with service(None, window_ms=1000) as (limiter, clock):
            counts: Any = limiter._counters
            await limiter.check("long", window_ms=3_600_000)
            for number in range(5000):
                await limiter.check(f"key-{number}")
            assert len(counts._logs) == 5001
            assert counts._entries == 5001
            clock.advance(1)
            for number in range(2500):
                await limiter.check(f"new-{number}")
            assert len(counts._logs) == 2501
            assert counts._entries == 2501
            assert await limiter.get_counter("long", window_ms=3_600_000) == 1
            clock.advance(3600)
            assert not await limiter.reset_counter("long")
            for _ in range(1000):
                await limiter.check("a")
            assert list(counts._logs) == ["a"]
            assert await limiter.reset_counter("a")
            assert (len(counts._logs), counts._entries) == (0, 0)

    asyncio.run(walk())


def test_a_log_in_memory_is_as_long_as_the_longest_window_asks() -> None:
    async def walk() -> None:
        async with service(None, limit=1_000_000, window_ms=10) as (limiter, clock):
            counts: Any = limiter._counters
            for _ in range(10_000):
                await limiter.check("a")
                clock.advance(0.001)
                assert counts._entries <= 21
            await limiter.check("x" * 100_000)
            assert max(len(root) for root in counts._logs) < 600

    asyncio.run(walk())


def test_memory_that_is_full_denies_who_is_new_and_keeps_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def walk() -> None:
        clock = ManualClock(start=1000)
        limiter = RateLimiter(MemoryStore(clock=clock, max_keys=2), RateLimitSettings(limit=3))
        for key in "aba":
            assert (await limiter.check(key)).allowed
            clock.advance(0.000_001)
        assert await limiter.check("c") == RateLimitResult(False, 0, 0, 1)
        assert await limiter.get_counter("a") == 2
        monkeypatch.setattr(windows, "_MOST_ENTRIES", 3)
        assert await limiter.check("a") == RateLimitResult(False, 2, 0, 1)
        clock.advance(60)
        assert await limiter.check("c") == RateLimitResult(True, 1, 2, 0)
        monkeypatch.setattr(windows, "_MOST_KEYS", 1)
        small = RateLimiter(MemoryStore(clock=clock), RateLimitSettings(limit=3))
        assert [(await small.check(key)).allowed for key in "aba"] == [True, False, True]

    asyncio.run(walk())


def test_a_store_that_counts_no_windows_is_refused() -> None:
    with pytest.raises(InvalidInput, match="RateLimiter: expected a URL, or a store that counts windows, such as Mem"):
        RateLimiter(WrappedStore(ManualClock()))


def test_redis_py_is_not_needed_in_memory() -> None:
    code = "import sys; sys.modules['redis'] = None; import headgate.sliding; headgate.sliding.RateLimiter('memory://')"
    subprocess.run([sys.executable, "-c", code], check=True)
