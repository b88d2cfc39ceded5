"""The generation of a server's data: a random id, by which hubs see that the data is lost or another's."""

from collections.abc import Callable
from operator import lt
from typing import Any, Final
from uuid import uuid4

from headgate.errors import StoreAway, StoreLost
from headgate.lifecycle import new_lock
from headgate.stores.base import DataVersion
from headgate.stores.redis.client_urls import AsyncClient
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.keys import FORMAT, admin_prefix
from headgate.stores.redis.resp import text_of
from headgate.stores.redis.script import part
from headgate.stores.redis.server_errors import server_errors

_LOST: Final = "the server has lost its data, or is another one"
_MISSING: Final = "the server has lost its data, or is another, empty one"
_PARTIAL: Final = "a part of the server's data is lost"
_NEW: Final = "new:"
"""The prefix of an id beside the changes until it is beside the agents as well."""
_REPLACE: Final = """
if (redis.call('GET', KEYS[1]) or '') == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) end
"""
_MAX_STEPS: Final = 100  # of one acceptance; it takes three, and a few more if other hubs accept at the same time
_OLDER: Final = "the server's data is older than what this hub has seen, or a part of it is lost"
_OTHER: Final = "the server has the data of other hubs: it is another one, or its data was replaced"


AGENTS: Final = part("agents.lua")
CHANGE_LOG: Final = part("changelog.lua")


class RedisGeneration:
    """See `StoreGeneration`.

    The id is stored twice, without expiry: beside the agents and beside the changes. In a cluster these are in
    different slots, and a script sees only its own.
    """

    def __init__(self, clients: Clients, prefix: str) -> None:
        start = admin_prefix(prefix)
        agents = f"{start}{{agents}}{FORMAT}:"  # the braces keep all in one slot of a cluster
        self._clients: Final = clients
        self.beside_agents: Final = f"{agents}generation"
        self.beside_changes: Final = f"{start}{{{start}changes}}:generation"
        names = ("tokens", "owners", "names", "invitations", "changes")
        self.keys_of_agents: Final = (*[f"{agents}{name}" for name in names], self.beside_agents)
        """The keys of `AGENTS`."""
        self.keys_of_changes: Final = (f"{start}changes", self.beside_changes)
        """The keys of `CHANGE_LOG`."""
        self._expected = ""
        self.seen = DataVersion()
        self._reason = ""
        self._lock: Final = new_lock()  # changes are read and written by threads

    @property
    def expected(self) -> str:
        return self._expected

    @expected.setter
    def expected(self, generation: str) -> None:
        with self._lock:
            self._expected, self._reason, self.seen = generation, "", DataVersion()

    def see(self, generation: str, agents: int = 0, change: int = 0, position: int = 0) -> None:
        """Remember what was seen of a generation, if it is the expected one."""
        with self._lock:
            if generation and generation == self._expected:
                self.seen = DataVersion(*map(max, self.seen, (agents, change, position)))

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
        while True:
            expected, seen = self._expected, self.seen  # before the store is asked: it has at least as much
            agents, changes, age = await self._read()
            if self._expected == expected:  # otherwise the store was accepted meanwhile
                break
        if agents != changes:
            raise self.lost(_PARTIAL)
        if agents != expected != "":  # before the first claim any will do
            raise self.lost(_OTHER if agents else _MISSING)
        if _is_older(age, seen):
            raise self.lost(_OLDER)
        self._reason = ""
        self.see(agents, *age)

    async def claim(self) -> str:
        agents, changes, _ = await self._read()
        if agents == changes == "":
            await self._ask(lambda client: client.set(self.beside_changes, uuid4().hex, nx=True))
            _, first, _ = await self._read()  # another hub may have been quicker
            await self._ask(lambda client: client.set(self.beside_agents, first, nx=True))
            agents, changes, _ = await self._read()
        if agents != changes:  # another hub may be about to write the second
            raise self.lost(_PARTIAL)
        self.expected = agents
        return self.expected

    async def accept(self) -> str:
        """See `StoreGeneration.accept`.

        Several hubs may accept at once, and the data may be restored meanwhile. The new id is first written beside the
        changes, by one of them and only if these still have the id that was read, and marked as new. Each hub that
        reads the mark copies the id, and then removes the mark.
        """
        for _ in range(_MAX_STEPS):
            seen = self.seen
            agents, changes, age = await self._read()
            if changes.startswith(_NEW):
                new = changes.removeprefix(_NEW)
                await self._replace(self.beside_agents, agents, new)
                await self._replace(self.beside_changes, changes, new)
            elif agents != changes or agents == "" or (agents == self._expected and _is_older(age, seen)):
                await self._replace(self.beside_changes, changes, _NEW + uuid4().hex)
            else:
                return "" if agents == self._expected else agents
        raise StoreAway("the store can't be accepted: its generation changes all the time")

    async def _read(self) -> tuple[str, str, DataVersion]:
        """The ids beside the agents and beside the changes, or "", and the age of the data.

        That beside the changes is read first, since it is completed last.
        """
        changes, position = await self._state(CHANGE_LOG, self.keys_of_changes)
        agents, number, change = await self._state(AGENTS, self.keys_of_agents)
        return text_of(agents), text_of(changes), DataVersion(number, int(change), position)

    async def _state(self, script: str, keys: tuple[str, ...]) -> Any:
        return await self._ask(lambda client: client.eval(script, len(keys), *keys, "state"))

    async def _replace(self, key: str, old: str, new: str) -> None:
        """Replace an id, unless another hub was quicker."""
        await self._ask(lambda client: client.eval(_REPLACE, 1, key, old, new))

    async def _ask(self, work: Callable[[AsyncClient], Any]) -> Any:
        with server_errors("the generation of the store can't be read or written"):
            return await self._clients.acall(work)


def _is_older(age: DataVersion, seen: DataVersion) -> bool:
    return any(map(lt, age, seen))
