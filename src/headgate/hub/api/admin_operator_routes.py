"""Admin routes: operators, and the roles of agents."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from headgate.hub.agents.names import ROLES
from headgate.hub.agents.operators import Operator, Operators
from headgate.hub.api.routing import Body, Call, admin_route
from headgate.hub.sockets.frames import AgentId

Role = Annotated[str, Meta(max_length=64, extra_json_schema={"enum": list(ROLES)})]


class Admins(Struct):
    admins: list[Operator]


class NewAdmin(Body):
    name: AgentId
    role: Role


class AddedAdmin(Struct):
    name: str
    role: str
    token: str
    """Shown once: the hub stores only its digest."""


class RemovedAdmin(Struct):
    name: str
    revoked: bool
    """Whether its token was valid until now."""


class NewRole(Body):
    role: Role


class AgentRole(Struct):
    agent_id: str
    role: str
    """"" for none."""


async def _admins(_call: Call, operators: Operators) -> Admins:
    return Admins(await operators.all())


async def _add(call: Call, operators: Operators) -> AddedAdmin:
    name, role = call.body.name, call.body.role
    return AddedAdmin(name, role, await operators.add(name, role, call.caller, call.by))


async def _remove(call: Call, operators: Operators) -> RemovedAdmin:
    name = call.parts["agent"]
    return RemovedAdmin(name, await operators.remove(name, call.caller, call.by))


async def _set_role(call: Call, operators: Operators) -> AgentRole:
    agent = call.parts["agent"]
    await operators.set_role(agent, call.body.role, call.caller, call.by)
    return AgentRole(agent, call.body.role)


async def _remove_role(call: Call, operators: Operators) -> AgentRole:
    agent = call.parts["agent"]
    await operators.set_role(agent, None, call.caller, call.by)
    return AgentRole(agent, "")


_ADMINS: Final = "/api/admin/admins"
_ROLE: Final = "/api/admin/agents/{agent}/role"
ROUTES: Final = (
    admin_route("GET", _ADMINS, _admins, "all admins and viewers, with the admins that made them"),
    admin_route("POST", _ADMINS, _add, "register an admin or viewer, by name", body=NewAdmin, status=201),
    admin_route(
        "DELETE", f"{_ADMINS}/{{agent}}", _remove,
        "take the role of an admin or viewer away, and revoke its token",
    ),
    admin_route("PUT", _ROLE, _set_role, "give a registered agent a role", body=NewRole),
    admin_route("DELETE", _ROLE, _remove_role, "take an agent's role away"),
)  # fmt: skip
