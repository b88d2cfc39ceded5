"""Asks as stores count them: a limit whose parts are counted one by one becomes several asks."""

from collections.abc import Sequence

from headgate.limits.all_of import AllOf
from headgate.limits.decision import Decision
from headgate.stores.base import Ask


def pieces_of(asks: Sequence[Ask]) -> Sequence[Ask]:
    """The asks, with one for each piece of a limit."""
    for ask in asks:
        if isinstance(ask[2], AllOf) and len(ask[2].pieces) > 1:
            return [Ask(one.name, one.key, piece, one.cost, one.root) for one in asks for piece in one.limit.pieces]
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
