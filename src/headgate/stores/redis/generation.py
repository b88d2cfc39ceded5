"""The generation of a server's data: a random id, by which hubs see that the data is lost or another's."""

from collections.abc import Callable
from typing import Any, Final
from uuid import uuid4

from headgate.errors import StoreAway, StoreLost
from headgate.stores.redis.clients import ERRORS, AsyncClient, Clients, describe_error, text_of
from headgate.stores.redis.protocol import FORMAT, admin_prefix

_LOST: Final = "the server has lost its data, or is another one"
_MISSING: Final = "the server has lost its data, or is another, empty one"
_PARTIAL: Final = "a part of the server's data is lost"
_NEW: Final = "new:"
"""What an id beside the changes begins with until it is beside the agents as well."""
_REPLACE: Final = """
if (redis.call('GET', KEYS[1]) or '') == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) end
"""
_MAX_STEPS: Final = 100  # of one acceptance; it takes three, and a few more if other hubs accept at the same time
_OTHER: Final = "the server has the data of other hubs: it is another one, or its data was replaced"


class RedisGeneration:
    """See `StoreGeneration`.

    The id is stored twice, without expiry: beside the agents and beside the changes. In a cluster these are in
    different slots, and a script sees only its own.
    """

    def __init__(self, clients: Clients, prefix: str) -> None:
        start = admin_prefix(prefix)
        self._clients: Final = clients
        self.beside_agents: Final = f"{start}{{agents}}{FORMAT}:generation"
        self.beside_changes: Final = f"{start}{{{start}changes}}:generation"
        self._expected = ""
        self._reason = ""

    @property
    def expected(self) -> str:
        return self._expected

    @expected.setter
    def expected(self, generation: str) -> None:
        self._expected, self._reason = generation, ""

    @property
    def reason(self) -> str:
        return self._reason

    def lost(self, reason: str = _LOST) -> StoreLost:
        """Remember that the data is lost; the error to raise."""
        self._reason = reason
        return StoreLost(reason)

    def require(self) -> None:
        """Raise `StoreLost` if the data was found lost."""
        if self._reason:
            raise StoreLost(self._reason)

    async def check(self) -> None:
        found = await self._read()
        expected = self._expected or found[0]  # before the first claim any, but both halves must be the same
        if found != (expected, expected):
            raise self.lost(_reason(*found))
        self._reason = ""

    async def claim(self) -> str:
        found = await self._read()
        if found == ("", ""):
            await self._set(self.beside_changes, uuid4().hex, only_first=True)
            first = await self._get(self.beside_changes)  # another hub may have been quicker
            await self._set(self.beside_agents, first, only_first=True)
            found = await self._read()
        if found[0] != found[1]:  # another hub may be about to write the second
            raise self.lost(_PARTIAL)
        self.expected = found[0]
        return self.expected

    async def accept(self) -> str:
        """See `StoreGeneration.accept`.

        Several hubs may accept at once. The new id is first written beside the changes, by one of them, and marked as
        new. Each hub that reads the mark copies the id, and then removes the mark.
        """
        for _ in range(_MAX_STEPS):
            agents, changes = await self._read()
            if changes.startswith(_NEW):
                new = changes.removeprefix(_NEW)
                await self._set(self.beside_agents, new)
                await self._replace(self.beside_changes, changes, new)
            elif agents != changes or agents in ("", self._expected):
                await self._replace(self.beside_changes, changes, _NEW + uuid4().hex)
            else:
                self.expected = agents
                return agents
        raise StoreAway("the store can't be accepted: its generation changes all the time")

    async def _read(self) -> tuple[str, str]:
        """The ids beside the agents and beside the changes, or "".

        That beside the changes is read first, since it is completed last.
        """
        changes = await self._get(self.beside_changes)
        return await self._get(self.beside_agents), changes

    async def _get(self, key: str) -> str:
        return text_of(await self._ask(lambda client: client.get(key)) or "")

    async def _set(self, key: str, generation: str, *, only_first: bool = False) -> None:
        await self._ask(lambda client: client.set(key, generation, nx=only_first))

    async def _replace(self, key: str, old: str, new: str) -> None:
        """Replace an id, unless another hub was quicker."""
        await self._ask(lambda client: client.eval(_REPLACE, 1, key, old, new))

    async def _ask(self, work: Callable[[AsyncClient], Any]) -> Any:
        try:
            return await self._clients.acall(work)
        except ERRORS as error:
            raise StoreAway(f"the generation of the store can't be read or written: {describe_error(error)}") from error


def _reason(agents: str, changes: str) -> str:
    if agents != changes:
        return _PARTIAL
    return _OTHER if agents else _MISSING
