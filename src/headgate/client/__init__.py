"""Clients that obey rate limits: transports for httpx, and clients of a hub and of its relay."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.client.connection import Disconnected
    from headgate.client.http import AsyncObeyingTransport, ObeyingTransport, TooLong, WaitNotice
    from headgate.client.hub import HubClient, Warned
    from headgate.client.outbox import Denial, QueueFull, Refused, Unsent
    from headgate.client.relay import RelayClient, RelayMessage

__all__ = [
    "AsyncObeyingTransport",
    "Denial",
    "Disconnected",
    "HubClient",
    "ObeyingTransport",
    "QueueFull",
    "Refused",
    "RelayClient",
    "RelayMessage",
    "TooLong",
    "Unsent",
    "WaitNotice",
    "Warned",
]

_PLACES = {
    "connection": ("Disconnected",),
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
