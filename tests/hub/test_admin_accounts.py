"""Admin routes for accounts: the tree, limits and plans, the accounts of agents, open holds, and usage."""

import csv
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from headgate import Gate, ManualClock, MemoryStore, Policy
from tests.support.admin import list_changes
from tests.support.calendar_clock import calendar_clock
from tests.support.hub import ADMIN, HubServer, hub_server

ACCOUNTS = "/api/admin/accounts"
DEFAULTS = "/api/admin/account-defaults"
USAGE = "/api/admin/usage"
POLICY = Policy(
    accounts={
        "default": {"team": {"usd": "20/calendar day"}, "agent": {"tokens": "1000/minute"}},
        "plans": {"pro": {"usd": "50/calendar day"}, "free": {"usd": "1/calendar day"}},
        "at": {
            "acme": {"usd": "100/calendar month"},
            "acme/search": {"tools": {"web": {"requests": "5/minute"}}},
            "acme-x": {"plan": "pro"},
        },
    },
    agents={"planner": {"account": "acme/search"}, "writer": {"account": "acme/search"}, "cook": {"account": "acme"}},
)


def account(path: str) -> str:
    return f"{ACCOUNTS}/{quote(path, safe='')}"


@pytest.fixture
def clock() -> ManualClock:
    return calendar_clock()


@pytest.fixture
def hub(clock: ManualClock) -> Iterator[HubServer]:
    with hub_server(POLICY, store=MemoryStore(clock=clock)) as hub:
        yield hub


@pytest.fixture
def gate(hub: HubServer) -> Gate:
    return hub.hub.gate


@pytest.fixture
def admin(hub: HubServer) -> Iterator[httpx.Client]:
    with hub.http(ADMIN) as admin:
        yield admin


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    detail: str = answer.json()["detail"]
    return detail


def limits(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The limits of an account, and where they come from."""
    return {one["resource"] + one["tool"]: (one["limit"], one["source"]) for one in found["limits"]}


# The tree -------------------------------------------------------------------------------------------------------------


def test_f1_accounts_are_listed_as_a_tree_with_spent_held_and_left(gate: Gate, admin: httpx.Client) -> None:
    gate.hold("planner", {"usd": "3"}).settle({"usd": "2.5"})
    gate.hold("writer", {"usd": "4"})
    found = ok(admin.get(ACCOUNTS))
    assert [(one["path"], one["level"], one["plan"], one["agents"]) for one in found["accounts"]] == [
        ("acme", "org", "", 3), ("acme/search", "team", "", 2), ("acme-x", "org", "pro", 0),
    ]  # fmt: skip
    assert found["more"] is False
    assert found["accounts"][0]["limits"] == [
        {
            "resource": "usd", "tool": "", "limit": "100 usd/calendar month", "source": "account", "amount": "100",
            "spent": "2.500000", "held": "4.000000", "left": "93.500000", "used": pytest.approx(0.065),
            "resets_after": pytest.approx((13 * 24 + 16) * 3600),
        }
    ]  # fmt: skip
    assert limits(found["accounts"][1]) == {
        "requestsweb": ("5/minute", "account"),
        "usd": ("20 usd/calendar day", "level"),
    }
    assert limits(found["accounts"][2]) == {"usd": ("50 usd/calendar day", "plan")}


def test_f1_the_tree_is_paged_and_can_begin_below_an_account(admin: httpx.Client) -> None:
    def page(**query: Any) -> tuple[list[str], bool]:
        found = ok(admin.get(ACCOUNTS, params=query))
        return [one["path"] for one in found["accounts"]], found["more"]

    assert page(limit=1) == (["acme"], True)
    assert page(limit=1, after="acme") == (["acme/search"], True)
    assert page(limit=2, after="acme/search") == (["acme-x"], False)
    assert page(within="acme") == (["acme", "acme/search"], False)
    assert page(after="zzz") == ([], False)
    assert "within: expected the path of an account" in refused(admin.get(ACCOUNTS, params={"within": "a/b/c/d"}))
    refused(admin.get(ACCOUNTS, params={"limit": 101}))


def test_f1_one_account_an_agent_and_a_session_are_shown(gate: Gate, hub: HubServer, admin: httpx.Client) -> None:
    hub.register("planner")
    gate.hold("planner", {"usd": "3"}, session="run-1")
    found = ok(admin.get(account("acme")))
    assert (found["accounts"], found["members"], found["agents"], found["registered"]) == (
        ["acme/search"], ["cook"], 3, None,
    )  # fmt: skip
    assert ok(admin.get(account("acme/search")))["members"] == ["planner", "writer"]
    found = ok(admin.get(account("acme/search/planner")))
    assert (found["level"], found["registered"], limits(found)) == (
        "agent", True, {"tokens": ("1000/minute", "level")},
    )  # fmt: skip
    assert ok(admin.get(account("acme/search/writer")))["registered"] is False
    assert ok(admin.get(account("acme/search/planner/run-1")))["level"] == "session"
    for path in ("globex", "acme/serch", "acme/ops/planner", "acme/ops/planner/run-1"):
        assert refused(admin.get(account(path)), 404) == f"no policy, change or agent names an account {path!r}"
    assert "expected the path of an account" in refused(admin.get(account("a/b/c/d/e")))


# Limits ---------------------------------------------------------------------------------------------------------------


def test_f1_several_limits_and_a_plan_are_one_change_with_its_author(gate: Gate, admin: httpx.Client) -> None:
    gate.hold("planner", {"usd": "3"}).settle()
    body = {
        "usd": "7/calendar day",
        "tokens": ["10/second", "500/hour"],
        "plan": "pro",
        "tools": {"web": {"usd": "1 in all"}},
    }
    found = ok(admin.put(account("acme/search"), json=body))
    assert (found["known"], found["plan"], found["registered"]) == (True, "pro", None)
    assert limits(found) == {
        "requestsweb": ("5/minute", "account"),
        "tokens": ("500/hour", "account"),  # the second part, after '10/second'
        "usd": ("7 usd/calendar day", "account"),
        "usdweb": ("1 usd in all", "account"),
    }
    (usd,) = [one for one in found["limits"] if (one["resource"], one["tool"]) == ("usd", "")]
    assert (usd["spent"], usd["left"]) == ("3.000000", "4.000000"), "what is spent stays"
    made = admin.get("/api/admin/changes").json()["changes"]
    assert [one["by"] for one in made] == ["admin at 127.0.0.1"]
    assert all(word in made[0]["what"] for word in ("acme/search", "7", "500/hour", "pro"))
    found = ok(admin.put(account("acme/search"), json={"usd": None, "plan": None, "tools": {"web": {"usd": None}}}))
    assert (found["plan"], limits(found)["usd"]) == ("", ("20 usd/calendar day", "level"))
    assert "usdweb" not in limits(found)
    found = ok(admin.delete(account("acme/search")))
    assert limits(found) == {"requestsweb": ("5/minute", "account"), "usd": ("20 usd/calendar day", "level")}
    assert len(list_changes(admin)) == 3
    ok(admin.delete(account("acme/search")))
    assert len(list_changes(admin)) == 3, "nothing was left to take back"


def test_b6_an_account_that_nobody_named_before_is_said_to_be_new(admin: httpx.Client) -> None:
    assert ok(admin.put(account("globex/ops"), json={"usd": "1 in all"}))["known"] is False
    assert ok(admin.put(account("globex/ops"), json={"usd": "2 in all"}))["known"] is True
    assert [one["path"] for one in ok(admin.get(ACCOUNTS))["accounts"]][-2:] == ["globex", "globex/ops"]


def test_b6_limits_and_plans_of_agents_need_no_registration(gate: Gate, admin: httpx.Client) -> None:
    found = ok(admin.put(account("acme/search/planner"), json={"usd": "1 in all", "plan": "free"}))
    assert (found["registered"], found["plan"]) == (False, "free")
    assert gate.effective.agents.get("planner").plan == "free"  # type: ignore[union-attr]
    found = ok(admin.delete(account("acme/search/planner")))
    assert (found["plan"], limits(found)) == ("", {"tokens": ("1000/minute", "level")})
    found = ok(admin.put(account("-/-/nobody"), json={"usd": "1 in all"}))
    assert (found["registered"], found["known"], found["path"]) == (False, True, "-/-/nobody")


BAD_BODIES: list[tuple[Any, str]] = [
    ({}, "body: expected limits by resource"),
    ([], "body: "),
    ({"euros": "1/minute"}, "resource: expected one of requests, "),
    ({"usd@web": "1/minute"}, "resource: expected one of requests, "),
    ({"usd": "soon"}, "usd: "),
    ({"usd": "9/month"}, "usd: expected a budget, such as '9/calendar month' (a rate, which refills all the time, is "),
    ({"usd": 5}, "usd: expected a limit such as '500/calendar month', a list of 1 to 10, or null, got 5"),
    ({"usd": []}, "usd: expected a limit such as"),
    ({"usd": "9" * 201}, "usd: expected at most 200 characters"),
    ({"slots": "5/minute"}, "slots: expected slots, such as '5 in flight'"),
    ({"usd": "5 in flight"}, "usd: expected a rate or a budget, not slots"),
    ({"tokens": "1 usd/calendar day"}, "tokens: expected an amount of tokens"),
    ({"plan": "gold"}, "plan: expected a plan of the policy (free, pro), got 'gold'"),
    ({"plan": 5}, "plan: expected a plan of the policy"),
    ({"tools": {"mail": {"usd": "1 in all"}}}, "tools: expected a tool that the policy names (web), got 'mail'"),
    ({"tools": {"": {"usd": "1 in all"}}}, "tools.: expected an object"),
    ({"tools": {"web": "1 in all"}}, "tools.web: expected an object"),
    ({"tools": {"web": {"slots": "1 in flight"}}}, "resource: expected another one than slots"),
    ({"tools": ["web"]}, "tools: expected an object"),
]


@pytest.mark.parametrize(("body", "message"), BAD_BODIES)
@pytest.mark.parametrize("first", [{}, {"tokens": "1/minute"}])
def test_bad_limits_change_nothing(admin: httpx.Client, body: Any, message: str, first: dict[str, str]) -> None:
    whole = {**first, **body} if isinstance(body, dict) and body else body
    assert refused(admin.put(account("acme/search"), json=whole)).startswith(message)
    if isinstance(body, dict) and "plan" not in body:
        for path in (f"{DEFAULTS}/levels/team", f"{DEFAULTS}/plans/pro"):
            assert refused(admin.put(path, json=whole)).startswith(message)
    assert list_changes(admin) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a/b/c/d", "account: expected the path of an account, up to ORG/TEAM/AGENT"),
        ("a//b", "account: expected the path of an account"),
        ("a/", "account: expected the path of an account"),
        ("x" * 129, "account: expected the path of an account"),
        ("acme%2f", "account: expected the path of an account"),
        ("a\u202eb", "account: expected the path of an account"),
        ("-", "account: expected the path of an account above the agents"),
        ("acme/-", "account: expected the path of an account above the agents"),
        ("acme/ops/planner", "account: expected the agent's path, which is 'acme/search/planner'"),
        ("acme/-/planner", "account: expected the agent's path, which is 'acme/search/planner'"),
    ],
)
def test_bad_paths_change_nothing(admin: httpx.Client, path: str, message: str) -> None:
    assert refused(admin.put(account(path), json={"usd": "1 in all"})).startswith(message)
    assert list_changes(admin) == []


def test_names_with_slashes_and_percent_signs_are_paths_of_their_own(gate: Gate, admin: httpx.Client) -> None:
    for path, names in (("a%2Fb", 1), ("a/b", 2), ("100%25", 1), ("<script>", 1), ("=1+1", 1)):
        found = ok(admin.put(account(path), json={"usd": "1 in all"}))
        assert (found["path"], found["level"]) == (path, "org" if names == 1 else "team")
        assert ok(admin.get(account(path)))["path"] == path
    assert {"a", "a/b", "a%2Fb", "100%25", "<script>", "=1+1"} < set(gate.list_accounts())


# Levels and plans -----------------------------------------------------------------------------------------------------


def test_f1_limits_of_levels_and_plans_are_set_and_taken_back(admin: httpx.Client) -> None:
    before = ok(admin.get(DEFAULTS))
    assert before["levels"] == ["org", "team", "agent", "session"]
    assert (before["resources"][:2], before["tools"], before["zone"]) == (["requests", "slots"], ["web"], "UTC")
    assert before["level_limits"]["team"] == {"usd": "20 usd/calendar day"}
    assert before["plans"]["pro"] == {"usd": "50 usd/calendar day"}
    found = ok(
        admin.put(f"{DEFAULTS}/levels/team", json={"usd": "30/calendar day", "tools": {"web": {"usd": "2 in all"}}})
    )
    assert found["level_limits"]["team"] == {"usd": "30 usd/calendar day", "tools": {"web": {"usd": "2 usd in all"}}}
    found = ok(admin.put(f"{DEFAULTS}/plans/pro", json={"tokens": "9/minute"}))
    assert found["plans"]["pro"] == {"usd": "50 usd/calendar day", "tokens": "9/minute"}
    assert limits(ok(admin.get(account("acme-x"))))["tokens"] == ("9/minute", "plan")
    ok(admin.delete(f"{DEFAULTS}/levels/team"))
    assert ok(admin.delete(f"{DEFAULTS}/plans/pro")) == before
    ok(admin.delete(f"{DEFAULTS}/plans/pro"))
    assert len(list_changes(admin)) == 4, "nothing was left to take back"
    for path, message in (
        ("levels/squad", "level: expected one of org, team"),
        ("plans/gold", "plan: expected a plan"),
    ):
        assert refused(admin.put(f"{DEFAULTS}/{path}", json={"usd": "1 in all"})).startswith(message)
        assert refused(admin.delete(f"{DEFAULTS}/{path}")).startswith(message)
    assert refused(admin.put(f"{DEFAULTS}/levels/team", json={"plan": "pro"})).startswith("resource: expected one of")


# Agents ---------------------------------------------------------------------------------------------------------------


def test_b6_an_agent_is_moved_and_given_a_plan_in_one_change(hub: HubServer, gate: Gate, admin: httpx.Client) -> None:
    hold = gate.hold("planner", {"usd": "3"})
    path = "/api/admin/agents/planner/account"
    assert ok(admin.put(path, json={"account": "acme-x", "plan": "pro"})) == {
        "agent_id": "planner", "path": "acme-x/-/planner", "account": "acme-x", "plan": "pro", "registered": False,
        "known": True, "limited": True,
    }  # fmt: skip
    assert len(list_changes(admin)) == 1
    hold.settle({"usd": "1"})
    assert ok(admin.get(account("acme/search")))["limits"][-1]["spent"] == "1.000000", "where it was held"
    hub.register("planner")
    found = ok(admin.put(path, json={"account": "globex"}))
    assert (found["registered"], found["known"], found["plan"], found["limited"]) == (True, False, "pro", False)
    assert ok(admin.put(path, json={"account": "globex/any"}))["limited"], "each team is"
    found = ok(admin.put(path, json={"account": ""}))
    assert (found["path"], found["limited"]) == ("-/-/planner", True)
    found = ok(admin.put(path, json={"account": None, "plan": None}))
    assert (found["path"], found["plan"]) == ("acme/search/planner", "")
    made = len(list_changes(admin))
    for body, message in (
        ({}, "body: expected an account or a plan, got neither"),
        ({"account": "a/b/c"}, "account: expected the path of an account above the agents"),
        ({"account": "acme/search", "plan": "gold"}, "plan: expected a plan of the policy (free, pro), got 'gold'"),
        ({"account": "acme/search/planner"}, "account: expected the path of an account above the agents"),
        ({"account": 5}, "body: "),
        ({"acount": "acme"}, "body: "),
    ):
        assert refused(admin.put(path, json=body)).startswith(message)
    assert (len(list_changes(admin)), gate.path_of("planner")) == (made, "acme/search/planner")


# Holds ----------------------------------------------------------------------------------------------------------------


def test_f1_open_holds_of_an_account_are_listed(gate: Gate, admin: httpx.Client) -> None:
    gate.hold("planner", {"usd": "3"}, session="run-1", tool="web", lease=90, hold_id="first")
    gate.hold("cook", {"usd": "1"}, hold_id="second")
    found = ok(admin.get(f"{account('acme/search')}/holds"))
    (one,) = found["holds"]
    assert found["more"] is False
    assert {**one, "lease_left": 90} == {
        "id": "first", "agent": "planner", "account": "acme/search/planner", "session": "run-1", "tool": "web",
        "state": "open", "costs": {"requests": "1", "usd": "3.000000"}, "lease_left": 90,
    }  # fmt: skip
    found = ok(admin.get(f"{account('acme')}/holds", params={"limit": 1}))
    assert ([one["id"] for one in found["holds"]], found["more"]) == (["second"], True)
    assert ok(admin.get(f"{account('globex')}/holds")) == {"holds": [], "more": False}
    refused(admin.get(f"{account('a/b/c/d/e')}/holds"))


# Usage ----------------------------------------------------------------------------------------------------------------


def spend_some(gate: Gate, clock: ManualClock) -> None:
    gate.hold("planner", {"usd": "1.5"}, tool="web").settle()
    clock.advance(14 * 86_400)
    gate.hold("planner", {"usd": "2"}).settle()
    gate.hold("=cmd|' /C calc'!A0", {"usd": "4"}).settle()


def test_f1_usage_is_told_by_month_and_resource_and_as_csv(gate: Gate, clock: ManualClock, admin: httpx.Client) -> None:
    spend_some(gate, clock)
    found = ok(admin.get(USAGE))
    assert (found["from"], found["to"], found["zone"], found["by"]) == (
        "2025-12-01", "2026-12-01", "UTC", ["month", "resource"],
    )  # fmt: skip
    assert [(*one["group"].values(), one["amount"]) for one in found["totals"]] == [
        ("2026-11", "requests", "1"), ("2026-11", "usd", "1.500000"),
        ("2026-12", "requests", "2"), ("2026-12", "usd", "6.000000"),
    ]  # fmt: skip
    query = {"from": "2026-12-01", "to": "2026-12-31", "by": "day,agent,tool"}
    answer = admin.get(f"{USAGE}.csv", params=query)
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.reader(answer.text.splitlines()))
    assert rows[0] == ["day", "agent", "tool", "resource", "amount"]
    assert rows[2] == ["2026-12-01", "'=cmd|' /C calc'!A0", "", "usd", "4.000000"]
    found = ok(admin.get(USAGE, params={"account": "acme/search", "by": "team,tool"}))
    assert [one for one in found["totals"] if one["group"]["resource"] == "usd"] == [
        {"group": {"team": "acme/search", "tool": tool, "resource": "usd"}, "amount": amount}
        for tool, amount in (("", "2.000000"), ("web", "1.500000"))
    ]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"from": "2025-01-01"}, "from: expected a day from 2025-10-14, the first that is kept, to 2026-11-17"),
        ({"from": "2026-11-18", "to": "2026-11-17"}, "from: expected a day from 2025-10-14"),
        ({"to": "2028-01-01"}, "to: expected a day up to the end of 2027"),
        ({"from": "yesterday"}, "query: "),
        ({"by": "week"}, "by: expected some of day, month, account, org, team"),
        ({"by": ""}, "by: expected some of"),
        ({"by": "day,month"}, "by: expected each group once"),
        ({"account": "a/b/c/d"}, "account: expected the path of an account"),
        ({"format": "csv"}, "query: "),
    ],
)
def test_bad_queries_of_usage_are_refused(admin: httpx.Client, query: dict[str, str], message: str) -> None:
    for path in (USAGE, f"{USAGE}.csv"):
        assert refused(admin.get(path, params=query)).startswith(message)


def test_f1_too_many_totals_are_refused(gate: Gate, admin: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.hub.api.admin_usage_routes.MAX_TOTALS", 5)
    for number in range(3):
        gate.hold(f"agent {number}", {"usd": "1"})
    expected = "usage: expected at most 5 totals: choose an account, fewer days, or fewer groups, got '6'"
    assert refused(admin.get(USAGE, params={"by": "agent"})) == expected
    assert len(ok(admin.get(USAGE))["totals"]) == 2
