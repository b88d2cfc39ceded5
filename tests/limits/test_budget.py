"""Budgets: amounts, periods, clocks that step back, and holds that are corrected."""

import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import AllOf, Budget, Limit, Outcome, Slots, per_minute
from headgate.limits.budget import BudgetState
from headgate.limits.decision import NEVER
from headgate.limits.numbers import LARGEST, cost_in
from headgate.limits.units import unit_of
from tests.support.refusals import refusal

DAY = 86_400_000_000
HOUR = DAY // 24


def moment(*date: Any, zone: str = "UTC") -> int:
    since = datetime(*date).replace(tzinfo=ZoneInfo(zone)) - datetime(1970, 1, 1, tzinfo=UTC)
    return since // timedelta(microseconds=1)


NOON = moment(2026, 11, 17, 12)


def state_of(limit: Limit, now: int, used: int = 0) -> BudgetState:
    """A state that is up to now, with so much used."""
    state = limit.fresh(now)
    assert isinstance(state, BudgetState)
    limit.wait(state, now, 1)
    limit.spend(state, now, used)
    return state


# Amounts and units.


@pytest.mark.parametrize(
    ("amount", "unit", "units"),
    [
        (500, "usd", 500_000_000),
        ("500", "usd", 500_000_000),
        ("0.000001", "usd", 1),
        (0.1, "eur", 100_000),
        (1e-06, "eur", 1),
        (Decimal("2.50"), "credits:2", 250),
        (Fraction(1, 4), "credits:2", 25),
        (2.0, "", 2),
        (LARGEST, "", LARGEST),
        (9007199254740991, "tokens", LARGEST),
        ("9007199254.740991", "usd", LARGEST),
        ("9007199.254740991", "gold:9", LARGEST),
    ],
)
def test_an_amount_is_an_exact_number_of_smallest_units(amount: Any, unit: str, units: int) -> None:
    budget = Budget(amount, "day", unit=unit)
    assert budget.integers() == (units,)
    assert budget.amount == Decimal(units).scaleb(-budget.decimals)
    assert budget.capacity == units // 10**budget.decimals


@pytest.mark.parametrize(
    ("amount", "unit", "expected"),
    [
        *((bad, "usd", "a number above 0 ('blocked' lets nothing pass)")
          for bad in (0, 0.0, "0", "0.00", Decimal(0), -1, "-1", "", "1e3", " 1", "\uff15", "five", None, True,
                      math.nan, math.inf, 1j, [1], b"1", Decimal("NaN"), Decimal("1e999"))),
        ("0.0000001", "usd", "a number with at most 6 decimals (round it, if it was computed)"),
        (0.1 + 0.2, "usd", "a number with at most 6 decimals (round it, if it was computed)"),
        (Fraction(1, 3), "usd", "a number with at most 6 decimals (round it, if it was computed)"),
        ("1.5", "", "a whole number (round it, if it was computed)"),
        (1.5, "tokens", "a whole number (round it, if it was computed)"),
        (LARGEST + 1, "", "at most 9007199254740991"),
        ("9007199254.740992", "usd", "at most 9007199254.740991"),
        (1e300, "credits:2", "at most 90071992547409.91"),
    ],
)  # fmt: skip
def test_bad_amounts_are_refused(amount: Any, unit: str, expected: str) -> None:
    assert refusal(Budget, amount, unit=unit) == f"Budget amount: expected {expected}, got {_shown(amount)}"


def _shown(value: object) -> str:
    return str(value) if isinstance(value, Fraction) else repr(value)


def test_units_and_their_decimals() -> None:
    known = [unit_of(unit) for unit in ("", "usd", "eur", "tokens", "requests", "usd:6", "tokens:0", "a_b:9", "x:0")]
    assert known == [
        ("", 0), ("usd", 6), ("eur", 6), ("tokens", 0), ("requests", 0), ("usd", 6), ("tokens", 0), ("a_b:9", 9),
        ("x:0", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("credits", "usd, eur, tokens, requests, or another name with its decimals, such as 'credits:2'"),
        ("usd:2", "'usd', which has 6 decimals"),
        *((bad, "a name of a-z and _, up to 31, perhaps with its decimals from 0 to 9: 'usd', 'credits:2'")
          for bad in ("USD", "_a:1", "a" * 32, "a:10", "a:", ":2", "a b:1", "ü:2", "a:\u0662", "usd\n", None, 5)),
    ],
)  # fmt: skip
def test_bad_units_are_refused(bad: Any, expected: str) -> None:
    assert refusal(Budget, 5, unit=bad) == f"unit: expected {expected}, got {bad!r}"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": "fortnight"}, "calendar period: expected one of hour, day, week, month, year, got 'fortnight'"),
        ({"period": "day", "zone": "Berlin"},
         "calendar zone: expected the IANA name of a time zone, such as 'Europe/Berlin', got 'Berlin'"),
        ({"zone": "Europe/Berlin"}, "Budget zone: expected none where there is no period, got 'Europe/Berlin'"),
    ],
)  # fmt: skip
def test_bad_periods_and_zones_are_refused(options: Any, text: str) -> None:
    assert refusal(Budget, 5, **options) == text


def test_the_cost_of_a_request_in_smallest_units() -> None:
    assert [cost_in(6, value) for value in (1, 0.0312, "0.0312", Decimal("0.0312"), 1e-6)] == [
        1_000_000, 31_200, 31_200, 31_200, 1,
    ]  # fmt: skip
    assert [cost_in(0, value) for value in (1, LARGEST, 10**30)] == [1, LARGEST, LARGEST + 1]
    assert [cost_in(0, Decimal(value)) for value in (2, LARGEST, 10**30)] == [2, LARGEST, LARGEST + 1]
    assert (cost_in(0, 0, zero=True), cost_in(2, "0.00", zero=True)) == (0, 0)


@pytest.mark.parametrize(
    ("decimals", "bad", "zero", "expected"),
    [
        (0, 0, False, "a whole number of at least 1"),
        (0, 2.0, False, "a whole number of at least 1"),
        (0, "2", False, "a whole number of at least 1"),
        (0, -1, True, "a whole number of at least 0"),
        (0, Decimal("9007199254740992.5"), False, "a whole number (round it, if it was computed)"),
        (0, True, True, "a whole number of at least 0"),
        (0, False, True, "a whole number of at least 0"),
        (2, 0, False, "a number above 0"),
        (2, True, False, "a number above 0"),
        (2, -0.5, True, "a number, 0 or more"),
        (2, "0.125", False, "a number with at most 2 decimals (round it, if it was computed)"),
        (2, 10**15, False, "at most 90071992547409.91"),
    ],
)
def test_bad_costs_are_refused(decimals: int, bad: Any, zero: bool, expected: str) -> None:
    assert refusal(cost_in, decimals, bad, zero=zero) == f"cost: expected {expected}, got {bad!r}"


def test_the_properties_of_a_budget() -> None:
    budget = Budget("0.75", "month", unit="usd", zone="Europe/Berlin")
    assert (budget.amount, budget.unit, budget.period, budget.zone) == (
        Decimal("0.75"),
        "usd",
        "month",
        "Europe/Berlin",
    )
    assert (budget.capacity, budget.decimals, budget.counts_costs, budget.counts_slots) == (0, 6, True, False)
    assert not budget.uninterrupted
    assert (Budget(5).period, Budget(5).zone, Budget(5).unit) == (None, "UTC", "")


def test_the_periods_nearby() -> None:
    budget = Budget(5, "month", zone="Europe/Berlin")
    starts = [(2026, 2, 1), (2026, 3, 1), (2026, 4, 1), (2026, 5, 1)]
    assert budget.nearby(moment(2026, 3, 29, 12)) == [moment(*start, zone="Europe/Berlin") for start in starts]
    assert Budget(5).nearby(NOON) == [0]


# Counting.


def test_what_is_used_comes_back_when_the_next_period_begins() -> None:
    budget = Budget(10, "day", zone="Europe/Berlin")
    now = moment(2026, 10, 25, 1, zone="Europe/Berlin")  # a day of 25 hours
    state = state_of(budget, now, 8)
    assert budget.wait(state, now, 2) == 0
    assert budget.wait(state, now, 3) == 24 * HOUR
    assert budget.wait(state, now + 24 * HOUR - 1, 3) == 1
    assert budget.wait(state, now, 11) == NEVER
    assert (state.used, state.start) == (8, now - HOUR)
    assert budget.wait(state, now + 24 * HOUR, 10) == 0
    assert (state.used, state.start) == (0, now + 24 * HOUR)


def test_a_budget_in_all_never_comes_back() -> None:
    budget = Budget(10)
    state = state_of(budget, NOON, 8)
    assert budget.wait(state, NOON, 2) == 0
    assert budget.wait(state, NOON + 10**6 * DAY, 3) == NEVER
    assert (state.used, state.start) == (8, 0)
    assert not budget.idle(state, NOON + 10**6 * DAY)
    decision = budget.decide(state, NOON, 3, NEVER, 200)
    assert (decision.outcome, decision.remaining, decision.retry_after) == (Outcome.DENY, 2, None)
    assert decision.reset_after == LARGEST / 1e6
    budget.refund(state, 8)
    assert budget.idle(state, NOON)
    assert budget.decide(state, NOON, 0, 0, 200).reset_after == 0


def test_debt_ends_with_its_period() -> None:
    budget = Budget(10, "day")
    state = state_of(budget, NOON, LARGEST)
    budget.spend(state, NOON, LARGEST + 1)
    assert state.used == LARGEST
    assert budget.wait(state, NOON, 1) == DAY // 2
    assert budget.decide(state, NOON, 1, DAY // 2, 200).remaining == 0
    assert budget.wait(state, NOON + DAY // 2, 10) == 0


def test_a_refund_gives_back_no_more_than_was_used() -> None:
    budget = Budget(10, "day")
    state = state_of(budget, NOON, 3)
    budget.refund(state, 1)
    assert state.used == 2
    budget.refund(state, LARGEST)
    assert state.used == 0


def test_the_decision_on_a_budget() -> None:
    budget = Budget(10, "day", unit="usd")
    state = state_of(budget, NOON, 7_500_001)
    allowed = budget.decide(state, NOON, 0, 0, 200)
    assert (allowed.outcome, allowed.remaining, allowed.reset_after) == (Outcome.ALLOW, 2, 43_200.0)
    assert budget.decide(state, NOON, 499_999, 0, 200).outcome is Outcome.ALLOW
    assert budget.decide(state, NOON, 500_000, 0, 200).outcome is Outcome.WARN
    denied = budget.decide(state, NOON, 2_500_000, budget.wait(state, NOON, 2_500_000), 200)
    assert (denied.outcome, denied.remaining, denied.retry_after) == (Outcome.DENY, 2, 43_200.0)
    assert denied.limit is budget


def test_a_store_whose_time_is_not_that_of_the_wall_says_how_far_ahead_the_wall_is() -> None:
    budget = Budget(10, "day")
    state = state_of(budget, 5)
    state.ahead = NOON - 5
    assert budget.wait(state, 5, 11) == NEVER
    assert state.start == NOON - DAY // 2
    budget.spend(state, 5, 8)
    assert budget.wait(state, 5, 3) == DAY // 2
    assert budget.decide(state, 5, 3, DAY // 2, 200).reset_after == 43_200.0
    assert not budget.idle(state, 5 + DAY // 2 + DAY - 1)
    assert budget.idle(state, 5 + DAY // 2 + DAY)
    state.ahead += DAY // 2
    assert budget.wait(state, 5, 3) == 0


def test_a_clock_that_steps_back_into_the_period_before_stands_still() -> None:
    budget = Budget(10, "day")
    midnight = NOON + DAY // 2
    state = state_of(budget, midnight, 8)
    for back in (1, HOUR, DAY):
        assert budget.wait(state, midnight - back, 2) == 0
        assert budget.wait(state, midnight - back, 3) == DAY + back
        assert budget.decide(state, midnight - back, 3, DAY + back, 200).reset_after == (DAY + back) / 1e6
        assert (state.start, state.used) == (midnight, 8)
        assert not budget.idle(state, midnight - back)
    assert budget.wait(state, midnight, 3) == DAY
    assert budget.wait(state, midnight + DAY, 10) == 0


def test_a_clock_that_had_been_far_ahead_takes_what_is_used_along() -> None:
    budget = Budget(10, "day")
    state = state_of(budget, NOON + 400 * DAY, 8)
    assert budget.wait(state, NOON, 3) == DAY // 2
    assert (state.start, state.used) == (NOON - DAY // 2, 8)
    assert budget.wait(state, NOON + DAY // 2, 10) == 0


def test_idle_is_what_is_unused_or_over_for_a_day() -> None:
    budget = Budget(10, "day")
    state = state_of(budget, NOON)
    assert budget.idle(state, NOON)
    budget.spend(state, NOON, 1)
    assert not budget.idle(state, NOON + DAY // 2 + DAY - 1)
    assert budget.idle(state, NOON + DAY // 2 + DAY)
    assert not budget.idle(state, NOON)  # again: looking has changed nothing


def test_time_that_starts_at_zero_is_counted_too() -> None:
    """A store looks a few milliseconds back when it sweeps, and a clock of tests may show 0."""
    for zone in ("UTC", "America/New_York"):
        budget = Budget(10, "day", zone=zone)
        state = state_of(budget, 0, 4)
        assert not budget.idle(state, -10_000)
        assert budget.wait(state, 0, 6) == 0
        assert budget.wait(state, 0, 7) == (DAY if zone == "UTC" else 5 * HOUR)


def test_a_hold_is_corrected_in_its_own_period() -> None:
    budget = Budget(10, "day", unit="usd")
    state = state_of(budget, NOON, 3_000_000)
    mark, serial = budget.mark(state)
    assert (mark, serial) == (NOON - DAY // 2, 0)
    budget.correct(state, NOON, 3_000_000, 1_250_000, mark, serial)
    assert state.used == 1_250_000
    budget.correct(state, NOON, 0, 20_000_000, mark, serial)  # more than the amount: a debt
    assert state.used == 21_250_000
    budget.correct(state, NOON, LARGEST, 0, mark, serial)
    assert state.used == 0
    budget.correct(state, NOON, 0, LARGEST, mark, serial)
    budget.correct(state, NOON, 0, LARGEST, mark, serial)
    assert state.used == LARGEST
    later = NOON + DAY
    assert budget.wait(state, later, 1) == 0
    budget.correct(state, later, 3_000_000, 4_000_000, mark, serial)
    assert state.used == 0


def test_a_hold_on_a_budget_in_all_is_always_corrected() -> None:
    budget = Budget(10)
    state = state_of(budget, NOON, 3)
    budget.correct(state, NOON + 1000 * DAY, 3, 1, *budget.mark(state))
    assert state.used == 1


@given(
    st.sampled_from(["hour", "day", "week", "month", "year"]),
    st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe", "Pacific/Apia"]),
    st.lists(st.tuples(st.integers(0, 40 * DAY), st.integers(1, 6)), max_size=30),
)
def test_no_period_passes_more_than_its_amount_and_a_wait_is_exact(
    period: str, zone: str, steps: list[tuple[int, int]]
) -> None:
    budget = Budget(10, period, zone=zone)
    state, now = budget.fresh(0), moment(2011, 10, 1)
    passed: dict[int, int] = {}
    for span, cost in steps:
        now += span
        wait = budget.wait(state, now, cost)
        if wait:
            assert budget.wait(state, now + wait - 1, cost) == 1
            now += wait
            assert budget.wait(state, now, cost) == 0
        budget.spend(state, now, cost)
        start = Budget(10, period, zone=zone).nearby(now)[1]
        passed[start] = passed.get(start, 0) + cost
    assert all(total <= 10 for total in passed.values())


def test_limits_that_are_joined_have_the_same_decimals() -> None:
    assert AllOf([Budget(5, "day", unit="usd"), Budget(9, "month", unit="eur"), Slots(3)]).decimals == 6
    joined = AllOf([per_minute(5), Budget(5, "day", unit="tokens")])
    assert (joined.decimals, joined.counts_costs, joined.counts_slots) == (0, True, False)
    assert AllOf([Slots(3), Budget(5, "day")]).counts_slots
    assert refusal(AllOf, [Slots(3), per_minute(5), Budget(5, "day", unit="usd")]) == (
        "AllOf: expected limits whose costs have equally many decimals, "
        "got '5/minute' with 0 and '5 usd/calendar day' with 6"
    )


def test_what_is_left_keeps_its_decimals_in_a_denial_that_something_else_makes_of_it() -> None:
    budget = Budget("0.05", unit="usd")
    state = state_of(budget, NOON, 31_200)
    decision = budget.decide(state, NOON, 0, 0, 0)
    assert (decision.remaining, decision.left) == (0, Decimal("0.0188"))
    others = [
        decision.as_denied(),
        decision.after(5),
        decision.as_shadow(),
        decision.at(1),
        decision.as_degraded(budget),
    ]
    assert [one.left for one in others] == [Decimal("0.0188")] * 5
