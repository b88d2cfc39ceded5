"""`headgate violations`: list and reset violations."""

import argparse
from typing import Any

from headgate.cli.hub_api import AgentSummary
from headgate.cli.hub_commands import ListCommand, Rows, add_change_command, note_unregistered
from headgate.cli.hub_options import agent_name
from headgate.cli.parser import Commands
from headgate.cli.terminal import Column
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = _LIST.add_group(
        commands,
        "violations",
        "list or reset violations",
        "List the agents that were denied within the last hour, the worst first. With reset, clear the violations of "
        "an agent: its backoff ends, and it gets tasks again.",
        "headgate violations",
        "headgate violations reset planner",
    )
    add_change_command(
        verbs,
        "reset",
        lambda hub, options: hub.reset_violations(options.agent),
        _report,
        "reset the violations of an agent",
        "Reset the violations of an agent. Its buckets stay as they are.",
        "headgate violations reset planner",
        agent=agent_name,
        note=lambda hub, options, answer: None if answer["reset"] else note_unregistered(hub, options.agent),
    )


def _report(options: argparse.Namespace, answer: dict[str, Any]) -> str:
    agent = printable(options.agent)
    return f"violations of {agent} reset" if answer["reset"] else f"{agent} had no violations to reset"


def _rows(answer: dict[str, Any]) -> Rows:
    agents = [AgentSummary.parse(one) for one in answer["agents"]]
    return [[one.name, str(one.last_hour), str(one.violations), one.wait, one.marks] for one in agents]


_LIST = ListCommand(
    lambda hub, _: hub.violations(),
    [Column("agent", elastic=True), Column("hour", right=True), Column("in a row", right=True),
     Column("wait", right=True), Column("marks")],
    _rows,
    "no agent was denied within the last hour",
)  # fmt: skip
