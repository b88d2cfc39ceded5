"""Holds, budgets and slots while the server is away.

They are worth more than a rate: an hour of everything passing can use up a month. So they have a policy of their own,
which lets nothing pass unless it is told to. What passes, and what is settled, is booked when the server is back.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import uuid4

from headgate.errors import StoreAway
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.holds import CANCELLED, DENIED, EXPIRED, OPEN, SETTLED, HoldAnswer, HoldTerms
from headgate.stores.redis.bookings import Booking, Bookings
from headgate.stores.redis.fallback import Fallback, degraded_allow, degraded_deny
from headgate.stores.redis.hold_requests import extend_request, hold_request, settle_request
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.protocol import ApplyRequest, Request


class HoldOutage:
    """Answers for a server that is away. Without `bookings` nothing can be booked later: no client sends it."""

    def __init__(self, fallback: Fallback, keys: Keys, clock: Clock, bookings: Bookings | None) -> None:
        self._fallback: Final = fallback
        self._keys: Final = keys
        self._clock: Final = clock
        self._bookings: Final = bookings

    def waits(self, asks: Sequence[Ask], hold_id: str) -> bool:
        """Whether something about a hold is still to be booked."""
        return self._bookings is not None and self._bookings.has(_about(asks, hold_id))

    def _book(self, about: object, make: Callable[[], Request[Any]], *, may_be_unknown: bool = False) -> bool:
        booking = Booking(about, make, may_be_unknown=may_be_unknown)
        return self._bookings is not None and self._bookings.add(booking)

    def apply(self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None, request_id: str) -> Decision:
        """A verb on budgets or slots."""
        decision = self._fallback.apply(verb, asks, low, offence, request_id)
        if verb is Verb.PEEK or (verb is Verb.CHECK and not decision):
            return decision
        booked = Verb.CHARGE if verb is Verb.CHECK else verb
        own = request_id or uuid4().hex
        if not self._book(None, lambda: ApplyRequest(self._keys, booked, asks, low, None, own)) and decision:
            return degraded_deny(asks)
        return decision

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        costs = tuple([ask.cost for ask in asks])
        if self.waits(asks, terms.hold_id):  # it was granted before
            return HoldAnswer(degraded_allow(asks), OPEN, costs, terms.lease)
        answer = self._fallback.hold(asks, low, terms)
        if answer.state == DENIED:
            return answer
        end = self._clock.now() + terms.lease

        def make() -> Request[Any]:
            lease = max(end - self._clock.now(), 0)
            return hold_request(self._keys, asks, low, terms._replace(lease=lease), granted=True)

        if not self._book(_about(asks, terms.hold_id), make):
            self._fallback.settle(asks, low, terms.hold_id, None, cancel=True)
            return HoldAnswer(degraded_deny(asks), DENIED, costs, 0)
        return answer

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, cancel: bool, error: StoreAway
    ) -> HoldAnswer:
        """It is booked later; raises the error if that can't be."""
        about = _about(asks, hold_id)
        if not self._book(
            about, lambda: settle_request(self._keys, asks, low, hold_id, costs, cancel), may_be_unknown=cancel
        ):
            raise error
        self._fallback.settle(asks, low, hold_id, costs, cancel=cancel)
        counted = [0] * len(asks) if cancel else [ask.cost for ask in asks] if costs is None else costs
        return HoldAnswer(degraded_allow(asks), CANCELLED if cancel else SETTLED, tuple(counted), 0)

    def extend(
        self,
        asks: Sequence[Ask],
        low: int,
        hold_id: str,
        costs: Sequence[int] | None,
        lease: int | None,
        error: StoreAway,
    ) -> HoldAnswer:
        """A longer lease is booked later; more costs are as the policy says."""
        decision = self._fallback.extend(asks, low, hold_id, costs, lease)
        if not decision:
            return HoldAnswer(decision, OPEN, tuple([ask.cost for ask in asks]), 0)
        end = None if not lease else self._clock.now() + lease

        def make() -> Request[Any]:
            left = lease if end is None else max(end - self._clock.now(), 1)
            return extend_request(self._keys, asks, low, hold_id, costs, left, granted=True)

        if not self._book(_about(asks, hold_id), make):
            raise error
        counted = [ask.cost for ask in asks] if costs is None else costs
        return HoldAnswer(decision, EXPIRED if lease == 0 else OPEN, tuple(counted), lease or 0)


def _about(asks: Sequence[Ask], hold_id: str) -> tuple[str, str, str]:
    return asks[0].name, asks[0].key, hold_id
