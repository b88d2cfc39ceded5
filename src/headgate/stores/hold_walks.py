"""Walks of a store and of the reference through the same holds, at random: the last of the cases for holds."""

import asyncio
import random
from collections.abc import Callable, Sequence
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from headgate.errors import HoldError
from headgate.limits.decision import Decision
from headgate.stores.base import Ask, Verb
from headgate.stores.harness import MICROSECOND, HoldHarness, MakeStore, NotConforming, cases_of, expect
from headgate.stores.holds import EXPIRED, OPEN, HoldAnswer, HoldStore, HoldTerms, ListedHold
from headgate.stores.reference import LOW, BucketModel, BudgetModel, Model, SlotsModel, WindowModel, joined
from headgate.stores.reference_holds import HoldReference

Answer: TypeAlias = HoldAnswer | Decision | type[Exception]
Call: TypeAlias = tuple[str, list[Any], dict[str, bool]]
"""A method of a store, and the arguments."""


class HoldVerb(Enum):
    """The action of a step of a walk."""

    HOLD = "hold"
    SETTLE = "settle"
    CANCEL = "cancel"
    EXTEND = "extend"
    FIND = "find"
    CHECK = "check"
    CHARGE = "charge"
    REFUND = "refund"


class HoldStep(NamedTuple):
    """A step of a walk."""

    verb: HoldVerb
    span: int
    """Microseconds to go on before it."""
    costs: tuple[int, ...]
    terms: HoldTerms
    actual: list[int] | None
    """The costs to settle with, or to extend to."""
    lease: int | None
    """The lease to extend to."""

    def call(self, asks: Callable[[Sequence[int]], list[Ask]]) -> Call:
        costs = self.costs if self.verb is HoldVerb.HOLD else [max(cost, 1) for cost in self.costs]
        return call_of(self.verb, asks(costs), self.terms, self.actual, self.lease)


def call_of(verb: HoldVerb, asks: list[Ask], terms: HoldTerms, actual: Sequence[int] | None, lease: int | None) -> Call:
    """The call of a store that a verb means."""
    if verb is HoldVerb.HOLD:
        return "hold", [asks, LOW, terms], {}
    if verb is HoldVerb.SETTLE:
        return "settle", [asks, LOW, terms.hold_id, actual], {}
    if verb is HoldVerb.CANCEL:
        return "settle", [asks, LOW, terms.hold_id, [0] * len(asks)], {"cancel": True}
    if verb is HoldVerb.EXTEND:
        return "extend", [asks, LOW, terms.hold_id, actual, lease], {}
    if verb is HoldVerb.FIND:
        return "find_hold", [asks, LOW, terms.hold_id], {}
    return "apply", [Verb(verb.value), asks, LOW], {}


def random_asked(chance: random.Random) -> list[list[Model]]:
    """One or two keys under limits that are small enough that a walk meets their bounds."""
    return [_random_small(chance) for _ in range(chance.choice((1, 1, 1, 2)))]


def _random_small(chance: random.Random) -> list[Model]:
    makers: dict[str, Callable[[], Model]] = {
        "bucket": lambda: BucketModel(chance.choice((1, 5, 10, 30)), Fraction(chance.choice((1, 3, 60))), Fraction(1)),
        "slow": lambda: BucketModel(chance.choice((5, 10, 30)), Fraction(chance.choice((1, 7))), Fraction(60)),
        "window": lambda: WindowModel(chance.choice((1, 5, 10, 30)), Fraction(chance.choice((1, 10, 61)))),
        "budget": lambda: BudgetModel(chance.choice((5, 20, 100)), chance.choice((None, "hour", "day"))),
        "slots": lambda: SlotsModel(chance.choice((1, 2, 3))),
    }
    kinds = chance.sample(sorted(makers), chance.choice((1, 1, 2, 3)))
    return [makers[kind]() for kind in kinds]


def random_hold_steps(
    chance: random.Random, asked: Sequence[Sequence[Model]], count: int, ids: int = 5
) -> list[HoldStep]:
    """So many steps on a few ids, about as long as leases are and buckets take to be full."""
    refundable = all(isinstance(model, BucketModel | SlotsModel) for models in asked for model in models)
    verbs = [verb for verb in HoldVerb if refundable or verb is not HoldVerb.REFUND]
    verbs += [HoldVerb.HOLD, HoldVerb.HOLD, HoldVerb.SETTLE, HoldVerb.SETTLE, HoldVerb.EXTEND, HoldVerb.CHECK]
    leases = (1, 400_000, 1_000_000, 5_000_000, 60_000_000)
    steps = []
    for _ in range(count):
        verb, hold_id = chance.choice(verbs), f"hold-{chance.randint(1, ids)}"
        span = chance.choice((0, 0, 0, 1, 100_000, 333_333, 999_999, 1_000_000, 7_000_000, 600_000_000))
        terms = HoldTerms(hold_id, chance.choice(leases), chance.random() < 0.5, chance.choice((0, 1_000_000, 10**7)))
        costs = tuple(chance.choice((0, 1, 1, 2, 3, 5, 12)) for _ in asked)
        actual = None if chance.random() < 0.3 else [chance.choice((0, 1, 2, 3, 5, 12, 20)) for _ in asked]
        lease = chance.choice((None, None, 0, *leases))
        steps.append(HoldStep(verb, span, costs, terms, actual, lease))
    return steps


def random_overlaps(chance: random.Random, count: int) -> list[HoldStep]:
    """So many steps with ever new holds and long leases, in which a bucket of 1 a second is nearly full at times."""
    verbs = (HoldVerb.HOLD, HoldVerb.HOLD, HoldVerb.SETTLE, HoldVerb.SETTLE, HoldVerb.CHECK)
    held = 0
    steps = []
    for _ in range(count):
        verb = chance.choice(verbs)
        held += verb is HoldVerb.HOLD
        hold_id = f"hold-{held if verb is HoldVerb.HOLD else chance.randint(1, max(held, 1))}"
        terms = HoldTerms(hold_id, 10**10, False, 10**10)
        span = chance.choice((0, 1, 2, 3, 5)) * 1_000_000
        cost = chance.choice((1, 2, 5, 9))
        steps.append(HoldStep(verb, span, (cost,), terms, [chance.choice((0, 0, 1, 3))], None))
    return steps


def many_holds(chance: random.Random, count: int) -> list[HoldStep]:
    """So many holds of 30 at once, while a bucket of 1 a second gets 29 back for each, and then an end to all of them.

    So what it lacks grows by one from hold to hold, and little can be given back to any of them.
    """
    terms = [HoldTerms(f"hold-{number}", 10**10, False, 10**10) for number in range(count)]
    made = [HoldStep(HoldVerb.HOLD, 29_000_000, (30,), one, None, None) for one in terms]
    return made + [HoldStep(HoldVerb.SETTLE, 0, (1,), one, [0], None) for one in chance.sample(terms, count)]


def compare_holds(make: MakeStore, asked: Sequence[Sequence[Model]], steps: Sequence[HoldStep]) -> None:
    """Walk a store and the reference through the same steps.

    Expect the same of each as long as the reference is exact, and from then on that the store never gives more.
    """
    harness = HoldHarness(make, asked[0][0].limit)
    reference, asks = HoldReference(harness.clock), partial(asks_for, asked)
    for number, step in enumerate(steps):
        harness.clock.advance(step.span * MICROSECOND)
        what = f"step {number} {step} on {[str(ask.limit) for ask in asks(step.costs)]}"
        got, expected = answers_of(harness.holds, reference, step.call(asks))
        if reference.exact:
            expect(what, got, _with_parts_of(expected, got))
            listed, known = harness.holds.list_holds("name-0", "key", 100), reference.list_holds("name-0", "key")
            expect(f"listed after {what}", sorted(unsettled(listed)), sorted(unsettled(known)))
        else:
            expect_no_more(what, got, expected)


def asks_for(asked: Sequence[Sequence[Model]], costs: Sequence[int]) -> list[Ask]:
    """The asks for these costs, each with a name of its own."""
    return [Ask(f"name-{i}", "key", joined(models), costs[i]) for i, models in enumerate(asked)]


def unsettled(listed: Sequence[ListedHold]) -> list[ListedHold]:
    """The holds that every store lists."""
    return [one for one in listed if one.state in (OPEN, EXPIRED)]


def answers_of(store: HoldStore, reference: HoldReference, call: Call) -> tuple[Answer, Answer]:
    """The answers of a store and of the reference, which grants all that the store grants once it isn't exact."""
    got = _answer(store, call)
    reference.granted = None if reference.exact or isinstance(got, type) else bool(_decision(got))
    return got, _answer(reference, call)


def _answer(store: HoldStore | HoldReference, call: Call) -> Answer:
    method, arguments, options = call
    try:
        answer: HoldAnswer | Decision = getattr(store, method)(*arguments, **options)
    except HoldError as error:
        return type(error)
    return answer


def _with_parts_of(expected: Answer, got: Answer) -> Answer:
    """The expected answer, without the decision on each part if a store has none: only accounts need them."""
    if isinstance(expected, HoldAnswer) and isinstance(got, HoldAnswer) and not got.parts:
        return expected.without_parts()
    return expected


def _decision(answer: HoldAnswer | Decision) -> Decision:
    return answer.decision if isinstance(answer, HoldAnswer) else answer


def expect_no_more(what: str, got: Answer, expected: Answer) -> None:
    """Expect that a store has granted nothing, and has nothing left, that the reference hasn't."""
    if isinstance(got, type) or isinstance(expected, type):
        expect(what, got, expected)
        return
    given, most = _decision(got), _decision(expected)
    if (given and not most) or (given.limit == most.limit and given.remaining > most.remaining):
        raise NotConforming(f"{what}: expected at most {most!r}, got {given!r}")


def compare_async_holds(make: MakeStore, asked: Sequence[Sequence[Model]], steps: Sequence[HoldStep]) -> None:
    """Walk two stores through the same steps, one of them by its async twins."""

    async def walk() -> None:
        sync, twin = HoldHarness(make, asked[0][0].limit), HoldHarness(make, asked[0][0].limit)
        asks = partial(asks_for, asked)
        for step in steps:
            for harness in (sync, twin):
                harness.clock.advance(step.span * MICROSECOND)
            method, arguments, options = call = step.call(asks)
            expected = _answer(sync.holds, call)
            try:
                got: Answer = await getattr(twin.holds, f"a{method}")(*arguments, **options)
            except HoldError as error:
                got = type(error)
            expect(f"the async twin of {step}", got, expected)
        listed = await twin.holds.alist_holds("name-0", "key", 100)
        expect("alist_holds", sorted(listed), sorted(sync.holds.list_holds("name-0", "key", 100)))

    asyncio.run(walk())


def random_holds_equal_the_reference(make: MakeStore) -> None:
    chance = random.Random(5)  # noqa: S311
    for _ in range(60):
        asked = random_asked(chance)
        compare_holds(make, asked, random_hold_steps(chance, asked, 40))


def overlapping_holds_equal_the_reference(make: MakeStore) -> None:
    chance = random.Random(17)  # noqa: S311
    for count in [30] * 60 + [100] * 10:
        bucket = BucketModel(chance.choice((20, 40, 100)), Fraction(1), Fraction(1))
        compare_holds(make, [[bucket]], random_overlaps(chance, count))


def many_holds_get_back_no_more_than_is_due(make: MakeStore) -> None:
    chance = random.Random(19)  # noqa: S311
    for count in (16, 17, 40, 100):
        for _ in range(3):
            compare_holds(make, [[BucketModel(1000, Fraction(1), Fraction(1))]], many_holds(chance, count))


def the_async_twins_hold_the_same(make: MakeStore) -> None:
    chance = random.Random(13)  # noqa: S311
    for _ in range(10):
        asked = random_asked(chance)
        compare_async_holds(make, asked, random_hold_steps(chance, asked, 30))


WALKS: Final = cases_of(globals())
