"""Every setting of the hub: its default, what it means, and how it is read.

A setting is given on the command line (`--port 9000`), in the environment (`HEADGATE_PORT=9000`), or in the table
`[hub]` of the configuration file (`port = 9000`); the first of these that says something holds.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from headgate.gate.policy import PolicyError, read_toml

Reading: TypeAlias = tuple[str, Callable[[str], Any]]
"""What is expected, and a function that reads it or raises ValueError."""

REGISTRATION: Final = ("open", "invitation", "closed")
LINKS: Final = ("admin", "viewer", "none")
LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
SHORTEST_TOKEN: Final = 16
A_TOKEN: Final = f"at least {SHORTEST_TOKEN} printable ASCII characters without spaces"


def _whole(low: int, high: int) -> Reading:
    def read(text: str) -> int:
        number = int(text) if re.fullmatch(r"\s*\d+\s*", text) else -1
        if not low <= number <= high:
            raise ValueError
        return number

    return f"a whole number from {low} to {high}", read


def _seconds(low: float, high: float) -> Reading:
    def read(text: str) -> float:
        number = float(text)
        if not low <= number <= high:
            raise ValueError
        return number

    return f"a number of seconds from {low:g} to {high:g}", read


def _choice(*choices: str) -> Reading:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return f"one of {', '.join(choices)}", read


def _networks(text: str) -> tuple[str, ...]:
    return tuple(str(ip_network(part.strip())) for part in text.split(",") if part.strip())


def _yes_or_no(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _url(text: str) -> str:
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or parts.fragment):
        raise ValueError
    return text


def _urls(text: str) -> tuple[str, ...]:
    urls = [_url(part.strip()) for part in text.split(",") if part.strip()]
    if any(" " in url or not url.isprintable() for url in urls):  # somebody has left out a comma
        raise ValueError
    return tuple(dict.fromkeys(urls))


def usable_token(text: str) -> str:
    """A token that can be sent in a header, and isn't guessed."""
    if len(text) < SHORTEST_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError
    return text


_NETWORKS: Final[Reading] = ("addresses or networks such as 10.0.0.0/8, separated by commas", _networks)
_YES_OR_NO: Final[Reading] = ("true or false", _yes_or_no)
_TEXT: Final[Reading] = ("some text", str)
_PATH: Final[Reading] = ("a path", lambda text: Path(text).expanduser())
_URL: Final[Reading] = ("an http:// or https:// URL", _url)
_URLS: Final[Reading] = ("http:// or https:// URLs, without a fragment, separated by commas", _urls)
_TOKEN: Final[Reading] = (A_TOKEN, usable_token)


def _setting(default: Any, about: str, reading: Reading, *, secret: bool = False, shown: bool = True) -> Any:
    shown = shown and not secret
    about_it = {"about": about, "reading": reading, "secret": secret, "shown": shown}
    return field(default=default, metadata=about_it, repr=shown)


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """The settings of one hub."""

    host: str = _setting("127.0.0.1", "address to listen on", _TEXT)
    port: int = _setting(8080, "port to listen on; 0 for any that is free", _whole(0, 65535))
    data: Path | None = _setting(Path("headgate-data"), "directory in which the hub remembers things", _PATH)
    store: str = _setting("", "redis:// URL of a Redis or Valkey server that several hubs share", _TEXT, shown=False)
    registration: str = _setting("open", "who may register an agent", _choice(*REGISTRATION))
    admin_token: str = _setting("", "the admin's token; made at the first start if none is given", _TOKEN, secret=True)
    admin_token_file: Path | None = _setting(None, "file that holds the admin's token", _PATH)
    viewer_token: str = _setting("", "a token that may look at the dashboard and nothing else", _TOKEN, secret=True)
    public_dashboard: bool = _setting(False, "let anybody look at the dashboard, without a token", _YES_OR_NO)
    dashboard_link: str = _setting(
        "admin", "what the link to the dashboard lets do that is shown at the start", _choice(*LINKS)
    )
    webhooks: tuple[str, ...] = _setting((), "URLs that alerts are sent to, separated by commas", _URLS, shown=False)
    webhook_secret: str = _setting("", "what alerts are signed with when they are sent", _TOKEN, secret=True)
    trusted_proxies: tuple[str, ...] = _setting(
        (), "addresses or networks of proxies that may say who connects, separated by commas", _NETWORKS
    )
    tls_certificate: Path | None = _setting(None, "file with the certificate; serves TLS", _PATH)
    tls_key: Path | None = _setting(None, "file with the key of the certificate", _PATH)
    relay_rate_limit: str = _setting("1.0", "messages per second of each address on the relay, or off", _TEXT)
    relay_rate_burst: str = _setting("10", "messages that an address may send at once on the relay", _TEXT)
    identify_within: float = _setting(10.0, "seconds in which a connection has to identify", _seconds(0.1, 3600))
    max_frame: int = _setting(65_536, "bytes of the largest frame, envelope or body", _whole(1024, 16_777_216))
    max_connections: int = _setting(10_000, "connections in all", _whole(1, 1_000_000))
    max_connections_per_address: int = _setting(100, "connections of one address", _whole(1, 1_000_000))
    max_dashboards: int = _setting(200, "dashboards that are open at once", _whole(1, 10_000))
    max_waiting: int = _setting(256, "frames that wait for a slow reader", _whole(1, 100_000))
    max_sessions: int = _setting(1_000, "open sessions of one agent", _whole(1, 1_000_000))
    max_signals: int = _setting(10_000, "signals that are kept of one agent, the newest", _whole(1, 10_000_000))
    max_mail: int = _setting(1_000, "messages that wait in one mailbox", _whole(1, 1_000_000))
    max_channels: int = _setting(1_000, "channels", _whole(1, 1_000_000))
    max_history: int = _setting(1_000, "messages that are kept of one channel, the newest", _whole(1, 1_000_000))
    max_tasks: int = _setting(10_000, "tasks that wait, and finished ones that are kept", _whole(1, 10_000_000))
    accept_within: float = _setting(30.0, "seconds in which an agent has to accept a task", _seconds(0.1, 86_400))
    shutdown_within: float = _setting(10.0, "seconds for what is under way when the hub stops", _seconds(0, 3600))
    log_format: str = _setting("text", "how to log", _choice(*LOG_FORMATS))
    log_level: str = _setting("info", "how much to log", _choice(*LOG_LEVELS))
    otel_endpoint: str = _setting("", "URL of an OpenTelemetry collector that gets the metrics", _URL, shown=False)

    @classmethod
    def load(
        cls,
        given: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        config: Path | None = None,
    ) -> "HubSettings":
        """What the command line gives, else the environment, else the configuration file, else the defaults.

        All mistakes are told at once, by a `PolicyError`.
        """
        surroundings = os.environ if environment is None else environment
        table = {} if config is None else _table(config)
        mistakes: list[str] = []
        values: dict[str, Any] = {}
        for one in fields(cls):
            for source, name, place in (
                (given or {}, one.name, flag(one.name)),
                (surroundings, variable(one.name), variable(one.name)),
                (table, one.name, f"hub.{one.name}"),
            ):
                if name in source:
                    _read(one.metadata, source[name], place, values, one.name, mistakes)
                    break
        known = [one.name for one in fields(cls)]
        mistakes += [f"hub.{name}: expected one of {', '.join(known)}" for name in table if name not in known]
        if mistakes:
            raise PolicyError("settings of the hub", mistakes)
        return cls(**values)


def flag(name: str) -> str:
    """How a setting is called on the command line."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """How a setting is called in the environment."""
    return "HEADGATE_" + name.upper()


def _read(
    about: Mapping[str, Any], given: Any, place: str, values: dict[str, Any], name: str, mistakes: list[str]
) -> None:
    expected, read = about["reading"]
    text = ",".join(map(str, given)) if isinstance(given, list) else str(given)
    try:
        values[name] = read(text)
    except (ValueError, KeyError):
        mistakes.append(f"{place}: expected {expected}" + (f", got {text!r}" if about["shown"] else ""))


def _table(config: Path) -> Mapping[str, Any]:
    """The table `[hub]` of a configuration file; what else is in it is the policy's to judge."""
    found = read_toml(config).get("hub", {})
    if not isinstance(found, dict):
        raise PolicyError(str(config), [f"hub: expected a table, got {found!r}"])
    return found
