"""Path patterns, and the requests that match them."""

import itertools
import re
import subprocess
import sys

import pytest

from headgate import InvalidInput
from headgate.edges.paths import RequestPath, RoutePatterns, SkipPatterns
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once


DEFAULT = "default"


def find(
    method: str, path: str, *patterns: str, prefix: str = "", sent: str = "", variable_prefix: bool = False
) -> list[str]:
    """The patterns that count for a request."""
    routes = RoutePatterns("routes", {pattern: pattern for pattern in patterns}, DEFAULT)
    return routes.find(method, RequestPath(path, prefix, sent, variable_prefix))


@pytest.mark.parametrize(
    ("pattern", "method", "path", "fits"),
    [
        ("/login", "POST", "/login", True),
        ("/login", "GET", "/login", True),
        ("/login", "GET", "/x/login", False),
        ("/login", "GET", "/login/x", False),
        ("/login", "GET", "/logins", False),
        ("POST /login", "POST", "/login", True),
        ("POST /login", "GET", "/login", False),
        ("POST /login", "HEAD", "/login", False),
        ("GET /login", "HEAD", "/login", True),
        ("HEAD /login", "GET", "/login", False),
        ("WEBSOCKET /chat", "WEBSOCKET", "/chat", True),
        ("WEBSOCKET /chat", "GET", "/chat", False),
        ("/files/*", "GET", "/files/", True),
        ("/files/*", "GET", "/filesystem", False),
        ("/files*", "GET", "/files", True),
        ("/files*", "GET", "/filesystem", True),
        ("GET /files/*", "PUT", "/files/a", False),
        ("*", "GET", "/", True),
        ("*", "GET", "", True),
        ("*", "GET", "/anything/at/all", True),
        ("POST *", "POST", "/", True),
        ("POST *", "GET", "/", False),
        ("/items/{id}", "GET", "/items/7", True),
        ("/items/{id}", "GET", "/items/", False),
        ("/items/{id}", "GET", "/items/7/8", False),
        ("/items/{id}/parts/{part}", "GET", "/items/7/parts/ä b", True),
        ("/items/{id}/parts/{part}", "GET", "/items/7/part/8", False),
        ("/items/{id}.json", "GET", "/items/7.json", True),
        ("/items/{id}.json", "GET", "/items/7xjson", False),
        ("/items/{id}/*", "GET", "/items/7/a/b", True),
        ("/a.c", "GET", "/abc", False),
        ("/a.c/*", "GET", "/abc/d", False),
        ("/(a|b)*", "GET", "/a", False),
        ("/with space", "GET", "/with space", True),
        ("/ä", "GET", "/ä", True),
        ("/", "GET", "/", True),
        ("/", "GET", "/a", False),
    ],
)
def test_a_pattern_means_what_it_says(pattern: str, method: str, path: str, fits: bool) -> None:
    assert find(method, path, pattern) == [pattern if fits else DEFAULT]


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("/login", ["/login/", "//login", "///login//", "login", "/LOGIN", "/Login/", "/login\n", "/log\u0131n"]),
        ("/login/", ["/login", "//login"]),
        ("/Login", ["/login", "/LOGIN"]),
        ("//a//b/", ["/a/b"]),
        ("/ßtraße", ["/ßtraße/", "/ẞTRAẞE"]),
        ("/items/{id}/parts", ["/items//7///parts/", "/Items/7/PARTS"]),
        ("/items/{id}", ["/items/7/", "/items/7\n"]),
        ("/files/*", ["//files//a", "/FILES/a/", "/files", "/files/a/b\nc", "/files/../login", "/files/%2e%2e/login"]),
        ("/files/*", ["/x/../files/a", "/./files/a", "/x/./../files/a", "/files\\a", "/x/..\\files/a"]),
        ("/", ["", "//", "/\n"]),
    ],
)
def test_a_path_that_a_framework_may_take_for_the_pattern_counts_for_it_too(pattern: str, paths: list[str]) -> None:
    """It may as well be another path, which has the default limit."""
    assert {path: find("GET", path, pattern) for path in paths} == {path: [DEFAULT, pattern] for path in paths}


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
    assert find("GET", "/a", *patterns) == [found or DEFAULT]
    assert find("GET", "//A/", *patterns) == [DEFAULT, *([found] if found else [])]


def test_methods_are_compared_by_themselves_and_with_case() -> None:
    assert find("websocket", "/chat", "WEBSOCKET /chat") == [DEFAULT]
    for method in ("", "A B", "GET /files/", "POST\n", "/", "GET|HEAD"):
        assert find(method, "/login", "/files/*", "GET /files/*", "/login") == ["/login"]
        assert find(method, "/login", "GET /login", "*") == ["*"]
        assert SkipPatterns("skip", ["GET /login", "/health"]).match(method, RequestPath("/login")) is False


@pytest.mark.parametrize(
    ("path", "prefix", "patterns", "found"),
    [
        ("/api/login", "/api", ("/login",), ["/login"]),
        ("/api/login", "/api", ("/api/login",), ["/api/login"]),
        ("/login", "/api", ("/login",), ["/login"]),
        ("/login", "/", ("/login",), ["/login"]),
        ("/other/login", "/api", ("/login",), [DEFAULT]),
        # An earlier pattern that matches by the one name comes before a later one that matches by both.
        ("/api/login", "/api", ("/login", "*"), ["/login"]),
        ("/api/login", "/api", ("/api/login", "/*"), ["/api/login"]),
        ("/api/files/a", "/api", ("/files/*", "*"), ["/files/*"]),
        ("/api/login", "/api", ("*", "/login"), ["*"]),
        # Neither of these is more likely to be meant.
        ("/api/login", "/api", ("/api/*", "/login"), ["/api/*", "/login"]),
        ("/api/login", "/api", ("/login", "/api/login"), ["/login", "/api/login"]),
        # Only some frameworks cut these.
        ("/api", "/api", ("/",), [DEFAULT, "/"]),
        ("/x/api/login", "/api", ("/login",), [DEFAULT, "/login"]),
        ("/apilogin", "/api", ("/login",), [DEFAULT, "/login"]),
        ("/api//login", "/api/", ("/login",), [DEFAULT, "/login"]),
        ("/items/apilogin", "/api", ("/login", "/items/*"), ["/items/*", "/login"]),
        ("/items/apilogin", "/api", ("/login", "*"), ["*", "/login"]),
        ("/items/api/other", "/api", ("/items/*",), ["/items/*", DEFAULT]),
    ],
)
def test_a_prefix_is_part_of_the_path_or_not(
    path: str, prefix: str, patterns: tuple[str, ...], found: list[str]
) -> None:
    assert find("POST", path, *patterns, prefix=prefix) == found


def test_a_prefix_that_the_caller_may_have_chosen_replaces_no_limit() -> None:
    assert find("GET", "/static/login", "/static/*", prefix="/static", variable_prefix=True) == [DEFAULT, "/static/*"]
    assert find("GET", "/acme/static/a", "/static/*", prefix="/acme", variable_prefix=True) == ["/static/*"]
    assert find("GET", "/api/login", "/api/login", prefix="/api", variable_prefix=True) == [DEFAULT, "/api/login"]


def test_a_bare_path_counts_for_an_open_pattern_too() -> None:
    assert find("POST", "/files", "/files/*", "POST /files") == ["POST /files", "/files/*"]
    assert find("POST", "/files", "POST /files", "/files/*") == ["POST /files"]
    assert find("POST", "/files", "/files/*", "/*") == ["/*", "/files/*"]


def test_a_path_that_a_framework_has_changed_is_matched_as_it_was_sent_too() -> None:
    assert find("GET", "/a/", "/files/*", sent="/files/a") == [DEFAULT, "/files/*"]
    assert find("GET", "/a", "/a", sent="/files/a") == ["/a", DEFAULT]
    assert find("GET", "/a/", "/files/*", prefix="/api", sent="/api/files/a") == [DEFAULT, "/files/*"]
    assert find("GET", "/login", "/api/login", prefix="/api", sent="/api/login") == ["/api/login"]
    assert find("GET", "/api/login", "/api/login", prefix="/api", sent="/login") == ["/api/login"]


@pytest.mark.parametrize(
    ("pattern", "method", "path", "skipped"),
    [
        ("/health", "GET", "/health", True),
        ("/health", "POST", "/health", True),
        ("GET /health", "GET", "/health", True),
        ("/static/*", "GET", "/static/", True),
        ("/static/*", "GET", "/static/css/site.css", True),
        ("/static/*", "GET", "/static/css/", True),
        ("/items/{id}", "GET", "/items/7", True),
        ("*", "GET", "/", True),
        ("WEBSOCKET *", "WEBSOCKET", "/chat", True),
        # All that may be something else to somebody.
        ("WEBSOCKET *", "websocket", "/login", False),
        ("GET /health", "HEAD", "/health", False),
        ("/health", "GET", "/health/", False),
        ("/health", "GET", "/Health", False),
        ("/health", "GET", "//health", False),
        ("/health", "GET", "health", False),
        ("/health", "GET", "/health\n", False),
        ("/health", "GET", "/health/x", False),
        ("/static/*", "GET", "/static", False),
        ("/static/*", "GET", "/static/../login", False),
        ("/static/*", "GET", "/static/..", False),
        ("/static/*", "GET", "/static/./a", False),
        ("/static/*", "GET", "/static//login", False),
        ("/static/*", "GET", "/static/..\\login", False),
        ("/static/*", "GET", "/static/%2e%2e/login", False),
        ("/static/*", "GET", "/static/..;/login", False),
        ("/static/*", "GET", "/static/\x00", False),
        ("/static/*", "GET", "/static/a\nb", False),
        ("/static/*", "GET", "/static/..a/.b", True),
        ("/{name}", "GET", "/..", False),
        ("*", "GET", "/a/../b", False),
    ],
)
def test_only_what_is_certainly_the_pattern_is_skipped(pattern: str, method: str, path: str, skipped: bool) -> None:
    assert SkipPatterns("skip", [pattern]).match(method, RequestPath(path)) == skipped


@pytest.mark.parametrize(
    ("path", "prefix", "skipped"),
    [
        ("/api/health", "/api", True),
        ("/api/health", "/api/", True),
        ("/health", "/api", True),
        ("/health", "/", True),
        ("/x/api/health", "/api", False),
        ("/health/api/login", "/api", False),
        ("/apihealth", "/api", False),
        ("/api/api/health", "/api", False),
        ("/api", "/api", False),
    ],
)
def test_a_prefix_is_taken_off_where_it_begins_the_path(path: str, prefix: str, skipped: bool) -> None:
    assert SkipPatterns("skip", ["/health", "/health/*"]).match("GET", RequestPath(path, prefix)) == skipped
    assert SkipPatterns("skip", ["/api/health"]).match("GET", RequestPath("/api/health", "/api"))


@pytest.mark.parametrize(
    ("request_path", "skipped"),
    [
        (RequestPath("/health", sent="/health"), True),
        (RequestPath("/health", sent="/files/health"), False),
        (RequestPath("/health", "/api", sent="/api/health"), True),
        (RequestPath("/api/health", "/api", sent="/health"), True),
        (RequestPath("/health", "/api", sent="/api/health", variable_prefix=True), True),
        (RequestPath("/health/login", "/health", variable_prefix=True), False),
    ],
)
def test_only_what_was_sent_as_that_is_skipped(request_path: RequestPath, skipped: bool) -> None:
    """Within a mount of Litestar, "/files/health" becomes "/health"."""
    assert SkipPatterns("skip", ["/health", "/health/*"]).match("GET", request_path) == skipped


@pytest.mark.parametrize(
    "pattern",
    ["", "login", "post /login", "POST", "POST  /login", "/a/*/b", "/*.json", "**", "/{id", "/id}", "/{a/b}", 7],
)
def test_a_pattern_that_would_never_fit_is_refused(pattern: str) -> None:
    expected = r": expected a path such as '/login', 'POST /login', '/files/\*' or '/items/{id}', got "
    with pytest.raises(InvalidInput, match="routes" + expected):
        RoutePatterns("routes", {pattern: 1}, 0)
    with pytest.raises(InvalidInput, match="skip" + expected):
        SkipPatterns("skip", [pattern])


# Several parameters in one segment -----------------------------------------------------------------------------------


SHARED = [
    "/{a}-{b}",
    "/{a}-{b}-{c}",
    "/{a}{b}",
    "/x{a}--{b}y",
    "/{a}-x-{b}",
    "/{a}-{b}*",
    "/{a}-{b}/x",
    "/{a}-x/{b}-{c}",
]


def test_parameters_that_share_a_segment_match_what_can_be_divided_among_them() -> None:
    for pattern in SHARED:
        skip = SkipPatterns("skip", [pattern])
        slow = re.compile(re.sub(r"\{.\}", "[^/]+", pattern).replace("*", ".*"))
        for length in range(7):
            for letters in itertools.product("-xy/", repeat=length):
                path = f"/{''.join(letters)}"
                if "//" not in path:
                    assert skip.match("GET", RequestPath(path)) == bool(slow.fullmatch(path)), (pattern, path)


def test_a_long_path_is_matched_without_trying_every_division() -> None:
    """With these lengths, that would take hours."""
    script = f"""if True:
        from headgate.edges.paths import RequestPath, RoutePatterns, SkipPatterns
        for pattern in {SHARED}:
            for part in ("-", "x", "-x", "--", "-/"):
                path = RequestPath("/x" + part * 20_000 + "/z/z/z")
                RoutePatterns("routes", {{pattern: 1}}, 0).find("GET", path)
                SkipPatterns("skip", [pattern]).match("GET", path)
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
