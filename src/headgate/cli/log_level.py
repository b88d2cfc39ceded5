"""`headgate log-level`: what the hub logs."""

import argparse

from headgate.cli.answers import shown
from headgate.cli.hub_options import add_hub_options, hub_from
from headgate.cli.parser import Commands, add_command
from headgate.cli.terminal import print_json
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
    if options.json:
        print_json(answer)
    else:
        print(hub.parse(lambda: f"the hub logs from level {shown(answer['level'])} on, until it stops"))
    return 0
