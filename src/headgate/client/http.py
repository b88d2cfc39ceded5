"""Transports for httpx that obey: they read what a server says of its limits, wait, and send again what was denied.

What is known of a server and when the next request may be sent is worked out in `headgate.client.pacing`; the queue
of waiters is that of `headgate.wait_queue`. The flow of a request is written once, as a generator that says what to do
next; the two transports differ only in how they do it.
"""

import random as _random
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeAlias

from headgate.client.pacing import Pace, SentRequest
from headgate.errors import HeadgateError, refuse
from headgate.http import read_headers
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
        f"headgate.client: expected httpx for a transport that obeys, got: {error}; pip install 'headgate[client]'"
    ) from error

_REPEATABLE: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"})
_PORTS: Final = {"http": 80, "https": 443}
_MOST_ORIGINS: Final = 1000


class WaitNotice(NamedTuple):
    """Why a request waits before it is sent: `on_wait` is called with it."""

    seconds: float
    """How long, by what is known now; it may be less when others are answered, or more when they are denied."""
    origin: str
    """Whose limit it is: "https://api.example.com:443"."""
    why: str


class TooLong(HeadgateError, httpx.TransportError):
    """A request was not sent: the wait for it would be longer than `most_wait`, or too many wait already.

    To httpx it is an error of the transport. `retry_after` says in how many seconds it may be tried again, where that
    is known.
    """

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class _Turn:
    """A request that wants to be sent: when it is first in line, it asks whether it may."""

    def __init__(self, course: "_Course", origin: str, pace: Pace) -> None:
        self._course = course
        self.origin = origin
        self.pace = pace
        self.sent: SentRequest | None = None
        self.left = course.most_wait
        """Microseconds that it may still wait, not counted while others are before it in line."""
        self.retry_after = 0.0
        self._first_since: int | None = None
        self._noticed = 0

    def ask(self, _verb: Verb) -> Decision:
        course = self._course
        with course.lock:
            now = course.clock.now()
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
        if when > self._noticed and course.on_wait is not None:
            self._noticed = when
            course.on_wait(WaitNotice(self.retry_after, self.origin, why))
        return Decision(DENY, UNLIMITED, 0, min(when, end) - now, 0, -1)

    async def aask(self, verb: Verb) -> Decision:
        return self.ask(verb)

    def too_long(self) -> bool:
        """Whether the wait for another try would be longer than it may be."""
        with self._course.lock:
            now = self._course.clock.now()
            return self.pace.hopeless(now, now + self.left)


Flow: TypeAlias = Generator[_Turn | httpx.Request | httpx.Response, Decision | httpx.Response | bytes, httpx.Response]
"""Yields a turn to wait for, a request to send, or a response whose body is to be read and closed."""


class _Course:
    """What the two transports share: what is known of servers, who waits for them, and the course of a request."""

    def __init__(
        self,
        most_wait: Number,
        retries: int,
        most_waiting: int,
        jitter: Number,
        clock: Clock | None,
        random: Callable[[], float] | None,
        on_wait: Callable[[WaitNotice], object] | None,
    ) -> None:
        self.most_wait = microseconds("most_wait", most_wait)
        if type(retries) is not int or retries < 0:
            refuse("retries", "a whole number, 0 or more", retries)
        self._retries = retries
        self._most_waiting = whole("most_waiting", most_waiting)
        self._jitter = permille("jitter", jitter) / 1000
        self.clock = MonotonicClock() if clock is None else clock
        self._random = _random.Random().random if random is None else random  # noqa: S311 - it only spreads
        if on_wait is not None and not callable(on_wait):
            refuse("on_wait", "a function that takes a WaitNotice", on_wait)
        self.on_wait = on_wait
        self.lock = threading.Lock()
        self.lines = WaitQueues()
        self._paces: dict[str, Pace] = {}

    def flow(self, request: httpx.Request) -> Flow:
        turn = self._turn(request.url)
        response: httpx.Response | None = None
        for tries_left in range(self._retries, -1, -1):
            try:
                decision = yield turn
                if not decision:
                    break
                answer = yield request
            except BaseException:
                self._fail(turn)
                raise
            assert isinstance(answer, httpx.Response)
            response = answer
            denied = self._learn(turn, response)
            if not denied or not tries_left or not _may_repeat(request, response) or turn.too_long():
                return response
            body = yield response
            assert isinstance(body, bytes)
            response.stream = httpx.ByteStream(body)  # should it be the last one after all
        if response is not None:
            return response
        raise TooLong(
            f"not sent: {turn.origin} has to be left alone for {turn.retry_after:.1f} s, and a request waits at most"
            f" {self.most_wait / 1_000_000:g} s; try again then, or give the transport a longer most_wait",
            turn.retry_after,
        )

    def _turn(self, url: httpx.URL) -> _Turn:
        origin = f"{url.scheme}://{url.host}:{url.port or _PORTS.get(url.scheme, 0)}"
        waiting = self.lines.length(origin)
        if waiting >= self._most_waiting:
            raise TooLong(
                f"not sent: {waiting} requests wait for {origin} already; send fewer at once, or give the transport a"
                " larger most_waiting"
            )
        with self.lock:
            pace = self._paces.get(origin)
            if pace is None:
                self._make_room()
                pace = self._paces[origin] = Pace()
        return _Turn(self, origin, pace)

    def _make_room(self) -> None:
        if len(self._paces) >= _MOST_ORIGINS:
            now = self.clock.now()
            self._paces = {origin: pace for origin, pace in self._paces.items() if not pace.idle(now)}
            if len(self._paces) >= _MOST_ORIGINS:
                del self._paces[next(iter(self._paces))]

    def _learn(self, turn: _Turn, response: httpx.Response) -> bool:
        """Take in what a response says, and whether the request was denied by it."""
        headers = read_headers(response.headers)
        with self.lock:
            assert turn.sent is not None
            stretch = self._jitter * self._random()
            denied = turn.pace.answer(turn.sent, self.clock.now(), response.status_code, headers, stretch)
            turn.sent = None
        self.lines.ring(turn.origin)
        return denied

    def _fail(self, turn: _Turn) -> None:
        """Note that a request, if it was sent, gets no answer."""
        if turn.sent is not None:
            with self.lock:
                turn.pace.fail(turn.sent, self.clock.now())
            self.lines.ring(turn.origin)


def _may_repeat(request: httpx.Request, response: httpx.Response) -> bool:
    """Whether a denied request can be sent again without doing anything twice."""
    if not isinstance(request.stream, httpx.ByteStream):
        return False  # what was read from a generator or a file is gone
    return response.status_code == 429 or request.method in _REPEATABLE or "idempotency-key" in request.headers


class ObeyingTransport(httpx.BaseTransport):
    """A transport for `httpx.Client` that keeps to the limits of the servers it talks to.

    >>> import httpx
    >>> from headgate.client import ObeyingTransport
    >>> client = httpx.Client(transport=ObeyingTransport())
    >>> client.close()

    It reads Retry-After and the RateLimit headers of every response. A request that is known to be denied is not
    sent: it waits, first come, first served, and those that are under way count against what is left. What was denied
    all the same (429, or 503 with Retry-After) is sent again when its time has come, up to `retries` times, if that
    does nothing twice: after 429 whatever can be sent again, after 503 what is idempotent by its method or has an
    Idempotency-Key. Errors of the connection are raised as they are. `transport` is the one that sends,
    `httpx.HTTPTransport()` unless given.

    `most_wait` is the most seconds that a request waits, all its tries together, not counting the time in line behind
    others. If it would be longer, the denial is returned as any response is, or `TooLong` raised where nothing was
    sent; so it is, too, where `most_waiting` requests wait for the server already. `jitter` is the largest share by
    which a wait is lengthened at random; none is ever shortened. `on_wait` is called with a `WaitNotice` when a request
    has to wait. httpx's timeouts don't count the wait.

    All threads of a process can use one at the same time. `clock` and `random` (a function like `random.random`) are
    for tests.
    """

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        most_wait: Number = 300,
        retries: int = 5,
        most_waiting: int = 1000,
        jitter: Number = 0.03,
        clock: Clock | None = None,
        random: Callable[[], float] | None = None,
        on_wait: Callable[[WaitNotice], object] | None = None,
    ) -> None:
        self._course = _Course(most_wait, retries, most_waiting, jitter, clock, random, on_wait)
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        flow = self._course.flow(request)
        try:
            step = next(flow)
            while True:
                try:
                    done = self._do(step)
                except BaseException as failure:  # noqa: BLE001 - raised in the flow
                    step = flow.throw(failure)
                else:
                    step = flow.send(done)
        except StopIteration as end:
            response: httpx.Response = end.value
            return response

    def _do(self, step: _Turn | httpx.Request | httpx.Response) -> Decision | httpx.Response | bytes:
        if isinstance(step, _Turn):
            return acquire(self._course.lines, step.origin, self._course.clock, None, step.ask)
        if isinstance(step, httpx.Request):
            return self._transport.handle_request(step)
        assert isinstance(step.stream, httpx.SyncByteStream)
        try:
            return b"".join(step.stream)
        finally:
            step.stream.close()

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


class AsyncObeyingTransport(httpx.AsyncBaseTransport):
    """`ObeyingTransport` for `httpx.AsyncClient`, in asyncio. Who is cancelled leaves the line."""

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        most_wait: Number = 300,
        retries: int = 5,
        most_waiting: int = 1000,
        jitter: Number = 0.03,
        clock: Clock | None = None,
        random: Callable[[], float] | None = None,
        on_wait: Callable[[WaitNotice], object] | None = None,
    ) -> None:
        self._course = _Course(most_wait, retries, most_waiting, jitter, clock, random, on_wait)
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        flow = self._course.flow(request)
        try:
            step = next(flow)
            while True:
                try:
                    done = await self._do(step)
                except BaseException as failure:  # noqa: BLE001 - raised in the flow
                    step = flow.throw(failure)
                else:
                    step = flow.send(done)
        except StopIteration as end:
            response: httpx.Response = end.value
            return response

    async def _do(self, step: _Turn | httpx.Request | httpx.Response) -> Decision | httpx.Response | bytes:
        if isinstance(step, _Turn):
            return await aacquire(self._course.lines, step.origin, self._course.clock, None, step.aask)
        if isinstance(step, httpx.Request):
            return await self._transport.handle_async_request(step)
        assert isinstance(step.stream, httpx.AsyncByteStream)
        try:
            return b"".join([part async for part in step.stream])
        finally:
            await step.stream.aclose()

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
