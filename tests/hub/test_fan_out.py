"""One frame for many sockets: a few in each turn of the event loop, and in the same order for all."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from headgate.hub.app import Hub
from headgate.hub.sockets.socket import FanOut, Socket
from tests.support.hub import hub_settings
from tests.support.valkey import PATIENCE


class Reader:
    """The other end of a socket, which takes every frame at once."""

    def __init__(self, room: int = 256) -> None:
        self.heard: list[str] = []
        self.socket = Socket(self._receive, self._send, "127.0.0.1", room)

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        self.heard.append(message["text"])


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.now = 0
        self._task = asyncio.ensure_future(self._count())

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.now += 1

    def stop(self) -> None:
        self._task.cancel()


async def take_turns_until(true: Callable[[], bool]) -> None:
    """Let the loop take no turn more than it has to."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - nothing has an event for it
            await asyncio.sleep(0)


async def test_at_most_fifty_frames_are_pushed_in_a_turn_whoever_sends_them() -> None:
    readers, turns, fan_out = [Reader() for _ in range(120)], Turns(), FanOut()
    pushed: Counter[int] = Counter()

    def push(socket: Socket) -> bool:
        pushed[turns.now] += 1
        return socket.push("x")

    sockets = [reader.socket for reader in readers]
    assert all(await asyncio.gather(*(fan_out.push(sockets, push) for _ in range(4))))
    turns.stop()
    assert pushed.total() == 480
    assert max(pushed.values()) <= 50


async def test_a_frame_that_no_socket_takes_is_not_delivered() -> None:
    full, fan_out = Reader(room=0), FanOut()
    assert not await fan_out.push([full.socket] * 60, lambda socket: socket.push("x"))
    assert not await fan_out.push([], lambda socket: socket.push("x"))
    assert await fan_out.push([Reader().socket, *[full.socket] * 60], lambda socket: socket.push("x"))


async def test_a_reader_that_takes_everything_at_once_leaves_others_their_turns() -> None:
    reader, turns = Reader(), Turns()
    for _ in range(40):
        reader.socket.push("x")
    begin = turns.now
    await take_turns_until(lambda: len(reader.heard) == 40)
    turns.stop()
    assert turns.now - begin >= 39


async def test_all_subscribers_of_a_chat_channel_get_its_messages_in_the_same_order() -> None:
    async with Hub(hub_settings()) as hub:
        messages, readers, publications = hub.messages, [Reader() for _ in range(180)], []
        for reader in readers:
            messages.subscribe("general", reader.socket)
        async with messages._fan_out._turn:  # so that one is not delivered yet when the next is published
            for reader in readers[:3]:
                publications.append(asyncio.ensure_future(messages.publish("general", "boss", Raw(b"1"))))
                await take_turns_until(lambda: messages.accepted == len(publications))
                messages.unsubscribe_all(reader.socket)
        numbers = await asyncio.gather(*publications)
        await take_turns_until(lambda: not any(reader.socket.queued for reader in readers))
        heard = [[msgspec.json.decode(frame)["number"] for frame in reader.heard] for reader in readers]
        assert heard == [[]] * 3 + [numbers] * 177


async def test_a_subscriber_that_leaves_during_a_delivery_gets_nothing_more() -> None:
    async with Hub(hub_settings()) as hub:
        readers = [Reader() for _ in range(180)]
        for reader in readers:
            hub.messages.subscribe("general", reader.socket)
        publication = asyncio.ensure_future(hub.messages.publish("general", "boss", Raw(b"1")))
        await take_turns_until(lambda: bool(readers[0].heard))
        hub.messages.unsubscribe_all(readers[-1].socket)
        await publication
        assert (len(readers[-2].heard), readers[-1].heard) == (1, [])


async def test_a_reader_that_subscribes_again_is_not_told_of_the_deletion_before() -> None:
    async with Hub(hub_settings()) as hub:
        messages, reader = hub.messages, Reader()
        await messages.create_chat_channel("room", "boss", "")
        messages.subscribe("room", reader.socket)
        reader.socket.hold()  # as while it reads slowly
        await messages.delete_chat_channel("room", "boss", by_admin=False)
        await messages.create_chat_channel("room", "boss", "")
        messages.subscribe("room", reader.socket)
        reader.socket.release()
        await messages.publish("room", "boss", Raw(b"1"))
        await take_turns_until(lambda: bool(reader.heard))
        assert [msgspec.json.decode(frame)["type"] for frame in reader.heard] == ["channel_message"]


async def test_a_subscription_has_ended_when_the_reader_has_got_what_came_before() -> None:
    async with Hub(hub_settings()) as hub:
        messages, reader = hub.messages, Reader()
        messages.subscribe("general", reader.socket)
        reader.socket.hold()  # as while it reads slowly
        await messages.publish("general", "boss", Raw(b"1"))
        end = asyncio.ensure_future(messages.unsubscribe("general", reader.socket))
        await take_turns_until(lambda: not messages.chat_channel("general").subscribers)
        assert not end.done()
        assert reader.heard == []
        reader.socket.release()
        await end
        assert len(reader.heard) == 1
