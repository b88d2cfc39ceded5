"""`headgate holds`: what is reserved on accounts."""

import argparse
from typing import Any

from headgate.cli.account_limits import amount
from headgate.cli.answers import duration_text, shown
from headgate.cli.hub_api import HubApi
from headgate.cli.hub_commands import ListCommand, Rows, add_change_command, add_limit_option, note_unknown_account
from headgate.cli.hub_options import existing_agent, path_part
from headgate.cli.parser import Commands, add_group
from headgate.cli.terminal import Column, print_error
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = add_group(commands, "holds", "list or cancel holds")
    _LIST.add(
        verbs,
        "list",
        "list the open holds of an account",
        "List the holds of an account and everything below it: the open ones, then the expired ones, by their ends.",
        "headgate holds list acme",
        "headgate holds list acme/search/planner --limit 10",
    )
    verb = add_change_command(
        verbs,
        "cancel",
        lambda hub, options: hub.cancel_hold(options.agent, options.hold),
        lambda options, _: f"hold {printable(options.hold)} of {printable(options.agent)} is cancelled",
        "cancel a hold",
        "Cancel an open hold: all that it has reserved is given back. The program that made it can't settle it then.",
        "headgate holds cancel planner 5f1c2b3a4d5e-1f",
        agent=existing_agent,
    )
    verb.add_argument("hold", type=path_part, metavar="ID", help="id of the hold")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path_part, metavar="PATH", help="path of an account, an agent or a session")
    add_limit_option(parser)


def _fetch(hub: HubApi, options: argparse.Namespace) -> dict[str, Any]:
    answer = hub.account_holds(options.path, options.limit)
    if answer["more"]:
        print_error(f"note: only the first {options.limit:,} are listed")
    if not answer["holds"] and not options.json:
        note_unknown_account(hub, options.path)
    return answer


def _rows(answer: dict[str, Any]) -> Rows:
    return [
        [
            shown(one["agent"]),
            shown(one["id"]),
            shown(one["account"]),
            shown(one["session"]) or "-",
            shown(one["tool"]) or "-",
            shown(one["state"]),
            duration_text(one["lease_left"]),
            _costs(one["costs"]),
        ]
        for one in answer["holds"]
    ]


def _costs(costs: dict[str, Any]) -> str:
    return ", ".join([f"{shown(resource)} {amount(cost)}" for resource, cost in costs.items()])


_LIST = ListCommand(
    _fetch,
    [Column("agent"), Column("id"), Column("account"), Column("session"), Column("tool"),
     Column("state"), Column("lease", right=True), Column("costs")],
    _rows,
    "no holds",
    arguments=_add_arguments,
)  # fmt: skip
