"""The relay: binary protobuf envelopes, passed between agents by their addresses.

An address is an agent's id, proved by its token in the first envelope of a connection. It may have several connections.
Every later frame is counted against the address before anything else; only then it is measured, decoded and routed.
Every envelope of an agent is answered by one with its id: ACK, ERROR or RATE_LIMITED. The schema is
proto/headgate/v1/envelope.proto.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from headgate.errors import InvalidInput, StoreAway, StoreLost, refuse
from headgate.gate import Gate
from headgate.gate.policy import check_agent
from headgate.http import wait_ms
from headgate.hub.agents.authentication import Authentication
from headgate.hub.agents.registry import Registry
from headgate.hub.errors import BLOCKED_BY_OPERATOR, as_request_error
from headgate.hub.monitoring.denials import DenialLog
from headgate.hub.settings import RELAY_BURST, RELAY_RATE, SettingParser, variable
from headgate.hub.sockets.flood import MAX_INVALID, FloodControl, FloodCounter
from headgate.hub.sockets.socket import POLICY_VIOLATION, TRY_LATER, FanOut, Socket, disconnect
from headgate.limiter import Limiter
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.limits.token_bucket import limited
from headgate.proto import envelope_pb2 as wire
from headgate.stores.base import Store

_LONGEST_ID: Final = 128
_NO_WAIT_HELPS: Final = 86_400_000  # milliseconds: a day, where no wait would ever help
_FLUSH: Final = 1.0  # seconds to send queued frames when the hub stops
_DRAIN: Final = 2.0  # seconds to close all connections


def relay_limiter(rate: str, burst: str, store: Store) -> Limiter | None:
    """The limiter by address: `rate` messages per second, `burst` at once; None if the rate is "off"."""
    number = _parsed("relay_rate_limit", RELAY_RATE, rate)
    if number == "off":
        return None
    most = _parsed("relay_rate_burst", RELAY_BURST, burst)
    try:
        limit = limited(float(number), int(most))
    except InvalidInput as error:
        raise InvalidInput(
            f"HEADGATE_RELAY_RATE_LIMIT {number} with HEADGATE_RELAY_RATE_BURST {most}: {error}"
        ) from None
    return Limiter(limit, store=store, name="relay")


def _parsed(name: str, parser: SettingParser, text: str) -> str:
    expected, parse = parser
    try:
        parsed: str = parse(text)
    except ValueError:
        refuse(variable(name), expected, text)
    return parsed


class Relay:
    """Routes envelopes between the sockets that it serves, in one event loop.

    `gate` says who is blocked. `limiter` counts by address; without one everything else passes. `denials` records what
    is denied. `registry` says whether a token belongs to an address. `authentication` limits wrong ones by network
    address. An envelope has at most `largest` bytes, an address `most_connections`, and a connection
    `identify_within` seconds of the clock to prove its address.
    """

    def __init__(
        self,
        limiter: Limiter | None,
        registry: Registry,
        clock: Clock,
        *,
        gate: Gate,
        authentication: Authentication,
        denials: DenialLog,
        flood_counter: FloodCounter,
        largest: int = 65_536,
        most_connections: int = 20,
        identify_within: float = 10.0,
    ) -> None:
        self._limiter: Final = limiter
        self._registry: Final = registry
        self._clock: Final = clock
        self._gate: Final = gate
        self._authentication: Final = authentication
        self._denials: Final = denials
        self._flood_counter: Final = flood_counter
        self._largest: Final = largest
        self._most_connections: Final = most_connections
        self._identify_within: Final = identify_within
        self.passed = self.denied = 0
        """The numbers of envelopes that the limiter let pass and denied."""
        self._open: Final[set[Socket]] = set()
        self._by_address: Final[dict[str, set[Socket]]] = {}
        self._fan_out: Final = FanOut()
        self._retry_after_ms: Callable[[], int] | None = None  # once the hub stops

    @property
    def connections(self) -> int:
        """The number of open sockets, including unidentified ones."""
        return len(self._open)

    async def serve(self, socket: Socket) -> None:
        """Serve an accepted socket until it is closed."""
        peer = _Peer(socket, FloodControl(self._clock, self._flood_counter))
        reason = f"no HELLO that could be proved within {self._identify_within:g} s"
        deadline = socket.expect_identification(self._clock, self._identify_within, reason)
        self._open.add(socket)
        try:
            if self._retry_after_ms is not None:
                await self._close_gracefully(socket, self._retry_after_ms())
            while (frame := await socket.read()) is not None:
                if self._retry_after_ms is not None:
                    continue  # not acknowledged, so that it is sent again after the restart
                try:
                    if peer.address:
                        await self._handle(peer, frame)
                    elif await self._identify(peer, frame):
                        deadline.cancel()
                except _Invalid as error:
                    await _send(peer, _error(error.code, str(error)), error.answered)
                    if peer.flood.invalid():
                        await socket.close(POLICY_VIOLATION, f"{MAX_INVALID} invalid envelopes within a minute")
        finally:
            deadline.cancel()
            peer.flood.disconnected()
            self._forget(peer)

    def sockets_of(self, agent: str) -> list[Socket]:
        """An agent's sockets, oldest first."""
        return sorted(self._by_address.get(agent, ()), key=lambda socket: socket.since)

    def drop(self, agent: str) -> None:
        """Close the connections of an agent whose token is no longer valid."""
        for socket in self._by_address.get(agent, ()):
            socket.close_revoked()

    def disconnect(self, agent: str) -> int:
        """Close the connections of an agent, which may connect again; their number."""
        return disconnect(self._by_address.get(agent, ()))

    def drop_all(self) -> None:
        """Close the connections of all agents: none of their tokens is valid any more."""
        for agent in list(self._by_address):
            self.drop(agent)

    async def drain(self, retry_after_ms: Callable[[], int]) -> None:
        """Handle no more frames, send acknowledged envelopes, and close every socket with the wait until it reconnects.

        Later sockets are closed likewise. It takes at most two seconds, even with readers that are stuck.
        """
        self._retry_after_ms = retry_after_ms
        tasks = [asyncio.create_task(self._close_gracefully(socket, retry_after_ms())) for socket in self._open]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_DRAIN)
            for task in late:
                task.cancel()

    async def _close_gracefully(self, socket: Socket, retry_after_ms: int) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + _FLUSH
        while socket.queued and not socket.closed and loop.time() < end:  # noqa: ASYNC110 - a socket has no event for it
            await asyncio.sleep(0.01)
        await socket.close_for_restart(retry_after_ms)

    def _forget(self, peer: "_Peer") -> None:
        self._open.discard(peer.socket)
        if peer.address:
            sockets = self._by_address[peer.address]
            sockets.discard(peer.socket)
            if not sockets:
                del self._by_address[peer.address]

    # Identification --------------------------------------------------------------------------------------------------

    async def _identify(self, peer: "_Peer", frame: bytes | str) -> bool:
        """Handle a frame of an unknown peer; whether it has proved its address now."""
        envelope = self._read(frame)
        if envelope.type != wire.MESSAGE_TYPE_HELLO or envelope.WhichOneof("payload") != "hello":
            raise _Invalid("expected HELLO with its payload, since nothing else is accepted first", envelope.id)
        try:
            address = check_agent(envelope.hello.address)
        except InvalidInput:
            raise _Invalid("expected an address of 1 to 128 printable characters", envelope.id) from None
        token, network = envelope.hello.token, peer.socket.address
        try:
            verified = await self._attempt(network, address, token)
        except StoreLost as lost:
            await _send(peer, _error("store_lost", as_request_error(lost).detail), envelope.id)
            return False
        except StoreAway as away:
            await _send(peer, _error("unavailable", as_request_error(away).detail), envelope.id)
            return False
        if isinstance(verified, Decision):
            if verified:
                await _send(peer, _error("unauthorized", "the token doesn't belong to the address"), envelope.id)
            else:
                await _deny(peer, verified, envelope.id, "too many failed attempts from your network address")
            return False
        if peer.socket.closed:
            return False
        if sum(not socket.closed for socket in self._by_address.get(address, ())) >= self._most_connections:
            detail = f"{address!r} has {self._most_connections} connections, and may have no more"
            await _send(peer, _error("too_many_connections", detail), envelope.id)
            await peer.socket.close(TRY_LATER, "too many connections of this address")
            return False
        peer.address = address
        self._by_address.setdefault(address, set()).add(peer.socket)
        welcome = wire.Envelope(type=wire.MESSAGE_TYPE_WELCOME, welcome=wire.Welcome(address=address))
        await _send(peer, welcome, envelope.id)
        await self._authentication.refund_connection(network)
        return True

    async def _attempt(self, network: str, address: str, token: str) -> bool | Decision:
        """True if the token belongs to the address now; otherwise the decision on the network address."""

        async def look_up() -> bool | None:
            return await self._registry.verify(address, token) or None

        return await self._authentication.attempt_socket(network, token, look_up, lambda: self._registry.revocations)

    # Envelopes -------------------------------------------------------------------------------------------------------

    async def _handle(self, peer: "_Peer", frame: bytes | str) -> None:
        """Handle a frame of an agent: blocks and the limiter come first, even for an invalid frame."""
        if self._gate.is_blocked(peer.address):
            decision = await self._gate.acheck(peer.address, "ws", action="message")
            if not decision:
                self._count_denial(peer, decision)
                await _deny(peer, decision, self._id(frame), BLOCKED_BY_OPERATOR, wait_ms(decision))
                return
        if self._limiter is not None:
            decision = await self._limiter.acheck(peer.address)
            if not decision:
                self._count_denial(peer, decision)
                await _deny(peer, decision, self._id(frame), f"an address may send {decision.limit}")
                return
            peer.flood.passed()
            if peer.socket.closed:
                return
        self.passed += 1
        envelope = self._read(frame)
        if envelope.type != wire.MESSAGE_TYPE_DATA or envelope.WhichOneof("payload") != "data":
            raise _Invalid("expected DATA with its payload", envelope.id)
        if not envelope.to:
            raise _Invalid("expected `to`, the address that it goes to", envelope.id)
        await _send(peer, await self._route(peer.address, envelope), envelope.id)

    def _count_denial(self, peer: "_Peer", decision: Decision) -> None:
        self.denied += 1
        self._denials.add(peer.address, "relay", "envelope", "", peer.socket.address, decision)

    async def _route(self, sender: str, envelope: wire.Envelope) -> wire.Envelope:
        """Push an envelope to every connection of its address; the answer to its sender."""
        sockets = [socket for socket in self._by_address.get(envelope.to, ()) if not socket.closed]
        if not sockets:
            return _error("unreachable", "no connection of this address is open")
        envelope.DiscardUnknownFields()  # otherwise a sender could forge fields that only a later hub may set
        setattr(envelope, "from", sender)
        frame = envelope.SerializeToString()
        if not await self._fan_out.push(sockets, lambda socket: socket.push(frame)):
            return _error("busy", "too much waits for this address already; send it again later")
        return wire.Envelope(type=wire.MESSAGE_TYPE_ACK, ack=wire.Ack())

    def _read(self, frame: bytes | str) -> wire.Envelope:
        if isinstance(frame, str):
            raise _Invalid("expected an envelope in a binary message, got text")
        if len(frame) > self._largest:
            raise _Invalid(f"expected at most {self._largest} bytes, got {len(frame)}", code="too_large")
        try:
            envelope = wire.Envelope.FromString(frame)
        except DecodeError:
            raise _Invalid("expected an Envelope of headgate.v1, got bytes that can't be read as one") from None
        if not 1 <= len(envelope.id) <= _LONGEST_ID:
            raise _Invalid(f"expected an id of 1 to {_LONGEST_ID} characters, got {len(envelope.id)}")
        return envelope

    def _id(self, frame: bytes | str) -> str:
        """The id of a denied envelope; "" if it is invalid."""
        try:
            return self._read(frame).id
        except _Invalid:
            return ""


class _Peer:
    """The other end of a socket."""

    def __init__(self, socket: Socket, flood: FloodControl) -> None:
        self.socket: Final = socket
        self.flood: Final = flood
        self.address = ""  # until it is proved


class _Invalid(Exception):
    """An invalid envelope; `answered` is its id, if that could be read."""

    def __init__(self, detail: str, answered: str = "", code: str = "invalid") -> None:
        self.answered: Final = answered
        self.code: Final = code
        super().__init__(detail)


def _error(code: str, detail: str) -> wire.Envelope:
    return wire.Envelope(type=wire.MESSAGE_TYPE_ERROR, error=wire.Error(code=code, detail=detail))


async def _send(peer: _Peer, answer: wire.Envelope, answered: str) -> None:
    answer.in_reply_to = answered
    await peer.socket.send(answer.SerializeToString())


async def _deny(peer: _Peer, decision: Decision, answered: str, why: str, advised: int | None = None) -> None:
    """Answer a denied envelope, and read on more slowly after many of them, so that a flood backs up at its sender.

    `advised` is a wait in milliseconds, instead of the decision's own.
    """
    true = _NO_WAIT_HELPS if decision.retry_ms is None else max(decision.retry_ms, 1)
    wait = true if advised is None else advised
    limited = wire.RateLimited(retry_after_ms=wait, reason=f"{why}; send it again in {wait} ms")
    await _send(peer, wire.Envelope(type=wire.MESSAGE_TYPE_RATE_LIMITED, rate_limited=limited), answered)
    if pause := peer.flood.denied(decision):
        await asyncio.sleep(pause)
