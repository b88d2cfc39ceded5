"""`headgate accounts`, `levels`, `plans`, `holds` and `usage`, against a real hub."""

import csv
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.cli.account_limits import amount
from headgate.cli.answers import duration_text
from headgate.cli.answers import seconds as seconds_text
from tests.support.calendar_clock import calendar_clock
from tests.support.cli import Command, StartHub

pytestmark = pytest.mark.once

POLICY = Policy(
    accounts={
        "tools": ["web"],
        "default": {"team": {"usd": "20/calendar day"}},
        "plans": {"pro": {"usd": "50/calendar day"}},
        "at": {"acme": {"usd": "100/calendar month"}},
    },
    agents={"planner": {"account": "acme/search"}},
)


@pytest.fixture
def gate(running_hub: StartHub) -> Iterator[Gate]:
    clock = calendar_clock()
    with running_hub(POLICY, store=MemoryStore(clock=clock)) as hub:
        yield hub.hub.gate


def test_f1_the_tree_shows_spent_held_left_and_when_it_resets(gate: Gate, headgate: Command) -> None:
    gate.hold("planner", {"usd": "12.5"}).settle()
    gate.hold("planner", {"usd": "0.000001"})
    assert headgate("accounts") == (
        0,
        (
            "account      plan  resource  limit                   spent      held       left  used     resets\n"
            "acme         -     usd       100 usd/calendar month   12.5  0.000001  87.499999   13%  13 d 16 h\n"
            "acme/search  -     usd       20 usd/calendar day      12.5  0.000001   7.499999   63%       16 h\n"
        ),
        "",
    )


def test_f1_an_agent_is_shown_with_its_accounts(gate: Gate, headgate: Command) -> None:
    gate.hold("planner", {"usd": "12.5"})
    out = headgate("agents", "planner").expect_output()
    assert "account       acme/search\nholds         1 open, see headgate holds list acme/search/planner\n" in out
    assert (
        "account      resource  limit                   held  left  used\n"
        "acme         usd       100 usd/calendar month  12.5  87.5   12%\n"
        "acme/search  usd       20 usd/calendar day     12.5   7.5   62%\n"
    ) in out
    gate.hold("writer", {})
    assert "account" not in headgate("agents", "writer")[1]


def test_an_agent_whose_account_denies_is_told_apart(gate: Gate, headgate: Command) -> None:
    assert not gate.hold("planner", {"usd": "21"})
    assert "planner  no" in headgate("agents")[1]
    assert "denied-by-account\n" in headgate("agents")[1]
    page = headgate("agents", "planner").expect_output()
    assert "state         not connected; an account above it denied its last hold\n" in page
    gate.hold("planner", {"usd": "1"})
    page = headgate("agents", "planner").expect_output()
    assert "denied-by-account" not in headgate("agents").expect_output()
    assert "denied its last hold" not in page


def test_the_page_of_an_agent_tells_expired_holds_from_open_ones(gate: Gate, headgate: Command) -> None:
    gate.hold("planner", {"usd": "1"}, lease=10)
    assert isinstance(gate.store.clock, ManualClock)
    gate.store.clock.advance(11)
    assert "holds         0 open, 1 expired, see headgate holds list" in headgate("agents", "planner")[1]
    gate.hold("planner", {"usd": "1"}, lease=10)
    assert "holds         1 open, 1 expired, see headgate holds list" in headgate("agents", "planner")[1]


def test_f1_more_accounts_than_a_page_are_listed_in_order(gate: Gate, printed_json: Callable[..., Any]) -> None:
    for number in range(130):
        gate.set_account_limit(f"org {number:03}/team", "usd", "1 in all")
    found = [one["path"] for one in printed_json("accounts")["accounts"]]
    assert len(found) == 2 + 260
    assert found[:5] == ["acme", "acme/search", "org 000", "org 000/team", "org 001"]
    assert [one["path"] for one in printed_json("accounts", "--within", "org 129")["accounts"]] == [
        "org 129", "org 129/team",
    ]  # fmt: skip


def test_f1_a_limit_for_a_tool_is_set_and_taken_back(gate: Gate, headgate: Command) -> None:
    out = headgate(
        "accounts", "set", "acme/search", "requests=5/minute", "tokens=9 in all", "--tool", "web"
    ).expect_output()
    assert "requests by web  5/minute" in out
    assert "tokens by web    9 tokens in all" in out
    out = headgate("accounts", "unset", "acme/search", "tokens", "--tool", "web").expect_output()
    assert ("requests by web" in out, "tokens by web" in out) == (True, False)
    out = headgate("accounts", "unset", "acme/search").expect_output()
    assert "by web" not in out
    assert [str(one) for one in gate.history()] == [
        (
            "account limit of 'acme/search' for requests@web set to 5/minute, "
            "account limit of 'acme/search' for tokens@web set to 9 tokens in all"
        ),
        "account limit of 'acme/search' for tokens@web removed",
        "account limit of 'acme/search' for requests@web removed",
    ]


def test_f1_an_agent_is_shown_and_limited_by_its_path(gate: Gate, headgate: Command) -> None:
    code, out, err = headgate("accounts", "set", "acme/search/planner", "usd=3 in all")
    assert (code, err) == (0, "note: no agent named planner is registered\n")
    assert out.splitlines()[1].startswith("acme/search/planner  -     usd       3 usd in all")
    assert headgate("accounts", "plan", "acme/search/planner", "pro")[1].splitlines()[1].split()[1] == "pro"
    assert headgate("accounts", "move", "planner", "-")[1] == "planner belongs to no account now, with the plan pro\n"
    code, _, err = headgate("accounts", "set", "acme/search/planner", "usd=3 in all")
    assert (code, "expected the agent's path, which is '-/-/planner'" in err) == (1, True)
    headgate("accounts", "move", "planner")
    assert gate.path_of("planner") == "acme/search/planner"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["accounts", "set", "acme", "usd"], 2, "expected a resource and a limit, such as usd='500/calendar month'"),
        (["accounts", "set", "acme", "usd="], 2, "expected a resource and a limit"),
        (["accounts", "set", "acme", "usd=1 in all", "usd=2 in all"], 2, "expected each resource once, got usd usd"),
        (["accounts", "set", "acme", "usd=soon"], 1, "usd: "),
        (["accounts", "set", "acme", "usd=9/month"], 1, "usd: expected a budget, such as '9/calendar month' (a rate, "),
        (["plans", "set", "pro", "usd=9/day"], 1, "is written '9 per 24 hours'), got '9/day'"),
        (["accounts", "set", "a/b/c/d", "usd=1 in all"], 1, "account: expected the path of an account"),
        (["accounts", "unset", "acme", "--tool", "web"], 2, "--tool: expected the resources of the tool"),
        (["accounts", "show", ""], 2, "expected a text without the parts . and .., which lead to another path, got ''"),
        (["accounts", "set", "a/../b", "usd=1 in all"], 2, "expected a text without the parts . and .."),
        (["accounts", "unset", "a%2F..%2Fdefaults"], 2, "expected a text without the parts . and .."),
        (["holds", "list", "%2e%2e"], 2, "expected a text without the parts . and .."),
        (["holds", "cancel", "planner", ".."], 2, "expected a text without the parts . and .."),
        (["levels", "unset", "."], 2, "expected a text without the parts . and .."),
        (["accounts", "plan", "acme", "gold"], 1, "plan: expected a plan of the policy (pro), got 'gold'"),
        (["accounts", "move", "planner", "a/b/c"], 1, "account: expected the path of an account above the agents"),
        (["levels", "set", "squad", "usd=1 in all"], 1, "level: expected one of org, team, agent, session"),
        (["plans", "set", "gold", "usd=1 in all"], 1, "plan: expected a plan of the policy (pro), got 'gold'"),
        (["holds", "cancel", "planner", "nothing"], 1, "nothing"),
        (["usage", "--from", "soon"], 2, "expected a day such as 2026-11-01, got 'soon'"),
        (["usage", "--month", "2026-13"], 2, "expected a month such as 2026-10, got '2026-13'"),
        (["usage", "--month", "2026-10", "--to", "2026-10-04"], 2, "--month: expected it without --from and --to"),
        (["usage", "--by", "week"], 1, "by: expected some of day, month"),
        (["usage", "--csv", "--json"], 2, "--csv: expected it without --json"),
    ],
)
def test_bad_input_is_told_and_changes_nothing(
    gate: Gate, headgate: Command, arguments: list[str], code: int, message: str
) -> None:
    got, out, err = headgate(*arguments)
    assert (got, out, message in err) == (code, "", True), err
    assert gate.history() == []


def test_f1_a_path_that_nothing_has_named_is_pointed_out_when_it_is_given_a_plan(
    gate: Gate, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    assert headgate("accounts", "plan", "acme/serach", "pro")[2] == (
        "note: the account acme/serach is new: nothing named it before\n"
    )
    assert headgate("accounts", "plan", "acme/search", "pro")[2] == ""
    assert (
        headgate("accounts", "plan", "acme/search/planner", "pro")[2] == "note: no agent named planner is registered\n"
    )
    assert printed_json("accounts", "plan", "acme/serach2", "pro")["known"] is False
    assert headgate("accounts", "plan", "acme/serach3", "pro", "--json")[2] == ""


def test_f1_an_account_that_is_new_is_pointed_out_when_an_agent_moves_to_it(gate: Gate, headgate: Command) -> None:
    assert headgate("accounts", "move", "planner", "acme/serach") == (
        0,
        "planner belongs to acme/serach now\n",
        ("note: the account acme/serach is new: nothing named it before\nnote: no agent named planner is registered\n"),
    )
    assert headgate("accounts", "move", "planner", "acme/serach2", "--json")[2] == ""


def test_f1_an_agent_that_loses_its_account_because_no_path_was_named_is_pointed_out(
    gate: Gate, headgate: Command
) -> None:
    gate.set_agent_account("bot", "acme/search")
    code, out, err = headgate("accounts", "move", "bot")
    assert (code, out) == (0, "bot belongs to no account now\n")
    assert err.splitlines()[0] == (
        "note: the policy names no account for bot, so only its own limits apply: "
        "headgate accounts move bot PATH gives it one"
    )
    assert "note: the policy" not in headgate("accounts", "move", "bot", "-")[2]  # as it was asked for
    assert headgate("changes", "--limit", "1")[1].splitlines()[1].endswith("account of 'bot' set to none")
    assert headgate("accounts", "move", "planner")[1] == "planner belongs to acme/search now\n"


@pytest.mark.parametrize("verb", [["unset"], ["unset", "usd"], ["plan"]])
def test_f1_an_account_that_nothing_names_is_not_called_new_where_nothing_is_set(
    gate: Gate, headgate: Command, verb: list[str]
) -> None:
    code, _, err = headgate("accounts", verb[0], "acme/serach", *verb[1:])
    assert (code, err) == (0, "note: nothing names an account 'acme/serach'\n")
    assert "acme/serach" not in headgate("accounts")[1]


def test_f1_holds_of_an_account_that_nothing_names_are_none_and_the_name_may_be_misspelt(
    gate: Gate, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    assert headgate("holds", "list", "acme/search") == (0, "no holds\n", "")
    assert headgate("holds", "list", "acme/search/planner/run-1") == (0, "no holds\n", "")
    assert headgate("holds", "list", "acme/serach") == (
        0,
        "no holds\n",
        "note: nothing names an account 'acme/serach'\n",
    )
    assert printed_json("holds", "list", "acme/serach")["holds"] == []


def test_f1_holds_are_listed_and_one_is_cancelled(gate: Gate, headgate: Command) -> None:
    gate.hold("planner", {"usd": "3", "tokens": 7}, session="run-1", tool="web", lease=90, hold_id="first")
    gate.hold("planner", {"usd": "1"}, lease=100, hold_id="second")
    assert headgate("holds", "list", "acme")[1].splitlines()[1:] == [
        "planner  first   acme/search/planner  run-1    web   open   1 min 30 s  requests 1, usd 3, tokens 7",
        "planner  second  acme/search/planner  -        -     open   1 min 40 s  requests 1, usd 1",
    ]
    _, out, err = headgate("holds", "list", "acme", "--limit", "1")
    assert (out.count("\n"), err) == (2, "note: only the first 1 are listed\n")
    assert headgate("holds", "cancel", "planner", "first") == (0, "hold first of planner is cancelled\n", "")
    assert [one.id for one in gate.list_holds("acme")] == ["second"]
    assert gate.account("acme").limits[0].left == 99


def test_f1_usage_is_a_table_json_and_csv(gate: Gate, headgate: Command, printed_json: Callable[..., Any]) -> None:
    gate.hold("planner", {"usd": "2.5"}, tool="web").settle()
    gate.hold("=1+1", {"usd": "1"}).settle()
    assert headgate("usage", "acme", "--by", "month,agent,tool")[1] == (
        "month    agent    tool  resource  amount\n"
        "2026-11  planner  web   requests       1\n"
        "2026-11  planner  web   usd          2.5\n"
    )
    nothing = "nothing was used from 2025-11-01 to 2026-11-17\n"
    assert headgate("usage", "globex") == (0, nothing, "note: nothing names an account 'globex'\n")
    gate.set_agent_account("new", "globex")
    assert headgate("usage", "globex") == (0, nothing, "")
    assert headgate("usage", "--month", "2026-02")[1] == "nothing was used from 2026-02-01 to 2026-02-28\n"
    month = printed_json("usage", "--month", "2026-11")
    assert (month["from"], month["to"], len(month["totals"])) == ("2026-11-01", "2026-11-30", 2)
    found = printed_json("usage", "--by", "agent", "--from", "2026-11-17", "--to", "2026-11-17")
    assert found["totals"][-1] == {"group": {"agent": "planner", "resource": "usd"}, "amount": "2.500000"}
    rows = list(csv.reader(headgate("usage", "--by", "agent", "--csv")[1].splitlines()))
    assert rows[0] == ["agent", "resource", "amount"]
    assert rows[2] == ["'=1+1", "usd", "1.000000"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "never"), (0, "-"), (0.2, "1 s"), (59, "59 s"), (60, "1 min"), (90, "1 min 30 s"), (3600, "1 h"),
     (3660, "1 h 1 min"), (86_399, "23 h 59 min"), (1e6, "11 d 13 h")],
)  # fmt: skip
def test_durations_are_short(seconds: Any, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(5, "0.005 s"), (1500, "1.5 s"), (99_940, "99.9 s"), (99_999, "1 min 40 s"), (1_022_911_000, "11 d 20 h")],
)
def test_long_waits_are_told_like_durations(milliseconds: int, text: str) -> None:
    assert seconds_text(milliseconds) == text


def test_amounts_have_no_zeros_at_the_end() -> None:
    assert [amount(one) for one in ("1.500000", "100", "0.000000", "0")] == ["1.5", "100", "0", "0"]
    for bad in ("NaN", "Infinity", "x", "1" * 61, 5, None):
        with pytest.raises((ValueError, TypeError)):
            amount(bad)
