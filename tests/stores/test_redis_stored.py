"""What is stored in a real server: pinned to the byte, never without an end, never anybody else's, and exact."""

import asyncio
import hashlib
import logging
import random
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import count
from typing import Any

import pytest
from servers import Server, wait_for

from headgate import (
    AllOf,
    Decision,
    InvalidInput,
    Limit,
    Limiter,
    ManualClock,
    MemoryStore,
    SlidingWindow,
    TokenBucket,
    parse,
    per_day,
    per_hour,
    per_minute,
    per_second,
)
from headgate.inputs import LARGEST
from headgate.stores import Ask, Offence, Verb
from headgate.stores.redis import RedisStore
from headgate.stores.redis.requests import Apply, Keys, command
from headgate.stores.redis.script import DIGEST, SOURCE
from headgate.violations import Backoff
from headgate.windows import Log

PATIENT = 10.0  # the store's timeout where the machine's slowness isn't the question
_prefixes = (f"test{number}:" for number in count())


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def raw(running: Server) -> Iterator[Any]:
    """A plain client of the empty server."""
    with running.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def server(running: Server, raw: Any) -> Server:
    return running


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1000)


@pytest.fixture
def still(server: Server, clock: ManualClock) -> Iterator[RedisStore]:
    """A store on a clock that stands still at 1,000 s."""
    with RedisStore(server.url, timeout=PATIENT, clock=clock) as store:
        yield store


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    """A store on the server's clock."""
    with RedisStore(server.url, timeout=PATIENT) as store:
        yield store


def doubles(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def time_of(raw: Any) -> int:
    """The server's time in microseconds."""
    seconds, rest = raw.time()
    return int(seconds) * 1_000_000 + int(rest)


def keys_of(raw: Any) -> list[bytes]:
    return sorted(raw.scan_iter(count=1000))


def both(still: RedisStore, limit: Limit) -> list[Limiter]:
    """A limiter in the server, and one in memory on the same clock."""
    return [Limiter(limit, store=store) for store in (still, MemoryStore(clock=still.clock))]


# The format -----------------------------------------------------------------------------------------------------------


def test_a_bucket_as_it_is_stored(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    """Level in units and stamp in microseconds, as little-endian doubles; a full bucket is not stored."""
    limiter = Limiter(per_minute(60), store=still, name="name")
    limiter.check("agent-7")
    assert keys_of(raw) == [b"headgate:{agent-7}b1:60/minute:name"]
    assert raw.get("headgate:{agent-7}b1:60/minute:name") == doubles(59_000_000, 1_000_000_000)
    assert raw.get("headgate:{agent-7}b1:60/minute:name").hex() == "0000000026228c41" + "0000000065cdcd41"
    clock.advance(Fraction(1, 4))
    limiter.charge("agent-7", 100)
    assert raw.get("headgate:{agent-7}b1:60/minute:name") == doubles(-40_750_000, 1_000_250_000)
    limiter.refund("agent-7", 200)
    assert keys_of(raw) == []


def test_a_bucket_whose_ticks_are_coarse_as_it_is_stored(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    """The stamp stays at whole ticks."""
    limit = TokenBucket(10**9, 1, 9_000_000)
    assert limit.counted() == (10**9, 9_000_000, 1, 1_000_000, 9 * 10**15)
    limiter = Limiter(limit, store=still)
    limiter.check("a", 5)
    clock.advance(Fraction("2.5"))
    limiter.check("a")
    (key,) = keys_of(raw)
    assert key == b"headgate:{a}b1:1 per 2500 hours burst 1000000000:"
    assert raw.get(key) == doubles(9 * 10**15 - 6 * 9_000_000 + 2, 1_002_000_000)


def test_a_window_as_it_is_stored(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    """The window, the sum of what has left it, and for each moment its time and the sum of all costs up to it."""
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


def test_several_limits_as_they_are_stored(still: RedisStore, raw: Any) -> None:
    Limiter("5/second; 100/minute sliding", store=still, name="name").check("agent-7", 2)
    assert keys_of(raw) == [
        b"headgate:{agent-7}b1:5/second; 100/minute sliding#1:name",
        b"headgate:{agent-7}w1:5/second; 100/minute sliding#2:name",
    ]
    assert raw.get(keys_of(raw)[0]) == doubles(3 * 200_000, 1_000_000_000)
    assert raw.lrange(keys_of(raw)[1], 0, -1) == [b"60000000", b"0", b"1000000000", b"2"]


def test_a_request_id_as_it_is_stored(still: RedisStore, raw: Any) -> None:
    """What was asked, and as doubles when that was, and what the script said: the status, and of each limit."""
    limiter = Limiter(per_minute(60), store=still, name="name")
    first = limiter.check("agent-7", request_id="req-1")
    key = "headgate:{agent-7}i1:check:60/minute:4:name:req-1"
    assert keys_of(raw) == [b"headgate:{agent-7}b1:60/minute:name", key.encode()]
    asked = b"b" + doubles(60, 1_000_000, 1, 1, 60_000_000) + b"i" + doubles(60_000_000)
    assert raw.get(key) == b"c" + asked + doubles(1_000_000_000) + doubles(1, 59_000_000, 1_000_000_000)
    assert limiter.check("agent-7", request_id="req-1") == first
    assert limiter.peek("agent-7").remaining == 59
    limiter.charge("agent-7", 2, request_id="req-1")
    said = b"g" + asked + doubles(1_000_000_000) + doubles(1, 57_000_000, 1_000_000_000)
    assert raw.get("headgate:{agent-7}i1:charge:60/minute:4:name:req-1") == said
    Limiter(SlidingWindow(5, 60), store=still, name="window").check("agent-7", request_id="req-1")
    asked = b"cw" + doubles(5, 60_000_000, 0) + b"i" + doubles(60_000_000)
    said = asked + doubles(1_000_000_000) + doubles(1, 1, 0, 1_000_000_000)
    assert raw.get("headgate:{agent-7}i1:check:5/minute sliding:6:window:req-1") == said


def test_violations_as_they_are_stored(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    """How many in a row, when an alert was raised (0: never), and the newest, oldest first."""
    offence = Offence("agents", "agent-7", Backoff(alert_after=2))
    key = "headgate:{agent-7}v1:agents"
    still.offend(offence)
    assert keys_of(raw) == [key.encode()]
    assert raw.get(key) == doubles(1, 0, 1_000_000_000)
    clock.advance(1)
    asks = [Ask("", "agent-7", per_minute(1), 2)]
    assert not still.apply(Verb.CHECK, asks, 200, offence)
    assert raw.get(key) == doubles(2, 1_001_000_000, 1_000_000_000, 1_001_000_000)
    clock.advance(1)
    still.offend(offence)
    assert raw.get(key) == doubles(3, 1_001_000_000, 1_001_000_000, 1_002_000_000), "no more than an alert needs"
    assert keys_of(raw) == [key.encode()]


@pytest.mark.parametrize(
    ("key", "name"),
    [("", b"%"), ("%", b"%25"), ("}", b"%7D"), ("{x}", b"{{x%7D"[1:]), ("a}b%", b"a%7Db%25"), ("ä", b"\xc3\xa4")],
)
def test_odd_keys_as_they_are_stored(still: RedisStore, raw: Any, key: str, name: bytes) -> None:
    Limiter(per_minute(60), store=still).check(key)
    assert keys_of(raw) == [b"headgate:{" + name + b"}b1:60/minute:"]


def test_very_long_keys_are_stored_under_a_short_name(still: RedisStore, raw: Any) -> None:
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


def test_lone_surrogates_are_keys_like_others(still: RedisStore, raw: Any) -> None:
    keys = ["\ud800", "\udfff", "a\ud800", "\ud83d\ude00", "\U0001f600", "\udc80" * 1000]
    limiter = Limiter(per_minute(60), store=still, name="\ud800")
    offences = [Offence("\udc00", key, Backoff()) for key in keys]
    assert [limiter.check(key, request_id="\udcff").remaining for key in keys] == [59] * 6
    assert [still.offend(offence).count for offence in offences] == [1] * 6
    assert [limiter.check(key, request_id="\udcff").remaining for key in keys] == [59] * 6
    assert [limiter.peek(key).remaining for key in keys] == [59] * 6
    assert len(keys_of(raw)) == 18
    assert b"headgate:{\xed\xa0\x80}b1:60/minute:\xed\xa0\x80" in keys_of(raw)
    assert all(map(limiter.reset, keys))


# As an older node left it ---------------------------------------------------------------------------------------------


def test_a_planted_bucket_is_read_right(still: RedisStore, raw: Any) -> None:
    raw.set("headgate:{a}b1:60/minute:name", doubles(2_500_000, 998_000_000), px=60_000)
    limiter = Limiter(per_minute(60), store=still, name="name")
    decision = limiter.peek("a", 5)
    assert (decision.remaining, decision.retry_after, decision.reset_after) == (4, 0.5, 55.5)
    raw.set("headgate:{b}b1:60/minute:name", doubles(-2_500_000, 998_000_000), px=60_000)
    assert limiter.check("b").retry_after == 1.5
    assert limiter.check("a", 4)
    assert raw.get("headgate:{a}b1:60/minute:name") == doubles(500_000, 1_000_000_000)


def test_a_planted_window_is_read_right(still: RedisStore, raw: Any) -> None:
    """7 had left it; 2 are leaving now, 3 leave in a second and 1 in five."""
    key = "headgate:{a}w1:6 per 10 seconds sliding:name"
    raw.rpush(key, 10_000_000, 7, 990_000_000, 9, 991_000_000, 12, 995_000_000, 13)
    raw.pexpire(key, 60_000)
    limiter = Limiter(SlidingWindow(6, 10), store=still, name="name")
    assert limiter.peek("a").remaining == 2
    assert limiter.peek("a", 3).retry_after == 1.0
    assert limiter.peek("a", 6).retry_after == 5.0
    assert limiter.check("a", 2).reset_after == 10.0
    assert raw.lrange(key, 0, -1) == [b"10000000", b"9", b"991000000", b"12", b"995000000", b"13", b"1000000000", b"15"]


def test_planted_violations_are_read_right(still: RedisStore, raw: Any) -> None:
    raw.set("headgate:{a}v1:agents", doubles(4, 0, 970_000_000, 980_000_000), px=60_000)
    offence = Offence("agents", "a", Backoff(alert_after=3))
    standing = still.standing(offence)
    assert (standing.violations, standing.wait_left, standing.quiet_left) == (4, 0.0, 40.0)
    violation = still.offend(offence)
    assert (violation.count, violation.advised, violation.alert) == (5, 30.0, True)
    raw.set("headgate:{b}v1:agents", doubles(4, 0, 940_000_000), px=60_000)
    assert not still.standing(offence._replace(key="b"))


def test_a_planted_request_id_is_read_right(still: RedisStore, raw: Any) -> None:
    asked = b"cb" + doubles(60, 1_000_000, 1, 1, 60_000_000) + b"i" + doubles(60_000_000)
    said = asked + doubles(990_000_000) + doubles(1, 42_000_000, 990_000_000)
    raw.set("headgate:{a}i1:check:60/minute:4:name:req-1", said, px=60_000)
    limiter = Limiter(per_minute(60), store=still, name="name")
    assert limiter.check("a", request_id="req-1").remaining == 42
    assert limiter.peek("a").remaining == 60


# Request ids ----------------------------------------------------------------------------------------------------------


def same_id(store: RedisStore | MemoryStore, limits: list[Limit]) -> list[tuple[bool, bool]]:
    """One request is checked under several limits that have the same name."""
    decisions = [Limiter(limit, store=store).check("a", request_id="req-1") for limit in limits]
    return [(bool(decision), decision.degraded) for decision in decisions]


@pytest.mark.parametrize(
    "limits",
    [
        [per_minute(60), SlidingWindow(60, 60)],
        [SlidingWindow(60, 60), per_minute(60)],
        [per_minute(60), parse("5/second; 60/minute")],
        [parse("5/second; 60/minute"), per_minute(60)],
    ],
    ids=str,
)
def test_one_request_id_under_limits_of_different_kinds(store: RedisStore, limits: list[Limit]) -> None:
    """As where a limit was changed between a request and its retry: what was said then may not fit what is asked."""
    assert same_id(store, limits) == same_id(MemoryStore(), limits) == [(True, False)] * 2


def test_a_request_id_under_another_limit_harms_nobody_in_the_same_call(server: Server) -> None:
    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENT) as store:
            bucket, window = Limiter(per_day(60), store=store), Limiter(SlidingWindow(60, 60), store=store)
            await bucket.acheck("a", request_id="req-1")
            checks = [window.acheck("a", request_id="req-1"), *[bucket.acheck(key) for key in "bcd"]]
            answers: list[Any] = await asyncio.gather(*checks, return_exceptions=True)
            assert [type(answer) for answer in answers] == [Decision] * 4
            assert [(answer.remaining, answer.degraded) for answer in answers[1:]] == [(59, False)] * 3

    asyncio.run(work())


def test_request_ids_of_different_names_are_apart(store: RedisStore) -> None:
    """Whatever the names and ids are made of."""
    for name, request_id in (("a", "b:c"), ("a:b", "c"), ("", "a:b:c"), ("a:b:c", "a")):
        limiter = Limiter(per_day(60), store=store, name=name)
        limiter.check("key", request_id=request_id)
        assert limiter.peek("key").remaining == 59, name


def test_an_answer_that_is_said_again_makes_sense_later(store: RedisStore, raw: Any) -> None:
    """Its window has passed, and there is nothing left to come back."""
    limiter = Limiter(SlidingWindow(5, 0.1), store=store)
    first = limiter.check("a", request_id="req-1")
    wait_for(lambda: raw.dbsize() == 1, "the window's key goes away")
    again = limiter.check("a", request_id="req-1")
    assert (bool(again), again.remaining) == (True, first.remaining)
    assert again.reset_after >= 0


def test_a_request_id_is_forgotten_after_a_minute_on_a_clock_for_tests_too(
    still: RedisStore, clock: ManualClock
) -> None:
    limiters = both(still, per_day(5))
    assert [limiter.check("a", request_id="req-1").remaining for limiter in limiters] == [4, 4]
    clock.advance(61)
    assert [limiter.check("a", request_id="req-1").remaining for limiter in limiters] == [3, 3]


# What isn't ours ------------------------------------------------------------------------------------------------------


def plant_text(text: bytes) -> Callable[[Any, str], None]:
    def plant(raw: Any, key: str) -> None:
        raw.set(key, text, px=600_000)

    return plant


def plant_list(*words: object) -> Callable[[Any, str], None]:
    def plant(raw: Any, key: str) -> None:
        raw.rpush(key, *words)

    return plant


def plant_hash(raw: Any, key: str) -> None:
    raw.hset(key, "field", "value")


def plant_set(raw: Any, key: str) -> None:
    raw.sadd(key, "member")


def plant_stream(raw: Any, key: str) -> None:
    raw.xadd(key, {"field": "value"})


FOREIGN: dict[str, Callable[[Any, str], None]] = {
    "a hash": plant_hash,
    "a set": plant_set,
    "a stream": plant_stream,
    "no bytes": plant_text(b""),
    "a word": plant_text(b"somebody"),
    "16 bytes of text": plant_text(b"16 bytes of text"),
    "24 bytes of text": plant_text(b"twenty four bytes of txt"),
    "40 bytes of text": plant_text(b"forty bytes of text that somebody set.. "),
    "not whole": plant_text(doubles(1.5, 1e9, 1e9)),
    "not a number": plant_text(doubles(float("nan"), float("nan"), float("nan"))),
    "infinite": plant_text(doubles(float("inf"), float("-inf"), float("inf"))),
    "one word": plant_list("word"),
    "a list of words": plant_list("a", "list", "of", "words"),
    "an odd list": plant_list(60_000_000, 0, 1_000_000_000),
    "too long a list of words": plant_list(*["word"] * 1001),
}
ONLY_FOR_BUCKETS: dict[str, Callable[[Any, str], None]] = {
    "more than full": plant_text(doubles(60_000_001, 1e9)),
    "before time": plant_text(doubles(0, -1)),
    "beyond 2^53": plant_text(doubles(-(2.0**53), 1e9)),
    "17 bytes": plant_text(doubles(0, 1e9) + b"+"),
    "a later format": plant_text(doubles(0, 1e9, 1)),
    "a log": plant_list(60_000_000, 0, 1_000_000_000, 1),
}
ONLY_FOR_WINDOWS: dict[str, Callable[[Any, str], None]] = {
    "a bucket": plant_text(doubles(0, 1e9)),
    "falling sums": plant_list(60_000_000, 5, 1_000_000_000, 5),
    "falling times": plant_list(60_000_000, 0, 1_000_000_001, 1, 1_000_000_000, 2),
    "fractions": plant_list(60_000_000, 0, "999000000.5", 1),
}
CASES = [
    *[(per_minute(60), "b1:60/minute:", what) for what in [*FOREIGN, *ONLY_FOR_BUCKETS]],
    *[(SlidingWindow(60, 60), "w1:60/minute sliding:", what) for what in [*FOREIGN, *ONLY_FOR_WINDOWS]],
]
ALL_FOREIGN = {**FOREIGN, **ONLY_FOR_BUCKETS, **ONLY_FOR_WINDOWS}


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize(("limit", "ending", "what"), CASES, ids=[f"{case[1][0]}-{case[2]}" for case in CASES])
def test_what_isnt_ours_under_a_key_is_left_alone(
    server: Server, raw: Any, clock: ManualClock, limit: Limit, ending: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure policy decides, an error says which key it is, and others in the same call don't notice."""
    key = f"headgate:{{a}}{ending}"
    ALL_FOREIGN[what](raw, key)
    before = raw.dump(key)

    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENT, on_failure="closed", clock=clock) as store:
            limiter = Limiter(limit, store=store)
            await limiter.apeek("warm")
            verbs = [limiter.acheck("a"), limiter.apeek("a"), limiter.acharge("a", 1), limiter.arefund("a", 60)]
            decisions = await asyncio.gather(limiter.acheck("b"), *verbs, limiter.acheck("c"))
            told = [(bool(decision), decision.degraded) for decision in decisions]
            assert told == [(True, False), *[(False, True)] * 4, (True, False)]
            assert not store.degraded, "the server isn't away"

    asyncio.run(work())
    assert raw.dump(key) == before
    assert errors(caplog) == [f"there is something under {key} that this headgate didn't write"]


def test_a_log_that_was_meddled_with_harms_nobody_else(server: Server, raw: Any, clock: ManualClock) -> None:
    """Only its ends are looked at before it is used: what is wrong inside is found in the middle of a call."""
    raw.rpush("headgate:{a}w1:60/minute sliding:", 60_000_000, 0, 999_000_000, 20, 999_500_000, "x", 1_000_000_000, 60)

    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENT, on_failure="closed", clock=clock) as store:
            limiter = Limiter(SlidingWindow(60, 60), store=store)
            await limiter.apeek("warm")
            decisions = await asyncio.gather(limiter.acheck("b"), limiter.acheck("a", 30), limiter.acheck("c"))
            assert [(bool(one), one.degraded) for one in decisions] == [(True, False), (False, True), (True, False)]
            assert not store.degraded, "the server isn't away"

    asyncio.run(work())


@pytest.mark.parametrize(("on_failure", "passes"), [("open", 70), ("closed", 0), ("local", 60)])
def test_what_isnt_ours_is_decided_by_the_failure_policy(
    server: Server, raw: Any, on_failure: str, passes: int
) -> None:
    raw.set("headgate:{a}b1:60/day:", "not ours")
    with RedisStore(server.url, timeout=PATIENT, on_failure=on_failure) as store:
        decisions = [Limiter(per_day(60), store=store).check("a") for _ in range(70)]
    assert sum(map(bool, decisions)) == passes
    assert all([decision.degraded for decision in decisions])


@pytest.mark.parametrize(
    "what", ["a hash", "no bytes", "a word", "24 bytes of text", "not whole", "not a number", "a list of words"]
)
def test_violations_that_arent_ours_are_left_alone(
    still: RedisStore, raw: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    key, offence = "headgate:{a}v1:agents", Offence("agents", "a", Backoff())
    ALL_FOREIGN[what](raw, key)
    before = raw.dump(key)
    assert still.standing(offence).violations == 0
    assert errors(caplog) == [f"there is something under {key} that this headgate didn't write"]
    assert [still.offend(offence).count for _ in range(2)] == [1, 2], "memory counts them"
    assert still.standing(offence).violations == 2
    decision = still.apply(Verb.CHECK, [Ask("", "a", per_minute(60), 1)], 200, offence)
    assert (bool(decision), decision.degraded) == (True, True)
    assert raw.dump(key) == before
    assert keys_of(raw) == [key.encode()], "nothing was done to the bucket either"
    assert errors(caplog), "it is said in the log"


@pytest.mark.parametrize("what", ["a hash", "no bytes", "a word", "a list of words", "16 bytes of text", "not whole"])
def test_a_request_id_that_isnt_ours_is_left_alone(
    server: Server, raw: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = "headgate:{a}i1:check:60/day:0::req-1"
    ALL_FOREIGN[what](raw, key)
    before = raw.dump(key)

    async def work() -> None:
        async with RedisStore(server.url, timeout=PATIENT, on_failure="closed") as store:
            limiter = Limiter(per_day(60), store=store)
            await limiter.apeek("warm")
            checks = [limiter.acheck("b"), limiter.acheck("a", request_id="req-1"), limiter.acheck("c")]
            answers: list[Any] = await asyncio.gather(*checks, return_exceptions=True)
            assert [type(answer) for answer in answers] == [Decision] * 3
            assert [(bool(answer), answer.degraded) for answer in answers] == [
                (True, False),
                (False, True),
                (True, False),
            ]

    asyncio.run(work())
    assert raw.dump(key) == before
    assert len(errors(caplog)) == 1


def test_what_isnt_ours_can_be_forgotten_by_nobody(still: RedisStore, raw: Any) -> None:
    """A reset doesn't delete somebody else's data."""
    raw.set("headgate:{a}b1:60/minute:", "not ours")
    with pytest.raises(Exception, match=r"^there is something under headgate:\{a\}b1:60/minute: that this headgate"):
        Limiter(per_minute(60), store=still).reset("a")
    assert raw.get("headgate:{a}b1:60/minute:") == b"not ours"


# Everything ends ------------------------------------------------------------------------------------------------------

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
    """Do everything that can be done, with every kind of limit."""
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
        store.offend(offence)
        store.standing(offence)


def test_c5_every_key_has_an_expiry(store: RedisStore, raw: Any) -> None:
    use(store)
    keys = keys_of(raw)
    assert len(keys) > 40
    assert {key.split(b"}")[1][:1] for key in keys} == {b"b", b"w", b"i", b"v"}
    assert [key for key in keys if raw.pttl(key) == -1] == []


def test_c5_every_key_has_an_expiry_on_a_clock_for_tests_too(still: RedisStore, raw: Any) -> None:
    use(still)
    assert [key for key in keys_of(raw) if raw.pttl(key) == -1] == []


def test_c5_a_key_lives_until_it_is_full_and_not_much_longer(store: RedisStore, raw: Any) -> None:
    """Before that it would give something away."""
    chance = random.Random(3)
    for number in range(300):
        limit = chance.choice(ALL_KINDS[:6])
        limiter, cost = Limiter(limit, store=store), chance.randint(1, 3)
        key = f"key-{number}"
        before = time_of(raw)
        decision = limiter.charge(key, cost) if chance.random() < 0.5 else limiter.check(key, min(cost, limit.capacity))
        after = time_of(raw)
        found = list(raw.scan_iter(match=f"*{{{key}}}*", count=100_000))
        if found:
            expires = raw.pexpiretime(found[0]) * 1000
            assert expires >= before + decision.reset_after * 1_000_000, limit
            assert expires <= after + decision.reset_after * 1_000_001 + 4000, limit
        else:
            assert time_of(raw) >= before + decision.reset_after * 1_000_000, limit


def test_c5_an_expired_bucket_is_full(store: RedisStore, raw: Any) -> None:
    """What the server drops by itself changes no decision."""
    limiter = Limiter(per_second(20), store=store)
    decision = limiter.check("a", 5)
    begin = time_of(raw)
    assert decision.reset_after == 0.25
    wait_for(lambda: raw.dbsize() == 0, "the bucket is gone")
    assert time_of(raw) >= begin + 240_000
    assert limiter.peek("a").remaining == 20


async def use_once(store: RedisStore, keys: int) -> None:
    limiters = [Limiter(limit, store=store) for limit in (per_second(10, burst=2), SlidingWindow(5, 0.5))]
    for first in range(0, keys, 2000):
        numbers = range(first, min(first + 2000, keys))
        decisions = await asyncio.gather(*[limiters[number % 2].acheck(f"agent-{number}") for number in numbers])
        assert all(decisions)
        assert not any([decision.degraded for decision in decisions])


@pytest.mark.parametrize("keys", [4000, pytest.param(100_000, marks=pytest.mark.long)])
def test_c5_one_shot_keys_leave_nothing_behind(server: Server, raw: Any, keys: int) -> None:
    most = 0

    async def work() -> None:
        nonlocal most
        async with RedisStore(server.url, timeout=PATIENT) as store:
            await Limiter(per_day(1), store=store).apeek("warm")
            await use_once(store, keys)
            most = raw.dbsize()

    asyncio.run(work())
    assert most > 0
    wait_for(lambda: raw.dbsize() == 0, "nothing is left", 60)


def hit(raw: Any, limit: Limit, hits: int) -> None:
    """Hit a window at so many different moments, as that many separate checks do."""
    keys = Keys("headgate:")
    request = Apply(keys, Verb.CHECK, [Ask("", "a", limit, 1)], 200, None, "")
    raw.script_load(SOURCE)
    with raw.pipeline(transaction=False) as pipe:
        for first in range(0, hits, 5000):
            for _ in range(min(hits - first, 5000)):
                pipe.execute_command(*command(("EVALSHA", DIGEST), [request], [b"", b"0"]))
            assert all([row[2] == 1 for row in pipe.execute()])


@pytest.mark.parametrize(("hits", "window"), [(5000, 2), pytest.param(50_000, 15, marks=pytest.mark.long)])
def test_a_window_takes_at_most_32_bytes_a_hit(raw: Any, hits: int, window: int) -> None:
    limit = SlidingWindow(hits, window)
    hit(raw, limit, hits)
    (key,) = keys_of(raw)
    assert raw.llen(key) > hits, "they were made at different moments"
    size = raw.memory_usage(key, samples=0)
    assert 8 * hits < size <= 32 * hits
    assert raw.pttl(key) <= window * 1000 + 2
    wait_for(lambda: raw.dbsize() == 0, "the window is gone", window + 5)


# Exact up to 2^53 -----------------------------------------------------------------------------------------------------


def extreme_limits() -> list[Limit]:
    """Whatever of these can be counted."""
    limits: list[Limit] = []
    for capacity in (1, 2, 3, 60, 10**6 + 1, 10**9, 2**31, 2**52, 2**52 + 1, 2**53 - 2, 2**53 - 1):
        for refill in (1, 3, 10**6, 2**53 - 1, Fraction(1, 3), Fraction(10**6, 7)):
            for per in (1, Fraction(1, 10**6), 86_400, 9_000_000, 9_000_001, 9_007_199_254):
                try:
                    limits.append(TokenBucket(capacity, refill, per))
                except InvalidInput:
                    continue
    spans = [Fraction(span, 1_000_000) for span in (1, 1_000_000, 60_000_000, 2**51)]
    return [*limits, *[SlidingWindow(most, span) for most in (1, 7, 1_000_000) for span in spans]]


def extreme_steps(chance: random.Random, limit: Limit, length: int) -> Iterator[tuple[Verb, int, int]]:
    """(verb, microseconds to go on before it, cost); the clock steps back only right after something was counted."""
    verbs = (Verb.CHECK, Verb.CHECK, Verb.PEEK, Verb.CHARGE, Verb.CHARGE, Verb.REFUND)
    top = limit.capacity
    costs = [1, 2, 3, top - 1, top, top + 1, 2 * top - 1, top // 2, 2**52, 2**53 - 2, 2**53 - 1, 2**53]
    spans = [0, 0, 1, 999, 10**6, 10**6 + 1, 10**9, 86_400 * 10**6, 2**45, 2**49, -1, -500_000, -(10**9)]
    while length > 0:
        span = chance.choice(spans)
        if span < 0:
            yield Verb.CHARGE, 0, 1
        cost = chance.choice(costs) if chance.random() < 0.8 else chance.randint(1, 2 ** chance.randint(1, 53))
        yield chance.choice(verbs), span, min(max(cost, 1), 2**53)
        length -= 1


def countable(memory: MemoryStore, limit: Limit, cost: int) -> bool:
    """Whether a window still counts a charge in whole. (A bucket's debt has an end that both know.)"""
    state = memory.buckets("", limit).find("a")
    used = state.used() if isinstance(state, Log) else 0
    return not isinstance(limit, SlidingWindow) or used + cost <= LARGEST


def walk(url: str, chance: random.Random, limit: Limit, length: int) -> None:
    """Go the same way with both stores."""
    clock = ManualClock(start=100_000)
    memory, begin = MemoryStore(clock=clock), clock.now()
    end = LARGEST - (limit.counted()[1] if isinstance(limit, SlidingWindow) else 0)
    story = [f"{limit!r}"]
    with RedisStore(url, timeout=PATIENT, prefix=next(_prefixes), clock=clock) as store:
        for wanted, span, cost in extreme_steps(chance, limit, length):
            if not begin <= clock.now() + span <= end:
                continue
            if span >= 0:
                clock.advance(Fraction(span, 1_000_000))
            else:
                clock.step_back(Fraction(-span, 1_000_000))
            verb = wanted if wanted is not Verb.CHARGE or countable(memory, limit, cost) else Verb.PEEK
            asks = [Ask("", "a", limit, cost)]
            story.append(f"{span:+} {verb.value} {cost}")
            got, expected = store.apply(verb, asks, 200), memory.apply(verb, asks, 200)
            assert got == expected, "\n".join(story)


def test_a6_a_charge_far_above_the_capacity_is_exact(still: RedisStore) -> None:
    """Also where units of what is spent pass 2^53, and those of what is left don't."""
    for limit in extreme_limits():
        cost = min(2 * limit.capacity - 1, 2**53 - 1)
        decisions = [
            [limiter.charge("a", cost), limiter.refund("a", max(limit.capacity - 1, 1)), limiter.refund("a", 1)]
            for limiter in both(still, limit)
        ]
        assert decisions[0] == decisions[1], limit


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a6_huge_numbers_are_counted_as_exactly_as_in_memory(server: Server, raw: Any, rounds: int) -> None:
    chance = random.Random(53)
    for _ in range(rounds):
        for limit in extreme_limits():
            walk(server.url, chance, limit, 60 if isinstance(limit, SlidingWindow) else 20)
        raw.flushall()


def test_a6_the_sums_of_a_window_begin_again_before_they_are_too_large(
    still: RedisStore, raw: Any, clock: ManualClock
) -> None:
    """What has left is taken off, so that what is counted stays exact."""
    limiters = both(still, SlidingWindow(1_000_000, 10))
    key = "headgate:{a}w1:1000000 per 10 seconds sliding:"
    for number in range(8):
        charged = [limiter.charge("a", 2**51 + number) for limiter in limiters]
        assert charged[0] == charged[1]
        clock.advance(4)
        refunded = [limiter.refund("a", 2**50 + 1) for limiter in limiters]
        assert refunded[0] == refunded[1]
        numbers = [int(word) for word in raw.lrange(key, 0, -1)]
        assert max(numbers[1::2]) <= LARGEST
        assert numbers[3::2] == sorted(numbers[3::2])
    clock.advance(10)
    assert [limiter.check("a", 3).remaining for limiter in limiters] == [999_997] * 2


def test_a6_the_first_charge_of_a_window_that_cant_be_counted_is_the_most_that_can(still: RedisStore) -> None:
    limiters = both(still, SlidingWindow(5, 60))
    for limiter in limiters:
        limiter.charge("a", 2**53)
    assert [limiter.refund("a", LARGEST - 3).remaining for limiter in limiters] == [2, 2]


def test_a6_a_charge_that_no_longer_fits_into_a_window_leaves_nothing(still: RedisStore, clock: ManualClock) -> None:
    """When all that could be counted has left, nothing is left to wait for."""
    limiters = both(still, SlidingWindow(5, 1))
    for limiter in limiters:
        limiter.charge("a", LARGEST)
    clock.advance(0.5)
    for limiter in limiters:
        limiter.charge("a", 1)
    clock.advance(0.5)
    assert [(peek.remaining, peek.reset_after) for peek in [one.peek("a") for one in limiters]] == [(5, 0.0)] * 2


def test_a6_the_wait_of_a_window_in_deep_debt_is_exact(still: RedisStore, clock: ManualClock) -> None:
    """All has to leave before the whole limit passes: the one that was spent last, too."""
    limiters = both(still, SlidingWindow(7, 60))
    for limiter in limiters:
        limiter.charge("a", LARGEST - 6)
    clock.advance(1)
    for limiter in limiters:
        limiter.charge("a", 1)
    assert [limiter.peek("a", 7).retry_after for limiter in limiters] == [60.0] * 2


@pytest.mark.parametrize("capacity", [10, 18])
def test_a6_a_debt_that_is_paid_off_after_2_to_the_53_units_is_exact(
    still: RedisStore, clock: ManualClock, capacity: int
) -> None:
    """Around the moments at which sums and differences of the units are odd numbers beyond 2^53."""
    limiters = both(still, TokenBucket(capacity, 3_000_000, 1))  # three units in a microsecond, one for a token
    for limiter in limiters:
        limiter.charge("a", 2**53)
        limiter.charge("b", 2**53)
    clock.advance(Fraction(2**53 // 3 - 3, 1_000_000))
    for _ in range(12):
        clock.advance(Fraction(1, 1_000_000))
        peeks = [limiter.peek("a", 2) for limiter in limiters]
        assert (peeks[0].remaining, peeks[0].retry_us) == (peeks[1].remaining, peeks[1].retry_us)
        checks = [limiter.check("b", 2) for limiter in limiters]
        assert (checks[0].remaining, checks[0].retry_us) == (checks[1].remaining, checks[1].retry_us)


def test_a6_a_window_that_ends_after_2_to_the_53_is_exact_too(still: RedisStore) -> None:
    limiters = both(still, SlidingWindow(1, Fraction(LARGEST, 1_000_000)))
    assert all([limiter.check("a") for limiter in limiters])
    assert [limiter.check("a").retry_us for limiter in limiters] == [LARGEST] * 2


@pytest.mark.parametrize(
    "limit", [TokenBucket(10**9, 1, 9_000_000), TokenBucket(2**53 - 1, 1, 1), per_hour(1), per_day(1)], ids=str
)
def test_a_debt_as_deep_as_it_can_be_is_stored(server: Server, raw: Any, limit: Limit) -> None:
    """However long it takes to pay off."""
    with RedisStore(server.url, timeout=PATIENT) as store:
        limiter = Limiter(limit, store=store)
        for _ in range(3):
            decision = limiter.charge("a", 2**53)
            assert (bool(decision), decision.degraded) == (False, False)
        (key,) = keys_of(raw)
        assert struct.unpack("<2d", raw.get(key))[0] == -LARGEST
        assert raw.pttl(key) > 10**12
