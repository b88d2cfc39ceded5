"""`headgate override`: limits for single agents."""

import argparse
from typing import Any

from headgate.cli.hub_api import HubApi
from headgate.cli.hub_commands import add_agent_command, add_hub_command, print_unregistered
from headgate.cli.hub_options import agent_name, hub_from
from headgate.cli.parser import Commands, add_group
from headgate.cli.terminal import Column, print_json, print_table
from headgate.cli.tier_limits import SESSION, add_tier_limits, given_limits
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = add_group(commands, "override", "set, remove or list overrides")
    verb = add_hub_command(
        verbs,
        "set",
        _set,
        "override limits of an agent",
        "Override limits of an agent, from its next request on. Overrides survive a restart; tiers that aren't named "
        "stay as they are. Limits are written as in the policy: 60/minute, '60/minute burst 10', unlimited.",
        "headgate override set planner heavy=100/minute",
        "headgate override set planner light=600/minute 'normal=5/second burst 20' --channel ws",
        "headgate override set planner session='100/second burst 200'",
        agent=agent_name,
    )
    add_tier_limits(verb)
    add_agent_command(
        verbs,
        "remove",
        HubApi.remove_override,
        lambda agent, _: f"{agent} has no overrides now: the defaults apply",
        "remove the overrides of an agent",
        "Remove all overrides of an agent: the defaults apply to it again.",
        "headgate override remove planner",
    )
    add_hub_command(
        verbs, "list", _list, "list all overrides", "List the overrides of all agents.",
        "headgate override list",
    )  # fmt: skip


def _set(options: argparse.Namespace) -> int:
    hub, agent = hub_from(options), options.agent
    answer = hub.set_override(agent, given_limits(options))
    if options.json:
        print_json(answer)
        return 0
    rows = hub.parse(
        lambda: _rows(_with_sessions({agent: answer["override"]}, {agent: answer.get("session_override")}))
    )
    print(f"overrides of {printable(agent)}:")
    _print(rows)
    if answer.get("registered") is False:
        print_unregistered(agent)
    return 0


def _list(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    overrides, sessions = hub.overrides()
    if options.json:
        print_json({"overrides": overrides, "session_overrides": sessions})
    elif not overrides and not sessions:
        print("no agent has overrides")
    else:
        _print(hub.parse(lambda: _rows(_with_sessions(overrides, sessions))))
    return 0


def _with_sessions(overrides: dict[str, Any], sessions: dict[str, str | None]) -> dict[str, Any]:
    """The overrides of tiers and of sessions in one table."""
    own = {agent: {"-": {SESSION: limit}} for agent, limit in sessions.items() if limit is not None}
    return {agent: {**overrides.get(agent, {}), **own.get(agent, {})} for agent in sorted({*overrides, *own})}


def _rows(overrides: dict[str, Any]) -> list[list[str]]:
    return [
        [agent, channel, tier, str(limit)]
        for agent, channels in overrides.items()
        for channel, tiers in channels.items()
        for tier, limit in tiers.items()
    ]


def _print(rows: list[list[str]]) -> None:
    print_table([Column("agent", elastic=True), Column("channel"), Column("tier"), Column("limit")], rows)
