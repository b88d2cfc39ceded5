"""The WebSockets of agents at `/ws`: identification, then frame after frame, each checked by the gate."""

import asyncio
from math import ceil
from typing import Final, Literal

from msgspec import UNSET, Raw

from headgate.errors import HeadgateError, RateLimited, SessionClosed
from headgate.gate import Gate
from headgate.http import wait_ms
from headgate.hub.agents.authentication import Authentication
from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import Registry
from headgate.hub.errors import BLOCKED_BY_OPERATOR, RequestError, as_request_error
from headgate.hub.messages.messages import MessageBroker
from headgate.hub.messages.sessions import SessionLog
from headgate.hub.monitoring.connection_log import ConnectionLog
from headgate.hub.monitoring.stats import Stats
from headgate.hub.settings import HubSettings
from headgate.hub.sockets import frames
from headgate.hub.sockets.flood import MAX_INVALID, FloodControl, FloodCounter
from headgate.hub.sockets.socket import POLICY_VIOLATION, TRY_LATER, Socket, disconnect
from headgate.hub.tasks.scheduler import Scheduler
from headgate.hub.tasks.task import Task
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision, Outcome

MAX_STRANGERS_FRAME: Final = 8192
"""Bytes of a frame before the agent has identified: enough for any name and token."""

_SESSION: Final = "session"  # stands for a tier, where a session's own limit denies
_ACTIONS: Final = {kind: frames.tag_of(kind) for kind in frames.CLIENT_FRAMES}


class _AgentConnection:
    """One WebSocket, and the agent that it belongs to."""

    def __init__(self, socket: Socket, flood: FloodControl) -> None:
        self.socket: Final = socket
        self.flood: Final = flood
        self.agent = ""  # until it has identified
        self.logged = False
        self.left: Final = asyncio.Event()

    async def send(self, frame: frames.ServerFrame, frame_id: frames.MaybeId) -> None:
        """Answer the frame that has this id."""
        frame.id = frame_id
        await self.socket.send(frames.encode(frame))

    async def refuse_invalid(self, frame_id: frames.MaybeId, error: str, detail: str) -> None:
        """Answer an invalid frame, and close the connection after too many of them."""
        await self.send(frames.Problem(error=error, detail=detail), frame_id)
        if self.flood.invalid():
            await self.socket.close(POLICY_VIOLATION, f"{MAX_INVALID} invalid frames within a minute")

    async def deny(self, frame_id: frames.MaybeId, tier: str, decision: Decision, *, blocked: bool = False) -> None:
        """Answer a denied frame, and read on more slowly after many of them."""
        answer = frames.RateLimitedFrame(tier=tier, retry_after_ms=wait_ms(decision), blocked=blocked or UNSET)
        await self._deny(answer, frame_id, decision)

    async def deny_signal(
        self, frame_id: frames.MaybeId, error: RateLimited, decision: Decision, *, blocked: bool
    ) -> None:
        """Answer a denied signal likewise; `blocked`: that of an agent that an operator has blocked."""
        problem = frames.Problem(
            error="rate_limited",
            detail=BLOCKED_BY_OPERATOR if blocked else str(error),
            agent_id=error.agent_id,
            limit=error.limit,
            retry_after_ms=UNSET if error.retry_after_ms is None else error.retry_after_ms,
        )
        await self._deny(problem, frame_id, decision)

    async def _deny(self, answer: frames.ServerFrame, frame_id: frames.MaybeId, decision: Decision) -> None:
        await self.send(answer, frame_id)
        if pause := self.flood.denied(decision):
            await asyncio.sleep(pause)


class AgentSockets:
    """Serves the WebSockets of agents."""

    def __init__(
        self,
        gate: Gate,
        stats: Stats,
        presence: Presence,
        registry: Registry,
        authentication: Authentication,
        messages: MessageBroker,
        sessions: SessionLog,
        scheduler: Scheduler,
        clock: Clock,
        flood_counter: FloodCounter,
        settings: HubSettings,
    ) -> None:
        self._gate, self._stats, self._presence, self._registry = gate, stats, presence, registry
        self._authentication = authentication
        self._messages, self._sessions, self._scheduler = messages, sessions, scheduler
        self._clock, self._flood_counter = clock, flood_counter
        self._identify_within: Final = settings.identify_within
        self._max_frame: Final = settings.max_frame
        self._log: Final = ConnectionLog(clock)
        self._identified: Final[set[_AgentConnection]] = set()

    async def serve(self, socket: Socket) -> None:
        """Serve an accepted socket until it is closed."""
        connection = _AgentConnection(socket, FloodControl(self._clock, self._flood_counter))
        try:
            if await self._identify(connection):
                connection.logged = self._log.connected(connection.agent, socket.address)
                while (text := await socket.read()) is not None:
                    async with socket.busy:
                        frame = await self._decode(connection, text)
                        if frame is not None and await self._admit(connection, frame):
                            await self._handle(connection, frame)
        finally:
            connection.flood.disconnected()
            if connection.agent:
                await self._leave(connection)

    def drop(self, agent: str) -> None:
        """Close the sockets of an agent whose token is no longer valid."""
        for socket in self._presence.sockets_of(agent):
            socket.close_revoked()

    def disconnect(self, agent: str) -> int:
        """Close the sockets of an agent, which may connect again; their number."""
        return disconnect(self._presence.sockets_of(agent))

    async def drop_all(self, within: float) -> bool:
        """Close the sockets of all agents, none of whose tokens is valid any more; whether all left within seconds."""
        connections = list(self._identified)
        for connection in connections:
            connection.socket.close_revoked()
        try:
            async with asyncio.timeout(within):
                for connection in connections:
                    await connection.left.wait()
        except TimeoutError:
            return False
        return True

    async def _leave(self, connection: _AgentConnection) -> None:
        agent, socket = connection.agent, connection.socket
        self._messages.unsubscribe_all(socket)
        if self._presence.remove(agent, socket):
            self._scheduler.agent_disconnected(agent)
        if connection.logged:
            self._log.disconnected(agent)
        try:
            await self._messages.save_unsent(agent, socket)
        finally:
            self._identified.discard(connection)
            connection.left.set()

    # Identification --------------------------------------------------------------------------------------------------

    async def _identify(self, connection: _AgentConnection) -> bool:
        """Read frames until the agent has identified; whether it has."""
        socket = connection.socket
        deadline = socket.expect_identification(self._clock, self._identify_within)
        try:
            while (text := await socket.read()) is not None:
                frame = await self._decode(connection, text)
                if frame is not None and await self._try_identify(connection, frame):
                    return True
        finally:
            deadline.cancel()
        return False

    async def _try_identify(self, connection: _AgentConnection, frame: frames.ClientFrame) -> bool:
        """Handle a frame of an unknown agent; whether the agent is known now."""
        if not isinstance(frame, frames.Identify):
            await connection.refuse_invalid(frame.id, "not_identified", "identify first")
            return False
        agent, address = frame.agent_id, connection.socket.address
        try:
            failed = await self._attempt(address, agent, frame.token)
        except HeadgateError as error:
            await connection.send(_problem(error), frame.id)
            return False
        if failed is not None:
            if failed:
                problem = frames.Problem(error="unauthorized", detail="there is no such agent with such a token")
                await connection.send(problem, frame.id)
            else:
                await connection.deny(frame.id, self._gate.tier_of("ws", "identify"), failed)
            return False
        try:
            first = self._presence.add(agent, connection.socket)
        except RequestError as error:
            await connection.send(_problem(error), frame.id)
            await connection.socket.close(TRY_LATER, "too many connections of this agent")
            return False
        connection.agent = agent
        connection.socket.hold()
        self._identified.add(connection)
        if first:
            self._scheduler.agent_connected(agent)
        try:
            mail = await self._messages.waiting(agent)  # from now on messages come over this socket
        except HeadgateError as error:
            await connection.send(_problem(error), frame.id)
            await connection.socket.close(TRY_LATER, "the mailbox can't be read")
            return False
        await connection.send(frames.Identified(agent_id=agent, mail=mail), frame.id)
        connection.socket.release()
        await self._authentication.refund_connection(address)
        return True

    async def _attempt(self, address: str, agent: str, token: str) -> Decision | None:
        """None if an agent's token is valid now; otherwise the address's decision."""
        registry = self._registry

        async def look_up() -> Literal[True] | None:
            return True if await registry.verify(agent, token) else None

        found = await self._authentication.attempt_socket(address, token, look_up, lambda: registry.revocations)
        return None if found is True else found

    # Every frame -----------------------------------------------------------------------------------------------------

    async def _decode(self, connection: _AgentConnection, text: str | bytes) -> frames.ClientFrame | None:
        """A valid frame; an invalid one is answered."""
        most = self._max_frame if connection.agent else MAX_STRANGERS_FRAME
        if isinstance(text, bytes):
            await connection.refuse_invalid(UNSET, "invalid", "expected a text frame, got a binary one")
        elif len(text) > most or (len(text) * 4 > most and len(text.encode()) > most):
            await connection.refuse_invalid(UNSET, "too_large", f"expected at most {most} bytes")
        else:
            try:
                return frames.decode(text)
            except RequestError as error:
                await connection.refuse_invalid(frames.id_in(text), error.error, error.detail)
        return None

    async def _admit(self, connection: _AgentConnection, frame: frames.ClientFrame) -> bool:
        """Whether the gate lets a frame pass; the agent gets a denial, or a warning if little is left."""
        if isinstance(frame, frames.SessionSignal):  # the session has a limit of its own
            return await self._admit_signal(connection, frame)
        action = _ACTIONS[type(frame)]
        active, decision = await self._stats.check(
            connection.agent, "ws", action=action, address=connection.socket.address
        )
        if decision.outcome is Outcome.DENY:
            await connection.deny(frame.id, active.tier, decision, blocked=self._gate.is_blocked(connection.agent))
            return False
        connection.flood.passed()
        if decision.outcome is Outcome.WARN:
            capacity = decision.limit.capacity
            warning = frames.RateLimitWarning(tier=active.tier, remaining=decision.remaining, capacity=capacity)
            await connection.send(warning, frame.id)
        return True

    async def _admit_signal(self, connection: _AgentConnection, frame: frames.SessionSignal) -> bool:
        """Whether the session is open, and its limit lets a signal pass."""
        session = self._sessions.find(connection.agent, str(frame.session))
        if session is None or session.closed:
            await connection.refuse_invalid(frame.id, "session_closed", str(SessionClosed(str(frame.session))))
            return False
        decision = await session.acheck()
        if not decision:
            agent, address = connection.agent, connection.socket.address
            self._stats.denials.add(agent, "ws", _ACTIONS[type(frame)], _SESSION, address, decision)
            blocked = self._gate.is_blocked(agent)
            await connection.deny_signal(frame.id, session.error(decision), decision, blocked=blocked)
            return False
        connection.flood.passed()
        return True

    async def _handle(self, connection: _AgentConnection, frame: frames.ClientFrame) -> None:
        try:
            answer = await self._answer(connection, frame)
        except Exception as error:  # noqa: BLE001 - the agent gets an answer; the log has the details
            answer = problem = _problem(error)
            if problem.error == "invalid":
                await connection.refuse_invalid(frame.id, problem.error, problem.detail)
                return
        await connection.send(answer, frame.id)

    # What each frame does --------------------------------------------------------------------------------------------

    async def _answer(self, connection: _AgentConnection, frame: frames.ClientFrame) -> frames.ServerFrame:
        """The answer to a frame. The frequent ones come first, since each case takes time."""
        agent = connection.agent
        match frame:
            case frames.SessionSignal():
                number = await self._sessions.write(agent, str(frame.session), frames.decode_signal(frame.signal))
                return frames.SignalLogged(session=frame.session, number=number)
            case frames.Ping():
                return frames.Pong()
            case frames.SendMessage():
                delivered = await self._messages.send(agent, frame.to, frame.body)
                return frames.MessageSent(to=frame.to, delivered=delivered)
            case frames.ChannelPublish():
                number = await self._messages.publish(frame.channel, agent, frame.body)
                return frames.Published(channel=frame.channel, number=number)
            case frames.TaskProgress():
                return _updated(await self._scheduler.report_progress(agent, frame.task_id, frame.progress, frame.note))
            case frames.TaskAccepted():
                return _updated(await self._scheduler.accept(agent, frame.task_id))
            case frames.TaskComplete():
                result = bytes(frame.result) if isinstance(frame.result, Raw) else None
                return _updated(await self._scheduler.complete(agent, frame.task_id, result))
            case frames.TaskFailed():
                return _updated(await self._scheduler.fail(agent, frame.task_id, frame.error, frame.retry))
            case frames.TaskRecovering():
                return _updated(await self._scheduler.recover(agent, frame.task_id))
            case frames.Status():
                return await self._status(agent, frame)
            case frames.ListAgents():
                agents, more = self._presence.page(frame.limit, frame.after)
                return frames.Agents(agents=agents, more=more)
            case frames.ListChannels():
                channels, more = self._messages.chat_channels(frame.limit, frame.after)
                return frames.Channels(channels=channels, more=more)
            case frames.ChannelHistory():
                before = None if frame.before is UNSET else frame.before
                found = await self._messages.history(frame.channel, frame.limit, before)
                return frames.History(channel=frame.channel, messages=found)
            case frames.ChannelSubscribe():
                self._messages.subscribe(frame.channel, connection.socket)
                return frames.Subscribed(channel=frame.channel)
            case frames.ChannelUnsubscribe():
                await self._messages.unsubscribe(frame.channel, connection.socket)
                return frames.Unsubscribed(channel=frame.channel)
            case frames.SessionOpen():
                rate = None if frame.rate is UNSET else frame.rate
                burst = None if frame.burst is UNSET else frame.burst
                session = await self._sessions.open(agent, str(frame.session), rate, burst)
                return frames.SessionOpened(session=frame.session, limit=str(session.limit))
            case frames.SessionClose():
                await self._sessions.close(agent, str(frame.session))
                return frames.SessionClosedFrame(session=frame.session)
            case frames.Identify():
                raise RequestError(409, "identified", f"this connection is {agent!r} already; open another")
        raise TypeError(f"expected a frame of an agent, got {frame!r}")

    async def _status(self, agent: str, frame: frames.Status) -> frames.AgentStatus:
        scheduler = self._scheduler
        if frame.status is not UNSET:
            scheduler.set_available(agent, frame.status == "idle")
        standing = await self._gate.astanding(agent)
        return frames.AgentStatus(
            agent_id=agent,
            status="idle" if scheduler.is_idle(agent) else "busy",
            task_id=scheduler.task_of(agent),
            rate_limited=bool(standing) and not self._gate.always_passes(agent),
            violations=standing.violations,
            quiet_left_ms=ceil(standing.quiet_left * 1000),
        )


def _updated(task: Task) -> frames.TaskUpdated:
    return frames.TaskUpdated(task_id=task.task_id, state=task.state)


def _problem(error: Exception) -> frames.Problem:
    if isinstance(error, SessionClosed):
        return frames.Problem(error="session_closed", detail=str(error))
    known = as_request_error(error)
    return frames.Problem(error=known.error, detail=known.detail)
