"""A memory store that limiters and gates don't recognise as a `MemoryStore`."""

import asyncio
from typing import Any

from headgate import ManualClock, MemoryStore
from headgate.limits.clock import Clock


def _verb(name: str) -> Any:
    """A method that forwards to the memory store."""

    def call(self: "WrappedStore", *arguments: Any, **options: Any) -> Any:
        return getattr(self._memory, name)(*arguments, **options)

    return call


def _twin(name: str) -> Any:
    """The same for an event loop, after a turn of it."""

    async def call(self: "WrappedStore", *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0)
        return getattr(self._memory, name)(*arguments, **options)

    return call


class WrappedStore:
    """Forwards every call to a memory store, the async ones after a turn of the loop."""

    def __init__(self, clock: ManualClock) -> None:
        self._memory = MemoryStore(clock=clock)

    @property
    def clock(self) -> Clock:
        return self._memory.clock

    apply, aapply = _verb("apply"), _twin("apply")
    record_violation, arecord_violation = _verb("record_violation"), _twin("record_violation")
    standing, astanding = _verb("standing"), _twin("standing")
    forget, aforget = _verb("forget"), _twin("forget")
    clear, aclear = _verb("clear"), _twin("clear")


class WrappedHoldStore(WrappedStore):
    """One that can hold."""

    hold, ahold = _verb("hold"), _twin("hold")
    settle, asettle = _verb("settle"), _twin("settle")
    extend, aextend = _verb("extend"), _twin("extend")
    find_hold, afind_hold = _verb("find_hold"), _twin("find_hold")
    list_holds, alist_holds = _verb("list_holds"), _twin("list_holds")
