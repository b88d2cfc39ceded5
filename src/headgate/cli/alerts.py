"""`headgate alerts` and `headgate addresses`: who was denied too often."""

import argparse
from typing import Any

from headgate.cli.account_limits import amount
from headgate.cli.answers import local_time, number, shown, whole
from headgate.cli.hub_commands import ListCommand, Rows, add_limit_option
from headgate.cli.parser import Commands
from headgate.cli.terminal import Cell, Column


def add(commands: Commands) -> None:
    _ALERTS.add(
        commands,
        "alerts",
        "list alerts",
        "List the alerts, newest first: agents with many violations in a short time, the violations since then, what "
        "was denied most, and from where. headgate agents AGENT shows more, headgate block AGENT stops it. Alerts of "
        "accounts say how much of a budget is used.",
        "headgate alerts",
        "headgate alerts --open --json",
    )
    _ADDRESSES.add(
        commands,
        "addresses",
        "list denied addresses",
        "List the network addresses that were denied within the last hour, the worst first: connects, requests "
        "without a token, registrations and wrong tokens have a limit each per address.",
        "headgate addresses",
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--open", action="store_true", help="only open alerts")
    add_limit_option(parser)


def _alerts(answer: dict[str, Any]) -> Rows:
    alerts = [*answer["alerts"], *answer.get("account_alerts", [])]  # an older hub has none of accounts
    return [_alert(one) for one in sorted(alerts, key=lambda one: -number(one["raised_at"]))]


def _alert(one: dict[str, Any]) -> list[str | Cell]:
    state = "open" if one["resolved_at"] is None else f"resolved {local_time(one['resolved_at'])}"
    if "account" in one:
        tool = f" by {shown(one['tool'])}" if one["tool"] else ""
        used = f"{_share(one)} of {shown(one['limit'])}{tool}"
        return [local_time(one["raised_at"]), str(one["account"]), state, "-", used, "-"]
    return [
        local_time(one["raised_at"]),
        str(one["agent_id"]),
        state,
        str(whole(one["total"])),
        ", ".join([f"{shown(each['channel'])} {shown(each['action'])}" for each in one["actions"]]) or "-",
        shown(one["address"]) or "-",
    ]


def _share(one: dict[str, Any]) -> str:
    """How much of a budget is used, or that what was left was too little for a hold."""
    left = amount(one.get("left", "0"))  # an older hub doesn't tell
    too_little = number(one["share"]) == 1 and left != "0" and not left.startswith("-")
    return "too little left" if too_little else f"{whole(100 * number(one['share']))} %"


def _addresses(answer: dict[str, Any]) -> Rows:
    return [
        [shown(one["address"]), shown(one["purpose"]), str(whole(one["denials"])), local_time(one["last_at"])]
        for one in answer["addresses"]
    ]


_ALERTS = ListCommand(
    lambda hub, options: hub.alerts(options.limit, only_open=options.open),
    [Column("raised"), Column("who"), Column("state"), Column("violations", right=True),
     Column("what"), Column("address")],
    _alerts,
    "no alerts",
    viewer=True,
    arguments=_add_arguments,
)  # fmt: skip
_ADDRESSES = ListCommand(
    lambda hub, _: hub.addresses(),
    [Column("address"), Column("purpose"), Column("hour", right=True), Column("last denied")],
    _addresses,
    "no address was denied within the last hour",
    viewer=True,
)
