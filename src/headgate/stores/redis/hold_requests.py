"""Requests about holds to the script: see lua/holds.lua."""

from collections.abc import Sequence
from struct import pack
from typing import Any, Final
from zlib import crc32

from headgate._native import i64
from headgate.errors import HoldError, UnknownHold
from headgate.limits.decision import Decision, binding_of
from headgate.stores.asks import pieces_of, place_in
from headgate.stores.base import Ask
from headgate.stores.hold_ids import HOLD_IDS
from headgate.stores.holds import (
    CANCELLED,
    DENIED,
    EXPIRED,
    MAX_OPEN_HOLDS,
    OPEN,
    SETTLED,
    HoldAnswer,
    HoldState,
    HoldTerms,
    refuse_ended,
    refuse_more_holds,
    refuse_other_costs,
    refuse_other_limits,
    refuse_uncountable,
)
from headgate.stores.redis.keys import HoldPlan, Keys, Moment, encode
from headgate.stores.redis.protocol import Request, counted_names, field_of

_STATES: Final[tuple[HoldState, ...]] = (DENIED, OPEN, SETTLED, CANCELLED, EXPIRED)

_HOLD: Final = b"h"  # verbs of lua/holds.lua
_SETTLE: Final = b"t"
_EXTEND: Final = b"x"
_FIND: Final = b"q"

_DENIED: Final = 0  # statuses in its answers
_HELD: Final = 1
_UNKNOWN: Final = 2
_OTHER_COSTS: Final = 3
_ENDED: Final = 4
_TOO_MANY: Final = 5
_AS_NOW: Final = 6
_OTHER_LIMITS: Final = 8
_FORCED: Final = 9
_UNCOUNTABLE: Final = 10
# 7 (held before, or extended) passes like _HELD, and needs no name here.

_GRANTED: Final = 1  # flags of a new hold
_FORCE: Final = 2

_RELEASE: Final = 8  # is added to the state if the costs come back
_SIMPLE: Final = 10  # what lua/lean.lua adds to a status
_NARROW: Final = 2**32  # costs from which on a record is wider
_NO_NOTE: Final = bytes(3)
_NO_SHAPE: Final = bytes(5)
_NO_MOMENT: Final = Moment(0, 0)


class HoldRequest(Request[HoldAnswer]):
    """A verb on a hold: in the short form of lua/lean.lua where possible, and again in the long one if needed."""

    def __init__(
        self,
        keys: Keys,
        verb: bytes,
        asks: Sequence[Ask],
        low: int,
        hold_id: str,
        costs: Sequence[int],
        rest: tuple[float, float, float, float, float],
        terms: HoldTerms | None = None,
        simple: bool = False,
        again: bool = False,
    ) -> None:
        """`rest`: whether costs are given, a flag of the verb, the lease, for how long the hold is remembered, and
        whether its costs come back. `terms` are those of a new hold. If it is asked `again`, it brings its shape: the
        server may have lost that."""
        plan = keys.plan(asks)
        self._plan: Final = plan
        self._verb: Final = verb
        self._rest: Final = rest
        self._keys: Final = keys
        self._asks: Final = asks
        self._low: Final = low
        self._hold_id: Final = hold_id
        self._costs: Final = costs
        self._terms: Final = terms
        self._again: Final = again
        self._held = False
        self._shape: tuple[bytes, bytes] | None = None  # that this request stores
        first = asks[0]
        root = keys.root(first.key)
        names: list[bytes] = []
        fields = b""
        moment = keys.moment() if plan.dated else _NO_MOMENT
        ahead: i64 = moment.ahead
        self._ahead: Final = ahead
        self._simple: Final = simple and plan.simple and keys.short_forms and max(costs) < _NARROW
        block = plan.block(moment) if self._simple else b""
        if len(plan.codecs) == 1:
            start = root if not first.root else keys.start(first)
            names = [start + ending for ending in plan.codecs[0].endings]
            checksum = plan.checksum
        else:
            fields = self._add_names(names, root)
            checksum = plan.checksum if not asks[-1].root else crc32(b"\n".join(names) + fields)
        self._names: Final = len(names)
        own_id = encode(hold_id)
        names.append(root + plan.index)
        names.append(root + plan.hold + own_id)
        if self._simple:
            spec, numbers = self._short(plan, root, block, checksum, own_id)
            numbers += fields
            for i in range(len(plan.meters)):
                names[plan.meters[i]] += plan.days[i]
        else:
            numbers = plan.head.pack(*rest, HOLD_IDS.number(), checksum, *costs)
            numbers += b"".join([codec.periods(moment) for codec in plan.dated]) + fields
            numbers += pack("<H", len(own_id)) + own_id
            if terms is not None:
                numbers += self._texts(root, terms)
            spec = plan.spec(verb)
        super().__init__(spec, names, numbers)

    def _add_names(self, names: list[bytes], root: bytes) -> bytes:
        """Add the names of all counts, and return the fields of meters."""
        keys, plan, asks = self._keys, self._plan, self._asks
        fields = b""
        known = asks[0].key
        last = -1
        start = b""
        for i in range(len(plan.codecs)):
            codec = plan.codecs[i]
            place = plan.places[i]
            if place != last:
                last = place
                ask = asks[place]
                if not ask.root:
                    start = keys.root(ask.key)
                else:
                    if ask.root != known:
                        known, root = ask.root, keys.root(ask.root)
                    start = root if codec.metered else keys.below(root, ask.key)
                if codec.metered:
                    fields += field_of(ask.key)
            for ending in codec.endings:
                names.append(start + ending)  # noqa: PERF401 - quicker than a list for each
        return fields

    @property
    def counted(self) -> list[bytes]:
        """The keys of counts alone. Those of meters have their fields behind them, so that each is there once."""
        plan, names = self._plan, self.keys[: self._names]
        if not plan.meters:
            return names
        return counted_names(plan.codecs, names, [self._asks[place].key for place in plan.places])

    def _short(self, plan: HoldPlan, root: bytes, block: bytes, checksum: int, own_id: bytes) -> tuple[bytes, bytes]:
        """The spec and the numbers for lua/lean.lua."""
        given, flag, lease, keep, _ = self._rest
        costs, terms = self._costs, self._terms
        each = costs if len(costs) == len(plan.cost_places) else [costs[place] for place in plan.cost_places]
        middle = plan.costs.pack(*costs)
        most = 0
        shaped = _NO_SHAPE
        if terms is not None:
            most = min(terms.most, MAX_OPEN_HOLDS)
            digest, shape = self._shape_to_store(root, terms)
            note = encode(terms.note) if terms.note else b""
            if note or digest:
                middle += pack("<B", len(digest)) + digest + pack("<H", len(note)) + note + pack("<I", checksum)
            else:
                middle += _NO_NOTE + pack("<I", checksum)
            if digest:
                shaped = pack("<B", len(digest)) + digest + pack("<I", len(shape)) + shape
        texts = pack("<H", len(own_id)) + own_id + pack("<H", len(middle)) + middle + shaped
        head = plan.simple_head.pack(
            given, flag, lease, keep, HOLD_IDS.number(), checksum, self._ahead, most, len(costs), *each
        )
        return plan.simple_settle if terms is None else plan.simple_hold, block + head + texts

    def _texts(self, root: bytes, terms: HoldTerms) -> bytes:
        """The texts of a new hold alone: how many may be open, its note and its shape."""
        digest, shape = self._shape_to_store(root, terms)
        note = encode(terms.note)
        most = min(terms.most, MAX_OPEN_HOLDS)
        return b"".join(
            [pack("<dH", most, len(note)), note, pack("<B", len(digest)), digest, pack("<I", len(shape)), shape]
        )

    def _shape_to_store(self, root: bytes, terms: HoldTerms) -> tuple[bytes, bytes]:
        """The digest of a shape, and the shape itself unless the server should have it."""
        if not terms.shape:
            return b"", b""
        digest = self._keys.shapes.digest(terms.shape)
        if not self._again and self._keys.shapes.is_stored(root, digest):
            return digest, b""
        self._shape = (root, digest)
        return digest, encode(terms.shape)

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        status: i64 = row[at]
        at += 1
        state: HoldState = OPEN
        release = False
        left = 0
        costs: tuple[int, ...]
        if self._simple:
            status -= _SIMPLE
            costs = tuple(self._costs)
            given, flag, lease, _, _ = self._rest
            if status == _HELD:
                left = int(lease)
            elif status == _DENIED:
                state = DENIED
            else:
                state = CANCELLED if flag == 1 else SETTLED
                if given == 0:
                    at += len(costs)
                    costs = tuple(row[at - len(costs) : at])
            before = costs
        else:
            try:
                if status == _UNKNOWN:
                    raise UnknownHold(self._asks[0].key, self._hold_id)
                if status == _TOO_MANY:
                    most = MAX_OPEN_HOLDS if self._terms is None else min(self._terms.most, MAX_OPEN_HOLDS)
                    refuse_more_holds(self._asks[0].key, most)
                if status == _UNCOUNTABLE:
                    refuse_uncountable()
                if status == _OTHER_LIMITS:
                    refuse_other_limits(self._asks, self._hold_id)
                number, left, count = row[at], row[at + 1], row[at + 2]
                state, release = _STATES[number % _RELEASE], number >= _RELEASE
                at += 3 + count
                costs = tuple(row[at - count : at])
                if status == _OTHER_COSTS:
                    refuse_other_costs(self._asks, self._hold_id, state, costs, self._costs)
                if status == _ENDED:
                    refuse_ended(self._asks, self._hold_id, state, costs, "extend")
            except HoldError as error:
                self.answer = error
                return at
            before = costs
            if status == _FORCED and self._verb == _EXTEND:
                before = tuple(row[at : at + count])
                at += count
        self._held = status == _HELD or (status == _FORCED and self._verb == _HOLD)
        if self._held and self._shape is not None:
            self._keys.shapes.note_stored(*self._shape)
        parts, at = self._decide(row, at, now, status, before)
        decision = parts[0]
        if len(parts) > 1:
            decision = place_in(binding_of(parts), self._asks, pieces_of(self._asks))
        repeated = self._verb == _HOLD and status not in (_HELD, _DENIED, _FORCED)
        self.answer = HoldAnswer(decision, state, costs, left, tuple(parts), repeated, release)
        return at

    def _decide(
        self, row: list[int], at: i64, now: i64, status: i64, costs: Sequence[int]
    ) -> tuple[list[Decision], i64]:
        """The decision on each piece, and the position after them."""
        plan, denied, low = self._plan, status in (_DENIED, _FORCED), self._low
        passed = not denied and status != _AS_NOW
        decisions: list[Decision] = []
        for i in range(len(plan.codecs)):
            codec = plan.codecs[i]
            cost: i64 = 1
            passes = passed
            if denied:
                asked: i64 = self._costs[plan.places[i]]
                if self._verb == _EXTEND:  # it has its slot
                    before: i64 = costs[plan.places[i]]
                    cost = max(asked - before, 0)
                    passes = codec.limit.counts_slots
                else:
                    cost = max(asked, 1)
            decision, at = codec.decide(row, at, now, cost, low, passes, self._ahead)
            decisions.append(decision)
        return decisions, at

    def again(self) -> "HoldRequest":
        asked = (self._verb, self._asks, self._low, self._hold_id, self._costs, self._rest, self._terms)
        return HoldRequest(self._keys, *asked, again=True)

    def refunds(self) -> list[Request[Any]]:
        """A cancel, of what was held just now."""
        return [settle_request(self._keys, self._asks, self._low, self._hold_id, None, True)] if self._held else []


def hold_request(keys: Keys, asks: Sequence[Ask], low: int, terms: HoldTerms, *, granted: bool = False) -> HoldRequest:
    """`HoldStore.hold`. One that is granted already passes whatever is left."""
    costs = [ask.cost for ask in asks]
    flag = _GRANTED if granted else _FORCE if terms.forced else 0
    rest = (1, flag, int(terms.lease), int(terms.keep), terms.release)
    simple = not granted and not terms.release
    return HoldRequest(keys, _HOLD, asks, low, terms.hold_id, costs, rest, terms, simple)


def settle_request(
    keys: Keys, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, cancel: bool
) -> HoldRequest:
    """`HoldStore.settle`."""
    none = [0] * len(asks)
    if cancel:
        costs = none
    rest = (costs is not None, cancel, 0, 0, 0)
    return HoldRequest(keys, _SETTLE, asks, low, hold_id, costs or none, rest, None, True)


def extend_request(
    keys: Keys,
    asks: Sequence[Ask],
    low: int,
    hold_id: str,
    costs: Sequence[int] | None,
    lease: int | None,
    *,
    granted: bool = False,
) -> HoldRequest:
    """`HoldStore.extend`. One that is granted already passes whatever is left."""
    none = [0] * len(asks)
    end = -1 if lease is None else lease
    return HoldRequest(keys, _EXTEND, asks, low, hold_id, costs or none, (costs is not None, granted, end, 0, 0))


def find_request(keys: Keys, asks: Sequence[Ask], low: int, hold_id: str) -> HoldRequest:
    """`HoldStore.find_hold`."""
    return HoldRequest(keys, _FIND, asks, low, hold_id, [0] * len(asks), (0, 0, 0, 0, 0))
