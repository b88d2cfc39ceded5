"""The argument parser: help with examples, and errors that say what was expected."""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import fill
from typing import Any, NoReturn, TypeAlias

from headgate.errors import HeadgateError, printable

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
RunCommand: TypeAlias = Callable[[argparse.Namespace], int]


class UsageError(HeadgateError):
    """Arguments that are right by themselves, but not together: exit code 2."""


class _Formatter(argparse.HelpFormatter):
    """Keeps paragraphs, and leaves examples as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
        self._action_max_length = 16  # or the help of the longest command would begin on the next line

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        return "\n\n".join([part if "\n" in part else fill(part, width) for part in parts])


class CommandParser(argparse.ArgumentParser):
    """Lists the commands in the error about an unknown one, and fails if its help can't be written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **options)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse would hide that it can't be written

    def error(self, message: str) -> NoReturn:
        from difflib import get_close_matches  # only now: it is rarely needed, and slow to import

        unknown = re.match(r"argument COMMAND: invalid choice: ('.*?') \(choose from (.*)\)", message)
        if unknown:
            commands = unknown[2].replace("'", "")
            name = unknown[1][1:-1]
            by_path = "show" in commands.split(", ") and "/" in name  # of an account: no command is called that
            near = [f"show {name}"] if by_path else get_close_matches(name, commands.split(", "), 1)
            hint = f"did you mean {self.prog} {near[0]}? " if near else ""
            message = f"unknown command {unknown[1]}; {hint}the commands are: {commands}"
        option = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        if option and (near := get_close_matches(option[1], self._option_string_actions, 1)):
            message += f"; did you mean {near[0]}?"
        message = re.sub(r"invalid choice: ('.*?') \(choose from (.*)\)", _expected, message)
        super().error(printable(message))


def _expected(choice: re.Match[str]) -> str:
    choices = choice[2].replace("'", "")
    return f"expected one of {choices}, got {choice[1]}"


def add_command(
    commands: Commands, name: str, run: RunCommand, about: str, description: str, *examples: str, json: bool = False
) -> argparse.ArgumentParser:
    """Add a command. `about` is for the list of commands, the rest for its own help; `json` adds --json."""
    shown = "\n".join(["examples:", *[f"  {example}" for example in examples]])
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=description, epilog=shown)
    parser.set_defaults(run=run, command=parser.prog, parser=parser)
    if json:
        # No default: that of a subcommand would overwrite --json before the subcommand.
        parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one line of JSON")
    return parser


def add_group(commands: Commands, name: str, about: str) -> Commands:
    """Add a command with subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=f"{about.capitalize()}.")
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def json_text(text: str) -> str:
    """JSON, for argparse. It stays a text, so that it is sent as it is."""
    try:
        text.encode()
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text[:100]!r} ({error})") from None
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def duration(text: str) -> float:
    """A number of seconds, for argparse."""
    try:
        number = float(text) if text.isascii() else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number <= 3600:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, at most 3600, got {text!r}")
    return number


def whole_number(least: int | None = None, most: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers within bounds, for argparse."""
    bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch("-?[0-9]{1,19}", text) else None
        if number is None or (least is not None and number < least) or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected a whole number{bounds}, got {text!r}")
        return number

    return parse


@contextmanager
def requires(extra: str, what: str) -> Iterator[None]:
    """Turn a failing import into an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise HeadgateError(
            f"{what} needs more than the core: {error}; in a checkout: pip install '.[{extra}]'"
        ) from error
