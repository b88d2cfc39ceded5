"""How a server keeps what accounts need: names beside a root, shapes, meters, and what is booked after an outage."""

import asyncio
import struct
from hashlib import blake2b
from typing import Any

import pytest

from headgate import ManualClock, SlidingWindow, per_day, per_second
from headgate.errors import HoldError, StoreAway
from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.fixed import UNLIMITED
from headgate.limits.meter import Meter
from headgate.limits.slots import Slots
from headgate.stores.base import Ask, Verb
from headgate.stores.holds import AccountStore, HoldAnswer, HoldTerms, ListedHold, UsageRow
from headgate.stores.redis import RedisStore, shapes
from tests.support.cluster import steady_cluster
from tests.support.redis_store import keys_of, pack_doubles
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.once

SECOND = 1_000_000
DAY = 86_400 * SECOND
NOW = 1_800_000_000 * SECOND + 1000 * SECOND
TODAY = NOW - NOW % DAY
SHAPE = "tokens\tacme/search\t100/day"
METERED = "acme/search/planner\tweb\ttokens"


def asks(cost: int = 4, root: str = "acme") -> list[Ask]:
    limits = [per_day(100), Budget(50, "day"), AllOf([Budget(30), Slots(2)])]
    paths = [root, f"{root}/search", f"{root}/search/planner"]
    return [
        Ask("accounts", root, UNLIMITED, 1),
        Ask("usage", f"{root}/search/planner\tweb\ttokens", Meter(), cost, root),
        *[Ask("tokens", path, limit, cost, root) for path, limit in zip(paths, limits, strict=True)],
    ]


def terms(hold_id: str = "planner/1", **more: Any) -> HoldTerms:
    fields: dict[str, Any] = {"lease": 60 * SECOND, "release": False, "keep": 600 * SECOND} | more
    return HoldTerms(hold_id, **({"note": "run-42", "shape": SHAPE} | fields))


def digest(shape: str) -> bytes:
    return blake2b(shape.encode(), digest_size=8).digest()


def test_it_is_an_account_store(still: RedisStore) -> None:
    assert isinstance(still, AccountStore)


@pytest.mark.parametrize("short", [True, False])
def test_a_hold_is_known_though_the_server_was_emptied_before(still: RedisStore, raw: Any, short: bool) -> None:
    still.keys.short_forms = short
    still.hold(asks(), 0, terms())
    for number in range(2, 4):
        raw.flushall()
        hold_id = f"planner/{number}"
        answer = still.hold(asks(), 0, terms(hold_id))
        assert (answer.state, answer.repeated) == ("open", False)
        found = still.read_hold("accounts", "acme", hold_id)
        assert found is not None
        assert (found.note, found.shape) == ("run-42", SHAPE)
    raw.delete(b"headgate:{acme}p1:" + digest(SHAPE))
    assert still.hold(asks(), 0, terms("planner/4")).state == "open"
    assert {one.shape for one in still.list_holds("accounts", "acme", 9)} == {SHAPE}


def test_the_format_of_accounts(still: RedisStore, raw: Any) -> None:
    for short in (True, False):
        raw.flushall()
        still.keys.short_forms = short
        still.hold(asks(), 0, terms())
        names = {
            b"headgate:{acme}/acme}b1:100/day:tokens",
            b"headgate:{acme}/acme/search}c1: day UTC:tokens",
            b"headgate:{acme}/acme/search/planner}c1: all UTC:tokens",
            b"headgate:{acme}/acme/search/planner}s1:tokens",
            b"headgate:{acme}h1:8:accounts:planner/1",
            b"headgate:{acme}m1:UTC:usage:%d" % TODAY,
            b"headgate:{acme}o1:accounts",
            b"headgate:{acme}p1:" + digest(SHAPE),
            b"headgate:{acme}u1:usage",
        }
        assert set(keys_of(raw)) == names
        assert raw.get(b"headgate:{acme}p1:" + digest(SHAPE)) == SHAPE.encode()
        assert raw.zrange("headgate:{acme}/acme/search/planner}s1:tokens", 0, -1) == [b"8:accounts:planner/1"]
        assert raw.hgetall(b"headgate:{acme}m1:UTC:usage:%d" % TODAY) == {METERED.encode(): b"4"}
        assert raw.zrange("headgate:{acme}u1:usage", 0, -1, withscores=True) == [(b"UTC:%d" % TODAY, float(TODAY))]
        stored = raw.get("headgate:{acme}h1:8:accounts:planner/1")
        head = struct.pack("<BBBdd5IB", 1, 0, 5, 1060.0 * SECOND, 600.0 * SECOND, 1, 4, 4, 4, 4, 8)
        assert stored.startswith(head + digest(SHAPE) + struct.pack("<H", 6) + b"run-42")
        bucket = raw.get("headgate:{acme}/acme}b1:100/day:tokens")
        assert stored[-32:] == pack_doubles(TODAY, -struct.unpack("<8d", bucket)[2], TODAY, 0)


def few_asks(root: str) -> list[Ask]:
    limits = [per_day(100), Budget(500, "day")]
    return [
        Ask("accounts", root, UNLIMITED, 1),
        Ask("usage", f"{root}/search\tweb\ttokens", Meter(), 1, root),
        *[Ask("tokens", path, limit, 1, root) for path, limit in zip((root, f"{root}/search"), limits, strict=True)],
    ]


async def test_holds_of_one_call_are_bounded_and_kept_like_those_of_many(still: RedisStore, raw: Any) -> None:
    """What is known of a list of holds is passed on from one to the next."""

    async def granted(*asked: tuple[str, HoldTerms]) -> list[str]:
        tries = [still.ahold(few_asks(root), 0, one) for root, one in asked]
        answers = await asyncio.gather(*tries, return_exceptions=True)
        assert all(isinstance(answer, HoldError | HoldAnswer) for answer in answers)
        return [one.hold_id for (_, one), answer in zip(asked, answers, strict=True) if isinstance(answer, HoldAnswer)]

    for root in ("acme", "umbrella"):
        assert await granted((root, terms("first"))) == ["first"]
    most_six = [("acme", terms(f"six-{number}", most=6)) for number in range(8)]
    assert await granted(*most_six) == [f"six-{number}" for number in range(5)]
    longer = [("acme", terms(f"long-{number}", most=8, lease=1000 * SECOND * number)) for number in range(1, 4)]
    assert await granted(*longer) == ["long-1", "long-2"]
    assert raw.pttl("headgate:{acme}o1:accounts") >= 2_600_000
    await still.asettle(few_asks("acme"), 0, "long-1", None)
    in_turn = [(root, terms(f"turn-{number}-{root}", most=9)) for number in range(2) for root in ("umbrella", "acme")]
    assert await granted(*in_turn) == [one.hold_id for _, one in in_turn]
    assert await granted(("umbrella", terms("other")), ("acme", terms("tenth", most=9))) == ["other"]
    short, last = [still.ahold(few_asks("acme"), 0, terms(name, most=11)) for name in ("short", "last")]
    in_long_form = [Ask("accounts", "acme", UNLIMITED, 1), Ask("x", "acme", SlidingWindow(5, 60), 1, "acme")]
    long = still.ahold(in_long_form, 0, terms("long-form", most=11))
    answers = await asyncio.gather(short, long, last, return_exceptions=True)
    assert [isinstance(answer, HoldAnswer) for answer in answers] == [True, True, False]
    assert len(still.list_holds("accounts", "acme", 99)) == raw.zcard("headgate:{acme}o1:accounts") == 11


def test_everything_beside_a_root_expires(store: RedisStore, raw: Any) -> None:
    for number, short in enumerate((True, False)):
        store.keys.short_forms = short
        store.hold(
            [*asks(), Ask("x", "acme", SlidingWindow(5, 60), 1, "acme")], 0, terms(f"{number}", release=not short)
        )
    days = {name.partition(b"}")[2]: raw.pttl(name) / 86_400_000 for name in keys_of(raw)}
    assert min(days.values()) > 0
    assert 398 < days[next(name for name in days if name.startswith(b"m1:"))] <= 400.1
    assert 398 < days[b"u1:usage"] <= 400.1
    assert 15.9 < days[b"p1:" + digest(SHAPE)] <= 16


def test_limiters_of_stored_keys_are_known(still: RedisStore, raw: Any) -> None:
    still.hold([*asks(), Ask("a:b}c", "acme", Budget(5, unit="credits:1"), 1, "acme")], 0, terms())
    found = sorted(name for key in keys_of(raw) for name in still.keys.limiter_of(key))
    assert found == ["a:b}c", "tokens", "tokens", "tokens", "tokens"]
    still.hold(asks(4, "globex"), 0, terms())
    still.clear("tokens", per_day(100))
    still.clear("tokens", asks()[-1].limit)
    still.clear("tokens", Budget(50, "day"))
    still.clear("usage", Meter())
    assert [still.keys.limiter_of(key) for key in keys_of(raw) if b"tokens" in key or b"usage" in key] == []
    assert still.read_usage("usage", 0, 2**53) == []


def test_strange_roots_and_keys(still: RedisStore) -> None:
    for root in ("", "a}b", "%", "%7D", "{", "x" * 600, "\ud800", "a/b", "/"):
        some = [Ask("accounts", root, UNLIMITED, 1), Ask("usage", f"{root}\t}}%", Meter(), 3, root or "r")]
        assert still.hold(some, 0, terms("id")).state == "open"
        assert [row.key for row in still.read_usage("usage", 0, 2**53, root or "r")] == [f"{root}\t}}%"]
    roots = {row.root for row in still.read_usage("usage", 0, 2**53)}
    assert roots >= {"a}b", "%", "%7D", "{", "\ud800", "a/b", "/", "r"}


def test_a_shape_is_stored_once_an_hour(still: RedisStore, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = b"headgate:{acme}p1:" + digest(SHAPE)
    passed = ManualClock()
    monkeypatch.setattr(shapes, "monotonic", lambda: 1000 + passed.now() / SECOND)
    for number, is_stored in enumerate((True, False, False, True)):
        if number == 3:
            passed.advance(3601)
        raw.set(name, b"before", xx=True)
        assert still.hold(asks(0)[:4], 0, terms(f"{number}")).state == "open"
        assert raw.get(name) == (SHAPE.encode() if is_stored else b"before")
    assert still.read_hold("accounts", "acme", "2") == ListedHold(
        "2", "open", (1, 0, 0, 0), 60 * SECOND, "run-42", SHAPE
    )


def test_a_denied_hold_stores_no_shape(still: RedisStore, raw: Any) -> None:
    assert still.hold(asks(1000), 0, terms()).state == "denied"
    assert keys_of(raw) == []
    assert still.hold(asks(), 0, terms()).state == "open"
    assert raw.exists(b"headgate:{acme}p1:" + digest(SHAPE))


def test_slots_of_dead_holders_are_dropped(still: RedisStore, raw: Any, clock: ManualClock) -> None:
    limit = [Ask("accounts", "acme", UNLIMITED, 1), Ask("slots", "acme/search", Slots(500), 1, "acme")]
    for short in (True, False):
        still.keys.short_forms = short
        for number in range(100):
            still.hold(limit, 0, terms(f"{short}-{number}"))
        clock.advance(600)
    for number in range(5):
        still.keys.short_forms = number % 2 == 0
        still.hold(limit, 0, terms(f"last-{number}"))
    assert raw.zcard("headgate:{acme}/acme/search}s1:slots") == 5


def test_usage_of_a_settlement_after_midnight(still: RedisStore, clock: ManualClock) -> None:
    for short in (True, False):
        still.keys.short_forms = short
        root = f"{short}"
        some = [*asks(7, root)[:2], Ask("tokens", root, Budget(10**6), 7, root)]
        start = TODAY + (DAY if not short else 0)
        still.hold(some, 0, terms(lease=2 * DAY))
        clock.advance(86_400)
        still.hold(some, 0, terms("planner/2"))
        still.settle(some, 0, "planner/1", [1, 3, 3])
        key = some[1].key
        expected = [UsageRow(root, key, start, 3), UsageRow(root, key, start + DAY, 7)]
        assert sorted(still.read_usage("usage", 0, 2**53, root)) == expected
        assert still.read_usage("usage", start, start + DAY, root) == expected[:1]


@pytest.mark.long
def test_accounts_in_a_cluster() -> None:
    with steady_cluster() as nodes:
        clock = ManualClock(1000)
        with RedisStore(f"redis+cluster://127.0.0.1:{nodes[0].port}", timeout=PATIENCE, clock=clock) as store:
            roots = [f"org-{number}" for number in range(10)]
            for number, root in enumerate(roots):
                store.keys.short_forms = number % 2 == 0
                assert store.hold(asks(4, root), 0, terms(release=number == 3)).state == "open"
                assert store.extend(asks(4, root), 0, "planner/1", [1, 5, 5, 5, 5], None).costs == (1, 5, 5, 5, 5)
                assert [part.remaining for part in store.peek_each(asks(4, root)[2:], 0)] == [95, 45, 25, 1]
                known = store.read_hold("accounts", root, "planner/1")
                assert known is not None
                assert (known.note, known.shape) == ("run-42", SHAPE)
                assert store.list_holds("accounts", root, 5) == [known]
            assert sorted(row.root for row in store.read_usage("usage", 0, 2**53)) == roots
            store.settle(asks(4, roots[0]), 0, "planner/1", [1, 2, 2, 2, 2])
            assert [row.amount for row in store.read_usage("usage", 0, 2**53, roots[0])] == [2]
            with pytest.raises(ValueError, match="one slot of the cluster"):
                store.hold([*asks(4, "org-1"), Ask("tokens", "x", per_day(1), 1, "org-2")], 0, terms())

            async def twins() -> None:
                assert len(await store.aread_usage("usage", 0, 2**53)) == 10
                known = await store.aread_hold("accounts", roots[1], "planner/1")
                assert known is not None
                assert len(await store.apeek_each(asks(4, roots[1]), 0)) == 6
                await store.aclose()

            asyncio.run(twins())


def test_each_key_once(still: RedisStore) -> None:
    meter = asks()[1]
    with pytest.raises(ValueError, match="each key once"):
        still.hold([*asks(), meter], 0, terms())
    other = Ask(meter.name, "acme/search/other\tweb\ttokens", meter.limit, meter.cost, meter.root)
    assert still.hold([*asks(), other], 0, terms()).state == "open"


def test_what_was_granted_without_the_server_is_booked_once(
    own_server: ValkeyServer, breaker_clock: ManualClock
) -> None:
    with RedisStore(own_server.url, on_failure_holds="open") as store:
        own_server.kill()
        held = store.hold(asks(4), 0, terms())
        assert (held.state, held.decision.degraded, held.parts) == ("open", True, ())
        for ask in (store.read_hold, store.peek_each, store.read_usage):
            arguments: Any = {
                store.read_hold: ("accounts", "acme", "planner/1"),
                store.peek_each: (asks(), 0),
                store.read_usage: ("usage", 0, 2**53, "acme"),
            }[ask]
            with pytest.raises(StoreAway):
                ask(*arguments)
        own_server.start()

        def booked() -> bool:
            breaker_clock.advance(1)
            store.apply(Verb.PEEK, [Ask("any", "key", per_second(1), 1)], 0)
            return not store.degraded and len(store._bookings) == 0

        wait_for(booked, "the bookings")
        known = store.read_hold("accounts", "acme", "planner/1")
        assert known is not None
        assert (known.state, known.costs, known.note, known.shape) == ("open", (1, 4, 4, 4, 4), "run-42", SHAPE)
        assert [row.amount for row in store.read_usage("usage", 0, 2**53)] == [4]
        assert store.settle(asks(4), 0, "planner/1", [1, 3, 3, 3, 3]).state == "settled"


@pytest.mark.parametrize("policy", ["open", "closed", "local"])
def test_a_forced_hold_is_granted_without_the_server(
    own_server: ValkeyServer, breaker_clock: ManualClock, policy: str
) -> None:
    with RedisStore(own_server.url, on_failure_holds=policy) as store:
        own_server.kill()
        held = store.hold(asks(1000), 0, terms(forced=True))
        assert (held.state, bool(held.decision), held.decision.degraded) == ("open", policy == "open", True)
        assert len(store._bookings) == 1


def test_other_accounts_settle_no_hold(still: RedisStore) -> None:
    """A hold is settled on the accounts on which it was made."""
    still.hold(asks(), 0, terms())
    others = [
        asks()[0],
        *[Ask(ask.name, ask.key.replace("search", "write"), ask.limit, ask.cost, ask.root) for ask in asks()[1:]],
    ]
    with pytest.raises(HoldError, match="expected the limits with which it was made"):
        still.settle(others, 0, "planner/1", [1, 1, 1, 1, 1])
    assert still.settle(asks(), 0, "planner/1", [1, 1, 1, 1, 1]).state == "settled"
