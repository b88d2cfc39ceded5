"""`headgate serve`: start a hub."""

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Final

from headgate.cli.hub_options import SecretOption
from headgate.cli.parser import Commands, requires
from headgate.cli.terminal import ClosedOutput
from headgate.errors import HeadgateError
from headgate.hub.settings import HubSettings, flag, variable

_METAVARS: Final = {
    "data": "DIRECTORY",
    "store": "URL",
    "registration": "WHO",
    "public_dashboard": "BOOLEAN",
    "webhooks": "URLS",
    "otel_endpoint": "URL",
}  # where the last word of the name says less


def add(commands: Commands) -> None:
    """Add the command, with an option for each setting of the hub."""
    parser = commands.add_parser(
        "serve",
        help="start a hub",
        description="Start a hub. Agents connect to it over WebSocket and HTTP, exchange messages and receive tasks; a "
        "gate limits all of this.",
        epilog="Each option can also be set in the environment: --port by HEADGATE_PORT, and so on.",
    )
    parser.set_defaults(run=_run, parser=parser)
    parser.add_argument("--config", metavar="FILE", help="policy file in TOML; its table [hub] can set these options")
    for one in fields(HubSettings):
        if one.metadata["secret"]:
            elsewhere = "in the table [hub] of a file"
            parser.add_argument(flag(one.name), action=SecretOption, variable=variable(one.name), elsewhere=elsewhere)
        else:
            default = f" (default: {one.default})" if one.default else ""
            metavar = _metavar(one.name)
            switch = {"nargs": "?", "const": "true"} if isinstance(one.default, bool) else {}
            parser.add_argument(flag(one.name), metavar=metavar, help=one.metadata["about"] + default, **switch)


def _metavar(name: str) -> str:
    """The kind of value of a setting."""
    if name.startswith("max_"):
        return "N"
    if name.startswith("tls_"):
        return "FILE"
    return _METAVARS.get(name, "SECONDS" if name.endswith("_within") else name.rpartition("_")[2].upper())


def _run(options: argparse.Namespace) -> int:
    if os.name != "posix":
        raise HeadgateError("the hub needs a POSIX system, such as Linux or macOS; the library and the clients don't")
    with requires("server", "the hub"):
        from headgate.hub import logs, server
    chosen = options.config or os.environ.get("HEADGATE_CONFIG")
    config = Path(chosen) if chosen else None
    given = {name: value for name, value in vars(options).items() if value is not None}
    settings = HubSettings.load(given, config=config)
    logs.configure(settings)
    with ExitStack() as stack:
        out = sys.stdout
        if isinstance(out, ClosedOutput):  # a hub runs without one, too
            out = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        server.serve(settings, config, out, given)
    return 0
