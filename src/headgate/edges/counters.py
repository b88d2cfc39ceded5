"""The counters of an edge: a limiter, or a gate by agent or by address, behind one interface."""

import logging
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from hashlib import sha256
from ipaddress import ip_address
from math import ceil
from typing import Any, Final, NamedTuple, TypeAlias

from headgate.edges.application import HeaderList
from headgate.edges.costs import ExactCost, decimals_of
from headgate.edges.limit_function import LimitFunction
from headgate.edges.request_hold import Held, hold_options, refuse_slots
from headgate.edges.requests import HttpRequest
from headgate.errors import InvalidInput
from headgate.gate import Gate
from headgate.gate.lookup import counted_as
from headgate.gate.policy import UNKNOWN_TIER
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Limit, Outcome
from headgate.limits.fixed import UNLIMITED
from headgate.stores.holds import HoldStore
from headgate.stores.memory import in_process

Decided: TypeAlias = Decision | Awaitable[Decision]

_log = logging.getLogger("headgate")

_LONGEST_KEY: Final = 256
_NO_ADDRESS: Final = "0.0.0.0"  # noqa: S104 - the address that a gate counts for peers without one


class RequestCounter(NamedTuple):
    """Counts requests by key, tier and cost. With `awaits` its decisions have to be awaited."""

    awaits: bool
    check: Callable[[str, str, ExactCost], Decided]
    charge: Callable[[str, str, ExactCost], Decided]
    refund: Callable[[str, str, ExactCost], Decided]
    limit: Callable[[str, str], Limit]
    """The limit of a key, under a tier."""
    label: Callable[[str], str]
    """The name in headers and bodies of a tier's limit."""
    bucket: Callable[[str], object]
    """Identifies where it counts under a tier, among the counters of one request."""
    limiter: Limiter | None = None
    """The limiter that counts; None where a gate does."""
    decimals: int | None = 0
    """How many the costs have that it counts; None where nothing is counted. A gate counts whole numbers."""
    hold: Callable[[str, ExactCost], Held] | None = None
    """Reserves a cost for a key until it is settled, and a slot if slots are limited; None where a check is enough."""

    @property
    def counts_slots(self) -> bool:
        return self.limiter is not None and self.limiter.limit.counts_slots


Counters: TypeAlias = tuple[RequestCounter, RequestCounter]
"""The counters by key and by address."""


class FastPath(NamedTuple):
    """All that is needed where a request counts under one limit, in memory, and nothing is left to do after it."""

    counter: RequestCounter
    check: Callable[[str, ExactCost], Decision]
    """The counter's, without a tier."""
    cost: ExactCost
    write_headers: Callable[[Decision], HeaderList]


FastPathFunction: TypeAlias = Callable[[HttpRequest], Awaitable[tuple[FastPath, str, bool]]]
"""Finds the fast path of a request, its key, and whether that is from the user's function."""


class LimitCounters(NamedTuple):
    """The counters of one limit, by key and by address."""

    by_key: FastPath
    by_address: FastPath

    @property
    def counters(self) -> Counters:
        return self.by_key.counter, self.by_address.counter


CountersFunction: TypeAlias = LimitFunction[LimitCounters]


def was_counted(decision: Decision) -> bool:
    """Whether a check that passed was counted where a refund would give its cost back.

    It was not if the caller is exempt, if only shadow mode let it pass, or if the store was away.
    """
    return not (decision.outcome is Outcome.EXEMPT or decision.would_be is Outcome.DENY or decision.degraded)


def limiter_counter(where: str, limiter: Limiter, label: str, *, awaits: bool, settles: bool) -> RequestCounter:
    """Counts with a limiter, which knows no tiers. What is settled later is held, if the store can do that."""
    awaits = awaits and in_process(limiter.store) is None  # in memory nothing is awaited
    settles = settles and limiter.limit is not UNLIMITED and isinstance(limiter.store, HoldStore)
    refuse_slots(where, limiter)
    hold: Callable[[str, ExactCost], Held] | None = None
    if settles or limiter.limit.counts_slots:
        hold = partial(limiter.ahold if awaits else limiter.hold, **hold_options(limiter))
    check = limiter.acheck if awaits else limiter.check
    charge = limiter.acharge if awaits else limiter.charge
    refund = limiter.arefund if awaits else limiter.refund
    bucket = id(limiter.store), limiter.name, limiter.limit
    return RequestCounter(
        awaits,
        lambda key, tier, cost: check(key, cost),
        lambda key, tier, cost: charge(key, cost),
        lambda key, tier, cost: refund(key, cost),
        lambda key, tier: limiter.limit,
        lambda tier: label,
        lambda tier: bucket,
        limiter,
        decimals_of(limiter.limit),
        hold,
    )


def agent_counter(gate: Gate, channel: str, *, awaits: bool) -> RequestCounter:
    """Counts agents with a gate, on one of its channels. A tier that a reload has removed counts as normal."""
    awaits = awaits and in_process(gate.store) is None
    logged: set[str] = set()

    def tier_instead(tier: str) -> str:
        """The tier to try after one was refused: the same, if the policy has it."""
        if tier in gate.policy.tiers:
            return tier
        if tier not in logged:
            logged.add(tier)
            _log.warning("the policy no longer has the tier %s: taken as %s", tier, UNKNOWN_TIER)
        return UNKNOWN_TIER

    def counted(verb: Callable[..., Any]) -> Callable[[str, str, ExactCost], Decided]:
        def count(key: str, tier: str, cost: ExactCost) -> Decided:
            try:
                decided: Decided = verb(key, channel, tier, cost=cost)
            except InvalidInput:
                decided = verb(key, channel, tier_instead(tier), cost=cost)
            return decided

        async def acount(key: str, tier: str, cost: ExactCost) -> Decision:
            try:
                decision: Decision = await verb(key, channel, tier, cost=cost)
            except InvalidInput:
                decision = await verb(key, channel, tier_instead(tier), cost=cost)
            return decision

        return acount if awaits else count

    def limit(key: str, tier: str) -> Limit:
        try:
            return gate.limits_for(key, channel, tier)
        except InvalidInput:
            return gate.limits_for(key, channel, tier_instead(tier))

    return RequestCounter(
        awaits,
        counted(gate.acheck if awaits else gate.check),
        counted(gate.acharge if awaits else gate.charge),
        counted(gate.arefund if awaits else gate.refund),
        limit,
        lambda tier: tier,
        lambda tier: (id(gate), tier_instead(tier)),
    )


def address_counter(gate: Gate, *, awaits: bool) -> RequestCounter:
    """Counts anonymous callers with a gate, by address."""
    awaits = awaits and in_process(gate.store) is None
    check = gate.acheck_address if awaits else gate.check_address
    charge = gate.acharge_address if awaits else gate.charge_address
    refund = gate.arefund_address if awaits else gate.refund_address
    return RequestCounter(
        awaits,
        lambda key, tier, cost: check(_ip_address(key), cost=ceil(cost)),
        lambda key, tier, cost: charge(_ip_address(key), ceil(cost)),
        lambda key, tier, cost: refund(_ip_address(key), ceil(cost)),
        lambda key, tier: gate.policy.address_limits["request"],
        lambda tier: "address",
        lambda tier: (id(gate), None),
    )


def bounded_key(key: str) -> str:
    """A key that a store can keep well: the digest of a long one."""
    return key if len(key) <= _LONGEST_KEY else f"sha256:{sha256(key.encode(errors='surrogatepass')).hexdigest()}"


@lru_cache(maxsize=4096)
def address_key(address: str) -> str:
    """The limiter's key of an address: an IPv6 address counts as its /64, anything else as itself."""
    try:
        return counted_as(address)
    except InvalidInput:
        return bounded_key(address)


def _ip_address(address: str) -> str:
    try:
        ip_address(address)
    except ValueError:
        return _NO_ADDRESS
    return address
