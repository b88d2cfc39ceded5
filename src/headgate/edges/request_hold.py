"""The hold of a request: what it costs, and a slot, are reserved as long as it lives."""

from collections.abc import Awaitable
from typing import Final, TypeAlias, TypedDict

from headgate.edges.costs import ExactCost
from headgate.errors import UnknownHold, refuse
from headgate.flow import Flow
from headgate.holds import Hold
from headgate.lease_renewer import RENEWERS, WeakRenewal
from headgate.limiter import Limiter
from headgate.limits.decision import Decision
from headgate.stores.holds import HoldStore
from headgate.stores.memory import in_process

LEASE: Final = 60
"""Seconds after which the slot of a request is free if its process has died."""
_KEEP_IN_SERVER: Final = 60  # seconds in which a settlement may be sent to a server again, which asks for the same

Held: TypeAlias = Hold | Awaitable[Hold]
"""A hold, granted or denied."""


class RequestHold:
    """A hold that was granted to a request. Its lease is renewed until it ends, or until nobody refers to it any more.

    So a request that gets lost without an end (a server that never closes a response) keeps its slot only until the
    lease ends. With `awaits`, its flows yield awaitables.
    """

    __slots__ = ("__weakref__", "_awaits", "_ended", "_renewal", "_store", "hold")

    def __init__(self, hold: Hold, limiter: Limiter, *, awaits: bool) -> None:
        self.hold: Final = hold
        self._store: Final = limiter.store
        self._awaits: Final = awaits
        self._renewal: Final = WeakRenewal(self)
        self._ended = False
        RENEWERS.add(self._store, self._renewal)

    def extend(self, cost: ExactCost) -> Flow[object, Decision]:
        """Reserve so much more, all or nothing."""
        decision: Decision = yield self.hold.aextend(cost) if self._awaits else self.hold.extend(cost)
        return decision

    def settle(self, actual: ExactCost | None) -> Flow[object, bool]:
        """End it, with the cost that was reserved or another one. Only the first end counts.

        False if it was forgotten before: its lease has ended, since the process stood still or the store was away.
        """
        if self._ended:
            return True
        self._ended = True
        RENEWERS.remove(self._store, self._renewal)
        try:
            yield self.hold.asettle(actual) if self._awaits else self.hold.settle(actual)
        except UnknownHold:
            return False
        return True


class HoldOptions(TypedDict):
    """The options of `Limiter.hold` for a hold that lasts as long as what it is for."""

    lease: int
    keep: int
    max_age: None


def refuse_slots(where: str, limiter: Limiter) -> None:
    """Refuse slots in a store that can't hold."""
    if limiter.limit.counts_slots and not isinstance(limiter.store, HoldStore):
        refuse(where, "a store that can hold slots, such as MemoryStore() or RedisStore(...)", limiter.store)


def hold_options(limiter: Limiter) -> HoldOptions:
    return {"lease": LEASE, "keep": 0 if in_process(limiter.store) is not None else _KEEP_IN_SERVER, "max_age": None}
