"""The suite of the sliding-window service's design: it passes any number of times in a row on the same server.

A client of `redis.asyncio` is handed to `RateLimiter`, keys begin with "test:", and each test cleans up after itself
with that same client: SCAN `ratelimit:test:*`, then DEL. Nothing else is reset between the tests or the rounds.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from headgate.sliding import RateLimiter, RateLimitResult, RateLimitSettings
from tests.support.valkey import PATIENCE, ValkeyServer

ROUNDS = 3
pytestmark = pytest.mark.usefixtures("round_number")
SETTINGS = RateLimitSettings(default_limit=5, default_window_ms=60_000, timeout=PATIENCE)


@pytest.fixture(scope="module", params=range(ROUNDS))
def round_number(request: pytest.FixtureRequest) -> int:
    """All tests that ask for it run in a first round, then in a second one, then in a third."""
    number: int = request.param
    return number


@pytest.fixture(params=[True, False], ids=["decoded", "bytes"])
def decoded(request: pytest.FixtureRequest) -> bool:
    """Whether the client decodes responses."""
    chosen: bool = request.param
    return chosen


@asynccontextmanager
async def limiter_of(server: ValkeyServer, decoded: bool, **settings: Any) -> AsyncIterator[tuple[RateLimiter, Any]]:
    """A limiter with a client, which in the end cleans up."""
    async with redis.asyncio.Redis(port=server.port, decode_responses=decoded) as client:
        try:
            yield RateLimiter(client, replace(SETTINGS, **settings)), client
        finally:
            async for key in client.scan_iter(match="ratelimit:test:*"):
                await client.delete(key)


def from_lua(*numbers: int) -> RateLimitResult:
    return RateLimitResult.from_lua_result(list(numbers))


async def test_c2_a_result_is_that_of_the_script(server: ValkeyServer, decoded: bool) -> None:
    async with limiter_of(server, decoded, default_limit=2) as (limiter, _client):
        results = [await limiter.check("test:user1") for _ in range(3)]
        assert results[:2] == [from_lua(1, 1, 1, 0), from_lua(1, 2, 0, 0)]
        assert results[2] == from_lua(0, 2, 0, results[2].retry_after_seconds)
        assert 0 < results[2].retry_after_seconds <= 60
        assert not any(result.degraded for result in results)


async def test_c3_defaults_calls_counters_and_resets(server: ValkeyServer, decoded: bool) -> None:
    async with limiter_of(server, decoded) as (limiter, _client):
        assert not await limiter.reset_counter("test:user1")
        assert [(await limiter.check("test:user1")).allowed for _ in range(6)] == [True] * 5 + [False]
        assert await limiter.check("test:user1", limit=6) == from_lua(1, 6, 0, 0)
        assert await limiter.get_counter("test:user1") == 6
        assert await limiter.get_counter("test:user1", window_ms=3_600_000) == 6
        assert (await limiter.check("test:user2")).current_count == 1
        assert await limiter.reset_counter("test:user1")
        assert await limiter.get_counter("test:user1") == 0
        assert await limiter.check("test:user1") == from_lua(1, 1, 4, 0)


async def test_c3_a_limit_of_0_blocks(server: ValkeyServer, decoded: bool) -> None:
    async with limiter_of(server, decoded) as (limiter, client):
        assert await limiter.check("test:user1", limit=0, window_ms=1500) == from_lua(0, 0, 0, 2)
        assert await client.exists("ratelimit:test:user1") == 0


async def test_c4_twenty_at_once_at_a_limit_of_ten(server: ValkeyServer, decoded: bool) -> None:
    async with limiter_of(server, decoded) as (limiter, _client):
        results = await asyncio.gather(*[limiter.check("test:user1", limit=10) for _ in range(20)])
        assert sum(result.allowed for result in results) == 10


async def test_c5_the_stored_key_is_the_prefix_and_the_key(server: ValkeyServer, decoded: bool) -> None:
    async with limiter_of(server, decoded) as (limiter, client):
        keys = ["test:user1", "test:user2", "test:{a}b", "test:100%", "test:ü", "test:" + "x" * 507]
        for key in keys:
            await limiter.check(key)
        found = {key if decoded else key.decode() async for key in client.scan_iter(match="ratelimit:test:*")}
        assert found == {f"ratelimit:{key}" for key in keys}
        for key in keys:
            assert 0 < await client.pttl(f"ratelimit:{key}") <= 60_002
        assert await client.keys("ratelimit:*") == await client.keys("*")  # and nothing else is left behind


async def test_c5_a_key_that_somebody_else_deletes_counts_from_0_at_once(server: ValkeyServer, decoded: bool) -> None:
    async with limiter_of(server, decoded, default_limit=1) as (limiter, client):
        for _ in range(3):
            assert await limiter.check("test:user1") == from_lua(1, 1, 0, 0)
            assert not (await limiter.check("test:user1")).allowed
            assert await client.delete("ratelimit:test:user1") == 1
