"""`headgate block`, `unblock` and `disconnect`: the emergency brake."""

import argparse
import re
from datetime import datetime
from time import time
from typing import Any, Final, NoReturn

from headgate.cli.answers import local_time, shown, whole
from headgate.cli.hub_api import HubApi, HubError
from headgate.cli.hub_commands import add_change_command, note_answer, note_unregistered
from headgate.cli.hub_options import existing_agent
from headgate.cli.parser import Commands
from headgate.errors import printable

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LONGEST: Final = 10 * 366 * 86_400  # seconds of a block with an end


def add(commands: Commands) -> None:
    block = add_change_command(
        commands,
        "block",
        _block,
        _blocked,
        "block an agent everywhere",
        "Block an agent on every channel and tier, from its next request on, on open connections too. A block wins "
        "over exemptions and overrides, and survives a restart. Without an end it holds until headgate unblock.",
        "headgate block planner",
        "headgate block planner --for 2h --reason 'it loops' --disconnect",
        "headgate block planner --until 2026-12-01T18:00",
        agent=existing_agent,
        note=note_answer,
    )
    block.add_argument("_unnamed", type=_refuse_unnamed, nargs="?", metavar="--for", help=argparse.SUPPRESS)
    end = block.add_mutually_exclusive_group()
    end.add_argument("--for", type=_from_now, dest="until", metavar="DURATION", help="such as 90s, 30m, 2h or 1d")
    end.add_argument(
        "--until", type=_moment, metavar="TIME", help="such as 2026-12-01T18:00, local, or with a zone such as Z"
    )
    block.add_argument("--reason", default="", metavar="TEXT", help="why; operators see it, the agent doesn't")
    block.add_argument("--disconnect", action="store_true", help="close the agent's connections to this hub, too")
    add_change_command(
        commands,
        "unblock",
        _unblock,
        lambda options, answer: (
            f"{printable(options.agent)} "
            + ("is no longer blocked: its limits apply" if answer["was_blocked"] else "was not blocked")
        ),
        "end the block of an agent",
        "End the block of an agent, from its next request on.",
        "headgate unblock planner",
        agent=existing_agent,
        note=lambda hub, options, answer: None if answer["was_blocked"] else note_unregistered(hub, options.agent),
    )
    add_change_command(
        commands,
        "disconnect",
        lambda hub, options: hub.disconnect(options.agent),
        _closed,
        "close the connections of an agent",
        "Close all WebSocket connections of an agent to this hub. It may connect again at once; headgate block and "
        "headgate revoke keep it out.",
        "headgate disconnect planner",
        agent=existing_agent,
        note=lambda hub, options, answer: None if answer["connections"] else note_unregistered(hub, options.agent),
    )


def _block(hub: HubApi, options: argparse.Namespace) -> dict[str, Any]:
    answer = hub.block(options.agent, options.until, options.reason)
    if options.disconnect:
        answer |= {"connections": hub.disconnect(options.agent)["connections"]}
    return answer


def _blocked(options: argparse.Namespace, answer: dict[str, Any]) -> str:
    end = "it is unblocked" if answer["until"] is None else local_time(answer["until"])
    reason = f" ({shown(answer['reason'])})" if answer["reason"] else ""
    closed = f"\n{_closed(options, answer)}" if "connections" in answer else ""
    return f"{printable(options.agent)} is blocked until {end}{reason}{closed}"


def _closed(options: argparse.Namespace, answer: dict[str, Any]) -> str:
    agent, number = printable(options.agent), whole(answer["connections"])
    return f"{agent} has no connections to this hub" if number == 0 else f"connections of {agent} closed: {number}"


def _unblock(hub: HubApi, options: argparse.Namespace) -> dict[str, Any]:
    """End a block. The hub's answer is the same if there was none, so it is asked before."""
    try:
        was_blocked = bool(hub.agent(options.agent).get("blocked"))
    except HubError as error:
        if error.status != 404:
            raise
        was_blocked = False
    return hub.unblock(options.agent) | {"was_blocked": was_blocked}


def _from_now(text: str) -> float:
    """The end of a duration that begins now, in seconds since 1970."""
    parts = re.fullmatch(r"(?:[0-9]{1,9}[smhdw])+", text) and re.findall(r"([0-9]+)(.)", text)
    seconds = sum([int(number) * _SECONDS[unit] for number, unit in parts or []])
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(
            f"expected a duration such as 90s, 30m, 2h or 1d, up to 10 years, got {text!r}"
        )
    return time() + seconds


def _refuse_unnamed(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"expected it before a duration, such as --for 10m, got {text!r} alone")


def _moment(text: str) -> float:
    """A time in the future, local unless it has a zone, in seconds since 1970."""
    try:
        moment = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(
            f"expected a time such as 2026-12-01T18:00 or 2026-12-01T18:00+02:00, got {text!r}"
        ) from None
    if not 0 < moment - time() <= _LONGEST:
        raise argparse.ArgumentTypeError(f"expected a time in the future, within 10 years, got {text!r}")
    return moment
