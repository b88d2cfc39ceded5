"""Messages: from agent to agent, into mailboxes, and to chat channels."""

import asyncio
import time
from collections import Counter
from functools import partial
from heapq import nsmallest
from sqlite3 import Connection
from typing import Any, Final, NamedTuple

import msgspec
import structlog
from msgspec import Raw, Struct

from headgate.hub.agents.presence import Presence
from headgate.hub.agents.registry import Registry
from headgate.hub.background import BackgroundTasks
from headgate.hub.errors import RequestError
from headgate.hub.json_bounds import check_numbers
from headgate.hub.settings import HubSettings
from headgate.hub.sockets.frames import (
    ChannelInfo,
    ChannelMessage,
    ChannelName,
    Lagged,
    Message,
    Post,
    Unsubscribed,
    encode,
)
from headgate.hub.sockets.socket import MAX_BYTES, FanOut, Socket
from headgate.hub.storage.database import Database, DatabaseError, Retention
from headgate.hub.storage.rows import Time, json_of, row_of
from headgate.hub.timer import Timer
from headgate.limits.clock import Clock

FIRST_CHAT_CHANNEL: Final = "general"
MAX_UNWRITTEN: Final = 16 * 1024 * 1024
"""Bytes of undelivered messages in memory while the disk can't be written; then no more are accepted."""
_RETRY: Final = 1_000_000  # microseconds until the disk is tried again

_log = structlog.get_logger("headgate.hub")


class Mail(Struct):
    """A message in a mailbox."""

    number: int
    sender: str = msgspec.field(name="from")
    body: Raw
    at: float


class _ChatChannel:
    """A chat channel and its subscribers."""

    def __init__(self, name: str, creator: str, about: str, at: float) -> None:
        self.name, self.creator, self.about, self.at = name, creator, about, at
        self.subscribers: dict[Socket, int] = {}
        """Each with the number of messages that it has missed without a notice."""
        self.delivery: Final = asyncio.Lock()
        """Locked while a message is delivered, so that all subscribers get messages in the same order."""

    def deliver(self, socket: Socket, frame: str) -> bool:
        """Push a message. If the queue is full it is skipped, and so are later ones until the reader gets a notice."""
        if socket not in self.subscribers:  # it has unsubscribed meanwhile
            return False
        if self.subscribers[socket]:
            self.subscribers[socket] += 1
            return False
        if not socket.push(frame):
            self.subscribers[socket] = 1
            socket.push_last(self.name, lambda: self._notices(socket))
            return False
        return True

    def _notices(self, socket: Socket) -> list[str]:
        missed = self.subscribers.get(socket, 0)
        if missed:  # otherwise it has unsubscribed
            self.subscribers[socket] = 0
        return _lagged(self.name, missed)

    def info(self) -> ChannelInfo:
        return ChannelInfo(self.name, self.creator, self.about, self.at, len(self.subscribers))


class MessageBroker:
    """Delivers messages. An accepted message is queued for a socket, or in the database.

    It is not lost, unless a connection ends before it is sent, and the mailbox is full beyond its maximum or the disk
    can't be written: see `save_unsent`.
    """

    def __init__(
        self, database: Database, presence: Presence, registry: Registry, clock: Clock, settings: HubSettings
    ) -> None:
        self._database, self._presence, self._registry, self._clock = database, presence, registry, clock
        self._most_mail, self._most_mail_from_one = settings.max_mail, settings.max_mail_per_sender
        self._most_unsent: Final = settings.max_waiting
        self._most_chat_channels, self._most_own_chat_channels = settings.max_channels, settings.max_channels_per_agent
        self._retention: Final = Retention("posts", "channel", settings.max_history)
        self._chat_channels: dict[str, _ChatChannel] = {}
        self._fan_out: Final = FanOut()
        self._unwritten: Final[dict[str, list[Message]]] = {}  # by recipient
        self._unwritten_bytes = 0
        self._flushing: Final = asyncio.Lock()
        self._disk_failed = False
        self._timer: Timer | None = None
        self._background: Final = BackgroundTasks()
        self._closed = False
        self.accepted = 0
        """The number of accepted messages, to agents and to chat channels."""
        self.lost = 0
        """The number of accepted messages that could not be put into a mailbox when a connection ended."""

    async def start(self) -> None:
        """Read the chat channels; at the first start there is one."""

        def read(db: Connection) -> list[_ChannelRow]:
            first = (FIRST_CHAT_CHANNEL, time.time())
            db.execute("INSERT OR IGNORE INTO channels VALUES (?, '', 'where everybody begins', ?)", first)
            db.execute("DELETE FROM posts WHERE channel NOT IN (SELECT name FROM channels)")
            rows = db.execute("SELECT name, creator, about, at FROM channels ORDER BY name")
            effect = "the chat channel is missing; its name stays taken"
            return list(self._database.rows.read("channels", rows, _channel_row, effect))

        self._chat_channels = {row.name: _ChatChannel(*row) for row in await self._database.run(read)}

    # From agent to agent ---------------------------------------------------------------------------------------------

    async def send(self, sender: str, to: str, body: Raw) -> bool:
        """Deliver a message, or put it into the mailbox; whether it was delivered."""
        check_numbers(bytes(body))
        if self._unwritten_bytes > MAX_UNWRITTEN:
            raise RequestError(503, "unavailable", "undelivered messages wait for the hub's disk; try again later")
        message = Message(sender=sender, body=body, at=time.time())
        frame = encode(message)
        delivered = self._presence.push(to, frame, message)
        if not delivered:
            if not await self._registry.knows(to):
                raise RequestError(404, "unknown_agent", f"there is no agent {to!r}")
            delivered = self._presence.push(to, frame, message)  # it may have connected meanwhile
        if not delivered:  # whoever connects from now on counts its mail later: jobs run in order
            await self._database.run(lambda db: self._insert_checked(db, to, message))
        self.accepted += 1
        return delivered

    async def save_unsent(self, agent: str, socket: Socket) -> None:
        """Put the messages that a closed socket has not sent into the agent's mailbox, even if that is full.

        They were accepted already. So there is room for all that can be queued for an agent beyond the mailbox's
        maximum and beyond each sender's. What is more is lost: otherwise an agent that hangs up again and again without
        reading could fill the disk. While the disk can't be written, messages are kept in memory.
        """
        unsent = [content for content in socket.take_unsent() if isinstance(content, Message)]
        if unsent:
            self._unwritten.setdefault(agent, []).extend(unsent)
            self._unwritten_bytes += _size(unsent)
            await self._background.finish(self._flush())

    async def _flush(self) -> None:
        """Put into mailboxes what waits in memory, oldest first; later again if the disk can't be written.

        If the hub ends before that, it is lost.
        """
        async with self._flushing:
            while self._unwritten:
                agent = next(iter(self._unwritten))
                unsent = sorted(self._unwritten.pop(agent), key=lambda message: message.at)  # of several connections
                try:
                    lost = await self._database.run(partial(self._insert_unsent, to=agent, messages=unsent))
                except DatabaseError as error:
                    self._unwritten[agent] = unsent + self._unwritten.get(agent, [])
                    if self._closed:
                        self._give_up(error)
                        return
                    if not self._disk_failed:
                        _log.error("undelivered messages wait for the disk", reason=str(error))
                    self._disk_failed = True
                    if self._timer is None:
                        self._timer = Timer(self._clock, self._clock.now() + _RETRY, self._retry)
                    return
                self._disk_failed = False
                if lost:
                    self.lost += lost
                    _log.warning("undelivered messages are lost: the mailbox is full", agent=agent, messages=lost)
                self._unwritten_bytes -= _size(unsent)

    def _give_up(self, error: DatabaseError) -> None:
        lost = sum(map(len, self._unwritten.values()))
        self._unwritten.clear()
        self._unwritten_bytes = 0
        self.lost += lost
        _log.error("undelivered messages are lost: the disk can't be written", messages=lost, reason=str(error))

    def _retry(self) -> None:
        self._timer = None
        self._background.spawn(self._flush())

    async def close(self) -> None:
        """Write what waits in memory."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._background.finish(self._flush())
        await self._background.wait()

    def _insert_checked(self, db: Connection, to: str, message: Message) -> None:
        """Put a message into a mailbox, unless that or the sender's share of it is full."""
        (waiting,) = db.execute("SELECT COUNT(*) FROM mail WHERE recipient = ?", (to,)).fetchone()
        if waiting >= self._most_mail:
            raise RequestError(409, "mailbox_full", f"{to!r} is away, and {waiting} messages wait for it already")
        own = "SELECT COUNT(*) FROM mail WHERE recipient = ? AND sender = ?"
        (waiting,) = db.execute(own, (to, message.sender)).fetchone()
        if waiting >= self._most_mail_from_one:
            raise RequestError(409, "mailbox_full", f"{to!r} is away, and {waiting} messages of yours wait for it")
        _insert_mail(db, to, [message])

    async def drop_agent_data(self) -> None:
        """Drop all undelivered messages, and make all chat channels the admin's."""

        def drop(db: Connection) -> None:
            db.execute("DELETE FROM mail")
            db.execute("UPDATE channels SET creator = ''")

        async with self._flushing:
            await self._database.run(drop)
            self._unwritten.clear()
            self._unwritten_bytes = 0
        for channel in self._chat_channels.values():
            channel.creator = ""

    def _insert_unsent(self, db: Connection, to: str, messages: list[Message]) -> int:
        """Put messages into a mailbox as far as there is room, oldest first; the number of the others."""
        counts = "SELECT sender, COUNT(*) FROM mail WHERE recipient = ? GROUP BY sender"
        waiting: Counter[str] = Counter(dict(db.execute(counts, (to,)).fetchall()))
        most, most_from_one = self._most_mail + self._most_unsent, self._most_mail_from_one + self._most_unsent
        room = most - waiting.total()
        fitting: list[Message] = []
        for message in messages:
            if len(fitting) < room and waiting[message.sender] < most_from_one:
                waiting[message.sender] += 1
                fitting.append(message)
        _insert_mail(db, to, fitting)
        return len(messages) - len(fitting)

    async def mail(self, agent: str, limit: int, after: int = 0) -> list[Mail]:
        """The messages in an agent's mailbox after a number, oldest first. They stay until they are acknowledged."""
        wanted = "SELECT number, sender, body, at FROM mail WHERE recipient = ? AND number > ? ORDER BY number"
        return [Mail(*row) for row in await self._page("mail", limit, wanted, agent, after)]

    async def waiting(self, agent: str) -> int:
        """The number of messages in an agent's mailbox."""
        wanted = "SELECT COUNT(*) FROM mail WHERE recipient = ?"
        (count,) = await self._database.run(lambda db: db.execute(wanted, (agent,)).fetchone())
        return int(count)

    async def acknowledge(self, agent: str, numbers: list[int]) -> int:
        """Delete messages from an agent's mailbox; the number deleted."""

        def drop(db: Connection) -> int:
            own = [(agent, number) for number in numbers]
            return db.executemany("DELETE FROM mail WHERE recipient = ? AND number = ?", own).rowcount

        return await self._database.run(drop)

    # Chat channels ----------------------------------------------------------------------------------------------------

    def chat_channels(self, limit: int, after: str = "") -> tuple[list[ChannelInfo], bool]:
        """The next chat channels by name, and whether there are more."""
        found = nsmallest(limit + 1, (name for name in self._chat_channels if name > after))
        return [self._chat_channels[name].info() for name in found[:limit]], len(found) > limit

    def chat_channel(self, name: str) -> ChannelInfo:
        return self._find(name).info()

    async def create_chat_channel(self, name: str, creator: str, about: str) -> ChannelInfo:
        """Create a chat channel."""
        at = time.time()

        def write(db: Connection) -> None:
            own = "SELECT COUNT(*) FROM channels WHERE creator = ?"
            (count,) = db.execute(own, (creator,)).fetchone()
            if count >= self._most_own_chat_channels:
                raise RequestError(409, "too_many_channels", f"{count} chat channels are yours: delete one first")
            (count,) = db.execute("SELECT COUNT(*) FROM channels").fetchone()
            if count >= self._most_chat_channels:
                raise RequestError(
                    409, "too_many_channels", f"there are {count} chat channels, and there may be no more"
                )
            if not db.execute(
                "INSERT OR IGNORE INTO channels VALUES (?, ?, ?, ?)", (name, creator, about, at)
            ).rowcount:
                raise RequestError(409, "exists", f"there is a chat channel {name!r} already")

        await self._database.run(write)
        self._chat_channels[name] = _ChatChannel(name, creator, about, at)
        return self._chat_channels[name].info()

    async def delete_chat_channel(self, name: str, agent: str, *, by_admin: bool, by: str = "") -> None:
        """Delete a chat channel with its messages: by its creator, or by an admin. `by` is for the log."""
        channel = self._find(name)
        if not by_admin and channel.creator != agent:
            raise RequestError(403, "forbidden", f"only {channel.creator!r} and the admin can delete {name!r}")
        if name == FIRST_CHAT_CHANNEL:
            raise RequestError(409, "not_possible", f"{name!r} always exists")

        def delete(db: Connection) -> None:
            if not db.execute("DELETE FROM channels WHERE name = ? AND at = ?", (name, channel.at)).rowcount:
                raise _unknown_channel(name)  # there may be another of this name by now
            db.execute("DELETE FROM posts WHERE channel = ?", (name,))

        await self._database.run(delete)
        if self._chat_channels.get(name) is channel:
            del self._chat_channels[name]
        await self._fan_out.push(channel.subscribers, lambda socket: self._end_subscription(channel, socket))
        _log.info("chat channel deleted", channel=name, by=by or agent)

    def _end_subscription(self, channel: _ChatChannel, socket: Socket) -> bool:
        """Tell a subscriber of a deleted chat channel, even if its queue is full: once it has caught up."""
        missed = channel.subscribers.pop(socket, None)
        if missed is None:  # it has unsubscribed meanwhile
            return False

        def notices() -> list[str]:
            there = self._chat_channels.get(channel.name)
            if there is not None and socket in there.subscribers:  # it has subscribed to another of this name
                return []
            return [*_lagged(channel.name, missed), encode(Unsubscribed(channel=channel.name))]

        socket.push_last(channel.name, notices)
        return True

    async def publish(self, name: str, sender: str, body: Raw) -> int:
        """Add a message to a chat channel's history, send it to all subscribers, and return its number."""
        check_numbers(bytes(body))
        channel, at = self._find(name), time.time()

        def write(db: Connection) -> int:
            row = (name, sender, bytes(body), at, name, channel.at)
            inserted = db.execute(
                "INSERT INTO posts (channel, sender, body, at) SELECT ?, ?, ?, ? "
                "WHERE EXISTS (SELECT 1 FROM channels WHERE name = ? AND at = ?)",
                row,
            )
            if not inserted.rowcount:  # it was deleted meanwhile
                raise _unknown_channel(name)
            self._retention.added(db, name)
            return inserted.lastrowid or 0

        number = await self._database.run(write)
        self.accepted += 1
        frame = encode(ChannelMessage(channel=name, number=number, sender=sender, body=body, at=at))
        async with channel.delivery:
            await self._fan_out.push(channel.subscribers, lambda socket: channel.deliver(socket, frame))
        return number

    def subscribe(self, name: str, socket: Socket) -> None:
        self._find(name).subscribers.setdefault(socket, 0)

    async def unsubscribe(self, name: str, socket: Socket) -> None:
        """End a subscription, and wait until the reader has got what came before the end."""
        missed = self._find(name).subscribers.pop(socket, 0)
        await socket.flush()
        for frame in _lagged(name, missed):
            await socket.send(frame)

    def unsubscribe_all(self, socket: Socket) -> None:
        for channel in self._chat_channels.values():
            channel.subscribers.pop(socket, None)

    async def history(self, name: str, limit: int, before: int | None = None) -> list[Post]:
        """The newest messages of a chat channel, or the newest before a number, oldest first."""
        self._find(name)
        wanted = "SELECT number, sender, body, at FROM posts WHERE channel = ? AND number < ? ORDER BY number DESC"
        rows = await self._page("posts", limit, wanted, name, 2**62 if before is None else before)
        return [Post(*row) for row in reversed(rows)]

    async def _page(self, table: str, limit: int, wanted: str, *where: object) -> "list[_MessageRow]":
        """As many messages as fit into one answer, at least one."""

        def read(db: Connection) -> list[_MessageRow]:
            page: list[_MessageRow] = []
            size = 0
            for row in self._database.rows.read(table, db.execute(wanted, where), _message_row, "the message is lost"):
                size += len(bytes(row.body))
                if len(page) == limit or (page and size > MAX_BYTES):
                    break
                page.append(row)
            return page

        return await self._database.run(read)

    def _find(self, name: str) -> _ChatChannel:
        channel = self._chat_channels.get(name)
        if channel is None:
            raise _unknown_channel(name)
        return channel


def _lagged(channel: str, missed: int) -> list[str]:
    return [encode(Lagged(channel=channel, missed=missed))] if missed else []


def _unknown_channel(name: str) -> RequestError:
    return RequestError(404, "unknown_channel", f"there is no chat channel {name!r}")


def _insert_mail(db: Connection, to: str, messages: list[Message]) -> None:
    rows = [(to, message.sender, bytes(message.body), message.at) for message in messages]
    db.executemany("INSERT INTO mail (recipient, sender, body, at) VALUES (?, ?, ?, ?)", rows)


def _size(messages: list[Message]) -> int:
    return sum(len(bytes(message.body)) for message in messages)


class _ChannelRow(NamedTuple):
    name: ChannelName
    creator: str
    about: str
    at: Time


_channel_row: Final = row_of(_ChannelRow)


class _MessageRow(NamedTuple):
    number: int
    sender: str
    body: Raw
    at: float


def _message_row(row: tuple[Any, ...]) -> _MessageRow:
    number, sender, body, at = msgspec.convert(row, tuple[int, str, bytes, Time], builtin_types=(bytes,))
    return _MessageRow(number, sender, json_of(body), at)
