"""`headgate agents`: list agents and their limits, or show all about one."""

import argparse
from typing import Any, Final

from headgate.cli.agent_page import page_text
from headgate.cli.hub_api import AgentSummary, HubApi, HubError
from headgate.cli.hub_commands import print_answer
from headgate.cli.hub_options import add_hub_options, existing_agent, hub_from
from headgate.cli.parser import Commands, UsageError, add_command
from headgate.cli.terminal import Cell, Column, ProgressLine, print_error, print_json, table_text, usage_cell
from headgate.errors import InvalidInput

_MOST: Final = 1000  # agents that a hub lists at once
_COLUMNS: Final = [
    Column("agent", elastic=True), Column("here"), Column("used", right=True), Column("left", right=True),
    Column("bucket"), Column("in a row", right=True), Column("hour", right=True), Column("wait", right=True),
    Column("marks"),
]  # fmt: skip


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "agents",
        _run,
        "list agents, or show one",
        "List the agents that are connected, were active within the last five minutes, were denied within the last "
        "hour, are blocked, or have an override or an exemption. For each, show the bucket nearest to its limit, and "
        "the rest of the wait that it was advised (enforced only with backoff.enforce). With a name, show all "
        "about one agent: its buckets, its override, its block, what it was denied, and from where.",
        "headgate agents",
        "headgate agents planner",
        "headgate agents --all --json",
        json=True,
    )
    parser.add_argument(
        "agent", type=existing_agent, nargs="?", metavar="AGENT", help="name of an agent (default: list all)"
    )
    parser.add_argument("--all", action="store_true", help="list all registered agents; requires the admin token")
    add_hub_options(parser, viewer=True)


def _run(options: argparse.Namespace) -> int:
    if options.agent is not None and options.all:
        raise UsageError("--all: expected no AGENT, since it lists all of them")
    hub = hub_from(options, viewer=True)
    return _list(hub, options) if options.agent is None else _show(hub, options)


def _show(hub: HubApi, options: argparse.Namespace) -> int:
    answer = hub.agent(options.agent)
    text = hub.parse(lambda: page_text(answer))
    if options.json:
        print_json(answer)
    else:
        print(text)
    return 0


def _list(hub: HubApi, options: argparse.Namespace) -> int:
    found = hub.active_agents(_MOST)
    if options.all:
        found = _registered(hub, {one["agent_id"]: one for one in found})
    elif len(found) == _MOST:
        print_error(f"only the first {_MOST:,} are listed; --all lists all")
    recent = "no agent is connected or was recently active; --all lists all registered ones"
    nothing = "no agent is registered" if options.all else recent
    return print_answer(
        options,
        hub,
        {"agents": found},
        lambda: table_text(_COLUMNS, [_row(AgentSummary.parse(one)) for one in found]) if found else nothing,
    )


def _registered(hub: HubApi, active: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The status of every registered agent."""
    agents: list[dict[str, Any]] = []
    with ProgressLine() as progress:
        for one in hub.registered_agents():
            name = str(one["agent_id"])
            agents.append({**(active.get(name) or _status(hub, name)), "revoked": bool(one.get("revoked"))})
            progress.show(lambda: f"agents: {len(agents):,}")
    return agents


def _status(hub: HubApi, agent: str) -> dict[str, Any]:
    """The state of an agent, as the list of active ones has it."""
    unknown: dict[str, Any] = {"agent_id": agent, "connected": False, "usage": None, "violations": 0}
    unknown |= {
        "violations_last_hour": 0,
        "wait_left_ms": 0,
        "rate_limited": False,
        "denied_by_account": False,
        "exempt": False,
    }
    unknown |= {"override": False, "blocked": False, "denied_per_minute": 0, "role": ""}
    try:
        found = hub.agent(agent)
        card = {name: found.get(name, value) for name, value in unknown.items()}
        return card | {"override": bool(card["override"])}
    except InvalidInput:  # registered before its name was reserved: no path leads to it
        pass
    except HubError as error:
        if error.status != 404:
            raise
    return unknown


def _row(agent: AgentSummary) -> list[str | Cell]:
    return [
        agent.name,
        "yes" if agent.connected else "no",
        "-" if agent.used is None else usage_cell(agent.used),
        agent.left or "-",
        agent.bucket or "-",
        str(agent.violations),
        str(agent.last_hour),
        agent.wait,
        agent.marks,
    ]
