"""The store in this process's memory.

How it stays small. A full bucket is the same as none, so an entry that is full again is dropped. No thread does this
and no check pays for a scan: now and then a check also looks at a few other entries. It takes them out of a dict that
has been set aside (`Table.old`), drops those that are full and puts the others into a new dict, so that the table of
a dict which was once large goes away with it. One round through all entries begins at most once a second, unless room
is needed.

How it stays exact. Uncompiled, or without a GIL, a lock guards every step. Compiled and under the GIL none is needed
as long as nothing between reading and writing a state can let another thread run. Only Python code can, and Python
code can only come in through an allocation that sets off the garbage collector. So wherever something is allocated,
what was read before it is read again. A sliding window can't keep to this; a store that has one takes the lock.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from types import FunctionType
from typing import Final, SupportsIndex

from headgate._native import i64
from headgate.errors import refuse
from headgate.limits.clock import Clock, MonotonicClock
from headgate.limits.decision import DENY, Decision, Details, Limit, Rule, State, Violation, binding_of
from headgate.limits.numbers import whole
from headgate.limits.violations import Backoff, Standing
from headgate.stores.base import REMEMBERED, Ask, Offence, Store, Verb
from headgate.stores.windows import MemoryWindows

_SHARDS: Final[i64] = 256
_SPLIT: Final = 4096  # entries in one dict before it is split into shards, so that no growing dict has many to move
_LOOKED_AT: Final = 3  # entries that one check looks at besides its own, if it does
_EVERY: Final[i64] = 64  # checks of known keys between two such looks, while none of them finds anything to drop
_ROUND: Final[i64] = 1_000_000  # microseconds from the start of one round to that of the next
_SPARED: Final[i64] = 10_000  # an entry used within the last so many microseconds is likely to be used again
_CROWDED: Final[i64] = 1_000_000  # the wait that a new key is told when there is no room

CHECK: Final = Verb.CHECK
CHARGE: Final = Verb.CHARGE
REFUND: Final = Verb.REFUND

_opening: Final = threading.Lock()
_log = logging.getLogger("headgate")


class Table:
    """The entries of one name and rule."""

    def __init__(self, store: "MemoryStore", rule: Rule) -> None:
        self.store: Final = store
        self.rule: Final = rule
        self.size: i64 = 0
        self.mask: i64 = 0
        self.dicts: list[dict[str, State]] = [{}]
        self.old: dict[str, State] | None = None  # set aside, on its way into the dicts
        self.next: i64 = 0  # the dict to be set aside next in this round

    def shard(self, key: str) -> i64:
        # Not the lowest bits: they choose the place within the dict.
        return 0 if self.mask == 0 else (i64(hash(key)) >> 32) & self.mask

    def find(self, key: str) -> State | None:
        found = self.dicts[self.shard(key)].get(key)
        if found is None and self.old is not None:
            found = self.old.get(key)
        return found

    def keep(self, key: str, state: State) -> None:
        self.dicts[self.shard(key)][key] = state
        self.size += 1
        self.store.size += 1

    def drop(self, key: str) -> State | None:
        state = self.find(key)
        if state is not None:
            self.dicts[self.shard(key)].pop(key, None)
            if self.old is not None:
                self.old.pop(key, None)
            self.size -= 1
            self.store.size -= 1
        return state

    def clear(self) -> None:
        """Drop every entry."""
        empty: list[dict[str, State]] = [{}]
        self.store.size -= self.size
        self.size = 0
        self.old = None
        self.dicts = empty
        self.mask = 0
        self.next = 0

    def split(self) -> None:
        if self.mask == 0 and self.old is None and len(self.dicts[0]) > _SPLIT:
            self._set_all_aside([{} for _ in range(_SHARDS)])

    def _set_all_aside(self, empty: list[dict[str, State]]) -> None:
        if self.mask == 0 and self.old is None:
            self.old = self.dicts[0]
            self.dicts = empty
            self.mask = _SHARDS - 1
            self.next = 0

    def _set_aside(self, empty: dict[str, State]) -> None:
        """Begin with the next dict. Making the empty one may have let another thread do so."""
        if self.old is None and self.next < len(self.dicts):
            self.old = self.dicts[self.next]
            self.dicts[self.next] = empty
            self.next += 1

    def look_at_one(self, now: i64) -> i64:
        """Go on with the round by one entry: 1 if it was dropped, 0 if not, -1 if the round is over."""
        if self.old is None:
            if self.next >= len(self.dicts):
                self.next = 0
                return -1
            if not self.dicts[self.next]:
                self.next += 1
                return 0
            self._set_aside({})
        old = self.old
        if not old:
            self.old = None
            return 0
        try:
            key, state = old.popitem()
        except KeyError:  # another thread had the last one
            return 0
        if old is not self.old:  # cleared meanwhile
            return 0
        if self.rule.idle(state, now - _SPARED):
            self.size -= 1
            self.store.size -= 1
            return 1
        self.dicts[self.shard(key)][key] = state
        return 0


class Buckets(Table):
    """The entries of one limiter's name and limit."""

    def __init__(self, store: "MemoryStore", limit: Limit) -> None:
        super().__init__(store, limit)
        self.limit: Final = limit
        self.guard: Callable[[object], object] | None = None  # sees each key when it is new, and may refuse it

    def take(self, key: str, cost: i64, low: i64, offenders: "Offenders | None") -> Decision:
        """Verb.CHECK on one key; a denial is recorded against it, if somebody keeps a record."""
        lock = self.store.lock
        if lock is None:
            return self._take(key, cost, low, offenders)
        with lock:
            return self._take(key, cost, low, offenders)

    def _take(self, key: str, cost: i64, low: i64, offenders: "Offenders | None") -> Decision:
        store, limit = self.store, self.limit
        now = store.now()
        if offenders is not None and offenders.holds(key, now):
            return offenders.deny(self, key, cost, low, now)
        state = self.find(key)
        if state is None:
            decision = self._take_new(key, cost, low, now)
        else:
            wait = limit.wait(state, now, cost)
            if wait == 0:
                limit.spend(state, now, cost)
                cost = 0
            decision = limit.decide(state, now, cost, wait, low)
            store.pause -= 1
            if store.pause < 0:
                store.look_around(now)
        if offenders is not None and decision.outcome is DENY and not decision.degraded:
            return decision.with_violation(offenders.record(key, now))
        return decision

    def _take_new(self, key: str, cost: i64, low: i64, now: i64) -> Decision:
        store, limit = self.store, self.limit
        if self.guard is not None:
            self.guard(key)
        if store.size >= store.max_keys:
            store.make_room(now)
        fresh = limit.fresh(now)
        state = self.find(key)  # again: another thread may have been quicker
        known = state is not None
        if state is None:
            state = fresh
        wait = limit.wait(state, now, cost)
        if wait == 0:
            if not known and store.size >= store.max_keys:
                return store.crowded(limit)
            limit.spend(state, now, cost)
            cost = 0
            if not known and not limit.idle(state, now):
                self.keep(key, state)
        decision = limit.decide(state, now, cost, wait, low)
        self.split()
        store.look_around(now)
        return decision


class Offenders(Table):
    """The violations that are recorded under one name and backoff."""

    def __init__(self, store: "MemoryStore", backoff: Backoff) -> None:
        super().__init__(store, backoff)
        self.backoff: Final = backoff

    def holds(self, key: str, now: i64) -> bool:
        """Whether somebody is denied because the advised wait isn't over."""
        if not self.backoff.enforce:
            return False
        state = self.find(key)
        return state is not None and self.backoff.left(state, now) > 0

    def record(self, key: str, now: i64) -> Violation:
        """Count a violation. Where there is no room for somebody new, it is told as the first, and not kept."""
        state = self.find(key)
        if state is None:
            self.split()
            self.store.look_around(now)
            fresh = self.backoff.fresh(now)
            state = self.find(key)  # again: another thread may have been quicker
            if state is None:
                state = fresh
                if self.store.size < self.store.max_keys:
                    self.keep(key, state)
        alert = self.backoff.record(state, now)
        count = self.backoff.count(state, now)
        return Violation(count, self.backoff.advised(count), alert)

    def deny(self, table: Buckets, key: str, cost: i64, low: i64, now: i64) -> Decision:
        """Deny one who came back before the advised wait was over."""
        limit = table.limit
        state = table.find(key)
        if state is None:
            state = limit.fresh(now)
        decision = limit.decide(state, now, cost, limit.wait(state, now, cost), low)
        return decision.with_violation(self.record(key, now))


class MemoryStore:
    """Keeps what is counted in this process's memory. Its clock is the machine's monotonic one.

    Memory follows the keys that are not full. `max_keys` bounds it: when so many keys are kept and none of the
    entries looked at can be dropped, a key that isn't known yet is denied (and the decision is `degraded`), told to
    come back in a second, and counted nowhere. Keys that are known are never dropped for it, so a blocked key stays
    blocked. (`charge` on an unknown key is always kept: what has been spent is counted.)

    >>> from headgate import Limiter, MemoryStore, per_minute
    >>> store = MemoryStore(max_keys=2)
    >>> limiter = Limiter(per_minute(1), store=store)
    >>> [bool(limiter.check(key)) for key in ("a", "b", "c", "a")]
    [True, True, False, False]
    >>> len(store)
    2
    """

    def __init__(self, *, clock: Clock | None = None, max_keys: SupportsIndex | None = None) -> None:
        self._clock: Final[Clock] = MonotonicClock() if clock is None else clock
        self._manual: Final = clock is not None
        self._read: Final[Callable[[], int]] = time.monotonic_ns  # what MonotonicClock reads, without the way there
        self._tables: Final[dict[tuple[str, Rule], Table]] = {}
        self._ring: Final[list[Table]] = []
        self._warned = False
        self.max_keys: Final[i64] = 2**62 if max_keys is None else whole("MemoryStore max_keys", max_keys)
        self.lock: threading.RLock | None = None if _uninterruptible() else threading.RLock()
        self._answering: Final = threading.Lock()
        self._answers: Final[dict[tuple[str, str, str, str], tuple[int, Decision]]] = {}  # by request id, oldest first
        self.size: i64 = 0
        self.pause: i64 = 0  # checks of known keys until the next look around
        self.turn: i64 = 0  # the table that the round has come to; as many as there are: no round is under way
        self.round_at: i64 = 0  # when the next round may begin
        self.looked_at: i64 = 0  # how many entries have been looked at besides the ones asked for

    @property
    def clock(self) -> Clock:
        return self._clock

    def __len__(self) -> int:
        """How many keys are kept."""
        return self.size

    def now(self) -> i64:
        return self._clock.now() if self._manual else self._read() // 1000

    def buckets(self, name: str, limit: Limit) -> Buckets:
        """The entries of a limiter's name and limit. They are made once: whoever asks often keeps them."""
        found = self._tables.get((name, limit))
        if found is None:
            found = self._open(name, Buckets(self, limit))
        assert isinstance(found, Buckets)
        return found

    def offenders(self, name: str, backoff: Backoff) -> Offenders:
        """The violations that are recorded under a name and backoff."""
        found = self._tables.get((name, backoff))
        if found is None:
            found = self._open(name, Offenders(self, backoff))
        assert isinstance(found, Offenders)
        return found

    def _open(self, name: str, table: Table) -> Table:
        with _opening:
            found = self._tables.get((name, table.rule))
            if found is not None:
                return found
            if self.lock is None and not table.rule.uninterrupted:
                self.lock = threading.RLock()
            self._ring.append(table)
            self._tables[(name, table.rule)] = table  # last: who finds it there doesn't come by here
            return table

    def apply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        """See `Store.apply`."""
        if not request_id:
            return self._apply_all(verb, asks, low, offence)
        identity = (verb.value, asks[0].name, asks[0].key, request_id)
        with self._answering:
            now = self.now()
            for known, answer in list(islice(self._answers.items(), 2)):  # the oldest
                if answer[0] <= now:
                    del self._answers[known]
            found = self._answers.get(identity)
            if found is not None and found[0] > now:
                return found[1]
            decision = self._apply_all(verb, asks, low, offence)
            if verb is CHARGE or verb is REFUND or (verb is CHECK and decision):
                self._answers.pop(identity, None)
                self._answers[identity] = (now + REMEMBERED, decision)
            return decision

    def _apply_all(self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None) -> Decision:
        tables = [self.buckets(ask.name, ask.limit) for ask in asks]
        offenders = None if offence is None else self.offenders(offence.name, offence.backoff)
        if len({(id(table), ask.key) for table, ask in zip(tables, asks, strict=True)}) < len(asks):
            refuse("asks", "each key once", [ask.key for ask in asks])
        offender = "" if offence is None else offence.key
        if self.lock is None:
            return self._apply(verb, asks, tables, low, offenders, offender)
        with self.lock:
            return self._apply(verb, asks, tables, low, offenders, offender)

    def _apply(
        self,
        verb: Verb,
        asks: Sequence[Ask],
        tables: list[Buckets],
        low: i64,
        offenders: Offenders | None,
        offender: str,
    ) -> Decision:
        now = self.now()
        if self.size >= self.max_keys:
            self.make_room(now)
        keys = [ask.key for ask in asks]
        costs = [ask.cost for ask in asks]
        states = [table.limit.fresh(now) for table in tables]
        known = [False] * len(states)
        waits = [0] * len(states)
        # From here to the last write nothing is allocated that the garbage collector tracks.
        passes = offenders is None or not offenders.holds(offender, now)
        new: i64 = 0
        for i in range(len(states)):
            found = tables[i].find(keys[i])
            if found is not None:
                states[i] = found
                known[i] = True
            else:
                new += 1
            waits[i] = tables[i].limit.wait(states[i], now, costs[i])
            passes = passes and waits[i] == 0
        if verb is CHECK and passes and new and self.size + new > self.max_keys:
            return self.crowded(tables[0].limit)
        if verb is CHARGE or (verb is CHECK and passes):
            for i in range(len(states)):
                limit = tables[i].limit
                limit.spend(states[i], now, costs[i])
                if not known[i] and not limit.idle(states[i], now):
                    tables[i].keep(keys[i], states[i])
        elif verb is REFUND:
            for i in range(len(states)):
                tables[i].limit.refund(states[i], costs[i])
        decisions = []
        for i in range(len(states)):
            cost, wait = costs[i], waits[i]
            if verb is CHECK and passes:
                cost = 0
            elif verb is CHARGE or verb is REFUND:
                cost, wait = 1, tables[i].limit.wait(states[i], now, 1)
            decisions.append(tables[i].limit.decide(states[i], now, cost, wait, low))
        self.look_around(now)
        decision = decisions[0] if len(decisions) == 1 else binding_of(decisions)
        if offenders is not None and verb is CHECK and not passes:
            decision = decision.with_violation(offenders.record(offender, now))
        return decision

    async def aapply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        return self.apply(verb, asks, low, offence, request_id)

    def record_violation(self, offence: Offence) -> Violation:
        """See `Store.record_violation`."""
        offenders = self.offenders(offence.name, offence.backoff)
        if self.lock is None:
            return offenders.record(offence.key, self.now())
        with self.lock:
            return offenders.record(offence.key, self.now())

    async def arecord_violation(self, offence: Offence) -> Violation:
        return self.record_violation(offence)

    def standing(self, offence: Offence) -> Standing:
        """See `Store.standing`."""
        backoff = offence.backoff
        state = self.offenders(offence.name, backoff).find(offence.key)
        if state is None:
            return Standing(0, 0, 0)
        now = self.now()
        return Standing(backoff.count(state, now), backoff.left(state, now), backoff.quiet_left(state, now))

    async def astanding(self, offence: Offence) -> Standing:
        return self.standing(offence)

    def forget(self, name: str, key: str, rule: Rule) -> bool:
        """See `Store.forget`."""
        table = self._tables.get((name, rule))
        if table is None:
            return False
        if self.lock is None:
            dropped = table.drop(key)
        else:
            with self.lock:
                dropped = table.drop(key)
        return dropped is not None and not rule.idle(dropped, self.now())

    async def aforget(self, name: str, key: str, rule: Rule) -> bool:
        return self.forget(name, key, rule)

    def clear(self, name: str, rule: Rule) -> None:
        """See `Store.clear`."""
        table = self._tables.get((name, rule))
        if table is not None:
            if self.lock is None:
                table.clear()
            else:
                with self.lock:
                    table.clear()

    async def aclear(self, name: str, rule: Rule) -> None:
        self.clear(name, rule)

    def windows(self) -> MemoryWindows:
        """Sliding windows whose limit comes with each call. Each object that is made here counts for itself."""
        return MemoryWindows(self.now, self.max_keys)

    def reset(self) -> dict[str, int]:
        """See `ResettableStore.reset`."""
        dropped: dict[str, int] = {}
        with self._answering:
            self._answers.clear()
        for (name, rule), table in list(self._tables.items()):
            if isinstance(rule, Limit):
                dropped[name] = dropped.get(name, 0) + table.size
            self.clear(name, rule)
        return dropped

    async def areset(self) -> dict[str, int]:
        return self.reset()

    def look_around(self, now: i64) -> None:
        """Go on with the round by a few entries, or begin one if it is time."""
        dropped = False
        for _ in range(_LOOKED_AT):
            if self.turn >= len(self._ring):
                if now < self.round_at:
                    break
                self._begin_round(now)
            dropped = self._look_at_one(now) or dropped
        self.pause = 0 if dropped else _EVERY

    def make_room(self, now: i64) -> None:
        """Look at a few entries, whether or not it is time for a round, until one is dropped."""
        for _ in range(2 * _LOOKED_AT):
            if self.turn >= len(self._ring):
                self._begin_round(now)
            if self._look_at_one(now):
                break

    def _begin_round(self, now: i64) -> None:
        self.turn = 0
        self.round_at = now + _ROUND

    def _look_at_one(self, now: i64) -> bool:
        result = self._ring[self.turn].look_at_one(now)
        if result < 0:
            self.turn += 1
        else:
            self.looked_at += 1
        return result > 0

    def crowded(self, limit: Limit) -> Decision:
        """The denial of a new key for which there is no room."""
        if not self._warned:
            self._warned = True
            _log.warning("MemoryStore: all %d keys are in use; new ones are denied until some are full", self.max_keys)
        return Decision(DENY, limit, 0, _CROWDED, 0, -1, Details(_CROWDED, None, None, True))


def in_process(store: Store) -> MemoryStore | None:
    """The store itself if it counts in this process: a check can go straight to its tables, and never waits."""
    return store if isinstance(store, MemoryStore) else None


def compiled() -> bool:
    """Whether this module runs as machine code."""
    return not isinstance(Table.find, FunctionType)


def _uninterruptible() -> bool:
    """Whether no other thread can run unless something that is called here lets it."""
    with_gil: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return compiled() and (with_gil is None or with_gil())
