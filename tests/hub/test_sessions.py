"""Sessions of agents over WebSocket, each with its own budget, and their signal logs."""

from typing import Any

import httpx

from headgate import Policy
from headgate.hub.storage.database import DatabaseError
from tests.support.agent_connections import empty_bucket, read_metrics, remaining_by_tier
from tests.support.hub import ADMIN, AgentConnection, HubServer, hub_server

SIGNAL = {"type": "seen", "entity": "door-7", "weight": 0.5, "timestamp": 1_700_000_000.25}
INVALID = {"type": "seen"}


def signal(wire: AgentConnection, session: str | int, said: object = SIGNAL) -> str:
    """Send a signal; what came of it: "signal_logged", or the word for what went wrong."""
    answer = wire.ask("session_signal", session=session, signal=said)
    return str(answer.get("error", answer["type"]))


def logged(http: httpx.Client, session: str | int, query: str = "") -> list[Any]:
    """The signals in a session's log."""
    return [one["signal"] for one in http.get(f"/api/sessions/{session}/signals{query}").json()["signals"]]


def buckets(hub: HubServer) -> tuple[int, int]:
    """How many sessions are open, and how many of them have been used."""
    counted = read_metrics(hub)
    return counted["open_sessions"], counted["session_buckets"]


def test_e1_ten_sessions_of_an_agent_have_ten_budgets() -> None:
    with hub_server(Policy(warn_at=1)) as hub, hub.agent("planner") as planner, hub.agent("other") as other:
        for session in range(10):
            planner.ask("session_open", session=session, rate=1, burst=2)
        for session in range(10):
            assert [signal(planner, session) for _ in range(3)] == ["signal_logged"] * 2 + ["rate_limited"]
        other.ask("session_open", session=1, rate=1, burst=2)
        assert signal(other, 1) == "signal_logged", "the same session of another agent"


def test_e1_the_bucket_is_removed_when_the_session_closes() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        for _ in range(2):
            wire.ask("session_open", session="s", rate=1, burst=1)
            assert [signal(wire, "s") for _ in range(2)] == ["signal_logged", "rate_limited"]
            assert wire.ask("session_close", session="s")["type"] == "session_closed"
        assert wire.ask("session_open", session="s", rate=100, burst=7)["limit"] == "100/second burst 7", (
            "another limit"
        )


def test_e1_a_session_outlives_the_connection_and_opening_it_again_changes_nothing() -> None:
    with hub_server() as hub:
        token = hub.register("planner")
        with hub.agent("planner", token) as wire:
            wire.ask("session_open", session="s", rate=1, burst=2)
            assert signal(wire, "s") == "signal_logged"
        with hub.agent("planner", token) as wire:
            assert wire.ask("session_open", session="s", rate=1, burst=2)["type"] == "session_opened"
            assert [signal(wire, "s") for _ in range(2)] == ["signal_logged", "rate_limited"]
            other = wire.ask("session_open", session="s", rate=1, burst=3)
            assert other["detail"].startswith("session s: expected the limit that it was opened with, 1/second burst 2")


def test_e1_a_session_that_can_not_be_stored_is_not_open() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        wire.ask("session_open", session="open", rate=1, burst=1)
        run = hub.hub.database.run

        async def fail(_work: Any) -> Any:
            raise DatabaseError("the disk is full")

        hub.hub.database.run = fail  # type: ignore[method-assign, assignment]
        for session in ("s", "open"):
            assert wire.ask("session_open", session=session, rate=1, burst=1)["error"] == "unavailable"
        hub.hub.database.run = run  # type: ignore[method-assign]
        assert signal(wire, "s") == "session_closed"
        assert wire.ask("session_open", session="s")["limit"] == "unlimited"
        assert wire.ask("session_close", session="s")["type"] == "session_closed"
        assert signal(wire, "open") == "signal_logged", "it was open before, and is still"


def test_e1_a_number_and_its_text_are_one_session() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        assert wire.ask("session_open", session=42)["session"] == 42
        assert signal(wire, "42") == "signal_logged"
        assert wire.ask("session_close", session="42")["session"] == "42"
        assert signal(wire, 42) == "session_closed"


def test_e2_a_session_is_unlimited_unless_a_rate_and_a_burst_are_given() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        assert wire.ask("session_open", session="s")["limit"] == "unlimited"
        assert {signal(wire, "s") for _ in range(300)} == {"signal_logged"}
        for given in ({"rate": 1}, {"burst": 1}, {"rate": 0, "burst": 1}, {"rate": 1, "burst": 0}):
            assert wire.ask("session_open", session="t", **given)["error"] == "invalid"
        detail = "expected rate and burst together; without them the operator's limit applies"
        assert wire.ask("session_open", session="t", rate=1)["detail"] == detail
        assert signal(wire, "t") == "session_closed"


def test_e2_the_rate_is_in_signals_per_second() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        wire.ask("session_open", session="s", rate=0.5, burst=1)
        assert [signal(wire, "s") for _ in range(2)] == ["signal_logged", "rate_limited"]
        hub.clock.advance(1.999)
        assert signal(wire, "s") == "rate_limited"
        hub.clock.advance(0.001)
        assert signal(wire, "s") == "signal_logged"


def test_e3_a_denied_signal_is_not_written_and_the_error_has_all_details() -> None:
    with hub_server() as hub, hub.agent_and_http("planner") as (wire, http):
        wire.ask("session_open", session="s", rate=20, burst=1)
        assert signal(wire, "s") == "signal_logged"
        denied = {"type": "error", "error": "rate_limited", "agent_id": "planner", "limit": 20}
        assert wire.ask("session_signal", session="s", signal=SIGNAL, id=7) == {
            **denied,
            "detail": "rate limited: agent 'planner' at 20 signals/sec, retry after 50ms",
            "retry_after_ms": 50,
            "id": 7,
        }
        hub.clock.advance(0.0491)
        assert wire.ask("session_signal", session="s", signal=SIGNAL)["retry_after_ms"] == 1, "0.9, rounded up"
        hub.clock.advance(0.000899)
        assert wire.ask("session_signal", session="s", signal=SIGNAL)["retry_after_ms"] == 1, "never 0"
        assert len(logged(http, "s")) == 1
        hub.clock.advance(0.000001)
        assert signal(wire, "s") == "signal_logged"
        assert len(logged(http, "s")) == 2


def test_e3_a_denied_signal_is_a_violation_of_the_agent() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        wire.ask("session_open", session="s", rate=1, burst=1)
        assert [signal(wire, "s") for _ in range(30)] == ["signal_logged"] + ["rate_limited"] * 29
        assert wire.ask("status")["violations"] == 29


def test_e4_a_signal_is_written_to_the_sessions_log() -> None:
    with hub_server() as hub, hub.agent_and_http("planner") as (wire, http), hub.http(hub.register("other")) as other:
        wire.ask("session_open", session="s")
        wire.ask("session_open", session="t")
        signals = [{**SIGNAL, "entity": f"door-{number}", "annotation": None} for number in range(3)]
        signals[1]["annotation"] = "left open, ☃"
        numbers = [wire.ask("session_signal", session="s", signal=one)["number"] for one in signals]
        assert signal(wire, "t") == "signal_logged"
        first = http.get("/api/sessions/s/signals").json()["signals"][0]
        assert first.items() >= {"number": numbers[0], "session": "s", "signal": signals[0]}.items()
        assert logged(http, "s") == signals
        assert logged(http, "s", "?limit=1") == signals[2:]
        assert logged(http, "s", f"?limit=1&before={numbers[2]}") == signals[1:2]
        assert logged(http, "t") == [{**SIGNAL, "annotation": None}]
        assert logged(other, "s") == [], "another agent's is another session"
        wire.ask("session_close", session="s")
        assert logged(http, "s") == signals, "the log stays"


BAD_SIGNALS: list[object] = [
    None,
    "seen",
    {},
    {**SIGNAL, "type": ""},
    {**SIGNAL, "type": "x" * 129},
    {**SIGNAL, "entity": 7},
    {**SIGNAL, "entity": ""},
    {**SIGNAL, "weight": "1"},
    {**SIGNAL, "weight": 1e16},
    {**SIGNAL, "timestamp": -1},
    {**SIGNAL, "annotation": "x" * 4097},
    {**SIGNAL, "surprise": 1},
    {key: value for key, value in SIGNAL.items() if key != "weight"},
]


def test_e4_a_signal_is_validated() -> None:
    with hub_server() as hub, hub.agent_and_http("planner") as (wire, http):
        wire.ask("session_open", session="s")
        for bad in BAD_SIGNALS:
            answer = wire.ask("session_signal", session="s", signal=bad, id="x")
            assert (answer["error"], answer["id"], answer["detail"][:8]) == ("invalid", "x", "signal: "), bad
            hub.clock.advance(10)  # or it would be closed
        assert logged(http, "s") == []


def test_e4_closed_then_limit_then_validation_then_write() -> None:
    with hub_server() as hub, hub.agent_and_http("planner") as (wire, http):
        closed = {"type": "error", "error": "session_closed", "detail": "session 42 is closed"}
        assert wire.ask("session_signal", session=42, signal=INVALID) == closed, "one that was never opened"
        wire.ask("session_open", session=42, rate=1, burst=2)
        assert signal(wire, 42, INVALID) == "invalid"
        assert signal(wire, 42) == "signal_logged"
        assert signal(wire, 42, INVALID) == "rate_limited", "what was invalid has been charged, and goes on to be"
        assert signal(wire, 42) == "rate_limited"
        assert len(logged(http, 42)) == 1
        wire.ask("session_close", session=42)
        assert wire.ask("session_signal", session=42, signal=INVALID) == closed
        assert wire.ask("session_signal", session=42, signal=SIGNAL) == closed
        assert wire.ask("session_close", session=42, id=1) == {**closed, "id": 1}
        assert len(logged(http, 42)) == 1


def test_e4_signals_are_limited_by_their_session_alone() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        wire.ask("session_open", session="s")
        before = remaining_by_tier(hub, "planner")
        assert {signal(wire, "s") for _ in range(20)} == {"signal_logged"}
        assert remaining_by_tier(hub, "planner") == before
        for tier in before:
            empty_bucket(hub, "planner", tier)
        assert signal(wire, "s") == "signal_logged"
        assert wire.ask("session_close", session="s")["type"] == "rate_limited", "which is an action like others"


def test_b9_invalid_signals_close_the_connection_and_denied_ones_do_not() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        wire.ask("session_open", session="s", rate=1, burst=10)
        assert [signal(wire, "s", INVALID) for _ in range(9)] == ["invalid"] * 9
        assert signal(wire, "s") == "signal_logged"
        assert [signal(wire, "s", INVALID) for _ in range(20)] == ["rate_limited"] * 20
        assert wire.ask("ping") == {"type": "pong"}


def test_e5_signals_of_the_application_are_not_limited() -> None:
    with (
        hub_server(Policy(limits={"normal": "blocked"})) as hub,
        hub.http(ADMIN) as admin,
        hub.agent_and_http("planner") as (wire, http),
    ):
        wire.ask("session_open", session="s", rate=1, burst=1)
        assert [signal(wire, "s") for _ in range(2)] == ["signal_logged", "rate_limited"]
        for session in ("s", "never opened", 42):
            body = {"agent_id": "planner", "session": session, "signal": {**SIGNAL, "type": "own"}}
            assert [admin.post("/api/admin/signals", json=body).status_code for _ in range(50)] == [201] * 50
        assert [one["type"] for one in logged(http, "s", "?limit=100")] == ["seen"] + ["own"] * 50
        assert len(logged(http, "never opened")) == len(logged(http, 42)) == 50
        assert buckets(hub) == (1, 1), "they use no session"
        bad = {"agent_id": "planner", "session": "s", "signal": INVALID}
        for wrong in (bad, {"agent_id": "a\nb", "session": "s", "signal": SIGNAL}):
            assert admin.post("/api/admin/signals", json=wrong).status_code == 400, "but validated like any"
        assert http.post("/api/admin/signals", json=bad).status_code == 429, "nor may an agent"


def test_e6_open_and_used_sessions_are_counted() -> None:
    with hub_server() as hub, hub.agent("planner") as planner, hub.agent("other") as other:
        assert buckets(hub) == (0, 0)
        planner.ask("session_open", session=1, rate=1, burst=1)
        planner.ask("session_open", session=2)
        other.ask("session_open", session=1)
        assert buckets(hub) == (3, 0), "none has been used"
        assert [signal(planner, 1), signal(planner, 1), signal(planner, 2)] == [
            "signal_logged",
            "rate_limited",
            "signal_logged",
        ]
        assert buckets(hub) == (3, 2), "unlimited ones included"
        assert signal(other, 1, INVALID) == "invalid"
        assert buckets(hub) == (3, 3)
        planner.ask("session_close", session=1)
        assert buckets(hub) == (2, 2)
        planner.ask("session_close", session=2)
        other.ask("session_close", session=1)
        assert buckets(hub) == (0, 0)


def test_e7_a_burst_within_the_capacity_never_fails() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        wire.ask("session_open", session="s", rate=0.1, burst=100)
        for _ in range(100):
            wire.say("session_signal", session="s", signal=SIGNAL)
        assert {wire.hear()["type"] for _ in range(100)} == {"signal_logged"}


def test_open_sessions_of_an_agent_are_bounded() -> None:
    with hub_server(Policy(exempt=["planner"]), max_sessions=2) as hub, hub.agent("planner") as wire:
        for session in (1, 2, 1):
            assert wire.ask("session_open", session=session)["type"] == "session_opened"
        assert wire.ask("session_open", session=3)["error"] == "too_many_sessions"
        with hub.agent("other") as other:
            assert other.ask("session_open", session=3)["type"] == "session_opened"
        wire.ask("session_close", session=1)
        assert wire.ask("session_open", session=3)["type"] == "session_opened"


def test_only_the_newest_signals_are_kept() -> None:
    with hub_server(max_signals=20) as hub, hub.agent_and_http("planner") as (wire, http):
        wire.ask("session_open", session="s")
        for weight in range(50):
            assert signal(wire, "s", {**SIGNAL, "weight": weight}) == "signal_logged"
        assert [one["weight"] for one in logged(http, "s")][-20:] == list(range(30, 50))
        assert len(logged(http, "s")) < 25


def test_an_agent_cannot_push_out_what_the_application_has_written_about_it() -> None:
    with hub_server(max_signals=20) as hub, hub.agent_and_http("planner") as (wire, http), hub.http(ADMIN) as admin:
        wire.ask("session_open", session="s")
        for weight in range(30):
            given = {"agent_id": "planner", "signal": {**SIGNAL, "weight": weight}}
            assert admin.post("/api/admin/signals", json=given).status_code == 201
        for _ in range(50):
            assert signal(wire, "s", SIGNAL) == "signal_logged"
        outside = [one["signal"]["weight"] for one in http.get("/api/signals").json()["signals"]]
        assert outside[-20:] == list(range(10, 30))
        assert len(outside) < 25
        assert 20 <= len(logged(http, "s")) < 25
