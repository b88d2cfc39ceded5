"""A client's pace under the limits of language models: tokens, and buckets that don't state their window."""

from typing import Any

import pytest

from headgate.client.pacing import SECOND, Pace
from headgate.http import DatedLimit, QuotaPolicy, RateLimitHeaders, ServiceLimit
from tests.support.paces import answer, pace_after, send, wait

pytestmark = pytest.mark.once


def stated(
    left: int, reset: float, quota: int = 1000, *, name: str = "tokens", dated: bool = False
) -> RateLimitHeaders:
    unit = "requests" if name == "requests" else "tokens"
    kind = DatedLimit if dated else ServiceLimit
    return RateLimitHeaders((QuotaPolicy(name, quota, unit=unit),), (kind(name, left, reset),))


def bucket(left: int, quota: int = 1000, per: float = 60, **more: Any) -> RateLimitHeaders:
    """What a bucket says that is full again after `per` seconds at most."""
    return stated(left, (quota - left) * per / quota, quota, **more)


# The estimate of a cost -----------------------------------------------------------------------------------------------


def test_the_first_request_has_cost_no_more_than_is_lacking() -> None:
    pace = pace_after(stated(700, 60))
    sent = [send(pace), send(pace)]
    assert wait(pace) > 0, "two that cost 300 each are in flight"
    assert pace.earliest(0)[1] == "too little is left under 'tokens'"
    answer(pace, sent[0], stated(400, 60))
    answer(pace, sent[1], stated(100, 60))
    assert wait(pace) == 60


def test_if_much_is_lacking_at_first_one_request_tells_more() -> None:
    pace = pace_after(stated(200, 60))
    sent = send(pace)
    assert wait(pace) > 0
    answer(pace, sent, stated(190, 60))
    for _ in range(19):
        send(pace)
    assert wait(pace) > 0


def test_a_request_is_expected_to_cost_as_much_as_the_most_expensive_of_the_last_ten() -> None:
    pace = pace_after(stated(990, 60), stated(890, 60), *(stated(880 - 10 * number, 60) for number in range(9)))
    for _ in range(8):
        send(pace)
    assert wait(pace) > 0, "800 left: eight of the 100 that one has cost"
    pace = pace_after(stated(990, 60), stated(890, 60), *(stated(880 - 10 * number, 60) for number in range(10)))
    for _ in range(79):
        send(pace)
    assert wait(pace) > 0, "790 left: now all of the last ten have cost 10"


def test_requests_in_flight_at_the_same_time_share_their_cost() -> None:
    pace = pace_after(stated(990, 60))
    sent = [send(pace) for _ in range(4)]
    for one, left in zip(sent, (500, 700, 900, 590), strict=True):  # the server judges in any order
        answer(pace, one, stated(left, 60))
    assert [wait(pace), wait(pace, tokens=500)] == [0, 0]
    for _ in range(3):
        send(pace)
    assert wait(pace) > 0, "500 left: at (990 - 500) / 4 each, and more as long as some are in flight, three are sure"


def test_what_a_bucket_regains_meanwhile_is_not_taken_for_a_lower_cost() -> None:
    pace, now, left = pace_after(bucket(8900, 10_000), bucket(7800, 10_000)), 0, 7800
    for _ in range(12):  # each costs 1100, and 1000 come back in between
        now, left = now + 6, left - 100
        answer(pace, send(pace, now), bucket(left, 10_000), now)
    for _ in range(left // 1100):
        send(pace, now)
    assert wait(pace, now) > 0


def test_a_window_that_has_started_over_tells_the_cost_from_its_quota() -> None:
    pace = pace_after(stated(100, 10), stated(90, 10))
    answer(pace, send(pace, 20), stated(700, 60), 20)
    for _ in range(2):
        send(pace, 20)
    assert wait(pace, 20) > 0


def test_a_window_whose_end_was_stated_late_is_not_taken_for_a_new_one() -> None:
    pace = Pace()
    answer(pace, send(pace), stated(100, 40, dated=True), 20)
    answer(pace, send(pace, 50), stated(90, 10, dated=True), 50)
    for _ in range(9):
        send(pace, 50)
    assert wait(pace, 50) > 0


def test_a_denied_request_has_cost_nothing() -> None:
    pace = pace_after(stated(700, 60))
    assert answer(pace, send(pace), stated(400, 60), status=429)
    answer(pace, send(pace, 70), stated(700, 60), 70)
    for _ in range(2):
        send(pace, 70)
    assert wait(pace, 70) > 0, "700 left: two of 300"


# What the caller expects ----------------------------------------------------------------------------------------------


def test_the_estimate_of_the_caller_counts_instead() -> None:
    pace = pace_after(stated(700, 60))
    sent = [send(pace, tokens=10) for _ in range(50)]
    assert wait(pace, tokens=201) > 0
    assert wait(pace, tokens=200) == 0
    for number, one in enumerate(sent):
        answer(pace, one, stated(690 - 10 * number, 60))
    assert wait(pace, tokens=200) == 0
    assert wait(pace, tokens=201) == 60


def test_an_estimate_may_be_given_for_some_policies_by_name() -> None:
    first = [stated(900, 60, name=name) for name in ("input-tokens", "output-tokens")]
    both = RateLimitHeaders(first[0].policies + first[1].policies, first[0].limits + first[1].limits)
    pace = pace_after(both)
    assert wait(pace, tokens={"input-tokens": 901}) > 0
    for _ in range(9):
        send(pace, tokens={"input-tokens": 1})
    assert pace.earliest(0, {"input-tokens": 1})[1] == "too little is left under 'output-tokens'"


@pytest.mark.parametrize("headers", [stated(999, 60), bucket(999)])
def test_an_estimate_above_the_limit_waits_until_all_is_back(headers: RateLimitHeaders) -> None:
    pace = pace_after(headers)
    now = wait(pace, tokens=10**9)
    assert 0 < now <= 60
    assert wait(pace, now, tokens=10**9) == 0


def test_what_a_full_quota_doesnt_cover_waits_for_requests_in_flight() -> None:
    huge = 999_999_999_999_999
    pace = pace_after(stated(huge, 60, huge))
    sent = send(pace, 60, huge)
    moments = [60.0]
    while (more := wait(pace, moments[-1], 5)) > 0 and len(moments) < 100:
        moments.append(moments[-1] + more)
    assert len(moments) < 70, "asking again a microsecond later each time would keep a processor busy"
    assert moments[-1] >= 60 + 60, "an answer may come until a window has passed"
    pace.fail(sent, round(moments[-1] * SECOND))
    assert wait(pace, moments[-1], 5) == 0


def test_the_estimate_of_the_caller_is_of_no_use_for_other_units() -> None:
    pace = pace_after(RateLimitHeaders((QuotaPolicy("requests", 10),), (ServiceLimit("requests", 9, 60),)))
    for _ in range(9):
        send(pace, tokens=1000)
    assert wait(pace, tokens=0) > 0


def test_both_requests_and_tokens_count() -> None:
    def both(requests: int, tokens: int) -> RateLimitHeaders:
        one, other = stated(requests, 60, 10, name="requests"), stated(tokens, 30)
        return RateLimitHeaders(one.policies + other.policies, one.limits + other.limits)

    pace = pace_after(both(9, 900), both(8, 800))
    for _ in range(8):
        send(pace)
    assert wait(pace) >= 60
    pace = pace_after(both(9, 900), both(8, 500))
    send(pace)
    assert wait(pace) >= 30
    pace = pace_after(both(0, 900))
    assert pace.earliest(0) == (60 * SECOND, "nothing is left under 'requests'")


# Buckets that don't state their window --------------------------------------------------------------------------------


@pytest.mark.parametrize("per", [60, 3600, 86_400])
@pytest.mark.parametrize("dated", [False, True])
def test_a_bucket_is_recognised_by_a_reset_that_moves_away(per: int, dated: bool) -> None:
    answers = [bucket(left, 10, per, name="requests", dated=dated) for left in range(9, -1, -1)]
    assert wait(pace_after(*answers)) == per / 10, "and not until all is back, which is what it states"


def test_a_window_gives_nothing_back_before_its_reset() -> None:
    answers = [stated(left, 60 - number / 100, 10, name="requests") for number, left in enumerate(range(9, -1, -1))]
    assert wait(pace_after(*answers)) == pytest.approx(59.91)


def test_a_new_window_is_not_mistaken_for_a_bucket() -> None:
    """Its reset is later and less is left, as after others have used it; both fit a bucket of the usual length."""
    pace = pace_after(stated(9, 6, 10, name="requests"))
    answer(pace, send(pace, 10), stated(5, 30, 10, name="requests"), 10)
    for _ in range(5):
        send(pace, 10)
    assert wait(pace, 10) >= 30


def test_a_bucket_that_turns_out_to_be_none_is_no_longer_trusted() -> None:
    pace = pace_after(*(bucket(left, 10, name="requests") for left in (9, 8, 7, 6)))
    answer(pace, send(pace), stated(0, 60, 20, name="requests"))
    assert wait(pace) == 60
    pace = pace_after(*(bucket(left, 10, name="requests") for left in (9, 8, 7, 6)))
    answer(pace, send(pace), stated(0, 20, 10, name="requests"))
    assert wait(pace) == 20


def test_a_bucket_that_turns_out_to_have_another_window_is_no_longer_trusted() -> None:
    pace = pace_after(*(bucket(left, 10, name="requests") for left in (9, 8, 7, 6)))
    answer(pace, send(pace), bucket(5, 10, 3600, name="requests"))
    for _ in range(5):
        send(pace)
    assert wait(pace) >= 1800


def test_a_response_that_names_a_policy_twice_is_tolerated() -> None:
    headers = stated(900, 60)
    twice = headers._replace(limits=(*headers.limits, ServiceLimit("tokens", 800, 60)))
    pace = pace_after(twice, twice)
    assert wait(pace) == 0


def test_a_denial_by_a_bucket_asks_for_its_own_wait() -> None:
    pace = pace_after(*(bucket(left, 10, name="requests") for left in (9, 8, 7, 6)))
    headers = bucket(0, 10, name="requests")._replace(retry_after=7)
    assert answer(pace, send(pace), headers, status=429)
    assert wait(pace) == 7
    pace = pace_after(stated(9, 60, 10, name="requests"))
    assert answer(pace, send(pace), stated(0, 60, 10, name="requests")._replace(retry_after=7), status=429)
    assert wait(pace) == 60, "of another kind of limit, nothing is back before"


def test_a_reset_that_is_a_moment_counts_from_the_response() -> None:
    """The response took 20 seconds; the moment is 40 seconds after it, and may have been rounded down."""
    pace = Pace()
    answer(pace, send(pace), stated(0, 40, dated=True), 20)
    assert wait(pace, 20) == 41
    pace = Pace()
    answer(pace, send(pace), stated(0, 40), 20)
    assert wait(pace, 20) == 21, "a span counts from when the request was judged"


def test_waits_are_exact_to_a_microsecond() -> None:
    assert wait(pace_after(stated(0, 0.017))) == 0.017
    pace = Pace()
    answer(pace, send(pace), RateLimitHeaders(retry_after=0.25), status=429)
    assert wait(pace) == 0.25
