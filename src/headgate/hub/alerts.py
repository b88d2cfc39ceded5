"""Alerts: one notification when an agent has had too many violations, and one when it has been quiet again."""

from collections import deque
from collections.abc import Callable
from typing import Final

from msgspec import Struct

_KEPT: Final = 50


class Alert(Struct):
    """An agent has had so many violations within so many seconds."""

    alert_id: str
    agent_id: str
    violations: int
    within: float
    raised_at: float
    """Seconds since 1970."""
    resolved_at: float | None = None
    """When the agent had been quiet; None while it has not."""


class Alerts:
    """The alerts of the fleet."""

    def __init__(self) -> None:
        self.raised = 0
        self._recent: Final[deque[Alert]] = deque(maxlen=_KEPT)
        self._followers: Final[list[Callable[[Alert], None]]] = []

    def recent(self) -> list[Alert]:
        """The newest alerts, open ones and resolved ones, newest first."""
        return list(self._recent)

    def follow(self, heard: Callable[[Alert], None]) -> None:
        """Have a function called, in the hub's loop, with each alert that is raised or resolved."""
        self._followers.append(heard)
