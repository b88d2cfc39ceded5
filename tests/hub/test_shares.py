"""Shares per owner: no agent takes all the room that others need."""

import asyncio
from contextlib import closing
from itertools import count
from pathlib import Path
from sqlite3 import Connection, connect

import pytest
from msgspec import Raw

from headgate import ManualClock, Policy
from headgate.hub.agents import counter_shares
from headgate.hub.agents.counter_shares import CounterShares
from headgate.hub.app import Hub
from headgate.hub.errors import RequestError
from headgate.hub.storage import database
from headgate.hub.storage.database import Retention, TotalRetention
from tests.support.hub import ADMIN, AgentConnection, HubServer, hub_server, hub_settings

ROOMY = Policy(limits=dict.fromkeys(("light", "normal", "heavy"), "1000000/minute"))


def create(hub: HubServer, token: str, names: list[str]) -> list[int]:
    with hub.http(token) as http:
        return [http.post("/api/channels", json={"name": name}).status_code for name in names]


# Chat channels --------------------------------------------------------------------------------------------------------


def test_one_agent_does_not_take_all_chat_channels() -> None:
    with hub_server(ROOMY, max_channels_per_agent=3) as hub:
        greedy, other = hub.register("greedy"), hub.register("other")
        assert create(hub, greedy, list("abcde")) == [201] * 3 + [409] * 2
        assert create(hub, other, ["x"]) == [201]
        with hub.http(greedy) as http:
            assert http.delete("/api/channels/a").json() == {"name": "a"}
        assert create(hub, greedy, ["d", "e"]) == [201, 409]


def test_a_chat_channel_is_deleted_by_its_creator_or_the_admin_with_its_messages() -> None:
    with hub_server(ROOMY) as hub:
        owner, other = hub.register("owner"), hub.register("other")
        create(hub, owner, ["a", "b"])
        with hub.http(owner) as http, hub.http(other) as stranger, hub.http(ADMIN) as admin:
            assert http.post("/api/channels/a/publish", json={"body": 1}).status_code == 201
            refused = stranger.delete("/api/channels/a")
            assert (refused.status_code, refused.json()["error"]) == (403, "forbidden")
            assert http.delete("/api/channels/a").status_code == admin.delete("/api/channels/b").status_code == 200
            assert http.delete("/api/channels/a").json()["error"] == "unknown_channel"
            kept = admin.delete("/api/channels/general")
            assert (kept.status_code, kept.json()["error"]) == (409, "not_possible")
            assert http.get("/api/channels/a/messages").status_code == 404
            assert create(hub, other, ["a"]) == [201]
            assert http.get("/api/channels/a/messages").json() == {"messages": []}, "nothing of the old one is left"


def test_subscribers_of_a_deleted_chat_channel_get_nothing_of_its_successor() -> None:
    with hub_server(ROOMY) as hub:
        owner = hub.register("owner")
        create(hub, owner, ["a"])
        with hub.agent("reader") as reader, hub.http(owner) as http:
            reader.ask("channel_subscribe", channel="a")
            http.delete("/api/channels/a")
            assert reader.hear() == {"type": "unsubscribed", "channel": "a"}
            create(hub, owner, ["a"])
            http.post("/api/channels/a/publish", json={"body": 1})
            assert reader.ask("ping") == {"type": "pong"}


async def test_messages_to_a_chat_channel_that_is_being_deleted_are_refused_and_not_in_its_successor() -> None:
    async with Hub(hub_settings()) as hub:
        messages, unknown = hub.messages, "unknown_channel"
        await messages.create_chat_channel("a", "owner", "")
        done = await asyncio.gather(
            messages.publish("a", "owner", Raw(b"1")),
            messages.delete_chat_channel("a", "owner", by_admin=False),
            messages.publish("a", "owner", Raw(b"2")),
            messages.create_chat_channel("a", "other", ""),
            messages.publish("a", "owner", Raw(b"3")),
            messages.delete_chat_channel("a", "owner", by_admin=False),
            return_exceptions=True,
        )
        assert [getattr(one, "error", None) for one in done] == [None, None, unknown, None, unknown, unknown]
        assert await messages.history("a", 10) == []
        assert messages.chat_channel("a").creator == "other"


def test_messages_of_deleted_chat_channels_are_dropped_at_the_start(tmp_path: Path) -> None:
    """A hub before this one may have left some."""
    with hub_server(ROOMY, data=tmp_path) as hub:
        hub.run(hub.hub.messages.publish("general", "owner", Raw(b"1")))
    with closing(connect(tmp_path / "hub.db")) as db, db:
        db.execute("INSERT INTO posts (channel, sender, body, at) VALUES ('gone', 'owner', x'31', 1)")
    with hub_server(ROOMY, data=tmp_path) as hub:
        hub.run(hub.hub.messages.create_chat_channel("gone", "other", ""))
        assert hub.run(hub.hub.messages.history("gone", 10)) == []
        assert len(hub.run(hub.hub.messages.history("general", 10))) == 1


def test_lists_of_chat_channels_and_agents_come_in_pages() -> None:
    names = [f"channel-{number:03}" for number in range(150)]
    with hub_server(ROOMY, max_channels_per_agent=1000) as hub, hub.http() as http:
        create(hub, hub.register("owner"), names)

        def page(**query: str) -> tuple[list[str], bool]:
            found = http.get("/api/channels", params=query).json()
            return [channel["name"] for channel in found["channels"]], found["more"]

        assert page() == (names[:100], True)
        assert page(after=names[99]) == ([*names[100:], "general"], False)
        assert page(after=names[10], limit="2") == (names[11:13], True)
        assert http.get("/api/channels", params={"limit": "101"}).status_code == 400
        with hub.agent("a") as agent, hub.agent("b"), hub.agent("c"):
            found = agent.ask("list_channels", limit=1, after="channel-148")
            assert ([channel["name"] for channel in found["channels"]], found["more"]) == (["channel-149"], True)
            assert agent.ask("list_agents", limit=2) == {"type": "agents", "agents": ["a", "b"], "more": True}
            assert agent.ask("list_agents", after="b") == {"type": "agents", "agents": ["c"], "more": False}
            assert http.get("/api/agents", params={"limit": "2"}).json() == {"agents": ["a", "b"], "more": True}


# Mailboxes ------------------------------------------------------------------------------------------------------------


def test_one_sender_does_not_fill_a_mailbox() -> None:
    with (
        hub_server(ROOMY, max_mail_per_sender=3, max_mail=5) as hub,
        hub.agent("greedy") as greedy,
        hub.agent("b") as b,
    ):
        hub.register("away")

        def send(wire: AgentConnection) -> str:
            answer = wire.ask("message", to="away", body=1)
            return str(answer.get("error", answer["type"]))

        assert [send(greedy) for _ in range(4)] == ["message_sent"] * 3 + ["mailbox_full"]
        assert [send(b) for _ in range(3)] == ["message_sent"] * 2 + ["mailbox_full"]


# Signals --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def signals(tmp_path: Path) -> Connection:
    db = connect(tmp_path / "test.db")
    db.execute("CREATE TABLE signals (number INTEGER PRIMARY KEY, agent TEXT)")
    return db


def test_signals_are_bounded_in_total_at_the_cost_of_the_agent_that_has_most(signals: Connection) -> None:
    retention = TotalRetention("signals", "agent", 100)
    for agent in ["quiet"] * 10 + ["modest"] * 30 + ["greedy", "greedier"] * 500:
        signals.execute("INSERT INTO signals (agent) VALUES (?)", (agent,))
        retention.added(signals)
    found = dict(signals.execute("SELECT agent, COUNT(*) FROM signals GROUP BY agent"))
    assert (found["quiet"], found["modest"]) == (10, 30)
    assert found["greedy"] + found["greedier"] == 60
    assert abs(found["greedy"] - found["greedier"]) <= 1
    (oldest,) = signals.execute("SELECT MIN(number) FROM signals WHERE agent = 'greedy'").fetchone()
    assert oldest > 900, "the newest are kept"


def test_a_hub_keeps_so_many_signals() -> None:
    with hub_server(ROOMY, max_stored_signals=50, max_signals=1000) as hub:
        with hub.agent("modest") as modest, hub.agent("greedy") as greedy:
            for wire, count in ((modest, 10), (greedy, 200)):
                wire.ask("session_open", session=1)
                signal = {"type": "seen", "entity": "door", "weight": 1, "timestamp": 0}
                for _ in range(count):
                    assert wire.ask("session_signal", session=1, signal=signal)["type"] == "signal_logged"
        counts = "SELECT agent, COUNT(*) FROM signals GROUP BY agent"
        assert dict(hub.run(hub.hub.database.run(lambda db: db.execute(counts).fetchall()))) == {
            "modest": 10,
            "greedy": 40,
        }


def test_few_rows_in_each_run_do_not_grow_beyond_the_bound(signals: Connection) -> None:
    for _ in range(120):
        each, total = Retention("signals", "agent", 100), TotalRetention("signals", "agent", 1000)
        for number in range(9):
            for agent in ("talks a lot", f"talks rarely {number}"):
                signals.execute("INSERT INTO signals (agent) VALUES (?)", (agent,))
            each.added(signals, "talks a lot")
            total.added(signals)
    found = dict(signals.execute("SELECT agent, COUNT(*) FROM signals GROUP BY agent"))
    assert found["talks a lot"] <= 110
    assert sum(found.values()) <= 1020


def test_rows_are_counted_for_so_many_values(signals: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_MAX_COUNTED", 10)
    retention = Retention("signals", "agent", 100)
    for number in range(1000):
        for agent in ("stays", f"comes and goes: {number}"):
            signals.execute("INSERT INTO signals (agent) VALUES (?)", (agent,))
            retention.added(signals, agent)
    assert len(retention._added) <= 10
    (kept,) = signals.execute("SELECT COUNT(*) FROM signals WHERE agent = 'stays'").fetchone()
    assert 100 <= kept <= 110


# The decision service -------------------------------------------------------------------------------------------------


def test_one_agent_does_not_take_all_counters() -> None:
    with hub_server(ROOMY, max_counters=3) as hub, hub.http(hub.register("greedy")) as greedy:

        def check(key: str, **more: int) -> tuple[int, str]:
            answer = greedy.post("/v1/check", json={"key": key, **more})
            return answer.status_code, answer.json().get("error", "")

        assert [check(key, window_ms=1000) for key in "abc"] == [(200, "")] * 3
        assert check("d") == (409, "too_many_counters")
        assert check("a") == (200, ""), "a key in use is counted on"
        with hub.http(hub.register("other")) as other, hub.http(ADMIN) as admin:
            assert other.post("/v1/check", json={"key": "d"}).status_code == 200
            assert [admin.post("/v1/check", json={"key": str(n)}).status_code for n in range(9)] == [200] * 9
        assert greedy.delete("/v1/counters/b").json()["reset"]
        assert [check("d")[0], check("e")[0]] == [200, 409], "a reset makes room"
        hub.clock.advance(2)
        assert check("e") == (200, ""), "and so does time"
        assert check("f") == (409, "too_many_counters")


def test_a_key_stays_reserved_as_long_as_a_short_window_renews_it_for_a_long_one() -> None:
    with hub_server(ROOMY, max_counters=3) as hub, hub.http(hub.register("greedy")) as greedy:

        def check(key: str, window_ms: int) -> int:
            return greedy.post("/v1/check", json={"key": key, "window_ms": window_ms}).status_code

        assert [check(key, 10_000) for key in "abc"] == [200] * 3
        for _ in range(5):
            hub.clock.advance(6)
            assert [check(key, 1) for key in "abc"] == [200] * 3
            hub.clock.advance(1)
            counted = [greedy.get(f"/v1/counters/{key}?window_ms=10000").json()["current_count"] for key in "abc"]
            assert (counted, check("d", 1)) == ([2] * 3, 409)
        hub.clock.advance(11)
        assert [check(key, 1) for key in "def"] == [200] * 3
        hub.clock.advance(2)
        assert check("a", 1) == 200, "its long window is over"


def check_key(shares: CounterShares, agent: str, key: str) -> None:
    with shares.reserve(agent, key, None):
        pass


def test_a_key_that_is_checked_while_it_is_reset_stays_reserved() -> None:
    """In the store the check may come after the reset."""
    shares = CounterShares(ManualClock(start=1000), 1, 60_000)
    with shares.reserve("a", "key", None), shares.release("a", "key"):
        pass
    with pytest.raises(RequestError):
        check_key(shares, "a", "other")
    with shares.release("a", "key"):
        check_key(shares, "a", "key")
    with pytest.raises(RequestError):
        check_key(shares, "a", "other")
    with shares.release("a", "key"):
        pass
    check_key(shares, "a", "other")


def test_a_key_is_reserved_from_the_end_of_its_check() -> None:
    clock = ManualClock(start=1000)
    shares = CounterShares(clock, 1, 60_000)
    with shares.reserve("a", "key", None):
        clock.advance(90)
        with pytest.raises(RequestError):
            check_key(shares, "a", "other")
    clock.advance(60)
    with pytest.raises(RequestError):
        check_key(shares, "a", "other")
    clock.advance(1)
    check_key(shares, "a", "other")


def test_keys_of_all_agents_are_bounded_and_then_shared_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_shares, "MAX_COUNTERS", 100)
    clock = ManualClock(start=1000)
    shares = CounterShares(clock, 80, 60_000)

    numbers = count()

    def reserve(agent: str, wanted: int) -> int:
        """How many of so many new keys an agent gets."""
        for number in range(wanted):
            try:
                check_key(shares, agent, str(next(numbers)))
            except RequestError:
                return number
        return wanted

    assert [reserve("greedy", 90), reserve("other", 30)] == [80, 30], "together more than all may have"
    assert [reserve("greedy", 1), reserve("modest", 40)] == [0, 33], "a third of a hundred"
    clock.advance(61)
    assert reserve("greedy", 90) == 80
    for _ in range(200):
        check_key(shares, "modest", "again")
        with shares.release("modest", "again"):
            pass
    assert sum(len(share.keys) for share in shares._shares.values()) == shares._total == 80
    assert "other" not in shares._shares, "what has expired is dropped"
