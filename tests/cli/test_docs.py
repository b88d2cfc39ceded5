"""docs/cli.md: it names every command and option, no others, and shows what commands really print."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from headgate import ManualClock
from headgate.cli import block, build_parser
from tests.support.cli import Command, StartHub, leaf_commands

pytestmark = pytest.mark.once

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text(encoding="utf-8")
ELSEWHERE = ("serve", "replay")  # these have pages of their own
EVERYWHERE = ("--help", "-h", "--json", "--hub", "--token-file")


COMMANDS = dict(leaf_commands(build_parser()))


def section(command: str) -> str:
    """What the page says of a command."""
    found = re.split(rf"^## headgate {command.split()[0]}$", PAGE, flags=re.MULTILINE)
    assert len(found) == 2, f"expected a section '## headgate {command.split()[0]}'"
    return re.split(r"^## ", found[1], flags=re.MULTILINE)[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_on_the_page(command: str) -> None:
    text = section(command)
    assert f"`headgate {command.split()[0]}`" in PAGE
    if command in ELSEWHERE:
        return
    if " " in command:
        assert f"`headgate {command}" in text
    shown = [one for one in COMMANDS[command] if one.help is not argparse.SUPPRESS]
    options = [name for one in shown for name in one.option_strings]
    assert [name for name in options if name not in EVERYWHERE and not re.search(rf"`{name}\b", text)] == []
    places = [str(one.metavar) for one in shown if not one.option_strings]
    assert [place for place in places if place not in text] == []


def test_the_common_options_are_on_the_page() -> None:
    assert all(f"`{name}" in PAGE for name in EVERYWHERE if name not in ("-h", "--help"))


def test_the_page_has_no_command_or_option_that_does_not_exist() -> None:
    options = {name for actions in COMMANDS.values() for one in actions for name in one.option_strings} | {"--version"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= options
    words = {command.split()[0] for command in COMMANDS}
    assert set(re.findall(r"(?:`|^## |^\$ |^)headgate ([a-z][a-z-]*)", PAGE, re.MULTILINE)) == words


def shown() -> list[tuple[str, str]]:
    """The commands that are shown with what they print."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(command, printed) for command, _, printed in (part.partition("\n") for part in parts)]


VARIES = {r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d": "TIME", r"hgi?_[\w-]+": "TOKEN", r"\b[0-9a-f-]{32,36}\b": "ID"}
"""What differs each time: times, tokens and the ids of tasks."""


def comparable(printed: str) -> str:
    for pattern, name in VARIES.items():
        printed = re.sub(pattern, name, printed)
    return printed


def test_the_page_shows_the_real_output(
    running_hub: StartHub, headgate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DOCS)
    monkeypatch.setattr(block, "time", ManualClock(start=1000).wall)
    with running_hub() as hub, hub.agent("planner"), hub.agent("writer"), hub.agent("reader"):
        hub.hub.gate.add_exemption("monitor")
        hub.run(hub.hub.messages.create_chat_channel("news", "planner", "what is new"))
        for agent, channel, action, times in (
            ("planner", "http", "post_task", 12),
            ("writer", "ws", "message", 33),
            ("reader", "ws", "ping", 20),
        ):
            for _ in range(times):
                hub.run(hub.hub.stats.check(agent, channel, action=action, address="127.0.0.1"))
        printed = [(command, "".join(headgate(*shlex.split(command)[1:])[1:])) for command, _ in shown()]
    assert [(command, comparable(text)) for command, text in printed] == [
        (command, comparable(text)) for command, text in shown()
    ]
