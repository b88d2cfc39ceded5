"""What the limits of one application share: a store, a name and options, and one set of headers for each response.

The middleware hands these on to the edges inside of it, other middleware and dependencies: in the ASGI scope or the
WSGI environ.
"""

import os
import re
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Final, TypeAlias

from headgate.edges.requests import Message, Send
from headgate.errors import refuse
from headgate.limits.decision import Decision
from headgate.stores.base import Store

SCOPE_KEY: Final = "headgate.limits"
"""Where the limits of a request are found, in an ASGI scope or a WSGI environ."""
_INHERITED: Final = ("key", "exempt", "headers", "proxies", "body")
"""The options that hold for the edges inside, too."""
_STARTS: Final = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_MOST_SIBLINGS: Final = 64  # processes that are looked at

HeaderList: TypeAlias = list[tuple[bytes, bytes]]


class Application:
    """The settings that the limits of an application share. `store` is None where each counts in a store of its own."""

    def __init__(self, store: Store | None, name: str, options: Any) -> None:
        self.store: Final = store
        self.name: Final = name
        self.options: Final = {option: options[option] for option in _INHERITED if option in options}
        self._last: tuple[Application, Application] | None = None

    def inside(self, outer: "Application") -> "Application":
        """These settings inside of others, where one middleware wraps another."""
        if self._last is None or self._last[0] is not outer:
            if self.store is not None and outer.store not in (None, self.store):
                refuse("store", "one for an application: pass the same object to all middleware", self.store)
            store = outer.store if self.store is None else self.store
            self._last = outer, Application(store, self.name or outer.name, {**outer.options, **self.options})
        return self._last[1]


class RequestLimits:
    """The limits that a request has met.

    Its response gets the headers of the one that binds: it has denied the request, or has the least left.
    """

    __slots__ = ("_left", "application", "begun", "headers", "sends")

    def __init__(self, application: Application, *, sends: bool) -> None:
        self.application = application
        self.sends: Final = sends
        """Whether a middleware adds the headers; otherwise the dependency that has made this does."""
        self.begun = False
        """Whether the response has begun."""
        self.headers: HeaderList = []
        self._left: float = inf

    def add(self, decision: Decision, headers: HeaderList) -> None:
        """Note a decision, and the headers that tell of it."""
        left = decision.remaining if decision else -1
        if headers and left < self._left:
            self._left, self.headers = left, headers

    def sender(self, send: Send) -> Send:
        """A `send` that adds the headers to the response."""

        def send_with_headers(message: Message) -> Any:
            if message["type"] in _STARTS:
                self.begun = True
                message = {**message, "headers": [*message.get("headers", ()), *self.headers]}
            return send(message)

        return send_with_headers


def has_siblings() -> bool:
    """Whether this process is one of several workers: its parent has more children that run the same command.

    False where the system doesn't tell.
    """
    own, found = os.getpid(), []
    with suppress(OSError):
        for thread in Path(f"/proc/{os.getppid()}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return any(pid != own and _command(pid) == _command(own) for pid in found[:_MOST_SIBLINGS])


def _command(pid: int) -> bytes:
    """The command line of a process, without the numbers that differ between workers."""
    try:
        return re.sub(rb"\d+", b"", Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:  # it has ended
        return str(pid).encode()
