"""The page of an agent on the dashboard of a real hub: what it was denied, and how it is stopped."""

from playwright.sync_api import Page, expect

from headgate import Policy
from tests.support.agent_connections import ping, read_close
from tests.support.browser import Visitors, agent_page, shown_page
from tests.support.hub import ADMIN, VIEWER, hub_server


def cells(page: Page, table: str) -> list[list[str]]:
    return [row.split("\t") for row in page.locator(f"#{table} tbody tr").all_inner_texts()]


def test_b7_three_clicks_lead_from_an_alert_to_what_the_agent_did_and_to_its_block(visitors: Visitors) -> None:
    with hub_server(Policy(limits={"light": "5/minute"})) as hub, hub.agent("crawler") as crawler:
        page = visitors.come(hub, ADMIN)
        expect(page.locator("#agents > li")).to_have_count(1)
        page.evaluate("() => { window.clicks = 0; addEventListener('click', () => window.clicks++, true); }")
        ping(crawler, 20)
        crawler.ask("list_agents")
        alert = page.locator("#alerts li")
        expect(alert).to_contain_text("ws ping from 127.0.0.1")
        expect(alert.get_by_text("16 violations")).to_be_visible()  # it goes on counting
        alert.get_by_role("link", name="crawler").click()
        shown = shown_page(page, "crawler")
        assert cells(page, "denied-actions") == [
            ["ws ping", "light", "15", "15"],
            ["ws list_agents", "light", "1", "1"],
        ]
        assert [row[1:4] for row in cells(page, "denials")] == [
            ["ws list_agents", "light", "127.0.0.1"],
            *[["ws ping", "light", "127.0.0.1"]] * 9,
        ]
        shown.get_by_role("button", name="Block", exact=True).click()
        shown.get_by_role("button", name="Block it").click()
        expect(shown.locator("#agent-state").get_by_text("blocked")).to_be_visible()
        assert page.evaluate("window.clicks") == 3
        assert hub.hub.gate.is_blocked("crawler")
        assert crawler.ask("message", to="nobody", body=1)["type"] == "rate_limited"
        expect(page.locator("#agent-blocked")).to_have_text(
            "Blocked until it is unblocked: everything it asks for is denied."
        )
        page.go_back()
        expect(page.locator("#blocked")).to_have_text("1")
        page.get_by_role("radio", name="blocked 1").check()
        agent_page(page, "crawler").get_by_role("button", name="Unblock").click()
        expect(shown.locator("#change-done")).to_have_text("It is unblocked.")
        expect(page.locator("#agent-blocked")).to_be_hidden()
        assert not hub.hub.gate.is_blocked("crawler")


def test_b7_a_block_can_have_an_end_and_a_reason_and_its_errors_stand_beside_their_fields(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("crawler") as crawler:
        page = visitors.come(hub, ADMIN, timezone_id="UTC")
        shown = agent_page(page, "crawler")
        shown.get_by_role("button", name="Block", exact=True).click()
        reason = shown.get_by_label("Reason")
        expect(reason).to_be_focused()
        ends = shown.get_by_label("Ends")
        ends.select_option("in 15 minutes")  # which is the past for this hub
        shown.get_by_role("button", name="Block it").click()
        expect(page.locator("#block-ends-error")).to_contain_text("expected a moment after now")
        visitors.forgive("400")
        ends.select_option("at a time…")
        for past in ("", "2001-01-01T10:00"):
            shown.get_by_label("Day and time").fill(past)
            shown.get_by_role("button", name="Block it").click()
            expect(ends).to_have_accessible_description("Choose a time in the future.")
        expect(ends).to_be_focused()
        assert not hub.hub.gate.is_blocked("crawler")
        shown.get_by_label("Day and time").fill("2040-01-01T10:00")
        reason.fill("floods the <b>chat</b>")
        shown.get_by_label("disconnect it as well").check()
        reason.press("Enter")
        expect(shown.locator("#change-done")).to_have_text("It is blocked and disconnected.")
        said = "Blocked until 1 Jan 2040, 10:00:00: everything it asks for is denied. Reason: floods the <b>chat</b>"
        expect(page.locator("#agent-blocked")).to_have_text(said)
        block = hub.hub.gate.block_of("crawler")
        assert block is not None
        assert (block.until, block.reason) == (2208988800.0 + 36000, "floods the <b>chat</b>")
        assert read_close(crawler) == (1008, "disconnected by an operator")


def test_b7_disconnecting_and_revoking_ask_once_in_place(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("crawler") as crawler:
        page = visitors.come(hub, ADMIN)
        shown = agent_page(page, "crawler")
        assert [row[:2] for row in cells(page, "connections")] == [["ws", "127.0.0.1"]]
        confirm = shown.locator("#confirm")
        shown.get_by_role("button", name="Disconnect").click()
        expect(confirm).to_contain_text("It may connect again.")
        confirm.get_by_role("button", name="Cancel").click()
        expect(confirm).to_be_hidden()
        expect(shown.get_by_role("button", name="Disconnect")).to_be_focused()
        ping(crawler, 1)
        shown.get_by_role("button", name="Disconnect").click()
        confirm.get_by_role("button", name="Disconnect").click()
        expect(shown.locator("#change-done")).to_have_text("1 connection closed.")
        assert read_close(crawler) == (1008, "disconnected by an operator")
        expect(shown.locator("#no-connections")).to_be_visible()
        shown.get_by_role("button", name="Revoke token").click()
        confirm.get_by_role("button", name="Revoke token").click()
        expect(shown.locator("#change-done")).to_have_text("Its token is revoked.")
        expect(shown.locator("#agent-token")).to_have_text("revoked")
        expect(shown.get_by_role("button", name="Revoke token")).to_be_hidden()


def test_b7_an_agents_page_is_kept_up_to_date(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent_and_http("planner") as (planner, http):
        page = visitors.come(hub, VIEWER)
        agent_page(page, "planner")
        expect(page.locator("#limits tbody tr").first).to_contain_text("0 of 120")
        ping(planner, 12)
        expect(page.locator("#limits tbody tr").first).to_contain_text("12 of 120")
        expect(page.locator("#agent-rate")).to_have_text("0.2")
        expect(page.locator("#agent-chart")).to_have_attribute("aria-label", "Last five minutes: 12 passed, 0 denied")
        http.post("/api/tasks", json={"payload": {"do": "it"}}).raise_for_status()
        planner.ask("session_open", session="1")
        expect(page.locator("#agent-sessions")).to_have_text("1")
        expect(page.locator("#agent-created")).to_have_text("1 unfinished task")
        expect(page.locator("#agent-task")).not_to_have_text("none")  # the hub has given it to the only agent


def test_b7_oneself_cannot_be_blocked(visitors: Visitors) -> None:
    with hub_server() as hub, hub.http(ADMIN) as http:
        made = http.post("/api/admin/admins", json={"name": "ada", "role": "admin"})
        token = made.raise_for_status().json()["token"]
        page = visitors.come(hub, token)
        expect(page.locator("#who")).to_have_text("ada")
        page.goto(f"http://{hub}/dashboard#agent=ada")
        shown = shown_page(page, "ada")
        expect(shown.locator("#agent-state").get_by_text("admin")).to_be_visible()
        shown.get_by_role("button", name="Block", exact=True).click()
        shown.get_by_role("button", name="Block it").click()
        expect(page.locator("#block-error")).not_to_be_empty()
        visitors.forgive("409")
        assert not hub.hub.gate.is_blocked("ada")
