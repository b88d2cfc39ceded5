"""Fixtures of the hub's tests. The hub is never compiled, so its tests run once, against the wheel."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.hub_fleet import HubFleet
from tests.support.log_level import log_level as log_level
from tests.support.scheduler import SchedulerHarness, open_harness
from tests.support.tenant import Tenant, open_tenant
from tests.support.valkey import PATIENCE, ValkeyServer
from tests.support.webhook_receiver import WebhookReceiver

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.once)


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        for spelled in (name, name.upper()):
            monkeypatch.delenv(spelled, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database of a hub may be."""
    return tmp_path / "hub.db"


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    """The lines logged during the test."""
    with capture_logs() as lines:
        yield lines


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give receivers of webhooks enough time on a slow machine."""
    monkeypatch.setattr("headgate.hub.monitoring.webhooks._TIMEOUT", PATIENCE)


@pytest.fixture
def receiver(patient: None) -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as receiver:
        yield receiver


@pytest.fixture
def fleet(redis_server: ValkeyServer, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch) -> HubFleet:
    """Hubs that share a server, and compare their alerts with it all the time."""
    monkeypatch.setattr("headgate.hub.monitoring.alert_base._INTERVAL", 0.02)
    return HubFleet(redis_server, receiver)


@pytest.fixture(params=[False, True], ids=["at once", "later"])
def elsewhere(request: pytest.FixtureRequest) -> bool:
    """Whether the scheduler's gate has to wait for its store."""
    answer: bool = request.param
    return answer


@pytest.fixture
def harness(elsewhere: bool, runner: asyncio.Runner) -> Iterator[SchedulerHarness]:
    """A scheduler over a database in memory."""
    opened = open_harness(elsewhere=elsewhere)
    yield runner.run(opened.__aenter__())
    runner.run(opened.__aexit__(None, None, None))


@pytest.fixture
def tenant() -> Iterator[Tenant]:
    with open_tenant() as tenant:
        yield tenant
