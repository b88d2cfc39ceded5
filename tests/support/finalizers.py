"""Garbage collections in the middle of other code, which do something as finalizers would."""

import gc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ALLOCATIONS = range(120)
"""More than any verb makes."""


def collect_during(work: Callable[[], T], then: Callable[[], object], allocation: int) -> T:
    """The result of `work`, while the garbage collector calls `then` at one of its allocations, by number.

    It may not call it at all: since Python 3.12 it doesn't run within compiled code.
    """
    before, left = gc.get_threshold(), allocation

    def count(phase: str, _info: object) -> None:
        nonlocal left
        if phase == "start":
            left -= 1
            if left == -1:
                then()

    gc.collect(0)
    hoard: list[object] = [([], {}) for _ in range(200)]  # so that no freed list or dict is used again
    gc.callbacks.append(count)
    gc.set_threshold(-1, 1000, 1000)  # it runs at every allocation, whatever was freed since
    try:
        return work()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(count)
        del hoard
