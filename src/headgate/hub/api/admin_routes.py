"""What the admin can ask over HTTP."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from headgate.errors import InvalidInput, refuse
from headgate.gate import Gate
from headgate.gate.policy import TIERS, Policy, check_agent
from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import Registry
from headgate.hub.api.agent_routes import NewTask, Registered, Revoked, TaskList, TaskPage
from headgate.hub.api.routing import Body, Call, Route, Who
from headgate.hub.dashboard.cards import AgentCard, Cards
from headgate.hub.dashboard.feed import DashboardFeed
from headgate.hub.errors import RequestError
from headgate.hub.messages.sessions import SessionLog
from headgate.hub.monitoring.alerts import Alerts
from headgate.hub.monitoring.stats import Stats
from headgate.hub.sockets.frames import AgentId, Count, SessionId, Signal
from headgate.hub.tasks.scheduler import Scheduler
from headgate.hub.tasks.task import Task
from headgate.limits.decision import Limit, Outcome
from headgate.limits.notation import limit_of
from headgate.stores.base import Change

Limits = dict[str, dict[str, str]]
"""By channel and tier, as text."""

LimitText = Annotated[str, Meta(min_length=1, max_length=200, examples=["60/minute", "60/minute burst 10"])]
LimitTexts = LimitText | Annotated[list[LimitText], Meta(min_length=1, max_length=10)]
"""A limit, or several that hold together."""
NewLimits = Annotated[
    dict[str, LimitTexts | dict[str, LimitTexts]],
    Meta(description="limits by tier, for every channel, or below the name of a channel, for that one"),
]


@dataclass(frozen=True)
class PolicyFile:
    """The file that the policy was read from; None for a hub without one."""

    path: Path | None


class RateLimits(Struct):
    defaults: Limits
    overrides: dict[str, Limits]


class AgentLimits(Struct):
    agent_id: str
    limits: Limits
    """What holds for the agent now."""
    override: Limits
    """What of it is its own."""
    exempt: bool


class Whitelist(Struct):
    agents: list[str]


class NewWhitelist(Body):
    agents: Annotated[list[AgentId], Meta(max_length=1000)]


class Exempt(Body):
    agent_id: AgentId


class NewAgent(Body):
    agent_id: AgentId


class Invitation(Struct):
    invitation: str
    """Good for one registration."""


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
    """Instead of a tier: the policy knows it."""
    cost: Annotated[int, Meta(ge=1, le=2**53)] = 1
    peek: bool = False
    """Only look: count nothing."""


class Verdict(Struct):
    """What the gate has decided."""

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
    """In a row, if this was one."""
    would_be: Literal["allow", "warn", "deny", "exempt"] | None
    """The outcome, if the limit weren't only watched."""
    degraded: bool


class Changes(Struct):
    changes: list[dict[str, Any]]


class ChangesPage(Body):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class Reloaded(Struct):
    reloaded: bool


class NewSignal(Body):
    agent_id: AgentId
    session: SessionId
    signal: Signal


class SignalNumber(Struct):
    number: int


# Limits ---------------------------------------------------------------------------------------------------------------


async def _rate_limits(_call: Call, gate: Gate) -> RateLimits:
    holds = gate.effective
    overrides = {agent: _nested(lanes) for agent, lanes in sorted(holds.overrides.items())}
    return RateLimits(_nested(holds.limits), overrides)


async def _set_defaults(call: Call, gate: Gate) -> RateLimits:
    for channel, tier, limit in _given(gate, call.body):
        await gate.aset_default(tier, limit, channel, by=call.by)
    return await _rate_limits(call, gate)


async def _set_override(call: Call, gate: Gate) -> AgentLimits:
    agent = call.parts["agent"]
    for channel, tier, limit in _given(gate, call.body):
        await gate.aset_override(agent, tier, limit, channel, by=call.by)
    return _limits_of(gate, agent)


async def _remove_override(call: Call, gate: Gate) -> AgentLimits:
    agent = call.parts["agent"]
    if agent in gate.effective.overrides:
        await gate.aremove_override(agent, by=call.by)
    return _limits_of(gate, agent)


def _given(gate: Gate, body: dict[str, Any]) -> list[tuple[str | None, str, Limit]]:
    """Limits by tier, for every channel, and by tier below a channel, for that one: all of them, or an error."""
    channels = gate.policy.channels
    found: list[tuple[str | None, str, Limit]] = []
    for name, value in body.items():
        if name in TIERS:
            found.append((None, name, _limit(name, value)))
        elif name not in channels:
            refuse("body", f"one of {', '.join([*TIERS, *channels])}", name)
        elif not isinstance(value, dict):
            refuse(name, "an object with limits by tier", value)
        else:
            for tier, text in value.items():
                if tier not in TIERS:
                    refuse(name, f"one of {', '.join(TIERS)}", tier)
                found.append((name, tier, _limit(f"{name}.{tier}", text)))
    if not found:
        raise RequestError(400, "invalid", f"body: expected limits for some of {', '.join(TIERS)}, got none")
    return sorted(found, key=lambda one: one[0] is not None)  # what is said of one channel holds there


def _limit(place: str, given: Any) -> Limit:
    if isinstance(given, dict):
        refuse(place, "a limit such as '60/minute', or a list of several", given)
    try:
        return limit_of(place, given)
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {error}") from None


def _nested(lanes: Any) -> Limits:
    nested: Limits = {}
    for (channel, tier), limit in lanes.items():
        nested.setdefault(channel, {})[tier] = str(limit)
    return nested


def _limits_of(gate: Gate, agent: str) -> AgentLimits:
    limits = {
        channel: {tier: str(gate.limits_for(agent, channel, tier)) for tier in TIERS}
        for channel in gate.policy.channels
    }
    return AgentLimits(agent, limits, _nested(gate.effective.overrides.get(agent, {})), gate.is_exempt(agent))


# The exempt -----------------------------------------------------------------------------------------------------------


async def _whitelist(_call: Call, gate: Gate) -> Whitelist:
    return Whitelist(sorted(gate.effective.exempt))


async def _replace_whitelist(call: Call, gate: Gate) -> Whitelist:
    wanted = {check_agent(agent) for agent in call.body.agents}
    before = gate.effective.exempt
    for agent in sorted(before - wanted):
        await gate.aremove_exemption(agent, by=call.by)
    for agent in sorted(wanted - before):
        await gate.aadd_exemption(agent, by=call.by)
    return await _whitelist(call, gate)


async def _add_exempt(call: Call, gate: Gate) -> Whitelist:
    if check_agent(call.body.agent_id) not in gate.effective.exempt:
        await gate.aadd_exemption(call.body.agent_id, by=call.by)
    return await _whitelist(call, gate)


async def _remove_exempt(call: Call, gate: Gate) -> Whitelist:
    if call.parts["agent"] in gate.effective.exempt:
        await gate.aremove_exemption(call.parts["agent"], by=call.by)
    return await _whitelist(call, gate)


# Violations, agents, and the rest -------------------------------------------------------------------------------------


async def _violations(_call: Call, stats: Stats, cards: Cards) -> Violations:
    return Violations(await cards.of([one.agent_id for one in stats.offenders()[:1000]]))


async def _reset_violations(
    call: Call, gate: Gate, stats: Stats, scheduler: Scheduler, dashboard: DashboardFeed, alerts: Alerts
) -> Reset:
    agent = call.parts["agent"]
    reset = await gate.areset_violations(agent)
    stats.forget(agent)
    scheduler.recheck()
    dashboard.refresh()
    alerts.recheck()
    return Reset(agent, reset)


async def _check(call: Call, gate: Gate, stats: Stats) -> Verdict:
    body = call.body
    agent, channel = check_agent(body.agent_id), body.channel
    if (body.tier is None) is (body.action is None):
        raise RequestError(400, "invalid", "body: expected a tier or an action, and not both")
    tier = gate.tier_of(channel, body.action) if body.tier is None else body.tier
    if not body.peek:
        decision = await stats.check(agent, channel, tier, body.cost)
    elif body.cost != 1:
        refuse("cost", "1 with peek, which says what is left for any cost", body.cost)
    else:
        decision = await gate.apeek(agent, channel, tier)
    wait, violation, would_be = decision.retry_us, decision.violation, decision.would_be
    return Verdict(
        agent_id=agent,
        channel=channel,
        tier=tier,
        outcome=decision.outcome.value,
        remaining=decision.remaining,
        capacity=decision.limit.capacity,
        limit=str(decision.limit),
        retry_after_ms=None if wait is None else -(-wait // 1000),
        exempt=decision.outcome is Outcome.EXEMPT,
        violations=0 if violation is None else violation.count,
        would_be=None if would_be is None else would_be.value,
        degraded=decision.degraded,
    )


async def _agents(call: Call, registry: Registry, presence: Presence) -> RegisteredAgents:
    found = await registry.agents(call.query.after, call.query.limit)
    return RegisteredAgents(
        [RegisteredAgent(one.agent, one.at, one.revoked, presence.is_connected(one.agent)) for one in found]
    )


async def _agent(call: Call, registry: Registry, cards: Cards) -> AgentCard:
    agent = call.parts["agent"]
    if not await registry.knows(agent):
        raise RequestError(404, "unknown_agent", f"there is no agent {agent!r}")
    (card,) = await cards.of([agent])
    return card


async def _register(call: Call, registry: Registry) -> Registered:
    agent = call.body.agent_id
    return Registered(agent, await registry.register(agent, by_admin=True))


async def _rotate(call: Call, registry: Registry) -> Registered:
    agent = call.parts["agent"]
    return Registered(agent, await registry.rotate(agent, by_admin=True))


async def _revoke(call: Call, registry: Registry) -> Revoked:
    agent = call.parts["agent"]
    return Revoked(agent, await registry.revoke(agent))


async def _invite(_call: Call, registry: Registry) -> Invitation:
    return Invitation(await registry.invite())


async def _push_task(call: Call, scheduler: Scheduler) -> Task:
    return await scheduler.add("", bytes(call.body.payload))


async def _tasks(call: Call, scheduler: Scheduler) -> TaskList:
    query: TaskPage = call.query
    return TaskList(await scheduler.tasks(state=query.state, limit=query.limit, before=query.before))


async def _changes(call: Call, gate: Gate) -> Changes:
    history = await asyncio.to_thread(gate.history)
    return Changes([_told(change) for change in reversed(history[-call.query.limit :])])


def _told(change: Change) -> dict[str, Any]:
    return {"what": str(change), "by": change.by, "at": change.at}


async def _reload(call: Call, file: PolicyFile, gate: Gate) -> Reloaded:
    if file.path is None:
        raise RequestError(409, "no_config", "the hub was started without --config: there is nothing to reload")
    await gate.areload(await asyncio.to_thread(Policy.load, file.path), by=call.by)
    return Reloaded(True)


async def _write_signal(call: Call, sessions: SessionLog) -> SignalNumber:
    body: NewSignal = call.body
    return SignalNumber(await sessions.write(check_agent(body.agent_id), str(body.session), body.signal))


_LIMITS: Final = "/api/admin/rate-limits"
ROUTES: Final = (
    Route("GET", _LIMITS, "admin", Who.ADMIN, _rate_limits, RateLimits, "the defaults and overrides"),
    Route(
        "PUT", f"{_LIMITS}/defaults", "admin", Who.ADMIN, _set_defaults, RateLimits, "change the defaults",
        body=NewLimits,
    ),
    Route(
        "PUT", f"{_LIMITS}/{{agent}}", "admin", Who.ADMIN, _set_override, AgentLimits,
        "give an agent limits of its own", body=NewLimits,
    ),
    Route(
        "DELETE", f"{_LIMITS}/{{agent}}", "admin", Who.ADMIN, _remove_override, AgentLimits,
        "put an agent back to the defaults",
    ),
    Route("GET", f"{_LIMITS}/whitelist", "admin", Who.ADMIN, _whitelist, Whitelist, "the exempt agents"),
    Route(
        "PUT", f"{_LIMITS}/whitelist", "admin", Who.ADMIN, _replace_whitelist, Whitelist,
        "replace the list of exempt agents", body=NewWhitelist,
    ),
    Route(
        "POST", f"{_LIMITS}/whitelist", "admin", Who.ADMIN, _add_exempt, Whitelist, "exempt an agent",
        body=Exempt,
    ),
    Route(
        "DELETE", f"{_LIMITS}/whitelist/{{agent}}", "admin", Who.ADMIN, _remove_exempt, Whitelist,
        "hold an agent to its limits again",
    ),
    Route(
        "GET", "/api/admin/violations", "admin", Who.ADMIN, _violations, Violations,
        "the agents with violations in the last hour, the worst first",
    ),
    Route(
        "DELETE", "/api/admin/violations/{agent}", "admin", Who.ADMIN, _reset_violations, Reset,
        "forget an agent's violations",
    ),
    Route(
        "POST", "/api/admin/check", "admin", Who.ADMIN, _check, Verdict,
        "may an agent do something? Counts it, as if the agent had asked", body=NewCheck,
    ),
    Route(
        "GET", "/api/admin/agents", "admin", Who.ADMIN, _agents, RegisteredAgents, "all agents, by name",
        query=AgentsPage,
    ),
    Route(
        "POST", "/api/admin/agents", "admin", Who.ADMIN, _register, Registered,
        "register an agent, whatever registration is", body=NewAgent, status=201,
    ),
    Route("GET", "/api/admin/agents/{agent}", "admin", Who.ADMIN, _agent, AgentCard, "how an agent stands"),
    Route(
        "POST", "/api/admin/agents/{agent}/token", "admin", Who.ADMIN, _rotate, Registered,
        "give an agent a new token; the old one is worth nothing any more",
    ),
    Route(
        "DELETE", "/api/admin/agents/{agent}/token", "admin", Who.ADMIN, _revoke, Revoked,
        "take an agent's token away",
    ),
    Route(
        "POST", "/api/admin/invitations", "admin", Who.ADMIN, _invite, Invitation,
        "invite somebody to register", status=201,
    ),
    Route(
        "POST", "/api/admin/tasks", "post_admin_push_task", Who.ADMIN, _push_task, Task, "a task for whoever is idle",
        body=NewTask, status=201,
    ),
    Route("GET", "/api/admin/tasks", "admin", Who.ADMIN, _tasks, TaskList, "all tasks", query=TaskPage),
    Route(
        "GET", "/api/admin/changes", "admin", Who.ADMIN, _changes, Changes,
        "who changed what, and when, newest first", query=ChangesPage,
    ),
    Route("POST", "/api/admin/reload", "admin", Who.ADMIN, _reload, Reloaded, "read the policy file again"),
    Route(
        "POST", "/api/admin/signals", "admin", Who.ADMIN, _write_signal, SignalNumber,
        "write a signal of the application's own, which no limit holds for", body=NewSignal, status=201,
    ),
)  # fmt: skip
