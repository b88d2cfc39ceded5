"""Holds in Redis or Valkey: the verbs of `HoldStore`."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from redis.client import NEVER_DECODE

from headgate.errors import HeadgateError, HoldError, StoreAway
from headgate.flow import Flow, adrive, drive
from headgate.limits.decision import Decision
from headgate.limits.meter import Meter
from headgate.limits.numbers import LARGEST
from headgate.stores.base import Ask
from headgate.stores.holds import OPEN, HoldAnswer, HoldTerms, ListedHold, Renewal, UsageRow
from headgate.stores.redis.client_urls import AsyncClient, Client
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.dropped_keys import SCAN_COUNT
from headgate.stores.redis.executor import RequestExecutor
from headgate.stores.redis.hold_records import HoldRecord, read_record
from headgate.stores.redis.hold_requests import (
    HoldRequest,
    extend_request,
    find_request,
    hold_request,
    settle_request,
)
from headgate.stores.redis.keys import (
    Keys,
    days_ending,
    encode,
    hold_ending,
    meter_ending,
    open_ending,
    released_ending,
    shape_ending,
    slots_ending,
)
from headgate.stores.redis.local_cache import LocalCaches
from headgate.stores.redis.outage import HoldOutage
from headgate.stores.redis.protocol import ForeignData, PeekEachRequest, Request, TimeRequest, are_distinct
from headgate.stores.redis.server_errors import server_errors

_PAGE: Final = 100  # holds that one call reads


class FindKeys(NamedTuple):
    """A step of a flow: all keys in the server that match a pattern."""

    pattern: bytes


Step: TypeAlias = Request[Any] | FindKeys | tuple[object, ...]
"""A request, keys to find, or the words of a command."""


class RedisHolds:
    """The verbs of a `RedisStore` on holds."""

    def __init__(
        self,
        keys: Keys,
        clients: Clients,
        caches: LocalCaches | None,
        executor: RequestExecutor,
        outage: HoldOutage,
        log_foreign: Callable[[ForeignData], None],
    ) -> None:
        self.keys: Final = keys
        self._clients: Final = clients
        self._caches: Final = caches
        self._executor: Final = executor
        self._outage: Final = outage
        self._log_foreign: Final = log_foreign

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        """See `HoldStore.hold`."""
        if self._is_direct():
            try:
                return self._execute(hold_request(self.keys, asks, low, terms), asks)
            except StoreAway:
                return self._outage.hold(asks, low, terms)
        return drive(self._hold(asks, low, terms), self._executor.execute)

    async def ahold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        if self._is_direct():
            try:
                return await self._aexecute(hold_request(self.keys, asks, low, terms), asks)
            except StoreAway:
                return self._outage.hold(asks, low, terms)
        return await adrive(self._hold(asks, low, terms), self._executor.aexecute)

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        """See `HoldStore.settle`. While the server is away it is answered as done, and done later."""
        if self._is_direct():
            try:
                return self._execute(settle_request(self.keys, asks, low, hold_id, costs, cancel), asks)
            except StoreAway as error:
                return self._outage.settle(asks, low, hold_id, costs, cancel, error)
        return drive(self._settle(asks, low, hold_id, costs, cancel), self._executor.execute)

    async def asettle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        if self._is_direct():
            try:
                return await self._aexecute(settle_request(self.keys, asks, low, hold_id, costs, cancel), asks)
            except StoreAway as error:
                return self._outage.settle(asks, low, hold_id, costs, cancel, error)
        return await adrive(self._settle(asks, low, hold_id, costs, cancel), self._executor.aexecute)

    def extend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        """See `HoldStore.extend`. A longer lease is answered like `settle` while the server is away."""
        return drive(self._extend(asks, low, hold_id, costs, lease), self._executor.execute)

    async def aextend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        return await adrive(self._extend(asks, low, hold_id, costs, lease), self._executor.aexecute)

    def find_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        """See `HoldStore.find_hold`. Raises `StoreAway` while the server is away."""
        return drive(self._find(asks, low, hold_id), self._executor.execute)

    async def afind_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        return await adrive(self._find(asks, low, hold_id), self._executor.aexecute)

    def renew(self, renewals: Sequence[Renewal]) -> list[HoldAnswer | HeadgateError]:
        """See `RenewingStore.renew`."""
        requests = [
            extend_request(self.keys, asks, low, hold_id, None, lease) for asks, low, hold_id, lease in renewals
        ]
        if self._is_direct():
            with suppress(StoreAway):
                self._executor.execute_all([*requests])
        return [self._renewed(*one) for one in zip(renewals, requests, strict=True)]

    def _renewed(self, renewal: Renewal, request: HoldRequest) -> HoldAnswer | HeadgateError:
        """The answer to a renewal. One that has none yet is sent alone: it may be asked again, or booked for later."""
        if isinstance(request.answer, (HoldAnswer, HoldError)):
            return request.answer
        asks, low, hold_id, lease = renewal
        try:
            return self.extend(asks, low, hold_id, None, lease)
        except HeadgateError as error:
            return error

    # The most frequent verbs, without the time that a flow takes -----------------------------------------------------

    def _is_direct(self) -> bool:
        """Whether a verb is one request: nothing is drawn ahead here, and nothing waits to be booked."""
        return self._caches is None and len(self._outage.bookings) == 0

    def _execute(self, request: HoldRequest, asks: Sequence[Ask]) -> HoldAnswer:
        if len(asks) > 1:
            self._check_several(asks, request)
        try:
            return self._executor.execute(request)
        except ForeignData as error:
            raise self._away(error) from error

    async def _aexecute(self, request: HoldRequest, asks: Sequence[Ask]) -> HoldAnswer:
        if len(asks) > 1:
            self._check_several(asks, request)
        try:
            return await self._executor.aexecute(request)
        except ForeignData as error:
            raise self._away(error) from error

    def _away(self, error: ForeignData) -> StoreAway:
        """Foreign data counts as an outage."""
        self._log_foreign(error)
        return StoreAway(str(error))

    def _check_several(self, asks: Sequence[Ask], request: HoldRequest) -> None:
        if self._clients.cluster or not are_distinct(asks):
            self._executor.check_several(asks, request.counted)

    # Flows that yield requests ---------------------------------------------------------------------------------------

    def _hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> Flow[Request[Any], HoldAnswer]:
        try:
            return (yield from self._ask(hold_request(self.keys, asks, low, terms), asks, terms.hold_id))
        except StoreAway:
            return self._outage.hold(asks, low, terms)

    def _settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, cancel: bool
    ) -> Flow[Request[Any], HoldAnswer]:
        try:
            request = settle_request(self.keys, asks, low, hold_id, costs, cancel)
            return (yield from self._ask(request, asks, hold_id))
        except StoreAway as error:
            return self._outage.settle(asks, low, hold_id, costs, cancel, error)

    def _extend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> Flow[Request[Any], HoldAnswer]:
        try:
            request = extend_request(self.keys, asks, low, hold_id, costs, lease)
            return (yield from self._ask(request, asks, hold_id))
        except StoreAway as error:
            return self._outage.extend(asks, low, hold_id, costs, lease, error)

    def _find(self, asks: Sequence[Ask], low: int, hold_id: str) -> Flow[Request[Any], HoldAnswer]:
        return (yield from self._ask(find_request(self.keys, asks, low, hold_id), asks, hold_id))

    def _ask(self, request: HoldRequest, asks: Sequence[Ask], hold_id: str) -> Flow[Request[Any], HoldAnswer]:
        """Have a request carried out, after the tokens that are drawn ahead here have gone back."""
        if len(asks) > 1:
            self._check_several(asks, request)
        if self._outage.waits(asks, hold_id):
            raise StoreAway(f"hold {hold_id!r} is still to be booked: the store was away")
        try:
            if self._caches is not None:
                for ask in [ask for ask in asks if not ask.root]:  # nothing is drawn ahead of those
                    for piece in ask.limit.pieces:
                        for unused in self._caches.of(ask.name, piece).forget(ask.key, self.keys):  # noqa: UP028
                            yield unused
            answer: HoldAnswer = yield request
        except ForeignData as error:
            raise self._away(error) from error
        return answer

    # Listing ---------------------------------------------------------------------------------------------------------

    def list_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        """See `HoldStore.list_holds`. Those that are settled are not listed. Raises `StoreAway` like `forget`."""
        return drive(self._list(name, key, count), self._perform)

    async def alist_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        return await adrive(self._list(name, key, count), self._aperform)

    def _perform(self, step: Step) -> Any:
        with server_errors():
            if isinstance(step, Request):
                return self._executor.execute(step)
            if isinstance(step, FindKeys):
                return self._clients.call(partial(_scan, pattern=step.pattern), timeouts=None)
            return self._clients.call(_command(step))

    async def _aperform(self, step: Step) -> Any:
        with server_errors():
            if isinstance(step, Request):
                return await self._executor.aexecute(step)
            if isinstance(step, FindKeys):
                return await self._clients.acall(partial(_ascan, pattern=step.pattern), timeouts=None)
            return await self._clients.acall(_command(step))

    def _list(self, name: str, key: str, count: int) -> Flow[Step, list[ListedHold]]:
        root = self.keys.root(key)
        now = yield TimeRequest(root + open_ending(name))
        found: list[tuple[str, HoldRecord]] = []
        for span in ((f"({now}", "+inf"), ("-inf", now)):  # open, expired
            listed: list[tuple[str, HoldRecord]] = []
            for ending in (slots_ending(name), open_ending(name)):
                listed += yield from self._list_span(name, root, ending, span, count - len(found), now)
            found += sorted(listed, key=lambda one: one[1].finish)[: count - len(found)]
        return (yield from self._with_shapes(root, found, now))

    def _list_span(
        self, name: str, root: bytes, ending: bytes, span: tuple[str | int, str | int], count: int, now: int
    ) -> Flow[Step, list[tuple[str, HoldRecord]]]:
        """Up to `count` holds of a sorted set whose leases end within a span."""
        found: list[tuple[str, HoldRecord]] = []
        start, page = 0, [b""]
        while page and len(found) < count:
            page = yield ("ZRANGEBYSCORE", root + ending, *span, "LIMIT", start, _PAGE)
            ids = [hold_id for one in page if (hold_id := _decoded(one)) is not None]
            if ids:
                records = yield ("MGET", *[root + hold_ending(name, one) for one in ids])
                known = [(one, read_record(stored, now)) for one, stored in zip(ids, records, strict=True)]
                found += [(one, record) for one, record in known if record is not None and record.state == OPEN]
            start += _PAGE
        return found[:count]

    def _with_shapes(self, root: bytes, found: list[tuple[str, HoldRecord]], now: int) -> Flow[Step, list[ListedHold]]:
        digests = sorted({record.digest for _, record in found if record.digest})
        shapes: dict[bytes, str] = {}
        if digests:
            stored = yield ("MGET", *[root + shape_ending(digest) for digest in digests])
            shapes = {digest: text for digest, one in zip(digests, stored, strict=True) if (text := _decoded(one))}
        return [record.listed(hold_id, now, shapes.get(record.digest, "")) for hold_id, record in found]

    # Accounts --------------------------------------------------------------------------------------------------------

    def read_hold(self, name: str, key: str, hold_id: str) -> ListedHold | None:
        """See `AccountStore.read_hold`. Raises `StoreAway` while the server is away."""
        return drive(self._read(name, key, hold_id), self._perform)

    async def aread_hold(self, name: str, key: str, hold_id: str) -> ListedHold | None:
        return await adrive(self._read(name, key, hold_id), self._aperform)

    def _read(self, name: str, key: str, hold_id: str) -> Flow[Step, ListedHold | None]:
        root = self.keys.root(key)
        now = yield TimeRequest(root + open_ending(name))
        (stored,) = yield ("MGET", root + hold_ending(name, hold_id))
        record = read_record(stored, now)
        if record is None or (record.state == OPEN and not (yield from self._is_listed(name, root, hold_id))):
            return None
        return (yield from self._with_shapes(root, [(hold_id, record)], now))[0]

    def _is_listed(self, name: str, root: bytes, hold_id: str) -> Flow[Step, bool]:
        """Whether an open hold has not been forgotten together with its key."""
        for ending in (open_ending(name), slots_ending(name)):
            if (yield ("ZSCORE", root + ending, encode(hold_id))) is not None:
                return True
        return False

    def peek_each(self, asks: Sequence[Ask], low: int) -> tuple[Decision, ...]:
        """See `AccountStore.peek_each`. Raises `StoreAway` while the server is away."""
        return drive(self._peek_each(asks, low), self._executor.execute)

    async def apeek_each(self, asks: Sequence[Ask], low: int) -> tuple[Decision, ...]:
        return await adrive(self._peek_each(asks, low), self._executor.aexecute)

    def _peek_each(self, asks: Sequence[Ask], low: int) -> Flow[Request[Any], tuple[Decision, ...]]:
        request = PeekEachRequest(self.keys, asks, low)
        if not request.keys:  # there is nothing to count
            return tuple([ask.limit.decide(None, 0, 1, ask.limit.wait(None, 0, 1), low) for ask in asks])
        self._executor.check_several(asks, request.counted)
        try:
            decisions: tuple[Decision, ...] = yield request
        except ForeignData as error:
            raise self._away(error) from error
        return decisions

    def read_usage(self, name: str, first: int, last: int, root: str | None = None) -> list[UsageRow]:
        """See `AccountStore.read_usage`. Of all roots, it looks at every key in the server. Raises `StoreAway`."""
        return drive(self._usage(name, first, last, root), self._perform)

    async def aread_usage(self, name: str, first: int, last: int, root: str | None = None) -> list[UsageRow]:
        return await adrive(self._usage(name, first, last, root), self._aperform)

    def _give_back_due(self, name: str, root: str, zone: str) -> Flow[Step, None]:
        """Have expired holds give back what they have used, if their terms say so: a look at the meter does that."""
        stored = self.keys.root(root) + released_ending(meter_ending(name, zone))
        if (yield ("EXISTS", stored)):
            yield PeekEachRequest(self.keys, [Ask(name, "", Meter(zone), 1, root)], 0)

    def _usage(self, name: str, first: int, last: int, asked: str | None) -> Flow[Step, list[UsageRow]]:
        rows: list[UsageRow] = []
        if asked is None:
            names = yield FindKeys(self.keys.days_pattern(name))
        else:
            names = [self.keys.root(asked) + days_ending(name)]
        for stored in names:
            root = self.keys.root_of(stored) if asked is None else asked
            start_of_names = stored.removesuffix(days_ending(name))
            days = yield ("ZRANGEBYSCORE", stored, first, f"({last}")
            for zone in sorted({day.decode().rpartition(":")[0] for day in days}):
                yield from self._give_back_due(name, root, zone)
            for day in days:
                zone, _, start = day.decode().rpartition(":")
                counted = yield ("HGETALL", start_of_names + meter_ending(name, zone) + encode(start))
                flat = not isinstance(counted, dict)
                fields = zip(counted[::2], counted[1::2], strict=True) if flat else counted.items()
                for key, used in fields:
                    amount = min(int(used), LARGEST)
                    if amount > 0:
                        rows.append(UsageRow(root, key.decode("utf-8", "surrogatepass"), int(start), amount))
        return rows


def _decoded(stored: bytes | None) -> str | None:
    """An id, or a shape; None if it isn't ours."""
    if stored is None:
        return None
    try:
        return stored.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None


def _scan(client: Client, pattern: bytes) -> list[bytes]:
    return sorted({_raw(key) for key in client.scan_iter(match=pattern, count=SCAN_COUNT)})


async def _ascan(client: AsyncClient, pattern: bytes) -> list[bytes]:
    return sorted({_raw(key) async for key in client.scan_iter(match=pattern, count=SCAN_COUNT)})


def _raw(key: bytes | str) -> bytes:
    return encode(key) if isinstance(key, str) else key


def _command(words: tuple[object, ...]) -> Any:
    # A client that decodes replies can't decode every id.
    return lambda client: client.execute_command(*words, **{NEVER_DECODE: True})
