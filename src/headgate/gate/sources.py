"""Where each value of the policy in effect comes from: the default, the policy file, or a change made while running."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Final, Literal

from headgate.gate.effective import Effective, effective, limit_key, places_of
from headgate.gate.policy import ChannelTier, Policy
from headgate.gate.toml_text import limit_setting, toml_key, toml_value
from headgate.limits.decision import Limit
from headgate.stores.base import Edit, LogPage

_LISTED: Final = 5  # paths in a line of the log

_SESSIONS: Final = "sessions.limit"
_ACCOUNT_PATHS: Final = {
    "account": ("agents", "account"),
    "agent_plan": ("agents", "plan"),
    "account_plan": ("accounts.at", "plan"),
    "account_limit": ("accounts.at", ""),
    "level_limit": ("accounts.default", ""),
    "plan_limit": ("accounts.plans", ""),
}
"""The table and the key that an edit about accounts changes; "" for the resource that it names."""


@dataclass(frozen=True, slots=True)
class PolicyValue:
    """A value of the policy in effect."""

    path: str
    """Where it stands in the policy file, such as `limits.ws.heavy`."""
    value: str
    """In TOML. Where a change has removed an agent's override of the file, the default that holds instead."""
    source: Literal["default", "file", "change"]
    """"file": the policy gives it. "change": one made while running sets it, be it to what the file says."""
    file_value: str | None
    """The setting of the file, if a change overrules it; None if it is the same, or there is none."""
    by: str
    """The author of the change; "" if the history no longer tells."""
    at: float | None
    """When it was made, in seconds since 1970; None if the history no longer tells."""


# All values -----------------------------------------------------------------------------------------------------------


def policy_values(policy: Policy, page: LogPage) -> list[PolicyValue]:
    """Every value of a policy with the changes in a log."""
    changed, filed = _changed_paths(policy, page), policy.values()
    return [
        _policy_value(path, value, filed[path] if path in filed and policy.gives(path) else None, changed.get(path))
        for path, value in _in_effect(policy, effective(policy, page.edits())).values().items()
    ]


def _policy_value(path: str, value: str, filed: str | None, change: "_Author | None") -> PolicyValue:
    source: Literal["default", "file", "change"] = "default" if filed is None else "file"
    by, at = change or ("", None)
    return PolicyValue(path, value, "change" if change else source, None if filed == value else filed, by, at)


def _in_effect(policy: Policy, current: Effective) -> Policy:
    """The policy that has the same effect by itself, with the agents in the order of their names."""
    made = copy(policy)
    overrides: dict[str, dict[ChannelTier, Limit]] = {}
    for agent in sorted({*policy.overrides, *current.overrides}):
        own = current.overrides.get(agent, {})
        places = {**policy.overrides.get(agent, {}), **own}
        overrides[agent] = {place: own.get(place, current.limits[place]) for place in places}
    sessions = {
        agent: current.session_overrides.get(agent, current.session_limit)
        for agent in sorted({*policy.session_overrides, *current.session_overrides})
    }
    agents = sorted(current.agents.items())
    for name, value in {
        "limits": current.limits,
        "overrides": overrides,
        "session_limit": current.session_limit,
        "session_overrides": sessions,
        "exempt": current.exempt,
        "accounts": current.accounts,
        "agent_accounts": {agent: rules.account for agent, rules in agents if rules.account},
        "agent_plans": {agent: rules.plan for agent, rules in agents if rules.plan},
    }.items():
        object.__setattr__(made, name, value)
    return made


_Author = tuple[str, float | None]


def _changed_paths(policy: Policy, page: LogPage) -> dict[str, _Author]:
    """The paths of all values that a change sets, each with who set it last and when, as far as the log tells."""
    edits: list[tuple[Edit, _Author]] = [(edit, ("", None)) for edit in page.snapshot or ()]
    edits += [(edit, (change.by, change.at)) for change in page.changes for edit in change.edits]
    found: dict[str, _Author] = {}
    exempt: dict[str, _Author] = {}
    for edit, author in edits:
        if edit.kind == "exemption":
            exempt.pop(edit.agent, None)
            if (edit.value is not None) != (edit.agent in policy.exempt):
                exempt[edit.agent] = author  # the newest goes last
        for path, in_file in _paths_of(policy, edit):
            if edit.value is None and not in_file:
                found.pop(path, None)
            else:
                found[path] = author
    if exempt:
        found["exempt"] = list(exempt.values())[-1]
    return found


def _paths_of(policy: Policy, edit: Edit) -> Iterator[tuple[str, bool]]:
    """The limits that an edit is about, and whether a removal is a change: of what the file says of an agent it is."""
    if edit.kind == "default":
        for place in places_of(policy, edit):
            yield _default_path(place), False
    elif edit.kind == "session":
        yield _session_path(edit.agent), edit.agent in policy.session_overrides
    elif edit.kind in _ACCOUNT_PATHS:
        yield _account_path(edit), False
    elif edit.kind == "override":
        own = policy.overrides.get(edit.agent, {})
        for place in places_of(policy, edit):
            yield _override_path(edit.agent, place), place in own


def _default_path(place: ChannelTier) -> str:
    return f"limits.{'.'.join(place)}"


def _override_path(agent: str, place: ChannelTier) -> str:
    return f"agents.{toml_key(agent)}.{'.'.join(place)}"


def _account_path(edit: Edit) -> str:
    table, key = _ACCOUNT_PATHS[edit.kind]
    resource, tool = limit_key(edit)
    return f"{table}.{toml_key(edit.agent)}.{key or (f'tools.{toml_key(tool)}.{resource}' if tool else resource)}"


def _session_path(agent: str) -> str:
    return f"agents.{toml_key(agent)}.session" if agent else _SESSIONS


# Values of the file that have no effect -------------------------------------------------------------------------------


def overruled_limits(policy: Policy, current: Effective) -> dict[str, tuple[Limit, Limit]]:
    """The limits of the file that a change overrules, by path: what the file says, and what holds."""
    return {path: (filed, held) for path, filed, held in _limits_of_file(policy, current) if filed != held}


def _limits_of_file(policy: Policy, current: Effective) -> Iterator[tuple[str, Limit, Limit]]:
    for place, limit in policy.limits.items():
        if policy.gives(path := _default_path(place)):
            yield path, limit, current.limits[place]
    if policy.gives(_SESSIONS):
        yield _SESSIONS, policy.session_limit, current.session_limit
    for agent, limits in policy.overrides.items():
        own = current.rules_of(agent).overrides
        for place, limit in limits.items():
            yield _override_path(agent, place), limit, own.get(place) or current.limits[place]
    for agent, limit in policy.session_overrides.items():
        yield _session_path(agent), limit, current.rules_of(agent).session or current.session_limit


def describe_overruled(before: Policy, policy: Policy, current: Effective) -> str:
    """The changes of a reload that have no effect, for the log; "" if there are none."""
    overruled = overruled_limits(policy, current)
    if not overruled:
        return ""
    known = {path: value for path, value in before.values().items() if before.gives(path)}
    texts = {path: [toml_value(limit_setting(limit)) for limit in limits] for path, limits in overruled.items()}
    lines = [
        f"{path} = {filed} (in effect: {held})" for path, (filed, held) in texts.items() if known.get(path) != filed
    ]
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return ", ".join([*lines[:_LISTED], *more])
