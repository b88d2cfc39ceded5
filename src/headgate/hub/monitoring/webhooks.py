"""Webhooks: each alert, of an agent or an account, is posted to some URLs, in order, and retried until it is accepted.

Every receiver has a queue of its own, so that a slow or unreachable one holds up no other. `send` only fills these
queues. Pauses are on the gate's clock, timeouts on the machine's.
"""

import asyncio
import hashlib
import hmac
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec
import structlog
from msgspec import Struct

from headgate._version import VERSION
from headgate.errors import HeadgateError
from headgate.http import is_temporary, parse_retry_after
from headgate.hub.monitoring.account_alerts import AccountAlert, AccountAlertEvent
from headgate.hub.monitoring.alerts import Alert, AlertEvent
from headgate.hub.timer import Timer
from headgate.limits.clock import Clock

MAX_QUEUED: Final = 1000
"""Notices queued for one receiver; then the oldest is dropped."""

_TIMEOUT: Final = 10.0  # seconds for one attempt, up to the status
_FIRST_PAUSE: Final = 1.0  # seconds until the second attempt; then twice as long each time
_LONGEST_PAUSE: Final = 30.0  # seconds between two attempts
_MAX_RETRY_AFTER: Final = 300.0  # seconds that a receiver may ask for by Retry-After
_RETRY_FOR: Final = 3600  # seconds

_log = structlog.get_logger("headgate.hub")


class Notice(Struct, frozen=True):
    """The body of a request."""

    delivery: str
    """The same in every attempt, so that receivers can drop duplicates."""
    event: AlertEvent | AccountAlertEvent
    alert: Alert | AccountAlert


class _Delivery(Struct, frozen=True):
    name: str
    body: bytes
    until: int
    """Microseconds of the clock."""


class Webhooks:
    """Sends alerts to some URLs. With a secret, the requests are signed."""

    def __init__(self, urls: Sequence[str], secret: str, clock: Clock, within: float) -> None:
        self._clock, self._within = clock, within
        self._receivers: Final = [_Receiver(url, secret.encode(), clock) for url in urls]
        self._client: httpx.AsyncClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._deadline: float | None = None

    @property
    def delivered(self) -> int:
        """The number of accepted notices; one for two receivers counts twice, here and below."""
        return sum(receiver.delivered for receiver in self._receivers)

    @property
    def failed(self) -> int:
        """The number of notices given up."""
        return sum(receiver.failed for receiver in self._receivers)

    @property
    def dropped(self) -> int:
        """The number of notices never sent, since the queue was full."""
        return sum(receiver.dropped for receiver in self._receivers)

    @property
    def waiting(self) -> int:
        """The number of notices queued or being sent."""
        return sum(receiver.waiting for receiver in self._receivers)

    def send(self, event: AlertEvent | AccountAlertEvent, alert: Alert | AccountAlert) -> None:
        """Queue an alert for all receivers."""
        if self._receivers:
            name = f"{alert.alert_id}-{alert.times}-{event.rpartition('.')[2]}"
            body = msgspec.json.encode(Notice(name, event, alert))
            delivery = _Delivery(name, body, self._clock.now() + _RETRY_FOR * 1_000_000)
            for receiver in self._receivers:
                receiver.put(delivery)

    async def start(self) -> None:
        if self._receivers:
            client = self._client = _client()
            self._tasks = [asyncio.create_task(receiver.run(client)) for receiver in self._receivers]

    def hurry(self) -> None:
        """The hub is about to stop: try every queued notice once more, at once, within the time left."""
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._within
            for receiver in self._receivers:
                receiver.hurry()

    async def close(self) -> None:
        """Stop when the queues are empty or the time is up."""
        self.hurry()
        for receiver in self._receivers:
            receiver.close()
        if self._tasks:
            left = (self._deadline or 0) - asyncio.get_running_loop().time()
            _, late = await asyncio.wait(self._tasks, timeout=max(left, 0))
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for receiver in self._receivers:
            receiver.abandon("the hub stops")
        if self._client is not None:
            await self._client.aclose()


class _Receiver:
    """One URL and its queue."""

    def __init__(self, url: str, secret: bytes, clock: Clock) -> None:
        self._url: Final = _url(url)
        self._secret, self._clock = secret, clock
        self._log: Final = _log.bind(receiver=_shown(url))
        self.delivered = self.failed = self.dropped = 0
        self._queue: Final[deque[_Delivery]] = deque()
        self._wake: Final = asyncio.Event()
        self._resume: Final = asyncio.Event()
        self._hurried = self._closing = False
        self._sending: _Delivery | None = None
        self._away = False  # whether it was logged that it can't be reached
        self._full = False  # whether it was logged that notices are dropped

    @property
    def waiting(self) -> int:
        return len(self._queue) + (self._sending is not None)

    def put(self, delivery: _Delivery) -> None:
        self._queue.append(delivery)
        if len(self._queue) > MAX_QUEUED:
            self._queue.popleft()
            self.dropped += 1
            if not self._full:
                self._full = True
                self._log.error("too many webhooks wait: the oldest are dropped", waiting=MAX_QUEUED)
        self._wake.set()

    def hurry(self) -> None:
        self._hurried = True
        self._resume.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()

    async def run(self, client: httpx.AsyncClient) -> None:
        """Deliver one notice after the other, until it is closed and the queue is empty."""
        while not (self._closing and not self._queue):
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._sending = self._queue.popleft()
            try:
                await self._deliver(client, self._sending)
            except Exception:  # noqa: BLE001 - the next one may succeed
                self._log.exception("a webhook could not be sent")
                self.failed += 1
            self._sending = None

    async def _deliver(self, client: httpx.AsyncClient, delivery: _Delivery) -> None:
        """Try until the notice is accepted, refused for good, or too old."""
        pause = _FIRST_PAUSE
        while True:
            last = self._hurried
            problem, wait = await self._try(client, delivery)
            if not problem:
                self._accepted()
                return
            if wait is None or self._clock.now() >= delivery.until:
                self._give_up(1, problem)
                return
            if last:
                self.abandon(problem)
                return
            self._log_away(problem)
            if not self._hurried:
                await self._pause(max(wait, pause * random.uniform(0.5, 1)))  # noqa: S311 - no secret
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _try(self, client: httpx.AsyncClient, delivery: _Delivery) -> tuple[str, float | None]:
        """Post a notice once; the problem, if any, and the seconds that the receiver asks to wait (None: for ever)."""
        request = client.stream("POST", self._url, content=delivery.body, headers=self._headers(delivery))
        try:
            async with asyncio.timeout(_TIMEOUT), request as answer:  # the body is not read: it may be endless
                status, later = answer.status_code, answer.headers.get("Retry-After", "")
        except (httpx.HTTPError, OSError) as error:
            return _explain(error), 0.0
        if 200 <= status < 300:
            return "", 0.0
        if is_temporary(status):
            return f"status {status}", _asked(later)
        return f"status {status}" + (", and redirects are not followed" if 300 <= status < 400 else ""), None

    def _headers(self, delivery: _Delivery) -> dict[str, str]:
        now = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"headgate/{VERSION}",
            "Connection": "close",
            "X-Headgate-Delivery": delivery.name,
            "X-Headgate-Timestamp": now,
        }
        if self._secret:
            signature = hmac.new(self._secret, now.encode() + b"." + delivery.body, hashlib.sha256)
            headers["X-Headgate-Signature"] = f"sha256={signature.hexdigest()}"
        return headers

    async def _pause(self, seconds: float) -> None:
        """Wait, unless the hub is about to stop."""
        self._resume.clear()
        timer = Timer(self._clock, self._clock.now() + round(seconds * 1_000_000), self._resume.set)
        try:
            await self._resume.wait()
        finally:
            timer.cancel()

    # Outcomes --------------------------------------------------------------------------------------------------------

    def _accepted(self) -> None:
        self.delivered += 1
        if self._away:
            self._log.info("webhooks are delivered again")
        self._away = self._full = False

    def _log_away(self, problem: str) -> None:
        if not self._away:
            self._away = True
            self._log.warning("a webhook could not be delivered, and is tried again", problem=problem)

    def _give_up(self, many: int, problem: str) -> None:
        self.failed += many
        self._log.error("webhooks are given up", many=many, problem=problem)

    def abandon(self, problem: str) -> None:
        """Give up all queued notices."""
        if self.waiting:
            self._give_up(self.waiting, problem)
        self._queue.clear()
        self._sending = None


def _client() -> httpx.AsyncClient:
    try:
        return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_keepalive_connections=0))  # noqa: S113 - see _try
    except (ImportError, ValueError, OSError) as error:  # from proxies and certificates in the environment
        raise HeadgateError(f"webhooks: expected proxies and certificates that can be used, got: {error}") from error


def _url(url: str) -> httpx.URL:
    try:
        return httpx.URL(url)
    except httpx.InvalidURL:
        raise HeadgateError(f"webhooks: expected a URL that can be used, got one to {_shown(url)[:100]}") from None


def _shown(url: str) -> str:
    """The scheme and host of a URL: the rest may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _explain(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error) or 'no answer in time'}"[:200]


def _asked(later: str) -> float:
    """The seconds that Retry-After asks for, which may be anything: within bounds, 0 if it makes no sense."""
    return float(min(parse_retry_after(later, time.time()) or 0, _MAX_RETRY_AFTER))
