"""Use of the dashboard of a real hub: by the admin, by viewers, and by others."""

import re

from playwright.sync_api import Locator, expect

from headgate import Policy
from tests.support.agent_connections import ping
from tests.support.browser import Visitors, agent_page, card, press, shown_page
from tests.support.hub import ADMIN, VIEWER, hub_server

# What the admin does --------------------------------------------------------------------------------------------------


def limits(shown: Locator) -> list[list[str]]:
    """The words of the limits on an agent's page: bucket, used, limit."""
    return [one.split() for one in shown.locator("#limits tbody tr").all_inner_texts()]


def test_b7_an_override_set_by_clicking_lifts_the_limit(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("planner") as planner:
        page = visitors.come(hub, ADMIN)
        ping(planner, 120)
        assert planner.ask("ping")["type"] == "rate_limited"
        expect(card(page, "planner").get_by_text("rate limited")).to_be_visible()
        shown = agent_page(page, "planner")
        state = shown.locator("#agent-state")
        assert shown.get_by_label("Tier").input_value() == "light"  # of the bucket that is nearest to its limit
        assert limits(shown)[0] == ["ws", "light", "120", "of", "120", "120/minute"]
        shown.get_by_label("Channel").select_option("ws")
        shown.get_by_label("Limit", exact=True).fill("600/minute")
        shown.get_by_role("button", name="Set override").click()
        done = shown.locator("#override-done")
        expect(done).to_have_text("It now has its own limit: ws, light, 600/minute.")
        assert planner.ask("ping")["type"] == "pong"
        expect(shown.locator("#limits tbody tr").first).to_have_text("ws light1 of 600600/minuteown")
        expect(state.get_by_text("override")).to_be_visible()
        assert limits(shown)[3][-1] == "120/minute"  # by HTTP

        shown.get_by_role("button", name="Reset violations").click()
        acted = shown.locator("#change-done")
        expect(acted).to_have_text("Its violations are reset.")
        expect(state.get_by_text("rate limited")).to_be_hidden()
        expect(shown.locator("#agent-violations-hour")).to_have_text("0")

        shown.get_by_role("button", name="Remove override").click()
        expect(done).to_have_text("Its override is removed.")
        expect(state.get_by_text("override")).to_be_hidden()
        expect(shown.get_by_role("button", name="Remove override")).to_be_hidden()
        assert hub.hub.gate.effective.overrides == {}

        shown.get_by_role("button", name="Exempt from limits").click()
        expect(acted).to_have_text("It is exempt: everything passes.")
        expect(state.get_by_text("exempt", exact=True)).to_be_visible()
        expect(shown.locator("#limits-title")).to_have_text("It is exempt: none of these applies.")
        ping(planner, 200)
        assert planner.ask("ping")["type"] == "pong"

        shown.get_by_role("button", name="Hold to limits again").click()
        expect(acted).to_have_text("It is held to its limits again.")
        page.get_by_role("link", name="All agents").click()
        expect(card(page, "planner").locator(".usage")).to_contain_text("of 120 used")
        expect(page.locator("#no-offenders")).to_be_visible()
        with hub.http(ADMIN) as http:
            changes = http.get("/api/admin/changes").json()["changes"]
        assert [one["by"] for one in changes] == ["admin at 127.0.0.1"] * 4


def test_b7_a_tier_of_the_policy_can_be_overridden(visitors: Visitors) -> None:
    policy = Policy(tiers=["bulk"], limits={"bulk": "2/minute"}, actions={"ws": {"ping": "bulk"}})
    with hub_server(policy) as hub, hub.agent("planner") as planner:
        page = visitors.come(hub, ADMIN)
        ping(planner, 2)
        expect(card(page, "planner").locator(".usage")).to_contain_text("2 of 2 used, ws bulk")
        shown = agent_page(page, "planner")
        assert shown.get_by_label("Tier").input_value() == "bulk"
        tiers = ["light", "normal", "heavy", "bulk", "each session"]
        assert shown.get_by_label("Tier").locator("option").all_inner_texts() == tiers
        shown.get_by_label("Limit", exact=True).fill("7/minute")
        shown.get_by_role("button", name="Set override").click()
        done = shown.locator("#override-done")
        expect(done).to_have_text("It now has its own limit: every channel, bulk, 7/minute.")
        assert hub.hub.gate.capacity("planner", "http", "bulk") == 7
        shown.get_by_label("Tier").select_option("session")
        shown.get_by_label("Limit", exact=True).fill("3/minute")
        shown.get_by_role("button", name="Set override").click()
        expect(done).to_have_text("It now has its own limit: each session, 3/minute.")
        expect(shown.locator("#limits tbody tr").last).to_have_text("each session3/minuteown")


def test_b7_a_refusal_is_shown_beside_its_field(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("planner") as planner:
        planner.ask("channel_subscribe", channel="general")
        page = visitors.come(hub, ADMIN)
        shown = agent_page(page, "planner")
        assert shown.get_by_label("Tier").input_value() == "normal"
        limit = shown.get_by_label("Limit", exact=True)
        limit.fill("many")
        shown.get_by_role("button", name="Set override").click()
        expect(shown.locator("#override-error")).to_contain_text("expected 'COUNT/UNIT'")
        expect(limit).to_be_focused()
        expect(limit).to_have_accessible_description(re.compile("expected 'COUNT/UNIT'"))
        expect(limit).to_have_attribute("aria-invalid", "true")
        expect(shown.get_by_role("status").filter(visible=True)).to_have_count(0)
        assert hub.hub.gate.effective.overrides == {}
        assert visitors.forgive("^400 .*/api/admin/rate-limits/planner$|status of 400") == 2  # the browser says so too
        limit.fill("5/minute")
        press(page, "Enter")
        expect(shown.locator("#override-done")).to_contain_text("5/minute")
        expect(shown.get_by_role("alert").filter(visible=True)).to_have_count(0)
        expect(limit).not_to_have_attribute("aria-invalid", "true")


def test_b7_a_viewer_sees_everything_and_can_change_nothing(visitors: Visitors) -> None:
    with hub_server(Policy(limits={"light": "2/minute"})) as hub, hub.agent("planner") as planner:
        ping(planner, 5)
        page = visitors.come(hub, VIEWER)
        expect(page.get_by_role("button", name="Sign out")).to_be_visible()
        shown = agent_page(page, "planner")
        expect(shown.locator("#denied-actions tbody tr")).to_have_text("ws pinglight33")
        expect(shown.get_by_role("button")).to_have_count(0)
        expect(shown.get_by_role("textbox")).to_have_count(0)


# Who may look ---------------------------------------------------------------------------------------------------------


def test_b7_a_visitor_without_a_token_is_asked_for_one(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("planner"):
        page = visitors.come(hub)
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        expect(page.locator("#board")).to_be_hidden()
        expect(page.locator("#sign-in-error")).to_be_empty()
        expect(page.get_by_label("Token of an admin or a viewer")).to_be_focused()
        page.keyboard.type("not-the-token-of-anybody")
        press(page, "Enter")
        expect(page.get_by_role("alert")).to_have_text("The hub says: this needs the token of a viewer or the admin.")
        assert page.evaluate("sessionStorage.length") == 0
        page.get_by_label("Token of an admin or a viewer").fill("x" * 300)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("The hub says: Expected `str` of length <= 256")
        page.get_by_label("Token of an admin or a viewer").fill(ADMIN)
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
    with hub_server(Policy(addresses={"authentication": "1/minute"})) as hub:
        page = visitors.come(hub)
        page.get_by_label("Token of an admin or a viewer").fill("not-the-token-of-anybody")
        press(page, "Enter")
        expect(page.get_by_role("alert")).to_have_text("The hub says: too many wrong tokens; try again in 60 s.")


def test_b7_a_token_is_removed_from_the_address_at_once(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("planner"):
        page = visitors.come(hub, ADMIN)
        expect(card(page, "planner")).to_be_visible()
        expect(page).to_have_url(f"http://{hub}/dashboard")
        page.evaluate("token => { location.hash = `token=${token}` }", VIEWER)  # another link, in the same tab
        block = agent_page(page, "planner").get_by_role("button", name="Block")
        expect(block).to_have_count(0)
        page.go_back()
        expect(page).to_have_url(f"http://{hub}/dashboard")
        page.evaluate("location.hash = 'token=a-link-of-yesterday'")
        expect(page.get_by_role("alert")).to_contain_text("A link is valid until its hub stops")


def test_b7_a_public_dashboard_needs_no_token_to_look(visitors: Visitors) -> None:
    with hub_server(public_dashboard=True) as hub, hub.agent("planner"):
        page = visitors.come(hub)
        expect(card(page, "planner")).to_be_visible()
        page.locator("#list").get_by_role("link", name="planner").click()
        expect(page.get_by_text("Sign in to see what it was denied")).to_be_visible()
        change = page.get_by_role("button", name="Block")
        expect(change).to_have_count(0)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_label("Token of an admin or a viewer").fill(ADMIN)
        press(page, "Enter")
        shown_page(page, "planner")
        expect(change).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("button", name="Sign in")).to_be_visible()
        expect(change).to_have_count(0)


def test_b7_a_dashboard_above_the_maximum_waits(visitors: Visitors) -> None:
    with hub_server(max_dashboards=1) as hub, hub.agent("planner"):
        first = visitors.come(hub, VIEWER)
        expect(card(first, "planner")).to_be_visible()
        second = visitors.come(hub, VIEWER)
        expect(second.locator("#state")).to_contain_text("too many dashboards are open: the hub takes 1")
        first.close()
        expect(card(second, "planner")).to_be_visible()
        expect(second.locator("#state")).to_have_text("Live")


def test_b7_it_stays_away_for_as_long_as_the_hub_asks_unless_the_network_is_back(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("planner"):
        page = visitors.come(hub, VIEWER)
        expect(card(page, "planner")).to_be_visible()
        page.clock.install(time=0)
        page.clock.pause_at(3600)
        page.reload()  # from here on the page's time is ours
        expect(page.locator("#state")).to_have_text("Live")
        opened: list[str] = []
        page.on("websocket", lambda socket: opened.append(socket.url))

        def turned_away() -> None:
            for socket in hub.call(lambda: hub.hub.dashboard.sockets):
                hub.run(socket.send('{"type": "going_away", "retry_after_ms": 4000}'))
                hub.run(socket.close(1012))
            expect(page.locator("#state")).to_contain_text("Reconnecting")

        turned_away()
        page.clock.run_for(3900)
        expect(page.locator("#state")).to_contain_text("Reconnecting")
        assert opened == []
        page.clock.run_for(200)
        expect(page.locator("#state")).to_have_text("Live")
        turned_away()
        page.evaluate("() => { dispatchEvent(new Event('online')); }")
        expect(page.locator("#state")).to_have_text("Live")
