"""Replays of logs under policies, with results computed by hand."""

import gc
import json
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from headgate import Gate, ManualClock, MemoryStore, Outcome, Policy
from headgate.replay.engine import ALLOWED, DENIED, WARNED, AgentTable, PolicyReplay
from headgate.replay.options import LogOptions
from headgate.replay.player import LogSet, Player
from headgate.replay.report import AgentReport, OutcomeCounts
from headgate.replay.suggest import HIGHEST
from headgate.replay.timeline import MAX_INTERVALS, Timeline
from headgate.replay.timestamps import format_timestamp
from tests.support.log_files import BEGIN, replay_report, write_csv, write_log

pytestmark = pytest.mark.once


def counts(allowed: int = 0, warned: int = 0, denied: int = 0, exempt: int = 0, shadowed: int = 0) -> OutcomeCounts:
    return OutcomeCounts(allowed + warned + denied + exempt + shadowed, allowed, warned, denied, exempt, shadowed)


def test_a_bucket_of_ten_a_minute(tmp_path: Path) -> None:
    # Twelve at once: ten pass, and of those the two that leave less than a fifth are warnings. One token comes back
    # every six seconds: at 5.9 none is there, at 6 one, which leaves nothing, at 66 ten are.
    rows = [(0, "a", "heavy")] * 12 + [(5.9, "a", "heavy"), (6, "a", "heavy"), (6, "a", "heavy"), (66, "a", "heavy")]
    report = replay_report(write_csv(tmp_path, rows))
    (policy,) = report.policies
    assert policy.outcomes == counts(allowed=9, warned=3, denied=4)
    (tier,) = policy.tiers
    assert (tier.channel, tier.tier, tier.limit, tier.outcomes) == ("http", "heavy", "10/minute", policy.outcomes)
    assert policy.worst == [
        AgentReport("a", policy.outcomes, 0, "2023-11-14T22:13:20Z", "2023-11-14T22:13:26Z")
    ]  # fmt: skip
    assert (report.first, report.last, report.seconds) == ("2023-11-14T22:13:20Z", "2023-11-14T22:14:26Z", 66.0)
    assert (report.agents, report.agents_complete, report.lines.used, report.lines.read) == (1, True, 16, 17)


def test_agents_channels_and_tiers_have_buckets_of_their_own(tmp_path: Path) -> None:
    policy = Policy(limits={"light": "2/minute", "normal": "1/minute", "http": {"normal": "3/minute"}}, warn_at=1)
    rows = [
        (0, agent, channel, tier) for agent in "ab" for channel in ("ws", "http") for tier in ("light", "normal")
    ] * 4
    report = replay_report(write_csv(tmp_path, rows, "time,agent,channel,tier"), policy=policy)
    found = {(one.channel, one.tier): (one.limit, one.outcomes) for one in report.policies[0].tiers}
    assert found == {
        ("ws", "light"): ("2/minute", counts(4, 0, 4)),
        ("ws", "normal"): ("1/minute", counts(2, 0, 6)),
        ("http", "light"): ("2/minute", counts(4, 0, 4)),
        ("http", "normal"): ("3/minute", counts(6, 0, 2)),
    }
    assert [(one.agent, one.outcomes) for one in report.policies[0].worst] == [
        ("a", counts(8, 0, 8)),
        ("b", counts(8, 0, 8)),
    ]


@pytest.mark.parametrize("warn_at", [0, 0.333, 0.8, 1])
@pytest.mark.parametrize(
    ("limit", "cost"),
    [
        ("10/minute", 1), ("7/minute burst 3", 1), ("1000000/second burst 7", 1), ("3/minute sliding", 1),
        ("2/second; 5/minute", 1), ("7/year burst 300", 60), ("999/hour burst 11", 2),
    ],
)  # fmt: skip
def test_at_the_edges_of_limits_replay_decides_like_the_gate(limit: str, cost: int, warn_at: float) -> None:
    policy = Policy(limits={"normal": limit}, warn_at=warn_at)
    clock = ManualClock(start=BEGIN)
    gate, tier = Gate(policy, store=MemoryStore(clock=clock)), PolicyReplay("", policy).tiers["ws", "normal"]
    by = {Outcome.ALLOW: ALLOWED, Outcome.WARN: WARNED, Outcome.DENY: DENIED}
    waits = []
    for _ in range(12):
        wait = 0.0
        while not wait:
            decision = gate.check("a", "ws", "normal", cost=cost)
            assert tier.decide("a", clock.now(), cost) == by[decision.outcome]
            wait = decision.bucket_retry_after or 0.0
        waits.append(wait)
        if wait > 0.000001:
            clock.advance(wait - 0.000001)  # a microsecond too early, and then just in time
            assert gate.check("a", "ws", "normal", cost=cost).outcome is Outcome.DENY
            assert tier.decide("a", clock.now(), cost) == DENIED
        clock.advance(0.000001)
    assert len(waits) == 12


def test_exemptions_overrides_and_costs_are_honoured(tmp_path: Path) -> None:
    policy = Policy(limits={"normal": "3/minute"}, exempt=["vip"], agents={"own": {"normal": "5/minute"}}, warn_at=1)
    rows = [(0, agent, 1) for agent in ("vip", "own", "plain") for _ in range(6)]
    rows += [(60, "plain", 3), (60, "plain", 1), (120, "plain", 4)]
    report = replay_report(write_csv(tmp_path, rows, "time,agent,cost"), policy=policy)
    assert report.policies[0].outcomes == counts(allowed=5 + 3 + 1, denied=1 + 3 + 2, exempt=6)
    assert [(one.agent, one.outcomes.denied) for one in report.policies[0].worst] == [("plain", 5), ("own", 1)]


def test_an_enforced_backoff_denies_what_the_bucket_would_let_pass(tmp_path: Path) -> None:
    # Denied at 0 and told to wait a second; at 0.5 that isn't over, and the next wait is two seconds: until 2.5.
    rows = [(0, "a", "light"), (0, "a", "light"), (0.5, "a", "heavy"), (2.4, "a", "normal"), (9, "a", "normal")]
    backoff = {"steps": [1, 2, 5], "enforce": True}
    report = replay_report(
        write_csv(tmp_path, rows), policy=Policy(limits={"light": "1/minute"}, backoff=backoff, warn_at=1)
    )
    assert report.policies[0].outcomes == counts(allowed=2, denied=3)
    relaxed = replay_report(write_csv(tmp_path, rows), policy=Policy(limits={"light": "1/minute"}, warn_at=1))
    assert relaxed.policies[0].outcomes == counts(allowed=4, denied=1)


@pytest.mark.parametrize("watched", [{"shadow": True}, {"shadow": ["normal"]}, {"agents": {"a": {"shadow": True}}}])
def test_requests_in_shadow_mode_pass_and_are_counted_apart(watched: dict[str, object], tmp_path: Path) -> None:
    policy = Policy(limits={"normal": "2/minute"}, **watched)
    report = replay_report(write_csv(tmp_path, [(0, "a", "normal")] * 5), policy=policy)
    (found,) = report.policies
    assert found.outcomes == counts(allowed=2, shadowed=3)
    assert found.worst == [AgentReport("a", counts(allowed=2, shadowed=3), 0, None, None)]
    assert (found.agents_denied, found.alerts) == (1, 0)


def test_denied_agents_come_before_shadowed_ones(tmp_path: Path) -> None:
    policy = Policy(limits={"normal": "1/minute"}, agents={"watched": {"shadow": True}})
    rows = [(0, "watched", "normal")] * 9 + [(0, "b", "normal")] * 3 + [(0, "a", "normal")] * 3
    (found,) = replay_report(write_csv(tmp_path, rows), policy=policy).policies
    assert [(one.agent, one.outcomes.denied, one.outcomes.shadowed) for one in found.worst] == [
        ("a", 2, 0),
        ("b", 2, 0),
        ("watched", 0, 8),
    ]


def test_b8_alerts_are_counted_with_agent_and_time(tmp_path: Path) -> None:
    # Ten violations within five minutes raise one; none for the next five minutes, then another ten.
    rows = [(0, "calm", "heavy")] * 19 + [(1, "loud", "heavy")] * 40 + [(301, "loud", "heavy")] * 20
    report = replay_report(write_csv(tmp_path, rows))
    (found,) = report.policies
    assert found.alerts == 2
    assert [(one.time, one.agent) for one in found.first_alerts] == [
        (format_timestamp((BEGIN + 1) * 1_000_000), "loud"),
        (format_timestamp((BEGIN + 301) * 1_000_000), "loud"),
    ]
    assert [(one.agent, one.alerts, one.outcomes.denied) for one in found.worst] == [("loud", 2, 40), ("calm", 0, 9)]


def test_the_first_hundred_alerts_are_kept(tmp_path: Path) -> None:
    policy = Policy(limits={"normal": "blocked"}, alerts={"violations": 1})
    (found,) = replay_report(
        write_csv(tmp_path, [(0, f"agent {number}", "normal") for number in range(120)]), policy=policy
    ).policies
    assert (found.alerts, len(found.first_alerts), found.first_alerts[99].agent) == (120, 100, "agent 99")


def test_time_never_goes_back(tmp_path: Path) -> None:
    # The line at 3 counts as at 60: were it to fill the bucket at 3 and again at 60, more would pass.
    rows = [(0, "a", "normal"), (60, "a", "normal"), (3, "a", "normal"), (50, "b", "normal"), (60, "a", "normal")]
    report = replay_report(write_csv(tmp_path, rows), policy=Policy(limits={"normal": "1/minute"}, warn_at=1))
    assert (report.lines.late, report.lines.late_by) == (2, 57.0)
    assert report.policies[0].outcomes == counts(allowed=3, denied=2)
    assert report.last == format_timestamp((BEGIN + 60) * 1_000_000)
    rows = [(0, "a", "normal"), (60, "b", "normal"), (3, "a", "normal")]  # at 60 the bucket is full again
    report = replay_report(write_csv(tmp_path, rows), policy=Policy(limits={"normal": "1/minute"}, warn_at=1))
    assert report.policies[0].outcomes == counts(allowed=3)


def test_actions_are_classified_by_each_policy(tmp_path: Path) -> None:
    log = write_csv(tmp_path, [(0, "a", "post_task"), (0, "a", "dance")], "time,agent,action")
    other = Policy(actions={"http": {"post_task": "light", "dance": "heavy"}})
    report = replay_report(log, other=other)
    assert [[one.tier for one in policy.tiers] for policy in report.policies] == [
        ["normal", "heavy"],
        ["light", "heavy"],
    ]
    assert report.unknown_actions == ["dance"]


def test_two_policies_in_one_pass(tmp_path: Path) -> None:
    rows = [(0, "big", "normal")] * 9 + [(0, "small", "light")] * 4 + [(90, "big", "normal"), (90, "third", "normal")]
    old = Policy(limits={"normal": "5/minute"}, warn_at=1)
    new = Policy(limits={"light": "2/minute"}, warn_at=1)
    report = replay_report(write_csv(tmp_path, rows), policy=old, other=new)
    before, after = report.policies
    assert (before.policy, before.outcomes) == ("now", counts(11, 0, 4))
    assert (after.policy, after.outcomes) == ("next", counts(13, 0, 2))
    difference = report.difference
    assert difference is not None
    assert (difference.newly_denied, difference.no_longer_denied) == (1, 1)
    assert [(one.agent, one.before, one.after) for one in difference.worst_newly_denied] == [("small", 0, 2)]
    assert [(one.agent, one.before, one.after) for one in difference.worst_no_longer_denied] == [("big", 4, 0)]
    assert len(before.timeline) == len(after.timeline) == 91
    assert before.timeline[0].outcomes == counts(9, 0, 4)
    assert after.timeline[0].outcomes == counts(11, 0, 2)
    assert before.timeline[90].outcomes == after.timeline[90].outcomes == counts(2)
    assert replay_report(write_csv(tmp_path, rows), policy=old).policies == [before]
    assert replay_report(write_csv(tmp_path, rows), policy=new).difference is None


# When ----------------------------------------------------------------------------------------------------------------


def test_the_timeline_stays_short_and_loses_nothing(tmp_path: Path) -> None:
    rows = [(number * 37, "a", "normal") for number in range(2000)]
    report = replay_report(write_csv(tmp_path, rows))
    timeline = report.policies[0].timeline
    assert report.interval == 600.0  # of 240 such intervals 123 are needed
    assert len(timeline) == 124 <= MAX_INTERVALS
    assert sum(one.outcomes.requests for one in timeline) == 2000
    assert timeline[0].start == "2023-11-14T22:10:00Z"  # a multiple of ten minutes
    assert timeline[0].outcomes.requests == 11  # at 0, 37, … 370 of the 400 seconds that are left of it


@pytest.mark.parametrize(
    ("last", "width"),
    [(239, 1), (240, 5), (1199, 5), (3600, 30), (86_400, 600), (10 * 86_400, 10_800), (10**9, 86_400 * 64)],
)
def test_intervals_grow_with_the_log(last: int, width: int) -> None:
    timeline = Timeline(1)
    for second in {0, 1, last // 2, last}:
        row, end = timeline.interval(second * 1_000_000)
        row[0][0] += 1
        assert end > second * 1_000_000
    assert timeline.width == width * 1_000_000
    intervals = list(timeline.intervals())
    assert len(intervals) <= MAX_INTERVALS
    assert sum(one.counts[0][0] for one in intervals) == 4
    assert all(one.start % timeline.width == 0 for one in intervals)


# How much is kept ----------------------------------------------------------------------------------------------------


def test_the_table_of_agents_is_bounded_and_keeps_the_worst() -> None:
    agents = AgentTable(10)
    for number in range(5):
        agents.add(f"bad {number}").counts[2] = number + 1
    for number in range(1000):
        agents.add(f"good {number}")
        assert len(agents) <= 10
    assert {f"bad {number}" for number in range(5)} <= set(agents)
    assert (agents.complete, agents.short_by) == (False, 0)
    for number in range(20):
        agents.add(f"worse {number}").counts[2] = 100
    assert len(agents) <= 10
    assert "bad 0" not in agents
    # What went with more denials than the least that stayed: 100 once there were more than five of those.
    assert 100 <= agents.short_by <= 100 * 5


def replay_stream(lines: Callable[[int], str], count: int) -> Player:
    """A replay of lines that exist nowhere as a whole, with a small table of agents."""
    reader, writer = os.pipe()

    def write() -> None:
        with open(writer, "w") as pipe:
            pipe.writelines(map(lines, range(count)))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with LogSet([f"/dev/fd/{reader}"], LogOptions()) as logs:
            return Player(logs, [PolicyReplay("", Policy(limits={"normal": "2/minute"}), most_agents=200)])
    finally:
        os.close(reader)
        thread.join()


def line(number: int) -> str:
    """Ever new agents, two requests a second, of which some are denied."""
    agent = number // 4 if number % 16 < 4 else number
    return json.dumps({"time": BEGIN + number // 2, "agent": f"agent {agent}", "note": "x" * 400}) + "\n"


@pytest.fixture
def collected_early() -> Iterator[None]:
    """Garbage is collected as in a process of its own: with many older objects it would be kept for longer."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("collected_early")
def test_memory_follows_the_live_agents_and_not_the_log() -> None:
    peaks = []
    for count in (1_500, 5_000):
        tracemalloc.start()
        player = replay_stream(line, count)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        tiers = player.policies[0].tiers
        assert sum(tiers["http", "normal"].total) == count
        assert sum([len(tier.full_at) for tier in tiers.values()]) < 1_500
        assert len(player.policies[0].agents) <= 200
    assert peaks[1] < peaks[0] * 1.25


# Suggestions: the laws are in properties/test_replay_laws.py ---------------------------------------------------------


def test_a_limit_for_each_tier_that_has_requests(tmp_path: Path) -> None:
    rows = [(0, "a", "heavy")] * 30 + [(5, f"agent {number}", "light") for number in range(100)]
    report = replay_report(write_csv(tmp_path, rows), share=Fraction(1, 10))
    assert report.suggestions is not None
    light, heavy = report.suggestions
    assert (light.tier, light.limit, light.requests, light.denied, light.denied_one_less) == ("light", 1, 100, 0, None)
    assert (heavy.tier, heavy.limit, heavy.requests, heavy.denied, heavy.denied_one_less) == ("heavy", 27, 30, 3, 4)
    assert (light.lowest, heavy.lowest, report.share) == (True, True, 0.1)
    pasted = tmp_path / "pasted.toml"
    pasted.write_text(report.toml())
    assert str(Policy.load(pasted).limits["ws", "heavy"]) == "27/minute"
    assert report.toml().splitlines() == [
        "# Denies at most 10% of the requests of each tier.",
        "[limits]",
        'light = "1/minute"  # denies 0 of 100 requests',
        'heavy = "27/minute"  # denies 3 of 30 requests; one less a minute would deny 4',
    ]


def test_suggestions_leave_out_agents_with_other_limits(tmp_path: Path) -> None:
    policy = Policy(
        exempt=["vip"],
        agents={"own": {"heavy": "1/minute"}, "elsewhere": {"ws": {"heavy": "1/minute"}}, "watched": {"shadow": True}},
        backoff={"enforce": True, "steps": [60]},
        shadow=True,
    )
    rows = [(0, agent, "heavy") for agent in ["vip"] * 50 + ["own"] * 40 + ["elsewhere"] * 5 + ["watched"] * 4]
    # Half a bucket later: under a backoff that is enforced they would be denied. The second comes late.
    rows += [(30, "elsewhere", "heavy"), (0, "elsewhere", "heavy")]
    report = replay_report(write_csv(tmp_path, rows), policy=policy, share=Fraction(0))
    assert report.suggestions is not None
    (heavy,) = report.suggestions
    assert (heavy.limit, heavy.requests, heavy.denied, heavy.denied_one_less) == (5, 11, 0, 1)


def test_costs_of_exempt_agents_do_not_matter(tmp_path: Path) -> None:
    log = write_csv(tmp_path, [(0, "vip", 9), (0, "a", 1), (0, "vip", 8)], "time,agent,cost")
    report = replay_report(log, policy=Policy(exempt=["vip"]), share=Fraction(0))
    assert report.suggestions is not None
    assert [(one.limit, one.requests, one.lowest) for one in report.suggestions] == [(1, 1, True)]


def test_with_differing_costs_a_lower_limit_may_do(tmp_path: Path) -> None:
    # Of 5 a minute the large one takes all, and four are denied; of 1 to 4 a minute only the large one and some are.
    rows = [(0, "a", 5), (0, "a", 1), (0, "a", 1), (0, "a", 1), (0, "a", 1)]
    report = replay_report(write_csv(tmp_path, rows, "time,agent,cost"), share=Fraction(0))
    assert report.suggestions is not None
    (found,) = report.suggestions
    assert (found.limit, found.denied, found.denied_one_less, found.lowest) == (9, 0, 1, False)
    assert "costs differ, so a lower limit may do by chance" in report.toml()


def test_a_tier_that_no_limit_satisfies_is_reported(tmp_path: Path) -> None:
    report = replay_report(write_csv(tmp_path, [(0, "a", HIGHEST + 1)], "time,agent,cost"), share=Fraction(0))
    assert report.suggestions is not None
    assert report.suggestions[0].limit is None
    assert f"# normal: no limit up to {HIGHEST:,}/minute is high enough" in report.toml()


def test_an_empty_log_beside_another_is_no_mistake(tmp_path: Path) -> None:
    empty = write_log(tmp_path, "", "empty.log")
    report = replay_report(empty, write_csv(tmp_path, [(0, "a", "normal")]))
    assert [log.name.rpartition("/")[2] for log in report.logs] == ["log.csv"]


def test_several_logs_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    newer = write_csv(tmp_path, [(100, "a", "normal")], name="a.csv")
    older = write_csv(tmp_path, [(0, "a", "normal")] * 2, name="b.csv")
    report = replay_report(newer, older, share=Fraction(0))
    assert [log.name for log in report.logs] == [older, newer]
    assert (report.lines.late, report.lines.used) == (0, 3)
    assert report.suggestions is not None
    assert report.suggestions[0].limit == 2
