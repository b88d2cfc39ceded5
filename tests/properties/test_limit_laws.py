"""Laws that hold for any limit and any sequence of times. The reference is `headgate.stores.reference`."""

from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from headgate import InvalidInput, Limit, Limiter, ManualClock, MemoryStore, SlidingWindow, TokenBucket
from headgate.limits.notation import limit_of
from headgate.stores.base import Verb
from headgate.stores.conformance import compare_with_reference
from headgate.stores.reference import BucketModel, Model, WindowModel
from tests.support.limit_strategies import (
    DAY,
    MICROSECOND,
    YEAR,
    bucket_parts,
    buckets,
    limits,
    numbers_of_any_size,
    spans_for,
)

LONGEST = (2**53 - 1) / 1e6


def limiter_of(limit: Limit) -> tuple[Limiter, ManualClock]:
    clock = ManualClock(start=5000)
    return Limiter(limit, store=MemoryStore(clock=clock)), clock


@given(st.data())
def test_a4_no_interval_passes_more_than_capacity_and_refill(data: st.DataObject) -> None:
    bucket = data.draw(buckets())
    limiter, clock = limiter_of(bucket)
    costs = st.one_of(st.just(bucket.capacity), numbers_of_any_size(1, bucket.capacity))
    passed: list[tuple[int, int]] = []
    for span, cost in data.draw(st.lists(st.tuples(spans_for(bucket), costs), max_size=25)):
        clock.advance(span * MICROSECOND)
        if limiter.check("a", cost):
            passed.append((clock.now(), cost))
    rate = Fraction(str(bucket.refill)) / Fraction(str(bucket.per)) / 10**6
    for first, (begin, _) in enumerate(passed):
        total = 0
        for end, cost in passed[first:]:
            total += cost
            assert total <= bucket.capacity + rate * (end - begin)


@given(st.data())
def test_a1_a_retry_is_denied_until_its_wait_is_over_and_then_passes(data: st.DataObject) -> None:
    limit = data.draw(limits)
    limiter, clock = limiter_of(limit)
    costs = st.one_of(st.just(limit.capacity), numbers_of_any_size(1, limit.capacity))
    for span, cost in data.draw(st.lists(st.tuples(spans_for(limit), costs), min_size=1, max_size=10)):
        clock.advance(span * MICROSECOND)
        decision = limiter.check("a", cost)
        if not decision:
            assert decision.retry_after is not None
            if decision.retry_after > 5 * YEAR / 1e6:
                return
            clock.advance(decision.retry_after - MICROSECOND)
            assert not limiter.check("a", cost)
            clock.advance(MICROSECOND)
            assert limiter.check("a", cost)


@given(st.data())
def test_a6_peeking_loses_no_refill(data: st.DataObject) -> None:
    limit = data.draw(limits)
    (looked_at, clock), (left_alone, other_clock) = limiter_of(limit), limiter_of(limit)
    cost = data.draw(numbers_of_any_size(1, limit.capacity))
    looked_at.check("a", cost), left_alone.check("a", cost)
    for span in data.draw(st.lists(spans_for(limit), max_size=20)):
        clock.advance(span * MICROSECOND)
        other_clock.advance(span * MICROSECOND)
        looked_at.peek("a", data.draw(numbers_of_any_size(1, limit.capacity)))
    assert looked_at.peek("a") == left_alone.peek("a")


@given(st.data())
def test_a1_a_denied_check_charges_nothing(data: st.DataObject) -> None:
    limit = data.draw(limits)
    limiter, clock = limiter_of(limit)
    for span in data.draw(st.lists(spans_for(limit), max_size=10)):
        clock.advance(span * MICROSECOND)
        limiter.check("a", data.draw(numbers_of_any_size(1, limit.capacity)))
        before = [limiter.peek("a", cost) for cost in (1, limit.capacity)]
        if not limiter.check("a", limit.capacity):
            assert [limiter.peek("a", cost) for cost in (1, limit.capacity)] == before
        limiter.check("a", limit.capacity + 1)


@given(buckets(), st.data())
def test_refund_never_lifts_a_bucket_above_its_capacity(bucket: TokenBucket, data: st.DataObject) -> None:
    limiter, clock = limiter_of(bucket)
    for span in data.draw(st.lists(spans_for(bucket), max_size=8)):
        clock.advance(span * MICROSECOND)
        limiter.check("a", data.draw(numbers_of_any_size(1, bucket.capacity)))
        assert limiter.refund("a", data.draw(numbers_of_any_size(1, 10**18))).remaining <= bucket.capacity
        assert not limiter.peek("a", bucket.capacity + 1)


@st.composite
def models(draw: st.DrawFn) -> list[Model]:
    found: list[Model] = []
    for kind in draw(st.lists(st.sampled_from("bbw"), min_size=1, max_size=3)):
        if kind == "w":
            found.append(WindowModel(draw(st.integers(1, 20)), draw(st.integers(1, 5_000_000)) * MICROSECOND))
        else:
            try:
                found.append(BucketModel(*draw(bucket_parts())))
            except InvalidInput:
                assume(False)
    assume(len({model.limit for model in found}) == len(found))
    return found


@settings(max_examples=300)
@given(models(), st.data())
def test_any_sequence_of_steps_equals_the_reference(found: list[Model], data: st.DataObject) -> None:
    limit = limit_of("limits", [model.limit for model in found])
    spans = st.one_of(spans_for(limit), st.integers(-900_000, -1))
    costs = st.one_of(st.integers(1, 30), numbers_of_any_size(1, 10**6) if len(limit.parts) == 1 else st.just(1))
    if any(isinstance(model, WindowModel) for model in found):
        costs = st.integers(1, 30)
    steps = st.lists(st.tuples(st.sampled_from(list(Verb)), spans, costs), max_size=20)
    compare_with_reference(lambda clock: MemoryStore(clock=clock), found, data.draw(steps))


@given(buckets(), st.data())
def test_a2_a_bucket_is_full_exactly_at_its_reset(bucket: TokenBucket, data: st.DataObject) -> None:
    limiter, clock = limiter_of(bucket)
    limiter.check("a", data.draw(numbers_of_any_size(1, bucket.capacity)))
    reset = limiter.peek("a").reset_after
    assume(reset < 5 * YEAR / 1e6)
    clock.advance(reset - MICROSECOND)
    assert limiter.peek("a").reset_after == 1e-6
    clock.advance(MICROSECOND)
    assert (limiter.peek("a").remaining, limiter.peek("a").reset_after) == (bucket.capacity, 0.0)


@pytest.mark.parametrize("years", [1, 100])
def test_a_year_of_idleness_at_9_999_991_per_second(years: int) -> None:
    limiter, clock = limiter_of(TokenBucket(10**9, 9_999_991, 1))
    assert limiter.check("a", 10**9)
    assert limiter.check("a", 1).retry_after == 1e-6
    clock.advance(years * 365 * DAY)
    assert limiter.peek("a").remaining == 10**9
    assert limiter.check("a", 10**9)
    assert not limiter.check("a", 10)


@pytest.mark.parametrize(
    ("bucket", "tick"),
    [
        (TokenBucket(10, 60, 60), 1e-6),
        (TokenBucket(10**9, 9_999_991, 1), 1e-6),
        (TokenBucket(1_000_003, 1_000_003, DAY), 1e-5),
        (TokenBucket(10**9, 1, 30 * DAY), 1.0),
        (TokenBucket(10**9, 999_999_937, 30 * DAY), 1.0),
    ],
    ids=str,
)
def test_the_tick_is_the_finest_that_fits(bucket: TokenBucket, tick: float) -> None:
    assert bucket.tick == tick
    limiter, clock = limiter_of(bucket)
    clock.advance(0.75)  # not on a grid of ticks
    assert limiter.check("a", bucket.capacity)
    decision = limiter.check("a")
    assert decision.retry_after is not None
    clock.advance(decision.retry_after - MICROSECOND)
    assert not limiter.check("a")
    clock.advance(MICROSECOND)
    assert limiter.check("a")


def test_no_wait_is_longer_than_a_clock_can_run() -> None:
    limiter, clock = limiter_of(TokenBucket(10**9, 1, 30 * DAY))
    limiter.check("a", 10**9)
    decision = limiter.check("a", 10**9)
    assert (decision.retry_after, decision.reset_after) == (LONGEST, LONGEST)
    clock.advance(280 * 365 * DAY)
    assert not limiter.check("a", 10**9)
    assert limiter.peek("a").remaining == 280 * 365 // 30


@example(capacity=10, waits=[3, 3, 3])
@given(st.integers(1, 20), st.lists(st.integers(0, 70), max_size=20))
def test_c1_the_sliding_window_equals_the_brute_force_count(capacity: int, waits: list[int]) -> None:
    limiter, clock = limiter_of(SlidingWindow(capacity, 60))
    made: list[int] = []
    for wait in waits:
        clock.advance(wait)
        now = clock.now()
        for _ in range(7):
            counted = sum(1 for at in made if now - 60_000_000 < at <= now)
            assert bool(limiter.check("a")) == (counted < capacity)
            if counted < capacity:
                made.append(now)
