"""Fixtures for the tests of the store in Redis: one server for a file, empty at the start of each test."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import ManualClock
from headgate.stores.redis import RedisStore, fallback
from tests.support.restarts import Restarts
from tests.support.valkey import PATIENCE, ValkeyServer, cluster


@pytest.fixture(scope="module")
def masters() -> Iterator[list[ValkeyServer]]:
    with cluster() as nodes:
        yield nodes


@pytest.fixture
def server(server: ValkeyServer) -> ValkeyServer:
    """The server of the file, empty."""
    with server.client() as client:
        client.flushall()
    return server


@pytest.fixture
def raw(server: ValkeyServer) -> Iterator[Any]:
    """A plain client of the empty server."""
    with server.client() as client:
        client.config_resetstat()
        yield client


@pytest.fixture
def store(server: ValkeyServer) -> Iterator[RedisStore]:
    """A store on the server's clock."""
    with RedisStore(server.url, timeout=PATIENCE) as store:
        yield store


@pytest.fixture
def still(server: ValkeyServer, clock: ManualClock) -> Iterator[RedisStore]:
    """A store on a clock that stands still at 1,000 s."""
    with RedisStore(server.url, timeout=PATIENCE, clock=clock) as store:
        yield store


@pytest.fixture(params=["threads", "tasks"])
def kind(request: pytest.FixtureRequest) -> str:
    """Who asks."""
    return str(request.param)


@pytest.fixture
def breaker_clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """By which stores decide when to try a server again that was away."""
    clock = ManualClock(start=1000)
    monkeypatch.setattr(fallback, "time", SimpleNamespace(monotonic=lambda: clock.now() / 1_000_000))
    return clock


@pytest.fixture
def _leave_nothing_open() -> Iterator[None]:
    """What a test has left open is found while it is still to blame."""
    yield
    gc.collect()


@pytest.fixture
def restarts(tmp_path: Path) -> Iterator[Restarts]:
    """A file of limits, and the processes that use it one after another."""
    made = Restarts(tmp_path / "limits.db")
    yield made
    made.close()
