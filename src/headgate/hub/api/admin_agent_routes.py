"""Admin routes: agents, their tokens, blocks and connections, and invitations."""

from typing import Annotated, Final

import structlog
from msgspec import Meta, Struct

from headgate.gate import Gate
from headgate.hub.agents.operators import Operators
from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import Grant, Registry
from headgate.hub.api.agent_routes import AccountPath, PlanName, Registered, Revoked
from headgate.hub.api.routing import Body, Call, admin_route
from headgate.hub.sockets.agent_socket import AgentSockets
from headgate.hub.sockets.frames import AgentId, Count
from headgate.hub.sockets.relay import Relay
from headgate.stores.base import MAX_REASON

_log = structlog.get_logger("headgate.hub")


class NewAgent(Body):
    agent_id: AgentId
    account: AccountPath | None = None
    """The account that it belongs to; null: that of the policy."""
    plan: PlanName | None = None


class NewInvitation(Body):
    """The grant for the agent that registers with it."""

    account: AccountPath | None = None
    plan: PlanName | None = None


class Invitation(Struct):
    invitation: str
    """A code for one registration."""
    usable: bool
    """False while registration is closed at this hub."""


class AgentsPage(Body):
    limit: Count = 100
    after: Annotated[str, Meta(max_length=128)] = ""


class RegisteredByAdmin(Registered, kw_only=True):
    known: bool
    """Whether the account had been named before; also true without one."""
    limited: bool
    """Whether the account, or one above it, has limits; also true without one."""


class RegisteredAgent(Struct):
    agent_id: str
    registered_at: float
    revoked: bool
    connected: bool


class DisconnectedAgent(Struct):
    agent_id: str
    connections: int
    """How many were closed, on this hub."""


class NewBlock(Body):
    until: Annotated[float, Meta(description="seconds since 1970; null: until it is unblocked")] | None = None
    reason: Annotated[str, Meta(max_length=MAX_REASON, description="for operators; the agent isn't told")] = ""


class BlockedAgent(Struct):
    agent_id: str
    blocked: bool
    until: float | None
    reason: str
    registered: bool
    """Whether there is an agent of this name."""


class RegisteredAgents(Struct):
    agents: list[RegisteredAgent]


async def _agents(call: Call, registry: Registry, presence: Presence) -> RegisteredAgents:
    found = await registry.agents(call.query.after, call.query.limit)
    return RegisteredAgents(
        [RegisteredAgent(one.agent, one.at, one.revoked, presence.is_connected(one.agent)) for one in found]
    )


async def _register(call: Call, operators: Operators, gate: Gate) -> RegisteredByAdmin:
    agent, account = call.body.agent_id, call.body.account
    known = not account or gate.effective.names_account(account)
    token = await operators.register(agent, call.caller, call.by, Grant(account, call.body.plan, call.by))
    _log.info("agent registered", agent=agent, by=call.by)
    limited = not account or gate.effective.limits_account(account)
    return RegisteredByAdmin(agent, token, known=known, limited=limited)


async def _rotate(call: Call, operators: Operators) -> Registered:
    agent = call.parts["agent"]
    token = await operators.rotate(agent, call.caller, call.by)
    _log.info("token rotated", agent=agent, by=call.by)
    return Registered(agent, token)


async def _revoke(call: Call, operators: Operators) -> Revoked:
    agent = call.parts["agent"]
    revoked = await operators.revoke(agent, call.caller, call.by)
    _log.info("token revoked", agent=agent, by=call.by)
    return Revoked(agent, revoked)


async def _disconnect(call: Call, sockets: AgentSockets, relay: Relay) -> DisconnectedAgent:
    agent = call.parts["agent"]
    connections = sockets.disconnect(agent) + relay.disconnect(agent)
    _log.info("agent disconnected by an operator", agent=agent, connections=connections, by=call.by)
    return DisconnectedAgent(agent, connections)


async def _block(call: Call, gate: Gate, registry: Registry, operators: Operators) -> BlockedAgent:
    agent, body = call.parts["agent"], call.body
    registered = await registry.find(agent) is not None
    await operators.block(agent, body.until, body.reason, call.caller, call.by)
    return _blocked(gate, agent, registered)


async def _unblock(call: Call, gate: Gate, registry: Registry, operators: Operators) -> BlockedAgent:
    agent = call.parts["agent"]
    registered = await registry.find(agent) is not None
    await operators.unblock(agent, call.caller, call.by)
    return _blocked(gate, agent, registered)


def _blocked(gate: Gate, agent: str, registered: bool) -> BlockedAgent:
    block = gate.block_of(agent)
    if block is None:
        return BlockedAgent(agent, False, None, "", registered)
    return BlockedAgent(agent, True, block.until, block.reason, registered)


async def _invite(call: Call, operators: Operators) -> Invitation:
    code = await operators.invite(call.caller, Grant(call.body.account, call.body.plan, call.by))
    _log.info("invitation created", by=call.by)
    return Invitation(code, operators.takes_invitations)


ROUTES: Final = (
    admin_route("GET", "/api/admin/agents", _agents, "all agents, by name", query=AgentsPage),
    admin_route(
        "POST", "/api/admin/agents", _register,
        "register an agent, even where registration is closed", body=NewAgent, status=201,
    ),
    admin_route(
        "POST", "/api/admin/agents/{agent}/token", _rotate,
        "give an agent a new token; the old one stops working",
    ),
    admin_route("DELETE", "/api/admin/agents/{agent}/token", _revoke, "revoke an agent's token"),
    admin_route("PUT", "/api/admin/agents/{agent}/block", _block, "deny an agent everything, at once", body=NewBlock),
    admin_route(
        "DELETE", "/api/admin/agents/{agent}/block", _unblock,
        "hold an agent to its limits again instead of blocking it",
    ),
    admin_route(
        "POST", "/api/admin/agents/{agent}/disconnect", _disconnect,
        "close an agent's connections to this hub; it may connect again",
    ),
    admin_route(
        "POST", "/api/admin/invitations", _invite,
        "create an invitation to register", body=NewInvitation, body_required=False, status=201,
    ),
)  # fmt: skip
