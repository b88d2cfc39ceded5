"""The command `headgate`."""

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from headgate import demo
from headgate._version import VERSION
from headgate.errors import HeadgateError
from headgate.hub.settings import HubSettings, flag, variable
from headgate.policy import Policy
from headgate.stores.memory import compiled


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 where something is wrong, 2 where the arguments can't be used."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        print(version())
        return 0
    if options.run is None:
        parser.print_help()
        return 0
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would try to write the rest
        return 0
    except KeyboardInterrupt:
        return 130
    except HeadgateError as error:
        print(error, file=sys.stderr)
        return 1
    return code


def _demo(options: argparse.Namespace) -> int:
    print(version(), flush=True)
    demo.run(options.seconds, options.agents, options.seed, sys.stdout)
    return 0


def _serve(options: argparse.Namespace) -> int:
    try:
        from headgate.hub import logs, server
    except ImportError as error:
        raise HeadgateError(f"the hub needs more than the core: {error}; pip install 'headgate[server]'") from error
    chosen = options.config or os.environ.get("HEADGATE_CONFIG")
    config = Path(chosen) if chosen else None
    given = {name: value for name, value in vars(options).items() if value is not None}
    settings = HubSettings.load(given, config=config)
    logs.configure(settings)
    server.serve(settings, config, sys.stdout)
    return 0


def _policy_check(options: argparse.Namespace) -> int:
    changed = Policy.load(options.file).changed()
    print(f"{options.file}: no mistakes; {'it changes' if changed else 'it changes nothing'}")
    for path, value, ordinary in changed:
        print(f"  {path} = {value}" + (f"  (default: {ordinary})" if ordinary else ""))
    return 0


def _policy_show(options: argparse.Namespace) -> int:
    policy = Policy() if options.file is None else Policy.load(options.file)
    print(policy.toml(), end="")
    return 0


def version() -> str:
    """Such as "headgate 0.1.0 (compiled)"."""
    how = "compiled" if compiled() else "plain Python: not compiled"
    return f"headgate {VERSION} ({how})"


class _Parser(argparse.ArgumentParser):
    """Says what the commands are when it is given another."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"argument COMMAND: invalid choice: ('.*?') \(choose from (.*)\)", message)
        if unknown:
            commands = unknown[2].replace("'", "")
            message = f"unknown command {unknown[1]}; the commands are: {commands}"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="headgate", description="Exact rate limiting for platforms where many agents talk to one hub."
    )
    parser.set_defaults(run=None)
    parser.add_argument("--version", action="store_true", help="print the version and whether it is compiled")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demonstration = commands.add_parser(
        "demo",
        help="watch some agents draw from real buckets",
        description="Watch some agents, of whom not all behave, draw from the buckets of a real limiter.",
    )
    demonstration.set_defaults(run=_demo)
    demonstration.add_argument("--seconds", type=_seconds, default=10.0, metavar="S", help="how long (10)")
    demonstration.add_argument("--agents", type=_agents, default=6, metavar="N", help="how many agents (6)")
    demonstration.add_argument("--seed", type=_seed, metavar="N", help="make the agents' traffic repeatable")
    _add_serve(commands)
    policy = commands.add_parser("policy", help="explain a policy file", description="Explain a policy file.")
    verbs = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = verbs.add_parser(
        "check",
        help="find all mistakes in a file, and say what it changes",
        description="Find all mistakes in a policy file. Without any, say what it changes against the defaults.",
    )
    check.set_defaults(run=_policy_check)
    check.add_argument("file", metavar="FILE", help="a policy in TOML")
    show = verbs.add_parser(
        "show",
        help="print all that a file comes to, or the defaults",
        description="Print the whole policy that a file comes to, with every default, as TOML.",
    )
    show.set_defaults(run=_policy_show)
    show.add_argument("file", metavar="FILE", nargs="?", help="a policy in TOML; without one, the defaults")
    return parser


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    """The command that starts a hub, with an option for each of its settings."""
    hub = commands.add_parser(
        "serve",
        help="start a hub that agents connect to",
        description="Start a hub: agents over WebSocket and HTTP, a relay, tasks, and the gate before all of it.",
        epilog="Every option can be given in the environment too: --port as HEADGATE_PORT, and so on.",
    )
    hub.set_defaults(run=_serve)
    hub.add_argument("--config", metavar="FILE", help="a policy in TOML; its table [hub] may hold these options")
    for one in fields(HubSettings):
        if one.metadata["secret"]:
            hub.add_argument(flag(one.name), action=_Secret, help=argparse.SUPPRESS)
        else:
            shown = f" ({one.default})" if one.default else ""
            letter = one.name.rpartition("_")[2].upper()
            hub.add_argument(flag(one.name), metavar=letter, help=one.metadata["about"] + shown)


class _Secret(argparse.Action):
    """An option that isn't taken: on the command line everybody on the machine would see it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        where = f"the environment, as {variable(self.dest)}, or in the table [hub] of a file"
        parser.error(f"{flag(self.dest)}: expected in {where}, where not everybody sees it")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, at most 3600, got {text!r}")
    return seconds


def _agents(text: str) -> int:
    agents = _whole(text)
    if agents is None or not 1 <= agents <= 100:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 100, got {text!r}")
    return agents


def _seed(text: str) -> int:
    seed = _whole(text)
    if seed is None:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return seed


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
