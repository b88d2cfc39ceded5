"""Limits as values, and bad arguments."""

import math
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from headgate import (
    BLOCKED,
    UNLIMITED,
    AllOf,
    Budget,
    HeadgateError,
    InvalidInput,
    Limit,
    Limiter,
    SlidingWindow,
    Slots,
    TokenBucket,
    limited,
    per_day,
    per_hour,
    per_minute,
    per_second,
)
from headgate.limits.token_bucket import BucketState
from tests.support.refusals import refusal

ALL = [
    TokenBucket(10, 60, 60),
    limited(0.5, 20),
    SlidingWindow(100, 60),
    SlidingWindow(3, Fraction("0.25")),
    AllOf([per_second(5), per_minute(100)]),
    UNLIMITED,
    BLOCKED,
    Budget(500, "month", unit="usd", zone="Europe/Berlin"),
    Budget(500, "month", unit="usd"),
    Budget(500, "month", unit="eur"),
    Budget(500, "month"),
    Budget(500, "day"),
    Budget(500),
    Budget("2.5", unit="credits:2"),
    Budget("2.5", unit="credits:3"),
    Slots(5),
    Slots(500),
]


@pytest.mark.parametrize("limit", ALL, ids=str)
def test_a_limit_pickles_compares_and_hashes_by_value(limit: Limit) -> None:
    again = pickle.loads(pickle.dumps(limit))
    assert again == limit
    assert hash(again) == hash(limit)
    assert {limit: 1}[again] == 1
    assert [other for other in ALL if other == limit] == [limit]
    assert limit != object()


@pytest.mark.parametrize("limit", ALL, ids=str)
def test_a_limit_is_frozen(limit: Limit) -> None:
    for name in ("capacity", "refill", "window", "amount", "anything"):
        with pytest.raises(AttributeError):
            setattr(limit, name, 5)


def test_limits_are_equal_however_their_numbers_are_written() -> None:
    assert TokenBucket(5, 0.1, 1) == TokenBucket(5, Fraction(1, 10), 1) == TokenBucket(5, Decimal("0.1"), 1.0)
    assert TokenBucket(5, Fraction(1, 3), 7) == TokenBucket(5, 1, 21)
    assert SlidingWindow(5, 0.1) == SlidingWindow(5, Fraction(1, 10))


@pytest.mark.parametrize(
    ("limit", "text", "shown"),
    [
        (per_minute(60, burst=10), "60/minute burst 10", "TokenBucket(capacity=10, refill=60, per=60)"),
        (per_second(5), "5/second", "TokenBucket(capacity=5, refill=5, per=1)"),
        (per_hour(100), "100/hour", "TokenBucket(capacity=100, refill=100, per=3600)"),
        (per_day(7), "7/day", "TokenBucket(capacity=7, refill=7, per=86400)"),
        (limited(0.5, 20), "0.5/second burst 20", "TokenBucket(capacity=20, refill=0.5, per=1)"),
        (TokenBucket(10, 10, 300), "10 per 5 minutes", "TokenBucket(capacity=10, refill=10, per=300)"),
        (TokenBucket(1, 1, 0.25), "1 per 0.25 seconds", "TokenBucket(capacity=1, refill=1, per=0.25)"),
        (TokenBucket(3, Fraction(1, 3), 1), "1 per 3 seconds burst 3", "TokenBucket(capacity=3, refill=1, per=3)"),
        (SlidingWindow(100, 60), "100/minute sliding", "SlidingWindow(limit=100, window=60)"),
        (SlidingWindow(1, 90), "1 per 90 seconds sliding", "SlidingWindow(limit=1, window=90)"),
        (AllOf([per_second(5), per_hour(9)]), "5/second; 9/hour",
         "AllOf([TokenBucket(capacity=5, refill=5, per=1), TokenBucket(capacity=9, refill=9, per=3600)])"),
        (Budget(500, "month", unit="usd", zone="Europe/Berlin"), "500 usd/calendar month in Europe/Berlin",
         "Budget(500, 'month', unit='usd', zone='Europe/Berlin')"),
        (Budget(500, "day"), "500/calendar day", "Budget(500, 'day')"),
        (Budget(500), "500 in all", "Budget(500)"),
        (Budget("2.5", unit="credits:2"), "2.5 credits:2 in all", "Budget('2.5', unit='credits:2')"),
        (Budget("0.01", "year", unit="usd"), "0.01 usd/calendar year", "Budget('0.01', 'year', unit='usd')"),
        (Slots(5), "5 in flight", "Slots(count=5)"),
        (UNLIMITED, "unlimited", "UNLIMITED"),
        (BLOCKED, "blocked", "BLOCKED"),
    ],
)  # fmt: skip
def test_a_limit_prints_itself_readably(limit: Limit, text: str, shown: str) -> None:
    assert str(limit) == text
    assert repr(limit) == shown
    assert eval(shown) == limit


def test_the_properties_of_limits() -> None:
    bucket = per_minute(90, burst=2)
    assert (bucket.capacity, bucket.refill, bucket.per, bucket.tick) == (2, 90.0, 60.0, 1e-6)
    assert (SlidingWindow(5, 60).capacity, SlidingWindow(5, 60).window) == (5, 60.0)
    assert AllOf([per_minute(9), per_second(5)]).capacity == 5
    assert (UNLIMITED.capacity, BLOCKED.capacity) == (2**53 - 1, 0)


def test_parts_of_joined_limits_are_flat_and_unique() -> None:
    one, two, three = per_second(1), per_second(2), per_second(3)
    assert AllOf([one, AllOf([two, one]), three]).parts == (one, two, three)
    assert one.parts == (one,)


@pytest.mark.parametrize("actual", [0, 1, 2, 5])
def test_a_bucket_without_open_holds_remembers_no_headroom(actual: int) -> None:
    bucket = per_second(10)
    state = BucketState(bucket.integers()[4], 0)
    bucket.prepare(state)
    marks = []
    for _ in range(3):
        bucket.spend(state, 0, 2)
        marks.append(bucket.mark(state))
    for mark, serial in marks:
        bucket.settle(state, 0, 2, actual, mark, serial)
    assert state.level == bucket.integers()[1] * (10 - 3 * actual)
    assert state.headroom is not None
    assert (state.headroom.top, state.headroom.size) == (None, 0)


def test_e2_limited_is_signals_per_second() -> None:
    assert limited(rate=5, burst=20) == TokenBucket(capacity=20, refill=5, per=1)
    assert all(Limiter(UNLIMITED).check("session") for _ in range(1000))


def test_a_burst_below_one_is_rounded_up() -> None:
    assert per_second(0.5).capacity == 1
    assert per_minute(2.5).capacity == 3


BAD_NUMBERS = [0, -5, math.nan, math.inf, -math.inf, True, "ten", None, [1], Decimal("NaN"), 1j]


@pytest.mark.parametrize("bad", BAD_NUMBERS, ids=repr)
def test_bad_rates_periods_and_windows_are_refused(bad: Any) -> None:
    for where, build in (
        ("TokenBucket refill", lambda: TokenBucket(1, bad, 1)),
        ("TokenBucket per", lambda: TokenBucket(1, 1, bad)),
        ("TokenBucket refill", lambda: per_second(bad)),
        ("TokenBucket refill", lambda: limited(bad, 1)),
        ("SlidingWindow window", lambda: SlidingWindow(1, bad)),
    ):
        assert refusal(build) == f"{where}: expected a number above 0, got {bad!r}"


BAD_COUNTS = [*(bad for bad in BAD_NUMBERS if bad is not None), 1.5, 2.0, 2**53, 10**400]


@pytest.mark.parametrize("bad", BAD_COUNTS, ids=lambda bad: repr(bad)[:20])
def test_bad_capacities_are_refused(bad: Any) -> None:
    shown = repr(bad) if len(repr(bad)) <= 100 else repr(bad)[:97] + "..."
    for where, most, build in (
        ("TokenBucket capacity", 2**53 - 1, lambda: TokenBucket(bad, 1, 1)),
        ("TokenBucket capacity", 2**53 - 1, lambda: per_minute(1, burst=bad)),
        ("SlidingWindow limit", 1_000_000, lambda: SlidingWindow(bad, 1)),
    ):
        assert refusal(build) == f"{where}: expected a whole number from 1 to {most}, got {shown}"


def test_a_number_too_long_to_print_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"from 1 to 9007199254740991, got an int of thousands of digits$"):
        TokenBucket(10**5000, 1, 1)


def test_a_limit_that_fits_no_tick_is_refused() -> None:
    assert refusal(TokenBucket, 10**10, 1, 30 * 86_400) == (
        "TokenBucket: expected a capacity and a refill that can be counted exactly (a smaller capacity or a rounder "
        "refill is), got TokenBucket(capacity=10000000000, refill=1, per=2592000)"
    )


def test_windows_that_cannot_be_counted_exactly_are_refused() -> None:
    for bad in (1e-7, Fraction(1, 3), 2**53):
        assert refusal(SlidingWindow, 1, bad) == (
            f"SlidingWindow window: expected whole microseconds, up to 9007199254740991 of them, got {bad}"
        )
    with pytest.raises(InvalidInput, match="from 1 to 1000000, got 1000001"):
        SlidingWindow(1_000_001, 60)


def test_bad_parts_of_joined_limits_are_refused() -> None:
    expected = r"^AllOf: expected at least two different limits \(a single one needs no AllOf\), got "
    for few in ([], [per_second(5)], [per_second(5), per_second(5)]):
        with pytest.raises(InvalidInput, match=expected):
            AllOf(few)
    with pytest.raises(InvalidInput, match=r"^AllOf: expected limits, got '5/second'$"):
        AllOf(["5/second"])  # type: ignore[list-item]


def test_invalid_input_is_a_headgate_error_and_a_value_error() -> None:
    assert issubclass(InvalidInput, HeadgateError)
    assert issubclass(InvalidInput, ValueError)
