"""Admin routes: tasks, the store, signals of the application, and the log level."""

from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import structlog
from msgspec import Meta, Struct

from headgate.errors import refuse
from headgate.gate import Gate
from headgate.gate.policy import check_agent
from headgate.hub import logs
from headgate.hub.agents.counter_shares import CounterShares
from headgate.hub.agents.operators import Operators
from headgate.hub.agents.registry import Registry
from headgate.hub.agents.store_guard import StoreGuard
from headgate.hub.api.agent_routes import NewTask, TaskList, TaskPage
from headgate.hub.api.routing import Access, Body, Call, Route, admin_route
from headgate.hub.errors import RequestError
from headgate.hub.messages.messages import MessageBroker
from headgate.hub.messages.sessions import OUTSIDE, SessionLog
from headgate.hub.monitoring.health import Health, StoreState
from headgate.hub.settings import LOG_LEVELS, HubSettings
from headgate.hub.sockets.agent_socket import AgentSockets
from headgate.hub.sockets.frames import AgentId, SessionId, Signal
from headgate.hub.sockets.relay import Relay
from headgate.hub.tasks.scheduler import Scheduler
from headgate.hub.tasks.task import Task

_LEAVE_WITHIN: Final = 5.0  # seconds until all agents have left whose connections were closed

_log = structlog.get_logger("headgate.hub")


class StoreStatus(Struct):
    store: StoreState
    problems: list[str]
    """Problems of the store or the disk, as sentences."""


class StoreDetail(StoreStatus, kw_only=True):
    address: str
    """Of its server, without user and password; "" for the hub's memory."""


class AcceptedStore(StoreStatus, kw_only=True):
    accepted: bool
    """False: the store has its data, so there was nothing to accept."""


class AcceptStore(Body):
    agent_data: Literal["keep", "drop"]
    """The fate of mail, sessions, signals, tasks and chat channels on this hub.

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


class NewLogLevel(Body):
    level: Annotated[str, Meta(max_length=20, extra_json_schema={"enum": list(LOG_LEVELS)})]


class LogLevel(Struct):
    level: str


async def _push_task(call: Call, scheduler: Scheduler) -> Task:
    task = await scheduler.add("", bytes(call.body.payload))
    _log.info("task added", task=task.task_id, by=call.by)
    return task


async def _tasks(call: Call, scheduler: Scheduler) -> TaskList:
    query: TaskPage = call.query
    return TaskList(await scheduler.tasks(state=query.state, limit=query.limit, before=query.before))


async def _store(_call: Call, health: Health, settings: HubSettings) -> StoreDetail:
    return StoreDetail(health.store, health.problems, address=_address(settings.store))


def _address(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""


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
    operators: Operators,
) -> AcceptedStore:
    operators.expect_built_in_admin()  # no agent can call once its token is gone

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


async def _set_log_level(call: Call) -> LogLevel:
    level = call.body.level
    if level not in LOG_LEVELS:
        refuse("level", f"one of {', '.join(LOG_LEVELS)}", level)
    logs.set_level(level, call.by)
    return LogLevel(level)


ROUTES: Final = (
    Route(
        "POST", "/api/admin/tasks", "post_admin_push_task", Access.ADMIN, _push_task,
        "add a task for any idle agent", body=NewTask, status=201,
    ),
    admin_route("GET", "/api/admin/tasks", _tasks, "all tasks", query=TaskPage),
    admin_route("GET", "/api/admin/store", _store, "whether the store has its data"),
    admin_route(
        "POST", "/api/admin/store/accept", _accept_store,
        "accept a lost store as it is: all agents have to register again", body=AcceptStore,
    ),
    admin_route(
        "POST", "/api/admin/signals", _write_signal,
        "write a signal of the application, which is not limited", body=NewSignal, status=201,
    ),
    admin_route(
        "PUT", "/api/admin/log-level", _set_log_level,
        "log from another level on, until the hub stops", body=NewLogLevel,
    ),
)  # fmt: skip
