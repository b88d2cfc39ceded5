"""The conformance suite of stores, for the stores here and for yours.

    import pytest
    from headgate.stores import conformance

    @pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)
    def test_my_store(case):
        case(lambda clock: MyStore(clock=clock))

Each case is called with a function that makes an empty store on the `ManualClock` it is given, and raises
`NotConforming` where the store is wrong. `HOLD_CASES` are those of stores that can hold, `ACCOUNT_CASES` those of
stores of accounts. `run` calls them all. Some compare the store with a slow model in exact fractions
(`headgate.stores.reference`, `headgate.stores.reference_holds`).
"""

import asyncio
import random
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.clock import ManualClock
from headgate.limits.decision import Decision, Limit, Outcome, Violation
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.token_bucket import per_day, per_minute, per_second
from headgate.limits.violations import Backoff
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.conformance_accounts import ACCOUNT_CASES as ACCOUNT_CASES
from headgate.stores.conformance_holds import HOLD_CASES as HOLD_CASES
from headgate.stores.harness import Case as Case
from headgate.stores.harness import MakeStore as MakeStore
from headgate.stores.harness import NotConforming as NotConforming
from headgate.stores.harness import StoreHarness as StoreHarness
from headgate.stores.harness import cases_of
from headgate.stores.harness import expect as expect
from headgate.stores.holds import AccountStore, HoldStore
from headgate.stores.reference import LOW, Model, ReferenceKey, random_models, random_steps


def a_new_key_is_full(make: MakeStore) -> None:
    harness = StoreHarness(make)
    decision = harness.check(per_minute(60))
    expect("the first request on 60", (decision.outcome, decision.remaining), (Outcome.ALLOW, 59))
    expect("its reset", decision.reset_after, 1.0)


def a_burst_of_capacity_passes_and_no_more(make: MakeStore) -> None:
    for limit in (per_day(100), SlidingWindow(100, 86_400), AllOf([per_day(100), SlidingWindow(120, 60)])):
        expect(f"passed of a burst on {limit}", StoreHarness(make).passed(limit, 250), 100)


def a_denial_spends_nothing(make: MakeStore) -> None:
    for limit in (per_minute(10), SlidingWindow(10, 60)):
        harness = StoreHarness(make)
        harness.check(limit, cost=7)
        for cost in (4, 10, 11, 10**15):
            expect(f"a cost of {cost} with 3 left", bool(harness.check(limit, cost=cost)), False)
        expect(f"left after denials on {limit}", harness.apply(Verb.PEEK, limit).remaining, 3)


def a_cost_above_the_capacity_never_passes(make: MakeStore) -> None:
    for limit in (per_minute(10), SlidingWindow(10, 60), BLOCKED):
        harness = StoreHarness(make)
        decision = harness.check(limit, cost=11)
        expect(f"11 on {limit}", (decision.outcome, decision.retry_after), (Outcome.DENY, None))
        expect("reset", harness.store.forget("", "key", limit), False)


def a_denial_holds_until_its_wait_is_over(make: MakeStore) -> None:
    for limit in (per_minute(7, burst=3), per_second(Fraction(10, 3), burst=2), SlidingWindow(3, 7)):
        harness = StoreHarness(make)
        harness.passed(limit, 5)
        wait = harness.check(limit).retry_after
        if not wait:
            raise NotConforming(f"the wait on {limit}: expected a time, got {wait!r}")
        harness.clock.advance(Fraction(str(wait)) - Fraction(1, 1_000_000))
        expect(f"one tick before the wait on {limit} is over", bool(harness.check(limit)), False)
        harness.clock.advance(Fraction(1, 1_000_000))
        expect(f"when the wait on {limit} is over", bool(harness.check(limit)), True)


def polling_loses_no_refill(make: MakeStore) -> None:
    harness = StoreHarness(make)
    passed = harness.passed(per_minute(90, burst=2), 3)
    for _ in range(6000):
        harness.clock.advance(0.1)
        passed += harness.passed(per_minute(90, burst=2), 2)
    expect("passed of 90 a minute with burst 2 in 600 s", passed, 902)


def a_step_back_neither_gives_nor_takes(make: MakeStore) -> None:
    for limit in (per_minute(60, burst=5), SlidingWindow(5, 5)):
        harness = StoreHarness(make)
        harness.passed(limit, 4)
        before = harness.apply(Verb.PEEK, limit).remaining
        harness.clock.step_back(0.9)
        expect(f"left on {limit} after the clock stepped back", harness.apply(Verb.PEEK, limit).remaining, before)
        harness.clock.advance(0.9)
        expect(f"left on {limit} when it has caught up", harness.apply(Verb.PEEK, limit).remaining, before)


def a_closed_period_is_not_reopened(make: MakeStore) -> None:
    for ahead in (10, 80_000):  # seconds after the end of the hour, up to a day
        harness, limit = StoreHarness(make), Budget(10, "hour")
        harness.check(limit, cost=10)
        harness.clock.advance(2600 + ahead)
        for number in range(10):  # a store may clean up meanwhile
            harness.check(limit, key=f"other {number}")
            harness.clock.advance(1)
        harness.clock.step_back(ahead + 15)
        expect(f"passed on {limit} after the clock stepped back into its hour", harness.passed(limit, 1), 0)


def refund_stops_at_the_capacity(make: MakeStore) -> None:
    for limit in (per_minute(10), SlidingWindow(10, 60)):
        harness = StoreHarness(make)
        harness.check(limit, cost=6)
        expect("left after a refund of 2", harness.apply(Verb.REFUND, limit, cost=2).remaining, 6)
        expect("left after a refund of 100", harness.apply(Verb.REFUND, limit, cost=100).remaining, 10)
        expect("passed after it", harness.passed(limit, 20), 10)


def charge_may_leave_a_debt(make: MakeStore) -> None:
    harness = StoreHarness(make)
    decision = harness.apply(Verb.CHARGE, per_minute(10), cost=25)
    expect("after 25 of 10 were charged", (bool(decision), decision.remaining), (False, 0))
    expect("the wait", decision.retry_after, 96.0)  # 15 of debt and the one asked for, at one in six seconds
    harness.clock.advance(96)
    expect("passed when the debt is paid", harness.passed(per_minute(10), 5), 1)


def forgetting_fills_up(make: MakeStore) -> None:
    harness = StoreHarness(make)
    limit = per_minute(10)
    expect("forgetting an unknown key", harness.store.forget("", "key", limit), False)
    harness.check(limit, cost=10)
    expect("forgetting a known one", harness.store.forget("", "key", limit), True)
    expect("passed after it", harness.passed(limit, 20), 10)


def keys_names_and_limits_are_apart(make: MakeStore) -> None:
    harness = StoreHarness(make)
    odd = ["", "a", "a:b", "b", "{a}", "a}", "\n", "\0", "ä", "a\N{COMBINING DIAERESIS}", "\U0001f600", "x" * 10_000]
    for key in odd:
        for name in ("", "a", "a:", ":b"):
            for limit in (per_day(1), per_day(1, burst=2), SlidingWindow(1, 60)):
                expect(f"the first of {name!r} {key!r}", bool(harness.check(limit, key, limit.capacity, name)), True)
                expect(f"the second of {name!r} {key!r}", bool(harness.check(limit, key, name=name)), False)


def several_limits_pass_together_or_not_at_all(make: MakeStore) -> None:
    harness = StoreHarness(make)
    both = AllOf([per_minute(100), per_minute(2, burst=2)])
    expect("passed", harness.passed(both, 10), 2)
    decision = harness.check(both)
    expect("the one that bound", (decision.bound, str(decision.limit)), (1, "2/minute"))
    harness.clock.advance(30)
    decision = harness.apply(Verb.PEEK, both)
    expect("after one came back", (bool(decision), decision.bound, decision.remaining), (True, 1, 1))


def several_keys_pass_together_or_not_at_all(make: MakeStore) -> None:
    team, agent = Ask("team", "t", per_minute(5), 2), Ask("agent", "a", SlidingWindow(3, 60), 1)
    for asks in ([team, agent], [agent, team]):
        harness = StoreHarness(make)
        outcomes = [bool(harness.store.apply(Verb.CHECK, asks, LOW)) for _ in range(4)]
        expect("two keys at once", outcomes, [True, True, False, False])
        expect("left for the team", harness.apply(Verb.PEEK, team.limit, "t", 1, "team").remaining, 1)
        expect("left for the agent", harness.apply(Verb.PEEK, agent.limit, "a", 1, "agent").remaining, 1)
        denied = harness.store.apply(Verb.CHECK, asks, LOW)
        expect("the one that bound", (denied.bound, denied.limit), (asks.index(team), team.limit))


def unlimited_and_blocked_count_nothing(make: MakeStore) -> None:
    harness = StoreHarness(make)
    expect("passed of unlimited", harness.passed(UNLIMITED, 100, cost=10**12), 100)
    expect("passed of blocked", harness.passed(BLOCKED, 100), 0)
    expect("forgetting", harness.store.forget("", "key", UNLIMITED), False)


def warnings_begin_below_a_fifth(make: MakeStore) -> None:
    for limit in (per_day(10), SlidingWindow(10, 60)):
        harness = StoreHarness(make)
        outcomes = [harness.check(limit).outcome.value[0] for _ in range(12)]
        expect(f"outcomes on {limit}", "".join(outcomes), "aaaaaaaawwdd")


def a_request_id_is_counted_once(make: MakeStore) -> None:
    harness, limit, other = StoreHarness(make), per_day(60), per_day(50)

    def apply(verb: Verb, cost: int = 1, key: str = "a", name: str = "", limit: Limit = limit) -> Decision:
        return harness.store.apply(verb, [Ask(name, key, limit, cost)], LOW, None, "id")

    for verb, left in ((Verb.CHECK, 59), (Verb.CHARGE, 57), (Verb.REFUND, 58)):
        cost = 2 if verb is Verb.CHARGE else 1
        first = apply(verb, cost)
        expect(f"left after {verb.value}", first.remaining, left)
        expect(f"{verb.value} again", apply(verb, cost), first)
    for what, decision, left in (
        ("another key", apply(Verb.CHECK, key="b"), 59),
        ("another name", apply(Verb.CHECK, name="other"), 59),
        ("another limit", apply(Verb.CHECK, limit=other), 49),
    ):
        expect(f"the same id under {what}", (decision.limit.capacity, decision.remaining), (left + 1, left))
    denied = apply(Verb.CHECK, 50, limit=other)
    expect("the same id with another cost", denied.remaining, 49)
    expect("a peek", apply(Verb.PEEK).remaining, 58)
    harness.clock.advance(61)
    expect("a minute later", apply(Verb.CHECK).remaining, 57)


def a_denied_request_id_is_decided_again(make: MakeStore) -> None:
    harness = StoreHarness(make)
    ask = [Ask("", "a", per_minute(1), 1)]
    passed = [bool(harness.store.apply(Verb.CHECK, ask, LOW, None, request_id)) for request_id in ("1", "2", "2")]
    harness.clock.advance(60)
    passed.append(bool(harness.store.apply(Verb.CHECK, ask, LOW, None, "2")))
    expect("passed", passed, [True, False, False, True])


def threads_are_counted_exactly(make: MakeStore) -> None:
    for limit in (per_day(50), SlidingWindow(50, 3600)):
        harness = StoreHarness(make)
        start = threading.Barrier(8)
        passed: list[int] = []

        def hammer(limit: Limit = limit, harness: StoreHarness = harness, start: threading.Barrier = start) -> None:
            start.wait()
            passed.append(harness.passed(limit, 20))  # noqa: B023

        threads = [threading.Thread(target=hammer) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expect(f"passed of 8 threads on {limit}", sum(passed), 50)


def a_denial_is_recorded_in_the_same_step(make: MakeStore) -> None:
    harness, limit = StoreHarness(make), per_minute(2)
    offence = Offence("agents", "a", Backoff())
    decisions = [harness.store.apply(Verb.CHECK, [Ask("", "a", limit, 1)], LOW, offence) for _ in range(8)]
    expect("outcomes", "".join([d.outcome.value[0] for d in decisions]), "aw" + "d" * 6)
    recorded = [(d.violation.count, d.violation.advised, d.retry_after) for d in decisions if d.violation]
    expect("the violations", recorded, [(1, 1, 30), (2, 2, 30), (3, 5, 30), (4, 10, 30), (5, 30, 30), (6, 30, 30)])
    expect("the bucket's own wait", {d.bucket_retry_after for d in decisions[2:]}, {30.0})
    expect("a peek", harness.store.apply(Verb.PEEK, [Ask("", "a", limit, 1)], LOW, offence).violation, None)
    expect("recorded elsewhere", harness.store.record_violation(offence), Violation(7, 30_000_000, False))
    harness.clock.advance(1)
    standing = harness.store.standing(offence)
    expect("the standing", (standing.violations, standing.wait_left, standing.quiet_left), (7, 29.0, 59.0))
    expect("somebody else's", harness.store.standing(offence._replace(key="b")).violations, 0)
    harness.clock.advance(59)
    expect("after the quiet period", bool(harness.store.standing(offence)), False)
    expect("the next one", harness.store.record_violation(offence), Violation(1, 1_000_000, False))
    expect("forgetting", harness.store.forget("agents", "a", offence.backoff), True)
    expect("forgetting again", harness.store.forget("agents", "a", offence.backoff), False)
    expect("after it", harness.store.record_violation(offence).count, 1)


def an_enforced_backoff_denies_an_early_return(make: MakeStore) -> None:
    harness = StoreHarness(make)
    offence = Offence("agents", "a", Backoff(steps=[10], enforce=True))
    harness.store.record_violation(offence)
    asks = [Ask("one", "a", per_minute(60), 1), Ask("two", "a", SlidingWindow(5, 60), 1)]
    for ask in ([asks[0]], asks):
        harness.clock.advance(9)
        early = harness.store.apply(Verb.CHECK, ask, LOW, offence)
        expect("an early return", (bool(early), early.retry_after, early.bucket_retry_after), (False, 10.0, 0.0))
    harness.clock.advance(10)
    decision = harness.store.apply(Verb.CHECK, asks, LOW, offence)
    expect("after the wait", (bool(decision), decision.remaining), (True, 4))


def so_many_violations_within_a_span_raise_one_alert(make: MakeStore) -> None:
    harness = StoreHarness(make)
    offence = Offence("agents", "a", Backoff(alert_after=3, alert_window=10))
    alerts = []
    for span in (0, 5, 5, 4, 0, 0, 0, 9, 1, 1):
        harness.clock.advance(span)
        alerts.append(harness.store.record_violation(offence).alert)
    expect("alerts", alerts, [False, False, False, True, False, False, False, False, False, True])


def clearing_forgets_every_key_of_a_name_and_rule(make: MakeStore) -> None:
    harness, limit = StoreHarness(make), per_day(1)
    for name in ("one", "other"):
        for key in "abc":
            harness.check(limit, key, name=name)
    harness.store.clear("one", limit)
    expect("after clearing", [bool(harness.check(limit, key, name="one")) for key in "abc"], [True] * 3)
    expect("another name", [bool(harness.check(limit, key, name="other")) for key in "abc"], [False] * 3)


def the_async_twins_do_the_same(make: MakeStore) -> None:
    chance = random.Random(11)  # noqa: S311
    offence = Offence("agents", "a", Backoff())

    async def walk() -> None:
        for _ in range(10):
            sync, twin = StoreHarness(make), StoreHarness(make)
            limit = ReferenceKey(random_models(chance)).limit
            for verb, span, cost in random_steps(chance, 30):
                for harness in (sync, twin):
                    harness.clock.advance(Fraction(abs(span), 1_000_000))
                asks = [Ask("", "a", limit, cost)]
                expect(
                    f"aapply {verb.value}",
                    await twin.store.aapply(verb, asks, LOW, offence),
                    sync.store.apply(verb, asks, LOW, offence),
                )
            expect(
                "arecord_violation", await twin.store.arecord_violation(offence), sync.store.record_violation(offence)
            )
            standings = [await twin.store.astanding(offence), sync.store.standing(offence)]
            expect("astanding", repr(standings[0]), repr(standings[1]))
            expect("aforget", await twin.store.aforget("", "a", limit), sync.store.forget("", "a", limit))
            await twin.store.aclear("agents", offence.backoff)
            expect("aclear", (await twin.store.astanding(offence)).violations, 0)

    asyncio.run(walk())


def random_traces_equal_the_reference(make: MakeStore) -> None:
    chance = random.Random(7)  # noqa: S311
    for _ in range(60):
        compare_with_reference(make, random_models(chance), random_steps(chance, 60))


def compare_with_reference(make: MakeStore, models: Sequence[Model], steps: Sequence[tuple[Verb, int, int]]) -> None:
    """Walk a store and the reference through the same steps, and expect the same of each."""
    harness, reference = StoreHarness(make), ReferenceKey(models)
    for number, (verb, span, cost) in enumerate(steps):
        if span >= 0:
            harness.clock.advance(Fraction(span, 1_000_000))
        else:
            harness.clock.step_back(Fraction(-span, 1_000_000))
        expected = reference.apply(verb, harness.clock.now(), cost)
        what = f"step {number} ({verb.value} {cost}) on {reference.limit}"
        expect(what, harness.apply(verb, reference.limit, cost=cost), expected)


CASES: Final = cases_of(globals())


def run(make: MakeStore) -> None:
    """Run every case; those of holds and of accounts if the store has them."""
    store = make(ManualClock())
    holds = HOLD_CASES if isinstance(store, HoldStore) else ()
    accounts = ACCOUNT_CASES if isinstance(store, AccountStore) else ()
    for case in (*CASES, *holds, *accounts):
        case(make)
