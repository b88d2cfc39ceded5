"""The summary of the dashboard of a real hub: notices, tasks, alerts and addresses; the values of its charts."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import expect

from headgate import Policy
from tests.support.agent_connections import ping
from tests.support.browser import Visitors, card, press, shown_page
from tests.support.hub import ADMIN, VIEWER, hub_server

AT_HOME = {"exempt": ["127.0.0.1"]}  # many agents come from one address here


def test_b7_the_queue_of_tasks_has_a_card(visitors: Visitors) -> None:
    with hub_server() as hub, hub.http(ADMIN) as http:
        page = visitors.come(hub, VIEWER)
        for number in range(3):
            http.post("/api/admin/tasks", json={"payload": number}).raise_for_status()
        expect(page.locator("#tasks-waiting")).to_have_text("3")
        with hub.agent("planner") as planner:
            task = planner.hear()["task_id"]
            expect(page.locator("#tasks-held")).to_have_text("1")
            planner.say("task_failed", task_id=task, error="too hard")
            expect(page.locator("#tasks-failed")).to_have_text("1")


def test_b7_all_open_alerts_can_be_reached(visitors: Visitors) -> None:
    policy = Policy(limits={"light": "1/hour"}, alerts={"violations": 1}, addresses=AT_HOME)
    with ExitStack() as stack:
        hub = stack.enter_context(hub_server(policy, max_connections_per_address=1000))
        for number in range(60):  # a frame has 50
            ping(stack.enter_context(hub.agent(f"agent-{number:02}")), 2)
        page = visitors.come(hub, VIEWER)
        expect(page.locator("#open-alerts")).to_have_text("60")
        expect(page).to_have_title("(60) headgate")
        expect(page.locator("#alerts li")).to_have_count(50)
        page.get_by_role("button", name="Show all 60 open").click()
        expect(page.locator("#alerts li")).to_have_count(60)
        page.locator("#alerts").get_by_role("link", name="agent-00").click()
        shown_page(page, "agent-00")
        page.go_back()
        page.get_by_role("button", name="Show fewer").click()
        expect(page.locator("#alerts li")).to_have_count(50)


def test_b2_b3_denied_addresses_are_shown(visitors: Visitors) -> None:
    with hub_server(Policy(addresses={"registration": "1/hour"})) as hub, hub.http() as http:
        for number in range(4):
            http.post("/api/onboard/register", json={"agent_id": f"agent-{number}"})
        page = visitors.come(hub, VIEWER)
        expect(page.locator("#addresses li")).to_have_text("127.0.0.1registration3")


def test_b6_overruled_values_of_the_policy_file_and_the_user_are_named(visitors: Visitors, tmp_path: Path) -> None:
    (tmp_path / "headgate.toml").write_text('[limits]\nlight = "20/minute"\n')
    with hub_server(Policy.load(tmp_path / "headgate.toml")) as hub, hub.http(ADMIN) as http:
        page = visitors.come(hub, ADMIN)
        expect(page.locator("#who")).to_have_text("admin")
        expect(page.locator("#overruled")).to_be_hidden()
        http.put("/api/admin/rate-limits/defaults", json={"ws": {"light": "30/minute"}}).raise_for_status()
        expect(page.locator("#overruled")).to_be_visible()
        expect(page.locator("#overruled")).to_contain_text("Stored changes overrule the policy file: limits.ws.light.")
        hub.run(hub.hub.gate.aremove_default())
        expect(page.locator("#overruled")).to_be_hidden()


def test_b7_charts_have_values_for_the_pointer_and_the_keyboard(visitors: Visitors) -> None:
    with hub_server(Policy(limits={"light": "30/minute"})) as hub, hub.agent("ada") as ada, hub.agent("bob") as bob:
        ping(ada, 40)
        ping(bob, 4)
        page = visitors.come(hub, VIEWER)
        expect(page.locator("#sum-denied")).to_have_text("10")
        expect(page.locator("#peak")).to_have_text("3 per second")
        tip = page.locator("#tip")
        chart = page.locator("#timeline")
        wide = chart.evaluate("node => node.clientWidth")
        chart.hover(position={"x": wide - 3, "y": 40})
        expect(tip).to_have_text("now: 1.9 allowed, 0.4 warned, 0.7 denied per second")
        page.mouse.move(5, 5)
        expect(tip).to_be_hidden()
        chart.focus()
        press(page, "ArrowLeft")
        expect(tip).to_have_text("15 s ago: 0 allowed, 0 warned, 0 denied per second")
        expect(page.locator("#tip-said")).to_have_text("15 s ago: 0 allowed, 0 warned, 0 denied per second")
        press(page, "Escape")
        expect(tip).to_be_hidden()
        spark = card(page, "ada").get_by_role("img")
        spark.hover(position={"x": spark.evaluate("node => node.clientWidth") - 2, "y": 10})
        expect(tip).to_have_text("now: 6 passed, 2 denied per second")
        hub.clock.advance(5)
        expect(tip).to_have_text("now: 0 passed, 0 denied per second")
        heights = [
            card(page, name).locator(".passed").evaluate("node => node.getBBox().height") for name in ("ada", "bob")
        ]
        assert heights[0] == pytest.approx(heights[1] * 30 / 4, rel=0.05)  # one scale for all
        page.get_by_role("button", name="Table").click()
        page.locator("#rows").get_by_role("link", name="ada").focus()
        press(page, "ArrowLeft", "ArrowLeft")
        expect(tip).to_have_text("5 s ago: 6 passed, 2 denied per second")


def test_b7_on_a_phone_the_list_starts_on_the_first_screen(visitors: Visitors) -> None:
    with hub_server(Policy(limits={"light": "1/hour"}, alerts={"violations": 1})) as hub, hub.agent("ada") as ada:
        ping(ada, 3)
        page = visitors.come(hub, ADMIN, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
        expect(card(page, "ada")).to_be_in_viewport(ratio=1)
        expect(page.locator("#violations")).to_be_hidden()
        expect(page.locator("#alerts").get_by_role("link", name="ada")).to_be_visible()
        page.get_by_role("button", name="More").tap()
        expect(page.locator("#violations")).to_be_visible()
        page.reload()
        expect(page.locator("#violations")).to_be_visible()  # as it was chosen
        page.get_by_role("button", name="Less").tap()
        page.get_by_role("button", name="Table").tap()
        expect(page.locator("#rows").get_by_role("link", name="ada")).to_be_in_viewport(ratio=1)
