"""Stores by what users name them with: nothing or memory:// for this process's memory, or the URL of a server.

The URLs are those that `limits` and `throttled-py` know, with `async+` before them or without: every store here serves
threads and event loops alike.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headgate.errors import HeadgateError, InvalidInput, StoreAway, refuse
from headgate.stores.base import Store
from headgate.stores.memory import MemoryStore

_ELSEWHERE: Final = ("memcached", "mongodb", "mongodb+srv", "etcd")
_log = logging.getLogger("headgate")


def close_store(store: Store) -> None:
    """Close a store that has something to close."""
    close: Callable[[], None] | None = getattr(store, "close", None)
    if close is not None:
        close()


async def aclose_store(store: Store) -> None:
    """`close_store` for an event loop."""
    aclose: Callable[[], Awaitable[None]] | None = getattr(store, "aclose", None)
    if aclose is not None:
        await aclose()


def is_memory(given: object) -> bool:
    """Whether somebody means this process's memory by a URL."""
    return isinstance(given, str) and given.lower().removeprefix("async+") == "memory://"


def open_store(where: str, given: object, **settings: Any) -> Store:
    """The store that somebody means. A server that can't be used is refused; one that is away may come back."""
    if given is None or is_memory(given):
        return MemoryStore()
    if isinstance(given, str) and "://" in given:
        scheme = given.partition("://")[0].lower().removeprefix("async+")
        if scheme in _ELSEWHERE:
            raise InvalidInput(
                f"{where}: expected a store in memory (None or memory://) or in Redis or Valkey (redis://localhost, or "
                f"another form that docs/redis.md names), got {scheme}://, which headgate has no store for"
            )
        try:
            from headgate.stores.redis import RedisStore
        except ImportError as error:
            raise HeadgateError(
                f"{where}: expected redis-py for a store at a URL, got: {error}; pip install 'headgate[redis]'"
            ) from error
        store = RedisStore(given, **settings)
        try:
            store.verify()
        except StoreAway as away:
            _log.error("%s: starting without the server: %s", where, away)
        return store
    if not callable(getattr(given, "apply", None)):
        refuse(where, "a store such as MemoryStore(), or a URL such as redis://localhost or memory://", given)
    return given  # type: ignore[return-value]
