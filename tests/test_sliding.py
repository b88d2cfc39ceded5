"""The sliding-window service, on a real server."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from servers import Server, wait_for

from headgate import InvalidInput, ManualClock, RedisStore, StoreAway
from headgate.sliding import RateLimiter, RateLimitResult, RateLimitSettings

_numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@asynccontextmanager
async def service(server: Server, **settings: Any) -> AsyncIterator[tuple[RateLimiter, ManualClock]]:
    clock = ManualClock(start=1000)
    store = RedisStore(server.url, prefix=f"ratelimit{next(_numbers)}:", clock=clock)
    yield RateLimiter(store, RateLimitSettings(**settings)), clock
    await store.aclose()


def test_c1_a_request_stops_counting_exactly_one_window_after_it_was_made(server: Server) -> None:
    async def walk() -> None:
        async with service(server, limit=2, window_ms=1000) as (limiter, clock):
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


def test_c2_the_result_has_four_fields(server: Server) -> None:
    async def walk() -> None:
        async with service(server, limit=3, window_ms=60_000) as (limiter, clock):
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


def test_c2_the_wait_is_until_the_oldest_leaves_even_if_that_is_not_enough(server: Server) -> None:
    async def walk() -> None:
        async with service(server, limit=3, window_ms=60_000) as (limiter, clock):
            for _ in range(3):
                await limiter.check("a")
                clock.advance(10)
            assert await limiter.check("a", limit=1) == RateLimitResult(False, 3, 0, 30)

    asyncio.run(walk())


def test_c3_defaults_are_100_in_60_000_ms(server: Server) -> None:
    async def walk() -> None:
        async with service(server) as (limiter, clock):
            results = [await limiter.check("a") for _ in range(101)]
            assert [result.allowed for result in results] == [True] * 100 + [False]
            clock.advance(59.999)
            assert await limiter.get_counter("a") == 100
            clock.advance(0.001)
            assert await limiter.get_counter("a") == 0

    asyncio.run(walk())


def test_c3_limit_and_window_are_judged_per_call_and_the_state_belongs_to_the_key(server: Server) -> None:
    async def walk() -> None:
        async with service(server, limit=5, window_ms=1000) as (limiter, clock):
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


def test_c3_the_longest_window_that_was_asked_for_is_kept(server: Server) -> None:
    async def walk() -> None:
        async with service(server, limit=5, window_ms=1000) as (limiter, clock):
            await limiter.check("a")
            await limiter.check("a", window_ms=60_000)
            clock.advance(2)
            await limiter.check("a")
            assert await limiter.get_counter("a") == 1
            assert await limiter.get_counter("a", window_ms=60_000) == 3

    asyncio.run(walk())


def test_c3_get_counter_counts_nothing_and_reset_counter_says_whether_there_was_anything(server: Server) -> None:
    async def walk() -> None:
        async with service(server, limit=2) as (limiter, _clock):
            assert await limiter.get_counter("a") == 0
            assert not await limiter.reset_counter("a")
            await limiter.check("a")
            assert [await limiter.get_counter("a") for _ in range(3)] == [1, 1, 1]
            assert await limiter.reset_counter("a")
            assert not await limiter.reset_counter("a")
            assert (await limiter.check("a")).current_count == 1

    asyncio.run(walk())


def test_c4_twenty_at_once_at_a_limit_of_ten(server: Server) -> None:
    async def walk() -> None:
        async with service(server, limit=10) as (limiter, _clock):
            results = await asyncio.gather(*[limiter.check("a") for _ in range(20)])
            assert sum(result.allowed for result in results) == 10
            assert sorted(result.current_count for result in results if result.allowed) == list(range(1, 11))
            assert (await limiter.check("b")).current_count == 1

    asyncio.run(walk())


def test_c5_two_in_the_same_microsecond_both_count_and_keys_are_namespaced_and_expire(server: Server) -> None:
    async def walk() -> None:
        async with RateLimiter(server.url, RateLimitSettings(window_ms=300)) as limiter:
            await limiter.check("a")
            await limiter.check("a")
            with server.client() as client:
                assert client.keys("ratelimit:*") == [b"ratelimit:{a}w1:"]
                assert 0 < client.pttl("ratelimit:{a}w1:") <= 302
                wait_for(lambda: not client.keys("ratelimit:*"), "the end of the window", seconds=5)
        async with service(server) as (limiter, _clock):
            assert [(await limiter.check("a")).current_count for _ in range(3)] == [1, 2, 3]  # the clock stands still

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

    local = asyncio.run(walk("local"))
    assert local[:2] == [RateLimitResult(True, 1, 1, 0), RateLimitResult(True, 2, 0, 0)]
    assert (local[2].allowed, local[2].current_count, local[2].remaining) == (False, 2, 0)
    assert local[2].retry_after_seconds in (59, 60)
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


def test_bad_input_says_what_was_expected(server: Server) -> None:
    for environment, text in [
        ({"HEADGATE_WINDOW_LIMIT": "many"}, "HEADGATE_WINDOW_LIMIT: expected a whole number, got 'many'"),
        ({"HEADGATE_STORE_TIMEOUT": "x"}, "HEADGATE_STORE_TIMEOUT: expected a number of seconds, got 'x'"),
    ]:
        with pytest.raises(InvalidInput) as caught:
            RateLimitSettings.from_environment(environment)
        assert str(caught.value) == text

    async def walk() -> None:
        async with service(server) as (limiter, _clock):
            attempts: list[tuple[Any, str]] = [
                ((5,), "key: expected a string, got 5"),
                (("a", 0), "limit: expected a whole number from 1 to 1000000, got 0"),
                (("a", 1, 0.5), "window_ms: expected a whole number from 1 to 9007199254740, got 0.5"),
            ]
            for arguments, text in attempts:
                with pytest.raises(InvalidInput) as caught:
                    await limiter.check(*arguments)
                assert str(caught.value) == text
            assert await limiter.get_counter("a") == 0

    asyncio.run(walk())
