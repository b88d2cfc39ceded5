"""What accounts, events, alerts and errors tell of the holds of a gate, and whose violation a denial is."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest

from headgate import Gate, HoldError, InvalidInput, Limiter, ManualClock, MemoryStore, Policy, RateLimited
from headgate.events import AccountAlerted, Event, HoldChecked, Violated
from headgate.gate.accounts import Bound
from headgate.http import describe_error
from headgate.stores.base import Store
from headgate.stores.redis import RedisStore
from tests.support.account_gate import AGENTS, START, gate_on
from tests.support.valkey import ValkeyServer


@pytest.mark.once
def test_f1_a_denial_while_the_server_is_away_names_its_account_and_is_no_violation() -> None:
    with ValkeyServer() as server, RedisStore(server.url, on_failure_holds="local") as store:
        gate = Gate(Policy(accounts={"default": {"agent": {"usd": "10/calendar day"}}}), store=store)
        events: list[Event] = []
        gate.subscribe(events.append, Violated, AccountAlerted)
        server.kill()
        assert gate.hold("p", {"usd": 5})
        denied = gate.hold("p", {"usd": 8})
        assert (bool(denied), denied.decision.degraded, denied.bound) == (False, True, Bound("-/-/p", "usd", ""))
        with pytest.raises(RateLimited, match="'p' at 10 usd/calendar day"), denied:
            pytest.fail("the block runs without a hold")
        gate.close()
    assert events == []


def test_f1_a_denial_for_lack_of_room_is_no_violation_and_no_alert(clock: ManualClock) -> None:
    store = MemoryStore(clock=clock, max_keys=4)
    for key in "abcd":
        Limiter("1/hour", store=store, name="other").check(key)
    gate = Gate(Policy(accounts={"default": {"agent": {"usd": "10/calendar day"}}}), store=store)
    events: list[Event] = []
    gate.subscribe(events.append, Violated, AccountAlerted)
    denied = gate.hold("p", {"usd": 1})
    assert (bool(denied), denied.decision.degraded, events) == (False, True, [])


class Name(str, Enum):  # noqa: UP042 - a `StrEnum` has another `str`
    ACME = "acme"
    PRO = "pro"


def test_f1_a_member_of_an_enum_names_an_account_and_a_plan(clock: ManualClock) -> None:
    policy = Policy(accounts={"at": {"acme": {"usd": "10 in all"}}, "plans": {"pro": {"usd": "5 in all"}}})
    gate = Gate(policy, store=MemoryStore(clock=clock))
    assert gate.account(Name.ACME) == gate.account("acme")
    gate.set_account_plan("acme", Name.PRO)
    assert type(gate.account("acme").plan) is str


def test_f1_the_error_of_a_denied_block_names_what_decided(gate: Gate) -> None:
    with pytest.raises(RateLimited) as caught, gate.hold("planner", {"usd": 6}):
        pass
    assert caught.value.bound == Bound("acme/search", "usd", "")
    limiter = Limiter("1 in flight")
    limiter.hold("planner")
    assert limiter.hold("planner").denial().bound is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1 s"),
        (120, "120 s"),
        (121, "3 minutes"),
        (7200, "120 minutes"),
        (7201, "2 hours 1 minute"),
        (57_600, "16 hours"),
        (172_800, "48 hours"),
        (172_801, "2 days 1 hour"),
        (953_068, "11 days 1 hour"),
        (1_036_799, "12 days"),
    ],
)
def test_a_long_wait_is_told_in_two_units_and_never_too_short(seconds: int, text: str) -> None:
    error = RateLimited("planner", 1, "500/calendar month", seconds * 1000, bound=Bound("acme", "usd", ""))
    assert describe_error(error).detail == f"not enough usd left in acme; try again in {text}"


@pytest.mark.parametrize(
    ("costs", "spent", "status", "wait", "detail"),
    [
        ({"usd": "1.5"}, "4", 429, 57_600, "not enough usd left in acme/search; try again in 16 hours"),
        ({"tokens": 200}, "0", 429, 6, "not enough tokens left in acme/search/planner; try again in 6 s"),
        ({}, "0", 429, 1, "not enough slots left in acme/search/planner; try again in 1 s"),
        (
            {"usd": 6},
            "0",
            429,
            60,
            "not enough usd left in acme/search: no wait would help, only a lower cost or a higher limit",
        ),
    ],
)
def test_f1_the_answer_to_a_denied_hold_names_what_decided(
    gate: Gate, costs: Any, spent: str, status: int, wait: int, detail: str
) -> None:
    gate.hold("planner", {"usd": spent, "tokens": 900}).settle()
    if not costs:
        for _ in range(2):
            assert gate.hold("planner", {}, lease=60)
    denied = gate.hold("planner", costs)
    assert not denied
    problem = describe_error(denied.denial())
    found = json.loads(problem.encode())
    bound = denied.bound
    assert bound is not None
    assert (problem.status, found["retry_after_ms"], found["detail"]) == (status, wait * 1000, detail)
    assert (found["account"], found["resource"], found["tool"], found["tier"]) == (*bound, bound.resource)
    assert found["violated-policies"] == [denied.denial().pace]


def test_f1_violations_are_only_those_of_the_agents_own_limits(gate: Gate) -> None:
    events: list[Event] = []
    gate.subscribe(events.append, Violated, HoldChecked)
    gate.hold("cook", {"usd": 1}).settle()
    assert not gate.hold("cook", {"usd": 1})  # the team's budget is empty
    assert not gate.is_rate_limited("cook")
    denied = gate.hold("planner", {"tokens": 1001})
    assert denied.bound == Bound("acme/search/planner", "tokens", "")
    assert denied.decision.violation is not None
    assert (gate.is_rate_limited("planner"), gate.is_rate_limited("cook")) == (True, False)
    assert [event.outcome.value for event in events if isinstance(event, HoldChecked)] == ["warn", "deny", "deny"]
    assert [(event.agent, event.channel, event.tier) for event in events if isinstance(event, Violated)] == [
        ("planner", "hold", "tokens")
    ]


def test_f1_the_event_of_a_hold_has_its_costs_and_session(gate: Gate) -> None:
    told: list[Event] = []
    gate.subscribe(told.append, HoldChecked)
    gate.hold("planner", {"usd": "0.5", "tokens": 20}, session="run-1", tool="web").settle({"usd": "0.25"})
    assert not gate.hold("planner", {"usd": 6})
    found = [(event.session, event.tool, event.costs) for event in told if isinstance(event, HoldChecked)]
    assert found == [
        ("run-1", "web", {"requests": 1, "usd": Decimal("0.5"), "tokens": 20}),
        ("", "", {"requests": 1, "usd": 6}),
    ]
    assert len({*told}) == 2, "events can be told apart in a set"


def test_f1_a_denied_session_is_the_agents_violation(gate: Gate) -> None:
    denied = gate.hold("planner", {"usd": "2.5"}, session="s")
    assert denied.bound == Bound("acme/search/planner/s", "usd", "")
    assert gate.is_rate_limited("planner")


def test_f1_alerts_of_an_account_at_80_and_100_percent_once_each(gate: Gate, clock: ManualClock) -> None:
    alerts: list[AccountAlerted] = []
    gate.subscribe(lambda event: alerts.append(event) if isinstance(event, AccountAlerted) else None, AccountAlerted)
    gate.hold("planner", {"usd": "3.9"}).settle()
    assert alerts == []
    gate.hold("planner", {"usd": "0.2"}).settle()
    gate.hold("planner", {"usd": "0.1"}).settle()
    gate.hold("planner", {"usd": "0.8"}).settle()
    assert not gate.hold("planner", {"usd": "0.1"})
    told = [(one.account, one.resource, one.share, one.limit) for one in alerts]
    assert told == [
        ("acme/search", "usd", 0.8, "5 usd/calendar day"),
        ("acme/search", "usd", 1.0, "5 usd/calendar day"),
    ]
    assert alerts[0].resets_at == pytest.approx(datetime(2026, 11, 18, tzinfo=UTC).timestamp())
    clock.advance(16 * 3600)
    gate.hold("planner", {"usd": "4.5"}).settle()
    assert [(one.account, one.share) for one in alerts[2:]] == [("acme", 0.8), ("acme/search", 0.8)]


@pytest.mark.parametrize(
    "settings",
    [{"exempt": ["cook"]}, {"shadow": True}, {"agents": {**AGENTS, "cook": {"account": "acme/ops", "shadow": True}}}],
)
def test_f1_exempt_and_shadowed_spending_is_counted_and_never_denied(store: Store, settings: dict[str, Any]) -> None:
    gate = gate_on(store, **settings)
    for _ in range(3):
        hold = gate.hold("cook", {"usd": "0.75", "tokens": 600})
        assert hold
        assert hold.state == "open"
        assert hold.decision
        hold.settle()
    assert not gate.is_rate_limited("cook")
    assert str(gate.account("acme").limits[1].left) == "7.750000"
    assert sum(one.amount for one in gate.usage(START, START) if one.resource == "usd") == Decimal("2.25")
    if "shadow" in settings:
        again = gate.hold("cook", {"usd": "0.75"})
        assert again.decision.would_be is not None
        assert again.decision.would_be.value == "deny"


def test_f1_an_account_tells_limit_spent_held_and_left(gate: Gate) -> None:
    hold = gate.hold("planner", {"usd": 2, "tokens": 30}, session="a/b")
    gate.hold("planner", {"usd": "0.5"}).settle()
    status = gate.account("acme/search")
    assert (status.path, status.level, status.plan) == ("acme/search", "team", "")
    usd = status.limits[1]
    assert [str(one) for one in (usd.amount, usd.spent, usd.held, usd.left)] == [
        "5",
        "0.500000",
        "2.000000",
        "2.500000",
    ]
    assert (usd.limit, usd.resets_after, usd.used) == ("5 usd/calendar day", 16 * 3600.0, 0.5)
    listed = gate.list_holds("acme/search/planner/a%2Fb")
    assert [(one.id, one.agent, one.session, one.state, one.costs) for one in listed] == [
        (hold.id, "planner", "a/b", "open", {"requests": 1, "usd": Decimal("2.000000"), "tokens": 30})
    ]
    assert gate.list_holds("acme/ops") == []
    assert [one.id for one in gate.list_holds("acme")] == [hold.id]
    slots = [one for one in gate.account("acme/search/planner").limits if one.resource == "slots"]
    assert [(str(one.held), str(one.left)) for one in slots] == [("1", "1")]


def test_f1_an_account_in_debt_tells_how_far(store: Store) -> None:
    gate = gate_on(store, accounts={"at": {"acme": {"usd": "1 in all"}, "acme/search": {"usd": "1/calendar day"}}})
    gate.hold("planner", {"usd": "0.25"}, lease=600)
    gate.hold("planner", {"usd": "0.5"}).settle({"usd": 3})
    for path in ("acme", "acme/search"):
        (usd,) = gate.account(path).limits
        assert [str(one.normalize()) for one in (usd.spent, usd.held, usd.left)] == ["3", "0.25", "0"]
        assert usd.used == 3.25
        gate.set_account_limit(path, "usd", usd.limit.replace("1 usd", "4 usd", 1))
        (usd,) = gate.account(path).limits
        assert [str(one.normalize()) for one in (usd.spent, usd.held, usd.left)] == ["3", "0.25", "0.75"]


def test_f1_what_is_held_is_told_beside_many_holds_that_have_ended(gate: Gate, clock: ManualClock) -> None:
    for number in range(10):
        gate.hold("planner", {"tokens": 0}, hold_id=f"expired-{number}", lease=1)
        clock.advance(1)
    for number in range(1000):
        gate.hold("planner", {"tokens": 0}, hold_id=f"settled-{number}").settle()
    hold = gate.hold("planner", {"usd": 2}, lease=600)
    assert [str(one.held) for one in gate.account("acme/search").limits if one.resource == "usd"] == ["2.000000"]
    assert [one.id for one in gate.list_holds("acme", 1)] == [hold.id]


def test_f1_usage_adds_up_by_day_agent_tool_and_resource(gate: Gate, clock: ManualClock) -> None:
    late = gate.hold("planner", {"usd": 1, "tokens": 100}, tool="web")
    gate.hold("writer", {"usd": "0.25"}).settle()
    clock.advance(16 * 3600)
    gate.hold("planner", {"usd": "0.125"}).settle()
    late.settle({"usd": "0.5", "tokens": 1})  # on the day of the hold
    tomorrow = date(2026, 11, 18)
    found = [
        (one.day, one.account, one.tool, one.resource, str(one.amount))
        for one in gate.usage(START, tomorrow, "acme/search")
    ]
    assert found == [
        (START, "acme/search/planner", "web", "requests", "1"),
        (START, "acme/search/planner", "web", "tokens", "1"),
        (START, "acme/search/planner", "web", "usd", "0.500000"),
        (START, "acme/search/writer", "", "requests", "1"),
        (START, "acme/search/writer", "", "usd", "0.250000"),
        (tomorrow, "acme/search/planner", "", "requests", "1"),
        (tomorrow, "acme/search/planner", "", "usd", "0.125000"),
    ]
    assert gate.usage(START, START, "acme/ops") == []
    assert len(gate.usage(tomorrow, tomorrow)) == 2
    gate.hold("stranger", {"usd": 3}).settle()  # without an account
    assert {one.account for one in gate.usage(tomorrow, tomorrow)} == {"acme/search/planner", "-/-/stranger"}


def test_f1_rates_of_money_are_exact(store: Store) -> None:
    gate = Gate(Policy(accounts={"default": {"agent": {"usd": "6/minute; 100/calendar day"}}}), store=store)
    hold = gate.hold("planner", {"usd": "0.000001"})
    assert [(one.limit, str(one.left)) for one in gate.explain("planner")] == [
        ("6/minute", "5.999999"), ("100 usd/calendar day", "99.999999"),
    ]  # fmt: skip
    hold.cancel()
    denied = gate.hold("planner", {"usd": "6.000001"})
    assert (bool(denied), denied.decision.limit.capacity) == (False, 6_000_000)


@pytest.mark.parametrize("paths", [5, "acme"])
def test_f1_accounts_are_asked_for_by_their_paths(gate: Gate, paths: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^accounts: expected paths of accounts, such as \['acme', 'acme/search'\]"):
        gate.accounts(paths)


def test_f1_holds_of_accounts_with_escaped_names_are_found(store: Store) -> None:
    agents = {"planner": {"account": "a%2Fb/t%25m"}}
    gate = gate_on(store, accounts={"default": {"org": {"usd": "9 in all"}}}, agents=agents)
    gate.hold("planner", {"usd": 1}, hold_id="one")
    gate.find_hold("planner", "one").settle({"usd": "0.5"})
    assert gate.account("a%2Fb").limits[0].spent == Decimal("0.5")


def test_f1_no_hold_that_is_cancelled_erases_usage(store: Store) -> None:
    gate = gate_on(store, accounts={})
    gate.hold("planner", {"tokens": 5000}).settle()
    rest = gate.hold("planner", {"tokens": 2**53 - 1 - 5000})
    try:
        more = gate.hold("planner", {"tokens": 2**32 - 1})
    except HoldError:  # in memory; a server counts further
        pass
    else:
        more.cancel()
    rest.cancel()
    day = gate.usage_days()[1]
    assert [one.amount for one in gate.usage(day, day) if one.resource == "tokens"] == [5000]
