"""The flows of the clients for holds: requests, pauses, and the meaning of the hub's answers."""

import logging
from collections.abc import Mapping
from decimal import Decimal
from random import Random
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypedDict, TypeVar
from urllib.parse import quote

from headgate.client.backoff import ReconnectBackoff
from headgate.client.outbox import LONGEST_REASON, Refused
from headgate.client.url import checked_token, is_hub_url
from headgate.errors import HeadgateError, HoldError, UnknownHold, refuse, refuse_option
from headgate.flow import Flow
from headgate.gate.account_status import AccountStatus, LimitStatus
from headgate.gate.accounts import Bound
from headgate.http import parse_retry_after
from headgate.lifecycle import new_lock
from headgate.limits.clock import Clock, MonotonicClock
from headgate.limits.numbers import Number, microseconds
from headgate.limits.units import amount_text

if TYPE_CHECKING:
    import httpx

Costs: TypeAlias = Mapping[str, int | float | str | Decimal]
"""Costs by resource, such as {"tokens": 1200, "usd": "0.03"}."""

_SECOND: Final = 1_000_000
_AGAIN: Final = (408, 425, 502, 503, 504)  # statuses after which a request is repeated
_USE_LOCK: Final = new_lock()  # one for all: it is held for an addition

_log: Final = logging.getLogger("headgate.client")


class HoldDenied(HeadgateError):
    """A hold was denied, or the program makes too many requests: then no account is named."""

    def __init__(self, detail: str, retry_after_ms: int | None, bound: Bound | None = None) -> None:
        self.detail: Final = detail
        self.retry_after_ms: Final = retry_after_ms
        """Milliseconds until a retry can pass; None if no wait would help."""
        self.bound: Final = bound
        """The account, resource and tool that decided."""
        super().__init__(f"rate limited: {detail}")


class HubUnavailable(HeadgateError):
    """The hub couldn't be reached, or couldn't decide, for as long as the client tries. Perhaps it has done it."""


class SendRequest(NamedTuple):
    """A step: send a request, and return the response, or why there is none."""

    method: str
    path: str
    body: dict[str, Any] | None
    seconds: float
    """For the response."""


class Pause(NamedTuple):
    """A step: wait."""

    microseconds: int


Step: TypeAlias = SendRequest | Pause


class HoldClientOptions(TypedDict, total=False):
    """The options of both clients."""

    agent: str | None
    """For admins: the agent that holds."""
    retry_within: Number
    """Seconds for which a request is repeated that got no answer, or that the hub can't decide: 30."""
    answer_within: Number
    """Seconds for one answer: 10, and the `timeout` of a hold."""
    clock: Clock | None
    random: Random | None


class HoldClientFlows:
    """The base of both clients."""

    def __init__(self, url: str, token: str, options: "HoldClientOptions") -> None:
        if not is_hub_url(url, ("http", "https")):
            refuse("url", "the address of a hub, such as http://localhost:8080", url)
        for name in options:
            if name not in HoldClientOptions.__annotations__:
                refuse_option(type(self).__name__, HoldClientOptions.__annotations__, name, see="docs/clients.md")
        self.url: Final = url.rstrip("/")
        self.agent: Final = options.get("agent")
        self._retry_within: Final = microseconds("retry_within", options.get("retry_within", 30))
        self._answer_within: Final = microseconds("answer_within", options.get("answer_within", 10)) / _SECOND
        self._clock: Final = options.get("clock") or MonotonicClock()
        self._backoff: Final = ReconnectBackoff(options.get("random") or Random())  # noqa: S311 - no secret
        self._headers: Final = {"Authorization": f"Bearer {checked_token(token)}"}

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, hold_id: str = "", wait: float = 0
    ) -> Flow[Step, Any]:
        """Send a request until it is answered: again after a lost connection, and while the hub can't decide."""
        end, failures = self._clock.now() + self._retry_within, 0
        while True:
            response: httpx.Response | str = yield SendRequest(method, path, body, self._answer_within + wait)
            asked: int | None = None
            if isinstance(response, str):
                error: Exception = HubUnavailable(f"{self.url}: {response}")
            elif response.is_success:
                return _answer(response)
            else:
                error = _error(response, self.agent or "this agent", hold_id)
                own = isinstance(error, HoldDenied) and error.bound is None and error.retry_after_ms is not None
                again = own or response.status_code in _AGAIN
                if not again:
                    raise error
                asked = (parse_retry_after(response.headers.get("retry-after", "")) or 0) * _SECOND
            failures += 1
            pause = self._backoff.pause(failures, asked)
            if self._clock.now() + pause > end:
                raise error
            yield Pause(pause)

    def _find(self, hold_id: str) -> Flow[Step, Any]:
        return (yield from self._call("GET", self._path(hold_id), hold_id=hold_id))

    def _change(self, hold_id: str, verb: str, body: dict[str, Any] | None = None) -> Flow[Step, Any]:
        """A verb of a hold."""
        return (yield from self._call("POST", self._path(hold_id, f"/{verb}"), body, hold_id=hold_id))

    def _path(self, hold_id: str, verb: str = "") -> str:
        agent = "" if self.agent is None else f"?agent={quote(self.agent, safe='')}"
        return f"/v1/holds/{quote(hold_id, safe='')}{verb}{agent}"

    def _make(
        self,
        costs: Costs,
        session: str | int | None,
        tool: str | None,
        lease: Number | None,
        timeout: Number,
        hold_id: str,
    ) -> Flow[Step, Any]:
        wait = microseconds("timeout", timeout) / _SECOND
        body: dict[str, Any] = {"id": hold_id, "costs": _written(costs), "timeout": wait}
        seconds = None if lease is None else float(lease)
        given = {"agent": self.agent, "session": session, "tool": tool, "lease": seconds}
        body |= {name: value for name, value in given.items() if value is not None}
        return (yield from self._call("POST", "/v1/holds", body, hold_id=hold_id, wait=wait))

    def _read_account(self, path: str) -> Flow[Step, AccountStatus]:
        found = yield from self._call("GET", f"/v1/accounts/{quote(path, safe='')}")
        level = str(found["level"])
        limits = []
        for one in found["limits"]:
            amount, spent, held, left = [Decimal(one[name]) for name in ("amount", "spent", "held", "left")]
            what = path, level, one["resource"], one["tool"], one["limit"]
            limits.append(LimitStatus(*what, amount, spent, held, left, one["resets_after"]))
        return AccountStatus(found["path"], level, found["plan"], tuple(limits))

    def _request(self, step: SendRequest) -> dict[str, Any]:
        """The arguments of a request to httpx."""
        url = f"{self.url}{step.path}"
        return {
            "method": step.method,
            "url": url,
            "headers": self._headers,
            "json": step.body,
            "timeout": step.seconds,
        }


def _json(response: "httpx.Response") -> dict[str, Any] | None:
    """The object that a response has as its body; None for anything else."""
    try:
        found = response.json()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _answer(response: "httpx.Response") -> dict[str, Any]:
    found = _json(response)
    if found is None:
        raise HubUnavailable(f"{response.url}: expected the answer of a headgate hub, got something else")
    return found


def _error(response: "httpx.Response", agent: str, hold_id: str) -> Exception:
    """The error that a response means."""
    found = _json(response) or {}
    code = str(found.get("error", f"status_{response.status_code}"))
    detail = str(found.get("detail", ""))[:LONGEST_REASON]
    if code == "rate_limited" and response.status_code == 429:
        wait = found.get("retry_after_ms")
        if found.get("no_wait_helps") is True:
            wait = None
        elif not isinstance(wait, int):
            wait = 1000
        bound = Bound(*[str(found.get(name, "")) for name in Bound._fields]) if found.get("account") else None
        return HoldDenied(detail, wait, bound)
    if response.status_code in _AGAIN:
        return HubUnavailable(f"{code}: {detail}")
    if response.status_code == 404 and code == "unknown_hold":
        return UnknownHold(agent, hold_id)
    return HoldError(detail) if code == "hold_error" else Refused(code, detail)


def _amount(where: str, cost: object) -> Decimal:
    """A cost; a float is the decimal that it prints."""
    if isinstance(cost, bool) or not isinstance(cost, (int, float, str, Decimal)):
        refuse(where, "a number", cost)
    try:
        found = Decimal(repr(cost) if isinstance(cost, float) else cost)
    except ArithmeticError:
        refuse(where, "a number", cost)
    if not found.is_finite() or found < 0:
        refuse(where, "a number, 0 or more", cost)
    return found


def _amounts(costs: Costs) -> dict[str, Decimal]:
    if not isinstance(costs, Mapping):
        refuse("costs", 'costs by resource, such as {"tokens": 1200, "usd": "0.03"}', costs)
    return {resource: _amount(f"cost of {resource}", cost) for resource, cost in costs.items()}


def _written(costs: Costs) -> dict[str, str]:
    return {resource: amount_text(amount) for resource, amount in _amounts(costs).items()}


AnyClient = TypeVar("AnyClient", bound=HoldClientFlows)


class ClientHoldFlows(Generic[AnyClient]):
    """The base of both holds."""

    def __init__(self, client: AnyClient, answer: dict[str, Any], lease: Number | None, max_age: float | None) -> None:
        self._client: Final = client
        self._max_age: Final = max_age
        self._began: Final = client._clock.now()
        self._used: dict[str, Decimal] = {}
        self._lost = False
        self._note(answer)
        left = (self._ends - self._began) / _SECOND  # what the hub grants, if nothing else was asked for
        self._lease: Final = max(left, 1.0) if lease is None else float(lease)

    def _note(self, answer: Any) -> None:
        try:
            self.id = str(answer["id"])
            """The id, by which another process can settle it."""
            self.state = str(answer["state"])
            """ "open", "settled", "cancelled" or "expired", when the hub was asked last."""
            self.costs = {str(name): Decimal(cost) for name, cost in answer["costs"].items()}
            """The reserved or settled costs, by resource."""
            self.account = str(answer["account"])
            """The path of the agent when the hold was made."""
            bound = answer["bound"]
            self.bound = None if bound is None else Bound(bound["account"], bound["resource"], bound["tool"])
            """The limit with the smallest share left."""
            self._ends = self._client._clock.now() + round(answer["lease_left"] * _SECOND)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            reason = f"expected the hold of a headgate hub, got: {error!r}"
            raise HubUnavailable(f"{self._client.url}: {reason}") from error

    @property
    def lost(self) -> bool:
        """Whether its lease has ended, or it was forgotten, while it was in use."""
        return self._lost

    def use(self, costs: Costs) -> None:
        """Add to what the settlement counts, from any thread. It is a sum in this process."""
        more = _amounts(costs)
        with _USE_LOCK:
            used = self._used
            self._used = {**used, **{name: used.get(name, Decimal(0)) + amount for name, amount in more.items()}}

    def _settle(self, costs: Costs | None) -> Flow[Step, None]:
        counted = self._used if costs is None else {**self._used, **_amounts(costs)}
        body = {"costs": _written(counted)} if counted else {}
        self._note((yield from self._client._change(self.id, "settle", body)))

    def _cancel(self) -> Flow[Step, None]:
        self._note((yield from self._client._change(self.id, "cancel")))

    def _extend(self, costs: Costs | None, lease: Number | None) -> Flow[Step, None]:
        body: dict[str, Any] = {} if lease is None else {"lease": float(lease)}
        if costs is not None:  # in total, so that it can be repeated
            more = _amounts(costs)
            body["total"] = _written({name: self.costs.get(name, Decimal(0)) + cost for name, cost in more.items()})
        self._note((yield from self._client._change(self.id, "extend", body)))

    def _end_block(self, failed: bool) -> Flow[Step, None]:
        """End the block: settled, or expired if it has failed; with what was used, if that is more than is reserved."""
        try:
            if not failed:
                yield from self._settle(None)
            elif any(self.costs.get(name, Decimal(0)) < used for name, used in self._used.items()):
                most = {name: max(self.costs.get(name, used), used) for name, used in self._used.items()}
                yield from self._settle(most)
            else:
                yield from self._extend(None, 0)
        except UnknownHold:
            self._lost = True
            _log.warning("hold %r was forgotten before it was settled", self.id)
        except HeadgateError as error:
            if not failed:
                raise
            _log.warning("hold %r was not ended: %s", self.id, error)  # the error of the block is the one to raise

    def _renew_lease(self) -> Flow[Step, None]:
        """Renew the lease until it is lost, or the block has run for too long."""
        client, interval = self._client, max(round(self._lease * _SECOND / 3), 1)
        while True:
            yield Pause(interval)
            if self._max_age is not None and client._clock.now() - self._began >= self._max_age * _SECOND:
                return
            try:
                yield from self._extend(None, self._lease)
            except HoldError:
                self._lost = True
                return
            except HeadgateError as error:  # perhaps the hub is back before the lease ends
                _log.warning("the lease of hold %r can't be renewed: %s", self.id, error)
                if client._clock.now() >= self._ends:
                    self._lost = True
                    return

    def _check_open(self) -> None:
        if self.state != "open":
            raise HoldError(f"hold {self.id!r}: expected an open one for a block, got one that is {self.state}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self.state})"
