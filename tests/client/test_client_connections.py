"""The connections of both clients that drop: when they are made again, and what becomes of messages."""

import asyncio
import json
import os
import pickle
import re
import signal
import traceback
from pathlib import Path
from random import Random
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection

from headgate import HeadgateError, ManualClock, Policy
from headgate.client import Disconnected, HubClient, QueueFull, Refused, RelayClient, Unsent
from headgate.client.backoff import ReconnectBackoff, asked_wait
from headgate.hub.sockets.socket import Socket
from tests.support.event_loop import holds_for_turns, run, wait_until
from tests.support.hub import HubServer
from tests.support.hub_clients import (
    WELCOMES,
    Kind,
    RelayKind,
    both_clients,
    check_reconnects_when_told,
    take,
    websocket_url,
    with_hub,
    with_limited_hub,
)
from tests.support.hub_process import HubProcess
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once


SECOND = 1_000_000


async def wait_for_only_socket(hub: HubServer) -> Socket:
    """The one connection that the hub has, once it has let go of the one before."""
    await wait_until(lambda: len(hub.hub.presence.sockets) == 1, "that one connection is left")
    (socket,) = hub.hub.presence.sockets
    return socket


async def advance_until_connected(client: RelayClient, clock: ManualClock) -> None:
    """Let time pass until a client has connected again."""

    def moved() -> bool:
        clock.advance(0.05)
        return client.connected

    await wait_until(moved, "the connection")


@pytest.mark.long
def test_d5_unanswered_and_new_messages_arrive_after_a_hub_was_killed(tmp_path: Path) -> None:
    def start() -> HubProcess:
        hubs.append(HubProcess(tmp_path, "--port", str(port), "--relay-rate-limit", "off"))
        return hubs[-1]

    async def main() -> None:
        hub = start()
        tokens = [hub.register(name) for name in ("alice", "bob")]
        ours, theirs = ManualClock(), ManualClock()
        alice = RelayClient(f"http://{hub}", "alice", tokens[0], clock=ours, random=Random(1), in_flight=4)
        bob = RelayClient(f"ws://{hub}/", "bob", tokens[1], clock=theirs, random=Random(2))
        async with alice, bob:
            for number in range(10):
                await alice.send("bob", b"%d" % number)
            found = await take(bob, 10)
            os.kill(hub.pid, signal.SIGSTOP)
            sends = [asyncio.create_task(alice.send("bob", b"%d" % number)) for number in range(10, 30)]
            await wait_until(lambda: len(alice._outbox.in_flight) == 4, "as many as may be in flight")
            assert await holds_for_turns(
                lambda: not any(send.done() for send in sends)
            )  # handed over, and not answered
            assert len(alice._outbox.in_flight) == 4
            sends.pop(1).cancel()  # which is not sent again then
            await asyncio.to_thread(hub.kill)
            await wait_until(lambda: not alice.connected and not bob.connected, "that they notice")
            sends += [asyncio.create_task(alice.send("bob", b"%d" % number)) for number in range(30, 40)]
            await again_refused(alice, ours)
            await asyncio.to_thread(start)
            await advance_until_connected(bob, theirs)
            await advance_until_connected(alice, ours)
            found += await take(bob, 29)
            await asyncio.gather(*sends)
            assert [one.body for one in found] == [b"%d" % number for number in range(40) if number != 11]
            assert len({one.id for one in found}) == 39

    async def again_refused(client: RelayClient, clock: ManualClock) -> None:
        for _ in range(20):
            clock.advance(5)
            assert await holds_for_turns(lambda: not client.connected, turns=5)

    hubs: list[HubProcess] = []
    with unused_port() as port:
        try:
            run(main())
        finally:
            for hub in hubs:
                hub.kill()


@both_clients
@with_hub()
async def test_a_hub_that_stops_says_when_to_come_back_and_is_believed(
    hub: HubServer, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    async with kind.connect(hub, "alice") as alice:
        await check_reconnects_when_told(hub, alice, caplog)


@both_clients
@with_hub(Policy(addresses={"connection": "60/minute"}))
async def test_a_connection_that_is_denied_is_tried_again_after_the_wait(
    hub: HubServer, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    token = hub.register("alice")
    async with kind.connect(hub, "alice", token) as alice:
        socket = await wait_for_only_socket(hub)
        check = hub.hub.gate.acheck_address
        while hub.run(check("127.0.0.1", "connection")):
            pass
        hub.run(socket.close(1001, ""))
        await wait_until(lambda: not alice.connected, "the end")
        hub.clock.advance(0.5)
        await wait_until(lambda: "HTTP status 429" in caplog.text, "the refusal")
        found = re.search(r"HTTP status 429'; trying again in ([\d.]+) s", caplog.text)
        assert found is not None
        assert 2.0 <= float(found[1]) <= 2.2
        hub.clock.advance(2.2)
        await wait_until(lambda: alice.connected, "the connection")


@both_clients
def test_a_hub_that_is_away_at_first_is_tried_less_and_less_often(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    def pauses() -> list[float]:
        return [float(text) for text in re.findall(r"trying again in ([\d.]+) s", caplog.text)]

    async def main() -> None:
        clock = ManualClock()
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), kind.client(url, "alice", "token", clock=clock):
                pass
        client = kind.client(url, "alice", "token", clock=clock)
        entering = asyncio.create_task(client.__aenter__())
        caplog.clear()
        for number in range(1, 12):
            await wait_until(lambda number=number: len(pauses()) == number, "the next attempt")  # type: ignore[misc]
            clock.advance(30)
        found = pauses()
        assert 0.2 <= found[0] <= 0.5
        assert found[1:5] == sorted(found[1:5])
        assert 15 <= found[-1] <= 30
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)

    with unused_port() as port:
        run(main())


@both_clients
@with_hub()
async def test_a_connection_that_was_good_for_something_is_made_again_soon(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "alice") as alice:
        for _ in range(8):
            with pytest.raises(Refused, match=kind.undeliverable):
                await kind.send(alice, "nobody", "")
            socket = await wait_for_only_socket(hub)
            hub.run(socket.close(1001, ""))
            await wait_until(lambda: not alice.connected, "the end")
            hub.clock.advance(0.5)
            await wait_until(lambda: alice.connected, "the connection")


def test_connections_are_tried_less_and_less_often_and_never_before_the_hub_says() -> None:
    backoff = ReconnectBackoff(Random(1))
    pauses = [backoff.pause(failures) / SECOND for failures in range(1, 1000)]
    assert 0.25 <= pauses[0] <= 0.5
    assert min(pauses[2:]) >= 1
    assert all(15 <= pause <= 30 for pause in pauses[10:])
    assert len(set(pauses[10:])) > 900
    told = [backoff.pause(1, 2 * SECOND) for _ in range(1000)]
    assert min(told) >= 2 * SECOND
    assert max(told) <= 2.2 * SECOND
    assert len(set(told)) > 900
    assert min(backoff.pause(10, asked_wait(0)) for _ in range(1000)) >= 15 * SECOND
    assert asked_wait(10**400) == 86_400 * SECOND


def make_failing_send(error: type[Exception]) -> Any:
    async def send(*_: object) -> None:
        raise error("as websockets does if the hub closes while it writes")

    return send


def make_raising_handler(error: type[Exception]) -> Any:
    def handle(_: object) -> None:
        raise error("as a library may that reads what a hub has sent")

    return handle


@both_clients
@pytest.mark.parametrize("error", [AttributeError, RuntimeError, MemoryError])
@with_hub()
async def test_d5_an_exception_that_nobody_foresaw_is_a_lost_connection(
    hub: HubServer, kind: Kind, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kind.connect(hub, "alice") as alice, kind.connect(hub, "bob") as bob:
        with monkeypatch.context() as broken:
            broken.setattr(ClientConnection, "send", make_failing_send(error))
            send = asyncio.create_task(kind.send(alice, "bob", "hello"))
            await wait_until(lambda: not alice.connected, "the end")
        hub.clock.advance(0.5)
        await send
        assert await kind.take(bob, 1) == ["hello"]


@both_clients
@pytest.mark.parametrize("error", [AttributeError, RuntimeError, MemoryError])
@pytest.mark.parametrize("moment", ["it reads", "it connects"])
@with_hub()
async def test_d5_an_exception_that_nobody_foresaw_is_a_lost_connection_whatever_it_interrupts(
    hub: HubServer, kind: Kind, moment: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[Disconnected] = []
    alice = kind.connect(hub, "alice", on_disconnected=losses.append)
    async with kind.connect(hub, "bob") as bob:
        if moment == "it reads":
            await alice.__aenter__()
        with monkeypatch.context() as broken:
            entering: asyncio.Task[Any] | None = None
            if moment == "it reads":
                broken.setattr(alice, "_handle", make_raising_handler(error))
                await kind.send(bob, "alice", "read by nobody")
            else:
                broken.setattr(alice, "_identify", make_failing_send(error))
                entering = asyncio.create_task(alice.__aenter__())
            await wait_until(lambda: losses, "the loss")
        hub.clock.advance(0.5)
        await wait_until(lambda: alice.connected, "the connection")
        if entering is not None:
            await entering
        await kind.send(alice, "bob", "hello")
        assert await kind.take(bob, 1) == ["hello"]
        await alice.close()
    assert [error.__name__ in loss.reason for loss in losses] == [True]


@both_clients
@with_limited_hub
async def test_d5_a_close_that_is_cancelled_sends_nothing_more(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "bob") as bob:
        alice = await kind.connect(hub, "alice").__aenter__()
        await kind.send(alice, "bob", "first")
        send = asyncio.create_task(kind.send(alice, "bob", "second"))
        await wait_until(lambda: alice.delay, "the denial")
        closing = asyncio.create_task(alice.close(within=1000))
        assert await holds_for_turns(lambda: not closing.done(), turns=5)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(Unsent, match="not sent"):
            await asyncio.wait_for(send, PATIENCE)
        await wait_until(lambda: len(hub.hub.presence.sockets) == 1, "that it is gone")
        hub.clock.advance(600)
        assert await alice.close() == 0
        assert await kind.take(bob, 1) == ["first"]
        assert await holds_for_turns(lambda: not bob._inbox._messages)
        assert not alice.connected


@both_clients
@with_hub()
async def test_a_close_counts_only_calls_that_were_not_answered(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "alice") as alice:
        send = asyncio.create_task(kind.send(alice, "alice", "a"))
        await asyncio.sleep(0)
        assert alice.waiting
        while alice.waiting:  # noqa: ASYNC110 - to the very turn in which the answer comes
            await asyncio.sleep(0)
        assert not send.done()  # it is answered, and goes on in the next turn of the loop
        assert await alice.close(0) == 0
        await send


@both_clients
@with_hub()
async def test_d5_a_refusal_is_raised_anew_by_each_call(hub: HubServer, kind: Kind) -> None:
    hub.register("alice")
    client = kind.connect(hub, "alice", "hg_wrong")
    with pytest.raises(Refused) as first:
        await client.__aenter__()
    found = [first.value]
    for _ in range(200):
        with pytest.raises(Refused, match=r"^unauthorized: ") as info:
            await kind.send(client, "bob", "")
        assert len(traceback.extract_tb(info.value.__traceback__)) < 10
        found.append(info.value)
    with pytest.raises(Refused):
        await anext(client)
    assert len(set(map(id, found))) == 201
    assert [error.__context__ for error in found[1:]] == [None] * 200


@both_clients
@with_limited_hub
async def test_d5_pending_calls_share_no_traceback(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "alice") as alice:
        await kind.send(alice, "alice", "first")
        sends = [asyncio.create_task(kind.send(alice, "alice", str(number))) for number in range(20)]
        await wait_until(lambda: alice.delay, "the denial")
        hub.run(hub.hub.registry.revoke("alice"))
        await wait_until(lambda: not alice.connected, "the end")
        hub.clock.advance(0.5)
        errors = await asyncio.gather(*sends, return_exceptions=True)
        assert len(set(map(id, errors))) == 20
        assert {str(error) for error in errors} == {str(errors[0])}


@both_clients
async def test_d5_what_was_in_flight_on_a_lost_connection_may_have_arrived(kind: Kind) -> None:
    async def hang_up(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(WELCOMES["relay" if kind is RelayKind else "hub"])
        await socket.recv()

    async with websocket_url(hang_up) as url:
        client = kind.client(url, "alice", "token", clock=ManualClock())
        await client.__aenter__()
        sends = [asyncio.create_task(kind.send(client, "bob", body)) for body in ("first", "second")]
        await wait_until(lambda: not client.connected, "the end")
        assert await client.close(0) == 2
        errors = await asyncio.gather(*sends, return_exceptions=True)
        assert [isinstance(error, Unsent) and error.maybe for error in errors] == [True, False]


def test_errors_of_the_clients_pickle() -> None:
    refused = pickle.loads(pickle.dumps(Refused("busy", "later")))
    assert (refused.code, refused.detail, str(refused)) == ("busy", "later", "busy: later")
    unsent = pickle.loads(pickle.dumps(Unsent("closed", maybe=True)))
    assert (unsent.maybe, str(unsent)) == (True, "closed")
    assert str(pickle.loads(pickle.dumps(QueueFull("full")))) == "full"


@both_clients
@with_hub()
async def test_a_client_is_opened_once(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "alice") as alice:
        with pytest.raises(HeadgateError, match="expected a new client; this one was opened before"):
            await alice.__aenter__()
        with pytest.raises(Refused, match=kind.undeliverable):
            await kind.send(alice, "nobody", "")


async def test_d5_a_client_of_a_hub_that_reads_nothing_more_can_be_closed() -> None:
    async def stop_reading(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(WELCOMES["relay"])
        socket.transport.pause_reading()
        await stopped.wait()
        socket.transport.abort()

    stopped = asyncio.Event()
    async with websocket_url(stop_reading) as url:
        client = RelayClient(url, "a", "t", in_flight=64, largest=2**24)
        async with asyncio.timeout(PATIENCE):
            await client.__aenter__()
            sending = [asyncio.create_task(client.send("b", bytes(2**22))) for _ in range(4)]
            written = client._socket
            assert written is not None
            await wait_until(written.transport.get_write_buffer_size, "a full buffer")
            async with asyncio.timeout(15):  # after 20 seconds, the keepalive of websockets would end it
                assert await client.close(0) == 4
            results = await asyncio.gather(*sending, return_exceptions=True)
        assert [type(one) for one in results] == [Unsent] * 4
        stopped.set()


async def test_d5_a_message_that_waits_for_room_is_there_after_the_close() -> None:
    async def greet(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(WELCOMES["hub"])
        for number in range(3):
            await socket.send(json.dumps({"type": "message", "body": number}))
        await socket.wait_closed()

    async with websocket_url(greet) as url:
        client = await HubClient(url, "alice", "token", buffer=1).__aenter__()
        assert (await anext(client))["body"] == 0
        await wait_until(lambda: client._inbox._messages, "the next one")
        await holds_for_turns(lambda: True)
        await client.close()
        assert [message["body"] async for message in client] == [1, 2]
        assert client.dropped == 0
