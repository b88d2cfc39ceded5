"""What an operator asks of a hub: agents, overrides, exemptions, violations, and the live view of all of them."""

import argparse
import sys
from typing import Any

from headgate.cli.hub_api import Card, Hub, HubError, add_options, agent_name, hub_of, of_agent
from headgate.cli.parser import Commands, command, parent
from headgate.cli.terminal import Cell, Column, Progress, harmless, heat, is_live, print_json, print_table
from headgate.errors import HeadgateError
from headgate.gate.policy import TIERS
from headgate.limits.notation import parse

_LIMITS = "/api/admin/rate-limits"
_WHITELIST = f"{_LIMITS}/whitelist"
_MOST = 1000  # agents that a hub tells of at once


def add(commands: Commands) -> None:
    """Add the commands that ask a hub."""
    top = command(
        commands,
        "top",
        _top,
        "watch the agents, live in the terminal",
        "Watch the agents of a hub: how full their buckets are, who is denied, who waits. Keys sort and "
        "filter, exempt an agent and forget its violations; ? lists them. It needs pip install 'headgate[cli]'.",
        "headgate top",
        "headgate top --hub https://hub.example.org",
    )
    add_options(top, viewer=True)
    _add_agents(commands)
    _add_override(commands)
    _add_exempt(commands)
    _add_violations(commands)


def _top(options: argparse.Namespace) -> int:
    try:
        from headgate.cli import top
    except ImportError as error:
        raise HeadgateError(f"top needs more than the core: {error}; pip install 'headgate[cli]'") from error
    if not (sys.stdin.isatty() and is_live(sys.stdout)):
        raise HeadgateError("top: expected a terminal that it can draw on; headgate agents prints the same as lines")
    hub = hub_of(options, viewer=True, within=5.0)
    try:
        hub.fleet()
    except HubError as error:
        if error.status:  # it is there, and refuses; one that is away may come
            raise
    return top.run(hub)


# Agents ---------------------------------------------------------------------------------------------------------------


def _add_agents(commands: Commands) -> None:
    agents = command(
        commands,
        "agents",
        _agents,
        "list agents and how they stand",
        "List the agents that there is something to tell of: who is connected, asked for something within the last "
        "minutes, was denied within the hour, or has an override or an exemption. The fullest bucket of each is shown.",
        "headgate agents",
        "headgate agents --all --json",
        data=True,
    )
    agents.add_argument("--all", action="store_true", help="all that are registered; this needs the admin's token")
    add_options(agents, viewer=True)


def _agents(options: argparse.Namespace) -> int:
    hub = hub_of(options, viewer=True)
    told = hub.ask("GET", f"/api/dashboard/state?limit={_MOST}")
    found = hub.read(lambda: [{**one, "agent_id": str(one["agent_id"])} for one in told["agents"]])
    if options.all:
        found = _everybody(hub, {one["agent_id"]: one for one in found})
    elif len(found) == _MOST:
        print(f"only the first {_MOST:,} are listed; --all lists all", file=sys.stderr)
    if options.json:
        print_json({"agents": found})
        return 0
    cards = hub.read(lambda: [(Card.read(one), bool(one.get("revoked"))) for one in found])
    if not cards:
        print("no agent is registered" if options.all else "no agent is connected or was active lately")
        return 0
    columns = [
        Column("agent", elastic=True), Column("here"), Column("used", right=True), Column("left", right=True),
        Column("bucket"), Column("in a row", right=True), Column("hour", right=True), Column("wait", right=True),
        Column("marks"),
    ]  # fmt: skip
    print_table(columns, [_row(card, revoked) for card, revoked in cards])
    return 0


def _everybody(hub: Hub, known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The card of every agent that is registered; of one whose token was revoked, what the list says."""
    everybody: list[dict[str, Any]] = []
    with Progress() as progress:
        page = hub.registered()
        while page:
            for one in page:
                agent = one["agent_id"]
                card = known.get(agent) or _card(hub, agent)
                everybody.append({**card, "revoked": bool(one.get("revoked"))})
                progress.show(lambda: f"agents: {len(everybody):,}")
            page = hub.registered(after=page[-1]["agent_id"])
    return everybody


def _card(hub: Hub, agent: str) -> dict[str, Any]:
    try:
        return hub.ask("GET", of_agent("/api/admin/agents", agent))
    except HubError as error:
        if error.status != 404:
            raise
    nothing: dict[str, Any] = {"agent_id": agent, "connected": False, "usage": None, "violations": 0}
    nothing |= {"violations_last_hour": 0, "wait_left_ms": 0, "rate_limited": False}
    return nothing | {"exempt": False, "override": False}


def _row(card: Card, revoked: bool = False) -> list[str | Cell]:
    used = Cell("-") if card.used is None else Cell(f"{card.used:.0%}", heat(card.used))
    marks = [("exempt", card.exempt), ("override", card.override), ("revoked", revoked)]
    return [
        card.name,
        "yes" if card.connected else "no",
        used,
        card.left or "-",
        card.bucket or "-",
        str(card.violations),
        str(card.last_hour),
        waiting(card.wait_ms),
        " ".join([mark for mark, holds in marks if holds]),
    ]


def waiting(milliseconds: int) -> str:
    """A wait, in seconds."""
    return f"{milliseconds / 1000:.3g} s" if milliseconds else "-"


# Overrides ------------------------------------------------------------------------------------------------------------


def _add_override(commands: Commands) -> None:
    verbs = parent(commands, "override", "give agents limits of their own")
    one = command(
        verbs,
        "set",
        _override_set,
        "give an agent limits of its own",
        "Give an agent limits of its own, which hold from its next request on and survive a restart. Tiers that "
        "aren't named stay as they are. A limit is written as in the policy: 60/minute, '60/minute burst 10', "
        "unlimited.",
        "headgate override set planner heavy=100/minute",
        "headgate override set planner light=600/minute 'normal=5/second burst 20' --channel ws",
        data=True,
    )
    one.add_argument("agent", type=agent_name, metavar="AGENT", help="the agent's name")
    one.add_argument(
        "limits",
        type=_lane,
        action=_Lanes,
        nargs="+",
        metavar="TIER=LIMIT",
        help=f"one of {', '.join(TIERS)}, and its limit",
    )
    one.add_argument("--channel", metavar="C", help="on this channel only, such as ws or http")
    add_options(one)
    one = command(
        verbs,
        "remove",
        _override_remove,
        "put an agent back to the defaults",
        "Put an agent back to the defaults, on all channels.",
        "headgate override remove planner",
        data=True,
    )
    one.add_argument("agent", type=agent_name, metavar="AGENT", help="the agent's name")
    add_options(one)
    one = command(
        verbs, "list", _override_list, "list all overrides", "List every limit that some agent has of its own.",
        "headgate override list", data=True,
    )  # fmt: skip
    add_options(one)


def _lane(text: str) -> tuple[str, str]:
    tier, equals, limit = text.partition("=")
    if not equals or tier not in TIERS:
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(TIERS)} and a limit, such as heavy=100/minute, got {text!r}"
        )
    try:
        parse(limit)
    except HeadgateError as error:
        raise argparse.ArgumentTypeError(f"{tier}: {error}") from None
    return tier, limit


class _Lanes(argparse.Action):
    """Limits by tier, each tier once."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        limits = dict(values)
        if len(limits) < len(values):
            parser.error(
                f"argument {self.metavar}: expected each tier once, got {' '.join([one[0] for one in values])}"
            )
        setattr(namespace, self.dest, limits)


def _override_set(options: argparse.Namespace) -> int:
    hub, agent = hub_of(options), options.agent
    body = options.limits if options.channel is None else {options.channel: options.limits}
    told = hub.ask("PUT", of_agent(_LIMITS, agent), body)
    if options.json:
        print_json(told)
        return 0
    lanes = hub.read(lambda: _lanes({agent: told["override"]}))
    print(f"{harmless(agent)} has limits of its own now:")
    _print_lanes(lanes)
    _hint(hub, agent)
    return 0


def _override_remove(options: argparse.Namespace) -> int:
    told = hub_of(options).ask("DELETE", of_agent(_LIMITS, options.agent))
    if options.json:
        print_json(told)
    else:
        print(f"{harmless(options.agent)} is held to the defaults now")
    return 0


def _override_list(options: argparse.Namespace) -> int:
    hub = hub_of(options)
    told = hub.ask("GET", _LIMITS)
    overrides = hub.read(lambda: dict(told["overrides"]))
    if options.json:
        print_json({"overrides": overrides})
    elif not overrides:
        print("no agent has limits of its own")
    else:
        _print_lanes(hub.read(lambda: _lanes(overrides)))
    return 0


def _lanes(overrides: dict[str, Any]) -> list[list[str]]:
    return [
        [agent, channel, tier, str(limit)]
        for agent, channels in overrides.items()
        for channel, tiers in channels.items()
        for tier, limit in tiers.items()
    ]


def _print_lanes(lanes: list[list[str]]) -> None:
    print_table([Column("agent", elastic=True), Column("channel"), Column("tier"), Column("limit")], lanes)


def _hint(hub: Hub, agent: str) -> None:
    """Say so where nobody has that name yet: it may be misspelt."""
    try:
        hub.ask("GET", of_agent("/api/admin/agents", agent))
    except HubError as error:
        if error.status == 404:
            print(f"note: no agent called {harmless(agent)} is registered yet", file=sys.stderr)


# Exemptions -----------------------------------------------------------------------------------------------------------


def _add_exempt(commands: Commands) -> None:
    verbs = parent(commands, "exempt", "let agents always pass")
    for name, run, about, example in (
        ("add", _exempt_add, "let an agent always pass", "headgate exempt add monitor"),
        ("remove", _exempt_remove, "hold an agent to its limits again", "headgate exempt remove monitor"),
    ):
        one = command(
            verbs, name, run, about, f"{about[0].upper()}{about[1:]}, from its next request on.", example, data=True
        )
        one.add_argument("agent", type=agent_name, metavar="AGENT", help="the agent's name")
        add_options(one)
    one = command(
        verbs, "list", _exempt_list, "list the exempt agents", "List the agents that always pass.",
        "headgate exempt list", data=True,
    )  # fmt: skip
    add_options(one)


def _exempt_add(options: argparse.Namespace) -> int:
    hub = hub_of(options)
    told = hub.ask("POST", _WHITELIST, {"agent_id": options.agent})
    if options.json:
        print_json(told)
        return 0
    print(f"{harmless(options.agent)} is exempt now: it always passes, and nothing is counted")
    _hint(hub, options.agent)
    return 0


def _exempt_remove(options: argparse.Namespace) -> int:
    told = hub_of(options).ask("DELETE", of_agent(_WHITELIST, options.agent))
    if options.json:
        print_json(told)
    else:
        print(f"{harmless(options.agent)} is held to its limits now")
    return 0


def _exempt_list(options: argparse.Namespace) -> int:
    hub = hub_of(options)
    told = hub.ask("GET", _WHITELIST)
    agents = hub.read(lambda: [str(agent) for agent in told["agents"]])
    if options.json:
        print_json(told)
    else:
        print("\n".join(map(harmless, agents)) or "no agent is exempt")
    return 0


# Violations -----------------------------------------------------------------------------------------------------------


def _add_violations(commands: Commands) -> None:
    violations = command(
        commands,
        "violations",
        _violations,
        "list who was denied, or forget it",
        "List the agents that were denied within the last hour, the worst first; with reset, forget an agent's "
        "violations: its backoff ends, and it gets tasks again.",
        "headgate violations",
        "headgate violations reset planner",
        data=True,
    )
    add_options(violations)
    verbs = violations.add_subparsers(title="commands", metavar="COMMAND")
    reset = command(
        verbs,
        "reset",
        _reset,
        "forget an agent's violations",
        "Forget an agent's violations. What it has spent stays spent.",
        "headgate violations reset planner",
        data=True,
    )
    reset.add_argument("agent", type=agent_name, metavar="AGENT", help="the agent's name")
    add_options(reset)


def _violations(options: argparse.Namespace) -> int:
    hub = hub_of(options)
    told = hub.ask("GET", "/api/admin/violations")
    if options.json:
        print_json(told)
        return 0
    cards = hub.read(lambda: [Card.read(one) for one in told["agents"]])
    if not cards:
        print("no agent was denied within the last hour")
        return 0
    columns = [Column("agent", elastic=True), Column("hour", right=True), Column("in a row", right=True)]
    columns += [Column("wait", right=True), Column("marks")]
    rows = [[row[0], row[6], row[5], row[7], row[8]] for row in map(_row, cards)]
    print_table(columns, rows)
    return 0


def _reset(options: argparse.Namespace) -> int:
    hub = hub_of(options)
    told = hub.ask("DELETE", of_agent("/api/admin/violations", options.agent))
    if options.json:
        print_json(told)
    elif hub.read(lambda: bool(told["reset"])):
        print(f"the violations of {harmless(options.agent)} are forgotten")
    else:
        print(f"{harmless(options.agent)} had no violations that still counted")
        _hint(hub, options.agent)
    return 0
