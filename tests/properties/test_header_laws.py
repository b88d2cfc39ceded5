"""What is written in headers and bodies is read back as it was."""

from hypothesis import given
from hypothesis import strategies as st

from headgate import Limiter, ManualClock, MemoryStore
from headgate.http import headers as rate_headers
from headgate.http.headers import Denial, Left, Quota, Told
from headgate.limits.all_of import AllOf
from headgate.limits.decision import Limit
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.token_bucket import TokenBucket

counts = st.integers(0, 999_999_999_999_999)
names = st.text(st.characters(min_codepoint=32, max_codepoint=126))
keys = st.none() | st.binary(max_size=40)
policies = st.builds(Quota, names, counts, st.none() | counts, names, keys)
lefts = st.builds(Left, names, counts, st.none() | counts, keys)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(policies).map(tuple))
def test_policies(given: tuple[Quota, ...]) -> None:
    assert rate_headers.parse_policies(rate_headers.format_policies(given)) == given


@given(st.lists(lefts).map(tuple))
def test_what_is_left(given: tuple[Left, ...]) -> None:
    assert rate_headers.parse_left(rate_headers.format_left(given)) == given


@given(st.builds(Told, st.lists(policies).map(tuple), st.lists(lefts, min_size=1).map(tuple), st.none() | counts))
def test_headers(told: Told) -> None:
    assert rate_headers.read(dict(rate_headers.write(told))) == told
    assert rate_headers.read(dict(rate_headers.write(told, "both"))) == told


@given(counts, counts, st.none() | st.integers(0, 999_999_999), st.none() | counts)
def test_the_triple(limit: int, remaining: int, reset: int | None, retry: int | None) -> None:
    told = Told((Quota("", limit),), (Left("", remaining, reset),), retry)
    assert rate_headers.read(dict(rate_headers.write(told, "x-ratelimit"))) == told


@given(st.builds(Denial, st.sampled_from([429, 503]), names, texts, counts, texts, st.lists(texts).map(tuple)))
def test_bodies(denial: Denial) -> None:
    assert rate_headers.read_denial(denial.encode()) == denial


@given(st.text() | st.text('";=,: \t\\qrtwpk0123456789?@%ab*'))
def test_anything_can_come(value: str) -> None:
    """It is read or left out, quickly, and what was read can be written."""
    told = rate_headers.read(
        {"ratelimit": value, "ratelimit-policy": value, "retry-after": value, "x-ratelimit-reset": value}
    )
    again = rate_headers.read(dict(rate_headers.write(told)))
    assert (again.policies, again.left) == (told.policies, told.left)


limits = st.builds(TokenBucket, st.integers(1, 50), st.integers(1, 50), st.sampled_from([1, 7, 60])) | st.builds(
    SlidingWindow, st.integers(1, 50), st.sampled_from([1, 7, 60])
)


@given(
    limits | st.lists(limits, min_size=2, max_size=3).map(AllOf),
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 5)), min_size=1, max_size=20),
)
def test_every_decision(limit: Limit, asked: list[tuple[int, float]]) -> None:
    """What a decision tells is true: nothing more passes than is left, and who waits as told isn't early."""
    clock = ManualClock()
    limiter = Limiter(limit, store=MemoryStore(clock=clock))
    for cost, pause in asked:
        decision = limiter.check("a", cost)
        told = rate_headers.told(decision, limiter.limit, "n")
        assert rate_headers.read(dict(rate_headers.write(told, "both"))) == told
        written = rate_headers.Writer("both").lines(limiter.limit, "n").headers(decision)
        assert [(name.decode(), value.decode()) for name, value in written] == rate_headers.write(
            told._replace(retry_after=None), "both"
        )
        (left,) = told.left
        quota = next(of for of in told.policies if of.name == left.name)
        assert 0 <= left.remaining <= quota.quota
        assert bool(limiter.peek("a", left.remaining + 1)) is False
        assert (told.retry_after is None) == bool(decision)
        if told.retry_after is not None and left.reset is not None:
            assert told.retry_after >= left.reset
        clock.advance(round(pause, 6))
