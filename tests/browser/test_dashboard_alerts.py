"""Alerts on the dashboard of a real hub: the list, the notices, and the notifications of a real browser."""

from playwright.sync_api import expect

from headgate import Policy
from tests.support.agent_connections import ping
from tests.support.browser import Visitors, card, shown_page
from tests.support.hub import VIEWER, hub_server


def test_b8_an_alert_is_announced_once_and_shown_as_resolved_in_the_end(visitors: Visitors) -> None:
    with hub_server() as hub, hub.agent("planner") as planner, hub.agent("old") as old:
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
        with page.expect_websocket():  # it comes back
            for socket in hub.call(lambda: hub.hub.dashboard.sockets):
                hub.run(socket.close(1001))
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
        page.locator("#alerts").get_by_role("link", name="old").click()
        shown_page(page, "old")


def test_b8_a_notice_can_be_dismissed_and_comes_back_when_it_goes_on(visitors: Visitors) -> None:
    with hub_server(Policy(limits={"light": "1/day"})) as hub, hub.agent("planner") as planner:
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
    with hub_server() as hub:
        page = visitors.come(hub, VIEWER)
        page.evaluate(
            "() => { Notification.requestPermission = async () => { window.asked = true; return 'denied'; }; }"
        )
        expect(page.get_by_role("heading", name="No agents yet")).to_be_visible()
        assert page.evaluate("window.asked") is None
        page.get_by_role("button", name="Notify me").click()
        expect(page.locator("#toasts")).to_contain_text("block notifications")
        assert page.evaluate("window.asked") is True
