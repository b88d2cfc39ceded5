"""Client of a hub's HTTP API, built on the standard library alone."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import quote

from headgate.cli.answers import MAX_ANSWER, number, parse_object, seconds, whole
from headgate.cli.terminal import waiting_for
from headgate.client.url import is_loopback
from headgate.errors import HeadgateError, printable
from headgate.gate.policy import MAX_AGENT
from headgate.hub.agents.names import check_path_name

if TYPE_CHECKING:
    from urllib.error import HTTPError

HUB_VARIABLE: Final = "HEADGATE_HUB"
TIMEOUT: Final = 10.0  # seconds for a request and its answer

_MAX_DETAIL: Final = 1000  # characters of an error that are shown
_PAGE: Final = 100  # agents, chat channels or accounts per request
_MOST_LISTED: Final = 1_000_000  # bound against a faulty server

_ADMIN: Final = "/api/admin"
_AGENTS: Final = f"{_ADMIN}/agents"
_ADMINS: Final = f"{_ADMIN}/admins"
_LIMITS: Final = f"{_ADMIN}/rate-limits"
_EXEMPT: Final = f"{_LIMITS}/whitelist"
_VIOLATIONS: Final = f"{_ADMIN}/violations"
_STORE: Final = f"{_ADMIN}/store"
_CHANNELS: Final = "/api/channels"
_ACCOUNTS: Final = f"{_ADMIN}/accounts"
_ACCOUNT_DEFAULTS: Final = f"{_ADMIN}/account-defaults"
_MOST_ACCOUNTS: Final = 10_000  # that are listed

T = TypeVar("T")


class HubError(HeadgateError):
    """A hub didn't answer (`status` is 0), or refused a request."""

    def __init__(self, status: int, text: str, code: str = "") -> None:
        """`code` is the hub's word for the error."""
        self.status: Final = status
        self.code: Final = code
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
    denied_by_account: bool

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "AgentSummary":
        usage = data["usage"]
        return cls(
            name=str(data["agent_id"]),
            connected=bool(data["connected"]),
            used=None if usage is None else number(usage["used"]),
            left="" if usage is None else f"{whole(usage['remaining'])}/{whole(usage['capacity'])}",
            bucket="" if usage is None else f"{usage['channel']} {usage['tier']}",
            violations=whole(data["violations"]),
            last_hour=whole(data["violations_last_hour"]),
            wait_ms=whole(data["wait_left_ms"]),
            exempt=bool(data["exempt"]),
            override=bool(data["override"]),
            revoked=bool(data.get("revoked")),
            blocked=bool(data.get("blocked")),
            denied_by_account=bool(data.get("denied_by_account")),
        )

    @property
    def wait(self) -> str:
        """The rest of the advised wait, in seconds."""
        return seconds(self.wait_ms) if self.wait_ms else "-"

    @property
    def marks(self) -> str:
        marks = (
            ("blocked", self.blocked),
            ("denied-by-account", self.denied_by_account),
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
            rate=number(summary["checks_per_second"]),
            denied=number(summary["denied_share"]),
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

    def __init__(self, url: str, token: str, origin: str, timeout: float = TIMEOUT) -> None:
        from headgate.cli.bounded_http import bounded_opener  # here, for a quick start of other commands

        self.url: Final = url
        self._token, self._origin, self._timeout = token, origin, timeout
        self._opener = bounded_opener(proxies=not is_loopback(url))

    def request(self, method: str, path: str, body: object = None, **fields: type) -> dict[str, Any]:
        """Send a request and return the answer, which has fields of these types. A body of bytes is JSON already.

        `HubError` if there is none in time, or a refusal, or an answer that no hub gives.
        """
        text = self._send(method, path, body, "application/json")
        return self.parse(lambda: parse_object(text, fields))

    def _send(self, method: str, path: str, body: object, accept: str) -> bytes:
        from http.client import HTTPException
        from urllib.error import HTTPError, URLError
        from urllib.request import Request

        headers = {"Authorization": f"Bearer {self._token}", "Accept": accept}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = Request(self.url + path, data, headers, method=method)  # noqa: S310 - http or https, see hub_options
        try:
            with waiting_for(self.url), self._opener.open(request, timeout=self._timeout) as answer:
                found: bytes = answer.read(MAX_ANSWER + 1)
                return found
        except HTTPError as error:
            with error:
                self._raise_refusal(error)
        except URLError as error:
            self._raise_unreachable(error.reason if isinstance(error.reason, Exception) else error)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a host that is none, or a proxy
            self._raise_unreachable(error)

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
        answer = self.request("GET", f"/api/dashboard/state?limit={limit}", agents=list)
        return self.parse(lambda: [{**one, "agent_id": str(one["agent_id"])} for one in answer["agents"]])

    def registered_agents(self) -> Iterator[dict[str, Any]]:
        """All registered agents by name."""
        return self._listed("agents", f"{_AGENTS}?limit={_PAGE}", "agents", "agent_id", _check_order)

    def agent(self, agent: str) -> dict[str, Any]:
        return self.request("GET", _path(_AGENTS, agent), agent_id=str)

    def register(self, agent: str, **account: str) -> dict[str, Any]:
        """`account`: the account that it belongs to, and its plan."""
        return self.request("POST", _AGENTS, {"agent_id": agent, **account}, token=str)

    def rotate(self, agent: str) -> dict[str, Any]:
        return self.request("POST", _path(_AGENTS, agent, "token"), token=str)

    def revoke(self, agent: str) -> dict[str, Any]:
        return self.request("DELETE", _path(_AGENTS, agent, "token"), revoked=bool)

    def invite(self, **account: str) -> dict[str, Any]:
        """`account`: as in `register`, of the agent that uses it."""
        return self.request("POST", f"{_ADMIN}/invitations", account or None, invitation=str)

    def block(self, agent: str, until: float | None, reason: str) -> dict[str, Any]:
        return self.request("PUT", _path(_AGENTS, agent, "block"), {"until": until, "reason": reason}, blocked=bool)

    def unblock(self, agent: str) -> dict[str, Any]:
        return self.request("DELETE", _path(_AGENTS, agent, "block"), blocked=bool)

    def disconnect(self, agent: str) -> dict[str, Any]:
        return self.request("POST", _path(_AGENTS, agent, "disconnect"), connections=int)

    def set_role(self, agent: str, role: str) -> dict[str, Any]:
        return self.request("PUT", _path(_AGENTS, agent, "role"), {"role": role}, role=str)

    def remove_role(self, agent: str) -> dict[str, Any]:
        return self.request("DELETE", _path(_AGENTS, agent, "role"), role=str)

    def admins(self) -> dict[str, Any]:
        return self.request("GET", _ADMINS, admins=list)

    def add_admin(self, name: str, role: str) -> dict[str, Any]:
        return self.request("POST", _ADMINS, {"name": name, "role": role}, token=str)

    def remove_admin(self, name: str) -> dict[str, Any]:
        return self.request("DELETE", _path(_ADMINS, name), revoked=bool)

    def check(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self.request("POST", f"{_ADMIN}/check", body, outcome=str, exempt=bool, degraded=bool)

    def overrides(self) -> dict[str, Any]:
        """The overrides of tiers, and those of sessions."""
        answer = self.request("GET", _LIMITS, overrides=dict)
        sessions = self.parse(lambda: dict(answer.get("session_overrides", {})))
        return {"overrides": answer["overrides"], "session_overrides": sessions}

    def set_override(self, agent: str, limits: Mapping[str, Any]) -> dict[str, Any]:
        return self.request("PUT", _path(_LIMITS, agent), limits, override=dict)

    def remove_override(self, agent: str) -> dict[str, Any]:
        return self.request("DELETE", _path(_LIMITS, agent), override=dict)

    def defaults(self) -> dict[str, Any]:
        """The limits by channel and tier, and that of sessions."""
        return _defaults(self.request("GET", _LIMITS, defaults=dict, session=str))

    def set_defaults(self, limits: Mapping[str, Any]) -> dict[str, Any]:
        return _defaults(self.request("PUT", f"{_LIMITS}/defaults", limits, defaults=dict, session=str))

    def reset_defaults(self, tier: str | None = None) -> dict[str, Any]:
        path = f"{_LIMITS}/defaults" + ("" if tier is None else f"/{_quoted(tier)}")
        return _defaults(self.request("DELETE", path, defaults=dict, session=str))

    def policy(self) -> dict[str, Any]:
        return self.request("GET", f"{_ADMIN}/policy", values=list, overruled=list)

    def reload(self) -> dict[str, Any]:
        return self.request("POST", f"{_ADMIN}/reload", reloaded=bool, waits_for_restart=list, overruled=list)

    def changes(self, limit: int) -> dict[str, Any]:
        return self.request("GET", f"{_ADMIN}/changes?limit={limit}", changes=list)

    def set_log_level(self, level: str) -> dict[str, Any]:
        return self.request("PUT", f"{_ADMIN}/log-level", {"level": level}, level=str)

    def exemptions(self) -> dict[str, Any]:
        return self.request("GET", _EXEMPT, agents=list)

    def replace_exemptions(self, agents: Sequence[str]) -> dict[str, Any]:
        return self.request("PUT", _EXEMPT, {"agents": agents}, agents=list)

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

    def alerts(self, limit: int, *, only_open: bool) -> dict[str, Any]:
        query = f"limit={limit}" + ("&open=true" if only_open else "")
        return self.request("GET", f"{_ADMIN}/alerts?{query}", alerts=list, open=int)

    def addresses(self) -> dict[str, Any]:
        return self.request("GET", f"{_ADMIN}/addresses", addresses=list)

    def tasks(self, limit: int, **query: str) -> dict[str, Any]:
        """The newest tasks. `query`: in a `state`, or created `before` another task."""
        more = "".join([f"&{name}={_quoted(value)}" for name, value in query.items()])
        return self.request("GET", f"{_ADMIN}/tasks?limit={limit}{more}", tasks=list)

    def push_task(self, payload: str) -> dict[str, Any]:
        """Push a task with a payload in JSON, which is sent as it is."""
        return self.request("POST", f"{_ADMIN}/tasks", b'{"payload": %b}' % payload.encode(), task_id=str)

    def write_signal(self, agent: str, signal: Any, session: str | None) -> dict[str, Any]:
        body = {"agent_id": agent, "signal": signal, "session": session}
        return self.request("POST", f"{_ADMIN}/signals", body, number=int)

    def chat_channels(self) -> Iterator[dict[str, Any]]:
        """All chat channels by name."""
        path = f"{_CHANNELS}?limit={_PAGE}"
        return self._listed("chat channels", path, "channels", "name", _check_order, more=bool)

    def _listed(
        self,
        what: str,
        path: str,
        items: str,
        name: str,
        check: Callable[[Sequence[str]], None],
        **fields: type,
    ) -> Iterator[dict[str, Any]]:
        """The items of a list, which have a name, from as many pages as it takes. `fields`: what else a page has.

        Each page comes after the last name of the one before. The last one says that there are no `more`, or is empty.
        """
        names, more, listed = [""], True, 0
        while more:
            answer = self.request("GET", f"{path}&after={_quoted(names[-1])}", **{items: list}, **fields)
            names = [names[-1], *self.parse(partial(_names, answer[items], name))]
            more = answer.get("more", True) and len(names) > 1
            self.parse(partial(check, names))
            listed += len(answer[items])
            if listed > _MOST_LISTED:
                raise HeadgateError(f"{self.url}: expected at most {_MOST_LISTED:,} {what}, got more")
            yield from answer[items]

    def accounts(self, within: str = "", most: int = _MOST_ACCOUNTS) -> list[dict[str, Any]]:
        """All accounts above the agents, each before those below it; at most so many."""
        path = f"{_ACCOUNTS}?limit={_PAGE}&within={_quoted(within)}"
        return list(islice(self._listed("accounts", path, "accounts", "path", _check_tree, more=bool), most))

    def account(self, path: str) -> dict[str, Any]:
        return self.request("GET", f"{_ACCOUNTS}/{_quoted(path)}", plan=str, limits=list)

    def set_account(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self.request("PUT", f"{_ACCOUNTS}/{_quoted(path)}", body, plan=str, limits=list)

    def reset_account(self, path: str) -> dict[str, Any]:
        return self.request("DELETE", f"{_ACCOUNTS}/{_quoted(path)}", plan=str, limits=list)

    def account_defaults(self) -> dict[str, Any]:
        return self.request("GET", _ACCOUNT_DEFAULTS, levels=list, level_limits=dict, plans=dict)

    def set_account_defaults(self, kind: str, name: str, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Limits of a level or a plan; `kind` is "levels" or "plans"."""
        path = f"{_ACCOUNT_DEFAULTS}/{kind}/{_quoted(name)}"
        return self.request("PUT", path, limits, levels=list, level_limits=dict, plans=dict)

    def reset_account_defaults(self, kind: str, name: str) -> dict[str, Any]:
        path = f"{_ACCOUNT_DEFAULTS}/{kind}/{_quoted(name)}"
        return self.request("DELETE", path, levels=list, level_limits=dict, plans=dict)

    def set_agent_account(self, agent: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self.request("PUT", _path(_AGENTS, agent, "account"), body, account=str, plan=str)

    def account_holds(self, path: str, limit: int) -> dict[str, Any]:
        return self.request("GET", f"{_ACCOUNTS}/{_quoted(path)}/holds?limit={limit}", holds=list, more=bool)

    def cancel_hold(self, agent: str, hold_id: str) -> dict[str, Any]:
        return self.request("POST", f"/v1/holds/{_quoted(hold_id)}/cancel?agent={_quoted(agent)}", state=str)

    def usage(self, query: Mapping[str, str]) -> dict[str, Any]:
        return self.request("GET", f"{_ADMIN}/usage{_query(query)}", by=list, totals=list)

    def usage_csv(self, query: Mapping[str, str]) -> str:
        text = self._send("GET", f"{_ADMIN}/usage.csv{_query(query)}", None, "text/csv")
        return self.parse(lambda: _bounded_text(text))

    def delete_chat_channel(self, name: str) -> dict[str, Any]:
        return self.request("DELETE", f"{_CHANNELS}/{_quoted(name)}", name=str)

    def _raise_refusal(self, error: "HTTPError") -> NoReturn:
        from http.client import HTTPException

        status = error.code
        if 300 <= status < 400:
            target = printable(str(error.headers.get("Location", "elsewhere")))
            raise HubError(status, f"{self.url}: expected an answer, got a redirect to {target}; set that as --hub")
        try:
            problem = parse_object(error.read(MAX_ANSWER), {})
        except (ValueError, TypeError, RecursionError, OSError, HTTPException):
            problem = {}
        lines = str(problem.get("detail", ""))[:_MAX_DETAIL].split("\n")  # several mistakes have a line each
        detail = "; ".join([printable(line.strip()) for line in lines])
        if status == 401:
            detail = f"unknown token, from {self._origin}"
        elif status == 403:
            detail = f"{detail}; got the token from {self._origin}"
        elif not detail or "error" not in problem:  # a proxy's, or another server's: no status of a hub
            detail = f"expected the answer of a headgate hub, got HTTP status {status}; is the address right?"
            status = 0
        raise HubError(status, f"{self.url}: {detail}", str(problem.get("error", "")))

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


def _path(path: str, agent: str, *below: str) -> str:
    """The path of an agent. A name that would be another path is refused, and nothing is sent."""
    name = check_path_name(agent, beside_routes=path not in (_AGENTS, _ADMINS))
    return "/".join([path, _quoted(name), *below])


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def _query(query: Mapping[str, str]) -> str:
    return "?" + "&".join([f"{name}={_quoted(value)}" for name, value in query.items()]) if query else ""


def _bounded_text(text: bytes) -> str:
    if len(text) > MAX_ANSWER or text.startswith(b"<"):  # a page of another server
        raise ValueError
    return text.decode()


def _check_tree(paths: Sequence[str]) -> None:
    if not all([earlier.split("/") < later.split("/") for earlier, later in pairwise(paths)]):
        raise ValueError


def _defaults(answer: dict[str, Any]) -> dict[str, Any]:
    """The part of an answer about all limits that isn't about single agents."""
    return {"defaults": answer["defaults"], "session": answer["session"]}


def _names(items: list[dict[str, Any]], name: str) -> list[str]:
    return [str(one[name]) for one in items]


def _check_order(names: Sequence[str]) -> None:
    if not all([earlier < later and len(later) <= MAX_AGENT for earlier, later in pairwise(names)]):
        raise ValueError
