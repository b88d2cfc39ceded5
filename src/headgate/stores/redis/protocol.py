"""Requests to the script, and the meaning of its answers.

The script only counts: it answers how much is left and whether a request passed. The limits make the decision from
that, by the same code as in memory.
"""

import hashlib
import re
from collections.abc import Sequence
from struct import pack
from typing import Any, Final, Generic, TypeVar

from headgate._native import i64, mypyc_attr
from headgate.errors import HeadgateError
from headgate.limits.decision import Decision, Limit, Rule, Violation, binding_of
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.token_bucket import BucketState, TokenBucket
from headgate.limits.violations import Backoff, Standing, ViolationRecord
from headgate.stores.base import REMEMBERED, Ask, Offence, Verb

FORMAT: Final = "1"
"""The version of the stored format. It is part of every key."""

_LONGEST_KEY: Final = 512  # bytes; longer ones are stored by their digest, so that nobody fills the server with them
_MAX_CODECS: Final = 10_000  # so that nobody fills this process with limits

CHECK: Final = Verb.CHECK
PEEK: Final = Verb.PEEK
_LETTERS: Final = {Verb.CHECK: b"c", Verb.PEEK: b"p", Verb.CHARGE: b"g", Verb.REFUND: b"r"}

_COUNTED: Final = (b"b" + FORMAT.encode(), b"w" + FORMAT.encode())  # how the ends of keys under a limit begin

_FIXED: Final[i64] = 0
_BUCKET: Final[i64] = 1
_WINDOW: Final[i64] = 2

Answer = TypeVar("Answer")


class ForeignData(HeadgateError):
    """The value of one of our keys isn't ours, or is of a later format. It is left as it is."""


class LimitCodec:
    """A limit under a limiter's name: the endings of its keys, its form for the script, the decision from an answer."""

    def __init__(self, name: str, limit: Limit) -> None:
        self.limit: Final = limit
        self.parts: Final = limit.parts
        self._kinds: Final[list[i64]] = []
        self.endings: Final[list[bytes]] = []
        self.spec: Final = b"".join([self._add(name, part) for part in self.parts])

    def _add(self, name: str, part: Limit) -> bytes:
        """Add a part, and return its form for the script."""
        if isinstance(part, TokenBucket):
            kind, spec = "b", b"b" + pack("<5d", *part.integers())
            self._kinds.append(_BUCKET)
        elif isinstance(part, SlidingWindow):
            kind, spec = "w", b"w" + pack("<3d", *part.integers(), 0)
            self._kinds.append(_WINDOW)
        else:
            self._kinds.append(_FIXED)
            return b"f" + pack("<d", part.capacity)
        which = "" if len(self.parts) == 1 else f"#{len(self._kinds)}"
        self.endings.append(encode(f"}}{kind}{FORMAT}:{self.limit}{which}:{name}"))
        return spec

    def decide(self, row: list[int], at: i64, now: i64, cost: i64, low: i64) -> tuple[Decision, i64]:
        """The decision from a row of numbers, read from a position on, and the position after it."""
        decisions = []
        for i in range(len(self.parts)):
            part, kind = self.parts[i], self._kinds[i]
            if kind == _WINDOW:
                assert isinstance(part, SlidingWindow)
                decisions.append(part.decide_counts(row[at], row[at + 1], row[at + 2], now, cost, low))
                at += 3
                continue
            state: object = None
            if kind == _BUCKET:
                state = BucketState(row[at], row[at + 1])
                at += 2
            wait = i64(0) if cost == 0 else part.wait(state, now, cost)
            decisions.append(part.decide(state, now, cost, wait, low))
        return decisions[0] if len(decisions) == 1 else binding_of(decisions), at


class Keys:
    """Makes the names of stored keys, and keeps the codec of each limit."""

    def __init__(self, prefix: str) -> None:
        self._start: Final = encode(prefix + "{")
        self._codecs: Final[dict[tuple[str, Limit], LimitCodec]] = {}
        self._specs: Final[dict[tuple[bytes, bytes, Backoff | None, bool], bytes]] = {}

    def codec(self, name: str, limit: Limit) -> LimitCodec:
        found = self._codecs.get((name, limit))
        if found is None:
            if len(self._codecs) >= _MAX_CODECS:
                self._codecs.clear()
            found = self._codecs[name, limit] = LimitCodec(name, limit)
        return found

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
        root = encode(key)
        if len(root) > _LONGEST_KEY:
            root = b"%" + hashlib.sha256(root).hexdigest().encode()
        elif b"%" in root or b"}" in root:
            root = root.replace(b"%", b"%25").replace(b"}", b"%7D")
        elif not root:
            root = b"%"
        return self._start + root

    def violations(self, offence: Offence) -> bytes:
        """The stored key of an agent's violations."""
        return self.root(offence.key) + _violations_ending(offence.name)

    def patterns(self, name: str, rule: Rule) -> list[bytes]:
        """Patterns that match every key that is stored under a name and a rule."""
        endings = self.codec(name, rule).endings if isinstance(rule, Limit) else [_violations_ending(name)]
        return [_escape(self._start) + b"*" + _escape(ending) for ending in endings]

    def every(self) -> bytes:
        """A pattern that matches every key that is stored."""
        return _escape(self._start) + b"*"

    def limiter_of(self, key: bytes | str) -> list[str]:
        """The name of the limiter that a stored key belongs to; none if it counts something else than a limit."""
        stored = key if isinstance(key, bytes) else encode(key)
        ending = stored[len(self._start) :].partition(b"}")[2].split(b":", 2)
        return [ending[2].decode("utf-8", "surrogatepass")] if ending[0] in _COUNTED and len(ending) == 3 else []


def _violations_ending(name: str) -> bytes:
    return encode(f"}}v{FORMAT}:{name}")


@mypyc_attr(allow_interpreted_subclasses=True)
class Request(Generic[Answer]):
    """One request to the script, and when it has been carried out its answer."""

    def __init__(self, spec: bytes, keys: list[bytes], numbers: bytes) -> None:
        self.spec: Final = spec
        self.keys: Final = keys
        self.numbers: Final = numbers
        self.answer: Answer | BaseException | None = None

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        """Read the answer from a row of numbers, from a position on, and return the position after it."""
        raise NotImplementedError

    def refunds(self) -> "list[Request[Any]]":
        """The requests that give back what this one has spent, if nobody learns of its answer."""
        return []


class ApplyRequest(Request[Decision]):
    """A verb on some asks."""

    def __init__(
        self, keys: Keys, verb: Verb, asks: Sequence[Ask], low: i64, offence: Offence | None, request_id: str
    ) -> None:
        self._verb: Final = verb
        self._low: Final = low
        self._backoff: Final = None if offence is None else offence.backoff
        self._keys: Final = keys
        self._asks: Final = asks
        self._request_id: Final = request_id
        self._codecs: Final[list[LimitCodec]] = []
        self._costs: Final[list[int]] = []
        names: list[bytes] = []
        costs: list[int] = []
        limits = b""
        for ask in asks:
            codec, root = keys.codec(ask.name, ask.limit), keys.root(ask.key)
            self._codecs.append(codec)
            self._costs.append(ask.cost)
            names.extend([root + ending for ending in codec.endings])
            costs.extend([ask.cost] * len(codec.parts))
            limits = limits + codec.spec if limits else codec.spec
        if offence is not None:
            names.append(keys.violations(offence))
        if request_id:
            names.append(keys.root(asks[0].key) + _identity(verb, asks, request_id))
        numbers = b"%d" % costs[0] if len(costs) == 1 else pack(f"<{len(costs)}d", *costs)
        super().__init__(keys.spec(_LETTERS[verb], limits, self._backoff, bool(request_id)), names, numbers)

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        verb, passed = self._verb, row[at] == 1
        at += 1
        decisions = []
        for i in range(len(self._codecs)):
            cost: i64 = self._costs[i]
            if verb is CHECK:
                cost = 0 if passed else cost
            elif verb is not PEEK:
                cost = 1
            decision, at = self._codecs[i].decide(row, at, now, cost, self._low)
            decisions.append(decision)
        decision = decisions[0] if len(decisions) == 1 else binding_of(decisions)
        if self._backoff is not None:
            if verb is CHECK and not passed:
                decision = decision.with_violation(_violation(self._backoff, row, at))
            at += 3
        self.answer = decision
        return at

    def refunds(self) -> list[Request[Any]]:
        """For a check that passed. One with an id may be asked again, and gets the same answer then."""
        answer = self.answer
        if self._verb is not CHECK or self._request_id or not isinstance(answer, Decision) or not answer:
            return []
        return [ApplyRequest(self._keys, Verb.REFUND, self._asks, self._low, None, "")]


def _identity(verb: Verb, asks: Sequence[Ask], request_id: str) -> bytes:
    """The ending of a request id's key. The length of the name keeps different names and ids apart."""
    limits = " + ".join([str(ask.limit) for ask in asks])
    name = asks[0].name
    return encode(f"}}i{FORMAT}:{verb.value}:{limits}:{len(name)}:{name}:{request_id}")


class ViolationRequest(Request[Violation]):
    """Violations of one agent, one or several at once."""

    def __init__(self, keys: Keys, offence: Offence, times: int = 1) -> None:
        self.offence: Final = offence
        self.times: Final = times
        super().__init__(keys.spec(b"o", b"", offence.backoff), [keys.violations(offence)], b"%d" % times)

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        self.answer = _violation(self.offence.backoff, row, at + 1)
        return at + 4


class StandingRequest(Request[Standing]):
    """The standing of an agent."""

    def __init__(self, keys: Keys, offence: Offence) -> None:
        self._backoff: Final = offence.backoff
        super().__init__(keys.spec(b"s", b"", offence.backoff), [keys.violations(offence)], b"")

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        state = ViolationRecord()
        state.count, state.last = row[at + 1], row[at + 2]
        self.answer = self._backoff.standing(state, now)
        return at + 4


class DrawRequest(Request[Decision]):
    """A check that also draws a `new` slice of tokens ahead, and gives back the unused tokens of an `old` one.

    Each slice has a number of its own. So a draw that got no answer in time, but was granted later all the same, gives
    nothing back that this process has in hand.
    """

    def __init__(
        self,
        keys: Keys,
        ask: Ask,
        low: i64,
        offence: Offence | None,
        slice_: i64,
        unused: i64,
        old: i64,
        new: i64,
        span: i64,
    ) -> None:
        limit = ask.limit
        assert isinstance(limit, TokenBucket)
        codec = keys.codec(ask.name, limit)
        self.unit: Final[i64] = limit.integers()[1]
        self.limit: Final = limit
        self.granted: i64 = 0
        self.now: i64 = 0
        self.bucket: BucketState = BucketState(0, 0)  # with the tokens that were drawn
        self._cost: Final[i64] = ask.cost
        self._low: Final = low
        self._backoff: Final = None if offence is None else offence.backoff
        names = [keys.root(ask.key) + codec.endings[0]]
        if offence is not None:
            names.append(keys.violations(offence))
        self.number: Final = new
        self._keys: Final = keys
        self._ask: Final = ask
        numbers = pack("<6d", ask.cost, slice_, unused, old, new, span)
        super().__init__(keys.spec(b"l", codec.spec, self._backoff), names, numbers)

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        limit, passed = self.limit, row[at] == 1
        self.granted = row[at + 3]
        self.now = now
        self.bucket = BucketState(row[at + 1] + self.granted * self.unit, row[at + 2])
        cost = i64(0) if passed else self._cost
        decision = limit.decide(self.bucket, now, cost, limit.wait(self.bucket, now, cost), self._low)
        at += 4
        if self._backoff is not None:
            if not passed:
                decision = decision.with_violation(_violation(self._backoff, row, at))
            at += 3
        self.answer = decision
        return at

    def refunds(self) -> list[Request[Any]]:
        """The drawn tokens, and the cost if it passed."""
        answer, keys, ask = self.answer, self._keys, self._ask
        if not isinstance(answer, Decision) or not answer:
            return []
        found: list[Request[Any]] = []
        if self.granted > 0:
            nothing = Ask(ask.name, ask.key, ask.limit, 0)
            found.append(DrawRequest(keys, nothing, 0, None, 0, self.granted, self.number, 0, 0))
        if ask.cost > 0:
            found.append(ApplyRequest(keys, Verb.REFUND, [ask], self._low, None, ""))
        return found


class ForgetRequest(Request[bool]):
    """Drop the count of one key."""

    def __init__(self, keys: Keys, name: str, key: str, rule: Rule) -> None:
        if isinstance(rule, Limit):
            codec, root = keys.codec(name, rule), keys.root(key)
            super().__init__(keys.spec(b"f", codec.spec), [root + ending for ending in codec.endings], b"")
        else:
            assert isinstance(rule, Backoff)
            super().__init__(keys.spec(b"f", b"", rule), [keys.root(key) + _violations_ending(name)], b"")

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        self.answer = row[at] == 1
        return at + 1


def command(verb: tuple[str, bytes], requests: list[Request[Any]], header: list[bytes]) -> list[object]:
    """The command for a batch of requests: the name of the script, the keys, and the requests."""
    words: list[object] = [verb[0], verb[1], 0]
    for request in requests:
        words.extend(request.keys)
    words[2] = len(words) - 3
    words.extend(header)
    for request in requests:
        words.append(request.spec)
        words.append(request.numbers)
    return words


def read_all(requests: list[Request[Any]], row: list[int]) -> None:
    """Give each request of a batch its answer."""
    now: i64 = row[0]
    at: i64 = 2
    for request in requests:
        if row[at] == -1:
            shown = ", ".join([key.decode(errors="replace") for key in request.keys])
            request.answer = ForeignData(f"there is something under {shown} that this headgate didn't write")
            at += 1
        else:
            at = request.read(row, at, now)


def _violation(backoff: Backoff, row: list[int], at: i64) -> Violation:
    return Violation(row[at], backoff.advised(row[at]), row[at + 2] == 1)


def encode(text: str) -> bytes:
    """Any string as bytes, even one that has no UTF-8."""
    return text.encode("utf-8", "surrogatepass")


def _escape(text: bytes) -> bytes:
    """A pattern that matches this text alone."""
    return re.sub(rb"([*?\[\]\\^-])", rb"\\\1", text)


def admin_prefix(prefix: str) -> str:
    """The prefix of keys without expiry, which hubs share, in a store with this prefix."""
    return f"{prefix.rstrip(':')}-admin:"
