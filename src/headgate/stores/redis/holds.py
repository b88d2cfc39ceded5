"""Holds in Redis or Valkey: the verbs of `HoldStore`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from headgate.errors import StoreAway
from headgate.flow import Flow, adrive, drive
from headgate.stores.base import Ask
from headgate.stores.holds import HoldAnswer, HoldTerms, ListedHold
from headgate.stores.redis.clients import ERRORS, Clients, describe_error
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
from headgate.stores.redis.protocol import Request

_PAGE: Final = 100  # holds that one call reads


class RedisHolds:
    """What a `RedisStore` can do with holds."""

    def __init__(self, keys: Keys, clients: Clients, caches: LocalCaches | None) -> None:
        self.keys: Final = keys
        self._clients: Final = clients
        self._caches: Final = caches

    def execute(self, request: Request[Any]) -> Any:
        raise NotImplementedError

    async def aexecute(self, request: Request[Any]) -> Any:
        raise NotImplementedError

    def _check_several(self, asks: Sequence[Ask], keys: list[bytes]) -> None:
        raise NotImplementedError

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        """See `HoldStore.hold`."""
        return drive(self._ask(hold_request(self.keys, asks, low, terms), asks), self.execute)

    async def ahold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        return await adrive(self._ask(hold_request(self.keys, asks, low, terms), asks), self.aexecute)

    def settle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        """See `HoldStore.settle`."""
        return drive(self._ask(settle_request(self.keys, asks, low, hold_id, costs, cancel), asks), self.execute)

    async def asettle(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool = False
    ) -> HoldAnswer:
        request = settle_request(self.keys, asks, low, hold_id, costs, cancel)
        return await adrive(self._ask(request, asks), self.aexecute)

    def extend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        """See `HoldStore.extend`."""
        return drive(self._ask(extend_request(self.keys, asks, low, hold_id, costs, lease), asks), self.execute)

    async def aextend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        request = extend_request(self.keys, asks, low, hold_id, costs, lease)
        return await adrive(self._ask(request, asks), self.aexecute)

    def find_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        """See `HoldStore.find_hold`."""
        return drive(self._ask(find_request(self.keys, asks, low, hold_id), asks), self.execute)

    async def afind_hold(self, asks: Sequence[Ask], low: int, hold_id: str) -> HoldAnswer:
        return await adrive(self._ask(find_request(self.keys, asks, low, hold_id), asks), self.aexecute)

    def _ask(self, request: HoldRequest, asks: Sequence[Ask]) -> Flow[Request[Any], HoldAnswer]:
        """Have a request carried out, after the tokens that are drawn ahead here have gone back."""
        if len(asks) > 1:
            self._check_several(asks, request.counted)
        if self._caches is not None:
            for ask in asks:
                for piece in ask.limit.pieces:
                    for unused in self._caches.of(ask.name, piece).forget(ask.key, self.keys):  # noqa: UP028 - a list
                        yield unused
        answer: HoldAnswer = yield request
        return answer

    # Listing ---------------------------------------------------------------------------------------------------------

    def list_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        """See `HoldStore.list_holds`. Those that are settled are not listed. Raises `StoreAway` like `forget`."""
        with _server_errors():
            return drive(self._list(name, key, count), self._perform)

    async def alist_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        with _server_errors():
            return await adrive(self._list(name, key, count), self._aperform)

    def _perform(self, step: Request[Any] | tuple[object, ...]) -> Any:
        return self.execute(step) if isinstance(step, Request) else self._clients.call(_command(step))

    def _aperform(self, step: Request[Any] | tuple[object, ...]) -> Any:
        return self.aexecute(step) if isinstance(step, Request) else self._clients.acall(_command(step))

    def _list(self, name: str, key: str, count: int) -> Flow[Request[Any] | tuple[object, ...], list[ListedHold]]:
        """Yields commands and requests to send."""
        root = self.keys.root(key)
        found: list[tuple[int, ListedHold]] = []
        for ending in (slots_ending(name), open_ending(name)):
            listed: list[tuple[int, ListedHold]] = []
            start, page = 0, [b""]
            while page and len(listed) < count:
                page = yield ("ZRANGE", root + ending, start, start + _PAGE - 1)
                ids = [one.decode("utf-8", "surrogatepass") if isinstance(one, bytes) else one for one in page]
                if ids:
                    listed += yield ListRequest(self.keys, name, key, ids)
                start += _PAGE
            found += listed[:count]
        found.sort(key=lambda one: one[0])
        return [one for _, one in found[:count]]


def _command(words: tuple[object, ...]) -> Any:
    return lambda client: client.execute_command(*words)


@contextmanager
def _server_errors() -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        raise StoreAway(describe_error(error)) from error
