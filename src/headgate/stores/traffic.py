"""Statistics of the requests that a store sends to its server."""

import time
from bisect import bisect_left
from typing import Final

from headgate.lifecycle import new_lock

BATCH_SIZES: Final = tuple(2**power for power in range(9))
"""The upper ends of the histogram of how many requests were sent together."""

_RECENT: Final = 60.0  # seconds for which a mistake is told


class Traffic:
    """The numbers of sent requests, calls and errors. Threads and tasks add to them."""

    def __init__(self) -> None:
        self._lock: Final = new_lock()
        self.round_trips = 0
        self.errors = 0
        self.requests = 0
        self._mistake = "", -_RECENT
        self.batches: Final = [0] * (len(BATCH_SIZES) + 1)
        """How many calls carried up to as many requests as each of the `BATCH_SIZES`, but more than the one before."""

    def sent(self, requests: int) -> None:
        """So many requests go out together, for the first time."""
        with self._lock:
            self.round_trips += 1
            self.requests += requests
            self.batches[bisect_left(BATCH_SIZES, requests)] += 1

    def sent_again(self) -> None:
        with self._lock:
            self.round_trips += 1

    def failed(self) -> None:
        with self._lock:
            self.errors += 1

    def mistaken(self, error: BaseException) -> None:
        """A call has failed by a mistake in a program, not because of the server."""
        with self._lock:
            self.errors += 1
            self._mistake = type(error).__name__, time.monotonic()

    @property
    def recent_mistake(self) -> str:
        """The type of the last error of a mistake in a program, for a minute; "" if there is none."""
        error, at = self._mistake
        return error if time.monotonic() - at < _RECENT else ""
