"""Holds in Redis or Valkey: the verbs of `HoldStore`."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from redis.client import NEVER_DECODE

from headgate.errors import StoreAway
from headgate.flow import Flow, adrive, drive
from headgate.stores.base import Ask
from headgate.stores.holds import HoldAnswer, HoldTerms, ListedHold
from headgate.stores.redis.clients import Clients, server_errors
from headgate.stores.redis.executor import RequestExecutor
from headgate.stores.redis.hold_requests import (
    HoldRequest,
    ListRequest,
    extend_request,
    find_request,
    hold_request,
    settle_request,
)
from headgate.stores.redis.keys import Keys, open_ending, slots_ending
from headgate.stores.redis.local_cache import LocalCaches
from headgate.stores.redis.outage import HoldOutage
from headgate.stores.redis.protocol import ForeignData, Request

_PAGE: Final = 100  # holds that one call reads


class RedisHolds:
    """What a `RedisStore` can do with holds."""

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
        return drive(self._hold(asks, low, terms), self._executor.execute)

    async def ahold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        return await adrive(self._hold(asks, low, terms), self._executor.aexecute)

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        """See `HoldStore.settle`. While the server is away it is answered as done, and done later."""
        return drive(self._settle(asks, low, hold_id, costs, cancel), self._executor.execute)

    async def asettle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
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
            self._executor.check_several(asks, request.counted)
        if self._outage.waits(asks, hold_id):
            raise StoreAway(f"hold {hold_id!r} is still to be booked: the store was away")
        try:
            if self._caches is not None:
                for ask in asks:
                    for piece in ask.limit.pieces:
                        for unused in self._caches.of(ask.name, piece).forget(ask.key, self.keys):  # noqa: UP028
                            yield unused
            answer: HoldAnswer = yield request
        except ForeignData as error:
            self._log_foreign(error)
            raise StoreAway(str(error)) from error
        return answer

    # Listing ---------------------------------------------------------------------------------------------------------

    def list_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        """See `HoldStore.list_holds`. Those that are settled are not listed. Raises `StoreAway` like `forget`."""
        with server_errors():
            return drive(self._list(name, key, count), self._perform)

    async def alist_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        with server_errors():
            return await adrive(self._list(name, key, count), self._aperform)

    def _perform(self, step: Request[Any] | tuple[object, ...]) -> Any:
        return self._executor.execute(step) if isinstance(step, Request) else self._clients.call(_command(step))

    def _aperform(self, step: Request[Any] | tuple[object, ...]) -> Any:
        return self._executor.aexecute(step) if isinstance(step, Request) else self._clients.acall(_command(step))

    def _list(self, name: str, key: str, count: int) -> Flow[Request[Any] | tuple[object, ...], list[ListedHold]]:
        """Yields commands and requests to send."""
        root = self.keys.root(key)
        found: list[tuple[int, ListedHold]] = []
        for ending in (slots_ending(name), open_ending(name)):
            listed: list[tuple[int, ListedHold]] = []
            start, page = 0, [b""]
            while page and len(listed) < count:
                page = yield ("ZRANGE", root + ending, start, start + _PAGE - 1)
                ids = [hold_id for one in page if (hold_id := _decoded(one)) is not None]
                if ids:
                    listed += yield ListRequest(self.keys, name, key, ids)
                start += _PAGE
            found += listed[:count]
        found.sort(key=lambda one: one[0])
        return [one for _, one in found[:count]]


def _decoded(stored: bytes) -> str | None:
    """An id; None if it isn't ours."""
    try:
        return stored.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None


def _command(words: tuple[object, ...]) -> Any:
    # A client that decodes replies can't decode every id.
    return lambda client: client.execute_command(*words, **{NEVER_DECODE: True})
