"""Those who look at a hub's dashboard in a real browser, and what they find there."""

import re
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Locator, Page, Request, Response
from servers import PATIENCE


class Visitors:
    """Those who look at dashboards, and all that went wrong for any of them."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.problems: list[str] = []

    def come(self, hub: object, token: str = "", *, path: str = "/dashboard", **options: Any) -> Page:
        """Open the dashboard of a hub, by a link if there is a token. The options are those of the browser's window."""
        context = self._browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(PATIENCE * 1000)
        self._contexts.append(context)
        page = context.new_page()
        self._watch(page, str(hub))
        page.goto(f"http://{hub}{path}" + (f"#token={token}" if token else ""))
        return page

    def _watch(self, page: Page, hub: str) -> None:
        def at_home(url: str) -> None:
            if urlsplit(url).netloc != hub:
                self.problems.append(f"asked another host: {url}")

        def heard(said: ConsoleMessage) -> None:
            if said.type in ("error", "warning"):
                self.problems.append(said.text)

        def answered(answer: Response) -> None:
            if answer.status >= 400:
                self.problems.append(f"{answer.status} {answer.url}")

        def failed(request: Request) -> None:
            if request.failure != "net::ERR_ABORTED":  # taken back by the browser, as when a page is left or reloaded
                self.problems.append(f"failed: {request.url} {request.failure}")

        def popped_up(one: Dialog) -> None:
            self.problems.append(f"a script ran: {one.message}")
            one.dismiss()

        page.on("console", heard)
        page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        page.on("requestfailed", failed)
        page.on("response", answered)
        page.on("request", lambda one: at_home(one.url))
        page.on("websocket", lambda socket: at_home(socket.url))
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


def card(page: Page, agent: str) -> Locator:
    """The card of an agent."""
    return page.locator("#agents > li").filter(has=page.get_by_role("heading", name=agent, exact=True))


def names(page: Page) -> list[str]:
    """The agents whose cards are shown, in their order."""
    return page.locator("#agents .name").all_text_contents()
