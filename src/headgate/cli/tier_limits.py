"""Limits by tier as arguments, such as heavy=100/minute, for `headgate override set` and `headgate defaults set`."""

import argparse
from typing import Any, Final

from headgate.cli.parser import UsageError
from headgate.errors import HeadgateError
from headgate.limits.notation import parse

SESSION: Final = "session"  # beside the tiers


def add_tier_limits(parser: argparse.ArgumentParser) -> None:
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


def given_limits(options: argparse.Namespace) -> dict[str, Any]:
    """The limits as the hub takes them."""
    limits: dict[str, Any] = options.limits
    if options.channel is None:
        return limits
    if SESSION in limits:
        raise UsageError("--channel: sessions have no channel: set session=… without --channel")
    return {options.channel: limits}


def _tier_limit(text: str) -> tuple[str, str]:
    tier, equals, limit = text.partition("=")
    if not equals or not tier.isidentifier():  # the hub knows the tiers of its policy
        raise argparse.ArgumentTypeError(
            f"expected a tier (or {SESSION}) and a limit, such as heavy=100/minute, got {text!r}"
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
