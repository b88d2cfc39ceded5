"""Real servers for the examples: in them `url` is a Valkey's address, `hub` a hub's, and `admin` its admin token."""

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.hub import ADMIN, running
from tests.support.valkey import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def hub() -> Iterator[str]:
    with capture_logs(), running() as hub:  # what it logs would stand between what the examples print
        yield str(hub)


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Start what a page needs."""
    if request.node.name == "redis.md":
        doctest_namespace["url"] = request.getfixturevalue("server").url
    if request.node.name in ("hub.md", "relay.md", "dashboard.md", "clients.md"):
        doctest_namespace |= {"hub": request.getfixturevalue("hub"), "admin": ADMIN}
