"""Coroutines of tests, with deadlines."""

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.support.valkey import PATIENCE

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test in a loop of its own, with a timeout."""

    async def main() -> T:
        async with asyncio.timeout(5 * PATIENCE):
            return await work

    return asyncio.run(main())


async def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Poll until a condition holds. It may be a coroutine function."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = condition()
        if await found if inspect.isawaitable(found) else found:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {PATIENCE} s")
        await asyncio.sleep(0.0005)


async def take_turns(count: int) -> None:
    """Let the loop take so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def holds_for_turns(condition: Callable[[], object], turns: int = 60) -> bool:
    """Whether something still holds after several turns of the loop."""
    for _ in range(turns):
        if not condition():
            return False
        await asyncio.sleep(0.0005)
    return True
