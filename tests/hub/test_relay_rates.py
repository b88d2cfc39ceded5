"""The relay's rate: any number that a float can say."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import InvalidInput, Limiter, MemoryStore, limited
from headgate.hub.sockets.relay import relay_limiter


@pytest.mark.parametrize(
    ("rate", "burst", "limit"),
    [
        ("1.0", "10", "1/second burst 10"),
        ("0.1", "3", "0.1/second burst 3"),
        (" 100 ", " 7 ", "100/second burst 7"),
        ("1e3", "10", "1000/second burst 10"),
        ("2.5E-3", "10", "0.0025/second burst 10"),
        (".5", "10", "0.5/second burst 10"),
        ("3.", "10", "3/second burst 10"),
        (repr(1 / 3), "10", "1 per 3 seconds burst 10"),
        (repr(2**-20), "10", "0.00000095367431640625/second burst 10"),
    ],
)
def test_d4_a_rate_may_be_any_float(rate: str, burst: str, limit: str) -> None:
    limiter = relay_limiter(rate, burst, MemoryStore())
    assert limiter is not None
    assert str(limiter.limit) == limit


@given(st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False))
def test_d4_a_float_is_read_as_limited_reads_it(rate: float) -> None:
    limiter: Limiter | None = None
    with suppress(InvalidInput):  # too fast or too slow to be counted
        limiter = relay_limiter(repr(rate), "1", MemoryStore())
    if limiter is None:
        with pytest.raises(InvalidInput):
            limited(rate, 1)
    else:
        assert limiter.limit == limited(rate, 1)
