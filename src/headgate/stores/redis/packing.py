"""Commands as they are sent: packed in C, if hiredis is installed."""

from collections.abc import Sequence
from typing import Any, Final

from redis.connection import HiredisRespSerializer
from redis.utils import HIREDIS_AVAILABLE

if HIREDIS_AVAILABLE:
    from hiredis import pack_command

_SCRIPT_CALLS: Final = ("EVALSHA", "EVAL")


def pack_words(*words: Any) -> list[bytes]:
    """A command as hiredis packs it. Calls of our script are bytes already: redis-py would look at each word first."""
    if words[0] in _SCRIPT_CALLS:
        return [pack_command(words)]
    packed: list[bytes] = HiredisRespSerializer().pack(*words)
    return packed


def send(connection: Any, command: Sequence[Any]) -> None:
    """Send a command on a connection of redis-py for threads."""
    if HIREDIS_AVAILABLE:
        connection.send_packed_command(pack_words(*command))
    else:
        connection.send_command(*command)
