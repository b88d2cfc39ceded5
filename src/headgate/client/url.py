"""The URL of a hub."""

from collections.abc import Sequence
from ipaddress import ip_address
from typing import TypeGuard
from urllib.parse import urlsplit


def is_hub_url(text: object, schemes: Sequence[str]) -> TypeGuard[str]:
    """Whether a value is the address of a hub: it may have a path, but no query and no password."""
    if not isinstance(text, str):
        return False
    try:
        parts = urlsplit(text)
        plain = text.isascii() and text.isprintable() and not set(text) & set(" ?#") and "@" not in parts.netloc
        good = parts.scheme in schemes and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        return False
    return bool(good and plain)


def is_loopback(url: str) -> bool:
    """Whether a valid URL is of this machine, where no proxy is asked."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
