"""A plugin of pytest that has `limits`' own tests use headgate's storages.

Where they ask for its storage in memory or in one Redis server they get ours. Its other storages are left out, and so
are tests that use no storage.
"""

import os
from typing import Any

import pytest
import redis

from headgate.edges.limits_storage import AsyncHeadgateStorage, HeadgateStorage

SERVER = os.environ["HEADGATE_TEST_SERVER"]
PATIENCE = 60.0  # seconds: a server on a busy machine isn't away
OURS = {"in-memory": "headgate-memory", "redis": "headgate-redis", "redis_basic": "headgate-redis"}

client = redis.Redis.from_url(SERVER)


def pytest_runtest_setup() -> None:
    client.flushall()  # as the suite's own fixtures do


def pytest_unconfigure() -> None:
    client.close()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize = metafunc.parametrize

    def with_ours(names: Any, values: Any, *rest: Any, **options: Any) -> None:
        if isinstance(names, str) and names.startswith("uri, args") and names.endswith("fixture"):
            values = [ours(value) for value in values if value.id in OURS]
        parametrize(names, values, *rest, **options)

    metafunc.parametrize = with_ours  # type: ignore[assignment, method-assign]


def ours(value: Any) -> Any:
    """Our parameter for one of the suite's: a URL, options, where it is asked for the class expected, and a client."""
    asynchronous, kind = value.values[0].startswith("async+"), OURS[value.id]
    in_memory = kind == "headgate-memory"
    url = f"{'async+' if asynchronous else ''}headgate+{'memory://' if in_memory else SERVER}"
    options = {} if in_memory else {"timeout": PATIENCE}
    expected = [AsyncHeadgateStorage if asynchronous else HeadgateStorage] if len(value.values) == 4 else []
    return pytest.param(url, options, *expected, None if in_memory else client, id=kind)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if "headgate-" not in item.name]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if "headgate-" in item.name]
