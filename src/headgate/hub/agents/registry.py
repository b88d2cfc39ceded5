"""The registry of agents and their tokens.

A token has 256 random bits and is shown once. Only its SHA-256 is stored: tokens can't be guessed, so no slow hash is
needed. An id stays taken after its token was revoked, so that no agent can take over the identity of another.
"""

import asyncio
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from headgate.errors import HeadgateError, InvalidInput
from headgate.gate import Gate, changes
from headgate.gate.policy import check_agent
from headgate.hub.agents.names import BUILT_IN, check_new_name, looks_built_in
from headgate.hub.agents.tokens import DIGEST_SIZE, digest_of
from headgate.hub.background import BackgroundTasks
from headgate.hub.errors import RequestError
from headgate.hub.storage.database import Database
from headgate.hub.storage.rows import Time, row_of
from headgate.stores.base import AddOutcome, AgentDirectory, ReplaceOutcome

LONGEST_TOKEN: Final = 1024
"""Characters; anything longer is refused unread."""

_log = logging.getLogger("headgate")


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """An agent as the admin sees it."""

    agent: str
    at: float
    """When it was registered, in seconds since 1970."""
    revoked: bool


class Grant(msgspec.Struct, frozen=True):
    """The account that a new agent belongs to, and its plan; None: those of the policy."""

    account: str | None = None
    plan: str | None = None
    by: str = ""
    """The giver, in words for the record of changes."""


class Registry:
    """The agents of a hub, or of several hubs that share a store.

    `mode` says who may register: "open" anybody, "invitation" anybody with a code from the admin, otherwise only the
    admin. `most` bounds the number of agents, except for the admin. No agent can have a name in `reserved`. One that
    has a role in the `gate`, which is left from lost data, can be registered by the admin only.

    While a shared store is away, every method that needs it raises `StoreAway`, except that agents verified here before
    can still be verified. Until the gate has read its changes they raise it too, for all agents: anybody may be blocked
    or have a role.
    """

    def __init__(
        self,
        store: AgentDirectory,
        gate: Gate,
        *,
        mode: str = "open",
        most: int | None = None,
        reserved: frozenset[str] = frozenset(),
    ) -> None:
        self._store: Final = store  # to be asked by way of `_agents`
        self._gate: Final = gate
        self._most: Final = most
        self._mode: Final = mode
        self._reserved: Final = reserved
        self._listeners: Final[list[Callable[[str], None]]] = []
        self._background: Final = BackgroundTasks()
        self._reading: asyncio.Task[None] | None = None  # of the changes, for all who wait for them
        self.revocations = 0
        """Counts up whenever a token that was valid may be valid no longer."""

    async def start(self) -> None:
        await self._store.start(self._on_revocation)

    async def close(self) -> None:
        """Finish every change that has begun. The database and the store are the caller's to close."""
        await self._background.wait()
        await self._store.close()

    async def _agents(self) -> AgentDirectory:
        """The store, once the gate has read its changes."""
        if not self._gate.changes_read:
            if self._reading is None or self._reading.done():
                self._reading = self._background.spawn(self._gate.aread_changes())
            await asyncio.shield(self._reading)
        return self._store

    def on_revocation(self, listener: Callable[[str], None]) -> None:
        """Call `listener` in the loop with an agent's id when its token is rotated or revoked, here or elsewhere."""
        self._listeners.append(listener)

    async def register(
        self, agent: str, invitation: str | None = None, *, by_admin: bool = False, grant: Grant | None = None
    ) -> str:
        """Register a free id, and return its new token. An invitation is used up only on success.

        The agent belongs to the account, and has the plan, that the invitation or the admin names.
        """
        name = self._new_name(agent)
        code = None if by_admin else self._check_invitation(invitation)
        agents = await self._agents()
        if not by_admin and self._gate.role_of(name):
            raise _taken(name)
        if invitation is not None and not by_admin:
            digest = digest_of(invitation[: LONGEST_TOKEN + 1])
            note = await agents.invitation(digest)
            if note:
                code, grant = digest, _granted(note)
        if grant is not None:
            self.check_grant(grant)  # before anything is registered
        token = _token()
        most = None if by_admin else self._most
        outcome = await self._background.finish(agents.add(name, digest_of(token), time.time(), code, most))
        if outcome == "full":
            raise RequestError(409, "too_many_agents", f"{most} agents are registered; only the admin can add more")
        if outcome == "exists":
            raise _taken(name)
        if outcome == "uninvited":
            raise RequestError(
                403, "invitation_unknown", "invitation: expected one that the admin made and nobody has used"
            )
        if grant is not None:
            await self._background.finish(self._give(name, grant))
        return token

    def check_grant(self, grant: Grant) -> None:
        """Refuse an account or a plan that can't be one."""
        accounts = self._gate.effective.accounts
        if grant.account is not None:
            accounts.check_account("account", grant.account)
        if grant.plan is not None:
            accounts.check_plan("plan", grant.plan)

    async def _give(self, agent: str, grant: Grant) -> None:
        """Let a new agent, whose token nobody knows yet, belong to its account."""
        edits = [] if grant.account is None else [changes.agent_account(agent, grant.account)]
        if grant.plan is not None:
            edits.append(changes.agent_plan(agent, grant.plan))
        if not edits:
            return
        try:
            await self._gate.achange(edits, by=grant.by)
        except HeadgateError as error:
            _log.error("agent %r is registered, but its account and plan are not set: %s", agent, error)
            detail = (
                f"{agent!r} is registered, but not for its account: the admin has to set that, and to rotate its token"
            )
            raise RequestError(503, "unavailable", detail) from error

    async def rotate(self, agent: str, token: str | None = None) -> str:
        """Replace an agent's token by a new one, and return it.

        The agent's own `token` must still be valid, so that it is replaced only once. The admin needs none, and is the
        only one who can do so after a revocation: otherwise an agent could undo it by a rotation just before.
        """
        new = _token()
        if await self._replace(agent, digest_of(new), token) == "revoked":
            raise RequestError(403, "revoked", f"the token of {agent!r} was revoked; only the admin can make another")
        return new

    async def revoke(self, agent: str, token: str | None = None) -> bool:
        """Revoke an agent's token; False if it was revoked before. The id stays taken.

        The agent's own `token` must still be valid; the admin needs none.
        """
        return await self._replace(agent, None, token) == "done"

    async def _replace(self, agent: str, digest: bytes | None, token: str | None) -> ReplaceOutcome:
        known = None if token is None else digest_of(token)
        agents = await self._agents()
        if not _is_name(agent):
            raise _unknown(agent)
        outcome = await self._background.finish(agents.replace(agent, digest, known))
        if outcome == "unknown":
            raise _unknown(agent)
        if outcome == "other":
            raise RequestError(401, "unauthorized", f"the token of {agent!r} was replaced by another")
        return outcome

    async def verify(self, agent: str, token: str) -> bool:
        """Whether a token belongs to an agent. Both may be any text."""
        if not _is_name(agent) or len(token) > LONGEST_TOKEN:
            return False
        return await (await self._agents()).verify(agent, digest_of(token))

    async def owner(self, token: str) -> str | None:
        """The agent that a token belongs to. It may be any text."""
        return await (await self._agents()).owner(digest_of(token)) if len(token) <= LONGEST_TOKEN else None

    async def knows(self, agent: str) -> bool:
        """Whether there is such an agent, with a token that was not revoked."""
        return _is_name(agent) and await (await self._agents()).knows(agent)

    async def find(self, agent: str) -> AgentRecord | None:
        """A registered agent, also if its token was revoked. It may be any text."""
        row = await (await self._agents()).find(agent) if _is_name(agent) else None
        return None if row is None else AgentRecord(*row)

    def forget_verified(self) -> None:
        """Verify nobody without the store any more, even if it is lost: the admin is about to accept it as it is."""
        self.revocations += 1
        self._store.forget_verified()

    async def agents(self, after: str = "", limit: int = 100) -> list[AgentRecord]:
        """The next agents in the order of their ids, including those with a revoked token."""
        start = after.encode("utf-8", "replace").decode()
        return [AgentRecord(*row) for row in await (await self._agents()).page(start, limit)]

    async def invite(self, grant: Grant | None = None) -> str:
        """A code for the registration of one agent."""
        code = f"hgi_{secrets.token_urlsafe(32)}"
        agents = await self._agents()
        note = ""
        if grant is not None and (grant.account is not None or grant.plan is not None):
            self.check_grant(grant)
            note = msgspec.json.encode(grant).decode()
        await self._background.finish(agents.invite(digest_of(code), time.time(), note))
        return code

    def _new_name(self, agent: str) -> str:
        try:
            name = check_new_name(agent)
        except InvalidInput as error:
            raise RequestError(400, "bad_agent", str(error)) from None
        if looks_built_in(name):
            own = " and ".join(sorted(BUILT_IN))
            detail = f"agent: expected an id that can't pass for {own}, the hub's own, got {name!a}"
            raise RequestError(400, "reserved", detail)
        if name in self._reserved:
            raise RequestError(400, "reserved", f"agent: expected an id that the hub doesn't use itself, got {name!r}")
        return name

    @property
    def takes_invitations(self) -> bool:
        """Whether somebody can register with an invitation: where anybody can register, it says for which account."""
        return self._mode in ("open", "invitation")

    def _check_invitation(self, invitation: str | None) -> bytes | None:
        """The digest of the invitation, if one is required."""
        if self._mode == "open":
            return None
        if self._mode != "invitation":
            raise RequestError(403, "registration_closed", "only the admin registers agents here; ask for a token")
        if invitation is None:
            raise RequestError(403, "invitation_required", "invitation: expected a code; ask the admin for one")
        return digest_of(invitation[: LONGEST_TOKEN + 1])

    def _on_revocation(self, agent: str) -> None:
        self.revocations += 1
        for listener in self._listeners:
            try:
                listener(agent)
            except Exception:  # noqa: BLE001 - the other listeners are called all the same
                _log.exception("a listener failed after the revocation of a token")


class DatabaseAgents:
    """Agents in the hub's database, with a copy in memory."""

    def __init__(self, database: Database) -> None:
        self._database: Final = database
        self._on_revocation: Callable[[str], None] = lambda _agent: None
        self._digests: Final[dict[str, bytes]] = {}  # without revoked ones
        self._owners: Final[dict[bytes, str]] = {}
        self._lost_names = 0  # rows whose names can't be read

    async def start(self, on_revocation: Callable[[str], None]) -> None:
        self._on_revocation = on_revocation
        rows = await self._database.run(lambda db: db.execute("SELECT agent, digest FROM agents").fetchall())
        effect = "the agent's name stays taken; give it a new token, see docs/hub-operations.md"
        for agent, digest in self._database.rows.read("agents", rows, _agent_row, effect):
            self._set(agent, digest)
        self._lost_names = sum([not isinstance(agent, str) or not _is_name(agent) for agent, _ in rows])

    async def close(self) -> None: ...

    async def add(
        self, agent: str, digest: bytes, at: float, invitation: bytes | None, most: int | None = None
    ) -> AddOutcome:
        if self._lost_names:  # any free id may be one of them, and must not go to a stranger
            detail = (
                "nobody can register: the database has an agent whose id can't be read; "
                "ask the hub's operator (docs/hub-operations.md)"
            )
            raise RequestError(503, "unavailable", detail)

        def work(db: sqlite3.Connection) -> AddOutcome:
            if invitation is not None and not _one(db, "SELECT 1 FROM invitations WHERE digest = ?", invitation):
                return "uninvited"
            if _one(db, "SELECT 1 FROM agents WHERE agent = ?", agent):
                return "exists"
            if most is not None and db.execute("SELECT COUNT(*) FROM agents").fetchone()[0] >= most:
                return "full"
            db.execute("DELETE FROM invitations WHERE digest = ?", (invitation,))
            db.execute("DELETE FROM invitation_notes WHERE digest = ?", (invitation,))
            db.execute("INSERT INTO agents (agent, digest, at) VALUES (?, ?, ?)", (agent, digest, at))
            return "done"

        outcome = await self._database.run(work)
        if outcome == "done":
            self._set(agent, digest)
        return outcome

    async def replace(self, agent: str, digest: bytes | None, known: bytes | None = None) -> ReplaceOutcome:
        def work(db: sqlite3.Connection) -> ReplaceOutcome:
            found = _one(db, "SELECT digest FROM agents WHERE agent = ?", agent)
            if found is None:
                return "unknown"
            if found[0] is None and (known is not None or digest is None):
                return "revoked"
            if known is not None and known != found[0]:
                return "other"
            db.execute("UPDATE agents SET digest = ? WHERE agent = ?", (digest, agent))
            return "done"

        outcome = await self._database.run(work)
        if outcome == "done":
            self._set(agent, digest)
            self._on_revocation(agent)
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

    async def find(self, agent: str) -> tuple[str, float, bool] | None:
        query = "SELECT agent, at, digest IS NULL FROM agents WHERE agent = ?"
        return next(iter(await self._list(query, agent, 1)), None)

    def forget_verified(self) -> None: ...

    async def page(self, after: str, limit: int) -> list[tuple[str, float, bool]]:
        query = "SELECT agent, at, digest IS NULL FROM agents WHERE agent > ? ORDER BY agent"
        return await self._list(query, after, limit)

    async def _list(self, query: str, value: str, limit: int) -> list[tuple[str, float, bool]]:
        def work(db: sqlite3.Connection) -> list[_ListedAgent]:
            rows = db.execute(query, (value,))
            return list(islice(self._database.rows.read("agents", rows, _listed_agent, "not listed"), limit))

        return [(agent, at, bool(revoked)) for agent, at, revoked in await self._database.run(work)]

    async def invite(self, digest: bytes, at: float, note: str = "") -> None:
        def work(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO invitations VALUES (?, ?)", (digest, at))
            if note:
                db.execute("INSERT INTO invitation_notes VALUES (?, ?)", (digest, note))

        await self._database.run(work)

    async def invitation(self, digest: bytes) -> str | None:
        query = "SELECT coalesce(note, '') FROM invitations LEFT JOIN invitation_notes USING (digest) WHERE digest = ?"
        row = await self._database.run(lambda db: _one(db, query, digest))
        return None if row is None else str(row[0])


class _AgentRow(NamedTuple):
    agent: str
    digest: Annotated[bytes, Meta(min_length=DIGEST_SIZE, max_length=DIGEST_SIZE)] | None


def _agent_row(row: tuple[Any, ...]) -> _AgentRow:
    found = msgspec.convert(row, _AgentRow, builtin_types=(bytes,))
    check_agent(found.agent)
    return found


class _ListedAgent(NamedTuple):
    agent: str
    at: Time
    revoked: int


_listed_agent: Final = row_of(_ListedAgent)


def _one(db: sqlite3.Connection, query: str, value: object) -> tuple[Any, ...] | None:
    row: tuple[Any, ...] | None = db.execute(query, (value,)).fetchone()
    return row


def _granted(note: str) -> Grant:
    """The grant of an invitation. One that can't be read grants nothing, and registers nobody."""
    try:
        return msgspec.json.decode(note, type=Grant)
    except (msgspec.MsgspecError, UnicodeError) as error:
        detail = "invitation: its account can't be read; ask the admin for another"
        raise RequestError(403, "invitation_unknown", detail) from error


def _token() -> str:
    return f"hg_{secrets.token_urlsafe(32)}"


def _is_name(agent: str) -> bool:
    try:
        check_agent(agent)
    except InvalidInput:
        return False
    return True


def _taken(agent: str) -> RequestError:
    return RequestError(409, "exists", f"agent: expected an id that is free, got {agent!r}, which is taken")


def _unknown(agent: str) -> RequestError:
    return RequestError(404, "unknown_agent", f"there is no agent {agent!r:.200}")
