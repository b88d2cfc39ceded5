"""A client of the hub's `/ws`: questions with their answers, and what the hub says by itself."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, TypeAlias

from headgate.client.connection import Caller, Later, Socket, checked_token, told
from headgate.client.outbox import Denial, Item, Lane, Paced, Refused
from headgate.errors import refuse
from headgate.gate.policy import Policy, check_agent
from headgate.limits.clock import Clock
from headgate.limits.numbers import whole

Frame: TypeAlias = dict[str, Any]

_MINUTE: Final = 60_000_000
_EVENTS: Final = ("message", "channel_message", "lagged", "task_assigned")


@dataclass(frozen=True)
class Warned:
    """Something passed, but little is left of a tier."""

    id: str
    """Of what passed."""
    tier: str
    remaining: int
    capacity: int


class Tier(Lane):
    """A tier of the hub. When nothing is left of it, the next one waits until there should be something again."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._interval = 0  # for something to be there again; 0 while that isn't known
        self._emptied: int | None = None  # when the last was taken

    def sent(self, now: int) -> None:
        super().sent(now)
        if self._emptied is not None and now - self._emptied > 2 * (self.due - self._emptied):
            self._emptied = None  # it could have been sent long before: others may have taken something meanwhile

    def scarce(self, now: int, remaining: int, wait: int, extra: int) -> None:
        """A warning came: one at a time from now on, and the next one later if nothing remains."""
        self.alone = True
        self._emptied = None
        if remaining <= 0:
            self._emptied = now
            self.due = max(self.due, now + (self._interval or wait) + extra)

    def passed(self, *, warned: bool) -> None:
        if not warned:
            self.alone = False
            self._emptied = None
            self._interval = 0  # there is more than was learnt

    def denied(self, now: int, wait: int, extra: int) -> None:
        if self._emptied is not None:
            self._interval = now + wait - self._emptied
        super().denied(now, wait, extra)


class HubClient(Caller[Frame]):
    """An agent's connection to a hub, which obeys its limits, loses nothing and is made again when it drops.

    `url` is the hub's address, `agent` the agent's id, and `token` its own. `on_rate_limited` is called with a `Denial`
    for each, `on_warning` with a `Warned`. At most `most` questions wait for their answers, of which `in_flight` of
    each tier are under way at a time: with more than one it is faster where the hub is far away, but around a denial
    some may overtake others. At most `buffer` frames of the hub wait to be taken. A frame has at most `largest` bytes;
    that is the hub's `max_frame`.

    Use it by `async with`. `async for` gives what the hub says by itself: `message`, `channel_message`, `lagged`,
    `task_assigned`, and `identified` whenever it has connected again.
    """

    path = "/ws"

    def __init__(
        self,
        url: str,
        agent: str,
        token: str,
        *,
        on_rate_limited: Callable[[Denial], object] | None = None,
        on_warning: Callable[[Warned], object] | None = None,
        most: int = 256,
        in_flight: int = 1,
        buffer: int = 256,
        largest: int = 65_536,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        super().__init__(
            url,
            on_rate_limited=on_rate_limited,
            most=most,
            buffer=buffer,
            largest=largest,
            clock=clock,
            random=random,
        )
        self.agent: Final = check_agent(agent)
        self._token: Final = checked_token(token)
        self._on_warning: Final = on_warning
        self._in_flight: Final = whole("in_flight", in_flight)
        # The usual tiers; what the hub says of one is believed rather.
        usual = Policy().actions.items()
        self._tier_of: Final = {action: tier for (channel, action), tier in usual if channel == "ws"}
        self._tiers: Final[dict[str, Tier]] = {}
        self._sessions: Final[dict[str, Paced]] = {}
        self._channels: Final[dict[str, None]] = {}
        self._subscribing: list[Item] = []  # again, since the connection is a new one
        self._ids: Final = count(1)
        self._known = False  # to the hub, ever

    async def ask(self, kind: str, /, *, wait: bool = True, **fields: Any) -> Frame:
        """Send a frame of a type, and return the one that answers it.

        `Refused` says that the hub didn't do it, and why. When as much waits as may it waits for room, or raises
        `QueueFull` if `wait` is False. If this call is cancelled, as by `asyncio.timeout`, it is not sent, or not
        again. Channels that were subscribed to are subscribed to again when it has connected again.
        """
        if kind in ("", "identify"):
            refuse("kind", "the type of a frame, such as ping; the client identifies by itself", kind)
        subject = fields.get("session" if kind.startswith("session_") else "channel", "")
        return await self._ask(self._item(kind, fields, str(subject)), wait)  # type: ignore[no-any-return]

    def _item(self, kind: str, fields: Frame, subject: str) -> Item:
        number = f"{next(self._ids)}"
        try:
            text = json.dumps({**fields, "type": kind, "id": number}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            refuse(f"{kind}: its fields", f"what JSON has ({error})", fields)
        group = f"{kind} {subject}" if kind == "session_signal" else kind
        return Item(number, text, asyncio.get_running_loop().create_future(), kind, subject, group)

    # The connection --------------------------------------------------------------------------------------------------

    async def _introduce(self, socket: Socket) -> None:
        await socket.send(json.dumps({"type": "identify", "agent_id": self.agent, "token": self._token}))
        while (answer := _read(await socket.recv())).get("type") in _EVENTS:
            self._inbox.put(answer)  # another agent was quicker than the hub
        kind = answer.get("type")
        if kind == "error" and answer.get("error") not in ("unavailable", "internal"):
            raise Refused(str(answer.get("error")), f"{self.agent!r} at {self.url}: {answer.get('detail')}")
        if kind == "rate_limited":
            raise Later("too many came from here", told(_whole(answer.get("retry_after_ms"))))
        if kind != "identified":
            raise Later(f"expected identified, got {str(answer.get('detail', kind))!r}")
        if self._known:
            self._inbox.put(answer)
        self._known = True
        self._subscribing = [self._item("channel_subscribe", {"channel": one}, one) for one in self._channels]
        for number, item in enumerate(self._subscribing):
            item.answer.add_done_callback(partial(self._subscribed_again, item))
            item.number = number - len(self._subscribing)  # before everything else
            self._outbox.add(item)

    def _subscribed_again(self, item: Item, answer: asyncio.Future[Frame]) -> None:
        if not answer.cancelled() and answer.exception() is not None:
            self._channels.pop(item.subject, None)

    def _parted(self) -> None:
        for item in self._subscribing:
            item.answer.cancel()
            self._outbox.withdraw(item)
        for session in self._sessions.values():
            session.forget()

    # What the hub says -----------------------------------------------------------------------------------------------

    def _hear(self, text: bytes | str) -> Frame | None:
        frame = _read(text)
        kind = frame.get("type")
        if kind == "going_away":
            self._return_after = told(_whole(frame.get("retry_after_ms")))
            return None
        if "id" not in frame and kind not in ("error", "rate_limited"):
            return frame if isinstance(kind, str) else None
        item = self._outbox.find(str(frame.pop("id", "")))
        if item is None:
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
        else:
            self._note(item)
            self._answered(item, frame)
        return None

    def _warned(self, item: Item, frame: Frame) -> None:
        tier = self._learn(item, frame)
        remaining, capacity = _whole(frame.get("remaining")), max(_whole(frame.get("capacity")), 1)
        item.warned = True
        wait = _MINUTE // capacity  # as is usual, until a denial tells
        self._tier(tier).scarce(self._clock.now(), remaining, wait, self._extra(wait))
        self._report(Warned(item.id, tier, remaining, capacity), self._on_warning)

    def _learn(self, item: Item, frame: Frame) -> str:
        tier = self._tier_of[item.kind] = str(frame.get("tier"))
        return tier

    def _note(self, item: Item) -> None:
        """Remember what a new connection has to be frame, and forget what is over."""
        if item.kind == "channel_subscribe":
            self._channels[item.subject] = None
        elif item.kind == "channel_unsubscribe":
            self._channels.pop(item.subject, None)
        elif item.kind == "session_close":
            self._sessions.pop(item.subject, None)

    def _lane(self, item: Item) -> Lane:
        if item.kind == "session_signal":  # each session has a budget of its own
            return self._sessions.setdefault(item.subject, Paced(self._in_flight))
        return self._tier(self._tier_of.get(item.kind, "normal"))

    def _tier(self, name: str) -> Tier:
        return self._tiers.setdefault(name, Tier(self._in_flight))


def _read(frame: bytes | str) -> Frame:
    """A frame; an empty one for what no hub of ours says."""
    try:
        told = json.loads(frame)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _whole(given: object) -> int:
    return given if isinstance(given, int) else 0
