"""Agents and the digests of their tokens in Redis, for several hubs: each hears of what another has changed."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from hmac import compare_digest
from typing import Any, Final, Literal

import redis
from redis.exceptions import ReadOnlyError, RedisClusterException

from headgate.errors import StoreAway
from headgate.stores.redis.clients import ERRORS, AsyncClient, Clients, explained, text_of
from headgate.stores.redis.fallback import Breaker
from headgate.stores.redis.protocol import FORMAT
from headgate.stores.redis.script import part

_CHANGE: Final = part("agents.lua")
_AT_ONCE: Final = 16  # calls that are under way at the same time, so that a crowd needs few connections
_AGAIN: Final = 0.25  # seconds until a lost connection is tried again
_LOOK: Final = (
    5.0  # seconds without news after which it is looked whether there is some: a connection can die in silence
)
_PAGE: Final = 1000  # changes that are read at once
_REMEMBERED: Final = 10_000  # agents
_STALE: Final = (ReadOnlyError, RedisClusterException)  # the client knows no master, or one that no longer is one

_log = logging.getLogger("headgate")


class RedisAgents:
    """Agents in a server, under a prefix of their own and without an expiry.

    While the server is away it raises `StoreAway`; but an agent that was verified here before is known by what is
    remembered of it, until a change of its token is heard of.

    A change is heard of by pub/sub. What was missed while there was no connection is read when there is one again: the
    server keeps for each agent when its token was changed last.
    """

    def __init__(self, clients: Clients, prefix: str) -> None:
        start = f"{prefix.rstrip(':')}-admin:{{agents}}{FORMAT}:"  # the braces keep all in one slot of a cluster
        self._keys: Final = [f"{start}{name}" for name in ("tokens", "owners", "names", "invitations", "changes")]
        self._tokens, self._owners, self._names, self._invitations, self._changes = self._keys
        self._clients: Final = clients
        self._breaker: Final = Breaker(lambda _down, _reason: None)
        self._turns: Final = asyncio.Semaphore(_AT_ONCE)
        self._verified: Final = _Verified()
        self._tell: Callable[[str], None] = lambda _agent: None
        self._follower: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._heard = 0.0  # the newest change that was heard of
        self._told: Final[OrderedDict[str, tuple[float, int]]] = (
            OrderedDict()
        )  # by agent: which change, and how manieth
        self._tellings = 0

    async def start(self, tell: Callable[[str], None]) -> None:
        """Begin to follow. Changes from before are no news, unless the server is away and can't say which those are."""
        self._tell = tell
        try:
            newest = await self._ask(lambda client: client.zrange(self._changes, -1, -1, withscores=True))
            self._heard = newest[0][1] if newest else 0.0
        except StoreAway as error:
            _log.error("starting without the server that keeps the agents: %s", error)
        self._follower = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        tasks = {task for task in (self._follower, self._renewal) if task is not None}
        while tasks:  # again, since redis-py writes by wait_for, in which Python 3.11 can lose a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.05)

    # What is asked ---------------------------------------------------------------------------------------------------

    async def add(
        self, agent: str, digest: bytes, at: float, invitation: bytes | None
    ) -> Literal["done", "exists", "uninvited"]:
        outcome, _ = await self._change(
            "add", agent, digest.hex(), repr(at), "" if invitation is None else invitation.hex()
        )
        return outcome  # type: ignore[return-value]

    async def replace(
        self, agent: str, digest: bytes | None, revoked_too: bool
    ) -> Literal["done", "unknown", "revoked"]:
        new = "" if digest is None else digest.hex()
        outcome, when = await self._change("replace", agent, new, "1" if revoked_too else "", self._changes)
        if outcome == "done":
            self._hear(agent, float(when))
        return outcome  # type: ignore[return-value]

    async def _change(self, *words: str) -> tuple[str, str]:
        outcome, when = await self._ask(lambda client: client.eval(_CHANGE, len(self._keys), *self._keys, *words))
        return text_of(outcome), text_of(when)

    async def verify(self, agent: str, digest: bytes) -> bool:
        try:
            known = await self._digest_of(agent)
        except StoreAway:
            known = self._verified.digest_of(agent)
            if known is None or not compare_digest(known, digest):
                raise
            return True
        valid = known is not None and compare_digest(known, digest)
        if valid:
            self._verified.keep(agent, digest)
        elif self._verified.owner_of(digest) == agent:  # a change was missed
            self._verified.drop(agent)
        return valid

    async def owner(self, digest: bytes) -> str | None:
        while True:
            before = self._tellings
            try:
                found = await self._ask(lambda client: client.hget(self._owners, digest.hex()))
            except StoreAway:
                agent = self._verified.owner_of(digest)
                if agent is None:
                    raise
                return agent
            if found is None:
                self._verified.drop(self._verified.owner_of(digest))
                return None
            agent = text_of(found)
            if not self._told_since(before, agent):
                self._verified.keep(agent, digest)
                return agent

    async def knows(self, agent: str) -> bool:
        try:
            return await self._digest_of(agent) is not None
        except StoreAway:
            if self._verified.digest_of(agent) is None:
                raise
            return True

    async def _digest_of(self, agent: str) -> bytes | None:
        """The digest of an agent's token, or None.

        Asked again if a change of it was told meanwhile: whoever relies on the answer has missed the telling.
        """
        while True:
            before = self._tellings
            found = await self._ask(lambda client: client.hget(self._tokens, agent))
            if not self._told_since(before, agent):
                digest = None if found is None else bytes.fromhex(text_of(found).partition(" ")[2])
                return digest or None

    async def page(self, after: str, limit: int) -> list[tuple[str, float, bool]]:
        start = f"({after}" if after else "-"
        names = await self._ask(lambda client: client.zrangebylex(self._names, start, "+", start=0, num=limit))
        if not names:
            return []
        rows = await self._ask(lambda client: client.hmget(self._tokens, names))
        parts = [text_of(row).partition(" ") for row in rows]  # agents are never dropped, so each has one
        return [(text_of(name), float(at), not digest) for name, (at, _, digest) in zip(names, parts, strict=True)]

    async def invite(self, digest: bytes, at: float) -> None:
        await self._ask(lambda client: client.hset(self._invitations, digest.hex(), repr(at)))

    async def _ask(self, work: Callable[[AsyncClient], Any]) -> Any:
        async with self._turns:
            self._breaker.enter()
            try:
                result = await work(await self._clients.aclient())
            except ERRORS as error:
                if isinstance(error, _STALE) and (self._renewal is None or self._renewal.done()):
                    self._renewal = asyncio.get_running_loop().create_task(self._clients.arenew())
                self._breaker.failed(explained(error), again_at_once=isinstance(error, redis.ConnectionError))
                raise StoreAway(f"the agents can't be looked up or changed: {explained(error)}") from error
            self._breaker.worked()
            return result

    # What is heard ---------------------------------------------------------------------------------------------------

    def _hear(self, agent: str, when: float) -> None:
        """Tell of a change, once: of one's own one hears twice."""
        if when > self._told.get(agent, (0.0, 0))[0]:
            self._verified.drop(agent)
            self._tellings += 1
            self._told[agent] = (when, self._tellings)
            self._told.move_to_end(agent)
            if len(self._told) > _REMEMBERED:
                self._told.popitem(last=False)
            self._tell(agent)

    def _told_since(self, before: int, agent: str) -> bool:
        return self._told.get(agent, (0.0, 0))[1] > before

    async def _follow(self) -> None:
        while True:
            try:
                await self._listen()
            except (*ERRORS, StoreAway) as error:
                _log.debug("tokens changed elsewhere can't be heard of: %s", explained(error))
            except Exception:  # noqa: BLE001 - whatever it is, it goes on
                _log.exception("a token changed elsewhere could not be taken over")
            await asyncio.sleep(_AGAIN)

    async def _listen(self) -> None:
        channel = (await self._clients.aclient()).pubsub()
        try:
            await channel.subscribe(self._changes)
            while True:
                message = await channel.get_message(timeout=_LOOK)
                if message is not None and message["type"] == "message":
                    when, _, agent = text_of(message["data"]).partition(" ")
                    self._hear(agent, float(when))
                else:  # it has been subscribed to, perhaps anew; or there was nothing for long
                    await self._catch_up()
        finally:
            await channel.aclose()  # type: ignore[no-untyped-call]

    async def _catch_up(self) -> None:
        """Hear of what was missed."""
        while True:
            missed = await self._ask(self._missed)
            for agent, when in missed:
                self._hear(text_of(agent), when)
                self._heard = when
            if len(missed) < _PAGE:
                return

    def _missed(self, client: AsyncClient) -> Any:
        after = f"({self._heard:.0f}"
        return client.zrangebyscore(self._changes, after, "+inf", start=0, num=_PAGE, withscores=True)


class _Verified:
    """Agents that were verified, and the digests of their tokens: so many, those that were seen last."""

    def __init__(self) -> None:
        self._digests: Final[OrderedDict[str, bytes]] = OrderedDict()
        self._owners: Final[dict[bytes, str]] = {}

    def keep(self, agent: str, digest: bytes) -> None:
        self.drop(agent)
        self._digests[agent] = digest
        self._owners[digest] = agent
        if len(self._digests) > _REMEMBERED:
            self.drop(next(iter(self._digests)))

    def drop(self, agent: str | None) -> None:
        digest = None if agent is None else self._digests.pop(agent, None)
        if digest is not None:
            del self._owners[digest]

    def digest_of(self, agent: str) -> bytes | None:
        return self._digests.get(agent)

    def owner_of(self, digest: bytes) -> str | None:
        return self._owners.get(digest)
