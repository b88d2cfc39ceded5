"""Routes for agents: registration, messages, chat channels, tasks and sessions."""

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from headgate.hub.agents.operators import Operators
from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import Grant, Registry
from headgate.hub.api.routing import Access, Body, Call, Route
from headgate.hub.errors import RequestError
from headgate.hub.messages.messages import Mail, MessageBroker
from headgate.hub.messages.sessions import OUTSIDE, LoggedSignal, SessionLog
from headgate.hub.sockets.frames import (
    MAX_NAMES,
    AfterName,
    AgentId,
    ChannelInfo,
    ChannelName,
    Count,
    NamePageSize,
    Note,
    Number,
    Post,
    Token,
)
from headgate.hub.tasks.scheduler import Scheduler
from headgate.hub.tasks.task import Task, TaskSummary

# Bodies and answers ---------------------------------------------------------------------------------------------------


AccountPath: TypeAlias = Annotated[str, Meta(max_length=2000, description="such as acme/search")]
PlanName: TypeAlias = Annotated[str, Meta(max_length=64)]


class Register(Body):
    agent_id: AgentId
    invitation: Token | None = None
    account: AccountPath | None = None
    """For admins: the account that it belongs to, "" for none; null: that of the policy."""
    plan: PlanName | None = None
    """For admins."""


class Registered(Struct):
    agent_id: str
    token: str
    """Shown once: the hub stores only its digest."""


class Revoked(Struct):
    agent_id: str
    revoked: bool


class AgentPage(Body):
    """A page of agents by name: at most `limit`, the first or those after a name."""

    limit: NamePageSize = MAX_NAMES
    after: AfterName = ""


class ConnectedAgents(Struct):
    agents: list[str]
    more: bool
    """Whether there are more, after the last."""


class ChannelPage(Body):
    """A page of chat channels by name: at most `limit`, the first or those after a name."""

    limit: Count = 100
    after: AfterName = ""


class ChannelList(Struct):
    channels: list[ChannelInfo]
    more: bool
    """Whether there are more, after the last."""


class DeletedChannel(Struct):
    name: str


class NewChannel(Body):
    name: ChannelName
    about: Note = ""


class Page(Body):
    """A page of a list: at most `limit`, those before a number or the newest."""

    limit: Count = 50
    before: Number | None = None


class MailPage(Body):
    """A page of a mailbox: at most `limit`, those after a number or the oldest."""

    limit: Count = 50
    after: Annotated[int, Meta(ge=0, le=2**53)] = 0


class Messages(Struct):
    messages: list[Post]


class NewMessage(Body):
    to: AgentId
    body: Raw


class SentMessage(Struct):
    to: str
    delivered: bool
    """False: it is in the mailbox."""


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
    """A page of tasks, newest first: at most `limit`, in a state, created before another task."""

    state: Literal["queued", "assigned", "accepted", "completed", "failed"] | None = None
    limit: Count = 50
    before: Annotated[str, Meta(max_length=64)] | None = None


class TaskList(Struct):
    tasks: list[TaskSummary]


class Signals(Struct):
    signals: list[LoggedSignal]


# Handlers -------------------------------------------------------------------------------------------------------------


async def _agents(call: Call, presence: Presence) -> ConnectedAgents:
    return ConnectedAgents(*presence.page(call.query.limit, call.query.after))


async def _chat_channels(call: Call, messages: MessageBroker) -> ChannelList:
    return ChannelList(*messages.chat_channels(call.query.limit, call.query.after))


async def _delete_chat_channel(call: Call, messages: MessageBroker) -> DeletedChannel:
    await messages.delete_chat_channel(call.parts["name"], call.agent, by_admin=call.admin, by=call.by)
    return DeletedChannel(call.parts["name"])


async def _register(call: Call, registry: Registry, operators: Operators) -> Registered:
    body: Register = call.body
    if call.admin:
        grant = Grant(body.account, body.plan, call.by)
        return Registered(body.agent_id, await operators.register(body.agent_id, call.caller, call.by, grant))
    if body.account is not None or body.plan is not None:
        detail = "only an admin names the account or the plan of an agent; ask for an invitation that has them"
        raise RequestError(403, "forbidden", detail)
    return Registered(body.agent_id, await registry.register(body.agent_id, body.invitation))


async def _rotate(call: Call, registry: Registry) -> Registered:
    return Registered(call.agent, await registry.rotate(call.agent, call.caller.token))


async def _revoke(call: Call, operators: Operators) -> Revoked:
    return Revoked(call.agent, await operators.revoke_own(call.caller, call.by))


async def _send_message(call: Call, messages: MessageBroker) -> SentMessage:
    return SentMessage(call.body.to, await messages.send(call.agent, call.body.to, call.body.body))


async def _mailbox(call: Call, messages: MessageBroker) -> Mailbox:
    return Mailbox(await messages.mail(call.agent, call.query.limit, call.query.after))


async def _acknowledge(call: Call, messages: MessageBroker) -> Acknowledged:
    return Acknowledged(await messages.acknowledge(call.agent, call.body.numbers))


async def _create_chat_channel(call: Call, messages: MessageBroker) -> ChannelInfo:
    return await messages.create_chat_channel(call.body.name, call.agent, call.body.about)


async def _chat_channel(call: Call, messages: MessageBroker) -> ChannelInfo:
    return messages.chat_channel(call.parts["name"])


async def _history(call: Call, messages: MessageBroker) -> Messages:
    return Messages(await messages.history(call.parts["name"], call.query.limit, call.query.before))


async def _publish(call: Call, messages: MessageBroker) -> PostNumber:
    name = call.parts["name"]
    return PostNumber(name, await messages.publish(name, call.agent, call.body.body))


async def _add_task(call: Call, scheduler: Scheduler) -> Task:
    return await scheduler.add(call.agent, bytes(call.body.payload))


async def _tasks(call: Call, scheduler: Scheduler) -> TaskList:
    query: TaskPage = call.query
    found = await scheduler.tasks(of=call.agent, state=query.state, limit=query.limit, before=query.before)
    return TaskList(found)


async def _task(call: Call, scheduler: Scheduler) -> Task:
    task = await scheduler.find(call.parts["id"])
    if task is None or call.agent not in (task.creator, task.agent):
        raise RequestError(404, "unknown_task", "there is no such task, or it isn't yours")
    return task


async def _signals(call: Call, sessions: SessionLog) -> Signals:
    query: Page = call.query
    session = call.parts.get("session", OUTSIDE)
    return Signals(await sessions.signals(call.agent, session, query.limit, query.before))


ROUTES: Final = (
    Route("GET", "/api/agents", "get_agents", Access.ANYONE, _agents, "the connected agents, by name", query=AgentPage),
    Route(
        "GET", "/api/channels", "get_channels", Access.ANYONE, _chat_channels,
        "the chat channels, by name", query=ChannelPage,
    ),
    Route(
        "POST", "/api/onboard/register", "post_onboard_register", Access.ANYONE, _register,
        "register an agent and get its token", body=Register, status=201,
    ),
    Route("POST", "/api/onboard/rotate", "post_onboard_rotate", Access.AGENT, _rotate, "replace the token"),
    Route("POST", "/api/onboard/revoke", "post_onboard_revoke", Access.AGENT, _revoke, "give up the token for good"),
    Route(
        "POST", "/api/messages", "post_message", Access.AGENT, _send_message,
        "send a message to another agent", body=NewMessage,
    ),
    Route(
        "GET", "/api/mailbox", "get_mailbox", Access.AGENT, _mailbox,
        "the messages in the mailbox, oldest first", query=MailPage,
    ),
    Route(
        "POST", "/api/mailbox/ack", "post_mailbox_ack", Access.AGENT, _acknowledge,
        "delete messages from the mailbox", body=Acknowledge,
    ),
    Route(
        "POST", "/api/channels", "post_channel", Access.AGENT, _create_chat_channel,
        "create a chat channel", body=NewChannel, status=201,
    ),
    Route("GET", "/api/channels/{name}", "get_channel_info", Access.AGENT, _chat_channel, "one chat channel"),
    Route(
        "DELETE", "/api/channels/{name}", "delete_channel", Access.PROGRAM, _delete_chat_channel,
        "delete a chat channel with its messages: its creator or the admin",
    ),
    Route(
        "GET", "/api/channels/{name}/messages", "get_messages", Access.AGENT, _history,
        "the newest messages of a chat channel, oldest first", query=Page,
    ),
    Route(
        "POST", "/api/channels/{name}/publish", "post_channel_publish", Access.AGENT, _publish,
        "publish a message to all subscribers", body=NewPost, status=201,
    ),
    Route(
        "POST", "/api/tasks", "post_task", Access.AGENT, _add_task,
        "queue a task for an idle agent", body=NewTask, status=201,
    ),
    Route(
        "GET", "/api/tasks", "get_tasks", Access.AGENT, _tasks,
        "the tasks that the agent created or holds, newest first", query=TaskPage,
    ),
    Route("GET", "/api/tasks/{id}", "get_task_detail", Access.AGENT, _task, "one task"),
    Route(
        "GET", "/api/signals", "get_signals", Access.AGENT, _signals,
        "the signals about the agent that belong to no session, oldest first", query=Page,
    ),
    Route(
        "GET", "/api/sessions/{session}/signals", "get_signals", Access.AGENT, _signals,
        "the log of a session, oldest first", query=Page,
    ),
)  # fmt: skip
