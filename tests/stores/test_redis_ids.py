"""Request ids in a real server: what was counted under one is counted once, and harms nobody."""

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
from tests.support.redis_store import both
from tests.support.valkey import PATIENCE, Server, wait_for


def same_id(store: RedisStore | MemoryStore, limits: list[Limit]) -> list[tuple[bool, bool]]:
    """One request is checked under several limits that have the same name."""
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
def test_one_request_id_under_limits_of_different_kinds(store: RedisStore, limits: list[Limit]) -> None:
    """As where a limit was changed between a request and its retry: what was said then may not fit what is asked."""
    assert same_id(store, limits) == same_id(MemoryStore(), limits) == [(True, False)] * 2


def test_a_request_id_under_another_limit_harms_nobody_in_the_same_call(server: Server) -> None:
    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENCE) as store:
            bucket, window = Limiter(per_day(60), store=store), Limiter(SlidingWindow(60, 60), store=store)
            await bucket.acheck("a", request_id="req-1")
            checks = [window.acheck("a", request_id="req-1"), *[bucket.acheck(key) for key in "bcd"]]
            answers: list[Any] = await asyncio.gather(*checks, return_exceptions=True)
            assert [type(answer) for answer in answers] == [Decision] * 4
            assert [(answer.remaining, answer.degraded) for answer in answers[1:]] == [(59, False)] * 3

    asyncio.run(work())


def test_request_ids_of_different_names_are_apart(store: RedisStore) -> None:
    """Whatever the names and ids are made of."""
    for name, request_id in (("a", "b:c"), ("a:b", "c"), ("", "a:b:c"), ("a:b:c", "a")):
        limiter = Limiter(per_day(60), store=store, name=name)
        limiter.check("key", request_id=request_id)
        assert limiter.peek("key").remaining == 59, name


def test_an_answer_that_is_said_again_makes_sense_later(store: RedisStore, raw: Any) -> None:
    """Its window has passed, and there is nothing left to come back."""
    limiter = Limiter(SlidingWindow(5, 0.1), store=store)
    first = limiter.check("a", request_id="req-1")
    wait_for(lambda: raw.dbsize() == 1, "the window's key goes away")
    again = limiter.check("a", request_id="req-1")
    assert (bool(again), again.remaining) == (True, first.remaining)
    assert again.reset_after >= 0


def test_a_request_id_is_forgotten_after_a_minute_on_a_clock_for_tests_too(
    still: RedisStore, clock: ManualClock
) -> None:
    limiters = both(still, per_day(5))
    assert [limiter.check("a", request_id="req-1").remaining for limiter in limiters] == [4, 4]
    clock.advance(61)
    assert [limiter.check("a", request_id="req-1").remaining for limiter in limiters] == [3, 3]
