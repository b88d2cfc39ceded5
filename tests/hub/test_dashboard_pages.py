"""The dashboard's files: media types, and a strict content security policy."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from urllib.parse import urljoin

import httpx
import pytest

from headgate.hub.api.dashboard_routes import ROUTES
from tests.support.hub import HubServer, hub_server

STATIC = files("headgate.hub.dashboard") / "static"
FILES = sorted(file.name for file in STATIC.iterdir())
MEDIA = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with hub_server() as hub:
        yield hub


def get(hub: HubServer, path: str) -> httpx.Response:
    with hub.http() as http:
        return http.get(path)


def test_b7_every_file_is_served_to_anyone_without_a_limit(hub: HubServer) -> None:
    page = get(hub, "/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == (STATIC / "dashboard.html").read_text(encoding="utf-8")
    for name in FILES:
        if name != "dashboard.html":
            answer = get(hub, f"/dashboard/{name}")
            assert answer.content == (STATIC / name).read_bytes()
            assert answer.headers["content-type"] == MEDIA[name.rpartition(".")[2]]
            assert answer.headers["x-content-type-options"] == "nosniff"
    with hub.http() as http:
        assert {http.get("/dashboard").status_code for _ in range(100)} == {200}
    assert len([route for route in ROUTES if route.action == "get_dashboard"]) == len(FILES) + 2


@pytest.mark.parametrize(("path", "where"), [("/", "dashboard"), ("/dashboard/", "../dashboard")])
def test_b7_the_root_and_a_trailing_slash_redirect_to_the_page(hub: HubServer, path: str, where: str) -> None:
    """By a way that is right behind any prefix: what the page needs is named relative to it."""
    answer = get(hub, path)
    assert (answer.status_code, answer.headers["location"]) == (307, where)
    assert urljoin(f"http://{hub}{path}", where) == f"http://{hub}/dashboard"


def test_b7_the_policy_of_the_page_is_strict(hub: HubServer) -> None:
    said = get(hub, "/dashboard").headers["content-security-policy"]
    policy = dict(part.strip().partition(" ")[::2] for part in said.split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    assert get(hub, "/dashboard").headers["referrer-policy"] == "no-referrer"


class DashboardPage(HTMLParser):
    """What a page loads, and what stands in it that a strict policy forbids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.loads += [value for name in ("src", "href") if (value := given.get(name)) and not value.startswith("#")]
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def test_b7_the_page_loads_its_own_files_only_and_has_nothing_inline() -> None:
    page = DashboardPage((STATIC / "dashboard.html").read_text(encoding="utf-8"))
    assert page.inline == []
    assert set(page.loads) == {"dashboard/icon.svg", "dashboard/dashboard.css", "dashboard/dashboard.js"}
    for name in FILES:
        text = (STATIC / name).read_text(encoding="utf-8")
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
            assert {found.removeprefix("./") for found in re.findall(r'from "([^"]+)"', text)} <= set(FILES)
        assert not re.search(r"https?://(?!www\.w3\.org/)\w", text)
