"""Stores by URL: nothing or memory:// for this process's memory, or the URL of a server."""

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from headgate.errors import HeadgateError, InvalidInput, StoreAway, refuse
from headgate.stores.base import ClosableStore, ServerStore, Store
from headgate.stores.memory import MemoryStore
from headgate.stores.schemes import SCHEMES, scheme_of

_log = logging.getLogger("headgate")


def _memory(where: str, url: str, *, clock: Any = None, max_keys: Any = None, **_for_servers: Any) -> Store:
    if not is_memory(url):
        raise InvalidInput(f"{where}: expected memory:// and nothing after it, got a longer URL")
    return MemoryStore(clock=clock, max_keys=max_keys)


def _redis(where: str, at: Any, **settings: Any) -> Store:
    try:
        from headgate.stores.redis import RedisStore
    except ImportError as error:
        raise HeadgateError(
            f"{where}: expected redis-py for a store at a URL, got: {error}; in a checkout: pip install '.[redis]'"
        ) from error
    return RedisStore(at, **settings)


_FACTORIES: Final[Mapping[str, Callable[..., Store]]] = {"memory": _memory, "redis": _redis}
"""By the kind of a store: called with the argument's name, the URL, and the store's settings."""


def make_store(where: str, url: str, **settings: Any) -> Store:
    """The store at a URL, not connected yet. In memory, settings that are for servers alone are ignored."""
    return _FACTORIES[SCHEMES[scheme_of(url)]](where, url, **settings)


def client_store(where: str, client: object, **settings: Any) -> Store | None:
    """The store in the server of a client of `redis.asyncio`, which the caller closes; None if it is no such client."""
    redis = sys.modules.get("redis.asyncio")  # whoever has a client has imported it
    if redis is None or not isinstance(client, (redis.Redis, redis.RedisCluster)):
        return None
    return _redis(where, client, **settings)


def open_store(where: str, given: object, **settings: Any) -> Store:
    """The store of an argument. A server that can't be used is refused; one that is away may come back."""
    if given is None:
        return MemoryStore()
    if isinstance(given, str) and "://" in given:
        store = make_store(where, given, **settings)
        try:
            verify_store(store)
        except StoreAway as away:
            _log.error("%s: starting without the server: %s", where, away)
        return store
    if not isinstance(given, Store):
        refuse(where, "a store such as MemoryStore(), or a URL such as redis://localhost or memory://", given)
    return given


def server_store(where: str, url: str, **settings: Any) -> ServerStore:
    """The store in the server at a URL, to be verified and closed by the caller."""
    store = make_store(where, url, **settings)
    if not isinstance(store, ServerStore):
        refuse(where, "the URL of a server, such as redis://localhost", url)
    return store


def is_memory(given: object) -> bool:
    """Whether a URL means this process's memory."""
    return isinstance(given, str) and given.lower().removeprefix("async+") == "memory://"


def verify_store(store: Store) -> None:
    """Verify that the server of a store can be used, if it has one; a `StoreError` says why not."""
    if isinstance(store, ServerStore):
        store.verify()


async def averify_store(store: Store) -> None:
    """`verify_store` for an event loop."""
    if isinstance(store, ServerStore):
        await store.averify()


def close_store(store: Store) -> None:
    """Close a store that has something to close."""
    if isinstance(store, ClosableStore):
        store.close()


async def aclose_store(store: Store) -> None:
    """`close_store` for an event loop."""
    if isinstance(store, ClosableStore):
        await store.aclose()
