"""`headgate channels`: chat channels."""

import argparse
from typing import Any

from headgate.cli.answers import local_time, shown, whole
from headgate.cli.hub_commands import ListCommand, Rows, add_change_command
from headgate.cli.parser import Commands
from headgate.cli.terminal import Column
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = _LIST.add_group(
        commands,
        "channels",
        "list or delete chat channels",
        "List the chat channels, by name. With delete, delete one with its messages.",
        "headgate channels",
        "headgate channels delete news",
    )
    verb = add_change_command(
        verbs,
        "delete",
        lambda hub, options: hub.delete_chat_channel(options.name),
        lambda options, _: f"chat channel {printable(options.name)} is deleted, with its messages",
        "delete a chat channel with its messages",
        "Delete a chat channel with its messages.",
        "headgate channels delete news",
    )
    verb.add_argument("name", type=_channel_name, metavar="NAME", help="name of the chat channel")


def _channel_name(text: str) -> str:
    if text in ("", ".", "..") or len(text) > 64 or not text.isprintable():
        raise argparse.ArgumentTypeError(f"expected the name of a chat channel, got {text[:100]!r}")
    return text


def _rows(answer: dict[str, Any]) -> Rows:
    return [
        [
            shown(one["name"]),
            shown(one["creator"]) or "admin",
            str(whole(one["subscribers"])),
            local_time(one["created_at"]),
            shown(one["about"]),
        ]
        for one in answer["channels"]
    ]


_LIST = ListCommand(
    lambda hub, _: {"channels": list(hub.chat_channels())},
    [Column("channel"), Column("creator"), Column("subscribers", right=True), Column("created"),
     Column("about")],
    _rows,
    "no chat channels",
)  # fmt: skip
