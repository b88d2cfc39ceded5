"""`headgate defaults`: the limits of agents without overrides."""

import argparse
from typing import Any

from headgate.cli.answers import shown
from headgate.cli.hub_commands import ListCommand, Rows, add_hub_command
from headgate.cli.hub_options import hub_from
from headgate.cli.parser import Commands
from headgate.cli.terminal import Column
from headgate.cli.tier_limits import SESSION, add_tier_limits, given_limits
from headgate.errors import HeadgateError, printable


def add(commands: Commands) -> None:
    verbs = _LIST.add_group(
        commands,
        "defaults",
        "list, set or reset the default limits",
        "List the default limits. With set, change them for all agents without overrides; with reset, go back to the "
        "policy of the hub.",
        "headgate defaults",
        "headgate defaults set heavy=20/minute",
        "headgate defaults reset heavy",
    )
    verb = add_hub_command(
        verbs,
        "set",
        _set,
        "change default limits",
        "Change default limits, from the next request on. The changes survive a restart and overrule the policy file; "
        "tiers that aren't named stay as they are.",
        "headgate defaults set heavy=20/minute light=600/minute",
        "headgate defaults set 'normal=5/second burst 20' --channel ws",
        "headgate defaults set session='100/second burst 200'",
    )
    add_tier_limits(verb)
    verb = add_hub_command(
        verbs,
        "reset",
        _reset,
        "go back to the default limits of the policy",
        "Take changed default limits back, from the next request on: those of the hub's policy apply again.",
        "headgate defaults reset",
        "headgate defaults reset heavy session",
    )
    verb.add_argument(
        "tiers", nargs="*", metavar="TIER", help=f"tier, or {SESSION} for the limit of sessions (default: all of them)"
    )


def _rows(answer: dict[str, Any]) -> Rows:
    rows: Rows = [
        [channel, tier, shown(limit)] for channel, tiers in answer["defaults"].items() for tier, limit in tiers.items()
    ]
    return [*rows, ["-", SESSION, shown(answer["session"])]]


_LIST = ListCommand(
    lambda hub, _: hub.defaults(), [Column("channel"), Column("tier"), Column("limit")], _rows, "no limits"
)


def _set(options: argparse.Namespace) -> int:
    limits, hub = given_limits(options), hub_from(options)
    return _LIST.print(options, hub, hub.set_defaults(limits))


def _reset(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    if options.tiers:
        before = hub.defaults()
        _check_tiers(options.tiers, hub.parse(lambda: _tiers(before)))
    *_, answer = [hub.reset_defaults(tier) for tier in options.tiers or [None]]
    return _LIST.print(options, hub, answer)


def _tiers(answer: dict[str, Any]) -> list[str]:
    return [*dict.fromkeys([tier for tiers in answer["defaults"].values() for tier in tiers]), SESSION]


def _check_tiers(given: list[str], known: list[str]) -> None:
    """Refuse unknown tiers before anything is changed."""
    for tier in given:
        if tier not in known:
            raise HeadgateError(
                f"expected tiers of the hub's policy ({', '.join(map(printable, known))}), got {tier!r}"
            )
