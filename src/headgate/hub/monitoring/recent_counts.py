"""Counts of the last minute and of the last hour."""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_SLOT_US: Final = 5_000_000  # counts of the last minute are exact to such a slot, those of the hour to a minute
_SLOTS: Final = 12  # of a minute
_MINUTES: Final = 60
_EMPTY: Final = bytes(4 * (_SLOTS + _MINUTES))


class RecentCounts:
    """How often something happened in the last minute and in the last hour: about 500 bytes, however often.

    Times are microseconds of a clock. Adding and reading take the same time, however much was counted.
    """

    __slots__ = ("_counts", "_hour", "_minute", "_slot")

    def __init__(self, now: int) -> None:
        self._slot = now // _SLOT_US
        self._counts = array("I", _EMPTY)  # of each slot, then of each minute
        self._minute = self._hour = 0

    def add(self, now: int) -> None:
        slot = now // _SLOT_US
        if slot > self._slot:
            self._advance(slot)
        self._counts[self._slot % _SLOTS] += 1
        self._counts[_SLOTS + self._slot // _SLOTS % _MINUTES] += 1
        self._minute += 1
        self._hour += 1

    def last_minute(self, now: int) -> int:
        if now // _SLOT_US > self._slot:
            self._advance(now // _SLOT_US)
        return self._minute

    def last_hour(self, now: int) -> int:
        if now // _SLOT_US > self._slot:
            self._advance(now // _SLOT_US)
        return self._hour

    def _advance(self, slot: int) -> None:
        counts, before = self._counts, self._slot
        for old in range(max(before + 1, slot - _SLOTS + 1), slot + 1):
            self._minute -= counts[old % _SLOTS]
            counts[old % _SLOTS] = 0
        minute = slot // _SLOTS
        for old in range(max(before // _SLOTS + 1, minute - _MINUTES + 1), minute + 1):
            self._hour -= counts[_SLOTS + old % _MINUTES]
            counts[_SLOTS + old % _MINUTES] = 0
        self._slot = slot


def renew(known: OrderedDict[K, V], key: K, most: int, make: Callable[[int], V], now: int) -> V:
    """The value of a key, which comes last from now on. A new key displaces the first of `most`."""
    found = known.get(key)
    if found is not None:
        known.move_to_end(key)
        return found
    if len(known) >= most:
        known.popitem(last=False)
    found = known[key] = make(now)
    return found
