"""The costs that a request has taken from its counters until it is settled: by a hold, or by a check."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headgate.edges.costs import ExactCost, most_decimals, rounded_up
from headgate.edges.counters import RequestCounter, was_counted
from headgate.edges.request_hold import RequestHold
from headgate.edges.requests import HttpRequest
from headgate.flow import Flow
from headgate.limits.decision import Decision, Outcome


class Reservation(NamedTuple):
    """The cost that a request has taken from one counter."""

    counter: RequestCounter
    key: str
    tier: str
    cost: ExactCost
    decision: Decision
    hold: RequestHold | None

    def settle(self, actual: ExactCost) -> Flow[object, None]:
        """Count this cost instead of the reserved one, and free the slot."""
        actual = rounded_up(actual, self.counter.decimals)
        more = actual - self.cost
        if self.hold is not None:
            known = yield from self.hold.settle(actual if more else None)
            if known or not self.counter.limit(self.key, self.tier).counts_costs:
                return
        if more > 0 and self.decision.outcome is not Outcome.EXEMPT:
            yield self.counter.charge(self.key, self.tier, more)
        elif more < 0 and self.hold is None and was_counted(self.decision):
            yield self.counter.refund(self.key, self.tier, -more)


class CheckedRequest(NamedTuple):
    """A request and the decision on it: of several counters, that of the one that denied it, or has the least left."""

    request: HttpRequest
    counter: RequestCounter
    key: str
    tier: str
    cost: ExactCost
    decision: Decision
    identified: bool
    """Whether `key` is from the user's function; otherwise it is the address."""
    hold: RequestHold | None = None
    reserved: tuple[Reservation, ...] | None = None
    """The cost that was taken from the counter, if it is another, under the hold if there is one."""

    @property
    def held(self) -> bool:
        """Whether anything of it has to be settled in any case."""
        return self.hold is not None or (self.reserved is not None and any(one.hold for one in self.reserved))

    @property
    def has_slot(self) -> bool:
        return self.held and any(one.counter.counts_slots for one in self._reserved())

    @property
    def decimals(self) -> int | None:
        """The most decimals that any of its counters counts."""
        return most_decimals(one.counter.decimals for one in self._reserved())

    def settle(self, actual: ExactCost) -> Flow[object, None]:
        """Count this cost instead of the reserved one wherever it was counted, and free its slots."""
        return settle_all(self._reserved(), actual)

    def cancel(self) -> Flow[object, None]:
        """Give everything back."""
        return self.settle(0)

    def release(self) -> Flow[object, None]:
        """Free its slots. What it costs stays counted."""
        return self.settle(self.cost)

    def _reserved(self) -> Sequence[Reservation]:
        if self.reserved is not None:
            return self.reserved
        if not self.decision:
            return ()
        return (Reservation(self.counter, self.key, self.tier, self.cost, self.decision, self.hold),)


def settle_all(reserved: Sequence[Reservation], actual: ExactCost) -> Flow[object, None]:
    """Settle all, even if some of them fail."""
    if reserved:
        try:
            yield from reserved[0].settle(actual)
        finally:
            yield from settle_all(reserved[1:], actual)


def reserve(counter: RequestCounter, key: str, tier: str, cost: ExactCost) -> Flow[object, Reservation]:
    """Take a cost from a counter, by a hold or by a check."""
    if counter.hold is None:
        return Reservation(counter, key, tier, cost, (yield counter.check(key, tier, cost)), None)
    hold = yield counter.hold(key, cost)
    assert counter.limiter is not None  # gates have no holds
    if hold:
        held = RequestHold(hold, counter.limiter, awaits=counter.awaits)
        return Reservation(counter, key, tier, cost, hold.decision, held)
    if hold.decision.degraded and not counter.limiter.limit.shares_counts:
        # While the store is away, holds may be denied where rates pass: only what it settles makes this one a hold.
        return Reservation(counter, key, tier, cost, (yield counter.check(key, tier, cost)), None)
    return Reservation(counter, key, tier, cost, hold.decision, None)


def reserve_all(
    counters: Iterable[tuple[RequestCounter, str]], key: str, cost: ExactCost
) -> Flow[object, tuple[Reservation, tuple[Reservation, ...]]]:
    """Take a cost from several counters, under their tiers: from all of them, or from none.

    The result is what was taken from the one that denied it, or that has the least left; and everything.
    """
    buckets: dict[object, tuple[RequestCounter, str]] = {}
    for counter, tier in counters:
        buckets.setdefault(counter.bucket(tier), (counter, tier))
    taken: list[Reservation] = []
    for counter, tier in buckets.values():
        try:
            one = yield from reserve(counter, key, tier, rounded_up(cost, counter.decimals))
        except BaseException:
            yield from settle_all(taken, 0)
            raise
        if not one.decision:
            yield from settle_all(taken, 0)
            return one, ()
        taken.append(one)
    tightest = min(taken, key=lambda one: (one.decision.outcome is Outcome.EXEMPT, one.decision.remaining))
    return tightest, tuple(taken)
