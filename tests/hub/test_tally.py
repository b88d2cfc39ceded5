"""What operators see: counts, violations of the last hour, and how full each bucket is."""

from hubs import ADMIN, VIEWER, Wire, running


def deny(wire: Wire, times: int) -> None:
    """Use up a full bucket of ten, and be denied so many times."""
    for _ in range(10 + times):
        wire.say("session_open", session="s")
    denied = 0
    while denied < times:
        denied += wire.hear()["type"] == "rate_limited"


def test_violations_count_for_an_hour_of_the_gates_clock() -> None:
    with running() as hub, hub.http(ADMIN) as admin:
        with hub.agent("first") as first, hub.agent("second") as second:
            deny(first, 1)
            hub.clock.advance(1800)
            deny(second, 3)
        summary = admin.get("/api/dashboard/state").json()["summary"]
        assert summary["violations_last_hour"] == 4
        worst = [{"agent_id": "second", "violations": 3}, {"agent_id": "first", "violations": 1}]
        assert summary["worst_offenders"] == worst
        hub.clock.advance(1800)
        assert [card["agent_id"] for card in admin.get("/api/admin/violations").json()["agents"]] == ["second"]
        hub.clock.advance(1800)
        assert admin.get("/api/admin/violations").json() == {"agents": []}
        assert admin.get("/api/dashboard/state").json()["summary"]["violations_last_hour"] == 0


def test_a_card_tells_of_the_bucket_that_is_nearest_to_its_limit() -> None:
    with running() as hub, hub.http(VIEWER) as viewer, hub.agent("planner") as wire:
        wire.ask("ping")
        for _ in range(5):
            wire.ask("session_open", session="s")
        (card,) = viewer.get("/api/dashboard/state").json()["agents"]
        assert card["usage"] == {"channel": "ws", "tier": "heavy", "used": 0.5, "remaining": 5, "capacity": 10}
        assert (card["agent_id"], card["connected"], card["violations"]) == ("planner", True, 0)
        hub.clock.advance(60)
        (card,) = viewer.get("/api/dashboard/state").json()["agents"]
        assert card["usage"]["used"] == 0
        hub.call(hub.hub.gate.add_exemption, "planner")
        (card,) = viewer.get("/api/dashboard/state").json()["agents"]
        assert (card["usage"], card["exempt"]) == (None, True)


def test_checks_are_counted_by_outcome() -> None:
    with running() as hub, hub.http() as anyone, hub.agent("planner") as wire:
        with hub.http(hub.register("other")) as other:
            assert other.get("/api/mailbox").status_code == 200
        deny(wire, 2)
        metrics = anyone.get("/api/metrics").json()
        assert metrics["checks"] == {"allow": 1 + 8, "warn": 2, "deny": 2, "exempt": 0}
        assert metrics["violations"] == 2
        assert metrics["address_checks"] == {"allow": 2}  # the connection, and this request
