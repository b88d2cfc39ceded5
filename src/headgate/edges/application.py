"""The shared parts of an application's limits: a store, a name and options, and one set of headers per response.

The middleware hands these on to the dependencies inside, in the ASGI scope or the WSGI environ.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from headgate.edges.costs import ExactCost, more_requests
from headgate.edges.request_hold import RequestHold
from headgate.edges.requests import Message, Send
from headgate.flow import Flow
from headgate.limits.decision import Decision
from headgate.stores.base import Store

SCOPE_KEY: Final = "headgate.limits"
"""Where the limits of a request are found, in an ASGI scope or a WSGI environ."""
_INHERITED: Final = ("key", "exempt", "headers", "proxies", "body")
"""The options that apply to the dependencies inside, too."""
_STARTS: Final = ("http.response.start", "websocket.accept", "websocket.http.response.start")

HeaderList: TypeAlias = list[tuple[bytes, bytes]]
Counted: TypeAlias = dict[object, tuple[ExactCost, Decision, RequestHold | None]]
"""The cost that a request has been counted at, the decision on it, and its hold if it has one, by bucket and key."""


class ApplicationSettings:
    """The settings that the limits of an application share. `store` is None where each counts in a store of its own.

    `private` says that the store is this process's memory, and that no store object was given.
    """

    def __init__(
        self, store: Store | None = None, name: str = "", options: Mapping[str, Any] = {}, *, private: bool = True
    ) -> None:
        self.store: Final = store
        self.private: Final = private
        self.name: Final = name
        self.options: Final = {option: options[option] for option in _INHERITED if option in options}
        self._nested: Final[WeakKeyDictionary[ApplicationSettings, ApplicationSettings]] = WeakKeyDictionary()

    def nested_in(self, outer: "ApplicationSettings") -> "ApplicationSettings":
        """These settings, and where they say nothing, those of another middleware around them."""
        found = self._nested.get(outer)
        if found is None:
            of = outer if self.store is None else self
            options = {**outer.options, **self.options}
            found = ApplicationSettings(of.store, self.name or outer.name, options, private=of.private)
            self._nested[outer] = found
        return found


class RequestLimits:
    """The limits that a request has met.

    Its response gets the headers of the one that binds: it has denied the request, or lets the fewest more pass.
    """

    __slots__ = ("_bound", "counted", "headers", "middleware_adds_headers", "refunds", "response_started", "settings")

    def __init__(
        self,
        settings: ApplicationSettings,
        *,
        middleware_adds_headers: bool = True,
        headers: HeaderList | None = None,
        bound: tuple[Decision, ExactCost] | None = None,
    ) -> None:
        self.settings = settings
        self.middleware_adds_headers: Final = middleware_adds_headers
        """Otherwise dependencies do."""
        self.response_started = False
        self.headers: HeaderList = headers or []
        self.counted: Counted = {}
        """By dependencies."""
        self.refunds: list[Flow[object, None]] = []
        """Of those that have let it pass, in case that another one denies it."""
        self._bound = bound  # the decision that these headers are of, and the cost: what it leaves is rarely asked

    def add(self, decision: Decision, cost: ExactCost, headers: HeaderList) -> None:
        """Note a decision on a request of this cost, and its headers."""
        bound, found = self._bound, (decision, cost)
        if not decision or (headers and (bound is None or _requests_left(*found) < _requests_left(*bound))):
            self._bound, self.headers = found, headers

    def sender(self, send: Send) -> Send:
        """A `send` that adds the headers to the response."""

        def send_with_headers(message: Message) -> Any:
            if message["type"] in _STARTS:
                self.response_started = True
                message = {**message, "headers": [*message.get("headers", ()), *self.headers]}
            return send(message)

        return send_with_headers


def _requests_left(decision: Decision, cost: ExactCost) -> int:
    return more_requests(decision, cost) if decision else -1


def join_limits(scope: MutableMapping[str, Any], settings: ApplicationSettings) -> tuple[RequestLimits, bool]:
    """The limits of a request, for a middleware with these settings; and whether it is the outermost one."""
    limits: RequestLimits | None = scope.get(SCOPE_KEY)
    if limits is None:
        limits = scope[SCOPE_KEY] = RequestLimits(settings)
        return limits, True
    limits.settings = settings.nested_in(limits.settings)
    return limits, False
