"""How commands look: their help with examples, and what is said of arguments that can't be used."""

import argparse
import math
import re
from collections.abc import Callable
from textwrap import fill
from typing import Any, NoReturn, TypeAlias

from headgate.cli.terminal import harmless

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
Run: TypeAlias = Callable[[argparse.Namespace], int]


class _Formatter(argparse.HelpFormatter):
    """Keeps paragraphs apart, and examples as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
        self._action_max_length = 16  # else what is said of the longest command would begin below it

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        return "\n\n".join([part if "\n" in part else fill(part, width) for part in parts])


class Parser(argparse.ArgumentParser):
    """Says what the commands are when it is given another."""

    def __init__(self, **how: Any) -> None:
        super().__init__(formatter_class=_Formatter, **how)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"argument COMMAND: invalid choice: ('.*?') \(choose from (.*)\)", message)
        if unknown:
            commands = unknown[2].replace("'", "")
            message = f"unknown command {unknown[1]}; the commands are: {commands}"
        message = re.sub(r"invalid choice: ('.*?') \(choose from (.*)\)", _expected, message)
        super().error(harmless(message))


def _expected(choice: re.Match[str]) -> str:
    choices = choice[2].replace("'", "")
    return f"expected one of {choices}, got {choice[1]}"


def command(
    commands: Commands, name: str, run: Run, about: str, description: str, *examples: str, data: bool = False
) -> argparse.ArgumentParser:
    """Add a command: `about` for the list of commands, the rest for its own help. `data`: it can print JSON."""
    shown = "\n".join(["examples:", *[f"  {example}" for example in examples]])
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=description, epilog=shown)
    parser.set_defaults(run=run)
    if data:
        # No default: one given before a subcommand would be overwritten by that of one that wasn't given after it.
        parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one line of JSON")
    return parser


def parent(commands: Commands, name: str, about: str) -> Commands:
    """Add a command that has commands of its own."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=f"{about.capitalize()}.")
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def seconds(text: str) -> float:
    """How long something takes, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 3600:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, at most 3600, got {text!r}")
    return number
