"""One connection that is kept: made again when it drops, with all that was not answered, and never faster than allowed.

`RelayClient` and `HubClient` are this, with an introduction, an ear and lanes of their own.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Callable
from ipaddress import ip_address
from random import Random
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, NoReturn, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from headgate.client.inbox import Bell, Inbox
from headgate.client.outbox import LONGEST, Denial, Item, Lane, Outbox, QueueFull, Refused, Unsent
from headgate.errors import HeadgateError, refuse
from headgate.http import parse_retry_after
from headgate.limits.clock import Clock, MonotonicClock
from headgate.limits.numbers import microseconds, whole

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
except ImportError as missing:
    raise HeadgateError(
        f"headgate.client: expected the package websockets, got: {missing}; pip install 'headgate[client]'"
    ) from missing

T = TypeVar("T")
Socket: TypeAlias = ClientConnection

_log: Final = logging.getLogger("headgate.client")
_SECOND: Final = 1_000_000
_FIRST_PAUSE, _LONGEST_PAUSE = _SECOND // 5, 30 * _SECOND  # before it connects again
_JITTER: Final = 0.1  # of a wait, at most, is added to it
_MOST_JITTER: Final = 10 * _SECOND
_GREETING: Final = 10.0  # seconds for the hub to answer the introduction
_LARGEST: Final = 16 * 1024 * 1024  # bytes of what the hub may say at once: a long history
_RESTARTING, _TOO_LARGE = 1012, 1009


class Later(Exception):
    """The connection can't be had now. `wait` is what the hub said, in microseconds."""

    def __init__(self, why: str, wait: int | None = None) -> None:
        self.wait: Final = wait
        super().__init__(why)


class _Dial(connect):
    """Follows nobody elsewhere: the token would go along."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class Caller(Generic[T]):
    """Sends what it is given as fast as the hub lets it, in order, over one connection at a time.

    Whatever the hub hasn't answered when a connection drops is sent again over the next one. `T` is what comes in.
    """

    path: ClassVar[str]

    def __init__(
        self,
        url: str,
        *,
        on_rate_limited: Callable[[Denial], object] | None,
        most: int,
        buffer: int,
        largest: int,
        clock: Clock | None,
        random: Random | None,
    ) -> None:
        self.url: Final = _url(url) + self.path
        self.connected = False
        """Whether the hub knows this client now."""
        self._on_rate_limited: Final = on_rate_limited
        self._room: Final = asyncio.Semaphore(whole("most", most))
        self._largest: Final = whole("largest", largest)
        self._clock: Final[Clock] = MonotonicClock() if clock is None else clock
        self._random: Final = Random() if random is None else random  # noqa: S311 - to spread, not to hide
        self._bell: Final = Bell(self._clock)
        self._outbox: Final = Outbox(self._lane)
        self._inbox: Final[Inbox[T]] = Inbox(whole("buffer", buffer), self._bell)
        self._task: asyncio.Task[None] | None = None
        self._asking = 0  # calls that wait for room, or for their answer
        self._closing = self._closed = False  # it takes nothing more; nothing is sent any more
        self._stood = False  # whether the connection was good for anything
        self._failure: Exception | None = None
        self._return_after: int | None = None  # as the hub has said

    # What differs ----------------------------------------------------------------------------------------------------

    async def _introduce(self, socket: Socket) -> None:
        """Say who it is, and return when the hub knows; else `Refused`, or `Later`."""
        raise NotImplementedError

    def _hear(self, frame: bytes | str) -> T | None:
        """Take what the hub says, and return it if it is for the application."""
        raise NotImplementedError

    def _lane(self, item: Item) -> Lane:
        """The lane that something is sent over."""
        raise NotImplementedError

    def _parted(self) -> None:
        """The connection is gone, and what was under way is in the line again."""

    # For everybody ---------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How much the hub hasn't answered yet, sent or not."""
        return len(self._outbox)

    @property
    def dropped(self) -> int:
        """Messages that came and were not kept, since the application didn't take them."""
        return self._inbox.dropped

    @property
    def held(self) -> float:
        """Seconds for which all that is yet to be sent is held back; 0.0 when nothing is."""
        now = self._clock.now()
        _, when = self._outbox.next(now)
        return 0.0 if when is None else (when - now) / _SECOND

    async def __aenter__(self) -> Self:
        """Connect. While there is no hub it is tried again and again: `asyncio.timeout` ends that."""
        self._task = asyncio.create_task(self._run())
        try:
            while not self.connected:
                self._check_open()
                await self._bell.wait()
        except BaseException:
            await self.close(0)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        await (self.close() if kind is None else self.close(0))

    async def close(self, within: float = 10.0) -> int:
        """Wait until all is sent and answered, but only so many seconds, and close the connection.

        Returns how much was not answered; whoever waits for one of these gets `Unsent`. From now on nothing more is
        taken. It may be called again.
        """
        end = self._clock.now() + microseconds("within", within)
        self._closing = True
        while self._asking and self._failure is None and self._clock.now() < end:
            await self._bell.wait(end)
        left, self._closed = self._asking, True
        for item, under_way in self._outbox.clear():
            how = "sent, but not answered" if under_way else "not sent"
            _fail(item, Unsent(f"{self.url}: the client was closed; this was {how}", maybe=under_way))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._bell.ring()
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

    async def _ask(self, item: Item, wait: bool) -> Any:
        """Have something sent, and return the answer. If the caller is cancelled it is not sent, or not again."""
        if len(item.frame) > self._largest:
            raise Refused("too_large", f"expected at most {self._largest} bytes, got {len(item.frame)}")
        self._check_open()
        if not wait and self._room.locked():
            raise QueueFull(f"{self.url}: as much waits to be sent as may; try again later, or wait for room")
        self._asking += 1
        try:
            async with self._room:
                return await self._wait_for_answer(item)
        finally:
            self._asking -= 1
            self._bell.ring()

    async def _wait_for_answer(self, item: Item) -> Any:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Unsent(f"{self.url}: the client was closed; this was not sent")
        self._outbox.add(item)
        self._bell.ring()
        try:
            return await item.answer
        except asyncio.CancelledError:
            self._outbox.withdraw(item)
            raise

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise Unsent(f"{self.url}: the client is closed; make another")
        if self._task is None:
            raise HeadgateError(f"{self.url}: expected a client that is open; use it by `async with`")

    # Answers ---------------------------------------------------------------------------------------------------------

    def _answered(self, item: Item, answer: object) -> None:
        self._outbox.passed(item)
        if isinstance(answer, Exception):
            _fail(item, answer)
        elif not item.answer.done():
            item.answer.set_result(answer)
        self._bell.ring()

    def _denied(self, item: Item, retry_after_ms: int, reason: str, tier: str = "") -> None:
        wait = told(retry_after_ms)
        self._outbox.denied(item, self._clock.now(), wait, self._extra(wait))
        self._bell.ring()
        self._report(Denial(item.id, wait / _SECOND, reason, tier), self._on_rate_limited)

    def _report(self, what: object, to: Callable[[Any], object] | None) -> None:
        _log.info("%s: %s", self.url, what)
        if to is not None:
            try:
                to(what)
            except Exception:  # noqa: BLE001 - the application's own, which must not end the connection
                _log.exception("%s: what was to be told of %s has failed", self.url, what)

    def _extra(self, wait: int) -> int:
        """What is added to a wait, so that not all come back at the same moment."""
        return int(self._random.random() * min(wait * _JITTER, _MOST_JITTER))

    # The connection --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Connect again and again, until the hub refuses for good."""
        failures = 0
        try:
            while True:
                self._stood = False
                self._return_after = None
                why = await self._connection()
                failures = 1 if self._stood else failures + 1
                pause = self._pause(failures)
                _log.warning("%s: no connection: %r; trying again in %.1f s", self.url, why, pause / _SECOND)
                when = self._clock.now() + pause
                while self._clock.now() < when:
                    await self._bell.wait(when)
        except Exception as failure:  # noqa: BLE001 - whoever waits is told
            self._failure = failure
            for item, _ in self._outbox.clear():
                _fail(item, failure)
            self._bell.ring()

    async def _connection(self) -> str:
        """Make one connection and use it to its end; why it has ended."""
        options: dict[str, Any] = {"proxy": None} if _is_loopback(self.url) else {}
        try:
            async with _Dial(
                self.url, compression=None, max_size=_LARGEST, close_timeout=2, open_timeout=_GREETING, **options
            ) as socket:
                async with asyncio.timeout(_GREETING):
                    await self._introduce(socket)
                self.connected = True
                self._bell.ring()
                began = self._clock.now()
                try:
                    await self._converse(socket)
                finally:
                    self._stood = self._stood or self._clock.now() - began > _LONGEST_PAUSE
        except Later as later:
            self._return_after = later.wait
            return str(later)
        except InvalidStatus as refusal:
            return self._turned_away(refusal)
        except ConnectionClosed as closed:
            return self._ended(closed)
        except ssl.SSLCertVerificationError as error:
            raise Refused("certificate", f"{self.url}: it isn't trusted: {error.verify_message}") from error
        except (OSError, EOFError, WebSocketException) as error:
            return str(error) or type(error).__name__
        finally:
            self.connected = False
            self._outbox.lost()
            self._parted()
        return "it was closed"

    def _turned_away(self, refusal: InvalidStatus) -> str:
        answer = refusal.response
        if answer.status_code not in (408, 429) and answer.status_code < 500:
            raise Refused(
                f"status_{answer.status_code}", f"{self.url}: expected a hub's socket there; is that its address?"
            ) from refusal
        seconds = parse_retry_after(answer.headers.get("Retry-After", ""))
        if seconds is not None:
            self._return_after = told(seconds * 1000)
        return f"HTTP status {answer.status_code}"

    def _ended(self, closed: ConnectionClosed) -> str:
        if closed.rcvd is None:
            return "it was cut off"
        code, reason = closed.rcvd.code, closed.rcvd.reason
        if code == _TOO_LARGE:
            self._give_up_largest(reason)
        if code == _RESTARTING and (found := re.search(r"retry in (\d{1,9}) ms", reason, re.ASCII)):
            self._return_after = told(int(found[1]))
        return f"closed with {code} {reason!r}"

    def _give_up_largest(self, reason: str) -> None:
        """The hub hangs up on what is far too large: it would do so again and again."""
        item = max(self._outbox.under_way.values(), key=lambda one: len(one.frame), default=None)
        if item is not None:
            self._answered(item, Refused("too_large", reason or "the hub hung up because of it"))

    def _pause(self, failures: int) -> int:
        """Microseconds until it is tried again: as the hub said, or longer from time to time."""
        if self._return_after is not None:
            return self._return_after + self._extra(self._return_after)
        longest = min(_FIRST_PAUSE << min(failures - 1, 20), _LONGEST_PAUSE)
        return int(longest * (0.5 + self._random.random() / 2))

    async def _converse(self, socket: Socket) -> None:
        """Read and write, until one of them can't any more."""
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
                await self._bell.wait(when)
            else:
                self._outbox.sent(item, now)
                self._bell.ring()  # a reader that waits for room reads on now
                await socket.send(item.frame)

    async def _read(self, socket: Socket) -> NoReturn:
        while True:
            message = self._hear(await socket.recv())
            self._stood = True
            if message is not None:
                # The answer to what is under way comes the same way, and the application may be waiting for it.
                await self._inbox.wait_for_room(lambda: self._outbox.under_way)
                if self._inbox.put(message) == 1:
                    _log.warning("%s: the application doesn't take its messages: the oldest are dropped", self.url)


def checked_token(token: object) -> str:
    """A token as hubs give them."""
    if not isinstance(token, str) or not 1 <= len(token) <= 256 or not token.isprintable():
        raise HeadgateError("token: expected the one that the agent got when it was registered, 1 to 256 characters")
    return token


def _fail(item: Item, error: Exception) -> None:
    if not item.answer.done():
        item.answer.set_exception(error)


def told(milliseconds: int) -> int:
    """A wait that the hub has told, in microseconds."""
    return min(max(milliseconds, 1) * 1000, LONGEST)


def _url(given: object) -> str:
    """Where a hub's sockets are, from its address, which may stand below a path."""
    expected = "the address of a hub such as http://127.0.0.1:8080, or wss://hub.example"
    if not isinstance(given, str):
        refuse("url", expected, given)
    try:
        parts = urlsplit(given)
        good = parts.scheme in ("http", "https", "ws", "wss") and parts.hostname and (parts.port is None or parts.port)
        good = good and given.isascii() and given.isprintable() and " " not in given
        good = good and not (parts.query or parts.fragment or parts.username or parts.password)
    except ValueError:
        good = False
    if not good:
        refuse("url", expected, given)
    return re.sub("^http", "ws", given).rstrip("/")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
