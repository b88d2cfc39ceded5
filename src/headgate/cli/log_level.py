"""`headgate log-level`: what the hub logs."""

import argparse

from headgate.cli.answers import shown
from headgate.cli.hub_commands import print_answer
from headgate.cli.hub_options import add_hub_options, hub_from
from headgate.cli.parser import Commands, add_command
from headgate.hub.settings import LOG_LEVELS


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "log-level",
        _run,
        "set the log level of the hub",
        "Set the lowest level that the hub logs, until it stops. The setting log_level holds again after a restart.",
        "headgate log-level debug",
        json=True,
    )
    parser.add_argument("level", choices=LOG_LEVELS, metavar="LEVEL", help=f"one of {', '.join(LOG_LEVELS)}")
    add_hub_options(parser)


def _run(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.set_log_level(options.level)
    text = "the hub logs from level {} on, until it stops"
    return print_answer(options, hub, answer, lambda: text.format(shown(answer["level"])))
