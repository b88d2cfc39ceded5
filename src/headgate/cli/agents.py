"""`headgate agents`: list agents and their limits."""

import argparse
from typing import Any, Final

from headgate.cli.hub_api import AgentSummary, HubApi, HubError, add_hub_options, hub_from
from headgate.cli.parser import Commands, add_command
from headgate.cli.terminal import Cell, Column, ProgressLine, print_error, print_json, print_table, usage_colour
from headgate.errors import HeadgateError, InvalidInput

_MOST: Final = 1000  # agents that a hub lists at once
_MOST_REGISTERED: Final = 1_000_000  # bound against a faulty server


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "agents",
        _run,
        "list agents and their bucket usage",
        "List the agents that are connected, were active within the last five minutes, were denied within the last "
        "hour, or have an override or an exemption. For each, show the bucket nearest to its limit.",
        "headgate agents",
        "headgate agents --all --json",
        json=True,
    )
    parser.add_argument("--all", action="store_true", help="list all registered agents; requires the admin token")
    add_hub_options(parser, viewer=True)


def _run(options: argparse.Namespace) -> int:
    hub = hub_from(options, viewer=True)
    found = hub.active_agents(_MOST)
    if options.all:
        found = _registered(hub, {one["agent_id"]: one for one in found})
    elif len(found) == _MOST:
        print_error(f"only the first {_MOST:,} are listed; --all lists all")
    if options.json:
        print_json({"agents": found})
        return 0
    agents = hub.parse(lambda: [AgentSummary.parse(one) for one in found])
    if not agents:
        print("no agent is registered" if options.all else "no agent is connected or was recently active")
        return 0
    columns = [
        Column("agent", elastic=True), Column("here"), Column("used", right=True), Column("left", right=True),
        Column("bucket"), Column("in a row", right=True), Column("hour", right=True), Column("wait", right=True),
        Column("marks"),
    ]  # fmt: skip
    print_table(columns, [_row(agent) for agent in agents])
    return 0


def _registered(hub: HubApi, active: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The status of every registered agent."""
    agents: list[dict[str, Any]] = []
    with ProgressLine() as progress:
        for page in hub.registered_agents():
            for one in page:
                if len(agents) == _MOST_REGISTERED:
                    raise HeadgateError(f"{hub.url}: expected at most {_MOST_REGISTERED:,} agents, got more")
                name = one["agent_id"]
                agents.append({**(active.get(name) or _status(hub, name)), "revoked": bool(one.get("revoked"))})
                progress.show(lambda: f"agents: {len(agents):,}")
    return agents


def _status(hub: HubApi, agent: str) -> dict[str, Any]:
    try:
        return hub.agent(agent)
    except InvalidInput:  # registered before its name was reserved: no path leads to it
        pass
    except HubError as error:
        if error.status != 404:
            raise
    unknown: dict[str, Any] = {"agent_id": agent, "connected": False, "usage": None, "violations": 0}
    unknown |= {"violations_last_hour": 0, "wait_left_ms": 0, "rate_limited": False}
    return unknown | {"exempt": False, "override": False}


def _row(agent: AgentSummary) -> list[str | Cell]:
    return [
        agent.name,
        "yes" if agent.connected else "no",
        Cell("-") if agent.used is None else Cell(f"{agent.used:.0%}", usage_colour(agent.used)),
        agent.left or "-",
        agent.bucket or "-",
        str(agent.violations),
        str(agent.last_hour),
        agent.wait,
        agent.marks,
    ]
