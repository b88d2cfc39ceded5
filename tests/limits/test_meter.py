"""Meters: what was used on each day."""

from headgate.limits.meter import KEPT, Meter, MeterState

DAY = 86_400_000_000
MOMENT = 20_774 * DAY + 5


def spend(meter: Meter, state: MeterState, moment: int, cost: int) -> None:
    assert meter.wait(state, moment, cost) == 0
    meter.spend(state, moment, cost)


def test_f1_a_meter_counts_by_day_and_lets_everything_pass() -> None:
    meter, state = Meter(), MeterState()
    for moment, cost in ((MOMENT, 3), (MOMENT + 1, 4), (MOMENT + DAY, 5)):
        spend(meter, state, moment, cost)
    assert state.days == {20_774 * DAY: 7, 20_775 * DAY: 5}


def test_f1_a_settled_hold_counts_on_the_day_of_the_hold() -> None:
    meter, state = Meter(), MeterState()
    spend(meter, state, MOMENT, 10)
    mark, serial = meter.mark(state)
    spend(meter, state, MOMENT + DAY, 1)
    meter.correct(state, MOMENT + DAY, 10, 2, mark, serial)
    assert state.days == {20_774 * DAY: 2, 20_775 * DAY: 1}
    meter.correct(state, MOMENT + DAY, 2, 0, mark, serial)
    assert state.days == {20_775 * DAY: 1}


def test_f1_days_are_those_of_the_zone() -> None:
    berlin, state = Meter("Europe/Berlin"), MeterState()
    spend(berlin, state, 20_774 * DAY + 23 * DAY // 24, 1)  # 00:00 on the next day in Berlin
    assert state.days == {20_774 * DAY + 23 * DAY // 24: 1}


def test_f1_days_are_kept_for_thirteen_months() -> None:
    meter, state = Meter(), MeterState()
    spend(meter, state, MOMENT, 10)
    mark, _ = meter.mark(state)
    assert not meter.idle(state, mark + KEPT - 1)
    assert meter.idle(state, mark + KEPT)
    spend(meter, state, MOMENT + KEPT, 1)
    assert list(state.days.values()) == [1]
    meter.correct(state, MOMENT + KEPT, 10, 4, mark, 0)
    assert list(state.days.values()) == [1]
