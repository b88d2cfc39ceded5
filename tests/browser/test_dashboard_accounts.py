"""Accounts on the dashboard of a real hub: a tree, the worst first, in a real browser."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from headgate import Policy
from headgate.hub.dashboard import accounts as module
from tests.browser.test_dashboard_for_everybody import HubBelowPath
from tests.support.account_alerts import PAYS, spend
from tests.support.agent_names import BACKWARDS, HOSTILE
from tests.support.browser import Visitors, agent_page, card, press, shown_page
from tests.support.hub import ADMIN, VIEWER, hub_server, hub_settings

SHOTS = os.environ.get("HEADGATE_ACCOUNT_SHOTS", "")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL", 0.05)


def account_tree_policy(many: int) -> Policy:
    """A policy with many accounts: ten teams in each organisation, and an agent in each account."""
    orgs = max(many // 11, 1)
    paths = [f"org-{n:02}" if n < orgs else f"org-{n % orgs:02}/team-{n // orgs:02}" for n in range(many)]
    return Policy(
        accounts={"at": {path: {"usd": "100/calendar month", "slots": "5 in flight"} for path in paths}},
        agents={f"agent-{number}": {"account": path} for number, path in enumerate(paths)},
    )


def rows(page: Page) -> Locator:
    return page.locator("#accounts tbody tr")


def row(page: Page, path: str, resource: str = "usd") -> Locator:
    """The row of a limit."""
    of = page.locator(f"#accounts tr:has(th[title$=' {path}'])")
    return of.filter(has=page.locator(".resource").get_by_text(resource, exact=True))


def cells(found: Locator) -> dict[str, str]:
    names = ("usage", "spent", "held", "left", "limit")
    return {name: found.locator(f".{name}").inner_text() for name in names}


def names(page: Page) -> list[str]:
    """The names of the accounts that are drawn, in their order."""
    return page.locator("#accounts tr[data-first=true] th bdi").all_text_contents()


def take_screenshot(page: Page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)


def test_f1_accounts_are_a_tree_with_spent_held_and_left_and_it_updates_by_itself(visitors: Visitors) -> None:
    with hub_server(PAYS) as hub:
        spend(hub, "4")
        page = visitors.come(hub, ADMIN)
        expect(row(page, "acme/search")).to_be_visible()
        assert names(page) == ["acme", "search"]
        assert cells(row(page, "acme/search")) == {
            "usage": "40 %", "spent": "4", "held": "0", "left": "6", "limit": "10 usd/calendar day",
        }  # fmt: skip
        meter = row(page, "acme/search").get_by_role("meter")
        expect(meter).to_have_attribute("data-level", "green")
        for amount, level, text in (("1", "yellow", "50 %"), ("3", "yellow", "80 %"), ("0.000001", "red", "81 %")):
            spend(hub, amount)
            expect(row(page, "acme/search").locator(".usage")).to_have_text(text)
            expect(meter).to_have_attribute("data-level", level)
        hub.hub.gate.hold("writer", {"usd": "1.25"})
        expect(row(page, "acme/search").locator(".held")).to_have_text("1.25")
        assert cells(row(page, "acme/search"))["spent"] == "8.000001"
        assert cells(row(page, "acme"))["left"] == "90.749999"
        hub.hub.gate.set_account_limit("acme/search", "usd", "20/calendar day")
        expect(row(page, "acme/search").locator(".limit")).to_have_text("20 usd/calendar day")
        expect(meter).to_have_attribute("aria-valuetext", "46 % of 20 usd/calendar day used, 10.749999 left")
        assert page.locator("#accounts-count").inner_text() == "2 accounts"


def test_f1_an_agent_whose_account_denies_says_so(visitors: Visitors) -> None:
    with hub_server(PAYS) as hub:
        hub.hub.gate.hold("writer", {"usd": "1"})
        page = visitors.come(hub, ADMIN)
        mark = card(page, "writer").get_by_text("denied by account")
        expect(card(page, "writer")).to_be_visible()
        expect(mark).to_be_hidden()
        hub.hub.gate.hold("writer", {"usd": "11"})
        expect(mark).to_be_visible()
        take_screenshot(page, "denied-by-account")
        hub.hub.gate.hold("writer", {"usd": "1"})
        expect(mark).to_be_hidden()


@pytest.mark.parametrize("settings", [{"exempt": ["planner"]}, {"shadow": True}], ids=["exempt", "shadow"])
def test_f1_what_exempt_and_shadowed_agents_spend_is_in_the_same_figures(
    visitors: Visitors, settings: Mapping[str, Any]
) -> None:
    policy = Policy(
        accounts={"at": {"acme": {"usd": "10/calendar day"}}}, agents={"planner": {"account": "acme"}}, **settings
    )
    with hub_server(policy) as hub:
        spend(hub, "4")
        page = visitors.come(hub, ADMIN)
        expect(row(page, "acme").locator(".spent")).to_have_text("4")
        spend(hub, "9")
        expect(row(page, "acme").locator(".usage")).to_have_text("100 %")
        expect(page.locator("#alerts li")).to_contain_text("100 %")


def test_f1_without_accounts_there_is_no_section(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("planner"):
        page = visitors.come(hub, ADMIN)
        expect(page.locator("#agents > li")).to_have_count(1)
        expect(page.locator("#accounts-section")).to_be_hidden()
        take_screenshot(page, "accounts-0")


def test_f1_the_worst_branch_comes_first_and_many_accounts_are_folded(visitors: Visitors) -> None:
    with hub_server(account_tree_policy(110)) as hub:
        spend(hub, "90", "agent-25")  # org-05/team-02
        spend(hub, "50", "agent-7")
        page = visitors.come(hub, ADMIN)
        expect(page.locator("#accounts-count")).to_have_text("110 accounts, 2 at 80 % or more")
        expect(page.locator("#accounts tr[data-first=true]")).to_have_count(10)
        assert names(page)[:3] == ["org-05", "org-07", "org-00"]
        expect(page.locator("#accounts .below").first).to_have_text("10 accounts below, up to 90 %")
        unfold = page.get_by_role("button", name="Accounts below org-05", exact=True)
        unfold.focus()
        press(page, "Enter")
        expect(unfold).to_have_attribute("aria-expanded", "true")
        expect(page.locator("#accounts tr[data-first=true]")).to_have_count(20)
        assert names(page)[:2] == ["org-05", "team-02"]
        spend(hub, "45", "agent-7")
        expect(row(page, "org-07").locator(".usage")).to_have_text("95 %")
        assert names(page)[0] == "org-05", "nothing moves while the focus is there"
        press(page, "Enter")
        page.get_by_label("Search accounts by path").focus()
        spend(hub, "1", "agent-7")
        expect(page.locator("#accounts tr[data-first=true] bdi").first).to_have_text("org-07")
        page.get_by_role("button", name="Unfold all").click()
        expect(page.get_by_role("button", name="Show more")).to_be_visible()
        assert rows(page).count() == 200
        page.get_by_role("button", name="Show more").click()
        expect(rows(page)).to_have_count(220)
        page.get_by_role("button", name="Fold all", exact=True).click()
        expect(page.locator("#accounts tr[data-first=true]")).to_have_count(10)
        page.get_by_label("Search accounts by path").fill("org-03/team-04")
        expect(page.locator("#accounts tr[data-first=true]")).to_have_count(2)
        assert page.url.endswith("#account=org-03%2Fteam-04")
        press(page, "Escape")
        expect(page.locator("#accounts tr[data-first=true]")).to_have_count(10)


def test_f1_of_thousands_the_worst_are_shown_and_how_many_more_there_are(
    visitors: Visitors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ACCOUNTS", 30)
    with hub_server(account_tree_policy(330)) as hub:
        spend(hub, "90", "agent-99")  # org-09/team-03
        page = visitors.come(hub, ADMIN)
        expect(page.locator("#more-accounts")).to_contain_text("and 300 more accounts")
        expect(page.locator("#accounts tr[data-first=true] bdi").first).to_have_text("org-09")
        expect(page.locator("#accounts-count")).to_have_text("330 accounts, 2 at 80 % or more")


@pytest.mark.parametrize("many", [1, 30, 500])
def test_f1_accounts_are_accessible(visitors: Visitors, axe: Callable[[Page], list[str]], many: int) -> None:
    with hub_server(account_tree_policy(many)) as hub:
        for number in range(0, many, 3):
            hub.hub.gate.hold(f"agent-{number}", {"usd": str(number % 9)})
        for scheme in ("light", "dark"):
            page = visitors.come(hub, ADMIN, color_scheme=scheme)
            expect(page.locator("#accounts-count")).to_contain_text(f"{many} account")
            expect(rows(page).first).to_be_visible()
            assert axe(page) == []
            take_screenshot(page, f"accounts-{many}-{scheme}")
        page = visitors.come(hub, ADMIN)
        expect(rows(page).first).to_be_visible()
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
        take_screenshot(page, f"accounts-{many}-phone")
        page.goto(f"http://{hub}/dashboard#agent=agent-0")
        shown_page(page, "agent-0")
        assert axe(page) == []


PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def test_f1_on_a_phone_each_limit_is_a_line_with_its_change_beneath(
    visitors: Visitors, axe: Callable[[Page], list[str]]
) -> None:
    policy = Policy(
        accounts={
            "zone": "Europe/Berlin",
            "at": {
                "acme": {"usd": "20/calendar month", "slots": "5 in flight"},
                "acme/search": {"usd": "10 in all", "tools": {"web": {"requests": "100000/calendar day"}}},
            },
        },
        agents={"planner": {"account": "acme/search"}},
    )
    with hub_server(policy) as hub:
        spend(hub, "9.5")
        hub.hub.gate.hold("planner", {"usd": "0.25"})
        page = visitors.come(hub, ADMIN, **PHONE)
        line = row(page, "acme/search").locator(".brief")
        expect(line).to_have_text("usd 9.5 of 10, 97 %, 0.25 held, never resets")
        expect(line).to_be_visible()
        month = row(page, "acme").locator(".brief").inner_text()
        assert re.fullmatch(r"usd 9\.5 of 20, 48 %, 0\.25 held, resets .*\d.*", month)
        wide = "node => node.scrollWidth - node.clientWidth"
        assert page.locator(".accounts-panel").evaluate(wide) == 0
        change = row(page, "acme/search").get_by_role("button", name="Change usd of acme/search")
        boxes = [line.bounding_box(), change.bounding_box()]
        assert boxes[0] is not None
        assert boxes[1] is not None
        assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"]
        assert boxes[1]["x"] + boxes[1]["width"] <= 390
        assert axe(page) == []
        take_screenshot(page, "accounts-on-a-phone")
        change.tap()
        expect(page.get_by_role("form", name="Change a limit")).to_be_visible()
        page.goto(f"http://{hub}/dashboard#agent=planner")
        shown_page(page, "planner")
        expect(page.locator("#account-limits .brief").first).to_be_visible()
        assert page.locator(".scrolled:has(#account-limits)").evaluate(wide) == 0
        take_screenshot(page, "accounts-of-an-agent-on-a-phone")


def test_f1_folded_up_the_alert_with_the_largest_share_is_shown(visitors: Visitors) -> None:
    policy = Policy(
        accounts={"at": {"acme": {"usd": "10 in all"}, "initech": {"usd": "10 in all"}}},
        agents={"planner": {"account": "acme"}, "bot": {"account": "initech"}},
    )
    with hub_server(policy) as hub:
        spend(hub, "10")
        page = visitors.come(hub, ADMIN, **PHONE)
        expect(page.locator("#alerts li")).to_have_count(1)
        expect(page.locator("#alerts-more")).to_be_hidden()
        spend(hub, "8.5", "bot")  # it is newer, and not as bad
        expect(page.locator("#alerts li")).to_have_count(2)
        expect(page.locator("#alerts-more")).to_have_text("+1 more")
        expect(page.locator("#alerts li:visible")).to_have_count(1)
        expect(page.locator("#alerts li:visible bdi")).to_have_text("acme")
        take_screenshot(page, "alerts-on-a-phone")
        page.get_by_role("button", name="More", exact=True).tap()
        expect(page.locator("#alerts li:visible")).to_have_count(2)
        expect(page.locator("#alerts-more")).to_be_hidden()


def test_f1_names_of_accounts_are_text(visitors: Visitors) -> None:
    hostile = HOSTILE.replace("/", "")
    policy = Policy(
        accounts={"at": {hostile: {"usd": "10 in all"}, f"{hostile}/{BACKWARDS}": {"usd": "10 in all"}}},
        agents={"planner": {"account": f"{hostile}/{BACKWARDS}"}},
    )
    with hub_server(policy) as hub, hub.agent("planner"):
        page = visitors.come(hub, ADMIN)
        expect(page.locator("#accounts tr[data-first=true]")).to_have_count(2)
        assert names(page) == [hostile, BACKWARDS]
        spend(hub, "9")
        expect(page.locator("#toasts")).to_contain_text(f"{hostile}: 80 % of 10 usd in all used")
        expect(page.locator("#alerts li")).to_have_count(2)
        agent_page(page, "planner")
        expect(page.locator("#account-limits tbody tr").first).to_contain_text(hostile)
        assert page.locator("#content img").count() == 0


def test_f1_an_alert_of_an_account_is_announced_and_leads_to_it(visitors: Visitors) -> None:
    with hub_server(PAYS) as hub:
        page = visitors.come(hub, ADMIN)
        expect(row(page, "acme/search")).to_be_visible()
        spend(hub, "8")
        expect(page.locator("#toasts .toast")).to_have_count(1)
        expect(page.locator("#toasts")).to_contain_text("acme/search: 80 % of 10 usd/calendar day used")
        expect(page).to_have_title("(1) headgate")
        spend(hub, "2")
        expect(page.locator("#toasts")).to_contain_text("acme/search: 100 % of 10 usd/calendar day used")
        expect(page.locator("#toasts .toast")).to_have_count(1)
        expect(page.locator("#alerts li")).to_have_count(1)
        expect(page.locator("#alerts li")).to_contain_text("of 10 usd/calendar day")
        expect(page.locator("#offenders li")).to_have_count(0)
        page.locator("#alerts").get_by_role("link", name="acme/search").click()
        expect(page.get_by_label("Search accounts by path")).to_be_focused()
        expect(page.get_by_label("Search accounts by path")).to_have_value("acme/search")
        hub.clock.advance(86400)
        expect(page.locator("#alerts [data-open=true]")).to_have_count(0)
        expect(page.locator("#toasts")).to_be_empty()
        expect(page).to_have_title("headgate")


def test_f1_an_agents_page_has_its_accounts_and_open_holds(visitors: Visitors) -> None:
    with hub_server(PAYS) as hub, hub.agent("planner"), hub.agent("stranger"):
        hold = hub.hub.gate.hold("planner", {"usd": "2.5", "tokens": 1200}, session="run-1", lease=90)
        page = visitors.come(hub, ADMIN)
        agent_page(page, "planner")
        expect(page.locator("#agent-path")).to_have_text("acme/search/planner")
        found = [text.split("\t") for text in page.locator("#account-limits tbody tr").all_inner_texts()]
        assert [[cell.strip() for cell in line[:7]] for line in found] == [
            ["acme", "usd", "2 %", "0", "2.5", "97.5", "100 usd/calendar month"],
            ["acme/search", "usd", "25 %", "0", "2.5", "7.5", "10 usd/calendar day"],
        ]
        expect(page.locator("#holds tbody tr")).to_have_count(1)
        text = page.locator("#holds tbody tr").inner_text().split("\t")
        assert text == [hold.id, "run-1", "\u2013", "1 requests, 2.5 usd, 1,200 tokens", "90 s"]
        take_screenshot(page, "accounts-agent")
        hold.settle({"usd": "1", "tokens": 1})
        expect(page.locator("#no-holds")).to_be_visible()
        expect(page.locator("#account-limits tbody tr").last).to_contain_text("10 %")
        page.get_by_role("link", name="All agents").click()
        agent_page(page, "stranger")
        expect(page.locator("#agent-accounts")).to_be_hidden()


def test_f1_only_a_budget_in_all_never_resets(visitors: Visitors) -> None:
    with hub_server(PAYS) as hub, hub.agent("planner"):
        gate = hub.hub.gate
        gate.set_level_limit("agent", "requests", "1000000 in all")
        gate.set_level_limit("agent", "tokens", "1000000/second")
        gate.hold("planner", {"tokens": 1200}, lease=90)
        hub.clock.advance(1)
        page = visitors.come(hub, ADMIN)
        agent_page(page, "planner")
        rows = page.locator("#account-limits tbody tr")
        expect(rows.filter(has_text="tokens").locator("td").last).to_have_text("\u2013")
        expect(rows.filter(has_text="requests").locator("td").last).to_have_text("never")


@pytest.mark.parametrize("token", [VIEWER, ""], ids=["viewer", "public"])
def test_f1_only_an_admin_sees_accounts(visitors: Visitors, token: str) -> None:
    with hub_server(PAYS, public_dashboard=True) as hub, hub.agent("planner"):
        spend(hub, "9")
        admin = visitors.come(hub, ADMIN)
        expect(row(admin, "acme/search")).to_be_visible()
        page = visitors.come(hub, token)
        expect(page.locator("#agents > li")).to_have_count(1)
        spend(hub, "0.5")
        expect(row(admin, "acme/search").locator(".spent")).to_have_text("9.5")
        expect(page.locator("#accounts-section")).to_be_hidden()
        expect(page.locator("#open-alerts")).to_have_text("0")
        expect(page.locator("#alerts li")).to_have_count(0)
        if token:
            agent_page(page, "planner")
            expect(page.locator("#agent-accounts")).to_be_hidden()
        assert "acme" not in page.content()


def test_f1_an_admin_changes_a_limit_below_a_path_and_by_the_keyboard(visitors: Visitors) -> None:
    hub = HubBelowPath(hub_settings(), PAYS)
    try:
        spend(hub, "4")
        page = visitors.come(hub, ADMIN, path="/gate/dashboard")
        change = page.get_by_role("button", name="Change usd of acme/search")
        change.focus()
        press(page, "Enter")
        limit = page.get_by_role("form", name="Change a limit").get_by_label("Limit", exact=True)
        expect(limit).to_be_focused()
        expect(limit).to_have_value("10 usd/calendar day")
        limit.fill("much")
        press(page, "Enter")
        expect(page.locator("#account-error")).to_contain_text("much")
        visitors.forgive("400|422")
        limit.fill("5/calendar day")
        press(page, "Enter")
        expect(page.locator("#account-done")).to_have_text("The limit is set.")
        expect(change).to_be_focused()
        expect(row(page, "acme/search").locator(".usage")).to_have_text("80 %")
        assert cells(row(page, "acme/search"))["limit"] == "5 usd/calendar day"
        press(page, "Enter", "Escape")
        expect(page.locator("#account-form")).to_be_hidden()
        expect(change).to_be_focused()
        press(page, "Enter")
        page.get_by_role("button", name="Back to the policy").click()
        expect(row(page, "acme/search").locator(".limit")).to_have_text("10 usd/calendar day")
    finally:
        hub.stop()
