"""Who is an agent: registration, and the tokens by which agents are known.

A token has 256 bits of chance and is shown once. Its SHA-256 is all that is kept: against so much chance no guessing
helps, so nothing slower is needed. An id once taken stays taken, also after its token was revoked, so that nobody
becomes another.
"""

import asyncio
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Final, Literal, TypeAlias, TypeVar

from headgate.errors import InvalidInput
from headgate.gate.policy import check_agent
from headgate.hub.agents.tokens import digest_of
from headgate.hub.errors import Refused
from headgate.hub.storage.database import Ledger
from headgate.stores.base import AgentDirectory

T = TypeVar("T")
Added: TypeAlias = Literal["done", "exists", "uninvited"]
Changed: TypeAlias = Literal["done", "unknown", "revoked"]

LONGEST_TOKEN: Final = 1024
"""Characters; what is longer is no token, and isn't looked at."""

_log = logging.getLogger("headgate")


@dataclass(frozen=True, slots=True)
class Registered:
    """An agent as the admin sees it."""

    agent: str
    at: float
    """When it was registered, in seconds since 1970."""
    revoked: bool


class Registry:
    """The agents of a hub, or of several that share a server.

    `mode` says who may register: with "open" everybody, with "invitation" whoever has a code that the admin has given
    out, otherwise only the admin. No agent can have one of the names in `reserved`.

    With a shared server, whatever needs it raises `StoreAway` while it is away, except that an agent which was verified
    here before goes on being known.
    """

    def __init__(self, roll: AgentDirectory, *, mode: str = "open", reserved: frozenset[str] = frozenset()) -> None:
        self._roll: Final = roll
        self._mode: Final = mode
        self._reserved: Final = reserved
        self._listeners: Final[list[Callable[[str], None]]] = []
        self._under_way: Final[set[asyncio.Task[Any]]] = set()

    async def start(self) -> None:
        await self._roll.start(self._tell)

    async def close(self) -> None:
        """Finish what is under way. The ledger and the clients are the caller's to close."""
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._roll.close()

    def follow(self, listener: Callable[[str], None]) -> None:
        """Call `listener` in the loop with an agent's id when its token was rotated or revoked, here or elsewhere."""
        self._listeners.append(listener)

    async def register(self, agent: str, invitation: str | None = None, *, by_admin: bool = False) -> str:
        """Take an id that nobody has, and make its token. An invitation is used up only if that is done."""
        name = self._new_name(agent)
        code = None if by_admin else self._admitted(invitation)
        token = _token()
        outcome = await self._finish(self._roll.add(name, digest_of(token), time.time(), code))
        if outcome == "exists":
            raise Refused(409, "exists", f"agent: expected an id that is free, got {name!r}, which is taken")
        if outcome == "uninvited":
            raise Refused(403, "invitation_unknown", "invitation: expected one that the admin made and nobody has used")
        return token

    async def rotate(self, agent: str, *, by_admin: bool = False) -> str:
        """Make another token for an agent: the one it had is worth nothing any more.

        Only the admin gives one to an agent whose token was revoked: else the agent itself could undo that, if it asks
        just before.
        """
        token = _token()
        outcome = await self._finish(self._roll.replace(_known_name(agent), digest_of(token), by_admin))
        if outcome == "unknown":
            raise _unknown(agent)
        if outcome == "revoked":
            raise Refused(403, "revoked", f"the token of {agent!r} was revoked; only the admin can make another")
        return token

    async def revoke(self, agent: str) -> bool:
        """Make an agent's token worth nothing; False if it had none any more. The id stays taken."""
        outcome = await self._finish(self._roll.replace(_known_name(agent), None, False))
        if outcome == "unknown":
            raise _unknown(agent)
        return outcome == "done"

    async def verify(self, agent: str, token: str) -> bool:
        """Whether a token is that agent's. Both may be anything."""
        return _is_name(agent) and len(token) <= LONGEST_TOKEN and await self._roll.verify(agent, digest_of(token))

    async def owner(self, token: str) -> str | None:
        """Whose token it is. It may be anything."""
        return await self._roll.owner(digest_of(token)) if len(token) <= LONGEST_TOKEN else None

    async def knows(self, agent: str) -> bool:
        """Whether there is such an agent. One whose token was revoked is none."""
        return _is_name(agent) and await self._roll.knows(agent)

    async def agents(self, after: str = "", limit: int = 100) -> list[Registered]:
        """The next agents in the order of their ids, those whose token was revoked too."""
        start = after.encode("utf-8", "replace").decode()
        return [Registered(*row) for row in await self._roll.page(start, limit)]

    async def invite(self) -> str:
        """A code with which one agent can be registered."""
        code = f"hgi_{secrets.token_urlsafe(32)}"
        await self._finish(self._roll.invite(digest_of(code), time.time()))
        return code

    def _new_name(self, agent: str) -> str:
        try:
            name = check_agent(agent)
        except InvalidInput as error:
            raise Refused(400, "bad_agent", str(error)) from None
        if name in self._reserved:
            raise Refused(400, "reserved", f"agent: expected an id that the hub doesn't use itself, got {name!r}")
        return name

    def _admitted(self, invitation: str | None) -> bytes | None:
        """The digest of the invitation that has to be there, if one has to be."""
        if self._mode == "open":
            return None
        if self._mode != "invitation":
            raise Refused(403, "registration_closed", "only the admin registers agents here; ask for a token")
        if invitation is None:
            raise Refused(403, "invitation_required", "invitation: expected a code; ask the admin for one")
        return digest_of(invitation[: LONGEST_TOKEN + 1])

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry something out to its end even if whoever waits is cancelled: what was stored has to be told."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # it was raised where somebody waits, or nobody does

    def _tell(self, agent: str) -> None:
        for listener in self._listeners:
            try:
                listener(agent)
            except Exception:  # noqa: BLE001 - the others are told all the same
                _log.exception("that a token has changed could not be taken over")


class LedgerRoll:
    """Agents in a hub's ledger, all of them in memory too."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger: Final = ledger
        self._tell: Callable[[str], None] = lambda _agent: None
        self._digests: Final[dict[str, bytes]] = {}  # of those that are not revoked
        self._owners: Final[dict[bytes, str]] = {}

    async def start(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        query = "SELECT agent, digest FROM agents WHERE digest IS NOT NULL"
        for agent, digest in await self._ledger.run(lambda db: db.execute(query).fetchall()):
            self._set(agent, digest)

    async def close(self) -> None: ...

    async def add(self, agent: str, digest: bytes, at: float, invitation: bytes | None) -> Added:
        def work(db: sqlite3.Connection) -> Added:
            if invitation is not None and not _one(db, "SELECT 1 FROM invitations WHERE digest = ?", invitation):
                return "uninvited"
            if _one(db, "SELECT 1 FROM agents WHERE agent = ?", agent):
                return "exists"
            db.execute("DELETE FROM invitations WHERE digest = ?", (invitation,))
            db.execute("INSERT INTO agents (agent, digest, at) VALUES (?, ?, ?)", (agent, digest, at))
            return "done"

        outcome = await self._ledger.run(work)
        if outcome == "done":
            self._set(agent, digest)
        return outcome

    async def replace(self, agent: str, digest: bytes | None, revoked_too: bool) -> Changed:
        def work(db: sqlite3.Connection) -> Changed:
            found = _one(db, "SELECT digest FROM agents WHERE agent = ?", agent)
            if found is None:
                return "unknown"
            if found[0] is None and not revoked_too:
                return "revoked"
            db.execute("UPDATE agents SET digest = ? WHERE agent = ?", (digest, agent))
            return "done"

        outcome = await self._ledger.run(work)
        if outcome == "done":
            self._set(agent, digest)
            self._tell(agent)
        return outcome

    def _set(self, agent: str, digest: bytes | None) -> None:
        old = self._digests.pop(agent, None)
        if old is not None:
            del self._owners[old]
        if digest is not None:
            self._digests[agent] = digest
            self._owners[digest] = agent

    async def verify(self, agent: str, digest: bytes) -> bool:
        known = self._digests.get(agent)
        return known is not None and compare_digest(known, digest)

    async def owner(self, digest: bytes) -> str | None:
        return self._owners.get(digest)

    async def knows(self, agent: str) -> bool:
        return agent in self._digests

    async def page(self, after: str, limit: int) -> list[tuple[str, float, bool]]:
        query = "SELECT agent, at, digest IS NULL FROM agents WHERE agent > ? ORDER BY agent LIMIT ?"
        rows = await self._ledger.run(lambda db: db.execute(query, (after, limit)).fetchall())
        return [(agent, at, bool(revoked)) for agent, at, revoked in rows]

    async def invite(self, digest: bytes, at: float) -> None:
        await self._ledger.run(lambda db: db.execute("INSERT INTO invitations VALUES (?, ?)", (digest, at)))


def _one(db: sqlite3.Connection, query: str, value: object) -> tuple[Any, ...] | None:
    row: tuple[Any, ...] | None = db.execute(query, (value,)).fetchone()
    return row


def _token() -> str:
    return f"hg_{secrets.token_urlsafe(32)}"


def _is_name(agent: str) -> bool:
    try:
        check_agent(agent)
    except InvalidInput:
        return False
    return True


def _known_name(agent: str) -> str:
    if not _is_name(agent):
        raise _unknown(agent)
    return agent


def _unknown(agent: str) -> Refused:
    return Refused(404, "unknown_agent", f"there is no agent {agent!r:.200}")
