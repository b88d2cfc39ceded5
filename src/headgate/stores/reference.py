"""A slow model of limits in exact fractions, written from their definition and not from the way stores count."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import ceil, floor
from typing import Final, Self
from zoneinfo import ZoneInfo

from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.clock import ManualClock
from headgate.limits.decision import Decision, Details, Limit, Outcome
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.meter import Meter
from headgate.limits.numbers import LARGEST, microseconds
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import TokenBucket
from headgate.stores.base import Verb

LOW: Final = 200
"""The share of the capacity, in thousandths, below which the reference warns."""

_ZERO: Final = datetime.fromtimestamp(0, UTC) + timedelta(seconds=ManualClock().wall())  # when a `ManualClock` shows 0
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class Model(ABC):
    """A limit by its definition, for one key. Times are whole microseconds; nothing else is rounded."""

    def __init__(self, limit: Limit, most: int, scale: int = 1) -> None:
        self.limit = limit
        self.most = most
        """The largest cost, in smallest units."""
        self.scale = scale
        """Smallest units of a cost in a whole one."""

    def fresh(self) -> Self:
        """The same without a count, if this one has none: what changes is replaced, and never changed in place."""
        return copy(self)

    @abstractmethod
    def left(self, now: int) -> Fraction:
        """Smallest units, below zero in debt."""

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

    def decide(self, now: int, wait: int, pending: int, low: int) -> Decision:
        """The decision with this wait, on a request that would still take `pending`."""
        left = self.left(now)
        if wait != 0:
            outcome = Outcome.DENY
        elif (left - pending) * 1000 < self.most * low:
            outcome = Outcome.WARN
        else:
            outcome = Outcome.ALLOW
        reset = min(max(self.whole_at(now) - now, 0), LARGEST)
        details = None if self.scale == 1 else Details(wait, None, None, False, max(floor(left), 0))
        return Decision(outcome, self.limit, max(floor(left / self.scale), 0), wait, reset, -1, details)

    def countable(self, now: int, cost: int) -> bool:
        """Whether `cost` can be counted as a whole."""
        return True

    def wait(self, now: int, cost: int) -> int:
        """The wait until `cost` passes; -1 if it never does."""
        at = self.passes_at(now, cost)
        return -1 if at is None else min(at - now, LARGEST)


class BucketModel(Model):
    """A bucket by its spent tokens, and the time since it was last full."""

    def __init__(self, capacity: int, refill: Fraction, per: Fraction) -> None:
        limit = TokenBucket(capacity, refill, per)
        super().__init__(limit, capacity)
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
        return self.most - self.spent + ticks * self.tick * self.rate

    def whole_at(self, now: int) -> int:
        return self.full_at + ceil(self.spent / self.rate)

    def passes_at(self, now: int, cost: int) -> int | None:
        if cost > self.most:
            return None
        if self.left(now) >= cost:
            return now
        ticks = ceil((cost - self.most + self.spent) / (self.tick * self.rate))
        return min(self.full_at + ticks * self.tick, self.whole_at(now))

    def countable(self, now: int, cost: int) -> bool:
        return cost <= min(self.left(now), Fraction(0)) - self.deepest

    def spend(self, now: int, cost: int) -> None:
        left = self.left(now)
        self.spent += min(Fraction(cost), left - self.deepest)

    def refund(self, now: int, cost: int) -> None:
        if self.left(now) + cost >= self.most:
            self.full_at, self.spent = self.latest, Fraction(0)
        else:
            self.spent -= cost


class WindowModel(Model):
    """Every request, one by one."""

    def __init__(self, limit: int, window: Fraction) -> None:
        super().__init__(SlidingWindow(limit, window), limit)
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

    def countable(self, now: int, cost: int) -> bool:
        return cost <= LARGEST - self.most + self.left(now)

    def spend(self, now: int, cost: int) -> None:
        self.left(now)
        self.log += [max([now, *self.log[-1:]])] * cost  # a clock that stepped back stands still

    def refund(self, now: int, cost: int) -> None:
        self.left(now)
        del self.log[max(len(self.log) - cost, 0) :]


class BudgetModel(Model):
    """The usage in each period of UTC, or in all."""

    def __init__(self, amount: int, period: str | None, unit: str = "") -> None:
        scale = 10 ** Budget(1, unit=unit).decimals
        super().__init__(Budget(Fraction(amount, scale), period, unit=unit), amount, scale)
        self.period = period
        self.used: dict[int, int] = {}

    def _begun(self, now: int) -> int:
        """The start of the period that is counted. A clock that stepped back stands still."""
        return max([self._bounds(now)[0], *[start for start, used in self.used.items() if used]])

    def _bounds(self, now: int) -> tuple[int, int]:
        """The start of the period of a moment, and that of the next one."""
        if self.period is None:
            return 0, now + LARGEST
        shown = (_ZERO + now * _MICROSECOND).replace(minute=0, second=0, microsecond=0)
        if self.period == "hour":
            start, end = shown, shown + timedelta(hours=1)
        elif self.period == "month":
            start = shown.replace(day=1, hour=0)
            end = (start + timedelta(days=31)).replace(day=1)
        elif self.period == "year":
            start = shown.replace(month=1, day=1, hour=0)
            end = start.replace(year=start.year + 1)
        else:
            weekly = self.period == "week"
            start = shown.replace(hour=0) - timedelta(days=shown.weekday() if weekly else 0)
            end = start + timedelta(days=7 if weekly else 1)
        return (start - _ZERO) // _MICROSECOND, (end - _ZERO) // _MICROSECOND

    def left(self, now: int) -> Fraction:
        return Fraction(self.most - self.used.get(self._begun(now), 0))

    def whole_at(self, now: int) -> int:
        begun = self._begun(now)
        return now if self.period is None and not self.used.get(begun) else self._bounds(max(begun, now))[1]

    def passes_at(self, now: int, cost: int) -> int | None:
        if cost > self.most:
            return None
        if cost <= self.left(now):
            return now
        return None if self.period is None else self.whole_at(now)

    def countable(self, now: int, cost: int) -> bool:
        return cost <= LARGEST - self.most + self.left(now)

    def spend(self, now: int, cost: int) -> None:
        begun = self._begun(now)
        self.used = {**self.used, begun: min(self.used.get(begun, 0) + cost, LARGEST)}

    def refund(self, now: int, cost: int) -> None:
        begun = self._begun(now)
        self.used = {**self.used, begun: max(self.used.get(begun, 0) - cost, 0)}


class SlotsModel(Model):
    """The end of each lease."""

    def __init__(self, count: int) -> None:
        super().__init__(Slots(count), count)
        self.ends: list[int] = []

    def left(self, now: int) -> Fraction:
        return Fraction(self.most - len(self._under_way(now)))

    def _under_way(self, now: int) -> list[int]:
        return sorted(end for end in self.ends if end > now)

    def whole_at(self, now: int) -> int:
        return max([now, *self._under_way(now)])

    def passes_at(self, now: int, cost: int) -> int | None:
        ends = self._under_way(now)
        return now if len(ends) < self.most else ends[len(ends) - self.most]

    def spend(self, now: int, cost: int) -> None:
        """Only a hold takes a slot."""

    def refund(self, now: int, cost: int) -> None:
        """Only a hold gives one back."""

    def decide(self, now: int, wait: int, pending: int, low: int) -> Decision:
        return super().decide(now, wait, 0, low)


class FixedModel(Model):
    """Everything passes, or nothing does."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit, limit.capacity)

    def left(self, now: int) -> Fraction:
        return Fraction(self.most)

    def whole_at(self, now: int) -> int:
        return now

    def passes_at(self, now: int, cost: int) -> int | None:
        return now if self.most else None

    def spend(self, now: int, cost: int) -> None:
        """Nothing is counted."""

    def refund(self, now: int, cost: int) -> None:
        """Nothing is counted."""

    def decide(self, now: int, wait: int, pending: int, low: int) -> Decision:
        return super().decide(now, wait, 0, low)


class MeterModel(FixedModel):
    """The usage of each day of a zone, by the start of the day in microseconds since 1970. Everything passes."""

    def __init__(self, zone: str = "UTC") -> None:
        super().__init__(Meter(zone))
        self.zone = ZoneInfo(zone)
        self.days: dict[int, int] = {}

    def _day(self, now: int) -> int:
        shown = (_ZERO + now * _MICROSECOND).astimezone(self.zone)
        return (datetime(shown.year, shown.month, shown.day, tzinfo=self.zone) - _EPOCH) // _MICROSECOND

    def countable(self, now: int, cost: int) -> bool:
        return cost <= LARGEST - self.days.get(self._day(now), 0)

    def spend(self, now: int, cost: int) -> None:
        day = self._day(now)
        self.days = {**self.days, day: self.days.get(day, 0) + cost}

    def refund(self, now: int, cost: int) -> None:
        self.spend(now, -cost)


def model_of(limit: Limit) -> Model:
    """The model of a single limit. Budgets are those of UTC."""
    if limit in (UNLIMITED, BLOCKED):
        return FixedModel(limit)
    if isinstance(limit, TokenBucket):
        return BucketModel(*limit.fields())
    if isinstance(limit, SlidingWindow):
        most, span = limit.integers()
        return WindowModel(most, Fraction(span, 1_000_000))
    if isinstance(limit, Budget) and limit.zone == "UTC":
        return BudgetModel(limit.integers()[0], limit.period, limit.unit)
    if isinstance(limit, Slots):
        return SlotsModel(limit.capacity)
    if isinstance(limit, Meter):
        return MeterModel(limit.zone)
    raise NotImplementedError(limit)


class ReferenceKey:
    """One key under some limits, all or nothing."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = models
        self.limit: Limit = joined(models)

    def apply(self, verb: Verb, now: int, cost: int, low: int = LOW) -> Decision:
        waits = [model.wait(now, cost) for model in self.models]
        passed = verb is Verb.CHECK and not any(waits)
        for model in self.models:
            if passed or verb is Verb.CHARGE:
                model.spend(now, cost)
            elif verb is Verb.REFUND:
                model.refund(now, cost)
        pending = 0 if passed else cost if verb in (Verb.CHECK, Verb.PEEK) else 1
        if verb in (Verb.CHARGE, Verb.REFUND):
            waits = [model.wait(now, 1) for model in self.models]
        decisions = [self.models[i].decide(now, waits[i], pending, low) for i in range(len(waits))]
        return binding(decisions, range(len(waits)))


def joined(models: Sequence[Model]) -> Limit:
    """The limits of some models as one."""
    return models[0].limit if len(models) == 1 else AllOf([model.limit for model in models])


def binding(decisions: Sequence[Decision], places: Sequence[int]) -> Decision:
    """Of several decisions the denial with the longest wait, or a warning, or the one with the least left."""

    def rank(index: int) -> tuple[int, float, int]:
        one = decisions[index]
        if one.outcome is Outcome.DENY:
            return 0, -(LARGEST + 1 if one.retry_us is None else one.retry_us), index
        return 1 if one.outcome is Outcome.WARN else 2, one.remaining, index

    first = min(range(len(decisions)), key=rank)
    return decisions[first] if len(decisions) == 1 else decisions[first].at(places[first])


def random_models(chance: random.Random) -> list[Model]:
    """One to three limits of any kind and size."""
    models: list[Model] = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        kind = chance.random()
        if kind < 0.3:
            models.append(WindowModel(chance.randint(1, 20), Fraction(chance.randint(1, 3_000_000), 1_000_000)))
        elif kind < 0.8:
            capacity = chance.choice((1, 2, 7, 60, 10**9))
            refill = Fraction(chance.randint(1, 100), chance.choice((1, 1, 3, 7)))
            models.append(BucketModel(capacity, refill, Fraction(chance.choice((1, 60, 86_400)))))
        else:
            models.append(_random_shared(chance))
    seen: dict[object, Model] = {}
    for model in models:  # a limit has each budget once, and slots once
        seen.setdefault(model.limit.identity, model)
    return list(seen.values())


def _random_shared(chance: random.Random) -> Model:
    """A budget or slots."""
    if chance.random() < 0.3:
        return SlotsModel(chance.choice((1, 2, 5)))
    return BudgetModel(chance.choice((1, 7, 60, 10**9)), chance.choice((None, "hour", "day", "week", "month", "year")))


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
