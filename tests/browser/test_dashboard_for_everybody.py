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
from tests.support.agent_names import BACKWARDS, HOSTILE, LONG
from tests.support.browser import Visitors, card, dialog, names, press
from tests.support.hub import ADMIN, VIEWER, Running, hub_settings, running
from tests.support.valkey import wait_for

IMAGES = Path(__file__).parents[2] / "docs" / "images"
AT_HOME = {"exempt": ["127.0.0.1"]}  # many agents come from one address here


@pytest.fixture(scope="module")
def busy() -> Iterator[Running]:
    """A hub at which a lot has gone on for a quarter of an hour."""
    chance = random.Random(7)
    ordinary = {"writer": 4, "reviewer": 3, "indexer-1": 5, "indexer-2": 5, "translator": 2, "summariser": 3}
    ordinary |= {"planner": 5, "research": 6, "mail-bot": 1, "night-shift": 2, "billing": 9, BACKWARDS: 1}
    floods = {HOSTILE: range(35, 70), "crawler-eu": range(140, 180), "scraper": range(95, 118)}
    rush = {"research": 16, "planner": 13, "writer": 15, "indexer-1": 11}
    with ExitStack() as stack:
        hub = stack.enter_context(running(Policy(addresses=AT_HOME)))
        http = stack.enter_context(hub.http(ADMIN))
        http.post("/api/admin/rate-limits/whitelist", json={"agent_id": "billing"}).raise_for_status()
        http.put("/api/admin/rate-limits/planner", json={"light": "100/minute"}).raise_for_status()
        wires = {name: stack.enter_context(hub.agent(name)) for name in [*ordinary, *floods]}
        for slot in range(180):
            for name, rate in ordinary.items():
                ping(wires[name], chance.randrange(rate + 1))
            for name, when in floods.items():
                ping(wires[name], chance.randrange(12, 26) if slot in when else chance.randrange(4))
            for name, rate in rush.items():
                ping(wires[name], rate if slot > 171 else 0)
            if slot < 179:
                hub.clock.advance(5)
        wires["night-shift"].socket.close()
        yield hub


LOOKS: dict[str, dict[str, Any]] = {
    "dashboard": {"viewport": {"width": 1280, "height": 860}},
    "dashboard-dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "dashboard-phone": {"viewport": {"width": 360, "height": 760}, "is_mobile": True, "has_touch": True},
}


@pytest.mark.parametrize("name", LOOKS)
def test_b7_the_dashboard_is_accessible(
    visitors: Visitors, busy: Running, axe: Callable[[Page], list[str]], name: str
) -> None:
    page = visitors.come(busy, ADMIN, **LOOKS[name])
    expect(page.locator("#agents > li")).to_have_count(15)
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == name.endswith("dark")
    if os.environ.get("HEADGATE_SCREENSHOTS"):
        IMAGES.mkdir(exist_ok=True)
        page.screenshot(path=IMAGES / f"{name}.png", animations="disabled")
    assert axe(page) == []
    page.get_by_text("As a table").click()
    page.locator(".change").first.click()
    expect(page.get_by_role("dialog").get_by_role("row")).to_have_count(4)
    assert axe(page) == []


def test_b7_the_sign_in_form_and_the_empty_dashboard_are_accessible(
    visitors: Visitors, axe: Callable[[Page], list[str]]
) -> None:
    with running() as hub:
        for scheme in ("light", "dark"):
            page = visitors.come(hub, color_scheme=scheme)
            expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
            page.get_by_label("Token of the admin or a viewer").fill("not-the-token-of-anybody")
            press(page, "Enter")
            expect(page.get_by_role("alert")).not_to_be_empty()
            assert axe(page) == []
            page.get_by_label("Token of the admin or a viewer").fill(VIEWER)
            press(page, "Enter")
            expect(page.get_by_role("heading", name="No agents yet")).to_be_visible()
            assert axe(page) == []


def test_b7_a_phone_scrolls_in_one_direction_only(visitors: Visitors) -> None:
    with ExitStack() as stack:
        hub = stack.enter_context(running(Policy(limits={"light": "2/minute"})))
        for name in (LONG, "w " * 60, HOSTILE):
            ping(stack.enter_context(hub.agent(name.strip())), 20)
        page = visitors.come(hub, ADMIN, viewport={"width": 320, "height": 640})
        expect(page.locator("#offenders li")).to_have_count(3)
        too_wide = "document.documentElement.scrollWidth - innerWidth"
        assert page.evaluate(too_wide) == 0
        dialog(page, LONG)
        assert page.evaluate(too_wide) == 0
        assert page.get_by_role("dialog").evaluate("node => node.scrollWidth - node.clientWidth") <= 0
        press(page, "Escape")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert page.evaluate(too_wide) == 0


def test_b7_everything_can_be_done_by_the_keyboard(visitors: Visitors) -> None:
    with running() as hub, hub.agent("ada"), hub.agent("bob"):
        page = visitors.come(hub)
        expect(page.get_by_label("Token of the admin or a viewer")).to_be_focused()
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
        press(page, "b", "Tab", "Tab")
        assert names(page) == ["bob"]
        expect(page.get_by_role("radio", name="all")).to_be_focused()
        press(page, "ArrowRight")
        expect(page.get_by_role("radio", name="connected")).to_be_checked()
        assert names(page) == ["bob"]
        press(page, "Tab")
        button = page.get_by_role("button", name="Change the limits of bob")
        expect(button).to_be_focused()
        assert button.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
        press(page, "Enter")
        expect(page.get_by_label("Limit", exact=True)).to_be_focused()
        page.keyboard.type("9/minute")
        press(page, "Enter")
        expect(card(page, "bob").get_by_text("override")).to_be_visible()
        press(page, "Shift+Tab", "Shift+Tab", "Shift+Tab")
        expect(page.get_by_role("button", name="Close")).to_be_focused()
        press(page, "Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(button).to_be_focused()


def test_b7_light_and_dark_are_as_the_system_says_unless_somebody_chooses(visitors: Visitors) -> None:
    with running() as hub:
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


class Below(Running):
    """A hub below a path, as a proxy may put it there."""

    def mount(self, hub: Hub) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert scope["path"].startswith("/gate/")
            path = scope["path"].removeprefix("/gate")
            raw = scope["raw_path"].removeprefix(b"/gate")
            await hub({**scope, "path": path, "raw_path": raw}, receive, send)

        return app


def test_b7_it_works_below_a_path(visitors: Visitors) -> None:
    hub = Below(hub_settings())
    try:
        hub.run(hub.hub.gate.aadd_exemption("planner"))
        page = visitors.come(hub, ADMIN, path="/gate/dashboard")
        expect(card(page, "planner")).to_be_visible()
        dialog(page, "planner").get_by_role("button", name="Hold to limits again").click()
        expect(page.get_by_role("heading", name="No agents yet")).to_be_attached()
        wait_for(lambda: not hub.hub.gate.effective.exempt, "the exemption to be gone")
        expect(page.locator("#how-to-connect")).to_have_text(f"ws://{hub}/gate/ws")
    finally:
        hub.stop()
