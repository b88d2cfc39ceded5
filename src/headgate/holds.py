"""Holds: a cost or a slot that is reserved now, and settled with what it really cost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from decimal import Decimal
from itertools import count
from secrets import token_hex
from types import TracebackType
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from headgate.errors import HoldError, RateLimited, StoreError, UnknownHold, refuse
from headgate.lease_renewer import RENEWERS
from headgate.lifecycle import after_fork
from headgate.limits.decision import Decision
from headgate.limits.numbers import Number, microseconds
from headgate.stores.base import Ask, ServerStore, Verb
from headgate.stores.holds import (
    DENIED,
    EXPIRED,
    MAX_OPEN_HOLDS,
    OPEN,
    HoldAnswer,
    HoldState,
    HoldStore,
    HoldTerms,
    ListedHold,
    refuse_ended,
    refuse_other_costs,
)

OnExpiry: TypeAlias = Literal["keep", "release"]

SHORTEST_LEASE: Final = 1_000
"""Microseconds."""
LONGEST_LEASE: Final = 7 * 86_400_000_000
"""Microseconds: a week. A block that takes longer renews its lease."""
KEEP: Final = 86_400
"""Seconds for which a hold is remembered after its end."""

_LONGEST_ID: Final = 200
_RECHECK: Final = 250_000  # microseconds
_UNUSED: Final = -1
_log = logging.getLogger("headgate")


class HoldOwner(Protocol):
    """What makes holds: it has the store, and knows how costs are read and denials told."""

    @property
    def hold_store(self) -> HoldStore: ...

    @property
    def low(self) -> int:
        """The share of the capacity, in thousandths, below which a decision warns."""

    def read_costs(self, cost: object, unnamed: tuple[int, ...]) -> tuple[int, ...]:
        """The cost of each ask, in smallest units, from what a caller gives: 0 or more.

        Of an ask for a resource that the caller doesn't name, it is what `unnamed` has in its place.
        """

    def denial(self, key: str, decision: Decision) -> RateLimited:
        """The error for a denied hold."""

    def freed(self, key: str) -> None:
        """Something may have come back: those who wait for the key can look."""


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
        self._owner: Final = owner
        self._store: Final = owner.hold_store
        self._asks = asks  # with the costs that it has taken
        self._id: Final = hold_id
        self._lease: Final = lease
        self._called: Final = called
        self._max_age: Final = max_age
        self._decision = answer.decision
        self._parts = answer.parts
        self._state: HoldState = answer.state
        self._costs = answer.costs
        self._ends = called + answer.left  # never later than in the store
        self._used: tuple[int, ...] | None = None  # for each ask; _UNUSED: its resource wasn't named
        self._lost = False

    @property
    def id(self) -> str:
        """The id, by which another process can settle it: `limiter.find_hold(key, id)`."""
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
        return self._parts

    @property
    def state(self) -> HoldState:
        """ "denied", "open", "settled", "cancelled" or "expired", as far as it is known here."""
        if self._state == OPEN and (self._lost or self._store.clock.now() >= self._ends):
            return EXPIRED
        return self._state

    @property
    def lease_left(self) -> float:
        """Seconds until its lease ends, as far as it is known here; 0.0 if it isn't open."""
        return (self._ends - self._store.clock.now()) / 1_000_000 if self.state == OPEN else 0.0

    @property
    def lost(self) -> bool:
        """Whether its lease has ended, or it was forgotten, while it was in use."""
        return self._lost or self.state == EXPIRED

    def __bool__(self) -> bool:
        return self._state != DENIED

    def use(self, cost: object = 1) -> None:
        """Add to what `settle` counts. It is a sum in this process: nothing is asked of the store."""
        if not self._is_unsettled():
            raise HoldError(
                f"hold {self.id!r} of {self.key!r}: expected an open hold to use, got one that is {self.state}"
            )
        unused = (_UNUSED,) * len(self._asks)
        more = self._owner.read_costs(cost, unused)
        self._used = tuple(map(_sum, self._used or unused, more))

    def settle(self, cost: object = None) -> Decision:
        """End it, and count this cost instead of the reserved one: less gives back, more is charged, even into debt.

        Without a cost, it is what `use` has added up, or else what was reserved: of each resource, if there are more.
        """
        return self._ended(self._store.settle(*self._arguments(), self._settled(cost)))

    async def asettle(self, cost: object = None) -> Decision:
        return self._ended(await self._store.asettle(*self._arguments(), self._settled(cost)))

    def cancel(self) -> Decision:
        """End it, and give back all that it has taken."""
        nothing = (0,) * len(self._asks)
        return self._ended(self._store.settle(*self._arguments(), nothing, cancel=True))

    async def acancel(self) -> Decision:
        nothing = (0,) * len(self._asks)
        return self._ended(await self._store.asettle(*self._arguments(), nothing, cancel=True))

    def extend(self, cost: object = None, *, lease: Number | None = None) -> Decision:
        """Reserve so much more, all or nothing, and let the lease end `lease` seconds from now, if that is later.

        The decision says whether it passed. A denial changes nothing, not even the lease.
        """
        called = self._store.clock.now()
        return self._extended(called, self._store.extend(*self._arguments(), *self._extension(cost, lease)))

    async def aextend(self, cost: object = None, *, lease: Number | None = None) -> Decision:
        called = self._store.clock.now()
        answer = await self._store.aextend(*self._arguments(), *self._extension(cost, lease))
        return self._extended(called, answer)

    def expire(self) -> None:
        """End its lease now: slots are free, and costs stay counted unless it was made to release them."""
        try:
            self._extended(self._called, self._store.extend(*self._arguments(), None, 0))
        except UnknownHold:
            raise
        except HoldError:  # its lease has ended before
            self._lost = True
        self._owner.freed(self.key)

    async def aexpire(self) -> None:
        try:
            self._extended(self._called, await self._store.aextend(*self._arguments(), None, 0))
        except UnknownHold:
            raise
        except HoldError:
            self._lost = True
        self._owner.freed(self.key)

    def denial(self) -> RateLimited:
        """The error that says what the last decision has denied."""
        return self._owner.denial(self.key, self.decision)

    def _arguments(self) -> tuple[tuple[Ask, ...], int, str]:
        if not self:
            raise HoldError(f"hold {self.id!r} of {self.key!r} was denied: it has taken nothing")
        return self._asks, self._owner.low, self.id

    def _settled(self, cost: object) -> tuple[int, ...] | None:
        if cost is None:
            return self._used_or_reserved() if self._used is not None or not self._is_unsettled() else None
        costs = self._owner.read_costs(cost, self._used_or_reserved())
        if self and not self._is_unsettled() and costs != self._costs:  # known even while the store is away
            refuse_other_costs(self._asks, self.id, self.state, self._costs, costs)
        return costs

    def _used_or_reserved(self) -> tuple[int, ...]:
        """What was used of each ask that was used at all, and what is reserved for the others."""
        if self._used is None or not self._is_unsettled():
            return self._costs
        return tuple([one if used == _UNUSED else used for one, used in zip(self._costs, self._used, strict=True)])

    def _is_unsettled(self) -> bool:
        return self._state in (OPEN, EXPIRED)

    def _ended(self, answer: HoldAnswer) -> Decision:
        self._state, self._costs, self._decision = answer.state, answer.costs, answer.decision
        self._parts = answer.parts
        self._owner.freed(self.key)
        return answer.decision

    def _extension(self, cost: object, lease: Number | None) -> tuple[tuple[int, ...] | None, int | None]:
        costs = None
        if cost is not None:
            more = self._owner.read_costs(cost, (0,) * len(self._costs))
            costs = tuple(one + other for one, other in zip(self._costs, more, strict=True))
        return costs, None if lease is None else lease_of(lease)

    def _extended(self, called: int, answer: HoldAnswer) -> Decision:
        self._decision, self._parts = answer.decision, answer.parts
        if answer.decision or answer.costs != self._costs:  # a denial changes nothing, unless more is forced
            self._state = answer.state
            if answer.costs != self._costs:
                self._costs, self._asks = answer.costs, _with_costs(self._asks, answer.costs)
            if answer.left:
                self._ends = called + answer.left
        return answer.decision

    # As a context manager --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self:
            raise self.denial()
        if self.state != OPEN:  # of a repeated id: what it has reserved is spent, or free for others
            refuse_ended(self._asks, self.id, self.state, self._costs, "run a block")
        try:
            RENEWERS.add(self._store, self)
        except BaseException:  # interrupted: no block runs that would end it
            RENEWERS.remove(self._store, self)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._leave():
            try:
                if error is None:
                    self.settle()
                elif self._exceeds():
                    self._ended(self._store.settle(*self._arguments(), self._at_least_used()))
                else:
                    self.expire()
            except UnknownHold:
                self._lose()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._leave():
            await to_its_end(self._aend(error))

    async def _aend(self, error: BaseException | None) -> None:
        try:
            if error is None:
                await self.asettle()
            elif self._exceeds():
                self._ended(await self._store.asettle(*self._arguments(), self._at_least_used()))
            else:
                await self.aexpire()
        except UnknownHold:
            self._lose()

    def _leave(self) -> bool:
        """Stop renewing it, and say whether it is still to be ended."""
        RENEWERS.remove(self._store, self)
        return self._is_unsettled()

    def _exceeds(self) -> bool:
        """Whether more was used than is reserved: a block that raises must not lose that."""
        return self._at_least_used() != self._costs

    def _at_least_used(self) -> tuple[int, ...]:
        return tuple(map(max, self._costs, self._used or self._costs))

    def _lose(self) -> None:
        self._lost = True
        _log.warning("hold %r of %r was forgotten before it was settled", self.id, self.key)

    # For the renewer -------------------------------------------------------------------------------------------------

    @property
    def renewal_interval(self) -> int:
        """Microseconds from one renewal of its lease to the next."""
        return max(self._lease // 3, 1)

    def renew(self) -> bool:
        """Renew its lease, and say whether to go on doing so."""
        store = self._store
        called = store.clock.now()
        if self._max_age is not None and called - self._called >= self._max_age:
            return False
        try:
            answer = store.extend(*self._arguments(), None, self._lease)
        except StoreError as error:  # perhaps it is back before the lease ends
            _log.debug("the lease of hold %r can't be renewed: %s", self.id, error)
            return self.state == OPEN
        except HoldError:
            self._lost = True
            return False
        if not answer.left:  # the store is away: it doesn't know whether it will be in time
            return self.state == OPEN
        self._ends = called + answer.left
        return True

    def __repr__(self) -> str:
        return f"Hold({self.id!r}, {self.state})"


AnyHold = TypeVar("AnyHold", bound=Hold)


class HoldAttempt:
    """Asks a store for a hold, once or until it is granted."""

    def __init__(
        self,
        owner: HoldOwner,
        asks: tuple[Ask, ...],
        lease: object,
        hold_id: object,
        on_expiry: object,
        keep: object,
        max_age: object,
        *,
        note: str = "",
        shape: str = "",
        most: int = MAX_OPEN_HOLDS,
        forced: bool = False,
        make: Callable[..., Hold] = Hold,
        own_id: bool = False,
    ) -> None:
        """`own_id`: nobody else knows the id. `make` is `Hold` or a subclass, called with the arguments of `Hold`."""
        self._owner: Final = owner
        self._store: Final = owner.hold_store
        self._asks: Final = asks
        terms = _terms(lease, hold_id, on_expiry, keep)
        self._terms: Final = terms._replace(note=note, shape=shape, most=most, forced=forced)
        self._make: Final = make
        self._own_id: Final = own_id or hold_id is None
        self._max_age: Final = None if max_age is None else microseconds("hold max_age", max_age)
        self._called = 0
        self._answer: HoldAnswer | None = None

    @property
    def recheck(self) -> int | None:
        """Microseconds after which to ask again at the latest: another limiter, or machine, may have freed a slot."""
        return _RECHECK if any(ask.limit.counts_slots for ask in self._asks) else None

    def ask(self) -> Decision:
        self._called = self._store.clock.now()
        return self._note(self._store.hold(self._asks, self._owner.low, self._terms))

    async def aask(self) -> Decision:
        self._called = self._store.clock.now()
        return self._note(await self._store.ahold(self._asks, self._owner.low, self._terms))

    def perform(self, verb: Verb) -> Decision:
        """A step of `acquire`."""
        if verb is Verb.CHECK:
            return self.ask()
        return self._store.apply(verb, self._asks, self._owner.low)

    async def aperform(self, verb: Verb) -> Decision:
        if verb is Verb.CHECK:
            return await self.aask()
        return await self._store.aapply(verb, self._asks, self._owner.low)

    def _note(self, answer: HoldAnswer) -> Decision:
        self._answer = answer
        return answer.decision

    def made(self, decision: Decision) -> Hold:
        """The hold on which this was the last decision."""
        hold = self._made(decision)
        if self._may_be_granted(hold):
            with suppress(HoldError, StoreError):
                self._store.settle(*self._cancellation(), cancel=True)
        return hold

    async def amade(self, decision: Decision) -> Hold:
        hold = self._made(decision)
        if self._may_be_granted(hold):
            with suppress(HoldError, StoreError):
                await self._store.asettle(*self._cancellation(), cancel=True)
        return hold

    def _made(self, decision: Decision) -> Hold:
        answer = self._answer
        if answer is None or answer.state == DENIED:
            parts = answer.parts if answer is not None and answer.decision is decision else ()
            answer = HoldAnswer(decision, DENIED, tuple(ask.cost for ask in self._asks), 0, parts)
        terms = self._terms
        return self._make(self._owner, self._asks, terms.hold_id, terms.lease, answer, self._called, self._max_age)

    def _may_be_granted(self, hold: Hold) -> bool:
        """Whether a server that didn't answer may still grant a hold that is denied here, and nobody can repeat it."""
        return not hold and hold.decision.degraded and self._own_id and isinstance(self._store, ServerStore)

    def _cancellation(self) -> tuple[tuple[Ask, ...], int, str, tuple[int, ...]]:
        return self._asks, self._owner.low, self._terms.hold_id, (0,) * len(self._asks)


def found_hold(
    owner: HoldOwner, asks: tuple[Ask, ...], hold_id: str, answer: HoldAnswer, called: int, make: type[AnyHold]
) -> AnyHold:
    """A hold that was made before, by its id."""
    lease = min(max(answer.left, SHORTEST_LEASE), LONGEST_LEASE)
    return make(owner, _with_costs(asks, answer.costs), hold_id, lease, answer, called)


def _sum(used: int, more: int) -> int:
    return used if more == _UNUSED else max(used, 0) + more


def _with_costs(asks: tuple[Ask, ...], costs: tuple[int, ...]) -> tuple[Ask, ...]:
    return tuple(ask._replace(cost=cost) for ask, cost in zip(asks, costs, strict=True))


class HoldSummary(NamedTuple):
    """A hold, as it is listed."""

    id: str
    state: HoldState
    cost: Decimal
    """What it has reserved, or was settled with."""
    lease_left: float
    """Seconds until its lease ends; 0.0 if it isn't open."""


def summarize(listed: ListedHold, decimals: int) -> HoldSummary:
    """A hold of a store with one ask, in units and seconds."""
    cost = Decimal(listed.costs[0]).scaleb(-decimals)
    return HoldSummary(listed.hold_id, listed.state, cost, listed.left / 1_000_000)


_ending: Final[set[asyncio.Task[None]]] = set()  # an event loop itself keeps only weak references


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await the end of a hold, even if the caller is cancelled meanwhile: its slot must not wait for the lease."""
    task = asyncio.ensure_future(work)
    _ending.add(task)
    task.add_done_callback(_ending.discard)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])  # cancelled once more, the caller goes on without it
        raise


class PendingHold(Generic[AnyHold]):
    """A hold that is yet to be made: `await` it, or use it in `async with`, once."""

    def __init__(self, make: Callable[[], Awaitable[AnyHold]]) -> None:
        self._make: Final = make
        self._entered = False
        self._made: AnyHold | None = None

    def __await__(self) -> Generator[Any, None, AnyHold]:
        return self._make().__await__()

    async def __aenter__(self) -> AnyHold:
        if self._entered:
            raise HoldError("ahold: expected one block for each call, got a second one; call `ahold` again")
        self._entered = True
        self._made = await self._make()
        return await self._made.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, at)


class _Ids:
    """Makes ids: a random beginning for each process, and a number."""

    def __init__(self) -> None:
        self._after_fork()
        after_fork(self)

    def _after_fork(self) -> None:
        self._start, self._numbers = token_hex(6), count()

    def new(self) -> str:
        return f"{self._start}-{next(self._numbers):x}"


_ids: Final = _Ids()


def new_id() -> str:
    """An id that no other hold has."""
    return _ids.new()


def _terms(lease: object, hold_id: object, on_expiry: object, keep: object) -> HoldTerms:
    """The terms of a hold, from what a caller gives."""
    if on_expiry not in ("keep", "release"):
        refuse("hold on_expiry", "'keep' or 'release'", on_expiry)
    return HoldTerms(
        _ids.new() if hold_id is None else check_id(hold_id),
        lease_of(lease),
        on_expiry == "release",
        microseconds("hold keep", keep, LONGEST_LEASE),
    )


def lease_of(lease: object) -> int:
    """A lease in microseconds."""
    found = microseconds("hold lease", lease)
    if not SHORTEST_LEASE <= found <= LONGEST_LEASE:
        span = f"{SHORTEST_LEASE / 1_000_000} to {LONGEST_LEASE // 1_000_000} seconds"
        refuse("hold lease", f"{span} (a `with` block renews it as long as it runs)", lease)
    return found


def check_id(hold_id: object) -> str:
    """The id of a hold, if it can be one."""
    if not isinstance(hold_id, str) or not 0 < len(hold_id) <= _LONGEST_ID:
        refuse("hold_id", f"1 to {_LONGEST_ID} characters", hold_id)
    return hold_id
