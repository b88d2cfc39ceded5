"""`headgate completion`: completion scripts for shells."""

import argparse
from functools import partial
from typing import Final

from headgate.cli.fish_completion import FILES, fish_script
from headgate.cli.parser import Commands, add_command, requires
from headgate.gate.policy import BUILT_IN_TIERS

_SHELLS: Final = ("bash", "zsh", "tcsh", "fish")


def add(commands: Commands, root: argparse.ArgumentParser) -> None:
    """Add the command. `root` is the parser of all commands."""
    parser = add_command(
        commands,
        "completion",
        partial(_run, root),
        "print a completion script for a shell",
        "Print a script that completes commands, options and files in a shell. Except for fish, it requires "
        "pip install '.[cli]' in a checkout.",
        "headgate completion bash > ~/.local/share/bash-completion/completions/headgate",
        "headgate completion zsh > ~/.zfunc/_headgate",
        "headgate completion fish > ~/.config/fish/completions/headgate.fish",
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=f"one of {', '.join(_SHELLS)}")


def _run(root: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    tiers = [action for action in _actions(root) if action.dest == "tier"]
    for action in tiers:
        action.choices = BUILT_IN_TIERS  # offered, as a shell can't know those of a policy
    try:
        print(fish_script(root) if options.shell == "fish" else _shtab_script(root, options.shell))
    finally:
        for action in tiers:
            action.choices = None  # the parser is used again
    return 0


def _shtab_script(root: argparse.ArgumentParser, shell: str) -> str:
    with requires("cli", "completion"):
        import shtab
    for action in _actions(root):
        if action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    script: str = shtab.complete(root, shell)
    return script


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a command and of its subcommands."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [one for below in action.choices.values() for one in _actions(below)]
    return found
