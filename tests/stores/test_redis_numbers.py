"""Counts in a real server are exact up to 2^53, as they are in memory."""

import random
import struct
from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from typing import Any

import pytest

from headgate import (
    InvalidInput,
    Limit,
    Limiter,
    ManualClock,
    MemoryStore,
    SlidingWindow,
    TokenBucket,
    per_day,
    per_hour,
)
from headgate.limits.numbers import LARGEST
from headgate.limits.sliding_window import WindowLog
from headgate.stores.base import Ask, Verb
from headgate.stores.redis import RedisStore
from tests.support.redis_store import keys_of, limiter_pair
from tests.support.valkey import PATIENCE, ValkeyServer

_prefixes = (f"test{number}:" for number in count())


def extreme_limits() -> list[Limit]:
    """All combinations that a limit can have."""
    limits: list[Limit] = []
    for capacity in (1, 2, 3, 60, 10**6 + 1, 10**9, 2**31, 2**52, 2**52 + 1, 2**53 - 2, 2**53 - 1):
        for refill in (1, 3, 10**6, 2**53 - 1, Fraction(1, 3), Fraction(10**6, 7)):
            for per in (1, Fraction(1, 10**6), 86_400, 9_000_000, 9_000_001, 9_007_199_254):
                try:
                    limits.append(TokenBucket(capacity, refill, per))
                except InvalidInput:
                    continue
    spans = [Fraction(span, 1_000_000) for span in (1, 1_000_000, 60_000_000, 2**51)]
    return [*limits, *[SlidingWindow(most, span) for most in (1, 7, 1_000_000) for span in spans]]


def extreme_steps(chance: random.Random, limit: Limit, length: int) -> Iterator[tuple[Verb, int, int]]:
    """(verb, microseconds before it, cost); the clock steps back only right after a charge."""
    verbs = (Verb.CHECK, Verb.CHECK, Verb.PEEK, Verb.CHARGE, Verb.CHARGE, Verb.REFUND)
    top = limit.capacity
    costs = [1, 2, 3, top - 1, top, top + 1, 2 * top - 1, top // 2, 2**52, 2**53 - 2, 2**53 - 1, 2**53]
    spans = [0, 0, 1, 999, 10**6, 10**6 + 1, 10**9, 86_400 * 10**6, 2**45, 2**49, -1, -500_000, -(10**9)]
    while length > 0:
        span = chance.choice(spans)
        if span < 0:
            yield Verb.CHARGE, 0, 1
        cost = chance.choice(costs) if chance.random() < 0.8 else chance.randint(1, 2 ** chance.randint(1, 53))
        yield chance.choice(verbs), span, min(max(cost, 1), 2**53)
        length -= 1


def countable(memory: MemoryStore, limit: Limit, cost: int) -> bool:
    """Whether a window can still count a charge in full. (A bucket's debt has a bottom that both stores know.)"""
    state = memory.limit_table("", limit).find("a")
    used = state.used() if isinstance(state, WindowLog) else 0
    return not isinstance(limit, SlidingWindow) or used + cost <= LARGEST


def walk(url: str, chance: random.Random, limit: Limit, length: int) -> None:
    """Apply the same random steps to both stores."""
    clock = ManualClock(start=100_000)
    memory, begin = MemoryStore(clock=clock), clock.now()
    end = LARGEST - (limit.integers()[1] if isinstance(limit, SlidingWindow) else 0)
    story = [f"{limit!r}"]
    with RedisStore(url, timeout=PATIENCE, prefix=next(_prefixes), clock=clock) as store:
        for wanted, span, cost in extreme_steps(chance, limit, length):
            if not begin <= clock.now() + span <= end:
                continue
            if span >= 0:
                clock.advance(Fraction(span, 1_000_000))
            else:
                clock.step_back(Fraction(-span, 1_000_000))
            verb = wanted if wanted is not Verb.CHARGE or countable(memory, limit, cost) else Verb.PEEK
            asks = [Ask("", "a", limit, cost)]
            story.append(f"{span:+} {verb.value} {cost}")
            got, expected = store.apply(verb, asks, 200), memory.apply(verb, asks, 200)
            assert got == expected, "\n".join(story)


def test_a6_a_charge_far_above_the_capacity_is_counted_exactly(still: RedisStore) -> None:
    """Even where the units spent exceed 2^53, and those left don't."""
    for limit in extreme_limits():
        cost = min(2 * limit.capacity - 1, 2**53 - 1)
        decisions = [
            [limiter.charge("a", cost), limiter.refund("a", max(limit.capacity - 1, 1)), limiter.refund("a", 1)]
            for limiter in limiter_pair(still, limit)
        ]
        assert decisions[0] == decisions[1], limit


@pytest.mark.long
def test_a6_extreme_numbers_are_counted_exactly(server: ValkeyServer, raw: Any) -> None:
    chance = random.Random(53)
    for _ in range(20):
        for limit in extreme_limits():
            walk(server.url, chance, limit, 60 if isinstance(limit, SlidingWindow) else 20)
        raw.flushall()


def test_a6_the_sums_of_a_window_restart_before_they_overflow(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    limiters = limiter_pair(still, SlidingWindow(1_000_000, 10))
    key = "headgate:{a}w1:1000000 per 10 seconds sliding:"
    for number in range(8):
        charged = [limiter.charge("a", 2**51 + number) for limiter in limiters]
        assert charged[0] == charged[1]
        clock.advance(4)
        refunded = [limiter.refund("a", 2**50 + 1) for limiter in limiters]
        assert refunded[0] == refunded[1]
        numbers = [int(word) for word in raw.lrange(key, 0, -1)]
        assert max(numbers[1::2]) <= LARGEST
        assert numbers[3::2] == sorted(numbers[3::2])
    clock.advance(10)
    assert [limiter.check("a", 3).remaining for limiter in limiters] == [999_997] * 2


def test_a6_a_first_charge_beyond_the_largest_number_is_capped(still: RedisStore) -> None:
    limiters = limiter_pair(still, SlidingWindow(5, 60))
    for limiter in limiters:
        limiter.charge("a", 2**53)
    assert [limiter.refund("a", LARGEST - 3).remaining for limiter in limiters] == [2, 2]


def test_a6_a_charge_beyond_the_largest_sum_is_not_counted(still: RedisStore, clock: ManualClock) -> None:
    limiters = limiter_pair(still, SlidingWindow(5, 1))
    for limiter in limiters:
        limiter.charge("a", LARGEST)
    clock.advance(0.5)
    for limiter in limiters:
        limiter.charge("a", 1)
    clock.advance(0.5)
    assert [(peek.remaining, peek.reset_after) for peek in [one.peek("a") for one in limiters]] == [(5, 0.0)] * 2


def test_a6_the_wait_for_a_window_in_deep_debt_is_exact(still: RedisStore, clock: ManualClock) -> None:
    """The whole limit passes only when every charge has left, the last one too."""
    limiters = limiter_pair(still, SlidingWindow(7, 60))
    for limiter in limiters:
        limiter.charge("a", LARGEST - 6)
    clock.advance(1)
    for limiter in limiters:
        limiter.charge("a", 1)
    assert [limiter.peek("a", 7).retry_after for limiter in limiters] == [60.0] * 2


@pytest.mark.parametrize("capacity", [10, 18])
def test_a6_a_debt_of_2_to_the_53_units_is_paid_off_exactly(
    still: RedisStore, clock: ManualClock, capacity: int
) -> None:
    """Around the times at which sums and differences of units are odd numbers beyond 2^53."""
    limiters = limiter_pair(still, TokenBucket(capacity, 3_000_000, 1))  # three units in a microsecond, one for a token
    for limiter in limiters:
        limiter.charge("a", 2**53)
        limiter.charge("b", 2**53)
    clock.advance(Fraction(2**53 // 3 - 3, 1_000_000))
    for _ in range(12):
        clock.advance(Fraction(1, 1_000_000))
        peeks = [limiter.peek("a", 2) for limiter in limiters]
        assert (peeks[0].remaining, peeks[0].retry_us) == (peeks[1].remaining, peeks[1].retry_us)
        checks = [limiter.check("b", 2) for limiter in limiters]
        assert (checks[0].remaining, checks[0].retry_us) == (checks[1].remaining, checks[1].retry_us)


def test_a6_a_window_that_ends_after_2_to_the_53_is_exact(still: RedisStore) -> None:
    limiters = limiter_pair(still, SlidingWindow(1, Fraction(LARGEST, 1_000_000)))
    assert all([limiter.check("a") for limiter in limiters])
    assert [limiter.check("a").retry_us for limiter in limiters] == [LARGEST] * 2


@pytest.mark.parametrize(
    "limit", [TokenBucket(10**9, 1, 9_000_000), TokenBucket(2**53 - 1, 1, 1), per_hour(1), per_day(1)], ids=str
)
def test_a6_the_deepest_debt_is_stored(server: ValkeyServer, raw: Any, limit: Limit) -> None:
    with RedisStore(server.url, timeout=PATIENCE) as store:
        limiter = Limiter(limit, store=store)
        for _ in range(3):
            decision = limiter.charge("a", 2**53)
            assert (bool(decision), decision.degraded) == (False, False)
        (key,) = keys_of(raw)
        assert struct.unpack("<2d", raw.get(key))[0] == -LARGEST
        assert raw.pttl(key) > 10**12
