"""`headgate violations`: list and reset violations."""

from typing import Any

from headgate.cli.hub_api import AgentSummary, HubApi
from headgate.cli.hub_commands import ListCommand, Rows, add_agent_command
from headgate.cli.parser import Commands
from headgate.cli.terminal import Column


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
