"""Asks: what a store is asked to count. They are compiled, since a hold on five levels makes eight.

A limit whose parts are counted one by one becomes several asks.
"""

from collections.abc import Sequence
from typing import Final

from headgate._native import mypyc_attr
from headgate.limits.all_of import AllOf
from headgate.limits.decision import Decision, Limit, Value


@mypyc_attr(acyclic=True)
class Ask(Value):
    """One key under one limit, and the cost."""

    __slots__ = ("cost", "key", "limit", "name", "root")

    def __init__(self, name: str, key: str, limit: Limit, cost: int, root: str = "") -> None:
        self.name: Final = name
        """The limiter's name. Limiters with different names or different limits count equal keys apart."""
        self.key: Final = key
        self.limit: Final = limit
        self.cost: Final = cost
        self.root: Final = root
        """The key beside which it is stored, so that both are in one slot of a cluster; "": it stands by itself."""

    def with_cost(self, cost: int) -> "Ask":
        return Ask(self.name, self.key, self.limit, cost, self.root)

    def with_limit(self, limit: Limit) -> "Ask":
        return Ask(self.name, self.key, limit, self.cost, self.root)

    def _fields(self) -> tuple[str, str, Limit, int, str]:
        return self.name, self.key, self.limit, self.cost, self.root

    def __repr__(self) -> str:
        beside = f", root={self.root!r}" if self.root else ""
        return f"Ask({self.name!r}, {self.key!r}, {self.limit!r}, {self.cost}{beside})"


def pieces_of(asks: Sequence[Ask]) -> Sequence[Ask]:
    """The asks, with one for each piece of a limit."""
    for ask in asks:
        if isinstance(ask.limit, AllOf) and len(ask.limit.pieces) > 1:
            return [one.with_limit(piece) for one in asks for piece in one.limit.pieces]
    return asks


def place_in(decision: Decision, asks: Sequence[Ask], pieces: Sequence[Ask]) -> Decision:
    """The decision on pieces, as one on the asks: its place is that of the ask, or of the part if there is only one."""
    place = decision.bound
    if pieces is asks or len(asks) == 1 or place is None:
        return decision
    for position, ask in enumerate(asks):
        place -= len(ask.limit.pieces)
        if place < 0:
            return decision.at(position)
    return decision
