"""The changes that operators make while a gate runs, on top of the policy: each is made of edits.

Changes are recorded in order, with their authors and times. The limits in effect result from applying their edits in
that order, by the one function that also applies them while running. So the log and the running gate can't differ.
"""

from dataclasses import replace
from typing import Final

from headgate.errors import refuse
from headgate.gate.accounts import SLOTS, Accounts, LimitKey, level_of, parse_account_limit
from headgate.gate.effective import ACCOUNT_KINDS, KINDS, Effective, limit_key
from headgate.gate.policy import Policy, check_agent
from headgate.limits.budget import Budget
from headgate.limits.notation import LimitLike, limit_of, rate_limit_of
from headgate.stores.base import LAST_MOMENT, MAX_REASON, Block, Edit

_MAX_ROLE: Final = 64


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


def _is_printable(text: object, most: int) -> bool:
    return isinstance(text, str) and len(text) <= most and text.isprintable()


def _edit(kind: str, agent: str, channel: object, tier: object, value: str | None) -> Edit:
    if (tier is not None or value is not None) and (not isinstance(tier, str) or not tier):
        refuse("tier", "the name of a tier", tier)
    if channel is not None and (not isinstance(channel, str) or not channel):
        refuse("channel", "the name of a channel", channel)
    return Edit(kind, agent, channel or "", tier or "", value)


def validated(edit: object, policy: Policy, before: Effective, now: float) -> Edit:
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


def _validated_account_edit(edit: Edit, accounts: Accounts, before: Effective) -> Edit:
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


def _zone_before(edit: Edit, key: LimitKey, before: Effective) -> str:
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
