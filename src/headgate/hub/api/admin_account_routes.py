"""Admin routes: accounts, their limits and plans, the accounts of agents, and their holds."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Final, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, json
from msgspec.structs import asdict

from headgate.errors import refuse
from headgate.gate import Gate
from headgate.gate.account_settings import limit_settings
from headgate.gate.account_status import AccountStatus
from headgate.gate.accounts import (
    AccountLimit,
    Accounts,
    LimitKey,
    is_within,
    level_of,
    parse_account_limit,
    path_prefixes,
    split_path,
)
from headgate.gate.changes import account_limit, account_plan, agent_account, agent_plan, level_limit, plan_limit
from headgate.gate.policy import check_agent
from headgate.hub.agents.registry import Registry
from headgate.hub.api.admin_limit_routes import MOST_LIMITS, LimitTexts, limit_texts
from headgate.hub.api.agent_routes import AccountPath, PlanName
from headgate.hub.api.hold_routes import HoldEntry, LimitEntry, hold_entry, limit_entry
from headgate.hub.api.routing import Body, Call, admin_route
from headgate.hub.errors import RequestError
from headgate.stores.base import Edit

_MOST_NAMES: Final = 1000  # agents or accounts below one that are listed with it
_TOOLS: Final = "tools"
_PLAN: Final = "plan"

# Bodies and answers ---------------------------------------------------------------------------------------------------

_ByResource: TypeAlias = dict[str, LimitTexts | None]
_LIMITS_ABOUT: Final = (
    "limits by resource, and below `tools` by tool and resource; null goes back to the policy's limit, or to none"
)


def _table_schema(*, plan: bool) -> dict[str, Any]:
    known: dict[str, Any] = {_TOOLS: json.schema(dict[str, _ByResource])}
    if plan:
        known[_PLAN] = json.schema(str | None)
    return {"properties": known, "additionalProperties": json.schema(LimitTexts | None)}


NewAccount: TypeAlias = Annotated[
    dict[str, Any],  # `_limits` reads it: the errors of msgspec don't name the resource
    Meta(description=f"{_LIMITS_ABOUT}; `plan`: its plan", extra_json_schema=_table_schema(plan=True)),
]
NewAccountLimits: TypeAlias = Annotated[
    dict[str, Any], Meta(description=_LIMITS_ABOUT, extra_json_schema=_table_schema(plan=False))
]


class NewAgentAccount(Body):
    account: AccountPath | UnsetType | None = UNSET
    """The path of an account, or "" for none; null: that of the policy."""
    plan: PlanName | UnsetType | None = UNSET
    """null: that of the policy."""


class AccountsPage(Body):
    limit: Annotated[int, Meta(ge=1, le=100)] = 100
    after: AccountPath = ""
    """The path of the last account of the page before."""
    within: AccountPath = ""
    """An account: only itself and those below it."""


class HoldsPage(Body):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class AccountLimitStatus(LimitEntry, kw_only=True):
    source: str
    """Where it comes from: "account", "plan" or "level"."""
    used: float
    """The share that is spent or held."""


class AccountSummary(Struct):
    path: str
    level: str
    plan: str
    agents: int
    """How many belong to it, or to an account below it."""
    limits: list[AccountLimitStatus]


class AccountList(Struct):
    accounts: list[AccountSummary]
    """Each comes before those below it."""
    more: bool


class AccountDetail(AccountSummary, kw_only=True):
    accounts: list[str]
    """The first thousand accounts right below it."""
    members: list[str]
    """The first thousand agents that belong to it."""
    registered: bool | None
    """Whether there is an agent of this name; null for an account above the agents."""


class ChangedAccount(AccountDetail, kw_only=True):
    known: bool
    """Whether the policy, a change or an agent had named it before."""


class AccountDefaults(Struct):
    levels: list[str]
    """From the top. The last two are those of agents and sessions."""
    resources: list[str]
    tools: list[str]
    zone: str
    level_limits: dict[str, dict[str, Any]]
    plans: dict[str, dict[str, Any]]


class AgentAccount(Struct):
    agent_id: str
    path: str
    account: str
    """ "" for none."""
    plan: str
    registered: bool
    known: bool
    """Whether the account had been named before."""
    limited: bool
    """Whether the account, or one above it, has limits; also true without one."""


class AccountHolds(Struct):
    holds: list[HoldEntry]
    """The open ones, then the expired ones, each by their ends."""
    more: bool


# Accounts -------------------------------------------------------------------------------------------------------------


async def _accounts(call: Call, gate: Gate) -> AccountList:
    query = call.query
    if query.within:
        gate.effective.accounts.check_account("within", query.within)
    paths = sorted(gate.list_accounts(), key=_tree_order)
    wanted = [
        path
        for path in paths
        if (not query.within or is_within(path, query.within))
        and (not query.after or _tree_order(path) > _tree_order(query.after))
    ]
    page = wanted[: query.limit]
    agents = _agent_counts(gate)
    found = [_summary(gate, status, agents) for status in await gate.aaccounts(page)]
    return AccountList(found, len(wanted) > len(page))


def _tree_order(path: str) -> list[str]:
    """Sorts an account before those below it, and these before its neighbours."""
    return path.split("/")


async def _one_account(call: Call, gate: Gate, registry: Registry) -> AccountDetail:
    path = call.parts["account"]
    if not _is_known(gate, path):
        raise RequestError(404, "unknown_account", f"no policy, change or agent names an account {path!r:.200}")
    return AccountDetail(**await _detail(gate, registry, path))


async def _set_account(call: Call, gate: Gate, registry: Registry) -> ChangedAccount:
    path, accounts = call.parts["account"], gate.effective.accounts
    agent = _agent_of(accounts, path)
    edits = [account_limit(path, *one) for one in _limits(call.body, accounts, plan=True)]
    if _PLAN in call.body:
        plan = call.body[_PLAN]
        if plan is not None:
            accounts.check_plan(_PLAN, plan)
        edits.append(account_plan(path, plan) if agent is None else agent_plan(agent, plan))
    _expect_edits(edits)
    if agent is not None and gate.path_of(agent) != path and any([edit.value is not None for edit in edits]):
        refuse("account", f"the agent's path, which is {gate.path_of(agent)!r}", path)
    return await _changed(call, gate, registry, path, edits)


async def _reset_account(call: Call, gate: Gate, registry: Registry) -> ChangedAccount:
    path, effective = call.parts["account"], gate.effective
    agent, policy = _agent_of(effective.accounts, path), gate.policy
    own, filed = effective.accounts.rules_of(path), policy.accounts.rules_of(path)
    changed = _changed_limits(own.limits, filed.limits)
    edits = [account_limit(path, resource, None, tool) for resource, tool in changed]
    if own.plan != filed.plan:
        edits.append(account_plan(path, None))
    if agent is not None and effective.rules_of(agent).plan != policy.agent_plans.get(agent, ""):
        edits.append(agent_plan(agent, None))
    return await _changed(call, gate, registry, path, edits)


async def _changed(call: Call, gate: Gate, registry: Registry, path: str, edits: list[Edit]) -> ChangedAccount:
    known = _is_known(gate, path)
    agent = _agent_of(gate.effective.accounts, path)
    if agent is not None:
        await registry.find(agent)  # first: a store that is away must not fail a change half-way
    await gate.achange(edits, by=call.by)
    return ChangedAccount(**await _detail(gate, registry, path), known=known)


async def _detail(gate: Gate, registry: Registry, path: str) -> dict[str, Any]:
    accounts = gate.effective.accounts
    summary = _summary(gate, await gate.aaccount(path), _agent_counts(gate))
    below = [one for one in gate.list_accounts() if is_within(one, path) and level_of(one) == level_of(path) + 1]
    members = sorted([agent for agent, rules in gate.effective.agents.items() if rules.account == path])
    agent = split_path(path)[accounts.agent_level] if level_of(path) >= accounts.agent_level else None
    registered = None if agent is None else await registry.find(agent) is not None
    return {
        **asdict(summary),
        "accounts": below[:_MOST_NAMES],
        "members": members[:_MOST_NAMES],
        "registered": registered,
    }


def _agent_of(accounts: Accounts, path: str) -> str | None:
    """The agent of a path that is to be changed; None for an account above the agents."""
    accounts.check_path("account", path)
    if level_of(path) < accounts.agent_level:
        accounts.check_account("account", path)
        return None
    return check_agent(split_path(path)[-1])


def _is_known(gate: Gate, path: str) -> bool:
    """Whether the policy, a change or an agent names an account. An agent, and a session of it, is at its own path."""
    accounts = gate.effective.accounts
    names = split_path(accounts.check_path("account", path, sessions=True))
    if len(names) <= accounts.agent_level:
        return gate.effective.names_account(path)
    return is_within(path, gate.path_of(names[accounts.agent_level]))


def _agent_counts(gate: Gate) -> dict[str, int]:
    """How many agents belong to each account, or to one below it."""
    counts: dict[str, int] = {}
    for account in [rules.account for _, rules in gate.effective.agents.items() if rules.account]:
        for path in path_prefixes(account):
            counts[path] = counts.get(path, 0) + 1
    return counts


def _summary(gate: Gate, status: AccountStatus, agents: dict[str, int]) -> AccountSummary:
    accounts = gate.effective.accounts
    limited = accounts.rules_of(status.path).limits
    planned = accounts.plans.get(status.plan, {})

    def source(key: LimitKey) -> str:
        return "account" if key in limited else "plan" if key in planned else "level"

    limits = [
        AccountLimitStatus(**asdict(limit_entry(one)), source=source((one.resource, one.tool)), used=one.used)
        for one in status.limits
    ]
    return AccountSummary(status.path, status.level, status.plan, agents.get(status.path, 0), limits)


# Limits in a body -----------------------------------------------------------------------------------------------------

_Limit: TypeAlias = tuple[str, str | None, str | None]
"""Resource, limit and tool."""
_Limits: TypeAlias = Mapping[LimitKey, AccountLimit]


def _limits(body: dict[str, Any], accounts: Accounts, *, plan: bool = False) -> list[_Limit]:
    """The limits in a body: all of them, or an error."""
    reserved = (_TOOLS, _PLAN) if plan else (_TOOLS,)
    found = list(_of_tool("", {name: limit for name, limit in body.items() if name not in reserved}, None, accounts))
    tools = body.get(_TOOLS, {})
    if not isinstance(tools, dict):
        refuse(_TOOLS, "an object with limits by tool, such as {'web': {'requests': '100/minute'}}", tools)
    for tool, limits in tools.items():
        accounts.check_tool(_TOOLS, tool)
        if not tool or not isinstance(limits, dict):
            refuse(f"tools.{tool}", "an object with limits by resource, such as {'requests': '100/minute'}", limits)
        found += _of_tool(f"tools.{tool}.", limits, tool, accounts)
    return found


def _of_tool(where: str, given: dict[str, Any], tool: str | None, accounts: Accounts) -> Iterator[_Limit]:
    for resource, limit in given.items():
        accounts.check_resource(where.rstrip(".") or "resource", resource)
        yield resource, None if limit is None else _text(f"{where}{resource}", resource, limit, accounts), tool


def _text(where: str, resource: str, given: Any, accounts: Accounts) -> str:
    """A limit as it was given. A budget without a time zone keeps that of the one which it replaces."""
    expected = f"a limit such as '500/calendar month', a list of 1 to {MOST_LIMITS}, or null"
    texts = limit_texts(where, given, expected)
    parse_account_limit(where, resource, texts, accounts.units, accounts.zone)
    return "; ".join(texts)


def _changed_limits(limits: _Limits, filed: _Limits) -> list[LimitKey]:
    """The differences from the policy."""
    return [key for key, limit in limits.items() if filed.get(key) != limit]


def _expect_edits(edits: list[Edit]) -> None:
    if not edits:
        raise RequestError(
            400, "invalid", "body: expected limits by resource, such as {'usd': '5/calendar day'}, got none"
        )


# Levels and plans -----------------------------------------------------------------------------------------------------


async def _defaults(_call: Call, gate: Gate) -> AccountDefaults:
    accounts = gate.effective.accounts
    return AccountDefaults(
        levels=list(accounts.levels),
        resources=list(accounts.units),
        tools=sorted(accounts.tools),
        zone=accounts.zone,
        level_limits={level: limit_settings(accounts.defaults.get(level, {})) for level in accounts.levels},
        plans={plan: limit_settings(limits) for plan, limits in sorted(accounts.plans.items())},
    )


async def _set_defaults(call: Call, gate: Gate) -> AccountDefaults:
    accounts = gate.effective.accounts
    edit = _edit_in(call, accounts)
    edits = [edit(*one) for one in _limits(call.body, accounts)]
    _expect_edits(edits)
    await gate.achange(edits, by=call.by)
    return await _defaults(call, gate)


async def _reset_defaults(call: Call, gate: Gate) -> AccountDefaults:
    accounts = gate.effective.accounts
    edit = _edit_in(call, accounts)
    changed = _changed_limits(_limits_in(call, accounts), _limits_in(call, gate.policy.accounts))
    await gate.achange([edit(resource, None, tool) for resource, tool in changed], by=call.by)
    return await _defaults(call, gate)


def _edit_in(call: Call, accounts: Accounts) -> Callable[..., Edit]:
    """The maker of an edit of the level or the plan in a path."""
    if "level" in call.parts:
        return partial(level_limit, accounts.check_level("level", call.parts["level"]))
    return partial(plan_limit, accounts.check_plan("plan", call.parts["plan"]))


def _limits_in(call: Call, accounts: Accounts) -> _Limits:
    """The limits of the level or the plan in a path."""
    return (
        accounts.defaults.get(call.parts["level"], {}) if "level" in call.parts else accounts.plans[call.parts["plan"]]
    )


# Agents ---------------------------------------------------------------------------------------------------------------


async def _set_agent(call: Call, gate: Gate, registry: Registry) -> AgentAccount:
    agent, body = call.parts["agent"], call.body
    accounts, edits, known = gate.effective.accounts, [], True
    registered = await registry.find(agent) is not None
    if body.account is not UNSET:
        path = body.account
        if path:
            known = gate.effective.names_account(accounts.check_account("account", path))
        edits.append(agent_account(agent, path))
    if body.plan is not UNSET:
        if body.plan is not None:
            accounts.check_plan("plan", body.plan)
        edits.append(agent_plan(agent, body.plan))
    if not edits:
        raise RequestError(400, "invalid", "body: expected an account or a plan, got neither")
    await gate.achange(edits, by=call.by)
    rules = gate.effective.rules_of(agent)
    limited = not rules.account or gate.effective.limits_account(rules.account)
    return AgentAccount(agent, gate.path_of(agent), rules.account, rules.plan, registered, known, limited)


# Holds ----------------------------------------------------------------------------------------------------------------


async def _holds(call: Call, gate: Gate) -> AccountHolds:
    limit = call.query.limit
    found = await gate.alist_holds(call.parts["account"], limit + 1)
    return AccountHolds([hold_entry(hold) for hold in found[:limit]], len(found) > limit)


_ACCOUNTS: Final = "/api/admin/accounts"
_DEFAULTS: Final = "/api/admin/account-defaults"
ROUTES: Final = (
    admin_route(
        "GET", _ACCOUNTS, _accounts,
        "accounts above the agents, each before those below it: limit, spent, held and left", query=AccountsPage,
    ),
    admin_route("GET", f"{_ACCOUNTS}/{{account}}", _one_account, "an account, an agent or a session by its path"),
    admin_route(
        "PUT", f"{_ACCOUNTS}/{{account}}", _set_account,
        "set or remove limits of an account or an agent, and its plan: one change", body=NewAccount,
    ),
    admin_route(
        "DELETE", f"{_ACCOUNTS}/{{account}}", _reset_account,
        "put an account back to the limits and the plan of the policy",
    ),
    admin_route(
        "GET", f"{_ACCOUNTS}/{{account}}/holds", _holds,
        "open and expired holds of an account and everything below it", query=HoldsPage,
    ),
    admin_route("GET", _DEFAULTS, _defaults, "limits of levels and plans"),
    admin_route(
        "PUT", f"{_DEFAULTS}/levels/{{level}}", _set_defaults,
        "set or remove limits of each account of a level: one change", body=NewAccountLimits,
    ),
    admin_route(
        "DELETE", f"{_DEFAULTS}/levels/{{level}}", _reset_defaults,
        "put a level back to the limits of the policy",
    ),
    admin_route(
        "PUT", f"{_DEFAULTS}/plans/{{plan}}", _set_defaults,
        "set or remove limits of a plan: one change", body=NewAccountLimits,
    ),
    admin_route(
        "DELETE", f"{_DEFAULTS}/plans/{{plan}}", _reset_defaults,
        "put a plan back to the limits of the policy",
    ),
    admin_route(
        "PUT", "/api/admin/agents/{agent}/account", _set_agent,
        "move an agent to an account, or give it a plan", body=NewAgentAccount,
    ),
)  # fmt: skip
