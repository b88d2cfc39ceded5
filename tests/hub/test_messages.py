"""Messages to connected, absent and slow agents, and to chat channels."""

import asyncio
from typing import Any

import httpx
import pytest
from msgspec import Raw

from headgate import Policy
from headgate.hub.sockets.frames import Message
from headgate.hub.sockets.socket import Socket
from tests.support.agent_connections import LARGE, overfill, read_ahead, slow_reader, waiting
from tests.support.hub import running
from tests.support.valkey import wait_for


def mail(http: httpx.Client, query: str = "") -> list[tuple[int, str, Any]]:
    """What waits in an agent's mailbox: number, sender and body."""
    messages = http.get(f"/api/mailbox{query}").json()["messages"]
    return [(message["number"], message["from"], message["body"]) for message in messages]


# To agents -----------------------------------------------------------------------------------------------------------


def test_a_message_is_delivered_to_an_agent_that_is_connected() -> None:
    with running() as hub, hub.agent("planner") as planner, hub.http(hub.register("caller")) as caller:
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
    with running() as hub, hub.agent("planner") as planner:
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


def test_only_acknowledged_messages_leave_the_mailbox() -> None:
    with (
        running() as hub,
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
    with running() as hub, hub.agent("planner") as planner, hub.http(hub.register("caller")) as caller:
        unknown = {"error": "unknown_agent", "detail": "there is no agent 'nobody'"}
        assert planner.ask("message", to="nobody", body=1, id=1) == {"type": "error", "id": 1, **unknown}
        answer = caller.post("/api/messages", json={"to": "nobody", "body": 1})
        assert (answer.status_code, answer.json()) == (404, unknown)
        hub.register("gone")
        hub.run(hub.hub.registry.revoke("gone"))
        assert planner.ask("message", to="gone", body=1)["error"] == "unknown_agent"


def test_messages_to_a_full_mailbox_are_refused() -> None:
    with running(max_mail=2) as hub, hub.agent("planner") as planner, hub.http(hub.register("friend")) as friend:
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
    with running() as hub, hub.agent("planner") as planner:
        token = hub.register("friend")
        with hub.agent("friend", token) as old:
            with hub.agent("friend", token) as new:
                planner.ask("message", to="friend", body=1)
                assert new.hear()["body"] == 1
            wait_for(lambda: len(hub.hub.presence.sockets_of("friend")) == 1, "it to be gone")
            planner.ask("message", to="friend", body=2)
            assert old.hear()["body"] == 2


def test_the_queue_of_a_slow_reader_is_bounded_and_goes_to_its_mailbox() -> None:
    with running(Policy(exempt=["planner"]), max_waiting=4) as hub, hub.agent("planner") as planner:
        token = hub.register("slow")
        with slow_reader(hub, "slow", token) as slow:
            taken = overfill(planner, slow)
            assert waiting(hub, "slow") == 4
            assert planner.ask("list_agents")["agents"] == ["planner", "slow"], "nobody waits for it"
        wait_for(lambda: not hub.hub.presence.sockets_of("slow"), "it to be gone")
        with hub.http(token) as mailbox:
            wait_for(lambda: len(mail(mailbox)) == 5, "what it has not taken")
            kept = [(sender, body[0]) for _, sender, body in mail(mailbox)]
        too_many, untaken = kept[:1], kept[1:]
        assert too_many == [("planner", taken)], "which had found no room"
        assert untaken == [("planner", number) for number in range(taken - 4, taken)]


def test_hanging_up_without_reading_does_not_fill_a_mailbox_beyond_its_bound(logged: list[Any]) -> None:
    policy = Policy(limits=dict.fromkeys(("light", "normal"), "1000000/minute"))
    with running(policy, max_waiting=4, max_mail=5, max_mail_per_sender=2) as hub, hub.agent("greedy") as greedy:
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


def test_a_slow_reader_that_reads_on_gets_everything_in_order() -> None:
    with (
        running(Policy(exempt=["planner"]), max_waiting=4) as hub,
        hub.agent("planner") as planner,
        slow_reader(hub, "slow", hub.register("slow")) as slow,
    ):
        taken = overfill(planner, slow)
        assert [slow.hear()["body"][0] for _ in range(taken)] == list(range(taken))
        assert planner.ask("message", to="slow", body="small")["delivered"], "there is room again"
        assert slow.hear()["body"] == "small"


def test_a_slow_reader_whose_token_is_replaced_is_dropped_without_loss() -> None:
    with (
        running(Policy(exempt=["planner"]), max_waiting=4) as hub,
        hub.agent("planner") as planner,
        slow_reader(hub, "slow", hub.register("slow")) as slow,
    ):
        taken = overfill(planner, slow)
        token = hub.run(hub.hub.registry.rotate("slow"))
        wait_for(lambda: len(hub.hub.presence.sockets) == 1, "its place to be free")
        assert planner.ask("list_agents")["agents"] == ["planner"]
        with hub.http(token) as mailbox:
            assert [body[0] for _, _, body in mail(mailbox)] == [taken, *range(taken - 4, taken)]


# Channels ------------------------------------------------------------------------------------------------------------


def test_a_chat_channel_reaches_all_subscribers() -> None:
    with running() as hub, hub.agent("one") as one, hub.agent("two") as two, hub.http(hub.register("boss")) as boss:
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
    with running() as hub, hub.http(hub.register("boss")) as boss:
        with hub.agent("one") as one:
            one.ask("channel_subscribe", channel="general")
            assert boss.get("/api/channels/general").json()["subscribers"] == 1
        wait_for(lambda: not hub.hub.presence.sockets_of("one"), "it to be gone")
        assert boss.get("/api/channels/general").json()["subscribers"] == 0


@pytest.mark.parametrize("name", ["", "a b", "naïve", "..", "a\n"])
def test_a_bad_name_of_a_chat_channel_is_explained_in_words(name: str) -> None:
    expected = "Expected up to 64 letters, digits, dots, dashes and underscores, other than . and .. - at `$."
    with running() as hub, hub.agent_and_http("planner") as (wire, http):
        assert wire.ask("channel_subscribe", channel=name)["detail"] == f"{expected}channel`"
        assert http.post("/api/channels", json={"name": name}).json()["detail"] == f"body: {expected}name`"


def test_unknown_chat_channels_are_refused() -> None:
    unknown = {"error": "unknown_channel", "detail": "there is no chat channel 'none'"}
    with running() as hub, hub.agent("one") as one, hub.http(hub.register("boss")) as boss:
        for kind in ("channel_publish", "channel_subscribe", "channel_unsubscribe", "channel_history"):
            fields = {"body": 1} if kind == "channel_publish" else {}
            assert one.ask(kind, channel="none", id=3, **fields) == {"type": "error", "id": 3, **unknown}
        answers = [boss.get("/api/channels/none"), boss.get("/api/channels/none/messages")]
        for answer in (*answers, boss.post("/api/channels/none/publish", json={"body": 1})):
            assert (answer.status_code, answer.json()) == (404, unknown)


def test_a_slow_reader_is_told_how_many_chat_messages_it_has_missed() -> None:
    with (
        running(Policy(exempt=["boss"]), max_waiting=4) as hub,
        hub.agent("boss") as boss,
        slow_reader(hub, "slow", hub.register("slow")) as slow,
    ):
        assert slow.ask("channel_subscribe", channel="general")["type"] == "subscribed"

        def publish(body: object) -> int:
            number: int = boss.ask("channel_publish", channel="general", body=body)["number"]
            return number

        last = [publish(LARGE) for _ in range(2)][-1]
        read_ahead(slow)
        while waiting(hub, "slow") < 4:
            last = publish(LARGE)
        missed = [publish("missed") for _ in range(3)]
        assert [slow.hear()["number"] for _ in range(last)] == list(range(1, last + 1))
        assert slow.hear() == {"type": "lagged", "channel": "general", "missed": 3}, "as soon as it has caught up"
        again = publish("again")
        assert slow.hear().items() >= {"type": "channel_message", "number": again, "body": "again"}.items()
        publish("more")
        assert slow.hear()["body"] == "more", "it is told once"
        history = slow.ask("channel_history", channel="general", before=again, limit=3)
        assert [post["number"] for post in history["messages"]] == missed
