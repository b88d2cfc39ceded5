"""Ids of holds whose callers give none."""

from itertools import count
from secrets import token_hex
from typing import Final

from headgate.lifecycle import after_fork


class HoldIds:
    """Makes ids: a random beginning for each process, and a number."""

    def __init__(self) -> None:
        self._after_fork()
        after_fork(self)

    def _after_fork(self) -> None:
        self._start, self._numbers = token_hex(6), count()

    def new(self) -> str:
        return f"{self._start}-{next(self._numbers):x}"


HOLD_IDS: Final = HoldIds()
