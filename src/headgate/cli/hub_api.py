"""Client of a hub's HTTP API, built on the standard library alone."""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import quote

from headgate.cli.parser import Commands, add_command
from headgate.cli.terminal import print_error, print_json, waiting_for
from headgate.client.url import is_hub_url, is_loopback
from headgate.errors import HeadgateError, printable
from headgate.gate.policy import MAX_AGENT
from headgate.hub.agents.names import check_path_name
from headgate.hub.settings import A_TOKEN, usable_token, variable

if TYPE_CHECKING:
    from urllib.error import HTTPError

DEFAULT_URL: Final = "http://127.0.0.1:8080"
HUB_VARIABLE: Final = "HEADGATE_HUB"
ADMIN_VARIABLE: Final = variable("admin_token")
ADMIN_FILE_VARIABLE: Final = variable("admin_token_file")
VIEWER_VARIABLE: Final = variable("viewer_token")

_MAX_ANSWER: Final = 64 * 1024 * 1024  # bytes
_MAX_DETAIL: Final = 1000  # characters of an error that are shown
_MAX_DEPTH: Final = 32  # of an answer's objects and arrays
_MAX_NUMBER: Final = 10**30  # in an answer
_TIMEOUT: Final = 10.0  # seconds for a request and its answer
_PAGE: Final = 100  # agents per request
_MAX_TOKEN_FILE: Final = 65_536  # characters

_AGENTS: Final = "/api/admin/agents"
_LIMITS: Final = "/api/admin/rate-limits"
_EXEMPT: Final = f"{_LIMITS}/whitelist"
_VIOLATIONS: Final = "/api/admin/violations"
_STORE: Final = "/api/admin/store"

T = TypeVar("T")


class HubError(HeadgateError):
    """A hub didn't answer (`status` is 0), or refused a request."""

    def __init__(self, status: int, text: str) -> None:
        self.status: Final = status
        super().__init__(text)


@dataclass(frozen=True)
class AgentSummary:
    """An agent's usage, violations and marks."""

    name: str
    connected: bool
    used: float | None
    """The used share of the bucket nearest to its limit; None without limits."""
    left: str
    bucket: str
    violations: int
    last_hour: int
    wait_ms: int
    exempt: bool
    override: bool
    revoked: bool
    blocked: bool

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "AgentSummary":
        usage = data["usage"]
        return cls(
            name=str(data["agent_id"]),
            connected=bool(data["connected"]),
            used=None if usage is None else _number(usage["used"]),
            left="" if usage is None else f"{whole(usage['remaining'])}/{whole(usage['capacity'])}",
            bucket="" if usage is None else f"{usage['channel']} {usage['tier']}",
            violations=whole(data["violations"]),
            last_hour=whole(data["violations_last_hour"]),
            wait_ms=whole(data["wait_left_ms"]),
            exempt=bool(data["exempt"]),
            override=bool(data["override"]),
            revoked=bool(data.get("revoked")),
            blocked=bool(data.get("blocked")),
        )

    @property
    def wait(self) -> str:
        """The rest of the advised wait, in seconds."""
        return f"{self.wait_ms / 1000:.3g} s" if self.wait_ms else "-"

    @property
    def marks(self) -> str:
        marks = (
            ("blocked", self.blocked),
            ("exempt", self.exempt),
            ("override", self.override),
            ("revoked", self.revoked),
        )
        return " ".join([mark for mark, is_set in marks if is_set])


@dataclass(frozen=True)
class HubStatus:
    """The status of a hub and its agents."""

    agents: list[AgentSummary]
    violations: int
    """In the last hour."""
    worst: list[tuple[str, int]]
    exempt: int
    rate: float
    """Checks per second."""
    denied: float
    """Share of the last minute's checks."""
    store: str
    alerts: int
    """Open ones."""
    blocked: int
    address_denials: int
    """In the last hour."""
    denied_addresses: list[tuple[str, str, int]]
    """The worst of them: address, purpose, denials."""

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "HubStatus":
        summary = data["summary"]
        return cls(
            agents=[AgentSummary.parse(one) for one in data["agents"]],
            violations=whole(summary["violations_last_hour"]),
            worst=[(str(one["agent_id"]), whole(one["violations"])) for one in summary["worst_offenders"]],
            exempt=whole(summary["exempt"]),
            rate=_number(summary["checks_per_second"]),
            denied=_number(summary["denied_share"]),
            store=str(summary["store"]),
            # A hub of an older version doesn't say these.
            alerts=whole(summary.get("open_alerts", 0)),
            blocked=whole(summary.get("blocked", 0)),
            address_denials=whole(summary.get("address_denials", 0)),
            denied_addresses=[
                (str(one["address"]), str(one["purpose"]), whole(one["denials"]))
                for one in summary.get("denied_addresses", ())
            ],
        )


class HubApi:
    """The HTTP API of a hub. `origin` says where the token comes from."""

    def __init__(self, url: str, token: str, origin: str, timeout: float = _TIMEOUT) -> None:
        from headgate.cli.bounded_http import bounded_opener  # here, for a quick start of other commands

        self.url: Final = url
        self._token, self._origin, self._timeout = token, origin, timeout
        self._opener = bounded_opener(proxies=not is_loopback(url))

    def request(self, method: str, path: str, body: object = None, **fields: type) -> dict[str, Any]:
        """Send a request and return the answer, which has fields of these types.

        `HubError` if there is none in time, or a refusal, or an answer that no hub gives.
        """
        from http.client import HTTPException
        from urllib.error import HTTPError, URLError
        from urllib.request import Request

        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = Request(self.url + path, data, headers, method=method)  # noqa: S310 - http or https, see _url
        try:
            with waiting_for(self.url), self._opener.open(request, timeout=self._timeout) as answer:
                text = answer.read(_MAX_ANSWER + 1)
        except HTTPError as error:
            with error:
                self._raise_refusal(error)
        except URLError as error:
            self._raise_unreachable(error.reason if isinstance(error.reason, Exception) else error)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a host that is none, or a proxy
            self._raise_unreachable(error)
        return self.parse(lambda: _object(text, fields))

    def parse(self, parser: Callable[[], T]) -> T:
        """Parse an answer; `HubError` if it isn't that of a headgate hub."""
        try:
            return parser()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise HubError(
                0, f"{self.url}: expected the answer of a headgate hub, got something else; is the address right?"
            ) from error

    def status(self) -> HubStatus:
        answer = self.request("GET", "/api/dashboard/state?limit=500")
        return self.parse(lambda: HubStatus.parse(answer))

    def active_agents(self, limit: int) -> list[dict[str, Any]]:
        return self._agents(f"/api/dashboard/state?limit={limit}")

    def registered_agents(self) -> Iterator[list[dict[str, Any]]]:
        """All registered agents by name, in pages. Each name comes after the last, so that there is an end."""
        names = [""]
        while page := self._agents(f"{_AGENTS}?limit={_PAGE}&after={_quoted(names[-1])}"):
            names = [names[-1], *[one["agent_id"] for one in page]]
            self.parse(partial(_check_order, names))
            yield page

    def _agents(self, path: str) -> list[dict[str, Any]]:
        answer = self.request("GET", path, agents=list)
        return self.parse(lambda: [{**one, "agent_id": str(one["agent_id"])} for one in answer["agents"]])

    def agent(self, agent: str) -> dict[str, Any]:
        return self.request("GET", _path(_AGENTS, agent), agent_id=str)

    def check(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self.request("POST", "/api/admin/check", body, outcome=str, exempt=bool, degraded=bool)

    def overrides(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The overrides of tiers, and those of sessions."""
        answer = self.request("GET", _LIMITS, overrides=dict)
        return self.parse(lambda: (answer["overrides"], dict(answer.get("session_overrides", {}))))

    def set_override(self, agent: str, limits: Mapping[str, Any]) -> dict[str, Any]:
        return self.request("PUT", _path(_LIMITS, agent), limits, override=dict)

    def remove_override(self, agent: str) -> dict[str, Any]:
        return self.request("DELETE", _path(_LIMITS, agent), override=dict)

    def exemptions(self) -> dict[str, Any]:
        return self.request("GET", _EXEMPT, agents=list)

    def add_exemption(self, agent: str) -> dict[str, Any]:
        return self.request("POST", _EXEMPT, {"agent_id": agent}, agents=list)

    def remove_exemption(self, agent: str) -> dict[str, Any]:
        return self.request("DELETE", _path(_EXEMPT, agent), agents=list)

    def store(self) -> dict[str, Any]:
        return self.request("GET", _STORE, store=str, problems=list)

    def accept_store(self, agent_data: str) -> dict[str, Any]:
        return self.request("POST", f"{_STORE}/accept", {"agent_data": agent_data}, accepted=bool)

    def violations(self) -> dict[str, Any]:
        return self.request("GET", _VIOLATIONS, agents=list)

    def reset_violations(self, agent: str) -> dict[str, Any]:
        return self.request("DELETE", _path(_VIOLATIONS, agent), reset=bool)

    def _raise_refusal(self, error: "HTTPError") -> NoReturn:
        from http.client import HTTPException

        status = error.code
        if 300 <= status < 400:
            target = printable(str(error.headers.get("Location", "elsewhere")))
            raise HubError(status, f"{self.url}: expected an answer, got a redirect to {target}; set that as --hub")
        try:
            problem = _object(error.read(_MAX_ANSWER), {})
        except (ValueError, TypeError, RecursionError, OSError, HTTPException):
            problem = {}
        detail = printable(str(problem.get("detail", ""))[:_MAX_DETAIL])
        if status == 401:
            detail = f"unknown token, from {self._origin}"
        elif status == 403:
            detail = f"{detail}; got the token from {self._origin}"
        elif not detail:  # a proxy's, or that of another server: what the status means for a hub doesn't count
            detail = f"expected the answer of a headgate hub, got HTTP status {status}; is the address right?"
            status = 0
        raise HubError(status, f"{self.url}: {detail}")

    def _raise_unreachable(self, error: Exception) -> NoReturn:
        import ssl

        if isinstance(error, ssl.SSLCertVerificationError):
            raise HubError(
                0,
                f"{self.url}: expected a trusted certificate, got: {error.verify_message}; "
                "SSL_CERT_FILE names a file with trusted authorities",
            ) from error
        if isinstance(error, TimeoutError):
            reason = f"no answer within {self._timeout:g} s"
        else:
            reason = printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        raise HubError(
            0, f"{self.url}: expected a hub that answers, got: {reason}; is it running? (--hub, {HUB_VARIABLE})"
        ) from error


def _path(path: str, agent: str) -> str:
    """The path of an agent. A name that would be another path is refused, and nothing is sent."""
    return f"{path}/{_quoted(check_path_name(agent))}"


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def add_hub_options(parser: argparse.ArgumentParser, *, viewer: bool = False, agent: bool = False) -> None:
    """Add the options for a hub's address and token; with `agent`, the argument AGENT too.

    They have no defaults: those of a subcommand would overwrite options before the subcommand.
    """
    if agent:
        parser.add_argument("agent", type=_agent_name, metavar="AGENT", help="name of the agent")
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


def hub_from(options: argparse.Namespace, *, viewer: bool = False, timeout: float = _TIMEOUT) -> HubApi:
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


def _agent_name(text: str) -> str:
    try:
        return check_path_name(text)
    except HeadgateError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None


def add_agent_command(
    commands: Commands,
    name: str,
    change: Callable[[HubApi, str], dict[str, Any]],
    text: Callable[[str, dict[str, Any]], str],
    about: str,
    description: str,
    example: str,
    *,
    notes: Callable[[dict[str, Any]], bool] = lambda _: False,
) -> None:
    """Add a command that changes an agent's state at the hub. `text` reports it, by the agent's name and the answer.

    Where `notes` is true for the answer, a note says so if no agent of that name is registered: it may be misspelt.
    """

    def run(options: argparse.Namespace) -> int:
        hub, agent = hub_from(options), options.agent
        answer = change(hub, agent)
        if options.json:
            print_json(answer)
            return 0
        print(hub.parse(lambda: text(printable(agent), answer)))
        if notes(answer):
            note_unregistered(hub, agent)
        return 0

    add_hub_options(add_command(commands, name, run, about, description, example, json=True), agent=True)


def note_unregistered(hub: HubApi, agent: str) -> None:
    """Print a note if no agent of that name is registered. Letters that look like others can be told apart in it."""
    try:
        hub.agent(agent)
    except HubError as error:
        if error.status == 404:
            escaped = "" if agent.isascii() else f" ({agent.encode('ascii', 'backslashreplace').decode()})"
            print_error(f"note: no agent named {printable(agent)}{escaped} is registered")


# Answers, which may be anything: `HubApi.parse` turns these errors into a `HubError` ----------------------------------


def _object(text: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """An object with fields of these types, in which nothing is too deep or too large to be printed."""
    if len(text) > _MAX_ANSWER:
        raise ValueError
    numbers: Any = {"parse_int": _parse_int, "parse_float": _parse_float, "parse_constant": _parse_float}
    found = json.loads(text, **numbers)
    if not isinstance(found, dict) or not all([isinstance(found[name], kind) for name, kind in fields.items()]):
        raise TypeError
    level = [found]
    for _ in range(_MAX_DEPTH):
        level = [below for one in level for below in _below(one)]
    if level:
        raise ValueError
    return found


def _below(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _parse_int(text: str) -> int:
    return int(_bounded(int(text)))


def _parse_float(text: str) -> float:
    return _bounded(float(text))


def _bounded(number: float) -> float:
    if not -_MAX_NUMBER <= number <= _MAX_NUMBER:  # nor is NaN
        raise ValueError
    return number


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError
    return value


def whole(value: Any) -> int:
    """A number of an answer, without its fraction."""
    return int(_number(value))


def _check_order(names: Sequence[str]) -> None:
    if not all([earlier < later and len(later) <= MAX_AGENT for earlier, later in pairwise(names)]):
        raise ValueError
