"""Commands in RESP, the protocol of the server: packed in C, if hiredis is installed."""

from typing import Any, Final

import redis.asyncio
from redis.connection import HiredisRespSerializer
from redis.utils import HIREDIS_AVAILABLE

if HIREDIS_AVAILABLE:
    from hiredis import pack_command

    _SERIALIZER: Final = HiredisRespSerializer()


def pack_in_c(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    """Let the connections of a client pack commands as those for threads do.

    In Python it would take more time than all else that the client does for a batch of holds.
    """
    if HIREDIS_AVAILABLE:
        pool = client.connection_pool
        kind = pool.connection_class
        pool.connection_class = type(kind.__name__, (kind,), {"pack_command": staticmethod(_packed)})
    return client


def send(connection: Any, command: list[Any]) -> None:
    """Send a command on a connection for threads."""
    if HIREDIS_AVAILABLE:
        connection.send_packed_command(_packed(*command))
    else:
        connection.send_command(*command)


def _packed(*words: Any) -> list[bytes]:
    """A command as it is sent. In calls of our script there is nothing to convert: redis-py would look at each word."""
    if words[0] == "EVALSHA":
        return [pack_command(words)]
    packed: list[bytes] = _SERIALIZER.pack(*words)
    return packed


def text_of(found: bytes | str) -> str:
    """An answer of a server as text, whether or not its client has decoded it."""
    return found if isinstance(found, str) else found.decode(errors="surrogateescape")
