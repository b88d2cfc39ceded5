"""A client that reconnects: it repeats unanswered frames, and never sends faster than the hub allows.

`RelayClient` and `HubClient` are built on it. Each has its own handshake, frames and limits.
"""

import asyncio
import json
import logging
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from random import Random
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, NoReturn, Self, TypeAlias, TypedDict, TypeVar

from headgate.client.inbox import Inbox, Wakeup
from headgate.client.outbox import LONGEST, Denial, Outbox, PendingFrame, QueueFull, Refused, SendLimit, Unsent
from headgate.client.url import is_hub_url, is_loopback
from headgate.errors import HeadgateError, refuse, refuse_option
from headgate.http import parse_retry_after
from headgate.limits.clock import Clock, MonotonicClock
from headgate.limits.numbers import microseconds, whole

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
except ImportError as missing:
    raise HeadgateError(
        f"headgate.client: expected the package websockets, got: {missing}; install the extra headgate[client]"
    ) from missing

T = TypeVar("T")
Socket: TypeAlias = ClientConnection

_log: Final = logging.getLogger("headgate.client")
_SECOND: Final = 1_000_000
_FIRST_PAUSE, _LONGEST_PAUSE = _SECOND // 5, 30 * _SECOND  # before reconnecting
_JITTER: Final = 0.1  # the largest share of a wait that is added to it
_MOST_JITTER: Final = 10 * _SECOND
_HANDSHAKE: Final = 10.0  # seconds for the hub to answer the handshake
_LARGEST: Final = 16 * 1024 * 1024  # bytes in a frame of the hub: a long history
_RESTARTING, _TOO_LARGE = 1012, 1009


class TryLater(Exception):
    """There is no connection for now. `wait` is the hub's, in microseconds."""

    def __init__(self, why: str, wait: int | None = None) -> None:
        self.wait: Final = wait
        super().__init__(why)


class _ConnectWithoutRedirects(connect):
    """Follows no redirect: the token would go along."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class ClientOptions(TypedDict, total=False):
    """The options of a client."""

    on_rate_limited: Callable[[Denial], object] | None
    """Called with each denial."""
    most: int
    """The most frames that wait for their answers, 256 by default. Further calls wait for room."""
    in_flight: int
    """The most frames of one limit that are in flight, 1 by default. More are faster if the hub is far away, but
    around a denial some may overtake others."""
    buffer: int
    """The most incoming messages that wait to be taken, 256 by default."""
    largest: int
    """The largest frame in bytes, 65,536 by default; that is the hub's `max_frame`."""
    clock: Clock | None
    random: Random | None


class ReconnectingClient(Generic[T]):
    """Sends frames in order, as fast as the hub allows, over one connection at a time.

    Frames that the hub hasn't answered when a connection drops are sent again over the next one. `T` is the type of
    incoming messages.
    """

    path: ClassVar[str]
    _options: ClassVar[type] = ClientOptions

    def __init__(self, url: str, options: ClientOptions) -> None:
        known = self._options
        for name in options:
            if name not in known.__annotations__:
                see = f"{known.__module__}.{known.__name__}"
                refuse_option(type(self).__name__, known.__annotations__, name, see=see)
        if not is_hub_url(url, ("http", "https", "ws", "wss")):
            refuse("url", "the address of a hub such as http://127.0.0.1:8080, or wss://hub.example", url)
        self.url: Final = re.sub("^http", "ws", url).rstrip("/") + self.path
        self.connected = False
        """Whether the client is connected and identified."""
        self._on_rate_limited: Final = options.get("on_rate_limited")
        self._room: Final = asyncio.Semaphore(whole("most", options.get("most", 256)))
        self._largest: Final = whole("largest", options.get("largest", 65_536))
        self._in_flight: Final = whole("in_flight", options.get("in_flight", 1))
        clock = options.get("clock")
        self._clock: Final[Clock] = MonotonicClock() if clock is None else clock
        self._random: Final = options.get("random") or Random()  # noqa: S311 - for jitter, not for secrets
        self._wakeup: Final = Wakeup(self._clock)
        self._outbox: Final = Outbox(self._limit_of)
        self._inbox: Final[Inbox[T]] = Inbox(whole("buffer", options.get("buffer", 256)), self._wakeup)
        self._task: asyncio.Task[None] | None = None
        self._pending_calls = 0  # that wait for room, or for their answer
        self._closing = self._closed = False  # takes nothing more; sends nothing more
        self._worked = False  # whether the connection was of any use
        self._failure: Exception | None = None
        self._return_after: int | None = None  # as the hub asked
        self._unreadable = 0  # frames of the hub

    # What differs ----------------------------------------------------------------------------------------------------

    async def _identify(self, socket: Socket) -> None:
        """Do the handshake; raises `Refused` or `TryLater`."""
        raise NotImplementedError

    def _handle(self, frame: bytes | str) -> T | None:
        """Handle a frame of the hub, and return it if it is for the application."""
        raise NotImplementedError

    def _limit_of(self, item: PendingFrame) -> SendLimit:
        """The limit that a frame counts under."""
        raise NotImplementedError

    def _disconnected(self) -> None:
        """The connection is lost, and frames in flight are queued again."""

    # The public interface --------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Frames that the hub hasn't answered yet, sent or not."""
        return len(self._outbox)

    @property
    def dropped(self) -> int:
        """Messages that were dropped because the application didn't take them."""
        return self._inbox.dropped

    @property
    def delay(self) -> float:
        """Seconds until the next queued frame may be sent; 0.0 if none is held back."""
        now = self._clock.now()
        _, when = self._outbox.next(now)
        return 0.0 if when is None else (when - now) / _SECOND

    async def __aenter__(self) -> Self:
        """Connect. While the hub can't be reached, it keeps trying; limit that with `asyncio.timeout`."""
        self._task = asyncio.create_task(self._run())
        try:
            while not self.connected:
                self._check_open()
                await self._wakeup.wait()
        except BaseException:
            await self.close(0)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        await (self.close() if kind is None else self.close(0))

    async def close(self, within: float = 10.0) -> int:
        """Wait until everything is answered, for at most `within` seconds, and close the connection.

        Returns how many calls were not answered; these raise `Unsent`. Further calls are refused. It may be called
        again.
        """
        end = self._clock.now() + microseconds("within", within)
        self._closing = True
        while self._pending_calls and self._failure is None and self._clock.now() < end:
            await self._wakeup.wait(end)
        left, self._closed = self._pending_calls, True
        for item, in_flight in self._outbox.clear():
            how = "sent, but not answered" if in_flight else "not sent"
            _fail(item, Unsent(f"{self.url}: the client was closed; this was {how}", maybe=in_flight))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._wakeup.set()
        return left

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        message = await self._inbox.take(lambda: self._closing or self._failure)
        if message is not None:
            return message
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def _ask(self, item: PendingFrame, wait: bool) -> Any:
        """Send a frame, and return the answer. If the call is cancelled, the frame is not sent, or not again."""
        if len(item.frame) > self._largest:
            raise Refused("too_large", f"expected at most {self._largest} bytes, got {len(item.frame)}")
        self._check_open()
        if not wait and self._room.locked():
            raise QueueFull(f"{self.url}: the queue is full; try again later, or wait for room")
        self._pending_calls += 1
        try:
            async with self._room:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise Unsent(f"{self.url}: the client was closed; this was not sent")
                self._outbox.add(item)
                self._wakeup.set()
                return await item.answer
        except asyncio.CancelledError:
            self._outbox.withdraw(item)  # if it was queued at all
            raise
        finally:
            self._pending_calls -= 1
            self._wakeup.set()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise Unsent(f"{self.url}: the client is closed; make another")
        if self._task is None:
            raise HeadgateError(f"{self.url}: expected an open client; use it with `async with`")

    # Answers ---------------------------------------------------------------------------------------------------------

    def _answered(self, item: PendingFrame, answer: object) -> None:
        self._outbox.passed(item)
        if isinstance(answer, Exception):
            _fail(item, answer)
        elif not item.answer.done():
            item.answer.set_result(answer)
        self._wakeup.set()

    def _denied(self, item: PendingFrame, retry_after_ms: int, reason: str, tier: str = "") -> None:
        wait = wait_us(retry_after_ms)
        self._outbox.denied(item, self._clock.now(), wait, self._extra(wait))
        self._wakeup.set()
        if self._on_rate_limited is None:
            _log.warning("%s: rate limited, waiting %.3f s: %.200r", self.url, wait / _SECOND, reason)
        else:
            self._report(Denial(item.id, wait / _SECOND, reason, tier), self._on_rate_limited)

    def _drop(self, frame: bytes | str, reason: str) -> None:
        """Log a frame of the hub that can't be read, without its content: the 1st, 2nd, 4th, 8th and so on."""
        self._unreadable += 1
        if self._unreadable & (self._unreadable - 1) == 0:
            size = f"{len(frame)} {'characters' if isinstance(frame, str) else 'bytes'}"
            text = "%s: dropped a frame that can't be read, of %s: %s (%d so far)"
            _log.error(text, self.url, size, reason, self._unreadable)

    def _report(self, what: object, to: Callable[[Any], object] | None) -> None:
        _log.info("%s: %s", self.url, what)
        if to is not None:
            try:
                to(what)
            except Exception:  # noqa: BLE001 - the application's error must not end the connection
                _log.exception("%s: the callback for %s has failed", self.url, what)

    def _extra(self, wait: int) -> int:
        """The jitter of a wait, so that not all clients come back at the same moment."""
        return int(self._random.random() * min(wait * _JITTER, _MOST_JITTER))

    # The connection --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Reconnect until the hub refuses for good."""
        failures = 0
        try:
            while True:
                self._worked = False
                self._return_after = None
                why = await self._connection()
                failures = 1 if self._worked else failures + 1
                pause = self._pause(failures)
                _log.warning("%s: no connection: %r; trying again in %.1f s", self.url, why, pause / _SECOND)
                when = self._clock.now() + pause
                while self._clock.now() < when:
                    await self._wakeup.wait(when)
        except Exception as failure:  # noqa: BLE001 - raised in the pending calls
            self._failure = failure
            for item, _ in self._outbox.clear():
                _fail(item, failure)
            self._wakeup.set()

    async def _connection(self) -> str:
        """Open one connection and use it to its end. Returns the reason of the end."""
        options: dict[str, Any] = {"proxy": None} if is_loopback(self.url) else {}
        try:
            async with _ConnectWithoutRedirects(
                self.url, compression=None, max_size=_LARGEST, close_timeout=2, open_timeout=_HANDSHAKE, **options
            ) as socket:
                async with asyncio.timeout(_HANDSHAKE):
                    await self._identify(socket)
                self.connected = True
                self._wakeup.set()
                began = self._clock.now()
                try:
                    await self._exchange(socket)
                finally:
                    self._worked = self._worked or self._clock.now() - began > _LONGEST_PAUSE
        except TryLater as later:
            self._return_after = later.wait
            return str(later)
        except InvalidStatus as refusal:
            return self._explain_status(refusal)
        except ConnectionClosed as closed:
            return self._explain_close(closed)
        except ssl.SSLCertVerificationError as error:
            raise Refused("certificate", f"{self.url}: it isn't trusted: {error.verify_message}") from error
        except (OSError, EOFError, WebSocketException) as error:
            return str(error) or type(error).__name__
        finally:
            self.connected = False
            self._outbox.lost()
            self._disconnected()
        return "it was closed"

    def _explain_status(self, refusal: InvalidStatus) -> str:
        answer = refusal.response
        if answer.status_code not in (408, 429) and answer.status_code < 500:
            error, detail = f"status_{answer.status_code}", "expected a hub's socket there; is that its address?"
            with suppress(ValueError, KeyError, TypeError):  # the body of another server
                body = json.loads(answer.body)
                error, detail = str(body["error"]), str(body["detail"])
            raise Refused(error, f"{self.url}: {detail:.1000}") from refusal
        seconds = parse_retry_after(answer.headers.get("Retry-After", ""))
        if seconds is not None:
            self._return_after = wait_us(seconds * 1000)
        return f"HTTP status {answer.status_code}"

    def _explain_close(self, closed: ConnectionClosed) -> str:
        if closed.rcvd is None:
            return "it was cut off"
        code, reason = closed.rcvd.code, closed.rcvd.reason
        if code == _TOO_LARGE:
            self._give_up_largest(reason)
        if code == _RESTARTING and (found := re.search(r"retry in (\d{1,9}) ms", reason, re.ASCII)):
            self._return_after = wait_us(int(found[1]))
        return f"closed with {code} {reason!r}"

    def _give_up_largest(self, reason: str) -> None:
        """Fail the largest frame: the hub closes the connection on one that is far too large."""
        item = max(self._outbox.in_flight.values(), key=lambda one: len(one.frame), default=None)
        if item is not None:
            self._answered(item, Refused("too_large", reason or "the hub closed the connection because of it"))

    def _pause(self, failures: int) -> int:
        """Microseconds until the next attempt: as the hub asked, or longer with each failure."""
        if self._return_after is not None:
            return self._return_after + self._extra(self._return_after)
        longest = min(_FIRST_PAUSE << min(failures - 1, 20), _LONGEST_PAUSE)
        return int(longest * (0.5 + self._random.random() / 2))

    async def _exchange(self, socket: Socket) -> None:
        """Read and write until either fails."""
        tasks = [asyncio.create_task(self._write(socket)), asyncio.create_task(self._read(socket))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _write(self, socket: Socket) -> NoReturn:
        while True:
            now = self._clock.now()
            item, when = self._outbox.next(now)
            if item is None:
                await self._wakeup.wait(when)
            else:
                self._outbox.sent(item, now)
                self._wakeup.set()  # a reader that waits for room goes on
                await socket.send(item.frame)

    async def _read(self, socket: Socket) -> NoReturn:
        while True:
            message = self._handle(await socket.recv())
            self._worked = True
            if message is not None:
                # Answers to frames in flight come the same way, and the application may wait for one.
                await self._inbox.wait_for_room(lambda: self._outbox.in_flight)
                if self._inbox.put(message) == 1:
                    _log.warning("%s: the application doesn't take its messages; the oldest are dropped", self.url)


def checked_token(token: object) -> str:
    """A valid token."""
    if not isinstance(token, str) or not 1 <= len(token) <= 256 or not token.isprintable():
        raise HeadgateError("token: expected the one that the agent got when it was registered, 1 to 256 characters")
    return token


def _fail(item: PendingFrame, error: Exception) -> None:
    if not item.answer.done():
        item.answer.set_exception(error)


def wait_us(milliseconds: int) -> int:
    """A wait that the hub asked for, in microseconds, within bounds."""
    return min(max(milliseconds, 1) * 1000, LONGEST)
