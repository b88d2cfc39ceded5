"""The parts of the conformance suite's cases."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from inspect import isfunction, signature
from typing import Any, Final, TypeAlias

from headgate.errors import HoldError
from headgate.limits.clock import ManualClock
from headgate.limits.decision import Decision, Limit
from headgate.limits.fixed import UNLIMITED
from headgate.limits.numbers import LARGEST
from headgate.stores.base import Ask, Store, Verb
from headgate.stores.holds import AccountStore, HoldAnswer, HoldStore, HoldTerms, ListedHold, UsageRow
from headgate.stores.reference import LOW

SECOND: Final = 1_000_000
"""Microseconds."""
MICROSECOND: Final = Fraction(1, SECOND)
"""Seconds."""

MakeStore: TypeAlias = Callable[[ManualClock], Store]
Case: TypeAlias = Callable[[MakeStore], None]


def cases_of(module: Mapping[str, object]) -> tuple[Case, ...]:
    """The cases that a module has defined so far, in their order: its functions that take a `make` alone."""
    functions = [one for one in module.values() if isfunction(one) and one.__module__ == module["__name__"]]
    cases = tuple([one for one in functions if [*signature(one).parameters] == ["make"]])
    assert cases, f"{module['__name__']} has no cases: without them every store would conform"
    return cases


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


class RefusalHarness(StoreHarness, ABC):
    """A store of holds, and what it refuses to do with them."""

    @abstractmethod
    def seen(self) -> tuple[object, ...]:
        """All that can be seen of what a case uses."""

    def refused(self, what: str, call: Callable[[], object], error: type[HoldError] = HoldError) -> None:
        """Expect that a call is refused, and has changed nothing."""
        before = self.seen()
        try:
            got = call()
        except HoldError as raised:
            expect(what, type(raised), error)
        else:
            raise NotConforming(f"{what}: expected {error.__name__}, got {got!r}")
        expect(f"after {what} was refused", self.seen(), before)


class HoldHarness(RefusalHarness):
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

    def seen(self) -> tuple[object, ...]:
        return self.apply(Verb.PEEK, self.limit), self.holds.list_holds("", "key", 100)


class AccountHarness(RefusalHarness):
    """A store of accounts, and shortcuts for some limits that are asked for together, each with its name and key.

    All of them have one root, under which the hold is known. Costs are those of the limits alone.
    """

    def __init__(self, make: MakeStore, limits: Sequence[tuple[str, str, Limit]], root: str = "acme") -> None:
        super().__init__(make)
        if not isinstance(self.store, AccountStore):
            raise NotConforming(f"a store of accounts: expected one, got {self.store!r}")
        self.accounts: AccountStore = self.store
        self.root = root
        self.limits = list(limits)

    def asks(self, costs: Sequence[int]) -> list[Ask]:
        """The asks for these costs, after one that counts nothing, to which the hold belongs."""
        some = [Ask(*self.limits[i], cost, self.root) for i, cost in enumerate(costs)]
        return [Ask("accounts", self.root, UNLIMITED, 1), *some]

    def some_asks(self) -> list[Ask]:
        """The asks for a cost of 1 each."""
        return self.asks([1] * len(self.limits))

    def hold(
        self,
        costs: Sequence[int],
        hold_id: str = "planner/1",
        lease: int = 60,
        keep: int = 60,
        **terms: Any,
    ) -> HoldAnswer:
        made = HoldTerms(hold_id, lease * SECOND, terms.pop("release", False), keep * SECOND, **terms)
        return self.accounts.hold(self.asks(costs), LOW, made)

    def settle(self, costs: Sequence[int] | None = None, hold_id: str = "planner/1") -> HoldAnswer:
        actual = None if costs is None else [1, *costs]
        return self.accounts.settle(self.some_asks(), LOW, hold_id, actual)

    def cancel(self, hold_id: str = "planner/1") -> HoldAnswer:
        asks = self.some_asks()
        return self.accounts.settle(asks, LOW, hold_id, [0] * len(asks), cancel=True)

    def extend(
        self, costs: Sequence[int] | None = None, lease: int | None = None, hold_id: str = "planner/1"
    ) -> HoldAnswer:
        end = None if lease is None else lease * SECOND
        return self.accounts.extend(self.some_asks(), LOW, hold_id, None if costs is None else [1, *costs], end)

    def find(self, hold_id: str = "planner/1") -> HoldAnswer:
        return self.accounts.find_hold(self.some_asks(), LOW, hold_id)

    def read(self, hold_id: str = "planner/1") -> ListedHold | None:
        return self.accounts.read_hold("accounts", self.root, hold_id)

    def peeks(self) -> tuple[Decision, ...]:
        """The remainder of each limit."""
        return self.accounts.peek_each(self.some_asks()[1:], LOW)

    def left(self) -> list[int]:
        return [one.remaining for one in self.peeks()]

    def usage(self, root: str | None = None, first: int = 0, last: int = LARGEST) -> list[UsageRow]:
        """The counts of meters under the name "usage", by key and day. A store may list days with 0, or not."""
        return sorted(row for row in self.accounts.read_usage("usage", first, last, root) if row.amount)

    def seen(self) -> tuple[object, ...]:
        return self.peeks(), self.usage(), sorted(self.accounts.list_holds("accounts", self.root, 1000))


def expect(what: str, got: object, expected: object) -> None:
    """Raise `NotConforming` unless both are equal."""
    if got != expected:
        raise NotConforming(f"{what}: expected {expected!r}, got {got!r}")
