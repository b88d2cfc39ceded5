"""Events: what happened, for whoever wants to know. Metrics, alerts and the dashboard listen here.

A listener is a plain callable that gets one event. It is called in the thread or task that caused the event, right
after the decision; one that raises is logged and harms nobody.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from headgate.limits.decision import Decision, Outcome

_log = logging.getLogger("headgate")


@dataclass(frozen=True, slots=True)
class Checked:
    """One check. Where a limit is only watched, `decision.would_be` says what it would have been."""

    agent: str
    channel: str
    tier: str
    decision: Decision

    @property
    def outcome(self) -> Outcome:
        return self.decision.outcome

    @property
    def remaining(self) -> int:
        return self.decision.remaining


@dataclass(frozen=True, slots=True)
class Violated:
    """One violation; channel and tier are empty if it was recorded by `record_violation`."""

    agent: str
    channel: str
    tier: str
    count: int
    """How many in a row, this one included."""
    advised: float
    """Seconds that the agent is told to wait."""


@dataclass(frozen=True, slots=True)
class Alerted:
    """An agent has had so many violations within so many seconds. No other alert for it follows within them."""

    agent: str
    violations: int
    window: float


@dataclass(frozen=True, slots=True)
class ViolationsReset:
    """An agent's violations were reset, before they were forgotten by themselves."""

    agent: str


@dataclass(frozen=True, slots=True)
class AddressChecked:
    """One check of an address, for somebody who isn't known yet."""

    address: str
    purpose: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Degraded:
    """The store went away or came back."""

    degraded: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """What holds has changed. `what` says it in words, `by` whose doing it was."""

    what: str
    by: str


Event: TypeAlias = Checked | Violated | Alerted | ViolationsReset | AddressChecked | Degraded | PolicyChanged
Listener: TypeAlias = Callable[[Event], object]


def emit(listeners: Iterable[Listener], event: Event) -> None:
    """Tell every listener."""
    for listener in listeners:
        try:
            listener(event)
        except Exception:  # noqa: BLE001 - whatever it is, it is the listener's
            _log.exception("a listener failed on %r", event)
