"""Limits of routes, through the routing of each framework: a request that reaches the handler was counted."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
import httpx
import litestar
import pytest
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route
from starlette.staticfiles import StaticFiles
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from headgate import Gate, Limiter, ManualClock, MemoryStore, Policy
from headgate.edges import asgi, wsgi
from headgate.edges.fastapi import RateLimit
from headgate.edges.requests import HttpRequest
from tests.support import routed_apps as apps
from tests.support.greeting_app import greeting_app, header
from tests.support.routed_apps import RoutedApp, RouteHandler
from tests.support.wrapped_store import WrappedStore

pytestmark = pytest.mark.once

VARIANTS = [
    # slashes
    "/login", "/login/", "//login", "///login//", "/login//", "//login/", "login", "/login/%2F", "http://example.com/login",
    # percent-encoding
    "/lo%67in", "/%6Cogin", "/%6c%6f%67%69%6e", "/login%2F", "%2Flogin", "/%2Flogin", "/lo%2567in", "/login%252F",
    # dot segments
    "/./login", "/login/.", "/x/../login", "/login/x/..", "/%2e%2e/login", "/login/%2e",
    # case, and letters that are the same to a regular expression that ignores it
    "/Login", "/LOGIN", "/log%C4%B1n", "/lo%EF%BD%87in",
    # parameters, queries, fragments, suffixes
    "/login;", "/login;x=1", "/login%3Bx=1", "/login?", "/login?x=/y", "/login%3Fx", "/login%23", "/login.json",
    # characters that some read as nothing or as a slash
    "/login%0A", "/login%0D%0A", "/login%20", "/login%00", "/login%09", "/login%5C", "%5Clogin", "/login%C0%AF",
    "/login%FF",
    # where the application may be mounted
    "/api/login", "/api//login", "//api/login", "/api/login/", "/API/login", "/x/api/login", "/apilogin",
    "/api%2Flogin", "/api/api/login", "/api/lo%67in%0A", "/api/%2Flogin", "/api/Login", "/api;x/login", "/api/../login",
    "/api/api//login//",
]  # fmt: skip
OVERRIDE = ((b"x-http-method-override", b"GET"), (b"x-method-override", b"PUT"))
REQUESTS = [
    *[("POST", target, ()) for target in VARIANTS],
    *[(method, target, ()) for method in ("post", "Post") for target in ("/login", "/api/login")],
    *[("POST", target, OVERRIDE) for target in ("/login", "/api/login")],
]


FRAMEWORKS: list[tuple[Callable[[RouteHandler], RoutedApp], set[str]]] = [
    (apps.raw_asgi, {"/login", "/lo%67in", "/login?x=/y"}),
    (apps.raw_wsgi, {"/login", "/lo%67in", "/login?x=/y"}),
    (apps.starlette_app, {"/login", "/lo%67in", "/login%0A", "%2Flogin"}),
    (apps.starlette_endpoint, {"/login", "/login%0A"}),
    (apps.starlette_at_a_root_path, {"/login", "/login%0A"}),
    (apps.starlette_at_a_root_path_that_is_not_in_the_path, {"/login", "/api/login", "/login%0A"}),
    (apps.starlette_with_the_root_path_in_the_pattern, {"/login", "/login%0A"}),
    (apps.starlette_before_a_mount, {"/api/login", "/api%2Flogin"}),
    (apps.starlette_in_a_mount, {"/api/login", "/api%2Flogin", "/login"}),
    (apps.starlette_in_a_mount_at_a_root_path, {"/api/login", "/api%2Flogin", "/login"}),
    (apps.fastapi_app, {"/login", "/login%0A"}),
    (apps.fastapi_at_a_root_path, {"/login", "/login%0A"}),
    (apps.fastapi_with_a_root_path_of_its_own, {"/login", "/api/login", "/api%2Flogin"}),
    (apps.fastapi_in_a_mount, {"/api/login", "/api%2Flogin"}),
    (apps.litestar_wrapped, {"/login", "/login/", "///login//", "login", "/login%2F"}),
    (apps.litestar_at_a_root_path, {"/login", "///login//"}),
    (apps.litestar_at_a_root_path_that_is_not_in_the_path, {"/login", "/api/login", "/x/api/login", "/apilogin"}),
    (apps.litestar_layered, {"/login", "///login//", "/login%2F"}),
    (apps.litestar_in_a_mount, {"/api/login", "/api//login", "/apilogin"}),
    (apps.flask_wrapped, {"/login", "//login", "login", "/%2Flogin"}),
    (apps.flask_that_accepts_slashes, {"/login", "/login/", "//login/"}),
    (apps.flask_at_a_script_name, {"/login", "//login"}),
    (apps.flask_in_a_dispatcher, {"/api/login", "/api//login"}),
    (apps.flask_before_a_dispatcher, {"/api/login", "/api//login"}),
    (apps.django_wsgi, {"/login", "/lo%67in"}),
    (apps.django_at_a_script_name, {"/login", "/lo%67in"}),
    (apps.django_asgi, {"/login", "/lo%67in"}),
    (apps.django_asgi_at_a_root_path, {"/login", "/lo%67in"}),
    (apps.django_asgi_at_a_root_path_that_is_not_in_the_path, {"/login", "/api/login"}),
    (apps.django_that_ignores_case, {"/login", "/login/", "/LOGIN", "/log%C4%B1n"}),
]
"""Applications, and some variants that do reach the handler."""


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    with apps.configured_django():
        yield


@pytest.mark.parametrize(("framework", "known"), FRAMEWORKS, ids=[one.__name__ for one, _ in FRAMEWORKS])
def test_every_variant_of_a_route_that_reaches_its_handler_is_counted(
    framework: Callable[[RouteHandler], RoutedApp], known: set[str]
) -> None:
    handler = RouteHandler()
    served = framework(handler)
    reached, missed = set(), []
    for method, target, headers in REQUESTS:
        before = handler.reached, handler.counted
        served.send(method, target, headers)
        if handler.reached > before[0]:
            reached.add(target)
            if handler.counted == before[1]:
                missed.append((method, target))
    assert not missed
    assert known <= reached, "the test would say nothing"


# Patterns with parameters --------------------------------------------------------------------------------------------


TREES = [
    "", "/", "/a", "/a/", "//a", "/a//b", "/a/b/c", "/%2Fa", "/a%2Fb", "/%2e%2e/a", "/../x", "/a/..", "/.", "/a;x",
    "/%0A", "/a%0Ab", "/a%0A", "/%00", "/ä", "/%FF", "/a%3Fb", "/%20", "/7", "/-7", "/1.5", "%0A", "%2F", "x", ".",
    ";x/a", "/A", "/a.json", "/%5Ca",
]  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "route", "pattern"),
    [
        (apps.starlette_items, "/items/{thing}", "GET /items/{id}"),
        (apps.starlette_items, "/items/{thing:int}", "GET /items/{id}"),
        (apps.starlette_items, "/items/{thing:path}", "GET /items/*"),
        (apps.starlette_mount, "/items", "GET /items/*"),
        (apps.litestar_items, "/items/{thing:str}", "GET /items/{id}"),
        (apps.litestar_items, "/items/{thing:path}", "GET /items/*"),
        (apps.litestar_mount, "/items", "GET /items*"),
        (apps.litestar_mount_layered, "/items", "GET /items*"),
        (apps.flask_items, "/items/<thing>", "GET /items/{id}"),
        (apps.flask_items, "/items/<path:thing>", "GET /items/*"),
        (apps.dispatched, "/items", "GET /items/*"),
        (apps.django_items, "items/<thing>", "GET /items/{id}"),
        (apps.django_items, "items/<path:thing>", "GET /items/*"),
    ],
)
def test_every_path_that_a_route_with_parameters_takes_is_counted(
    framework: Callable[[RouteHandler, str, str], RoutedApp], route: str, pattern: str
) -> None:
    handler = RouteHandler()
    served = framework(handler, route, pattern)
    missed = []
    for start in ("/items", "//items", "/Items"):
        for rest in TREES:
            for method in ("GET", "HEAD"):
                before = handler.reached, handler.counted
                served.send(method, start + rest)
                if handler.counted - before[1] < handler.reached - before[0]:
                    missed.append((method, start + rest))
    assert not missed
    assert handler.reached >= 2


# Routes that allow more than the default -----------------------------------------------------------------------------


LAX = {"/ping": "unlimited", "/assets/*": "unlimited", "WEBSOCKET *": "unlimited", "GET /files/*": "unlimited"}
STRAY = [
    "/items/apiping", "/x/api/ping", "/apiping", "/PING", "/p%C4%B1ng", "/ping/", "/ping%0A", "//ping", "/%2Fping",
    "/x/../ping", "/assets", "/ASSETS/a", "/%2Fassets/a", "/x/api/assets/a", "/assets/../x", "/assets/%2e%2e/x",
    "/assets/..;/x", "/api/x",
]  # fmt: skip


def starlette_pages(handler: RouteHandler) -> Any:
    routes = [Route("/ping", PlainTextResponse("pong")), Route("/{path:path}", handler.starlette)]
    return asgi.RateLimitMiddleware(Starlette(routes=routes), limiter=handler.limiter, routes=LAX)


def litestar_pages(handler: RouteHandler) -> Any:
    @litestar.get("/ping", sync_to_thread=False)
    def ping() -> None: ...

    @litestar.get(["/", "/{path:path}"], sync_to_thread=False)
    def page() -> None:
        handler()

    app = litestar.Litestar([ping, page], logging_config=None)
    return asgi.RateLimitMiddleware(app, limiter=handler.limiter, routes=LAX)


def flask_pages(handler: RouteHandler) -> Any:
    app = flask.Flask(__name__)
    app.add_url_rule("/ping", "ping", lambda: "pong")

    @app.get("/<path:path>", merge_slashes=False)
    def page(path: str) -> str:
        handler()
        return "page"

    return wsgi.RateLimitMiddleware(app.wsgi_app, limiter=handler.limiter, routes=LAX)


@pytest.mark.parametrize("pages", [starlette_pages, litestar_pages, flask_pages])
@pytest.mark.parametrize("prefix", ["", "/api"])
def test_a_path_that_is_only_like_a_route_keeps_the_limit_of_its_own(
    pages: Callable[[RouteHandler], Any], prefix: str
) -> None:
    """The caller chooses the path. If it reaches the handler of all other pages, the default limit must count it."""
    handler = RouteHandler()
    app = pages(handler)
    script_name = prefix if pages is flask_pages else None
    served = RoutedApp(app, root_path=prefix, prefixed=False, script_name=script_name)
    missed = []
    cut = [] if script_name is not None or not prefix else ["/assets/api/x"]  # to Litestar it is "/x"
    for target in [*STRAY, *cut]:
        before = handler.reached, handler.counted
        served.send("GET", target)
        if handler.counted - before[1] < handler.reached - before[0]:
            missed.append(target)
    assert not missed
    assert handler.reached >= 8
    counted = handler.counted
    for target in ("/ping", "/assets/a.css"):
        served.send("GET", target)
    assert handler.counted == counted


@pytest.mark.parametrize("wrap", [lambda app: Mount("/api", app=app), lambda app: Mount("/api", routes=[*app.routes])])
def test_parameters_of_a_host_or_a_route_leave_patterns_with_the_prefix_alone(
    wrap: Callable[[Starlette], Mount],
) -> None:
    handler = RouteHandler()
    limited = [Middleware(asgi.RateLimitMiddleware, "unlimited", routes={"/api/login/{name}": handler.limiter})]
    inner = Starlette(routes=[Route("/login/{name}", handler.starlette, middleware=limited)])
    for app in (
        Starlette(routes=[wrap(inner)]),
        Starlette(routes=[Host("{tenant}.com", app=Starlette(routes=[wrap(inner)]))]),
    ):
        RoutedApp(app).send("GET", "/api/login/bob")
    assert (handler.reached, handler.counted) == (2, 2)


# Several limits for one request --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stores", [(MemoryStore, MemoryStore), (WrappedStore, WrappedStore), (WrappedStore, MemoryStore)]
)
def test_a_request_that_counts_for_several_limits_is_counted_by_all_or_by_none(stores: tuple[Any, Any]) -> None:
    default, login = (
        Limiter("5/day", store=stores[0](clock=ManualClock())),
        Limiter("3/day", store=stores[1](clock=ManualClock())),
    )
    statuses = iter([200, 200, 500, 200, 200])

    def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello", next(statuses))

    app = asgi.RateLimitMiddleware(
        Starlette(routes=[Route("/{path:path}", page)]), limiter=default, routes={"/login": login}, counts="successes"
    )

    async def told(target: str) -> tuple[int, str, int, int]:
        transport = httpx.ASGITransport(app, client=("10.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.get(target)
        policy = response.headers["ratelimit-policy"].partition(";")[0]
        return response.status_code, policy, default.peek("10.0.0.1").remaining, login.peek("10.0.0.1").remaining

    targets = ("/login/", "/LOGIN", "/login/", "/login/", "/login/", "/home", "/Login")
    assert [asyncio.run(told(target)) for target in targets] == [
        (200, '"/login"', 4, 2),
        (200, '"/login"', 3, 1),
        (500, '"/login"', 3, 1),  # refunded by both
        (200, '"/login"', 2, 0),
        (429, '"/login"', 2, 0),  # counted by neither
        (200, '"default"', 1, 0),
        (429, '"/login"', 1, 0),
    ]


def test_the_actual_cost_counts_for_all_limits_of_a_request() -> None:
    handler, actual = RouteHandler(), iter([7, 0])
    login = Limiter("100/day", store=WrappedStore(clock=ManualClock()))
    app = asgi.RateLimitMiddleware(
        handler.asgi, limiter=handler.limiter, routes={"/login": login}, cost=3, settle=lambda *_: next(actual)
    )
    for _ in range(2):
        RoutedApp(app).send("POST", "/login/")
        assert (handler.counted, login.peek("10.0.0.1").remaining) == (7, 93)


@pytest.mark.parametrize(("agent", "name"), [("", "routed by address"), ("10.0.0.1", "routed")])
def test_a_request_counts_once_for_a_limiter_that_several_patterns_have(agent: str, name: str) -> None:
    handler = RouteHandler()
    routes = {"/login": handler.limiter, "/api/login": handler.limiter}
    app = asgi.RateLimitMiddleware(handler.asgi, limiter="unlimited", routes=routes, key=lambda _: agent)
    RoutedApp(app, root_path="/api").send("POST", "/login")
    counter = Limiter(handler.limiter.limit, store=handler.limiter.store, name=name)
    assert counter.peek("10.0.0.1").remaining == 999_999


def test_a_gate_counts_a_doubtful_path_in_each_tier_once() -> None:
    policy = Policy(limits={"normal": "5/day", "heavy": "2/day"}, addresses={"limit": "9/day"})
    gate = Gate(policy, store=MemoryStore(clock=ManualClock()))
    app = asgi.RateLimitMiddleware(greeting_app, gate=gate, key=header("x-agent"), routes={"/reports/*": "heavy"})
    RoutedApp(app).send("GET", "//reports/a", [(b"x-agent", b"bob")])
    assert [gate.peek("bob", "http", tier).remaining for tier in ("normal", "heavy")] == [4, 1]
    RoutedApp(app).send("GET", "//reports/a")
    assert gate.check_address("10.0.0.1").remaining == 7


# Methods -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", [apps.starlette_get, apps.flask_get, apps.django_get])
def test_head_counts_where_get_does(framework: Callable[[RouteHandler], RoutedApp]) -> None:
    handler = RouteHandler()
    served = framework(handler)
    for method in ("GET", "HEAD", "get", "head", "Head", "OPTIONS", "POST"):
        before = handler.reached, handler.counted
        served.send(method, "/login")
        assert handler.counted - before[1] >= handler.reached - before[0], method
    assert handler.reached >= 2


def test_a_request_with_a_method_of_that_name_is_no_websocket() -> None:
    """A connect has no method, and is called WEBSOCKET in patterns. A request may call itself so, too."""
    handler = RouteHandler()
    app = Starlette(routes=[Mount("/", app=PlainTextResponse("hello"))])
    app.add_middleware(asgi.RateLimitMiddleware, limiter=handler.limiter, skip=["WEBSOCKET *"])
    for method in ("WEBSOCKET", "websocket", "WebSocket"):
        RoutedApp(app).send(method, "/login")
    assert handler.counted == 3


@pytest.mark.parametrize("method", ["", "A B", "GET /files/", "WEBSOCKET", "websocket"])
def test_a_method_that_is_none_counts_where_a_pattern_is_for_all_and_nowhere_else(method: str) -> None:
    """HTTP/2 servers accept any method, and Django calls views for any."""
    for routes in ({"/login": None, **LAX}, {**LAX, "/login": None}, {**LAX, "*": None}, {**LAX}):
        handler = RouteHandler()
        django_view = apps.django_asgi(handler).app._app
        given = {pattern: limit or handler.limiter for pattern, limit in routes.items()}
        default = "unlimited" if None in routes.values() else handler.limiter
        RoutedApp(asgi.RateLimitMiddleware(django_view, limiter=default, routes=given)).send(method, "/login")
        assert (handler.reached, handler.counted) == (1, 1)


def test_functions_get_the_method_in_upper_case_whatever_the_server_does() -> None:
    handler = RouteHandler()
    seen = []

    def cost(request: HttpRequest) -> int:
        seen.append(request.method)
        return 1

    for served in (
        RoutedApp(asgi.RateLimitMiddleware(handler.asgi, limiter="unlimited", cost=cost)),
        RoutedApp(wsgi.RateLimitMiddleware(handler.wsgi, limiter="unlimited", cost=cost), script_name=""),
    ):
        served.send("post", "/")
    assert seen == ["POST", "POST"]


# Static files --------------------------------------------------------------------------------------------------------


def starlette_files(folder: str, limits: dict[str, Any]) -> httpx.AsyncBaseTransport:
    app = Starlette(routes=[Mount("/static", StaticFiles(directory=folder))])
    return httpx.ASGITransport(asgi.RateLimitMiddleware(app, **limits))


def flask_files(folder: str, limits: dict[str, Any]) -> httpx.BaseTransport:
    app = flask.Flask("files", static_folder=folder, static_url_path="/static")
    return httpx.WSGITransport(wsgi.RateLimitMiddleware(app.wsgi_app, **limits))


@pytest.mark.parametrize("framework", [starlette_files, flask_files])
@pytest.mark.parametrize("target", ["/static/x/%2e%2e/big/a", "/static/%2e/big/a", "/static/big/x/%2e%2e/a"])
def test_a_file_has_the_limit_of_its_folder_by_whatever_path_it_is_found(
    tmp_path: Path, framework: Callable[[str, dict[str, Any]], Any], target: str
) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "a").write_text("a")
    transport = framework(str(tmp_path), {"limiter": "60/minute", "routes": {"/static/big/*": "2/minute"}})

    def get() -> int:
        if isinstance(transport, httpx.BaseTransport):
            with httpx.Client(transport=transport, base_url="http://example.com") as client:
                return client.get(target).status_code

        async def aget() -> int:
            async with httpx.AsyncClient(transport=transport, base_url="http://example.com") as client:
                return (await client.get(target)).status_code

        return asyncio.run(aget())

    assert [get() for _ in range(3)] == [200, 200, 429]


# Skipped requests ----------------------------------------------------------------------------------------------------


def apps_that_skip(handler: RouteHandler) -> dict[str, Any]:
    return {"limiter": handler.limiter, "skip": ["/static/*", "/health"]}


def test_nothing_but_the_skipped_paths_is_skipped() -> None:
    """Litestar normalises paths, and cuts them after the first occurrence of the root path."""
    handler = RouteHandler()
    app = asgi.RateLimitMiddleware(apps.litestar_app(handler), **apps_that_skip(handler))
    for root_path in ("", "/api"):
        served = RoutedApp(app, root_path=root_path, prefixed=False)
        for target in [*VARIANTS, "/static/api/login", "/static/../login", "/health/api/login", "/static/..%2Flogin"]:
            before = handler.reached, handler.counted
            served.send("POST", target)
            assert handler.counted - before[1] >= handler.reached - before[0], target
        before = handler.reached, handler.counted
        for target in ("/health", "/static/site.css", "/he%61lth"):
            served.send("GET", target)
        assert (handler.reached, handler.counted) == before
    assert handler.reached > 20


@pytest.mark.parametrize("target", ["/api/health", "/api/static/site.css"])
def test_an_application_skips_paths_of_its_own_wherever_it_is_mounted(target: str) -> None:
    handler = RouteHandler()
    inner = Starlette(middleware=[Middleware(asgi.RateLimitMiddleware, **apps_that_skip(handler))])
    RoutedApp(Starlette(routes=[Mount("/api", app=inner)])).send("GET", target)
    RoutedApp(inner, root_path="/api").send("GET", target.removeprefix("/api"))
    wrapped = wsgi.RateLimitMiddleware(handler.wsgi, **apps_that_skip(handler))
    RoutedApp(DispatcherMiddleware(flask.Flask("outer"), {"/api": wrapped}), script_name="").send("GET", target)
    assert handler.counted == 0


@pytest.mark.parametrize("options", [{"skip": ["/static/*"]}, {"routes": {"/static/*": "unlimited", "/auth/*": None}}])
def test_a_prefix_that_the_caller_chooses_matches_no_pattern(options: dict[str, Any]) -> None:
    """A tenant may be called like a path of the application."""
    handler = RouteHandler()
    routes = {path: limit or handler.limiter for path, limit in options.get("routes", {}).items()}
    limited = Middleware(asgi.RateLimitMiddleware, handler.limiter, **{**options, "routes": routes})
    inner = Starlette(routes=[Route("/auth/login", handler.starlette)], middleware=[limited])
    served = RoutedApp(Starlette(routes=[Mount("/{tenant}", app=inner)]))
    served.send("GET", "/acme/auth/login")
    served.send("GET", "/static/auth/login")
    assert (handler.reached, handler.counted) == (2, 2)
    served.send("GET", "/acme/static/site.css")
    assert (handler.reached, handler.counted) == (2, 2)


# The dependency of FastAPI -------------------------------------------------------------------------------------------


def test_a_dependency_counts_every_request_that_reaches_its_route() -> None:
    handler = RouteHandler()
    limited = [Depends(RateLimit(handler.limiter))]
    inner = FastAPI(dependencies=limited)
    inner.api_route("/login", methods=["GET", "HEAD", "POST"])(handler.endpoint)
    app = FastAPI()
    app.mount("/api", inner)
    app.include_router(inner.router, prefix="/v1", dependencies=limited)
    for method in ("GET", "HEAD", "POST"):
        for target in [*VARIANTS, "/v1/login", "/v1/login%0A"]:
            before = handler.reached, handler.counted
            RoutedApp(app).send(method, target)
            assert handler.counted - before[1] >= handler.reached - before[0], target
    assert handler.reached >= 9


def test_a_dependency_of_an_application_does_not_reach_what_is_mounted_in_it() -> None:
    """As the docs say: FastAPI has it so."""
    handler = RouteHandler()
    inner = FastAPI()
    inner.get("/login")(handler.endpoint)
    app = FastAPI(dependencies=[Depends(RateLimit(handler.limiter))])
    app.mount("/api", inner)
    RoutedApp(app).send("GET", "/api/login")
    assert (handler.reached, handler.counted) == (1, 0)
