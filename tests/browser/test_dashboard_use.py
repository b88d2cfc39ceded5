"""Use of the dashboard of a real hub: by the admin, by viewers, and to find an agent."""

from contextlib import ExitStack

from playwright.sync_api import expect

from headgate import Policy
from tests.support.agent_connections import ping
from tests.support.browser import STILL, Visitors, card, dialog, names, pass_time, press
from tests.support.hub import ADMIN, VIEWER, running

AT_HOME = {"exempt": ["127.0.0.1"]}  # many agents come from one address here


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
        expect(shown.get_by_role("status")).to_have_text("It now has its own limit: ws, light, 600/minute.")
        assert planner.ask("ping")["type"] == "pong"
        expect(card(page, "planner").locator(".usage")).to_contain_text("1 of 600 used, ws light")
        expect(card(page, "planner").get_by_text("override")).to_be_visible()
        assert shown.get_by_role("row").all_inner_texts()[1].split() == ["light", "600/minute", "own", "120/minute"]

        shown.get_by_role("button", name="Reset violations").click()
        expect(shown.get_by_role("status")).to_have_text("Its violations are reset.")
        expect(card(page, "planner").get_by_text("rate limited")).to_be_hidden()
        expect(page.locator("#violations")).to_have_text("0")
        expect(page.locator("#no-offenders")).to_be_visible()

        shown.get_by_role("button", name="Remove override").click()
        expect(shown.get_by_role("status")).to_have_text("Its override is removed.")
        expect(card(page, "planner").get_by_text("override")).to_be_hidden()
        expect(shown.get_by_role("button", name="Remove override")).to_be_hidden()
        assert hub.hub.gate.effective.overrides == {}

        shown.get_by_role("button", name="Exempt from limits").click()
        expect(shown.get_by_role("status")).to_have_text("It is exempt: everything passes.")
        expect(card(page, "planner").get_by_text("exempt", exact=True)).to_be_visible()
        expect(page.locator("#exempt")).to_have_text("1")
        ping(planner, 200)
        assert planner.ask("ping")["type"] == "pong"

        shown.get_by_role("button", name="Hold to limits again").click()
        expect(shown.get_by_role("status")).to_have_text("It is held to its limits again.")
        expect(card(page, "planner").locator(".usage")).to_contain_text("of 120 used")
        shown.get_by_role("button", name="Close").click()
        expect(shown).to_be_hidden()
        with hub.http(ADMIN) as http:
            changes = http.get("/api/admin/changes").json()["changes"]
        assert [one["by"] for one in changes] == ["admin at 127.0.0.1"] * 4


def test_b7_a_tier_of_the_policy_can_be_overridden(visitors: Visitors) -> None:
    policy = Policy(tiers=["bulk"], limits={"bulk": "2/minute"}, actions={"ws": {"ping": "bulk"}})
    with running(policy) as hub, hub.agent("planner") as planner:
        page = visitors.come(hub, ADMIN)
        ping(planner, 2)
        expect(card(page, "planner").locator(".usage")).to_contain_text("2 of 2 used, ws bulk")
        shown = dialog(page, "planner")
        assert shown.get_by_label("Tier").input_value() == "bulk"
        expect(shown.get_by_role("row")).to_have_count(5)
        assert shown.get_by_role("row").all_inner_texts()[4].split() == ["bulk", "2/minute", "2/minute"]
        assert shown.get_by_label("Tier").locator("option").all_inner_texts() == ["light", "normal", "heavy", "bulk"]
        shown.get_by_label("Limit", exact=True).fill("7/minute")
        shown.get_by_role("button", name="Set override").click()
        expect(shown.get_by_role("status")).to_have_text("It now has its own limit: every channel, bulk, 7/minute.")
        assert hub.hub.gate.capacity("planner", "http", "bulk") == 7


def test_b7_a_refusal_is_shown_in_the_dialog(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner") as planner:
        planner.ask("channel_subscribe", channel="general")
        page = visitors.come(hub, ADMIN)
        shown = dialog(page, "planner")
        assert shown.get_by_label("Tier").input_value() == "normal"
        shown.get_by_label("Limit", exact=True).fill("many")
        shown.get_by_role("button", name="Set override").click()
        expect(shown.get_by_role("alert")).to_contain_text("expected 'COUNT/UNIT'")
        expect(shown.get_by_role("status")).to_be_empty()
        assert hub.hub.gate.effective.overrides == {}
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


def test_b7_a_visitor_without_a_token_is_asked_for_one(visitors: Visitors) -> None:
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
    with running(Policy(addresses={"authentication": "1/minute"})) as hub:
        page = visitors.come(hub)
        page.get_by_label("Token of the admin or a viewer").fill("not-the-token-of-anybody")
        press(page, "Enter")
        expect(page.get_by_role("alert")).to_have_text("The hub says: too many wrong tokens; try again in 60 s.")


def test_b7_a_token_is_removed_from_the_address_at_once(visitors: Visitors) -> None:
    with running() as hub, hub.agent("planner"):
        page = visitors.come(hub, ADMIN)
        expect(card(page, "planner")).to_be_visible()
        expect(page).to_have_url(f"http://{hub}/dashboard")
        page.evaluate("token => { location.hash = `token=${token}` }", VIEWER)  # another link, in the same tab
        expect(page.get_by_role("button", name="Change the limits of planner")).to_have_count(0)
        expect(page).to_have_url(f"http://{hub}/dashboard")
        page.evaluate("location.hash = 'token=a-link-of-yesterday'")
        expect(page.get_by_role("alert")).to_contain_text("A link is valid until its hub stops")


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


def test_b7_a_dashboard_above_the_maximum_waits(visitors: Visitors) -> None:
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
        expect(page).to_have_url(f"http://{hub}/dashboard#search=nobody&show=exempt&sort=traffic")
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
        expect(page.locator("#count")).to_have_text("9 of 299 shown")
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


def test_b7_cards_stay_in_place_while_somebody_uses_them(visitors: Visitors) -> None:
    with running() as hub, hub.agent("ada") as ada, hub.agent("bob") as bob:
        ping(ada, 10)
        page = visitors.come(hub, ADMIN, time=STILL)
        expect(card(page, "bob")).to_be_visible()
        assert names(page) == ["ada", "bob"]
        button = page.get_by_role("button", name="Change the limits of bob")
        button.focus()
        for used in (20, 40, 60, 80):
            press(page, "Shift")
            ping(bob, 20)
            expect(card(page, "bob").locator(".usage")).to_contain_text(f"{used} of 120")
            assert names(page) == ["ada", "bob"]
            pass_time(page, 4900)  # after 5000 without a key they would move
        ping(bob, 10)
        expect(card(page, "bob").locator(".usage")).to_contain_text("90 of 120")  # else it might find the hub silent
        assert names(page) == ["ada", "bob"]
        pass_time(page, 200)
        expect(page.locator("#agents > li").first).to_contain_text("bob")
        expect(button).to_be_focused()
