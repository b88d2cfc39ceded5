"""Ids of holds whose callers give none, and the numbers by which servers tell attempts apart."""

from itertools import count
from secrets import randbits, token_hex
from typing import Final

from headgate.lifecycle import after_fork


class HoldIds:
    """Makes ids: a random beginning for each process, and a number.

    The beginnings come from the operating system: programs that seed `random` in every worker would make the same.
    """

    def __init__(self) -> None:
        self._after_fork()
        after_fork(self)

    def _after_fork(self) -> None:
        self._start, self._numbers = token_hex(6), count()
        self._first = randbits(52)

    def new(self) -> str:
        return f"{self._start}-{next(self._numbers):x}"

    def number(self) -> int:
        """From 1 to 2**52, which scripts keep as a double."""
        return (self._first + next(self._numbers)) % 2**52 + 1


HOLD_IDS: Final = HoldIds()
