"""The schemes of the URLs of stores. A new kind of store is added here, and its factory to `headgate.stores.urls`.

The URLs are those that `limits` and `throttled-py` know, with `async+` before them or without: every store here serves
threads and event loops alike.
"""

import re
from collections.abc import Mapping
from typing import Final

from headgate.errors import InvalidInput

_SERVERS: Final = ("redis", "rediss", "valkey", "valkeys")
URL_FORMS: Final = (
    "a URL such as redis://host:6379/0, rediss://…, unix:///path, redis+sentinel://host:26379/name, "
    "redis+cluster://host:7000 or memory://"
)

SCHEMES: Final[Mapping[str, str]] = {
    "memory": "memory",
    **dict.fromkeys(("unix", "redis+unix", "valkey+unix"), "redis"),
    **dict.fromkeys([f"{server}{kind}" for server in _SERVERS for kind in ("", "+sentinel", "+cluster")], "redis"),
}
"""The kind of store that each scheme means."""


def scheme_of(url: str) -> str:
    """The scheme of a URL, without `async+`; one that no store has is refused."""
    scheme, separator, _ = url.partition("://")
    scheme = scheme.lower().removeprefix("async+")
    if not separator or scheme not in SCHEMES:
        raise wrong_url(url)
    return scheme


def wrong_url(url: str, expected: str = URL_FORMS) -> InvalidInput:
    """The error for a URL that can't be used. Passwords aren't shown, nor options, which may hold another one."""
    secret = r"(?<=://)([^/@:]*:)?.*@" if "://" in url else "().*@"
    shown = re.sub(secret, r"\1***@", url, flags=re.DOTALL).partition("?")[0][:100]
    return InvalidInput(f"store: expected {expected}, got {shown!r}")
