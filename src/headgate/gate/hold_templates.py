"""Attempts at holds of a gate, compiled: what the holds of an agent have in common is made once."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from headgate._hold_hot import keep_of, lease_of
from headgate.errors import refuse
from headgate.gate.account_asks import account_asks, check_session
from headgate.gate.account_holds import AccountAttempt, AccountHoldOwner, HoldContext, HoldTemplate, check_lease
from headgate.gate.lookup import AGENTS, Lookup
from headgate.gate.policy import check_agent
from headgate.hold_attempt import check_id
from headgate.stores.base import Offence
from headgate.stores.hold_ids import HOLD_IDS
from headgate.stores.hold_terms import HoldTerms

LEASE: Final = 60
"""Seconds that a hold lasts unless it is told otherwise."""
_REMEMBERED: Final = 10_000

HoldRequest: TypeAlias = tuple[object, Any, object, object, object, object, object, object]
"""The arguments of `Gate.hold` besides its timeout, unchecked: agent, costs, session, tool, lease, id, keep, max_age.

A plain tuple, since one is made for each hold.
"""


class HoldTemplates:
    """The templates of holds, by agent, tool and resources, under the rules of one lookup."""

    def __init__(self, lookup: Lookup, context: HoldContext) -> None:
        self.lookup: Final = lookup
        self.context: Final = context
        accounts = lookup.effective.accounts
        self._max_lease: Final = float(accounts.max_lease)
        self._lease: Final = lease_of(min(LEASE, accounts.max_lease))
        self._most: Final = accounts.max_open_holds
        self._found: dict[tuple[object, object, bool, tuple[object, ...]], HoldTemplate] = {}

    def attempt(self, request: HoldRequest) -> AccountAttempt:
        """An attempt at a hold, from what a caller gives."""
        agent, costs, session, tool, lease, hold_id, keep, max_age = request
        owner, taken = self.owner(agent, costs, session, tool)
        template, asks = owner.template, owner.template.asks
        span = self._lease
        if lease is not None:
            span = lease_of(lease)
            check_lease(span, lease, self._max_lease)
        store_id = template.id_start + (HOLD_IDS.new() if hold_id is None else check_id(hold_id))
        note, forced = asks.note(owner.session), template.mode != "enforced"
        terms = HoldTerms(store_id, span, False, keep_of(keep), note, asks.text, self._most, forced)
        return AccountAttempt(owner, asks.asks(taken, owner.session), terms, max_age, hold_id is None)

    def owner(
        self, agent: object, costs: object, session: object, tool: object
    ) -> tuple[AccountHoldOwner, tuple[int, ...]]:
        """The maker of a hold, and the costs by resource."""
        if type(costs) is not dict and not isinstance(costs, Mapping):
            refuse("costs", 'costs by resource, such as {"tokens": 1200, "usd": "0.03"}', costs)
        template: HoldTemplate | None = None
        resources: tuple[object, ...] = tuple(costs)
        key = (agent, tool, session is None, resources)
        named = type(agent) is str and (tool is None or type(tool) is str)  # others might have no hash, or their own
        for resource in resources:
            named = named and type(resource) is str
        if named:
            template = self._found.get(key)
        if template is None:
            check_session(session)
            template = self._make(agent, tool, session is not None, costs)
            if named:
                if len(self._found) >= _REMEMBERED:
                    self._found = {}
                self._found[key] = template
        return AccountHoldOwner(template, template.asks.session_id(session)), template.asks.costs_of(costs)

    def _make(self, agent: object, tool: object, sessions: bool, costs: Iterable[object]) -> HoldTemplate:
        name, effective, policy = check_agent(agent), self.lookup.effective, self.lookup.policy
        accounts, rules = effective.accounts, effective.rules_of(name)
        named = [accounts.check_resource("cost", resource) for resource in costs]
        path = accounts.agent_path(rules.account, name)
        asks = account_asks(accounts, path, rules.plan, accounts.check_tool("tool", tool), named, sessions)
        shadow = policy.shadow or name in policy.shadow_agents
        mode = "exempt" if rules.exempt else "shadow" if shadow else "enforced"
        offence = Offence(AGENTS, name, self.lookup.backoff) if mode == "enforced" else None
        moved = bool(rules.former or effective.former_depths)
        return HoldTemplate(self.context, name, asks, mode, offence, rules.block is not None, moved)
