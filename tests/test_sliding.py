"""The sliding-window service, on a real server and in memory."""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from headgate import InvalidInput, ManualClock, MemoryStore, RedisStore, StoreAway
from headgate.sliding import RateLimiter, RateLimitResult, RateLimitSettings
from headgate.stores import windows
from tests.support.threads import run_together
from tests.support.valkey import PATIENCE, Server, wait_for
from tests.support.wrapped_store import WrappedStore

_numbers = count()


@pytest.fixture(params=["redis", "memory"])
def where(request: pytest.FixtureRequest) -> Server | None:
    """A server, or None for memory."""
    found: Server | None = request.getfixturevalue("redis_server") if request.param == "redis" else None
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


async def test_c1_a_request_stops_counting_exactly_one_window_after_it_was_made(where: Server | None) -> None:
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


async def test_c1_a_check_is_one_call_of_one_script_by_its_digest(redis_server: Server) -> None:
    async with service(redis_server) as (limiter, _clock):
        await limiter.check("a")
        with redis_server.client() as client:
            before = client.info("commandstats")
            await limiter.check("a")
            after = client.info("commandstats")
        assert after["cmdstat_evalsha"]["calls"] == before["cmdstat_evalsha"]["calls"] + 1
        assert after.get("cmdstat_eval") == before.get("cmdstat_eval")


async def test_c2_the_result_has_four_fields(where: Server | None) -> None:
    async with service(where, limit=3, window_ms=60_000) as (limiter, clock):
        results = []
        for _ in range(3):
            results.append(await limiter.check("a"))
            clock.advance(10)
        assert results == [RateLimitResult(True, number, 3 - number, 0) for number in (1, 2, 3)]
        assert await limiter.check("a") == RateLimitResult(False, 3, 0, 30)
        assert (await limiter.check("a", limit=1)).retry_after_seconds == 30, "until the oldest leaves"
        clock.advance(0.5)
        assert await limiter.check("a") == RateLimitResult(False, 3, 0, 30)  # 29.5, rounded up
        clock.advance(0.5)
        assert await limiter.check("a") == RateLimitResult(False, 3, 0, 29)


async def test_c3_defaults_are_100_in_60_000_ms(where: Server | None) -> None:
    async with service(where) as (limiter, clock):
        results = [await limiter.check("a") for _ in range(101)]
        assert [result.allowed for result in results] == [True] * 100 + [False]
        clock.advance(59.999)
        assert await limiter.get_counter("a") == 100
        clock.advance(0.001)
        assert await limiter.get_counter("a") == 0


async def test_c3_limit_and_window_may_differ_per_call_on_one_key(where: Server | None) -> None:
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


async def test_c3_get_counter_counts_nothing_and_reset_counter_reports_a_count(
    where: Server | None,
) -> None:
    async with service(where, limit=2) as (limiter, _clock):
        assert await limiter.get_counter("a") == 0
        assert not await limiter.reset_counter("a")
        await limiter.check("a")
        assert [await limiter.get_counter("a") for _ in range(3)] == [1, 1, 1]
        assert await limiter.reset_counter("a")
        assert not await limiter.reset_counter("a")
        assert (await limiter.check("a")).current_count == 1


async def test_c4_twenty_at_once_at_a_limit_of_ten(where: Server | None) -> None:
    async with service(where, limit=10) as (limiter, _clock):
        results = await asyncio.gather(*[limiter.check("a") for _ in range(20)])
        assert sum(result.allowed for result in results) == 10
        assert sorted(result.current_count for result in results if result.allowed) == list(range(1, 11))
        assert (await limiter.check("b")).current_count == 1


async def test_c5_keys_are_namespaced_and_expire(redis_server: Server) -> None:
    async with RateLimiter(redis_server.url, RateLimitSettings(timeout=PATIENCE)) as limiter:
        await limiter.check("a")
        await limiter.check("a")
        with redis_server.client() as client:
            assert client.keys("ratelimit:*") == [b"ratelimit:{a}w1:"]
            assert 0 < client.pttl("ratelimit:{a}w1:") <= 60_002
            await limiter.check("b", window_ms=300)
            assert client.pttl("ratelimit:{b}w1:") <= 302
            wait_for(lambda: client.keys("ratelimit:*") == [b"ratelimit:{a}w1:"], "the end of the window")


async def test_the_settings_decide_while_the_server_is_away() -> None:
    async def check_three(on_failure: str, counted: int) -> list[RateLimitResult]:
        settings = RateLimitSettings(url="redis://127.0.0.1:1", limit=2, on_failure=on_failure)
        async with RateLimiter(settings=settings) as limiter:
            results = [await limiter.check("a") for _ in range(3)]
            assert await limiter.get_counter("a") == counted
            with pytest.raises(StoreAway):
                await limiter.reset_counter("a")
            return results

    begin = time.monotonic()
    local = await check_three("local", 2)
    elapsed = time.monotonic() - begin
    assert local[:2] == [RateLimitResult(True, 1, 1, 0), RateLimitResult(True, 2, 0, 0)]
    assert (local[2].allowed, local[2].current_count, local[2].remaining) == (False, 2, 0)
    assert 60 - elapsed <= local[2].retry_after_seconds <= 60
    assert await check_three("open", 0) == [RateLimitResult(True, 0, 2, 0)] * 3
    assert await check_three("closed", 2) == [RateLimitResult(False, 2, 0, 1)] * 3


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


async def test_errors_state_the_expected_input(where: Server | None) -> None:
    for environment, text in [
        ({"HEADGATE_WINDOW_LIMIT": "many"}, "HEADGATE_WINDOW_LIMIT: expected a whole number, got 'many'"),
        ({"HEADGATE_STORE_TIMEOUT": "x"}, "HEADGATE_STORE_TIMEOUT: expected a number of seconds, got 'x'"),
    ]:
        with pytest.raises(InvalidInput) as caught:
            RateLimitSettings.from_environment(environment)
        assert str(caught.value) == text
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


# In memory -----------------------------------------------------------------------------------------------------------


async def test_c3_time_stands_still_after_a_step_back(where: Server | None) -> None:
    async with service(where, limit=2, window_ms=1000) as (limiter, clock):
        await limiter.check("a")
        clock.step_back(0.5)
        assert (await limiter.check("a")).current_count == 2
        assert await limiter.check("a") == RateLimitResult(False, 2, 0, 2)  # 1.5, rounded up
        clock.advance(1.499_999)
        assert await limiter.get_counter("a") == 2
        clock.advance(0.000_001)
        assert await limiter.get_counter("a") == 0


@pytest.mark.parametrize("seed", range(8))
async def test_c3_memory_and_server_agree(redis_server: Server, seed: int) -> None:
    """A random walk over two keys, with limits and windows that change with each call."""
    chance = random.Random(seed)
    clock, prefix = ManualClock(start=1000), f"walk{seed}:"

    def step() -> tuple[str, tuple[Any, ...]]:
        clock.advance(chance.choice([0, 0, 0.001, 0.004_999, 0.005, 0.03, 0.2, 1]))
        key, span = chance.choice("ab"), chance.choice([5, 50, 200, 1000])
        chosen = chance.random()
        if chosen < 0.02:
            return "reset_counter", (key,)
        return ("get_counter", (key, span)) if chosen < 0.3 else ("check", (key, chance.randint(1, 6), span))

    async with RedisStore(redis_server.url, prefix=prefix, clock=clock, timeout=PATIENCE) as store:
        limiters = [RateLimiter(MemoryStore(clock=clock)), RateLimiter(store)]
        with redis_server.client() as client:
            for _ in range(400):
                verb, arguments = step()
                _expire(client, prefix, clock.now())
                results = [await getattr(limiter, verb)(*arguments) for limiter in limiters]
                assert results[0] == results[1], (verb, arguments)


def _expire(client: Any, prefix: str, now: int) -> None:
    """Drop the keys that would have expired if the server's clock were the test's."""
    for key in client.keys(f"{prefix}*"):
        if int(client.lindex(key, 0)) + int(client.lindex(key, -2)) <= now:
            client.delete(key)


async def test_c3_memory_by_its_url() -> None:
    async def check_three(limiter: RateLimiter) -> list[bool]:
        async with limiter:
            return [(await limiter.check("a")).allowed for _ in range(3)]

    settings = RateLimitSettings(url="memory://", limit=2)
    assert await check_three(RateLimiter(settings=settings)) == [True, True, False]
    assert await check_three(RateLimiter("memory://", RateLimitSettings(limit=1))) == [True, False, False]
    with RateLimiter(settings=settings) as limiter:
        assert isinstance(limiter, RateLimiter)


@pytest.mark.usefixtures("_switching")
def test_c4_memory_is_exact_under_threads() -> None:
    """At a limit of 150, when 8 threads make 50 checks each."""
    for _ in range(20):
        limiter = RateLimiter(MemoryStore(), RateLimitSettings(limit=150))
        passed = run_together(8, lambda _, limiter=limiter: [check_now(limiter) for _ in range(50)])  # type: ignore[misc]
        assert sum(map(sum, passed)) == 150


def check_now(limiter: RateLimiter) -> bool:
    """Check without a loop: in memory there is nothing to wait for."""
    try:
        limiter.check("a").send(None)
    except StopIteration as end:
        return bool(end.value.allowed)
    raise AssertionError("it waits")


async def test_keys_in_memory_are_dropped_when_no_window_reaches_them() -> None:
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


async def test_a_log_in_memory_is_bounded_by_the_longest_window() -> None:
    async with service(None, limit=1_000_000, window_ms=10) as (limiter, clock):
        counts: Any = limiter._counters
        for _ in range(10_000):
            await limiter.check("a")
            clock.advance(0.001)
            assert counts._entries <= 21
        await limiter.check("x" * 100_000)
        assert max(len(root) for root in counts._logs) < 600


async def test_full_memory_denies_new_keys_and_keeps_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_store_that_counts_no_windows_is_refused() -> None:
    with pytest.raises(InvalidInput, match="RateLimiter: expected a URL, or a store that counts windows, such as Mem"):
        RateLimiter(WrappedStore(ManualClock()))


def test_redis_py_is_not_needed_in_memory() -> None:
    code = "import sys; sys.modules['redis'] = None; import headgate.sliding; headgate.sliding.RateLimiter('memory://')"
    subprocess.run([sys.executable, "-c", code], check=True)
