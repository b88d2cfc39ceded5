"""`headgate replay`, as users run it, and what it shows them."""

import gzip
import io
import json
import os
import re
import resource
import stat
import sys
import threading
import tomllib
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headgate import ManualClock
from headgate.cli import replay
from headgate.cli.terminal import ProgressLine
from headgate.replay.options import FIELDS
from tests.support.cli import Command, Terminal, run_on_terminal
from tests.support.cli import run_command as run_process
from tests.support.log_files import access_line, write_csv, write_log

pytestmark = [pytest.mark.long, pytest.mark.once]

DOCS = Path(__file__).parents[2] / "docs"
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def log(tmp_path: Path) -> str:
    """One agent who is denied, one with an evil name, one who is neither, and a line that can't be used."""
    rows = [(0, "loud", "heavy")] * 21 + [(1, EVIL, "normal")] * 61 + [(70, "calm", "light"), (2, "bad", "hevy")]
    return write_csv(tmp_path, rows)


@pytest.fixture
def run(headgate: Command) -> Command:
    """Run `headgate replay`."""
    return partial(headgate, "replay")


def test_the_summary_of_one_policy(log: str, run: Command) -> None:
    assert (
        [line.rstrip() for line in run(log).expect_output().splitlines()]
        == f"""\
{log}: 85 lines read as csv, 83 used
from 2023-11-14T22:13:20Z to 2023-11-14T22:14:30Z (1 min 10 s), 3 agents
1 malformed line; the first:
  {log} line 85: tier: expected one of light, normal, heavy: 1700000002.0,bad,hevy

the default policy
channel  tier    limit       requests  allowed  warned  denied   share  exempt  shadowed
http     light   120/minute         1        1       0       0   0.00%       0         0
http     normal  60/minute         61       48      12       1   1.64%       0         0
http     heavy   10/minute         21        8       2      11  52.38%       0         0
all                                83       57      14      12  14.46%       0         0

requests per 2 s
allowed  █                                  ▁  max 56
warned   █                                     max 14
denied   █                                     max 12

2 agents denied; the worst:
agent                         requests  denied   share  shadowed  alerts  first denied          last denied
loud                                21      11  52.38%         0       1  2023-11-14T22:13:20Z  2023-11-14T22:13:20Z
{EVIL}        61       1   1.64%         0       0  2023-11-14T22:13:21Z  2023-11-14T22:13:21Z

1 alert
2023-11-14T22:13:20Z  loud
""".splitlines()
    )


@pytest.fixture
def policies(tmp_path: Path) -> list[str]:
    """Two policies: the second lets one agent pass, and denies another."""
    now, later = tmp_path / "now.toml", tmp_path / "next.toml"
    now.write_text('[limits]\nheavy = "20/minute"\n')
    later.write_text('[limits]\nheavy = "30/minute"\nnormal = "50/minute"\n')
    return [str(now), str(later)]


def test_the_summary_of_two_policies(log: str, policies: list[str], run: Command) -> None:
    now, later = policies
    out = run(log, "--policy", now, "--compare", later, "--worst", "1").expect_output()
    shown = out.partition(f"from {now} to {later}\n")[2]
    assert (
        [line.rstrip() for line in shown.splitlines()]
        == """\
channel  tier    limit before  limit after  denied before  denied after  difference
http     light   120/minute    120/minute               0             0          +0
http     normal  60/minute     50/minute                1            11         +10
http     heavy   20/minute     30/minute                1             0          -1
all                                                     2            11          +9

more     █                                     max 9
fewer                                          max 0

0 agents newly denied

1 agent no longer denied
agent  denied before  denied after
loud               1             0
""".splitlines()
    )


def test_f1_holds_that_two_policies_deny_are_compared(tmp_path: Path, run: Command) -> None:
    log, none, small, large = (tmp_path / name for name in ("calls.jsonl", "none.toml", "small.toml", "large.toml"))
    log.write_text('{"time": 1700000000, "agent": "planner", "costs": {"usd": "0.4"}}\n' * 5)
    none.write_text("")
    small.write_text('[accounts.default.agent]\nusd = "1 in all"\n[accounts.at.acme]\nusd = "9 in all"\n')
    large.write_text('[accounts.default.agent]\nusd = "2 in all"\n')
    out = run(str(log), "--policy", str(small), "--compare", str(large)).expect_output()
    row = re.compile(r"^holds +(\d+) +(\d+) +([-+]\d+)$", re.MULTILINE)
    assert row.findall(out) == [("3", "0", "-3")]
    assert "\n0 agents no longer denied by a tier\n" in out
    page = tmp_path / "page.html"
    out = run(str(log), "--policy", str(none), "--compare", str(small), "--html", str(page)).expect_output()
    assert row.findall(out) == [("0", "3", "+3")]
    text = re.sub("<[^>]*>", " ", page.read_text(encoding="utf-8"))
    assert re.search(r"\bholds\s+0\s+3\s+\+3\b", text)
    tiers = tmp_path / "tiers.csv"
    tiers.write_text("time,agent\n1700000000,planner\n")
    assert row.findall(run(str(tiers), "--policy", str(none), "--compare", str(small)).expect_output()) == []


def test_the_summary_with_suggestions(log: str, run: Command) -> None:
    assert run(log, "--suggest", "5%").expect_output().partition("suggested limits\n")[2] == (
        "# Denies at most 5% of the requests of each tier.\n[limits]\n"
        'light = "1/minute"  # denies 0 of 1 requests\n'
        'normal = "58/minute"  # denies 3 of 61 requests; one less a minute would deny 4\n'
        'heavy = "20/minute"  # denies 1 of 21 requests; one less a minute would deny 2\n'
    )
    assert "# Denies at most 0.1% of the requests of each tier.\n" in run(log, "--suggest").expect_output()


def test_notes_about_the_log_are_printed(tmp_path: Path, run: Command) -> None:
    rows = [(9, "a", "dance\u2003"), (2, "a", "dance\u2003"), *[(9, "a", "post_task")] * 400]
    broken = write_log(
        tmp_path, Path(write_csv(tmp_path, rows, "time,agent,action")).read_bytes(), "b.csv.gz", compressed=True
    )
    Path(broken).write_bytes(Path(broken).read_bytes()[:-20])
    policy = tmp_path / "p.toml"
    policy.write_text("[alerts]\nviolations = 1\nwindow = 0.000001\n")
    out = run(broken, "--policy", str(policy)).expect_output()
    assert "\n  truncated gzip data; read up to its end\n" in out
    assert "\n1 line out of order, by up to 7 s: counted at the time before\n" in out
    assert "\nactions that the policy doesn't classify, counted as normal: dance\n" in out
    users = write_log(tmp_path, f"{access_line()}\n{access_line(user='ada')}\n", "users.log")
    assert "\n1 line without a user skipped\n" in run(users, "--key", "user").expect_output()


def test_the_first_five_alerts_are_shown(tmp_path: Path, run: Command) -> None:
    log = write_csv(tmp_path, [(0, f"agent {number}", "heavy") for number in range(7) for _ in range(20)])
    shown = run(log).expect_output().partition("7 alerts\n")[2].splitlines()
    assert shown == [*[f"2023-11-14T22:13:20Z  agent {number}" for number in range(5)], "and 2 more"]


def test_the_docs_show_what_is_really_printed(tmp_path: Path) -> None:
    text = (DOCS / "replay.md").read_text(encoding="utf-8")
    examples = re.findall(r"```sh\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 4
    command = f'headgate() {{ "{sys.executable}" -m headgate "$@"; }}\n'
    for typed, shown in examples:
        done = run_process("-euc", command + typed, command=["bash"], cwd=tmp_path)
        assert done.stderr == ""
        assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()


# JSON ----------------------------------------------------------------------------------------------------------------


def test_json_is_one_document_with_everything(log: str, policies: list[str], run: Command) -> None:
    out = run(log, "--policy", policies[0], "--compare", policies[1], "--suggest", "--json").expect_output()
    assert out.isascii()
    assert out.count("\n") == 1
    found = json.loads(out)
    assert [policy["outcomes"]["denied"] for policy in found["policies"]] == [2, 11]
    assert found["lines"] == {
        "read": 85, "used": 83, "blank": 0, "skipped": 0, "malformed": 1, "late": 0, "late_by": 0.0,
    }  # fmt: skip
    assert found["share"] == 0.001


def keys(found: Any) -> set[str]:
    if isinstance(found, dict):
        return set(found).union(*map(keys, found.values()))
    return set().union(*map(keys, found)) if isinstance(found, list) else set()


def test_the_docs_name_every_field_of_the_json(log: str, policies: list[str], run: Command) -> None:
    found = json.loads(
        run(log, "--policy", policies[0], "--compare", policies[1], "--suggest", "--json").expect_output()
    )
    found["reasons"] = {}
    text = (DOCS / "replay.md").read_text(encoding="utf-8")
    assert {name for name in keys(found) if f"`{name}`" not in text} == set()


def test_the_docs_name_every_option(run: Command) -> None:
    shown = run("--help").expect_output()
    options = set(re.findall(r"(--[a-z]+)", shown)) - {"--help"}
    assert {"--policy", "--compare", "--suggest", "--json", "--html", "--route", "--field", "--key"} <= options
    text = (DOCS / "replay.md").read_text(encoding="utf-8")
    assert {option for option in options if f"`{option}" not in text} == set()
    assert {name for name in FIELDS if f"`{name}`" not in text} == set()
    assert "headgate replay access.log --policy headgate.toml" in shown


# The page ------------------------------------------------------------------------------------------------------------


class ReportPage(HTMLParser):
    """What is in a page: its elements, their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(run: Command, folder: Path, *arguments: str) -> ReportPage:
    target = folder / "page.html"
    run(*arguments, "--html", str(target)).expect_output()
    return ReportPage(target.read_text(encoding="utf-8"))


def test_the_page_is_well_formed_and_loads_nothing(log: str, policies: list[str], tmp_path: Path, run: Command) -> None:
    page = page_of(run, tmp_path, log, "--policy", policies[0], "--compare", policies[1], "--suggest")
    assert page.open == []
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "base", "a", "form", "image", "use"}
    names = {name for _, attributes in page.seen for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "href", "style")}
    assert "url(" not in page.text
    assert "@import" not in page.text
    assert "http:" not in page.text.replace("http:light", "")
    assert EVIL in page.text
    (policy,) = [attributes for tag, attributes in page.seen if tag == "meta" and "http-equiv" in attributes]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert ("html", {"lang": "en"}) in page.seen
    for drawing in [attributes for tag, attributes in page.seen if tag == "svg"]:
        assert drawing.get("aria-label") or drawing.get("aria-hidden") == "true"
    titles = [tag for tag, _ in page.seen if re.fullmatch("h[1-6]", tag)]
    assert titles[0] == "h1"
    assert all(int(later[1]) <= int(earlier[1]) + 1 for earlier, later in pairwise(titles))
    for part in ("Newly denied", "No longer denied", "When denials differ", "Suggested limits", "By tier", "Alerts"):
        assert part in page.text
    assert "prefers-color-scheme: dark" in page.text


def test_names_of_files_are_shown_as_text(tmp_path: Path, run: Command) -> None:
    policy = tmp_path / "<b>.toml"
    policy.write_text("")
    page = page_of(run, tmp_path, write_csv(tmp_path, [(0, "a", "light")], name="<i>.csv"), "--policy", str(policy))
    assert {tag for tag, _ in page.seen}.isdisjoint({"b", "i"})
    assert page.text.count("<i>.csv") == 2  # the title of the page, and of what is on it
    assert "<b>.toml" in page.text


def test_the_plots_show_the_numbers(tmp_path: Path, run: Command) -> None:
    rows = [(0, "a", "heavy")] * 15 + [(2, "a", "heavy")] * 5
    page = page_of(run, tmp_path, write_csv(tmp_path, rows))
    rects = [attributes for tag, attributes in page.seen if tag == "rect" and "y" in attributes]
    # The first second: 15 high, which is all of the plot; in the third one a third of it.
    heights = {(str(one["class"]), float(one["x"] or 0)): float(one["height"] or 0) for one in rects}
    assert heights == {
        ("allowed", 0.0): pytest.approx(200 * 8 / 15, abs=0.01),
        ("warned", 0.0): pytest.approx(200 * 2 / 15, abs=0.01),
        ("denied", 0.0): pytest.approx(200 * 5 / 15, abs=0.01),
        ("denied", 640.0): pytest.approx(200 * 5 / 15, abs=0.01),
    }
    for one in rects:
        assert 0 <= float(one["y"] or 0) <= 200
        assert float(one["y"] or 0) + float(one["height"] or 0) <= 200.01
    assert "2023-11-14T22:13:20Z: 5 denied, 2 warned, 0 shadowed, 8 allowed, 0 exempt" in page.text


def test_a_page_without_denials_says_so(tmp_path: Path, run: Command) -> None:
    page = page_of(run, tmp_path, write_csv(tmp_path, [(0, "a", "light")]))
    assert "Nobody was denied." in page.text
    assert "Alerts" not in page.text
    assert "Malformed lines" not in page.text


# What goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: LOG"),
        (["x", "--worst", "0"], "argument --worst: expected a whole number from 1 to 1000, got '0'"),
        (["x", "--worst", "ten"], "argument --worst: expected a whole number from 1 to 1000, got 'ten'"),
        (["x", "--format", "xml"], "argument --format: expected one of access, json, csv, got 'xml'"),
        (["x", "--key", "ip"], "argument --key: expected one of auto, user, address, got 'ip'"),
        (["x", "--route", "POST"],
         "argument --route: expected METHOD PATH=TIER, such as 'POST /api/tasks=heavy', got 'POST'"),
        (["x", "--field", "user=id"],
         f"argument --field: expected NAME=FIELD, NAME one of {', '.join(FIELDS)}, got 'user=id'"),
        (["x", "--field", "agent"],
         f"argument --field: expected NAME=FIELD, NAME one of {', '.join(FIELDS)}, got 'agent'"),
        *[
            (["--suggest", bad, "x"],
             (f"argument --suggest: expected a share below 1, such as 0.1% or 0.001, got '{bad}'; "
              "put logs before the options"))
            for bad in ("access.log", "1", "100%", "1/0", "nan", "", "1e999999999", "1e-999999999%", "0.5e-100")
        ],
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(arguments: list[str], text: str, run: Command) -> None:
    assert run(*arguments).expect_error(2).splitlines()[-1] == f"headgate replay: error: {text}"


def test_failures_are_one_line_errors(log: str, tmp_path: Path, run: Command) -> None:
    nowhere = tmp_path / "none" / "page.html"
    assert (
        run(log, "--html", str(nowhere)).expect_error()
        == f"--html: expected a file in an existing folder, got {nowhere}\n"
    )
    assert run(log, "--html", str(tmp_path)).expect_error().startswith("--html: expected a file in an existing folder")
    assert (
        run(log, "--html", log).expect_error()
        == f"--html: expected a file other than the logs and policies, got {log}\n"
    )
    assert Path(log).read_text().startswith("time,agent,tier")
    assert run(log, "--policy", "none.toml").expect_error().startswith("none.toml: 1 mistake")
    policy = tmp_path / "p.toml"
    policy.write_text("")
    same = run(log, "--policy", str(policy), "--compare", str(policy)).expect_error()
    assert same == f"--compare: expected a policy other than {policy}, got the same\n"
    assert (
        run(str(tmp_path / "none.log"))
        .expect_error()
        .endswith("can't read the log: No such file or directory; '-' reads standard input\n")
    )
    assert run(log, "--channel", "grpc").expect_error() == "channel: expected one of ws, http, got 'grpc'\n"
    assert run(log, "--tier", "hevy").expect_error() == "tier: expected one of light, normal, heavy, got 'hevy'\n"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page of an earlier replay."""
    page = tmp_path / "page.html"
    page.write_text("an old page")
    page.chmod(0o640)
    return page


def test_an_input_is_never_overwritten(log: str, policies: list[str], page: Path, tmp_path: Path, run: Command) -> None:
    expected = "--html: expected a file other than the logs and policies, got"
    before = {name: Path(name).read_bytes() for name in (log, *policies)}
    for number, name in enumerate(before):
        link, hard, far = [tmp_path / f"{kind} {number}" for kind in ("link", "hard", "far")]
        link.symlink_to(name)
        far.symlink_to(link)
        hard.hardlink_to(name)
        for given in (name, str(tmp_path / "." / ".." / tmp_path.name / Path(name).name), link, hard, far):
            done = run(log, "--policy", policies[0], "--compare", policies[1], "--html", str(given))
            assert done == (1, "", f"{expected} {given}\n")
    assert {name: Path(name).read_bytes() for name in before} == before
    with Path(log).open() as source:
        for given in ("-", "/dev/stdin"):
            process = run_process("replay", given, "--html", log, stdin=source)
            assert (process.returncode, process.stderr) == (1, f"{expected} {log}\n")
    run(log, str(page), "--html", str(page)).expect_error()
    assert page.read_text() == "an old page"


def test_a_page_is_written_to_files_only(log: str, tmp_path: Path, run: Command) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for device in ("/dev/full", "/dev/null", str(fifo)):
        error = f"--html: expected a file, got {device}, which is a device, a pipe or a circular link\n"
        assert run(log, "--html", device).expect_error() == error
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for bad in (str(loop), str(tmp_path / ("x" * 5000))):
        error = run(log, "--html", bad).expect_error()
        assert error.count("\n") == 1
        assert error.startswith(f"--html: expected a file, got {bad}")


@pytest.mark.parametrize("name", ["page.html", "new.html"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_replay(
    page: Path, name: str, monkeypatch: pytest.MonkeyPatch, run: Command
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != page.parent)  # root may write everywhere
    target = page.with_name(name)
    expected = f"--html: expected a file in a folder that may be written, got {target}\n"
    assert run("a log that the replay would not find", "--html", str(target)).expect_error() == expected


def test_a_page_is_written_as_a_whole_or_not_at_all(log: str, page: Path, tmp_path: Path, run: Command) -> None:
    files, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        done = run(log, "--html", str(page))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.expect_error() == f"{page}: can't write the page: File too large\n"
    assert (page.read_text(), sorted(tmp_path.iterdir())) == ("an old page", files)
    link = tmp_path / "link.html"
    link.symlink_to(page)
    run(log, "--html", str(link)).expect_output()
    assert link.is_symlink()
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == sorted([*files, link])


def test_names_that_are_not_utf_8_are_shown_escaped(tmp_path: Path, run: Command) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    odd.mkdir()
    policy = odd / os.fsdecode(b"\xfe.toml")
    policy.touch()
    rows = [{"time": 1, "agent": f"a\ud800 {number}", "action": "go \udfff"} for number in range(3)]
    rows += [{"time": 1, "agent": "a", "action": "go \udfff"}] * 70
    write_log(odd, "\n".join(map(json.dumps, rows)), os.fsdecode(b"\xfd.jsonl"))
    target = odd / os.fsdecode(b"\xfc.html")
    run(str(odd / os.fsdecode(b"\xfd.jsonl")), "--policy", str(policy), "--html", str(target)).expect_output()
    text = ReportPage(target.read_text(encoding="utf-8")).text
    for shown in ("\\udcff/\\udcfd.jsonl", "\\udcfe.toml", "go \\udfff"):
        assert shown in text


def test_a_closed_standard_input_harms_only_who_reads_it(
    log: str, monkeypatch: pytest.MonkeyPatch, run: Command
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    run(log).expect_output()
    assert run("-").expect_error() == "-: can't read the log: standard input is closed\n"


# As a process of its own ---------------------------------------------------------------------------------------------


def test_standard_input_packed_or_not_can_even_be_read_several_times(log: str) -> None:
    def replay_input(*options: str, **source: Any) -> bytes:
        done = run_process("replay", "-", *options, text=False, **source)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(b"-: 85 lines read as csv, 83 used\n")
        found: bytes = done.stdout
        return found

    for data in (Path(log).read_bytes(), gzip.compress(Path(log).read_bytes())):
        assert b'\nheavy = "20/minute"' in replay_input("--suggest", "5%", input=data)
    with Path(log).open() as file:
        replay_input(stdin=file)


def test_colours_on_a_terminal_unless_they_are_forbidden(log: str) -> None:
    coloured = run_on_terminal("replay", log, columns=120)
    assert "\x1b[31m12\x1b[0m" in coloured
    plain = run_on_terminal("replay", log, columns=120, more={"NO_COLOR": "1"})
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_the_report_fits_the_terminal(columns: int, tmp_path: Path) -> None:
    rows = [(second, f"agent-{second % 7}", tier) for second in range(50) for tier in ("heavy", "normal", "light")]
    log = write_csv(tmp_path, [*rows, (3, "an-agent-with-a-name-of-some-length", "none of the tiers")])
    policy = tmp_path / "next.toml"
    policy.write_text('[limits]\nheavy = "40/minute"\n')
    shown = run_on_terminal(
        "replay", log, "--compare", str(policy), "--suggest", "1%", columns=columns, more={"NO_COLOR": "1"}
    )
    assert [line for line in shown.splitlines() if len(line) > columns] == []
    bars = re.findall(r"^(?:allowed|warned|denied|more|fewer) +(.*?)  max [1-9]", shown, re.MULTILINE)
    assert len({len(bar) for bar in bars}) == 1
    assert "an-agent-with-a-name-of-some-length,noneofthetiers" in "".join(shown.split())
    suggested = tomllib.loads(shown[shown.index("# Denies at most") :])["limits"]
    assert suggested.keys() == {"light", "normal", "heavy"}
    assert "one less a minute would deny" in " ".join(shown.replace("# ", "").split())


# Progress ------------------------------------------------------------------------------------------------------------


class InteractiveOutput(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_over_itself_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, clock = InteractiveOutput(), ManualClock()
    with ProgressLine(out, lambda: clock.now() / 1e6) as line:
        progress = replay._ReplayProgress(line, lambda: clock.now() / 1e6)
        for done, total, lines in ((250, 1000, 500), (500, 1000, 1000)):
            clock.advance(1)
            progress.show(done, total, lines)
            progress.show(done, total, lines)  # too soon
        progress.show(0, 1000, 0)
        clock.advance(1)
        progress.show(250, 1000, 500)
        clock.advance(1)
        progress.show(900, None, 4000)
    assert [line.removesuffix("\x1b[K") for line in out.getvalue().split("\r")][1:] == [
        "reading:  25% ████████░░░░░░░░░░░░░░░░░░░░░░ 500 lines, 500/s, 3 s left",
        "reading:  50% ███████████████░░░░░░░░░░░░░░░ 1,000 lines, 500/s, 2 s left",
        "searching limits, pass 1:  25% ████████░░░░░░░░░░░░░░░░░░░░░░ 500 lines, 500/s, 3 s left",
        "searching limits, pass 1: 4,000 lines, 2,000/s",
        "",
    ]


@pytest.mark.parametrize(("out", "term"), [(io.StringIO(), "xterm"), (InteractiveOutput(), "dumb")])
def test_progress_is_shown_on_a_terminal_only(out: io.StringIO, term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    times = iter(range(10))
    with ProgressLine(out, lambda: float(next(times))) as line:
        replay._ReplayProgress(line).show(1, 2, 3)
    assert out.getvalue() == ""


def test_progress_of_a_slow_stream_is_shown(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    shown_once = threading.Event()

    def write() -> None:
        with fifo.open("w") as log:
            while not shown_once.is_set():
                log.write(f"{access_line()}\n" * 3000)

    terminal, writer = Terminal(), threading.Thread(target=write)
    with terminal.process("replay", str(fifo)):
        writer.start()
        try:
            terminal.wait_until(lambda text: "reading: " in text)
        finally:
            shown_once.set()
            writer.join()
    shown = re.findall(r"\rreading: ([\d,]+) lines, [\d,]+/s\x1b\[K", terminal.text)
    counts = [int(count.replace(",", "")) for count in shown]
    assert counts == sorted(counts)
    assert counts[0] >= 2000
    after = terminal.text.rpartition("\r\x1b[K")[2]
    assert after.startswith(f"{fifo}: ")
