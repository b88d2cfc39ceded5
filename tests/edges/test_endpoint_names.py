"""Two endpoints of FastAPI never share a bucket by accident, whatever their functions are called."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import Host, Mount, Router

from headgate import Limiter, MemoryStore
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.fastapi import RateLimit
from tests.support.greeting_app import greeting_server

pytestmark = pytest.mark.once


def passed(client: Any, path: str, method: str = "GET", **headers: str) -> int:
    """How many of five requests pass."""
    return sum(client.request(method, path, headers=headers).status_code == 200 for _ in range(5))


def limited() -> list[Any]:
    return [Depends(RateLimit("2/minute"))]


def make_endpoint() -> Callable[[], None]:
    def endpoint() -> None: ...

    return endpoint


class Resource:
    def read(self) -> None: ...


@dataclass
class UnhashableEndpoint:
    """An endpoint without a hash."""

    name: str

    def __call__(self) -> None: ...


def redefined() -> Callable[[], None]:
    found: dict[str, Any] = {"__name__": __name__}
    exec("def endpoint() -> None: ...", found)  # as if a module defined a name twice
    endpoint: Callable[[], None] = found["endpoint"]
    return endpoint


@pytest.mark.parametrize(
    "make",
    [
        make_endpoint,
        lambda: Resource().read,
        redefined,
        lambda: lambda: None,
        lambda: partial(make_endpoint()),
        lambda: UnhashableEndpoint(uuid4().hex),
    ],
    ids=["closure", "bound method", "redefined", "lambda", "partial", "object without hash"],
)
def test_endpoints_of_one_name_count_apart_and_the_paths_of_one_together(make: Callable[[], Any]) -> None:
    store, app = MemoryStore(), FastAPI()
    one = make()
    for path in ("/a", "/a/"):
        app.get(path, dependencies=limited())(one)
    app.get("/b", dependencies=limited())(make())
    app.post("/b", dependencies=limited())(make())
    app.add_middleware(RateLimitMiddleware, store=store)
    with greeting_server(app) as client:
        assert [passed(client, "/a/"), passed(client, "/a"), passed(client, "/b")] == [2, 0, 2]
        assert passed(client, "/b", "POST") == 2, "another method has another endpoint"
    assert len(store) == 3


def make_router(**options: Any) -> APIRouter:
    router = APIRouter(**options)

    @router.get("/list", dependencies=limited())
    def list_all() -> None: ...

    return router


def make_app() -> FastAPI:
    app = FastAPI()
    app.include_router(make_router())
    return app


def include(app: FastAPI, prefix: str) -> None:
    app.include_router(make_router(), prefix=prefix)


def include_nested(app: FastAPI, prefix: str) -> None:
    outer = APIRouter()
    outer.include_router(make_router(), prefix=prefix)
    app.include_router(outer)


def include_own_prefix(app: FastAPI, prefix: str) -> None:
    app.include_router(make_router(prefix=prefix))


def mount_app(app: FastAPI, prefix: str) -> None:
    app.mount(prefix, make_app())


def mount_router(app: FastAPI, prefix: str) -> None:
    app.mount(prefix, make_router())


def mount_at_host(app: FastAPI, prefix: str) -> None:
    app.router.routes.append(Host("{host}.0.0.1", app=Router([Mount(prefix, app=make_app())])))


ADDITIONS = [include, include_nested, include_own_prefix, mount_app, mount_router]


@pytest.mark.parametrize("add", ADDITIONS)
def test_what_a_factory_makes_counts_apart(add: Callable[[FastAPI, str], None]) -> None:
    store, app = MemoryStore(), FastAPI()
    for resource in ("/users", "/posts"):
        add(app, resource)
    app.add_middleware(RateLimitMiddleware, store=store)
    with greeting_server(app) as client:
        assert [passed(client, f"/{name}/list") for name in ("users", "posts", "users")] == [2, 2, 0]


@pytest.mark.parametrize("add", ["include", "mount"])
def test_one_router_or_application_at_two_places_counts_together(add: str) -> None:
    inner: Any = make_router() if add == "include" else make_app()
    app = FastAPI()
    for prefix in ("/v1", "/v2"):
        if add == "include":
            app.include_router(inner, prefix=prefix)
        else:
            app.mount(prefix, inner)
    with greeting_server(app) as client:
        assert [passed(client, "/v2/list"), passed(client, "/v1/list")] == [2, 0]


@pytest.mark.parametrize("add", [*ADDITIONS, mount_at_host])
def test_a_caller_who_chooses_the_prefix_has_one_quota(add: Callable[[FastAPI, str], None]) -> None:
    app = FastAPI()
    add(app, "/{tenant}")
    with greeting_server(app) as client:
        assert [passed(client, f"/{tenant}/list") for tenant in ("acme", "other")] == [2, 0]


def test_limiters_with_a_store_count_apart_without_a_middleware() -> None:
    store, app = MemoryStore(), FastAPI()
    for prefix in ("/users", "/posts"):
        inner = FastAPI()
        inner.get("/list", dependencies=[Depends(RateLimit(Limiter("2/minute", store=store)))])(make_endpoint())
        app.mount(prefix, inner)
    with greeting_server(app) as client:
        assert [passed(client, "/users/list"), passed(client, "/posts/list")] == [2, 2]


def test_an_application_may_be_mounted_in_itself() -> None:
    app = make_app()
    app.router.routes.insert(0, Mount("/self", app=app))
    with greeting_server(app) as client:
        assert [passed(client, "/self/self/list"), passed(client, "/list")] == [2, 0]
