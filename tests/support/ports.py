"""Ports at which nobody is."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def held() -> socket.socket:
    """A port that nobody listens on, and that the system gives to nobody else until this is closed.

    A test may let a server listen there: it is bound such that those who name it can have it too.
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
