"""Laws of holds on trees of accounts, for any limits on any levels and any sequence of verbs and times.

The reference is `headgate.stores.reference_holds`; the ledger of `tests.support.account_ledger` counts without it.
"""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.limits.numbers import LARGEST
from headgate.stores.account_walks import AccountWalk
from headgate.stores.base import Ask, Verb
from headgate.stores.harness import MakeStore
from headgate.stores.holds import HoldTerms
from headgate.stores.reference import LOW
from tests.support.account_ledger import FOREVER, Ledger
from tests.support.reference_store import ReferenceStore

chances = st.randoms(use_true_random=False)
FEWER = max(settings().max_examples // 4, 1)
"""A walk is long, and a tree has many limits."""


@settings(max_examples=FEWER)
@given(chances)
def test_any_sequence_on_any_tree_equals_the_reference(make: MakeStore, chance: random.Random) -> None:
    """Each answer, each part of it, and after each step all that can be seen."""
    walk = AccountWalk(make, chance)
    for number in range(chance.randint(1, 20)):
        walk.step(number)


@settings(max_examples=FEWER)
@given(chances)
def test_no_limit_on_any_level_is_exceeded(make: MakeStore, chance: random.Random) -> None:
    """What is granted without force fits under every limit at that moment, beside all that counts there."""
    ledger = Ledger(make, chance)
    ledger.use(chance.randint(1, 40), forced=chance.choice((0, 0.2)), beyond=chance.random() < 0.5)


@settings(max_examples=FEWER)
@given(chances)
def test_usage_is_what_was_settled_to_the_unit(make: MakeStore, chance: random.Random) -> None:
    ledger = Ledger(make, chance)
    ledger.use(chance.randint(1, 40))
    used: Counter[str] = Counter()
    for row in ledger.harness.usage("acme"):
        used[row.key] += row.amount
    assert used == ledger.usage() == ledger.settled()


@settings(max_examples=FEWER)
@given(chances)
def test_a_denial_changes_nothing_anywhere(make: MakeStore, chance: random.Random) -> None:
    """Whichever limit it is that denies, alone: nothing of what the others have is taken."""
    ledger = Ledger(make, chance)
    ledger.use(chance.randint(0, 15))
    harness, tree = ledger.harness, ledger.tree
    agent = chance.choice(tree.agents)
    asks = tree.asks(agent, dict.fromkeys(("requests", "tokens", "usd", "slots"), 1))
    limited = [place for place, ask in enumerate(asks) if (ask.name, ask.key) in tree.limits and ask.limit.counts_costs]
    if not limited:
        return
    place = chance.choice(limited)
    most = max(part.capacity for part in asks[place].limit.parts) + 1
    asks[place] = asks[place].with_cost(most * 10 ** asks[place].limit.decimals)  # more than can ever pass
    every = [*tree.every_limit(), Ask("other", "acme", asks[place].limit, 1, "acme")]

    def seen() -> list[object]:
        listed = sorted(harness.accounts.list_holds("accounts", "acme", 1000))
        return [harness.accounts.peek_each(every, LOW), harness.usage(), listed]

    before = seen()
    denied = harness.accounts.hold(asks, LOW, HoldTerms("planner/denied", 60_000_000, False, FOREVER))
    assert denied.state == "denied"
    assert denied.decision.retry_after is None
    assert seen() == before
    assert harness.accounts.read_hold("accounts", "acme", "planner/denied") is None


@settings(max_examples=FEWER)
@given(chances)
def test_a_hold_that_is_cancelled_at_once_is_nothing(make: MakeStore, chance: random.Random) -> None:
    ledger = Ledger(make, chance)
    ledger.use(chance.randint(0, 15), forced=0)
    harness, every = ledger.harness, ledger.tree.every_limit()
    if not every:
        return
    before = harness.accounts.peek_each(every, LOW), harness.usage()
    answer = ledger.hold("planner/cancelled", chance.random() < 0.3)
    if answer.state == "open":
        asks = ledger.holds["planner/cancelled"].asks
        harness.accounts.settle(asks, LOW, "planner/cancelled", [0] * len(asks), cancel=True)
    assert (harness.accounts.peek_each(every, LOW), harness.usage()) == before


@settings(max_examples=FEWER)
@given(chances)
def test_a_hold_that_is_settled_at_once_is_a_charge(make: MakeStore, chance: random.Random) -> None:
    held, charged = Ledger(make, random.Random(seed := chance.random())), Ledger(make, random.Random(seed))
    asks = held.tree.asks(chance.choice(held.tree.agents), dict.fromkeys(("requests", "tokens", "usd", "slots"), 1))
    if held.harness.accounts.hold(asks, LOW, HoldTerms("planner/1", 10**6, False, FOREVER)).state != "open":
        return
    actual = [ask.with_cost(chance.choice((1, 2, 3, 7))) for ask in asks]
    held.harness.accounts.settle(asks, LOW, "planner/1", [ask.cost for ask in actual])
    charged.harness.store.apply(Verb.CHARGE, actual, LOW)
    assert held.harness.accounts.peek_each(asks, LOW) == charged.harness.accounts.peek_each(asks, LOW)
    assert held.harness.usage() == charged.harness.usage()


def test_the_ledger_and_the_walks_see_denials() -> None:
    """The laws are about something: of what they do, a good part is denied, and a good part is granted."""
    denials = grants = 0
    for seed in range(20):
        ledger = Ledger(ReferenceStore, random.Random(seed))
        ledger.use(30)
        denials, grants = denials + ledger.denials, grants + ledger.grants
        assert sum(row.amount for row in ledger.harness.usage(None, 0, LARGEST)) == sum(ledger.settled().values())
    assert denials > 60
    assert grants > 60
