"""`headgate exempt`: agents without limits."""

import argparse

from headgate.cli.hub_api import HubApi
from headgate.cli.hub_commands import add_agent_command, add_hub_command, print_unregistered
from headgate.cli.hub_options import agent_name, hub_from
from headgate.cli.parser import Commands, add_group
from headgate.cli.terminal import print_json
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = add_group(commands, "exempt", "exempt agents from all limits")
    add_hub_command(
        verbs,
        "add",
        _add,
        "exempt an agent from all limits",
        "Exempt an agent from all limits, from its next request on.",
        "headgate exempt add monitor",
        agent=agent_name,
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
    verb = add_hub_command(
        verbs,
        "set",
        _set,
        "replace the list of exempt agents",
        "Exempt these agents from all limits, and no others, from the next request on.",
        "headgate exempt set monitor probe",
    )
    verb.add_argument("agents", type=agent_name, nargs="+", metavar="AGENT", help="names of all exempt agents")
    add_hub_command(verbs, "list", _list, "list exempt agents", "List the exempt agents.", "headgate exempt list")


def _add(options: argparse.Namespace) -> int:
    answer = hub_from(options).add_exemption(options.agent)
    if options.json:
        print_json(answer)
        return 0
    print(f"{printable(options.agent)} is exempt now: all its requests pass; only what its holds spend is counted")
    _note_unregistered([options.agent], answer)
    return 0


def _set(options: argparse.Namespace) -> int:
    answer = hub_from(options).replace_exemptions(options.agents)
    _print(options, answer)
    if not options.json:
        _note_unregistered(options.agents, answer)
    return 0


def _list(options: argparse.Namespace) -> int:
    _print(options, hub_from(options).exemptions())
    return 0


def _print(options: argparse.Namespace, answer: dict[str, list[object]]) -> None:
    if options.json:
        print_json(answer)
    else:
        print("\n".join([printable(str(agent)) for agent in answer["agents"]]) or "no agent is exempt")


def _note_unregistered(agents: list[str], answer: dict[str, list[object]]) -> None:
    """Print a note for each of these agents that the hub doesn't know."""
    unknown = answer.get("unregistered")
    print_unregistered(*[agent for agent in agents if isinstance(unknown, list) and agent in unknown])
