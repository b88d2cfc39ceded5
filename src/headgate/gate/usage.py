"""Usage: what was used on each day, and its totals by period, account, agent, tool and resource."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from decimal import Decimal
from typing import Final, NamedTuple, TypeAlias

from headgate.errors import refuse
from headgate.gate.accounts import NO_ACCOUNT, Accounts, path_prefixes, split_path
from headgate.limits.units import amount_text

PERIODS: Final = ("day", "month")
RESOURCE: Final = "resource"
DEFAULT_GROUPS: Final = ("month", RESOURCE)
# A cell that begins so is a formula to a spreadsheet; the wide forms are, in some languages.
_FORMULA: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\r", "\n")


class Usage(NamedTuple):
    """An agent's usage of a resource on one day."""

    day: date
    account: str
    """The path of the agent."""
    tool: str
    resource: str
    amount: Decimal


class UsageTotal(NamedTuple):
    """A total of what was used."""

    group: tuple[str, ...]
    """The group that it is the total of, such as ("2026-11", "usd")."""
    amount: Decimal


_Value: TypeAlias = Callable[[Usage], str]


def usage_groups(by: Iterable[str], accounts: Accounts) -> tuple[str, ...]:
    """The groups of a total. Amounts of different resources have no sum: the resource is added if it is missing.

    One is "day" or "month"; "account", the account of the agent, or the name of a level above the agents; "agent",
    "tool" or "resource". They may be one text, with commas between them.
    """
    known = [*PERIODS, "account", *accounts.levels[: accounts.agent_level], "agent", "tool", RESOURCE]
    if not isinstance(by, Iterable):
        refuse("by", f"some of {', '.join(dict.fromkeys(known))}", by)
    groups = _split(by)
    for group in groups:
        if group not in known:
            refuse("by", f"some of {', '.join(dict.fromkeys(known))}", group)
    if len(set(groups)) < len(groups) or set(PERIODS) <= set(groups):
        refuse("by", "each group once, and either day or month", ",".join(groups))
    return groups if RESOURCE in groups else (*groups, RESOURCE)


def _split(groups: Iterable[str]) -> tuple[str, ...]:
    return tuple(groups.split(",")) if isinstance(groups, str) else tuple(groups)


def usage_totals(rows: Iterable[Usage], groups: Sequence[str], accounts: Accounts) -> list[UsageTotal]:
    """Totals of what was used, in the order of their groups, which `usage_groups` has checked."""
    values = [_value(group, accounts) for group in groups]
    totals: dict[tuple[str, ...], Decimal] = {}
    for row in rows:
        group = tuple([value(row) for value in values])
        totals[group] = totals.get(group, Decimal(0)) + row.amount
    return [UsageTotal(*one) for one in sorted(totals.items())]


def _value(group: str, accounts: Accounts) -> _Value:
    if group == "day":
        return lambda row: row.day.isoformat()
    if group == "month":
        return lambda row: row.day.isoformat()[:7]
    if group == "tool":
        return lambda row: row.tool
    if group == RESOURCE:
        return lambda row: row.resource
    if group == "agent":
        return lambda row: split_path(row.account)[-1]
    if group == "account":
        return lambda row: accounts.account_of(row.account)
    level = accounts.levels.index(group)
    return lambda row: _at_level(row.account, level)


def _at_level(path: str, level: int) -> str:
    """The path of the account at a level above an agent; "" if there is none."""
    found = path_prefixes(path)[: level + 1]
    return "" if len(found) <= level or NO_ACCOUNT in found[level].split("/") else found[level]


def usage_csv(groups: Iterable[str], totals: Iterable[UsageTotal]) -> str:
    """Totals by these groups as CSV, with a header, in which a missing "resource" is the last group as in the totals.

    The groups may be one text, with commas between them, as for the totals. A name that a spreadsheet would take for a
    formula begins with an apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    header = _split(groups)
    writer.writerow([*header, *([] if RESOURCE in header else [RESOURCE]), "amount"])
    for one in totals:
        writer.writerow([*map(_cell, one.group), amount_text(one.amount)])
    return text.getvalue()


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text
