"""Costs, names and tools of holds of a gate: which are refused, and how odd ones are read."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from headgate import Gate, HoldError, InvalidInput, Policy
from headgate.stores.base import Store
from tests.support.account_gate import gate_on, left


def test_f1_a_repeated_hold_with_other_costs_is_refused(store: Store) -> None:
    gate = gate_on(store, accounts={"at": {"acme": {"tokens": "500/calendar day"}}})
    gate.hold("planner", {"tokens": 1}, hold_id="job")
    for limit in ("500/calendar day", "unlimited"):
        gate.set_account_limit("acme", "tokens", limit)
        with pytest.raises(
            HoldError, match="expected costs 1 requests, 1 tokens, with which it is open, got costs 1 req"
        ):
            gate.hold("planner", {"tokens": 2}, hold_id="job")


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


def test_f1_more_open_holds_than_the_bound_are_an_error(store: Store) -> None:
    gate = Gate(Policy(accounts={"max_open_holds": 2}), store=store)
    gate.hold("planner", {})
    gate.hold("planner", {})
    with pytest.raises(HoldError, match="at most 2 open holds"):
        gate.hold("planner", {})
    assert gate.hold("writer", {})


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
