"""Messages to connected, absent and slow agents, and to chat channels."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from typing import Any

import httpx
import pytest
from msgspec import Raw
from websockets.exceptions import ConnectionClosed

from headgate import Policy
from headgate.hub.connections.connection import GuardedConnection
from headgate.hub.sockets.frames import Message
from headgate.hub.sockets.socket import Socket
from headgate.hub.storage.database import DatabaseError
from tests.support.agent_connections import LARGE, count_queued_frames, overfill, read_ahead, read_close, slow_reader
from tests.support.hub import AgentConnection, HubServer, hub_server
from tests.support.valkey import wait_for


def mail(http: httpx.Client, query: str = "") -> list[tuple[int, str, Any]]:
    """What waits in an agent's mailbox: number, sender and body."""
    messages = http.get(f"/api/mailbox{query}").json()["messages"]
    return [(message["number"], message["from"], message["body"]) for message in messages]


def all_mail(http: httpx.Client) -> list[tuple[int, str, Any]]:
    """Likewise, page after page."""
    found: list[tuple[int, str, Any]] = []
    while page := mail(http, f"?after={found[-1][0] if found else 0}&limit=100"):
        found += page
    return found


@contextmanager
def hub_with_slow_reader() -> Iterator[tuple[HubServer, AgentConnection, AgentConnection]]:
    """A hub that queues four frames, an agent without limits, and the agent "slow", which is a slow reader."""
    with (
        hub_server(Policy(exempt=["planner"]), max_waiting=4) as hub,
        hub.agent("planner") as planner,
        slow_reader(hub, "slow", hub.register("slow")) as slow,
    ):
        yield hub, planner, slow


# To agents -----------------------------------------------------------------------------------------------------------


def test_a_message_is_delivered_to_an_agent_that_is_connected() -> None:
    with hub_server() as hub, hub.agent("planner") as planner, hub.http(hub.register("caller")) as caller:
        token = hub.register("friend")
        with hub.agent("friend", token) as friend, hub.http(token) as mailbox:
            body = {"text": "☃", "parts": [1, 2.5, None, True], "big": 2**60}
            sent = planner.ask("message", to="friend", body=body, id=1)
            assert sent == {"type": "message_sent", "to": "friend", "delivered": True, "id": 1}
            message = friend.hear()
            assert isinstance(message.pop("at"), float)
            assert message == {"type": "message", "from": "planner", "body": body}
            answer = caller.post("/api/messages", json={"to": "friend", "body": "over HTTP"})
            assert (answer.status_code, answer.json()) == (200, {"to": "friend", "delivered": True})
            assert friend.hear().items() >= {"from": "caller", "body": "over HTTP"}.items()
            assert mail(mailbox) == []
            assert friend.ask("message", to="friend", body="to itself")["type"] in ("message", "message_sent")


def test_a_message_to_an_agent_that_is_away_waits_in_its_mailbox() -> None:
    with hub_server() as hub, hub.agent("planner") as planner:
        token = hub.register("friend")
        for body in ("one", "two"):
            assert planner.ask("message", to="friend", body=body)["delivered"] is False
        with hub.http(hub.register("caller")) as caller, hub.http(token) as mailbox:
            answer = caller.post("/api/messages", json={"to": "friend", "body": "three"})
            assert answer.json() == {"to": "friend", "delivered": False}
            one, two, three = (1, "planner", "one"), (2, "planner", "two"), (3, "caller", "three")
            assert mail(mailbox) == [one, two, three]
            assert mail(mailbox, "?limit=1") == [one]
            assert mail(mailbox, "?after=1&limit=1") == [two]
            assert mail(caller) == [], "nobody sees another's"
        with hub.socket() as friend:
            assert friend.ask("identify", agent_id="friend", token=token)["mail"] == 3


def test_a_message_to_an_agent_that_is_identifying_is_counted_or_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub:
        token, messages = hub.register("friend"), hub.hub.messages
        count = messages.waiting

        async def count_before_a_message(agent: str) -> int:
            found = await count(agent)
            await messages.send("planner", agent, Raw(b'"just now"'))
            return found

        monkeypatch.setattr(messages, "waiting", count_before_a_message)
        with hub.socket() as friend, hub.http(token) as mailbox:
            assert friend.ask("identify", agent_id="friend", token=token)["mail"] == len(mail(mailbox)) == 0
            assert friend.hear()["body"] == "just now"


def test_a_message_whose_recipient_identifies_meanwhile_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub, hub.agent("planner") as planner:
        token, registry = hub.register("friend"), hub.hub.registry
        looked_up, go_on, knows = asyncio.Event(), asyncio.Event(), registry.knows

        async def look_up(agent: str) -> bool:
            looked_up.set()
            await go_on.wait()
            return await knows(agent)

        monkeypatch.setattr(registry, "knows", look_up)
        planner.say("message", to="friend", body="just now")
        hub.run(looked_up.wait())
        with hub.socket() as friend:
            assert friend.ask("identify", agent_id="friend", token=token)["mail"] == 0
            hub.call(go_on.set)
            assert planner.hear()["delivered"] is True
            assert friend.hear()["body"] == "just now"


def test_an_agent_whose_mail_cannot_be_counted_is_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_agent: str) -> int:
        raise DatabaseError("hub.db: disk I/O error")

    with hub_server() as hub, hub.socket() as friend:
        token = hub.register("friend")
        monkeypatch.setattr(hub.hub.messages, "waiting", fail)
        refused = friend.ask("identify", agent_id="friend", token=token, id=1)
        assert (refused["id"], refused["error"]) == (1, "unavailable")
        assert read_close(friend)[0] == 1013
        wait_for(lambda: not hub.hub.presence.is_connected("friend"), "it to be gone")


def test_only_acknowledged_messages_leave_the_mailbox() -> None:
    with (
        hub_server() as hub,
        hub.agent("planner") as planner,
        hub.http(hub.register("friend")) as mailbox,
        hub.http(hub.register("stranger")) as stranger,
    ):
        for body in range(3):
            planner.ask("message", to="friend", body=body)

        def acknowledge(http: httpx.Client, *numbers: int) -> object:
            return http.post("/api/mailbox/ack", json={"numbers": numbers}).json()

        assert acknowledge(stranger, 1, 2, 3) == {"acknowledged": 0}
        assert [number for number, *_ in mail(mailbox)] == [1, 2, 3], "it stays until then"
        assert acknowledge(mailbox, 1, 3, 99) == {"acknowledged": 2}
        assert mail(mailbox) == [(2, "planner", 1)]
        assert acknowledge(mailbox, 1, 2) == {"acknowledged": 1}
        assert mail(mailbox) == []


def test_messages_to_unknown_agents_are_refused() -> None:
    with hub_server() as hub, hub.agent("planner") as planner, hub.http(hub.register("caller")) as caller:
        unknown = {"error": "unknown_agent", "detail": "there is no agent 'nobody'"}
        assert planner.ask("message", to="nobody", body=1, id=1) == {"type": "error", "id": 1, **unknown}
        answer = caller.post("/api/messages", json={"to": "nobody", "body": 1})
        assert (answer.status_code, answer.json()) == (404, unknown)
        hub.register("gone")
        hub.run(hub.hub.registry.revoke("gone"))
        assert planner.ask("message", to="gone", body=1)["error"] == "unknown_agent"


def test_messages_to_a_full_mailbox_are_refused() -> None:
    with hub_server(max_mail=2) as hub, hub.agent("planner") as planner, hub.http(hub.register("friend")) as friend:
        for _ in range(2):
            assert planner.ask("message", to="friend", body=1)["type"] == "message_sent"
        full = {"error": "mailbox_full", "detail": "'friend' is away, and 2 messages wait for it already"}
        assert planner.ask("message", to="friend", body=1, id="x") == {"type": "error", "id": "x", **full}
        with hub.http(hub.register("caller")) as caller:
            answer = caller.post("/api/messages", json={"to": "friend", "body": 1})
            assert (answer.status_code, answer.json()) == (409, full)
        friend.post("/api/mailbox/ack", json={"numbers": [1]})
        assert planner.ask("message", to="friend", body=1)["type"] == "message_sent"


def test_a_message_goes_to_the_newest_connection_of_an_agent() -> None:
    with hub_server() as hub, hub.agent("planner") as planner:
        token = hub.register("friend")
        with hub.agent("friend", token) as old:
            with hub.agent("friend", token) as new:
                planner.ask("message", to="friend", body=1)
                assert new.hear()["body"] == 1
            wait_for(lambda: len(hub.hub.presence.sockets_of("friend")) == 1, "it to be gone")
            planner.ask("message", to="friend", body=2)
            assert old.hear()["body"] == 2


def test_the_queue_of_a_slow_reader_is_bounded_and_goes_to_its_mailbox() -> None:
    with hub_server(Policy(exempt=["planner"]), max_waiting=4) as hub, hub.agent("planner") as planner:
        token = hub.register("slow")
        with slow_reader(hub, "slow", token) as slow:
            taken = overfill(planner, slow)
            assert count_queued_frames(hub, "slow") == 4
            assert planner.ask("list_agents")["agents"] == ["planner", "slow"], "nobody waits for it"
        wait_for(lambda: not hub.hub.presence.sockets_of("slow"), "it to be gone")
        with hub.http(token) as mailbox:
            wait_for(lambda: len(mail(mailbox)) == 5, "what it has not taken")
            kept = [(sender, body[0]) for _, sender, body in mail(mailbox)]
        too_many, untaken = kept[:1], kept[1:]
        assert too_many == [("planner", taken)], "which had found no room"
        assert untaken == [("planner", number) for number in range(taken - 4, taken)]


def test_a_message_that_never_left_the_hub_is_not_lost_when_the_hub_gives_a_reader_up() -> None:
    """It was in the transport's buffer: written, and not taken by the operating system."""
    with hub_server(Policy(exempt=["planner"])) as hub, hub.agent("planner") as planner:
        token = hub.register("slow")
        with slow_reader(hub, "slow", token) as slow:
            taken = overfill(planner, slow)
            assert hub.server is not None
            transports = [one.transport for one in hub.server.server_state.connections]
            (it,) = [one for one in transports if isinstance(one, GuardedConnection) and one._blocked]
            assert hub.call(it.get_write_buffer_size) > 0
            for time_passed in (0.0, it.write_within):
                hub.call(it.check, hub.loop.time() + time_passed)
            read = []
            with suppress(ConnectionClosed):
                while True:
                    read.append(slow.hear()["body"][0])
        with hub.http(token) as mailbox:
            wait_for(lambda: not hub.hub.presence.is_connected("slow"), "it to be gone")
            wait_for(lambda: len(mail(mailbox)) > 1, "what it has not taken")
            kept = [body[0] for *_, body in all_mail(mailbox)]
        assert kept[0] == taken, "which had found no room"
        assert sorted({*read, *kept}) == list(range(taken + 1))


def test_a_message_that_was_read_is_not_in_the_mailbox_too() -> None:
    with hub_server() as hub, hub.agent("planner") as planner:
        token = hub.register("friend")
        with hub.agent("friend", token) as friend:
            for number in range(5):
                planner.ask("message", to="friend", body=number)
            assert [friend.hear()["body"] for _ in range(5)] == list(range(5))
        with hub.agent("friend", token) as friend:
            planner.ask("message", to="friend", body=5)
            assert friend.hear()["body"] == 5
            wait_for(lambda: count_queued_frames(hub, "friend") == 0, "the hub to know that it has left")
            friend.socket.socket.setsockopt(SOL_SOCKET, SO_LINGER, pack("ii", 1, 0))  # a reset instead of a goodbye
            friend.socket.socket.close()
        wait_for(lambda: not hub.hub.presence.is_connected("friend"), "it to be gone")
        with hub.http(token) as mailbox:
            assert mail(mailbox) == []


def test_hanging_up_without_reading_does_not_fill_a_mailbox_beyond_its_bound(logged: list[Any]) -> None:
    policy = Policy(limits=dict.fromkeys(("light", "normal"), "1000000/minute"))
    with hub_server(policy, max_waiting=4, max_mail=5, max_mail_per_sender=2) as hub, hub.agent("greedy") as greedy:
        token = hub.register("slow")

        def hang_up(queued: list[Message]) -> None:
            """Close a connection that has sent none of its queue."""

            async def never(_message: Any = None) -> Any:
                await asyncio.Event().wait()

            async def close() -> None:
                socket = Socket(never, never, "127.0.0.1", 4)
                assert all([socket.push("x", message) for message in queued])
                socket.closed = True
                await hub.hub.messages.save_unsent("slow", socket)

            hub.run(close())

        def message(sender: str, number: int) -> Message:
            return Message(sender=sender, body=Raw(str(number).encode()), at=1.0)

        for number in range(2):
            assert greedy.ask("message", to="slow", body=number)["type"] == "message_sent"
        hang_up([message("greedy", number) for number in range(2, 6)])
        assert hub.hub.messages.lost == 0, "the first time all of a queue fits, even into a full mailbox"
        hang_up([message("greedy", 6), message("other", 7), message("greedy", 8), message("other", 9)])
        assert hub.hub.messages.lost == 2
        hang_up([message("third", number) for number in range(10, 14)])
        hang_up([message("third", number) for number in range(14, 18)])
        with hub.http(token) as http:
            assert [body for *_, body in mail(http)] == [0, 1, 2, 3, 4, 5, 7, 9, 10]
        assert hub.hub.messages.lost == 9
        told = [line["messages"] for line in logged if line["event"].startswith("undelivered messages are lost")]
        assert told == [2, 3, 4]


def test_the_queues_of_all_connections_of_an_agent_fit_into_its_mailbox() -> None:
    policy = Policy(exempt=["planner"])
    with ExitStack() as open_sockets:
        hub = open_sockets.enter_context(hub_server(policy, max_waiting=4, max_mail_per_sender=2))
        planner = open_sockets.enter_context(hub.agent("planner"))
        token = hub.register("slow")
        *_, newest = [open_sockets.enter_context(slow_reader(hub, "slow", token)) for _ in range(3)]
        taken = overfill(planner, newest)
        assert planner.ask("message", to="slow", body=[taken + 1])["delivered"] is False
        assert planner.ask("message", to="slow", body=[taken + 2])["error"] == "mailbox_full"
        sockets = hub.hub.presence.sockets_of("slow")
        queued = hub.call(lambda: sum(socket.queued for socket in sockets))
        assert queued == 4
        for socket in sockets:
            hub.call(socket.close_revoked)
        wait_for(lambda: not hub.hub.presence.is_connected("slow"), "all of them to be gone")
        with hub.http(token) as mailbox:
            wait_for(lambda: len(mail(mailbox)) == 6, "what was queued")
            assert [body[0] for *_, body in mail(mailbox)] == [taken, taken + 1, *range(taken - 4, taken)]
        assert hub.hub.messages.lost == 0


def test_the_queues_of_connections_that_end_at_once_are_saved_in_the_order_of_time() -> None:
    async def never(_message: Any = None) -> Any:
        await asyncio.Event().wait()

    with hub_server(max_waiting=4, max_mail=1) as hub, hub.http(hub.register("slow")) as mailbox:

        async def hang_up(numbers: range) -> None:
            socket = Socket(never, never, "127.0.0.1", 4)
            for number in numbers:
                socket.push("x", Message(sender="planner", body=Raw(b"%d" % number), at=float(number)))
            socket.closed = True
            await hub.hub.messages.save_unsent("slow", socket)

        async def hang_up_at_once() -> None:
            await asyncio.gather(hang_up(range(4, 8)), hang_up(range(4)))

        hub.run(hang_up_at_once())
        assert [body for *_, body in mail(mailbox)] == [0, 1, 2, 3, 4], "the newest are lost"
        assert hub.hub.messages.lost == 3


def test_messages_that_the_disk_has_not_taken_at_the_end_are_counted_as_lost(
    tmp_path: Path, logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_job: Any) -> Any:
        raise DatabaseError("hub.db: nothing was written: disk I/O error")

    with hub_server(data=tmp_path) as hub:
        unsent = [Message(sender="planner", body=Raw(b"1"), at=1.0)] * 3
        hub.hub.messages._unwritten["slow"] = unsent
        monkeypatch.setattr(hub.hub.messages._database, "run", full)
        hub.run(hub.hub.messages.close())
        monkeypatch.undo()
        assert hub.hub.messages.lost == 3
    (line,) = [line for line in logged if line["event"] == "undelivered messages are lost: the disk can't be written"]
    assert (line["messages"], line["log_level"]) == (3, "error")


def test_a_slow_reader_that_reads_on_gets_everything_in_order() -> None:
    with hub_with_slow_reader() as (_, planner, slow):
        taken = overfill(planner, slow)
        assert [slow.hear()["body"][0] for _ in range(taken)] == list(range(taken))
        assert planner.ask("message", to="slow", body="small")["delivered"], "there is room again"
        assert slow.hear()["body"] == "small"


def test_a_slow_reader_whose_token_is_replaced_is_dropped_without_loss() -> None:
    with hub_with_slow_reader() as (hub, planner, slow):
        taken = overfill(planner, slow)
        token = hub.run(hub.hub.registry.rotate("slow"))
        wait_for(lambda: len(hub.hub.presence.sockets) == 1, "its place to be free")
        assert planner.ask("list_agents")["agents"] == ["planner"]
        with hub.http(token) as mailbox:
            assert [body[0] for _, _, body in mail(mailbox)] == [taken, *range(taken - 4, taken)]


# Channels ------------------------------------------------------------------------------------------------------------


def test_a_chat_channel_reaches_all_subscribers() -> None:
    with hub_server() as hub, hub.agent("one") as one, hub.agent("two") as two, hub.http(hub.register("boss")) as boss:
        made = boss.post("/api/channels", json={"name": "news", "about": "what is new"})
        about = {"name": "news", "creator": "boss", "about": "what is new", "subscribers": 0}
        assert (made.status_code, made.json().items() >= about.items()) == (201, True)
        again = boss.post("/api/channels", json={"name": "news"})
        assert (again.status_code, again.json()["error"]) == (409, "exists")
        for wire in (one, two, two):  # twice is the same as once
            assert wire.ask("channel_subscribe", channel="news")["type"] == "subscribed"
        assert boss.get("/api/channels/news").json()["subscribers"] == 2
        answer = boss.post("/api/channels/news/publish", json={"body": {"n": 1}})
        assert (answer.status_code, answer.json()) == (201, {"channel": "news", "number": 1})
        for wire in (one, two):
            message = wire.hear()
            assert isinstance(message.pop("at"), float)
            assert message == {
                "type": "channel_message",
                "channel": "news",
                "number": 1,
                "from": "boss",
                "body": {"n": 1},
            }
        assert two.ask("channel_unsubscribe", channel="news")["type"] == "unsubscribed"
        assert two.ask("channel_publish", channel="news", body=2)["number"] == 2
        assert one.hear()["body"] == 2
        assert two.ask("ping") == {"type": "pong"}, "which has not heard it"
        history = boss.get("/api/channels/news/messages").json()["messages"]
        assert [(post["number"], post["from"], post["body"]) for post in history] == [
            (1, "boss", {"n": 1}),
            (2, "two", 2),
        ]
        assert [post["number"] for post in two.ask("channel_history", channel="news", before=2)["messages"]] == [1]
        assert [post["number"] for post in two.ask("channel_history", channel="news", limit=1)["messages"]] == [2]


def test_disconnecting_ends_subscriptions() -> None:
    with hub_server() as hub, hub.http(hub.register("boss")) as boss:
        with hub.agent("one") as one:
            one.ask("channel_subscribe", channel="general")
            assert boss.get("/api/channels/general").json()["subscribers"] == 1
        wait_for(lambda: not hub.hub.presence.sockets_of("one"), "it to be gone")
        assert boss.get("/api/channels/general").json()["subscribers"] == 0


@pytest.mark.parametrize("name", ["", "a b", "naïve", "..", "a\n"])
def test_a_bad_name_of_a_chat_channel_is_explained_in_words(name: str) -> None:
    expected = "Expected up to 64 letters, digits, dots, dashes and underscores, other than . and .. - at `$."
    with hub_server() as hub, hub.agent_and_http("planner") as (wire, http):
        assert wire.ask("channel_subscribe", channel=name)["detail"] == f"{expected}channel`"
        assert http.post("/api/channels", json={"name": name}).json()["detail"] == f"body: {expected}name`"


def test_unknown_chat_channels_are_refused() -> None:
    unknown = {"error": "unknown_channel", "detail": "there is no chat channel 'none'"}
    with hub_server() as hub, hub.agent("one") as one, hub.http(hub.register("boss")) as boss:
        for kind in ("channel_publish", "channel_subscribe", "channel_unsubscribe", "channel_history"):
            fields = {"body": 1} if kind == "channel_publish" else {}
            assert one.ask(kind, channel="none", id=3, **fields) == {"type": "error", "id": 3, **unknown}
        answers = [boss.get("/api/channels/none"), boss.get("/api/channels/none/messages")]
        for answer in (*answers, boss.post("/api/channels/none/publish", json={"body": 1})):
            assert (answer.status_code, answer.json()) == (404, unknown)


def publish(wire: AgentConnection, channel: str, body: object) -> int:
    number: int = wire.ask("channel_publish", channel=channel, body=body)["number"]
    return number


def fall_behind(boss: AgentConnection, slow: AgentConnection, hub: HubServer, channel: str) -> int:
    """Publish until a slow reader misses three messages of a chat channel; the number of those before."""
    last = [publish(boss, channel, LARGE) for _ in range(2)][-1]
    read_ahead(slow)
    while count_queued_frames(hub, "slow") < 4:
        last = publish(boss, channel, LARGE)
    for _ in range(3):
        publish(boss, channel, "missed")
    return last


def test_a_slow_reader_is_told_that_its_chat_channel_was_deleted() -> None:
    with hub_with_slow_reader() as (hub, boss, slow), hub.http(hub.register("owner")) as http:
        assert http.post("/api/channels", json={"name": "room"}).status_code == 201
        assert slow.ask("channel_subscribe", channel="room")["type"] == "subscribed"
        sent = fall_behind(boss, slow, hub, "room")
        assert http.delete("/api/channels/room").status_code < 300
        assert [slow.hear()["number"] for _ in range(sent)] == list(range(1, sent + 1))
        assert slow.hear() == {"type": "lagged", "channel": "room", "missed": 3}
        assert slow.hear() == {"type": "unsubscribed", "channel": "room"}
        assert http.post("/api/channels", json={"name": "room"}).status_code == 201
        boss.ask("channel_publish", channel="room", body="in another room")
        assert slow.ask("ping") == {"type": "pong"}


def test_nothing_of_a_chat_channel_comes_after_the_end_of_the_subscription() -> None:
    with hub_with_slow_reader() as (hub, boss, slow):
        assert slow.ask("channel_subscribe", channel="general")["type"] == "subscribed"
        sent = fall_behind(boss, slow, hub, "general")
        slow.say("channel_unsubscribe", channel="general", id=7)
        assert [slow.hear()["number"] for _ in range(sent)] == list(range(1, sent + 1))
        assert slow.hear() == {"type": "lagged", "channel": "general", "missed": 3}
        assert slow.hear() == {"type": "unsubscribed", "channel": "general", "id": 7}
        boss.ask("channel_publish", channel="general", body="later")
        assert slow.ask("ping") == {"type": "pong"}


def test_a_slow_reader_that_hangs_up_while_it_unsubscribes_is_gone() -> None:
    with hub_server(Policy(exempt=["boss"]), max_waiting=4) as hub, hub.agent("boss") as boss:
        with slow_reader(hub, "slow", hub.register("slow")) as slow:
            assert slow.ask("channel_subscribe", channel="general")["type"] == "subscribed"
            fall_behind(boss, slow, hub, "general")
            slow.say("channel_unsubscribe", channel="general")
        wait_for(lambda: not hub.hub.presence.is_connected("slow"), "it to be gone")


def test_a_slow_reader_is_told_how_many_chat_messages_it_has_missed() -> None:
    with hub_with_slow_reader() as (hub, boss, slow):
        assert slow.ask("channel_subscribe", channel="general")["type"] == "subscribed"

        last = fall_behind(boss, slow, hub, "general")
        missed = [last + 1, last + 2, last + 3]
        assert [slow.hear()["number"] for _ in range(last)] == list(range(1, last + 1))
        assert slow.hear() == {"type": "lagged", "channel": "general", "missed": 3}, "as soon as it has caught up"
        again = publish(boss, "general", "again")
        assert slow.hear().items() >= {"type": "channel_message", "number": again, "body": "again"}.items()
        publish(boss, "general", "more")
        assert slow.hear()["body"] == "more", "it is told once"
        history = slow.ask("channel_history", channel="general", before=again, limit=3)
        assert [post["number"] for post in history["messages"]] == missed
