"""Holds of a gate while limits, plans, levels and the accounts of agents change."""

from decimal import Decimal

import pytest

from headgate import Gate, HoldError, ManualClock, Policy, UnknownHold
from headgate.stores.base import Store
from tests.support.account_gate import START, gate_on, left, spent


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


def test_f1_a_change_keeps_what_is_spent_and_held(gate: Gate) -> None:
    hold = gate.hold("planner", {"usd": 2})
    gate.hold("planner", {"usd": 1}).settle()
    gate.set_account_limit("acme/search", "usd", "3.5/calendar day", by="ada")
    assert left(gate, "planner")["usd of acme/search"] == "0.500000"
    assert not gate.hold("writer", {"usd": 1})
    hold.settle({"usd": 1})
    assert left(gate, "planner")["usd of acme/search"] == "1.500000"


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
