"""What may be sent when: a line of what waits for its answer, over lanes that are held back by what the hub says.

What the hub counts together goes over one lane, in order. A denial holds its lane back until the wait is over, and what
was denied is the first to be sent again. Nothing here knows of sockets; `now` is always an argument, in microseconds.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from asyncio import Future

LONGEST: Final = 86_400_000_000  # microseconds that are waited at most, whatever the hub says
_CALM: Final = 10  # so many passed one after the other: there is room again
_SHORT, _LONG = 20, 100  # so many pass at a pace before it is tried whether it still holds
_UNPUNCTUAL: Final = 10_000  # microseconds that a busy program may be late without having had nothing to send


class Refused(HeadgateError):
    """The hub has refused something. `code` is its word for it, such as "unreachable", and `detail` says why."""

    def __init__(self, code: str, detail: str) -> None:
        self.code: Final = code
        self.detail: Final = detail
        super().__init__(f"{code}: {detail}")


class QueueFull(HeadgateError):
    """As much waits to be sent as may, and it was asked not to wait for room. Nothing was sent."""


class Unsent(HeadgateError):
    """The client was closed before the hub had answered.

    `maybe` is True for what had been handed to the socket: it may have arrived. Anything else was never sent.
    """

    def __init__(self, detail: str, *, maybe: bool = False) -> None:
        self.maybe: Final = maybe
        super().__init__(detail)


@dataclass(frozen=True)
class Denial:
    """The hub has denied something. It is sent again by itself, when the wait is over."""

    id: str
    """Of what was denied."""
    wait: float
    """Seconds, as the hub said it; what is held back waits a little longer."""
    reason: str
    tier: str = ""
    """Whose limit it was; none on the relay, and for the signals of a session."""


class Lane:
    """What the hub counts together. It sends in order, at most `most` at a time."""

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self.due = 0
        """Nothing is sent before."""
        self.alone = False
        """One at a time, since little or nothing was left the last time."""
        self.under_way = 0

    def opens(self) -> int | None:
        """The moment from which on one more may be sent; None if an answer has to come first."""
        return self.due if self.under_way < (1 if self.alone else self._most) else None

    def sent(self, now: int) -> None:
        self.under_way += 1

    def passed(self, *, warned: bool) -> None:
        """Something was answered; with a warning, if little is left."""

    def denied(self, now: int, wait: int, extra: int) -> None:
        """Hold everything back for the wait and something extra."""
        self.due = max(self.due, now + wait + extra)
        self.alone = True


class Paced(Lane):
    """A lane whose denials tell the true wait, so that two of them tell the pace.

    A denial says when the next token comes. If k were let through until another denial says that of a later one, then k
    tokens came in between. From then on one is sent for each, a hundredth slower than that, since clocks and networks
    aren't exact. After twice as many as it was told from, or some, it is tried whether more would pass.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._interval = 0  # from token to token; 0 while that isn't known
        self._token: int | None = None  # when one came that a denial was about
        self._passed = 0  # since then
        self._calm = 0  # since the last denial
        self._trust = 0  # how many of these before it is tried whether the pace still holds
        self._slack = 0

    def sent(self, now: int) -> None:
        super().sent(now)
        if now - self.due > max(self._interval, self._slack, _UNPUNCTUAL):
            self._token = None  # more was allowed than there was to send: no pace can be told from that
        self.due += self._interval

    def passed(self, *, warned: bool) -> None:
        self._passed += 1
        self._calm += 1
        if self._calm >= _CALM:
            self.alone = False
        if self._interval and self._calm >= self._trust:
            self._interval = self._calm = 0
            self.alone = True

    def denied(self, now: int, wait: int, extra: int) -> None:
        token = now + wait
        self.due -= self._interval  # what was denied has used none
        if self._passed and self._token is not None:
            self._interval = max(token - self._token, 0) * 101 // (100 * self._passed) + 1
            self._trust = min(max(2 * self._passed, _SHORT), _LONG)
        if self._token is None or self._passed >= _LONG:
            self._token, self._passed = token, 0
        self._calm = 0
        self._slack = wait + extra
        super().denied(now, wait, extra)

    def forget(self) -> None:
        """The hub may be another now, with another limit. A wait that is under way still counts."""
        self._interval, self._token, self._passed = 0, None, 0


@dataclass(eq=False, slots=True)
class Item:
    """Something that waits for its answer."""

    id: str
    frame: bytes | str
    answer: "Future[Any]"
    kind: str = ""
    subject: str = ""
    """The channel or session that it is about."""
    group: str = ""
    """What always goes over the same lane."""
    number: int = 0
    """Its place in the line."""
    lane: Lane | None = None
    """The one that it is under way on."""
    warned: bool = False


class Outbox:
    """All that waits for its answer, in order: what is yet to be sent, and what is under way."""

    def __init__(self, lane_of: Callable[[Item], Lane]) -> None:
        self._lane_of: Final = lane_of
        self._numbers: Final = count(1)
        self._waiting: Final[dict[str, list[Item]]] = {}  # by group, each in order, none empty
        self.under_way: Final[dict[str, Item]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self.under_way)

    def add(self, item: Item) -> None:
        """Put something at the end of the line; what has a number stands where that says."""
        item.number = item.number or next(self._numbers)
        insort(self._waiting.setdefault(item.group, []), item, key=lambda one: one.number)

    def withdraw(self, item: Item) -> None:
        """Don't send it, or not again: whoever wanted an answer has gone."""
        group = self._waiting.get(item.group, [])
        if item in group:
            self._take(item)

    def next(self, now: int) -> tuple[Item | None, int | None]:
        """What is to be sent now; else the moment at which to look again, if it isn't an answer that has to come."""
        first, wake = None, None
        for group in self._waiting.values():
            item = group[0]
            opens = self._lane_of(item).opens()
            if opens is not None and opens <= now:
                first = item if first is None or item.number < first.number else first
            elif opens is not None:
                wake = opens if wake is None else min(wake, opens)
        return first, None if first else wake

    def sent(self, item: Item, now: int) -> None:
        """It is handed to the socket."""
        self._take(item)
        self.under_way[item.id] = item
        item.warned = False
        item.lane = self._lane_of(item)
        item.lane.sent(now)

    def find(self, answered: str) -> Item | None:
        """What an answer is about: the one it names. If it names none, the oldest, since the hub answers in order."""
        return self.under_way.get(answered) if answered else next(iter(self.under_way.values()), None)

    def passed(self, item: Item) -> None:
        """It was let through, and is answered."""
        self._back(item)
        self._lane_of(item).passed(warned=item.warned)

    def denied(self, item: Item, now: int, wait: int, extra: int) -> None:
        """It has to be sent again, before all that came after it."""
        self._back(item)
        self._lane_of(item).denied(now, wait, extra)
        self._again(item)

    def lost(self) -> None:
        """The connection is gone: what was under way has to be sent again."""
        for item in list(self.under_way.values()):
            self._back(item)
            self._again(item)

    def clear(self) -> list[tuple[Item, bool]]:
        """Drop everything; what it was, and whether it was under way."""
        waiting = [(item, False) for group in self._waiting.values() for item in group]
        found = [(item, True) for item in self.under_way.values()] + waiting
        self.lost()
        self._waiting.clear()
        return found

    def _take(self, item: Item) -> None:
        group = self._waiting[item.group]
        group.remove(item)
        if not group:
            del self._waiting[item.group]

    def _back(self, item: Item) -> None:
        del self.under_way[item.id]
        assert item.lane is not None
        item.lane.under_way -= 1
        item.lane = None

    def _again(self, item: Item) -> None:
        if not item.answer.done():  # else nobody waits for it any more
            self.add(item)
