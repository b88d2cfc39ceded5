"""Changes that operators make while a gate runs, on top of the policy.

Changes are recorded in order, with their authors and times. The limits in effect result from applying their edits in
that order, by the one function that also applies them while running. So the log and the running gate can't differ.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from headgate.errors import InvalidInput, refuse
from headgate.gate.accounts import SLOTS, AccountLimit, Accounts, LimitKey, level_of, parse_account_limit, split_path
from headgate.gate.immutable_map import ImmutableMap
from headgate.gate.policy import ChannelTier, Policy, check_agent
from headgate.limits.budget import Budget
from headgate.limits.decision import Limit
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import LimitLike, limit_of, rate_limit_of
from headgate.stores.base import LAST_MOMENT, MAX_REASON, UNREADABLE, Change, Edit, LogPage
from headgate.stores.base import Block as Block
from headgate.stores.change_rows import read_limit

KINDS: Final = ("override", "exemption", "default", "session", "block", "role", "account", "agent_plan")
"""The kinds of edits that are about an agent or about all of them."""
ACCOUNT_KINDS: Final = ("account_limit", "account_plan", "level_limit", "plan_limit")
"""The kinds that are about an account, a level or a plan."""
KEPT: Final = 10_000
"""The newest changes, which stay readable when a log is compacted."""
_MAX_ROLE: Final = 64
_FORMER: Final = 4  # accounts that an agent has left, in which its holds are looked for
_CLOCKS_APART: Final = 86_400.0  # seconds by which the clocks of two nodes may differ


# Edits ----------------------------------------------------------------------------------------------------------------


def override(agent: str, tier: str, limit: LimitLike, channel: str | None = None) -> Edit:
    """Give an agent a limit of its own for a tier, on one channel or on all."""
    return _edit("override", check_agent(agent), channel, tier, str(rate_limit_of("override", limit)))


def no_override(agent: str, tier: str | None = None) -> Edit:
    """Put an agent back to the defaults, for a tier or for all."""
    return _edit("override", check_agent(agent), None, tier, None)


def exemption(agent: str, exempt: bool = True) -> Edit:
    """Let an agent always pass, or hold it to its limits again."""
    return Edit("exemption", check_agent(agent), value="exempt" if exempt else None)


def default(tier: str, limit: LimitLike, channel: str | None = None) -> Edit:
    """Change the limit of a tier for every agent without an override."""
    return _edit("default", "", channel, tier, str(rate_limit_of("default", limit)))


def no_default(tier: str | None = None, channel: str | None = None) -> Edit:
    """Put a tier back to the policy's limit, or all tiers, on one channel or on all; "session": that of sessions."""
    if tier != "session":
        return _edit("default", "", channel, tier, None)
    if channel is not None:
        refuse("channel", "none, since sessions have no channel", channel)
    return session_limit(None)


def session_limit(limit: LimitLike | None, agent: str | None = None) -> Edit:
    """Limit the sessions of an agent, or those of all agents without a limit of their own. None removes the limit."""
    value = None if limit is None else str(rate_limit_of("session limit", limit))
    return Edit("session", "" if agent is None else check_agent(agent), value=value)


def block(agent: str, until: float | None = None, reason: str = "") -> Edit:
    """Let nothing of an agent pass, on any channel: until a moment in seconds since 1970, or without an end."""
    timed = isinstance(until, (int, float)) and not isinstance(until, bool)
    if until is not None and not (timed and 0 <= until <= LAST_MOMENT):
        refuse("until", "seconds since 1970, up to the year 9999, or None", until)
    if not _is_printable(reason, MAX_REASON):
        refuse("reason", f"at most {MAX_REASON} printable characters", reason)
    return Edit("block", check_agent(agent), value=Block(None if until is None else float(until), reason).text())


def no_block(agent: str) -> Edit:
    """Let an agent pass again, within its limits."""
    return Edit("block", check_agent(agent))


def role(agent: str, role: str | None) -> Edit:
    """Give an agent a role, or none. Roles are the application's: a gate only keeps them."""
    if role is not None and not (role and _is_printable(role, _MAX_ROLE)):
        refuse("role", f"1 to {_MAX_ROLE} printable characters, or None", role)
    return Edit("role", check_agent(agent), value=role)


def agent_account(agent: str, path: str | None) -> Edit:
    """Let an agent belong to an account, "" for none. None: to that of the policy."""
    if path is not None and not isinstance(path, str):
        refuse("account", "the path of an account, such as 'acme/search'", path)
    return Edit("account", check_agent(agent), value=path)


def agent_plan(agent: str, plan: str | None) -> Edit:
    """Give an agent a plan. None: that of the policy."""
    return Edit("agent_plan", check_agent(agent), value=plan)


def account_plan(path: str, plan: str | None) -> Edit:
    """Give an account a plan. None: that of the policy."""
    return Edit("account_plan", path, value=plan)


def account_limit(path: str, resource: str, limit: LimitLike | None, tool: str | None = None) -> Edit:
    """Limit a resource of an account, for all or for one tool. None: back to the policy."""
    return Edit("account_limit", path, tier=_key_text(resource, tool), value=_text(limit))


def level_limit(level: str, resource: str, limit: LimitLike | None, tool: str | None = None) -> Edit:
    """Limit a resource of every account of a level that has no limit of its own. None: back to the policy."""
    return Edit("level_limit", level, tier=_key_text(resource, tool), value=_text(limit))


def plan_limit(plan: str, resource: str, limit: LimitLike | None, tool: str | None = None) -> Edit:
    """Limit a resource in a plan. None: back to the policy."""
    return Edit("plan_limit", plan, tier=_key_text(resource, tool), value=_text(limit))


def _text(limit: LimitLike | None) -> str | None:
    return limit if limit is None or isinstance(limit, str) else str(limit_of("limit", limit))


def _key_text(resource: object, tool: object) -> str:
    """How an edit names what it limits: "usd", or "usd@web" for one tool."""
    if not isinstance(resource, str) or not isinstance(tool, str | None):
        refuse("resource", "the name of a resource", resource)
    return f"{resource}@{tool}" if tool else resource


def limit_key(edit: Edit) -> LimitKey:
    """The resource and the tool that an edit of an account, a level or a plan limits."""
    resource, _, tool = edit.tier.partition("@")
    return resource, tool


def _is_printable(text: object, most: int) -> bool:
    return isinstance(text, str) and len(text) <= most and text.isprintable()


def _edit(kind: str, agent: str, channel: object, tier: object, value: str | None) -> Edit:
    if (tier is not None or value is not None) and (not isinstance(tier, str) or not tier):
        refuse("tier", "the name of a tier", tier)
    if channel is not None and (not isinstance(channel, str) or not channel):
        refuse("channel", "the name of a channel", channel)
    return Edit(kind, agent, channel or "", tier or "", value)


def validated(edit: object, policy: Policy, before: "Effective", now: float) -> Edit:
    """An edit as the functions above make it, for a channel and tier of the policy; anything else is refused.

    A budget that names no time zone gets that of the one before. `now` is the time of day: a block ends later.
    """
    if isinstance(edit, Edit) and edit.kind in ACCOUNT_KINDS:
        return _validated_account_edit(edit, policy.accounts, before)
    if not isinstance(edit, Edit) or edit.kind not in KINDS or edit.generation:
        refuse("edit", "an edit made by a function of headgate.gate.changes, such as override or block", edit)
    if edit.channel not in ("", *policy.channels):
        refuse("channel", f"one of {', '.join(policy.channels)}", edit.channel)
    if edit.tier not in ("", *policy.tiers):
        refuse("tier", f"one of {', '.join(policy.tiers)}", edit.tier)
    made: Edit
    if edit.kind == "exemption":
        made = exemption(edit.agent, edit.value is not None)
    elif edit.kind == "session":
        made = session_limit(edit.value, edit.agent or None)
    elif edit.kind == "block":
        made = no_block(edit.agent) if edit.value is None else _validated_block(edit.agent, edit.value, now)
    elif edit.kind == "role":
        made = role(edit.agent, edit.value)
    elif edit.kind == "account":
        path = None if edit.value is None else policy.accounts.check_account("account", edit.value)
        made = agent_account(edit.agent, path)
    elif edit.kind == "agent_plan":
        plan = None if edit.value is None else policy.accounts.check_plan("plan", edit.value)
        made = agent_plan(edit.agent, plan)
    elif edit.kind == "default" and edit.value is None:
        made = no_default(edit.tier or None, edit.channel or None)
    elif edit.kind == "default":
        made = default(edit.tier, edit.value or "", edit.channel or None)
    elif edit.value is None:
        made = no_override(edit.agent, edit.tier or None)
    else:
        made = override(edit.agent, edit.tier, edit.value, edit.channel or None)
    if replace(made, value=edit.value) != edit or (edit.kind == "exemption" and made != edit):
        refuse("edit", f"one such as {made}", edit)
    return made


def _validated_account_edit(edit: Edit, accounts: Accounts, before: "Effective") -> Edit:
    if edit.channel or edit.generation:
        refuse("edit", "an edit made by a function of headgate.gate.changes, such as account_limit", edit)
    if edit.kind == "level_limit":
        accounts.check_level("level", edit.agent)
    elif edit.kind == "plan_limit":
        accounts.check_plan("plan", edit.agent)
    else:
        accounts.check_limited_path("account", edit.agent)
    if edit.kind == "account_plan":
        if level_of(edit.agent) >= accounts.agent_level:
            refuse("account", "one above the agents, which have plans by their names", edit.agent)
        return edit if edit.value is None else replace(edit, value=accounts.check_plan("plan", edit.value))
    resource, tool = limit_key(edit)
    accounts.check_resource("resource", resource)
    accounts.check_tool("tool", tool)
    if tool and resource == SLOTS:
        refuse("resource", "another one than slots, which have no tool", resource)
    if edit.value is None:
        return edit
    unnamed = _zone_before(edit, (resource, tool), before)
    limit = parse_account_limit("limit", resource, edit.value, accounts.units, accounts.zone, unnamed)
    return replace(edit, value=limit.text)


def _zone_before(edit: Edit, key: LimitKey, before: "Effective") -> str:
    """The time zone of the budget that a limit replaces, "" if there is none: what is spent stays in its periods."""
    if edit.kind == "level_limit":
        limits = before.accounts.defaults.get(edit.agent, {})
    elif edit.kind == "plan_limit":
        limits = before.accounts.plans.get(edit.agent, {})
    else:
        limits = before.account_limits(edit.agent)
    replaced = limits.get(key)
    zones = {part.zone for part in replaced.parts if isinstance(part, Budget) and part.period} if replaced else set()
    return zones.pop() if len(zones) == 1 else ""


def _validated_block(agent: str, value: str, now: float) -> Edit:
    try:
        found = Block.read(value)
    except ValueError:
        refuse("edit", "a block made by headgate.gate.changes.block", value)
    if found.until is not None and found.until <= now:
        refuse("until", f"a moment after now, which is {now:.0f}", found.until)
    return block(agent, found.until, found.reason)


# Rules in effect ------------------------------------------------------------------------------------------------------


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

    def with_former(self, before: "Effective") -> "Effective":
        """These rules, with the accounts that agents had before and don't have now: there may be holds of them."""
        changed: dict[str, AgentRules | None] = {}
        for agent in {name for rules in (before, self) for name, _ in rules.agents.items()}:
            old, new = before.rules_of(agent), self.rules_of(agent)
            accounts = dict.fromkeys([*new.former, *([] if old.account == new.account else [old.account]), *old.former])
            former = tuple([account for account in accounts if account != new.account][:_FORMER])
            if former != new.former:
                changed[agent] = replace(new, former=former)
        return replace(self, agents=self.agents.update(changed)) if changed else self


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
        return replace(before, account=path, former=tuple([one for one in former if one != path][:_FORMER]))
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
        limit = None if edit.value is None else parse_account_limit("limit", key[0], edit.value, units, zone)
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


# The log --------------------------------------------------------------------------------------------------------------


def condense(policy: Policy, edits: Sequence[Edit], now: float = 0.0) -> list[Edit]:
    """The edits that still have an effect at a time of day, for the snapshot of a compacted log.

    An edit has none once a later one covers it. A removal may have none under this policy and some under another: the
    newest `KEPT` of those stay. Defaults carry their generation, which can't be counted any more. That of a tier that
    this policy lacks isn't known here, so the newest `KEPT` of each stay: another node may have the tier.
    """
    edits = [edit for edit in edits if edit.kind != UNREADABLE]
    defaults = [edit for edit in edits if edit.kind == "default"]
    generations = effective(policy, defaults).generations
    numbered = [
        Edit(
            "default",
            "",
            *where,
            next(edit.value for edit in reversed(defaults) if where in places_of(policy, edit)),
            number,
        )
        for where, number in generations.items()
    ]
    ordered = [*edits, *numbered]
    kept: dict[tuple[str, str, str], list[int]] = {}  # places in that list
    for place, edit in enumerate(ordered):
        unknown = edit.tier if edit.kind == "default" and edit.tier not in policy.tiers else ""
        earlier = kept.pop((edit.kind, edit.agent, unknown), [])  # the newest goes last
        if edit.kind == "account":  # the accounts that an agent has left are looked for its holds
            earlier = [other for other in earlier if ordered[other].value != edit.value][-_FORMER:]
        elif not unknown:
            earlier = [other for other in earlier if not _covers(edit, ordered[other])]
        earlier.append(place)
        kept[edit.kind, edit.agent, unknown] = earlier
    in_policy = {
        "override": policy.overrides,
        "exemption": policy.exempt,
        "default": {""},
        "session": {"", *policy.session_overrides},
    }
    removals = [
        (kind, agent, unknown)
        for (kind, agent, unknown), of_agent in kept.items()
        if agent not in in_policy.get(kind, ()) and all([ordered[place].value is None for place in of_agent])
    ]
    ended = [key for key, of_agent in kept.items() if key[0] == "block" and _has_ended(ordered[of_agent[-1]], now)]
    for key in [*removals[:-KEPT], *ended]:
        del kept[key]
    # In their order: what takes back all defaults must not take back later ones.
    return [ordered[place] for place in sorted([place for of_agent in kept.values() for place in of_agent[-KEPT:]])]


def _has_ended(edit: Edit, now: float) -> bool:
    """Whether a block has ended for every node."""
    until = None if edit.value is None else Block.read(edit.value).until
    return until is not None and until < now - _CLOCKS_APART


def _covers(later: Edit, earlier: Edit) -> bool:
    return later.channel in ("", earlier.channel) and later.tier in ("", earlier.tier)


class MemoryChangeLog:
    """A change log in memory, gone with the process."""

    def __init__(self) -> None:
        self._snapshot: tuple[Edit, ...] = ()
        self._changes: list[Change] = []
        self._position = 0

    def read(self, after: int = 0) -> LogPage:
        return LogPage(self._snapshot, list(self._changes), self._position)

    def write(self, change: Change) -> int:
        self._changes.append(change)
        self._position += len(change.edits)
        return self._position

    def compact(self, keep: int, condense: Callable[[Sequence[Edit]], Sequence[Edit]]) -> int:
        dropped, kept = self._changes[:-keep], self._changes[-keep:]
        self._snapshot = tuple(condense([*self._snapshot, *(edit for change in dropped for edit in change.edits)]))
        self._changes = kept
        return len(kept)

    def close(self) -> None:
        """Nothing to close."""
