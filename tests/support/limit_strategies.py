"""Limits of any kind and size, and times that matter to them."""

from fractions import Fraction

from hypothesis import assume
from hypothesis import strategies as st

from headgate import AllOf, Budget, InvalidInput, Limit, SlidingWindow, TokenBucket

DAY = 86_400
YEAR = 365 * DAY * 10**6
MICROSECOND = Fraction(1, 1_000_000)


def numbers_of_any_size(low: int, high: int) -> st.SearchStrategy[int]:
    """Whole numbers of any magnitude, and round ones among them."""
    magnitudes = [10**digits for digits in range(19) if low <= 10**digits <= high]
    of_one_magnitude = st.sampled_from([low, *magnitudes]).flatmap(
        lambda least: st.integers(least, min(high, least * 10))
    )
    return st.one_of(st.integers(low, min(high, 100)), of_one_magnitude, st.sampled_from([*magnitudes, low, high]))


@st.composite
def bucket_parts(draw: st.DrawFn) -> tuple[int, Fraction, Fraction]:
    """Capacity, refill and per: from 1 in 30 days to 10 million a second, up to 10^9 at once."""
    per = draw(st.sampled_from([1, 60, 300, 3600, DAY, 30 * DAY]))
    refill = draw(numbers_of_any_size(1, 10_000_000 * per))
    return draw(numbers_of_any_size(1, 10**9)), Fraction(refill), Fraction(per)


@st.composite
def buckets(draw: st.DrawFn) -> TokenBucket:
    capacity, refill, per = draw(bucket_parts())
    try:
        return TokenBucket(capacity, refill, per)
    except InvalidInput:  # it fits no tick
        assume(False)
        raise


windows = st.builds(SlidingWindow, st.integers(1, 50), st.integers(1, 10**8).map(lambda us: us * MICROSECOND))
single: st.SearchStrategy[Limit] = st.one_of(buckets(), windows)
limits: st.SearchStrategy[Limit] = st.one_of(single, st.lists(single, min_size=2, max_size=3, unique=True).map(AllOf))


def spans_for(limit: Limit) -> st.SearchStrategy[int]:
    """Microseconds that matter to a limit: none, one, a token's time, about its whole length; up to five years."""
    marks = [0, 1, YEAR]
    for part in limit.parts:
        if isinstance(part, TokenBucket):
            token = part.per / part.refill * 1e6
            marks += [int(token), int(token) + 1, int(token * part.capacity), int(part.tick * 1e6)]
        elif isinstance(part, Budget):
            marks += [3_600_000_000, DAY * 10**6]
        elif isinstance(part, SlidingWindow):
            marks += [int(part.window * 1e6), int(part.window * 1e6) - 1, int(part.window * 3e5)]
    marks = [min(mark, 5 * YEAR) for mark in marks]
    return st.one_of(st.sampled_from(marks), st.integers(0, max(marks[3:])))
