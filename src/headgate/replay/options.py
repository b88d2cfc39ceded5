"""Options for reading logs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Final, NamedTuple

from headgate.errors import InvalidInput
from headgate.gate.policy import UNKNOWN_TIER

FORMATS: Final = ("access", "json", "csv")
KEYS: Final = ("auto", "user", "address")
FIELDS: Final = ("time", "agent", "channel", "tier", "action", "cost", "method", "path", "costs", "tool", "session")


class RouteRule(NamedTuple):
    """Assigns a tier or an action to requests by their method, or "*", and their path, where * matches anything."""

    method: str
    path: str
    kind: str
    """A tier of the policies, or else an action, which each policy classifies."""

    @classmethod
    def parse(cls, text: str) -> "RouteRule":
        """Parse a rule such as "POST /api/tasks=heavy"; `InvalidInput` for anything else.

        >>> RouteRule.parse("GET /api/*=get_agents")
        RouteRule(method='GET', path='/api/*', kind='get_agents')
        """
        request, _, kind = text.rpartition("=")
        method, _, path = request.strip().partition(" ")
        kind, path = kind.strip(), path.strip()
        if not method or not path.startswith(("/", "*")) or not kind:
            raise InvalidInput(f"expected METHOD PATH=TIER, such as 'POST /api/tasks=heavy', got {text!r}")
        return cls(method.upper(), path, kind)

    def matcher(self) -> Callable[[str], object]:
        """A function that says whether "METHOD /path" matches."""
        method = r"[^ ]+" if self.method == "*" else re.escape(self.method)
        return re.compile(f"{method} {translate(self.path.replace('[', '[[]').replace('?', '[?]'))}").match


@dataclass(frozen=True)
class LogOptions:
    """How to read logs."""

    format: str | None = None
    """One of `FORMATS`; None: detected from the first lines."""
    key: str = "auto"
    """The name of the agent in an access log: the user, the address, or (auto) the user if there is one."""
    channel: str = "http"
    """The channel of lines without one."""
    tier: str = UNKNOWN_TIER
    """The tier of lines without a tier or an action, and without a matching route."""
    routes: tuple[RouteRule, ...] = ()
    """The first match counts."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Names of JSON fields and CSV columns, where they differ from `FIELDS`. "a.b" is field b of object a."""
