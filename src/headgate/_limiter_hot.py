"""The hot path of `Limiter`, compiled: from a request to the store and back.

`Limiter` adds the rest in plain Python. Async methods stay there: a compiled coroutine that is cancelled throws into
its awaitable in a way that Python 3.12 warns of.
"""

from typing import Final, Literal, TypeAlias

from headgate._hold_hot import Hold, LocalHolds, age_of, keep_of, lease_of
from headgate._native import Text, Unchecked, i64, mypyc_attr
from headgate.errors import refuse
from headgate.hold_attempt import LimiterAttempt, check_id, read_terms
from headgate.hold_owner import HoldOwner
from headgate.limits.decision import Decision, Limit
from headgate.limits.fixed import UNLIMITED
from headgate.limits.numbers import LARGEST, Cost, Number, cost_in
from headgate.stores.base import Ask, CachedStore, Store, Verb
from headgate.stores.hold_ids import HOLD_IDS
from headgate.stores.memory import in_process
from headgate.wait_queue import WaitQueues

_LONGEST_ID: Final = 200

PEEK: Final = Verb.PEEK

OnExpiry: TypeAlias = Literal["keep", "release"]

KEEP: Final = 86_400
"""Seconds for which a hold is remembered after its end."""

_KEEP: Final = "keep"
_WEEK: Final = 604_800  # seconds
_FOREVER: Final[i64] = 2**62


@mypyc_attr(allow_interpreted_subclasses=True)
class LimiterChecks:
    """A limit and the store that counts it.

    With `pin`, the store keeps a table for the limit for ever, which makes checks fast. Without it, the store drops the
    table some time after its last key, as it has to where limits come and go.
    """

    _holds: HoldOwner  # made by `Limiter`

    def __init__(self, limit: Limit, store: Store, name: str, low: i64, pin: bool) -> None:
        self._limit: Final = limit
        self._store: Final = store
        self._name: Final = name
        self._low: Final = low
        memory = in_process(store)
        self._decimals: Final = limit.decimals
        self._counts_costs: Final = limit.counts_costs
        own = pin and not limit.shares_counts  # a table of its own, in which costs are whole
        self._table: Final = memory.limit_table(name, limit) if memory is not None and own else None
        self._queues: Final = WaitQueues()
        self._local: LocalHolds | None = None  # what makes its holds, in memory
        self._cache: Final = (
            store.local_cache(name, limit) if memory is None and pin and isinstance(store, CachedStore) else None
        )

    def check(self, key: Text, cost: Cost = 1, *, request_id: Text | None = None) -> Decision:
        """Let a request of this cost pass and count it, or deny it and count nothing.

        With a `request_id` it is counted once, however often it is asked within a minute.
        """
        table = self._table
        if table is not None and request_id is None and type(key) is str and type(cost) is int and 0 < cost <= LARGEST:
            return table.check(key, cost, self._low, None)
        if self._cache is not None and request_id is None:
            served = self._cache.serve(key_of(key), cost_in(self._decimals, cost), self._low, None)
            if served is not None:
                return served
        return self._apply(Verb.CHECK, key, cost, request_id)

    def hold(
        self,
        key: Text,
        cost: Cost = 1,
        *,
        lease: Number = 60,
        timeout: Number | None = 0,
        hold_id: Text | None = None,
        on_expiry: OnExpiry | Unchecked = "keep",
        keep: Number = KEEP,
        max_age: Number | None = 3600,
    ) -> Hold:
        """Reserve a cost, and a slot if slots are limited, to be settled later: see `Hold`. It is true if granted.

        Unless it is settled or cancelled before, its `lease` ends after so many seconds: its slot is free then, and
        its cost stays counted, or comes back with `on_expiry="release"`. In a `with` block the lease is renewed until
        the hold is `max_age` seconds old. With a `timeout`, wait for it in line, as `acquire` does.

        With a `hold_id` it is made once, however often it is asked for. It is remembered for `keep` seconds after its
        end.
        """
        local = self._local
        if (
            local is None
            or hold_id is not None
            or type(timeout) is not int
            or timeout != 0
            or (on_expiry is not _KEEP and on_expiry != _KEEP)
        ):
            attempt = self._attempt(key, cost, lease, hold_id, on_expiry, keep, max_age)
            return attempt.run(self._queues, key_of(key), timeout)
        name = key if type(key) is str else key_of(key)
        units: i64 = (
            cost if local.whole and type(cost) is int and 0 < cost <= LARGEST else cost_in(self._decimals, cost)
        )
        return local.hold(
            name,
            units,
            lease * 1_000_000 if type(lease) is int and 0 < lease <= _WEEK else lease_of(lease),
            keep * 1_000_000 if type(keep) is int and 0 < keep <= _WEEK else keep_of(keep),
            max_age * 1_000_000 if type(max_age) is int and 0 < max_age <= _WEEK else _age(max_age),
        )

    def _attempt(
        self,
        key: object,
        cost: object,
        lease: object,
        hold_id: object,
        on_expiry: object,
        keep: object,
        max_age: object,
    ) -> LimiterAttempt:
        asks = self._hold_asks(key, cost)
        terms = read_terms(HOLD_IDS.new() if hold_id is None else check_id(hold_id), lease, on_expiry, keep)
        return LimiterAttempt(self._holds, asks, terms, max_age, own_id=hold_id is None)

    def _hold_asks(self, key: object, cost: object = 1) -> tuple[Ask, ...]:
        units = cost_in(self._decimals, cost)
        if units > LARGEST and not any([part.counts_costs and part is not UNLIMITED for part in self._limit.parts]):
            units = LARGEST  # it passes, and has to be written down
        return (Ask(self._name, key_of(key), self._limit, units),)

    def _apply(self, verb: Verb, key: object, cost: object, request_id: object = None) -> Decision:
        return self._store.apply(verb, [self._ask(verb, key, cost)], self._low, None, id_of(request_id))

    def _ask(self, verb: Verb, key: object, cost: object) -> Ask:
        if verb is not PEEK and not self._counts_costs:
            refuse(f"Limiter.{verb.value}", "a limit that counts requests (a slot is taken by `hold`)", self._limit)
        return Ask(self._name, key_of(key), self._limit, cost_in(self._decimals, cost))


def _age(max_age: object) -> int:
    return _FOREVER if max_age is None else age_of(max_age)


def key_of(key: object) -> str:
    """A key: any string."""
    if not isinstance(key, str):
        refuse("key", "a string", key)
    return str.__str__(key)  # the plain string of a subclass, whose own hash and equality must not count


def id_of(request_id: object) -> str:
    """A request's id, or "" if it has none."""
    if request_id is None:
        return ""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= _LONGEST_ID:
        refuse("request_id", f"1 to {_LONGEST_ID} characters", request_id)
    return request_id
