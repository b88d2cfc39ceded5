"""Costs in a log: every hold of a replay is that of a gate."""

import json
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.gate.accounts import is_within
from headgate.replay.accounts import BACKOFF
from headgate.replay.html_report import render_page
from headgate.replay.report import AccountDenials, AccountSpent, AccountsReport, Report, replay

pytestmark = pytest.mark.once

START = 1_762_000_000
ACCOUNTS: dict[str, Any] = {
    "tools": ["web"],
    "default": {"agent": {"tokens": "1000/minute"}, "session": {"usd": "2 in all"}},
    "at": {
        "acme": {"usd": "5/calendar day", "tools": {"web": {"requests": "3/minute"}}},
        "acme/search": {"tokens": "4000/calendar day"},
    },
}
AGENTS: dict[str, Any] = {
    "planner": {"account": "acme/search"},
    "cook": {"account": "acme"},
    "quiet": {"account": "acme", "shadow": True},
}
POLICY = Policy(accounts=ACCOUNTS, agents=AGENTS, exempt=["boss"], limits={"normal": "100000/second"})


def lines(path: Path, *given: dict[str, Any] | str) -> str:
    log = path / "calls.jsonl"
    log.write_text("".join([f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in given]))
    return str(log)


def accounts(report: Report) -> AccountsReport:
    found = report.policies[0].accounts
    assert found is not None
    return found


def test_f1_costs_in_a_log_are_held_and_settled_on_accounts(tmp_path: Path) -> None:
    call = {"agent": "planner", "costs": {"tokens": 100, "usd": 0.5}, "session": 7, "tool": "web"}
    given = [{"time": START + number, **call} for number in range(5)]
    given += [{"time": START + 3600 + number, "agent": "cook", "costs": {"usd": "2"}} for number in range(2)]
    found = accounts(replay([lines(tmp_path, *given)], {"a policy": POLICY}))
    assert (found.holds, found.granted, found.denied, found.refused) == (7, 4, 3, {})
    assert found.denials == [
        AccountDenials("acme", "requests", "web", 2),
        AccountDenials("acme", "usd", "", 1),
    ]
    assert found.spent_from == "2025-11-01"
    assert [one for one in found.spent if one.resource == "usd"] == [
        AccountSpent("acme", "usd", "3.500000"), AccountSpent("acme/search", "usd", "1.500000"),
    ]  # fmt: skip


def test_f1_sessions_are_told_together_and_agents_without_accounts_too(tmp_path: Path) -> None:
    calls = [{"time": START, "agent": "stray", "costs": {"usd": 3}, "session": name} for name in ("a", "b")]
    calls.append({"time": START, "agent": "stray", "costs": {"usd": 1}, "session": "c"})
    found = accounts(replay([lines(tmp_path, *calls)], {"a policy": POLICY}))
    assert found.denials == [AccountDenials("-/-/stray/*", "usd", "", 2)]
    assert found.spent == [AccountSpent("", "requests", "1"), AccountSpent("", "usd", "1.000000")]


HOLDS = st.lists(
    st.tuples(
        st.integers(0, 40_000),
        st.sampled_from(["planner", "cook", "quiet", "boss", "stray"]),
        st.fixed_dictionaries(
            {}, optional={"tokens": st.integers(0, 1500), "usd": st.decimals(0, 3, places=6).map(str)}
        ),
        st.sampled_from([None, "web"]),
        st.sampled_from([None, "1", "2"]),
    ),
    min_size=1,
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(HOLDS, st.booleans())
def test_f1_every_hold_is_that_of_a_gate(
    tmp_path: Path, holds: list[tuple[int, str, dict[str, Any], str | None, str | None]], enforce: bool
) -> None:
    policy = Policy(
        accounts=ACCOUNTS, agents=AGENTS, exempt=["boss"], limits={"normal": "100000/second"},
        backoff={"enforce": enforce},
    )  # fmt: skip
    at, given = START, []
    clock = ManualClock(0, at=datetime.fromtimestamp(START, UTC))
    gate = Gate(policy, store=MemoryStore(clock=clock))
    outcomes: Counter[str] = Counter()
    denials: Counter[tuple[str, str, str]] = Counter()
    for later, agent, costs, tool, session in holds:
        at += later
        clock.advance(later)
        given.append({"time": at, "agent": agent, "costs": costs, "tool": tool, "session": session})
        if not gate.check(agent, "http", "normal"):
            continue
        hold = gate.hold(agent, costs, tool=tool, session=session)
        decision, bound = hold.decision, hold.bound or BACKOFF
        denied = not hold or bool(decision.would_be is not None and decision.would_be.value == "deny")
        outcomes["denied" if not hold else "shadowed" if denied else decision.outcome.value] += 1
        if denied:
            path = gate.path_of(agent)
            below = bound.account != path and is_within(bound.account, path)
            denials[f"{path}/*" if below else bound.account, bound.resource, bound.tool] += 1
        if hold:
            hold.settle()
    found = accounts(replay([lines(tmp_path, *given)], {"a policy": policy}, worst=1000))
    assert (found.denied, found.shadowed, found.exempt) == (
        outcomes["denied"], outcomes["shadowed"], outcomes["exempt"],
    )  # fmt: skip
    assert found.holds == outcomes.total()
    assert {(one.account, one.resource, one.tool): one.denied for one in found.denials} == denials
    totals = gate.usage_totals(*gate.usage_days(), "acme", ["org"])
    spent = {one.resource: Decimal(one.amount) for one in found.spent if one.account == "acme"}
    assert spent == {one.group[-1]: one.amount for one in totals}


def test_costs_in_csv_are_a_text(tmp_path: Path) -> None:
    log = tmp_path / "calls.csv"
    log.write_text(f"time,agent,costs,tool\n{START},cook,tokens=8 usd=0.25,web\n{START},cook,,\n")
    found = accounts(replay([str(log)], {"a policy": POLICY}))
    assert [(one.resource, one.amount) for one in found.spent] == [
        ("requests", "1"), ("tokens", "8"), ("usd", "0.250000"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "costs",
    ["5", "[1]", '"tokens"', '"tokens=x"', '{"usd": "NaN"}', '{"usd": "1e9"}', '{"usd": null}', '{"usd": true}',
     '{"usd": "-1"}', '{"usd": 1e400}', "{{{}}}".format(", ".join([f'"r{n}": 1' for n in range(65)]))],
)  # fmt: skip
def test_costs_that_are_none_make_a_line_malformed(tmp_path: Path, costs: str) -> None:
    bad = f'{{"time": {START}, "agent": "cook", "costs": {costs}}}'
    good = {"time": START, "agent": "cook", "costs": {"usd": 1}}
    report = replay([lines(tmp_path, bad, good)], {"a policy": POLICY})
    assert list(report.reasons) == ['costs: expected amounts by resource, such as {"tokens": 830, "usd": "0.0123"}']
    assert accounts(report).holds == 1


def test_holds_that_the_policy_cannot_count_are_told(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"costs": {"euros": 1}},
        {"costs": {"usd": 1}, "tool": "mail"},
        {"costs": {"usd": "0.0000001"}},
        {"costs": {"slots": 1}},
        {"costs": {"usd": -1}},
    ]
    many = [{"costs": {f"r{number}": 1}} for number in range(30)]
    given = [{"time": START, "agent": "cook", **one} for one in [*bad, *bad, *many]]
    found = accounts(replay([lines(tmp_path, *given)], {"a policy": POLICY}))
    assert (found.holds, found.spent, sum(found.refused.values())) == (0, [], 40)
    assert len(found.refused) == 21
    assert found.refused["(others)"] == 15
    assert [count for reason, count in found.refused.items() if "'mail'" in reason] == [2]


def test_a_policy_without_accounts_and_a_log_without_costs_say_nothing_of_them(tmp_path: Path) -> None:
    log = lines(tmp_path, {"time": START, "agent": "cook", "costs": {"usd": 1}})
    assert replay([log], {"a policy": Policy()}).policies[0].accounts is None
    log = lines(tmp_path, {"time": START, "agent": "cook"})
    assert replay([log], {"a policy": POLICY}).policies[0].accounts is None


def test_a_request_that_its_tier_denies_holds_nothing(tmp_path: Path) -> None:
    policy = Policy(accounts=ACCOUNTS, limits={"normal": "1/hour"})
    log = lines(tmp_path, *[{"time": START, "agent": "cook", "costs": {"usd": 1}}] * 3)
    assert accounts(replay([log], {"a policy": policy})).holds == 1


def test_the_page_shows_accounts_with_every_name_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    policy = Policy(accounts={"at": {hostile.replace("/", "%2F"): {"usd": "1 in all"}}},
                    agents={"cook": {"account": hostile.replace("/", "%2F")}})  # fmt: skip
    calls = [{"time": START, "agent": "cook", "costs": {"usd": 1}}] * 2 + [
        {"time": START, "agent": "a", "costs": {"<b>": 1}}
    ]
    page = render_page(replay([lines(tmp_path, *calls)], {"a policy": policy}))
    assert "<script>" not in page
    assert "<b>" not in page
    assert "Holds: 2, of which 1 denied." in page
    assert page.count("&lt;script&gt;alert(1)&lt;%2Fscript&gt;") == 3
