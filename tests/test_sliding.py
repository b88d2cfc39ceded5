"""The sliding-window service, on a real server and in memory."""

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import redis
import redis.asyncio

from headgate import InvalidInput, Limiter, ManualClock, MemoryStore, RedisStore, StoreAway
from headgate.sliding import RateLimiter, RateLimitResult, RateLimitSettings
from headgate.stores import windows
from tests.support.refusals import refusal
from tests.support.threads import run_together
from tests.support.valkey import PATIENCE, ValkeyServer, cluster, wait_for
from tests.support.wrapped_store import WrappedStore

pytestmark = pytest.mark.once

_numbers = count()


@pytest.fixture(params=["redis", "memory"])
def where(request: pytest.FixtureRequest) -> ValkeyServer | None:
    """A server, or None for memory."""
    found: ValkeyServer | None = request.getfixturevalue("server") if request.param == "redis" else None
    return found


@asynccontextmanager
async def service(where: ValkeyServer | None, **settings: Any) -> AsyncIterator[tuple[RateLimiter, ManualClock]]:
    clock = ManualClock(start=1000)
    own = RateLimitSettings(**{"prefix": f"ratelimit{next(_numbers)}:", **settings})
    if where is None:
        yield RateLimiter(MemoryStore(clock=clock), own), clock
    else:
        async with RedisStore(where.url, clock=clock, timeout=PATIENCE) as store:
            yield RateLimiter(store, own), clock


async def test_c1_a_request_stops_counting_exactly_one_window_after_it_was_made(where: ValkeyServer | None) -> None:
    async with service(where, default_limit=2, default_window_ms=1000) as (limiter, clock):
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


async def test_c1_one_call_of_one_script_by_its_digest_per_decision(server: ValkeyServer) -> None:
    async with service(server) as (limiter, _clock):
        await limiter.check("a")
        with server.client() as client:
            before = client.info("commandstats")
            await limiter.check("a")
            after = client.info("commandstats")
        assert after["cmdstat_evalsha"]["calls"] == before["cmdstat_evalsha"]["calls"] + 1
        assert after.get("cmdstat_eval") == before.get("cmdstat_eval")


async def test_c2_the_fields_of_a_result(where: ValkeyServer | None) -> None:
    async with service(where, default_limit=3, default_window_ms=60_000) as (limiter, clock):
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


async def test_c3_defaults_are_100_in_60_000_ms(where: ValkeyServer | None) -> None:
    async with service(where) as (limiter, clock):
        results = [await limiter.check("a") for _ in range(101)]
        assert [result.allowed for result in results] == [True] * 100 + [False]
        clock.advance(59.999)
        assert await limiter.get_counter("a") == 100
        clock.advance(0.001)
        assert await limiter.get_counter("a") == 0


async def test_c3_limit_and_window_are_judged_per_call_and_the_state_belongs_to_the_key(
    where: ValkeyServer | None,
) -> None:
    async with service(where, default_limit=5, default_window_ms=1000) as (limiter, clock):
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
    where: ValkeyServer | None,
) -> None:
    async with service(where, default_limit=2) as (limiter, _clock):
        assert await limiter.get_counter("a") == 0
        assert not await limiter.reset_counter("a")
        await limiter.check("a")
        assert [await limiter.get_counter("a") for _ in range(3)] == [1, 1, 1]
        assert await limiter.reset_counter("a")
        assert not await limiter.reset_counter("a")
        assert (await limiter.check("a")).current_count == 1


async def test_c4_twenty_at_once_at_a_limit_of_ten(where: ValkeyServer | None) -> None:
    async with service(where, default_limit=10) as (limiter, _clock):
        results = await asyncio.gather(*[limiter.check("a") for _ in range(20)])
        assert sum(result.allowed for result in results) == 10
        assert sorted(result.current_count for result in results if result.allowed) == list(range(1, 11))
        assert (await limiter.check("b")).current_count == 1


async def test_c5_keys_are_namespaced_and_expire(server: ValkeyServer) -> None:
    async with RateLimiter(server.url, RateLimitSettings(timeout=PATIENCE)) as limiter:
        await limiter.check("a")
        await limiter.check("a")
        with server.client() as client:
            assert client.keys("ratelimit:*") == [b"ratelimit:a"]
            assert 0 < client.pttl("ratelimit:a") <= 60_002
            await limiter.check("b", window_ms=300)
            assert client.pttl("ratelimit:b") <= 302
            wait_for(lambda: client.keys("ratelimit:*") == [b"ratelimit:a"], "the end of the window")


@pytest.mark.parametrize("by", ["url", "client", "store"])
async def test_c3_c5_a_url_a_client_and_a_store_count_the_same_keys(server: ValkeyServer, by: str) -> None:
    prefix = f"same-{by}:"
    settings = RateLimitSettings(timeout=PATIENCE, prefix=prefix)
    async with redis.asyncio.Redis(port=server.port) as client, RedisStore(server.url, timeout=PATIENCE) as store:
        where: Any = {"url": server.url, "client": client, "store": store}
        async with RateLimiter(where[by], settings) as limiter, RateLimiter(client, settings) as other:
            assert [(await one.check("user:123")).current_count for one in (limiter, other)] == [1, 2]
        assert await client.keys(f"{prefix}*") == [f"{prefix}user:123".encode()]  # and the client is still open


async def test_c5_limiters_with_different_prefixes_count_apart_also_without_the_server(server: ValkeyServer) -> None:
    async def walk(url: str) -> None:
        async with RedisStore(url, timeout=PATIENCE) as store:
            prefixes = ["one:", "two:", None]
            limiters = [RateLimiter(store, RateLimitSettings(prefix=prefix)) for prefix in prefixes]
            assert [(await limiter.check("a")).current_count for limiter in limiters] == [1, 1, 1]
            limiter = Limiter("100/minute sliding", store=store)
            assert (await limiter.acheck("a")).remaining == 99

    await walk(server.url)
    with server.client() as client:
        assert client.exists("one:a", "two:a", "headgate:windows:a") == 3
    await walk("redis://127.0.0.1:1")


async def test_c5_no_key_is_stored_as_another_one(server: ValkeyServer) -> None:
    """Long keys are stored by their beginning and a digest, which is longer than every short key."""
    async with service(server) as (limiter, _clock):
        prefix = str(limiter.settings.prefix)
        with server.client() as client:
            keys = ["", "a", "a:", "{a}", "{a}w1:", "%", "%25", "\ud800"]
            keys += ["x" * 512, "x" * 513, "ü" * 300, "x" * 100_000]
            for key in keys:
                assert (await limiter.check(key)).current_count == 1, key[:20]
            for key in client.keys(f"{prefix}*"):
                assert len(key) <= len(prefix) + 576
                name = key[len(prefix) :].decode("utf-8", "surrogatepass")
                assert (await limiter.check(name)).current_count == (2 if name in keys else 1)
            assert len(client.keys(f"{prefix}*")) == len(keys) + 3  # one of each long key's stored form


@pytest.mark.parametrize("prefix", ["headgate:", "headgate", "head", "headgate:windows:", "headgate-admin:x"])
def test_c5_a_prefix_under_which_the_store_keeps_other_keys_is_refused(prefix: str) -> None:
    taken = "headgate-admin:" if "admin" in prefix else "headgate:"
    text = f"prefix: expected one that doesn't overlap with the store's own '{taken}', got '{prefix}'"
    with pytest.raises(InvalidInput, match=re.escape(text)):
        RateLimiter("redis://127.0.0.1:1", RateLimitSettings(prefix=prefix))


@pytest.mark.parametrize("prefix", ["", "a{b}", 5])
def test_c5_a_prefix_that_is_no_text_or_has_braces_is_refused(prefix: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^prefix: expected some text without braces, got "):
        RateLimiter("redis://127.0.0.1:1", RateLimitSettings(prefix=prefix))


@pytest.mark.long
def test_c5_a_cluster_counts_keys_with_and_without_braces() -> None:
    async def walk(url: str) -> None:
        async with RateLimiter(url, RateLimitSettings(default_limit=2, timeout=PATIENCE)) as limiter:
            keys = ["a", "b", "user:{7}:x", "user:{7}:y", "}{", "{}c"]
            for _ in range(2):
                results = await asyncio.gather(*[limiter.check(key) for key in keys])
                assert all(result.allowed and not result.degraded for result in results)
            assert not any([(await limiter.check(key)).allowed for key in keys])
            assert all([await limiter.reset_counter(key) for key in keys])

    with cluster() as nodes:
        asyncio.run(walk(f"redis+cluster://127.0.0.1:{nodes[0].port}"))


async def test_c5_no_cache_remembers_a_key_that_somebody_else_has_deleted(server: ValkeyServer) -> None:
    async with RedisStore(server.url, remember_denials=True, draw_ahead=0.1, timeout=PATIENCE) as store:
        limiter = RateLimiter(store, RateLimitSettings(default_limit=1, prefix="uncached:"))
        with server.client() as client:
            for _ in range(3):
                assert [(await limiter.check("a")).allowed for _ in range(3)] == [True, False, False]
                assert client.delete("uncached:a") == 1


async def test_a_value_of_somebody_else_is_left_alone_and_decided_without_the_server(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with service(server, default_limit=1) as (limiter, _clock):
        key = f"{limiter.settings.prefix}a"
        with server.client() as client:
            client.set(key, "not ours")
            assert await limiter.check("a") == RateLimitResult(True, 1, 0, 0, degraded=True)
            assert await limiter.check("a") == RateLimitResult(False, 1, 0, 60, degraded=True)
            assert client.get(key) == b"not ours"
            assert f"there is something under {key} that this headgate didn't write" in caplog.text


def test_c2_without_the_server_the_settings_decide_and_results_are_degraded() -> None:
    async def walk(on_failure: str) -> list[RateLimitResult]:
        settings = RateLimitSettings(url="redis://127.0.0.1:1", default_limit=2, on_failure=on_failure)
        async with RateLimiter(settings=settings) as limiter:
            results = [await limiter.check("a") for _ in range(3)]
            assert await limiter.get_counter("a") == {"local": 2, "open": 0, "closed": 2}[on_failure]
            with pytest.raises(StoreAway):
                await limiter.reset_counter("a")
            return results

    begin = time.monotonic()
    local = asyncio.run(walk("local"))
    elapsed = time.monotonic() - begin
    assert local[:2] == [RateLimitResult(True, 1, 1, 0, degraded=True), RateLimitResult(True, 2, 0, 0, degraded=True)]
    assert (local[2].allowed, local[2].current_count, local[2].remaining) == (False, 2, 0)
    assert 60 - elapsed <= local[2].retry_after_seconds <= 60
    assert asyncio.run(walk("open")) == [RateLimitResult(True, 0, 2, 0, degraded=True)] * 3
    assert asyncio.run(walk("closed")) == [RateLimitResult(False, 2, 0, 1, degraded=True)] * 3


async def test_c3_without_the_server_limit_and_window_still_come_with_each_call() -> None:
    clock = ManualClock(start=1000)
    async with RedisStore("redis://127.0.0.1:1", nodes=2, clock=clock) as store:
        limiter = RateLimiter(store, RateLimitSettings(default_limit=6, default_window_ms=1000))
        results = [await limiter.check("a") for _ in range(4)]  # this node's share is 3
        assert [result.allowed for result in results] == [True, True, True, False]
        assert [result.remaining for result in results] == [2, 1, 0, 0]
        assert [result.current_count for result in results] == [1, 2, 3, 3]
        assert await limiter.get_counter("a") == 3
        assert (await limiter.check("a", limit=8)).allowed
        assert not (await limiter.check("b", limit=0)).allowed
        assert await limiter.get_counter("a") == 4
        clock.advance(1)
        assert await limiter.get_counter("a") == 0


async def test_c3_a_limit_of_0_blocks_until_the_oldest_leaves_or_for_a_window(where: ValkeyServer | None) -> None:
    async with service(where, default_limit=0, default_window_ms=2500) as (limiter, clock):
        assert await limiter.check("a") == RateLimitResult(False, 0, 0, 3)
        assert await limiter.get_counter("a") == 0
        assert not await limiter.reset_counter("a")
        assert await limiter.check("a", limit=1) == RateLimitResult(True, 1, 0, 0)
        clock.advance(0.5)
        assert await limiter.check("a") == RateLimitResult(False, 1, 0, 2)
        assert await limiter.check("a", window_ms=500) == RateLimitResult(False, 0, 0, 1)


def test_c2_a_result_is_made_from_four_numbers_of_a_script() -> None:
    assert RateLimitResult.from_lua_result([1, 5, 95, 0]) == RateLimitResult(True, 5, 95, 0, degraded=False)
    assert RateLimitResult.from_lua_result([0, 100, 0, 12]) == RateLimitResult(False, 100, 0, 12)
    attempts: list[tuple[Any, str]] = [
        ([1, 5, 95], "four whole numbers: allowed, count, remaining, retry after, got [1, 5, 95]"),
        ("1595", "four whole numbers: allowed, count, remaining, retry after, got '1595'"),
        ([1, 5, 95, -1], "a whole number from 0 to 9007199254740991, got -1"),
        ([1, None, 95, 0], "a whole number from 0 to 9007199254740991, got None"),
    ]
    for numbers, text in attempts:
        assert refusal(RateLimitResult.from_lua_result, numbers) == f"from_lua_result: expected {text}"


def test_an_unusable_default_is_named() -> None:
    for name, bad in (("default_limit", -1), ("default_window_ms", 0)):
        with pytest.raises(InvalidInput, match=f"^{name}: expected a whole number from"):
            RateLimiter("memory://", RateLimitSettings(**{name: bad}))  # type: ignore[arg-type]


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


async def test_bad_input_says_what_was_expected(where: ValkeyServer | None) -> None:
    for environment, text in [
        ({"HEADGATE_WINDOW_LIMIT": "many"}, "HEADGATE_WINDOW_LIMIT: expected a whole number, got 'many'"),
        ({"HEADGATE_STORE_TIMEOUT": "x"}, "HEADGATE_STORE_TIMEOUT: expected a number of seconds, got 'x'"),
    ]:
        assert refusal(RateLimitSettings.from_environment, environment) == text
    async with service(where) as (limiter, _clock):
        attempts: list[tuple[Any, str]] = [
            ((5,), "key: expected a string, got 5"),
            (("a", True), "limit: expected a whole number from 0 to 1000000, got True"),
            (("a", []), "limit: expected a whole number from 0 to 1000000, got []"),
            (("a", -1), "limit: expected a whole number from 0 to 1000000, got -1"),
            (("a", 1, 0.5), "window_ms: expected a whole number from 1 to 9007199254740, got 0.5"),
        ]
        assert (await limiter.check("b", 1)).allowed
        for arguments, text in attempts:
            with pytest.raises(InvalidInput) as caught:
                await limiter.check(*arguments)
            assert str(caught.value) == text
        assert await limiter.get_counter("a") == 0


# In memory -----------------------------------------------------------------------------------------------------------


async def test_c3_a_clock_that_steps_back_stands_still(where: ValkeyServer | None) -> None:
    async with service(where, default_limit=2, default_window_ms=1000) as (limiter, clock):
        await limiter.check("a")
        clock.step_back(0.5)
        assert (await limiter.check("a")).current_count == 2
        assert await limiter.check("a") == RateLimitResult(False, 2, 0, 2)  # 1.5, rounded up
        clock.advance(1.499_999)
        assert await limiter.get_counter("a") == 2
        clock.advance(0.000_001)
        assert await limiter.get_counter("a") == 0


@pytest.mark.parametrize("seed", range(8))
async def test_c3_memory_says_what_the_server_says(server: ValkeyServer, seed: int) -> None:
    """A random walk of two keys, through limits and windows that change with each call."""
    chance = random.Random(seed)
    clock, prefix = ManualClock(start=1000), f"walk{seed}:"

    def step() -> tuple[str, tuple[Any, ...]]:
        clock.advance(chance.choice([0, 0, 0.001, 0.004_999, 0.005, 0.03, 0.2, 1]))
        key, span = chance.choice("ab"), chance.choice([5, 50, 200, 1000])
        chosen = chance.random()
        if chosen < 0.02:
            return "reset_counter", (key,)
        return ("get_counter", (key, span)) if chosen < 0.3 else ("check", (key, chance.randint(0, 6), span))

    async with RedisStore(server.url, clock=clock, timeout=PATIENCE) as store:
        limiters = [RateLimiter(MemoryStore(clock=clock)), RateLimiter(store, RateLimitSettings(prefix=prefix))]
        with server.client() as client:
            for _ in range(400):
                verb, arguments = step()
                expire_keys(client, prefix, clock.now())
                results = [await getattr(limiter, verb)(*arguments) for limiter in limiters]
                assert results[0] == results[1], (verb, arguments)


def expire_keys(client: Any, prefix: str, now: int) -> None:
    """Drop what the server would have dropped by itself if its clock were the test's."""
    for key in client.keys(f"{prefix}*"):
        if int(client.lindex(key, 0)) + int(client.lindex(key, -2)) <= now:
            client.delete(key)


def test_c3_memory_by_its_url() -> None:
    async def walk(limiter: RateLimiter) -> list[bool]:
        async with limiter:
            return [(await limiter.check("a")).allowed for _ in range(3)]

    settings = RateLimitSettings(url="memory://", default_limit=2)
    assert asyncio.run(walk(RateLimiter(settings=settings))) == [True, True, False]
    assert asyncio.run(walk(RateLimiter("memory://", RateLimitSettings(default_limit=1)))) == [True, False, False]
    with RateLimiter(settings=settings) as limiter:
        assert isinstance(limiter, RateLimiter)


@pytest.mark.usefixtures("_frequent_switches")
def test_c4_memory_is_exact_under_threads() -> None:
    assert [passed_of_a_burst() for _ in range(20)] == [150] * 20


def passed_of_a_burst() -> int:
    """How many pass at a limit of 150 when 8 threads, started together, make 50 checks each."""
    limiter = RateLimiter(MemoryStore(), RateLimitSettings(default_limit=150))

    def hammer(_: int) -> int:
        passed = 0
        for _ in range(50):
            try:
                limiter.check("a").send(None)  # it waits for nothing, so no loop is needed
            except StopIteration as end:
                passed += end.value.allowed
        return passed

    return sum(run_together(8, hammer))


async def test_keys_in_memory_go_when_no_window_reaches_them() -> None:
    async with service(None, default_window_ms=1000) as (limiter, clock):
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


async def test_a_log_in_memory_is_as_long_as_the_longest_window_asks() -> None:
    async with service(None, default_limit=1_000_000, default_window_ms=10) as (limiter, clock):
        counts: Any = limiter._counters
        for _ in range(10_000):
            await limiter.check("a")
            clock.advance(0.001)
            assert counts._entries <= 21
        await limiter.check("x" * 100_000)
        assert max(len(root) for root in counts._logs) < 600


async def test_memory_that_is_full_denies_who_is_new_and_keeps_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(start=1000)
    limiter = RateLimiter(MemoryStore(clock=clock, max_keys=2), RateLimitSettings(default_limit=3))
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
    small = RateLimiter(MemoryStore(clock=clock), RateLimitSettings(default_limit=3))
    assert [(await small.check(key)).allowed for key in "aba"] == [True, False, True]


def test_c3_what_counts_no_windows_for_an_event_loop_is_refused() -> None:
    """A store that counts no windows, a client for threads, and whatever else."""
    attempts: list[Any] = [WrappedStore(ManualClock()), redis.Redis(port=1), 5, [], redis.asyncio.Redis]
    for where in attempts:
        expected = "a URL, a client of redis.asyncio, or a store that counts windows, such as MemoryStore()"
        with pytest.raises(InvalidInput, match=re.escape(f"RateLimiter: expected {expected}, got ")):
            RateLimiter(where)


def test_redis_py_is_not_needed_in_memory() -> None:
    code = "import sys; sys.modules['redis'] = None; import headgate.sliding; headgate.sliding.RateLimiter('memory://')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_option_of_a_rate_limiter_is_refused_by_name() -> None:
    expected = "RateLimiter: expected options among where, settings, got 'windoww'; "
    assert refusal(RateLimiter, windoww=3).startswith(expected)
