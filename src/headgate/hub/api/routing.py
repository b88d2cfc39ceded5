"""The route table: what can be requested over HTTP, by whom, and which action the gate counts it as.

Everything else is made from this table: the router, the OpenAPI document, the agent names that are reserved, and the
tests that cover every route.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from types import UnionType
from typing import Any, Final, TypeAlias, get_args
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from headgate.hub.agents.operators import Holder
from headgate.hub.api.responses import ApiResponse


class Access(Enum):
    """The callers that may use a route."""

    PROBE = "anyone, never limited"
    ANYONE = "anyone"
    AGENT = "an agent"
    PROGRAM = "an agent or the admin"
    VIEWER = "a viewer or the admin"
    ADMIN = "the admin"


@dataclass(slots=True, kw_only=True)
class Call:
    """One request, authenticated, admitted by the gate and decoded."""

    caller: Holder
    by: str
    """The caller, in words for the record of changes."""
    address: str
    """Where the request came from."""
    parts: dict[str, str]
    """The values of the named parts of the path."""
    query: Any
    body: Any
    hung_up: Callable[[], Coroutine[Any, Any, None]]
    """Ends when the caller has hung up."""
    admit_again: Callable[[], Coroutine[Any, Any, None]]
    """Raises the answer for a caller whose token or role has become invalid since it was admitted."""

    @property
    def agent(self) -> str:
        """The calling agent, or "" for any other caller."""
        return self.caller.agent

    @property
    def admin(self) -> bool:
        return self.caller.admin


Handler: TypeAlias = Callable[..., Awaitable[Any]]
"""Takes a `Call`, and the parts of the hub that its other parameters ask for by their types (see `bind`)."""


class Body(Struct, forbid_unknown_fields=True):
    """The body or the query of a request."""


class NoQuery(Body):
    """No parameters."""


@dataclass(frozen=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    action: str
    """The action that the gate counts it as, on channel `http`."""
    access: Access
    handler: Handler
    about: str
    body: Any = None
    """The type of the request's body, if it has one."""
    body_required: bool = True
    """False: no body is the same as an empty object."""
    query: type[Struct] = NoQuery
    status: int = 200
    media: str = "application/json"
    """The media type of the response. A handler may return a whole `ApiResponse` instead of its body."""
    denial: Any = None
    """The type of a denial's body, if it has more members than others."""

    @property
    def parts(self) -> list[str]:
        """The names of the path's named parts."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]

    @property
    def answer(self) -> Any:
        """The type of the response's body, by what the handler returns: text, if that is always an `ApiResponse`."""
        returned = inspect.signature(self.handler).return_annotation
        kinds = get_args(returned) if isinstance(returned, UnionType) else (returned,)
        bodies = [kind for kind in kinds if kind is not ApiResponse]
        if len(bodies) > 1:
            raise TypeError(f"{self.method} {self.path}: expected one type of body, got {returned}")
        return bodies[0] if bodies else str


def admin_route(method: str, path: str, handler: Handler, about: str, **more: Any) -> Route:
    """A route for admins. All of them are the same action."""
    return Route(method, path, "admin", Access.ADMIN, handler, about, **more)


def bind(routes: Iterable[Route], parts: Sequence[object]) -> list[Route]:
    """The same routes, their handlers given the parts that they ask for: of each type, the one part that is of it."""
    return [replace(route, handler=_bound(route, parts)) for route in routes]


def _bound(route: Route, parts: Sequence[object]) -> Handler:
    _, *wanted = inspect.signature(route.handler).parameters.values()
    given = {}
    for parameter in wanted:
        found = [part for part in parts if isinstance(part, parameter.annotation)]
        if len(found) != 1:
            raise TypeError(f"{route.method} {route.path}: expected one part for {parameter}, got {len(found)}")
        given[parameter.name] = found[0]
    return partial(route.handler, **given) if given else route.handler


@dataclass
class _Node:
    """A node of the tree of paths."""

    routes: dict[str, Route] = field(default_factory=dict)
    fixed: dict[str, "_Node"] = field(default_factory=dict)
    named: dict[str, "_Node"] = field(default_factory=dict)
    """At most one, by the name of its part."""


class Router:
    """Finds routes. A fixed part of a path takes precedence over a named one, and a named one never spans a slash.

    A trailing slash is ignored, unless there is a route with it.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes: Final = tuple(routes)
        self._root: Final = _Node()
        for route in self.routes:
            node = self._root
            for part in route.path.removeprefix("/").split("/"):
                named = part.startswith("{")
                below = node.named if named else node.fixed
                node = below.setdefault(part[1:-1] if named else part, _Node())
            if route.method in node.routes:
                raise ValueError(f"two routes for {route.method} {route.path}")
            node.routes[route.method] = route

    def find(self, raw_path: bytes) -> tuple[dict[str, Route], dict[str, str]]:
        """The routes of a path by method (none for an unknown path), and the values of its named parts.

        The path is split before it is unescaped, so that a value may contain a slash.
        """
        node, parts = self._root, {}
        for raw in raw_path.strip(b"/").split(b"/"):
            try:
                text = unquote_to_bytes(raw).decode()
            except UnicodeDecodeError:
                return {}, {}
            if text in node.fixed:
                node = node.fixed[text]
            elif node.named and text:
                ((name, node),) = node.named.items()
                parts[name] = text
            else:
                return {}, {}
        if raw_path.endswith(b"/"):
            node = node.fixed.get("", node)
        return node.routes, parts

    def reserved(self, name: str) -> frozenset[str]:
        """Values that a named part can't have: a fixed part would hide them, or a client would resolve them."""
        found, todo = {".", ".."}, [self._root]
        while todo:
            node = todo.pop()
            todo += [*node.fixed.values(), *node.named.values()]
            if name in node.named:
                found.update(node.fixed)
        return frozenset(found)
