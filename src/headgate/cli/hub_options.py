"""The options of commands that call a hub: its address and the token."""

import argparse
import os
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeAlias
from urllib.parse import unquote

from headgate.cli.hub_api import HUB_VARIABLE, TIMEOUT, HubApi
from headgate.client.url import is_hub_url
from headgate.errors import HeadgateError
from headgate.hub.agents.names import DOTS, check_path_name
from headgate.hub.settings import A_TOKEN, usable_token, variable

DEFAULT_URL: Final = "http://127.0.0.1:8080"
ADMIN_VARIABLE: Final = variable("admin_token")
ADMIN_FILE_VARIABLE: Final = variable("admin_token_file")
VIEWER_VARIABLE: Final = variable("viewer_token")

_MAX_TOKEN_FILE: Final = 65_536  # characters


AgentName: TypeAlias = Callable[[str], str]


def add_hub_options(parser: argparse.ArgumentParser, *, viewer: bool = False, agent: AgentName | None = None) -> None:
    """Add the options for a hub's address and token; with `agent`, which checks a name, the argument AGENT too.

    They have no defaults: those of a subcommand would overwrite options before the subcommand.
    """
    if agent is not None:
        parser.add_argument("agent", type=agent, metavar="AGENT", help="name of the agent")
    variables = f"{ADMIN_VARIABLE} or {VIEWER_VARIABLE}" if viewer else ADMIN_VARIABLE
    group = parser.add_argument_group("hub")
    absent = argparse.SUPPRESS
    address = f"address of the hub (default: {HUB_VARIABLE} or {DEFAULT_URL})"
    group.add_argument("--hub", type=_url, default=absent, metavar="URL", help=address)
    token_file = f"file with the token (default: the token in {variables})"
    group.add_argument("--token-file", default=absent, metavar="FILE", help=token_file)
    for option in ("--token", "--admin-token", "--viewer-token"):
        secret = VIEWER_VARIABLE if option == "--viewer-token" else ADMIN_VARIABLE
        group.add_argument(option, action=SecretOption, variable=secret)


class SecretOption(argparse.Action):
    """Refuses a secret on the command line, which every user of the machine can read."""

    def __init__(self, *, variable: str, elsewhere: str = "in the file of --token-file", **rest: Any) -> None:
        super().__init__(**{**rest, "help": argparse.SUPPRESS})
        self._where = f"in {variable} or {elsewhere}"

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(f"{self.option_strings[0]}: expected {self._where}, not on the command line, where others see it")


def hub_from(options: argparse.Namespace, *, viewer: bool = False, timeout: float = TIMEOUT) -> HubApi:
    """The hub that options and environment name, with its token."""
    url = getattr(options, "hub", None)
    if url is None:
        given = os.environ.get(HUB_VARIABLE) or DEFAULT_URL
        try:
            url = _url(given)
        except argparse.ArgumentTypeError as error:
            raise HeadgateError(f"{HUB_VARIABLE}: {error}") from None
    token, origin = _token(getattr(options, "token_file", None), viewer)
    return HubApi(url, token, origin, timeout)


def _token(file: str | None, viewer: bool) -> tuple[str, str]:
    """The token and its origin."""
    names = [ADMIN_VARIABLE, VIEWER_VARIABLE] if viewer else [ADMIN_VARIABLE]
    found = [name for name in names if os.environ.get(name)]
    token = ""
    if file is None and not found:
        file = os.environ.get(ADMIN_FILE_VARIABLE)
    if file is not None:
        origin = f"the file {file}"
        try:
            with open(os.path.expanduser(file), encoding="utf-8") as stream:
                token = stream.read(_MAX_TOKEN_FILE).strip()
        except OSError as error:
            raise HeadgateError(f"{file}: expected a file with a token, got: {error.strerror}") from error
        except UnicodeDecodeError:
            raise HeadgateError(f"{file}: expected a file with a token, got: binary data") from None
    elif found:
        origin, token = found[0], os.environ[found[0]].strip()
    else:
        raise HeadgateError(f"the hub requires a token: set {' or '.join(names)}, or name a file with --token-file")
    try:
        return usable_token(token), origin
    except ValueError:
        raise HeadgateError(f"{origin}: expected {A_TOKEN}") from None


def _url(text: str) -> str:
    """The address of a hub, without a slash at the end. It may have a path."""
    if not is_hub_url(text, ("http", "https")):
        raise argparse.ArgumentTypeError(f"expected a URL such as {DEFAULT_URL}, got {text!r}")
    return text.rstrip("/")


def agent_name(text: str) -> str:
    """The name of an agent, for argparse. One that would be another path of the hub is refused."""
    return _checked(text, beside_routes=True)


def existing_agent(text: str) -> str:
    """The name of an agent, for argparse, where no path of the hub stands beside it: that of any agent there is."""
    return _checked(text, beside_routes=False)


def path_part(text: str) -> str:
    """A text that is a part of the hub's paths, for argparse. One that would be another path of the hub is refused."""
    if not text or not DOTS.isdisjoint(re.split(r"[/\\]", unquote(text))):
        expected = f"a text without the parts {' and '.join(sorted(DOTS))}, which lead to another path"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!a}")
    return text


def _checked(text: str, *, beside_routes: bool) -> str:
    try:
        return check_path_name(text, beside_routes=beside_routes)
    except HeadgateError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None
