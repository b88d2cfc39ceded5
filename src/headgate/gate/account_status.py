"""The spent, held and left amounts of accounts, and the shares that raise an alert."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Final, NamedTuple

from headgate.gate.accounts import Bound, amount_of, limit_text
from headgate.limits.budget import Budget
from headgate.limits.decision import Decision, Limit
from headgate.limits.units import in_units
from headgate.stores.holds import HoldState

ALERT_SHARES: Final = (0.8, 1.0)
"""The shares of a budget at which there is an alert: it is nearly used up, or used up."""


def alert_share(left: Decimal, amount: Decimal) -> float:
    """The largest of these shares that is used; 0 if less is."""
    if left * 5 > amount:
        return 0.0
    return 1.0 if left <= 0 else 0.8


def has_recovered(left: Decimal, amount: Decimal) -> bool:
    """Whether so much less is used that reaching a share again is news: less than 70 %."""
    return left * 10 > amount * 3


class LimitStatus(NamedTuple):
    """One limit of an account, and what is left of it."""

    account: str
    level: str
    resource: str
    tool: str
    """"" unless it is the limit of one tool."""
    limit: str
    amount: Decimal
    spent: Decimal
    """More than the amount, if calls have used more than they had reserved, or the limit was lowered."""
    held: Decimal
    """By holds that are open."""
    left: Decimal
    resets_after: float | None
    """Seconds until all that was spent has come back; None if it never does by itself."""

    @property
    def used(self) -> float:
        """The share that is spent or held: more than 1 in debt."""
        return float((self.spent + self.held) / self.amount) if self.amount else 1.0


class AccountStatus(NamedTuple):
    """An account, with its limits."""

    path: str
    level: str
    plan: str
    limits: tuple[LimitStatus, ...]


class AccountHoldSummary(NamedTuple):
    """A hold of an account, as it is listed."""

    id: str
    agent: str
    account: str
    """The path of the agent when the hold was made."""
    session: str
    tool: str
    state: HoldState
    costs: dict[str, Decimal]
    """The costs that it has reserved, or was settled with, by resource."""
    lease_left: float
    """Seconds until its lease ends; 0.0 if it isn't open."""


def limit_status(
    bound: Bound, level: str, limit: Limit, decimals: int, decision: Decision, held: Mapping[Bound, int]
) -> LimitStatus:
    """The status of a limit, from what a peek says of it: of a budget, at its widest."""
    amount = amount_of(limit, decimals)
    reserved = in_units(held.get(bound, 0), decimals)
    used = amount - in_units(decision.remaining, decimals)
    if isinstance(decision.limit, Budget):
        used = decision.limit.amount - decision.left
    reset = decision.reset_after
    forever = isinstance(limit, Budget) and limit.period is None
    return LimitStatus(
        account=bound.account,
        level=level,
        resource=bound.resource,
        tool=bound.tool,
        limit=limit_text(bound.resource, limit, decimals),
        amount=amount,
        spent=max(used - reserved, Decimal(0)),
        held=reserved,
        left=max(amount - used, Decimal(0)),
        resets_after=None if forever else reset,
    )
