"""Holds, budgets and slots on a real server: they agree with the store in memory, step by step."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import Decision, Limit, ManualClock, MemoryStore, SlidingWindow, per_minute, per_second
from headgate.errors import HoldError
from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.fixed import UNLIMITED
from headgate.limits.headroom import MOST
from headgate.limits.meter import Meter
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import TokenBucket
from headgate.stores.base import Ask, Verb
from headgate.stores.holds import HoldAnswer, HoldStore, HoldTerms, ListedHold
from headgate.stores.redis import RedisStore
from tests.support.valkey import PATIENCE, ValkeyServer

pytestmark = pytest.mark.once

SECOND = 1_000_000
KINDS: list[Limit] = [
    per_minute(60, burst=10),
    TokenBucket(20, 7, 3),
    TokenBucket(12, 1, 86_400 * 365),
    SlidingWindow(15, 20),
    Budget(25, "hour"),
    Budget("9.5", "hour", unit="credits:1"),
    Budget(40),
    Slots(3),
    AllOf([per_second(6), SlidingWindow(30, 60)]),
    AllOf([per_second(8), Slots(4), Budget(60, "hour")]),
    UNLIMITED,
]


class HoldWalk:
    """Random verbs on two stores."""

    def __init__(self, stores: list[HoldStore], clock: ManualClock, seed: int) -> None:
        self.stores = stores
        self.clock = clock
        self.chance = random.Random(seed)
        self.release = self.chance.random() < 0.5
        chosen = self.chance.sample(KINDS, self.chance.choice([1, 1, 2, 3]))
        self.asks = [(f"limiter-{place}", "key", limit) for place, limit in enumerate(chosen)]
        self.ids = [f"id-{number}" for number in range(self.chance.choice([3, 8, 40]))]
        self.longest = self.chance.choice([5, 30, 300])
        self.keep = self.chance.choice([10, 200]) * SECOND
        self.done: list[str] = []

    def costs(self) -> list[int]:
        return [self.chance.choice([0, 1, 1, 2, 3, 5, 7]) for _ in self.asks]

    def step(self) -> None:
        chance = self.chance
        costs = self.costs()
        asks = [Ask(*ask, cost) for ask, cost in zip(self.asks, costs, strict=True)]
        hold_id, low = chance.choice(self.ids), chance.choice([0, 100, 500])
        name, arguments = chance.choice(
            [
                ("apply", (Verb.CHECK, asks, low)),
                ("apply", (Verb.CHECK, [chance.choice(asks)], low)),
                ("apply", (Verb.PEEK, asks, low)),
                ("apply", (chance.choice([Verb.CHARGE, Verb.REFUND]), [chance.choice(asks)], low)),
                *[("hold", (asks, low, self.terms(hold_id)))] * 6,
                *[("settle", (asks, low, hold_id, chance.choice([costs, costs, None])))] * 3,
                ("cancel", (asks, low, hold_id)),
                *[("extend", (asks, low, hold_id, chance.choice([costs, None]), self.lease()))] * 2,
                ("find_hold", (asks, low, hold_id)),
                ("list_holds", (asks[0].name, "key", 100)),
                *[("advance", ())] * 3,
            ]
        )
        if name == "advance":
            self.clock.advance(chance.choice([0, 0.000_001, 0.1, 1, 1, self.longest, chance.uniform(0, 40), 1800]))
            return
        self.compare(name, arguments)

    def compare(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Have a verb carried out by both stores, and compare their answers."""
        self.done.append(f"{self.clock.now()}: {name}{arguments}")
        outcomes = [apply_verb(store, name, arguments) for store in self.stores]
        assert outcomes[0] == outcomes[1], "\n".join([*self.done[-40:], f"{outcomes[0]}", f"{outcomes[1]}"])

    def terms(self, hold_id: str) -> HoldTerms:
        return HoldTerms(hold_id, self.chance.randint(1, self.longest) * SECOND, self.release, self.keep)

    def lease(self) -> int | None:
        return self.chance.choice([None, 0, self.chance.randint(1, self.longest) * SECOND])


def apply_verb(store: HoldStore, name: str, arguments: tuple[Any, ...]) -> object:
    """What a verb answers, or the error that it raises, so that those of two stores can be compared."""
    try:
        if name == "cancel":
            asks, low, hold_id = arguments
            return comparable_answer(store.settle(asks, low, hold_id, [0] * len(asks), cancel=True))
        return comparable_answer(getattr(store, name)(*arguments))
    except HoldError as error:
        return type(error), str(error)


def comparable_answer(answer: object) -> object:
    """An answer, with all fields of its decision; of a list those that every store lists."""
    if isinstance(answer, list):
        return sorted([one for one in answer if not isinstance(one, ListedHold) or one.state in ("open", "expired")])
    if answer is None or isinstance(answer, ListedHold) or type(answer) is tuple:
        return answer
    decision = answer.decision if isinstance(answer, HoldAnswer) else answer
    assert isinstance(decision, Decision)
    return [decision, *((*answer.summary, answer.parts) if isinstance(answer, HoldAnswer) else [])]


@pytest.mark.parametrize("seed", range(20))
def test_holds_agree_with_memory(still: RedisStore, clock: ManualClock, seed: int) -> None:
    walk = HoldWalk([MemoryStore(clock=clock), still], clock, seed)
    for _ in range(200):
        walk.step()


BUCKETS = [
    TokenBucket(60, 11, 1),
    TokenBucket(200, 45, 1),
    TokenBucket(3000, 2, 7),
    TokenBucket(10**6, 999_983, 86_413),
]


class BucketWalk(HoldWalk):
    """Many holds of one large bucket, `most` of them at once: beyond 16, stores may join other headrooms."""

    def __init__(self, stores: list[HoldStore], clock: ManualClock, seed: int, most: int) -> None:
        super().__init__(stores, clock, seed)
        self.most = most
        limit = self.chance.choice(BUCKETS)
        self.asks = [("limiter", "key", limit)]
        self.ids = [f"id-{number}" for number in range(400)]
        self.held: list[str] = []

    def step(self) -> None:
        chance, cost = self.chance, self.chance.choice([0, 1, 1, 2, 5, 9, self.chance.randint(1, 40)])
        asks, hold_id = [Ask(*self.asks[0], cost)], chance.choice(self.ids)
        choice = chance.random()
        if choice < 0.45 and len(self.held) < self.most:
            self.ids.remove(hold_id)
            self.held.append(hold_id)
            self.compare("hold", (asks, 100, HoldTerms(hold_id, 10**9, self.release, 10**9)))
        elif choice < 0.7 and self.held:
            settled = self.held.pop(chance.randrange(len(self.held)))
            self.compare("settle", (asks, 100, settled, [cost]))
        elif choice < 0.8:
            self.compare("apply", (chance.choice([Verb.CHECK, Verb.CHARGE, Verb.REFUND]), asks, 100))
        else:
            self.clock.advance(chance.choice([0.001, 0.05, 0.3, chance.uniform(0, 1)]))


@pytest.mark.parametrize("seed", range(24))
def test_buckets_with_many_holds_agree_with_memory(still: RedisStore, clock: ManualClock, seed: int) -> None:
    walk = BucketWalk([MemoryStore(clock=clock), still], clock, seed, MOST)
    for _ in range(300):
        walk.step()


@pytest.mark.parametrize("seed", range(10))
def test_budgets_agree_with_memory_when_the_clock_steps_back(still: RedisStore, clock: ManualClock, seed: int) -> None:
    """After something was spent: what changes nothing isn't stored, not even that a period has begun."""
    chance, walk = random.Random(seed), HoldWalk([MemoryStore(clock=clock), still], clock, seed)
    clock.advance(86_400)
    for number in range(80):
        asks = [Ask("name", "key", Budget(30, "hour"), chance.randint(1, 5))]
        if chance.random() < 0.3:
            clock.advance(chance.randint(1, 5000))
        elif chance.random() < 0.3:
            clock.step_back(chance.randint(1, 5000))
        elif chance.random() < 0.5:
            walk.compare("apply", (Verb.CHARGE, asks, 0))
        else:
            walk.compare("hold", (asks, 0, HoldTerms(f"{number}", 10**11, False, 10**11)))


LEVELS: list[tuple[str, str, Limit]] = [
    ("usage", "acme/search/planner\tweb\tusd", Meter("Europe/Berlin")),
    ("usage", "acme/search/planner\t\ttokens", Meter()),
    ("usd", "acme", Budget(40, "day")),
    ("usd", "acme/search", Budget(25)),
    ("tokens", "acme", TokenBucket(30, 7, 1)),
    ("tokens", "acme/search", per_minute(60, burst=10)),
    ("tokens", "acme/search/planner", AllOf([per_second(6), per_minute(200)])),
    ("tokens", "acme/search/planner/run-42", SlidingWindow(30, 60)),
    ("slots", "acme", Slots(4)),
    ("slots", "acme/search", Slots(3)),
    ("slots", "acme/search/planner", AllOf([Slots(2), Budget(60, "hour")])),
]


class FormWalk(HoldWalk):
    """Verbs on accounts in two stores, one of which sends no request in its short form."""

    def __init__(self, stores: list[HoldStore], clock: ManualClock, seed: int) -> None:
        super().__init__(stores, clock, seed)
        chosen = self.chance.sample(LEVELS, self.chance.choice([1, 2, 4, 7]))
        self.levels = [Ask(*level, 1, "acme") for level in chosen]

    def step(self) -> None:
        chance = self.chance
        costs = [1, *[chance.choice([0, 1, 1, 2, 3, 5, 7]) for _ in self.levels]]
        home = Ask("accounts", "acme", UNLIMITED, 1)
        asks = [home, *[ask.with_cost(cost) for ask, cost in zip(self.levels, costs[1:], strict=True)]]
        hold_id, low = chance.choice(self.ids), chance.choice([0, 100, 500])
        name, arguments = chance.choice(
            [
                ("apply", (Verb.CHECK, [chance.choice(asks[1:])], low)),
                ("apply", (chance.choice([Verb.CHARGE, Verb.REFUND]), [chance.choice(asks[1:])], low)),
                *[("hold", (asks, low, self.terms(hold_id)))] * 8,
                *[("settle", (asks, low, hold_id, chance.choice([costs, costs, None])))] * 5,
                *[("cancel", (asks, low, hold_id))] * 2,
                *[("extend", (asks, low, hold_id, chance.choice([costs, None]), self.lease()))] * 2,
                ("find_hold", (asks, low, hold_id)),
                ("list_holds", ("accounts", "acme", 100)),
                ("read_hold", ("accounts", "acme", hold_id)),
                ("read_usage", ("usage", 0, 2**53 - 1, "acme")),
                ("peek_each", (asks, low)),
                *[("advance", ())] * 4,
            ]
        )
        if name == "advance":
            self.clock.advance(chance.choice([0, 0.000_001, 0.1, 1, 1, self.longest, chance.uniform(0, 40), 40_000]))
            return
        self.compare(name, arguments)

    def terms(self, hold_id: str) -> HoldTerms:
        chance = self.chance
        usual = super().terms(hold_id)
        return HoldTerms(
            hold_id,
            usual.lease,
            release=chance.random() < 0.1,
            keep=usual.keep,
            forced=chance.random() < 0.1,
            note=chance.choice(["", "web\trun-42"]),
            shape=chance.choice(["", "the list of limits"]),
            most=chance.choice([3, 1000]),
        )


@pytest.fixture
def forms(server: ValkeyServer, clock: ManualClock) -> Iterator[list[HoldStore]]:
    """A store that sends requests in their short form, and one that doesn't."""
    with (
        RedisStore(server.url, clock=clock, timeout=PATIENCE, prefix="short:") as short,
        RedisStore(server.url, clock=clock, timeout=PATIENCE, prefix="long:") as long,
    ):
        long.keys.short_forms = False
        yield [short, long]


@pytest.mark.parametrize("seed", range(30))
def test_both_forms_of_requests_do_the_same(forms: list[HoldStore], clock: ManualClock, seed: int) -> None:
    for walk in (FormWalk(forms, clock, seed), BucketWalk(forms, clock, seed, 400)):
        walk.release = False
        for _ in range(150):
            walk.step()


@pytest.mark.parametrize("seed", range(4))
def test_both_forms_join_the_same_headrooms(forms: list[HoldStore], clock: ManualClock, seed: int) -> None:
    """A bucket with more holds than it has entries for their headrooms."""
    walk, chance = HoldWalk(forms, clock, seed), random.Random(seed)
    asks = [Ask("name", "key", TokenBucket(10**6, 3, 1), 1)]
    ids = [f"{number}" for number in range(90)]
    for hold_id in ids:
        cost = chance.choice([1, 2, 9, 50, 900])
        walk.compare("hold", ([asks[0].with_cost(cost)], 0, HoldTerms(hold_id, 10**11, False, 10**11)))
        clock.advance(chance.choice([0, 0.1, 0.3]))
        if chance.random() < 0.1:
            walk.compare("apply", (Verb.CHECK, asks, 0))
    for hold_id in chance.sample(ids, len(ids)):
        walk.compare("settle", (asks, 0, hold_id, [chance.choice([0, 1, 5, 1000])]))
