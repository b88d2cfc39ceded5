"""Accounts in a policy: read, refused, written, and changed while running."""

from pathlib import Path
from typing import Any

import pytest

from headgate import Gate, HeadgateError, InvalidInput, MemoryStore, Policy, PolicyError, per_day
from headgate.gate.accounts import Bound, join_path, split_path
from headgate.gate.change_log import condense
from headgate.gate.effective import effective
from headgate.limits.decision import Limit
from headgate.limits.token_bucket import per_period
from headgate.stores.base import Edit

pytestmark = pytest.mark.once

SETTINGS: dict[str, Any] = {
    "accounts": {
        "levels": ["org", "team", "agent", "session"],
        "units": {"credits": {"decimals": 2}},
        "tools": ["mail"],
        "zone": "Europe/Berlin",
        "default": {
            "agent": {"tokens": "100000/minute", "slots": "5 in flight"},
            "session": {"usd": "2 in all"},
        },
        "plans": {"free": {"usd": "1/calendar day"}, "pro": {"usd": "50/calendar day", "credits": "2.5 in all"}},
        "at": {
            "acme": {"plan": "pro"},
            "acme/search": {
                "usd": "500/calendar month in Europe/Berlin",
                "tools": {"web": {"requests": "100/minute"}},
            },
        },
    },
    "agents": {"planner": {"account": "acme/search", "plan": "free"}},
}

DAY = "usd/calendar day in Europe/Berlin"


def limits(policy: Policy, path: str, plan: str = "") -> dict[tuple[str, str], str]:
    return {resource: limit.text for resource, limit in policy.accounts.limits_of(path, plan).items()}


def test_f1_limits_come_from_the_account_its_plan_and_its_level() -> None:
    policy = Policy(**SETTINGS)
    assert limits(policy, "acme") == {("usd", ""): f"50 {DAY}", ("credits", ""): "2.5 credits:2 in all"}
    assert limits(policy, "acme/search") == {
        ("usd", ""): "500 usd/calendar month in Europe/Berlin",
        ("requests", "web"): "100/minute",
    }
    assert limits(policy, "acme/search/planner", "free") == {
        ("tokens", ""): "100000/minute",
        ("slots", ""): "5 in flight",
        ("usd", ""): f"1 {DAY}",
    }
    assert limits(policy, "acme/search/planner/run-1") == {("usd", ""): "2 usd in all"}
    assert policy.accounts.tools == {"mail", "web"}
    assert (policy.agent_accounts, policy.agent_plans) == ({"planner": "acme/search"}, {"planner": "free"})


def test_f1_a_policy_with_accounts_reads_what_it_writes() -> None:
    policy = Policy(**SETTINGS)
    assert Policy(**policy.settings()) == policy
    assert policy.values()['accounts.at."acme/search".tools.web.requests'] == '"100/minute"'


def test_f1_a_budget_without_a_time_zone_has_that_of_the_accounts() -> None:
    given = {"day": "1/calendar day", "utc": "2/calendar day in UTC", "all": "3 in all"}
    at = {name: {"usd": limit} for name, limit in given.items()}
    policy = Policy(accounts={"zone": "Europe/Berlin", "at": at})
    texts = {
        "day": "1 usd/calendar day in Europe/Berlin", "utc": "2 usd/calendar day in UTC", "all": "3 usd in all",
    }  # fmt: skip
    assert {name: limits(policy, name)["usd", ""] for name in given} == texts
    assert Policy(**policy.settings()) == policy
    assert limits(Policy(accounts={"at": at}), "utc")["usd", ""] == "2 usd/calendar day"


def test_f1_unlimited_takes_a_default_away() -> None:
    accounts = {**SETTINGS["accounts"], "at": {"acme/search/planner": {"tokens": "unlimited", "slots": "1 in flight"}}}
    policy = Policy(accounts=accounts)
    assert limits(policy, "acme/search/planner") == {("slots", ""): "1 in flight"}


def mistakes(**settings: Any) -> tuple[str, ...]:
    with pytest.raises(PolicyError) as error:
        Policy(**settings)
    return error.value.mistakes


A_RATE = (
    "expected a rate, such as '100/minute', or a budget, such as '500/calendar month', "
    "'500/calendar day in Europe/Berlin' or '2 in all'"
)
SOME_SLOTS = "expected slots, such as '5 in flight'"


@pytest.mark.parametrize(
    ("limits", "mistake"),
    [
        ({"dollars": "5/minute"}, "dollars: expected one of requests, slots, "),
        ({"slots": "5/minute"}, f"slots: {SOME_SLOTS}"),
        ({"slots": "4"}, f"slots: {SOME_SLOTS}, got '4'"),
        ({"slots": 4}, f"slots: {SOME_SLOTS}"),
        ({"tokens": "5 in flight"}, "tokens: expected a rate or a budget, not "),
        ({"usd": "5 eur in all"}, "usd: expected an amount of usd, without a unit"),
        ({"usd": "five"}, f"usd: {A_RATE}, got 'five'"),
        (
            {"tokens": "2000 tokens/minute"},
            f"tokens: {A_RATE} (leave out the unit: '2000/minute'), got '2000 tokens/minute'",
        ),
        (
            {"usd": ["1/hour", "2.5usd per 3 hours burst 4"]},
            f"usd: {A_RATE} (leave out the unit: '2.5 per 3 hours burst 4')",
        ),
        ({"usd": "5 usd per month"}, f"usd: {A_RATE} (leave out the unit: '5/calendar month'), got '5 usd per month'"),
        ({"usd": "5 usd/calendar day; five"}, f"usd: {A_RATE}, got 'five'"),
        ({"slots": "5 slots/minute"}, f"slots: {SOME_SLOTS}, got"),
        ({"usd": "600"}, f"usd: {A_RATE}, got '600'"),
        ({"usd": 600}, f"usd: {A_RATE}, got 600"),
        ({"tools": {"web": {"slots": "5 in flight"}}}, "tools.web.slots: expected one of"),
        (
            {"usd": "10/month"},
            (
                "usd: expected a budget, such as '10/calendar month' (a rate, which refills all the time, is written "
                "'10 per 30 days'), got '10/month'"
            ),
        ),
        ({"eur": ["1/minute", "2.5 per d"]}, "eur: expected a budget, such as '2.5/calendar day' (a rate, which"),
        ({"tools": {"web": {"usd": per_day(4)}}}, "tools.web.usd: expected a budget, such as '4/calendar day'"),
    ],
)
def test_f1_mistakes_in_limits_of_accounts_are_told_by_their_paths(limits: dict[str, Any], mistake: str) -> None:
    (found,) = mistakes(accounts={"default": {"agent": limits}})
    assert found.startswith(f"accounts.default.agent.{mistake}")


@pytest.mark.parametrize(
    ("levels", "better", "more"),
    [
        (
            ["customer", "team"],
            ["customer", "team", "agent", "session"],
            {"default": {"agent": {"slots": "4 in flight"}}},
        ),
        (["customer", "agent"], ["customer", "agent", "session"], {}),
        (["org", "team"], ["org", "team", "agent", "session"], {"default": {"team": {"usd": "10/calendar month"}}}),
        (["session", "agent", "chat"], ["chat", "agent", "session"], {}),
    ],
)
def test_f1_levels_that_end_with_others_than_agent_and_session_are_no_levels(
    levels: list[str], better: list[str], more: dict[str, Any]
) -> None:
    expected = f"expected the levels of agents and of sessions as the last two, such as {better}, got {levels}"
    assert f"accounts.levels: {expected}" in mistakes(accounts={"levels": levels, **more})


@pytest.mark.parametrize(
    ("accounts", "mistake"),
    [
        ({"levels": ["agent"]}, "levels: expected a list of 2 to 8 entries, got ['agent']"),
        ({"levels": ["a", "a", "b"]}, "levels: expected at least two different names, got ['a', 'a', 'b']"),
        ({"default": {"agnet": {}}}, "default.agnet: expected one of agent, org, team, session (did you mean agent?)"),
        ({"units": {"usd": {"decimals": 2}}}, "units.usd.decimals: expected 6, which usd always has, got 2"),
        ({"units": {"Coin": {"decimals": 2}}}, "units.Coin: expected a name of up to 31 of a-z and _"),
        ({"units": {"coin": {"decimals": 12}}}, "units.coin.decimals: expected a whole number from 0 to 9, got 12"),
        ({"plans": {f"p{i}": {} for i in range(257)}}, "plans: expected at most 256 names, got 257"),
        ({"zone": "Berlin"}, "zone: expected the IANA name of a time zone"),
        ({"at": {"acme/search/planner/run": {}}}, 'at."acme/search/planner/run": expected the path of an account'),
        (
            {"at": {"-/-": {"usd": "1 in all"}}},
            (
                "at.\"-/-\": expected an account or an agent; '-' stands for a missing one, which has no "
                "limits (accounts.default limits agents without an account), got '-/-'"
            ),
        ),
        ({"at": {"acme//x": {}}}, 'at."acme//x": expected the path of an account'),
        (
            {"at": {"acme": {"plan": "gold"}}},
            "at.acme.plan: expected a plan of the policy (none: the policy has no plans)",
        ),
        ({"max_lease": 700000}, "max_lease: expected"),
    ],
)
def test_f1_mistakes_in_accounts_are_told_by_their_paths(accounts: dict[str, Any], mistake: str) -> None:
    found = mistakes(accounts=accounts)
    assert any(one.startswith(f"accounts.{mistake}") for one in found), found


@pytest.mark.parametrize(
    ("agent", "mistake"),
    [
        (
            {"account": "acme/search/planner"},
            "agents.planner.account: expected the path of an account above the agents (ORG/TEAM)",
        ),
        ({"account": "-"}, "agents.planner.account: expected the path of an account above the agents"),
        ({"account": 7}, "agents.planner.account: expected the path of an account"),
        ({"plan": "gold"}, "agents.planner.plan: expected a plan of the policy"),
    ],
)
def test_f1_an_agent_belongs_to_an_account_above_it(agent: dict[str, Any], mistake: str) -> None:
    (found,) = mistakes(agents={"planner": agent})
    assert found.startswith(mistake)


def test_f1_no_two_paths_are_the_same() -> None:
    names = ["a/b", "a%2Fb", "a", "b/", "%", "-"]
    paths = {join_path([one, other]) for one in names for other in names}
    assert len(paths) == len(names) ** 2
    assert [join_path(split_path(path)) for path in paths] == list(paths)
    accounts = Policy().accounts
    assert accounts.agent_path("acme", "a/b") == "acme/-/a%2Fb"
    assert accounts.agent_path("", "planner") == "-/-/planner"
    assert [accounts.root_of(path) for path in ("acme/-/x", "-/-/x", "-/-/x/run", "acme")] == [
        "acme",
        "-/-/x",
        "-/-/x",
        "acme",
    ]


def test_f1_everything_can_be_changed_while_running() -> None:
    gate = Gate(Policy(**SETTINGS))
    gate.set_account_limit("acme/search", "usd", "600/calendar month in Europe/Berlin", by="ada")
    gate.set_account_limit("acme/search", "requests", "5/minute", tool="mail", by="ada")
    gate.set_level_limit("team", "tokens", "9/hour")
    gate.set_plan_limit("pro", "usd", None)
    gate.set_plan_limit("pro", "credits", "7.25 in all")
    gate.set_account_plan("beta", "free")
    gate.set_agent_plan("planner", "pro")
    gate.set_agent_account("planner", "beta/ops")
    accounts = gate.effective.accounts
    found = {resource: limit.text for resource, limit in accounts.limits_of("acme/search").items()}
    assert found == {
        ("tokens", ""): "9/hour",
        ("usd", ""): "600 usd/calendar month in Europe/Berlin",
        ("requests", "web"): "100/minute",
        ("requests", "mail"): "5/minute",
    }
    assert accounts.limits_of("acme")["credits", ""].text == "7.25 credits:2 in all"
    assert accounts.limits_of("beta")["usd", ""].text == f"1 {DAY}"
    rules = gate.effective.agents.get("planner")
    assert rules is not None
    assert (rules.account, rules.plan, rules.former) == ("beta/ops", "pro", ("acme/search",))
    values = {one.path: (one.value, one.source, one.by) for one in gate.values()}
    assert values['accounts.at."acme/search".usd'] == ('"600 usd/calendar month in Europe/Berlin"', "change", "ada")
    assert values["agents.planner.account"] == ('"beta/ops"', "change", "")
    gate.set_account_limit("acme/search", "usd", None)
    gate.set_agent_account("planner", None)
    assert gate.effective.accounts.limits_of("acme/search")["usd", ""].text == "500 usd/calendar month in Europe/Berlin"
    assert gate.path_of("planner") == "acme/search/planner"
    assert gate.list_accounts() == ["acme", "acme/search", "beta"]


def test_f1_changes_of_accounts_survive_compaction_and_another_policy() -> None:
    gate = Gate(Policy(**SETTINGS))
    for amount in range(1, 30):
        gate.set_account_limit("acme/search", "usd", f"{amount}/calendar day")
        gate.set_account_limit("acme/search", "requests", f"{amount}/minute", tool="web")
        gate.set_agent_account("planner", f"org-{amount}")
        gate.set_agent_account("cook", "acme" if amount % 2 else "beta")
    edits = [edit for change in gate.history() for edit in change.edits]
    kept = condense(gate.policy, edits)
    assert len(kept) == 9, "two limits, the last five accounts of one agent, and both of the other"
    assert effective(gate.policy, kept) == gate.effective
    other = effective(
        Policy(accounts={"levels": ["agent", "session"]}), edits
    )  # its paths are others': no effect there
    assert other.accounts.limits_of("planner") == {}
    rules = other.agents.get("planner")
    assert rules is None or rules.account == ""


@pytest.mark.parametrize(
    ("usd", "file", "warned"), [("5 in all", None, 1), ("5/minute", None, 0), ("5 in all", "spent.db", 0)]
)
def test_f1_a_gate_that_remembers_changes_but_no_budgets_says_so(
    usd: str, file: str | None, warned: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy(accounts={"plans": {"pro": {"usd": usd}}})
    with MemoryStore(remember=None if file is None else tmp_path / file) as store:
        Gate(policy, store=store, remember=tmp_path / "changes.db").close()
        Gate(policy, store=store).close()
    assert caplog.text.count("not the spending of budgets") == warned


def test_f1_with_fewer_levels_an_agent_stays_with_the_account_above() -> None:
    gate = Gate(Policy(**SETTINGS))
    gate.set_agent_account("writer", "acme/ops")
    edits = [edit for change in gate.history() for edit in change.edits]
    fewer = effective(Policy(accounts={"levels": ["org", "agent", "session"]}), edits)
    assert fewer.rules_of("writer").account == "acme"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda gate: gate.set_account_limit("acme", "coins", "5 in all"),
            "resource: expected one of requests, slots, usd",
        ),
        (lambda gate: gate.set_account_limit("acme", "usd", "soon"), "limit: expected a rate"),
        (
            lambda gate: gate.set_account_limit("a/b/c/d", "usd", "5 in all"),
            "account: expected the path of an account, up to ORG/TEAM/AGENT",
        ),
        (lambda gate: gate.set_account_limit("", "usd", "5 in all"), "account: expected the path of an account"),
        (
            lambda gate: gate.set_account_limit("acme", "usd", "5 in all", tool="phone"),
            "tool: expected a tool that the policy names (mail, web)",
        ),
        (
            lambda gate: gate.set_account_limit("acme", "slots", "5 in flight", tool="web"),
            "resource: expected another one than slots",
        ),
        (
            lambda gate: gate.set_level_limit("dept", "usd", "5 in all"),
            "level: expected one of org, team, agent, session, got 'dept'",
        ),
        (
            lambda gate: gate.set_plan_limit("gold", "usd", "5 in all"),
            "plan: expected a plan of the policy (free, pro), got 'gold'",
        ),
        (lambda gate: gate.set_account_plan("acme", "gold"), "plan: expected a plan of the policy"),
        (lambda gate: gate.set_account_plan("acme/search/planner", "pro"), "account: expected one above the agents"),
        (
            lambda gate: gate.set_agent_account("planner", "a/b/c"),
            "account: expected the path of an account above the agents",
        ),
        (lambda gate: gate.set_agent_plan("planner", "gold"), "plan: expected a plan of the policy"),
        (lambda gate: gate.set_account_limit("-", "usd", "1 in all"), "account: expected an account or an agent; '-'"),
    ],
)
def test_f1_a_change_that_makes_no_sense_is_refused(call: Any, text: str) -> None:
    gate = Gate(Policy(**SETTINGS))
    with pytest.raises(InvalidInput) as error:
        call(gate)
    assert str(error.value).startswith(text), error.value
    assert isinstance(error.value, HeadgateError)
    assert gate.history() == []


@pytest.mark.parametrize(
    "like_a_budget", ["10/month", "10 / year", "3/minute; 70/weeks", "1/d", per_period(7, 86400, None)]
)
def test_f1_a_budget_of_money_is_not_lost_to_a_rate_that_looks_like_one(like_a_budget: Limit | str) -> None:
    gate = Gate(Policy(accounts={"at": {"acme": {"usd": "10/calendar month"}}}, agents={"bot": {"account": "acme"}}))
    gate.hold("bot", {"usd": 10}).settle()
    with pytest.raises(InvalidInput, match="expected a budget, such as"):
        gate.set_account_limit("acme", "usd", like_a_budget)
    with pytest.raises(InvalidInput, match="expected a budget, such as"):
        gate.set_level_limit("org", "usd", like_a_budget)
    assert not gate.hold("bot", {"usd": 1})
    assert gate.history() == []


@pytest.mark.parametrize(
    ("resource", "limit", "written"),
    [
        ("usd", "10 per 30 days", "10 per 30 days"),
        ("usd", "10.5 per 24 hours", "10.5 per 24 hours"),
        ("usd", "10/day burst 3", "10/day burst 3"),
        ("usd", "10/hour", "10/hour"),
        ("usd", "20/calendar month; 1/day", "20 usd/calendar month; 1 per 24 hours"),
        ("tokens", "10/day", "10/day"),
    ],
)
def test_f1_a_rate_of_money_that_is_meant_can_be_set_again_as_it_is_shown(
    resource: str, limit: str, written: str
) -> None:
    gate = Gate(Policy(agents={"bot": {"account": "acme"}}))
    gate.set_account_limit("acme", resource, limit)
    assert gate.effective.accounts.limits_of("acme")[resource, ""].text == written
    shown = [one.limit for one in gate.account("acme").limits]
    assert sorted(shown) == sorted(written.split("; "))
    gate.set_account_limit("acme", resource, written)
    assert gate.hold("bot", {resource: 20 if ";" in limit else 5}).bound is not None
    values = {one.path: one.value for one in gate.values()}
    assert values[f"accounts.at.acme.{resource}"] == f'"{written}"'
    assert Policy(accounts={"at": {"acme": {resource: written}}}).accounts.limits_of("acme") == (
        gate.effective.accounts.limits_of("acme")
    )


def test_f1_a_rate_of_money_that_was_set_before_it_was_refused_stays_in_effect() -> None:
    edits = [Edit("account_limit", "acme", tier="usd", value="10/month")]
    found = effective(Policy(), edits).accounts.limits_of("acme")
    assert found["usd", ""].text == "10 per 30 days"


def test_f1_a_bound_reads_well() -> None:
    assert str(Bound("acme/search", "requests", "web")) == "requests of acme/search by web"


def test_f1_changes_of_accounts_survive_a_restart(tmp_path: Path) -> None:
    with Gate(Policy(**SETTINGS), remember=tmp_path / "gate.db") as gate:
        gate.set_account_limit("acme/search", "usd", "7/calendar day", by="ada")
        gate.set_agent_account("writer", "acme/ops", by="ada")
    with Gate(Policy(**SETTINGS), remember=tmp_path / "gate.db") as gate:
        assert gate.effective.accounts.limits_of("acme/search")["usd", ""].text == f"7 {DAY}"
        assert gate.path_of("writer") == "acme/ops/writer"
        assert {str(change) for change in gate.history()} == {
            "account limit of 'acme/search' for usd set to 7 usd/calendar day in Europe/Berlin",
            "account of 'writer' set to acme/ops",
        }


@pytest.mark.parametrize("resource", ["usd", "tokens"])
@pytest.mark.parametrize("limit", ["3/minute; 20/calendar day", "0.5/minute; 20/calendar day; 100 in all"])
def test_f1_a_changed_limit_of_a_rate_and_budgets_survives_a_restart(tmp_path: Path, resource: str, limit: str) -> None:
    def limits(gate: Gate) -> list[tuple[str, str]]:
        return [(one.resource, one.limit) for one in gate.account("acme").limits]

    with Gate(Policy(), remember=tmp_path / "gate.db") as gate:
        gate.set_account_limit("acme", resource, limit)
        before = limits(gate)
    with Gate(Policy(), remember=tmp_path / "gate.db") as gate:
        assert len(limits(gate)) == limit.count(";") + 1
        assert limits(gate) == before
