"""`headgate register`, `rotate`, `revoke` and `invite`: the tokens of agents."""

import argparse
import shlex
from collections.abc import Callable
from functools import partial

from headgate.cli.hub_api import HubApi, HubError
from headgate.cli.hub_commands import Answer, add_change_command, add_hub_command, note_new_account, print_token
from headgate.cli.hub_options import agent_name, existing_agent, hub_from
from headgate.cli.parser import Commands
from headgate.errors import printable


def add(commands: Commands) -> None:
    register = add_hub_command(
        commands,
        "register",
        _register,
        "register an agent and print its token",
        "Register an agent, even where registration is closed. Its token alone is printed on standard output.",
        "TOKEN=$(headgate register planner --account acme/search)",
        agent=agent_name,
    )
    _add_account_options(register)
    add_hub_command(
        commands,
        "rotate",
        partial(_print_token, HubApi.rotate, "the old token of {} no longer works; the hub shows this one only once"),
        "replace the token of an agent",
        "Give an agent a new token, also after a revocation; the old one stops working. The new token alone is printed "
        "on standard output.",
        "TOKEN=$(headgate rotate planner)",
        agent=existing_agent,
    )
    add_change_command(
        commands,
        "revoke",
        lambda hub, options: hub.revoke(options.agent),
        lambda options, answer: (
            f"the token of {printable(options.agent)} "
            + ("is revoked: it can't connect any more" if answer["revoked"] else "was revoked before")
        ),
        "revoke the token of an agent",
        "Revoke the token of an agent and close its connections. Its name stays taken; headgate rotate gives it a new "
        "token.",
        "headgate revoke planner",
        agent=existing_agent,
    )
    invite = add_hub_command(
        commands,
        "invite",
        _invite,
        "create an invitation to register",
        "Create an invitation, a code for one registration. It alone is printed on standard output.",
        "INVITATION=$(headgate invite --account acme/search)",
    )
    _add_account_options(invite)


def _add_account_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--account", metavar="PATH", help="the account that the agent belongs to: acme/search")
    command.add_argument("--plan", metavar="PLAN", help="the plan of the agent")


def _account(options: argparse.Namespace) -> dict[str, str]:
    given = {"account": options.account, "plan": options.plan}
    return {name: value for name, value in given.items() if value is not None}


def _register(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    note = f"{printable(options.agent)} is registered; the hub shows this token only once"
    try:
        answer = hub.register(options.agent, **_account(options))
    except HubError as error:
        if error.code == "exists":
            raise HubError(409, f"{error}; headgate rotate {shlex.quote(options.agent)} gives it a new token") from None
        raise
    print_token(options, hub, answer, note)
    if not options.json:
        note_new_account(options.account or "", answer)
    return 0


def _print_token(make: Callable[[HubApi, str], Answer], note: str, options: argparse.Namespace) -> int:
    hub = hub_from(options)
    return print_token(options, hub, make(hub, options.agent), note.format(printable(options.agent)))


def _invite(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.invite(**_account(options))
    note = "valid for one registration"
    if answer.get("usable") is False:
        note = "registration is closed at this hub: nobody can use the invitation; headgate register registers an agent"
    return print_token(options, hub, answer, note, "invitation")
