"""Clocks."""

import time
from datetime import datetime
from typing import Any

import pytest

from headgate import InvalidInput, ManualClock
from headgate.limits.clock import MonotonicClock
from tests.support.refusals import refusal


def test_a_manual_clock_moves_only_when_advanced() -> None:
    clock = ManualClock(start=10)
    assert clock.now() == clock.now() == 10_000_000
    clock.advance(1.5)
    clock.advance(0.000001)
    assert clock.now() == 11_500_001
    clock.step_back(0.5)
    assert clock.now() == 11_000_001


def test_clocks_tell_the_time_of_day() -> None:
    clock = ManualClock(start=10)
    assert clock.wall() == 1_800_000_010.0
    clock.advance(1.5)
    assert clock.wall() == 1_800_000_011.5
    before = time.time()
    assert before <= MonotonicClock().wall() <= time.time()


def test_a_manual_clock_rings_its_alarms() -> None:
    clock = ManualClock()
    rung: list[str] = []
    assert clock.alarm(1_000_000, lambda: rung.append("one")) is None
    assert clock.alarm(2_000_000, lambda: rung.append("two")) is None
    clock.advance(0.999999)
    assert rung == []
    clock.advance(0.000001)
    assert rung == ["one"]
    clock.advance(5)
    assert rung == ["one", "two"]
    assert clock.alarm(1_000_000, lambda: rung.append("late")) == 0.0


def test_a5_time_is_monotonic() -> None:
    clock = MonotonicClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)
    assert clock.alarm(0, lambda: None) == 0.0
    assert 0 < (clock.alarm(clock.now() + 10**9, lambda: None) or 0) <= 1000


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), True, "1", None])
def test_bad_times_are_refused(bad: Any) -> None:
    clock = ManualClock()
    for where, call in (
        ("ManualClock start", lambda: ManualClock(bad)),
        ("ManualClock.advance seconds", lambda: clock.advance(bad)),
        ("ManualClock.step_back seconds", lambda: clock.step_back(bad)),
    ):
        assert refusal(call) == f"{where}: expected a number of seconds, 0 or more, got {bad!r}"
    assert clock.now() == 0


@pytest.mark.parametrize(
    ("digits", "shown"), [(10, r"10000000000\.0"), (400, r"10{96}\.\.\."), (5000, "an int of thousands of digits")]
)
def test_a_time_that_no_clock_reaches_is_refused(digits: int, shown: str) -> None:
    """Also one that is no float."""
    seconds = 10**digits
    expected = f"ManualClock: expected a time from 0 to 9007199254 seconds, got {shown}"
    with pytest.raises(InvalidInput, match=expected):
        ManualClock(seconds)
    with pytest.raises(InvalidInput, match=expected):
        ManualClock().advance(seconds)
    with pytest.raises(InvalidInput, match="ManualClock: expected a time"):
        ManualClock().step_back(seconds)


@pytest.mark.parametrize("at", [datetime(2028, 2, 29), "2028-02-29", 1_800_000_000])
def test_a_time_of_day_has_a_zone(at: Any) -> None:
    with pytest.raises(InvalidInput, match="ManualClock at: expected a datetime with a time zone"):
        ManualClock(at=at)
