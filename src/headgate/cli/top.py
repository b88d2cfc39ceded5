"""`headgate top`: a live view of a hub's agents. The view itself is in `top_app`."""

import argparse
import sys

from headgate.cli.hub_api import HubError
from headgate.cli.hub_options import add_hub_options, hub_from
from headgate.cli.parser import Commands, add_command, requires
from headgate.cli.terminal import is_interactive
from headgate.errors import HeadgateError


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "top",
        _run,
        "watch agents live in the terminal",
        "Watch the agents of a hub live: bucket usage, violations and waits. Keys sort and filter, exempt an agent and "
        "reset its violations; ? lists them. Requires pip install '.[cli]' in a checkout.",
        "headgate top",
        "headgate top --hub https://hub.example.org",
    )
    add_hub_options(parser, viewer=True)


def _run(options: argparse.Namespace) -> int:
    with requires("cli", "top"):
        from headgate.cli import top_app
    if not (sys.stdin.isatty() and is_interactive(sys.stdout)):
        raise HeadgateError("top: expected an interactive terminal; headgate agents prints the same as lines")
    hub = hub_from(options, viewer=True, timeout=5.0)
    try:
        hub.status()
    except HubError as error:
        if error.status:  # it refuses; a hub that is away may come back
            raise
    return top_app.TopApp(hub).run() or 0
