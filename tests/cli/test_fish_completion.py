"""`headgate completion fish`: what fish offers, and that no text of the help can run anything."""

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headgate.cli import build_parser
from headgate.cli.fish_completion import fish_script
from tests.support.cli import Command, leaf_commands

pytestmark = pytest.mark.once

WORD = re.compile(r"'(?:[^'\\\n]|\\['\\])*'|[-\w]+")
"""A word of a completion in the script: quoted, or plain."""
EVIL = "it's \\' \\\\' $HOME (touch made) `touch made`; touch made\n# \x1b[2J %% ' -a '(touch made)'"


def hostile_parser() -> argparse.ArgumentParser:
    """A parser in which all texts try to run a command."""
    parser = argparse.ArgumentParser(prog="headgate", description=EVIL)
    parser.add_argument("--one", help=EVIL, choices=["$(touch made)", "(touch made)", "a'b", "c d"])
    parser.add_argument("--file", metavar="FILE", help=EVIL)
    below = parser.add_subparsers(metavar="COMMAND")
    verb = below.add_parser("go", help=EVIL)
    verb.add_argument("what", choices=["(touch made)", "x;y", "$HOME"], help=EVIL)
    return parser


def completions(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.startswith("complete ")]


@pytest.mark.parametrize("parser", [build_parser(), hostile_parser()], ids=["headgate", "hostile"])
def test_a_completion_is_one_line_of_words(parser: argparse.ArgumentParser) -> None:
    script = fish_script(parser)
    assert all(line.isprintable() for line in script.splitlines())
    for line in completions(script):
        assert WORD.sub("", line).strip(" ") == "", line


def test_every_command_and_option_is_offered() -> None:
    lines = "\n".join(completions(fish_script(build_parser())))
    for command, actions in leaf_commands(build_parser()):
        *above, last = command.split()
        assert f"__headgate_at \\'{' '.join(above)}\\'' -a '{last}' -d " in lines
        for name in [name for one in actions if one.help is not argparse.SUPPRESS for name in one.option_strings]:
            option = f"-l '{name[2:]}'" if name.startswith("--") else f"-s '{name[1:]}'"
            start = re.escape(f"__headgate_at \\'{command}\\'' ")
            assert re.search(f"{start}.*{option}", lines), (command, name)
    assert "admin-token'" not in lines


def offered(folder: Path, script: str, typed: str) -> list[str]:
    """What a real fish offers, with its descriptions."""
    (folder / "headgate.fish").write_text(script, encoding="utf-8")
    program = "source headgate.fish; or exit 1; complete -C $argv[1]"
    fish = shutil.which("fish")
    assert fish, "tools/install-programs installs fish"
    done = subprocess.run(
        [fish, "--no-config", "-c", program, typed], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("ov", ["override"]),
        ("override ", ["list", "remove", "set"]),
        ("--version override ", ["list", "remove", "set"]),
        ("tasks --limit 5 ", ["list", "push"]),
        ("tasks --limit=5 pu", ["push"]),
        ("override set --ch", ["--channel"]),
        ("override set override --ch", ["--channel"]),
        ("check --tier ", ["heavy", "light", "normal"]),
        ("check a --tier=l", ["--tier=light"]),
        ("admins add ann --role ", ["admin", "viewer"]),
        ("role set a ", ["admin", "viewer"]),
        ("log-level ", ["debug", "error", "info", "warning"]),
        ("completion ", ["bash", "fish", "tcsh", "zsh"]),
        ("replay ex", ["example.toml"]),
        ("policy check exam", ["example.toml"]),
        ("agents --token-file exam", ["example.toml"]),
        ("agents ", []),
        ("agents --tok", ["--token-file"]),
    ],
)
def test_fish_completes(typed: str, words: list[str], headgate: Command, tmp_path: Path) -> None:
    (tmp_path / "example.toml").touch()
    script = headgate("completion", "fish").expect_output()
    assert [line.partition("\t")[0] for line in offered(tmp_path, script, f"headgate {typed}")] == words


@pytest.mark.long
def test_no_text_runs_anything_in_fish(tmp_path: Path) -> None:
    script = fish_script(hostile_parser())
    words = {typed: offered(tmp_path, script, f"headgate {typed}") for typed in ("", "-", "--one ", "--file ", "go ")}
    assert [line.partition("\t")[0] for line in words[""]] == ["go"]
    about = words[""][0].partition("\t")[2]
    assert about.startswith("it's \\' \\\\' $HOME (touch made) `touch made`; touch made # ")
    assert sorted(line.partition("\t")[0] for line in words["--one "]) == [
        "$(touch made)", "(touch made)", "a'b", "c d",
    ]  # fmt: skip
    assert sorted(line.partition("\t")[0] for line in words["go "]) == ["$HOME", "(touch made)", "x;y"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headgate.fish"]
