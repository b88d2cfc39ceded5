"""The costs of requests, exactly: whole numbers, or with as many decimals as their limit counts."""

from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Final, TypeAlias

from headgate.errors import refuse
from headgate.limits.decision import Decision, Limit
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.numbers import smallest_units

CostGiven: TypeAlias = int | float | Decimal | Fraction | str
"""A cost as an option, or from a user's function."""
ExactCost: TypeAlias = int | Fraction
"""A cost that was read, in whole tokens or units: an int if it is one."""

_ANY: Final = 6  # decimals of a cost where nothing is counted


def decimals_of(limit: Limit) -> int | None:
    """How many decimals the costs of a limit have; None where nothing is counted, so that any cost will do."""
    return None if limit is UNLIMITED or limit is BLOCKED else limit.decimals


def most_decimals(found: Iterable[int | None]) -> int | None:
    """The decimals in which a cost is read that several limits count: those with fewer count it rounded up."""
    return max([decimals for decimals in found if decimals is not None], default=None)


def read_cost(where: str, value: object, decimals: int | None, *, round_up: bool = False) -> ExactCost:
    """A cost, 0 or more, as an option or from a user's function. With `round_up` it may have too many decimals.

    >>> read_cost("cost", 2, 0), read_cost("cost", "0.05", 6), read_cost("cost", 1.0, 6)
    (2, Fraction(1, 20), 1)
    """
    if decimals is None:
        return value if type(value) is int and value >= 0 else ceil(read_cost(where, value, _ANY, round_up=True))
    if decimals:
        return _exact(smallest_units(where, value, decimals, zero=True, round_up=round_up), decimals)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        refuse(where, "a whole number, 0 or more, or a function that returns one", value)
    return value


def rounded_up(cost: ExactCost, decimals: int | None) -> ExactCost:
    """A cost as a limit with so many decimals counts it."""
    return cost if isinstance(cost, int) else _exact(ceil(cost * 10 ** (decimals or 0)), decimals or 0)


def more_requests(decision: Decision, cost: ExactCost) -> int:
    """How many more requests of this cost the limit that bound lets pass. Each takes one slot, whatever it costs."""
    if not decision.limit.counts_costs:
        return decision.remaining
    return decision.remaining // cost if isinstance(cost, int) else Fraction(decision.left) // cost


def _exact(units: int, decimals: int) -> ExactCost:
    cost = Fraction(units, 10**decimals)
    return cost.numerator if cost.denominator == 1 else cost
