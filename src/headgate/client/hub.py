"""A client of the hub's `/ws`: requests with their answers, and frames that the hub pushes."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, TypeAlias, Unpack

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
from headgate.errors import refuse
from headgate.gate.policy import Policy, check_agent

Frame: TypeAlias = dict[str, Any]

_MINUTE: Final = 60_000_000
_DEFAULT: Final = "normal"  # the tier of kinds that the policy doesn't name
_PUSHED: Final = ("message", "channel_message", "lagged", "task_assigned")


@dataclass(frozen=True)
class Warned:
    """A frame has passed, but little of its tier's quota is left."""

    id: str
    """The id of the frame."""
    tier: str
    remaining: int
    capacity: int


class HubClientOptions(ClientOptions, total=False):
    """The options of a client of a hub."""

    on_warning: Callable[[Warned], object] | None
    """Called with each warning."""


class TierLimit(SendLimit):
    """The limit of a tier. When its quota is used up, the next frame waits until there should be some again."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._interval = 0  # until there is quota again; 0 if unknown
        self._emptied: int | None = None  # when the quota was used up

    def sent(self, now: int) -> None:
        super().sent(now)
        if self._emptied is not None and now - self._emptied > 2 * (self.due - self._emptied):
            self._emptied = None  # the frame could have been sent long before: others may have used quota since

    def warn(self, now: int, remaining: int, wait: int, jitter: int) -> None:
        """Note a warning: frames go one at a time, and the next one later if nothing remains."""
        self.one_at_a_time = True
        self._emptied = None
        if remaining <= 0:
            self._emptied = now
            self.due = max(self.due, now + (self._interval or wait) + jitter)

    def passed(self, *, warned: bool) -> None:
        if not warned:
            self.one_at_a_time = False
            self._emptied = None
            self._interval = 0  # there is more than that

    def denied(self, now: int, wait: int, jitter: int) -> None:
        if self._emptied is not None:
            self._interval = now + wait - self._emptied
        super().denied(now, wait, jitter)


class HubClient(ReconnectingClient[Frame]):
    """An agent's connection to a hub. It obeys the limits, reconnects when it drops, and loses nothing.

    `url` is the hub's address, `agent` the agent's id, and `token` the agent's token. The options are those of
    `HubClientOptions` and of `headgate.client.connection.ClientOptions`. Each tier is a limit.

    Use it with `async with`. `async for` yields the frames that the hub pushes: `message`, `channel_message`, `lagged`,
    `task_assigned`, `unsubscribed` when a chat channel was deleted, and `identified` after each reconnect.
    """

    path = "/ws"
    _options = HubClientOptions

    def __init__(self, url: str, agent: str, token: str, **options: Unpack[HubClientOptions]) -> None:
        super().__init__(url, options)
        self.agent: Final = check_agent(agent)
        self._token: Final = checked_token(token)
        self._on_warning: Final = options.get("on_warning")
        # The default tiers, until the hub names another.
        default = Policy().actions.items()
        self._tier_of: Final = {action: tier for (channel, action), tier in default if channel == "ws"}
        self._tiers: Final[dict[str, TierLimit]] = {}
        self._sessions: Final[dict[str, PacedLimit]] = {}
        self._chat_channels: Final[dict[str, None]] = {}
        self._subscribing: list[PendingFrame] = []  # again, on a new connection
        self._ids: Final = count(1)
        self._was_identified = False
        self._identified: Frame | None = None  # for the application, when it is subscribed again

    async def ask(self, kind: str, /, *, wait: bool = True, **fields: Any) -> Frame:
        """Send a frame of a type, and return the one that answers it.

        Raises `Refused` if the hub refuses. While the queue is full it waits for room, or raises `QueueFull` if `wait`
        is False. If the call is cancelled, as by `asyncio.timeout`, the frame is not sent, or not again. Subscriptions
        to chat channels are renewed after each reconnect.
        """
        if kind in ("", "identify"):
            refuse("kind", "the type of a frame, such as ping; the client identifies by itself", kind)
        subject = fields.get("session" if kind.startswith("session_") else "channel", "")
        return await self._ask(self._item(kind, fields, str(subject)), wait)  # type: ignore[no-any-return]

    def _item(self, kind: str, fields: Frame, subject: str) -> PendingFrame:
        number = f"{next(self._ids)}"
        try:
            text = json.dumps({**fields, "type": kind, "id": number}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            refuse(f"{kind} fields", f"values that JSON has ({error})", fields)
        group = f"{kind} {subject}" if kind == "session_signal" else kind
        return PendingFrame(number, text, asyncio.get_running_loop().create_future(), kind, subject, group)

    # The connection --------------------------------------------------------------------------------------------------

    async def _identify(self, socket: Socket) -> None:
        await socket.send(json.dumps({"type": "identify", "agent_id": self.agent, "token": self._token}))
        while (answer := self._decode(await socket.recv())).get("type") in _PUSHED:
            self._inbox.put(answer)  # a message may come before the answer
        kind = answer.get("type")
        if kind == "error":
            raise refusal_of_handshake(
                str(answer.get("error")), str(answer.get("detail")), f"{self.agent!r} at {self.url}"
            )
        if kind == "rate_limited":
            raise TryLater("too many connections from this address", asked_wait(_whole(answer.get("retry_after_ms"))))
        if kind != "identified":
            raise TryLater(f"expected identified, got {kind!r:.200}")
        self._subscribing = [self._item("channel_subscribe", {"channel": one}, one) for one in self._chat_channels]
        for number, item in enumerate(self._subscribing):
            item.answer.add_done_callback(partial(self._subscribed_again, item))
            item.number = number - len(self._subscribing)  # before everything else
            self._outbox.add(item)
        self._identified = answer if self._was_identified else None
        self._was_identified = True
        self._put_identified()

    def _subscribed_again(self, item: PendingFrame, answer: asyncio.Future[Frame]) -> None:
        if not answer.cancelled() and answer.exception() is not None:
            self._chat_channels.pop(item.subject, None)
        self._put_identified()

    def _put_identified(self) -> None:
        """Tell the application of the new connection, as soon as all subscriptions are restored."""
        subscribed = all([item.answer.done() for item in self._subscribing])
        if self._identified is not None and subscribed and not self._closed:
            self._inbox.put(self._identified)
            self._identified = None

    def _disconnected(self) -> None:
        self._identified = None
        for item in self._subscribing:
            item.answer.cancel()
            self._outbox.withdraw(item)
        for session in self._sessions.values():
            session.forget()

    # Frames of the hub -----------------------------------------------------------------------------------------------

    def _handle(self, text: bytes | str) -> Frame | None:
        frame = self._decode(text)
        kind = frame.get("type")
        if kind == "going_away":
            self._return_after = asked_wait(_whole(frame.get("retry_after_ms")))
            return None
        if kind == "unsubscribed" and "id" not in frame:  # the chat channel was deleted
            self._chat_channels.pop(str(frame.get("channel")), None)
        if "id" not in frame and kind not in ("error", "rate_limited"):
            return frame or None
        frame_id = str(frame.pop("id", ""))
        item = self._outbox.find(frame_id)
        if item is None or (not frame_id and kind not in ("error", "rate_limited")):  # it answers nothing
            return None
        wait = _whole(frame.get("retry_after_ms"))
        if kind == "rate_limit_warning":
            self._warned(item, frame)
        elif kind == "rate_limited":
            tier = self._learn(item, frame)
            self._denied(item, wait, f"the limit of {item.kind}, which is {tier}", tier)
        elif kind == "error" and frame.get("error") == "rate_limited" and wait:
            self._denied(item, wait, str(frame.get("detail")))
        elif kind == "error":
            self._answered(item, Refused(str(frame.get("error")), str(frame.get("detail"))))
            if frame.get("error") == "session_closed":  # elsewhere, or long ago
                self._sessions.pop(item.subject, None)
        else:
            self._note(item)
            self._answered(item, frame)
        return None

    def _decode(self, frame: bytes | str) -> Frame:
        """A frame with a type; an empty one if it can't be read, which is logged."""
        try:
            found = json.loads(frame)
        except (ValueError, RecursionError) as error:
            self._drop(frame, type(error).__name__)
            return {}
        if isinstance(found, dict) and isinstance(found.get("type"), str):
            return found
        self._drop(frame, f"expected an object with a type, got {type(found).__name__}")
        return {}

    def _warned(self, item: PendingFrame, frame: Frame) -> None:
        tier = self._learn(item, frame)
        remaining, capacity = _whole(frame.get("remaining")), max(_whole(frame.get("capacity")), 1)
        item.warned = True
        wait = _MINUTE // capacity  # a guess, until a denial states the wait
        self._tier(tier).warn(self._clock.now(), remaining, wait, self._backoff.jitter(wait))
        self._report(self._on_warning, Warned(item.id, tier, remaining, capacity))

    def _learn(self, item: PendingFrame, frame: Frame) -> str:
        tier = str(frame.get("tier"))[:128]
        if self._tier_of.get(item.kind) != tier:
            self._tier_of[item.kind] = tier
            for name in self._tiers.keys() - self._tier_of.values() - {_DEFAULT}:  # whatever tiers a hub makes up
                del self._tiers[name]
        return tier

    def _note(self, item: PendingFrame) -> None:
        """Keep track of subscriptions, which a new connection has to renew, and of closed sessions."""
        if item.kind == "channel_subscribe":
            self._chat_channels[item.subject] = None
        elif item.kind == "channel_unsubscribe":
            self._chat_channels.pop(item.subject, None)
        elif item.kind == "session_close":
            self._sessions.pop(item.subject, None)

    def _limit_of(self, item: PendingFrame) -> SendLimit:
        if item.kind == "session_signal":  # each session has its own budget
            return self._sessions.setdefault(item.subject, PacedLimit(self._in_flight))
        return self._tier(self._tier_of.get(item.kind, _DEFAULT))

    def _tier(self, name: str) -> TierLimit:
        return self._tiers.setdefault(name, TierLimit(self._in_flight))


def _whole(given: object) -> int:
    return given if isinstance(given, int) else 0
