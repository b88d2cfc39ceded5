"""The emergency brake: a blocked agent is denied everywhere at once, until it is unblocked or the block ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.proto import envelope_pb2 as wire
from tests.support.admin import LIMITS, list_changes, ping
from tests.support.agent_connections import ask_relay, relay_connection
from tests.support.hub import ADMIN, AgentConnection, HubServer, hub_server
from tests.support.hub_fleet import HubFleet
from tests.support.valkey import wait_for

BLOCK = "/api/admin/agents/planner/block"
SIGNAL = {"type": "seen", "entity": "door", "weight": 1, "timestamp": 0}
WHY = "blocked by an operator"
SECRET = "it sold the house"


def block(admin: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = admin.put(BLOCK, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def say(connection: AgentConnection, to: str = "nobody") -> wire.Envelope:
    """The answer to an envelope, over the relay."""
    data = wire.Data(body=b"hi", content_type="text/plain")
    return ask_relay(connection, wire.Envelope(id="1", type=wire.MESSAGE_TYPE_DATA, to=to, data=data))


@contextmanager
def planner_on_every_way(hub: HubServer) -> Iterator[tuple[AgentConnection, httpx.Client, AgentConnection]]:
    """A planner on every way in: its WebSocket, with an open session, HTTP and the relay."""
    token = hub.register("planner")
    with (
        hub.agent("planner", token) as socket,
        hub.http(token) as http,
        relay_connection(hub, "planner", token) as relay,
    ):
        assert socket.ask("session_open", session=1)["type"] == "session_opened"
        yield socket, http, relay


def passes(socket: AgentConnection, http: httpx.Client, relay: AgentConnection) -> list[bool]:
    """Whether the planner gets through on each way in."""
    signal = socket.ask("session_signal", session=1, signal=SIGNAL)
    return [
        ping(socket) == ["pong"],
        signal["type"] == "signal_logged",
        http.get("/api/tasks").status_code == 200,
        http.post("/v1/check", json={"key": "k"}).status_code == 200,
        say(relay).type != wire.MESSAGE_TYPE_RATE_LIMITED,
    ]


@pytest.mark.parametrize("relay_rate_limit", ["1000000", "off"])
def test_b6_a_blocked_agent_is_denied_on_open_connections_at_once(relay_rate_limit: str) -> None:
    with hub_server(relay_rate_limit=relay_rate_limit) as hub, hub.http(ADMIN) as admin, hub.agent("other") as other:
        with planner_on_every_way(hub) as (socket, http, relay):
            assert passes(socket, http, relay) == [True] * 5
            told = {"agent_id": "planner", "blocked": True, "until": None, "reason": SECRET, "registered": True}
            assert block(admin, reason=SECRET) == told
            assert passes(socket, http, relay) == [False] * 5
            assert ping(other) == ["pong"]
            answer = admin.delete(BLOCK)
            free = {"agent_id": "planner", "blocked": False, "until": None, "reason": "", "registered": True}
            assert (answer.status_code, answer.json()) == (200, free)
            assert passes(socket, http, relay) == [True] * 5
            assert admin.delete(BLOCK).json() == free
        assert list_changes(admin) == ["block of 'planner' removed", f"block of 'planner' set: {SECRET}"]


def test_b6_a_blocked_agent_is_told_so_but_not_why() -> None:
    with (
        hub_server(relay_rate_limit="off") as hub,
        hub.http(ADMIN) as admin,
        planner_on_every_way(hub) as (socket, http, relay),
    ):
        block(admin, reason=SECRET)
        denied = http.get("/api/tasks")
        assert (denied.status_code, denied.json()["error"]) == (429, "rate_limited")
        assert denied.json()["detail"] == WHY
        assert denied.headers["Retry-After"] == "1"
        registration = http.post("/api/onboard/register", json={"agent_id": "another"})
        assert (registration.status_code, registration.json()["detail"]) == (429, WHY)
        signal = socket.ask("session_signal", session=1, signal=SIGNAL)
        assert (signal["error"], signal["detail"]) == ("rate_limited", WHY)
        frame = socket.ask("ping")
        assert (frame["type"], frame["retry_after_ms"], frame["blocked"]) == ("rate_limited", 10_000, True)
        envelope = say(relay)
        assert envelope.rate_limited.reason == f"{WHY}; send it again in 30000 ms"
        assert envelope.rate_limited.retry_after_ms == 30_000
        told = [denied.text, registration.text, str(signal), str(frame), str(envelope), str(dict(denied.headers))]
        assert not any(SECRET in text for text in told)
        assert hub.hub.gate.standing("planner").violations == 5


def test_b6_a_block_wins_over_an_exemption_and_an_override() -> None:
    with hub_server(relay_rate_limit="off") as hub, hub.http(ADMIN) as admin, planner_on_every_way(hub) as parts:
        admin.post(f"{LIMITS}/whitelist", json={"agent_id": "planner"}).raise_for_status()
        admin.put(f"{LIMITS}/planner", json={"light": "1000/second", "session": "1000/second"}).raise_for_status()
        block(admin)
        assert passes(*parts) == [False] * 5


def test_b6_a_block_ends_by_itself() -> None:
    with hub_server(relay_rate_limit="off") as hub, hub.http(ADMIN) as admin, planner_on_every_way(hub) as parts:
        until = hub.clock.wall() + 300
        assert block(admin, until=until)["until"] == until
        hub.clock.advance(299)
        assert passes(*parts) == [False] * 5
        hub.clock.advance(1.001)
        assert passes(*parts) == [True] * 5
        later = {"agent_id": "planner", "blocked": False, "until": None, "reason": "", "registered": True}
        assert admin.delete(BLOCK).json() == later


def test_b6_bad_blocks_are_refused_and_block_nobody() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        for body, detail in (
            ({"until": hub.clock.wall() - 1}, "until: expected a moment after now"),
            ({"until": hub.clock.wall()}, "until: expected a moment after now"),
            ({"until": -5}, "until: expected"),
            ({"until": 1e300}, "until: expected"),
            ({"until": "tomorrow"}, "body: Expected `float | null`"),
            ({"reason": "x" * 201}, "body: Expected `str` of length <= 200"),
            ({"reason": "a\nb"}, "reason: expected"),
            ({"reason": None}, "body: Expected `str`"),
            ({"end": 5}, "body: Object contains unknown field `end`"),
        ):
            answer = admin.put(BLOCK, json=body)
            assert (answer.status_code, answer.json()["error"]) == (400, "invalid"), body
            assert answer.json()["detail"].startswith(detail), answer.text
        assert hub.hub.gate.effective.blocks == {}
        assert block(admin)["registered"] is False  # it works, and says so


def test_b6_a_block_survives_a_restart(tmp_path: Path) -> None:
    with hub_server(data=tmp_path) as hub, hub.http(ADMIN) as admin:
        token = hub.register("planner")
        block(admin, until=hub.clock.wall() + 3600, reason="it loops")
    with hub_server(data=tmp_path) as hub, hub.http(ADMIN) as admin, hub.http(token) as http:
        assert http.get("/api/tasks").status_code == 429
        with hub.agent("planner", token) as socket:
            assert ping(socket) == ["rate_limited"]
        hub.clock.advance(3601)
        assert http.get("/api/tasks").status_code == 200


def test_b6_a_block_holds_on_every_hub_of_a_store_and_survives_all_of_them(fleet: HubFleet) -> None:
    with fleet.hub() as one, fleet.hub() as two, one.http(ADMIN) as admin:
        token = one.register("planner")
        with two.agent("planner", token) as socket:
            assert ping(socket) == ["pong"]
            block(admin)
            wait_for(lambda: two.hub.gate.is_blocked("planner"), "the block on the other hub")
            assert ping(socket) == ["rate_limited"]
    with fleet.hub() as again, again.http(token) as http:
        assert http.get("/api/tasks").status_code == 429


# Tasks ----------------------------------------------------------------------------------------------------------------


def assigned(socket: AgentConnection) -> str:
    """The task that comes next."""
    frame = socket.hear()
    assert frame["type"] == "task_assigned"
    task: str = frame["task_id"]
    return task


def test_b6_a_blocked_agent_gets_no_task_until_it_is_unblocked() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.agent("planner") as planner:
        block(admin)
        task = admin.post("/api/admin/tasks", json={"payload": 1}).json()["task_id"]
        with hub.agent("other") as other:
            assert assigned(other) == task  # though the planner was first
            second = admin.post("/api/admin/tasks", json={"payload": 2}).json()["task_id"]
            admin.delete(BLOCK)
            assert assigned(planner) == second


def test_b6_a_blocked_agent_gets_tasks_again_when_the_block_ends() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.agent("planner") as planner:
        block(admin, until=hub.clock.wall() + 3600)
        task = admin.post("/api/admin/tasks", json={"payload": 1}).json()["task_id"]
        worker = hub.hub.scheduler._workers["planner"]
        for _ in range(59):
            wait_for(lambda: worker.timer is not None, "that it is looked at again later")
            hub.clock.advance(60.0001)
            assert admin.get("/api/admin/tasks").json()["tasks"][0]["state"] == "queued"
        wait_for(lambda: worker.timer is not None, "that it is looked at again later")
        hub.clock.advance(61)
        assert assigned(planner) == task


def test_b6_an_agent_that_is_blocked_while_a_task_is_assigned_does_not_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.agent("planner") as planner:
        table, written = hub.hub.scheduler._table, list[str]()
        update = table.update

        async def slow(values: Any) -> Any:
            if values[0] == "assigned":
                await hub.hub.gate.ablock("planner")
            done = await update(values)
            written.append(values[0])
            return done

        monkeypatch.setattr(table, "update", slow)
        admin.post("/api/admin/tasks", json={"payload": 1}).raise_for_status()
        wait_for(lambda: written == ["assigned", "queued"], "that the task is queued again")
        assert ping(planner) == ["rate_limited"]  # and no task before


def test_b6_a_relay_flood_of_a_blocked_agent_is_slowed_down() -> None:
    with (
        hub_server(relay_rate_limit="off") as hub,
        hub.http(ADMIN) as admin,
        planner_on_every_way(hub) as (_, _, relay),
    ):
        block(admin)
        for _ in range(12):
            assert say(relay).type == wire.MESSAGE_TYPE_RATE_LIMITED
        assert hub.hub.flood_counter.connections == 1
        assert hub.hub.relay.denied == 12
