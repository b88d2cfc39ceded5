"""Holds that wait: for how long, and for what."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from headgate import (
    InvalidInput,
    Limiter,
    ManualClock,
    MemoryStore,
)
from tests.support.limiters import left, make_limiter
from tests.support.threads import Waiter


def test_a_timeout_waits_in_line(clock: ManualClock) -> None:
    limiter = make_limiter("1 in flight", clock)
    first = limiter.hold("a")
    waiter = Waiter(limiter, verb="hold", timeout=20)
    first.settle()
    assert waiter.result()
    late = Waiter(limiter, verb="hold", timeout=20)
    clock.advance(20)
    assert late.result().state == "denied"


@pytest.mark.parametrize("timeout", [False, True, "soon", -1])
def test_a_timeout_that_is_no_time_is_refused(clock: ManualClock, timeout: Any) -> None:
    limiter = make_limiter("10/day", clock)
    for verb in (limiter.hold, limiter.acquire):
        with pytest.raises(InvalidInput, match="timeout: expected"):
            verb("a", timeout=timeout)
    assert left(limiter) == 10


class Equality:
    """What a comparison of numpy's numbers returns: like a bool, and none."""

    def __init__(self, equal: bool) -> None:
        self.equal = equal

    def __bool__(self) -> bool:
        return self.equal


class OddFloat(float):
    def __eq__(self, other: object) -> Any:
        return Equality(float(self) == other)

    __hash__ = float.__hash__


@pytest.mark.parametrize("seconds", [0, 1.5])
async def test_a_timeout_may_be_a_float_that_compares_in_its_own_way(clock: ManualClock, seconds: float) -> None:
    limiter = make_limiter("10/day", clock)
    assert limiter.hold("a", timeout=OddFloat(seconds))
    assert await limiter.ahold("a", timeout=OddFloat(seconds))


@pytest.mark.parametrize("zero", [0, 0.0, Decimal(0), Fraction(0)])
async def test_a_timeout_of_zero_asks_once_whoever_waits(clock: ManualClock, zero: Any) -> None:
    limiter = make_limiter("10/day; 1 in flight", clock)
    first = limiter.hold("a", hold_id="first")
    waiter = Waiter(limiter, verb="hold", timeout=20)
    assert limiter.hold("a", hold_id="first", timeout=zero).state == "open"
    assert (await limiter.ahold("a", hold_id="first", timeout=zero)).state == "open"
    first.settle()
    assert waiter.result()


@pytest.mark.parametrize("limit", ["1 in flight", "10 usd/calendar day", "10/day", "10/day sliding"])
@pytest.mark.parametrize("end", ["cancelled by another limiter", "its lease ends"])
def test_what_comes_back_is_seen_by_a_hold_that_waits(clock: ManualClock, limit: str, end: str) -> None:
    store = MemoryStore(clock=clock)
    one, other = Limiter(limit, store=store), Limiter(limit, store=store)
    cost = 1 if limit == "1 in flight" else 10
    began = clock.now()
    held = one.hold("a", cost, lease=600 if end.startswith("cancelled") else 1, on_expiry="release")
    waiter = Waiter(other, verb="hold", timeout=100)
    if end.startswith("cancelled"):
        held.cancel()
    while waiter.is_alive():
        clock.advance(0.25)
        waiter.join(0.01)
    assert waiter.result()
    assert clock.now() - began < 90 * 1_000_000  # not at the end of its time
