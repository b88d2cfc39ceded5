"""Transports for httpx that obey: they read a server's rate limit headers, wait, and retry denied requests.

`headgate.client.pacing` works out when the next request may be sent; requests wait in a `headgate.wait_queue`. The flow
of a request is written once, as a generator; the two transports differ only in how they carry it out.
"""

import asyncio
import random as _random
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypeAlias, TypeVar

from headgate.client.pacing import Pace, SentRequest
from headgate.errors import HeadgateError, refuse
from headgate.flow import Flow, adrive, drive
from headgate.http import read_headers
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
        f"headgate.client: expected httpx for a transport that obeys, got: {error}; install the extra headgate[client]"
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

    def __init__(self, transport: "_ObeyingTransport[Any]", origin: str, pace: Pace) -> None:
        self._transport = transport
        self.origin = origin
        self.pace = pace
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
            when, why = self.pace.earliest(now)
            if when <= now:
                self.sent = self.pace.send(now)
                self.left, self._first_since = end - now, None
                return Decision(ALLOW, UNLIMITED, 0, 0, 0, -1)
            self.retry_after = (when - now) / 1_000_000
            if now >= end or self.pace.hopeless(now, end):
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
            return self.pace.hopeless(now, now + self.left)


class _DenialBody:
    """The body of a denial, as far as it is read. However it ends, the denial is one."""

    def __init__(self) -> None:
        self._read = bytearray()
        self._deadline = time.monotonic() + _BODY_SECONDS
        self.whole = False

    def add(self, part: bytes) -> bool:
        """Add a part. False if no more is to be read."""
        self._read += part[: _MOST_BODY - len(self._read)]
        return len(self._read) < _MOST_BODY and time.monotonic() < self._deadline

    def replace(self, response: httpx.Response) -> None:
        """Make it the body of the response that it was read from."""
        if not self.whole and "content-encoding" in response.headers:  # a part of that can't be decoded
            self._read.clear()
            del response.headers["content-encoding"]
        response.stream = httpx.ByteStream(bytes(self._read))


Step: TypeAlias = _QueuedRequest | httpx.Request | httpx.Response
RequestFlow: TypeAlias = Flow[Step, httpx.Response]
"""Yields a queued request to wait for, a request to send, or a denial whose body is to be read and closed."""


class _ObeyingTransport(Generic[T]):
    """The shared part of the two transports: the pace of each server, the queues, and the flow of a request."""

    _default: ClassVar[type[Any]]

    def __init__(
        self,
        transport: T | None = None,
        *,
        most_wait: Number = 300,
        retries: int = 5,
        most_waiting: int = 1000,
        jitter: Number = 0.03,
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
        self._lock = new_lock()
        self._queues = WaitQueues()
        self._paces: dict[str, Pace] = {}
        self._transport: T = self._default() if transport is None else transport

    def _send(self, request: httpx.Request) -> RequestFlow:
        queued = self._queue(request.url)
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
            assert isinstance(answer, httpx.Response)
            response = answer
            if not self._learn(queued, response):
                return response
            read = timeouts.get("read")
            timeouts["read"] = _BODY_SECONDS if read is None else min(read, _BODY_SECONDS)
            try:
                body = yield response
            finally:
                timeouts["read"] = read
            assert isinstance(body, _DenialBody)
            body.replace(response)
            if not tries_left or not _may_repeat(request, response) or queued.too_long():
                return response
        if response is not None:
            return response
        raise TooLong(
            f"not sent: {queued.origin} allows nothing for {queued.retry_after:.1f} s, and a request waits at most"
            f" {self._most_wait / 1_000_000:g} s; try again then, or give the transport a longer most_wait",
            queued.retry_after,
        )

    def _queue(self, url: httpx.URL) -> _QueuedRequest:
        origin = f"{url.scheme}://{url.host}:{url.port or _PORTS.get(url.scheme, 0)}"
        waiting = self._queues.length(origin)
        if waiting >= self._most_waiting:
            raise TooLong(
                f"not sent: {waiting} requests wait for {origin} already; send fewer at once, or give the transport a"
                " larger most_waiting"
            )
        with self._lock:
            pace = self._paces.get(origin)
            if pace is None:
                self._make_room()
                pace = self._paces[origin] = Pace()
        return _QueuedRequest(self, origin, pace)

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

    def _fail(self, queued: _QueuedRequest) -> None:
        """Note that a request, if it was sent, stays unanswered."""
        if queued.sent is not None:
            with self._lock:
                queued.pace.fail(queued.sent, self._clock.now())
            self._queues.wake(queued.origin)


def _may_repeat(request: httpx.Request, response: httpx.Response) -> bool:
    """Whether a denied request can be repeated without doing anything twice."""
    if not isinstance(request.stream, httpx.ByteStream):
        return False  # a generator or file has been consumed
    return response.status_code == 429 or request.method in _REPEATABLE or "idempotency-key" in request.headers


class ObeyingTransport(_ObeyingTransport[httpx.BaseTransport], httpx.BaseTransport):
    """A transport for `httpx.Client` that keeps to the rate limits of servers.

    >>> import httpx
    >>> from headgate.client import ObeyingTransport
    >>> client = httpx.Client(transport=ObeyingTransport())
    >>> client.close()

    It reads Retry-After and the RateLimit headers of every response. A request that would be denied is not sent: it
    waits, first come, first served; requests in flight count against the remaining quota. A request that is denied all
    the same (429, or 503 with Retry-After) is retried when its wait is over, up to `retries` times, if that does
    nothing twice: after 429 any request whose body can be sent again, after 503 only one that is idempotent by its
    method or has an Idempotency-Key. Connection errors are raised as they are. `transport` does the sending, by default
    `httpx.HTTPTransport()`.

    `most_wait` is the longest wait of a request in seconds, all attempts together, not counting the time behind others
    in the queue. If the wait would be longer, the denial is returned like any response, or `TooLong` is raised if
    nothing was sent; `TooLong` is also raised if `most_waiting` requests wait for the server already. `jitter` is the
    largest share by which a wait is lengthened at random; none is shortened. `on_wait` is called with a `WaitNotice`
    when a request has to wait. httpx's timeouts don't include the wait. The body of a denial is read at once, up to
    64 KiB and for 5 seconds; if it breaks off, the denial has what has come of it.

    It may be used by all threads of a process. `clock` and `random` (a function like `random.random`) are for tests.
    """

    _default = httpx.HTTPTransport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return drive(self._send(request), self._perform)

    def _perform(self, step: Step) -> Decision | httpx.Response | _DenialBody:
        if isinstance(step, _QueuedRequest):
            return acquire(self._queues, step.origin, self._clock, None, step.ask)
        if isinstance(step, httpx.Request):
            return self._transport.handle_request(step)
        assert isinstance(step.stream, httpx.SyncByteStream)
        body = _DenialBody()
        try:
            body.whole = all(body.add(part) for part in step.stream)
        except httpx.TransportError:
            pass  # it was cut, or stalled for longer than the timeout
        finally:
            step.stream.close()
        return body

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        self._transport.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._transport.__exit__(exc_type, exc_value, traceback)


class AsyncObeyingTransport(_ObeyingTransport[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport):
    """`ObeyingTransport` for `httpx.AsyncClient`, in asyncio. A cancelled request leaves the queue."""

    _default = httpx.AsyncHTTPTransport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await adrive(self._send(request), self._perform)

    async def _perform(self, step: Step) -> Decision | httpx.Response | _DenialBody:
        if isinstance(step, _QueuedRequest):
            return await aacquire(self._queues, step.origin, self._clock, None, step.aask)
        if isinstance(step, httpx.Request):
            return await self._transport.handle_async_request(step)
        assert isinstance(step.stream, httpx.AsyncByteStream)
        body = _DenialBody()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in step.stream:
                    if not body.add(part):
                        break
                else:
                    body.whole = True
        except (TimeoutError, httpx.TransportError):
            pass
        finally:
            await step.stream.aclose()
        return body

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._transport.__aexit__(exc_type, exc_value, traceback)
