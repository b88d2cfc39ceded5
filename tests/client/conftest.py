"""Fixtures for the tests of clients."""

import pytest

from headgate.client import connection
from tests.support.valkey import PATIENCE


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow for slow machines: on a clock that stands still, the pause after a failed handshake would never end."""
    monkeypatch.setattr(connection, "_HANDSHAKE", PATIENCE)
