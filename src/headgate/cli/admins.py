"""`headgate admins` and `headgate role`: who may administer the hub, or view it."""

import argparse
import shlex
from typing import Any, Final

from headgate.cli.answers import local_time, shown
from headgate.cli.hub_api import HubError
from headgate.cli.hub_commands import ListCommand, Rows, add_change_command, add_hub_command, print_token
from headgate.cli.hub_options import agent_name, existing_agent, hub_from
from headgate.cli.parser import Commands, add_group
from headgate.cli.terminal import Column
from headgate.errors import printable
from headgate.hub.agents.names import ADMIN, VIEWER

_ROLES: Final = {ADMIN: "an admin", VIEWER: "a viewer"}
_KINDS: Final = {"settings": "the settings", "first_start": "the first start", "agent": "a registration"}


def add(commands: Commands) -> None:
    verbs = _LIST.add_group(
        commands,
        "admins",
        "list, add or remove admins",
        "List the admins and viewers of the hub. With add, make a token with a name of its own; with remove, take the "
        "role and the token away.",
        "headgate admins",
        "HEADGATE_ADMIN_TOKEN=$(headgate admins add ann --role admin)",
        "headgate admins remove ann",
    )
    verb = add_hub_command(
        verbs,
        "add",
        _add,
        "add an admin or a viewer",
        "Register a name with a role. Its token alone is printed on standard output; it goes into "
        "HEADGATE_ADMIN_TOKEN. The record of changes, the log and the dashboard show the name.",
        "headgate admins add ann --role admin",
        agent=agent_name,
    )
    verb.add_argument(
        "--role", choices=tuple(_ROLES), required=True, metavar="ROLE", help=f"one of {', '.join(_ROLES)}"
    )
    add_change_command(
        verbs,
        "remove",
        lambda hub, options: hub.remove_admin(options.agent),
        lambda options, answer: (
            f"{printable(options.agent)} has no role now" + (", and its token is revoked" if answer["revoked"] else "")
        ),
        "remove an admin or a viewer",
        "Take the role of an admin or viewer away, and revoke its token. The last admin can't be removed.",
        "headgate admins remove ann",
        agent=existing_agent,
    )
    roles = add_group(commands, "role", "give roles to agents")
    verb = add_change_command(
        roles,
        "set",
        lambda hub, options: hub.set_role(options.agent, options.role),
        lambda options, _: f"{printable(options.agent)} is {_ROLES[options.role]} now",
        "give a registered agent a role",
        "Give a registered agent a role: admin may do everything, viewer may see the dashboard.",
        "headgate role set planner viewer",
        agent=existing_agent,
    )
    verb.add_argument("role", choices=tuple(_ROLES), metavar="ROLE", help=f"one of {', '.join(_ROLES)}")
    add_change_command(
        roles,
        "remove",
        lambda hub, options: hub.remove_role(options.agent),
        lambda options, _: f"{printable(options.agent)} has no role now; its token still works",
        "take the role of an agent away",
        "Take the role of an agent away. It stays registered, and its token works as that of an agent.",
        "headgate role remove planner",
        agent=existing_agent,
    )


def _rows(answer: dict[str, Any]) -> Rows:
    return [
        [
            shown(one["name"]),
            shown(one["role"]),
            _KINDS.get(one["kind"]) or shown(one["kind"]),
            shown(one["by"]) or "-",
            "-" if one["at"] is None else local_time(one["at"]),
        ]
        for one in answer["admins"]
    ]


_LIST = ListCommand(
    lambda hub, _: hub.admins(),
    [Column("name", elastic=True), Column("role"), Column("token from"), Column("by"), Column("since")],
    _rows,
    "no admins",
)


def _add(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    note = f"{printable(options.agent)} is {_ROLES[options.role]}; the hub shows this token only once"
    try:
        answer = hub.add_admin(options.agent, options.role)
    except HubError as error:
        if error.code == "exists":
            command = f"headgate role set {shlex.quote(options.agent)} {options.role}"
            raise HubError(409, f"{error}; {command} gives it the role") from None
        raise
    return print_token(options, hub, answer, note)
