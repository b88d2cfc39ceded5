"""Visitors of a hub's dashboard in a real browser, and the contents of their pages."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Locator,
    Page,
    Request,
    Response,
    expect,
)

from tests.support.hub import HubServer
from tests.support.hub_process import HubProcess
from tests.support.valkey import PATIENCE

GONE = r"ERR_CONNECTION_(REFUSED|RESET|CLOSED)|ERR_EMPTY_RESPONSE|closed before the connection is established"
"""Errors that a browser logs when a hub has ended, whatever the page does."""

SLOW = "{ const now = performance.now.bind(performance); performance.now = () => now() / 10; }"
"""A script that slows the page's clock, so that the page doesn't give up on a slow hub."""
STILL = "{ window.passed = 1000; performance.now = () => window.passed; }"
"""A script that stops the page's clock; `pass_time` advances it."""


class Visitors:
    """Visitors of dashboards, and every problem that any of them met."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.problems: list[str] = []

    def come(
        self,
        hub: HubServer | HubProcess,
        token: str = "",
        *,
        path: str = "/dashboard",
        time: str = SLOW,
        **options: Any,
    ) -> Page:
        """Open the dashboard of a hub, by a link if there is a token. The options are those of the browser's window.

        `time` is a script that says how time passes for the page.
        """
        context = self._browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(PATIENCE * 1000)
        context.add_init_script(time)
        self._contexts.append(context)
        page = context.new_page()
        self._watch(page, hub)
        page.goto(f"http://{hub}{path}" + (f"#token={token}" if token else ""))
        return page

    def _watch(self, page: Page, hub: HubServer | HubProcess) -> None:
        def problem(text: str) -> None:
            if not (re.search(GONE, text) and is_over(hub)):  # the hub ends before those who look at it leave
                self.problems.append(text)

        def same_origin(url: str) -> None:
            if urlsplit(url).netloc != str(hub):
                problem(f"asked another host: {url}")

        def heard(said: ConsoleMessage) -> None:
            if said.type in ("error", "warning"):
                problem(said.text)

        def answered(answer: Response) -> None:
            if answer.status >= 400:
                problem(f"{answer.status} {answer.url}")

        def failed(request: Request) -> None:
            if request.failure != "net::ERR_ABORTED":  # taken back by the browser, as when a page is left or reloaded
                problem(f"failed: {request.url} {request.failure}")

        def popped_up(one: Dialog) -> None:
            problem(f"a script ran: {one.message}")
            one.dismiss()

        page.on("console", heard)
        page.on("pageerror", lambda error: problem(f"page error: {error}"))
        page.on("requestfailed", failed)
        page.on("response", answered)
        page.on("request", lambda one: same_origin(one.url))
        page.on("websocket", lambda socket: same_origin(socket.url))
        page.on("dialog", popped_up)

    def forgive(self, pattern: str) -> int:
        """Take away the problems that match, and say how many there were."""
        left = [problem for problem in self.problems if not re.search(pattern, problem)]
        gone = len(self.problems) - len(left)
        self.problems[:] = left
        return gone

    def leave(self) -> None:
        for context in self._contexts:
            context.close()


def is_over(hub: HubServer | HubProcess) -> bool:
    """Whether a hub has ended, or is about to."""
    if isinstance(hub, HubProcess):
        return not Path(f"/proc/{hub.pid}").exists()
    return hub.server is None or hub.server.should_exit


def pass_time(page: Page, milliseconds: int) -> None:
    """Let time pass for a page that came with `STILL`."""
    page.evaluate("milliseconds => { window.passed += milliseconds; }", milliseconds)


def card(page: Page, agent: str) -> Locator:
    """The card of an agent."""
    return page.locator("#agents > li").filter(has=page.get_by_role("heading", name=agent, exact=True))


def row(page: Page, agent: str) -> Locator:
    """The row of an agent in the table, if it is drawn."""
    return page.locator("#rows > .tr").filter(has=page.get_by_role("link", name=agent, exact=True))


def names(page: Page) -> list[str]:
    """The agents whose cards are shown, or whose rows are drawn, in their order."""
    return page.locator("#list > :not([hidden]) .name").all_text_contents()


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def agent_page(page: Page, agent: str) -> Locator:
    """The page of an agent, opened by a click in the list, once the hub has answered what it shows."""
    page.locator("#list").get_by_role("link", name=agent, exact=True).click()
    return shown_page(page, agent)


def shown_page(page: Page, agent: str) -> Locator:
    """The page of an agent that was opened somehow."""
    found = page.locator("#agent-page")
    expect(found.get_by_role("heading", level=2)).to_have_text(agent)
    expect(found.locator("#agent-detail")).to_be_visible()
    return found
