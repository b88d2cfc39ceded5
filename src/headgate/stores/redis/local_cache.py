"""Checks that are answered without asking the server: of keys it has just denied, and from tokens drawn ahead.

A **denial** is remembered until the wait that the server said is over, but not for longer than a second, so that a
reset or a refund elsewhere holds soon. It answers for costs at least as high. Its violations are owed to the server,
and sent within a second.

A **lease** is a slice of a bucket's tokens that a node has drawn ahead. The server counts it against the capacity until
it ends, so that all nodes together never let more pass than the limit does. A node draws for keys that are busy; what
it doesn't use it gives back.
"""

import secrets
import threading
from typing import Final

from headgate._native import i64, mypyc_attr
from headgate.limits.clock import Clock
from headgate.limits.decision import DENY, NEVER, Decision, Limit, Violation
from headgate.limits.numbers import LARGEST
from headgate.limits.token_bucket import BucketState, TokenBucket
from headgate.stores.base import Ask, Offence
from headgate.stores.redis.protocol import Draw, Keys, Offend

SPAN: Final[i64] = 1_000_000
"""Microseconds for which a lease lasts, and for which a denial is remembered at the most."""

_BUSY: Final[i64] = 200_000  # a key that is asked for again within so many microseconds is busy
_IDLE: Final[i64] = 300_000  # after so long unused, a lease goes back
_MOST: Final = 10_000  # keys for which something is kept under one limit


@mypyc_attr(acyclic=True)
class Denial:
    """What a server said no to: for which cost, until when on this process's clock, and its decision."""

    def __init__(self, cost: i64, until: i64, said_at: i64, decision: Decision) -> None:
        self.cost: Final = cost
        self.until: Final = until
        self.said_at: Final = said_at
        self.decision: Final = decision


@mypyc_attr(acyclic=True)
class Lease:
    """Tokens in hand, until when on this process's clock, and what the bucket would be if nobody else drew from it."""

    def __init__(self, now: i64) -> None:
        self.number: i64 = 0
        self.tokens: i64 = 0
        self.until: i64 = now
        self.used_at: i64 = now
        self.ahead: i64 = 0  # by how much the server's clock is ahead of this process's
        self.drawing = False
        self.bucket = BucketState(0, 0)


class Spared:
    """What is kept for the keys of one limiter's name and limit."""

    def __init__(self, sparing: "Sparing", name: str, limit: Limit, slice_: i64) -> None:
        self.name: Final = name
        self.limit: Final = limit
        self.slice: Final = slice_  # tokens to draw ahead; 0 for none
        self._sparing: Final = sparing
        self._denials: Final[dict[str, Denial]] = {}
        self._leases: Final[dict[str, Lease]] = {}

    def serve(self, key: str, cost: i64, low: i64, offence: Offence | None) -> Decision | None:
        """The decision on a check, if it can be made here."""
        sparing = self._sparing
        now: i64 = sparing.now()
        with sparing.lock:
            denial = self._denials.get(key)
            if denial is not None and cost >= denial.cost:
                if now < denial.until:
                    return self._deny(key, denial, now, offence)
                del self._denials[key]
            if self.slice == 0:
                return None
            lease = self._leases.get(key)
            if lease is None or lease.tokens < cost or now >= lease.until:
                return None
            lease.tokens -= cost
            lease.used_at = now
            limit, bucket = self.limit, lease.bucket
            now += lease.ahead
            limit.wait(bucket, now, 0)
            limit.spend(bucket, now, cost)
            return limit.decide(bucket, now, 0, 0, low)

    def _deny(self, key: str, denial: Denial, now: i64, offence: Offence | None) -> Decision:
        decision = denial.decision.after(now - denial.said_at)
        if offence is None:
            return decision
        before = denial.decision.violation
        owed = self._sparing.owe(offence)
        count = owed if before is None else before.count + owed
        return decision.with_violation(Violation(count, offence.backoff.advised(count), False))

    def draws(self, ask: Ask, low: i64, offence: Offence | None, keys: Keys) -> Draw | None:
        """What to ask the server for so that the next checks of a busy key can be served; None if it isn't busy."""
        if self.slice == 0 or (offence is not None and offence.backoff.enforce):
            return None
        now: i64 = self._sparing.now()
        with self._sparing.lock:
            lease = self._leases.get(ask.key)
            if lease is None:
                self._make_room(now)
                self._leases[ask.key] = Lease(now)
                return None
            busy, lease.used_at = now - lease.used_at < _BUSY, now
            if lease.drawing or not busy:
                return None
            lease.drawing = True
            unused, lease.tokens = lease.tokens if now < lease.until else i64(0), 0
            new = self._sparing.number()
            return Draw(keys, ask, low, offence, self.slice, unused, lease.number, new, SPAN)

    def drawn(self, key: str, draw: Draw | None, asked_at: i64) -> None:
        """Take in what the server let this node have; nothing, if it didn't answer."""
        with self._sparing.lock:
            lease = self._leases.get(key)
            if lease is None:
                return
            lease.drawing = False
            if draw is not None and draw.granted > 0:
                lease.number = draw.lease
                lease.tokens = draw.granted
                lease.until = asked_at + SPAN
                lease.ahead = draw.now - self._sparing.now()
                lease.bucket = draw.bucket

    def denied(self, key: str, cost: i64, decision: Decision, asked_at: i64) -> None:
        """Remember what the server said no to."""
        own = decision.own_wait()
        if decision._outcome is not DENY or decision.degraded or own == 0:
            return
        until = asked_at + (SPAN if own == NEVER or own > SPAN else own)
        with self._sparing.lock:
            if len(self._denials) >= _MOST:
                self._denials.clear()
            self._denials[key] = Denial(cost, until, self._sparing.now(), decision)

    def forget(self, key: str, keys: Keys) -> list[Draw]:
        """Drop what is kept for a key; what to give back to the server."""
        with self._sparing.lock:
            self._denials.pop(key, None)
            return self._back([key], self._sparing.now(), keys)

    def forget_all(self) -> None:
        with self._sparing.lock:
            self._denials.clear()
            self._leases.clear()

    def idle(self, keys: Keys, all_of_them: bool) -> list[Draw]:
        """What to give back of leases that are not used any more."""
        now: i64 = self._sparing.now()
        with self._sparing.lock:
            for key in [key for key, denial in self._denials.items() if now >= denial.until]:
                del self._denials[key]
            found = [
                key
                for key, lease in self._leases.items()
                if not lease.drawing and (all_of_them or now - lease.used_at > _IDLE)
            ]
            return self._back(found, now, keys)

    def _back(self, found: list[str], now: i64, keys: Keys) -> list[Draw]:
        backs = []
        for key in found:
            lease = self._leases.pop(key, None)
            if lease is not None and lease.tokens > 0 and now < lease.until:
                ask = Ask(self.name, key, self.limit, 0)
                backs.append(Draw(keys, ask, 0, None, 0, lease.tokens, lease.number, 0, SPAN))
        return backs

    def _make_room(self, now: i64) -> None:
        if len(self._leases) >= _MOST:  # those that are out come back by themselves
            for key in [key for key, lease in self._leases.items() if now >= lease.until and not lease.drawing]:
                del self._leases[key]
            if len(self._leases) >= _MOST:
                self._leases.clear()

    def keeps(self) -> bool:
        """Whether anything is kept."""
        return bool(self._leases) or bool(self._denials)


class Sparing:
    """What one store keeps so as to ask the server less."""

    def __init__(self, clock: Clock, denials: bool, share: i64) -> None:
        self.now: Final = clock.now
        self.lock = threading.Lock()
        self._remembers: Final = denials
        self._share: Final = share  # of a capacity, in thousandths
        self._tables: Final[dict[tuple[str, Limit], Spared]] = {}
        self._owed: dict[Offence, int] = {}
        self._numbered: i64 = secrets.randbits(51)

    def number(self) -> i64:
        """A number for a lease, which no other has. The lock is held."""
        self._numbered += 1
        return self._numbered

    @property
    def remembers(self) -> bool:
        """Whether denials are remembered."""
        return self._remembers

    def table(self, name: str, limit: Limit) -> Spared:
        found = self._tables.get((name, limit))
        if found is None:
            slice_: i64 = limit.capacity * self._share // 1000 if isinstance(limit, TokenBucket) else 0
            found = self._tables.setdefault((name, limit), Spared(self, name, limit, slice_))
        return found

    def owe(self, offence: Offence) -> i64:
        """Count a violation that the server will be told of. The lock is held."""
        owed = self._owed.get(offence, 0) + 1
        self._owed[offence] = owed
        return owed

    def take_owed(self, keys: Keys, only: Offence | None = None) -> list[Offend]:
        """What the server has to be told, of everybody or of one."""
        with self.lock:
            if only is None:
                owed, self._owed = self._owed, {}
                return [Offend(keys, offence, times) for offence, times in owed.items()]
            times = self._owed.pop(only, 0)
            return [Offend(keys, only, times)] if times else []

    def owe_again(self, offence: Offence, times: int) -> None:
        """What could not be sent is still owed."""
        with self.lock:
            self._owed[offence] = min(self._owed.get(offence, 0) + times, LARGEST)

    def idle(self, keys: Keys, all_of_them: bool = False) -> list[Draw]:
        """What to give back."""
        return [draw for table in list(self._tables.values()) for draw in table.idle(keys, all_of_them)]

    def forked(self) -> None:
        """In a process that was forked: what is kept here is the parent's."""
        self.lock = threading.Lock()
        self._owed = {}
        self._numbered = secrets.randbits(51)
        for table in self._tables.values():
            table.forget_all()

    def busy(self) -> bool:
        """Whether there is anything to send or to give back, now or later."""
        return bool(self._owed) or any([table.keeps() for table in list(self._tables.values())])
