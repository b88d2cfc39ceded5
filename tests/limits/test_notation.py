"""Limits as text."""

import math
import re
from fractions import Fraction
from typing import Any

import pytest

from headgate import (
    BLOCKED,
    UNLIMITED,
    AllOf,
    Budget,
    InvalidInput,
    Limit,
    SlidingWindow,
    Slots,
    TokenBucket,
    parse,
    per_minute,
)
from headgate.limits.notation import rate_of
from tests.support.refusals import refusal

pytestmark = pytest.mark.once

EXPECTED = (
    "'COUNT/UNIT' or 'COUNT per N UNITS', then perhaps 'burst N' or 'sliding' (such as '60/minute burst 10'; UNIT is "
    "ms, second, minute, hour, day, week, month or year)"
)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("60/minute burst 10", per_minute(60, burst=10)),
        ("10/minute", per_minute(10)),
        ("10 per 5 minutes", TokenBucket(10, 10, 300)),
        ("10 / 5 minute", TokenBucket(10, 10, 300)),
        ("1 per day", TokenBucket(1, 1, 86_400)),
        ("  10   PER   2   Hours ", TokenBucket(10, 10, 7200)),
        ("100/hour;5/second", AllOf([TokenBucket(100, 100, 3600), TokenBucket(5, 5, 1)])),
        ("9/hour, 5/s | 1/month", AllOf([TokenBucket(9, 9, 3600), TokenBucket(5, 5, 1), TokenBucket(1, 1, 2_592_000)])),
        ("0.5/second", TokenBucket(1, 0.5, 1)),
        ("2/ms", TokenBucket(2, 2, Fraction(1, 1000))),
        ("2/s", TokenBucket(2, 2, 1)),
        ("2/m burst 5", TokenBucket(5, 2, 60)),
        ("2/hrs", TokenBucket(2, 2, 3600)),
        ("2/week", TokenBucket(2, 2, 604_800)),
        ("2/wks", TokenBucket(2, 2, 604_800)),
        ("10per minute", TokenBucket(10, 10, 60)),
        ("10 per5minutes", TokenBucket(10, 10, 300)),
        ("2perday", TokenBucket(2, 2, 86_400)),
        ("1000/year", TokenBucket(1000, 1000, 31_536_000)),
        ("100 per 1.5 seconds sliding", SlidingWindow(100, 1.5)),
        ("500 usd/calendar month in Europe/Berlin", Budget(500, "month", unit="usd", zone="Europe/Berlin")),
        ("500 USD per Calendar Month IN Europe/Berlin", Budget(500, "month", unit="usd", zone="Europe/Berlin")),
        ("5usd / calendar  week in America/Port-au-Prince",
         Budget(5, "week", unit="usd", zone="America/Port-au-Prince")),
        ("1/calendar year in Etc/GMT+5", Budget(1, "year", zone="Etc/GMT+5")),
        ("500/calendar day", Budget(500, "day")),
        ("500 per calendar day in UTC", Budget(500, "day")),
        ("100000 tokens/calendar hour", Budget(100_000, "hour", unit="tokens")),
        ("2 usd in all", Budget(2, unit="usd")),
        ("2.50 credits:2 in all", Budget("2.5", unit="credits:2")),
        ("2 in All", Budget(2)),
        ("2 in:1 in all", Budget(2, unit="in:1")),
        ("2 per:1 per calendar day", Budget(2, "day", unit="per:1")),
        ("5 in flight", Slots(5)),
        ("5  IN  Flight", Slots(5)),
        ("5 usd/calendar day; 9 usd in all | 3 in flight",
         AllOf([Budget(5, "day", unit="usd"), Budget(9, unit="usd"), Slots(3)])),
        ("Unlimited", UNLIMITED),
        ("blocked", BLOCKED),
    ],
)  # fmt: skip
def test_parse_accepts(text: str, limit: Limit) -> None:
    assert parse(text) == limit


@pytest.mark.parametrize(
    "bad", ["", "abc", "10", "10/", "/minute", "10/fortnight", "10/minute burst", "-5/minute", "1e3/minute",
            "10/minute burst 1.5", "10/minute sliding burst 5", "10/minute; ", "9" * 40 + "/minute", "\uff15/minute"],
)  # fmt: skip
def test_parse_refuses(bad: str) -> None:
    part = bad.split(";")[-1].strip()
    where = "limit" if part == bad else f"limit {bad!r}"
    assert refusal(parse, bad) == f"{where}: expected {EXPECTED}, got {part!r}"


def test_a_refusal_shows_the_start_of_a_long_text() -> None:
    with pytest.raises(InvalidInput, match=r"limit: expected 'COUNT/UNIT'.* got '5/minute5/minute") as refused:
        parse("5/minute" * 50_000)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "bad", ["5/calendar quarter", "5/calendar", "5/calendar minute", "5/2 calendar days", "5 calendar days",
            "5/calendar day in", "5/calendar day in Europe/Bérlin", "5/calendar day burst 3", "5 in", "5 in total",
            "5.5 in flight", "5 usd in flight", "usd in all", "-5 usd in all", "5 credits:/calendar day",
            "5 usd per fortnight"],
)  # fmt: skip
def test_parse_says_how_budgets_and_slots_are_written(bad: str) -> None:
    assert refusal(parse, bad) == (
        "limit: expected 'AMOUNT UNIT/calendar PERIOD in ZONE' (such as '500 usd/calendar month in "
        "Europe/Berlin', or '500/calendar day'; PERIOD is hour, day, week, month or year), 'AMOUNT UNIT in all' or "
        "'COUNT in flight', "
        f"got {bad!r}"
    )


A_RATE_OF_USD = "a rate without a unit, such as '5/month', or a budget, such as '5 usd/calendar month'"


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (
            "10 tokens/minute",
            "a rate without a unit, such as '10/minute', or a budget, such as '10 tokens/calendar day'",
        ),
        ("5 usd/month", A_RATE_OF_USD),
        ("5usd per Month sliding", A_RATE_OF_USD),
        ("5 inflight", "'COUNT in flight', such as '5 in flight'"),
        ("5 In-Flight", "'COUNT in flight', such as '5 in flight'"),
        ("7 concurrent", "'COUNT in flight', such as '7 in flight'"),
        ("0 slots", "'COUNT in flight', such as '5 in flight'"),
        ("100 calls/minute", "a rate without a unit, such as '100/minute', or a budget, such as '100/calendar day'"),
        ("10 calendar/day", "a rate without a unit, such as '10/day', or a budget, such as '10/calendar day'"),
        ("2.5 tokens/minute", "a rate without a unit, such as '2.5/minute'"),
        ("5 usd/weeks", "a rate without a unit, such as '5/weeks', or a budget, such as '5 usd/calendar week'"),
    ],
)
def test_parse_says_how_what_is_nearly_a_limit_is_written(bad: str, expected: str) -> None:
    assert refusal(parse, bad) == f"limit: expected {expected}, got {bad!r}"


@pytest.mark.parametrize("word", ["calls", "tokens", "usd", "in", "burst", "per", "calendar", "slots", "concurrent"])
@pytest.mark.parametrize("count", ["0", "0.0000001", "0.5", "2.5", "5", "1,000", "1000000", "9" * 20])
def test_what_a_refusal_suggests_can_be_read(count: str, word: str) -> None:
    for end in ["", "/s", "/ms", " per minute", "/hours", "/days", "/weeks", "/months sliding", "/calendar day"]:
        try:
            parse(f"{count} {word}{end}")
        except InvalidInput as error:
            text = str(error)
        else:
            continue
        for suggested in re.findall(r"such as '(\d[^']*)'|\(write '([^']*)'\)", text):
            parse("".join(suggested))  # raises nothing


@pytest.mark.parametrize(
    ("bad", "number", "right"),
    [
        ("1,000/minute", "1,000", "1000/minute"),
        ("5/second, 1,000,000 per day", "1,000,000", "5/second, 1000000 per day"),
        ("5/minute burst 1,000", "1,000", "5/minute burst 1000"),
        ("1,000/minute; unlimited", "1,000", "1000/minute; unlimited"),
        ("blocked, 1,000 usd in all", "1,000", "blocked, 1000 usd in all"),
    ],
)
def test_parse_says_that_a_comma_separates_limits(bad: str, number: str, right: str) -> None:
    without = f"numbers without commas, because a comma separates limits (write {right!r})"
    assert refusal(parse, bad) == f"limit {bad!r}: expected {without}, got {number!r}"


def test_parse_names_the_comma_beside_another_mistake() -> None:
    assert refusal(parse, "5/second; 1,000 usd/month") == (
        "limit '5/second; 1,000 usd/month': expected numbers without commas, because a comma separates limits: a rate "
        "without a unit, such as '1000/month', or a budget, such as '1000 usd/calendar month', got '1,000'"
    )


@pytest.mark.parametrize("bad", ["60/minute burst 5,100/fortnight", "5/minute burst 100,200/huor", "1234,567/hour"])
def test_parse_takes_no_other_mistake_for_a_comma_in_a_number(bad: str) -> None:
    assert "without commas" not in refusal(parse, bad)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("0 usd in all", "Budget amount: expected a number above 0 ('blocked' lets nothing pass), got '0'"),
        ("0.0000001 usd/calendar day",
         ("Budget amount: expected a number with at most 6 decimals (round it, if it was computed), "
          "got '0.0000001'")),
        ("5 credits/calendar day",
         ("unit: expected usd, eur, tokens, requests, or another name with its decimals, such as 'credits:2', "
          "got 'credits'")),
        ("5/calendar day in Berlin",
         "calendar zone: expected the IANA name of a time zone, such as 'Europe/Berlin', got 'Berlin'"),
        ("0 in flight", "Slots count: expected a whole number from 1 to 100000, got 0"),
        ("0/minute", "TokenBucket refill: expected a number above 0, got 0; to let nothing pass, write 'blocked'"),
        ("0/minute sliding",
         "SlidingWindow limit: expected a whole number from 1 to 1000000, got 0; to let nothing pass, write 'blocked'"),
        ("5/minute burst 0",
         ("TokenBucket capacity: expected a whole number from 1 to 9007199254740991, got 0; "
          "to let nothing pass, write 'blocked'")),
        ("5 per 0 minutes", "TokenBucket per: expected a number above 0, got 0"),
        ("2.5/minute sliding", "SlidingWindow limit: expected a whole number, got '2.5'"),
    ],
)  # fmt: skip
def test_parse_refuses_impossible_limits(bad: str, text: str) -> None:
    assert refusal(parse, bad) == f"limit {bad!r}: {text}"


@pytest.mark.parametrize("bad", [None, 5, b"5/minute"])
def test_parse_refuses_other_types(bad: Any) -> None:
    assert refusal(parse, bad) == f"limit: expected a string such as '60/minute', got {bad!r}"


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("3600/calendar hour", 1.0),
        ("86.4 usd/calendar day in Europe/Berlin", 0.001),
        ("2592/calendar month", 0.001),
        ("2 usd in all", 0.0),
        ("5 in flight", 0.0),
        ("5 in flight; 5/second", 5.0),
        ("5 in flight; 5 tokens/calendar day; 5/second", 5 / 86_400),
        ("unlimited", math.inf),
    ],
)
def test_limits_as_a_rate(text: str, rate: float) -> None:
    assert rate_of(parse(text)) == pytest.approx(rate)
