"""A real server for the examples: in them `url` is its address."""

from collections.abc import Iterator
from typing import Any

import pytest
from servers import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(autouse=True)
def url(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Start it for the page that needs it."""
    if request.node.name == "redis.md":
        doctest_namespace["url"] = request.getfixturevalue("server").url
