"""The hub: all its parts, put together as one ASGI application.

Every part is given the few others that it needs; only this module knows them all. The import contract of `headgate.hub`
in pyproject.toml keeps it that way.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Self

import structlog

from headgate.errors import HeadgateError
from headgate.events import AccountAlerted, Alerted, Event, PolicyChanged, Violated, ViolationsReset
from headgate.gate import Gate
from headgate.gate.lookup import parse_address
from headgate.gate.policy import Policy
from headgate.hub.agents.authentication import Authentication
from headgate.hub.agents.counter_shares import CounterShares
from headgate.hub.agents.operators import Operators
from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import DatabaseAgents, Registry
from headgate.hub.agents.store_guard import StoreGuard
from headgate.hub.agents.tokens import Tokens
from headgate.hub.api.allowed_hosts import AllowedHosts
from headgate.hub.api.decision_routes import counters
from headgate.hub.api.http import Api
from headgate.hub.api.responses import ApiResponse, RequestDenied, error_response
from headgate.hub.api.routes import ROUTES
from headgate.hub.api.routing import Router, bind
from headgate.hub.background import BackgroundTasks
from headgate.hub.config_file import ConfigFile
from headgate.hub.dashboard.accounts import AccountReader
from headgate.hub.dashboard.cards import Cards
from headgate.hub.dashboard.feed import MAX_QUEUED, MAX_QUEUED_BYTES, DashboardFeed
from headgate.hub.dashboard.updates import SentState
from headgate.hub.errors import RequestError, stopping_error
from headgate.hub.messages.messages import MessageBroker
from headgate.hub.messages.sessions import SessionLog
from headgate.hub.monitoring.account_alerts import AccountAlerts
from headgate.hub.monitoring.address_log import AddressLog
from headgate.hub.monitoring.alerts import Alerts
from headgate.hub.monitoring.health import Health
from headgate.hub.monitoring.metrics import MetricSources
from headgate.hub.monitoring.stats import Stats
from headgate.hub.monitoring.webhooks import Webhooks
from headgate.hub.settings import HubSettings
from headgate.hub.sockets.agent_socket import AgentSockets
from headgate.hub.sockets.flood import FloodCounter
from headgate.hub.sockets.frames import GoingAway, TaskAssigned, encode
from headgate.hub.sockets.relay import Relay, relay_limiter
from headgate.hub.sockets.socket import Receive, Send, Socket
from headgate.hub.storage.database import Database
from headgate.hub.storage.files import lock_directory, make_private, private_file
from headgate.hub.tasks.scheduler import Scheduler
from headgate.hub.tasks.task import Task
from headgate.limits.clock import MonotonicClock
from headgate.stores.base import HubStore, ServerStore, SharedStore, Store
from headgate.stores.memory import MemoryStore, in_process
from headgate.stores.memory_file import MemoryFile
from headgate.stores.sqlite import SqliteChangeLog
from headgate.stores.urls import aclose_store, is_memory, open_store

if TYPE_CHECKING:
    from headgate.hub.monitoring.telemetry import Telemetry

_PROBE_INTERVAL: Final = 1.0  # seconds between two probes of the store and the disk
_GOODBYE_TIMEOUT: Final = 2.0  # seconds to finish the present frame, and to send the last one to a slow reader

_log = structlog.get_logger("headgate.hub")


class Hub:
    """Agents, their messages, tasks and sessions, and the gate in front of all of it.

    `async with Hub(settings, policy) as hub` starts and stops it; in between it is an ASGI application. `store` is for
    tests and for applications with a store of their own; by default the settings name one.
    """

    def __init__(
        self,
        settings: HubSettings | None = None,
        policy: Policy | None = None,
        *,
        store: Store | None = None,
        config: ConfigFile | None = None,
        gate: type[Gate] = Gate,
    ) -> None:
        self.settings: Final = HubSettings() if settings is None else settings
        self._policy = Policy() if policy is None else policy
        self._store, self._gate_type = store, gate
        self._config: Final = ConfigFile(None) if config is None else config
        self.router: Final = Router(ROUTES)
        self.flood_counter: Final = FloodCounter()
        # What the store or the gate remembers on the disk of this hub, if no server does.
        self._files: Final[list[SqliteChangeLog | MemoryFile]] = []
        self._background: Final = BackgroundTasks()
        self._proxy_logged = False
        self._probe_failure = ""  # why the last probe failed
        self._exit_stack: Final = AsyncExitStack()

    # Start and end ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            await self._open()
            # The tokens late: the admin's is made once, and would be lost if a later step failed before it is shown.
            parts = (self.registry, self.messages, self.sessions, self.scheduler, self.webhooks, self.alerts)
            for part in (*parts, self.account_alerts, self.tokens, self.operators):
                await part.start()
            self._exit_stack.push_async_callback(self.registry.close)
            self._exit_stack.push_async_callback(self.scheduler.close)
            self._exit_stack.push_async_callback(self.messages.close)
            self.registry.on_revocation(self.agent_sockets.drop)
            self.registry.on_revocation(self.relay.drop)
            self.registry.on_revocation(self.dashboard.drop)
            self.operators.on_revocation(self.dashboard.recheck)
            if self.settings.otel_endpoint:
                self._exit_stack.push_async_callback(self._telemetry().close)
            self._background.spawn(self._probe())
        except BaseException:
            await self._exit_stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.health.stopping = True
        await self._background.cancel()
        await self.dashboard.close()
        await self._exit_stack.aclose()

    async def _open(self) -> None:
        """Put the parts together. They are closed in the opposite order."""
        settings, stack = self.settings, self._exit_stack
        if settings.data is not None:
            stack.callback(lock_directory(settings.data).close)
        file = None if settings.data is None else private_file(settings.data / "hub.db")
        self.database = Database(file)
        stack.callback(self.database.close)
        if file is not None:
            make_private(file)
        self._open_store()
        await self.store_guard.start()  # before the gate reads the changes
        stack.push_async_callback(self.store_guard.close)
        self._open_gate()
        self._open_registry()
        self.stats = Stats(self.gate, self.clock)
        stack.callback(self.stats.stop)
        self.address_log = AddressLog(self.gate, self.clock)
        stack.callback(self.address_log.stop)
        kinds = (PolicyChanged, ViolationsReset, Violated, Alerted, AccountAlerted)
        stack.callback(self.gate.subscribe(self._on_event, *kinds))
        self.webhooks = Webhooks(settings.webhooks, settings.webhook_secret, self.clock, settings.shutdown_within)
        stack.push_async_callback(self.webhooks.close)
        shared_alerts = self.store.alerts() if isinstance(self.store, HubStore) else None
        self.alerts = Alerts(
            self.gate,
            self.clock,
            self.stats.denials,
            self.webhooks.send,
            shared_alerts,
            lambda: self.health.degraded,
        )
        stack.push_async_callback(self.alerts.close)
        self.account_alerts = AccountAlerts(
            self.gate,
            self.clock,
            self.webhooks.send,
            self.registry.agents,
            shared_alerts,
            lambda: self.health.degraded,
        )
        stack.push_async_callback(self.account_alerts.close)
        self._open_parts()

    def _open_store(self) -> None:
        settings, policy, store = self.settings, self._policy, self._store
        if store is None:
            if not settings.store or is_memory(settings.store):
                store = self._memory_store()
            else:
                store = open_store("store", settings.store, **policy.store_options)
            self._exit_stack.push_async_callback(aclose_store, store)
        memory = in_process(store)
        if memory is not None and memory.file is not None:
            self._files.append(memory.file)
        self.store, self.clock, self.store_guard = store, store.clock, StoreGuard(self.database, store)

    def _memory_store(self) -> MemoryStore:
        """The store of a hub without a server: budgets and holds survive a restart, if it has a data directory."""
        if self.settings.data is None:
            return MemoryStore()
        file = private_file(self.settings.data / "limits.db")
        # The directory is locked; so the file needn't be, and can be backed up.
        remembered = MemoryFile(file, round(MonotonicClock().wall() * 1_000_000), readable=True)
        make_private(file)
        return MemoryStore(remember=remembered)

    def _open_gate(self) -> None:
        settings, store = self.settings, self.store
        log: SqliteChangeLog | None = None
        if not isinstance(store, SharedStore) and settings.data is not None:
            file = private_file(settings.data / "changes.db")
            log = SqliteChangeLog(file)
            self._files.append(log)
            make_private(file)
        self.gate = self._gate_type(self._policy, store=store, remember=log)
        self._exit_stack.push_async_callback(self.gate.aclose)
        self.health = Health(store, self.store_guard, [self.database, *self._files])

    def _open_registry(self) -> None:
        settings, store = self.settings, self.store
        agents = store.agents() if isinstance(store, HubStore) else DatabaseAgents(self.database)
        reserved = self.router.reserved("agent")
        self.registry = Registry(
            agents, self.gate, mode=settings.registration, most=settings.max_agents, reserved=reserved
        )

    def _open_parts(self) -> None:
        settings, store, gate, clock, database = self.settings, self.store, self.gate, self.clock, self.database
        stats, alerts, health = self.stats, self.alerts, self.health
        presence = self.presence = Presence(
            settings.max_connections,
            settings.max_connections_per_address,
            settings.max_connections_per_agent,
            settings.max_waiting,
        )
        tokens = self.tokens = Tokens(database, settings)
        registry = self.registry
        operators = self.operators = Operators(tokens, registry, gate)
        authentication = Authentication(gate)
        allowed_hosts = self._allowed_hosts = AllowedHosts(settings.allowed_hosts)
        messages = self.messages = MessageBroker(database, presence, registry, clock, settings)
        sessions = self.sessions = SessionLog(database, gate, settings)
        scheduler = self.scheduler = Scheduler(
            database,
            gate,
            clock,
            self._send_assignment,
            accept_within=settings.accept_within,
            most_queued=settings.max_tasks,
            most_per_agent=settings.max_tasks_per_agent,
            most_finished=settings.max_tasks,
        )
        self.agent_sockets = AgentSockets(
            gate,
            stats,
            presence,
            registry,
            authentication,
            messages,
            sessions,
            scheduler,
            clock,
            self.flood_counter,
            settings,
        )
        relay = self.relay = Relay(
            relay_limiter(settings.relay_rate_limit, settings.relay_rate_burst, store),
            registry,
            clock,
            gate=gate,
            authentication=authentication,
            denials=stats.denials,
            flood_counter=self.flood_counter,
            largest=settings.max_frame,
            most_connections=settings.max_connections_per_agent,
            identify_within=settings.identify_within,
        )
        account_alerts = self.account_alerts
        cards = Cards(
            gate, stats, presence, alerts, account_alerts, health, self.address_log, scheduler, self._background
        )
        accounts = AccountReader(gate, clock)
        state = SentState(cards, gate, stats, presence, alerts, account_alerts, accounts)
        feed = self.dashboard = DashboardFeed(state, accounts, operators, authentication, clock, settings)
        sources = self.metric_sources = MetricSources(
            gate,
            store,
            health,
            stats,
            alerts,
            account_alerts,
            self.webhooks,
            presence,
            relay,
            feed,
            scheduler,
            messages,
            sessions,
        )
        windows, file = counters(store), self._config
        shares = CounterShares(clock, settings.max_counters, windows.settings.default_window_ms)
        parts: list[object] = [self.store_guard, self.agent_sockets, relay, windows, shares, file, self.router]
        parts += [gate, stats, health, presence, registry, operators, messages, sessions, scheduler]
        parts += [alerts, self.account_alerts, feed, cards, sources, self.address_log, settings]
        router = Router(bind(ROUTES, parts))
        self._api = Api(router, gate, stats, operators, registry, authentication, allowed_hosts, settings)

    def _telemetry(self) -> "Telemetry":
        try:
            from headgate.hub.monitoring.telemetry import Telemetry
        except ImportError as error:
            raise HeadgateError(
                f"otel_endpoint: expected OpenTelemetry's packages, got: {error}; in a checkout: pip install '.[otel]'"
            ) from error
        return Telemetry(self.metric_sources, self.settings.otel_endpoint)

    async def drain(self) -> None:
        """Take no more work, finish the work in progress, and tell every client when to reconnect."""
        self.health.stopping = True
        self.webhooks.hurry()
        sockets = [socket for agent in self.presence.agents() for socket in self.presence.sockets_of(agent)]
        sockets += self.dashboard.sockets
        async with asyncio.TaskGroup() as group:
            group.create_task(self.relay.drain(_reconnect_delay_ms))
            for socket in sockets:
                group.create_task(_say_goodbye(socket))

    # ASGI ------------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        address = _address(scope)
        if not self._proxy_logged:
            self._check_forwarded(scope, address)
        try:
            if scope["type"] == "http":
                await self._answer(scope, receive, send, address)
            elif scope["type"] == "websocket":
                await self._serve_socket(scope, receive, send, address)
            else:
                raise NotImplementedError(f"expected http or websocket, got {scope['type']}")
        except asyncio.CancelledError:  # of a hub that stops it is no error, and the server would log it as one
            if not self.health.stopping:
                raise

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send, address: str) -> None:
        try:
            response = await self._api.respond(scope, receive, address)
        except asyncio.CancelledError:
            if not self.health.stopping:
                raise
            response = error_response(stopping_error())
        await response.send(send)

    def _check_forwarded(self, scope: Mapping[str, Any], address: str) -> None:
        """Log once that the address in X-Forwarded-For isn't used: it is none, or no proxy is trusted."""
        if self.settings.trusted_proxies:
            try:
                parse_address(address)
            except HeadgateError:  # every such request is refused
                self._proxy_logged = True
                _log.warning("X-Forwarded-For of a trusted proxy is no IP address; said once", got=address[:100])
        elif any(name == b"x-forwarded-for" for name, _ in scope["headers"]):
            self._proxy_logged = True
            hint = "list the sender with --trusted-proxies if it is your proxy; said once"
            _log.warning(f"X-Forwarded-For is ignored; {hint}", sender=address)

    async def _serve_socket(self, scope: Mapping[str, Any], receive: Receive, send: Send, address: str) -> None:
        watches = scope["path"] == "/ws/dashboard"
        connection = scope.get("state", {}).get("connection")
        if watches:
            socket = Socket(receive, send, address, MAX_QUEUED, connection, MAX_QUEUED_BYTES)
        else:
            socket = Socket(receive, send, address, self.settings.max_waiting, connection)
        try:
            self._allowed_hosts.check_host(scope["headers"])
            self._allowed_hosts.check_origin(scope["headers"])
            serve = self._endpoint(scope["path"])
            if watches:
                self.dashboard.admit(socket)
            else:
                self.presence.admit(socket)
        except HeadgateError as error:  # also for an invalid address, which a proxy may forward
            await _refuse(socket, error_response(error))
            return
        if watches:  # never limited
            await serve(socket)
            return
        try:
            decision = await self.gate.acheck_address(socket.address, "connection")
            if not decision:
                tier = self.gate.tier_of("ws", "identify")
                await _refuse(socket, error_response(RequestDenied(decision, tier, by_address=True)))
            elif await socket.accept():
                await serve(socket)
        finally:
            self.presence.release(socket)

    def _endpoint(self, path: str) -> Callable[[Socket], Awaitable[None]]:
        if self.health.stopping:
            raise stopping_error()
        if path == "/ws":
            return self.agent_sockets.serve
        if path == "/relay":
            return self.relay.serve
        if path == "/ws/dashboard":
            return self.dashboard.serve
        raise RequestError(404, "unknown_route", "there is no such socket; agents connect to /ws, or to /relay")

    # Events ----------------------------------------------------------------------------------------------------------

    async def _probe(self) -> None:
        """Try the store and a failing disk once a second, so that their health is known even without requests."""
        while True:
            await self._probe_once()
            await asyncio.sleep(_PROBE_INTERVAL)

    async def _probe_once(self) -> None:
        """One probe; a failure is logged unless it is that of the probe before."""
        failure = ""
        try:
            if isinstance(self.store, ServerStore):
                await self.gate.astanding(".")  # no agent has this name
            await self.store_guard.probe()
            if self.database.failure:
                await self.database.probe()
            for file in self._files:
                if file.failure:
                    await asyncio.to_thread(file.probe)
        except Exception as error:  # noqa: BLE001 - no error ends the probes
            failure = str(error) or repr(error)
        if failure and failure != self._probe_failure:
            _log.error("probe failed", reason=failure)
        self._probe_failure = failure

    def _send_assignment(self, agent: str, task: Task) -> bool:
        frame = TaskAssigned(task_id=task.task_id, attempt=task.attempt, payload=task.payload)
        return self.presence.push(agent, encode(frame))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PolicyChanged):
            _log.info("limits changed", what=event.what, by=event.by)
            self._loop.call_soon_threadsafe(self._recheck)  # changes are made in threads
        elif isinstance(event, ViolationsReset):
            self.stats.forget(event.agent)
            self._loop.call_soon_threadsafe(self._recheck)
        elif isinstance(event, Violated):
            self.alerts.on_violation(event)
        elif isinstance(event, Alerted):
            self.alerts.on_alert(event)
        elif isinstance(event, AccountAlerted):
            self.account_alerts.on_alert(event)

    def _recheck(self) -> None:
        """Limits or exemptions have changed: look again at everything that depends on them."""
        self.scheduler.recheck()
        self.dashboard.recheck()
        self.alerts.recheck()
        self.account_alerts.recheck()


def _address(scope: Mapping[str, Any]) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "::1"  # a Unix socket


async def _refuse(socket: Socket, response: ApiResponse) -> None:
    await socket.refuse(response.status, response.all_headers(), response.body)


async def _say_goodbye(socket: Socket) -> None:
    delay = _reconnect_delay_ms()
    try:
        async with asyncio.timeout(_GOODBYE_TIMEOUT), socket.busy:
            await socket.send(encode(GoingAway(retry_after_ms=delay)))
    except TimeoutError:
        pass  # it does not read
    await socket.close_for_restart(delay)


def _reconnect_delay_ms() -> int:
    """Milliseconds until a client reconnects: random, so that not all do at once."""
    return random.randint(1000, 5000)  # noqa: S311 - no secret
