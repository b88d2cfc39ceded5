"""The same handler behind a rate limit, in the applications of each framework, and requests that they route."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import django.http
import django.urls
import flask
import litestar
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.test import override_settings
from django.views import View
from fastapi import FastAPI
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from headgate import Limiter, ManualClock, MemoryStore
from headgate.edges import asgi, wsgi


class RoutedApp:
    """An application behind a middleware, and how often its handler and the limit of the route have seen a request."""

    def __init__(self, app: Any, *, root_path: str = "", prefixed: bool = True, script_name: str | None = None) -> None:
        self.app, self.root_path, self.script_name = app, root_path, script_name
        self.prefix = root_path if prefixed else ""
        """What the server puts before paths: its root path, as uvicorn does, or nothing, as hypercorn does."""

    def send(self, method: str, target: str, headers: Any = ()) -> None:
        if self.script_name is None:
            asyncio.run(self._send(method, target, headers))
        else:
            self._send_wsgi(method, target, headers)

    async def _send(self, method: str, target: str, headers: Any) -> None:
        path, _, query = target.partition("?")
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "scheme": "http",
            "path": self.prefix + unquote(path), "raw_path": (self.prefix + path).encode(),
            "query_string": query.encode(), "root_path": self.root_path,
            "headers": [(b"host", b"example.com"), *headers], "client": ("10.0.0.1", 1234), "server": ("10.0.0.2", 80),
            "asgi": {"version": "3.0"}, "state": {},
        }  # fmt: skip

        incoming: asyncio.Queue[Any] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": b""})

        async def send(message: Any) -> None:
            pass

        await self.app(scope, incoming.get, send)

    def _send_wsgi(self, method: str, target: str, headers: Any) -> None:
        path, _, query = target.partition("?")
        environ = {
            "REQUEST_METHOD": method, "SCRIPT_NAME": self.script_name, "QUERY_STRING": query,
            "PATH_INFO": unquote_to_bytes(path).decode("latin-1"), "SERVER_NAME": "example.com", "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1", "REMOTE_ADDR": "10.0.0.1", "wsgi.url_scheme": "http",
            "wsgi.input": BytesIO(), "wsgi.errors": BytesIO(), "wsgi.version": (1, 0),
            **{"HTTP_" + name.decode().upper().replace("-", "_"): value.decode() for name, value in headers},
        }  # fmt: skip
        parts = self.app(environ, lambda *_: None)
        getattr(parts, "close", lambda: None)()


class RouteHandler:
    """The handler of the limited route, in every framework."""

    def __init__(self) -> None:
        self.reached = 0
        self.limiter = Limiter("1000000/day", store=MemoryStore(clock=ManualClock()), name="routed")

    def options(self, pattern: str) -> dict[str, Any]:
        # What doesn't match the pattern matches another one, which is no help.
        return {"limiter": "unlimited", "routes": {pattern: self.limiter, "/*": "unlimited"}}

    @property
    def counted(self) -> int:
        return 1_000_000 - self.limiter.peek("10.0.0.1").remaining

    def __call__(self) -> None:
        self.reached += 1

    async def endpoint(self) -> None:
        self()

    def starlette(self, _: Request) -> PlainTextResponse:
        self()
        return PlainTextResponse("hello")

    def django(self, _: object) -> django.http.HttpResponse:
        self()
        return django.http.HttpResponse("hello")

    async def asgi(self, scope: Any, _: Any, send: Any) -> None:
        if scope["path"] == "/login" and scope["method"] == "POST":
            self()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def wsgi(self, environ: Any, start_response: Any) -> list[bytes]:
        if environ["PATH_INFO"] == "/login" and environ["REQUEST_METHOD"] == "POST":
            self()
        start_response("200 OK", [])
        return []


@contextmanager
def configured_django() -> Iterator[None]:
    """Django, whose applications share one table of URLs in a process."""
    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"], SECRET_KEY="-")
    with override_settings(ROOT_URLCONF=None):
        yield


def middleware(handler: RouteHandler, pattern: str) -> Middleware:
    return Middleware(asgi.RateLimitMiddleware, **handler.options(pattern))


# The applications ----------------------------------------------------------------------------------------------------


def raw_asgi(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(asgi.RateLimitMiddleware(handler.asgi, **handler.options("POST /login")))


def raw_wsgi(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(wsgi.RateLimitMiddleware(handler.wsgi, **handler.options("POST /login")), script_name="")


def starlette_app(handler: RouteHandler, root_path: str = "", pattern: str = "POST /login") -> RoutedApp:
    route = Route("/login", handler.starlette, methods=["POST"])
    return RoutedApp(Starlette(routes=[route], middleware=[middleware(handler, pattern)]), root_path=root_path)


def starlette_at_a_root_path(handler: RouteHandler) -> RoutedApp:
    return starlette_app(handler, "/api")


def starlette_at_a_root_path_that_is_not_in_the_path(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(starlette_app(handler).app, root_path="/api", prefixed=False)


def starlette_with_the_root_path_in_the_pattern(handler: RouteHandler) -> RoutedApp:
    return starlette_app(handler, "/api", "POST /api/login")


def starlette_endpoint(handler: RouteHandler) -> RoutedApp:
    class LoginEndpoint(HTTPEndpoint):
        def post(self, request: Request) -> PlainTextResponse:
            return handler.starlette(request)

    return RoutedApp(
        Starlette(routes=[Route("/login", LoginEndpoint)], middleware=[middleware(handler, "POST /login")])
    )


def starlette_before_a_mount(handler: RouteHandler) -> RoutedApp:
    mount = Mount("/api", routes=[Route("/login", handler.starlette, methods=["POST"])])
    return RoutedApp(Starlette(routes=[mount], middleware=[middleware(handler, "POST /api/login")]))


def starlette_in_a_mount(handler: RouteHandler, root_path: str = "") -> RoutedApp:
    app = Starlette(routes=[Mount("/api", app=starlette_app(handler).app), Mount("/", app=starlette_app(handler).app)])
    return RoutedApp(app, root_path=root_path)


def starlette_in_a_mount_at_a_root_path(handler: RouteHandler) -> RoutedApp:
    return starlette_in_a_mount(handler, "/outer")


def fastapi(handler: RouteHandler) -> FastAPI:
    app = FastAPI()
    app.add_middleware(asgi.RateLimitMiddleware, **handler.options("POST /login"))
    app.post("/login")(handler.endpoint)
    return app


def fastapi_app(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(fastapi(handler))


def fastapi_at_a_root_path(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(fastapi(handler), root_path="/api")


def fastapi_with_a_root_path_of_its_own(handler: RouteHandler) -> RoutedApp:
    app = fastapi(handler)
    app.root_path = "/api"
    return RoutedApp(app)


def fastapi_in_a_mount(handler: RouteHandler) -> RoutedApp:
    app = FastAPI()
    app.mount("/api", fastapi(handler))
    return RoutedApp(app)


def litestar_app(handler: RouteHandler, *, layered: bool = False, path: str = "/login") -> litestar.Litestar:
    @litestar.post(path, sync_to_thread=False)
    def login() -> None:
        handler()

    limited = [DefineMiddleware(asgi.RateLimitMiddleware, **handler.options("POST /login"))] if layered else []
    return litestar.Litestar([login], middleware=limited, logging_config=None)


def litestar_wrapped(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(asgi.RateLimitMiddleware(litestar_app(handler), **handler.options("POST /login")))


def litestar_at_a_root_path(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(litestar_wrapped(handler).app, root_path="/api")


def litestar_at_a_root_path_that_is_not_in_the_path(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(litestar_wrapped(handler).app, root_path="/api", prefixed=False)


def litestar_layered(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(litestar_app(handler, layered=True))


def litestar_in_a_mount(handler: RouteHandler) -> RoutedApp:
    inner = litestar_app(handler, layered=True)

    @litestar.asgi("/api", is_mount=True, copy_scope=True)
    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, receive, send)

    return RoutedApp(litestar.Litestar([mounted], logging_config=None))


def flask_app(handler: RouteHandler, **options: Any) -> flask.Flask:
    app = flask.Flask(__name__)

    @app.post("/login", **options)
    def login() -> str:
        handler()
        return "hello"

    return app


def flask_wrapped(handler: RouteHandler) -> RoutedApp:
    app = flask_app(handler)
    return RoutedApp(wsgi.RateLimitMiddleware(app.wsgi_app, **handler.options("POST /login")), script_name="")


def flask_that_accepts_slashes(handler: RouteHandler) -> RoutedApp:
    app = flask_app(handler, strict_slashes=False)
    return RoutedApp(wsgi.RateLimitMiddleware(app.wsgi_app, **handler.options("POST /login")), script_name="")


def flask_at_a_script_name(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(flask_wrapped(handler).app, script_name="/api")


def flask_in_a_dispatcher(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(DispatcherMiddleware(flask.Flask("outer"), {"/api": flask_wrapped(handler).app}), script_name="")


def flask_before_a_dispatcher(handler: RouteHandler) -> RoutedApp:
    app = DispatcherMiddleware(flask.Flask("outer"), {"/api": flask_app(handler)})
    return RoutedApp(wsgi.RateLimitMiddleware(app, **handler.options("POST /api/login")), script_name="")


def django_urls(handler: RouteHandler, pattern: Any) -> None:
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": (pattern(handler.django),)})


def django_wsgi(handler: RouteHandler, script_name: str = "") -> RoutedApp:
    django_urls(handler, lambda view: django.urls.path("login", view))
    app = wsgi.RateLimitMiddleware(get_wsgi_application(), **handler.options("POST /login"))
    return RoutedApp(app, script_name=script_name)


def django_at_a_script_name(handler: RouteHandler) -> RoutedApp:
    return django_wsgi(handler, "/api")


def django_asgi(handler: RouteHandler, root_path: str = "") -> RoutedApp:
    django_urls(handler, lambda view: django.urls.path("login", view))
    app = asgi.RateLimitMiddleware(get_asgi_application(), **handler.options("POST /login"))
    return RoutedApp(app, root_path=root_path)


def django_asgi_at_a_root_path(handler: RouteHandler) -> RoutedApp:
    return django_asgi(handler, "/api")


def django_asgi_at_a_root_path_that_is_not_in_the_path(handler: RouteHandler) -> RoutedApp:
    return RoutedApp(django_asgi(handler).app, root_path="/api", prefixed=False)


def django_that_ignores_case(handler: RouteHandler) -> RoutedApp:
    served = django_wsgi(handler)
    django_urls(handler, lambda view: django.urls.re_path(r"(?i)^login/?$", view))
    return served


# Routes with parameters, and mounts -----------------------------------------------------------------------------------


def starlette_items(handler: RouteHandler, route: str, pattern: str) -> RoutedApp:
    routes = [Route(route, handler.starlette)]
    return RoutedApp(Starlette(routes=routes, middleware=[middleware(handler, pattern)]))


def starlette_mount(handler: RouteHandler, route: str, pattern: str) -> RoutedApp:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await handler.starlette(scope)(scope, receive, send)

    return RoutedApp(Starlette(routes=[Mount(route, app=app)], middleware=[middleware(handler, pattern)]))


def litestar_items(handler: RouteHandler, route: str, pattern: str) -> RoutedApp:
    @litestar.get(route, sync_to_thread=False)
    def get() -> None:
        handler()

    app = litestar.Litestar([get], logging_config=None)
    return RoutedApp(asgi.RateLimitMiddleware(app, **handler.options(pattern)))


def litestar_mount(handler: RouteHandler, route: str, pattern: str, *, layered: bool = False) -> RoutedApp:
    @litestar.asgi(route, is_mount=True, copy_scope=True)
    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await handler.starlette(scope)(scope, receive, send)

    limited = DefineMiddleware(asgi.RateLimitMiddleware, **handler.options(pattern))
    app = litestar.Litestar([mounted], middleware=[limited] if layered else [], logging_config=None)
    return RoutedApp(app if layered else asgi.RateLimitMiddleware(app, **handler.options(pattern)))


def litestar_mount_layered(handler: RouteHandler, route: str, pattern: str) -> RoutedApp:
    return litestar_mount(handler, route, pattern, layered=True)


def flask_items(handler: RouteHandler, route: str, pattern: str) -> RoutedApp:
    app = flask.Flask(__name__)

    @app.get(route)
    def get(**_: object) -> str:
        handler()
        return "hello"

    return RoutedApp(wsgi.RateLimitMiddleware(app.wsgi_app, **handler.options(pattern)), script_name="")


def dispatched(handler: RouteHandler, route: str, pattern: str) -> RoutedApp:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        handler()
        start_response("200 OK", [])
        return []

    outer = DispatcherMiddleware(flask.Flask("outer"), {route: app})
    return RoutedApp(wsgi.RateLimitMiddleware(outer, **handler.options(pattern)), script_name="")


def django_items(handler: RouteHandler, route: str, pattern: str) -> RoutedApp:
    django_urls(handler, lambda view: django.urls.path(route, lambda request, thing: view(request)))
    return RoutedApp(wsgi.RateLimitMiddleware(get_wsgi_application(), **handler.options(pattern)), script_name="")


# Routes for GET ------------------------------------------------------------------------------------------------------


def starlette_get(handler: RouteHandler) -> RoutedApp:
    return starlette_items(handler, "/login", "GET /login")


def flask_get(handler: RouteHandler) -> RoutedApp:
    return flask_items(handler, "/login", "GET /login")


def django_get(handler: RouteHandler) -> RoutedApp:
    class LoginView(View):  # type: ignore[misc]  # Django has no types
        def get(self, request: Any) -> django.http.HttpResponse:
            return handler.django(request)

    django_urls(handler, lambda _: django.urls.path("login", LoginView.as_view()))
    return RoutedApp(wsgi.RateLimitMiddleware(get_wsgi_application(), **handler.options("GET /login")), script_name="")
