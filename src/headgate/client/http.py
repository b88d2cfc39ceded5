"""Transports for httpx that obey: they read a server's rate limit headers, wait, and retry denied requests.

`headgate.client.pacing` works out when the next request may be sent; requests wait in a `headgate.wait_queue`. The flow
of a request is written once, as a generator; the two transports differ only in how they carry it out.

Requests may also be those of httpx2, the successor of httpx, which some SDKs use. It has the same classes under the
same names, so all that differs is where they are looked up; types are those of httpx throughout.
"""

import asyncio
import random as _random
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypeAlias, TypeVar

from headgate.client.pacing import Pace, SentRequest, Tokens
from headgate.errors import HeadgateError, refuse
from headgate.flow import Flow, adrive, drive
from headgate.http import read_headers
from headgate.http.problem import SHOULD_RETRY
from headgate.lifecycle import new_lock
from headgate.limits.clock import Clock, MonotonicClock
from headgate.limits.decision import ALLOW, DENY, NEVER, Decision
from headgate.limits.fixed import UNLIMITED
from headgate.limits.numbers import Number, microseconds, permille, whole
from headgate.stores.base import Verb
from headgate.wait_queue import WaitQueues, aacquire, acquire

try:
    import httpx
except ImportError as error:
    raise HeadgateError(
        f"headgate.client: expected httpx for the transport, got: {error}; in a checkout: pip install '.[client]'"
    ) from error

T = TypeVar("T")

_REPEATABLE: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"})
_PORTS: Final = {"http": 80, "https": 443}
_MOST_ORIGINS: Final = 1000
_MOST_BODY: Final = 65_536  # bytes of a denial that are read,
_BODY_SECONDS: Final = 5.0  # and for how long


class WaitNotice(NamedTuple):
    """A request has to wait before it is sent: the argument of `on_wait`."""

    seconds: float
    """The expected wait; it shrinks or grows with the answers to other requests."""
    origin: str
    """The server: "https://api.example.com:443"."""
    why: str


class TooLong(HeadgateError, httpx.TransportError):
    """A request was not sent: its wait would be longer than `most_wait`, or too many requests wait already.

    To httpx it is a transport error. `retry_after` is in seconds; None if it isn't known.
    """

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class _QueuedRequest:
    """A request in the queue: when it is first, it asks whether it may be sent."""

    def __init__(self, transport: "_ObeyingTransport[Any]", origin: str, pace: Pace, tokens: Tokens) -> None:
        self._transport = transport
        self.origin = origin
        self.pace = pace
        self._tokens = tokens
        self.sent: SentRequest | None = None
        self.left = transport._most_wait
        """Microseconds that it may still wait, not counting the time behind others in the queue."""
        self.retry_after = 0.0
        self._first_since: int | None = None
        self._noticed = 0

    def ask(self, _verb: Verb) -> Decision:
        transport = self._transport
        with transport._lock:
            now = transport._clock.now()
            if self._first_since is None:
                self._first_since = now
            end = self._first_since + self.left
            when, why = self.pace.earliest(now, self._tokens)
            if when <= now:
                self.sent = self.pace.send(now, self._tokens)
                self.left, self._first_since = end - now, None
                return Decision(ALLOW, UNLIMITED, 0, 0, 0, -1)
            self.retry_after = (when - now) / 1_000_000
            if now >= end or self.pace.hopeless(now, end, self._tokens):
                return Decision(DENY, UNLIMITED, 0, NEVER, 0, -1)
        if when > self._noticed and transport._on_wait is not None:
            self._noticed = when
            transport._on_wait(WaitNotice(self.retry_after, self.origin, why))
        return Decision(DENY, UNLIMITED, 0, min(when, end) - now, 0, -1)

    async def aask(self, verb: Verb) -> Decision:
        return self.ask(verb)

    def too_long(self) -> bool:
        """Whether another attempt would have to wait too long."""
        with self._transport._lock:
            now = self._transport._clock.now()
            return self.pace.hopeless(now, now + self.left, self._tokens)


class _DenialBody:
    """The body of a denial, as far as it is read. However it ends, the denial is one."""

    def __init__(self, response: httpx.Response, library: Any) -> None:
        self.stream: Any = response.stream
        self.errors: tuple[type[Exception], ...] = (TimeoutError, httpx.TransportError, library.TransportError)
        self._response, self._library = response, library
        self._read = bytearray()
        self._deadline = time.monotonic() + _BODY_SECONDS
        self.whole = False

    def add(self, part: bytes) -> bool:
        """Add a part. False if no more is to be read."""
        self._read += part[: _MOST_BODY - len(self._read)]
        return len(self._read) < _MOST_BODY and time.monotonic() < self._deadline

    def replace(self) -> None:
        """Make it the body of the response that it was read from."""
        response = self._response
        if not self.whole and "content-encoding" in response.headers:  # a part of that can't be decoded
            self._read.clear()
            del response.headers["content-encoding"]
        response.stream = self._library.ByteStream(bytes(self._read))


Step: TypeAlias = _QueuedRequest | httpx.Request | _DenialBody
RequestFlow: TypeAlias = Flow[Step, httpx.Response]
"""Yields a queued request to wait for, a request to send, or a denial whose body is to be read and closed."""


class _ObeyingTransport(Generic[T]):
    """The shared part of the two transports: the pace of each server, the queues, and the flow of a request."""

    _default: ClassVar[str]  # the class of the transport that sends, unless one is given

    def __init__(
        self,
        transport: T | None = None,
        *,
        most_wait: Number = 300,
        retries: int = 5,
        most_waiting: int = 1000,
        jitter: Number = 0.03,
        tokens: Callable[[httpx.Request], Tokens] | None = None,
        clock: Clock | None = None,
        random: Callable[[], float] | None = None,
        on_wait: Callable[[WaitNotice], object] | None = None,
    ) -> None:
        self._most_wait = microseconds("most_wait", most_wait)
        if type(retries) is not int or retries < 0:
            refuse("retries", "a whole number, 0 or more", retries)
        self._retries = retries
        self._most_waiting = whole("most_waiting", most_waiting)
        self._jitter = permille("jitter", jitter) / 1000
        self._clock = MonotonicClock() if clock is None else clock
        self._random = _random.Random().random if random is None else random  # noqa: S311 - it only spreads
        if on_wait is not None and not callable(on_wait):
            refuse("on_wait", "a function that takes a WaitNotice", on_wait)
        self._on_wait = on_wait
        if tokens is not None and not callable(tokens):
            refuse("tokens", "a function that takes an httpx.Request", tokens)
        self._tokens = tokens
        self._lock = new_lock()
        self._queues = WaitQueues()
        self._paces: dict[str, Pace] = {}
        self._given = transport
        self._made: dict[str, T] = {}  # by library

    def _send(self, request: httpx.Request) -> RequestFlow:
        queued, library = self._queue(request), _library(request)
        timeouts = dict(request.extensions.get("timeout") or {})
        request.extensions = {**request.extensions, "timeout": timeouts}
        response: httpx.Response | None = None
        for tries_left in range(self._retries, -1, -1):
            try:
                decision = yield queued
                if not decision:
                    break
                answer = yield request
            except BaseException:
                self._fail(queued)
                raise
            response = answer
            assert response is not None
            if not self._learn(queued, response):
                return response
            read = timeouts.get("read")
            timeouts["read"] = _BODY_SECONDS if read is None else min(read, _BODY_SECONDS)
            body = _DenialBody(response, library)
            try:
                yield body
            finally:
                timeouts["read"] = read
            body.replace()
            if not _may_repeat(request, response, library):
                return response
            if not tries_left or queued.too_long():
                break
        if response is not None:
            if self._retries and "x-stainless-retry-count" in request.headers:
                response.headers[SHOULD_RETRY] = "false"  # else the SDK would begin anew
            return response
        raise TooLong(
            f"not sent: {queued.origin} allows nothing for {queued.retry_after:.1f} s, and a request waits at most"
            f" {self._most_wait / 1_000_000:g} s; try again then, or give the transport a longer most_wait",
            queued.retry_after,
        )

    def _queue(self, request: httpx.Request) -> _QueuedRequest:
        url = request.url
        origin = f"{url.scheme}://{url.host}:{url.port or _PORTS.get(url.scheme, 0)}"
        waiting = self._queues.length(origin)
        if waiting >= self._most_waiting:
            raise TooLong(
                f"not sent: {waiting} requests wait for {origin} already; send fewer at once, or give the transport a"
                " larger most_waiting"
            )
        tokens = None if self._tokens is None else _check_tokens(self._tokens(request))
        with self._lock:
            pace = self._paces.get(origin)
            if pace is None:
                self._make_room()
                pace = self._paces[origin] = Pace()
        return _QueuedRequest(self, origin, pace, tokens)

    def _make_room(self) -> None:
        if len(self._paces) >= _MOST_ORIGINS:
            now = self._clock.now()
            self._paces = {origin: pace for origin, pace in self._paces.items() if not pace.idle(now)}
            if len(self._paces) >= _MOST_ORIGINS:
                del self._paces[next(iter(self._paces))]

    def _learn(self, queued: _QueuedRequest, response: httpx.Response) -> bool:
        """Learn from a response. True if the request was denied."""
        headers = read_headers(response.headers)
        with self._lock:
            assert queued.sent is not None
            jitter = self._jitter * self._random()
            denied = queued.pace.answer(queued.sent, self._clock.now(), response.status_code, headers, jitter)
            queued.sent = None
        self._queues.wake(queued.origin)
        return denied

    def _sender(self, request: httpx.Request) -> T:
        """The transport that sends a request."""
        if self._given is not None:
            return self._given
        library = _library(request)
        with self._lock:
            found = self._made.get(library.__name__)
            if found is None:
                found = self._made[library.__name__] = getattr(library, self._default)()
        return found

    def _fail(self, queued: _QueuedRequest) -> None:
        """Note that a request, if it was sent, stays unanswered."""
        if queued.sent is not None:
            with self._lock:
                queued.pace.fail(queued.sent, self._clock.now())
            self._queues.wake(queued.origin)


def _library(request: httpx.Request) -> Any:
    """The library that a request is from: httpx or httpx2."""
    successor = sys.modules.get("httpx2")
    return successor if successor is not None and isinstance(request, successor.Request) else httpx


def _may_repeat(request: httpx.Request, response: httpx.Response, library: Any) -> bool:
    """Whether a denied request can be repeated without doing anything twice."""
    if not isinstance(request.stream, library.ByteStream):
        return False  # a generator or file has been consumed
    if response.headers.get(SHOULD_RETRY) == "false":
        return False  # the server knows that no wait helps, as where an account is out of credit
    return response.status_code == 429 or request.method in _REPEATABLE or "idempotency-key" in request.headers


def _check_tokens(given: Tokens) -> Tokens:
    numbers = given.values() if isinstance(given, Mapping) else () if given is None else (given,)
    for number in numbers:
        if type(number) is not int or number < 0:
            refuse("tokens", "a function that returns whole numbers, 0 or more, or None", given)
    return given


class ObeyingTransport(_ObeyingTransport[httpx.BaseTransport], httpx.BaseTransport):
    """A transport for `httpx.Client` that keeps to the rate limits of servers.

    >>> import httpx
    >>> from headgate.client import ObeyingTransport
    >>> client = httpx.Client(transport=ObeyingTransport())
    >>> client.close()

    It reads Retry-After and the RateLimit headers of every response, in any dialect that `headgate.http` knows. A
    request that would be denied is not sent: it waits, first come, first served; requests in flight count against the
    remaining quota. A request that is denied all the same (429, or 503 with Retry-After) is retried when its wait is
    over, up to `retries` times, if that does nothing twice: after 429 any request whose body can be sent again, after
    503 only one that is idempotent by its method or has an Idempotency-Key. `X-Should-Retry: false` is obeyed. The SDKs
    of OpenAI and Anthropic don't retry what is given up here. Connection errors are raised as they are. `transport`
    does the sending, by default `httpx.HTTPTransport()`. For `httpx2.Client`, the successor of `httpx.Client`, that is
    `httpx2.HTTPTransport()`.

    `most_wait` is the longest wait of a request in seconds, all attempts together, not counting the time behind others
    in the queue. If the wait would be longer, the denial is returned like any response, or `TooLong` is raised if
    nothing was sent; `TooLong` is also raised if `most_waiting` requests wait for the server already. `jitter` is the
    largest share by which a wait is lengthened at random; none is shortened. `on_wait` is called with a `WaitNotice`
    when a request has to wait. httpx's timeouts don't include the wait. The body of a denial is read at once, up to
    64 KiB and for 5 seconds; if it breaks off, the denial has what has come of it.

    Where a server counts tokens, as those of language models do, the cost of a request isn't known before it is sent.
    `tokens` is a function of the `httpx.Request` that estimates it: it returns a number, a mapping of numbers by policy
    ("tokens", "input-tokens", "output-tokens"), or None if it can't tell. Without it, a request is expected to cost as
    much as the most expensive of recent ones. So what waits for requests is exact, and what waits for tokens is
    estimated: if an estimate was too low, the server may deny the request, and it is retried. No estimate is taken for
    more than the whole quota, so that every request is sent in the end.

    It may be used by all threads of a process. `clock` and `random` (a function like `random.random`) are for tests.
    """

    _default = "HTTPTransport"

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return drive(self._send(request), self._perform)

    def _perform(self, step: Step) -> Decision | httpx.Response | None:
        if isinstance(step, _QueuedRequest):
            return acquire(self._queues, step.origin, self._clock, None, step.ask)
        if not isinstance(step, _DenialBody):
            return self._sender(step).handle_request(step)
        try:
            step.whole = all(step.add(part) for part in step.stream)
        except step.errors:
            pass  # it was cut, or stalled for longer than the timeout
        finally:
            step.stream.close()
        return None

    def close(self) -> None:
        if self._given is not None:
            self._given.close()
        for transport in self._made.values():
            transport.close()

    def __enter__(self) -> Self:
        if self._given is not None:
            self._given.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if self._given is not None:
            self._given.__exit__(exc_type, exc_value, traceback)
        for transport in self._made.values():
            transport.close()


class AsyncObeyingTransport(_ObeyingTransport[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport):
    """`ObeyingTransport` for `httpx.AsyncClient`, in asyncio. A cancelled request leaves the queue."""

    _default = "AsyncHTTPTransport"

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await adrive(self._send(request), self._perform)

    async def _perform(self, step: Step) -> Decision | httpx.Response | None:
        if isinstance(step, _QueuedRequest):
            return await aacquire(self._queues, step.origin, self._clock, None, step.aask)
        if not isinstance(step, _DenialBody):
            return await self._sender(step).handle_async_request(step)
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in step.stream:
                    if not step.add(part):
                        break
                else:
                    step.whole = True
        except step.errors:
            pass
        finally:
            await step.stream.aclose()
        return None

    async def aclose(self) -> None:
        if self._given is not None:
            await self._given.aclose()
        for transport in self._made.values():
            await transport.aclose()

    async def __aenter__(self) -> Self:
        if self._given is not None:
            await self._given.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if self._given is not None:
            await self._given.__aexit__(exc_type, exc_value, traceback)
        for transport in self._made.values():
            await transport.aclose()
