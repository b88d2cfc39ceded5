"""What anyone and agents can ask over HTTP."""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Raw, Struct

from headgate._version import VERSION
from headgate.hub.api.routing import Call, Route, Who
from headgate.hub.dashboard.cards import DashboardState, dashboard
from headgate.hub.errors import Refused
from headgate.hub.messages.messages import Mail
from headgate.hub.messages.sessions import Logged
from headgate.hub.sockets.frames import AgentId, ChannelInfo, ChannelName, Count, Note, Number, Post, Token, schemas
from headgate.hub.tasks.task import Task, TaskSummary

# Bodies and answers ---------------------------------------------------------------------------------------------------


class Body(Struct, forbid_unknown_fields=True):
    """What is sent in a request."""


class Register(Body):
    agent_id: AgentId
    invitation: Token | None = None


class Registered(Struct):
    agent_id: str
    token: str
    """Shown once: the hub keeps only a digest of it."""


class Revoked(Struct):
    agent_id: str
    revoked: bool


class ConnectedAgents(Struct):
    agents: list[str]


class AllChannels(Struct):
    channels: list[ChannelInfo]


class NewChannel(Body):
    name: ChannelName
    about: Note = ""


class Page(Body):
    """Which part of a list: so many of those before a number, or the newest."""

    limit: Count = 50
    before: Number | None = None


class MailPage(Body):
    """Which part of a mailbox: so many after a number, or the oldest."""

    limit: Count = 50
    after: Annotated[int, Meta(ge=0, le=2**53)] = 0


class Messages(Struct):
    messages: list[Post]


class NewMessage(Body):
    to: AgentId
    body: Raw


class Sent(Struct):
    to: str
    delivered: bool
    """False: it waits in the mailbox."""


class NewPost(Body):
    body: Raw


class PostNumber(Struct):
    channel: str
    number: int


class Mailbox(Struct):
    messages: list[Mail]


class Acknowledge(Body):
    numbers: Annotated[list[Number], Meta(min_length=1, max_length=1000)]


class Acknowledged(Struct):
    acknowledged: int


class NewTask(Body):
    payload: Raw


class TaskPage(Body):
    """Which tasks: of a state, so many, before the one with an id; the newest first."""

    state: Literal["queued", "assigned", "accepted", "completed", "failed"] | None = None
    limit: Count = 50
    before: Annotated[str, Meta(max_length=64)] | None = None


class Tasks(Struct):
    tasks: list[TaskSummary]


class Signals(Struct):
    signals: list[Logged]


class Health(Struct):
    status: Literal["ok", "degraded", "stopping"]
    store: Literal["ok", "away"]
    """Whether the store that counts is there; while it is away the policy decides what holds."""
    version: str
    connections: int


class Metrics(Struct):
    connections: int
    agents_connected: int
    relay_connections: int
    checks: dict[str, int]
    """Of agents, by outcome."""
    address_checks: dict[str, int]
    violations: int
    alerts: int
    store_outages: int
    messages: int
    tasks: dict[str, int]
    open_sessions: int
    session_buckets: int
    """Sessions that were used and not closed yet."""


class DashboardQuery(Body):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 500


# Anyone ---------------------------------------------------------------------------------------------------------------


async def _health(call: Call) -> Health:
    hub = call.hub
    status: Literal["ok", "degraded", "stopping"] = "degraded" if hub.degraded else "ok"
    if hub.stopping:
        status = "stopping"
    return Health(status, "away" if hub.degraded else "ok", VERSION, len(hub.presence.sockets))


async def _live(_call: Call) -> dict[str, str]:
    return {"status": "live"}


async def _ready(call: Call) -> dict[str, str]:
    if call.hub.stopping:
        raise Refused(503, "stopping", "the hub is stopping")
    return {"status": "ready"}


async def _agents(call: Call) -> ConnectedAgents:
    return ConnectedAgents(call.hub.presence.agents())


async def _channels(call: Call) -> AllChannels:
    return AllChannels(call.hub.post.channels())


async def _metrics(call: Call) -> Metrics:
    hub = call.hub
    addresses: dict[str, int] = {}
    for (_, outcome), times in hub.tally.addresses.items():
        addresses[outcome] = addresses.get(outcome, 0) + times
    return Metrics(
        connections=len(hub.presence.sockets),
        agents_connected=len(hub.presence.agents()),
        relay_connections=hub.relay.connections,
        checks=hub.tally.outcomes(),
        address_checks=addresses,
        violations=hub.tally.violations,
        alerts=hub.alerts.raised,
        store_outages=hub.tally.degraded_times,
        messages=hub.post.carried,
        tasks=hub.scheduler.counts(),
        open_sessions=hub.logbook.open_sessions,
        session_buckets=hub.gate.active_buckets,
    )


async def _schemas(_call: Call) -> dict[str, Any]:
    return schemas()


async def _openapi(call: Call) -> dict[str, Any]:
    return call.hub.openapi


async def _dashboard(call: Call) -> DashboardState:
    return await dashboard(call.hub, call.query.limit)


async def _register(call: Call) -> Registered:
    body: Register = call.body
    token = await call.hub.registry.register(body.agent_id, body.invitation, by_admin=call.admin)
    return Registered(body.agent_id, token)


# Agents ---------------------------------------------------------------------------------------------------------------


async def _rotate(call: Call) -> Registered:
    return Registered(call.agent, await call.hub.registry.rotate(call.agent))


async def _revoke(call: Call) -> Revoked:
    return Revoked(call.agent, await call.hub.registry.revoke(call.agent))


async def _send_message(call: Call) -> Sent:
    delivered = await call.hub.post.send(call.agent, call.body.to, call.body.body)
    return Sent(call.body.to, delivered)


async def _mailbox(call: Call) -> Mailbox:
    return Mailbox(await call.hub.post.mail(call.agent, call.query.limit, call.query.after))


async def _acknowledge(call: Call) -> Acknowledged:
    return Acknowledged(await call.hub.post.acknowledge(call.agent, call.body.numbers))


async def _create_channel(call: Call) -> ChannelInfo:
    return await call.hub.post.create(call.body.name, call.agent, call.body.about)


async def _channel(call: Call) -> ChannelInfo:
    return call.hub.post.channel(call.parts["name"])


async def _history(call: Call) -> Messages:
    return Messages(await call.hub.post.history(call.parts["name"], call.query.limit, call.query.before))


async def _publish(call: Call) -> PostNumber:
    name = call.parts["name"]
    return PostNumber(name, await call.hub.post.publish(name, call.agent, call.body.body))


async def _add_task(call: Call) -> Task:
    return await call.hub.scheduler.add(call.agent, bytes(call.body.payload))


async def _tasks(call: Call) -> Tasks:
    query: TaskPage = call.query
    found = await call.hub.scheduler.tasks(of=call.agent, state=query.state, limit=query.limit, before=query.before)
    return Tasks(found)


async def _task(call: Call) -> Task:
    task = await call.hub.scheduler.find(call.parts["id"])
    if task is None or call.agent not in (task.creator, task.agent):
        raise Refused(404, "unknown_task", "there is no such task, or it is none of yours")
    return task


async def _signals(call: Call) -> Signals:
    query: Page = call.query
    return Signals(await call.hub.logbook.signals(call.agent, call.parts["session"], query.limit, query.before))


ROUTES: Final = (
    Route("GET", "/health", "get_health", Who.PROBE, _health, Health, "how the hub is"),
    Route("GET", "/api/health", "get_health", Who.PROBE, _health, Health, "how the hub is"),
    Route("GET", "/live", "get_health", Who.PROBE, _live, dict[str, str], "whether the process is alive"),
    Route("GET", "/ready", "get_health", Who.PROBE, _ready, dict[str, str], "whether it takes work"),
    Route("GET", "/openapi.json", "get_schemas", Who.ANYONE, _openapi, dict[str, Any], "this document"),
    Route("GET", "/api/schemas", "get_schemas", Who.ANYONE, _schemas, dict[str, Any], "JSON Schemas of all frames"),
    Route("GET", "/api/agents", "get_agents", Who.ANYONE, _agents, ConnectedAgents, "who is connected"),
    Route("GET", "/api/channels", "get_channels", Who.ANYONE, _channels, AllChannels, "all channels"),
    Route("GET", "/api/metrics", "get_metrics", Who.ANYONE, _metrics, Metrics, "what the hub has counted"),
    Route(
        "GET",
        "/api/dashboard/state",
        "get_dashboard_state",
        Who.VIEWER,
        _dashboard,
        DashboardState,
        "what a dashboard shows",
        query=DashboardQuery,
    ),
    Route(
        "POST",
        "/api/onboard/register",
        "post_onboard_register",
        Who.ANYONE,
        _register,
        Registered,
        "register an agent and get its token",
        body=Register,
        status=201,
    ),
    Route(
        "POST", "/api/onboard/rotate", "post_onboard_rotate", Who.AGENT, _rotate, Registered, "a new token for the old"
    ),
    Route(
        "POST", "/api/onboard/revoke", "post_onboard_revoke", Who.AGENT, _revoke, Revoked, "give up the token for good"
    ),
    Route(
        "POST", "/api/messages", "post_message", Who.AGENT, _send_message, Sent, "send a message to another agent",
        body=NewMessage,
    ),
    Route(
        "GET", "/api/mailbox", "get_mailbox", Who.AGENT, _mailbox, Mailbox, "messages that wait, oldest first",
        query=MailPage,
    ),
    Route(
        "POST", "/api/mailbox/ack", "post_mailbox_ack", Who.AGENT, _acknowledge, Acknowledged,
        "drop messages from the mailbox", body=Acknowledge,
    ),
    Route(
        "POST", "/api/channels", "post_channel", Who.AGENT, _create_channel, ChannelInfo, "make a channel",
        body=NewChannel, status=201,
    ),
    Route("GET", "/api/channels/{name}", "get_channel_info", Who.AGENT, _channel, ChannelInfo, "one channel"),
    Route(
        "GET", "/api/channels/{name}/messages", "get_messages", Who.AGENT, _history, Messages,
        "the newest messages of a channel, oldest first", query=Page,
    ),
    Route(
        "POST", "/api/channels/{name}/publish", "post_channel_publish", Who.AGENT, _publish, PostNumber,
        "a message to all who have subscribed", body=NewPost, status=201,
    ),
    Route(
        "POST", "/api/tasks", "post_task", Who.AGENT, _add_task, Task, "a task for whichever agent is idle",
        body=NewTask, status=201,
    ),
    Route(
        "GET", "/api/tasks", "get_tasks", Who.AGENT, _tasks, Tasks, "tasks that the agent made or holds, newest first",
        query=TaskPage,
    ),
    Route("GET", "/api/tasks/{id}", "get_task_detail", Who.AGENT, _task, Task, "one task"),
    Route(
        "GET", "/api/sessions/{session}/signals", "get_signals", Who.AGENT, _signals, Signals,
        "the log of a session, oldest first", query=Page,
    ),
)  # fmt: skip
