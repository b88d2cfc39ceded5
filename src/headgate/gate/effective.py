"""The rules in effect: the policy, with the edits of all changes applied in their order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from headgate.errors import InvalidInput
from headgate.gate.accounts import (
    NO_ACCOUNT,
    AccountLimit,
    Accounts,
    LimitKey,
    is_within,
    join_path,
    level_of,
    parse_account_limit,
    path_prefixes,
    split_path,
)
from headgate.gate.immutable_map import ImmutableMap
from headgate.gate.policy import ChannelTier, Policy
from headgate.limits.decision import Limit
from headgate.limits.fixed import UNLIMITED
from headgate.stores.base import Block, Edit
from headgate.stores.change_rows import read_limit

KINDS: Final = ("override", "exemption", "default", "session", "block", "role", "account", "agent_plan")
"""The kinds of edits that are about an agent or about all of them."""
ACCOUNT_KINDS: Final = ("account_limit", "account_plan", "level_limit", "plan_limit")
"""The kinds that are about an account, a level or a plan."""
MAX_FORMER: Final = 4
"""Accounts that an agent has left, in which its holds are looked for."""


@dataclass(frozen=True, slots=True)
class AgentRules:
    """The rules of one agent."""

    overrides: Mapping[ChannelTier, Limit]
    exempt: bool
    session: Limit | None = None
    block: Block | None = None
    """It may have ended."""
    role: str = ""
    account: str = ""
    """The path of the account that it belongs to; "" for none."""
    plan: str = ""
    former: tuple[str, ...] = ()
    """The accounts that it belonged to before, the latest first: there may be holds of it."""


_NO_RULES: Final = AgentRules({}, False)


@dataclass(frozen=True)
class Effective:
    """The limits, overrides and exemptions in effect: the policy with all changes applied.

    Whether a block holds is a question of the time, which `Gate.block_of` answers. Everything else here leaves blocks
    aside.
    """

    limits: Mapping[ChannelTier, Limit]
    agents: ImmutableMap[AgentRules]
    """The agents that have rules of their own."""
    session_limit: Limit
    """The limit of the sessions of agents without a limit of their own."""
    generations: Mapping[ChannelTier, int]
    """How often a default was changed. Each generation is counted in buckets of its own, so that all begin full."""
    accounts: Accounts
    former_depths: tuple[int, ...] = ()
    """How many levels there were above the agents before, the latest first."""

    @cached_property
    def overrides(self) -> Mapping[str, Mapping[ChannelTier, Limit]]:
        """The limits of agents that have their own."""
        return {agent: rules.overrides for agent, rules in self.agents.items() if rules.overrides}

    @cached_property
    def session_overrides(self) -> Mapping[str, Limit]:
        """The limits of the sessions of agents that have their own."""
        return {agent: rules.session for agent, rules in self.agents.items() if rules.session is not None}

    def session_limit_of(self, agent: str) -> Limit:
        """The limit of an agent's sessions: `UNLIMITED` if it is exempt."""
        rules = self.rules_of(agent)
        return UNLIMITED if rules.exempt else rules.session or self.session_limit

    @cached_property
    def exempt(self) -> frozenset[str]:
        """The agents that always pass."""
        return frozenset([agent for agent, rules in self.agents.items() if rules.exempt])

    @cached_property
    def blocks(self) -> Mapping[str, Block]:
        """The blocks that were set, those that have ended included."""
        return {agent: rules.block for agent, rules in self.agents.items() if rules.block is not None}

    @cached_property
    def roles(self) -> Mapping[str, str]:
        """The roles of agents that have one."""
        return {agent: rules.role for agent, rules in self.agents.items() if rules.role}

    def rules_of(self, agent: str) -> AgentRules:
        """The rules of an agent; the same empty ones for all that have none of their own."""
        return self.agents.get(agent) or _NO_RULES

    def is_exempt(self, agent: str) -> bool:
        return self.rules_of(agent).exempt

    def limits_of(self, agent: str) -> Mapping[ChannelTier, Limit]:
        """All limits of an agent: `UNLIMITED` if it is exempt."""
        rules = self.rules_of(agent)
        return dict.fromkeys(self.limits, UNLIMITED) if rules.exempt else {**self.limits, **rules.overrides}

    def account_limits(self, path: str) -> dict[LimitKey, AccountLimit]:
        """The limits of an account, or of an agent, with its plan."""
        of_agent = level_of(path) == self.accounts.agent_level
        return self.accounts.limits_of(path, self.rules_of(split_path(path)[-1]).plan if of_agent else "")

    def names_account(self, path: str) -> bool:
        """Whether the policy, a change or an agent names an account above the agents, or one below it."""
        if any([is_within(other, path) for other, _ in self.accounts.at.items()]):
            return True
        return any(is_within(rules.account, path) for _, rules in self.agents.items() if rules.account)

    def limits_account(self, path: str) -> bool:
        """Whether an account above the agents, or one above it, has a limit: its own, its plan's or its level's."""
        return any([self.account_limits(prefix) for prefix in path_prefixes(path)])

    def with_former(self, before: "Effective") -> "Effective":
        """These rules, with the accounts that agents had before and don't have now: there may be holds of them."""
        changed: dict[str, AgentRules | None] = {}
        for agent in {name for rules in (before, self) for name, _ in rules.agents.items()}:
            old, new = before.rules_of(agent), self.rules_of(agent)
            accounts = dict.fromkeys([*new.former, *([] if old.account == new.account else [old.account]), *old.former])
            former = tuple([account for account in accounts if account != new.account][:MAX_FORMER])
            if former != new.former:
                changed[agent] = replace(new, former=former)
        known = dict.fromkeys([before.accounts.agent_level, *before.former_depths])
        depths = tuple([depth for depth in known if depth != self.accounts.agent_level][:MAX_FORMER])
        if not changed and depths == self.former_depths:
            return self
        return replace(self, agents=self.agents.update(changed), former_depths=depths)

    def hold_roots(self, agent: str) -> list[str]:
        """Where holds of an agent may be known: under the top account that it has, or had, or by itself."""
        rules = self.rules_of(agent)
        roots: list[str] = []
        for account in (rules.account, *rules.former):
            if account:
                roots.append(path_prefixes(account)[0])
            else:
                depths = (self.accounts.agent_level, *self.former_depths)
                roots += [join_path([*[NO_ACCOUNT] * depth, agent]) for depth in depths]
        return list(dict.fromkeys(roots))


def effective(policy: Policy, edits: Iterable[Edit] = ()) -> Effective:
    """The rules in effect after these edits to a policy."""
    agents: dict[str, AgentRules | None] = {
        agent: AgentRules(
            policy.overrides.get(agent, {}),
            agent in policy.exempt,
            policy.session_overrides.get(agent),
            account=policy.agent_accounts.get(agent, ""),
            plan=policy.agent_plans.get(agent, ""),
        )
        for agent in {
            *policy.overrides,
            *policy.exempt,
            *policy.session_overrides,
            *policy.agent_accounts,
            *policy.agent_plans,
        }
    }
    empty: ImmutableMap[AgentRules] = ImmutableMap()
    first = Effective(policy.limits, empty.update(agents), policy.session_limit, {}, policy.accounts)
    return apply_edits(first, policy, edits)


def apply_edits(before: Effective, policy: Policy, edits: Iterable[Edit]) -> Effective:
    """The rules in effect after some more edits."""
    after = before
    changed: dict[str, AgentRules | None] = {}
    for edit in edits:
        if edit.kind == "default":
            after = _with_default(after, policy, edit)
        elif edit.kind == "session" and not edit.agent:
            after = replace(after, session_limit=policy.session_limit if edit.value is None else read_limit(edit.value))
        elif edit.kind in ACCOUNT_KINDS:
            after = replace(after, accounts=_with_account_edit(after.accounts, policy.accounts, edit))
        elif edit.kind in KINDS:  # a kind of a later version is ignored
            found = changed[edit.agent] if edit.agent in changed else before.agents.get(edit.agent)
            rules = _with_rules(found or _NO_RULES, policy, edit)
            changed[edit.agent] = None if rules == _NO_RULES else rules
    return replace(after, agents=before.agents.update(changed))


def _with_rules(before: AgentRules, policy: Policy, edit: Edit) -> AgentRules:
    if edit.kind == "exemption":
        return replace(before, exempt=edit.value is not None)
    if edit.kind == "block":
        return replace(before, block=None if edit.value is None else Block.read(edit.value))
    if edit.kind == "role":
        return replace(before, role=edit.value or "")
    if edit.kind == "session":
        return replace(before, session=None if edit.value is None else read_limit(edit.value))
    if edit.kind == "agent_plan":
        return replace(before, plan=policy.agent_plans.get(edit.agent, "") if edit.value is None else edit.value)
    if edit.kind == "account":
        path = policy.agent_accounts.get(edit.agent, "") if edit.value is None else edit.value
        path = "/".join(path.split("/")[: policy.accounts.agent_level])  # a policy may have had more levels
        former = [before.account, *before.former] if path != before.account else list(before.former)
        return replace(before, account=path, former=tuple([one for one in former if one != path][:MAX_FORMER]))
    places = places_of(policy, edit)
    own = {place: limit for place, limit in before.overrides.items() if place not in places}
    if edit.value is not None:
        own |= dict.fromkeys(places, read_limit(edit.value))
    return replace(before, overrides=own)


def _with_account_edit(before: Accounts, policy: Accounts, edit: Edit) -> Accounts:
    """The accounts after an edit. One that this policy has no level, plan, resource or tool for has no effect."""
    subject, key = edit.agent, limit_key(edit)
    try:
        if edit.kind == "account_plan":
            plan = policy.rules_of(subject).plan if edit.value is None else edit.value
            return before.with_plan(subject, plan)
        units, zone = before.units, before.zone
        value = edit.value
        limit = None if value is None else parse_account_limit("limit", key[0], value, units, zone, recorded=True)
        if edit.kind == "level_limit" and subject in before.levels:
            filed = policy.defaults.get(subject, {}).get(key)
            return before.with_default(subject, key, limit or filed)
        if edit.kind == "plan_limit" and subject in before.plans:
            filed = policy.plans.get(subject, {}).get(key)
            return before.with_plan_limit(subject, key, limit or filed)
        if edit.kind == "account_limit":
            return before.with_limit(subject, key, limit or policy.rules_of(subject).limits.get(key))
    except (InvalidInput, LookupError):
        pass
    return before


def _with_default(before: Effective, policy: Policy, edit: Edit) -> Effective:
    limits, generations = dict(before.limits), dict(before.generations)
    for place in places_of(policy, edit):
        limits[place] = policy.limits[place] if edit.value is None else read_limit(edit.value)
        if edit.generation:
            generations[place] = edit.generation
        elif limits[place] != before.limits[place]:
            generations[place] = generations.get(place, 0) + 1
    return replace(before, limits=limits, generations=generations)


def places_of(policy: Policy, edit: Edit) -> list[ChannelTier]:
    """Where an edit applies; a channel or tier that the policy no longer has is left out."""
    return [place for place in policy.limits if edit.channel in ("", place[0]) and edit.tier in ("", place[1])]


def limit_key(edit: Edit) -> LimitKey:
    """The resource and the tool that an edit of an account, a level or a plan limits."""
    resource, _, tool = edit.tier.partition("@")
    return resource, tool
