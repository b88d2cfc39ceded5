"""Fixtures for the tests of holds of accounts: a gate on a clock that knows the date."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from headgate import Gate, ManualClock, MemoryStore
from headgate.stores.base import Store
from headgate.stores.redis import RedisStore
from tests.support.account_gate import gate_on
from tests.support.calendar_clock import calendar_clock
from tests.support.valkey import PATIENCE, ValkeyServer


@pytest.fixture
def clock() -> ManualClock:
    return calendar_clock()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore(clock=clock)
    else:
        server: ValkeyServer = request.getfixturevalue("redis_server")
        with RedisStore(server.url, prefix=f"{uuid4().hex}:", timeout=PATIENCE, clock=clock) as made:
            yield made


@pytest.fixture
def gate(store: Store) -> Gate:
    return gate_on(store)
