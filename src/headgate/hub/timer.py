"""Timers on the gate's clock, in the event loop."""

import asyncio
from collections.abc import Callable

from headgate.limits.clock import Clock


class Timer:
    """Calls `action` once, in the loop that made it, when the clock reaches `when` (microseconds)."""

    def __init__(self, clock: Clock, when: int, action: Callable[[], object]) -> None:
        self._clock, self._when, self._action = clock, when, action
        self._loop = asyncio.get_running_loop()
        self._done = False
        self._handle: asyncio.TimerHandle | None = None
        self._schedule()

    def cancel(self) -> None:
        """Do not call `action` any more."""
        self._done = True
        if self._handle is not None:
            self._handle.cancel()

    def _schedule(self) -> None:
        if self._done:
            return
        seconds = self._clock.alarm(self._when, self._ring)
        if seconds is None:
            return  # the clock calls `_ring`
        if seconds > 0:
            self._handle = self._loop.call_later(seconds, self._schedule)
        else:
            self._handle = self._loop.call_later(0, self._fire)

    def _ring(self) -> None:
        if not self._done and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._schedule)  # tests set their clock in another thread

    def _fire(self) -> None:
        if not self._done:
            self._done = True
            self._action()


class Timed:
    """Something that one timer may be set for."""

    timer: Timer | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
