"""A client that reconnects: it repeats unanswered frames, and never sends faster than the hub allows.

`RelayClient` and `HubClient` are built on it. Each has its own handshake, frames and limits. Only a refusal ends a
client; whatever else happens is a lost connection. tests/client/client_cases.json has the rules, for TypeScript too.
"""

import asyncio
import json
import logging
import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, NoReturn, Self, TypeAlias, TypedDict, TypeVar

from headgate.client.backoff import LASTING, ReconnectBackoff, asked_wait
from headgate.client.inbox import Inbox, Wakeup
from headgate.client.outbox import LONGEST_REASON, Denial, Outbox, PendingFrame, QueueFull, Refused, SendLimit, Unsent
from headgate.client.url import is_hub_url, is_loopback
from headgate.errors import HeadgateError, refuse, refuse_option
from headgate.http import is_temporary, parse_retry_after
from headgate.limits.clock import Clock, MonotonicClock
from headgate.limits.numbers import microseconds, whole

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
except ImportError as missing:
    raise HeadgateError(
        f"headgate.client: expected the package websockets, got: {missing}; in a checkout: pip install '.[client]'"
    ) from missing

T = TypeVar("T")
R = TypeVar("R")
Socket: TypeAlias = ClientConnection

_log: Final = logging.getLogger("headgate.client")
_SECOND: Final = 1_000_000
_DENIALS_AS_TOLD: Final = 3  # of one frame; then it backs off, whatever the hub says
_CLOSE_TIMEOUT: Final = 2.0  # seconds
_LARGEST: Final = 16 * 1024 * 1024  # bytes in a frame of the hub: a long history
_TOO_LARGE: Final = 1009
_REFUSALS: Final = ("unauthorized", "invalid")


class TryLater(Exception):
    """There is no connection for now. `wait` is the hub's, in microseconds."""

    def __init__(self, why: str, wait: int | None = None) -> None:
        self.wait: Final = wait
        super().__init__(why)


@dataclass(frozen=True)
class Disconnected:
    """A connection was lost, or could not be made. The client tries again."""

    reason: str
    wait: float
    """Seconds until the next attempt."""


class _Connection(ClientConnection):
    """Aborts the TCP connection if the hub doesn't close it within `_CLOSE_TIMEOUT` of the closing handshake."""

    _closing = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.protocol.close_expected() and not self._closing:
            self._closing = True
            self.loop.call_later(_CLOSE_TIMEOUT, self.transport.abort)


class _ConnectWithoutRedirects(connect):
    """Follows no redirect: the token would go along."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class ClientOptions(TypedDict, total=False):
    """The options of a client."""

    on_rate_limited: Callable[[Denial], object] | None
    """Called with each denial."""
    on_disconnected: Callable[[Disconnected], object] | None
    """Called with each connection that was lost or could not be made."""
    answer_within: float
    """Seconds that the hub has to answer a frame or a handshake, 30 by default. Then the connection counts as lost."""
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


class ReconnectingClient(ABC, Generic[T]):
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
        address = re.sub("^http", "ws", url, flags=re.IGNORECASE).rstrip("/")
        self.url: Final = address.removesuffix(self.path) + self.path
        self.connected = False
        """Whether the client is connected and identified."""
        self.unreadable = 0
        """Frames of the hub that could not be read, and were dropped."""
        self._on_rate_limited: Final = options.get("on_rate_limited")
        self._on_disconnected: Final = options.get("on_disconnected")
        self._answer_within: Final = microseconds("answer_within", options.get("answer_within", 30.0))
        if not self._answer_within:
            refuse("answer_within", "a number of seconds above 0", options.get("answer_within"))
        self._room: Final = asyncio.Semaphore(whole("most", options.get("most", 256)))
        self._largest: Final = whole("largest", options.get("largest", 65_536))
        self._in_flight: Final = whole("in_flight", options.get("in_flight", 1))
        clock = options.get("clock")
        self._clock: Final[Clock] = MonotonicClock() if clock is None else clock
        self._backoff: Final = ReconnectBackoff(options.get("random") or Random())  # noqa: S311 - for jitter, not for secrets
        self._wakeup: Final = Wakeup(self._clock)
        self._outbox: Final = Outbox(self._limit_of)
        self._inbox: Final[Inbox[T]] = Inbox(whole("buffer", options.get("buffer", 256)), self._wakeup)
        self._task: asyncio.Task[None] | None = None
        self._unanswered: Final[set[PendingFrame]] = set()  # of calls that wait for room, or for their answer
        self._closing = self._closed = False  # takes nothing more; sends nothing more
        self._socket: Socket | None = None
        self._worked = False  # whether the connection was of any use
        self._ending = False  # whether nothing more can be written to it
        self._refusal: Refused | None = None
        self._return_after: int | None = None  # as the hub asked

    # What differs ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def _identify(self, socket: Socket) -> None:
        """Do the handshake; raises `Refused` or `TryLater`."""

    @abstractmethod
    def _handle(self, frame: bytes | str) -> T | None:
        """Handle a frame of the hub, and return it if it is for the application."""

    @abstractmethod
    def _limit_of(self, item: PendingFrame) -> SendLimit:
        """The limit that a frame counts under."""

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
        if self._task is not None:
            raise HeadgateError(f"{self.url}: expected a new client; this one was opened before")
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
        again. If it is cancelled, nothing more is sent.
        """
        end = self._clock.now() + microseconds("within", within)
        self._closing = True
        try:
            while self._unanswered and self._refusal is None and self._clock.now() < end:
                await self._wakeup.wait(end)
        finally:
            left = self._stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        return left

    def _stop(self) -> int:
        """Send nothing more, and fail the calls that were not answered. Returns how many there were."""
        self._closed = True
        for item in self._outbox.clear():
            how = "sent, but not answered" if item.maybe else "not sent"
            _fail(item, Unsent(f"{self.url}: the client was closed; this was {how}", maybe=item.maybe))
        if self._task is not None:
            self._task.cancel()
        self._wakeup.set()
        return len(self._unanswered)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        message = await self._inbox.take(lambda: self._closing or self._refusal)
        if message is not None:
            return message
        self._check_refusal()
        raise StopAsyncIteration

    async def _ask(self, item: PendingFrame, wait: bool) -> Any:
        """Send a frame, and return the answer. If the call is cancelled, the frame is not sent, or not again."""
        if len(item.frame) > self._largest:
            raise Refused("too_large", f"expected at most {self._largest} bytes, got {len(item.frame)}")
        self._check_open()
        if not wait and self._room.locked():
            raise QueueFull(f"{self.url}: the queue is full; try again later, or wait for room")
        self._unanswered.add(item)
        try:
            async with self._room:
                self._check_refusal()
                if self._closed:
                    raise Unsent(f"{self.url}: the client was closed; this was not sent")
                self._outbox.add(item)
                self._wakeup.set()
                return await item.answer
        except asyncio.CancelledError:
            self._outbox.withdraw(item)  # if it was queued at all
            raise
        finally:
            self._unanswered.discard(item)
            self._wakeup.set()

    def _check_refusal(self) -> None:
        if self._refusal is not None:
            raise copy(self._refusal)  # an exception that is raised twice keeps the traces of both

    def _check_open(self) -> None:
        self._check_refusal()
        if self._closing:
            raise Unsent(f"{self.url}: the client is closed; make another")
        if self._task is None:
            raise HeadgateError(f"{self.url}: expected an open client; use it with `async with`")

    # Answers ---------------------------------------------------------------------------------------------------------

    def _answered(self, item: PendingFrame, answer: object) -> None:
        self._worked = True
        self._unanswered.discard(item)  # its call goes on a little later
        self._outbox.passed(item)
        if isinstance(answer, Exception):
            _fail(item, answer)
        elif not item.answer.done():
            item.answer.set_result(answer)
        self._wakeup.set()

    def _denied(self, item: PendingFrame, retry_after_ms: int, reason: str, tier: str = "") -> None:
        wait = asked_wait(retry_after_ms)
        if item.denials >= _DENIALS_AS_TOLD:
            wait = max(wait, self._backoff.pause(item.denials - _DENIALS_AS_TOLD + 1))
        self._outbox.denied(item, self._clock.now(), wait, self._backoff.jitter(wait))
        self._wakeup.set()
        if self._on_rate_limited is None:
            _log.warning("%s: rate limited, waiting %.3f s: %.200r", self.url, wait / _SECOND, reason)
        else:
            self._report(self._on_rate_limited, Denial(item.id, wait / _SECOND, reason, tier))

    def _drop(self, frame: bytes | str, reason: str) -> None:
        """Log a frame of the hub that can't be read, without its content: the 1st, 2nd, 4th, 8th and so on."""
        self.unreadable += 1
        if self.unreadable & (self.unreadable - 1) == 0:
            size = f"{len(frame)} {'characters' if isinstance(frame, str) else 'bytes'}"
            text = "%s: dropped a frame that can't be read, of %s: %s (%d so far)"
            _log.error(text, self.url, size, reason, self.unreadable)

    def _report(self, listener: Callable[[Any], object] | None, event: object) -> None:
        _log.info("%s: %s", self.url, event)
        self._notify(listener, event)

    def _notify(self, listener: Callable[[Any], object] | None, event: object) -> None:
        if listener is not None:
            try:
                listener(event)
            except (Exception, asyncio.CancelledError):  # noqa: BLE001 - the application's error must not end the client
                _log.exception("%s: the callback for %s has failed", self.url, event)

    # The connection --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Reconnect until the hub refuses for good."""
        failures = 0
        while True:
            self._worked = False
            self._return_after = None
            try:
                why = await self._connection()
            except Refused as refusal:
                self._refusal = copy(refusal)
                for item in self._outbox.clear():
                    _fail(item, copy(refusal))
                self._wakeup.set()
                return
            except Exception as error:  # noqa: BLE001 - whatever it was, the next connection may be better
                _log.exception("%s: the connection failed unexpectedly", self.url)
                why = repr(error)
            why = why[:LONGEST_REASON]
            failures = 1 if self._worked else failures + 1
            pause = self._backoff.pause(failures, self._return_after)
            _log.warning("%s: no connection: %r; trying again in %.1f s", self.url, why, pause / _SECOND)
            self._notify(self._on_disconnected, Disconnected(why, pause / _SECOND))
            when = self._clock.now() + pause
            while self._clock.now() < when:
                await self._wakeup.wait(when)

    async def _connection(self) -> str:
        """Open one connection and use it to its end. Returns the reason of the end; raises `Refused`."""
        try:
            try:
                socket = await self._in_time(self._open())
                self.connected = True
                self._wakeup.set()
                await self._exchange(socket)
            finally:
                await self._hang_up()
        except TryLater as later:
            self._return_after = self._return_after if later.wait is None else later.wait
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

    async def _open(self) -> Socket:
        """Connect, and do the handshake."""
        options: dict[str, Any] = {"proxy": None} if is_loopback(self.url) else {}
        self._socket = await _ConnectWithoutRedirects(
            self.url,
            create_connection=_Connection,
            compression=None,
            max_size=_LARGEST,
            close_timeout=_CLOSE_TIMEOUT,
            open_timeout=None,
            **options,
        )
        await self._identify(self._socket)
        return self._socket

    async def _hang_up(self) -> None:
        """Close the connection, if there is one; at once if this is cancelled.

        A hub that reads nothing more takes no close either: `socket.close` would wait until it has written.
        """
        socket, self._socket = self._socket, None
        if socket is not None:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await socket.close()
            except TimeoutError:
                pass
            finally:
                socket.transport.abort()

    async def _in_time(self, work: Coroutine[Any, Any, R]) -> R:
        """Await something of the hub, for as long as it has for an answer."""
        end = self._clock.now() + self._answer_within
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._wakeup.set())
        try:
            while not task.done():
                self._check_deadline(end)
                await self._wakeup.wait(end)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.result()

    def _check_deadline(self, when: int) -> None:
        if self._clock.now() >= when:
            if self._socket is not None:
                self._socket.transport.abort()  # it would not answer the close either
            raise TryLater(f"no answer within {self._answer_within / _SECOND:g} s")

    def _explain_status(self, refusal: InvalidStatus) -> str:
        answer = refusal.response
        if not is_temporary(answer.status_code):
            error, detail = f"status_{answer.status_code}", "no hub answers at this address; check the URL"
            with suppress(ValueError, KeyError, TypeError, RecursionError):  # the body of another server
                body = json.loads(answer.body)
                error, detail = str(body["error"]), str(body["detail"])
            raise Refused(error[:100], f"{self.url}: {detail[:LONGEST_REASON]}") from refusal
        seconds = parse_retry_after(next(iter(answer.headers.get_all("Retry-After")), ""))
        if seconds is not None:
            self._return_after = asked_wait(seconds * 1000)
        return f"HTTP status {answer.status_code}"

    def _explain_close(self, closed: ConnectionClosed) -> str:
        if closed.rcvd is None:
            return "it was cut off"
        code, reason = closed.rcvd.code, closed.rcvd.reason
        if code == _TOO_LARGE:
            self._give_up_largest(reason)
        if found := re.search(r"retry in (\d+) ms", reason, re.ASCII):
            self._return_after = asked_wait(int(found[1]))
        return f"closed with {code} {reason!r}"

    def _give_up_largest(self, reason: str) -> None:
        """Fail the largest frame: the hub closes the connection on one that is far too large."""
        item = max(self._outbox.in_flight.values(), key=lambda one: len(one.frame), default=None)
        if item is not None:
            self._answered(item, Refused("too_large", reason or "the hub closed the connection because of it"))

    async def _exchange(self, socket: Socket) -> None:
        """Read and write until either fails, or an answer doesn't come."""
        read, write = asyncio.create_task(self._read(socket)), asyncio.create_task(self._write(socket))
        tasks = [read, write, asyncio.create_task(self._expire())]
        began, self._ending = self._clock.now(), False
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if write.done():  # what came before is still to be read
                self._ending = True
                self._wakeup.set()
                socket.transport.abort()
                await asyncio.wait([read], timeout=_CLOSE_TIMEOUT)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._worked = self._worked or self._clock.now() - began > LASTING
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

    async def _expire(self) -> NoReturn:
        """Wait until an answer is overdue."""
        while True:
            sent = self._outbox.oldest_sent()
            if sent is not None:
                self._check_deadline(sent + self._answer_within)
            await self._wakeup.wait(None if sent is None else sent + self._answer_within)

    async def _read(self, socket: Socket) -> NoReturn:
        while True:
            message = self._handle(await socket.recv())
            if message is not None:
                self._worked = True
                try:
                    # Answers to frames in flight come the same way, and the application may wait for one.
                    await self._inbox.wait_for_room(lambda: self._outbox.in_flight or self._ending)
                finally:  # also if the connection ends meanwhile
                    if self._inbox.put(message) == 1:
                        _log.warning("%s: the application doesn't take its messages; the oldest are dropped", self.url)


def refusal_of_handshake(code: str, detail: str, where: str) -> Exception:
    """The meaning of an error in answer to the handshake: a refusal for good, or a hub that can't for now."""
    return Refused(code, f"{where}: {detail}") if code in _REFUSALS else TryLater(f"{code}: {detail}")


def _fail(item: PendingFrame, error: Exception) -> None:
    if not item.answer.done():
        item.answer.set_exception(error)
