"""Holds in a replay: what the costs in a log would have spent on accounts, and which of them would have been denied.

Each line with costs is held and settled at once by a gate, on the replay's store and clock. So slots are never used up.
"""

from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import Final, NamedTuple

from headgate.errors import HoldError, InvalidInput
from headgate.gate.accounts import Bound, level_of, path_prefixes
from headgate.gate.gate import Gate
from headgate.gate.policy import Policy
from headgate.limits.decision import Outcome, Violation
from headgate.stores.memory import MemoryStore

MOST_BOUNDS: Final = 50_000
"""Limits whose denials are counted one by one."""
OTHERS: Final = Bound("(others)", "", "")
"""Stands for all further ones."""
BACKOFF: Final = Bound("(backoff)", "", "")
"""Stands for denials before an advised wait was over."""
_MOST_REASONS: Final = 20
_LEASE: Final = 1  # second: what is held is settled at once


class LoggedHold(NamedTuple):
    """The costs in a line of a log."""

    costs: Mapping[str, int | Decimal]
    tool: str | None
    session: str | None


class AccountReplay:
    """The holds of a replay under one policy."""

    def __init__(self, policy: Policy, store: MemoryStore) -> None:
        self.granted = 0
        self.denied = 0
        self.shadowed = 0
        """Granted because of shadow mode; otherwise denied."""
        self.exempt = 0
        self.denials: Final[dict[Bound, int]] = {}
        """Denials by what decided, those of shadow mode included. Sessions count as one for each agent."""
        self.refused: Final[dict[str, int]] = {}
        """Holds that the policy can't count, such as those of an unknown resource, by reason."""
        self._gate: Final = Gate(policy, store=store)
        self._accounts: Final = policy.accounts

    def hold(self, agent: str, asked: LoggedHold) -> Violation | None:
        """Hold and settle; the violation, if it was one."""
        try:
            hold = self._gate.hold(
                agent, asked.costs, session=asked.session, tool=asked.tool, lease=_LEASE, keep=_LEASE
            )
        except (InvalidInput, HoldError) as error:
            reason = str(error)
            if reason not in self.refused and len(self.refused) >= _MOST_REASONS:
                reason = OTHERS.account
            self.refused[reason] = self.refused.get(reason, 0) + 1
            return None
        decision = hold.decision
        if not hold:
            self.denied += 1
            self._count(hold.bound)
            return decision.violation
        if decision.would_be is Outcome.DENY:
            self.shadowed += 1
            self._count(hold.bound)
        elif decision.outcome is Outcome.EXEMPT:
            self.exempt += 1
        else:
            self.granted += 1
        hold.settle()
        return None

    def _count(self, bound: Bound | None) -> None:
        found = BACKOFF if bound is None else bound
        if level_of(found.account) > self._accounts.agent_level:
            found = found._replace(account=f"{path_prefixes(found.account)[-2]}/*")
        if found not in self.denials and len(self.denials) >= MOST_BOUNDS:
            found = OTHERS
        self.denials[found] = self.denials.get(found, 0) + 1

    def spent(self) -> tuple[date, dict[tuple[str, str], Decimal]]:
        """The first day that is counted, and what was spent since, by account above the agents and resource.

        "" is the account of agents without any. What lies 13 months before the end of the log isn't counted.
        """
        first, today = self._gate.usage_days()
        totals: dict[tuple[str, str], Decimal] = {}
        for used in self._gate.usage(first, today):
            for path in path_prefixes(self._accounts.account_of(used.account)):
                key = path, used.resource
                totals[key] = totals.get(key, Decimal(0)) + used.amount
        return first, dict(sorted(totals.items()))


def has_accounts(policy: Policy) -> bool:
    """Whether a policy limits accounts, or lets agents belong to them."""
    accounts = policy.accounts
    limited = any([*accounts.defaults.values(), *accounts.plans.values()]) or len(list(accounts.at.items())) > 0
    return limited or bool(policy.agent_accounts)
