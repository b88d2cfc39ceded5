"""The law of the notation: `parse(str(limit)) == limit`, or the limit was refused when it was built."""

import math
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any
from zoneinfo import available_timezones

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headgate import (
    BLOCKED,
    UNLIMITED,
    AllOf,
    Budget,
    InvalidInput,
    Limit,
    SlidingWindow,
    Slots,
    TokenBucket,
    limited,
    parse,
    per_day,
    per_hour,
    per_minute,
    per_second,
)
from headgate.limits.calendar import PERIODS as CALENDAR_PERIODS
from headgate.limits.numbers import positive
from headgate.limits.units import unit_of
from tests.support.refusals import refusal

pytestmark = pytest.mark.once

POSITIVE_FLOATS = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
FRACTIONS = st.builds(Fraction, st.integers(1, 10**25), st.integers(1, 10**25))
DECIMALS = st.decimals(min_value=Decimal("1e-40"), max_value=Decimal("1e40"), allow_nan=False)
NUMBERS: st.SearchStrategy[Any] = st.one_of(
    POSITIVE_FLOATS, FRACTIONS, DECIMALS, st.integers(1, 10**25), st.integers(-1074, 1023).map(lambda n: 2.0**n)
)
BURSTS = st.one_of(st.integers(1, 100), st.integers(1, 2**53 - 1))
PERIODS = [per_second, per_minute, per_hour, per_day]
BUCKETS = st.one_of(
    st.tuples(st.just(TokenBucket), BURSTS, NUMBERS, NUMBERS),
    st.tuples(st.just(limited), NUMBERS, BURSTS),
    st.tuples(st.sampled_from(PERIODS), NUMBERS),
    st.tuples(st.sampled_from(PERIODS), NUMBERS, BURSTS),
)
WINDOWS = st.tuples(st.just(SlidingWindow), st.integers(1, 1_000_000), NUMBERS)
UNITS = st.one_of(
    st.sampled_from(["", "usd", "eur", "tokens", "requests"]),
    st.from_regex(r"[a-z][a-z_]{0,30}:[0-9]", fullmatch=True),
)
ZONES = st.sampled_from(sorted(available_timezones() - {"localtime"}))
CALENDAR = st.one_of(st.just((None, "UTC")), st.tuples(st.sampled_from(CALENDAR_PERIODS), ZONES))


@st.composite
def budgets(draw: st.DrawFn) -> tuple[Callable[..., Limit], Any, str | None]:
    """Some of any number, and more of one that its unit can count."""
    unit, (period, zone) = draw(UNITS), draw(CALENDAR)
    counted = st.one_of(st.integers(1, 1000), st.integers(1, 2**53)).map(
        lambda smallest: Decimal(smallest).scaleb(-unit_of(unit)[1])
    )
    return partial(Budget, unit=unit, zone=zone), draw(st.one_of(counted, counted.map(str), NUMBERS)), period


SLOTS = st.tuples(st.just(Slots), BURSTS)
SINGLE = st.one_of(BUCKETS, WINDOWS, st.sampled_from([(lambda: UNLIMITED,), (lambda: BLOCKED,)]))


def built_or_none(call: tuple[Callable[..., Limit], *tuple[Any, ...]]) -> Limit | None:
    """The limit, or None if it was refused with a text that says what would do."""
    try:
        return call[0](*call[1:])
    except InvalidInput as error:
        text = str(error)
    assert ": expected " in text
    assert ", got " in text
    return None


@given(st.one_of(SINGLE, SLOTS, budgets()))
@example((limited, 2**-20, 1))
@example((limited, 1 / 3, 1))
@example((limited, 5e-324, 1))
@example((limited, sys.float_info.max, 1))
@example((limited, 1e20, 1))
@example((TokenBucket, 1, Fraction(1, 10**40), Fraction(1, 10**40)))
def test_e2_whatever_is_built_can_be_written_down_and_read_back(call: Any) -> None:
    limit = built_or_none(call)
    if limit is not None:
        assert parse(str(limit)) == limit
        assert str(parse(str(limit))) == str(limit)


@given(st.lists(SINGLE, min_size=1, max_size=4))
@example([(limited, 1, 1), (limited, 1, 1)])
@example([(limited, 1, 1)])
def test_e2_several_limits_can_be_written_down_and_read_back(calls: list[Any]) -> None:
    limits = [limit for limit in map(built_or_none, calls) if limit is not None]
    assume(limits)
    joined = built_or_none((AllOf, limits))
    if joined is None:
        assert len(set(limits)) == 1
    else:
        assert parse(str(joined)) == joined


@given(st.lists(budgets(), min_size=2, max_size=4))
def test_different_budgets_are_joined_if_their_costs_have_the_same_decimals(calls: list[Any]) -> None:
    limits = [limit for limit in map(built_or_none, calls) if limit is not None]
    assume(len(set(limits)) > 1)
    joined = built_or_none((AllOf, limits))
    if joined is None:
        several = len({limit.decimals for limit in limits}) > 1
        assert several or len({limit.identity for limit in limits}) < len(set(limits))
    else:
        assert {limit.decimals for limit in limits} == {joined.decimals}
        assert parse(str(joined)) == joined


@given(st.lists(SINGLE, min_size=1, max_size=4))
def test_limits_in_one_text_are_read_as_one_limit(calls: list[Any]) -> None:
    limits = [limit for limit in map(built_or_none, calls) if limit is not None]
    assume(limits)
    limit = parse("; ".join(map(str, limits)))
    assert set(limit.parts) == set(limits)
    assert parse(str(limit)) == limit


@given(st.one_of(POSITIVE_FLOATS, st.integers(-1074, 1023).map(lambda n: 2.0**n)))
@example(1 / 3)
@example(2 / 3)
@example(0.1)
@example(math.pi)
@example(2**-30)
@example(5e-324)
@example(sys.float_info.max)
def test_e2_a_float_is_read_as_a_number_that_rounds_to_it(value: float) -> None:
    assert float(positive("rate", value)) == value


@given(st.integers(1, 10**12 - 1), st.integers(-20, 20))
def test_e2_a_float_with_a_short_decimal_is_read_as_that_decimal(digits: int, exponent: int) -> None:
    text = f"{digits}e{exponent}"
    assert positive("rate", float(text)) == Fraction(text)


@given(st.integers(1, 50_000), st.integers(1, 50_000))
def test_e2_a_float_is_read_as_the_simplest_fraction(numerator: int, denominator: int) -> None:
    """Two fractions with small denominators are too far apart to round to one float, so a quotient comes back."""
    quotient = numerator / denominator
    assume(float(f"{quotient:.12g}") != quotient)  # it has a short decimal, perhaps by chance
    assert positive("rate", quotient) == Fraction(numerator, denominator)


@pytest.mark.parametrize(
    ("rate", "burst", "text"),
    [
        (1 / 3, 1, "1 per 3 seconds"),
        (1 / 3, 10, "1 per 3 seconds burst 10"),
        (2 / 3, 5, "2 per 3 seconds burst 5"),
        (100 / 7, 20, "100 per 7 seconds burst 20"),
        (2**-20, 1, "0.00000095367431640625/second"),
        (2**-30, 5, "1 per 1073741824 seconds burst 5"),
        (1e-9, 1, "0.000000001/second"),
        (1e20, 5, "100000000000000000000/second burst 5"),
        (0.1, 3, "0.1/second burst 3"),
    ],
)
def test_e2_how_a_rate_is_written(rate: float, burst: int, text: str) -> None:
    assert str(limited(rate, burst)) == text
    assert parse(text) == limited(rate, burst)


@pytest.mark.parametrize(
    ("rate", "burst", "text"),
    [
        (
            5e-324,
            1,
            (
                "TokenBucket refill and per: expected at least 1 in 9007199254740991 seconds, or 'blocked', which lets "
                "nothing pass, got (5e-324, 1)"
            ),
        ),
        (
            1e308,
            1,
            (
                "TokenBucket refill and per: expected at most 9007199254740991000000 a second, or 'unlimited', which "
                "lets everything pass, got (1e+308, 1)"
            ),
        ),
        (
            Decimal("0.123456789012345"),
            1000,
            (
                "TokenBucket: expected a capacity and a refill that can be counted exactly (a smaller capacity or a "
                "rounder refill is), got TokenBucket(capacity=1000, refill=0.123456789012345, per=1)"
            ),
        ),
    ],
)
def test_e2_what_cannot_be_counted_is_refused_with_a_way_out(rate: Any, burst: int, text: str) -> None:
    assert refusal(limited, rate, burst) == text
