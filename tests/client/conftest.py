"""What all tests of the clients share."""

import pytest

from headgate.client import connection
from tests.support.valkey import PATIENCE


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine isn't a hub that doesn't answer: by a clock that stands still, the pause after that has no end."""
    monkeypatch.setattr(connection, "_HANDSHAKE", PATIENCE)
