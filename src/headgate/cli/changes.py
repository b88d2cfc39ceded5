"""`headgate changes` and `headgate reload`: changes of limits, by commands and by the policy file."""

from typing import Any, Final

from headgate.cli.answers import local_time, shown
from headgate.cli.hub_commands import ListCommand, Rows, add_change_command, add_limit_option
from headgate.cli.parser import Commands
from headgate.cli.terminal import Column

_REMEDY: Final = (
    "headgate policy show --effective shows by whom; undo it with headgate defaults reset, and for an agent set the "
    "limit of the file with headgate override set"
)


def add(commands: Commands) -> None:
    _CHANGES.add(
        commands,
        "changes",
        "list the changes, with their authors",
        "List the changes of limits, exemptions, blocks and roles, newest first, with time and author.",
        "headgate changes",
        "headgate changes --limit 10 --json",
    )
    add_change_command(
        commands,
        "reload",
        lambda hub, _: hub.reload(),
        lambda _, answer: "\n".join(_report(answer)),
        "reload the policy file of the hub",
        "Reload the hub's policy file, from the next request on. A file with mistakes is refused, and nothing changes. "
        "Lists the settings that wait for a restart of the hub, and the limits that a stored change overrules.",
        "headgate reload",
    )


def _rows(answer: dict[str, Any]) -> Rows:
    return [[local_time(one["at"]), shown(one["by"]) or "-", shown(one["what"])] for one in answer["changes"]]


_CHANGES = ListCommand(
    lambda hub, options: hub.changes(options.limit),
    [Column("time"), Column("by"), Column("change")],
    _rows,
    "nothing was changed",
    arguments=add_limit_option,
)


def _report(answer: dict[str, Any]) -> list[str]:
    lines = ["the policy file is reloaded"]
    if answer["waits_for_restart"]:
        lines.append(f"waits for a restart of the hub: {', '.join(map(shown, answer['waits_for_restart']))}")
    if answer["overruled"]:
        lines.append(f"overruled by stored changes: {', '.join(map(shown, answer['overruled']))} ({_REMEDY})")
    return lines
