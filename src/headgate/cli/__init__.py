"""The command `headgate`. Each module is named after its command, or after what its commands are about."""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from headgate.cli import (
    accounts,
    admins,
    agents,
    alerts,
    bench,
    block,
    changes,
    channels,
    check,
    completion,
    demo,
    exempt,
    holds,
    log_level,
    policy,
    replay,
    serve,
    signals,
    store,
    tasks,
    tier_limits,
    tokens,
    top,
    usage,
    violations,
)
from headgate.cli.parser import CommandParser, UsageError
from headgate.cli.terminal import discard, prepare_output, print_error, version_text
from headgate.errors import HeadgateError

_MODULES: Final = (
    serve, top, agents, alerts, block, tokens, tier_limits, exempt, accounts, holds, usage, violations,
    changes, tasks, channels, signals, admins, store, log_level, check, policy, replay, bench, demo,
)  # fmt: skip
"""In the order in which the help lists the commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 for an error, 2 for invalid arguments."""
    prepare_output()
    options = argparse.Namespace(code=None)
    code = 0
    try:
        code = _run(options, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed it
        discard(sys.stdout)
    except OSError as error:  # of the output: a command expects all others
        print_error(f"{error.filename or 'standard output'}: {error.strerror or error}")
        discard(sys.stdout)
        code = 1
    return code if options.code is None else int(options.code)


def _run(options: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    try:
        _, unknown = parser.parse_known_args(arguments, options)
        if unknown:
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of the command
    except SystemExit:  # after --help, too
        sys.stdout.flush()
        raise
    if options.version:
        print(version_text())
        return 0
    if options.run is None:
        parser.print_help()
        return 0
    try:
        return int(options.run(options))
    except UsageError as error:
        print_error(f"{options.command}: {error}")
        return 2
    except HeadgateError as error:
        print_error(error)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. It sets `run`, the command's function.

    A command whose exit code is an answer sets `code` before it prints: it holds even if the output can't be written.
    """
    parser = CommandParser(
        prog="headgate",
        description="Exact rate limiting for platforms where many agents talk to one hub.",
        epilog="Run headgate COMMAND --help for details and examples.",
    )
    parser.set_defaults(run=None, code=None, json=False, parser=parser)
    parser.add_argument("--version", action="store_true", help="print the version, and whether it is compiled")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in _MODULES:
        module.add(commands)
    completion.add(commands, parser)
    return parser
