"""Stores: where the state of limits lives, and whose clock counts."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from headgate.clock import Clock
from headgate.core import Decision, Limit


class Verb(Enum):
    """What a store is asked to do with a cost."""

    CHECK = "check"
    """Take it, if every limit has it."""
    PEEK = "peek"
    """Say what a check would say, and take nothing."""
    CHARGE = "charge"
    """Take it, even if that leaves a debt."""
    REFUND = "refund"
    """Give it back, up to the capacity."""


class Ask(NamedTuple):
    """One key, under one limit, and what it costs."""

    name: str
    """The limiter's. Equal keys of limiters with different names, or with different limits, don't meet."""
    key: str
    limit: Limit
    cost: int


class Store(Protocol):
    """Keeps what is counted. `headgate.stores.conformance` holds every store to what is said here."""

    @property
    def clock(self) -> Clock:
        """The clock on which callers wait."""

    def apply(self, verb: Verb, asks: Sequence[Ask], low: int) -> Decision:
        """Carry out one verb on all of the asks in one atomic step, and describe what came of it.

        CHECK takes every cost if all of them pass, and otherwise none. CHARGE and REFUND answer as a PEEK for cost 1
        would right after them. `low` is the share of the capacity, in thousandths, below which a decision warns. Where
        there are several asks, the decision is that of the one that bound. Each key may be asked once.
        """

    async def aapply(self, verb: Verb, asks: Sequence[Ask], low: int) -> Decision:
        """`apply`, for an event loop."""

    def forget(self, name: str, key: str, limit: Limit) -> bool:
        """Drop what is counted for a key, and say whether there was anything."""

    async def aforget(self, name: str, key: str, limit: Limit) -> bool:
        """`forget`, for an event loop."""
