"""What the laws of stores have in common: stores in memory, and in a server."""

from collections import deque
from collections.abc import Iterator
from uuid import uuid4

import pytest

from headgate import ManualClock, MemoryStore, RedisStore
from headgate.stores.base import Store
from headgate.stores.harness import MakeStore
from tests.support.valkey import PATIENCE, ValkeyServer


@pytest.fixture(scope="module", params=["memory", pytest.param("redis", marks=[pytest.mark.long, pytest.mark.once])])
def make(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Makes a store. Of those in a server the last two are in use."""
    if request.param == "memory":
        yield lambda clock: MemoryStore(clock=clock)
        return
    server: ValkeyServer = request.getfixturevalue("redis_server")
    made: deque[RedisStore] = deque()

    def make_one(clock: ManualClock) -> Store:
        made.append(RedisStore(server.url, prefix=f"{uuid4().hex}:", clock=clock, timeout=PATIENCE))
        if len(made) > 2:
            made.popleft().close()
        return made[-1]

    yield make_one
    for store in made:
        store.close()
