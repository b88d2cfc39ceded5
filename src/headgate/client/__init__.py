"""Clients that obey rate limits: transports for httpx, and clients of a hub, of its relay and of its holds."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.client.connection import Disconnected
    from headgate.client.hold_flows import HoldDenied, HubUnavailable
    from headgate.client.holds import ClientHold, HoldClient, SyncClientHold, SyncHoldClient
    from headgate.client.http import AsyncObeyingTransport, ObeyingTransport, TooLong, WaitNotice
    from headgate.client.hub import HubClient, Warned
    from headgate.client.outbox import Denial, QueueFull, Refused, Unsent
    from headgate.client.relay import RelayClient, RelayMessage

__all__ = [
    "AsyncObeyingTransport",
    "ClientHold",
    "Denial",
    "Disconnected",
    "HoldClient",
    "HoldDenied",
    "HubClient",
    "HubUnavailable",
    "ObeyingTransport",
    "QueueFull",
    "Refused",
    "RelayClient",
    "RelayMessage",
    "SyncClientHold",
    "SyncHoldClient",
    "TooLong",
    "Unsent",
    "WaitNotice",
    "Warned",
]

_PLACES = {
    "connection": ("Disconnected",),
    "hold_flows": ("HoldDenied", "HubUnavailable"),
    "holds": ("ClientHold", "HoldClient", "SyncClientHold", "SyncHoldClient"),
    "http": ("AsyncObeyingTransport", "ObeyingTransport", "TooLong", "WaitNotice"),
    "hub": ("HubClient", "Warned"),
    "outbox": ("Denial", "QueueFull", "Refused", "Unsent"),
    "relay": ("RelayClient", "RelayMessage"),
}


def __getattr__(name: str) -> object:
    for module, names in _PLACES.items():
        if name in names:  # on demand: each needs another package
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
