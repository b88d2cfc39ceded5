"""The client of the relay, against real hubs: on a clock that stands still, and as a program that is killed."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trustme
from clienting import Denials, comes_back_when_it_is_told, in_time, relay_client, run, stays, until
from hubs import running
from programs import Program
from servers import free_port

from headgate import HeadgateError, InvalidInput, ManualClock
from headgate.client import Denial, Message, QueueFull, Refused, RelayClient, Unsent
from headgate.client.holding import Paced

pytestmark = pytest.mark.once
SECOND = 1_000_000


async def take(client: RelayClient, number: int) -> list[Message]:
    return [await anext(client) for _ in range(number)]


# The limit ------------------------------------------------------------------------------------------------------------


def test_d5_a_denial_is_reported_with_its_wait_and_reason_and_held_back_and_sent_again() -> None:
    async def main() -> None:
        denials = Denials(hub.clock)
        async with relay_client(hub, "alice", on_rate_limited=denials) as alice, relay_client(hub, "bob") as bob:
            for number in range(2):
                await alice.send("bob", b"%d" % number)
            third = asyncio.create_task(alice.send("bob", b"2"))
            fourth = asyncio.create_task(alice.send("bob", b"3"))
            await until(lambda: denials, "the denial")
            began = hub.clock.now()
            assert [body.body for body in await take(bob, 2)] == [b"0", b"1"]
            ((when, denial),) = denials
            assert when == began
            assert denial.wait == 2.0
            assert denial.reason == "an address may send 0.5/second burst 2; send it again in 2000 ms"
            assert 2.0 <= alice.held <= 2.2
            assert alice.waiting == 2

            hub.clock.advance(1.999999)
            assert await stays(lambda: hub.hub.relay.denied == 1 and hub.hub.relay.passed == 2)
            await in_time(hub.clock, alice, third)
            await in_time(hub.clock, alice, fourth)
            found = await take(bob, 2)
            assert [(one.sender, one.body) for one in found] == [("alice", b"2"), ("alice", b"3")]
            assert found[0].id == third.result() == denial.id
            assert alice.waiting == 0
            assert alice.held == 0.0

    with running(relay_rate_limit="0.5", relay_rate_burst="2") as hub:
        run(main())


@pytest.mark.parametrize("in_flight", [1, 8])
def test_d5_all_of_300_arrive_once_and_in_order_with_few_denials_and_none_early(in_flight: int) -> None:
    async def main() -> None:
        denials = Denials(hub.clock)
        options: dict[str, Any] = {"on_rate_limited": denials, "in_flight": in_flight}
        async with relay_client(hub, "alice", **options) as alice, relay_client(hub, "bob") as bob:
            began = hub.clock.now()
            reading = asyncio.create_task(take(bob, 300))
            sends = asyncio.gather(*[alice.send("bob", b"%d" % number) for number in range(300)])
            await in_time(hub.clock, alice, sends)
            found = await reading
            assert [one.body for one in found] == [b"%d" % number for number in range(300)]
            assert len({one.id for one in found}) == 300
            took = (hub.clock.now() - began) / SECOND
            print(f"{in_flight} in flight: {len(denials)} denials, {took:.1f} s, of 290 s that it takes at least")
            assert hub.hub.relay.denied == len(denials) <= 10 + in_flight
            assert 290 <= took <= 290 * 1.05
            assert bob.dropped == 0

    with running() as hub:
        run(main())


def test_d5_one_who_sends_one_after_the_other_is_not_denied_each_time() -> None:
    async def main() -> None:
        denials = Denials(hub.clock)
        async with relay_client(hub, "alice", on_rate_limited=denials) as alice, relay_client(hub, "bob") as bob:

            async def talk() -> None:
                for number in range(80):
                    await alice.send("bob", b"%d" % number)

            await in_time(hub.clock, alice, talk())
            assert [one.body for one in await take(bob, 80)] == [b"%d" % number for number in range(80)]
            before = len(denials)
            assert 2 <= before <= 5
            hub.clock.advance(3600)  # then the bucket is full, and the burst is there again
            for _ in range(10):
                await alice.send("bob", b"")
            assert len(denials) == before
            await in_time(hub.clock, alice, talk())
            assert len(denials) <= before + 4

    with running() as hub:
        run(main())


def test_d5_clients_that_are_denied_at_the_same_moment_do_not_come_back_at_the_same_moment() -> None:
    async def main() -> None:
        clients = [relay_client(hub, f"agent-{number}") for number in range(20)]
        for client in clients:
            await client.__aenter__()
        try:
            for client in clients:
                with pytest.raises(Refused, match="unreachable"):
                    await client.send("nobody", b"")
            sends = [asyncio.create_task(client.send("nobody", b"")) for client in clients]
            await until(lambda: hub.hub.relay.denied == 20, "the denials")
            await until(lambda: all(client.held for client in clients), "the holding back")
            waits = sorted(client.held for client in clients)
            assert waits[0] >= 1.0
            assert len(set(waits)) == 20
            assert waits[-1] - waits[0] > 0.05
            for number, wait in enumerate(waits):
                hub.clock.advance(wait - (waits[number - 1] if number else 0.0))
                await until(lambda number=number: hub.hub.relay.passed == 21 + number, "the next")  # type: ignore[misc]
            assert hub.hub.relay.denied == 20
            for send in sends:
                with pytest.raises(Refused, match="unreachable"):
                    await send
        finally:
            for client in clients:
                await client.close(0)

    with running(relay_rate_burst="1") as hub:
        run(main())


def test_d5_a_lane_learns_the_pace_and_that_it_has_changed() -> None:
    """By a bucket of one token each 3 seconds, which becomes one of 1 second after a while."""
    lane, now, every, denied = Paced(1), 0, 3 * SECOND, Counter[int]()
    ready = 0  # when the bucket has its next token
    for number in range(1000):
        every = 3 * SECOND if number < 300 else SECOND
        while True:
            opens = lane.opens()
            assert opens is not None
            now = max(now, opens)
            lane.sent(now)
            lane.under_way -= 1
            if now >= ready:
                break
            denied[number // 300] += 1
            lane.denied(now, ready - now, 0)
        lane.passed(warned=False)
        ready += every
    assert denied[0] <= 8
    assert sum(denied.values()) <= 25
    print(denied, now / SECOND)
    assert now <= (300 * 3 + 700) * SECOND * 1.25


def test_a_pace_is_not_told_from_a_time_in_which_nothing_was_to_be_sent() -> None:
    lane = Paced(1)
    lane.denied(10 * SECOND, SECOND, 0)
    for now in (11 * SECOND, 3600 * SECOND):
        lane.sent(now)
        lane.under_way -= 1
        lane.passed(warned=False)
    lane.denied(3600 * SECOND, SECOND, 0)
    assert lane.opens() == 3601 * SECOND
    lane.sent(3601 * SECOND)
    lane.under_way -= 1
    lane.passed(warned=False)
    assert lane.opens() == 3601 * SECOND


def test_what_is_denied_at_a_pace_that_is_a_little_too_fast_waits_no_longer_than_it_is_told() -> None:
    lane = Paced(1)
    lane.denied(0, SECOND, 0)
    lane.sent(SECOND)
    lane.under_way -= 1
    lane.passed(warned=False)
    lane.denied(SECOND, SECOND, 0)
    lane.sent(2 * SECOND)
    lane.under_way -= 1
    lane.denied(2 * SECOND, 1000, 10)
    assert lane.opens() == 2 * SECOND + 1010


def test_a_report_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(denial: Denial) -> None:
        raise RuntimeError(denial.reason)

    async def main() -> None:
        async with relay_client(hub, "alice", on_rate_limited=fail) as alice, relay_client(hub, "bob"):
            await alice.send("bob", b"")
            await in_time(hub.clock, alice, alice.send("bob", b""))

    with running(relay_rate_burst="1") as hub:
        run(main())
    assert "has failed" in caplog.text


# The queue ------------------------------------------------------------------------------------------------------------


def test_d5_no_more_waits_than_may_and_the_others_wait_for_room_in_turn() -> None:
    async def main() -> None:
        async with relay_client(hub, "alice", most=3) as alice, relay_client(hub, "bob") as bob:
            await alice.send("bob", b"first")
            sends = [asyncio.create_task(alice.send("bob", b"%d" % number)) for number in range(8)]
            await until(lambda: alice.held, "the denial")
            assert alice.waiting == 3
            with pytest.raises(QueueFull, match="as much waits to be sent as may"):
                await alice.send("bob", b"no room", wait=False)
            await in_time(hub.clock, alice, asyncio.gather(*sends))
            await in_time(hub.clock, alice, alice.send("bob", b"room", wait=False))
            bodies = [one.body for one in await take(bob, 10)]
            assert bodies == [b"first", *(b"%d" % number for number in range(8)), b"room"]

    with running(relay_rate_burst="1") as hub:
        run(main())


def test_d5_what_was_cancelled_is_not_sent_later() -> None:
    async def main() -> None:
        async with relay_client(hub, "alice", most=3) as alice, relay_client(hub, "bob") as bob:
            await alice.send("bob", b"first")
            names = (b"denied", b"waits", b"stays", b"no room", b"comes")
            denied, waits, stays, no_room, comes = [asyncio.create_task(alice.send("bob", name)) for name in names]
            await until(lambda: alice.held, "the denial")
            for task in (denied, waits, no_room):
                task.cancel()
            await until(lambda: alice.waiting == 2, "that there is room")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await alice.send("bob", b"too late")
            await in_time(hub.clock, alice, asyncio.gather(stays, comes))
            await in_time(hub.clock, alice, alice.send("bob", b"last"))
            assert [one.body for one in await take(bob, 4)] == [b"first", b"stays", b"comes", b"last"]

    with running(relay_rate_burst="1") as hub:
        run(main())


def test_d5_close_waits_for_what_is_queued_and_says_what_was_not_sent() -> None:
    async def main() -> None:
        async with relay_client(hub, "bob") as bob:
            async with relay_client(hub, "alice", most=4) as alice:
                await alice.send("bob", b"0")
                sends = [asyncio.create_task(alice.send("bob", b"%d" % number)) for number in range(1, 9)]
                await until(lambda: alice.held, "the denial")
                closing = asyncio.create_task(alice.close(within=2.5))
                await asyncio.sleep(0)
                end = hub.clock.now() + 5 * SECOND // 2

                def moved() -> bool:
                    if alice.held:
                        hub.clock.advance(min(alice.held, (end - hub.clock.now()) / SECOND))
                    return closing.done()

                await until(moved, "the end")
                assert await closing == 6  # of which two had waited for room
                assert [await send for send in sends[:2]]
                for send in sends[2:]:
                    with pytest.raises(Unsent, match="the client was closed; this was not sent") as info:
                        await send
                    assert not info.value.maybe
                with pytest.raises(Unsent, match="the client is closed; make another"):
                    await alice.send("bob", b"")
                assert [one async for one in alice] == []
                assert await alice.close() == 0
            assert [one.body for one in await take(bob, 3)] == [b"0", b"1", b"2"]

    with running(relay_rate_burst="1") as hub:
        run(main())


# What the hub refuses -------------------------------------------------------------------------------------------------


def test_what_the_hub_refuses_is_raised_with_its_code() -> None:
    async def main() -> None:
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
            assert message == Message(after.result(), "alice", b"after", "text/plain", "b-1")

    with running(max_frame=2000) as hub:
        run(main())


def test_a_wrong_token_raises_and_is_not_tried_again() -> None:
    async def main() -> None:
        hub.register("alice")
        with pytest.raises(Refused, match=r"unauthorized: 'alice' at ws://.*/relay: the token doesn't belong"):
            async with relay_client(hub, "alice", "hg_wrong"):
                pass

    with running() as hub:
        run(main())


def test_a_token_that_is_revoked_raises_whatever_waits() -> None:
    async def main() -> None:
        async with relay_client(hub, "alice") as alice:
            with pytest.raises(Refused, match="unreachable"):
                await alice.send("bob", b"")
            send = asyncio.create_task(alice.send("bob", b""))
            message = asyncio.create_task(anext(alice))
            await until(lambda: alice.held, "the denial")
            hub.run(hub.hub.registry.revoke("alice"))
            await until(lambda: not alice.connected, "the end")
            hub.clock.advance(0.3)
            for task in (send, message):
                with pytest.raises(Refused, match="unauthorized"):
                    await task
            with pytest.raises(Refused, match="unauthorized"):
                await alice.send("bob", b"")
            assert await stays(lambda: not alice.connected)

    with running(relay_rate_burst="1") as hub:
        run(main())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RelayClient("hub.example", "a", "t"), "url: expected the address of a hub such as http://127.0.0.1"),
        (lambda: RelayClient("ftp://hub", "a", "t"), "url: expected the address of a hub"),
        (lambda: RelayClient("http://hub:99999", "a", "t"), "url: expected the address of a hub"),
        (lambda: RelayClient("http://me:secret@hub", "a", "t"), "url: expected the address of a hub"),
        (lambda: RelayClient("http://hub/?a=1", "a", "t"), "url: expected the address of a hub"),
        (lambda: RelayClient(None, "a", "t"), "url: expected the address of a hub"),  # type: ignore[arg-type]
        (lambda: RelayClient("http://hub", "", "t"), "agent: expected 1 to 128 printable characters"),
        (lambda: RelayClient("http://hub", "a", ""), "token: expected the one that the agent got when it was regist"),
        (lambda: RelayClient("http://hub", "a", "t" * 257), "token: expected the one"),
        (lambda: RelayClient("http://hub", "a", None), "token: expected the one"),  # type: ignore[arg-type]
        (lambda: RelayClient("http://hub", "a", "t", most=0), "most: expected a whole number from 1"),
        (lambda: RelayClient("http://hub", "a", "t", in_flight=0), "in_flight: expected a whole number from 1"),
        (lambda: RelayClient("http://hub", "a", "t", buffer=0), "buffer: expected a whole number from 1"),
        (lambda: RelayClient("http://hub", "a", "t", largest=-1), "largest: expected a whole number from 1"),
    ],
)
def test_what_a_client_is_made_of_is_checked(make: Callable[[], RelayClient], text: str) -> None:
    with pytest.raises(HeadgateError, match=text) as info:
        make()
    assert "ttt" not in str(info.value)


def test_what_is_sent_is_checked() -> None:
    async def main() -> None:
        client = RelayClient("https://hub.example/below/", "alice", "t")
        assert client.url == "wss://hub.example/below/relay"
        with pytest.raises(HeadgateError, match="expected a client that is open; use it by `async with`"):
            await client.send("bob", b"")
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"to": "bob", "body": "text"}, "body: expected bytes; encode text"),
            ({"to": "", "body": b""}, "agent: expected 1 to 128 printable characters"),
            ({"to": "bob", "body": b"", "content_type": b"text"}, "content_type: expected text"),
            ({"to": "bob", "body": b"", "in_reply_to": 7}, "in_reply_to: expected text"),
        ]
        for given, text in wrong:
            with pytest.raises(InvalidInput, match=text):
                await client.send(**given)
        with pytest.raises(Refused, match="too_large: expected at most 65536 bytes, got 65"):
            await client.send("bob", b"x" * 65_530)

    run(main())


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
    assert "pip install 'headgate[client]'" in found.stderr


def test_an_address_where_no_relay_is_raises() -> None:
    async def main() -> None:
        with pytest.raises(Refused, match=r"status_404: .*expected a hub's socket there; is that its address\?"):
            async with RelayClient(f"http://{hub}/elsewhere", "alice", "token"):
                pass

    with running() as hub:
        run(main())


def test_a_hub_that_says_to_go_elsewhere_is_not_followed() -> None:
    async def main() -> None:
        token = hub.register("alice")
        here = f"HTTP/1.1 302 Found\r\nLocation: ws://{hub}/relay\r\nContent-Length: 0\r\n\r\n"

        async def send_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(here.encode())
            writer.close()

        async with await asyncio.start_server(send_away, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(Refused, match="status_302"):
                async with RelayClient(f"http://127.0.0.1:{port}", "alice", token):
                    pass

    with running() as hub:
        run(main())


def test_tls_is_spoken_with_those_who_can_be_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, trusted = tmp_path / "certificate.pem", tmp_path / "authority.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(trusted))

    async def main() -> None:
        client = RelayClient(f"https://{hub}", "alice", token)
        async with client:
            assert client.connected

    with running(tls_certificate=certificate) as hub:
        token = hub.register("alice")
        with pytest.raises(Refused, match=r"certificate: wss://.*/relay: it isn't trusted: "):
            run(main())
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        run(main())


# What comes in --------------------------------------------------------------------------------------------------------


def test_one_that_takes_no_more_messages_makes_the_hub_tell_their_sender() -> None:
    async def main() -> None:
        async with relay_client(hub, "alice") as alice, relay_client(hub, "bob", buffer=2) as bob:
            sent = [b"0"]
            await alice.send("bob", b"0")
            found = [(await anext(bob)).body]

            async def fill() -> None:
                while len(sent) < 1000:
                    body = b"%d" % len(sent) + b" " * 60_000
                    await alice.send("bob", body)
                    sent.append(body)

            with pytest.raises(Refused, match="busy"):
                await fill()
            found += [one.body for one in await take(bob, len(sent) - 1)]
            assert found == sent
            assert bob.dropped == 0

    with running(relay_rate_limit="off") as hub:
        run(main())


def test_one_that_never_takes_messages_can_still_send(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with relay_client(hub, "alice") as alice, relay_client(hub, "bob", buffer=2) as bob:
            for number in range(10):
                await alice.send("bob", b"%d" % number)
            await until(lambda: bob.dropped == 8, "the messages")
            await bob.send("alice", b"hello")
            assert (await anext(alice)).body == b"hello"
            assert [one.body for one in await take(bob, 2)] == [b"8", b"9"]

    with running(relay_rate_limit="off") as hub:
        run(main())


def test_one_that_answers_each_message_is_not_stuck_when_many_come() -> None:
    async def main() -> None:
        async with relay_client(hub, "alice") as alice, relay_client(hub, "bob", buffer=1) as bob:

            async def answer() -> None:
                async for message in bob:
                    await bob.send("alice", message.body, in_reply_to=message.id)

            answering = asyncio.create_task(answer())
            ids = [await alice.send("bob", b"%d" % number) for number in range(100)]
            answers = {(await anext(alice)).in_reply_to for _ in range(100 - bob.dropped)}
            assert answers <= set(ids)
            assert answers
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    with running(relay_rate_limit="off") as hub:
        run(main())


# Connections that drop ------------------------------------------------------------------------------------------------


async def again(client: RelayClient, clock: ManualClock) -> None:
    """Let time pass until a client has connected again."""

    def moved() -> bool:
        clock.advance(0.05)
        return client.connected

    await until(moved, "the connection")


def test_d5_what_a_killed_hub_had_not_answered_and_what_came_since_arrives_at_the_next(tmp_path: Path) -> None:
    def start() -> Program:
        hubs.append(Program(tmp_path, "--port", str(port), "--relay-rate-limit", "off"))
        return hubs[-1]

    async def main() -> None:
        hub = start()
        with hub.http() as http:
            tokens = [http.post("/api/admin/agents", json={"agent_id": name}).json()["token"] for name in names]
        ours, theirs = ManualClock(), ManualClock()
        alice = RelayClient(f"http://{hub}", "alice", tokens[0], clock=ours, random=Random(1), in_flight=4)
        bob = RelayClient(f"ws://{hub}/", "bob", tokens[1], clock=theirs, random=Random(2))
        async with alice, bob:
            for number in range(10):
                await alice.send("bob", b"%d" % number)
            found = await take(bob, 10)
            os.kill(hub.pid, signal.SIGSTOP)
            sends = [asyncio.create_task(alice.send("bob", b"%d" % number)) for number in range(10, 30)]
            assert await stays(lambda: not any(send.done() for send in sends))  # handed over, and not answered
            assert len(alice._outbox.under_way) == 4
            sends.pop(1).cancel()  # which is not sent again then
            await asyncio.to_thread(hub.kill)
            await until(lambda: not alice.connected and not bob.connected, "that they notice")
            sends += [asyncio.create_task(alice.send("bob", b"%d" % number)) for number in range(30, 40)]
            await again_refused(alice, ours)
            await asyncio.to_thread(start)
            await again(bob, theirs)
            await again(alice, ours)
            found += await take(bob, 29)
            await asyncio.gather(*sends)
            assert [one.body for one in found] == [b"%d" % number for number in range(40) if number != 11]
            assert len({one.id for one in found}) == 39

    async def again_refused(client: RelayClient, clock: ManualClock) -> None:
        for _ in range(20):
            clock.advance(5)
            assert await stays(lambda: not client.connected, turns=5)

    names = ("alice", "bob")
    port = free_port()
    hubs: list[Program] = []
    try:
        run(main())
    finally:
        for hub in hubs:
            hub.kill()


def test_a_hub_that_stops_says_when_to_come_back_and_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with relay_client(hub, "alice") as alice:
            await comes_back_when_it_is_told(hub, alice, caplog)

    with running() as hub:
        run(main())


def test_a_connection_that_is_refused_for_now_is_tried_again_after_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        token = hub.register("alice")
        async with relay_client(hub, "alice", token) as alice:
            (socket,) = hub.hub.presence.sockets
            for _ in range(100):
                if not hub.run(hub.hub.gate.acheck_address("127.0.0.1")):
                    break
            hub.run(socket.close(1001, ""))
            await until(lambda: not alice.connected, "the end")
            hub.clock.advance(0.2)
            await until(lambda: "HTTP status 429" in caplog.text, "the refusal")
            found = re.search(r"HTTP status 429'; trying again in ([\d.]+) s", caplog.text)
            assert found is not None
            assert 2.0 <= float(found[1]) <= 2.2
            hub.clock.advance(2.2)
            await until(lambda: alice.connected, "the connection")

    with running() as hub:
        run(main())


def test_a_hub_that_is_away_at_first_is_waited_for_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    def pauses() -> list[float]:
        return [float(text) for text in re.findall(r"trying again in ([\d.]+) s", caplog.text)]

    async def main() -> None:
        clock = ManualClock()
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), RelayClient(url, "alice", "token", clock=clock):
                pass
        client = RelayClient(url, "alice", "token", clock=clock)
        entering = asyncio.create_task(client.__aenter__())
        caplog.clear()
        for number in range(1, 12):
            await until(lambda number=number: len(pauses()) == number, "the next attempt")  # type: ignore[misc]
            clock.advance(30)
        found = pauses()
        assert 0.1 <= found[0] <= 0.2
        assert found[1:5] == sorted(found[1:5])
        assert 15 <= found[-1] <= 30
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)

    run(main())


def test_a_connection_that_was_good_for_something_is_made_again_soon() -> None:
    async def main() -> None:
        async with relay_client(hub, "alice") as alice:
            for _ in range(8):
                with pytest.raises(Refused, match="unreachable"):
                    await alice.send("nobody", b"")
                (socket,) = hub.hub.presence.sockets
                hub.run(socket.close(1001, ""))
                await until(lambda: not alice.connected, "the end")
                hub.clock.advance(0.2)
                await until(lambda: alice.connected, "the connection")

    with running() as hub:
        run(main())


def test_connections_are_tried_less_and_less_often() -> None:
    client = RelayClient("http://hub.example", "alice", "token", random=Random(1))
    pauses = [client._pause(failures) / SECOND for failures in range(1, 1000)]
    assert 0.1 <= pauses[0] <= 0.2
    assert all(15 <= pause <= 30 for pause in pauses[10:])
    assert len(set(pauses[10:])) > 900
    client._return_after = 2 * SECOND
    told = [client._pause(1) for _ in range(1000)]
    assert min(told) >= 2 * SECOND
    assert max(told) <= 2.2 * SECOND
    assert len(set(told)) > 900
