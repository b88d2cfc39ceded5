"""The shapes of commands that call a hub: a change, a list, a new token."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from headgate.cli.hub_api import HubApi, HubError
from headgate.cli.hub_options import AgentName, add_hub_options, hub_from
from headgate.cli.parser import Commands, RunCommand, add_command, whole_number
from headgate.cli.terminal import Cell, Column, print_error, print_json, table_text
from headgate.errors import InvalidInput, printable
from headgate.hub.settings import usable_token

Answer: TypeAlias = dict[str, Any]
Rows: TypeAlias = list[list[str | Cell]]


def add_hub_command(
    commands: Commands,
    name: str,
    run: RunCommand,
    about: str,
    description: str,
    *examples: str,
    agent: AgentName | None = None,
) -> argparse.ArgumentParser:
    """Add a command that asks a hub, with --json and the options of a hub; with `agent`, the argument AGENT too."""
    parser = add_command(commands, name, run, about, description, *examples, json=True)
    add_hub_options(parser, agent=agent)
    return parser


def add_change_command(
    commands: Commands,
    name: str,
    change: Callable[[HubApi, argparse.Namespace], Answer],
    text: Callable[[argparse.Namespace, Answer], str],
    about: str,
    description: str,
    *examples: str,
    agent: AgentName | None = None,
    note: Callable[[HubApi, argparse.Namespace, Answer], object] = lambda *_: None,
) -> argparse.ArgumentParser:
    """Add a command that changes something at the hub. `text` reports it, by the options and the answer.

    With `agent`, it has the argument AGENT. `note` prints notes after the text, as about a name that may be misspelt.
    """

    def run(options: argparse.Namespace) -> int:
        hub = hub_from(options)
        answer = change(hub, options)
        print_answer(options, hub, answer, lambda: text(options, answer))
        if not options.json:
            note(hub, options, answer)
        return 0

    return add_hub_command(commands, name, run, about, description, *examples, agent=agent)


def note_new_account(account: str, answer: Answer) -> None:
    """Print notes if a hub answered that nothing had named an account before, so it may be misspelt, or limits it."""
    if answer.get("known") is False:
        print_error(f"note: the account {printable(account)} is new: nothing named it before")
    if answer.get("limited") is False:
        print_error(f"note: nothing limits {printable(account)}")


def note_unknown_account(hub: HubApi, path: str) -> None:
    """Print a note if nothing names an account: it may be misspelt. The hub is asked."""
    try:
        hub.account(path)
    except InvalidInput:  # no path leads to it
        return
    except HubError as error:
        if error.status == 404:
            print_error(f"note: nothing names an account {printable(path)!r}")


def note_answer(_: HubApi, options: argparse.Namespace, answer: Answer) -> None:
    """Print a note if a hub answered that no agent of that name is registered: it may be misspelt."""
    if answer.get("registered") is False:
        print_unregistered(options.agent)


def note_unregistered(hub: HubApi, agent: str) -> None:
    """Print a note if no agent of that name is registered: the hub is asked."""
    try:
        registered = hub.agent(agent).get("registered", True)
    except InvalidInput:  # no path leads to it
        return
    except HubError as error:
        registered = error.status != 404
    if registered is False:
        print_unregistered(agent)


def print_unregistered(*agents: str) -> None:
    """Print a note that no such agents are registered. Letters that look like others can be told apart in it."""
    for agent in agents:
        escaped = "" if agent.isascii() else f" ({agent.encode('ascii', 'backslashreplace').decode()})"
        print_error(f"note: no agent named {printable(agent)}{escaped} is registered")


@dataclass(frozen=True)
class ListCommand:
    """A command that prints a list of the hub as a table."""

    fetch: Callable[[HubApi, argparse.Namespace], Answer]
    columns: Sequence[Column]
    """Without columns, the rows are names, which are printed without a title."""
    rows: Callable[[Answer], Rows]
    empty: str
    """The text in place of an empty table."""
    viewer: bool = False
    arguments: Callable[[argparse.ArgumentParser], object] = lambda _: None
    """Adds arguments. They have no defaults: those of `list` would overwrite options before it."""

    def add(self, commands: Commands, name: str, about: str, description: str, *examples: str) -> Any:
        parser = add_command(commands, name, self._run, about, description, *examples, json=True)
        self.arguments(parser)
        add_hub_options(parser, viewer=self.viewer)
        return parser

    def add_group(self, commands: Commands, name: str, about: str, description: str, *examples: str) -> Commands:
        """Add it as the command `name`, and as the first of the commands below: `name list`."""
        verbs: Commands = self.add(commands, name, about, description, *examples).add_subparsers(
            title="commands", metavar="COMMAND"
        )
        listed = description.partition(".")[0]
        self.add(verbs, "list", f"{listed[0].lower()}{listed[1:]}", f"{listed}.", f"headgate {name} list")
        return verbs

    def _run(self, options: argparse.Namespace) -> int:
        hub = hub_from(options, viewer=self.viewer)
        return self.print(options, hub, self.fetch(hub, options))

    def print(self, options: argparse.Namespace, hub: HubApi, answer: Answer) -> int:
        """Print an answer, as JSON or as a table; the exit code."""
        return print_answer(options, hub, answer, lambda: self._text(self.rows(answer)))

    def _text(self, rows: Rows) -> str:
        if not rows:
            return self.empty
        if not self.columns:
            return "\n".join([printable(str(name)) for (name,) in rows])
        return table_text(self.columns, rows)


def add_limit_option(parser: argparse.ArgumentParser) -> None:
    """Add --limit, for lists of which the hub keeps up to 1,000."""
    parser.add_argument(
        "--limit", type=whole_number(1, 1000), default=100, metavar="N", help="at most N (default: 100)"
    )


def print_answer(options: argparse.Namespace, hub: HubApi, answer: Answer, text: Callable[[], str]) -> int:
    """Print an answer, as JSON or as the text that is made of it; the exit code."""
    if options.json:
        print_json(answer)
    else:
        print(hub.parse(text))
    return 0


def print_token(options: argparse.Namespace, hub: HubApi, answer: Answer, note: str, field: str = "token") -> int:
    """Print a new token alone on standard output, for `TOKEN=$(headgate …)`, and a note beside it."""
    if options.json:
        print_json(answer)
        return 0
    print(hub.parse(lambda: usable_token(answer[field])), flush=True)  # no note about one that nobody gets
    print_error(f"note: {note}")
    return 0
