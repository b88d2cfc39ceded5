"""The connections of both clients: those that a hub refuses, and those that drop."""

import asyncio
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trustme
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection, serve

from headgate import HeadgateError, InvalidInput, ManualClock, Policy
from headgate.client import Disconnected, HubClient, QueueFull, Refused, RelayClient, RelayMessage, Unsent
from headgate.client.backoff import ReconnectBackoff, asked_wait
from headgate.hub.sockets.socket import Socket
from headgate.proto import envelope_pb2 as wire
from tests.support.event_loop import holds_for_turns, run, wait_until
from tests.support.hub import HubServer, hub_server
from tests.support.hub_clients import (
    Denials,
    Kind,
    RelayKind,
    advance_until_done,
    both_clients,
    check_reconnects_when_told,
    relay_client,
    take,
    with_hub,
    with_limited_hub,
)
from tests.support.hub_process import HubProcess
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once
SECOND = 1_000_000


@asynccontextmanager
async def websocket_url(handle: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[str]:
    """The URL of a server that handles connections in this way. The block has a deadline."""
    async with asyncio.timeout(5 * PATIENCE), serve(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


# What the hub refuses -------------------------------------------------------------------------------------------------


@with_hub(max_frame=2000)
async def test_a_refusal_raises_with_its_code(hub: HubServer) -> None:
    async with relay_client(hub, "alice") as alice, relay_client(hub, "bob") as bob:
        with pytest.raises(Refused, match=r"^unreachable: no connection of this address is open$") as info:
            await alice.send("carol", b"")
        assert info.value.code == "unreachable"
        with pytest.raises(Refused, match="too_large"):  # answered without an id, since nobody reads so far
            await alice.send("bob", b"x" * 3000)
        far_too_large = asyncio.create_task(alice.send("bob", b"x" * 10_000))
        after = asyncio.create_task(alice.send("bob", b"after", content_type="text/plain", in_reply_to="b-1"))
        with pytest.raises(Refused, match="too_large"):  # the hub hangs up
            await far_too_large
        hub.clock.advance(1)
        await after
        (message,) = await take(bob, 1)
        assert message == RelayMessage(after.result(), "alice", b"after", "text/plain", "b-1")


@both_clients
@with_hub()
async def test_b2_a_wrong_token_raises_and_is_not_tried_again(hub: HubServer, kind: Kind) -> None:
    hub.register("alice")
    with pytest.raises(Refused, match=rf"^unauthorized: 'alice' at ws://.*{kind.path}: {kind.wrong_token}"):
        async with kind.connect(hub, "alice", "hg_wrong"):
            pass


@both_clients
@with_limited_hub
async def test_b2_a_token_that_is_revoked_raises_whatever_waits(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "alice") as alice:
        await kind.send(alice, "alice", "first")
        await kind.take(alice, 1)
        send = asyncio.create_task(kind.send(alice, "alice", "second"))
        message = asyncio.create_task(anext(alice))
        await wait_until(lambda: alice.delay, "the denial")
        hub.run(hub.hub.registry.revoke("alice"))
        await wait_until(lambda: not alice.connected, "the end")
        hub.clock.advance(0.5)
        for task in (send, message):
            with pytest.raises(Refused, match="unauthorized"):
                await task
        with pytest.raises(Refused, match="unauthorized"):
            await kind.send(alice, "alice", "third")
        assert await holds_for_turns(lambda: not alice.connected)


NEW: dict[str, Any] = {"url": "http://hub", "name": "a", "token": "t"}


@both_clients
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"url": "hub.example"}, "url: expected the address of a hub such as http://127.0.0.1"),
        ({"url": "ftp://hub"}, "url: expected the address of a hub"),
        ({"url": "http://hub:99999"}, "url: expected the address of a hub"),
        ({"url": "http://me:secret@hub"}, "url: expected the address of a hub"),
        ({"url": "http://hub/?a=1"}, "url: expected the address of a hub"),
        ({"url": "http://hub?"}, "url: expected the address of a hub"),
        ({"url": "http://hub/#"}, "url: expected the address of a hub"),
        ({"url": "http://@hub"}, "url: expected the address of a hub"),
        ({"url": None}, "url: expected the address of a hub"),
        ({"name": ""}, "agent: expected 1 to 128 printable characters"),
        ({"name": "a\n"}, "agent: expected 1 to 128 printable characters"),
        ({"token": ""}, "token: expected the one that the agent got when it was regist"),
        ({"token": "t" * 257}, "token: expected the one"),
        ({"token": None}, "token: expected the one"),
        ({"most": 0}, "most: expected a whole number from 1"),
        ({"in_flight": 0}, "in_flight: expected a whole number from 1"),
        ({"buffer": 0}, "buffer: expected a whole number from 1"),
        ({"largest": -1}, "largest: expected a whole number from 1"),
        ({"answer_within": 0}, "answer_within: expected a number of seconds above 0"),
        ({"answer_within": -1}, "answer_within: expected a number of seconds"),
        ({"answer_within": float("nan")}, "answer_within: expected a number of seconds"),
        (
            {"larges": 1},
            r"Client: expected options among on_rate_limited, .*, got 'larges'; did you mean largest",
        ),
        ({"x": 1}, r"got 'x'; see headgate\.client\.(hub\.Hub|connection\.)ClientOptions"),
    ],
)
def test_client_options_are_validated(kind: Kind, changes: dict[str, Any], text: str) -> None:
    options = {**NEW, **changes}
    url, name, token = (options.pop(part) for part in ("url", "name", "token"))
    with pytest.raises(HeadgateError, match=text) as info:
        kind.client(url, name, token, **options)
    assert "ttt" not in str(info.value)


@both_clients
async def test_a_closed_client_and_a_too_large_message_are_refused(kind: Kind) -> None:
    client = kind.client("https://hub.example/below/", "alice", "t")
    assert client.url == f"wss://hub.example/below{kind.path}"
    assert kind.client("http://hub.example", "alice", "t").url == f"ws://hub.example{kind.path}"
    with pytest.raises(HeadgateError, match="expected an open client; use it with `async with`"):
        await kind.send(client, "bob", "")
    with pytest.raises(Refused, match="too_large: expected at most 65536 bytes, got 65"):
        await kind.send(client, "bob", "x" * 65_530)


async def test_messages_are_validated_before_they_are_sent() -> None:
    client = RelayClient("https://hub.example", "alice", "t")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"to": "bob", "body": "text"}, "body: expected bytes; encode text"),
        ({"to": "", "body": b""}, "agent: expected 1 to 128 printable characters"),
        ({"to": "bob", "body": b"", "content_type": b"text"}, "content_type: expected text"),
        ({"to": "bob", "body": b"", "in_reply_to": 7}, "in_reply_to: expected text"),
    ]
    for given, text in wrong:
        with pytest.raises(InvalidInput, match=text):
            await client.send(**given)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("websockets.asyncio.client", "expected the package websockets"),
        ("google.protobuf", "expected the package prot"),
    ],
)
def test_a_package_that_is_missing_is_named(missing: str, text: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from headgate.client import Denial, RelayClient"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert text in found.stderr
    assert "in a checkout: pip install '.[client]'" in found.stderr


@both_clients
@with_hub()
async def test_an_address_without_a_hub_raises(hub: HubServer, kind: Kind) -> None:
    with pytest.raises(Refused, match=r"unknown_route: .*there is no such socket; agents connect to /ws"):
        async with kind.client(f"http://{hub}/elsewhere", "alice", "token"):
            pass


@both_clients
@with_hub()
async def test_the_url_may_name_the_socket_as_the_hub_shows_it(hub: HubServer, kind: Kind) -> None:
    token = hub.register("alice")
    for url in (f"http://{hub}", f"HTTP://{hub}", f"ws://{hub}{kind.path}", f"ws://{hub}{kind.path}/"):
        async with kind.client(url, "alice", token) as client:
            assert client.url == f"ws://{hub}{kind.path}"


@both_clients
@with_hub()
async def test_a_redirect_is_not_followed(hub: HubServer, kind: Kind) -> None:
    token = hub.register("alice")
    here = f"HTTP/1.1 302 Found\r\nLocation: ws://{hub}{kind.path}\r\nContent-Length: 0\r\n\r\n"

    async def send_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(here.encode())
        writer.close()

    async with await asyncio.start_server(send_away, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Refused, match="status_302"):
            async with kind.client(f"http://127.0.0.1:{port}", "alice", token):
                pass


@both_clients
def test_tls_needs_a_trusted_hub(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, trusted = tmp_path / "certificate.pem", tmp_path / "authority.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(trusted))

    async def main() -> None:
        client = kind.client(f"https://{hub}", "alice", token)
        async with client:
            assert client.connected

    with hub_server(tls_certificate=certificate) as hub:
        token = hub.register("alice")
        with pytest.raises(Refused, match=rf"certificate: wss://.*{kind.path}: it isn't trusted: "):
            run(main())
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        run(main())


# Connections that drop ------------------------------------------------------------------------------------------------


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


# Frames that can't be read --------------------------------------------------------------------------------------------

WELCOMES: dict[str, str | bytes] = {
    "hub": '{"type": "identified"}',
    "relay": wire.Envelope(type=wire.MESSAGE_TYPE_WELCOME, welcome=wire.Welcome()).SerializeToString(),
}
LAST: dict[str, str | bytes] = {
    "hub": '{"type": "message", "body": "last"}',
    "relay": wire.Envelope(type=wire.MESSAGE_TYPE_DATA, data=wire.Data(body=b"last")).SerializeToString(),
}


@pytest.mark.parametrize(
    ("kind", "frame", "described"),
    [
        ("hub", "{secret", "7 characters: JSONDecodeError"),
        ("hub", b"\xff{secret", "8 bytes: UnicodeDecodeError"),
        ("hub", '["secret"]', "10 characters: expected an object with a type, got list"),
        ("hub", '{"body": "secret"}', "18 characters: expected an object with a type, got dict"),
        ("hub", "[" * 100_000, "100000 characters: RecursionError"),
        ("relay", "secret", "6 characters: expected an Envelope of headgate.v1"),
        ("relay", b"\xffsecret", "7 bytes: expected an Envelope of headgate.v1"),
    ],
)
def test_d5_frames_that_cannot_be_read_are_logged_by_size_and_reason_never_content_and_not_each_of_a_flood(
    kind: str, frame: str | bytes, described: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def greet(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(WELCOMES[kind])
        for _ in range(100):
            await socket.send(frame)
        await socket.send(LAST[kind])
        await socket.wait_closed()

    async def main() -> None:
        async with websocket_url(greet) as url:
            made: Any = HubClient if kind == "hub" else RelayClient
            async with made(url, "alice", "token") as client:
                last = await anext(client)
                assert (last["body"] if kind == "hub" else last.body.decode()) == "last"

    run(main())
    texts = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert all(f"dropped a frame that can't be read, of {described}" in text for text in texts), texts
    assert [re.findall(r"\((\d+) so far\)", text) for text in texts] == [[str(1 << n)] for n in range(7)]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("hub", json.dumps({"type": "error", "error": "unavailable", "detail": "x" * 1_000_000})),
        ("relay", wire.Envelope(error=wire.Error(code="busy", detail="x" * 1_000_000)).SerializeToString()),
        ("relay", wire.Envelope(rate_limited=wire.RateLimited(reason="x" * 1_000_000)).SerializeToString()),
    ],
)
def test_the_reason_of_a_lost_connection_is_short_whatever_the_hub_says(
    kind: str, answer: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(answer)
        await socket.wait_closed()

    async def main() -> str:
        lost = asyncio.get_running_loop().create_future()
        async with websocket_url(refuse) as url:
            made: Any = HubClient if kind == "hub" else RelayClient
            client = made(url, "alice", "token", on_disconnected=lost.set_result)
            opening = asyncio.create_task(client.__aenter__())
            reason: str = (await lost).reason
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        return reason

    assert len(run(main())) == 1000
    assert max([len(record.getMessage()) for record in caplog.records]) < 1200


async def test_an_answer_with_an_empty_id_answers_nothing() -> None:
    async def answer(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(WELCOMES["hub"])
        ids: list[Any] = ["", None, [], "0", json.loads(await socket.recv())["id"]]
        for frame_id in ids:
            await socket.send(json.dumps({"type": "pong", "id": frame_id, "for": frame_id}))
        await socket.wait_closed()

    async with websocket_url(answer) as url, HubClient(url, "alice", "token") as client:
        assert await client.ask("ping") == {"type": "pong", "for": "1"}


@both_clients
@pytest.mark.parametrize("handled", [False, True])
def test_d5_a_denial_is_logged_as_a_warning_unless_it_is_handled(
    kind: Kind, handled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"on_rate_limited": denials} if handled else {}
        async with kind.connect(hub, "alice", in_flight=2, **options) as alice, kind.connect(hub, "bob"):
            sends = [kind.send(alice, "bob", body) for body in ("passes", "is denied")]
            await advance_until_done(hub.clock, alice, asyncio.gather(*sends))

    with kind.limited() as hub:
        denials = Denials(hub.clock)
        run(main())
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if handled:
        assert (found, len(denials)) == ([], 1)
    else:
        reason = "an address may send 1/second" if kind is RelayKind else "the limit of message, which is normal"
        assert len(found) == 1
        assert f": rate limited, waiting {kind.interval:.3f} s: '{reason}" in found[0]
