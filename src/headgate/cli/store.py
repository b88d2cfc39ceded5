"""`headgate store`: whether the store of a hub has its data, and what to do if it is lost."""

import argparse
from typing import Final

from headgate.cli.hub_commands import add_hub_command, print_answer
from headgate.cli.hub_options import add_hub_options, hub_from
from headgate.cli.parser import Commands, add_command
from headgate.cli.terminal import print_json
from headgate.errors import printable

_REMEDY: Final = "restore it, or: headgate store accept --agent-data drop|keep (docs: A store that lost its data)"
_STATES: Final = {
    "memory": "the store is this hub's memory",
    "ok": "the store has its data",
    "away": "the store can't be reached",
    "lost": "the store is lost",
}


def add(commands: Commands) -> None:
    """Add the commands."""
    parser = add_hub_command(
        commands,
        "store",
        _show,
        "show or accept the state of the store",
        "Show whether the store that hubs share has its agents and changes. Exit code 1: it is lost or away. A lost "
        "store has its data again after a restore; nothing else is needed then. With accept, use it as it is.",
        "headgate store",
        "headgate store accept --agent-data drop",
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    accept = add_command(
        verbs,
        "accept",
        _accept,
        "accept a lost store as it is",
        "Accept a lost store as it is: all connections of agents are closed, agents have to register again, and the "
        "overrides and exemptions in effect are those in the store. Repeat it for every hub that shares the store.",
        "headgate store accept --agent-data drop",
        json=True,
    )
    accept.add_argument(
        "--agent-data",
        choices=("keep", "drop"),
        required=True,
        help="keep mail, sessions, signals, tasks and chat channels on this hub for whoever registers the names next; "
        "or drop them, where tasks and chat channels become the admin's",
    )
    add_hub_options(accept)


def _show(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.store()
    state, problems = answer["store"], [str(problem) for problem in answer["problems"]]
    if options.json:
        print_json(answer)
    else:
        address = printable(str(answer.get("address") or "the server"))
        remedy = {"lost": [_REMEDY], "away": [f"start {address}, or correct --store of the hub"]}.get(str(state), [])
        print("\n".join([_STATES.get(state, printable(state)), *map(printable, problems), *remedy]))
    return 1 if state in ("away", "lost") else 0


def _accept(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.accept_store(options.agent_data)
    accepted = "the store is accepted as it is: agents have to register again"
    unneeded = "the store has its data: there was nothing to accept"
    return print_answer(options, hub, answer, lambda: accepted if answer["accepted"] else unneeded)
