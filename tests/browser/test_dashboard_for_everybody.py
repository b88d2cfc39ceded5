"""The dashboard for everybody: by keyboard, on a phone, in light and dark, checked by axe-core, and below a path."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from headgate import Policy
from headgate.hub.app import Hub
from tests.support.agent_connections import ping
from tests.support.agent_names import HOSTILE, LONG
from tests.support.browser import Visitors, agent_page, card, names, press, shown_page
from tests.support.hub import ADMIN, VIEWER, HubServer, hub_server, hub_settings
from tests.support.valkey import wait_for

IMAGES = Path(__file__).parents[2] / "docs" / "images"
AT_HOME = {"exempt": ["127.0.0.1"]}  # many agents come from one address here


@pytest.fixture(scope="module")
def busy_hub() -> Iterator[HubServer]:
    """A hub at which a lot has gone on for a quarter of an hour."""
    chance = random.Random(7)
    ordinary = {"writer": 4, "reviewer": 3, "indexer": 5, "translator": 2, "summariser": 3, "archivist": 1}
    ordinary |= {"planner": 5, "researcher": 6, "mailer": 1, "scheduler": 2, "billing": 9, "tester": 2}
    floods = {"analyst": range(35, 70), "crawler": range(140, 180), "importer": range(95, 118)}
    rush = {"researcher": 16, "planner": 13, "writer": 15, "indexer": 11}
    with ExitStack() as stack:
        hub = stack.enter_context(hub_server(Policy(addresses=AT_HOME)))
        http = stack.enter_context(hub.http(ADMIN))
        http.post("/api/admin/rate-limits/whitelist", json={"agent_id": "billing"}).raise_for_status()
        http.put("/api/admin/rate-limits/planner", json={"light": "100/minute"}).raise_for_status()
        wires = {name: stack.enter_context(hub.agent(name)) for name in [*ordinary, *floods]}
        for slot in range(180):
            for name, rate in ordinary.items():
                ping(wires[name], chance.randrange(rate + 1))
            for name, when in floods.items():
                wires[name].say("list_channels" if slot in when else "ping")
                ping(wires[name], chance.randrange(12, 26) if slot in when else chance.randrange(4))
            for name, rate in rush.items():
                ping(wires[name], rate if slot > 171 else 0)
            if slot < 179:
                hub.clock.advance(5)
        wires["scheduler"].socket.close()
        for number in range(20):
            http.post("/api/admin/tasks", json={"payload": number}).raise_for_status()
        yield hub


LOOKS: dict[str, dict[str, Any]] = {
    "dashboard": {"viewport": {"width": 1280, "height": 860}},
    "dashboard-dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "dashboard-phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}


PICTURES = {"dashboard", "dashboard-dark-table", "dashboard-agent", "dashboard-phone"}


def take_screenshot(page: Page, name: str) -> None:
    """A picture for the docs, if the environment asks for it and they show this one."""
    if os.environ.get("HEADGATE_SCREENSHOTS") and name in PICTURES:
        page.screenshot(path=IMAGES / f"{name}.png", animations="disabled")


@pytest.mark.parametrize("name", LOOKS)
def test_b7_the_dashboard_is_accessible(
    visitors: Visitors, busy_hub: HubServer, axe: Callable[[Page], list[str]], name: str
) -> None:
    page = visitors.come(busy_hub, ADMIN, **LOOKS[name])
    expect(page.locator("#agents > li")).to_have_count(15)
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == name.endswith("dark")
    take_screenshot(page, name)
    assert axe(page) == []
    page.get_by_role("button", name="Table").click()
    expect(page.locator("#rows > .tr")).to_have_count(15)
    take_screenshot(page, f"{name}-table")
    if page.get_by_role("button", name="More").is_visible():
        page.get_by_role("button", name="More").click()
    page.get_by_text("As a table").click()
    page.locator("#timeline").focus()
    assert axe(page) == []
    page.locator("#alerts").get_by_role("link", name="crawler").click()
    shown = shown_page(page, "crawler")
    take_screenshot(page, f"{name}-agent")
    shown.get_by_role("button", name="Block").click()
    assert axe(page) == []


def test_b7_the_sign_in_form_and_the_empty_dashboard_are_accessible(
    visitors: Visitors, axe: Callable[[Page], list[str]]
) -> None:
    with hub_server() as hub:
        for scheme in ("light", "dark"):
            page = visitors.come(hub, color_scheme=scheme)
            expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
            page.get_by_label("Token of an admin or a viewer").fill("not-the-token-of-anybody")
            press(page, "Enter")
            expect(page.get_by_role("alert")).not_to_be_empty()
            assert axe(page) == []
            page.get_by_label("Token of an admin or a viewer").fill(VIEWER)
            press(page, "Enter")
            expect(page.get_by_role("heading", name="No agents yet")).to_be_visible()
            assert axe(page) == []


def test_b7_a_phone_scrolls_in_one_direction_only(visitors: Visitors) -> None:
    with ExitStack() as stack:
        hub = stack.enter_context(hub_server(Policy(limits={"light": "2/minute"})))
        for name in (LONG, "w " * 60, HOSTILE):
            ping(stack.enter_context(hub.agent(name.strip())), 20)
        page = visitors.come(hub, ADMIN, viewport={"width": 320, "height": 640})
        expect(page.locator("#offenders li")).to_have_count(3)
        too_wide = "document.documentElement.scrollWidth - innerWidth"
        assert page.evaluate(too_wide) == 0
        page.get_by_role("button", name="More").click()
        expect(page.locator("#offenders li").first).to_be_visible()
        assert page.evaluate(too_wide) == 0
        page.get_by_role("button", name="Table").click()
        assert page.evaluate(too_wide) == 0
        agent_page(page, LONG).get_by_role("button", name="Block").click()
        assert page.evaluate(too_wide) == 0
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert page.evaluate(too_wide) == 0


def test_b7_everything_can_be_done_by_the_keyboard(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("ada"), hub.agent("bob"):
        page = visitors.come(hub)
        expect(page.get_by_label("Token of an admin or a viewer")).to_be_focused()
        page.keyboard.type(ADMIN)
        press(page, "Enter")
        expect(card(page, "bob")).to_be_visible()
        expect(page.get_by_role("main")).to_be_focused()
        page.reload()
        expect(card(page, "bob")).to_be_visible()
        press(page, "Tab")
        expect(page.get_by_role("link", name="Skip to the agents")).to_be_focused()
        expect(page.get_by_role("link", name="Skip to the agents")).to_be_in_viewport()
        press(page, "Enter")
        expect(page.get_by_label("Search agents by name")).to_be_focused()
        press(page, "b", "Tab", "Tab", "Tab", "Tab")
        assert names(page) == ["bob"]
        expect(page.get_by_role("radio", name="all")).to_be_focused()
        press(page, "ArrowRight")
        expect(page.get_by_role("radio", name="connected")).to_be_checked()
        assert names(page) == ["bob"]
        press(page, "Tab")
        link = page.locator("#list").get_by_role("link", name="bob")
        expect(link).to_be_focused()
        assert link.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
        press(page, "Enter")
        shown = shown_page(page, "bob")
        expect(shown.get_by_role("heading", name="bob")).to_be_focused()
        press(page, "Tab")
        expect(shown.get_by_role("button", name="Block", exact=True)).to_be_focused()
        press(page, "Tab", "Enter")
        expect(shown.locator("#confirm").get_by_role("button", name="Disconnect")).to_be_focused()
        press(page, "Escape")
        expect(shown.locator("#confirm")).to_be_hidden()
        expect(shown.get_by_role("button", name="Disconnect")).to_be_focused()
        shown.get_by_label("Limit", exact=True).focus()
        page.keyboard.type("9/minute")
        press(page, "Enter")
        expect(shown.locator("#agent-state").get_by_text("override")).to_be_visible()
        page.go_back()
        expect(link).to_be_focused()
        expect(card(page, "bob").get_by_text("override")).to_be_visible()


def test_b7_light_and_dark_are_as_the_system_says_unless_somebody_chooses(visitors: Visitors) -> None:
    with hub_server() as hub:
        page = visitors.come(hub, VIEWER, color_scheme="dark")
        ground = "getComputedStyle(document.body).backgroundColor"
        expect(page.get_by_role("heading", name="No agents yet")).to_be_visible()
        dark = page.evaluate(ground)
        page.get_by_role("button", name="Light").click()
        light = page.evaluate(ground)
        assert light != dark
        page.reload()
        expect(page.get_by_role("button", name="Dark")).to_be_visible()
        assert page.evaluate(ground) == light
        page.get_by_role("button", name="Dark").click()
        assert page.evaluate(ground) == dark
        page.emulate_media(color_scheme="light")
        expect(page.get_by_role("button", name="Dark")).to_be_visible()  # the page is told of it a moment later
        assert page.evaluate(ground) == light


class HubBelowPath(HubServer):
    """A hub below a path, as a proxy may put it there."""

    def mount(self, hub: Hub) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert scope["path"].startswith("/gate/")
            path = scope["path"].removeprefix("/gate")
            raw = scope["raw_path"].removeprefix(b"/gate")
            await hub({**scope, "path": path, "raw_path": raw}, receive, send)

        return app


def test_b7_it_works_below_a_path(visitors: Visitors) -> None:
    hub = HubBelowPath(hub_settings())
    try:
        hub.run(hub.hub.gate.aadd_exemption("planner"))
        page = visitors.come(hub, ADMIN, path="/gate/dashboard")
        expect(card(page, "planner")).to_be_visible()
        agent_page(page, "planner").get_by_role("button", name="Hold to limits again").click()
        wait_for(lambda: not hub.hub.gate.effective.exempt, "the exemption to be gone")
        page.get_by_role("link", name="All agents").click()
        expect(page).to_have_url(f"http://{hub}/gate/dashboard")
        expect(page.get_by_role("heading", name="No agents yet")).to_be_visible()
        expect(page.locator("#how-to-connect")).to_have_text(f"ws://{hub}/gate/ws")
        visitors.forgive("404")  # nobody has registered it, and now it is not exempt either
    finally:
        hub.stop()
