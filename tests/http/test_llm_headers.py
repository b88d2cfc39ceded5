"""The headers of OpenAI and Anthropic, as they are and as they shouldn't be."""

from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.http import DatedLimit, QuotaPolicy, RateLimitHeaders, ServiceLimit, read_headers

pytestmark = pytest.mark.once

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z
DURATIONS = {
    "6m0s": 360,
    "1s": 1,
    "17ms": 0.017,
    "1h2m3.5s": 3723.5,
    "2m59.56s": 179.56,
    "24h0m0s": 86_400,
    "1h": 3600,
    "0s": 0,
    "8.64s": 8.64,
    "1.5h": 5400,
    "120us": 0.00012,
    "120µs": 0.00012,
    "1ns": 0.000001,  # rounded up
    "1.0000001s": 1.000001,
    " 7s ": 7,
    "30": 30,
    "33011.382867097855": 33011.382868,
}
NO_DURATIONS = [
    "",
    "s",
    "ms",
    "-1s",
    "+1s",
    "1e3s",
    "1 s",
    "1d",
    "6m0",
    "0x1s",
    "1s,2s",
    "nan",
    "inf",
    "٣s",
    "1" * 16,
    "1s" * 99,
]


def read_reset(value: str, **more: str) -> float | None:
    headers = {"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": value, **more}
    (limit,) = read_headers(headers, now=NOW).limits
    return limit.reset


def test_the_headers_of_openai() -> None:
    headers = {
        "x-ratelimit-limit-requests": "5000",
        "x-ratelimit-limit-tokens": "160000",
        "x-ratelimit-limit-tokens_usage_based": "160000",
        "x-ratelimit-remaining-requests": "4999",
        "x-ratelimit-remaining-tokens": "159976",
        "x-ratelimit-remaining-tokens_usage_based": "159976",
        "x-ratelimit-reset-requests": "12ms",
        "x-ratelimit-reset-tokens": "6m0s",
    }
    assert read_headers(headers) == RateLimitHeaders(
        (QuotaPolicy("requests", 5000), QuotaPolicy("tokens", 160_000, unit="tokens")),
        (ServiceLimit("requests", 4999, 0.012), ServiceLimit("tokens", 159_976, 360)),
    )
    assert not any(isinstance(limit, DatedLimit) for limit in read_headers(headers).limits)


def test_the_headers_of_anthropic() -> None:
    headers = {"date": "Fri, 15 Jan 2027 08:00:00 GMT"}
    for name, limit, remaining, reset in (
        ("requests", 1000, 999, "2027-01-15T08:00:00Z"),
        ("tokens", 96_000, 96_000, "2027-01-15T07:59:59Z"),
        ("input-tokens", 80_000, 79_000, "2027-01-15T08:00:01.5Z"),
        ("output-tokens", 16_000, 0, "2027-01-15T09:01:00+01:00"),
    ):
        headers[f"anthropic-ratelimit-{name}-limit"] = str(limit)
        headers[f"anthropic-ratelimit-{name}-remaining"] = str(remaining)
        headers[f"anthropic-ratelimit-{name}-reset"] = reset
    found = read_headers(headers, now=5)
    assert found == RateLimitHeaders(
        (
            QuotaPolicy("requests", 1000),
            QuotaPolicy("tokens", 96_000, unit="tokens"),
            QuotaPolicy("input-tokens", 80_000, unit="tokens"),
            QuotaPolicy("output-tokens", 16_000, unit="tokens"),
        ),
        (
            ServiceLimit("requests", 999, 0),
            ServiceLimit("tokens", 96_000, 0),
            ServiceLimit("input-tokens", 79_000, 1.5),
            ServiceLimit("output-tokens", 0, 60),
        ),
    )
    assert all(isinstance(limit, DatedLimit) for limit in found.limits)


@pytest.mark.parametrize("value", DURATIONS)
def test_durations(value: str) -> None:
    assert read_reset(value) == DURATIONS[value]


@pytest.mark.parametrize("value", NO_DURATIONS)
def test_other_durations_are_ignored(value: str) -> None:
    assert read_reset(value) is None


def test_some_servers_state_a_moment_instead_of_a_duration() -> None:
    assert read_reset(f"{NOW + 7.5}") == 7.5
    assert read_reset(f"{NOW + 7.5}", date=formatdate(NOW + 5, usegmt=True)) == 2.5
    assert read_reset(f"{NOW - 7.5}") == 0


def test_a_date_that_is_too_long_to_be_one_is_not_read() -> None:
    date = formatdate(NOW + 5, usegmt=True)
    assert read_reset(f"{NOW + 7.5}", date=f" {date} ") == 2.5
    assert read_reset(f"{NOW + 7.5}", date=" " * 64 + date) == 7.5


def read_moment(value: str, **more: str) -> float | None:
    headers = {"anthropic-ratelimit-requests-remaining": "3", "anthropic-ratelimit-requests-reset": value, **more}
    (limit,) = read_headers(headers, now=NOW).limits
    return limit.reset


@pytest.mark.parametrize(
    ("value", "reset"),
    [
        ("2027-01-15T08:00:30Z", 30),
        ("2027-01-15t08:00:30z", 30),
        ("2027-01-15 08:00:30Z", 30),
        ("2027-01-15T08:00:30.123456789Z", 30.123457),
        ("2027-01-15T10:00:30+02:00", 30),
        ("2027-01-15T07:00:00Z", 0),
        ("0001-01-01T00:00:00Z", 0),
        ("9999-12-31T23:59:59Z", 251_602_300_799),
        ("2027-01-15T08:00:30", None),
        ("2027-01-15", None),
        ("2027-13-15T08:00:30Z", None),
        ("2027-01-15T08:00:60Z", None),
        ("0001-01-01T00:00:00+23:59", 0),
        ("9999-12-31T23:59:59-23:59", 251_602_387_139),
        ("2027-01-15T08:00:30+25:00", None),
        ("2027-01-15T08:00:30." + "1" * 99 + "Z", None),
        ("٢027-01-15T08:00:30Z", None),
        ("30", None),
        ("", None),
    ],
)
def test_moments(value: str, reset: float | None) -> None:
    assert read_moment(value) == reset


@pytest.mark.parametrize("date", ["", "yesterday", "Fri, 99 Jan 2027 08:00:00 GMT", "x" * 10_000])
def test_without_a_valid_date_moments_are_compared_with_the_local_clock(date: str) -> None:
    assert read_moment("2027-01-15T08:00:30Z", date=date) == 30


def test_a_date_is_believed_even_if_the_clock_of_the_server_is_wrong() -> None:
    assert read_moment("2001-01-01T00:01:00Z", date="Mon, 01 Jan 2001 00:00:00 GMT") == 60


@pytest.mark.parametrize("remaining", ["-1", "", "many", "1.5", "9" * 16, "1" * 5000, "٣", "1_000", "0x1"])
def test_an_invalid_remainder_says_nothing(remaining: str) -> None:
    """Azure has been seen to send -1."""
    for name in ("x-ratelimit-remaining-tokens", "anthropic-ratelimit-tokens-remaining"):
        assert read_headers({name: remaining, "x-ratelimit-limit-tokens": "5"}) == RateLimitHeaders()


def test_without_a_valid_limit_the_remainder_counts() -> None:
    headers = {"x-ratelimit-remaining-tokens": "5", "x-ratelimit-limit-tokens": "-1"}
    assert read_headers(headers) == RateLimitHeaders((), (ServiceLimit("tokens", 5),))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "1500.5"}, 1.5005),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after-ms": "1999", "retry-after": "1"}, 1.999),
        ({"retry-after-ms": "10", "retry-after": "60"}, 60),
        ({"retry-after-ms": "90000", "retry-after": "60"}, 90),
        ({"retry-after-ms": "-5", "retry-after": "2"}, 2),
        ({"retry-after-ms": "soon"}, None),
        ({"retry-after-ms": "1e3"}, None),
        ({"retry-after-ms": "9" * 400}, None),
    ],
)
def test_retry_after_in_milliseconds(headers: dict[str, str], seconds: float | None) -> None:
    assert read_headers(headers).retry_after == seconds


def test_the_draft_and_the_triple_stand_beside_them() -> None:
    openai = {"x-ratelimit-remaining-tokens": "5", "x-ratelimit-remaining-requests": "7"}
    draft = read_headers({**openai, "ratelimit": '"default";r=1;t=2, "requests";r=3'})
    assert draft.limits == (ServiceLimit("default", 1, 2), ServiceLimit("requests", 3), ServiceLimit("tokens", 5))
    triple = read_headers({**openai, "x-ratelimit-remaining": "1"})
    assert triple.limits == (ServiceLimit("", 1), ServiceLimit("requests", 7), ServiceLimit("tokens", 5))


@given(st.text() | st.text("0123456789.:-+TZhmsµun ") | st.from_regex(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|\+\d\d:\d\d)"))
def test_any_value_is_tolerated(value: str) -> None:
    names: Any = [f"x-ratelimit-{part}-requests" for part in ("limit", "remaining", "reset")]
    names += [f"anthropic-ratelimit-tokens-{part}" for part in ("limit", "remaining", "reset")]
    headers = dict.fromkeys([*names, "date", "retry-after-ms"], value)
    for found in (read_headers(headers), read_headers({**headers, names[1]: "1", names[4]: "1"})):
        for limit in found.limits:
            assert limit.remaining >= 0
            assert limit.reset is None or limit.reset >= 0
        assert found.retry_after is None or found.retry_after >= 0
