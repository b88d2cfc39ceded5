"""Foreign data under one of our keys in a real server is left alone and affects no other key."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headgate import (
    Decision,
    Limit,
    Limiter,
    ManualClock,
    SlidingWindow,
    per_day,
    per_minute,
)
from headgate.limits.violations import Backoff
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.redis import RedisStore
from tests.support.redis_store import keys_of, pack_doubles
from tests.support.valkey import PATIENCE, ValkeyServer


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
    "not whole": plant_text(pack_doubles(1.5, 1e9, 1e9)),
    "not a number": plant_text(pack_doubles(float("nan"), float("nan"), float("nan"))),
    "infinite": plant_text(pack_doubles(float("inf"), float("-inf"), float("inf"))),
    "one word": plant_list("word"),
    "a list of words": plant_list("a", "list", "of", "words"),
    "an odd list": plant_list(60_000_000, 0, 1_000_000_000),
    "too long a list of words": plant_list(*["word"] * 1001),
}
ONLY_FOR_BUCKETS: dict[str, Callable[[Any, str], None]] = {
    "more than full": plant_text(pack_doubles(60_000_001, 1e9)),
    "before time": plant_text(pack_doubles(0, -1)),
    "beyond 2^53": plant_text(pack_doubles(-(2.0**53), 1e9)),
    "17 bytes": plant_text(pack_doubles(0, 1e9) + b"+"),
    "a later format": plant_text(pack_doubles(0, 1e9, 1)),
    "a log": plant_list(60_000_000, 0, 1_000_000_000, 1),
}
ONLY_FOR_WINDOWS: dict[str, Callable[[Any, str], None]] = {
    "a bucket": plant_text(pack_doubles(0, 1e9)),
    "falling sums": plant_list(60_000_000, 5, 1_000_000_000, 5),
    "falling times": plant_list(60_000_000, 0, 1_000_000_001, 1, 1_000_000_000, 2),
    "fractions": plant_list(60_000_000, 0, "999000000.5", 1),
}
CASES = [
    *[(per_minute(60), "b1:60/minute:", what) for what in [*FOREIGN, *ONLY_FOR_BUCKETS]],
    *[(SlidingWindow(60, 60), "w1:60/minute sliding:", what) for what in [*FOREIGN, *ONLY_FOR_WINDOWS]],
]
ALL_FOREIGN = {**FOREIGN, **ONLY_FOR_BUCKETS, **ONLY_FOR_WINDOWS}


def outcomes(decisions: Sequence[Decision]) -> list[tuple[bool, bool]]:
    """Of each, whether it passed and whether it is degraded."""
    return [(bool(decision), decision.degraded) for decision in decisions]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize(("limit", "ending", "what"), CASES, ids=[f"{case[1][0]}-{case[2]}" for case in CASES])
async def test_foreign_data_under_a_key_is_left_alone(
    server: ValkeyServer,
    raw: Any,
    clock: ManualClock,
    limit: Limit,
    ending: str,
    what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The failure policy decides, an error names the key, and other requests in the same call are unaffected."""
    key = f"headgate:{{a}}{ending}"
    ALL_FOREIGN[what](raw, key)
    before = raw.dump(key)
    async with RedisStore(server.url, timeout=PATIENCE, on_failure="closed", clock=clock) as store:
        limiter = Limiter(limit, store=store)
        await limiter.apeek("warm")
        verbs = [limiter.acheck("a"), limiter.apeek("a"), limiter.acharge("a", 1), limiter.arefund("a", 60)]
        decisions = await asyncio.gather(limiter.acheck("b"), *verbs, limiter.acheck("c"))
        assert outcomes(decisions) == [(True, False), *[(False, True)] * 4, (True, False)]
        assert not store.degraded, "the server isn't away"
    assert raw.dump(key) == before
    assert errors(caplog) == [f"there is something under {key} that this headgate didn't write"]


async def test_a_corrupted_log_affects_no_other_key(server: ValkeyServer, raw: Any, clock: ManualClock) -> None:
    """Only the ends of a log are validated at first, so that an error inside is met in the middle of a call."""
    raw.rpush("headgate:{a}w1:60/minute sliding:", 60_000_000, 0, 999_000_000, 20, 999_500_000, "x", 1_000_000_000, 60)
    async with RedisStore(server.url, timeout=PATIENCE, on_failure="closed", clock=clock) as store:
        limiter = Limiter(SlidingWindow(60, 60), store=store)
        await limiter.apeek("warm")
        decisions = await asyncio.gather(limiter.acheck("b"), limiter.acheck("a", 30), limiter.acheck("c"))
        assert outcomes(decisions) == [(True, False), (False, True), (True, False)]
        assert not store.degraded, "the server isn't away"


@pytest.mark.parametrize(("on_failure", "passes"), [("open", 70), ("closed", 0), ("local", 60)])
def test_the_failure_policy_decides_on_foreign_data(
    server: ValkeyServer, raw: Any, on_failure: str, passes: int
) -> None:
    raw.set("headgate:{a}b1:60/day:", "not ours")
    with RedisStore(server.url, timeout=PATIENCE, on_failure=on_failure) as store:
        decisions = [Limiter(per_day(60), store=store).check("a") for _ in range(70)]
    assert sum(map(bool, decisions)) == passes
    assert all([decision.degraded for decision in decisions])


@pytest.mark.parametrize(
    "what", ["a hash", "no bytes", "a word", "24 bytes of text", "not whole", "not a number", "a list of words"]
)
def test_foreign_violations_are_left_alone(
    still: RedisStore, raw: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    key, offence = "headgate:{a}v1:agents", Offence("agents", "a", Backoff())
    ALL_FOREIGN[what](raw, key)
    before = raw.dump(key)
    assert still.standing(offence).violations == 0
    assert errors(caplog) == [f"there is something under {key} that this headgate didn't write"]
    assert [still.record_violation(offence).count for _ in range(2)] == [1, 2], "memory counts them"
    assert still.standing(offence).violations == 2
    decision = still.apply(Verb.CHECK, [Ask("", "a", per_minute(60), 1)], 200, offence)
    assert (bool(decision), decision.degraded) == (True, True)
    assert raw.dump(key) == before
    assert keys_of(raw) == [key.encode()], "nothing was done to the bucket either"


@pytest.mark.parametrize("what", ["a hash", "no bytes", "a word", "a list of words", "16 bytes of text", "not whole"])
async def test_a_foreign_request_id_is_left_alone(
    server: ValkeyServer, raw: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = "headgate:{a}i1:check:60/day:0::req-1"
    ALL_FOREIGN[what](raw, key)
    before = raw.dump(key)
    async with RedisStore(server.url, timeout=PATIENCE, on_failure="closed") as store:
        limiter = Limiter(per_day(60), store=store)
        await limiter.apeek("warm")
        checks = [limiter.acheck("b"), limiter.acheck("a", request_id="req-1"), limiter.acheck("c")]
        assert outcomes(await asyncio.gather(*checks)) == [(True, False), (False, True), (True, False)]
    assert raw.dump(key) == before
    assert len(errors(caplog)) == 1


def test_a_reset_does_not_delete_foreign_data(still: RedisStore, raw: Any) -> None:
    raw.set("headgate:{a}b1:60/minute:", "not ours")
    with pytest.raises(Exception, match=r"^there is something under headgate:\{a\}b1:60/minute:, "):
        Limiter(per_minute(60), store=still).reset("a")
    assert raw.get("headgate:{a}b1:60/minute:") == b"not ours"
