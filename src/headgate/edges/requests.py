"""Requests and responses, as an edge sees them in any protocol."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from ipaddress import ip_address, ip_network
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from headgate.edges.paths import RequestPath
from headgate.errors import InvalidInput, refuse
from headgate.gate.lookup import parse_address
from headgate.gate.policy import Network

Scope: TypeAlias = Any  # mappings; frameworks have types of their own for them
Message: TypeAlias = Any
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

UNIX: Final = "unix"
UNKNOWN: Final = "unknown"
"""The address of a peer without one, as at a Unix socket."""


class HttpRequest(ABC):
    """A request, as the functions `key`, `cost`, `tier` and `exempt` get it."""

    __slots__ = ("_address", "_proxies", "raw")

    def __init__(self, raw: MutableMapping[str, Any], proxies: "Proxies") -> None:
        self.raw: Final = raw
        """The ASGI scope or the WSGI environ."""
        self._proxies: Final = proxies
        self._address: str | None = None

    @property
    @abstractmethod
    def method(self) -> str:
        """The method in upper case; "WEBSOCKET" for a WebSocket connect."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The path, decoded, without the query."""

    @abstractmethod
    def route_path(self) -> RequestPath:
        """The path, as patterns need it."""

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]:
        """The headers by name, in any case; repeated ones are joined by commas."""

    @property
    def is_preflight(self) -> bool:
        """Whether a browser asks if it may send another request (CORS)."""
        if self.method != "OPTIONS":
            return False
        headers = self.headers
        return "origin" in headers and "access-control-request-method" in headers

    @abstractmethod
    def peer(self) -> str:
        """The address at the other end of the connection; "" for none."""

    @abstractmethod
    def forwarded(self) -> str:
        """The X-Forwarded-For header."""

    @property
    def address(self) -> str:
        """The client's address: the other end of the connection, or the address that a trusted proxy names."""
        if self._address is None:
            peer = self.peer()
            self._address = self._proxies.client(peer, self.forwarded()) if self._proxies else peer or UNKNOWN
        return self._address


class Headers(Mapping[str, str]):
    """Headers by name, in any case. The names are listed in lower case, and repeated headers are joined by commas."""

    __slots__ = ("_values",)

    def __init__(self, headers: Iterable[tuple[str, str]]) -> None:
        self._values: Final[dict[str, str]] = {}
        repeated: dict[str, list[str]] = {}  # joined at the end: one by one would take the square of their number
        for name, value in headers:
            lower = name.lower()
            if lower in self._values:
                repeated.setdefault(lower, [self._values[lower]]).append(value)
            else:
                self._values[lower] = value
        for lower, values in repeated.items():
            self._values[lower] = ", ".join(values)

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class AsgiHeaders(Mapping[str, str]):
    """The same for headers of ASGI, decoded on demand: mostly only one is needed."""

    __slots__ = ("_all", "_raw")

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._raw: Final = raw
        self._all: Headers | None = None  # once somebody has listed them, and will look up each

    def __getitem__(self, name: str) -> str:
        if self._all is not None:
            return self._all[name]
        wanted = name.lower().encode("latin-1", "replace")
        found = [value for header, value in self._raw if header.lower() == wanted]
        if not found:
            raise KeyError(name)
        return b", ".join(found).decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        if self._all is None:
            self._all = Headers(decode_headers(self._raw))
        return iter(self._all)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class AsgiRequest(HttpRequest):
    __slots__ = ()

    @property
    def method(self) -> str:
        if self.raw["type"] == "websocket":
            return "WEBSOCKET"
        method: str = self.raw["method"].upper()  # not every server does that, and some frameworks do
        return method if method != "WEBSOCKET" else "websocket"  # no connect: patterns for these don't mean it

    @property
    def path(self) -> str:
        path: str = self.raw["path"]
        return path

    def route_path(self) -> RequestPath:
        raw: bytes = self.raw.get("raw_path") or b""
        sent = unquote(raw.partition(b"?")[0].decode("latin-1"))
        # Parameters may be those of a prefix, as in `Mount("/{tenant}")`, or of a host or an inner route.
        return RequestPath(self.path, self.raw.get("root_path") or "", sent, bool(self.raw.get("path_params")))

    @property
    def headers(self) -> Mapping[str, str]:
        return AsgiHeaders(self.raw["headers"])

    def peer(self) -> str:
        client = self.raw.get("client")
        return client[0] if client else ""

    def forwarded(self) -> str:
        return ",".join(value.decode("latin-1") for name, value in self.raw["headers"] if name == b"x-forwarded-for")


class WsgiRequest(HttpRequest):
    __slots__ = ()

    @property
    def method(self) -> str:
        method: str = self.raw["REQUEST_METHOD"]
        return method.upper()

    @property
    def path(self) -> str:
        return self._decode("SCRIPT_NAME") + self._decode("PATH_INFO")

    def route_path(self) -> RequestPath:
        return RequestPath(self.path, self._decode("SCRIPT_NAME"))

    def _decode(self, name: str) -> str:
        value: str = self.raw.get(name, "")
        return value.encode("latin-1").decode(errors="replace")

    @property
    def headers(self) -> Mapping[str, str]:
        found = [(name[5:], self.raw[name]) for name in self.raw if name.startswith("HTTP_")]
        found += [(name, self.raw[name]) for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if self.raw.get(name)]
        return Headers((name.replace("_", "-"), value) for name, value in found)

    def peer(self) -> str:
        peer: str = self.raw.get("REMOTE_ADDR", "")
        return peer

    def forwarded(self) -> str:
        forwarded: str = self.raw.get("HTTP_X_FORWARDED_FOR", "")
        return forwarded


class HttpResponse:
    """A response that has ended, as the function `settle` gets it."""

    __slots__ = ("headers", "status")

    def __init__(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.status: Final = status
        self.headers: Final = Headers(headers)
        """The headers by name, in any case; repeated ones are joined by commas."""


def decode_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Headers of ASGI as text."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


class Proxies:
    """The trusted proxies: networks, and "unix" for peers at a Unix socket.

    Each proxy appends the address that it was called from to X-Forwarded-For. So the header is read from its end: the
    first address that isn't a proxy's is the client's, and anything before it may be forged.
    """

    def __init__(self, given: Iterable[str] = ()) -> None:
        expected = "addresses or networks such as '10.0.0.0/8', or 'unix'"
        if isinstance(given, str):
            given = [given]
        if not isinstance(given, Iterable):
            refuse("proxies", expected, given)
        self._unix = False
        self._networks: list[Network] = []
        for one in given:
            if one == UNIX:
                self._unix = True
                continue
            try:
                self._networks.append(ip_network(str(one)))
            except ValueError:
                refuse("proxies", expected, one)

    def __bool__(self) -> bool:
        return self._unix or bool(self._networks)

    def client(self, peer: str, forwarded: str) -> str:
        """The client behind a peer, by the X-Forwarded-For header of the request."""
        address = peer
        for hop in reversed(forwarded.split(",")):
            client = _host(hop.strip())
            if not client or not self._trusted(address):
                break
            address = client
        return address or UNKNOWN

    def _trusted(self, address: str) -> bool:
        if not address:
            return self._unix
        try:
            found = parse_address(address)
        except InvalidInput:
            return False
        return any(found in network for network in self._networks)


def _host(hop: str) -> str:
    """The address in an entry of X-Forwarded-For, which may have a port; "" if there is none."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ip_address(hop))
    except ValueError:
        return ""
