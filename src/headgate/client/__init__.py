"""Callers that obey: clients of a hub and of its relay."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.client.holding import Denial, QueueFull, Refused, Unsent
    from headgate.client.hub import HubClient, Warned
    from headgate.client.relay import Message, RelayClient

__all__ = ["Denial", "HubClient", "Message", "QueueFull", "Refused", "RelayClient", "Unsent", "Warned"]

_PLACES = {
    "Denial": "holding",
    "HubClient": "hub",
    "Message": "relay",
    "QueueFull": "holding",
    "Refused": "holding",
    "RelayClient": "relay",
    "Unsent": "holding",
    "Warned": "hub",
}


def __getattr__(name: str) -> object:
    if name in _PLACES:  # when it is asked for: each needs a package of its own
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
