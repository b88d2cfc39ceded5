"""A slow model of holds, written from their definition: it keeps all that ever happened, and counts from the beginning.

A hold that was settled with less counts that, at the time at which it was made. What it cost in excess counts when it
was settled; in a budget and under a meter, it belongs to the period or day of the hold. A hold that was extended was
charged several times, and the newest charge is given back first. A hold whose lease ends frees its slots, and gives its
costs back if its terms say so. A cost of 0 takes nothing, and is denied where a cost of 1 would be; an extension asks
only for what it adds. A forced hold is granted and extended whatever is left.

Stores keep less. What they give back is exact for `exact` keys and never more for others: see `HoldReference.exact`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from headgate.errors import HoldError, UnknownHold
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision, Limit
from headgate.limits.headroom import MOST
from headgate.limits.meter import Meter
from headgate.stores.base import Ask, Verb
from headgate.stores.holds import (
    CANCELLED,
    DENIED,
    EXPIRED,
    MAX_CHARGES,
    OPEN,
    SETTLED,
    HoldAnswer,
    HoldState,
    HoldTerms,
    ListedHold,
    UsageRow,
)
from headgate.stores.reference import BucketModel, BudgetModel, MeterModel, Model, SlotsModel, binding, model_of


class _Event:
    """A cost that was spent, or given back by a refund."""

    def __init__(self, at: int, cost: int, refund: bool = False) -> None:
        self.at: Final = at
        self.cost = cost
        self.refund: Final = refund


class _History:
    """All that was ever counted for one key under one limit, whatever its amount."""

    def __init__(self, root: str, limit: Limit) -> None:
        self.root: Final = root
        self.events: Final[list[_Event]] = []
        self.leases: Final[dict[tuple[str, str, str], int]] = {}
        self.charged = 0
        """How many times a hold has charged it."""
        self.counts_by_period: Final = isinstance(_fresh(limit)[0], BudgetModel | MeterModel)
        self.limit: Final = limit

    def replayed(self, limit: Limit) -> list[Model]:
        """The models of a limit as everything has left them."""
        models = _fresh(limit)
        for model in models:
            if isinstance(model, SlotsModel):
                model.ends = list(self.leases.values())
            for event in self.events:
                (model.refund if event.refund else model.spend)(event.at, event.cost)
        return models

    @property
    def exact(self) -> bool:
        """Whether a store can know all that it has to give back."""
        refunded = any(event.refund for event in self.events)
        return self.charged <= MOST and all(
            model.tick == 1 if isinstance(model, BucketModel) else isinstance(model, SlotsModel) or not refunded
            for model in _fresh(self.limit)
        )


class _Held:
    """One hold, with the events of each time at which it was charged: one for each piece."""

    def __init__(self, terms: HoldTerms, asks: Sequence[Ask], end: int) -> None:
        self.terms: Final = terms
        self.owner: Final = (asks[0].name, asks[0].key)
        self.asks: Final = asks
        self.costs = [ask.cost for ask in asks]
        self.end = end
        self.state: HoldState = OPEN
        self.charges: Final[list[list[_Event]]] = []

    @property
    def identity(self) -> tuple[str, str, str]:
        return (*self.owner, self.terms.hold_id)

    def listed(self, now: int) -> ListedHold:
        terms = self.terms
        return ListedHold(terms.hold_id, self.state, tuple(self.costs), self.left(now), terms.note, terms.shape)

    def left(self, now: int) -> int:
        return self.end - now if self.state == OPEN else 0


class HoldReference:
    """The verbs of an `AccountStore`. With `granted` they follow what a store has said, which may have less to give."""

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._histories: Final[dict[tuple[str, str, object], _History]] = {}
        self._holds: Final[dict[tuple[str, str, str], _Held]] = {}
        self.granted: bool | None = None

    @property
    def exact(self) -> bool:
        """Whether a store can know all that it has to give back: it keeps so many charges, and whole ticks of a bucket.

        A refund may have taken back what a hold has spent, too; only a bucket knows.
        """
        bounded = all(len(held.charges) <= MAX_CHARGES for held in self._holds.values())
        return bounded and all(history.exact for history in self._histories.values())

    def apply(self, verb: Verb, asks: Sequence[Ask], low: int) -> Decision:
        now, pieces = self._begin(), _pieces(asks)
        waits = self._waits(pieces, now)
        passed = verb is Verb.CHECK and not self._denied(waits)
        if passed or verb in (Verb.CHARGE, Verb.REFUND):
            for piece in pieces:
                self._history(piece).events.append(_Event(now, piece.cost, verb is Verb.REFUND))
        if verb in (Verb.CHARGE, Verb.REFUND):
            return self._joined(asks, self._peeks(asks, now, low))
        return self._joined(asks, self._parts(pieces, now, waits, passed, low))

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        now, costs = self._begin(), tuple(ask.cost for ask in asks)
        known = self._holds.get((asks[0].name, asks[0].key, terms.hold_id))
        if known is not None:
            if known.state in (OPEN, EXPIRED) and tuple(known.costs) != costs:
                raise HoldError("other costs")
            return self._answer(known, asks, now, self._taken(asks, now, low))
        held = _Held(terms, asks, now + terms.lease)
        if len([one for one in self._holds.values() if one.owner == held.owner and one.state == OPEN]) >= terms.most:
            raise HoldError("too many")
        asked = [piece.with_cost(max(piece.cost, 1)) for piece in _pieces(asks)]
        waits = self._waits(asked, now)
        denied = self._denied(waits)
        parts = self._parts(asked, now, waits, False, low)
        if denied and not terms.forced:
            return HoldAnswer(self._joined(asks, parts), DENIED, costs, 0, parts)
        self._refuse_uncountable(_pieces(asks), now, denied)
        self._holds[held.identity] = held
        self._charge(held, now, costs)
        self._lease(held)
        if not denied:
            parts = self._taken(asks, now, low)
        return self._answer(held, asks, now, parts)

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        now, held = self._begin(), self._known(asks, hold_id)
        actual = [0] * len(asks) if cancel else held.costs if costs is None else list(costs)
        if held.state in (SETTLED, CANCELLED):
            if actual != held.costs:
                raise HoldError("settled with other costs")
            return self._answer(held, asks, now, self._peeks(asks, now, low))
        self._count(held, now, actual)
        held.costs, held.state, held.end = actual, CANCELLED if cancel else SETTLED, now
        self._free(held)
        return self._answer(held, asks, now, self._peeks(asks, now, low))

    def extend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        now, held = self._begin(), self._known(asks, hold_id)
        if held.state != OPEN:
            raise HoldError("ended")
        more = [max(costs[i] - held.costs[i], 0) if costs else 0 for i in range(len(held.costs))]
        parts: tuple[Decision, ...] | None = None
        if any(more):
            pieces = _pieces([ask.with_cost(cost) for ask, cost in zip(asks, more, strict=True)])
            # It has its slots already.
            waits = [
                0 if piece.limit.counts_slots else wait
                for piece, wait in zip(pieces, self._waits(pieces, now), strict=True)
            ]
            denied = self._denied(waits)
            if denied:
                parts = self._parts(pieces, now, waits, False, low)
                if not held.terms.forced:
                    return self._answer(held, asks, now, parts)
            self._refuse_uncountable(pieces, now, denied)
            self._charge(held, now, more)
            held.costs = [held.costs[i] + more[i] for i in range(len(more))]
            if not denied:
                parts = self._parts(pieces, now, waits, True, low)
        if lease is not None:
            held.end = now if lease == 0 else max(held.end, now + lease)
            self._lease(held)
            self._begin()
        return self._answer(held, asks, now, parts or self._taken(asks, now, low))

    def find_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        now = self._begin()
        return self._answer(self._known(asks, hold_id), asks, now, self._peeks(asks, now, low))

    def list_holds(self, name: str, key: str) -> list[ListedHold]:
        """All of a key, in any order."""
        now = self._begin()
        return [held.listed(now) for held in self._holds.values() if held.owner == (name, key)]

    def read_hold(self, name: str, key: str, hold_id: str) -> ListedHold | None:
        now = self._begin()
        held = self._holds.get((name, key, hold_id))
        return None if held is None else held.listed(now)

    def peek_each(self, asks: Sequence[Ask], low: int) -> tuple[Decision, ...]:
        now = self._begin()
        return self._peeks(asks, now, low)

    def read_usage(self, name: str, first: int, last: int, root: str | None = None) -> list[UsageRow]:
        """In any order, and without days on which nothing is counted."""
        self._begin()
        rows = []
        for (known, key, _), history in self._histories.items():
            if known == name and isinstance(history.limit, Meter) and root in (None, history.root):
                (meter,) = history.replayed(history.limit)
                assert isinstance(meter, MeterModel)
                days = [day for day in meter.days.items() if first <= day[0] < last and day[1]]
                rows += [UsageRow(history.root, key, start, amount) for start, amount in days]
        return rows

    # What they have in common -----------------------------------------------------------------------------------------

    def _begin(self) -> int:
        """Let leases end and holds be forgotten by now."""
        now = self._clock.now()
        for held in list(self._holds.values()):
            if held.state == OPEN and held.end <= now:
                held.state = EXPIRED
                self._free(held)
                if held.terms.release:
                    self._count(held, now, [0] * len(held.costs))
            if held.state != OPEN and held.end + held.terms.keep <= now:
                del self._holds[held.identity]
        return now

    def _known(self, asks: Sequence[Ask], hold_id: str) -> _Held:
        held = self._holds.get((asks[0].name, asks[0].key, hold_id))
        if held is None:
            raise UnknownHold(asks[0].key, hold_id)
        return held

    def _history(self, piece: Ask) -> _History:
        identity = (piece.name, piece.key, piece.limit.identity)
        return self._histories.setdefault(identity, _History(piece.root, piece.limit))

    def _denied(self, waits: Sequence[int]) -> bool:
        return any(waits) if self.granted is None else not self.granted

    def _waits(self, pieces: Sequence[Ask], now: int) -> list[int]:
        return [
            _longest([model.wait(now, piece.cost) for model in self._history(piece).replayed(piece.limit)])
            for piece in pieces
        ]

    def _refuse_uncountable(self, pieces: Sequence[Ask], now: int, denied: bool) -> None:
        for piece in pieces:
            for model in self._history(piece).replayed(piece.limit):
                if (denied or isinstance(model, MeterModel)) and not model.countable(now, piece.cost):
                    raise HoldError("uncountable")

    def _parts(
        self, pieces: Sequence[Ask], now: int, waits: Sequence[int], passed: bool, low: int
    ) -> tuple[Decision, ...]:
        """The decision on each piece, which may have passed already."""
        parts = []
        for piece, wait in zip(pieces, waits, strict=True):
            models, pending = self._history(piece).replayed(piece.limit), 0 if passed else piece.cost
            if passed or wait == 0:
                decisions = [model.decide(now, 0, pending, low) for model in models]
            else:
                decisions = [model.decide(now, model.wait(now, pending), pending, low) for model in models]
            parts.append(binding(decisions, range(len(decisions))))
        return tuple(parts)

    def _taken(self, asks: Sequence[Ask], now: int, low: int) -> tuple[Decision, ...]:
        """The decisions on what has been taken."""
        pieces = _pieces(asks)
        return self._parts(pieces, now, [0] * len(pieces), True, low)

    def _peeks(self, asks: Sequence[Ask], now: int, low: int) -> tuple[Decision, ...]:
        pieces = [piece.with_cost(1) for piece in _pieces(asks)]
        return self._parts(pieces, now, self._waits(pieces, now), False, low)

    def _joined(self, asks: Sequence[Ask], parts: Sequence[Decision]) -> Decision:
        """The part that bound, at the place of its ask; of a lone ask, at the place of its part."""
        if len(asks) == 1:
            return parts[0] if len(parts) == 1 else binding(parts, range(len(parts)))
        return binding(parts, [place for place, ask in enumerate(asks) for _ in ask.limit.pieces])

    def _answer(self, held: _Held, asks: Sequence[Ask], now: int, parts: tuple[Decision, ...]) -> HoldAnswer:
        found = self._joined(asks, parts), held.state, tuple(held.costs), held.left(now), parts
        return HoldAnswer(*found, release=held.terms.release)

    def _charge(self, held: _Held, now: int, costs: Sequence[int]) -> None:
        charge = []
        for piece in _pieces([ask.with_cost(cost) for ask, cost in zip(held.asks, costs, strict=True)]):
            charge.append(_Event(now, piece.cost))
            self._history(piece).events.append(charge[-1])
            self._history(piece).charged += 1
        held.charges.append(charge)

    def _count(self, held: _Held, now: int, actual: Sequence[int]) -> None:
        """Count these costs for a hold, instead of what is counted for it now."""
        pieces = _pieces([ask.with_cost(cost) for ask, cost in zip(held.asks, actual, strict=True)])
        for i, piece in enumerate(pieces):
            history, events = self._history(piece), [charge[i] for charge in held.charges]
            excess = piece.cost - sum(event.cost for event in events)
            if excess > 0 and history.counts_by_period:
                events[0].cost += excess
            elif excess > 0:
                history.events.append(_Event(now, excess))
            for event in reversed(events):
                given = min(event.cost, max(-excess, 0))
                event.cost -= given
                excess += given

    def _lease(self, held: _Held) -> None:
        for piece in _pieces(held.asks):
            self._history(piece).leases[held.identity] = held.end

    def _free(self, held: _Held) -> None:
        for piece in _pieces(held.asks):
            self._history(piece).leases.pop(held.identity, None)


@lru_cache(maxsize=1000)
def _models(limit: Limit) -> tuple[Model, ...]:
    return tuple(model_of(part) for part in limit.parts)


def _fresh(limit: Limit) -> list[Model]:
    """A model of each part of a limit, without a count."""
    return [model.fresh() for model in _models(limit)]


def _pieces(asks: Sequence[Ask]) -> list[Ask]:
    """The asks, with one for each limit that is counted by itself."""
    return [ask.with_limit(piece) for ask in asks for piece in ask.limit.pieces]


def _longest(waits: Sequence[int]) -> int:
    """The longest of some waits; -1 if one of them never ends."""
    return -1 if -1 in waits else max(waits)
