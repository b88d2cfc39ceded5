"""Statistics for operators: counts, violations of the last hour, and bucket usage."""

from collections import Counter
from random import Random

from headgate import Gate, ManualClock, MemoryStore, Outcome, Policy
from headgate.hub.monitoring.stats import AGENT_SLOTS, BOUNDS, SLOT, Stats, TrafficHistory, holds_from
from tests.support.hub import ADMIN, VIEWER, AgentConnection, hub_server


def deny(wire: AgentConnection, times: int) -> None:
    """Use up a full bucket of ten, and be denied so many times."""
    for _ in range(10 + times):
        wire.say("session_open", session="s")
    denied = 0
    while denied < times:
        denied += wire.hear()["type"] == "rate_limited"


def test_violations_count_for_an_hour() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
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


def test_a_card_shows_the_bucket_nearest_to_its_limit() -> None:
    with hub_server() as hub, hub.http(VIEWER) as viewer, hub.agent("planner") as wire:
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


def test_traffic_history_matches_a_full_count() -> None:
    random = Random(6)
    trace, slot, came = TrafficHistory(7, 0), 0, Counter[tuple[int, int]]()
    for _ in range(3000):
        slot += random.choice((0, 0, 0, 1, 1, 2, 9))
        kind = random.randrange(3)
        trace.add(slot, kind)
        came[slot, kind] += 1
        for old in range(slot - 10, slot + 2):
            remembered = old > slot - 7
            assert trace.at(old) == tuple(came[old, kind] if remembered else 0 for kind in range(3))


def test_an_agent_whose_account_denies_is_known_until_a_hold_passes_or_it_is_quiet() -> None:
    clock = ManualClock(start=1000)
    policy = Policy(
        accounts={"default": {"agent": {"tokens": "5 in all"}}, "at": {"acme": {"usd": "10 in all"}}},
        agents={"planner": {"account": "acme/search"}, "writer": {"account": "acme"}},
        exempt=["boss"],
    )
    with Gate(policy, store=MemoryStore(clock=clock)) as gate:
        stats = Stats(gate, clock)

        def full() -> list[str]:
            return [agent for agent in ("planner", "writer", "boss") if stats.is_denied_by_account(agent)]

        hold = gate.hold("planner", {"usd": 10})
        for agent in ("planner", "writer", "boss"):
            gate.hold(agent, {"usd": 1})
        assert full() == ["planner", "writer"]
        hold.cancel()
        assert gate.hold("planner", {"usd": 1})
        assert full() == ["writer"]
        assert not gate.hold("writer", {"tokens": 6})
        assert full() == [], "that was the agent's own limit"
        assert not gate.hold("writer", {"usd": 10})
        clock.advance(policy.backoff.quiet - 1)
        assert full() == ["writer"]
        clock.advance(1)
        assert full() == []
        stats.stop()


def test_an_agent_that_is_blocked_or_finds_the_store_full_has_no_full_account() -> None:
    clock = ManualClock(start=1000)
    policy = Policy(accounts={"at": {"acme": {"usd": "10 in all"}}}, agents={"writer": {"account": "acme"}})
    with Gate(policy, store=MemoryStore(clock=clock, max_keys=1)) as gate:
        stats = Stats(gate, clock)
        assert gate.hold("writer", {"usd": 1}).decision.degraded
        assert not stats.is_denied_by_account("writer")
        gate.block("writer")
        assert not gate.hold("writer", {"usd": 1}).decision.degraded
        assert not stats.is_denied_by_account("writer")
        stats.stop()


def test_a_hold_that_is_denied_has_the_address_of_the_block_around_it() -> None:
    policy = Policy(accounts={"default": {"agent": {"tokens": "5 in all"}}})
    clock = ManualClock(start=1000)
    with Gate(policy, store=MemoryStore(clock=clock)) as gate:
        stats = Stats(gate, clock)
        with holds_from("10.0.0.1"):
            with holds_from("10.0.0.2"):
                gate.hold("planner", {"tokens": 6})
            gate.hold("planner", {"tokens": 6})
        gate.hold("planner", {"tokens": 6})
        assert [denial.address for denial in stats.denials.last("planner")] == ["", "10.0.0.1", "10.0.0.2"]
        stats.stop()


def test_the_traffic_of_inactive_agents_is_forgotten() -> None:
    clock = ManualClock(start=1000)
    store = MemoryStore(clock=clock)
    with Gate(Policy(), store=store) as gate:
        stats = Stats(gate, clock)
        stats.record("gone", "ws", "light", Outcome.ALLOW, 1500)
        clock.advance(SLOT * (AGENT_SLOTS - 1))
        stats.record("here", "ws", "heavy", Outcome.EXEMPT, 999)
        assert stats.active(stats.slot - AGENT_SLOTS + 1) == ["gone", "here"]
        assert stats.active(stats.slot) == ["here"]
        clock.advance(SLOT)
        stats.record("here", "ws", "heavy", Outcome.DENY, 10**10)
        assert stats.traffic("gone") is None
        assert stats.active(0) == ["here"]
        assert {key: times for key, times in stats.checks.items() if times} == {
            ("ws", "light", Outcome.ALLOW): 1, ("ws", "heavy", Outcome.EXEMPT): 1, ("ws", "heavy", Outcome.DENY): 1,
        }  # fmt: skip
        assert [index for index, times in enumerate(stats.times) if times] == [0, 1, len(BOUNDS)]
        assert stats.time == 1500 + 999 + 10**10
        stats.stop()
