"""Alerts of accounts: a budget is used to 80 percent, or used up; one notification for all hubs."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from headgate import Gate, MemoryStore, Policy
from headgate.events import AccountAlerted
from headgate.gate.account_status import AccountStatus
from headgate.hub.agents.registry import AgentRecord, Registry
from headgate.hub.monitoring import account_alerts as module
from headgate.hub.monitoring.alert_base import encoded
from headgate.hub.storage.database import DatabaseError
from headgate.stores.redis.alerts import RedisAlerts
from tests.support.account_alerts import (
    PAYS,
    RAISED,
    RESOLVED,
    dashboard_alerts,
    spend,
    wait_for_comparison,
    wait_until_idle,
)
from tests.support.alerts import wait_until_idle as agents_settled
from tests.support.hub import ADMIN, VIEWER, hub_server
from tests.support.hub_fleet import HubFleet
from tests.support.valkey import wait_for
from tests.support.webhook_receiver import WebhookReceiver

pytestmark = pytest.mark.usefixtures("no_proxies", "patient")


def events(receiver: WebhookReceiver) -> list[tuple[str, str, float]]:
    found = [one.json() for one in receiver.heard]
    return [(one["event"], one["alert"]["account"], one["alert"]["share"]) for one in found]


# One hub --------------------------------------------------------------------------------------------------------------


def test_f1_80_percent_of_a_budget_are_one_alert_which_becomes_that_of_100_percent(receiver: WebhookReceiver) -> None:
    with capture_logs() as logged, hub_server(PAYS, webhooks=(receiver.url,)) as hub:
        assert spend(hub, "7.9")
        wait_until_idle(hub)
        assert (receiver.heard, dashboard_alerts(hub)) == ([], [])
        assert spend(hub, "0.1")
        assert spend(hub, "0.5", "writer")
        wait_until_idle(hub)
        assert events(receiver) == [(RAISED, "acme/search", 0.8)]
        heard = receiver.heard[0].json()
        first = heard["alert"]
        assert heard["delivery"] == receiver.heard[0].headers["X-Headgate-Delivery"] == f"{first['alert_id']}-1-raised"
        assert (first["resource"], first["tool"], first["limit"]) == ("usd", "", "10 usd/calendar day")
        assert first["resets_at"] == pytest.approx((hub.clock.wall() // 86400 + 1) * 86400)
        assert spend(hub, "1.5")
        assert not spend(hub, "1")
        wait_until_idle(hub)
        assert events(receiver)[1:] == [(RAISED, "acme/search", 1.0)]
        second = receiver.heard[1].json()["alert"]
        assert second == {**first, "share": 1.0, "times": 2, "left": "0.000000"}
        assert dashboard_alerts(hub) == [second]
        with hub.http(ADMIN) as http:
            listed = http.get("/api/admin/alerts").json()
        assert (listed["alerts"], listed["account_alerts"], listed["open"]) == ([], [second], 1)
        assert (hub.hub.account_alerts.raised, hub.hub.account_alerts.open) == ({0.8: 1, 1.0: 1}, 1)
    lines = [line for line in logged if line["event"].startswith("a budget is")]
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "a budget is nearly used up"),
        ("warning", "a budget is used up, or too little is left"),
    ]
    assert (lines[0]["account"], lines[0]["resource"]) == ("acme/search", "usd")


def test_f1_a_restarted_hub_raises_the_alerts_of_its_budgets_again(receiver: WebhookReceiver, tmp_path: Path) -> None:
    policy = Policy(
        accounts={
            "at": {"acme": {"usd": "100 in all"}, "acme/search": {"usd": "10/calendar year", "slots": "1 in flight"}},
            "default": {"agent": {"eur": "2 in all"}},
        },
        agents={"planner": {"account": "acme/search"}},
    )
    file = tmp_path / "limits.db"
    with MemoryStore(remember=file) as store, hub_server(policy, store=store, data=tmp_path) as hub:
        assert spend(hub, "9")
        assert hub.hub.gate.hold("planner", {}, lease=600)  # slots raise no alert
        hub.register("lone")
        hub.hub.gate.hold("lone", {"eur": 2}).settle()
        wait_until_idle(hub)
        before = {one["account"]: one for one in dashboard_alerts(hub)}
        assert set(before) == {"acme/search", "-/-/lone"}
    with (
        MemoryStore(remember=file) as store,
        hub_server(policy, store=store, data=tmp_path, webhooks=(receiver.url,)) as hub,
    ):
        wait_until_idle(hub)
        assert sorted(events(receiver)) == [(RAISED, "-/-/lone", 1.0), (RAISED, "acme/search", 0.8)]
        for one in dashboard_alerts(hub):
            again = {"alert_id": one["alert_id"], "raised_at": one["raised_at"]}
            assert one == before[one["account"]] | again
        hub.hub.gate.set_account_limit("acme/search", "usd", "50/calendar year")
        wait_until_idle(hub)
        assert events(receiver)[2:] == [(RESOLVED, "acme/search", 0.8)]


def test_f1_a_restarted_hub_raises_alerts_of_agents_that_are_not_registered(tmp_path: Path) -> None:
    """An admin may hold for any agent. One that nothing names is known at its next hold."""
    accounts, file = {"default": {"agent": {"usd": "10 in all"}}}, tmp_path / "limits.db"
    policy = Policy(accounts=accounts, agents={"planner": {"account": "acme"}})
    with MemoryStore(remember=file) as store, hub_server(policy, store=store, data=tmp_path) as hub:
        hub.hub.gate.set_agent_account("writer", "acme")
        assert all([spend(hub, "8", agent) for agent in ("planner", "writer", "other")])
    with MemoryStore(remember=file) as store, hub_server(policy, store=store, data=tmp_path) as hub:
        wait_until_idle(hub)
        assert {alert["account"] for alert in dashboard_alerts(hub)} == {"acme/-/planner", "acme/-/writer"}
        assert spend(hub, "1", "other")
        wait_until_idle(hub)
        assert {alert["account"] for alert in dashboard_alerts(hub)} == {"acme/-/planner", "acme/-/writer", "-/-/other"}


def test_f1_a_restarted_hub_waits_until_it_can_read_its_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.hub.monitoring.alert_base._INTERVAL", 0.02)
    policy, file = Policy(accounts={"default": {"agent": {"usd": "10 in all"}}}), tmp_path / "limits.db"
    with MemoryStore(remember=file) as store, hub_server(policy, store=store, data=tmp_path) as hub:
        hub.register("planner")
        hub.register("writer")
        assert spend(hub, "9")
    real, failures = Registry.agents, [DatabaseError("no agents")] * 3

    async def sometimes(*words: Any) -> list[AgentRecord]:
        if failures:
            raise failures[0]
        return await real(*words)

    monkeypatch.setattr(Registry, "agents", sometimes)
    with (
        capture_logs() as logged,
        MemoryStore(remember=file) as store,
        hub_server(policy, store=store, data=tmp_path) as hub,
    ):
        assert spend(hub, "9", "writer")
        wait_for(lambda: hub.hub.account_alerts.open == 1, "what is spent now")
        wait_until_idle(hub)
        assert [alert["account"] for alert in dashboard_alerts(hub)] == ["-/-/writer"]
        failures.clear()
        wait_for(lambda: hub.hub.account_alerts.open == 2, "what was spent before")
    assert [line["error"] for line in logged if line["log_level"] == "error"] == ["no agents"], "said once"


def test_f1_a_reload_that_removes_accounts_stops_no_alert_of_others(tmp_path: Path) -> None:
    at, agents = {"acme": {"usd": "10 in all"}}, {"planner": {"account": "acme/search"}}
    policy, file = Policy(accounts={"at": at}, agents=agents), tmp_path / "limits.db"
    with MemoryStore(remember=file) as store, hub_server(policy, store=store, data=tmp_path) as hub:
        hub.register("planner")
        assert spend(hub, "9")
    read: list[list[str]] = []

    class Reloaded(Gate):
        """One that is reloaded between the listing of its accounts and their reading."""

        async def aaccounts(self, paths: Iterable[str]) -> list[AccountStatus]:
            read.append(list(paths))
            if len(read) == 1:
                self.reload(Policy(accounts={"levels": ["agent", "session"], "at": at}))
            return await super().aaccounts(read[-1])

    with MemoryStore(remember=file) as store, hub_server(policy, store=store, data=tmp_path, gate=Reloaded) as hub:
        wait_until_idle(hub)
        assert read[0] == ["acme", "acme/search", "acme/search/planner"], "read together"
        assert read[1:4] == [[path] for path in read[0]], "and then one by one"
        assert [alert["account"] for alert in dashboard_alerts(hub)] == ["acme"]


def test_f1_an_alert_is_resolved_also_if_the_next_one_fails(receiver: WebhookReceiver) -> None:
    with capture_logs() as logged, hub_server(PAYS, webhooks=(receiver.url,)) as hub:
        alerts, ends, no_amount = hub.hub.account_alerts, float(round(hub.clock.wall()) + 60), cast("Any", None)

        def spend_in_both() -> None:
            alerts.on_alert(AccountAlerted("acme", "usd", "", 0.8, "10 usd/calendar day", ends))
            alerts.on_alert(AccountAlerted("broken", "usd", "", 0.8, "10 usd/calendar day", ends, no_amount))

        hub.call(spend_in_both)
        wait_until_idle(hub)
        hub.clock.advance(60)
        wait_until_idle(hub)
        assert events(receiver) == [(RAISED, "acme", 0.8), (RESOLVED, "acme", 0.8)]
    assert [line["event"] for line in logged if line["log_level"] == "error"] == ["an alert of an account failed"]


def test_f1_an_empty_budget_of_a_team_makes_nobody_an_offender(receiver: WebhookReceiver) -> None:
    with hub_server(PAYS, webhooks=(receiver.url,)) as hub:
        assert spend(hub, "10")
        assert not any([spend(hub, "1", agent) for agent in ("planner", "writer") * 10])
        wait_until_idle(hub)
        agents_settled(hub)
        assert events(receiver) == [(RAISED, "acme/search", 1.0)], "no alert of an agent"
        with hub.http(ADMIN) as http:
            state = http.get("/api/dashboard/state").json()
            assert http.get("/api/admin/violations").json()["agents"] == []
        summary = state["summary"]
        assert (summary["worst_offenders"], summary["violations_last_hour"], summary["limited"]) == ([], 0, 0)
        assert (summary["open_alerts"], summary["open_account_alerts"], state["alerts"]) == (1, 1, [])
        assert not any([card["rate_limited"] or card["violations"] for card in state["agents"]])
        assert (hub.hub.stats.violations, hub.hub.alerts.raised) == (0, 0)


@pytest.mark.parametrize("settings", [{"exempt": ["planner"]}, {"shadow": True}], ids=["exempt", "shadow"])
def test_f1_exempt_and_shadowed_spending_raises_alerts_like_any_other(
    receiver: WebhookReceiver, settings: dict[str, Any]
) -> None:
    policy = Policy(
        accounts={"at": {"acme": {"usd": "10 in all"}}}, agents={"planner": {"account": "acme"}}, **settings
    )
    with hub_server(policy, webhooks=(receiver.url,)) as hub:
        assert spend(hub, "9")
        assert spend(hub, "9")
        wait_until_idle(hub)
        assert events(receiver) == [(RAISED, "acme", 0.8), (RAISED, "acme", 1.0)]
        assert receiver.heard[0].json()["alert"]["resets_at"] is None


def test_f1_an_alert_is_resolved_when_the_period_ends(receiver: WebhookReceiver) -> None:
    with capture_logs() as logged, hub_server(PAYS, webhooks=(receiver.url,)) as hub:
        spend(hub, "9")
        wait_until_idle(hub)
        left = dashboard_alerts(hub)[0]["resets_at"] - hub.clock.wall()
        hub.clock.advance(left - 1)
        wait_until_idle(hub)
        assert hub.hub.account_alerts.open == 1
        hub.clock.advance(1)
        wait_until_idle(hub)
        assert events(receiver) == [(RAISED, "acme/search", 0.8), (RESOLVED, "acme/search", 0.8)]
        assert (hub.hub.account_alerts.open, hub.hub.account_alerts.resolved) == (0, 1)
        assert [alert["resolved_at"] is None for alert in dashboard_alerts(hub)] == [False]
        spend(hub, "8")
        wait_until_idle(hub)
        assert events(receiver)[2:] == [(RAISED, "acme/search", 0.8)]
        assert receiver.heard[0].json()["alert"]["alert_id"] != receiver.heard[2].json()["alert"]["alert_id"]
        assert [alert["resolved_at"] is None for alert in dashboard_alerts(hub)] == [True, False], "the newest first"
    assert [line["log_level"] for line in logged if line["event"] == "a budget is available again"] == ["info"]


def test_f1_a_raised_budget_resolves_the_alert_or_makes_it_that_of_80_percent(receiver: WebhookReceiver) -> None:
    with hub_server(PAYS, webhooks=(receiver.url,)) as hub:
        spend(hub, "10")
        wait_until_idle(hub)
        hub.hub.gate.set_account_limit("acme/search", "usd", "12/calendar day", by="ada")
        wait_for(lambda: dashboard_alerts(hub)[0]["share"] == 0.8, "that of 80 percent")
        assert dashboard_alerts(hub)[0]["limit"] == "12 usd/calendar day"
        assert events(receiver) == [(RAISED, "acme/search", 1.0)], "which is no news"
        hub.hub.gate.set_account_limit("acme/search", "usd", "13/calendar day", by="ada")
        wait_for(lambda: len(receiver.heard) == 2, "the end of it")
        assert events(receiver)[1:] == [(RESOLVED, "acme/search", 0.8)]
        spend(hub, "1")
        wait_until_idle(hub)
        assert events(receiver)[2:] == [(RAISED, "acme/search", 0.8)], "of the new amount"


def test_f1_a_lowered_budget_is_that_of_100_percent_and_a_removed_one_has_no_alert(receiver: WebhookReceiver) -> None:
    with hub_server(PAYS, webhooks=(receiver.url,)) as hub:
        spend(hub, "9")
        wait_until_idle(hub)
        hub.hub.gate.set_account_limit("acme/search", "usd", "9/calendar day")
        wait_for(lambda: len(receiver.heard) == 2, "that of 100 percent")
        assert events(receiver)[1:] == [(RAISED, "acme/search", 1.0)]
        hub.hub.gate.set_account_limit("acme/search", "usd", "unlimited")
        wait_for(lambda: len(receiver.heard) == 3, "the end of it")
        assert events(receiver)[2:] == [(RESOLVED, "acme/search", 1.0)]


def test_f1_holds_that_are_settled_for_less_resolve_an_alert_within_half_a_minute(receiver: WebhookReceiver) -> None:
    with hub_server(PAYS, webhooks=(receiver.url,)) as hub:
        hold = hub.hub.gate.hold("planner", {"usd": "9"})
        wait_until_idle(hub)
        hold.settle({"usd": "1"})
        hub.clock.advance(30)
        wait_until_idle(hub)
        assert events(receiver) == [(RAISED, "acme/search", 0.8), (RESOLVED, "acme/search", 0.8)]


def test_f1_an_alert_stays_open_until_less_than_70_percent_are_used(receiver: WebhookReceiver) -> None:
    with hub_server(PAYS, webhooks=(receiver.url,)) as hub:
        holds = [hub.hub.gate.hold("planner", {"usd": "1"}) for _ in range(8)]
        wait_until_idle(hub)
        for left, heard in ((7, 1), (6, 2)):
            holds.pop().cancel()
            assert len(holds) == left
            hub.clock.advance(30)
            wait_until_idle(hub)
            assert len(events(receiver)) == heard
        hub.hub.gate.hold("planner", {"usd": "2"})
        wait_until_idle(hub)
        assert [event for event, _, _ in events(receiver)] == [RAISED, RESOLVED, RAISED]


def test_f1_two_budgets_of_a_resource_have_alerts_of_their_own(receiver: WebhookReceiver) -> None:
    policy = Policy(
        accounts={"at": {"acme": {"usd": ["10/calendar day", "11/calendar month"]}}}, agents={"a": {"account": "acme"}}
    )
    with hub_server(policy, webhooks=(receiver.url,)) as hub:
        spend(hub, "9", "a")
        spend(hub, "0.5", "a")
        wait_until_idle(hub)
        limits = [one.json()["alert"]["limit"] for one in receiver.heard]
        assert limits == ["10 usd/calendar day", "11 usd/calendar month"]
        assert hub.hub.account_alerts.open == 2


def test_f1_open_alerts_of_accounts_are_bounded(receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ACCOUNT_ALERTS", 3)
    with capture_logs() as logged, hub_server(PAYS, webhooks=(receiver.url,)) as hub:
        for number in range(5):
            hub.hub.account_alerts.on_alert(AccountAlerted(f"org-{number}", "usd", "", 0.8, "10 usd in all", None))
            wait_until_idle(hub)
        assert (hub.hub.account_alerts.open, len(receiver.heard)) == (3, 3)
        assert sum(line["event"].startswith("too many open alerts of accounts") for line in logged) == 1


@pytest.mark.parametrize("token", [VIEWER, ""], ids=["viewer", "public"])
def test_f1_only_admins_get_alerts_of_accounts(token: str) -> None:
    with hub_server(PAYS, public_dashboard=True) as hub, hub.http(token) as http, hub.agent("planner"):
        spend(hub, "9")
        wait_until_idle(hub)
        state = http.get("/api/dashboard/state").json()
        summary = state["summary"]
        assert (state["account_alerts"], summary["open_alerts"], summary["open_account_alerts"]) == ([], 0, 0)
        assert "acme" not in json.dumps(state)
        if token:
            assert http.get("/api/admin/alerts").json() == {"alerts": [], "account_alerts": [], "open": 0}
            agent = http.get("/api/admin/agents/planner").json()
            assert (agent["account"], agent["account_limits"], agent["holds"]) == ("", [], [])


def test_f1_the_docs_list_every_field_and_event() -> None:
    page = (Path(__file__).parents[2] / "docs" / "alerts.md").read_text(encoding="utf-8")
    table = page.partition("\n| of an account | |\n")[2].partition("\n\n")[0]
    told = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert told == set(module.AccountAlert.__struct_fields__)
    assert [name for name in get_args(module.AccountAlertEvent) if f"`{name}`" not in page] == []
    assert f"At most {module.MAX_ACCOUNT_ALERTS} alerts of accounts are open" in page


# Several hubs ---------------------------------------------------------------------------------------------------------


def test_f1_a_fleet_raises_shows_and_resolves_one_alert(fleet: HubFleet) -> None:
    with fleet.hub(policy=PAYS) as one, fleet.hub(policy=PAYS) as other:
        spend(one, "8")
        spend(other, "0.1")
        wait_for_comparison(one, other)
        assert events(fleet.receiver) == [(RAISED, "acme/search", 0.8)]
        assert dashboard_alerts(one) == dashboard_alerts(other) == [fleet.receiver.heard[0].json()["alert"]]
        assert (one.hub.alerts.open, other.hub.alerts.open) == (0, 0), "it is no alert of an agent"
        spend(other, "1.9")
        spend(one, "1")
        wait_for_comparison(one, other)
        assert events(fleet.receiver)[1:] == [(RAISED, "acme/search", 1.0)]
        fleet.clock.advance(86400)
        wait_for(lambda: one.hub.account_alerts.open == other.hub.account_alerts.open == 0, "the end of it")
        wait_for_comparison(one, other)
        assert events(fleet.receiver)[2:] == [(RESOLVED, "acme/search", 1.0)]
        assert one.hub.account_alerts.resolved + other.hub.account_alerts.resolved == 1
        assert fleet.open == {}


def test_f1_an_alert_of_a_hub_that_stopped_is_found_and_resolved_by_another(fleet: HubFleet) -> None:
    with fleet.hub(policy=PAYS) as one:
        spend(one, "9")
        wait_until_idle(one)
    with fleet.hub(policy=PAYS) as later:
        wait_for(lambda: later.hub.account_alerts.open, "the alert")
        spend(later, "0.1")
        wait_for_comparison(later)
        assert events(fleet.receiver) == [(RAISED, "acme/search", 0.8)]
        fleet.clock.advance(86400)
        wait_for(lambda: len(fleet.receiver.heard) == 2, "the end of it")
        assert events(fleet.receiver)[1:] == [(RESOLVED, "acme/search", 0.8)]


def test_f1_foreign_data_in_the_server_does_no_harm(fleet: HubFleet) -> None:
    with fleet.hub(policy=PAYS) as one, fleet.server.client() as client:
        spend(one, "9")
        wait_for_comparison(one)
        ((key, alert),) = fleet.open.items()
        strange = {
            "\tno": "nonsense",
            "\tother": json.dumps(alert),
            key.replace("search", "ops"): json.dumps({**alert, "account": "acme/ops", "share": 7}),
            key.replace("search", "x"): json.dumps({**alert, "account": "acme/x", "raised_at": 1e300}),
        }
        client.hset(f"{fleet.prefix}{{alerts}}a1:open", mapping=strange)
        wait_for_comparison(one)
        assert (one.hub.account_alerts.open, one.hub.alerts.open) == (1, 0)
        client.delete(f"{fleet.prefix}{{alerts}}a1:open")  # the server loses it
        wait_for_comparison(one)
        assert fleet.open == {key: alert}
        assert events(fleet.receiver) == [(RAISED, "acme/search", 0.8)]


def test_f1_raised_while_the_server_is_away_it_is_shared_when_it_is_back(
    fleet: HubFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet.hub(policy=PAYS) as one, fleet.hub(policy=PAYS) as other:
        wait_for_comparison(one, other)
        away = {"one": True}
        monkeypatch.setattr(one.hub.account_alerts._store, "is_away", lambda: away["one"])
        spend(one, "9")
        wait_until_idle(one)
        assert (one.hub.account_alerts.open, fleet.open) == (1, {})
        away["one"] = False
        wait_for_comparison(one, other)
        assert list(fleet.open.values()) == dashboard_alerts(other) == [fleet.receiver.heard[0].json()["alert"]]
        assert events(fleet.receiver) == [(RAISED, "acme/search", 0.8)]


def test_f1_alerts_that_another_hub_has_resolved_are_not_resolved_one_by_one(
    fleet: HubFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At midnight all hubs resolve the alerts of all daily budgets: who comes too late sees that at the first."""
    monkeypatch.setattr("headgate.hub.monitoring.alert_base._INTERVAL", 3600.0)
    teams = ("acme/a", "acme/b", "acme/c")
    policy = Policy(
        accounts={"at": {team: {"usd": "10/calendar day"} for team in teams}},
        agents={team[-1]: {"account": team} for team in teams},
    )
    ended: list[str] = []
    real = RedisAlerts.end

    async def noted(self: RedisAlerts, *words: str) -> Any:
        ended.append(words[0])
        return await real(self, *words)

    with fleet.hub(policy=policy) as one:
        for team in teams:
            spend(one, "9", team[-1])
        wait_until_idle(one)
        shared = one.hub.account_alerts._store._shared
        assert shared is not None
        for name, entry in one.hub.account_alerts._open.items():
            over = encoded(replace(entry.alert, resolved_at=1.0))
            assert one.run(shared.end(name, entry.alert.alert_id, entry.text, over)) == ("done", "")
        monkeypatch.setattr(RedisAlerts, "end", noted)
        fleet.clock.advance(86400)
        wait_for(lambda: not one.hub.account_alerts.open, "the end of them")
        wait_until_idle(one)
        assert len(ended) == 1
        assert one.hub.account_alerts.resolved == 0
        assert [what for what, *_ in events(fleet.receiver)] == [RAISED] * 3
