"""Periods of the calendar, against the labels of local times that zoneinfo gives."""

import os
import subprocess
import sys
import zoneinfo
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.limits.calendar import PERIODS, Calendar
from tests.support.refusals import refusal

pytestmark = pytest.mark.once

ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Pacific/Apia"]
HOUR = 3_600_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LABELS: dict[str, Callable[[datetime], object]] = {
    "hour": lambda local: (local.date(), local.hour),
    "day": datetime.date,
    "week": lambda local: tuple(local.isocalendar())[:2],
    "month": lambda local: (local.year, local.month),
    "year": lambda local: local.year,
}


def micros(*date: Any, zone: str = "UTC", fold: int = 0) -> int:
    moment = datetime(*date, fold=fold).replace(tzinfo=ZoneInfo(zone))
    return (moment - EPOCH) // timedelta(microseconds=1)


FROM, TO = micros(2010, 1, 1), micros(2030, 1, 1)


def local(moment: int, zone: str) -> datetime:
    return (EPOCH + timedelta(microseconds=moment)).astimezone(ZoneInfo(zone))


def label(period: str, moment: int, zone: str) -> object:
    return LABELS[period](local(moment, zone))


def periods(period: str, zone: str, first: int, last: int) -> Iterator[tuple[int, int]]:
    calendar, moment = Calendar(period, zone), first
    while moment < last:
        found = calendar.at(moment)
        yield found
        moment = found[1]


@cache
def offset_changes(zone: str) -> list[int]:
    """The hours before which the offset of a zone has changed."""
    info = ZoneInfo(zone)
    offsets = [
        (moment, (EPOCH + timedelta(microseconds=moment)).astimezone(info).utcoffset())
        for moment in range(FROM, TO, HOUR)
    ]
    return [after for (_, one), (after, other) in pairwise(offsets) if one != other]


def check(period: str, zone: str, start: int, end: int) -> None:
    """Its neighbours have other labels, and all in between have the same."""
    own = label(period, start, zone)
    assert label(period, start - 1, zone) != own
    assert label(period, end - 1, zone) == own
    assert label(period, end, zone) != own
    assert all(label(period, moment, zone) == own for moment in range(start, end, max((end - start) // 3, 1)))


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("period", [pytest.param("hour", marks=pytest.mark.long), "day", "week", "month", "year"])
def test_every_boundary_is_one_of_the_zone_to_the_microsecond(period: str, zone: str) -> None:
    found = list(periods(period, zone, FROM, TO))
    for start, end in found:
        check(period, zone, start, end)
    assert all(one[1] == other[0] for one, other in pairwise(found))
    labels = [label(period, start, zone) for start, _ in found]
    assert len(set(labels)) == len(labels)
    assert {label(period, moment, zone) for moment in range(FROM, TO, 12 * HOUR)} <= set(labels)  # none is left out


@pytest.mark.long
@pytest.mark.parametrize("zone", ZONES)
def test_every_hour_around_every_change_of_the_clock_is_one_period(zone: str) -> None:
    """And every hour of one year: those of twenty take longer."""
    spans = [(change - 30 * HOUR, change + 30 * HOUR) for change in offset_changes(zone)]
    for first, last in [*spans, (micros(2028, 1, 1), micros(2029, 1, 1))]:
        found = list(periods("hour", zone, first, last))
        for start, end in found:
            check("hour", zone, start, end)
        assert all(one[1] == other[0] for one, other in pairwise(found))


def test_the_zones_of_these_tests_change_their_clocks() -> None:
    assert [len(offset_changes(zone)) for zone in ZONES] == [0, 40, 40, 40, 0, 23]


@given(st.sampled_from(PERIODS), st.sampled_from(sorted(zoneinfo.available_timezones() - {"localtime"})), st.data())
def test_any_moment_is_within_its_period_in_any_zone(period: str, zone: str, data: st.DataObject) -> None:
    calendar = Calendar(period, zone)
    moment = data.draw(st.integers(micros(1971, 1, 1), micros(2100, 1, 1)))
    start, end = calendar.at(moment)
    assert start <= moment < end
    for edge in (start, end - 1):
        assert calendar.at(edge) == (start, end)
    before, after = calendar.previous(moment), calendar.next(moment)
    assert before == calendar.at(start - 1)
    assert after == calendar.at(end)
    assert (before[1], after[0]) == (start, end)
    assert before[0] < before[1]
    assert after[0] < after[1]


@pytest.mark.parametrize(
    ("period", "zone", "date", "hours"),
    [
        ("day", "Europe/Berlin", (2026, 3, 29), 23),
        ("day", "Europe/Berlin", (2026, 10, 25), 25),
        ("hour", "Europe/Berlin", (2026, 10, 25, 2), 2),
        ("hour", "Europe/Berlin", (2026, 10, 25, 3), 1),
        ("week", "Europe/Berlin", (2026, 3, 23), 167),
        ("month", "Europe/Berlin", (2026, 3, 1), 743),
        ("month", "UTC", (2028, 2, 1), 29 * 24),
        ("month", "UTC", (2100, 2, 1), 28 * 24),
        ("year", "UTC", (2028, 1, 1), 366 * 24),
        ("day", "Australia/Lord_Howe", (2026, 10, 4), 23.5),
        ("hour", "Australia/Lord_Howe", (2026, 10, 4, 2, 30), 0.5),
        ("hour", "Australia/Lord_Howe", (2026, 4, 5, 1), 1.5),
        ("day", "America/Sao_Paulo", (2018, 11, 4, 1), 23),  # begins at 01:00: summer time began at midnight
        ("hour", "Asia/Kathmandu", (2026, 1, 1, 5), 1),
        ("month", "Pacific/Apia", (2011, 12, 1), 30 * 24),
        ("hour", "Antarctica/Troll", (2026, 10, 25, 2), 3),  # 01:xx and 02:xx come again, and reopen no period
        ("hour", "America/St_Johns", (2010, 3, 14, 0), 1 / 60),  # from 00:01 to 01:01: 01:00 is never shown
        ("hour", "America/St_Johns", (2010, 3, 14, 1, 1), 59 / 60),
        ("day", "America/St_Johns", (2010, 11, 7), 24 + 59 / 60 + 1 / 60),  # from 00:01 back to 23:01
    ],
)  # fmt: skip
def test_how_long_a_period_is(period: str, zone: str, date: tuple[int, ...], hours: float) -> None:
    first = micros(*date, zone=zone)
    start, end = Calendar(period, zone).at(first)
    assert start == first
    assert end - start == round(hours * HOUR)


def test_a_day_that_a_zone_skips_is_no_period() -> None:
    """Samoa went from 29 to 31 December 2011."""
    days = Calendar("day", "Pacific/Apia")
    before, after = days.at(micros(2011, 12, 30, 9, 59)), days.at(micros(2011, 12, 30, 10))
    assert before[1] == after[0] == micros(2011, 12, 30, 10)
    assert [local(start, "Pacific/Apia").day for start, _ in (before, after)] == [29, 31]
    assert days.next(before[0]) == after
    assert days.previous(after[0]) == before


def test_what_was_shown_again_stays_in_the_period_that_has_begun() -> None:
    """St. John's went from 00:01 on 7 November 2010 back to 23:01 on the 6th."""
    days = Calendar("day", "America/St_Johns")
    start, end = days.at(micros(2010, 11, 6, 23, 30, zone="America/St_Johns", fold=1))
    assert start == micros(2010, 11, 7, zone="America/St_Johns")
    assert end == micros(2010, 11, 8, zone="America/St_Johns")
    assert days.at(micros(2010, 11, 6, 23, 30, zone="America/St_Johns"))[1] == start


def test_moments_from_1970_to_9996_are_counted() -> None:
    last = micros(9996, 12, 31, 23, 59, 59, 999_999)
    for period in PERIODS:
        for zone in ("UTC", "Pacific/Kiritimati", "Pacific/Niue"):
            calendar = Calendar(period, zone)
            for moment in (0, last):
                start, end = calendar.at(moment)
                assert start <= moment < end
                assert calendar.previous(moment)[1] == start
                assert calendar.next(moment)[0] == end
            for bad in (-1, last + 1, 2**63):
                assert refusal(calendar.at, bad) == (
                    f"calendar: expected a moment from 1970 to the end of 9996, in microseconds since 1970, got {bad}"
                )


@pytest.mark.parametrize(
    "bad",
    ["", "Berlin", "Europe", "Europe/Bérlin", "europe/berlin", "../Berlin", "/etc/localtime", "localtime",
     "right/Europe/Berlin", "Europe/Berlin\n", "Europe/" + "x" * 300, "tzdata.zi", None, 5, b"UTC"],
)  # fmt: skip
def test_unknown_zones_are_refused(bad: Any) -> None:
    shown = repr(bad) if len(repr(bad)) <= 100 else repr(bad)[:97] + "..."
    expected = "the IANA name of a time zone, such as 'Europe/Berlin'"
    assert refusal(Calendar, "day", bad) == f"calendar zone: expected {expected}, got {shown}"


def test_a_machine_without_time_zone_data_knows_utc_and_says_how_to_get_the_others(tmp_path: Path) -> None:
    """In a process of its own, without the tzdata of this environment."""
    program = (
        "import sys; sys.modules['tzdata'] = None\n"
        "from headgate import Budget\n"
        "print(Budget(5, 'day'))\n"
        "try: Budget(5, 'day', zone='Europe/Berlin')\n"
        "except ValueError as error: print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONTZPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    expected = "the IANA name of a time zone, such as 'Europe/Berlin'"
    hint = "there is no time zone data on this machine: pip install tzdata"
    assert ran.stdout.splitlines() == [
        "5/calendar day",
        f"calendar zone: expected {expected} ({hint}), got 'Europe/Berlin'",
    ]


@pytest.mark.parametrize("bad", ["", "days", "Day", "minute", None, 5])
def test_unknown_periods_are_refused(bad: Any) -> None:
    expected = "one of hour, day, week, month, year"
    assert refusal(Calendar, bad, "UTC") == f"calendar period: expected {expected}, got {bad!r}"
