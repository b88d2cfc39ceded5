"""A book of changes in Redis, for many nodes: each hears of what another has written."""

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, Final

from headgate.errors import StoreAway
from headgate.lifecycle import after_fork
from headgate.stores.base import Change
from headgate.stores.redis.clients import ERRORS, Clients, describe_error
from headgate.stores.redis.script import part

_WRITE: Final = part("changelog.lua")
_LISTEN: Final = 0.1  # seconds that one look for news takes at most; closing waits for it
_AGAIN: Final = 0.25  # seconds until a lost connection is tried again
_FIELDS: Final = {field.name for field in fields(Change)}

_log = logging.getLogger("headgate")


class RedisChangeLog:
    """Remembers changes in a list that has no expiry, under a prefix of its own.

    Whoever follows it hears of every change by pub/sub; after a lost connection everything is read again.
    """

    def __init__(self, clients: Clients, prefix: str) -> None:
        self._clients: Final = clients
        self._key: Final = f"{prefix.rstrip(':')}-admin:changes"
        self._follower: _Follower | None = None

    def read(self) -> list[Change]:
        try:
            rows: Any = self._clients.client().lrange(self._key, 0, -1)
        except ERRORS as error:
            raise StoreAway(f"the changes can't be read: {describe_error(error)}") from error
        return [_change(row) for row in rows]

    def write(self, change: Change) -> None:
        text = json.dumps(asdict(change), ensure_ascii=False)
        try:
            self._clients.client().eval(_WRITE, 1, self._key, text, self._key)
        except ERRORS as error:
            raise StoreAway(f"the change is not made, it can't be remembered: {describe_error(error)}") from error

    def follow(self, news: Callable[[], None]) -> None:
        """Call `news` from a thread of its own whenever the book may have changed, until it is closed.

        A process that is forked follows with a thread of its own, too.
        """
        self._news = news
        self._follower = _Follower(self._clients, self._key, news)
        self._follower.start()
        after_fork(self)  # after whoever hears the news: the thread of a process that is forked calls it at once

    def _after_fork(self) -> None:
        if self._follower is not None:
            self.follow(self._news)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None


class _Follower(threading.Thread):
    def __init__(self, clients: Clients, channel: str, news: Callable[[], None]) -> None:
        super().__init__(name="headgate-changes", daemon=True)
        self._clients = clients
        self._channel = channel
        self._news = news
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._listen()
            except (*ERRORS, StoreAway) as error:
                _log.debug("changes made elsewhere can't be heard: %s", describe_error(error))
                self._stopped.wait(_AGAIN)
            except Exception:  # noqa: BLE001 - whatever it is, the thread lives on
                _log.exception("a change made elsewhere could not be taken over")
                self._stopped.wait(_AGAIN)

    def _listen(self) -> None:
        with self._clients.client().pubsub(ignore_subscribe_messages=True) as channel:  # type: ignore[no-untyped-call]
            channel.subscribe(self._channel)
            channel.get_message(timeout=_LISTEN)
            self._news()  # what was missed until now
            while not self._stopped.is_set():
                if channel.get_message(timeout=_LISTEN) is not None:
                    self._news()


def _change(row: bytes | str) -> Change:
    """A change as it was written; what a later version has added to it is left out."""
    return Change(**{name: value for name, value in json.loads(row).items() if name in _FIELDS})
