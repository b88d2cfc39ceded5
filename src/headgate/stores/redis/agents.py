"""Agents and the digests of their tokens in Redis, shared by several hubs: each learns of the changes of the others."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from hmac import compare_digest
from typing import Any, Final

from headgate.errors import StoreAway
from headgate.events import emit
from headgate.stores.base import AddOutcome, ReplaceOutcome
from headgate.stores.redis.client_urls import AsyncClient
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.fallback import CircuitBreaker
from headgate.stores.redis.generation import AGENTS, RedisGeneration
from headgate.stores.redis.resp import text_of
from headgate.stores.redis.server_errors import ERRORS, describe_error

_MAX_CALLS: Final = 16  # under way at the same time, so that many agents at once need few connections
_RETRY_AFTER: Final = 0.25  # seconds until a lost connection is tried again
_POLL_AFTER: Final = 5.0  # seconds without a message after which changes are read: a connection can die in silence
_PAGE: Final = 1000  # changes that are read at once
_MAX_REMEMBERED: Final = 10_000  # agents

_log = logging.getLogger("headgate")


class RedisAgents:
    """See `AgentDirectory`. Agents are kept under a prefix of their own and without an expiry.

    While the server is away every call raises `StoreAway`, except for an agent that was verified here before: it is
    known until a change of its token is reported. The same goes for a server that has lost its data (`StoreLost`).

    Changes are reported by pub/sub. Changes that were missed without a connection are read when there is one again: the
    server keeps the time at which each agent's token was changed last.
    """

    def __init__(self, clients: Clients, generation: RedisGeneration) -> None:
        self._tokens, self._owners, self._names, self._invitations, self._changes, _ = generation.keys_of_agents
        self._clients: Final = clients
        self._generation: Final = generation
        self._breaker: Final = CircuitBreaker(lambda _down, _reason: None)
        self._slots: Final = asyncio.Semaphore(_MAX_CALLS)
        self._verified: Final = _VerifiedAgents()
        self._on_change: Callable[[str], None] = lambda _agent: None
        self._follower: asyncio.Task[None] | None = None
        self._newest_seen = 0.0  # when the newest change that was read was made
        self._reported: Final[OrderedDict[str, tuple[float, int]]] = OrderedDict()
        """By agent: the time of its last change, and the sequence number of the report."""
        self._reports = 0
        self._met_unreadable = False  # it is logged once

    async def start(self, on_change: Callable[[str], None]) -> None:
        """Follow changes from now on; if the server is away, earlier ones too, since they are unknown."""
        self._on_change = on_change
        try:
            newest = await self._ask(lambda client: client.zrange(self._changes, -1, -1, withscores=True))
            self._newest_seen = newest[0][1] if newest else 0.0
        except StoreAway as error:
            _log.error("starting without the server that keeps the agents: %s", error)
        self._follower = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        follower = self._follower
        while follower is not None and not follower.done():
            follower.cancel()  # again: redis-py writes by wait_for, in which Python 3.11 can lose a cancellation
            await asyncio.wait([follower], timeout=0.05)

    # Calls -----------------------------------------------------------------------------------------------------------

    async def add(
        self, agent: str, digest: bytes, at: float, invitation: bytes | None, most: int | None = None
    ) -> AddOutcome:
        code = "" if invitation is None else invitation.hex()
        outcome, _ = await self._change("add", agent, digest.hex(), repr(at), code, "" if most is None else str(most))
        return outcome  # type: ignore[return-value]

    async def replace(self, agent: str, digest: bytes | None, known: bytes | None = None) -> ReplaceOutcome:
        new, old = ["" if given is None else given.hex() for given in (digest, known)]
        outcome, when = await self._change("replace", agent, new, old, self._changes)
        if outcome == "done":
            self._report(agent, float(when))
        return outcome  # type: ignore[return-value]

    async def _change(self, verb: str, *words: str) -> tuple[str, str]:
        generation = self._generation
        generation.require()
        keys, expected, seen = generation.keys_of_agents, generation.expected, generation.seen
        arguments = (*keys, verb, expected, str(seen.agents), str(seen.change), *words)
        answer = await self._ask(lambda client: client.eval(AGENTS, len(keys), *arguments))
        if answer is None:
            raise generation.lost()
        outcome, when, agents = answer
        generation.see(expected, agents=agents, change=int(when or 0))
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
            before = self._reports
            try:
                found = await self._look_up(lambda client: client.hget(self._owners, digest.hex()))
            except StoreAway:
                agent = self._verified.owner_of(digest)
                if agent is None:
                    raise
                return agent
            if found is None:
                self._verified.drop(self._verified.owner_of(digest))
                return None
            agent = text_of(found)
            if not self._reported_since(before, agent):
                self._verified.keep(agent, digest)
                return agent

    async def knows(self, agent: str) -> bool:
        try:
            return await self._digest_of(agent) is not None
        except StoreAway:
            if self._verified.digest_of(agent) is None:
                raise
            return True

    async def find(self, agent: str) -> tuple[str, float, bool] | None:
        row = await self._look_up(lambda client: client.hget(self._tokens, agent))
        if row is None:
            return None
        at, digest = self._row(agent, row)
        return agent, at, not digest

    def forget_verified(self) -> None:
        self._verified.clear()
        # The data that is accepted next may be of a server whose clock is behind: its changes have to be reported too.
        self._newest_seen = 0.0
        self._reported.update({agent: (0.0, number) for agent, (_, number) in self._reported.items()})

    async def _digest_of(self, agent: str) -> bytes | None:
        """The digest of an agent's token, or None.

        It is read again if a change was reported meanwhile: the caller couldn't have acted on that report yet.
        """
        while True:
            before = self._reports
            found = await self._look_up(lambda client: client.hget(self._tokens, agent))
            if not self._reported_since(before, agent):
                return None if found is None else (self._row(agent, found)[1] or None)

    async def page(self, after: str, limit: int) -> list[tuple[str, float, bool]]:
        start = f"({after}" if after else "-"
        names = await self._look_up(lambda client: client.zrangebylex(self._names, start, "+", start=0, num=limit))
        if not names:
            return []
        rows = await self._ask(lambda client: client.hmget(self._tokens, names))
        found = []
        for name, row in zip(map(text_of, names), rows, strict=True):
            at, digest = self._row(name, row)
            found.append((name, at, not digest))
        return found

    def _row(self, agent: str, row: bytes | str | None) -> tuple[float, bytes]:
        """When an agent was registered, and the digest of its token; none if that is revoked or can't be read."""
        try:
            at, _, digest = text_of(row or "").partition(" ")
            return float(at), bytes.fromhex(digest)
        except ValueError as error:
            if not self._met_unreadable:
                self._met_unreadable = True
                _log.error(
                    "the row of agent %r can't be read: its name stays taken until the admin gives it a token: %s",
                    agent,
                    error,
                )
            return 0.0, b""

    async def invite(self, digest: bytes, at: float, note: str = "") -> None:
        await self._change("invite", "", digest.hex(), f"{at!r} {note}".rstrip())

    async def invitation(self, digest: bytes) -> str | None:
        found = await self._look_up(lambda client: client.hget(self._invitations, digest.hex()))
        return None if found is None else text_of(found).partition(" ")[2]

    async def _look_up(self, work: Callable[[AsyncClient], Any]) -> Any:
        """Read something. If there is nothing, it may be lost: the store says so before a caller acts on it."""
        self._generation.require()
        found = await self._ask(work)
        if not found and self._generation.expected:
            await self._generation.check()
        return found

    async def _ask(self, work: Callable[[AsyncClient], Any]) -> Any:
        async with self._slots:
            self._breaker.allow()
            try:
                result = await self._clients.acall(work)
            except ERRORS as error:
                reason = self._breaker.record_failure(error)
                raise StoreAway(f"the agents can't be looked up or changed: {reason}") from error
            self._breaker.record_success()
            return result

    # Changes ---------------------------------------------------------------------------------------------------------

    def _report(self, agent: str, when: float) -> None:
        """Report a change, once: this hub's own changes come back by pub/sub."""
        if when > self._reported.get(agent, (0.0, 0))[0]:
            self._verified.drop(agent)
            self._reports += 1
            self._reported[agent] = (when, self._reports)
            self._reported.move_to_end(agent)
            if len(self._reported) > _MAX_REMEMBERED:
                self._reported.popitem(last=False)
            emit([self._on_change], agent)

    def _reported_since(self, before: int, agent: str) -> bool:
        return self._reported.get(agent, (0.0, 0))[1] > before

    async def _follow(self) -> None:
        while True:
            try:
                await self._clients.acall(self._listen, timeouts=None)
            except (*ERRORS, StoreAway) as error:
                _log.debug("tokens changed elsewhere can't be followed: %s", describe_error(error))
            except Exception:  # noqa: BLE001 - no error ends the follower
                _log.exception("a token changed elsewhere could not be taken over")
            await asyncio.sleep(_RETRY_AFTER)

    async def _listen(self, client: AsyncClient) -> None:
        pubsub = client.pubsub()
        try:
            await pubsub.subscribe(self._changes)
            while True:
                message = await pubsub.get_message(timeout=_POLL_AFTER)
                if message is not None and message["type"] == "message":
                    when, _, agent = text_of(message["data"]).partition(" ")
                    self._report(agent, float(when))
                else:  # subscribed, perhaps again after a lost connection; or no message for long
                    await self._catch_up()
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _catch_up(self) -> None:
        """Report the changes that were missed."""
        while True:
            missed = await self._ask(self._read_missed)
            for agent, when in missed:
                self._report(text_of(agent), when)
                self._newest_seen = when
            if len(missed) < _PAGE:
                return

    def _read_missed(self, client: AsyncClient) -> Any:
        after = f"({self._newest_seen:.0f}"
        return client.zrangebyscore(self._changes, after, "+inf", start=0, num=_PAGE, withscores=True)


class _VerifiedAgents:
    """The agents that were verified last, and the digests of their tokens."""

    def __init__(self) -> None:
        self._digests: Final[OrderedDict[str, bytes]] = OrderedDict()
        self._owners: Final[dict[bytes, str]] = {}

    def keep(self, agent: str, digest: bytes) -> None:
        self.drop(agent)
        self._digests[agent] = digest
        self._owners[digest] = agent
        if len(self._digests) > _MAX_REMEMBERED:
            self.drop(next(iter(self._digests)))

    def drop(self, agent: str | None) -> None:
        digest = None if agent is None else self._digests.pop(agent, None)
        if digest is not None:
            del self._owners[digest]

    def clear(self) -> None:
        self._digests.clear()
        self._owners.clear()

    def digest_of(self, agent: str) -> bytes | None:
        return self._digests.get(agent)

    def owner_of(self, digest: bytes) -> str | None:
        return self._owners.get(digest)
