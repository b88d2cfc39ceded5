"""The rules for violations, step by step."""

from typing import Any

import pytest

from headgate import InvalidInput, ManualClock, MemoryStore, per_minute
from headgate.limits.violations import Backoff, ViolationRecord
from headgate.stores.base import Ask, Offence, Verb
from tests.support.refusals import refusal

SECOND = 1_000_000


def count_violations(backoff: Backoff, *times: float) -> list[tuple[int, float, bool]]:
    """Count, advised wait and alert of violations at these times."""
    offender = ViolationRecord()
    found = []
    for at in times:
        alert = backoff.record(offender, round(at * SECOND))
        count = backoff.count(offender, round(at * SECOND))
        found.append((count, backoff.advised(count) / SECOND, alert))
    return found


def test_a9_consecutive_violations_escalate_the_advised_wait() -> None:
    assert count_violations(Backoff(), 0, 1, 2, 3, 4, 5, 6) == [
        (1, 1.0, False),
        (2, 2.0, False),
        (3, 5.0, False),
        (4, 10.0, False),
        (5, 30.0, False),
        (6, 30.0, False),
        (7, 30.0, False),
    ]


def test_a9_after_a_quiet_minute_the_count_starts_again() -> None:
    counts = [count for count, _, _ in count_violations(Backoff(), 0, 59.999999, 119.999998, 179.999998, 180)]
    assert counts == [1, 2, 3, 1, 2]


def test_a10_the_quiet_period_ends_exactly_after_it() -> None:
    backoff, offender = Backoff(), ViolationRecord()
    backoff.record(offender, 0)
    assert backoff.count(offender, 60 * SECOND - 1) == 1
    assert backoff.count(offender, 60 * SECOND) == 0
    assert (backoff.left(offender, 400_000), backoff.standing(offender, 400_000).quiet_left) == (600_000, 59.6)
    assert (backoff.left(offender, 60 * SECOND), backoff.standing(offender, 60 * SECOND).quiet_left) == (0, 0)


def test_b8_ten_violations_within_five_minutes_raise_one_alert() -> None:
    alerts = [alert for _, _, alert in count_violations(Backoff(), *range(30))]
    assert alerts == [False] * 9 + [True] + [False] * 20


@pytest.mark.parametrize(("last", "alert"), [(299.999999, True), (300, False)])
def test_b8_the_five_minutes_may_begin_at_any_time(last: float, alert: bool) -> None:
    assert count_violations(Backoff(), 0, *[100] * 8, last)[-1][2] is alert


def test_b8_no_other_alert_for_five_minutes_then_armed_again() -> None:
    at = [alert for _, _, alert in count_violations(Backoff(), *range(1000))]
    assert [i for i, alert in enumerate(at) if alert] == [9, 309, 609, 909]


def test_a13_an_offender_is_idle_when_its_violations_no_longer_count() -> None:
    backoff, offender = Backoff(), ViolationRecord()
    assert backoff.idle(offender, 0)
    backoff.record(offender, 0)
    assert not backoff.idle(offender, 300 * SECOND - 1)
    assert backoff.idle(offender, 300 * SECOND)


def test_a5_a_clock_that_steps_back_forgives_nothing() -> None:
    assert [count for count, _, _ in count_violations(Backoff(), 100, 40, 99, 159)] == [1, 2, 3, 4]


def test_backoff_is_a_value() -> None:
    assert Backoff() == Backoff(steps=[1, 2, 5, 10, 30])
    assert hash(Backoff()) == hash(Backoff())
    assert Backoff() != Backoff(quiet=61)
    assert repr(Backoff(steps=[1])) == (
        "Backoff(steps=(1.0,), quiet=60.0, enforce=False, alert_after=10, alert_window=300.0)"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": []}, "Backoff steps: expected at least one, got []"),
        ({"steps": [-1]}, "Backoff steps: expected a number of seconds, 0 or more, got -1"),
        ({"quiet": "long"}, "Backoff quiet: expected a number of seconds, 0 or more, got 'long'"),
        ({"alert_after": 0}, "Backoff alert_after: expected a whole number from 1 to 1000, got 0"),
    ],
)
def test_bad_arguments_of_a_backoff_are_refused(options: Any, text: str) -> None:
    assert refusal(Backoff, **options) == text


@pytest.mark.parametrize("field", ["steps", "quiet", "alert_window"])
def test_times_longer_than_any_clock_counts_are_refused(field: str) -> None:
    for bad in (9_007_199_255, 1e300, 10**5000):
        with pytest.raises(InvalidInput, match=rf"^Backoff {field}: expected at most 9007199254 seconds, got "):
            Backoff(**{field: [bad] if field == "steps" else bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("enforce", [False, True])
def test_the_longest_times_are_counted(enforce: bool) -> None:
    """No sum of them overflows."""
    longest = 9_007_199_254
    backoff = Backoff(steps=[longest], quiet=longest, enforce=enforce, alert_after=1, alert_window=longest)
    clock = ManualClock(start=longest)
    store = MemoryStore(clock=clock)
    ask, offence = [Ask("", "a", per_minute(1), 1)], Offence("agents", "a", backoff)
    decisions = [store.apply(Verb.CHECK, ask, 0, offence) for _ in range(3)]
    assert [decision.retry_after for decision in decisions] == [0, longest, longest]
    assert store.standing(offence).quiet_left == longest
