"""The store in this process's memory."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from os import PathLike
from types import TracebackType
from typing import Final, Self, SupportsIndex

from headgate._native import i64
from headgate.errors import refuse
from headgate.limits.clock import Clock, MonotonicClock
from headgate.limits.decision import Decision, Limit, Rule, Violation
from headgate.limits.numbers import whole
from headgate.limits.violations import Standing
from headgate.stores.asks import pieces_of, place_in
from headgate.stores.base import REMEMBERED, Ask, Offence, Store, Verb
from headgate.stores.held import MemoryHold
from headgate.stores.holds import HoldAnswer, HoldTerms, ListedHold, UsageRow
from headgate.stores.memory_file import MemoryFile, check_path
from headgate.stores.memory_holds import MemoryHolds
from headgate.stores.memory_tables import CHARGE, CHECK, REFUND, Entry, Tables, ViolationTable, decide_all, identity_of
from headgate.stores.remembered_holds import RememberedHolds
from headgate.stores.windows import MemoryWindows

_NO_LOCK: Final[AbstractContextManager[None]] = nullcontext()
_log = logging.getLogger("headgate")


class MemoryStore(Tables):
    """Counts in this process's memory. Its clock is the machine's monotonic one.

    Memory grows with the keys that are not full, up to `max_keys`. When so many keys are kept and none of the swept
    entries can be dropped, a new key is denied (and the decision is `degraded`) with a wait of a second, and nothing is
    counted. Known keys are never dropped to make room, so a blocked key stays blocked. (`charge` on an unknown key is
    always kept: what has been spent is counted.)

    At most `max_request_ids` are remembered, each with its decision. Beyond that, the oldest is forgotten before its
    minute is over, so that its request would be counted again.

    `remember` is the path of a file that remembers budgets and holds, so that they survive a restart. One process has
    the file for itself. A verb that can't be written raises `StoreError`, and counts nothing.

    >>> from headgate import Limiter, MemoryStore, per_minute
    >>> store = MemoryStore(max_keys=2)
    >>> limiter = Limiter(per_minute(1), store=store)
    >>> [bool(limiter.check(key)) for key in ("a", "b", "c", "a")]
    [True, True, False, False]
    >>> len(store)
    2
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        max_keys: SupportsIndex | None = None,
        max_request_ids: SupportsIndex = 100_000,
        remember: str | PathLike[str] | MemoryFile | None = None,
    ) -> None:
        given: object = clock
        if given is not None and (isinstance(given, type) or not _is_clock(given)):
            refuse("MemoryStore clock", "a clock, such as ManualClock(), with now, alarm and wall", given)
        keys = 2**62 if max_keys is None else whole("MemoryStore max_keys", max_keys)
        ids = whole("MemoryStore max_request_ids", max_request_ids)
        file: MemoryFile | None = None  # opened first: its lock is taken within the store's
        if isinstance(remember, MemoryFile):
            file = remember
        elif remember is not None:
            wall = (MonotonicClock() if clock is None else clock).wall()
            file = MemoryFile(check_path("MemoryStore remember", remember), round(wall * 1_000_000))
        super().__init__(clock, keys)
        self._warned_of_ids = False
        self.max_request_ids: Final = ids
        self._answers: Final[dict[tuple[object, ...], tuple[int, Decision]]] = {}  # by request id, oldest first
        self._remembered: Final = None if file is None else RememberedHolds(self, ids, file)
        self.holds: Final = MemoryHolds(self, ids) if self._remembered is None else self._remembered

    def apply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        """See `Store.apply`."""
        if not request_id:
            return self._apply_all(verb, asks, low, offence)
        identity = (verb, asks[0].name, asks[0].key, request_id, *[ask.limit for ask in asks])
        with self._lock:
            now = self.now()
            for known, answer in list(islice(self._answers.items(), 2)):  # the oldest
                if answer[0] <= now:
                    self._answers.pop(known, None)
            found = self._answers.get(identity)
            if found is not None and found[0] > now:
                return found[1]
            decision = self._apply_all(verb, asks, low, offence)
            if verb is CHARGE or verb is REFUND or (verb is CHECK and decision):
                self._remember(identity, (now + REMEMBERED, decision))
            return decision

    def _remember(self, identity: tuple[object, ...], answer: tuple[int, Decision]) -> None:
        """Remember the answer to a request, as the newest of them."""
        self._answers.pop(identity, None)
        for oldest in list(islice(self._answers, max(len(self._answers) + 1 - self.max_request_ids, 0))):
            self._answers.pop(oldest, None)
            if not self._warned_of_ids:
                self._warned_of_ids = True
                _log.warning(
                    "MemoryStore: more than %d request ids within a minute; the oldest are forgotten, so that a retry "
                    "may be counted twice",
                    self.max_request_ids,
                )
        self._answers[identity] = answer

    def _apply_all(self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None) -> Decision:
        pieces = pieces_of(asks)
        return place_in(self._apply_pieces(verb, pieces, low, offence), asks, pieces)

    def _apply_pieces(self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None) -> Decision:
        if self.size >= self.max_keys:  # before the tables are looked up: it may drop empty ones
            with self.lock or _NO_LOCK:
                self.make_room(self.now())
        tables = [self.table_of(ask.name, ask.limit) for ask in asks]
        violations = None if offence is None else self.violation_table(offence.name, offence.backoff)
        if len({(id(table), ask.key) for table, ask in zip(tables, asks, strict=True)}) < len(asks):
            refuse("asks", "each key once", [ask.key for ask in asks])
        with self.lock or _NO_LOCK:
            now = self.now()
            if now >= self.due:
                self.release_due(now)
            entries = [
                Entry(tables[i], asks[i].key, asks[i].limit, asks[i].cost, now, asks[i].root)
                for i in range(len(tables))
            ]
            decision = self._apply(verb, entries, now, low, violations, "" if offence is None else offence.key)
        return self._apply_pieces(verb, asks, low, offence) if decision is None else decision

    def _apply(
        self, verb: Verb, entries: list[Entry], now: i64, low: i64, violations: ViolationTable | None, agent: str
    ) -> Decision | None:
        """None if a table was dropped meanwhile, and nothing has been done."""
        # From here until the decision is made nothing is allocated that the garbage collector tracks, not even an
        # iterator of a list in plain Python.
        count: i64 = len(entries)
        for i in range(count):
            if entries[i].table.dropped:
                return None
        passes = violations is None or not violations.blocks(agent, now)
        new: i64 = 0
        for i in range(count):
            entries[i].find(now)
            passes = passes and entries[i].wait == 0
            if not entries[i].known:
                new += 1
        if verb is CHECK and passes and new and self.size + new > self.max_keys:
            return self.deny_for_room(entries[0].limit)
        spends = verb is CHARGE or (verb is CHECK and passes)
        if spends:
            for i in range(count):
                entries[i].spend(now)
        elif verb is REFUND:
            if self._remembered is not None:
                self._remembered.record_refund(entries, now)
            for i in range(count):
                entries[i].limit.refund(entries[i].state, entries[i].cost)
        decision = decide_all(entries, verb, passes, now, low)
        self.sweep(now)
        if spends and self._remembered is not None:
            self._remembered.record_spent(entries, now)
        if violations is not None and verb is CHECK and not passes:
            decision = decision.with_violation(violations.record(agent, now))
        return decision

    async def aapply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        return self.apply(verb, asks, low, offence, request_id)

    def record_violation(self, offence: Offence) -> Violation:
        """See `Store.record_violation`."""
        violations = self.violation_table(offence.name, offence.backoff)
        with self.lock or _NO_LOCK:
            return violations.record(offence.key, self.now())

    async def arecord_violation(self, offence: Offence) -> Violation:
        return self.record_violation(offence)

    def standing(self, offence: Offence) -> Standing:
        """See `Store.standing`."""
        violations = self.violation_table(offence.name, offence.backoff)
        with self.lock or _NO_LOCK:
            state = violations.find(offence.key)
            return Standing(0, 0, 0) if state is None else offence.backoff.standing(state, self.now())

    async def astanding(self, offence: Offence) -> Standing:
        return self.standing(offence)

    def forget(self, name: str, key: str, rule: Rule, root: str = "") -> bool:
        """See `Store.forget`."""
        self._forget_holds(name, rule, key)
        counted = False
        for piece in _pieces(rule):
            table = self._tables.get((name, identity_of(piece)))
            if table is not None:
                with self.lock or _NO_LOCK:
                    dropped = table.drop(key)
                counted = counted or (dropped is not None and not piece.idle(dropped, self.now()))
        return counted

    async def aforget(self, name: str, key: str, rule: Rule, root: str = "") -> bool:
        return self.forget(name, key, rule)

    def clear(self, name: str, rule: Rule) -> None:
        """See `Store.clear`."""
        self._forget_holds(name, rule, None)
        for piece in _pieces(rule):
            table = self._tables.get((name, identity_of(piece)))
            if table is not None:
                with self.lock or _NO_LOCK:
                    table.clear()

    async def aclear(self, name: str, rule: Rule) -> None:
        self.clear(name, rule)

    def _forget_holds(self, name: str, rule: Rule, key: str | None) -> None:
        """Forget the holds of a key, or of all keys, and in the file also what was counted."""
        with self._lock:
            holds = self.holds.under(name, rule, key) if isinstance(rule, Limit) else []
            if self._remembered is not None:
                ids = [(hold.table.name, hold.key, hold.hold_id) for hold in holds]
                self._remembered.file.forget(self._remembered.wall(), name, key, _pieces(rule), ids)
            self.holds.forget(holds)

    # Holds -----------------------------------------------------------------------------------------------------------

    def release_due(self, now: i64) -> None:
        with self._lock:
            self.holds.release_due(now)

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        """See `HoldStore.hold`."""
        with self._lock:
            return self.holds.hold(asks, low, terms)

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        """See `HoldStore.settle`."""
        with self._lock:
            return self.holds.settle(asks, low, hold_id, costs, cancel)

    def extend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        """See `HoldStore.extend`."""
        with self._lock:
            return self.holds.extend(asks, low, hold_id, costs, lease)

    def find_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        """See `HoldStore.find_hold`."""
        with self._lock:
            return self.holds.find_hold(asks, low, hold_id)

    def list_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        """See `HoldStore.list_holds`."""
        with self._lock:
            return self.holds.list_holds(name, key, count)

    def read_hold(self, name: str, key: str, hold_id: str) -> ListedHold | None:
        """See `AccountStore.read_hold`."""
        with self._lock:
            return self.holds.read_hold(name, key, hold_id)

    def peek_each(self, asks: Sequence[Ask], low: int) -> tuple[Decision, ...]:
        """See `AccountStore.peek_each`."""
        with self._lock:
            return self.holds.peek_each(asks, low)

    def read_usage(self, name: str, first: int, last: int, root: str | None = None) -> list[UsageRow]:
        """See `AccountStore.read_usage`."""
        with self._lock:
            return self.holds.read_usage(name, first, last, root)

    def reveal(self, held: MemoryHold) -> str:
        """The id of a hold, by which it can be found from now on."""
        with self._lock:
            return self.holds.reveal(held)

    async def ahold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        return self.hold(asks, low, terms)

    async def asettle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        return self.settle(asks, low, hold_id, costs, cancel=cancel)

    async def aextend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        return self.extend(asks, low, hold_id, costs, lease)

    async def afind_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        return self.find_hold(asks, low, hold_id)

    async def alist_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        return self.list_holds(name, key, count)

    async def aread_hold(self, name: str, key: str, hold_id: str) -> ListedHold | None:
        return self.read_hold(name, key, hold_id)

    async def apeek_each(self, asks: Sequence[Ask], low: int) -> tuple[Decision, ...]:
        return self.peek_each(asks, low)

    async def aread_usage(self, name: str, first: int, last: int, root: str | None = None) -> list[UsageRow]:
        return self.read_usage(name, first, last, root)

    def windows(self, prefix: str | None = None) -> MemoryWindows:
        """Sliding windows whose limit comes with each call. Each object that is made here counts for itself."""
        return MemoryWindows(self.now, self.max_keys)

    def reset(self) -> dict[str, int]:
        """See `ResettableStore.reset`."""
        dropped: dict[str, int] = {}
        with self._lock:
            if self._remembered is not None:
                self._remembered.file.reset(self._remembered.wall())
            self._answers.clear()
            self.holds.forget_all()
        for (name, _), table in list(self._tables.items()):
            if isinstance(table.rule, Limit):
                dropped[name] = dropped.get(name, 0) + table.size
            self.clear(name, table.rule)
        return dropped

    async def areset(self) -> dict[str, int]:
        return self.reset()

    @property
    def file(self) -> MemoryFile | None:
        """The file that remembers budgets and holds, if there is one."""
        return None if self._remembered is None else self._remembered.file

    def close(self) -> None:
        """Close the file that remembers budgets and holds, if there is one."""
        if self._remembered is not None:
            self._remembered.file.close()

    async def aclose(self) -> None:
        self.close()

    # A compiled class can't inherit these of `Closable`.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


def _is_clock(given: object) -> bool:
    """Whether it has the methods of a clock: without `isinstance`, which doesn't see those that a proxy passes on."""
    return all([callable(getattr(given, method, None)) for method in ("now", "alarm", "wall")])


def _pieces(rule: Rule) -> Sequence[Rule]:
    return rule.pieces if isinstance(rule, Limit) else (rule,)


def in_process(store: Store) -> MemoryStore | None:
    """The store itself if it counts in this process: a check can go straight to its tables, and never waits."""
    return store if isinstance(store, MemoryStore) else None
