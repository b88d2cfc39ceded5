"""The cases of the conformance suite for stores of accounts: `headgate.stores.holds.AccountStore`."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Final
from zoneinfo import ZoneInfo

from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.decision import Limit, Outcome
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.meter import Meter
from headgate.limits.numbers import LARGEST
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import TokenBucket, per_day, per_second
from headgate.stores.account_walks import ACCOUNT_WALKS
from headgate.stores.asks import pieces_of
from headgate.stores.base import Ask, Verb
from headgate.stores.harness import MICROSECOND, SECOND, AccountHarness, MakeStore, cases_of, expect
from headgate.stores.holds import HoldTerms, ListedHold, UsageRow
from headgate.stores.reference import LOW

METER: Final = ("usage", "acme/search/planner\tweb\tusd", Meter())

LEVELS: Final[tuple[tuple[str, str, Limit], ...]] = (
    METER,
    ("requests", "acme", per_day(10)),
    ("tokens", "acme/search", SlidingWindow(10, 86_400)),
    ("tokens", "acme/search/planner", AllOf([per_day(10), SlidingWindow(20, 86_400)])),
    ("usd", "acme/search/planner", Budget("0.000010", "month", unit="usd")),
    ("usd", "acme/search/planner/run-42", Budget("0.000010", unit="usd")),
)
"""Each limit has 10 to spend, and gets nothing back for a while."""

SLOTS: Final[tuple[tuple[str, str, Limit], ...]] = (
    ("slots", "acme", Slots(3)),
    ("slots", "acme/search", Slots(3)),
)


def _costs(levels: Sequence[object], cost: int) -> list[int]:
    return [cost] * len(levels)


def _day(day: int, zone: str = "UTC", month: int = 1, year: int = 2027) -> int:
    """The start of a day in microseconds since 1970."""
    start = datetime(year, month, day, tzinfo=ZoneInfo(zone))
    return (start - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def _today(harness: AccountHarness) -> int:
    """The start of the day that a harness begins with."""
    shown = datetime.fromtimestamp(harness.clock.wall(), UTC)
    return _day(shown.day, month=shown.month, year=shown.year)


# Levels ---------------------------------------------------------------------------------------------------------------


def a_hold_takes_its_cost_on_every_level(make: MakeStore) -> None:
    harness = AccountHarness(make, [*LEVELS, *SLOTS])
    held = harness.hold(_costs(harness.limits, 3))
    costs = tuple(_costs(harness.limits, 3))
    expect("held", (bool(held.decision), held.state, held.costs, held.left), (True, "open", (1, *costs), 60 * SECOND))
    expect("left", harness.left(), [LARGEST, 7, 7, 7, 0, 0, 2, 2])
    exact = [str(one.left) for one in harness.peeks()[4:6]]
    expect("left with decimals", exact, ["0.000007", "0.000007"])
    expect("settled", harness.settle([2, 1, 2, 3, 4, 5, 1, 1]).costs, (1, 2, 1, 2, 3, 4, 5, 1, 1))
    expect("left then", harness.left(), [LARGEST, 9, 8, 7, 0, 0, 3, 3])
    exact = [str(one.left) for one in harness.peeks()[4:6]]
    expect("left with decimals then", exact, ["0.000006", "0.000005"])


def a_denial_on_one_level_changes_nothing_on_any(make: MakeStore) -> None:
    levels = [*LEVELS, *SLOTS]
    for full in range(1, len(levels)):
        harness = AccountHarness(make, levels)
        harness.hold(_costs(levels, 1), "before")
        filled = AccountHarness(lambda _, store=harness.store: store, [levels[full]])  # type: ignore[misc]
        for number in range(2):
            filled.hold([4], f"other-{number}")
        before = harness.seen()
        denied = harness.hold(_costs(levels, 2))
        got = (bool(denied.decision), denied.decision.bound, denied.state, denied.left)
        expect(f"2 with a full {levels[full]}", got, (False, full + 1, "denied", 0))
        parts = [bool(part) for part in denied.parts]
        expect("the parts", parts, [place != full + 1 for place in range(len(levels) + 1)])
        expect("after the denial", harness.seen(), before)
        expect("the denied hold", harness.read(), None)


def a_denied_extension_changes_nothing_on_any_level(make: MakeStore) -> None:
    for full in range(1, len(LEVELS)):
        harness = AccountHarness(make, [*LEVELS, *SLOTS])
        harness.hold(_costs(harness.limits, 4))
        name, key, limit = LEVELS[full]
        harness.store.apply(Verb.CHARGE, [Ask(name, key, limit, 5, harness.root)], LOW)
        before = harness.seen()
        denied = harness.extend(_costs(harness.limits, 6), lease=600)
        got = (bool(denied.decision), denied.decision.bound, denied.state, denied.costs[1], denied.left)
        expect(f"2 more on {limit}", got, (False, full + 1, "open", 4, 60 * SECOND))
        expect("after the denial", harness.seen(), before)


def an_extension_asks_only_for_what_it_adds(make: MakeStore) -> None:
    for place in range(1, len(LEVELS)):
        harness = AccountHarness(make, [*LEVELS, *SLOTS])
        costs = _costs(harness.limits, 1)
        costs[place] = 10
        harness.hold(costs)
        more = [4] * len(costs)
        more[place] = 10
        expect(f"nothing is left of {LEVELS[place][2]}", bool(harness.extend(more).decision), True)
        expect("taken", harness.find().costs, (1, *more))


def the_longest_wait_binds(make: MakeStore) -> None:
    limits = [
        METER,
        ("a", "acme", per_second(1)),
        ("b", "acme/search", per_day(1)),
        ("c", "acme/x", SlidingWindow(1, 9)),
    ]
    harness = AccountHarness(make, limits)
    harness.hold([1, 1, 1, 1], "before")
    denied = harness.hold([1, 1, 1, 1])
    waits = [one.retry_after for one in denied.parts]
    expect("the wait of each part", waits, [0.0, 0.0, 1.0, 86_400.0, 9.0])
    got = (denied.decision.bound, denied.decision.limit, denied.decision.retry_after)
    expect("what bound", got, (3, per_day(1), 86_400.0))
    harness.limits[3] = ("c", "acme/x", BLOCKED)
    expect("what never passes", harness.hold([1, 1, 1, 1]).decision.bound, 4)


def roots_are_apart(make: MakeStore) -> None:
    """The keys are whole paths, so that those of two roots always differ; the ids of holds may be the same."""
    roots = ("acme", "globex", "a b", "{acme}", "{", "}", "acme}", "ämter", "acme:1")
    first = AccountHarness(make, [])
    harnesses = []
    for root in roots:
        key = f"{root}/search"
        limits: list[tuple[str, str, Limit]] = [
            ("usage", f"{key}\t\tusd", Meter()),
            ("usd", key, Budget(10)),
            ("slots", key, Slots(2)),
            ("tokens", key, per_day(10)),
        ]
        harness = AccountHarness(lambda _: first.store, limits, root)
        harness.clock = first.clock
        harnesses.append(harness)
    for cost, harness in enumerate(harnesses, 1):
        expect(f"held under {harness.root!r}", harness.hold([cost] * 4, note=harness.root).state, "open")
    for cost, harness in enumerate(harnesses, 1):
        expect(f"left under {harness.root!r}", harness.left(), [LARGEST, 10 - cost, 1, 10 - cost])
        known = harness.read()
        expect("the hold", known and (known.note, known.costs), (harness.root, (1, *[cost] * 4)))
        row = UsageRow(harness.root, harness.limits[0][1], _today(harness), cost)
        expect(f"usage of {harness.root!r}", harness.usage(harness.root), [row])
    expect("usage of all", len(first.usage()), len(roots))
    harnesses[0].settle([0, 0, 1, 0])
    expect("left where it was settled", harnesses[0].left(), [LARGEST, 10, 2, 10])
    expect("left elsewhere", harnesses[1].left(), [LARGEST, 8, 1, 8])


def neighbours_share_the_levels_above_them(make: MakeStore) -> None:
    above = [("usd", "acme", Budget(10)), ("slots", "acme", Slots(3))]
    first = AccountHarness(make, [*above, ("usd", "acme/search", Budget(4))])
    other = AccountHarness(lambda _: first.store, [*above, ("usd", "acme/write", Budget(20))])
    expect("of the first", [first.hold([2, 1, 2], f"{i}").state for i in range(3)], ["open", "open", "denied"])
    expect("of its neighbour", other.hold([7, 1, 7], "a").decision.bound, 1)
    expect("all of the rest", other.hold([6, 1, 6], "b").state, "open")
    first.cancel("0")
    expect("a slot and 2 came back", (first.left(), other.left()), ([2, 1, 2], [2, 1, 14]))


def a_check_counts_with_the_holds_of_its_key(make: MakeStore) -> None:
    for name, key, limit in LEVELS[1:]:
        harness = AccountHarness(make, [METER, (name, key, limit)])
        harness.hold([1, 4])
        ask = Ask(name, key, limit, 7, harness.root)
        expect(f"7 of 6 on {limit}", bool(harness.store.apply(Verb.CHECK, [ask], LOW)), False)
        expect("6 of 6", bool(harness.store.apply(Verb.CHECK, [ask.with_cost(6)], LOW)), True)
        expect("no more", harness.hold([1, 1], "more").state, "denied")


# Costs of 0, and forced holds -----------------------------------------------------------------------------------------


def a_cost_of_0_is_denied_only_while_nothing_is_left(make: MakeStore) -> None:
    for name, key, limit in LEVELS[1:]:
        harness = AccountHarness(make, [METER, (name, key, limit)])
        harness.hold([9, 9], "most")
        before = harness.peeks()
        held = harness.hold([0, 0], "nothing")
        expect(f"0 of 1 on {limit}", (bool(held.decision), held.state, held.costs), (True, "open", (1, 0, 0)))
        expect("it took nothing", harness.peeks(), before)
        harness.hold([1, 1], "the rest")
        before_all = harness.seen()
        denied = harness.hold([0, 0], "denied")
        expect(f"0 of 0 on {limit}", (bool(denied.decision), denied.state, denied.costs), (False, "denied", (1, 0, 0)))
        expect("after it", harness.seen(), before_all)
        lone = harness.store.apply(Verb.PEEK, [Ask(name, key, limit, 1, harness.root)], LOW)
        expect("the decision on 0", denied.parts[2:], (lone,))
        harness.cancel("the rest")
        harness.settle([1, 1], "nothing")
        expect("settled with 1", bool(harness.hold([0, 0], "none").decision), False)
        harness.hold([0, 0], "nothing")


def a_forced_hold_is_granted_whatever_is_left(make: MakeStore) -> None:
    for name, key, limit in (*LEVELS[1:], ("tokens", "acme", BLOCKED)):
        harness = AccountHarness(make, [METER, (name, key, limit), SLOTS[0]])
        harness.hold([8, 8, 1], "before", lease=100, forced=limit is BLOCKED)
        before, denied = harness.peeks(), harness.hold([4, 4, 1])
        expect(f"4 of 2 on {limit}", denied.state, "denied")
        forced = harness.hold([4, 4, 1], forced=True)
        expect("forced", (forced.state, forced.costs, forced.left), ("open", (1, 4, 4, 1), 60 * SECOND))
        expect("the decision that it would have had", forced.decision, denied.decision)
        expect("and its parts", forced.parts, denied.parts)
        left = 0 if limit is BLOCKED else max(harness.peeks()[1].left * 10**limit.decimals, 0)
        expect("left", (left, harness.left()[2]), (0, 1))
        expect("no more", harness.hold([1, 1, 1], "more").state, "denied")
        expect("its usage", [row.amount for row in harness.usage()], [12])
        harness.cancel()
        expect("as before, once it is cancelled", harness.peeks(), before)
        passing = harness.hold([2, 0, 1], "passes", forced=True)
        if limit is not BLOCKED:
            expect("a forced hold that passes", (bool(passing.decision), passing.state), (True, "open"))


def a_forced_hold_is_extended_whatever_is_left(make: MakeStore) -> None:
    for name, key, limit in LEVELS[1:]:
        harness = AccountHarness(make, [METER, (name, key, limit), SLOTS[0]])
        harness.hold([8, 8, 1], "before")
        harness.hold([1, 1, 1], "plain")
        harness.hold([1, 1, 1], forced=True)
        denied = harness.extend([4, 4, 1], 90, "plain")
        expect(f"3 more of 0 on {limit}", (bool(denied.decision), denied.costs), (False, (1, 1, 1, 1)))
        forced = harness.extend([4, 4, 1], 90)
        got = (forced.decision, forced.parts, forced.state, forced.costs, forced.left)
        expect("forced", got, (denied.decision, denied.parts, "open", (1, 4, 4, 1), 90 * SECOND))
        expect("its usage", [row.amount for row in harness.usage()], [13])
        harness.settle([2, 2, 1])
        expect("its usage when 2 of 4 were settled", [row.amount for row in harness.usage()], [11])
        expect("no more", harness.hold([0, 0, 1], "more").state, "denied")
        harness.cancel("before")
        expect("once 8 have come back", harness.hold([7, 7, 1], "more").state, "open")


def a_hold_that_cannot_be_counted_is_refused(make: MakeStore) -> None:
    for name, key, limit in LEVELS[1:]:
        harness = AccountHarness(make, [METER, (name, key, limit)])
        hold, extend = harness.hold, harness.extend
        hold([4, 4], "before")
        harness.refused("all that can be counted in a day", partial(hold, [LARGEST, 1], "huge"))
        harness.refused("one more than is left of it", partial(hold, [LARGEST - 3, 1], "huge"))
        harness.refused(f"a forced hold of more than {limit} counts", partial(hold, [1, LARGEST], "huge", forced=True))
        hold([1, 1], "small", forced=True)
        harness.refused("more in a day", partial(extend, [LARGEST, 1], hold_id="small"))
        harness.refused(f"more than {limit} counts", partial(extend, [1, LARGEST], hold_id="small"))
        hold([LARGEST - 5, 1], "rest")
        expect("all that can be counted", [row.amount for row in harness.usage()], [LARGEST])
        harness.cancel("rest")
        expect("once it has come back", [row.amount for row in harness.usage()], [5])


def a_forced_hold_takes_more_slots_than_there_are(make: MakeStore) -> None:
    harness = AccountHarness(make, [("slots", "acme", Slots(1))])
    harness.hold([1], "a", lease=10)
    forced = harness.hold([1], "b", lease=20, forced=True)
    expect("forced", (bool(forced.decision), forced.state, forced.decision.retry_after), (False, "open", 10.0))
    harness.clock.advance(10)
    denied = harness.hold([1], "c")
    expect("the forced one has the slot", (denied.state, denied.decision.retry_after), ("denied", 10.0))
    harness.settle(None, "b")
    expect("free", harness.hold([1], "c").state, "open")


def a_debt_of_forced_holds_is_kept(make: MakeStore) -> None:
    harness = AccountHarness(make, [("usd", "acme", Budget(10)), ("requests", "acme", TokenBucket(10, 1, 1))])
    harness.hold([10, 10])
    harness.hold([5, 5], "forced", forced=True)
    harness.clock.advance(5)
    expect("in debt", [bool(one) for one in harness.peeks()], [False, False])
    harness.clock.advance(1)
    expect("the bucket is out of debt", [bool(one) for one in harness.peeks()], [False, True])
    harness.settle([4, 10])
    expect("settled with 6 less", [one.remaining for one in harness.peeks()], [1, 1])


# Records --------------------------------------------------------------------------------------------------------------


def open_holds_of_a_root_are_bounded(make: MakeStore) -> None:
    harness = AccountHarness(make, LEVELS)
    costs = _costs(LEVELS, 1)
    for hold_id, lease in (("a", 10), ("b", 20)):
        harness.hold(costs, hold_id, lease, most=2)
    harness.refused("a third of two", lambda: harness.hold(costs, "c", most=2))
    expect("one that is known", harness.hold(costs, "a", most=2).state, "open")
    expect("a larger bound", harness.hold(costs, "c", most=3).state, "open")
    harness.settle(None, "c")
    harness.clock.advance(10)
    expect("one has expired", harness.hold(costs, "d", most=2).state, "open")
    harness.refused("the next", lambda: harness.hold(costs, "e", most=2))
    harness.cancel("b")
    expect("one was cancelled", harness.hold(costs, "e", most=2).state, "open")
    harness.root = "globex"
    expect("of another root", harness.hold(costs, "e", most=1).state, "open")


def a_hold_keeps_its_note_and_shape(make: MakeStore) -> None:
    harness = AccountHarness(make, LEVELS)
    costs, shape = _costs(LEVELS, 1), "v1\nusd\tacme/search\t500 usd/calendar month\n" * 40
    texts = {
        "planner/a": ("run-42\tweb", shape),
        "planner/b": ("", shape),
        "planner/c": ("ämter \N{SNOWMAN} \0 ' \" \\ {}", "another"),
        "planner/d": ("only a note", ""),
    }
    for hold_id, (note, kept) in texts.items():
        harness.hold(costs, hold_id, note=note, shape=kept)

    def read(what: str, *hold_ids: str) -> None:
        for hold_id in hold_ids or texts:
            known = harness.read(hold_id)
            expect(f"{hold_id} {what}", known and (known.note, known.shape), texts[hold_id])

    read("open")
    harness.extend(_costs(LEVELS, 2), 90, "planner/a")
    read("extended")
    listed = {one.hold_id: (one.note, one.shape) for one in harness.accounts.list_holds("accounts", "acme", 10)}
    expect("listed", listed, texts)
    harness.settle(None, "planner/a")
    harness.cancel("planner/c")
    read("settled or cancelled")
    harness.clock.advance(60)
    expect("those that were settled are forgotten", harness.read("planner/a"), None)
    read("expired", "planner/b", "planner/d")
    harness.settle(_costs(LEVELS, 0), "planner/b")
    read("settled late", "planner/b", "planner/d")
    harness.clock.advance(60)
    expect("forgotten", [harness.read(hold_id) for hold_id in texts], [None] * 4)
    harness.hold(costs, "planner/a", note="anew", shape=shape)
    texts["planner/a"] = ("anew", shape)
    read("anew", "planner/a")


def a_hold_is_read_without_its_asks(make: MakeStore) -> None:
    harness = AccountHarness(make, [METER, ("usd", "acme", Budget(10)), ("slots", "acme", Slots(3))])
    hold_id, note = "planner/0123456789ab-1f", "run-42"
    expect("unknown", harness.read(hold_id), None)
    harness.hold([2, 2, 1], hold_id, note=note)
    expect("open", harness.read(hold_id), ListedHold(hold_id, "open", (1, 2, 2, 1), 60 * SECOND, note))
    unknown = [("accounts", "globex"), ("other", "acme"), ("usd", "acme"), ("slots", "acme")]
    found = [harness.accounts.read_hold(name, key, hold_id) for name, key in unknown]
    expect("of another name or key", found, [None] * 4)
    expect("another id", harness.read("planner/0123456789ab-1"), None)
    harness.clock.advance(20)
    harness.extend([3, 4, 1], hold_id=hold_id)
    expect("extended", harness.read(hold_id), ListedHold(hold_id, "open", (1, 3, 4, 1), 40 * SECOND, note))
    harness.clock.advance(40)
    expect("expired", harness.read(hold_id), ListedHold(hold_id, "expired", (1, 3, 4, 1), 0, note))
    harness.settle([1, 5, 1], hold_id)
    expect("settled", harness.read(hold_id), ListedHold(hold_id, "settled", (1, 1, 5, 1), 0, note))
    harness.clock.advance(60 - MICROSECOND)
    expect("remembered", harness.read(hold_id), ListedHold(hold_id, "settled", (1, 1, 5, 1), 0, note))
    harness.clock.advance(MICROSECOND)
    expect("forgotten", harness.read(hold_id), None)


def every_verb_on_accounts_can_be_repeated(make: MakeStore) -> None:
    harness = AccountHarness(make, [*LEVELS, *SLOTS])
    costs, more, less = (_costs(harness.limits, cost) for cost in (5, 6, 4))
    first = harness.hold(costs, note="first", shape="first")
    after = harness.seen()
    for _ in range(2):
        again = harness.hold(costs, note="second", shape="second", forced=True)
        expect("held again", (again, harness.seen()), (first, after))
    expect("held once", harness.left(), [LARGEST, 5, 5, 5, 0, 0, 2, 2])
    extended = harness.extend(more, lease=70)
    after = harness.seen()
    for _ in range(2):
        again = harness.extend(more, lease=70)
        expect("extended again", (again.summary, harness.seen()), (extended.summary, after))
    harness.refused("holding again with another cost", lambda: harness.hold(costs))
    settled = harness.settle(less)
    after = harness.seen()
    for again in (harness.settle(less), harness.settle(), harness.find()):
        expect("settled again", (again, harness.seen()), (settled, after))
    expect("held after the end", harness.hold(costs).summary, settled.summary)
    harness.refused("settling with another cost", lambda: harness.settle([*less[:-3], 3, 4, 4]))
    harness.refused("cancelling what is settled", harness.cancel)
    harness.refused("extending what is settled", lambda: harness.extend(more))
    expect("its usage", [row.amount for row in harness.usage()], [4])
    expect("its note", harness.read(), ListedHold("planner/1", "settled", (1, *less), 0, "first", "first"))
    harness.hold(_costs(harness.limits, 1), "none")
    done = harness.cancel("none")
    expect("cancelled again", harness.cancel("none"), done)
    expect("its usage then", [row.amount for row in harness.usage()], [4])


def an_expired_hold_on_accounts_can_be_settled_late(make: MakeStore) -> None:
    for release in (False, True):
        for actual in (0, 3, 7):
            harness = AccountHarness(make, [*LEVELS, *SLOTS])
            harness.hold(_costs(harness.limits, 5), lease=10, release=release)
            harness.clock.advance(10)
            left = 10 if release else 5
            expect(f"left with release={release}", harness.left(), [LARGEST, left, left, left, 0, 0, 3, 3])
            expect("its usage", [row.amount for row in harness.usage()], [] if release else [5])
            harness.settle(_costs(harness.limits, actual))
            left = 10 - actual
            expect(f"left when {actual} were settled late", harness.left(), [LARGEST, left, left, left, 0, 0, 3, 3])
            expect("its usage then", [row.amount for row in harness.usage()], [actual] if actual else [])


def budgets_of_levels_keep_what_is_used_when_amounts_change(make: MakeStore) -> None:
    harness = AccountHarness(make, [METER, ("usd", "acme", Budget(10)), ("slots", "acme", Slots(1))])
    harness.hold([8, 8, 1])
    harness.limits[1:] = [("usd", "acme", Budget(20)), ("slots", "acme", Slots(3))]
    expect("left of more", harness.left(), [LARGEST, 12, 2])
    harness.extend([9, 9, 1])
    expect("extended", harness.left(), [LARGEST, 11, 2])
    harness.limits[1] = ("usd", "acme", Budget(2))
    harness.settle([3, 3, 1])
    expect("left of less than is used", (harness.left(), harness.peeks()[1].outcome), ([LARGEST, 0, 3], Outcome.DENY))
    harness.limits[1] = ("usd", "acme", Budget(4))
    expect("left", harness.left(), [LARGEST, 1, 3])


# The decision on each part --------------------------------------------------------------------------------------------


def each_part_has_its_decision(make: MakeStore) -> None:
    limits: list[tuple[str, str, Limit]] = [
        METER,
        ("requests", "acme", per_day(10)),
        ("tokens", "acme/search", AllOf([SlidingWindow(7, 60), per_day(5)])),
        ("usd", "acme/search", AllOf([Budget(30, "day"), Slots(3), per_day(20)])),
        ("usd", "acme/search/planner", Budget(2, unit="usd")),
    ]
    harness = AccountHarness(make, limits)
    held = harness.hold([2, 2, 2, 3, 500_000])
    expect(
        "limits, in the order of the asks",
        [one.limit for one in held.parts],
        [
            UNLIMITED,
            *(limits[i][2] for i in (0, 1)),
            per_day(5),
            Budget(30, "day"),
            Slots(3),
            per_day(20),
            limits[4][2],
        ],
    )
    expect("left", [one.remaining for one in held.parts], [LARGEST, LARGEST, 8, 3, 27, 2, 17, 1])
    expect("left with decimals", str(held.parts[-1].left), "1.500000")
    expect("what bound within each", [one.bound for one in held.parts], [None, None, None, 1, *[None] * 4])
    expect("what bound of all", (held.decision.bound, held.decision.remaining), (5, 1))
    for place, ask in enumerate(pieces_of(harness.asks([2, 2, 2, 3, 500_000]))):
        if not ask.limit.counts_slots:
            alone = AccountHarness(make, []).store.apply(Verb.CHECK, [ask], LOW)
            expect(f"the part {place} as a check alone", held.parts[place], alone)
    denied = harness.hold([2, 2, 4, 3, 1_600_000], "denied")
    expect("denied", [bool(one) for one in denied.parts], [True, True, True, False, True, True, True, False])
    expect("their waits", [one.retry_after for one in denied.parts][3:], [17_280.0, 0.0, 0.0, 0.0, None])
    expect("what bound of both", denied.decision.bound, 5)
    extended = harness.extend([2, 2, 5, 3, 500_000])
    expect("extended", [one.remaining for one in extended.parts], [LARGEST, LARGEST, 8, 0, 27, 2, 17, 1])


def each_part_is_peeked_at(make: MakeStore) -> None:
    harness = AccountHarness(make, [*LEVELS, *SLOTS, ("usd", "acme/x", AllOf([Budget(3), Slots(2)]))])
    asks = harness.some_asks()

    def compare(what: str) -> None:
        peeks = harness.accounts.peek_each(asks, LOW)
        alone = tuple(harness.store.apply(Verb.PEEK, [piece.with_cost(1)], LOW) for piece in pieces_of(asks))
        expect(f"peeked at {what}", peeks, alone)

    compare("first")
    other_costs = [ask.with_cost(1000) for ask in asks]
    expect(
        "the costs of the asks don't matter",
        harness.accounts.peek_each(other_costs, LOW),
        harness.accounts.peek_each(asks, LOW),
    )
    harness.hold([*_costs(LEVELS, 9), 1, 1, 3])
    compare("held")
    answer = harness.settle([*_costs(LEVELS, 20), 1, 1, 2])
    compare("settled")
    expect("the parts of a settled hold", answer.parts, harness.accounts.peek_each(asks, LOW))
    expect("of one that is found", harness.find().parts, answer.parts)


# Meters ---------------------------------------------------------------------------------------------------------------


def usage_counts_on_the_day_of_the_hold(make: MakeStore) -> None:
    harness = AccountHarness(make, [METER, ("usd", "acme", Budget(100))])
    today = _today(harness)
    key, day = METER[1], 86_400 * SECOND

    def used(*amounts: int) -> list[UsageRow]:
        return [UsageRow("acme", key, today + i * day, amount) for i, amount in enumerate(amounts) if amount]

    harness.hold([5, 5], "a", lease=10**6, keep=10**6)
    harness.hold([4, 4], "b", lease=10**6, keep=10**6)
    harness.hold([3, 3], "c", lease=10**6, keep=10**6)
    expect("held", harness.usage(), used(12))
    harness.clock.advance(86_400)
    harness.settle([7, 7], "a")
    expect("2 more, settled on the next day", harness.usage(), used(14))
    harness.settle([1, 1], "b")
    expect("3 less", harness.usage(), used(11))
    harness.extend([8, 8], hold_id="c")
    expect("5 more for a hold of yesterday are used today", harness.usage(), used(11, 5))
    harness.clock.advance(86_400)
    harness.settle([2, 2], "c")
    expect("6 less: the newest are given back first", harness.usage(), used(10, 0))
    harness.hold([9, 9], "d", lease=10, keep=10**6)
    harness.cancel("d")
    expect("cancelled", harness.usage(), used(10))
    harness.hold([6, 6], "e", lease=10, keep=10**6)
    harness.hold([5, 5], "f", lease=10, keep=10**6, release=True)
    harness.clock.advance(20)
    expect("expired: kept, or released", harness.usage(), used(10, 0, 6))
    harness.hold([200, 200], "g")
    expect("denied", harness.usage(), used(10, 0, 6))
    harness.hold([200, 200], "g", forced=True)
    expect("forced", harness.usage(), used(10, 0, 206))
    harness.hold([0, 0], "h", forced=True)
    expect("nothing", harness.usage(), used(10, 0, 206))


def days_begin_at_midnight_in_their_zone(make: MakeStore) -> None:
    """To the microsecond, also where a day has 23 hours."""
    zones = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Pacific/Apia")
    for zone in zones:
        limits = [("usage", f"acme\t\t{name}", Meter(zone)) for name in ("a", "b")]
        harness = AccountHarness(make, limits)
        days = [_day(day, zone, month, 2027) for month, day in ((3, 13), (3, 14), (3, 15), (3, 27), (3, 28), (3, 29))]
        for i, start in enumerate(days):
            moment = Fraction(start, SECOND) - (Fraction(1_800_000_000) + Fraction(harness.clock.now(), SECOND))
            harness.clock.advance(moment - MICROSECOND)
            harness.hold([1, 0], f"{i} before", lease=1)
            harness.clock.advance(MICROSECOND)
            harness.hold([10, 100 * (i + 1)], f"{i} after", lease=1)
        expected = {(name, day): 0 for name in "ab" for day in (_day(12, zone, 3), *days, _day(26, zone, 3))}
        for i, day in enumerate(days):
            before = max(known for _, known in expected if known < day)
            expected["a", before] += 1
            expected["a", day] += 10
            expected["b", day] += 100 * (i + 1)
        rows = {(row.key[-1], row.start): row.amount for row in harness.usage()}
        expect(f"usage in {zone}", rows, {key: amount for key, amount in expected.items() if amount})


def usage_is_read_by_root_and_span(make: MakeStore) -> None:
    first = AccountHarness(
        make, [METER, ("usage", "acme/search/planner\tweb\ttokens", Meter()), ("usd", "acme", Budget(9))]
    )
    other = AccountHarness(lambda _: first.store, [("usage", "globex/search\t\tusd", Meter())], "globex")
    other.clock = first.clock
    today = _today(first)
    starts = [today + i * 86_400 * SECOND for i in range(3)]
    for i in range(3):
        first.hold([i + 1, 10, 1], f"{i}")
        other.hold([100], f"{i}")
        first.clock.advance(86_400)
    acme = sorted(
        UsageRow("acme", key, start, amount)
        for i, start in enumerate(starts)
        for key, amount in ((METER[1], i + 1), (first.limits[1][1], 10))
    )
    globex = [UsageRow("globex", "globex/search\t\tusd", start, 100) for start in starts]
    expect("of one root", first.usage("acme"), acme)
    expect("of another", first.usage("globex"), globex)
    expect("of all", first.usage(), sorted([*acme, *globex]))
    expect("of one that is unknown", first.usage("initech"), [])
    expect("under another name", first.accounts.read_usage("usd", 0, LARGEST), [])
    for begin, end in ((0, 1), (1, 2), (0, 2), (1, 3), (2, 2)):
        span = starts[begin], starts[end] if end < 3 else LARGEST
        within = [row for row in acme if span[0] <= row.start < span[1]]
        expect(f"from day {begin} up to {end}", first.usage("acme", *span), within)
    expect("a microsecond after a day's start", first.usage("globex", starts[1] + 1), globex[2:])
    expect("up to a microsecond after one", first.usage("globex", starts[1], starts[1] + 1), globex[1:2])


def usage_is_kept_for_13_months(make: MakeStore) -> None:
    harness = AccountHarness(make, [METER])
    today = _today(harness)
    gaps = (0, 1, 30, 200, 366, 396)
    for before, day in pairwise((0, *gaps)):
        harness.clock.advance((day - before) * 86_400)
        harness.hold([day + 1], f"{day}", keep=1)
    starts = {row.start: row.amount for row in harness.usage()}
    expect("usage", starts, {today + day * 86_400 * SECOND: day + 1 for day in gaps})


# The async twins ------------------------------------------------------------------------------------------------------


def the_async_twins_read_the_same(make: MakeStore) -> None:
    async def read() -> None:
        harness = AccountHarness(make, [*LEVELS, *SLOTS])
        accounts, asks = harness.accounts, harness.asks(_costs(harness.limits, 3))
        held = await accounts.ahold(asks, LOW, HoldTerms("a", 60 * SECOND, False, 60 * SECOND, "note", "shape"))
        expect("ahold", (held.state, len(held.parts)), ("open", 1 + len(harness.limits)))
        expect("aread_hold", await accounts.aread_hold("accounts", "acme", "a"), harness.read("a"))
        expect("aread_hold of none", await accounts.aread_hold("accounts", "acme", "b"), None)
        expect("apeek_each", await accounts.apeek_each(asks, LOW), accounts.peek_each(asks, LOW))
        for root in ("acme", "globex", None):
            got = sorted(await accounts.aread_usage("usage", 0, LARGEST, root))
            expect(f"aread_usage of {root}", got, sorted(accounts.read_usage("usage", 0, LARGEST, root)))
        answer = await accounts.asettle(asks, LOW, "a", [1, *_costs(harness.limits, 2)])
        expect("asettle", answer, harness.find("a"))

    asyncio.run(read())


ACCOUNT_CASES: Final = (*cases_of(globals()), *ACCOUNT_WALKS)
