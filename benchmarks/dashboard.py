"""Measure the dashboard's page in a real browser: `python benchmarks/dashboard.py [--agents 2000] [--updates 30]`.

A hub runs in a process of its own; all of its agents make requests each second. Chromium shows the dashboard and traces
itself. The trace says how long the page's scripts ran, and how long styles, layout and painting took, in each update.
This needs the environment of the tests (`.dev/tools`, with playwright) and the program chromium.
"""

import argparse
import asyncio
import json
import random
import shutil
import socket
import sys
from collections.abc import Iterable
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

if __name__ == "__main__":  # Python puts this folder on the path; the modules are named from the folder above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from playwright.sync_api import Page, sync_playwright

from headgate import Policy
from headgate.hub import logs
from headgate.hub.app import Hub
from headgate.hub.server import Server, server_config
from headgate.hub.settings import HubSettings

_TOKEN: Final = "the-viewer-token-of-the-benchmark"
_SCRIPTS: Final = {
    "FunctionCall",
    "EvaluateScript",
    "FireAnimationFrame",
    "TimerFire",
    "RunMicrotasks",
    "EventDispatch",
}
_RENDERING: Final = {"UpdateLayoutTree", "Layout", "PrePaint", "Paint", "Layerize", "Commit", "HitTest"}
_CATEGORIES: Final = ["devtools.timeline", "v8", "disabled-by-default-v8.gc"]
_SETTLE: Final = 5_000  # milliseconds before the trace, and one more update at its end that is left out

Span = tuple[float, float]
"""When something began and ended, in microseconds."""


class Times(NamedTuple):
    """One update: the agents in it, and the microseconds of scripts and of the rest."""

    changed: int
    scripts: float
    rendering: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--updates", type=int, default=30)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = get_context("fork").Process(target=_serve, args=(listener, options.agents), daemon=True)
        hub.start()
        try:
            updates = _trace(listener.getsockname()[1], options.agents, options.updates)
        finally:
            hub.kill()
            hub.join()
    changed = median(update.changed for update in updates)
    print(f"{options.agents:,} agents, {changed:,.0f} of them in each of {len(updates)} updates\n")
    print("| milliseconds per update | median | 90th percentile |\n|---|---|---|")
    for name, times in (
        ("scripts", [update.scripts for update in updates]),
        ("styles, layout and painting", [update.rendering for update in updates]),
    ):
        print(f"| {name} | {median(times) / 1000:.1f} | {quantiles(times, n=10)[-1] / 1000:.1f} |")


# The hub --------------------------------------------------------------------------------------------------------------


def _serve(listener: socket.socket, agents: int) -> None:
    settings = HubSettings(data=None, viewer_token=_TOKEN, log_level="error", dashboard_link="none")
    logs.configure(settings)
    asyncio.run(_serve_agents(listener, settings, agents))


async def _serve_agents(listener: socket.socket, settings: HubSettings, agents: int) -> None:
    async with Hub(settings, Policy(limits={"light": "120/minute"})) as hub:
        working = asyncio.create_task(_work(hub, [f"agent-{number:04}" for number in range(agents)]))
        await Server(hub, *server_config(hub, settings, None)).serve([listener])
        working.cancel()


async def _work(hub: Hub, agents: list[str]) -> None:
    """Let every agent make requests each second. Some make too many."""
    chance = random.Random(7)
    while True:
        for number, agent in enumerate(agents):
            for _ in range(chance.randrange(1, 6 if number % 25 == 0 else 3)):
                await hub.stats.check(agent, "ws", action="ping", address="127.0.0.1")
            if number % 100 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(1)


# The browser ----------------------------------------------------------------------------------------------------------


def _trace(port: int, agents: int, updates: int) -> list[Times]:
    """What each update took."""
    with sync_playwright() as playwright:
        program = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        begins: list[float] = []  # of updates, in microseconds
        changed: list[int] = []  # agents in each

        def note(event: dict[str, Any]) -> None:
            frame = event["response"]["payloadData"]
            if '"summary"' in frame:  # the first frame of an update; further ones have only agents
                begins.append(event["timestamp"] * 1e6)
                changed.append(0)
            if changed:
                changed[-1] += len(json.loads(frame).get("agents", []))

        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        session.on("Network.webSocketFrameReceived", note)
        page.goto(f"http://127.0.0.1:{port}/dashboard#token={_TOKEN}")
        page.get_by_text(f"{agents:,} of {agents:,} shown").wait_for(timeout=60_000)
        page.wait_for_timeout(_SETTLE)
        begins.clear()
        changed.clear()
        browser.start_tracing(page=page, categories=_CATEGORIES)
        _wait_for_updates(page, begins, updates + 2)
        trace: dict[str, Any] = json.loads(browser.stop_tracing())
        browser.close()
    events = _main_thread(trace["traceEvents"])
    scripts, rendering = _union(_spans(events, _SCRIPTS)), _union(_spans(events, _RENDERING))
    return [
        Times(changed[number], _within(scripts, begin, end), _within(rendering, begin, end))
        for number, (begin, end) in enumerate(pairwise(begins))
    ][1:]


def _wait_for_updates(page: Page, begins: list[float], many: int) -> None:
    while len(begins) < many:
        page.wait_for_timeout(500)


def _main_thread(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of the thread on which the page's scripts ran: the one with the most calls."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        found.setdefault((event["pid"], event["tid"]), []).append(event)
    return max(found.values(), key=lambda some: sum(event["name"] == "FunctionCall" for event in some))


def _spans(events: Iterable[dict[str, Any]], names: set[str]) -> list[Span]:
    complete = [event for event in events if event["ph"] == "X" and event["name"] in names]
    return [(event["ts"], event["ts"] + event.get("dur", 0)) for event in complete]


def _union(spans: list[Span]) -> list[Span]:
    """The same without overlaps: what runs inside something else counts once."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _within(spans: list[Span], begin: float, end: float) -> float:
    return sum(max(min(stop, end) - max(start, begin), 0) for start, stop in spans)


if __name__ == "__main__":
    main()
