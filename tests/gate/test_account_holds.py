"""Holds of a gate: all accounts above an agent at once, or none."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from headgate import Gate, HoldError, InvalidInput, Limiter, ManualClock, MemoryStore, Policy, RateLimited, UnknownHold
from headgate.events import AccountAlerted, Event, HoldChecked, Violated
from headgate.gate.accounts import Bound
from headgate.http import describe_error
from headgate.stores.base import Store
from headgate.stores.redis import RedisStore
from tests.support.valkey import PATIENCE, Server

START = date(2026, 11, 17)

ACCOUNTS: dict[str, Any] = {
    "default": {
        "agent": {"tokens": "1000/minute", "slots": "2 in flight"},
        "session": {"usd": "2 in all"},
    },
    "at": {
        "acme": {"usd": "10/calendar month", "slots": "3 in flight"},
        "acme/search": {"usd": "5/calendar day", "tools": {"web": {"requests": "2/minute"}}},
        "acme/ops": {"usd": "1 in all"},
    },
}
AGENTS: dict[str, Any] = {
    "planner": {"account": "acme/search"},
    "writer": {"account": "acme/search"},
    "cook": {"account": "acme/ops"},
}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000, at=datetime(2026, 11, 17, 8, tzinfo=UTC))


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore(clock=clock)
    else:
        server: Server = request.getfixturevalue("redis_server")
        with RedisStore(server.url, prefix=f"{uuid4().hex}:", timeout=PATIENCE, clock=clock) as made:
            yield made


def gate_on(store: Store, **settings: Any) -> Gate:
    return Gate(Policy(**{"accounts": ACCOUNTS, "agents": AGENTS, **settings}), store=store)


@pytest.fixture
def gate(store: Store) -> Gate:
    return gate_on(store)


def spent(gate: Gate, account: str) -> str:
    """What is spent of the dollars of an account."""
    (found,) = [one for one in gate.account(account).limits if one.resource == "usd"]
    return f"{found.spent.normalize():f} of {found.limit}"


def test_f1_a_budget_that_is_changed_without_its_time_zone_keeps_what_is_spent(store: Store) -> None:
    accounts = {
        "default": {"team": {"usd": "30/calendar day in Asia/Tokyo"}},
        "plans": {"pro": {"usd": "40/calendar day in Asia/Tokyo"}},
        "at": {"acme": {"usd": "10/calendar month in Europe/Berlin"}, "acme/ops": {"plan": "pro"}},
    }
    gate = gate_on(store, accounts=accounts)
    for agent in ("planner", "cook"):
        gate.hold(agent, {"usd": "4"}).settle()
    gate.set_account_limit("acme", "usd", "20/calendar month")
    assert spent(gate, "acme") == "8 of 20 usd/calendar month in Europe/Berlin"
    gate.set_level_limit("team", "usd", "31/calendar day")
    assert spent(gate, "acme/search") == "4 of 31 usd/calendar day in Asia/Tokyo"
    gate.set_plan_limit("pro", "usd", "41/calendar day")
    assert spent(gate, "acme/ops") == "4 of 41 usd/calendar day in Asia/Tokyo"
    gate.set_account_limit("acme/ops", "usd", "42/calendar day")
    assert spent(gate, "acme/ops") == "4 of 42 usd/calendar day in Asia/Tokyo"
    gate.set_account_limit("acme", "usd", "20/calendar month in UTC")
    assert spent(gate, "acme") == "0 of 20 usd/calendar month"


def test_f1_a_budget_that_was_changed_or_is_of_a_plan_keeps_its_time_zone_too(store: Store) -> None:
    plans = {"pro": {"usd": "40/calendar day in Asia/Tokyo"}, "max": {"usd": "90/calendar day in Asia/Tokyo"}}
    agents = {"planner": {"account": "acme/search", "plan": "pro"}, "cook": {"account": "acme/ops"}}
    gate = gate_on(store, accounts={"plans": plans}, agents=agents)
    gate.set_account_limit("acme", "usd", "10/calendar month in Europe/Berlin")
    gate.set_agent_plan("cook", "max")
    for agent in ("planner", "cook"):
        gate.hold(agent, {"usd": "4"}).settle()
    gate.set_account_limit("acme", "usd", "20/calendar month")
    assert spent(gate, "acme") == "8 of 20 usd/calendar month in Europe/Berlin"
    for path in ("acme/search/planner", "acme/ops/cook"):
        gate.set_account_limit(path, "usd", "50/calendar day")
        assert spent(gate, path) == "4 of 50 usd/calendar day in Asia/Tokyo"


def test_f1_an_agent_that_a_new_policy_moves_keeps_its_holds(store: Store) -> None:
    accounts = {"at": {"acme": {"usd": "10 in all"}, "beta": {"usd": "10 in all"}}}

    def policy(**agents: str) -> Policy:
        return Policy(accounts=accounts, agents={agent: {"account": path} for agent, path in agents.items()})

    gate = Gate(policy(planner="acme"), store=store)
    for agent in ("planner", "cook"):
        assert gate.hold(agent, {"usd": 2}, hold_id="job")
    gate.reload(policy(planner="beta", cook="beta"))
    assert gate.hold("planner", {"usd": 2}, hold_id="job").account == "acme/-/planner"
    assert [gate.find_hold(agent, "job").account for agent in ("planner", "cook")] == ["acme/-/planner", "-/-/cook"]
    gate.reload(policy())
    gate.find_hold("planner", "job").settle({"usd": 1})
    assert (spent(gate, "acme"), spent(gate, "beta")) == ("1 of 10 usd in all", "0 of 10 usd in all")


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(
    ("resource", "limit"),
    [("tokens", "unlimited"), ("tokens", "60/minute"), ("usd", "5/calendar day"), ("requests", "50/calendar day")],
)
async def test_f1_a_repeated_hold_is_the_first_one_whatever_has_become_of_the_limits(
    store: Store, settled: bool, resource: str, limit: str
) -> None:
    gate = gate_on(store, accounts={"at": {"acme": {"tokens": "500/calendar day"}}})
    first = gate.hold("planner", {"tokens": 1}, hold_id="job")
    if settled:
        first.settle({"tokens": 4})
    gate.set_account_limit("acme", resource, limit)
    again = gate.hold("planner", {"tokens": 1}, hold_id="job")
    assert (again.state, again.costs) == (first.state, first.costs)
    assert (await gate.ahold("planner", {"tokens": 1}, hold_id="job")).costs == first.costs
    again.settle({"tokens": 4})
    gate.set_account_limit("acme", resource, None)
    (found,) = [one for one in gate.account("acme").limits if one.resource == "tokens"]
    assert found.spent == 4
    if not settled:
        assert gate.find_hold("planner", "job").state == "settled"


def test_f1_a_repeated_hold_of_an_exempt_agent_is_exempt(store: Store) -> None:
    gate = gate_on(store)
    gate.add_exemption("planner")
    holds = [gate.hold("planner", {"usd": "20"}, hold_id="job") for _ in range(2)]
    assert [(hold.decision.outcome.value, bool(hold)) for hold in holds] == [("exempt", True)] * 2


def test_f1_a_repeated_hold_with_other_costs_is_refused(store: Store) -> None:
    gate = gate_on(store, accounts={"at": {"acme": {"tokens": "500/calendar day"}}})
    gate.hold("planner", {"tokens": 1}, hold_id="job")
    for limit in ("500/calendar day", "unlimited"):
        gate.set_account_limit("acme", "tokens", limit)
        with pytest.raises(
            HoldError, match="expected costs 1 requests, 1 tokens, with which it is open, got costs 1 req"
        ):
            gate.hold("planner", {"tokens": 2}, hold_id="job")


@pytest.mark.once
def test_f1_a_denial_while_the_server_is_away_names_its_account_and_is_no_violation() -> None:
    with Server() as server, RedisStore(server.url, on_failure_holds="local") as store:
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


@pytest.mark.parametrize("plan", ["more", "other"])
def test_f1_an_old_handle_of_an_id_that_was_used_again_counts_nothing(
    store: Store, clock: ManualClock, plan: str
) -> None:
    plans = {
        "less": {"eur": "10 in all"},
        "more": {"eur": "10 in all", "requests": "10 in all"},
        "other": {"tokens": "1000000 in all"},
    }
    gate = gate_on(store, accounts={"default": {"agent": {"slots": "2 in flight"}}, "plans": plans})
    gate.set_account_plan("acme", "less")
    old = gate.hold("planner", {"eur": 1}, hold_id="h", lease=1, keep=0)
    gate.set_account_plan("acme", plan)
    clock.advance(2)
    assert gate.hold("planner", {"tokens" if plan == "other" else "eur": 5}, hold_id="h", lease=600)
    before = gate.explain("planner")
    with pytest.raises(HoldError):
        old.settle({"eur": "0.25"})
    with pytest.raises(HoldError):
        old.extend({"eur": 2})
    with pytest.raises(HoldError):
        old.cancel()
    assert gate.explain("planner") == before


@pytest.mark.once
def test_f1_a_hold_that_nobody_can_decide_is_denied_as_a_hold() -> None:
    with Server() as server, RedisStore(server.url) as store:
        gate = Gate(Policy(accounts={"default": {"agent": {"usd": "10/calendar day"}}}), store=store)
        server.kill()
        denied = gate.hold("p", {"usd": 5})
        problem = describe_error(denied.denial())
        assert (problem.status, problem.tier, problem.policies) == (503, "hold", ("hold",))
        with pytest.raises(HoldError, match=r"was denied: it has taken nothing \(rate limited: agent 'p' at hold"):
            denied.settle()
        gate.close()


def test_f1_a_denial_for_lack_of_room_is_no_violation_and_no_alert(clock: ManualClock) -> None:
    store = MemoryStore(clock=clock, max_keys=4)
    for key in "abcd":
        Limiter("1/hour", store=store, name="other").check(key)
    gate = Gate(Policy(accounts={"default": {"agent": {"usd": "10/calendar day"}}}), store=store)
    events: list[Event] = []
    gate.subscribe(events.append, Violated, AccountAlerted)
    denied = gate.hold("p", {"usd": 1})
    assert (bool(denied), denied.decision.degraded, events) == (False, True, [])


def test_f1_an_agent_is_its_name_whatever_class_that_has(store: Store) -> None:
    class Same(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return hash("planner")

    gate = gate_on(store)
    assert gate.hold("planner", {"usd": 1}).account == "acme/search/planner"
    assert gate.hold(Same("zzz"), {"usd": 1}).account == "-/-/zzz"


async def test_f1_more_is_reserved_under_the_budget_that_is_in_force(store: Store) -> None:
    gate = gate_on(store)
    hold = gate.hold("planner", {"usd": "2"}, session="run", lease=60)
    assert not hold.extend({"usd": "4"})
    gate.set_account_limit("acme/search", "usd", "50/calendar day")
    assert not hold.extend({"usd": "4"})  # the session has 2 in all
    gate.set_level_limit("session", "usd", "20 in all")
    assert await hold.aextend({"usd": "4"})
    gate.set_account_limit("acme", "usd", "6.5/calendar month")
    denied = hold.extend({"usd": "1"})
    assert not denied
    assert str(denied.limit) == "6.5 usd/calendar month"
    hold.settle({"usd": "5"})
    assert spent(gate, "acme") == "5 of 6.5 usd/calendar month"


def left(gate: Gate, agent: str, **where: Any) -> dict[str, str]:
    """What is left under every limit of an agent."""
    return {str(Bound(one.account, one.resource, one.tool)): str(one.left) for one in gate.explain(agent, **where)}


def test_f1_a_hold_reserves_on_all_levels_and_settles_on_all(gate: Gate) -> None:
    hold = gate.hold("planner", {"tokens": 200, "usd": "0.5"}, session="run-1", tool="web")
    assert (bool(hold), hold.state, hold.account, hold.session, hold.tool) == (
        True, "open", "acme/search/planner", "run-1", "web",
    )  # fmt: skip
    assert left(gate, "planner", session="run-1", tool="web") == {
        "slots of acme": "2",
        "usd of acme": "9.500000",
        "requests of acme/search by web": "1",
        "usd of acme/search": "4.500000",
        "slots of acme/search/planner": "1",
        "tokens of acme/search/planner": "800",
        "usd of acme/search/planner/run-1": "1.500000",
    }
    assert hold.settle({"tokens": 150, "usd": "0.123456"})
    assert left(gate, "planner", session="run-1", tool="web") == {
        "slots of acme": "3",
        "usd of acme": "9.876544",
        "requests of acme/search by web": "1",
        "usd of acme/search": "4.876544",
        "slots of acme/search/planner": "2",
        "tokens of acme/search/planner": "850",
        "usd of acme/search/planner/run-1": "1.876544",
    }


def test_f1_a_denial_on_one_level_changes_nothing_on_any_other(gate: Gate) -> None:
    before = left(gate, "planner", session="s", tool="web")
    hold = gate.hold("planner", {"usd": "5.000001", "tokens": 10}, tool="web")
    assert (bool(hold), hold.state, hold.bound) == (False, "denied", Bound("acme/search", "usd", ""))
    assert hold.decision.retry_after is None  # more than the amount never passes
    assert left(gate, "planner", session="s", tool="web") == before
    with pytest.raises(HoldError, match="was denied"):
        hold.settle({})


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


def test_f1_slots_and_requests_are_taken_unasked(gate: Gate) -> None:
    first, second = gate.hold("planner", {}), gate.hold("planner", {})
    third = gate.hold("planner", {})
    assert [bool(first), bool(second), bool(third)] == [True, True, False]
    assert third.bound == Bound("acme/search/planner", "slots", "")
    assert gate.hold("writer", {})
    assert gate.hold("writer", {}).bound == Bound("acme", "slots", "")  # three of the organisation are taken
    first.cancel()
    assert gate.hold("writer", {})


def test_f1_what_is_not_named_denies_only_while_nothing_is_left(gate: Gate) -> None:
    gate.hold("cook", {"usd": 1}).settle()
    denied = gate.hold("cook", {"tokens": 1})
    assert (bool(denied), denied.bound) == (False, Bound("acme/ops", "usd", ""))
    gate.set_account_limit("acme/ops", "usd", "1.000001 in all")
    assert gate.hold("cook", {"tokens": 1})


def test_f1_the_longest_wait_binds_then_the_smallest_share(gate: Gate) -> None:
    hold = gate.hold("planner", {"tokens": 500, "usd": "4"})
    assert hold.bound == Bound("acme/search", "usd", "")  # a fifth is left, of tokens half
    denied = gate.hold("writer", {"tokens": 900, "usd": "4"})
    assert denied.bound == Bound("acme/search", "usd", "")
    assert denied.decision.retry_after == pytest.approx(16 * 3600)


def test_f1_a_change_keeps_what_is_spent_and_held(gate: Gate) -> None:
    hold = gate.hold("planner", {"usd": 2})
    gate.hold("planner", {"usd": 1}).settle()
    gate.set_account_limit("acme/search", "usd", "3.5/calendar day", by="ada")
    assert left(gate, "planner")["usd of acme/search"] == "0.500000"
    assert not gate.hold("writer", {"usd": 1})
    hold.settle({"usd": 1})
    assert left(gate, "planner")["usd of acme/search"] == "1.500000"


def test_f1_what_a_hold_tells_of_its_costs_can_be_given_back(gate: Gate) -> None:
    hold = gate.hold("planner", {"tokens": 200, "usd": "0.5"})
    costs = {name: hold.costs[name] for name in ("tokens", "usd")}
    assert hold.extend(costs)
    assert hold.settle(costs)
    assert {name: hold.costs[name] for name in costs} == costs


@pytest.mark.parametrize("cost", ["1.5", "-1", "NaN", "sNaN", "Infinity", "1e999999", "9007199254740992"])
def test_f1_a_decimal_that_is_no_whole_number_is_refused_for_tokens(gate: Gate, cost: str) -> None:
    with pytest.raises(ValueError, match="cost of tokens: expected"):
        gate.hold("planner", {"tokens": Decimal(cost)})
    assert gate.hold("planner", {"tokens": Decimal("1e3")})


def test_f1_a_hold_settles_on_the_accounts_with_which_it_began(gate: Gate, store: Store) -> None:
    hold = gate.hold("planner", {"usd": 2, "tokens": 100}, session="s", hold_id="request-1")
    gate.set_agent_account("planner", "beta/ops")
    gate.set_account_limit("acme/search", "usd", "4/calendar day")
    other = gate.find_hold("planner", "request-1")
    assert (other.id, other.account, other.session, other.costs) == (
        "request-1", "acme/search/planner", "s", {"requests": 1, "usd": Decimal("2.000000"), "tokens": 100},
    )  # fmt: skip
    other.settle({"usd": "0.5"})
    assert [(one.resource, str(one.left)) for one in gate.account("acme/search").limits] == [
        ("requests", "2"), ("usd", "3.500000"),
    ]  # fmt: skip
    assert left(gate, "planner") == {"slots of beta/ops/planner": "2", "tokens of beta/ops/planner": "1000"}
    assert hold.settle({"usd": "0.5"})  # once more: the same
    with pytest.raises(UnknownHold):
        gate.find_hold("writer", "request-1")


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


def test_f1_a_hold_touches_no_bucket_of_a_tier(gate: Gate) -> None:
    for _ in range(2):
        gate.hold("planner", {"tokens": 10})
    assert gate.peek("planner", "ws", "heavy").remaining == 10


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


def test_f1_a_blocked_agent_holds_nothing_and_can_still_settle(gate: Gate) -> None:
    hold = gate.hold("planner", {"usd": 1})
    gate.block("planner")
    denied = gate.hold("planner", {"usd": 1})
    assert (bool(denied), denied.bound, denied.decision.retry_after) == (False, None, None)
    assert gate.is_rate_limited("planner")
    hold.settle({"usd": "0.25"})
    assert left(gate, "planner")["usd of acme/search"] == "4.750000"
    with pytest.raises(RateLimited, match="agent 'planner' at blocked"), denied:
        pass


def test_f1_an_enforced_wait_denies_holds_too(store: Store, clock: ManualClock) -> None:
    gate = gate_on(store, backoff={"enforce": True})
    assert not gate.hold("planner", {"tokens": 1001})
    assert not gate.hold("planner", {"tokens": 1})
    clock.advance(3)
    assert gate.hold("planner", {"tokens": 1})


def test_f1_as_a_block_it_settles_what_was_used(gate: Gate) -> None:
    with gate.hold("planner", {"tokens": 500, "usd": 1}) as hold:
        hold.use({"tokens": 20})
        hold.use({"tokens": 22})
    assert hold.costs == {"requests": 1, "usd": Decimal("1.000000"), "tokens": 42}
    assert left(gate, "planner")["tokens of acme/search/planner"] == "958"
    with pytest.raises(RateLimited) as error, gate.hold("planner", {"usd": 6}):
        pass
    assert str(error.value) == (
        "rate limited: agent 'planner' at 5 usd/calendar day (usd of acme/search), no wait would help"
    )


async def test_f1_the_async_twins_do_the_same(gate: Gate) -> None:
    async with gate.ahold("planner", {"tokens": 500}, session="s") as hold:
        hold.use({"tokens": 7})
        assert await hold.aextend({"tokens": 100})
    assert hold.costs["tokens"] == 7
    again = await gate.ahold("planner", {"tokens": 500}, hold_id="x")
    assert again.bound == Bound("acme/search/planner", "tokens", "")
    await (await gate.afind_hold("planner", "x")).acancel()
    assert [str(one.left) for one in await gate.aexplain("planner") if one.resource == "tokens"] == ["993"]
    assert (await gate.aaccount("acme")).level == "org"
    assert await gate.alist_holds("acme") == []
    assert len(await gate.ausage(START, START, "acme")) == 2


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


def test_f1_a_repeated_id_holds_once_and_ids_belong_to_their_agents(gate: Gate) -> None:
    for _ in range(3):
        assert gate.hold("planner", {"usd": 1}, hold_id="same")
    assert gate.hold("writer", {"usd": 1}, hold_id="same")
    assert left(gate, "planner")["usd of acme/search"] == "3.000000"
    with pytest.raises(HoldError):
        gate.hold("planner", {"usd": 2}, hold_id="same")
    gate.find_hold("writer", "same").cancel()
    assert gate.find_hold("planner", "same").state == "open"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"costs": {"coins": 1}},
            "cost: expected one of requests, slots, usd, eur, tokens (accounts.units adds others), got 'coins'",
        ),
        (
            {"costs": {"slots": 1}},
            "cost: expected no slots: a hold takes one of each account that limits them, got 'slots'",
        ),
        ({"costs": {"usd": -1}}, "cost of usd: expected a number, 0 or more, got -1"),
        ({"costs": {"usd": "0.0000001"}}, "cost of usd: expected a number with at most 6 decimals"),
        ({"costs": {"tokens": 1.5}}, "cost of tokens: expected a whole number"),
        ({"costs": {"requests": 0}}, "cost of requests: expected a whole number of at least 1, got 0"),
        ({"costs": 5}, "costs: expected costs by resource"),
        ({"costs": {}, "tool": "phone"}, "tool: expected a tool that the policy names (web), got 'phone'"),
        ({"costs": {}, "session": ""}, "session: expected 1 to 128 printable characters"),
        ({"costs": {}, "session": "a\tb"}, "session: expected 1 to 128 printable characters"),
        ({"costs": {}, "session": True}, "session: expected 1 to 128 printable characters"),
        ({"costs": {}, "session": 10**128}, "session: expected 1 to 128 printable characters"),
        ({"costs": {}, "session": 10**5000}, "session: expected 1 to 128 printable characters"),
        ({"costs": {}, "lease": 0}, "hold lease: expected"),
        ({"costs": {}, "lease": 3601}, "hold lease: expected at most 3600 seconds (accounts.max_lease), got 3601"),
        ({"costs": {}, "hold_id": ""}, "hold_id: expected 1 to 200 characters"),
        ({"costs": {}, "agent": ""}, "agent: expected 1 to 128 printable characters"),
    ],
)
def test_f1_a_hold_that_makes_no_sense_is_refused_and_counts_nothing(
    gate: Gate, arguments: dict[str, Any], text: str
) -> None:
    before = left(gate, "planner")
    with pytest.raises(InvalidInput) as error:
        gate.hold(**{"agent": "planner", **arguments})
    assert str(error.value).startswith(text), error.value
    assert left(gate, "planner") == before


def test_f1_a_computed_price_that_is_spent_is_rounded_up(gate: Gate) -> None:
    with gate.hold("planner", {"usd": 1}) as hold:
        hold.use({"usd": 0.1 + 0.2})
        hold.use({"usd": 0.1 + 0.2, "tokens": 5})
        with pytest.raises(InvalidInput, match="cost of usd: expected a number with at most 6 decimals"):
            hold.extend({"usd": 0.1 + 0.2})
        with pytest.raises(InvalidInput, match="cost of tokens: expected a whole number"):
            hold.use({"tokens": 1.5})
    gate.hold("planner", {"usd": 1}).settle({"usd": 0.7 + 0.1})
    assert left(gate, "planner")["usd of acme"] == str(10 - Decimal("0.600001") - Decimal("0.8"))


@pytest.mark.parametrize("paths", [5, "acme"])
def test_f1_accounts_are_asked_for_by_their_paths(gate: Gate, paths: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^accounts: expected paths of accounts, such as \['acme', 'acme/search'\]"):
        gate.accounts(paths)


def test_f1_names_with_slashes_share_no_ids_and_no_counts(store: Store) -> None:
    accounts = {"default": {"agent": {"usd": "1 in all"}, "session": {"usd": "1 in all"}}}
    agents = {agent: {"account": "acme"} for agent in ("a", "a/b", "a%2Fb")}
    gate = Gate(Policy(accounts=accounts, agents=agents), store=store)
    assert gate.hold("a", {"usd": 1}, session="x", hold_id="b/x")
    assert gate.hold("a/b", {"usd": 1}, hold_id="x")
    assert gate.hold("a%2Fb", {"usd": 1}, hold_id="x")
    assert [gate.find_hold(agent, id_).account for agent, id_ in (("a", "b/x"), ("a/b", "x"), ("a%2Fb", "x"))] == [
        "acme/-/a", "acme/-/a%2Fb", "acme/-/a%252Fb",
    ]  # fmt: skip
    assert {one.id for one in gate.list_holds("acme")} == {"b/x", "x"}
    gate.find_hold("a/b", "x").cancel()
    assert not gate.hold("a", {"usd": 1})


def test_f1_an_ended_session_leaves_nothing(gate: Gate) -> None:
    gate.hold("planner", {"usd": 2}, session="s").settle()
    gate.hold("planner", {"usd": 1}, session="t").settle()
    gate.end_session("planner", "s")
    gate.session("planner", "x" * 200).close()  # no id of an account
    with gate.session("planner", "t"):
        assert left(gate, "planner", session="t")["usd of acme/search/planner/t"] == "1.000000"
    assert left(gate, "planner", session="t")["usd of acme/search/planner/t"] == "2.000000"
    gate.hold("planner", {"usd": 1}, session="t").settle()
    assert left(gate, "planner", session="s")["usd of acme/search/planner/s"] == "2.000000"
    assert left(gate, "planner", session="t")["usd of acme/search/planner/t"] == "1.000000"
    assert left(gate, "planner")["usd of acme/search"] == "1.000000"


def test_f1_every_agent_and_every_id_can_hold(gate: Gate) -> None:
    assert gate.hold("%" * 128, {}, hold_id="x" * 200)
    assert gate.find_hold("%" * 128, "x" * 200).state == "open"
    with pytest.raises(InvalidInput, match="hold_id: expected 1 to 200 characters"):
        gate.hold("planner", {}, hold_id="x" * 201)


class OddCosts(Mapping[Any, int]):
    """Costs of a resource that has no hash."""

    def __getitem__(self, key: object) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([["tokens"]])

    def __len__(self) -> int:
        return 1


class Unhashable(str):
    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def test_f1_names_without_a_hash_are_refused_or_read_like_others(gate: Gate) -> None:
    hold = gate.hold("planner", {"tokens": 5})
    for verb in (partial(gate.hold, "planner"), hold.use, hold.settle, hold.extend):
        with pytest.raises(InvalidInput, match=r"cost: expected .*, got \['tokens'\]"):
            verb(OddCosts())
    with pytest.raises(InvalidInput, match="tool: expected a tool that the policy names"):
        gate.hold("planner", {}, tool=Unhashable("unknown"))


def test_f1_other_costs_are_refused_by_resource(gate: Gate) -> None:
    hold = gate.hold("planner", {"tokens": 10, "usd": "0.5"}, hold_id="i")
    told = "expected costs 1 requests, 0.5 usd, 10 tokens, with which it is open, got costs 1 requests, 9 tokens"
    with pytest.raises(HoldError, match=f"hold 'i': {told}"):
        gate.hold("planner", {"tokens": 9}, hold_id="i")
    hold.settle({"tokens": 0, "usd": "0.25", "requests": 0})
    for again in (hold, gate.find_hold("planner", "i")):
        with pytest.raises(HoldError, match=r"costs 0\.25 usd, with which it is settled, got costs of 0"):
            again.settle({"usd": 0})
        with pytest.raises(HoldError, match=r"an open hold to extend, got one that is settled with costs 0\.25 usd"):
            again.extend({"tokens": 1})


def test_f1_a_repeated_id_is_the_same_hold_after_a_move(gate: Gate) -> None:
    gate.hold("planner", {"tokens": 10}, hold_id="i")
    gate.set_agent_account("planner", "umbrella")
    again = gate.hold("planner", {"tokens": 10}, hold_id="i")
    assert (again.account, again.state) == ("acme/search/planner", "open")
    told = "hold 'i': expected costs 1 requests, 10 tokens, with which it is open, got costs 1 requests, 11 tokens"
    with pytest.raises(HoldError, match=told):
        gate.hold("planner", {"tokens": 11}, hold_id="i")
    assert sum(one.amount for one in gate.usage(START, START) if one.resource == "tokens") == 10
    assert gate.hold("planner", {"tokens": 1}, hold_id="j").account == "umbrella/-/planner"


def test_f1_a_policy_with_a_shorter_lease_shortens_the_default(store: Store, clock: ManualClock) -> None:
    gate = Gate(Policy(accounts={"max_lease": 5}), store=store)
    hold = gate.hold("planner", {})
    clock.advance(5)
    assert hold.state == "expired"


def test_f1_more_open_holds_than_the_bound_are_an_error(store: Store) -> None:
    gate = Gate(Policy(accounts={"max_open_holds": 2}), store=store)
    gate.hold("planner", {})
    gate.hold("planner", {})
    with pytest.raises(HoldError, match="at most 2 open holds"):
        gate.hold("planner", {})
    assert gate.hold("writer", {})


LEVELS = [["agent", "session"], ["org", "agent", "session"], ["org", "team", "agent", "session"]]
PLACES = [
    (levels, account)
    for levels in LEVELS
    for account in ("", "acme", "acme/ops")
    if account.count("/") < len(levels) - 2 or not account
]


@pytest.mark.parametrize("before", PLACES)
def test_f1_a_hold_is_known_and_can_be_extended_after_a_reload_with_other_levels(
    store: Store, before: tuple[list[str], str]
) -> None:
    def policy(place: tuple[list[str], str]) -> Policy:
        agents = {"planner": {"account": place[1]}} if place[1] else {}
        limits = {"agent": {"usd": "10/calendar day", "slots": "2 in flight"}, "session": {"usd": "5 in all"}}
        return Policy(accounts={"levels": place[0], "default": limits}, agents=agents)

    for number, after in enumerate(PLACES):
        gate = Gate(policy(before), store=store)
        hold = gate.hold("planner", {"usd": 1}, session=f"run-{number}", hold_id=f"{number}")
        gate.reload(policy(after))
        assert hold.extend(lease=60)
        assert hold.extend({"usd": 1})
        assert gate.find_hold("planner", f"{number}").state == "open"
        again = gate.hold("planner", {"usd": 2}, session=f"run-{number}", hold_id=f"{number}")
        assert (again.state, again.account) == ("open", hold.account)
        again.settle({"usd": "0.5"})
        assert hold.state == "open"  # of this handle, which was told nothing
        assert gate.find_hold("planner", f"{number}").costs["usd"] == Decimal("0.5")
        gate.close()


def test_a_cost_that_no_store_can_count_is_refused(store: Store) -> None:
    gate = gate_on(store, accounts={})
    gate.hold("planner", {"tokens": 2**53 - 1}).settle()
    with pytest.raises(HoldError, match="expected costs with which every count is at most 9007199254740991, got more"):
        gate.hold("planner", {"tokens": 2**53 - 1})
    with pytest.raises(
        InvalidInput, match=r"^cost of tokens: expected at most 9007199254740991, got 9007199254740992$"
    ):
        gate.hold("planner", {"tokens": 2**53})
    hold = gate.hold("writer", {"tokens": 1})
    with pytest.raises(InvalidInput, match=r"^cost of tokens: expected at most 9007199254740991"):
        hold.settle({"tokens": 10**20})
    assert not hold.settle({"tokens": 3}).degraded


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


def test_a_tool_of_another_type_is_refused(gate: Gate) -> None:
    tools: list[Any] = [[], {}, ["web"]]
    for tool in tools:
        with pytest.raises(InvalidInput, match=r"^tool: expected a tool that the policy names \(web\)"):
            gate.hold("planner", {}, tool=tool)


def test_an_extension_is_bounded_like_the_hold(store: Store) -> None:
    gate = gate_on(store, accounts={"max_lease": 600})
    hold = gate.hold("planner", {"tokens": 2**53 - 1}, lease=60)
    with pytest.raises(InvalidInput, match=r"^cost: expected at most 9007199254740991 in all, got "):
        hold.extend({"tokens": 1})
    with pytest.raises(
        InvalidInput, match=r"^hold lease: expected at most 600 seconds \(accounts\.max_lease\), got 601$"
    ):
        hold.extend(lease=601)
    with pytest.raises(InvalidInput, match=r"^hold lease: expected at most 600 seconds"):
        gate.find_hold("planner", hold.id).extend(lease=3600)
    assert hold.extend(lease=600)
    assert not hold.settle().degraded
