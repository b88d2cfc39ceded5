"""`headgate violations`: list and reset violations."""

import argparse

from headgate.cli.hub_api import AgentSummary, HubApi
from headgate.cli.hub_commands import add_agent_command, add_hub_command
from headgate.cli.hub_options import hub_from
from headgate.cli.parser import Commands
from headgate.cli.terminal import Column, print_json, print_table


def add(commands: Commands) -> None:
    parser = add_hub_command(
        commands,
        "violations",
        _list,
        "list or reset violations",
        "List the agents that were denied within the last hour, the worst first. With reset, clear the violations of "
        "an agent: its backoff ends, and it gets tasks again.",
        "headgate violations",
        "headgate violations reset planner",
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_agent_command(
        verbs,
        "reset",
        HubApi.reset_violations,
        lambda agent, answer: (
            f"violations of {agent} reset" if answer["reset"] else f"{agent} had no violations to reset"
        ),
        "reset the violations of an agent",
        "Reset the violations of an agent. Its buckets stay as they are.",
        "headgate violations reset planner",
        notes=lambda answer: not answer["reset"],
    )


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
