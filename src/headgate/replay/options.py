"""How the lines of logs are read: what an operator may choose."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Final, NamedTuple

from headgate.errors import InvalidInput
from headgate.gate.policy import TIERS, UNKNOWN_TIER

FORMATS: Final = ("access", "json", "csv")
KEYS: Final = ("auto", "user", "address")
FIELDS: Final = ("time", "agent", "channel", "tier", "action", "cost", "method", "path")


class Route(NamedTuple):
    """Requests that are of one tier, or one action: their method, or "*", and their path, in which * is anything."""

    method: str
    path: str
    tier: str | None
    action: str | None

    @classmethod
    def read(cls, text: str) -> "Route":
        """Read "POST /api/tasks=heavy"; InvalidInput if it isn't like that.

        >>> Route.read("GET /api/*=get_agents")
        Route(method='GET', path='/api/*', tier=None, action='get_agents')
        """
        what, _, kind = text.rpartition("=")
        method, _, path = what.strip().partition(" ")
        kind, path = kind.strip(), path.strip()
        if not method or not path.startswith(("/", "*")) or not kind:
            raise InvalidInput(f"expected METHOD PATH=TIER, such as 'POST /api/tasks=heavy', got {text!r}")
        tier, action = (kind, None) if kind in TIERS else (None, kind)
        return cls(method.upper(), path, tier, action)

    def matcher(self) -> Callable[[str], object]:
        """Says whether "METHOD /path" is of it."""
        method = r"[^ ]+" if self.method == "*" else re.escape(self.method)
        return re.compile(f"{method} {translate(self.path.replace('[', '[[]').replace('?', '[?]'))}").match


@dataclass(frozen=True)
class Reading:
    """How the lines of logs are read."""

    format: str | None = None
    """One of `FORMATS`; None: by what the first lines look like."""
    key: str = "auto"
    """Whom an access log's request counts for: its user, its address, or the user if there is one."""
    channel: str = "http"
    """Of a line that names none."""
    tier: str = UNKNOWN_TIER
    """Of a line that names neither tier nor action, and that no route is for."""
    routes: tuple[Route, ...] = ()
    """The first that fits counts."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """What the fields of JSON and the columns of CSV are called, if not as in `FIELDS`. "a.b" is b within a."""
