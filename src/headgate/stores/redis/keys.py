"""The names of stored keys, and the forms of limits for the script.

The parts of a limit that share their counts with others (budgets, slots) are counted one by one: see `Limit.pieces`.
"""

import hashlib
import re
from collections.abc import Sequence
from struct import Struct, pack
from time import time_ns
from typing import Final
from zlib import crc32

from headgate._native import i64
from headgate.limits.budget import Budget, BudgetState
from headgate.limits.clock import ManualClock
from headgate.limits.decision import Decision, Limit, Rule, binding_of
from headgate.limits.meter import Meter
from headgate.limits.numbers import LARGEST
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import BucketState, TokenBucket
from headgate.limits.violations import Backoff
from headgate.stores.base import REMEMBERED, Ask, Offence
from headgate.stores.redis.shapes import Shapes

FORMAT: Final = "1"
"""The version of the stored format. It is part of every key."""

_LONGEST_KEY: Final = 512  # bytes; longer ones are stored by their digest, so that nobody fills the server with them
_PERCENT: Final = 0x25
_BRACE: Final = 0x7D
_MAX_SIMPLE: Final = 18  # limits of a hold in its short form: a script unpacks only so many numbers at once
_MAX_CODECS: Final = 10_000  # so that nobody fills this process with limits
_MARK_LENGTH: Final = len(FORMAT) + 1  # of the letter and the format at which the ending of a key begins

_FIXED: Final[i64] = 0
_BUCKET: Final[i64] = 1
_WINDOW: Final[i64] = 2
_BUDGET: Final[i64] = 3
_SLOTS: Final[i64] = 4
_METER: Final[i64] = 5


class LimitCodec:
    """A limit under a limiter's name: the endings of its keys, its form for the script, the decision from an answer."""

    def __init__(self, name: str, limit: Limit) -> None:
        self.limit: Final = limit
        self.parts: Final = limit.parts
        self.calendar: Final = limit.calendar
        """Whether it needs `periods`."""
        self._kinds: Final[list[i64]] = []
        self.simple = True
        """Whether lua/lean.lua knows it."""
        self.endings: Final[list[bytes]] = []
        # By the calendar; there is at most one, since pieces are counted one by one.
        self._dated: Budget | Meter | None = None
        self.metered: Final = isinstance(limit, Meter)
        """Whether it is stored with others of its root, as a field that is the key."""
        self._periods: tuple[int, int, bytes] = (0, 0, b"")
        self.spec: Final = b"".join([self._add(name, part) for part in self.parts])

    def _add(self, name: str, part: Limit) -> bytes:
        """Add a part, and return its form for the script."""
        if isinstance(part, TokenBucket):
            kind, spec = "b", b"b" + pack("<5d", *part.integers())
            self._kinds.append(_BUCKET)
            self.simple = self.simple and part.integers()[3] == 1
        elif isinstance(part, SlidingWindow):
            kind, spec = "w", b"w" + pack("<3d", *part.integers(), 0)
            self._kinds.append(_WINDOW)
            self.simple = False
        elif isinstance(part, Budget):
            self._kinds.append(_BUDGET)
            self.endings.append(encode(f"}}c{FORMAT}:{part.unit} {part.period or 'all'} {part.zone}:{name}"))
            if part.calendar:
                self._dated = part
            return b"c" + pack("<2d", *part.integers(), part.calendar)
        elif isinstance(part, Meter):
            self._kinds.append(_METER)
            self.endings.append(meter_ending(name, part.zone))
            self._dated = part
            return b"m"
        elif isinstance(part, Slots):
            self._kinds.append(_SLOTS)
            self.endings.append(slots_ending(name))
            return b"s" + pack("<d", part.capacity)
        else:
            self._kinds.append(_FIXED)
            return b"f" + pack("<d", part.capacity)
        which = "" if len(self.parts) == 1 else f"#{len(self._kinds)}"
        self.endings.append(encode(f"}}{kind}{FORMAT}:{self.limit}{which}:{name}"))
        return spec

    def numbers(self, now: "Moment") -> list[list[float]]:
        """The four numbers of each part for lua/lean.lua."""
        found: list[list[float]] = []
        for part in self.parts:
            if isinstance(part, TokenBucket):
                _, unit, gain, _, full = part.integers()
                found.append([unit, gain, full, 0])
            elif isinstance(part, (Budget, Meter)):
                periods = part.nearby(now.wall)[1:] if part.calendar else [0, 0, 0]
                found.append([part.integers()[0] if isinstance(part, Budget) else 0, *periods])
            else:
                found.append([part.capacity, 0, 0, 0])
        return found

    @property
    def letters(self) -> bytes:
        """A letter for the kind of each part."""
        return b"".join([b"fbwcsm"[kind : kind + 1] for kind in self._kinds])

    def periods(self, now: "Moment") -> bytes:
        """Its periods for the script: what to add to its time, and when those around a moment start."""
        if self._dated is None:
            return b""
        first, last, found = self._periods
        if not first <= now.wall < last:
            starts = self._dated.nearby(now.wall)
            found = pack("<5d", now.ahead, *starts)
            self._periods = (starts[1], starts[2], found)
        return found

    def decide(
        self, row: list[int], at: i64, now: i64, cost: i64, low: i64, passed: bool, ahead: i64
    ) -> tuple[Decision, i64]:
        """The decision from a row of numbers, read from a position on, and the position after it."""
        if passed:
            cost = 0
        decisions = []
        for i in range(len(self.parts)):
            part, kind = self.parts[i], self._kinds[i]
            if kind == _WINDOW:
                assert isinstance(part, SlidingWindow)
                frees = i64(0) if passed else row[at + 1]
                decisions.append(part.decide_counts(row[at], frees, row[at + 2], now, cost, low))
                at += 3
                continue
            state: object = None
            wait: i64 = 0
            if kind == _BUCKET:
                state = BucketState(row[at], row[at + 1])
                at += 2
            elif kind == _BUDGET:
                state = BudgetState(row[at], row[at + 1], ahead)
                at += 2
                wait = part.wait(state, now, cost)  # also if it has passed: the budget remembers its period then
                decisions.append(part.decide(state, now, cost, i64(0) if passed else wait, low))
                continue
            elif kind == _SLOTS:
                assert isinstance(part, Slots)
                if not passed and row[at] >= part.capacity:
                    wait = row[at + 1] - now
                decisions.append(part.decide_counts(row[at], row[at + 2], wait, now, low))
                at += 3
                continue
            elif kind == _METER:
                decisions.append(part.decide(None, now, 0, 0, low))
                continue
            if not passed:
                wait = part.wait(state, now, cost)
            decisions.append(part.decide(state, now, cost, wait, low))
        return decisions[0] if len(decisions) == 1 else binding_of(decisions), at


class HoldPlan:
    """The part of requests about holds that depends on the names and the limits of their asks alone."""

    def __init__(self, keys: "Keys", asks: Sequence[Ask]) -> None:
        self.codecs: Final[list[LimitCodec]] = []
        self.places: Final[list[int]] = []
        """Of each codec: which ask it belongs to."""
        self.cost_places: Final[list[int]] = []
        """Of each part of all codecs: which ask it belongs to."""
        self.dated: Final[list[LimitCodec]] = []
        self.meters: Final[list[int]] = []
        """The places of meters' keys among those of all."""
        spec = b""
        names = 0
        for place, ask in enumerate(asks):
            spec += b"a"
            for piece in ask.limit.pieces:
                codec = keys.codec(ask.name, piece)
                self.codecs.append(codec)
                self.places.append(place)
                self.cost_places.extend([place] * len(codec.parts))
                spec += codec.spec
                if codec.calendar:
                    self.dated.append(codec)
                if codec.metered:
                    self.meters.append(names)
                names += len(codec.endings)
        self._spec: Final = spec
        self._specs: Final[dict[bytes, bytes]] = {}
        self.head: Final = Struct(f"<{7 + len(asks)}d")
        self.checksum: Final = crc32(b"\n".join([ending for codec in self.codecs for ending in codec.endings]))
        first = asks[0]
        self.index: Final = (slots_ending if first.limit.counts_slots else open_ending)(first.name)
        self.hold: Final = hold_ending(first.name, "")
        letters = b"".join([codec.letters for codec in self.codecs])
        self.simple: Final = len(letters) <= _MAX_SIMPLE and all([codec.simple for codec in self.codecs])
        """Whether it has a form for lua/lean.lua."""
        self.simple_hold: Final = b"H" + letters
        self.simple_settle: Final = b"T" + letters
        self.simple_head: Final = Struct(f"<{9 + len(letters)}d")
        self.costs: Final = Struct(f"<{len(asks)}I")
        self._block: tuple[int, int, bytes] = (0, 0, b"")
        self.days: list[bytes] = []
        """The start of the current day of each meter, in digits, as of the last `block`."""

    def block(self, now: "Moment") -> bytes:
        """The numbers of all limits for lua/lean.lua, at a moment: they change with the periods of the calendar."""
        first, last, found = self._block
        if not first <= now.wall < last:
            first, last = 0, LARGEST
            numbers: list[float] = []
            days: list[bytes] = []
            for place, codec in zip(self.places, self.codecs, strict=True):
                for row in codec.numbers(now):
                    numbers.extend([place + 1, *row])
                if codec.calendar:
                    first, last = max(first, int(row[1])), min(last, int(row[2]))
                if codec.metered:
                    days.append(b"%d" % int(row[1]))
            self.days = days
            found = pack(f"<{len(numbers)}d", *numbers)
            self._block = (first, last, found)
        return found

    def spec(self, verb: bytes) -> bytes:
        found = self._specs.get(verb)
        if found is None:
            found = self._specs[verb] = verb + self._spec
        return found


class Moment:
    """The time of day in microseconds since 1970, and what to add to the script's time to get it."""

    def __init__(self, wall: i64, ahead: i64) -> None:
        self.wall: Final = wall
        self.ahead: Final = ahead


class Keys:
    """Makes the names of stored keys, and keeps the codec of each limit.

    `clock` is one for tests; without it the server's clock counts.
    """

    def __init__(self, prefix: str, clock: ManualClock | None = None) -> None:
        self._start: Final = encode(prefix + "{")
        self._clock: Final = clock
        self.server_ahead: i64 = 0
        """By how much the server's clock is ahead of this machine's, once they were seen to differ by a period."""
        self._codecs: Final[dict[tuple[str, Limit], LimitCodec]] = {}
        self._specs: Final[dict[tuple[bytes, bytes, Backoff | None, bool], bytes]] = {}
        self._plans: Final[dict[tuple[object, ...], HoldPlan]] = {}
        self.shapes: Final = Shapes()
        self.short_forms = True
        """Whether requests about simple holds are sent in their short form; tests compare both."""

    def codec(self, name: str, limit: Limit) -> LimitCodec:
        found = self._codecs.get((name, limit))
        if found is None:
            if len(self._codecs) >= _MAX_CODECS:
                self._codecs.clear()
            found = self._codecs[name, limit] = LimitCodec(name, limit)
        return found

    def plan(self, asks: Sequence[Ask]) -> HoldPlan:
        key: tuple[object, ...] = tuple([(ask.name, ask.limit) for ask in asks])
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _MAX_CODECS:
                self._plans.clear()
            found = self._plans[key] = HoldPlan(self, asks)
        return found

    def moment(self) -> Moment:
        """The time of day that budgets go by."""
        if self._clock is None:
            return Moment(time_ns() // 1000 + self.server_ahead, 0)
        wall: i64 = round(self._clock.wall() * 1_000_000)
        return Moment(wall, wall - self._clock.now())

    def note_server_time(self, server_time: i64) -> None:
        """Go by a server's time from now on."""
        if self._clock is None:
            self.server_ahead = server_time - time_ns() // 1000

    def spec(self, verb: bytes, limits: bytes, backoff: Backoff | None = None, remembered: bool = False) -> bytes:
        known = (verb, limits, backoff, remembered)
        found = self._specs.get(known)
        if found is None:
            if len(self._specs) >= _MAX_CODECS:
                self._specs.clear()
            found = verb + limits
            if backoff is not None:
                numbers = backoff.integers()
                found += b"o" + pack(f"<{len(numbers)}d", *numbers)
            if remembered:
                found += b"i" + pack("<d", REMEMBERED)
            self._specs[known] = found
        return found

    def root(self, key: str) -> bytes:
        """The beginning of a key's stored keys. It chooses the slot of a cluster."""
        return self._start + _escaped_key(key)

    def start(self, ask: Ask) -> bytes:
        """The beginning of the stored keys of what an ask counts: those with a root are beside it."""
        return self.root(ask.key) if not ask.root else self.below(self.root(ask.root), ask.key)

    def below(self, root: bytes, key: str) -> bytes:
        """The beginning of the stored keys of a key beside a root, which is given as it is stored."""
        return root + b"}/" + _escaped_key(key)

    def root_of(self, stored: bytes) -> str:
        """The root, or the plain key, of a stored key."""
        text = stored[len(self._start) :].partition(b"}")[0].decode("utf-8", "surrogatepass")
        return "" if text == "%" else text.replace("%7D", "}").replace("%25", "%")

    def violations(self, offence: Offence) -> bytes:
        """The stored key of an agent's violations."""
        return self.root(offence.key) + violations_ending(offence.name)

    def patterns(self, name: str, rule: Rule) -> list[bytes]:
        """Patterns that match every key that is stored under a name and a rule."""
        start = _escape(self._start) + b"*"
        if not isinstance(rule, Limit):
            return [start + _escape(violations_ending(name))]
        endings = [ending for piece in rule.pieces for ending in self.codec(name, piece).endings]
        endings += [released_ending(ending) for ending in endings]
        endings.append(open_ending(name))
        if isinstance(rule, Meter):
            return [start + _escape(meter_ending(name, rule.zone)) + b"*", start + _escape(days_ending(name))]
        return [*[start + _escape(ending) for ending in endings], start + _escape(hold_ending(name, "")) + b"*"]

    def days_pattern(self, name: str) -> bytes:
        """A pattern that matches the days of meters under a name, of every root."""
        return _escape(self._start) + b"*" + _escape(days_ending(name))

    def every(self) -> bytes:
        """A pattern that matches every key that is stored."""
        return _escape(self._start) + b"*"

    def limiter_of(self, key: bytes | str) -> list[str]:
        """The name of the limiter that a stored key belongs to; none if it counts something else than a limit."""
        stored = key if isinstance(key, bytes) else encode(key)
        ending = stored[len(self._start) :].partition(b"}")[2]
        if ending.startswith(b"/"):  # the key, after its root
            ending = ending.partition(b"}")[2]
        if ending[:1] not in (b"b", b"w", b"c", b"s"):  # others need not be text
            return []
        kind, _, text = ending.decode("utf-8", "surrogatepass").partition(":")
        if len(kind) != _MARK_LENGTH or kind[1:] != FORMAT:
            return []
        if kind[0] == "c":  # the unit may have a colon in it
            text = text.partition(" ")[2]
        return [text if kind[0] == "s" else text.partition(":")[2]]


def violations_ending(name: str) -> bytes:
    """The ending of the key of violations."""
    return encode(f"}}v{FORMAT}:{name}")


def slots_ending(name: str) -> bytes:
    """The ending of the key of slots, and of the holds that take them."""
    return encode(f"}}s{FORMAT}:{name}")


def open_ending(name: str) -> bytes:
    """The ending of the key of holds that take no slot."""
    return encode(f"}}o{FORMAT}:{name}")


def hold_ending(name: str, hold_id: str) -> bytes:
    """The ending of a hold's key. The length of the name keeps different names and ids apart."""
    return encode(f"}}h{FORMAT}:{len(name)}:{name}:{hold_id}")


def meter_ending(name: str, zone: str) -> bytes:
    """The ending of the key of what was metered on a day, whose start follows."""
    return encode(f"}}m{FORMAT}:{zone}:{name}:")


def days_ending(name: str) -> bytes:
    """The ending of the key of the days on which something was metered."""
    return encode(f"}}u{FORMAT}:{name}")


def shape_ending(digest: bytes) -> bytes:
    """The ending of the key of a shape that holds have."""
    return encode(f"}}p{FORMAT}:") + digest


def released_ending(ending: bytes) -> bytes:
    """The ending of the key of what comes back to a count with this one."""
    return encode(f"}}r{FORMAT}:") + ending[1:]


def _escaped_key(key: str) -> bytes:
    """A key without the brace that ends it."""
    found = encode(key)
    if len(found) > _LONGEST_KEY:
        return b"%" + hashlib.sha256(found).hexdigest().encode()
    if _PERCENT in found or _BRACE in found:  # by their codes: with bytes, Python makes an error first
        return found.replace(b"%", b"%25").replace(b"}", b"%7D")
    return found or b"%"


def encode(text: str) -> bytes:
    """Any string as bytes, even one that has no UTF-8."""
    try:
        return text.encode()  # as nearly all are: quick if compiled
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _escape(text: bytes) -> bytes:
    """A pattern that matches this text alone."""
    return re.sub(rb"([*?\[\]\\^-])", rb"\\\1", text)


def admin_prefix(prefix: str) -> str:
    """The prefix of keys without expiry, which hubs share, in a store with this prefix."""
    return f"{prefix.rstrip(':')}-admin:"
