"""Fixtures for the tests of hubs whose store is lost: each test has a server of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import HubServer
from tests.support.lost_store import hub_on
from tests.support.valkey import ValkeyServer


@pytest.fixture(autouse=True)
def _frequent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hubs notice a loss at once."""
    monkeypatch.setattr("headgate.hub.app._PROBE_INTERVAL", 0.05)


@pytest.fixture
def hub(own_server: ValkeyServer, tmp_path: Path) -> Iterator[HubServer]:
    with hub_on(own_server, tmp_path) as hub:
        yield hub
