"""Agents over WebSocket: every type of frame, the gate before each, and the replies."""

import json
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from headgate import Policy
from headgate.edges.flood import DENIALS
from headgate.gate.policy import BUILT_IN_TIERS
from headgate.hub.monitoring.connection_log import MAX_LOGGED
from headgate.hub.sockets import frames
from tests.support.agent_connections import VALID, empty_bucket, read_close, remaining_by_tier
from tests.support.hub import ADMIN, AgentConnection, hub_server
from tests.support.valkey import wait_for

LIGHT = "ping list_agents list_channels status channel_history session_close"
NORMAL = (
    "message channel_publish channel_subscribe channel_unsubscribe "
    "task_accepted task_progress task_complete task_failed task_recovering"
)
HEAVY = "identify session_open"
TIER_OF = {
    kind: tier for tier, kinds in zip(BUILT_IN_TIERS, (LIGHT, NORMAL, HEAVY), strict=True) for kind in kinds.split()
}
"""The table of A8."""


# B1: the gate before each frame --------------------------------------------------------------------------------------


def test_b1_a_denied_frame_is_answered_and_the_connection_stays_open() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        for number in range(96):
            assert wire.ask("ping", id=number) == {"type": "pong", "id": number}
        for number in range(96, 120):  # less than a fifth is left
            remaining = 119 - number
            warning = {"type": "rate_limit_warning", "tier": "light", "remaining": remaining, "capacity": 120}
            assert wire.ask("ping", id=number) == {**warning, "id": number}
            assert wire.hear() == {"type": "pong", "id": number}
        denied = {"type": "rate_limited", "tier": "light", "retry_after_ms": 1000}
        assert wire.ask("ping", id="last") == {**denied, "id": "last"}
        hub.clock.advance(0.5)
        assert wire.ask("ping")["type"] == "rate_limit_warning"
        assert wire.hear() == {"type": "pong"}


def test_b1_a_denied_message_is_not_handled_and_can_be_sent_again() -> None:
    with hub_server() as hub, hub.agent("planner") as planner, hub.agent("friend") as friend:
        empty_bucket(hub, "planner", "normal")
        denied = planner.ask("message", to="friend", body="hello", id=7)
        assert denied == {"type": "rate_limited", "tier": "normal", "retry_after_ms": 1000, "id": 7}
        assert hub.hub.messages.accepted == 0
        hub.clock.advance(1)
        assert planner.ask("message", to="friend", body="hello again", id=7)["type"] == "rate_limit_warning"
        assert planner.hear() == {"type": "message_sent", "to": "friend", "delivered": True, "id": 7}
        assert friend.hear()["body"] == "hello again"


def test_b1_frames_are_checked_after_decoding_and_validation() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        before = remaining_by_tier(hub, "planner")
        for text in ("{", '{"type": "pong"}', '{"type": "ping", "to": "x"}', '{"type": "message", "to": "x"}'):
            wire.socket.send(text)
            assert wire.hear()["error"] == "invalid"
        assert remaining_by_tier(hub, "planner") == before == {"light": 120, "normal": 60, "heavy": 10}
        empty_bucket(hub, "planner", "normal")
        assert wire.ask("message", to="x")["error"] == "invalid", "a bad frame is told so, whatever is left"


def test_b1_frames_are_checked_before_they_are_handled() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        assert wire.ask("channel_subscribe", channel="none")["error"] == "unknown_channel"
        assert remaining_by_tier(hub, "planner")["normal"] == 59, "it was paid for, though nothing came of it"


def test_b1_the_wait_is_rounded_up_to_whole_seconds() -> None:
    policy = Policy(limits={"light": "7/minute", "normal": "1000/second burst 1"}, backoff={"steps": [0.001]})
    with hub_server(policy) as hub, hub.agent("planner") as wire:
        empty_bucket(hub, "planner")
        assert wire.ask("ping")["retry_after_ms"] == 9000, "60 / 7 seconds"
        hub.clock.advance(0.571)
        assert wire.ask("ping")["retry_after_ms"] == 9000, "8.0004 seconds"
        hub.clock.advance(0.001)
        assert wire.ask("ping")["retry_after_ms"] == 8000
        empty_bucket(hub, "planner", "normal")
        assert wire.ask("message", to="x", body=1)["retry_after_ms"] == 1000, "never less"


def test_a9_the_reported_wait_grows_with_violations() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        empty_bucket(hub, "planner")
        waits = [wire.ask("ping")["retry_after_ms"] for _ in range(6)]
        assert waits == [1000, 2000, 5000, 10_000, 30_000, 30_000]


def test_b1_an_exempt_agent_is_never_denied_or_warned() -> None:
    with hub_server(Policy(exempt=["monitor"], limits={"light": "1/hour"})) as hub, hub.agent("monitor") as wire:
        assert [wire.ask("ping") for _ in range(20)] == [{"type": "pong"}] * 20


def test_a3_connections_of_one_agent_share_its_buckets_and_no_others() -> None:
    with hub_server(Policy(limits={"light": "2/minute"}, warn_at=1)) as hub:
        token = hub.register("planner")
        with hub.agent("planner", token) as one, hub.agent("planner", token) as two, hub.agent("other") as other:
            assert [wire.ask("ping")["type"] for wire in (one, two, one, two)] == ["pong"] * 2 + ["rate_limited"] * 2
            assert [other.ask("ping")["type"] for _ in range(3)] == ["pong", "pong", "rate_limited"]


def test_b4_websocket_and_http_have_separate_limits() -> None:
    policy = Policy(limits={"light": "2/minute"}, warn_at=1)
    with hub_server(policy) as hub, hub.agent_and_http("planner") as (wire, http):
        assert [wire.ask("ping")["type"] for _ in range(3)] == ["pong", "pong", "rate_limited"]
        assert [http.get("/api/mailbox").status_code for _ in range(3)] == [200, 200, 429]
        hub.clock.advance(60)
        assert [http.get("/api/mailbox").status_code for _ in range(3)] == [200, 200, 429]
        assert [wire.ask("ping")["type"] for _ in range(3)] == ["pong", "pong", "rate_limited"]


# A8: every type of frame ---------------------------------------------------------------------------------------------


def test_a8_frame_types_match_the_table_the_schemas_and_the_policy() -> None:
    with hub_server() as hub, hub.http() as http:
        schemas = http.get("/api/schemas").json()
    assert {*TIER_OF, "session_signal"} == set(frames.TYPES) == set(VALID) == set(schemas["from_agents"])
    assert {kind: tier for (channel, kind), tier in Policy().actions.items() if channel == "ws"} == TIER_OF
    for kind, schema in schemas["from_agents"].items():
        definition = schemas["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        assert definition["properties"]["type"] == {"enum": [kind]}
        assert definition["additionalProperties"] is False
        assert set(definition["required"]) - {"type"} <= VALID[kind].keys() <= definition["properties"].keys()


@pytest.mark.parametrize("frame_id", ["a-1", "", 0])
def test_b1_every_type_of_frame_works_and_its_reply_carries_its_id(frame_id: str | int) -> None:
    asked: list[str] = []
    with hub_server(Policy(exempt=["worker"])) as hub, hub.http(ADMIN) as admin, hub.socket() as wire:

        def ask(kind: str, **fields: Any) -> dict[str, Any]:
            asked.append(kind)
            answer = wire.ask(kind, id=frame_id, **fields)
            assert answer.pop("id") == frame_id
            return answer

        def task() -> str:
            made: str = admin.post("/api/admin/tasks", json={"payload": [1]}).json()["task_id"]
            assigned = {"type": "task_assigned", "task_id": made, "attempt": 1, "payload": [1]}
            assert wire.hear() == assigned, "which answers nothing, and has no id"
            return made

        token, signal = hub.register("worker"), {"type": "seen", "entity": "door", "weight": 1, "timestamp": 2}
        hub.register("friend")
        general = {"name": "general", "creator": "", "about": "where everybody begins", "subscribers": 0}
        standing = {"agent_id": "worker", "rate_limited": False, "violations": 0, "quiet_left_ms": 0}

        assert ask("identify", agent_id="worker", token=token) == {
            "type": "identified",
            "agent_id": "worker",
            "mail": 0,
        }
        assert ask("ping") == {"type": "pong"}
        assert ask("status") == {"type": "status", "status": "idle", "task_id": None, **standing}
        assert ask("status", status="busy")["status"] == "busy"
        assert ask("status", status="idle")["status"] == "idle"
        assert ask("list_agents") == {"type": "agents", "agents": ["worker"], "more": False}
        assert ask("list_channels")["channels"][0].items() >= general.items()
        assert ask("message", to="friend", body=1) == {"type": "message_sent", "to": "friend", "delivered": False}
        published = ask("channel_publish", channel="general", body={"a": None})
        assert published == {"type": "published", "channel": "general", "number": 1}
        (message,) = ask("channel_history", channel="general")["messages"]
        assert message.items() >= {"number": 1, "from": "worker", "body": {"a": None}}.items()
        assert ask("channel_subscribe", channel="general") == {"type": "subscribed", "channel": "general"}
        assert ask("channel_unsubscribe", channel="general") == {"type": "unsubscribed", "channel": "general"}

        one = task()
        assert ask("task_accepted", task_id=one) == {"type": "task_updated", "task_id": one, "state": "accepted"}
        assert ask("task_progress", task_id=one, progress=0.5, note="half")["state"] == "accepted"
        assert ask("task_recovering", task_id=one)["state"] == "accepted"
        assert ask("status") == {"type": "status", "status": "busy", "task_id": one, **standing}
        assert ask("task_complete", task_id=one, result={"x": 1})["state"] == "completed"
        assert ask("task_failed", task_id=task(), error="too hard")["state"] == "failed"

        opened = ask("session_open", session=42, rate=5, burst=20)
        assert opened == {"type": "session_opened", "session": 42, "limit": "5/second burst 20"}
        logged = ask("session_signal", session=42, signal=signal)
        assert logged == {"type": "signal_logged", "session": 42, "number": 1}
        assert ask("session_close", session=42) == {"type": "session_closed", "session": 42}
    assert set(asked) == set(frames.TYPES)


@pytest.mark.parametrize("frame_id", ["a-1", 7])
def test_b1_errors_carry_the_id_for_every_type(frame_id: str | int) -> None:
    """Of bad frames too, unless it is the id that is bad."""
    with hub_server(Policy(exempt=["planner"])) as hub, hub.agent("planner") as wire:
        for kind, fields in VALID.items():
            answer = wire.ask(kind, id=frame_id, surprise=1, **fields)
            assert (answer["type"], answer["error"], answer["id"]) == ("error", "invalid", frame_id)
            assert answer["detail"] == "Object contains unknown field `surprise`"
            hub.clock.advance(10)  # or it would be closed
        failing = {"message": "unknown_agent", "channel_publish": "unknown_channel", "task_complete": "unknown_task"}
        for kind, error in {**failing, "session_close": "session_closed", "identify": "identified"}.items():
            answer = wire.ask(kind, id=frame_id, **VALID[kind])
            assert (answer["type"], answer["error"], answer["id"]) == ("error", error, frame_id)
        hub.clock.advance(60)
        unusable: list[object] = [1.5, None, True, [], "x" * 129, 2**53 + 1]
        for bad in unusable:
            assert "id" not in wire.ask("ping", id=bad)


@pytest.mark.parametrize("frame_id", ["a-1", 7])
def test_b1_warnings_carry_the_id_for_every_type_and_the_frame_is_handled(frame_id: str | int) -> None:
    with hub_server(Policy(warn_at=0.001)) as hub, hub.agent("planner") as wire:
        for kind, tier in TIER_OF.items():
            warning = wire.ask(kind, id=frame_id, **VALID[kind])
            assert (warning["type"], warning["tier"], warning["id"]) == ("rate_limit_warning", tier, frame_id)
            remaining, capacity = remaining_by_tier(hub, "planner")[tier], hub.hub.gate.capacity("planner", "ws", tier)
            assert (warning["remaining"], warning["capacity"]) == (remaining, capacity)
            assert wire.hear()["id"] == frame_id


@pytest.mark.parametrize("frame_id", ["a-1", 7])
def test_a8_every_type_of_frame_is_denied_by_its_tier_and_carries_its_id(frame_id: str | int) -> None:
    with hub_server(Policy(limits=dict.fromkeys(BUILT_IN_TIERS, "blocked"))) as hub, hub.agent("planner") as wire:
        for kind, tier in TIER_OF.items():
            denied = wire.ask(kind, id=frame_id, **VALID[kind])
            assert (denied["type"], denied["tier"], denied["id"]) == ("rate_limited", tier, frame_id)
        assert wire.ask("session_signal", **VALID["session_signal"])["error"] == "session_closed", "limited by E alone"


def test_a8_the_operator_can_change_the_tier_of_a_frame() -> None:
    policy = Policy(actions={"ws": {"ping": "heavy"}}, limits={"heavy": "1/minute"})
    with hub_server(policy) as hub, hub.agent("planner") as wire:
        assert wire.ask("ping")["tier"] == "heavy", "a warning"
        wire.hear()
        assert wire.ask("ping") == {"type": "rate_limited", "tier": "heavy", "retry_after_ms": 60_000}


# B9: bad frames ------------------------------------------------------------------------------------------------------

BAD: list[str | bytes] = [
    b'{"type": "ping"}',
    "",
    "{",
    "[]",
    "null",
    '{"type": "bogus"}',
    '{"type": "ping", "surprise": 1}',
    '{"type": "message", "to": "x"}',
    '{"type": "channel_history", "channel": "a/b"}',
    '{"type": "session_open", "session": "s", "rate": 1}',  # found when it is handled
]
"""Ten frames, each invalid in its own way."""


def say_nine_invalid_frames(wire: AgentConnection) -> None:
    for bad in BAD[:9]:
        wire.socket.send(bad)
        assert wire.hear()["error"] == "invalid"


def test_b9_ten_invalid_frames_within_a_minute_close_the_connection() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        say_nine_invalid_frames(wire)
        hub.clock.advance(59.999)
        assert wire.ask("ping") == {"type": "pong"}
        wire.socket.send(BAD[9])
        assert wire.hear()["error"] == "invalid"
        assert read_close(wire) == (1008, "10 invalid frames within a minute")


def test_b9_ten_invalid_frames_over_more_than_a_minute_do_not_close_it() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        say_nine_invalid_frames(wire)
        hub.clock.advance(60)
        for _ in range(9):
            wire.socket.send("{")
            assert wire.hear()["error"] == "invalid"
            assert wire.ask("ping") == {"type": "pong"}
        wire.socket.send("{")
        assert read_close(wire)[0] == 1008, "which makes ten within another minute"


def test_b9_ten_invalid_frames_before_identify_close_the_connection() -> None:
    with hub_server() as hub, hub.socket() as wire:
        for _ in range(10):
            assert wire.ask("ping")["error"] == "not_identified"
        assert read_close(wire)[0] == 1008


@pytest.mark.parametrize(
    "wrong",
    [{"rate": 1e300, "burst": 1}, {"rate": 1}, {"session": "open", "rate": 1, "burst": 1}],
    ids=["a rate out of range", "a rate without a burst", "another limit"],
)
def test_b9_ten_frames_that_their_handler_finds_invalid_close_the_connection(wrong: dict[str, Any]) -> None:
    with hub_server(Policy(exempt=["planner"])) as hub, hub.agent("planner") as wire:
        wire.ask("session_open", session="open")
        for _ in range(10):
            assert wire.ask("session_open", **{"session": "s", **wrong})["error"] == "invalid"
        assert read_close(wire)[0] == 1008


def test_b9_denials_never_close_and_do_not_count_as_invalid_frames() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        empty_bucket(hub, "planner")
        say_nine_invalid_frames(wire)
        for _ in range(30):
            assert wire.ask("ping")["type"] == "rate_limited"
        assert wire.ask("list_agents")["type"] == "rate_limited", "still there"
        wire.socket.send("{")
        assert read_close(wire)[0] == 1008


def test_b9_an_invalid_frame_is_not_a_violation() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        say_nine_invalid_frames(wire)
        assert wire.ask("status")["violations"] == 0
        empty_bucket(hub, "planner")
        assert wire.ask("ping")["retry_after_ms"] == 1000, "the first of the steps"


def test_b9_valid_frames_that_fail_are_neither_invalid_nor_violations() -> None:
    with hub_server(Policy(exempt=["planner"])) as hub, hub.agent("planner") as wire:
        for _ in range(10):
            assert wire.ask("message", to="nobody", body=1)["error"] == "unknown_agent"
            assert wire.ask("channel_subscribe", channel="none")["error"] == "unknown_channel"
            assert wire.ask("task_complete", task_id="1")["error"] == "unknown_task"
        assert wire.ask("status")["violations"] == 0


def test_errors_for_binary_frames_and_unknown_types_say_what_was_expected() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        wire.socket.send(b'{"type": "ping", "id": 1}')
        detail = "expected a text frame, got a binary one"
        assert wire.hear() == {"type": "error", "error": "invalid", "detail": detail}
        assert wire.ask("bogus")["detail"].endswith(f"the types are {', '.join(frames.TYPES)}")
        assert wire.ask("ping") == {"type": "pong"}


def test_frames_have_a_maximum_size() -> None:
    """In bytes. A frame slightly too large is answered; one far too large closes the connection."""
    with hub_server() as hub, hub.agent("planner") as wire, hub.agent("friend") as friend:
        for letter, size in (("x", 1), ("é", 2), ("🙂", 4)):
            frame = json.dumps({"type": "message", "to": "friend", "body": ""})
            room = 65_536 - len(frame)
            body = letter * (room // size) + "x" * (room % size)
            wire.socket.send(frame.replace('""', f'"{body}"'))
            assert wire.hear()["type"] == "message_sent"
            assert friend.hear()["body"] == body
            wire.socket.send(frame.replace('""', f'"{body}x"'))
            assert wire.hear() == {"type": "error", "error": "too_large", "detail": "expected at most 65536 bytes"}
        wire.socket.send("x" * 4 * 65_536)
        assert wire.hear()["error"] == "too_large"
        wire.socket.send("x" * (4 * 65_536 + 1))
        assert read_close(wire)[0] == 1009


# B10 and B11: being limited, and floods ------------------------------------------------------------------------------


def test_b10_the_rate_limited_state_is_computed_on_demand() -> None:
    """It ends by itself, without a notification, and is independent of idle and busy."""
    with hub_server() as hub, hub.agent("planner") as wire, hub.http(ADMIN) as admin:
        empty_bucket(hub, "planner", "normal")
        assert wire.ask("message", to="x", body=1)["type"] == "rate_limited"
        limited = {"rate_limited": True, "violations": 1, "quiet_left_ms": 60_000}
        free = {"rate_limited": False, "violations": 0, "quiet_left_ms": 0}
        assert wire.ask("status").items() >= {"status": "idle", **limited}.items()
        assert admin.get("/api/admin/agents/planner").json()["rate_limited"]
        hub.clock.advance(59.9995)
        assert wire.ask("status").items() >= {**limited, "quiet_left_ms": 1}.items()
        hub.clock.advance(0.0005)
        assert wire.ask("status").items() >= {"status": "idle", **free}.items()
        assert not admin.get("/api/admin/agents/planner").json()["rate_limited"]


def test_b10_the_rate_limited_state_outlives_a_connection_and_ends_with_a_reset() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        token = hub.register("planner")
        with hub.agent("planner", token) as wire:
            empty_bucket(hub, "planner")
            assert wire.ask("ping")["type"] == "rate_limited"
        hub.clock.advance(1)
        with hub.agent("planner", token) as wire:
            wire.say("status")
            assert [wire.hear()["type"], wire.hear()["rate_limited"]] == ["rate_limit_warning", True]
            assert admin.delete("/api/admin/violations/planner").json() == {"agent_id": "planner", "reset": True}
            wire.say("status")
            assert [wire.hear()["type"], wire.hear()["rate_limited"]] == ["rate_limit_warning", False]


def test_b11_exactly_the_limit_passes_of_a_flood_and_every_frame_is_answered() -> None:
    with hub_server() as hub, hub.agent("flooder") as wire:
        for passing in (120, 60):
            for number in range(300):
                wire.say("ping", id=number)
            answers: list[tuple[str, int]] = []
            while len(answers) < 300:
                answer = wire.hear()
                if answer["type"] != "rate_limit_warning":
                    answers.append((answer["type"], answer["id"]))
            passed = [("pong", number) for number in range(passing)]
            assert answers == passed + [("rate_limited", number) for number in range(passing, 300)]
            hub.clock.advance(30)


def test_b11_a_flood_is_read_more_slowly_until_it_is_over() -> None:
    """A pause never ends early, so there is a time that it takes at least, on any machine."""
    others = DENIALS // 20 - 1  # all who flood share what the hub spends on them: here each is denied 20 times a second
    with hub_server() as hub:
        with hub.agent("flooder") as wire, hub.agent("good") as good:
            empty_bucket(hub, "flooder")
            for _ in range(9):
                assert wire.ask("ping")["type"] == "rate_limited"
            assert hub.hub.flood_counter.connections == 0
            hub.hub.flood_counter.connections = others
            begin = time.monotonic()
            for _ in range(6):
                assert wire.ask("ping")["type"] == "rate_limited"
            assert time.monotonic() - begin > 0.2
            assert hub.hub.flood_counter.connections == others + 1
            assert good.ask("ping") == {"type": "pong"}
            hub.clock.advance(60)
            assert [wire.ask("ping") for _ in range(20)] == [{"type": "pong"}] * 20
            assert hub.hub.flood_counter.connections == others
            empty_bucket(hub, "flooder")
            for _ in range(11):
                wire.ask("ping")
            assert hub.hub.flood_counter.connections == others + 1
        wait_for(lambda: hub.hub.flood_counter.connections == others, "the flooder to be gone")


def test_an_agent_that_reconnects_all_the_time_does_not_fill_the_log() -> None:
    with capture_logs() as logged, hub_server() as hub:
        token = hub.register("planner")
        for more in (10, 0):
            for _ in range(MAX_LOGGED + more):
                with hub.agent("planner", token):
                    pass
            with hub.agent(f"writer-{more}"):  # others are logged all the same
                wait_for(lambda: not hub.hub.presence.is_connected("planner"), "the last to be gone")
            hub.clock.advance(60)
    events = [line["event"] for line in logged if line.get("agent") == "planner"]
    assert events.count("agent connected") == events.count("agent disconnected") == 2 * MAX_LOGGED
    assert events.count("agent connects again and again; further connections are not logged") == 1
    assert [line["agent"] for line in logged if line["event"] == "agent connected"][-1] == "writer-0"
