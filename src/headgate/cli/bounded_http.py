"""HTTP requests that are bounded in time as a whole, on top of urllib, whose timeout begins anew with every read."""

import socket
import time
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from typing import Any, Final
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)


def bounded_opener(*, proxies: bool) -> OpenerDirector:
    """An opener whose timeout bounds a request from the connection to the last byte of the answer.

    It follows no redirect, which would carry a token elsewhere. `proxies`: use those of the environment.
    """
    return build_opener(_NoRedirects(), _Handler(), _TlsHandler(), *([] if proxies else [ProxyHandler({})]))


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._end: Final = time.monotonic() + seconds

    def left(self) -> float:
        """The seconds left; `TimeoutError` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _SocketReader(RawIOBase):
    """The bytes of a socket, up to a deadline."""

    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock, self._deadline = sock, deadline
        self._file: Final[Any] = sock.makefile("rb", buffering=0)  # keeps the socket open until it is closed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        count: int | None = self._file.readinto(buffer)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, deadline: _Deadline, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.fp = BufferedReader(_SocketReader(sock, deadline))


class _BoundedConnection(HTTPConnection):
    """A connection for one request. The deadline is its timeout, from now on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: Final = _Deadline(self.timeout or 0)
        self.response_class = partial(_Response, deadline=self._deadline)  # type: ignore[assignment]
        self._create_connection = self._connect

    def _connect(self, address: tuple[str, int], *_: object) -> socket.socket:
        """Try each address of a host. What is left of the time is for the next one, and then for TLS."""
        error: OSError = ConnectionError(f"no address for {address[0]}")
        for family, kind, protocol, _name, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self._deadline.left())
                sock.connect(place)
                sock.settimeout(self._deadline.left())
            except OSError as problem:
                sock.close()
                error = problem
            else:
                return sock
        raise error


class _TlsConnection(_BoundedConnection, HTTPSConnection):
    pass


class _Handler(HTTPHandler):
    def http_open(self, request: Request) -> Any:
        return self.do_open(_BoundedConnection, request)


class _TlsHandler(HTTPSHandler):
    def https_open(self, request: Request) -> Any:
        return self.do_open(_TlsConnection, request, context=self._context)  # type: ignore[attr-defined]
