"""The `[accounts]` of a policy: read from settings, and written as settings."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from headgate.errors import refuse
from headgate.gate.accounts import (
    LEVELS,
    MAX_LEVELS,
    REQUESTS,
    SLOTS,
    Account,
    AccountLimit,
    Accounts,
    LimitKey,
    level_of,
    parse_account_limit,
)
from headgate.gate.immutable_map import ImmutableMap
from headgate.gate.settings_reader import SettingsReader
from headgate.gate.toml_text import toml_key
from headgate.limits.calendar import zone_of
from headgate.limits.numbers import duration, whole
from headgate.limits.units import BUILT_IN
from headgate.stores.hold_terms import LONGEST_LEASE
from headgate.stores.holds import MAX_OPEN_HOLDS

_UNITS: Final = {REQUESTS: 0, SLOTS: 0, **{name: decimals for name, decimals in BUILT_IN.items() if name}}
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", re.ASCII)
_UNIT: Final = re.compile(r"[a-z][a-z_]{0,30}", re.ASCII)
_RESERVED: Final = ("tools", "plan")  # in the table of an account, beside resources
_MAX_NAMES: Final = 256  # of tools, and of plans
_LONGEST: Final = LONGEST_LEASE // 1_000_000  # seconds


def read_accounts(reader: SettingsReader, given: Mapping[str, Any]) -> Accounts:
    """The accounts of a policy. Mistakes are added to those of the reader."""
    known = ["levels", "units", "tools", "zone", "max_lease", "max_open_holds", "default", "plans", "at"]
    reader.check_keys("accounts", given, known)
    levels = tuple(reader.values("accounts.levels", given.get("levels", LEVELS), _name, (2, MAX_LEVELS))) or LEVELS
    if len(set(levels)) < len(levels) or len(levels) < 2:
        reader.add_mistake("accounts.levels", "at least two different names", list(levels))
        levels = LEVELS
    units = dict(_units(reader, reader.table("units", given, "accounts.units")))
    zone = reader.value("accounts.zone", given, "UTC", _zone)
    tables = _Tables(reader, units, zone)
    own = reader.values("accounts.tools", given.get("tools", []), _name, (0, _MAX_NAMES))
    defaults = reader.table("default", given, "accounts.default")
    last_two = zip(LEVELS[-2:], levels[-2:], strict=True)  # these may have names of the operator's own
    misplaced = [usual for usual, level in last_two if usual != level and usual in (*levels, *defaults)]
    if misplaced or any([level in LEVELS[:-2] for level in levels[-2:]]):
        above = [level for level in levels if level not in LEVELS[-2:]]
        expected = f"the levels of agents and of sessions as the last two, such as {[*above, *LEVELS[-2:]]}"
        reader.add_mistake("accounts.levels", expected, list(levels))
    reader.check_keys("accounts.default", defaults, list(levels))
    plans = reader.table("plans", given, "accounts.plans")
    accounts = Accounts(
        levels=levels,
        units=units,
        tools=frozenset(),
        zone=zone,
        max_lease=reader.value("accounts.max_lease", given, 3600.0, _lease),
        max_open_holds=reader.value("accounts.max_open_holds", given, MAX_OPEN_HOLDS, _count),
        defaults={
            level: tables.limits(f"accounts.default.{toml_key(level)}", defaults, level)
            for level in defaults
            if level in levels
        },
        plans={
            plan: tables.limits(f"accounts.plans.{toml_key(plan)}", plans, plan)
            for plan in plans
            if reader.parsed(f"accounts.plans.{toml_key(plan)}", plan, _name)
        },
        at=ImmutableMap(),
    )
    found = dict(_read_at(accounts, tables, reader.table("at", given, "accounts.at")))
    tools = tables.tools | set(own)
    for path, count in (("accounts.tools", len(tools)), ("accounts.plans", len(accounts.plans))):
        if count > _MAX_NAMES:
            reader.add_mistake(path, f"at most {_MAX_NAMES} names", count)
    return replace(accounts, tools=frozenset(tools), at=accounts.at.update(found))


class _Tables:
    """Reads tables of limits."""

    def __init__(self, reader: SettingsReader, units: Mapping[str, int], zone: str) -> None:
        self.reader: Final = reader
        self.tools: set[str] = set()
        self._units: Final = units
        self._zone: Final = zone

    def limits(self, path: str, tables: Mapping[str, Any], key: str) -> dict[LimitKey, AccountLimit]:
        """The limits in a table: of resources, and below `tools` those of one tool."""
        reader = self.reader
        table = reader.table(key, tables, path)
        found = self._of_tool(path, {name: value for name, value in table.items() if name not in _RESERVED}, "")
        tools = reader.table("tools", table, f"{path}.tools")
        for tool in tools:
            where = f"{path}.tools.{toml_key(tool)}"
            if reader.parsed(where, tool, _name) is not None:
                self.tools.add(tool)
                found |= self._of_tool(where, reader.table(tool, tools, where), tool)
        return found

    def _of_tool(self, path: str, table: Mapping[str, Any], tool: str) -> dict[LimitKey, AccountLimit]:
        known = [name for name in self._units if not tool or name != SLOTS]
        self.reader.check_keys(path, table, known)
        found: dict[LimitKey, AccountLimit] = {}
        for resource in table:
            if resource in known:
                read = partial(_limit, resource, self._units, self._zone)
                limit = self.reader.value(f"{path}.{resource}", table, None, read)
                if limit is not None:
                    found[resource, tool] = limit
        return found


def _read_at(accounts: Accounts, tables: _Tables, given: Mapping[str, Any]) -> Iterator[tuple[str, Account]]:
    reader = tables.reader
    for name in given:
        path = f"accounts.at.{toml_key(name)}"
        if reader.parsed(path, name, partial(accounts.check_limited_path, "")) is None:
            continue
        limits = tables.limits(path, given, name)
        table = reader.table(name, given, path)
        plan = reader.value(f"{path}.plan", table, "", partial(accounts.check_plan, ""))
        if plan and level_of(name) >= accounts.agent_level:
            reader.add_mistake(f"{path}.plan", "the plan of an agent in [agents], and none of a session", plan)
        if limits or plan:
            yield name, Account(limits, plan)


def _units(reader: SettingsReader, given: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    yield from _UNITS.items()
    for name in given:
        path = f"accounts.units.{toml_key(name)}"
        table = reader.table(name, given, path)
        reader.check_keys(path, table, ["decimals"])
        decimals = reader.value(f"{path}.decimals", table, 0, _decimals)
        if reader.parsed(path, name, _unit) is None:
            continue
        if name in _UNITS and decimals != _UNITS[name]:
            reader.add_mistake(f"{path}.decimals", f"{_UNITS[name]}, which {name} always has", decimals)
        yield name, _UNITS.get(name, decimals)


def account_settings(accounts: Accounts) -> dict[str, Any]:
    """The accounts in the structure that builds them."""
    return {
        "levels": list(accounts.levels),
        "tools": sorted(accounts.tools),
        "zone": accounts.zone,
        "max_lease": accounts.max_lease,
        "max_open_holds": accounts.max_open_holds,
        "units": {name: {"decimals": decimals} for name, decimals in accounts.units.items() if name not in _UNITS},
        "default": {level: limit_settings(limits) for level, limits in accounts.defaults.items() if limits},
        "plans": {plan: limit_settings(limits) for plan, limits in accounts.plans.items()},
        "at": {
            path: {**({"plan": account.plan} if account.plan else {}), **limit_settings(account.limits)}
            for path, account in sorted(accounts.at.items())
        },
    }


def limit_settings(limits: Mapping[LimitKey, AccountLimit]) -> dict[str, Any]:
    """Limits in the structure that builds them: by resource, and those of tools below "tools"."""
    found: dict[str, Any] = {resource: limit.text for (resource, tool), limit in limits.items() if not tool}
    tools: dict[str, dict[str, str]] = {}
    for (resource, tool), limit in limits.items():
        if tool:
            tools.setdefault(tool, {})[resource] = limit.text
    return {**found, "tools": tools} if tools else found


def _limit(resource: str, units: Mapping[str, int], zone: str, value: object) -> AccountLimit:
    return parse_account_limit("limit", resource, value, units, zone)


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        refuse("", "a name of up to 64 letters, digits, '_', '.' and '-' that begins with a letter", value)
    return value


def _unit(value: object) -> str:
    if not isinstance(value, str) or not _UNIT.fullmatch(value) or value in _RESERVED:
        refuse("", f"a name of up to 31 of a-z and _ other than {', '.join(_RESERVED)}", value)
    return value


def _zone(value: object) -> str:
    zone_of(value)
    return str(value)


def _lease(value: object) -> float:
    return duration("", value, most=_LONGEST)


_count: Final = partial(whole, "", most=MAX_OPEN_HOLDS)
_decimals: Final = partial(whole, "", most=9, least=0)
