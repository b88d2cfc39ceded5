"""The dashboard in a real browser: Debian's Chromium, driven by playwright."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.browser import Visitors
from tests.support.valkey import PATIENCE

HERE = Path(__file__).parent
AXE = HERE.parents[1] / ".dev/npm/node_modules/axe-core/axe.min.js"
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SEVERE = ("serious", "critical")

expect.set_options(timeout=PATIENCE * 1000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.once)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program, "expected the program chromium on the path (apt install chromium); ./dev long installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS, timeout=PATIENCE * 1000)
        yield browser
        browser.close()


@pytest.fixture
def visitors(chromium: Browser) -> Iterator[Visitors]:
    """Visitors of dashboards; none of them may have met a problem by the end of the test."""
    visitors = Visitors(chromium)
    try:
        yield visitors
    finally:
        visitors.leave()
    assert visitors.problems == []


@pytest.fixture(scope="session")
def axe() -> Callable[[Page], list[str]]:
    """A function that lists the serious and critical accessibility violations of a page, found by axe-core."""
    if not AXE.exists():
        pytest.fail(f"expected axe-core at {AXE.relative_to(HERE.parents[1])}; ./dev long installs it")
    script = AXE.read_text(encoding="utf-8")

    def findings(page: Page) -> list[str]:
        page.evaluate(script)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']}: {node['html']} {node['failureSummary']}"
            for one in found["violations"]
            if one["impact"] in SEVERE
            for node in one["nodes"]
        ]

    return findings
