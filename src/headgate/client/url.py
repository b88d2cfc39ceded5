"""The URL of a hub, and a token."""

from collections.abc import Sequence
from ipaddress import ip_address
from typing import TypeGuard
from urllib.parse import urlsplit

from headgate.errors import HeadgateError


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


def checked_token(token: object) -> str:
    """A valid token."""
    if not isinstance(token, str) or not 1 <= len(token) <= 256 or not token.isprintable():
        raise HeadgateError("token: expected the one that the agent got when it was registered, 1 to 256 characters")
    return token
