"""The waits of a client: as long as the hub asks for, and longer with each failure in a row in any case.

All are in microseconds. Those of the client in TypeScript are the same.
"""

from random import Random
from typing import Final

_SECOND: Final = 1_000_000
_FIRST, _LONGEST = _SECOND // 2, 30 * _SECOND  # up to a half less at random: at least a second from the third on
_LONGEST_ASKED: Final = 86_400 * _SECOND
_JITTER: Final = 0.1  # the largest share of a wait that is added to it
_MOST_JITTER: Final = 10 * _SECOND

LASTING: Final = _LONGEST
"""A connection that lasts longer than this is no failure."""


class ReconnectBackoff:
    """The waits of one client, with its own random numbers: not all clients come back at the same moment."""

    def __init__(self, random: Random) -> None:
        self._random: Final = random

    def pause(self, failures: int, asked: int | None = None) -> int:
        """The wait after so many failures in a row: twice as long each time, and never less than was asked for."""
        longest = min(_FIRST << min(failures - 1, 20), _LONGEST)
        backoff = int(longest * (0.5 + self._random.random() / 2))
        return backoff if asked is None else max(backoff, asked + self.jitter(asked))

    def jitter(self, wait: int) -> int:
        """The share that is added to a wait that the hub asked for."""
        return int(self._random.random() * min(wait * _JITTER, _MOST_JITTER))


def asked_wait(milliseconds: int) -> int:
    """A wait that the hub asked for, within bounds: at least a millisecond, at most a day."""
    return min(max(milliseconds, 1) * 1000, _LONGEST_ASKED)
