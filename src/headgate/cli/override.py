"""`headgate override`: limits for single agents."""

import argparse
from typing import Any, Final

from headgate.cli.hub_api import HubApi, add_agent_command, add_hub_options, hub_from, note_unregistered
from headgate.cli.parser import Commands, add_command, add_group
from headgate.cli.terminal import Column, print_error, print_json, print_table
from headgate.errors import HeadgateError, printable
from headgate.limits.notation import parse

_SESSION: Final = "session"


def add(commands: Commands) -> None:
    verbs = add_group(commands, "override", "set, remove or list overrides")
    verb = add_command(
        verbs,
        "set",
        _set,
        "override limits of an agent",
        "Override limits of an agent, from its next request on. Overrides survive a restart; tiers that aren't named "
        "stay as they are. Limits are written as in the policy: 60/minute, '60/minute burst 10', unlimited.",
        "headgate override set planner heavy=100/minute",
        "headgate override set planner light=600/minute 'normal=5/second burst 20' --channel ws",
        "headgate override set planner session='100/second burst 200'",
        json=True,
    )
    add_hub_options(verb, agent=True)
    verb.add_argument(
        "limits",
        type=_tier_limit,
        action=_TierLimits,
        nargs="+",
        metavar="TIER=LIMIT",
        help="tier, such as heavy, and its limit; session: the limit of each of its sessions",
    )
    verb.add_argument("--channel", metavar="C", help="only on this channel, such as ws or http; not for sessions")
    add_agent_command(
        verbs,
        "remove",
        HubApi.remove_override,
        lambda agent, _: f"{agent} has no overrides now: the defaults apply",
        "remove the overrides of an agent",
        "Remove all overrides of an agent: the defaults apply to it again.",
        "headgate override remove planner",
    )
    verb = add_command(
        verbs, "list", _list, "list all overrides", "List the overrides of all agents.",
        "headgate override list", json=True,
    )  # fmt: skip
    add_hub_options(verb)


def _tier_limit(text: str) -> tuple[str, str]:
    tier, equals, limit = text.partition("=")
    if not equals or not tier.isidentifier():  # the hub knows the tiers of its policy
        raise argparse.ArgumentTypeError(
            f"expected a tier (or {_SESSION}) and a limit, such as heavy=100/minute, got {text!r}"
        )
    try:
        parse(limit)
    except HeadgateError as error:
        raise argparse.ArgumentTypeError(f"{tier}: {error}") from None
    return tier, limit


class _TierLimits(argparse.Action):
    """Limits by tier, each tier once."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        limits = dict(values)
        if len(limits) < len(values):
            parser.error(
                f"argument {self.metavar}: expected each tier once, got {' '.join([one[0] for one in values])}"
            )
        setattr(namespace, self.dest, limits)


def _set(options: argparse.Namespace) -> int:
    if options.channel is not None and _SESSION in options.limits:
        print_error("headgate override set: --channel: sessions have no channel: set session=… without --channel")
        return 2
    hub, agent = hub_from(options), options.agent
    answer = hub.set_override(agent, options.limits if options.channel is None else {options.channel: options.limits})
    if options.json:
        print_json(answer)
        return 0
    rows = hub.parse(
        lambda: _rows(_with_sessions({agent: answer["override"]}, {agent: answer.get("session_override")}))
    )
    print(f"overrides of {printable(agent)}:")
    _print(rows)
    note_unregistered(hub, agent)
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
    own = {agent: {"-": {_SESSION: limit}} for agent, limit in sessions.items() if limit is not None}
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
