"""What an edge counts with: a limiter, or a gate by agent or by address, asked in the same words."""

from collections.abc import Awaitable
from functools import lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import Final, Protocol, TypeAlias

from headgate.edges.requests import address_key
from headgate.gate import Gate
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Limit
from headgate.stores.memory import in_process

Decided: TypeAlias = Decision | Awaitable[Decision]

_LONGEST_KEY: Final = 256
_NOWHERE: Final = "0.0.0.0"  # noqa: S104 - whom a gate counts that comes from no address


class Counter(Protocol):
    """Counts for keys. Whether it answers at once or has to be awaited is settled when it is made."""

    def check(self, key: str, tier: str, cost: int) -> Decided: ...
    def charge(self, key: str, tier: str, cost: int) -> Decided: ...
    def refund(self, key: str, tier: str, cost: int) -> Decided: ...

    def limit(self, key: str, tier: str) -> Limit:
        """What a key is held to."""

    def label(self, tier: str) -> str:
        """What that is called in headers and bodies."""


class LimiterCounter:
    """Counts with a limiter, which knows no tiers."""

    def __init__(self, limiter: Limiter, label: str, *, wait: bool) -> None:
        self.limiter: Final = limiter
        self._limit: Final = limiter.limit
        self._label: Final = label
        # In memory nothing is waited for.
        self._check: Final = limiter.acheck if wait and in_process(limiter.store) is None else limiter.check
        self._charge: Final = limiter.acharge if wait else limiter.charge
        self._refund: Final = limiter.arefund if wait else limiter.refund

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

    def __init__(self, gate: Gate, channel: str, *, wait: bool) -> None:
        self._gate: Final = gate
        self._channel: Final = channel
        self._check: Final = gate.acheck if wait and in_process(gate.store) is None else gate.check
        self._charge: Final = gate.acharge if wait else gate.charge
        self._refund: Final = gate.arefund if wait else gate.refund

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
    """Counts those with a gate who aren't known, by address."""

    def __init__(self, gate: Gate, *, wait: bool) -> None:
        self._gate: Final = gate
        waits = wait and in_process(gate.store) is None
        self._check: Final = gate.acheck_address if waits else gate.check_address
        self._charge: Final = gate.acharge_address if wait else gate.charge_address
        self._refund: Final = gate.arefund_address if wait else gate.refund_address

    def check(self, key: str, tier: str, cost: int) -> Decided:
        return self._check(_routable(key), cost=cost)

    def charge(self, key: str, tier: str, cost: int) -> Decided:
        return self._charge(_routable(key), cost)

    def refund(self, key: str, tier: str, cost: int) -> Decided:
        return self._refund(_routable(key), cost)

    def limit(self, key: str, tier: str) -> Limit:
        return self._gate.policy.address_limit

    def label(self, tier: str) -> str:
        return "address"


def bounded(key: str) -> str:
    """A key of any length, as one that a store can well keep: of a long one its digest."""
    return key if len(key) <= _LONGEST_KEY else f"sha256:{sha256(key.encode(errors='surrogatepass')).hexdigest()}"


@lru_cache(maxsize=4096)
def by_address(address: str) -> str:
    """The key of an address for a limiter."""
    return bounded(address_key(address))


def _routable(address: str) -> str:
    try:
        ip_address(address)
    except ValueError:
        return _NOWHERE
    return address
