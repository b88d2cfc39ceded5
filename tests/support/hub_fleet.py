"""Hubs that share a server, for tests of their alerts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from headgate import ManualClock, RedisStore
from tests.support.alerts import record_violations, wait_for_comparison
from tests.support.hub import HubServer, hub_server
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for
from tests.support.webhook_receiver import WebhookReceiver


class HubFleet:
    """Hubs that share a server, a clock and a receiver."""

    def __init__(self, server: ValkeyServer, receiver: WebhookReceiver) -> None:
        self.server, self.receiver = server, receiver
        self.clock = ManualClock(start=1000)
        self.prefix = f"fleet-{uuid4().hex}:"

    @contextmanager
    def hub(self, **settings: Any) -> Iterator[HubServer]:
        with (
            RedisStore(self.server.url, prefix=self.prefix, clock=self.clock, timeout=PATIENCE) as store,
            hub_server(store=store, webhooks=(self.receiver.url,), shutdown_within=PATIENCE, **settings) as hub,
        ):
            yield hub

    @contextmanager
    def two_with_an_alert(self) -> Iterator[tuple[HubServer, HubServer]]:
        """Two hubs that know of the planner's alert, which the first of them has raised."""
        with self.hub() as one, self.hub() as other:
            record_violations(one)
            wait_for(lambda: other.hub.alerts.open, "the alert on the other")
            wait_for_comparison(one, other)
            yield one, other

    @property
    def open(self) -> dict[str, Any]:
        """The open alerts in the server."""
        with self.server.client(decode_responses=True) as client:
            found: Any = client.hgetall(f"{self.prefix}{{alerts}}a1:open")
            return {agent: json.loads(text) for agent, text in found.items()}


def wait_until_resolved(*hubs: HubServer) -> None:
    """Wait until no hub has an open alert."""
    wait_for(lambda: not any(hub.hub.alerts.open for hub in hubs), "the end of the alerts")
