"""`headgate override` and `headgate defaults`: limits by tier, of single agents and of all others."""

import argparse
from typing import Any, Final

from headgate.cli.answers import shown
from headgate.cli.hub_commands import ListCommand, Rows, add_change_command, add_hub_command, note_answer
from headgate.cli.hub_options import agent_name, hub_from
from headgate.cli.parser import Commands, UsageError
from headgate.cli.terminal import Column, table_text
from headgate.errors import HeadgateError, printable
from headgate.limits.notation import parse

_SESSION: Final = "session"  # beside the tiers


def add(commands: Commands) -> None:
    _add_override(commands)
    _add_defaults(commands)


# Overrides ------------------------------------------------------------------------------------------------------------


def _add_override(commands: Commands) -> None:
    verbs = _OVERRIDES.add_group(
        commands,
        "override",
        "list, set or remove overrides",
        "List the overrides of all agents. With set, override limits of an agent; with remove, let the defaults apply.",
        "headgate override",
        "headgate override set planner heavy=100/minute",
    )
    verb = add_change_command(
        verbs,
        "set",
        lambda hub, options: hub.set_override(options.agent, _given_limits(options)),
        _override_text,
        "override limits of an agent",
        "Override limits of an agent, from its next request on. Overrides survive a restart; tiers that aren't named "
        "stay as they are. Limits are written as in the policy: 60/minute, '60/minute burst 10', unlimited.",
        "headgate override set planner heavy=100/minute",
        "headgate override set planner light=600/minute 'normal=5/second burst 20' --channel ws",
        "headgate override set planner session='100/second burst 200'",
        agent=agent_name,
        note=note_answer,
    )
    _add_tier_limits(verb)
    add_change_command(
        verbs,
        "remove",
        lambda hub, options: hub.remove_override(options.agent),
        lambda options, _: f"{printable(options.agent)} has no overrides now: the defaults apply",
        "remove the overrides of an agent",
        "Remove all overrides of an agent: the defaults apply to it again.",
        "headgate override remove planner",
        agent=agent_name,
    )


def _override_text(options: argparse.Namespace, answer: dict[str, Any]) -> str:
    agent = options.agent
    rows = _override_rows({agent: answer["override"]}, {agent: answer.get("session_override")})
    return f"overrides of {printable(agent)}:\n{table_text(_OVERRIDES.columns, rows)}"


def _override_rows(overrides: dict[str, Any], sessions: dict[str, str | None]) -> Rows:
    """The overrides of tiers and of sessions in one table."""
    own = {agent: {"-": {_SESSION: limit}} for agent, limit in sessions.items() if limit is not None}
    return [
        [agent, channel, tier, str(limit)]
        for agent in sorted({*overrides, *own})
        for channel, tiers in {**overrides.get(agent, {}), **own.get(agent, {})}.items()
        for tier, limit in tiers.items()
    ]


_OVERRIDES = ListCommand(
    lambda hub, _: hub.overrides(),
    [Column("agent", elastic=True), Column("channel"), Column("tier"), Column("limit")],
    lambda answer: _override_rows(answer["overrides"], answer["session_overrides"]),
    "no agent has overrides",
)


# Defaults -------------------------------------------------------------------------------------------------------------


def _add_defaults(commands: Commands) -> None:
    verbs = _DEFAULTS.add_group(
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
        _set_defaults,
        "change default limits",
        "Change default limits, from the next request on. The changes survive a restart and overrule the policy file; "
        "tiers that aren't named stay as they are.",
        "headgate defaults set heavy=20/minute light=600/minute",
        "headgate defaults set 'normal=5/second burst 20' --channel ws",
        "headgate defaults set session='100/second burst 200'",
    )
    _add_tier_limits(verb)
    verb = add_hub_command(
        verbs,
        "reset",
        _reset_defaults,
        "go back to the default limits of the policy",
        "Take changed default limits back, from the next request on: those of the hub's policy apply again.",
        "headgate defaults reset",
        "headgate defaults reset heavy session",
    )
    verb.add_argument(
        "tiers", nargs="*", metavar="TIER", help=f"tier, or {_SESSION} for the limit of sessions (default: all of them)"
    )


def _default_rows(answer: dict[str, Any]) -> Rows:
    rows: Rows = [
        [channel, tier, shown(limit)] for channel, tiers in answer["defaults"].items() for tier, limit in tiers.items()
    ]
    return [*rows, ["-", _SESSION, shown(answer["session"])]]


_DEFAULTS = ListCommand(
    lambda hub, _: hub.defaults(), [Column("channel"), Column("tier"), Column("limit")], _default_rows, "no limits"
)


def _set_defaults(options: argparse.Namespace) -> int:
    limits, hub = _given_limits(options), hub_from(options)
    return _DEFAULTS.print(options, hub, hub.set_defaults(limits))


def _reset_defaults(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    if options.tiers:
        before = hub.defaults()
        _check_tiers(options.tiers, hub.parse(lambda: _tiers(before)))
    *_, answer = [hub.reset_defaults(tier) for tier in options.tiers or [None]]
    return _DEFAULTS.print(options, hub, answer)


def _tiers(answer: dict[str, Any]) -> list[str]:
    return [*dict.fromkeys([tier for tiers in answer["defaults"].values() for tier in tiers]), _SESSION]


def _check_tiers(given: list[str], known: list[str]) -> None:
    """Refuse unknown tiers before anything is changed."""
    for tier in given:
        if tier not in known:
            raise HeadgateError(
                f"expected tiers of the hub's policy ({', '.join(map(printable, known))}), got {tier!r}"
            )


# Arguments such as heavy=100/minute -----------------------------------------------------------------------------------


def _add_tier_limits(parser: argparse.ArgumentParser) -> None:
    """Add the arguments TIER=LIMIT and the option --channel."""
    parser.add_argument(
        "limits",
        type=_tier_limit,
        action=_TierLimits,
        nargs="+",
        metavar="TIER=LIMIT",
        help="tier, such as heavy, and its limit; session: the limit of each session",
    )
    parser.add_argument("--channel", metavar="C", help="only on this channel, such as ws or http; not for sessions")


def _given_limits(options: argparse.Namespace) -> dict[str, Any]:
    """The limits as the hub takes them."""
    limits: dict[str, Any] = options.limits
    if options.channel is None:
        return limits
    if _SESSION in limits:
        raise UsageError("--channel: sessions have no channel: set session=… without --channel")
    return {options.channel: limits}


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
            tiers = " ".join([one[0] for one in values])
            parser.error(f"argument {self.metavar}: expected each tier once, got {tiers}")
        setattr(namespace, self.dest, limits)
