"""Usage: its totals, what was settled, and for how long it is kept."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Gate, InvalidInput, ManualClock, MemoryStore, Policy
from headgate.gate.usage import UsageTotal, usage_csv
from headgate.stores.base import Store
from headgate.stores.redis import RedisStore
from tests.support.valkey import PATIENCE, ValkeyServer

AGENTS: dict[str, Any] = {
    "planner": {"account": "acme/search"},
    "writer": {"account": "acme/search"},
    "cook": {"account": "acme"},
    "bob": {"account": "globex/ops"},
}
POLICY = Policy(accounts={"tools": ["web"]}, agents=AGENTS)


def clock_at(*when: int) -> ManualClock:
    return ManualClock(1000, at=datetime(*when, tzinfo=UTC))  # type: ignore[arg-type,misc]


def gate_at(*when: int) -> tuple[Gate, ManualClock]:
    clock = clock_at(*when)
    return Gate(POLICY, store=MemoryStore(clock=clock)), clock


def spend(gate: Gate, agent: str, usd: str, tool: str | None = None) -> None:
    gate.hold(agent, {"usd": usd}, tool=tool).settle()


def usd(gate: Gate, *by: str, account: str | None = None) -> dict[tuple[str, ...], str]:
    """Totals of money by everything but the resource."""
    totals = gate.usage_totals(*gate.usage_days(), account, by)
    return {one.group[:-1]: str(one.amount) for one in totals if one.group[-1] == "usd"}


def test_f1_usage_is_added_up_by_period_account_agent_tool_and_resource() -> None:
    gate, clock = gate_at(2026, 10, 31, 12)
    spend(gate, "planner", "1", "web")
    spend(gate, "cook", "0.5")
    clock.advance(86_400)
    spend(gate, "planner", "2")
    spend(gate, "writer", "4", "web")
    spend(gate, "bob", "8")
    spend(gate, "stray", "16")
    assert usd(gate, "month") == {("2026-10",): "1.500000", ("2026-11",): "30.000000"}
    assert usd(gate, "day", account="acme") == {("2026-10-31",): "1.500000", ("2026-11-01",): "6.000000"}
    assert usd(gate, "org") == {("",): "16.000000", ("acme",): "7.500000", ("globex",): "8.000000"}
    assert usd(gate, "team") == {("",): "16.500000", ("acme/search",): "7.000000", ("globex/ops",): "8.000000"}
    assert usd(gate, "account") == {
        ("",): "16.000000", ("acme",): "0.500000", ("acme/search",): "7.000000", ("globex/ops",): "8.000000",
    }  # fmt: skip
    assert usd(gate, "tool", "agent", account="acme/search") == {
        ("", "planner"): "2.000000", ("web", "planner"): "1.000000", ("web", "writer"): "4.000000",
    }  # fmt: skip
    assert gate.usage_totals(date(2026, 11, 1), date(2026, 11, 30), by=["resource", "month"]) == [
        UsageTotal(("requests", "2026-11"), Decimal(4)),
        UsageTotal(("usd", "2026-11"), Decimal(30)),
    ]
    days = gate.usage_days()
    assert gate.usage_totals(*days, by="month,org") == gate.usage_totals(*days, by=["month", "org"])


def test_f1_the_async_twin_tells_the_same(runner: Any) -> None:
    gate, _ = gate_at(2026, 10, 31)
    spend(gate, "planner", "1.25")
    days = gate.usage_days()
    assert runner.run(gate.ausage_totals(*days, "acme", ["team"])) == gate.usage_totals(*days, "acme", ["team"])


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (["week"], "by: expected some of day, month, account, org, team, agent, tool, resource, got 'week'"),
        (["session"], "by: expected some of "),
        (5, "by: expected some of "),
        (["day", "month"], "by: expected each group once, and either day or month, got 'day,month'"),
        (["agent", "agent"], "by: expected each group once"),
    ],
)
def test_groups_are_checked(by: list[str], message: str) -> None:
    gate, _ = gate_at(2026, 10, 31)
    with pytest.raises(InvalidInput, match=message.replace("(", r"\(")):
        gate.usage_totals(*gate.usage_days(), by=by)


def test_days_are_checked() -> None:
    gate, _ = gate_at(2026, 10, 31)
    with pytest.raises(InvalidInput, match=r"first: expected a day up to the last, which is 2026-10-30"):
        gate.usage(date(2026, 10, 31), date(2026, 10, 30))


HOLDS = st.lists(
    st.tuples(
        st.sampled_from([*AGENTS, "stray"]),
        st.sampled_from([None, "web"]),
        st.integers(0, 10**9),
        st.integers(0, 10**9) | st.none() | st.just("cancel"),
        st.integers(0, 40 * 86_400),
    ),
    max_size=30,
)


@given(HOLDS, st.permutations(["month", "team", "agent", "tool"]), st.integers(0, 4))
def test_f1_totals_are_what_was_settled_to_the_unit(
    holds: list[tuple[str, str | None, int, Any, int]], groups: list[str], count: int
) -> None:
    gate, clock = gate_at(2026, 1, 1)
    settled: Counter[str] = Counter()
    for agent, tool, cost, actual, later in holds[:9]:
        hold = gate.hold(agent, {"usd": Decimal(cost).scaleb(-6)}, tool=tool)
        clock.advance(1)
        if actual == "cancel":
            hold.cancel()
            continue
        hold.settle(None if actual is None else {"usd": Decimal(actual).scaleb(-6)})
        settled[agent] += cost if actual is None else actual
        clock.advance(later)
    totals = gate.usage_totals(*gate.usage_days(), by=groups[:count])
    total = sum([one.amount for one in totals if one.group[-1] == "usd"], Decimal(0))
    assert total == Decimal(settled.total()).scaleb(-6)
    by_agent = {one.group[0]: one.amount for one in gate.usage_totals(*gate.usage_days(), by=["agent"])
                if one.group[-1] == "usd"}  # fmt: skip
    assert by_agent == {agent: Decimal(amount).scaleb(-6) for agent, amount in settled.items() if amount}


# Last month doesn't vanish --------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "redis"])
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Store, ManualClock]]:
    clock = clock_at(2025, 12, 1)
    if request.param == "memory":
        yield MemoryStore(clock=clock), clock
        return
    server: ValkeyServer = request.getfixturevalue("redis_server")
    with RedisStore(server.url, prefix=f"{uuid4().hex}:", timeout=PATIENCE, clock=clock) as store:
        yield store, clock


def test_f1_13_months_are_kept_and_the_14th_is_dropped(opened: tuple[Store, ManualClock]) -> None:
    store, clock = opened
    gate = Gate(POLICY, store=store)
    spend(gate, "cook", "100")  # which never spends again
    now, spent = datetime(2025, 12, 1, tzinfo=UTC), {("2025-12",): "100.000000"}
    for month in range(16):
        then = datetime(2026 + month // 12, month % 12 + 1, 1, tzinfo=UTC)
        clock.advance((then - now).total_seconds())
        before = dict(list(spent.items())[-13:])
        assert usd(gate, "month").items() >= before.items(), "at midnight"
        spend(gate, "planner", str(month + 1))
        spent[(f"{then:%Y-%m}",)] = f"{month + 1}.000000"
        now = (then + timedelta(days=32)).replace(day=1) - timedelta(minutes=1)
        clock.advance((now - then).total_seconds())
        kept = dict(list(spent.items())[-13:])
        assert usd(gate, "month") == kept, "a minute before midnight"


def test_f1_days_that_are_kept_are_those_of_the_zone() -> None:
    clock = clock_at(2026, 10, 31, 23)
    policy = Policy(accounts={"zone": "Europe/Berlin"})
    gate = Gate(policy, store=MemoryStore(clock=clock))
    first, today = gate.usage_days()
    assert today == date(2026, 11, 1)
    assert first == today - timedelta(days=399)
    assert Gate(policy, store=MemoryStore(clock=clock_at(1970, 2, 1))).usage_days()[0] == date(1970, 1, 1)


def test_f1_what_is_settled_or_extended_without_having_been_named_is_counted(opened: tuple[Store, ManualClock]) -> None:
    store, _ = opened
    policy = Policy(accounts={"default": {"org": {"usd": "10 in all"}}, "tools": ["web"]}, agents=AGENTS)
    gate = Gate(policy, store=store)
    gate.hold("planner", {}).settle({"usd": "1.5"})
    gate.hold("planner", {"tokens": 3}, tool="web").extend({"usd": "0.25"})
    gate.hold("bob", {}).settle()
    assert usd(gate, "agent", "tool") == {("planner", ""): "1.500000", ("planner", "web"): "0.250000"}
    assert [str(one.left) for one in gate.account("acme").limits] == ["8.250000"]


def test_f1_usage_of_an_own_unit_stays_what_it_was_when_its_decimals_change(opened: tuple[Store, ManualClock]) -> None:
    store, _ = opened
    gate = Gate(store=store)
    for decimals, cost in ((2, "1.25"), (4, "0.0001"), (0, 7)):
        gate = Gate(Policy(accounts={"units": {"credits": {"decimals": decimals}}}), store=store)
        gate.hold("planner", {"credits": cost}).settle()
    first, last = gate.usage_days()
    assert [(one.resource, one.amount) for one in gate.usage(first, last)] == [
        ("credits", Decimal("8.2501")),
        ("requests", Decimal(3)),
    ]


# CSV ------------------------------------------------------------------------------------------------------------------


def test_f1_csv_has_no_formulas() -> None:
    hostile = ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", "\uff1d1+1", "\uff20x", 'a,"b"', "plain", "-/-/planner"]
    totals = [UsageTotal((name, "usd"), Decimal("1E+3")) for name in hostile]
    lines = usage_csv(["agent", "resource"], totals).split("\r\n")
    assert lines[0] == "agent,resource,amount"
    assert lines[1:5] == ["'=1+1,usd,1000", "'+1,usd,1000", "'-1,usd,1000", "'@x,usd,1000"]
    assert lines[5:9] == ["'\t=1,usd,1000", '"\'\r=1",usd,1000', "'\uff1d1+1,usd,1000", "'\uff20x,usd,1000"]
    assert lines[-4:] == ['"a,""b""",usd,1000', "plain,usd,1000", "'-/-/planner,usd,1000", ""]


def test_f1_csv_has_a_name_for_each_column() -> None:
    totals = [UsageTotal(("planner", "usd"), Decimal(5))]
    assert usage_csv(["agent"], totals).split() == ["agent,resource,amount", "planner,usd,5"]


def test_groups_of_csv_are_one_text_as_those_of_the_totals() -> None:
    totals = [UsageTotal(("planner", "usd"), Decimal(5))]
    assert usage_csv("agent,resource", totals).split() == ["agent,resource,amount", "planner,usd,5"]
    assert usage_csv(iter(["agent"]), totals).split() == ["agent,resource,amount", "planner,usd,5"]


@pytest.mark.parametrize("day", [date.min, date.max, datetime(2026, 11, 19, tzinfo=UTC), "2026-11-19"])
def test_a_day_that_is_refused_is_told_which_are_taken(day: Any) -> None:
    with pytest.raises(InvalidInput, match="first: expected a date without a time, from 1971-01-01 to 9989-12-31, got"):
        Gate(POLICY).usage(day, date(2026, 11, 19))
