"""The dashboard of a real hub, with agents on real sockets and a clock that stands still, in a real browser."""

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from asgi import Unsignalled
from browser.visitors import Visitors, card, names
from hubs import ADMIN, VIEWER, Running, Wire, hub_settings, running
from playwright.sync_api import Page, expect
from servers import wait_for

from headgate import Policy
from headgate.hub.hub import Hub
from headgate.hub.server import Server, server_config

IMAGES = Path(__file__).parents[2] / "docs" / "images"
AT_HOME = {"exempt": ["127.0.0.1"]}  # many agents come from one address here
HOSTILE = "<img src=x onerror=alert(1)>"
BACKWARDS = "מתכנן"
LONG = "n" * 128
AWKWARD = "a/b?c#d%2e &'\""


def ping(wire: Wire, times: int) -> None:
    """Send pings, and hear what comes of each."""
    for number in range(times):
        wire.say("ping", id=number)
    answered = 0
    while answered < times:
        answered += wire.hear()["type"] in ("pong", "rate_limited")


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def dialog(page: Page, agent: str) -> Any:
    """The dialog for an agent, opened by a click."""
    page.get_by_role("button", name=f"Change the limits of {agent}", exact=True).click()
    found = page.get_by_role("dialog")
    expect(found.get_by_role("heading", level=2)).to_have_text(f"Limits of {agent}")
    return found


# What it shows --------------------------------------------------------------------------------------------------------


def test_b7_a_card_is_green_below_half_yellow_to_four_fifths_and_red_above(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner") as planner, hub.http(ADMIN) as http:
        http.put("/api/admin/rate-limits/planner", json={"light": "100/minute"}).raise_for_status()
        page = visitors.come(hub, VIEWER)
        colours: dict[str, str] = {}
        for used, level in ((0, "green"), (49, "green"), (50, "yellow"), (80, "yellow"), (81, "red"), (100, "red")):
            before = page.locator(".meter").get_attribute("aria-valuenow") if used else "0"
            ping(planner, used - int(before or 0))
            meter = card(page, "planner").get_by_role("meter")
            expect(card(page, "planner").locator(".usage")).to_have_text(f"{used} of 100 used, ws light, {used} %")
            expect(meter).to_have_attribute("data-level", level)
            expect(meter).to_have_attribute("aria-valuenow", str(used))
            expect(meter).to_have_attribute("aria-valuetext", f"{used} of 100 used, ws light, {used} %")
            page.wait_for_function(  # it gets there step by step
                "([bar, share]) => Math.abs(bar.offsetWidth / bar.parentNode.clientWidth - share) < .01",
                arg=[meter.locator("div").element_handle(), used / 100],
            )
            shown = meter.locator("div").evaluate("node => getComputedStyle(node).backgroundColor")
            assert colours.setdefault(level, shown) == shown
        assert len(set(colours.values())) == 3
        assert dominant(colours["green"]) == "green"
        assert dominant(colours["yellow"]) == "red and green"
        assert dominant(colours["red"]) == "red"


def dominant(colour: str) -> str:
    """Which parts of a colour stand out."""
    red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
    most = max(red, green, blue)
    return " and ".join(name for name, part in (("red", red), ("green", green)) if part > most * 0.6)


@pytest.mark.parametrize(
    ("limit", "pings", "text", "level"),
    [
        ("1000/minute", 801, "801 of 1,000 used, ws light, 81 %", "red"),  # 80.1 %: red, so it can't say 80
        ("1000/minute", 499, "499 of 1,000 used, ws light, 49 %", "green"),
        ("3/minute", 2, "2 of 3 used, ws light, 66 %", "yellow"),
        ("blocked", 0, "blocked, ws light", "red"),
        ("unlimited", 0, "unlimited, ws light", "green"),
    ],
)
def test_b7_the_number_and_the_colour_agree(visitors: Visitors, limit: str, pings: int, text: str, level: str) -> None:
    with running() as hub, hub.agent("planner") as planner, hub.http(ADMIN) as http:
        http.put("/api/admin/rate-limits/planner", json={"ws": {"light": limit}}).raise_for_status()
        ping(planner, pings)
        page = visitors.come(hub, VIEWER)
        expect(card(page, "planner").locator(".usage")).to_have_text(text)
        expect(card(page, "planner").get_by_role("meter")).to_have_attribute("data-level", level)


def test_b7_the_summary_and_the_cards_say_what_the_api_says(visitors: Visitors) -> None:
    with ExitStack() as stack:
        hub = stack.enter_context(running(Policy(limits={"light": "20/minute"})))
        wires = {name: stack.enter_context(hub.agent(name)) for name in ("ada", "bob", "cleo", "dora", "eve")}
        http = stack.enter_context(hub.http(ADMIN))
        http.post("/api/admin/rate-limits/whitelist", json={"agent_id": "eve"}).raise_for_status()
        http.put("/api/admin/rate-limits/dora", json={"light": "40/minute"}).raise_for_status()
        page = visitors.come(hub, VIEWER)
        for name, times in (("ada", 23), ("bob", 32), ("cleo", 21), ("dora", 41), ("eve", 100)):
            ping(wires[name], times)
        expect(page.locator("#totals")).to_have_text("217 checks since the hub started, 17 denied")
        state = http.get("/api/dashboard/state").json()
        summary = state["summary"]
        assert (summary["violations_last_hour"], summary["denied"], summary["exempt"]) == (17, 17, 1)
        for place, value in (
            ("violations", f"{summary['violations_last_hour']}"),
            ("rate", f"{summary['checks_per_second']:g}"),
            ("denied-share", f"{summary['denied_share'] * 100:.1f} %"),
            ("exempt", f"{summary['exempt']}"),
            ("store", "in memory"),
        ):
            expect(page.locator(f"#{place}")).to_have_text(value)
        worst = [f"{one['agent_id']}{one['violations']}" for one in summary["worst_offenders"]]
        assert worst == ["bob12", "ada3", "cleo1"]
        assert page.locator("#offenders li").all_text_contents() == worst
        assert sorted(names(page)) == [
            one["agent_id"] for one in sorted(state["agents"], key=lambda one: one["agent_id"])
        ]
        for one in state["agents"]:
            shown = card(page, one["agent_id"])
            expect(shown.get_by_text("rate limited")).to_be_visible(visible=one["rate_limited"])
            expect(shown.get_by_text("override")).to_be_visible(visible=one["override"])
            expect(shown.get_by_text("exempt", exact=True)).to_be_visible(visible=one["exempt"])
            some = f"violations: {one['violations']} in a row, {one['violations_last_hour']} in an hour"
            expect(shown.locator(".violations")).to_have_text(some if one["violations"] else "no violations")
        page.locator("#offenders").get_by_role("button", name="bob").click()
        assert names(page) == ["bob"]
        assert page.locator("#search").input_value() == '"bob"'


def test_b7_it_updates_by_itself_and_touches_only_what_has_changed(visitors: Visitors) -> None:
    with running() as hub, hub.agent("ada") as ada, hub.agent("bob") as bob:
        page = visitors.come(hub, VIEWER)
        expect(card(page, "bob").locator(".usage")).to_have_text("0 of 120 used, ws light, 0 %")
        page.evaluate(
            """() => {
                window.touched = new Set();
                const watch = new MutationObserver((changes) => {
                    for (const { target } of changes) {
                        const node = target.nodeType === 1 ? target : target.parentNode;
                        const agent = node.closest("li.card")?.querySelector(".name").textContent;
                        window.touched.add(agent ? `${agent}'s ${node.getAttribute("class")}` : node.id);
                    }
                });
                const how = { subtree: true, childList: true, characterData: true, attributes: true };
                watch.observe(document.getElementById("board"), how);
            }"""
        )
        ping(ada, 6)
        expect(card(page, "ada").locator(".usage")).to_have_text("6 of 120 used, ws light, 5 %", timeout=2000)
        expect(card(page, "ada").get_by_role("img")).to_have_attribute(
            "aria-label", "Last five minutes: 6 passed, 0 denied", timeout=2000
        )
        touched = set(page.evaluate("[...window.touched]"))
        assert {"ada's usage", "ada's spark", "rate", "totals"} <= touched
        assert not touched & {"ada's card", "ada's badge presence", "ada's violations small", "exempt", "violations"}
        assert not [one for one in touched if one.startswith("bob")]
        ping(bob, 1)
        expect(card(page, "bob").locator(".usage")).to_have_text("1 of 120 used, ws light, 0 %", timeout=2000)


def test_b7_agents_come_and_go(visitors: Visitors) -> None:
    with running() as hub:
        page = visitors.come(hub, VIEWER)
        expect(page.get_by_role("heading", name="No agents yet")).to_be_visible()
        expect(page.locator("#how-to-register")).to_contain_text(f"http://{hub}/api/onboard/register")
        expect(page.locator("#how-to-connect")).to_have_text(f"ws://{hub}/ws")
        with hub.agent("planner"):
            expect(card(page, "planner").locator(".presence")).to_have_text("connected", timeout=2000)
            expect(page.get_by_role("heading", name="No agents yet")).to_be_hidden()
            expect(page.locator("#count")).to_have_text("1 of 1 shown")
        expect(page.get_by_role("heading", name="No agents yet")).to_be_visible(timeout=2000)
        assert names(page) == []


def test_b7_the_wait_counts_down_by_itself_and_the_violations_are_forgotten(visitors: Visitors) -> None:
    with running(Policy(limits={"light": "2/minute"})) as hub, hub.agent("planner") as planner:
        page = visitors.come(hub, VIEWER)
        ping(planner, 5)
        waits = card(page, "planner").locator(".backoff")
        expect(waits).to_have_text("told to come back in 5 s")
        expect(card(page, "planner").get_by_text("rate limited")).to_be_visible()
        expect(waits).to_have_text("told to come back in 3 s")
        expect(waits).to_be_hidden()
        hub.clock.advance(60)
        expect(card(page, "planner").get_by_text("rate limited")).to_be_hidden(timeout=2000)
        expect(card(page, "planner").locator(".violations")).to_have_text(
            "violations: 0 in a row, 3 in an hour", timeout=2000
        )


def test_b7_the_timeline_shows_what_was_allowed_warned_and_denied(visitors: Visitors) -> None:
    with running(Policy(limits={"light": "10/minute"})) as hub, hub.agent("planner") as planner:
        ping(planner, 12)
        hub.clock.advance(120)
        page = visitors.come(hub, VIEWER)
        expect(page.locator("#sum-warned")).to_have_text("2")
        ping(planner, 5)
        sums = [page.locator(f"#sum-{kind}") for kind in ("allowed", "warned", "denied")]
        expect(sums[0]).to_have_text("13", timeout=2000)
        assert [one.text_content() for one in sums] == ["13", "2", "2"]
        expect(
            page.get_by_role("img", name="Checks in the last 15 minutes: 13 allowed, 2 warned, 2 denied")
        ).to_be_visible()
        drawn = [
            (page.locator(f"#bars-{kind}").get_attribute("d") or "").count("z")
            for kind in ("allowed", "warned", "denied")
        ]
        assert drawn == [2, 1, 1]
        page.get_by_text("As a table").click()
        rows = [row.split() for row in page.locator("#numbers-rows tr").all_inner_texts()]
        assert [row for row in rows if row[1:] != ["0", "0", "0"]] == [["0", "5", "0", "0"], ["2", "8", "2", "2"]]
        assert len(rows) == 15
        spark = card(page, "planner").get_by_role("img")
        expect(spark).to_have_attribute("aria-label", "Last five minutes: 15 passed, 2 denied")
        assert [(spark.locator("path").nth(at).get_attribute("d") or "").count("z") for at in (0, 1)] == [2, 1]
        hub.clock.advance(4 * 60)
        expect(spark).to_have_attribute("aria-label", "Last five minutes: 5 passed, 0 denied", timeout=2000)
        hub.clock.advance(10 * 60)
        expect(sums[0]).to_have_text("5", timeout=2000)


def test_b7_what_agents_are_called_is_shown_as_text(visitors: Visitors) -> None:
    with ExitStack() as stack:
        hub = stack.enter_context(running(Policy(limits={"light": "2/minute"}, alerts={"violations": 1})))
        wires = {name: stack.enter_context(hub.agent(name)) for name in (HOSTILE, BACKWARDS, LONG, AWKWARD)}
        page = visitors.come(hub, ADMIN)
        expect(page.locator("#alerts")).to_be_empty()
        for wire in wires.values():
            ping(wire, 4)
        expect(page.locator("#violations")).to_have_text("8")
        for name in wires:
            expect(card(page, name)).to_have_count(1)
        expect(page.locator("#offenders li")).to_have_count(3)
        expect(page.locator("#toasts")).to_contain_text(AWKWARD)
        assert page.locator("img").count() == 1  # the icon
        direction = "node => getComputedStyle(node).direction"
        assert card(page, BACKWARDS).locator("bdi").evaluate(direction) == "rtl"
        assert card(page, BACKWARDS).evaluate(direction) == "ltr"
        dialog(page, HOSTILE)
        assert page.locator("img").count() == 1
        press(page, "Escape")
        shown = dialog(page, AWKWARD)
        shown.get_by_label("Limit", exact=True).fill("7/minute")
        shown.get_by_role("button", name="Set override").click()
        expect(shown.get_by_role("status")).to_contain_text("7/minute")
        for button in ("Reset violations", "Exempt from limits", "Hold to limits again", "Remove override"):
            shown.get_by_role("button", name=button).click()
            expect(shown.get_by_role("status")).not_to_be_empty()
        wait_for(lambda: not hub.hub.gate.holds.overrides, "the override to be removed")
        assert not hub.hub.gate.is_rate_limited(AWKWARD)


# What the admin does --------------------------------------------------------------------------------------------------


def test_b7_an_override_set_by_clicking_lifts_the_limit(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner") as planner:
        page = visitors.come(hub, ADMIN)
        ping(planner, 120)
        assert planner.ask("ping")["type"] == "rate_limited"
        expect(card(page, "planner").get_by_text("rate limited")).to_be_visible()
        shown = dialog(page, "planner")
        assert shown.get_by_label("Tier").input_value() == "light"  # of the bucket that is nearest to its limit
        assert shown.get_by_role("row").all_inner_texts()[1].split() == ["light", "120/minute", "120/minute"]
        shown.get_by_label("Channel").select_option("ws")
        shown.get_by_label("Limit", exact=True).fill("600/minute")
        shown.get_by_role("button", name="Set override").click()
        expect(shown.get_by_role("status")).to_have_text("It has its own limit now: ws, light, 600/minute.")
        assert planner.ask("ping")["type"] == "pong"
        expect(card(page, "planner").locator(".usage")).to_contain_text("1 of 600 used, ws light", timeout=2000)
        expect(card(page, "planner").get_by_text("override")).to_be_visible()
        assert shown.get_by_role("row").all_inner_texts()[1].split() == ["light", "600/minute", "own", "120/minute"]

        shown.get_by_role("button", name="Reset violations").click()
        expect(shown.get_by_role("status")).to_have_text("Its violations are forgotten.")
        expect(card(page, "planner").get_by_text("rate limited")).to_be_hidden(timeout=2000)
        expect(page.locator("#violations")).to_have_text("0")
        expect(page.locator("#no-offenders")).to_be_visible()

        shown.get_by_role("button", name="Remove override").click()
        expect(shown.get_by_role("status")).to_have_text("Its own limits are removed.")
        expect(card(page, "planner").get_by_text("override")).to_be_hidden(timeout=2000)
        expect(shown.get_by_role("button", name="Remove override")).to_be_hidden()
        assert hub.hub.gate.holds.overrides == {}

        shown.get_by_role("button", name="Exempt from limits").click()
        expect(shown.get_by_role("status")).to_have_text("It is exempt: everything passes.")
        expect(card(page, "planner").get_by_text("exempt", exact=True)).to_be_visible(timeout=2000)
        expect(page.locator("#exempt")).to_have_text("1")
        ping(planner, 200)
        assert planner.ask("ping")["type"] == "pong"

        shown.get_by_role("button", name="Hold to limits again").click()
        expect(shown.get_by_role("status")).to_have_text("It is held to its limits again.")
        expect(card(page, "planner").locator(".usage")).to_contain_text("of 120 used", timeout=2000)
        shown.get_by_role("button", name="Close").click()
        expect(shown).to_be_hidden()
        with hub.http(ADMIN) as http:
            changes = http.get("/api/admin/changes").json()["changes"]
        assert [one["by"] for one in changes] == ["admin at 127.0.0.1"] * 4


def test_b7_what_the_hub_refuses_is_said_in_the_dialog(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner") as planner:
        planner.ask("channel_subscribe", channel="general")
        page = visitors.come(hub, ADMIN)
        shown = dialog(page, "planner")
        assert shown.get_by_label("Tier").input_value() == "normal"
        shown.get_by_label("Limit", exact=True).fill("many")
        shown.get_by_role("button", name="Set override").click()
        expect(shown.get_by_role("alert")).to_contain_text("expected 'COUNT/UNIT'")
        expect(shown.get_by_role("status")).to_be_empty()
        assert hub.hub.gate.holds.overrides == {}
        assert visitors.forgive("^400 .*/api/admin/rate-limits/planner$|status of 400") == 2  # the browser says so too
        shown.get_by_label("Limit", exact=True).fill("5/minute")
        press(page, "Enter")
        expect(shown.get_by_role("status")).to_contain_text("5/minute")
        expect(shown.get_by_role("alert")).to_be_empty()


def test_b7_a_viewer_sees_everything_and_can_change_nothing(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner"):
        page = visitors.come(hub, VIEWER)
        expect(card(page, "planner")).to_be_visible()
        expect(page.get_by_role("button", name="Change the limits of planner")).to_have_count(0)
        expect(page.get_by_role("button", name="Sign out")).to_be_visible()


# Who may look ---------------------------------------------------------------------------------------------------------


def test_b7_whoever_has_no_token_is_asked_for_one(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner"):
        page = visitors.come(hub)
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        expect(page.locator("#board")).to_be_hidden()
        expect(page.locator("#sign-in-error")).to_be_empty()
        expect(page.get_by_label("Token of the admin or a viewer")).to_be_focused()
        page.keyboard.type("not-the-token-of-anybody")
        press(page, "Enter")
        expect(page.get_by_role("alert")).to_have_text("The hub says: this needs the token of a viewer or the admin.")
        assert page.evaluate("sessionStorage.length") == 0
        page.get_by_label("Token of the admin or a viewer").fill("x" * 300)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("The hub says: Expected `str` of length <= 256")
        page.get_by_label("Token of the admin or a viewer").fill(ADMIN)
        page.get_by_role("button", name="Sign in").click()
        expect(card(page, "planner")).to_be_visible()
        expect(page.get_by_role("heading", name="Sign in")).to_be_hidden()
        page.reload()
        expect(card(page, "planner")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


def test_b7_wrong_tokens_are_limited_and_the_page_says_until_when(visitors: Visitors) -> None:
    with running(Policy(addresses={"limit": "1/minute"})) as hub:
        page = visitors.come(hub)
        page.get_by_label("Token of the admin or a viewer").fill("not-the-token-of-anybody")
        press(page, "Enter")
        expect(page.get_by_role("alert")).to_have_text("The hub says: too many wrong tokens; try again in 60 s.")


def test_b7_a_token_in_the_address_is_taken_from_it_at_once(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner"):
        page = visitors.come(hub, ADMIN)
        expect(card(page, "planner")).to_be_visible()
        assert page.url == f"http://{hub}/dashboard"
        page.evaluate("token => { location.hash = `token=${token}` }", VIEWER)  # another link, in the same tab
        expect(page.get_by_role("button", name="Change the limits of planner")).to_have_count(0)
        assert page.url == f"http://{hub}/dashboard"
        page.evaluate("location.hash = 'token=a-link-of-yesterday'")
        expect(page.get_by_role("alert")).to_contain_text("A link is good until its hub stops")


def test_b7_a_public_dashboard_needs_no_token_to_look(visitors: Visitors) -> None:
    with running(public_dashboard=True) as hub, hub.agent("planner"):
        page = visitors.come(hub)
        expect(card(page, "planner")).to_be_visible()
        change = page.get_by_role("button", name="Change the limits of planner")
        expect(change).to_have_count(0)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_label("Token of the admin or a viewer").fill(ADMIN)
        press(page, "Enter")
        expect(change).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("button", name="Sign in")).to_be_visible()
        expect(card(page, "planner")).to_be_visible()
        expect(change).to_have_count(0)


def test_b7_there_may_be_so_many_dashboards_and_the_next_one_waits(visitors: Visitors) -> None:
    with running(max_dashboards=1) as hub, hub.agent("planner"):
        first = visitors.come(hub, VIEWER)
        expect(card(first, "planner")).to_be_visible()
        second = visitors.come(hub, VIEWER)
        expect(second.locator("#state")).to_contain_text("too many dashboards are open: the hub takes 1")
        first.close()
        expect(card(second, "planner")).to_be_visible()
        expect(second.locator("#state")).to_have_text("Live")


def test_b7_it_stays_away_for_as_long_as_the_hub_asks_unless_the_network_is_back(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner"):
        page = visitors.come(hub, VIEWER)
        expect(card(page, "planner")).to_be_visible()
        page.clock.install()
        page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 1)  # from here on the page's time is ours
        opened: list[str] = []
        page.on("websocket", lambda socket: opened.append(socket.url))

        def turned_away() -> None:
            for socket in hub.call(lambda: hub.hub.board.sockets):
                hub.run(socket.send('{"type": "going_away", "retry_after_ms": 4000}'))
                hub.run(socket.close(1012))
            expect(page.locator("#state")).to_contain_text("Reconnecting")

        turned_away()
        page.clock.run_for(3900)
        assert opened == []
        page.clock.run_for(200)
        expect(page.locator("#state")).to_have_text("Live")
        turned_away()
        page.evaluate("() => { dispatchEvent(new Event('online')); }")
        expect(page.locator("#state")).to_have_text("Live")


# Finding an agent -----------------------------------------------------------------------------------------------------


def test_b7_search_filters_and_orders_among_300_agents(visitors: Visitors) -> None:
    with ExitStack() as stack:
        policy = Policy(limits={"light": "20/minute"}, addresses=AT_HOME)
        hub = stack.enter_context(running(policy, max_connections_per_address=1000))
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
        page.get_by_label("Sort by").select_option("name")
        assert names(page) == agents
        page.get_by_label("Sort by").select_option("violations")
        assert names(page)[:3] == ["agent-007", "agent-013", "agent-000"]
        page.get_by_label("Sort by").select_option("traffic")
        assert names(page)[:5] == ["agent-007", "agent-013", "agent-299", "agent-100", "agent-000"]
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
        assert page.url == f"http://{hub}/dashboard#search=nobody&show=exempt&sort=traffic"
        page.get_by_role("button", name="Show all agents").click()
        assert len(names(page)) == 300
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
        expect(page.locator("#count")).to_have_text("9 of 299 shown", timeout=2000)
        page.get_by_role("radio", name="connected 299").check()
        assert len(names(page)) == 9
        press(page, "/", "Escape")
        assert len(names(page)) == 299


def test_b7_only_the_first_500_are_shown_and_the_page_says_how_many_more_there_are(visitors: Visitors) -> None:
    with running() as hub, hub.http(ADMIN) as http:
        agents = [f"agent-{number:03}" for number in range(512)]
        http.put("/api/admin/rate-limits/whitelist", json={"agents": agents}).raise_for_status()
        page = visitors.come(hub, VIEWER)
        expect(page.locator("#agents > li")).to_have_count(500)
        expect(page.locator("#count")).to_have_text("500 of 512 shown")
        expect(page.locator("#more")).to_contain_text("12 more are not shown")


def test_b7_cards_stay_where_they_are_while_somebody_is_at_them(visitors: Visitors) -> None:
    with running() as hub, hub.agent("ada") as ada, hub.agent("bob") as bob:
        ping(ada, 10)
        page = visitors.come(hub, ADMIN)
        expect(card(page, "bob")).to_be_visible()
        assert names(page) == ["ada", "bob"]
        button = page.get_by_role("button", name="Change the limits of bob")
        button.focus()
        ping(bob, 20)
        expect(card(page, "bob").locator(".usage")).to_contain_text("20 of 120", timeout=2000)
        began = page.evaluate("performance.now()")

        def is_late() -> bool:
            press(page, "Shift")
            assert names(page) == ["ada", "bob"]
            return bool(page.evaluate("performance.now()") > began + 7000)

        wait_for(is_late, "the time after which they would move")
        expect(page.locator("#agents > li").first).to_contain_text("bob")
        expect(button).to_be_focused()


# Alerts ---------------------------------------------------------------------------------------------------------------


def test_b8_an_alert_is_announced_once_and_shown_as_resolved_in_the_end(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner") as planner, hub.agent("old") as old:
        ping(old, 131)
        page = visitors.come(hub, VIEWER, permissions=["notifications"])
        page.evaluate(
            """() => {
                window.notified = [];
                const Real = Notification;
                window.Notification = class extends Real {
                    constructor(title, options) {
                        super(title, options);
                        window.notified.push(options.body);
                    }
                };
            }"""
        )
        expect(page.locator("#alerts li")).to_have_count(1)
        expect(page.locator("#toasts")).to_be_empty()  # it was there before
        notify = page.get_by_role("button", name="Notify me")
        expect(notify).to_have_attribute("aria-pressed", "false")
        notify.click()
        expect(notify).to_have_attribute("aria-pressed", "true")
        ping(planner, 129)
        expect(card(page, "planner").locator(".violations")).to_contain_text("9 in a row")
        expect(page.locator("#alerts li")).to_have_count(1)
        ping(planner, 20)
        expect(page.locator("#toasts .toast")).to_have_count(1)
        expect(page.locator("#toasts")).to_contain_text("planner: 10 violations within 5 min")
        expect(page.locator("#alerts li")).to_have_count(2)
        expect(page).to_have_title("(2) headgate")
        for socket in hub.call(lambda: hub.hub.board.sockets):
            hub.run(socket.close(1001))
        expect(page.locator("#state")).to_contain_text("Reconnecting")
        expect(page.locator("#state")).to_have_text("Live")
        ping(planner, 1)
        expect(card(page, "planner").locator(".violations")).to_contain_text("30 in a row")
        expect(page.locator("#toasts .toast")).to_have_count(1)
        assert page.evaluate("window.notified") == ["planner: 10 violations within 5 min"]
        hub.clock.advance(60)
        expect(page.locator("#alerts [data-open=true]")).to_have_count(0)
        expect(page.locator("#alerts li").first).to_contain_text("resolved")
        expect(page.locator("#toasts")).to_be_empty()
        expect(page).to_have_title("headgate")
        notify.click()
        expect(notify).to_have_attribute("aria-pressed", "false")
        with hub.agent("late") as late:
            ping(late, 131)
            expect(page.locator("#toasts")).to_contain_text("late: 10 violations within 5 min")
        assert len(page.evaluate("window.notified")) == 1
        page.locator("#alerts").get_by_role("button", name="old").click()
        assert names(page) == ["old"]


def test_b8_a_notice_can_be_dismissed_and_comes_back_when_it_goes_on(visitors: Visitors) -> None:
    with running(Policy(limits={"light": "1/day"})) as hub, hub.agent("planner") as planner:
        page = visitors.come(hub, VIEWER)
        expect(card(page, "planner")).to_be_visible()
        ping(planner, 11)
        page.get_by_role("button", name="Dismiss").click()
        expect(page.locator("#toasts")).to_be_empty()
        expect(page.locator("#alerts li")).to_have_count(1)
        for _ in range(7):  # never quiet, for longer than the window
            hub.clock.advance(50)
            ping(planner, 2)
        expect(page.locator("#toasts .toast")).to_have_count(1)
        expect(page.locator("#toasts")).to_contain_text("2 times over")
        expect(page.locator("#alerts li")).to_have_count(1)


def test_b8_nobody_is_asked_to_allow_notifications_unless_they_click(visitors: Visitors) -> None:
    with running() as hub:
        page = visitors.come(hub, VIEWER)
        page.evaluate(
            "() => { Notification.requestPermission = async () => { window.asked = true; return 'denied'; }; }"
        )
        expect(page.get_by_role("heading", name="No agents yet")).to_be_visible()
        assert page.evaluate("window.asked") is None
        page.get_by_role("button", name="Notify me").click()
        expect(page.locator("#toasts")).to_contain_text("doesn't let the dashboard notify you")
        assert page.evaluate("window.asked") is True


# For everybody --------------------------------------------------------------------------------------------------------


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
def test_b7_everybody_can_use_it(
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


def test_b7_everybody_can_sign_in_and_see_that_there_is_nothing_to_see(
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


class _Server(Unsignalled, Server):  # type: ignore[misc]
    """The hub's own."""


class Below(Running):
    """A hub below a path, as a proxy may put it there."""

    async def serve(self) -> None:
        async with Hub(self._settings, self._policy, store=self.store) as hub:
            self.hub = hub

            async def app(scope: Any, receive: Any, send: Any) -> None:
                assert scope["path"].startswith("/gate/")
                path = scope["path"].removeprefix("/gate")
                raw = scope["raw_path"].removeprefix(b"/gate")
                await hub({**scope, "path": path, "raw_path": raw}, receive, send)

            config = server_config(hub, self._settings)
            config.app, config.host, config.port = app, "127.0.0.1", 0
            self.server = _Server(hub, config)
            await self.server.serve()


def test_b7_it_works_below_a_path(visitors: Visitors) -> None:
    hub = Below(hub_settings())
    try:
        hub.run(hub.hub.gate.aadd_exemption("planner"))
        page = visitors.come(hub, ADMIN, path="/gate/dashboard")
        expect(card(page, "planner")).to_be_visible()
        dialog(page, "planner").get_by_role("button", name="Hold to limits again").click()
        expect(page.get_by_role("heading", name="No agents yet")).to_be_attached()
        wait_for(lambda: not hub.hub.gate.holds.exempt, "the exemption to be gone")
        expect(page.locator("#how-to-connect")).to_have_text(f"ws://{hub}/gate/ws")
    finally:
        hub.stop()
