"""The hot path of holds, compiled: the handle, and how a limiter in memory makes and settles it.

`headgate.holds` has the rest in plain Python, and `headgate._hold_async` the bodies of the async twins: a compiled
coroutine that is cancelled throws into its awaitable in a way that Python 3.12 warns of.
"""

import logging
from collections.abc import Coroutine, Mapping
from math import ceil
from types import TracebackType
from typing import Any, Final, Self

from headgate import _hold_async
from headgate._native import i64, mypyc_attr
from headgate.errors import HeadgateError, HoldError, RateLimited, StoreError, UnknownHold, refuse
from headgate.hold_owner import HoldOwner
from headgate.lease_renewer import RENEWERS, BlockLease
from headgate.lifecycle import new_lock
from headgate.limits.decision import Decision, Limit
from headgate.limits.numbers import LARGEST, Number, microseconds
from headgate.stores.base import Ask, Store
from headgate.stores.held import MemoryHold
from headgate.stores.hold_terms import LONGEST_LEASE
from headgate.stores.holds import (
    CANCELLED,
    DENIED,
    EXPIRED,
    OPEN,
    SETTLED,
    HoldAnswer,
    HoldState,
    HoldStore,
    Renewal,
    refuse_ended,
    refuse_other_costs,
)
from headgate.stores.memory import MemoryStore, in_process

SHORTEST_LEASE: Final = 1_000
"""Microseconds."""

_QUICK: Final = 7 * 86_400  # seconds
_UNUSED: Final = -1
_FOREVER: Final[i64] = 2**62
_USE_LOCK: Final = new_lock()  # one for all: it is held for an addition
_log = logging.getLogger("headgate")


@mypyc_attr(allow_interpreted_subclasses=True)
class Hold:
    """A cost or a slot that is reserved, until it is settled or cancelled, or its lease ends. True if it was granted.

    >>> from headgate import Limiter
    >>> limiter = Limiter("100000 tokens/calendar day")
    >>> hold = limiter.hold("agent-7", 1200)        # what it may cost
    >>> bool(hold), hold.state, limiter.peek("agent-7").remaining
    (True, 'open', 98800)
    >>> hold.settle(830).remaining                  # what it did cost
    99170
    >>> hold.state
    'settled'

    As a context manager it renews its lease while the block runs, and is settled at the end, with what `use` has added
    up, or else with what was reserved. If the block raises, the hold ends as if its lease had: slots are free, and
    costs stay counted unless `on_expiry` is "release"; if more than that was used, it is settled with what was used. A
    denied hold raises `RateLimited` instead of running the block.

    Every verb may be repeated, and has an async twin.
    """

    def __init__(
        self,
        owner: HoldOwner,
        asks: tuple[Ask, ...],
        hold_id: str,
        lease: int,
        answer: HoldAnswer,
        called: int,
        max_age: int | None = None,
    ) -> None:
        """Limiters make holds. `lease` is for renewals; `called` is when they asked for it, by the store's clock."""
        self._owner = owner
        self._asks: tuple[Ask, ...] = asks  # with the costs that it has taken
        self._id = hold_id
        self._lease: i64 = lease
        self._called: i64 = called
        self._max_age: i64 = _FOREVER if max_age is None else max_age
        self._decision = answer.decision
        self._parts: tuple[Decision, ...] = answer.parts
        self._state: HoldState = answer.state
        self._costs: tuple[int, ...] = answer.costs
        self._ends: i64 = called + answer.left  # never later than in the store
        self._used: tuple[Any, ...] | None = None  # exactly, for each ask; _UNUSED: its resource wasn't named
        self._release = False  # at the end of its lease
        self._lost = False
        self._block: BlockLease[Hold] | None = None

    @property
    def id(self) -> str:
        """The id, by which another process can settle it: `limiter.find_hold(key, id)`."""
        self._ready()
        return self._id

    @property
    def key(self) -> str:
        """The key that it belongs to."""
        return self._asks[0].key

    @property
    def decision(self) -> Decision:
        """The decision on it; after another verb, what that one has left."""
        return self._decision

    @property
    def parts(self) -> tuple[Decision, ...]:
        """The decision on each limit, of which `decision` is the one that bound; none while its store is away."""
        self._ready()
        return self._parts

    @property
    def state(self) -> HoldState:
        """ "denied", "open", "settled", "cancelled" or "expired", as far as it is known here."""
        self._note_renewals()
        if self._state == OPEN and (self._lost or self._store.clock.now() >= self._ends):
            return EXPIRED
        return self._state

    @property
    def lease_left(self) -> float:
        """Seconds until its lease ends, as far as it is known here; 0.0 if it isn't open."""
        open_now = self.state == OPEN
        return (self._ends - self._store.clock.now()) / 1_000_000 if open_now else 0.0

    @property
    def lost(self) -> bool:
        """Whether its lease has ended, or it was settled elsewhere or forgotten, while it was in use."""
        expired = self.state == EXPIRED
        return self._lost or expired

    @property
    def _store(self) -> HoldStore:
        return self._owner.hold_store

    def _ready(self) -> None:
        """Called before fields are read that a subclass may make only when they are needed."""

    def __bool__(self) -> bool:
        return self._state != DENIED

    def use(self, cost: object = 1) -> None:
        """Add to what `settle` counts, from any thread. It is a sum in this process: nothing is asked of the store.

        It is exact: a cost may have more decimals than the limit counts. `settle` rounds the sum up.
        """
        if not self._is_unsettled():
            raise HoldError(
                f"hold {self.id!r} of {self.key!r}: expected an open hold to use, got one that is {self.state}",
                self.state,
            )
        self._ready()
        unused = (_UNUSED,) * len(self._costs)
        more = self._owner.read_costs(cost, unused, spent=True)
        with _USE_LOCK:
            used = tuple(map(_sum, self._used or unused, more))
            _refuse_too_much(used, cost)
            self._used = used

    def settle(self, cost: object = None) -> Decision:
        """End it, and count this cost instead of the reserved one: less gives back, more is charged, even into debt.

        Without a cost, it is what `use` has added up, or else what was reserved: of each resource, if there are more.
        """
        asks, low, hold_id = self._arguments()
        return self._ended(self._store.settle(asks, low, hold_id, self._settled(cost)))

    def asettle(self, cost: object = None) -> Coroutine[Any, Any, Decision]:
        return _hold_async.settle(self, cost)

    def cancel(self) -> Decision:
        """End it, and give back all that it has taken."""
        asks, low, hold_id = self._arguments()
        return self._ended(self._store.settle(asks, low, hold_id, (0,) * len(asks), cancel=True))

    def acancel(self) -> Coroutine[Any, Any, Decision]:
        return _hold_async.cancel(self)

    def extend(self, cost: object = None, *, lease: Number | None = None) -> Decision:
        """Reserve so much more, all or nothing, and let the lease end `lease` seconds from now, if that is later.

        The decision says whether it passed. A denial changes nothing, not even the lease.
        """
        called = self._store.clock.now()
        asks, low, hold_id = self._extension_arguments()
        costs, span = self._extension(cost, lease)
        return self._extended(called, self._store.extend(asks, low, hold_id, costs, span))

    def aextend(self, cost: object = None, *, lease: Number | None = None) -> Coroutine[Any, Any, Decision]:
        return _hold_async.extend(self, cost, lease)

    def expire(self) -> None:
        """End its lease now: slots are free, and costs stay counted unless it was made to release them."""
        asks, low, hold_id = self._arguments()
        try:
            self._extended(self._called, self._store.extend(asks, low, hold_id, None, 0))
        except UnknownHold:
            raise
        except HoldError:  # its lease has ended before, or it was settled elsewhere
            self._lost = True
        self._owner.freed(self.key)

    def aexpire(self) -> Coroutine[Any, Any, None]:
        return _hold_async.expire(self)

    def denial(self) -> RateLimited:
        """The error that says what the last decision has denied."""
        return self._owner.denial(self.key, self.decision)

    def _arguments(self) -> tuple[tuple[Ask, ...], int, str]:
        self._ready()
        if not self:
            rest = "; if the server has made it all the same, find_hold finds it" if self.decision.degraded else ""
            raise HoldError(f"hold {self.id!r} was denied: it has taken nothing ({self.denial()}){rest}")
        return self._asks, self._owner.low, self.id

    def _extension_arguments(self) -> tuple[tuple[Ask, ...], int, str]:
        """The same, for more costs: under limits that may have been changed."""
        return self._arguments()

    def _settled(self, cost: object) -> tuple[int, ...] | None:
        if cost is None:
            return self._used_or_reserved() if self._used is not None or not self._is_unsettled() else None
        costs = _rounded_up(self._owner.read_costs(cost, self._used_or_reserved(), spent=True))
        if costs != self._costs:
            _refuse_too_much(costs, cost)
        if self and not self._is_unsettled() and costs != self._costs:  # known even while the store is away
            refuse_other_costs(self._asks, self.id, self.state, self._costs, costs)
        return costs

    def _used_or_reserved(self) -> tuple[int, ...]:
        """The used cost of each ask that was used at all, and the reserved cost of the others."""
        if self._used is None or not self._is_unsettled():
            return self._costs
        exact = [one if used == _UNUSED else used for one, used in zip(self._costs, self._used, strict=True)]
        return _rounded_up(tuple(exact))

    def _is_unsettled(self) -> bool:
        return self._state == OPEN or self._state == EXPIRED

    def _ended(self, answer: HoldAnswer) -> Decision:
        self._state = answer.state
        self._costs = answer.costs
        self._decision = answer.decision
        self._parts = answer.parts
        self._owner.freed(self.key)
        return answer.decision

    def _extension(self, cost: object, lease: object) -> tuple[tuple[int, ...] | None, int | None]:
        costs: tuple[int, ...] | None = None
        if cost is not None:
            more = self._owner.read_costs(cost, (0,) * len(self._costs))
            costs = tuple([one + other for one, other in zip(self._costs, more, strict=True)])
            _refuse_too_much(costs, cost)
        return costs, None if lease is None else lease_of(lease)

    def _extended(self, called: int, answer: HoldAnswer) -> Decision:
        self._decision = answer.decision
        self._parts = answer.parts
        if answer.decision or answer.costs != self._costs:  # a denial changes nothing, unless more is forced
            self._state = answer.state
            if answer.costs != self._costs:
                self._costs = answer.costs
                self._asks = with_costs(self._asks, answer.costs)
            if answer.left:
                self._ends = called + answer.left
            if self._block is not None:  # the handle that is renewed goes by the same
                self._block.hold._asks = self._asks
                self._block.hold._ends = self._ends
        return answer.decision

    # As a context manager --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self:
            raise self.denial()
        self._ready()
        if self.state != OPEN:  # of a repeated id: what it has reserved is spent, or free for others
            refuse_ended(self._asks, self.id, self.state, self._costs, "run a block")
        answer = HoldAnswer(self._decision, self._state, self._costs, 0)
        renewed = Hold(self._owner, self._asks, self._id, self._lease, answer, self._called, self._max_age)
        renewed._ends = self._ends
        block = BlockLease(renewed)
        self._block = block
        try:
            RENEWERS.add(self._store, block.renewal)
        except BaseException:  # interrupted: no block runs that would end it
            RENEWERS.remove(self._store, block.renewal)
            self._block = None
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._leave():
            try:
                if kind is None:
                    self.settle()
                else:
                    costs = self._failed_costs()
                    if costs is None:
                        self.expire()
                    else:
                        asks, low, hold_id = self._arguments()
                        self._ended(self._store.settle(asks, low, hold_id, costs))
            except UnknownHold:
                self._lose()
            except HeadgateError as failure:
                if kind is None:
                    raise
                self._note_unended(failure)

    def __aenter__(self) -> Coroutine[Any, Any, Self]:
        return _hold_async.enter(self)

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return _hold_async.leave(self, error)

    def _leave(self) -> bool:
        """Stop renewing it, and say whether it is still to be ended."""
        block = self._block
        if block is not None:
            RENEWERS.remove(self._store, block.renewal)
            self._note_renewals()
            self._block = None
        self._ready()
        return self._is_unsettled()

    def _note_renewals(self) -> None:
        """Take note of what the renewals while its block runs have come to."""
        block = self._block
        if block is not None and self._state == OPEN:
            renewed = block.hold
            self._lost = self._lost or renewed._lost
            if renewed._ends > self._ends:
                self._ends = renewed._ends

    def _failed_costs(self) -> tuple[int, ...] | None:
        """The costs that a failed block is settled with; None if the end of its lease counts as much as was used."""
        if self._used is None:
            return None
        counted = (0,) * len(self._costs) if self._release else self._costs
        costs = tuple(map(max, counted, _rounded_up(self._used)))
        return None if costs == counted else costs

    def _lose(self) -> None:
        self._lost = True
        _log.warning("hold %r of %r was forgotten before it was settled", self.id, self.key)

    def _note_unended(self, failure: HeadgateError) -> None:
        """The block has failed, and ending it too: the error of the block is the one to raise."""
        _log.warning("hold %r of %r was not ended: %s", self.id, self.key, failure)

    # For the renewer -------------------------------------------------------------------------------------------------

    @property
    def renewal_interval(self) -> int:
        """Microseconds from one renewal of its lease to the next."""
        return max(self._lease // 3, 1)

    def renew(self) -> bool:
        """Renew its lease, and say whether to go on doing so."""
        called = self._store.clock.now()
        renewal = self.renewal(called)
        if renewal is None:
            return False
        try:
            return self.renewed(called, self._store.extend(renewal[0], renewal[1], renewal[2], None, renewal[3]))
        except HeadgateError as error:
            return self.renewed(called, error)

    def renewal(self, called: int) -> Renewal | None:
        """The request for a longer lease; None if the hold is too old for one."""
        if called - self._called >= self._max_age:
            return None
        asks, low, hold_id = self._arguments()
        return Renewal(asks, low, hold_id, self._lease)

    def renewed(self, called: int, answer: HoldAnswer | HeadgateError) -> bool:
        """Take note of what its store has answered, and say whether to go on renewing it."""
        if isinstance(answer, HoldAnswer):
            if not answer.left:  # the store is away: it doesn't know whether it will be in time
                return self.state == OPEN
            self._ends = called + answer.left
            return True
        if isinstance(answer, StoreError):  # perhaps it is back before the lease ends
            _log.debug("the lease of hold %r can't be renewed: %s", self.id, answer)
            return self.state == OPEN
        self._lost = True
        return False

    def __repr__(self) -> str:
        return f"Hold({self.id!r}, {self.state})"


@mypyc_attr(free_list_len=1)
class LocalHold(Hold):
    """A hold in memory, which is settled without being looked for as long as nobody has asked for its id."""

    def __init__(
        self, local: "LocalHolds", held: MemoryHold, decision: Decision, lease: i64, called: i64, max_age: i64
    ) -> None:
        # Not that of `Hold`: what isn't set here is set when it is needed.
        self._owner = local.owner
        self._local: Final = local
        self._held: Final = held
        self._filled = False
        self._decision = decision
        self._state = held.status
        self._lease = lease
        self._called = called
        self._max_age = max_age
        self._ends = held.end
        self._used = None
        self._release = False
        self._lost = False
        self._block = None

    @property
    def key(self) -> str:
        return self._held.key

    def _ready(self) -> None:
        if not self._filled:
            local, held = self._local, self._held
            self._id = local.store.reveal(held)
            self._costs = held.all_costs()
            self._asks = (Ask(local.name, held.key, local.limit, self._costs[0]),)
            self._parts = (self._decision,)
            self._filled = True

    def settle(self, cost: object = None) -> Decision:
        local, held = self._local, self._held
        if not self._filled and self._state == OPEN:
            units: i64 = held.cost
            if cost is not None:
                if local.whole and type(cost) is int and 0 <= cost <= LARGEST:
                    units = cost
                else:
                    units = _rounded_up(local.owner.read_costs(cost, (held.cost,), spent=True))[0]
                    if units != held.cost:
                        _refuse_too_much((units,), cost)
            decision = local.holds.settle_one(held, units, SETTLED, local.store.now(), local.low)
            if decision is not None:
                return self._settled_here(decision, SETTLED)
        return super().settle(cost)

    def cancel(self) -> Decision:
        local = self._local
        if not self._filled and self._state == OPEN:
            decision = local.holds.settle_one(self._held, 0, CANCELLED, local.store.now(), local.low)
            if decision is not None:
                return self._settled_here(decision, CANCELLED)
        return super().cancel()

    def _settled_here(self, decision: Decision, state: HoldState) -> Decision:
        self._state = state
        self._decision = decision
        if self._local.waiting:
            self._owner.freed(self._held.key)
        return decision

    def asettle(self, cost: object = None) -> Coroutine[Any, Any, Decision]:
        return _hold_async.settle_here(self, cost)

    def acancel(self) -> Coroutine[Any, Any, Decision]:
        return _hold_async.cancel_here(self)


class LocalHolds:
    """Makes the holds of a limiter that counts in this process's memory."""

    def __init__(
        self,
        owner: HoldOwner,
        store: MemoryStore,
        name: str,
        limit: Limit,
        low: i64,
        waiting: Mapping[str, object],
    ) -> None:
        """`waiting` is empty while nobody waits for a key."""
        self.owner: Final = owner
        self.store: Final = store
        self.holds: Final = store.holds
        self.table: Final = store.limit_table(name, limit)
        self.name: Final = name
        self.limit: Final = limit
        self.low: Final = low
        self.whole: Final = limit.decimals == 0
        self.waiting: Final = waiting

    def hold(self, key: str, cost: i64, lease: i64, keep: i64, max_age: i64) -> Hold:
        """Ask for a hold. All times are in microseconds."""
        now = self.store.now()
        held = MemoryHold(self.table, key, self.limit, cost, "", now + lease, keep)
        decision = self.holds.hold_one(held, now, self.low)
        return LocalHold(self, held, decision, lease, now, max_age)


def local_holds(
    owner: HoldOwner, store: Store, name: str, limit: Limit, low: int, waiting: Mapping[str, object]
) -> LocalHolds | None:
    """The maker of a limiter's holds in memory; None if they are in another store, or have several pieces."""
    memory = in_process(store)
    if memory is None or memory.holds.remembers or len(limit.pieces) > 1:
        return None
    return LocalHolds(owner, memory, name, limit, low, waiting)


def _refuse_too_much(costs: tuple[Any, ...], cost: object) -> None:
    for one in costs:
        if one > LARGEST:
            refuse("cost", f"at most {LARGEST} in all", cost)


def with_costs(asks: tuple[Ask, ...], costs: tuple[int, ...]) -> tuple[Ask, ...]:
    return tuple([ask.with_cost(cost) for ask, cost in zip(asks, costs, strict=True)])


def lease_of(lease: object) -> int:
    """A lease in microseconds."""
    found = _span("hold lease", lease)
    if not SHORTEST_LEASE <= found <= LONGEST_LEASE:
        span = f"{SHORTEST_LEASE / 1_000_000} to {LONGEST_LEASE // 1_000_000} seconds"
        refuse("hold lease", f"{span} (a `with` block renews it as long as it runs)", lease)
    return found


def age_of(max_age: object) -> int:
    """An age in microseconds; one that nothing reaches is the same as another."""
    return min(_span("hold max_age", max_age), LARGEST)


def keep_of(keep: object) -> int:
    """For how long a hold is remembered, in microseconds."""
    return _span("hold keep", keep, LONGEST_LEASE)


def _span(where: str, seconds: object, most: int | None = None) -> int:
    """`microseconds`, quickly for a few whole seconds, as most are."""
    if type(seconds) is int and 0 <= seconds <= _QUICK:
        return seconds * 1_000_000
    return microseconds(where, seconds, most)


def _sum(used: Any, more: Any) -> Any:
    return used if more == _UNUSED else max(used, 0) + more


def _rounded_up(costs: tuple[Any, ...]) -> tuple[int, ...]:
    """Costs that were added up exactly, as limits count them."""
    return tuple([ceil(one) for one in costs])
