"""Requests that other web sites make through somebody's browser.

A browser lets any page send requests to the hub, with two marks that the page can't change: `Host` names the host that
the page asked for, `Origin` the site of the page. Two attacks are refused by them:

- DNS rebinding: a page's own host name is pointed at the hub, so that the page may read the hub's answers. `Host` then
  has that name, which the hub doesn't know.
- Cross-site requests: a page sends a form or opens a WebSocket. `Origin` then isn't the hub.

Programs send no `Origin`, and are not concerned.
"""

from collections.abc import Collection, Iterable
from ipaddress import ip_address
from typing import Final

import structlog

from headgate.hub.errors import RequestError

ANY_HOST: Final = "*"
_MAX_LOGGED: Final = 10  # unknown hosts

_log = structlog.get_logger("headgate.hub")


class AllowedHosts:
    """The hosts that the hub is reached as: IP addresses and loopback names, and those that the operator lists.

    An IP address is safe: no name server can point it elsewhere. `*.example.org` lists all hosts below example.org, and
    `*` any host and any origin.
    """

    def __init__(self, listed: Collection[str]) -> None:
        self._listed: Final = frozenset(host for host in listed if not host.startswith("*."))
        self._logged: Final[set[str]] = set()
        self._suffixes: Final = tuple(host[1:] for host in listed if host.startswith("*."))

    def check_host(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a request to a host that the hub doesn't know."""
        for name, value in headers:
            if name == b"host" and not self._is_known(host := _host(value)):
                self._log_once(host)
                detail = f"Host: expected a host that the hub knows, got {host!r:.200}; list it with --allowed-hosts"
                raise RequestError(421, "unknown_host", detail)

    def _log_once(self, host: str) -> None:
        """Tell the operator, who may have forgotten to list the host."""
        if host not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(host)
            _log.warning("requests to an unknown host are refused; list it with --allowed-hosts", host=host[:200])

    def check_origin(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a request made by a page of another site."""
        given = dict(headers)
        origin = given.get(b"origin")
        if origin is None:
            foreign = given.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        else:
            authority = origin.partition(b"://")[2]
            foreign = authority != given.get(b"host") and not self._is_listed(_host(authority))
        if foreign:
            site = "another site" if origin is None else repr(origin.decode("latin-1"))
            detail = f"Origin: expected a page of the hub, got {site:.200}; list its host with --allowed-hosts"
            raise RequestError(403, "foreign_origin", detail)

    def _is_known(self, host: str) -> bool:
        if host == "localhost" or host.endswith(".localhost") or self._is_listed(host):
            return True
        try:
            ip_address(host)
        except ValueError:
            return False
        return True

    def _is_listed(self, host: str) -> bool:
        return host in self._listed or ANY_HOST in self._listed or host.endswith(self._suffixes)


def _host(authority: bytes) -> str:
    """The host of `host:port`, in lower case, without the brackets of an IPv6 address."""
    text = authority.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")
