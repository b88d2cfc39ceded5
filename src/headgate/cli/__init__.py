"""The command `headgate`. Each module is named after the command in it."""

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from headgate.cli import (
    agents,
    bench,
    check,
    completion,
    demo,
    exempt,
    override,
    policy,
    replay,
    serve,
    store,
    top,
    violations,
)
from headgate.cli.parser import CommandParser
from headgate.cli.terminal import version_text
from headgate.errors import HeadgateError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 for an error, 2 for invalid arguments."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack characters of a name
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.version:
        print(version_text())
        return 0
    if options.run is None:
        parser.print_help()
        return 0
    try:
        options.code = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would write the rest at exit
    except KeyboardInterrupt:
        return 130
    except HeadgateError as error:
        print(error, file=sys.stderr)
        return 1
    return int(options.code)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Its defaults are `run`, the command's function, and `code`, its exit code so far."""
    parser = CommandParser(
        prog="headgate",
        description="Exact rate limiting for platforms where many agents talk to one hub.",
        epilog="Run headgate COMMAND --help for details and examples.",
    )
    parser.set_defaults(run=None, code=0, json=False)
    parser.add_argument("--version", action="store_true", help="print the version, and whether it is compiled")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in (serve, top, agents, override, exempt, violations, store, check, policy, replay, bench, demo):
        module.add(commands)
    completion.add(commands, parser)
    return parser
