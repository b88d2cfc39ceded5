"""`headgate check`: one decision, for scripts."""

import argparse
import sys
from contextlib import closing
from typing import Any, Final

from headgate.cli.hub_api import HubError, add_options, hub_of
from headgate.cli.parser import Commands, command
from headgate.cli.terminal import GREEN, RED, YELLOW, harmless, painted, patience, print_json
from headgate.errors import HeadgateError, InvalidInput
from headgate.gate import Gate
from headgate.gate.policy import TIERS, Policy, PolicyError
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Outcome
from headgate.limits.fixed import UNLIMITED
from headgate.stores.base import Store
from headgate.stores.urls import server_store

DENIED: Final = 1
WRONG: Final = 2
UNDECIDED: Final = 3

_COLOURS: Final = {"allow": GREEN, "warn": YELLOW, "deny": RED, "exempt": GREEN}
_CHANNEL: Final = "ws"
_WITHIN: Final = 5.0  # seconds that a server has to answer


class _Usage(HeadgateError):
    """Options that don't go together."""


def add(commands: Commands) -> None:
    """Add the command."""
    check = command(
        commands,
        "check",
        _check,
        "ask for one decision, for scripts",
        "Ask whether an agent may do something, and count it, exactly as if the agent had asked: a denial is a "
        "violation. The hub is asked; with --store the server that hubs share, without a hub; and with --limit too, "
        "AGENT is any key under that limit.\n\n"
        f"The exit code is 0 when it passes, {DENIED} when it is denied, {WRONG} when the arguments can't be used, "
        f"and {UNDECIDED} when it couldn't be decided.",
        "headgate check planner --tier heavy && ./expensive-job",
        "headgate check planner --channel http --action post_task --peek --json",
        "headgate check planner --tier heavy --store redis://localhost --policy headgate.toml",
        "headgate check nightly-report --limit 1/hour --store redis://localhost",
        data=True,
    )
    check.add_argument("agent", metavar="AGENT", help="the agent's name, or the key")
    what = check.add_mutually_exclusive_group()
    what.add_argument("--tier", choices=TIERS, metavar="T", help=f"what it does: {', '.join(TIERS)}")
    what.add_argument("--action", metavar="A", help="what it does, such as message: the policy knows its tier")
    what.add_argument("--limit", metavar="LIMIT", help="such as '10/minute': no policy, this limit; with --store")
    check.add_argument("--channel", metavar="C", help=f"the channel, such as ws or http ({_CHANNEL})")
    check.add_argument("--cost", type=_cost, metavar="N", help="how many tokens it takes (1)")
    check.add_argument("--peek", action="store_true", help="only look: count nothing")
    check.add_argument("--store", metavar="URL", help="ask this Redis or Valkey server, not a hub")
    check.add_argument("--policy", metavar="FILE", help="the policy of whoever shares that server, in TOML")
    add_options(check)


def _check(options: argparse.Namespace) -> int:
    try:
        _look_at(options)
        told = _by_hub(options) if options.store is None else _by_store(options)
    except (_Usage, InvalidInput, PolicyError) as error:
        return _failed(WRONG, error)
    except HubError as error:
        return _failed(WRONG if error.status == 400 else UNDECIDED, error)
    except HeadgateError as error:
        return _failed(UNDECIDED, error)
    options.code = 0 if told["outcome"] != "deny" else DENIED  # first: it holds even if nobody reads what is printed
    if options.json:
        print_json(told)
    else:
        print(_sentence(told))
    return int(options.code)


def _failed(code: int, error: HeadgateError) -> int:
    print(f"headgate check: {error}", file=sys.stderr)
    return code


def _look_at(options: argparse.Namespace) -> None:
    """Refuse options that don't go together."""
    if options.store is not None and (hasattr(options, "hub") or hasattr(options, "token_file")):
        raise _Usage("--store: expected neither --hub nor --token-file, since no hub is asked then")
    if options.limit is not None:
        if options.store is None:
            raise _Usage("--limit: expected --store too, since a limit is counted somewhere")
        if options.channel is not None or options.policy is not None:
            raise _Usage("--limit: expected neither --channel nor --policy, which it stands for")
        return
    if options.tier is None and options.action is None:
        raise _Usage("expected --tier or --action" + ("" if options.store is None else ", or --limit"))
    if options.peek and options.cost is not None:
        raise _Usage("--cost: expected no --peek, which says what is left for any cost")
    if options.store is None and options.policy is not None:
        raise _Usage("--policy: expected --store too; a hub has its own policy")


def _by_hub(options: argparse.Namespace) -> dict[str, Any]:
    hub = hub_of(options)
    given = {"tier": options.tier, "action": options.action, "cost": options.cost}
    body = {"agent_id": options.agent, "channel": options.channel or _CHANNEL, "peek": options.peek}
    told = hub.ask("POST", "/api/admin/check", body | {name: one for name, one in given.items() if one is not None})
    hub.read(lambda: _sentence(told))
    return told


def _by_store(options: argparse.Namespace) -> dict[str, Any]:
    policy = Policy() if options.policy is None else Policy.load(options.policy)
    with patience("waiting for the server"), closing(server_store("--store", options.store, timeout=_WITHIN)) as store:
        store.verify()
        about, decision = _of_gate(options, policy, store) if options.limit is None else _of_limiter(options, store)
    if decision.degraded:
        raise HeadgateError("the server went away before it had decided")
    return about | described(decision)


def _of_gate(options: argparse.Namespace, policy: Policy, store: Store) -> tuple[dict[str, Any], Decision]:
    agent, channel, cost = options.agent, options.channel or _CHANNEL, options.cost or 1
    with Gate(policy, store=store) as gate:
        tier = options.tier or gate.tier_of(channel, options.action)
        if options.peek:
            decision = gate.peek(agent, channel, tier)
        else:
            decision = gate.check(agent, channel, options.tier, action=options.action, cost=cost)
    return {"agent_id": agent, "channel": channel, "tier": tier}, decision


def _of_limiter(options: argparse.Namespace, store: Store) -> tuple[dict[str, Any], Decision]:
    with Limiter(options.limit, store=store) as limiter:
        ask = limiter.peek if options.peek else limiter.check
        return {"key": options.agent}, ask(options.agent, options.cost or 1)


def described(decision: Decision) -> dict[str, Any]:
    """A decision as the hub's route /api/admin/check tells it, too."""
    return {
        "outcome": decision.outcome.value,
        "remaining": decision.remaining,
        "capacity": decision.limit.capacity,
        "limit": str(decision.limit),
        "retry_after_ms": decision.retry_ms,
        "exempt": decision.outcome is Outcome.EXEMPT,
        "violations": 0 if decision.violation is None else decision.violation.count,
        "would_be": None if decision.would_be is None else decision.would_be.value,
        "degraded": decision.degraded,
    }


def _sentence(told: dict[str, Any]) -> str:
    """What was decided, for people."""
    outcome, limit, wait = told["outcome"], harmless(str(told["limit"])), told["retry_after_ms"]
    lane = limit if "key" in told else harmless(f"{told['channel']} {told['tier']}, {limit}")
    left = f"{lane}: {int(told['remaining']):,} of {int(told['capacity']):,} left"
    if told["exempt"]:
        text = "it always passes, and nothing is counted"
    elif limit == str(UNLIMITED):
        text = lane
    elif outcome != "deny":
        text = left
    elif wait is None:
        text = f"no wait would help ({left})"
    else:
        text = f"try again in {int(wait) / 1000:g} s ({left})"
    if told["would_be"] is not None:
        text += f"; it is only watched, and would have been: {harmless(str(told['would_be']))}"
    if told["degraded"]:
        text += "; decided without the store, which is away"
    return f"{painted(outcome, _COLOURS[outcome], sys.stdout)}: {text}"


def _cost(text: str) -> int:
    cost = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    if not cost:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return cost
