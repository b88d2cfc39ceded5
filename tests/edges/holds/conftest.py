"""Fixtures for the tests of slots at the edges."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from headgate import Limiter, ManualClock, MemoryStore, RedisStore
from tests.support.edge_holds import SLOTS
from tests.support.valkey import PATIENCE
from tests.support.wrapped_store import WrappedHoldStore


@pytest.fixture(params=[MemoryStore, WrappedHoldStore, pytest.param(RedisStore, marks=pytest.mark.long)])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Any]:
    """In memory, behind a store that is awaited, and on a server."""
    if request.param is RedisStore:
        url = request.getfixturevalue("redis_server").url
        with RedisStore(url, prefix=f"{uuid4().hex}:", clock=clock, timeout=PATIENCE) as store:
            yield store
    else:
        yield request.param(clock=clock)


@pytest.fixture
def slots(store: Any) -> Limiter:
    return Limiter(f"{SLOTS} in flight", store=store, name="default")


@pytest.fixture
def memory_slots(clock: ManualClock) -> Limiter:
    return Limiter(f"{SLOTS} in flight", store=MemoryStore(clock=clock), name="default")
