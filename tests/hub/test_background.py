"""Background tasks."""

import asyncio

from headgate.hub.background import BackgroundTasks


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    """As `asyncio.wait_for` of Python 3.11 does, if what it waits for is done in the same moment."""
    lost = 0

    async def work() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                lost += 1
                if lost > 1:
                    raise

    background = BackgroundTasks()
    task = background.spawn(work())
    await asyncio.sleep(0)
    await background.cancel()
    assert task.cancelled()
    assert lost == 2
