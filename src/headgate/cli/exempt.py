"""`headgate exempt`: agents without limits."""

import argparse

from headgate.cli.hub_api import HubApi, add_agent_command, add_hub_options, hub_from
from headgate.cli.parser import Commands, add_command, add_group
from headgate.cli.terminal import print_json
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = add_group(commands, "exempt", "exempt agents from all limits")
    add_agent_command(
        verbs,
        "add",
        HubApi.add_exemption,
        lambda agent, _: f"{agent} is exempt now: all its requests pass and none is counted",
        "exempt an agent from all limits",
        "Exempt an agent from all limits, from its next request on.",
        "headgate exempt add monitor",
        notes=lambda _: True,
    )
    add_agent_command(
        verbs,
        "remove",
        HubApi.remove_exemption,
        lambda agent, _: f"{agent} is no longer exempt: its limits apply",
        "end the exemption of an agent",
        "End the exemption of an agent, from its next request on.",
        "headgate exempt remove monitor",
    )
    verb = add_command(
        verbs, "list", _list, "list exempt agents", "List the exempt agents.", "headgate exempt list", json=True
    )
    add_hub_options(verb)


def _list(options: argparse.Namespace) -> int:
    answer = hub_from(options).exemptions()
    if options.json:
        print_json(answer)
    else:
        print("\n".join([printable(str(agent)) for agent in answer["agents"]]) or "no agent is exempt")
    return 0
