"""Everything about one agent, for operators: what it does, what it may do, and what it was denied."""

from contextlib import suppress
from math import ceil
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import asdict

from headgate.errors import HeadgateError, InvalidInput
from headgate.gate import Gate
from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import Registry
from headgate.hub.api.admin_limit_routes import Limits, by_channel
from headgate.hub.api.hold_routes import cost_texts
from headgate.hub.api.routing import Access, Call, Route
from headgate.hub.dashboard.accounts import LimitCard, limit_card
from headgate.hub.dashboard.cards import AgentCard, BucketUsage, Cards, sees_accounts, used_share
from headgate.hub.errors import RequestError
from headgate.hub.messages.sessions import SessionLog
from headgate.hub.monitoring.denials import DenialRecord, DeniedAction
from headgate.hub.monitoring.stats import Stats
from headgate.hub.sockets.relay import Relay
from headgate.hub.tasks.scheduler import Scheduler
from headgate.stores.holds import AccountStore

_MAX_HOLDS: Final = 50  # that are listed


class Bucket(BucketUsage, kw_only=True):
    """One bucket of an agent."""

    limit: str
    own: bool
    """Whether the limit is an override."""


class AgentSocket(Struct):
    """An open connection of an agent."""

    kind: Literal["ws", "relay"]
    address: str
    since: float
    """In seconds since 1970."""


class AgentTasks(Struct):
    held: str | None
    """The task that it works on, by its id."""
    created: int
    """Unfinished tasks that it created."""


class AgentHold(Struct):
    """An open hold of an agent, or one whose lease has ended."""

    hold_id: str
    session: str
    tool: str
    state: Literal["open", "expired"]
    costs: dict[str, str]
    """The reserved costs, by resource."""
    lease_left: float
    """Seconds until its lease ends."""


class AgentDetail(AgentCard, kw_only=True):
    """Everything about one agent."""

    quiet_left_ms: int
    """Until its violations no longer count, if it keeps quiet: so long it gets no new tasks."""
    registered: bool
    revoked: bool
    """Whether its token was revoked."""
    registered_at: float | None
    blocked_until: float | None
    """When its block ends, in seconds since 1970; null if it doesn't, or if there is none."""
    blocked_reason: str
    buckets: list[Bucket]
    override: Limits  # type: ignore[assignment]  # its value, not only whether there is one
    """Its own limits, by channel and tier."""
    session_limit: str
    """The limit in effect for each of its sessions."""
    session_override: str | None
    """The same, if it is its own."""
    denied_actions: list[DeniedAction]
    """Its denials within the last hour, most frequent first."""
    denials: list[DenialRecord]
    """The last ten, newest first."""
    connections: list[AgentSocket]
    sessions: int
    """The number of open ones."""
    tasks: AgentTasks
    account: str
    """Its path: the accounts that it belongs to, and its name. Only admins see accounts: others get ""."""
    account_limits: list[LimitCard]
    """Every limit of an account that a hold of the agent meets, from the top account down to its own."""
    holds: list[AgentHold]
    """Its open holds, those that end first at the front: at most 50."""


async def _agent(
    call: Call,
    gate: Gate,
    stats: Stats,
    cards: Cards,
    registry: Registry,
    presence: Presence,
    relay: Relay,
    sessions: SessionLog,
    scheduler: Scheduler,
) -> AgentDetail:
    agent = call.parts["agent"]
    record = await registry.find(agent)
    standing = await gate.astanding(agent)
    card = await cards.of_standing(agent, standing)
    sockets = [AgentSocket("ws", one.address, one.since) for one in presence.sockets_of(agent)]
    sockets += [AgentSocket("relay", one.address, one.since) for one in relay.sockets_of(agent)]
    denials, effective = stats.denials.last(agent), gate.effective
    traces = (agent in effective.agents, stats.traffic(agent), card.violations, card.violations_last_hour, denials)
    if record is None and not any([*traces, sockets]):
        raise RequestError(404, "unknown_agent", f"there is no agent {agent!r}")
    accounts = sees_accounts(call.caller.role)
    account_limits, holds = await _accounts(gate, agent) if accounts else ([], [])
    own, block = effective.session_overrides.get(agent), gate.block_of(agent)
    known = asdict(card) | {"override": by_channel(effective.overrides.get(agent, {}))}
    return AgentDetail(
        **known,
        quiet_left_ms=ceil(standing.quiet_left * 1000),
        registered=record is not None,
        revoked=record is not None and record.revoked,
        registered_at=None if record is None else record.at,
        blocked_until=None if block is None else block.until,
        blocked_reason="" if block is None else block.reason,
        buckets=await _buckets(gate, agent),
        session_limit=str(effective.session_limit_of(agent)),
        session_override=None if own is None else str(own),
        denied_actions=stats.denials.actions(agent),
        denials=denials,
        connections=sockets,
        sessions=sessions.open_sessions_of(agent),
        tasks=AgentTasks(scheduler.task_of(agent), scheduler.created_by(agent)),
        account=gate.path_of(agent) if accounts else "",
        account_limits=account_limits,
        holds=holds,
    )


async def _accounts(gate: Gate, agent: str) -> tuple[list[LimitCard], list[AgentHold]]:
    """The limits of the accounts that an agent belongs to, and its holds; none if the store can't tell."""
    if not isinstance(gate.store, AccountStore):
        return [], []
    try:
        limits, listed = await gate.aexplain(agent), await gate.alist_holds(gate.path_of(agent), _MAX_HOLDS)
    except HeadgateError:  # the store is away: the rest of the page is still of use
        return [], []
    wall = gate.store.clock.wall()
    holds = [
        AgentHold(
            hold.id,
            hold.session,
            hold.tool,
            "open" if hold.state == "open" else "expired",
            cost_texts(hold.costs),
            round(hold.lease_left, 3),
        )
        for hold in listed
    ]
    return [limit_card(one, wall) for one in limits], holds


async def _buckets(gate: Gate, agent: str) -> list[Bucket]:
    own = gate.effective.overrides.get(agent, {})
    found = []
    for channel, tier in gate.policy.limits:
        with suppress(InvalidInput):  # a reload has removed it since
            decision = await gate.apeek(agent, channel, tier)
            capacity, limit = decision.limit.capacity, str(decision.limit)
            used = round(used_share(decision), 4)
            found.append(
                Bucket(channel, tier, used, decision.remaining, capacity, limit=limit, own=(channel, tier) in own)
            )
    return found


ROUTES: Final = (
    Route("GET", "/api/admin/agents/{agent}", "admin", Access.VIEWER, _agent, "everything about an agent"),
)
