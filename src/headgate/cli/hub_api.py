"""A hub, asked over HTTP with the standard library alone."""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import quote, urlsplit

from headgate.cli.terminal import harmless, patience
from headgate.errors import HeadgateError
from headgate.gate.policy import check_agent
from headgate.hub.settings import A_TOKEN, usable_token, variable

if TYPE_CHECKING:
    from urllib.error import HTTPError

DEFAULT: Final = "http://127.0.0.1:8080"
HUB: Final = "HEADGATE_HUB"
ADMIN: Final = variable("admin_token")
ADMIN_FILE: Final = variable("admin_token_file")
VIEWER: Final = variable("viewer_token")

_LARGEST: Final = 64 * 1024 * 1024  # bytes of an answer
_WITHIN: Final = 10.0  # seconds
_PAGE: Final = 100  # agents that are asked for at a time

T = TypeVar("T")


class HubError(HeadgateError):
    """A hub that couldn't be asked (`status` is 0), or that refused."""

    def __init__(self, status: int, text: str) -> None:
        self.status: Final = status
        super().__init__(text)


@dataclass(frozen=True)
class Card:
    """How an agent stands."""

    name: str
    connected: bool
    used: float | None
    """The share of the bucket nearest to its limit that is used; None for an agent without limits."""
    left: str
    bucket: str
    violations: int
    last_hour: int
    wait_ms: int
    exempt: bool
    override: bool

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> "Card":
        usage = told["usage"]
        return cls(
            name=str(told["agent_id"]),
            connected=bool(told["connected"]),
            used=None if usage is None else float(usage["used"]),
            left="" if usage is None else f"{int(usage['remaining'])}/{int(usage['capacity'])}",
            bucket="" if usage is None else f"{usage['channel']} {usage['tier']}",
            violations=int(told["violations"]),
            last_hour=int(told["violations_last_hour"]),
            wait_ms=int(told["wait_left_ms"]),
            exempt=bool(told["exempt"]),
            override=bool(told["override"]),
        )


@dataclass(frozen=True)
class Fleet:
    """How all agents stand."""

    cards: list[Card]
    violations: int
    """In the last hour."""
    worst: list[tuple[str, int]]
    exempt: int
    rate: float
    """Checks a second."""
    denied: float
    """The share of the last minute's checks."""
    store: str

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> "Fleet":
        summary = told["summary"]
        return cls(
            cards=[Card.read(one) for one in told["agents"]],
            violations=int(summary["violations_last_hour"]),
            worst=[(str(one["agent_id"]), int(one["violations"])) for one in summary["worst_offenders"]],
            exempt=int(summary["exempt"]),
            rate=float(summary["checks_per_second"]),
            denied=float(summary["denied_share"]),
            store=str(summary["store"]),
        )


class Hub:
    """A hub, and a token for it."""

    def __init__(self, url: str, token: str, origin: str, within: float = _WITHIN) -> None:
        from urllib.request import HTTPRedirectHandler, ProxyHandler, build_opener

        class Stay(HTTPRedirectHandler):
            """Follows nobody elsewhere: the token would go along."""

            def redirect_request(self, *_: object) -> None:
                return None

        self.url: Final = url
        self._token, self._origin, self._within = token, origin, within
        no_proxy = [ProxyHandler({})] if _is_loopback(urlsplit(url).hostname or "") else []
        self._opener = build_opener(Stay(), *no_proxy)

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """What the hub answers; a `HubError` if it doesn't, or refuses."""
        from http.client import HTTPException
        from urllib.error import HTTPError, URLError
        from urllib.request import Request

        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = Request(self.url + path, data, headers, method=method)  # noqa: S310 - http or https, see _url
        try:
            with patience(f"waiting for {self.url}"), self._opener.open(request, timeout=self._within) as answer:
                text = answer.read(_LARGEST)
        except HTTPError as error:
            with error:
                self._refused(error)
        except URLError as error:
            self._away(error.reason if isinstance(error.reason, Exception) else error)
        except (OSError, HTTPException) as error:
            self._away(error)
        return self.read(lambda: _object(text))

    def read(self, how: Callable[[], T]) -> T:
        """Read an answer; a `HubError` if no hub of ours says such things."""
        try:
            return how()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise HubError(
                0, f"{self.url}: expected the answer of a headgate hub, got something else; is that its address?"
            ) from error

    def fleet(self) -> Fleet:
        """How all agents stand."""
        told = self.ask("GET", "/api/dashboard/state?limit=500")
        return self.read(lambda: Fleet.read(told))

    def registered(self, after: str = "") -> list[dict[str, Any]]:
        """Agents that are registered, by name, so many after one; none after the last."""
        told = self.ask("GET", f"/api/admin/agents?limit={_PAGE}&after={quote(after, safe='')}")
        return self.read(lambda: [{**one, "agent_id": str(one["agent_id"])} for one in told["agents"]])

    def _refused(self, error: "HTTPError") -> NoReturn:
        status = error.code
        if 300 <= status < 400:
            there = harmless(str(error.headers.get("Location", "elsewhere")))
            raise HubError(status, f"{self.url}: expected an answer, got a redirect to {there}; give that by --hub")
        try:
            told = _object(error.read(_LARGEST))
        except (ValueError, TypeError, OSError):
            told = {}
        said = harmless(str(told.get("detail", "")))
        if status == 401:
            said = f"it doesn't know the token in {self._origin}"
        elif status == 403:
            said = f"{said}; the one in {self._origin} isn't"
        elif not said:
            said = f"expected the answer of a headgate hub, got HTTP status {status}; is that its address?"
        raise HubError(status, f"{self.url}: {said}")

    def _away(self, error: Exception) -> NoReturn:
        import ssl

        if isinstance(error, ssl.SSLCertVerificationError):
            raise HubError(
                0,
                f"{self.url}: its certificate isn't trusted: {error.verify_message}; "
                "SSL_CERT_FILE names a file with the authorities that are",
            ) from error
        if isinstance(error, TimeoutError):
            said = f"no answer within {self._within:g} s"
        else:
            said = harmless(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        raise HubError(
            0, f"{self.url}: expected a hub that answers, got: {said}; is it running? (--hub, {HUB})"
        ) from error


def of_agent(path: str, agent: str) -> str:
    """The path of something of an agent."""
    return f"{path}/{quote(agent, safe='')}"


def add_options(parser: argparse.ArgumentParser, *, viewer: bool = False) -> None:
    """The options that say which hub to ask, and where its token is.

    None has a default, so that one given before a subcommand isn't overwritten by one that wasn't given after it.
    """
    variables = f"{ADMIN} or {VIEWER}" if viewer else ADMIN
    group = parser.add_argument_group("the hub")
    nothing = argparse.SUPPRESS
    group.add_argument("--hub", type=_url, default=nothing, metavar="URL", help=f"where it is ({HUB}; else {DEFAULT})")
    group.add_argument(
        "--token-file", default=nothing, metavar="FILE", help=f"a file with its token; without, {variables} holds it"
    )
    for option in ("--token", "--admin-token", "--viewer-token"):
        group.add_argument(option, action=Secret, variable=VIEWER if option == "--viewer-token" else ADMIN)


class Secret(argparse.Action):
    """An option that isn't taken: on the command line everybody on the machine would see it."""

    def __init__(self, *, variable: str, otherwise: str = "in the file that --token-file names", **rest: Any) -> None:
        super().__init__(**{**rest, "help": argparse.SUPPRESS})
        self._where = f"the environment, as {variable}, or {otherwise}"

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(f"{self.option_strings[0]}: expected in {self._where}, where not everybody sees it")


def hub_of(options: argparse.Namespace, *, viewer: bool = False, within: float = _WITHIN) -> Hub:
    """The hub that options and environment name, with its token."""
    url = getattr(options, "hub", None)
    if url is None:
        given = os.environ.get(HUB) or DEFAULT
        try:
            url = _url(given)
        except argparse.ArgumentTypeError as error:
            raise HeadgateError(f"{HUB}: {error}") from None
    token, origin = _token(getattr(options, "token_file", None), viewer)
    return Hub(url, token, origin, within)


def _token(file: str | None, viewer: bool) -> tuple[str, str]:
    """The token, and where it was found."""
    names = [ADMIN, VIEWER] if viewer else [ADMIN]
    found = [name for name in names if os.environ.get(name)]
    token = ""
    if file is None and not found:
        file = os.environ.get(ADMIN_FILE)
    if file is not None:
        origin = f"the file {file}"
        try:
            token = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except OSError as error:
            raise HeadgateError(f"{file}: expected a file with a token, got: {error.strerror}") from error
        except UnicodeDecodeError:
            raise HeadgateError(f"{file}: expected a file with a token, got: no text") from None
    elif found:
        origin, token = found[0], os.environ[found[0]].strip()
    else:
        raise HeadgateError(f"the hub wants a token: set {' or '.join(names)}, or name a file with it by --token-file")
    try:
        return usable_token(token), origin
    except ValueError:
        raise HeadgateError(f"{origin}: expected {A_TOKEN}") from None


def _url(text: str) -> str:
    """The address of a hub, without a slash at the end. It may stand below a path."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
        good = good and text.isascii() and text.isprintable() and " " not in text
        good = good and not (parts.query or parts.fragment or parts.username or parts.password)
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"expected a URL such as {DEFAULT}, got {text!r}")
    return text.rstrip("/")


def agent_name(text: str) -> str:
    """An agent's name, for argparse."""
    try:
        return check_agent(text)
    except HeadgateError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _object(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError
    return found
