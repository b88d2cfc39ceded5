"""`headgate accounts`, `levels` and `plans`: who pays for what agents do, and within which limits."""

import argparse
import shlex
from typing import Any, Final

from headgate.cli.account_limits import (
    COLUMNS,
    add_limits,
    add_resources,
    given_limits,
    limit_rows,
    removed_limits,
    table_rows,
)
from headgate.cli.answers import shown, whole
from headgate.cli.hub_api import HubApi
from headgate.cli.hub_commands import (
    ListCommand,
    add_change_command,
    add_hub_command,
    note_answer,
    note_new_account,
    print_answer,
    print_unregistered,
)
from headgate.cli.hub_options import add_hub_options, existing_agent, hub_from, path_part
from headgate.cli.parser import Commands, add_command
from headgate.cli.terminal import Column, print_error, table_text
from headgate.errors import printable
from headgate.gate.accounts import NO_ACCOUNT, split_path

_MEMBERS: Final = 20  # that are printed


def add(commands: Commands) -> None:
    verbs = _LIST.add_group(
        commands,
        "accounts",
        "list accounts, or change their limits",
        "List the accounts above the agents, each before those below it, with their limits: amounts "
        "spent, held and left, and the time of the reset.",
        "headgate accounts",
        "headgate accounts --within acme",
        "headgate accounts set acme/search usd='500/calendar month'",
    )
    _add_show(verbs)
    _add_changes(verbs)
    about_levels = "List the limits of each account of a level that has none of its own."
    _add_defaults(commands, "level", about_levels, "team", "usd='20/calendar day'", _LEVELS)
    _add_defaults(commands, "plan", "List the limits of plans.", "pro", "usd='60/calendar day'", _PLANS)


def _add_show(verbs: Commands) -> None:
    verb = add_hub_command(
        verbs,
        "show",
        _show,
        "show one account",
        "Show an account, an agent or a session by its path: its limits, and the accounts and agents in it.",
        "headgate accounts show acme/search",
        "headgate accounts show acme/search/planner",
    )
    _add_path(verb)


def _add_changes(verbs: Commands) -> None:
    verb = add_command(
        verbs,
        "set",
        _set,
        "limit an account",
        "Limit resources of an account or an agent, from the next hold on. A changed budget keeps what is spent and "
        "held, a changed rate begins full, and resources that aren't named keep their limits. Limits are written as in "
        "the policy; all of them are one change.",
        "headgate accounts set acme usd='500/calendar month' slots='20 in flight'",
        "headgate accounts set acme/search requests=100/minute --tool web",
        json=True,
    )
    _add_path(verb)
    add_limits(verb)
    add_hub_options(verb)
    verb = add_command(
        verbs,
        "unset",
        _unset,
        "go back to the limits of the policy",
        "Take changed limits of an account or an agent back, those of some resources, or all of them and its plan.",
        "headgate accounts unset acme/search usd",
        "headgate accounts unset acme/search",
        json=True,
    )
    _add_path(verb)
    add_resources(verb)
    add_hub_options(verb)
    verb = add_change_command(
        verbs,
        "plan",
        lambda hub, options: hub.set_account(options.path, {"plan": options.plan}),
        lambda _, answer: table_text(COLUMNS, limit_rows(answer)),
        "give an account a plan",
        "Give an account or an agent a plan of the policy; without one, that of the policy.",
        "headgate accounts plan acme pro",
        "headgate accounts plan acme/search/planner free",
        note=lambda _, options, answer: _note_path(options.path, answer, changed=options.plan is not None),
    )
    _add_path(verb)
    verb.add_argument("plan", nargs="?", metavar="PLAN", help="name of the plan (default: that of the policy)")
    verb = add_change_command(
        verbs,
        "move",
        _move,
        _moved,
        "move an agent to an account",
        "Let an agent belong to an account, from its next hold on. Its open holds are settled where they were made.",
        "headgate accounts move planner acme/search",
        "headgate accounts move planner -",
        agent=existing_agent,
        note=_note_moved,
    )
    to = "path of the account; '-' for none (default: that of the policy)"
    verb.add_argument("path", nargs="?", metavar="PATH", help=to)
    verb.add_argument("--plan", metavar="PLAN", help="give it this plan, too")


def _add_path(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", type=path_part, metavar="PATH", help="path of the account, such as acme/search")


def _add_defaults(
    commands: Commands, one: str, description: str, example: str, limit: str, listed: ListCommand
) -> None:
    """Add the commands for levels or plans. `one` is what one of them is, `example` its name, and `limit` its limit."""
    kind = f"{one}s"

    def run_set(options: argparse.Namespace) -> int:
        limits, hub = given_limits(options), hub_from(options)
        return listed.print(options, hub, hub.set_account_defaults(kind, options.name, limits))

    def run_unset(options: argparse.Namespace) -> int:
        limits, hub = removed_limits(options), hub_from(options)
        if limits:
            answer = hub.set_account_defaults(kind, options.name, limits)
        else:
            answer = hub.reset_account_defaults(kind, options.name)
        return listed.print(options, hub, answer)

    examples = (f"headgate {kind}", f"headgate {kind} set {example} {limit}")
    verbs = listed.add_group(commands, kind, f"list or change the limits of {kind}", description, *examples)
    verb = add_command(
        verbs, "set", run_set, f"change limits of a {one}",
        f"Change limits of a {one}, from the next hold on. Resources that aren't named keep their limits.",
        f"headgate {kind} set {example} usd='20/calendar day'",
        f"headgate {kind} set {example} requests=100/minute --tool web", json=True,
    )  # fmt: skip
    verb.add_argument("name", type=path_part, metavar=one.upper(), help=f"name of the {one}")
    add_limits(verb)
    add_hub_options(verb)
    verb = add_command(
        verbs, "unset", run_unset, "go back to the limits of the policy",
        f"Take changed limits of a {one} back, those of some resources or all.",
        f"headgate {kind} unset {example} usd", json=True,
    )  # fmt: skip
    verb.add_argument("name", type=path_part, metavar=one.upper(), help=f"name of the {one}")
    add_resources(verb)
    add_hub_options(verb)


# Lists ----------------------------------------------------------------------------------------------------------------


def _add_within(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--within", default=argparse.SUPPRESS, metavar="PATH", help="only this account and those below it"
    )


_LIST = ListCommand(
    lambda hub, options: {"accounts": hub.accounts(getattr(options, "within", ""))},
    COLUMNS,
    lambda answer: [row for one in answer["accounts"] for row in limit_rows(one)],
    "no accounts",
    arguments=_add_within,
)
_LEVELS = ListCommand(
    lambda hub, _: hub.account_defaults(),
    [Column("level"), Column("resource"), Column("limit")],
    lambda answer: table_rows({level: answer["level_limits"][level] for level in answer["levels"]}),
    "no level has limits",
)
_PLANS = ListCommand(
    lambda hub, _: hub.account_defaults(),
    [Column("plan"), Column("resource"), Column("limit")],
    lambda answer: table_rows(answer["plans"]),
    "no plan has limits",
)


# One account ----------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.account(options.path)
    return print_answer(
        options, hub, answer, lambda: "\n".join([table_text(COLUMNS, limit_rows(answer)), *_about(answer)])
    )


def _about(answer: dict[str, Any]) -> list[str]:
    """The notes on an account beside its limits."""
    members, count = [shown(one) for one in answer["members"]], whole(answer["agents"])
    below = [shown(one) for one in answer["accounts"]]
    lines = []
    if below:
        lines.append(f"accounts: {_some(below)}")
    if members:
        lines.append(f"agents: {_some(members)}")
    if count > len(members):
        lines.append(f"agents in all, with those of the accounts below: {count:,}")
    return lines


def _some(names: list[str]) -> str:
    more = len(names) - _MEMBERS
    return ", ".join(names[:_MEMBERS]) + (f" and {more:,} more" if more > 0 else "")


def _set(options: argparse.Namespace) -> int:
    limits, hub = given_limits(options), hub_from(options)
    return _print_limits(options, hub, hub.set_account(options.path, limits), changed=True)


def _unset(options: argparse.Namespace) -> int:
    limits, hub = removed_limits(options), hub_from(options)
    answer = hub.set_account(options.path, limits) if limits else hub.reset_account(options.path)
    return _print_limits(options, hub, answer, changed=False)


def _print_limits(options: argparse.Namespace, hub: HubApi, answer: dict[str, Any], *, changed: bool) -> int:
    print_answer(options, hub, answer, lambda: table_text(COLUMNS, limit_rows(answer)))
    if not options.json:
        _note_path(options.path, answer, changed=changed)
    return 0


def _note_path(path: str, answer: dict[str, Any], *, changed: bool) -> None:
    """Print a note if nothing had named an account before, or if the path ends in an agent that isn't registered.

    Unless it was `changed`, but only went back to the policy, nothing names it now.
    """
    if answer.get("registered") is False:
        print_unregistered(split_path(path)[-1])
    elif changed:
        note_new_account(path, answer)
    elif answer.get("known") is False:
        print_error(f"note: nothing names an account {printable(path)!r}")


def _move(hub: HubApi, options: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {"account": "" if options.path == NO_ACCOUNT else options.path}
    if options.plan is not None:
        body["plan"] = options.plan
    return hub.set_agent_account(options.agent, body)


def _moved(options: argparse.Namespace, answer: dict[str, Any]) -> str:
    account, plan = shown(answer["account"]), shown(answer["plan"])
    where = f"belongs to {account} now" if account else "belongs to no account now"
    return f"{printable(options.agent)} {where}" + (f", with the plan {plan}" if plan else "")


def _note_moved(hub: HubApi, options: argparse.Namespace, answer: dict[str, Any]) -> None:
    if options.path is None and not answer["account"]:  # it may have been forgotten
        agent = printable(options.agent)
        print_error(
            f"note: the policy names no account for {agent}, so only its own limits apply: "
            f"headgate accounts move {shlex.quote(agent)} PATH gives it one"
        )
    note_new_account(shown(answer["account"]), answer)
    note_answer(hub, options, answer)
