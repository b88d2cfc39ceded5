"""`headgate check`: one decision, for scripts."""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import closing
from threading import Thread
from typing import Any, Final, TypeVar

from headgate.cli.answers import whole
from headgate.cli.hub_api import HubError
from headgate.cli.hub_commands import note_unregistered
from headgate.cli.hub_options import add_hub_options, hub_from
from headgate.cli.parser import Commands, add_command, whole_number
from headgate.cli.terminal import GREEN, RED, YELLOW, coloured, print_error, print_json, waiting_for
from headgate.errors import HeadgateError, InvalidInput, printable
from headgate.gate import Gate
from headgate.gate.policy import Policy, PolicyError
from headgate.http import describe_decision
from headgate.limiter import Limiter
from headgate.limits.decision import Decision
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import parse
from headgate.stores.base import Store
from headgate.stores.urls import server_store

DENIED: Final = 1
INVALID: Final = 2
UNDECIDED: Final = 3

_COLOURS: Final = {"allow": GREEN, "warn": YELLOW, "deny": RED, "exempt": GREEN}
_CHANNEL: Final = "ws"
_TIMEOUT: Final = 5.0  # seconds for one answer of a server
_WITHIN: Final = 10.0  # seconds for all of them

T = TypeVar("T")


def add(commands: Commands) -> None:
    check = add_command(
        commands,
        "check",
        _run,
        "check one request, for scripts",
        "Check one request of an agent and count it, as if the agent had sent it: a denial is a violation. The hub "
        "decides. With --store, a Redis or Valkey server decides, without a hub; with --store and --limit, AGENT is "
        "any key, under that limit.\n\n"
        f"Exit codes: 0 allowed, {DENIED} denied, {INVALID} invalid arguments, {UNDECIDED} undecided: the hub or its "
        "store is unreachable, or refused.",
        "headgate check planner --tier heavy && ./expensive-job",
        "headgate check planner --channel http --action post_task --peek --json",
        "headgate check planner --tier heavy --store redis://localhost --policy headgate.toml",
        "headgate check nightly-report --limit 1/hour --store redis://localhost",
        json=True,
    )
    check.add_argument("agent", metavar="AGENT", help="name of the agent, or key")
    request = check.add_mutually_exclusive_group()
    request.add_argument("--tier", metavar="T", help="tier of the request, such as heavy")
    request.add_argument("--action", metavar="A", help="action, such as message; the policy maps it to a tier")
    request.add_argument(
        "--limit", metavar="LIMIT", help="limit, such as 10/minute, instead of a policy; requires --store"
    )
    check.add_argument("--channel", metavar="C", help=f"channel, such as ws or http (default: {_CHANNEL})")
    check.add_argument("--cost", type=whole_number(1), metavar="N", help="tokens that the request takes (default: 1)")
    check.add_argument("--peek", action="store_true", help="count nothing")
    check.add_argument("--store", metavar="URL", help="use this Redis or Valkey server, without a hub")
    check.add_argument(
        "--policy", metavar="FILE", help="policy file in TOML, for --store (default: the default policy)"
    )
    add_hub_options(check)


def _run(options: argparse.Namespace) -> int:
    try:
        _validate(options)
        answer = _by_hub(options) if options.store is None else _in_time(lambda: _by_store(options))
    except (InvalidInput, PolicyError) as error:
        return _fail(INVALID, str(error))
    except HubError as error:
        return _fail(INVALID, str(error)) if error.status == 400 else _fail(UNDECIDED, f"undecided: {error}")
    except HeadgateError as error:
        return _fail(UNDECIDED, f"undecided: {error}")
    except Exception as error:  # noqa: BLE001 - the exit code of a traceback would mean that the request is denied
        return _fail(UNDECIDED, f"undecided: {type(error).__name__}: {printable(str(error))}")
    options.code = 0 if answer["outcome"] != "deny" else DENIED  # first: printing may fail
    if options.json:
        print_json(answer)
    else:
        print(_summary(answer))
        if options.store is None:
            note_unregistered(hub_from(options), options.agent)
    return int(options.code)


def _fail(code: int, text: str) -> int:
    print_error(f"headgate check: {text}")
    return code


def _validate(options: argparse.Namespace) -> None:
    """Refuse options that can't be combined."""
    if options.store is not None and (hasattr(options, "hub") or hasattr(options, "token_file")):
        raise InvalidInput("--store: expected neither --hub nor --token-file: it uses no hub")
    if options.limit is not None:
        if options.store is None:
            raise InvalidInput("--limit: expected --store too")
        if options.channel is not None or options.policy is not None:
            raise InvalidInput("--limit: expected neither --channel nor --policy, which it replaces")
        parse(options.limit)
        return
    if options.tier is None and options.action is None:
        raise InvalidInput("expected --tier or --action" + ("" if options.store is None else ", or --limit"))
    if options.peek and options.cost is not None:
        raise InvalidInput("--cost: expected no --peek, which shows how much is left for any cost")
    if options.store is None and options.policy is not None:
        raise InvalidInput("--policy: expected --store too; a hub has its own policy")


def _by_hub(options: argparse.Namespace) -> dict[str, Any]:
    hub = hub_from(options)
    given = {"tier": options.tier, "action": options.action, "cost": options.cost}
    body = {"agent_id": options.agent, "channel": options.channel or _CHANNEL, "peek": options.peek}
    answer = hub.check(body | {name: one for name, one in given.items() if one is not None})
    hub.parse(lambda: _summary(answer))
    if answer["degraded"]:
        raise HeadgateError(f"{hub.url}: the hub's store is away, so the hub doesn't know what was used elsewhere")
    return answer


def _by_store(options: argparse.Namespace) -> dict[str, Any]:
    policy = Policy() if options.policy is None else Policy.load(options.policy)
    with closing(server_store("--store", options.store, timeout=_TIMEOUT)) as store:
        store.verify()
        subject, decision = _by_gate(options, policy, store) if options.limit is None else _by_limiter(options, store)
    if decision.degraded:
        raise HeadgateError("the server went away before the decision")
    return subject | describe_decision(decision)


def _in_time(decide: Callable[[], T]) -> T:
    """Decide in a thread: the timeout of a server's client begins anew with every byte that comes."""
    decided: Future[T] = Future()

    def run() -> None:
        try:
            decided.set_result(decide())
        except BaseException as error:  # noqa: BLE001 - raised below
            decided.set_exception(error)

    Thread(target=run, daemon=True).start()
    with waiting_for("the server"):
        finished, _ = wait([decided], _WITHIN)
    if not finished:
        raise HeadgateError(f"--store: expected a server that decides, got no decision within {_WITHIN:g} s")
    return decided.result()


def _by_gate(options: argparse.Namespace, policy: Policy, store: Store) -> tuple[dict[str, Any], Decision]:
    agent, channel, cost = options.agent, options.channel or _CHANNEL, options.cost or 1
    with Gate(policy, store=store) as gate:
        tier = gate.tier_of(channel, options.action) if options.tier is None else options.tier
        if options.peek:
            decision = gate.peek(agent, channel, tier)
        else:
            decision = gate.check(agent, channel, options.tier, action=options.action, cost=cost)
    return {"agent_id": agent, "channel": channel, "tier": tier}, decision


def _by_limiter(options: argparse.Namespace, store: Store) -> tuple[dict[str, Any], Decision]:
    with Limiter(options.limit, store=store) as limiter:
        ask = limiter.peek if options.peek else limiter.check
        return {"key": options.agent}, ask(options.agent, options.cost or 1)


def _summary(answer: dict[str, Any]) -> str:
    """A decision in one line."""
    outcome, limit, wait = answer["outcome"], printable(str(answer["limit"])), answer["retry_after_ms"]
    where = limit if "key" in answer else printable(f"{answer['channel']} {answer['tier']}, {limit}")
    left = f"{where}: {whole(answer['remaining']):,} of {whole(answer['capacity']):,} left"
    if answer["exempt"]:
        text = "all requests pass, none is counted"
    elif limit == str(UNLIMITED):
        text = where
    elif outcome != "deny":
        text = left
    elif wait is None:
        text = f"no wait would help ({left})"
    else:
        text = f"retry in {whole(wait) / 1000:g} s ({left})"
    if answer["would_be"] is not None:
        text += f"; in shadow mode, otherwise: {printable(str(answer['would_be']))}"
    return f"{coloured(outcome, _COLOURS[outcome], sys.stdout)}: {text}"
