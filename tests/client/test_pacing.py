"""A client's pace, learnt from rate limit headers. The laws, with servers and networks, are in tests/properties."""

import pytest

from headgate.client.pacing import LONGEST, SECOND, Pace, SentRequest
from headgate.http import QuotaPolicy, RateLimitHeaders, ServiceLimit
from tests.support.paces import answer, pace_after, send, wait

pytestmark = pytest.mark.once

SILENT = RateLimitHeaders()


def bucket(left: int, quota: int = 10, window: int = 10) -> RateLimitHeaders:
    """What a bucket of ours says: what is left, and after how long all is back, or the next one passes."""
    lacking = quota - left if left else 1
    return RateLimitHeaders(
        (QuotaPolicy("default", quota, window),), (ServiceLimit("default", left, -(-lacking * window // quota)),)
    )


def window(left: int, reset: int, quota: int = 10, length: int | None = 10) -> RateLimitHeaders:
    return RateLimitHeaders((QuotaPolicy("theirs", quota, length),), (ServiceLimit("theirs", left, reset),))


# Servers of which little is known -------------------------------------------------------------------------------------


def test_an_unknown_server_gets_one_request_and_twice_as_many_per_second_of_silence() -> None:
    pace = Pace()
    send(pace)
    assert pace.earliest(0) == (SECOND, "the first answers tell how much may be sent")
    send(pace, 1)
    assert wait(pace, 1) == 1
    for now, more in ((2, 2), (3, 4), (4, 8)):
        for _ in range(more):
            send(pace, now)
        assert wait(pace, now) == 1


def test_a_server_that_says_nothing_is_not_held_back() -> None:
    pace = pace_after(SILENT)
    for _ in range(100):
        send(pace)


def test_a_server_that_denies_without_figures_is_approached_again_by_few() -> None:
    pace = pace_after(SILENT)
    denied = [send(pace) for _ in range(3)]
    for sent in denied:
        assert answer(pace, sent, RateLimitHeaders(retry_after=7), status=429)
    assert pace.earliest(0) == (7 * SECOND, "the server asked to wait")
    one = send(pace, 7)
    assert wait(pace, 7) == 1
    answer(pace, one, SILENT, 7)
    two = [send(pace, 7), send(pace, 7)]
    assert wait(pace, 7) > 0
    answer(pace, two.pop(), SILENT, 7)
    two += [send(pace, 7), send(pace, 7)]
    assert wait(pace, 7) > 0
    for _ in range(64):
        answer(pace, two.pop(0), SILENT, 7)
        two.append(send(pace, 7))
    for _ in range(100):
        send(pace, 7)


def test_without_a_named_time_the_wait_doubles() -> None:
    pace, now, waits = Pace(), 0.0, []
    for _ in range(8):
        answer(pace, send(pace, now), SILENT, now, 429)
        waits.append(wait(pace, now))
        now += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    answer(pace, send(pace, now), SILENT, now)
    answer(pace, send(pace, now), RateLimitHeaders(retry_after=0), now, 429)
    assert wait(pace, now) == 1, "it begins again after one that passed"


# Being asked to wait --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, RateLimitHeaders(retry_after=5), 5),
        (429, RateLimitHeaders((), (ServiceLimit("a", 0, 3),), 5), 5),
        (429, RateLimitHeaders((), (ServiceLimit("a", 0, 9),), 5), 9),
        (429, RateLimitHeaders((), (ServiceLimit("a", 0, 3), ServiceLimit("b", 7, 3600)), 3), 3),
        (429, RateLimitHeaders((), (ServiceLimit("a", 4, 3),)), 3),
        (503, RateLimitHeaders(retry_after=5), 5),
        (503, SILENT, 0),
        (200, RateLimitHeaders(retry_after=5), 0),
        (500, RateLimitHeaders(retry_after=5), 0),
    ],
)
def test_the_wait_that_was_asked_for(status: int, headers: RateLimitHeaders, seconds: int) -> None:
    pace = Pace()
    assert answer(pace, send(pace), headers, status=status) == bool(seconds)
    assert wait(pace) == seconds


def test_a_wait_is_lengthened_and_never_shortened() -> None:
    pace = Pace()
    answer(pace, send(pace), RateLimitHeaders(retry_after=100), status=429, jitter=0.03)
    assert wait(pace) == 103
    answer(pace, pace.send(0), RateLimitHeaders(retry_after=1), status=429)
    assert wait(pace) == 103
    pace = Pace()
    answer(pace, send(pace), window(0, 100), jitter=0.03)
    assert wait(pace) == 103


@pytest.mark.parametrize(
    "headers", [RateLimitHeaders(retry_after=10**14), window(0, 10**14), window(0, 10**14, 10**14, 10**14)]
)
def test_no_wait_is_believed_for_longer_than_a_day(headers: RateLimitHeaders) -> None:
    pace = Pace()
    answer(pace, send(pace), headers, status=429)
    assert wait(pace) == LONGEST / SECOND


# What is left ---------------------------------------------------------------------------------------------------------


def test_requests_in_flight_count_against_the_remainder() -> None:
    pace = pace_after(bucket(9))
    sent = [send(pace) for _ in range(9)]
    assert wait(pace) > 0
    for left, one in zip(range(8, -1, -1), sent, strict=True):
        answer(pace, one, bucket(left))
        assert wait(pace) > 0
    assert pace.earliest(0) == (SECOND, "nothing is left under 'default'")


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_answers_may_come_in_any_order(order: list[int]) -> None:
    pace = pace_after(bucket(9))
    sent = [send(pace) for _ in range(4)]
    for place in order:
        answer(pace, sent[place], bucket(8 - place))
    for _ in range(5):
        send(pace)
    assert wait(pace) > 0


def test_failures_may_have_been_counted_and_denials_were_not() -> None:
    pace = pace_after(window(2, 10))
    for _ in range(2):
        pace.fail(send(pace), 0)
    assert wait(pace) == 10
    pace = pace_after(window(1, 10))
    sent = send(pace)
    assert wait(pace) > 10
    answer(pace, sent, RateLimitHeaders((QuotaPolicy("other", 10, 1),), (ServiceLimit("other", 0, 1),), 1), status=429)
    assert wait(pace, 1) == 0, "the one is left"


def test_a_concurrent_answer_does_not_account_for_a_failure() -> None:
    pace = pace_after(window(5, 10))
    failed, other = send(pace), send(pace)
    pace.fail(failed, 0)
    answer(pace, other, window(4, 10))
    for _ in range(3):
        send(pace)
    assert wait(pace) > 0


def test_quota_spent_by_others_is_noticed() -> None:
    pace = pace_after(bucket(9))
    answer(pace, send(pace), bucket(0))
    assert wait(pace) == 1
    answer(pace, send(pace, 1), bucket(5), 1)
    for _ in range(5):
        send(pace, 1)
    assert wait(pace, 1) > 0


@pytest.mark.parametrize("older_first", [True, False])
def test_the_answer_to_a_later_request_is_newer(older_first: bool) -> None:
    pace = pace_after(window(9, 60, length=60))
    older, newer = send(pace), send(pace, 1)
    if older_first:
        answer(pace, older, window(0, 60, length=60), 2)
        assert wait(pace, 2) > 50
    answer(pace, newer, window(5, 60, length=60), 2)
    if not older_first:
        answer(pace, older, window(0, 60, length=60), 2)
    for _ in range(5):
        send(pace, 2)
    assert wait(pace, 2) > 50


def test_a_window_gives_nothing_back_until_its_end_and_one_request_probes_it() -> None:
    pace = pace_after(window(2, 9))
    for left in (1, 0):
        answer(pace, send(pace), window(left, 9))
    assert wait(pace, 8.999999) > 0
    one = send(pace, 9)
    assert wait(pace, 9) > 0
    answer(pace, one, window(9, 10), 9)
    for _ in range(9):
        send(pace, 9)
    assert wait(pace, 9) > 0


def test_after_a_long_time_there_is_as_much_as_there_can_be() -> None:
    pace = pace_after(window(2, 10))
    for _ in range(10):
        send(pace, 1000)
    assert wait(pace, 1000) > 0


def test_a_bucket_fills_between_answers() -> None:
    pace = pace_after(bucket(9))
    for left in (8, 7, 6, 5):
        answer(pace, send(pace), bucket(left))
    for _ in range(5):
        send(pace)
    assert wait(pace) == 1
    send(pace, 1)
    assert wait(pace, 1) == 1
    for _ in range(3):
        send(pace, 4)
    assert wait(pace, 4) == 1
    for _ in range(10):
        send(pace, 100)
    assert wait(pace, 100) == 1, "it was full, and not more"


def test_the_next_token_of_a_bucket_is_not_expected_early() -> None:
    pace = pace_after(bucket(9, window=7))
    for left in (8, 7, 6, 5, 4, 3, 2, 1, 0):
        answer(pace, send(pace), bucket(left, window=7))
    assert wait(pace) == 1, "and not 0.7 seconds, though it fills at that pace"


def test_a_window_that_resembles_a_bucket_is_not_mistaken_for_one() -> None:
    pace = pace_after(window(9, 1))
    for left, reset in ((8, 2), (7, 3)):
        answer(pace, send(pace), window(left, reset))
    answer(pace, send(pace), window(5, 9))
    for _ in range(5):
        send(pace)
    assert wait(pace) == 14, "nine seconds, and one for each that is under way"


def test_a_one_second_window_is_not_mistaken_for_a_bucket() -> None:
    pace = pace_after(window(6, 1, 7, 1))
    for left in (5, 4, 3):
        answer(pace, send(pace), window(left, 1, 7, 1))
    for _ in range(3):
        send(pace)
    assert wait(pace) >= 1


def test_slow_answers_slow_nothing_down() -> None:
    """Sixty a minute, each of which takes ten seconds: ten are under way at a time."""
    pace = pace_after(bucket(9))
    for left in (8, 7, 6, 5, 4, 3, 2, 1, 0):
        answer(pace, send(pace), bucket(left))
    under_way: list[SentRequest] = []
    for now in range(1, 60):
        under_way.append(send(pace, now))
        if len(under_way) > 10:
            answer(pace, under_way.pop(0), bucket(2), now + 0.5)
    assert len(under_way) == 10


def test_all_policies_apply_though_an_answer_names_one() -> None:
    policies = (QuotaPolicy("fast", 5, 1), QuotaPolicy("slow", 10, 100))
    pace = pace_after(RateLimitHeaders(policies, (ServiceLimit("slow", 9, 10),)))
    for _ in range(2):
        for left in (4, 3, 2, 1):
            answer(pace, send(pace), RateLimitHeaders(policies, (ServiceLimit("fast", left, 1),)))
    send(pace)
    assert pace.earliest(0)[1] == "nothing is left under 'slow'"


def test_requests_beyond_the_quota_were_denied_and_leave_no_debt() -> None:
    pace = pace_after(SILENT)
    sent = [send(pace, 1) for _ in range(8)]
    answer(pace, sent.pop(), window(1, 0, quota=1, length=86_400), 1)
    for one in sent:
        answer(pace, one, SILENT, 2)
    assert wait(pace, 4) * SECOND <= LONGEST, "a day, not one for each of them"


def test_policies_are_distinguished_by_their_partition() -> None:
    pace = pace_after(RateLimitHeaders((), (ServiceLimit("a", 0, 5, b"one"), ServiceLimit("a", 3, 5, b"two"))))
    assert wait(pace) == 5
    answer(pace, pace.send(0), RateLimitHeaders((), (ServiceLimit("a", 2, 5, b"two"),)))
    assert wait(pace) == 5


def test_a_limit_in_another_unit_only_tells_when_it_is_exhausted() -> None:
    policy = (QuotaPolicy("bytes", 1000, 60, "content-bytes"),)
    pace = pace_after(RateLimitHeaders(policy, (ServiceLimit("bytes", 3, 60),)))
    sent = [send(pace) for _ in range(10)]
    answer(pace, sent[-1], RateLimitHeaders(policy, (ServiceLimit("bytes", 0, 60),)))
    assert wait(pace) >= 60


def test_without_a_reset_time_a_minute_is_assumed() -> None:
    pace = pace_after(RateLimitHeaders((), (ServiceLimit("", 1),)))
    send(pace)
    assert pace.earliest(0)[1] == "nothing is left"
    assert 60 <= wait(pace) <= 120


def test_memory_is_bounded() -> None:
    pace = Pace()
    for number in range(100):
        answer(pace, send(pace), RateLimitHeaders((), (ServiceLimit(str(number), 1000, 5),)))
    assert len(pace._policies) == 32
    pace = pace_after(SILENT)
    stuck = send(pace)
    for _ in range(12_000):
        answer(pace, send(pace, 1), SILENT, 1)
    assert len(pace._sent) <= 10_000
    answer(pace, stuck, window(0, 10), 2)
    assert wait(pace, 2) == 0, "what it says is too old"


def test_answers_that_name_ever_more_are_merged_and_the_least_of_them_counts() -> None:
    """With an estimate for each, a server could make its clients compute for minutes."""
    pace = pace_after(window(50, 10, quota=1000))
    in_flight = [send(pace) for _ in range(40)]
    for number, one in enumerate(in_flight):
        answer(pace, one, window(12 + number, 10, quota=1000))
    [policy] = pace._policies.values()
    assert len(policy._estimates) <= 8
    for _ in range(12):
        send(pace)
    assert wait(pace) > 0


def test_a_pace_is_idle_when_there_is_nothing_to_wait_for() -> None:
    pace = Pace()
    assert pace.idle(0)
    sent = send(pace)
    assert not pace.idle(0)
    answer(pace, sent, bucket(0))
    assert not pace.idle(0)
    assert pace.idle(SECOND)


def test_nothing_is_hopeless_while_an_answer_may_change_it() -> None:
    pace = pace_after(window(1, 100))
    sent = send(pace)
    assert wait(pace) == 100
    assert not pace.hopeless(0, 50 * SECOND)
    answer(pace, sent, window(0, 100))
    assert pace.hopeless(0, 50 * SECOND)
    assert not pace.hopeless(0, 100 * SECOND)
    pace = pace_after(SILENT)
    sent, _ = send(pace), send(pace)
    answer(pace, sent, RateLimitHeaders(retry_after=100), status=429)
    assert pace.hopeless(0, 50 * SECOND)


def test_what_is_in_flight_asks_to_wait_only_in_a_denial() -> None:
    policies = (QuotaPolicy("slots", 1, None, "concurrent-requests"),)
    pace = pace_after(RateLimitHeaders(policies, (ServiceLimit("slots", 0, None),)))
    assert wait(pace) == 0
    denied = RateLimitHeaders(policies, (ServiceLimit("slots", 0, 7),), 9.0)
    answer(pace, send(pace), denied, status=429)
    assert wait(pace) == 9
    assert wait(pace, 9) == 0
