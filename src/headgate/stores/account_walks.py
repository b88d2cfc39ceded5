"""Walks of a store and of the reference through the same holds on random trees of accounts."""

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.decision import Limit
from headgate.limits.fixed import UNLIMITED
from headgate.limits.meter import Meter
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import TokenBucket
from headgate.stores.base import Ask
from headgate.stores.harness import MICROSECOND, AccountHarness, MakeStore, cases_of, expect
from headgate.stores.hold_walks import Call, HoldVerb, answers_of, call_of, expect_no_more, unsettled
from headgate.stores.holds import HoldAnswer, HoldTerms
from headgate.stores.reference import LOW
from headgate.stores.reference_holds import HoldReference

ZONES: Final = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu")
RESOURCES: Final = ("requests", "tokens", "usd", "slots")

_HOUR: Final = 3_600_000_000
_SPANS: Final = (0, 0, 0, 0, 1, 100_000, 333_333, 1_000_000, 7_000_000, 600_000_000, 12 * _HOUR)
_LEASES: Final = (1, 400_000, 1_000_000, 60_000_000, 26 * _HOUR)
_KEEPS: Final = (0, 1_000_000, 10_000_000, 50 * _HOUR)
_VERBS: Final = (
    *[HoldVerb.HOLD] * 5,
    *[HoldVerb.SETTLE] * 3,
    *[HoldVerb.EXTEND] * 2,
    HoldVerb.CANCEL,
    HoldVerb.FIND,
    HoldVerb.CHECK,
    HoldVerb.CHARGE,
)


class AccountTree:
    """Accounts of one root on up to five levels, with limits that are small enough that a walk meets their bounds."""

    def __init__(self, chance: random.Random, root: str) -> None:
        self.root: Final = root
        self.zone: Final = chance.choice(ZONES)
        self.limits: Final[dict[tuple[str, str], Limit]] = {}
        """By resource and path."""
        paths: list[tuple[str, ...]] = [(root,)]
        for _ in range(chance.randint(0, 4)):
            paths = [(*path, name) for path in paths for name in ("a", "b")[: chance.choice((1, 1, 2))]]
        self.agents: Final = ["/".join(path) for path in paths]
        for account in sorted({"/".join(path[: i + 1]) for path in paths for i in range(len(path))}):
            for resource in RESOURCES:
                if chance.random() < 0.4:
                    self.limits[resource, account] = random_limit(chance, resource)

    def asks(self, agent: str, costs: dict[str, int]) -> list[Ask]:
        """The asks of a hold for an agent: meters, and the limits on all levels above it."""
        asks = [Ask("accounts", self.root, UNLIMITED, 1)]
        for resource, cost in costs.items():
            if resource != "slots":
                asks.append(Ask("usage", f"{agent}\tweb\t{resource}", Meter(self.zone), cost, self.root))
        for (resource, path), limit in self.limits.items():
            if agent == path or agent.startswith(f"{path}/"):
                asks.append(Ask(resource, path, limit, costs[resource], self.root))
        return asks

    def every_limit(self) -> list[Ask]:
        return [Ask(*place, limit, 1, self.root) for place, limit in self.limits.items()]

    def change_an_amount(self, chance: random.Random) -> None:
        """Give a budget or slots another amount, if there are any."""
        shared = [place for place, limit in self.limits.items() if limit.shares_counts]
        if shared:
            place = chance.choice(shared)
            self.limits[place] = _other_amount(chance, self.limits[place])


def random_limit(chance: random.Random, resource: str) -> Limit:
    """A limit for a resource."""
    if resource == "slots":
        return Slots(chance.choice((1, 2, 3)))
    if resource == "usd":
        budgets = [_dollars(chance, period) for period in chance.sample((None, "hour", "day", "month"), 2)]
        return chance.choice((budgets[0], budgets[0], AllOf(budgets), AllOf([budgets[0], Slots(2)])))
    bucket = TokenBucket(chance.choice((1, 5, 10, 30)), chance.choice((1, 3, 60)), chance.choice((1, 60)))
    window = SlidingWindow(chance.choice((1, 5, 10, 30)), chance.choice((1, 10, 61)))
    budget = Budget(chance.choice((5, 20, 100)), chance.choice((None, "hour", "day")))
    several = (AllOf([bucket, window]), AllOf([window, budget]), AllOf([bucket, Slots(3), budget]))
    return chance.choice((bucket, window, budget, bucket, window, budget, *several))


def _dollars(chance: random.Random, period: str | None) -> Budget:
    return Budget(Fraction(chance.choice((5, 20, 100, 2_000_000)), 10**6), period, unit="usd")


def _other_amount(chance: random.Random, limit: Limit) -> Limit:
    if isinstance(limit, Budget):
        amount = Fraction(chance.choice((1, 5, 20, 100)), 10**limit.decimals)
        return Budget(amount, limit.period, unit=limit.unit, zone=limit.zone)
    if isinstance(limit, Slots):
        return Slots(chance.choice((1, 2, 3)))
    return AllOf([_other_amount(chance, part) for part in limit.parts]) if len(limit.parts) > 1 else limit


class AccountWalk:
    """A store and the reference, which do the same on one tree or two, step by step."""

    def __init__(self, make: MakeStore, chance: random.Random, ids: int = 5) -> None:
        self.chance: Final = chance
        self.harness: Final = AccountHarness(make, [])
        self.reference: Final = HoldReference(self.harness.clock)
        self.trees: Final = [AccountTree(chance, root) for root in ("acme", "globex")[: chance.choice((1, 1, 2))]]
        self.owners: Final = [self._owner(number) for number in range(ids)]
        """The tree and the agent of each hold."""

    def _owner(self, number: int) -> tuple[str, AccountTree, str]:
        tree = self.chance.choice(self.trees)
        agent = self.chance.choice(tree.agents)
        return f"{agent.rpartition('/')[2]}/{number}", tree, agent

    def step(self, number: int) -> None:
        """Do something, and expect the same of both.

        From when on the reference isn't exact any more, expect that the store never gives more.
        """
        chance, accounts, reference = self.chance, self.harness.accounts, self.reference
        self.harness.clock.advance(chance.choice(_SPANS) * MICROSECOND)
        hold_id, tree, agent = chance.choice(self.owners)
        if chance.random() < 0.2:
            tree.change_an_amount(chance)
        call = self._call(chance.choice(_VERBS), hold_id, tree, agent)
        what = f"step {number}: {call}"
        before = self.seen() if reference.exact else ()
        got, expected = answers_of(accounts, reference, call)
        if not reference.exact:
            expect_no_more(what, got, expected)
            return
        expect(what, got, expected)
        expect(f"all that can be seen after {what}", self.seen(), self.expected())
        if isinstance(got, HoldAnswer) and got.state == "denied":
            expect(f"after the denial of {what}", self.seen(), before)

    def seen(self) -> tuple[object, ...]:
        """All that the store has."""
        accounts = self.harness.accounts
        peeks = [accounts.peek_each(tree.every_limit(), LOW) if tree.limits else () for tree in self.trees]
        holds = [accounts.read_hold("accounts", tree.root, hold_id) for hold_id, tree, _ in self.owners]
        listed = [unsettled(accounts.list_holds("accounts", tree.root, 100)) for tree in self.trees]
        return peeks, holds, [sorted(one) for one in listed], self.harness.usage()

    def expected(self) -> tuple[object, ...]:
        """The same, by the reference."""
        reference = self.reference
        peeks = [reference.peek_each(tree.every_limit(), LOW) if tree.limits else () for tree in self.trees]
        holds = [reference.read_hold("accounts", tree.root, hold_id) for hold_id, tree, _ in self.owners]
        listed = [unsettled(reference.list_holds("accounts", tree.root)) for tree in self.trees]
        return peeks, holds, [sorted(one) for one in listed], sorted(reference.read_usage("usage", 0, 2**53 - 1))

    def _call(self, verb: HoldVerb, hold_id: str, tree: AccountTree, agent: str) -> Call:
        chance, terms = self.chance, self._terms(hold_id)
        asks = tree.asks(agent, self._costs((0, 1, 1, 2, 3, 5, 12)))
        if verb in (HoldVerb.CHECK, HoldVerb.CHARGE):
            if tree.limits:
                asks = [chance.choice(tree.every_limit()).with_cost(chance.choice((1, 2, 5)))]
            else:
                verb = HoldVerb.FIND
        actual = [ask.cost for ask in tree.asks(agent, self._costs((0, 1, 2, 3, 5, 12, 20)))]
        costs = None if chance.random() < 0.3 else actual
        return call_of(verb, asks, terms, costs, chance.choice((None, None, 0, *_LEASES)))

    def _costs(self, some: Sequence[int]) -> dict[str, int]:
        """By resource. A hold takes one slot, whatever it costs."""
        return {resource: 1 if resource == "slots" else self.chance.choice(some) for resource in RESOURCES}

    def _terms(self, hold_id: str) -> HoldTerms:
        chance = self.chance
        return HoldTerms(
            hold_id,
            chance.choice(_LEASES),
            chance.random() < 0.3,
            chance.choice(_KEEPS),
            chance.choice(("", "run-42\tweb")),
            chance.choice(("", "the list of limits", "another")),
            chance.choice((2, 100)),
            chance.random() < 0.15,
        )


def random_accounts_equal_the_reference(make: MakeStore) -> None:
    chance = random.Random(29)  # noqa: S311
    for _ in range(25):
        walk = AccountWalk(make, chance)
        for number in range(25):
            walk.step(number)


ACCOUNT_WALKS: Final = cases_of(globals())
