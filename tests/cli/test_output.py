"""Standard output that is full, closed, or read no more: a text, and the exit code that the docs name."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate import Policy
from headgate.cli import build_parser
from headgate.hub.config_file import ConfigFile
from tests.support.cli import DEADLINE, Command, StartHub, command_environment, leaf_commands, run_command
from tests.support.hub_answers import ANSWERS
from tests.support.log_files import write_csv
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once

ARGUMENTS = {
    **{command: arguments for command, (arguments, _) in ANSWERS.items() if command != "agents AGENT"},
    "agents": ["--all"],
    "block": ["a"],
    "register": ["new{}"],
    "holds cancel": ["a", "hold{}"],
    "channels delete": ["chat{}"],
    "admins add": ["admin{}", "--role", "viewer"],
    "admins remove": ["admin{}"],
    "policy show": [],
    "policy check": ["headgate.toml"],
    "replay": ["log.csv"],
    "bench": ["--seconds", "0.001"],
    "demo": ["--seconds", "0.001"],
    "completion": ["bash"],
}
"""The arguments of each command that ends by itself; `top` is no command for a pipe. {} numbers the attempts."""
SLOW = ("bench", "demo")
FULL = "standard output: No space left on device\n"
CLOSED = "standard output: Bad file descriptor\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path, [(0, "a", "light")], name="log.csv")
    (tmp_path / "headgate.toml").touch()
    return tmp_path


def test_every_command_is_in_the_table() -> None:
    assert {*ARGUMENTS, "serve", "top"} == {name for name, _ in leaf_commands(build_parser())}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "content", "text"),
    [
        (["policy", "check"], "", "no mistakes; changes nothing"),
        (["policy", "check"], "x = 1", "1 mistake"),
        (["policy", "show"], None, "1 mistake"),
        (["replay"], None, "can't read the log"),
        (["replay"], "x", "expected an access log"),
        (["replay", "log.csv", "--policy"], "x = 1", "1 mistake"),
        (["agents", "--token-file"], None, "expected a file with a token"),
    ],
)
def test_the_name_of_a_file_cannot_control_the_terminal(
    arguments: list[str], content: str | None, text: str, headgate: Command
) -> None:
    name = "\x1b[2J\u202e.log"
    if content is not None:
        Path(name).write_text(content)
    _, out, err = headgate(*arguments, name)
    assert text in out + err
    assert r"\x1b[2J\u202e.log" in out + err
    assert (out + err).replace("\n", "").isprintable()


@pytest.mark.usefixtures("folder")
def test_a_full_or_closed_output_is_an_error_of_every_command(
    running_hub: StartHub, headgate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ConfigFile(Path("headgate.toml"), {})
    accounts: dict[str, Any] = {"plans": {"pro": {}}, "default": {"org": {"eur": "9 in all"}}}
    policy = Policy(limits={"light": "1/minute"}, accounts=accounts, agents={"a": {"account": "acme"}})
    with running_hub(policy, config=config) as hub:
        hub.register("a")
        for attempt in (0, 1):
            hub.run(hub.hub.messages.create_chat_channel(f"chat{attempt}", "a", ""))
            hub.hub.gate.hold("a", {}, hold_id=f"hold{attempt}")
        for command, arguments in ARGUMENTS.items():
            codes = (0, 1) if command == "check" else (1, 1)  # the second check is denied
            texts = (FULL,) if command in SLOW else (FULL, CLOSED)
            for attempt, (code, text) in enumerate(zip(codes, texts, strict=False)):
                given = [one.replace("{}", str(attempt)) if "{}" in one[1:] else one for one in arguments]
                with monkeypatch.context() as now, open("/dev/full", "w", encoding="utf-8") as full:
                    now.setattr(sys, "stdout", full if text == FULL else None)
                    found = headgate(*command.split(), *given)
                assert found == (code, "", text), command


def test_an_undecided_check_stays_so_if_nothing_can_be_printed(
    headgate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_HUB", "http://127.0.0.1:1")
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert headgate("check", "a", "--tier", "light") == (3, "", "")
        monkeypatch.setattr(sys, "stderr", None)
        assert headgate("check", "a", "--tier", "light") == (3, "", "")


@pytest.mark.parametrize("arguments", [["policy", "show"], ["--help"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_process_ends_as_documented(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = run_command(*arguments, stdout=full, more={"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (1, FULL)


def test_a_process_without_standard_streams_ends_as_documented() -> None:
    shell = f'"{sys.executable}" -m headgate "$@"'
    closed = run_command("-c", f"{shell} >&-", "-", "policy", "show", command=["bash"])
    assert (closed.returncode, closed.stderr) == (1, CLOSED)
    silent = run_command("-c", f"{shell} >&- 2>&- <&-", "-", "policy", "show", command=["bash"])
    assert silent.returncode == 1
    cut = run_command("-c", f"set -o pipefail; {shell} | head -1", "-", "policy", "show", command=["bash"])
    assert (cut.returncode, cut.stderr) == (0, "")


@pytest.mark.long
def test_a_hub_runs_without_an_output(tmp_path: Path) -> None:
    shell = 'exec "$0" -m headgate serve --port 0 --data "$1" >&-'
    command = ["bash", "-c", shell, sys.executable, str(tmp_path)]
    with subprocess.Popen(command, env=command_environment(), text=True, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr
            while not (started := re.search(r"started.*(127\.0\.0\.1:\d+)", line := process.stderr.readline())):
                assert line, "the hub ended"
            assert httpx.get(f"http://{started[1]}/live", timeout=PATIENCE, trust_env=False).status_code == 200
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=DEADLINE)
            assert process.returncode == 0
        finally:
            process.kill()
