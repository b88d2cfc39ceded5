"""Requests to the script, and the meaning of its answers.

The script only counts: it answers how much is left and whether a request passed. The limits make the decision from
that, by the same code as in memory.
"""

from abc import abstractmethod
from collections.abc import Sequence
from struct import pack
from typing import Any, Final, Generic, TypeVar

from headgate._native import i64, mypyc_attr
from headgate.errors import HeadgateError
from headgate.limits.decision import Decision, Limit, Rule, Violation, binding_of
from headgate.limits.meter import Meter
from headgate.limits.token_bucket import BucketState, TokenBucket
from headgate.limits.violations import Backoff, Standing, ViolationRecord
from headgate.stores.asks import pieces_of, place_in
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.redis.ask_again import AskAgain
from headgate.stores.redis.keys import FORMAT, Keys, LimitCodec, Moment, encode, open_ending, violations_ending

CHECK: Final = Verb.CHECK
PEEK: Final = Verb.PEEK
_LETTERS: Final = {Verb.CHECK: b"c", Verb.PEEK: b"p", Verb.CHARGE: b"g", Verb.REFUND: b"r"}

_ASK_AGAIN: Final = -2  # statuses up to this one

Answer = TypeVar("Answer")


class ForeignData(HeadgateError):
    """The value of one of our keys isn't ours, or is of a later format. It is left as it is."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Request(Generic[Answer]):
    """One request to the script, and when it has been carried out its answer."""

    def __init__(self, spec: bytes, keys: list[bytes], numbers: bytes) -> None:
        self.spec: Final = spec
        self.keys: Final = keys
        self.numbers: Final = numbers
        self.answer: Answer | BaseException | None = None

    @abstractmethod
    def read(self, row: list[int], at: i64, now: i64) -> i64:
        """Read the answer from a row of numbers, from a position on, and return the position after it."""

    def again(self) -> "Request[Answer]":
        """The same request once more, at another time."""
        self.answer = None
        return self

    def refunds(self) -> "list[Request[Any]]":
        """The requests that give back what this one has spent, if nobody learns of its answer."""
        return []


class ApplyRequest(Request[Decision]):
    """A verb on some asks."""

    def __init__(
        self, keys: Keys, verb: Verb, asks: Sequence[Ask], low: i64, offence: Offence | None, request_id: str
    ) -> None:
        self.verb: Final = verb
        self.low: Final = low
        self.offence: Final = offence
        self._backoff: Final = None if offence is None else offence.backoff
        self._keys: Final = keys
        self.asks: Final = asks
        self.request_id: Final = request_id
        self._codecs: Final[list[LimitCodec]] = []
        self._costs: Final[list[int]] = []
        names: list[bytes] = []
        costs: list[int] = []
        limits = b""
        periods = b""
        fields = b""
        moment: Moment | None = None
        self._pieces: Final = pieces_of(asks)
        for ask in self._pieces:
            codec, start = keys.codec(ask.name, ask.limit), keys.start(ask)
            self._codecs.append(codec)
            self._costs.append(ask.cost)
            if codec.metered:
                start = keys.root(ask.root or ask.key)
                fields += field_of(ask.key)
            names.extend([start + ending for ending in codec.endings])
            costs.extend([ask.cost] * len(codec.parts))
            limits = limits + codec.spec if limits else codec.spec
            if codec.calendar:
                moment = moment or keys.moment()
                periods += codec.periods(moment)
        self._ahead: Final[i64] = 0 if moment is None else moment.ahead
        self.counted: Final = (
            names if not fields else counted_names(self._codecs, names, [ask.key for ask in self._pieces])
        )
        """The keys of counts: see `HoldRequest`."""
        if offence is not None:
            names.append(keys.violations(offence))
        if request_id:
            names.append(keys.start(asks[0]) + _identity(verb, asks, request_id))
        numbers = b"%d" % costs[0]
        if len(costs) > 1 or periods:
            numbers = pack(f"<{len(costs)}d", *costs) + periods + fields
        super().__init__(keys.spec(_LETTERS[verb], limits, self._backoff, bool(request_id)), names, numbers)

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        verb, passed = self.verb, row[at] == 1
        decisions, at = self._decide(row, at + 1, now, passed)
        decision = decisions[0]
        if len(decisions) > 1:
            decision = place_in(binding_of(decisions), self.asks, self._pieces)
        if self._backoff is not None:
            if verb is CHECK and not passed:
                decision = decision.with_violation(_violation(self._backoff, row, at))
            at += 3
        self.answer = decision
        return at

    def _decide(self, row: list[int], at: i64, now: i64, passed: bool) -> tuple[list[Decision], i64]:
        """The decision on each piece, and the position after them."""
        verb = self.verb
        decisions = []
        for i in range(len(self._codecs)):
            cost: i64 = self._costs[i] if verb is CHECK or verb is PEEK else 1
            decision, at = self._codecs[i].decide(row, at, now, cost, self.low, passed and verb is CHECK, self._ahead)
            decisions.append(decision)
        return decisions, at

    def again(self) -> Request[Decision]:
        return ApplyRequest(self._keys, self.verb, self.asks, self.low, self.offence, self.request_id)

    def refunds(self) -> list[Request[Any]]:
        """For a check that passed. One with an id may be asked again, and gets the same answer then."""
        answer = self.answer
        if self.verb is not CHECK or self.request_id or not isinstance(answer, Decision) or not answer:
            return []
        return [ApplyRequest(self._keys, Verb.REFUND, self.asks, self.low, None, "")]


class PeekEachRequest(Request[tuple[Decision, ...]]):
    """A peek for cost 1 under each piece of some asks."""

    def __init__(self, keys: Keys, asks: Sequence[Ask], low: i64) -> None:
        self._arguments: Final = (keys, asks, low)
        self._peek: Final = ApplyRequest(keys, PEEK, [ask.with_cost(1) for ask in asks], low, None, "")
        self.counted: Final = self._peek.counted
        super().__init__(self._peek.spec, self._peek.keys, self._peek.numbers)

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        decisions, at = self._peek._decide(row, at + 1, now, False)
        self.answer = tuple(decisions)
        return at

    def again(self) -> Request[tuple[Decision, ...]]:
        return PeekEachRequest(*self._arguments)


def counted_names(codecs: list[LimitCodec], names: list[bytes], keys: list[str]) -> list[bytes]:
    """The names of counts, each with its field if it has one."""
    found: list[bytes] = []
    for codec, key in zip(codecs, keys, strict=True):
        for _ in codec.endings:
            name = names[len(found)]
            found.append(name + encode(key) if codec.metered else name)
    return found


def are_distinct(asks: Sequence[Ask]) -> bool:
    """Whether no two asks have the same name and key: then their stored keys differ."""
    return len({(ask.name, ask.key) for ask in asks}) == len(asks)


def field_of(text: str) -> bytes:
    """A text for the script, after its length."""
    found = encode(text)
    return pack("<H", len(found)) + found


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


class TimeRequest(Request[int]):
    """The time of the server that has a key."""

    def __init__(self, key: bytes) -> None:
        super().__init__(b"yn", [key], b"")

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        self.answer = now
        return at + 1


class ForgetRequest(Request[bool]):
    """Drop the count of one key."""

    def __init__(self, keys: Keys, name: str, key: str, rule: Rule, root: str = "") -> None:
        self._arguments: Final = (keys, name, key, rule, root)
        if isinstance(rule, Limit):
            start = keys.start(Ask(name, key, rule, 0, root))
            codecs = [keys.codec(name, piece) for piece in rule.pieces if not isinstance(piece, Meter)]
            stored = [start + ending for codec in codecs for ending in codec.endings]
            periods = b""
            if any([codec.calendar for codec in codecs]):
                moment = keys.moment()
                periods = b"".join([codec.periods(moment) for codec in codecs])
            spec = b"".join([codec.spec for codec in codecs])
            if stored:
                spec += b"n"
                stored.append(start + open_ending(name))
            super().__init__(keys.spec(b"f", spec), stored, periods)
        else:
            assert isinstance(rule, Backoff)
            super().__init__(keys.spec(b"f", b"", rule), [keys.root(key) + violations_ending(name)], b"")

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        self.answer = row[at] == 1
        return at + 1

    def again(self) -> Request[bool]:
        return ForgetRequest(*self._arguments)


def command(verb: tuple[str, bytes], requests: list[Request[Any]], header: list[bytes]) -> list[object]:
    """The command for a batch of requests: the name of the script, the keys, and the requests."""
    words: list[object] = [verb[0], verb[1], b""]
    for request in requests:
        words.extend(request.keys)
    words[2] = b"%d" % (len(words) - 3)  # hiredis crashes if a signal's handler raises while it packs a number
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
        elif row[at] <= _ASK_AGAIN:
            outside = row[at] == _ASK_AGAIN
            request.answer = AskAgain("the server has more to do before it decides", request, now, outside=outside)
            at += 1
        else:
            at = request.read(row, at, now)


def _violation(backoff: Backoff, row: list[int], at: i64) -> Violation:
    return Violation(row[at], backoff.advised(row[at]), row[at + 2] == 1)
