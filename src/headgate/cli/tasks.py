"""`headgate tasks`: the queue of tasks."""

import argparse
from typing import Any, Final

from headgate.cli.answers import local_time, number, shown, whole
from headgate.cli.hub_api import HubApi
from headgate.cli.hub_commands import ListCommand, Rows, add_change_command
from headgate.cli.parser import Commands, json_text, whole_number
from headgate.cli.terminal import Column

_STATES: Final = ("queued", "assigned", "accepted", "completed", "failed")
_LIMIT: Final = 50


def add(commands: Commands) -> None:
    verbs = _LIST.add_group(
        commands,
        "tasks",
        "list or push tasks",
        "List the tasks of all agents, newest first. With push, queue a task for any idle agent.",
        "headgate tasks",
        "headgate tasks --state failed",
        """headgate tasks push '{"url": "https://example.org"}'""",
    )
    verb = add_change_command(
        verbs,
        "push",
        lambda hub, options: hub.push_task(options.payload),
        lambda _, answer: f"task {shown(answer['task_id'])} is {shown(answer['state'])}",
        "queue a task for any idle agent",
        "Queue a task. An idle agent that isn't rate limited gets it.",
        """headgate tasks push '{"url": "https://example.org"}'""",
    )
    verb.add_argument("payload", type=json_text, metavar="JSON", help="payload for the agent: any JSON")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    absent = argparse.SUPPRESS
    parser.add_argument(
        "--state", choices=_STATES, default=absent, metavar="STATE", help=f"only in this state: {', '.join(_STATES)}"
    )
    limit = f"at most N, up to 100 (default: {_LIMIT})"
    parser.add_argument("--limit", type=whole_number(1, 100), default=absent, metavar="N", help=limit)
    parser.add_argument("--before", default=absent, metavar="TASK", help="only tasks created before this one")


def _fetch(hub: HubApi, options: argparse.Namespace) -> dict[str, Any]:
    given = vars(options)
    return hub.tasks(given.get("limit", _LIMIT), **{name: given[name] for name in ("state", "before") if name in given})


def _rows(answer: dict[str, Any]) -> Rows:
    return [
        [
            shown(one["task_id"]),
            shown(one["state"]),
            shown(one["agent"]) if one["agent"] is not None else "-",
            f"{number(one['progress']):.0%}",
            str(whole(one["attempt"])),
            shown(one["creator"]) or "admin",
            local_time(one["changed_at"]),
            shown(one["note"]),
        ]
        for one in answer["tasks"]
    ]


_LIST = ListCommand(
    _fetch,
    [Column("task"), Column("state"), Column("agent"), Column("done", right=True), Column("attempt", right=True),
     Column("creator"), Column("changed"), Column("note")],
    _rows,
    "no tasks",
    arguments=_add_arguments,
)  # fmt: skip
