"""One agent's conversation with the hub over one WebSocket: frame by frame, with the gate before each."""

import asyncio
from collections.abc import Awaitable, Callable
from math import ceil
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import structlog
from msgspec import UNSET, Raw, Struct

from headgate.errors import HeadgateError, RateLimited, SessionClosed
from headgate.http import wait_ms
from headgate.hub.errors import Refused, refusal
from headgate.hub.sockets import frames
from headgate.hub.sockets.flood import MISTAKES, Manners
from headgate.hub.sockets.socket import Socket
from headgate.hub.timer import Timer
from headgate.limits.decision import Decision, Outcome

if TYPE_CHECKING:
    from headgate.hub.app import Hub

_log = structlog.get_logger("headgate.hub")
_tags: Final = {kind: frames.tag_of(kind) for kind in frames.Frame.__args__}

Answer: TypeAlias = Awaitable[frames.Told]


class Conversation:
    """Serves one WebSocket at `/ws` until it is closed."""

    def __init__(self, hub: "Hub", socket: Socket) -> None:
        self._hub, self._socket = hub, socket
        self._agent = ""
        self._attempts = 0
        self._manners: Final = Manners(hub.clock, hub.flood)

    async def hold(self) -> None:
        """Hear who it is, then handle frame after frame."""
        try:
            if await self._introduced():
                _log.info("agent connected", agent=self._agent, address=self._socket.address)
                while (text := await self._socket.read()) is not None:
                    async with self._socket.turn:
                        frame = await self._decoded(text)
                        if frame is not None and await self._passes(frame):
                            await self._handle(frame)
        finally:
            self._manners.gone()
            if self._agent:
                await self._leave()

    async def _leave(self) -> None:
        hub, agent, socket = self._hub, self._agent, self._socket
        hub.post.unsubscribe_all(socket)
        if hub.presence.part(agent, socket):
            hub.scheduler.left(agent)
        _log.info("agent disconnected", agent=agent)
        await hub.post.keep_untaken(agent, socket)

    # Who is it? ------------------------------------------------------------------------------------------------------

    async def _introduced(self) -> bool:
        within = self._hub.settings.identify_within
        deadline = Timer(self._hub.clock, self._hub.clock.now() + round(within * 1_000_000), self._too_late)
        try:
            while (text := await self._socket.read()) is not None:
                frame = await self._decoded(text)
                if frame is not None and await self._identified(frame):
                    return True
        finally:
            deadline.cancel()
        return False

    def _too_late(self) -> None:
        within = self._hub.settings.identify_within
        self._hub.spawn(self._socket.close(1008, f"identify within {within:g} seconds"))

    async def _identified(self, frame: frames.Frame) -> bool:
        """Take a frame before the agent is known; whether it is known now."""
        if not isinstance(frame, frames.Identify):
            await self._refuse_invalid(frame.id, "not_identified", "identify first")
            return False
        self._attempts += 1
        if self._attempts > 1:  # the first was paid for with the connection
            decision = await self._hub.gate.acheck_address(self._socket.address)
            if not decision:
                await self._deny(frame, decision)
                return False
        hub, agent, revocations, known, mail = self._hub, frame.agent_id, -1, False, 0
        try:
            while revocations != hub.revocations:  # a token may have been revoked while it was looked up
                revocations = hub.revocations
                known = await hub.registry.verify(agent, frame.token)
                mail = await hub.post.waiting(agent) if known else 0
        except HeadgateError as error:
            await self._tell(self._problem(error), frame.id)
            return False
        if not known:
            problem = frames.Problem(error="unauthorized", detail="there is no such agent with such a token")
            await self._tell(problem, frame.id)
            return False
        self._agent = agent
        if hub.presence.join(agent, self._socket):
            hub.scheduler.arrived(agent)
        await self._tell(frames.Identified(agent_id=agent, mail=mail), frame.id)
        return True

    # Every frame -----------------------------------------------------------------------------------------------------

    async def _decoded(self, text: str | bytes) -> frames.Frame | None:
        """A frame, validated; a bad one is answered, and counted toward closing the connection."""
        most = self._hub.settings.max_frame
        if isinstance(text, bytes):
            await self._refuse_invalid(UNSET, "invalid", "expected a text frame, got a binary one")
        elif len(text) > most or (len(text) * 4 > most and len(text.encode()) > most):
            await self._refuse_invalid(UNSET, "too_large", f"expected at most {most} bytes")
        else:
            try:
                return frames.decode(text)
            except Refused as error:
                await self._refuse_invalid(frames.id_in(text), error.error, error.detail)
        return None

    async def _refuse_invalid(self, frame_id: frames.MaybeId, error: str, detail: str) -> None:
        await self._tell(frames.Problem(error=error, detail=detail), frame_id)
        if self._manners.mistaken():
            await self._socket.close(1008, f"{MISTAKES} invalid frames within a minute")

    async def _passes(self, frame: frames.Frame) -> bool:
        """Ask the gate, and tell the agent if it has nothing left, or little."""
        if isinstance(frame, frames.SessionSignal):  # which has a limit of its own
            return True
        action = _tags[type(frame)]
        decision = await self._hub.check(self._agent, "ws", action=action)
        if decision.outcome is Outcome.DENY:
            await self._deny(frame, decision)
            return False
        self._manners.passed()
        if decision.outcome is Outcome.WARN:
            warning = frames.RateLimitWarning(
                tier=self._hub.gate.tier_of("ws", action),
                remaining=decision.remaining,
                capacity=decision.limit.capacity,
            )
            await self._tell(warning, frame.id)
        return True

    async def _deny(self, frame: frames.Frame, decision: Decision) -> None:
        tier = self._hub.gate.tier_of("ws", _tags[type(frame)])
        await self._tell(frames.RateLimitedFrame(tier=tier, retry_after_ms=wait_ms(decision)), frame.id)
        if pause := self._manners.denied(decision):
            await asyncio.sleep(pause)

    async def _handle(self, frame: frames.Frame) -> None:
        try:
            answer = await _ANSWERS[type(frame)](self, frame)
        except Exception as error:  # noqa: BLE001 - the agent is told, and the log
            answer = self._problem(error)
            if isinstance(error, Refused) and error.error == "invalid":
                await self._refuse_invalid(frame.id, error.error, error.detail)
                return
        await self._tell(answer, frame.id)

    async def _tell(self, frame: frames.Told, frame_id: frames.MaybeId) -> None:
        frame.id = frame_id
        await self._socket.send(frames.encode(frame))

    def _problem(self, error: Exception) -> frames.Problem:
        if isinstance(error, RateLimited):
            wait = UNSET if error.retry_after_ms is None else error.retry_after_ms
            return frames.Problem(
                error="rate_limited",
                detail=str(error),
                agent_id=error.agent,
                limit=str(error.limit),
                retry_after_ms=wait,
            )
        if isinstance(error, SessionClosed):
            return frames.Problem(error="session_closed", detail=str(error))
        refused = refusal(error)
        return frames.Problem(error=refused.error, detail=refused.detail)

    # What each frame asks for ----------------------------------------------------------------------------------------

    async def _identify_again(self, _frame: frames.Identify) -> frames.Told:
        raise Refused(409, "identified", f"this connection is {self._agent!r} already; open another")

    async def _ping(self, _frame: frames.Ping) -> frames.Told:
        return frames.Pong()

    async def _status(self, frame: frames.Status) -> frames.Told:
        hub, agent = self._hub, self._agent
        if frame.status is not UNSET:
            hub.scheduler.available(agent, frame.status == "idle")
        standing = await hub.gate.astanding(agent)
        return frames.Standing(
            agent_id=agent,
            status="idle" if hub.scheduler.is_idle(agent) else "busy",
            task_id=hub.scheduler.task_of(agent),
            rate_limited=bool(standing) and not hub.gate.is_exempt(agent),
            violations=standing.violations,
            quiet_left_ms=ceil(standing.quiet_left * 1000),
        )

    async def _list_agents(self, _frame: frames.ListAgents) -> frames.Told:
        return frames.Agents(agents=self._hub.presence.agents())

    async def _list_channels(self, _frame: frames.ListChannels) -> frames.Told:
        return frames.Channels(channels=self._hub.post.channels())

    async def _channel_history(self, frame: frames.ChannelHistory) -> frames.Told:
        before = None if frame.before is UNSET else frame.before
        messages = await self._hub.post.history(frame.channel, frame.limit, before)
        return frames.History(channel=frame.channel, messages=messages)

    async def _message(self, frame: frames.SendMessage) -> frames.Told:
        delivered = await self._hub.post.send(self._agent, frame.to, frame.body)
        return frames.MessageSent(to=frame.to, delivered=delivered)

    async def _publish(self, frame: frames.ChannelPublish) -> frames.Told:
        number = await self._hub.post.publish(frame.channel, self._agent, frame.body)
        return frames.Published(channel=frame.channel, number=number)

    async def _subscribe(self, frame: frames.ChannelSubscribe) -> frames.Told:
        self._hub.post.subscribe(frame.channel, self._socket)
        return frames.Subscribed(channel=frame.channel)

    async def _unsubscribe(self, frame: frames.ChannelUnsubscribe) -> frames.Told:
        self._hub.post.unsubscribe(frame.channel, self._socket)
        return frames.Unsubscribed(channel=frame.channel)

    async def _task_accepted(self, frame: frames.TaskAccepted) -> frames.Told:
        task = await self._hub.scheduler.accepted(self._agent, frame.task_id)
        return frames.TaskUpdated(task_id=task.task_id, state=task.state)

    async def _task_progress(self, frame: frames.TaskProgress) -> frames.Told:
        task = await self._hub.scheduler.progressed(self._agent, frame.task_id, frame.progress, frame.note)
        return frames.TaskUpdated(task_id=task.task_id, state=task.state)

    async def _task_complete(self, frame: frames.TaskComplete) -> frames.Told:
        result = bytes(frame.result) if isinstance(frame.result, Raw) else None
        task = await self._hub.scheduler.completed(self._agent, frame.task_id, result)
        return frames.TaskUpdated(task_id=task.task_id, state=task.state)

    async def _task_failed(self, frame: frames.TaskFailed) -> frames.Told:
        task = await self._hub.scheduler.failed(self._agent, frame.task_id, frame.error, frame.retry)
        return frames.TaskUpdated(task_id=task.task_id, state=task.state)

    async def _task_recovering(self, frame: frames.TaskRecovering) -> frames.Told:
        task = await self._hub.scheduler.recovering(self._agent, frame.task_id)
        return frames.TaskUpdated(task_id=task.task_id, state=task.state)

    async def _session_open(self, frame: frames.SessionOpen) -> frames.Told:
        rate = None if frame.rate is UNSET else frame.rate
        burst = None if frame.burst is UNSET else frame.burst
        session = await self._hub.logbook.open(self._agent, str(frame.session), rate, burst)
        return frames.SessionOpened(session=frame.session, limit=str(session.limit))

    async def _session_signal(self, frame: frames.SessionSignal) -> frames.Told:
        number = await self._hub.logbook.signal(self._agent, str(frame.session), frame.signal)
        return frames.SignalLogged(session=frame.session, number=number)

    async def _session_close(self, frame: frames.SessionClose) -> frames.Told:
        await self._hub.logbook.close(self._agent, str(frame.session))
        return frames.SessionClosed(session=frame.session)


_ANSWERS: Final[dict[type[Struct], Callable[[Conversation, Any], Answer]]] = {
    frames.Identify: Conversation._identify_again,
    frames.Ping: Conversation._ping,
    frames.Status: Conversation._status,
    frames.ListAgents: Conversation._list_agents,
    frames.ListChannels: Conversation._list_channels,
    frames.ChannelHistory: Conversation._channel_history,
    frames.SendMessage: Conversation._message,
    frames.ChannelPublish: Conversation._publish,
    frames.ChannelSubscribe: Conversation._subscribe,
    frames.ChannelUnsubscribe: Conversation._unsubscribe,
    frames.TaskAccepted: Conversation._task_accepted,
    frames.TaskProgress: Conversation._task_progress,
    frames.TaskComplete: Conversation._task_complete,
    frames.TaskFailed: Conversation._task_failed,
    frames.TaskRecovering: Conversation._task_recovering,
    frames.SessionOpen: Conversation._session_open,
    frames.SessionSignal: Conversation._session_signal,
    frames.SessionClose: Conversation._session_close,
}
