"""Request ids in a real server: a request is counted once under its id."""

import asyncio
from typing import Any

import pytest

from headgate import (
    Decision,
    Limit,
    Limiter,
    ManualClock,
    MemoryStore,
    SlidingWindow,
    parse,
    per_day,
    per_minute,
)
from headgate.stores.redis import RedisStore
from tests.support.redis_store import limiter_pair
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for


def check_once_each(store: RedisStore | MemoryStore, limits: list[Limit]) -> list[tuple[bool, bool]]:
    """Check one request under several limits of the same name."""
    decisions = [Limiter(limit, store=store).check("a", request_id="req-1") for limit in limits]
    return [(bool(decision), decision.degraded) for decision in decisions]


@pytest.mark.parametrize(
    "limits",
    [
        [per_minute(60), SlidingWindow(60, 60)],
        [SlidingWindow(60, 60), per_minute(60)],
        [per_minute(60), parse("5/second; 60/minute")],
        [parse("5/second; 60/minute"), per_minute(60)],
    ],
    ids=str,
)
def test_one_request_id_may_be_used_under_limits_of_different_kinds(store: RedisStore, limits: list[Limit]) -> None:
    """As after a limit has changed between a request and its retry: the stored answer doesn't fit the new limit."""
    assert check_once_each(store, limits) == check_once_each(MemoryStore(), limits) == [(True, False)] * 2


async def test_a_request_id_under_another_limit_affects_no_other_request_in_the_call(server: ValkeyServer) -> None:
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        bucket, window = Limiter(per_day(60), store=store), Limiter(SlidingWindow(60, 60), store=store)
        await bucket.acheck("a", request_id="req-1")
        checks = [window.acheck("a", request_id="req-1"), *[bucket.acheck(key) for key in "bcd"]]
        answers: list[Any] = await asyncio.gather(*checks, return_exceptions=True)
        assert [type(answer) for answer in answers] == [Decision] * 4
        assert [(answer.remaining, answer.degraded) for answer in answers[1:]] == [(59, False)] * 3


def test_request_ids_of_different_limiters_never_collide(store: RedisStore) -> None:
    for name, request_id in (("a", "b:c"), ("a:b", "c"), ("", "a:b:c"), ("a:b:c", "a")):
        limiter = Limiter(per_day(60), store=store, name=name)
        limiter.check("key", request_id=request_id)
        assert limiter.peek("key").remaining == 59, name


def test_a_repeated_answer_is_valid_after_its_window_has_passed(store: RedisStore, raw: Any) -> None:
    limiter = Limiter(SlidingWindow(5, 0.1), store=store)
    first = limiter.check("a", request_id="req-1")
    wait_for(lambda: raw.dbsize() == 1, "the window to expire")
    again = limiter.check("a", request_id="req-1")
    assert (bool(again), again.remaining) == (True, first.remaining)
    assert again.reset_after >= 0


def test_a_request_id_is_forgotten_after_a_minute(still: RedisStore, clock: ManualClock) -> None:
    limiters = limiter_pair(still, per_day(5))
    assert [limiter.check("a", request_id="req-1").remaining for limiter in limiters] == [4, 4]
    clock.advance(61)
    assert [limiter.check("a", request_id="req-1").remaining for limiter in limiters] == [3, 3]
