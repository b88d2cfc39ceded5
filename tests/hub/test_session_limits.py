"""The operator's limit of sessions in the hub, and signals that belong to none."""

from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from headgate import Policy
from tests.support.agent_connections import remaining_by_tier
from tests.support.hub import ADMIN, AgentConnection, hub_server

LIMITS = "/api/admin/rate-limits"
SIGNAL = {"type": "seen", "entity": "door-7", "weight": 0.5, "timestamp": 1_700_000_000.25}
STRICT = Policy(sessions={"limit": "1/second burst 2"}, agents={"trusted": {"session": "1/second burst 4"}})


def signals(wire: AgentConnection, session: str | int, times: int) -> list[str]:
    """Send signals; what came of each."""
    answers = [wire.ask("session_signal", session=session, signal=SIGNAL) for _ in range(times)]
    return [str(answer.get("error", answer["type"])) for answer in answers]


def test_e2_the_operator_limits_sessions_and_overrides_by_agent() -> None:
    with hub_server(STRICT) as hub, hub.agent("planner") as planner, hub.agent("trusted") as trusted:
        for wire, burst in ((planner, 2), (trusted, 4)):
            assert wire.ask("session_open", session=1)["limit"] == f"1/second burst {burst}"
            assert signals(wire, 1, burst + 1) == ["signal_logged"] * burst + ["rate_limited"]


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        ({"rate": 0.5, "burst": 1}, "0.5/second"),
        ({"rate": 1000, "burst": 1000}, "1/second burst 2"),
        ({"rate": 1e9, "burst": 2**53 - 1}, "1/second burst 2"),
        ({"rate": 1 / 3, "burst": 50}, "1 per 3 seconds burst 2"),
        ({"rate": 50, "burst": 1}, "1/second"),
    ],
    ids=str,
)
def test_e2_an_agent_may_ask_for_less_and_is_told_what_it_gets(asked: dict[str, Any], limit: str) -> None:
    with hub_server(STRICT) as hub, hub.agent("planner") as wire:
        for _ in range(2):
            assert wire.ask("session_open", session=1, **asked)["limit"] == limit
        other = wire.ask("session_open", session=1, rate=0.25, burst=1)
        assert other["detail"].startswith("session 1: expected the limit that it was opened with")


@pytest.mark.parametrize("asked", [{"rate": 5e-324, "burst": 1}, {"rate": 1e308, "burst": 1}], ids=str)
def test_e2_a_rate_that_cannot_be_counted_is_refused(asked: dict[str, Any]) -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        answer = wire.ask("session_open", session=1, **asked)
        assert (answer["error"], answer["detail"][:36]) == ("invalid", "TokenBucket refill and per: expected")
        assert signals(wire, 1, 1) == ["session_closed"]


def test_e2_changed_limits_hold_at_once_in_open_sessions_and_after_a_restart(tmp_path: Path) -> None:
    with hub_server(data=tmp_path) as hub, hub.http(ADMIN) as admin:
        token, other_token = hub.register("planner"), hub.register("other")
        with hub.agent("planner", token) as wire, hub.agent("other", other_token) as other:
            for one in (wire, other):
                assert one.ask("session_open", session=1)["limit"] == "unlimited"
                assert set(signals(one, 1, 20)) == {"signal_logged"}
            body = {"session": "1/second burst 3", "light": "600/minute"}
            assert admin.put(f"{LIMITS}/defaults", json=body).json()["session"] == "1/second burst 3"
            answer = admin.put(f"{LIMITS}/other", json={"session": "1/second burst 1"}).json()
            assert (answer["session"], answer["session_override"]) == ("1/second", "1/second")
            assert signals(wire, 1, 4) == ["signal_logged"] * 3 + ["rate_limited"]
            assert signals(other, 1, 2) == ["signal_logged", "rate_limited"]
            listed = admin.get(LIMITS).json()
            assert (listed["session"], listed["session_overrides"]) == ("1/second burst 3", {"other": "1/second"})
        changes = [change["what"] for change in admin.get("/api/admin/changes").json()["changes"]]
        assert changes == [
            "session of 'other' set to 1/second",
            "session set to 1/second burst 3, default for light set to 600/minute",
        ]
    with hub_server(data=tmp_path) as hub, hub.http(ADMIN) as admin, hub.agent("planner", token) as wire:
        assert signals(wire, 1, 4) == ["signal_logged"] * 3 + ["rate_limited"]
        with hub.agent("other", other_token) as other:
            assert signals(other, 1, 2) == ["signal_logged", "rate_limited"]
            answer = admin.delete(f"{LIMITS}/other").json()
            assert (answer["session"], answer["session_override"]) == ("1/second burst 3", None)
            assert signals(other, 1, 4) == ["signal_logged"] * 3 + ["rate_limited"]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"session": 5}, "session: expected a limit such as '5/minute', or a list of 1 to 10, got 5"),
        ({"ws": {"session": "5/second"}}, "ws: expected one of light, normal, heavy, got 'session'"),
    ],
)
def test_bad_session_limits_are_refused(body: dict[str, Any], detail: str) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        for place in ("defaults", "planner"):
            answer = admin.put(f"{LIMITS}/{place}", json=body)
            assert (answer.status_code, answer.json()["detail"]) == (400, detail)


def test_e2_a_denied_signal_is_a_violation_that_takes_no_token_and_slows_its_flooder() -> None:
    with hub_server(STRICT) as hub, hub.agent("planner") as wire:
        wire.ask("session_open", session=1)
        before = remaining_by_tier(hub, "planner")
        assert signals(wire, 1, 2 + 30) == ["signal_logged"] * 2 + ["rate_limited"] * 30
        assert remaining_by_tier(hub, "planner") == before
        assert hub.hub.flood_counter.connections == 1, "it is read more slowly"
        status = wire.ask("status")
        assert (status["rate_limited"], status["violations"]) == (True, 30)
        assert wire.ask("ping")["type"] == "pong", "and it stays connected"


def test_b9_signals_to_a_session_that_does_not_exist_are_invalid_frames() -> None:
    with hub_server(STRICT) as hub, hub.agent("planner") as wire:
        for number in range(10):
            answer = wire.ask("session_signal", session=number, signal=SIGNAL, id=number)
            assert (answer["error"], answer["detail"]) == ("session_closed", f"session {number} is closed")
        with pytest.raises(ConnectionClosed) as caught:
            wire.hear()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008


def test_e3_the_frame_has_the_fields_of_the_error() -> None:
    with hub_server(Policy(sessions={"limit": "20/second burst 1"})) as hub, hub.agent("planner") as wire:
        wire.ask("session_open", session=1)
        for _ in range(3):
            wire.ask("session_signal", session=1, signal=SIGNAL)
        assert wire.ask("session_signal", session=1, signal=SIGNAL, id="x") == {
            "type": "error",
            "id": "x",
            "error": "rate_limited",
            "detail": "rate limited: agent 'planner' at 20 signals/sec, retry after 50ms",
            "agent_id": "planner",
            "limit": 20,
            "retry_after_ms": 50,
        }


def test_e5_signals_of_the_application_outside_a_session_are_not_limited() -> None:
    with hub_server(Policy(sessions={"limit": "blocked"})) as hub, hub.http(ADMIN) as admin:
        token = hub.register("planner")
        body = {"agent_id": "planner", "signal": SIGNAL}
        answers = [admin.post("/api/admin/signals", json=body) for _ in range(60)]
        assert {answer.status_code for answer in answers} == {201}
        with hub.agent("planner", token) as wire, hub.http(token) as http:
            wire.ask("session_open", session="s")
            assert signals(wire, "s", 1) == ["rate_limited"]
            own = http.get("/api/signals?limit=100").json()["signals"]
            assert [one["number"] for one in own] == [answer.json()["number"] for answer in answers]
            assert own[0]["signal"] == {**SIGNAL, "annotation": None}
            assert http.get("/api/sessions/s/signals").json()["signals"] == []
        with hub.http(hub.register("other")) as other:
            assert other.get("/api/signals").json()["signals"] == []
