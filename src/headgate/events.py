"""Events of a gate, for metrics, alerts, the dashboard and other listeners.

A listener is a plain callable that gets one event. It is called in the thread or task that caused the event, right
after the decision. An exception of a listener is logged and affects nobody else.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeAlias, TypeVar

from headgate.limits.decision import Decision, Outcome

_log = logging.getLogger("headgate")


@dataclass(frozen=True, slots=True)
class Checked:
    """One check. In shadow mode, `decision.would_be` is the outcome that it would have had."""

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
    """Violations in a row, this one included."""
    advised: float
    """Seconds that the agent is advised to wait."""


@dataclass(frozen=True, slots=True)
class Alerted:
    """An agent had `violations` within `window` seconds. No other alert for it follows within the next `window`."""

    agent: str
    violations: int
    window: float


@dataclass(frozen=True, slots=True)
class ViolationsReset:
    """An agent's violations were reset, before they were forgotten by themselves."""

    agent: str


@dataclass(frozen=True, slots=True)
class AddressChecked:
    """One check of an address, for an anonymous caller."""

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
    """The limits in force have changed: `what` describes the change, `by` names its author."""

    what: str
    by: str


@dataclass(frozen=True, slots=True)
class HoldChecked:
    """One hold of an agent was granted or denied."""

    agent: str
    tool: str
    """"" for none."""
    account: str
    """The path of the account whose limit decided; "" if none is limited."""
    resource: str
    decision: Decision
    costs: Mapping[str, Decimal] = field(default_factory=dict, hash=False)
    """The costs that it has reserved, or was to reserve, by resource: those of the call, and the request itself."""
    session: str = ""
    """"" for none."""

    @property
    def outcome(self) -> Outcome:
        return self.decision.outcome


@dataclass(frozen=True, slots=True)
class AccountAlerted:
    """A budget of an account is used up to a share: 0.8; or 1, also if a hold was denied after 0.8: see what is left.

    Each is told once in a period by each gate: again after a restart, and by each process that has reached it; again,
    too, if a hold has found less than 70 % used in between, or the budget was changed.
    """

    account: str
    resource: str
    tool: str
    """"" unless it is the budget of one tool."""
    share: float
    limit: str
    resets_at: float | None
    """When the next period begins, in seconds since 1970; None without one."""
    left: Decimal = Decimal(0)
    """The rest of the budget; below 0 in debt."""


Event: TypeAlias = (
    Checked
    | Violated
    | Alerted
    | ViolationsReset
    | AddressChecked
    | Degraded
    | PolicyChanged
    | HoldChecked
    | AccountAlerted
)
Listener: TypeAlias = Callable[[Event], object]
E = TypeVar("E")


def emit(listeners: Iterable[Callable[[E], object]], event: E) -> None:
    """Call every listener."""
    for listener in listeners:
        try:
            listener(event)
        except Exception:  # noqa: BLE001 - a listener's error must not reach the caller
            _log.exception("a listener failed on %r", event)
