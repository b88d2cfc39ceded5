"""`headgate exempt`: agents without limits."""

import argparse

from headgate.cli.hub_commands import ListCommand, add_change_command, add_hub_command, print_unregistered
from headgate.cli.hub_options import agent_name, hub_from
from headgate.cli.parser import Commands
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = _LIST.add_group(
        commands,
        "exempt",
        "list exempt agents, or exempt agents from all limits",
        "List the exempt agents. With add, remove and set, change who is exempt from all limits.",
        "headgate exempt",
        "headgate exempt add monitor",
    )
    add_change_command(
        verbs,
        "add",
        lambda hub, options: hub.add_exemption(options.agent),
        lambda options, _: (
            f"{printable(options.agent)} is exempt now: all its requests pass; only what its holds spend is counted"
        ),
        "exempt an agent from all limits",
        "Exempt an agent from all limits, from its next request on.",
        "headgate exempt add monitor",
        agent=agent_name,
        note=lambda _, options, answer: _note_unregistered([options.agent], answer),
    )
    add_change_command(
        verbs,
        "remove",
        lambda hub, options: hub.remove_exemption(options.agent),
        lambda options, _: f"{printable(options.agent)} is no longer exempt: its limits apply",
        "end the exemption of an agent",
        "End the exemption of an agent, from its next request on.",
        "headgate exempt remove monitor",
        agent=agent_name,
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


def _set(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.replace_exemptions(options.agents)
    _LIST.print(options, hub, answer)
    if not options.json:
        _note_unregistered(options.agents, answer)
    return 0


def _note_unregistered(agents: list[str], answer: dict[str, list[object]]) -> None:
    """Print a note for each of these agents that the hub doesn't know."""
    unknown = answer.get("unregistered")
    print_unregistered(*[agent for agent in agents if isinstance(unknown, list) and agent in unknown])


_LIST = ListCommand(
    lambda hub, _: hub.exemptions(),
    [],  # names alone, for scripts
    lambda answer: [[str(agent)] for agent in answer["agents"]],
    "no agent is exempt",
)
