"""What the cases of the conformance suite are made of."""

from collections.abc import Callable
from fractions import Fraction
from typing import Final, TypeAlias

from headgate.errors import HoldError
from headgate.limits.clock import ManualClock
from headgate.limits.decision import Decision, Limit
from headgate.stores.base import Ask, Store, Verb
from headgate.stores.holds import HoldAnswer, HoldStore, HoldTerms
from headgate.stores.reference import LOW

SECOND: Final = 1_000_000
"""Microseconds."""
MICROSECOND: Final = Fraction(1, SECOND)
"""Seconds."""

MakeStore: TypeAlias = Callable[[ManualClock], Store]
Case: TypeAlias = Callable[[MakeStore], None]


class NotConforming(AssertionError):
    """A store breaks the contract."""


class StoreHarness:
    """A store with its clock, and shortcuts for the cases."""

    def __init__(self, make: MakeStore) -> None:
        self.clock = ManualClock(start=1000)
        self.store = make(self.clock)

    def apply(self, verb: Verb, limit: Limit, key: str = "key", cost: int = 1, name: str = "") -> Decision:
        return self.store.apply(verb, [Ask(name, key, limit, cost)], LOW)

    def check(self, limit: Limit, key: str = "key", cost: int = 1, name: str = "") -> Decision:
        return self.apply(Verb.CHECK, limit, key, cost, name)

    def passed(self, limit: Limit, times: int, key: str = "key", cost: int = 1) -> int:
        return sum(bool(self.check(limit, key, cost)) for _ in range(times))


class HoldHarness(StoreHarness):
    """A store that can hold, and shortcuts for a single ask."""

    def __init__(self, make: MakeStore, limit: Limit) -> None:
        super().__init__(make)
        if not isinstance(self.store, HoldStore):
            raise NotConforming(f"a store that can hold: expected one, got {self.store!r}")
        self.holds: HoldStore = self.store
        self.limit = limit

    def asks(self, cost: int = 1) -> list[Ask]:
        return [Ask("", "key", self.limit, cost)]

    def hold(
        self, cost: int, hold_id: str = "id", lease: int = 60, release: bool = False, keep: int = 60
    ) -> HoldAnswer:
        terms = HoldTerms(hold_id, lease * SECOND, release, keep * SECOND)
        return self.holds.hold(self.asks(cost), LOW, terms)

    def settle(self, cost: int | None = None, hold_id: str = "id") -> HoldAnswer:
        return self.holds.settle(self.asks(), LOW, hold_id, None if cost is None else [cost])

    def cancel(self, hold_id: str = "id") -> HoldAnswer:
        return self.holds.settle(self.asks(), LOW, hold_id, [0], cancel=True)

    def extend(self, cost: int | None = None, lease: int | None = None, hold_id: str = "id") -> HoldAnswer:
        costs, end = None if cost is None else [cost], None if lease is None else lease * SECOND
        return self.holds.extend(self.asks(), LOW, hold_id, costs, end)

    def find(self, hold_id: str = "id") -> HoldAnswer:
        return self.holds.find_hold(self.asks(), LOW, hold_id)

    def left(self) -> int:
        return self.apply(Verb.PEEK, self.limit).remaining

    def refused(self, what: str, call: Callable[[], object], error: type[HoldError] = HoldError) -> None:
        """Expect that a call is refused, and has changed nothing."""
        before = [self.apply(Verb.PEEK, self.limit), self.holds.list_holds("", "key", 100)]
        try:
            got = call()
        except HoldError as raised:
            expect(what, type(raised), error)
        else:
            raise NotConforming(f"{what}: expected {error.__name__}, got {got!r}")
        after = [self.apply(Verb.PEEK, self.limit), self.holds.list_holds("", "key", 100)]
        expect(f"after {what} was refused", after, before)


def expect(what: str, got: object, expected: object) -> None:
    """Raise `NotConforming` unless both are equal."""
    if got != expected:
        raise NotConforming(f"{what}: expected {expected!r}, got {got!r}")
