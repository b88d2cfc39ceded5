"""Defects that other rate limiters have on a server, and headgate doesn't."""

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from redis.crc import key_slot

from headgate import AllOf, Limit, Limiter, ManualClock, Outcome, SlidingWindow, parse, per_day, per_minute
from headgate.limits.token_bucket import per_second
from headgate.limits.violations import Backoff
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.redis import RedisStore
from headgate.stores.redis.protocol import ApplyRequest, Keys
from tests.support.redis_store import time_of
from tests.support.valkey import PATIENCE, Server, wait_for

ODD_AGENTS = [
    "agent-7",
    "",
    "}",
    "{",
    "{x}",
    "a}b",
    "{}",
    "}{",
    "%",
    "%7D",
    "%25",
    "ä",
    "\ud800",
    "x" * 512,
    "y" * 9999,
]
HOUR = 3_600_000_000

T = TypeVar("T")


def wait_until(find: Callable[[], T | None], what: str) -> T:
    """Try until something is found: a machine that stands still is too slow at times."""
    found: list[T] = []

    def look() -> bool:
        one = find()
        if one:
            found.append(one)
        return bool(found)

    wait_for(look, what)
    return found[0]


def test_defect_1_a_fast_refill_is_no_free_pass(store: RedisStore, raw: Any) -> None:
    limiter = Limiter(per_second(100, burst=10), store=store)
    limiter.peek("key")
    begin = time_of(raw)
    passed = sum([bool(limiter.check("key")) for _ in range(200)])
    elapsed = (time_of(raw) - begin) / 1_000_000
    assert 10 <= passed <= 10 + 100 * elapsed


def test_defect_3_other_keys_never_unblock_a_key(server: Server) -> None:
    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENCE) as store:
            for limit in (per_day(1), SlidingWindow(1, 86_400)):
                limiter = Limiter(limit, store=store)
                await limiter.acheck("blocked")
                others = await asyncio.gather(*[limiter.acheck(f"other-{number}") for number in range(1100)])
                assert all(others)
                assert not await limiter.acheck("blocked")

    asyncio.run(work())


def test_defect_4_all_keys_of_one_decision_are_in_one_slot() -> None:
    limit = parse("100/minute; 5/second; 50/hour sliding")
    slots = []
    for agent in ODD_AGENTS:
        asks, offence = [Ask("ws:heavy:default", agent, limit, 1)], Offence("agents", agent, Backoff())
        keys = ApplyRequest(Keys("headgate:"), Verb.CHECK, asks, 200, offence, "id}{1").keys
        assert len(set(keys)) == 5
        assert len({key_slot(key) for key in keys}) == 1, agent[:20]
        slots.append(key_slot(keys[0]))
    assert len(set(slots)) == len(ODD_AGENTS), "different agents are spread"


def test_c5_all_keys_of_one_decision_are_in_one_slot_of_a_cluster(masters: list[Server]) -> None:
    """The servers agree: with a key elsewhere they would refuse the whole decision."""
    limit = parse("100/minute; 2/hour; 50/hour sliding")
    with RedisStore(f"redis+cluster://127.0.0.1:{masters[1].port}", timeout=PATIENCE) as store:
        for agent in ODD_AGENTS:
            asks, offence = [Ask("odd", agent, limit, 1)], Offence("agents", agent, Backoff())
            told = [store.apply(Verb.CHECK, asks, 200, offence, f"id-{number}") for number in range(3)]
            assert [(bool(one), one.degraded) for one in told] == [(True, False), (True, False), (False, False)]
            assert store.standing(offence).violations == 1
            again = store.apply(Verb.CHECK, asks, 200, offence, "id-0")
            assert (bool(again), again.degraded) == (True, False)


@pytest.mark.parametrize("sliding", ["", " sliding"], ids=["bucket", "window"])
def test_defect_6_while_one_limit_denies_the_other_is_not_charged(server: Server, raw: Any, sliding: str) -> None:
    limit = parse(f"100/minute{sliding}; 2/hour{sliding}")
    with RedisStore(server.url, timeout=PATIENCE, clock=ManualClock(start=1000)) as store:
        decisions = [Limiter(limit, store=store).check("key") for _ in range(50)]
        assert [bool(decision) for decision in decisions] == [True] * 2 + [False] * 48
        assert {decision.limit for decision in decisions} == {limit.parts[1]}
        key = f"headgate:{{key}}{'w' if sliding else 'b'}1:{limit}#1:"
        if sliding:
            assert raw.lrange(key, -1, -1) == [b"2"]
        else:
            assert struct.unpack("<2d", raw.get(key)) == (98 * 600_000, 1_000_000_000)


@pytest.mark.parametrize("limit", [SlidingWindow(300, 1), AllOf([SlidingWindow(300, 1), per_second(300)])], ids=str)
def test_defect_7_what_has_left_the_window_is_gone(store: RedisStore, raw: Any, limit: Limit) -> None:
    limiter = Limiter(limit, store=store)
    for _ in range(300):
        limiter.check("key")
    sizes = [raw.memory_usage(key, samples=0) for key in raw.scan_iter()]  # None of one that has just gone
    assert all([0 < size < 300 * 32 for size in sizes if size is not None])
    wait_for(lambda: raw.dbsize() == 0, "the window's keys go away")


@pytest.mark.parametrize(("on_failure", "passes"), [("open", True), ("closed", False), ("local", True)])
def test_defect_11_no_memory_is_not_a_denial(
    server: Server, raw: Any, on_failure: str, passes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisStore(server.url, timeout=PATIENCE, on_failure=on_failure) as store:
        limiters = [Limiter(limit, store=store) for limit in (per_day(60), SlidingWindow(60, 86_400))]
        assert not any([limiter.check("key").degraded for limiter in limiters])
        raw.config_set("maxmemory", 1)
        try:
            for limiter in limiters:
                decision = limiter.check("key")
                assert (bool(decision), decision.degraded) == (passes, True)
        finally:
            raw.config_set("maxmemory", 0)
        assert any(["memory" in record.message for record in caplog.records])
        wait_for(lambda: not limiters[0].check("key").degraded, "the store is back")
        assert [limiter.peek("key").remaining for limiter in limiters] == [58, 59]


# The server's clock was set back (defect 8) ---------------------------------------------------------------------------


def stepped_back(caplog: pytest.LogCaptureFixture) -> int:
    """How often a step back was reported."""
    return sum(["clock has stepped back" in record.message for record in caplog.records])


def test_a5_a_clock_set_back_an_hour_blocks_no_bucket(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A stamp that is an hour ahead starts again from now: nothing is credited for the gap, nothing waits for it."""
    limiter = Limiter(per_second(5), store=store)
    key = "headgate:{key}b1:5/second:"

    def found() -> Any:
        """What is stored after the check; nothing, if it has gone before it was looked at."""
        raw.set(key, struct.pack("<2d", 0, time_of(raw) + HOUR), px=3_700_000)
        before, denied, after = time_of(raw), limiter.check("key"), time_of(raw)
        assert not denied
        assert denied.remaining == 0
        assert denied.retry_us == 200_000
        assert denied.reset_after == 1.0
        assert raw.pttl(key) <= 1010
        stored = raw.get(key)
        assert stored is None or before <= struct.unpack("<2d", stored)[1] <= after
        return stored

    stamp = struct.unpack("<2d", wait_until(found, "a bucket that is still there"))[1]
    wait_for(lambda: limiter.check("key"), "one comes in")
    assert time_of(raw) >= stamp + 200_000
    wait_for(lambda: raw.dbsize() == 0, "the bucket is full and gone")
    assert stepped_back(caplog) == 1


def test_a5_a_peek_also_starts_a_bucket_again(store: RedisStore, raw: Any) -> None:
    limiter = Limiter(per_second(5), store=store)
    raw.set("headgate:{key}b1:5/second:", struct.pack("<2d", 0, time_of(raw) + HOUR), px=3_700_000)
    wait_for(lambda: limiter.peek("key"), "one comes in")


def test_a5_a_clock_set_back_an_hour_blocks_no_window(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The hits keep their distance; the newest was made now."""
    limiter = Limiter(SlidingWindow(3, 1), store=store)
    key = "headgate:{key}w1:3/second sliding:"

    def found() -> list[int]:
        """What is stored after the check; nothing, if it has gone before it was looked at."""
        raw.delete(key)
        later = time_of(raw) + HOUR
        raw.rpush(key, 1_000_000, 7, later - 400_000, 9, later, 10)
        raw.pexpire(key, 3_700_000)
        before, denied, after = time_of(raw), limiter.check("key"), time_of(raw)
        assert not denied
        assert denied.retry_us == 600_000
        assert denied.reset_after == 1.0
        assert raw.pttl(key) <= 1010
        numbers = [int(number) for number in raw.lrange(key, 0, -1)]
        assert not numbers or before <= numbers[4] <= after
        return numbers

    numbers = wait_until(found, "a window that is still there")
    assert [numbers[0], numbers[1], numbers[3], numbers[5]] == [1_000_000, 0, 2, 3]
    assert numbers[4] - numbers[2] == 400_000
    wait_for(lambda: limiter.check("key", 2), "two have left")
    assert time_of(raw) >= numbers[2] + 1_000_000
    wait_for(lambda: raw.dbsize() == 0, "all have left")
    assert stepped_back(caplog) == 1


def test_a5_a_clock_set_back_an_hour_keeps_nobody_rate_limited(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nothing but the standing is looked up: a scheduler does no more (B5)."""
    offence = Offence("agents", "a", Backoff(quiet=0.3, alert_window=0.3))
    later = time_of(raw) + HOUR
    raw.set("headgate:{a}v1:agents", struct.pack("<4d", 2, 0, later - 100_000, later), px=3_700_000)
    standing = store.standing(offence)
    assert (standing.violations, standing.quiet_left) == (2, 0.3)
    assert stepped_back(caplog) == 1
    wait_for(lambda: not store.standing(offence), "the quiet period passes")


def test_a5_a_clock_set_back_an_hour_holds_up_nobody_for_it(store: RedisStore, raw: Any) -> None:
    """An enforced wait is as long as it is, from the new time on."""
    offence = Offence("agents", "a", Backoff(steps=[0.3], quiet=60, enforce=True))
    ask = Ask("", "a", per_minute(60), 1)
    raw.set("headgate:{a}v1:agents", struct.pack("<3d", 1, 0, time_of(raw) + HOUR), px=3_700_000)
    early = store.apply(Verb.CHECK, [ask], 200, offence)
    assert (bool(early), early.retry_after) == (False, 0.3)
    assert early.violation is not None
    assert early.violation.count == 2
    wait_for(lambda: store.standing(offence).wait_left == 0, "the wait is over")
    assert store.apply(Verb.CHECK, [ask], 200, offence)


def test_a5_violations_go_on_after_a_clock_was_set_back(store: RedisStore, raw: Any) -> None:
    """The count goes on, and an alert that was raised isn't raised again."""
    offence = Offence("agents", "a", Backoff(alert_after=3))
    later = time_of(raw) + HOUR
    raw.set(
        "headgate:{a}v1:agents", struct.pack("<5d", 3, later - 10, later - 30, later - 20, later - 10), px=3_900_000
    )
    before = time_of(raw)
    told = [store.record_violation(offence) for _ in range(2)]
    after = time_of(raw)
    assert [(one.count, one.alert) for one in told] == [(4, False), (5, False)]
    count, alerted, *newest = struct.unpack("<5d", raw.get("headgate:{a}v1:agents"))
    assert count == 5
    assert all([before - 30 <= moment <= after for moment in (alerted, *newest)])
    assert raw.pttl("headgate:{a}v1:agents") <= 300_010


def test_a5_a_step_back_below_a_second_keeps_the_old_stamp(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock stands still until it has caught up."""
    ahead = 700_000
    bucket, window = Limiter(per_second(5), store=store), Limiter(SlidingWindow(1, 1), store=store)

    def stamped() -> int | None:
        """The stamp of what was looked at before its time had come; nothing, if the machine was too slow for that."""
        raw.flushall()
        stamp = time_of(raw) + ahead
        raw.set("headgate:{key}b1:5/second:", struct.pack("<2d", 0, stamp), px=60_000)
        raw.rpush("headgate:{key}w1:1/second sliding:", 1_000_000, 0, stamp, 1)
        raw.pexpire("headgate:{key}w1:1/second sliding:", 60_000)
        raw.set("headgate:{key}v1:agents", struct.pack("<3d", 1, 0, stamp), px=60_000)
        before = [raw.dump(key) for key in sorted(raw.keys())]
        waits = [one.check("key").retry_us or 0 for one in (bucket, window)]
        violations = store.standing(Offence("agents", "key", Backoff())).violations
        if time_of(raw) >= stamp:
            return None
        assert violations == 1
        assert 200_000 < waits[0] <= 200_000 + ahead
        assert 1_000_000 < waits[1] <= 1_000_000 + ahead
        assert [raw.dump(key) for key in sorted(raw.keys())] == before
        return stamp

    stamp = wait_until(stamped, "a look before the clock has caught up")
    wait_for(lambda: bucket.check("key"), "one comes in")
    assert time_of(raw) >= stamp + 200_000
    wait_for(lambda: window.check("key").outcome is not Outcome.DENY, "it leaves the window")
    assert time_of(raw) >= stamp + 1_000_000
    assert stepped_back(caplog) == 0


def test_a5_the_log_is_not_flooded_with_steps_back(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "headgate")
    limiter = Limiter(per_second(5), store=store)
    for number in range(20):
        raw.set(f"headgate:{{{number}}}b1:5/second:", struct.pack("<2d", 0, time_of(raw) + HOUR), px=3_700_000)
        assert not limiter.check(str(number))
    assert stepped_back(caplog) == 1
