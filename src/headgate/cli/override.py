"""`headgate override`: limits for single agents."""

import argparse
from typing import Any

from headgate.cli.hub_commands import ListCommand, Rows, add_change_command, note_answer
from headgate.cli.hub_options import agent_name
from headgate.cli.parser import Commands
from headgate.cli.terminal import Column, table_text
from headgate.cli.tier_limits import SESSION, add_tier_limits, given_limits
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = _LIST.add_group(
        commands,
        "override",
        "list, set or remove overrides",
        "List the overrides of all agents. With set, override limits of an agent; with remove, let the defaults apply.",
        "headgate override",
        "headgate override set planner heavy=100/minute",
    )
    verb = add_change_command(
        verbs,
        "set",
        lambda hub, options: hub.set_override(options.agent, given_limits(options)),
        _report,
        "override limits of an agent",
        "Override limits of an agent, from its next request on. Overrides survive a restart; tiers that aren't named "
        "stay as they are. Limits are written as in the policy: 60/minute, '60/minute burst 10', unlimited.",
        "headgate override set planner heavy=100/minute",
        "headgate override set planner light=600/minute 'normal=5/second burst 20' --channel ws",
        "headgate override set planner session='100/second burst 200'",
        agent=agent_name,
        note=note_answer,
    )
    add_tier_limits(verb)
    add_change_command(
        verbs,
        "remove",
        lambda hub, options: hub.remove_override(options.agent),
        lambda options, _: f"{printable(options.agent)} has no overrides now: the defaults apply",
        "remove the overrides of an agent",
        "Remove all overrides of an agent: the defaults apply to it again.",
        "headgate override remove planner",
        agent=agent_name,
    )


def _report(options: argparse.Namespace, answer: dict[str, Any]) -> str:
    agent = options.agent
    rows = _rows({agent: answer["override"]}, {agent: answer.get("session_override")})
    return f"overrides of {printable(agent)}:\n{table_text(_LIST.columns, rows)}"


def _rows(overrides: dict[str, Any], sessions: dict[str, str | None]) -> Rows:
    """The overrides of tiers and of sessions in one table."""
    own = {agent: {"-": {SESSION: limit}} for agent, limit in sessions.items() if limit is not None}
    return [
        [agent, channel, tier, str(limit)]
        for agent in sorted({*overrides, *own})
        for channel, tiers in {**overrides.get(agent, {}), **own.get(agent, {})}.items()
        for tier, limit in tiers.items()
    ]


_LIST = ListCommand(
    lambda hub, _: hub.overrides(),
    [Column("agent", elastic=True), Column("channel"), Column("tier"), Column("limit")],
    lambda answer: _rows(answer["overrides"], answer["session_overrides"]),
    "no agent has overrides",
)
