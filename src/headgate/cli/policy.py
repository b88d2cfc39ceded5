"""`headgate policy`: check and show policy files, and the policy in effect at a hub."""

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from headgate.cli.answers import local_time, shown
from headgate.cli.hub_commands import Rows
from headgate.cli.hub_options import add_hub_options, hub_from
from headgate.cli.parser import Commands, UsageError, add_command, add_group
from headgate.cli.terminal import YELLOW, Cell, Column, print_error, print_json, print_table
from headgate.errors import printable
from headgate.gate.policy import Policy, PolicyError, read_toml
from headgate.gate.toml_text import toml_key, toml_value
from headgate.hub.settings import HubSettings

_CHANGE = ("path", "value", "default")


def add(commands: Commands) -> None:
    verbs = add_group(commands, "policy", "check or show a policy")
    check = add_command(
        verbs,
        "check",
        _check,
        "report mistakes in a policy file, and its changes",
        "Report all mistakes in a policy file, its table [hub] included. If there are none, list its "
        "differences from the defaults. The environment, which takes precedence over [hub], is not taken into account.",
        "headgate policy check headgate.toml",
        json=True,
    )
    check.add_argument("file", metavar="FILE", help="policy file in TOML")
    show = add_command(
        verbs,
        "show",
        _show,
        "print a complete policy",
        "Print the complete policy of a file, including all defaults, as TOML. With --effective, print the policy that "
        "is in effect at a hub, with the source of each value: a default, the file, or a change with author and time.",
        "headgate policy show > headgate.toml",
        "headgate policy show headgate.toml --json",
        "headgate policy show --effective",
        json=True,
    )
    show.add_argument("file", metavar="FILE", nargs="?", help="policy file in TOML (default: the default policy)")
    show.add_argument("--effective", action="store_true", help="the values in effect at a hub, and their sources")
    add_hub_options(show)


def _check(options: argparse.Namespace) -> int:
    policy, settings = _load(options.file)
    changed = policy.changed() + _changed(settings)
    if options.json:
        print_json({"file": options.file, "changes": [dict(zip(_CHANGE, one, strict=True)) for one in changed]})
        return 0
    print(f"{printable(options.file)}: no mistakes; {'changes:' if changed else 'changes nothing'}")
    for path, value, default in changed:
        print(f"  {path} = {value}" + (f"  (default: {default})" if default else ""))
    _note_own_levels(policy)
    _note_misspelt_accounts(policy)
    return 0


def _note_own_levels(policy: Policy) -> None:
    """Print a note if neither the agents' nor the sessions' level has its usual name: perhaps both are missing."""
    agent, session = policy.accounts.levels[-2:]
    if agent != "agent" and session != "session":
        print_error(
            f"note: accounts.levels: {agent!r} is taken as the level of agents and {session!r} as that of sessions; "
            "if they stand above the agents, add 'agent' and 'session' at the end"
        )


def _note_misspelt_accounts(policy: Policy) -> None:
    """Print a note for each agent whose account has no limits of its own, but one with nearly the same path has.

    In those, letters have changed places, or one is missing or too many. Other letters and numbers are on purpose.
    """
    limited = {path for path, _ in policy.accounts.at.items()}
    spelled = {"".join(sorted(path)): path for path in limited}
    shorter = {cut: path for path in limited for cut in _without_a_letter(path)}
    for agent, account in policy.agent_accounts.items():
        if account in limited:
            continue
        near = spelled.get("".join(sorted(account))) or shorter.get(account)
        near = near or next((cut for cut in _without_a_letter(account) if cut in limited), None)
        if near is not None and re.sub(r"[0-9]", "", near) != re.sub(r"[0-9]", "", account):
            print_error(
                f"note: agents.{toml_key(agent)}.account is {account!r}, which has no limits of its own; "
                f"did you mean {near!r}?"
            )


def _without_a_letter(path: str) -> list[str]:
    """The path with each of its letters left out."""
    return [path[:at] + path[at + 1 :] for at, letter in enumerate(path) if letter.isalpha()]


def _load(file: str) -> tuple[Policy, HubSettings]:
    """The policy and the settings of a file by itself; a `PolicyError` lists the mistakes of both."""
    content = read_toml(file)
    mistakes: list[str] = []
    policy, settings = Policy(), HubSettings()
    try:
        policy = Policy.from_settings(file, content)
    except PolicyError as error:
        mistakes += error.mistakes
    try:
        settings = HubSettings.from_content(file, content, environment={})
    except PolicyError as error:
        mistakes += error.mistakes
    if mistakes:
        raise PolicyError(file, mistakes)
    return policy, settings


def _changed(settings: HubSettings) -> list[tuple[str, str, str]]:
    """The settings that aren't the defaults: the path, the value, and the default. Secrets are not shown."""
    found = []
    for one in fields(HubSettings):
        value = getattr(settings, one.name)
        if value != one.default:
            shown_value = _text(value) if one.metadata["shown"] else "(not shown)"
            found.append((f"hub.{one.name}", shown_value, _text(one.default)))
    return found


def _text(value: Any) -> str:
    """A setting, as it is written in a file; "" for none."""
    if value is None or value in ("", ()):
        return ""
    return toml_value(list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value)


def _show(options: argparse.Namespace) -> int:
    if options.effective:
        return _show_effective(options)
    if hasattr(options, "hub") or hasattr(options, "token_file"):
        raise UsageError("--hub, --token-file: expected --effective too; a file is shown without a hub")
    policy = Policy() if options.file is None else Policy.load(options.file)
    if options.json:
        print_json(policy.settings())
    else:
        print(policy.toml(), end="")
    return 0


def _show_effective(options: argparse.Namespace) -> int:
    if options.file is not None:
        raise UsageError("--effective: expected no FILE; the hub has its own")
    hub = hub_from(options)
    answer = hub.policy()
    rows = hub.parse(lambda: _rows(answer))
    if options.json:
        print_json(answer)
        return 0
    print_table([Column("setting"), Column("value"), Column("from")], rows)
    return 0


def _rows(answer: dict[str, Any]) -> Rows:
    return [[shown(one["path"]), shown(one["value"]), _source(one)] for one in answer["values"]]


def _source(one: dict[str, Any]) -> Cell:
    """Where a value comes from."""
    by = f" by {shown(one['by'])}" if one["by"] else ""
    at = "" if one["at"] is None else f", {local_time(one['at'])}"
    source = shown(one["source"]) + by + at
    if one["file_value"] is None:
        return Cell(source)
    return Cell(f"{source}; overrules the file, which says {shown(one['file_value'])}", YELLOW)
