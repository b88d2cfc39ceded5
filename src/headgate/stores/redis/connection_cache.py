"""Connections that threads keep from one call to the next."""

import time
from typing import Any, Final

import redis
from redis.exceptions import ResponseError

from headgate.stores.redis.bounded_calls import BoundedCalls
from headgate.stores.redis.resp import send

_TRUSTED_FOR: Final = 0.02  # seconds for which a connection that has just worked isn't looked at


class ConnectionCache:
    """Connections of one client that threads use one after the other, without the way through its pool each time.

    One that was idle is looked at first: if the server has closed it, another is opened before anything is sent.
    Connecting may take many steps, so it is made in a thread of its own: a call takes no longer than `timeout`.
    """

    def __init__(self, client: redis.Redis, timeout: float, bounded: BoundedCalls) -> None:
        self.client: Final = client  # which closes its connections when it is gone
        self._pool: Final = client.connection_pool
        self._timeout: Final = timeout
        self._bounded: Final = bounded
        self._idle: Final[list[tuple[Any, float]]] = []

    def call(self, command: list[Any]) -> Any:
        while self._idle:
            try:
                connection, used = self._idle.pop()
            except IndexError:  # another thread was quicker
                break
            if time.monotonic() - used <= _TRUSTED_FOR or not _is_closed(connection):
                return self._send(connection, command)
            self._release(connection)
        deadline = time.monotonic() + self._timeout
        return self._bounded.call(lambda: self._connect_and_send(command, deadline), self._timeout)

    def _connect_and_send(self, command: list[Any], deadline: float) -> Any:
        connection = self._pool.get_connection()  # which asks the Sentinels anew, where there are some
        if time.monotonic() > deadline:  # nobody waits for the reply any more
            self._idle.append((connection, time.monotonic()))
            raise redis.TimeoutError("no connection in time")
        return self._send(connection, command)

    def _send(self, connection: Any, command: list[Any]) -> Any:
        try:
            send(connection, command)
            reply = connection.read_response()
        except ResponseError:  # the server has answered
            self._idle.append((connection, time.monotonic()))
            raise
        except BaseException:
            self._release(connection)
            raise
        self._idle.append((connection, time.monotonic()))
        return reply

    def _release(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)

    def close(self) -> None:
        while self._idle:
            connection, _ = self._idle.pop()
            self._release(connection)


def _is_closed(connection: Any) -> bool:
    try:
        return bool(connection.can_read(timeout=0))
    except (redis.RedisError, OSError):
        return True
