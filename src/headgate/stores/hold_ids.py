"""Ids of holds whose callers give none, and the numbers by which servers tell attempts apart."""

from itertools import count
from secrets import choice, randbits
from string import ascii_letters, digits
from typing import Final

from headgate.lifecycle import after_fork


class HoldIds:
    """Makes ids: a random beginning for each process, and a number. They are short, since servers keep each twice.

    The beginnings come from the operating system: programs that seed `random` in every worker would make the same.
    """

    def __init__(self) -> None:
        self._after_fork()
        after_fork(self)

    def _after_fork(self) -> None:
        self._start = "".join([choice(ascii_letters + digits) for _ in range(8)])
        self._ids, self._attempts = count(), count(randbits(52))

    def new(self) -> str:
        return self._start + hex(next(self._ids))[2:]  # noqa: FURB116 - quicker than an f-string

    def number(self) -> int:
        """From 1 to 2**52, which scripts keep as a double."""
        return next(self._attempts) % 2**52 + 1


HOLD_IDS: Final = HoldIds()
