"""Holds: a cost or a slot that is reserved now, and settled with what it really cost."""

from collections.abc import Awaitable, Callable, Generator
from decimal import Decimal
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, NoReturn, Protocol, Self, TypeVar

from headgate._hold_hot import SHORTEST_LEASE, with_costs
from headgate._hold_hot import Hold as Hold
from headgate.errors import HoldError
from headgate.hold_attempt import AnyHold
from headgate.hold_attempt import HoldAttempt as HoldAttempt
from headgate.hold_attempt import check_id as check_id
from headgate.hold_attempt import read_terms as read_terms
from headgate.hold_owner import HoldOwner
from headgate.stores.base import Ask
from headgate.stores.hold_terms import LONGEST_LEASE
from headgate.stores.holds import HoldAnswer, HoldState, ListedHold


def found_hold(
    owner: HoldOwner, asks: tuple[Ask, ...], hold_id: str, answer: HoldAnswer, called: int, make: type[AnyHold]
) -> AnyHold:
    """A hold that was made before, by its id."""
    lease = min(max(answer.left, SHORTEST_LEASE), LONGEST_LEASE)
    hold = make(owner, with_costs(asks, answer.costs), hold_id, lease, answer, called)
    hold._release = answer.release
    return hold


class HoldSummary(NamedTuple):
    """A hold, as it is listed."""

    id: str
    state: HoldState
    cost: Decimal
    """The cost that it has reserved, or was settled with."""
    lease_left: float
    """Seconds until its lease ends; 0.0 if it isn't open."""


def summarize(listed: ListedHold, decimals: int) -> HoldSummary:
    """A hold of a store with one ask, in units and seconds."""
    cost = Decimal(listed.costs[0]).scaleb(-decimals)
    return HoldSummary(listed.hold_id, listed.state, cost, listed.left / 1_000_000)


class _AsyncBlock(Protocol):
    """A hold of `async with`: one of a limiter, of a gate, or of a client."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


_Made = TypeVar("_Made", bound=_AsyncBlock)


class PendingHold(Generic[_Made]):
    """A hold that is yet to be made: `await` it, or use it in `async with`, once."""

    def __init__(
        self, make: Callable[[], Awaitable[_Made]], verb: str = "ahold", for_threads: str = "`hold` is the one"
    ) -> None:
        """`verb` and `for_threads` are for the errors: what was called, and what to use in threads."""
        self._make: Final = make
        self._verb: Final = verb
        self._for_threads: Final = for_threads
        self._entered = False
        self._made: _Made | None = None

    def __await__(self) -> Generator[Any, None, _Made]:
        return self._make().__await__()

    def __bool__(self) -> bool:
        raise HoldError(
            f"{self._verb}: expected `await` before it, or `async with`, got neither, so that nothing is held yet"
        )

    def __enter__(self) -> NoReturn:
        raise HoldError(f"{self._verb}: expected `async with`, got `with`; {self._for_threads} for threads")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> _Made:
        if self._entered:
            raise HoldError(
                f"{self._verb}: expected one block for each call, got a second one; call `{self._verb}` again"
            )
        self._entered = True
        self._made = await self._make()
        return await self._made.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, at)
