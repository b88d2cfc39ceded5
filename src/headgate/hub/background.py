"""Background tasks: work that runs to its end whether or not anybody awaits it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """Starts asyncio tasks, and references each until it is done: the event loop alone does not keep them alive."""

    def __init__(self) -> None:
        self._tasks: Final[set[asyncio.Task[Any]]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that is carried out to its end even if the caller is cancelled."""
        return await asyncio.shield(self.spawn(work))

    async def wait(self) -> None:
        """Wait until every task is done, including those started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel every task, and wait until it has ended.

        They are cancelled again if need be: `asyncio.wait_for` of Python 3.11, in redis-py, can lose a cancellation.
        """
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=1)
