"""A client of the relay: sends envelopes to other agents, and receives theirs."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final, Unpack
from uuid import uuid4

from headgate.client.backoff import asked_wait
from headgate.client.connection import (
    ClientOptions,
    ReconnectingClient,
    Socket,
    TryLater,
    refusal_of_handshake,
)
from headgate.client.outbox import PacedLimit, PendingFrame, Refused, SendLimit
from headgate.client.url import checked_token
from headgate.errors import HeadgateError, refuse
from headgate.gate.policy import check_agent

try:
    from google.protobuf.message import DecodeError

    from headgate.proto import envelope_pb2 as wire
except ImportError as missing:
    raise HeadgateError(
        f"headgate.client.relay: expected the package protobuf, got: {missing}; in a checkout: pip install '.[client]'"
    ) from missing


@dataclass(frozen=True)
class RelayMessage:
    """A message from another agent."""

    id: str
    """The sender's id for it. The same id twice: it was sent again after a connection dropped."""
    sender: str
    body: bytes
    content_type: str
    in_reply_to: str
    """The id of the message that it answers; empty if it is no answer."""


class RelayClient(ReconnectingClient[RelayMessage]):
    """An agent's connection to a hub's relay. It obeys the limit, reconnects when it drops, and loses nothing.

    `url` is the hub's address, `address` the agent's id, and `token` the agent's token. The options are those of
    `headgate.client.connection.ClientOptions`; all envelopes share one limit.

    Use it with `async with`, and take messages with `async for`.
    """

    path = "/relay"

    def __init__(self, url: str, address: str, token: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(url, options)
        self._limit: Final = PacedLimit(self._in_flight)
        self.address: Final = check_agent(address)
        self._hello: Final = wire.Hello(address=address, token=checked_token(token))
        self._name: Final = uuid4().hex[:12]
        self._ids: Final = count(1)

    async def send(
        self,
        to: str,
        body: bytes,
        *,
        content_type: str = "application/octet-stream",
        in_reply_to: str = "",
        wait: bool = True,
    ) -> str:
        """Send a message to another agent. Returns its id as soon as the hub has acknowledged it.

        Raises `Refused` if the hub doesn't pass it on: "unreachable", "busy", "too_large" and others. While the queue
        is full it waits for room, or raises `QueueFull` if `wait` is False. If the call is cancelled, as by
        `asyncio.timeout`, the message is not sent, or not again.
        """
        if not isinstance(body, bytes | bytearray | memoryview):
            refuse("body", "bytes; encode text, and name its type in content_type", body)
        data = wire.Data(body=bytes(body), content_type=_text("content_type", content_type))
        envelope = wire.Envelope(
            id=f"{self._name}-{next(self._ids)}",
            type=wire.MESSAGE_TYPE_DATA,
            to=check_agent(to),
            in_reply_to=_text("in_reply_to", in_reply_to),
            data=data,
        )
        answer = asyncio.get_running_loop().create_future()
        await self._ask(PendingFrame(envelope.id, envelope.SerializeToString(), answer), wait)
        return envelope.id

    async def _identify(self, socket: Socket) -> None:
        hello = wire.Envelope(id="hello", type=wire.MESSAGE_TYPE_HELLO, hello=self._hello)
        await socket.send(hello.SerializeToString())
        while (answer := self._decode(await socket.recv())) is not None and answer.WhichOneof("payload") == "data":
            self._inbox.put(_message(answer))  # a message may come before the answer
        kind = None if answer is None else answer.WhichOneof("payload")
        if answer is None or kind not in ("welcome", "error", "rate_limited"):
            raise TryLater("expected WELCOME, got something else")
        if kind == "rate_limited":
            raise TryLater(answer.rate_limited.reason, asked_wait(answer.rate_limited.retry_after_ms))
        if kind == "error":
            raise refusal_of_handshake(answer.error.code, answer.error.detail, f"{self.address!r} at {self.url}")

    def _handle(self, frame: bytes | str) -> RelayMessage | None:
        envelope = self._decode(frame)
        if envelope is None:
            return None
        kind = envelope.WhichOneof("payload")
        if kind == "data":
            return _message(envelope)
        item = self._outbox.find(envelope.in_reply_to)
        if item is None:
            return None
        if kind == "ack" and envelope.in_reply_to:
            self._answered(item, envelope.in_reply_to)
        elif kind == "error":
            self._answered(item, Refused(envelope.error.code, envelope.error.detail))
        elif kind == "rate_limited":
            self._denied(item, envelope.rate_limited.retry_after_ms, envelope.rate_limited.reason)
        return None

    def _decode(self, frame: bytes | str) -> wire.Envelope | None:
        """An envelope; None if it can't be read, which is logged."""
        if isinstance(frame, bytes):
            with suppress(DecodeError):
                return wire.Envelope.FromString(frame)
        self._drop(frame, "expected an Envelope of headgate.v1")
        return None

    def _limit_of(self, item: PendingFrame) -> SendLimit:
        return self._limit  # one bucket counts all envelopes of an address

    def _disconnected(self) -> None:
        self._limit.forget()


def _message(envelope: wire.Envelope) -> RelayMessage:
    data, sender = envelope.data, str(getattr(envelope, "from"))
    return RelayMessage(envelope.id, sender, data.body, data.content_type, envelope.in_reply_to)


def _text(where: str, given: object) -> str:
    if not isinstance(given, str):
        refuse(where, "text", given)
    return given
