"""The counters of an edge: a limiter, or a gate by agent or by address, behind one interface."""

from collections.abc import Awaitable, Callable
from functools import lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import Final, NamedTuple, TypeAlias

from headgate.errors import InvalidInput
from headgate.gate import Gate
from headgate.gate.lookup import counted_as
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Limit
from headgate.stores.memory import in_process

Decided: TypeAlias = Decision | Awaitable[Decision]

_LONGEST_KEY: Final = 256
_NO_ADDRESS: Final = "0.0.0.0"  # noqa: S104 - the address that a gate counts for peers without one


class RequestCounter(NamedTuple):
    """Counts requests by key, tier and cost. With `awaits` its decisions have to be awaited."""

    awaits: bool
    check: Callable[[str, str, int], Decided]
    charge: Callable[[str, str, int], Decided]
    refund: Callable[[str, str, int], Decided]
    limit: Callable[[str, str], Limit]
    """The limit of a key, under a tier."""
    label: Callable[[str], str]
    """The name in headers and bodies of a tier's limit."""
    limiter: Limiter | None = None
    """The limiter that counts; None where a gate does."""


def limiter_counter(limiter: Limiter, label: str, *, awaits: bool) -> RequestCounter:
    """Counts with a limiter, which knows no tiers."""
    awaits = awaits and in_process(limiter.store) is None  # in memory nothing is awaited
    check = limiter.acheck if awaits else limiter.check
    charge = limiter.acharge if awaits else limiter.charge
    refund = limiter.arefund if awaits else limiter.refund
    return RequestCounter(
        awaits,
        lambda key, tier, cost: check(key, cost),
        lambda key, tier, cost: charge(key, cost),
        lambda key, tier, cost: refund(key, cost),
        lambda key, tier: limiter.limit,
        lambda tier: label,
        limiter,
    )


def agent_counter(gate: Gate, channel: str, *, awaits: bool) -> RequestCounter:
    """Counts agents with a gate, on one of its channels."""
    awaits = awaits and in_process(gate.store) is None
    check = gate.acheck if awaits else gate.check
    charge = gate.acharge if awaits else gate.charge
    refund = gate.arefund if awaits else gate.refund
    return RequestCounter(
        awaits,
        lambda key, tier, cost: check(key, channel, tier, cost=cost),
        lambda key, tier, cost: charge(key, channel, tier, cost),
        lambda key, tier, cost: refund(key, channel, tier, cost),
        lambda key, tier: gate.limits_for(key, channel, tier),
        lambda tier: tier,
    )


def address_counter(gate: Gate, *, awaits: bool) -> RequestCounter:
    """Counts anonymous callers with a gate, by address."""
    awaits = awaits and in_process(gate.store) is None
    check = gate.acheck_address if awaits else gate.check_address
    charge = gate.acharge_address if awaits else gate.charge_address
    refund = gate.arefund_address if awaits else gate.refund_address
    return RequestCounter(
        awaits,
        lambda key, tier, cost: check(_ip_address(key), cost=cost),
        lambda key, tier, cost: charge(_ip_address(key), cost),
        lambda key, tier, cost: refund(_ip_address(key), cost),
        lambda key, tier: gate.policy.address_limit,
        lambda tier: "address",
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
