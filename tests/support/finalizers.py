"""Garbage whose finalizer runs in the middle of other code."""

import gc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ALLOCATIONS = range(60)
"""More than any verb makes."""


class Garbage:
    """Calls a function when it is collected, unless it was disarmed."""

    def __init__(self, armed: list[Callable[[], object]]) -> None:
        self.itself = self
        self.armed = armed

    def __del__(self) -> None:
        for then in self.armed:
            then()


def interrupt(work: Callable[[], T], then: Callable[[], object], allocation: int) -> T:
    """The result of `work`, while the garbage collector calls `then` at one of its allocations, by number.

    It may not call it at all: since Python 3.12 it doesn't run within compiled code.
    """
    before, armed = gc.get_threshold(), [then]
    gc.collect(0)
    gc.disable()
    try:
        Garbage(armed)
        hoard: list[object] = [([], {}) for _ in range(200)]  # so that no freed list or dict is used again
        gc.set_threshold(gc.get_count()[0] + allocation, 1000, 1000)
        gc.enable()
        return work()
    finally:
        armed.clear()
        gc.set_threshold(*before)
        gc.enable()
        del hoard
