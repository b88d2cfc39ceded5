"""The command `headgate`."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from io import TextIOWrapper
from pathlib import Path

from headgate._version import VERSION
from headgate.cli import admin, bench, check, replay
from headgate.cli.hub_api import Secret
from headgate.cli.parser import Commands, Parser, command, parent, seconds
from headgate.cli.terminal import print_json
from headgate.errors import HeadgateError
from headgate.gate.policy import Policy
from headgate.hub.settings import HubSettings, flag, variable
from headgate.stores.memory import compiled

_SHELLS = ("bash", "zsh", "tcsh")
_CHANGE = ("path", "value", "default")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 where something is wrong, 2 where the arguments can't be used."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal can't show is no reason to stop
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        print(version())
        return 0
    if options.run is None:
        parser.print_help()
        return 0
    try:
        options.code = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would try to write the rest
    except KeyboardInterrupt:
        return 130
    except HeadgateError as error:
        print(error, file=sys.stderr)
        return 1
    return int(options.code)


def _demo(options: argparse.Namespace) -> int:
    from headgate.cli import demo

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
    if options.json:
        print_json({"file": options.file, "changes": [dict(zip(_CHANGE, one, strict=True)) for one in changed]})
        return 0
    print(f"{options.file}: no mistakes; {'it changes' if changed else 'it changes nothing'}")
    for path, value, ordinary in changed:
        print(f"  {path} = {value}" + (f"  (default: {ordinary})" if ordinary else ""))
    return 0


def _policy_show(options: argparse.Namespace) -> int:
    policy = Policy() if options.file is None else Policy.load(options.file)
    if options.json:
        print_json(policy.settings())
    else:
        print(policy.toml(), end="")
    return 0


def _completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise HeadgateError(f"completion needs more than the core: {error}; pip install 'headgate[cli]'") from error
    parser = _parser()
    for action in _actions(parser):
        if action.metavar in ("FILE", "LOG"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options of a command, and of those below it."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [one for below in action.choices.values() for one in _actions(below)]
    return found


def version() -> str:
    """Such as "headgate 0.1.0 (compiled)"."""
    how = "compiled" if compiled() else "plain Python: not compiled"
    return f"headgate {VERSION} ({how})"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="headgate",
        description="Exact rate limiting for platforms where many agents talk to one hub.",
        epilog="headgate COMMAND --help says more, with examples.",
    )
    parser.set_defaults(run=None, code=0, json=False)
    parser.add_argument("--version", action="store_true", help="print the version and whether it is compiled")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_serve(commands)
    admin.add(commands)
    check.add(commands)
    _add_policy(commands)
    replay.add(commands)
    bench.add(commands)
    _add_demo(commands)
    completion = command(
        commands,
        "completion",
        _completion,
        "print what makes a shell complete all this",
        "Print a script that makes a shell complete commands, options and files. It needs pip install 'headgate[cli]'.",
        "headgate completion bash > ~/.local/share/bash-completion/completions/headgate",
        "headgate completion zsh > ~/.zfunc/_headgate",
    )
    completion.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=f"one of {', '.join(_SHELLS)}")
    return parser


def _add_policy(commands: Commands) -> None:
    verbs = parent(commands, "policy", "explain a policy file")
    check = command(
        verbs,
        "check",
        _policy_check,
        "find all mistakes in a file, and say what it changes",
        "Find all mistakes in a policy file. Without any, say what it changes against the defaults.",
        "headgate policy check headgate.toml",
        data=True,
    )
    check.add_argument("file", metavar="FILE", help="a policy in TOML")
    show = command(
        verbs,
        "show",
        _policy_show,
        "print all that a file comes to, or the defaults",
        "Print the whole policy that a file comes to, with every default, as TOML.",
        "headgate policy show > headgate.toml",
        "headgate policy show headgate.toml --json",
        data=True,
    )
    show.add_argument("file", metavar="FILE", nargs="?", help="a policy in TOML; without one, the defaults")


def _add_demo(commands: Commands) -> None:
    demonstration = command(
        commands,
        "demo",
        _demo,
        "watch some agents draw from real buckets",
        "Watch some agents, of whom not all behave, draw from the buckets of a real limiter.",
        "headgate demo --seconds 30 --agents 12",
    )
    demonstration.add_argument("--seconds", type=seconds, default=10.0, metavar="S", help="how long (10)")
    demonstration.add_argument("--agents", type=_agents, default=6, metavar="N", help="how many agents (6)")
    demonstration.add_argument("--seed", type=_seed, metavar="N", help="make the agents' traffic repeatable")


def _add_serve(commands: Commands) -> None:
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
            otherwise = "in the table [hub] of a file"
            hub.add_argument(flag(one.name), action=Secret, variable=variable(one.name), otherwise=otherwise)
        else:
            shown = f" ({one.default})" if one.default else ""
            letter = one.name.rpartition("_")[2].upper()
            switch = {"nargs": "?", "const": "true"} if isinstance(one.default, bool) else {}
            hub.add_argument(flag(one.name), metavar=letter, help=one.metadata["about"] + shown, **switch)


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
