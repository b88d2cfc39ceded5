"""Registries for tests, in a database and in a real server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headgate import Gate
from headgate.hub.agents.registry import DatabaseAgents, Registry
from headgate.hub.storage.database import Database
from headgate.stores.redis.agents import RedisAgents
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.generation import RedisGeneration
from tests.support.valkey import PATIENCE


@asynccontextmanager
async def redis_registry(url: str, prefix: str, timeout: float = PATIENCE, **options: Any) -> AsyncIterator[Registry]:
    clients = Clients(url, timeout)
    registry = Registry(RedisAgents(clients, RedisGeneration(clients, prefix)), Gate(), **options)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.close()
        await clients.aclose()


@asynccontextmanager
async def database_registry(path: Path, **options: Any) -> AsyncIterator[Registry]:
    database = Database(path)
    registry = Registry(DatabaseAgents(database), Gate(), **options)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.close()
        database.close()


def revocations(registry: Registry) -> list[str]:
    """The agents whose tokens are revoked or replaced from now on, as the registry tells of them."""
    told: list[str] = []
    registry.on_revocation(told.append)
    return told
