"""`headgate log-level`: what the hub logs."""

from headgate.cli.answers import shown
from headgate.cli.hub_commands import add_change_command
from headgate.cli.parser import Commands
from headgate.hub.settings import LOG_LEVELS


def add(commands: Commands) -> None:
    parser = add_change_command(
        commands,
        "log-level",
        lambda hub, options: hub.set_log_level(options.level),
        lambda _, answer: f"the hub logs from level {shown(answer['level'])} on, until it stops",
        "set the log level of the hub",
        "Set the lowest level that the hub logs, until it stops. The setting log_level holds again after a restart.",
        "headgate log-level debug",
    )
    parser.add_argument("level", choices=LOG_LEVELS, metavar="LEVEL", help=f"one of {', '.join(LOG_LEVELS)}")
