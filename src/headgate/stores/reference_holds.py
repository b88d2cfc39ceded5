"""A slow model of holds, written from their definition: it keeps all that ever happened, and counts from the beginning.

A hold that was settled with less counts that, at the time at which it was made. What it cost in excess counts when it
was settled; in a budget, it belongs to the period of the hold. A hold that was extended was charged several times, and
the newest charge is given back first. A hold whose lease ends frees its slots, and gives its costs back if its terms
say so.

Stores keep less. What they give back is exact for `exact` keys and never more for others: see `HoldReference.exact`.
"""

from collections.abc import Sequence
from typing import Final

from headgate.errors import HoldError, UnknownHold
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.limits.headroom import MOST
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
)
from headgate.stores.reference import (
    BucketModel,
    BudgetModel,
    Model,
    SlotsModel,
    binding,
    joined,
)


class _Event:
    """A cost that was spent, or given back by a refund."""

    def __init__(self, at: int, cost: int, refund: bool = False) -> None:
        self.at: Final = at
        self.cost = cost
        self.refund: Final = refund


class _History:
    """All that was ever counted under one limit."""

    def __init__(self, model: Model, ask: int) -> None:
        self.model: Final = model
        self.ask: Final = ask
        """The place of the ask that it belongs to."""
        self.events: Final[list[_Event]] = []
        self.leases: Final[dict[str, int]] = {}

    def replayed(self) -> Model:
        """The model as everything has left it."""
        model = self.model.fresh()
        if isinstance(model, SlotsModel):
            model.ends = list(self.leases.values())
        for event in self.events:
            (model.refund if event.refund else model.spend)(event.at, event.cost)
        return model


class _Held:
    """One hold, with the events of each time at which it was charged: one for each limit."""

    def __init__(self, terms: HoldTerms, costs: list[int], end: int) -> None:
        self.terms: Final = terms
        self.costs = costs
        self.end = end
        self.state: HoldState = OPEN
        self.charges: Final[list[list[_Event]]] = []


class HoldReference:
    """Some keys that are asked for together, one for each list of models, and their holds.

    Its verbs are those of a `HoldStore`. With `granted` they follow what a store has said, which may have less to give.
    """

    def __init__(self, asked: Sequence[Sequence[Model]], clock: Clock) -> None:
        self._limits: Final = [joined(models) for models in asked]
        self._histories: Final = [_History(model, place) for place, models in enumerate(asked) for model in models]
        self._places: Final = [one.ask if len(asked) > 1 else i for i, one in enumerate(self._histories)]
        self._clock: Final = clock
        self._holds: Final[dict[str, _Held]] = {}
        self._charged = 0  # times
        self.granted: bool | None = None

    def asks(self, costs: Sequence[int]) -> list[Ask]:
        """The asks for these costs."""
        return [Ask(f"name-{i}", "key", self._limits[i], costs[i]) for i in range(len(costs))]

    @property
    def exact(self) -> bool:
        """Whether a store can know all that it has to give back: it keeps so many charges, and whole ticks of a bucket.

        A refund may have taken back what a hold has spent, too; only a bucket knows.
        """
        bounded = self._charged <= MOST and all(len(held.charges) <= MAX_CHARGES for held in self._holds.values())
        return bounded and all(map(_counts_exactly, self._histories))

    def apply(self, verb: Verb, asks: Sequence[Ask], low: int) -> Decision:
        now, costs = self._begin(), [ask.cost for ask in asks]
        waits = self._waits(now, costs)
        passed = verb is Verb.CHECK and not self._denied(waits)
        if passed or verb in (Verb.CHARGE, Verb.REFUND):
            for one in self._histories:
                one.events.append(_Event(now, costs[one.ask], verb is Verb.REFUND))
        if verb in (Verb.CHARGE, Verb.REFUND):
            return self._peek(now, low)
        return self._decide(now, waits, costs, passed, low)

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        now, costs = self._begin(), [ask.cost for ask in asks]
        known = self._holds.get(terms.hold_id)
        if known is not None:
            if known.state in (OPEN, EXPIRED) and known.costs != costs:
                raise HoldError("other costs")
            return self._answer(known, now, low)._replace(decision=self._passed(now, low))
        waits = self._waits(now, costs)
        if self._denied(waits):
            return HoldAnswer(self._decide(now, waits, costs, False, low), DENIED, tuple(costs), 0)
        held = _Held(terms, costs, now + terms.lease)
        self._holds[terms.hold_id] = held
        self._charge(held, now, costs)
        self._lease(held)
        return HoldAnswer(self._decide(now, waits, costs, True, low), OPEN, tuple(costs), terms.lease)

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        now, held = self._begin(), self._known(hold_id)
        actual = [0] * len(asks) if cancel else held.costs if costs is None else list(costs)
        if held.state in (SETTLED, CANCELLED):
            if actual != held.costs:
                raise HoldError("settled with other costs")
            return self._answer(held, now, low)
        self._count(held, now, actual)
        held.costs, held.state, held.end = actual, CANCELLED if cancel else SETTLED, now
        self._free(held)
        return self._answer(held, now, low)

    def extend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        now, held = self._begin(), self._known(hold_id)
        if held.state != OPEN:
            raise HoldError("ended")
        more = [max(costs[i] - held.costs[i], 0) if costs else 0 for i in range(len(held.costs))]
        decision = None
        if any(more):
            waits = self._waits(now, more)
            for i, one in enumerate(self._histories):
                if isinstance(one.model, SlotsModel):
                    waits[i] = 0  # it has its slot
            denied = self._denied(waits)
            if not denied:
                self._charge(held, now, more)
                held.costs = [held.costs[i] + more[i] for i in range(len(more))]
            decision = self._decide(now, waits, more, not denied, low)
            if denied:
                return HoldAnswer(decision, held.state, tuple(held.costs), held.end - now)
        if lease is not None:
            held.end = now if lease == 0 else max(held.end, now + lease)
            self._lease(held)
            self._begin()
        return self._answer(held, now, low)._replace(decision=decision or self._passed(now, low))

    def find_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        now = self._begin()
        return self._answer(self._known(hold_id), now, low)

    def list_holds(self) -> list[ListedHold]:
        """All of them, in any order."""
        now = self._begin()
        return [
            ListedHold(held.terms.hold_id, held.state, tuple(held.costs), _left(held, now))
            for held in self._holds.values()
        ]

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
                del self._holds[held.terms.hold_id]
        return now

    def _known(self, hold_id: str) -> _Held:
        if hold_id not in self._holds:
            raise UnknownHold("key", hold_id)
        return self._holds[hold_id]

    def _denied(self, waits: Sequence[int]) -> bool:
        return any(waits) if self.granted is None else not self.granted

    def _waits(self, now: int, costs: Sequence[int]) -> list[int]:
        return [one.replayed().wait(now, costs[one.ask]) for one in self._histories]

    def _decide(self, now: int, waits: Sequence[int], costs: Sequence[int], passed: bool, low: int) -> Decision:
        decisions = [
            one.replayed().decide(now, 0 if passed else wait, 0 if passed else costs[one.ask], low)
            for one, wait in zip(self._histories, waits, strict=True)
        ]
        return binding(decisions, self._places)

    def _peek(self, now: int, low: int) -> Decision:
        each = [1] * len(self._limits)
        return self._decide(now, self._waits(now, each), each, False, low)

    def _passed(self, now: int, low: int) -> Decision:
        nothing = [0] * len(self._histories)
        return self._decide(now, nothing, nothing, True, low)

    def _answer(self, held: _Held, now: int, low: int) -> HoldAnswer:
        return HoldAnswer(self._peek(now, low), held.state, tuple(held.costs), _left(held, now))

    def _charge(self, held: _Held, now: int, costs: Sequence[int]) -> None:
        charge = [_Event(now, costs[one.ask]) for one in self._histories]
        held.charges.append(charge)
        self._charged += 1
        for one, event in zip(self._histories, charge, strict=True):
            one.events.append(event)

    def _count(self, held: _Held, now: int, actual: Sequence[int]) -> None:
        """Count these costs for a hold, instead of what is counted for it now."""
        for i, one in enumerate(self._histories):
            events = [charge[i] for charge in held.charges]
            excess = actual[one.ask] - sum(event.cost for event in events)
            if excess > 0 and isinstance(one.model, BudgetModel):
                events[0].cost += excess
            elif excess > 0:
                one.events.append(_Event(now, excess))
            for event in reversed(events):
                given = min(event.cost, max(-excess, 0))
                event.cost -= given
                excess += given

    def _lease(self, held: _Held) -> None:
        for one in self._histories:
            one.leases[held.terms.hold_id] = held.end

    def _free(self, held: _Held) -> None:
        for one in self._histories:
            one.leases.pop(held.terms.hold_id, None)


def _left(held: _Held, now: int) -> int:
    return held.end - now if held.state == OPEN else 0


def _counts_exactly(one: _History) -> bool:
    if isinstance(one.model, BucketModel):
        return one.model.tick == 1
    return isinstance(one.model, SlotsModel) or not any(event.refund for event in one.events)
