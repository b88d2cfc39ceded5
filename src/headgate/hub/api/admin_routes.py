"""The routes of the admin."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, json

from headgate.errors import InvalidInput, refuse
from headgate.gate import Gate
from headgate.gate.changes import default, exemption, override, session_limit
from headgate.gate.policy import ChannelTier, Policy, check_agent
from headgate.http import describe_decision
from headgate.hub.agents.counter_shares import CounterShares
from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import Registry
from headgate.hub.agents.store_guard import StoreGuard
from headgate.hub.api.agent_routes import NewTask, Registered, Revoked, TaskList, TaskPage
from headgate.hub.api.routing import Body, Call, Route, Who
from headgate.hub.dashboard.cards import AgentCard, Cards
from headgate.hub.errors import RequestError
from headgate.hub.messages.messages import MessageBroker
from headgate.hub.messages.sessions import OUTSIDE, SessionLog
from headgate.hub.monitoring.health import Health, StoreState
from headgate.hub.monitoring.stats import Stats
from headgate.hub.sockets.agent_socket import AgentSockets
from headgate.hub.sockets.frames import AgentId, Count, SessionId, Signal
from headgate.hub.sockets.relay import Relay
from headgate.hub.tasks.scheduler import Scheduler
from headgate.hub.tasks.task import Task
from headgate.limits.decision import Limit
from headgate.limits.notation import limit_of

_LONGEST_LIMIT: Final = 200
_MOST_LIMITS: Final = 10
_SESSION: Final = "session"  # beside the tiers
_LEAVE_WITHIN: Final = 5.0  # seconds until all agents have left whose connections were closed

Limits = dict[str, dict[str, str]]
"""Limits as text, by channel and tier."""

LimitText = Annotated[str, Meta(min_length=1, max_length=_LONGEST_LIMIT, examples=["60/minute", "60/minute burst 10"])]
LimitTexts = LimitText | Annotated[list[LimitText], Meta(min_length=1, max_length=_MOST_LIMITS)]
"""A limit, or several that apply together."""
NewLimits = Annotated[
    dict[str, Any],  # `_given` reads it: the texts of msgspec don't name the tier
    Meta(
        description="limits by tier, for every channel, or below the name of a channel, for that one; below "
        "`session`, the limit of each session",
        extra_json_schema={"additionalProperties": json.schema(LimitTexts | dict[str, LimitTexts])},
    ),
]


@dataclass(frozen=True)
class PolicyFile:
    """The file that the policy was read from; None for a hub without one."""

    path: Path | None


class RateLimits(Struct):
    defaults: Limits
    overrides: dict[str, Limits]
    session: str
    """The limit of every session of an agent without one of its own."""
    session_overrides: dict[str, str]


class AgentLimits(Struct):
    agent_id: str
    limits: Limits
    """The limits in effect for the agent."""
    override: Limits
    """Those of them that are its own."""
    session: str
    """The limit in effect for each of its sessions."""
    session_override: str | None
    """The same, if it is its own."""
    exempt: bool


class ExemptAgents(Struct):
    agents: list[str]


class NewExemptAgents(Body):
    agents: Annotated[list[AgentId], Meta(max_length=1000)]


class NewExemption(Body):
    agent_id: AgentId


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


class StoreStatus(Struct):
    store: StoreState
    problems: list[str]
    """What is wrong with the store or the disk, in sentences."""


class AcceptedStore(StoreStatus, kw_only=True):
    accepted: bool
    """False: the store has its data, so there was nothing to accept."""


class AcceptStore(Body):
    agent_data: Literal["keep", "drop"]
    """What becomes of mail, sessions, signals, tasks and chat channels on this hub.

    Whoever registers a name next gets what belongs to it; or mail, sessions and signals are dropped, and tasks and chat
    channels are the admin's.
    """


class NewSignal(Body):
    agent_id: AgentId
    signal: Signal
    session: SessionId | None = None
    """None: outside any session."""


class SignalNumber(Struct):
    number: int


# Limits ---------------------------------------------------------------------------------------------------------------


async def _rate_limits(_call: Call, gate: Gate) -> RateLimits:
    effective = gate.effective
    overrides = {agent: _by_channel(limits) for agent, limits in sorted(effective.overrides.items())}
    sessions = {agent: str(limit) for agent, limit in sorted(effective.session_overrides.items())}
    return RateLimits(_by_channel(effective.limits), overrides, str(effective.session_limit), sessions)


async def _set_defaults(call: Call, gate: Gate) -> RateLimits:
    edits = [
        session_limit(limit) if tier == _SESSION else default(tier, limit, channel)
        for channel, tier, limit in _given(call, gate)
    ]
    await gate.achange(edits, by=call.by)
    return await _rate_limits(call, gate)


async def _set_override(call: Call, gate: Gate) -> AgentLimits:
    agent = call.parts["agent"]
    edits = [
        session_limit(limit, agent) if tier == _SESSION else override(agent, tier, limit, channel)
        for channel, tier, limit in _given(call, gate)
    ]
    await gate.achange(edits, by=call.by)
    return _limits_of(gate, agent)


async def _remove_override(call: Call, gate: Gate) -> AgentLimits:
    agent = call.parts["agent"]
    if agent in gate.effective.overrides or agent in gate.effective.session_overrides:
        await gate.aremove_override(agent, by=call.by)
    return _limits_of(gate, agent)


def _given(call: Call, gate: Gate) -> list[tuple[str | None, str, Limit]]:
    """The limits in a body, as channel (None: every channel), tier and limit: all of them, or an error."""
    channels, tiers = gate.policy.channels, gate.policy.tiers
    found: list[tuple[str | None, str, Limit]] = []
    for name, value in call.body.items():
        if name in (*tiers, _SESSION):
            found.append((None, name, _limit(name, value)))
        elif name not in channels:
            refuse("body", f"one of {', '.join([*tiers, *channels, _SESSION])}", name)
        elif not isinstance(value, dict):
            refuse(name, "an object with limits by tier, such as {'light': '60/minute'}", value)
        else:
            for tier, text in value.items():
                if tier not in tiers:
                    refuse(name, f"one of {', '.join(tiers)}", tier)
                found.append((name, tier, _limit(f"{name}.{tier}", text)))
    if not found:
        raise RequestError(400, "invalid", f"body: expected limits for some of {', '.join(tiers)}, got none")
    return sorted(found, key=lambda one: one[0] is not None)  # those below a channel come last, and prevail there


def _limit(place: str, given: Any) -> Limit:
    texts = given if isinstance(given, list) else [given]
    if not 1 <= len(texts) <= _MOST_LIMITS or not all(isinstance(text, str) for text in texts):
        example = f"{given}/minute" if type(given) is int and given > 0 else "60/minute"
        refuse(place, f"a limit such as '{example}', or a list of 1 to {_MOST_LIMITS}", given)
    if any(len(text) > _LONGEST_LIMIT for text in texts):
        refuse(place, f"at most {_LONGEST_LIMIT} characters for a limit", given)
    try:
        return limit_of(place, given)
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {error}") from None


def _by_channel(limits: Mapping[ChannelTier, Limit]) -> Limits:
    found: Limits = {}
    for (channel, tier), limit in limits.items():
        found.setdefault(channel, {})[tier] = str(limit)
    return found


def _limits_of(gate: Gate, agent: str) -> AgentLimits:
    effective = gate.effective
    own = effective.session_overrides.get(agent)
    return AgentLimits(
        agent_id=agent,
        limits=_by_channel(effective.limits_of(agent)),
        override=_by_channel(effective.overrides.get(agent, {})),
        session=str(effective.session_limit_of(agent)),
        session_override=None if own is None else str(own),
        exempt=effective.is_exempt(agent),
    )


# Exempt agents: "whitelist" in the paths ------------------------------------------------------------------------------


async def _exempt(_call: Call, gate: Gate) -> ExemptAgents:
    return ExemptAgents(sorted(gate.effective.exempt))


async def _replace_exempt(call: Call, gate: Gate) -> ExemptAgents:
    wanted = {check_agent(agent) for agent in call.body.agents}
    different = sorted(wanted ^ gate.effective.exempt)
    await gate.achange([exemption(agent, agent in wanted) for agent in different], by=call.by)
    return await _exempt(call, gate)


async def _add_exempt(call: Call, gate: Gate) -> ExemptAgents:
    if not gate.is_exempt(call.body.agent_id):
        await gate.aadd_exemption(call.body.agent_id, by=call.by)
    return await _exempt(call, gate)


async def _remove_exempt(call: Call, gate: Gate) -> ExemptAgents:
    if gate.is_exempt(call.parts["agent"]):
        await gate.aremove_exemption(call.parts["agent"], by=call.by)
    return await _exempt(call, gate)


# Violations, agents, and the rest -------------------------------------------------------------------------------------


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
    tier = gate.tier_of(channel, body.action) if body.tier is None else body.tier
    if not body.peek:
        decision = await stats.check(agent, channel, tier, body.cost, action=body.action)
    elif body.cost != 1:
        refuse("cost", "1 with peek, which says how much is left for any cost", body.cost)
    else:
        decision = await gate.apeek(agent, channel, tier)
    return Verdict(agent, channel, tier, **describe_decision(decision))


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
    return Registered(agent, await registry.rotate(agent))


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
    newest = reversed(history[-call.query.limit :])
    return Changes([{"what": str(change), "by": change.by, "at": change.at} for change in newest])


async def _reload(call: Call, file: PolicyFile, gate: Gate) -> Reloaded:
    if file.path is None:
        raise RequestError(409, "no_config", "the hub was started without --config, so there is no file to reload")
    await gate.areload(await asyncio.to_thread(Policy.load, file.path), by=call.by)
    return Reloaded(True)


async def _store(_call: Call, health: Health) -> StoreStatus:
    return StoreStatus(health.store, health.problems)


async def _accept_store(
    call: Call,
    guard: StoreGuard,
    registry: Registry,
    sockets: AgentSockets,
    relay: Relay,
    messages: MessageBroker,
    sessions: SessionLog,
    scheduler: Scheduler,
    shares: CounterShares,
    gate: Gate,
    health: Health,
) -> AcceptedStore:
    async def disconnect() -> None:
        registry.forget_verified()  # nobody can connect until the store is accepted
        relay.drop_all()
        if not await sockets.drop_all(_LEAVE_WITHIN):
            raise RequestError(503, "unavailable", "some agents' connections are still open; try again in a moment")

    async def drop() -> None:
        if call.body.agent_data == "drop":
            await messages.drop_agent_data()
            await sessions.drop_agent_data()
            await scheduler.drop_agent_data()

    async def reload() -> None:
        shares.clear()
        await gate.areload(gate.policy, by=call.by)  # the changes in the store, which are the only ones now

    accepted = await guard.accept(disconnect, drop, reload)
    return AcceptedStore(health.store, health.problems, accepted=accepted)


async def _write_signal(call: Call, sessions: SessionLog) -> SignalNumber:
    body: NewSignal = call.body
    session = OUTSIDE if body.session is None else str(body.session)
    return SignalNumber(await sessions.write(check_agent(body.agent_id), session, body.signal))


_LIMITS: Final = "/api/admin/rate-limits"
ROUTES: Final = (
    Route("GET", _LIMITS, "admin", Who.ADMIN, _rate_limits, RateLimits, "all defaults and overrides"),
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
    Route("GET", f"{_LIMITS}/whitelist", "admin", Who.ADMIN, _exempt, ExemptAgents, "the exempt agents"),
    Route(
        "PUT", f"{_LIMITS}/whitelist", "admin", Who.ADMIN, _replace_exempt, ExemptAgents,
        "replace the list of exempt agents", body=NewExemptAgents,
    ),
    Route(
        "POST", f"{_LIMITS}/whitelist", "admin", Who.ADMIN, _add_exempt, ExemptAgents, "exempt an agent",
        body=NewExemption,
    ),
    Route(
        "DELETE", f"{_LIMITS}/whitelist/{{agent}}", "admin", Who.ADMIN, _remove_exempt, ExemptAgents,
        "hold an agent to its limits again",
    ),
    Route(
        "GET", "/api/admin/violations", "admin", Who.ADMIN, _violations, Violations,
        "agents with violations in the last hour, most violations first",
    ),
    Route(
        "DELETE", "/api/admin/violations/{agent}", "admin", Who.ADMIN, _reset_violations, Reset,
        "forget an agent's violations",
    ),
    Route(
        "POST", "/api/admin/check", "admin", Who.ADMIN, _check, Verdict,
        "decide a request as if the agent had made it, and count it", body=NewCheck,
    ),
    Route(
        "GET", "/api/admin/agents", "admin", Who.ADMIN, _agents, RegisteredAgents, "all agents, by name",
        query=AgentsPage,
    ),
    Route(
        "POST", "/api/admin/agents", "admin", Who.ADMIN, _register, Registered,
        "register an agent, even where registration is closed", body=NewAgent, status=201,
    ),
    Route("GET", "/api/admin/agents/{agent}", "admin", Who.ADMIN, _agent, AgentCard, "the state of an agent"),
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
    Route(
        "POST", "/api/admin/tasks", "post_admin_push_task", Who.ADMIN, _push_task, Task,
        "add a task for any idle agent", body=NewTask, status=201,
    ),
    Route("GET", "/api/admin/tasks", "admin", Who.ADMIN, _tasks, TaskList, "all tasks", query=TaskPage),
    Route(
        "GET", "/api/admin/changes", "admin", Who.ADMIN, _changes, Changes,
        "who changed what and when, newest first", query=ChangesPage,
    ),
    Route(
        "GET", "/api/admin/store", "admin", Who.ADMIN, _store, StoreStatus, "whether the store has its data",
    ),
    Route(
        "POST", "/api/admin/store/accept", "admin", Who.ADMIN, _accept_store, AcceptedStore,
        "accept a lost store as it is: all agents have to register again", body=AcceptStore,
    ),
    Route("POST", "/api/admin/reload", "admin", Who.ADMIN, _reload, Reloaded, "reload the policy file"),
    Route(
        "POST", "/api/admin/signals", "admin", Who.ADMIN, _write_signal, SignalNumber,
        "write a signal of the application, which is not limited", body=NewSignal, status=201,
    ),
)  # fmt: skip
