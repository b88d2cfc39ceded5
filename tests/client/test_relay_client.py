"""The client of the relay, against real hubs on a clock that stands still: the limit; and the queue of both clients."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from headgate.client import Denial, QueueFull, Refused, Unsent
from headgate.client.outbox import PacedLimit
from tests.support.event_loop import holds_for_turns, run, wait_until
from tests.support.hub import HubServer, hub_server
from tests.support.hub_clients import (
    Denials,
    Kind,
    advance_until_done,
    both_clients,
    relay_client,
    take,
    with_hub,
    with_limited_hub,
)

pytestmark = pytest.mark.once
SECOND = 1_000_000


# The limit ------------------------------------------------------------------------------------------------------------


@with_hub(relay_rate_limit="0.5", relay_rate_burst="2")
async def test_d5_a_denial_is_reported_with_its_wait_and_reason_and_held_back_and_sent_again(hub: HubServer) -> None:
    denials = Denials(hub.clock)
    async with relay_client(hub, "alice", on_rate_limited=denials) as alice, relay_client(hub, "bob") as bob:
        for number in range(2):
            await alice.send("bob", b"%d" % number)
        third = asyncio.create_task(alice.send("bob", b"2"))
        fourth = asyncio.create_task(alice.send("bob", b"3"))
        await wait_until(lambda: denials, "the denial")
        began = hub.clock.now()
        assert [body.body for body in await take(bob, 2)] == [b"0", b"1"]
        ((when, denial),) = denials
        assert when == began
        assert denial.wait == 2.0
        assert denial.reason == "an address may send 0.5/second burst 2; send it again in 2000 ms"
        assert 2.0 <= alice.delay <= 2.2
        assert alice.waiting == 2

        hub.clock.advance(1.999999)
        assert await holds_for_turns(lambda: hub.hub.relay.denied == 1 and hub.hub.relay.passed == 2)
        await advance_until_done(hub.clock, alice, third)
        await advance_until_done(hub.clock, alice, fourth)
        found = await take(bob, 2)
        assert [(one.sender, one.body) for one in found] == [("alice", b"2"), ("alice", b"3")]
        assert found[0].id == third.result() == denial.id
        assert alice.waiting == 0
        assert alice.delay == 0.0


@pytest.mark.parametrize("in_flight", [1, 8])
@with_hub()
async def test_d5_all_of_300_arrive_once_and_in_order_with_few_denials_and_none_early(
    hub: HubServer, in_flight: int
) -> None:
    denials = Denials(hub.clock)
    options: dict[str, Any] = {"on_rate_limited": denials, "in_flight": in_flight}
    async with relay_client(hub, "alice", **options) as alice, relay_client(hub, "bob") as bob:
        began = hub.clock.now()
        reading = asyncio.create_task(take(bob, 300))
        sends = asyncio.gather(*[alice.send("bob", b"%d" % number) for number in range(300)])
        await advance_until_done(hub.clock, alice, sends)
        found = await reading
        assert [one.body for one in found] == [b"%d" % number for number in range(300)]
        assert len({one.id for one in found}) == 300
        took = (hub.clock.now() - began) / SECOND
        print(f"{in_flight} in flight: {len(denials)} denials, {took:.1f} s, of 290 s that it takes at least")
        assert hub.hub.relay.denied == len(denials) <= 10 + in_flight
        assert 290 <= took <= 290 * 1.05
        assert bob.dropped == 0


@with_hub()
async def test_d5_a_sequential_sender_is_not_denied_each_time(hub: HubServer) -> None:
    denials = Denials(hub.clock)
    async with relay_client(hub, "alice", on_rate_limited=denials) as alice, relay_client(hub, "bob") as bob:

        async def talk() -> None:
            for number in range(80):
                await alice.send("bob", b"%d" % number)

        await advance_until_done(hub.clock, alice, talk())
        assert [one.body for one in await take(bob, 80)] == [b"%d" % number for number in range(80)]
        before = len(denials)
        assert 2 <= before <= 5
        hub.clock.advance(3600)  # then the bucket is full, and the burst is there again
        for _ in range(10):
            await alice.send("bob", b"")
        assert len(denials) == before
        await advance_until_done(hub.clock, alice, talk())
        assert len(denials) <= before + 4


@with_hub(relay_rate_burst="1")
async def test_d5_clients_that_are_denied_at_the_same_moment_do_not_come_back_at_the_same_moment(
    hub: HubServer,
) -> None:
    clients = [relay_client(hub, f"agent-{number}") for number in range(20)]
    for client in clients:
        await client.__aenter__()
    try:
        for client in clients:
            with pytest.raises(Refused, match="unreachable"):
                await client.send("nobody", b"")
        sends = [asyncio.create_task(client.send("nobody", b"")) for client in clients]
        await wait_until(lambda: hub.hub.relay.denied == 20, "the denials")
        await wait_until(lambda: all(client.delay for client in clients), "the holding back")
        waits = sorted(client.delay for client in clients)
        assert waits[0] >= 1.0
        assert len(set(waits)) == 20
        assert waits[-1] - waits[0] > 0.05
        for number, wait in enumerate(waits):
            hub.clock.advance(wait - (waits[number - 1] if number else 0.0))
            await wait_until(lambda number=number: hub.hub.relay.passed == 21 + number, "the next")  # type: ignore[misc]
        assert hub.hub.relay.denied == 20
        for send in sends:
            with pytest.raises(Refused, match="unreachable"):
                await send
    finally:
        for client in clients:
            await client.close(0)


def test_d5_a_limit_learns_the_pace_and_that_it_has_changed() -> None:
    """By a bucket of one token each 3 seconds, which becomes one of 1 second after a while."""
    limit, now, every, denied = PacedLimit(1), 0, 3 * SECOND, Counter[int]()
    ready = 0  # when the bucket has its next token
    for number in range(1000):
        every = 3 * SECOND if number < 300 else SECOND
        while True:
            opens = limit.next_send()
            assert opens is not None
            now = max(now, opens)
            limit.sent(now)
            limit.in_flight -= 1
            if now >= ready:
                break
            denied[number // 300] += 1
            limit.denied(now, ready - now, 0)
        limit.passed(warned=False)
        ready += every
    assert denied[0] <= 8
    assert sum(denied.values()) <= 25
    print(denied, now / SECOND)
    assert now <= (300 * 3 + 700) * SECOND * 1.25


def pass_one(limit: PacedLimit, now: int) -> None:
    """Send a message, which passes."""
    limit.sent(now)
    limit.in_flight -= 1
    limit.passed(warned=False)


def test_idle_time_does_not_count_as_a_pace() -> None:
    limit = PacedLimit(1)
    limit.denied(10 * SECOND, SECOND, 0)
    for now in (11 * SECOND, 3600 * SECOND):
        pass_one(limit, now)
    limit.denied(3600 * SECOND, SECOND, 0)
    assert limit.next_send() == 3601 * SECOND
    pass_one(limit, 3601 * SECOND)
    assert limit.next_send() == 3601 * SECOND


def test_a_denial_at_a_slightly_fast_pace_waits_only_as_advised() -> None:
    limit = PacedLimit(1)
    limit.denied(0, SECOND, 0)
    pass_one(limit, SECOND)
    limit.denied(SECOND, SECOND, 0)
    limit.sent(2 * SECOND)
    limit.in_flight -= 1
    limit.denied(2 * SECOND, 1000, 10)
    assert limit.next_send() == 2 * SECOND + 1010


def test_a_failing_callback_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    def fail(denial: Denial) -> None:
        raise RuntimeError(denial.reason)

    async def main() -> None:
        async with relay_client(hub, "alice", on_rate_limited=fail) as alice, relay_client(hub, "bob"):
            await alice.send("bob", b"")
            await advance_until_done(hub.clock, alice, alice.send("bob", b""))

    with hub_server(relay_rate_burst="1") as hub:
        run(main())
    assert "has failed" in caplog.text


# The queue ------------------------------------------------------------------------------------------------------------


@both_clients
@with_limited_hub
async def test_d5_the_queue_is_bounded_and_senders_wait_for_room_in_turn(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "alice", most=3) as alice, kind.connect(hub, "bob") as bob:
        await kind.send(alice, "bob", "first")
        sends = [asyncio.create_task(kind.send(alice, "bob", str(number))) for number in range(8)]
        await wait_until(lambda: alice.delay, "the wait")
        assert alice.waiting == 3
        with pytest.raises(QueueFull, match="the queue is full"):
            await kind.send(alice, "bob", "no room", wait=False)
        await advance_until_done(hub.clock, alice, asyncio.gather(*sends))
        await advance_until_done(hub.clock, alice, kind.send(alice, "bob", "room", wait=False))
        assert await kind.take(bob, 10) == ["first", *map(str, range(8)), "room"]


@both_clients
@with_limited_hub
async def test_d5_a_cancelled_message_is_not_sent_later(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "alice", most=3) as alice, kind.connect(hub, "bob") as bob:
        await kind.send(alice, "bob", "first")
        names = ("denied", "waits", "stays", "no room", "comes")
        denied, waits, stays, no_room, comes = [asyncio.create_task(kind.send(alice, "bob", one)) for one in names]
        await wait_until(lambda: alice.delay, "the wait")
        for task in (denied, waits, no_room):
            task.cancel()
        await wait_until(lambda: alice.waiting == 2, "that there is room")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await kind.send(alice, "bob", "too late")
        await advance_until_done(hub.clock, alice, asyncio.gather(stays, comes))
        await advance_until_done(hub.clock, alice, kind.send(alice, "bob", "last"))
        assert await kind.take(bob, 4) == ["first", "stays", "comes", "last"]
        unsent = asyncio.create_task(kind.send(alice, "bob", "unsent"))
        await wait_until(lambda: alice.delay, "the wait")
        assert await alice.close(within=0) == 1
        with pytest.raises(Unsent):
            await unsent


@both_clients
@with_limited_hub
async def test_d5_close_waits_for_the_queue_and_counts_unsent_messages(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "bob") as bob:
        async with kind.connect(hub, "alice", most=4) as alice:
            await kind.send(alice, "bob", "0")
            sends = [asyncio.create_task(kind.send(alice, "bob", str(number))) for number in range(1, 9)]
            await wait_until(lambda: alice.delay, "the wait")
            closing = asyncio.create_task(alice.close(within=2.5 * kind.interval))
            await asyncio.sleep(0)
            end = hub.clock.now() + round(2.5 * kind.interval * SECOND)

            def moved() -> bool:
                if alice.delay:
                    hub.clock.advance(min(alice.delay, (end - hub.clock.now()) / SECOND))
                return closing.done()

            await wait_until(moved, "the end")
            assert await closing == 6  # of which two had waited for room
            await asyncio.gather(*sends[:2])
            for send in sends[2:]:
                with pytest.raises(Unsent, match="the client was closed; this was not sent") as info:
                    await send
                assert not info.value.maybe
            with pytest.raises(Unsent, match="the client is closed; make another"):
                await kind.send(alice, "bob", "")
            assert [one async for one in alice] == []
            assert await alice.close() == 0
        assert await kind.take(bob, 3) == ["0", "1", "2"]


# What comes in --------------------------------------------------------------------------------------------------------


@with_hub(relay_rate_limit="off")
async def test_one_that_takes_no_more_messages_makes_the_hub_tell_their_sender(hub: HubServer) -> None:
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


@with_hub(relay_rate_limit="off")
async def test_one_that_never_takes_messages_can_still_send(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    async with relay_client(hub, "alice") as alice, relay_client(hub, "bob", buffer=2) as bob:
        for number in range(10):
            await alice.send("bob", b"%d" % number)
        await wait_until(lambda: bob.dropped == 8, "the messages")
        await bob.send("alice", b"hello")
        assert (await anext(alice)).body == b"hello"
        assert [one.body for one in await take(bob, 2)] == [b"8", b"9"]


@with_hub(relay_rate_limit="off")
async def test_one_that_answers_each_message_is_not_stuck_when_many_come(hub: HubServer) -> None:
    async with relay_client(hub, "alice", in_flight=20) as alice, relay_client(hub, "bob", buffer=1) as bob:

        async def answer() -> None:
            async for message in bob:
                await bob.send("alice", message.body, in_reply_to=message.id)

        async def hear() -> None:
            async for message in alice:
                answers.append(message.in_reply_to)  # noqa: PERF401 - each as soon as it comes

        answers: list[str] = []
        tasks = [asyncio.create_task(answer()), asyncio.create_task(hear())]
        ids = await asyncio.gather(*[alice.send("bob", b"%d" % number) for number in range(100)])
        await wait_until(lambda: len(answers) + bob.dropped == 100, "an answer to each that was not dropped")
        assert len(set(answers)) == len(answers) > 0
        assert set(answers) <= set(ids)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
