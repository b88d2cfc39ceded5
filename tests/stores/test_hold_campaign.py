"""Many holders on a cluster, some of which are killed: what they were told is judged, and nothing is left of them.

`HOLD_KILLS` is how many holders are killed, 16 unless the environment says otherwise; 200 is the full form.
`HOLD_KEYS` is how many keys are used once, 100,000 unless it says otherwise; a million is the full form.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest

from headgate import Hold, Limiter, ManualClock
from headgate.stores.redis import RedisStore
from tests.support.cluster import steady_cluster
from tests.support.hold_campaign import (
    KEEP,
    KINDS,
    LEASE,
    SLOTS,
    Line,
    Record,
    declared_limits,
    read_record,
)
from tests.support.holder_processes import HOLDERS, KILLS, Holders, judge, starts_of_hours
from tests.support.redis_store import keys_of, server_time
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = [pytest.mark.long, pytest.mark.once]

KEYS = int(os.environ.get("HOLD_KEYS", "100000"))
WRITTEN = 20_000  # bytes: some hundred lines
LEASES = 100_000
SLOW = 5000  # microseconds
SECOND = 1_000_000
HOUR = 3600 * SECOND


def test_what_killed_holders_have_held_is_counted_once_and_comes_back(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = stack.enter_context(steady_cluster())
        raws = [stack.enter_context(node.client()) for node in nodes]
        limits = declared_limits(starts_of_hours(raws[0]))
        holders = stack.enter_context(Holders("tests.support.hold_campaign", nodes, tmp_path, WRITTEN))
        holders.kill_some(HOLDERS, KILLS)
        ended = server_time(raws[0])
        calls = holders.history()
        wait_for(lambda: server_time(raws[0]) > ended + (LEASE + 1) * SECOND, "the end of all leases")
        calls += expect_all_slots(holders.url, calls, tmp_path)
        judge(calls, limits, KINDS, tmp_path)
        expect_nothing_left(holders.url, calls, raws)


def expect_all_slots(url: str, calls: list[Line], folder: Path) -> list[Line]:
    """Take each slot that there is, and give it back. Returns these calls, and what is left of the other limits."""
    record, keys = Record(folder / "last.jsonl"), sorted({line["key"] for line in calls})
    with RedisStore(url, timeout=PATIENCE) as store:
        for kind in KINDS:
            for part, text in kind.parts.items():
                limiter = Limiter(text, store=store, name=kind.name)
                for key in [key for key in keys if key.startswith(kind.name)]:
                    begun = record.begin({"verb": "peek", "key": key, "limits": [part]})
                    record.end(begun, "passed", remaining=limiter.peek(key).remaining)
                    if text == f"{SLOTS} in flight":
                        held = [limiter.hold(key, lease=KEEP, keep=KEEP) for _ in range(SLOTS + 1)]
                        assert [bool(hold) for hold in held] == [True] * SLOTS + [False], (part, key)
                        for hold in held[:SLOTS]:
                            hold.settle()
    record.close()
    return read_record(folder / "last.jsonl")


def expect_nothing_left(url: str, calls: list[Line], raws: list[Any]) -> None:
    """Expect that the server forgets all but budgets, whose hours are not over, and that these can be reset."""

    def left() -> list[bytes]:
        return [key for raw in raws for key in keys_of(raw) if b"}c1:" not in key]

    try:
        wait_for(lambda: not left(), "an empty server")
    except TimeoutError as error:
        raise AssertionError(left()) from error
    assert max(raw.pttl(key) for raw in raws for key in keys_of(raw)) <= 26 * HOUR // 1000
    with RedisStore(url, timeout=PATIENCE) as store:
        budget = Limiter(KINDS[-1].limit, store=store, name=KINDS[-1].name)
        for key in {line["key"] for line in calls if line["key"].startswith(KINDS[-1].name)}:
            budget.reset(key)
    assert sum(raw.dbsize() for raw in raws) == 0


# Many at once ---------------------------------------------------------------------------------------------------------


async def hold_together(limiter: Limiter, keys: Sequence[str], **options: Any) -> None:
    """Hold all of these, a thousand at a time, and leave them alone."""
    for first in range(0, len(keys), 1000):
        held = await asyncio.gather(*[hold_one(limiter, key, **options) for key in keys[first : first + 1000]])
        assert all(held)


async def hold_one(limiter: Limiter, key: str, **options: Any) -> Hold:
    return await limiter.ahold(key, **options)


def stalled_microseconds(server: ValkeyServer) -> int:
    """Microseconds for which a server was ready to run, while the machine ran something else."""
    return int(Path(f"/proc/{server.pid}/schedstat").read_text().split()[1]) // 1000


async def test_leases_that_end_at_once_hold_nobody_up(
    still: RedisStore, clock: ManualClock, raw: Any, server: ValkeyServer
) -> None:
    """Whether what they hold stays or comes back: the next hold is right, and no call of the script takes 5 ms."""
    limiter = Limiter(f"1000000 in all; {LEASES} in flight", store=still)
    for on_expiry in ("keep", "release"):
        await hold_together(limiter, ["a"] * (LEASES // 2), lease=60, on_expiry=on_expiry)
    assert not limiter.hold("a")
    raw.config_set("slowlog-log-slower-than", SLOW)
    raw.slowlog_reset()
    clock.advance(60)
    before = stalled_microseconds(server)
    assert limiter.hold("a").decision.remaining == LEASES - 1
    waited = stalled_microseconds(server) - before
    left = Limiter("1000000 in all", store=still).peek("a").remaining
    assert left == 1_000_000 - LEASES // 2 - 1
    slow = [one["duration"] for one in raw.slowlog_get(128) if one["command"].startswith((b"EVAL", b"FCALL"))]
    print(f"slow calls: {slow} us, of which the machine did something else for {waited} us")
    assert max(slow, default=0) - waited <= SLOW


async def test_keys_that_are_used_once_leave_nothing(store: RedisStore, raw: Any) -> None:
    """Whether they are settled, or left alone by a holder that gets its cost back or not."""
    limiter = Limiter("5/second; 60 per 2 seconds sliding; 3 in flight", store=store)

    async def use(number: int) -> None:
        expiry: Literal["keep", "release"] = "release" if number % 3 else "keep"
        hold = await limiter.ahold(f"key-{number}", 2, lease=1, keep=5, on_expiry=expiry)
        assert hold
        if number % 2:
            await hold.asettle(1)

    for first in range(0, KEYS, 1000):
        await asyncio.gather(*[use(number) for number in range(first, min(first + 1000, KEYS))])
    wait_for(lambda: raw.dbsize() == 0, "an empty server")
