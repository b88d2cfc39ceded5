"""Holds: a cost or a slot that is reserved now, and settled with what it really cost."""

from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from decimal import Decimal
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, TypeVar

from headgate._hold_async import to_its_end as to_its_end
from headgate._hold_hot import LONGEST_LEASE, SHORTEST_LEASE, with_costs
from headgate._hold_hot import Hold as Hold
from headgate._hold_hot import lease_of as lease_of
from headgate.errors import HoldError, StoreError, refuse
from headgate.hold_owner import HoldOwner as HoldOwner
from headgate.limits.decision import Decision
from headgate.limits.numbers import microseconds
from headgate.stores.base import Ask, ServerStore, Verb
from headgate.stores.hold_ids import HOLD_IDS
from headgate.stores.holds import (
    DENIED,
    MAX_OPEN_HOLDS,
    HoldAnswer,
    HoldState,
    HoldTerms,
    ListedHold,
)

_LONGEST_ID: Final = 200
_RECHECK: Final = 250_000  # microseconds


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
        checked_id: bool = False,
    ) -> None:
        """`own_id`: nobody else knows the id. `checked_id`: it needs no check. `make` gets the arguments of `Hold`."""
        self._owner: Final = owner
        self._store: Final = owner.hold_store
        self._asks: Final = asks
        self._terms: Final = _terms(lease, hold_id, checked_id, on_expiry, keep, note, shape, most, forced)
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
    return make(owner, with_costs(asks, answer.costs), hold_id, lease, answer, called)


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


def new_id() -> str:
    """An id that no other hold has."""
    return HOLD_IDS.new()


def _terms(
    lease: object,
    hold_id: object,
    checked_id: bool,
    on_expiry: object,
    keep: object,
    note: str,
    shape: str,
    most: int,
    forced: bool,
) -> HoldTerms:
    """The terms of a hold, from what a caller gives."""
    if on_expiry not in ("keep", "release"):
        refuse("hold on_expiry", "'keep' or 'release'", on_expiry)
    return HoldTerms(
        HOLD_IDS.new() if hold_id is None else str(hold_id) if checked_id else check_id(hold_id),
        lease_of(lease),
        on_expiry == "release",
        microseconds("hold keep", keep, LONGEST_LEASE),
        note,
        shape,
        most,
        forced,
    )


def check_id(hold_id: object) -> str:
    """The id of a hold, if it can be one."""
    if not isinstance(hold_id, str) or not 0 < len(hold_id) <= _LONGEST_ID:
        refuse("hold_id", f"1 to {_LONGEST_ID} characters", hold_id)
    return hold_id
