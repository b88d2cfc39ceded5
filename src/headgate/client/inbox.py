"""The inbox of a client: messages that the application hasn't taken yet; and the event that wakes its tasks."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from headgate.limits.clock import Clock

T = TypeVar("T")


class Wakeup:
    """An event that wakes all waiting tasks, now or at a moment of the clock. Each then checks its own condition."""

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._event: Final = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, when: int | None = None) -> None:
        """Until it is set, or the clock reaches a moment."""
        self._event.clear()
        loop = asyncio.get_running_loop()

        def wake() -> None:  # a clock for tests is set by another thread
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._event.set)

        try:
            async with asyncio.timeout(None if when is None else self._clock.alarm(when, wake)):
                await self._event.wait()
        except TimeoutError:
            pass


class Inbox(Generic[T]):
    """Messages for the application: about `most` of them, and never more than twice as many."""

    def __init__(self, most: int, wakeup: Wakeup) -> None:
        self._most, self._wakeup = most, wakeup
        self._messages: Final[deque[T]] = deque()
        self._used = False  # whether the application has ever taken a message
        self.dropped = 0

    async def wait_for_room(self, urgent: Callable[[], object]) -> None:
        """Until the application has taken enough; unless it takes none at all, or something is urgent."""
        while len(self._messages) >= self._most and self._used and not urgent():
            await self._wakeup.wait()

    def put(self, message: T) -> int:
        """Add a message. A full inbox drops its oldest, and returns how many it has dropped so far; otherwise 0."""
        full = len(self._messages) >= self._most * (2 if self._used else 1)
        if full:
            self._messages.popleft()
            self.dropped += 1
        self._messages.append(message)
        self._wakeup.set()
        return self.dropped if full else 0

    async def take(self, ended: Callable[[], object]) -> T | None:
        """The oldest message; None at the end."""
        self._used = True
        while not self._messages:
            if ended():
                return None
            await self._wakeup.wait()
        self._wakeup.set()
        return self._messages.popleft()
