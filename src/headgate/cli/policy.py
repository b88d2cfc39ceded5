"""`headgate policy`: check and show policy files."""

import argparse

from headgate.cli.parser import Commands, add_command, add_group
from headgate.cli.terminal import print_json
from headgate.errors import printable
from headgate.gate.policy import Policy

_CHANGE = ("path", "value", "default")


def add(commands: Commands) -> None:
    verbs = add_group(commands, "policy", "check or show a policy file")
    check = add_command(
        verbs,
        "check",
        _check,
        "report mistakes in a policy file, and its changes",
        "Report all mistakes in a policy file. If there are none, list what it changes from the defaults.",
        "headgate policy check headgate.toml",
        json=True,
    )
    check.add_argument("file", metavar="FILE", help="policy file in TOML")
    show = add_command(
        verbs,
        "show",
        _show,
        "print a complete policy",
        "Print the complete policy of a file, including all defaults, as TOML.",
        "headgate policy show > headgate.toml",
        "headgate policy show headgate.toml --json",
        json=True,
    )
    show.add_argument("file", metavar="FILE", nargs="?", help="policy file in TOML (default: the default policy)")


def _check(options: argparse.Namespace) -> int:
    changed = Policy.load(options.file).changed()
    if options.json:
        print_json({"file": options.file, "changes": [dict(zip(_CHANGE, one, strict=True)) for one in changed]})
        return 0
    print(f"{printable(options.file)}: no mistakes; {'changes:' if changed else 'changes nothing'}")
    for path, value, default in changed:
        print(f"  {path} = {value}" + (f"  (default: {default})" if default else ""))
    return 0


def _show(options: argparse.Namespace) -> int:
    policy = Policy() if options.file is None else Policy.load(options.file)
    if options.json:
        print_json(policy.settings())
    else:
        print(policy.toml(), end="")
    return 0
