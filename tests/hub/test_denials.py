"""What agents were denied: by action, with the last denials, in bounded memory."""

import time
import tracemalloc
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.hub.monitoring.denials import MAX_ACTIONS, MAX_AGENTS, MAX_DENIALS, DenialLog
from headgate.hub.monitoring.recent_counts import RecentCounts
from headgate.limits.decision import Decision

SECOND = 1_000_000
SLOT, MINUTE = 5 * SECOND, 60 * SECOND
# Around the length of the rings, and beyond it by one slot or minute less than a round.
STEPS = [0, SECOND, SLOT, 11 * SLOT, 12 * SLOT, 23 * SLOT, 59 * MINUTE, 60 * MINUTE, 119 * MINUTE]


def denial() -> Decision:
    with Gate(Policy(limits={"light": "1/hour"}), store=MemoryStore(clock=ManualClock(start=1000))) as gate:
        gate.check("planner", "ws", "light")
        decision = gate.check("planner", "ws", "light")
        assert not decision
        return decision


# Counts ---------------------------------------------------------------------------------------------------------------


@given(
    start=st.integers(0, 10 * MINUTE),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.booleans())),
)
def test_counts_of_the_last_minute_and_hour(start: int, steps: list[tuple[int, bool]]) -> None:
    now, counts = start, RecentCounts(start)
    slots: Counter[int] = Counter()
    for step, counted in steps:
        now += step
        if counted:
            counts.add(now)
            slots[now // SLOT] += 1
        assert counts.last_minute(now) == sum(n for slot, n in slots.items() if slot > now // SLOT - 12)
        assert counts.last_hour(now) == sum(n for slot, n in slots.items() if slot // 12 > now // MINUTE - 60)


def test_a_clock_that_steps_back_changes_no_count() -> None:
    counts = RecentCounts(10 * MINUTE)
    counts.add(10 * MINUTE)
    counts.add(9 * MINUTE)
    assert (counts.last_minute(8 * MINUTE), counts.last_hour(8 * MINUTE)) == (2, 2)


# The log --------------------------------------------------------------------------------------------------------------


def test_actions_are_listed_most_frequent_first_and_forgotten_after_an_hour() -> None:
    clock, denied = ManualClock(start=1000), denial()
    log = DenialLog(clock)
    for action, times in {"ping": 3, "status": 5, "message": 1}.items():
        for _ in range(times):
            log.add("planner", "ws", action, "light", "10.0.0.7", denied)
    log.add("other", "http", "post_task", "heavy", "10.0.0.8", denied)
    clock.advance(120)
    log.add("planner", "ws", "message", "normal", "10.0.0.7", denied)
    found = [(one.action, one.tier, one.last_minute, one.last_hour) for one in log.actions("planner")]
    assert found == [
        ("status", "light", 0, 5),
        ("ping", "light", 0, 3),
        ("message", "normal", 1, 1),
        ("message", "light", 0, 1),
    ]
    assert (log.per_minute("planner"), log.per_minute("other"), log.per_minute("nobody")) == (1, 0, 0)
    clock.advance(3600)
    assert (log.actions("planner"), log.actions("nobody")) == ([], [])
    assert log.per_minute("planner") == 0


def test_the_last_ten_denials_are_kept_newest_first() -> None:
    clock, denied = ManualClock(start=1000), denial()
    log, before = DenialLog(clock), time.time()
    for number in range(25):
        log.add("planner", "ws", f"action-{number}", "light", f"10.0.0.{number}", denied)
    found = log.last("planner")
    assert [one.action for one in found] == [f"action-{number}" for number in range(24, 14, -1)]
    assert len(found) == MAX_DENIALS
    assert (found[0].channel, found[0].tier, found[0].address) == ("ws", "light", "10.0.0.24")
    assert found[0].retry_after_ms == 3_600_000
    assert before <= found[-1].at <= found[0].at <= time.time()
    assert (log.address("planner"), log.address("nobody"), log.last("nobody")) == ("10.0.0.24", "", [])


def test_further_actions_are_counted_as_other_and_old_ones_make_room() -> None:
    clock, denied = ManualClock(start=1000), denial()
    log = DenialLog(clock)
    for number in range(MAX_ACTIONS + 5):
        log.add("planner", "ws", f"action-{number:02}", "light", "", denied)
    found = {one.action: one.last_hour for one in log.actions("planner")}
    assert found == {f"action-{number:02}": 1 for number in range(MAX_ACTIONS)} | {"other": 5}
    clock.advance(3600)
    log.add("planner", "ws", "later", "light", "", denied)
    assert [one.action for one in log.actions("planner")] == ["later"]


def test_the_agents_that_were_denied_last_are_remembered() -> None:
    log, denied = DenialLog(ManualClock(start=1000)), denial()
    for number in range(MAX_AGENTS):
        log.add(f"agent-{number}", "ws", "ping", "light", "", denied)
    log.add("agent-0", "ws", "ping", "light", "", denied)
    log.add("new", "ws", "ping", "light", "", denied)
    assert [log.per_minute(agent) for agent in ("agent-0", "agent-1", "agent-2", "new")] == [2, 0, 1, 1]


def test_the_memory_is_bounded_as_the_docs_say() -> None:
    log, denied = DenialLog(ManualClock(start=1000)), denial()
    tracemalloc.start()
    try:
        for number in range(100):
            for action in range(3 * MAX_ACTIONS):
                name = f"{action:02}".ljust(300, "\N{GRINNING FACE}")
                log.add(f"{number:0128}", "ws", name, "light", "2001:0db8:1111:2222:3333:4444:5555:6666", denied)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 100 * 24_000
