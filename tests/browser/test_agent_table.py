"""Many agents on the dashboard of a real hub: a table that draws the rows that are seen, and cards on request."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Page, expect

from headgate import Policy
from headgate.gate.changes import exemption
from tests.support.agent_connections import ping
from tests.support.browser import STILL, Visitors, agent_page, card, names, pass_time, press, row
from tests.support.hub import ADMIN, VIEWER, HubServer, hub_server

AT_HOME = {"exempt": ["127.0.0.1"]}  # many agents come from one address here
TALL = "document.documentElement.scrollHeight / innerHeight"
DRAWN = 60  # rows at most, of a window of 900 pixels


@pytest.fixture(scope="module")
def crowded_hub() -> Iterator[HubServer]:
    """A hub with more agents than are sent to dashboards."""
    with hub_server() as hub:
        agents = [f"agent-{number:04}" for number in range(2012)]
        hub.run(hub.hub.gate.achange([exemption(name, True) for name in agents]))
        yield hub


def sorted_columns(page: Page) -> dict[str, str]:
    """The columns that are sorted, and how."""
    found = page.locator("#columns [aria-sort]")
    return {one.inner_text().strip(" ▲▼"): one.get_attribute("aria-sort") or "" for one in found.all()}


def test_b7_search_filters_and_orders_among_300_agents(visitors: Visitors) -> None:
    with ExitStack() as stack:
        policy = Policy(limits={"light": "20/minute"}, addresses=AT_HOME)
        hub = stack.enter_context(hub_server(policy, max_connections_per_address=1000))
        http = stack.enter_context(hub.http(ADMIN))
        agents = [f"agent-{number:03}" for number in range(300)]
        wires = {name: stack.enter_context(hub.agent(name)) for name in agents}
        for name, times in (("agent-007", 25), ("agent-013", 22), ("agent-100", 11), ("agent-299", 15)):
            ping(wires[name], times)
        http.put("/api/admin/rate-limits/agent-200", json={"light": "5/minute"}).raise_for_status()
        http.post("/api/admin/rate-limits/whitelist", json={"agent_id": "agent-250"}).raise_for_status()
        page = visitors.come(hub, ADMIN)
        expect(page.locator("#count")).to_have_text("300 of 300 shown")
        assert names(page)[:4] == ["agent-007", "agent-013", "agent-299", "agent-100"]
        assert sorted_columns(page) == {}
        shown = row(page, "agent-007")
        assert shown.get_by_role("cell").nth(0).inner_text() == "rate limited"
        expect(shown.get_by_role("meter")).to_have_attribute("aria-valuetext", "20 of 20 used, ws light, 100 %")
        assert [shown.get_by_role("cell").nth(at).inner_text() for at in (2, 3, 4)] == ["0.4", "5", "5"]
        expect(shown.locator(".wait")).to_contain_text(" s")
        expect(shown.get_by_role("img")).to_have_attribute("aria-label", "Last five minutes: 20 passed, 5 denied")

        head = page.get_by_role("columnheader", name="Agent").get_by_role("button")
        head.click()
        assert (names(page)[:3], sorted_columns(page)) == (agents[:3], {"Agent": "ascending"})
        press(page, "Enter")
        assert (names(page)[:2], sorted_columns(page)) == (["agent-299", "agent-298"], {"Agent": "descending"})
        press(page, "Space")
        assert (names(page)[0], sorted_columns(page)) == ("agent-007", {})  # as at first
        for label, first in (
            ("Violations", ["agent-007", "agent-013", "agent-000"]),
            ("Denied/min", ["agent-007", "agent-013", "agent-000"]),
            ("Wait", ["agent-007", "agent-013", "agent-000"]),
            ("Usage", ["agent-007", "agent-013", "agent-299"]),
            ("State", ["agent-007", "agent-013", "agent-000"]),
            ("Rate/s", ["agent-007", "agent-013", "agent-299", "agent-100", "agent-000"]),
        ):
            page.get_by_role("columnheader", name=label).get_by_role("button").click()
            assert (names(page)[: len(first)], sorted_columns(page)) == (first, {label: "descending"})
        for label, found in (
            ("rate limited", ["agent-007", "agent-013"]),
            ("with violations", ["agent-007", "agent-013"]),
            ("override", ["agent-200"]),
            ("exempt", ["agent-250"]),
        ):
            page.get_by_role("radio", name=f"{label} {len(found)}").check()
            assert names(page) == found
            expect(page.locator("#count")).to_have_text(f"{len(found)} of 300 shown")
        page.get_by_label("Search agents by name").fill("nobody")
        expect(page.get_by_role("heading", name="No agent matches")).to_be_visible()
        expect(page.get_by_role("link", name="Open the page of nobody")).to_be_visible()
        expect(page).to_have_url(f"http://{hub}/dashboard#search=nobody&show=exempt&sort=rate")
        page.get_by_role("button", name="Show all agents").click()
        expect(page.locator("#count")).to_have_text("300 of 300 shown")
        press(page, "Tab")
        press(page, "/")
        expect(page.get_by_label("Search agents by name")).to_be_focused()
        page.keyboard.type("AGENT-01/")  # which is a slash here, and no key
        assert names(page) == []
        press(page, "Backspace")
        assert len(names(page)) == 10
        page.reload()
        expect(page.locator("#count")).to_have_text("10 of 300 shown")
        assert names(page)[0] == "agent-013"
        wires.pop("agent-019").socket.close()
        expect(page.locator("#count")).to_have_text("9 of 299 shown")
        page.get_by_role("radio", name="connected 299").check()
        assert len(names(page)) == 9
        press(page, "/", "Escape")
        expect(page.locator("#count")).to_have_text("299 of 299 shown")


def test_b7_2000_agents_take_a_page_of_bounded_height(visitors: Visitors, crowded_hub: HubServer) -> None:
    page = visitors.come(crowded_hub, VIEWER)
    expect(page.locator("#count")).to_have_text("2,000 of 2,012 shown")
    expect(page.locator("#more")).to_contain_text("12 more are not listed")
    table = page.get_by_role("table", name="Agents")
    expect(table).to_have_attribute("aria-rowcount", "2001")
    assert 20 < len(names(page)) < DRAWN
    assert page.evaluate(TALL) < 2
    rows = page.locator("#rows > .tr")
    expect(rows.first).to_have_attribute("aria-rowindex", "2")
    page.locator("#table").evaluate("node => { node.scrollTop = node.scrollHeight / 2; }")
    expect(row(page, "agent-1000")).to_have_count(1)
    assert names(page) == sorted(names(page))  # in the page as they are seen
    assert 20 < len(names(page)) < DRAWN
    page.locator("#table").evaluate("node => { node.scrollTop = node.scrollHeight; }")
    expect(rows.last).to_have_attribute("aria-rowindex", "2001")
    page.get_by_label("Search agents by name").fill("agent-1234")
    assert names(page) == ["agent-1234"]
    page.get_by_label("Search agents by name").fill("")
    page.get_by_role("button", name="Cards").click()
    expect(page.locator("#agents > li")).to_have_count(40)
    page.get_by_role("button", name="Show 40 more of 1,960").click()
    expect(page.locator("#agents > li")).to_have_count(80)
    expect(page).to_have_url(f"http://{crowded_hub}/dashboard#list=cards")
    page.reload()
    expect(page.locator("#agents > li")).to_have_count(40)


def test_b7_the_table_is_used_by_the_keyboard(
    visitors: Visitors, crowded_hub: HubServer, axe: Callable[[Page], list[str]]
) -> None:
    page = visitors.come(crowded_hub, VIEWER)
    expect(page.locator("#count")).to_have_text("2,000 of 2,012 shown")
    assert axe(page) == []
    link = page.locator("#rows").get_by_role("link")
    link.first.focus()
    press(page, "ArrowDown", "ArrowDown", "ArrowUp")
    expect(page.locator("#rows a:focus")).to_have_text("agent-0001")
    press(page, "End")
    expect(page.locator("#rows a:focus")).to_have_text("agent-1999")
    expect(page.locator("#rows a:focus")).to_be_in_viewport()
    press(page, "Home", *["Tab"] * 50)  # as far as rows that were not drawn at first
    expect(page.locator("#rows a:focus")).to_have_text("agent-0050")
    page.locator("#table").evaluate("node => { node.scrollTop = 0; }")
    expect(page.locator("#rows a:focus")).to_have_text("agent-0050")  # it isn't taken for another agent
    press(page, "ArrowDown")
    expect(page.locator("#rows a:focus")).to_be_in_viewport()
    page.locator("#rows a:focus").press("Enter")
    expect(page.get_by_role("heading", name="agent-0051")).to_be_focused()
    page.go_back()
    expect(page.locator("#rows a:focus")).to_have_text("agent-0051")
    expect(page.locator("#rows a:focus")).to_be_in_viewport()
    press(page, "End")
    expect(page.locator("#rows a:focus")).to_have_text("agent-1999")
    up = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowUp', bubbles: true }))"
    page.locator("#table").evaluate(f"node => {{ node.scrollTop = 0; {up}; }}")  # before there is an event of it
    expect(page.locator("#rows a:focus")).to_have_text("agent-1998")
    expect(page.locator("#rows a:focus")).to_be_in_viewport()


@pytest.mark.parametrize("by", ["focus", "pointer"])
def test_b7_rows_stay_in_place_while_somebody_uses_them(visitors: Visitors, by: str) -> None:
    with hub_server() as hub, hub.agent("ada") as ada, hub.agent("bob") as bob:
        ping(ada, 10)
        page = visitors.come(hub, ADMIN, time=STILL)
        expect(card(page, "bob")).to_be_visible()
        page.get_by_role("button", name="Table").click()
        assert names(page) == ["ada", "bob"]
        link = row(page, "bob").get_by_role("link")
        link.focus() if by == "focus" else link.hover()
        ping(bob, 20)
        expect(row(page, "bob").get_by_role("meter")).to_have_attribute("aria-valuenow", "16")
        with hub.agent("cleo"):
            expect(row(page, "cleo").locator(".mark").first).to_have_text("connected")
            assert names(page) == ["ada", "bob", "cleo"]
        expect(row(page, "cleo").locator(".mark").first).to_have_text("gone")  # without a jump of the others
        pass_time(page, 4900)
        ping(bob, 4)
        expect(row(page, "bob").get_by_role("meter")).to_have_attribute("aria-valuenow", "20")
        assert names(page) == ["ada", "bob", "cleo"]
        expect(page.get_by_text("order held")).to_be_visible()
        link.blur() if by == "focus" else page.mouse.move(5, 5)
        pass_time(page, 4900)
        ping(bob, 1)
        expect(row(page, "bob").get_by_role("meter")).to_have_attribute("aria-valuenow", "20")
        pass_time(page, 4000)
        ping(bob, 5)
        expect(page.locator("#rows .name").first).to_have_text("bob")
        assert names(page) == ["bob", "ada"]


def test_b7_the_page_of_an_agent_can_be_linked_and_left(visitors: Visitors, crowded_hub: HubServer) -> None:
    page = visitors.come(crowded_hub, ADMIN)
    page.get_by_label("Search agents by name").fill("agent-19")
    expect(page.locator("#count")).to_have_text("100 of 2,012 shown")
    agent_page(page, "agent-1907")
    expect(page).to_have_url(f"http://{crowded_hub}/dashboard#agent=agent-1907")
    expect(page).to_have_title("agent-1907 - headgate")
    page.reload()
    expect(page.get_by_role("heading", name="agent-1907")).to_be_visible()
    page.go_back()
    expect(page).to_have_url(f"http://{crowded_hub}/dashboard#search=agent-19")
    expect(page.locator("#count")).to_have_text("100 of 2,012 shown")
    page.go_forward()
    expect(page.get_by_role("heading", name="agent-1907")).to_be_visible()
    page.goto(f"http://{crowded_hub}/dashboard#agent=never+seen")
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("never seen")
    visitors.forgive("404")
    page.get_by_role("link", name="All agents").click()
    expect(page.locator("#count")).to_have_text("100 of 2,012 shown")  # as it was left
