"""Fixtures for the tests of edges."""

import pytest

from headgate import Limiter, ManualClock, MemoryStore


@pytest.fixture
def limiter(clock: ManualClock) -> Limiter:
    return Limiter("5/minute", store=MemoryStore(clock=clock), name="default")


@pytest.fixture
def free(clock: ManualClock) -> Limiter:
    """A limiter that lets everybody connect."""
    return Limiter("unlimited", store=MemoryStore(clock=clock))
