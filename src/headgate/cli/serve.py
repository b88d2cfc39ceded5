"""`headgate serve`: start a hub."""

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

from headgate.cli.hub_api import SecretOption
from headgate.cli.parser import Commands, requires
from headgate.hub.settings import HubSettings, flag, variable


def add(commands: Commands) -> None:
    """Add the command, with an option for each setting of the hub."""
    parser = commands.add_parser(
        "serve",
        help="start a hub",
        description="Start a hub: agents connect over WebSocket and HTTP, exchange messages and get tasks, and a gate "
        "limits all of it.",
        epilog="Each option has an environment variable: HEADGATE_PORT for --port, and so on.",
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--config", metavar="FILE", help="policy file in TOML; its table [hub] may hold these options")
    for one in fields(HubSettings):
        if one.metadata["secret"]:
            elsewhere = "in the table [hub] of a file"
            parser.add_argument(flag(one.name), action=SecretOption, variable=variable(one.name), elsewhere=elsewhere)
        else:
            default = f" (default: {one.default})" if one.default else ""
            metavar = one.name.rpartition("_")[2].upper()
            switch = {"nargs": "?", "const": "true"} if isinstance(one.default, bool) else {}
            parser.add_argument(flag(one.name), metavar=metavar, help=one.metadata["about"] + default, **switch)


def _run(options: argparse.Namespace) -> int:
    with requires("server", "the hub"):
        from headgate.hub import logs, server
    chosen = options.config or os.environ.get("HEADGATE_CONFIG")
    config = Path(chosen) if chosen else None
    given = {name: value for name, value in vars(options).items() if value is not None}
    settings = HubSettings.load(given, config=config)
    logs.configure(settings)
    server.serve(settings, config, sys.stdout)
    return 0
