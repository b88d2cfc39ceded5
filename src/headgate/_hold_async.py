"""The bodies of the async twins of `headgate.Hold` and of an attempt at one, in plain Python."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headgate.errors import HeadgateError, HoldError, StoreError, UnknownHold
from headgate.stores.base import Verb
from headgate.wait_queue import WaitQueues, aacquire

if TYPE_CHECKING:
    from headgate._hold_hot import Hold
    from headgate.hold_attempt import HoldAttempt
    from headgate.limits.decision import Decision

H = TypeVar("H", bound="Hold")


async def ask(attempt: "HoldAttempt[Any]") -> "Decision":
    denial = await _denial(attempt)
    if denial is not None:
        return denial
    try:
        return attempt._note(await attempt._store.ahold(*attempt._arguments()))
    except asyncio.CancelledError:
        if attempt._may_be_unknown():
            await to_its_end(_give_back(attempt))
        raise


async def _denial(attempt: "HoldAttempt[Any]") -> "Decision | None":
    denial = attempt._begin()
    if denial is None and attempt.offence is not None:
        denial = attempt.denial_until(await attempt._store.astanding(attempt.offence))
    return denial


async def _give_back(attempt: "HoldAttempt[Any]") -> None:
    with suppress(HoldError, StoreError):
        await attempt._store.asettle(*attempt._cancellation(), cancel=True)


async def run(attempt: "HoldAttempt[H]", queues: WaitQueues, key: str, timeout: object) -> H:
    if not attempt.may_wait(timeout):
        return await _finish(attempt, await ask(attempt))
    clock, groups = attempt._store.clock, attempt.groups
    try:
        decision = await aacquire(queues, key, clock, timeout, attempt.aperform, recheck=True, groups=groups)
    except (asyncio.CancelledError, Exception):
        if attempt.may_be_granted():
            await to_its_end(_give_back(attempt))
        raise
    return await _finish(attempt, decision)


async def perform(attempt: "HoldAttempt[Any]", verb: Verb) -> "Decision":
    if verb is Verb.CHECK:
        return await ask(attempt)
    denial = await _denial(attempt)
    if denial is not None:
        return denial
    asks, low, _ = attempt._arguments()
    return attempt.peeked(await attempt._store.aapply(verb, asks, low))


async def _finish(attempt: "HoldAttempt[H]", decision: "Decision") -> H:
    hold = attempt._handle(decision)
    if not hold and attempt.may_be_granted():
        await _give_back(attempt)
    return hold


async def settle(hold: "Hold", cost: object) -> "Decision":
    return hold._ended(await hold._store.asettle(*hold._arguments(), hold._settled(cost)))


async def settle_here(hold: "Hold", cost: object) -> "Decision":
    return hold.settle(cost)


async def cancel(hold: "Hold") -> "Decision":
    asks, low, hold_id = hold._arguments()
    return hold._ended(await hold._store.asettle(asks, low, hold_id, (0,) * len(asks), cancel=True))


async def cancel_here(hold: "Hold") -> "Decision":
    return hold.cancel()


async def extend(hold: "Hold", cost: object, lease: object) -> "Decision":
    called = hold._store.clock.now()
    answer = await hold._store.aextend(*hold._extension_arguments(), *hold._extension(cost, lease))
    return hold._extended(called, answer)


async def enter(hold: H) -> H:
    return hold.__enter__()


async def leave(hold: "Hold", error: BaseException | None) -> None:
    if hold._leave():
        await to_its_end(_end(hold, error))


async def _end(hold: "Hold", error: BaseException | None) -> None:
    try:
        if error is None:
            await hold.asettle()
        elif (costs := hold._failed_costs()) is None:
            await hold.aexpire()
        else:
            hold._ended(await hold._store.asettle(*hold._arguments(), costs))
    except UnknownHold:
        hold._lose()
    except HeadgateError as failure:
        if error is None:
            raise
        hold._note_unended(failure)


async def expire(hold: "Hold") -> None:
    try:
        hold._extended(hold._called, await hold._store.aextend(*hold._arguments(), None, 0))
    except UnknownHold:
        raise
    except HoldError:  # its lease has ended before, or it was settled elsewhere
        hold._lost = True
    hold._owner.freed(hold.key)


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
