"""What came and was not taken yet, and the bell that wakes up whoever waits for something."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from headgate.limits.clock import Clock

T = TypeVar("T")


class Bell:
    """Wakes up all who wait for it: they look then whether what they wait for has happened."""

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._event: Final = asyncio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self, when: int | None = None) -> None:
        """Until it rings, or the clock reaches a moment."""
        self._event.clear()
        loop = asyncio.get_running_loop()

        def ring() -> None:  # a clock for tests is set by another thread
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._event.set)

        try:
            async with asyncio.timeout(None if when is None else self._clock.alarm(when, ring)):
                await self._event.wait()
        except TimeoutError:
            pass


class Inbox(Generic[T]):
    """Messages that wait for the application: about `most` of them, and never more than twice as many."""

    def __init__(self, most: int, bell: Bell) -> None:
        self._most, self._bell = most, bell
        self._messages: Final[deque[T]] = deque()
        self._asked = False  # for a message, ever
        self.dropped = 0

    async def wait_for_room(self, in_a_hurry: Callable[[], object]) -> None:
        """Until the application has taken enough; unless nobody takes any, or something can't wait for that."""
        while len(self._messages) >= self._most and self._asked and not in_a_hurry():
            await self._bell.wait()

    def put(self, message: T) -> int:
        """Keep a message. If there are too many, the oldest gives way; how many have by now, or 0 if none has now."""
        full = len(self._messages) >= self._most * (2 if self._asked else 1)
        if full:
            self._messages.popleft()
            self.dropped += 1
        self._messages.append(message)
        self._bell.ring()
        return self.dropped if full else 0

    async def take(self, is_over: Callable[[], object]) -> T | None:
        """The oldest message; None if there is none and it is over."""
        self._asked = True
        while not self._messages:
            if is_over():
                return None
            await self._bell.wait()
        self._bell.ring()
        return self._messages.popleft()
