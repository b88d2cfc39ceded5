"""What an edge knows of a request and its response, whichever protocol they came by."""

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, TypeAlias

from headgate.errors import InvalidInput, refuse
from headgate.gate.lookup import counted_as

Network: TypeAlias = IPv4Network | IPv6Network

UNIX: Final = "unix"
UNKNOWN: Final = "unknown"
"""The address of who has none, such as the peer at a Unix socket."""


class Request:
    """A request, as `key`, `cost`, `tier` and `exempt` are asked about it."""

    __slots__ = ("_address", "_proxies", "raw")

    def __init__(self, raw: Mapping[str, Any], proxies: "Proxies") -> None:
        self.raw: Final = raw
        """What the server handed over: the ASGI scope or the WSGI environ."""
        self._proxies: Final = proxies
        self._address: str | None = None

    @property
    def method(self) -> str:
        """The method in upper case; "WEBSOCKET" for a connection that asks to become one."""
        raise NotImplementedError

    @property
    def path(self) -> str:
        """The path, decoded, without the query."""
        raise NotImplementedError

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers by lower-case names; what was sent twice is joined by commas."""
        raise NotImplementedError

    def peer(self) -> str:
        """The address at the other end of the connection; "" for none."""
        raise NotImplementedError

    def forwarded(self) -> str:
        """The X-Forwarded-For header."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """Where the request comes from: the connection's other end, or what a named proxy says of it."""
        if self._address is None:
            peer = self.peer()
            self._address = self._proxies.client(peer, self.forwarded()) if self._proxies else peer or UNKNOWN
        return self._address


class AsgiHeaders(Mapping[str, str]):
    """Headers as ASGI has them, decoded when they are asked for: mostly it is for one."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._raw: Final = raw

    def __getitem__(self, name: str) -> str:
        wanted = name.encode("latin-1", "replace")
        found = [value for header, value in self._raw if header == wanted]
        if not found:
            raise KeyError(name)
        return b", ".join(found).decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.decode("latin-1") for name, _ in self._raw))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class AsgiRequest(Request):
    __slots__ = ()

    @property
    def method(self) -> str:
        method: str = self.raw.get("method", "WEBSOCKET")
        return method

    @property
    def path(self) -> str:
        path: str = self.raw["path"]
        return path

    @property
    def headers(self) -> Mapping[str, str]:
        return AsgiHeaders(self.raw["headers"])

    def peer(self) -> str:
        client = self.raw.get("client")
        return client[0] if client else ""

    def forwarded(self) -> str:
        return ",".join(value.decode("latin-1") for name, value in self.raw["headers"] if name == b"x-forwarded-for")


class WsgiRequest(Request):
    __slots__ = ()

    @property
    def method(self) -> str:
        method: str = self.raw["REQUEST_METHOD"]
        return method

    @property
    def path(self) -> str:
        path: str = self.raw.get("SCRIPT_NAME", "") + self.raw.get("PATH_INFO", "")
        return path.encode("latin-1").decode(errors="replace")

    @property
    def headers(self) -> Mapping[str, str]:
        named = {"CONTENT_TYPE": "content-type", "CONTENT_LENGTH": "content-length"}
        found = {name[5:].replace("_", "-").lower(): self.raw[name] for name in self.raw if name.startswith("HTTP_")}
        return found | {header: self.raw[name] for name, header in named.items() if self.raw.get(name)}

    def peer(self) -> str:
        peer: str = self.raw.get("REMOTE_ADDR", "")
        return peer

    def forwarded(self) -> str:
        forwarded: str = self.raw.get("HTTP_X_FORWARDED_FOR", "")
        return forwarded


class Response:
    """What is known of a response when it has been sent, as `settle` is asked about it."""

    __slots__ = ("headers", "status")

    def __init__(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.status: Final = status
        self.headers: Final = joined(headers)
        """The headers by lower-case names."""


def texts(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Headers as ASGI has them, decoded."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by lower-case names; what was sent twice is joined by commas."""
    found: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        found[lower] = f"{found[lower]}, {value}" if lower in found else value
    return found


class Proxies:
    """The proxies whose word on a client's address is taken: networks, and "unix" for peers at a Unix socket.

    Each adds the address that it was called from at the end of X-Forwarded-For. So that is read from its end: the first
    address that isn't a proxy's is the client's, and what stands before it may be anybody's invention.
    """

    def __init__(self, given: Iterable[str] = ()) -> None:
        if isinstance(given, str):
            given = [given]
        self._unix = False
        self._networks: list[Network] = []
        for one in given:
            if one == UNIX:
                self._unix = True
                continue
            try:
                self._networks.append(ip_network(str(one)))
            except ValueError:
                refuse("proxies", "addresses or networks such as '10.0.0.0/8', or 'unix'", one)

    def __bool__(self) -> bool:
        return self._unix or bool(self._networks)

    def client(self, peer: str, forwarded: str) -> str:
        """Who is behind a peer, by the X-Forwarded-For header that came with the request."""
        address = peer
        for hop in reversed(forwarded.split(",")):
            said = _host(hop.strip())
            if not said or not self._trusted(address):
                break
            address = said
        return address or UNKNOWN

    def _trusted(self, address: str) -> bool:
        if not address:
            return self._unix
        try:
            found = ip_address(address)
        except ValueError:
            return False
        if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:  # at a socket for both kinds
            found = found.ipv4_mapped
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


def address_key(address: str) -> str:
    """What an address counts under: an IPv6 address under its /64, what isn't an address under itself."""
    try:
        return counted_as(address)
    except InvalidInput:
        return address
