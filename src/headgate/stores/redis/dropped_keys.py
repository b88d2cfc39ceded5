"""Drops all keys in a server that match patterns."""

from collections import Counter
from typing import Final

from headgate.stores.redis.client_urls import AsyncClient, Client
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.server_errors import server_errors

SCAN_COUNT: Final = 1000
"""Keys that one SCAN looks at."""


def drop_keys(clients: Clients, keys: Keys, patterns: list[bytes]) -> Counter[str]:
    """Drop the keys that match patterns, and count those of limits by the limiter's name."""
    dropped = Counter[str]()

    def drop(client: Client) -> None:
        for pattern in patterns:
            for key in client.scan_iter(match=pattern, count=SCAN_COUNT):
                if client.unlink(key):
                    dropped.update(keys.limiter_of(key))

    with server_errors():
        clients.call(drop, timeouts=None)
    return dropped


async def adrop_keys(clients: Clients, keys: Keys, patterns: list[bytes]) -> Counter[str]:
    """`drop_keys` in an event loop."""
    dropped = Counter[str]()

    async def drop(client: AsyncClient) -> None:
        for pattern in patterns:
            async for key in client.scan_iter(match=pattern, count=SCAN_COUNT):
                if await client.unlink(key):
                    dropped.update(keys.limiter_of(key))

    with server_errors():
        await clients.acall(drop, timeouts=None)
    return dropped
