"""The dashboard of the real program: its link, its restarts, its silences, and what it shows under load."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.support.browser import GONE, STILL, Visitors, agent_page, card, names, pass_time
from tests.support.hub import agent_connection
from tests.support.hub_process import ADMIN, HubProcess, hub_process
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE, wait_for

CROWD = '[addresses]\nexempt = ["127.0.0.1"]\n[limits]\nlight = "20/day"\n'
"""Of a policy file: many agents come from one address, and each is limited soon, however slow it is."""
PATIENT = ("--identify-within", str(PATIENCE))


def printed_link(hub: HubProcess) -> str:
    """The link that was printed."""
    wait_for(lambda: "dashboard:" in "".join(hub.out), "the link")
    found = re.search(r"dashboard: (http://\S+)", "".join(hub.out))
    assert found
    return found[1]


@contextmanager
def ping_load(hub: HubProcess, agents: list[str]) -> Iterator[None]:
    """Agents that send one ping after the other, until the block ends."""
    over = threading.Event()

    def work() -> None:
        with ExitStack() as stack:
            wires = [stack.enter_context(agent_connection(hub, name, token)) for name, token in tokens]
            while not over.is_set():
                for wire in wires:
                    wire.say("ping")
                for wire in wires:
                    while wire.hear()["type"] not in ("pong", "rate_limited"):
                        pass

    tokens = [(name, hub.register(name)) for name in agents]
    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        over.set()
        worker.join(PATIENCE)
        assert not worker.is_alive()


def figure(page: Page, place: str) -> float:
    return float((page.locator(f"#{place}").text_content() or "").replace(",", "").removesuffix(" %"))


def checks(page: Page) -> int:
    return int((page.locator("#totals").text_content() or "0").split()[0].replace(",", ""))


def test_b7_the_link_that_is_printed_opens_it_signed_in(visitors: Visitors, tmp_path: Path) -> None:
    with hub_process(tmp_path / "data", *PATIENT) as hub, agent_connection(hub, "planner", hub.register("planner")):
        where, _, token = printed_link(hub).partition("#token=")
        assert where == f"http://{hub}/dashboard"
        page = visitors.come(hub, token)
        expect(card(page, "planner")).to_be_visible()
        expect(page).to_have_url(where)
        page.reload()
        expect(card(page, "planner")).to_be_visible()
        page.goto(f"http://{hub}/")  # leads there
        expect(agent_page(page, "planner").get_by_role("button", name="Block")).to_be_visible()
        page.go_back()
        expect(page).to_have_url(where)


def test_b7_it_comes_back_after_a_restart_of_the_hub(visitors: Visitors, tmp_path: Path) -> None:
    with unused_port() as port:
        there = ("--port", str(port), *PATIENT)
        hub = HubProcess(tmp_path / "data", *there)
        try:
            token = hub.register("planner")
            with hub.http() as http:
                http.put("/api/admin/rate-limits/planner", json={"light": "100/day"}).raise_for_status()
            page = visitors.come(hub, ADMIN)
            by_link = visitors.come(hub, printed_link(hub).partition("#token=")[2])
            with (
                agent_connection(hub, "planner", token) as planner,
                agent_connection(hub, "gone", hub.register("gone")),
            ):
                planner.ask("ping")
                expect(card(page, "gone")).to_be_visible()
                for one in (page, by_link):
                    expect(card(one, "planner").locator(".usage")).to_contain_text("1 of 100 used")
                hub.stop()
                for one in (page, by_link):
                    expect(one.locator("#state")).to_contain_text("Reconnecting…, last heard")
                assert sorted(names(page)) == ["gone", "planner"]  # as it was when the hub was heard last
            hub = HubProcess(tmp_path / "data", *there)
            with agent_connection(hub, "planner", token) as planner:
                expect(page.locator("#state")).to_have_text("Live")
                expect(card(page, "planner").locator(".usage")).to_contain_text("0 of 100 used")
                planner.ask("ping")
                expect(card(page, "planner").locator(".usage")).to_contain_text("1 of 100 used")
                assert names(page) == ["planner"]
                expect(by_link.get_by_role("alert")).to_contain_text("A link is valid until its hub stops")
            visitors.forgive(GONE)  # a browser says so when nobody listens, whatever the page does
        finally:
            hub.stop()


def test_b7_a_silent_hub_is_treated_as_gone(visitors: Visitors, tmp_path: Path) -> None:
    with hub_process(tmp_path / "data") as hub:
        page = visitors.come(hub, ADMIN, time=STILL)
        expect(page.locator("#state")).to_have_text("Live")

        def is_given_up() -> bool:
            pass_time(page, 1000)  # again and again: something may still have been on its way
            return "Reconnecting" in (page.locator("#state").text_content() or "")

        os.kill(hub.pid, signal.SIGSTOP)
        try:
            wait_for(is_given_up, "the page to notice")
        finally:
            os.kill(hub.pid, signal.SIGCONT)
        expect(page.locator("#state")).to_have_text("Live")
        visitors.forgive(GONE)


def test_b7_it_keeps_up_with_a_hub_under_load(visitors: Visitors, tmp_path: Path) -> None:
    (tmp_path / "headgate.toml").write_text(CROWD)
    agents = [f"agent-{number:02}" for number in range(40)]
    with (
        hub_process(tmp_path / "data", "--config", str(tmp_path / "headgate.toml"), *PATIENT) as hub,
        hub.http() as http,
    ):
        page = visitors.come(hub, ADMIN)
        expect(page.get_by_role("heading", name="No agents yet")).to_be_visible()
        with ping_load(hub, agents):
            expect(page.locator("#agents > li")).to_have_count(40)
            wait_for(lambda: checks(page) > 2000 and figure(page, "rate") > 0, "two thousand checks")
            expect(card(page, "agent-39").get_by_text("rate limited")).to_be_visible()
            shown = agent_page(page, "agent-39")
            shown.get_by_label("Limit", exact=True).fill("unlimited")
            shown.get_by_role("button", name="Set override").click()
            expect(shown.locator("#agent-state").get_by_text("override")).to_be_visible()
            shown.get_by_role("button", name="Reset violations").click()
            expect(shown.locator("#agent-state").get_by_text("rate limited")).to_be_hidden()
            page.get_by_role("link", name="All agents").click()
            expect(card(page, "agent-39").get_by_text("rate limited")).to_be_hidden()
            before = figure(page, "violations")
            wait_for(lambda: figure(page, "violations") > before, "more violations")
        summary = http.get("/api/dashboard/state").json()["summary"]
        totals = f"{summary['checks']:,} checks and holds since the hub started, {summary['denied']:,} denied"
        expect(page.locator("#totals")).to_have_text(totals)
        assert figure(page, "violations") == summary["violations_last_hour"]
        worst = [f"{one['agent_id']}{one['violations']:,}" for one in summary["worst_offenders"]]
        assert page.locator("#offenders li").all_text_contents() == worst
        expect(page.locator("#state")).to_have_text("Live")
