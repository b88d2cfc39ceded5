"""The token bucket, in exact integers.

A token bucket of `refill` tokens per `per` seconds is counted in units, small enough that both the gain of a tick
(`gain`) and the cost of a token (`unit`) are whole numbers. No rate is rounded and no fraction of a token is
lost. A tick is one microsecond; where `capacity * unit` would pass 2**53, beyond which Redis' doubles are no longer
exact, the tick is the shortest power of ten microseconds, up to a second, at which it fits. Ticks are counted from
the moment at which the bucket was last full, not from a common grid, so that a coarse tick makes credit late by less
than a tick and never early.
"""

from fractions import Fraction
from math import ceil, lcm
from typing import Final, SupportsIndex

from headgate._native import i64, mypyc_attr
from headgate.errors import refuse
from headgate.limits.decision import NEVER, Decision, Limit, State, decide_one
from headgate.limits.headroom import LeastHeadroom
from headgate.limits.numbers import LARGEST, Number, decimal_text, not_decimal, positive, rate_text, whole, writable

_TICKS: Final = tuple(10**exponent for exponent in range(7))
_DEBT: Final[i64] = 2**53 - 1  # units
LONGEST: Final[i64] = 2**53 - 1  # microseconds, 285 years: no clock runs that long, and no wait is longer


@mypyc_attr(acyclic=True)
class BucketState:
    """Units in the bucket (below zero: a debt) at a moment; each whole tick since then has given `gain` more."""

    __slots__ = ("headroom", "level", "stamp")

    def __init__(self, level: i64, stamp: i64) -> None:
        self.level = level
        self.stamp = stamp
        self.headroom: LeastHeadroom | None = None  # since each hold, once there was one


class TokenBucket(Limit):
    """Up to `capacity` tokens, refilled steadily with `refill` tokens per `per` seconds.

    In any t seconds at most capacity + refill / per * t tokens pass.

    >>> TokenBucket(capacity=10, refill=60, per=60)
    TokenBucket(capacity=10, refill=60, per=60)
    >>> print(TokenBucket(capacity=10, refill=60, per=60))
    60/minute burst 10
    """

    __slots__ = (
        "_capacity",
        "_full",
        "_gain",
        "_hash",
        "_most_elapsed",
        "_most_ticks",
        "_per",
        "_refill",
        "_tick",
        "_unit",
    )

    def __init__(self, capacity: SupportsIndex, refill: Number, per: Number) -> None:
        self._capacity: Final[i64] = whole("TokenBucket capacity", capacity)
        given_refill, given_per = positive("TokenBucket refill", refill), positive("TokenBucket per", per)
        scale = lcm(not_decimal(given_refill), not_decimal(given_per))  # which makes both decimals
        written_refill, written_per = given_refill * scale, given_per * scale
        rate = given_refill / given_per
        if not (writable(written_refill) and writable(written_per)):
            written_refill, written_per = Fraction(rate.numerator), Fraction(rate.denominator)
        self._refill: Final = written_refill
        self._per: Final = written_per
        tick, unit, gain = _fit(self._capacity, rate / 1_000_000)
        if not tick:
            _refuse_extreme(rate, refill, per)
            refuse(
                "TokenBucket",
                "a capacity and a refill that can be counted exactly (a smaller capacity or a rounder refill is)",
                self,
            )
        self._tick: Final[i64] = tick
        self._unit: Final[i64] = unit
        self._gain: Final[i64] = gain
        self._full: Final[i64] = self._capacity * unit
        self._most_ticks: Final[i64] = LARGEST // tick
        # The longest time whose credit is found by multiplying alone; longer, or at a coarse tick, it takes divisions.
        self._most_elapsed: Final[i64] = LARGEST // gain if tick == 1 else 0
        self._hash: Final = hash(self.fields())

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def refill(self) -> float:
        """The tokens that come in within `per` seconds."""
        return float(self._refill)

    @property
    def per(self) -> float:
        """The seconds in which `refill` tokens come in."""
        return float(self._per)

    @property
    def tick(self) -> float:
        """The grain of its time in seconds: credit comes in at whole ticks after the bucket was last full."""
        return self._tick / 1_000_000

    def integers(self) -> tuple[int, int, int, int, int]:
        """Capacity, units of a token, units that a tick gives, microseconds of a tick, units when full."""
        return self._capacity, self._unit, self._gain, self._tick, self._full

    def fields(self) -> tuple[int, Fraction, Fraction]:
        """Capacity, refill and period, exactly."""
        return self._capacity, self._refill, self._per

    def fresh(self, now: i64) -> State:
        return BucketState(self._full, now)

    def wait(self, state: State, now: i64, cost: i64) -> i64:
        assert isinstance(state, BucketState)
        elapsed = now - state.stamp
        if elapsed < 0:  # a clock that stepped back neither takes nor gives: the level keeps its stamp
            if state.level == self._full:
                state.stamp = now
        elif 0 < elapsed <= self._most_elapsed:
            # Not `min`: in plain Python its call allocates, and a finalizer could spend before the level is written.
            level = state.level + elapsed * self._gain
            state.level = self._full if level > self._full else level  # noqa: FURB136
            state.stamp = now
        elif elapsed > 0:
            if elapsed >= self._to_full(state.level):
                state.level = self._full
                state.stamp = now
            else:
                ticks = elapsed // self._tick
                state.level += ticks * self._gain
                state.stamp += ticks * self._tick
        if cost > self._capacity:
            return NEVER
        missing = cost * self._unit - state.level
        if missing <= 0:
            return 0
        ticks = (missing + self._gain - 1) // self._gain
        until = LONGEST if ticks >= self._most_ticks else ticks * self._tick
        return self._from_now(min(until, self._to_full(state.level)), state, now)

    def _to_full(self, level: i64) -> i64:
        """Microseconds from a bucket's stamp until it is full."""
        missing = self._full - level
        ticks = missing // self._gain
        if ticks >= self._most_ticks:
            return LONGEST
        rest = missing - ticks * self._gain
        if rest == 0:
            return ticks * self._tick
        return ticks * self._tick + (rest * self._tick + self._gain - 1) // self._gain

    def _from_now(self, span: i64, state: BucketState, now: i64) -> i64:
        return span if span == LONGEST else max(span - (now - state.stamp), 0)

    def _room(self, state: BucketState, now: i64) -> i64:
        """The headroom of a bucket that is up to now, without what the tick that has begun will give."""
        room = self._full - state.level
        elapsed = now - state.stamp
        if self._tick > 1 and elapsed > 0:  # shorter than a tick, and gain * tick is no larger than LARGEST
            room -= (elapsed * self._gain + self._tick - 1) // self._tick
        if room > 0:  # not in one expression, which would make an object
            return room
        return 0

    def spend(self, state: State, now: i64, cost: i64) -> None:
        assert isinstance(state, BucketState)
        if state.headroom is not None:
            state.headroom.see(self._room(state, now))
        if cost <= self._capacity:
            level = state.level - cost * self._unit
            state.level = level if level > -_DEBT else -_DEBT  # noqa: FURB136
        elif cost > (state.level + _DEBT) // self._unit:
            state.level = -_DEBT
        else:
            state.level -= cost * self._unit

    def refund(self, state: State, cost: i64) -> None:
        assert isinstance(state, BucketState)
        if cost > (self._full - state.level) // self._unit:
            state.level = self._full
        else:
            state.level += cost * self._unit

    def countable(self, state: State, cost: i64) -> bool:
        assert isinstance(state, BucketState)
        debt = state.level if state.level < 0 else 0  # noqa: FURB136 - in plain Python a call of `min` allocates
        return cost <= (_DEBT + debt) // self._unit

    def prepare(self, state: State) -> bool:
        assert isinstance(state, BucketState)
        if state.headroom is not None:
            return False
        fresh = LeastHeadroom()
        if state.headroom is None:  # again: a finalizer may have held something, too
            state.headroom = fresh
        return True

    def mark(self, state: State) -> tuple[i64, i64]:
        assert isinstance(state, BucketState)
        headroom = state.headroom
        if headroom is None:  # not in one expression, which would make an object
            return 0, 0
        return headroom.epoch, headroom.add(self._full - state.level)

    def correct(self, state: State, now: i64, held: i64, actual: i64, mark: i64, serial: i64) -> None:
        assert isinstance(state, BucketState)
        headroom = state.headroom
        if actual > held:
            self.spend(state, now, actual - held)
        elif actual < held and headroom is not None and headroom.epoch == mark:
            headroom.see(self._room(state, now))
            least = headroom.least(serial)
            given = least if held - actual > least // self._unit else (held - actual) * self._unit
            if given > 0:
                headroom.give_back(serial, given)
                state.level += given

    def close(self, state: State, mark: i64, serial: i64) -> None:
        assert isinstance(state, BucketState)
        headroom = state.headroom
        if headroom is not None and headroom.epoch == mark:
            headroom.close(serial)

    def settle(self, state: State, now: i64, held: i64, actual: i64, mark: i64, serial: i64) -> None:
        assert isinstance(state, BucketState)
        headroom = state.headroom
        if headroom is not None and headroom.epoch == mark and actual <= held:
            least = headroom.close_lone(serial, self._room(state, now))
            if least >= 0:
                excess = held - actual
                if excess < self._capacity and excess * self._unit < least:
                    least = excess * self._unit
                state.level += least
                return
        self.correct(state, now, held, actual, mark, serial)
        self.close(state, mark, serial)

    def idle(self, state: State, now: i64) -> bool:
        assert isinstance(state, BucketState)
        return now - state.stamp >= self._to_full(state.level)

    def decide(self, state: State, now: i64, cost: i64, wait: i64, low: i64) -> Decision:
        assert isinstance(state, BucketState)
        level = state.level
        scarce = (level - cost * self._unit) * 1000 < self._full * low
        reset = self._from_now(self._to_full(level), state, now)
        return decide_one(self, wait, level // self._unit, scarce, reset)

    def _fields(self) -> tuple[int, Fraction, Fraction]:
        return self.fields()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        refill, per = decimal_text(self._refill), decimal_text(self._per)
        return f"TokenBucket(capacity={self._capacity}, refill={refill}, per={per})"

    def __str__(self) -> str:
        rate = rate_text(self._refill, self._per)
        return rate if self.capacity == ceil(self._refill) else f"{rate} burst {self._capacity}"


def limited(rate: Number, burst: SupportsIndex) -> TokenBucket:
    """`rate` tokens per second, up to `burst` at once: `limited(0.5, 10)`."""
    return TokenBucket(burst, rate, 1)


def per_second(count: Number, burst: SupportsIndex | None = None) -> TokenBucket:
    """`count` tokens per second; `burst` at once, or `count`."""
    return per_period(count, 1, burst)


def per_minute(count: Number, burst: SupportsIndex | None = None) -> TokenBucket:
    """`count` tokens per minute; `burst` at once, or `count`.

    >>> print(per_minute(60, burst=10))
    60/minute burst 10
    """
    return per_period(count, 60, burst)


def per_hour(count: Number, burst: SupportsIndex | None = None) -> TokenBucket:
    """`count` tokens per hour; `burst` at once, or `count`."""
    return per_period(count, 3_600, burst)


def per_day(count: Number, burst: SupportsIndex | None = None) -> TokenBucket:
    """`count` tokens per day; `burst` at once, or `count`."""
    return per_period(count, 86_400, burst)


def per_period(count: Number, seconds: Number, burst: SupportsIndex | None) -> TokenBucket:
    """`count` tokens per `seconds`; `burst` at once, or `count` (rounded up: of 0.5 a second one can still pass)."""
    if burst is None:
        return TokenBucket(ceil(positive("TokenBucket refill", count)), count, seconds)
    return TokenBucket(burst, count, seconds)


def _fit(capacity: int, rate: Fraction) -> tuple[int, int, int]:
    """The finest tick at which a bucket can be counted exactly, the units of a token, and the units that a tick gives.

    `rate` is in tokens per microsecond. The tick is 0 where nothing fits.
    """
    for tick in _TICKS:
        gain, unit = (rate * tick).as_integer_ratio()
        if capacity * unit <= LARGEST and gain * tick <= LARGEST:
            return tick, unit, gain
    return 0, 0, 0


def _refuse_extreme(rate: Fraction, refill: object, per: object) -> None:
    """Refuse a rate that can't be counted with any capacity."""
    where = "TokenBucket refill and per"
    if rate * LARGEST < 1:
        refuse(where, f"at least 1 in {LARGEST} seconds, or 'blocked', which lets nothing pass", (refill, per))
    if rate > LARGEST * 1_000_000:
        refuse(where, f"at most {LARGEST}000000 a second, or 'unlimited', which lets everything pass", (refill, per))
