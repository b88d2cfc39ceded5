"""Holds on a tree of accounts, and a ledger of what a store has granted, kept from its answers alone."""

import random
from datetime import UTC, datetime
from fractions import Fraction

from headgate import Budget, Limit, SlidingWindow, Slots, TokenBucket
from headgate.errors import HoldError
from headgate.limits.meter import Meter
from headgate.stores.account_walks import RESOURCES, AccountTree
from headgate.stores.base import Ask, Verb
from headgate.stores.harness import MICROSECOND, AccountHarness, MakeStore
from headgate.stores.holds import HoldAnswer, HoldTerms
from headgate.stores.reference import LOW

HOUR = 3_600_000_000
SPANS = (0, 0, 0, 1, 333_333, 1_000_000, 7_000_000, 600_000_000, HOUR, 12 * HOUR)
LEASES = (400_000, 1_000_000, 60_000_000, 26 * HOUR)
FOREVER = 1000 * HOUR

Place = tuple[str, str, object]  # name, key, identity of the limit


def pieces(asks: list[Ask]) -> list[Ask]:
    return [ask.with_limit(piece) for ask in asks for piece in ask.limit.pieces]


def place_of(piece: Ask) -> Place:
    return piece.name, piece.key, piece.limit.identity


class Charge:
    """A cost that is counted at a place since a moment."""

    def __init__(self, at: int, cost: int) -> None:
        self.at, self.cost = at, cost


class LedgerHold:
    """A hold that was granted."""

    def __init__(self, asks: list[Ask], end: int, release: bool, forced: bool) -> None:
        self.asks, self.end, self.release, self.forced = asks, end, release, forced
        self.costs = [ask.cost for ask in asks]
        self.ended = False
        self.released = False
        self.charges: dict[Place, list[Charge]] = {}


class Ledger:
    """What is counted for each limit of a tree, by what a store has said."""

    def __init__(self, make: MakeStore, chance: random.Random) -> None:
        self.chance = chance
        self.harness = AccountHarness(make, [])
        self.tree = AccountTree(chance, "acme")
        self.charges: dict[Place, list[Charge]] = {}
        self.holds: dict[str, LedgerHold] = {}
        self.denials = self.grants = 0

    # What is done with the store -------------------------------------------------------------------------------------

    def use(self, count: int, *, forced: float = 0.1, beyond: bool = True) -> None:
        """So many verbs on holds of any agent, at moments that matter."""
        for number in range(count):
            self.harness.clock.advance(self.chance.choice(SPANS) * MICROSECOND)
            self._release()
            if self.chance.random() < 0.15:
                self.tree.change_an_amount(self.chance)
            verb = self.chance.choice(("hold", "hold", "hold", "settle", "settle", "extend", "cancel", "charge"))
            if verb == "hold":
                self.hold(f"planner/{number}", self.chance.random() < forced)
            elif verb == "charge" and self.tree.limits:
                self.charge()
            elif self.holds:
                hold_id = self.chance.choice(list(self.holds))
                if verb == "extend":
                    self.extend(hold_id)
                else:
                    self.settle(hold_id, verb == "cancel", beyond)

    def hold(self, hold_id: str, forced: bool = False) -> HoldAnswer:
        asks = self._asks(self.chance.choice(self.tree.agents), (0, 1, 1, 2, 3, 5, 12))
        lease, release = self.chance.choice(LEASES), self.chance.random() < 0.3
        terms = HoldTerms(hold_id, lease, release, FOREVER, forced=forced)
        answer = self.harness.accounts.hold(asks, LOW, terms)
        if answer.state == "denied":
            assert not forced
            self.denials += 1
            return answer
        self.grants += 1
        now = self.harness.clock.now()
        booked = self.holds[hold_id] = LedgerHold(asks, now + lease, release, forced)
        self._take(booked, asks, now)
        if not forced:
            self.expect_within([ask.with_cost(max(ask.cost, 1)) for ask in asks], asks)
        return answer

    def extend(self, hold_id: str) -> None:
        booked, now = self.holds[hold_id], self.harness.clock.now()
        costs = [ask.cost for ask in self._again(booked, (0, 1, 2, 3, 5, 12))]
        lease = self.chance.choice((None, *LEASES))
        asks = self._current(booked)
        try:
            answer = self.harness.accounts.extend(asks, LOW, hold_id, costs, lease)
        except HoldError:
            assert booked.ended or booked.end <= now
            return
        assert not booked.ended
        assert booked.end > now
        if not answer.decision and not booked.forced:
            self.denials += 1
            assert answer.costs == tuple(booked.costs)
            return
        more = [max(cost - held, 0) for cost, held in zip(costs, booked.costs, strict=True)]
        added = [ask.with_cost(cost) for ask, cost in zip(asks, more, strict=True)]
        booked.costs = [held + cost for held, cost in zip(booked.costs, more, strict=True)]
        assert answer.costs == tuple(booked.costs)
        if lease is not None:
            booked.end = max(booked.end, now + lease)
        if any(more):
            self._take(booked, added, now)
            if not booked.forced:
                self.expect_within(added, added, slots=False)  # it has its own

    def settle(self, hold_id: str, cancel: bool, beyond: bool) -> None:
        booked, now = self.holds[hold_id], self.harness.clock.now()
        asks = self._current(booked)
        costs = [ask.cost for ask in self._again(booked, (0, 1, 2, 3, 5, 12, 20))]
        if cancel:
            costs = [0] * len(costs)
        elif not beyond:
            costs = [min(cost, held) for cost, held in zip(costs, booked.costs, strict=True)]
        try:
            answer = self.harness.accounts.settle(asks, LOW, hold_id, costs, cancel=cancel)
        except HoldError:
            assert booked.ended
            return
        if booked.ended:
            assert answer.costs == tuple(booked.costs) == tuple(costs)
            return
        booked.ended, booked.costs = True, costs
        assert answer.costs == tuple(costs)
        self._correct(booked, costs, now)

    def charge(self) -> None:
        ask = self.chance.choice(self.tree.every_limit()).with_cost(self.chance.choice((1, 2, 5)))
        self.harness.store.apply(Verb.CHARGE, [ask], LOW)
        for piece in pieces([ask]):
            self.charges.setdefault(place_of(piece), []).append(Charge(self.harness.clock.now(), ask.cost))

    def _asks(self, agent: str, some: tuple[int, ...]) -> list[Ask]:
        costs = {resource: 1 if resource == "slots" else self.chance.choice(some) for resource in RESOURCES}
        return self.tree.asks(agent, costs)

    def _again(self, booked: LedgerHold, some: tuple[int, ...]) -> list[Ask]:
        """The asks of a hold, with other costs: for each resource one."""
        costs = {resource: 1 if resource == "slots" else self.chance.choice(some) for resource in RESOURCES}
        return [
            ask.with_cost(costs.get(ask.key.rpartition("\t")[2] if ask.name == "usage" else ask.name, 1))
            for ask in booked.asks
        ]

    def _current(self, booked: LedgerHold) -> list[Ask]:
        """The asks of a hold, with the limits of today."""
        limits = self.tree.limits
        return [ask.with_limit(limits.get((ask.name, ask.key), ask.limit)) for ask in booked.asks]

    # What is counted --------------------------------------------------------------------------------------------------

    def _take(self, booked: LedgerHold, asks: list[Ask], now: int) -> None:
        for piece in pieces(asks):
            charge = Charge(now, piece.cost)
            booked.charges.setdefault(place_of(piece), []).append(charge)
            self.charges.setdefault(place_of(piece), []).append(charge)

    def _correct(self, booked: LedgerHold, costs: list[int], now: int) -> None:
        """Count these costs: the newest charges are given back first. More counts now, or on the day of the hold."""
        for piece in pieces([ask.with_cost(cost) for ask, cost in zip(booked.asks, costs, strict=True)]):
            charges = booked.charges[place_of(piece)]
            excess = piece.cost - sum(charge.cost for charge in charges)
            if excess > 0 and isinstance(piece.limit, Budget | Meter):
                charges[0].cost += excess
            elif excess > 0:
                charges.append(Charge(now, excess))
                self.charges[place_of(piece)].append(charges[-1])
            for charge in reversed(charges):
                given = min(charge.cost, max(-excess, 0))
                charge.cost -= given
                excess += given

    def _release(self) -> None:
        for booked in self.holds.values():
            if booked.release and not booked.ended and not booked.released and booked.end <= self.harness.clock.now():
                booked.released = True
                self._correct(booked, [0] * len(booked.costs), booked.end)

    # What must be true of it ------------------------------------------------------------------------------------------

    def expect_within(self, needed: list[Ask], taken: list[Ask], *, slots: bool = True) -> None:
        """Expect that nothing is above its limit, after what was taken, where something was needed."""
        for need, took in zip(pieces(needed), pieces(taken), strict=True):
            for part in need.limit.parts:
                if need.cost and (slots or not isinstance(part, Slots)):
                    over = self.above(need, part) + (0 if isinstance(part, Slots) else need.cost - took.cost)
                    assert over <= 0, f"{part} of {need.key}: {over} above it"

    def above(self, piece: Ask, part: Limit) -> Fraction:
        """By how much a limit is exceeded right now; below 0, what is left."""
        now, charges = self.harness.clock.now(), self.charges[place_of(piece)]
        if isinstance(part, Slots):
            place = place_of(piece)
            held = [one for one in self.holds.values() if place in one.charges and not one.ended and one.end > now]
            return Fraction(len(held) - part.capacity)
        if isinstance(part, SlidingWindow):
            most, span = part.integers()
            return Fraction(sum(charge.cost for charge in charges if charge.at > now - span) - most)
        if isinstance(part, Budget):
            period = self._label(part.period, now)
            used = sum(charge.cost for charge in charges if self._label(part.period, charge.at) == period)
            return Fraction(used - part.integers()[0])
        if isinstance(part, TokenBucket):
            capacity, refill, per = part.fields()
            return max(
                sum(charge.cost for charge in charges if charge.at >= begin)
                - capacity
                - refill / per * Fraction(now - begin, 10**6)
                for begin in {charge.at for charge in charges}
            )
        return Fraction(-piece.cost)

    def _label(self, period: str | None, moment: int) -> str:
        shown = datetime.fromtimestamp(1_800_000_000 + moment // 10**6, UTC)
        formats = {None: "", "hour": "%Y-%m-%d %H", "day": "%Y-%m-%d", "month": "%Y-%m"}
        return shown.strftime(formats[period])

    def usage(self) -> dict[str, int]:
        """What is counted for each meter, over all days."""
        return {
            place[1]: total
            for place, charges in self.charges.items()
            if place[0] == "usage" and (total := sum(charge.cost for charge in charges))
        }

    def settled(self) -> dict[str, int]:
        """The same, by the costs of the holds alone: of those that are open or have expired, the reserved ones."""
        found: dict[str, int] = {}
        for booked in self.holds.values():
            for ask, cost in zip(booked.asks, booked.costs, strict=True):
                if ask.name == "usage" and not (booked.released and not booked.ended):
                    found[ask.key] = found.get(ask.key, 0) + cost
        return {key: amount for key, amount in found.items() if amount}
