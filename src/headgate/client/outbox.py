"""The outbox of a client: frames that wait for their answers, and the limits that say when each may be sent.

Frames that the hub counts together share one limit, and are sent in order. A denial delays them until the wait is over,
and the denied frame is sent again first. There is no I/O here; `now` is always an argument, in microseconds.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from asyncio import Future

LONGEST_REASON: Final = 1000
"""Characters of what a hub says that are kept and logged."""

_RESUME_AFTER: Final = 10  # frames in a row that pass before several may be in flight again
_SHORT, _LONG = 20, 100  # frames that pass at a pace before it is probed
_TOLERANCE: Final = 10_000  # microseconds that a busy program may be late although it has frames to send


class Refused(HeadgateError):
    """The hub has refused a frame or this client. `code` is one word, such as "unreachable"; `detail` is the reason."""

    def __init__(self, code: str, detail: str) -> None:
        self.code: Final = code
        self.detail: Final = detail
        super().__init__(f"{code}: {detail}")


class QueueFull(HeadgateError):
    """The queue is full, and the call was not to wait for room. Nothing was sent."""


class Unsent(HeadgateError):
    """The client was closed before the hub had answered.

    `maybe` is True if the frame had been handed to the socket: it may have arrived. Otherwise it was never sent.
    """

    def __init__(self, detail: str, *, maybe: bool = False) -> None:
        self.maybe: Final = maybe
        super().__init__(detail)


@dataclass(frozen=True)
class Denial:
    """The hub has denied a frame. The client sends it again when the wait is over."""

    id: str
    """The id of the denied frame."""
    wait: float
    """Seconds, as the hub said; the client waits a little longer."""
    reason: str
    tier: str = ""
    """The tier whose limit it was; none on the relay, and for the signals of a session."""


class SendLimit:
    """A limit of the hub, as the client knows it: when the next frame may be sent, and at most `most` in flight."""

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self.due = 0
        """The earliest moment to send."""
        self.one_at_a_time = False
        """Whether one frame at a time is sent, since little was left lately."""
        self.in_flight = 0

    def next_send(self) -> int | None:
        """The moment from which on one more may be sent; None if an answer has to come first."""
        return self.due if self.in_flight < (1 if self.one_at_a_time else self._most) else None

    def sent(self, now: int) -> None:
        self.in_flight += 1

    def passed(self, *, warned: bool) -> None:
        """A frame was answered; with a warning, if little is left."""

    def denied(self, now: int, wait: int, jitter: int) -> None:
        """Delay all frames by the wait and the jitter."""
        self.due = max(self.due, now + wait + jitter)
        self.one_at_a_time = True


class PacedLimit(SendLimit):
    """A limit whose denials state the exact wait, so that two of them reveal the pace.

    A denial says when the next token comes. If k frames pass until the next denial, k tokens came in between. From then
    on frames are sent at that pace, a hundredth slower, since clocks and networks aren't exact. After twice as many
    frames as it was measured by, within bounds, the pace is probed: would more pass?
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._interval = 0  # between tokens; 0 if unknown
        self._token: int | None = None  # when the token came that a denial named
        self._passed = 0  # frames that passed since then
        self._since_denial = 0  # frames that passed since the last denial
        self._probe_after = 0  # frames after which the pace is probed
        self._slack = 0

    def sent(self, now: int) -> None:
        super().sent(now)
        if now - self.due > max(self._interval, self._slack, _TOLERANCE):
            self._token = None  # there was less to send than was allowed: that reveals no pace
        self.due += self._interval

    def passed(self, *, warned: bool) -> None:
        self._passed += 1
        self._since_denial += 1
        if self._since_denial >= _RESUME_AFTER:
            self.one_at_a_time = False
        if self._interval and self._since_denial >= self._probe_after:
            self._interval = self._since_denial = 0
            self.one_at_a_time = True

    def denied(self, now: int, wait: int, jitter: int) -> None:
        token = now + wait
        self.due -= self._interval  # the denied frame has used no token
        if self._passed and self._token is not None:
            self._interval = max(token - self._token, 0) * 101 // (100 * self._passed) + 1
            self._probe_after = min(max(2 * self._passed, _SHORT), _LONG)
        if self._token is None or self._passed >= _LONG:
            self._token, self._passed = token, 0
        self._since_denial = 0
        self._slack = wait + jitter
        super().denied(now, wait, jitter)

    def forget(self) -> None:
        """Forget the pace: the hub may have changed. A wait that has begun still counts."""
        self._interval, self._token, self._passed = 0, None, 0


@dataclass(eq=False, slots=True)
class PendingFrame:
    """A frame that waits for its answer."""

    id: str
    frame: bytes | str
    answer: "Future[Any]"
    kind: str = ""
    subject: str = ""
    """The chat channel or session that it is about."""
    group: str = ""
    """Frames of one group always share a limit."""
    number: int = 0
    """Its position in the queue."""
    limit: SendLimit | None = None
    """The limit that it is in flight under."""
    warned: bool = False
    sent: int = 0
    """When it was handed to the socket, if it is in flight."""
    denials: int = 0
    """How often the hub has denied it."""
    maybe: bool = False
    """Whether it was in flight when a connection was lost: it may have arrived."""


class Outbox:
    """All frames that wait for their answers, in order: those to be sent, and those in flight."""

    def __init__(self, limit_of: Callable[[PendingFrame], SendLimit]) -> None:
        self._limit_of: Final = limit_of
        self._numbers: Final = count(1)
        self._waiting: Final[dict[str, list[PendingFrame]]] = {}  # by group, each in order, none empty
        self.in_flight: Final[dict[str, PendingFrame]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self.in_flight)

    def add(self, item: PendingFrame) -> None:
        """Queue a frame at the end, or at its number if it has one."""
        item.number = item.number or next(self._numbers)
        insort(self._waiting.setdefault(item.group, []), item, key=lambda one: one.number)

    def withdraw(self, item: PendingFrame) -> None:
        """Don't send a frame, or not again: its call was cancelled."""
        group = self._waiting.get(item.group, [])
        if item in group:
            self._take(item)

    def next(self, now: int) -> tuple[PendingFrame | None, int | None]:
        """The frame to send now; otherwise the moment to look again, None if an answer has to come first."""
        first, wake = None, None
        for group in self._waiting.values():
            item = group[0]
            opens_at = self._limit_of(item).next_send()
            if opens_at is not None and opens_at <= now:
                first = item if first is None or item.number < first.number else first
            elif opens_at is not None:
                wake = opens_at if wake is None else min(wake, opens_at)
        return first, None if first else wake

    def sent(self, item: PendingFrame, now: int) -> None:
        """Note that a frame is handed to the socket."""
        self._take(item)
        self.in_flight[item.id] = item
        item.warned = False
        item.sent = now
        item.limit = self._limit_of(item)
        item.limit.sent(now)

    def oldest_sent(self) -> int | None:
        """When the frame was sent that has been in flight for longest; None if there is none."""
        item = next(iter(self.in_flight.values()), None)
        return None if item is None else item.sent

    def find(self, answered: str) -> PendingFrame | None:
        """The frame that an answer names. If it names none, the oldest, since the hub answers in order."""
        return self.in_flight.get(answered) if answered else next(iter(self.in_flight.values()), None)

    def passed(self, item: PendingFrame) -> None:
        """Note that a frame has passed and is answered."""
        self._remove_in_flight(item)
        self._limit_of(item).passed(warned=item.warned)

    def denied(self, item: PendingFrame, now: int, wait: int, jitter: int) -> None:
        """Note that a frame was denied: it is sent again, before all later ones."""
        self._remove_in_flight(item)
        item.denials += 1
        self._limit_of(item).denied(now, wait, jitter)
        self._requeue(item)

    def lost(self) -> None:
        """The connection is lost: queue the frames in flight again."""
        for item in list(self.in_flight.values()):
            item.maybe = True
            self._remove_in_flight(item)
            self._requeue(item)

    def clear(self) -> list[PendingFrame]:
        """Drop all frames, and return them."""
        self.lost()
        found = [item for group in self._waiting.values() for item in group]
        self._waiting.clear()
        return found

    def _take(self, item: PendingFrame) -> None:
        group = self._waiting[item.group]
        group.remove(item)
        if not group:
            del self._waiting[item.group]

    def _remove_in_flight(self, item: PendingFrame) -> None:
        del self.in_flight[item.id]
        assert item.limit is not None
        item.limit.in_flight -= 1
        item.limit = None

    def _requeue(self, item: PendingFrame) -> None:
        if not item.answer.done():  # else its call was cancelled
            self.add(item)
