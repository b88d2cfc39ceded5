"""Holds in a store: a cost or a slot that is reserved now, and settled with what it really cost.

A hold belongs to the name and the key of its first ask, and is known there by an id. It is open until it is settled or
cancelled, or its lease ends. Then it has expired: its slots are free, and its costs stay counted, or come back if the
terms say so. For `keep` microseconds after its end it is remembered: a repeated verb changes nothing and gets the same
answer, and an expired hold can still be settled.

    state       settle(x)               cancel      extend              end of the lease
    open        settled with x          cancelled   open                expired
    expired     settled with x          cancelled   HoldError           -
    settled     the same x: settled     HoldError   HoldError           -
                else HoldError          (x = 0: settled)
    cancelled   x = 0: cancelled        cancelled   HoldError           -
                else HoldError
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Final, NamedTuple, NoReturn, Protocol, runtime_checkable

from headgate.errors import HeadgateError, HoldError
from headgate.limits.decision import Decision
from headgate.limits.meter import Meter
from headgate.limits.numbers import LARGEST, decimal_text
from headgate.stores.base import Ask, Store
from headgate.stores.hold_terms import CANCELLED as CANCELLED
from headgate.stores.hold_terms import DENIED as DENIED
from headgate.stores.hold_terms import EXPIRED as EXPIRED
from headgate.stores.hold_terms import MAX_OPEN_HOLDS as MAX_OPEN_HOLDS
from headgate.stores.hold_terms import OPEN as OPEN
from headgate.stores.hold_terms import SETTLED as SETTLED
from headgate.stores.hold_terms import HoldAnswer as HoldAnswer
from headgate.stores.hold_terms import HoldState as HoldState
from headgate.stores.hold_terms import HoldTerms as HoldTerms

MAX_CHARGES: Final = 32
"""Times at which one hold can have been charged, by extending it. What is added later counts as charged at the last."""


class ListedHold(NamedTuple):
    """A hold of a key."""

    hold_id: str
    state: HoldState
    costs: tuple[int, ...]
    left: int
    """Microseconds until its lease ends; 0 if it isn't open."""
    note: str = ""
    shape: str = ""


@runtime_checkable
class HoldStore(Store, Protocol):
    """A store that can hold. Each verb has an async twin."""

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        """Take every cost, and a slot where slots are counted, if all of the asks pass, and otherwise nothing.

        A cost of 0 takes nothing, and passes only if a cost of 1 would. The counts belong to the asks; the hold itself
        belongs to the name and the key of the first ask.

        With the id of a hold that exists, nothing is taken, and the answer is about that one; a `HoldError` if its
        costs were others.
        """

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        """End a hold, and count these costs instead of those that it has taken (None: the same).

        The asks' own are what it has taken, as far as the caller knows: only a store whose server is away needs them.
        `cancel` is the same with costs of 0, under another name.
        """

    def extend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        """Let an open hold have these costs in all, if more of them than it has passes, and a longer lease.

        The lease ends `lease` microseconds from now; it never becomes shorter, except that 0 ends it now. A denial
        changes nothing. None leaves costs, or the lease, as they are.
        """

    def find_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        """The state of a hold."""

    def list_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        """Up to `count` holds of a key that are open, and after them those that have expired, each by their ends.

        A store may also list those that were settled or cancelled, as long as it remembers them, after all others.
        """

    async def ahold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer: ...

    async def asettle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer: ...

    async def aextend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer: ...

    async def afind_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer: ...

    async def alist_holds(self, name: str, key: str, count: int) -> list[ListedHold]: ...


class Renewal(NamedTuple):
    """A longer lease for a hold: the arguments of `HoldStore.extend` but for the costs, which stay as they are."""

    asks: Sequence[Ask]
    low: int
    hold_id: str
    lease: int


@runtime_checkable
class RenewingStore(HoldStore, Protocol):
    """A store that renews many leases in one call."""

    def renew(self, renewals: Sequence[Renewal]) -> list[HoldAnswer | HeadgateError]:
        """The answer of `extend` to each, or the error that it raises."""


class UsageRow(NamedTuple):
    """The count of a `headgate.limits.meter.Meter` on one day."""

    root: str
    key: str
    start: int
    """Of the day, in microseconds since 1970."""
    amount: int
    """In smallest units."""


@runtime_checkable
class AccountStore(HoldStore, Protocol):
    """A store with what accounts need besides holds. Each verb has an async twin."""

    def read_hold(self, name: str, key: str, hold_id: str) -> ListedHold | None:
        """A hold of a key, without knowing its asks, with its note and its shape; None if it is unknown."""

    def peek_each(self, asks: Sequence[Ask], low: int) -> tuple[Decision, ...]:
        """A peek for cost 1 at each piece of each ask, all at one moment."""

    def read_usage(self, name: str, first: int, last: int, root: str | None = None) -> list[UsageRow]:
        """The counts of meters under a name on days that start in this span (`last` excluded), of one root or all.

        What is asked under a meter has a root.
        """

    async def aread_hold(self, name: str, key: str, hold_id: str) -> ListedHold | None: ...

    async def apeek_each(self, asks: Sequence[Ask], low: int) -> tuple[Decision, ...]: ...

    async def aread_usage(self, name: str, first: int, last: int, root: str | None = None) -> list[UsageRow]: ...


def refuse_ended(asks: Sequence[Ask], hold_id: str, state: str, costs: Sequence[int], verb: str) -> NoReturn:
    """Refuse a verb on a hold that has ended."""
    shown = shown_costs(asks, costs)
    raise HoldError(f"hold {hold_id!r}: expected an open hold to {verb}, got one that is {state} with {shown}", state)


def refuse_other_costs(
    asks: Sequence[Ask], hold_id: str, state: str, costs: Sequence[int], got: Sequence[int]
) -> NoReturn:
    """Refuse to hold or settle once more with other costs."""
    known, shown = shown_costs(asks, costs), shown_costs(asks, got)
    raise HoldError(f"hold {hold_id!r}: expected {known}, with which it is {state}, got {shown}", state)


def refuse_other_limits(asks: Sequence[Ask], hold_id: str) -> NoReturn:
    """Refuse to change a hold under other limits: its costs are counted under those with which it was made."""
    limits = "; ".join([str(ask.limit) for ask in asks])
    raise HoldError(
        f"hold {hold_id!r}: expected the limits with which it was made, got {limits}; nothing has changed: settle it "
        "with a limiter that has the former limits"
    )


def refuse_more_holds(key: str, most: int = MAX_OPEN_HOLDS) -> NoReturn:
    raise HoldError(f"hold: expected at most {most} open holds of {key!r}, got one more; settle some first")


def refuse_uncountable() -> NoReturn:
    """Refuse a cost that would take a count too far: what isn't counted as a whole can't be given back as a whole."""
    raise HoldError(f"hold: expected costs with which every count is at most {LARGEST}, got more; nothing was counted")


def shown_costs(asks: Sequence[Ask], costs: Sequence[int]) -> str:
    """Costs as their caller writes them: by unit, if meters tell these."""
    pairs = list(zip([ask.limit for ask in asks], costs, strict=False))
    metered = [(limit, cost) for limit, cost in pairs if isinstance(limit, Meter) and limit.unit]
    if metered:
        shown = [f"{_decimal_text(cost, limit.unit_decimals)} {limit.unit}" for limit, cost in metered if cost]
        return f"costs {', '.join(shown) or 'of 0'}"
    shown = [_decimal_text(cost, limit.decimals) for limit, cost in pairs]
    return f"cost {shown[0]}" if len(shown) == 1 else f"costs {', '.join(shown)}"


def _decimal_text(cost: int, decimals: int) -> str:
    return decimal_text(Fraction(cost, 10**decimals))
