"""Admin routes: agents, their tokens, and invitations."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import Registry
from headgate.hub.api.agent_routes import Registered, Revoked
from headgate.hub.api.routing import Body, Call, Route, Who
from headgate.hub.sockets.frames import AgentId, Count


class NewAgent(Body):
    agent_id: AgentId


class Invitation(Struct):
    invitation: str
    """A code for one registration."""


class AgentsPage(Body):
    limit: Count = 100
    after: Annotated[str, Meta(max_length=128)] = ""


class RegisteredAgent(Struct):
    agent_id: str
    registered_at: float
    revoked: bool
    connected: bool


class RegisteredAgents(Struct):
    agents: list[RegisteredAgent]


async def _agents(call: Call, registry: Registry, presence: Presence) -> RegisteredAgents:
    found = await registry.agents(call.query.after, call.query.limit)
    return RegisteredAgents(
        [RegisteredAgent(one.agent, one.at, one.revoked, presence.is_connected(one.agent)) for one in found]
    )


async def _register(call: Call, registry: Registry) -> Registered:
    agent = call.body.agent_id
    return Registered(agent, await registry.register(agent, by_admin=True))


async def _rotate(call: Call, registry: Registry) -> Registered:
    agent = call.parts["agent"]
    return Registered(agent, await registry.rotate(agent))


async def _revoke(call: Call, registry: Registry) -> Revoked:
    agent = call.parts["agent"]
    return Revoked(agent, await registry.revoke(agent))


async def _invite(_call: Call, registry: Registry) -> Invitation:
    return Invitation(await registry.invite())


ROUTES: Final = (
    Route(
        "GET", "/api/admin/agents", "admin", Who.ADMIN, _agents, RegisteredAgents, "all agents, by name",
        query=AgentsPage,
    ),
    Route(
        "POST", "/api/admin/agents", "admin", Who.ADMIN, _register, Registered,
        "register an agent, even where registration is closed", body=NewAgent, status=201,
    ),
    Route(
        "POST", "/api/admin/agents/{agent}/token", "admin", Who.ADMIN, _rotate, Registered,
        "give an agent a new token; the old one stops working",
    ),
    Route(
        "DELETE", "/api/admin/agents/{agent}/token", "admin", Who.ADMIN, _revoke, Revoked,
        "revoke an agent's token",
    ),
    Route(
        "POST", "/api/admin/invitations", "admin", Who.ADMIN, _invite, Invitation,
        "create an invitation to register", status=201,
    ),
)  # fmt: skip
