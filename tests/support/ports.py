"""Ports on which nothing listens."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def held() -> socket.socket:
    """A socket that reserves a port: nothing listens there, and the system assigns it to no other until it is closed.

    A test may start a server on it: the socket is bound with SO_REUSEADDR.
    """
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    return one


@contextmanager
def nobody() -> Iterator[int]:
    """Such a port, until the block ends."""
    with held() as one:
        yield one.getsockname()[1]
