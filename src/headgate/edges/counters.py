"""The counters of an edge: a limiter, or a gate by agent or by address, behind one interface."""

from collections.abc import Awaitable
from functools import lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import Final, Protocol, TypeAlias

from headgate.errors import InvalidInput
from headgate.gate import Gate
from headgate.gate.lookup import counted_as
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Limit
from headgate.stores.memory import in_process

Decided: TypeAlias = Decision | Awaitable[Decision]

_LONGEST_KEY: Final = 256
_NO_ADDRESS: Final = "0.0.0.0"  # noqa: S104 - the address that a gate counts for peers without one


class RequestCounter(Protocol):
    """Counts requests by key. With `awaits` its decisions have to be awaited."""

    @property
    def awaits(self) -> bool: ...

    def check(self, key: str, tier: str, cost: int) -> Decided: ...
    def charge(self, key: str, tier: str, cost: int) -> Decided: ...
    def refund(self, key: str, tier: str, cost: int) -> Decided: ...

    def limit(self, key: str, tier: str) -> Limit:
        """The limit of a key."""

    def label(self, tier: str) -> str:
        """The limit's name in headers and bodies."""


class LimiterCounter:
    """Counts with a limiter, which knows no tiers."""

    def __init__(self, limiter: Limiter, label: str, *, awaits: bool) -> None:
        self.limiter: Final = limiter
        self._limit: Final = limiter.limit
        self._label: Final = label
        self.awaits: Final = awaits and in_process(limiter.store) is None  # in memory nothing is awaited
        self._check: Final = limiter.acheck if self.awaits else limiter.check
        self._charge: Final = limiter.acharge if self.awaits else limiter.charge
        self._refund: Final = limiter.arefund if self.awaits else limiter.refund

    def check(self, key: str, tier: str, cost: int) -> Decided:
        return self._check(key, cost)

    def charge(self, key: str, tier: str, cost: int) -> Decided:
        return self._charge(key, cost)

    def refund(self, key: str, tier: str, cost: int) -> Decided:
        return self._refund(key, cost)

    def limit(self, key: str, tier: str) -> Limit:
        return self._limit

    def label(self, tier: str) -> str:
        return self._label


class AgentCounter:
    """Counts agents with a gate, on one of its channels."""

    def __init__(self, gate: Gate, channel: str, *, awaits: bool) -> None:
        self._gate: Final = gate
        self._channel: Final = channel
        self.awaits: Final = awaits and in_process(gate.store) is None
        self._check: Final = gate.acheck if self.awaits else gate.check
        self._charge: Final = gate.acharge if self.awaits else gate.charge
        self._refund: Final = gate.arefund if self.awaits else gate.refund

    def check(self, key: str, tier: str, cost: int) -> Decided:
        return self._check(key, self._channel, tier, cost=cost)

    def charge(self, key: str, tier: str, cost: int) -> Decided:
        return self._charge(key, self._channel, tier, cost)

    def refund(self, key: str, tier: str, cost: int) -> Decided:
        return self._refund(key, self._channel, tier, cost)

    def limit(self, key: str, tier: str) -> Limit:
        return self._gate.limits_for(key, self._channel, tier)

    def label(self, tier: str) -> str:
        return tier


class AddressCounter:
    """Counts anonymous callers with a gate, by address."""

    def __init__(self, gate: Gate, *, awaits: bool) -> None:
        self._gate: Final = gate
        self.awaits: Final = awaits and in_process(gate.store) is None
        self._check: Final = gate.acheck_address if self.awaits else gate.check_address
        self._charge: Final = gate.acharge_address if self.awaits else gate.charge_address
        self._refund: Final = gate.arefund_address if self.awaits else gate.refund_address

    def check(self, key: str, tier: str, cost: int) -> Decided:
        return self._check(_ip_address(key), cost=cost)

    def charge(self, key: str, tier: str, cost: int) -> Decided:
        return self._charge(_ip_address(key), cost)

    def refund(self, key: str, tier: str, cost: int) -> Decided:
        return self._refund(_ip_address(key), cost)

    def limit(self, key: str, tier: str) -> Limit:
        return self._gate.policy.address_limits["request"]

    def label(self, tier: str) -> str:
        return "address"


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
