"""Checks that are answered without asking the server: of keys it has just denied, and from tokens drawn ahead.

A **denial** is remembered until the wait that the server said is over, but for a second at most, so that a reset or a
refund elsewhere takes effect soon. It answers for costs at least as high. Its violations are owed to the server, and
sent within a second.

**Drawn tokens** are a slice of a bucket that a node has taken ahead of its checks. The server counts them against the
capacity until they expire, so that all nodes together never let more pass than the limit does. A node draws for busy
keys, and gives back unused ones.
"""

import secrets
from typing import Final

from headgate._native import i64, mypyc_attr
from headgate.lifecycle import new_lock
from headgate.limits.clock import Clock
from headgate.limits.decision import DENY, NEVER, Decision, Limit, Rule, Violation
from headgate.limits.numbers import LARGEST
from headgate.limits.token_bucket import BucketState, TokenBucket
from headgate.stores.base import Ask, Offence
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.protocol import DrawRequest, ViolationRequest

LIFETIME: Final[i64] = 1_000_000
"""Microseconds for which drawn tokens last, and for which a denial is remembered at most."""

_BUSY_WITHIN: Final[i64] = 200_000  # a key that is asked for again within so many microseconds is busy
_IDLE_AFTER: Final[i64] = 300_000  # tokens that were not used for so many microseconds go back
_MAX_KEYS: Final = 10_000  # under one limit


@mypyc_attr(acyclic=True)
class CachedDenial:
    """A decision of the server to deny: for which cost, and until when on this process's clock."""

    def __init__(self, cost: i64, until: i64, said_at: i64, decision: Decision) -> None:
        self.cost: Final = cost
        self.until: Final = until
        self.said_at: Final = said_at
        self.decision: Final = decision


@mypyc_attr(acyclic=True)
class DrawnTokens:
    """Tokens in hand, until when on this process's clock, and the bucket as it would be if nobody else drew from it."""

    def __init__(self, now: i64) -> None:
        self.number: i64 = 0
        self.tokens: i64 = 0
        self.until: i64 = now
        self.used_at: i64 = now
        self.clock_ahead: i64 = 0  # by how much the server's clock is ahead of this process's
        self.draw: i64 = 0  # the number of the draw that is under way; 0 for none
        self.draw_ends: i64 = now  # when that is given up: whoever made it may have been interrupted
        self.bucket = BucketState(0, 0)

    def is_drawing(self, now: i64) -> bool:
        """Whether more are being drawn."""
        return self.draw != 0 and now < self.draw_ends


class LimitCache:
    """The `LocalCache` of one limiter's name and limit.

    Its lock is reentrant: a finalizer may use the cache in the middle of a step, wherever something is allocated. So
    copies are walked through, and what is dropped may be gone.
    """

    def __init__(self, caches: "LocalCaches", name: str, limit: Limit, slice_: i64) -> None:
        self.name: Final = name
        self.limit: Final = limit
        self.slice: Final = slice_  # tokens to draw ahead; 0 for none
        self.pinned = False  # somebody keeps it
        self._caches: Final = caches
        self._denials: Final[dict[str, CachedDenial]] = {}
        self._drawn: Final[dict[str, DrawnTokens]] = {}

    def serve(self, key: str, cost: i64, low: i64, offence: Offence | None) -> Decision | None:
        """The decision on a check, if it can be made here."""
        caches = self._caches
        now: i64 = caches.now()
        with caches.lock:
            denial = self._denials.get(key)
            if denial is not None and cost >= denial.cost:
                if now < denial.until:
                    return self._deny(key, denial, now, offence)
                self._denials.pop(key, None)
            if self.slice == 0:
                return None
            drawn = self._drawn.get(key)
            if drawn is None or drawn.tokens < cost or now >= drawn.until:
                return None
            drawn.tokens -= cost
            drawn.used_at = now
            limit, bucket = self.limit, drawn.bucket
            now += drawn.clock_ahead
            limit.wait(bucket, now, 0)
            limit.spend(bucket, now, cost)
            return limit.decide(bucket, now, 0, 0, low)

    def _deny(self, key: str, denial: CachedDenial, now: i64, offence: Offence | None) -> Decision:
        decision = denial.decision.after(now - denial.said_at)
        if offence is None:
            return decision
        before = denial.decision.violation
        owed = self._caches.owe(offence)
        count = owed if before is None else before.count + owed
        return decision.with_violation(Violation(count, offence.backoff.advised(count), False))

    def start_draw(self, ask: Ask, low: i64, offence: Offence | None, keys: Keys) -> DrawRequest | None:
        """A check of a busy key that also draws tokens for the next ones; None if the key isn't busy."""
        if self.slice == 0 or (offence is not None and offence.backoff.enforce):
            return None
        now: i64 = self._caches.now()
        with self._caches.lock:
            drawn = self._drawn.get(ask.key)
            if drawn is None:
                self._make_room(now)
                self._drawn[ask.key] = DrawnTokens(now)
                return None
            busy, drawn.used_at = now - drawn.used_at < _BUSY_WITHIN, now
            if drawn.is_drawing(now) or not busy:
                return None
            unused, drawn.tokens = drawn.tokens if now < drawn.until else i64(0), 0
            new = self._caches.next_number()
            drawn.draw, drawn.draw_ends = new, now + LIFETIME
            return DrawRequest(keys, ask, low, offence, self.slice, unused, drawn.number, new, LIFETIME)

    def end_draw(self, key: str, draw: DrawRequest, answered: bool, asked_at: i64) -> None:
        """Take in the granted tokens; none, if the server didn't answer, or the key was dropped here meanwhile."""
        with self._caches.lock:
            drawn = self._drawn.get(key)
            if drawn is None or drawn.draw != draw.number:
                return
            drawn.draw = 0
            if answered and draw.granted > 0:
                drawn.number = draw.number
                drawn.tokens = draw.granted
                drawn.until = asked_at + LIFETIME
                drawn.clock_ahead = draw.now - self._caches.now()
                drawn.bucket = draw.bucket

    def remember_denial(self, key: str, cost: i64, decision: Decision, asked_at: i64) -> None:
        """Remember a denial of the server's."""
        own = decision.own_wait()
        if decision._outcome is not DENY or decision.degraded or own == 0:
            return
        until = asked_at + (LIFETIME if own == NEVER or own > LIFETIME else own)
        with self._caches.lock:
            if len(self._denials) >= _MAX_KEYS:
                self._denials.clear()
            self._denials[key] = CachedDenial(cost, until, self._caches.now(), decision)

    def forget(self, key: str, keys: Keys) -> list[DrawRequest]:
        """Drop the cache of a key; the requests that give its tokens back."""
        with self._caches.lock:
            self._denials.pop(key, None)
            return self._give_back([key], self._caches.now(), keys)

    def clear(self) -> None:
        """Drop the cache of every key, and give nothing back."""
        with self._caches.lock:
            self._denials.clear()
            self._drawn.clear()

    def drop_idle(self, keys: Keys, everything: bool) -> list[DrawRequest]:
        """Drop denials that are over and tokens that are idle, or all tokens; the requests that give them back."""
        now: i64 = self._caches.now()
        with self._caches.lock:
            for key in [key for key, denial in list(self._denials.items()) if now >= denial.until]:
                self._denials.pop(key, None)
            found = [
                key
                for key, drawn in list(self._drawn.items())
                if not drawn.is_drawing(now) and (everything or now - drawn.used_at > _IDLE_AFTER)
            ]
            return self._give_back(found, now, keys)

    def _give_back(self, found: list[str], now: i64, keys: Keys) -> list[DrawRequest]:
        requests = []
        for key in found:
            drawn = self._drawn.pop(key, None)
            if drawn is not None and drawn.tokens > 0 and now < drawn.until:
                ask = Ask(self.name, key, self.limit, 0)
                requests.append(DrawRequest(keys, ask, 0, None, 0, drawn.tokens, drawn.number, 0, LIFETIME))
        return requests

    def _make_room(self, now: i64) -> None:
        if len(self._drawn) >= _MAX_KEYS:  # tokens that are dropped here expire in the server
            for key, drawn in list(self._drawn.items()):
                if now >= drawn.until and not drawn.is_drawing(now):
                    self._drawn.pop(key, None)
            if len(self._drawn) >= _MAX_KEYS:
                self._drawn.clear()

    def is_empty(self) -> bool:
        return not self._drawn and not self._denials


class LocalCaches:
    """The local caches of one store, and the violations that it owes to the server."""

    def __init__(self, clock: Clock, remember_denials: bool, draw_ahead: i64) -> None:
        self.now: Final = clock.now
        self.lock: Final = new_lock()
        self.remember_denials: Final = remember_denials
        self._draw_ahead: Final = draw_ahead  # share of a capacity, in thousandths
        self._caches: Final[dict[tuple[str, Limit], LimitCache]] = {}
        self._owed: dict[Offence, int] = {}
        self._last_number: i64 = secrets.randbits(51)

    def next_number(self) -> i64:
        """A number for drawn tokens that no others have. The lock is held."""
        self._last_number += 1
        return self._last_number

    def of(self, name: str, limit: Limit) -> LimitCache:
        """The cache of a limiter's name and limit."""
        found = self._caches.get((name, limit))
        if found is None:
            slice_: i64 = limit.capacity * self._draw_ahead // 1000 if isinstance(limit, TokenBucket) else 0
            found = self._caches.setdefault((name, limit), LimitCache(self, name, limit, slice_))
        return found

    def owe(self, offence: Offence) -> i64:
        """Count a violation that the server doesn't know of yet. The lock is held."""
        owed = self._owed.get(offence, 0) + 1
        self._owed[offence] = owed
        return owed

    def take_owed(self, keys: Keys, only: Offence | None = None) -> list[ViolationRequest]:
        """The violations to send to the server, of every agent or of one."""
        with self.lock:
            if only is None:
                owed, self._owed = self._owed, {}
                return [ViolationRequest(keys, offence, times) for offence, times in owed.items()]
            times = self._owed.pop(only, 0)
            return [ViolationRequest(keys, only, times)] if times else []

    def owe_again(self, offence: Offence, times: int) -> None:
        """Put violations back that could not be sent."""
        with self.lock:
            self._owed[offence] = min(self._owed.get(offence, 0) + times, LARGEST)

    def clear(self, name: str, rule: Rule) -> None:
        """Drop what is cached of every key under a name and a rule, and give nothing back."""
        if isinstance(rule, Limit):
            self.of(name, rule).clear()
            return
        with self.lock:
            for offence in [one for one in self._owed if (one.name, one.backoff) == (name, rule)]:
                del self._owed[offence]

    def reset(self) -> None:
        """Drop everything that is cached, and give nothing back."""
        with self.lock:
            self._owed = {}
        for cache in list(self._caches.values()):
            cache.clear()

    def drop_idle(self, keys: Keys, everything: bool = False) -> list[DrawRequest]:
        """`LimitCache.drop_idle` for all of them. Empty ones that nobody keeps go: rare limits must not pile up."""
        requests = []
        for which, cache in list(self._caches.items()):
            requests.extend(cache.drop_idle(keys, everything))
            if cache.is_empty() and not cache.pinned:
                self._caches.pop(which, None)  # should a thread use it meanwhile: its tokens expire in the server
        return requests

    def after_fork(self) -> None:
        """In a forked process: drop the parent's state."""
        self._last_number = secrets.randbits(51)
        self.reset()

    def need_flush(self) -> bool:
        """Whether there is anything to send or to give back, now or later."""
        return bool(self._owed) or not all([cache.is_empty() for cache in list(self._caches.values())])
