"""What every store must do, as a suite that any store can be run through.

    import pytest
    from headgate.stores import conformance

    @pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)
    def test_my_store(case):
        case(lambda clock: MyStore(clock=clock))

Each case is a function that gets a way to make an empty store whose time is the `ManualClock` it is handed, and
raises `NotConforming` where the store is wrong. `run` calls them all. The reference is a slow model in exact
fractions, written from the meaning of a limit and not from the way stores count.
"""

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil, floor
from typing import Final, TypeAlias

from headgate.clock import ManualClock
from headgate.core import Decision, Limit, Outcome
from headgate.inputs import LARGEST, microseconds
from headgate.limits import BLOCKED, UNLIMITED, AllOf, TokenBucket, per_day, per_minute, per_second
from headgate.stores import Ask, Store, Verb
from headgate.windows import SlidingWindow

MakeStore: TypeAlias = Callable[[ManualClock], Store]
Case: TypeAlias = Callable[[MakeStore], None]
LOW: Final = 200
"""The share of the capacity, in thousandths, below which the cases ask to be warned."""


class NotConforming(AssertionError):
    """A store did something else than it must."""


# The reference -------------------------------------------------------------------------------------------------------


class Model(ABC):
    """What a limit means, for one key. Times are whole microseconds; nothing else is rounded."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit

    @abstractmethod
    def left(self, now: int) -> Fraction:
        """Tokens, below zero in debt."""

    @abstractmethod
    def passes_at(self, now: int, cost: int) -> int | None:
        """The first moment at which `cost` passes, or None."""

    @abstractmethod
    def whole_at(self, now: int) -> int:
        """The moment at which everything has come back."""

    @abstractmethod
    def spend(self, now: int, cost: int) -> None: ...

    @abstractmethod
    def refund(self, now: int, cost: int) -> None: ...


class BucketModel(Model):
    """Since the bucket was last full, so much was spent and so much time has passed: that is all there is to it."""

    def __init__(self, capacity: int, refill: Fraction, per: Fraction) -> None:
        limit = TokenBucket(capacity, refill, per)
        super().__init__(limit)
        self.capacity = capacity
        self.rate = refill / per / 1_000_000  # tokens per microsecond
        self.tick = microseconds("tick", limit.tick)
        self.deepest = Fraction(-LARGEST, (self.rate * self.tick).denominator)  # debt, as far as it can be counted
        self.full_at = 0
        self.spent = Fraction(0)
        self.latest = 0

    def left(self, now: int) -> Fraction:
        full = self.whole_at(self.latest) <= self.latest
        # A clock that steps back stands still until it has caught up; a full bucket has no time to remember.
        self.latest = now = now if full else max(now, self.latest)
        if full or self.whole_at(now) <= now:
            self.full_at, self.spent = now, Fraction(0)
        ticks = (now - self.full_at) // self.tick
        return self.capacity - self.spent + ticks * self.tick * self.rate

    def whole_at(self, now: int) -> int:
        return self.full_at + ceil(self.spent / self.rate)

    def passes_at(self, now: int, cost: int) -> int | None:
        if cost > self.capacity:
            return None
        if self.left(now) >= cost:
            return now
        ticks = ceil((cost - self.capacity + self.spent) / (self.tick * self.rate))
        return min(self.full_at + ticks * self.tick, self.whole_at(now))

    def spend(self, now: int, cost: int) -> None:
        left = self.left(now)
        self.spent += min(Fraction(cost), left - self.deepest)

    def refund(self, now: int, cost: int) -> None:
        if self.left(now) + cost >= self.capacity:
            self.full_at, self.spent = self.latest, Fraction(0)
        else:
            self.spent -= cost


class WindowModel(Model):
    """Every request, one by one."""

    def __init__(self, limit: int, window: Fraction) -> None:
        super().__init__(SlidingWindow(limit, window))
        self.most = limit
        self.window = int(window * 1_000_000)
        self.log: list[int] = []  # when each token was spent

    def left(self, now: int) -> Fraction:
        self.log = [made for made in self.log if made + self.window > now]
        return Fraction(self.most - len(self.log))

    def whole_at(self, now: int) -> int:
        return self.log[-1] + self.window if self.log else now

    def passes_at(self, now: int, cost: int) -> int | None:
        if cost > self.most:
            return None
        excess = cost - int(self.left(now))
        return now if excess <= 0 else self.log[excess - 1] + self.window

    def spend(self, now: int, cost: int) -> None:
        self.left(now)
        self.log += [max([now, *self.log[-1:]])] * cost  # a clock that stepped back stands still

    def refund(self, now: int, cost: int) -> None:
        self.left(now)
        del self.log[max(len(self.log) - cost, 0) :]


class ReferenceKey:
    """One key under some limits, all or nothing."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = models
        self.limit: Limit = models[0].limit if len(models) == 1 else AllOf([model.limit for model in models])

    def apply(self, verb: Verb, now: int, cost: int, low: int = LOW) -> Decision:
        waits = [self._wait(model, now, cost) for model in self.models]
        passed = verb is Verb.CHECK and not any(waits)
        for model in self.models:
            if passed or verb is Verb.CHARGE:
                model.spend(now, cost)
            elif verb is Verb.REFUND:
                model.refund(now, cost)
        pending = 0 if passed else cost if verb in (Verb.CHECK, Verb.PEEK) else 1
        if verb in (Verb.CHARGE, Verb.REFUND):
            waits = [self._wait(model, now, 1) for model in self.models]
        ranked = []
        for position, (model, wait) in enumerate(zip(self.models, waits, strict=True)):
            left = model.left(now)
            if wait != 0:
                outcome, rank = Outcome.DENY, (0, -(10**30) if wait < 0 else -wait)
            elif (left - pending) * 1000 < model.limit.capacity * low:
                outcome, rank = Outcome.WARN, (1, floor(left))
            else:
                outcome, rank = Outcome.ALLOW, (2, floor(left))
            reset = min(max(model.whole_at(now) - now, 0), LARGEST)
            bound = position if len(self.models) > 1 else -1
            ranked.append((rank, position, Decision(outcome, model.limit, max(floor(left), 0), wait, reset, bound)))
        return min(ranked)[2]

    @staticmethod
    def _wait(model: Model, now: int, cost: int) -> int:
        at = model.passes_at(now, cost)
        return -1 if at is None else min(at - now, LARGEST)


# Cases ---------------------------------------------------------------------------------------------------------------


class Bench:
    """A store with its clock, and what the cases do with them."""

    def __init__(self, make: MakeStore) -> None:
        self.clock = ManualClock(start=1000)
        self.store = make(self.clock)

    def apply(self, verb: Verb, limit: Limit, key: str = "key", cost: int = 1, name: str = "") -> Decision:
        return self.store.apply(verb, [Ask(name, key, limit, cost)], LOW)

    def check(self, limit: Limit, key: str = "key", cost: int = 1, name: str = "") -> Decision:
        return self.apply(Verb.CHECK, limit, key, cost, name)

    def passed(self, limit: Limit, times: int, key: str = "key", cost: int = 1) -> int:
        return sum(bool(self.check(limit, key, cost)) for _ in range(times))


def expect(what: str, got: object, expected: object) -> None:
    """Raise `NotConforming` unless both are equal."""
    if got != expected:
        raise NotConforming(f"{what}: expected {expected!r}, got {got!r}")


def a_new_key_is_full(make: MakeStore) -> None:
    bench = Bench(make)
    decision = bench.check(per_minute(60))
    expect("the first request on 60", (decision.outcome, decision.remaining), (Outcome.ALLOW, 59))
    expect("its reset", decision.reset_after, 1.0)


def a_burst_of_capacity_passes_and_no_more(make: MakeStore) -> None:
    for limit in (per_day(100), SlidingWindow(100, 86_400), AllOf([per_day(100), SlidingWindow(120, 60)])):
        expect(f"passed of a burst on {limit}", Bench(make).passed(limit, 250), 100)


def a_denial_spends_nothing(make: MakeStore) -> None:
    for limit in (per_minute(10), SlidingWindow(10, 60)):
        bench = Bench(make)
        bench.check(limit, cost=7)
        for cost in (4, 10, 11, 10**15):
            expect(f"a cost of {cost} with 3 left", bool(bench.check(limit, cost=cost)), False)
        expect(f"left after denials on {limit}", bench.apply(Verb.PEEK, limit).remaining, 3)


def a_cost_above_the_capacity_never_passes(make: MakeStore) -> None:
    for limit in (per_minute(10), SlidingWindow(10, 60), BLOCKED):
        bench = Bench(make)
        decision = bench.check(limit, cost=11)
        expect(f"11 on {limit}", (decision.outcome, decision.retry_after), (Outcome.DENY, None))
        expect("reset", bench.store.forget("", "key", limit), False)


def a_denial_holds_until_its_wait_is_over(make: MakeStore) -> None:
    for limit in (per_minute(7, burst=3), per_second(Fraction(10, 3), burst=2), SlidingWindow(3, 7)):
        bench = Bench(make)
        bench.passed(limit, 5)
        wait = bench.check(limit).retry_after
        if not wait:
            raise NotConforming(f"the wait on {limit}: expected a time, got {wait!r}")
        bench.clock.advance(Fraction(str(wait)) - Fraction(1, 1_000_000))
        expect(f"one tick before the wait on {limit} is over", bool(bench.check(limit)), False)
        bench.clock.advance(Fraction(1, 1_000_000))
        expect(f"when the wait on {limit} is over", bool(bench.check(limit)), True)


def polling_loses_no_refill(make: MakeStore) -> None:
    bench = Bench(make)
    passed = bench.passed(per_minute(90, burst=2), 3)
    for _ in range(6000):
        bench.clock.advance(0.1)
        passed += bench.passed(per_minute(90, burst=2), 2)
    expect("passed of 90 a minute with burst 2 in 600 s", passed, 902)


def a_step_back_neither_gives_nor_takes(make: MakeStore) -> None:
    for limit in (per_minute(60, burst=5), SlidingWindow(5, 5)):
        bench = Bench(make)
        bench.passed(limit, 4)
        before = bench.apply(Verb.PEEK, limit).remaining
        bench.clock.step_back(0.9)
        expect(f"left on {limit} after the clock stepped back", bench.apply(Verb.PEEK, limit).remaining, before)
        bench.clock.advance(0.9)
        expect(f"left on {limit} when it has caught up", bench.apply(Verb.PEEK, limit).remaining, before)


def refund_stops_at_the_capacity(make: MakeStore) -> None:
    for limit in (per_minute(10), SlidingWindow(10, 60)):
        bench = Bench(make)
        bench.check(limit, cost=6)
        expect("left after a refund of 2", bench.apply(Verb.REFUND, limit, cost=2).remaining, 6)
        expect("left after a refund of 100", bench.apply(Verb.REFUND, limit, cost=100).remaining, 10)
        expect("passed after it", bench.passed(limit, 20), 10)


def charge_may_leave_a_debt(make: MakeStore) -> None:
    bench = Bench(make)
    decision = bench.apply(Verb.CHARGE, per_minute(10), cost=25)
    expect("after 25 of 10 were charged", (bool(decision), decision.remaining), (False, 0))
    expect("the wait", decision.retry_after, 96.0)  # 15 of debt and the one asked for, at one in six seconds
    bench.clock.advance(96)
    expect("passed when the debt is paid", bench.passed(per_minute(10), 5), 1)


def forgetting_fills_up(make: MakeStore) -> None:
    bench = Bench(make)
    limit = per_minute(10)
    expect("forgetting an unknown key", bench.store.forget("", "key", limit), False)
    bench.check(limit, cost=10)
    expect("forgetting a known one", bench.store.forget("", "key", limit), True)
    expect("passed after it", bench.passed(limit, 20), 10)


def keys_names_and_limits_are_apart(make: MakeStore) -> None:
    bench = Bench(make)
    odd = ["", "a", "a:b", "b", "{a}", "a}", "\n", "\0", "ä", "a\N{COMBINING DIAERESIS}", "\U0001f600", "x" * 10_000]
    for key in odd:
        for name in ("", "a", "a:", ":b"):
            for limit in (per_day(1), per_day(1, burst=2), SlidingWindow(1, 60)):
                expect(f"the first of {name!r} {key!r}", bool(bench.check(limit, key, limit.capacity, name)), True)
                expect(f"the second of {name!r} {key!r}", bool(bench.check(limit, key, name=name)), False)


def several_limits_pass_together_or_not_at_all(make: MakeStore) -> None:
    bench = Bench(make)
    both = AllOf([per_minute(100), per_minute(2, burst=2)])
    expect("passed", bench.passed(both, 10), 2)
    decision = bench.check(both)
    expect("the one that bound", (decision.bound, str(decision.limit)), (1, "2/minute"))
    bench.clock.advance(30)
    decision = bench.apply(Verb.PEEK, both)
    expect("after one came back", (bool(decision), decision.bound, decision.remaining), (True, 1, 1))


def several_keys_pass_together_or_not_at_all(make: MakeStore) -> None:
    team, agent = Ask("team", "t", per_minute(5), 2), Ask("agent", "a", SlidingWindow(3, 60), 1)
    for asks in ([team, agent], [agent, team]):
        bench = Bench(make)
        outcomes = [bool(bench.store.apply(Verb.CHECK, asks, LOW)) for _ in range(4)]
        expect("two keys at once", outcomes, [True, True, False, False])
        expect("left for the team", bench.apply(Verb.PEEK, team.limit, "t", 1, "team").remaining, 1)
        expect("left for the agent", bench.apply(Verb.PEEK, agent.limit, "a", 1, "agent").remaining, 1)
        denied = bench.store.apply(Verb.CHECK, asks, LOW)
        expect("the one that bound", (denied.bound, denied.limit), (asks.index(team), team.limit))


def unlimited_and_blocked_count_nothing(make: MakeStore) -> None:
    bench = Bench(make)
    expect("passed of unlimited", bench.passed(UNLIMITED, 100, cost=10**12), 100)
    expect("passed of blocked", bench.passed(BLOCKED, 100), 0)
    expect("forgetting", bench.store.forget("", "key", UNLIMITED), False)


def warnings_begin_below_a_fifth(make: MakeStore) -> None:
    for limit in (per_day(10), SlidingWindow(10, 60)):
        bench = Bench(make)
        outcomes = [bench.check(limit).outcome.value[0] for _ in range(12)]
        expect(f"outcomes on {limit}", "".join(outcomes), "aaaaaaaawwdd")


def threads_are_counted_exactly(make: MakeStore) -> None:
    for limit in (per_day(50), SlidingWindow(50, 3600)):
        bench = Bench(make)
        start = threading.Barrier(8)
        passed: list[int] = []

        def hammer(limit: Limit = limit, bench: Bench = bench, start: threading.Barrier = start) -> None:
            start.wait()
            passed.append(bench.passed(limit, 20))  # noqa: B023

        threads = [threading.Thread(target=hammer) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expect(f"passed of 8 threads on {limit}", sum(passed), 50)


def random_traces_equal_the_reference(make: MakeStore) -> None:
    chance = random.Random(7)  # noqa: S311
    for _ in range(60):
        compare_with_reference(make, random_models(chance), random_steps(chance, 60))


def random_models(chance: random.Random) -> list[Model]:
    """One to three limits of any kind and size."""
    models: list[Model] = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if chance.random() < 0.3:
            models.append(WindowModel(chance.randint(1, 20), Fraction(chance.randint(1, 3_000_000), 1_000_000)))
        else:
            capacity = chance.choice((1, 2, 7, 60, 10**9))
            refill = Fraction(chance.randint(1, 100), chance.choice((1, 1, 3, 7)))
            models.append(BucketModel(capacity, refill, Fraction(chance.choice((1, 60, 86_400)))))
    return models


def random_steps(chance: random.Random, count: int) -> list[tuple[Verb, int, int]]:
    """So many (verb, microseconds to go on before it, cost)."""
    verbs = (Verb.CHECK, Verb.CHECK, Verb.CHECK, Verb.PEEK, Verb.CHARGE, Verb.REFUND)
    spans = (0, 0, 1, 999, 100_000, 1_000_000, 86_400_000_000, -1, -500_000)
    return [(chance.choice(verbs), chance.choice(spans), chance.choice((1, 1, 2, 5, 50))) for _ in range(count)]


def compare_with_reference(make: MakeStore, models: Sequence[Model], steps: Sequence[tuple[Verb, int, int]]) -> None:
    """Walk a store and the reference through the same steps, and expect the same of each."""
    bench, reference = Bench(make), ReferenceKey(models)
    for number, (verb, span, cost) in enumerate(steps):
        if span >= 0:
            bench.clock.advance(Fraction(span, 1_000_000))
        else:
            bench.clock.step_back(Fraction(-span, 1_000_000))
        expected = reference.apply(verb, bench.clock.now(), cost)
        what = f"step {number} ({verb.value} {cost}) on {reference.limit}"
        expect(what, bench.apply(verb, reference.limit, cost=cost), expected)


CASES: Final[tuple[Case, ...]] = (
    a_new_key_is_full,
    a_burst_of_capacity_passes_and_no_more,
    a_denial_spends_nothing,
    a_cost_above_the_capacity_never_passes,
    a_denial_holds_until_its_wait_is_over,
    polling_loses_no_refill,
    a_step_back_neither_gives_nor_takes,
    refund_stops_at_the_capacity,
    charge_may_leave_a_debt,
    forgetting_fills_up,
    keys_names_and_limits_are_apart,
    several_limits_pass_together_or_not_at_all,
    several_keys_pass_together_or_not_at_all,
    unlimited_and_blocked_count_nothing,
    warnings_begin_below_a_fifth,
    threads_are_counted_exactly,
    random_traces_equal_the_reference,
)


def run(make: MakeStore) -> None:
    """Run every case."""
    for case in CASES:
        case(make)
