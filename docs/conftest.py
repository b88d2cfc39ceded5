"""Real servers for the examples: `url` is a Valkey server, `hub` a hub, and `admin` its admin token."""

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.hub import ADMIN, hub_server
from tests.support.valkey import ValkeyServer


@pytest.fixture(scope="session")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def hub() -> Iterator[str]:
    with capture_logs(), hub_server() as hub:  # logs would mix with the output of the examples
        yield str(hub)


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Start the servers that a page needs."""
    if request.node.name == "redis.md":
        doctest_namespace["url"] = request.getfixturevalue("server").url
    if request.node.name in ("hub-tutorial.md", "relay.md", "dashboard.md", "clients.md"):
        doctest_namespace |= {"hub": request.getfixturevalue("hub"), "admin": ADMIN}
