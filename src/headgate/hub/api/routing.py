"""The table of routes: what can be asked over HTTP, by whom, and under which action the gate counts it.

Everything else is made from this table: the routing, the OpenAPI document, the names that agents can't have, and the
tests that go from route to route.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote_to_bytes

from msgspec import Struct

if TYPE_CHECKING:
    from headgate.hub.app import Hub


class Who(Enum):
    """Who may use a route."""

    PROBE = "anyone, never limited"
    ANYONE = "anyone"
    AGENT = "an agent"
    PROGRAM = "an agent or the admin"
    VIEWER = "a viewer or the admin"
    ADMIN = "the admin"


@dataclass(slots=True)
class Call:
    """One request, authenticated, admitted and read."""

    hub: "Hub"
    agent: str
    """The agent that calls, or "" for anybody else."""
    by: str
    """Who calls, in words for the record."""
    admin: bool
    parts: dict[str, str]
    """What stands in the places of the path that are named."""
    query: Any
    body: Any


Handler: TypeAlias = Callable[[Call], Awaitable[Any]]


class NoQuery(Struct, forbid_unknown_fields=True):
    """No parameters."""


@dataclass(frozen=True)
class Route:
    """One thing that can be asked."""

    method: str
    path: str
    action: str
    """What the gate counts it as, on channel `http`."""
    who: Who
    handler: Handler
    answer: Any
    """The type of what is answered."""
    about: str
    body: Any = None
    """The type of the body that is expected, if one is."""
    query: type[Struct] = NoQuery
    status: int = 200
    media: str = "application/json"
    """What kind of answer it is. A handler may return an `Answer` of its own instead of what is made into one."""

    @property
    def parts(self) -> list[str]:
        """The names of the places in the path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


@dataclass
class _Place:
    """A place in the tree of paths."""

    routes: dict[str, Route] = field(default_factory=dict)
    fixed: dict[str, "_Place"] = field(default_factory=dict)
    named: dict[str, "_Place"] = field(default_factory=dict)
    """At most one: by the name of what stands there."""


class Router:
    """Finds routes. A fixed part of a path goes before a named one, and a named one never spans a slash.

    A slash at the end of a path says nothing, unless there is a route for it.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes: Final = tuple(routes)
        self._root: Final = _Place()
        for route in self.routes:
            place = self._root
            for part in route.path.removeprefix("/").split("/"):
                named = part.startswith("{")
                below = place.named if named else place.fixed
                place = below.setdefault(part[1:-1] if named else part, _Place())
            if route.method in place.routes:
                raise ValueError(f"two routes for {route.method} {route.path}")
            place.routes[route.method] = route

    def find(self, raw_path: bytes) -> tuple[dict[str, Route], dict[str, str]]:
        """The routes of a path by method, none if there is no such path, and what stands in its named places.

        The path is split before its escapes are read, so that a name may hold a slash.
        """
        place, parts = self._root, {}
        for raw in raw_path.strip(b"/").split(b"/"):
            try:
                text = unquote_to_bytes(raw).decode()
            except UnicodeDecodeError:
                return {}, {}
            if text in place.fixed:
                place = place.fixed[text]
            elif place.named and text:
                ((name, place),) = place.named.items()
                parts[name] = text
            else:
                return {}, {}
        if raw_path.endswith(b"/"):
            place = place.fixed.get("", place)
        return place.routes, parts

    def reserved(self, name: str) -> frozenset[str]:
        """What can't be the value of a named part, since a fixed one would hide it, or a client would resolve it."""
        found, todo = {".", ".."}, [self._root]
        while todo:
            place = todo.pop()
            todo += [*place.fixed.values(), *place.named.values()]
            if name in place.named:
                found.update(place.fixed)
        return frozenset(found)
