"""The client of `/ws`, against real hubs on a clock that stands still."""

import asyncio
from typing import Any

import pytest

from headgate import InvalidInput, Policy
from headgate.client import HubClient, Refused, Warned
from headgate.client.hub import TierLimit
from tests.support.event_loop import holds_for_turns, wait_until
from tests.support.hub import HubServer
from tests.support.hub_clients import Denials, advance_until_done, hub_client, with_hub

pytestmark = pytest.mark.once
SECOND = 1_000_000
SIGNAL = {"type": "step", "entity": "plan-7", "weight": 1.0, "timestamp": 1700000000}


def bodies(frames: list[dict[str, Any]]) -> list[Any]:
    return [frame["body"] for frame in frames]


async def take(client: HubClient, number: int) -> list[dict[str, Any]]:
    return [await anext(client) for _ in range(number)]


async def cut(hub: Any, name: str) -> None:
    """Have the hub close an agent's connection."""
    for socket in hub.hub.presence.sockets_of(name):
        hub.run(socket.close(1001, "goodbye"))


# Questions ------------------------------------------------------------------------------------------------------------


@with_hub(max_frame=2000)
async def test_a_question_is_answered_and_a_refusal_raised(hub: HubServer) -> None:
    async with hub_client(hub, "alice") as alice, hub_client(hub, "bob") as bob:
        assert await alice.ask("ping") == {"type": "pong"}
        assert await alice.ask("list_agents") == {"type": "agents", "agents": ["alice", "bob"], "more": False}
        sent = await alice.ask("message", to="bob", body={"text": "hé"})
        assert sent == {"type": "message_sent", "to": "bob", "delivered": True}
        (message,) = await take(bob, 1)
        assert (message["type"], message["from"], message["body"]) == ("message", "alice", {"text": "hé"})
        with pytest.raises(Refused, match=r"^unknown_agent: ") as info:
            await alice.ask("message", to="carol", body=1)
        assert info.value.code == "unknown_agent"
        with pytest.raises(Refused, match=r"^invalid: .*the types are"):
            await alice.ask("dance")
        with pytest.raises(Refused, match=r"^too_large: "):  # answered without an id, since it isn't read
            await alice.ask("message", to="bob", body="x" * 2500)
        assert await asyncio.gather(*[alice.ask("ping") for _ in range(20)]) == [{"type": "pong"}] * 20


async def test_frames_are_validated_before_they_are_sent() -> None:
    client = HubClient("http://hub.example", "alice", "secret")
    with pytest.raises(InvalidInput, match="kind: expected the type of a frame, such as ping; the client ident"):
        await client.ask("identify", agent_id="alice", token="secret")
    with pytest.raises(InvalidInput, match=r"message fields: expected values that JSON has \(Object of type bytes"):
        await client.ask("message", to="bob", body=b"")
    with pytest.raises(InvalidInput, match=r"message fields: expected values that JSON has \(Out of range float"):
        await client.ask("message", to="bob", body=float("nan"))


@with_hub()
async def test_tasks_and_channels_come_as_events(hub: HubServer) -> None:
    async with hub_client(hub, "alice") as alice, hub_client(hub, "bob") as bob:
        await alice.ask("channel_subscribe", channel="general")
        await bob.ask("channel_publish", channel="general", body="news")
        (news,) = await take(alice, 1)
        assert (news["type"], news["channel"], news["body"]) == ("channel_message", "general", "news")
        await bob.ask("status", status="busy")
        with hub.http("the-admin-token-of-the-tests") as http:
            http.post("/api/admin/tasks", json={"payload": [1]}).raise_for_status()
        (task,) = await take(alice, 1)
        assert (task["type"], task["payload"]) == ("task_assigned", [1])
        assert (await alice.ask("task_accepted", task_id=task["task_id"]))["state"] == "accepted"


# Limits ---------------------------------------------------------------------------------------------------------------


@with_hub()
async def test_d5_b1_a_denied_frame_is_reported_and_held_with_its_tier_and_sent_again_in_order(hub: HubServer) -> None:
    denials = Denials(hub.clock)
    async with hub_client(hub, "alice", on_rate_limited=denials) as alice, hub_client(hub, "bob") as bob:
        hub.hub.gate.set_override("alice", "normal", "2 per 10 seconds", channel="ws")
        hub.hub.gate.check("alice", "ws", "normal")
        hub.hub.gate.check("alice", "ws", "normal")
        sends = [asyncio.create_task(alice.ask("message", to="bob", body=number)) for number in range(6)]
        await wait_until(lambda: denials, "the denial")
        ((when, denial),) = denials
        assert (denial.wait, denial.tier) == (5.0, "normal")
        assert denial.reason == "the limit of message, which is normal"
        assert 5.0 <= alice.delay <= 5.5
        assert await alice.ask("ping") == {"type": "pong"}  # another tier, which is not held back
        assert await alice.ask("session_open", session=1)
        hub.clock.advance(4.999999)
        assert await holds_for_turns(lambda: not any(send.done() for send in sends))
        await advance_until_done(hub.clock, alice, asyncio.gather(*sends))
        assert bodies(await take(bob, 6)) == [0, 1, 2, 3, 4, 5]
        assert hub.clock.now() >= when + 5 * SECOND
        assert len(denials) <= 2


@with_hub()
async def test_d5_warnings_are_reported_and_obeyed_so_that_nothing_is_denied(hub: HubServer) -> None:
    denials, warnings = Denials(hub.clock), list[Warned]()
    options: dict[str, Any] = {"on_rate_limited": denials, "on_warning": warnings.append}
    async with hub_client(hub, "alice", **options) as alice, hub_client(hub, "bob") as bob:
        began = hub.clock.now()
        reading = asyncio.create_task(take(bob, 100))
        sends = asyncio.gather(*[alice.ask("message", to="bob", body=number) for number in range(100)])
        await advance_until_done(hub.clock, alice, sends)
        assert bodies(await reading) == list(range(100))
        assert warnings[0].tier == "normal"
        assert (warnings[0].remaining, warnings[0].capacity) == (11, 60)
        assert denials == []
        assert not hub.hub.gate.is_rate_limited("alice")
        took = (hub.clock.now() - began) / SECOND
        print(f"{took:.1f} s, of 40 s that it takes at least")
        assert 40 <= took <= 42.5


@with_hub(Policy(limits={"heavy": "5/hour"}))
async def test_d5_a_slow_limit_is_learnt_from_one_denial(hub: HubServer) -> None:
    denials = Denials(hub.clock)
    async with hub_client(hub, "alice", on_rate_limited=denials) as alice:
        opens = asyncio.gather(*[alice.ask("session_open", session=number) for number in range(20)])
        await advance_until_done(hub.clock, alice, opens)
        assert len(denials) == 1
        hub.hub.gate.set_override("alice", "heavy", "100/minute")
        began = hub.clock.now()
        opens = asyncio.gather(*[alice.ask("session_open", session=number) for number in range(200)])
        await advance_until_done(hub.clock, alice, opens)
        assert hub.clock.now() - began <= 900 * SECOND  # what it knew holds once more, and then no longer


@with_hub(Policy(actions={"ws": {"ping": "heavy"}}))
async def test_d5_the_tier_of_a_frame_is_learnt_from_the_denial(hub: HubServer) -> None:
    denials = Denials(hub.clock)
    async with hub_client(hub, "alice", on_rate_limited=denials) as alice:
        hub.hub.gate.set_override("alice", "heavy", "1/minute", channel="ws")
        hub.hub.gate.check("alice", "ws", "heavy")
        ping = asyncio.create_task(alice.ask("ping"))
        await wait_until(lambda: denials, "the denial")
        assert denials[0][1].tier == "heavy"
        opening = asyncio.create_task(alice.ask("session_open", session=1))
        assert await alice.ask("list_agents")  # which is light, as usual
        assert await holds_for_turns(lambda: not opening.done())
        assert len(denials) == 1  # it was not even tried
        await advance_until_done(hub.clock, alice, asyncio.gather(ping, opening))


@with_hub()
async def test_d5_each_session_is_held_back_for_itself(hub: HubServer) -> None:
    denials = Denials(hub.clock)
    async with hub_client(hub, "alice", on_rate_limited=denials) as alice:
        await alice.ask("session_open", session="slow", rate=0.1, burst=1)
        await alice.ask("session_open", session="free")
        slow = [asyncio.create_task(alice.ask("session_signal", session="slow", signal=SIGNAL)) for _ in range(30)]
        await wait_until(lambda: denials, "the denial")
        assert denials[0][1].wait == 10.0
        assert denials[0][1].reason == "rate limited: agent 'alice' at 0.1 signals/sec, retry after 10000ms"
        for number in range(1, 4):
            logged = await alice.ask("session_signal", session="free", signal=SIGNAL)
            assert logged["number"] > number
        answers = await advance_until_done(hub.clock, alice, asyncio.gather(*slow))
        assert [frame["type"] for frame in answers] == ["signal_logged"] * 30
        assert len(denials) <= 3
        await alice.ask("session_close", session="slow")
        with pytest.raises(Refused, match="session_closed: session slow is closed"):
            await alice.ask("session_signal", session="slow", signal=SIGNAL)


def test_a_tier_that_others_use_too_is_not_taken_for_a_slow_one() -> None:
    limit = TierLimit(1)
    limit.warn(0, 0, SECOND, 0)
    assert limit.next_send() == SECOND
    limit.sent(3600 * SECOND)  # long after it could have been
    limit.in_flight -= 1
    limit.denied(3600 * SECOND, 5 * SECOND, 0)
    limit.warn(3605 * SECOND, 0, SECOND, 0)
    assert limit.next_send() == 3606 * SECOND


async def test_tiers_that_a_hub_makes_up_are_not_kept() -> None:
    client = HubClient("http://hub.example", "alice", "secret")
    item = client._item("message", {}, "")
    for number in range(1000):
        client._learn(item, {"tier": f"tier-{number}"})
        assert client._limit_of(item) is client._tiers[f"tier-{number}"]
    assert len(client._tiers) == 1


# Connections that drop ------------------------------------------------------------------------------------------------


@with_hub()
async def test_d5_a_new_connection_resubscribes_and_resends_unanswered_frames(hub: HubServer) -> None:
    async with hub_client(hub, "alice") as alice, hub_client(hub, "bob") as bob:
        for name in ("one", "two"):
            hub.run(hub.hub.messages.create_chat_channel(name, "bob", ""))
            await alice.ask("channel_subscribe", channel=name)
        await alice.ask("channel_subscribe", channel="general")
        await alice.ask("channel_unsubscribe", channel="two")
        await cut(hub, "alice")
        await wait_until(lambda: not alice.connected, "the end")
        send = asyncio.create_task(alice.ask("message", to="bob", body="meanwhile"))
        hub.clock.advance(0.5)
        assert (await take(alice, 1))[0] == {"type": "identified", "agent_id": "alice", "mail": 0}
        await send
        assert bodies(await take(bob, 1)) == ["meanwhile"]
        for name in ("one", "two", "general"):
            await bob.ask("channel_publish", channel=name, body=name)
        assert bodies(await take(alice, 2)) == ["one", "general"]


@with_hub(Policy(limits={"normal": "3/minute"}))
async def test_after_a_reconnect_identified_comes_when_all_subscriptions_are_restored(hub: HubServer) -> None:
    async with hub_client(hub, "alice", on_rate_limited=lambda _: None) as alice, hub_client(hub, "bob") as bob:
        for name in ("one", "two"):
            hub.run(hub.hub.messages.create_chat_channel(name, "bob", ""))
            await alice.ask("channel_subscribe", channel=name)
        await cut(hub, "alice")
        await wait_until(lambda: not alice.connected, "the end")
        hub.clock.advance(0.5)
        await wait_until(lambda: alice.connected and alice.delay, "a subscription that has to wait")
        identified = asyncio.create_task(take(alice, 1))
        await alice.ask("ping")  # other limits let it pass meanwhile
        assert await holds_for_turns(lambda: not identified.done())
        assert (await advance_until_done(hub.clock, alice, identified))[0]["type"] == "identified"
        assert alice.waiting == 0
        for name in ("one", "two"):
            await bob.ask("channel_publish", channel=name, body=name)
        assert bodies(await take(alice, 2)) == ["one", "two"]


@with_hub()
async def test_a_chat_channel_that_was_deleted_is_not_subscribed_again(hub: HubServer) -> None:
    async with hub_client(hub, "alice") as alice, hub_client(hub, "bob") as bob:
        messages = hub.hub.messages
        hub.run(messages.create_chat_channel("one", "bob", ""))
        await alice.ask("channel_subscribe", channel="one")
        hub.run(messages.delete_chat_channel("one", "bob", by_admin=False))
        assert (await take(alice, 1))[0] == {"type": "unsubscribed", "channel": "one"}
        hub.run(messages.create_chat_channel("one", "bob", ""))  # another of the same name
        await cut(hub, "alice")
        await wait_until(lambda: not alice.connected, "the end")
        hub.clock.advance(0.5)
        assert (await take(alice, 1))[0]["type"] == "identified"
        await bob.ask("channel_publish", channel="one", body="not for alice")
        await bob.ask("message", to="alice", body="for alice")
        assert bodies(await take(alice, 1)) == ["for alice"]


@with_hub()
async def test_sessions_that_are_closed_elsewhere_are_forgotten(hub: HubServer) -> None:
    signal = {"type": "step", "entity": "plan", "weight": 1.0, "timestamp": 1_700_000_000}
    token = hub.register("alice")
    async with hub_client(hub, "alice", token) as alice, hub_client(hub, "alice", token) as other:
        await alice.ask("session_open", session=1)
        await alice.ask("session_signal", session=1, signal=signal)
        assert list(alice._sessions) == ["1"]
        await other.ask("session_close", session=1)
        for session in (1, 2):
            with pytest.raises(Refused, match="session_closed"):
                await alice.ask("session_signal", session=session, signal=signal)
        assert not alice._sessions
