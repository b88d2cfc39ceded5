"""`headgate exempt`: agents without limits."""

import argparse

from headgate.cli.hub_api import add_hub_options, hub_from, note_unregistered
from headgate.cli.parser import Commands, add_command, add_group
from headgate.cli.terminal import print_json
from headgate.errors import printable


def add(commands: Commands) -> None:
    """Add the commands."""
    verbs = add_group(commands, "exempt", "exempt agents from all limits")
    for name, run, about, example in (
        ("add", _add, "exempt an agent from all limits", "headgate exempt add monitor"),
        ("remove", _remove, "end the exemption of an agent", "headgate exempt remove monitor"),
    ):
        description = f"{about[0].upper()}{about[1:]}, from its next request on."
        verb = add_command(verbs, name, run, about, description, example, json=True)
        add_hub_options(verb, agent=True)
    verb = add_command(
        verbs, "list", _list, "list exempt agents", "List the exempt agents.", "headgate exempt list", json=True
    )
    add_hub_options(verb)


def _add(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.add_exemption(options.agent)
    if options.json:
        print_json(answer)
        return 0
    print(f"{printable(options.agent)} is exempt now: all its requests pass and none is counted")
    note_unregistered(hub, options.agent)
    return 0


def _remove(options: argparse.Namespace) -> int:
    answer = hub_from(options).remove_exemption(options.agent)
    if options.json:
        print_json(answer)
    else:
        print(f"{printable(options.agent)} is no longer exempt: its limits apply")
    return 0


def _list(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.exemptions()
    agents = hub.parse(lambda: [str(agent) for agent in answer["agents"]])
    if options.json:
        print_json(answer)
    else:
        print("\n".join(map(printable, agents)) or "no agent is exempt")
    return 0
