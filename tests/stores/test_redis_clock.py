"""The server's clock is set back: nobody is blocked until it has caught up, and nobody gains by it (A5)."""

import struct
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from headgate import Limiter, Outcome, SlidingWindow, per_minute
from headgate.limits.token_bucket import per_second
from headgate.limits.violations import Backoff
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.redis import RedisStore
from tests.support.redis_store import pack_doubles, server_time
from tests.support.valkey import wait_for

HOUR = 3_600_000_000

T = TypeVar("T")


def wait_until(find: Callable[[], T | None], what: str) -> T:
    """Retry until `find` returns something: a machine under load is too slow at times."""
    found: list[T] = []

    def look() -> bool:
        one = find()
        if one:
            found.append(one)
        return bool(found)

    wait_for(look, what)
    return found[0]


def count_reports(caplog: pytest.LogCaptureFixture) -> int:
    """The number of times that the log reports a step back."""
    return sum(["clock has stepped back" in record.message for record in caplog.records])


def test_a5_a_bucket_goes_on_from_the_new_time(store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A stamp an hour ahead is replaced by the current time: the gap earns no tokens and delays none."""
    limiter = Limiter(per_second(5), store=store)
    key = "headgate:{key}b1:5/second:"

    def found() -> Any:
        """The value stored by the check, unless it expired before it was read."""
        raw.set(key, pack_doubles(0, server_time(raw) + HOUR), px=3_700_000)
        before, denied, after = server_time(raw), limiter.check("key"), server_time(raw)
        assert not denied
        assert denied.remaining == 0
        assert denied.retry_us == 200_000
        assert denied.reset_after == 1.0
        assert raw.pttl(key) <= 1010
        stored = raw.get(key)
        assert stored is None or before <= struct.unpack("<2d", stored)[1] <= after
        return stored

    stamp = struct.unpack("<2d", wait_until(found, "a bucket that is still stored"))[1]
    wait_for(lambda: limiter.check("key"), "a token")
    assert server_time(raw) >= stamp + 200_000
    wait_for(lambda: raw.dbsize() == 0, "the full bucket to expire")
    assert count_reports(caplog) == 1


def test_a5_a_peek_corrects_a_bucket_too(store: RedisStore, raw: Any) -> None:
    limiter = Limiter(per_second(5), store=store)
    raw.set("headgate:{key}b1:5/second:", pack_doubles(0, server_time(raw) + HOUR), px=3_700_000)
    wait_for(lambda: limiter.peek("key"), "a token")


def test_a5_a_window_goes_on_from_the_new_time(store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The newest hit moves to the current time, and the others keep their distance from it."""
    limiter = Limiter(SlidingWindow(3, 1), store=store)
    key = "headgate:{key}w1:3/second sliding:"

    def found() -> list[int]:
        """The value stored by the check, unless it expired before it was read."""
        raw.delete(key)
        later = server_time(raw) + HOUR
        raw.rpush(key, 1_000_000, 7, later - 400_000, 9, later, 10)
        raw.pexpire(key, 3_700_000)
        before, denied, after = server_time(raw), limiter.check("key"), server_time(raw)
        assert not denied
        assert denied.retry_us == 600_000
        assert denied.reset_after == 1.0
        assert raw.pttl(key) <= 1010
        numbers = [int(number) for number in raw.lrange(key, 0, -1)]
        assert not numbers or before <= numbers[4] <= after
        return numbers

    numbers = wait_until(found, "a window that is still stored")
    assert [numbers[0], numbers[1], numbers[3], numbers[5]] == [1_000_000, 0, 2, 3]
    assert numbers[4] - numbers[2] == 400_000
    wait_for(lambda: limiter.check("key", 2), "two hits to leave")
    assert server_time(raw) >= numbers[2] + 1_000_000
    wait_for(lambda: raw.dbsize() == 0, "all hits to leave")
    assert count_reports(caplog) == 1


def test_a5_the_quiet_period_goes_on_from_the_new_time(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Looking up the standing is enough: a scheduler does no more (B5)."""
    offence = Offence("agents", "a", Backoff(quiet=0.3, alert_window=0.3))
    later = server_time(raw) + HOUR
    raw.set("headgate:{a}v1:agents", pack_doubles(2, 0, later - 100_000, later), px=3_700_000)
    standing = store.standing(offence)
    assert (standing.violations, standing.quiet_left) == (2, 0.3)
    assert count_reports(caplog) == 1
    wait_for(lambda: not store.standing(offence), "the end of the quiet period")


def test_a5_an_enforced_wait_goes_on_from_the_new_time(store: RedisStore, raw: Any) -> None:
    offence = Offence("agents", "a", Backoff(steps=[0.3], quiet=60, enforce=True))
    ask = Ask("", "a", per_minute(60), 1)
    raw.set("headgate:{a}v1:agents", pack_doubles(1, 0, server_time(raw) + HOUR), px=3_700_000)
    early = store.apply(Verb.CHECK, [ask], 200, offence)
    assert (bool(early), early.retry_after) == (False, 0.3)
    assert early.violation is not None
    assert early.violation.count == 2
    wait_for(lambda: store.standing(offence).wait_left == 0, "the end of the wait")
    assert store.apply(Verb.CHECK, [ask], 200, offence)


def test_a5_violations_keep_their_count_and_raise_no_second_alert(store: RedisStore, raw: Any) -> None:
    offence = Offence("agents", "a", Backoff(alert_after=3))
    later = server_time(raw) + HOUR
    raw.set("headgate:{a}v1:agents", pack_doubles(3, later - 10, later - 30, later - 20, later - 10), px=3_900_000)
    before = server_time(raw)
    told = [store.record_violation(offence) for _ in range(2)]
    after = server_time(raw)
    assert [(one.count, one.alert) for one in told] == [(4, False), (5, False)]
    count, alerted, *newest = struct.unpack("<5d", raw.get("headgate:{a}v1:agents"))
    assert count == 5
    assert all([before - 30 <= moment <= after for moment in (alerted, *newest)])
    assert raw.pttl("headgate:{a}v1:agents") <= 300_010


def test_a5_after_a_step_back_below_a_second_time_stands_still_until_it_catches_up(
    store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = 700_000
    bucket, window = Limiter(per_second(5), store=store), Limiter(SlidingWindow(1, 1), store=store)

    def stamped() -> int | None:
        """The stamp of the stored values, unless the machine was too slow to check before it."""
        raw.flushall()
        stamp = server_time(raw) + ahead
        raw.set("headgate:{key}b1:5/second:", pack_doubles(0, stamp), px=60_000)
        raw.rpush("headgate:{key}w1:1/second sliding:", 1_000_000, 0, stamp, 1)
        raw.pexpire("headgate:{key}w1:1/second sliding:", 60_000)
        raw.set("headgate:{key}v1:agents", pack_doubles(1, 0, stamp), px=60_000)
        before = [raw.dump(key) for key in sorted(raw.keys())]
        waits = [one.check("key").retry_us or 0 for one in (bucket, window)]
        violations = store.standing(Offence("agents", "key", Backoff())).violations
        if server_time(raw) >= stamp:
            return None
        assert violations == 1
        assert 200_000 < waits[0] <= 200_000 + ahead
        assert 1_000_000 < waits[1] <= 1_000_000 + ahead
        assert [raw.dump(key) for key in sorted(raw.keys())] == before
        return stamp

    stamp = wait_until(stamped, "checks before the clock catches up")
    wait_for(lambda: bucket.check("key"), "a token")
    assert server_time(raw) >= stamp + 200_000
    wait_for(lambda: window.check("key").outcome is not Outcome.DENY, "the hit to leave the window")
    assert server_time(raw) >= stamp + 1_000_000
    assert count_reports(caplog) == 0


def test_a5_a_step_back_is_logged_once(store: RedisStore, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    limiter = Limiter(per_second(5), store=store)
    for number in range(20):
        raw.set(f"headgate:{{{number}}}b1:5/second:", pack_doubles(0, server_time(raw) + HOUR), px=3_700_000)
        assert not limiter.check(str(number))
    assert count_reports(caplog) == 1
