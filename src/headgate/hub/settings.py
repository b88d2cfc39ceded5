"""The settings of the hub: their defaults, descriptions and parsers.

A setting is given on the command line (`--port 9000`), in the environment (`HEADGATE_PORT=9000`), or in the table
`[hub]` of the configuration file (`port = 9000`). The first of these takes precedence.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_network
from math import inf
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from headgate.gate.policy import Policy, PolicyError, read_toml
from headgate.gate.settings_reader import unknown_key
from headgate.stores.schemes import URL_FORMS, scheme_of

SettingParser: TypeAlias = tuple[str, Callable[[str], Any]]
"""The expected form, and a function that parses it or raises ValueError."""

REGISTRATION: Final = ("open", "invitation", "closed")
LINKS: Final = ("admin", "viewer", "none")
LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
SHORTEST_TOKEN: Final = 16
_FLOAT: Final = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII)
A_TOKEN: Final = f"at least {SHORTEST_TOKEN} printable ASCII characters without spaces"


def _whole(low: int, high: int) -> SettingParser:
    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"\s*\d+\s*", text) else -1
        if not low <= number <= high:
            raise ValueError
        return number

    return f"a whole number from {low} to {high}", parse


def _seconds(low: float, high: float) -> SettingParser:
    def parse(text: str) -> float:
        number = float(text)
        if not low <= number <= high:
            raise ValueError
        return number

    return f"a number of seconds from {low:g} to {high:g}", parse


def _choice(*choices: str) -> SettingParser:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return f"one of {', '.join(choices)}", parse


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _networks(text: str) -> tuple[str, ...]:
    return tuple(str(ip_network(part)) for part in _parts(text))


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _url(text: str) -> str:
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or parts.fragment):
        raise ValueError
    return text


def _urls(text: str) -> tuple[str, ...]:
    urls = [_url(part) for part in _parts(text)]
    if any(" " in url or not url.isprintable() for url in urls):  # a comma is missing
        raise ValueError
    return tuple(dict.fromkeys(urls))


def usable_token(text: str) -> str:
    """A token that can be sent in a header and is too long to be guessed."""
    if len(text) < SHORTEST_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError
    return text


def _hosts(text: str) -> tuple[str, ...]:
    hosts = _parts(text.lower())
    if any(re.fullmatch(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", host, re.ASCII) is None for host in hosts):
        raise ValueError
    return tuple(dict.fromkeys(hosts))


def _relay_rate(text: str) -> str:
    number = text.strip().lower()
    if number != "off" and (_FLOAT.fullmatch(number) is None or not 0 < float(number) < inf):
        raise ValueError
    return number


def _relay_burst(text: str) -> str:
    number = text.strip()
    if re.fullmatch(r"\d{1,18}", number, re.ASCII) is None or int(number) == 0:
        raise ValueError
    return number


def _store_url(text: str) -> str:
    if text:
        scheme_of(text)
    return text


RELAY_RATE: Final[SettingParser] = ("messages per second, a number above 0 such as 1.0, or off", _relay_rate)
RELAY_BURST: Final[SettingParser] = ("a whole number of messages above 0 such as 10", _relay_burst)
_MANY: Final = _whole(1, 1_000_000)
_HOSTS: Final[SettingParser] = ("host names such as hub.example.org or *.example.org, separated by commas", _hosts)
_NETWORKS: Final[SettingParser] = ("addresses or networks such as 10.0.0.0/8, separated by commas", _networks)
_BOOLEAN: Final[SettingParser] = ("true or false", _boolean)
_TEXT: Final[SettingParser] = ("some text", str)
_PATH: Final[SettingParser] = ("a path", lambda text: Path(text).expanduser())
_URL: Final[SettingParser] = ("an http:// or https:// URL", _url)
_URLS: Final[SettingParser] = ("http:// or https:// URLs, without a fragment, separated by commas", _urls)
_STORE: Final[SettingParser] = (URL_FORMS, _store_url)
_TOKEN: Final[SettingParser] = (A_TOKEN, usable_token)


def _setting(default: Any, about: str, parser: SettingParser, *, secret: bool = False, shown: bool = True) -> Any:
    shown = shown and not secret
    about_it = {"about": about, "parser": parser, "secret": secret, "shown": shown}
    return field(default=default, metadata=about_it, repr=shown)


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """The settings of one hub."""

    host: str = _setting("127.0.0.1", "address to listen on", _TEXT)
    port: int = _setting(8080, "port to listen on; 0 for any free port", _whole(0, 65535))
    data: Path | None = _setting(Path("headgate-data"), "data directory", _PATH)
    store: str = _setting("", "redis:// URL of a Redis or Valkey server shared by several hubs", _STORE, shown=False)
    registration: str = _setting("open", "registration of agents: open, invitation or closed", _choice(*REGISTRATION))
    admin_token: str = _setting("", "the admin's token; by default created at the first start", _TOKEN, secret=True)
    admin_token_file: Path | None = _setting(None, "file with the admin's token", _PATH)
    viewer_token: str = _setting("", "token for read-only access to the dashboard", _TOKEN, secret=True)
    public_dashboard: bool = _setting(False, "read-only access to the dashboard without a token", _BOOLEAN)
    dashboard_link: str = _setting(
        "admin", "access level of the dashboard link printed at startup: admin, viewer or none", _choice(*LINKS)
    )
    webhooks: tuple[str, ...] = _setting((), "URLs to send alerts to, separated by commas", _URLS, shown=False)
    webhook_secret: str = _setting("", "secret key for signing webhook requests", _TOKEN, secret=True)
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "names of the hub beside localhost and IP addresses, separated by commas; * for any",
        _HOSTS,
    )
    trusted_proxies: tuple[str, ...] = _setting(
        (), "addresses or networks of proxies whose X-Forwarded-For is trusted, separated by commas", _NETWORKS
    )
    tls_certificate: Path | None = _setting(None, "file with the TLS certificate; enables TLS", _PATH)
    tls_key: Path | None = _setting(None, "file with the certificate's private key", _PATH)
    relay_rate_limit: str = _setting("1.0", "messages per second for each address on the relay, or off", RELAY_RATE)
    relay_rate_burst: str = _setting("10", "messages that each address may send at once on the relay", RELAY_BURST)
    identify_within: float = _setting(10.0, "seconds that a connection has to identify itself", _seconds(0.1, 3600))
    max_agents: int = _setting(10_000, "maximum registered agents; the admin can add more", _whole(1, 1_000_000_000))
    max_frame: int = _setting(65_536, "maximum size of a frame, envelope or body in bytes", _whole(1024, 16_777_216))
    max_connections: int = _setting(10_000, "maximum WebSocket connections in total", _MANY)
    max_connections_per_address: int = _setting(1_000, "maximum WebSocket connections from one address", _MANY)
    max_connections_per_agent: int = _setting(
        20, "maximum WebSocket connections of one agent, and as many to the relay", _MANY
    )
    max_http_connections: int = _setting(1_000, "maximum HTTP connections in total, beside the WebSockets", _MANY)
    max_dashboards: int = _setting(200, "maximum open dashboards", _whole(1, 10_000))
    max_waiting: int = _setting(256, "maximum frames queued for a slow reader", _whole(1, 100_000))
    max_sessions: int = _setting(1_000, "maximum open sessions per agent", _MANY)
    max_signals: int = _setting(
        10_000, "newest signals kept per agent; outside its sessions, as many in any case", _whole(1, 10_000_000)
    )
    max_stored_signals: int = _setting(
        1_000_000, "maximum signals kept in total; then the oldest of the agent that has most", _whole(1, 1_000_000_000)
    )
    max_mail: int = _setting(1_000, "maximum messages per mailbox", _MANY)
    max_mail_per_sender: int = _setting(100, "maximum messages of one sender per mailbox", _MANY)
    max_channels_per_agent: int = _setting(20, "maximum chat channels created by one agent", _MANY)
    max_counters: int = _setting(10_000, "maximum keys of the decision service that one agent counts at a time", _MANY)
    max_channels: int = _setting(1_000, "maximum chat channels", _MANY)
    max_history: int = _setting(1_000, "newest messages kept per chat channel", _MANY)
    max_tasks: int = _setting(10_000, "maximum queued tasks, and finished tasks kept", _whole(1, 10_000_000))
    max_tasks_per_agent: int = _setting(1_000, "maximum unfinished tasks created by one agent", _whole(1, 10_000_000))
    accept_within: float = _setting(30.0, "seconds that an agent has to accept a task", _seconds(0.1, 86_400))
    shutdown_within: float = _setting(10.0, "seconds to finish work in progress at shutdown", _seconds(0, 3600))
    log_format: str = _setting("text", "log format: text or json", _choice(*LOG_FORMATS))
    log_level: str = _setting("info", "lowest level to log: debug, info, warning or error", _choice(*LOG_LEVELS))
    otel_endpoint: str = _setting("", "URL of an OpenTelemetry collector to send metrics to", _URL, shown=False)

    @classmethod
    def load(
        cls,
        given: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        config: Path | None = None,
    ) -> "HubSettings":
        """The settings from the command line, the environment, the configuration file and the defaults, in this order.

        A `PolicyError` lists all mistakes at once, with those of the policy in the file.
        """
        if config is None:
            return cls.from_content("", {}, given, environment)
        return read_content(str(config), read_toml(config), given, environment)[1]

    @classmethod
    def from_content(
        cls,
        source: str,
        content: Mapping[str, Any],
        given: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "HubSettings":
        """The same, from the content of a configuration file. `source` is the file's name in errors."""
        variables = os.environ if environment is None else environment
        table = content.get("hub", {})  # the policy checks the rest
        if not isinstance(table, dict):
            raise PolicyError(source, [f"hub: expected a table, got {table!r}"])
        mistakes: list[str] = []
        values: dict[str, Any] = {}
        for one in fields(cls):
            for values_of, name, place in (
                (given or {}, one.name, flag(one.name)),
                (variables, variable(one.name), variable(one.name)),
                (table, one.name, f"hub.{one.name}"),
            ):
                if name in values_of:
                    _read(one.metadata, values_of[name], place, values, one.name, mistakes)
                    break
        known = [one.name for one in fields(cls)]
        mistakes += [unknown_key("hub", name, known) for name in table if name not in known]
        if mistakes:
            raise PolicyError("settings of the hub", mistakes)
        return cls(**values)


def read_content(
    source: str,
    content: Mapping[str, Any],
    given: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Policy, HubSettings]:
    """The policy and the settings of a configuration file; a `PolicyError` lists the mistakes of both."""
    policy: Policy | PolicyError
    try:
        policy = Policy.from_settings(source, content)
    except PolicyError as error:
        policy = error
    try:
        settings = HubSettings.from_content(source, content, given, environment)
    except PolicyError as error:
        if isinstance(policy, PolicyError):
            raise PolicyError(f"{source} and settings of the hub", [*policy.mistakes, *error.mistakes]) from None
        raise
    if isinstance(policy, PolicyError):
        raise policy
    return policy, settings


def flag(name: str) -> str:
    """The option of a setting on the command line."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return "HEADGATE_" + name.upper()


def _read(
    about: Mapping[str, Any], given: Any, place: str, values: dict[str, Any], name: str, mistakes: list[str]
) -> None:
    expected, parse = about["parser"]
    shown = "an int of thousands of digits"
    try:
        text = ",".join(map(str, given)) if isinstance(given, list) else str(given)  # too many digits: ValueError
        shown = repr(text)
        values[name] = parse(text)
    except (ValueError, KeyError):
        mistakes.append(f"{place}: expected {expected}" + (f", got {shown}" if about["shown"] else ""))
