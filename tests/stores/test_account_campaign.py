"""Many holders of accounts on a cluster, some of which are killed: no level is exceeded, and usage adds up.

`HOLD_KILLS` is how many holders are killed, 16 unless the environment says otherwise; 200 is the full form.
`HOLD_SESSIONS` is how many sessions are used once, 50,000 unless it says otherwise; a million is the full form.
"""

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headgate import UNLIMITED
from headgate.limits.notation import parse
from headgate.limits.numbers import LARGEST
from headgate.stores.base import Ask
from headgate.stores.holds import HoldTerms, ListedHold
from headgate.stores.redis import RedisStore
from tests.support.account_campaign import (
    KINDS,
    LEASE,
    LEVELS,
    LIMITS,
    LOW,
    RESOURCES,
    declared_limits,
)
from tests.support.cluster import steady_cluster
from tests.support.hold_campaign import Line, Record, microseconds, read_record
from tests.support.holder_processes import HOLDERS, KILLS, Holders, judge, starts_of_hours
from tests.support.redis_store import keys_of, server_time
from tests.support.valkey import PATIENCE, wait_for

pytestmark = [pytest.mark.long, pytest.mark.once]

SESSIONS = int(os.environ.get("HOLD_SESSIONS", "50000"))
ROOTS = 16
WRITTEN = 25_000  # bytes: some dozen holds
SECOND = 1_000_000


def test_no_level_is_exceeded_and_usage_adds_up_when_holders_are_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = stack.enter_context(steady_cluster())
        raws = [stack.enter_context(node.client()) for node in nodes]
        limits = declared_limits(starts_of_hours(raws[0]))
        module = "tests.support.account_campaign"
        holders = stack.enter_context(Holders(module, nodes, tmp_path, WRITTEN))
        holders.kill_some(HOLDERS, KILLS)
        ended = server_time(raws[0])
        calls = holders.history()
        wait_for(lambda: server_time(raws[0]) > ended + LEASE + SECOND, "the end of all leases")
        assert all(raw.dbsize() > 0 for raw in raws), "some root is on each master"
        looks, found = asyncio.run(look_at_all(holders.url, calls, tmp_path / "last.jsonl"))
    expect_denials_on_all_levels(calls)
    judge([*calls, *looks], limits, KINDS, tmp_path)
    expect_usage_to_add_up(calls, looks, found)


async def look_at_all(url: str, calls: list[Line], file: Path) -> tuple[list[Line], dict[str, ListedHold | None]]:
    """Find each hold that wasn't surely ended, read the usage of all roots, and peek at all limits."""
    record, found = Record(file), {}
    ended = {line["hold"] for line in calls if line["verb"] in ("settle", "cancel") and line["said"] == "passed"}
    unsure = {line["hold"]: line["key"] for line in calls if line["hold"] not in ended and line["said"] != "denied"}
    async with RedisStore(url, timeout=PATIENCE) as store:
        for hold_id, root in unsure.items():
            begun = record.begin({"verb": "find", "key": root, "hold": hold_id})
            known = found[hold_id] = await store.aread_hold("accounts", root, hold_id)
            if known is None:
                record.end(begun, "refused", cost=0)
            else:
                record.end(begun, "passed", state=known.state, cost=known.costs[1:])
        for root, accounts in accounts_by_root(calls).items():
            await look_at(store, record, root, accounts)
    record.close()
    return read_record(file), found


def accounts_by_root(calls: list[Line]) -> dict[str, set[tuple[str, str]]]:
    """All limits and keys that were asked for, by root."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for line in calls:
        if line["verb"] == "hold":
            found[line["key"]].update((name, key) for name, key in line["limits"])
    return found


async def look_at(store: RedisStore, record: Record, root: str, accounts: set[tuple[str, str]]) -> None:
    used: Counter[str] = Counter()
    began = microseconds()
    for row in await store.aread_usage("usage", 0, LARGEST, root):
        used[row.key] += row.amount
    limits = sorted(place for place in accounts if place[0] != "meter")
    asks = [Ask(name[:-1], key, LIMITS[name[:-1], int(name[-1])], 1, root) for name, key in limits]
    parts = await store.apeek_each(asks, LOW)
    for key in sorted(key for name, key in accounts if name == "meter"):
        line = record.begin({"verb": "usage", "key": root, "limits": [("meter", key)]})
        record.end(line, "passed", counted=used.pop(key, 0), called=began)
    assert not used, "nothing else is counted"
    for place, decision in zip(limits, parts, strict=True):
        line = record.begin({"verb": "peek", "key": root, "limits": [place]})
        record.end(line, "passed" if decision else "denied", remaining=decision.remaining, called=began)


def expect_denials_on_all_levels(calls: Iterable[Line]) -> None:
    bound = Counter(line["bound"] for line in calls if line.get("bound"))
    table = {resource: [bound[f"{resource}{level}"] for level in range(LEVELS)] for resource in RESOURCES}
    print(f"denials by resource and level: {table}")
    assert all(sum(table[resource][level] for resource in RESOURCES) for level in range(LEVELS))


def expect_usage_to_add_up(calls: list[Line], looks: list[Line], found: dict[str, ListedHold | None]) -> None:
    """Expect that meters have counted what was settled and what was left reserved, to the unit."""
    holds = {line["hold"]: line for line in calls if line["verb"] == "hold" and line["said"] in ("passed", None)}
    settled: Counter[str] = Counter()
    reserved: Counter[str] = Counter()
    ends = {
        line["hold"]: [0] * len(line["limits"]) if line["verb"] == "cancel" else line["cost"]
        for line in ({**holds.get(line["hold"], {}), **line} for line in calls)
        if line["verb"] in ("settle", "cancel") and line["said"] == "passed"
    }
    for hold_id, line in holds.items():
        known = found.get(hold_id)
        for place, (name, key) in enumerate(line["limits"]):
            if name != "meter":
                continue
            if hold_id in ends:
                settled[key] += ends[hold_id][place]
            elif known is not None and known.state in ("settled", "cancelled"):
                settled[key] += known.costs[1 + place]
            elif known is not None and not line["release"]:
                reserved[key] += known.costs[1 + place]
    counted = Counter({line["limits"][0][1]: line["counted"] for line in looks if line["verb"] == "usage"})
    total = sum(settled.values()), sum(reserved.values()), sum(counted.values())
    print("usage: {:,} settled + {:,} left reserved = {:,} counted".format(*total))
    assert settled + reserved == +counted


# Sessions that come and go --------------------------------------------------------------------------------------------


async def test_sessions_that_are_used_once_leave_nothing(store: RedisStore, raw: Any) -> None:
    """Whether they are settled, or left alone. What many of them share is kept: the shape of their holds."""
    above = [("requests", parse("100000/second")), ("slots", parse("100000 in flight"))]
    own = [(name, parse(text)) for name, text in (("requests", "5/second"), ("slots", "3 in flight"))]
    own.append(("tokens", parse("60 per 2 seconds sliding")))

    async def use(number: int) -> None:
        root = f"acme-{number % ROOTS}"
        session = f"{root}/search/planner/run-{number}"
        asks = [Ask("accounts", root, UNLIMITED, 1), *[Ask(name, root, limit, 1, root) for name, limit in above]]
        asks += [Ask(name, session, limit, 1, root) for name, limit in own]
        terms = HoldTerms(f"planner/{number}", SECOND, number % 3 == 0, 2 * SECOND, session, "some limits")
        assert (await store.ahold(asks, LOW, terms)).state == "open"
        if number % 2:
            await store.asettle(asks, LOW, terms.hold_id, None)

    for first in range(0, SESSIONS, 500):
        await asyncio.gather(*[use(number) for number in range(first, min(first + 500, SESSIONS))])
    wait_for(lambda: raw.dbsize() <= ROOTS and all(b"}p1:" in key for key in keys_of(raw)), "an empty server")
