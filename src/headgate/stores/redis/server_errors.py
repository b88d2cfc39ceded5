"""Errors of a server, or on the way to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import redis
from redis.exceptions import ChildDeadlockedError, ReadOnlyError, RedisClusterException, RedisError

from headgate.errors import HeadgateError, StoreAway

ERRORS: Final = (RedisError, RedisClusterException, ChildDeadlockedError, OSError)
"""Errors of a server, or on the way to it."""

FAULTS: Final = (
    *ERRORS,
    HeadgateError,
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError),
)
"""All that a call to a server may raise: the errors of the server, and of mistakes in a program.

Any other exception is somebody else's: that of a signal handler, or of gevent. It ends the call and is passed on.
"""

STALE_CLIENT: Final = (ReadOnlyError, RedisClusterException)
"""The client knows no master, or one that no longer is one."""

_CLOSED_BY_UVLOOP: Final = "the handler is closed"  # the end of its RuntimeError for a connection closed meanwhile


def describe_error(error: BaseException) -> str:
    """An error of redis-py in a few words, without secrets."""
    return f"{type(error).__name__}: {str(error) or 'no answer in time'}"[:300]


@contextmanager
def server_errors(failure: str = "") -> Iterator[None]:
    """Raise `StoreAway` for an error of redis-py: what can't be done because of it, and the error."""
    try:
        yield
    except ERRORS as error:
        reason = describe_error(error)
        raise StoreAway(f"{failure}: {reason}" if failure else reason) from error


def lost_connection(error: RuntimeError) -> redis.ConnectionError:
    """uvloop's error for a connection that was closed meanwhile, as one of redis-py's; any other is raised again."""
    if not str(error).endswith(_CLOSED_BY_UVLOOP):
        raise error
    return redis.ConnectionError(str(error))
