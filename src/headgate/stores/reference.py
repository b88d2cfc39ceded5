"""A slow model of limits in exact fractions, written from their definition and not from the way stores count."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor
from typing import Final

from headgate.limits.all_of import AllOf
from headgate.limits.decision import Decision, Limit, Outcome
from headgate.limits.numbers import LARGEST, microseconds
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.token_bucket import TokenBucket
from headgate.stores.base import Verb

LOW: Final = 200
"""The share of the capacity, in thousandths, below which the reference warns."""


class Model(ABC):
    """A limit by its definition, for one key. Times are whole microseconds; nothing else is rounded."""

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
    """A bucket by its spent tokens, and the time since it was last full."""

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
    """So many (verb, microseconds to go on before it, cost).

    The clock steps back only right after something was counted: a store needn't record the time of a peek or a denial.
    """
    verbs = (Verb.CHECK, Verb.CHECK, Verb.CHECK, Verb.PEEK, Verb.CHARGE, Verb.REFUND)
    spans = (0, 0, 1, 999, 100_000, 1_000_000, 86_400_000_000, -1, -500_000)
    steps: list[tuple[Verb, int, int]] = []
    while len(steps) < count:
        span = chance.choice(spans)
        if span < 0:
            steps.append((Verb.CHARGE, 0, 1))
        steps.append((chance.choice(verbs), span, chance.choice((1, 1, 2, 5, 50))))
    return steps
