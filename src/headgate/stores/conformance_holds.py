"""The cases of the conformance suite for stores that can hold."""

from fractions import Fraction
from typing import Final

from headgate.errors import UnknownHold
from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.decision import Limit
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import TokenBucket, per_day, per_minute, per_second
from headgate.stores.base import Ask, Verb
from headgate.stores.harness import MICROSECOND, SECOND, HoldHarness, MakeStore, NotConforming, cases_of, expect
from headgate.stores.hold_walks import WALKS, unsettled
from headgate.stores.holds import HoldTerms, ListedHold
from headgate.stores.reference import LOW

COSTS: Final[tuple[Limit, ...]] = (
    per_day(10),
    SlidingWindow(10, 86_400),
    Budget(10, "month"),
    Budget(10),
    AllOf([per_day(10), SlidingWindow(20, 60)]),
    AllOf([per_day(10), Budget(20, "day"), Slots(3)]),
)
"""Each has 10 to spend, and gets nothing back for a while."""


# Costs ----------------------------------------------------------------------------------------------------------------


def a_refilled_bucket_gives_nothing_back(make: MakeStore) -> None:
    harness = HoldHarness(make, per_minute(60, burst=10))
    harness.hold(5)
    harness.clock.advance(5)
    expect("the bucket is full again, and 3 pass", bool(harness.check(harness.limit, cost=3)), True)
    harness.cancel()
    expect("left", harness.left(), 7)
    expect("passed of 10 more", harness.passed(harness.limit, 10), 7)


def a_bucket_gives_back_what_it_would_have_had(make: MakeStore) -> None:
    harness = HoldHarness(make, per_second(1, burst=10))
    lefts = []
    for step in (
        lambda: harness.hold(2, "a"),
        lambda: harness.hold(3, "b"),
        lambda: harness.clock.advance(1),
        lambda: harness.check(harness.limit, cost=4),
        lambda: harness.cancel("b"),
        lambda: harness.cancel("a"),
    ):
        step()
        lefts.append(harness.left())
    expect("left after each step", lefts, [8, 5, 6, 2, 5, 6])


def a_coarse_tick_gives_nothing_back_early(make: MakeStore) -> None:
    """A bucket of a thousand million, at one in 30 days, counts whole seconds."""
    harness = HoldHarness(make, TokenBucket(10**9, 1, 30 * 86_400))
    harness.hold(1, lease=10**8)
    harness.clock.advance(30 * 86_400 - Fraction(1, 10))
    expect("nearly full", bool(harness.check(harness.limit, cost=10**9 - 1)), True)
    harness.clock.advance(Fraction(1, 10))
    harness.cancel()
    expect("the last one", bool(harness.check(harness.limit)), True)
    wait = harness.check(harness.limit).retry_us or 0
    expect(f"within a second of 30 days: {wait} microseconds", wait >= 30 * 86_400 * SECOND - SECOND // 10, True)


def a_window_whose_last_hold_is_cancelled_is_empty(make: MakeStore) -> None:
    harness = HoldHarness(make, SlidingWindow(10, 1))
    harness.check(harness.limit, cost=5)
    harness.clock.advance(0.5)
    harness.hold(3)
    harness.clock.advance(0.5)
    expect("left when the first are out of the window", harness.left(), 7)
    empty = harness.cancel().decision
    expect("emptied", (empty.remaining, empty.reset_after), (10, 0.0))
    expect("passed then", harness.passed(harness.limit, 20), 10)


def a_hold_that_is_cancelled_is_nothing(make: MakeStore) -> None:
    for limit in COSTS:
        harness = HoldHarness(make, limit)
        harness.check(limit, cost=3)
        before = [harness.apply(Verb.PEEK, limit, cost=cost) for cost in (1, 7, 8)]
        held = harness.hold(5)
        expect(
            f"held on {limit}", (bool(held.decision), held.state, held.decision.remaining >= 0), (True, "open", True)
        )
        answer = harness.cancel()
        expect("cancelled", (answer.state, answer.costs, answer.left), ("cancelled", (0,), 0))
        after = [harness.apply(Verb.PEEK, limit, cost=cost) for cost in (1, 7, 8)]
        expect(f"{limit} after a hold that was cancelled", after, before)


def a_hold_that_is_settled_is_a_charge(make: MakeStore) -> None:
    for limit in COSTS:
        for actual in (0, 1, 5, 7, 10, 12):
            harness, charged = HoldHarness(make, limit), HoldHarness(make, limit)
            harness.hold(5)
            answer = harness.settle(actual)
            expect("settled", (answer.state, answer.costs, answer.left), ("settled", (actual,), 0))
            if actual:
                expect(f"the decision on {limit}", answer.decision, charged.apply(Verb.CHARGE, limit, cost=actual))
            expect(
                f"{limit} after 5 were held and {actual} settled",
                [harness.apply(Verb.PEEK, limit, cost=cost) for cost in (1, 5, 10)],
                [charged.apply(Verb.PEEK, limit, cost=cost) for cost in (1, 5, 10)],
            )


def a_hold_is_settled_with_what_it_has_taken(make: MakeStore) -> None:
    harness = HoldHarness(make, per_day(10))
    harness.hold(4)
    answer = harness.settle()
    expect("settled without a cost", (answer.state, answer.costs, harness.left()), ("settled", (4,), 6))


def a_denied_hold_changes_nothing(make: MakeStore) -> None:
    for limit in COSTS:
        harness = HoldHarness(make, limit)
        harness.check(limit, cost=7)
        before = harness.apply(Verb.PEEK, limit)
        answer = harness.hold(4)
        expect(f"4 of 3 on {limit}", (bool(answer.decision), answer.state, answer.left), (False, "denied", 0))
        expect("after the denial", harness.apply(Verb.PEEK, limit), before)
        harness.refused("settling what was denied", harness.settle, UnknownHold)
        expect("listed", harness.holds.list_holds("", "key", 10), [])
        expect("the same id with less", harness.hold(3).state, "open")


def a_denied_extension_changes_nothing(make: MakeStore) -> None:
    for limit in COSTS:
        harness = HoldHarness(make, limit)
        harness.hold(5, lease=30)
        harness.clock.advance(10)
        before = harness.apply(Verb.PEEK, limit)
        answer = harness.extend(11, lease=60)
        expect(
            f"6 more on {limit}",
            (bool(answer.decision), answer.state, answer.costs, answer.left),
            (False, "open", (5,), 20 * SECOND),
        )
        expect("after the denial", harness.apply(Verb.PEEK, limit), before)


def an_extension_takes_what_it_adds(make: MakeStore) -> None:
    for limit in COSTS:
        harness = HoldHarness(make, limit)
        harness.hold(4)
        for cost, counted in ((2, 4), (6, 6), (10, 10)):
            answer = harness.extend(cost)
            expect(f"{cost} in all on {limit}", (answer.state, answer.costs), ("open", (counted,)))
            expect("the decision", bool(answer.decision), True)
            expect("one more than is left", bool(harness.apply(Verb.PEEK, limit, cost=11 - counted)), False)
        harness.settle(3)
        expect(f"passed on {limit} after 3 of 10 were settled", harness.passed(limit, 20), 7)


def a_denied_extension_says_when_it_passes(make: MakeStore) -> None:
    """The slot that a hold has itself is no reason to wait."""
    harness = HoldHarness(make, AllOf([per_second(1, burst=10), Slots(1)]))
    harness.hold(8)
    denied = harness.extend(11).decision
    expect("1 more than there is", (bool(denied), denied.retry_after, denied.bound), (False, 1.0, 0))
    harness.clock.advance(1)
    expect("a second later", bool(harness.extend(11).decision), True)


def budgets_keep_what_is_used_when_the_amount_changes(make: MakeStore) -> None:
    harness = HoldHarness(make, Budget(10, "month"))
    harness.hold(8)
    harness.limit = Budget(20, "month")
    expect("left of the larger amount", harness.left(), 12)
    harness.settle(3)
    expect("left when 3 of 8 were settled", harness.left(), 17)
    harness.limit = Budget(2, "month")
    expect("left of less than is used", (harness.left(), bool(harness.check(harness.limit))), (0, False))


def a_settle_belongs_to_the_period_of_its_hold(make: MakeStore) -> None:
    for actual in (0, 5, 9):
        harness = HoldHarness(make, Budget(10, "hour"))
        harness.hold(5, lease=10_000)
        harness.clock.advance(3600)
        harness.check(harness.limit, cost=2)
        harness.settle(actual)
        expect(f"left in the next period when {actual} of 5 were settled", harness.left(), 8)


def an_extension_belongs_to_its_own_period(make: MakeStore) -> None:
    harness = HoldHarness(make, Budget(10, "hour"))
    harness.hold(5, lease=10_000)
    harness.clock.advance(3600)
    harness.extend(8)
    expect("left after 3 more in the next period", harness.left(), 7)
    harness.settle(6)
    expect("the newest are given back first", harness.left(), 9)


# Slots ----------------------------------------------------------------------------------------------------------------


def a_slot_is_free_exactly_when_its_lease_ends(make: MakeStore) -> None:
    harness = HoldHarness(make, Slots(2))
    for hold_id, lease in (("a", 20), ("b", 10)):
        expect("a free slot", harness.hold(1, hold_id, lease).state, "open")
    denied = harness.hold(1, "c")
    expect("no slot", (denied.state, denied.decision.retry_after, denied.decision.reset_after), ("denied", 10.0, 20.0))
    harness.clock.advance(10 - MICROSECOND)
    expect("a microsecond before the end", harness.hold(1, "c").state, "denied")
    harness.clock.advance(MICROSECOND)
    expect("at the end", [harness.hold(1, "c").state, harness.hold(1, "d").state], ["open", "denied"])


def an_ended_lease_never_counts(make: MakeStore) -> None:
    """Whether or not anything has looked at it since."""
    for looked_at in (False, True):
        harness = HoldHarness(make, Slots(3))
        for number in range(3):
            harness.hold(1, str(number), lease=10)
        harness.clock.advance(10)
        if looked_at:
            expect("found", [harness.find(str(number)).state for number in range(3)], ["expired"] * 3)
        expect("free again", [harness.hold(1, f"n{i}").state for i in range(4)], ["open"] * 3 + ["denied"])
        harness.settle(1, "0")
        harness.cancel("1")
        expect("after late verbs", (harness.left(), harness.hold(1, "more").state), (0, "denied"))


def a_slot_is_free_when_its_hold_is_settled(make: MakeStore) -> None:
    harness = HoldHarness(make, Slots(1))
    for number, end in enumerate((harness.settle, harness.cancel) * 3):
        expect("taken", harness.hold(1, str(number)).state, "open")
        expect("no other", harness.hold(1, "other").state, "denied")
        if end == harness.settle:
            harness.settle(1, str(number))
        else:
            harness.cancel(str(number))
        expect("free", harness.apply(Verb.PEEK, harness.limit).reset_after, 0.0)


def a_check_without_a_free_slot_is_denied_and_takes_none(make: MakeStore) -> None:
    harness = HoldHarness(make, AllOf([per_day(10), Slots(1)]))
    expect("checks take no slot", harness.passed(harness.limit, 3), 3)
    harness.hold(1)
    denied = harness.check(harness.limit)
    expect("while none is free", (bool(denied), denied.limit, denied.retry_after), (False, Slots(1), 60.0))
    harness.settle()
    expect("left", harness.passed(harness.limit, 10), 6)


def slots_and_costs_are_taken_together_or_not_at_all(make: MakeStore) -> None:
    harness = HoldHarness(make, AllOf([per_day(10), Slots(2)]))
    expect("too much", harness.hold(11, "a").state, "denied")
    expect("it took no slot", [harness.hold(1, hold_id).state for hold_id in "bcd"], ["open", "open", "denied"])
    harness.cancel("b")
    expect("the denial took no cost", harness.check(harness.limit, cost=9).outcome.value, "warn")
    several = [Ask("team", "t", per_day(3), 1), Ask("agent", "a", Slots(1), 1)]
    terms = [HoldTerms(hold_id, SECOND, False, SECOND) for hold_id in "ab"]
    states = [harness.holds.hold(several, LOW, one).state for one in terms]
    expect("two keys at once", states, ["open", "denied"])
    expect("left for the team", harness.apply(Verb.PEEK, per_day(3), "t", 1, "team").remaining, 2)


def a_longer_lease_keeps_the_slot(make: MakeStore) -> None:
    harness = HoldHarness(make, Slots(1))
    harness.hold(1, lease=10)
    harness.clock.advance(9)
    expect("extended", (harness.extend(lease=10).left, harness.extend(lease=5).left), (10 * SECOND, 10 * SECOND))
    harness.clock.advance(10 - MICROSECOND)
    expect("before the new end", harness.hold(1, "other").state, "denied")
    expect("ended by hand", (harness.extend(lease=0).state, harness.find().left), ("expired", 0))
    expect("at once", harness.hold(1, "other").state, "open")


def fewer_slots_wait_for_all_that_are_too_many(make: MakeStore) -> None:
    harness = HoldHarness(make, Slots(4))
    for lease in (40, 10, 30, 20):
        harness.hold(1, str(lease), lease)
    harness.limit = Slots(2)
    denied = harness.apply(Verb.PEEK, harness.limit)
    expect("four of two", (denied.remaining, denied.retry_after, denied.reset_after), (0, 30.0, 40.0))
    harness.cancel("40")
    denied = harness.apply(Verb.PEEK, harness.limit)
    expect("three of two", (denied.remaining, denied.retry_after, denied.reset_after), (0, 20.0, 30.0))


# What becomes of a hold -----------------------------------------------------------------------------------------------


def costs_stay_or_come_back_when_the_lease_ends(make: MakeStore) -> None:
    for limit in COSTS:
        for release in (False, True):
            harness = HoldHarness(make, limit)
            harness.hold(5, lease=10, release=release)
            harness.clock.advance(10 - MICROSECOND)
            expect("before the end", harness.find().summary, ("open", (5,), 1))
            again = harness.hold(5, lease=10, release=not release)
            expect("its terms", (harness.find().release, again.release, again.repeated), (release, release, True))
            harness.clock.advance(MICROSECOND)
            expect(f"passed on {limit} with release={release}", harness.passed(limit, 20), 10 if release else 5)
            expect("expired", harness.find().summary, ("expired", (5,), 0))


def an_expired_hold_can_be_settled_late(make: MakeStore) -> None:
    for limit in COSTS:
        for release in (False, True):
            for actual in (0, 3, 7):
                harness = HoldHarness(make, limit)
                harness.hold(5, lease=10, release=release)
                harness.clock.advance(30)
                answer = harness.settle(actual)
                expect("settled late", answer.summary, ("settled", (actual,), 0))
                expect(f"passed on {limit} with release={release}", harness.passed(limit, 20), 10 - actual)
                harness.clock.advance(60 - MICROSECOND)
                expect("remembered from then on", harness.find().state, "settled")
                harness.clock.advance(MICROSECOND)
                harness.refused("a verb on what is forgotten", harness.settle, UnknownHold)


def every_verb_can_be_repeated(make: MakeStore) -> None:
    for limit in COSTS:
        harness = HoldHarness(make, limit)
        for _ in range(3):
            expect(f"held on {limit}", harness.hold(5).summary, ("open", (5,), 60 * SECOND))
        expect("passes", bool(harness.apply(Verb.PEEK, limit, cost=5)), True)
        for _ in range(3):
            expect("extended", harness.extend(6, lease=70).summary, ("open", (6,), 70 * SECOND))
        first = harness.settle(4)
        for _ in range(3):
            expect("settled", harness.settle(4), first)
            expect("settled as before", harness.settle(), first)
            expect("found", harness.find(), first)
        expect("held once more", harness.hold(5).summary, first.summary)
        harness.hold(0, "none")
        done = harness.cancel("none")
        expect("cancelled again", [harness.cancel("none"), harness.settle(0, "none")], [done, done])
        expect("passed after it", harness.passed(limit, 20), 6)


def other_costs_are_refused(make: MakeStore) -> None:
    for limit in COSTS:
        harness = HoldHarness(make, limit)
        harness.hold(5)
        harness.refused("holding again with another cost", lambda: harness.hold(4))  # noqa: B023
        harness.settle(4)
        harness.refused("settling with another cost", lambda: harness.settle(5))  # noqa: B023
        harness.refused("cancelling what is settled", harness.cancel)
        harness.refused("extending what is settled", lambda: harness.extend(6))  # noqa: B023
        harness.hold(3, "c")
        harness.cancel("c")
        harness.refused("settling what is cancelled", lambda: harness.settle(3, "c"))  # noqa: B023
        harness.refused("extending what is cancelled", lambda: harness.extend(6, 10, "c"))  # noqa: B023


def a_hold_that_has_ended_is_not_extended(make: MakeStore) -> None:
    harness = HoldHarness(make, AllOf([per_day(10), Slots(1)]))
    harness.hold(5, lease=10)
    harness.clock.advance(10)
    harness.refused("more", lambda: harness.extend(6))
    harness.refused("longer", lambda: harness.extend(lease=10))


def unknown_holds_are_refused(make: MakeStore) -> None:
    harness = HoldHarness(make, per_day(10))
    harness.hold(5)
    other_name, other_key = [Ask("other", "key", harness.limit, 1)], [Ask("", "other", harness.limit, 1)]
    for what, asks, hold_id in (
        ("an unknown id", harness.asks(), "unknown"),
        ("the id of another name", other_name, "id"),
        ("the id of another key", other_key, "id"),
    ):
        for call in (
            lambda: harness.holds.settle(asks, LOW, hold_id, [1]),  # noqa: B023
            lambda: harness.holds.settle(asks, LOW, hold_id, [0], cancel=True),  # noqa: B023
            lambda: harness.holds.extend(asks, LOW, hold_id, [6], None),  # noqa: B023
            lambda: harness.holds.find_hold(asks, LOW, hold_id),  # noqa: B023
        ):
            harness.refused(what, call, UnknownHold)
    expect("the hold itself", harness.find().state, "open")


def an_id_can_be_used_again_when_its_hold_is_forgotten(make: MakeStore) -> None:
    harness = HoldHarness(make, per_day(10))
    harness.hold(5, lease=10, keep=20)
    harness.clock.advance(30 - MICROSECOND)
    harness.refused("the id with another cost", lambda: harness.hold(1))
    harness.clock.advance(MICROSECOND)
    expect("the id, anew", harness.hold(1).summary, ("open", (1,), 60 * SECOND))
    expect("left", harness.left(), 4)


def open_holds_are_listed_first(make: MakeStore) -> None:
    harness = HoldHarness(make, AllOf([per_day(100), Slots(10)]))
    for hold_id, lease in (("c", 30), ("a", 10), ("d", 40), ("b", 20)):
        harness.hold(1, hold_id, lease)
    harness.clock.advance(10)
    harness.settle(2, "d")
    listed = [
        ListedHold("b", "open", (1,), 10 * SECOND),
        ListedHold("c", "open", (1,), 20 * SECOND),
        ListedHold("a", "expired", (1,), 0),
    ]
    expect("listed", unsettled(harness.holds.list_holds("", "key", 10)), listed)
    for count in (1, 2, 3):
        expect(f"the first {count}", harness.holds.list_holds("", "key", count), listed[:count])
    expect("of another key", harness.holds.list_holds("", "other", 10), [])


def asks_to_hold_name_each_key_once(make: MakeStore) -> None:
    harness = HoldHarness(make, per_day(10))
    try:
        harness.holds.hold([*harness.asks(6), *harness.asks(6)], LOW, HoldTerms("id", SECOND, False, SECOND))
    except ValueError:
        expect("left", harness.left(), 10)
    else:
        raise NotConforming("asks that name a key twice: expected a ValueError, got none")


def a_lease_that_is_extended_takes_a_slot_that_was_forgotten(make: MakeStore) -> None:
    """A hold belongs to the key of its first ask, and outlives the count of another."""
    harness = HoldHarness(make, Slots(1))
    asks = [Ask("first", "key", per_day(10), 1), *harness.asks()]
    harness.holds.hold(asks, LOW, HoldTerms("id", 60 * SECOND, False, 0))
    harness.store.forget("", "key", harness.limit)
    expect("free once it is forgotten", harness.left(), 1)
    harness.holds.extend(asks, LOW, "id", None, 90 * SECOND)
    expect("free after the lease was extended", harness.left(), 0)


def forgetting_a_key_forgets_its_holds(make: MakeStore) -> None:
    harness = HoldHarness(make, AllOf([per_day(10), Slots(1)]))
    harness.hold(5, release=True)
    harness.store.forget("", "key", harness.limit)
    harness.refused("settling what is forgotten", harness.settle, UnknownHold)
    expect("anew", harness.hold(10).state, "open")
    harness.clock.advance(59)
    expect("still held", harness.hold(1, "other").state, "denied")


HOLD_CASES: Final = (*cases_of(globals()), *WALKS)
