"""Events of budgets of accounts that are used up, or nearly."""

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.events import AccountAlerted
from tests.support.calendar_clock import calendar_clock

AGENTS: dict[str, Any] = {"planner": {"account": "acme/search"}}


@pytest.fixture
def clock() -> ManualClock:
    return calendar_clock()


def gate_with(clock: ManualClock, usd: object, **settings: Any) -> tuple[Gate, list[tuple[str, float, str]]]:
    """A gate, and the alerts of its accounts: path, share and limit."""
    policy = Policy(accounts={"at": {"acme/search": {"usd": usd}}}, agents=AGENTS, **settings)
    gate, told = Gate(policy, store=MemoryStore(clock=clock)), []

    def listen(event: object) -> None:
        assert isinstance(event, AccountAlerted)
        told.append((event.account, event.share, event.limit))

    gate.subscribe(listen, AccountAlerted)
    return gate, told


def spend(gate: Gate, usd: str) -> bool:
    hold = gate.hold("planner", {"usd": usd})
    if hold:
        hold.settle()
    return bool(hold)


def test_f1_two_budgets_of_one_resource_are_told_once_each(clock: ManualClock) -> None:
    gate, told = gate_with(clock, ["10/calendar day", "11/calendar month"])
    for _ in range(5):
        spend(gate, "1.9")
    assert told == [
        ("acme/search", 0.8, "10 usd/calendar day"),
        ("acme/search", 0.8, "11 usd/calendar month"),
    ]


def test_f1_a_budget_that_was_raised_is_told_again(clock: ManualClock) -> None:
    gate, told = gate_with(clock, "10/calendar day")
    spend(gate, "9")
    gate.set_account_limit("acme/search", "usd", "20/calendar day")
    spend(gate, "1")
    spend(gate, "7")
    assert [(share, limit) for _, share, limit in told] == [(0.8, "10 usd/calendar day"), (0.8, "20 usd/calendar day")]


def test_f1_a_hold_from_before_a_raise_tells_nothing_of_the_former_budget(clock: ManualClock) -> None:
    gate, told = gate_with(clock, "10/calendar day")
    hold = gate.hold("planner", {"usd": "9"})
    gate.set_account_limit("acme/search", "usd", "100/calendar day")
    spend(gate, "1")
    hold.settle({"usd": "8"})
    assert [(share, limit) for _, share, limit in told] == [(0.8, "10 usd/calendar day")]


def test_f1_a_budget_that_was_settled_for_less_is_told_again(clock: ManualClock) -> None:
    gate, told = gate_with(clock, "10/calendar day")
    gate.hold("planner", {"usd": "9"}).settle({"usd": "1"})
    spend(gate, "1")
    assert len(told) == 1
    spend(gate, "6.5")
    assert len(told) == 2


def test_f1_small_holds_around_80_percent_are_told_once(clock: ManualClock) -> None:
    gate, told = gate_with(clock, "1/calendar day")
    for _ in range(200):
        hold = gate.hold("planner", {"usd": "0.04"})
        assert hold
        hold.settle({"usd": "0.0045"})
    assert [share for _, share, _ in told] == [0.8]
    assert not gate.hold("planner", {"usd": "0.11"})
    gate.hold("planner", {"usd": "0.09"}).cancel()
    assert not gate.hold("planner", {"usd": "0.11"})
    assert [share for _, share, _ in told] == [0.8, 1.0]


@pytest.mark.parametrize(("settled", "times"), [("6.99", 2), ("7", 1)])
def test_f1_it_is_told_again_once_less_than_70_percent_were_used(settled: str, times: int, clock: ManualClock) -> None:
    gate, told = gate_with(clock, "10/calendar day")
    gate.hold("planner", {"usd": "8"}).settle({"usd": settled})
    spend(gate, "1.01")
    assert [share for _, share, _ in told] == [0.8] * times


@pytest.mark.parametrize("warn_at", [0.1, 0.5, 1])
def test_f1_80_percent_are_80_percent_whenever_agents_are_warned(clock: ManualClock, warn_at: float) -> None:
    gate, told = gate_with(clock, "10/calendar day", warn_at=warn_at)
    spend(gate, "7.999999")
    assert told == []
    spend(gate, "0.000001")
    assert [share for _, share, _ in told] == [0.8]


def test_f1_a_cost_that_never_passes_uses_nothing_up(clock: ManualClock) -> None:
    gate, told = gate_with(clock, "10/calendar day")
    assert not spend(gate, "11")
    assert told == []
    spend(gate, "8.5")
    assert not spend(gate, "1.6")
    assert [share for _, share, _ in told] == [0.8, 1.0]


def test_f1_several_accounts_are_told_at_once(clock: ManualClock) -> None:
    gate, _ = gate_with(clock, "10/calendar day")
    gate.set_account_limit("acme", "usd", "20/calendar day")
    gate.hold("planner", {"usd": "3"})
    gate.hold("planner", {"usd": "2"}).settle()
    found = gate.accounts(["acme", "acme/search"])
    assert [(one.path, str(one.limits[0].spent), str(one.limits[0].held)) for one in found] == [
        ("acme", "2.000000", "3.000000"),
        ("acme/search", "2.000000", "3.000000"),
    ]
    assert found == [gate.account("acme"), gate.account("acme/search")]


def test_f1_an_alert_tells_the_end_of_the_period_to_the_second() -> None:
    gate = Gate(Policy(accounts={"at": {"acme": {"usd": "10/calendar month in Europe/Berlin"}}}, agents=AGENTS))
    told: set[float] = set()

    def listen(event: object) -> None:
        assert isinstance(event, AccountAlerted)
        assert event.resets_at is not None
        told.add(event.resets_at)

    gate.subscribe(listen, AccountAlerted)
    for _ in range(10):
        gate.hold("planner", {"usd": "0.9"}).settle()
    assert len(told) == 1
    assert datetime.fromtimestamp(told.pop(), ZoneInfo("Europe/Berlin")).strftime("%d %X.%f") == "01 00:00:00.000000"
