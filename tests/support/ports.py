"""Ports on which nothing listens."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def reserve_port(port: int = 0) -> socket.socket:
    """A socket that reserves a free port: nothing listens there, and nobody else gets it until it is closed.

    A test may start a server on it: the socket is bound with SO_REUSEADDR.
    """
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        one.bind(("127.0.0.1", port))
    except BaseException:
        one.close()
        raise
    return one


def reserve_cluster_ports() -> tuple[socket.socket, socket.socket]:
    """A port, and the one 10,000 above it, on which a node of a cluster talks to the others."""
    while True:
        one = reserve_port()
        try:
            return one, reserve_port(one.getsockname()[1] + 10_000)
        except (OSError, OverflowError):  # it is taken, or there is none
            one.close()


@contextmanager
def unused_port() -> Iterator[int]:
    """Such a port, until the block ends."""
    with reserve_port() as one:
        yield one.getsockname()[1]
