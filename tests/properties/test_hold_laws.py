"""Laws of holds, for any limit and any sequence of verbs and times.

The reference is `headgate.stores.reference_holds`.
"""

import random
from contextlib import suppress
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import (
    AllOf,
    Budget,
    Decision,
    Hold,
    Limit,
    Limiter,
    ManualClock,
    MemoryStore,
    SlidingWindow,
    Slots,
    TokenBucket,
)
from headgate.errors import HoldError
from headgate.limits.headroom import MOST, LeastHeadroom
from headgate.stores.base import Verb
from headgate.stores.harness import HoldHarness, MakeStore
from headgate.stores.hold_walks import compare_holds, random_asked, random_hold_steps, random_overlaps
from headgate.stores.holds import HoldStore
from headgate.stores.reference import BucketModel, WindowModel
from tests.support.limit_strategies import MICROSECOND, limits, numbers_of_any_size, spans_for

budgets = st.builds(Budget, st.integers(1, 50), st.sampled_from([None, "hour", "day", "week", "month", "year"]))
with_budgets: st.SearchStrategy[Limit] = st.one_of(limits, budgets, st.tuples(limits, budgets).map(AllOf))
chances = st.randoms(use_true_random=False)


def peeks(harness: HoldHarness) -> list[object]:
    """All that can be seen of a key."""
    costs = (1, max(harness.limit.capacity // 2, 1), harness.limit.capacity)
    return [harness.apply(Verb.PEEK, harness.limit, cost=cost) for cost in costs]


def use(harness: HoldHarness, data: st.DataObject) -> None:
    """Give a key a history, with holds that are open, ended and expired."""
    costs = st.one_of(st.just(harness.limit.capacity), numbers_of_any_size(1, harness.limit.capacity))
    for number in range(data.draw(st.integers(0, 6))):
        harness.clock.advance(data.draw(spans_for(harness.limit)) * MICROSECOND)
        cost = data.draw(costs)
        if data.draw(st.booleans()):
            harness.check(harness.limit, cost=cost)
        elif harness.hold(cost, f"before-{number}", release=data.draw(st.booleans())).state == "open":
            settled = data.draw(st.sampled_from([None, 0, cost, cost // 2, cost + 1]))
            if settled is not None:
                harness.settle(settled, f"before-{number}")


@given(chances)
def test_any_sequence_of_verbs_and_ends_equals_the_reference(make: MakeStore, chance: random.Random) -> None:
    asked = random_asked(chance)
    compare_holds(make, asked, random_hold_steps(chance, asked, chance.randint(1, 25)))


@given(chances)
def test_overlapping_holds_equal_the_reference(make: MakeStore, chance: random.Random) -> None:
    bucket = BucketModel(chance.choice((20, 40, 100)), Fraction(1), Fraction(1))
    compare_holds(make, [[bucket]], random_overlaps(chance, chance.randint(1, 40)))


@settings(max_examples=settings().max_examples // 4)
@given(chances)
def test_beyond_the_bounds_no_more_is_given_back_than_the_reference_has(make: MakeStore, chance: random.Random) -> None:
    model = BucketModel(100, Fraction(chance.choice((1, 20))), Fraction(1))
    asked = [chance.choice(([model], [WindowModel(100, Fraction(10))], [model, WindowModel(200, Fraction(60))]))]
    compare_holds(make, asked, random_hold_steps(chance, asked, 70, ids=60))


def most_in(part: Limit, begin: int, end: int) -> Fraction | None:
    """The most that passes from one moment to another; None if the limit says nothing of such a span."""
    if isinstance(part, TokenBucket):
        _, refill, per = part.fields()
        return part.capacity + refill / per * (end - begin) / 10**6
    assert isinstance(part, SlidingWindow)
    return Fraction(part.capacity) if end - begin < part.integers()[1] else None


@given(st.data())
def test_no_span_passes_more_than_its_limits(make: MakeStore, data: st.DataObject) -> None:
    """A hold counts when it was made, with what it was settled with, or 0 if it was released."""
    limit = data.draw(limits)
    harness = HoldHarness(make, limit)
    costs = st.one_of(st.just(limit.capacity), numbers_of_any_size(1, limit.capacity))
    passed: list[tuple[int, str]] = []
    counted: dict[str, int] = {}
    for number in range(data.draw(st.integers(1, 20))):
        harness.clock.advance(data.draw(spans_for(limit)) * MICROSECOND)
        cost, hold_id = data.draw(costs), str(number)
        verb = data.draw(st.sampled_from(["hold", "hold", "check", "settle"]))
        if verb == "settle" and counted:
            hold_id = data.draw(st.sampled_from(sorted(counted)))
            actual = data.draw(st.one_of(st.just(0), st.integers(0, counted[hold_id])))
            with suppress(HoldError):  # it was settled, or is a check
                counted[hold_id] = harness.settle(actual, hold_id).costs[0]
        elif verb == "hold" and harness.hold(cost, hold_id, 10**9, keep=10**9).state == "open":
            passed.append((harness.clock.now(), hold_id))
            counted[hold_id] = cost
        elif verb == "check" and harness.check(limit, cost=cost):
            passed.append((harness.clock.now(), f"check {hold_id}"))
            counted[f"check {hold_id}"] = cost
    for part in limit.parts:
        for first, (begin, _) in enumerate(passed):
            total = 0
            for end, hold_id in passed[first:]:
                total += counted[hold_id]
                most = most_in(part, begin, end)
                assert most is None or total <= most


@given(with_budgets, st.data())
def test_a_denial_changes_nothing(make: MakeStore, limit: Limit, data: st.DataObject) -> None:
    harness = HoldHarness(make, limit)
    use(harness, data)
    before = peeks(harness)
    cost = data.draw(st.one_of(st.just(limit.capacity), numbers_of_any_size(1, limit.capacity)))
    assert harness.hold(limit.capacity + 1).state == "denied"
    assert peeks(harness) == before
    if harness.hold(cost).state == "open":
        before = peeks(harness)
        extended = harness.extend(limit.capacity + cost, lease=100)
        assert not extended.decision
        assert (extended.costs, extended.left) == ((cost,), 60_000_000)
    assert peeks(harness) == before


@given(with_budgets, st.data())
def test_a_hold_that_is_cancelled_at_once_is_nothing(make: MakeStore, limit: Limit, data: st.DataObject) -> None:
    harness = HoldHarness(make, limit)
    use(harness, data)
    before = peeks(harness)
    if harness.hold(data.draw(numbers_of_any_size(1, limit.capacity))).state == "open":
        for more in data.draw(st.lists(numbers_of_any_size(1, limit.capacity), max_size=3)):
            harness.extend(more)
        harness.cancel()
    assert peeks(harness) == before


@given(with_budgets, st.data())
def test_a_hold_that_is_settled_at_once_is_a_charge(make: MakeStore, limit: Limit, data: st.DataObject) -> None:
    harness = HoldHarness(make, limit)
    charged = HoldHarness(make, limit)
    for span, cost in data.draw(
        st.lists(st.tuples(spans_for(limit), numbers_of_any_size(1, limit.capacity)), max_size=5)
    ):
        for one in (harness, charged):
            one.clock.advance(span * MICROSECOND)
            one.check(limit, cost=cost)
    actual = data.draw(numbers_of_any_size(1, 2 * limit.capacity))
    if harness.hold(data.draw(numbers_of_any_size(1, limit.capacity))).state == "open":
        assert harness.settle(actual).decision == charged.apply(Verb.CHARGE, limit, cost=actual)
    for span in data.draw(st.lists(spans_for(limit), max_size=3)):
        for one in (harness, charged):
            one.clock.advance(span * MICROSECOND)
        assert peeks(harness) == peeks(charged)


@given(st.integers(1, 4), st.data())
def test_no_slot_is_lost_or_doubled(make: MakeStore, count: int, data: st.DataObject) -> None:
    harness = HoldHarness(make, AllOf([Slots(count), Budget(10**6)]) if data.draw(st.booleans()) else Slots(count))
    ends: dict[str, int] = {}
    for number in range(data.draw(st.integers(1, 30))):
        harness.clock.advance(
            data.draw(st.sampled_from([Fraction(0), Fraction(1), Fraction(2), 5 - MICROSECOND, Fraction(5)]))
        )
        now = harness.clock.now()
        free = count - len([end for end in ends.values() if end > now])
        verb = data.draw(st.sampled_from(["hold", "hold", "settle", "extend", "check"]))
        hold_id = data.draw(st.sampled_from([str(number), *ends]))
        lease = data.draw(st.integers(0, 6))
        if verb == "hold" and hold_id not in ends:
            granted = harness.hold(1, hold_id, max(lease, 1), keep=10**6).state == "open"
            assert granted == (free > 0)
            if granted:
                ends[hold_id] = now + max(lease, 1) * 10**6
        elif verb == "check":
            assert bool(harness.check(harness.limit)) == (free > 0)
        elif hold_id in ends and verb == "settle":
            if harness.find(hold_id).state in ("open", "expired"):
                harness.settle(1, hold_id)
            ends[hold_id] = min(ends[hold_id], now)
        elif hold_id in ends and verb == "extend" and ends[hold_id] > now:
            harness.extend(None, lease, hold_id)
            ends[hold_id] = now if lease == 0 else max(ends[hold_id], now + lease * 10**6)
    under_way = [end for end in ends.values() if end > harness.clock.now()]
    decision = harness.apply(Verb.PEEK, Slots(count))
    assert decision.remaining == count - len(under_way)
    assert decision.reset_after == (max(under_way, default=harness.clock.now()) - harness.clock.now()) / 1e6


# Handles --------------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["10/10 seconds", "7/3 seconds", "5 per 10 seconds", "20/calendar hour", "3 in flight"]), chances
)
def test_a_hold_that_nobody_knows_by_its_id_counts_like_one_with_an_id(limit: str, chance: random.Random) -> None:
    """In memory those take a shorter way."""
    clock = ManualClock()
    plain, named = [Limiter(limit, store=MemoryStore(clock=clock)) for _ in range(2)]
    handles: list[tuple[Hold, Hold]] = []
    for number in range(80):
        clock.advance(chance.choice((0, 0, Fraction(1, 3), 1, 5, 20)))
        verb, cost = chance.choice(("hold", "hold", "settle", "settle", "cancel", "check")), chance.randint(1, 8)
        if verb == "hold":
            lease = chance.choice((15, 1000))
            made = plain.hold("a", cost, lease=lease), named.hold("a", cost, lease=lease, hold_id=f"hold-{number}")
            assert fields(made[0].decision) == fields(made[1].decision)
            handles += [made] if made[0] else []
        elif verb == "check":
            assert fields(plain.peek("a")) == fields(named.peek("a"))
            if limit != "3 in flight":
                assert fields(plain.check("a", cost)) == fields(named.check("a", cost))
        elif handles:
            one, other = handles.pop(chance.randrange(len(handles)))
            ended = [hold.cancel() if verb == "cancel" else hold.settle(cost) for hold in (one, other)]
            assert fields(ended[0]) == fields(ended[1])
            assert one.state == other.state


def fields(decision: Decision) -> tuple[object, ...]:
    return decision.outcome, decision.left, decision.retry_after, decision.reset_after


# Headrooms ------------------------------------------------------------------------------------------------------------


class AllHeadrooms:
    """Every headroom that was ever seen, and where each hold comes in."""

    def __init__(self) -> None:
        self.rooms: list[int] = []
        self.begins: list[int] = []

    def add(self, room: int) -> None:
        self.begins.append(len(self.rooms))
        self.rooms.append(room)

    def least(self, serial: int) -> int:
        return min(self.rooms[self.begins[serial - 1] :])

    def give_back(self, serial: int, given: int) -> None:
        for i in range(self.begins[serial - 1], len(self.rooms)):
            self.rooms[i] -= given


moves = st.tuples(
    st.sampled_from(["hold", "hold", "spend", "elapse", "settle"]), st.integers(1, 20), st.integers(0, 99)
)


@given(st.lists(moves, max_size=120))
def test_the_least_headrooms_are_those_of_all_that_were_seen(steps: list[tuple[str, int, int]]) -> None:
    """A bucket by its headroom: exact for as many open holds as there are entries, and never more beyond."""
    kept, seen, room, most_open = LeastHeadroom(), AllHeadrooms(), 0, 0
    held: dict[int, int] = {}
    for move, amount, choice in steps:
        if move == "elapse":
            room = max(room - amount, 0)
            continue
        kept.see(room)
        seen.rooms.append(room)
        if move in ("hold", "spend"):
            room += amount
        if move == "hold":
            held[kept.add(room)] = amount
            seen.add(room)
        elif move == "settle" and held:
            serial = sorted(held)[choice % len(held)]
            least = kept.least(serial)
            given_back = min(amount, held.pop(serial), least)
            lone = kept.close_lone(serial, room) if choice % 2 else -1
            if lone < 0:
                if given_back:
                    kept.give_back(serial, given_back)
                kept.close(serial)
            else:
                assert lone == least
            if given_back:
                seen.give_back(serial, given_back)
                room -= given_back
        most_open = max(most_open, len(held))
        assert kept.size <= min(MOST, len(held)), "entries without open holds are dropped"
        assert (kept.top is None) == (kept.size == 0)
        for serial in held:
            least, most = kept.least(serial), max(seen.least(serial), 0)
            assert least <= most
            if most_open <= MOST:
                assert least == most


@given(st.integers(1, 3), st.integers(1, 10**6))
def test_beyond_the_bound_little_is_lost(base: int, cost: int) -> None:
    """The two entries that are joined are the closest, so that even a thousand holds of the same cost get most back."""
    kept = LeastHeadroom()
    for number in range(1, 1001):
        assert kept.add(base * cost * number) == number
    assert kept.least(1000) >= base * cost * 1000 // 2
    assert all(kept.least(number) <= base * cost * number for number in range(1, 1001))


def test_the_stores_can_hold(make: MakeStore) -> None:
    assert isinstance(make(ManualClock()), HoldStore)
