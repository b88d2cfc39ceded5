"""The makers of holds: limiters and gates."""

from typing import Any, Protocol

from headgate.errors import RateLimited
from headgate.limits.decision import Decision
from headgate.stores.holds import HoldStore


class HoldOwner(Protocol):
    """A maker of holds: it has the store, reads costs, and words denials."""

    @property
    def hold_store(self) -> HoldStore: ...

    @property
    def low(self) -> int:
        """The share of the capacity, in thousandths, below which a decision warns."""

    def read_costs(self, cost: object, unnamed: tuple[Any, ...], *, spent: bool = False) -> tuple[Any, ...]:
        """The cost of each ask, in smallest units, from what a caller gives: 0 or more.

        Of an ask for a resource that the caller doesn't name, it is what `unnamed` has in its place. What is `spent`
        already may be a Fraction: it can have more decimals than the limit counts. All other costs are whole.
        """

    def denial(self, key: str, decision: Decision) -> RateLimited:
        """The error for a denied hold."""

    def freed(self, key: str) -> None:
        """Something may have come back: those who wait for the key can look."""
