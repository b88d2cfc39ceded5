"""`headgate violations`: list and reset violations."""

import argparse

from headgate.cli.hub_api import AgentSummary, add_hub_options, hub_from, note_unregistered
from headgate.cli.parser import Commands, add_command
from headgate.cli.terminal import Column, print_json, print_table
from headgate.errors import printable


def add(commands: Commands) -> None:
    """Add the commands."""
    parser = add_command(
        commands,
        "violations",
        _list,
        "list or reset violations",
        "List the agents that were denied within the last hour, the worst first. With reset, clear the violations of "
        "an agent: its backoff ends, and it gets tasks again.",
        "headgate violations",
        "headgate violations reset planner",
        json=True,
    )
    add_hub_options(parser)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    reset = add_command(
        verbs,
        "reset",
        _reset,
        "reset the violations of an agent",
        "Reset the violations of an agent. Its buckets stay as they are.",
        "headgate violations reset planner",
        json=True,
    )
    add_hub_options(reset, agent=True)


def _list(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.violations()
    if options.json:
        print_json(answer)
        return 0
    agents = hub.parse(lambda: [AgentSummary.parse(one) for one in answer["agents"]])
    if not agents:
        print("no agent was denied within the last hour")
        return 0
    columns = [Column("agent", elastic=True), Column("hour", right=True), Column("in a row", right=True)]
    columns += [Column("wait", right=True), Column("marks")]
    rows = [[one.name, str(one.last_hour), str(one.violations), one.wait, one.marks] for one in agents]
    print_table(columns, rows)
    return 0


def _reset(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.reset_violations(options.agent)
    if options.json:
        print_json(answer)
    elif hub.parse(lambda: bool(answer["reset"])):
        print(f"violations of {printable(options.agent)} reset")
    else:
        print(f"{printable(options.agent)} had no violations to reset")
        note_unregistered(hub, options.agent)
    return 0
