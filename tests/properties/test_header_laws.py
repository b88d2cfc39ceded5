"""Headers and bodies survive a round trip."""

from hypothesis import given
from hypothesis import strategies as st

from headgate import Limiter, ManualClock, MemoryStore
from headgate.http import ProblemDetails, QuotaPolicy, RateLimitHeaders, ServiceLimit, read_denial, read_headers
from headgate.limits.all_of import AllOf
from headgate.limits.decision import Limit
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.token_bucket import TokenBucket
from tests.support.rate_limit_headers import format_headers, headers_of, write_headers

counts = st.integers(0, 999_999_999_999_999)
names = st.text(st.characters(min_codepoint=32, max_codepoint=126))
keys = st.none() | st.binary(max_size=40)
policies = st.builds(QuotaPolicy, names, counts, st.none() | counts, names, keys)
service_limits = st.builds(ServiceLimit, names, counts, st.none() | counts, keys)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(
        RateLimitHeaders,
        st.lists(policies).map(tuple),
        st.lists(service_limits, min_size=1).map(tuple),
        st.none() | counts,
    )
)
def test_headers_survive_a_round_trip(headers: RateLimitHeaders) -> None:
    assert read_headers(dict(format_headers(headers))) == headers
    assert read_headers(dict(format_headers(headers, "both"))) == headers


@given(counts, counts, st.none() | st.integers(0, 999_999_999), st.none() | counts)
def test_the_triple_survives_a_round_trip(limit: int, remaining: int, reset: int | None, retry: int | None) -> None:
    headers = RateLimitHeaders((QuotaPolicy("", limit),), (ServiceLimit("", remaining, reset),), retry)
    assert read_headers(dict(format_headers(headers, "x-ratelimit"))) == headers


@given(st.builds(ProblemDetails, st.sampled_from([429, 503]), names, texts, counts, texts, st.lists(texts).map(tuple)))
def test_denials_survive_a_round_trip(denial: ProblemDetails) -> None:
    assert read_denial(denial.encode()) == denial


@given(st.text() | st.text('";=,: \t\\qrtwpk0123456789?@%ab*'))
def test_any_value_is_tolerated(value: str) -> None:
    """It is parsed or ignored, and the parsed part can be written."""
    headers = read_headers(
        {"ratelimit": value, "ratelimit-policy": value, "retry-after": value, "x-ratelimit-reset": value}
    )
    again = read_headers(dict(format_headers(headers)))
    assert (again.policies, again.limits) == (headers.policies, headers.limits)


limits = st.builds(TokenBucket, st.integers(1, 50), st.integers(1, 50), st.sampled_from([1, 7, 60])) | st.builds(
    SlidingWindow, st.integers(1, 50), st.sampled_from([1, 7, 60])
)


@given(
    limits | st.lists(limits, min_size=2, max_size=3, unique=True).map(AllOf),
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 5)), min_size=1, max_size=20),
)
def test_the_headers_of_every_decision_are_true(limit: Limit, asked: list[tuple[int, float]]) -> None:
    """No more passes than `remaining`, and a retry after the stated wait is not early."""
    clock = ManualClock()
    limiter = Limiter(limit, store=MemoryStore(clock=clock))
    for cost, pause in asked:
        decision = limiter.check("a", cost)
        headers = headers_of(decision, limiter.limit, "n")
        written = write_headers(decision, limiter.limit, "n", "both")
        assert read_headers(dict(written)) == headers._replace(retry_after=None)
        assert written == format_headers(headers._replace(retry_after=None), "both")
        (limit_left,) = headers.limits
        quota = next(of for of in headers.policies if of.name == limit_left.name)
        assert 0 <= limit_left.remaining <= quota.quota
        assert bool(limiter.peek("a", limit_left.remaining + 1)) is False
        assert (headers.retry_after is None) == bool(decision)
        if headers.retry_after is not None and limit_left.reset is not None:
            assert headers.retry_after >= limit_left.reset
        clock.advance(round(pause, 6))
