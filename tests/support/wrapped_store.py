"""A memory store that limiters and gates don't recognise as a `MemoryStore`."""

import asyncio
from collections.abc import Sequence

from headgate import Decision, ManualClock, MemoryStore
from headgate.limits.clock import Clock
from headgate.limits.decision import Rule, Violation
from headgate.limits.violations import Standing
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.holds import HoldAnswer, HoldTerms, ListedHold


class WrappedStore:
    """Forwards every call to a memory store, the async ones after a turn of the loop."""

    def __init__(self, clock: ManualClock) -> None:
        self._memory = MemoryStore(clock=clock)

    @property
    def clock(self) -> Clock:
        return self._memory.clock

    def apply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        return self._memory.apply(verb, asks, low, offence, request_id)

    async def aapply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        await asyncio.sleep(0)
        return self._memory.apply(verb, asks, low, offence, request_id)

    def record_violation(self, offence: Offence) -> Violation:
        return self._memory.record_violation(offence)

    async def arecord_violation(self, offence: Offence) -> Violation:
        await asyncio.sleep(0)
        return self._memory.record_violation(offence)

    def standing(self, offence: Offence) -> Standing:
        return self._memory.standing(offence)

    async def astanding(self, offence: Offence) -> Standing:
        await asyncio.sleep(0)
        return self._memory.standing(offence)

    def forget(self, name: str, key: str, rule: Rule, root: str = "") -> bool:
        return self._memory.forget(name, key, rule)

    async def aforget(self, name: str, key: str, rule: Rule, root: str = "") -> bool:
        await asyncio.sleep(0)
        return self._memory.forget(name, key, rule)

    def clear(self, name: str, rule: Rule) -> None:
        self._memory.clear(name, rule)

    async def aclear(self, name: str, rule: Rule) -> None:
        await asyncio.sleep(0)
        self._memory.clear(name, rule)


class WrappedHoldStore(WrappedStore):
    """One that can hold."""

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        return self._memory.hold(asks, low, terms)

    async def ahold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        await asyncio.sleep(0)
        return self._memory.hold(asks, low, terms)

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        return self._memory.settle(asks, low, hold_id, costs, cancel=cancel)

    async def asettle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        await asyncio.sleep(0)
        return self._memory.settle(asks, low, hold_id, costs, cancel=cancel)

    def extend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        return self._memory.extend(asks, low, hold_id, costs, lease)

    async def aextend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        await asyncio.sleep(0)
        return self._memory.extend(asks, low, hold_id, costs, lease)

    def find_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        return self._memory.find_hold(asks, low, hold_id)

    async def afind_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        await asyncio.sleep(0)
        return self._memory.find_hold(asks, low, hold_id)

    def list_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        return self._memory.list_holds(name, key, count)

    async def alist_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        await asyncio.sleep(0)
        return self._memory.list_holds(name, key, count)
