"""The hub: everything that it is made of, put together, as one ASGI application."""

import asyncio
import fcntl
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter_ns
from typing import IO, TYPE_CHECKING, Any, Final, Self

import structlog

from headgate._version import VERSION
from headgate.errors import HeadgateError
from headgate.events import Alerted, Event, PolicyChanged, ViolationsReset
from headgate.gate import Gate
from headgate.gate.policy import Policy
from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import LedgerRoll, Registry
from headgate.hub.agents.tokens import Tokens
from headgate.hub.api import admin_routes, agent_routes, decision_routes, openapi
from headgate.hub.api.http import Answer, Api, Denied, failed
from headgate.hub.api.routing import Router
from headgate.hub.dashboard import pages
from headgate.hub.dashboard.feed import ROOM, Board
from headgate.hub.errors import Refused
from headgate.hub.messages.messages import PostOffice
from headgate.hub.messages.sessions import Logbook
from headgate.hub.monitoring import metrics
from headgate.hub.monitoring.alerts import Alerts
from headgate.hub.monitoring.stats import Tally
from headgate.hub.monitoring.webhooks import Webhooks
from headgate.hub.settings import HubSettings
from headgate.hub.sockets.agent_socket import Conversation
from headgate.hub.sockets.flood import Flood
from headgate.hub.sockets.frames import GoingAway, TaskAssigned, encode
from headgate.hub.sockets.relay import Relay, relay_limiter
from headgate.hub.sockets.socket import Receive, Send, Socket
from headgate.hub.storage.database import Ledger
from headgate.hub.tasks.scheduler import Scheduler
from headgate.hub.tasks.task import Task
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.sliding import RateLimiter
from headgate.stores.base import HubStore, ServerStore, SharedStore, Store
from headgate.stores.urls import aclose_store, open_store

if TYPE_CHECKING:
    from headgate.hub.monitoring.telemetry import Telemetry

ROUTES: Final = (*agent_routes.ROUTES, *admin_routes.ROUTES, *decision_routes.ROUTES, *pages.ROUTES, *metrics.ROUTES)
RESTARTING: Final = 1012  # the close code of a server that comes back
_LOOK_EVERY: Final = 1.0  # seconds
_FAREWELL: Final = 2.0  # seconds for the frame that is being handled, and to say goodbye to whoever doesn't read

_log = structlog.get_logger("headgate.hub")


class Hub:
    """Agents, their messages, tasks and sessions, and the gate before all of it.

    `async with Hub(settings, policy) as hub` starts it and ends it; in between it is an ASGI application. `store` is
    for tests and applications that bring their own; otherwise the settings name one.
    """

    ledger: Ledger
    store: Store
    gate: Gate
    clock: Clock
    tally: Tally
    webhooks: Webhooks
    alerts: Alerts
    presence: Presence
    tokens: Tokens
    registry: Registry
    post: PostOffice
    logbook: Logbook
    scheduler: Scheduler
    relay: Relay
    windows: RateLimiter

    def __init__(
        self,
        settings: HubSettings | None = None,
        policy: Policy | None = None,
        *,
        store: Store | None = None,
        config: Path | None = None,
        gate: type[Gate] = Gate,
    ) -> None:
        self.settings: Final = HubSettings() if settings is None else settings
        self.config: Final = config
        """The file that the policy was read from."""
        self._policy = Policy() if policy is None else policy
        self._store, self._gate = store, gate
        self._things: Final = AsyncExitStack()
        self._tasks: Final[set[asyncio.Task[Any]]] = set()
        self.stopping = False
        self.flood: Final = Flood()
        self.board: Final = Board(self)
        self.revocations = 0
        """How many tokens were rotated or revoked: whoever verifies one sees whether it may have been that."""
        self.router: Final = Router(ROUTES)
        self.openapi: Final = openapi.document(self.router, VERSION)
        self._api: Final = Api(self, self.router)

    # Beginning and end -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            self._open()
            # The token last: it is made once, and lost if anything fails before it is shown.
            parts = (self.registry, self.post, self.logbook, self.scheduler, self.webhooks, self.alerts, self.tokens)
            for part in parts:
                await part.start()
            self._things.push_async_callback(self.registry.close)
            self._things.push_async_callback(self.scheduler.close)
            self.registry.follow(self._drop)
            if self.settings.otel_endpoint:
                self._things.push_async_callback(self._telemetry().close)
            if isinstance(self.store, ServerStore):
                self.spawn(self._look_at_store())
        except BaseException:
            await self._things.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._things.aclose()

    def _open(self) -> None:
        """Put everything together; what has to be closed in the end is, in the opposite order."""
        settings, policy, things = self.settings, self._policy, self._things
        if settings.data is not None:
            things.callback(_locked(settings.data).close)
        self.ledger = Ledger(None if settings.data is None else settings.data / "hub.db")
        things.callback(self.ledger.close)
        store = self._store
        if store is None:
            how: dict[str, Any] = {
                "timeout": policy.store_timeout,
                "on_failure": policy.on_failure,
                "nodes": policy.nodes,
            }
            opened = open_store("store", settings.store or None, **how)
            things.push_async_callback(aclose_store, opened)
            store = opened
        shared = isinstance(store, SharedStore)
        remember = None if shared or settings.data is None else settings.data / "changes.db"
        self.gate = self._gate(policy, store=store, remember=remember)
        things.push_async_callback(self.gate.aclose)
        self.clock = store.clock
        self.tally = Tally(self.gate, self.clock)
        things.callback(self.tally.stop)
        things.callback(self.gate.subscribe(self._hear, PolicyChanged, ViolationsReset, Alerted))
        self.webhooks = Webhooks(settings.webhooks, settings.webhook_secret, self.clock, settings.shutdown_within)
        things.push_async_callback(self.webhooks.close)
        alerts = store.alerts() if isinstance(store, HubStore) else None
        self.alerts = Alerts(self.gate, self.clock, self.webhooks.send, alerts, lambda: self.degraded)
        things.push_async_callback(self.alerts.close)
        self.store = store
        self.presence = Presence(settings.max_connections, settings.max_connections_per_address)
        self.tokens = Tokens(self.ledger, settings)
        roll = store.agents() if isinstance(store, HubStore) else LedgerRoll(self.ledger)
        self.registry = Registry(roll, mode=settings.registration, reserved=self.router.reserved("agent"))
        self.post = PostOffice(self.ledger, self.presence, self.registry, settings)
        self.logbook = Logbook(self.ledger, self.gate, settings)
        self.scheduler = Scheduler(
            self.ledger,
            self.gate,
            self.clock,
            self._assign,
            accept_within=settings.accept_within,
            most_queued=settings.max_tasks,
            most_finished=settings.max_tasks,
        )
        self.relay = Relay(
            relay_limiter(settings.relay_rate_limit, settings.relay_rate_burst, store),
            self.registry.verify,
            self.clock,
            failed=self.gate.acheck_address,
            flood=self.flood,
            largest=settings.max_frame,
            identify_within=settings.identify_within,
        )
        self.windows = RateLimiter(store)

    def _telemetry(self) -> "Telemetry":
        try:
            from headgate.hub.monitoring.telemetry import Telemetry
        except ImportError as error:
            raise HeadgateError(
                f"otel_endpoint: expected OpenTelemetry's packages, got: {error}; pip install 'headgate[otel]'"
            ) from error
        return Telemetry(self, self.settings.otel_endpoint)

    async def drain(self) -> None:
        """Take no more work, finish what is under way, and tell everybody when to come back."""
        self.stopping = True
        self.webhooks.hurry()
        sockets = [socket for agent in self.presence.agents() for socket in self.presence.of(agent)]
        sockets += self.board.sockets
        async with asyncio.TaskGroup() as farewells:
            farewells.create_task(self.relay.drain(_later))
            for socket in sockets:
                farewells.create_task(_farewell(socket))

    # ASGI ------------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        address = _address(scope)
        if scope["type"] == "http":
            await (await self._api.answer(scope, receive, address)).send(send)
        elif scope["type"] == "websocket":
            await self._socket(scope, receive, send, address)
        else:
            raise NotImplementedError(f"expected http or websocket, got {scope['type']}")

    async def _socket(self, scope: Mapping[str, Any], receive: Receive, send: Send, address: str) -> None:
        if scope["path"] == "/ws/dashboard" and not self.stopping:  # which is never limited
            await self.board.serve(Socket(receive, send, address, ROOM), at_home=_at_home(scope))
            return
        socket = Socket(receive, send, address, self.settings.max_waiting)
        try:
            serve = self._entrance(scope["path"])
            self.presence.enter(socket)
        except HeadgateError as refused:  # an address that is none comes from a proxy
            await _refuse(socket, failed(refused))
            return
        try:
            decision = await self.gate.acheck_address(socket.address)
            if not decision:
                await _refuse(socket, failed(Denied(decision, self.gate.tier_of("ws", "identify"))))
            elif await socket.accept():
                await serve(socket)
        finally:
            self.presence.leave(socket)

    def _entrance(self, path: str) -> Callable[[Socket], Awaitable[None]]:
        if self.stopping:
            raise Refused(503, "stopping", "the hub is stopping")
        if path == "/ws":
            return lambda socket: Conversation(self, socket).hold()
        if path == "/relay":
            return self.relay.serve
        raise Refused(404, "unknown_route", "there is no such socket; agents connect to /ws, or to /relay")

    async def check(
        self, agent: str, channel: str, tier: str | None = None, *, action: str | None = None, cost: int = 1
    ) -> Decision:
        """Ask the gate for an agent, and count what came of it."""
        began = perf_counter_ns()
        decision = await self.gate.acheck(agent, channel, tier, action=action, cost=cost)
        took = perf_counter_ns() - began
        known = self.gate.tier_of(channel, action) if action is not None else tier or ""
        self.tally.checked(agent, channel, known, decision.outcome, took)
        return decision

    # What happens ----------------------------------------------------------------------------------------------------

    @property
    def degraded(self) -> bool:
        """Whether the store that counts is away."""
        return isinstance(self.store, ServerStore) and self.store.degraded

    async def _look_at_store(self) -> None:
        """See whether the store is there, also while nobody asks it for anything, so that health tells."""
        while True:
            await self.gate.astanding(".")  # which no agent is called
            await asyncio.sleep(_LOOK_EVERY)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _assign(self, agent: str, task: Task) -> bool:
        frame = TaskAssigned(task_id=task.task_id, attempt=task.attempt, payload=task.payload)
        return self.presence.push(agent, encode(frame))

    def _drop(self, agent: str) -> None:
        """An agent's token was rotated or revoked: whoever is connected by it has to identify anew."""
        self.revocations += 1
        for socket in self.presence.of(agent):
            self.spawn(socket.close(1008, "the token of this agent was revoked or replaced"))
        self.relay.drop(agent)

    def _look_again(self) -> None:
        self.scheduler.look_again()
        self.board.look_again()
        self.alerts.look_again()

    def _hear(self, event: Event) -> None:
        if isinstance(event, PolicyChanged):
            _log.info("limits changed", what=event.what, by=event.by)
            self._loop.call_soon_threadsafe(self._look_again)  # changes are made in threads
        elif isinstance(event, ViolationsReset):
            self.tally.forget(event.agent)
            self._loop.call_soon_threadsafe(self._look_again)
        elif isinstance(event, Alerted):
            self.alerts.hear(event)


def _address(scope: Mapping[str, Any]) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "::1"  # over a socket of the machine's own


def _at_home(scope: Mapping[str, Any]) -> bool:
    """Whether a socket was opened by a page of the hub's own, or by no page."""
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    return origin is None or origin.partition(b"://")[2] == headers.get(b"host")


async def _refuse(socket: Socket, answer: Answer) -> None:
    await socket.refuse(answer.status, answer.all_headers(), answer.body)


async def _farewell(socket: Socket) -> None:
    wait = _later()
    try:
        async with asyncio.timeout(_FAREWELL), socket.turn:
            await socket.send(encode(GoingAway(retry_after_ms=wait)))
    except TimeoutError:
        pass  # it doesn't read
    await socket.close(RESTARTING, f"restarting; retry in {wait} ms")


def _later() -> int:
    """Milliseconds until a client comes back: not all at the same time."""
    return random.randint(1000, 5000)  # noqa: S311 - no secret


def _locked(data: Path) -> IO[str]:
    """The data directory, made if there is none, and locked: it belongs to one hub at a time."""
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (data / "lock").open("w")
    except OSError as error:
        raise HeadgateError(f"{data}: expected a directory that can be written, got: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise HeadgateError(f"{data}: another hub uses this directory; give this one another by --data") from None
    return lock
