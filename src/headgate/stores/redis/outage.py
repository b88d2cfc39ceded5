"""Holds, budgets and slots while the server is away.

They are worth more than a rate: an hour of everything passing can use up a month. So they have a policy of their own,
which lets nothing pass unless it is told to. What passes, and what is settled, is booked when the server is back.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

from headgate.errors import StoreAway
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.holds import (
    CANCELLED,
    DENIED,
    EXPIRED,
    OPEN,
    SETTLED,
    HoldAnswer,
    HoldTerms,
    refuse_ended,
    refuse_other_costs,
)
from headgate.stores.redis.bookings import Booking, Bookings
from headgate.stores.redis.fallback import Fallback, degraded_allow, degraded_deny
from headgate.stores.redis.hold_requests import extend_request, hold_request, settle_request
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.protocol import ApplyRequest, Request


class HoldOutage:
    """Answers for a server that is away."""

    def __init__(self, fallback: Fallback, keys: Keys, clock: Clock, bookings: Bookings) -> None:
        self._fallback: Final = fallback
        self._keys: Final = keys
        self._clock: Final = clock
        self.bookings: Final = bookings

    def waits(self, asks: Sequence[Ask], hold_id: str) -> bool:
        """Whether something about a hold is still to be booked."""
        return len(self.bookings.about(_about(asks, hold_id))) > 0

    def _last(self, about: tuple[str, str, str]) -> HoldAnswer | None:
        """The last answer about a hold that is still to be booked."""
        waiting = self.bookings.about(about)
        return waiting[-1].answer if waiting else None

    def apply(self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None, request_id: str) -> Decision:
        """A verb on budgets or slots."""
        decision = self._fallback.apply(verb, asks, low, offence, request_id)
        if verb is Verb.PEEK or (verb is Verb.CHECK and not decision):
            return decision
        booked = Verb.CHARGE if verb is Verb.CHECK else verb
        own = request_id or uuid4().hex
        booking = Booking(None, lambda: ApplyRequest(self._keys, booked, asks, low, None, own))
        if not self.bookings.add(booking) and decision:
            return degraded_deny(asks)
        return decision

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        about = _about(asks, terms.hold_id)
        known = self._last(about)
        if known is not None:
            return self._held_before(asks, terms, known)
        answer = self._fallback.hold(asks, low, terms)
        if answer.state == DENIED and terms.forced:
            answer = answer.as_open(terms.lease)
        if answer.state == DENIED:
            return answer
        end = self._clock.now() + terms.lease

        def make() -> Request[Any]:
            until = max([end, *[one.until for one in self.bookings.about(about)]])  # it may have been renewed
            lease = max(until - self._clock.now(), 0)
            return hold_request(self._keys, asks, low, terms.with_lease(lease), granted=True)

        if not self.bookings.add(Booking(about, make, answer, until=end)):
            self._fallback.settle(asks, low, terms.hold_id, None, cancel=True)
            return HoldAnswer(degraded_deny(asks), DENIED, tuple([ask.cost for ask in asks]), 0)
        return answer

    def _held_before(self, asks: Sequence[Ask], terms: HoldTerms, known: HoldAnswer) -> HoldAnswer:
        """The answer to a hold whose id is known from what is still to be booked."""
        costs = tuple([ask.cost for ask in asks])
        if known.state != OPEN:
            return known.with_decision(degraded_allow(asks), known.parts)
        if known.costs != costs:
            refuse_other_costs(asks, terms.hold_id, OPEN, known.costs, costs)
        until = max([one.until for one in self.bookings.about(_about(asks, terms.hold_id))], default=0)
        left = min(max(until - self._clock.now(), 0), terms.lease) if until else terms.lease
        return HoldAnswer(degraded_allow(asks), OPEN if left else EXPIRED, costs, left)

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, cancel: bool, error: StoreAway
    ) -> HoldAnswer:
        """It is booked later; raises the error if that can't be."""
        about = _about(asks, hold_id)
        known = self._last(about)
        reserved = tuple([ask.cost for ask in asks]) if known is None else known.costs
        actual = (0,) * len(asks) if cancel else reserved if costs is None else tuple(costs)
        if known is not None and known.state in (SETTLED, CANCELLED):
            if actual != known.costs:
                refuse_other_costs(asks, hold_id, known.state, known.costs, actual)
            return known
        answer = HoldAnswer(degraded_allow(asks), CANCELLED if cancel else SETTLED, actual, 0)

        def make() -> Request[Any]:
            return settle_request(self._keys, asks, low, hold_id, costs, cancel)

        if not self.bookings.add(Booking(about, make, answer, may_be_unknown=cancel)):
            raise error
        self._fallback.settle(asks, low, hold_id, costs, cancel=cancel)
        return answer

    def extend(
        self,
        asks: Sequence[Ask],
        low: int,
        hold_id: str,
        costs: Sequence[int] | None,
        lease: int | None,
        error: StoreAway,
    ) -> HoldAnswer:
        """A longer lease is booked later; more costs are as the policy says.

        The lease of a hold that the server knows may have ended there before: what is left of it isn't known here.
        """
        about = _about(asks, hold_id)
        known = self._last(about)
        if known is not None and known.state != OPEN:
            refuse_ended(asks, hold_id, known.state, known.costs, "extend")
        reserved = tuple([ask.cost for ask in asks]) if known is None else known.costs
        decision = self._fallback.extend(asks, low, hold_id, costs, lease)
        if not decision:
            return HoldAnswer(decision, OPEN, reserved, 0)
        end = self._clock.now() + lease if lease else 0

        def make() -> Request[Any]:
            left = max(end - self._clock.now(), 1) if end else lease
            return extend_request(self._keys, asks, low, hold_id, costs, left, granted=True)

        left = lease if lease and any(one.grants for one in self.bookings.about(about)) else 0
        counted = reserved if costs is None else tuple(costs)
        answer = HoldAnswer(decision, EXPIRED if lease == 0 else OPEN, counted, left)
        renews = costs is None and end > 0
        if not self.bookings.add(Booking(about, make, answer, until=end if renews else 0, renews=renews)):
            raise error
        return answer


def _about(asks: Sequence[Ask], hold_id: str) -> tuple[str, str, str]:
    return asks[0].name, asks[0].key, hold_id
