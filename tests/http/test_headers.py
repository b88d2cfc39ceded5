"""Decisions in HTTP: headers and problem details."""

import json
from email.utils import formatdate

import pytest

from headgate import (
    BLOCKED,
    UNLIMITED,
    Decision,
    Gate,
    InvalidInput,
    Limiter,
    ManualClock,
    MemoryStore,
    Policy,
    TokenBucket,
)
from headgate.http import (
    Dialect,
    HeaderWriter,
    ProblemDetails,
    QuotaPolicy,
    RateLimitHeaders,
    ServiceLimit,
    describe_denial,
    describe_error,
    is_temporary,
    read_denial,
    read_headers,
)
from headgate.http.verdict import describe_decision
from headgate.limits.decision import Outcome
from headgate.limits.notation import LimitLike, denial_error
from tests.support.rate_limit_headers import format_headers, headers_of, write_headers

NOW = 1_900_000_000.0


def limiter(limit: LimitLike) -> tuple[Limiter, ManualClock]:
    clock = ManualClock(start=1000)
    return Limiter(limit, store=MemoryStore(clock=clock)), clock


NOTHING = RateLimitHeaders()


def limits(*found: ServiceLimit) -> RateLimitHeaders:
    return RateLimitHeaders((), found)


def remaining_and_reset(headers: RateLimitHeaders) -> tuple[int, float | None]:
    (limit,) = headers.limits
    return limit.remaining, limit.reset


# Headers of decisions -------------------------------------------------------------------------------------------------


def test_the_headers_of_a_bucket_state_its_capacity_and_fill_time() -> None:
    limited, _ = limiter("60/minute burst 10")
    headers = headers_of(limited.check("a"), limited.limit)
    assert headers == RateLimitHeaders((QuotaPolicy("default", 10, 10),), (ServiceLimit("default", 9, 1),), None)
    assert format_headers(headers) == [("ratelimit-policy", '"default";q=10;w=10'), ("ratelimit", '"default";r=9;t=1')]


@pytest.mark.parametrize(
    ("limit", "quota", "window"),
    [
        ("60/minute", 60, 60),
        ("100/hour burst 10", 10, 360),
        ("90/minute burst 2", 2, 2),  # it fills in 1.33 s, which is rounded up
        ("1000/second", 1000, 1),
        ("5/ms", 5, 1),
        ("100/minute sliding", 100, 60),
        ("10/ms sliding", 10, 1),
    ],
)
def test_windows_are_whole_seconds_rounded_up(limit: str, quota: int, window: int) -> None:
    limited, _ = limiter(limit)
    assert headers_of(limited.check("a"), limited.limit).policies == (QuotaPolicy("default", quota, window),)


def test_each_of_several_limits_is_a_policy_and_the_headers_state_the_one_that_bound() -> None:
    limited, clock = limiter(["5/second", "7/minute"])
    limited.check("a", 4)
    headers = headers_of(limited.check("a"), limited.limit, "search")
    assert headers.policies == (QuotaPolicy("5/second", 5, 1), QuotaPolicy("7/minute", 7, 60))
    assert headers.limits == (ServiceLimit("5/second", 0, 1),)
    clock.advance(1)
    limited.check("a")
    limited.check("a")
    denied = limited.check("a")
    headers = headers_of(denied, limited.limit, "search")
    assert headers.limits == (ServiceLimit("7/minute", 0, 8),)
    assert describe_denial(denied, "search").policies == ("7/minute",)


def test_unlimited_has_no_headers_and_blocked_has_a_quota_of_zero() -> None:
    for limit in (UNLIMITED, TokenBucket(10**15, 10**15, 1)):
        limited, _ = limiter(limit)
        decision = limited.check("a")
        assert headers_of(decision, limited.limit) == RateLimitHeaders()
        assert HeaderWriter("both").for_limit(limited.limit).write(decision) == []
    limited, _ = limiter(BLOCKED)
    headers = headers_of(limited.check("a"), limited.limit)
    assert headers == RateLimitHeaders((QuotaPolicy("default", 0),), (ServiceLimit("default", 0),), 60)


def test_reset_is_the_time_to_full_or_at_zero_the_time_to_the_next_pass() -> None:
    limited, clock = limiter("60/minute burst 10")
    seen = [remaining_and_reset(headers_of(limited.check("a"), limited.limit)) for _ in range(10)]
    assert seen == [(9, 1), (8, 2), (7, 3), (6, 4), (5, 5), (4, 6), (3, 7), (2, 8), (1, 9), (0, 1)]
    clock.advance(0.999999)
    headers = headers_of(limited.check("a"), limited.limit)
    assert (remaining_and_reset(headers), headers.retry_after) == ((0, 1), 1)
    clock.advance(0.000001)
    assert remaining_and_reset(headers_of(limited.check("a"), limited.limit)) == (0, 1)


@pytest.mark.parametrize("limit", ["7/minute burst 3", "60/minute", "3/second burst 30", "10 per 7 seconds burst 4"])
def test_a_retry_after_the_reset_at_zero_passes_and_is_less_than_a_second_late(limit: str) -> None:
    limited, clock = limiter(limit)
    while (decision := limited.check("a")).remaining:
        pass
    _, reset = remaining_and_reset(headers_of(decision, limited.limit))
    assert reset is not None
    clock.advance(reset - 1)
    assert not limited.peek("a")
    clock.advance(1)
    assert limited.peek("a")


def test_retry_after_is_never_shorter_than_the_reset() -> None:
    with Gate(Policy(limits={"heavy": "6/minute"}), store=MemoryStore(clock=ManualClock())) as gate:
        decision = [gate.check("a", "http", "heavy") for _ in range(20)][-1]
        headers = headers_of(decision, gate.limits_for("a", "http", "heavy"), "heavy")
    assert (headers.limits, headers.retry_after) == ((ServiceLimit("heavy", 0, 10),), 30)


def test_the_denial_of_a_large_cost_states_its_own_wait() -> None:
    limited, _ = limiter("60/minute burst 10")
    limited.check("a", 7)
    headers = headers_of(limited.check("a", 5), limited.limit)
    assert (remaining_and_reset(headers), headers.retry_after) == ((3, 2), 2)
    headers = headers_of(limited.check("a", 11), limited.limit)
    assert (remaining_and_reset(headers), headers.retry_after) == ((3, None), 60)


@pytest.mark.parametrize("dialect", ["ratelimit", "x-ratelimit", "both"])
@pytest.mark.parametrize(
    "limit", ["60/minute burst 10", "5/second; 7/minute sliding", "2/minute", "blocked", "unlimited"]
)
def test_headers_follow_the_draft_and_agree_in_all_dialects(limit: str, dialect: Dialect) -> None:
    limited, clock = limiter(limit)
    name = '50% of "all"'
    for number in range(15):
        decision = limited.check("a", 1 + number % 3)
        headers = read_headers(dict(write_headers(decision, limited.limit, name)))
        assert write_headers(decision, limited.limit, name, dialect) == format_headers(headers, dialect)
        clock.advance(0.3)


def test_a_writer_keeps_a_bounded_number_of_limits() -> None:
    writer = HeaderWriter()
    for number in range(1, 3000):
        limited, _ = limiter(TokenBucket(number, number, 60))
        assert writer.for_limit(limited.limit).write(limited.check("a"))[0][1] == b'"default";q=%d;w=60' % number
    assert len(writer._limits) <= 1024


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(InvalidInput, match="headers: expected one of ratelimit, x-ratelimit, both, none, got 'x'"):
        HeaderWriter("x")  # type: ignore[arg-type]
    limited, _ = limiter("5/minute")
    assert HeaderWriter("none").for_limit(limited.limit).write(limited.check("a")) == []


# Denials --------------------------------------------------------------------------------------------------------------


def test_b3_a_denial_is_problem_details_with_the_wait_and_the_tier() -> None:
    limited, _ = limiter("1/minute")
    limited.check("a")
    denial = describe_denial(limited.check("a"), "heavy")
    assert json.loads(denial.encode()) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Too many requests",
        "status": 429,
        "detail": "too many requests; try again in 60 s",
        "violated-policies": ["heavy"],
        "error": "rate_limited",
        "retry_after_ms": 60_000,
        "tier": "heavy",
    }
    assert denial.headers == [
        ("content-type", "application/problem+json"),
        ("retry-after", "60"),
        ("cache-control", "no-store"),
    ]


def test_b3_waits_are_whole_seconds_rounded_up_and_never_zero() -> None:
    limited, clock = limiter("1/minute")
    limited.check("a")
    clock.advance(59.999_999)
    assert describe_denial(limited.check("a"), "x").retry_after_ms == 1000
    clock.step_back(30)
    assert describe_denial(limited.check("a"), "x").retry_after_ms == 31_000


def test_a_denial_after_which_no_wait_helps_says_so() -> None:
    limited, _ = limiter("5/minute")
    for denial in (
        describe_denial(limited.check("a", cost=6), "x"),
        describe_error(denial_error("a", limited.check("a", cost=6))),
    ):
        body = json.loads(denial.encode())
        assert body["no_wait_helps"] is True
        assert body["detail"] == "the limit never allows this request, however long it waits"
        assert dict(denial.headers).items() >= {"x-should-retry": "false", "retry-after": "60"}.items()
        assert read_denial(denial.encode()) == denial
    assert limited.check("a", cost=5)
    later = describe_denial(limited.check("a", cost=5), "x")
    assert "no_wait_helps" not in json.loads(later.encode())
    assert "x-should-retry" not in dict(later.headers)


def test_a_denial_while_the_store_is_away_is_a_503() -> None:
    limited, _ = limiter("1/minute")
    limited.check("a")
    degraded: Decision = limited.check("a").as_degraded(limited.limit)
    denial = describe_denial(degraded, "x")
    assert (denial.status, denial.kind) == (503, "temporary-reduced-capacity")
    assert json.loads(denial.encode())["title"] == "Temporarily unavailable"
    assert read_denial(denial.encode()) == denial


def test_an_error_that_was_raised_while_the_store_is_away_is_a_503() -> None:
    limited, _ = limiter("1 in flight")
    decision = limited.hold("a").decision.as_denied()
    error = denial_error("a", decision.as_degraded(limited.limit))
    assert error.degraded
    assert str(error) == "rate limited: agent 'a' at 1 in flight, the store is away, retry after 1ms"
    problem = describe_error(error)
    assert (problem.status, problem.kind, problem.retry_after_ms) == (503, "temporary-reduced-capacity", 1000)
    assert describe_error(denial_error("a", decision)).status == 429


def test_the_advised_wait_for_a_slot_is_a_second_whatever_the_lease() -> None:
    limited, clock = limiter("1 in flight; 5/minute")
    limited.hold("a", lease=1000)
    clock.advance(0.5)
    denied = limited.hold("a").decision
    assert denied.retry_after == 999.5  # the upper bound
    for problem in (describe_denial(denied, "x"), describe_error(denial_error("a", denied))):
        assert (problem.retry_after_ms, dict(problem.headers)["retry-after"]) == (1000, "1")
    assert describe_decision(denied)["retry_after_ms"] == 1000
    clock.advance(999)
    assert describe_decision(limited.peek("a"))["retry_after_ms"] == 500
    clock.advance(1)
    limited.hold("a").settle(5)
    assert describe_denial(limited.hold("a").decision, "x").retry_after_ms > 1000  # the rate binds


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"error":"unauthorized"}',
        b'{"error":"rate_limited","retry_after_ms":-1}',
        b'{"error":"rate_limited","retry_after_ms":true}',
        b'{"error":"rate_limited","retry_after_ms":1e3}',
        b'{"error":"rate_limited","tier":1}',
        b'{"error":"rate_limited","violated-policies":[1]}',
        b'{"error":"rate_limited","status":"429"}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_other_bodies_are_not_taken_for_denials(body: bytes) -> None:
    assert read_denial(body) is None


def test_a_minimal_denial_is_understood() -> None:
    assert read_denial(b'{"error":"rate_limited","retry_after_ms":2000,"tier":"light"}') == ProblemDetails(
        429, "", "", 2000, "light"
    )


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "headers"),
    [
        ({}, NOTHING),
        (
            {"ratelimit-policy": '"burst";q=100;w=60,"daily";q=1000;w=86400', "ratelimit": '"burst";r=50;t=30'},
            RateLimitHeaders(
                (QuotaPolicy("burst", 100, 60), QuotaPolicy("daily", 1000, 86400)), (ServiceLimit("burst", 50, 30),)
            ),
        ),
        (
            {"ratelimit-policy": '"p";q=5;qu="content-bytes";pk=:c2VjcmV0:', "ratelimit": '"p";r=1;pk=:c2VjcmV0:'},
            RateLimitHeaders(
                (QuotaPolicy("p", 5, None, "content-bytes", b"secret"),), (ServiceLimit("p", 1, None, b"secret"),)
            ),
        ),
        ({"ratelimit": '"a" ;r=1'}, NOTHING),
        ({"ratelimit": '"a"; r=1;  t=2 , \t"b";r=3'}, limits(ServiceLimit("a", 1, 2), ServiceLimit("b", 3))),
        ({"ratelimit": '"a";r=1;r=2'}, limits(ServiceLimit("a", 2))),
        ({"ratelimit": '"a";r=1;x;y=?0;z=tok;u=@12;v=1.5;w="s"'}, limits(ServiceLimit("a", 1))),
        ({"ratelimit": '"a\\"\\\\";r=1'}, limits(ServiceLimit('a"\\', 1))),
        # malformed as a whole: ignored
        ({"ratelimit": '"a";r=1,'}, NOTHING),
        ({"ratelimit": "a;r=1"}, NOTHING),
        ({"ratelimit": '"a;r=1'}, NOTHING),
        ({"ratelimit": '"a";r=1 "b";r=2'}, NOTHING),
        ({"ratelimit": '"a";r=1;pk=:?:'}, NOTHING),
        ({"ratelimit": '"a";r=1;pk=:a:'}, NOTHING),
        ({"ratelimit": '"é";r=1'}, NOTHING),
        ({"ratelimit": "limit=10, remaining=5"}, NOTHING),
        # invalid items
        ({"ratelimit": '"a";r=-1, "b";r="1", "c";r=1.0, "d";t=1, "e";r, "f";r=1;t=-1, "g";r=1;pk="x"'}, NOTHING),
        (
            {"ratelimit-policy": '"a";q=-1, "b";w=1, "c";q=1;w=0.5, "d";q=1;qu=5, "e";q=1'},
            RateLimitHeaders((QuotaPolicy("e", 1),)),
        ),
        # the triple, and its variants
        (
            {"x-ratelimit-limit": "60", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "7"},
            RateLimitHeaders((QuotaPolicy("", 60),), (ServiceLimit("", 0, 7),)),
        ),
        ({"x-ratelimit-remaining": "3", "x-ratelimit-reset": f"{NOW + 90:.0f}"}, limits(ServiceLimit("", 3, 90))),
        ({"x-ratelimit-remaining": "3", "x-ratelimit-reset": f"{NOW - 90:.0f}"}, limits(ServiceLimit("", 3, 0))),
        ({"x-ratelimit-remaining": "3", "x-ratelimit-reset": f"{NOW + 1.25}"}, limits(ServiceLimit("", 3, 2))),
        (
            {"ratelimit-limit": "60, 60;w=60", "ratelimit-remaining": "3"},
            RateLimitHeaders((QuotaPolicy("", 60),), (ServiceLimit("", 3),)),
        ),
        ({"x-rate-limit-remaining": "3"}, limits(ServiceLimit("", 3))),
        ({"x-ratelimit-remaining": "-3"}, NOTHING),
        ({"x-ratelimit-remaining": "many", "ratelimit": '"a";r=1'}, limits(ServiceLimit("a", 1))),
        # Retry-After
        ({"retry-after": "120"}, RateLimitHeaders(retry_after=120)),
        ({"retry-after": " 0 "}, RateLimitHeaders(retry_after=0)),
        ({"retry-after": "0.5"}, RateLimitHeaders(retry_after=1)),
        ({"retry-after": formatdate(NOW + 30, usegmt=True)}, RateLimitHeaders(retry_after=30)),
        ({"retry-after": formatdate(NOW - 30, usegmt=True)}, RateLimitHeaders(retry_after=0)),
        ({"retry-after": "soon"}, NOTHING),
        ({"retry-after": "-1"}, NOTHING),
        ({"retry-after": "1e99"}, NOTHING),
        ({"retry-after": "9" * 400}, NOTHING),
        ({"retry-after": "nan"}, NOTHING),
        ({"retry-after": "Mon, 99 Foo 2030 00:00:00 GMT"}, NOTHING),
    ],
)
def test_valid_headers_are_read_and_invalid_ones_ignored(given: dict[str, str], headers: RateLimitHeaders) -> None:
    assert read_headers(given, now=NOW) == headers


def test_dates_are_relative_to_the_current_time() -> None:
    assert read_headers({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}).retry_after == 0


def test_the_draft_takes_precedence_over_the_triple() -> None:
    headers = RateLimitHeaders((QuotaPolicy("a", 9, 60),), (ServiceLimit("a", 3, 5),))
    written = dict(format_headers(headers, "both")) | {"x-ratelimit-remaining": "7"}
    assert read_headers(written) == headers


def test_characters_that_a_header_cannot_hold_are_replaced() -> None:
    limited, _ = limiter("5/minute")
    limited.check("a", 5)
    denied = limited.check("a")
    assert headers_of(denied, limited.limit, "größe\n").limits[0].name == "gr??e?"
    assert describe_denial(denied, "größe\n").policies == ("gr??e?",)


def test_a_warning_has_no_retry_after() -> None:
    limited, _ = limiter("5/minute")
    decision = limited.check("a", 5)
    assert decision.outcome is Outcome.WARN
    assert headers_of(decision, limited.limit).retry_after is None


# Slots and budgets ---------------------------------------------------------------------------------------------------

SLOTS = '"default";q=2;qu="concurrent-requests"'


@pytest.mark.parametrize(
    ("limit", "policy", "first", "last"),
    [
        ("2 in flight", SLOTS, '"default";r=1', '"default";r=0;t=1'),
        ("2 usd in all", '"default";q=2;qu="usd"', '"default";r=1', '"default";r=0'),
        ("2 in all", '"default";q=2', '"default";r=1', '"default";r=0'),
        ("2.50 credits:2 in all", '"default";q=2;qu="credits"', '"default";r=1', '"default";r=0'),
        ("2 usd/calendar day", '"default";q=2;qu="usd"', '"default";r=1;t=3600', '"default";r=0;t=3600'),
        ("9/minute; 2 in flight", '"9/minute";q=9;w=60, ' + SLOTS.replace("default", "2 in flight"),
         '"2 in flight";r=1', '"2 in flight";r=0;t=1'),
        ("9/minute; 2 in all", '"9/minute";q=9;w=60, "2 in all";q=2', '"2 in all";r=1', '"2 in all";r=0'),
    ],
)  # fmt: skip
def test_slots_and_budgets_have_units_and_a_reset_only_if_it_is_known(
    limit: str, policy: str, first: str, last: str
) -> None:
    by, clock = limiter(limit)
    if "calendar" in limit:
        clock.advance(by.peek("a").reset_after - 3600)
    writer = HeaderWriter("ratelimit").for_limit(by.limit)
    holds = [by.hold("a") for _ in range(3)]
    assert [bool(hold) for hold in holds] == [True, True, False]
    for hold, told in ((holds[0], first), (holds[2], last)):
        assert writer.write(hold.decision) == [(b"ratelimit-policy", policy.encode()), (b"ratelimit", told.encode())]
    read = read_headers({name.decode(): value.decode() for name, value in writer.write(holds[0].decision)})
    assert read.limits[0].reset is None or "calendar" in limit


def test_the_older_triple_tells_of_slots_only_in_denials() -> None:
    by, _ = limiter("1 in flight")
    writer = HeaderWriter("x-ratelimit").for_limit(by.limit)
    hold = by.hold("a")
    assert writer.write(hold.decision) == []
    denied = by.hold("a")
    assert writer.write(denied.decision) == [
        (b"x-ratelimit-limit", b"1"),
        (b"x-ratelimit-remaining", b"0"),
        (b"x-ratelimit-reset", b"1"),
    ]
    assert describe_denial(denied.decision, "default").retry_after_ms == 1000


def test_the_older_triple_has_no_reset_for_a_budget_in_all() -> None:
    by, _ = limiter("2 usd in all")
    writer = HeaderWriter("x-ratelimit").for_limit(by.limit)
    decisions = [by.check("a") for _ in range(3)]
    for decision, left, passes in zip(decisions, (b"1", b"0", b"0"), (True, True, False), strict=True):
        assert bool(decision) is passes
        assert writer.write(decision) == [(b"x-ratelimit-limit", b"2"), (b"x-ratelimit-remaining", left)]
    assert describe_denial(decisions[2], "default").retry_after_ms == 60_000


def test_a_request_may_be_repeated_after_temporary_statuses() -> None:
    temporary = [status for status in range(100, 600) if is_temporary(status)]
    assert temporary == [408, 425, 429, *range(500, 600)]
