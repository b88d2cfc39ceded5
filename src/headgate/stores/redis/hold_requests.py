"""Requests about holds to the script: see lua/holds.lua."""

import secrets
from collections.abc import Sequence
from struct import pack
from typing import Any, Final
from zlib import crc32

from headgate._native import i64
from headgate.errors import HoldError, UnknownHold
from headgate.limits.decision import Decision, binding_of
from headgate.stores.asks import pieces_of, place_in
from headgate.stores.base import Ask
from headgate.stores.holds import (
    CANCELLED,
    DENIED,
    EXPIRED,
    OPEN,
    SETTLED,
    HoldAnswer,
    HoldState,
    HoldTerms,
    ListedHold,
    refuse_ended,
    refuse_more_holds,
    refuse_other_costs,
    refuse_other_limits,
)
from headgate.stores.redis.keys import Keys, LimitCodec, Moment, encode, hold_ending, open_ending, slots_ending
from headgate.stores.redis.protocol import Request

_STATES: Final[tuple[HoldState, ...]] = (DENIED, OPEN, SETTLED, CANCELLED, EXPIRED)

_DENIED: Final = 0
_HELD: Final = 1
_UNKNOWN: Final = 2
_OTHER_COSTS: Final = 3
_ENDED: Final = 4
_TOO_MANY: Final = 5
_AS_NOW: Final = 6
_OTHER_LIMITS: Final = 8
# 7 (held before, or extended) passes like _HELD, and needs no name here.


class HoldRequest(Request[HoldAnswer]):
    """A verb on a hold."""

    def __init__(
        self, keys: Keys, verb: bytes, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int], *rest: float
    ) -> None:
        self._verb: Final = verb
        self._rest: Final = rest
        self._keys: Final = keys
        self._asks: Final = asks
        self._low: Final = low
        self._hold_id: Final = hold_id
        self._costs: Final = costs
        self._pieces: Final = pieces_of(asks)
        self._codecs: Final[list[tuple[int, LimitCodec]]] = []
        self._held = False
        first, names, spec, periods = asks[0], list[bytes](), b"", b""
        moment: Moment | None = None
        for place, ask in enumerate(asks):
            root = keys.root(ask.key)
            spec += b"a"
            for piece in ask.limit.pieces:
                codec = keys.codec(ask.name, piece)
                self._codecs.append((place, codec))
                names.extend([root + ending for ending in codec.endings])
                spec += codec.spec
                if codec.calendar:
                    moment = moment or keys.moment()
                    periods += codec.periods(moment)
        self._ahead: Final = 0 if moment is None else moment.ahead
        root = keys.root(first.key)
        names.append(root + (slots_ending if first.limit.counts_slots else open_ending)(first.name))
        names.append(root + hold_ending(first.name, hold_id))
        self.counted: Final = names[:-2]
        """The keys of counts alone."""
        numbers = pack(f"<{5 + len(costs)}d", *rest, *costs)
        limits = crc32(b"\n".join([ending for _, codec in self._codecs for ending in codec.endings]))
        epoch = pack("<2d", secrets.randbits(52) + 1, limits)
        super().__init__(keys.spec(verb, spec), names, numbers[:40] + epoch + numbers[40:] + periods + encode(hold_id))

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        status = row[at]
        at += 1
        try:
            if status == _UNKNOWN:
                raise UnknownHold(self._asks[0].key, self._hold_id)
            if status == _TOO_MANY:
                refuse_more_holds(self._asks[0].key)
            if status == _OTHER_LIMITS:
                refuse_other_limits(self._asks, self._hold_id)
            state, left, count = _STATES[row[at]], row[at + 1], row[at + 2]
            at += 3 + count
            costs = tuple(row[at - count : at])
            if status == _OTHER_COSTS:
                refuse_other_costs(self._asks, self._hold_id, state, costs, self._costs)
            if status == _ENDED:
                refuse_ended(self._asks, self._hold_id, state, costs, "extend")
        except HoldError as error:
            self.answer = error
            return at
        self._held = status == _HELD
        decision, at = self._decide(row, at, now, status, costs)
        self.answer = HoldAnswer(decision, state, costs, left)
        return at

    def _decide(self, row: list[int], at: i64, now: i64, status: int, costs: Sequence[int]) -> tuple[Decision, i64]:
        decisions = []
        for place, codec in self._codecs:
            cost, passed = 1, status not in (_DENIED, _AS_NOW)
            if status == _DENIED:
                cost = self._costs[place]
                if self._verb == b"x":  # it has its slot
                    cost, passed = max(cost - costs[place], 0), codec.limit.counts_slots
            decision, at = codec.decide(row, at, now, cost, self._low, passed, self._ahead)
            decisions.append(decision)
        bound = decisions[0] if len(decisions) == 1 else binding_of(decisions)
        return place_in(bound, self._asks, self._pieces), at

    def again(self) -> "HoldRequest":
        return HoldRequest(self._keys, self._verb, self._asks, self._low, self._hold_id, self._costs, *self._rest)

    def refunds(self) -> list[Request[Any]]:
        """A cancel, of what was held just now."""
        return [settle_request(self._keys, self._asks, self._low, self._hold_id, None, True)] if self._held else []


def hold_request(keys: Keys, asks: Sequence[Ask], low: int, terms: HoldTerms, *, granted: bool = False) -> HoldRequest:
    """`HoldStore.hold`. One that is granted already passes whatever is left."""
    costs = [ask.cost for ask in asks]
    return HoldRequest(keys, b"h", asks, low, terms.hold_id, costs, 1, granted, terms.lease, terms.keep, terms.release)


def settle_request(
    keys: Keys, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, cancel: bool
) -> HoldRequest:
    """`HoldStore.settle`."""
    none = [0] * len(asks)
    if cancel:
        return HoldRequest(keys, b"t", asks, low, hold_id, none, 1, 1, 0, 0, 0)
    return HoldRequest(keys, b"t", asks, low, hold_id, costs or none, costs is not None, 0, 0, 0, 0)


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
    return HoldRequest(keys, b"x", asks, low, hold_id, costs or none, costs is not None, granted, end, 0, 0)


def find_request(keys: Keys, asks: Sequence[Ask], low: int, hold_id: str) -> HoldRequest:
    """`HoldStore.find_hold`."""
    return HoldRequest(keys, b"q", asks, low, hold_id, [0] * len(asks), 0, 0, 0, 0, 0)


class ListRequest(Request[list[tuple[int, ListedHold]]]):
    """Some holds of a key, each after the end of its lease: those that are open or have expired."""

    def __init__(self, keys: Keys, name: str, key: str, ids: Sequence[str]) -> None:
        root = keys.root(key)
        self._ids: Final = ids
        super().__init__(b"y" + b"n" * len(ids), [root + hold_ending(name, one) for one in ids], b"")

    def read(self, row: list[int], at: i64, now: i64) -> i64:
        found: list[tuple[int, ListedHold]] = []
        at += 1
        for hold_id in self._ids:
            state = _STATES[row[at]]
            at += 1
            if state == DENIED:  # there is none
                continue
            end, count = row[at], row[at + 1]
            at += 2 + count
            if state == OPEN:
                listed = ListedHold(
                    hold_id, OPEN if end > now else EXPIRED, tuple(row[at - count : at]), max(end - now, 0)
                )
                found.append((end, listed))
        self.answer = found
        return at
