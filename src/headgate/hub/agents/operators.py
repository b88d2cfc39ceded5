"""Operators: who holds a token, and who may administer the hub.

The built-in admin and viewer are known by the tokens of `Tokens`. Every other operator is a registered agent with a
role, which the gate remembers among its changes. docs/decisions/0018-operators.md has the reasons.

What could leave the hub without an admin is done one at a time, by somebody who is an admin at that moment. Another hub
of the same store may do the like meanwhile. Therefore a change is followed by a second look, and undone if need be: the
changes of all hubs have one order, so the last of them finds that nobody is left.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import structlog

from headgate.errors import HeadgateError, StoreAway, refuse
from headgate.gate import Gate
from headgate.hub.agents.names import ADMIN, BUILT_IN, ROLES, VIEWER, looks_built_in
from headgate.hub.agents.registry import Grant, Registry
from headgate.hub.agents.tokens import Tokens
from headgate.hub.errors import RequestError

_log = structlog.get_logger("headgate.hub")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whom a token belongs to: an agent, perhaps with a role, or a built-in operator. Without a token, nobody."""

    token: str = field(default="", repr=False)
    agent: str = ""
    """The name of an agent."""
    role: str = ""
    """One of `ROLES`, or ""."""
    name: str = ""
    """The name: that of an agent, `admin` or `viewer`; "" for the dashboard link."""

    @property
    def admin(self) -> bool:
        return self.role == ADMIN


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator, as admins see it."""

    name: str
    role: str
    kind: Literal["settings", "first_start", "agent"]
    by: str = ""
    """The giver of the role; "" where the history no longer tells."""
    at: float | None = None


class Operators:
    """The operators of one hub."""

    def __init__(self, tokens: Tokens, registry: Registry, gate: Gate) -> None:
        self._tokens, self._registry, self._gate = tokens, registry, gate
        self._changing: Final = asyncio.Lock()
        self._listeners: Final[list[Callable[[], object]]] = []

    def on_revocation(self, listener: Callable[[], object]) -> None:
        """Call `listener` when the built-in admin's token is revoked. Changed roles are changes of the gate."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Refuse an admin token of the settings that is an agent's: a viewer would be the admin."""
        agent = await self._owner_of_given()
        if agent is not None:
            raise HeadgateError(
                f"the admin's token: expected one that belongs to nobody else, got the token of agent {agent!r}; "
                "HEADGATE_ADMIN_TOKEN of commands may be anybody's, that of the hub may not"
            )
        if not self._tokens.admin_kind and ADMIN not in self._gate.effective.roles.values():
            _log.warning("nobody can administer this hub; set HEADGATE_ADMIN_TOKEN to get in")

    async def _owner_of_given(self) -> str | None:
        try:
            return await self._registry.owner(self._tokens.given) if self._tokens.given else None
        except StoreAway:
            return None  # it can't be known

    # Who is it? ------------------------------------------------------------------------------------------------------

    async def holder(self, token: str) -> Holder | None:
        """The holder of a token. While a shared store is away, agents that weren't verified here raise `StoreAway`."""
        role, name = self._tokens.recognize(token)
        if role:
            return Holder(token=token, role=role, name=name)
        agent = await self._registry.owner(token)
        return None if agent is None else Holder(token=token, agent=agent, role=self.role_of(agent), name=agent)

    def role_of(self, agent: str) -> str:
        """The role of an agent: one of `ROLES`, or ""."""
        role = self._gate.role_of(agent)
        return role if role in ROLES else ""

    def present(self, holder: Holder) -> Holder | None:
        """A holder with its present role; None if a built-in operator's token has become invalid.

        Of an agent's token, `Registry.on_revocation` tells.
        """
        if holder.agent:
            return replace(holder, role=self.role_of(holder.agent))
        return holder if self._tokens.recognize(holder.token)[0] == holder.role else None

    def may_watch(self, holder: Holder) -> bool:
        """Whether a holder still has the role that it had, and isn't blocked."""
        return self.present(holder) == holder and not (holder.agent and self._gate.is_blocked(holder.agent))

    async def all(self) -> list[Operator]:
        """The built-in operators, then the others by name."""
        kind = self._tokens.admin_kind
        found = [Operator(ADMIN, ADMIN, kind)] if kind else []
        if self._tokens.has_viewer:
            found.append(Operator(VIEWER, VIEWER, "settings"))
        roles = self._gate.effective.roles
        history = await asyncio.to_thread(self._gate.history)
        given = {edit.agent: change for change in history for edit in change.edits if edit.kind == "role"}
        for name in sorted(roles):
            if self.role_of(name):
                change = given.get(name)
                by, at = ("", None) if change is None else (change.by, change.at)
                found.append(Operator(name, roles[name], "agent", by, at))
        return found

    # Changes, each on behalf of `caller`, and recorded as `by` -------------------------------------------------------

    @asynccontextmanager
    async def _change(self, caller: Holder | None) -> AsyncIterator[None]:
        """One change at a time, with what other hubs have changed, for somebody who is an admin at that moment.

        Without a caller, an agent changes what is its own.
        """
        async with self._changing:
            await self._gate.aread_changes()
            if caller is not None:
                await self._expect_admin(caller)
            yield

    async def register(self, agent: str, caller: Holder, by: str, grant: Grant) -> str:
        """Register an agent for an admin, without any role that is left from lost data; its token."""
        async with self._change(caller):
            self._registry.check_grant(grant)
            return await self._register(agent, by, grant)

    async def _register(self, agent: str, by: str, grant: Grant | None = None) -> str:
        if self._gate.role_of(agent) and await self._registry.find(agent) is None:
            await self._gate.aset_role(agent, None, by=by)
        return await self._registry.register(agent, by_admin=True, grant=grant)

    async def rotate(self, agent: str, caller: Holder, by: str) -> str:
        """Replace an agent's token for an admin; the new one. After a revocation it has no role."""
        async with self._change(caller):
            found = await self._registry.find(agent)
            if found is not None and found.revoked:
                await self._drop_role(agent, by)
            return await self._registry.rotate(agent)

    @property
    def takes_invitations(self) -> bool:
        return self._registry.takes_invitations

    async def invite(self, caller: Holder, grant: Grant) -> str:
        """A code for the registration of one agent."""
        async with self._change(caller):
            return await self._registry.invite(grant)

    async def add(self, name: str, role: str, caller: Holder, by: str) -> str:
        """Register a name with a role; its token."""
        check_role(role)
        async with self._change(caller):
            token = await self._register(name, by)
            try:
                await self._gate.aset_role(name, role, by=by)
            except HeadgateError as error:
                _log.error("role not given", agent=name, reason=str(error))
                detail = f"{name!r} is registered, but has no role: give it one and a new token, in a moment"
                raise RequestError(503, "unavailable", detail) from error
        return token

    async def set_role(self, agent: str, role: str | None, caller: Holder, by: str) -> None:
        """Give a registered agent a role, or take it away."""
        if role is not None:
            check_role(role)
        async with self._change(caller):
            if role is not None and looks_built_in(agent):
                raise RequestError(400, "reserved", f"agent: expected another than a built-in operator, got {agent!r}")
            if role is not None and not await self._registry.knows(agent):
                raise RequestError(404, "unknown_agent", f"there is no agent {agent!r}")
            if role != (self._gate.role_of(agent) or None):
                await self._set_role(agent, role, caller, by)

    async def remove(self, name: str, caller: Holder, by: str) -> bool:
        """Take an operator's role and token away; whether the token was valid."""
        async with self._change(caller):
            if name in BUILT_IN:
                return await self._remove_built_in(name, caller, by)
            if not self.role_of(name):
                raise RequestError(404, "unknown_agent", f"there is no operator {name!r}")
            return await self._revoke(name, caller, by)

    async def revoke(self, agent: str, caller: Holder, by: str) -> bool:
        """Revoke an agent's token for an admin, and take away its role; False if it was revoked before."""
        async with self._change(caller):
            return await self._revoke(agent, caller, by)

    async def revoke_own(self, caller: Holder, by: str) -> bool:
        """Revoke the token of an agent that asks for it, and take away its role, unless it is the last admin."""
        async with self._change(None):
            if self._gate.role_of(caller.agent) and await self._registry.owner(caller.token) == caller.agent:
                await self._set_role(caller.agent, None, None, by)
            revoked = await self._registry.revoke(caller.agent, caller.token)
            await self._drop_new_role(caller.agent, by)
        return revoked

    async def block(self, agent: str, until: float | None, reason: str, caller: Holder, by: str) -> None:
        """Block an agent. The last admin can't be blocked, and nobody can block themselves."""
        async with self._change(caller):
            _expect_other("block", agent, caller)
            is_admin = self.role_of(agent) == ADMIN
            if is_admin:
                await self._expect_admin_left(agent)
            await self._gate.ablock(agent, until=until, reason=reason, by=by)
            if is_admin:
                await self._undo_if_nobody_is_left(lambda: self._gate.aunblock(agent, by=by))

    async def unblock(self, agent: str, caller: Holder, by: str) -> None:
        """Unblock an agent. Nobody can unblock themselves."""
        async with self._change(caller):
            _expect_other("unblock", agent, caller)
            if agent in self._gate.effective.blocks:
                await self._gate.aunblock(agent, by=by)

    def expect_built_in_admin(self) -> None:
        """Refuse what takes every agent's token away, if the only admins are agents."""
        if not self._tokens.admin_kind:
            raise _last_admin()

    async def _set_role(self, agent: str, role: str | None, caller: Holder | None, by: str) -> None:
        before = self._gate.role_of(agent)
        if before == ADMIN:
            if caller is not None:
                _expect_other("demote", agent, caller)
            await self._expect_admin_left(agent)
        await self._gate.aset_role(agent, role, by=by)
        if before == ADMIN:
            await self._undo_if_nobody_is_left(lambda: self._gate.aset_role(agent, before, by=by))

    async def _revoke(self, agent: str, caller: Holder, by: str) -> bool:
        """Take the role away first: that can be undone."""
        _expect_other("revoke", agent, caller)
        registered = True
        if self._gate.role_of(agent):
            await self._set_role(agent, None, caller, by)
            registered = await self._registry.find(agent) is not None
        revoked = registered and await self._registry.revoke(agent)
        await self._drop_new_role(agent, by)
        return revoked

    async def _drop_new_role(self, agent: str, by: str) -> None:
        """Drop the role that another hub has given while this one revoked the token."""
        await self._gate.aread_changes()
        await self._drop_role(agent, by)

    async def _drop_role(self, agent: str, by: str) -> None:
        """Drop the role of an agent without a token: it is no admin who is left."""
        if self._gate.role_of(agent):
            await self._gate.aset_role(agent, None, by=by)

    async def _remove_built_in(self, name: str, caller: Holder, by: str) -> bool:
        kind = self._tokens.admin_kind if name == ADMIN else "settings" if self._tokens.has_viewer else ""
        if not kind:
            raise RequestError(404, "unknown_agent", f"there is no operator {name!r}")
        if kind == "settings":
            detail = f"the token of {name!r} comes from the settings: change it there, and restart the hub"
            raise RequestError(409, "from_settings", detail)
        if caller.name == name:
            _expect_other("remove", name, replace(caller, agent=name))
        await self._expect_admin_left("", built_in=False)
        await self._tokens.revoke_admin()
        _log.info("token of the first start revoked", by=by)
        for listener in self._listeners:
            listener()
        return True

    # May it? ---------------------------------------------------------------------------------------------------------

    async def _expect_admin(self, caller: Holder) -> None:
        """Refuse a caller that is no admin any more: another admin may have had the lock before."""
        revoked = caller.agent and await self._registry.owner(caller.token) != caller.agent
        present = self.present(caller)  # after the wait
        if revoked or present is None:
            raise RequestError(401, "unauthorized", "the token in the Authorization header was revoked")
        if not present.admin or (caller.agent and self._gate.is_blocked(caller.agent)):
            raise RequestError(403, "forbidden", "this needs the token of the admin")

    async def _expect_admin_left(self, without: str, *, built_in: bool = True) -> None:
        """Refuse to leave the hub to nobody: without one agent, and perhaps without the built-in admin."""
        if built_in and self._tokens.admin_kind:
            return
        for name, role in self._gate.effective.roles.items():
            usable = role == ADMIN and name != without and not self._gate.is_blocked(name)
            if usable and await self._registry.knows(name):
                return
        raise _last_admin()

    async def _undo_if_nobody_is_left(self, undo: Callable[[], Awaitable[None]]) -> None:
        try:
            with suppress(StoreAway):  # then nobody can be counted
                await self._expect_admin_left("")
        except RequestError:
            await undo()
            raise


def check_role(role: str) -> None:
    if role not in ROLES:
        refuse("role", f"one of {', '.join(ROLES)}", role)


def _expect_other(verb: str, agent: str, caller: Holder) -> None:
    if agent == caller.agent:
        detail = f"you can't {verb} yourself: another admin has to do it"
        raise RequestError(409, "own_account", detail)


def _last_admin() -> RequestError:
    detail = "expected that an admin is left, got nobody: make another admin first, by POST /api/admin/admins"
    return RequestError(409, "last_admin", detail)
