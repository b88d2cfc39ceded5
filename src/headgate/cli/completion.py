"""`headgate completion`: completion scripts for shells."""

import argparse
from functools import partial
from typing import Final

from headgate.cli.parser import Commands, add_command, requires
from headgate.gate.policy import BUILT_IN_TIERS

_SHELLS: Final = ("bash", "zsh", "tcsh")


def add(commands: Commands, root: argparse.ArgumentParser) -> None:
    """Add the command. `root` is the parser of all commands."""
    parser = add_command(
        commands,
        "completion",
        partial(_run, root),
        "print a completion script for a shell",
        "Print a script that completes commands, options and files in a shell. Requires the extra headgate[cli].",
        "headgate completion bash > ~/.local/share/bash-completion/completions/headgate",
        "headgate completion zsh > ~/.zfunc/_headgate",
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=f"one of {', '.join(_SHELLS)}")


def _run(root: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    with requires("cli", "completion"):
        import shtab
    for action in _actions(root):
        if action.metavar in ("FILE", "LOG"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    tiers = [action for action in _actions(root) if action.dest == "tier"]
    for action in tiers:
        action.choices = BUILT_IN_TIERS  # offered, as a shell can't know those of a policy
    script = shtab.complete(root, options.shell)
    for action in tiers:
        action.choices = None  # the parser is used again
    print(script)
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a command and of its subcommands."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [one for below in action.choices.values() for one in _actions(below)]
    return found
