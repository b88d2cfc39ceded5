"""The tables of the store in this process's memory.

How it stays small. A full bucket is the same as none, so an entry that is full again is dropped. No thread does this
and no check pays for a scan: now and then a check also sweeps a few other entries. It takes them out of a dict that has
been set aside (`Table.old`), drops those that are full and puts the others into a new dict, so that the memory of a
once large dict is freed with it. One round through all entries begins at most once a second, unless room is needed.

How it stays exact. Uncompiled, or without a GIL, a lock guards every step. Compiled and under the GIL none is needed
as long as nothing between reading and writing a state can let another thread run. Only Python code can, and it can only
come in through an allocation that triggers the garbage collector. So a value that was read before an allocation is
read again after it, and a decision says what was decided: nothing is allocated before it is made. Windows, budgets
and slots can't keep to this (`Rule.uninterrupted`); a store that has one takes the lock.

There is one lock for everything in a store, and it is reentrant: a finalizer may check a limit in the middle of another
check, and two locks could be taken in either order then.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import Final

from headgate._native import i64
from headgate.lifecycle import new_lock
from headgate.limits.clock import Clock, MonotonicClock
from headgate.limits.decision import DENY, Decision, Details, Limit, Rule, State, Violation, more_binding
from headgate.limits.meter import Meter, MeterState
from headgate.limits.violations import Backoff
from headgate.stores.base import Verb
from headgate.stores.holds import UsageRow

_SHARDS: Final[i64] = 256
_SPLIT: Final = 4096  # entries in one dict before it is split into shards, so that no growing dict has many to move
_SWEPT_AT_ONCE: Final = 3  # entries that one check sweeps, if it does
_CHECKS_BETWEEN: Final[i64] = 64  # checks of known keys between two sweeps, while there is nothing to drop
_ROUND_EVERY: Final[i64] = 1_000_000  # microseconds from the start of one round to that of the next
_RECENT: Final[i64] = 10_000  # microseconds: an entry used within them is likely to be used again
_NO_ROOM: Final[i64] = 1_000_000  # microseconds: the wait of a new key for which there is no room

_AT_HAND: Final = 16  # tables under one name that are found without a look at their limits' values
_NAMES_AT_HAND: Final = 64

LATER: Final[i64] = 2**62
"""A moment that never comes."""

CHECK: Final = Verb.CHECK
CHARGE: Final = Verb.CHARGE
REFUND: Final = Verb.REFUND

_log = logging.getLogger("headgate")


class Table:
    """The entries of one name and rule."""

    def __init__(self, store: "Tables", rule: Rule) -> None:
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

    def add(self, key: str, state: State) -> None:
        self.dicts[self.shard(key)][key] = state
        self.size += 1
        self.store.size += 1
        self.store.changes += 1

    def drop(self, key: str) -> State | None:
        state = self.find(key)
        if state is not None:
            self.dicts[self.shard(key)].pop(key, None)
            if self.old is not None:
                self.old.pop(key, None)
            self.size -= 1
            self.store.size -= 1
            self.store.changes += 1
        return state

    def items(self) -> list[tuple[str, State]]:
        """All keys and their states, in any order."""
        dicts = [*self.dicts, self.old or {}]
        return [found for one in dicts for found in list(one.items())]

    def clear(self) -> None:
        """Drop every entry."""
        empty: list[dict[str, State]] = [{}]
        self.store.size -= self.size
        self.store.changes += 1
        self.size = 0
        self.old = None
        self.dicts = empty
        self.mask = 0
        self.next = 0

    def split(self) -> None:
        if self.mask == 0 and self.old is None and len(self.dicts[0]) > _SPLIT:
            empty: list[dict[str, State]] = [{} for _ in range(_SHARDS)]
            if self.mask == 0 and self.old is None:  # again: another thread may have been quicker
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

    def sweep_one(self, now: i64) -> i64:
        """Sweep the next entry of the round: 1 if it was dropped, 0 if not, -1 if the round is over."""
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
        # The last entry, which `popitem` takes. It is put into its new dict first: a signal's handler may interrupt
        # this after any call, and must not lose it.
        key = next(reversed(old), None)
        state = None if key is None else old.get(key)
        if key is None or state is None or old is not self.old:  # taken by another thread, or cleared meanwhile
            return 0
        kept = not self.rule.idle(state, now - _RECENT)
        if kept:
            self.dicts[self.shard(key)][key] = state
        try:
            last, found = old.popitem()
        except KeyError:  # another thread had the last one
            return 0
        if old is not self.old:
            return 0
        if last is not key or not (kept or self.rule.idle(found, now - _RECENT)):  # it was used meanwhile
            self.dicts[self.shard(last)][last] = found
            return 0
        if kept:
            return 0
        self.size -= 1
        self.store.size -= 1
        self.store.changes += 1
        return 1


class LimitTable(Table):
    """The entries of one limiter's name and limit.

    Budgets that differ in their amounts alone, and slots, share one: what is used belongs to none of them.
    """

    def __init__(self, store: "Tables", name: str, limit: Limit) -> None:
        super().__init__(store, limit)
        self.name: Final = name
        self.limit: Final = limit
        self.calendar: Final = limit.calendar
        self.slots: Final = limit.counts_slots
        self.pinned = False  # somebody keeps it, and checks without asking the store for it
        self.dropped = False  # from the store; nothing may be added any more
        self.validate: Callable[[object], object] | None = None  # called with each new key, and may refuse it
        self.asked_by: i64 = 0  # the last of `Tables.verbs` that asked for a key here

    def check(self, key: str, cost: i64, low: i64, violations: "ViolationTable | None") -> Decision:
        """Verb.CHECK on one key; with a table of violations, a denial is recorded there."""
        lock = self.store.lock
        if lock is None:
            return self._check(key, cost, low, violations)
        with lock:
            return self._check(key, cost, low, violations)

    def _check(self, key: str, cost: i64, low: i64, violations: "ViolationTable | None") -> Decision:
        store, limit = self.store, self.limit
        now = store.now()
        if now >= store.due:
            store.release_due(now)
        if violations is not None and violations.blocks(key, now):
            return violations.deny(self, key, cost, low, now)
        state = self.find(key)
        if state is None:
            decision = self._check_new(key, cost, low, now)
        else:
            wait = limit.wait(state, now, cost)
            if wait == 0:
                limit.spend(state, now, cost)
                cost = 0
            decision = limit.decide(state, now, cost, wait, low)
            store.until_sweep -= 1
            if store.until_sweep < 0:
                store.sweep(now)
        if violations is not None and decision.outcome is DENY and not decision.degraded:
            return decision.with_violation(violations.record(key, now))
        return decision

    def _check_new(self, key: str, cost: i64, low: i64, now: i64) -> Decision:
        store = self.store
        if self.validate is not None:
            self.validate(key)
        if store.size >= store.max_keys:
            store.make_room(now)
        entry = Entry(self, key, self.limit, cost, now)
        entry.find(now)  # again: another thread may have been quicker
        if entry.wait == 0:
            if not entry.known and store.size >= store.max_keys:
                return store.deny_for_room(self.limit)
            entry.spend(now)
        decision = entry.decide(CHECK, entry.wait == 0, now, low)
        self.split()
        store.sweep(now)
        return decision

    def keep(self, key: str, limit: Limit, state: State, now: i64, root: str) -> bool:
        """Keep a new state, unless it counts nothing; whether it is kept."""
        if limit.idle(state, now):
            return False
        self.add(key, state)
        if isinstance(state, MeterState):
            state.root = root
        return True


class ViolationTable(Table):
    """The violations recorded under one name and backoff."""

    def __init__(self, store: "Tables", backoff: Backoff) -> None:
        super().__init__(store, backoff)
        self.backoff: Final = backoff
        self.enforced: Final = backoff.enforce

    def blocks(self, key: str, now: i64) -> bool:
        """Whether a key is denied because its advised wait isn't over."""
        if not self.enforced:
            return False
        state = self.find(key)
        return state is not None and self.backoff.left(state, now) > 0

    def record(self, key: str, now: i64) -> Violation:
        """Count a violation. One of a new key for which there is no room counts as the first, and is not kept."""
        state = self.find(key)
        if state is None:
            self.split()
            self.store.sweep(now)
            fresh = self.backoff.fresh(now)
            state = self.find(key)  # again: another thread may have been quicker
            if state is None:
                state = fresh
                if self.store.size < self.store.max_keys:
                    self.add(key, state)
        alert = self.backoff.record(state, now)
        count = self.backoff.count(state, now)
        return Violation(count, self.backoff.advised(count), alert)

    def deny(self, table: LimitTable, key: str, cost: i64, low: i64, now: i64) -> Decision:
        """Deny a key that came back before its advised wait was over."""
        entry = Entry(table, key, table.limit, cost, now)
        entry.find(now)
        return entry.decide(CHECK, False, now, low).with_violation(self.record(key, now))


class Entry:
    """One key that a verb is carried out on, with its state."""

    def __init__(self, table: LimitTable, key: str, limit: Limit, cost: i64, now: i64, root: str = "") -> None:
        self.table: Final = table
        self.key: Final = key
        self.root: Final = root
        self.limit: Final = limit
        self.cost: Final = cost
        self.known = False
        self.wait: i64 = 0
        self.state: State = limit.fresh(now)

    def find(self, now: i64) -> None:
        """Find the state, if there is one already, and the wait until the cost passes."""
        found = self.table.find(self.key)
        if found is not None:
            self.state = found
            self.known = True
        if self.table.calendar:
            self.limit.align(self.state, self.table.store.wall_ahead(now))
        self.wait = self.limit.wait(self.state, now, self.cost)

    def spend(self, now: i64) -> None:
        self.limit.spend(self.state, now, self.cost)
        self.keep(now)

    def keep(self, now: i64) -> None:
        if not self.known:
            self.known = self.table.keep(self.key, self.limit, self.state, now, self.root)

    def decide(self, verb: Verb, passes: bool, now: i64, low: i64) -> Decision:
        limit, cost, wait = self.limit, self.cost, self.wait
        if verb is CHECK and passes:
            cost, wait = 0, 0
        elif verb is CHARGE or verb is REFUND:
            cost, wait = 1, limit.wait(self.state, now, 1)
        return limit.decide(self.state, now, cost, wait, low)


class TableAtHand:
    """A table, and an object by which its limit is known again."""

    def __init__(self, limit: Limit, table: LimitTable) -> None:
        self.limit: Final = limit
        self.table: Final = table


class Tables:
    """All tables of a store, its clock and its lock, and the sweeping of entries."""

    def __init__(self, clock: Clock | None, max_keys: i64) -> None:
        self.clock: Final[Clock] = MonotonicClock() if clock is None else clock
        self._manual: Final = clock is not None
        # What MonotonicClock reads, without its method calls.
        self._read: Final[Callable[[], int]] = time.monotonic_ns
        self._read_wall: Final[Callable[[], int]] = time.time_ns
        self._tables: Final[dict[tuple[str, object], Table]] = {}
        self._order: Final[list[Table]] = []
        self._at_hand: Final[dict[str, list[TableAtHand]]] = {}  # by name
        self._warned = False
        self.max_keys: Final = max_keys
        self._lock: Final = new_lock()
        self.own_lock: Final = self._lock
        self.lock: threading.RLock | None = None if _uninterruptible() else self._lock  # the one that every step takes
        self.due: i64 = LATER  # when the first hold gives back what it has taken
        self.size: i64 = 0
        self.changes: i64 = 0  # entries that came or went: while it stays, a state that was found is still the one
        self.verbs: i64 = 0  # those that asked for several keys at once
        self.until_sweep: i64 = 0  # checks of known keys until the next sweep
        self.position: i64 = 0  # of the round, in the order of the tables; behind the last: no round is under way
        self.next_round: i64 = 0  # when the next round may begin
        self.swept: i64 = 0  # how many entries have been swept

    def __len__(self) -> int:
        """How many keys are kept."""
        return self.size

    def now(self) -> i64:
        if self._manual:
            return self.clock.now()
        read: i64 = self._read()  # before it is divided, which is quicker then
        return read // 1000

    def wall_ahead(self, now: i64) -> i64:
        """The time to add to this store's to get that of day, in microseconds since 1970."""
        return round(self.clock.wall() * 1_000_000) - now if self._manual else self._read_wall() // 1000 - now

    def release_due(self, now: i64) -> None:
        """Let the holds whose lease has ended give back what they have taken."""

    def limit_table(self, name: str, limit: Limit) -> LimitTable:
        """The entries of a limiter's name and limit. The table is made once, and stays: frequent callers keep it."""
        while True:
            found = self.table_of(name, limit)
            with self._lock:
                found.pinned = True
                if not found.dropped:
                    return found

    def table_of(self, name: str, limit: Limit) -> LimitTable:
        """The same for one call. It is dropped some time after its last entry, so that rare limits don't pile up."""
        found = self._tables.get((name, limit.identity)) or self._add_table(name, LimitTable(self, name, limit))
        assert isinstance(found, LimitTable)
        return found

    def table_at_hand(self, name: str, limit: Limit) -> LimitTable:
        """`table_of`, for limits that are the same objects again and again."""
        known = self._at_hand.get(name)
        if known is not None:
            for one in known:
                if one.limit is limit and not one.table.dropped:
                    return one.table
        table = self.table_of(name, limit)
        if known is None or len(known) >= _AT_HAND:
            known = []
            if len(self._at_hand) >= _NAMES_AT_HAND:
                self._at_hand.clear()
            self._at_hand[name] = known
        known.append(TableAtHand(limit, table))
        return table

    def violation_table(self, name: str, backoff: Backoff) -> ViolationTable:
        """The violations recorded under a name and backoff."""
        found = self._tables.get((name, backoff)) or self._add_table(name, ViolationTable(self, backoff))
        assert isinstance(found, ViolationTable)
        return found

    def _add_table(self, name: str, table: Table) -> Table:
        with self._lock:
            if not table.rule.uninterrupted:
                self.lock = self._lock
            # From here on it is found without the lock.
            found = self._tables.setdefault((name, identity_of(table.rule)), table)
            if found is table:
                self._order.append(table)
            return found

    def usage(self, name: str, first: int, last: int, root: str | None) -> list[UsageRow]:
        """The counts of meters under a name: see `AccountStore.read_usage`."""
        rows: list[UsageRow] = []
        for table in list(self._order):
            if isinstance(table, LimitTable) and table.name == name and isinstance(table.limit, Meter):
                for key, state in table.items():
                    assert isinstance(state, MeterState)
                    if root is None or state.root == root:
                        days = sorted(state.days.items())
                        rows.extend([UsageRow(state.root, key, day, used) for day, used in days if first <= day < last])
        return rows

    def sweep(self, now: i64) -> None:
        """Sweep the next few entries of the round, or begin one if it is time."""
        dropped = False
        for _ in range(_SWEPT_AT_ONCE):
            if self.position >= len(self._order) and now < self.next_round:
                break
            dropped = self._sweep_one(now) or dropped
        self.until_sweep = 0 if dropped else _CHECKS_BETWEEN

    def make_room(self, now: i64) -> None:
        """Sweep a few entries, whether or not it is time for a round, until one is dropped."""
        for _ in range(2 * _SWEPT_AT_ONCE):
            if self._sweep_one(now):
                break

    def _sweep_one(self, now: i64) -> bool:
        """Sweep the next entry, perhaps the first of another round, and say whether it was dropped."""
        if self.position >= len(self._order):
            self.position = 0
            self.next_round = now + _ROUND_EVERY
            if not self._order:  # every table was dropped
                return False
        table = self._order[self.position]
        result = table.sweep_one(now)
        if result >= 0:
            self.swept += 1
        elif not self._drop_table(table):
            self.position += 1
        return result > 0

    def _drop_table(self, table: Table) -> bool:
        """Drop a table that is empty and that nobody keeps, and say whether it was."""
        if table.size > 0 or not isinstance(table, LimitTable):
            return False
        with self._lock:
            if table.pinned or table.dropped or table.size > 0:
                return False
            table.dropped = True
            self._order.remove(table)
            del self._tables[table.name, table.limit.identity]
        return True

    def deny_for_room(self, limit: Limit) -> Decision:
        """The denial of a new key for which there is no room."""
        if not self._warned:
            self._warned = True
            _log.warning("MemoryStore: all %d keys are in use; new ones are denied until some are full", self.max_keys)
        return Decision(DENY, limit, 0, _NO_ROOM, 0, -1, Details(_NO_ROOM, None, None, True))


def decide_all(entries: list[Entry], verb: Verb, passes: bool, now: i64, low: i64) -> Decision:
    """The decision on some entries: that of the one that bound."""
    decision = entries[0].decide(verb, passes, now, low)
    if len(entries) > 1:
        decision = decision.at(0)
        for i in range(1, len(entries)):
            decision = more_binding(decision, entries[i].decide(verb, passes, now, low), i)
    return decision


def identity_of(rule: Rule) -> object:
    """The identity of a rule's counts."""
    return rule.identity if isinstance(rule, Limit) else rule


def compiled() -> bool:
    """Whether this module runs as machine code."""
    return not isinstance(Table.find, FunctionType)


def _uninterruptible() -> bool:
    """Whether no other thread can run unless something that is called here lets it."""
    return compiled() and (not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled())
