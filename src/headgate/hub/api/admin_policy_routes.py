"""Admin routes: decisions, violations, and the policy with its changes."""

import asyncio
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from headgate.errors import refuse
from headgate.gate import Gate
from headgate.gate.policy import check_agent
from headgate.gate.sources import PolicyValue
from headgate.http import describe_decision
from headgate.hub.api.routing import Body, Call, admin_route
from headgate.hub.config_file import ConfigFile
from headgate.hub.dashboard.cards import AgentCard, Cards
from headgate.hub.errors import RequestError
from headgate.hub.monitoring.stats import Stats
from headgate.hub.sockets.frames import AgentId


class Violations(Struct):
    agents: list[AgentCard]


class Reset(Struct):
    agent_id: str
    reset: bool


class NewCheck(Body):
    agent_id: AgentId
    channel: Annotated[str, Meta(min_length=1, max_length=64, examples=["ws", "http"])]
    tier: Annotated[str, Meta(examples=["light"])] | None = None
    action: Annotated[str, Meta(min_length=1, max_length=200, examples=["message"])] | None = None
    """Instead of a tier: the policy classifies it."""
    cost: Annotated[int, Meta(ge=1, le=2**53)] = 1
    peek: bool = False
    """Say what a check would say, and count nothing."""


class Verdict(Struct):
    """The decision of the gate."""

    agent_id: str
    channel: str
    tier: str
    outcome: Literal["allow", "warn", "deny", "exempt"]
    remaining: int
    capacity: int
    limit: str
    retry_after_ms: int | None
    """The true wait, rounded up; 0 if it passed, null where no wait would help."""
    exempt: bool
    violations: int
    """Violations in a row, if this was one."""
    would_be: Literal["allow", "warn", "deny", "exempt"] | None
    """In shadow mode: the outcome if the limit were enforced."""
    degraded: bool


class Changes(Struct):
    changes: list[dict[str, Any]]


class ChangesPage(Body):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class Reloaded(Struct):
    reloaded: bool
    waits_for_restart: list[str]
    """Settings of the hub, such as `hub.port`, that have changed in the file since the hub started."""
    overruled: list[str]
    """Limits of the file without an effect, since a change overrules them, such as `limits.ws.heavy`."""


class EffectivePolicy(Struct):
    file: str | None
    """The path of the policy file; null for a hub without one."""
    values: list[PolicyValue]
    overruled: list[str]
    """Limits of the file without an effect, since a change overrules them."""


async def _violations(_call: Call, cards: Cards, stats: Stats) -> Violations:
    return Violations(await cards.of([one.agent_id for one in stats.offenders()[:1000]]))


async def _reset_violations(call: Call, gate: Gate) -> Reset:
    agent = call.parts["agent"]
    return Reset(agent, await gate.areset_violations(agent))


async def _check(call: Call, gate: Gate, stats: Stats) -> Verdict:
    body = call.body
    agent, channel = check_agent(body.agent_id), body.channel
    if (body.tier is None) is (body.action is None):
        raise RequestError(400, "invalid", "body: expected a tier or an action, and not both")
    if body.peek:
        if body.cost != 1:
            refuse("cost", "1 with peek, which says how much is left for any cost", body.cost)
        tier = gate.tier_of(channel, body.action) if body.tier is None else body.tier
        decision = await gate.apeek(agent, channel, tier)
    else:
        active, decision = await stats.check(agent, channel, body.tier, body.cost, action=body.action)
        tier = active.tier
    return Verdict(agent, channel, tier, **describe_decision(decision))


async def _changes(call: Call, gate: Gate) -> Changes:
    history = await asyncio.to_thread(gate.history)
    newest = reversed(history[-call.query.limit :])
    return Changes([{"what": str(change), "by": change.by, "at": change.at} for change in newest])


async def _reload(call: Call, file: ConfigFile, gate: Gate) -> Reloaded:
    if file.path is None:
        raise RequestError(409, "no_config", "the hub was started without --config, so there is no file to reload")
    policy, waiting = await asyncio.to_thread(file.load)
    await gate.areload(policy, by=call.by)
    return Reloaded(True, waiting, gate.overruled)


async def _policy(_call: Call, file: ConfigFile, gate: Gate) -> EffectivePolicy:
    path = None if file.path is None else str(file.path)
    return EffectivePolicy(path, await gate.avalues(), gate.overruled)


ROUTES: Final = (
    admin_route(
        "GET", "/api/admin/violations", _violations,
        "agents with violations in the last hour, most violations first",
    ),
    admin_route("DELETE", "/api/admin/violations/{agent}", _reset_violations, "forget an agent's violations"),
    admin_route(
        "POST", "/api/admin/check", _check,
        "decide a request as if the agent had made it, and count it", body=NewCheck,
    ),
    admin_route("GET", "/api/admin/changes", _changes, "the changes, newest first", query=ChangesPage),
    admin_route("GET", "/api/admin/policy", _policy, "every value of the policy in effect, and where it comes from"),
    admin_route("POST", "/api/admin/reload", _reload, "reload the policy file"),
)  # fmt: skip
