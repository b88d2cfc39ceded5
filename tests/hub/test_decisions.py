"""The decision service: sliding windows for programs in any language."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import pytest

from headgate import ManualClock, Policy, RedisStore
from headgate.sliding import RateLimiter, RateLimitResult, RateLimitSettings
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.valkey import PATIENCE, ValkeyServer

ROOMY = Policy(limits={"light": "100000/minute"})


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with hub_server(ROOMY) as hub:
        yield hub


@pytest.fixture
def program(hub: HubServer, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A program with the token of an agent of its own."""
    with hub.http(hub.register(request.node.name)) as client:
        yield client


def check(client: httpx.Client, key: str, **more: Any) -> tuple[bool, int, int, int]:
    answer = client.post("/v1/check", json={"key": key, **more})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert list(found) == ["allowed", "current_count", "remaining", "retry_after_seconds", "degraded"]
    assert found["degraded"] is False
    return found["allowed"], found["current_count"], found["remaining"], found["retry_after_seconds"]


def counter(client: httpx.Client, key: str, **query: Any) -> int:
    answer = client.get(f"/v1/counters/{quote(key, safe='')}", params=query)
    assert answer.json() == {"key": key, "current_count": answer.json()["current_count"]}
    count: int = answer.json()["current_count"]
    return count


def reset(client: httpx.Client, key: str) -> bool:
    answer = client.delete(f"/v1/counters/{quote(key, safe='')}")
    assert answer.json() == {"key": key, "reset": answer.json()["reset"]}
    was: bool = answer.json()["reset"]
    return was


def test_keys_are_as_long_in_a_path_as_in_a_check(program: httpx.Client) -> None:
    assert check(program, "k" * 512, limit=2, window_ms=2500)[0]
    assert counter(program, "k" * 512, window_ms=2500) == 1
    assert reset(program, "k" * 512)
    for answer in (program.get(f"/v1/counters/{'k' * 513}"), program.delete(f"/v1/counters/{'k' * 513}")):
        assert (answer.status_code, answer.json()["error"]) == (400, "invalid")
        assert answer.json()["detail"].startswith("key: expected 1 to 512 characters, got 'kkk")


def test_c2_the_fields_of_a_check(hub: HubServer, program: httpx.Client) -> None:
    assert check(program, "k", limit=2, window_ms=2500) == (True, 1, 1, 0)
    hub.clock.advance(0.5)
    assert check(program, "k", limit=2, window_ms=2500) == (True, 2, 0, 0)
    assert check(program, "k", limit=2, window_ms=2500) == (False, 2, 0, 2)
    hub.clock.advance(1.999999)
    assert check(program, "k", limit=2, window_ms=2500) == (False, 2, 0, 1)
    hub.clock.advance(0.000001)  # the first leaves at exactly its time + the window
    assert check(program, "k", limit=2, window_ms=2500) == (True, 2, 0, 0)


def test_c3_defaults_reading_and_resetting_a_counter(hub: HubServer, program: httpx.Client) -> None:
    assert (counter(program, "k"), reset(program, "k")) == (0, False)
    assert check(program, "k") == (True, 1, 99, 0)
    assert [check(program, "k") for _ in range(99)][-1] == (True, 100, 0, 0)
    assert check(program, "k") == (False, 100, 0, 60)
    assert counter(program, "k") == counter(program, "k") == 100
    assert (reset(program, "k"), reset(program, "k"), counter(program, "k")) == (True, False, 0)
    assert check(program, "k") == (True, 1, 99, 0)


def test_c3_limit_and_window_apply_per_call(hub: HubServer, program: httpx.Client) -> None:
    assert check(program, "k", window_ms=60_000) == (True, 1, 99, 0)
    hub.clock.advance(10)
    assert check(program, "k", window_ms=60_000) == (True, 2, 98, 0)
    assert check(program, "k", limit=2) == (False, 2, 0, 50)
    assert check(program, "k", limit=2, window_ms=5_000) == (True, 2, 0, 0)
    assert [counter(program, "k", window_ms=window) for window in (60_000, 5_000, 1)] == [3, 2, 2]


def test_c3_a_limit_of_0_blocks(program: httpx.Client) -> None:
    assert check(program, "k", limit=0, window_ms=1500) == (False, 0, 0, 2)
    assert (counter(program, "k"), check(program, "k", limit=1)) == (0, (True, 1, 0, 0))


async def test_c5_counters_of_callers_and_of_a_stand_alone_limiter_are_apart(redis_server: ValkeyServer) -> None:
    prefix = f"test-{uuid4().hex}:"
    store = RedisStore(redis_server.url, prefix=prefix, timeout=PATIENCE, clock=ManualClock(start=1000))
    with hub_server(ROOMY, store=store) as hub, hub.http(hub.register("a")) as client, redis_server.client() as raw:
        assert check(client, "k", limit=1) == (True, 1, 0, 0)
        assert raw.keys(f"{prefix}windows:*") == [f"{prefix}windows:1:ak".encode()]
        assert raw.keys("ratelimit:*1:ak") == []
        async with RateLimiter(redis_server.url, RateLimitSettings(timeout=PATIENCE)) as limiter:
            assert await limiter.check("1:ak", limit=1) == RateLimitResult(True, 1, 0, 0)
            assert await limiter.reset_counter("1:ak")
        assert counter(client, "k") == 1


def test_c4_keys_are_independent(program: httpx.Client) -> None:
    assert check(program, "a", limit=1) == (True, 1, 0, 0)
    assert check(program, "a", limit=1)[0] is False
    assert check(program, "b", limit=1) == (True, 1, 0, 0)


@pytest.mark.parametrize("key", ["a/b", "a b", "%2F", "100%", "🙂", "k?x=1#y", '"', "x" * 512, "1:", "..."])
def test_any_key_has_a_counter(program: httpx.Client, key: str) -> None:
    assert check(program, key)[1] == 1
    assert (counter(program, key), reset(program, key), counter(program, key)) == (1, True, 0)


def test_keys_of_two_agents_do_not_collide(hub: HubServer) -> None:
    """Names and keys that would be the same text one after the other, and the admin's own."""
    pairs = [("a", "bc"), ("ab", "c"), ("abc", "x"), ("2:abc", "x"), ("0:", "k"), ("1:a", "bc"), ("1", ":abc")]
    with hub.http(ADMIN) as admin:
        for agent, key in pairs:
            with hub.http(hub.register(agent)) as client:
                assert check(client, key, limit=1) == (True, 1, 0, 0), (agent, key)
                assert check(client, key, limit=1)[0] is False
        for _, key in pairs:
            assert counter(admin, key) == 0
        for agent, key in pairs:
            for text in (f"{agent}{key}", f"{len(agent)}:{agent}{key}"):
                assert not reset(admin, text)
        assert check(admin, "bc") == (True, 1, 99, 0)


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "Object missing required field `key`"),
        ({"key": ""}, "Expected `str` of length >= 1 - at `$.key`"),
        ({"key": "k" * 513}, "Expected `str` of length <= 512 - at `$.key`"),
        ({"key": 5}, "Expected `str`, got `int` - at `$.key`"),
        ({"key": "k", "limit": -1}, "Expected `int` >= 0 - at `$.limit`"),
        ({"key": "k", "limit": 1_000_001}, "Expected `int` <= 1000000 - at `$.limit`"),
        ({"key": "k", "limit": "5"}, "Expected `int | null`, got `str` - at `$.limit`"),
        ({"key": "k", "limit": True}, "Expected `int | null`, got `bool` - at `$.limit`"),
        ({"key": "k", "window_ms": 0}, "Expected `int` >= 1 - at `$.window_ms`"),
        ({"key": "k", "window_ms": 1.5}, "Expected `int | null`, got `float` - at `$.window_ms`"),
        ({"key": "k", "window": 5}, "Object contains unknown field `window`; the fields are key, limit, window_ms"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_an_invalid_body_counts_nothing(program: httpx.Client, body: Any, detail: str) -> None:
    answer = program.post("/v1/check", json=body)
    assert (answer.status_code, answer.json()) == (400, {"error": "invalid", "detail": f"body: {detail}"})
    assert counter(program, "k") == 0


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"key":"\\ud800"}', b'{"key":"k"} {}', b"[" * 60_000])
def test_a_body_that_is_not_json_is_refused(program: httpx.Client, body: bytes) -> None:
    answer = program.post("/v1/check", content=body)
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid")


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("window_ms=0", "Expected `int` >= 1 - at `$.window_ms`"),
        ("window_ms=soon", "Expected `int | null`, got `str` - at `$.window_ms`"),
        ("window_ms=31536000001", "Expected `int` <= 31536000000 - at `$.window_ms`"),
        ("limit=5", "Object contains unknown field `limit`"),
    ],
)
def test_an_invalid_query_is_refused(program: httpx.Client, query: str, detail: str) -> None:
    answer = program.get(f"/v1/counters/k?{query}")
    assert (answer.status_code, answer.json()) == (400, {"error": "invalid", "detail": f"query: {detail}"})


def test_a_check_is_itself_limited_by_the_gate() -> None:
    with hub_server(Policy(limits={"http": {"light": "3/minute"}})) as hub, hub.http(hub.register("a")) as client:
        assert [client.post("/v1/check", json={"key": "k"}).status_code for _ in range(4)] == [200, 200, 200, 429]
