"""The command `headgate`, run as users run it."""

import argparse
import re
import signal
import sys
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import pytest

import headgate
import headgate.limits.decision
from headgate import Policy
from headgate._version import VERSION
from headgate.cli import build_parser
from headgate.hub.settings import HubSettings, flag
from tests.support.cli import (
    DEADLINE,
    MODULE,
    PACKAGES,
    Command,
    Terminal,
    command_process,
    run_command,
    run_on_terminal,
)

pytestmark = pytest.mark.once

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = [str(Path(sys.executable).with_name("headgate"))]
COMMANDS = [MODULE, SCRIPT] if PACKAGES != SOURCE else [MODULE]  # src/ is not installed, it has no script


def _commands() -> list[str]:
    """The commands, as the help lists them."""
    (below,) = [one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return list(below.choices)


@pytest.mark.parametrize("command", COMMANDS)
def test_version_says_whether_it_is_compiled(command: list[str]) -> None:
    how = "plain Python: not compiled" if headgate.limits.decision.__file__.endswith(".py") else "compiled"
    result = run_command("--version", command=command)
    assert (result.stdout, result.stderr, result.returncode) == (f"headgate {VERSION} ({how})\n", "", 0)


def test_version_from_the_source_says_plain_python() -> None:
    result = run_command("--version", packages=SOURCE)
    assert result.stdout == f"headgate {VERSION} (plain Python: not compiled)\n"


def test_without_arguments_the_commands_are_listed() -> None:
    result = run_command()
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"^ +demo +watch simulated agents", result.stdout, re.MULTILINE)
    assert re.search(r"^ +serve +start a hub", result.stdout, re.MULTILINE)
    assert re.search(r"^ +completion +print a completion script", result.stdout, re.MULTILINE)
    assert {"serve", "top", "agents", "override", "exempt", "violations", "check", "policy", "bench"} < set(_commands())


SECONDS = "headgate demo: error: argument --seconds: expected a number of seconds above 0, at most 3600, got "
IN_THE_OPEN = "expected in HEADGATE_%s or in the table [hub] of a file, not on the command line, where others see it"
AGENTS = "headgate demo: error: argument --agents: expected a whole number from 1 to 100, got "
ALL = ", ".join(_commands())
LANE = "headgate override set: error: argument TIER=LIMIT: expected a tier (or session) and a limit"
DURATION = "expected a duration such as 90s, 30m, 2h or 1d, up to 10 years"
FUTURE = "expected a time in the future, within 10 years"
TIME = "expected a time such as 2026-12-01T18:00 or 2026-12-01T18:00+02:00"
NAME = "error: argument AGENT: expected 1 to 128 printable characters, got"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["dmeo"], f"headgate: error: unknown command 'dmeo'; did you mean headgate demo? the commands are: {ALL}"),
        (["--verbose", "xyz"], f"headgate: error: unknown command 'xyz'; the commands are: {ALL}"),
        (["\x1b[2J"], f"headgate: error: unknown command '\\x1b[2J'; the commands are: {ALL}"),
        (["demo", "\x1b[2J\n"], "headgate demo: error: unrecognized arguments: \\x1b[2J\\n"),
        (
            ["--verbose"],
            "headgate: error: unrecognized arguments: --verbose; did you mean --version?",
        ),
        (["policy"], "headgate policy: error: the following arguments are required: COMMAND"),
        (
            ["policy", "chek"],
            (
                "headgate policy: error: unknown command 'chek'; did you mean headgate policy check? "
                "the commands are: check, show"
            ),
        ),
        (["policy", "check"], "headgate policy check: error: the following arguments are required: FILE"),
        (["demo", "now"], "headgate demo: error: unrecognized arguments: now"),
        (["serve", "now"], "headgate serve: error: unrecognized arguments: now"),
        (["serve", "--prot", "1"], "headgate serve: error: unrecognized arguments: --prot 1; did you mean --port?"),
        (["serve", "--web=1"], "headgate serve: error: unrecognized arguments: --web=1; did you mean --webhooks?"),
        (
            ["override", "remove", "a", "b"],
            "headgate override remove: error: unrecognized arguments: b",
        ),
        (["serve", "--port"], "headgate serve: error: argument --port: expected one argument"),
        *[
            (["serve", option, "a-secret"], f"headgate serve: error: {option}: {IN_THE_OPEN % name}")
            for option, name in (("--admin-token", "ADMIN_TOKEN"), ("--viewer-token", "VIEWER_TOKEN"))
        ],
        (["serve", "--admin-token=a-secret"], f"headgate serve: error: --admin-token: {IN_THE_OPEN % 'ADMIN_TOKEN'}"),
        (["demo", "--seed"], "headgate demo: error: argument --seed: expected one argument"),
        (["demo", "--seed", "x"], "headgate demo: error: argument --seed: expected a whole number, got 'x'"),
        *[(["demo", "--seconds", bad], f"{SECONDS}'{bad}'") for bad in ("soon", "0", "-1", "nan", "inf", "3601")],
        *[(["demo", "--agents", bad], f"{AGENTS}'{bad}'") for bad in ("many", "0", "-1", "1.5", "101")],
        *[
            (["bench", "--seconds", bad], f"{SECONDS.replace('demo', 'bench')}'{bad}'")
            for bad in ("soon", "0", "-1", "nan", "inf", "3601")
        ],
        (["agents", "a", "b"], "headgate agents: error: unrecognized arguments: b"),
        (["agents", "\x1b"], f"headgate agents: {NAME} '\\x1b'"),
        (["top", "now"], "headgate top: error: unrecognized arguments: now"),
        (
            ["override", "sett"],
            (
                "headgate override: error: unknown command 'sett'; did you mean headgate override set? "
                "the commands are: list, set, remove"
            ),
        ),
        (
            ["accounts", "acme/search"],
            (
                "headgate accounts: error: unknown command 'acme/search'; did you mean headgate accounts show "
                "acme/search? the commands are: list, show, set, unset, plan, move"
            ),
        ),
        (
            ["accounts", "create", "acme"],
            (
                "headgate accounts: error: unknown command 'create'; the commands are: list, show, set, unset, plan, "
                "move"
            ),
        ),
        (["override", "set"], "headgate override set: error: the following arguments are required: AGENT, TIER=LIMIT"),
        (["override", "set", "a"], "headgate override set: error: the following arguments are required: TIER=LIMIT"),
        *[
            (["override", "set", "a", bad], f"{LANE}, such as heavy=100/minute, got '{bad}'")
            for bad in ("heavy", "very heavy=1/s", "=1/s", "")
        ],
        (
            ["override", "set", "a", "light=often"],
            (
                "headgate override set: error: argument TIER=LIMIT: light: limit: expected 'COUNT/UNIT' or "
                "'COUNT per N UNITS', then perhaps 'burst N' or 'sliding' (such as '60/minute burst 10'; UNIT is ms, "
                "second, minute, hour, day, week, month or year), got 'often'"
            ),
        ),
        (
            ["override", "set", "a", "light=1/s", "heavy=1/s", "light=2/s"],
            "headgate override set: error: argument TIER=LIMIT: expected each tier once, got light heavy light",
        ),
        (["override", "set", "a\n", "light=1/s"], f"headgate override set: {NAME} 'a\\n'"),
        (["override", "remove", ""], f"headgate override remove: {NAME} ''"),
        (["override", "list", "a"], "headgate override list: error: unrecognized arguments: a"),
        (
            ["exempt", "ad"],
            (
                "headgate exempt: error: unknown command 'ad'; did you mean headgate exempt add? "
                "the commands are: list, add, remove, set"
            ),
        ),
        (["exempt", "add"], "headgate exempt add: error: the following arguments are required: AGENT"),
        (["exempt", "add", "\x1b"], f"headgate exempt add: {NAME} '\\x1b'"),
        (["exempt", "remove", "a" * 129], f"headgate exempt remove: {NAME} '{'a' * 96}..."),
        (
            ["violations", "rest"],
            (
                "headgate violations: error: unknown command 'rest'; did you mean headgate violations reset? "
                "the commands are: list, reset"
            ),
        ),
        (["violations", "reset"], "headgate violations reset: error: the following arguments are required: AGENT"),
        (["violations", "reset", "\u2028"], f"headgate violations reset: {NAME} '\\u2028'"),
        (["block"], "headgate block: error: the following arguments are required: AGENT"),
        (["block", "a\n"], f"headgate block: {NAME} 'a\\n'"),
        (
            ["block", "a", "10m"],
            "headgate block: error: argument --for: expected it before a duration, such as --for 10m, got '10m' alone",
        ),
        *[
            (["block", "a", "--for", bad], f"headgate block: error: argument --for: {DURATION}, got {bad!r}")
            for bad in ("", "2", "h", "1.5h", "2 h", "0s", "99999d", "9" * 20 + "h", "1h1", "\u0663h")
        ],
        *[
            (["block", "a", "--until", bad], f"headgate block: error: argument --until: {TIME}, got {bad!r}")
            for bad in ("", "soon", "18:00", "2026-13-01", "2030-01-01T25:00", "1e9")
        ],
        *[
            (["block", "a", "--until", bad], f"headgate block: error: argument --until: {FUTURE}, got {bad!r}")
            for bad in ("2020-01-01T00:00Z", "2020-01-01", "9999-12-31T23:59:59-23:00")
        ],
        (
            ["block", "a", "--for", "1h", "--until", f"{datetime.now().year + 2}-01-01"],
            "headgate block: error: argument --until: not allowed with argument --for",
        ),
        (["admins", "add", "ann"], "headgate admins add: error: the following arguments are required: --role"),
        (
            ["admins", "add", "ann", "--role", "king"],
            "headgate admins add: error: argument --role: expected one of admin, viewer, got 'king'",
        ),
        (
            ["role", "set", "a", "king"],
            "headgate role set: error: argument ROLE: expected one of admin, viewer, got 'king'",
        ),
        (
            ["log-level", "loud"],
            "headgate log-level: error: argument LEVEL: expected one of debug, info, warning, error, got 'loud'",
        ),
        *[
            (["tasks", "push", bad], f"headgate tasks push: error: argument JSON: expected JSON, got {bad!r} ({why})")
            for bad, why in {
                "{": "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
                "NaN": "NaN is not JSON",
                "{}, {}": "Extra data: line 1 column 3 (char 2)",
            }.items()
        ],
        *[
            (
                ["channels", "delete", bad],
                f"headgate channels delete: error: argument NAME: expected the name of a chat channel, got {bad!r}",
            )
            for bad in ("", ".", "..", "a\n", "a" * 65)
        ],
        (["completion"], "headgate completion: error: the following arguments are required: SHELL"),
        (
            ["completion", "ksh"],
            "headgate completion: error: argument SHELL: expected one of bash, zsh, tcsh, fish, got 'ksh'",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: list[str], text: str, headgate: Command) -> None:
    err = headgate(*arguments).expect_error(2)
    *usage, error = err.splitlines()
    assert usage[0].startswith("usage: headgate")
    assert all(line.startswith(" ") for line in usage[1:])
    assert error == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["agents", "a", "--all"], "headgate agents: --all: expected no AGENT, since it lists all of them"),
        (
            ["defaults", "set", "session=1/s", "--channel", "ws"],
            "headgate defaults set: --channel: sessions have no channel: set session=… without --channel",
        ),
        (
            ["policy", "show", "a", "--effective"],
            "headgate policy show: --effective: expected no FILE; the hub has its own",
        ),
        (
            ["policy", "show", "--hub", "http://localhost"],
            "headgate policy show: --hub, --token-file: expected --effective too; a file is shown without a hub",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: list[str], text: str, headgate: Command) -> None:
    assert headgate(*arguments) == (2, "", f"{text}\n")


def test_bad_arguments_of_the_program_give_the_same_error() -> None:
    result = run_command("dmeo")
    assert (result.returncode, result.stdout) == (2, "")
    error = f"headgate: error: unknown command 'dmeo'; did you mean headgate demo? the commands are: {ALL}"
    assert result.stderr.splitlines()[-1] == error


def test_serve_help_describes_every_option_and_its_default() -> None:
    result = run_command("serve", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    for one in fields(HubSettings):
        if one.metadata["secret"]:
            assert f"{flag(one.name)} " not in text
        else:
            assert f"{flag(one.name)} " in text
            assert one.metadata["about"] in text
    for ordinary in (
        "(default: 8080)",
        "(default: 127.0.0.1)",
        "(default: 65536)",
        "(default: 10.0)",
        "(default: open)",
    ):
        assert ordinary in text
    assert "--config FILE" in text
    assert "HEADGATE_PORT" in text


LINE = re.compile(r" *(?P<elapsed>[\d.]+) of [\d.]+ s: (?P<totals>\d+ allowed, \d+ warned, \d+ denied)")
SUMMARY = re.compile(
    r"(?P<checks>\d+) checks in (?P<elapsed>[\d.]+) s: (?P<allowed>\d+) allowed, (?P<warned>\d+) warned, "
    r"(?P<denied>\d+) denied\. Warned requests pass, but little is left\."
)
WORST = re.compile(
    r"runaway-4 asked for (?P<asked>\d+) tokens within (?P<span>[\d.]+) s and got (?P<got>\d+); "
    r"its limit grants at most (?P<most>\d+) in that time\."
)
MEASURED = re.compile(r"200,000 checks without pauses, 1,000 keys in turn: ([\d,]+)/s, (\d+) ns each\.")


def summary(lines: list[str]) -> re.Match[str]:
    """Check the closing lines against each other, and return the first. If anybody was denied, one is of the worst."""
    at, found = next((at, match) for at, line in enumerate(lines) if (match := SUMMARY.fullmatch(line)))
    assert int(found["checks"]) == sum(int(found[outcome]) for outcome in ("allowed", "warned", "denied"))
    *denials, last = lines[at + 1 :]
    assert len(denials) == (found["denied"] != "0")
    for line in denials:
        worst = WORST.fullmatch(line)
        assert worst
        asked, got, most, span = (float(worst[part]) for part in ("asked", "got", "most", "span"))
        assert 0 < got < asked
        assert got <= most
        assert int(20 + 5 * (span - 0.0005)) <= most <= int(20 + 5 * (span + 0.0005))  # it is shown rounded
        assert asked - got <= int(found["denied"])
    measured = MEASURED.fullmatch(last)
    assert measured
    assert int(measured[1].replace(",", "")) == pytest.approx(1e9 / int(measured[2]), rel=0.05)
    return found


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_demo_into_a_pipe_is_plain_lines(command: list[str]) -> None:
    result = run_command("demo", "--seconds", "1", "--seed", "7", command=command)
    assert (result.stderr, result.returncode) == ("", 0)
    assert "\x1b" not in result.stdout
    version, opening, *lines = result.stdout.splitlines()
    assert version.startswith(f"headgate {VERSION} (")
    assert opening == "Each of 6 agents has its own bucket: 5/second burst 20. Press Ctrl-C to stop."
    found = summary(lines)
    assert float(found["elapsed"]) >= 1.0
    drawn = [LINE.fullmatch(line) for line in lines[:-3]]
    assert drawn
    assert all(drawn)
    assert drawn[-1]
    assert drawn[-1]["elapsed"] == "1.0"
    assert drawn[-1]["totals"] in found[0]


def test_demo_without_denials_names_no_agent() -> None:
    result = run_command("demo", "--seconds", "0.5", "--agents", "1")
    _, opening, *_, last, measured = result.stdout.splitlines()
    assert opening == "One agent has a bucket: 5/second burst 20. Press Ctrl-C to stop."
    found = SUMMARY.fullmatch(last)
    assert found
    assert found["denied"] == "0"
    assert MEASURED.fullmatch(measured)


def test_demo_whose_reader_goes_away_ends_without_a_word() -> None:
    with command_process("demo", "--seconds", "600") as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE) == 0
        assert process.stderr.read() == ""


def test_ctrl_c_ends_the_demo_with_its_summary() -> None:
    with command_process("demo", "--seconds", "600") as process:
        assert process.stdout
        for _ in range(2):
            process.stdout.readline()
        for _ in range(60):  # a line each second, on a slow machine too: before the last somebody is denied
            line = LINE.fullmatch(process.stdout.readline().rstrip())
            assert line
            if not line["totals"].endswith(" 0 denied"):
                break
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=DEADLINE)
        assert (process.returncode, errors) == (0, "")
    found = summary(rest.splitlines())
    assert float(found["elapsed"]) < 600
    assert int(found["denied"]) > 0


HIDE, SHOW, UP, RED, COLOUR = "\x1b[?25l", "\x1b[?25h", "\x1b[9F", "\x1b[31m", re.compile(r"\x1b\[(3[123]|0)m")
ROW = re.compile(r"(?P<name>\w+-\d) +(?P<bar>█*░*) +(?P<used>\d+)% +\d+ +\d+ +\d+ +(-|[\d.]+ s)")


def pictures(text: str) -> list[list[str]]:
    """The rows of each picture that is whole, without the marks that clear the rest of a line."""
    drawn = [part.split("\x1b[K\n") for part in text.partition(HIDE)[2].partition(SHOW)[0].split(UP)]
    return [rows for *rows, rest in drawn if len(rows) == 9 and not rest]


def test_demo_on_a_terminal_draws_over_its_last_picture() -> None:
    terminal = Terminal()
    with terminal.process("demo", "--seconds", "600") as process:
        terminal.wait_until(lambda text: text.count(UP) >= 4 and any(RED in rows[4] for rows in pictures(text)))
        process.send_signal(signal.SIGINT)
    text = terminal.text
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.index(HIDE) < text.index(UP) < text.rindex(UP) < text.index(SHOW)
    assert len(pictures(text)) == text.count(UP) + 1
    for head, *agents, empty, progress in pictures(text):
        assert head.split() == ["agent", "bucket", "used", "allowed", "warned", "denied", "retry", "in"]
        assert empty == ""
        assert re.fullmatch(r"time +█*░*  +\d+%  [\d.]+ of 600 s", progress)
        assert len(agents) == 6
        for row in agents:
            plain = COLOUR.sub("", row)
            assert len(plain) == len(head) <= 99
            match = ROW.fullmatch(plain)
            assert match
            used = int(match["used"])
            assert len(match["bar"]) == 40
            assert match["bar"].count("█") == round(used * 40 / 100)
            colour = "\x1b[32m" if used < 50 else "\x1b[33m" if used <= 80 else RED
            assert colour in row
        assert "\x1b[32m" in agents[0]
    summary(text.splitlines())


def test_no_color_leaves_the_colours_out() -> None:
    text = run_on_terminal("demo", "--seconds", "0.5", more={"NO_COLOR": "1"})
    assert re.fullmatch(r"time +█{40}  100%  0\.5 of 0\.5 s", pictures(text)[-1][-1])
    assert not COLOUR.search(text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "columns", "more"),
    [(24, 60, {}), (8, 100, {}), (24, 100, {"TERM": "dumb"}), (24, 100, {"PYTHONIOENCODING": "ascii"})],
    ids=["narrow", "low", "dumb", "ascii"],
)
def test_a_terminal_that_cannot_show_the_picture_gets_lines(rows: int, columns: int, more: dict[str, str]) -> None:
    text = run_on_terminal("demo", "--seconds", "0.5", rows=rows, columns=columns, more=more)
    assert "\x1b" not in text
    assert LINE.fullmatch(text.splitlines()[2])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a policy file goes."""
    return tmp_path / "headgate.toml"


def test_policy_check_says_what_a_file_changes(path: Path, headgate: Command) -> None:
    path.write_text('warn_at = 0.9\n[limits]\nheavy = "5/minute"\n[agents."a b"]\nws.light = ["1/s", "5/m"]\n')
    assert headgate("policy", "check", str(path)).expect_output().splitlines() == [
        f"{path}: no mistakes; changes:",
        "  warn_at = 0.9  (default: 0.8)",
        '  limits.ws.heavy = "5/minute"  (default: "10/minute")',
        '  limits.http.heavy = "5/minute"  (default: "10/minute")',
        '  agents."a b".ws.light = ["1/second", "5/minute"]',
    ]
    path.write_text("")
    assert headgate("policy", "check", str(path)).expect_output() == f"{path}: no mistakes; changes nothing\n"


@pytest.mark.parametrize(
    ("levels", "note"),
    [
        (
            '["customer", "department"]',
            (
                "note: accounts.levels: 'customer' is taken as the level of agents and 'department' as that of "
                "sessions; if they stand above the agents, add 'agent' and 'session' at the end\n"
            ),
        ),
        ('["customer", "agent", "session"]', ""),
        ('["customer", "bot", "session"]', ""),
        ('["customer", "agent", "run"]', ""),
    ],
)
def test_policy_check_notes_which_levels_are_those_of_agents_and_sessions(
    path: Path, levels: str, note: str, headgate: Command
) -> None:
    path.write_text(f"[accounts]\nlevels = {levels}\n")
    assert headgate("policy", "check", str(path))[::2] == (0, note)


def test_policy_check_notes_an_account_that_is_nearly_another(path: Path, headgate: Command) -> None:
    path.write_text(
        '[accounts.at."acme/search"]\nusd = "5/calendar day"\n'
        '[agents.a]\naccount = "acme/search"\n[agents.b]\naccount = "acme/billing"\n'
        '[agents."c d"]\naccount = "acme/serach"\n[agents.e]\naccount = "acme/searck"\n'
        '[accounts.at.customer-01]\nusd = "5/calendar day"\n'
        '[agents.f]\naccount = "customer-10"\n[agents.g]\naccount = "customer-1"\n[agents.h]\naccount = "custome-01"\n'
    )
    assert headgate("policy", "check", str(path))[::2] == (
        0,
        (
            "note: agents.\"c d\".account is 'acme/serach', which has no limits of its own; "
            "did you mean 'acme/search'?\n"
            "note: agents.h.account is 'custome-01', which has no limits of its own; did you mean 'customer-01'?\n"
        ),
    )


def test_policy_check_lists_all_mistakes(path: Path, headgate: Command) -> None:
    path.write_text("warn_at = 9\n[limits]\nheavy = 5\n")
    assert headgate("policy", "check", str(path)).expect_error().splitlines() == [
        f"{path}: 2 mistakes",
        "  limits.heavy: expected a limit such as '5/minute', or several, got 5",
        "  warn_at: expected a number from 0 to 1 with at most three decimals, got 9",
    ]


def test_policy_check_covers_the_settings_of_the_hub(
    path: Path, headgate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_PORT", "nonsense")
    monkeypatch.setenv("HEADGATE_REGISTRATION", "open")
    path.write_text(
        'warn_at = 9\n[hub]\nport = 99999\nregistration = "all"\n'
        'admin_token = "short"\nprot = 1\nrelay_rate_limit = "fast"\n'
    )
    err = headgate("policy", "check", str(path)).expect_error()
    first, *mistakes = err.splitlines()
    assert first == f"{path}: 6 mistakes"
    assert [one.partition(", got")[0] for one in mistakes[:-1]] == [
        "  warn_at: expected a number from 0 to 1 with at most three decimals",
        "  hub.port: expected a whole number from 0 to 65535",
        "  hub.registration: expected one of open, invitation, closed",
        "  hub.admin_token: expected at least 16 printable ASCII characters without spaces",
        "  hub.relay_rate_limit: expected messages per second, a number above 0 such as 1.0, or off",
    ]
    assert mistakes[-1].startswith("  hub.prot: expected one of port, host, ")
    assert "short" not in err


def test_policy_check_lists_what_the_settings_of_the_hub_change(
    path: Path, headgate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_PORT", "1234")
    path.write_text(
        '[hub]\nport = 9000\ntls_key = "key.pem"\nallowed_hosts = ["a.org", "b.org"]\npublic_dashboard = true\n'
        'viewer_token = "a-secret-that-nobody-sees"\nstore = "redis://user:secret@localhost"\n'
    )
    assert headgate("policy", "check", str(path)).expect_output().splitlines() == [
        f"{path}: no mistakes; changes:",
        "  hub.port = 9000  (default: 8080)",
        "  hub.store = (not shown)",
        "  hub.viewer_token = (not shown)",
        "  hub.public_dashboard = true  (default: false)",
        '  hub.allowed_hosts = ["a.org", "b.org"]',
        '  hub.tls_key = "key.pem"',
    ]
    path.write_text("hub = 5\n")
    assert (
        headgate("policy", "check", str(path)).expect_error() == f"{path}: 1 mistake\n  hub: expected a table, got 5\n"
    )
    assert headgate("policy", "check", "none").expect_error().splitlines() == [
        "none: 1 mistake",
        "  expected a readable file, got: No such file or directory",
    ]


def test_policy_show_prints_a_file_that_comes_to_the_same(path: Path, headgate: Command) -> None:
    path.write_text('exempt = ["vip"]\n')
    for arguments, policy in (([], Policy()), ([str(path)], Policy(exempt=["vip"]))):
        again = path.with_name("again.toml")
        again.write_text(headgate("policy", "show", *arguments).expect_output())
        assert Policy.load(again) == policy
    headgate("policy", "show", "none").expect_error()
