"""Holds of a gate: all accounts above an agent at once, or none."""

from decimal import Decimal
from enum import Enum

import pytest

from headgate import Gate, HoldError, ManualClock, Policy, RateLimited
from headgate.gate.accounts import Bound
from headgate.http import describe_error
from headgate.stores.base import Store
from headgate.stores.redis import RedisStore
from tests.support.account_gate import START, gate_on, left
from tests.support.valkey import ValkeyServer


def test_f1_a_repeated_hold_of_an_exempt_agent_is_exempt(store: Store) -> None:
    gate = gate_on(store)
    gate.add_exemption("planner")
    holds = [gate.hold("planner", {"usd": "20"}, hold_id="job") for _ in range(2)]
    assert [(hold.decision.outcome.value, bool(hold)) for hold in holds] == [("exempt", True)] * 2


class Run(str, Enum):  # noqa: UP042 - a `StrEnum` has another `str`
    NIGHTLY = "run-1"


def test_f1_a_session_that_is_a_member_of_an_enum_counts_as_its_value(gate: Gate) -> None:
    """Its `str` would be "Run.NIGHTLY". An agent counts as its value, too."""
    for session in (Run.NIGHTLY, "run-1", Run.NIGHTLY):
        hold = gate.hold("planner", {"usd": "0.1"}, session=session)
        assert (hold.session, type(hold.session)) == ("run-1", str)
        assert gate.find_hold("planner", hold.id).session == "run-1"
        hold.settle()


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
    with ValkeyServer() as server, RedisStore(server.url) as store:
        gate = Gate(Policy(accounts={"default": {"agent": {"usd": "10/calendar day"}}}), store=store)
        server.kill()
        denied = gate.hold("p", {"usd": 5})
        problem = describe_error(denied.denial())
        assert (problem.status, problem.tier, problem.policies) == (503, "hold", ("hold",))
        with pytest.raises(HoldError, match=r"was denied: it has taken nothing \(rate limited: agent 'p' at hold"):
            denied.settle()
        gate.close()


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


def test_f1_a_hold_touches_no_bucket_of_a_tier(gate: Gate) -> None:
    for _ in range(2):
        gate.hold("planner", {"tokens": 10})
    assert gate.peek("planner", "ws", "heavy").remaining == 10


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


def test_f1_a_repeated_id_holds_once_and_ids_belong_to_their_agents(gate: Gate) -> None:
    for _ in range(3):
        assert gate.hold("planner", {"usd": 1}, hold_id="same")
    assert gate.hold("writer", {"usd": 1}, hold_id="same")
    assert left(gate, "planner")["usd of acme/search"] == "3.000000"
    with pytest.raises(HoldError):
        gate.hold("planner", {"usd": 2}, hold_id="same")
    gate.find_hold("writer", "same").cancel()
    assert gate.find_hold("planner", "same").state == "open"


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
