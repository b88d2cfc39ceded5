"""Path patterns, and the requests that match them."""

import pytest

from headgate import InvalidInput
from headgate.edges.paths import PathPatterns


def find(method: str, path: str, *patterns: str) -> str | None:
    """The pattern that counts for a request."""
    return PathPatterns("routes", {pattern: pattern for pattern in patterns}).find(method, path)


@pytest.mark.parametrize(
    ("pattern", "method", "path", "fits"),
    [
        ("/login", "POST", "/login", True),
        ("/login", "GET", "/login", True),
        ("/login", "GET", "/login/", False),
        ("/login", "GET", "/Login", False),
        ("/login", "GET", "/x/login", False),
        ("POST /login", "POST", "/login", True),
        ("POST /login", "GET", "/login", False),
        ("WEBSOCKET /chat", "WEBSOCKET", "/chat", True),
        ("WEBSOCKET /chat", "GET", "/chat", False),
        ("/files/*", "GET", "/files/", True),
        ("/files/*", "GET", "/files/a/b\nc", True),
        ("/files/*", "GET", "/files", False),
        ("/files*", "GET", "/files", True),
        ("GET /files/*", "PUT", "/files/a", False),
        ("*", "GET", "/", True),
        ("*", "GET", "/anything/at/all", True),
        ("POST *", "POST", "/", True),
        ("POST *", "GET", "/", False),
        ("/items/{id}", "GET", "/items/7", True),
        ("/items/{id}", "GET", "/items/7/", False),
        ("/items/{id}", "GET", "/items/", False),
        ("/items/{id}", "GET", "/items/7/8", False),
        ("/items/{id}/parts/{part}", "GET", "/items/7/parts/ä b", True),
        ("/items/{id}/parts/{part}", "GET", "/items/7/part/8", False),
        ("/items/{id}.json", "GET", "/items/7.json", True),
        ("/items/{id}.json", "GET", "/items/7xjson", False),
        ("/items/{id}/*", "GET", "/items/7/a/b", True),
        ("/items/{id}/*", "GET", "/items//a", False),
        ("/a.c", "GET", "/abc", False),
        ("/a.c/*", "GET", "/abc/d", False),
        ("/(a|b)*", "GET", "/a", False),
        ("/with space", "GET", "/with space", True),
        ("/ä", "GET", "/ä", True),
        ("/", "GET", "/", True),
        ("/", "GET", "", False),
    ],
)
def test_a_pattern_means_what_it_says(pattern: str, method: str, path: str, fits: bool) -> None:
    assert find(method, path, pattern) == (pattern if fits else None)


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (("/a", "GET /a"), "/a"),
        (("GET /a", "/a"), "GET /a"),
        (("POST /a", "/a"), "/a"),
        (("/*", "/a"), "/*"),
        (("/a", "/*"), "/a"),
        (("/{x}", "/*", "/a"), "/{x}"),
        (("POST *", "/{x}", "/a"), "/{x}"),
        (("/b", "/c*"), None),
        ((), None),
    ],
)
def test_the_first_matching_pattern_counts(patterns: tuple[str, ...], found: str | None) -> None:
    assert find("GET", "/a", *patterns) == found


@pytest.mark.parametrize(
    "pattern",
    ["", "login", "post /login", "POST", "POST  /login", "/a/*/b", "/*.json", "**", "/{id", "/id}", "/{a/b}", 7],
)
def test_a_pattern_that_would_never_fit_is_refused(pattern: str) -> None:
    expected = r"routes: expected a path such as '/login', 'POST /login', '/files/\*' or '/items/{id}', got "
    with pytest.raises(InvalidInput, match=expected):
        PathPatterns("routes", {pattern: 1})
