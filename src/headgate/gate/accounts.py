"""Accounts: who pays for what an agent does.

Accounts form a tree, from the top level to an agent and its sessions. An account is named by its path, such as
"acme/search". Each can limit any resource: requests, tokens, money, slots, or a unit of the operator's own; for
everything below it, or for one tool. A limit comes from the account itself, else from its plan, else from the default
of its level.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final, TypeAlias

from headgate.errors import Bound as Bound
from headgate.errors import InvalidInput, refuse
from headgate.gate.immutable_map import ImmutableMap
from headgate.limits.budget import Budget
from headgate.limits.decision import Limit
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.notation import limit_of, parse_each
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import TokenBucket
from headgate.limits.units import BUILT_IN, in_units

LEVELS: Final = ("org", "team", "agent", "session")
"""The levels unless the policy names others. The last two are always those of the agent and its session."""
MAX_LEVELS: Final = 8
MAX_ACCOUNT: Final = 128
"""Characters of each name in a path."""
REQUESTS: Final = "requests"
SLOTS: Final = "slots"
NO_ACCOUNT: Final = "-"
"""Stands in a path for a level at which an agent has no account."""

LimitKey: TypeAlias = tuple[str, str]
"""The subject of a limit: a resource, and the tool for which it is limited; "" for all."""


# Paths ----------------------------------------------------------------------------------------------------------------


def join_path(names: Iterable[str]) -> str:
    """A path from the names of its levels. A slash in a name is written as %2F, so that no two paths are the same."""
    return "/".join([_escaped(name) for name in names])


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


def split_path(path: str) -> list[str]:
    """The names in a path."""
    return [name.replace("%2F", "/").replace("%25", "%") for name in path.split("/")]


def level_of(path: str) -> int:
    """The index of a path's level: 0 for a top account."""
    return path.count("/")


def path_prefixes(path: str) -> list[str]:
    """The paths from the top account to this one.

    >>> path_prefixes("acme/search/planner")
    ['acme', 'acme/search', 'acme/search/planner']
    """
    names = path.split("/")
    return ["/".join(names[: depth + 1]) for depth in range(len(names))]


def session_path(agent_path: str, session: str) -> str:
    """The path of a session of an agent."""
    return f"{agent_path}/{_escaped(session)}"


def plain_name(name: object) -> str:
    """A name as a plain string: a subclass may have another hash, or none. "" for anything else."""
    return str.__str__(name) if isinstance(name, str) else ""


def is_name(name: object) -> bool:
    """Whether this can be the name of an account or a session."""
    return isinstance(name, str) and 1 <= len(name) <= MAX_ACCOUNT and name.isprintable()


def is_within(path: str, account: str) -> bool:
    """Whether a path is that of an account or of something below it."""
    return path == account or path.startswith(f"{account}/")


# Limits ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AccountLimit:
    """A limit of a resource, as the operator writes it, and as it is counted: in smallest units, part by part."""

    text: str
    parts: tuple[Limit, ...]
    """None if it is unlimited."""


_EXPECTED_SLOTS: Final = "slots, such as '5 in flight'"
_EXPECTED: Final = (
    "a rate, such as '100/minute', or a budget, such as '500/calendar month', '500/calendar day in Europe/Berlin' or "
    "'2 in all'"
)
_MONEY: Final = ("usd", "eur")
_RATE_WITH_UNIT: Final = re.compile(
    r"([\d.]+)\s*[a-z_]+\s*((?:/|\bper\b)\s*(?!calendar)[\w.].*)", re.ASCII | re.IGNORECASE
)
_PERIODS: Final = {
    "d": ("day", "24 hours"),
    "w": ("week", "7 days"),
    "m": ("month", "30 days"),
    "y": ("year", "365 days"),
}
"""By their first letters: as a budget and as a rate of money name them."""
_LIKE_BUDGET: Final = re.compile(
    r"(?P<amount>[\d.]+)\s*(?:/|per\b)\s*(?P<period>d(?:ay)?|w(?:k|eek)?|month|year)s?", re.ASCII | re.IGNORECASE
)


def parse_account_limit(
    where: str,
    resource: str,
    given: object,
    units: Mapping[str, int],
    zone: str,
    unnamed: str = "",
    *,
    recorded: bool = False,
) -> AccountLimit:
    """The limit of a resource. A budget may leave out its unit, which is the resource, and its time zone.

    `zone` is that of the accounts; a budget that names none is in `unnamed`, or else in this. What was `recorded` is
    read as it was then.
    """
    decimals = units[resource]
    unit = resource if resource in BUILT_IN else f"{resource}:{decimals}"
    expected = _EXPECTED_SLOTS if resource == SLOTS else _EXPECTED
    if not isinstance(given, str | Limit | Iterable):
        refuse(where, expected, given)
    limits = [given] if isinstance(given, str | Limit) else list(given)
    if resource != SLOTS:
        expected += _hint_of_unit(resource, limits)
    try:
        parts = [part for one in limits for part in _parts(where, one, unit, expected, unnamed or zone)]
        if parts == [UNLIMITED]:
            return AccountLimit("unlimited", ())
        checked = [_checked(where, resource, unit, part) for part in dict.fromkeys(parts)]
        counted = tuple([_scaled(part, decimals) for part in checked])
    except InvalidInput as error:
        raise InvalidInput(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    if len({part.identity for part in counted}) < len(counted):
        refuse(where, "each budget once: spending counts against all its amounts", given)
    if resource in _MONEY and not recorded and not any([isinstance(part, Budget) for part in counted]):
        _refuse_like_budget(where, limits)
    return AccountLimit("; ".join([_written(resource, part, zone) for part in checked]), counted)


def _hint_of_unit(resource: str, limits: Iterable[object]) -> str:
    """The text to write instead of a rate with a unit."""
    for part in [part for one in limits for part in re.split(r"[;,|]", str(one))]:
        rate = _RATE_WITH_UNIT.fullmatch(part.strip())
        if rate is not None:
            amount, rest = rate.groups()
            text = f"{amount}{'' if rest.startswith('/') else ' '}{rest}"
            like = _LIKE_BUDGET.fullmatch(text) if resource in _MONEY else None
            if like is not None:
                text = f"{amount}/calendar {_PERIODS[like['period'][0].lower()][0]}"
            return f" (leave out the unit: '{text}')"
    return ""


def _refuse_like_budget(where: str, limits: Iterable[object]) -> None:
    """Refuse a rate of money that is written nearly like a budget: it would start full, whatever is spent."""
    for part in [part for one in limits for part in re.split(r"[;,|]", str(one))]:
        rate = _LIKE_BUDGET.fullmatch(part.strip())
        if rate is not None:
            amount, (period, span) = rate["amount"], _PERIODS[rate["period"][0].lower()]
            otherwise = f"a rate, which refills all the time, is written '{amount} per {span}'"
            refuse(where, f"a budget, such as '{amount}/calendar {period}' ({otherwise})", part.strip())


def _parts(where: str, given: object, unit: str, expected: str, zone: str) -> Sequence[Limit]:
    return parse_each(given, unit, expected, zone) if isinstance(given, str) else limit_of(where, given).parts


def _written(resource: str, limit: Limit, zone: str) -> str:
    """A part of a limit as a text that means the same where `zone` is that of the accounts."""
    in_utc = isinstance(limit, Budget) and limit.period is not None and limit.zone == "UTC"
    return f"{limit} in UTC" if in_utc and zone != "UTC" else _spelt(resource, limit)


def _spelt(resource: str, limit: Limit) -> str:
    """A limit as a text. A rate of money can't be taken for a budget."""
    rate = _LIKE_BUDGET.fullmatch(str(limit)) if resource in _MONEY else None
    return str(limit) if rate is None else f"{rate['amount']} per {_PERIODS[rate['period'][0]][1]}"


def _checked(where: str, resource: str, unit: str, limit: Limit) -> Limit:
    """A part of a limit, if it can be one of this resource."""
    if limit is UNLIMITED:
        refuse(where, "'unlimited' alone, or limits", str(limit))
    if limit is not BLOCKED and (resource == SLOTS) != isinstance(limit, Slots):
        expected = _EXPECTED_SLOTS if resource == SLOTS else "a rate or a budget, not slots"
        refuse(where, expected, str(limit))
    if isinstance(limit, Budget) and limit.unit != unit:
        refuse(where, f"an amount of {resource}, without a unit", str(limit))
    return limit


def _scaled(limit: Limit, decimals: int) -> Limit:
    """A limit in smallest units."""
    if decimals and isinstance(limit, TokenBucket):
        capacity, refill, per = limit.fields()
        return TokenBucket(capacity * 10**decimals, refill * 10**decimals, per)
    if decimals and isinstance(limit, SlidingWindow):
        return SlidingWindow(limit.capacity * 10**decimals, limit.window)
    return limit


def limit_text(resource: str, limit: Limit, decimals: int) -> str:
    """A limit as an operator writes it, from one that is counted in smallest units."""
    if decimals and isinstance(limit, TokenBucket):
        capacity, refill, per = limit.fields()
        return _spelt(resource, TokenBucket(capacity // 10**decimals, refill / 10**decimals, per))
    if decimals and isinstance(limit, SlidingWindow):
        return str(SlidingWindow(limit.capacity // 10**decimals, limit.window))
    return str(limit)


def amount_of(limit: Limit, decimals: int) -> Decimal:
    """The largest amount of a limit that is counted in smallest units, in units."""
    return limit.amount if isinstance(limit, Budget) else in_units(limit.capacity, decimals)


# Accounts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Account:
    """An operator's settings of one account."""

    limits: Mapping[LimitKey, AccountLimit]
    plan: str = ""


_NO_RULES: Final = Account({})


@dataclass(frozen=True)
class Accounts:
    """The accounts of a policy, or those in effect."""

    levels: tuple[str, ...]
    units: Mapping[str, int]
    """The decimals of each resource that can be limited."""
    tools: frozenset[str]
    zone: str
    """The time zone of the days by which usage is counted, and of budgets that name none."""
    max_lease: float
    """The longest lease of a hold, in seconds."""
    max_open_holds: int
    """Of one top account."""
    defaults: Mapping[str, Mapping[LimitKey, AccountLimit]]
    """By level."""
    plans: Mapping[str, Mapping[LimitKey, AccountLimit]]
    at: ImmutableMap[Account]
    """By path."""

    @property
    def agent_level(self) -> int:
        """The index of the agents' level."""
        return len(self.levels) - 2

    @property
    def has_budgets(self) -> bool:
        """Whether any account may have a budget."""
        tables = [*self.defaults.values(), *self.plans.values(), *[account.limits for _, account in self.at.items()]]
        limits = [limit for table in tables for limit in table.values()]
        return any([isinstance(part, Budget) for limit in limits for part in limit.parts])

    def rules_of(self, path: str) -> Account:
        """The operator's settings of an account; most have none."""
        return self.at.get(path) or _NO_RULES

    def limits_of(self, path: str, plan: str = "") -> dict[LimitKey, AccountLimit]:
        """The limits of an account. `plan` is that of an agent; other accounts have theirs in `at`."""
        own = self.rules_of(path)
        defaults = self.defaults.get(self.levels[level_of(path)], {})
        found = {**defaults, **self.plans.get(plan or own.plan, {}), **own.limits}
        return {key: limit for key, limit in found.items() if limit.parts}

    def agent_path(self, account: str, agent: str) -> str:
        """The path of an agent that belongs to an account, or to none."""
        names = split_path(account) if account else []
        return join_path([*names, *[NO_ACCOUNT] * (self.agent_level - len(names)), agent])

    def account_of(self, path: str) -> str:
        """The account that the agent of a path belongs to; "" for none."""
        return "/".join([name for name in path.split("/")[: self.agent_level] if name != NO_ACCOUNT])

    def root_of(self, path: str) -> str:
        """The top account of a path; for an agent without any, and for its sessions, the agent."""
        prefixes = path_prefixes(path)
        return prefixes[0] if prefixes[0] != NO_ACCOUNT else prefixes[: self.agent_level + 1][-1]

    def check_account(self, where: str, account: object) -> str:
        """The path of an account above the agents, or "" for none."""
        if account == "":
            return ""
        path = self.check_path(where, account)
        if level_of(path) >= self.agent_level or NO_ACCOUNT in split_path(path):
            above = "/".join(self.levels[: self.agent_level]).upper() or "none, since accounts.levels has none"
            refuse(where, f"the path of an account above the agents ({above})", account)
        return path

    def check_path(self, where: str, path: object, *, sessions: bool = False) -> str:
        """The path of an account or an agent, or of a session."""
        levels = self.levels if sessions else self.levels[:-1]
        names = split_path(path) if isinstance(path, str) else []
        if not names or len(names) > len(levels) or not all(map(is_name, names)) or join_path(names) != path:
            shape = (
                f"the path of an account, up to {'/'.join(levels).upper()}, with names of 1 to {MAX_ACCOUNT} characters"
            )
            refuse(where, shape, path)
        return plain_name(path)

    def check_limited_path(self, where: str, path: object) -> str:
        """The path of an account or an agent that can have limits: "-" is no account."""
        found = self.check_path(where, path)
        if split_path(found)[-1] == NO_ACCOUNT:
            expected = f"an account or an agent; {NO_ACCOUNT!r} stands for a missing one, which has no limits"
            refuse(where, f"{expected} (accounts.default limits agents without an account)", path)
        return found

    def check_resource(self, where: str, resource: object) -> str:
        name = plain_name(resource)
        if name not in self.units:
            refuse(where, f"one of {', '.join(self.units)} (accounts.units adds others)", resource)
        return name

    def check_tool(self, where: str, tool: object) -> str:
        """A tool of the policy, or "" for none."""
        if tool is None or tool == "":
            return ""
        name = plain_name(tool)
        if name not in self.tools:
            known = ", ".join(sorted(self.tools)) or "none: the policy has no tools"
            refuse(where, f"a tool that the policy names ({known})", tool)
        return name

    def check_plan(self, where: str, plan: object) -> str:
        if not isinstance(plan, str) or plan not in self.plans:
            known = ", ".join(sorted(self.plans)) or "none: the policy has no plans"
            refuse(where, f"a plan of the policy ({known})", plan)
        return plain_name(plan)

    def check_level(self, where: str, level: object) -> str:
        if not isinstance(level, str) or level not in self.levels:
            refuse(where, f"one of {', '.join(self.levels)}", level)
        return level

    def with_limit(self, path: str, key: LimitKey, limit: AccountLimit | None) -> "Accounts":
        """The same, with one limit of an account set or removed."""
        before = self.rules_of(path)
        return self._with(path, Account(_with(before.limits, key, limit), before.plan))

    def with_plan(self, path: str, plan: str) -> "Accounts":
        """The same, with another plan of an account."""
        return self._with(path, Account(self.rules_of(path).limits, plan))

    def _with(self, path: str, account: Account) -> "Accounts":
        return replace(self, at=self.at.update({path: None if account == _NO_RULES else account}))

    def with_default(self, level: str, key: LimitKey, limit: AccountLimit | None) -> "Accounts":
        """The same, with one default of a level set or removed."""
        return replace(self, defaults={**self.defaults, level: _with(self.defaults.get(level, {}), key, limit)})

    def with_plan_limit(self, plan: str, key: LimitKey, limit: AccountLimit | None) -> "Accounts":
        """The same, with one limit of a plan set or removed."""
        return replace(self, plans={**self.plans, plan: _with(self.plans.get(plan, {}), key, limit)})


def _with(
    limits: Mapping[LimitKey, AccountLimit], key: LimitKey, limit: AccountLimit | None
) -> dict[LimitKey, AccountLimit]:
    others = {other: found for other, found in limits.items() if other != key}
    return others if limit is None else {**others, key: limit}
