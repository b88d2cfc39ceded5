"""Log formats, and lines that can't be parsed."""

import gzip
import io
import json
import os
import threading
import tracemalloc
import zlib
from csv import writer as csv_writer
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from headgate import Policy
from headgate.errors import InvalidInput
from headgate.replay.logfile import LogFile, ReplayError
from headgate.replay.options import RouteRule
from headgate.replay.report import Report
from headgate.replay.timestamps import format_timestamp, parse_number, parse_timestamp
from tests.support.log_files import BEGIN, access_line, replay_report, write_csv, write_log

pytestmark = pytest.mark.once

AT = BEGIN * 1_000_000
BAD_TIME = "time: expected an access log's, ISO 8601, or seconds since 1970"


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("14/Nov/2023:22:13:20 +0000", AT),
        ("14/Nov/2023:14:13:20 -0800", AT),
        ("15/Nov/2023:03:43:20 +0530", AT),
        ("2023-11-14T22:13:20Z", AT),
        ("2023-11-14 22:13:20", AT),
        ("2023-11-14T23:13:20.25+01:00", AT + 250_000),
        ("2023-11-14 22:13:20,250", AT + 250_000),
        ("2023-11-14T22:13:20.123456789Z", AT + 123_456),
        (" 1700000000 ", AT),
        ("1700000000.25", AT + 250_000),
        ("1700000000.1234567890123456789", AT + 123_456),
        ("1700000000250", AT + 250_000),
        ("1700000000250.5", AT + 250_500),
        ("1700000000123456", AT + 123_456),
        ("1700000000123456789", AT + 123_456),
        ("0", 0),
        *[(bad, None) for bad in ("", "soon", "-5", "1e9", "31/Feb/2023:22:13:20 +0000", "14/Nov/2023:24:13:20 +0000")],
        *[(bad, None) for bad in ("14/Nor/2023:22:13:20 +0000", "14/Nov/2023:22:13:20", "9" * 19, "1" * 5000)],
        *[(bad, None) for bad in ("0001-01-01T00:00:00+14:00", "1969-12-31T23:59:59Z", "9999-12-31", "\u0661\u0667")],
        *[(bad, None) for bad in ("14/Nov/2023:22:60:20 +0000", "14/Nov/2023:22:13:61 +0000")],
    ],
)
def test_times(text: str, at: int | None) -> None:
    assert parse_timestamp(text) == at


@pytest.mark.parametrize(
    ("number", "at"),
    [
        (1_700_000_000, AT), (1_700_000_000.25, AT + 250_000), (1_700_000_000_250, AT + 250_000), (0, 0),
        (0.5, 500_000), (0.0, 0), (1_700_000_000.123456, AT + 123_456),
        (-1, None), (-0.5, None), (float("nan"), None), (float("inf"), None),
        (10**30, None), (1e300, None),
    ],
)  # fmt: skip
def test_times_as_numbers(number: float, at: int | None) -> None:
    assert parse_number(number) == at


def test_times_are_formatted_as_iso_8601() -> None:
    assert (format_timestamp(AT), format_timestamp(AT + 250_000)) == (
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:13:20.250000Z",
    )


def agents(report: Report) -> dict[str, int]:
    """The requests of each agent, where all are denied."""
    return {one.agent: one.outcomes.requests for one in report.policies[0].worst}


BLOCKED = Policy(limits=dict.fromkeys(("light", "normal", "heavy"), "blocked"))


# Access logs ---------------------------------------------------------------------------------------------------------

COMMON = '10.0.0.7 - frank [14/Nov/2023:22:13:20 +0000] "GET /a.gif HTTP/1.0" 200 2326'
LINES = [
    COMMON,
    access_line(user="ada"),
    access_line(user="-", more={"address": "2001:db8::1"}),
    access_line(user="eve", more={"status": 401, "address": "10.0.0.9"}),  # whoever fails to sign in may say any name
    access_line(more={"request": "-", "status": 408, "address": "host.example"}),
    access_line(more={"request": r"\x16\x03\x01 \"quoted\" \\", "address": "10.0.0.2"}) + "\r",
    COMMON.replace("2326", "-").replace("frank", "bob"),
]


@pytest.mark.parametrize(
    ("key", "whose", "skipped"),
    [
        ("auto", ["10.0.0.2", "10.0.0.9", "2001:db8::1", "ada", "bob", "frank", "host.example"], 0),
        ("user", ["ada", "bob", "frank"], 4),
        ("address", ["10.0.0.1", "10.0.0.2", "10.0.0.7", "10.0.0.9", "2001:db8::1", "host.example"], 0),
    ],
)
def test_access_logs_count_for_users_or_addresses(key: str, whose: list[str], skipped: int, tmp_path: Path) -> None:
    report = replay_report(write_log(tmp_path, "\n".join(LINES)), policy=BLOCKED, key=key)
    assert report.logs[0].format == "access"
    assert (report.lines.malformed, report.lines.skipped, report.lines.used) == (0, skipped, 7 - skipped)
    assert sorted(agents(report)) == whose


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("garbage", "not an access log line"),
        (access_line(user="John Doe"), "not an access log line"),
        (f"www.example.com:80 {access_line()}", "not an access log line"),
        (access_line()[:40], "not an access log line"),
        (access_line("99/Nov/2023:22:13:20 +0000"), BAD_TIME),
        (access_line(user='x [14/Nov/2030:22:13:20 +0000] "GET'), "not an access log line"),
        (access_line(user="a\x1b[31mb"), "agent: expected 1 to 128 printable characters"),
        (access_line(user="a" * 129), "not an access log line"),
    ],
)
def test_a_malformed_access_log_line_is_shown_and_skipped(line: str, reason: str, tmp_path: Path) -> None:
    report = replay_report(write_log(tmp_path, f"{access_line()}\n{line}\n\n  \n{access_line()}"))
    assert (report.lines.read, report.lines.used, report.lines.malformed, report.lines.blank) == (5, 2, 1, 2)
    assert report.reasons == {reason: 1}
    (shown,) = report.first_malformed
    assert (shown.line, shown.reason) == (2, reason)
    assert shown.text.isprintable()
    assert shown.text.startswith(line[:10].replace("\x1b", "\\x1b"))


def test_the_first_ten_bad_lines_are_shown(tmp_path: Path) -> None:
    bad = [f"\x07 {number} \u202e" + "x" * 500 for number in range(30)]
    report = replay_report(write_log(tmp_path, "\n".join([access_line(), *bad])))
    assert (report.lines.malformed, len(report.first_malformed)) == (30, 10)
    assert [one.line for one in report.first_malformed] == list(range(2, 12))
    assert report.first_malformed[0].text == "\\x07 0 \\u202e" + "x" * 195 + "…"


def test_bytes_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    odd = access_line(user="j\udcff").encode("utf-8", "surrogateescape")
    report = replay_report(write_log(tmp_path, b"\xef\xbb\xbf" + access_line().encode() + b"\n" + odd), policy=BLOCKED)
    assert agents(report) == {"10.0.0.1": 1, "j\\xff": 1}


def test_routes_say_what_a_request_is(tmp_path: Path) -> None:
    routes = (
        "POST /api/tasks=heavy",
        "get /api/*=light",
        "* /health=get_health",
        "DELETE *=post_channel",
        "GET /[x]=heavy",
        "GET /a?=heavy",
    )
    asked = [
        ("POST /api/tasks HTTP/1.1", "heavy"),
        ("POST /api/tasks?x=1 HTTP/1.1", "heavy"),
        ("POST /api/tasks/7 HTTP/1.1", "normal"),
        ("GET /api/tasks/7 HTTP/1.1", "light"),
        ("GET /api HTTP/1.1", "normal"),
        ("HEAD /health HTTP/1.1", "light"),
        ("DELETE /anything HTTP/1.1", "heavy"),
        ("GET /x HTTP/1.1", "normal"),
        ("GET /[x] HTTP/1.1", "heavy"),
        ("GET /ab HTTP/1.1", "normal"),
        ("-", "normal"),
    ]
    log = write_log(tmp_path, "\n".join([access_line(more={"request": request}) for request, _ in asked]))
    report = replay_report(log, policy=BLOCKED, routes=tuple(map(RouteRule.parse, routes)))
    tiers = [tier for _, tier in asked]
    assert {one.tier: one.outcomes.requests for one in report.policies[0].tiers} == {
        t: tiers.count(t) for t in set(tiers)
    }
    assert report.unknown_actions == []
    ws = replay_report(log, channel="ws", tier="light", routes=(RouteRule.parse("POST *=identify"),))
    assert [(one.channel, one.tier, one.outcomes.requests) for one in ws.policies[0].tiers] == [
        ("ws", "light", 8),
        ("ws", "heavy", 3),
    ]


@pytest.mark.parametrize(
    "text", ["", "heavy", "POST=heavy", "POST tasks=heavy", "POST /tasks", "POST /tasks=", "=heavy"]
)
def test_a_route_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        RouteRule.parse(text)
    assert str(error.value) == f"expected METHOD PATH=TIER, such as 'POST /api/tasks=heavy', got {text!r}"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"routes": (RouteRule.parse("GET /=hevy"),)},
         "route 'GET /': expected a tier or an action of the policy for channel http, got 'hevy'"),
        ({"channel": "grpc"}, "channel: expected one of ws, http, got 'grpc'"),
    ],
)  # fmt: skip
def test_tiers_and_channels_unknown_to_the_policy_are_refused(how: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as error:
        replay_report(write_log(tmp_path, access_line()), **how)
    assert str(error.value) == text


# JSON lines ----------------------------------------------------------------------------------------------------------


def objects(folder: Path, *found: object) -> str:
    return write_log(folder, "\n".join([one if isinstance(one, str) else json.dumps(one) for one in found]), "a.jsonl")


def test_json_lines_by_their_names(tmp_path: Path) -> None:
    log = objects(
        tmp_path,
        {"time": BEGIN, "agent": "a", "channel": "ws", "tier": "heavy", "action": "ping", "cost": 3},
        {"time": "2023-11-14T22:13:20Z", "agent": "a", "channel": "ws", "action": "ping"},
        {"time": str(BEGIN), "agent": 42, "channel": None, "tier": "", "cost": None},
        {"time": BEGIN * 1000, "agent": "a", "method": "POST", "path": "/api/tasks?x", "other": [1, {}]},
        {"time": BEGIN, "agent": "a", "method": "POST", "path": "/api/tasks", "channel": "ws"},
    )
    report = replay_report(log, policy=BLOCKED, routes=(RouteRule.parse("POST /api/tasks=heavy"),))
    assert report.logs[0].format == "json"
    assert agents(report) == {"a": 4, "42": 1}
    assert {(one.channel, one.tier): one.outcomes.requests for one in report.policies[0].tiers} == {
        ("ws", "light"): 1,
        ("ws", "heavy"): 2,
        ("http", "normal"): 1,
        ("http", "heavy"): 1,
    }


def test_fields_may_have_other_names_and_lie_within_others(tmp_path: Path) -> None:
    log = objects(
        tmp_path,
        {"ts": BEGIN, "request": {"user": {"id": "a"}}, "tokens": 2},
        {"ts": BEGIN, "request.user.id": "b", "tokens": 1},
        {"ts": BEGIN, "request": {"user": "nobody"}},
        {"ts": BEGIN, "request": 7},
    )
    fields = {"time": "ts", "agent": "request.user.id", "cost": "tokens"}
    report = replay_report(log, policy=Policy(limits={"normal": "1/minute"}, warn_at=1), fields=fields)
    assert report.policies[0].outcomes.allowed == 1
    assert agents(report) == {"a": 1}
    assert report.reasons == {"no field 'request.user.id' for the agent": 2}


GOOD = {"time": BEGIN, "agent": "a"}


NO_TIMES: list[object] = ["soon", True, [], {}, -1, float("nan")]
NO_NAMES: list[object] = ["a" * 129, "a\nb", "\u202e", True, 1.5, ["a"], "\ud800"]
NO_COSTS: list[object] = [0, -1, 1.5, True, "many", "\u0663", [], "1" * 19]
NO_TEXTS: list[dict[str, object]] = [{"channel": 7}, {"tier": ["heavy"]}, {"action": {"a": 1}}]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON"),
        ('{"time": 1e999999, "agent"', "not JSON"),
        ("[" * 60_000, "not JSON"),
        ("7" * 5000, "not JSON"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ({"agent": "a"}, "no field 'time' for the time"),
        ({"time": "", "agent": "a"}, "no field 'time' for the time"),
        *[(GOOD | {"time": bad}, BAD_TIME) for bad in NO_TIMES],
        *[({"time": BEGIN} | more, "no field 'agent' for the agent") for more in ({}, {"agent": ""}, {"agent": None})],
        *[(GOOD | {"agent": bad}, "agent: expected 1 to 128 printable characters") for bad in NO_NAMES],
        *[(GOOD | {"cost": bad}, "cost: expected a whole number of at least 1") for bad in NO_COSTS],
        (GOOD | {"channel": "grpc"}, "channel: expected one of ws, http"),
        (GOOD | {"tier": "hevy"}, "tier: expected one of light, normal, heavy"),
        *[(GOOD | bad, "channel, tier, action: expected text") for bad in NO_TEXTS],
    ],
)
def test_a_bad_object_is_reported_with_its_reason(bad: object, reason: str, tmp_path: Path) -> None:
    report = replay_report(objects(tmp_path, GOOD, bad, GOOD))
    assert report.reasons == {reason: 1}
    assert (report.lines.used, report.first_malformed[0].line) == (2, 2)


def test_many_long_actions_and_paths_fill_no_memory(tmp_path: Path) -> None:
    asked = [GOOD | {"action": f"{number} " + "x" * 50_000} for number in range(30)]
    asked += [GOOD | {"method": "GET", "path": f"/{number}/" + "y" * 50_000} for number in range(30)]
    log = objects(tmp_path, *asked)
    tracemalloc.start()
    report = replay_report(log, routes=(RouteRule.parse("GET /7/*=heavy"),))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 200_000 < 60 * 50_000
    assert peak < 2_500_000
    assert [(one.tier, one.outcomes.requests) for one in report.policies[0].tiers] == [("normal", 59), ("heavy", 1)]
    assert report.unknown_actions == [f"{number} {'x' * 100}"[:100] for number in range(20)]


# CSV -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_by_the_names_of_its_columns(delimiter: str, tmp_path: Path) -> None:
    out = io.StringIO()
    writer = csv_writer(out, delimiter=delimiter)
    rows: list[list[object]] = [
        [],
        [" agent ", "note", "user time", "cost"],
        ["a,b;c", 'say "hi"', BEGIN, ""],
        ["b", "", BEGIN, " 2 "],
    ]
    writer.writerows(rows)
    report = replay_report(write_log(tmp_path, out.getvalue(), "a.csv"), policy=BLOCKED, fields={"time": "user time"})
    assert report.logs[0].format == "csv"
    assert agents(report) == {"a,b;c": 1, "b": 1}
    assert (report.lines.read, report.lines.blank, report.lines.malformed) == (4, 1, 0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"{BEGIN},a", "expected 3 columns, as in the header"),
        (f"{BEGIN},a,b,c", "expected 3 columns, as in the header"),
        (f'{BEGIN},"a,1', "expected 3 columns, as in the header"),
        (f'{BEGIN},"a"b,1', "expected 3 columns, as in the header"),
        (",a,1", "no field 'time' for the time"),
        (f"{BEGIN},a,0", "cost: expected a whole number of at least 1"),
    ],
)
def test_a_bad_record_is_reported_with_its_reason(line: str, reason: str, tmp_path: Path) -> None:
    report = replay_report(write_log(tmp_path, f"time,agent,cost\n{BEGIN},a,1\n{line}\n{BEGIN},a,\n"))
    assert report.reasons == {reason: 1}
    assert (report.lines.used, report.first_malformed[0].line) == (2, 3)


def test_a_missing_column_is_reported_with_the_columns_found(tmp_path: Path) -> None:
    log = write_log(tmp_path, "when,who\x1b\n1,a\n")
    with pytest.raises(ReplayError) as error:
        replay_report(log)
    assert str(error.value) == (
        f"{log}: expected a column 'time' in the header, got: when, who\\x1b; "
        "--field time=NAME names the one for the time"
    )


# Which format it is --------------------------------------------------------------------------------------------------


def test_the_first_lines_tell_the_format_whatever_else_is_there(tmp_path: Path) -> None:
    report = replay_report(write_log(tmp_path, f"# a comment\nboot\n{access_line()}\n{access_line()}\n{{}}\n"))
    assert (report.logs[0].format, report.lines.used, report.lines.malformed) == ("access", 2, 3)


@pytest.mark.parametrize("text", ["hello\nworld\n", "a,b\n", "\n\n", "a,b\n1,2,3\n"])
def test_a_log_of_unknown_format_is_refused(text: str, tmp_path: Path) -> None:
    log = write_log(tmp_path, text)
    with pytest.raises(ReplayError) as error:
        replay_report(log)
    first = text.strip().partition("\n")[0]
    got = f"got: {first}" if first else "got an empty log"
    assert str(error.value) == (
        f"{log}: expected an access log, JSON lines, or CSV with a header, {got}\n"
        "  --format sets the log format: access, json, csv"
    )


def test_a_log_without_requests_is_refused(tmp_path: Path) -> None:
    log = objects(tmp_path, {"ts": 1, "agent": "\x1b"}, {"ts": 2})
    with pytest.raises(ReplayError) as error:
        replay_report(log)
    assert str(error.value).splitlines() == [
        f"{log}: expected requests, got none in 2 lines read as json",
        '  line 1: no field \'time\' for the time: {"ts": 1, "agent": "\\u001b"}',
        "  line 2: no field 'time' for the time: {\"ts\": 2}",
        "  --format sets the log format, --field the names of its fields, --key the agent's identity",
    ]
    with pytest.raises(ReplayError, match="expected requests, got none in 1 lines read as csv"):
        replay_report(write_log(tmp_path, "time,agent\n"), format="csv")
    with pytest.raises(ReplayError, match="expected requests, got an empty log"):
        replay_report(write_log(tmp_path, ""))


def test_an_unreadable_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError) as error:
        replay_report(str(tmp_path / "none"))
    assert (
        str(error.value)
        == f"{tmp_path / 'none'}: can't read the log: No such file or directory; '-' reads standard input"
    )
    with pytest.raises(ReplayError, match=r"can't read the log: Is a directory$"):
        replay_report(str(tmp_path))
    with pytest.raises(ReplayError, match="standard input: expected once among the logs, got it twice"):
        replay_report("-", "-")


# Bytes ---------------------------------------------------------------------------------------------------------------

MANY = "\n".join([access_line(user=f"user-{number % 500}") for number in range(5000)])


def test_gzip_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    plain = replay_report(write_log(tmp_path, MANY), share=Fraction(1, 10))
    packed = replay_report(write_log(tmp_path, MANY, "b.log", compressed=True), share=Fraction(1, 10))
    assert packed.policies == plain.policies
    assert packed.suggestions == plain.suggestions
    assert (packed.lines.used, packed.logs[0].damage) == (5000, "")


def test_gzip_in_parts_with_padding(tmp_path: Path) -> None:
    data = gzip.compress(f"{MANY}\n".encode()) + gzip.compress(MANY.encode()) + b"\0" * 600_000
    report = replay_report(write_log(tmp_path, data))
    assert (report.lines.used, report.logs[0].damage) == (10_000, "")


def test_gzip_that_unpacks_to_much_more_is_read_a_block_at_a_time(tmp_path: Path) -> None:
    lines = f"{access_line()}\n" * 30_000
    log = LogFile(write_log(tmp_path, lines, compressed=True))
    assert log.size is not None
    assert log.size < len(lines) / 100
    sizes = [sum(map(len, block)) for block in log.lines()]
    log.close()
    assert sum(sizes) == len(lines) - 30_000
    assert max(sizes) < 2**20


def test_truncated_gzip_counts_up_to_its_end(tmp_path: Path) -> None:
    packed = gzip.compress(MANY.encode())
    report = replay_report(write_log(tmp_path, packed[: len(packed) // 2]), share=Fraction(0))
    assert 1000 < report.lines.used < 4000
    assert report.logs[0].damage == "truncated gzip data; read up to its end"


def test_damaged_gzip_counts_up_to_the_damage(tmp_path: Path) -> None:
    packer = zlib.compressobj(wbits=31)
    data = packer.compress(MANY.encode()) + packer.flush(zlib.Z_FULL_FLUSH) + b"\x07 is no kind of block"
    report = replay_report(write_log(tmp_path, data))
    assert report.lines.used == 5000
    assert report.logs[0].damage == "damaged gzip data; read up to the damage"
    packed = gzip.compress(MANY.encode())
    checksum = packed[:-8] + zlib.crc32(b"other").to_bytes(4, "little") + packed[-4:]
    report = replay_report(write_log(tmp_path, checksum))
    assert report.lines.used == 5000
    assert report.logs[0].damage == "damaged gzip data; read up to the damage"
    log = write_log(tmp_path, packed[:10] + b"\x07" * 99)
    with pytest.raises(ReplayError) as error:
        replay_report(log)
    assert str(error.value) == f"{log}: expected a readable log, got damaged gzip data; read up to the damage"


def test_a_line_without_an_end_fills_no_memory(tmp_path: Path) -> None:
    long = "x" * 3_000_000
    report = replay_report(
        write_log(
            tmp_path, f"{access_line()}\n{long}\n{access_line()}\n{access_line()} {long}\n{access_line(user='last')}"
        )
    )
    assert (report.lines.read, report.lines.used, report.lines.malformed) == (5, 4, 1)
    log = LogFile(write_log(tmp_path, f"a\n{long}{long}\nbc\n{long}", "b.log"))
    assert [len(line) for block in log.lines() for line in block] == [1, 262_144, 2, 262_144]
    log.close()


def test_a_stream_can_be_read_again_for_suggestions(tmp_path: Path) -> None:
    report = replay_report(write_log(tmp_path, MANY), share=Fraction(0))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    thread = threading.Thread(target=lambda: fifo.write_bytes(gzip.compress(MANY.encode())))
    thread.start()
    again = replay_report(str(fifo), share=Fraction(0))
    thread.join()
    assert again.policies == report.policies
    assert again.suggestions == report.suggestions


def test_progress_is_reported_in_bytes_and_lines(tmp_path: Path) -> None:
    told: list[tuple[int, int | None, int]] = []
    log = write_log(tmp_path, MANY)
    replay_report(log, write_csv(tmp_path, [(0, "a", "light")]), on_progress=lambda *one: told.append(one))
    size = len(MANY) + Path(tmp_path, "log.csv").stat().st_size
    assert told[-1] == (size, size, 5002)
    assert [one[2] for one in told] == sorted(one[2] for one in told)
    assert len(told) >= 3
