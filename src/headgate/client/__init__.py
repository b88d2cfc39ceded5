"""Clients that obey rate limits: transports for httpx, and clients of a hub and of its relay."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.client.http import AsyncObeyingTransport, ObeyingTransport, TooLong, WaitNotice
    from headgate.client.hub import HubClient, Warned
    from headgate.client.outbox import Denial, QueueFull, Refused, Unsent
    from headgate.client.relay import RelayClient, RelayMessage

__all__ = [
    "AsyncObeyingTransport",
    "Denial",
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
    "AsyncObeyingTransport": "http",
    "Denial": "outbox",
    "HubClient": "hub",
    "ObeyingTransport": "http",
    "QueueFull": "outbox",
    "Refused": "outbox",
    "RelayClient": "relay",
    "RelayMessage": "relay",
    "TooLong": "http",
    "Unsent": "outbox",
    "WaitNotice": "http",
    "Warned": "hub",
}


def __getattr__(name: str) -> object:
    if name in _PLACES:  # on demand: each needs another package
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
