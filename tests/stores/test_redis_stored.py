"""The stored format in a real server, pinned to the byte, and the expiry of every key."""

import asyncio
import hashlib
import random
from fractions import Fraction
from typing import Any

import pytest

from headgate import (
    AllOf,
    Limit,
    Limiter,
    ManualClock,
    SlidingWindow,
    TokenBucket,
    parse,
    per_day,
    per_minute,
    per_second,
)
from headgate.limits.violations import Backoff
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.holds import HoldTerms
from headgate.stores.redis import RedisStore
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.protocol import ApplyRequest, command
from headgate.stores.redis.script import DIGEST, SOURCE, with_functions
from tests.support.redis_store import keys_of, pack_doubles, server_time
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

# The format -----------------------------------------------------------------------------------------------------------


def test_bucket_format(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    """Level in units and stamp in microseconds, as little-endian doubles. A full bucket is not stored."""
    limiter = Limiter(per_minute(60), store=still, name="name")
    limiter.check("agent-7")
    assert keys_of(raw) == [b"headgate:{agent-7}b1:60/minute:name"]
    assert raw.get("headgate:{agent-7}b1:60/minute:name") == pack_doubles(59_000_000, 1_000_000_000)
    assert raw.get("headgate:{agent-7}b1:60/minute:name").hex() == "0000000026228c41" + "0000000065cdcd41"
    clock.advance(Fraction(1, 4))
    limiter.charge("agent-7", 100)
    assert raw.get("headgate:{agent-7}b1:60/minute:name") == pack_doubles(-40_750_000, 1_000_250_000)
    limiter.refund("agent-7", 200)
    assert keys_of(raw) == []


def test_format_of_a_bucket_with_coarse_ticks(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    """The stamp stays at whole ticks."""
    limit = TokenBucket(10**9, 1, 9_000_000)
    assert limit.integers() == (10**9, 9_000_000, 1, 1_000_000, 9 * 10**15)
    limiter = Limiter(limit, store=still)
    limiter.check("a", 5)
    clock.advance(Fraction("2.5"))
    limiter.check("a")
    (key,) = keys_of(raw)
    assert key == b"headgate:{a}b1:1 per 2500 hours burst 1000000000:"
    assert raw.get(key) == pack_doubles(9 * 10**15 - 6 * 9_000_000 + 2, 1_002_000_000)


def test_window_format(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    """The window, the sum of the costs that have left it, and for each moment its time and the sum up to it."""
    limiter = Limiter(SlidingWindow(60, 60), store=still, name="name")
    key = "headgate:{agent-7}w1:60/minute sliding:name"
    limiter.check("agent-7")
    assert keys_of(raw) == [key.encode()]
    assert raw.lrange(key, 0, -1) == [b"60000000", b"0", b"1000000000", b"1"]
    limiter.check("agent-7", 4)  # at the same moment
    clock.advance(1)
    limiter.check("agent-7", 2)
    assert raw.lrange(key, 0, -1) == [b"60000000", b"0", b"1000000000", b"5", b"1001000000", b"7"]
    clock.advance(59)
    limiter.check("agent-7", 3)
    assert raw.lrange(key, 0, -1) == [b"60000000", b"5", b"1001000000", b"7", b"1060000000", b"10"]
    limiter.refund("agent-7", 4)
    assert raw.lrange(key, 0, -1) == [b"60000000", b"5", b"1001000000", b"6"]
    limiter.refund("agent-7", 4)
    assert keys_of(raw) == []


def test_format_of_several_limits(still: RedisStore, raw: Any) -> None:
    Limiter("5/second; 100/minute sliding", store=still, name="name").check("agent-7", 2)
    assert keys_of(raw) == [
        b"headgate:{agent-7}b1:5/second; 100/minute sliding#1:name",
        b"headgate:{agent-7}w1:5/second; 100/minute sliding#2:name",
    ]
    assert raw.get(keys_of(raw)[0]) == pack_doubles(3 * 200_000, 1_000_000_000)
    assert raw.lrange(keys_of(raw)[1], 0, -1) == [b"60000000", b"0", b"1000000000", b"2"]


def test_request_id_format(still: RedisStore, raw: Any) -> None:
    """The request, and as doubles its time and the script's answer: the status and the state of each limit."""
    limiter = Limiter(per_minute(60), store=still, name="name")
    first = limiter.check("agent-7", request_id="req-1")
    key = "headgate:{agent-7}i1:check:60/minute:4:name:req-1"
    assert keys_of(raw) == [b"headgate:{agent-7}b1:60/minute:name", key.encode()]
    asked = b"b" + pack_doubles(60, 1_000_000, 1, 1, 60_000_000) + b"i" + pack_doubles(60_000_000)
    assert raw.get(key) == b"c" + asked + pack_doubles(1_000_000_000) + pack_doubles(1, 59_000_000, 1_000_000_000)
    assert limiter.check("agent-7", request_id="req-1") == first
    assert limiter.peek("agent-7").remaining == 59
    limiter.charge("agent-7", 2, request_id="req-1")
    said = b"g" + asked + pack_doubles(1_000_000_000) + pack_doubles(1, 57_000_000, 1_000_000_000)
    assert raw.get("headgate:{agent-7}i1:charge:60/minute:4:name:req-1") == said
    Limiter(SlidingWindow(5, 60), store=still, name="window").check("agent-7", request_id="req-1")
    asked = b"cw" + pack_doubles(5, 60_000_000, 0) + b"i" + pack_doubles(60_000_000)
    said = asked + pack_doubles(1_000_000_000) + pack_doubles(1, 1, 0, 1_000_000_000)
    assert raw.get("headgate:{agent-7}i1:check:5/minute sliding:6:window:req-1") == said


def test_violation_format(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    """The number in a row, the time of the last alert (0: never), and the newest violations, oldest first."""
    offence = Offence("agents", "agent-7", Backoff(alert_after=2))
    key = "headgate:{agent-7}v1:agents"
    still.record_violation(offence)
    assert keys_of(raw) == [key.encode()]
    assert raw.get(key) == pack_doubles(1, 0, 1_000_000_000)
    clock.advance(1)
    asks = [Ask("", "agent-7", per_minute(1), 2)]
    assert not still.apply(Verb.CHECK, asks, 200, offence)
    assert raw.get(key) == pack_doubles(2, 1_001_000_000, 1_000_000_000, 1_001_000_000)
    clock.advance(1)
    still.record_violation(offence)
    assert raw.get(key) == pack_doubles(3, 1_001_000_000, 1_001_000_000, 1_002_000_000), "no more than an alert needs"
    assert keys_of(raw) == [key.encode()]


@pytest.mark.parametrize(
    ("key", "name"),
    [("", b"%"), ("%", b"%25"), ("}", b"%7D"), ("{x}", b"{{x%7D"[1:]), ("a}b%", b"a%7Db%25"), ("ä", b"\xc3\xa4")],
)
def test_odd_keys_are_escaped(still: RedisStore, raw: Any, key: str, name: bytes) -> None:
    Limiter(per_minute(60), store=still).check(key)
    assert keys_of(raw) == [b"headgate:{" + name + b"}b1:60/minute:"]


def test_long_keys_are_stored_under_their_digest(still: RedisStore, raw: Any) -> None:
    limiter = Limiter(per_minute(60), store=still)
    limiter.check("x" * 512)
    assert keys_of(raw) == [b"headgate:{" + b"x" * 512 + b"}b1:60/minute:"]
    raw.flushall()
    long = [letter * 100_000 for letter in "xyä"]
    for key in long:
        assert limiter.check(key).remaining == 59
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in long]
    assert keys_of(raw) == sorted([f"headgate:{{%{digest}}}b1:60/minute:".encode() for digest in digests])
    assert [limiter.check(key).remaining for key in (*long, f"%{digests[0]}", digests[0])] == [58, 58, 58, 59, 59]


def test_lone_surrogates_are_valid_in_keys(still: RedisStore, raw: Any) -> None:
    keys = ["\ud800", "\udfff", "a\ud800", "\ud83d\ude00", "\U0001f600", "\udc80" * 1000]
    limiter = Limiter(per_minute(60), store=still, name="\ud800")
    offences = [Offence("\udc00", key, Backoff()) for key in keys]
    assert [limiter.check(key, request_id="\udcff").remaining for key in keys] == [59] * 6
    assert [still.record_violation(offence).count for offence in offences] == [1] * 6
    assert [limiter.check(key, request_id="\udcff").remaining for key in keys] == [59] * 6
    assert [limiter.peek(key).remaining for key in keys] == [59] * 6
    assert len(keys_of(raw)) == 18
    assert b"headgate:{\xed\xa0\x80}b1:60/minute:\xed\xa0\x80" in keys_of(raw)
    assert all(map(limiter.reset, keys))


ODD = ["agent-7", "", "}", "{", "{x}", "a}b", "{}", "}{", "%", "%7D", "%25", "ä", "\ud800", "x" * 512, "y" * 9999]


@pytest.mark.long
def test_c5_all_keys_of_one_decision_are_in_one_slot_of_a_cluster(masters: list[ValkeyServer]) -> None:
    """A server refuses a decision whose keys are in different slots."""
    limit = parse("100/minute; 2/hour; 50/hour sliding")
    with RedisStore(f"redis+cluster://127.0.0.1:{masters[1].port}", timeout=PATIENCE) as store:
        for agent in ODD:
            asks, offence = [Ask("odd", agent, limit, 1)], Offence("agents", agent, Backoff())
            decisions = [store.apply(Verb.CHECK, asks, 200, offence, f"id}}{{{number}") for number in range(3)]
            assert [(bool(one), one.degraded) for one in decisions] == [(True, False), (True, False), (False, False)]
            assert store.standing(offence).violations == 1
            again = store.apply(Verb.CHECK, asks, 200, offence, "id}{0")
            assert (bool(again), again.degraded) == (True, False)


# Written by an older node ---------------------------------------------------------------------------------------------


def test_a_stored_bucket_is_read_correctly(still: RedisStore, raw: Any) -> None:
    raw.set("headgate:{a}b1:60/minute:name", pack_doubles(2_500_000, 998_000_000), px=60_000)
    limiter = Limiter(per_minute(60), store=still, name="name")
    decision = limiter.peek("a", 5)
    assert (decision.remaining, decision.retry_after, decision.reset_after) == (4, 0.5, 55.5)
    raw.set("headgate:{b}b1:60/minute:name", pack_doubles(-2_500_000, 998_000_000), px=60_000)
    assert limiter.check("b").retry_after == 1.5
    assert limiter.check("a", 4)
    assert raw.get("headgate:{a}b1:60/minute:name") == pack_doubles(500_000, 1_000_000_000)


def test_a_stored_window_is_read_correctly(still: RedisStore, raw: Any) -> None:
    """7 have left it; 2 leave now, 3 in a second and 1 in five."""
    key = "headgate:{a}w1:6 per 10 seconds sliding:name"
    raw.rpush(key, 10_000_000, 7, 990_000_000, 9, 991_000_000, 12, 995_000_000, 13)
    raw.pexpire(key, 60_000)
    limiter = Limiter(SlidingWindow(6, 10), store=still, name="name")
    assert limiter.peek("a").remaining == 2
    assert limiter.peek("a", 3).retry_after == 1.0
    assert limiter.peek("a", 6).retry_after == 5.0
    assert limiter.check("a", 2).reset_after == 10.0
    assert raw.lrange(key, 0, -1) == [b"10000000", b"9", b"991000000", b"12", b"995000000", b"13", b"1000000000", b"15"]


def test_stored_violations_are_read_correctly(still: RedisStore, raw: Any) -> None:
    raw.set("headgate:{a}v1:agents", pack_doubles(4, 0, 970_000_000, 980_000_000), px=60_000)
    offence = Offence("agents", "a", Backoff(alert_after=3))
    standing = still.standing(offence)
    assert (standing.violations, standing.wait_left, standing.quiet_left) == (4, 0.0, 40.0)
    violation = still.record_violation(offence)
    assert (violation.count, violation.advised, violation.alert) == (5, 30.0, True)
    raw.set("headgate:{b}v1:agents", pack_doubles(4, 0, 940_000_000), px=60_000)
    assert not still.standing(offence._replace(key="b"))


def test_a_stored_request_id_is_read_correctly(still: RedisStore, raw: Any) -> None:
    asked = b"cb" + pack_doubles(60, 1_000_000, 1, 1, 60_000_000) + b"i" + pack_doubles(60_000_000)
    said = asked + pack_doubles(990_000_000) + pack_doubles(1, 42_000_000, 990_000_000)
    raw.set("headgate:{a}i1:check:60/minute:4:name:req-1", said, px=60_000)
    limiter = Limiter(per_minute(60), store=still, name="name")
    assert limiter.check("a", request_id="req-1").remaining == 42
    assert limiter.peek("a").remaining == 60


# Expiry ---------------------------------------------------------------------------------------------------------------

ALL_KINDS = [
    per_second(10),
    per_minute(60, burst=3),
    per_day(Fraction(1, 7), burst=2),
    SlidingWindow(10, 1),
    SlidingWindow(1000, 86_400),
    TokenBucket(10**9, 1, 9_000_000),
    parse("5/second; 100/minute; 1000/hour sliding"),
    AllOf([SlidingWindow(3, 5), SlidingWindow(30, 50)]),
]


def use(store: RedisStore) -> None:
    """Call everything that writes, with every kind of limit."""
    offences = [Offence("agents", key, Backoff()) for key in "ab"]
    for limit in ALL_KINDS:
        limiter = Limiter(limit, store=store, name=str(limit))
        for number in range(4):
            limiter.check("checked")
            limiter.check("checked twice", request_id=f"id-{number % 2}")
            limiter.peek("seen")
            limiter.charge("charged", 10**6, request_id=f"id-{number}")
            limiter.refund("charged", 10**5 + number, request_id=f"id-{number}")
            limiter.refund("given")
            store.apply(Verb.CHECK, [Ask(str(limit), "a", limit, limit.capacity)], 200, offences[0], f"id-{number}")
        limiter.check("reset")
        limiter.reset("reset")
    for offence in offences:
        store.record_violation(offence)
        store.standing(offence)


@pytest.mark.parametrize("on", ["store", "still"], ids=["server's clock", "manual clock"])
def test_c5_every_key_has_an_expiry(raw: Any, on: str, request: pytest.FixtureRequest) -> None:
    use(request.getfixturevalue(on))
    keys = keys_of(raw)
    assert len(keys) > 40
    assert {key.split(b"}")[1][:1] for key in keys} == {b"b", b"w", b"i", b"v"}
    assert [key for key in keys if raw.pttl(key) == -1] == []


def test_c5_a_key_lives_until_it_is_full_and_not_much_longer(store: RedisStore, raw: Any) -> None:
    chance = random.Random(3)
    for number in range(300):
        limit = chance.choice(ALL_KINDS[:6])
        limiter, cost = Limiter(limit, store=store), chance.randint(1, 3)
        key = f"key-{number}"
        before = server_time(raw)
        decision = limiter.charge(key, cost) if chance.random() < 0.5 else limiter.check(key, min(cost, limit.capacity))
        after = server_time(raw)
        found = list(raw.scan_iter(match=f"*{{{key}}}*", count=100_000))
        expires = raw.pexpiretime(found[0]) * 1000 if found else -1
        if expires >= 0:
            assert expires >= before + decision.reset_after * 1_000_000, limit
            assert expires <= after + decision.reset_after * 1_000_001 + 4000, limit
        else:
            assert server_time(raw) >= before + decision.reset_after * 1_000_000, limit


def test_c5_a_budget_expires_with_its_period_however_it_grows_and_one_in_all_a_year_after_its_last_use(
    store: RedisStore, raw: Any
) -> None:
    asks = [Ask("month", "a", parse("100 tokens/calendar month"), 5), Ask("all", "a", parse("100 tokens in all"), 5)]
    names: dict[bytes, list[tuple[bytes, int]]] = {}
    for number in range(3):
        store.hold(asks, 0, HoldTerms(f"id-{number}", 60_000_000, False, 60_000_000))
        for key in [key for key in keys_of(raw) if b"c1:" in key]:
            names.setdefault(key, []).append((raw.get(key)[8:], raw.pttl(key)))
            raw.pexpire(key, 90_000_000)
    month, in_all = sorted(names.items(), key=lambda one: b":month" not in one[0])
    assert (
        [used for used, _ in month[1]]
        == [used for used, _ in in_all[1]]
        == [pack_doubles(5), pack_doubles(10), pack_doubles(15)]
    )
    assert [expiry > 90_000_000 for _, expiry in month[1]] == [True, False, False]
    assert [expiry > 300 * 86_400_000 for _, expiry in in_all[1]] == [True, True, True]


def test_c5_an_expired_bucket_is_full(store: RedisStore, raw: Any) -> None:
    limiter = Limiter(per_second(20), store=store)
    begin = server_time(raw)
    decision = limiter.check("a", 5)
    assert decision.reset_after == 0.25
    wait_for(lambda: raw.dbsize() == 0, "the bucket to expire")
    assert server_time(raw) >= begin + 250_000
    assert limiter.peek("a").remaining == 20


async def use_once(store: RedisStore, keys: int) -> None:
    limiters = [Limiter(limit, store=store) for limit in (per_second(10, burst=2), SlidingWindow(5, 0.5))]
    for first in range(0, keys, 2000):
        numbers = range(first, min(first + 2000, keys))
        decisions = await asyncio.gather(*[limiters[number % 2].acheck(f"agent-{number}") for number in numbers])
        assert all(decisions)
        assert not any([decision.degraded for decision in decisions])


@pytest.mark.parametrize("keys", [4000, pytest.param(100_000, marks=pytest.mark.long)])
async def test_c5_one_shot_keys_leave_nothing_behind_and_never_unblock_a_key(
    server: ValkeyServer, raw: Any, keys: int
) -> None:
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        blocked = [Limiter(limit, store=store) for limit in (per_day(1), SlidingWindow(1, 86_400))]
        assert all([await limiter.acheck("blocked") for limiter in blocked])
        await use_once(store, keys)
        assert not any([await limiter.acheck("blocked") for limiter in blocked])
    wait_for(lambda: raw.dbsize() == 2, "all other keys to expire")
    assert raw.info("stats")["expired_keys"] == keys


def hit(raw: Any, limit: Limit, hits: int) -> None:
    """Hit a window at that many different moments, as separate checks do."""
    keys = Keys("headgate:")
    request = ApplyRequest(keys, Verb.CHECK, [Ask("", "a", limit, 1)], 200, None, "")
    raw.script_load(SOURCE)
    with raw.pipeline(transaction=False) as pipe:
        for first in range(0, hits, 5000):
            for _ in range(min(hits - first, 5000)):
                pipe.execute_command(*command(("EVALSHA", DIGEST), [request], [b"", b"0"]))
            assert all([row[2] == 1 for row in pipe.execute()])


@pytest.mark.long
def test_a_window_takes_at_most_32_bytes_a_hit(raw: Any) -> None:
    hits, window, hour = 50_000, 15, 3600  # in an hour no hit leaves during the test
    hit(raw, SlidingWindow(hits, hour), hits)
    (key,) = keys_of(raw)
    assert raw.llen(key) > hits, "the hits were made at different moments"
    size = raw.memory_usage(key, samples=0)
    assert 8 * hits < size <= 32 * hits
    assert raw.pttl(key) <= hour * 1000 + 2
    raw.flushall()
    hit(raw, SlidingWindow(hits, window), hits)
    wait_for(lambda: raw.dbsize() == 0, "the window to expire", window + PATIENCE)


def test_only_names_of_functions_stand_for_them_in_the_script() -> None:
    assert with_functions("-- as in x_lua\ncall = my_lean_lua or lean_lua_too") == (
        "-- as in x_lua\ncall = my_lean_lua or lean_lua_too"
    )
    assert with_functions("made = lean_lua").startswith("made = (function(...)\n")
