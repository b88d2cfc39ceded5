"""Settings and fixtures for all tests."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from elsewhere import Elsewhere
from hypothesis import HealthCheck, settings

from headgate import Gate, ManualClock, MemoryStore, Policy

# Decisions are exact whatever the speed of the machine: no deadline for an example.
settings.register_profile("headgate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("headgate"), max_examples=3000)
settings.load_profile("headgate")


@pytest.fixture(params=[MemoryStore, Elsewhere], ids=["memory", "elsewhere"])
def store(request: pytest.FixtureRequest) -> Any:
    """A store on a clock that stands still."""
    return request.param(clock=ManualClock(start=1000))


@pytest.fixture
def clock(store: Any) -> ManualClock:
    return store.clock  # type: ignore[no-any-return]


@pytest.fixture
def gate(store: Any) -> Gate:
    return Gate(Policy(), store=store)


@pytest.fixture(params=["", "a"], ids=["sync", "async"])
def verb(request: pytest.FixtureRequest) -> Callable[[Any, str], Callable[..., Any]]:
    """A verb of a limiter, gate or session: itself, or its async twin run in a loop."""

    def find(thing: Any, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(thing, request.param + name)
        if not request.param:
            return method

        async def run(*args: Any, **options: Any) -> Any:
            return await method(*args, **options)

        return lambda *args, **options: asyncio.run(run(*args, **options))

    return find
